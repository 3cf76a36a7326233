"""Proofreading of a file (sample.py --fix): reads it, shows what changes, writes the new text.

Changes are shown window by window, as they are found, and written at the end.
"""

import html
import sys
from dataclasses import replace
from pathlib import Path

from nanomdlm.support.cli import outputs
from nanomdlm.support.cli.terminal import bar, escaped, is_terminal, warn
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import display
from nanomdlm.support.infill.templates import read_text
from nanomdlm.support.proofread.proofreader import Proofreader
from nanomdlm.support.run import checkpoint_score

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


# ---- Where the new text goes
def check_output(options):
    """Raise UserError unless --output can be written; it may be the file of --fix itself."""
    is_same = options.fix != "-" and outputs.is_same(options.output, options.fix)
    outputs.check_all(replace(options, fix="") if is_same else options)
    if is_same and not outputs.is_replaced(Path(options.output)):
        raise UserError(f"--output={options.output} cannot be replaced at once; give another file")


def write(path, text):
    """Write to what --output, --html or --json names: nothing, a file, or standard output."""
    if path == "-":
        sys.stdout.buffer.write(text.encode())
    elif path:
        outputs.write(path, text.encode())


# ---- Showing changes
class Shown:
    """Prints the changed lines; of long lines, only the parts around the changes.

    In colors, or as [-removed-]{+added+} where there are none.
    """

    def __init__(self, stream):
        self.stream = stream
        self.has_colors = display.has_colors(stream)
        self.texts = []  # of the line that is shown, up to its last change
        self.near = ""  # unchanged text of the line after that, or all of it; "…" where it is cut

    def add(self, part):
        """Show a changes.Part, if it is a change or near one."""
        if part.change:
            if not self.texts:
                self.line = part.change.line
            self.texts += [self.plain(self.near), self.mark(part)]
            self.near = ""
            return
        for i, text in enumerate(part.after.split("\n")):
            if i:
                self.end()
            self.near += text.removesuffix("\r")
            if self.texts and len(self.near) > 2 * AROUND:
                after = self.near[-AROUND:]
                self.near = self.near[:AROUND] + "…"
                self.end()
                self.near = f"…{after}"
        if not self.texts and len(self.near) > AROUND:
            self.near = "…" + self.near[-AROUND:]

    def end(self):
        """End the line that is shown."""
        if self.texts:
            text = "".join([*self.texts, self.plain(self.near)])
            print(f"{self.line}: {text}", file=self.stream, flush=True)
        self.texts = []
        self.near = ""

    def plain(self, text):
        return escaped(text) if is_terminal(self.stream) else text

    def mark(self, part):
        signs = ("[-", "-]", "{+", "+}")
        if self.has_colors:
            signs = (REMOVED, display.PLAIN, ADDED, display.PLAIN)
        before, after = (
            self.plain(text.replace("\r\n", "\n").replace("\n", "↵"))
            for text in (part.before, part.after)
        )
        removed = f"{signs[0]}{before}{signs[1]}" if before else ""
        return removed + (f"{signs[2]}{after}{signs[3]}" if after else "")


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


def fix_file(options, model, tokenizer, folders):
    """Proofread the file of --fix; returns the exit code.

    The changes are printed, unless standard output is that of --output or --json.
    """
    reader = Proofreader(model, tokenizer, options.caution)
    name = "standard input" if options.fix == "-" else f"--fix={options.fix}"
    content = read_text(options.fix, name)
    checkpoint_score.introduce(folders, options.out_dir)
    shown = Shown(sys.stdout) if "-" not in (options.output, options.json) else None
    parts = []
    with bar(desc="proofreading", unit=" characters", total=len(content)) as read:
        for part in reader.parts(content):
            parts.append(part)
            if shown:
                read.clear()  # what is shown may be on the same terminal
                shown.add(part)
            read.update(len(part.before))
    if shown:
        shown.end()
    changes = [part.change for part in parts if part.change]
    lines = [f"{display.safe_json(change._asdict())}\n" for change in changes]
    write(options.output, "".join(part.after for part in parts))
    write(options.html, "".join([PAGE, *map(to_html, parts), "</pre>\n</body>\n</html>\n"]))
    write(options.json, "".join(lines))
    warn(f"{len(changes)} change{'' if len(changes) == 1 else 's'} in {len(content)} characters")
    return 0
