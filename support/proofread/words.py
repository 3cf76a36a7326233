"""Words of a text, from which proofreading knows names and repetitions."""

import re
from collections import Counter

WORD = re.compile(r"[^\W_]+")  # letters and digits


class Words:
    """How often each word occurs in a text, in upper or lower case."""

    def __init__(self, text=""):
        self.counts = Counter(WORD.findall(text.lower()))

    def has_elsewhere(self, words):
        """Whether each of these words, which a place of the text has, occurs at another one too."""
        return all(self.counts[word] > n for word, n in Counter(words).items())

    def lost(self, before, old, new, after):
        """(whether an edit turns a name into unknown words, whether words that are elsewhere too)

        before, after: the text around the edit, which turns the text `old` into `new`
        """
        lead, begin = re.fullmatch(r"(.*?)([^\W_]*)", before, re.DOTALL).groups()
        end = re.match(r"[^\W_]*", after)[0]
        old, new = (WORD.findall(begin + text + end) for text in (old, new))
        while old and new and old[0].lower() == new[0].lower():
            old, new = old[1:], new[1:]
        while old and new and old[-1].lower() == new[-1].lower():
            old, new = old[:-1], new[:-1]
        if not old or all(self.counts[word.lower()] for word in new):
            return False, False
        is_name = all(looks_like_a_name(words[0], lead.rstrip(" ")) for words in (old, new))
        return is_name, self.has_elsewhere([word.lower() for word in old])


def looks_like_a_name(word, before):
    """Whether a word after other text is in capitals, or begins with one within a sentence."""
    is_within = before[-1:].isalnum() or before.endswith(",")
    return len(word) > 1 and word[0].isupper() and (word.isupper() or is_within)
