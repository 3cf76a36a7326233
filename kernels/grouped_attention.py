"""Attention on separate Q, K and V: wide heads, grouped queries. For pretrained networks.

    O_h = softmax(scale * Q_h K_g^T) V_g,     g = h // (H / G)

H heads of queries share G heads of keys and values (Ainslie et al., 2305.13245). The mathematics
and the three kernels are those of attention.py, except for this:

- Q (B, T, H, D), K and V (B, T, G, D) are three tensors. The distance between two tokens may be
  any, so that projections and slices of packed ones are read in place.
- dK and dV of a head are sums over the queries of all H / G heads that read it. The program that
  owns a tile of keys iterates over these heads in their order. So there are no atomic additions
  here either, and two runs give equal bits.
- Heads of 128 are supported; their tiles are smaller, so that registers do not spill.

A sliding window needs no code here: the positions near one are a range, so spans express it, also
within documents and blocks (reference.window_spans). A program visits the tiles of that range only.

Nothing here has been timed on a GPU yet (results/hopper.md, "Next questions").
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .attention import DTYPES, _inside, _load, _packed, _place, _range, _store
from .launch import LOG2E, jit, launch, register, runs_on, tl, triton
from .reference import grouped_attention_ref

HEAD_DIMS = (32, 64, 128)


# ---- Kernels
# q, out, grad and dq: (B, T, H, D); k, v, dk and dv: (B, T, G, D); lse and delta: (B, H, T)
# q_stride, k_stride, v_stride: elements from a token to the next one. Those of a sample follow
# those of the sample before it. What the kernels write is contiguous, and so is grad.
# spans: None or (B, 2, T) of documents, with R = 1; (1, 8, T) of blocks, with R = 2
# R: number of ranges that a row sees
@jit
def grouped_attention_forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    spans,
    T,
    q_stride,
    k_stride,
    v_stride,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
):
    """Compute `out` and `lse` for a tile of queries."""
    rows, b, h = _place(T, H, TILE_M)
    g = h // (H // G)
    k += b * T * k_stride + g * D
    v += b * T * v_stride + g * D
    q_tile = _load(q + b * T * q_stride + h * D, rows, q_stride, T, D, EVEN)  # (TILE_M, D)
    scale *= LOG2E
    # Not -inf: if a row sees no key of the first tile, -inf - (-inf) would be NaN.
    top = tl.full((TILE_M,), -1e30, tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    o = tl.zeros((TILE_M, D), tl.float32)
    for r in tl.static_range(R):
        start, end, first, last = _range(spans, 2 * (b if R == 1 else r), rows, T, TILE_N)
        for at in range(first, last, TILE_N):
            cols = at + tl.arange(0, TILE_N)
            k_tile = _load(k, cols, k_stride, T, D, EVEN)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (TILE_M, TILE_N)
            if spans is not None:
                s = tl.where(_inside(start, end, cols), s, float("-inf"))
            elif not EVEN:
                s = tl.where(cols[None, :] < T, s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - new[:, None])
            shrink = tl.exp2(top - new)
            total = total * shrink + tl.sum(p, 1)
            v_tile = _load(v, cols, v_stride, T, D, EVEN)
            o = tl.dot(p.to(v_tile.dtype), v_tile, o * shrink[:, None], input_precision="ieee")
            top = new
    _store(out + b * T * H * D + h * D, rows, H * D, T, o / total[:, None], D, EVEN)
    tl.store(lse + (b * H + h) * T + rows, (top + tl.log2(total)) / LOG2E, mask=rows < T)


@jit
def grouped_attention_dq_kernel(
    q,
    k,
    v,
    grad,
    out,
    lse,
    delta,
    dq,
    spans,
    T,
    q_stride,
    k_stride,
    v_stride,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
):
    """Compute dQ for a tile of queries, and delta, which grouped_attention_dkdv_kernel reads."""
    rows, b, h = _place(T, H, TILE_M)
    g = h // (H // G)
    k += b * T * k_stride + g * D
    v += b * T * v_stride + g * D
    here = b * T * H * D + h * D
    line = (b * H + h) * T
    do = _load(grad + here, rows, H * D, T, D, EVEN)
    o = _load(out + here, rows, H * D, T, D, EVEN)
    dl = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + line + rows, dl, mask=rows < T)
    q_tile = _load(q + b * T * q_stride + h * D, rows, q_stride, T, D, EVEN)
    z = tl.load(lse + line + rows, mask=rows < T, other=0.0) * LOG2E
    sum_q = tl.zeros((TILE_M, D), tl.float32)
    for r in tl.static_range(R):
        start, end, first, last = _range(spans, 2 * (b if R == 1 else r), rows, T, TILE_N)
        for at in range(first, last, TILE_N):
            cols = at + tl.arange(0, TILE_N)
            k_tile = _load(k, cols, k_stride, T, D, EVEN)
            v_tile = _load(v, cols, v_stride, T, D, EVEN)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # (TILE_M, TILE_N)
            p = tl.exp2(s * (scale * LOG2E) - z[:, None])
            if spans is not None:
                p = tl.where(_inside(start, end, cols), p, 0.0)
            elif not EVEN:  # if lse is very negative, a key beyond the end would give inf * 0
                p = tl.where(cols[None, :] < T, p, 0.0)
            dp = tl.dot(do, tl.trans(v_tile), input_precision="ieee")
            ds = (p * (dp - dl[:, None])).to(k_tile.dtype)
            sum_q = tl.dot(ds, k_tile, sum_q, input_precision="ieee")
    _store(dq + here, rows, H * D, T, sum_q * scale, D, EVEN)


@jit
def grouped_attention_dkdv_kernel(
    q,
    k,
    v,
    grad,
    lse,
    delta,
    dk,
    dv,
    spans,
    T,
    q_stride,
    k_stride,
    v_stride,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
):
    """Compute dK and dV for a tile of keys: sums over the queries of the heads that read them."""
    GROUP: tl.constexpr = H // G
    cols, b, g = _place(T, G, TILE_N)
    k_tile = _load(k + b * T * k_stride + g * D, cols, k_stride, T, D, EVEN)
    v_tile = _load(v + b * T * v_stride + g * D, cols, v_stride, T, D, EVEN)
    sum_k = tl.zeros((TILE_N, D), tl.float32)
    sum_v = tl.zeros((TILE_N, D), tl.float32)
    for r in tl.static_range(R):
        start, end, first, last = _range(spans, 2 * b if R == 1 else 4 + 2 * r, cols, T, TILE_M)
        for h in range(g * GROUP, (g + 1) * GROUP):
            q_head = q + b * T * q_stride + h * D
            grad_head = grad + b * T * H * D + h * D
            line = (b * H + h) * T
            for at in range(first, last, TILE_M):
                rows = at + tl.arange(0, TILE_M)
                q_tile = _load(q_head, rows, q_stride, T, D, EVEN)
                # For queries beyond the end, lse = inf makes p zero.
                z = tl.load(lse + line + rows, mask=rows < T, other=float("inf")) * LOG2E
                s = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")  # (TILE_N, TILE_M)
                if spans is not None:  # of s: of p, Triton 3.7 orders it wrongly (results/aot.md)
                    s = tl.where(_inside(start, end, rows), s, float("-inf"))
                p = tl.exp2(s * (scale * LOG2E) - z[None, :])
                do = _load(grad_head, rows, H * D, T, D, EVEN)
                sum_v = tl.dot(p.to(do.dtype), do, sum_v, input_precision="ieee")
                dl = tl.load(delta + line + rows, mask=rows < T, other=0.0)
                dp = tl.dot(v_tile, tl.trans(do), input_precision="ieee")
                ds = (p * (dp - dl[None, :])).to(q_tile.dtype)
                sum_k = tl.dot(ds, q_tile, sum_k, input_precision="ieee")
    _store(dk + b * T * G * D + g * D, cols, G * D, T, sum_k * scale, D, EVEN)
    _store(dv + b * T * G * D + g * D, cols, G * D, T, sum_v, D, EVEN)


# ---- Launches
def tiles(kernel, dtype, D):
    """Return (TILE_M, TILE_N, warps, stages) of a kernel.

    In 16 bits no registers spill on sm_80, 90 and 120, and the memory of a consumer GPU suffices.
    On sm_100, dK and dV of blocks with D = 128 spill eight times; in float32 some do elsewhere.
    """
    is_dkdv = kernel is grouped_attention_dkdv_kernel
    if dtype == torch.float32:  # exact products, which do not use tensor cores
        if is_dkdv:
            return (32, 16, 16, 1) if D == 128 else (16, 32, 8, 1)
        return 16, 16, 8, 1
    if is_dkdv:
        return (32, 64, 4, 2) if D == 32 else (32, 64, 8, 2)
    is_small = D == 32 or (D == 64 and kernel is grouped_attention_forward_kernel)
    return (64, 64, 4, 2) if is_small else (64, 32, 4, 2)


def _run(kernel, q, k, v, tensors, scale, spans):
    """Launch a kernel with one program for each tile of rows, head and sample."""
    B, T, H, D = q.shape
    G = k.shape[2]
    M, N, warps, stages = tiles(kernel, q.dtype, D)
    is_dkdv = kernel is grouped_attention_dkdv_kernel
    programs = triton.cdiv(T, N) * G if is_dkdv else triton.cdiv(T, M) * H
    constants = dict(H=H, G=G, D=D, TILE_M=M, TILE_N=N, EVEN=T % max(M, N) == 0)
    # Spans have 2 lines for documents (one range), and 8 lines for blocks (two ranges).
    constants["R"] = 1 if spans is None else max(1, spans.shape[1] // 4)
    strides = (x.stride(1 if T > 1 else 0) for x in (q, k, v))  # of one token any would do
    args = (q, k, v, *tensors, spans, T, *strides, scale)
    launch(kernel, (programs * B,), *args, **constants, num_warps=warps, num_stages=stages)


def _readable(x):
    """Return x (B, T, n, D) if the kernels can read it in place, else a copy.

    That is with heads next to each other, samples after each other, and tokens at addresses that
    are multiples of 16 bytes, for wide reads.
    """
    _, T, n, D = x.shape
    token = x.stride(1)
    is_regular = token >= n * D and x.stride() == (T * token, token, D, 1)
    is_aligned = (x.data_ptr() | token * x.element_size()) % 16 == 0
    return x if is_regular and is_aligned else _packed(x)


def _forward(q, k, v, scale, spans):
    """Return out (B, T, H, D) and lse (B, H, T)."""
    q, k, v = map(_readable, (q, k, v))
    out, lse = _fake(q, k, v, scale, spans)
    if out.numel():
        _run(grouped_attention_forward_kernel, q, k, v, (out, lse), scale, spans)
    return out, lse


def _fake(q, k, v, scale, spans):
    """Return uninitialized out and lse."""
    B, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)


def _backward(grad, q, k, v, scale, spans, out, lse):
    """Return the gradients of q, k and v."""
    q, k, v = map(_readable, (q, k, v))
    grad = _packed(grad)
    dq, dk, dv = _fake_backward(grad, q, k, v)
    if out.numel():
        # The order matters: the first kernel writes delta, the second reads it.
        delta = torch.empty_like(lse)
        for_queries = (grad, out, lse, delta, dq)
        _run(grouped_attention_dq_kernel, q, k, v, for_queries, scale, spans)
        for_keys = (grad, lse, delta, dk, dv)
        _run(grouped_attention_dkdv_kernel, q, k, v, for_keys, scale, spans)
    return dq, dk, dv


def _fake_backward(grad, q, k, v, *others):
    """Return uninitialized gradients of q, k and v: contiguous, whatever the strides of those."""
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output):
    q, k, v, ctx.scale, spans = inputs
    ctx.save_for_backward(q, k, v, spans, *output)
    ctx.mark_non_differentiable(output[1])  # an output only so that backward can read it
    ctx.set_materialize_grads(False)


@once_differentiable
def _differentiate(ctx, grad, *others):
    q, k, v, spans, *output = ctx.saved_tensors
    return *_grouped_attention_backward(grad, q, k, v, ctx.scale, spans, *output), None, None


INPUTS = "Tensor q, Tensor k, Tensor v, float scale, Tensor? spans"
_grouped_attention = register(
    "grouped_attention",
    f"({INPUTS}) -> (Tensor, Tensor)",
    _forward,
    _fake,
    _differentiate,
    _save,
)
_grouped_attention_backward = register(
    "grouped_attention_backward",
    f"(Tensor grad, {INPUTS}, Tensor out, Tensor lse) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)


def fits(q, k, v):
    """Whether the kernels support these shapes and this dtype."""
    B, T, H, D = q.shape
    is_grouped = k.shape == v.shape == (B, T, k.shape[2], D) and H % k.shape[2] == 0
    is_alike = q.dtype == k.dtype == v.dtype and q.dtype in DTYPES
    return is_grouped and is_alike and D in HEAD_DIMS and T > 0


def grouped_attention(q, k, v, scale=None, spans=None):
    # PyTorch computes what the kernels do not support: other head dims, float64, other keys.
    if not runs_on(q) or not fits(q, k, v):
        return grouped_attention_ref(q, k, v, scale, spans)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if spans is not None:
        if spans.shape[1] == 2:  # documents: the kernels read those of each text
            spans = spans.expand(len(q), -1, -1)
        spans = spans.contiguous()
    return _grouped_attention(q, k, v, scale, spans)[0]


grouped_attention.__doc__ = grouped_attention_ref.__doc__
