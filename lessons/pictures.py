"""Draw statistics of random masks, a model's attention, or its time embedding.

    python lessons/pictures.py masking.png              # 1,000 random masks; densities of rates
    python lessons/pictures.py attention.png --text="To be, or ███ to be"    # a map for each head
    python lessons/pictures.py time.png --run=out-time  # for a run with --time_conditioning

The first also prints how many tokens were masked: by exactly l masks, and by masking each token
with probability t (Bernoulli), as most papers do. Without --run the second uses the run in out/ or,
if there is none, the model in weights/.
"""

import dataclasses
import math
import sys
from pathlib import Path
from statistics import mean, pstdev
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import cli

cli.start(__name__)

import torch

import mdlm
from support import outputs
from support.errors import UserError
from support.flags import Parser
from support.infill.calls import to_context
from support.infill.templates import parse, to_ids
from support.kernels.reference import is_visible, mask_tokens_ref, prepare
from support.plots import BLUE, GREEN, GREY, RED, check_picture, figure, write_figure
from support.training.checkpoint import default_run
from variants import rates

T = 256
RATES = (0.2, 0.5, 0.8)


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
def time_embedding(model):
    """The time embedding that the blocks are given, at mask rates from 0 to 1: (101, C)."""
    return model.rate(torch.linspace(0, 1, 101)[:, None])


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


def draw_attention(maps, labels, path):
    n = len(labels)
    heads = max(map(len, maps.values()))
    size = min(max(2.2, n / 18), 4)  # inches
    fig, axes = figure(size * heads, size * len(maps), len(maps), heads, squeeze=False)
    for row, (layer, heads_maps) in zip(axes, maps.items(), strict=True):
        for head, (ax, p) in enumerate(zip(row, heads_maps, strict=True), 1):
            ax.imshow(p[:n, :n].numpy(), cmap="Blues", vmin=0)
            ax.grid(False)
            ax.set_title(f"layer {layer + 1}, head {head}", fontsize=8)
            at = range(n) if n <= 72 else []
            ax.set_xticks(at, labels[: len(at)], fontsize=62 * size / n)
            ax.set_yticks(at, labels[: len(at)], fontsize=62 * size / n)
            ax.tick_params(length=0, pad=1)
    fig.suptitle("Attention: each row is a token, dark where it looks", fontsize=10)
    write_figure(fig, path)


def draw_masking(counts, schedules, path):
    fig, (left, right) = figure(9, 3.4, 1, 2)
    for color, (rate, (bernoulli, exact)) in zip((BLUE, RED, GREEN), counts.items()):
        left.hist(bernoulli, range(T + 2), color=color, alpha=0.5)
        left.axvline(exact[0] + 0.5, color=color, lw=1.5)
        words = f" rate {rate:g}:\n {exact[0]} of {T}"
        place = left.get_xaxis_transform()
        left.text(exact[0] + 1, 0.98, words, color=color, fontsize=8, va="top", transform=place)
    left.set(xlim=(0, 1.15 * T), xlabel="masked tokens", ylabel="of 1,000 draws")
    left.set_title("line: exact number; bars: each token alone (Bernoulli)", fontsize=9)
    rates = [(i + 0.5) / T for i in range(T)]
    for color, (name, density) in zip((BLUE, RED), schedules.items()):
        right.plot(rates, density, color=color, lw=1.6, label=f"--rates={name}")
    right.axvline(0.15, color=GREY, lw=1.6, ls="--", label="BERT: always 0.15")
    right.set(xlim=(0, 1), ylim=(0, 3), xlabel="mask rate", ylabel="density")
    right.set_title("how often training draws a rate", fontsize=9)
    right.legend(frameon=False, fontsize=8)
    write_figure(fig, path)


def draw_time(embedding, path):
    fig, ax = figure(7, 3)
    C = embedding.shape[1]
    image = ax.imshow(embedding.T.numpy(), cmap="viridis", aspect="auto", extent=(0, 1, C, 0))
    ax.grid(False)
    ax.set(xlabel="mask rate", ylabel="channel")
    ax.set_title("Time embedding: what the layers are told of the mask rate", fontsize=10)
    fig.colorbar(image)
    write_figure(fig, path)


def main(argv):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", help="PNG or SVG file to write")
    parser.add_argument("--text", help="draw the attention of a model in this text; █ is a mask")
    parser.add_argument("--run", help="folder of a run; without --text its time embedding is drawn")
    args = parser.parse_args(argv)
    outputs.check("PICTURE", args.picture, dict(run=args.run or ""))
    check_picture("PICTURE", args.picture)
    if args.text:
        model, tokenizer, config = mdlm.load(default_run(args.run), whole=True)
        if model.objective.n_blocks > 1:
            raise UserError(
                f"{args.run or 'out'} has blocks; give --run without, or of --infill_share"
            )
        ids = to_ids(parse(args.text, tokenizer, config.block_size), tokenizer, model.mask_id)
        maps = attention_maps(model, to_context(model, torch.tensor([ids])))
        labels = [text.replace("\n", "↵") for text in tokenizer.pieces(ids)]
        draw_attention(maps, labels, args.picture)
        return 0
    if args.run:
        model = mdlm.load(args.run)[0]
        if not model.config.time_conditioning:
            raise UserError(f"{args.run} has no time embedding; train with --time_conditioning")
        draw_time(time_embedding(model), args.picture)
        return 0
    counts = count_masks()
    print(f"masked tokens of {T}, 1,000 draws, mean +- standard deviation")
    print("rate  each with that probability  exactly")
    for rate, both in counts.items():
        bernoulli, exact = (f"{mean(n):.1f} +- {pstdev(n):.1f}" for n in both)
        print(f"{rate:4}  {bernoulli:>26}  {exact}")
    draw_masking(counts, schedule_densities(), args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
