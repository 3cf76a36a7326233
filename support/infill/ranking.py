"""The likeliest of many texts by the chain rule, each computed only as far as it may still win."""

import math

import numpy as np
import torch

from support.infill.calls import call_size, next_logits, to_context


def prefixes(model, x, start, stop):
    """(B, L) int64 on the CPU: numbers of the texts that give log p(x_i | x_j, j < i).

    Equal numbers: equal texts, one row of a network call. Between start and stop (B,) alone.
    """
    B, L = x.shape
    x = x.cpu()
    begin = int(start.min())
    masked = model.objective.scored_mask(x) & (torch.arange(L) >= begin)
    number = x.masked_fill(masked, model.mask_id).unique(dim=0, return_inverse=True)[1]
    numbers = torch.zeros(B, L, dtype=torch.int64)
    for i in range(begin, int(stop.max())):
        numbers[:, i] = i * B + number
        number = (number * (model.vocab_size + 1) + x[:, i]).unique(return_inverse=True)[1]
    return numbers.unique(return_inverse=True)[1]


class Race:
    """Rows x (B, L), of which the n with the highest known + log p(x[start:stop] | x[:start]) win.

    Terms of that sum are computed in any order. None is positive, so what is known of a sum bounds
    it: a row is out as soon as n others have ended above that.
    """

    def __init__(self, model, x, start, stop, known, n):
        self.x = x.cpu()
        self.known = known
        self.n = n
        at = torch.arange(x.shape[1])
        self.inside = (at >= start[:, None]) & (at < stop[:, None])
        self.open = self.inside.clone()  # (B, L) bool: terms that are not computed
        self.loss = torch.zeros(x.shape, dtype=torch.float64)  # the others, negative
        self.to_end = torch.where(self.inside, stop[:, None] - at, 0)  # (B, L)
        self.text = prefixes(model, x, start, stop)
        self.alive = torch.ones(len(x), dtype=torch.bool)  # rows that may win and have open terms
        self.update()

    def best(self):
        """The rows that have ended, the highest sum first, equal ones in their order; n at most."""
        done = (~self.open.any(1)).nonzero()[:, 0]
        return done[self.value[done].argsort(descending=True, stable=True)[: self.n]]

    def update(self):
        self.value = self.known - self.loss.sum(1)  # (B,)
        self.alive &= self.open.any(1)
        best = self.best()
        if len(best) == self.n:
            last = best[-1]
            row = torch.arange(len(self.x))
            least = self.value[last]
            self.alive &= (self.value > least) | ((self.value == least) & (row < last))

    def left(self):
        """How many network rows it takes at most from here."""
        return len(self.text[self.open & self.alive[:, None]].unique())

    def next(self, k):
        """(row, at): places of at most k different texts to compute next.

        First those of the rows that promise most, so that others are soon out; of a row the term
        that will probably lower it most, and the others that share it. What to expect: the mean of
        the terms at the same distance from the end, where most rows have the same text.
        """
        seen = self.inside & ~self.open
        size = self.to_end.shape[1] + 1
        count = self.to_end[seen].bincount(minlength=size)
        total = self.to_end[seen].bincount(self.loss[seen], minlength=size)
        usual = total.sum() / count.sum() if count.sum() else 1.0
        guess = torch.where(count > 0, total / count.clamp(min=1), usual)[self.to_end]
        here = self.open & self.alive[:, None]
        shared = self.text[here].bincount(minlength=int(self.text.max()) + 1)
        gain = (guess * shared[self.text]).masked_fill(~here, -math.inf)
        hope = (self.value - (guess * self.open).sum(1)).masked_fill(~self.alive, -math.inf)
        rows = hope.argsort(descending=True, stable=True)[: min(4 * k, int(self.alive.sum()))]
        order = gain[rows].argsort(dim=1, descending=True, stable=True)
        row = rows.repeat(order.shape[1])  # the best term of each row, then the second of each ...
        at = order.T.flatten()
        is_open = here[row, at]
        row = row[is_open]
        at = at[is_open]
        first = np.unique(self.text[row, at].numpy(), return_index=True)[1]
        first = torch.from_numpy(np.sort(first)[:k])
        return row[first], at[first]

    def enter(self, row, at, logp):
        """Take log p (k, V) of the texts at these places, for all rows that have them."""
        which = torch.full((int(self.text.max()) + 1,), -1)
        which[self.text[row, at]] = torch.arange(len(row))
        which = which[self.text].masked_fill(~self.open, -1)  # (B, L)
        rows, places = (which >= 0).nonzero().T
        found = logp[which[rows, places], self.x[rows, places]]
        self.loss[rows, places] = -found.double()
        self.open[rows, places] = False
        self.update()


@torch.no_grad()
def likeliest(model, x, start, stop, known, n, expect=lambda calls: None):
    """The n rows of x (B, T) with the highest known + log p(x[start:stop] | x[:start]), exactly.

    start, stop (B,) int64, known (B,) float64, all on the CPU. Returns rows (n,) and values (n,),
    the highest first, equal ones in their order. A row is computed only as far as it may still be
    one of the n, and what begins alike is computed once. expect(calls): how many network calls it
    will still take, at most.
    """
    x = to_context(model, x)
    size = call_size(model, x.device)
    race = Race(model, x, start, stop, known, n)
    while race.alive.any():
        expect(math.ceil(race.left() / size))
        row, at = race.next(size)
        logits = next_logits(model, x, row.to(x.device), at.to(x.device))
        race.enter(row, at, logits.log_softmax(-1).cpu())
    expect(0)
    best = race.best()
    return best, race.value[best]
