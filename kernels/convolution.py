"""RMSNorm, then a short depthwise convolution over positions: one kernel forward, one backward.

Forward, of a row x_t (C,) at position t, with a convolution of K taps w_i (C,):

    h_t = r_t x_t,                   r_t = 1 / sqrt(mean(x_t^2) + eps)
    y_t = h_t + sum_i w_i h_{t+o_i},        o_i = i - left,   i = 0 .. K - 1

Backward, where g is the gradient of h:

    g_s  = dy_s + sum_i w_i dy_{s-o_i}
    dx_s = r_s (g_s - h_s mean(g_s h_s)),   dw_i = sum_s dy_{s-o_i} h_s

The sums leave out positions outside the sequence, or in another document. A program processes
consecutive rows. It keeps the K rows that a position needs in a sliding window, so that it reads
each row once; and it loads each row while it computes the one before, because a program that waits
for its rows is limited by the latency of memory (results/hopper.md).

dw is a sum over all rows. Each program sums its own rows, and PyTorch sums over the programs. So
there are no atomic additions, and two runs give equal bits.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .launch import jit, launch, register, runs_on, tl, triton
from .reference import norm_conv_ref

EPS = torch.finfo(torch.float32).eps  # that of F.rms_norm, which computes in float32
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_C = 2048
MAX_K = 8
MAX_PROGRAMS = 1024  # of a launch; with more rows, each program processes more of them
MIN_ROWS = 8  # of a program: it also reads K - 1 rows of its neighbors, to fill its window


@jit
def _visible_range(spans, row, T):
    """Return position t of a row in its sequence, and the range [start, end) that it sees."""
    t = row % T
    start = t * 0  # zero, as a tensor
    end = start + T
    if spans is not None:  # (B, 2, T): the starts of all positions of a sequence, then the ends
        at = row // T * (2 * T) + t
        start = tl.load(spans + at)
        end = tl.load(spans + at + T)
    return t, start, end


@jit
def _load(x, row, N, C, TILE: tl.constexpr):
    """Load a row (TILE,) of x (N, C); zeros beyond column C, and outside the N rows."""
    col = tl.arange(0, TILE)
    at = tl.where(col < C, row, -1).to(tl.int64)  # the row; -1 in columns beyond C
    inside = (at >= 0) & (at < N)
    return tl.load(x + at * C + col, mask=inside, other=0.0)


@jit
def _store(y, row, C, out, TILE: tl.constexpr):
    """Store `out` (TILE,) as a row of y (N, C)."""
    col = tl.arange(0, TILE)
    at = (col * 0 + row).to(tl.int64)
    tl.store(y + at * C + col, out.to(y.dtype.element_ty), mask=col < C)


@jit
def _normalized(z, r, row, first, last, C, EPS: tl.constexpr):
    """Return h (TILE,) of a row z (TILE,) of x.

    Also stores its r, if first <= row < last: other rows are those of other programs.
    """
    z = z.to(tl.float32)
    root = tl.rsqrt(tl.sum(z * z, 0) / C + EPS)
    if (row >= first) & (row < last):
        tl.store(r + row, root)
    return z * root


@jit
def _taps(weight, C, K: tl.constexpr, LEFT: tl.constexpr, TILE: tl.constexpr):
    """Return the K taps (TILE,), the rows of weight.

    1 is added to the tap of the position itself: so the convolution includes y's first term, h.
    """
    col = tl.arange(0, TILE)
    taps = ()
    for i in tl.static_range(K):
        w = tl.load(weight + i * C + col, mask=col < C, other=0.0).to(tl.float32)
        taps = taps + (w + (i == LEFT),)  # noqa: RUF005 (Triton has no *)
    return taps


@jit
def _slide(window, row, K: tl.constexpr):
    """Return the window (K rows) without its first row, and with a new row at its end."""
    moved = ()
    for i in tl.static_range(1, K):
        moved = moved + (window[i],)  # noqa: RUF005
    return moved + (row,)  # noqa: RUF005


# ---- Kernels
# x, y, dy, dx: (N, C), the N = B T positions of sequences of T; weight: (K, C); r: (N,) float32
# spans: None or (B, 2, T) of documents
# program_rows: how many rows each program processes
@jit
def norm_conv_forward_kernel(
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
):
    """Compute a program's rows of y, and their r, which backward reads."""
    first = tl.program_id(0) * program_rows
    last = tl.minimum(first + program_rows, N)
    taps = _taps(weight, C, K, LEFT, TILE)
    # The window has h of rows `row - LEFT` .. `row - LEFT + K - 1`; here, all but the last.
    window = (tl.zeros((TILE,), tl.float32),) * K
    for i in tl.static_range(K - 1):
        row = first - LEFT + i
        h = _normalized(_load(x, row, N, C, TILE), r, row, first, last, C, EPS)
        window = _slide(window, h, K)
    following = _load(x, first - LEFT + K - 1, N, C, TILE)
    for row in range(first, last):
        newest = row - LEFT + K - 1
        z = following
        following = _load(x, newest + 1, N, C, TILE)
        window = _slide(window, _normalized(z, r, newest, first, last, C, EPS), K)
        t, start, end = _visible_range(spans, row, T)
        out = tl.zeros((TILE,), tl.float32)
        for i in tl.static_range(K):
            at = t + i - LEFT
            out += tl.where((start <= at) & (at < end), taps[i] * window[i], 0.0)
        _store(y, row, C, out, TILE)


@jit
def norm_conv_backward_kernel(
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
):
    """Compute a program's rows of dx, and its sum of dw: one of (programs, K, C) float32."""
    first = tl.program_id(0) * program_rows
    last = tl.minimum(first + program_rows, N)
    taps = _taps(weight, C, K, LEFT, TILE)
    sums = (tl.zeros((TILE,), tl.float32),) * K  # of dw
    # The window has dy of rows `row + LEFT - K + 1` .. `row + LEFT`; here, all but the last.
    window = sums  # zeros
    for i in tl.static_range(K - 1):
        row = first + LEFT - K + 1 + i
        window = _slide(window, _load(dy, row, N, C, TILE).to(tl.float32), K)
    following_dy = _load(dy, first + LEFT, N, C, TILE)
    following_x = _load(x, first, N, C, TILE)
    for row in range(first, last):
        window = _slide(window, following_dy.to(tl.float32), K)
        root = tl.load(r + row)
        h = following_x.to(tl.float32) * root
        following_dy = _load(dy, row + 1 + LEFT, N, C, TILE)
        following_x = _load(x, row + 1, N, C, TILE)
        t, start, end = _visible_range(spans, row, T)
        g = tl.zeros((TILE,), tl.float32)
        new_sums = ()
        for i in tl.static_range(K):
            at = t + LEFT - i  # the position whose tap i weighs this row
            # A position of a document sees exactly those that see it, so the range fits here too.
            d = tl.where((start <= at) & (at < end), window[K - 1 - i], 0.0)
            g += taps[i] * d
            new_sums = new_sums + (sums[i] + d * h,)  # noqa: RUF005
        sums = new_sums
        mean = tl.sum(g * h, 0) / C
        _store(dx, row, C, root * (g - h * mean), TILE)
    for i in tl.static_range(K):
        _store(dw, tl.program_id(0) * K + i, C, sums[i], TILE)


# ---- Launches
def row_config(C, backward=False):
    """Return TILE and num_warps for rows of C: the fastest without spills (results/hopper.md)."""
    tile = max(512, triton.next_power_of_2(C))
    is_one_warp = tile == 512 and not backward
    return dict(TILE=tile, num_warps=1 if is_one_warp else max(4, tile // 256))


def rows_per_program(N):
    """Return how many of N rows each program processes."""
    return max(MIN_ROWS, triton.cdiv(N, MAX_PROGRAMS))


def _forward(x, weight, left, spans):
    """Return y (B, T, C) and r (B, T)."""
    B, T, C = x.shape
    y, r = _fake(x, weight, left, spans)
    if x.numel():
        program_rows = rows_per_program(B * T)
        args = (x.contiguous(), weight.contiguous(), y, r, spans)
        sizes = (B * T, T, C, program_rows, EPS, left, len(weight))
        grid = (triton.cdiv(B * T, program_rows),)
        launch(norm_conv_forward_kernel, grid, *args, *sizes, **row_config(C))
    return y, r


def _fake(x, weight, left, spans):
    """Return uninitialized y and r."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:2], dtype=torch.float32)


def _backward(grad, x, weight, r, left, spans):
    """Return dx (B, T, C) and dw (K, C) float32."""
    B, T, C = x.shape
    K = len(weight)
    program_rows = rows_per_program(B * T)
    programs = triton.cdiv(B * T, program_rows)
    dx, _ = _fake_backward(grad, x, weight, r, left, spans)
    dw = weight.new_empty((programs, K, C), dtype=torch.float32)  # a sum of each program
    if x.numel():
        args = (x.contiguous(), weight.contiguous(), r, grad.contiguous(), dx, dw, spans)
        sizes = (B * T, T, C, program_rows, left, K)
        launch(norm_conv_backward_kernel, (programs,), *args, *sizes, **row_config(C, True))
    return dx, dw.sum(0)


def _fake_backward(grad, x, weight, r, left, spans):
    """Return uninitialized dx and dw."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, weight.new_empty(weight.shape, dtype=torch.float32)


def _save(ctx, inputs, output):
    x, weight, ctx.left, spans = inputs
    ctx.save_for_backward(x, weight, output[1], spans)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


@once_differentiable
def _differentiate(ctx, grad, grad_r):  # r is an output only so that backward can read it
    x, weight, r, spans = ctx.saved_tensors
    dx, dw = _norm_conv_backward(grad, x, weight, r, ctx.left, spans)
    return dx, dw.to(weight.dtype), None, None


SCHEMA = "(Tensor x, Tensor weight, int left, Tensor? spans) -> (Tensor, Tensor)"
_norm_conv = register("norm_conv", SCHEMA, _forward, _fake, _differentiate, _save)
BACKWARD = "(Tensor grad, Tensor x, Tensor weight, Tensor r, int left, Tensor? spans)"
BACKWARD += " -> (Tensor, Tensor)"
_norm_conv_backward = register("norm_conv_backward", BACKWARD, _backward, _fake_backward)


def norm_conv(x, weight, causal=False, spans=None, scale=None, shift=None):
    has_kernel = (
        weight is not None
        and scale is None
        and len(weight) <= MAX_K
        and x.shape[-1] <= MAX_C
        and x.dtype in DTYPES
        and (spans is None or spans.shape[1] == 2)
    )
    # PyTorch computes what the kernels do not support: blocks, adaptive norms, no convolution.
    if not has_kernel or not runs_on(x):
        return norm_conv_ref(x, weight, causal, spans, scale, shift)
    left = len(weight) - 1 if causal else len(weight) // 2
    if spans is not None:  # the kernels read those of each text
        spans = spans.expand(len(x), -1, -1)
    return _norm_conv(x, weight, left, None if spans is None else spans.contiguous())[0]


norm_conv.__doc__ = norm_conv_ref.__doc__
