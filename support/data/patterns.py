"""Synthetic patterns (--data=patterns): texts whose entropy is known exactly.

Each text repeats LOW to HIGH of 15 symbols (--periods=LOW-HIGH), up to its end.
"""

import math
import re

import numpy as np

from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.errors import UserError

LONGEST_PERIOD = 64
SYMBOLS = "abcdefghijklmno"
# The settings that --data=patterns implies. Most of the entropy is in the symbols that are written
# first, at high mask rates: cosine draws more of those.
IMPLIED = dict(block_size=64, rates="cosine", eval_windows=1000, tokenizer="char", vocab_size=0)
IMPLIED |= dict(lr_schedule="cosine", learning_rate=0.03, batch_size=32, attention_every=1)


def parse_periods(value):
    """--periods -> (lowest, highest), both included."""
    match = re.fullmatch(r"(\d{1,2})-(\d{1,2})", value)
    low, high = map(int, match.groups()) if match else (0, 0)
    if not 1 <= low <= high <= LONGEST_PERIOD:
        raise UserError(f"--periods={value[:40]!r} is not LOW-HIGH, from 1 to {LONGEST_PERIOD}")
    return low, high


def periods_in_form(value):
    """--periods in its usual form."""
    return "{}-{}".format(*parse_periods(value))


def check(config):
    """Raise UserError for settings that do not work with --data=patterns."""
    if (config.tokenizer, config.separator) != ("char", ""):
        raise UserError("--data=patterns has neither --tokenizer nor --separator; leave them out")
    shortest = 2 * parse_periods(config.periods)[1]
    if config.block_size < shortest:  # else the entropy would be another one
        raise UserError(f"--periods={config.periods} needs a --block_size of at least {shortest}")


def make(n, seed, length=64, periods=(2, 4)):
    """(n, length) uint8: each row a random pattern of some of the 15 symbols, repeated.

    periods: the range of pattern lengths, (lowest, highest); all are equally likely.
    """
    rng = np.random.default_rng(seed)
    low, high = periods
    period = rng.integers(low, high + 1, n)
    symbols = rng.integers(0, len(SYMBOLS), (n, high), dtype=np.uint8)
    rows = np.empty((n, length), np.uint8)
    for i in range(length):
        rows[:, i] = symbols[np.arange(n), i % period]
    return rows


def entropy(length=64, periods=(2, 4)):
    """Exact entropy of `make` in nats per token, for a length of at least twice a period.

    Then a text with two periods also has their greatest common divisor as a period (Fine and
    Wilf). So each text repeats a word that is not itself a repetition, and its periods are the
    multiples of that word's length d.
    """
    low, high = periods
    words = {}  # d -> how many words of d symbols do not repeat a shorter one
    total = 0.0
    for d in range(1, high + 1):
        words[d] = 15**d - sum(words[part] for part in range(1, d) if d % part == 0)
        p = 0.0  # the probability of each text that repeats such a word
        for period in range(low, high + 1):
            if period % d == 0:
                p += 1 / (high - low + 1) / 15**period
        if p:
            total += words[d] * p * math.log(p)
    return -total / length


def write(folder, config):
    """Write train.bin and val.bin with 100,000 patterns of config.block_size; nine tenths train.

    Returns (tokenizer, content of meta.json).
    """
    length = config.block_size
    periods = parse_periods(config.periods)
    rows = make(100_000, 0, length, periods)
    rows[:90_000].tofile(folder / "train.bin")
    rows[90_000:].tofile(folder / "val.bin")
    meta = dict(source="patterns", dtype="uint8", characters=[90_000 * length, 10_000 * length])
    meta |= dict(entropy=entropy(length, periods), aligned=length)
    return Tokenizer("char", list(SYMBOLS)), meta
