"""The operations in plain PyTorch, for machines without a GPU and as the reference in tests.

Some positions may not see each other: those of different documents, or of different blocks.
"Spans" say which positions each one attends to; document_spans and block_spans make them.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Positions share a sort key with their random word: 13 bits for a position and 32 for the word fit
# well into 64 bits.
MAX_T = 8192


# ---- Masking
def philox_words(seed, step, sample_ids, T, first=0):
    """Return random 32-bit words for T positions, by Philox-4x32-10 (Salmon et al., SC'11).

    seed, step  int or int64 tensor, 0-dim or (n, 1, 1); their low 32 bits are the key
    sample_ids  (B,) integer; each counter (sample, position // 4, 0, 0) gives four words
    first       the first of the T positions

    Returns (B, T) int64 in [0, 2^32); (n, B, T) if seed or step is (n, 1, 1).
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
        # The product of two 32-bit words overflows int64, but its bits are right. A right shift
        # copies the sign bit into the upper half, so mask after every shift.
        p0 = c0 * 0xD2511F53
        p2 = c2 * 0xCD9E8D57
        c0 = (p2 >> 32) & low ^ c1 ^ k0
        c1 = p2 & low
        c2 = (p0 >> 32) & low ^ c3 ^ k1
        c3 = p0 & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    return torch.stack((c0, c1, c2, c3), -1).flatten(-2)[..., first % 4 :][..., :T]


def mask_tokens_ref(
    x0: Tensor,
    t_or_count: Tensor,
    mask_id: int,
    seed: int | Tensor,
    step: int | Tensor,
    sample_ids: Tensor,
    never_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mask random positions of x0.

    x0          (B, T) int32 or int64, T <= 8192
    t_or_count  (B,) floating point: mask each position with this probability (Bernoulli);
                (B,) integer: mask exactly this number of positions
    mask_id     the id of [MASK]
    seed, step  int or 0-dim int64 tensor: the key of the generator (their low 32 bits). A CUDA
                graph keeps the values of ints from its capture: pass tensors and change them
    sample_ids  (B,) integer, numbers of the samples in the global batch: the generator's counter
    never_mask  (B, T) bool, positions that are never masked, or None

    Returns a tuple:
        xt      (B, T), x0 with [MASK] at the masked positions
        count   (B,) int64, the number of masked positions in each row
        rows    (B*T,) int64, the indices of masked positions in the flattened batch, ascending,
                padded with -1
        n_rows  0-dim int64, the number of masked positions

    Raises ValueError if T > 8192. Never synchronizes with the host.
    """
    B, T = x0.shape
    if T > MAX_T:
        raise ValueError(f"mask_tokens takes at most {MAX_T} positions per row, got {T}")
    words = philox_words(seed, step, sample_ids, T)
    if never_mask is not None:
        words = words.masked_fill(never_mask, 1 << 32)  # larger than every random word
    if t_or_count.is_floating_point():
        masked = words < (t_or_count.double() * 2**32).long()[:, None]
    else:
        # Of two equal words, the one at the smaller position counts as smaller.
        key = words * MAX_T + torch.arange(T, device=x0.device)
        wanted = possible_counts(t_or_count, never_mask).long()[:, None]
        bound = key.sort(dim=1).values.gather(1, (wanted - 1).clamp(0, T - 1))
        masked = (key <= bound) & (wanted > 0)
    xt = torch.where(masked, mask_id, x0)
    flat = masked.flatten()
    # The k-th masked position goes to rows[k - 1]. All others go to an extra slot at the end, which
    # is cut off. Unlike flat.nonzero(), this does not make the host wait.
    rank = flat.cumsum(0)
    rows = torch.full((B * T + 1,), -1, dtype=torch.int64, device=x0.device)
    slot = torch.where(flat, rank - 1, B * T)
    rows.scatter_(0, slot, torch.arange(B * T, device=x0.device))
    return xt, masked.sum(1), rows[:-1], rank[-1]


def possible_counts(count, never_mask):
    """Limit the counts (B,) to the number of positions in each row that may be masked."""
    return count if never_mask is None else count.minimum((~never_mask).sum(1))


# ---- Cross-entropy
def linear_cross_entropy_ref(h: Tensor, W: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Compute the head and the loss: the sum over rows i of weight_i * CE(W h_i, targets_i).

    h        (M, C) features
    W        (V, C) weights of the head
    targets  (M,) integer
    weight   (M,) float32; a row of weight 0 has no effect, whatever its target

    Returns a float32 scalar, differentiable with respect to h and W.
    """
    ce = F.cross_entropy(F.linear(h, W).float(), targets.long(), reduction="none")
    return (ce * weight).sum()


# ---- Rotary positions
def rotary_tables(T, D):
    """Return cos and sin (T, D/2) of the angles of T positions, for heads of D: float32.

    Always float32, because bfloat16 cannot distinguish position 257 from 256.
    """
    exponents = -torch.arange(0, D, 2, dtype=torch.float32) / D
    angles = torch.arange(T, dtype=torch.float32)[:, None] * 10000.0**exponents
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Apply rotary position embeddings (Su et al., 2104.09864).

    x: (B, T, n, H, D); cos, sin: (T, D/2) from rotary_tables. Returns the shape of x.
    """
    x1, x2 = x.chunk(2, -1)
    cos, sin = (table[:, None, None].to(x.dtype) for table in (cos, sin))
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def prepare(qkv, cos, sin, qk_norm):
    """Split qkv (B, T, 3, H, D) into q, k, v (B, T, H, D), and normalize and rotate q and k.

    The results have the dtype of qkv.
    """
    qk = qkv[:, :, :2]  # processed together: on a CPU, their backward is then one kernel
    v = qkv[:, :, 2]
    if qk_norm:
        qk = F.rms_norm(qk, qk.shape[-1:])
    if cos is not None:
        qk = rotate(qk, cos, sin)
    return *qk.to(qkv.dtype).unbind(2), v


# ---- Spans: which positions see each other
def document_spans(ends):
    """Return the spans of windows of several documents: positions see those of their own document.

    ends: (B, T) bool, the last position of each document

    Returns (B, 2, T) int32: the start and the end (exclusive) of each position's document.
    """
    T = ends.shape[1]
    after = torch.arange(1, T + 1, device=ends.device)
    start = F.pad(after * ends, (1, -1)).cummax(1).values
    end = torch.where(ends, after, T).flip(1).cummin(1).values.flip(1)
    return torch.stack((start, end), 1).int()


def block_spans(T, S, device):
    """Return the spans of block diffusion (Arriola et al., 2503.09573) with blocks of S tokens.

    A row has 2T positions: the masked text, followed by the text itself. Masked text sees its own
    block of masked text, and earlier blocks of the text. Text sees its own and earlier blocks of
    the text.

    Returns (1, 8, 2T) int32: starts and ends (exclusive) of the two ranges that each position sees,
    then those of the two ranges of positions that see it.
    """
    start = torch.arange(T, device=device) // S * S
    end = (start + S).clamp(max=T)
    none = (torch.full_like(start, 2 * T), torch.zeros_like(start))  # an empty range
    half = torch.full_like(start, T)
    masked = torch.stack((start, end, half, T + start, start, end, *none))
    text = torch.stack((half, T + end, *none, end, half, T + start, 2 * half))
    return torch.cat((masked, text), 1)[None].int()


def window_spans(spans, window, T, device):
    """Return spans that also limit how far positions see: `window` positions in each direction.

    spans: of document_spans, of block_spans (of rows of T = twice as many positions), or None: all

    Returns spans of the same kind, (1, 2, T) for None. Those of blocks have each position of the
    text twice, and the distance is that of positions in the text.
    """
    at = torch.arange(T, device=device)
    if spans is None:
        spans = torch.stack((torch.zeros_like(at), torch.full_like(at, T)))[None]
    start = spans[:, ::2]
    end = spans[:, 1::2]
    if spans.shape[1] > 2:  # each range is in one half of the row
        half = T // 2
        at = at % half + start // half * half
    near = torch.stack((start.maximum(at - window), end.minimum(at + window + 1)), 2)
    return near.flatten(1, 2).int()


def is_visible(spans, at):
    """Whether each position sees the positions `at`: bool, (B, T, n) for `at` of (n,).

    spans: (B, 2, T) of document_spans, or (B, 8, T) of block_spans
    at: positions; any shape that broadcasts with (B, T, 1)
    """
    ranges = spans[:, :4, :, None].split(2, 1)  # (B, 2, T, 1) each
    visible = [(span[:, 0] <= at) & (at < span[:, 1]) for span in ranges]
    return visible[0] | visible[-1]


def masked_fraction(masked, text, spans):
    """Return the fraction of text that is masked: (B, 1, 1), or with spans (B, T, 1) by document.

    masked, text: (B, T) bool, masked positions and all positions of text
    spans: of document_spans, or None
    """
    if spans is None:
        return masked.float().mean(1)[:, None, None]
    start, end = spans.long().unbind(1)
    sums = [F.pad(x.cumsum(1), (1, 0)) for x in (masked, text)]
    masked, text = (x.gather(1, end) - x.gather(1, start) for x in sums)
    return (masked / text.clamp(min=1))[..., None]


def neighbors(x, left, k, spans):
    """Return shifted copies of x (B, T, C), the inputs of a convolution over k positions.

    A list of k tensors (B, T, C): for each position, x at `left` positions before it, ..., x at
    k - 1 - left positions after it. 0 at positions outside the sequence or of another document.
    With block_spans, the left neighbors of a block of masked text are the text of earlier blocks.
    """
    T = x.shape[1]
    padded = F.pad(x, (0, 0, left, k - 1 - left))
    shifted = [padded[:, i : i + T] for i in range(k)]
    if spans is not None:
        at = torch.arange(T, device=x.device)[:, None] - left
        shifted = [z * is_visible(spans[:, :2], at + i) for i, z in enumerate(shifted)]
        if spans.shape[1] > 2:
            half = T // 2
            # The text, aligned with the masked text.
            text = neighbors(x.roll(half, 1), left, left, None)
            for i, z in enumerate(text):
                shifted[i] = shifted[i] + z * is_visible(spans[:, 2:4], at + i + half)
    return shifted


# ---- Normalization and convolution
def norm_conv_ref(
    x: Tensor,
    weight: Tensor | None,
    causal: bool = False,
    spans: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    neighbors: Callable = neighbors,
) -> Tensor:
    """Normalize rows by their RMS, then add a depthwise convolution over positions.

    x             (B, T, C)
    weight        (k, C): tap i weighs the position i - left places further; None: no convolution
    causal        whether left = k - 1: no later position is seen; else left = k // 2
    spans         int32, from document_spans or block_spans, or None: which positions are seen
    scale, shift  of adaptive normalization, or None; they broadcast to (B, T, C)
    neighbors     what returns the shifted copies

    Returns (B, T, C) in the dtype of x.
    """
    h = F.rms_norm(x, x.shape[-1:]).to(x.dtype)
    if scale is not None:
        h = h * (1 + scale) + shift
    if weight is None:
        return h
    weight = weight.to(h.dtype)
    left = len(weight) - 1 if causal else len(weight) // 2
    first, *others = (
        x * w for x, w in zip(neighbors(h, left, len(weight), spans), weight, strict=True)
    )
    return h + sum(others, first)


# ---- Dropout
def dropped_of(p):
    """Return the dropout rate, p in [0, 1), in units of 2^-16; raise ValueError for other rates."""
    if not 0 <= p < 1:
        raise ValueError(f"a rate of dropout is at least 0 and below 1, not {p}")
    return min(round(p * (1 << 16)), (1 << 16) - 1)


def scale_of(dropped):
    """Return the factor for kept elements: 1 / (1 - q), where q = dropped / 2^16 is the rate."""
    return (1 << 16) / ((1 << 16) - dropped)


def new_seed(device):
    """Draw a seed by PyTorch's generator of a device: () int64, without waiting for the device.

    A CUDA graph draws another one in each replay.
    """
    return torch.randint(1 << 62, (), device=device)


def residual_dropout_ref(
    x: Tensor,
    y: Tensor,
    p: float,
    training: bool = True,
    seed: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Add y with dropout to the residual stream: x + dropout(y).

    x, y      of the same shape
    p         in [0, 1), rounded to a multiple of 2^-16: elements of y are 0 with this probability
    training  if False: x + y
    seed      () int64, on the device of y, or None: drawn by PyTorch's generator. Not to be changed
              before backward
    offset    0 <= offset < 2^31: calls with the same seed and different offsets are independent

    Returns the shape of x. The bits of an element are a function of seed, offset and its place.
    """
    dropped = dropped_of(p)
    if not training or not dropped:
        return x + y
    if seed is None:
        seed = new_seed(y.device)
    n = y.numel()
    counter = torch.tensor([offset], device=y.device)
    words = philox_words(seed, seed >> 32, counter, (n + 7) // 8 * 4)[0]
    bits = torch.stack((words & 0xFFFF, words >> 16), -1).flatten()[:n].view(y.shape)
    wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    value = torch.where(bits >= dropped, y.to(wide) * scale_of(dropped), 0.0)
    return (x.to(wide) + value).to(torch.promote_types(x.dtype, y.dtype))


# ---- MLP
def relu2_mlp_ref(h: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute an MLP with ReLU^2 (Primer, So et al., 2109.08668): relu(h up^T)^2 down^T.

    h     (..., C) features
    up    (F, C) weights of the first layer
    down  (C, F) weights of the second layer; it may have another number of rows

    Returns (..., C) in the dtype of h, or in that of autocast.
    """
    return F.linear(F.linear(h, up).relu().square(), down)


# ---- Attention


def attention_ref(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    qk_norm: bool = False,
    causal: bool = False,
    spans: Tensor | None = None,
) -> Tensor:
    """Compute attention over all positions, over those that spans allow, or causally.

    qkv       (B, T, 3, H, D), the packed projections, with any strides
    cos, sin  (T, D/2) rotary tables, or None; with the kernels they get no gradient
    qk_norm   whether to normalize q and k over D by their RMS
    causal    whether a position sees only itself and earlier positions
    spans     int32, from document_spans or block_spans, or None; not with causal

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


def grouped_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    spans: Tensor | None = None,
) -> Tensor:
    """Compute attention of H heads of queries on G heads of keys and values; G divides H.

    q      (B, T, H, D), with any strides
    k, v   (B, T, G, D): read by the heads h of queries with h // (H / G) = g
    scale  factor of the scores; None: 1 / sqrt(D)
    spans  int32, from document_spans, block_spans or window_spans, or None

    Returns (B, T, H, D) in the dtype of q.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, T, D)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    visible = None
    if spans is not None:
        visible = is_visible(spans, torch.arange(q.shape[2], device=q.device))[:, None]
    return F.scaled_dot_product_attention(q, k, v, visible, scale=scale).transpose(1, 2)
