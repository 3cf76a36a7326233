"""A prototype: norm + convolution with rows prefetched, against the kernels that mdlm uses.

    python studies/prefetch.py                  # on a GPU: check, then time
    MDLM_TRITON=1 python studies/prefetch.py    # without one: check in the emulator

A one-warp program of the present kernels has one row (768 bytes at C = 384) in flight, 6 KB on a
multiprocessor; Little's law asks for 16 KB at 3 TB/s and 0.7 us. These kernels load the next
`prefetch` rows before they use the first. Predicted on an H100, 16,384 x 384 in bfloat16:
forward 22 us -> 12, backward 32 -> 18.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/prefetch.py, from anywhere

from support import cli

cli.start(__name__)

import torch

from studies.tiles import milliseconds
from support import kernels
from support.errors import UserError
from support.kernels.launch import ENABLED, jit, launch, tl, triton
from support.kernels.reference import document_spans

N = sys.modules[kernels.norm_conv.__module__]  # in the package this name is the operation
_visible_range, _store, _taps, _slide = N._visible_range, N._store, N._taps, N._slide
PREFETCH = (1, 2, 4)  # rows; 0 is the present kernel
WARPS = (1, 2, 4)
PROGRAMS = (256, 512, 1024, 2048)  # of 16,384 rows: 64, 32, 16, 8 each


# ---- The kernels: those of kernels/convolution.py, except for when a row is loaded
@jit
def _load(x, row, N, C, TILE: tl.constexpr):
    """Load a row (TILE,) of x (N, C) in its own dtype, which takes half of the registers."""
    col = tl.arange(0, TILE)
    at = tl.where(col < C, row, -1).to(tl.int64)
    inside = (at >= 0) & (at < N)
    return tl.load(x + at * C + col, mask=inside, other=0.0)


@jit
def _load_rows(x, first, N, C, n: tl.constexpr, TILE: tl.constexpr):
    rows = ()
    for i in tl.static_range(n):
        rows = rows + (_load(x, first + i, N, C, TILE),)  # noqa: RUF005 (Triton has no *)
    return rows


@jit
def _normalized(z, r, row, first, last, C, EPS: tl.constexpr):
    z = z.to(tl.float32)
    root = tl.rsqrt(tl.sum(z * z, 0) / C + EPS)
    if (row >= first) & (row < last):
        tl.store(r + row, root)
    return z * root


@jit
def prefetch_forward_kernel(
    x,
    weight,
    y,
    r,
    spans,
    N,
    T,
    C,
    program_rows,
    EPS: tl.constexpr,
    LEFT: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    first = tl.program_id(0) * program_rows
    last = tl.minimum(first + program_rows, N)
    taps = _taps(weight, C, K, LEFT, TILE)
    window = (tl.zeros((TILE,), tl.float32),) * K
    for i in tl.static_range(K - 1):
        row = first - LEFT + i
        h = _normalized(_load(x, row, N, C, TILE), r, row, first, last, C, EPS)
        window = _slide(window, h, K)
    ahead = _load_rows(x, first - LEFT + K - 1, N, C, PREFETCH, TILE)
    for row in range(first, last):
        newest = row - LEFT + K - 1
        later = _load(x, newest + PREFETCH, N, C, TILE)
        h = _normalized(ahead[0], r, newest, first, last, C, EPS)
        ahead = _slide(ahead, later, PREFETCH)
        window = _slide(window, h, K)
        t, start, end = _visible_range(spans, row, T)
        out = tl.zeros((TILE,), tl.float32)
        for i in tl.static_range(K):
            at = t + i - LEFT
            out += tl.where((start <= at) & (at < end), taps[i] * window[i], 0.0)
        _store(y, row, C, out, TILE)


@jit
def prefetch_backward_kernel(
    x,
    weight,
    r,
    dy,
    dx,
    dw,
    spans,
    N,
    T,
    C,
    program_rows,
    LEFT: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    first = tl.program_id(0) * program_rows
    last = tl.minimum(first + program_rows, N)
    taps = _taps(weight, C, K, LEFT, TILE)
    sums = (tl.zeros((TILE,), tl.float32),) * K
    window = sums
    for i in tl.static_range(K - 1):
        row = first + LEFT - K + 1 + i
        window = _slide(window, _load(dy, row, N, C, TILE).to(tl.float32), K)
    ahead = _load_rows(dy, first + LEFT, N, C, PREFETCH, TILE)
    ahead_x = _load_rows(x, first, N, C, PREFETCH, TILE)
    for row in range(first, last):
        later = _load(dy, row + LEFT + PREFETCH, N, C, TILE)
        later_x = _load(x, row + PREFETCH, N, C, TILE)
        window = _slide(window, ahead[0].to(tl.float32), K)
        root = tl.load(r + row)
        h = ahead_x[0].to(tl.float32) * root
        ahead = _slide(ahead, later, PREFETCH)
        ahead_x = _slide(ahead_x, later_x, PREFETCH)
        t, start, end = _visible_range(spans, row, T)
        g = tl.zeros((TILE,), tl.float32)
        new_sums = ()
        for i in tl.static_range(K):
            at = t + LEFT - i
            d = tl.where((start <= at) & (at < end), window[K - 1 - i], 0.0)
            g += taps[i] * d
            new_sums = new_sums + (sums[i] + d * h,)  # noqa: RUF005
        sums = new_sums
        mean = tl.sum(g * h, 0) / C
        _store(dx, row, C, root * (g - h * mean), TILE)
    for i in tl.static_range(K):
        _store(dw, tl.program_id(0) * K + i, C, sums[i], TILE)


# ---- Launches, of the present kernels too (prefetch 0)
def options_of(C, prefetch, warps):
    tile = max(512, triton.next_power_of_2(C))
    return dict(TILE=tile, num_warps=warps) | (dict(PREFETCH=prefetch) if prefetch else {})


def forward(x, weight, left, spans, prefetch, warps, programs):
    """Return y (B, T, C) and r (B, T)."""
    B, T, C = x.shape
    y, r = torch.empty_like(x), x.new_empty((B, T), dtype=torch.float32)
    program_rows = triton.cdiv(B * T, programs)
    kernel = prefetch_forward_kernel if prefetch else N.norm_conv_forward_kernel
    sizes = (B * T, T, C, program_rows, N.EPS, left, len(weight))
    grid = (triton.cdiv(B * T, program_rows),)
    launch(kernel, grid, x, weight, y, r, spans, *sizes, **options_of(C, prefetch, warps))
    return y, r


def backward(grad, x, weight, r, left, spans, prefetch, warps, programs):
    """Return dx (B, T, C) and dw (K, C) float32."""
    B, T, C = x.shape
    K = len(weight)
    program_rows = triton.cdiv(B * T, programs)
    grid = (triton.cdiv(B * T, program_rows),)
    dx, dw = torch.empty_like(x), weight.new_empty((grid[0], K, C), dtype=torch.float32)
    kernel = prefetch_backward_kernel if prefetch else N.norm_conv_backward_kernel
    args = (x, weight, r, grad, dx, dw, spans, B * T, T, C, program_rows, left, K)
    launch(kernel, grid, *args, **options_of(C, prefetch, warps))
    return dx, dw.sum(0)


def relative(x, exact):
    return ((x.double() - exact).norm() / exact.norm()).item()


def make(device, B, T, C, K=5):
    g = torch.Generator(device).manual_seed(0)
    x, grad = (torch.randn(B, T, C, generator=g, device=device).bfloat16() for _ in range(2))
    return x, torch.randn(K, C, generator=g, device=device) / 2, grad


def exact_outcome(x, weight, grad, spans):
    x, weight = (z.double().requires_grad_() for z in (x, weight))
    y = kernels.norm_conv_ref(x, weight, spans=spans)
    dx, dw = torch.autograd.grad(y, (x, weight), grad.double())
    return y.detach(), dx, dw


def check(x, weight, grad, spans, *variant):
    """Print the errors of a variant (prefetch, warps, programs); whether they are small."""
    y, r = forward(x, weight, 2, spans, *variant)
    dx, dw = backward(grad, x, weight, r, 2, spans, *variant)
    errors = [relative(*pair) for pair in zip((y, dx, dw), exact_outcome(x, weight, grad, spans))]
    ok = max(errors) < 5e-3  # bfloat16 rounds to 4e-3; measured: 2e-3
    named = "prefetch {}, {} warps, {} programs".format(*variant)
    said = ", ".join(f"{name} {e:.1e}" for name, e in zip(("y", "dx", "dw"), errors))
    print(f"{named}{', documents' * (spans is not None)}: {said}{'' if ok else '  WRONG'}")
    return ok


def emulated():
    """Check each prefetch in the emulator, with and without documents; whether all are right."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    driver = importlib.import_module("ptx.driver")
    driver.install(90)
    x, weight, grad = make("cpu", 2, 24, 384)
    spans = document_spans(torch.rand(2, 24, generator=torch.Generator().manual_seed(1)) < 0.2)
    ok = True
    for prefetch, warps in ((0, 1), (1, 1), (2, 2), (4, 1), (4, 4)):
        ok &= check(x, weight, grad, None, prefetch, warps, 5)
        ok &= check(x, weight, grad, spans.contiguous(), prefetch, warps, 5)
    return ok


def time_variants(B, T, C):
    """Print all variants, the fastest first; whether all compute the same."""
    x, weight, grad = make("cuda", B, T, C)
    ok = True
    for prefetch in (0, *PREFETCH):
        ok &= check(x, weight, grad, None, prefetch, 2, 1024)
    r = forward(x, weight, 2, None, 0, 1, 1024)[1]
    for name, tensors in (("forward", 2), ("backward", 3)):
        lines = []
        for prefetch in (0, *PREFETCH):
            for warps in WARPS:
                for programs in PROGRAMS:
                    variant = (prefetch, warps, programs)
                    call = functools.partial(forward, x, weight, 2, None, *variant)
                    if name == "backward":  # with the sum of its partial dw
                        call = functools.partial(backward, grad, x, weight, r, 2, None, *variant)
                    ms = milliseconds(call, 0.005)
                    speed = f"{tensors * x.numel() * x.element_size() / ms / 1e9:.2f} TB/s"
                    lines.append((ms, variant, speed))
        print(f"\n{name}, {B * T} x {C}: prefetch, warps, programs")
        present = min(line for line in lines if line[1][0] == 0)
        for ms, variant, speed in sorted(lines)[:8]:
            print(f"{variant}: {ms:.4f} ms, {speed}, {present[0] / ms:.2f} times the best of 0")
        print(f"{present[1]}: {present[0]:.4f} ms, {present[2]}, the best without", flush=True)
    return ok


def main(argv):
    if not torch.cuda.is_available():
        if not ENABLED:
            raise UserError("there is no CUDA device; MDLM_TRITON=1 checks it in the emulator")
        print("no CUDA device: nothing is timed; the emulator executes the PTX of sm_90")
        return int(not emulated())
    ok = time_variants(64, 256, 384)
    return int(not ok & time_variants(64, 1024, 768))


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
