"""What eval.py shows: single texts, and PNGs readable in print. matplotlib is imported only to draw."""

import contextlib
import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import kernels
import mdlm
from common import Refusal


def mask(x0, level, mask_id):
    """x0 (B, T) masked by level (B,): counts, or rates if it is floating; on the CPU.

    All rows have the same random words. Where they are the same text, a higher level masks what a lower one
    does, and more: they are moments of one forward process.
    """
    return kernels.mask_tokens_ref(x0.cpu(), level, mask_id, 0x7EA7, 0, torch.zeros_like(level).long())[0]


def pieces(tokenizer, ids):
    """The text of each token, with line ends, tabs and [END], which decodes to nothing, made visible."""
    texts = [tokenizer.decode([i]) + " " * (tokenizer.kind == "id") for i in ids]
    return [t.replace("\n", "↵").replace("\t", "→").replace("\r", "←") or "∎" for t in texts]


def forward_process(model, tokenizer, windows):
    """A line of text at t = 0, 0.2 ... 1: its pieces, t (6,), which tokens are masked (6, n)."""
    lines = (s for w in windows[:16].tolist() for s in tokenizer.decode(w).split("\n")[1:-1])
    line = max((s for s in lines if len(s) <= 56), key=len, default="")  # that fits on the page
    ids = torch.tensor(tokenizer.encode(line) or windows[0, :24].tolist())
    t = torch.arange(6) / 5
    return pieces(tokenizer, ids.tolist()), t, mask(ids.expand(6, -1), t, model.mask_id) == model.mask_id


@torch.no_grad()
def predict(model, tokenizer, x0):
    """x0 (T,), half of it masked: a list of (text, masked, text predicted there, p), as much as fills a page.

    An autoregressive model predicts every token from those to its left.
    """
    ar, x0 = model.config.objective == "ar", x0[None]
    xt = (mdlm.shift_right(x0, model.mask_id) if ar else
          mask(x0, torch.tensor([max(1, x0.shape[1] // 2)]), model.mask_id).to(x0.device))
    p, guess = F.linear(model.features(xt), model.head_weight()).float().softmax(-1).max(-1)
    masked = torch.ones_like(x0, dtype=torch.bool) if ar else xt == model.mask_id
    cells = list(zip(pieces(tokenizer, x0[0].tolist()), masked[0].tolist(),
                     pieces(tokenizer, guess[0].tolist()), p[0].tolist()))
    ends = torch.tensor([len(t) for t, *_ in cells]).cumsum(0)
    return cells[:max(1, int((ends <= 256).sum()))]


# ------------------------------------------------------------------------------------------------------------
# Pictures


# Colours that the colour-blind tell apart (Okabe and Ito, 2008).
BLUE, RED, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"


def can_draw():
    """Whether matplotlib is there; where it is not, a sentence says so."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        print("no pictures: they need matplotlib; pip install matplotlib", file=sys.stderr)
        return False
    return True


def run_of(checkpoint):
    """The folder of the run whose checkpoint this is; None for one that came without the log of its run."""
    run = Path(checkpoint).parent
    return run if (run / "log.jsonl").exists() else None


def check_folder(folder):
    """Refuse a folder for pictures that cannot be made or written ("" and "none": there is none)."""
    path = Path(folder)
    there = next((p for p in (path, *path.parents) if os.path.exists(p)), path)
    if folder not in ("", "none") and not (there.is_dir() and os.access(there, os.W_OK)):
        raise Refusal(f"--pictures={folder} cannot be written; give a folder, or none")


def save(draw, folder, say):
    """Draw {name: function of a path} into a folder, which is made; nothing if it is None or "none"."""
    if folder in (None, "none") or not can_draw():
        return
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, plot in draw.items():
            plot(folder / name)
    except OSError as e:
        raise Refusal(f"no pictures: {folder} cannot be written ({e.strerror}); "
                      "give --pictures=FOLDER or none") from None
    if say:
        print("pictures:", ", ".join(str(folder / name) for name in draw))


def figure(width, height, *grid, **options):
    """A matplotlib figure of inches, and its axes."""
    from matplotlib.figure import Figure
    fig = Figure((width, height), dpi=150, layout="constrained")
    axes = fig.subplots(*grid, **options)
    for ax in fig.axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, lw=0.6)
    return fig, axes


def read_log(out_dir):
    """The records of a run's log.jsonl, a list of dicts."""
    records, path = [], Path(out_dir) / "log.jsonl"
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # a line that a crash cut off
            records.append(json.loads(line))
    if not all(isinstance(r, dict) and "step" in r for r in records) or not records:
        raise Refusal(f"{path} is no log of a run; name the folder of one that mdlm.py trained")
    return records


def validations(log):
    """(objective's key, the records of a log that are evaluations)."""
    key = "val_nll" if any("val_nll" in r for r in log) else "val_nelbo"
    return key, [r for r in log if r.get(key) is not None]


def plot_losses(out_dirs, path):
    """Loss curves of runs, from log.jsonl, as a PNG: training batches, and validation with its error.

    Several runs are drawn over steps and over seconds, with their learning rates below. Without matplotlib a
    sentence says so and nothing is drawn. Raises Refusal for a run without a log.
    """
    logs, several = [read_log(out_dir) for out_dir in out_dirs], len(out_dirs) > 1
    if not can_draw():
        return
    fig, grid = figure(*(9.5, 5.2, 2, 2) if several else (7, 4.2, 1, 1), squeeze=False, sharex="col",
                       sharey="row", height_ratios=[4, 1] if several else [1])
    for column, x in enumerate(("step", "seconds") if several else ("step",)):
        for i, (out_dir, log) in enumerate(zip(out_dirs, logs)):
            style, ax = dict(color=(BLUE, RED, GREEN, PURPLE, GREY)[i % 5]), grid[0, column]
            train = [r for r in log if r.get("loss") is not None]
            xs = [r[x] for r in train]
            ax.plot(xs, [r["loss"] for r in train], lw=0.8, alpha=0.55, **style,
                    label=None if several else "training batches")
            key, val = validations(log)
            if val:
                label = f"{out_dir}: {key[4:].upper()} {val[-1][key]:.3f}"
                error = [2 * (r[f"{key}_se"] or 0) for r in val]
                ax.errorbar([r[x] for r in val], [r[key] for r in val], error, fmt="os^Dv"[i % 5] + "-", ms=4,
                            lw=1.6, capsize=2, label=label, **style)
            if several:
                grid[1, column].plot(xs, [r["lr_scale"] for r in train], lw=1.2, **style)
        grid[-1, column].set_xlabel(x)
    grid[0, 0].set_ylabel("nats per token")
    if several:
        grid[1, 0].set(ylabel="share of the\nlearning rate")
    grid[0, 0].legend(frameon=False, fontsize=9)
    fig.savefig(path)


def plot_rates(r, path):
    """Cross-entropy and accuracy by mask rate."""
    fig, axes = figure(7.5, 3.2, 1, 2)
    x = [10 * i + 5 for i in range(10)]
    for ax, name, color, mark in zip(axes, ("ce", "accuracy"), (BLUE, GREEN), "os"):
        y = [math.nan if v is None else v for v in r[name]]
        ax.plot(x, y, mark + "-", color=color, ms=5)
        ax.set(xlabel="masked, %", xlim=(0, 100), xticks=range(0, 101, 20))
    axes[0].axhline(r["uniform"], color=GREY, lw=1, ls=":")
    axes[0].text(2, r["uniform"], "knowing nothing: ln V", va="bottom", color=GREY, fontsize=8)
    axes[0].axhline(r["nelbo"], color=BLUE, lw=1, ls="--")
    axes[0].text(2, r["nelbo"], f"NELBO {r['nelbo']:.3f}", va="bottom", color=BLUE, fontsize=8)
    axes[0].set(ylabel="cross-entropy, nats per token", ylim=(0, None))
    axes[1].set(ylabel="accuracy of the likeliest token", ylim=(0, 1))
    fig.savefig(path)


def plot_confidence(r, path):
    """Mean confidence and accuracy by position; accuracy by confidence."""
    fig, (left, right) = figure(8.5, 3.4, 1, 2, width_ratios=[1.5, 1])
    for name, color, style in (("confidence", BLUE, "-"), ("accuracy", RED, "--")):
        left.plot([math.nan if v is None else v for v in r["by_position"][name]], style, color=color, lw=1,
                  label=name)
    left.set(xlabel="position in the window", ylabel="mean over masked tokens", ylim=(0, None))
    left.legend(frameon=False, fontsize=9, loc="lower right")
    c = r["calibration"]
    bins = [i for i, share in enumerate(c["share"]) if share]
    right.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":")
    right.plot([c["confidence"][i] for i in bins], [c["accuracy"][i] for i in bins], color=BLUE, lw=1)
    right.scatter([c["confidence"][i] for i in bins], [c["accuracy"][i] for i in bins], color=BLUE, zorder=3,
                  s=[8 + 300 * c["share"][i] for i in bins])
    right.set(xlabel="confidence (area: share of predictions)", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1),
              aspect="equal")
    right.text(0.05, 0.95, f"ECE {c['ece']:.3f}", va="top")
    fig.savefig(path)


INCH, LINE = 0.09, 0.2  # the width of a character and the height of a line


def page(columns, lines, more=()):
    """A figure whose first axes are a grid of monospaced characters; beside it axes of the widths `more`."""
    fig, axes = figure(columns * INCH + sum(more), lines * LINE, 1, 1 + len(more), squeeze=False,
                       width_ratios=[columns * INCH, *more])
    axes[0, 0].set(xlim=(0, columns), ylim=(lines - 0.5, -0.5))
    axes[0, 0].axis("off")
    return fig, axes[0]


def write(ax, x, y, text, face="", color="black", size=9.5):
    """Characters in such a grid, on coloured cells if there is a face."""
    from matplotlib.patches import Rectangle
    if face:
        ax.add_patch(Rectangle((x, y - 0.5), len(text), 1, facecolor=face, edgecolor="white", lw=0.6))
    for k, c in enumerate(text):  # one by one: a font for other scripts may have another width
        ax.text(x + k + 0.5, y, c, family="monospace", size=size, color=color, ha="center",
                va="center_baseline", parse_math=False)


def plot_forward(shown, path):
    """A line at t = 0, 0.2 ... 1, and the share of it that is masked against the expectation."""
    texts, t, masked = shown
    n, margin = len(texts), 9
    fig, (left, right) = page(margin + sum(map(len, texts)), 13, more=[2.6])
    for row in range(6):
        x = margin
        write(left, 0, 2 * row + 1, f"t = {t[row]:.1f}")
        for text, hidden in zip(texts, masked[row].tolist()):
            write(left, x, 2 * row + 1, " " * len(text) if hidden else text, GREY * hidden)
            x += len(text)
    grid = torch.linspace(0, 1, 101)
    sd = (grid * (1 - grid) / n).sqrt()
    right.fill_between(grid, grid - 2 * sd, grid + 2 * sd, color=BLUE, alpha=0.15, lw=0)
    right.plot([0, 1], [0, 1], color=BLUE, lw=1)
    right.plot(t.tolist(), masked.double().mean(1).tolist(), "o", color=RED, ms=5)
    right.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xticks=t.tolist())
    right.set_xlabel("t", fontsize=9)
    right.set_title("share masked; band: t ± 2 sd", fontsize=9)
    fig.savefig(path)


def plot_predictions(cells, path):
    """A text: given tokens in grey, predictions coloured right or wrong by confidence, the truth below."""
    x, y, places = 0, 0, []
    for i, (text, masked, guess, _) in enumerate(cells):
        width = max(len(text), len(guess) * masked)
        if x + width > 88:
            x, y = 0, y + 2
        places.append((x, y, width))
        x += width
        if text.endswith("↵") and cells[min(i + 1, len(cells) - 1)][0] != "↵":  # no empty lines
            x, y = 0, y + 2
    fig, (ax,) = page(max(66, *(x + width for x, _, width in places)), y + 4)
    for (x, at, _), (text, masked, guess, p) in zip(places, cells):
        if not masked:
            write(ax, x, at, text, color=GREY)
            continue
        write(ax, x, at, guess.replace(" ", "␣"), (BLUE if text == guess else RED, 0.1 + 0.6 * p))
        if text != guess:
            write(ax, x, at + 0.85, text.replace(" ", "␣"), color=RED, size=6.5)
    x = 0
    for words, face in (("given", ""), ("right", (BLUE, 0.5)), ("wrong, the truth below", (RED, 0.5)),
                        ("darker: more confident", "")):
        write(ax, x, y + 3, words, face, "black" if face else GREY, size=8)
        x += len(words) + 4
    fig.savefig(path)
