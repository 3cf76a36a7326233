"""One run at a time in a process, for callers of mdlm.main in Python."""

import contextlib
import signal
import sys
import threading

import torch

from support.errors import UserError
from support.signals import ENDING, is_main_thread, signals_wait
from support.training import checkpoint

TRAINING = threading.Lock()  # held by the run: the state below belongs to the process


@contextlib.contextmanager
def of_a_run():
    """Context manager: one run in this process, whose signal handlers are put back at its end.

    The run's folder is unlocked, and removed if it is empty. Raises UserError if another run
    trains.
    """
    if not TRAINING.acquire(blocking=False):
        fix = "wait for its end, or start another process"
        raise UserError(f"another thread of this process is training; {fix}")
    if "torch._dynamo" in sys.modules:  # else shapes of earlier runs would make this one's dynamic
        torch.compiler.reset()
    try:
        with handlers_kept():
            try:
                yield
            finally:
                with signals_wait():
                    checkpoint.release()
    finally:
        TRAINING.release()


@contextlib.contextmanager
def handlers_kept():
    """Context manager: restore the handlers of signals that end a program (main thread only)."""
    before = {}
    if is_main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: a handler that was not installed by Python
                signal.signal(number, handler)
