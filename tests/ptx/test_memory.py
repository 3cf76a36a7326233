"""What the emulator finds wrong: accesses beyond an argument, races, missing waits and fences."""

import numpy as np
import pytest
import torch

from .memory import GlobalMemory, Violation
from .program import Program, run_grid
from .test_instructions import KERNEL, execute
from .test_matrices import names

ADDRESS = "ld.param.b64 %rd1, [tried_param_0]; mad.wide.u32 %rd2, %tid.x, 4, %rd1;"
SHARED = "shl.b32 %r1, %tid.x, 2; mov.b32 %r2, 7;"  # a word of each thread


def fails(words, *args, **options):
    with pytest.raises(Violation, match=words):
        execute(*args, **options)


@pytest.mark.parametrize(
    ("n", "offset", "words"),
    [
        (31, 0, "read of 4 bytes at 124, beyond argument 0 of 124 bytes"),
        (33, 4, None),
        (32, 4, "at 128, beyond argument 0"),
        (64, -4, "at -4, beyond argument 0"),
        (64, 2, "not aligned"),
        (64, 1 << 20, "beyond argument 0"),
    ],
)
def test_reads_beyond_an_argument(n, offset, words):
    x = torch.arange(n, dtype=torch.int32)
    others = torch.zeros(2, 1 << 20)  # next to it, perhaps, in the memory of this process
    text = f"{ADDRESS} ld.global.b32 %r1, [%rd2+{offset}];"
    if words is None:
        assert execute(text, tensors=(x, *others)).get("%r1").tolist() == list(range(1, 33))
    else:
        fails(words, text, tensors=(x, *others))


def test_writes_beyond_an_argument_change_nothing():
    x = torch.zeros(32, dtype=torch.int32)
    text = f"{ADDRESS} mov.b32 %r1, 1; st.global.b32 [%rd2+4], %r1;"
    fails("write of 4 bytes at 128, beyond", text, tensors=(x,))
    assert not x.any()


def test_threads_that_are_off_do_not_access():
    x = torch.zeros(9, dtype=torch.int32)
    text = f"{ADDRESS} mov.b32 %r1, 3; setp.lt.u32 %p1, %tid.x, 9; @%p1 st.global.b32 [%rd2], %r1;"
    execute(text, tensors=(x,))
    assert x.tolist() == [3] * 9


def test_an_address_of_32_bits_is_of_no_argument():
    x = torch.zeros(32, dtype=torch.int32)
    text = f"{ADDRESS} cvt.u32.u64 %r1, %rd2; cvt.u64.u32 %rd2, %r1; ld.global.b32 %r1, [%rd2];"
    fails("no argument", text, tensors=(x,))


@pytest.mark.parametrize("barrier", ["", "bar.sync 0;"])
def test_warps_that_exchange_numbers_need_a_barrier(barrier):
    """Shared and global memory; read after write, write after read, write after write."""
    far = "xor.b32 %r3, %r1, 128;"  # the word of the other warp
    write = "st.shared.b32 [%r1], %r2;"
    texts = {
        "read after": f"{SHARED} {far} {write} {barrier} ld.shared.b32 %r4, [%r3];",
        "by two": f"{SHARED} {far} {write} {barrier} st.shared.b32 [%r3], %r2;",
        "after another read": f"{SHARED} {far} {write} ld.shared.b32 %r4, [%r1]; bar.sync 0;"
        f"ld.shared.b32 %r4, [%r1]; {barrier} st.shared.b32 [%r3], %r2;",
    }
    for words, text in texts.items():
        if barrier:
            execute(text, threads=64, shared=256)
        else:
            fails(words, text, threads=64, shared=256)
    here = f"{ADDRESS} mov.b32 %r2, 7; xor.b32 %r3, %tid.x, 32; mad.wide.u32 %rd3, %r3, 4, %rd1;"
    for words, text in {
        "read after": "st.global.b32 [%rd2], %r2; {} ld.global.b32 %r4, [%rd3];",
        "by two": "st.global.b32 [%rd2], %r2; {} st.global.b32 [%rd3], %r2;",
        "after another read": "ld.global.b32 %r4, [%rd2]; {} st.global.b32 [%rd3], %r2;",
    }.items():
        x = torch.zeros(64, dtype=torch.int32)
        if barrier:
            execute(here + text.format(barrier), threads=64, tensors=(x,))
        else:
            fails(words, here + text.format(barrier), threads=64, tensors=(x,))


def test_a_word_that_two_warps_read_is_not_written_by_one_of_them():
    both = "ld.shared.b32 %r4, [0]; setp.eq.u32 %p1, %tid.x, {}; @%p1 st.shared.b32 [0], %r2;"
    start = f"{SHARED} setp.eq.u32 %p2, %tid.x, 0; @%p2 st.shared.b32 [%r1], %r2; bar.sync 0;"
    for writer in (0, 63):
        text = start + both.replace("[0]", "[global_smem]").format(writer)
        fails("after another read", text, threads=64, shared=256)


def test_two_threads_that_write_different_numbers_to_one_place():
    x = torch.zeros(1, dtype=torch.int32)
    text = "ld.param.b64 %rd1, [tried_param_0]; st.global.b32 [%rd1], {};"
    execute(f"mov.b32 %r1, 4; {text.format('%r1')}", tensors=(x,))
    assert x.item() == 4
    fails("different values", f"mov.u32 %r1, %tid.x; {text.format('%r1')}", tensors=(x,))


@pytest.mark.parametrize("overlap", [0, 1])
def test_programs_of_a_grid_do_not_share_what_one_of_them_writes(overlap):
    """Each of two programs writes 32 numbers, and reads some of an argument that both may read."""
    text = """
        ld.param.b64 %rd1, [tried_param_0];
        mov.u32 %r1, %ctaid.x;
        mad.lo.s32 %r2, %r1, {stride}, %tid.x;
        mad.wide.u32 %rd2, %r2, 4, %rd1;
        ld.global.b32 %r3, [%rd1+400];
        st.global.b32 [%rd2], %r1;
    """
    program = Program(KERNEL.format(body=text.replace("{stride}", str(32 - overlap)), threads=32))
    x = torch.full((101,), -1, dtype=torch.int32)
    memory = GlobalMemory([("x", x)])
    values = [memory.address(x.data_ptr()), 0.0]
    if overlap:
        with pytest.raises(Violation, match="race: x is written by two"):
            run_grid(program, values, (2, 1, 1), memory, 0)
    else:
        run_grid(program, values, (2, 1, 1), memory, 0)
        assert x.tolist() == [0] * 32 + [1] * 32 + [-1] * 37


def test_arguments_that_are_the_same_memory_are_watched_as_one():
    x = torch.zeros(64, dtype=torch.int32)
    memory = GlobalMemory([("a", x), ("b", x[32:]), ("c", torch.zeros(4))])
    assert len(memory.regions) == 2
    assert memory.address(x[40:].data_ptr()) - memory.address(x.data_ptr()) == 160
    assert memory.address(x.data_ptr()) % 16 == x.data_ptr() % 16, "as aligned as the tensor"


def test_shared_memory_has_bounds_and_nothing_in_it():
    fails("nothing was written", f"{SHARED} ld.shared.b32 %r2, [%r1];", shared=128)
    fails("at 4 .. 132 of 128", f"{SHARED} st.shared.b32 [%r1+4], %r2;", shared=128)
    fails("not aligned", f"{SHARED} st.shared.b32 [%r1+2], %r2;", shared=256)


def test_registers_that_nothing_wrote():
    fails("%r9 is read and was never written", "add.s32 %r1, %r9, 1;")


COPY = f"{ADDRESS} {SHARED} cp.async.ca.shared.global [%r1], [%rd2], 0x4;"
COMMIT = "cp.async.commit_group;"
WAIT = "cp.async.wait_group 0;"
READ = "ld.shared.b32 %r3, [%r1];"


def test_copies_are_waited_for():
    x = torch.arange(32, dtype=torch.int32)
    options = dict(tensors=(x,), shared=256)
    got = execute(f"{COPY} {COMMIT} {WAIT} {READ}", **options).get("%r3")
    assert got.tolist() == list(range(32))
    fails("nothing was written", f"{COPY} {COMMIT} {READ}", **options)
    fails("cp.async still writes", f"st.shared.b32 [%r1], %r2; {COPY} {COMMIT} {READ}".replace(
        "st.shared", f"{SHARED} st.shared", 1), **options)  # fmt: skip
    fails("nothing was written", f"{COPY} {COMMIT} {WAIT.replace('0', '1')} {READ}", **options)
    fails("nothing was written", f"{COPY} {WAIT} {READ}", **options)  # of no group
    fails("cp.async still writes", f"{COPY} st.shared.b32 [%r1], %r2;", **options)
    second = "cp.async.ca.shared.global [%r1+128], [%rd2], 0x4;"
    text = f"{COPY} {COMMIT} {second} {COMMIT} cp.async.wait_group 1; {READ}"
    execute(text, **options)
    fails("nothing was written", f"{text} ld.shared.b32 %r3, [%r1+128];", **options)


def test_copies_of_other_warps_need_a_barrier_after_the_wait():
    x = torch.arange(64, dtype=torch.int32)
    options = dict(tensors=(x,), shared=256, threads=64)
    far = "xor.b32 %r4, %r1, 128; ld.shared.b32 %r3, [%r4];"
    got = execute(f"{COPY} {COMMIT} {WAIT} bar.sync 0; {far}", **options).get("%r3")
    assert got.tolist() == [*range(32, 64), *range(32)]
    fails("race", f"{COPY} {COMMIT} {WAIT} {far}", **options)
    fails("race", f"{COPY} {COMMIT} bar.sync 0; {WAIT} {far}", **options)


def test_copies_of_no_bytes_give_zeros():
    """So are rows beyond the end read: nothing of the source is, which may be beyond it, too."""
    x = torch.arange(9, dtype=torch.int32)
    text = f"{ADDRESS} {SHARED} setp.lt.u32 %p1, %tid.x, 9; selp.b32 %r5, 4, 0, %p1;"
    text += f"cp.async.ca.shared.global [%r1], [%rd2], 0x4, %r5; {COMMIT} {WAIT} {READ}"
    got = execute(text, tensors=(x,), shared=128).get("%r3")
    assert got.tolist() == [*range(9), *[0] * 23]


# A product of zeros: 128 bytes a thread of shared memory, descriptors with a swizzle of 128 bytes.
PRODUCT = "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16"
ISSUE = f"{PRODUCT} {names(10, 16)}, {{%r40, %r41, %r42, %r43}}, %rd2, 1, 1, 1, 0;"
END = "wgmma.commit_group.sync.aligned;"
UNTIL = "wgmma.wait_group.sync.aligned 0;"
FENCE = "fence.proxy.async.shared::cta;"
ORDER = "wgmma.fence.sync.aligned;"
FILL = "shl.b32 %r1, %tid.x, 7; mov.b32 %r2, 0;" + "".join(
    f"st.shared.b32 [%r1+{i}], %r2;" for i in range(0, 128, 4)
)


def product(text):
    """Run text with registers for a product, its descriptor, and shared memory."""
    descriptor = 64 << 32 | 1 << 62
    registers = {f"%r{i}": np.zeros(128, np.uint32) for i in [*range(10, 26), *range(40, 44)]}
    registers["%rd2"] = np.full(128, descriptor, np.uint64)
    return execute(text, registers, threads=128, shared=16 << 10)


def test_products_are_ordered():
    """Each step is needed: without it the emulator says what is wrong."""
    right = [FILL, "bar.sync 0;", FENCE, ORDER, ISSUE, END, UNTIL, "mov.b32 %r3, %r12;"]
    assert (product(" ".join(right)).get("%r3") == 0).all()
    for left_out, words in {
        FILL: "nothing was written",
        "bar.sync 0;": "race",
        FENCE: "no fence.proxy.async",
        ORDER: "no wgmma.fence",
        END: "still writes it",
        UNTIL: "%r12 is read while wgmma still writes it",
    }.items():
        with pytest.raises(Violation, match=words):
            product(" ".join(part for part in right if part != left_out))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{ISSUE} {END} st.shared.b32 [%r1], %r2; {UNTIL}", "while wgmma still reads it"),
        (f"{ISSUE} {END} mov.b32 %r40, 0; {UNTIL}", "%r40 is written while wgmma"),
        (f"{ISSUE} {END} mov.b32 %r10, 0; {UNTIL}", "%r10 is written while wgmma"),
        (f"mov.b32 %r40, 0; {ISSUE} {END} {UNTIL}", "no wgmma.fence"),
        (f"{ISSUE} {END}", "ends before a product"),
        (f"{ISSUE} {END} {ISSUE} {END} wgmma.wait_group.sync.aligned 1; mov.b32 %r3, %r12;",
         "still writes it"),
    ],
)  # fmt: skip
def test_nothing_touches_what_a_product_uses(text, words):
    with pytest.raises(Violation, match=words):
        product(f"{FILL} bar.sync 0; {FENCE} {ORDER} {text}")


def test_the_first_product_needs_a_fence_of_registers():
    """Also if nothing has written its registers: with results that count as zeros."""
    whole = f"{PRODUCT} {names(50, 16)}, %rd2, %rd2, 0, 1, 1, 0, 0; {END} {UNTIL}"
    product(f"{FILL} bar.sync 0; {FENCE} {ORDER} {whole}")
    with pytest.raises(Violation, match=r"first wgmma has no wgmma\.fence"):
        product(f"{FILL} bar.sync 0; {FENCE} {whole}")


def test_results_need_no_fence_between_two_products():
    """Whether the fence of the second is before or after the wait; but what else writes them."""
    start = f"{FILL} bar.sync 0; {FENCE} {ORDER} {ISSUE} {END}"
    for between in (UNTIL, f"{ORDER} {UNTIL}", f"{UNTIL} {ORDER}"):
        text = f"{start} {between} {ISSUE} {END} {UNTIL}"
        assert (product(text).get("%r10") == 0).all()
    with pytest.raises(Violation, match=r"%r10, which was written with no wgmma\.fence since"):
        product(f"{start} {ORDER} {UNTIL} mov.b32 %r10, 0; {ISSUE} {END} {UNTIL}")


def test_a_chain_of_products_adds_up():
    chain = f"{FILL} bar.sync 0; {FENCE} {ORDER} {ISSUE} {ISSUE} {END} {ISSUE} {END} {UNTIL}"
    assert (product(chain).get("%r10") == 0).all()


def test_instructions_for_all_threads_are_executed_by_all():
    some = "setp.lt.u32 %p1, %tid.x, 9; "
    for text in ("bar.sync 0;", "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;", "bar.warp.sync -1;"):
        fails("some threads", f"{some} mov.b32 %r2, 0; @%p1 {text}")
