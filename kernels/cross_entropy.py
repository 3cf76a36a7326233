"""Head and cross-entropy in one operator, for the masked positions of a batch.

    loss = sum_i weight_i * (logsumexp(z_i) - z_i[target_i]),     z_i = W h_i
    dz_i = weight_i * (softmax(z_i) - onehot(target_i))
    dh_i = W^T dz_i,   dW = sum_i dz_i h_i^T

The full matrix of logits is never stored. Rows are processed in chunks: a matrix product (cuBLAS)
gives a chunk's logits, a kernel replaces them by dz in place, and two more products give dh and dW.
So the gradients are computed in the forward pass (as in Liger, 2410.10989, and Wijmans et al.,
2411.09009), and backward only multiplies them by the incoming gradient of the loss, a scalar.
Small vocabularies are processed in the same way: a single kernel would only save two launches
(hopper.md).

Half precision: weights are about 1 / (batch * length), too small for float16. So dz, dh and dW are
divided by the largest weight, the `unit`, and backward multiplies by it in float32. There are no
second derivatives.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .launch import LOG2E, jit, launch, register, runs_on, tl, triton
from .reference import linear_cross_entropy_ref

# Number of logits in a chunk: 5,336 rows at V = 50,304, 0.5 GB in 16 bits. It does not depend on
# the free memory: then a resumed run could add up dW in another order, and get other bits.
CHUNK = 1 << 28
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# ---- The kernel: one program per row
@jit
def ce_chunk_kernel(
    z_ptr, target_ptr, weight_ptr, unit_ptr, loss_ptr, V, limit, TILE: tl.constexpr
):
    """Replace logits (m, limit) by dz / unit in place, and store the loss of each row.

    Columns from V to limit are padding; limit < V + TILE. unit: the largest weight.

    Two passes over a row: the logarithm of its sum of exponentials (Milakov and Gimelshein,
    1805.02867), then dz; between them the row stays in the L2 cache. Powers of 2 replace those of
    e, because the hardware computes them.
    """
    i = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + i)
    z_ptr += i * limit
    col = tl.arange(0, TILE)
    whole = V // TILE * TILE  # no column before this one is padding, so most tiles need no mask
    rest = whole + col
    if weight != 0:
        target = tl.load(target_ptr + i).to(tl.int64)
        # A target outside [0, V) makes the loss NaN instead of reading memory out of bounds.
        known = (target >= 0) & (target < V)
        z_target = tl.load(z_ptr + target, mask=known, other=float("nan")).to(tl.float32) * LOG2E
        z = tl.load(z_ptr + rest, mask=rest < V, other=-float("inf")).to(tl.float32) * LOG2E
        # Not -inf: -inf - (-inf) would be NaN.
        top = tl.maximum(tl.max(z, 0), -1e30)
        # Partial sums, added up at the end: one reduction per tile of columns instead of two.
        total = tl.exp2(z - top)
        for start in range(0, whole, TILE):
            z = tl.load(z_ptr + start + col, eviction_policy="evict_last").to(tl.float32) * LOG2E
            new = tl.maximum(top, tl.max(z, 0))
            total = total * tl.exp2(top - new) + tl.exp2(z - new)
            top = new
        lse = top + tl.log2(tl.sum(total, 0))
        tl.store(loss_ptr + i, weight * (lse - z_target) / LOG2E)
        factor = weight / tl.load(unit_ptr)
        for start in range(0, whole, TILE):
            z = tl.load(z_ptr + start + col, eviction_policy="evict_first").to(tl.float32)
            dz = factor * tl.exp2(z * LOG2E - lse)
            tl.store(z_ptr + start + col, dz.to(z_ptr.dtype.element_ty))
        z = tl.load(z_ptr + rest, mask=rest < V, other=-float("inf")).to(tl.float32)
        dz = factor * tl.exp2(z * LOG2E - lse)
        tl.store(z_ptr + rest, dz.to(z_ptr.dtype.element_ty), mask=rest < limit)
        # The target's dz is stored last, over what another thread has stored before the barrier.
        tl.debug_barrier()
        dz_target = factor * (tl.exp2(z_target - lse) - 1)
        tl.store(z_ptr + target, dz_target.to(z_ptr.dtype.element_ty), mask=known)
    else:  # a padding row
        tl.store(loss_ptr + i, 0.0)
        for start in range(0, limit, TILE):
            at = start + col
            tl.store(z_ptr + at, tl.zeros((TILE,), z_ptr.dtype.element_ty), mask=at < limit)


# ---- Tile sizes: the fastest on an H200 (results/hopper.md)
def row_config(V, dtype):
    """Return TILE and num_warps for rows of V logits: 16 elements per thread.

    Long rows get large programs. Then fewer rows are processed at a time, and they stay in the L2
    cache for the second pass: 2 programs of 16 warps on each of 132 multiprocessors, with 100 KB
    per row, need 26 of 60 MB. In float32 such programs spilled registers on sm_100.
    """
    largest = 8192 if V > 16384 and dtype != torch.float32 else 4096
    tile = min(max(triton.next_power_of_2(V), 128), largest)
    return dict(TILE=tile, num_warps=max(tile // 512, 1))


# ---- The operator
def _add_product(c, a, b):
    """Compute c += a @ b, accumulating in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(c, a, b, torch.float32, out=c)
    else:
        c.addmm_(a.float(), b.float())


def _forward(h, W, targets, weight, dtype):
    """Return (loss, dh / unit in dtype, dW / unit in float32, unit)."""
    M, C = h.shape
    V = len(W)
    targets = targets.contiguous()
    weight = weight.contiguous()
    # The largest weight; the pad makes it positive if there are no rows, or all weights are 0.
    unit = torch.linalg.vector_norm(F.pad(weight, (0, 1), value=1e-30), float("inf"))
    # Pad the vocabulary to a multiple of 64 columns. Rows of logits are then aligned to 128 bytes,
    # and are read and written efficiently for every V.
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
    """Multiply dh and dW by unit * grad; each gets the dtype of its input."""
    dh, dW, unit = ctx.saved_tensors
    # Shape (1,): PyTorch would round a 0-dim factor to the dtype of dh, which biases all gradients.
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
    with torch.autocast(kind, enabled=False):  # the dtype of products is passed explicitly
        return _linear(h, W, targets, weight.float(), dtype)[0]


linear_cross_entropy.__doc__ = linear_cross_entropy_ref.__doc__
