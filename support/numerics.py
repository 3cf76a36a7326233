"""Small numerical functions: seeds, stratified draws, mask schedules, token sampling."""

import hashlib
import math

import torch

from nanomdlm.support.errors import UserError


# ---- Seeds
def seed(*key):
    """Hash a key such as ("levels", seed, step) to a seed in [0, 2^63).

    Random numbers that are seeded with a key are the same on all ranks and after a resume.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key):
    """Return a CPU generator seeded with a key."""
    return torch.Generator().manual_seed(seed(*key))


def seed_device(device, *key):
    """Seed the default generator of one device, which dropout uses.

    torch.manual_seed would seed the generators of all devices.
    """
    source = torch.default_generator if device.type == "cpu" else torch.get_device_module(device)
    source.manual_seed(seed(*key))


# ---- Stratified draws, and errors of means
def standard_error(values):
    """Return the standard error of the mean of values (W,); infinity for a single value."""
    return values.std().item() / len(values) ** 0.5 if len(values) > 1 else math.inf


def block_error(values, blocks=20):
    """Return the standard error of the mean of values (W,) over blocks of neighboring windows.

    Losses of neighboring windows are correlated, so an error over windows is too small as a
    statement about other text of the kind. Infinity for fewer than two windows a block.
    """
    if len(values) < 2 * blocks:
        return math.inf
    return standard_error(torch.stack([part.mean() for part in values.tensor_split(blocks)]))


def stratified(n, *key):
    """Draw from each of n equal intervals of [0, 1) once, in random order: (n,) float64."""
    g = generator(*key)
    order = torch.randperm(n, generator=g)
    return (order + torch.rand(n, generator=g, dtype=torch.float64)) / n


# ---- Mask schedules
def invert(function, values):
    """Solve function(x) = values (n,) for x (n,) in [0, 1], in float64, by bisection.

    The function must be strictly monotonic, as mask schedules are (variants/rates.py checks them).
    """
    grid = function(torch.linspace(0, 1, 4097, dtype=torch.float64))
    rising = grid[-1] > grid[0]
    low = torch.zeros_like(values)
    high = torch.ones_like(values)
    for _ in range(60):  # more bits than float64 has
        middle = (low + high) / 2
        before = (function(middle) < values) == rising
        low = torch.where(before, middle, low)
        high = torch.where(before, high, middle)
    return high


def binomial_mixture(L, function):
    """Return the probabilities of 0..L masked tokens if each is masked at a random rate.

    The rate is function(u) for u uniform in [0, 1]. Returns (L + 1,) float64, a mixture of binomial
    distributions.
    """
    edges = torch.linspace(0, 1, max(1 << 14, 16 * L) + 1, dtype=torch.float64)
    mass = invert(function, edges).diff().abs()
    trials = torch.distributions.Binomial(L, (edges[1:] + edges[:-1]) / 2)
    logs = map(trials.log_prob, torch.arange(L + 1, dtype=torch.float64))
    return torch.stack([(log.exp() * mass).sum() for log in logs])


# ---- Dropout
@torch.library.custom_op(
    "mdlm::dropout_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dropout_mask(x: torch.Tensor, dropped: int) -> torch.Tensor:
    """Return the factors of dropout on a CPU, like x: 0 with probability dropped / 2^16.

    Four are drawn at a time, because drawing a number takes longer than everything else. It is an
    operator, because Inductor's own code for this is slower.
    """
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
    bits = words.view(torch.int16)[: x.numel()].view(x.shape)
    keep = bits >= dropped - (1 << 15)
    return (keep * ((1 << 16) / ((1 << 16) - dropped))).to(x.dtype)


@dropout_mask.register_fake
def _(x, dropped):
    return x.new_empty(x.shape)


class Dropout(torch.nn.Dropout):
    """PyTorch's dropout, but three times as fast on a CPU (the rate is a multiple of 2^-16)."""

    def forward(self, x):
        dropped = round(self.p * (1 << 16))
        if x.device.type != "cpu" or not self.training or not dropped:
            return super().forward(x)
        return x * dropout_mask(x.detach(), dropped)


# ---- Sampling of tokens
def draw(logits, u, temperature, top_k, top_p):
    """Draw tokens (n,) from logits (n, V), by inverting the cumulative distribution at u (n,).

    u: uniform in [0, 1)
    temperature: 0 gives the likeliest token
    top_k: number of likeliest tokens to draw from; 0: all
    top_p: draw from the fewest likeliest tokens whose probabilities reach this sum; 1: all

    Computed in float64: Gumbel noise in float32 would effectively lower the temperature (Zheng et
    al., 2409.02908).
    """
    if logits.numel() > 1 << 24:  # 128 MiB in float64, and several copies are needed
        rows = max(1, (1 << 24) // logits.shape[1])
        chunks = zip(logits.split(rows), u.split(rows))
        return torch.cat([draw(*chunk, temperature, top_k, top_p) for chunk in chunks])
    shifted = (logits - logits.amax(-1, keepdim=True)).double()
    p = torch.softmax(shifted / max(temperature, 1e-30), -1)
    if top_k or top_p < 1:
        sorted_p, token = p.sort(dim=-1, descending=True, stable=True)
        # Keep a token if those before it do not reach top_p together.
        sorted_p = torch.where(sorted_p.cumsum(-1) - sorted_p < top_p, sorted_p, 0)
        sorted_p[:, top_k or p.shape[1] :] = 0
        p = torch.zeros_like(p).scatter(-1, token, sorted_p)
    cdf = p.cumsum(-1)
    # The first token whose cdf exceeds u * total. Its p is not 0. There always is one: u < 1, and
    # u * total < total also after rounding.
    return torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0]


def topk_mask(score, noise, masked, k):
    """Select the k masked positions with the highest score in each row: (B, T) bool.

    score, noise: (B, T); equal scores are ordered by the noise. masked: (B, T) bool. k: (B,).
    """
    by_noise = noise.argsort(dim=1, stable=True)
    score = score.double().masked_fill(~masked, -math.inf).gather(1, by_noise)
    rank = by_noise.gather(1, score.argsort(dim=1, descending=True, stable=True))
    first = torch.arange(rank.shape[1], device=rank.device) < k[:, None]
    return torch.zeros_like(masked).scatter(1, rank, first) & masked


def checked(logits):
    """Return logits (n, V); raise UserError if they contain NaN, infinity or huge values."""
    if not (logits.amax(-1).abs() < 1e30).all():  # larger values overflow in sums
        raise UserError("the model predicts NaN or inf: its weights are damaged; train it again")
    return logits


def reversed_bits(i):
    """Reverse the 16 bits of integers below 2^16 (van der Corput sequence).

    Successive integers become numbers that are evenly spread over the whole range.
    """
    return sum((i >> bit & 1) << 15 - bit for bit in range(16))


def top2_margin(p):
    """Return by how much the largest of each row of p (n, V) exceeds the second largest: (n,)."""
    return -p.topk(min(2, p.shape[1]))[0].diff().sum(1)
