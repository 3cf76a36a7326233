"""Bidirectional attention on packed projections, with rotary positions and QK-norm.

    S = scale * Q K^T,   P = softmax(S),   O = P V,     scale = 1 / sqrt(D)
    rotary (Su et al., 2104.09864): (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), the halves of a head
    QK-norm (Henry et al., 2010.04245): q and k are divided by their root mean square, before the rotation

Forward (FlashAttention-2, 2307.08691; online softmax, Milakov and Gimelshein, 1805.02867). A program owns a
block of queries and walks over the keys with a running maximum m and sum l; S never exists whole:

    m' = max(m, max_j S_ij),  l' = l e^(m-m') + sum_j e^(S_ij-m'),  O' = O e^(m-m') + sum_j e^(S_ij-m') V_j

It saves lse = m + log l, from which the backward rebuilds P = e^(S - lse). Powers are of 2, as the
hardware's are.

    delta_i = dO_i . O_i          dV = P^T dO          dS = P * (dO V^T - delta)
    dQ = scale * dS K             dK = scale * dS^T Q

dQ sums over keys, dK and dV over queries: two kernels, each owning what it sums, so nothing is added
atomically and two runs give equal bits. The second builds S^T = K Q^T: P^T and dS^T then lie in registers the
way their products need them. Rows of at most 128 positions fit one program, which builds S only once.

Q, K and V are read from the packed (B, T, 3, H, D) by strides; their gradients go to one such buffer.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from kernels._triton import ENABLED, INTERPRET, jit, launch, processors, runs_on, tl, triton

HEAD_DIMS, DTYPES, MAX_T = (32, 64, 128), (torch.float32, torch.float16, torch.bfloat16), 8192
constant = tl.constexpr if ENABLED else float
LOG2E = constant(1.4426950408889634)  # e^x = 2^(x log2 e)
EPS = constant(torch.finfo(torch.float32).eps)  # what F.rms_norm adds by default, whatever the dtype of x


@jit
def _load(ptr, rows, stride, T, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows (M,) of a (T, D) matrix, zeros beyond its end; EVEN says that no block reaches beyond it."""
    ptrs = ptr + rows[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(ptrs) if EVEN else tl.load(ptrs, mask=rows[:, None] < T, other=0.0)


@jit
def _store(ptr, rows, stride, T, x, D: tl.constexpr, EVEN: tl.constexpr):
    ptrs = ptr + rows[:, None] * stride + tl.arange(0, D)[None, :]
    if EVEN:
        tl.store(ptrs, x.to(ptr.dtype.element_ty))
    else:
        tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=rows[:, None] < T)


@jit
def _load_row(ptr, rows, T, other, EVEN: tl.constexpr):
    return tl.load(ptr + rows) if EVEN else tl.load(ptr + rows, mask=rows < T, other=other)


@jit
def _load_qk(ptr, rows, stride, T, cos, sin, D: tl.constexpr, EVEN: tl.constexpr, ROPE: tl.constexpr,
             NORM: tl.constexpr):
    """Rows of q or k as the products see them: normalised, rotated, rounded to the dtype of qkv."""
    raw = _load(ptr, rows, stride, T, D, EVEN)
    if not (ROPE or NORM):
        return raw
    x = raw.to(tl.float32)
    if NORM:
        r = tl.rsqrt(tl.sum(x * x, 1) / D + EPS)
    if ROPE:
        # The other half of each pair is read again (from the cache) rather than moved between threads.
        d = tl.arange(0, D)[None, :]
        near, table = rows[:, None] * stride + (d + D // 2) % D, rows[:, None] * (D // 2) + d % (D // 2)
        if EVEN:
            swapped, c, s = tl.load(ptr + near), tl.load(cos + table), tl.load(sin + table)
        else:
            inside = rows[:, None] < T
            swapped = tl.load(ptr + near, mask=inside, other=0.0)
            c = tl.load(cos + table, mask=inside, other=0.0)
            s = tl.load(sin + table, mask=inside, other=0.0)
        x = x * c + swapped.to(tl.float32) * tl.where(d < D // 2, -s, s)
    if NORM:
        x = x * r[:, None]
    return x.to(raw.dtype)


@jit
def _grad_qk(g, ptr, rows, stride, T, cos, sin, D: tl.constexpr, EVEN: tl.constexpr, ROPE: tl.constexpr,
             NORM: tl.constexpr):
    """Gradient of _load_qk: g (M, D) float32 is rotated back, then taken through x -> x / rms(x)."""
    if ROPE:
        M: tl.constexpr = g.shape[0]
        half = tl.arange(0, D // 2)[None, :]
        table = rows[:, None] * (D // 2) + half
        if EVEN:
            c, s = tl.load(cos + table), tl.load(sin + table)
        else:
            c = tl.load(cos + table, mask=rows[:, None] < T, other=0.0)
            s = tl.load(sin + table, mask=rows[:, None] < T, other=0.0)
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
    """Program -> rows of its block, sample, head. A head's blocks are neighbours: they share K, V in L2."""
    program, blocks = tl.program_id(0), tl.cdiv(T, BLOCK)
    head = program // blocks
    return (program % blocks) * BLOCK + tl.arange(0, BLOCK), (head // H).to(tl.int64), head % H


@jit
def _attention_forward(qkv, out, lse, cos, sin, sb, st, s3, sh, T, H, scale, D: tl.constexpr,
                       BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ROPE: tl.constexpr,
                       NORM: tl.constexpr):
    rows, b, h = _place(T, H, BLOCK_M)
    qkv += b * sb + h * sh
    q = _load_qk(qkv, rows, st, T, cos, sin, D, EVEN, ROPE, NORM)  # (BLOCK_M, D)
    scale *= LOG2E
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, D), tl.float32)
    for start in range(0, T, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = _load_qk(qkv + s3, cols, st, T, cos, sin, D, EVEN, ROPE, NORM)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        if not EVEN:
            s = tl.where(cols[None, :] < T, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - top[:, None])
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.sum(p, 1)
        v = _load(qkv + 2 * s3, cols, st, T, D, EVEN)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        m = top
    _store(out + b * T * H * D + h * D, rows, H * D, T, o / l[:, None], D, EVEN)
    tl.store(lse + (b * H + h) * T + rows, (m + tl.log2(l)) / LOG2E, mask=rows < T)


@jit
def _attention_dq(qkv, grad, out, lse, delta, dqkv, cos, sin, sb, st, s3, sh, T, H, scale, D: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ROPE: tl.constexpr,
                  NORM: tl.constexpr):
    """dQ of a block of queries; also stores delta, which the kernel of dK and dV reads afterwards."""
    rows, b, h = _place(T, H, BLOCK_M)
    qkv += b * sb + h * sh
    at, line = b * T * H * D + h * D, (b * H + h) * T
    do = _load(grad + at, rows, H * D, T, D, EVEN)
    o = _load(out + at, rows, H * D, T, D, EVEN)
    dl = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + line + rows, dl, mask=rows < T)
    q = _load_qk(qkv, rows, st, T, cos, sin, D, EVEN, ROPE, NORM)
    z = _load_row(lse + line, rows, T, 0.0, EVEN) * LOG2E
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    for start in range(0, T, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = _load_qk(qkv + s3, cols, st, T, cos, sin, D, EVEN, ROPE, NORM)
        v = _load(qkv + 2 * s3, cols, st, T, D, EVEN)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        p = tl.exp2(s * (scale * LOG2E) - z[:, None])
        if not EVEN:  # where lse is very negative a key beyond the end would give inf * 0
            p = tl.where(cols[None, :] < T, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        dq = tl.dot((p * (dp - dl[:, None])).to(k.dtype), k, dq, input_precision="ieee")
    dq = _grad_qk(dq * scale, qkv, rows, st, T, cos, sin, D, EVEN, ROPE, NORM)
    _store(dqkv + 3 * b * T * H * D + h * D, rows, 3 * H * D, T, dq, D, EVEN)


@jit
def _attention_dkdv(qkv, grad, lse, delta, dqkv, cos, sin, sb, st, s3, sh, T, H, scale, D: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ROPE: tl.constexpr,
                    NORM: tl.constexpr):
    """dK and dV of a block of keys. Keys beyond the end give numbers that are never stored."""
    cols, b, h = _place(T, H, BLOCK_N)
    qkv += b * sb + h * sh
    grad += b * T * H * D + h * D
    line = (b * H + h) * T
    k = _load_qk(qkv + s3, cols, st, T, cos, sin, D, EVEN, ROPE, NORM)
    v = _load(qkv + 2 * s3, cols, st, T, D, EVEN)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for start in range(0, T, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = _load_qk(qkv, rows, st, T, cos, sin, D, EVEN, ROPE, NORM)
        # Queries beyond the end: lse = inf makes their p zero.
        z = _load_row(lse + line, rows, T, float("inf"), EVEN) * LOG2E
        s = tl.dot(k, tl.trans(q), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
        p = tl.exp2(s * (scale * LOG2E) - z[None, :])
        do = _load(grad, rows, H * D, T, D, EVEN)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dl = _load_row(delta + line, rows, T, 0.0, EVEN)
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        dk = tl.dot((p * (dp - dl[None, :])).to(q.dtype), q, dk, input_precision="ieee")
    dk = _grad_qk(dk * scale, qkv + s3, cols, st, T, cos, sin, D, EVEN, ROPE, NORM)
    dqkv += 3 * b * T * H * D + h * D
    _store(dqkv + H * D, cols, 3 * H * D, T, dk, D, EVEN)
    _store(dqkv + 2 * H * D, cols, 3 * H * D, T, dv, D, EVEN)


@jit
def _attention_row(qkv, grad, out, lse, dqkv, cos, sin, sb, st, s3, sh, T, H, scale, D: tl.constexpr,
                   BLOCK_M: tl.constexpr, EVEN: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr):
    """The whole backward of a head of T <= BLOCK_M positions: five products where the pair needs seven."""
    rows, b, h = _place(T, H, BLOCK_M)
    qkv += b * sb + h * sh
    at = b * T * H * D + h * D
    q = _load_qk(qkv, rows, st, T, cos, sin, D, EVEN, ROPE, NORM)
    k = _load_qk(qkv + s3, rows, st, T, cos, sin, D, EVEN, ROPE, NORM)
    do = _load(grad + at, rows, H * D, T, D, EVEN)
    z = _load_row(lse + (b * H + h) * T, rows, T, float("inf"), EVEN) * LOG2E
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    p = tl.exp2(s * (scale * LOG2E) - z[:, None])
    if not EVEN:
        p = tl.where(rows[None, :] < T, p, 0.0)
    dqkv += 3 * b * T * H * D + h * D
    dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee")
    _store(dqkv + 2 * H * D, rows, 3 * H * D, T, dv, D, EVEN)
    dl = tl.sum(do.to(tl.float32) * _load(out + at, rows, H * D, T, D, EVEN).to(tl.float32), 1)
    v = _load(qkv + 2 * s3, rows, st, T, D, EVEN)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    ds = (p * (dp - dl[:, None]) * scale).to(k.dtype)
    dq = tl.dot(ds, k, input_precision="ieee")
    dq = _grad_qk(dq, qkv, rows, st, T, cos, sin, D, EVEN, ROPE, NORM)
    _store(dqkv, rows, 3 * H * D, T, dq, D, EVEN)
    dk = tl.dot(tl.trans(ds), q, input_precision="ieee")
    dk = _grad_qk(dk, qkv + s3, rows, st, T, cos, sin, D, EVEN, ROPE, NORM)
    _store(dqkv + H * D, rows, 3 * H * D, T, dk, D, EVEN)


def fused(dtype, D, T):
    """Whether rotary positions and QK-norm go into the kernels; elsewhere PyTorch applies them before.

    The kernels redo them for every block of queries (and keys): cheap while there are few. The bound of 512
    is reasoned, not measured. D = 128 and float32 would spill registers.
    """
    return dtype != torch.float32 and D <= 64 and T <= 512


def hopper(device):
    """Whether this is sm_90 to sm_110 (the interpreter: as if): products there read shared memory. Those of
    sm_120 read registers as on sm_80, and with these configurations they spill."""
    return device.type != "cuda" or (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)


def row_limit(dtype, D, new):
    """The longest row that one program's backward holds without spilling registers."""
    return 0 if dtype == torch.float32 else 128 if new and D < 128 else 64


def configs(kind, dtype, D, T, fuse, new):
    """Configurations of a kernel (forward, row, dq or dkdv), the first of which is used unmeasured.

    new: sm_90 or later. None spills registers on sm_80, sm_90 or sm_100 (the ahead-of-time tests); no GPU
    has compared them yet. float32 is there to be exact: its products run on no tensor cores, tiles are small,
    and there is nothing to tune.
    """
    if dtype == torch.float32:
        tiles = [(32, 32, 8, 1)]
        if kind == "dq" and D == 128:
            tiles = [(16, 16, 8, 1)]
        elif kind == "dkdv" and D < 128:
            tiles = [(16 if D == 64 else 32, 32, 4, 1)]
    elif kind in ("forward", "row") and row_limit(dtype, D, new) >= T:
        tiles = short_tiles(kind, D, T, new)
    else:
        tiles = long_tiles(kind, D, fuse, new)
    made = [dict(BLOCK_M=M, BLOCK_N=N, EVEN=T % max(M, N) == 0, num_warps=warps, num_stages=stages)
            for M, N, warps, stages in tiles]
    return [{k: v for k, v in c.items() if kind != "row" or k != "BLOCK_N"} for c in made]


def short_tiles(kind, D, T, new):
    """(BLOCK_M, BLOCK_N, warps, stages) for rows that one program's backward holds, in 16 bits."""
    if T > 64:  # the backward needs all registers of its 8 warps
        half = [(64, 64, 8 if D == 32 else 4, 2),  # twice the programs, which hide each other's waits
                (64, 128, 4, 1)]  # the same with all keys in one block: no running maximum to correct
        return [(128, 128, 8, 1)] + half * (kind == "forward")
    warps = (4, 8)  # 8 finish a program sooner, 4 leave room for more programs; some of either spill
    if kind == "forward" and D != 64:
        warps = (4,) if D == 128 else (4, 8) if new else (8,)
    return [(64, 64, n, 1) for n in warps]


def long_tiles(kind, D, fuse, new):
    """(BLOCK_M, BLOCK_N, warps, stages) for rows of several blocks, in 16 bits."""
    if kind == "forward":
        N = 64 if fuse or not new else 128
        return [(128, N, 8, 3 if N == 128 and D < 128 else 2),
                (64, 64, 8 if D == 32 else 4, 2),  # twice the programs, which hide each other's waits
                (128, 64, 8, 3 if N == 64 else 2)]  # another block of keys on its way; or less shared memory
    if kind == "dq":
        if D == 128 and not new:
            return [(64, 64, 8, 2), (64, 128, 8, 2)]  # half as many turns of the loop
        N = 32 if fuse and not new else 128 if new and D < 128 and not fuse else 64
        return [(128, N, 8, 2),
                (64, min(N, 64), 4, 2),  # twice the programs, as above
                *[(128, 64, 8, 2)] * (N == 128)]  # half the shared memory: two programs a multiprocessor
    M = 32 if D == 128 or (fuse and not new) else 64
    N = 128 if new or (fuse and D < 128) else 64
    return [(M, N, 8, 2),
            (32, 64, 4, 2),  # programs of half the size, or of half the warps
            *[(32, 128, 8, 2)] * (M == 64 and new)]  # fewer scores at a time: registers for a second program


def start(kernel, kind, qkv, tensors, cos, sin, qk_norm):
    """Launch a kernel on a packed qkv: one program for a block of rows of one head of one sample."""
    B, T, _, H, D = qkv.shape
    choices = configs(kind, qkv.dtype, D, T, cos is not None or qk_norm, hopper(qkv.device))
    block = "BLOCK_N" if kind == "dkdv" else "BLOCK_M"
    programs = lambda c: triton.cdiv(T, c[block]) * B * H
    if programs(choices[0]) < processors(qkv.device):
        choices = choices[:1]
    launch(kernel, lambda c: (programs(c),), qkv, *tensors, cos, sin, *qkv.stride()[:4], T, H, D**-0.5,
           D=D, ROPE=cos is not None, NORM=qk_norm, choices=choices, key=("T", "D", "ROPE", "NORM"))


def packed(x):
    """x without gaps, at an address from which 16 bytes can be read at a time."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def readable(qkv):
    """qkv if the kernels can walk over it (unit stride in a head, 16 bytes at a time, offsets in a sample
    below 2^31), else a copy: reading it number by number takes longer, and more registers than there are."""
    reach = sum((n - 1) * abs(s) for n, s in zip(qkv.shape[1:], qkv.stride()[1:]))
    wide = qkv.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in qkv.stride()[:4])
    return qkv if wide and qkv.stride(-1) == 1 and reach < 2**31 else packed(qkv)


def forward(qkv, cos, sin, qk_norm):
    B, T, _, H, D = qkv.shape
    qkv = readable(qkv)
    out = torch.empty((B, T, H, D), dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty((B, H, T), dtype=torch.float32, device=qkv.device)
    if out.numel():
        start(_attention_forward, "forward", qkv, (out, lse), cos, sin, qk_norm)
    return out, lse


def backward(grad, qkv, out, lse, cos, sin, qk_norm):
    T = qkv.shape[1]
    qkv, grad = readable(qkv), packed(grad)
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    if not dqkv.numel():
        return dqkv
    if row_limit(qkv.dtype, qkv.shape[4], hopper(qkv.device)) >= T:
        start(_attention_row, "row", qkv, (grad, out, lse, dqkv), cos, sin, qk_norm)
    else:
        delta = torch.empty_like(lse)
        start(_attention_dq, "dq", qkv, (grad, out, lse, delta, dqkv), cos, sin, qk_norm)
        start(_attention_dkdv, "dkdv", qkv, (grad, lse, delta, dqkv), cos, sin, qk_norm)
    return dqkv


if ENABLED:
    attention_op = torch.library.custom_op(
        "mdlm::attention", forward, mutates_args=(), device_types="cuda",
        schema="(Tensor qkv, Tensor? cos, Tensor? sin, bool qk_norm) -> (Tensor, Tensor)")
    attention_backward_op = torch.library.custom_op(
        "mdlm::attention_backward", backward, mutates_args=(), device_types="cuda",
        schema="(Tensor grad, Tensor qkv, Tensor out, Tensor lse, Tensor? cos, Tensor? sin, bool qk_norm)"
               " -> Tensor")
    if INTERPRET:
        attention_op.register_kernel("cpu")(forward)
        attention_backward_op.register_kernel("cpu")(backward)

    @attention_op.register_fake
    def _(qkv, cos, sin, qk_norm):
        B, T, _, H, D = qkv.shape
        return qkv.new_empty((B, T, H, D)), qkv.new_empty((B, H, T), dtype=torch.float32)

    @attention_backward_op.register_fake
    def _(grad, qkv, out, lse, cos, sin, qk_norm):
        return qkv.new_empty(qkv.shape)

    def _save(ctx, inputs, output):
        qkv, cos, sin, ctx.qk_norm = inputs
        ctx.save_for_backward(qkv, *output, cos, sin)

    def _differentiate(ctx, grad, grad_lse):
        qkv, out, lse, cos, sin = ctx.saved_tensors
        return attention_backward_op(grad, qkv, out, lse, cos, sin, ctx.qk_norm), None, None, None

    attention_op.register_autograd(_differentiate, setup_context=_save)


def unsupported(qkv):
    """Why the kernels cannot take this qkv, a sentence; None if they can."""
    shape, dtype, device = tuple(qkv.shape), qkv.dtype, qkv.device.type
    if qkv.ndim != 5 or shape[2] != 3:
        return f"the attention kernels take qkv (B, T, 3, H, D), got {shape}"
    if shape[4] not in HEAD_DIMS:
        return (f"the attention kernels take head dims 32, 64 and 128, got {shape[4]}; change "
                "n_embd / n_head or use --kernels=torch")
    if not 1 <= shape[1] <= MAX_T:
        return f"the attention kernels take 1 to {MAX_T} positions, got {shape[1]}; use --kernels=torch"
    if dtype not in DTYPES:
        return f"the attention kernels take float32, float16 and bfloat16, got {dtype}; use --kernels=torch"
    if not runs_on(qkv):
        return (f"the attention kernels need triton and a CUDA device, got a tensor on {device}; use "
                "--kernels=torch, or set TRITON_INTERPRET=1 to run them, slowly, on a CPU")
    return None


def rotate(x, cos, sin):
    """Rotary positions: x (B, T, n, H, D); cos, sin (T, D/2)."""
    x1, x2 = x.chunk(2, -1)
    cos, sin = (table[:, None, None].to(x.dtype) for table in (cos, sin))
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def prepare(qkv, cos, sin, qk_norm):
    """q, k, v, each (B, T, H, D) in the dtype of qkv; q and k normalised and rotated."""
    qk, v = qkv[:, :, :2], qkv[:, :, 2]  # q and k together: their backward is one kernel on a CPU
    if qk_norm:
        qk = F.rms_norm(qk, qk.shape[-1:])
    if cos is not None:
        qk = rotate(qk, cos, sin)
    return *qk.to(qkv.dtype).unbind(2), v


def attention(qkv, cos=None, sin=None, qk_norm=False, causal=False):
    """Attention over all positions (or, if causal, over earlier ones and itself).

    qkv       (B, T, 3, H, D), the packed projections, any strides
    cos, sin  (T, D/2) rotary tables, or None; they get no gradient
    qk_norm   RMS-normalise q and k over D

    Returns (B, T, H, D) in the dtype of qkv. Two runs give equal bits. What the kernels do not take (causal,
    other head dims, float64) goes to the reference; `unsupported` tells.
    """
    if causal or not runs_on(qkv) or unsupported(qkv) is not None:
        return attention_ref(qkv, cos, sin, qk_norm, causal)
    if cos is not None:
        T, D = qkv.shape[1], qkv.shape[4]
        if cos.shape != (T, D // 2) or sin.shape != (T, D // 2):
            raise ValueError(f"rotary tables must be (T, D/2) = {(T, D // 2)}, got {tuple(cos.shape)} and "
                             f"{tuple(sin.shape)}")
        cos, sin = (x.detach().float().contiguous() for x in (cos, sin))
    if (cos is not None or qk_norm) and not fused(qkv.dtype, qkv.shape[4], qkv.shape[1]):
        return attention_op(torch.stack(prepare(qkv, cos, sin, qk_norm), 2), None, None, False)[0]
    return attention_op(qkv, cos, sin, qk_norm)[0]


def attention_auto(qkv, cos=None, sin=None, qk_norm=False, causal=False):
    """`attention`, but attention_ref for long rows of head dim 128, where PyTorch has cuDNN's strong kernel.
    The bound is reasoned, not measured."""
    longer = qkv.shape[4] == 128 and qkv.shape[1] > 512
    return (attention_ref if longer else attention)(qkv, cos, sin, qk_norm, causal)


def attention_ref(qkv, cos=None, sin=None, qk_norm=False, causal=False):
    """Attention over all positions (or, if causal, over earlier ones and itself).

    qkv       (B, T, 3, H, D), the packed projections, any strides
    cos, sin  (T, D/2) rotary tables, or None
    qk_norm   RMS-normalise q and k over D

    Returns (B, T, H, D) in the dtype of qkv.
    """
    T, D = qkv.shape[1], qkv.shape[4]
    q, k, v = (z.transpose(1, 2) for z in prepare(qkv, cos, sin, qk_norm))  # (B, H, T, D)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and T <= 512:
        # There the backward of SDPA is 2 to 9 times slower than two plain products (results/cpu.md).
        scores = (q @ k.transpose(-1, -2)) * D**-0.5  # (B, H, T, T)
        if causal:
            scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def aot_configs(capability=90, every=True):
    """The configurations in use on sm_<capability>: (name, kernel, signature, constexprs, options).

    float16 is configured like bfloat16. Not every: only the extremes, even lengths without rotary tables and
    norm, odd ones with them where they are fused. Pointers, strides (sb, st, s3, sh) and even T divide by 16.
    """
    kernels = dict(forward=_attention_forward, row=_attention_row, dq=_attention_dq, dkdv=_attention_dkdv)
    blocks, new = ("forward", "dq", "dkdv"), capability >= 90
    cases = [(torch.float32, "fp32", kind, 512) for kind in blocks]
    cases += [(torch.bfloat16, "bf16", kind, T) for T in (64, 128) for kind in ("forward", "row")]
    cases += [(torch.bfloat16, "bf16", kind, 512) for kind in blocks]
    flags = (True, False)
    for (dtype, t, kind, T), D, even, fuse in itertools.product(cases, HEAD_DIMS, flags, flags):
        can = fused(dtype, D, T)
        if (fuse and not can) or (not every and can and fuse == even):
            continue
        if kind == "row" and row_limit(dtype, D, new) < T:
            continue
        types = dict.fromkeys(("lse", "delta", "cos", "sin"), "*fp32") | dict(scale="fp32")
        types |= dict.fromkeys(("qkv", "grad", "out", "dqkv"), "*" + t)
        kernel = kernels[kind]
        name = f"attention_{kind}_{t}_D{D}_T{T}_{'even' if even else 'odd'}{'_fused' if fuse else ''}"
        for i, c in enumerate(configs(kind, dtype, D, T, fuse, new), 1):
            options = dict(num_warps=c.pop("num_warps"), num_stages=c.pop("num_stages"))
            c |= dict(D=D, EVEN=even, ROPE=fuse, NORM=fuse)
            if not fuse:
                c |= dict(cos=None, sin=None)
            signature = {n: "constexpr" if n in c else types.get(n, "i32") for n in kernel.arg_names}
            yield name + f", choice {i}" * (i > 1), kernel, signature, c, options
