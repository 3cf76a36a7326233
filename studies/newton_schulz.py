"""A prototype: all of Muon's iterations for a head's matrix in one launch; and what Muon launches.

    python studies/newton_schulz.py                  # on a GPU: check, then time
    MDLM_TRITON=1 python studies/newton_schulz.py    # without one: check in the emulator

Preset gpu has 108 matrices of 64 x 384 (q, k and v of each head), which batched products read and
write in each of four iterations. Here a program keeps one on the chip. Predicted on an H100: 10 us
in place of about 80. And the matrices of a layer's other three shapes all have Gram matrices of
384 x 384, so one batch of 18 products may replace three of 6: 10 us in place of 24.
"""

import functools
import importlib
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/newton_schulz.py, anywhere

from support import cli

cli.start(__name__)

import torch

import bench
from studies.tiles import milliseconds
from support.errors import UserError
from support.kernels.launch import ENABLED, jit, launch, tl
from support.training import muon
from support.training.optimizers import average_to_compile, update


# ---- The kernel: muon.orthogonalize of one matrix (K, N) a program, in parts of W columns
@jit
def heads_kernel(
    src,
    out,
    K: "tl.constexpr",
    N: "tl.constexpr",
    W: "tl.constexpr",
    A: "tl.constexpr",
    B: "tl.constexpr",
    C: "tl.constexpr",
    EPS: "tl.constexpr",
):
    PARTS: tl.constexpr = N // W
    at = tl.program_id(0).to(tl.int64) * K * N
    at += tl.arange(0, K)[:, None] * N + tl.arange(0, W)[None, :]
    x = ()
    for i in tl.static_range(PARTS):
        x = x + (tl.load(src + at + i * W).to(tl.bfloat16),)  # noqa: RUF005 (Triton has no *)
    for it in range(4):  # a loop, not unrolled: x stays in the same registers
        gram = tl.zeros((K, K), tl.float32)
        for i in tl.static_range(PARTS):
            gram = tl.dot(x[i], tl.trans(x[i]), gram)
        norm = tl.maximum(tl.sqrt(tl.sum(tl.sum(gram * gram, 1), 0)), EPS)
        norm = tl.where(it == 0, norm, 1.0)
        scale = tl.rsqrt(norm)
        a = tl.where(it == 0, A[0], tl.where(it == 1, A[1], tl.where(it == 2, A[2], A[3])))
        b = tl.where(it == 0, B[0], tl.where(it == 1, B[1], tl.where(it == 2, B[2], B[3])))
        c = tl.where(it == 0, C[0], tl.where(it == 1, C[1], tl.where(it == 2, C[2], C[3])))
        g = (gram / norm).to(tl.bfloat16)
        p = (b * g.to(tl.float32) + c * tl.dot(g, g)).to(tl.bfloat16)
        y = ()
        for i in tl.static_range(PARTS):
            part = (x[i].to(tl.float32) * scale).to(tl.bfloat16)
            new = a * part.to(tl.float32) + tl.dot(p, part)
            y = y + (new.to(tl.bfloat16),)  # noqa: RUF005
        x = y
    for i in tl.static_range(PARTS):
        tl.store(out + at + i * W, x[i])


def orthogonalize_heads(x, warps=8):
    """muon.orthogonalize for x (n, 64, 384), n matrices, in bfloat16."""
    n, K, N = x.shape
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    A, B, C = zip(*muon.COEFFICIENTS)
    options = dict(K=K, N=N, W=128, A=A, B=B, C=C, EPS=muon.EPS, num_warps=warps)
    launch(heads_kernel, (n,), x, out, **options)
    return out


def check(x, warps):
    """Print the kernel's error and PyTorch's, both against float64; whether it is right."""
    exact = muon.orthogonalize(x.cpu().double(), torch.float64)
    results = orthogonalize_heads(x, warps), muon.orthogonalize(x, torch.bfloat16)
    errors = [((r.cpu().double() - exact).norm() / exact.norm()).item() for r in results]
    values = torch.linalg.svdvals(results[0].cpu().double())
    ok = errors[0] <= 1.2 * errors[1] and values.min() > 0.6 and values.max() < 1.3
    mark = "" if ok else "  WRONG"
    said = f"error {errors[0]:.4f}, PyTorch's in bfloat16 {errors[1]:.4f}"
    span = f"{values.min():.3f} to {values.max():.3f}"
    print(f"{warps} warps: {said}; singular values {span}{mark}", flush=True)
    return ok


def random_heads(n, device):
    return torch.randn(n, 64, 384, generator=torch.Generator().manual_seed(0)).to(device)


def emulated():
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    driver = importlib.import_module("ptx.driver")
    driver.install(90)
    return check(random_heads(2, "cpu"), 4) & check(random_heads(2, "cpu"), 8)


# ---- On a GPU
def time_heads():
    x = random_heads(108, "cuda")
    ok = True
    compiled = torch.compile(muon.orthogonalize, dynamic=False)
    for name, call in {
        "muon.orthogonalize, compiled": functools.partial(compiled, x, torch.bfloat16),
        "muon.orthogonalize, eager": functools.partial(muon.orthogonalize, x, torch.bfloat16),
    }.items():
        print(f"108 matrices of 64 x 384, {name}: {milliseconds(call):.4f} ms", flush=True)
    for warps in (4, 8):
        ok &= check(x, warps)
        ms = milliseconds(functools.partial(orthogonalize_heads, x, warps))
        print(f"108 matrices of 64 x 384, one launch, {warps} warps: {ms:.4f} ms", flush=True)
    return ok


def time_gram():
    """b G + c G^2 of 384 x 384: three batches of 6 matrices, and one of 18."""
    G = torch.randn(18, 384, 384, device="cuda").bfloat16()

    def product(n):
        for part in G.split(n):
            torch.baddbmm(part, part, part, beta=-3.0, alpha=0.5)

    for n in (6, 18):
        ms = milliseconds(functools.partial(product, n))
        print(f"18 matrices of 384 x 384, in batches of {n}: {ms:.4f} ms", flush=True)


def count_launches():
    """What the update of preset gpu launches: optimizers, averages, as compiled and as eager."""
    device = torch.device("cuda")
    config = bench.preset_config("gpu")
    for compiled in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            bench.write_tokens(folder, config.vocab_size)
            run = bench.start_run(config, folder, device, torch.bfloat16, "auto", False)
        if compiled:
            run.optimizers[0].compile()
        run.engine.average = torch.compile(average_to_compile) if compiled else average_to_compile

        def step(run=run):
            for p in run.model.parameters():
                p.grad = torch.full_like(p, 1e-3)
            torch.cuda.synchronize()
            update(run)

        for _ in range(3):
            step()
        with torch.profiler.profile() as profiler:
            step()
            torch.cuda.synchronize()
        events = [e for e in profiler.key_averages() if e.device_type.name == "CUDA"]
        fills = ("FillFunctor", "Memset")  # of the gradients above
        events = [e for e in events if not any(word in e.key for word in fills)]
        ms = sum(e.self_device_time_total for e in events) / 1e3
        launches = sum(e.count for e in events)
        how = "compiled" if compiled else "eager"
        print(f"\nthe update of preset gpu, {how}: {launches} launches, {ms:.3f} ms")
        for e in sorted(events, key=lambda e: -e.self_device_time_total)[:8]:
            print(
                f"  {e.self_device_time_total / 1e3:.4f} ms, {e.count} x {e.key[:80]}", flush=True
            )


def main(argv):
    if not torch.cuda.is_available():
        if not ENABLED:
            raise UserError("there is no CUDA device; MDLM_TRITON=1 checks it in the emulator")
        print("no CUDA device: nothing is timed; the emulator executes the PTX of sm_90")
        return int(not emulated())
    torch.set_float32_matmul_precision("high")  # as mdlm.py
    ok = time_heads()
    time_gram()
    count_launches()
    return int(not ok)


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
