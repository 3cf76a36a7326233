"""How well texts are written: known words, distinct words; of patterns, how many are valid."""

import re
from pathlib import Path

import numpy as np

from support import sources
from support.cli import UserError, warn

GROUP = 16  # texts whose words are compared: the share of distinct ones depends on their number
ENOUGH = 2_000_000  # tokens of a training text


def training_text(folder, tokenizer, config):
    """The text that the model in a checkpoint folder has learned; None, and why, if it is gone."""
    data = folder.parent / "data"
    if sources.is_ids(config.data):
        data = Path(config.data)
    try:
        if (data / "train.bin").exists():
            dtype = np.dtype(sources.read_meta(data / "meta.json").get("dtype", "uint16"))
            ids = sources.map_ids(data / "train.bin", dtype)
            return tokenizer.decode(ids[:ENOUGH].tolist())
        path = sources.shakespeare() if config.data == "shakespeare" else config.data
        with open(path, encoding="utf-8") as f:
            return f.read(ENOUGH)
    except (OSError, ValueError, UserError) as e:
        warn(f"known words are not counted: the training text is not here ({e})")
        return None


def of_run(folder, tokenizer, config):
    """The Judge of what the model in a checkpoint folder writes."""
    return Judge(training_text(folder, tokenizer, config), config.data == "patterns")


def words_of(text):
    """The words of a text, without those that its ends may cut."""
    return re.findall(r"\w+", text)[1:-1]


def distinct(texts):
    """Distinct words per word, the mean over groups of 16 texts."""
    groups = [texts[i : i + GROUP] for i in range(0, max(1, len(texts) - GROUP + 1), GROUP)]
    found = [[word for text in group for word in words_of(text)] for group in groups]
    return sum(len(set(words)) / max(1, len(words)) for words in found) / len(found)


def is_pattern(text):
    """Whether a text repeats its first 2, 3 or 4 characters, as those of --data=patterns do."""
    return any(text == (text[:n] * len(text))[: len(text)] for n in (2, 3, 4))


class Judge:
    """The share of words that the training text has; of a run on patterns, that of valid ones."""

    def __init__(self, training, is_patterns=False):
        self.name = "valid" if is_patterns else "words"
        self.known = set(re.findall(r"\w+", training or ""))

    def __call__(self, texts):
        """{"words" or "valid": share, its standard error, "distinct": share}; None: not known."""
        if self.name == "valid":
            counts = [(is_pattern(text), 1) for text in texts]
            different = len(set(texts)) / len(texts)
        else:
            words = [words_of(text) for text in texts]
            counts = [(sum(word in self.known for word in found), len(found)) for found in words]
            different = distinct(texts)
        if self.name == "words" and not self.known:
            return {"words": None, "words_se": None, "distinct": different}
        good, total = map(sum, zip(*counts))
        share = good / max(1, total)
        spread = sum((k - share * n) ** 2 for k, n in counts) ** 0.5 / max(1, total)
        return {self.name: share, f"{self.name}_se": spread, "distinct": different}
