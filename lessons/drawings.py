"""The pictures of `pictures.py --draw=NAME`: one function for each, which draws what it is given.

Each takes its data, the path of the picture, and the theme (support/run/plots.py), in this order.
"""

import math

from nanomdlm.support.cli.environment import optional
from nanomdlm.support.run import plots
from nanomdlm.support.run.plots import Cell, columns, draw_texts, figure, visible, write_figure

RATES = (0, 0.2, 0.5, 0.8, 1)
WAVES = 16  # waves of the time embedding that are drawn
SENTENCE = ["the", "cat", "sat", "on", "the", "mat"]
# The words of SENTENCE that each network call reveals.
LEFT_TO_RIGHT = [(0,), (1,), (2,), (3,), (4,), (5,)]
ANY_ORDER = [(3,), (2, 5), (1,), (0, 4)]


def mixed(color, share, theme):
    """The color that `color`, with this share of opacity, has on the theme's background."""
    to_rgb = optional("matplotlib.colors", "a picture").to_rgb
    pairs = zip(to_rgb(color), to_rgb(theme.paper), strict=True)
    return tuple(share * a + (1 - share) * b for a, b in pairs)


def pieces_with_spaces(pieces):
    """Texts of tokens as they are shown in a cell: a space as ␣, a line end as ↵."""
    return [visible(piece).replace(" ", "␣") for piece in pieces]


# ---- The idea
def draw_idea(path, theme):
    """Six words written from left to right, and in any order: a row for each network call."""
    kinds = {
        "autoregressive: six calls, one word each": LEFT_TO_RIGHT,
        "diffusion: four calls, in any order": ANY_ORDER,
    }
    fig, axes = figure(7.5, 2.5, 1, 2)
    for ax, (title, calls) in zip(axes, kinds.items(), strict=True):
        lines = []
        known = set()
        for revealed in [(), *calls]:
            line = []
            for k, word in enumerate(SENTENCE):
                line.append(Cell(" ", theme.ink))
                text = f" {word} "
                if k in revealed:
                    line.append(Cell(text, theme.paper, theme.blue))
                elif k in known:
                    line.append(Cell(text, theme.ink, mixed(theme.blue, 0.25, theme)))
                else:
                    line.append(Cell(" " * len(text), theme.ink, theme.mask))
            known |= {*revealed}
            lines.append(line)
        draw_texts(ax, lines, 1.35, theme, points=11)
        ax.set_ylim(1.35 * 7, 0)  # both have rows of one height
        ax.set_title(title, fontsize=9.5)
        for call in range(len(lines)):
            ax.text(
                -0.4, 1.35 * call + 0.5, call, size=8, color=theme.soft, ha="right", va="center"
            )
    words = "A row for each call. Gray: not written yet. Strong color: new."
    fig.suptitle(words, fontsize=9)
    write_figure(fig, path, small=True)


# ---- The forward process
def mask_at_rates(ids, uniform, mask_id):
    """{rate: ids} of RATES. A token is masked from the rate on that equals its number in `uniform`.

    So each is masked with probability `rate`, and one that is masked stays so at higher rates.
    """
    masked = {}
    for rate in RATES:
        pairs = zip(ids, uniform, strict=True)
        masked[rate] = [mask_id if u < rate else token for token, u in pairs]
    return masked


def noise_cells(pieces, masked, theme, faces=None):
    """The Cells of a text: pieces of its tokens, and for each whether it is masked.

    faces: the color behind each token (default: none).
    """
    cells = []
    for k, (piece, hidden) in enumerate(zip(pieces, masked, strict=True)):
        text = visible(piece)
        if hidden:
            cells.append(Cell(" " * columns(text), theme.ink, theme.mask))
        elif faces:
            cells.append(Cell(text, theme.ink, mixed(faces[k], 0.5, theme)))
        else:
            cells.append(Cell(text, theme.ink))
    return cells


def draw_noise(groups, path, theme):
    """Draw texts at rising mask rates: {rate: lines of Cells}, from top to bottom."""
    several = max(map(len, groups.values())) > 1
    lines = []
    starts = {}
    for rate, texts in groups.items():
        starts[rate] = len(lines)
        lines += [*texts, []] if several else texts
    height = 1.08 if several else 1.7
    used = height * (len(lines) - several)
    wide = max(sum(columns(cell.text) for cell in line) for line in lines)
    fig, ax = figure(7.5, 0.19 * used + 0.5)
    draw_texts(ax, lines, height, theme, points=min(14, 590 / wide))
    ax.set_ylim(used, -0.3)
    share = wide / 50
    for rate, start in starts.items():
        n = len(groups[rate])
        y = height * (start + (n - 1) / 2) + 0.5
        ax.text(-share, y, f"t = {rate:g}", size=9.5, ha="right", va="center_baseline")
    for x, ends, word in ((-6 * share, (0, used), "masking"), (wide + share, (used, 0), "writing")):
        frame = dict(arrowstyle="->", color=theme.soft, lw=1.2)
        (y0, y1) = ends
        ax.annotate("", (x, y1), (x, y0), arrowprops=frame, annotation_clip=False)
        side = "right" if x < 0 else "left"
        place = dict(rotation=90, ha=side, va="center", color=theme.soft, size=9)
        ax.text(x + (-0.4 if x < 0 else 0.4) * share, used / 2, word, **place)
    write_figure(fig, path, small=True)


# ---- What a model predicts
def draw_guesses(tokens, path, theme):
    """Draw a text with the likeliest tokens under each mask.

    tokens: those of eval.predict. Each has `text`; those that are masked have a `mark`, + or x,
    and `likeliest`, [(text, probability)] of three.
    """
    rectangle = optional("matplotlib.patches", "a picture").Rectangle
    masks = [i for i, token in enumerate(tokens) if token["mark"]]
    shown = [columns(visible(token["text"])) for token in tokens]
    wide = sum(shown)
    fig, ax = figure(7.5, 2.4)
    line = []
    for token in tokens:
        text = visible(token["text"])
        if token["mark"]:
            line.append(Cell(" " * columns(text), theme.ink, theme.mask))
        else:
            line.append(Cell(text, theme.ink))
    draw_texts(ax, [line], 1.0, theme, points=min(14, 590 / wide))
    slot = wide / len(masks)
    mono = dict(family="monospace", va="center_baseline", parse_math=False)
    for k, i in enumerate(masks):
        token = tokens[i]
        truth = token["text"]
        left = slot * k + 0.08 * slot
        color = theme.blue if token["mark"] == "+" else theme.red
        center = sum(shown[:i]) + shown[i] / 2
        ends = (center, left + 0.42 * slot), (1.05, 1.95)
        ax.plot(*ends, color=color, lw=1, clip_on=False)
        for row, (guess, p) in enumerate(token["likeliest"]):
            y = 2.2 + 1.1 * row
            is_truth = guess == truth
            ink = theme.blue if is_truth else theme.red if row == 0 else theme.soft
            size = 0.84 * slot * p
            face = mixed(ink, 0.45, theme)
            ax.add_patch(rectangle((left, y), size, 0.9, fc=face, lw=0, clip_on=False))
            (text,) = pieces_with_spaces([guess])
            ax.text(left + 0.03 * slot, y + 0.47, text, size=9.5, color=theme.ink, **mono)
            style = dict(size=8, color=theme.ink, ha="right", va="center_baseline")
            ax.text(left + 0.84 * slot, y + 0.47, f"{p:.0%}" if p >= 0.01 else "< 1%", **style)
        (text,) = pieces_with_spaces([truth])
        ax.text(left + 0.03 * slot, 2.2 + 3.7, text, size=9.5, color=theme.blue, **mono)
    ax.text(-0.15, 5.9, "truth", size=8, color=theme.soft, ha="right", va="center_baseline")
    ax.set(ylim=(6.3, -0.1))
    right = sum(tokens[i]["mark"] == "+" for i in masks)
    words = "Blue: the true token. Orange: another one is likeliest. "
    fig.suptitle(words + f"{right} of {len(masks)} are right.", fontsize=9)
    write_figure(fig, path, small=True)


def draw_look(pieces, maps, query, path, theme):
    """Draw where one token looks: its row of each head's attention, on the text itself.

    pieces: texts of the tokens. maps: (H, T, T), T >= len(pieces). query: the index of the token.
    """
    rows = maps[:, query, : len(pieces)]  # (H, tokens)
    highest = rows.max().item()
    lines = []
    for weights in rows.tolist():
        line = []
        for i, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            text = " " * columns(visible(piece)) if i == query else visible(piece)
            line.append(Cell(text, theme.ink, mixed(theme.blue, 0.8 * weight / highest, theme)))
        lines.append(line)
    wide = sum(columns(cell.text) for cell in lines[0])
    fig, ax = figure(7.5, 0.34 * len(lines) + 0.5)
    draw_texts(ax, lines, 1.6, theme, points=min(14, 590 / wide))
    at = sum(columns(visible(piece)) for piece in pieces[:query])
    rectangle = optional("matplotlib.patches", "a picture").Rectangle
    for row in range(len(rows)):
        box = rectangle((at, 1.6 * row), 1, 1, fc="none", ec=theme.red, lw=1.6, clip_on=False)
        ax.add_patch(box)
        y = 1.6 * row + 0.5
        ax.text(-0.8, y, f"head {row + 1}", size=9, ha="right", va="center_baseline")
    ax.set_ylim(1.6 * len(lines) - 0.6, -0.2)
    words = f"Blue: what the mask (orange frame) reads from; strongest: {highest:.0%} of its weight"
    fig.suptitle(words, fontsize=9)
    write_figure(fig, path, small=True)


# ---- One call, two tokens
def draw_joint(joint, path, theme):
    """Draw a 2 x 2 table of joint probabilities beside the product of its marginals."""
    rows = [sum(row) for row in joint]
    sums = [sum(column) for column in zip(*joint)]
    product = [[a * b for b in sums] for a in rows]
    fig, axes = figure(5.6, 2.7, 1, 2)
    titles = ("two calls: the truth", "one call: the product")
    rectangle = optional("matplotlib.patches", "a picture").Rectangle
    for ax, table, title in zip(axes, (joint, product), titles, strict=True):
        for i in range(2):
            for k in range(2):
                p = table[i][k]
                is_wrong = p > 0 and joint[i][k] == 0
                color = theme.red if is_wrong else theme.blue
                face = mixed(color, 0.15 + p, theme) if p else theme.paper
                ax.add_patch(rectangle((k, i), 1, 1, fc=face, ec=theme.soft, lw=1))
                style = dict(ha="center", va="center")
                ax.text(k + 0.5, i + 0.4, f"{i}{k}", size=15, family="monospace", **style)
                words = f"{p:.0%}" if p else "never"
                words += "\nnot in the data" if is_wrong else ""
                ax.text(k + 0.5, i + 0.73, words, size=9, **style)
        ax.set(xlim=(0, 2), ylim=(2, 0), aspect="equal", xlabel="second token")
        ax.set_xticks([0.5, 1.5], ["0", "1"])
        ax.set_yticks([0.5, 1.5], ["0", "1"])
        ax.tick_params(length=0)
        ax.grid(False)
        ax.spines[:].set_visible(False)
        ax.set_title(title, fontsize=10)
    axes[0].set_ylabel("first token")
    write_figure(fig, path, small=True)


# ---- A training run
def draw_run(ax, log, color, mark, label):
    """Draw the losses of one run's log, and its bounds on validation text in the color `mark`.

    label: the name of the run; None if there is only one.
    """
    batches = [r for r in log if r.get("loss") is not None]
    steps = [r["step"] for r in batches]
    losses = [r["loss"] for r in batches]
    ax.plot(steps, losses, lw=0.8, alpha=0.45, color=color)
    means, middles = plots.smooth(losses, least=1 if label else 5)
    words = label or "training loss, running mean"
    ax.plot([steps[k] for k in middles], means, lw=2.4, color=color, label=words)
    key, scored = plots.validations(log)
    scored = [r for r in scored if r["step"]]
    values = [r[key] for r in scored]
    errors = [2 * (r[f"{key}_se"] or 0) for r in scored]
    words = None if label else f"{key[4:].upper()} of validation text, ± 2 standard errors"
    style = dict(fmt="o:", ms=5.5, lw=1.4, capsize=3, color=mark, label=words)
    ax.errorbar([r["step"] for r in scored], values, errors, **style)


def mark_rates(ax, log, theme):
    """Shade the steps of a run from which more mask rates are drawn, and say what that means."""
    opens = plots.where_rates_open(log)
    if not opens:
        return
    begin, end, margin = opens["step"], log[-1]["step"], opens["rate_margin"]
    ax.axvspan(begin, end, color=theme.soft, alpha=0.13, lw=0)
    first = "half" if margin == 0.5 else f"{margin:.0%} to {1 - margin:.0%}"
    words = {
        begin / 2: f"{first} of each text\nis masked",
        (begin + end) / 2: "few and many masks too:\nharder texts, so the line may rise\n"
        "while the model improves",
    }
    style = dict(size=9, ha="center", va="top", color=theme.soft)
    for x, text in words.items():
        ax.text(x, 0.8, text, transform=ax.get_xaxis_transform(), **style)


def draw_losses(logs, path, theme):
    """Draw the losses of runs: {name: the records of its log.jsonl}.

    Of one run: pale, single batches, and a line, their running mean. Of several: a line for each.
    Points: the bound on validation text.
    """
    fig, ax = figure(7.5, 3.8)
    colors = (theme.blue, theme.red, theme.green, theme.purple)
    for (name, log), color in zip(logs.items(), colors):
        several = len(logs) > 1
        draw_run(ax, log, color, color if several else theme.red, name if several else None)
    records = [r for log in logs.values() for r in log]
    last = max(1, *(r["step"] for r in records))
    highest = max([0, *(r["loss"] for r in records if r.get("loss") is not None)])
    key, scored = plots.validations(records)
    if scored and not scored[0]["step"]:
        level = scored[0][key]
        ax.axhline(level, color=theme.soft, lw=1.2, ls=":")
        words = f"before the first step: {level:.2f}"
        ax.text(last, level + 0.04, words, color=theme.soft, size=9, ha="right", va="bottom")
        highest = max(highest, level + 0.25)
    if len(logs) == 1:
        mark_rates(ax, records, theme)
    ax.set(xlabel="step", ylabel="nats per token", xlim=(0, 1.02 * last))
    ax.set_ylim(None, highest + 0.1)
    place = dict(loc="center right")
    if len(logs) > 1:
        place = dict(loc="upper right", title="line: training; dots: validation", title_fontsize=9)
    ax.legend(frameon=False, fontsize=9, **place)
    write_figure(fig, path, small=True)


# ---- The time embedding
def draw_waves(path, theme):
    """Draw the cosines that --time_conditioning tells the network: cos(pi k t) for rate t."""
    rates = [i / 100 for i in range(101)]
    fig, (left, right) = figure(7.5, 2.9, 1, 2)
    colors = (theme.blue, theme.red, theme.green)
    for k, color in zip((1, 3, 8), colors):
        wave = [math.cos(math.pi * k * t) for t in rates]
        left.plot(rates, wave, color=color, lw=2, label=f"k = {k}")
    left.legend(frameon=False, fontsize=9, ncols=3, loc="upper center")
    left.set(xlim=(0, 1), ylim=(-1.1, 1.5), xlabel="mask rate t", ylabel="cos(π k t)")
    left.set_title("three of the waves", fontsize=10)
    table = [[math.cos(math.pi * k * t) for t in rates] for k in range(WAVES)]
    extent = (0, 1, WAVES - 0.5, -0.5)
    image = right.imshow(
        table, interpolation="nearest", aspect="auto", cmap="PuOr", vmin=-1, vmax=1, extent=extent
    )
    right.grid(False)
    right.axvline(0.3, color="black", lw=1.4)
    right.text(0.31, -0.9, "what is told at t = 0.3", size=8.5, ha="center", va="bottom")
    right.set(xlabel="mask rate t", ylabel="k", yticks=range(0, WAVES, 3))
    right.set_title(f"the first {WAVES}, sorted by k", fontsize=10, pad=16)
    fig.colorbar(image, ax=right, fraction=0.05)
    write_figure(fig, path, small=True)
