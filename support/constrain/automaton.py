"""Regular expressions as automata over the tokens of a tokenizer: which sequences of them match.

The library outlines-core builds an automaton over bytes, in a separate process. Following the bytes
of each token from each state turns it into one over tokens. The tokens fall into few classes, whose
members lead to the same states, so a pass over a position costs states x classes.
"""

import contextvars
import functools
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
MOST_STEPS = 1 << 30  # bytes of tokens that are followed from all states
MOST_CELLS = 1 << 20  # states x classes: a pass over a position takes some milliseconds
PASS = 1 << 22  # numbers that are in memory at once
SMALLER = build_automaton.SMALLER

# A function that raises where nobody waits for an automaton any more. It is called while one is
# built, in the context of the thread that builds.
still_wanted = contextvars.ContextVar("still_wanted", default=lambda: None)


def remembered(maxsize):
    """functools.lru_cache that remembers UserErrors too: what was refused once takes no time."""

    def decorate(function):
        @functools.lru_cache(maxsize)
        def outcome(*args):
            try:
                return function(*args), None
            except UserError as e:
                return None, str(e)

        @functools.wraps(function)
        def call(*args):
            value, refusal = outcome(*args)
            if refusal is not None:
                raise UserError(refusal)
            return value

        call.cache_clear = outcome.cache_clear
        return call

    return decorate


# ---- Patterns
def run_builder(pattern):
    """Run build_automaton.py; return its numbers. Raises ValueError, MemoryError, TimeoutExpired"""
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
                        raise
        finally:
            process.kill()
    if process.returncode == build_automaton.REFUSED:
        raise ValueError(err.decode(errors="replace"))
    if process.returncode:  # the limits, or the system, have ended it
        raise MemoryError
    return np.frombuffer(out, np.int32)


@remembered(maxsize=64)
def byte_automaton(pattern):
    """Return (next (Q + 1, 256) int32, accepts (Q + 1,) bool) over bytes; state Q is dead.

    Raises UserError for patterns that are invalid, match nothing, or need too much time or memory.
    """
    if len(pattern) > build_automaton.MOST_BYTES:  # before it is copied anywhere
        raise UserError(build_automaton.too_long(pattern))
    try:
        numbers = run_builder(pattern)
    except (MemoryError, subprocess.TimeoutExpired):
        raise UserError(f"the automaton of {pattern[:40]!r} is too large; {SMALLER}") from None
    except ValueError as e:
        raise UserError(str(e)) from None
    states, finals = numbers[:2]
    source, byte, target = numbers[2 + finals :].reshape(-1, 3).T
    table = np.full((states + 1, 256), states, np.int32)
    table[source, byte] = target
    accepts = np.zeros(states + 1, bool)
    accepts[numbers[2 : 2 + finals]] = True
    return table, accepts


def pattern_of_choices(choices):
    """The regular expression of a list of texts; special characters are escaped portably."""
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
    is_free  whether any non-empty text of tokens matches: then there is nothing to do
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
        still_wanted.get()()
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


@remembered(maxsize=32)
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
        still_wanted.get()()
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
    """`next` (S + 1, C) with states from which nothing matches replaced by the dead state."""
    alive = accepts.copy()
    while True:
        still_wanted.get()()
        more = alive | alive[next].any(1)
        if (more == alive).all():
            break
        alive = more
    return np.where(alive[next], next, len(next) - 1)
