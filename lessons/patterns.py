"""Measure how many network calls a sampler needs to generate valid patterns.

    python mdlm.py --data=patterns --max_steps=1000 --out_dir=out-patterns     # four minutes
    python lessons/patterns.py out-patterns patterns.png

A sequence is valid if it repeats its first 2, 3 or 4 symbols, or as many as --periods of the run
says. The picture shows the share of valid sequences against the number of steps, with a band from
the worst to the best seed; the speed; and some of the sequences. --dark draws it for a dark
background.
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanomdlm.support.cli import entry, environment

entry.start(__name__)

import torch

import mdlm
import sample
from nanomdlm.support.cli import outputs
from nanomdlm.support.data.patterns import parse_periods
from nanomdlm.support.errors import UserError
from nanomdlm.support.run.plots import DARK, LIGHT, check_picture, themed, write_figure

STEPS = (1, 2, 4, 8, 16, 32)
SHOWN = 16  # sequences in the picture, at most
FIRST = 24  # symbols of each, at most
SAMPLERS = {
    "default": {},
    "random order": dict(order="random", correct=0),
    "confidence": dict(order="confidence", correct=0),
}


def is_pattern(text, periods=(2, 4)):
    """Whether a text repeats its first n symbols, n from the lowest period to the highest."""
    low, high = periods
    return any(text == (text[:n] * len(text))[: len(text)] for n in range(low, high + 1))


def write(model, tokenizer, n, **settings):
    """Generate n sequences; return them as texts, and the speed in tokens per second."""
    x = torch.full((n, model.config.block_size), model.mask_id)
    began = time.monotonic()
    ids = sample.generate(model, x, **settings)
    seconds = time.monotonic() - began
    return [tokenizer.decode(row) for row in ids.tolist()], x.numel() / seconds


def measure(model, tokenizer, seeds, n):
    """Return {sampler: for each number of steps, the share of valid texts for each seed}, and the
    default sampler's speeds and its (texts, whether each is valid)."""
    periods = parse_periods(model.config.periods)
    fractions = {name: [] for name in SAMPLERS}
    speeds = []
    shown = []
    for name, settings in SAMPLERS.items():
        for steps in STEPS:
            used = settings | dict(steps=steps)
            trials = [write(model, tokenizer, n, seed=seed, **used) for seed in range(seeds)]
            valid = [[is_pattern(text, periods) for text in texts] for texts, _ in trials]
            fractions[name].append([sum(each) / n for each in valid])
            if name == "default":
                speeds.append(sorted(speed for _, speed in trials)[seeds // 2])
                shown.append([*zip(trials[0][0], valid[0])])
            best = ", ".join(f"{fraction:.3f}" for fraction in fractions[name][-1])
            print(f"{name:<13} {steps:>2} steps: valid {best}", flush=True)
            done = sum(map(len, fractions.values()))
            print(f"{done} of {len(SAMPLERS) * len(STEPS)}", file=sys.stderr)
    return fractions, speeds, shown


def sweet_spot(fractions):
    """The index of the fewest steps with at least 0.95 of the best mean share of valid texts."""
    means = [sum(values) / len(values) for values in fractions]
    return next(i for i, mean in enumerate(means) if mean >= 0.95 * max(means))


def draw(fractions, speeds, shown, path, theme=LIGHT):
    matplotlib = environment.optional("matplotlib.figure", "a picture")
    fig = matplotlib.Figure((8.6, 6.6), dpi=150, layout="constrained")
    top, bottom = fig.subfigures(2, 1, height_ratios=[1.1, 1])
    ax = top.subplots()
    colors = (theme.blue, theme.red, theme.green)
    for (name, values), color in zip(fractions.items(), colors):
        means = [sum(v) / len(v) for v in values]
        ax.plot(STEPS, means, "o-", color=color, lw=1.8, label=name)
        ax.fill_between(
            STEPS, list(map(min, values)), list(map(max, values)), color=color, alpha=0.2
        )
    best = sweet_spot(fractions["default"])
    height = sum(fractions["default"][best]) / len(fractions["default"][best])
    ax.plot(STEPS[best], height, "*", color=theme.blue, ms=18, mec=theme.paper)
    words = f"sweet spot: {height:.1%} valid in {STEPS[best]} steps"
    place = dict(textcoords="offset points", xytext=(8, 10), ha="right")
    ax.annotate(words, (STEPS[best], height), color=theme.blue, **place)
    ax.set(xscale="log", xlabel="steps", ylabel="share of valid sequences", ylim=(0, 1.12))
    ax.set_xticks(STEPS, STEPS)
    ax.minorticks_off()
    ax.spines["top"].set_visible(False)
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, loc="center left")
    speed = ax.twinx()
    speed.plot(STEPS, speeds, ":", color=theme.soft, lw=1.5)
    speed.set(yscale="log", ylabel="tokens/s of default (dotted)")
    speed.spines["top"].set_visible(False)
    symbols = sorted(set("".join(text for texts in shown for text, _ in texts)))
    width = min(FIRST, max(len(text) for texts in shown for text, _ in texts))
    grids = bottom.subplots(1, len(STEPS))
    for axis, steps, texts in zip(grids, STEPS, shown):
        texts = texts[:SHOWN]
        rows = [[symbols.index(c) for c in text[:width]] for text, _ in texts]
        axis.imshow(rows, cmap="tab20", vmin=0, vmax=19, aspect="auto")
        marks = ["✓" if valid else "✗" for _, valid in texts]
        axis.set_yticks(range(len(texts)), marks)
        axis.tick_params(length=0, labelsize=8)
        axis.set(xticks=[], title=f"{steps} step{'s' * (steps > 1)}")
        axis.title.set_fontsize(9)
    n = len(shown[0][:SHOWN])
    title = f"{n} sequence{'s' * (n > 1)} each, their first {width} symbols, default sampler"
    bottom.suptitle(title, fontsize=10)
    write_figure(fig, path, small=True)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="folder of a run with --data=patterns")
    parser.add_argument("picture", help="PNG or SVG file to write")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=128, help="for each seed")
    parser.add_argument("--dark", action="store_true", help="for a dark background")
    args = parser.parse_args(argv)
    outputs.check("PICTURE", args.picture, dict(RUN=args.run))
    check_picture("PICTURE", args.picture)  # before the work
    if args.seeds < 1 or args.sequences < 1:
        raise UserError("give --seeds and --sequences of at least 1")
    model, tokenizer, config = mdlm.load(args.run)
    if config.data != "patterns":
        raise UserError(f"{args.run} learned {config.data}; give a run with --data=patterns")
    measured = measure(model, tokenizer, args.seeds, args.sequences)
    theme = DARK if args.dark else LIGHT
    with themed(theme):
        draw(*measured, args.picture, theme)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
