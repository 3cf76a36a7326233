"""Bidirectional attention on packed projections, with FlashAttention kernels.

    S = scale * Q K^T,   P = softmax(S),   O = P V,     scale = 1 / sqrt(D)

Forward (FlashAttention-2, 2307.08691; online softmax, Milakov and Gimelshein, 1805.02867): a
program processes a tile of queries. It iterates over tiles of keys with a running maximum m and
sum s (`top` and `total` in the code), so that S is never stored:

    m' = max(m, max_j S_ij)
    s' = s e^(m-m') + sum_j e^(S_ij-m')
    O' = O e^(m-m') + sum_j e^(S_ij-m') V_j

It saves lse = m + log s, from which backward recomputes P = e^(S - lse). The code computes powers
of 2 instead of e, because the hardware does.

    delta_i = dO_i . O_i          dV = P^T dO          dS = P * (dO V^T - delta)
    dQ = scale * dS K             dK = scale * dS^T Q

Backward: dQ is a sum over keys, dK and dV are sums over queries. Two kernels compute them, and each
program owns the rows that it sums. So there are no atomic additions, and two runs give equal bits.
The second kernel computes S^T = K Q^T, because its products need it. For short sequences without
spans, on Hopper and in 16 bits, one kernel can compute all three (FUSED_T): a program then owns a
whole head.

Q, K and V are read in place from the packed (B, T, 3, H, D); their gradients are written to one
buffer of that shape. If Q and K are normalized or rotated first, prepare_kernel writes the results
to a buffer qk, and in backward turns the gradients of qk into those of Q and K. V is not copied.
The kernels of dQ, dK and dV can do the latter before they store dQ and dK (EPILOGUE).

The kernels support heads of 32 and 64. For wider heads, PyTorch has the fast kernel of cuDNN, and
grouped_attention.py has kernels for 128 and for fewer heads of keys than of queries.

Spans (see reference.py) limit which keys a query sees. A program then visits only the tiles that
one of its rows sees. With documents, a row sees one range, and it is seen by the same range. With
blocks, a row sees two ranges, and it is seen by two other ones.
"""

from __future__ import annotations

import functools

import torch
from torch.autograd.function import once_differentiable

from .launch import INTERPRET, LOG2E, jit, launch, register, runs_on, tl, triton
from .reference import MAX_T, attention_ref

HEAD_DIMS = (32, 64)
MAX_OURS = 1024  # T up to which a layer is faster with these than with cuDNN (results/hopper.md)
# T up to which one kernel computes the whole backward on Hopper, at most 256. 0: none, because it
# has not been timed (studies/fused_backward.py).
FUSED_T = 0
# Whether the kernels of dQ, dK and dV also compute the gradients of normalization and rotation, in
# place of prepare_kernel: a launch and a rounding less. It has not been timed, either.
EPILOGUE = False
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = torch.finfo(torch.float32).eps  # that of F.rms_norm, which computes in float32


# ---- Reading and writing tiles of rows
# A row is the query or the key of one position of one head. EVEN: T is a multiple of the tile
# sizes, so no tile exceeds the sequence and no mask is needed.
@jit
def _load(ptr, rows, stride, T, D: tl.constexpr, EVEN: tl.constexpr):
    """Load rows (M,) of a (T, D) matrix, with zeros beyond its end."""
    ptrs = ptr + rows[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(ptrs) if EVEN else tl.load(ptrs, mask=rows[:, None] < T, other=0.0)


@jit
def _store(ptr, rows, stride, T, x, D: tl.constexpr, EVEN: tl.constexpr):
    """Store x (M, D) as rows (M,) of a (T, D) matrix; rows beyond its end are skipped."""
    ptrs = ptr + rows[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=None if EVEN else rows[:, None] < T)


@jit
def _place(T, H, TILE: tl.constexpr):
    """Return a program's rows (TILE,), sample and head.

    Successive programs process the same head, so that they share its K and V in the L2 cache.
    """
    n_tiles = tl.cdiv(T, TILE)
    head = tl.program_id(0) // n_tiles
    rows = (tl.program_id(0) % n_tiles) * TILE + tl.arange(0, TILE)
    return rows, (head // H).to(tl.int64), head % H


@jit
def _range(spans, line, rows, T, STEP: tl.constexpr):
    """Return the range that each row sees, and the range of tiles to visit.

    line: number of the line of `spans` that holds the starts; the next one holds the ends. Without
    spans all positions are visited.

    Returns start and end (M,) of each row's range (empty for rows beyond the end), and the range
    [first, last) of positions to visit; first is rounded down to a multiple of STEP.
    """
    start = rows
    end = rows
    first = 0
    last = T
    if spans is not None:
        start = tl.load(spans + line * T + rows, mask=rows < T, other=T)
        end = tl.load(spans + line * T + T + rows, mask=rows < T, other=0)
        first = tl.min(start, 0) // STEP * STEP
        last = tl.max(end, 0)
    return start, end, first, last


@jit
def _inside(start, end, at):
    """Whether each position `at` (N,) is in each range from start (M,) to end (M,): (M, N)."""
    return (start[:, None] <= at[None, :]) & (at[None, :] < end[:, None])


# ---- Normalization and rotation of queries and keys, and their gradients
# In halves (M, D/2) of rows: the halves x1, x2 of a normalized row are rotated together (see
# reference.rotate):
#
#     y1 = c x1 - s x2,    y2 = c x2 + s x1
@jit
def _normalized(ptr, at, inside, EPS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr):
    """Load the halves of rows, the first ones from ptr + at; return x1, x2 and 1 / RMS (M, 1)."""
    x1 = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(ptr + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    root = tl.full((at.shape[0], 1), 1.0, tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / D + EPS)[:, None]
    return x1 * root, x2 * root, root


@jit
def _angles(cos, sin, at, inside, HALF: tl.constexpr):
    """Return the cosines and sines (M, HALF) of positions `at` (M,): of angle 0 without tables."""
    c = tl.full((at.shape[0], HALF), 1.0, tl.float32)
    s = tl.full((at.shape[0], HALF), 0.0, tl.float32)
    if cos is not None:
        angle = at[:, None] * HALF + tl.arange(0, HALF)[None, :]  # place in the tables (T, HALF)
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
    return c, s


@jit
def _unprepared(d1, d2, x1, x2, root, c, s, D: tl.constexpr, NORM: tl.constexpr):
    """Return the gradients of the halves of q or k from those of qk, d1 and d2."""
    g1 = d1 * c + d2 * s  # rotated back
    g2 = d2 * c - d1 * s
    if NORM:  # dx = (g - x mean(g x)) / RMS, with x the normalized row
        mean = tl.sum(g1 * x1 + g2 * x2, 1)[:, None] / D
        g1 = root * (g1 - x1 * mean)
        g2 = root * (g2 - x2 * mean)
    return g1, g2


@jit
def _store_gradient(
    dqkv,
    qkv,
    rows,
    T,
    d,
    cos,
    sin,
    EPS: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Store d (M, D), the gradient of rows of qk, as that of q or k if NORM or tables are given.

    dqkv, qkv: at the first row of this head of q or k
    """
    if NORM or cos is not None:
        HALF: tl.constexpr = D // 2
        d1, d2 = tl.split(tl.trans(tl.reshape(d, (d.shape[0], 2, HALF)), (0, 2, 1)))
        inside = rows[:, None] < T
        at = rows[:, None] * (3 * H * D) + tl.arange(0, HALF)[None, :]
        x1, x2, root = _normalized(qkv, at, inside, EPS, D, NORM)
        c, s = _angles(cos, sin, rows, inside, HALF)
        g1, g2 = _unprepared(d1, d2, x1, x2, root, c, s, D, NORM)
        tl.store(dqkv + at, g1.to(dqkv.dtype.element_ty), mask=inside)
        tl.store(dqkv + at + HALF, g2.to(dqkv.dtype.element_ty), mask=inside)
    else:
        _store(dqkv, rows, 3 * H * D, T, d, D, EVEN)


# ---- Kernels
# qkv: (B, T, 3, H, D); out and grad: (B, T, H, D); lse and delta: (B, H, T)
# qk: normalized and rotated queries and keys (B, T, 2, H, D); without that it is qkv itself
# N: 2 if qk is a buffer of its own, 3 if it is qkv: the size of its third dimension
# spans: None or (B, 2, T) of documents, with R = 1; (1, 8, T) of blocks, with R = 2
# R: number of ranges that a row sees
# cos, sin, EPS, NORM of backward: those of prepare_kernel if dQ and dK are to be the gradients of q
# and k; without them, they are those of qk
@jit
def attention_forward_kernel(
    qk,
    qkv,
    out,
    lse,
    spans,
    T,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
):
    """Compute `out` and `lse` for a tile of queries."""
    rows, b, h = _place(T, H, TILE_M)
    qk += N * b * T * H * D + h * D
    v_ptr = qkv + 3 * b * T * H * D + (2 * H + h) * D
    q = _load(qk, rows, N * H * D, T, D, EVEN)  # (TILE_M, D)
    scale *= LOG2E
    # Not -inf: if a row sees no key of the first tile, -inf - (-inf) would be NaN.
    top = tl.full((TILE_M,), -1e30, tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    o = tl.zeros((TILE_M, D), tl.float32)
    for r in tl.static_range(R):
        start, end, first, last = _range(spans, 2 * (b if R == 1 else r), rows, T, TILE_N)
        for at in range(first, last, TILE_N):
            cols = at + tl.arange(0, TILE_N)
            k = _load(qk + H * D, cols, N * H * D, T, D, EVEN)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (TILE_M, TILE_N)
            if spans is not None:
                s = tl.where(_inside(start, end, cols), s, float("-inf"))
            elif not EVEN:
                s = tl.where(cols[None, :] < T, s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - new[:, None])
            shrink = tl.exp2(top - new)
            total = total * shrink + tl.sum(p, 1)
            v = _load(v_ptr, cols, 3 * H * D, T, D, EVEN)
            o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
            top = new
    _store(out + b * T * H * D + h * D, rows, H * D, T, o / total[:, None], D, EVEN)
    tl.store(lse + (b * H + h) * T + rows, (top + tl.log2(total)) / LOG2E, mask=rows < T)


@jit
def attention_dq_kernel(
    qk,
    qkv,
    grad,
    out,
    lse,
    delta,
    dqkv,
    spans,
    T,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
    cos=None,
    sin=None,
    EPS: tl.constexpr = EPS,
    NORM: tl.constexpr = False,
):
    """Compute dQ for a tile of queries, and delta, which attention_dkdv_kernel reads."""
    rows, b, h = _place(T, H, TILE_M)
    qk += N * b * T * H * D + h * D
    v_ptr = qkv + 3 * b * T * H * D + (2 * H + h) * D
    here = b * T * H * D + h * D
    line = (b * H + h) * T
    do = _load(grad + here, rows, H * D, T, D, EVEN)
    o = _load(out + here, rows, H * D, T, D, EVEN)
    dl = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + line + rows, dl, mask=rows < T)
    q = _load(qk, rows, N * H * D, T, D, EVEN)
    z = tl.load(lse + line + rows, mask=rows < T, other=0.0) * LOG2E
    dq = tl.zeros((TILE_M, D), tl.float32)
    for r in tl.static_range(R):
        start, end, first, last = _range(spans, 2 * (b if R == 1 else r), rows, T, TILE_N)
        for at in range(first, last, TILE_N):
            cols = at + tl.arange(0, TILE_N)
            k = _load(qk + H * D, cols, N * H * D, T, D, EVEN)
            v = _load(v_ptr, cols, 3 * H * D, T, D, EVEN)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (TILE_M, TILE_N)
            p = tl.exp2(s * (scale * LOG2E) - z[:, None])
            if spans is not None:
                p = tl.where(_inside(start, end, cols), p, 0.0)
            elif not EVEN:  # if lse is very negative, a key beyond the end would give inf * 0
                p = tl.where(cols[None, :] < T, p, 0.0)
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            dq = tl.dot((p * (dp - dl[:, None])).to(k.dtype), k, dq, input_precision="ieee")
    here = 3 * b * T * H * D + h * D
    _store_gradient(dqkv + here, qkv + here, rows, T, dq * scale, cos, sin, EPS, H, D, NORM, EVEN)


@jit
def attention_dkdv_kernel(
    qk,
    qkv,
    grad,
    lse,
    delta,
    dqkv,
    spans,
    T,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
    cos=None,
    sin=None,
    EPS: tl.constexpr = EPS,
    NORM: tl.constexpr = False,
):
    """Compute dK and dV for a tile of keys. Results of keys beyond the end are not stored."""
    cols, b, h = _place(T, H, TILE_N)
    qk += N * b * T * H * D + h * D
    here = 3 * b * T * H * D + (H + h) * D  # of this head's keys, in qkv
    grad += b * T * H * D + h * D
    line = (b * H + h) * T
    k = _load(qk + H * D, cols, N * H * D, T, D, EVEN)
    v = _load(qkv + here + H * D, cols, 3 * H * D, T, D, EVEN)
    dk = tl.zeros((TILE_N, D), tl.float32)
    dv = tl.zeros((TILE_N, D), tl.float32)
    for r in tl.static_range(R):
        start, end, first, last = _range(spans, 2 * b if R == 1 else 4 + 2 * r, cols, T, TILE_M)
        for at in range(first, last, TILE_M):
            rows = at + tl.arange(0, TILE_M)
            q = _load(qk, rows, N * H * D, T, D, EVEN)
            # For queries beyond the end, lse = inf makes p zero.
            z = tl.load(lse + line + rows, mask=rows < T, other=float("inf")) * LOG2E
            s = tl.dot(k, tl.trans(q), input_precision="ieee")  # (TILE_N, TILE_M)
            if spans is not None:  # of s: of p, Triton 3.7 orders it wrongly (results/aot.md)
                s = tl.where(_inside(start, end, rows), s, float("-inf"))
            p = tl.exp2(s * (scale * LOG2E) - z[None, :])
            do = _load(grad, rows, H * D, T, D, EVEN)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            dl = tl.load(delta + line + rows, mask=rows < T, other=0.0)
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            dk = tl.dot((p * (dp - dl[None, :])).to(q.dtype), q, dk, input_precision="ieee")
    _store_gradient(dqkv + here, qkv + here, cols, T, dk * scale, cos, sin, EPS, H, D, NORM, EVEN)
    _store(dqkv + here + H * D, cols, 3 * H * D, T, dv, D, EVEN)


@jit
def attention_backward_kernel(
    qk,
    qkv,
    grad,
    out,
    lse,
    dqkv,
    T,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Compute dQ, dK and dV of one head of a short sample, without spans.

    A program has all keys, PARTS tiles of TILE_N, and their dK and dV in registers. It iterates
    over tiles of queries. All keys see a tile before the next one, so its dQ is complete then. Each
    pair of tiles takes five products; the two kernels above take seven, and read Q, K, V and dO
    twice.

    Tensor cores of Hopper want at least 64 rows. With D = 64 the kernel computes dQ^T = K^T dS^T,
    so that TILE_M can be 32: with more queries, registers spill. With D = 32 it computes dQ, and
    TILE_M must be 64: with smaller products Triton copies the next tile to where one still reads.
    """
    TRANSPOSED: tl.constexpr = D >= 64
    head = tl.program_id(0)
    b = (head // H).to(tl.int64)
    h = head % H
    qk += N * b * T * H * D + h * D
    v_ptr = qkv + 3 * b * T * H * D + (2 * H + h) * D
    grad += b * T * H * D + h * D
    out += b * T * H * D + h * D
    dqkv += 3 * b * T * H * D + h * D
    lse += (b * H + h) * T
    cols = tl.arange(0, TILE_N)
    ks = ()
    vs = ()
    dks = ()
    dvs = ()
    for i in tl.static_range(PARTS):
        at = i * TILE_N + cols
        ks = ks + (_load(qk + H * D, at, N * H * D, T, D, EVEN),)  # noqa: RUF005 (Triton has no *)
        vs = vs + (_load(v_ptr, at, 3 * H * D, T, D, EVEN),)  # noqa: RUF005
        dks = dks + (tl.zeros((TILE_N, D), tl.float32),)  # noqa: RUF005
        dvs = dvs + (tl.zeros((TILE_N, D), tl.float32),)  # noqa: RUF005
    for first in range(0, T, TILE_M):
        rows = first + tl.arange(0, TILE_M)
        q = _load(qk, rows, N * H * D, T, D, EVEN)
        do = _load(grad, rows, H * D, T, D, EVEN)
        o = _load(out, rows, H * D, T, D, EVEN)
        dl = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
        # For queries beyond the end, lse = inf makes p zero.
        z = tl.load(lse + rows, mask=rows < T, other=float("inf")) * LOG2E
        dq = tl.zeros((D, TILE_M) if TRANSPOSED else (TILE_M, D), tl.float32)
        new_dks = ()
        new_dvs = ()
        for i in tl.static_range(PARTS):
            s = tl.dot(ks[i], tl.trans(q), input_precision="ieee")  # (TILE_N, TILE_M)
            dp = tl.dot(vs[i], tl.trans(do), input_precision="ieee")
            p = tl.exp2(s * (scale * LOG2E) - z[None, :])
            if not EVEN:  # if lse is very negative, a key beyond the end would give inf * 0
                p = tl.where((i * TILE_N + cols)[:, None] < T, p, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dvs[i], input_precision="ieee")
            ds = (p * (dp - dl[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dks[i], input_precision="ieee")
            if TRANSPOSED:
                dq = tl.dot(tl.trans(ks[i]), ds, dq, input_precision="ieee")
            else:
                dq = tl.dot(tl.trans(ds), ks[i], dq, input_precision="ieee")
            new_dks = new_dks + (dk,)  # noqa: RUF005
            new_dvs = new_dvs + (dv,)  # noqa: RUF005
        dks = new_dks
        dvs = new_dvs
        if TRANSPOSED:
            dq = tl.trans(dq)
        _store(dqkv, rows, 3 * H * D, T, dq * scale, D, EVEN)
    for i in tl.static_range(PARTS):
        at = i * TILE_N + cols
        _store(dqkv + H * D, at, 3 * H * D, T, dks[i] * scale, D, EVEN)
        _store(dqkv + 2 * H * D, at, 3 * H * D, T, dvs[i], D, EVEN)


@jit
def prepare_kernel(
    qkv,
    qk,
    dqkv,
    cos,
    sin,
    n_rows,
    T,
    EPS: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Normalize and rotate queries and keys, or compute the gradients of that.

    Forward: from q and k in qkv to qk. Backward: in dqkv, the gradients of qk are replaced by those
    of q and k; what they depend on is computed again from qkv. A program processes ROWS of the
    n_rows = B T 2 H rows (D,), in the order of qk: the queries of all heads of a token, then its
    keys.
    """
    HALF: tl.constexpr = D // 2
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # rows
    j = tl.arange(0, HALF)  # columns of a half
    inside = (i < n_rows)[:, None]
    token = i // (2 * H)
    at = ((token * 3 * H + i % (2 * H)) * D)[:, None] + j[None, :]  # of first halves, in qkv
    x1, x2, root = _normalized(qkv, at, inside, EPS, D, NORM)
    c, s = _angles(cos, sin, token % T, inside, HALF)
    if BACKWARD:
        d1 = tl.load(dqkv + at, mask=inside, other=0.0).to(tl.float32)
        d2 = tl.load(dqkv + at + HALF, mask=inside, other=0.0).to(tl.float32)
        g1, g2 = _unprepared(d1, d2, x1, x2, root, c, s, D, NORM)
        tl.store(dqkv + at, g1.to(dqkv.dtype.element_ty), mask=inside)
        tl.store(dqkv + at + HALF, g2.to(dqkv.dtype.element_ty), mask=inside)
    else:
        out = qk + i[:, None] * D + j[None, :]
        tl.store(out, (x1 * c - x2 * s).to(qk.dtype.element_ty), mask=inside)
        tl.store(out + HALF, (x2 * c + x1 * s).to(qk.dtype.element_ty), mask=inside)


# ---- Launches
def tiles(kernel, dtype, D, T=0, has_spans=False):
    """Return (TILE_M, TILE_N, warps, stages) of a kernel.

    In 16 bits: the fastest on an H200 (results/hopper.md). No registers spill on sm_80, 90 and 100.
    """
    if kernel is attention_backward_kernel:  # in 16 bits; T <= 256, in tiles of N keys
        if T <= 128:
            return (64, 64, 4, 2) if T <= 64 else (64, 128, 8, 2)
        if D == 32:
            return 64, 128, 8, 2
        return (32, 256, 8, 3) if T == 256 else (16, 256, 8, 2)  # masks need registers, too
    is_dkdv = kernel is attention_dkdv_kernel
    if dtype == torch.float32:  # exact products, which do not use tensor cores
        return (D // 2, 16, D // 8, 1) if is_dkdv else (16, 16, 8, 1)
    if is_dkdv:
        return 32, 64, 4, 3
    is_forward = kernel is attention_forward_kernel
    if has_spans:  # short ranges: small tiles, and less to fetch ahead
        return 64, 64, 4, 3 if is_forward and D == 64 else 2
    if is_forward and D == 32:
        return 128, 64, 4, 3
    return (128, 64, 8, 3) if T > 512 and D == 64 else (64, 64, 4, 3)


def _run(kernel, qk, qkv, tensors, spans, **more):
    """Launch a kernel with one program for each tile of rows, head and sample.

    qk: (B, T, 2, H, D), or qkv if queries and keys are not prepared
    more: cos, sin and NORM, for gradients of q and k in place of those of qk
    """
    B, T, _, H, D = qkv.shape
    M, N, warps, stages = tiles(kernel, qkv.dtype, D, T, spans is not None)
    tile = N if kernel is attention_dkdv_kernel else M
    constants = dict(H=H, D=D, N=qk.shape[2], TILE_M=M, TILE_N=N, EVEN=T % max(M, N) == 0)
    # Spans have 2 lines for documents (one range), and 8 lines for blocks (two ranges).
    constants["R"] = 1 if spans is None else max(1, spans.shape[1] // 4)
    args = (qk, qkv, *tensors, spans, T, D**-0.5)
    grid = (triton.cdiv(T, tile) * B * H,)
    launch(kernel, grid, *args, **constants, **more, num_warps=warps, num_stages=stages)


def _run_fused(qk, qkv, tensors):
    """Launch attention_backward_kernel with one program for each head and sample."""
    B, T, _, H, D = qkv.shape
    M, N, warps, stages = tiles(attention_backward_kernel, qkv.dtype, D, T)
    parts = triton.cdiv(T, N)
    constants = dict(H=H, D=D, N=qk.shape[2], TILE_M=M, TILE_N=N, PARTS=parts)
    constants["EVEN"] = parts * N == T and T % M == 0
    args = (qk, qkv, *tensors, T, D**-0.5)
    options = dict(num_warps=warps, num_stages=stages)
    launch(attention_backward_kernel, (B * H,), *args, **constants, **options)


def _fuses(qkv, spans):
    """Whether one kernel computes the backward of qkv (B, T, 3, H, D)."""
    is_small = qkv.shape[1] <= FUSED_T and qkv.dtype != torch.float32
    return spans is None and is_small and _is_hopper(qkv.device)


@functools.cache
def _is_hopper(device):
    """Whether a device is of sm_90, on which the fused kernel fits; the interpreter counts."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) == (9, 0)
    return INTERPRET or triton.runtime.driver.active.get_current_target().arch == 90


def _prepare(qkv, qk, dqkv, cos, sin, qk_norm):
    """Write the normalized and rotated queries and keys of qkv to qk (B, T, 2, H, D).

    With dqkv (and qk None) replace there the gradients of qk by those of q and k.
    """
    B, T, _, H, D = qkv.shape
    n_rows = 2 * B * T * H
    rows = 2048 // D
    constants = dict(EPS=EPS, H=H, D=D, NORM=qk_norm, BACKWARD=dqkv is not None, ROWS=rows)
    args = (qkv, qk, dqkv, cos, sin, n_rows, T)
    launch(prepare_kernel, (triton.cdiv(n_rows, rows),), *args, **constants, num_warps=4)


def _packed(x):
    """Return x contiguous, at an address aligned to 16 bytes for wide reads."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _forward(qkv, cos, sin, qk_norm, spans):
    """Return out (B, T, H, D), lse (B, H, T), and qk (B, T, 2, H, D), or (0,) if that is qkv."""
    qkv = _packed(qkv)
    out, lse, qk = _fake(qkv, cos, sin, qk_norm, spans)
    if out.numel():
        if len(qk):
            _prepare(qkv, qk, None, cos, sin, qk_norm)
        _run(attention_forward_kernel, qk if len(qk) else qkv, qkv, (out, lse), spans)
    return out, lse, qk


def _fake(qkv, cos, sin, qk_norm, spans):
    """Return uninitialized out, lse and qk."""
    B, T, _, H, D = qkv.shape
    is_prepared = cos is not None or qk_norm
    qk = qkv.new_empty((B, T, 2, H, D) if is_prepared else (0,))
    return qkv.new_empty((B, T, H, D)), qkv.new_empty((B, H, T), dtype=torch.float32), qk


def _backward_of_two(qk, qkv, grad, out, lse, dqkv, spans, **more):
    """Launch the kernels of dQ, and of dK and dV; more: of _run."""
    both = (qk, qkv)
    # The order matters: the first kernel writes delta, the second reads it.
    delta = torch.empty_like(lse)
    _run(attention_dq_kernel, *both, (grad, out, lse, delta, dqkv), spans, **more)
    _run(attention_dkdv_kernel, *both, (grad, lse, delta, dqkv), spans, **more)


def _backward(grad, qkv, cos, sin, qk_norm, spans, out, lse, qk):
    """Return the gradient of qkv (B, T, 3, H, D)."""
    qkv = _packed(qkv)
    grad = _packed(grad)
    dqkv = qkv.new_empty(qkv.shape)
    if dqkv.numel():
        both = (qk if len(qk) else qkv, qkv)
        has_epilogue = EPILOGUE and not _fuses(qkv, spans)
        if _fuses(qkv, spans):
            _run_fused(*both, (grad, out, lse, dqkv))
        else:
            more = dict(cos=cos, sin=sin, NORM=qk_norm) if has_epilogue else {}
            _backward_of_two(*both, grad, out, lse, dqkv, spans, **more)
        if len(qk) and not has_epilogue:
            _prepare(qkv, None, dqkv, cos, sin, qk_norm)
    return dqkv


def _save(ctx, inputs, output):
    qkv, cos, sin, ctx.qk_norm, spans = inputs
    ctx.save_for_backward(qkv, cos, sin, spans, *output)
    ctx.mark_non_differentiable(*output[1:])  # outputs only so that backward can read them
    ctx.set_materialize_grads(False)


@once_differentiable
def _differentiate(ctx, grad, *others):
    qkv, cos, sin, spans, *output = ctx.saved_tensors
    dqkv = _attention_backward(grad, qkv, cos, sin, ctx.qk_norm, spans, *output)
    return dqkv, None, None, None, None


INPUTS = "Tensor qkv, Tensor? cos, Tensor? sin, bool qk_norm, Tensor? spans"
SCHEMA = f"({INPUTS}) -> (Tensor, Tensor, Tensor)"
_attention = register("attention", SCHEMA, _forward, _fake, _differentiate, _save)
BACKWARD = f"(Tensor grad, {INPUTS}, Tensor out, Tensor lse, Tensor qk) -> Tensor"
_attention_backward = register(
    "attention_backward", BACKWARD, _backward, lambda grad, qkv, *others: qkv.new_empty(qkv.shape)
)


def attention(qkv, cos=None, sin=None, qk_norm=False, causal=False, spans=None):
    T, D = qkv.shape[1], qkv.shape[4]
    fits = D in HEAD_DIMS and 1 <= T <= MAX_T and qkv.dtype in DTYPES
    # PyTorch computes what the kernels do not support: causal, other head dims, float64.
    if causal or not fits or not runs_on(qkv):
        return attention_ref(qkv, cos, sin, qk_norm, causal, spans)
    if cos is not None and len(cos) < T:
        raise ValueError(f"attention needs a row of cos and sin for each of {T} positions")
    if spans is not None and spans.shape[1] == 2:  # documents: the kernels read those of each text
        spans = spans.expand(len(qkv), -1, -1)
    cos, sin, spans = (None if x is None else x.contiguous() for x in (cos, sin, spans))
    return _attention(qkv, cos, sin, qk_norm, spans)[0]


attention.__doc__ = attention_ref.__doc__
