"""Dropout, then the addition to the residual stream: x + dropout(y), one kernel in each direction.

Element e of y, in row-major order, has 16 random bits u_e. It is dropped with probability q, a
multiple of 2^-16 (that of support/numerics.Dropout on a CPU):

    d = round(2^16 p),   q = d / 2^16
    out_e = x_e + m_e y_e,   m_e = [u_e >= d] / (1 - q)

Backward: the gradient of x is that of the output, g; the gradient of y_e is m_e g_e. Nothing of
the size of y is saved: backward draws the same bits again, as they are a function of (seed, offset,
e) alone. The words come from Philox-4x32-10 (Salmon et al., SC'11), a counter-based generator:

    key     = seed, 64 bits
    counter = (offset, e // 8, 0, 0)   -> four words, of which element e gets half number e % 8

A word's lower half comes first. So a thread generates the bits of the 8 elements that it loads at
once by a single call, while PyTorch's dropout needs a call for each element.

mdlm.py does not use it yet: it has not been timed (studies/residual.py).

The kernel reads the seed from memory: a CUDA graph that draws it by PyTorch's generator has another
one in each replay.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .launch import jit, launch, register, runs_on, tl, triton
from .reference import dropped_of, new_seed, residual_dropout_ref, scale_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = 1024  # elements of a program: 8 of each thread, which are 16 bytes in 16 bits
WARPS = 4
ROUNDS = 10  # of Philox


# ---- Kernel
# y, x, out: (N,); without x, out is m y, as backward needs it: there y is g
@jit
def _is_kept(seed, offset, dropped, ROUNDS: tl.constexpr, TILE: tl.constexpr):
    """Return whether each of a program's elements is kept: (TILE,) bool."""
    group = tl.program_id(0) * (TILE // 8) + tl.arange(0, TILE // 8)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(tl.load(seed), zero + offset, group, zero, zero, ROUNDS)
    # Each tl.join stacks two tensors along a new last axis: here the words are in order.
    word = tl.join(tl.join(w0, w2), tl.join(w1, w3)).to(tl.uint32)  # (TILE // 8, 2, 2)
    low = (word & 0xFFFF).to(tl.int32)
    high = (word >> 16).to(tl.int32)
    return tl.reshape(tl.join(low >= dropped, high >= dropped), (TILE,))


@jit
def residual_kernel(
    y,
    x,
    out,
    seed,
    offset,
    dropped,
    scale,
    N,
    ROUNDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute a program's elements of x + m y, in float32. m is 0 or scale."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < N
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * scale
    value = tl.where(_is_kept(seed, offset, dropped, ROUNDS, TILE), value, 0.0)
    if x is not None:
        value += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


# ---- Launches
def config():
    """Return the constants of the kernel, and num_warps."""
    return dict(ROUNDS=ROUNDS, TILE=TILE, num_warps=WARPS)


def _run(y, x, out, seed, offset, dropped):
    """Fill out with x + m y, or with m y if x is None; return it."""
    N = y.numel()
    if N:
        numbers = (offset, dropped, scale_of(dropped), N)
        grid = (triton.cdiv(N, TILE),)
        launch(residual_kernel, grid, y.contiguous(), x, out, seed, *numbers, **config())
    return out


def _forward(x, y, seed, offset, dropped):
    out = _fake(x, y, seed, offset, dropped)
    return _run(y, x.contiguous(), out, seed, offset, dropped)


def _fake(x, y, seed, offset, dropped):
    """Return an uninitialized output."""
    return y.new_empty(y.shape, dtype=torch.promote_types(x.dtype, y.dtype))


def _backward(grad, seed, offset, dropped):
    """Return the gradient of y."""
    return _run(grad, None, _fake_backward(grad, seed, offset, dropped), seed, offset, dropped)


def _fake_backward(grad, seed, offset, dropped):
    """Return an uninitialized gradient of y."""
    return grad.new_empty(grad.shape)


def _save(ctx, inputs, output):
    x, y, seed, ctx.offset, ctx.dropped = inputs
    ctx.dtypes = (x.dtype, y.dtype)
    ctx.save_for_backward(seed)


@once_differentiable
def _differentiate(ctx, grad):
    (seed,) = ctx.saved_tensors
    dx, dy = None, None
    if ctx.needs_input_grad[0]:
        dx = grad.to(ctx.dtypes[0])
    if ctx.needs_input_grad[1]:
        dy = _residual_backward(grad, seed, ctx.offset, ctx.dropped).to(ctx.dtypes[1])
    return dx, dy, None, None, None


SCHEMA = "(Tensor x, Tensor y, Tensor seed, int offset, int dropped) -> Tensor"
_residual = register("residual_dropout", SCHEMA, _forward, _fake, _differentiate, _save)
BACKWARD = "(Tensor grad, Tensor seed, int offset, int dropped) -> Tensor"
_residual_backward = register("residual_dropout_backward", BACKWARD, _backward, _fake_backward)


def residual_dropout(x, y, p, training=True, seed=None, offset=0):
    dropped = dropped_of(p)
    has_kernel = x.dtype in DTYPES and y.dtype in DTYPES and x.shape == y.shape
    if not training or not dropped or not has_kernel or not runs_on(x):
        return residual_dropout_ref(x, y, p, training, seed, offset)
    if seed is None:
        seed = new_seed(x.device)
    return _residual(x, y, seed, offset, dropped)


residual_dropout.__doc__ = residual_dropout_ref.__doc__
