"""The MLP with ReLU^2 (Primer, So et al., 2109.08668): its activation costs no pass over memory.

With weights U (`up`) and D (`down`), and gradients written as d:

    z = h U^T        a = relu(z)^2                        y = a D^T
    da = dy D        dz = 2 relu(z) da = 2 sqrt(a) da     dh = dz U, dU = dz^T h, dD = dy^T a

One kernel computes a product and, before it stores the result, what follows it: the square forward,
the factor 2 sqrt(a) in backward. So z and da, which have the size of a, are never stored, and no
other kernel reads them. Only a is saved for backward: sqrt(a) has half its relative error. (In
float16 the smallest z are lost: a is 0 below z = 1.7e-4.) The other four products are cuBLAS's.

mdlm.py does not use it yet: it has not been timed (studies/relu2.py). Before Triton 3.7, its code
for Hopper leaves out a fence (results/aot.md).

Z of a program's tile is a sum over tiles of K columns, in float32. Successive programs share their
rows of x, which then come from the L2 cache, and so does w, the smaller matrix.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .attention import DTYPES, _packed
from .launch import jit, launch, register, runs_on, tl, triton
from .reference import relu2_mlp_ref

MULTIPLE = 16  # of which C and F are multiples, so that rows begin at multiples of 32 bytes


# ---- Kernel
@jit
def _load_tile(ptr, rows, cols, n_rows, n_cols, stride, EVEN: tl.constexpr):
    """Load a tile of a matrix, with zeros from row n_rows and from column n_cols on."""
    ptrs = ptr + rows[:, None] * stride + cols[None, :]
    if EVEN:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(rows[:, None] < n_rows) & (cols[None, :] < n_cols), other=0.0)


# x: (M, K); out: (M, N)
# Forward: w (N, K), out = relu(x w^T)^2; without a
# Backward: w (K, N), a (M, N), out = 2 sqrt(a) * (x w)
# EVEN: the sizes are multiples of those of the tiles, and no mask is needed
@jit
def relu2_kernel(
    x,
    w,
    a,
    out,
    M,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute a tile (TILE_M, TILE_N) of `out`."""
    n_tiles = tl.cdiv(N, TILE_N)
    first = (tl.program_id(0) // n_tiles).to(tl.int64) * TILE_M  # row
    start = (tl.program_id(0) % n_tiles).to(tl.int64) * TILE_N  # column
    rows = tl.arange(0, TILE_M)
    cols = tl.arange(0, TILE_N)
    inner = tl.arange(0, TILE_K)
    n_rows = (M - first).to(tl.int32)
    n_cols = (N - start).to(tl.int32)
    x += first * K
    w += start * (K if a is None else 1)
    z = tl.zeros((TILE_M, TILE_N), tl.float32)
    for k in range(0, K, TILE_K):
        x_tile = _load_tile(x, rows, inner, n_rows, K - k, K, EVEN)
        if a is None:
            w_tile = tl.trans(_load_tile(w, cols, inner, n_cols, K - k, K, EVEN))
            w += TILE_K
        else:
            w_tile = _load_tile(w, inner, cols, K - k, n_cols, N, EVEN)
            w += TILE_K * N
        z = tl.dot(x_tile, w_tile, z, input_precision="ieee")
        x += TILE_K
    if a is None:
        relu = tl.where(z < 0, 0.0, z)  # unlike tl.maximum, this keeps NaN
        result = relu * relu
    else:
        a += first * N + start
        saved = _load_tile(a, rows, cols, n_rows, n_cols, N, EVEN)
        result = 2 * tl.sqrt(saved.to(tl.float32)) * z
    out += first * N + start
    inside = None if EVEN else (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
    ptrs = out + rows[:, None] * N + cols[None, :]
    tl.store(ptrs, result.to(out.dtype.element_ty), mask=inside)


# ---- Launches
def tiles(dtype):
    """Return (TILE_M, TILE_N, TILE_K, warps, stages). No registers spill."""
    if dtype == torch.float32:  # exact products, which do not use tensor cores
        return 32, 32, 16, 4, 1
    return 128, 128, 64, 8, 3


def _run(x, w, a=None):
    """Return relu(x w^T)^2, or with a: 2 sqrt(a) * (x w)."""
    M, K = x.shape
    N = len(w) if a is None else w.shape[1]
    out = x.new_empty((M, N))
    if out.numel():
        TILE_M, TILE_N, TILE_K, warps, stages = tiles(x.dtype)
        is_even = M % TILE_M == 0 and N % TILE_N == 0 and K % TILE_K == 0
        constants = dict(TILE_M=TILE_M, TILE_N=TILE_N, TILE_K=TILE_K, EVEN=is_even)
        grid = (triton.cdiv(M, TILE_M) * triton.cdiv(N, TILE_N),)
        options = dict(num_warps=warps, num_stages=stages)
        launch(relu2_kernel, grid, _packed(x), _packed(w), a, out, M, N, K, **constants, **options)
    return out


def _forward(h, up, down):
    """Return y (M, C), and a (M, F), which backward reads."""
    a = _run(h, up)
    return torch.mm(a, down.t()), a


def _fake(h, up, down):
    """Return uninitialized y and a."""
    return h.new_empty((len(h), len(down))), h.new_empty((len(h), len(up)))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


@once_differentiable
def _differentiate(ctx, grad, _):
    h, up, down, a = ctx.saved_tensors
    dh, d_up, d_down = None, None, None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        dz = _relu2_backward(grad, down, a)
        dh = dz @ up if ctx.needs_input_grad[0] else None
        d_up = dz.t() @ h if ctx.needs_input_grad[1] else None
    if ctx.needs_input_grad[2]:
        d_down = grad.t() @ a
    return dh, d_up, d_down


SCHEMA = "(Tensor h, Tensor up, Tensor down) -> (Tensor, Tensor)"
_relu2_mlp = register("relu2_mlp", SCHEMA, _forward, _fake, _differentiate, _save)
BACKWARD = "(Tensor grad, Tensor down, Tensor a) -> Tensor"
_relu2_backward = register(
    "relu2_mlp_backward", BACKWARD, _run, lambda grad, down, a: a.new_empty(a.shape)
)


def relu2_mlp(h, up, down):
    kind = h.device.type
    tensors = h.reshape(-1, h.shape[-1]), up, down
    if torch.is_autocast_enabled(kind):
        tensors = [x.to(torch.get_autocast_dtype(kind)) for x in tensors]
    fits = all(size % MULTIPLE == 0 for size in (*up.shape, len(down)))
    one_dtype = len({x.dtype for x in tensors}) == 1 and tensors[0].dtype in DTYPES
    if not fits or not one_dtype or not runs_on(h):
        return relu2_mlp_ref(h, up, down)
    return _relu2_mlp(*tensors)[0].view(*h.shape[:-1], len(down))


relu2_mlp.__doc__ = relu2_mlp_ref.__doc__
