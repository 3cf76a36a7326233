"""Progress bars of tqdm, on standard error."""

import contextlib
import os
import sys

from tqdm import tqdm

from nanomdlm.support.cli.terminal import warn


class Lines:
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
    options = dict(leave=False, delay=1) | options
    if width(sys.stderr):
        return tqdm(iterable, dynamic_ncols=True, **options)
    options |= dict(file=Lines(), mininterval=10, miniters=(options.get("total") or 0) / 1000)
    return tqdm(iterable, **options)
