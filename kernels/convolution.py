"""RMSNorm and a short depthwise convolution over positions, in one kernel each way.

    h_t = r_t x_t,                   r_t = 1 / sqrt(mean(x_t^2) + eps)
    y_t = h_t + sum_i w_i h_{t+o_i},        o_i = i - left

    g_s  = dy_s + sum_i w_i dy_{s-o_i}
    dx_s = r_s (g_s - h_s mean(g_s h_s)),   dw_i = sum_s dy_{s-o_i} h_s

The sums leave out positions beyond the ends of a sequence, or of another document. Each row is read
from memory once: its neighbours, which other rows need too, are then in a cache. PyTorch compiles
the same to kernels that are slower in sum (results/h200.md), and needs 20 launches without
compiling.

dw is a sum over all rows. Each program adds up its own; PyTorch adds these partial sums up. So
there are no atomic additions, and two runs give equal bits.
"""

from __future__ import annotations

import torch

from .launch import jit, launch, register, runs_on, tl, triton
from .reference import norm_conv_ref

EPS = torch.finfo(torch.float32).eps  # that of F.rms_norm, which computes in float32
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_C = 8192
MAX_K = 8
PROGRAMS = 512  # at most, in backward: each writes its part of dw


@jit
def _range(spans, rows, N, T):
    """Return position t of each row (M,) in its sequence, and the range [start, end) it sees."""
    t = rows % T
    start = t * 0
    end = start + T
    if spans is not None:  # (B, 2, T): line 2 b has the starts of sequence b, the next one the ends
        at = rows // T * (2 * T) + t
        start = tl.load(spans + at, mask=rows < N, other=0)
        end = tl.load(spans + at + T, mask=rows < N, other=0)
    return t, start, end


# x, y, dy, dx: (N, C) rows of sequences of T; weight: (K, C); r: (N,) float32
# spans: None or (B, 2, T) of documents
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
    EPS: tl.constexpr,
    LEFT: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute ROWS rows of y, and their r, which backward reads."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, BLOCK)
    t, start, end = _range(spans, rows, N, T)
    inside = (rows[:, None] < N) & (col[None, :] < C)
    out = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in tl.static_range(K):
        at = t + (i - LEFT)
        seen = inside & ((start <= at) & (at < end))[:, None]
        ptrs = x + (rows + (i - LEFT))[:, None] * C + col[None, :]
        z = tl.load(ptrs, mask=seen, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(z * z, 1) / C + EPS)  # (ROWS,)
        w = tl.load(weight + i * C + col, mask=col < C, other=0.0).to(tl.float32)
        if i == LEFT:
            tl.store(r + rows, root, mask=rows < N)
            w += 1
        out += w[None, :] * (z * root[:, None])
    ptrs = y + rows[:, None] * C + col[None, :]
    tl.store(ptrs, out.to(y.dtype.element_ty), mask=inside)


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
    LEFT: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute rows of dx, and this program's part of dw: (programs, K, C) float32."""
    col = tl.arange(0, BLOCK)
    sums = (tl.zeros((BLOCK,), tl.float32),) * K
    tiles = tl.cdiv(N, ROWS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        t, start, end = _range(spans, rows, N, T)
        inside = (rows[:, None] < N) & (col[None, :] < C)
        here = rows[:, None] * C + col[None, :]
        root = tl.load(r + rows, mask=rows < N, other=0.0)[:, None]
        h = tl.load(x + here, mask=inside, other=0.0).to(tl.float32) * root
        g = tl.zeros((ROWS, BLOCK), tl.float32)
        added = ()
        for i in tl.static_range(K):
            at = t - (i - LEFT)  # documents: a position sees exactly those that see it
            seen = inside & ((start <= at) & (at < end))[:, None]
            z = tl.load(dy + here - (i - LEFT) * C, mask=seen, other=0.0).to(tl.float32)
            w = tl.load(weight + i * C + col, mask=col < C, other=0.0).to(tl.float32)
            if i == LEFT:
                w += 1
            g += w[None, :] * z
            added = added + (sums[i] + tl.sum(z * h, 0),)  # noqa: RUF005 (Triton has no *)
        sums = added
        mean = tl.sum(g * h, 1)[:, None] / C
        tl.store(dx + here, (root * (g - h * mean)).to(dx.dtype.element_ty), mask=inside)
    for i in tl.static_range(K):
        ptrs = dw + (tl.program_id(0).to(tl.int64) * K + i) * C + col
        tl.store(ptrs, sums[i], mask=col < C)


def tile(C, backward):
    """Return ROWS, BLOCK and num_warps for rows of C: the fastest on an H200 (results/h200.md).

    In backward a thread holds 8 columns of all rows of its tile, so that the sums over rows need
    no exchange between warps: that was six times as fast as half the rows with twice the warps.
    """
    block = max(256, triton.next_power_of_2(C))
    warps = block // 256
    if backward:
        return dict(ROWS=4, BLOCK=block, num_warps=warps)
    return dict(ROWS=4, BLOCK=block, num_warps=max(1, warps // 2))


def _forward(x, weight, left, spans):
    """Return y (B, T, C) and r (B, T)."""
    B, T, C = x.shape
    y, r = _fake(x, weight, left, spans)
    options = tile(C, False)
    if x.numel():
        grid = (triton.cdiv(B * T, options["ROWS"]),)
        args = (x.contiguous(), weight.contiguous(), y, r, spans, B * T, T, C, EPS, left)
        launch(norm_conv_forward_kernel, grid, *args, len(weight), **options)
    return y, r


def _fake(x, weight, left, spans):
    """Return uninitialized y and r."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:2], dtype=torch.float32)


def _backward(grad, x, weight, r, left, spans):
    """Return dx (B, T, C) and dw (K, C) float32."""
    B, T, C = x.shape
    K = len(weight)
    options = tile(C, True)
    programs = min(PROGRAMS, triton.cdiv(B * T, options["ROWS"]))
    dx, _ = _fake_backward(grad, x, weight, r, left, spans)
    dw = weight.new_empty((programs, K, C), dtype=torch.float32)
    if x.numel():
        args = (x.contiguous(), weight.contiguous(), r, grad.contiguous(), dx, dw, spans)
        launch(norm_conv_backward_kernel, (programs,), *args, B * T, T, C, left, K, **options)
    return dx, dw.sum(0)


def _fake_backward(grad, x, weight, r, left, spans):
    """Return uninitialized dx and dw."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, weight.new_empty(weight.shape, dtype=torch.float32)


def _save(ctx, inputs, output):
    x, weight, ctx.left, spans = inputs
    ctx.save_for_backward(x, weight, output[1], spans)


def _differentiate(ctx, grad, grad_r):
    x, weight, r, spans = ctx.saved_tensors
    dx, dw = _norm_conv_backward(grad, x, weight, r, ctx.left, spans)
    return dx, dw.to(weight.dtype), None, None


SCHEMA = "(Tensor x, Tensor weight, int left, Tensor? spans) -> (Tensor, Tensor)"
_norm_conv = register("norm_conv", SCHEMA, _forward, _fake, _differentiate, _save)
BACKWARD = "(Tensor grad, Tensor x, Tensor weight, Tensor r, int left, Tensor? spans)"
BACKWARD += " -> (Tensor, Tensor)"
_norm_conv_backward = register("norm_conv_backward", BACKWARD, _backward, _fake_backward)


def norm_conv(x, weight, left, spans=None, scale=None, shift=None):
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
        return norm_conv_ref(x, weight, left, spans, scale, shift)
    return _norm_conv(x, weight, left, None if spans is None else spans.contiguous())[0]


norm_conv.__doc__ = norm_conv_ref.__doc__
