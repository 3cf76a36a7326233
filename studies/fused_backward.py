"""One kernel for the whole backward of short attention, against the two kernels for any length.

    python studies/fused_backward.py                  # on a GPU: check, then time; about 25 s
    MDLM_TRITON=1 python studies/fused_backward.py    # without one: check in the emulator

Both kernels compute the scores, and read Q, K, V and dO: seven products. Together they need five.
But one program for a whole head has dK and dV of 256 keys in registers, so that a multiprocessor
has room for one program, and tiles of queries are small. Which is faster, time must tell.

Then, of the two kernels: the gradients of norm and rotation in a kernel of their own, or in the
epilogues (EPILOGUE in kernels/attention.py).
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/fused_backward.py, anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch

from nanomdlm.kernels import attention as A
from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels.reference import rotary_tables
from studies.tiles import in_emulator, milliseconds

CHOOSE = A.tiles
# (B, T, H, D): candidates (TILE_M queries, TILE_N keys, warps, stages)
# Registers spill on sm_90 in those that are marked. With D = 32 and 32 queries, Triton 3.9 copies
# the next tile to where a product still reads (the emulator says so), so these are not here.
SHAPES = {
    (64, 256, 6, 64): [
        (32, 256, 8, 3),
        (32, 256, 8, 2),
        (32, 256, 8, 1),
        (16, 256, 8, 2),
        (32, 128, 8, 2),
        (64, 128, 8, 1),  # spills
        (64, 256, 8, 2),  # spills
        (32, 256, 16, 2),  # spills
        (64, 256, 16, 1),  # spills
    ],
    (64, 256, 12, 32): [
        (64, 128, 8, 2),
        (64, 128, 8, 1),
        (64, 128, 8, 3),
        (64, 256, 8, 2),  # spills
        (64, 64, 8, 2),  # spills
        (64, 128, 16, 2),  # spills
    ],
    (16, 128, 12, 64): [
        (64, 128, 8, 2),
        (64, 128, 8, 3),
        (32, 128, 8, 2),
        (32, 128, 4, 2),  # spills
    ],
}
# (B, T, H, D) of which the whole backward is timed, with norm and rotation
PREPARED = [(64, 256, 6, 64), (64, 256, 12, 32), (64, 1024, 12, 64)]


def make(device, B, T, H, D):
    """qkv (B, T, 3, H, D), the gradient of the output (B, T, H, D), out and lse."""
    g = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(B, T, 3, H, D, generator=g, device=device).bfloat16()
    grad = torch.randn(B, T, H, D, generator=g, device=device).bfloat16()
    out, lse, _ = A._forward(qkv, None, None, False, None)
    return qkv, grad, out, lse


def backward(qkv, grad, out, lse, dqkv, tile):
    """Write dqkv with the fused kernel with these tiles, or with the two kernels if None."""
    if tile is None:
        A._backward_of_two(qkv, qkv, grad, out, lse, dqkv, None)
        return
    A.tiles = lambda *_: tile
    try:
        A._run_fused(qkv, qkv, (grad, out, lse, dqkv))
    finally:
        A.tiles = CHOOSE


def exact_gradient(qkv, grad):
    qkv = qkv.double().requires_grad_()
    return torch.autograd.grad(kernels.attention_ref(qkv), qkv, grad.double())[0]


def check(data, exact, tile):
    """Return the relative errors of dQ, dK, dV as text, and whether they are small.

    exact: the gradient of the first samples. Two runs must give equal bits, too.
    """
    runs = []
    for _ in range(2 if data[0].is_cuda else 1):
        runs.append(torch.full_like(data[0], float("nan")))
        backward(*data, runs[-1], tile)
    pairs = [(runs[0][: len(exact), :, i].double(), exact[:, :, i]) for i in range(3)]
    errors = [((x - y).norm() / y.norm()).item() for x, y in pairs]
    ok = max(errors) < 5e-3  # bfloat16 rounds to 4e-3; measured: 3e-3
    said = ", ".join(f"{name} {e:.1e}" for name, e in zip(("dq", "dk", "dv"), errors))
    if not torch.equal(runs[0], runs[-1]):
        return f"{said}  TWO RUNS DIFFER", False
    return said + ("" if ok else "  WRONG"), ok


def prepared(device, B, T, H, D):
    """The arguments of attention's backward with norm and rotation: grad, qkv, ..., qk."""
    qkv, grad, _, _ = make(device, B, T, H, D)
    cos, sin = (x.to(device) for x in rotary_tables(T, D))
    return grad, qkv, cos, sin, True, None, *A._forward(qkv, cos, sin, True, None)


def backward_of_prepared(epilogue, *args):
    """The gradient of qkv, with the gradients of norm and rotation in epilogues or not."""
    A.EPILOGUE = epilogue
    try:
        return A._backward(*args)
    finally:
        A.EPILOGUE = False


def compare_epilogues(device, shape):
    """Print errors, and on a GPU times, of both ways; whether both are right."""
    args = prepared(device, *shape)
    grad, qkv, *tables = args[:4]
    x = qkv[:2].double().requires_grad_()
    out = kernels.attention_ref(x, *(table.double() for table in tables), True)
    exact = torch.autograd.grad(out, x, grad[:2].double())[0]
    print("\nnorm and rotation, B={} T={} H={} D={}".format(*shape))
    all_ok = True
    for epilogue in (False, True):
        call = functools.partial(backward_of_prepared, epilogue, *args)
        error = ((call()[:2].double() - exact).norm() / exact.norm()).item()
        ok = error < 6e-3  # qk is rounded, too; measured: 4e-3
        times = f"{milliseconds(call, 0.02):.4f} ms, " if device == "cuda" else ""
        title = "in the epilogues" if epilogue else "kernel of its own"
        print(f"{title}: {times}dqkv {error:.2e}{'' if ok else '  WRONG'}", flush=True)
        all_ok &= ok
    return all_ok


def named(tile, shape):
    """A variant, with a star if mdlm uses it."""
    if tile is None:
        return "  two kernels"
    _, T, _, D = shape
    is_present = tile == CHOOSE(A.attention_backward_kernel, torch.bfloat16, D, T)
    return "{} {} queries, {} keys, {} warps, {} stages".format("*" if is_present else " ", *tile)


def emulated():
    """Check each variant on one head in the emulator; whether all are right."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    driver = importlib.import_module("ptx.driver")
    driver.install(90)
    all_ok = True
    for (_, T, _, D), tiles in SHAPES.items():
        shape = (1, T, 1, D)
        data = make("cpu", *shape)
        exact = exact_gradient(*data[:2])
        print(f"\nT={T} D={D}")
        for tile in (None, *tiles):
            said, ok = check(data, exact, tile)
            print(f"{named(tile, shape)}: {said}", flush=True)
            all_ok &= ok
    return all_ok & compare_epilogues("cpu", (1, 130, 2, 64))


def compile_one(job):
    """Compile a variant by launching it on one sample."""
    (_, *sizes), tile = job
    try:
        data = make("cuda", 1, *sizes)
        backward(*data, torch.empty_like(data[0]), tile)
        torch.cuda.synchronize()
    except Exception as e:  # the same one comes again when it is timed, and is printed then
        print(f"{job}: {type(e).__name__}", file=sys.stderr)


def compile_all():
    """Compile the variants in several processes, so that this takes seconds."""
    jobs = [(shape, tile) for shape, tiles in SHAPES.items() for tile in (None, *tiles)]
    workers = min(8, os.cpu_count() - 1 or 1)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_one, jobs, chunksize=1)


def time_variants(shape):
    """Check and time the variants of a shape; whether all are right."""
    data = make("cuda", *shape)
    exact = exact_gradient(*(x[:4] for x in data[:2]))
    dqkv = torch.empty_like(data[0])
    print("\nB={} T={} H={} D={}".format(*shape))
    all_ok, present = True, None
    for tile in (None, *SHAPES[shape]):
        try:
            said, ok = check(data, exact, tile)
            ms = milliseconds(functools.partial(backward, *data, dqkv, tile), 0.02)
        except Exception as e:
            print(f"{named(tile, shape)}: {type(e).__name__}: {str(e).splitlines()[0][:60]}")
            continue
        present = present or ms
        times = f"{ms:.4f} ms, {present / ms:.2f} times as fast"
        print(f"{named(tile, shape)}: {times}; {said}", flush=True)
        all_ok &= ok
    return all_ok


def main(argv):
    if not torch.cuda.is_available():
        return in_emulator(emulated)
    compile_all()
    right = [time_variants(shape) for shape in SHAPES]
    right += [compare_epilogues("cuda", shape) for shape in PREPARED]
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
