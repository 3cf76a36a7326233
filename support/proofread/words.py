"""Words of a text, from which proofreading knows names and repetitions."""

import math
import re
from collections import Counter

WORD = re.compile(r"[^\W_]+")  # letters and digits
UNKNOWN_COST = 6.0  # nats more for an edit of a name, or of words found elsewhere, to unknown words
NAME_LOGP = -8.0  # log p of a region that is enough to turn a name into a word not in the text


class Words:
    """How often each word occurs in a text, in upper or lower case."""

    def __init__(self, text=""):
        self.counts = Counter(WORD.findall(text.lower()))

    def has_elsewhere(self, words):
        """Whether each of these words, which a place of the text has, occurs at another one too."""
        return all(self.counts[word] > n for word, n in Counter(words).items())

    def cost(self, before, old, new, after, logp):
        """What more an edit costs that turns words of the text, or a name, into unknown ones.

        before, after: the text around the edit, which turns the text `old` into `new`
        logp: of the region with the edit
        """
        lead, begin = re.fullmatch(r"(.*?)([^\W_]*)", before, re.DOTALL).groups()
        end = re.match(r"[^\W_]*", after)[0]
        old, new = (WORD.findall(begin + text + end) for text in (old, new))
        while old and new and old[0].lower() == new[0].lower():
            old, new = old[1:], new[1:]
        while old and new and old[-1].lower() == new[-1].lower():
            old, new = old[:-1], new[:-1]
        if not old or all(self.counts[word.lower()] for word in new):
            return 0.0
        is_name = all(looks_like_a_name(words[0], lead.rstrip(" ")) for words in (old, new))
        if is_name and logp < NAME_LOGP:
            return math.inf
        is_known = self.has_elsewhere([word.lower() for word in old])
        return UNKNOWN_COST if is_name or is_known else 0.0


def looks_like_a_name(word, before):
    """Whether a word after other text is in capitals, or begins with one within a sentence."""
    is_within = before[-1:].isalnum() or before.endswith(",")
    return len(word) > 1 and word[0].isupper() and (word.isupper() or is_within)
