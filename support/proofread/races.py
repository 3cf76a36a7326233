"""Edits that may have been meant in a place, and the race between their likelihoods."""

import math
from typing import NamedTuple

REACH = 6  # tokens after an edit whose likelihood decides
WIDTH = 4  # texts of a race that are asked for at a time


class Edit(NamedTuple):
    """tokens[start:stop] of a window become `ids`; cost: see mistakes.Prior."""

    start: int
    stop: int
    ids: tuple
    kind: str
    cost: float = 0.0
    single: float = 0.0  # gain at the token alone, log p(new) - log p(old), as doubt saw them
    p_before: float | None = None
    p_after: float | None = None
    gain: float = -math.inf
    logp: float = -math.inf  # of the region with it, given all other tokens

    @property
    def growth(self):
        return len(self.ids) - (self.stop - self.start)


def one_by_one(n):
    """The chain rule: tokens that are asked for at a time, with all that were asked for known."""
    return [[k] for k in range(n)]


def thirds(n):
    """The same for every third token at once, counted from the end, which rivals share."""
    return [[k for k in range(n) if (n - 1 - k) % 3 == third] for third in (0, 2, 1)]


class Rival:
    """A text that may be meant in a place, and its likelihood so far.

    edit: that makes it; None: what is there. logp: of the tokens asked for
    steps: [(what the network sees of it, the tokens it is asked for), ...]
    """

    def __init__(self, edit, text, cost, order, mask):
        self.edit = edit
        self.text = text
        self.cost = cost
        self.logp = 0.0
        self.done = 0
        self.steps = []
        seen = [mask] * len(text)
        for some in order(len(text)):
            some = [k for k in some if text[k] != mask]
            if some:
                self.steps.append((tuple(seen), some))
            for k in some:
                seen[k] = text[k]

    def is_done(self):
        return self.done == len(self.steps)

    def go_on(self):
        """Begin the next step; returns the tokens it asks for."""
        self.done += 1
        return self.steps[self.done - 1][1]


class Race:
    """Rival edits of a place, and no edit: each is asked for until it is certain to lose.

    ids[start:stop] is the place. What is there is known first; then the best go on first.
    """

    def __init__(self, ids, edits, mask, caution, order, slack):
        self.slack = slack
        start = self.start = edits[0].start
        stop = self.stop = min(len(ids), max(edit.stop for edit in edits) + REACH)
        self.rivals = [self.before] = [Rival(None, ids[start:stop], 0.0, order, mask)]
        for edit in edits:
            text = [*ids[start : edit.start], *edit.ids, *ids[edit.stop : stop]]
            self.rivals.append(Rival(edit, text, edit.cost + caution, order, mask))
        self.everyone = self.rivals

    def next(self):
        """What the network sees of the rivals that go on."""
        if not self.before.done:
            return [seen for seen, _ in self.before.steps]
        low = max(self.score(rival) for rival in self.rivals if rival.is_done()) - self.slack
        self.rivals = [r for r in self.rivals if self.score(r) >= low or r is self.before]
        going = [rival for rival in self.rivals if not rival.is_done()]
        going.sort(key=lambda rival: -self.score(rival))
        return list(dict.fromkeys(rival.steps[rival.done][0] for rival in going))[:WIDTH]

    def at(self, seen):
        """The rivals that go on from there."""
        return [r for r in self.rivals if not r.is_done() and r.steps[r.done][0] == seen]

    def score(self, rival):
        """At most the log-likelihood of a rival, less its cost.

        For a substitution the order of the chain rule in which the token comes last says the same
        of a perfect network, `single`; its gain is the mean of both.
        """
        logp = rival.logp
        if rival.edit and rival.edit.kind == "substitution":
            logp = (self.before.logp + logp + rival.edit.single) / 2
        return logp - rival.cost

    def ahead(self):
        """The Edits that were not seen to be less likely than what is there."""
        low = self.before.logp
        return [r.edit for r in self.everyone if r.edit and self.score(r) >= low]

    def left(self):
        """The Edits with their gains, beyond what is there."""
        for rival in self.rivals:
            if rival.edit:
                gain = self.score(rival) + rival.cost - self.before.logp
                yield rival.edit._replace(gain=gain, logp=rival.logp)
