"""Cross-entropy where it counts: at the masked positions.

    loss = sum_i weight_i * (logsumexp(z_i) - z_i[target_i]),     z_i = W h_i
    dz_i = weight_i * (softmax(z_i) - onehot(target_i)),          dh_i = W^T dz_i,   dW = sum_i dz_i h_i^T

An unmasked position has weight 0: neither its row of logits nor its product with the head is needed.

On logits, a program takes a row: one pass for its log-sum-exp (the online form of Milakov and Gimelshein,
1805.02867), a second for the gradient. Fused with the head the logits never exist whole, and the gradients
are computed together with the loss, while a tile of logits is at hand (as in Liger, 2410.10989, and Wijmans
et al., 2411.09009); backward only multiplies them by the incoming scalar.

    V <= 256    one kernel: a program keeps the logits of a block of rows in registers and adds its share of
                dW to a slice of its own; the slices are summed afterwards, so the result is deterministic
    V > 256     chunks of 3072 rows: a product, a kernel that turns logits into dz in place, two products.
                Where the caller knows how many rows there are (exact counts) and has cut `rows` to that,
                cuBLAS multiplies. Where rows has all N places (Bernoulli masks) only the device knows: then
                a Triton product reads the number there, and leaves out what lies behind the last row.

Half precision: weights are about 1 / (batch * length), too small for float16. dz is therefore kept in units
of the largest weight, and backward multiplies that in again, in float32. First derivatives only.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from kernels._triton import ENABLED, jit, launch, processors, runs_on, tl, triton

SMALL_V = 256  # up to here a whole row of logits fits into a program's registers
CHUNK = 3072  # rows of logits at a time: 0.3 GB at V = 50,304 in 16 bits, products large enough for cuBLAS
WORKSPACE = 1 << 24  # float32 elements at most in the partial sums of dW, 64 MiB
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def masked_cross_entropy_ref(logits, targets, weight):
    """sum_i weight_i * CE(logits_i, targets_i), a float32 scalar; rows of weight 0 are not read.

    logits (N, V) floating; targets (N,) integer, in [0, V) where weight != 0; weight (N,) float32.
    The gradient flows to the logits.
    """
    rows = weight.nonzero().squeeze(1)
    ce = F.cross_entropy(logits[rows].float(), targets[rows].long(), reduction="none")
    return (ce * weight[rows]).sum()


def linear_cross_entropy_ref(h, W, targets, rows, weight):
    """LM head and cross-entropy on chosen rows only: sum over r in rows of weight_r * CE(W h_r, targets_r).

    h        (N, C) features           W       (V, C) head
    targets  (N,) integer              weight  (N,) float32
    rows     (M,) integer, indices into N, none of them twice, padded at the end with -1; None: all N.
             Cut it to the number of rows where that is known: large vocabularies are faster so.

    Returns a float32 scalar; gradients flow to h and W, zero in rows that are not listed.
    """
    if rows is not None:
        safe = rows.clamp(min=0)
        h, targets, weight = h[safe], targets[safe], torch.where(rows >= 0, weight[safe], 0)
    ce = F.cross_entropy(F.linear(h, W).float(), targets.long(), reduction="none")
    return (ce * weight).sum()


# ------------------------------------------------------------------------------------------------------------
# Triton: one row of logits a program


@jit
def _logsumexp(z_ptr, V, limit, BLOCK: tl.constexpr):
    """log sum exp of a row; columns from V up to limit are read, but count for nothing."""
    col = tl.arange(0, BLOCK)
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)  # summed at the end: one reduction a block (the maximum), not two
    for start in range(0, limit, BLOCK):
        at = start + col
        z = tl.load(z_ptr + at, mask=at < limit, other=0, eviction_policy="evict_last")
        z = tl.where(at < V, z.to(tl.float32), -float("inf"))
        new = tl.maximum(top, tl.max(z, 0))
        shift = tl.where(new == -float("inf"), 0.0, new)  # -inf - -inf is no number
        total = total * tl.exp(top - shift) + tl.exp(z - shift)
        top = new
    return top + tl.log(tl.sum(total, 0))


@jit
def _target_logit(z_ptr, target, V):
    """z[target]; a target outside of [0, V) makes the loss NaN instead of reading foreign memory."""
    return tl.load(z_ptr + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)


@jit
def ce_forward_kernel(z_ptr, target_ptr, weight_ptr, loss_ptr, lse_ptr, V, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row)
    loss = 0.0
    lse = 0.0
    if weight != 0:
        z_ptr += row * stride
        lse = _logsumexp(z_ptr, V, V, BLOCK)
        loss = weight * (lse - _target_logit(z_ptr, tl.load(target_ptr + row).to(tl.int64), V))
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


@jit
def ce_backward_kernel(z_ptr, target_ptr, weight_ptr, lse_ptr, grad_ptr, dz_ptr, V, stride,
                       BLOCK: tl.constexpr):
    """dz, contiguous and zero before; only rows of a weight other than 0 are written."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row)
    if weight != 0:
        factor = weight * tl.load(grad_ptr)
        lse = tl.load(lse_ptr + row)
        target = tl.load(target_ptr + row).to(tl.int64)
        col = tl.arange(0, BLOCK)
        for start in range(0, V, BLOCK):
            at = start + col
            z = tl.load(z_ptr + row * stride + at, mask=at < V, other=0).to(tl.float32)
            dz = factor * (tl.exp(z - lse) - (at == target).to(tl.float32))
            tl.store(dz_ptr + row * V + at, dz.to(dz_ptr.dtype.element_ty), mask=at < V)


@jit
def ce_chunk_kernel(z_ptr, rows_ptr, target_ptr, weight_ptr, unit_ptr, loss_ptr, V, limit,
                    GRAD: tl.constexpr, FILL: tl.constexpr, BLOCK: tl.constexpr):
    """Logits (m, limit) of a chunk become dz in place, in units of the largest weight; loss (m,) of each row.

    Columns from V on become 0, and so do rows of weight 0. Rows of padding are left alone, or 0 if FILL.
    """
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    weight = tl.load(weight_ptr + row, mask=row >= 0, other=0)
    z_ptr += i * limit
    col = tl.arange(0, BLOCK)
    if weight != 0:
        target = tl.load(target_ptr + row).to(tl.int64)
        z_target = _target_logit(z_ptr, target, V)
        lse = _logsumexp(z_ptr, V, limit, BLOCK)
        tl.store(loss_ptr + i, weight * (lse - z_target))
        if GRAD:
            factor = weight / tl.load(unit_ptr)
            for start in range(0, limit, BLOCK):  # the row comes from the L2 cache this time
                at = start + col
                z = tl.load(z_ptr + at, mask=at < limit, other=0, eviction_policy="evict_first")
                dz = factor * (tl.exp(z.to(tl.float32) - lse) - (at == target).to(tl.float32))
                dz = tl.where(at < V, dz, 0.0)
                tl.store(z_ptr + at, dz.to(z_ptr.dtype.element_ty), mask=at < limit)
    else:
        tl.store(loss_ptr + i, 0.0)
        if GRAD and (FILL or row >= 0):
            zero = tl.zeros((BLOCK,), z_ptr.dtype.element_ty)
            for start in range(0, limit, BLOCK):
                tl.store(z_ptr + start + col, zero, mask=start + col < limit)


@jit
def gather_kernel(h_ptr, rows_ptr, weight_ptr, out_ptr, C, stride, BLOCK: tl.constexpr):
    """out[i] = h[rows[i]]; 0 for padding and weight 0, so that nothing in an unused row gets anywhere."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    weight = tl.load(weight_ptr + row, mask=row >= 0, other=0)
    col = tl.arange(0, BLOCK)
    width = tl.where(weight != 0, C, 0)  # (the interpreter cannot combine the masks of a scalar and a block)
    h = tl.load(h_ptr + row * stride + col, mask=col < width, other=0)
    tl.store(out_ptr + i * C + col, h.to(out_ptr.dtype.element_ty), mask=col < C)


@jit
def scatter_kernel(x_ptr, rows_ptr, out_ptr, C, BLOCK: tl.constexpr):
    """out[rows[i]] = x[i]."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    col = tl.arange(0, BLOCK)
    width = tl.where(row >= 0, C, 0)
    tl.store(out_ptr + row * C + col, tl.load(x_ptr + i * C + col, mask=col < width), mask=col < width)


@jit
def product_kernel(a_ptr, b_ptr, c_ptr, n_ptr, start, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                   stride_c, SUM: tl.constexpr, ADD: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """c (+)= a b with float32 accumulation; a (M, K), b (K, N), any strides; c (M, N); +=: ADD.

    Only the first n - start rows of this chunk count, n on the device: rows of a and c or, if SUM, those that
    are summed over. The others are neither read nor written. A tile belongs to one program: deterministic.
    """
    tiles_m, tiles_n, pid = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.program_id(0)
    if tiles_m < tiles_n:  # neighbours share the larger factor's tile in L2; the smaller stays there whole
        i, j = pid % tiles_m, pid // tiles_m
    else:
        i, j = pid // tiles_n, pid % tiles_n
    count = tl.maximum(tl.load(n_ptr) - start, 0).to(tl.int32)
    if SUM:
        K = tl.minimum(count, K)
    else:
        M = tl.minimum(count, M)
    if i * BLOCK_M < M and (not ADD or K > 0):
        m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        row, col = (i * BLOCK_M).to(tl.int64), (j * BLOCK_N).to(tl.int64)
        a_at = a_ptr + row * stride_am + (m[:, None] * stride_am + k[None, :] * stride_ak)
        b_at = b_ptr + col * stride_bn + (k[:, None] * stride_bk + n[None, :] * stride_bn)
        inside_m, inside_n = (m < M - i * BLOCK_M)[:, None], (n < N - j * BLOCK_N)[None, :]
        c = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for done in range(0, K, BLOCK_K):
            a = tl.load(a_at, mask=inside_m & (k < K - done)[None, :], other=0)
            b = tl.load(b_at, mask=(k < K - done)[:, None] & inside_n, other=0)
            c = tl.dot(a, b, c, input_precision="ieee")
            a_at += BLOCK_K * stride_ak
            b_at += BLOCK_K * stride_bk
        c_at = c_ptr + row * stride_c + col + (m[:, None] * stride_c + n[None, :])
        if ADD:
            c += tl.load(c_at, mask=inside_m & inside_n, other=0)
        tl.store(c_at, c.to(c_ptr.dtype.element_ty), mask=inside_m & inside_n)


@jit
def scale_kernel(x_ptr, unit_ptr, grad_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out = x * (unit * grad). The factor stays in float32: rounded, it would bias every gradient alike."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0).to(tl.float32)
    factor = tl.load(unit_ptr) * tl.load(grad_ptr)
    tl.store(out_ptr + at, (x * factor).to(out_ptr.dtype.element_ty), mask=at < n)



# ------------------------------------------------------------------------------------------------------------
# Triton: head, loss and gradients in one kernel, for a small vocabulary


@functools.partial(jit, do_not_specialize=("M",))  # as many rows as come: one compilation, also for one row
def small_head_kernel(h_ptr, w_ptr, target_ptr, rows_ptr, weight_ptr, unit_ptr, loss_ptr, dh_ptr, dw_ptr,
                      M, V: tl.constexpr, C: tl.constexpr, stride_h: tl.constexpr, stride_w: tl.constexpr,
                      DTYPE: tl.constexpr, GRAD: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr):
    """Program p takes the blocks p, p + P, p + 2 P ... of BLOCK_M rows, and the slice dw[p] (V, C) of dW.

    loss (P,). dh (N, C), zero before; it and dw are in units of the largest weight. DTYPE: of the products.
    Sizes are constants of a model; as tl.constexpr they turn most addresses into immediate offsets, and leave
    their registers to the tiles.
    """
    pid = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    v = tl.arange(0, BLOCK_V)
    c = tl.arange(0, BLOCK_C)
    dw_ptr += pid.to(tl.int64) * V * C
    loss = tl.zeros((BLOCK_M,), tl.float32)
    if GRAD:
        first = tl.load(rows_ptr + pid * BLOCK_M, mask=pid * BLOCK_M < M, other=-1)
        if first < 0:  # no rows at all, but the slice takes part in the sum
            for start in range(0, C, BLOCK_C):
                at = start + c
                tl.store(dw_ptr + v[:, None] * C + at[None, :], tl.zeros((BLOCK_V, BLOCK_C), tl.float32),
                         mask=(v < V)[:, None] & (at < C)[None, :])
    for block in range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        begin = block * BLOCK_M
        if tl.load(rows_ptr + begin) >= 0:  # padding is at the end: such a block is nothing else
            row = tl.load(rows_ptr + begin + m, mask=begin + m < M, other=-1).to(tl.int64)
            weight = tl.load(weight_ptr + row, mask=row >= 0, other=0)
            active = weight != 0
            target = tl.load(target_ptr + row, mask=active, other=0).to(tl.int32)
            z = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
            for start in range(0, C, BLOCK_C):
                at = start + c
                h = tl.load(h_ptr + row[:, None] * stride_h + at[None, :],
                            mask=active[:, None] & (at < C)[None, :], other=0).to(DTYPE)
                w = tl.load(w_ptr + v[:, None] * stride_w + at[None, :],
                            mask=(v < V)[:, None] & (at < C)[None, :], other=0).to(DTYPE)
                z = tl.dot(h, tl.trans(w), z, input_precision="ieee")
            z = tl.where((v < V)[None, :], z, -float("inf"))
            hit = v[None, :] == target[:, None]
            z_target = tl.sum(tl.where(hit, z, 0.0), 1)
            z_target = tl.where((target >= 0) & (target < V), z_target, float("nan"))
            top = tl.max(z, 1)
            z = tl.exp(z - top[:, None])
            total = tl.sum(z, 1)
            loss += tl.where(active, weight * (top + tl.log(total) - z_target), 0.0)
            if GRAD:
                share = weight / tl.load(unit_ptr)
                dz = (z * (share / total)[:, None] - tl.where(hit, share[:, None], 0.0)).to(DTYPE)
                for start in range(0, C, BLOCK_C):
                    at = start + c
                    w = tl.load(w_ptr + v[:, None] * stride_w + at[None, :],
                                mask=(v < V)[:, None] & (at < C)[None, :], other=0).to(DTYPE)
                    dh = tl.dot(dz, w, input_precision="ieee")
                    tl.store(dh_ptr + row[:, None] * C + at[None, :], dh.to(DTYPE),
                             mask=active[:, None] & (at < C)[None, :])
                    h = tl.load(h_ptr + row[:, None] * stride_h + at[None, :],
                                mask=active[:, None] & (at < C)[None, :], other=0).to(DTYPE)
                    slot = dw_ptr + v[:, None] * C + at[None, :]
                    there = tl.where(pid != block, V, 0)  # a program's first block finds no sum yet
                    dw = tl.load(slot, mask=(v < there)[:, None] & (at < C)[None, :], other=0)
                    dw = tl.dot(tl.trans(dz), h, dw, input_precision="ieee")
                    tl.store(slot, dw, mask=(v < V)[:, None] & (at < C)[None, :])
                tl.debug_barrier()  # the next block's slots may be read by other threads than wrote them
    tl.store(loss_ptr + pid, tl.sum(loss, 0))


def _row_config(V, dtype):
    """Blocks of a row, 16 elements a thread.

    Long rows get large programs, so that the rows in flight on all multiprocessors together stay in the L2
    cache for the second pass: 2 programs of 16 warps on each of 132, at 100 KB a row, are 26 MB of 60. (In
    float32 such programs have no registers to spare: 2 instructions spilled on sm_100.)
    """
    block = min(max(triton.next_power_of_2(V), 128), 8192 if V > 16384 and dtype != torch.float32 else 4096)
    return dict(BLOCK=block, num_warps=max(block // 512, 1))


def _small_configs(V, dtype, source, grad):
    """Tiles that stay in registers, as the ahead-of-time tests check; the first is used unmeasured.

    source: the dtype of h. float32 is there to be exact: its products run on no tensor cores, the tile is
    small, and there is nothing to tune.
    """
    block_v = max(triton.next_power_of_2(V), 16)
    if dtype == torch.float32:
        tiles = [(16, 16, 4 if block_v < 256 else 8, 1)]
    else:
        wide = grad and (source == dtype or block_v == 16)
        tiles = [(64, 32 if wide else 16, 8, 2 if block_v < 256 or source == dtype else 1),
                 (32, 32, 4, 2)]  # half the rows on half the warps: two programs hide each other's waits
    return [dict(BLOCK_M=m, BLOCK_V=block_v, BLOCK_C=c, num_warps=warps, num_stages=stages)
            for m, c, warps, stages in tiles]


def _product_configs(dtype, N, summed):
    """Tiles without spills; rows that are no multiples of 32 bytes are read by elements: more registers."""
    if dtype == torch.float32:
        tiles = [(64, 64, 16, 8, 2)]
    elif N % 16:
        tiles = [(128, 64, 64, 8, 3),
                 (64, 64, 64, 4, 3)]  # smaller programs, of which several share a multiprocessor
    else:
        tiles = [(128, 128, 64, 8, 3),
                 (128, 64, 64, 4, 3),  # smaller programs: one stores while another multiplies
                 (128, 128, 32, 8, 4),  # shorter steps, more of them on their way
                 *[(128, 256, 64, 8, 3)] * (not summed)]  # Hopper's widest product; no registers left to add
    return [dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages)
            for m, n, k, warps, stages in tiles]


# ------------------------------------------------------------------------------------------------------------
# Ops


def _tl_dtype(dtype):
    return getattr(tl, str(dtype).removeprefix("torch."))


def _unit_columns(x):
    return x if x.stride(1) == 1 else x.contiguous()


def _listed(rows, h):
    return torch.arange(len(h), device=h.device) if rows is None else rows.contiguous()


def _launch_small(h, W, targets, rows, weight, unit, dtype, grad, dh):
    rows = _listed(rows, h)
    C, V, M = h.shape[1], len(W), len(rows)
    choices, W = _small_configs(V, dtype, h.dtype, grad), W.to(dtype)
    most = min(processors(h.device), max(1, WORKSPACE // (V * C)))
    P = max(1, min(triton.cdiv(M, choices[0]["BLOCK_M"]), most))
    loss = torch.empty(P, dtype=torch.float32, device=h.device)
    share = torch.empty((P, V, C) if grad else 0, dtype=torch.float32, device=h.device)
    launch(small_head_kernel, (P,), h, W, targets, rows, weight, unit, loss, dh, share, M, V, C,
           h.stride(0), W.stride(0), DTYPE=_tl_dtype(dtype), GRAD=grad,
           choices=choices if most == P else choices[:1], key=("V", "C", "GRAD"))
    return loss.sum(), share.sum(0) if grad else share


def _product(c, a, b, n=None, start=0, summed=False, add=False):
    """c (+)= a @ b, by cuBLAS; given n, a 0-dim integer tensor, by the kernel that stops at the n-th row.

    summed: the rows that n counts are summed over (c is float32 then), else they are those of a and c.
    """
    (M, K), N = a.shape, b.shape[1]
    if n is not None:
        choices = _product_configs(a.dtype, N, summed)
        # Measured are whole chunks, of rows that are read 16 bytes at a time.
        typical = (start > 0 or (K if summed else M) == CHUNK) and K % 16 == 0
        launch(product_kernel, lambda c: (triton.cdiv(M, c["BLOCK_M"]) * triton.cdiv(N, c["BLOCK_N"]),),
               a, b, c, n, start, M, N, K, *a.stride(), *b.stride(), c.stride(0), SUM=summed, ADD=add,
               choices=choices if typical else choices[:1], key=("N", "stride_am", "stride_ak"),
               repeatable=not add)
    elif not summed:
        torch.mm(a, b, out=c)
    elif a.is_cuda and a.dtype != torch.float32:  # factors of 16 bits, their sum in float32
        torch.ops.aten.addmm.dtype_out(c, a, b, torch.float32, beta=int(add), out=c)
    else:
        c.addmm_(a.float(), b.float(), beta=int(add))


def _launch_large(h, W, targets, rows, weight, unit, dtype, grad, dh):
    # Rows that were not cut: how many of them count, only the device knows.
    n = None if rows is None or len(rows) < len(h) else (rows >= 0).sum()
    rows = _listed(rows, h)
    C, V, M, device = h.shape[1], len(W), len(rows), h.device
    # Multiples of 64 columns of logits: rows of 128 bytes, read and written wide whatever V is.
    limit = triton.cdiv(V, 64) * 64
    W = F.pad(W.to(dtype), (0, 0, 0, limit - V)) if limit > V else W.to(dtype)
    size = min(CHUNK, M)
    buffer = torch.empty((size, limit), dtype=dtype, device=device)
    picked = torch.empty((size, C), dtype=dtype, device=device)
    loss = torch.empty(M, dtype=torch.float32, device=device)
    dW = (torch.empty if M else torch.zeros)((limit, C) if grad else 0, dtype=torch.float32, device=device)
    width = dict(BLOCK=triton.next_power_of_2(C), num_warps=4)
    for start in range(0, M, CHUNK):
        at = rows[start:start + CHUNK]
        m = len(at)
        z, x = buffer[:m], picked[:m]
        launch(gather_kernel, (m,), h, at, weight, x, C, h.stride(0), **width)
        _product(z, x, W.t(), n, start)
        launch(ce_chunk_kernel, (m,), z, at, targets, weight, unit, loss[start:start + CHUNK],
               V, limit, GRAD=grad, FILL=n is None, **_row_config(V, dtype))
        if grad:
            _product(dW, z.t(), x, n, start, summed=True, add=start > 0)
            _product(x, z, W, n, start)  # x has served its turn
            launch(scatter_kernel, (m,), x, at, dh, C, **width)
    return loss.sum(), dW[:V]


if ENABLED:
    kind = dict(mutates_args=(), device_types=("cuda", "cpu"))
    Tensor, Pair = torch.Tensor, tuple[torch.Tensor, torch.Tensor]

    @torch.library.custom_op("mdlm::masked_cross_entropy", **kind)
    def _masked(logits: Tensor, targets: Tensor, weight: Tensor) -> Pair:
        (N, V), logits = logits.shape, _unit_columns(logits)
        loss, lse = (torch.empty(N, dtype=torch.float32, device=logits.device) for _ in range(2))
        if N:
            launch(ce_forward_kernel, (N,), logits, targets.contiguous(), weight.contiguous(), loss, lse, V,
                   logits.stride(0), **_row_config(V, logits.dtype))
        return loss.sum(), lse

    @_masked.register_fake
    def _(logits, targets, weight):
        return logits.new_empty((), dtype=torch.float32), logits.new_empty(len(logits), dtype=torch.float32)

    @torch.library.custom_op("mdlm::masked_cross_entropy_backward", **kind)
    def _masked_backward(grad: Tensor, logits: Tensor, targets: Tensor, weight: Tensor,
                         lse: Tensor) -> Tensor:
        (N, V), logits = logits.shape, _unit_columns(logits)
        dz = torch.zeros((N, V), dtype=logits.dtype, device=logits.device)
        if N:
            launch(ce_backward_kernel, (N,), logits, targets.contiguous(), weight.contiguous(), lse, grad, dz,
                   V, logits.stride(0), **_row_config(V, logits.dtype))
        return dz

    @_masked_backward.register_fake
    def _(grad, logits, targets, weight, lse):
        return logits.new_empty(logits.shape)

    def _masked_setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def _masked_grad(ctx, grad, _):
        return None if grad is None else _masked_backward(grad, *ctx.saved_tensors), None, None

    _masked.register_autograd(_masked_grad, setup_context=_masked_setup)

    @torch.library.custom_op("mdlm::linear_cross_entropy", **kind)
    def _linear(h: Tensor, W: Tensor, targets: Tensor, rows: Tensor | None, weight: Tensor,
                dtype: torch.dtype, grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """loss; dh in dtype and dW in float32, both in units of `unit` (empty without grad); unit."""
        unit = torch.linalg.vector_norm(weight, float("inf")).clamp_(min=1e-30)
        dh = torch.zeros(h.shape if grad else 0, dtype=dtype, device=h.device)
        go = _launch_small if len(W) <= SMALL_V else _launch_large
        with torch.autocast(h.device.type, enabled=False):  # dtype says what to multiply in
            loss, dW = go(_unit_columns(h), _unit_columns(W), targets.contiguous(), rows,
                          weight.contiguous(), unit, dtype, grad, dh)
        return loss, dh, dW, unit

    @_linear.register_fake
    def _(h, W, targets, rows, weight, dtype, grad):
        scalar = dict(size=(), dtype=torch.float32)
        return (h.new_empty(**scalar), h.new_empty(h.shape if grad else 0, dtype=dtype),
                h.new_empty(W.shape if grad else 0, dtype=torch.float32), h.new_empty(**scalar))

    @torch.library.custom_op("mdlm::linear_cross_entropy_backward", **kind)
    def _linear_backward(grad: Tensor, unit: Tensor, dh: Tensor, dW: Tensor,
                         h_dtype: torch.dtype, W_dtype: torch.dtype) -> Pair:
        out = []
        for x, dtype in ((dh, h_dtype), (dW, W_dtype)):
            out.append(torch.empty_like(x, dtype=dtype))
            launch(scale_kernel, (triton.cdiv(x.numel(), 1024),), x, unit, grad, out[-1], x.numel(),
                   BLOCK=1024, num_warps=4)
        return tuple(out)

    @_linear_backward.register_fake
    def _(grad, unit, dh, dW, h_dtype, W_dtype):
        return torch.empty_like(dh, dtype=h_dtype), torch.empty_like(dW, dtype=W_dtype)

    def _linear_setup(ctx, inputs, output):
        h, W = inputs[:2]
        ctx.save_for_backward(*output[1:])
        ctx.dtypes, ctx.grad = (h.dtype, W.dtype), inputs[6]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def _linear_grad(ctx, grad, *_):
        if grad is None:
            return (None,) * 7
        dh, dW, unit = ctx.saved_tensors
        return (*_linear_backward(grad, unit, dh, dW, *ctx.dtypes), *(None,) * 5)

    _linear.register_autograd(_linear_grad, setup_context=_linear_setup)


def _check(name, *tensors):
    for x in tensors:
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} on a GPU takes float32, float16 or bfloat16, got {x.dtype}: "
                             f"convert it, or use {name}_ref")


def masked_cross_entropy(logits, targets, weight):
    if not runs_on(logits):
        return masked_cross_entropy_ref(logits, targets, weight)
    _check("masked_cross_entropy", logits)
    return _masked(logits, targets, weight)[0]


def linear_cross_entropy(h, W, targets, rows, weight):
    if not runs_on(h):
        return linear_cross_entropy_ref(h, W, targets, rows, weight)
    _check("linear_cross_entropy", h, W)
    kind = h.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype
    grad = torch.is_grad_enabled() and (h.requires_grad or W.requires_grad)
    return _linear(h, W, targets, rows, weight, dtype, grad)[0]


masked_cross_entropy.__doc__ = masked_cross_entropy_ref.__doc__
linear_cross_entropy.__doc__ = linear_cross_entropy_ref.__doc__


def aot_configs():
    """(name, kernel, signature, constexprs, options) of every configuration in use, to compile anywhere."""

    def entry(name, kernel, config, integers, constants, **pointers):
        options = {key: value for key, value in config.items() if key in ("num_warps", "num_stages")}
        constants = constants | {key: value for key, value in config.items() if key not in options}
        signature = {f"{key}_ptr": f"*{value}" for key, value in pointers.items()}
        return name, kernel, signature | dict.fromkeys(integers.split(), "i32"), constants, options

    def entries(name, kernel, choices, *args, **pointers):
        for i, config in enumerate(choices, 1):
            yield entry(name + f", choice {i}" * (i > 1), kernel, config, *args, **pointers)

    index = dict(target="i64", weight="fp32")
    width = dict(BLOCK=1024, num_warps=4)
    for dtype, kind in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        for V in (65, 1000, 50304):
            config = _row_config(V, kind)
            yield entry(f"ce forward V={V} {dtype}", ce_forward_kernel, config, "V stride", {},
                        z=dtype, **index, loss="fp32", lse="fp32")
            yield entry(f"ce backward V={V} {dtype}", ce_backward_kernel, config, "V stride", {},
                        z=dtype, **index, lse="fp32", grad="fp32", dz=dtype)
            for use, *flags in (("", True, False), (" filled", True, True), (" loss only", False, True)):
                if V <= SMALL_V:
                    continue
                yield entry(f"ce chunk V={V} {dtype}{use}", ce_chunk_kernel, config, "V limit",
                            dict(zip(("GRAD", "FILL"), flags)),
                            z=dtype, rows="i64", **index, unit="fp32", loss="fp32")
        yield entry(f"gather fp32 to {dtype}", gather_kernel, width, "C stride", {},
                    h="fp32", rows="i64", weight="fp32", out=dtype)
        yield entry(f"scatter {dtype}", scatter_kernel, width, "C", {}, x=dtype, rows="i64", out=dtype)
        yield entry(f"scale {dtype} to fp32", scale_kernel, width, "n", {},
                    x=dtype, unit="fp32", grad="fp32", out="fp32")
        # z = x W^T, dx = dz W, dW += dz^T x: whose strides are 1
        for use, ones, N in (("logits", "ak bk", 50304), ("features", "ak bn", 768), ("head", "am bn", 768),
                             ("head first", "am bn", 768), ("features of odd width", "ak bn", 100),
                             ("head of odd width", "am bn", 100)):
            ones, summed = {f"stride_{i}": 1 for i in ones.split()}, use.startswith("head")
            strides = [f"stride_{i}" for i in ("am", "ak", "bk", "bn", "c") if f"stride_{i}" not in ones]
            yield from entries(f"product {use} {dtype}", product_kernel, _product_configs(kind, N, summed),
                               "start M N K " + " ".join(strides),
                               ones | dict(SUM=summed, ADD=summed and use != "head first"),
                               a=dtype, b=dtype, c="fp32" if summed else dtype, n="i64")
        for V in (2, 65, 256):
            sizes = dict(V=V, C=384, stride_h=384, stride_w=384, DTYPE=_tl_dtype(kind))
            for source, of_h in {dtype: kind, "fp32": torch.float32}.items():  # h under autocast
                for grad in (True, False):
                    yield from entries(f"small head V={V} {source} in {dtype}" + " loss only" * (not grad),
                                       small_head_kernel, _small_configs(V, kind, of_h, grad), "M",
                                       sizes | dict(GRAD=grad),
                                       h=source, w=dtype, target="i64", rows="i64", weight="fp32",
                                       unit="fp32", loss="fp32", dh=dtype, dw="fp32")
