"""Other masks than the exact uniform counts of mdlm.py, to compare with: schedules, weights.

The bound stays if a count has probability P(l) > 0 for every l and its sequence weighs
1 / (L P(l)). A clipped range (BERT: 15 %) and uniform weights give no bound.
"""

import math

import torch

from support import numerics

# Mask schedules map u, uniform in [0, 1), to a mask rate. To add one, write its line here: it must
# rise or fall strictly between 0 and 1. Its weights follow (count_probabilities): the bound stays.
SCHEDULES = {
    "linear": lambda u: u,
    "cosine": lambda u: torch.cos(math.pi / 2 * (1 - u)),
}


def is_bound(config):
    return config.loss_weight == "bound" and config.min_rate == 0 and config.max_rate == 1


def is_variant(config):
    return (config.masking, config.mask_schedule) != ("exact", "linear") or not is_bound(config)


def draw_levels(config, u):
    """(N/2,) u in [0, 1) -> (N,) mask rates t if bernoulli, else counts 1 + floor(t L)."""
    L = config.block_size
    t = SCHEDULES[config.mask_schedule](torch.stack((u, 1 - u), 1).flatten())
    t = config.min_rate + (config.max_rate - config.min_rate) * t
    return t if config.masking == "bernoulli" else 1 + (t * L).long().clamp(max=L - 1)


def count_probabilities(config):
    """P(l) of masking l of L tokens, (L+1,) float64, for rates from 0 to 1."""
    L = config.block_size
    count = torch.arange(L + 1, dtype=torch.float64)
    schedule = SCHEDULES[config.mask_schedule]
    if config.masking == "exact":  # u the inverse of the schedule: P(l) = |u(l/L) - u((l-1)/L)|
        u = numerics.invert(schedule, count / L)
        return u.diff(prepend=u[:1]).abs()
    if config.mask_schedule == "linear":  # then E[1/t | l] = (L + 1) / l, the textbook weight
        return torch.full_like(count, 1 / (L + 1))
    return numerics.binomial_mixture(L, schedule)


def sequence_weights(config):
    """(L+1,) float32, made in float64: the weight of a sequence with l masked tokens."""
    L = config.block_size
    count = torch.arange(L + 1, dtype=torch.float64)
    weight = torch.ones_like(count)  # a clipped range: the plain mean
    if config.loss_weight == "uniform":  # the sum of CE over its expected number of terms
        grid = (torch.arange(1 << 13, dtype=torch.float64) + 0.5) / (1 << 14)
        terms = draw_levels(config, grid).double().mean()
        weight = count / (terms * L if config.masking == "bernoulli" else terms)
    elif is_bound(config):
        weight = 1 / (L * count_probabilities(config))
    weight[0] = 0  # nothing is masked, so there is nothing to predict
    return weight.float()


def weigh(model, xt, x0, count, rows, n_rows):
    """The arguments of Model.forward; a token's share is its sequence's weight / (B l)."""
    B, T = x0.shape
    share = model.weights[count] / (count.clamp(min=1) * B)  # (B,)
    if x0.device.type == "cpu":
        rows = rows[: int(n_rows)]
    # Python does not wait for a GPU to know n_rows: the padding of rows, -1, stays, with share 0.
    share = torch.where(rows < 0, 0, share[rows // T])
    rows = torch.where(rows < 0, torch.arange(len(rows), device=rows.device), rows)
    return xt, x0.flatten()[rows], rows, share
