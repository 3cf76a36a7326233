"""The masking kernel against its reference, bit for bit: on a GPU or (TRITON_INTERPRET=1) interpreted."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from kernels import _triton, mask_tokens, mask_tokens_ref
from kernels._triton import LAUNCHES

pytestmark = pytest.mark.skipif(
    not _triton.ENABLED or not (torch.cuda.is_available() or _triton.INTERPRET),
    reason="needs a GPU or TRITON_INTERPRET=1",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def both(x0, level, mask_id, seed, step, ids):
    """The kernel's and the reference's answer; the kernel must have run."""
    before = LAUNCHES.get("mask_kernel", 0)
    got = mask_tokens(x0, level, mask_id, seed, step, ids)
    assert LAUNCHES["mask_kernel"] - before == (2 if level.is_floating_point() else 1)
    return got, mask_tokens_ref(x0, level, mask_id, seed, step, ids)


def same(got, wanted):
    return all(torch.equal(g, w.to(g.dtype)) and g.shape == w.shape for g, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize("T", [1, 2, 63, 256, 257, 1111])
@pytest.mark.parametrize("exact", [True, False])
def test_the_same_bits_as_the_reference(T, exact):
    B, g = 5, torch.Generator().manual_seed(T)
    x0 = torch.randint(70, (B, T), generator=g).to(DEVICE)
    if exact:
        level = torch.tensor([0, T, 1, T // 2, T + 3])  # more than T means all
    else:
        level = torch.tensor([0.0, 1.0, 0.5, 1e-3, 0.9])
    got, wanted = both(x0, level.to(DEVICE), 70, 3, 9, torch.arange(100, 100 + B, device=DEVICE))
    assert same(got, wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_integer_types_and_strided_input(dtype):
    x0 = torch.randint(70, (3, 80), device=DEVICE).to(dtype)[:, 7:50]
    got, wanted = both(x0, torch.tensor([5, 43, 20], device=DEVICE), 70, 1, 2, torch.arange(3, device=DEVICE))
    assert same(got, wanted) and got[0].dtype == dtype


@pytest.mark.parametrize("exact", [True, False])
def test_levels_and_samples_of_any_stride(exact):
    x0, ids = torch.zeros(4, 40, dtype=torch.int64, device=DEVICE), torch.arange(9, device=DEVICE)[1::2]
    level = torch.tensor([17 if exact else 0.4], device=DEVICE).expand(4)
    got, wanted = both(x0, level, 1, 3, 4, ids)
    assert same(got, wanted) and len({tuple(row) for row in got[0].tolist()}) == 4


def test_seed_and_step_may_be_tensors_and_large():
    x0, ids = (
        torch.zeros(2, 40, dtype=torch.int64, device=DEVICE),
        torch.tensor([2**31, 2**32 - 1], device=DEVICE),
    )
    level = torch.tensor([13, 20], device=DEVICE)
    seed, step = torch.tensor(2**32 - 1, device=DEVICE), torch.tensor(2**31 + 5, device=DEVICE)
    got, wanted = both(x0, level, 1, seed, step, ids)
    assert same(got, wanted)
    assert same(mask_tokens(x0, level, 1, 2**32 - 1, 2**31 + 5, ids), wanted)


def test_many_rows_are_listed_in_order(monkeypatch):
    B, T = 260, 3  # more rows than one chunk of 256 counts
    if DEVICE == "cpu":  # where a row takes 50 ms: as many chunks, of 16
        masking = importlib.import_module("kernels.masking")
        B, configured = 20, masking._config
        monkeypatch.setattr(masking, "_config", lambda T: configured(T) | dict(CHUNK=16))
    level = torch.randint(0, 4, (B,), device=DEVICE)
    got, wanted = both(
        torch.zeros(B, T, dtype=torch.int64, device=DEVICE), level, 1, 0, 0, torch.arange(B, device=DEVICE)
    )
    assert same(got, wanted)


def test_the_longest_row():
    level = torch.tensor([4000], device=DEVICE)
    got, wanted = both(
        torch.zeros(1, 8192, dtype=torch.int32, device=DEVICE), level, 1, 0, 0, torch.arange(1, device=DEVICE)
    )
    assert same(got, wanted) and int(got[3]) == 4000


def test_the_op_is_well_formed():
    x0, ids = torch.randint(9, (2, 20), device=DEVICE), torch.arange(2, device=DEVICE)
    seed, step = (torch.tensor(v, device=DEVICE) for v in (1, 2))
    for level in (torch.tensor([3, 9], device=DEVICE), torch.tensor([0.3, 0.9], device=DEVICE)):
        torch.library.opcheck(torch.ops.mdlm.mask_tokens, (x0, level, 9, seed, step, ids))


def test_it_compiles_without_a_graph_break():
    x0, ids, level = (
        torch.randint(9, (2, 20), device=DEVICE),
        torch.arange(2, device=DEVICE),
        torch.tensor([3, 9], device=DEVICE),
    )
    seed, step = (torch.tensor(v, device=DEVICE) for v in (1, 2))
    compiled = torch.compile(
        lambda x: mask_tokens(x, level, 9, seed, step, ids), fullgraph=True, backend="aot_eager"
    )
    assert same(compiled(x0), mask_tokens_ref(x0, level, 9, seed, step, ids))
