"""Draw pictures of results/ again, from the numbers that are kept there.

python studies/figures.py baseline results/baseline.png    # curves of three logs
python studies/figures.py sampling results/sampling.png    # the first table of sampling.md
"""

import json
import re
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/figures.py, from anywhere

from support import cli, outputs, plots
from support.errors import UserError
from support.files import read_small
from support.settings import Parser, first_line

RESULTS = Path(__file__).parent.parent / "results"
LOGS = {
    "autoregressive": "cpu_pair_ar.jsonl",
    "diffusion": "cpu_pair_mdlm.jsonl",
    "diffusion, larger, 115 minutes": "cpu_shakespeare_6900s_6x256.jsonl",
}
SAMPLERS = ("default", "sweep", "random order", "confidence")
JUDGES = ("real text", "AR twin")


def with_margins(records):
    """Add to the records of a log of diffusion the margin of the mask rates that each step had.

    The logs are older than that value. Their runs had --rate_margin=0.5 and a trapezoid of learning
    rates: from the middle of a run to its end margin and learning rate decay by the same factor.
    """
    peak = max(i for i, r in enumerate(records) if r.get("lr_scale") == 1)
    for i, r in enumerate(records):
        if "lr_scale" in r:
            r["rate_margin"] = 0.5 * (r["lr_scale"] if i > peak else 1)
    return records


def draw_baseline(path):
    """Draw the losses of LOGS."""
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for name, log in LOGS.items():
            records = [json.loads(line) for line in read_small(RESULTS / log).splitlines()]
            if "val_nelbo" in records[0]:
                records = with_margins(records)
            runs.append(Path(folder) / name)
            runs[-1].mkdir()
            lines = [json.dumps(r) + "\n" for r in records]
            (runs[-1] / "log.jsonl").write_text("".join(lines))
        plots.plot_losses(path, runs, [*LOGS])


def read_table(text):
    """The rows of the first table of sampling.md, as bench.py sample has them."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] in JUDGES + SAMPLERS:
            words, words_se = re.fullmatch(r"(\S+) \+- (\S+) %", cells[2]).groups()
            twin, twin_se = re.fullmatch(r"(\S+) \+- (\S+)", cells[4]).groups()
            row = dict(sampler=cells[0], calls=int(cells[1]) if cells[1] else None)
            row |= dict(words=float(words) / 100, words_se=float(words_se) / 100)
            row |= dict(twin=float(twin), twin_se=float(twin_se), distinct=float(cells[5]))
            rows.append(row)
        elif rows and not line.startswith("|"):
            break
    return rows


def draw_sampling(path):
    """Draw the table of sampling.md."""
    plots.plot_frontier(read_table(read_small(RESULTS / "sampling.md")), path)


FIGURES = dict(baseline=draw_baseline, sampling=draw_sampling)


def main(argv):
    parser = Parser(description=first_line(__doc__))
    parser.add_argument("figure", help=" or ".join(FIGURES))
    parser.add_argument("picture", help="PNG or SVG file to write")
    args = parser.parse_args(argv)
    if args.figure not in FIGURES:
        raise UserError(f"{args.figure!r} is no figure; give {' or '.join(FIGURES)}")
    outputs.check("PICTURE", args.picture)
    plots.check_picture("PICTURE", args.picture)
    FIGURES[args.figure](args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
