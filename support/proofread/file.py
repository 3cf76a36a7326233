"""Proofreading of a file (sample.py --fix): reads it, shows what changes, writes the new text.

All of it goes window by window, so that memory does not grow with the file, nor with a line.
"""

import codecs
import contextlib
import html
import shutil
import sys
import tempfile
from pathlib import Path

from nanomdlm.support.cli import outputs
from nanomdlm.support.cli.progress import bar
from nanomdlm.support.cli.terminal import escaped, is_terminal, warn
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import display
from nanomdlm.support.infill.templates import open_input
from nanomdlm.support.proofread.proofreader import Proofreader
from nanomdlm.support.proofread.words import Words
from nanomdlm.support.run import checkpoint_score

CHUNK = 1 << 16  # bytes that are read at a time
AROUND = 40  # characters that are shown before and after a change
REMOVED = "\x1b[9;31m"
ADDED = "\x1b[1;32m"

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>mdlm: proofreading</title>
<style>
:root { color-scheme: light dark; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 15px/1.6 ui-monospace, monospace; }
del { color: #c22; }
ins { color: #182; font-weight: bold; text-decoration: none; border-bottom: 2px solid; }
@media (prefers-color-scheme: dark) { del { color: #f88; } ins { color: #7d7; } }
</style>
</head>
<body>
<h1>Proofreading</h1>
<p>Point at a change to see by how many nats it makes the text likelier.</p>
<pre>"""


# ---- Reading
def pieces(f, name):
    """Yield the text of a binary file in pieces; UserError if it is not UTF-8, or empty."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = 0
    line = 1
    while True:
        held = len(decoder.getstate()[0])
        chunk = f.read(CHUNK)
        if not (chunk or at):
            raise UserError(f"{name} is empty; give a text file")
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as e:
            line += e.object[held : e.start].count(b"\n")
            what = f"line {line} of {name} is not UTF-8 text (byte {at - held + e.start})"
            raise UserError(f"{what}; convert it to UTF-8, for example with iconv") from None
        if text:
            yield text
        if not chunk:
            return
        at += len(chunk)
        line += chunk.count(b"\n")


@contextlib.contextmanager
def reading(path):
    """Context manager: (pieces of a text, its words.Words).

    It is read twice, so that it is checked and its words are counted before the first change: a
    text gets the same changes from a file and from a pipe, which goes to a temporary file first.
    """
    name = "standard input" if path == "-" else f"--fix={path}"
    try:
        with open_input(path) as f, tempfile.TemporaryFile() as copy:
            if not f.seekable():
                shutil.copyfileobj(f, copy)
                copy.seek(0)
                f = copy
            begin = f.tell()
            words = Words(pieces(f, name))
            f.seek(begin)
            yield pieces(f, name), words
    except OSError as e:
        if e.filename is None or e.filename != path:  # of an output
            raise
        why = e.strerror or e
        raise UserError(f"{name} cannot be read ({why}); give a text file") from None


# ---- Where the new text goes
def check_output(options):
    """Raise UserError unless --output can be written; it may be the file of --fix itself."""
    path = options.output
    if path in ("", "-"):
        return
    others = {flag: getattr(options, flag) for flag in ("json", "html")}
    is_same = options.fix != "-" and outputs.is_same(path, options.fix)
    read = dict(out_dir=options.out_dir or "out") | ({} if is_same else dict(fix=options.fix))
    outputs.check("output", path, read, others)
    if is_same and not outputs.is_replaced(Path(path)):
        what = f"--output={path} would be written while it is read"
        raise UserError(f"{what}, as it is a link or in a closed folder; give another file")


class Nothing:
    """An output that was not requested."""

    def put(self, content):
        pass


class Standard:
    """Standard output, for the new text and nothing else."""

    def put(self, content):
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()


def open_output(path):
    """A context manager of what --output, --html or --json name, with a method put(bytes)."""
    if path in ("", "-"):
        return contextlib.nullcontext(Standard() if path else Nothing())
    return outputs.Lines(path)


# ---- Showing changes
class Shown:
    """Prints the changed lines; of long lines, only the parts around the changes.

    In colors, or as [-removed-]{+added+} where there are none.
    """

    def __init__(self, stream):
        self.stream = stream
        self.has_colors = display.has_colors(stream)
        self.begin("")

    def begin(self, before, is_cut=False):
        self.before = before
        self.is_cut = is_cut
        self.line = None  # number of the line that is shown
        self.texts = []
        self.after = ""

    def add(self, part):
        """Show a changes.Part, if it is a change or near one."""
        if part.change:
            self.line = self.line or part.change.line
            self.texts += [self.after, self.mark(part)]
            self.after = ""
            return
        for i, text in enumerate(part.after.split("\n")):
            if i:
                self.end()
            self.keep(text.removesuffix("\r"))

    def keep(self, text):
        if self.line is None:
            before = self.before + text
            self.is_cut = self.is_cut or len(before) > AROUND
            self.before = before[-AROUND:]
            return
        self.after += text
        if len(self.after) > 2 * AROUND:
            after = self.after
            self.after = after[:AROUND] + "…"
            self.end()
            self.begin(after[-AROUND:], is_cut=True)

    def end(self):
        """End the line that is shown."""
        if self.line is not None:
            cut = "…" if self.is_cut else ""
            text = "".join([cut, self.plain(self.before), *self.texts, self.plain(self.after)])
            print(f"{self.line}: {text}", file=self.stream, flush=True)
        self.begin("")

    def plain(self, text):
        return escaped(text) if is_terminal(self.stream) else text

    def mark(self, part):
        before, after = (
            self.plain(text.replace("\r\n", "\n").replace("\n", "↵"))
            for text in (part.before, part.after)
        )
        if self.has_colors:
            removed = f"{REMOVED}{before}{display.PLAIN}" if before else ""
            return removed + (f"{ADDED}{after}{display.PLAIN}" if after else "")
        return (f"[-{before}-]" if before else "") + (f"{{+{after}+}}" if after else "")


def to_html(part):
    """A changes.Part for the page."""

    def safe(text):
        return html.escape(escaped(text))

    if not part.change:
        return safe(part.after)
    change = part.change
    old = f"<del>{safe(part.before)}</del>" if part.before else ""
    new = f"<ins>{safe(part.after)}</ins>" if part.after else ""
    about = f"line {change.line}: {change.kind}, {change.gain:.1f} nats"
    return f'<span title="{about}">{old}{new}</span>'


def fix_file(options, model, tokenizer, folders, config):
    """Proofread the file of --fix; returns the exit code.

    The changes are printed, unless standard output is that of --output or --json.
    """
    reader = Proofreader(model, tokenizer, options.caution)
    checkpoint_score.introduce(folders, options.out_dir)
    is_free = "-" not in (options.output, options.json)
    n = 0
    with contextlib.ExitStack() as stack:
        texts, words = stack.enter_context(reading(options.fix))
        text, page, lines = (
            stack.enter_context(open_output(path))
            for path in (options.output, options.html, options.json)
        )
        shown = Shown(sys.stdout) if is_free else None
        about = dict(desc="proofreading", unit=" characters", total=words.characters)
        read = stack.enter_context(bar(**about))
        page.put(PAGE.encode())
        for part in (part for parts in reader.parts(texts, words) for part in parts):
            text.put(part.after.encode())
            page.put(to_html(part).encode())
            if shown:
                read.clear()  # what is shown may be on the same terminal
                shown.add(part)
            read.update(len(part.before))
            if part.change:
                n += 1
                lines.put(f"{display.safe_json(part.change._asdict())}\n".encode())
        read.clear()
        if shown:
            shown.end()
        page.put(b"</pre>\n</body>\n</html>\n")
    warn(f"{n} change{'' if n == 1 else 's'} in {words.characters} characters")
    return 0
