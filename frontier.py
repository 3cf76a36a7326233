"""What sampling gives for what it costs: quality against network calls (python bench.py sample).

Quality is what can be counted without another model: the share of generated words that the training text has,
and how far the pairs of neighbouring characters are from those of the validation text. Both reward samples
that repeat themselves, so the entropy of the characters stands beside them: real text has both.
"""

import itertools
import math
import re
import time
from collections import Counter

import torch
import torch.nn.functional as F

import common
import eval
import mdlm
import pictures
import sample
from common import Refusal

ORDERS = {order: dict(order=order) for order in (
    "ancestral", "random", "confidence", "margin", "entropy", "left_to_right", "one_shot")} | {
    "ancestral, remask 0.1": dict(order="ancestral", remask=0.1),
    "ancestral, top_p 0.95": dict(order="ancestral", top_p=0.95),
    "ancestral, cosine": dict(order="ancestral", schedule="cosine")}  # name -> arguments of sample.unmask
STEPS, TEMPERATURES = (4, 8, 16, 32, 64, 128), (1.0, 0.8, 0.6)


def texts_of(data, folder, tokenizer, config):
    """(training, validation) text of a checkpoint folder, the first 2 million tokens of each: of the file or
    folder `data`, else of what it was trained on."""
    with eval.open_data(data, folder, tokenizer, config, torch.device("cpu")) as (corpus, _):
        return [corpus.tokenizer.decode(ids[:2_000_000].tolist()) for ids in (corpus.train, corpus.val)]


def quality(texts, words, bigrams):
    """words: the share of words that are in `words`, without those that the ends of a text cut; divergence:
    Jensen-Shannon, of pairs of characters from `bigrams`, nats (0: the same, ln 2: nothing in common);
    entropy: of the characters, nats."""
    found = [word for t in texts for word in re.findall(r"\w+", t)[1:-1]]
    p, chars = Counter(pair for t in texts for pair in itertools.pairwise(t)), Counter("".join(texts))
    if not (p and bigrams):
        raise Refusal("texts of less than two characters have no pairs to compare; take a longer text, or a "
                      "model with a larger --block_size")
    entropy = lambda counts: -sum(n / counts.total() * math.log(n / counts.total()) for n in counts.values())
    mixed = Counter({k: (p[k] / p.total() + bigrams[k] / bigrams.total()) / 2 for k in p | bigrams})
    divergence = -sum(n * math.log(n) for n in mixed.values()) - (entropy(p) + entropy(bigrams)) / 2
    return dict(words=sum(word in words for word in found) / max(len(found), 1), divergence=divergence,
                entropy=entropy(chars))


def draw_texts(model, tokenizer, n, seed, device, **how):
    """(texts, network calls, seconds for all, (T,) step in which each position of the first was revealed)."""
    T, began = model.config.block_size, time.monotonic()
    when, x = torch.zeros(T, dtype=torch.int64), torch.full((n, T), model.mask_id, device=device)
    for step in sample.unmask(model, x, seed=seed, **how):
        when[step.revealed[0].cpu()] = step.number
    if device.type == "cuda":
        torch.cuda.synchronize()
    return ([tokenizer.decode(ids) for ids in step.x.tolist()], step.calls.double().mean().item(),
            time.monotonic() - began, when)


def grid(config):
    """(order, steps, temperature) to try with a model."""
    T, ar = config.block_size, config.objective == "ar"
    for temperature in TEMPERATURES:
        for order in ("left_to_right",) if ar else ORDERS:
            for steps in (T,) if ar else (1,) if order == "one_shot" else sorted({min(s, T) for s in STEPS}):
                yield order, steps, temperature


def bench_sampling(options, device, book):
    """Every order, number of steps and a few temperatures; the autoregressive run beside it."""
    start, n, points, films = time.monotonic(), options.num_samples, [], {}
    pictures.check_folder(options.pictures)
    models = [mdlm.load(path, device) for path in (options.out_dir, options.ar_dir) if path]
    folder = common.find_checkpoint(options.out_dir)
    for (_, _, config), flag, kind in zip(models, ("out_dir", "ar_dir"), ("mdlm", "ar")):
        if config.objective != kind:
            raise Refusal(f"--{flag} is a run with --objective={config.objective}; give one with {kind}")
    training, validation = texts_of(options.data, folder, *models[0][1:])
    words, pairs = set(re.findall(r"\w+", training)), Counter(itertools.pairwise(validation))
    T = models[0][2].block_size
    real = quality([training[i * T:(i + 1) * T] for i in range(n)], words, pairs)
    book.note(f"{n} texts of {T} tokens a line, on {device}. As much training text: "
              f"words {real['words']:.1%}, JS {real['divergence']:.4f}, entropy {real['entropy']:.3f}")
    for model, tokenizer, config in reversed(models):  # first the autoregressive model: it has few lines
        prefix = "AR " if config.objective == "ar" else ""
        for order, steps, temperature in grid(config):
            if options.time_limit and time.monotonic() - start > options.time_limit:
                book.note("the time is up: nothing measured from "
                          f"{prefix}{order}, {steps} steps, temperature {temperature} on")
                break
            texts, calls, seconds, when = draw_texts(model, tokenizer, n, 0, device, steps=steps,
                                                     temperature=temperature, **ORDERS[order])
            where = dict(order=prefix + order, steps=str(steps), temperature=str(temperature))
            point = where | dict(calls=calls, seconds=seconds / n) | quality(texts, words, pairs)
            points.append(point)
            book.add(point, where | {"calls": f"{calls:.1f}", "s a text": f"{seconds / n:.3f}",
                                     "words": f"{point['words']:.1%}", "JS": f"{point['divergence']:.4f}",
                                     "entropy": f"{point['entropy']:.3f}"})
            if order in ("ancestral", "confidence") and steps == min(64, T) and temperature == 1:
                films[order] = texts[0], when
    best = [p for p in points if not any(q["calls"] <= p["calls"] and q["divergence"] < p["divergence"]
                                         for q in points)]
    book.note("\nfewest calls for each JS: " + "; ".join(
        f"{p['divergence']:.4f} in {p['calls']:.0f} ({p['order']}, {p['steps']} steps, at {p['temperature']})"
        for p in sorted(best, key=lambda p: p["calls"])))
    draw = {"frontier.png": lambda path: plot_frontier(points, path),
            "trajectories.png": lambda path: plot_trajectories(films, path)}
    pictures.save(draw, options.pictures or pictures.run_of(folder), options.json != "-")


def plot_frontier(points, path):
    """JS divergence and share of words against network calls, a line for each order and temperature."""
    fig, axes = pictures.figure(11, 4, 1, 2)
    for ax in axes:
        ax.set_xscale("log", base=2)
    for i, order in enumerate(dict.fromkeys(p["order"] for p in points)):
        for t, style in zip(TEMPERATURES, ("-", "--", ":")):
            some = [p for p in points if p["order"] == order and p["temperature"] == str(t)]
            for ax, key in zip(axes, ("divergence", "words")):
                ax.plot([p["calls"] for p in some], [p[key] for p in some], style, marker="o", ms=3,
                        color=f"C{i}" if i < 10 else "k", label=order if t == 1 and key == "words" else None)
    axes[0].set(yscale="log", xlabel="network calls a text", ylabel="JS divergence, nats")
    axes[1].set(xlabel="network calls a text", ylabel="share of words that the text has")
    fig.legend(loc="outside right center", frameon=False, fontsize=8)
    fig.suptitle(f"temperatures {TEMPERATURES}: solid, dashed, dotted")
    fig.savefig(path)


def plot_trajectories(films, path):
    """Texts, 32 characters a row, coloured by the step in which each position was revealed."""
    fig, axes = pictures.figure(12, 5, 1, max(len(films), 1), squeeze=False)
    for ax, (order, (text, when)) in zip(axes[0], films.items()):
        width = 32
        rows = -(-len(when) // width)
        grid = F.pad(when.double(), (0, rows * width - len(when)), value=math.nan)
        image = ax.imshow(grid.view(rows, width).numpy(), cmap="viridis", aspect="auto", vmin=1)
        for i, c in enumerate(text if len(text) == len(when) else ""):
            ax.text(i % width, i // width, c if c.isprintable() else "", ha="center", va="center",
                    color="white" if when[i] < 0.7 * when.max() else "black")
        ax.set(title=order, xticks=[], yticks=[])
        fig.colorbar(image, ax=ax, label="step in which it was revealed")
    fig.savefig(path)
