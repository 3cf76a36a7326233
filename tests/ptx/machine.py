"""The state of one program while it runs: registers of all its threads, and its memory.

A register holds one number for each thread: a numpy array (threads,) of an unsigned type as wide as
the register, or of bool for a predicate. Instructions view these bits as the type that they name.
"""

from __future__ import annotations

import numpy as np

from .memory import SharedMemory, Violation

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
# How numpy sees the types of PTX. bf16 is not here: see read_bfloat16.
DTYPES = {f"{kind}{bits}": UNSIGNED[bits] for kind in "bu" for bits in UNSIGNED}
DTYPES |= dict(s8=np.int8, s16=np.int16, s32=np.int32, s64=np.int64)
DTYPES |= dict(f16=np.float16, f32=np.float32, f64=np.float64, pred=np.bool_)
WARP = 32


class UnknownInstruction(Exception):
    """An instruction, or a variant of one, that the emulator does not know."""


def bfloat16_to_float32(bits):
    """Return float32 values of bfloat16 numbers, given as uint16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16(x):
    """Return bfloat16 numbers as uint16, rounded to nearest even; a NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + half) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def poison(threads, dtype):
    """Return the content of a register that nothing has written: no number that could help."""
    if dtype == np.bool_:
        return np.arange(threads) % 2 == 0
    return np.frombuffer(b"\xcd" * threads * np.dtype(dtype).itemsize, dtype)


class Machine:
    """A program (CTA) that runs.

    threads: number of its threads, a multiple of 32
    place: its place in the grid, (x, y, z)
    grid: number of programs, (x, y, z)
    parameters: name -> value of the kernel's arguments
    memory: GlobalMemory
    shared: bytes of shared memory
    """

    def __init__(self, threads, place, grid, parameters, memory, shared):
        self.threads = threads
        self.parameters = parameters
        self.memory = memory
        self.shared = SharedMemory(shared)
        tid = np.arange(threads, dtype=np.uint32)
        self.lane = (tid % WARP).astype(np.int64)
        self.warp = (tid // WARP).astype(np.int64)
        self.registers = {"%tid.x": tid, "%laneid": tid % np.uint32(WARP)}
        for axis, at, size in zip("xyz", place, grid, strict=True):
            self.registers[f"%ctaid.{axis}"] = np.full(threads, at, np.uint32)
            self.registers[f"%nctaid.{axis}"] = np.full(threads, size, np.uint32)
        self.steps = 0  # number of instructions so far
        self.written = {}  # register -> number of the instruction that wrote it last
        self.register_fence = NO_FENCE  # number of the last wgmma.fence
        self.copies = []  # cp.async since the last commit: (addresses, bytes, warps)
        self.copy_groups = []  # that have been committed and not waited for
        self.products = []  # wgmma since the last commit: (results, inputs, words of shared memory)
        self.product_groups = []
        self.in_flight = {}  # registers that wgmma still writes -> their future values
        self.inputs = []  # registers that wgmma still reads

    def is_undefined(self, name):
        """Whether nothing has written a register."""
        return name not in self.registers

    def get(self, name):
        """Return the bits of a register, (threads,)."""
        value = self.registers.get(name)
        if value is None:
            if name in self.in_flight:
                raise Violation(f"{name} is read while wgmma still writes it")
            raise Violation(f"{name} is read and was never written")
        return value

    def put(self, name, value, on=None):
        """Write a register, (threads,) or a scalar; on: (threads,) bool, which threads do, or None.

        value: of any type as wide as the register.
        """
        if name == "_":
            return
        if value.dtype.kind != "b":
            value = value.view(UNSIGNED[value.dtype.itemsize * 8])
        if value.ndim == 0:
            value = np.full(self.threads, value)
        if on is not None:
            old = self.registers.get(name)
            if old is None:
                old = poison(self.threads, value.dtype)
            value = np.where(on, value, old)
        if name in self.in_flight or name in self.inputs:
            raise Violation(f"{name} is written while wgmma still uses it")
        self.registers[name] = value
        self.written[name] = self.steps

    def barrier(self):
        """All threads arrive, then all go on."""
        self.shared.epoch += 1

    def finish(self):
        """Check that nothing is left in flight when the program ends."""
        if self.products or self.product_groups:
            raise Violation("the program ends before a product (wgmma) that it started")


NO_FENCE = -1


def is_register(operand):
    return operand.startswith("%")


def constant(operand, kind, symbols):
    """Return the number that an immediate operand is, as a numpy scalar of a type of PTX."""
    if kind == "pred":
        return np.bool_(int(operand, 0))
    if operand[:2] in ("0f", "0F"):
        bits = np.uint32(int(operand[2:], 16))
        if DTYPES.get(kind) is None or np.dtype(DTYPES[kind]).itemsize != 4:
            raise UnknownInstruction(f"{operand} as {kind}")
        return bits.view(DTYPES[kind])
    if operand in symbols:
        number = symbols[operand]
    else:
        try:
            number = int(operand.rstrip("U"), 0)
        except ValueError:
            raise UnknownInstruction(f"operand {operand!r}") from None
    if kind not in DTYPES or kind[0] == "f":
        raise UnknownInstruction(f"{operand} as {kind}")
    bits = np.dtype(DTYPES[kind]).itemsize * 8
    return UNSIGNED[bits](number & ((1 << bits) - 1)).view(DTYPES[kind])


def reader(operand, kind, symbols=(), may_be_wider=False):
    """Return a function of the machine that gives an operand as a type of PTX.

    may_be_wider: whether the register may have more bits than the type, of which the lower ones
    count (st and cvt allow that)

    The function returns an array (threads,), or a scalar for a constant.
    """
    if kind in ("bf16", "f16") and not is_register(operand):
        raise UnknownInstruction(f"{operand} as {kind}")
    if kind == "bf16":
        bits = reader(operand, "b16", symbols)
        return lambda machine: bfloat16_to_float32(bits(machine))
    if operand.startswith("!"):
        positive = reader(operand[1:], kind, symbols)
        return lambda machine: ~positive(machine)
    if not is_register(operand):
        value = constant(operand, kind, symbols)
        return lambda machine: value
    if kind not in DTYPES:
        raise UnknownInstruction(f"type {kind}")
    dtype = np.dtype(DTYPES[kind])

    def read(machine):
        value = machine.get(operand)
        if value.dtype.itemsize == dtype.itemsize:
            return value.view(dtype)
        if may_be_wider and value.dtype.itemsize > dtype.itemsize:
            return value.astype(UNSIGNED[dtype.itemsize * 8]).view(dtype)
        raise UnknownInstruction(f"{operand} of {value.dtype} is read as {kind}")

    return read
