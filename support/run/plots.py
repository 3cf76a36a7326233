"""Plots of training runs and evaluations, drawn with matplotlib."""

import contextlib
import io
import itertools
import math
import unicodedata
from pathlib import Path
from typing import NamedTuple

from nanomdlm.support.cli.environment import optional
from nanomdlm.support.cli.files import read_json, read_small
from nanomdlm.support.cli.outputs import write
from nanomdlm.support.cli.terminal import escaped, warn
from nanomdlm.support.errors import UserError
from nanomdlm.support.run.log import read_lines

# Colors that color-blind readers can distinguish (Okabe and Ito, 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666")
STYLES = ("-", "--", ":", "-.")
LINES = [(color, style) for style in STYLES for color in COLORS]  # each run has one of its own
BLUE, RED, GREEN, PURPLE, GRAY = COLORS
# What programs draw into the folder of a run.
PICTURES = ("loss.png", "confidence.png", "rates.png", "compare.png", "predictions.png")


# ---- Light and dark
class Theme(NamedTuple):
    """Colors of a picture."""

    paper: str
    ink: str
    soft: str  # what is less important
    mask: str  # a token that is masked
    blue: str
    red: str
    green: str
    purple: str


LIGHT = Theme("#ffffff", "#000000", GRAY, "#dddddd", BLUE, RED, GREEN, PURPLE)
DARK = Theme("#0f1118", "#eceef4", "#a3a6b4", "#3a3e4d", "#6cb8f0", "#ff9d5c", "#4cd6a8", "#e3a3c8")


def themed(theme):
    """Context manager: figures that are made in it have the theme's background and text colors."""
    matplotlib = optional("matplotlib", "a picture")
    inks = ("text.color", "xtick.color", "ytick.color", "axes.labelcolor", "axes.edgecolor")
    papers = ("figure.facecolor", "axes.facecolor")
    style = dict.fromkeys(inks, theme.ink) | dict.fromkeys(papers, theme.paper)
    return matplotlib.rc_context(style | {"grid.color": theme.soft})


# ---- Folders and files
def try_to_draw(plot, path):
    """Call plot(path) and return whether it succeeded.

    A failure only prints a warning: no program should fail because of a picture.
    """
    try:
        plot(path)
        return True
    except Exception as e:
        why = e if isinstance(e, UserError) else f"{type(e).__name__}: {e}"
        warn(f"{path} is not drawn ({why})")
        return False


def save(draw, folder, verbose):
    """Draw pictures into a folder: draw is a dict of file name -> function of a path.

    folder: None or "none" draws nothing. verbose: whether to print the names of the pictures.
    Missing matplotlib is a warning. Raises UserError if a picture could not be drawn.
    """
    if folder in (None, "none"):
        return
    try:
        optional("matplotlib", "a picture (--pictures=none draws none)")
    except UserError as e:
        warn(str(e))
        return
    paths = [Path(folder) / name for name in draw]
    drawn = [try_to_draw(plot, path) for path, plot in zip(paths, draw.values())]
    if not all(drawn):
        missing = f"{drawn.count(False)} of {len(drawn)} pictures are missing"
        raise UserError(f"{missing}; give --pictures=FOLDER or none")
    if verbose:
        print("pictures:", escaped(", ".join(map(str, paths))))


def figure(width, height, *grid, **options):
    """Return a matplotlib figure of width x height inches, and its axes (as plt.subplots does)."""
    matplotlib = optional("matplotlib.figure", "a picture")
    fig = matplotlib.Figure((width, height), dpi=150, layout="constrained")
    axes = fig.subplots(*grid, **options)
    for ax in fig.axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, lw=0.6)
    return fig, axes


def check_picture(flag, path):
    """Raise UserError if matplotlib does not support the suffix of --flag=path."""
    base = optional("matplotlib.backend_bases", "a picture")
    suffix = Path(path).suffix
    if suffix and suffix[1:].lower() not in base.FigureCanvasBase.get_supported_filetypes():
        raise UserError(f"{flag}={path}: {suffix} is not an image format; give .png or .svg")


def write_figure(fig, path, small=False):
    """Write a figure in the format of the path's suffix, by default as PNG.

    path: a path, or an open file, which gets a PNG
    small: whether a PNG has 256 colors at most, for pictures that are shipped
    """
    if hasattr(path, "write"):  # an open file, as a notebook gives
        fig.savefig(path)
        return
    content = io.BytesIO()
    kind = Path(path).suffix[1:] or "png"
    fig.savefig(content, format=kind)
    if small and kind.lower() == "png":
        image = optional("PIL.Image", "a picture").open(content).convert("RGB")
        content = io.BytesIO()
        image.quantize(256, dither=0).save(content, "png", optimize=True)
    write(path, content.getvalue())


# ---- The log of a run
def read_log(out_dir):
    """Return the records of a run's log.jsonl, a list of dicts; raise UserError if it has none."""
    path = Path(out_dir) / "log.jsonl"
    records = []
    with contextlib.suppress(OSError, ValueError):
        records = [record for _, record in read_lines(read_small(path).encode())]
    if not records:
        raise UserError(f"{path} is not the log of a run; give the folder of a run of mdlm.py")
    return records


def validations(log):
    """Return ("val_nelbo" or "val_nll", the records of a log that have it)."""
    key = "val_nll" if any("val_nll" in r for r in log) else "val_nelbo"
    return key, [r for r in log if r.get(key) is not None]


def smooth(values, least=1):
    """Smooth a list of values with a running mean over a fortieth of them, but at least `least`.

    Returns the means, and a range with the index of the middle value of each.
    """
    width = max(1, min(least, len(values)), len(values) // 40)
    means = [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]
    return means, range(width // 2, width // 2 + len(means))


def where_rates_open(log):
    """The last record of a log before --rate_margin lets in more mask rates; None if it does not.

    From there on a training loss may rise, as texts of few or of nearly all masks are harder.
    """
    records = [r for r in log if r.get("rate_margin") is not None]
    for record, after in itertools.pairwise(records):
        if after["rate_margin"] < record["rate_margin"]:
            return record
    return None


def draw_losses(ax, x, log, color, style, label):
    """Draw the losses of a log over "step" or "seconds"; returns those of its evaluations but the
    first, and the smoothed ones of training."""
    batches = [r for r in log if r.get("loss") is not None]
    xs = [r[x] for r in batches]
    losses = [r["loss"] for r in batches]
    # Losses of single batches are noisy: draw them pale, below their running mean.
    ax.plot(xs, losses, lw=0.5, alpha=0.25, color=color)
    means, middles = smooth(losses)
    ax.plot([xs[k] for k in middles], means, lw=1.2, alpha=0.7, color=color)
    if opens := where_rates_open(log):
        words = "from here on few and many masks too (--rate_margin): training loss may rise"
        ax.axvline(opens[x], color=color, lw=1.2, ls="--", alpha=0.7, label=words)
    key, val = validations(log)
    trained = [r for r in val if r["step"]]  # no line comes from the untrained model
    if val:
        label += f": {key[4:].upper()} {val[-1][key]:.3f}"
    error = [2 * (r[f"{key}_se"] or 0) for r in val]  # about 95 % confidence
    bars = dict(fmt="o", ms=4, capsize=2, color=color, label="" if trained else label)
    ax.errorbar([r[x] for r in val], [r[key] for r in val], error, **bars)
    evaluated = [r[key] for r in trained]
    ax.plot([r[x] for r in trained], evaluated, style, lw=1.6, color=color, label=label)
    return evaluated, means[len(means) // 25 :]


def plot_losses(path, out_dirs=(), names=()):
    """Plot the training and validation losses of one or more runs.

    path: the picture. out_dirs: folders of runs; by default the folder of the picture. names: what
    the legend calls them; by default their folders. With several runs a second panel shows the
    losses over time. Raises UserError for a run without a log.
    """
    out_dirs = out_dirs or [path.parent]
    logs = [read_log(out_dir) for out_dir in out_dirs]
    several = len(logs) > 1
    fig, axes = figure(10 if several else 7, 4.2, 1, 1 + several, squeeze=False, sharey=True)
    entropy = None
    with contextlib.suppress(UserError):  # of synthetic patterns
        entropy = read_json(Path(out_dirs[0]) / "data" / "meta.json", "data").get("entropy")
    shown = [entropy] if entropy else []
    for x, ax in zip(("step", "seconds"), axes[0]):
        for name, log, line in zip(names or out_dirs, logs, itertools.cycle(LINES)):
            label = escaped(str(name)).replace("$", r"\$")  # matplotlib: $ begins a formula
            evaluated, means = draw_losses(ax, x, log, *line, label)
            # Of several runs, the differences between evaluations must be visible.
            shown += evaluated if several and evaluated else evaluated + means
        if entropy:
            ax.axhline(entropy, color=GRAY, lw=1, ls=":", label=f"entropy {entropy:.3f}")
        ax.set_xlabel(x)
    if shown:
        margin = max(0.05 * (max(shown) - min(shown)), 0.01)
        axes[0, 0].set_ylim(min(shown) - margin, max(shown) + margin)
    axes[0, 0].set_ylabel("nats per token")
    axes[0, -1].set_title(
        "pale: training batches; bars: ±2 standard errors", fontsize=9, loc="right"
    )
    handles, words = axes[0, 0].get_legend_handles_labels()
    legend = dict(zip(words, handles))  # each of the words once
    fig.legend(legend.values(), legend, frameon=False, fontsize=9, loc="outside upper left")
    write_figure(fig, path)


# ---- Results of eval.py: r is its dict
def plot_rates(r, path):
    """Plot accuracy and cross-entropy by mask rate; the area under the latter is the NELBO."""
    fig, (loss, accuracy) = figure(7.5, 3.2, 1, 2)
    for ax, key, color, marker in ((loss, "ce", BLUE, "o"), (accuracy, "accuracy", GREEN, "s")):
        ax.plot(range(5, 100, 10), r[key], f"{marker}-", color=color, ms=5)
        ax.set(xlabel="masked, %", xlim=(0, 100), xticks=range(0, 101, 20))
    known = [math.nan if ce is None else ce for ce in r["ce"]]  # None: no window had such a rate
    loss.stairs(known, range(0, 101, 10), fill=True, color=BLUE, alpha=0.15)
    loss.text(50, known[5] / 3, f"area: NELBO {r['nelbo']:.3f}", color=BLUE, ha="center")
    loss.set(ylabel="cross-entropy, nats per token", ylim=(0, None))
    accuracy.set(ylabel="accuracy of the likeliest token", ylim=(0, 1))
    write_figure(fig, path)


def plot_confidence(r, path):
    """Plot mean confidence and accuracy by position, smoothed, and accuracy by confidence."""
    fig, (left, right) = figure(7.5, 3.2, 1, 2)
    for name, color in (("accuracy", RED), ("confidence", BLUE)):
        means, at = smooth(r["by_position"][name])
        left.plot(at, means, color=color, lw=1.4, label=name)
    left.set(xlabel="position in the window", ylabel="running mean over masked tokens")
    left.legend(frameon=False, fontsize=9)
    c = r["calibration"]
    areas = [8 + 300 * fraction for fraction in c["share"]]
    right.plot([0, 1], [0, 1], color=GRAY, lw=1, ls=":")
    right.plot(c["confidence"], c["accuracy"], color=BLUE, lw=1)
    right.scatter(c["confidence"], c["accuracy"], s=areas, color=BLUE, zorder=3, clip_on=False)
    right.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", ylabel="accuracy")
    right.set_xlabel("confidence (area: share of predictions)")
    right.text(0.05, 0.95, f"calibration error {c['ece']:.3f}", va="top", fontsize=9)
    write_figure(fig, path)


# ---- Texts
class Cell(NamedTuple):  # a token in a picture of texts
    text: str
    ink: str  # its color
    face: object = None  # the color behind it
    below: str = ""  # another text, below it in small letters


def visible(text):
    """A token's text with signs for line ends and tabs; a dot for a part of a character."""
    return text.replace("\n", "↵").replace("\t", "→").replace("\r", "←") or "·"


def columns(text):
    """The width of a text in a monospaced font."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def draw_texts(ax, lines, height=1.0, theme=LIGHT, points=9):
    """Draw lines of Cells in a grid of monospaced characters; a line is `height` characters high.

    points: the size of the font. Returns the (columns, rows) of the grid, the limits of the axes.
    """
    rectangle = optional("matplotlib.patches", "a picture").Rectangle
    font = dict(family="monospace", ha="center", va="center_baseline", parse_math=False)
    width = max([1, *(sum(max(columns(c.text), columns(c.below)) for c in line) for line in lines)])
    for row, line in enumerate(lines):
        x = 0
        y = height * row
        for cell in line:
            size = columns(cell.text)
            if cell.face is not None:
                frame = dict(ec=theme.paper, lw=0.5, clip_on=False)
                ax.add_patch(rectangle((x, y), size, 1, fc=cell.face, **frame))
            for text, down, size_of_text, ink in (
                (cell.text, 0.5, points, cell.ink),
                (cell.below, 1.3, 0.72 * points, theme.red),
            ):
                at = x
                for c in text:  # one by one: a sign of another font may be wider
                    ax.text(at + columns(c) / 2, y + down, c, size=size_of_text, color=ink, **font)
                    at += columns(c)
            x += max(size, columns(cell.below))
    ax.set(xlim=(0, width), ylim=(height * len(lines), 0))
    ax.axis("off")
    return width, height * len(lines)


def prediction_cells(tokens):
    """The Cells of plot_predictions, in lines of up to 72 columns."""
    lines = [[]]
    for token in tokens:
        text = visible(token["text"])
        cell = Cell(text, GRAY)
        if token["mark"]:
            guess, p = token["likeliest"][0]
            is_right = token["mark"] == "+"
            face = (BLUE if is_right else RED, 0.08 + 0.62 * p)
            cell = Cell(visible(guess).replace(" ", "␣"), "black", face)
            if not is_right:
                cell = cell._replace(below=text.replace(" ", "␣"))
        used = sum(max(columns(c.text), columns(c.below)) for c in lines[-1])
        if used and used + max(columns(cell.text), columns(cell.below)) > 72:
            lines.append([])
        lines[-1].append(cell)
        if token["text"].endswith("\n"):
            lines.append([])
    return [line for line in lines if line]


def plot_predictions(tokens, path, most=40):
    """Plot a text whose masked tokens are replaced by predictions, colored by their confidence.

    tokens: dicts of `text`; `mark`: "+" for right, "x" for wrong, "" for a token that is given; and
    `likeliest`: [(text, probability)]. The true token stands below a wrong one. most: lines drawn.
    """
    lines = prediction_cells(tokens)[:most]
    legend = [Cell("given   ", GRAY)]
    for word, color in (("right", BLUE), ("wrong", RED)):
        for p in (0.1, 0.5, 0.9):
            legend.append(Cell(f" {word} {p:.0%} ", "black", (color, 0.08 + 0.62 * p)))
        legend.append(Cell("   ", GRAY))
    lines += [[], legend[:-1], [Cell("the likeliest token at each mask; darker: more ", GRAY)]]
    lines[-1].append(Cell("confident; below: the truth", GRAY))
    fig, ax = figure(6.4, 0.2 + 0.29 * len(lines))
    width, _ = draw_texts(ax, lines, height=1.8)
    ax.set_xlim(0, max(74, width))
    write_figure(fig, path)


# ---- What bench.py sample measured
def plot_frontier(rows, path):
    """Plot known words, likelihood and distinct words over network calls, a line for each sampler.

    rows: those of bench.py sample: dicts of sampler, calls, words, distinct, with a twin also twin
    (nats per token under it), told (by a classifier), and words_se, twin_se, told_se. Bars: two
    standard errors.
    """
    panels = dict(words="known words of five letters and more (up is better)")
    if "told" in rows[0]:
        panels["told"] = "told from real text by a classifier (down is better)"
    if "twin" in rows[0]:
        panels["twin"] = "nats per token under the twin (as real text is best)"
    panels["distinct"] = "distinct words (as real text is best)"
    panels = {key: label for key, label in panels.items() if any(r[key] is not None for r in rows)}
    fig, axes = figure(4.2 * len(panels), 4.2, 1, len(panels), squeeze=False)
    axes = axes[0]
    judges = [r for r in rows if r["sampler"] in ("real text", "AR twin")]
    samplers = dict.fromkeys(r["sampler"] for r in rows if r not in judges)
    for ax, (key, label) in zip(axes, panels.items()):
        for row, style in zip(judges, ("--", ":")):
            name = row["sampler"]
            if row["calls"]:
                name += f", {row['calls']} calls"
            if row[key] is None:
                continue
            ax.axhline(row[key], color=GRAY, lw=1.2, ls=style, label=name)
        for name, color in zip(samplers, itertools.cycle(COLORS)):
            found = [r for r in rows if r["sampler"] == name and r[key] is not None]
            error = [2 * r.get(f"{key}_se", 0) for r in found]
            style = dict(marker="o", ms=4, lw=1.6, capsize=2, color=color, label=name)
            ax.errorbar([r["calls"] for r in found], [r[key] for r in found], error, **style)
        calls = sorted({r["calls"] for r in rows if r not in judges})
        ax.set(xscale="log", xlabel="network calls (left is cheaper)", ylabel=label)
        ax.set_xticks(calls, calls)
        ax.minorticks_off()
        if key == "words":
            ax.yaxis.set_major_formatter("{x:.0%}")
    axes[0].legend(frameon=False, fontsize=8)
    title = "Text from nothing: quality by network calls (few distinct words: dull text)"
    fig.suptitle(title, fontsize=11)
    write_figure(fig, path)


def table(rows, digits):
    """Format rows of words and numbers as a text table with aligned columns; None becomes "-"."""
    rows = [["-" if v is None else v for v in row] for row in rows]
    words = [[f"{v:.{digits}f}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*words)]
    return "\n".join("  ".join(w.rjust(n) for w, n in zip(row, widths)) for row in words)
