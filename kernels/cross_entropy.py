"""The head and the cross-entropy: the model gives it the masked positions alone.

    loss = sum_i weight_i * (logsumexp(z_i) - z_i[target_i]),     z_i = W h_i
    dz_i = weight_i * (softmax(z_i) - onehot(target_i))
    dh_i = W^T dz_i,   dW = sum_i dz_i h_i^T

The logits never exist whole, and the gradients are computed together with the loss, while a chunk
of logits is at hand (as in Liger, 2410.10989, and Wijmans et al., 2411.09009); backward only
multiplies them by the incoming scalar.

Rows go in chunks: a product by cuBLAS, a kernel that turns logits into dz in place, two more
products. For small vocabularies too: one kernel for all of it would save two launches (h200.md).

Half precision: weights are about 1 / (batch * length), too small for float16. dz is therefore kept
in units of the largest weight, and backward multiplies that in again, in float32. First derivatives
only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .launch import jit, launch, register, runs_on, tl, triton
from .reference import linear_cross_entropy_ref

# Logits at a time: 5,336 rows at V = 50,304, 0.5 GB in 16 bits. Not by the memory that is free:
# then a run that is resumed would add in another order.
CHUNK = 1 << 28
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# ---- The kernel, a program a row
@jit
def _logsumexp(z_ptr, V, limit, BLOCK: tl.constexpr):
    """log sum exp of the first V columns, in one pass (Milakov and Gimelshein, 1805.02867)."""
    col = tl.arange(0, BLOCK)
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)  # summed at the end: one reduction a block, not two
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
def ce_chunk_kernel(
    z_ptr, target_ptr, weight_ptr, unit_ptr, loss_ptr, V, limit, BLOCK: tl.constexpr
):
    """Logits (m, limit) become dz in place, in units of the largest weight."""
    i = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + i)
    z_ptr += i * limit
    col = tl.arange(0, BLOCK)
    if weight != 0:
        target = tl.load(target_ptr + i).to(tl.int64)
        # A target outside of [0, V) makes the loss NaN instead of reading foreign memory.
        known = (target >= 0) & (target < V)
        z_target = tl.load(z_ptr + target, mask=known, other=float("nan")).to(tl.float32)
        lse = _logsumexp(z_ptr, V, limit, BLOCK)
        tl.store(loss_ptr + i, weight * (lse - z_target))
        factor = weight / tl.load(unit_ptr)
        for start in range(0, limit, BLOCK):  # the row comes from the L2 cache this time
            at = start + col
            z = tl.load(z_ptr + at, mask=at < limit, other=0, eviction_policy="evict_first")
            dz = factor * (tl.exp(z.to(tl.float32) - lse) - (at == target).to(tl.float32))
            dz = tl.where(at < V, dz, 0.0)
            tl.store(z_ptr + at, dz.to(z_ptr.dtype.element_ty), mask=at < limit)
    else:  # padding
        tl.store(loss_ptr + i, 0.0)
        for start in range(0, limit, BLOCK):
            at = start + col
            tl.store(z_ptr + at, tl.zeros((BLOCK,), z_ptr.dtype.element_ty), mask=at < limit)


# ---- Tiles: they spill no registers on sm_80, 90 and 100 (results/aot.md); no GPU has timed them
def row_config(V, dtype):
    """Blocks of a row of logits, 16 elements a thread.

    Long rows get large programs, so that all rows in flight stay in the L2 cache for the second
    pass: 2 programs of 16 warps on each of 132 multiprocessors, at 100 KB a row, are 26 MB of 60.
    In float32 such programs spilled registers on sm_100.
    """
    most = 8192 if V > 16384 and dtype != torch.float32 else 4096
    block = min(max(triton.next_power_of_2(V), 128), most)
    return dict(BLOCK=block, num_warps=max(block // 512, 1))


# ---- The operator
def _add_product(c, a, b):
    """c += a @ b, the sum in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(c, a, b, torch.float32, out=c)
    else:
        c.addmm_(a.float(), b.float())


def _forward(h, W, targets, weight, dtype):
    """loss; dh in dtype and dW in float32, both in units of `unit`; unit."""
    M, C = h.shape
    V = len(W)
    targets = targets.contiguous()
    weight = weight.contiguous()
    unit = torch.linalg.vector_norm(F.pad(weight, (0, 1), value=1e-30), float("inf"))
    # Multiples of 64 columns of logits: rows of 128 bytes, read and written wide whatever V is.
    limit = triton.cdiv(V, 64) * 64
    W = F.pad(W.to(dtype), (0, 0, 0, limit - V)) if limit > V else W.to(dtype)
    rows = max(1, min(M, CHUNK // limit))
    logits = torch.empty((rows, limit), dtype=dtype, device=h.device)
    loss = torch.empty(M, dtype=torch.float32, device=h.device)
    dh = torch.empty(h.shape, dtype=dtype, device=h.device)
    dW = torch.zeros((limit, C), dtype=torch.float32, device=h.device)
    for start in range(0, M, rows):
        at = slice(start, start + rows)
        x = h[at].to(dtype)
        z = logits[: len(x)]
        torch.mm(x, W.t(), out=z)
        tensors = (z, targets[at], weight[at], unit, loss[at])
        launch(ce_chunk_kernel, (len(x),), *tensors, V, limit, **row_config(V, dtype))
        _add_product(dW, z.t(), x)
        torch.mm(z, W, out=dh[at])
    return loss.sum(), dh, dW[:V], unit


def _fake(h, W, targets, weight, dtype):
    loss, unit = (h.new_empty((), dtype=torch.float32) for _ in range(2))
    return loss, h.new_empty(h.shape, dtype=dtype), h.new_empty(W.shape, dtype=torch.float32), unit


def _save(ctx, inputs, output):
    h, W, *_ = inputs
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = (h.dtype, W.dtype)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@once_differentiable
def _differentiate(ctx, grad, *_):
    """dh and dW times unit * grad, each in the dtype of its parameter."""
    dh, dW, unit = ctx.saved_tensors
    # (1,), as a 0-dim factor would be rounded to the dtype of dh first, which biases all gradients.
    factor = (unit * grad)[None]
    dh, dW = ((x * factor).to(dtype) for x, dtype in zip((dh, dW), ctx.dtypes))
    return dh, dW, None, None, None


SCHEMA = "(Tensor h, Tensor W, Tensor targets, Tensor weight, ScalarType dtype)"
SCHEMA += " -> (Tensor, Tensor, Tensor, Tensor)"
_linear = register("linear_cross_entropy", SCHEMA, _forward, _fake, _differentiate, _save)


def linear_cross_entropy(h, W, targets, weight):
    if not runs_on(h):
        return linear_cross_entropy_ref(h, W, targets, weight)
    for x in (h, W):
        if x.dtype not in DTYPES:
            raise ValueError(f"linear_cross_entropy takes {DTYPES} on a GPU, got {x.dtype}")
    kind = h.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype
    with torch.autocast(kind, enabled=False):  # dtype says what to multiply in
        return _linear(h, W, targets, weight, dtype)[0]


linear_cross_entropy.__doc__ = linear_cross_entropy_ref.__doc__
