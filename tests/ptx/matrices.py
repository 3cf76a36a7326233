"""Matrix units and what feeds them: mma, wgmma, ldmatrix, stmatrix, cp.async, fences.

Products of 16-bit numbers are exact in float32; sums are made in float32, in an order of numpy's.

cp.async and wgmma are asynchronous. Here a copy brings its bytes at the latest moment, when its
group is waited for, and so does a product its results. What touches them earlier is an error.
"""

from __future__ import annotations

import re

import numpy as np

from .instructions import address_reader, join_halves, need_all, registers_of
from .machine import NO_FENCE, WARP, bfloat16_to_float32, reader
from .memory import Violation

WARPGROUP = 4  # warps
DECODE = dict(bf16=bfloat16_to_float32, f16=lambda bits: bits.view(np.float16).astype(np.float32))


def halves(machine, readers, kind):
    """Registers of two 16-bit numbers -> float32 (registers, 2, threads)."""
    bits = np.stack([np.broadcast_to(read(machine), machine.threads) for read in readers])
    both = np.stack((bits & np.uint32(0xFFFF), bits >> np.uint32(16)), 1).astype(np.uint16)
    return DECODE[kind](both)


def words(op, index):
    return [reader(name, "b32") for name in registers_of(op.operands[index])]


# ---- 8 x 8 matrices of 16-bit numbers, in shared memory and in the registers of a warp
# Thread 4 i + j of a warp has the elements (i, 2 j) and (i, 2 j + 1); transposed (2 j, i) and
# (2 j + 1, i). Lane 8 m + i has the address of row i of matrix number m.
def matrix_layout(op):
    """Return the number of matrices of ldmatrix and stmatrix, and whether they are transposed."""
    found = re.fullmatch(
        r"sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", ".".join(op.modifiers)
    )
    if not found:
        raise op.unknown()
    return int(found[1]), bool(found[2])


def elements(machine, transposed):
    """Row and column of the first, and of the second element of each thread."""
    row = machine.lane // 4
    column = 2 * (machine.lane % 4)
    first, second = (row, column), (row, column + 1)
    return (first[::-1], second[::-1]) if transposed else (first, second)


def load_matrices(op):
    count, transposed = matrix_layout(op)
    targets = registers_of(op.operands[0])
    address = address_reader(op, 1, 32)
    if len(targets) != count:
        raise op.unknown()

    def step(machine, on):
        need_all(op, on)
        which = machine.lane < 8 * count
        rows = machine.shared.read(address(machine)[which], 16, machine.warp[which])
        matrices = rows.view(np.uint16).reshape(-1, count, 8, 8)  # (warps, matrices, 8, 8)
        first, second = elements(machine, transposed)
        for i, target in enumerate(targets):
            low = matrices[machine.warp, i, first[0], first[1]]
            high = matrices[machine.warp, i, second[0], second[1]]
            machine.put(target, join_halves(low, high))

    return step


def store_matrices(op):
    count, transposed = matrix_layout(op)
    sources = words(op, 1)
    address = address_reader(op, 0, 32)
    if len(sources) != count:
        raise op.unknown()

    def step(machine, on):
        need_all(op, on)
        which = machine.lane < 8 * count
        matrices = np.zeros((machine.threads // WARP, count, 8, 8), np.uint16)
        first, second = elements(machine, transposed)
        for i, source in enumerate(sources):
            bits = np.broadcast_to(source(machine), machine.threads)
            matrices[machine.warp, i, first[0], first[1]] = (bits & np.uint32(0xFFFF)).astype(
                np.uint16
            )
            matrices[machine.warp, i, second[0], second[1]] = (bits >> np.uint32(16)).astype(
                np.uint16
            )
        rows = matrices.reshape(-1, 8).view(np.uint8)
        machine.shared.write(address(machine)[which], rows, machine.warp[which])

    return step


# ---- mma: each warp multiplies (16, 16) by (16, 8)
def multiply(op):
    """D = A B + C. Thread 4 i + j has, of A, rows i and i + 8 and columns 2 j .. and 2 j + 8 ..."""
    shape = r"sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32"
    found = re.fullmatch(shape, ".".join(op.modifiers))
    if not found:
        raise op.unknown()
    kind = found[1]
    a, b, c = (words(op, i) for i in (1, 2, 3))
    targets = registers_of(op.operands[0])
    if [len(x) for x in (targets, a, b, c)] != [4, 4, 2, 4]:
        raise op.unknown()

    def step(machine, on):
        need_all(op, on)
        warps = machine.threads // WARP
        warp = machine.warp
        i = machine.lane // 4
        j = 2 * (machine.lane % 4)
        A = np.zeros((warps, 16, 16), np.float32)
        B = np.zeros((warps, 16, 8), np.float32)
        C = np.zeros((warps, 16, 8), np.float32)
        for n, pair in enumerate(halves(machine, a, kind)):
            for part in (0, 1):
                A[warp, i + 8 * (n % 2), j + 8 * (n // 2) + part] = pair[part]
        for n, pair in enumerate(halves(machine, b, kind)):
            for part in (0, 1):
                B[warp, j + 8 * n + part, i] = pair[part]
        for n, read in enumerate(c):
            bits = np.broadcast_to(read(machine), machine.threads)
            C[warp, i + 8 * (n // 2), j + n % 2] = np.ascontiguousarray(bits).view(np.float32)
        D = A @ B + C
        for n, target in enumerate(targets):
            machine.put(target, D[warp, i + 8 * (n // 2), j + n % 2])

    return step


# ---- wgmma: four warps multiply (64, 16) by (16, N), read from shared memory
PITCH = {1: 128, 2: 64, 3: 32}  # of a swizzle mode: bytes of a row
SWIZZLE = {1: 7, 2: 3, 3: 1}  # which bits of the row's number are added to that of 16 bytes


def addresses_of(op, descriptor, outer, inner, is_transposed):
    """Return the addresses in shared memory of elements of a matrix, as a descriptor says.

    descriptor: 64 bits: start, leading and stride offset in units of 16 bytes, swizzle mode
    outer: number along M or N; inner: number along K; both of the same shape
    is_transposed: whether M or N is contiguous, and not K
    """
    start = (descriptor & 0x3FFF) << 4
    leading = ((descriptor >> 16) & 0x3FFF) << 4
    stride = ((descriptor >> 32) & 0x3FFF) << 4
    mode = descriptor >> 62
    if mode not in PITCH or (descriptor >> 49) & 7:
        raise op.unknown()
    pitch = PITCH[mode]
    if is_transposed:
        width = pitch // 2  # elements of a row
        at = start + (outer // width) * leading + (outer % width) * 2
        at = at + (inner // 8) * stride + (inner % 8) * pitch
    else:
        at = start + (outer // 8) * stride + (outer % 8) * pitch + inner * 2
    return at ^ (((at >> 7) & SWIZZLE[mode]) << 4)


def warpgroup(op):
    """wgmma: mma_async, and what orders it."""
    kind = op.modifiers[0]
    if op.modifiers[1:3] != ("sync", "aligned"):
        raise op.unknown()
    if kind == "mma_async":
        return warpgroup_multiply(op)
    if len(op.modifiers) > 3 or kind not in ("fence", "commit_group", "wait_group"):
        raise op.unknown()
    left = int(op.operands[0]) if kind == "wait_group" else 0

    def step(machine, on):
        need_all(op, on)
        if kind == "fence":
            machine.register_fence = machine.steps
        elif kind == "commit_group":
            machine.product_groups.append(machine.products)
            machine.products = []
        else:
            while len(machine.product_groups) > left:
                finish_products(machine, machine.product_groups.pop(0))

    return step


def finish_products(machine, products):
    for results, inputs, read in products:
        for name in inputs:
            machine.inputs.remove(name)
        for words_ in read:
            machine.shared.finish_product(words_)
        for name in results:
            users = machine.in_flight[name]
            users.count -= 1
            if users.count == 0:
                del machine.in_flight[name]
                # Not `put`: what wgmma writes itself needs no fence before the next wgmma.
                machine.registers[name] = users.value.view(np.uint32)


class Future:
    """A register that products will have written: its value, and how many have not ended."""

    def __init__(self, value):
        self.value = value
        self.count = 0


def warpgroup_multiply(op):
    """D = A B, or D += A B. A is in registers or in shared memory, B in shared memory."""
    shape = r"mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2"
    found = re.fullmatch(shape, ".".join(op.modifiers))
    if not found:
        raise op.unknown()
    N = int(found[1])
    kind = found[2]
    results = registers_of(op.operands[0])
    from_registers = op.operands[1].startswith("{")
    inputs = registers_of(op.operands[1]) if from_registers else []
    a = [reader(name, "b32") for name in inputs] if from_registers else op.read(1, "b64")
    b = op.read(2, "b64")
    adds = op.read(3, "pred")
    signs, transposed = op.operands[4:6], [int(text) for text in op.operands[6:]]
    if signs != ["1", "1"] or len(transposed) != 2 - from_registers or len(results) != N // 2:
        raise op.unknown()
    transposed_a = 0 if from_registers else transposed[0]
    transposed_b = transposed[-1]

    def matrix(machine, group, read, size, is_transposed):
        """Read a (size, 16) matrix of a warpgroup by its descriptor; note which words it reads."""
        descriptors = np.broadcast_to(read(machine), machine.threads)
        descriptors = descriptors[group * WARPGROUP * WARP :][: WARPGROUP * WARP]
        if (descriptors != descriptors[0]).any():
            raise Violation("the threads of a warpgroup give wgmma different descriptors")
        outer, inner = np.indices((size, 16))
        at = addresses_of(op, int(descriptors[0]), outer, inner, is_transposed)
        bits, read_words = machine.shared.start_product(at.reshape(-1))
        return DECODE[kind](bits).reshape(size, 16), read_words

    def step(machine, on):
        need_all(op, on)
        check_fence(machine, results + inputs)
        keep = np.broadcast_to(adds(machine), machine.threads)
        values = [np.zeros(machine.threads, np.float32) for _ in results]
        read = []
        pairs = halves(machine, a, kind) if from_registers else None
        for group in range(machine.threads // (WARPGROUP * WARP)):
            threads = slice(group * WARPGROUP * WARP, (group + 1) * WARPGROUP * WARP)
            # Warp w of the group has rows 16 w .. 16 w + 15, as a warp has those of mma.
            row = 16 * (machine.warp[threads] % WARPGROUP) + machine.lane[threads] // 4
            column = 2 * (machine.lane[threads] % 4)
            if from_registers:
                A = np.zeros((64, 16), np.float32)
                for n in range(4):
                    for part in (0, 1):
                        at = (row + 8 * (n % 2), column + 8 * (n // 2) + part)
                        A[at] = pairs[n, part, threads]
            else:
                A, read_words = matrix(machine, group, a, 64, transposed_a)
                read.append(read_words)
            B, read_words = matrix(machine, group, b, N, transposed_b)
            read.append(read_words)
            D = A @ B.T
            for n, value in enumerate(values):
                value[threads] = D[row + 8 * (n // 2 % 2), column + 8 * (n // 4) + n % 2]
        start_product(machine, results, values, keep)
        machine.inputs += inputs
        machine.products.append((results, inputs, read))

    return step


def check_fence(machine, registers):
    """A register that was written must be fenced before wgmma uses it, but for its own results.

    The first wgmma needs a fence whatever its registers are.
    """
    if machine.register_fence == NO_FENCE:
        raise Violation("the first wgmma has no wgmma.fence before it")
    for name in registers:
        if name not in machine.in_flight and machine.written.get(name, -1) > machine.register_fence:
            raise Violation(f"wgmma uses {name}, which was written with no wgmma.fence since")


def start_product(machine, results, values, keep):
    """Add the values to the results where `keep`, and let nothing read these until a wait."""
    for name, value in zip(results, values, strict=True):
        future = machine.in_flight.get(name)
        if future is None:
            before = machine.get(name).view(np.float32) if keep.any() else np.float32(0)
            future = machine.in_flight[name] = Future(None)
            machine.registers[name] = None
        else:
            before = future.value
        future.value = value + np.where(keep, before, np.float32(0))
        future.count += 1


# ---- Copies from global to shared memory, and fences
def copy(op):
    """cp.async: start a copy, end a group of them, or wait until few groups are left."""
    kind = op.modifiers[1:]
    if op.modifiers[0] != "async":
        raise op.unknown()
    if kind in (("commit_group",), ("wait_group",)):
        left = int(op.operands[0]) if kind == ("wait_group",) else None
        return lambda machine, on: order_copies(op, machine, on, left)
    if kind not in (("ca", "shared", "global"), ("cg", "shared", "global")):
        raise op.unknown()
    to = address_reader(op, 0, 32)
    source = address_reader(op, 1, 64)
    size = int(op.operands[2], 0)
    used = op.read(3, "u32") if len(op.operands) > 3 else lambda machine: np.uint32(size)
    if size not in (4, 8, 16) or (kind[0] == "cg" and size != 16):
        raise op.unknown()

    def step(machine, on):
        which = np.ones(machine.threads, bool) if on is None else on
        if not which.any():
            return
        used_bytes = np.broadcast_to(used(machine), machine.threads)
        if not np.isin(used_bytes[which], (0, size)).all():
            raise op.unknown()  # a part of the bytes, the rest zero
        reads = which & (used_bytes > 0)
        values = np.zeros((machine.threads, size), np.uint8)
        memory = machine.memory
        at = source(machine)[reads]
        values[reads] = memory.read(at, size, machine.warp[reads], machine.shared.epoch)
        started = (to(machine)[which], values[which], machine.warp[which])
        machine.shared.start_copy(started[0], size, started[2])
        machine.copies.append(started)

    return step


def order_copies(op, machine, on, left):
    need_all(op, on)
    if left is None:
        machine.copy_groups.append(machine.copies)
        machine.copies = []
        return
    while len(machine.copy_groups) > left:
        for started in machine.copy_groups.pop(0):
            machine.shared.finish_copy(*started)


def fence(op):
    """fence.proxy.async: what was written to shared memory before it is seen by wgmma after it."""
    if op.modifiers != ("proxy", "async", "shared::cta") or op.operands:
        raise op.unknown()

    def step(machine, on):
        need_all(op, on)
        machine.shared.fences += 1

    return step


DECODERS = dict(ldmatrix=load_matrices, stmatrix=store_matrices, mma=multiply, wgmma=warpgroup)
DECODERS |= {"cp": copy, "fence": fence}
