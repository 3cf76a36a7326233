"""The first minute on a GPU: do the kernels compute, in bfloat16, what float64 computes?

    python studies/smoke.py                       # a minute; exit code 1 if anything is wrong
    TRITON_INTERPRET=1 python studies/smoke.py    # without a GPU: small sizes, in the interpreter

Each operation's results and gradients are compared with float64; PyTorch's error in the same dtype
stands beside. Then eight compiled training steps of preset gpu are compared with plain PyTorch's
(on a GPU only). --json writes a JSON object for each line of errors in place of the line.
"""

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/smoke.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch

import bench
import mdlm
from nanomdlm.kernels import launch
from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels.reference import block_spans, document_spans, window_spans
from nanomdlm.support.cli import devices
from nanomdlm.support.errors import UserError

STEPS = 8  # the last ones are CUDA graphs
SMALL = {torch.float32: 5e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}
INTERPRETED = launch.INTERPRET and not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"


def relative(x, exact):
    return ((x.double() - exact.double()).norm() / exact.double().norm()).item()


def compare(name, results, plain, exact, dtype):
    """Print the errors; whether each is at most twice that of plain PyTorch, or small."""
    errors = {}
    theirs = {}
    for output in exact:
        errors[output] = relative(results[output], exact[output])
        theirs[output] = relative(plain[output], exact[output])
    wrong = [k for k in exact if not errors[k] <= 2 * theirs[k] + SMALL[dtype]]
    say(name, errors, theirs, wrong)
    return not wrong


def say(name, errors, theirs, wrong):
    """Print relative errors by output, ours and PyTorch's; wrong: outputs that are too far off."""
    for output, error in errors.items():
        mark = "  WRONG" if output in wrong else ""
        print(f"{name:44} {output:5} {error:.2e} (PyTorch {theirs[output]:.2e}){mark}", flush=True)


def attention(dtype, B, T, H, D, spans=None, name=""):
    g = torch.Generator(DEVICE).manual_seed(0)
    qkv, grad = (
        torch.randn(*size, generator=g, device=DEVICE).to(dtype)
        for size in ((B, T, 3, H, D), (B, T, H, D))
    )

    def run(f, dtype):
        x = qkv.to(dtype).requires_grad_()
        out = f(x, spans=spans)
        dq, dk, dv = torch.autograd.grad(out, x, grad.to(dtype))[0].unbind(2)
        return dict(out=out.detach(), dq=dq, dk=dk, dv=dv)

    ref = kernels.attention_ref
    results = run(kernels.attention, dtype), run(ref, dtype), run(ref, torch.float64)
    return compare(f"attention T={T} D={D} {str(dtype)[6:]} {name}".strip(), *results, dtype)


def grouped_attention(dtype, B, T, H, G, D, spans=None, name=""):
    g = torch.Generator(DEVICE).manual_seed(0)
    *inputs, grad = (
        torch.randn(B, T, n, D, generator=g, device=DEVICE).to(dtype) for n in (H, G, G, H)
    )

    def run(f, dtype):
        x = [each.to(dtype).requires_grad_() for each in inputs]
        out = f(*x, spans=spans)
        gradients = torch.autograd.grad(out, x, grad.to(dtype))
        return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))

    ref = kernels.grouped_attention_ref
    results = run(kernels.grouped_attention, dtype), run(ref, dtype), run(ref, torch.float64)
    title = f"grouped attention T={T} D={D} {str(dtype)[6:]} {name}".strip()
    return compare(title, *results, dtype)


def head(dtype, M, C, V):
    g = torch.Generator(DEVICE).manual_seed(0)
    h, W = (torch.randn(n, C, generator=g, device=DEVICE).to(dtype) for n in (M, V))
    targets = torch.randint(V, (M,), generator=g, device=DEVICE)
    weights = torch.rand(M, generator=g, device=DEVICE) / M
    weights[-M // 8 :] = 0  # rows of padding

    def run(f, dtype):
        x, y = h.to(dtype).requires_grad_(), (W / C**0.5).to(dtype).requires_grad_()
        loss = f(x, y, targets, weights)
        dh, dW = torch.autograd.grad(loss, (x, y))
        return dict(loss=loss.detach(), dh=dh, dW=dW)

    def exact(h, W, targets, weights):
        ce = torch.nn.functional.cross_entropy(h @ W.T, targets, reduction="none")
        return (ce * weights).sum()

    results = run(kernels.linear_cross_entropy, dtype), run(kernels.linear_cross_entropy_ref, dtype)
    return compare(f"head V={V} {str(dtype)[6:]}", *results, run(exact, torch.float64), dtype)


def norm_conv(dtype, B, T, C):
    g = torch.Generator(DEVICE).manual_seed(0)
    x, grad = (torch.randn(B, T, C, generator=g, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(5, C, generator=g, device=DEVICE) / 2

    def run(f, dtype):
        inputs = x.to(dtype).requires_grad_(), weight.to(torch.promote_types(dtype, torch.float32))
        inputs[1].requires_grad_()
        y = f(*inputs)
        dx, dw = torch.autograd.grad(y, inputs, grad.to(dtype))
        return dict(y=y.detach(), dx=dx, dw=dw)

    ref = kernels.norm_conv_ref
    results = run(kernels.norm_conv, dtype), run(ref, dtype), run(ref, torch.float64)
    return compare(f"norm and convolution C={C} {str(dtype)[6:]}", *results, dtype)


def masking(B, T):
    case = bench.masking(torch.device(DEVICE), B, T)
    results, exact = (case.contestants["mdlm"](False, *case.inputs(3)), case.exact(*case.inputs(3)))
    different = sum((r != e).sum().item() for r, e in zip(results, exact, strict=True))
    say(f"masks B={B} T={T}", dict(ids=different), dict(ids=0), ["ids"] * bool(different))
    return not different


def losses(name):
    """Those of eight compiled steps of preset gpu on random tokens."""
    device = torch.device("cuda")
    config = mdlm.Config(**mdlm.PRESETS["gpu"] | dict(preset="gpu", vocab_size=65, dropout=0.0))
    with tempfile.TemporaryDirectory() as folder:
        bench.write_tokens(folder, 65)
        dtype = devices.pick_dtype("auto", device)
        run = bench.start_run(config, folder, device, dtype, name, True)
        for step in range(STEPS):
            mdlm.train_step(run, step, progress=0.75)
        values = torch.stack([*run.pending.values()]).cpu()
    return values


def interpreted():
    """Compare each operation at small sizes in Triton's interpreter; whether all are right."""
    B, T = 2, 48
    ends = torch.rand(B, T) < 0.1
    ok = masking(4, 64) & masking(2, 5)
    for dtype in (torch.float32, torch.float16):  # the interpreter multiplies bfloat16 wrongly
        ok &= head(dtype, 40, 32, 65) & head(dtype, 24, 32, 1000)
        ok &= norm_conv(dtype, 2, 24, 64)
        ok &= attention(dtype, B, T, 1, 32) & attention(dtype, B, 33, 1, 64)
        ok &= attention(dtype, B, T, 1, 32, document_spans(ends), "documents")
        ok &= attention(dtype, B, T, 1, 32, block_spans(T // 2, 4, "cpu"), "blocks")
        ok &= grouped_attention(dtype, B, 33, 2, 1, 128, window_spans(None, 5, 33, "cpu"), "window")
    return ok


def compare_dtype(dtype):
    """Compare each operation in a dtype; whether all are right."""
    T = 512
    ends = torch.rand(8, T, device=DEVICE) < 0.02
    spans = {"documents": document_spans(ends), "blocks": block_spans(T // 2, 16, DEVICE)}
    ok = True
    for D in (32, 64):
        ok &= attention(dtype, 8, 256, 6, D)
        ok &= attention(dtype, 8, 111, 3, D)
        for name, span in spans.items():
            ok &= attention(dtype, 8, T, 3, D, span, name)
    for D in (64, 128):
        ok &= grouped_attention(dtype, 2, 111, 8, 2, D)
        for name, span in spans.items():
            near = window_spans(span, 100, T, DEVICE)
            ok &= grouped_attention(dtype, 8, T, 8, 2, D, span, name)
            ok &= grouped_attention(dtype, 8, T, 8, 2, D, near, f"{name}, window")
    for C in (384, 768):
        ok &= norm_conv(dtype, 16, 256, C)
    for V in (65, 1000, 50304):
        ok &= head(dtype, 4096, 384, V)
    return ok


def compare_masks():
    shapes = ((64, 256), (16, 1024), (4, 8192), (2, 5))
    return all(masking(*shape) for shape in shapes)


def compare_steps():
    ours, plain = losses("triton"), losses("torch")
    print(f"{STEPS} compiled steps, loss and norm: Triton, then PyTorch")
    print(torch.cat((ours, plain), 1))
    return bool((ours[:, 0] - plain[:, 0]).abs().max() <= 0.02)


# Each in a process of its own: what takes the time is compiling.
PARTS = {str(dtype)[6:]: partial(compare_dtype, dtype) for dtype in SMALL}
PARTS |= dict(masks=compare_masks, steps=compare_steps)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, help="one part alone, in this process")
    options = parser.parse_args(argv)
    if INTERPRETED:
        return int(not interpreted())
    if not torch.cuda.is_available():
        fix = "set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter"
        raise UserError(f"there is no CUDA device; {fix}")
    torch.set_float32_matmul_precision("high")
    if options.only:
        return int(not PARTS[options.only]())
    processes = [subprocess.Popen([sys.executable, __file__, *argv, f"--only={p}"]) for p in PARTS]
    codes = dict(zip(PARTS, [process.wait() for process in processes]))
    wrong = [part for part, code in codes.items() if code]
    print(f"not all agree: {', '.join(wrong)}" if wrong else "all agree")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
