"""Draw pictures of results/ again, and measure again what depends on the shipped weights.

python studies/figures.py baseline results/baseline.png    # curves of three logs
python studies/figures.py sampling results/sampling.png    # the first table of sampling.md
python studies/figures.py --all --data=tinyshakespeare.txt --ar_dir=twin --results=figures

--all runs MEASUREMENTS one after another, for all figures of README.md, docs/ and results/ that
new weights would change, and writes what each prints into --results. It takes hours on two cores;
started again, it goes on with what is missing, or was made with other weights. twin: an
autoregressive network that judges samples (results/sampling.md says how it is trained).
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/figures.py, from anywhere

from nanomdlm.support.cli import entry, outputs
from nanomdlm.support.cli.files import read_small, sha256_of
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import plots
from nanomdlm.support.run.checkpoint import find_checkpoint

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
LOGS = {
    "autoregressive": "cpu_pair_ar.jsonl",
    "diffusion": "cpu_pair_mdlm.jsonl",
    "diffusion, larger, 115 minutes": "cpu_shakespeare_6900s_6x256.jsonl",
}
SINGLE = "--out_dir=weights/shakespeare"
BOTH = "--out_dir=weights/shakespeare,weights/record"
ROUNDED = "--dtype=bfloat16"
MEASUREMENTS = {  # the file in --results -> a program and its arguments; {data}, {twin}
    "likelihood": f"eval.py {SINGLE} --data={{data}} {ROUNDED}",
    "likelihood_record": f"eval.py --out_dir=weights/record --data={{data}} {ROUNDED}",
    "likelihood_both": f"eval.py {BOTH} --data={{data}} {ROUNDED}",
    "likelihood_exact": f"eval.py {SINGLE} --data={{data}} --exact {ROUNDED}",
    "predictions": f"eval.py {SINGLE} --text='To be, or not to be' --pictures={{results}}",
    "infill": f"sample.py {SINGLE} --infill 'To be, or ███ to be' --candidates=4",
    "infill_words": f"sample.py {SINGLE} --candidates=4 "
    "--infill 'The [___|king|queen|duke|fool|cat] is dead!'",
    "infill_length": f"sample.py {SINGLE} --infill 'To [___], or not to be' --candidates=5",
    "text": f"sample.py {SINGLE} --seed=1",
    "search": f"studies/search.py {SINGLE} --data={{data}} --results={{results}}/search.jsonl",
    "regret": f"studies/regret.py {SINGLE} --data={{data}} --results={{results}}/regret.jsonl "
    "--networks=weights/shakespeare,weights/record",
    "lengths": f"studies/lengths.py {SINGLE} --data={{data}} --results={{results}}/lengths.jsonl",
    "samples": f"bench.py sample {SINGLE} --ar_dir={{twin}} --data={{data}} {ROUNDED}",
    "gaps": f"studies/adaptive_calls.py {SINGLE} --data={{data}} --gaps --num_samples=48 "
    "--steps=16,32 --threshold=.9,.5 --entropy_bound=2",
} | {
    f"proofreading_{source}": f"studies/proofreading.py --data={{data}} --begin=53200 {ROUNDED} "
    f"--characters=13200 --others=3300 --source={source} --json={{results}}/{source}.jsonl"
    for source in ("keyboard", "random")
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
            row = dict(sampler=cells[0], calls=int(cells[1]) if cells[1] else None)
            for name, cell in zip(("words", "told", "twin"), cells[2:]):
                value, error, percent = re.fullmatch(r"(\S+) \+- (\S+)( %)?", cell).groups()
                scale = 100 if percent else 1
                row |= {name: float(value) / scale, f"{name}_se": float(error) / scale}
            row["distinct"] = float(cells[6])
            rows.append(row)
        elif rows and not line.startswith("|"):
            break
    return rows


def draw_sampling(path):
    """Draw the table of sampling.md."""
    plots.plot_frontier(read_table(read_small(RESULTS / "sampling.md")), path)


FIGURES = dict(baseline=draw_baseline, sampling=draw_sampling)


def identity(command, options):
    """What a measurement depends on, in a line: the command, the text, and all weights."""
    weights = [ROOT / "weights" / name / "model.safetensors" for name in ("shakespeare", "record")]
    weights += find_checkpoint(options.ar_dir).glob("model.safetensors")
    sums = [sha256_of(path)[:12] for path in (options.data, *weights)]
    return f"python {command}    # {' '.join(sums)}\n"


def measure(options):
    """Run MEASUREMENTS that have not been made with these weights; returns how many failed."""
    folder = Path(options.results)
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, command in MEASUREMENTS.items():
        path = folder / f"{name}.txt"
        where = dict(data=options.data, twin=options.ar_dir, results=options.results)
        where = {key: shlex.quote(value) for key, value in where.items()}
        command = command.format(**where)
        head = identity(command, options)
        begun = folder / f"{name}.begun"  # lines that it has written may be gone on with
        if path.exists() and path.read_text(encoding="utf-8").startswith(head):
            continue
        if not begun.exists() or begun.read_text(encoding="utf-8") != head:
            for stale in (path, folder / f"{name.removeprefix('proofreading_')}.jsonl"):
                stale.unlink(missing_ok=True)
            begun.write_text(head, encoding="utf-8")
        print(f"{name}: python {command}", flush=True)
        done = subprocess.run(
            [sys.executable, *shlex.split(command)], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            failed += 1
            print(done.stderr[-2000:], file=sys.stderr)
        else:
            path.write_text(f"{head}\n{done.stdout}", encoding="utf-8")
            begun.unlink()
    return failed


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figure", nargs="?", choices=FIGURES)
    parser.add_argument("picture", nargs="?", help="PNG or SVG file to write")
    parser.add_argument("--all", action="store_true", help="run all measurements")
    parser.add_argument("--data", help="the text that the weights have learned")
    parser.add_argument("--ar_dir", help="an autoregressive network that judges samples")
    parser.add_argument("--results", default="figures", help="folder for what they print")
    options = parser.parse_args(argv)
    if options.all:
        if not (options.data and options.ar_dir):
            raise UserError("--all needs --data=TEXT and --ar_dir=RUN")
        for name in ("data", "ar_dir", "results"):
            setattr(options, name, str(Path(getattr(options, name)).resolve()))
        return int(measure(options) > 0)
    if not options.picture:
        raise UserError(f"give a figure ({' or '.join(FIGURES)}) and a picture, or --all")
    outputs.check("PICTURE", options.picture)
    plots.check_picture("PICTURE", options.picture)
    FIGURES[options.figure](options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
