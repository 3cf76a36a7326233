"""Gaps that must match a regular expression.

The network says for each position of a gap how likely each token is, p_i(v), as if positions did
not depend on each other. An automaton with states q says which sequences of tokens match. Given
that a fill matches, that product of marginals is a Markov chain, which two passes draw from:

    backward    b_n(q) = [q accepts],  b_i(q) = sum_v p_i(v) b_{i+1}(next(q, v))
    forward     v_i in proportion to p_i(v) b_{i+1}(next(q_i, v)),  q_{i+1} = next(q_i, v_i)

(DINGO, 2505.23061, takes the maximum instead.) All is in logarithms, so nothing underflows. Tokens
that stand have probability 1. Where the network says nothing, as of what an autoregressive model
has not come to yet, b_i(q) is 1 if some text from q on matches, else 0. Of each call some positions
are kept, the rest shows that a match is still possible: no draw leads to a dead end.

The tokens of an automaton fall into few classes of which each leads to the same states, so a pass
costs states x classes, and p is summed by class once.
"""

import functools
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from support import numerics
from support.arguments import check_text, whole_number
from support.environment import optional
from support.errors import UserError
from support.infill import build_automaton

PROGRAM = Path(build_automaton.__file__)
SECONDS = 30  # of waiting for it
MOST_BYTES = 1 << 16  # of a pattern
MOST_COUNT = 10_000  # in a{COUNT}
MOST_STEPS = 1 << 30  # bytes of tokens that are followed from all states
MOST_CELLS = 1 << 20  # states x classes: a pass over a position takes some milliseconds
PASS = 1 << 22  # numbers of a pass that are in memory at once
SMALLER = "give shorter counts, fewer choices, or [a-z] in place of \\w"

# Escaped characters and classes, in which signs have another meaning.
ESCAPE_OR_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


class ConstrainedGap(NamedTuple):
    """A gap of a template, or of a text of ids, whose fill must match."""

    pattern: str  # a regular expression
    length: int | None = None  # tokens; None: unknown
    automaton: "Automaton | None" = None  # None until its place in the text is known
    choices: tuple = ()  # of a list of texts
    spelled: tuple = ()  # their ids, each a tuple

    @property
    def least(self):
        """The smallest number of tokens."""
        if self.length is not None:
            return self.length
        if self.spelled:
            return min(map(len, self.spelled))
        return 1 if self.automaton is None else self.automaton.shortest


# ---- Patterns
def check_pattern(pattern):
    """Raise UserError for a pattern that is no whole one, too long, or read in several ways."""
    shown = repr(pattern[:40])
    if len(pattern.encode()) > MOST_BYTES:
        raise UserError(f"the pattern {shown} has more than {MOST_BYTES >> 10} kB; {SMALLER}")
    escapes = ESCAPE_OR_CLASS.findall(pattern)
    rest = ESCAPE_OR_CLASS.sub("_", pattern)
    if re.search(r"[\^$]", rest) or any(re.fullmatch(r"\\[bBAzZ<>]", each) for each in escapes):
        fix = "leave them out, or write \\^ and \\$ for the characters"
        raise UserError(f"{shown} has an anchor, and a pattern matches the whole gap; {fix}")
    if re.search(r"\(\?<?[=!>]", rest):
        raise UserError(f"{shown} looks around, which no automaton can; write what the gap has")
    if any(re.fullmatch(r"\\[1-9]", each) for each in escapes) or "(?P=" in rest:
        fix = "write a list of texts: [___|aa|bb]"
        raise UserError(f"{shown} refers back, which no automaton can; {fix}")
    if re.search(r"[*+?}]\+", rest):
        fix = "leave out the second sign"
        raise UserError(f"{shown} has a possessive count, which is not known; {fix}")
    depth = np.cumsum([(c == "(") - (c == ")") for c in rest] or [0])
    if depth.min() < 0 or depth[-1]:
        raise UserError(f"{shown} is no regular expression: its brackets do not pair; mend it")
    counts = re.findall(r"[0-9]+", " ".join(re.findall(r"\{[0-9, ]*\}", rest)))
    if any(len(count) > 5 or int(count) > MOST_COUNT for count in counts):
        raise UserError(f"{shown} has a count above {MOST_COUNT:,}; give a smaller one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            re.compile(pattern)
        except (FutureWarning, DeprecationWarning) as e:
            fix = "write \\ before such a sign"
            raise UserError(f"programs read {shown} in several ways ({e}); {fix}") from None
        except (re.error, OverflowError, RecursionError):
            pass  # the library has \p{L}, and says itself what it refuses


def why_python_refuses(pattern):
    """What Python says of a pattern, which is clearer than what the library says; "" if nothing."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        return str(e)
    return ""


def run_builder(pattern):
    """Run build_automaton.py; return its numbers. Raises ValueError, MemoryError, TimeoutExpired"""
    command = [sys.executable, str(PROGRAM)]
    run = subprocess.run(command, input=pattern.encode(), capture_output=True, timeout=SECONDS)
    if run.returncode == build_automaton.REFUSED:
        raise ValueError(run.stderr.decode(errors="replace"))
    if run.returncode:  # the limits, or the system, have ended it
        raise MemoryError
    return np.frombuffer(run.stdout, np.int32)


@functools.lru_cache(maxsize=8)
def byte_automaton(pattern):
    """Return (next (Q + 1, 256) int32, accepts (Q + 1,) bool) over bytes; state Q is dead.

    Raises UserError for what is no regular expression, matches nothing, or takes too much.
    """
    optional("outlines_core", "a gap that must match")
    check_pattern(pattern)
    shown = repr(pattern[:40])
    try:
        numbers = run_builder(pattern)
    except (MemoryError, subprocess.TimeoutExpired):
        raise UserError(f"the automaton of {shown} is too large; {SMALLER}") from None
    except ValueError as e:
        if "no transitions" in str(e):
            raise UserError(f"no text matches {shown}; mend the pattern") from None
        why = (why_python_refuses(pattern) or str(e))[:200]
        what = f"{shown} is no regular expression that outlines-core takes"
        raise UserError(f"{what} ({why}); mend it, or write \\ before a sign") from None
    states, finals = numbers[:2]
    source, byte, target = numbers[2 + finals :].reshape(-1, 3).T
    table = np.full((states + 1, 256), states, np.int32)
    table[source, byte] = target
    accepts = np.zeros(states + 1, bool)
    accepts[numbers[2 : 2 + finals]] = True
    return table, accepts


def pattern_of_choices(choices):
    """The regular expression of a list of texts; signs are escaped as all programs read them."""
    return "|".join(re.sub(r"[^\w\s]|_", lambda m: escaped(m[0]), text) for text in choices)


def escaped(c):
    return f"\\{c}" if c in "\\.+*?()|[]{}^$#&-~" else c


# ---- Tokens
@functools.lru_cache(maxsize=4)
def spellings(tokenizer):
    """Return two lists of V: the bytes of each token within a text, and at the beginning of one.

    None: a gap that must match never has it, as [END], [MASK] and tokens without a text.
    """
    never = {tokenizer.end_id, tokenizer.mask_id, *tokenizer.special_ids().values()}
    if tokenizer.kind == "file":
        never.add(tokenizer.library.unknown_id)

    def drawable(first):
        ids = range(tokenizer.vocab_size)
        return [None if i in never else tokenizer.token(i, first) or None for i in ids]

    return drawable(False), drawable(True)


class Spelling:
    """The bytes of some tokens, in columns: the first bytes, the second ones, and so on.

    Tokens are sorted by length, the longest first, so each column is of the first few.
    """

    def __init__(self, texts, ids):
        self.ids = np.array(sorted(ids, key=lambda i: -len(texts[i])), np.int64)
        spelled = [texts[i] for i in self.ids]
        self.total = sum(map(len, spelled))
        longest = len(spelled[0]) if spelled else 0
        self.columns = [
            np.frombuffer(bytes(text[j] for text in spelled if len(text) > j), np.uint8)
            for j in range(longest)
        ]

    def follow(self, table, states):
        """(F, n) the states after each token from each of the states (F,)."""
        at = np.repeat(states[:, None].astype(np.int32), len(self.ids), 1)
        for column in self.columns:
            n = len(column)
            at[:, :n] = table[at[:, :n], column]
        return at


# ---- Automata over tokens
class Automaton:
    """Which sequences of tokens match; state 0 is the first, S the dead one.

    next     (S + 1, C) int64: state, class -> state
    classes  (V,) int64: token -> class
    accepts  (S + 1,) bool
    is_free  whether any text of tokens matches, but an empty one: then there is nothing to do
    follows  (S + 1, D) int64: the classes that lead on from a state; C where there are no more
    """

    def __init__(self, pattern, bytes_table, bytes_accept, next, classes, accepts, is_free):
        self.pattern = pattern
        self.bytes_table = bytes_table
        self.bytes_accept = bytes_accept
        self.is_free = is_free
        self.next = torch.from_numpy(next)
        self.classes = torch.from_numpy(classes)
        self.accepts = torch.from_numpy(accepts)
        self.S = len(next) - 1
        self.C = next.shape[1]
        leads = self.next != self.S
        D = max(1, int(leads.sum(1).max()))
        order = leads.int().argsort(dim=1, descending=True, stable=True)[:, :D]
        self.follows = order.masked_fill(~leads.gather(1, order), self.C)
        dead = torch.full((self.S + 1, 1), self.S)
        self.after = torch.cat([self.next, dead], 1).gather(1, self.follows)
        self.reached = [self.accepts]  # by n: (S + 1,) bool, whether n tokens from there match
        self.shortest = shortest(self)

    def to(self, device):
        """A copy of the tensors on a device; itself on the CPU."""
        if torch.device(device).type == "cpu":
            return self
        if not hasattr(self, "copies"):
            self.copies = {}
        if device not in self.copies:
            copy = object.__new__(Automaton)
            for name, value in vars(self).items():
                if name != "copies":
                    is_tensor = isinstance(value, torch.Tensor)
                    setattr(copy, name, value.to(device) if is_tensor else value)
            self.copies[device] = copy
        return self.copies[device]

    def can_end(self, n):
        """(S + 1,) bool: whether a text of n tokens from each state on matches."""
        while len(self.reached) <= n:
            self.reached.append(self.reached[-1][self.after.cpu()].any(1))
        return self.reached[n]

    def fits(self, n):
        """Whether a text of n tokens matches."""
        return bool(self.can_end(n)[0])

    def lengths(self, most):
        """The numbers of tokens, up to `most`, of texts that match."""
        return [n for n in range(most + 1) if self.fits(n)]

    def takes(self, ids):
        """Whether these tokens match."""
        state = 0
        for id in ids:
            state = self.next[state, self.classes[id]]
        return bool(self.accepts[state])

    def matches(self, text):
        """Whether a text matches, by the automaton over bytes."""
        state = 0
        for byte in text.encode("utf-8", "surrogatepass"):
            state = self.bytes_table[state, byte]
        return bool(self.bytes_accept[state])


def shortest(automaton):
    """The number of tokens of the shortest text that matches; None if none does."""
    state = torch.zeros(automaton.S + 1, dtype=torch.bool)
    state[0] = True
    for n in range(automaton.S + 1):
        if (state & automaton.accepts).any():
            return n
        reached = torch.zeros_like(state)
        reached[automaton.after[state].flatten()] = True
        reached[automaton.S] = False
        state = reached
    return None


def first_spellings(tokenizer, is_first, space):
    """The bytes that each token adds to the text that is shown, as the first one of a gap.

    is_first: whether the text begins there. space: what becomes of a space in front: "" (it stays),
    "drop", or "lent" (it must be there, and is shown before the gap).
    """
    within, first = spellings(tokenizer)
    texts = first if is_first else within
    if not space:
        return texts
    return [None if text is None else without_space(text, space) for text in texts]


def without_space(text, space):
    if space == "lent":
        return text[1:] if text[:1] == b" " else None
    shown = text.decode("utf-8", "ignore")
    if not shown:  # a part of a character, which may be a space
        return None
    return text[len(shown[0].encode()) :] if shown[0].isspace() else text


@functools.lru_cache(maxsize=32)
def automaton_of(pattern, tokenizer, is_first=False, space=""):
    """Return the Automaton of a pattern over the tokens of a tokenizer.

    is_first, space: see `first_spellings`. Raises UserError for a pattern that cannot be used, and
    where no text of these tokens matches.
    """
    table, accepts = byte_automaton(pattern)
    within, _ = spellings(tokenizer)
    beginning = first_spellings(tokenizer, is_first, space)
    shown = repr(pattern[:40])

    later = Spelling(within, [i for i, text in enumerate(within) if text])
    start = Spelling(beginning, [i for i, text in enumerate(beginning) if text is not None])
    dead = len(table) - 1
    # 1. Which states of the automaton over bytes are those between tokens; each token's hash of
    # all states to which it leads.
    V = tokenizer.vocab_size
    g = np.random.default_rng(0)
    value = g.integers(1, 1 << 64, (2, dead + 1), dtype=np.uint64)
    value[:, dead] = 0
    hashes = np.zeros((2, V), np.uint64)

    def note(spelling, reached):
        for to in reached:
            factor = g.integers(0, 1 << 63, (2, 1), dtype=np.uint64) * 2 + 1
            hashes[:, spelling.ids] += factor * value[:, to]

    reached = start.follow(table, np.zeros(1, np.int64))
    note(start, reached)
    number = {}  # state over bytes -> state between tokens
    todo = [int(q) for q in np.unique(reached) if q != dead]
    work = 0
    while todo:
        batch = todo[: max(1, PASS // max(1, V))]
        todo = todo[len(batch) :]
        number |= {q: 1 + len(number) + i for i, q in enumerate(batch)}
        work += len(batch) * later.total
        if work > MOST_STEPS:
            raise UserError(f"the automaton of {shown} is too large; {SMALLER}")
        reached = later.follow(table, np.array(batch))
        note(later, reached)
        known = {*number, *todo, dead}
        todo += [int(q) for q in np.unique(reached) if int(q) not in known]
    # 2. Its table, with a column for each class.
    _, members, classes = np.unique(hashes, axis=1, return_index=True, return_inverse=True)
    S = 1 + len(number)
    if (S + 1) * len(members) > MOST_CELLS:
        raise UserError(f"the automaton of {shown} is too large; {SMALLER}")
    of_state = np.full(dead + 1, S, np.int64)
    of_state[list(number)] = list(number.values())
    next = np.full((S + 1, len(members)), S, np.int64)
    column = {int(id): c for c, id in enumerate(members)}
    some = Spelling(beginning, [i for i in column if beginning[i] is not None])
    next[0, [column[i] for i in some.ids.tolist()]] = of_state[some.follow(table, np.zeros(1, int))]
    some = Spelling(within, [i for i in column if within[i]])
    if number:
        columns = [column[i] for i in some.ids.tolist()]
        next[np.ix_([*number.values()], columns)] = of_state[
            some.follow(table, np.array([*number]))
        ]
    token_accepts = np.zeros(S + 1, bool)
    token_accepts[[*number.values()]] = accepts[[*number]]
    token_accepts[0] = accepts[0] and space != "lent"  # the space is some token's
    next = without_dead_ends(next, token_accepts)
    classes = classes.reshape(-1)
    # Any fill but an empty one matches: then there is nothing to do.
    marks = {tokenizer.end_id, tokenizer.mask_id} & {*range(V)}
    is_free = len(later.ids) + len(marks) == V and bool(token_accepts[1:S].all())
    is_free &= bool((next[:S, classes[later.ids]] != S).all())
    made = Automaton(pattern, table, accepts, next, classes, token_accepts, is_free)
    if made.shortest is None:
        what = f"no text of the tokens that this model knows matches {shown}"
        raise UserError(f"{what}; give a pattern of the characters of its training text")
    return made


def without_dead_ends(next, accepts):
    """`next` (S + 1, C) with the dead state in place of those from which nothing matches."""
    alive = accepts.copy()
    while True:
        more = alive | alive[next].any(1)
        if (more == alive).all():
            break
        alive = more
    return np.where(alive[next], next, len(next) - 1)


# ---- Drawing
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


def gap(pattern, length, tokenizer):
    """Return a gap of `length` tokens that must match, for `matches` of sample.unmask and generate.

    It is for a position within a text, whose tokens are shown as they are. Raises UserError for a
    pattern that cannot be used, or that no text of this length matches.
    """
    length = whole_number("length", length, 1)
    pattern = check_text(pattern)
    automaton = automaton_of(pattern, tokenizer)
    if not automaton.fits(length):
        raise UserError(f"no text of {length} tokens matches {pattern[:40]!r}; give another length")
    return ConstrainedGap(pattern, length, automaton)


def everywhere(model, x, matches, end_id):
    """The Constraints of gaps {position: ConstrainedGap} in all rows of x (B, T), checked."""
    constraints = []
    end = 0
    for place, one in sorted((matches or {}).items()):
        whole_number("a position in matches", place, 0, x.shape[1] - 1)
        if len(one.automaton.classes) != model.vocab_size:
            raise UserError(f"matches at {place} is of another tokenizer; give the model's own")
        if place < end or place + one.length > x.shape[1]:
            fix = "give places that are apart and within the text"
            raise UserError(f"the gap of {one.length} tokens at {place} does not fit; {fix}")
        end = place + one.length
        both = torch.tensor([[place], [one.length]]).expand(2, len(x))
        constraints.append(Constraint(one.automaton, *both))
    if constraints and end_id is not None:
        raise UserError("matches and end_id exclude each other; give forbid=[end_id]")
    return [each for each in constraints if not each.automaton.is_free]


def by_row(templates):
    """The Constraints of a batch, from the segments of each row's template, with known lengths."""
    found = {}  # (number of the gap in its row, automaton) -> (start, length) of each row
    for row, segments in enumerate(templates):
        at = 0
        for number, segment in enumerate(segments):
            if isinstance(segment, ConstrainedGap):
                if segment.length and not segment.automaton.is_free:
                    places = found.setdefault((number, segment.automaton), {})
                    places[row] = (at, segment.length)
                at += segment.length
            else:
                at += len(segment.ids) if isinstance(segment, str) else segment
    constraints = []
    for (_, automaton), places in found.items():
        both = torch.zeros(2, len(templates), dtype=torch.int64)
        for row, (start, length) in places.items():
            both[:, row] = torch.tensor([start, length])
        constraints.append(Constraint(automaton, *both))
    return constraints


def ask_ahead(constraints, drawn, masked, at):
    """The positions (B, n) of which the network must tell: `drawn`, and where that is in a gap that
    must match, the other masks of it."""
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
        some_unknown = is_unknown.any(1).tolist()
        for n in range(1, self.N + 1):
            terms = mass[n - 1][:, automaton.follows] + ahead[-1][:, automaton.after]
            b = terms.logsumexp(-1)
            b = b - b.amax(1, keepdim=True).clamp(min=-1e300)
            if some_unknown[n - 1]:  # the network says nothing: what can still be reached
                b = torch.where(is_unknown[n - 1, :, None], reached[n], b)
            ahead.append(b)
        self.ahead = torch.stack(ahead)
        if (self.ahead[self.length, rows, 0] == -torch.inf).any():
            what = f"nothing that matches {automaton.pattern[:40]!r} can be drawn at a gap"
            raise UserError(f"{what}; change the pattern, or what is given or forbidden there")

    def draw(self, logits, u, sampling, token, logp):
        """Draw from the left, in place; see draw_matching."""
        automaton = self.automaton
        V = len(automaton.classes)
        known = self.known.minimum(self.length)
        rows = torch.arange(len(self.length), device=logits.device)
        state = torch.zeros_like(rows)
        constrained = []
        for offset in range(int(known.max())):
            row = self.row[:, offset]
            is_drawn = row >= 0
            if (offset >= known).any() or not is_drawn.all():
                drawn = (is_drawn & (offset < known)).nonzero()[:, 0]
            else:
                drawn = rows
            id = self.ids[:, offset]
            if len(drawn):
                at = row[drawn]
                b = self.ahead[self.length[drawn] - offset - 1, drawn]  # (r, S + 1)
                b = b.gather(1, automaton.next[state[drawn]])  # (r, C)
                wanted = logits[at].double() + b[:, automaton.classes]  # (r, V)
                new = numerics.draw(wanted, u[at], *sampling)
                token[at] = new
                constrained.append((at, wanted))
                id = id.index_put((drawn,), new)
            moved = automaton.next[state, automaton.classes[id.clamp(max=V - 1)]]
            state = torch.where(offset < known, moved, state)
        at = torch.cat([at for at, _ in constrained])
        wanted = torch.cat([wanted for _, wanted in constrained])
        logp[at] = wanted.log_softmax(-1).to(logp.dtype)


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
