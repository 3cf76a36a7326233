"""Standard output and error: messages, progress bars, and streams that are closed or fail."""

import contextlib
import os
import re
import stat
import sys
import threading

# Characters that could control a terminal or reorder its text: control characters except line ends
# and tabs, and marks that change the writing direction.
UNSAFE = re.compile(
    "\r(?!\n)|[\0-\b\v\f\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]"
)
STDOUT = "standard output"


def stdout_fails():
    """Whether standard output cannot be written.

    Python keeps text that it failed to write in its buffer, so flushing fails again. Without a
    buffer (PYTHONUNBUFFERED), and of a text larger than that, nothing is kept: then ask whether the
    output is a file on a full disk, or a device that takes not even nothing.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    with contextlib.suppress(OSError, ValueError, AttributeError):  # Windows, or not a file
        output = sys.stdout.fileno()
        if stat.S_ISCHR(os.fstat(output).st_mode):
            try:
                os.write(output, b"")
            except OSError:
                return True
        return stat.S_ISREG(os.fstat(output).st_mode) and os.fstatvfs(output).f_bavail == 0
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


def is_first_rank():
    """Whether this is the first rank, or a process without torchrun (which sets MASTER_PORT)."""
    return "MASTER_PORT" not in os.environ or os.environ.get("RANK", "0") == "0"


def warn(message, on_every_rank=False):
    """Print a message to standard error, by default on the first rank only."""
    if on_every_rank or is_first_rank():
        with contextlib.suppress(OSError):  # the terminal was closed
            print(escaped(message), file=sys.stderr, flush=True)


@contextlib.contextmanager
def saying_late(message, seconds=1.0):
    """Context manager: print a message to standard error if what it encloses takes long."""
    timer = threading.Timer(seconds, warn, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def escaped(text):
    """Make text safe for a terminal: UNSAFE characters become escapes such as \\x1b or \\u202e."""
    return UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)


def quoted(text):
    """Return text as a Python string literal in double quotes, with printable characters only."""
    characters = []
    for c in text:
        if c == '"':
            characters.append('\\"')
        elif c.isprintable() and c != "\\":
            characters.append(c)
        else:
            characters.append(c.encode("unicode_escape").decode())
    return f'"{"".join(characters)}"'


def progress(what, unit, total=None, disable=False):
    """Return a tqdm bar, which appears only after a second.

    If standard error is not a terminal, the bar is written every ten seconds.
    """
    options = dict(leave=False, delay=1, mininterval=0.1 if sys.stderr.isatty() else 10)
    return bar(desc=what, unit=unit, total=total, disable=disable, **options)


def bar(*iterable, **options):
    """Return tqdm(...), or a bar that shows nothing if tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return NoBar(*iterable)
    return tqdm(*iterable, file=Quiet(sys.stderr), **options)


class Quiet:
    """A stream whose write errors are ignored: a progress bar must never make the work fail."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        """Write text, ignoring errors."""
        with contextlib.suppress(OSError):
            self.stream.write(text)

    def flush(self):
        """Flush the stream, ignoring errors."""
        with contextlib.suppress(OSError):
            self.stream.flush()


class NoBar:
    """Replaces a tqdm bar and shows nothing; has the methods that the programs use."""

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
