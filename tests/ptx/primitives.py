"""Small Triton kernels that use most of its operations, for the interpreter and the emulator.

    TRITON_INTERPRET=1 python tests/ptx/primitives.py by_interpreter.npz
    MDLM_TRITON=1 python tests/ptx/primitives.py by_emulator.npz 90

The files hold the same arrays; integers must be equal, and other numbers almost.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]


@triton.jit
def integers_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    """Arithmetic of int32 or int64; y is not 0."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    by = y & 15
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x - y)
    tl.store(out_ptr + 2 * N + i, x * y)
    tl.store(out_ptr + 3 * N + i, x // y)
    tl.store(out_ptr + 4 * N + i, x % y)
    tl.store(out_ptr + 5 * N + i, (x & y) ^ (x | 12345))
    tl.store(out_ptr + 6 * N + i, x << by)
    tl.store(out_ptr + 7 * N + i, x >> by)
    tl.store(out_ptr + 8 * N + i, tl.minimum(x, y))
    tl.store(out_ptr + 9 * N + i, tl.maximum(x, y))
    tl.store(out_ptr + 10 * N + i, tl.where((x < y) & (x != 7), x, -y))
    tl.store(out_ptr + 11 * N + i, tl.abs(x) + x.to(tl.int16).to(tl.int32))
    tl.store(out_ptr + 12 * N + i, x.to(tl.int8).to(tl.int32))


@triton.jit
def floats_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    """Functions of float32; y is positive."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x * y)
    tl.store(out_ptr + 2 * N + i, x / y)
    tl.store(out_ptr + 3 * N + i, tl.exp2(x))
    tl.store(out_ptr + 4 * N + i, tl.log2(y))
    tl.store(out_ptr + 5 * N + i, tl.rsqrt(y))
    tl.store(out_ptr + 6 * N + i, tl.sqrt(y))
    tl.store(out_ptr + 7 * N + i, tl.maximum(tl.minimum(x, y), -tl.abs(x)))
    tl.store(out_ptr + 8 * N + i, x.to(tl.float16).to(tl.float32))
    tl.store(out_ptr + 9 * N + i, x.to(tl.int32).to(tl.float32))
    tl.store(out_ptr + 10 * N + i, tl.exp(x))
    tl.store(out_ptr + 11 * N + i, tl.where(x > y, x, y))


@triton.jit
def tables_kernel(x_ptr, out_ptr, n_rows, M: tl.constexpr, N: tl.constexpr):
    """Sums, maxima and running sums of a table (M, N) along both axes; it is turned and joined."""
    i = tl.arange(0, M)[:, None]
    j = tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + i * N + j, mask=i < n_rows, other=3)
    size: tl.constexpr = M * N
    tl.store(out_ptr + i * N + j, tl.sum(x, 0)[None, :] + tl.max(x, 1)[:, None])
    tl.store(out_ptr + size + i * N + j, tl.sum(x, 1)[:, None] - tl.min(x, 0)[None, :])
    tl.store(out_ptr + 2 * size + i * N + j, tl.cumsum(x, 0))
    tl.store(out_ptr + 3 * size + i * N + j, tl.cumsum(x, 1))
    tl.store(
        out_ptr + 4 * size + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :], tl.trans(x)
    )
    k = tl.arange(0, 2 * size)
    tl.store(out_ptr + 5 * size + k, tl.reshape(tl.join(x, x * x), (2 * size,)))


@triton.jit
def words_kernel(out_ptr, seed, N: tl.constexpr):
    """Random words."""
    i = tl.arange(0, N)
    words = tl.philox(seed, i, i * 0 + 5, i * 0, i * 0)
    for k in tl.static_range(4):
        tl.store(out_ptr + k * N + i, words[k].to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def products_kernel(
    a_ptr, b_ptr, out_ptr, rounds, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr
):
    """Sums of products of matrices, in a loop whose loads are pipelined."""
    i = tl.arange(0, M)[:, None]
    j = tl.arange(0, N)[None, :]
    total = tl.zeros((M, N), tl.float32)
    for n in range(rounds):
        a = tl.load(a_ptr + n * M * K + i * K + tl.arange(0, K)[None, :])
        b = tl.load(b_ptr + n * N * K + tl.arange(0, N)[:, None] * K + tl.arange(0, K)[None, :])
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    tl.store(out_ptr + i * N + j, total)


def run_all():
    """Name -> the array that a kernel has written."""
    g = torch.Generator().manual_seed(0)
    results = {}
    N = 512
    for dtype in (torch.int32, torch.int64):
        limit = 1 << (31 if dtype == torch.int32 else 62)
        x, y = (torch.randint(-limit, limit, (N,), generator=g, dtype=dtype) for _ in range(2))
        y[::2] = y[::2] % 100 + 1
        out = torch.zeros(13, N, dtype=dtype)
        integers_kernel[(1,)](x, y, out, N, num_warps=4)
        results[f"integers {dtype}"] = out
    x = torch.randn(N, generator=g) * 8
    y = torch.rand(N, generator=g) * 30 + 1e-3
    out = torch.zeros(12, N)
    floats_kernel[(1,)](x, y, out, N, num_warps=4)
    results["floats"] = out
    table = torch.randint(-1000, 1000, (30, 64), generator=g, dtype=torch.int32)
    out = torch.zeros(7 * 32 * 64, dtype=torch.int32)
    tables_kernel[(1,)](table, out, 30, 32, 64, num_warps=4)
    results["tables"] = out
    out = torch.zeros(4, 128, dtype=torch.int64)
    words_kernel[(1,)](out, 123456789012345, 128, num_warps=1)
    results["words"] = out
    for dtype in (torch.float16, torch.float32):
        a, b = (torch.randn(3, 64, 64, generator=g).to(dtype) for _ in range(2))
        out = torch.zeros(64, 64)
        products_kernel[(1,)](a, b, out, 3, 64, 64, 64, num_warps=4, num_stages=2)
        results[f"products {dtype}"] = out
    return {name: out.numpy() for name, out in results.items()}


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        from ptx import driver

        driver.install(int(sys.argv[2]))
    np.savez(sys.argv[1], **run_all())
