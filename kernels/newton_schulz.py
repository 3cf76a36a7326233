"""Muon's Newton-Schulz iterations of many small matrices: one launch, one matrix per program.

With the coefficients (a_i, b_i, c_i) of support/run/muon.py, which names their sources, the
iterations of a matrix X (K, N), K <= N, are

    G = X X^T,    X <- a_i X + P X,    P = b_i G + c_i G^2

In the first, G and X are divided by |G| and |G|^(1/2). |G|, the Frobenius norm of G, is the square
of the Schatten 4-norm of X. So singular values s become those of odd polynomials of s, near 1.

Batched products would read and write all matrices in each iteration. Here a program keeps its
matrix on the chip, in parts of W columns: G is the sum of the Gram matrices of the parts, and P
multiplies each part. Products are of bfloat16, with sums in float32. What muon.orthogonalize rounds
to bfloat16 is rounded here too, except for the norm.
"""

from __future__ import annotations

import torch

from .launch import INTERPRET, jit, launch, register, runs_on, tl, triton

HEIGHTS = (32, 64)  # K of the matrices that have a kernel
W = 128  # columns of a part
MAX_N = 384  # columns of a matrix; beyond it, registers spill


@jit
def _coefficient(values, it):
    """Return values[it] of a tuple of four numbers."""
    late = tl.where(it == 2, values[2], values[3])
    return tl.where(it == 0, values[0], tl.where(it == 1, values[1], late))


@jit
def newton_schulz_kernel(
    x,
    y,
    K: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    EPS: tl.constexpr,
):
    """Iterate a program's matrix of x (n, K, N); store it in y (n, K, N) bfloat16.

    A, B, C: the coefficients of the four iterations; EPS: lower bound of the norm
    """
    PARTS: tl.constexpr = N // W
    at = tl.program_id(0).to(tl.int64) * K * N
    at += tl.arange(0, K)[:, None] * N + tl.arange(0, W)[None, :]
    parts = ()
    for i in tl.static_range(PARTS):
        parts = parts + (tl.load(x + at + i * W).to(tl.bfloat16),)  # noqa: RUF005
    for it in range(4):  # not unrolled: so all iterations use the same registers
        gram = tl.zeros((K, K), tl.float32)
        for i in tl.static_range(PARTS):
            gram = tl.dot(parts[i], tl.trans(parts[i]), gram)
        norm = tl.maximum(tl.sqrt(tl.sum(gram * gram)), EPS)
        norm = tl.where(it == 0, norm, 1.0)
        scale = tl.rsqrt(norm)
        g = (gram / norm).to(tl.bfloat16)
        square = tl.dot(g, g)
        p = _coefficient(B, it) * g.to(tl.float32) + _coefficient(C, it) * square
        p = p.to(tl.bfloat16)
        a = _coefficient(A, it)
        new = ()
        for i in tl.static_range(PARTS):
            part = (parts[i].to(tl.float32) * scale).to(tl.bfloat16)
            part = a * part.to(tl.float32) + tl.dot(p, part)
            new = new + (part.to(tl.bfloat16),)  # noqa: RUF005 (Triton has no *)
        parts = new
    for i in tl.static_range(PARTS):
        tl.store(y + at + i * W, parts[i])


# ---- Launches
def config_of(K, N, coefficients, eps):
    """Return the constants and num_warps of a launch."""
    A, B, C = zip(*coefficients, strict=True)
    return dict(K=K, N=N, W=W, A=A, B=B, C=C, EPS=eps, num_warps=8 if K == 64 else 4)


def _forward(x, coefficients, eps):
    """Return y (n, K, N) bfloat16 of x (n, K, N)."""
    n, K, N = x.shape
    y = _fake(x, coefficients, eps)
    if n:
        x = x.contiguous()
        if x.data_ptr() % 16:  # registers would spill
            x = x.clone()
        triples = [coefficients[i : i + 3] for i in range(0, 12, 3)]
        launch(newton_schulz_kernel, (n,), x, y, **config_of(K, N, triples, eps))
    return y


def _fake(x, coefficients, eps):
    """Return an uninitialized y."""
    return x.new_empty(x.shape, dtype=torch.bfloat16)


SCHEMA = "(Tensor x, float[] coefficients, float eps) -> Tensor"
_newton_schulz = register("newton_schulz", SCHEMA, _forward, _fake)


def is_compiled_right(device):
    """Whether Triton generates working code for a device: for sm_100, version 3.6 emits a trap."""
    if triton is None or device.type != "cuda":
        return True
    is_new = tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 9)
    return is_new or torch.cuda.get_device_capability(device)[0] != 10


def fits(x, dtype):
    """Whether the iterations of x (n, K, N) with products in `dtype` have a kernel here."""
    is_size = x.shape[1] in HEIGHTS and x.shape[2] % W == 0 and x.shape[2] <= MAX_N
    # Triton's interpreter multiplies bfloat16 wrongly.
    return runs_on(x) and not INTERPRET and dtype == torch.bfloat16 and is_size


def newton_schulz_heads(x, coefficients, eps):
    """Approximate U V^T of the singular value decomposition of each matrix of x, in bfloat16.

    x: (n, K, N), of which fits(x, torch.bfloat16) is true
    coefficients: (a, b, c) of each of four iterations; eps: lower bound of the norm
    """
    return _newton_schulz(x, [value for triple in coefficients for value in triple], eps)
