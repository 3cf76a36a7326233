"""Small numerical tools: errors of stratified means, inverse functions, mixtures, draws."""

import hashlib
import math

import torch

from support.errors import UserError


def seed(*key):
    """A number for a key such as ("levels", seed, step): the same on all ranks and on resume."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key):
    return torch.Generator().manual_seed(seed(*key))


def seed_device(device, *key):
    """Seed the device's own generator, for dropout; torch.manual_seed seeds all devices."""
    source = torch.default_generator if device.type == "cpu" else torch.get_device_module(device)
    source.manual_seed(seed(*key))


def standard_error(values):
    """Of the mean of values (W,); a single value says nothing about it."""
    return values.std().item() / len(values) ** 0.5 if len(values) > 1 else math.inf


def segment_mean(values, segment, count):
    """(n,) float64 on the CPU: sums of values (m,) by their segment (m,), divided by count (n,)."""
    total = torch.zeros(len(count), device=values.device).index_add(0, segment, values.float())
    return (total / count).cpu().double()


def mean_by_bin(values, bin, bins):
    """Means (bins,) of values (passes, W) by the bin (passes, W) of each."""
    bin = bin.flatten()
    total = values.new_zeros(bins).index_add(0, bin, values.flatten())
    return total / bin.bincount(minlength=bins)


def by_tenths(values, count, T):
    """The means of values (passes, W) by tenths of count / T, a list; None where there is none."""
    means = mean_by_bin(values, (10 * count - 1) // T, 10).tolist()  # 0 % is never, 100 % in 9
    return [None if math.isnan(mean) else mean for mean in means]


def stratified(n, *key):
    """(n,) float64: one draw from each of n equal parts of [0, 1), in random order."""
    g = generator(*key)
    order = torch.randperm(n, generator=g)
    return (order + torch.rand(n, generator=g, dtype=torch.float64)) / n


def stratified_counts(T, passes, seed, n=1):
    """(passes, W, n) counts in 1..T/n, T (W,); pass k draws from the k-th of `passes` intervals."""
    T = T.repeat_interleave(n) // n
    counts = []
    for k in range(passes):
        u = (k + stratified(len(T), "evaluate", seed, k)) / passes
        counts.append((1 + (u * T).long()).minimum(T))
    return torch.stack(counts).unflatten(1, (-1, n))


def stratified_error(values, count, T):
    """Standard error over windows of the mean of values (passes, W), less what counts explain."""
    n = values.numel()
    bins = max(1, min(32, n // 8))  # with few values in a bin, each would explain itself
    bin = (count - 1) * bins // T
    residual = (values - mean_by_bin(values, bin, bins)[bin]).mean(0)
    return standard_error(residual * (n / max(n - bins, 1)) ** 0.5)


def seen_windows(sums):
    """Means of each pass over windows, and the windows that there was time for.

    sums (k + 1, passes, W, n): k sums, and 1 for each time that a window was scored. The n blocks
    of a window count like passes over it. Returns (k, passes * n, w) and which windows, (W,) bool.
    """
    *sums, done = sums.transpose(2, 3).flatten(1, 2)
    seen = done[0] > 0  # some by two ranks
    return torch.stack([(x / done)[:, seen] for x in sums]), seen


def summary(sums, count, T):
    """What mdlm.evaluate returns, from sums (4, passes, W, n) of CE, accuracy, what only variants
    have, and 1, with `count` (passes, W, n) of T (W,) tokens masked in n blocks of a window."""
    passes, _, n = count.shape
    (ce, hit, _), seen = seen_windows(sums)
    count = count.transpose(1, 2).flatten(0, 1)[:, seen]
    T = T[seen] // n
    weight = T / T.double().mean()  # a window counts by its length
    mean = (ce * weight).mean().item()
    residual = (ce - mean) * weight
    r = dict(windows=len(T), passes=passes, by_window=(ce * weight).mean(0).tolist())
    r |= dict(nelbo=mean, se=stratified_error(residual, count, T))
    return r | dict(ce=by_tenths(ce, count, T), accuracy=by_tenths(hit, count, T))


def invert(function, values):
    """x (n,) in [0, 1] with function(x) = values (n,) in float64, for a mask schedule."""
    grid = function(torch.linspace(0, 1, 4097, dtype=torch.float64))
    rising = grid[-1] > grid[0]
    strict = (grid.diff() > 0) if rising else (grid.diff() < 0)
    if not strict.all() or grid.min().abs() > 1e-9 or (grid.max() - 1).abs() > 1e-9:
        raise UserError("a mask schedule must rise or fall strictly between 0 and 1")
    low = torch.zeros_like(values)
    high = torch.ones_like(values)
    for _ in range(60):
        middle = (low + high) / 2
        before = (function(middle) < values) == rising
        low = torch.where(before, middle, low)
        high = torch.where(before, high, middle)
    return high


def binomial_mixture(L, function):
    """P (L+1,) float64 of a binomial distribution of L trials, averaged over rates function(u)."""
    edges = torch.linspace(0, 1, max(1 << 14, 16 * L) + 1, dtype=torch.float64)
    mass = invert(function, edges).diff().abs()
    trials = torch.distributions.Binomial(L, (edges[1:] + edges[:-1]) / 2)
    logs = map(trials.log_prob, torch.arange(L + 1, dtype=torch.float64))
    return torch.stack([(log.exp() * mass).sum() for log in logs])


def draw(logits, u, temperature, top_k, top_p):
    """Tokens (n,) from logits (n, V) by inverting the distribution function at u (n,), in float64.

    (Gumbel noise in float32 lowers the temperature: Zheng et al., 2409.02908.)
    """
    if logits.numel() > 1 << 24:  # 128 MiB in float64, and several copies are needed
        few = max(1, (1 << 24) // logits.shape[1])
        parts = zip(logits.split(few), u.split(few))
        return torch.cat([draw(*part, temperature, top_k, top_p) for part in parts])
    below = (logits - logits.amax(-1, keepdim=True)).double()
    p = torch.softmax(below / max(temperature, 1e-30), -1)  # at 0 only the likeliest
    if top_k or top_p < 1:
        sorted_p, token = p.sort(dim=-1, descending=True, stable=True)
        sorted_p = torch.where(sorted_p.cumsum(-1) - sorted_p < top_p, sorted_p, 0)
        sorted_p[:, top_k or p.shape[1] :] = 0
        p = torch.zeros_like(p).scatter(-1, token, sorted_p)
    cdf = p.cumsum(-1)
    # The first token whose cdf is above u: its p is not 0, and u * total < total even if rounded.
    return torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0]


def topk_mask(score, noise, masked, k):
    """(B, T) bool: the k (B,) masked positions of the highest score, equal ones by their noise."""
    by_noise = noise.argsort(dim=1, stable=True)
    score = score.double().masked_fill(~masked, -math.inf).gather(1, by_noise)
    rank = by_noise.gather(1, score.argsort(dim=1, descending=True, stable=True))
    first = torch.arange(rank.shape[1], device=rank.device) < k[:, None]
    return torch.zeros_like(masked).scatter(1, rank, first) & masked


def reversed_bits(i):
    """Integers below 2^16 with their bits reversed (van der Corput): every stretch of this order
    is evenly spread."""
    return sum((i >> bit & 1) << 15 - bit for bit in range(16))


def top2_margin(p):
    """By how much the largest of p (n, V) exceeds the second largest."""
    return -p.topk(min(2, p.shape[1]))[0].diff().sum(1)
