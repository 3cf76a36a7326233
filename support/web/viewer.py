"""A web page that replays how texts were unmasked.

The page is assets/viewer.html with the samples as a JSON object. Text from a model cannot inject
HTML or scripts: the characters < > & are escaped in the JSON, the DOM is built from text nodes, and
the page's content security policy allows no loading and no script but its own, identified by a
hash. A page that is truncated or damaged says so.
"""

import base64
import hashlib
import itertools
import json
import re
import zlib
from pathlib import Path

from nanomdlm.support.cli.outputs import write
from nanomdlm.support.infill.display import likeliest

PAGE = Path(__file__).parent / "assets"
ABOUT = """A masked diffusion model writes: each step reveals tokens anywhere in the text, or draws
    tokens of low confidence again."""
# JSON escapes for characters with a meaning in HTML. In JSON they occur only in strings.
TAGS = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


# ---- The page
class HtmlRecorder:
    """Records what each step draws in one text, with probabilities, for the page.

    x: (T,) ids of the text before the first step. mask: the id of [MASK].
    """

    def __init__(self, tokenizer, x, mask):
        self.tokenizer = tokenizer
        self.given = (x != mask).tolist()
        self.x = x
        self.frames = []

    def add(self, step, row):
        """Record what a sample.Step drew in a row of its batch; False if that is nothing.

        A step that draws the same tokens again is recorded too: there are as many as calls.
        """
        if not step.drawn[row].any():
            return False
        self.x = step.x[row]
        # step.logp has a row for each drawn position of the whole batch, in the order of nonzero().
        of_row = step.drawn.nonzero()[:, 0] == row
        frame = []
        for i, p in zip(step.drawn[row].nonzero()[:, 0].tolist(), step.logp[of_row].exp()):
            token = int(step.x[row, i])
            others = [
                [text, round(q, 4)] for text, q in likeliest(self.tokenizer, p, 5, first=i == 0)
            ]
            frame.append([i, token, round(float(p[token]), 4), others])
        self.frames.append(frame)
        return True

    def size(self, ids):
        """The number of tokens of a final text, up to the [END] that ends it."""
        end = self.tokenizer.end_id
        # A prompt that is to be answered ends with a given one.
        ends = (i for i, (id, given) in enumerate(zip(ids, self.given)) if id == end and not given)
        return next(ends, len(ids))

    def pieces(self, ids):
        """The texts of tokens; an [END] that a prompt ends with is a line break."""
        texts = self.tokenizer.pieces(ids)
        return [text if id != self.tokenizer.end_id else "\n" for text, id in zip(texts, ids)]

    def shown(self):
        """Return (texts, given) of the text before the first step: "" for each mask."""
        tokens = []
        for is_given, run in itertools.groupby(
            zip(self.given, self.x.tolist()), lambda both: both[0]
        ):
            ids = [id for _, id in run]
            tokens += self.pieces(ids) if is_given else [""] * len(ids)
        return tokens, self.given

    def newest(self):
        """Return what the newest step drew, with texts in place of ids, each decoded on its own."""
        return [
            [i, self.tokenizer.piece(token, first=i == 0), *more]
            for i, token, *more in self.frames[-1]
        ]

    def page(self, ids):
        """Return a dict of tokens, given and frames for write_page, up to [END].

        ids: the final text
        """
        n = self.size(ids)
        tokens = self.pieces(ids[:n])
        frames = [[change for change in frame if change[0] < n] for frame in self.frames]
        # Replace ids by texts. A token that was drawn again later is decoded on its own; the final
        # one has its text within the whole, where an incomplete character is "".
        for change in itertools.chain(*frames):
            i, token = change[:2]
            is_last = token == ids[i]
            change[1] = tokens[i] if is_last else self.tokenizer.piece(token, first=i == 0)
        return dict(tokens=tokens, given=self.given[:n], frames=frames)


def settings(model, options):
    """Return the settings that a page shows, {name: value}."""
    n = sum(p.numel() for p in model.parameters()) / 1e6
    about = dict(model=f"{n:.1f} M parameters, context {model.config.block_size}")
    return about | {name: getattr(options, name) for name in ("order", "temperature", "seed")}


def read_asset(name):
    """Return a file of support/web/assets/ as text."""
    return (PAGE / name).read_text(encoding="utf-8")


def bundle(*names):
    """Join JavaScript modules of support/web/assets/ to one script, without imports and exports."""
    modules = "\n".join(map(read_asset, names))
    return re.sub("^(import .*\n|export )", "", modules, flags=re.MULTILINE)


def assemble(data, scripts, styles, policy="", **values):
    """Build a page from viewer.html, by replacing each {{name}} in it.

    data             dict that the scripts read; a checksum tells them whether it is intact
    scripts, styles  names of files in support/web/assets/ to include in the page
    policy           additions to the content security policy; without them the page loads nothing.
                     The policy contains the hash of the script, so a damaged script does not run
    values           replacements of further names, such as about=...

    Returns the HTML as a string.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).translate(TAGS)
    checksum = zlib.crc32(text.encode())
    script = f'"use strict";\n{bundle(*scripts)}\n$("notice").remove();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values |= dict(
        data=f'<script type="application/json" data-crc32="{checksum}" id="data">{text}</script>',
        script=script,
        style="".join(map(read_asset, styles)),
        policy="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
        f"form-action 'none'; script-src 'sha256-{digest}' {policy}",
    )
    values = dict(title="mdlm", head="") | values
    return re.sub(r"{{(\w+)}}", lambda name: values[name[1]], read_asset("viewer.html"))


def write_page(path, samples, settings):
    """Write a page that replays `samples`.

    path      a file that the user names; see outputs.write for the errors
    settings  dict of name -> value, shown on the page
    samples   list of dicts, one for each text of n positions, with text, title, calls, seconds and
              given   n booleans: whether the position is a part of the template
              tokens  n strings: the final token; "" if its character is shown at another position
              frames  for each step a list of what it drew: [position, token, confidence,
                      up to 5 alternatives [token, probability]]
    """
    data = dict(samples=samples, settings={name: str(value) for name, value in settings.items()})
    page = assemble(
        data,
        scripts=["crc.js", "viewer.js"],
        styles=["viewer.css"],
        about=ABOUT,
        composer="",
        main="",
        program="sample.py --html",
    )
    write(path, page.encode())
