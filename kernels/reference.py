"""The operations in plain PyTorch: for machines without a GPU, and to test the kernels against."""

import torch
import torch.nn.functional as F

MAX_T = 8192  # positions share a 64-bit sort key with their random word: 13 bits beside 32


def philox_words(seed, step, sample_ids, T, first=0):
    """Random words of T positions from `first` on, by Philox-4x32-10 (Salmon et al., SC'11).

    seed, step  int or int64 tensor, 0-dim or (n, 1, 1); their low 32 bits are the key
    sample_ids  (B,) integer; (sample, position // 4, 0, 0) is the counter, which gives four words

    Returns (B, T) int64 in [0, 2^32), or (n, B, T).
    """
    low = 0xFFFFFFFF
    c0 = (sample_ids.long() & low)[:, None]
    c1 = torch.arange(first // 4, (first + T + 3) // 4, device=sample_ids.device)[None, :]
    c0, c1 = torch.broadcast_tensors(c0, c1)
    c2 = torch.zeros_like(c0)
    c3 = c2
    k0 = seed & low
    k1 = step & low
    for _ in range(10):
        # A 64-bit product wraps as a signed number, but its bits are right: mask after every shift.
        p0 = c0 * 0xD2511F53
        p2 = c2 * 0xCD9E8D57
        c0 = (p2 >> 32) & low ^ c1 ^ k0
        c1 = p2 & low
        c2 = (p0 >> 32) & low ^ c3 ^ k1
        c3 = p0 & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    return torch.stack((c0, c1, c2, c3), -1).flatten(-2)[..., first % 4 :][..., :T]


def mask_tokens_ref(x0, t_or_count, mask_id, seed, step, sample_ids, never_mask=None):
    """Mask random positions of x0.

    x0          (B, T) int32 or int64, T <= 8192
    t_or_count  (B,) floating: mask each position at this rate (Bernoulli);
                (B,) integer: mask exactly this number of positions
    mask_id     the id of [MASK]
    seed, step  int or 0-dim int64 tensor: the key of the generator (their low 32 bits). A CUDA
                graph keeps ints as they were at its capture: pass tensors, and change their value
    sample_ids  (B,) integer, the samples' numbers in the global batch: the counter of the generator
    never_mask       (B, T) bool, positions that are never masked, or None

    Returns xt (B, T), x0 with [MASK] at the masked positions; count (B,) int64, masked positions
    per row; rows (B*T,) int64, the ascending indices of the masked positions in the flattened
    batch, padded with -1; n_rows, 0-dim int64, the number of masked positions. Raises ValueError
    for T > 8192. Nothing synchronises with the host.
    """
    B, T = x0.shape
    if T > MAX_T:
        raise ValueError(f"mask_tokens takes at most {MAX_T} positions a row, got {T}")
    words = philox_words(seed, step, sample_ids, T)
    if never_mask is not None:
        words = words.masked_fill(never_mask, 1 << 32)  # above all words
    if t_or_count.is_floating_point():
        masked = words < (t_or_count.double() * 2**32).long()[:, None]
    else:
        key = words * MAX_T + torch.arange(T, device=x0.device)  # ties fall to the smaller position
        wanted = possible_counts(t_or_count, never_mask).long()[:, None]
        bound = key.sort(dim=1).values.gather(1, (wanted - 1).clamp(0, T - 1))
        masked = (key <= bound) & (wanted > 0)
    xt = torch.where(masked, mask_id, x0)
    flat = masked.flatten()
    rank = flat.cumsum(0)  # the k-th masked one goes to rows[k - 1], others to a slot cut off
    rows = torch.full((B * T + 1,), -1, dtype=torch.int64, device=x0.device)
    slot = torch.where(flat, rank - 1, B * T)
    rows.scatter_(0, slot, torch.arange(B * T, device=x0.device))
    return xt, masked.sum(1), rows[:-1], rank[-1]


def possible_counts(count, never_mask):
    """Counts (B,), none above the number of positions that are not never_mask."""
    return count if never_mask is None else count.minimum((~never_mask).sum(1))


def linear_cross_entropy_ref(h, W, targets, weight):
    """Head and cross-entropy: the sum over rows i of weight_i * CE(W h_i, targets_i).

    h        (M, C) features           W       (V, C) head
    targets  (M,) integer              weight  (M,) float32

    Returns a float32 scalar; gradients flow to h and W. A row of weight 0 counts for nothing.
    """
    ce = F.cross_entropy(F.linear(h, W).float(), targets.long(), reduction="none")
    return (ce * weight).sum()


def rotary_tables(T, D):
    """cos, sin (T, D/2) of the angles of T positions."""
    angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Rotary positions (Su et al., 2104.09864): x (B, T, n, H, D); cos, sin (T, D/2)."""
    x1, x2 = x.chunk(2, -1)
    cos, sin = (table[:, None, None].to(x.dtype) for table in (cos, sin))
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def prepare(qkv, cos, sin, qk_norm):
    """q, k, v, each (B, T, H, D) in the dtype of qkv; q and k normalised and rotated."""
    qk = qkv[:, :, :2]  # together: their backward is then one kernel on a CPU
    v = qkv[:, :, 2]
    if qk_norm:
        qk = F.rms_norm(qk, qk.shape[-1:])
    if cos is not None:
        qk = rotate(qk, cos, sin)
    return *qk.to(qkv.dtype).unbind(2), v


def document_spans(ends):
    """Which positions see each other in windows of several documents: those of the same one.

    ends (B, T) bool, the last position of each document -> (B, 2, T) int32: where the document of
    each position starts, and where it ends, exclusive.
    """
    T = ends.shape[1]
    after = torch.arange(1, T + 1, device=ends.device)
    start = F.pad(after * ends, (1, -1)).cummax(1).values
    end = torch.where(ends, after, T).flip(1).cummin(1).values.flip(1)
    return torch.stack((start, end), 1).int()


def block_spans(T, S, device):
    """Which positions see each other in rows of 2T, a masked text and then the text itself, of
    blocks of S tokens: masked text sees its own block and the text of earlier ones; text sees the
    text of its own block and earlier ones (Arriola et al., 2503.09573).

    Returns (1, 8, 2T) int32: the starts and ends, exclusive, of the two ranges that each position
    sees, and of the two that see it.
    """
    start = torch.arange(T, device=device) // S * S
    end = (start + S).clamp(max=T)
    none = (torch.full_like(start, 2 * T), torch.zeros_like(start))
    half = torch.full_like(start, T)
    masked = torch.stack((start, end, half, T + start, start, end, *none))
    text = torch.stack((half, T + end, *none, end, half, T + start, 2 * half))
    return torch.cat((masked, text), 1)[None].int()


def is_visible(spans, at):
    """Whether positions see those `at`, bool; spans (B, 2, T), or (B, 8, T) of block_spans, `at`
    broadcast with (B, T, 1)."""
    ranges = spans[:, :4, :, None].split(2, 1)  # (B, 2, T, 1) each
    visible = [(span[:, 0] <= at) & (at < span[:, 1]) for span in ranges]
    return visible[0] | visible[-1]


def masked_share(masked, text, spans):
    """(B, T) bool each -> the share of text that is masked: (B, 1, 1), or by document (B, T, 1)."""
    if spans is None:
        return masked.float().mean(1)[:, None, None]
    start, end = spans.long().unbind(1)
    sums = [F.pad(x.cumsum(1), (1, 0)) for x in (masked, text)]
    masked, text = (x.gather(1, end) - x.gather(1, start) for x in sums)
    return (masked / text.clamp(min=1))[..., None]


def neighbours(x, left, k, spans):
    """x (B, T, C) -> k tensors (B, T, C): what is `left` positions before, ..., k - 1 - left after;
    0 where there is nothing, or another document. Of block_spans masked text has the text of
    earlier blocks on its left."""
    T = x.shape[1]
    padded = F.pad(x, (0, 0, left, k - 1 - left))
    found = [padded[:, i : i + T] for i in range(k)]
    if spans is not None:
        at = torch.arange(T, device=x.device)[:, None] - left
        found = [z * is_visible(spans[:, :2], at + i) for i, z in enumerate(found)]
        if spans.shape[1] > 2:
            half = T // 2
            text = neighbours(x.roll(half, 1), left, left, None)  # beside the masked text
            for i, z in enumerate(text):
                found[i] = found[i] + z * is_visible(spans[:, 2:4], at + i + half)
    return found


def attention_ref(qkv, cos=None, sin=None, qk_norm=False, causal=False, spans=None):
    """Attention over all positions, those of the same document, or, if causal, the earlier ones.

    qkv       (B, T, 3, H, D), the packed projections, any strides
    cos, sin  (T, D/2) rotary tables, or None; with the kernels they get no gradient
    qk_norm   RMS-normalise q and k over D
    spans     int32, of document_spans or block_spans, or None; not for causal attention

    Returns (B, T, H, D) in the dtype of qkv.
    """
    T, D = qkv.shape[1], qkv.shape[4]
    q, k, v = (z.transpose(1, 2) for z in prepare(qkv, cos, sin, qk_norm))  # (B, H, T, D)
    visible = None
    if spans is not None:
        visible = is_visible(spans, torch.arange(T, device=q.device))[:, None]  # (B, 1, T, T)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and T <= 512:
        # Here the backward of SDPA is 2 to 9 times slower than two products (results/cpu.md).
        scores = (q @ k.transpose(-1, -2)) * D**-0.5  # (B, H, T, T)
        if causal:
            scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, visible, is_causal=causal).transpose(1, 2)
