"""Random masking: the forward process of a masked diffusion model.

A position is masked iff its 32-bit random word is small. The word of (seed, step, sample, position)
comes from Philox-4x32-10 (Salmon et al., SC'11), a counter-based generator, so a mask depends on
nothing else: not on the batch, the rank, the device or the kernel that draws it.

    key     = seed_lo | step << 32
    counter = (sample, position // 4, 0, 0)   -> four words; a position's is number position % 4

A position is masked iff (word, position) is among the n smallest of its row: exactly n are. Only
integers are compared, so every implementation gives the same bits. Bernoulli masks, which are there
to compare with, run in PyTorch.
"""

from __future__ import annotations

import torch

from .launch import jit, launch, register, runs_on, tl
from .reference import MAX_T, mask_tokens_ref, possible_counts


@jit
def _smallest(number, level, LOG: tl.constexpr, BITS: tl.constexpr):
    """The level-th smallest of different numbers (BLOCK,) of 32 + LOG bits, by digits."""
    # A digit is the number of candidates for it with fewer than `level` numbers below them.
    DIGITS: tl.constexpr = (32 + LOG + BITS - 1) // BITS
    candidate = tl.arange(1, (1 << BITS) + 1).to(tl.int64)
    found = level * 0
    for i in tl.static_range(DIGITS):
        shift = (DIGITS - 1 - i) * BITS
        if BITS == 1:  # long rows: one candidate, and no second axis that would take registers
            bound = found + (tl.full((), 1, tl.int64) << shift)
            below = tl.sum((number < bound).to(tl.int32), 0)
            found = tl.where(below < level, bound, found)
        else:
            bound = found + (candidate << shift)
            below = tl.sum((number[:, None] < bound[None, :]).to(tl.int32), 0)
            found += tl.sum((below < level).to(tl.int64), 0) << shift
    return found


@jit
def _words(seed_ptr, step_ptr, sample, BLOCK: tl.constexpr):
    """Random words (BLOCK,) int64 in [0, 2^32) of the positions of a sample."""
    quad = tl.arange(0, BLOCK // 4)
    zero = quad * 0
    seed = tl.load(seed_ptr).to(tl.int64) & 0xFFFFFFFF
    key = seed | (tl.load(step_ptr).to(tl.int64) << 32)
    w0, w1, w2, w3 = tl.philox(key, zero + sample.to(tl.int32), quad, zero, zero)
    # join puts its arguments side by side in a new last axis: these three interleave the words.
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))
    return word.to(tl.int64) & 0xFFFFFFFF


@jit
def _counts_around(row, level_ptr, B, T):
    """The number of masked positions in the rows before this one, and in all B rows, int64."""
    before = tl.zeros((), tl.int64)
    total = tl.zeros((), tl.int64)
    for start in range(0, B, 256):
        other = start + tl.arange(0, 256)
        n = tl.load(level_ptr + other, mask=other < B, other=0).to(tl.int64)
        n = tl.minimum(tl.maximum(n, 0), T)
        total += tl.sum(n, 0)
        before += tl.sum(tl.where(other < row, n, 0), 0)
    return before, total


@jit
def mask_kernel(
    x0_ptr,
    xt_ptr,
    count_ptr,
    rows_ptr,
    n_rows_ptr,
    level_ptr,
    sample_ptr,
    seed_ptr,
    step_ptr,
    never_mask_ptr,
    mask_id,
    B,
    T,
    BLOCK: tl.constexpr,
    LOG: tl.constexpr,
    BITS: tl.constexpr,
):
    """One program a sequence, which reads the counts of all, to know where its own list begins."""
    row = tl.program_id(0)
    position = tl.arange(0, BLOCK)
    inside = position < T
    base = row.to(tl.int64) * T
    free = inside
    if never_mask_ptr is not None:
        free = inside & (tl.load(never_mask_ptr + base + position, mask=inside, other=1) == 0)
    # The smallest words are masked; where two are equal, the smaller position.
    word = _words(seed_ptr, step_ptr, tl.load(sample_ptr + row), BLOCK)
    number = tl.where(free, (word << LOG) | position, 1 << (32 + LOG))
    level = tl.load(level_ptr + row).to(tl.int64)
    bound = _smallest(number, tl.minimum(level, T), LOG, BITS)
    masked = free & (number <= bound) & (level > 0)
    x0 = tl.load(x0_ptr + base + position, mask=inside, other=0)
    tl.store(xt_ptr + base + position, tl.where(masked, mask_id, x0), mask=inside)
    tl.store(count_ptr + row, tl.sum(masked.to(tl.int64), 0))
    before, total = _counts_around(row, level_ptr, B, T)
    rank = tl.cumsum(masked.to(tl.int32), 0).to(tl.int64)  # masked ones up to here
    # Unmasked positions fill the tail after all lists with -1, each a place of its own.
    place = tl.where(masked, before + rank - 1, total + (base - before) + position - rank)
    tl.store(rows_ptr + place, tl.where(masked, base + position, -1), mask=inside)
    if row == 0:
        tl.store(n_rows_ptr, total)


def config(T, documents=False):
    """Block, warps, bits of a digit for rows of T: 32 comparisons a thread do not spill."""
    log = max(4, (T - 1).bit_length())
    warps = 16 if documents and log > 12 else 8
    if log <= 9:
        warps = 1 if log <= 6 else 4
    bits = max(1, min(4, 9 + warps.bit_length() - log - documents))
    return dict(BLOCK=1 << log, LOG=log, BITS=bits, num_warps=warps)


def _forward(x0, level, mask_id, seed, step, sample_ids, never_mask):
    B, T = x0.shape
    x0 = x0.contiguous()
    xt, count, rows, n_rows = _fake(x0, level, mask_id, seed, step, sample_ids, never_mask)
    level = possible_counts(level, never_mask)
    settings = config(T, never_mask is not None)
    never_mask = None if never_mask is None else never_mask.contiguous()
    args = (x0, xt, count, rows, n_rows, level.contiguous(), sample_ids.contiguous(), seed, step)
    launch(mask_kernel, (B,), *args, never_mask, mask_id, B, T, **settings)
    return xt, count, rows, n_rows


def _fake(x0, level, mask_id, seed, step, sample_ids, never_mask):
    """xt, count, rows, n_rows, not filled in."""
    B, T = x0.shape
    xt = x0.new_empty((B, T))
    count, rows, n_rows = (x0.new_empty(size, dtype=torch.int64) for size in (B, B * T, ()))
    return xt, count, rows, n_rows


SCHEMA = "(Tensor x0, Tensor level, SymInt mask_id, Tensor seed, Tensor step, Tensor sample_ids,"
SCHEMA += " Tensor? never_mask) -> (Tensor, Tensor, Tensor, Tensor)"
_mask_tokens = register("mask_tokens", SCHEMA, _forward, _fake)


def _scalar(number, device):
    """A 0-dim int64 tensor. A Python number is filled in on the device: no copy to wait for."""
    if torch.is_tensor(number):
        return torch.as_tensor(number, dtype=torch.int64, device=device)
    return torch.full((), number, dtype=torch.int64, device=device)


def mask_tokens(x0, t_or_count, mask_id, seed, step, sample_ids, never_mask=None):
    if not runs_on(x0) or t_or_count.is_floating_point() or x0.shape[1] > MAX_T:
        return mask_tokens_ref(x0, t_or_count, mask_id, seed, step, sample_ids, never_mask)
    seed = _scalar(seed, x0.device)
    step = _scalar(step, x0.device)
    return _mask_tokens(x0, t_or_count, mask_id, seed, step, sample_ids, never_mask)


mask_tokens.__doc__ = mask_tokens_ref.__doc__
