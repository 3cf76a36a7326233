"""Other distributions of mask rates, other masks and weights: to compare with.

The bound stays if a count has probability P(l) > 0 for every l and its text weighs 1 / (T P(l)). A
clipped range (BERT: 15 %) and uniform weights give no bound.
"""

import math

import torch

from support import numerics
from support.errors import UserError
from support.view import masked_rows

from .variant import Variant

# Mask schedules map u, uniform in [0, 1), to a mask rate. To add one, write its line here: it must
# rise or fall strictly between 0 and 1. Its weights follow (count_probabilities): the bound stays.
SCHEDULES = {
    "linear": lambda u: u,
    "cosine": lambda u: torch.cos(math.pi / 2 * (1 - u)),
}


DEFAULT = dict(masking="exact", mask_schedule="linear", loss_weight="bound", min_rate=0, max_rate=1)


def is_bound(config):
    return config.loss_weight == "bound" and config.min_rate == 0 and config.max_rate == 1


def flag(config):
    """The first flag that asks for other rates, masks or weights; empty if there is none."""
    for name, default in DEFAULT.items():
        if getattr(config, name) != default:
            return f"--{name}={getattr(config, name)}"
    return ""


def are_other(config):
    """Whether a config asks for other rates, masks or weights than the default's."""
    return bool(flag(config))


def check(config):
    """Raise UserError for a range of rates without any."""
    if config.min_rate > config.max_rate:
        raise UserError(f"--min_rate={config.min_rate} is above --max_rate; swap them")


def rates_or_counts(config, u):
    """(N/2,) u in [0, 1) -> (N,) mask rates t if bernoulli, else counts 1 + floor(t T)."""
    T = config.block_size
    t = SCHEDULES[config.mask_schedule](torch.stack((u, 1 - u), 1).flatten())
    t = config.min_rate + (config.max_rate - config.min_rate) * t
    return t if config.masking == "bernoulli" else 1 + (t * T).long().clamp(max=T - 1)


def count_probabilities(config):
    """P(l) of masking l of T tokens, (T+1,) float64, for rates from 0 to 1."""
    T = config.block_size
    count = torch.arange(T + 1, dtype=torch.float64)
    schedule = SCHEDULES[config.mask_schedule]
    if config.masking == "exact":  # u the inverse of the schedule: P(l) = |u(l/T) - u((l-1)/T)|
        u = numerics.invert(schedule, count / T)
        return u.diff(prepend=u[:1]).abs()
    if config.mask_schedule == "linear":  # then E[1/t | l] = (T + 1) / l, the textbook weight
        return torch.full_like(count, 1 / (T + 1))
    return numerics.binomial_mixture(T, schedule)


def text_weights(config):
    """(T+1,) float32, made in float64: the weight of a text with l masked tokens."""
    T = config.block_size
    count = torch.arange(T + 1, dtype=torch.float64)
    weight = torch.ones_like(count)  # a clipped range: the plain mean
    if config.loss_weight == "uniform":  # the sum of CE over its expected number of terms
        grid = (torch.arange(1 << 13, dtype=torch.float64) + 0.5) / (1 << 14)
        terms = rates_or_counts(config, grid).double().mean()
        weight = count / (terms * T if config.masking == "bernoulli" else terms)
    elif is_bound(config):
        weight = 1 / (T * count_probabilities(config))
    weight[0] = 0  # nothing is masked, so there is nothing to predict
    return weight.float()


class OtherRates(Variant):
    """Masks and weighs texts as --masking, --mask_schedule, --min_rate, --loss_weight ... say."""

    def __init__(self, inner):
        super().__init__(inner)
        self.is_bound = is_bound(self.config)
        self.weights = text_weights(self.config)

    def mask_counts(self, step, margin_scale, samples, lengths):
        u = numerics.stratified(self.batch_size // 2, "levels", self.seed, step)
        return rates_or_counts(self.config, u)[samples]

    def batch(self, ops, x0, counts, step, samples):
        xt, count, rows, n_rows = ops.mask_tokens(
            x0, counts, self.mask_id, self.seed, step, samples
        )
        B, T = x0.shape
        self.weights = self.weights.to(x0.device)  # once
        weights = self.weights[count] / (count.clamp(min=1) * B)
        rows, weights = masked_rows(rows, n_rows, weights, T)
        return self.view(xt, rows=rows), x0.flatten()[rows], weights
