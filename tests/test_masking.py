"""Random masking: the right counts, the right randomness, the same everywhere."""

import math

import pytest
import torch

from nanomdlm.kernels.operations import mask_tokens, mask_tokens_ref
from nanomdlm.kernels.reference import philox_words


def test_the_words_are_philox_4x32_10():
    # Known answer of the Random123 library for counter 0 and key 0.
    words = philox_words(0, 0, torch.tensor([0]), 4)
    assert [f"{int(w):08x}" for w in words[0]] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


@pytest.mark.parametrize("T", [1, 63, 257])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_are_exact_and_rows_list_them(T, dtype):
    B = 7
    x0 = torch.randint(50, (B, T), dtype=dtype)
    count = torch.tensor([0, 1, T, T // 2, max(1, T - 1), T // 3, 1]).clamp(max=T)
    xt, n, rows, n_rows = mask_tokens(x0, count, 50, 3, 5, torch.arange(B))
    masked = xt == 50
    assert xt.dtype == dtype
    assert torch.equal(masked.sum(1), count) and torch.equal(n.long(), count)
    assert torch.equal(xt[~masked], x0[~masked])
    found = masked.flatten().nonzero().squeeze(1)
    assert int(n_rows) == len(found)
    assert torch.equal(rows[: len(found)].long(), found)
    assert (rows[len(found) :] == -1).all()


@pytest.mark.parametrize("t", [0.0, 1e-3, 0.15, 0.5, 0.9, 1.0])
def test_bernoulli_masks_at_the_given_rate(t):
    B, T = 200, 250
    x0 = torch.zeros(B, T, dtype=torch.int64)
    xt, n, _, _ = mask_tokens(x0, torch.full((B,), t), 1, 0, 0, torch.arange(B))
    total = int(n.sum())
    assert total == int((xt == 1).sum())
    assert abs(total - t * B * T) <= 4 * math.sqrt(B * T * t * (1 - t))


def test_masks_are_uncorrelated():
    """Over positions, samples, steps and seeds."""
    B, T = 256, 256
    x0 = torch.zeros(B, T, dtype=torch.int64)
    half = torch.full((B,), T // 2)

    def draw(seed, step):
        return 2.0 * mask_tokens(x0, half, 1, seed, step, torch.arange(B))[0].double() - 1

    m = draw(0, 0)
    limit = 4.5 / (B * T) ** 0.5 + 1 / T  # an exact count ties the positions of a row by -1/(T-1)
    for lag in (1, 2, 3, 4, 5, 64):
        assert abs((m[:, lag:] * m[:, :-lag]).mean()) < limit
    assert abs((m[1:] * m[:-1]).mean()) < limit
    for other in (draw(0, 1), draw(1, 0)):
        assert abs((m * other).mean()) < limit


def test_masks_depend_on_seed_step_sample_alone():
    x0 = torch.randint(9, (8, 33))
    count = torch.arange(8) * 4 + 1
    together = mask_tokens(x0, count, 9, 1, 2, torch.arange(8))[0]
    for i in (0, 1):  # as two ranks would
        part = mask_tokens(x0[i::2], count[i::2], 9, 1, 2, torch.arange(8)[i::2])[0]
        assert torch.equal(together[i::2], part)
    tensors = mask_tokens(x0, count, 9, torch.tensor(1), torch.tensor(2), torch.arange(8))[0]
    assert torch.equal(together, tensors)


def test_more_than_8192_positions_are_refused():
    x0 = torch.zeros(1, 8193, dtype=torch.int64)
    with pytest.raises(ValueError, match="8192"):
        mask_tokens_ref(x0, torch.tensor([1]), 1, 0, 0, torch.arange(1))
