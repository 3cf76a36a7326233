"""How sample.py shows the unmasking: --watch in the terminal, --html=FILE as a page that replays it.

The page itself is viewer.html, written by hand; the samples go into it as one JSON object. Whatever a model
writes stays text there: no "<" of it reaches the HTML parser, the page's script builds the DOM from text
nodes alone, and a Content-Security-Policy forbids every load.
"""

import json
import os
import shutil
import sys
import time
import unicodedata
from pathlib import Path

import torch

from common import Refusal, write_atomically

# ------------------------------------------------------------------------------------------------------------
# The terminal

FILLED, NEW, FAINT, PLAIN = "\x1b[1;36m", "\x1b[1;7;36m", "\x1b[2m", "\x1b[0m"


def colours(stream):
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def highlighted(texts):
    """(text, filled?) pairs as one string; what was filled in colour where there is a terminal."""
    mark = (lambda t: f"{FILLED}{t}{PLAIN}") if colours(sys.stdout) else str
    return "".join(mark(t) if filled else t for t, filled in texts)


class Watch:
    """The unmasking of one text in the terminal; plain lines of progress where there is none."""

    def __init__(self, tokenizer, x, mask, steps):
        self.tokenizer, self.mask, self.steps, self.height = tokenizer, mask, steps, 0
        self.given, self.live = (x != mask).tolist(), colours(sys.stdout)
        self.show(0, x, torch.zeros_like(x, dtype=torch.bool))

    def show(self, number, x, new):
        left = int((x == self.mask).sum())
        status = f"step {number} of {self.steps}: {len(x) - left} of {len(x)} tokens"
        if not self.live:
            print(status, file=sys.stderr, flush=True)
            return
        width, lines, column = shutil.get_terminal_size().columns, [""], 0
        for i, given, fresh in zip(x.tolist(), self.given, new.tolist(), strict=True):
            style = FAINT if i == self.mask else "" if given else NEW if fresh else FILLED
            for c in "░" if i == self.mask else self.tokenizer.decode([i]):
                columns = 1 + (unicodedata.east_asian_width(c) in "WF")
                if c == "\n" or column + columns > width:
                    lines, column = [*lines, ""], 0
                if c != "\n":  # part of a character of several tokens: a dot until the text is complete
                    lines[-1] += f"{style}{c if c.isprintable() and c != chr(0xFFFD) else '·'}{PLAIN}"
                    column += columns
        self.clear()
        lines = [*lines[2 - shutil.get_terminal_size().lines:], f"{FAINT}{status[:width]}{PLAIN}"]
        print("\n".join(lines), flush=True)
        self.height = len(lines)
        time.sleep(0.05)  # or the eye cannot follow

    def clear(self):
        """Take the last picture away: of a text that is done, the text itself is shown."""
        if self.height:
            print(f"\x1b[{self.height}A\r\x1b[J", end="", flush=True)
        self.height = 0


# ------------------------------------------------------------------------------------------------------------
# The page


def pieces(tokenizer, ids):
    """The text of each token; a character of several tokens belongs to the last of them."""
    if tokenizer.kind == "char":
        return [tokenizer.decode([i]) for i in ids]
    out, done = [], ""
    for i in range(len(ids)):
        text = tokenizer.decode(ids[:i + 1])
        whole = not text.endswith("\ufffd") or i + 1 == len(ids)
        out.append(text[len(done):] if whole else "")
        done = text if whole else done
    return out


class Film:
    """The frames of one text for the page: what each step revealed, how surely, and what else was likely."""

    def __init__(self, x, mask):
        self.given, self.frames = (x != mask).tolist(), []

    def add(self, x, new, again, logp):
        """Ids (T,), what is newly revealed and masked again (T,), log-probabilities (n, V) of the former."""
        top = logp.exp().topk(min(5, logp.shape[-1]))
        at = new.nonzero()[:, 0]
        sure = logp.exp()[torch.arange(len(at)), x[at]].tolist()
        self.frames.append([[i, x[i].item(), p, list(zip(t, q, strict=True))] for i, p, t, q in zip(
            at.tolist(), sure, top.indices.tolist(), top.values.tolist(), strict=True)]
            + [[i, None, 0.0, []] for i in again.nonzero()[:, 0].tolist()])

    def page(self, tokenizer, ids, **facts):
        """The sample as viewer.write_page takes it, up to [END]."""
        n = ids.index(tokenizer.end_id) if tokenizer.end_id in ids else len(ids)
        tokens, name = pieces(tokenizer, ids[:n]), lambda i: tokenizer.decode([i])
        frames = [[[i, None if t is None else tokens[i] if t == ids[i] else name(t), round(p, 4),
                    [[name(v), round(q, 4)] for v, q in others]] for i, t, p, others in frame if i < n]
                  for frame in self.frames]
        return facts | dict(tokens=tokens, given=self.given[:n], frames=frames)


TEMPLATE = Path(__file__).with_name("viewer.html")
ESCAPES = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&"})  # in JSON these stand in strings only


def write_page(path, samples, settings):
    """Write a page that replays `samples`, and raise Refusal if the file cannot be written.

    settings  name -> value, shown as they are
    samples   a list of dicts, each of a text of n positions made in s steps:
              text, title, calls, seconds
              given   n booleans: the position belongs to the template and never changes
              tokens  n strings: the final token of each position, "" where another one carries the character
              frames  s lists, step by step, of the changes [position, token, confidence, alternatives];
                      token None: masked again; alternatives: up to 5 [token, probability]
    """
    path = Path(path)
    shown = {name: str(value) for name, value in settings.items()}
    data = json.dumps(dict(samples=samples, settings=shown), separators=(",", ":"), allow_nan=False)
    page = TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", data.translate(ESCAPES))
    try:
        if path.exists() and not path.is_file():  # a folder, or a device, which a rename would replace
            raise OSError(None, "it is no regular file")
        write_atomically(path, page.encode())
    except OSError as e:
        raise Refusal(f"--html={path} cannot be written ({e.strerror}); "
                      "give a file in a folder that exists and is yours") from None
