"""The quality of texts: known and distinct words; comparisons of settings."""

import dataclasses
import io
import json
import math
import re
import sys
from pathlib import Path

from nanomdlm.support.cli import files, terminal
from nanomdlm.support.cli.settings import parse
from nanomdlm.support.data import records, sources
from nanomdlm.support.data.sources import map_ids
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import display
from nanomdlm.support.infill.templates import joined
from nanomdlm.support.run import plots

GROUP = 16  # texts whose words are compared: the share of distinct ones depends on their number
TEXTS = 16  # for each value, unless --num_samples says otherwise
ENOUGH = 2_000_000  # tokens of a training text


def training_text(folder, tokenizer, config):
    """The training text of a checkpoint's model; None, with a warning, if it is gone."""
    data = folder.parent / "data"
    if sources.is_ids(config.data):
        data = Path(config.data)
    try:
        if (data / "train.bin").exists():
            dtype = sources.read_meta(data / "meta.json")["dtype"]
            ids = map_ids(data / "train.bin", dtype)
            return tokenizer.decode(ids[:ENOUGH].tolist())
        path = sources.shakespeare() if config.data == "shakespeare" else config.data
        records.check_plain(path)
        with io.TextIOWrapper(files.open_regular(path), encoding="utf-8") as f:
            text = f.read(ENOUGH)
        if tokenizer.kind == "file":  # some write all in small letters
            text = tokenizer.decode(tokenizer.encode(text))
        return text
    except (OSError, ValueError, UserError) as e:
        terminal.warn(f"known words are not counted: the training text is not available ({e})")
        return None


def words_of(text):
    """The words of a text, without those that its ends may cut."""
    return re.findall(r"\w+", text)[1:-1]


def distinct(texts):
    """Distinct words per word, the mean over groups of 16 texts."""
    groups = [texts[i : i + GROUP] for i in range(0, max(1, len(texts) - GROUP + 1), GROUP)]
    lists = [[word for text in group for word in words_of(text)] for group in groups]
    return sum(len(set(words)) / max(1, len(words)) for words in lists) / len(lists)


class WordStatistics:
    """The share of words that the training text (None: unknown) has, and of distinct ones.

    shortest: letters that a word must have to count among the known ones
    """

    def __init__(self, training, shortest=1):
        self.known = set(re.findall(r"\w+", training or ""))
        self.shortest = shortest

    def __call__(self, texts):
        """{"words": fraction, "words_se": standard error, "distinct": fraction}; None: unknown."""
        lists = [[w for w in words_of(text) if len(w) >= self.shortest] for text in texts]
        good = [sum(word in self.known for word in words) for words in lists]
        total = sum(map(len, lists))
        known_fraction = spread = None
        if self.known and total:
            known_fraction = sum(good) / total
            errors = (k - known_fraction * len(words) for k, words in zip(good, lists))
            spread = math.hypot(*errors) / total
        return {"words": known_fraction, "words_se": spread, "distinct": distinct(texts)}


# ---- sample.py --compare
def variants(options, settings, resolve):
    """--compare=NAME=VALUE,VALUE,... -> {"NAME=VALUE": resolve(Options)}.

    settings: the names that can be compared
    """
    name, _, values = options.compare.partition("=")
    if name not in settings or not values:
        fix = f"give one of {', '.join(settings)}, as in --compare=temperature=0.5,1"
        raise UserError(f"--compare={options.compare} is not accepted; {fix}")
    n = options.num_samples or TEXTS
    rows = {}
    for value in values.split(","):
        asked = parse(type(options), [f"--{name}={value}"], "")
        rows[f"{name}={value}"] = resolve(dataclasses.replace(options, num_samples=n, **asked))
    return rows


def compare(variants, fill, statistics, file):
    """Write texts with each of the settings, show the first and a table of all; returns pages.

    variants  {title: settings}
    fill      fill(settings, pages=[]) yields (texts, facts) as sample.show_samples does
    file      gets a line of JSON for each of the settings; or None
    """
    rows = []
    pages = []
    for title, settings in variants.items():
        here = []
        texts, facts = zip(*fill(settings, pages=here))
        pages += [page | dict(title=title) for page in here[:1]]
        if file is not sys.stdout:
            print(f"---- {title}", display.highlighted(texts[0]), sep="\n", flush=True)
        seconds = facts[0]["seconds"]
        calls = sum(fact["calls"] for fact in facts) / len(facts)
        speed = sum(fact["tokens"] for fact in facts) / len(facts) / seconds
        row = {"setting": title, "calls": calls, "seconds": seconds, "tokens/s": speed}
        rows.append(row | statistics([joined(segments) for segments in texts]))
        if file:
            print(json.dumps(rows[-1]), file=file, flush=True)
    if file is not sys.stdout:
        print(plots.table([rows[0].keys(), *(row.values() for row in rows)], digits=3))
        print(f"means over {len(texts)} texts; words: the share that the training text has")
    return pages
