"""Standard output and error: messages, progress bars, and streams that are closed or fail."""

import contextlib
import os
import re
import sys

# Characters that could control a terminal or reorder its text: control characters except line ends
# and tabs, and marks that change the writing direction.
UNSAFE = re.compile(
    "\r(?!\n)|[\0-\b\v\f\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]"
)
STDOUT = "standard output"


def stdout_fails():
    """Whether standard output holds text that cannot be written."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    return False


def make_streams_usable():
    """Replace closed standard streams by os.devnull; print "?" for unencodable characters."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name) or open(os.devnull, mode)
        setattr(sys, name, stream)
        if mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def has_stdout():
    """Whether standard output was open at the start (see make_streams_usable)."""
    return getattr(sys.stdout, "name", "") != os.devnull


def silence_stdout():
    """Redirect standard output to os.devnull, so that Python reports no failure at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def is_terminal(stream):
    """Whether a stream is a terminal; sys.stderr is None where a program has no console."""
    return stream is not None and stream.isatty()


def is_first_rank():
    """Whether this is the first rank, or a process without torchrun (which sets MASTER_PORT)."""
    return "MASTER_PORT" not in os.environ or os.environ.get("RANK", "0") == "0"


def warn(message, on_every_rank=False):
    """Print a message to standard error, by default on the first rank only."""
    if on_every_rank or is_first_rank():
        with contextlib.suppress(OSError):  # the terminal was closed
            print(escaped(message), file=sys.stderr, flush=True)


def escaped(text):
    """Make text safe for a terminal: UNSAFE characters become escapes such as \\x1b or \\u202e."""
    return UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)


# ---- Progress bars of tqdm, on standard error
class LinePerUpdate:
    """A standard error that is not a terminal: each update of a bar is a line."""

    def write(self, text):
        """Print what tqdm draws, without what moves the cursor."""
        if line := text.replace("\x1b[A", "").strip("\r\n").rstrip():
            warn(line)


def width(stream):
    """Return the columns of a terminal; 0 for another stream, and where no bar can be drawn."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no console, no file
        columns, rows = os.get_terminal_size(stream.fileno())
        return columns if rows > 2 else 0  # tqdm draws nothing where rows are few, or not known
    return 0


def bar(iterable=None, **options):
    """Return a tqdm bar, which appears after a second and is gone at its end.

    Without a terminal, or on one of unknown size, it is a line every ten seconds, and of long work
    at most a thousand lines. options: those of tqdm
    """
    from tqdm import tqdm  # not at the top: entry.start, which says what is missing, comes first

    options = dict(leave=False, delay=1) | options
    if width(sys.stderr):
        return tqdm(iterable, dynamic_ncols=True, **options)
    options |= dict(file=LinePerUpdate(), mininterval=10)
    options["miniters"] = (options.get("total") or 0) / 1000
    return tqdm(iterable, **options)
