"""Handling of Ctrl-C, SIGTERM and SIGHUP: programs clean up, and a run saves after its step."""

import contextlib
import os
import signal
import threading

from nanomdlm.support.cli.terminal import is_first_rank


class Stopped(BaseException):
    """Raised by a signal that ends the program, so that it cleans up before it exits.

    Like KeyboardInterrupt a BaseException: `except Exception` does not catch it.
    """


def is_main_thread():
    """Whether this is the main thread: Python lets no other one install signal handlers."""
    return threading.current_thread() is threading.main_thread()


def stop(number, frame):
    """Signal handler: raise Stopped."""
    raise Stopped(number)


# Signals that end a program, besides Ctrl-C. Windows has no SIGHUP.
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
# Signals that a queue sends before the end of a job.
WARNING = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


@contextlib.contextmanager
def handlers_kept():
    """Context manager: restore the handlers of signals that end a program (main thread only).

    Yields {number: handler}.
    """
    before = {}
    if is_main_thread():
        numbers = (signal.SIGINT, *ENDING, *WARNING)
        before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield before
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: a handler that was not installed by Python
                signal.signal(number, handler)


@contextlib.contextmanager
def clean_end():
    """Context manager: SIGTERM and SIGHUP raise Stopped, so that temporary files are removed.

    Signals that are ignored (as nohup does) or have a handler already keep it. Under torchrun these
    signals keep ending the process at once: Python runs no handler while ranks wait for each other.
    """
    with handlers_kept() as before:
        for number in ENDING:
            if before.get(number) == signal.SIG_DFL and "MASTER_PORT" not in os.environ:
                signal.signal(number, stop)
        yield


@contextlib.contextmanager
def signals_wait():
    """Context manager: delay signals that end the program, so that they do not interrupt cleanup.

    The first one that arrives is handled at the end.
    """
    waiting = []
    before = {}
    if is_main_thread():
        for number in (signal.SIGINT, *ENDING):
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in waiting[:1]:
            before[number](number, None)


class Interrupt:
    """Signal handler of a run: Ctrl-C, SIGTERM and SIGHUP request a stop after the current step, as
    do SIGUSR1 and SIGUSR2, which queues send before the end of a job.

    `signal` is the number of the signal that arrived, or 0. A second Ctrl-C exits at once. What is
    ignored, as SIGHUP (the terminal was closed) by nohup, stays ignored. In a thread other than the
    main one no handler can be installed: signals then end the program, or do what its handlers do.
    """

    MESSAGE = b"\nstopping after this step; a second Ctrl-C exits at once, without saving\n"

    def __init__(self):
        self.signal = 0
        if not is_main_thread():
            return
        signal.signal(signal.SIGINT, self.ask)
        for number in (*ENDING, *WARNING):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.ask)

    def ask(self, number, frame):
        """The handler: remember the signal, and tell the user."""
        if self.signal and number == signal.SIGINT:
            os._exit(130)
        self.signal = number
        if is_first_rank():
            with contextlib.suppress(OSError):  # the terminal may be closed
                # Not print: the signal may have interrupted print, which cannot be entered twice.
                os.write(2, self.MESSAGE)
