"""A cloze of English: which of twenty words, or phrases, was in the gap?

    python studies/cloze.py --out_dir=SmolLM2.gguf --data=english.jsonl --dtype=bfloat16
    python studies/cloze.py --out_dir=adapted --data=english.jsonl --words=3

From the documents that validate (the last tenth of the records): a word of four letters and more,
or --words=N of them in a row, is left out between 40 words and 20 words of its text. Nineteen
others are drawn from the training documents, phrases of as many words. The model compares all
twenty exactly, as `sample.py --infill "... [___|one|two|...] ..."` does; so does a 5-gram model of
words (Witten and Bell's interpolation) of the training documents, and their frequency.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/cloze.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import json
import random
import re
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

import mdlm
import sample
from nanomdlm.studies.adaptive_calls import Ngram
from nanomdlm.support.cli import devices, outputs, terminal
from nanomdlm.support.cli.files import to_json
from nanomdlm.support.cli.settings import Count, Reads, Seed, Writes, parse
from nanomdlm.support.run.plots import table

BEFORE, AFTER = (40, 20)  # words
OTHERS = 19
KNOWN = 600_000  # words of the training documents that the 5-gram model counts
WORD = re.compile(r"[a-z]{4,}")
SAFE = re.compile(r"[\w .,;:'\"!?()-]+")  # nothing that a template would read


@dataclass
class Options:
    """Which of twenty words was in a gap?"""

    out_dir: Reads = ""  # model: a run, or one of transformers (folder, OWNER/NAME, FILE.gguf)
    data: Reads = "english.jsonl"  # what studies/corpora.py english wrote
    words: Count = 1  # of the gap
    gaps: Count = 200
    seed: Seed = 0
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights
    json: Writes = ""  # write the results as JSON to this file, or to standard output: -


class Gap(NamedTuple):
    before: str
    after: str
    choices: list[str]  # the first is right


def read(path):
    """(training documents, validation documents)."""
    with open(path, encoding="utf-8") as f:
        texts = [json.loads(line)["text"] for line in f]
    edge = int(0.9 * len(texts))
    return texts[:edge], texts[edge:]


def gaps_of(train, val, options):
    """Gaps of the validation documents, as many as `options.gaps`."""
    rng = random.Random(options.seed)
    n = options.words
    others = set()
    while len(others) < 40 * OTHERS:
        words = rng.choice(train).split()
        i = rng.randrange(len(words))
        if fits(words[i : i + n], n):
            others.add(" ".join(words[i : i + n]))
    found = []
    while len(found) < options.gaps:
        words = rng.choice(val).split()
        if len(words) <= BEFORE + n + AFTER:
            continue
        i = rng.randrange(BEFORE, len(words) - n - AFTER)
        before = " ".join(words[i - BEFORE : i])
        after = " ".join(words[i + n : i + n + AFTER])
        if fits(words[i : i + n], n) and SAFE.fullmatch(before) and SAFE.fullmatch(after):
            right = " ".join(words[i : i + n])
            wrong = rng.sample(sorted(others - {right}), OTHERS)
            found.append(Gap(f"{before} ", f" {after}", [right, *wrong]))
    return found


def fits(words, n):
    return len(words) == n and all(WORD.fullmatch(word) for word in words)


def rank(scores):
    """The rank of the first, from 1; what is equal to it counts half."""
    better = sum(s > scores[0] for s in scores[1:])
    return 1 + better + sum(s == scores[0] for s in scores[1:]) / 2


def fitted(model, tokenizer, gap):
    """A Gap with less text around it if the context is too short for all of it."""
    before, after = gap.before.split(), gap.after.split()
    longest = max(gap.choices, key=lambda choice: len(tokenizer.encode(choice)))
    room = model.config.block_size - 8
    while before and len(tokenizer.encode(" ".join([*before, longest, *after]))) > room:
        if len(before) > 2 * len(after):
            before = before[1:]
        else:
            after = after[:-1]
    return gap._replace(before=" ".join(before) + " ", after=" " + " ".join(after))


def by_model(model, tokenizer, gap):
    gap = fitted(model, tokenizer, gap)
    text = f"{gap.before}[___|{'|'.join(gap.choices)}]{gap.after}"
    found = sample.search(model, tokenizer, text, top=len(gap.choices))
    logp = {one.fills[0].strip(): one.logp for one in found}
    return [logp.get(choice, -float("inf")) for choice in gap.choices]


def by_ngrams(ngrams, gap):
    texts = [tuple(f"{gap.before}{choice}{gap.after}".split()) for choice in gap.choices]
    return [-ngrams.nats(text) * len(text) for text in texts]


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    outputs.check_all(options)
    train, val = read(options.data)
    gaps = gaps_of(train, val, options)
    random.Random(options.seed).shuffle(train)
    words = tuple(word for text in train for word in text[:4000].split())[:KNOWN]
    scorers = {"frequency": Ngram(words, 1), "5-gram": Ngram(words, 5)}
    scorers = {name: lambda gap, n=ngrams: by_ngrams(n, gap) for name, ngrams in scorers.items()}
    if options.out_dir:
        model, tokenizer, _ = devices.load_in(options.dtype, mdlm.load, options.out_dir)
        scorers[options.out_dir] = lambda gap: by_model(model, tokenizer, gap)
    rows = []
    for name, scorer in scorers.items():
        began = time.process_time()
        with terminal.bar(gaps, desc=name) as bar, torch.no_grad():
            ranks = [rank(scorer(gap)) for gap in bar]
        right = sum(r == 1 for r in ranks) / len(ranks)
        row = dict(model=name, gaps=len(gaps), right=right)
        row |= dict(se=(right * (1 - right) / len(ranks)) ** 0.5, mean_rank=sum(ranks) / len(ranks))
        rows.append(row | dict(seconds=(time.process_time() - began) / len(gaps), ranks=ranks))
    content = to_json(dict(rows=rows))
    shown = [[value for key, value in row.items() if key != "ranks"] for row in rows]
    heads = ["", "gaps", "right", "+-", "mean rank", "processor seconds"]
    print(content if options.json == "-" else table([heads, *shown], digits=3))
    if options.json not in ("", "-"):
        outputs.write(options.json, content.encode())
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
