"""Random masking: the forward process of a masked diffusion model.

A position is masked iff its 32-bit random word is small. The word of (seed, step, sample, position) comes
from Philox-4x32-10 (Salmon et al., SC'11), a counter-based generator, so a mask depends on nothing else: not
on the batch, the rank, the device or the kernel that draws it.

    key     = seed_lo | step << 32
    counter = (sample, position // 4, 0, 0)          -> four words, the position's is number position % 4

    Bernoulli at rate t:  masked iff word < floor(t * 2^32)
    exact count l:        masked iff (word, position) is among the l smallest of its row

Only integers are compared, so every implementation gives the same bits.
"""

from __future__ import annotations

import torch

from kernels._triton import ENABLED, jit, launch, runs_on, tl

MAX_T = 8192  # positions share a 64-bit sort key with their word: 32 bits of word, 13 of position


def philox_words(seed, step, sample_ids, T):
    """Random words (B, T), int64 in [0, 2^32), of samples (B,) at a step; seed, step: int or 0-dim tensor."""
    low = 0xFFFFFFFF
    c0 = (sample_ids.long() & low)[:, None]
    c1 = torch.arange((T + 3) // 4, device=sample_ids.device)[None, :]
    c0, c1 = torch.broadcast_tensors(c0, c1)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seed & low, step & low
    for _ in range(10):
        # A 64-bit product wraps as a signed number, but its bits are right: mask after every shift.
        p0, p2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p2 >> 32) & low ^ c1 ^ k0, p2 & low, (p0 >> 32) & low ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack((c0, c1, c2, c3), -1).flatten(1)[:, :T]


def mask_tokens_ref(x0, t_or_count, mask_id, seed, step, sample_ids):
    """Mask random positions of x0.

    x0          (B, T) int32 or int64, T <= 8192
    t_or_count  (B,) floating: Bernoulli masking at these rates; (B,) integer: exactly so many positions
    mask_id     the id of [MASK]
    seed, step  int or 0-dim int64 tensor: the key of the generator (their low 32 bits). A CUDA graph keeps
                ints as they were at its capture: give tensors there, and change what they hold
    sample_ids  (B,) integer, the samples' numbers in the global batch: the counter of the generator

    Returns xt (B, T), x0 with [MASK] at the masked positions; count (B,) int64, masked positions a row; rows
    (B*T,) int64, the ascending indices of the masked positions in the flattened batch, padded with -1;
    n_rows, 0-dim int64, how many of them. Raises ValueError for T > 8192. Nothing synchronises with the host.
    """
    B, T = x0.shape
    if T > MAX_T:
        raise ValueError(f"mask_tokens takes at most {MAX_T} positions a row, got {T}")
    words = philox_words(seed, step, sample_ids, T)
    if t_or_count.is_floating_point():
        masked = words < (t_or_count.double() * 2**32).long()[:, None]
    else:
        key = words * MAX_T + torch.arange(T, device=x0.device)  # ties fall to the smaller position
        wanted = t_or_count.long()[:, None]
        bound = key.sort(dim=1).values.gather(1, (wanted - 1).clamp(0, T - 1))
        masked = (key <= bound) & (wanted > 0)
    xt = torch.where(masked, mask_id, x0)
    flat = masked.flatten()
    place = flat.cumsum(0)  # the k-th masked position goes to rows[k - 1], others to a slot that is cut off
    rows = torch.full((B * T + 1,), -1, dtype=torch.int64, device=x0.device)
    rows.scatter_(0, torch.where(flat, place - 1, B * T), torch.arange(B * T, device=x0.device))
    return xt, masked.sum(1), rows[:-1], place[-1]


# ------------------------------------------------------------------------------------------------------------
# Triton


@jit
def _mask_of_row(row, level_ptr, sample_ptr, seed_ptr, step_ptr, T,
                 EXACT: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr, BITS: tl.constexpr):
    """Which positions of a row are masked, (BLOCK,) int1, where BLOCK = 2^LOG >= T."""
    quad = tl.arange(0, BLOCK // 4)
    zero = quad * 0
    key = (tl.load(seed_ptr).to(tl.int64) & 0xFFFFFFFF) | (tl.load(step_ptr).to(tl.int64) << 32)
    sample = zero + tl.load(sample_ptr + row).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(key, sample, quad, zero, zero)
    # join puts its arguments side by side in a new last axis: these three interleave w0, w1, w2, w3.
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,)).to(tl.int64) & 0xFFFFFFFF
    position = tl.arange(0, BLOCK)
    inside = position < T
    level = tl.load(level_ptr + row).to(tl.int64)
    if EXACT:
        # The level-th smallest of the numbers (word, position), all different, found digit by digit from the
        # top: a digit is the number of candidates with fewer than `level` numbers below them. No sort.
        number = tl.where(inside, (word << LOG) | position, 1 << (32 + LOG))
        candidate = tl.arange(1, (1 << BITS) + 1).to(tl.int64)
        level = tl.minimum(level, T)
        found = level * 0
        for i in tl.static_range((32 + LOG + BITS - 1) // BITS):
            shift = ((32 + LOG + BITS - 1) // BITS - 1 - i) * BITS
            if BITS == 1:  # long rows: one candidate, and no second axis that would take registers
                next = found + (tl.full((), 1, tl.int64) << shift)
                below = tl.sum((number < next).to(tl.int32), 0)
                found = tl.where(below < level, next, found)
            else:
                bound = found + (candidate << shift)
                below = tl.sum((number[:, None] < bound[None, :]).to(tl.int32), 0)
                found += tl.sum((below < level).to(tl.int64), 0) << shift
        masked = inside & (number <= found) & (level > 0)
    else:
        masked = inside & (word < level)
    return masked


@jit
def mask_kernel(x0_ptr, xt_ptr, count_ptr, rows_ptr, n_rows_ptr, level_ptr, sample_ptr, seed_ptr, step_ptr,
                mask_id, B, T, stride,
                EXACT: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr,
                BLOCK: tl.constexpr, LOG: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr):
    """One program a sequence. MASK: write xt and count. ROWS: list its masked positions.

    ROWS needs the counts of all sequences, to know where its own list begins. Exact counts are given, so one
    launch does both; Bernoulli counts are known after a first launch.
    """
    row = tl.program_id(0)
    position = tl.arange(0, BLOCK)
    masked = _mask_of_row(row, level_ptr, sample_ptr, seed_ptr, step_ptr, T, EXACT, BLOCK, LOG, BITS)
    inside = position < T
    base = row.to(tl.int64) * T
    if MASK:
        x0 = tl.load(x0_ptr + row.to(tl.int64) * stride + position, mask=inside, other=0)
        tl.store(xt_ptr + base + position, tl.where(masked, mask_id, x0), mask=inside)
        tl.store(count_ptr + row, tl.sum(masked.to(tl.int64), 0))
    if ROWS:
        before = base * 0
        total = base * 0
        for start in range(0, B, CHUNK):
            other = start + tl.arange(0, CHUNK)
            if EXACT:
                n = tl.load(level_ptr + other, mask=other < B, other=0).to(tl.int64)
                n = tl.minimum(tl.maximum(n, 0), T)
            else:
                n = tl.load(count_ptr + other, mask=other < B, other=0)
            total += tl.sum(n, 0)
            before += tl.sum(tl.where(other < row, n, 0), 0)
        rank = tl.cumsum(masked.to(tl.int32), 0).to(tl.int64)  # masked ones up to here
        # Unmasked positions fill the tail behind all lists with -1, each a place of its own.
        place = tl.where(masked, before + rank - 1, total + (base - before) + position - rank)
        tl.store(rows_ptr + place, tl.where(masked, base + position, -1), mask=inside)
        if row == 0:
            tl.store(n_rows_ptr, total)


def _config(T):
    """Block, warps and bits of a digit for rows of T positions: 32 comparisons a thread do not spill."""
    log = max(4, (T - 1).bit_length())
    warps = 1 if log <= 6 else 4 if log <= 9 else 8
    bits = max(1, min(4, 10 + warps.bit_length() - 1 - log))
    return dict(BLOCK=1 << log, LOG=log, BITS=bits, CHUNK=256, num_warps=warps)


if ENABLED:
    def _launch(x0, level, mask_id, seed, step, sample_ids):
        B, T = x0.shape
        if x0.stride(1) != 1:
            x0 = x0.contiguous()
        xt = torch.empty((B, T), dtype=x0.dtype, device=x0.device)
        count = torch.empty(B, dtype=torch.int64, device=x0.device)
        rows = torch.empty(B * T, dtype=torch.int64, device=x0.device)
        n_rows = torch.empty((), dtype=torch.int64, device=x0.device)
        exact = not level.is_floating_point()
        if not exact:
            level = (level.double() * 2**32).long()
        level, sample_ids = level.contiguous(), sample_ids.contiguous()
        args = (x0, xt, count, rows, n_rows, level, sample_ids, seed, step, mask_id, B, T, x0.stride(0))
        for stage in ((dict(MASK=True, ROWS=True),) if exact else
                      (dict(MASK=True, ROWS=False), dict(MASK=False, ROWS=True))):
            launch(mask_kernel, (B,), *args, EXACT=exact, **stage, **_config(T))
        return xt, count, rows, n_rows

    @torch.library.custom_op("mdlm::mask_tokens", mutates_args=(), device_types=("cuda", "cpu"))
    def _mask_tokens(x0: torch.Tensor, level: torch.Tensor, mask_id: int, seed: torch.Tensor,
                     step: torch.Tensor, sample_ids: torch.Tensor
                     ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return _launch(x0, level, mask_id, seed, step, sample_ids)

    @_mask_tokens.register_fake
    def _(x0, level, mask_id, seed, step, sample_ids):
        B, T = x0.shape
        long = dict(dtype=torch.int64)
        return (x0.new_empty((B, T)), x0.new_empty(B, **long), x0.new_empty(B * T, **long),
                x0.new_empty((), **long))


def mask_tokens(x0, t_or_count, mask_id, seed, step, sample_ids):
    if not runs_on(x0):
        return mask_tokens_ref(x0, t_or_count, mask_id, seed, step, sample_ids)
    if x0.shape[1] > MAX_T:
        raise ValueError(f"mask_tokens takes at most {MAX_T} positions a row, got {x0.shape[1]}")
    long = dict(dtype=torch.int64, device=x0.device)  # a number is filled in there: no copy to wait for
    seed, step = (torch.as_tensor(s, **long) if torch.is_tensor(s) else torch.full((), s, **long)
                  for s in (seed, step))
    return _mask_tokens(x0, t_or_count, mask_id, seed, step, sample_ids)


mask_tokens.__doc__ = mask_tokens_ref.__doc__


def aot_configs():
    """(name, kernel, signature, constexprs, options) of what is in use, to compile without a GPU."""
    for T, dtypes in ((64, ("i32", "i64")), (256, ("i64",)), (1024, ("i64",)), (8192, ("i64",))):
        for dtype in dtypes:
            for exact, stage in ((True, (True, True)), (False, (True, False)), (False, (False, True))):
                config = _config(T)
                options = dict(num_warps=config.pop("num_warps"))
                pointers = dict.fromkeys(("count_ptr", "rows_ptr", "n_rows_ptr", "level_ptr", "sample_ptr",
                                          "seed_ptr", "step_ptr"), "*i64")
                signature = (dict(x0_ptr=f"*{dtype}", xt_ptr=f"*{dtype}") | pointers
                             | dict.fromkeys(("mask_id", "B", "T", "stride"), "i32"))
                constants = dict(EXACT=exact, MASK=stage[0], ROWS=stage[1]) | config
                kind = "exact" if exact else "bernoulli" + (" rows" if stage[1] else " mask")
                yield f"masking {kind} T={T} {dtype}", mask_kernel, signature, constants, options
