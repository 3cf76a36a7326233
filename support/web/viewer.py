"""How sample.py shows the unmasking: in the terminal, as lines of JSON, as a page that replays it.

The page is page/viewer.html with one JSON object. Text that a model wrote stays text: no "<" of it
reaches the HTML parser, the DOM is built from text nodes, and a policy forbids every load and all
scripts but the page's own, by its hash. A page that is cut off or damaged says so.
"""

import base64
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import time
import unicodedata
import zlib
from pathlib import Path

import torch

from support.infill.templates import joined
from support.outputs import write
from support.terminal import UNSAFE, escaped

FILLED = "\x1b[1;36m"
NEW = "\x1b[1;7;36m"
CHANGED = "\x1b[1;7;31m"
FAINT = "\x1b[2m"
PLAIN = "\x1b[0m"
PAGE = Path(__file__).parent / "assets"
ABOUT = """A masked diffusion model writes: each step reveals tokens anywhere in the text, or draws
    doubtful ones again."""
TAGS = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}  # in JSON these occur in strings only


def json_line(template, texts, facts):
    """A line of --json; texts: (text, filled?) pairs."""
    line = dict(text=joined(texts))
    if template:
        line |= dict(template=template, fills=[text for text, filled in texts if filled])
    line = json.dumps(line | facts, ensure_ascii=False)
    # json leaves some characters as they are, though they end lines or command terminals.
    return UNSAFE.sub(lambda found: json.dumps(found[0])[1:-1], line)


def has_colours(stream):
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def highlighted(texts, dimmed=False):
    """(text, filled?) pairs as one string; for a terminal escaped, the filled ones in colour."""
    if sys.stdout.isatty():
        texts = [(escaped(text), filled) for text, filled in texts]
    if not has_colours(sys.stdout):
        return joined(texts)
    if dimmed:
        return f"{FAINT}{joined(texts)}{PLAIN}"
    return "".join(f"{FILLED}{text}{PLAIN}" if filled else text for text, filled in texts)


class TerminalPlayer:
    """The unmasking of one text in the terminal; where there is none, the text of each step."""

    def __init__(self, tokenizer, x, mask, steps):
        self.tokenizer = tokenizer
        self.mask = mask
        self.steps = steps
        self.given = (x != mask).tolist()
        self.before = x
        self.number = 0  # of steps shown
        self.changes = 0
        self.height = 0  # lines on the screen
        self.show(x)

    def add(self, step, row):
        """Show a row of a sample.Step."""
        self.number += 1
        self.show(step.x[row])

    def show(self, x):
        new = x != self.before
        changed = new & (self.before != self.mask)
        self.before = x
        self.changes += int(changed.sum())
        left = int((x == self.mask).sum())
        status = f"step {self.number} of {self.steps}: {len(x) - left} of {len(x)} tokens"
        status += f", {self.changes} changes" * (self.changes > 0)
        if not has_colours(sys.stdout):
            text = escaped(self.tokenizer.decode(x))
            print(status, text, sep="\n", file=sys.stderr, flush=True)
            return
        width, height = shutil.get_terminal_size()
        lines = self.lines(x.tolist(), new.tolist(), changed.tolist(), width)[-max(1, height - 2) :]
        self.clear()
        print(*lines, f"{FAINT}{status[:width]}{PLAIN}", sep="\n", flush=True)
        self.height = len(lines) + 1
        time.sleep(0.05)  # or the eye cannot follow

    def lines(self, x, new, changed, width):
        """The text in lines of the terminal's width; a dot is a part of an incomplete character."""
        lines = [""]
        column = 0
        texts = self.tokenizer.pieces(x)
        for i, (given, fresh, other) in enumerate(zip(self.given, new, changed, strict=True)):
            masked = x[i] == self.mask
            style = NEW if fresh else FILLED
            if other:
                style = CHANGED
            style = FAINT if masked else style * (not given)
            for c in "░" if masked else texts[i]:
                columns = 1 + (unicodedata.east_asian_width(c) in "WF")
                if c == "\n" or column + columns > width:
                    lines.append("")
                    column = 0
                if c != "\n":
                    shown = c if c.isprintable() and c != "\ufffd" else "·"
                    lines[-1] += f"{style}{shown}{PLAIN}"
                    column += columns
        return lines

    def clear(self):
        """Remove the picture, before the next one or the text itself."""
        if self.height:
            print(f"\x1b[{self.height}A\r\x1b[J", end="", flush=True)
        self.height = 0


def aligned(tokens, width=68):
    """Lines of text: the original, its masks, what is predicted, one below the other.

    tokens: dicts with text, mark ("" where nothing is masked), likeliest [(text, probability)]
    """
    names = ("original", "masked", "predicted", "+ is right")
    blocks = [[""] * len(names)]
    for token in tokens:
        text = token["text"]
        cells = [text, text, text, ""]
        if token["mark"]:
            cells = [text, "█" * max(1, len(text)), token["likeliest"][0][0], token["mark"]]
        size = max(map(len, cells))
        if len(blocks[-1][0]) + size > width:
            blocks.append([""] * len(names))
        cells = [cell.replace("\n", "↵").ljust(size) for cell in cells]
        blocks[-1] = [line + cell for line, cell in zip(blocks[-1], cells)]
    return [f"{name:<12}{line}" for block in blocks for name, line in zip(names, block)]


def likeliest(tokenizer, p, n, first=False):
    """The n likeliest tokens by probabilities p (V,): pairs of text and probability.

    first: at the beginning of a text, where some tokenizers write no space.
    """
    best = p.topk(min(n, len(p)))
    return [(tokenizer.piece(v, first), q) for q, v in zip(*map(torch.Tensor.tolist, best))]


class HtmlRecorder:
    """The frames of one text: what each step revealed, how surely, and what else was likely."""

    def __init__(self, tokenizer, x, mask):
        self.tokenizer = tokenizer
        self.given = (x != mask).tolist()
        self.x = x
        self.frames = []

    def add(self, step, row):
        """Keep what a sample.Step did to a row of its batch, if it changed a token."""
        if torch.equal(step.x[row], self.x):
            return
        self.x = step.x[row]
        of_row = step.drawn.nonzero()[:, 0] == row
        frame = []
        for i, p in zip(step.drawn[row].nonzero()[:, 0].tolist(), step.logp[of_row].exp()):
            token = int(step.x[row, i])
            others = [
                [text, round(q, 4)] for text, q in likeliest(self.tokenizer, p, 5, first=i == 0)
            ]
            frame.append([i, token, round(float(p[token]), 4), others])
        self.frames.append(frame)

    def page(self, ids):
        """tokens, given and frames as `write_page` takes them, up to [END]."""
        end = self.tokenizer.end_id
        n = ids.index(end) if end in ids else len(ids)
        tokens = self.tokenizer.pieces(ids[:n])
        frames = [[change for change in frame if change[0] < n] for frame in self.frames]
        for change in itertools.chain(*frames):
            i, token = change[:2]
            is_last = token == ids[i]
            change[1] = tokens[i] if is_last else self.tokenizer.piece(token, first=i == 0)
        return dict(tokens=tokens, given=self.given[:n], frames=frames)


def settings(model, options):
    """What a page says about its texts: name -> value."""
    n = sum(p.numel() for p in model.parameters()) / 1e6
    about = dict(model=f"{n:.1f} M parameters, context {model.config.block_size}")
    return about | {name: getattr(options, name) for name in ("order", "temperature", "seed")}


def read_part(name):
    """A file of support/web/assets/, as text."""
    return (PAGE / name).read_text(encoding="utf-8")


def bundle(*names):
    """Scripts of support/web/assets/ as one, without the imports and exports that connect them."""
    modules = "\n".join(map(read_part, names))
    return re.sub("^(import .*\n|export )", "", modules, flags=re.MULTILINE)


def assemble(data, scripts, styles, policy="", **parts):
    """The page: viewer.html with these in place of its {{names}}.

    data             what the scripts read; a checksum tells them whether it is intact
    scripts, styles  names of files in support/web/assets/, which become a part of the page
    policy           of what the page loads; else it loads nothing. The browser runs the page's own
                     script by its hash alone, so that a damaged one does not run
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).translate(TAGS)
    checksum = zlib.crc32(text.encode())
    script = f'"use strict";\n{bundle(*scripts)}\n$("notice").remove();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts |= dict(
        data=f'<script type="application/json" data-crc32="{checksum}" id="data">{text}</script>',
        script=script,
        style="".join(map(read_part, styles)),
        policy="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
        f"form-action 'none'; script-src 'sha256-{digest}' {policy}",
    )
    return re.sub(r"{{(\w+)}}", lambda name: parts[name[1]], read_part("viewer.html"))


def write_page(path, samples, settings):
    """Write a page that replays `samples`.

    settings  name -> value
    samples   list of dicts, each of a text of n positions: text, title, calls, seconds,
              given   n booleans: part of the template
              tokens  n strings: the final token, "" if another position shows its character
              frames  for each step what it drew: [position, token, confidence,
                      up to 5 alternatives [token, probability]]
    """
    data = dict(samples=samples, settings={name: str(value) for name, value in settings.items()})
    page = assemble(
        data,
        scripts=["crc.js", "viewer.js"],
        styles=["viewer.css"],
        about=ABOUT,
        composer="",
        program="sample.py --html",
    )
    write(path, page.encode())


def show(found, facts, with_scores):
    """Print the texts found: the best, and in a terminal the others, dimmed."""
    if not (with_scores or has_colours(sys.stdout)):
        found = found[:1]
    for i, texts in enumerate(found):
        heading = ""
        if with_scores:
            heading = "{share:6.1%}  log p {score:.2f}  ".format(**facts["candidates"][i])
        print(heading + highlighted(texts, dimmed=i > 0), flush=True)
