"""Matrix units of the emulator, against numpy: which thread holds what, and layouts in memory.

Each layout is written here element by element, as the tables of the PTX ISA give it.
"""

import numpy as np
import pytest
import torch

from .test_instructions import execute

KINDS = {"bf16": torch.bfloat16, "f16": torch.float16}


def draw(kind, *shape, seed=0):
    """Random numbers: float32 values that the type holds, and their bits (uint16)."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(KINDS[kind])
    return x.float().numpy(), x.view(torch.int16).numpy().view(np.uint16)


def pair(low, high):
    return np.uint32(low) | (np.uint32(high) << np.uint32(16))


def fragment(bits, place, count, threads):
    """Registers of pairs: place(thread, i) is where element i of a thread is in `bits`."""
    registers = np.zeros((count, threads), np.uint32)
    for thread in range(threads):
        for n in range(count):
            registers[n, thread] = pair(*(bits[place(thread, 2 * n + part)] for part in (0, 1)))
    return registers


def named(first, values):
    return {f"%r{first + i}": value for i, value in enumerate(values)}


def names(first, count):
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


@pytest.mark.parametrize("kind", KINDS)
def test_mma(kind):
    """m16n8k16, by two warps that multiply different matrices."""
    A, a_bits = draw(kind, 2, 16, 16, seed=1)
    B, b_bits = draw(kind, 2, 16, 8, seed=2)
    C = np.random.default_rng(3).standard_normal((2, 16, 8)).astype(np.float32)

    def place_a(thread, i):
        group, within = thread % 32 // 4, thread % 4
        row = group if i in (0, 1, 4, 5) else group + 8
        column = within * 2 + i % 2 + (8 if i >= 4 else 0)
        return thread // 32, row, column

    def place_b(thread, i):
        return thread // 32, thread % 4 * 2 + i % 2 + (8 if i >= 2 else 0), thread % 32 // 4

    def place_c(thread, i):
        return thread // 32, thread % 32 // 4 + (8 if i >= 2 else 0), thread % 4 * 2 + i % 2

    c = [[C[place_c(thread, i)] for thread in range(64)] for i in range(4)]
    registers = named(10, fragment(a_bits, place_a, 4, 64)) | named(
        20, fragment(b_bits, place_b, 2, 64)
    )
    registers |= named(30, np.array(c, np.float32))
    opcode = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    text = f"{opcode} {names(1, 4)}, {names(10, 4)}, {names(20, 2)}, {names(30, 4)};"
    machine = execute(text, registers, threads=64)
    expected = A.astype(np.float64) @ B + C
    for i in range(4):
        got = machine.get(f"%r{1 + i}").view(np.float32)
        wanted = [expected[place_c(thread, i)] for thread in range(64)]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_and_stmatrix(count, trans):
    """Thread t has elements (t / 4, 2 (t % 4) + 0 and 1) of each matrix, or those transposed."""
    bits = np.random.default_rng(1).integers(1 << 16, size=(2, count, 8, 8)).astype(np.uint16)
    memory = np.random.default_rng(2).permutation(2 * 4 * 8)[: 2 * count * 8]  # a place of each row
    addresses = np.zeros(64, np.uint32)
    for warp in range(2):
        for lane in range(8 * count):
            addresses[32 * warp + lane] = 16 * memory[warp * 8 * count + lane]

    def place(thread, i):
        row, column = thread % 32 // 4, thread % 4 * 2 + i % 2
        where = (column, row) if trans else (row, column)
        return thread // 32, i // 2, *where

    registers = fragment(bits, place, count, 64)
    opcode = f"matrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
    text = (
        f"st{opcode} [%r1], {names(10, count)}; bar.sync 0; ld{opcode} {names(20, count)}, [%r1];"
    )
    machine = execute(text, named(10, registers) | {"%r1": addresses}, threads=64, shared=1024)
    stored = machine.shared.data.view(np.uint16).reshape(-1, 8)[memory]
    assert np.array_equal(stored, bits.reshape(-1, 8))
    for i in range(count):
        assert np.array_equal(machine.get(f"%r{20 + i}"), registers[i])


def swizzled(row, chunk, pitch):
    """Bytes of a chunk of 16 bytes of a row, within 8 rows: chunks change places by the row."""
    turn = {128: row % 8, 64: row // 2 % 4, 32: row // 4 % 2}[pitch]
    return row % 8 * pitch + (chunk ^ turn) * 16


def lay_out(bits, pitch, start, transposed):
    """Bytes of shared memory that hold a matrix (M or N, 16), and the descriptor that says so.

    K is contiguous: 8 rows of M or N, as wide as a row of the swizzle, follow one another; of each
    the 32 bytes of 16 numbers are used. Transposed: rows along K have `pitch` bytes of M or N.
    """
    size = len(bits)
    stride = 8 * pitch
    width = pitch // 2  # numbers of a row
    leading = 2 * stride  # to the next `pitch` bytes of M or N; only if transposed
    memory = np.zeros(64 << 10, np.uint8)
    for m in range(size):
        for k in range(16):
            if transposed:
                at = m // width * leading + k // 8 * stride
                at += swizzled(k % 8, m % width // 8, pitch) + m % 8 * 2
            else:
                at = m // 8 * stride + swizzled(m % 8, k // 8, pitch) + k % 8 * 2
            memory[start + at : start + at + 2] = np.frombuffer(bits[m, k].tobytes(), np.uint8)
    mode = {128: 1, 64: 2, 32: 3}[pitch]
    fields = (start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62
    return memory, fields


def run_wgmma(kind, N, A, descriptors, memory, results, adds=1, transposed=(0, 0), before=""):
    """Run one wgmma of a warpgroup; A: registers, or None if its descriptor is given."""
    opcode = f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.{kind}.{kind}"
    first = names(70, 4) if A is not None else "%rd1"
    flags = f"{adds}, 1, 1, " + ", ".join(map(str, transposed))
    registers = named(0, results) | named(70, A if A is not None else [])
    registers |= {f"%rd{i + 1}": np.full(128, d, np.uint64) for i, d in enumerate(descriptors)}
    registers["%r90"] = np.arange(128, dtype=np.uint32) * 512
    stores = []  # each thread writes its 512 bytes
    for i in range(0, 512, 16):
        for j in range(4):
            name = f"%r{91 + j}"
            values = memory.view(np.uint32).reshape(128, 128)[:, i // 4 + j]
            registers[f"{name}_{i}"] = values
            stores.append(f"st.shared.b32 [%r90+{i + 4 * j}], {name}_{i};")
    text = (
        " ".join(stores)
        + before
        + f"""
        bar.sync 0;
        fence.proxy.async.shared::cta;
        wgmma.fence.sync.aligned;
        {opcode} {names(0, N // 2)}, {first}, %rd2, {flags};
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
    """
    )
    return execute(text, registers, threads=128, shared=64 << 10)


def place_of_result(thread, i):
    """Row and column of register i of a thread: 16 rows for each warp."""
    row = thread // 32 * 16 + thread % 32 // 4 + i % 4 // 2 * 8
    return row, i // 4 * 8 + thread % 4 * 2 + i % 2


def results_of(matrix, N):
    return np.array(
        [[matrix[place_of_result(t, i)] for t in range(128)] for i in range(N // 2)], np.float32
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pitch", [128, 64, 32])
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_wgmma_of_shared_memory(kind, pitch, transposed):
    """Every swizzle and both orders of each matrix, added to what was there."""
    N = 64
    A, a_bits = draw(kind, 64, 16, seed=1)
    B, b_bits = draw(kind, N, 16, seed=2)
    C = np.random.default_rng(3).standard_normal((64, N)).astype(np.float32)
    a_memory, a = lay_out(a_bits, pitch, 0, transposed[0])
    b_memory, b = lay_out(b_bits, pitch, 32 << 10, transposed[1])
    memory = a_memory | b_memory
    machine = run_wgmma(kind, N, None, (a, b), memory, results_of(C, N), 1, transposed)
    expected = results_of(A.astype(np.float64) @ B.T + C, N)
    for i in range(N // 2):
        np.testing.assert_allclose(machine.get(f"%r{i}").view(np.float32), expected[i], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [32, 64])
def test_wgmma_of_registers(kind, N):
    """Without adding: what the results held before has no effect."""
    A, a_bits = draw(kind, 64, 16, seed=1)
    B, b_bits = draw(kind, N, 16, seed=2)

    def place(thread, i):
        row = thread // 32 * 16 + thread % 32 // 4 + (8 if i in (2, 3, 6, 7) else 0)
        return row, thread % 4 * 2 + i % 2 + (8 if i >= 4 else 0)

    memory, b = lay_out(b_bits, 128, 0, True)
    results = np.full((N // 2, 128), np.nan, np.float32)
    fragments = fragment(a_bits, place, 4, 128)
    machine = run_wgmma(kind, N, fragments, (0, b), memory, results, 0, (1,))
    expected = results_of(A.astype(np.float64) @ B.T, N)
    for i in range(N // 2):
        np.testing.assert_allclose(machine.get(f"%r{i}").view(np.float32), expected[i], atol=1e-4)
