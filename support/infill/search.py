"""Exact infilling: best-first search for the likeliest of all fills of gaps, with a certificate.

Given the text on both sides, the fill of a gap has a distribution by the chain rule inside the gap:

    p(fill | left, right) = product over its positions of p(token | left, right, what was filled)

Positions may be filled in any order that depends on nothing but what is filled: then each partial
fill is reached by one path, and the probabilities of all V^n fills sum to one. The cost of a
partial fill, -log p, only grows. So once k fills are complete and no partial fill costs less than
the k-th of them, these are the k likeliest of all, proven. Until then the cheapest partial fill
bounds every fill that is not listed; the search may stop at any time, with that bound.

Texts of several lengths (Frames) are searched together if each starts with the cost of its length.

The position to fill next is an end of a run of masks: of these the one that the network is surest
of, by entropy. results/infilling.md compares other orders. A model that
does not see what follows goes from left to right and scores the text after the gap as well; then
the same search finds the largest log p(gap, after | before).
"""

import heapq
import math
import time
from collections import Counter, deque
from typing import NamedTuple

import torch

from nanomdlm.support import abilities
from nanomdlm.support.infill.model_calls import (
    device_of,
    is_large,
    logits_at,
    next_logits,
    rows_per_call,
)
from nanomdlm.support.infill.prefixes import kept

OPEN = -1  # a position of a fill with no token yet
ROWS = 8  # partial fills that one call expands at most; more would often be in vain
# Sequences for each position of a gap, to find a first fill after the limit, or after the deadline
MORE = 256
MORE_IN_TIME = 4
SHORT = 4  # places of those that share a call of a large network, without longer ones
WIDTH = 128  # children of a partial fill that are made at once; more when these are used up


class Node(NamedTuple):
    """A partial fill of a Frame."""

    frame: int  # its number
    cost: float  # -log p of what is filled, nats, and the start of the Frame
    fill: tuple  # the ids at the open positions, OPEN where there is none yet
    path: tuple = ()  # the (position, id) in the order in which they were filled; breaks ties
    losses: tuple = ()  # -log p of each of the path
    least: float = 0.0  # no child that is not made yet costs less: the bound
    skip: int = 0  # how many of its likeliest children are made
    regret: float = 0.0  # nats more than the likeliest token at each position (from_left.py)
    scored: int = 0  # tokens of the text after the gap that the cost has (from_left.py)

    @property
    def rank(self):
        return self.least, self.frame, self.path


class Fill(NamedTuple):
    """A complete fill of a Frame."""

    frame: int
    ids: tuple  # at the open positions, up to the token that ends the text if one does
    logp: float  # nats: of the fill, and of what the Frame says from the start
    p: float  # of the fill alone: of all sequences of ids that were found with this text
    drawn: tuple  # log p of each of the ids when it was filled


class Frame:
    """A text whose gaps have known lengths.

    x       (L,) list of ids, a whole context, [MASK] at the open positions
    open    the positions of the gaps, ascending
    filter  what may stand there, a filters.Filter
    after   positions of given text from the first gap on, which models score that do not see it
    gaps    (begin, end) of the part of the text from the first gap to the last one
    size    tokens of the text
    is_ordered  whether gaps are filled from left to right, as a text must be that may end early
    start   nats that each of its fills costs more, where Frames compete
    """

    def __init__(self, model, x, open, filter, after, gaps, size, is_ordered=False, start=0.0):
        self.x = x
        self.open = open
        self.gaps = gaps
        self.size = size
        self.filter = filter
        self.is_joint = not abilities.fills_gaps(model)  # the fills are scored with `after`
        self.is_causal = abilities.is_causal(model)
        self.is_ordered = self.is_joint or is_ordered
        self.after = sorted(after) if self.is_joint else []
        self.start = start
        self.typical = 0.0  # nats of a token, to guess what a partial fill will cost

    def questions(self, node):
        """(ids (L,), the positions whose distributions expand a Node)."""
        x = list(self.x)
        for at, id in zip(self.open, node.fill):
            if id != OPEN:
                x[at] = id
        masked = [at for at, id in zip(self.open, node.fill) if id == OPEN]
        if self.is_joint:  # the given text from the last token on, and the next position
            filled = [at for at, id in zip(self.open, node.fill) if id != OPEN]
            begin = filled[-1] if filled else -1
            stop = masked[0] if masked else math.inf
            places = [at for at in self.after if begin < at < stop] + masked[:1]
            if self.is_causal:  # it does not see what follows: texts of other lengths are alike
                x[places[-1] :] = self.x[:1] * (len(x) - places[-1])
            return x, places
        if not node.path:  # all of them: how uncertain are they?
            return x, masked
        return x, masked[:1] if self.is_ordered else at_edges(masked)

    def is_complete(self, fill):
        """Whether nothing is left to fill, or to score."""
        end = self.open[-1] if self.open else -1
        return OPEN not in fill and not (self.after and self.after[-1] > end)


class Search:
    """The search for the likeliest fills of Frames, which compete.

    top: how many fills, of different texts
    """

    has_best_path = False  # whether the order of the queue goes straight to a good fill

    def __init__(self, frames, top):
        self.frames = frames
        self.top = top
        self.queue = []
        self.is_deepest_first = False
        self.found = {}  # text -> [rank of its likeliest ids, p of all of them, Fill]
        self.worst = (math.inf,)  # the rank of the top-th text
        self.passed = math.inf  # the least cost of what was given up
        self.excluded = [0.0] * len(frames)
        self.sequences = 0
        self.begin()

    def begin(self):
        """Start with a Frame in which nothing is filled, each."""
        for number, frame in enumerate(self.frames):
            self.add(Node(number, frame.start, (OPEN,) * len(frame.open), least=frame.start))

    # ---- The queue
    def push(self, node):
        """Add a Node. The queue is ordered by what a complete fill will cost, by a guess, so that
        good fills are complete early; what proves a list is `least`."""
        heapq.heappush(self.queue, self.entry(node))

    def entry(self, node):
        left = node.fill.count(OPEN) - (1 if node.skip else 0)
        estimate = node.least + self.frames[node.frame].typical * left
        first = (node.fill.count(OPEN), node.least) if self.is_deepest_first else (estimate,)
        return first, node.frame, node.path, node.skip, node

    def take(self, may_begin=True):
        """The next Node to expand, or None: then the list is proven.

        may_begin: False for one that is counted in `sequences` already (from_left.py).
        """
        while self.queue and may_begin:
            node = heapq.heappop(self.queue)[-1]
            if node.rank < self.worst:
                return node
            self.passed = min(self.passed, node.least)
        return None

    def sort(self, deepest_first):
        """Order the queue as `push` says, or so that the fewest open positions come first."""
        self.is_deepest_first = deepest_first
        self.queue = [self.entry(node) for *_, node in self.queue]
        heapq.heapify(self.queue)

    def ask_about(self, node):
        """(itself, a Node, ids, places): what the network is asked to expand it."""
        frame = self.frames[node.frame]
        x, places = frame.questions(node)
        self.sequences += len(places) if frame.is_joint and not frame.is_causal else 1
        return self, node, x, places

    def expand(self, node, places, logp):
        """Make the children of a Node, from logp (k, V) at the k places of its questions."""
        frame = self.frames[node.frame]
        given = [i for i, at in enumerate(places) if at not in frame.open]
        cost = node.cost - sum(logp[i, frame.x[places[i]]].item() for i in given)
        if not node.skip:
            self.excluded[node.frame] += self.mass(node.frame, node.cost)
            self.excluded[node.frame] -= self.mass(node.frame, cost)
        if len(given) == len(places):  # the text after the last gap: the fill is complete
            self.offer(node._replace(cost=cost, least=cost))
            return
        if not node.path:
            frame.typical = float(-logp[len(given) :].amax(1).mean())
        here = len(given) if frame.is_ordered else surest(places, logp)
        k = frame.open.index(places[here])
        logp = logp[here]
        allowed = frame.filter.allowed(node.fill, k)
        if not node.skip:
            refused = float(logp.exp()[~allowed].sum())
            self.excluded[node.frame] += self.mass(node.frame, cost) * refused
        self.extend(node, cost, k, logp, allowed)

    def extend(self, node, cost, k, logp, allowed):
        """Add the likeliest children of a Node that costs `cost`, of the ids that are allowed (V,),
        by logp (V,) at its k-th position."""
        losses = (-logp).masked_fill(~allowed, math.inf)
        n = int((losses < math.inf).sum())
        stop = min(n, node.skip + WIDTH)
        if stop < n:  # sort only these and the next one, whose loss bounds the rest
            ids = (losses <= losses.kthvalue(stop + 1).values).nonzero()[:, 0]
        else:
            ids = torch.arange(len(losses))
        losses, order = losses[ids].sort(stable=True)
        ids = ids[order]
        for i in range(node.skip, stop):
            loss = losses[i].item()
            step = (k, ids[i].item())
            child = Node(
                node.frame,
                cost + loss,
                self.filled(node, *step),
                (*node.path, step),
                (*node.losses, loss),
                cost + loss,
                regret=node.regret + loss - losses[0].item(),
            )
            if child.rank > self.worst:  # so are all others
                self.passed = min(self.passed, child.cost)
                return
            self.add(child)
        if stop < n:
            self.push(node._replace(least=cost + losses[stop].item(), skip=stop))

    def filled(self, node, k, id):
        """The fill of a Node with an id at its k-th position."""
        fill = (*node.fill[:k], id, *node.fill[k + 1 :])
        ends = self.frames[node.frame].filter.ends(k, id)  # what follows is not filled
        return fill[: k + 1] if ends else fill

    def add(self, node):
        """Take a Node if its fill is complete, or go on with it."""
        if self.frames[node.frame].is_complete(node.fill):
            self.offer(node)
        else:
            self.push(node)

    def mass(self, number, cost):
        """The probability of a partial fill of a Frame, without what the Frame costs itself."""
        return math.exp(self.frames[number].start - cost)

    def offer(self, node):
        """Take a complete fill, if it may be shown and is among the best."""
        frame = self.frames[node.frame]
        text = frame.filter.accept(node.fill)
        p = self.mass(node.frame, node.cost)
        if text is None:
            self.excluded[node.frame] += p
            return
        drawn = dict(zip((k for k, _ in node.path), node.losses))
        drawn = tuple(-drawn[k] for k in range(len(node.fill)))
        fill = Fill(node.frame, node.fill, -node.cost, p, drawn)
        if text in self.found:
            first, p, best = self.found[text]
            if best.frame == node.frame:  # other ids with the same text
                p += fill.p
            elif node.rank < first:
                p = fill.p
            self.found[text] = [min(first, node.rank), p, best if first < node.rank else fill]
        else:
            self.found[text] = [node.rank, p, fill]
        ranks = sorted(first for first, _, _ in self.found.values())
        if len(ranks) > self.top:
            self.passed = min(self.passed, ranks[-1][0])
            self.found = {text: one for text, one in self.found.items() if one[0] < ranks[-1]}
        if len(ranks) >= self.top:
            self.worst = ranks[self.top - 1]

    # ---- The result
    @property
    def fills(self):
        """Fills, the likeliest first."""
        return [fill._replace(p=p) for _, p, fill in sorted(self.found.values())]

    @property
    def is_proven(self):
        """Whether no fill that is not listed is as likely as the last of the list."""
        return not any(node.rank < self.worst for *_, node in self.queue)

    @property
    def bound(self):
        """An upper bound of log p of every fill that is not listed, nats."""
        return -min([self.passed, *(node.least for *_, node in self.queue)])

    def rest(self, number):
        """The probability of all other fills of a Frame: 1 less what is listed and excluded."""
        listed = sum(fill.p for fill in self.fills if fill.frame == number)
        return max(0.0, 1 - self.excluded[number] - listed)


def surest(places, logp):
    """Which of the places has the lowest entropy, of those that are not between two others."""
    entropy = torch.special.entr(logp.exp()).sum(1).tolist()
    return min(map(places.index, at_edges(places)), key=entropy.__getitem__)


def at_edges(masked):
    """Those of some positions that have a neighbor which is not among them."""
    return [at for at in masked if not {at - 1, at + 1} <= {*masked}]


def run(model, searches, limit=math.inf, deadline=math.inf, update=lambda search: None):
    """Go on with Searches, in shared network calls, until their lists are proven.

    limit: sequences that the network may see for each Search. deadline: time.monotonic() before
    which a call must end if it takes as long as the last one; else it does not begin. Even then
    each list gets a fill: the one that is nearest to its end is completed (or, from left to right
    and without a deadline, the likeliest token follows each time), unless too many fills are
    refused. update(search): called for each sequence
    """
    with torch.no_grad(), kept(model):
        take_turns(model, searches, limit, deadline, update)
        for search in searches:
            if not search.fills:
                complete(model, search, deadline, update)


def take_turns(model, searches, limit, deadline, update):
    """The part of `run` within the limit and the deadline."""
    waiting = deque(searches)
    call = 0.0  # seconds of the last one: as many are reserved for the first fill
    while waiting and time.monotonic() + call < deadline:
        began = time.monotonic()
        batch, waiting = next_batch(model, waiting, limit)
        if not batch:
            break
        for (search, node, _, places), logp in zip(batch, ask(model, batch)):
            search.expand(node, places, logp)
            update(search)
        call = time.monotonic() - began


def complete(model, search, deadline, update):
    """Find a first fill of a Search: complete the partial fill that is nearest to its end or, where
    the order of the queue leads straight to one, go on in that order."""
    search.sort(deepest_first=deadline < math.inf or not search.has_best_path)
    more = MORE_IN_TIME if deadline < math.inf else MORE
    stop = search.sequences + more * (1 + max(len(frame.open) for frame in search.frames))
    while not search.fills and search.queue and search.sequences < stop:
        item = search.ask_about(heapq.heappop(search.queue)[-1])
        search.expand(item[1], item[3], *ask(model, [item]))
        update(search)
    search.sort(deepest_first=False)


def next_batch(model, waiting, limit):
    """([(Search, Node, ids, places)] of the next call, the Searches that are not done)."""
    size = rows_per_call(model, device_of(model))
    batch = []
    idle = []  # until the call has answered
    taken = Counter()
    waiting = deque(waiting)
    while waiting and len(batch) < size:
        search = waiting.popleft()
        node = None
        if taken[search] < ROWS:
            node = search.take(search.sequences < limit)
        if node:
            taken[search] += 1
            batch.append(search.ask_about(node))
            waiting.append(search)
        elif taken[search]:
            idle.append(search)
    return batch, [*waiting, *idle]


def ask(model, batch):
    """Log-probabilities (k, V) float64 at the k places of each item of a batch."""
    device = device_of(model)
    sizes = [len(places) for *_, places in batch]
    if is_large(model) and min(sizes) <= SHORT < max(sizes):  # not all as long as the longest
        logp = [None] * len(batch)
        for is_short in (False, True):
            some = [i for i, n in enumerate(sizes) if (n <= SHORT) == is_short]
            for i, values in zip(some, ask(model, [batch[i] for i in some])):
                logp[i] = values
        return logp
    x = torch.tensor([x for _, _, x, _ in batch], device=device)
    row = torch.arange(len(batch)).repeat_interleave(torch.tensor(sizes)).to(device)
    at = torch.tensor([i for *_, places in batch for i in places], device=device)
    if abilities.fills_gaps(model):
        logits = logits_at(model, x, row, at, device)
    else:
        logits = next_logits(model, x, row, at)
    return logits.double().log_softmax(-1).cpu().split(sizes)
