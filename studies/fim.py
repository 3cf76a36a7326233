"""The baseline of infilling: an autoregressive network of equal size, trained to fill the middle.

    python studies/fim.py --data=tinyshakespeare.txt --make=fim-data
    python mdlm.py --data=fim-data --objective=ar --out_dir=out-fim --block_size=256 --n_layer=8 \\
        --n_embd=256 --n_head=4 --attention_every=3 --dropout=0.1 --batch_size=16 --max_steps=1600
    python studies/fim.py --data=tinyshakespeare.txt --out_dir=out-fim --results=fim.jsonl

--make: each window is an example of 256 tokens: the text after a gap, a mark, the text before it,
another mark, the gap (Bavarian et al., 2207.14255, suffix first). Half of the gaps have 2 to 12
characters, as those that studies/regret.py measures; the others end anywhere. As a window always
ends with its gap, the network can tell from a position how long the gap is.

Measured are the gaps and words of studies/regret.py, by the likeliest character at a time, and by a
beam of 8. The other methods there know the same 244 to 254 characters around a gap.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/fim.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import json
import statistics
from dataclasses import dataclass

import numpy as np
import torch

import mdlm
from nanomdlm.support.cli.settings import Count, Natural, Reads, Writes, parse
from nanomdlm.support.data.sources import write_meta
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.errors import UserError
from studies import search as study

T = 256  # tokens of an example
AFTER, BEFORE = "\u25c0", "\u25b6"  # the marks, at the end of the text after and before a gap
BEAM = 8


@dataclass
class Options:
    data: Reads = ""  # the text; its last tenth validates
    make: str = ""  # a folder: write the examples there, and measure nothing
    examples: Count = 120_000  # of training text
    out_dir: Reads = "out-fim"  # the network
    results: Writes = "fim.jsonl"  # lines of JSON
    gaps: Count = 200  # as in studies/regret.py
    words: Count = 400
    seed: Natural = 0


def example(before, gap, after, index):
    """The ids of an example; before, gap, after: texts with T - 2 characters together."""
    return [index[c] for c in after + AFTER + before + BEFORE + gap]


def make(options, text):
    """Write the examples of both parts of a text."""
    alphabet = [*sorted({*text}), AFTER, BEFORE]
    index = {c: i for i, c in enumerate(alphabet)}
    folder = Path(options.make)
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(options.seed)
    at = int(0.9 * len(text))
    sizes = []
    for name, part, n in (
        ("train.bin", text[:at], options.examples),
        ("val.bin", text[at:], options.examples // 100),
    ):
        rows = np.empty((n, T), np.uint8)
        for row in rows:
            first = rng.integers(len(part) - T + 3)
            window = part[first : first + T - 2]
            n_gap = rng.integers(2, 13) if rng.random() < 0.5 else rng.integers(1, T - 2)
            begin = rng.integers(T - 1 - n_gap)
            end = begin + n_gap
            row[:] = example(window[:begin], window[begin:end], window[end:], index)
        (folder / name).write_bytes(rows.tobytes())
        sizes.append(rows.size)
    tokenizer = Tokenizer("char", alphabet)
    write_meta(folder, tokenizer, dict(source="fim", dtype="uint8", characters=sizes, aligned=T))


@torch.no_grad()
def fill(model, prompt, n, width):
    """The likeliest n tokens after a prompt, by a beam: (width, n) ids, the best first.

    Logits at a position are those of the token there, which the model does not see.
    """
    beams = torch.empty(1, 0, dtype=torch.int64)
    scores = torch.zeros(1, dtype=torch.float64)
    for _ in range(n):
        x = torch.cat((prompt.expand(len(beams), -1), beams), 1)
        logits = model(torch.nn.functional.pad(x, (0, T - x.shape[1])))[:, x.shape[1]]
        total = scores[:, None] + logits.double().log_softmax(-1)
        scores, flat = total.flatten().topk(min(width, total.numel()))
        beams = torch.cat((beams[flat // total.shape[1]], flat[:, None] % total.shape[1]), 1)
    return beams


def measure(options, text):
    """Fill each gap greedily and by a beam; print how many are restored."""
    model, tokenizer, _ = mdlm.load(options.out_dir, device="cpu")
    index = {c: i for i, c in enumerate(tokenizer.vocab)}
    text = text[int(0.9 * len(text)) :]
    rows = []
    with open(options.results, "w", encoding="utf-8") as f:
        for kind, begin, end in study.choose(text, options, T):
            n = end - begin
            first = begin - (T - n) // 2
            before, gap = text[first:begin], text[begin:end]
            ids = example(before, gap, text[end : first + T - 2], index)
            prompt = torch.tensor(ids[: T - n])
            row = dict(kind=kind, begin=begin, end=end, true=gap)
            for name, width in (("greedy", 1), ("beam", BEAM)):
                with torch.autocast("cpu", torch.bfloat16):
                    best = fill(model, prompt, n, width)[0].tolist()
                row[name] = "".join(tokenizer.vocab[i] for i in best)
            rows.append(row)
            print(json.dumps(row), file=f, flush=True)
    for kind in [*study.KINDS, "word"]:
        of = [row for row in rows if row["kind"] == kind]
        for name in ("greedy", "beam"):
            p = statistics.mean(row[name] == row["true"] for row in of)
            error = (p * (1 - p) / len(of)) ** 0.5
            print(f"{kind}, {name}: {100 * p:.1f} ± {100 * error:.1f} % of {len(of)} restored")


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    if not options.data:
        raise UserError("--data is missing; give the text that the model has learned")
    text = Path(options.data).read_text(encoding="utf-8")
    make(options, text) if options.make else measure(options, text)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
