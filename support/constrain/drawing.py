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
    """A gap that must match an automaton, at the same place in all rows of a batch."""

    automaton: Automaton
    start: int
    length: int

    def inside(self, at, device):
        """(n,) bool: the positions of the gap within the range `at`."""
        place = torch.arange(at.start, at.stop, device=device)
        return (place >= self.start) & (place < self.start + self.length)


def of_positions(model, x, matches, end_id):
    """The Constraints of gaps {position: templates.Gap} in x (B, T), checked."""
    constraints = []
    end = 0
    for place, one in sorted((matches or {}).items()):
        place = whole_number("a position in matches", place, 0, x.shape[1] - 1)
        if len(one.automaton.classes) != model.vocab_size:
            raise UserError(f"matches at {place} is of another tokenizer; give the model's own")
        if place < end or place + one.length > x.shape[1]:
            raise UserError(f"the gap of {one.length} tokens at {place} does not fit")
        end = place + one.length
        constraints.append(Constraint(one.automaton, place, one.length))
    if constraints and end_id is not None:
        raise UserError("matches and end_id exclude each other; give forbid=[end_id]")
    return constraints


def of_template(segments):
    """The Constraints of the gaps of a template, with known lengths."""
    constraints = []
    at = 0
    for segment in segments:
        if segment.is_gap and segment.automaton and segment.length:
            constraints.append(Constraint(segment.automaton, at, segment.length))
        at += segment.size
    return constraints


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
        size = max(1, PASS // (automaton.follows.numel() + constraint.length * automaton.S))
        for some in rows.split(size) if len(rows) else ():
            chain = Chain(automaton, x[some, constraint.start :][:, : constraint.length])
            chain.read(constraint, at, asked[some], number[some], logits, is_ahead_known)
            chain.draw(logits, u, sampling, token, logp)


class Chain:
    """A gap in R rows, ids (R, N), in a call: marginals, backward and forward pass."""

    def __init__(self, automaton, ids):
        self.automaton = automaton
        self.ids = ids
        self.N = ids.shape[1]

    def read(self, constraint, at, asked, number, logits, is_ahead_known):
        """Set what is known of each position: row (R, N) of logits, or -1; known (R,): offsets
        below it have marginals."""
        first = constraint.start - at.start
        offset = torch.arange(self.N, device=asked.device)
        is_here = (offset + first >= 0) & (offset + first < len(at))
        here = (offset + first).clamp(0, len(at) - 1)
        is_asked = is_here & asked[:, here]
        self.row = torch.where(is_asked, number[:, here], -1)
        is_before = offset + constraint.start < at.stop
        if is_ahead_known:
            self.known = is_before.sum().expand(len(asked))
        else:
            self.known = 1 + torch.where(is_asked, offset, -1).amax(1)
        C = self.automaton.C
        mass = torch.full((*self.row.shape, C + 1), -torch.inf, dtype=torch.float64)
        mass = mass.to(logits.device)  # (R, N, C + 1): log p of each class
        stands = ~is_asked & is_before
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
        ahead = []
        for n in range(self.N + 1):
            # Where the network says nothing: what can still be reached.
            b = torch.where(automaton.can_end(n), 0.0, -torch.inf).double().to(mass.device)
            b = b.expand(len(mass), -1)
            if n:
                offset = self.N - n
                terms = mass[:, offset, automaton.follows] + ahead[-1][:, automaton.after]
                sums = terms.logsumexp(-1)
                sums = sums - sums.amax(1, keepdim=True).clamp(min=-1e300)
                b = torch.where((offset < self.known)[:, None], sums, b)
            ahead.append(b)
        self.ahead = torch.stack(ahead)
        if (self.ahead[self.N, :, 0] == -torch.inf).any():
            raise UserError(f"nothing that matches {automaton.pattern[:40]!r} can be drawn")

    def draw(self, logits, u, sampling, token, logp):
        """Draw from the left, in place; see draw_matching."""
        automaton = self.automaton
        V = len(automaton.classes)
        state = torch.zeros_like(self.known)
        for offset in range(int(self.known.max())):
            is_known = offset < self.known
            row = self.row[:, offset]
            drawn = ((row >= 0) & is_known).nonzero()[:, 0]
            id = self.ids[:, offset]
            if len(drawn):
                at = row[drawn]
                b = self.ahead[self.N - offset - 1, drawn]  # (r, S + 1)
                b = b.gather(1, automaton.next[state[drawn]])  # (r, C)
                wanted = logits[at].double() + b[:, automaton.classes]  # (r, V)
                new = numerics.draw(wanted, u[at], *sampling)
                token[at] = new
                logp[at] = wanted.log_softmax(-1).to(logp.dtype)
                id = id.index_put((drawn,), new)
            moved = automaton.next[state, automaton.classes[id.clamp(max=V - 1)]]
            state = torch.where(is_known, moved, state)


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
