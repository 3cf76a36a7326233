"""Bidirectional attention on packed projections, with rotary positions and QK-norm.

    S = scale * Q K^T,   P = softmax(S),   O = P V,     scale = 1 / sqrt(D)
    QK-norm (Henry et al., 2010.04245): q and k are divided by their root mean square
    rotary (Su et al., 2104.09864), then: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)

Forward (FlashAttention-2, 2307.08691; online softmax, Milakov and Gimelshein, 1805.02867). A
program owns a block of queries and walks over the keys with a running maximum m and sum s; S never
exists whole:

    m' = max(m, max_j S_ij)
    s' = s e^(m-m') + sum_j e^(S_ij-m')
    O' = O e^(m-m') + sum_j e^(S_ij-m') V_j

It saves lse = m + log s, from which the backward rebuilds P = e^(S - lse). Powers are of 2, as the
hardware's are.

    delta_i = dO_i . O_i          dV = P^T dO          dS = P * (dO V^T - delta)
    dQ = scale * dS K             dK = scale * dS^T Q

dQ sums over keys, dK and dV over queries: two kernels, each owning what it sums, so nothing is
added atomically and two runs give equal bits. The second builds S^T = K Q^T, as its products need
it. Q, K and V are read from the packed (B, T, 3, H, D) in place; their gradients go to one such
buffer. Heads of 32 and 64: for wider ones PyTorch has cuDNN's strong kernel.

In windows of several documents a program visits only the tiles that the documents of its rows
touch. Positions of a document see each other: the spans of keys also say which queries see them.
"""

from __future__ import annotations

import torch

from kernels.launch import ENABLED, jit, launch, register, runs_on, tl, triton
from kernels.reference import MAX_T, attention_ref, prepare

HEAD_DIMS = (32, 64)
MAX_FUSED = 256  # longer windows are better off with cuDNN: reasoned, not measured
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
constant = tl.constexpr if ENABLED else float
LOG2E = constant(1.4426950408889634)  # e^x = 2^(x log2 e)
EPS = constant(torch.finfo(torch.float32).eps)  # what F.rms_norm adds to any dtype by default


# ---- Reading and writing blocks of rows. EVEN: no block reaches beyond the end of the sequence


@jit
def _load(ptr, rows, stride, T, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows (M,) of a (T, D) matrix, zeros beyond its end."""
    ptrs = ptr + rows[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(ptrs) if EVEN else tl.load(ptrs, mask=rows[:, None] < T, other=0.0)


@jit
def _store(ptr, rows, stride, T, x, D: tl.constexpr, EVEN: tl.constexpr):
    ptrs = ptr + rows[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=None if EVEN else rows[:, None] < T)


@jit
def _load_at(ptr, at, rows, T, EVEN: tl.constexpr):
    """Elements at these offsets (M, n), zeros in rows beyond the end."""
    return tl.load(ptr + at) if EVEN else tl.load(ptr + at, mask=rows[:, None] < T, other=0.0)


@jit
def _load_qk(
    ptr, rows, stride, T, cos, sin, D: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr
):
    """Rows of q or k as the products see them: normalised, rotated, rounded to the dtype of qkv."""
    raw = _load(ptr, rows, stride, T, D, EVEN)
    if cos is None and not NORM:
        return raw
    x = raw.to(tl.float32)
    if NORM:
        r = tl.rsqrt(tl.sum(x * x, 1) / D + EPS)
    if cos is not None:
        # Read the other half of each pair again (from the cache): no moves between threads.
        d = tl.arange(0, D)[None, :]
        table = rows[:, None] * (D // 2) + d % (D // 2)
        swapped = _load_at(ptr, rows[:, None] * stride + (d + D // 2) % D, rows, T, EVEN)
        c = _load_at(cos, table, rows, T, EVEN)
        s = _load_at(sin, table, rows, T, EVEN)
        x = x * c + swapped.to(tl.float32) * tl.where(d < D // 2, -s, s)
    if NORM:
        x = x * r[:, None]
    return x.to(raw.dtype)


@jit
def _grad_qk(
    g, ptr, rows, stride, T, cos, sin, D: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr
):
    """Gradient of _load_qk: rotate g (M, D) float32 back, then undo x -> x / rms(x)."""
    if cos is not None:
        M: tl.constexpr = g.shape[0]
        table = rows[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
        c = _load_at(cos, table, rows, T, EVEN)
        s = _load_at(sin, table, rows, T, EVEN)
        g1, g2 = tl.split(tl.permute(tl.reshape(g, (M, 2, D // 2)), (0, 2, 1)))
        g = tl.join(g1 * c + g2 * s, g2 * c - g1 * s)
        g = tl.reshape(tl.permute(g, (0, 2, 1)), (M, D))
    if NORM:
        x = _load(ptr, rows, stride, T, D, EVEN).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, 1) / D + EPS)[:, None]
        g = r * (g - x * r * r * (tl.sum(g * x, 1) / D)[:, None])
    return g


@jit
def _place(T, H, BLOCK: tl.constexpr):
    """A program's rows, sample and head. A head's blocks are neighbours: they share K, V in L2."""
    blocks = tl.cdiv(T, BLOCK)
    head = tl.program_id(0) // blocks
    rows = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    return rows, (head // H).to(tl.int64), head % H


@jit
def _range(spans, rows, b, T, STEP: tl.constexpr):
    """The start and end (M,) of the documents of rows, an empty one beyond the end; the first and
    last position that any of them sees, in steps of tiles."""
    start = rows
    end = rows
    first = 0
    last = T
    if spans is not None:
        start = tl.load(spans + 2 * b * T + rows, mask=rows < T, other=T)
        end = tl.load(spans + 2 * b * T + T + rows, mask=rows < T, other=0)
        first = tl.min(start, 0) // STEP * STEP
        last = tl.max(end, 0)
    return start, end, first, last


@jit
def _inside(start, end, at):
    """(M, N): whether positions `at` (N,) are within each of the documents (M,)."""
    return (start[:, None] <= at[None, :]) & (at[None, :] < end[:, None])


# ---- Kernels. qkv (B, T, 3, H, D), out and grad (B, T, H, D), lse and delta (B, H, T)
# cos, sin (T, D/2) and spans (B, 2, T) may be None


@jit
def attention_forward_kernel(
    qkv,
    out,
    lse,
    cos,
    sin,
    spans,
    T,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
):
    rows, b, h = _place(T, H, BLOCK_M)
    qkv += 3 * b * T * H * D + h * D
    q = _load_qk(qkv, rows, 3 * H * D, T, cos, sin, D, EVEN, NORM)  # (BLOCK_M, D)
    scale *= LOG2E
    top = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: a tile may have no key that a row sees
    total = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, D), tl.float32)
    start, end, first, last = _range(spans, rows, b, T, BLOCK_N)
    for at in range(first, last, BLOCK_N):
        cols = at + tl.arange(0, BLOCK_N)
        k = _load_qk(qkv + H * D, cols, 3 * H * D, T, cos, sin, D, EVEN, NORM)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        if spans is not None:
            s = tl.where(_inside(start, end, cols), s, float("-inf"))
        elif not EVEN:
            s = tl.where(cols[None, :] < T, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(p, 1)
        v = _load(qkv + 2 * H * D, cols, 3 * H * D, T, D, EVEN)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        top = new
    _store(out + b * T * H * D + h * D, rows, H * D, T, o / total[:, None], D, EVEN)
    tl.store(lse + (b * H + h) * T + rows, (top + tl.log2(total)) / LOG2E, mask=rows < T)


@jit
def attention_dq_kernel(
    qkv,
    grad,
    out,
    lse,
    delta,
    dqkv,
    cos,
    sin,
    spans,
    T,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
):
    """dQ of a block of queries; also stores delta, which the kernel of dK and dV reads."""
    rows, b, h = _place(T, H, BLOCK_M)
    qkv += 3 * b * T * H * D + h * D
    here = b * T * H * D + h * D
    line = (b * H + h) * T
    do = _load(grad + here, rows, H * D, T, D, EVEN)
    o = _load(out + here, rows, H * D, T, D, EVEN)
    dl = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + line + rows, dl, mask=rows < T)
    q = _load_qk(qkv, rows, 3 * H * D, T, cos, sin, D, EVEN, NORM)
    z = tl.load(lse + line + rows, mask=rows < T, other=0.0) * LOG2E
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    start, end, first, last = _range(spans, rows, b, T, BLOCK_N)
    for at in range(first, last, BLOCK_N):
        cols = at + tl.arange(0, BLOCK_N)
        k = _load_qk(qkv + H * D, cols, 3 * H * D, T, cos, sin, D, EVEN, NORM)
        v = _load(qkv + 2 * H * D, cols, 3 * H * D, T, D, EVEN)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        p = tl.exp2(s * (scale * LOG2E) - z[:, None])
        if spans is not None:
            p = tl.where(_inside(start, end, cols), p, 0.0)
        elif not EVEN:  # where lse is very negative a key beyond the end would give inf * 0
            p = tl.where(cols[None, :] < T, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        dq = tl.dot((p * (dp - dl[:, None])).to(k.dtype), k, dq, input_precision="ieee")
    dq = _grad_qk(dq * scale, qkv, rows, 3 * H * D, T, cos, sin, D, EVEN, NORM)
    _store(dqkv + 3 * b * T * H * D + h * D, rows, 3 * H * D, T, dq, D, EVEN)


@jit
def attention_dkdv_kernel(
    qkv,
    grad,
    lse,
    delta,
    dqkv,
    cos,
    sin,
    spans,
    T,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
):
    """dK and dV of a block of keys. Keys beyond the end give numbers that are never stored."""
    cols, b, h = _place(T, H, BLOCK_N)
    qkv += 3 * b * T * H * D + h * D
    grad += b * T * H * D + h * D
    line = (b * H + h) * T
    k = _load_qk(qkv + H * D, cols, 3 * H * D, T, cos, sin, D, EVEN, NORM)
    v = _load(qkv + 2 * H * D, cols, 3 * H * D, T, D, EVEN)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    start, end, first, last = _range(spans, cols, b, T, BLOCK_M)
    for at in range(first, last, BLOCK_M):
        rows = at + tl.arange(0, BLOCK_M)
        q = _load_qk(qkv, rows, 3 * H * D, T, cos, sin, D, EVEN, NORM)
        # Queries beyond the end: lse = inf makes their p zero.
        z = tl.load(lse + line + rows, mask=rows < T, other=float("inf")) * LOG2E
        s = tl.dot(k, tl.trans(q), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
        p = tl.exp2(s * (scale * LOG2E) - z[None, :])
        if spans is not None:
            p = tl.where(_inside(start, end, rows), p, 0.0)
        do = _load(grad, rows, H * D, T, D, EVEN)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dl = tl.load(delta + line + rows, mask=rows < T, other=0.0)
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        dk = tl.dot((p * (dp - dl[None, :])).to(q.dtype), q, dk, input_precision="ieee")
    dk = _grad_qk(dk * scale, qkv + H * D, cols, 3 * H * D, T, cos, sin, D, EVEN, NORM)
    dqkv += 3 * b * T * H * D + h * D
    _store(dqkv + H * D, cols, 3 * H * D, T, dk, D, EVEN)
    _store(dqkv + 2 * H * D, cols, 3 * H * D, T, dv, D, EVEN)


# ---- Launches


def tiles(kernel, dtype, D, documents=False):
    """(BLOCK_M, BLOCK_N, warps, stages): no spills on sm_80, 90, 100; no GPU has timed them."""
    if dtype == torch.float32:  # to be exact: its products run on no tensor cores
        if kernel is attention_dkdv_kernel:
            return (16 if D == 64 else 32, 32, 8 if documents else 4, 1)
        return (32, 16 if documents else 32, 8, 1)
    if documents and kernel is not attention_forward_kernel:  # their spans take registers
        return (2048 // D, 64, 8, 2) if kernel is attention_dkdv_kernel else (64, 32, 4, 2)
    # To be timed on sm_90: (128, 128, 8, 3) forward, (128, 128, 8, 2) for dQ, if nothing is fused.
    if kernel is attention_dkdv_kernel:
        return (2048 // D, 128, 8, 2)
    return (128, 64, 8, 2)


def fused(dtype, T):
    """Whether RoPE and QK-norm go into the kernels."""
    return dtype != torch.float32 and T <= MAX_FUSED


def _run(kernel, qkv, tensors, cos, sin, spans, qk_norm):
    """Launch a kernel on a packed qkv: a program for a block of rows of a head of a sample."""
    B, T, _, H, D = qkv.shape
    M, N, warps, stages = tiles(kernel, qkv.dtype, D, spans is not None)
    block = N if kernel is attention_dkdv_kernel else M
    constants = dict(H=H, D=D, BLOCK_M=M, BLOCK_N=N, EVEN=T % max(M, N) == 0, NORM=qk_norm)
    args = (qkv, *tensors, cos, sin, spans, T, D**-0.5)
    grid = (triton.cdiv(T, block) * B * H,)
    launch(kernel, grid, *args, **constants, num_warps=warps, num_stages=stages)


def _packed(x):
    """x without gaps, at an address from which 16 bytes can be read at a time."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _forward(qkv, cos, sin, spans, qk_norm):
    qkv = _packed(qkv)
    out, lse = _fake(qkv, cos, sin, spans, qk_norm)
    if out.numel():
        _run(attention_forward_kernel, qkv, (out, lse), cos, sin, spans, qk_norm)
    return out, lse


def _fake(qkv, cos, sin, spans, qk_norm):
    B, T, _, H, D = qkv.shape
    return qkv.new_empty((B, T, H, D)), qkv.new_empty((B, H, T), dtype=torch.float32)


def _backward(grad, qkv, out, lse, cos, sin, spans, qk_norm):
    qkv = _packed(qkv)
    grad = _packed(grad)
    dqkv = qkv.new_empty(qkv.shape)
    if dqkv.numel():
        delta = torch.empty_like(lse)
        _run(attention_dq_kernel, qkv, (grad, out, lse, delta, dqkv), cos, sin, spans, qk_norm)
        _run(attention_dkdv_kernel, qkv, (grad, lse, delta, dqkv), cos, sin, spans, qk_norm)
    return dqkv


def _save(ctx, inputs, output):
    qkv, *options, ctx.qk_norm = inputs
    ctx.save_for_backward(qkv, *output, *options)


def _differentiate(ctx, grad, grad_lse):
    return _attention_backward(grad, *ctx.saved_tensors, ctx.qk_norm), None, None, None, None


_attention = register(
    "attention",
    "(Tensor qkv, Tensor? cos, Tensor? sin, Tensor? spans, bool qk_norm) -> (Tensor, Tensor)",
    _forward,
    _fake,
    _differentiate,
    _save,
)
_attention_backward = register(
    "attention_backward",
    "(Tensor grad, Tensor qkv, Tensor out, Tensor lse, Tensor? cos, Tensor? sin, Tensor? spans,"
    " bool qk_norm) -> Tensor",
    _backward,
    lambda grad, qkv, *others: qkv.new_empty(qkv.shape),
)


def attention(qkv, cos=None, sin=None, qk_norm=False, causal=False, spans=None):
    T, D = qkv.shape[1], qkv.shape[4]
    fits = D in HEAD_DIMS and 1 <= T <= MAX_T and qkv.dtype in DTYPES
    # What the kernels do not take goes to PyTorch: causal, other head dims, float64.
    if causal or not fits or not runs_on(qkv):
        return attention_ref(qkv, cos, sin, qk_norm, causal, spans)
    if cos is not None:
        if not cos.shape == sin.shape == (T, D // 2):
            shapes = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
            raise ValueError(f"rotary tables must be (T, D/2) = {(T, D // 2)}, got {shapes}")
        cos, sin = (table.detach().float().contiguous() for table in (cos, sin))
    if spans is not None:
        spans = spans.contiguous()
    if (cos is not None or qk_norm) and not fused(qkv.dtype, T):
        qkv = torch.stack(prepare(qkv, cos, sin, qk_norm), 2)
        return _attention(qkv, None, None, spans, False)[0]
    return _attention(qkv, cos, sin, spans, qk_norm)[0]


attention.__doc__ = attention_ref.__doc__
