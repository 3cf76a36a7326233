"""Draws gaps that must match a regular expression.

The network predicts for each position of a gap how likely each token is, p_i(v), as if positions
did not depend on each other. An automaton with states q says which sequences of tokens match. Given
that a fill matches, that product of marginals is a Markov chain, which two passes draw from:

    backward    b_n(q) = [q accepts],  b_i(q) = sum_v p_i(v) b_{i+1}(next(q, v))
    forward     v_i in proportion to p_i(v) b_{i+1}(next(q_i, v)),  q_{i+1} = next(q_i, v_i)

(DINGO, 2505.23061, takes the maximum instead.) Everything is in logarithms, so nothing underflows.
Given tokens have probability 1. For positions that the network does not predict yet, such as later
tokens of an autoregressive model, b_i(q) is 1 if some text from q on matches, else 0. Some
positions of each call are kept; the rest show that a match is still possible, so no draw leads to a
dead end.
"""

from typing import NamedTuple

import torch

from nanomdlm.support import numerics
from nanomdlm.support.cli.python_arguments import whole_number
from nanomdlm.support.constrain.automaton import PASS, Automaton
from nanomdlm.support.errors import UserError


class Constraint(NamedTuple):
    """A gap in each row of a batch that must match the same automaton."""

    automaton: Automaton
    start: torch.Tensor  # (B,) int64, on the CPU
    length: torch.Tensor  # (B,) int64, on the CPU; 0: the row has no such gap

    def of_rows(self, rows):
        return self._replace(start=self.start[rows], length=self.length[rows])

    def inside(self, at, device):
        """(B, n) bool: the positions of the gap within the range `at`."""
        place = torch.arange(at.start, at.stop)
        first = self.start[:, None]
        return ((place >= first) & (place < first + self.length[:, None])).to(device)


def everywhere(model, x, matches, end_id):
    """The Constraints of gaps {position: templates.Gap} in all rows of x (B, T), checked."""
    constraints = []
    end = 0
    for place, one in sorted((matches or {}).items()):
        whole_number("a position in matches", place, 0, x.shape[1] - 1)
        if len(one.automaton.classes) != model.vocab_size:
            raise UserError(f"matches at {place} is of another tokenizer; give the model's own")
        if place < end or place + one.length > x.shape[1]:
            raise UserError(f"the gap of {one.length} tokens at {place} does not fit")
        end = place + one.length
        both = torch.tensor([[place], [one.length]]).expand(2, len(x))
        constraints.append(Constraint(one.automaton, *both))
    if constraints and end_id is not None:
        raise UserError("matches and end_id exclude each other; give forbid=[end_id]")
    return constraints


def by_row(templates):
    """The Constraints of a batch, from the segments of each row's template, with known lengths."""
    found = {}  # (number of the gap in its row, automaton) -> its start and length, (2, B)
    for row, segments in enumerate(templates):
        at = 0
        for number, segment in enumerate(segments):
            automaton = getattr(segment, "automaton", None)
            if automaton and segment.length:
                none = torch.zeros(2, len(templates), dtype=torch.int64)
                places = found.setdefault((number, automaton), none)
                places[:, row] = torch.tensor([at, segment.length])
            at += segment.size
    return [Constraint(automaton, *places) for (_, automaton), places in found.items()]


def ask_ahead(constraints, drawn, masked, at):
    """The positions (B, n) that the network must predict: `drawn`, and for those in a gap that must
    match, its other masks."""
    asked = drawn
    for constraint in constraints:
        inside = constraint.inside(at, drawn.device)
        asked = asked | (inside & masked & (inside & drawn).any(1, keepdim=True))
    return asked


def draw_matching(constraints, x, asked, at, is_ahead_known, logits, u, sampling, token, logp):
    """Draw again what is in gaps that must match, in place: token (m,) and logp (m, V).

    x          (B, T) ids before the call
    asked      (B, n) bool: m positions within the range `at`, which logits (m, V) and u (m,) are of
    is_ahead_known  whether the masks at the right of a drawn position have marginals
    sampling   (temperature, top_k, top_p), which apply to the constrained distributions
    logp       becomes their logarithm, at temperature 1
    """
    number = (asked.flatten().cumsum(0) - 1).view_as(asked)  # (B, n): the row of logits
    for constraint in constraints:
        has_draw = (constraint.inside(at, asked.device) & asked).any(1)
        rows = has_draw.nonzero()[:, 0]
        automaton = constraint.automaton.to(logits.device)
        longest = int(constraint.length.max())
        size = max(1, PASS // (automaton.follows.numel() + longest * automaton.S))
        for some in rows.split(size) if len(rows) else ():
            chain = Chain(constraint.of_rows(some.cpu()), automaton, x[some], at)
            chain.read(asked[some], number[some], logits, is_ahead_known)
            chain.draw(logits, u, sampling, token, logp)


class Chain:
    """One gap of R rows, of at most N tokens, in a call: marginals, backward and forward pass."""

    def __init__(self, constraint, automaton, x, at):
        self.automaton = automaton
        self.at = at
        device = x.device
        self.length = constraint.length.to(device)
        self.N = int(constraint.length.max())
        offset = torch.arange(self.N, device=device)
        self.place = constraint.start.to(device)[:, None] + offset  # (R, N) positions of x
        self.is_gap = offset < self.length[:, None]
        self.ids = x.gather(1, self.place.clamp(max=x.shape[1] - 1))

    def read(self, asked, number, logits, is_ahead_known):
        """Set what is known of each position: row (R, N) of logits, or -1; `mass`, `known`."""
        n = len(self.at)
        here = self.place - self.at.start
        is_here = self.is_gap & (here >= 0) & (here < n)
        here = here.clamp(0, n - 1)
        is_asked = is_here & asked.gather(1, here)
        self.row = torch.where(is_asked, number.gather(1, here), -1)
        if is_ahead_known:
            self.known = (self.place < self.at.stop).sum(1)  # offsets below have marginals
        else:
            offset = torch.arange(self.N, device=asked.device)
            self.known = 1 + torch.where(is_asked, offset, -1).amax(1)
        C = self.automaton.C
        mass = torch.full((*self.row.shape, C + 1), -torch.inf, dtype=torch.float64)
        mass = mass.to(logits.device)  # (R, N, C + 1): log p of each class
        stands = ~is_asked & self.is_gap & (self.place < self.at.stop)
        V = len(self.automaton.classes)
        standing = self.automaton.classes[self.ids.clamp(max=V - 1)]
        mass[stands] = mass[stands].scatter(1, standing[stands][:, None], 0.0)
        mass[is_asked] = class_mass(self.automaton, logits[self.row[is_asked]])
        self.backward(mass)

    def backward(self, mass):
        """Set self.ahead (N + 1, R, S + 1): log b with 0 .. N tokens to come, whose largest is 0.

        Raises UserError if nothing that matches can be drawn.
        """
        automaton = self.automaton
        R = len(mass)
        to_come = torch.arange(1, self.N + 1, device=mass.device)[:, None]
        offset = self.length - to_come  # (N, R)
        rows = torch.arange(R, device=mass.device)
        mass = mass[rows, offset.clamp(min=0)]  # (N, R, C + 1)
        is_unknown = offset >= self.known
        reached = [log_of(automaton.can_end(n)).to(mass.device) for n in range(self.N + 1)]
        ahead = [reached[0].expand(R, -1)]
        for n in range(1, self.N + 1):
            terms = mass[n - 1][:, automaton.follows] + ahead[-1][:, automaton.after]
            b = terms.logsumexp(-1)
            b = b - b.amax(1, keepdim=True).clamp(min=-1e300)
            # Where the network says nothing: what can still be reached.
            ahead.append(torch.where(is_unknown[n - 1, :, None], reached[n], b))
        self.ahead = torch.stack(ahead)
        if (self.ahead[self.length, rows, 0] == -torch.inf).any():
            raise UserError(f"nothing that matches {automaton.pattern[:40]!r} can be drawn")

    def draw(self, logits, u, sampling, token, logp):
        """Draw from the left, in place; see draw_matching."""
        automaton = self.automaton
        V = len(automaton.classes)
        known = self.known.minimum(self.length)
        state = torch.zeros_like(self.length)
        for offset in range(int(known.max())):
            row = self.row[:, offset]
            drawn = ((row >= 0) & (offset < known)).nonzero()[:, 0]
            id = self.ids[:, offset]
            if len(drawn):
                at = row[drawn]
                b = self.ahead[self.length[drawn] - offset - 1, drawn]  # (r, S + 1)
                b = b.gather(1, automaton.next[state[drawn]])  # (r, C)
                wanted = logits[at].double() + b[:, automaton.classes]  # (r, V)
                new = numerics.draw(wanted, u[at], *sampling)
                token[at] = new
                logp[at] = wanted.log_softmax(-1).to(logp.dtype)
                id = id.index_put((drawn,), new)
            moved = automaton.next[state, automaton.classes[id.clamp(max=V - 1)]]
            state = torch.where(offset < known, moved, state)


def log_of(is_true):
    """0 where true, else -infinity, in float64."""
    return torch.where(is_true, 0.0, -torch.inf).double()


def class_mass(automaton, logits):
    """(m, C + 1): the log-probability of each class under logits (m, V), -infinity for the last."""
    logp = logits.double().log_softmax(-1)
    m, C = len(logp), automaton.C
    classes = automaton.classes
    most = logp.new_full((m, C), -torch.inf)
    most = most.scatter_reduce(1, classes.expand(m, -1), logp, "amax")
    shift = most.clamp(min=-1e300)  # a class without any: exp(-inf) below, and the log of 0
    total = logp.new_zeros(m, C).scatter_add(
        1, classes.expand(m, -1), (logp - shift[:, classes]).exp()
    )
    return torch.cat([total.log() + shift, logp.new_full((m, 1), -torch.inf)], 1)
