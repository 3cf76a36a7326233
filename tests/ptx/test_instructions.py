"""Each instruction of the emulator does what the PTX ISA says, on random operands."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from .machine import Machine, UnknownInstruction
from .memory import GlobalMemory, Violation
from .program import Program

KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry tried(.param .u64 .ptr .global .align 1 tried_param_0, .param .f32 tried_param_1)
.reqntid {threads}
{{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<99>;
    .reg .b64 %rd<9>;
    {body}
    ret;
}}
"""
PREFIX = {1: "%p", 16: "%rs", 32: "%r", 64: "%rd"}
SIGNED = ("s16", "s32", "s64")


def execute(body, registers=(), threads=32, tensors=(), shared=0):
    """Run PTX on a machine whose registers have these values; return the machine."""
    program = Program(KERNEL.format(body=body, threads=threads))
    memory = GlobalMemory((f"argument {i}", x) for i, x in enumerate(tensors))
    values = [memory.address(x.data_ptr()) for x in tensors] + [0, 0.0]
    parameters = dict(zip(program.parameters, values, strict=False))
    machine = Machine(threads, (0, 0, 0), (1, 1, 1), parameters, memory, shared)
    for name, value in dict(registers).items():
        machine.put(name, np.asarray(value))
    with np.errstate(all="ignore"):
        program.run(machine)
    return machine


def bits_of(kind):
    return 1 if kind == "pred" else int(kind[1:])


def dtype_of(kind):
    letter = {"s": "i", "u": "u", "b": "u", "f": "f"}[kind[0]]
    return np.dtype(f"{letter}{bits_of(kind) // 8}")


def draw(kind, seed=0, n=32):
    """Random numbers of a type, with its special ones first."""
    g = np.random.default_rng(seed)
    dtype = dtype_of(kind)
    if kind == "f32":
        special = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -3e-39, 3e38]
        rest = g.standard_normal(n - len(special)) * np.exp(g.uniform(-20, 20, n - len(special)))
        values = np.array([*special, *rest], dtype)
        return np.roll(values, 3 * seed)  # others meet
    limits = np.iinfo(dtype)
    special = [0, 1, limits.max, limits.min, limits.max - 1, 5]
    small = g.integers(max(limits.min, -9), 9, 8)
    rest = g.integers(limits.min, limits.max, n - len(special) - len(small), dtype, endpoint=True)
    values = np.concatenate([np.array(special, dtype), small.astype(dtype), rest])
    return np.roll(values, 3 * seed)


def apply(opcode, result, *operands, immediates=""):
    """The result of an instruction: its type, then a type and values of each operand."""
    registers = {}
    names = []
    for i, (kind, values) in enumerate(operands):
        names.append(f"{PREFIX[bits_of(kind)]}{i + 1}")
        registers[names[-1]] = values
    target = f"{PREFIX[bits_of(result)]}0"
    text = f"{opcode} {target}, {', '.join(names)}{immediates};"
    got = execute(text, registers).registers[target]
    return got if result == "pred" else got.view(dtype_of(result))


def wrap(number, kind):
    """A Python integer -> what is left of it in a type."""
    bits = bits_of(kind)
    number &= (1 << bits) - 1
    return number - (1 << bits) if kind in SIGNED and number >> (bits - 1) else number


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


INTEGER_OPERATIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": quotient,
    "rem": lambda a, b: a - b * quotient(a, b),
}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", INTEGER_OPERATIONS)
def test_integer_arithmetic(name, kind):
    a = draw(kind, 1)
    b = draw(kind, 2)
    if name in ("div", "rem"):
        b[b == 0] = 3
    got = apply(f"{name}.{kind}", kind, (kind, a), (kind, b))
    expected = [
        wrap(INTEGER_OPERATIONS[name](int(x), int(y)), kind) for x, y in zip(a, b, strict=True)
    ]
    assert got.tolist() == expected


@pytest.mark.parametrize("kind", ["s32", "u32", "s16", "u16"])
def test_products_of_twice_the_width(kind):
    wide = f"{kind[0]}{2 * bits_of(kind)}"
    a, b, c = draw(kind, 1), draw(kind, 2), draw(wide, 3)
    triples = [(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
    got = apply(f"mul.wide.{kind}", wide, (kind, a), (kind, b))
    assert got.tolist() == [x * y for x, y, _ in triples]
    got = apply(f"mad.wide.{kind}", wide, (kind, a), (kind, b), (wide, c))
    assert got.tolist() == [wrap(x * y + z, wide) for x, y, z in triples]
    if bits_of(kind) == 32:
        got = apply(f"mul.hi.{kind}", kind, (kind, a), (kind, b))
        assert got.tolist() == [x * y >> 32 for x, y, _ in triples]


@pytest.mark.parametrize("kind", ["s32", "s64"])
def test_multiply_and_add(kind):
    values = [draw(kind, seed) for seed in (1, 2, 3)]
    got = apply(f"mad.lo.{kind}", kind, *((kind, x) for x in values))
    triples = zip(*values, strict=True)
    assert got.tolist() == [wrap(int(a) * int(b) + int(c), kind) for a, b, c in triples]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_bits(bits):
    kind = f"b{bits}"
    a, b = draw(kind, 1), draw(kind, 2)
    pairs = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    for name, function in (
        ("and", lambda x, y: x & y),
        ("or", lambda x, y: x | y),
        ("xor", lambda x, y: x ^ y),
    ):
        got = apply(f"{name}.{kind}", kind, (kind, a), (kind, b))
        assert got.tolist() == [function(x, y) for x, y in pairs]
    assert apply(f"not.{kind}", kind, (kind, a)).tolist() == [wrap(~x, kind) for x, _ in pairs]
    by = np.arange(32, dtype=np.uint32) * 3  # more than there are bits, too
    shifted = apply(f"shl.{kind}", kind, (kind, a), ("u32", by))
    assert shifted.tolist() == [wrap(int(x) << int(n), kind) for x, n in zip(a, by, strict=True)]
    for sign in "us":
        values = a.view(dtype_of(f"{sign}{bits}"))
        shifted = apply(
            f"shr.{sign}{bits}", f"{sign}{bits}", (f"{sign}{bits}", values), ("u32", by)
        )
        assert shifted.tolist() == [int(x) >> int(n) for x, n in zip(values, by, strict=True)]
    if bits > 16:
        got = apply(f"popc.{kind}", "u32", (kind, a))
        assert got.tolist() == [int(x).bit_count() for x in a]


@pytest.mark.parametrize(("first", "length"), [(0, 5), (1, 1), (27, 5), (3, 29), (0, 32)])
def test_fields_of_bits(first, length):
    x = draw("u32", 1)
    got = apply("bfe.u32", "u32", ("u32", x), immediates=f", {first}, {length}")
    field = [(int(v) >> first) & ((1 << length) - 1) for v in x]
    assert got.tolist() == field
    got = apply("bfe.s32", "s32", ("s32", x.view(np.int32)), immediates=f", {first}, {length}")
    assert got.tolist() == [v - (1 << length) if v >> (length - 1) else v for v in field]


def test_permuted_bytes():
    a, b, selector = (draw("u32", seed) for seed in (1, 2, 3))
    got = apply("prmt.b32", "b32", ("b32", a), ("b32", b), ("b32", selector))
    for x, y, s, result in zip(a, b, selector, got, strict=True):
        source = int(x).to_bytes(4, "little") + int(y).to_bytes(4, "little")
        chosen = [(int(s) >> 4 * i) & 15 for i in range(4)]
        bytes_ = [source[k & 7] if k < 8 else 255 * (source[k & 7] >> 7) for k in chosen]
        assert result == int.from_bytes(bytes(bytes_), "little")


def test_a_sign_is_changed():
    x = draw("s32", 1)
    assert apply("neg.s32", "s32", ("s32", x)).tolist() == [wrap(-int(v), "s32") for v in x]
    assert apply("abs.s32", "s32", ("s32", x)).tolist() == [wrap(abs(int(v)), "s32") for v in x]
    y = draw("f32", 1)
    got = apply("neg.f32", "f32", ("f32", y))
    assert np.array_equal(np.signbit(got), ~np.signbit(y))
    assert np.array_equal(np.abs(got), np.abs(y), equal_nan=True)


def nearest(number):
    """The float32 nearest to a fraction (which is not too large)."""
    return np.float32(float(number))


def finite(*arrays):
    """The arrays with everything replaced by 0.5 that is not finite, or huge or tiny."""
    size = [np.where(np.isfinite(x), np.abs(x), 0) for x in arrays]
    return [
        np.where((s > 1e-12) & (s < 1e12), x, np.float32(0.5))
        for x, s in zip(arrays, size, strict=True)
    ]


def test_floating_point_arithmetic():
    a, b, c = finite(*(draw("f32", seed) for seed in (1, 2, 3)))
    triples = [[Fraction(float(v)) for v in values] for values in zip(a, b, c, strict=True)]
    for opcode, function, n in (
        ("add.f32", lambda x, y, z: x + y, 2),
        ("sub.rn.f32", lambda x, y, z: x - y, 2),
        ("mul.f32", lambda x, y, z: x * y, 2),
        ("div.full.f32", lambda x, y, z: x / y, 2),
        ("fma.rn.f32", lambda x, y, z: x * y + z, 3),
    ):
        operands = [("f32", v) for v in (a, b, c)[:n]]
        got = apply(opcode, "f32", *operands)
        assert got.tolist() == [nearest(function(*triple)) for triple in triples], opcode


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_pairs_of_floating_point_numbers(name):
    pairs = [draw("f32", seed, 64) for seed in (1, 2, 3)][: 3 if name == "fma" else 2]
    opcode = f"{name}.rn.f32x2" if name == "fma" else f"{name}.f32x2"
    operands = [("b64", x.view(np.uint64)) for x in pairs]
    got = apply(opcode, "b64", *operands).view(np.float32)
    single = f"{name}.rn.f32"
    for part in (0, 1):
        expected = apply(single, "f32", *(("f32", x[part::2].copy()) for x in pairs))
        assert np.array_equal(got[part::2], expected, equal_nan=True)


@pytest.mark.parametrize("narrow", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["add", "sub", "fma"])
def test_mixed_types(name, narrow):
    """Triton 3.7 and 3.8 emit them for sm_120: 16-bit operands, but the last has 32 bits."""
    count = 2 if name == "fma" else 1
    dtype = dict(bf16=torch.bfloat16, f16=torch.float16)[narrow]
    halves = [torch.from_numpy(draw("f32", seed).copy()).to(dtype) for seed in (1, 2)[:count]]
    last = ("f32", draw("f32", 3))
    short = [("b16", x.view(torch.int16).numpy().view(np.uint16)) for x in halves]
    wide = [("f32", x.float().numpy()) for x in halves]
    got = apply(f"{name}.rn.f32.{narrow}", "f32", *short, last)
    expected = apply(f"{name}.rn.f32", "f32", *wide, last)
    assert np.array_equal(got, expected, equal_nan=True)
    with pytest.raises(UnknownInstruction, match=rf"{name}\.rz\.f32"):
        apply(f"{name}.rz.f32.{narrow}", "f32", *short, last)


def test_memory_of_a_thread_may_be_declared_but_not_used():
    declared = ".local .align 1 .b8 __local_depot0[1];"
    assert execute(f"{declared} mov.u32 %r1, 7;").registers["%r1"][0] == 7
    with pytest.raises(UnknownInstruction, match=r"ld\.local"):
        execute(f"{declared} ld.local.b32 %r1, [%rd1];")


@pytest.mark.parametrize("body", ["mov.u32 %r2, %r3;", "add.rn.f32.f32x9 %r2, %r2, %r2;"])
def test_an_error_names_the_line_of_the_source(body):
    """While it is decoded and while it runs; of an inlined function, its callers too."""
    text = f"""mov.u32 %r1, 1;
    .loc 1 7 3 // first.py:7:3
    mov.u32 %r2, %r1;
    $L__BB0_1:
    .loc 2 43 17 // lib.py:43:17 @[ first.py:78:25 @[ first.py:136:30 ] ]
    {body}
    .loc 1 9 3 // first.py:9:3"""
    where = "lib.py:43, called at first.py:78, called at first.py:136: "
    with pytest.raises((Violation, UnknownInstruction), match=f"^{re.escape(where)}"):
        execute(text)


@pytest.mark.parametrize(("name", "choose"), [("min", min), ("max", max)])
def test_smallest_and_largest(name, choose):
    """A NaN loses, or with .NaN wins."""
    a, b = draw("f32", 1), draw("f32", 2)
    for nan in (False, True):
        got = apply(f"{name}{'.NaN' * nan}.f32", "f32", ("f32", a), ("f32", b))
        for x, y, z in zip(a, b, got, strict=True):
            if np.isnan(x) and np.isnan(y) or nan and (np.isnan(x) or np.isnan(y)):
                assert np.isnan(z)
            elif np.isnan(x) or np.isnan(y):
                assert z == (y if np.isnan(x) else x)
            else:
                assert z == choose(x, y)


FUNCTIONS = {
    "ex2.approx.ftz": lambda x: 2.0**x if x < 128 else math.inf,
    "lg2.approx.ftz": lambda x: math.log2(x) if x > 0 else math.nan,
    "rsqrt.approx.ftz": lambda x: x**-0.5 if x > 0 else math.nan,
    "rcp.approx.ftz": lambda x: 1 / x,
    "sqrt.rn": lambda x: x**0.5 if x >= 0 else math.nan,
}


@pytest.mark.parametrize("opcode", FUNCTIONS)
def test_functions(opcode):
    (x,) = finite(draw("f32", 1))
    x = np.where(opcode.startswith("ex2"), np.clip(x, -100, 100), x)
    got = apply(f"{opcode}.f32", "f32", ("f32", x))
    expected = np.array([FUNCTIONS[opcode](float(v)) for v in x], np.float32)
    np.testing.assert_array_max_ulp(got[~np.isnan(expected)], expected[~np.isnan(expected)], 1)
    assert np.isnan(got[np.isnan(expected)]).all()


def test_subnormal_numbers_are_flushed_where_asked():
    tiny = np.full(32, 1e-40, np.float32)
    one = np.ones(32, np.float32)
    assert apply("mul.f32", "f32", ("f32", tiny), ("f32", one))[0] == np.float32(1e-40)
    assert apply("mul.ftz.f32", "f32", ("f32", tiny), ("f32", one))[0] == 0
    assert apply("ex2.approx.ftz.f32", "f32", ("f32", np.full(32, -130, np.float32)))[0] == 0
    assert apply("ex2.approx.f32", "f32", ("f32", np.full(32, -130, np.float32)))[0] > 0


RELATIONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("relation", RELATIONS)
def test_comparisons(relation):
    compare = RELATIONS[relation]
    for kind in ("s32", "u32", "s64", "u64"):
        a, b = draw(kind, 1), draw(kind, 2)
        b[:4] = a[:4]
        got = apply(f"setp.{relation}.{kind}", "pred", (kind, a), (kind, b))
        assert got.tolist() == [compare(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    a, b = draw("f32", 1), draw("f32", 2)
    b[5:12] = a[5:12]
    nan = np.isnan(a) | np.isnan(b)
    plain = np.array([bool(compare(x, y)) for x, y in zip(a, b, strict=True)])
    got = apply(f"setp.{relation}.f32", "pred", ("f32", a), ("f32", b))
    assert np.array_equal(got, plain & ~nan)
    got = apply(f"setp.{relation}u.f32", "pred", ("f32", a), ("f32", b))
    assert np.array_equal(got, plain | nan)


def test_choice_and_combined_predicates():
    a, b = draw("s32", 1), draw("s32", 2)
    machine = execute(
        """
        setp.lt.s32 %p0, %r1, %r2;
        setp.gt.and.s32 %p1, %r1, 0, !%p0;
        not.pred %p2, %p1;
        selp.b32 %r3, %r1, %r2, %p2;
        @%p0 mov.b32 %r3, 77;
        @!%p0 add.s32 %r1, %r1, 1;
        """,
        {"%r1": a, "%r2": b},
    )
    less = a < b
    both = (a > 0) & ~less
    assert np.array_equal(machine.get("%p1"), both)
    assert np.array_equal(
        machine.get("%r3").view(np.int32), np.where(less, 77, np.where(both, b, a))
    )
    assert np.array_equal(machine.get("%r1").view(np.int32), np.where(less, a, a + np.int32(1)))


def test_registers_are_split_and_joined():
    x = draw("u64", 1)
    machine = execute(
        "mov.b64 {%r1, %r2}, %rd1; mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r3, {%rs2, %rs1};"
        "mov.b64 %rd2, {%r2, %r1};",
        {"%rd1": x},
    )
    low, high = x & np.uint64(0xFFFFFFFF), x >> np.uint64(32)
    assert np.array_equal(machine.get("%r1"), low) and np.array_equal(machine.get("%r2"), high)
    assert np.array_equal(machine.get("%rd2"), high | (low << np.uint64(32)))
    swapped = (high >> np.uint64(16)) | ((high & np.uint64(0xFFFF)) << np.uint64(16))
    assert np.array_equal(machine.get("%r3"), swapped)


def test_an_undefined_half_of_a_register_spoils_only_what_reads_it():
    low = draw("u32", 1)
    machine = execute("mov.b64 %rd1, {%r1, %r9}; mov.b64 {%r2, %r3}, %rd1;", {"%r1": low})
    assert np.array_equal(machine.get("%r2"), low)
    assert (machine.get("%r3") == 0xCDCDCDCD).all()


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_conversions_of_16_bits_round_as_pytorch_does(kind, dtype):
    x, y = draw("f32", 1), draw("f32", 2)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65519.9, 65520, 6e-8], np.float32)
    x[-6:] = ties
    for values, result in (
        (x, apply(f"cvt.rn.{kind}.f32", "b16", ("f32", x))),
        (y, apply(f"cvt.rn.{kind}x2.f32", "b32", ("f32", x), ("f32", y)) & 0xFFFF),
        (x, apply(f"cvt.rn.{kind}x2.f32", "b32", ("f32", x), ("f32", y)) >> 16),
    ):
        expected = torch.from_numpy(values).to(dtype)
        got = torch.from_numpy(result.astype(np.uint16).view(np.int16)).view(dtype)
        assert torch.equal(got.nan_to_num(9), expected.nan_to_num(9))
        assert torch.equal(got.isnan(), expected.isnan())
    halves = torch.from_numpy(x).to(dtype)
    got = apply(f"cvt.f32.{kind}", "f32", ("b16", halves.view(torch.int16).numpy().view(np.uint16)))
    assert np.array_equal(got, halves.float().numpy(), equal_nan=True)


def test_conversions_of_integers():
    x = draw("s32", 1)
    assert apply("cvt.s64.s32", "s64", ("s32", x)).tolist() == x.tolist()
    unsigned = x.view(np.uint32)
    assert apply("cvt.u64.u32", "u64", ("u32", unsigned)).tolist() == unsigned.tolist()
    assert apply("cvt.u16.u32", "u16", ("u32", unsigned)).tolist() == (unsigned & 0xFFFF).tolist()
    wide = draw("u64", 1)
    low = [int(v) & 0xFFFFFFFF for v in wide]
    assert apply("cvt.u32.u64", "u32", ("u64", wide)).tolist() == low
    bytes_ = [wrap(int(v), "s32") & 0xFF for v in x]
    expected = [v - 256 if v > 127 else v for v in bytes_]
    assert apply("cvt.s32.s8", "s32", ("s32", x)).tolist() == expected  # the lower byte counts
    assert apply("cvt.rn.f32.s32", "f32", ("s32", x)).tolist() == [nearest(int(v)) for v in x]
    f = np.array([2.9, -2.9, np.nan, 1e20, -1e20] + [0.5] * 27, np.float32)
    got = apply("cvt.rzi.s32.f32", "s32", ("f32", f))
    assert got[:6].tolist() == [2, -2, 0, 2**31 - 1, -(2**31), 0]


def lanes(values):
    return np.asarray(values).reshape(-1, 32)


@pytest.mark.parametrize("mode", ["bfly", "up", "down", "idx"])
@pytest.mark.parametrize("by", [1, 3, 16, 31])
def test_shuffles(mode, by):
    x = draw("u32", 1, 64)
    clamp = 0 if mode == "up" else 31
    text = f"shfl.sync.{mode}.b32 %r2|%p1, %r1, {by}, {clamp}, -1;"
    machine = execute(text, {"%r1": x}, threads=64)
    for row, got, valid in zip(
        lanes(x), lanes(machine.get("%r2")), lanes(machine.get("%p1")), strict=True
    ):
        for lane in range(32):
            source = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": by}[mode]
            inside = 0 <= source < 32
            assert got[lane] == row[source if inside else lane] and valid[lane] == inside


def test_shuffles_within_parts_of_a_warp():
    """Segments of 8 lanes: c = 0x181f."""
    x = np.arange(32, dtype=np.uint32)
    got = execute("shfl.sync.down.b32 %r2, %r1, 3, 6175, -1;", {"%r1": x}).get("%r2")
    assert got.tolist() == [v + 3 if v % 8 < 5 else v for v in range(32)]
    got = execute("shfl.sync.idx.b32 %r2, %r1, 2, 6175, -1;", {"%r1": x}).get("%r2")
    assert got.tolist() == [v // 8 * 8 + 2 for v in range(32)]


@pytest.mark.parametrize("name", ["add", "min", "max"])
def test_reductions_of_a_warp(name):
    x = draw("s32", 1, 64)
    got = execute(f"redux.sync.{name}.s32 %r2, %r1, -1;", {"%r1": x}, threads=64).get("%r2")
    function = dict(add=lambda v: wrap(sum(map(int, v)), "s32"), min=min, max=max)[name]
    for row, result in zip(lanes(x), lanes(got.view(np.int32)), strict=True):
        assert (result == function(row)).all()


def test_loads_and_stores():
    """Vectors, guards, signs, offsets, shared memory."""
    x = torch.arange(-64, 64, dtype=torch.int16)
    y = torch.full((64,), -1, dtype=torch.int64)
    machine = execute(
        """
        ld.param.b64 %rd1, [tried_param_0];
        mul.wide.u32 %rd2, %tid.x, 4;
        add.s64 %rd3, %rd1, %rd2;
        ld.global.v2.b16 {%rs1, %rs2}, [%rd3+128];
        mov.b32 %r1, 5;
        setp.lt.u32 %p1, %tid.x, 9;
        @%p1 ld.global.b32 %r1, [ %rd3 + 0 ];
        shl.b32 %r2, %tid.x, 3;
        mov.b32 %r3, global_smem;
        add.s32 %r4, %r3, %r2;
        st.shared.v2.b16 [%r4+4], {%rs1, %rs2};
        ld.shared.s16 %r5, [%r4+6];
        ld.shared.u16 %r6, [%r4+6];
        """,
        tensors=(x, y),
        shared=512,
    )
    odd = x[65:128:2].numpy()
    assert machine.get("%rs2").view(np.int16).tolist() == odd.tolist()
    assert machine.get("%r5").view(np.int32).tolist() == odd.tolist()
    assert machine.get("%r6").tolist() == odd.view(np.uint16).tolist()
    words = x.numpy().view(np.uint32)[:32]
    assert machine.get("%r1").tolist() == [*words[:9].tolist(), *[5] * 23]
    execute(
        """
        ld.param.b64 %rd1, [tried_param_0];
        mad.wide.u32 %rd2, %tid.x, 16, %rd1;
        cvt.u64.u32 %rd3, %tid.x;
        setp.ge.u32 %p1, %tid.x, 2;
        @%p1 st.global.v2.b64 [%rd2], {%rd3, %rd1};
        """,
        tensors=(y,),
    )
    assert y[:4].tolist() == [-1] * 4 and y[4::2].tolist() == list(range(2, 32))


@pytest.mark.parametrize(
    "text",
    [
        "frobnicate.b32 %r1, %r2;",
        "add.sat.s32 %r1, %r2, %r3;",
        "add.f64 %rd1, %rd2, %rd3;",
        "ld.global.nc.b32 %r1, [%rd1];",
        "ld.local.b32 %r1, [%rd1];",
        "shfl.sync.bfly.b32 %r1, %r2, 1, 31, 15;",
        "bar.sync 1;",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r2}, {%r3}, {%r4};",
        "cp.async.bulk.commit_group;",
        "fence.acq_rel.gpu;",
        "tcgen05.wait::ld.sync.aligned;",
        "cvt.rna.tf32.f32 %r1, %r2;",
        "call.uni (%r1), vprintf, (%rd1, %rd2);",
    ],
)
def test_what_is_unknown_is_an_error(text):
    """Not skipped, nor anything that it could be taken for."""
    with pytest.raises(UnknownInstruction, match="does not know"):
        Program(KERNEL.format(body=text, threads=32))


def test_a_branch_of_some_threads_is_refused():
    with pytest.raises(UnknownInstruction, match="some threads"):
        execute("setp.lt.u32 %p1, %tid.x, 9; @%p1 bra $L1; mov.b32 %r1, 1; $L1:")


def test_loops():
    machine = execute(
        """
        mov.b32 %r1, 0;
        mov.b32 %r2, 0;
        $L__BB0_1:
        add.s32 %r2, %r2, %r1;
        add.s32 %r1, %r1, 1;
        setp.lt.s32 %p1, %r1, 5;
        @%p1 bra $L__BB0_1;
        bra.uni $L__BB0_2;
        mov.b32 %r2, 99;
        $L__BB0_2:
        """
    )
    assert (machine.get("%r2") == 10).all()
