"""Exact search for the likeliest of many texts, by the chain rule.

Each text is scored only until it is certain that it cannot be among the best.
"""

import math

import numpy as np
import torch

from support.arguments import check_ids, check_length
from support.infill.calls import call_size, next_logits, to_context


def prefixes(model, x, start, stop):
    """Number the texts that the network must see to score x: (B, L) int64 on the CPU.

    log p(x_i | x_j, j < i) at (row, i) is computed from the text of that number. Equal texts have
    equal numbers, so they are computed once. x: (B, L); only positions from start (B,) to stop (B,)
    are valid.
    """
    B, L = x.shape
    x = x.cpu()
    begin = int(start.min())
    masked = model.objective.scored_mask(x) & (torch.arange(L) >= begin)
    number = x.masked_fill(masked, model.mask_id).unique(dim=0, return_inverse=True)[1]
    numbers = torch.zeros(B, L, dtype=torch.int64)
    for i in range(begin, int(stop.max())):
        numbers[:, i] = i * B + number
        # A text that is one token longer is told by its beginning and that token.
        number = (number * (model.vocab_size + 1) + x[:, i]).unique(return_inverse=True)[1]
    return numbers.unique(return_inverse=True)[1]


class Race:
    """Finds the n rows of x with the highest value: known + log p(x[start:stop] | x[:start]).

    x: (B, L); start, stop: (B,); known: (B,), what each value includes from the beginning.

    log p is a sum over positions, whose terms may be computed in any order. No term is positive, so
    the sum of the computed terms is an upper bound of a row's value. A row is out as soon as n
    complete rows have higher values than its bound.
    """

    def __init__(self, model, x, start, stop, known, n):
        self.x = x.cpu()
        self.known = known
        self.n = n
        at = torch.arange(x.shape[1])
        self.inside = (at >= start[:, None]) & (at < stop[:, None])
        self.open = self.inside.clone()  # (B, L) bool: terms that have not been computed
        self.loss = torch.zeros(x.shape, dtype=torch.float64)  # -log p of the computed terms
        self.to_end = torch.where(self.inside, stop[:, None] - at, 0)  # (B, L) distance from stop
        self.text = prefixes(model, x, start, stop)
        self.alive = torch.ones(len(x), dtype=torch.bool)  # rows that may win and have open terms
        self.update()

    def best(self):
        """Return the complete rows, at most n, the highest value first; ties in row order."""
        done = (~self.open.any(1)).nonzero()[:, 0]
        return done[self.value[done].argsort(descending=True, stable=True)[: self.n]]

    def update(self):
        """Compute the bounds of all rows, and remove those that cannot win from `alive`."""
        self.value = self.known - self.loss.sum(1)  # (B,)
        self.alive &= self.open.any(1)
        best = self.best()
        if len(best) == self.n:
            last = best[-1]
            row = torch.arange(len(self.x))
            least = self.value[last]
            self.alive &= (self.value > least) | ((self.value == least) & (row < last))

    def left(self):
        """Return how many sequences the network must still compute at most."""
        return len(self.text[self.open & self.alive[:, None]].unique())

    def next(self, k):
        """Choose at most k different texts to compute next; return their places (row, at).

        Promising rows come first, because complete rows of high value remove the others. Of each
        row comes the term that is expected to cost most, counting the rows that share it. The
        expected cost is the mean of the computed terms at the same distance from the end, where
        most rows contain the same text.
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
        expected = (self.value - (guess * self.open).sum(1)).masked_fill(~self.alive, -math.inf)
        rows = expected.argsort(descending=True, stable=True)[: min(4 * k, int(self.alive.sum()))]
        order = gain[rows].argsort(dim=1, descending=True, stable=True)
        row = rows.repeat(order.shape[1])  # the best term of each row, then the second of each ...
        at = order.T.flatten()
        is_open = here[row, at]
        row = row[is_open]
        at = at[is_open]
        # Of equal texts only the first is computed; np.unique gives the places of the first ones.
        first = np.unique(self.text[row, at].numpy(), return_index=True)[1]
        first = torch.from_numpy(np.sort(first)[:k])
        return row[first], at[first]

    def enter(self, row, at, logp):
        """Store the results logp (k, V) of the texts at these places, for all rows that share them.

        row, at: (k,), as returned by `next`.
        """
        result = torch.full((int(self.text.max()) + 1,), -1)  # number of a text -> index in logp
        result[self.text[row, at]] = torch.arange(len(row))
        result = result[self.text].masked_fill(~self.open, -1)  # (B, L)
        rows, places = (result >= 0).nonzero().T
        token_logp = logp[result[rows, places], self.x[rows, places]]
        self.loss[rows, places] = -token_logp.double()
        self.open[rows, places] = False
        self.update()


@torch.no_grad()
def likeliest(model, x, start, stop, known, n, expect=lambda calls: None):
    """Find the n rows of x with the highest known + log p(x[start:stop] | x[:start]), exactly.

    x: (B, T) ids
    start, stop: (B,) int64 on the CPU
    known: (B,) float64 on the CPU, log p of what precedes `start`, for example
    expect: called with the largest number of network calls that may still follow

    Returns (rows (n,), values (n,) in nats), the highest first; ties keep the order of the rows. A
    row is scored only until it cannot be among the n, and common beginnings are scored once. Raises
    UserError for ids outside the vocabulary and for texts that are too long.
    """
    check_ids(model, x)
    check_length(model, x)
    at = torch.arange(x.shape[1])
    is_text = (at >= start[:, None]) & (at < stop[:, None])
    check_ids(model, x.masked_fill(~is_text.to(x.device), 0), masks=False)
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
