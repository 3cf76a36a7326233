"""Ctrl-C, SIGTERM and SIGHUP: how they end a program, and how a run stops after its step."""

import _thread
import contextlib
import functools
import os
import signal
import sys
import threading

from support.terminal import is_first_rank


class Stopped(BaseException):
    """A signal asks the program to end; what it has opened is cleaned up on the way."""


CAME = []  # the signals that `stop` has turned into exceptions


def stop(number, frame):
    CAME.append(number)
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)


# Signals that end a program. Ctrl-C raises KeyboardInterrupt, the others raise Stopped.
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def clean_end():
    """Within, SIGTERM and SIGHUP raise Stopped, so that no temporary folder is left behind.

    A signal that is ignored (under nohup) or handled already stays so. Ranks end at once, also
    while they wait for each other, when Python runs no handler.
    """
    before = {}
    CAME.clear()
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    if before.get(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    for number in ENDING:
        if before.get(number) == signal.SIG_DFL and "MASTER_PORT" not in os.environ:
            signal.signal(number, stop)
    unraisable = sys.unraisablehook
    sys.unraisablehook = functools.partial(repeat_signal, unraisable)
    try:
        yield
    finally:
        sys.unraisablehook = unraisable
        for number, handler in before.items():
            if handler is not None:  # of another language
                signal.signal(number, handler)


def repeat_signal(otherwise, unraisable):
    """sys.unraisablehook: a signal that came while Python removed an object comes again, soon.

    There Python ignores what is raised, so that the program would go on. otherwise: another hook,
    for all that is no signal.
    """
    error = unraisable.exc_value
    number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
    if isinstance(error, Stopped):
        number = error.args[0]
    if number is None:
        otherwise(unraisable)
        return
    again = threading.Timer(0.01, send_signal, [number])
    again.daemon = True
    again.start()


def send_signal(number):
    """Send a signal to the main thread, unless the program has ended meanwhile."""
    if not callable(signal.getsignal(number)):
        return
    if hasattr(signal, "pthread_kill"):  # which also ends a call that waits
        signal.pthread_kill(threading.main_thread().ident, number)
    else:
        _thread.interrupt_main(number)


@contextlib.contextmanager
def signals_wait():
    """Within, signals that would end the program wait: a second Ctrl-C interrupts no clean-up."""
    waiting = []
    before = {}
    if threading.current_thread() is threading.main_thread():
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
    """Ctrl-C, SIGTERM and the end of the terminal (SIGHUP) ask for a stop after the step.

    A second Ctrl-C exits at once. Under nohup, which ignores SIGHUP, the run goes on.
    """

    MESSAGE = b"\nstopping after this step; a second Ctrl-C exits at once, without saving\n"

    def __init__(self):
        self.signal = 0
        signal.signal(signal.SIGINT, self.ask)
        signal.signal(signal.SIGTERM, self.ask)
        hangup = getattr(signal, "SIGHUP", None)  # Windows has none
        if hangup and signal.getsignal(hangup) != signal.SIG_IGN:
            signal.signal(hangup, self.ask)

    def ask(self, number, frame):
        if self.signal and number == signal.SIGINT:
            os._exit(130)
        self.signal = number
        if is_first_rank():
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, self.MESSAGE)  # print may be what was interrupted
