"""Draw the pictures of the lessons: masks, predictions, attention, orders, losses.

    python lessons/pictures.py masking.png              # 1,000 random masks; densities of rates
    python lessons/pictures.py attention.png --text="To be, or ███ to be"    # a map for each head
    python lessons/pictures.py orders.png --orders=random,spread             # a row for each step
    python lessons/pictures.py rates.png --compare=bert.json,writer.json     # a curve a model
    python lessons/pictures.py noise.png --draw=noise --dark       # for a dark background

The first also prints how many tokens were masked: by exactly l masks, and by masking each token
with probability t (Bernoulli), as most papers do. With --orders the gaps of --text are filled, or a
text is written from nothing. --compare takes files that eval.py --json wrote. Where a model is
needed it is that of --run, by default the run in out/ or, if there is none, the model that ships.

--draw=idea: autoregressive and diffusion, with six words
--draw=noise, strips: a text, and patterns of lesson 8, at rising mask rates
--draw=guesses: the three likeliest tokens under each mask, and the truth
--draw=look: what the first mask of a text reads from (attention)
--draw=joint: two tokens that are drawn in two calls, and in one
--draw=losses: the log of one run, or of up to four (--run=a,b)
--draw=waves: what --time_conditioning tells the network
--draw=means, jensen, sees, automaton: what lessons 2, 6, 11 and 13 compute by hand
--draw=search: how the best fill of a gap of two letters is found
--draw=twin: a diffusion model and its autoregressive twin, by step
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
from pathlib import Path
from statistics import mean, pstdev
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch

import eval
import mdlm
import sample
from lessons import drawings
from nanomdlm.kernels.reference import is_visible, mask_tokens_ref, prepare
from nanomdlm.support.cli import outputs
from nanomdlm.support.cli.environment import optional
from nanomdlm.support.cli.settings import check_clashes
from nanomdlm.support.data import patterns
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.model_calls import to_context
from nanomdlm.support.infill.templates import has_open, parse, to_ids
from nanomdlm.support.run import comparing, plots
from nanomdlm.support.run.calibration import calibrated
from nanomdlm.support.run.checkpoint import default_run
from nanomdlm.support.run.plots import (
    DARK,
    LIGHT,
    Cell,
    check_picture,
    columns,
    draw_texts,
    figure,
    themed,
    visible,
    write_figure,
)
from nanomdlm.variants import rates

T = 256
RATES = (0.2, 0.5, 0.8)
WIDEST = 64  # tokens of a text that is drawn in one line
SLOTS = 12  # masks whose likeliest tokens fit beside each other
SENTENCE = "To be, or not to be: that is the question"
WITH_GAP = "My lord, I pray you, s██ to the king"
BRANCHES = 3  # letters that a picture of a search shows for each fill
WITH_MASK = "My lord, I pray you, tell m█ what the king hath said."
# What --draw accepts, and the flags that it uses.
DRAWINGS = dict(
    idea=(),
    noise=("text", "run", "seed"),
    strips=("seed",),
    guesses=("text", "run", "rate"),
    look=("text", "run"),
    joint=(),
    losses=("run",),
    waves=(),
    means=(),
    jensen=(),
    search=("text", "run"),
    twin=(),
    sees=(),
    automaton=(),
)
BY_HAND = dict(
    idea=drawings.draw_idea,
    waves=drawings.draw_waves,
    means=drawings.draw_means,
    jensen=drawings.draw_jensen,
    sees=drawings.draw_sees,
    automaton=drawings.draw_automaton,
)


def count_masks(draws=1000):
    """The numbers of masked tokens of T: {rate: two lists (draws,), Bernoulli and exact}."""
    x0 = torch.zeros(draws, T, dtype=torch.int64)
    counts = {}
    for rate in RATES:
        bernoulli = torch.full((draws,), rate)
        exact = (bernoulli * T).round().long()
        key = (1, 0, 0, torch.arange(draws))  # the id of [MASK], seed, step, samples
        masks = [mask_tokens_ref(x0, masking, *key) for masking in (bernoulli, exact)]
        counts[rate] = [count.tolist() for _, count, _, _ in masks]
    return counts


def schedule_densities():
    """The density of mask rates in training: {schedule: (T,)}, all 1 for a uniform one."""
    config = mdlm.Config(block_size=T)
    densities = {}
    for name in rates.SCHEDULES:
        variant = dataclasses.replace(config, rates=name)
        densities[name] = (rates.count_probabilities(variant)[1:] * T).tolist()
    return densities


@torch.no_grad()
def attention_maps(model, xt):
    """The attention weights for xt (1, T): {index of the block: (H, T, T), rows sum to 1}.

    They are computed here explicitly, because a fused kernel does not return them.
    """
    ops = model.ops
    maps = []

    def explicit(qkv, cos, sin, qk_norm, causal, spans):
        q, k, _ = prepare(qkv, cos, sin, qk_norm)  # (1, T, H, D)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        at = torch.arange(xt.shape[1])
        if causal:
            scores = scores.masked_fill(at > at[:, None], -math.inf)
        if spans is not None:
            scores = scores.masked_fill(~is_visible(spans, at)[:, None], -math.inf)
        maps.append(scores.softmax(-1)[0])
        return ops.attention(qkv, cos, sin, qk_norm, causal, spans)

    model.ops = SimpleNamespace(**vars(model.ops) | dict(attention=explicit))
    model(model.objective.view(xt))
    model.ops = ops
    numbers = [i for i, layer in enumerate(model.layers) if layer.qkv is not None]
    return dict(zip(numbers, maps, strict=True))


def draw_attention(maps, labels, path, theme=LIGHT):
    """Draw the maps of the last layer that attends, for the tokens that have labels."""
    layer, head_maps = max(maps.items())
    n = len(labels)
    size = min(max(2.4, n / 15), 4)  # inches
    fig, axes = figure(size * len(head_maps) + 0.6, size + 0.9, 1, len(head_maps), squeeze=False)
    highest = head_maps[:, :n, :n].max().item()
    colors = optional("matplotlib.colors", "a picture")
    colormap = colors.LinearSegmentedColormap.from_list("weights", [theme.paper, theme.blue])
    for head, (ax, p) in enumerate(zip(axes[0], head_maps, strict=True), 1):
        image = ax.imshow(p[:n, :n].numpy(), cmap=colormap, vmin=0, vmax=highest)
        ax.grid(False)
        ax.set_title(f"layer {layer + 1}, head {head}", fontsize=8)
        at = range(n) if n <= 72 else []
        ax.set_xticks(at, labels[: len(at)], fontsize=62 * size / n)
        ax.set_yticks(at, labels[: len(at)], fontsize=62 * size / n)
        ax.tick_params(length=0, pad=1)
    fig.colorbar(image, ax=axes[0, -1], fraction=0.05)
    words = "Each row shows which tokens the token at its left reads from (blue: much), "
    fig.suptitle(words + "before the model predicts the masked ones (█).", fontsize=10)
    write_figure(fig, path, small=True)


def draw_masking(counts, schedules, path, theme=LIGHT):
    fig, (left, right) = figure(9, 3.4, 1, 2)
    colors = (theme.blue, theme.red, theme.green)
    for color, (rate, (bernoulli, exact)) in zip(colors, counts.items()):
        left.hist(bernoulli, range(T + 2), color=color, alpha=0.5)
        left.axvline(exact[0] + 0.5, color=color, lw=1.5)
        words = f" rate {rate:g}:\n {exact[0]} of {T}"
        place = left.get_xaxis_transform()
        left.text(exact[0] + 1, 0.98, words, color=color, fontsize=8, va="top", transform=place)
    left.set(xlim=(0, 1.15 * T), xlabel="masked tokens", ylabel="of 1,000 draws")
    left.set_title("line: exact number; bars: each token alone (Bernoulli)", fontsize=9)
    rates = [(i + 0.5) / T for i in range(T)]
    for color, (name, density) in zip(colors, schedules.items()):
        right.plot(rates, density, color=color, lw=1.6, label=f"--rates={name}")
    right.axvline(0.15, color=theme.soft, lw=1.6, ls="--", label="BERT: always 0.15")
    right.set(xlim=(0, 1), ylim=(0, 3), xlabel="mask rate", ylabel="density")
    right.set_title("how often training draws a rate", fontsize=9)
    right.legend(frameon=False, fontsize=8)
    write_figure(fig, path, small=True)


def draw_rates(evaluations, path, theme=LIGHT):
    """Draw the cross-entropy by mask rate of each evaluation; the area below it is the NELBO.

    evaluations: {name: a dict of eval.py --json}. Between two curves the area has the color of the
    lower one, the better model.
    """
    colors = itertools.cycle((theme.red, theme.blue, theme.green))
    curves = []
    fig, ax = figure(7.5, 3.6)
    for (name, r), color in zip(evaluations.items(), colors):
        known = [math.nan if ce is None else ce for ce in r["ce"]]  # None: no such rate
        label = f"{name}: NELBO {r['nelbo']:.2f}, the area below"
        ax.plot(range(5, 100, 10), known, "o-", color=color, ms=5, label=label)
        curves.append((known, color))
    pairs = itertools.permutations(curves, 2) if len(curves) == 2 else ()
    for (low, color), (high, _) in pairs:
        top = [a + max(0, b - a) for a, b in zip(low, high)]
        ax.stairs(top, range(0, 101, 10), baseline=low, fill=True, color=color, alpha=0.3)
    ax.set(xlabel="masked, %", xlim=(0, 100), xticks=range(0, 101, 10), ylim=(0, None))
    ax.set_ylabel("cross-entropy, nats per masked token")
    ax.axvline(15, color=theme.soft, lw=1.2, ls="--")
    ax.text(16, 0.03, "BERT: 15 %", transform=ax.get_xaxis_transform(), fontsize=9)
    ax.legend(frameon=False, loc="lower center", fontsize=9)
    write_figure(fig, path, small=True)


def has_rates(r):
    """Whether a dict of eval.py --json has the cross-entropies of ten mask rates, and the NELBO."""
    ce = r.get("ce")
    known = [x for x in ce if x is not None] if isinstance(ce, list) and len(ce) == 10 else []
    return bool(known) and all(isinstance(x, float) for x in [*known, r.get("nelbo")])


def evaluations_of(args):
    """{name of a file without its suffix: what eval.py --json wrote there} of --compare."""
    names = [os.path.expanduser(name) for name in args.compare.split(",")]
    for name in names:
        outputs.check("PICTURE", args.picture, dict(compare=name))
    comparing.compare(names)  # raises UserError unless all scored the same windows
    evaluations = {}
    for name in names:
        r = comparing.read_evaluation(name)
        if not has_rates(r):
            fix = "give evaluations of diffusion models"
            raise UserError(f"{name} has no cross-entropy by mask rate; {fix}")
        stem = Path(name).stem
        evaluations[name if stem in evaluations else stem] = r
    return evaluations


def unmask(model, x, order, steps, seed):
    """The texts x (1, T) before the first step and after each one, (n, T), in this order."""
    steps_taken = sample.unmask(model, x, order=order, correct=0, seed=seed, steps=steps)
    return torch.cat([x, *(step.x for step in steps_taken)])


def trajectory_cells(tokenizer, texts, mask, theme=LIGHT):
    """Lines of Cells for texts (n, T) of one text's steps; the tokens of a column are as wide.

    Blue behind: a token that the step drew; pale blue: one from before; gray: a mask.
    """
    pieces = [[visible(text) for text in tokenizer.pieces(ids)] for ids in texts.tolist()]
    hidden = texts == mask
    widths = [
        max([1, *(columns(text) for text, masked in zip(column, masks) if not masked)])
        for column, masks in zip(zip(*pieces), hidden.T.tolist())
    ]
    lines = []
    for k, row in enumerate(pieces):
        line = []
        for i, (text, width) in enumerate(zip(row, widths)):
            text += " " * (width - columns(text))
            if hidden[k, i]:
                line.append(Cell(" " * width, theme.ink, theme.mask))
            elif not hidden[0, i]:
                line.append(Cell(text, theme.ink))
            elif hidden[k - 1, i]:
                line.append(Cell(text, theme.paper, theme.blue))
            else:
                line.append(Cell(text, theme.ink, (theme.blue, 0.2)))
        lines.append(line)
    return lines


def draw_trajectories(trajectories, path, theme=LIGHT):
    """Draw lines of Cells for each name of an order, side by side."""
    wide = max(sum(columns(c.text) for c in lines[0]) for lines in trajectories.values())
    most = max(map(len, trajectories.values()))
    fig, axes = figure(
        (0.088 * wide + 0.4) * len(trajectories), 0.19 * most + 0.9, 1, len(trajectories)
    )
    for ax, (order, lines) in zip(axes, trajectories.items(), strict=True):
        draw_texts(ax, lines, theme=theme)
        ax.set_ylim(most, 0)  # rows of one step are at one height
        ax.set_title(f"--order={order} --correct=0: {len(lines) - 1} steps", fontsize=9)
        for step in range(0, len(lines), 4):
            ax.text(
                -0.6, step + 0.5, step, size=8, color=theme.soft, ha="right", va="center_baseline"
            )
    words = (
        "A text after each step, from top to bottom: strong blue is new, pale was drawn before, "
    )
    fig.suptitle(words + "gray is masked", fontsize=9)
    write_figure(fig, path, small=True)


def read_text(text, model, tokenizer):
    """The ids of --text, with masks."""
    segments = parse(text, tokenizer, model.config.block_size)
    if has_open(segments):
        raise UserError("[___] has no known length in a picture; write █ for each token")
    return to_ids(segments, model.mask_id)


def check_orders(text):
    """The names of two orders in the value of --orders."""
    orders = text.split(",")
    known = [name for name in sample.ORDERS if name != "one_shot"]
    if len(set(orders)) != 2 or not set(orders) <= set(known):
        raise UserError(f"--orders={text} is not accepted; give two of {', '.join(known)}")
    return orders


def trajectories_of(args, theme):
    """{order: lines of Cells} as --orders, --text, --steps and --seed say."""
    orders = check_orders(args.orders)
    model, tokenizer, config = mdlm.load(default_run(args.run), whole=True)
    ids = [model.mask_id] * min(40, config.block_size)
    if args.text:
        ids = read_text(args.text, model, tokenizer)
    if ids.count(model.mask_id) < 2 or len(ids) > WIDEST:
        given = f"{len(ids)} tokens, {ids.count(model.mask_id)} of them masks"
        raise UserError(f"--text has {given}; give at most {WIDEST}, and at least two masks (█)")
    steps = 12 if args.steps is None else args.steps
    if not 2 <= steps <= 64:
        raise UserError(f"--steps={steps} is not accepted; give 2 to 64")
    x = torch.tensor([ids])
    cells = {}
    for order in orders:
        texts = unmask(model, x, order, min(steps, ids.count(model.mask_id)), args.seed or 0)
        cells[order] = trajectory_cells(tokenizer, texts, model.mask_id, theme)
    return cells


def load_writer(args):
    """The model, its tokenizer and config of --run; raises UserError if its texts have blocks."""
    model, tokenizer, config = mdlm.load(default_run(args.run), whole=True)
    if model.objective.n_texts > 1:
        raise UserError(f"{args.run or 'out'} has blocks; give --run without, or of --infill_share")
    return model, tokenizer, config


def check_size(ids, model):
    """Raise UserError for a text that is too long to be drawn in one line."""
    most = min(WIDEST, model.config.block_size)
    if not 0 < len(ids) <= most:
        raise UserError(f"--text has {len(ids)} tokens; give 1 to {most}")


def noise_of(args, theme):
    """{rate: [Cells of --text]} for draw_noise."""
    model, tokenizer, _ = load_writer(args)
    ids = tokenizer.encode_lossless(args.text or SENTENCE)
    check_size(ids, model)
    generator = torch.Generator().manual_seed(args.seed or 0)
    uniform = torch.rand(len(ids), generator=generator).tolist()
    pieces = tokenizer.pieces(ids)
    groups = {}
    for rate, masked in drawings.mask_at_rates(ids, uniform, model.mask_id).items():
        hidden = [token == model.mask_id for token in masked]
        groups[rate] = [drawings.noise_cells(pieces, hidden, theme)]
    return groups


def strips_of(args, theme, width=48):
    """{rate: lines of Cells} for draw_noise: patterns of two, three and four symbols."""
    rows = patterns.make(256, args.seed or 0)[:, :width]
    chosen = []
    for length in (2, 3, 4):
        repeats = (rows[:, length:] == rows[:, :-length]).all(1)
        has_all = [len({*row[:length].tolist()}) == length for row in rows]
        chosen.append(rows[int((repeats & has_all).argmax())].tolist())
    colors = (theme.blue, theme.red, theme.green, theme.purple)
    generator = torch.Generator().manual_seed(args.seed or 0)
    groups = {rate: [] for rate in drawings.RATES}
    for row in chosen:
        color_of = dict(zip(dict.fromkeys(row), colors))
        faces = [color_of[symbol] for symbol in row]
        uniform = torch.rand(width, generator=generator).tolist()
        pieces = ["abcdefghijklmno"[symbol] for symbol in row]
        for rate, masked in drawings.mask_at_rates(row, uniform, -1).items():
            hidden = [symbol == -1 for symbol in masked]
            groups[rate].append(drawings.noise_cells(pieces, hidden, theme, faces))
    return groups


@torch.no_grad()
def guesses_of(args):
    """The tokens of --text for draw_guesses; --rate of them are masked, as by eval.py --text."""
    model, tokenizer, _ = load_writer(args)
    model = calibrated(model)
    ids = tokenizer.encode_lossless(args.text or SENTENCE)
    check_size(ids, model)
    rate = 0.2 if args.rate is None else args.rate
    highest = min(1, SLOTS / len(ids))
    if not 0 < rate <= highest:
        fix = f"give more than 0 and at most {highest:.2g}"
        raise UserError(f"--rate={rate:g} is not accepted for {len(ids)} tokens; {fix}")
    x0 = to_context(model, torch.tensor([ids]))
    is_text = torch.arange(x0.shape[1])[None] < len(ids)
    return eval.predict(model, tokenizer, x0, len(ids), is_text, rate)


def look_of(args):
    """Pieces of the tokens of --text, the maps of the last layer that attends, the first mask."""
    model, tokenizer, _ = load_writer(args)
    ids = read_text(args.text or WITH_MASK, model, tokenizer)
    check_size(ids, model)
    maps = attention_maps(model, to_context(model, torch.tensor([ids])))
    return tokenizer.pieces(ids), maps[max(maps)], ids.index(model.mask_id)


@torch.no_grad()
def search_of(args):
    """The tree of a best-first search for the masks of --text, for drawings.draw_search.

    Each call continues the cheapest fill, from left to right, until that is a complete one; the
    BRANCHES likeliest letters of each are kept.
    """
    model, tokenizer, _ = load_writer(args)
    ids = read_text(args.text or WITH_GAP, model, tokenizer)
    check_size(ids, model)
    gaps = [i for i, token in enumerate(ids) if token == model.mask_id]
    if len(gaps) != 2:
        raise UserError(f"--text has {len(gaps)} masks; give two (█)")
    tree = [dict(text="", parent=None, cost=0.0, call=None, final=False, ids=ids)]
    for call in itertools.count(1):
        waiting = [i for i, node in enumerate(tree) if node["call"] is None]
        parent = min(waiting, key=lambda i: tree[i]["cost"])
        node = tree[parent]
        if node["final"]:
            return tree
        node["call"] = call
        x = to_context(model, torch.tensor([node["ids"]]))
        at = gaps[len(node["text"])]
        logp = model(model.objective.view(x))[0, at].log_softmax(-1)
        for cost, token in zip(*(each.tolist() for each in (-logp).topk(BRANCHES, largest=False))):
            filled = [*node["ids"][:at], token, *node["ids"][at + 1 :]]
            text = node["text"] + tokenizer.pieces([token])[0]
            is_final = at == gaps[-1]
            tree.append(
                dict(
                    text=text,
                    parent=parent,
                    cost=node["cost"] + cost,
                    call=None,
                    final=is_final,
                    ids=filled,
                )
            )


def twin_logs():
    """The logs of the two runs of results/baseline.md: {objective: records}."""
    results = Path(__file__).resolve().parent.parent / "results"
    logs = {}
    for name in ("mdlm", "ar"):
        text = (results / f"cpu_pair_{name}.jsonl").read_text(encoding="utf-8")
        logs[name] = [json.loads(line) for line in text.splitlines()]
    return logs


def logs_of(args):
    """{name of a run: its log} of --run, of up to four folders."""
    names = [os.path.expanduser(name) for name in (args.run or str(default_run(None))).split(",")]
    if len(names) > 4:
        raise UserError(f"--run names {len(names)} runs; give at most 4")
    logs = {}
    for name in names:
        short = Path(name).name
        logs[name if short in logs else short] = plots.read_log(name)
    return logs


def make_drawing(args, theme):
    """Draw what --draw says."""
    path = args.picture
    if args.draw in BY_HAND:
        BY_HAND[args.draw](path, theme)
    elif args.draw == "noise":
        drawings.draw_noise(noise_of(args, theme), path, theme)
    elif args.draw == "strips":
        drawings.draw_noise(strips_of(args, theme), path, theme)
    elif args.draw == "guesses":
        drawings.draw_guesses(guesses_of(args), path, theme)
    elif args.draw == "look":
        drawings.draw_look(*look_of(args), path, theme)
    elif args.draw == "joint":
        drawings.draw_joint([[0.5, 0.0], [0.0, 0.5]], path, theme)
    elif args.draw == "losses":
        drawings.draw_losses(logs_of(args), path, theme)
    elif args.draw == "search":
        drawings.draw_search(search_of(args), path, theme)
    else:
        drawings.draw_twin(twin_logs(), path, theme)


def make_picture(args, theme):
    """Draw what the flags ask for."""
    if args.draw:
        make_drawing(args, theme)
    elif args.compare:
        draw_rates(evaluations_of(args), args.picture, theme)
    elif args.orders:
        draw_trajectories(trajectories_of(args, theme), args.picture, theme)
    elif args.text:
        model, tokenizer, _ = load_writer(args)
        ids = read_text(args.text, model, tokenizer)
        maps = attention_maps(model, to_context(model, torch.tensor([ids])))
        labels = [text.replace("\n", "↵") for text in tokenizer.pieces(ids)]
        draw_attention(maps, labels, args.picture, theme)
    else:
        counts = count_masks()
        print(f"masked tokens of {T}, 1,000 draws, mean +- standard deviation")
        print("rate  each with that probability  exactly")
        for rate, both in counts.items():
            bernoulli, exact = (f"{mean(n):.1f} +- {pstdev(n):.1f}" for n in both)
            print(f"{rate:4}  {bernoulli:>26}  {exact}")
        draw_masking(counts, schedule_densities(), args.picture, theme)


def check(args):
    """Raise UserError for flags that contradict each other, or one that does nothing."""
    given = [name for name, value in vars(args).items() if value is not None]
    excluded = dict(draw="compare orders", compare="text orders")
    check_clashes([(*pair, "give one of them") for pair in excluded.items()], given)
    for name in ("text", "run", "seed", "rate", "steps"):
        if args.draw and name in given and name not in DRAWINGS[args.draw]:
            raise UserError(f"--{name} has no effect with --draw={args.draw}; leave it out")
    needs = dict(steps=["orders"], seed=["orders", "draw"], run=["text", "orders", "draw"])
    needs |= dict(rate=["draw"])
    for name, needed in needs.items():
        if name in given and not any(n in given for n in needed):
            flags = " or ".join(f"--{n}" for n in needed)
            raise UserError(f"--{name} has no effect without {flags}; give that too")


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", help="PNG or SVG file to write")
    parser.add_argument("--draw", choices=DRAWINGS, help="a picture of the lessons, by its name")
    parser.add_argument("--text", help="draw the attention of a model in this text; █ is a mask")
    parser.add_argument("--orders", help="two orders of sample.py: draw how each unmasks a text")
    parser.add_argument("--steps", type=int, help="for --orders: the number of steps (default: 12)")
    parser.add_argument("--seed", type=int, help="for --orders and masks of --draw (default: 0)")
    parser.add_argument("--rate", type=float, help="for --draw=guesses: mask rate (default: 0.2)")
    parser.add_argument("--run", help="folder of a run (default: out, else the model that ships)")
    parser.add_argument("--compare", help="files of eval.py --json: cross-entropy by mask rate")
    parser.add_argument("--dark", action="store_true", help="for a dark background")
    args = parser.parse_args(argv)
    outputs.check("PICTURE", args.picture, dict(run=args.run or ""))
    check_picture("PICTURE", args.picture)
    theme = DARK if args.dark else LIGHT
    check(args)
    with themed(theme):
        make_picture(args, theme)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
