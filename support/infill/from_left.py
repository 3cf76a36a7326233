"""The search for fills of a gap of unknown length by a model that predicts from left to right.

One sequence, the text up to a partial fill and what follows the gap, says two things: how likely
each next token of the fill is, and how likely the text after the gap is if the fill ends here. So
fills of all lengths share their beginnings, and each sequence completes a fill. The list is by

    log p(gap, the next REACH tokens | before)

exact for each fill that was met. Partial fills are tried in the order of their regret, nats by
which they are less likely than the likeliest token at each of their positions: first the one that
the model would write, then what differs from it least, each to its end.
"""

from nanomdlm.support.infill.search import OPEN, Node, Search

REACH = 64  # tokens of text after the gap that rank its fills


class FromLeft(Search):
    """The search for the likeliest fills of Frames that differ in the length of their only gap.

    A Node holds the ids up to where it was filled; its frame is the longest.
    """

    def begin(self):
        self.by_length = {len(frame.open): i for i, frame in enumerate(self.frames)}
        self.most = max(self.by_length)
        self.longest = self.by_length[self.most]
        frame = self.frames[self.longest]
        first, last = (frame.open[0], frame.open[-1] + 1) if frame.open else frame.gaps
        self.L = len(frame.x)
        self.before = frame.x[:first]
        self.after = frame.x[last : frame.size][:REACH]
        self.add(Node(self.longest, 0.0, ()))

    def add(self, node):
        """Go on with a Node, or take it if the network has nothing more to say of it."""
        if len(node.fill) == self.most and not self.after:
            self.offer(node)
        else:
            self.push(node)

    def entry(self, node):
        # What is left of a Node's children costs more than the Node itself.
        regret = node.regret + node.least - node.cost
        order = (-len(node.fill), node.least) if self.is_deepest_first else (regret,)
        return order, node.frame, node.path, node.skip, node

    def ask_about(self, node):
        self.sequences += 1
        x = [*self.before, *node.fill, *self.after]
        begin = len(self.before) + len(node.fill)
        places = range(begin, begin + max(1, len(self.after)))
        x += [0] * (self.L - len(x))  # not seen
        return self, node, x[: self.L], [*places]

    def expand(self, node, places, logp):
        k = len(node.fill)
        if k in self.by_length and not node.skip:  # the fill ends here
            after = sum(logp[i, id].item() for i, id in enumerate(self.after))
            cost = node.cost - after
            self.offer(node._replace(frame=self.by_length[k], cost=cost, least=cost))
        if k == self.most:
            return
        self.extend(node, node.cost, k, logp[0], self.allowed(node.fill))

    def filled(self, node, k, id):
        return (*node.fill, id)

    def allowed(self, fill):
        """(V,) bool: the ids after which some fill that is longer may match."""
        k = len(fill)
        allowed = None
        for length, number in self.by_length.items():
            if length > k:
                filter = self.frames[number].filter
                more = filter.allowed((*fill, *[OPEN] * (length - k)), k)
                allowed = more if allowed is None else allowed | more
                if not (filter.must_match or filter.only):  # that of all lengths
                    break
        return allowed
