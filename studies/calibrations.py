"""How much calibration helps a likelihood: one temperature, one by mask rate, Monte Carlo dropout.

    python studies/calibrations.py --out_dir=weights/record --data=tinyshakespeare.txt
    python studies/calibrations.py --out_dir=ar0,ar1 --data=tinyshakespeare.txt --networks=1

Every row is a distribution, so its NELBO is a bound. Temperatures are fitted to one half of the
validation text and measured on the other half, in turns: no window chose its own. Errors are over
blocks of neighboring windows, because these are alike. A row without a fit is the calibration that
the checkpoint has. results/record.md has the table.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/calibrations.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch
import torch.nn.functional as F
from torch import nn

import eval
import mdlm
from nanomdlm.support import numerics
from nanomdlm.support.cli import outputs, terminal
from nanomdlm.support.cli.files import to_json
from nanomdlm.support.cli.settings import Count, Reads, Writes, names_of, parse
from nanomdlm.support.run import calibration, checkpoint
from nanomdlm.support.run.plots import table

GRID = [round(1 + 0.05 * i, 2) for i in range(15)]  # temperatures: 1 to 1.7


@dataclass
class Options:
    """Compare calibrations of a model."""

    out_dir: Reads = "weights/record"  # run or checkpoint; several, separated by commas
    data: Reads = ""  # text whose last tenth validates
    windows: Count = 435  # validation windows
    passes: Count = 4  # masks of each window
    networks: Count = 8  # network calls with dropout whose probabilities are averaged (1: none)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of matrix products
    json: Writes = ""  # write the results as JSON to this file, or to standard output: -


class Dropped(nn.Module):
    """The mean of the probabilities of n calls with dropout, as a model (1506.02142)."""

    def __init__(self, model, n):
        super().__init__()
        self.model = model
        self.n = n
        for name in ("config", "objective", "ops", "vocab_size", "mask_id"):
            setattr(self, name, getattr(model, name))

    def forward(self, view):
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        logp = [self.model(view).log_softmax(-1) for _ in range(self.n)]
        return torch.stack(logp).logsumexp(0) - math.log(self.n)


def losses(model, windows, passes):
    """(W passes,) numbers of blocks of neighboring windows, one in each batch, which are alike; of
    their masks; and mean CE (W passes, len(GRID))."""
    T = windows.shape[1]
    rows = []
    bar = terminal.bar(total=len(windows) * passes, desc="evaluating")

    def observe(at, targets, logits):
        window, row = (at // T).unique(return_inverse=True)
        n = row.bincount()
        ce = torch.zeros(len(GRID), len(window), dtype=torch.float64)
        for i, temperature in enumerate(GRID):
            each = F.cross_entropy(logits.float() / temperature, targets, reduction="none")
            ce[i].index_add_(0, row, each.double())
        rows.append((window, n, (ce / n).T))
        bar.update(len(window))

    mdlm.evaluate(model, windows, passes, observe=observe)
    bar.close()
    return map(torch.cat, zip(*rows))


def measured(block, ce):
    """(NELBO, standard error, what each block adds to it) of CE (n,) in blocks (n,)."""
    n = int(block.max()) + 1
    parts = torch.zeros(n, dtype=torch.float64).index_add_(0, block, ce) * n / len(ce)
    return parts.mean().item(), numerics.standard_error(parts), parts


def fitted(block, group, ce):
    """CE (n,) where each half of the text has the temperatures that suit the other half best,
    one for each group (n,); and the temperatures (2, groups)."""
    half = (block > block.max() // 2).long()
    chosen = torch.zeros(2, int(group.max()) + 1, dtype=torch.long)
    for h in (0, 1):
        for g in group.unique():
            chosen[h, g] = ce[(half != h) & (group == g)].mean(0).argmin()
    return ce.gather(1, chosen[half, group][:, None])[:, 0], torch.tensor(GRID)[chosen]


def compared(model, windows, own, options):
    """The rows of the table, dicts."""
    rows = []
    first = None

    def add(name, block, ce, temperatures=None):
        nonlocal first
        nelbo, se, parts = measured(block, ce)
        first = parts if first is None else first
        row = dict(calibration=name, nelbo=nelbo, se=se, difference=(parts - first).mean().item())
        row["difference_se"] = numerics.standard_error(parts - first)
        rows.append(row | dict(temperatures=temperatures))

    networks = [model]
    if options.networks > 1:
        networks.append(Dropped(model, options.networks))
    for network in networks:
        block, n, ce = losses(network, windows, options.passes)
        tenth = (10 * n - 1) // windows.shape[1]
        calls = "" if network is model else f", mean of {options.networks} calls with dropout"
        add(f"none{calls}", block, ce[:, 0])
        if network is model and own in GRID[1:]:
            add(f"its own temperature, {own:g}", block, ce[:, GRID.index(own)])
        groups = {"one temperature": torch.zeros_like(tenth), "by tenth of rates": tenth}
        if model.objective.metric == "nll":  # nothing is masked
            del groups["by tenth of rates"]
        for kind, group in groups.items():
            chosen, temperatures = fitted(block, group, ce)
            add(f"{kind}{calls}", block, chosen, temperatures.tolist())
    return rows


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    outputs.check_all(options)
    folder = checkpoint.find_checkpoint(names_of(options.out_dir)[0])
    model, tokenizer, config = mdlm.load(options.out_dir)
    own = calibration.temperature_of(model)
    torch.manual_seed(0)  # of dropout
    with eval.open_data(options.data, folder, tokenizer, config, torch.device("cpu")) as (
        corpus,
        _,
    ):
        windows = corpus.windows(options.windows)
    with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
        rows = compared(model, windows, own, options)
    shown = [[v for k, v in row.items() if k != "temperatures"] for row in rows]
    metric = model.objective.metric.upper()
    words = table([["calibration", metric, "+-", "difference", "+-"], *shown], digits=4)
    content = to_json(dict(rows=rows))
    print(content if options.json == "-" else words)
    if options.json not in ("", "-"):
        outputs.write(options.json, content.encode())
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
