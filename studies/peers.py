"""Losses and recipes of other trainers of masked diffusion models, on our network and data.

    python studies/peers.py --data=tinyshakespeare.txt                    # losses, our optimizer
    python studies/peers.py --data=tinyshakespeare.txt --recipe=theirs    # their optimizers too

All train the same network (preset cpu) on the same windows. First the steps of all are timed in
turns; then each makes as many steps as fit into the seconds, so that other work on the machine
changes nothing. `mdlm.evaluate` scores all of them with the same masks. results/peers.md has the
table.

Every loss but ours masks each token independently; its formula comes from these files:
kuleshov-group/mdlm diffusion.py at c112c52, ZHZisZZ/dllm dllm/core/trainers/mdlm.py at ca176752,
SoumilBhandari/nanoDLM train.py at 2c2dfcd, nathan-barry/tiny-diffusion training.py at 2af5728.
nanoDLM's self-conditioning and tiny-diffusion's time embedding belong to their networks and are
left out.
"""

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/peers.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch

import bench
import mdlm
from nanomdlm.support.cli import devices, outputs, terminal
from nanomdlm.support.cli.files import to_json
from nanomdlm.support.cli.settings import Count, Natural, Reads, Seed, Writes, parse
from nanomdlm.support.data.texts import prepare
from nanomdlm.support.numerics import generator
from nanomdlm.support.run.plots import table
from nanomdlm.support.view import Batch

EPS = 1e-3  # the lowest mask rate of all but tiny-diffusion


class Independent(mdlm.MaskedDiffusion):
    """Mask each token of a text with probability t (LLaDA's form of the loss, as dllm has it)."""

    def draw_rates(self, B, g):
        """(B, 1) mask rates, each drawn on its own."""
        return EPS + (1 - EPS) * torch.rand(B, 1, generator=g)

    def weigh(self, hidden, t):
        """(B, T) weights of the cross-entropy: 1 / t where masked, over the number of tokens."""
        return hidden / (t * hidden.numel())

    def batch(self, ops, x0, counts, step, samples, seed=None, scored=None):
        if seed is not None:  # our evaluation
            return super().batch(ops, x0, counts, step, samples, seed, scored)
        g = generator("peers", self.seed, int(step), samples.tolist())
        t = self.draw_rates(len(x0), g)
        hidden = self.choose(x0, t, g)
        weights = self.weigh(hidden, t)
        # All positions, as in their code: the number of masked ones is random.
        rows = torch.arange(x0.numel(), device=x0.device)
        hidden, weights = (x.to(x0.device) for x in (hidden, weights))
        xt = torch.where(hidden, self.mask_id, x0)
        return Batch(self.view(xt, rows=rows), x0.flatten(), weights.flatten(), rows)

    def choose(self, x0, t, g):
        """(B, T) bool: the tokens to mask."""
        return torch.rand(x0.shape, generator=g) < t


class Antithetic(Independent):
    """The rates of a batch, one from each of B equal intervals (kuleshov-group/mdlm)."""

    def draw_rates(self, B, g):
        u = (torch.rand(B, 1, generator=g) / B + torch.arange(B)[:, None] / B) % 1
        return EPS + (1 - EPS) * u


class Unweighted(Independent):
    """128 rates; the mean over the masked tokens of a batch; the first 16 of a window stay
    (tiny-diffusion). Its mean over rates is not the bound."""

    LEVELS = 128
    CONTEXT = 16

    def draw_rates(self, B, g):
        return torch.randint(1, self.LEVELS + 1, (B, 1), generator=g) / self.LEVELS

    def choose(self, x0, t, g):
        hidden = super().choose(x0, t, g)
        hidden[:, : self.CONTEXT] = False
        return hidden

    def weigh(self, hidden, t):
        return hidden / hidden.sum().clamp(min=1)


ADAMW = dict(optimizer="adamw", learning_rate=3e-4, lr_schedule="constant", weight_decay=0.01)
ADAMW |= dict(warmup_steps=0, ema=0.0, grad_clip=1.0)
# name -> loss, and what its own recipe changes. Beta2 is 0.95 for all; nanoDLM's cosine ends at a
# tenth, here at 0; kuleshov's warm-up is 2,500 steps for a million, here a quarter of a percent.
PEERS = {
    "mdlm (ours)": (mdlm.MaskedDiffusion, {}),
    "kuleshov-group/mdlm": (Antithetic, dict(ema=0.9999, weight_decay=0.0, warmup_steps=2500)),
    "dllm": (
        Independent,
        dict(lr_schedule="cosine", learning_rate=1e-4, weight_decay=0.0, warmup_steps=250),
    ),
    "nanoDLM": (Independent, dict(lr_schedule="cosine", weight_decay=0.1, warmup_steps=100)),
    "tiny-diffusion": (Unweighted, dict(grad_clip=0.0)),
}


@dataclass
class Options:
    """Train one network with the losses of several trainers for the same time."""

    data: Reads = "shakespeare"  # text whose last tenth validates
    recipe: Literal["ours", "theirs"] = "ours"  # optimizer, schedule, and averaging of weights
    seconds: str = "120,300,900"  # lengths of the runs
    only: str = ""  # names of trainers, separated by commas (default: all that differ)
    timing: Count = 30  # seconds for timing the steps of each
    windows: Natural = 0  # validation windows (0: all)
    seed: Seed = 0
    json: Writes = ""  # write the results as JSON to this file, or to standard output: -


def start(folder, options, name):
    """A compiled Run of one trainer."""
    objective, recipe = PEERS[name]
    config = replace(bench.preset_config("cpu"), seed=options.seed)
    if options.recipe == "theirs" and recipe:
        config = replace(config, **(ADAMW | recipe))
    device = torch.device("cpu")
    dtype = devices.pick_dtype("auto", device)
    run = bench.start_run(config, folder, device, dtype, "torch", compiled=True)
    for model in {run.model, run.averaged}:
        model.objective = objective(config, model.mask_id)
    return run


def step_seconds(folder, options, names):
    """name -> median seconds of a training step, timed in turns."""
    calls = {}
    for name in names:
        steps = bench.steps_of(start(folder, options, name))
        calls[name] = lambda steps=steps: next(steps)
    raced = bench.race(calls, torch.device("cpu"), options.timing, shortest=0.5)
    return {name: median for name, (median, spread) in raced.items()}


def train(folder, options, name, steps):
    """NELBO and its standard error after so many steps."""
    run = start(folder, options, name)
    bar = terminal.bar(total=steps, desc=name)
    for run.step in range(steps):
        mdlm.train_step(run, run.step, run.step / steps)
        bar.update()
    bar.close()
    run.check_finite()
    with run.autocast():
        r = mdlm.evaluate(run.averaged, run.corpus.windows(options.windows), passes=4)
    return r["nelbo"], r["se"]


def names_of(options):
    """The trainers to compare. With our optimizer, nanoDLM is dllm."""
    names = [n for n in options.only.split(",") if n]
    if names:
        return names
    return [n for n in PEERS if n != "nanoDLM" or options.recipe == "theirs"]


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    outputs.check_all(options)
    names = names_of(options)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = replace(bench.preset_config("cpu"), data=options.data, vocab_size=0)
        prepare(config, Path(folder))
        times = step_seconds(folder, options, names)
        for seconds in map(float, options.seconds.split(",")):
            for name in names:
                steps = round(seconds / times[name])
                nelbo, se = train(folder, options, name, steps)
                row = dict(trainer=name, seconds=seconds, ms=times[name] * 1e3, steps=steps)
                rows.append(row | dict(nelbo=nelbo, se=se))
                print(rows[-1], file=sys.stderr, flush=True)
    heads = ["trainer", "seconds", "ms a step", "steps", "NELBO", "+-"]
    content = to_json(dict(rows=rows, threads=torch.get_num_threads()))
    print(content if options.json == "-" else table([heads, *(r.values() for r in rows)], digits=3))
    if options.json not in ("", "-"):
        outputs.write(options.json, content.encode())
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
