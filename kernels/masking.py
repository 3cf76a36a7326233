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

import torch

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
    seed, step  int or 0-dim int64 tensor: the key of the generator (their low 32 bits)
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


mask_tokens = mask_tokens_ref
