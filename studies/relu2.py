"""How fast is the MLP whose ReLU^2 is the epilogue of its products, by tiles, beside PyTorch?

    python studies/relu2.py                  # on a GPU: check, then time; about 40 s
    MDLM_TRITON=1 python studies/relu2.py    # without one: check in the emulator

First the kernel alone, forward and backward, beside the product alone by cuBLAS: the tiles decide
how much of what the epilogue saves is lost there. Then the whole MLP with its five other products.
Tensors of 16,384 x 384 stay in the L2 cache in part, as they do in training.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/relu2.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch

from nanomdlm.kernels import relu2 as R
from nanomdlm.kernels.reference import relu2_mlp_ref
from nanomdlm.kernels.relu2 import relu2_mlp
from studies.tiles import in_emulator, milliseconds

PRESENT = R.tiles(torch.bfloat16)
# TILE_M, TILE_N, TILE_K, warps, stages. With whole tiles none spills on sm_90.
VARIANTS = [
    (128, 128, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 128, 64, 8, 2),
    (128, 128, 32, 8, 4),
    (128, 128, 64, 4, 3),
    (128, 256, 64, 8, 3),
    (64, 256, 64, 8, 3),
    (64, 128, 64, 4, 4),
]


def make(device, M, C):
    """h, up, down, and the gradient of the output, in bfloat16; F = 4 C."""
    g = torch.Generator(device).manual_seed(0)
    shapes = ((M, C), (4 * C, C), (C, 4 * C), (M, C))
    h, up, down, grad = (torch.randn(s, generator=g, device=device) for s in shapes)
    return [x.bfloat16() for x in (h, up / C**0.5, down / C**0.5 / 2, grad)]


def choose(variant):
    """Let the operator use a variant."""
    R.tiles = lambda dtype: variant


def name(variant):
    star = "*" if variant == PRESENT else " "
    return star + " {} x {} x {}, {} warps, {} stages".format(*variant)


def check(h, up, down, grad, variant):
    """Print the relative errors of a and dz on the first rows; whether they are small.

    On a GPU, two runs must give equal bits, too.
    """
    choose(variant)
    a = R._run(h, up)
    dz = R._run(grad, down, a)
    same = not h.is_cuda or torch.equal(a, R._run(h, up))
    same &= not h.is_cuda or torch.equal(dz, R._run(grad, down, a))
    n = min(len(h), 1024)
    exact = (h[:n].double() @ up.double().t()).relu().square()
    exact_dz = grad[:n].double() @ down.double() * 2 * exact.sqrt()
    pairs = ((a, exact), (dz, exact_dz))
    errors = [((x[:n].double() - y).norm() / y.norm()).item() for x, y in pairs]
    ok = same and max(errors) < 4e-3  # bfloat16 rounds to 4e-3 at most; measured: 2e-3
    print(
        f"{name(variant)}: a {errors[0]:.1e}, dz {errors[1]:.1e}{'' if ok else '  WRONG'}",
        flush=True,
    )
    return ok


def check_all(*tensors):
    results = [check(*tensors, variant) for variant in VARIANTS]
    choose(PRESENT)
    return all(results)


def emulated():
    """Check the variants in the emulator; whether all are right."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    importlib.import_module("ptx.driver").install(90)
    return check_all(*make("cpu", 37, 80))


def show(title, call, flops):
    ms = milliseconds(call, 0.01)
    print(f"{title}: {ms:.4f} ms, {flops / ms / 1e9:.0f} TFLOP/s", flush=True)


def differentiate(function, h, up, down, grad):
    inputs = [x.detach().requires_grad_() for x in (h, up, down)]
    return torch.autograd.grad(function(*inputs), inputs, grad)


def time_all(M, C):
    """Time the variants, then the whole MLP, and PyTorch's; whether all variants are right."""
    tensors = make("cuda", M, C)
    h, up, down, grad = tensors
    print(f"\n{M} x {C}")
    ok = check_all(*tensors)
    flops = 2 * M * C * 4 * C
    a = R._run(h, up)
    for variant in VARIANTS:
        choose(variant)
        show(f"{name(variant)}, forward", functools.partial(R._run, h, up), flops)
        show(f"{name(variant)}, backward", functools.partial(R._run, grad, down, a), flops)
    choose(PRESENT)
    show("cuBLAS, h U^T alone", lambda: torch.mm(h, up.t()), flops)
    show("cuBLAS, dy D alone", lambda: torch.mm(grad, down), flops)
    compiled = torch.compile(relu2_mlp_ref, dynamic=False)
    functions = {"this MLP": relu2_mlp, "PyTorch, compiled": compiled, "eager": relu2_mlp_ref}
    for title, function in functions.items():
        show(f"{title}, forward", functools.partial(function, h, up, down), 2 * flops)
        both = functools.partial(differentiate, function, *tensors)
        show(f"{title}, forward + backward", both, 6 * flops)
    return ok


def main(argv):
    if not torch.cuda.is_available():
        return in_emulator(emulated)
    ok = time_all(16384, 384)
    return int(not ok & time_all(65536, 768))


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
