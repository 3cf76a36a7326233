"""What the exact search for fills costs, by the order in which positions are filled.

    python studies/search.py --data=tinyshakespeare.txt --seed=0 --results=search.jsonl

Gaps of 2 to 12 characters anywhere in validation text, and words of 4 to 8 letters, each in the
middle of a context. The network knows how long a gap is. Orders:

    edges   the surest position beside known text (the product's)
    left    the leftmost
    surest  the surest position anywhere
    least   the least sure position anywhere

For each order: sequences that the network saw, the share of lists of three that are proven within
400 of them, exact texts, and log p of the true fill in that order. A study that is run again goes
on after the lines in --results.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/search.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import json
import random
import re
import statistics
import time
from dataclasses import dataclass

import torch

import mdlm
from nanomdlm.support.cli.settings import Count, Natural, Reads, Writes, parse
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import filling, search
from nanomdlm.support.infill.templates import Gap, encode_segments
from nanomdlm.support.run.calibration import calibrated
from nanomdlm.support.run.checkpoint import default_run

ORDERS = ("edges", "left", "surest", "least")
KINDS = {"2-3": (2, 3), "4-5": (4, 5), "6-8": (6, 8), "9-12": (9, 12)}
WORD = re.compile(r"\b[a-z]{4,8}\b")
TOP = 3


@dataclass
class Options:
    data: Reads = ""  # the text that the model has learned; its last tenth is used
    out_dir: Reads = ""  # run or checkpoint folder (default: out, or what ships)
    results: Writes = "search.jsonl"  # lines of JSON, to which this adds
    gaps: Count = 200  # gaps of 2 to 12 characters
    words: Count = 200  # words
    orders: str = ",".join(ORDERS)  # which to compare
    seed: Natural = 0  # which gaps


def choose(text, options, context):
    """[(kind, begin, end)] of gaps in a text, with half a context around each."""
    draw = random.Random(options.seed)
    gaps = []
    for i in range(options.gaps):
        kind, (low, high) = [*KINDS.items()][i % len(KINDS)]
        begin = draw.randrange(context, len(text) - context)
        gaps.append((kind, begin, begin + draw.randint(low, high)))
    inside = (m.span() for m in WORD.finditer(text))
    words = [(a, b) for a, b in inside if context < a and b < len(text) - context]
    return gaps + [("word", *span) for span in draw.sample(words, min(options.words, len(words)))]


class Ordered(search.Frame):
    """A Frame in whose fills another position comes next; see ORDERS."""

    order = "edges"

    def questions(self, node):
        x, places = super().questions(node)
        if self.order in ("surest", "least"):
            places = [at for at, id in zip(self.open, node.fill) if id == search.OPEN]
        return x, places


def chosen_by(order):
    """What takes the place of search.surest."""

    def choose(places, logp):
        entropy = torch.special.entr(logp.exp()).sum(1)
        return int(entropy.argmin() if order == "surest" else entropy.argmax())

    return {"edges": surest, "left": lambda places, logp: 0}.get(order, choose)


surest = search.surest


def measure(model, tokenizer, text, gap, order):
    """What a search for the three likeliest fills of a gap finds and costs."""
    _, begin, end = gap
    L = model.config.block_size
    first = begin - (L - (end - begin)) // 2
    before, after = text[first:begin], text[end : first + L]
    segments = encode_segments([before, Gap(end - begin), after], tokenizer)
    frame = filling.frame_of(model, tokenizer, segments, False, None)
    frame.__class__ = Ordered
    frame.order = order
    search.surest = chosen_by(order)
    true = tuple(tokenizer.encode(text[begin:end]))
    began = time.process_time()
    found = search.Search([frame], TOP)
    search.run(model, [found], filling.LIMIT)
    seconds = time.process_time() - began
    alone = filling.frame_of(model, tokenizer, segments, False, None)
    alone.__class__ = Ordered
    alone.order = order
    alone.filter.only = [(0, torch.tensor([true]).numpy())]
    of_true = search.Search([alone], 1)
    search.run(model, [of_true])
    search.surest = surest
    return dict(
        sequences=found.sequences,
        seconds=seconds,
        proven=found.is_proven,
        exact=found.fills[0].ids == true,
        among=any(fill.ids == true for fill in found.fills),
        best=found.fills[0].logp,
        true=of_true.fills[0].logp,
    )


def table(rows):
    """Lines of Markdown: each kind of gap by each order."""
    columns = ["gaps", "order", "n", "sequences: median", "mean", "proven, %", "exact, %"]
    columns += ["among three, %", "log p of the true fill", "processor seconds"]
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for kind in (*KINDS, "word"):
        for order in ORDERS:
            of = [row for row in rows if (row["kind"], row["order"]) == (kind, order)]
            if not of:
                continue
            cells = [kind, order, len(of)]
            cells += [f"{statistics.median(row['sequences'] for row in of):g}"]
            cells += [f"{statistics.mean(row['sequences'] for row in of):.0f}"]
            for name in ("proven", "exact", "among"):
                cells.append(f"{100 * statistics.mean(row[name] for row in of):.0f}")
            cells += [f"{statistics.mean(row['true'] for row in of):.2f}"]
            cells += [f"{statistics.mean(row['seconds'] for row in of):.2f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    if not options.data:
        raise UserError("--data is missing; give the text that the model has learned")
    model, tokenizer, config = mdlm.load(default_run(options.out_dir), device="cpu")
    model = calibrated(model)
    text = Path(options.data).read_text(encoding="utf-8")
    text = text[int(0.9 * len(text)) :]
    results = Path(options.results)
    old = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    rows = [json.loads(line) for line in old]
    done = {(row["begin"], row["end"], row["order"]) for row in rows}
    with open(results, "a", encoding="utf-8") as f:
        for gap in choose(text, options, config.block_size):
            for order in options.orders.split(","):
                if (gap[1], gap[2], order) not in done:
                    row = dict(kind=gap[0], begin=gap[1], end=gap[2], order=order)
                    rows.append(row | measure(model, tokenizer, text, gap, order))
                    print(json.dumps(rows[-1]), file=f, flush=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
