"""An adaptive number of calls beside a fixed one: how well texts are written, by their mean calls.

    python studies/adaptive_calls.py --data=tinyshakespeare.txt --steps=32,64 --entropy_bound=8
    python studies/adaptive_calls.py --out_dir=s4 --data=tinyshakespeare.txt --threshold=.9,.7
    python studies/adaptive_calls.py --data=tinyshakespeare.txt --threshold=.9 --gaps

Each row: texts from nothing, judged by their known words, their distinct words, and the nats per
character of a 6-gram model of the training text (Witten and Bell's interpolation), as in
results/sampling.md. No number says it alone: a low one under the 6-gram model may be bought with
dull texts (Pynadath et al., 2604.02718). Seconds are those of the processor, for a text.

--gaps: the texts are validation windows in which 8 of every 32 characters are filled; `right` is
the share of these that are drawn as they were.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/adaptive_calls.py, anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import collections
import json
import math
import time
from dataclasses import dataclass

import torch

import mdlm
import sample
from nanomdlm.support.cli.settings import Count, Natural, Reads, parse
from nanomdlm.support.infill.word_statistics import WordStatistics
from nanomdlm.support.numerics import standard_error
from nanomdlm.support.run.checkpoint import default_run


@dataclass
class Options:
    out_dir: Reads = ""  # run or checkpoint folder (default: out, or what ships)
    data: Reads = ""  # the text that it has learned, of which nine tenths train
    steps: str = ""  # fixed numbers of calls for a context
    threshold: str = ""  # values of --threshold
    entropy_bound: str = ""  # values of --entropy_bound
    correct: str = "auto"  # values of --correct
    order: str = "auto"  # values of --order
    num_samples: Count = 16  # texts of each row
    gaps: bool = False  # fill gaps in real text, in place of texts from nothing
    seed: Natural = 1000  # the seed of all rows


class Ngram:
    """A model of characters, or of a tuple of words, by the 5 before them, interpolated as by
    Witten and Bell (1991)."""

    def __init__(self, text, order=6):
        self.order = order
        self.seen = collections.Counter()  # of each string of up to 6 characters
        self.after = collections.Counter()  # of each context: characters, and different ones
        self.kinds = collections.Counter()
        for n in range(1, order + 1):
            counts = collections.Counter(text[i : i + n] for i in range(len(text) - n + 1))
            self.seen.update(counts)
            for string, count in counts.items():
                self.after[string[:-1]] += count
                self.kinds[string[:-1]] += 1
        self.base = 1 / len(set(text))

    def nats(self, text):
        """Nats per character of a text."""
        total = 0.0
        for i in range(len(text)):
            p = self.base
            for n in range(min(i, self.order - 1) + 1):
                context = text[i - n : i]
                kinds = self.kinds[context]
                if kinds:
                    seen = self.seen[text[i - n : i + 1]]
                    p = (seen + kinds * p) / (self.after[context] + kinds)
            total -= math.log(p)
        return total / len(text)


def rows_of(options):
    """The settings of the sampler in each row."""
    for order in options.order.split(","):
        for correct in options.correct.split(","):
            shared = dict(order=order, correct=correct)
            for name, kind in (("steps", int), ("threshold", float), ("entropy_bound", float)):
                for value in filter(None, getattr(options, name).split(",")):
                    yield {name: kind(value)} | shared


def write(model, x, seed, settings):
    """(ids (n, T), network calls (n,), processor seconds for a text) of the gaps of x (n, T)."""
    began = time.process_time()
    with torch.autocast("cpu", torch.bfloat16):
        *_, last = sample.unmask(model, x, seed=seed, **settings)
    return last.x, last.calls.double(), (time.process_time() - began) / len(x)


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    model, tokenizer, config = mdlm.load(default_run(options.out_dir))
    text = Path(options.data).read_text(encoding="utf-8")
    training = text[: int(0.9 * len(text))]
    by_word = WordStatistics(training)
    judge = Ngram(training)
    T = config.block_size

    def add(row, texts):
        each = torch.tensor([judge.nats(one) for one in texts], dtype=torch.float64)
        row |= by_word(texts) | dict(ngram=each.mean().item(), ngram_se=standard_error(each))
        print(json.dumps(row), flush=True)

    real = text[len(training) :]
    windows = [real[i : i + T] for i in range(0, len(real) - T + 1, T)]
    add(dict(sampler="real text"), windows)
    n = options.num_samples
    x0 = torch.tensor([tokenizer.encode(text) for text in windows[:: len(windows) // n][:n]])
    hidden = torch.ones_like(x0, dtype=torch.bool)
    if options.gaps:
        hidden &= (torch.arange(T) - 12) % 32 < 8
    for settings in rows_of(options):
        x = torch.where(hidden, model.mask_id, x0)
        x, calls, seconds = write(model, x, options.seed, settings)
        row = settings | dict(calls=calls.mean().item(), spread=calls.std().item())
        row |= dict(seconds=seconds)
        if options.gaps:
            right = (x == x0)[hidden].view(len(x), -1).double().mean(1)
            row |= dict(right=right.mean().item(), right_se=standard_error(right))
        add(row, [tokenizer.decode(ids) for ids in x.tolist()])
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
