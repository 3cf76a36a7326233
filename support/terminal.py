"""Standard output and error: sentences, progress bars, and streams that are closed or fail."""

import contextlib
import os
import re
import stat
import sys

# What could command a terminal or reorder its text: control characters except line ends and tabs,
# and the marks that turn the direction of writing.
UNSAFE = re.compile(
    "\r(?!\n)|[\0-\b\v\f\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]"
)
STDOUT = "standard output"


def stdout_fails():
    """Whether standard output cannot be written.

    What failed to be written is still held, unless Python does not buffer (PYTHONUNBUFFERED): then
    a file on a full disk tells.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    with contextlib.suppress(OSError, ValueError, AttributeError):  # Windows; no real stream
        output = sys.stdout.fileno()
        return stat.S_ISREG(os.fstat(output).st_mode) and os.fstatvfs(output).f_bavail == 0
    return False


def make_streams_usable():
    """Replace closed standard streams, and print "?" where a terminal cannot show a character."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name) or open(os.devnull, mode)
        setattr(sys, name, stream)
        if mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def has_stdout():
    """Whether there is a standard output: a closed one was replaced by make_streams_usable."""
    return getattr(sys.stdout, "name", "") != os.devnull


def silence_stdout():
    """Keep Python from complaining about standard output again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def is_first_rank():
    """True unless torchrun, which sets MASTER_PORT too, says that this is another rank."""
    return "MASTER_PORT" not in os.environ or os.environ.get("RANK", "0") == "0"


def warn(message, on_every_rank=False):
    """Print to stderr, by default once however many ranks there are."""
    if on_every_rank or is_first_rank():
        with contextlib.suppress(OSError):  # a terminal that was closed
            print(escaped(message), file=sys.stderr, flush=True)


def escaped(text):
    """Text for a terminal: what could command it is shown as \\x1b, \\u202e and the like."""
    return UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


def quoted(text):
    """Text as a Python string in double quotes, on one line of printable characters."""
    shown = []
    for c in text:
        if c.isprintable() and c not in '"\\':
            shown.append(c)
        else:
            shown.append('\\"' if c == '"' else c.encode("unicode_escape").decode())
    return f'"{"".join(shown)}"'


def progress(what, unit, total=None, disable=False):
    """A tqdm bar for work of more than a second; written every ten seconds if not on a terminal."""
    how = dict(leave=False, delay=1, mininterval=0.1 if sys.stderr.isatty() else 10)
    return bar(desc=what, unit=unit, total=total, disable=disable, **how)


def bar(*iterable, **options):
    """tqdm(...), or where tqdm is missing a bar that shows nothing: no work ends for that."""
    try:
        from tqdm import tqdm
    except ImportError:
        return NoBar(*iterable)
    return tqdm(*iterable, file=Quiet(sys.stderr), **options)


class Quiet:
    """A stream that may fail, as its reader has gone or its disk is full: no work ends for that."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with contextlib.suppress(OSError):
            self.stream.write(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self.stream.flush()


class NoBar:
    """Has what the programs use of a tqdm bar, and shows nothing."""

    def __init__(self, iterable=()):
        self.iterable = iterable
        self.n = 0
        self.total = None

    def __iter__(self):
        return iter(self.iterable)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, n=1):
        self.n += n

    def show(self, *_, **options):
        pass

    clear = close = refresh = reset = set_description = set_postfix = set_postfix_str = show
