"""How texts are shown: as lines of JSON; in the terminal, steps and fills with a certificate."""

import json
import math
import os
import shutil
import sys
import time
import unicodedata

import torch

from nanomdlm.support.cli.terminal import UNSAFE, escaped, is_terminal, warn
from nanomdlm.support.infill.templates import joined

FILLED = "\x1b[1;36m"
NEW = "\x1b[1;7;36m"
CHANGED = "\x1b[1;7;31m"
FAINT = "\x1b[2m"
PLAIN = "\x1b[0m"


# ---- Text and JSON


def json_line(template, texts, facts):
    """Return a line of --json.

    template: or None. texts: pairs (text, whether it was filled). facts: dict of further values.
    """
    line = dict(text=joined(texts))
    if template:
        line |= dict(template=template, fills=[text for text, filled in texts if filled])
    return safe_json(line | facts)


def safe_json(value):
    """Return a value as a line of JSON, without characters that end lines or control terminals."""
    line = json.dumps(value, ensure_ascii=False)
    return UNSAFE.sub(lambda match: json.dumps(match[0])[1:-1], line)


def has_colors(stream):
    """Whether to print colors: on a terminal that supports them, unless NO_COLOR is set."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return is_terminal(stream) and not is_plain


def highlighted(texts, dimmed=False):
    """Join pairs (text, whether it was filled); on a terminal, escape them and color the filled.

    dimmed: print all in a faint color instead
    """
    if is_terminal(sys.stdout):
        texts = [(escaped(text), filled) for text, filled in texts]
    if not has_colors(sys.stdout):
        return joined(texts)
    if dimmed:
        return f"{FAINT}{joined(texts)}{PLAIN}"
    return "".join(f"{FILLED}{text}{PLAIN}" if filled else text for text, filled in texts)


# ---- The terminal
class TerminalPlayer:
    """Shows the unmasking of one text in place; without a terminal, prints the text of each step.

    x: (T,) ids of the text before the first step. mask: the id of [MASK]. steps: their number.
    """

    def __init__(self, tokenizer, x, mask, steps):
        self.tokenizer = tokenizer
        self.mask = mask
        self.steps = steps
        self.given = (x != mask).tolist()
        self.before = x
        self.number = 0  # steps shown so far
        self.changes = 0
        self.height = 0  # lines of the current picture
        self.show(x)

    def add(self, step, row):
        """Show one row of a sample.Step."""
        self.number += 1
        self.show(step.x[row])

    def show(self, x):
        """Show the text x (T,); mark tokens that differ from the previous one."""
        new = x != self.before
        changed = new & (self.before != self.mask)
        self.before = x
        self.changes += int(changed.sum())
        left = int((x == self.mask).sum())
        status = f"step {self.number} of {self.steps}: {len(x) - left} of {len(x)} tokens"
        if self.changes:
            status += f", {self.changes} change{'s'[: self.changes != 1]}"
        if not has_colors(sys.stdout):
            text = escaped(self.tokenizer.decode(x))
            print(status, text, sep="\n", file=sys.stderr, flush=True)
            return
        width, height = shutil.get_terminal_size()
        lines = self.lines(x.tolist(), new.tolist(), changed.tolist(), width)[-max(1, height - 2) :]
        self.clear()
        print(*lines, f"{FAINT}{status[:width]}{PLAIN}", sep="\n", flush=True)
        self.height = len(lines) + 1
        time.sleep(0.05)  # so that the eye can follow

    def lines(self, x, new, changed, width):
        """Break the text into lines of the terminal's width, with a color for each token.

        new, changed: (T,) bools. A dot stands for a byte of an incomplete character.
        """
        lines = [""]
        column = 0
        texts = self.tokenizer.pieces(x)
        for i, (given, fresh, other) in enumerate(zip(self.given, new, changed, strict=True)):
            masked = x[i] == self.mask
            if masked:
                style = FAINT
            elif given:
                style = ""
            elif other:
                style = CHANGED
            elif fresh:
                style = NEW
            else:
                style = FILLED
            for c in "░" if masked else texts[i]:
                columns = 2 if unicodedata.east_asian_width(c) in "WF" else 1
                if c == "\n" or column + columns > width:
                    lines.append("")
                    column = 0
                if c != "\n":
                    shown = c if c.isprintable() and c != "\ufffd" else "·"
                    lines[-1] += f"{style}{shown}{PLAIN}"
                    column += columns
        return lines

    def clear(self):
        """Erase the current picture, before the next one or the final text is printed."""
        if self.height:
            print(f"\x1b[{self.height}A\r\x1b[J", end="", flush=True)
        self.height = 0


def aligned(tokens, width=68):
    """Return lines that show original, masked and predicted text below each other.

    tokens: list of dicts with `text`, `likeliest` [(text, probability)] and `mark`, the character
        of the fourth line ("" for tokens that are not masked)
    width: columns of the text, after a heading of 12 columns
    """
    names = ("original", "masked", "predicted", "+ is right")
    groups = [[""] * len(names)]
    for token in tokens:
        text = token["text"]
        cells = [text, text, text, ""]
        if token["mark"]:
            cells = [text, "█" * max(1, len(text)), token["likeliest"][0][0], token["mark"]]
        size = max(map(len, cells))
        if len(groups[-1][0]) + size > width:
            groups.append([""] * len(names))
        cells = [cell.replace("\n", "↵").ljust(size) for cell in cells]
        groups[-1] = [line + cell for line, cell in zip(groups[-1], cells)]
    return [f"{name:<12}{line}" for group in groups for name, line in zip(names, group)]


def likeliest(tokenizer, p, n, first=False):
    """Return the n likeliest tokens by probabilities p (V,), as pairs (text, probability).

    first: whether the token begins a text, where some tokenizers write no space
    """
    best = p.topk(min(n, len(p)))
    return [(tokenizer.piece(v, first), q) for q, v in zip(*map(torch.Tensor.tolist, best))]


# ---- Fills, ranked
def show(candidates, facts, with_scores):
    """Print ranked texts, best first: all of them on a terminal or with scores, else the best.

    candidates: lists of pairs (text, whether it was filled)
    facts: dict whose "candidates" has the numbers of each, as sample.show_search gives them
    """
    if not (with_scores or is_terminal(sys.stdout)):
        candidates = candidates[:1]
    shows_p = not facts.get("compares_lengths") and facts.get("p", 0) > 1e-3
    for i, texts in enumerate(candidates):
        heading = ""
        if with_scores:
            row = facts["candidates"][i]
            heading = f"{row['p']:7.2%}  " if shows_p else f"log p {row['score']:7.2f}  "
        print(heading + highlighted(texts, dimmed=i > 0), flush=True)
    if with_scores:
        print(f"({certificate(facts, shows_p)})", flush=True)
    elif not facts.get("proven", True):
        warn(certificate(facts, shows_p))


def certificate(facts, shows_p):
    """What is known of the fills that are not listed, in words."""
    seen = f"{facts['calls']} sequences"
    if facts["bound"] is None:
        return f"all fills are listed; {seen}"
    if not facts["proven"] and facts["bound"] > math.log(0.5):  # which says little
        return f"not proven; {seen}"
    is_proven = "proven: any other" if facts["proven"] else "not proven: another"
    if facts.get("compares_lengths"):
        is_proven += " of the lengths searched"
    if shows_p:
        return f"{is_proven} has {math.exp(min(0, facts['bound'])):.2%} at most; {seen}"
    return f"{is_proven} has log p {facts['bound']:.2f} at most; {seen}"
