"""What each instruction does, but for those that feed the matrix units.

A decoder takes an Instruction and returns a function of the machine and of the threads that execute
it (a mask, or None for all). It refuses what it does not know: a type, a modifier, an operand.
Decoding happens once, so that a step costs little more than the operation of numpy.

Operations that a GPU approximates (ex2.approx, div.full ...) give the nearest float32 here; on a
GPU they are off by up to 2 units in the last place. FMA rounds twice (float64, then float32), which
differs from one rounding about once in 2^29 times.
"""

from __future__ import annotations

import re

import numpy as np

from .machine import (
    DTYPES,
    UNSIGNED,
    WARP,
    UnknownInstruction,
    float32_to_bfloat16,
    is_register,
    poison,
    reader,
)
from .memory import Violation

EXIT = "exit"
INTEGERS = {f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64)}
FLOATS = {"f32", "f64"}
BITS = {"b16", "b32", "b64"}
HALVES = {"f16", "bf16"}


def need_all(instruction, on):
    """Raise if some threads do not execute an instruction that all must execute together."""
    if on is not None:
        raise Violation(f"{instruction.opcode} is executed by some threads of the program only")


def registers_of(operand):
    """The registers of a vector: "{%r1, %r2}" or "%r1" -> a list."""
    return [name.strip() for name in operand.strip("{} ").split(",")]


def flush(x):
    """Replace subnormal float32 numbers by zero (.ftz)."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


# ---- Arithmetic
def shifted_product(a, b):
    """The upper half of the product of two integers of 32 bits."""
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)


def truncated_quotient(a, b):
    """a / b of integers, rounded toward zero; a division by zero is undefined."""
    if (b == 0).any():
        raise Violation("an integer division by zero")
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a)) if a.dtype.kind == "i" else quotient


def truncated_remainder(a, b):
    """a - b * (a / b): it has the sign of a."""
    return a - b * truncated_quotient(a, b)


def nan_or(function):
    """minimum or maximum that gives NaN if one operand is NaN (.NaN)."""
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), function(a, b))


def fused(a, b, c):
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return exact.astype(np.float32)


# name -> function of two operands: of integers, and of floating-point numbers
INTEGER = dict(add=np.add, sub=np.subtract, min=np.minimum, max=np.maximum)
INTEGER |= dict(div=truncated_quotient, rem=truncated_remainder)
FLOAT = dict(add=np.add, sub=np.subtract, mul=np.multiply, min=np.fmin, max=np.fmax, div=np.divide)
LOGICAL = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
MODIFIERS = dict(div=("full", "approx", "rn", "ftz"), min=("NaN", "ftz"), max=("NaN", "ftz"))


def binary(op):
    """add, sub, mul, div, rem, min, max."""
    kind = op.type
    a = op.read(1)
    b = op.read(2)
    if kind in INTEGERS and op.name in INTEGER and not op.flags():
        function = INTEGER[op.name]
    elif kind == "f32" and op.name in FLOAT:
        flags = op.flags(*MODIFIERS.get(op.name, ("rn", "ftz")))
        function = nan_or(FLOAT[op.name]) if "NaN" in flags else FLOAT[op.name]
        if "ftz" in flags:
            plain = function
            function = lambda x, y: flush(plain(flush(x), flush(y)))  # noqa: E731
    else:
        raise op.unknown()
    if len(op.operands) == 4 and op.name in ("min", "max"):  # of three operands
        c = op.read(3)
        first = function
        return assign(op, lambda m: first(first(a(m), b(m)), c(m)))
    if len(op.operands) != 3:
        raise op.unknown()
    return assign(op, lambda m: function(a(m), b(m)))


def assign(op, compute):
    """Return a step that writes what `compute(machine)` gives to the first operand."""
    target = op.operands[0]

    def step(machine, on):
        machine.put(target, np.asarray(compute(machine)), on)

    return step


def multiply(op):
    """mul: of floating-point numbers; of integers the lower or upper half, or all of it (wide)."""
    if op.type == "f32":
        return binary(op)
    a = op.read(1)
    b = op.read(2)
    (half,) = op.flags("lo", "hi", "wide") or ("",)
    if half == "lo" and op.type in INTEGERS:
        return assign(op, lambda m: a(m) * b(m))
    if half == "hi" and op.type in ("u32", "s32"):
        return assign(op, lambda m: shifted_product(a(m), b(m)))
    if half == "wide" and op.type in ("u16", "s16", "u32", "s32"):
        wide = wider(op.type)
        return assign(op, lambda m: a(m).astype(wide) * b(m).astype(wide))
    raise op.unknown()


def wider(kind):
    """The numpy type of twice the width."""
    return DTYPES[f"{kind[0]}{2 * int(kind[1:])}"]


def multiply_add(op):
    """mad of integers, fma of float32."""
    a = op.read(1)
    b = op.read(2)
    if op.name == "fma":
        c = op.read(3)
        flags = op.flags("rn", "ftz")
        if op.type != "f32":
            raise op.unknown()
        if "ftz" in flags:
            return assign(op, lambda m: flush(fused(flush(a(m)), flush(b(m)), flush(c(m)))))
        return assign(op, lambda m: fused(a(m), b(m), c(m)))
    (half,) = op.flags("lo", "wide") or ("",)
    if half == "lo" and op.type in INTEGERS:
        c = op.read(3)
        return assign(op, lambda m: a(m) * b(m) + c(m))
    if half == "wide" and op.type in ("u16", "s16", "u32", "s32"):
        wide = wider(op.type)
        c = op.read(3, f"{op.type[0]}{2 * int(op.type[1:])}")
        return assign(op, lambda m: a(m).astype(wide) * b(m).astype(wide) + c(m))
    raise op.unknown()


def packed(op):
    """add, sub, mul, fma of two float32 numbers in 64 bits (from sm_100 on)."""
    op.flags("rn")
    parts = [op.read(i, "b64") for i in range(1, len(op.operands))]
    function = fused if op.name == "fma" else FLOAT[op.name]
    if len(parts) != (3 if op.name == "fma" else 2):
        raise op.unknown()

    def compute(machine):
        pairs = (np.broadcast_to(part(machine), machine.threads) for part in parts)
        pairs = [np.ascontiguousarray(pair).view(np.float32) for pair in pairs]
        return function(*pairs).astype(np.float32).view(np.uint64)

    return assign(op, compute)


def mixed(op):
    """add, sub, fma in float32; the first operand, of fma also the second, has 16 bits (sm_100)."""
    count = 3 if op.name == "fma" else 2
    rounding = op.modifiers[:-2]
    is_known = rounding == ("rn",) or (rounding == () and op.name != "fma")
    if not is_known or op.name == "mul" or len(op.operands) != 1 + count:
        raise op.unknown()
    *narrow, last = (op.read(i + 1, op.type if i < count - 1 else "f32") for i in range(count))
    function = fused if op.name == "fma" else FLOAT[op.name]

    def compute(machine):
        return function(*(x(machine).astype(np.float32) for x in narrow), last(machine))

    return assign(op, compute)


def of_float32(decoder):
    """The decoder, or that of pairs of float32 (f32x2) or of mixed types (f32.bf16)."""

    def decode(op):
        if op.type == "f32x2":
            return packed(op)
        return mixed(op) if op.modifiers[-2:-1] == ("f32",) and op.type in HALVES else decoder(op)

    return decode


def logical(op):
    a = op.read(1)
    b = op.read(2)
    function = LOGICAL[op.name]
    if op.flags() or op.type not in BITS | {"pred"}:
        raise op.unknown()
    return assign(op, lambda m: function(a(m), b(m)))


def shift(op):
    """shl, shr: by more bits than there are, all go; a signed shr copies the sign."""
    a = op.read(1)
    by = op.read(2, "u32")
    is_left = op.name == "shl"
    if op.flags() or op.type not in (BITS if is_left else INTEGERS | BITS):
        raise op.unknown()

    def compute(machine):
        value = a(machine)
        amount = by(machine)
        bits = value.dtype.itemsize * 8
        most = np.minimum(amount, np.uint32(bits - 1)).astype(value.dtype)
        moved = value << most if is_left else value >> most
        if value.dtype.kind == "i":
            return moved
        return np.where(amount >= bits, value.dtype.type(0), moved)

    return assign(op, compute)


def negated(x):
    return np.negative(x)


def rounded(function):
    """function of float32, computed in float64."""
    return lambda x: function(x.astype(np.float64)).astype(np.float32)


def population(x):
    """Number of bits that are set."""
    bytes_ = np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1)
    return np.unpackbits(bytes_, axis=1).sum(1).astype(np.uint32)


# name -> function, types, modifiers
UNARY = {
    "neg": (negated, {"f32", "s16", "s32", "s64"}, ("ftz",)),
    "not": (np.invert, BITS | {"pred"}, ()),
    "abs": (np.abs, {"f32", "s16", "s32", "s64"}, ("ftz",)),
    "ex2": (rounded(np.exp2), {"f32"}, ("approx", "ftz")),
    "lg2": (rounded(np.log2), {"f32"}, ("approx", "ftz")),
    "rsqrt": (rounded(lambda x: 1 / np.sqrt(x)), {"f32"}, ("approx", "ftz")),
    "rcp": (rounded(lambda x: 1 / x), {"f32"}, ("approx", "rn", "ftz")),
    "sqrt": (np.sqrt, {"f32"}, ("approx", "rn", "ftz")),
    "popc": (population, {"b32", "b64"}, ()),
}


def unary(op):
    function, types, modifiers = UNARY[op.name]
    flags = op.flags(*modifiers)
    x = op.read(1)
    if op.type not in types or len(op.operands) != 2:
        raise op.unknown()
    if "ftz" in flags:
        return assign(op, lambda m: flush(function(flush(x(m)))))
    return assign(op, lambda m: function(x(m)))


def bit_field(op):
    """bfe: the bits from a position on, with the sign of the uppermost one if signed."""
    x = op.read(1)
    if op.flags() or op.type not in ("u32", "s32") or is_register("".join(op.operands[2:])):
        raise op.unknown()
    first, length = (int(text, 0) for text in op.operands[2:])
    if not (length > 0 and first + length <= 32):
        raise op.unknown()

    def compute(machine):
        value = x(machine)
        raised = value.view(np.uint32) << np.uint32(32 - first - length)
        return raised.view(value.dtype) >> value.dtype.type(32 - length)

    return assign(op, compute)


def permute(op):
    """prmt: each byte of the result is one of the eight bytes of two registers, or its sign."""
    a, b, selector = (op.read(i) for i in (1, 2, 3))
    if op.modifiers != ("b32",):
        raise op.unknown()

    def compute(machine):
        both = a(machine).astype(np.uint64) | (b(machine).astype(np.uint64) << np.uint64(32))
        chosen = selector(machine)
        result = np.uint32(0)
        for i in range(4):
            nibble = (chosen >> np.uint32(4 * i)) & np.uint32(15)
            place = (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)
            byte = ((both >> place) & np.uint64(255)).astype(np.uint32)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            byte = np.where(nibble & np.uint32(8), sign, byte)
            result = result | (byte << np.uint32(8 * i))
        return result

    return assign(op, compute)


# ---- Comparison and choice
def unordered(compare):
    """A comparison that holds if one operand is NaN."""
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


def ordered_unequal(a, b):
    return (a != b) & ~np.isnan(a) & ~np.isnan(b)


COMPARE = dict(eq=np.equal, lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal)
FLOAT_COMPARE = COMPARE | {f"{name}u": unordered(f) for name, f in COMPARE.items()}
FLOAT_COMPARE |= dict(ne=ordered_unequal, neu=np.not_equal)
FLOAT_COMPARE |= dict(nan=lambda a, b: np.isnan(a) | np.isnan(b))
FLOAT_COMPARE |= dict(num=lambda a, b: ~(np.isnan(a) | np.isnan(b)))
INTEGER_COMPARE = COMPARE | dict(ne=np.not_equal)


def compare(op):
    """setp: a comparison, maybe combined with a predicate."""
    kind = op.type
    table = FLOAT_COMPARE if kind == "f32" else INTEGER_COMPARE
    relation, *combine = op.modifiers[:-1]
    is_known = kind in INTEGERS | BITS | {"f32"} and "|" not in op.operands[0]
    if kind in BITS and relation not in ("eq", "ne"):
        is_known = False
    if not is_known or relation not in table or len(op.operands) != 3 + len(combine):
        raise op.unknown()
    function = table[relation]
    a = op.read(1)
    b = op.read(2)
    if not combine:
        return assign(op, lambda m: function(a(m), b(m)))
    if len(combine) > 1 or combine[0] not in LOGICAL:
        raise op.unknown()
    other = op.read(3, "pred")
    both = LOGICAL[combine[0]]
    return assign(op, lambda m: both(function(a(m), b(m)), other(m)))


def select(op):
    """selp: one of two values, by a predicate."""
    a = op.read(1)
    b = op.read(2)
    chosen = op.read(3, "pred")
    if op.flags() or op.type not in INTEGERS | BITS | {"f32"}:
        raise op.unknown()
    return assign(op, lambda m: np.where(chosen(m), a(m), b(m)))


# ---- Moves and conversions
def move(op):
    """mov: a register, several that together make one, or one that is split into several."""
    if op.flags() or op.type not in INTEGERS | BITS | {"f32", "pred"}:
        raise op.unknown()
    to, source = op.operands
    if to.startswith("{"):
        return split(op, registers_of(to))
    if source.startswith("{"):
        return join(op, registers_of(source))
    value = op.read(1)
    return assign(op, value)


def split(op, targets):
    whole = op.read(1)
    bits = int(op.type[1:]) // len(targets)

    def step(machine, on):
        value = whole(machine)
        for i, target in enumerate(targets):
            part = (value >> value.dtype.type(i * bits)).astype(UNSIGNED[bits])
            machine.put(target, part, on)

    return step


def join(op, sources):
    """A part that nothing has written is undefined: Triton 3.6 leaves out parts that it ignores."""
    wide = DTYPES[op.type]
    bits = int(op.type[1:]) // len(sources)
    parts = [reader(source, f"b{bits}", op.symbols) for source in sources]

    def compute(machine):
        value = wide(0)
        for i, (source, part) in enumerate(zip(sources, parts, strict=True)):
            if is_register(source) and machine.is_undefined(source):
                bits_ = poison(machine.threads, UNSIGNED[bits])
            else:
                bits_ = part(machine)
            value = value | (bits_.astype(wide) << wide(i * bits))
        return value

    return assign(op, compute)


# (to, from) -> the modifier that such a conversion needs
ROUNDING = {("f32", "s32"): "rn", ("f32", "u32"): "rn", ("f16", "f32"): "rn", ("bf16", "f32"): "rn"}
ROUNDING |= {("f16x2", "f32"): "rn", ("bf16x2", "f32"): "rn", ("s32", "f32"): "rzi"}
ENCODE = dict(bf16=float32_to_bfloat16, f16=lambda x: x.astype(np.float16).view(np.uint16))


def convert(op):
    """cvt: between integers, from and to 16-bit numbers; two at once (bf16x2, f16x2)."""
    *flags, to, kind = op.modifiers
    if kind == "pred" or flags != ([ROUNDING[to, kind]] if (to, kind) in ROUNDING else []):
        raise op.unknown()
    x = op.read(1, kind, may_be_wider=True)
    if to in ("bf16x2", "f16x2"):
        encode = ENCODE[to.removesuffix("x2")]
        low = op.read(2, kind)
        return assign(op, lambda m: join_halves(encode(low(m)), encode(x(m))))
    if (to, kind) in (("bf16", "f32"), ("f16", "f32")):
        return assign(op, lambda m: ENCODE[to](x(m)))
    if (to, kind) == ("f32", "bf16"):
        return assign(op, x)
    if (to, kind) == ("s32", "f32"):
        return assign(op, lambda m: saturated(x(m)))
    if (to, kind) in ROUNDING or (to, kind) == ("f32", "f16"):
        return assign(op, lambda m: x(m).astype(np.float32))
    if {to, kind} <= INTEGERS | {"u8", "s8"}:
        # The register may be wider than the type: then the sign goes on.
        bits = op.width(op.operands[0])
        dtype = DTYPES[f"{to[0]}{bits}"]
        return assign(op, lambda m: x(m).astype(DTYPES[to]).astype(dtype))
    raise op.unknown()


def join_halves(low, high):
    """Two uint16 -> one uint32."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def saturated(x):
    """float32 -> int32, toward zero; a NaN becomes 0, and what is too large the largest."""
    limits = np.iinfo(np.int32)
    x = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0)
    return np.clip(x, limits.min, limits.max).astype(np.int32)


# ---- Memory
HINTS = {"L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::cache_hint"}
ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]")


def address_reader(op, index, bits):
    """Return what reads an address: "[%rd1+16]" -> uint64 (threads,); uint32 of shared memory."""
    found = ADDRESS.fullmatch(op.operands[index])
    if not found:
        raise op.unknown()
    base = reader(found[1], f"b{bits}", op.symbols)
    offset = UNSIGNED[bits](int(found[2] or "0", 0) & ((1 << bits) - 1))
    return lambda m: np.broadcast_to(base(m) + offset, m.threads)


def access_of(op):
    """Return space, bytes of a register, and number of registers of a load or store."""
    space, *rest, kind = op.modifiers
    count = 1
    for flag in rest:
        if flag in ("v2", "v4"):
            count = int(flag[1:])
        elif flag not in HINTS or space != "global":
            raise op.unknown()
    if space not in ("global", "shared", "shared::cta") or kind not in DTYPES or kind == "pred":
        raise op.unknown()
    has_policy = "L2::cache_hint" in rest
    if len(op.operands) != 2 + has_policy:
        raise op.unknown()
    return space, np.dtype(DTYPES[kind]).itemsize, count


def load(op):
    """ld, of global or shared memory and of parameters."""
    if op.modifiers[0] == "param":
        return load_parameter(op)
    space, size, count = access_of(op)
    targets = registers_of(op.operands[0])
    if len(targets) != count:
        raise op.unknown()
    is_global = space == "global"
    address = address_reader(op, 1, 64 if is_global else 32)
    dtype = DTYPES[op.type]
    # A register may be wider than what is loaded; then the sign goes on.
    wide = [DTYPES[f"{op.type[0]}{op.width(target)}"] for target in targets]
    if op.type[0] == "f":
        wide = [dtype] * count

    def step(machine, on):
        which = slice(None) if on is None else on
        at = address(machine)[which]
        warps = machine.warp[which]
        if len(at) == 0:
            return
        if is_global:
            data = machine.memory.read(at, size * count, warps, machine.shared.epoch)
        else:
            data = machine.shared.read(at, size * count, warps)
        for i, target in enumerate(targets):
            part = np.ascontiguousarray(data[:, i * size : (i + 1) * size]).view(dtype)[:, 0]
            value = part.astype(wide[i])
            if on is not None:
                value = spread(value, on, machine.threads)
            machine.put(target, value, on)

    return step


def spread(values, on, threads):
    """Values of the threads that are on -> of all threads."""
    everywhere = poison(threads, values.dtype).copy()
    everywhere[on] = values
    return everywhere


def load_parameter(op):
    name = op.operands[1].strip("[] ")
    target = op.operands[0]
    kind = op.type
    if op.modifiers[:-1] != ("param",) or kind not in DTYPES:
        raise op.unknown()
    width = op.width(target)

    def step(machine, on):
        value = machine.parameters[name]
        if isinstance(value, float):
            machine.put(target, np.float32(value), on)
            return
        if kind[0] == "s":  # extends the sign, if the register is wider
            machine.put(target, DTYPES[f"s{width}"](value), on)
            return
        bits = int(kind[1:])
        machine.put(target, UNSIGNED[width](value & ((1 << bits) - 1)), on)

    return step


def store(op):
    """st, to global or shared memory."""
    space, size, count = access_of(op)
    sources = registers_of(op.operands[1])
    if len(sources) != count:
        raise op.unknown()
    is_global = space == "global"
    address = address_reader(op, 0, 64 if is_global else 32)
    bits = f"b{8 * size}"
    values = [reader(source, bits, op.symbols, may_be_wider=True) for source in sources]

    def step(machine, on):
        which = slice(None) if on is None else on
        at = address(machine)[which]
        if len(at) == 0:
            return
        parts = [np.broadcast_to(value(machine), machine.threads)[which] for value in values]
        data = np.stack(parts, 1).view(np.uint8).reshape(len(at), -1)
        warps = machine.warp[which]
        if is_global:
            machine.memory.write(at, data, warps, machine.shared.epoch)
        else:
            machine.shared.write(at, data, warps)

    return step


def policy(op):
    """createpolicy: a hint for the cache, which changes no value."""
    if op.modifiers[0] != "fractional":
        raise op.unknown()
    return assign(op, lambda machine: np.uint64(0))


# ---- Between the threads of a warp
def shuffle(op):
    """shfl: each thread reads the register of another thread of its warp."""
    mode = op.modifiers[1]
    target, _, is_valid = op.operands[0].partition("|")
    value = op.read(1)
    by = op.read(2)
    limits = int(op.operands[3], 0)
    is_known = op.modifiers in {("sync", mode, "b32") for mode in ("up", "down", "bfly", "idx")}
    if not is_known or not 0 <= limits < 1 << 13 or op.operands[4] != "-1":
        raise op.unknown()
    clamp = limits & 31
    segment = limits >> 8  # bits of the lane that a thread keeps

    def step(machine, on):
        need_all(op, on)
        lane = machine.lane
        lowest = lane & segment
        last = lowest | (clamp & ~segment)
        by_lanes = np.broadcast_to(by(machine), machine.threads).astype(np.int64) & 31
        if mode == "up":
            source = lane - by_lanes
            valid = source >= last
        else:
            source = dict(
                down=lane + by_lanes, bfly=lane ^ by_lanes, idx=lowest | (by_lanes & ~segment)
            )[mode]
            valid = source <= last
        source = np.where(valid, source, lane)
        values = np.broadcast_to(value(machine), machine.threads)
        machine.put(target, values[machine.warp * WARP + source])
        if is_valid:
            machine.put(is_valid, valid)

    return step


REDUCE = dict(add=np.add, min=np.minimum, max=np.maximum)


def reduce(op):
    """redux: the sum, minimum or maximum of a warp."""
    _, function, kind = op.modifiers
    value = op.read(1)
    members = op.read(2, "b32")
    if op.modifiers[0] != "sync" or function not in REDUCE or kind not in ("s32", "u32"):
        raise op.unknown()

    def step(machine, on):
        need_all(op, on)
        if (members(machine) != 0xFFFFFFFF).any():
            raise op.unknown()
        values = np.broadcast_to(value(machine), machine.threads).reshape(-1, WARP)
        result = REDUCE[function].reduce(values, axis=1, dtype=values.dtype)
        machine.put(op.operands[0], np.repeat(result, WARP))

    return step


# ---- Control
def barrier(op):
    """bar.sync 0 of all threads; bar.warp.sync orders a warp, whose threads go together here."""
    if op.modifiers == ("warp", "sync") and op.operands == ["-1"]:
        return lambda machine, on: need_all(op, on)
    if op.modifiers != ("sync",) or op.operands != ["0"]:
        raise op.unknown()

    def step(machine, on):
        need_all(op, on)
        machine.barrier()

    return step


def branch(op):
    (label,) = op.operands
    if set(op.modifiers) - {"uni"}:
        raise op.unknown()

    def step(machine, on):
        if on is None:
            return label
        if on.any():
            raise UnknownInstruction("a branch that only some threads take")
        return None

    return step


def leave(op):
    if op.modifiers or op.operands:
        raise op.unknown()

    def step(machine, on):
        if on is None:
            return EXIT
        if on.any():
            raise UnknownInstruction("a return of some threads only")
        return None

    return step


DECODERS = dict.fromkeys(("add", "sub"), of_float32(binary))
DECODERS |= dict(mul=of_float32(multiply), fma=of_float32(multiply_add), mad=multiply_add)
DECODERS |= dict.fromkeys(("div", "rem", "min", "max"), binary)
DECODERS |= dict.fromkeys(LOGICAL, logical) | dict.fromkeys(("shl", "shr"), shift)
DECODERS |= dict.fromkeys(UNARY, unary)
DECODERS |= dict(bfe=bit_field, prmt=permute, setp=compare, selp=select, mov=move, cvt=convert)
DECODERS |= dict(ld=load, st=store, createpolicy=policy, shfl=shuffle, redux=reduce)
DECODERS |= dict(bar=barrier, bra=branch, ret=leave)
