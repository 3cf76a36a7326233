"""Other distributions of mask rates, masks and weights than those of mdlm.py (`mask_counts`).

The loss remains a bound if each count l has a probability P(l) > 0 and its text the weight
1 / (T P(l)). With a clipped range (BERT: 15 %) or uniform weights, it is not a bound.
"""

import functools
import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch

from nanomdlm.support import numerics
from nanomdlm.support.cli.settings import Form
from nanomdlm.support.errors import UserError
from nanomdlm.support.view import Batch, masked_rows

from .variant import Variant

# Schedules map u, uniform in [0, 1), to a mask rate: the inverse of its distribution function. To
# add one, write a line here, with functions of torch: it must go from 0 to 1, or from 1 to 0, and
# never turn back. Its weights follow from it (count_probabilities), and the loss remains a bound.
SCHEDULES = {
    "uniform": lambda u: u,
    "cosine": lambda u: torch.cos(math.pi / 2 * (1 - u)),
}


class Rates(NamedTuple):
    """A distribution of mask rates: a schedule of SCHEDULES, in the range from low to high."""

    schedule: str
    low: float
    high: float


RATES = re.compile(r"(?:(\w+):)?(NUMBER)-(NUMBER)".replace("NUMBER", r"\d*\.?\d+(?:e-?\d+)?"))


@functools.cache
def check_schedule(name, schedule):
    """Raise UserError if a line of SCHEDULES is not a distribution of all rates from 0 to 1."""
    grid = schedule(torch.linspace(0, 1, 4097, dtype=torch.float64))
    first, *_, last = grid.tolist()
    turns = grid.diff() <= 0 if last > first else grid.diff() >= 0
    if turns.any() or sorted((round(first, 9), round(last, 9))) != [0, 1]:
        needs = "it must go from 0 to 1, or from 1 to 0, without a flat or returning part"
        raise UserError(f"the schedule {name} of variants/rates.py does not work: {needs}")


def parse(value):
    """--rates -> Rates: uniform, cosine, LOW-HIGH, and both as cosine:LOW-HIGH."""
    match = RATES.fullmatch(value)
    schedule, low, high = match.groups("uniform") if match else (value, "0", "1")
    if schedule not in SCHEDULES:
        accepted = f"{', '.join(SCHEDULES)} or LOW-HIGH, such as 0.3-0.8"
        raise UserError(f"--rates={value[:40]!r} is not accepted; give {accepted}")
    check_schedule(schedule, SCHEDULES[schedule])
    low = float(low)
    high = float(high)
    if low > high:
        raise UserError(f"--rates={value}: {low:g} is above {high:g}; swap them")
    if not 1e-6 <= high <= 1:
        raise UserError(f"--rates={value} must be from 0 to 1, with the upper limit above 0")
    return Rates(schedule, low, high)


def in_short(value):
    """--rates in its shortest spelling."""
    schedule, *span = parse(value)
    if span == [0, 1]:
        return schedule
    shown = "-".join(repr(rate).removesuffix(".0") for rate in span)
    return shown if schedule == "uniform" else f"{schedule}:{shown}"


@dataclass
class Settings:
    """Other mask rates, masks and loss weights."""

    rates: Annotated[str, Form(in_short)] = "uniform"  # uniform, cosine, LOW-HIGH (0.15-0.15: BERT)
    masking: Literal["exact", "bernoulli"] = "exact"  # exact number of tokens, or each at random
    loss_weight: Literal["bound", "uniform"] = "bound"  # uniform: equal weight per masked token


DEFAULT = dict(masking="exact", rates="uniform", loss_weight="bound")


def is_bound(config):
    return config.loss_weight == "bound" and parse(config.rates)[1:] == (0, 1)


def flag(config):
    """The first flag that sets other rates, masks or weights; empty if there is none."""
    for name, default in DEFAULT.items():
        if getattr(config, name) != default:
            return f"--{name}={getattr(config, name)}"
    return ""


def asked(config, has_documents):
    return "" if config.objective == "ar" else flag(config)


def wrap(objective, end_id, mean_length):
    return OtherRates(objective)


has_rates = flag


def rates_or_counts(config, u):
    """(N/2,) u in [0, 1) -> (N,) mask rates t if bernoulli, else counts 1 + floor(t T)."""
    T = config.block_size
    schedule, low, high = parse(config.rates)
    t = SCHEDULES[schedule](torch.stack((u, 1 - u), 1).flatten())  # u and its mirror, in turns
    t = low + (high - low) * t
    return t if config.masking == "bernoulli" else 1 + (t * T).long().clamp(max=T - 1)


def count_probabilities(config):
    """P(l) of masking l of T tokens, (T+1,) float64, for rates from 0 to 1."""
    T = config.block_size
    count = torch.arange(T + 1, dtype=torch.float64)
    name = parse(config.rates).schedule
    schedule = SCHEDULES[name]
    if config.masking == "exact":  # u the inverse of the schedule: P(l) = |u(l/T) - u((l-1)/T)|
        u = numerics.invert(schedule, count / T)
        return u.diff(prepend=u[:1]).abs()
    if name == "uniform":  # then l is uniform on {0..T}, and E[1/t | l] = (T + 1) / l
        return torch.full_like(count, 1 / (T + 1))
    return numerics.binomial_mixture(T, schedule)


def text_weights(config):
    """(T+1,) float32, made in float64: the weight of a text with l masked tokens."""
    T = config.block_size
    count = torch.arange(T + 1, dtype=torch.float64)
    if config.loss_weight == "uniform":  # the sum of CE over its expected number of terms
        grid = (torch.arange(1 << 13, dtype=torch.float64) + 0.5) / (1 << 14)  # u below 1/2 alone:
        terms = rates_or_counts(config, grid).double().mean()  # this adds its mirror
        weight = count / (terms * T if config.masking == "bernoulli" else terms)
    elif is_bound(config):
        weight = 1 / (T * count_probabilities(config))
    else:  # a clipped range: the plain mean
        weight = torch.ones_like(count)
    weight[0] = 0  # nothing is masked, so there is nothing to predict
    return weight.float()


class OtherRates(Variant):
    """Masks and weights texts as set by --masking, --rates and --loss_weight."""

    def __init__(self, inner):
        super().__init__(inner)
        self.weights = text_weights(self.config)

    def mask_counts(self, step, margin, samples, lengths):
        u = numerics.stratified(self.batch_size // 2, "levels", self.seed, step)
        return rates_or_counts(self.config, u)[samples]

    def batch(self, ops, x0, counts, step, samples, seed=None, scored=None):
        if seed is not None:  # an evaluation estimates the bound
            return self.inner.batch(ops, x0, counts, step, samples, seed, scored)
        xt, count, rows, n_rows = ops.mask_tokens(
            x0, counts, self.mask_id, self.seed, step, samples
        )
        B, T = x0.shape
        self.weights = self.weights.to(x0.device)  # once
        weights = self.weights[count] / (count.clamp(min=1) * B)
        rows, weights = masked_rows(rows, n_rows, weights, T)
        return Batch(self.view(xt, rows=rows), x0.flatten()[rows], weights, rows)

    def notes(self):
        notes = [*self.inner.notes(), f"the largest weight of a text is {self.weights.max():.1f}"]
        if not is_bound(self.config):
            notes.append("only the evaluations, not the training loss, bound the likelihood")
        return notes
