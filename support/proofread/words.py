"""Words of a text, from which proofreading knows names and repetitions."""

import re
from collections import Counter
from collections.abc import Iterable

WORD = re.compile(r"[^\W_]+")  # letters and digits
LONGEST = 64  # characters of a word that is counted,
MOST = 1 << 20  # and different words


class Words:
    """How often each word occurs in a text, which comes in pieces, in upper or lower case.

    Memory is bounded: very long words are not counted, and of a million those that are rare.
    """

    def __init__(self, pieces: Iterable[str] = ()):
        self.counts = Counter()
        self.characters = 0  # of the text
        self.last = ""  # a word that the next piece may go on with
        for piece in pieces:
            self.add(piece)

    def add(self, piece):
        self.characters += len(piece)
        text = self.last + piece
        self.last = end_of(text)
        whole = text[: len(text) - len(self.last)]
        self.counts.update(word for word in words_of(whole) if len(word) <= LONGEST)
        self.last = self.last[: LONGEST + 1]
        if len(self.counts) > MOST:
            self.counts = Counter(dict(self.counts.most_common(MOST // 2)))

    def __getitem__(self, word):
        return self.counts[word] + (word == self.last.lower())

    def has_elsewhere(self, words):
        """Whether each of these words, which a place of the text has, occurs at another one too."""
        return all(self[word] > n for word, n in Counter(words).items())


def words_of(text):
    return WORD.findall(text.lower())


def end_of(text):
    """The beginning of a word at the end of a text."""
    n = len(text)
    while n and text[n - 1].isalnum():
        n -= 1
    return text[n:]


def looks_like_a_name(word, before):
    """Whether a word after other text is in capitals, or begins with one within a sentence."""
    is_within = before[-1:].isalnum() or before.endswith(",")
    return len(word) > 1 and word[0].isupper() and (word.isupper() or is_within)
