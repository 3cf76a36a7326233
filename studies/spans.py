"""Does a network that learns with masks in runs fill gaps better than one with scattered masks?

    python studies/spans.py train 8 --init_from=RUN --data=FILE --out_dir=spans
    python studies/spans.py measure --runs=plain,spans --json=gaps.json

train:   takes the flags of mdlm.py; of each text, runs of 8 tokens are masked, at the same mask
         rates. Its training loss is no bound; evaluations have scattered masks, as everywhere
measure: nats per token of runs of 2 and of 8 tokens in the middle of validation windows, given
         both sides, exact, by the chain rule from left to right. An autoregressive run sees what
         precedes them alone. Differences from the first run are paired, gap by gap
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/spans.py, from anywhere

from nanomdlm.support.cli import entry

PROCESS_START = entry.start(__name__)

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import eval
import mdlm
from nanomdlm.kernels.reference import philox_words
from nanomdlm.studies import distill
from nanomdlm.support.cli import outputs
from nanomdlm.support.cli.files import to_json
from nanomdlm.support.cli.settings import Count, Writes, parse
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.model_calls import logits_at
from nanomdlm.support.numerics import standard_error
from nanomdlm.support.run import plots
from nanomdlm.support.run.checkpoint import find_checkpoint
from nanomdlm.support.view import Batch
from nanomdlm.variants.variant import Variant

SIZES = (2, 8)


class Spans(Variant):
    """Masks runs of `size` tokens in training."""

    def __init__(self, inner, size):
        super().__init__(inner)
        self.size = size

    def batch(self, ops, x0, counts, step, samples, seed=None, scored=None):
        if seed is not None:  # an evaluation
            return self.inner.batch(ops, x0, counts, step, samples, seed, scored)
        T = x0.shape[1]
        order = philox_words(self.seed, step, samples, T // self.size).argsort(1)
        hidden = order < (counts[:, None] / self.size).round().clamp(min=1)
        hidden = hidden.repeat_interleave(self.size, 1)  # (B, T)
        rows = hidden.flatten().nonzero()[:, 0]
        weights = (1 / (hidden.sum(1) * self.batch_size))[rows // T]
        xt = x0.masked_fill(hidden, self.mask_id)
        return Batch(self.view(xt, rows=rows), x0.flatten()[rows], weights, rows)


def train(argv):
    if not argv or not argv[0].isdecimal() or int(argv[0]) == 0:
        raise UserError("first give the number of tokens in a run, such as 8")
    size = int(argv[0])

    def objective(inner, model):
        if type(inner) is not mdlm.MaskedDiffusion or inner.T % size:
            raise UserError(f"runs of {size} need the default objective and a context they divide")
        return Spans(inner, size)

    return distill.train(objective, argv[1:], PROCESS_START)


@dataclass
class Options:
    """Nats per token of gaps, given both sides."""

    runs: str = ""  # folders, separated by commas
    windows: Count = 200  # of validation text, with a gap of each size
    json: Writes = ""  # write the results as JSON to this file, or to standard output: -


def nats_of_gaps(model, x0, size):
    """(W,) nats per token of the run in the middle of each window of x0 (W, T)."""
    begin = (x0.shape[1] - size) // 2
    row = torch.arange(len(x0))
    nats = torch.zeros(len(x0), dtype=torch.float64)
    for i in range(begin, begin + size):
        xt = x0.clone()
        xt[:, i : begin + size] = model.mask_id  # tokens before these are seen
        logits = logits_at(model, xt, row, torch.full_like(row, i), x0.device)
        nats += F.cross_entropy(logits.double(), x0[:, i], reduction="none")
    return nats / size


@torch.no_grad()
def measure(argv):
    """Print a table: a run a line, a size of gaps a column."""
    options = Options(**parse(Options, argv, __doc__))
    outputs.check_all(options)
    if not options.runs:
        raise UserError("--runs is missing; give folders, separated by commas")
    rows = []
    x0 = None
    for name in options.runs.split(","):
        folder = find_checkpoint(name)
        model, tokenizer, config = mdlm.load(folder, "cpu")
        if x0 is None:  # the same windows for all
            with eval.open_data("", folder, tokenizer, config, torch.device("cpu")) as (corpus, _):
                x0 = corpus.windows(options.windows).long()
            text = tokenizer.decode(x0[0].tolist())
        if tokenizer.decode(x0[0].tolist()) != text:
            raise UserError(f"{name} has other tokens than the first run")
        rows.append(dict(run=name, nats={n: nats_of_gaps(model, x0, n) for n in SIZES}))
    lines = [["run", *(title for n in SIZES for title in (f"{n} tokens", "less the first", "+-"))]]
    for row in rows:
        lines.append([row["run"]])
        for n in SIZES:
            less = row["nats"][n] - rows[0]["nats"][n]
            lines[-1] += [row["nats"][n].mean().item(), less.mean().item(), standard_error(less)]
    for row in rows:
        row["nats"] = {n: nats.tolist() for n, nats in row["nats"].items()}
    content = to_json(rows)
    print(content if options.json == "-" else plots.table(lines, digits=3))
    if options.json not in ("", "-"):
        outputs.write(options.json, content.encode())
    return 0


def main(argv):
    if argv[:1] == ["train"]:
        return train(argv[1:])
    if argv[:1] == ["measure"] or set(argv) & {"-h", "--help"}:
        return measure(argv[1:] if argv[:1] == ["measure"] else argv)
    raise UserError("first give a mode: train or measure")


if __name__ == "__main__":
    with entry.program() as end:
        end.code = main(sys.argv[1:])
    sys.exit(end.code)
