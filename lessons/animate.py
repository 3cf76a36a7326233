"""Turn a page of sample.py into an animated picture (SVG), as the README has one.

    python sample.py --infill "To be, or not ███ ████" --num_samples=1 --html=page.html
    python lessons/animate.py page.html picture.svg            # --dark: for a dark background

The picture plays twice and ends with the finished text. A browser that is set to reduce motion
shows only the finished text.
"""

import argparse
import colorsys
import json
import re
import sys
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanomdlm.support import errors
from nanomdlm.support.cli import entry, outputs
from nanomdlm.support.cli.files import read_small

WIDTH, HEIGHT = 9.6, 27  # pixels for each character
CAPTION = 7.0  # pixels for each character of the caption, in a wide font
MARGIN = 24  # pixels at the left and the right
COLUMNS = 80
STEP = 0.3  # seconds, longer if there are few steps:
SHORTEST = 8.0  # seconds for all of them
HOLD = 5.0  # seconds on the finished text, before it plays again
THEMES = {
    "light": dict(
        paper="#fbfbf9", ink="#1b1d26", soft="#6b6e7b", mask="#e6e5e0", changed="#d23c2a"
    ),
    "dark": dict(paper="#0f1118", ink="#eceef4", soft="#9396a5", mask="#272a35", changed="#ff7a59"),
}


def read_sample(path):
    """The first sample of a page: a dict with tokens, given and frames (support/web/viewer.py)."""
    path.stat()  # an error that names a file that is missing
    if not path.is_file():
        raise ValueError("no file")
    match = re.search(r'id="data">(.*?)</script>', read_small(path), re.S)
    if not match:
        raise ValueError("no page")
    sample = json.loads(match[1])["samples"][0]
    check(sample)
    return sample


def check(sample):
    """Raise ValueError or TypeError for a sample of other types, or whose text is not complete."""
    tokens, given, frames, calls = (sample[k] for k in ("tokens", "given", "frames", "calls"))
    kinds = [(tokens, str), (given, bool), (frames, list)]
    if not tokens or not all(type(v) is list and {*map(type, v)} <= {k} for v, k in kinds):
        raise ValueError("tokens, given and frames are no lists")
    written = {i for i, is_given in enumerate(given) if is_given}
    for position, token, *_ in (each for frame in frames for each in frame):
        if type(position) is not int or type(token) is not str:
            raise ValueError("an entry of a frame is not a position with its token")
        written.add(position)
    if type(calls) is not int or len(given) != len(tokens) or written != {*range(len(tokens))}:
        raise ValueError("not all tokens are given or written")


def layout(tokens):
    """(column, row) of each token: a line ends at a newline or before a word that does not fit."""
    text = "".join(tokens)
    owner = [i for i, token in enumerate(tokens) for _ in token]
    places = [(0, 0)] * len(tokens)
    row = column = 0
    for k, character in enumerate(text):
        word = re.match(r"\S*", text[k:])[0]
        if column and column + len(word) > COLUMNS and (k == 0 or text[k - 1].isspace()):
            row += 1
            column = 0
        if k == 0 or owner[k] != owner[k - 1]:
            places[owner[k]] = (column, row)
        column += 1
        if character == "\n":
            row += 1
            column = 0
    return places


def color_of(fraction, dark):
    """The color of a token that was written after this fraction of the steps: violet to orange."""
    hue = (0.70 + 0.38 * fraction) % 1
    rgb = colorsys.hls_to_rgb(hue, 0.72 if dark else 0.36, 0.75)
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb)


class Picture:
    """The elements of an SVG; each is visible from a first step to a last one."""

    def __init__(self, steps):
        self.steps = steps
        self.step = max(STEP, SHORTEST / max(1, steps))  # seconds
        self.seconds = steps * self.step + HOLD
        self.rules = {}  # (first step, step after the last) -> CSS
        self.elements = []

    def add(self, element, first=0, last=None):
        """Add an SVG element, a text with {} as its class. last=None: visible to the end."""
        at = 100 * self.step / self.seconds
        name = f"s{first}_{'' if last is None else last}"
        frames = f"0%{{opacity:{int(first == 0)}}}{first * at:.2f}%{{opacity:1}}"
        if last is not None:
            frames += f"{last * at:.2f}%{{opacity:0}}"
        rule = f"@keyframes {name}{{{frames}}}"
        moves = f"animation:{name} {self.seconds:.1f}s step-end 2"
        rule += f".{name}{{opacity:{int(last is None)};{moves}}}"
        self.rules[name] = rule
        self.elements.append(element.replace("{}", name))


def draw(sample, theme):
    """The SVG of a sample, as a string."""
    colors = THEMES[theme]
    tokens = sample["tokens"]
    steps = len(sample["frames"])
    places = layout(tokens)
    events = [[] for _ in tokens]  # for each position: (step, token)
    for step, frame in enumerate(sample["frames"], 1):
        for position, token, *_ in frame:
            if not events[position] or events[position][-1][1] != token:
                events[position].append((step, token))
    picture = Picture(steps)
    for position, (column, row) in enumerate(places):
        x = MARGIN + column * WIDTH
        y = 30 + row * HEIGHT
        if sample["given"][position]:
            text = escape(tokens[position].replace("\n", ""))
            picture.elements.append(f'<text class="g" x="{x:.1f}" y="{y}">{text}</text>')
            continue
        size = max(1, len(tokens[position])) * WIDTH - 1.6
        box = f'<rect class="{{}}" x="{x:.1f}" y="{y - 17}" width="{size:.1f}" height="22" rx="4" '
        box += 'fill="%s"/>'
        picture.add(box % colors["mask"], 0, events[position][0][0])
        for k, (step, token) in enumerate(events[position]):
            last = events[position][k + 1][0] if k + 1 < len(events[position]) else None
            flash = min(step + 2, last or step + 2)
            color = color_of(step / steps, theme == "dark")
            picture.add(box % (colors["changed"] if k else color), step, flash)
            shown = escape(token.replace("\n", "↵"))
            words = f'<text class="{{}}" x="{x:.1f}" y="{y}" fill="%s">{shown}</text>'
            picture.add(words % colors["paper"], step, flash)
            if last != flash:
                is_break = token == "\n"
                picture.add(words % (colors["mask"] if is_break else color), flash, last)
    height = 30 + (1 + max(row for _, row in places)) * HEIGHT + 20
    n = sample["given"].count(False)
    caption = f"{n} tokens, {sample['calls']} network calls."
    caption += " Bold: given." if n < len(tokens) else ""
    caption += " Color: when it appeared."
    caption += " Red: corrected." if any(len(each) > 1 for each in events) else ""
    longest = max(
        column + max(1, len(token)) for (column, _), token in zip(places, tokens, strict=True)
    )
    width = 2 * MARGIN + max(CAPTION * len(caption), WIDTH * longest)
    line = f'<text class="c" x="{MARGIN}" y="{height - 14:.0f}" fill="{colors["soft"]}">'
    line += f"{caption}</text>"
    style = "text{font:16px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
    style += f".g{{font-weight:700;fill:{colors['ink']}}}.c{{font:13px system-ui,sans-serif}}"
    style += "@media(prefers-reduced-motion:reduce){*{animation:none!important}}"
    return "".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}">',
            f"<style>{style}{''.join(picture.rules.values())}</style>",
            f'<rect width="100%" height="100%" rx="12" fill="{colors["paper"]}"/>',
            *picture.elements,
            line,
            "</svg>\n",
        )
    )


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", help="a page that sample.py --html wrote")
    parser.add_argument("picture", help="SVG file to write")
    parser.add_argument("--dark", action="store_true", help="for a dark background")
    args = parser.parse_args(argv)
    outputs.check("PICTURE", args.picture, dict(PAGE=args.page))
    try:
        svg = draw(read_sample(Path(args.page)), "dark" if args.dark else "light")
    except (ValueError, LookupError, TypeError, RecursionError):
        fix = "give a page that sample.py --html wrote"
        raise errors.UserError(f"{args.page} is not a page of sample.py; {fix}") from None
    outputs.write(args.picture, svg.encode())
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
