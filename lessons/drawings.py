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
        x = last if len(logs) == 1 else last / 2  # the legend of several is at the right
        ax.text(x, level + 0.04, words, color=theme.soft, size=9, ha="right", va="bottom")
        highest = max(highest, level + 0.25)
    if len(logs) == 1:
        mark_rates(ax, records, theme)
    ax.set(xlabel="step", ylabel="nats per token", xlim=(0, 1.02 * last))
    ax.set_ylim(None, highest + 0.1)
    place = dict(loc="center right")
    if len(logs) > 1:
        place = dict(loc="upper right", title="line: training; dots: validation", title_fontsize=9)
        place |= dict(frameon=True, framealpha=1, edgecolor="none")  # over the dotted line
    ax.legend(**dict(frameon=False, fontsize=9) | place)
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


# ---- Two ways to take a mean
SEQUENCES = {"A": [0.2], "B": [1.0, 1.2, 1.4]}  # the cross-entropies of masked tokens (lesson 2)


def draw_means(path, theme):
    """Draw the loss of two sequences as an area, with each of the two divisions of lesson 2."""
    rectangle = optional("matplotlib.patches", "a picture").Rectangle
    fig, axes = figure(7.5, 2.9, 1, 2, sharey=True)
    count = sum(map(len, SEQUENCES.values()))
    titles = ("right: the mean of means", "wrong: divided by all four masks")
    for ax, title, by_text in zip(axes, titles, (True, False), strict=True):
        x = area = 0.0
        for (name, losses), color in zip(SEQUENCES.items(), (theme.blue, theme.red)):
            begin = x
            for loss in losses:
                width = 1 / len(SEQUENCES) / len(losses) if by_text else 1 / count
                face = mixed(color, 0.45, theme)
                ax.add_patch(rectangle((x, 0), width, loss, fc=face, ec=theme.paper, lw=1.5))
                ax.text(x + width / 2, loss + 0.03, f"{loss:g}", size=9, ha="center")
                x += width
                area += width * loss
            words = f"{name}: {x - begin:.0%} of the weight"
            ax.text((begin + x) / 2, -0.1, words, size=9, color=color, ha="center", va="top")
        ax.set(xlim=(0, 1), ylim=(0, 1.65), xticks=[])
        ax.grid(False)
        ax.set_title(f"{title}: {area:.2f}", fontsize=10)
    axes[0].set_ylabel("cross-entropy, nats")
    fig.suptitle("A bar for each masked token; the area is the loss.\n", fontsize=9)
    write_figure(fig, path, small=True)


# ---- The bound
def draw_jensen(path, theme):
    """Draw -ln p, the probabilities of a text in two orders, and the two means of lesson 6."""
    low, high = 0.2, 0.4
    middle = (low + high) / 2
    fig, ax = figure(7.5, 3.3)
    xs = [0.12 + i / 250 for i in range(96)]
    ax.plot(xs, [-math.log(x) for x in xs], color=theme.soft, lw=2)
    ends = (-math.log(low), -math.log(high))
    ax.plot((low, high), ends, "o-", color=theme.red, lw=1.6, ms=7)
    ax.text(low + 0.008, ends[0] + 0.03, "one order: p = 0.2, 1.609 nats", size=9.5, va="bottom")
    ax.text(high + 0.006, ends[1] + 0.04, "the other: p = 0.4, 0.916 nats", size=9.5)
    bound, truth = sum(ends) / 2, -math.log(middle)
    ax.plot(middle, bound, "o", color=theme.red, ms=9)
    ax.plot(middle, truth, "o", color=theme.blue, ms=9)
    style = dict(size=10, va="center")
    ax.text(middle + 0.01, bound + 0.07, f"the bound: {bound:.3f}", color=theme.red, **style)
    words = f"the truth: {truth:.3f}"
    ax.text(middle - 0.01, truth - 0.05, words, color=theme.blue, ha="right", **style)
    ax.text(0.147, 1.95, "-ln p", color=theme.soft, size=10)
    ax.set(xlabel="probability of the text", ylabel="nats", xlim=(0.12, 0.53), ylim=(0.55, 2.15))
    write_figure(fig, path, small=True)


# ---- A search with a proof
def draw_search(tree, path, theme):
    """Draw a best-first search: a column for each number of filled letters.

    tree: a list of nodes, dicts of `text` (the letters filled), `parent` (its index, None for the
    root), `cost` (nats), `call` (the number of the call that continued it, or None), `final`.
    """
    final = [node for node in tree if node["final"]]
    best = min(final, key=lambda node: node["cost"])
    depth = max(len(node["text"]) for node in tree)
    leaves = [i for i, node in enumerate(tree) if node["call"] is None]
    fig, ax = figure(7.5, 0.27 * len(leaves) + 0.7)
    children = {i: [k for k, n in enumerate(tree) if n["parent"] == i] for i in range(len(tree))}
    rows = {}

    def place(i):
        for child in children[i]:
            place(child)
        below = [rows[child] for child in children[i]]
        used = [row for k, row in rows.items() if not children[k]]
        rows[i] = sum(below) / len(below) if below else max(used, default=-1) + 1

    place(0)
    for i, node in enumerate(tree):
        column = len(node["text"])
        wins = best["text"].startswith(node["text"])
        color = theme.blue if wins else theme.ink if node["call"] else theme.soft
        if node["parent"] is not None:
            ends = (column - 1 + 0.4, column - 0.05), (rows[node["parent"]], rows[i])
            ax.plot(*ends, color=theme.blue if wins else theme.soft, lw=2 if wins else 0.8)
        masks = "█" * (depth - column)
        word = (pieces_with_spaces([node["text"]])[0] if node["text"] else "") + masks
        style = dict(size=10, va="center_baseline", color=color, parse_math=False)
        ax.text(column, rows[i], word, family="monospace", **style)
        words = f"{node['cost']:.2f}" if column else ""
        words += f"  call {node['call']}" if node["call"] else ""
        ax.text(column + 0.045 * (depth + 0.6), rows[i], words, **style | dict(size=8.5))
    ax.set(xlim=(-0.05, depth + 0.4), ylim=(max(rows.values()) + 0.7, -0.7), xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    words = "Costs in nats. Each call continues the cheapest fill so far; gray was never continued."
    fig.suptitle(words, fontsize=9)
    write_figure(fig, path, small=True)


# ---- The twin
def draw_twin(logs, path, theme):
    """Draw validation losses of a diffusion model and its twin: {objective: records}."""
    fig, ax = figure(7.5, 3.2)
    names = dict(mdlm="diffusion, an upper bound", ar="autoregressive twin, exact")
    for (name, log), color in zip(logs.items(), (theme.blue, theme.red)):
        key, scored = plots.validations(log)
        points = [(r["step"], r[key]) for r in scored if r["step"]]
        ax.plot(*zip(*points), "o-", color=color, lw=2, ms=5, label=names[name])
        low = min(points, key=lambda point: point[1])
        for at in {low, points[-1]}:
            up = 8 if name == "ar" else -15
            place = dict(textcoords="offset points", xytext=(0, up), ha="center")
            ax.annotate(f"{at[1]:.2f}", at, color=color, size=9, **place)
    ax.set(xlabel="step (245 are one pass through the text)", ylabel="nats per character")
    ax.set_ylim(1.35, None)
    ax.legend(frameon=False, fontsize=9)
    write_figure(fig, path, small=True)


# ---- Who sees whom
def draw_sees(path, theme, block=2):
    """Draw which position sees which, of a masked text and, after it, the same text clean."""
    rectangle = optional("matplotlib.patches", "a picture").Rectangle
    n = len(SENTENCE)
    fig, ax = figure(5.6, 5.0)
    for i in range(2 * n):
        for j in range(2 * n):
            row, column = i % n // block, j % n // block
            masked_row, masked_column = i < n, j < n
            if masked_row and masked_column:
                sees = row == column
            elif masked_row:
                sees = column < row
            else:
                sees = not masked_column and column <= row
            color = theme.red if masked_column else theme.blue
            face = mixed(color, 0.6, theme) if sees else mixed(theme.mask, 0.35, theme)
            ax.add_patch(rectangle((j, i), 1, 1, fc=face, ec=theme.paper, lw=1.5))
    for k in (n, *range(block, 2 * n, block)):
        wide = 2.4 if k == n else 0.9
        ax.plot((k, k), (0, 2 * n), color=theme.ink, lw=wide)
        ax.plot((0, 2 * n), (k, k), color=theme.ink, lw=wide)
    names = [*("███" for _ in SENTENCE), *SENTENCE]
    ax.xaxis.tick_top()
    at = [k + 0.5 for k in range(2 * n)]
    ax.set_xticks(at, names, rotation=90, fontsize=9)
    ax.set_yticks(at, names, fontsize=9)
    for label in (*ax.get_xticklabels()[:n], *ax.get_yticklabels()[:n]):
        label.set_color(theme.soft)
    ax.tick_params(length=0)
    ax.set(xlim=(0, 2 * n), ylim=(2 * n, 0), aspect="equal")
    ax.grid(False)
    ax.spines[:].set_visible(False)
    words = "Does the row see the column? Orange: yes, a mask. Blue: yes, a word."
    ax.set_xlabel(words + "\nAbove and left: the masked text. Below and right: the clean one.")
    write_figure(fig, path, small=True)


# ---- The automaton
# Of the pattern so|not|now|sea: where each state is drawn, what was read, b when it is reached.
STATES = {
    0: (0.0, 0.5, "", "b = 0.18"),
    1: (1.0, 0.15, "n", "b = 0.56"),
    2: (1.0, 1.25, "s", "b = 0.02"),
    3: (2.0, 0.15, "no", "b = 0.7"),
    4: (2.0, 0.85, "so", "b = 0"),
    5: (2.0, 1.65, "se", "b = 0.1"),
    6: (3.0, 0.7, "3 letters", "b = 1"),
}
ACCEPT = (4, 6)
ARROWS = {
    (0, 1): "n 0.3",
    (0, 2): "s 0.6",
    (1, 3): "o 0.8",
    (2, 4): "o 0.8",
    (2, 5): "e 0.2",
    (3, 6): "t 0.5, w 0.2",
    (5, 6): "a 0.1",
}


def draw_automaton(path, theme):
    """Draw the states of lesson 13, its arrows with probabilities, and what can still match."""
    patches = optional("matplotlib.patches", "a picture")
    fig, ax = figure(7.5, 3.6)
    wide = 1.9  # units of x for one of y: circles are round
    for (start, end), words in ARROWS.items():
        (x0, y0), (x1, y1) = ((STATES[k][0] * wide, STATES[k][1] * 1.7) for k in (start, end))
        length = math.hypot(x1 - x0, y1 - y0)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        begin, tip = (x0 + 0.36 * dx, y0 + 0.36 * dy), (x1 - 0.4 * dx, y1 - 0.4 * dy)
        dead = end == 4
        color = theme.soft if dead else theme.ink
        style = dict(arrowstyle="->", color=color, lw=1.4, ls=":" if dead else "-")
        ax.annotate("", tip, begin, arrowprops=style)
        x, y = (x0 + x1) / 2, (y0 + y1) / 2 - 0.12
        box = dict(fc=theme.paper, ec="none", pad=0.8)
        ax.text(x, y, words, size=9, color=color, ha="center", va="center", bbox=box)
    for k, (x, y, read, b) in STATES.items():
        at = (x * wide, y * 1.7)
        lost = k == 4
        color = theme.soft if lost else theme.blue
        share = float(b.split("=")[1])
        face = mixed(theme.blue, 0.12 + 0.5 * share, theme)
        ax.add_patch(patches.Circle(at, 0.34, fc=face, ec=color, lw=1.6))
        if k in ACCEPT:
            ax.add_patch(patches.Circle(at, 0.28, fc="none", ec=color, lw=1))
        ax.text(*at, k, size=11, ha="center", va="center")
        words = f"{read}\n{b}" if read else f"nothing\n{b}"
        ax.text(at[0], at[1] + 0.4, words, size=8.5, color=theme.soft, ha="center", va="top")
    ax.set(xlim=(-0.7, 3 * wide + 0.9), ylim=(3.75, -0.2), aspect="equal", xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    words = (
        "Double circle: accepts. b: the probability that the masks still to come lead to a match."
    )
    fig.suptitle(words, fontsize=9)
    write_figure(fig, path, small=True)
