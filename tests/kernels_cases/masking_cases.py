"""The masking kernel gives the bits of its reference: on a GPU or (TRITON_INTERPRET=1) a CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanomdlm.kernels import launch
from nanomdlm.kernels.operations import mask_tokens, mask_tokens_ref

pytestmark = pytest.mark.skipif(
    not launch.ENABLED or not (torch.cuda.is_available() or launch.INTERPRET),
    reason="needs a GPU or TRITON_INTERPRET=1",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(x0, level, mask_id, seed, step, ids, never_mask=None):
    """The kernel runs, and gives the bits of the reference; returns xt, count, rows, n_rows."""
    launch.LAUNCHES.clear()
    got = mask_tokens(x0, level, mask_id, seed, step, ids, never_mask)
    assert launch.LAUNCHES["mask_kernel"] == 1
    wanted = mask_tokens_ref(x0, level, mask_id, seed, step, ids, never_mask)
    for g, w in zip(got, wanted, strict=True):
        assert torch.equal(g, w.to(g.dtype)) and g.shape == w.shape
    return got


@pytest.mark.parametrize(
    "T", [1, 63, 257, *(pytest.param(T, marks=pytest.mark.slow) for T in (2, 64, 256, 1111))]
)
def test_same_bits_as_the_reference(T):
    B = 5
    x0 = torch.randint(70, (B, T), generator=torch.Generator().manual_seed(T)).to(DEVICE)
    level = torch.tensor([0, T, 1, T // 2, T + 3])  # more than T means all
    check(x0, level.to(DEVICE), 70, 3, 9, torch.arange(100, 100 + B, device=DEVICE))


@pytest.mark.parametrize("T", [5, 70])
def test_fixed_positions_are_never_masked(T):
    x0 = torch.zeros(4, T, dtype=torch.int64, device=DEVICE)
    never_mask = torch.rand(4, 2 * T, generator=torch.Generator().manual_seed(T)).to(DEVICE) < 0.4
    never_mask = never_mask[:, ::2]
    never_mask[3] = True
    level = torch.tensor([T, 2, 1, 3], device=DEVICE)
    xt, count, *_ = check(x0, level, 1, 0, 1, torch.arange(4, device=DEVICE), never_mask)
    assert not (xt == 1)[never_mask].any()
    assert torch.equal((xt == 1)[0], ~never_mask[0]) and count[3] == 0
    assert count[1:3].tolist() == [2, 1]


def test_any_strides_and_integer_types():
    x0 = torch.randint(70, (4, 80), device=DEVICE).to(torch.int32)[:, 7:50]
    ids = torch.arange(9, device=DEVICE)[1::2]
    level = torch.tensor([17], device=DEVICE).expand(4)
    xt = check(x0, level, 70, 3, 4, ids)[0]
    assert xt.dtype == torch.int32
    assert len({tuple(row) for row in (xt == 70).tolist()}) == 4, "samples have equal masks"


def test_bernoulli_masks_are_those_of_pytorch():
    x0 = torch.zeros(2, 40, dtype=torch.int64, device=DEVICE)
    args = (x0, torch.tensor([0.3, 0.9], device=DEVICE), 1, 3, 4, torch.arange(2, device=DEVICE))
    launch.LAUNCHES.clear()
    for got, wanted in zip(mask_tokens(*args), mask_tokens_ref(*args), strict=True):
        assert torch.equal(got, wanted)
    assert not launch.LAUNCHES


def test_large_seeds_and_steps_as_tensors():
    x0 = torch.zeros(2, 40, dtype=torch.int64, device=DEVICE)
    ids = torch.tensor([2**31, 2**32 - 1], device=DEVICE)
    level = torch.tensor([13, 20], device=DEVICE)
    seed = torch.tensor(2**32 - 1, device=DEVICE)
    step = torch.tensor(2**31 + 5, device=DEVICE)
    by_tensors = check(x0, level, 1, seed, step, ids)
    by_numbers = check(x0, level, 1, 2**32 - 1, 2**31 + 5, ids)
    assert torch.equal(by_tensors[0], by_numbers[0])


@pytest.mark.slow  # in the interpreter
def test_many_rows_are_listed_in_order():
    """Each program reads the counts of all rows, 256 at a time: here twice."""
    B = 260
    level = torch.randint(0, 4, (B,), device=DEVICE)
    x0 = torch.zeros(B, 3, dtype=torch.int64, device=DEVICE)
    check(x0, level, 1, 0, 0, torch.arange(B, device=DEVICE))


def test_the_longest_row():
    x0 = torch.zeros(1, 8192, dtype=torch.int32, device=DEVICE)
    level = torch.tensor([4000], device=DEVICE)
    assert check(x0, level, 1, 0, 0, torch.arange(1, device=DEVICE))[3] == 4000
    with pytest.raises(ValueError, match="8192"):
        mask_tokens(torch.zeros(1, 8193, dtype=torch.int32, device=DEVICE), level, 1, 0, 0, level)


def arguments():
    x0 = torch.randint(9, (2, 20), device=DEVICE)
    level = torch.tensor([3, 9], device=DEVICE)
    seed, step = (torch.tensor(number, device=DEVICE) for number in (1, 2))
    never_mask = x0 == 3
    return x0, level, 9, seed, step, torch.arange(2, device=DEVICE), never_mask


UTILS = ["test_schema", "test_faketensor"]  # quick
ALL_UTILS = [*UTILS, "test_aot_dispatch_dynamic"]


@pytest.mark.parametrize("utils", [UTILS, pytest.param(ALL_UTILS, marks=pytest.mark.slow)])
def test_the_operator_is_well_formed(utils):
    torch.library.opcheck(torch.ops.mdlm.mask_tokens, arguments(), test_utils=utils)


def test_compiles_as_one_graph():
    args = arguments()
    compiled = torch.compile(mask_tokens, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(*args), mask_tokens_ref(*args), strict=True):
        assert torch.equal(got, wanted)


def test_no_rows_have_no_masks():
    x0 = torch.zeros((0, 9), dtype=torch.int64, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    xt, count, rows, n_rows = mask_tokens(x0, none, 65, 0, 0, none)
    assert xt.shape == (0, 9) and len(count) == len(rows) == 0 and int(n_rows) == 0
