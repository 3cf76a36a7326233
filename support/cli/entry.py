"""How a program starts, and how errors end it: with one sentence and an exit code."""

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from nanomdlm.support.cli import environment
from nanomdlm.support.cli.signals import Stopped, clean_end
from nanomdlm.support.cli.terminal import (
    STDOUT,
    is_first_rank,
    make_streams_usable,
    silence_stdout,
    stdout_fails,
    warn,
)
from nanomdlm.support.errors import RankError, SharedError, UserError

LONGEST = 200  # characters of a path that are shown
FIRST_RANK_SPEAKS = 2.0  # seconds that another rank waits before it says its own mistake
# Parts of what Python, numpy and PyTorch's allocators say of a memory that is full.
FULL = ("out of memory", "can't allocate memory", "bad_alloc", "not enough memory")
FULL += ("Unable to allocate",)


def start(name):
    """The first call of a program: returns time.monotonic(), from before the slow imports.

    If `name` is "__main__", it prepares the process too. If a package that every program needs is
    missing, it ends with one sentence and exit code 2. Ctrl-C during the imports ends it without a
    traceback. Waiting threads spin only briefly, because otherwise two programs on one machine slow
    each other down (results/threads.md). Freed memory is kept (results/cpu.md).
    """
    if name == "__main__":
        if problem := environment.problem():
            warn(f"{Path(sys.argv[0]).name}: {problem}")
            sys.exit(2)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        keep_memory()
    return time.monotonic()


def keep_memory():
    """Let glibc keep freed memory: new pages for every tensor would take a fifth of a CPU step."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-4, 0)  # M_MMAP_MAX: take no tensor from the system on its own
            mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back


@contextlib.contextmanager
def program(cleanup=None):
    """Context manager around a program: errors that a user can fix print a sentence, no traceback.

    Yields an object with `code`, the exit code: the program sets it, and so do errors. cleanup() is
    always called at the end.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    make_streams_usable()
    end = SimpleNamespace(code=0)
    with clean_end():
        try:
            yield end
            flush_streams(end.code)  # here, where a full disk is caught
        except (Exception, KeyboardInterrupt, Stopped) as e:
            end.code = report(e)
            if end.code is None:
                raise
        finally:
            if cleanup:
                cleanup()


def flush_streams(code):
    """Flush standard output and error. (If Python did it at exit, an error would give code 120.)

    Raises the OSError of standard output, unless a signal ends the program (code above 128), as
    when its terminal was closed. Errors of standard error are ignored: the work is done.
    """
    try:
        print(end="", flush=True)
    except OSError:
        if code <= 128:
            raise
        silence_stdout()
    try:
        print(end="", file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def run(main, argv, cleanup=None):
    """Run main(argv), then cleanup(); returns the exit code. A UserError is printed and gives 2."""
    with program(cleanup) as end:
        end.code = main(argv)
    return end.code


def report(error):
    """Print in one sentence what ended a program; returns its exit code, None for a bug."""
    name = Path(sys.argv[0]).name
    if isinstance(error, UserError):
        is_shared = isinstance(error, SharedError)
        if not (is_first_rank() or is_shared or isinstance(error, RankError)):
            wait_for_first_rank()
        sentence = str(error).replace("\n", "\\n")
        warn(f"{name}: {sentence}", on_every_rank=not is_shared)
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, Stopped):
        return 128 + error.args[0]
    if isinstance(error, OSError):
        return report_file(error, name)
    if why := explain(error):
        warn(f"{name}: {why}", on_every_rank=True)
        return 2
    return None


def report_file(error, name):
    """Say which file an OSError is about; returns the exit code."""
    if isinstance(error, BrokenPipeError) and not error.filename:
        silence_stdout()  # its reader has gone (| head)
        return 141
    path = error.filename
    if path == STDOUT or (not path and stdout_fails()):
        path = STDOUT
        silence_stdout()
    path = os.fspath(path or f"a file or {STDOUT}")
    if len(path) > LONGEST:
        path = f"{path[:LONGEST]}..."
    why = error.strerror or error
    if error.errno == errno.ENOSPC:  # only writing needs space
        warn(f"{name}: {path} cannot be written ({why}); free some space")
    else:
        warn(f"{name}: {why}: {path}; check that path")
    return 2


def wait_for_first_rank():
    """Wait, so that a mistake of all ranks is printed once: torchrun ends them after the first.

    A rank that still runs after that has its own mistake, and prints it.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(FIRST_RANK_SPEAKS)


def is_out_of_memory(error):
    """Whether an exception means that main memory, or a GPU's, is full."""
    is_known = isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)
    return isinstance(error, MemoryError) or is_known


def explain(error):
    """A sentence for an error of the machine, not of the program; else ""."""
    text = str(error)
    if is_out_of_memory(error):
        why = f" ({text.splitlines()[0]})" if text else ""
        fix = "lower the batch, the length, --num_samples, --windows, or the size of the model"
        return f"out of memory{why}; {fix}"
    words = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
    is_of_ranks = isinstance(error, RuntimeError) and "MASTER_PORT" in os.environ
    if is_of_ranks and any(word in text for word in words):
        fix = "--resume continues from what was saved"
        return f"another rank has stopped, and its own message says why; {fix}"
    return ""
