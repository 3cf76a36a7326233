"""The search for fills of a gap of unknown length by a model that predicts from left to right.

The distribution of the next token says how likely each longer fill is, and how likely it is that
the fill ends: then the next token is the first one after the gap. Once the turn of an end comes, it
is scored by the first tokens after the gap and, unless these are too unlikely, by the others. So
fills of all lengths share their beginnings. The list is by

    log p(gap, the next REACH tokens | before)

exact for each fill that was met. Partial fills are tried in the order of their regret, nats by
which they are less likely than the likeliest token at each of their positions: first the one that
the model would write, then what differs from it least, each to its end.
"""

import heapq
import math

import torch

from nanomdlm.support.infill.search import OPEN, Node, Search

REACH = 64  # tokens of text after the gap that rank its fills
FEW = 2  # of them score an end first, once the list is full


class FromLeft(Search):
    """The search for the likeliest fills of Frames that differ in the length of their only gap.

    A Node holds the ids up to where it was filled; its frame is the longest. reach: tokens of text
    after the gap that rank its fills.
    """

    has_best_path = True

    def __init__(self, frames, top, reach=REACH):
        self.reach = reach
        super().__init__(frames, top)

    def begin(self):
        self.by_length = {len(frame.open): i for i, frame in enumerate(self.frames)}
        self.most = max(self.by_length)
        self.longest = self.by_length[self.most]
        frame = self.frames[self.longest]
        first, last = (frame.open[0], frame.open[-1] + 1) if frame.open else frame.gaps
        self.L = len(frame.x)
        self.before = frame.x[:first]
        self.after = frame.x[last : frame.size][: self.reach]
        self.losses = [math.inf] * len(self.after)  # the least -log p of each, after any fill
        for _, automaton, _, ahead in frame.filter.must_match:  # the only gap
            self.any_length_matches(automaton, ahead)
        self.push(Node(self.longest, 0.0, ()))

    def any_length_matches(self, automaton, ahead):
        """Let the filter of the longest fill allow what any of the lengths allows.

        ahead: its memo of `filters.matching`, by what is open after a position
        """
        able = [automaton.accepts]  # by the number of tokens to come
        while len(able) < self.most:
            able.append(able[-1][automaton.after].any(1))
        for k in range(self.most):
            to_come = [length - k - 1 for length in self.by_length if length > k]
            ahead[(OPEN,) * (self.most - k - 1)] = torch.stack([able[n] for n in to_come]).any(0)

    def entry(self, node):
        regret = node.regret
        if node.skip:  # what is left of its children costs more than the Node itself
            regret += node.least - node.cost
        order = (regret,)
        if self.is_deepest_first:  # time is over: first those that end, then the longest
            is_ending = self.is_ending(node)
            order = (not is_ending, 0 if is_ending else -len(node.fill), node.least)
        return order, node.frame, node.path, node.skip, node

    def is_ending(self, node):
        """Whether a Node is a fill to which nothing is added."""
        return node.frame != self.longest or len(node.fill) == self.most

    def ask_about(self, node):
        n = 1  # tokens of which the network is asked
        if self.is_ending(node):
            n = len(self.after) - node.scored
            if node.scored < FEW and self.worst[0] < math.inf:
                n = min(n, FEW)
        self.sequences += node.scored < FEW  # for the first time
        begin = len(self.before) + len(node.fill) + node.scored
        x = [*self.before, *node.fill, *self.after]
        x += [0] * (self.L - len(x))  # not seen
        return self, node, x[: self.L], [*range(begin, begin + n)]

    def expand(self, node, places, logp):
        if self.is_ending(node):
            self.score(node, logp)
            return
        logp = logp[0]
        allowed = self.allowed(node.fill)
        if not node.skip and self.may_end(node.fill):
            end = -logp[self.after[0]].item() if self.after else 0.0  # nats
            least = -logp.masked_fill(~allowed, -math.inf).max().item()  # of a longer fill
            ending = node._replace(
                frame=self.by_length[len(node.fill)],
                cost=node.cost + end,
                least=node.cost + end,
                regret=node.regret + max(0.0, end - least),
                scored=len(self.after[:1]),
            )
            self.add(ending)
            node = node._replace(regret=node.regret + max(0.0, least - end))
        self.extend(node, node.cost, len(node.fill), logp, allowed)

    def score(self, node, logp):
        """Add the next tokens after the gap to the cost of an end, by logp (k, V) there.

        It waits until nothing else is left to try if it costs more than the list even if each of
        the others is as likely as it ever was, which is a guess.
        """
        cost = node.cost
        k = node.scored
        for each in logp:
            loss = -each[self.after[k]].item()
            self.losses[k] = min(loss, self.losses[k])
            cost += loss
            k += 1
        node = node._replace(cost=cost, least=cost, scored=k)
        if k < len(self.after) and cost + sum(self.losses[k:]) > self.worst[0]:
            node = node._replace(regret=math.inf)
        self.add(node)

    def take(self, may_begin=True):
        if may_begin:
            return super().take()
        for entry in self.queue:
            node = entry[-1]
            if node.scored >= FEW and node.regret < math.inf and node.rank < self.worst:
                self.queue.remove(entry)
                heapq.heapify(self.queue)
                return node
        return None

    def may_end(self, fill):
        """Whether a fill matches as it is. Each id but its last may be part of some match."""
        k = len(fill)
        if k not in self.by_length:
            return False
        filter = self.frames[self.by_length[k]].filter
        return not k or bool(filter.allowed(fill, k - 1)[fill[-1]])

    def add(self, node):
        """Go on with a Node, or take it if the network has nothing more to say of it."""
        if self.is_ending(node) and node.scored == len(self.after):
            self.offer(node)
        else:
            self.push(node)

    def filled(self, node, k, id):
        return (*node.fill, id)

    def allowed(self, fill):
        """(V,) bool: the ids after which some fill that is longer may match."""
        k = len(fill)
        allowed = None
        for length, number in sorted(self.by_length.items(), reverse=True):
            filter = self.frames[number].filter
            if length > k:
                more = filter.allowed((*fill, *[OPEN] * (length - k)), k)
                allowed = more if allowed is None else allowed | more
            if not filter.only:  # the longest allows what all do
                break
        return allowed
