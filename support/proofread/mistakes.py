"""The prior of mistakes: how many there are, of which kinds, and what they leave in a text.

    number              5 % of all characters, equally many of each kind
    a wrong character   half: one beside the right one on a keyboard; half: any character
    one too many        half: one of the characters around it, or one beside these; half: any
    one missing, two swapped    any

Only their number is fitted to a text: it is more than twice that of the text with which it was
chosen, because more mistakes are found then (results/proofreading.md). studies/proofreading.py
uses the same prior, except for the number, for its 6-gram model.
"""

import math

import torch

RATE = 0.05
KINDS = ("substitution", "insertion", "deletion", "swap")  # of what repairs a mistake
BESIDE = 0.5  # of wrong and superfluous characters: for reasons of the keyboard
ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")  # letters alone: keyboards differ in the rest


def beside():
    """Letter -> its neighbors on a QWERTY keyboard, of the same case."""
    letters = {}
    for r, row in enumerate(ROWS):
        for i, c in enumerate(row):
            near = [(r, i - 1), (r, i + 1), (r - 1, i), (r - 1, i + 1), (r + 1, i - 1), (r + 1, i)]
            near = [(q, j) for q, j in near if 0 <= q < len(ROWS) and 0 <= j < len(ROWS[q])]
            letters[c] = "".join(ROWS[q][j] for q, j in near)
            letters[c.upper()] = letters[c].upper()
    return letters


class Prior:
    """Costs of repairs: by how many nats a mistake is less likely than none.

    characters: the V tokens, if each is a character; None: they are longer, and any is as likely
    size: V
    each: the cost of a missing token, and of two in the wrong order
    """

    def __init__(self, characters, size):
        self.each = math.log((1 - RATE) / (RATE / len(KINDS)))
        self.size = size
        self.wrong = self.slip = None
        if characters is None:
            return
        letters = beside()
        index = {c: i for i, c in enumerate(characters)}
        near = [[index[o] for o in letters.get(c, "") if o in index] for c in characters]
        self.wrong = self.table(near)
        self.slip = self.table([[i, *others] for i, others in enumerate(near)]).tolist()

    def table(self, near):
        """(V, V) log p of what is written where a character [first index] is meant or is near."""
        p = torch.full((self.size, self.size), 1 / self.size, dtype=torch.float64)
        for i, others in enumerate(near):
            if others:
                p[i] *= 1 - BESIDE
                p[i, others] += BESIDE / len(others)
        return p.log()

    def substitution(self, wrong, right):
        """Cost of a wrong token."""
        logp = -math.log(self.size) if self.wrong is None else self.wrong[right, wrong].item()
        return self.each - logp

    def deletion(self, token, around):
        """Cost of a token too many; around: the tokens before and after it."""
        logp = [self.slip[i][token] for i in around if i < self.size]
        mean = sum(map(math.exp, logp)) / len(logp) if logp else 1 / self.size
        return self.each - math.log(mean)
