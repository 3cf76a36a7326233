"""What is allowed at the open positions of a template: a filter on what a search expands."""

import functools
from types import SimpleNamespace

import numpy as np
import torch

from nanomdlm.support.infill.templates import (
    Gap,
    joined,
    keeps_spaces,
    matches,
    to_texts,
)

MAX_SUFFIXES = 256  # in the memo of `matching`


class Filter:
    """The fills that a template may have.

    segments   of the template, with known lengths
    open       the positions of its gaps
    only       [(number of an open position, the fills (m, n) from there on)]: no others are allowed
    is_endless  whether the last gap ends with [END] or a line break, so that its length is open
    """

    def __init__(self, model, tokenizer, segments, open, only=(), is_endless=False):
        self.tokenizer = tokenizer
        self.segments = segments
        self.open = open
        self.only = [(first, np.array(fills)) for first, fills in only]
        self.may_draw = drawable(tokenizer, model.vocab_size).clone()
        self.starts_with_space = torch.from_numpy(tokenizer.space_tokens)
        self.line_ends = None  # (V,) bool: the tokens that end the last gap, from its second one on
        self.last = 0  # the number of the first open position of the last gap, if that is endless
        if is_endless:
            self.last = len(open) - segments[-1].length
            self.line_ends = breaks(tokenizer, model.vocab_size)
            if tokenizer.end_id is not None:
                self.may_draw[tokenizer.end_id] = True
        self.must_match = []  # (number of the first open position, Automaton, length, `ahead`)
        self.spaced = []  # numbers of positions at which a token must begin with a space
        self.template = []  # ids, with None at the open positions
        k = 0
        for segment in segments:
            if segment.lends_space:
                self.spaced.append(k)
            if not segment.is_gap:
                self.template += segment.ids
                continue
            automaton = segment.automaton
            if not automaton and tokenizer.kind == "byte" and not (is_endless and k == self.last):
                automaton = whole_characters(model.vocab_size)
            if automaton and segment.length:
                ahead = {(): automaton.accepts}
                self.must_match.append((k, automaton, segment.length, ahead))
            self.template += [None] * segment.length
            k += segment.length

    def allowed(self, fill, k):
        """(V,) bool: the ids that may stand at open position k of a partial fill."""
        allowed = self.may_draw
        if k < self.last and self.tokenizer.end_id is not None:
            allowed = allowed.clone()
            allowed[self.tokenizer.end_id] = False
        if k in self.spaced:
            allowed = allowed & self.starts_with_space
        for first, automaton, length, ahead in self.must_match:
            if first <= k < first + length:
                part = fill[first : first + length]
                allowed = allowed & matching(automaton, part, k - first, ahead)
        for first, fills in self.only:
            if first <= k < first + fills.shape[1]:
                part = np.array(fill[first : first + fills.shape[1]])
                fits = ((part < 0) | (fills == part)).all(1)
                listed = torch.zeros_like(self.may_draw)
                listed[fills[fits, k - first]] = True
                allowed = allowed & listed
        return allowed

    def ends(self, k, id):
        """Whether a text ends with this id at open position k."""
        if self.line_ends is None:
            return False
        if k < self.last:
            return False
        return id == self.tokenizer.end_id or (k > self.last and bool(self.line_ends[id]))

    def placed(self, fill):
        """(segments, ids) of the text with a complete fill."""
        fill = list(fill)
        segments = self.segments
        is_ended = bool(fill) and self.ends(len(fill) - 1, fill[-1])
        if is_ended:
            before = len(self.open) - segments[-1].length
            segments = [*segments[:-1], Gap(len(fill) - before - is_ended)]
        values = iter(fill)
        ids = [next(values, None) if id is None else id for id in self.template]
        return segments, [id for id in ids if id is not None]

    def accept(self, fill):
        """The text with a complete fill; None if it may not be shown so."""
        segments, ids = self.placed(fill)
        texts = to_texts(segments, ids, self.tokenizer)
        if not (
            keeps_spaces(segments, ids, self.tokenizer) and matches(segments, texts, self.tokenizer)
        ):
            return None
        is_broken = any("\ufffd" in text for text, is_filled in texts if is_filled)
        if is_broken and self.tokenizer.kind != "char":
            return None  # half a character
        return joined(texts)


@functools.lru_cache(4)
def drawable(tokenizer, vocab_size):
    """(V,) bool: the ids that are text."""
    may_draw = torch.ones(vocab_size, dtype=torch.bool)
    may_draw[[id for id in tokenizer.not_text() if id is not None and id < vocab_size]] = False
    return may_draw


@functools.lru_cache(4)
def breaks(tokenizer, vocab_size):
    """(V,) bool: the ids whose text has a line break."""
    if tokenizer.kind == "id":
        return torch.zeros(vocab_size, dtype=torch.bool)
    return torch.tensor(["\n" in tokenizer.piece(id) for id in range(vocab_size)])


@functools.lru_cache(1)
def whole_characters(vocab_size):
    """An automaton over bytes: UTF-8, whose state is the number of bytes that a character lacks.
    (The few sequences that UTF-8 forbids beyond that are refused when a fill is complete.)"""
    # Kinds of bytes: 0 ASCII, 1 to 3 begin a character of so many more, 4 goes on, 5 never.
    kinds = torch.full((vocab_size,), 5)
    kinds[:0x80], kinds[0x80:0xC0], kinds[0xC2:0xE0] = 0, 4, 1
    kinds[0xE0:0xF0], kinds[0xF0:0xF5] = 2, 3
    S = 4  # the state that is not text
    step = torch.full((S + 1, 6), S)
    step[0, :4] = torch.arange(4)
    step[1:4, 4] = torch.arange(3)
    accepts = torch.tensor([True, False, False, False, False])
    return SimpleNamespace(next=step, after=step, classes=kinds, S=S, accepts=accepts)


def matching(automaton, part, k, ahead):
    """(V,) bool: the ids at offset k of a gap with which some fill of it matches.

    part: ids of the gap, below 0 where there are none yet. ahead: a memo, suffix of such a part ->
    the states (S + 1,) bool from which some fill of it matches; many partial fills end alike.
    `reached` are the states to which some fill of the offsets before k leads.
    """
    step, after, classes = automaton.next, automaton.after, automaton.classes
    reached = torch.zeros(automaton.S + 1, dtype=torch.bool)
    reached[0] = True
    for id in part[:k]:
        states = reached.nonzero()[:, 0]
        to = after[states] if id < 0 else step[states, classes[id]]
        reached = torch.zeros_like(reached)
        reached[to.flatten()] = True
        reached[automaton.S] = False
    rest = tuple(part[k + 1 :])
    n = next(n for n in range(len(rest) + 1) if rest[n:] in ahead)
    able = ahead[rest[n:]]
    if n and len(ahead) > max(MAX_SUFFIXES, 2 * len(part)):
        ahead.clear()
        ahead[()] = automaton.accepts
    for i in reversed(range(n)):
        able = able[after].any(1) if rest[i] < 0 else able[step[:, classes[rest[i]]]]
        ahead[rest[i:]] = able
    return able[step[reached]].any(0)[classes]
