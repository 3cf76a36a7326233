"""Regular expressions as automata over the tokens of a tokenizer: which sequences of them match.

The library outlines-core builds an automaton over bytes, in a separate process. Following the bytes
of each token from each state turns it into one over tokens. The tokens fall into few classes, whose
members lead to the same states, so a pass over a position costs states x classes.
"""

import contextvars
import copy
import functools
import itertools
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from nanomdlm.support.constrain import build_automaton
from nanomdlm.support.errors import UserError

PROGRAM = Path(build_automaton.__file__)
SECONDS = 30  # of waiting for it
MOST_CHARACTERS = 1 << 16  # of a pattern
MOST_STEPS = 1 << 30  # bytes of tokens that are followed from all states
MOST_CELLS = 1 << 20  # states x classes: a pass over a position takes some milliseconds
PASS = 1 << 22  # numbers that are in memory at once

# A function that raises where nobody waits for an automaton any more. It is called while one is
# built, in the context of the thread that builds.
still_wanted = contextvars.ContextVar("still_wanted", default=lambda: None)


def too_large(pattern):
    fix = "give shorter counts, fewer choices, or [a-z] in place of \\w"
    return UserError(f"the automaton of {pattern[:40]!r} is too large; {fix}")


# ---- Patterns
def run_builder(pattern):
    """Run build_automaton.py; return its numbers. Raises UserError as byte_automaton does."""
    command = [sys.executable, str(PROGRAM)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + SECONDS
    content = pattern.encode("utf-8", "surrogatepass")
    with subprocess.Popen(command, **pipes) as process:
        try:
            while True:
                still_wanted.get()()
                try:
                    out, err = process.communicate(content, timeout=0.05)
                    break
                except subprocess.TimeoutExpired:
                    content = None  # it is being sent
                    if time.monotonic() > deadline:
                        raise too_large(pattern) from None
        finally:
            process.kill()
    if process.returncode == build_automaton.REFUSED:
        raise UserError(err.decode(errors="replace"))
    if process.returncode:  # the limits, or the system, have ended it
        raise too_large(pattern)
    return np.frombuffer(out, np.int32)


@functools.lru_cache(maxsize=64)
def byte_automaton(pattern):
    """Return (next (Q + 1, 256) int32, accepts (Q + 1,) bool) over bytes; state Q is dead.

    Raises UserError for patterns that are invalid, match nothing, or need too much time or memory.
    """
    if len(pattern) > MOST_CHARACTERS:  # before it is copied anywhere
        raise too_large(pattern)
    numbers = run_builder(pattern)
    states, finals = numbers[:2]
    source, byte, target = numbers[2 + finals :].reshape(-1, 3).T
    table = np.full((states + 1, 256), states, np.int32)
    table[source, byte] = target
    accepts = np.zeros(states + 1, bool)
    accepts[numbers[2 : 2 + finals]] = True
    return table, accepts


def pattern_of_choices(choices):
    """The regular expression of a list of texts."""
    return "|".join(map(re.escape, choices))


# ---- Tokens
@functools.lru_cache(maxsize=8)
def spellings(tokenizer, is_first=False, space=""):
    """The bytes that each of V tokens adds to the text that is shown.

    is_first: whether the text begins there. space: what becomes of a space in front: "" (it stays),
    "drop", or "lent" (it must be there, and is shown before the gap). None: a gap that must match
    never has this token, such as [END], [MASK] and tokens without a text.
    """
    never = tokenizer.not_text()
    ids = range(tokenizer.vocab_size)
    texts = [b"" if i in never else tokenizer.token(i, is_first) for i in ids]
    if space == "lent":
        return [text[1:] if text.startswith(b" ") else None for text in texts]
    texts = [text or None for text in texts]
    return [text and without_space(text) for text in texts] if space else texts


def without_space(text):
    """The bytes of a token without a space in front; None: a part of a character, perhaps one."""
    shown = text.decode("utf-8", "ignore")
    if not shown:
        return None
    return text[len(shown[0].encode()) :] if shown[0].isspace() else text


class Spelling:
    """The bytes of some tokens, in columns: the first bytes, the second ones, and so on.

    Tokens are sorted by length, the longest first, so each column is of the first few.
    """

    def __init__(self, texts, ids):
        ids = [i for i in ids if texts[i] is not None]
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
    shortest  the number of tokens of the shortest text that matches
    follows  (S + 1, D) int64: the classes that lead on from a state; C where there are no more
    after    (S + 1, D) int64: the states to which these lead; S where there are no more
    """

    def __init__(self, pattern, over_bytes, next, classes, accepts, shortest):
        self.pattern = pattern
        self.over_bytes = over_bytes  # what byte_automaton returns
        self.shortest = shortest
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
        self.on_device = {}

    def to(self, device):
        """A copy of the tensors on a device; itself on the CPU."""
        if torch.device(device).type == "cpu":
            return self
        if device not in self.on_device:
            other = self.on_device[device] = copy.copy(self)
            for name in ("next", "classes", "accepts", "follows", "after"):
                setattr(other, name, getattr(self, name).to(device))
        return self.on_device[device]

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
        table, accepts = self.over_bytes
        state = 0
        for byte in text.encode("utf-8", "surrogatepass"):
            state = table[state, byte]
        return bool(accepts[state])


def anything():
    """`byte_automaton` of all texts but the empty one."""
    table = np.array([[1], [1], [2]], np.int32).repeat(256, 1)
    return table, np.array([False, True, False])


def within_line():
    """`byte_automaton` of ".+", a text in one line."""
    table, accepts = anything()
    table[:2, ord("\n")] = 2
    return table, accepts


def line():
    """`byte_automaton` of LINE, where only white space of ASCII is blank."""
    table, accepts = within_line()
    table[0, list(b" \t\r\v\f")] = 0
    return table, accepts


def after_lead(lead, table, accepts):
    """`byte_automaton` of the bytes of `lead`, and then of what a byte automaton takes."""
    n = len(lead)
    first = np.full((n, 256), n + len(table) - 1, np.int32)
    first[np.arange(n), list(lead)] = np.arange(1, n + 1)
    return np.concatenate((first, table + n)), np.concatenate((np.zeros(n, bool), accepts))


LINE = r"[ \t\r\v\f]*[^\s][^\n]*"  # a line, or the rest of one, that is not blank
BUILT_IN = {"": anything, ".+": within_line, LINE: line}  # patterns that need no library


@functools.lru_cache(maxsize=32)
def automaton_of(pattern, tokenizer, is_first=False, space="", lead=""):
    """Return the Automaton of a pattern over the tokens of a tokenizer.

    pattern: as for `byte_automaton`, or one of BUILT_IN. is_first, space: of the first token, see
    `spellings`. lead: text before what matches. Raises UserError for a pattern that cannot be used,
    and where no text of these tokens matches.
    """
    table, accepts = BUILT_IN[pattern]() if pattern in BUILT_IN else byte_automaton(pattern)
    if lead:
        table, accepts = after_lead(lead.encode(), table, accepts)
    dead = len(table) - 1
    V = tokenizer.vocab_size
    within = spellings(tokenizer)
    beginning = spellings(tokenizer, is_first, space)
    start = Spelling(beginning, range(V))
    later = Spelling(within, range(V))
    # 1. Which states of the automaton over bytes are those between tokens; each token's hash of
    # all states to which it leads.
    states = []
    is_known = np.zeros(dead + 1, bool)
    is_known[dead] = True
    g = np.random.default_rng(0)
    value = g.integers(1, 1 << 64, (2, dead + 1), dtype=np.uint64)
    value[:, dead] = 0
    hashes = np.zeros((2, V), np.uint64)

    def note(spelling, reached):
        for to in reached:
            factor = g.integers(0, 1 << 63, (2, 1), dtype=np.uint64) * 2 + 1
            hashes[:, spelling.ids] += factor * value[:, to]
        new = np.unique(reached)
        states.extend(new[~is_known[new]])
        is_known[new] = True

    note(start, start.follow(table, np.zeros(1, np.int64)))
    done = 0
    while done < len(states):
        still_wanted.get()()
        batch = states[done : done + max(1, PASS // V)]
        done += len(batch)
        if done * later.total > MOST_STEPS:
            raise too_large(pattern)
        note(later, later.follow(table, np.array(batch)))
    # 2. Its table, with a column for each class.
    _, members, classes = np.unique(hashes, axis=1, return_index=True, return_inverse=True)
    classes = classes.reshape(-1)
    states = np.array(states, np.int64)
    S = 1 + len(states)
    if (S + 1) * len(members) > MOST_CELLS:
        raise too_large(pattern)
    number = np.full(dead + 1, S)  # state over bytes -> state between tokens
    number[states] = np.arange(1, S)
    next = np.full((S + 1, len(members)), S)
    for texts, rows, sources in (
        (beginning, [0], np.zeros(1, int)),
        (within, number[states], states),
    ):
        some = Spelling(texts, members)
        next[np.ix_(rows, classes[some.ids])] = number[some.follow(table, sources)]
    token_accepts = np.zeros(S + 1, bool)
    token_accepts[1:S] = accepts[states]
    token_accepts[0] = accepts[0] and space != "lent"  # the space is some token's
    next, shortest = without_dead_ends(next, token_accepts)
    if shortest is None:
        raise UserError(f"no text of the tokens that this model knows matches {pattern[:40]!r}")
    return Automaton(pattern, (table, accepts), next, classes, token_accepts, shortest)


def without_dead_ends(next, accepts):
    """(`next` (S + 1, C) with states from which nothing matches replaced by the dead state, the
    number of tokens of the shortest text that matches, or None)"""
    alive = accepts.copy()
    shortest = None
    for n in itertools.count():
        still_wanted.get()()
        if shortest is None and alive[0]:
            shortest = n
        more = alive | alive[next].any(1)
        if (more == alive).all():
            return np.where(alive[next], next, len(next) - 1), shortest
        alive = more
