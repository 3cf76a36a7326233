"""Random masking, the forward process of a masked diffusion model.

Every position gets a random 32-bit word, a function of only (seed, step, sample, position). The
words come from Philox-4x32-10 (Salmon et al., SC'11), a counter-based generator. So a mask does not
depend on the batch, the rank, the device or the implementation.

    key     = seed_lo | step << 32
    counter = (sample, position // 4, 0, 0)   -> four words; position p gets word number p % 4

To mask exactly n positions of a row, the n smallest pairs (word, position) are masked. Only
integers are compared, so every implementation returns the same bits. Bernoulli masks, which exist
for comparison, run in PyTorch.
"""

from __future__ import annotations

import torch

from .launch import jit, launch, register, runs_on, tl
from .reference import MAX_T, mask_tokens_ref, possible_counts


@jit
def _smallest(number, level, LOG: tl.constexpr, BITS: tl.constexpr):
    """Find the level-th smallest of distinct numbers (TILE,) of 32 + LOG bits, without sorting.

    The result is built from digits of BITS bits, the most significant first. The next digit is the
    largest d for which fewer than `level` numbers are below result + d * 2^shift. That is counted
    for all values of d at once.
    """
    DIGITS: tl.constexpr = (32 + LOG + BITS - 1) // BITS
    candidate = tl.arange(1, (1 << BITS) + 1).to(tl.int64)
    result = level * 0
    for i in tl.static_range(DIGITS):
        shift = (DIGITS - 1 - i) * BITS
        if BITS == 1:  # for long rows: a single candidate, as a second axis would need registers
            bound = result + (tl.full((), 1, tl.int64) << shift)
            below = tl.sum((number < bound).to(tl.int32), 0)
            result = tl.where(below < level, bound, result)
        else:
            bound = result + (candidate << shift)
            below = tl.sum((number[:, None] < bound[None, :]).to(tl.int32), 0)
            result += tl.sum((below < level).to(tl.int64), 0) << shift
    return result


@jit
def _words(seed_ptr, step_ptr, sample, TILE: tl.constexpr):
    """Return random words (TILE,) int64 in [0, 2^32) for the positions of a sample."""
    quad = tl.arange(0, TILE // 4)
    zero = quad * 0
    seed = tl.load(seed_ptr).to(tl.int64) & 0xFFFFFFFF
    key = seed | (tl.load(step_ptr).to(tl.int64) << 32)
    w0, w1, w2, w3 = tl.philox(key, zero + sample.to(tl.int32), quad, zero, zero)
    # tl.join stacks two tensors along a new last axis. These joins interleave the four words:
    # w0[0], w1[0], w2[0], w3[0], w0[1], ...
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE,))
    return word.to(tl.int64) & 0xFFFFFFFF


@jit
def _counts_around(row, level_ptr, B, T):
    """Return the number of masked positions in the rows before this one, and in all B, int64."""
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
    TILE: tl.constexpr,
    LOG: tl.constexpr,
    BITS: tl.constexpr,
):
    """Mask one sequence per program. Each program reads the counts of all sequences, to know where
    its own list of masked positions begins in `rows`."""
    row = tl.program_id(0)
    position = tl.arange(0, TILE)
    inside = position < T
    base = row.to(tl.int64) * T
    free = inside
    if never_mask_ptr is not None:
        free = inside & (tl.load(never_mask_ptr + base + position, mask=inside, other=1) == 0)
    # The smallest words are masked. Of two equal words, the one at the smaller position is smaller.
    # Positions that must not be masked get a number above all others.
    word = _words(seed_ptr, step_ptr, tl.load(sample_ptr + row), TILE)
    number = tl.where(free, (word << LOG) | position, 1 << (32 + LOG))
    level = tl.load(level_ptr + row).to(tl.int64)
    bound = _smallest(number, tl.minimum(level, T), LOG, BITS)
    masked = free & (number <= bound) & (level > 0)
    x0 = tl.load(x0_ptr + base + position, mask=inside, other=0)
    tl.store(xt_ptr + base + position, tl.where(masked, mask_id, x0), mask=inside)
    tl.store(count_ptr + row, tl.sum(masked.to(tl.int64), 0))
    before, total = _counts_around(row, level_ptr, B, T)
    rank = tl.cumsum(masked.to(tl.int32), 0).to(tl.int64)  # masked positions up to each one
    # `rows` begins with the lists of masked positions of all sequences. Each unmasked position
    # writes a -1 to its own place in the tail.
    place = tl.where(masked, before + rank - 1, total + (base - before) + position - rank)
    tl.store(rows_ptr + place, tl.where(masked, base + position, -1), mask=inside)
    if row == 0:
        tl.store(n_rows_ptr, total)


def row_config(T, documents=False):
    """Return TILE, LOG, BITS and num_warps of mask_kernel for rows of T positions.

    documents: whether there is a never_mask. BITS is chosen so that each thread makes at most 32
    comparisons at a time: then no registers spill.
    """
    log = max(4, (T - 1).bit_length())
    warps = 16 if documents and log > 12 else 8
    if log <= 9:
        warps = 1 if log <= 6 else 4
    bits = max(1, min(4, 9 + warps.bit_length() - log - documents))
    return dict(TILE=1 << log, LOG=log, BITS=bits, num_warps=warps)


def _forward(x0, level, mask_id, seed, step, sample_ids, never_mask):
    B, T = x0.shape
    x0 = x0.contiguous()
    xt, count, rows, n_rows = _fake(x0, level, mask_id, seed, step, sample_ids, never_mask)
    level = possible_counts(level, never_mask)
    settings = row_config(T, never_mask is not None)
    never_mask = None if never_mask is None else never_mask.contiguous()
    args = (x0, xt, count, rows, n_rows, level.contiguous(), sample_ids.contiguous(), seed, step)
    launch(mask_kernel, (B,), *args, never_mask, mask_id, B, T, **settings)
    if B == 0:  # no program has written it
        n_rows.zero_()
    return xt, count, rows, n_rows


def _fake(x0, level, mask_id, seed, step, sample_ids, never_mask):
    """Return uninitialized xt, count, rows and n_rows."""
    B, T = x0.shape
    xt = x0.new_empty((B, T))
    count, rows, n_rows = (x0.new_empty(size, dtype=torch.int64) for size in (B, B * T, ()))
    return xt, count, rows, n_rows


SCHEMA = "(Tensor x0, Tensor level, SymInt mask_id, Tensor seed, Tensor step, Tensor sample_ids,"
SCHEMA += " Tensor? never_mask) -> (Tensor, Tensor, Tensor, Tensor)"
_mask_tokens = register("mask_tokens", SCHEMA, _forward, _fake)


def _scalar(number, device):
    """Return a number as a 0-dim int64 tensor. torch.full avoids a copy from the host."""
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
