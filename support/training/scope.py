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
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):  # it keeps copies of old weights
        raise UserError("a run cannot begin within torch.autocast: call mdlm.main outside of it")
    if not TRAINING.acquire(blocking=False):
        fix = "wait for its end, or start another process"
        raise UserError(f"another thread of this process is training; {fix}")
    if "torch._dynamo" in sys.modules:  # else shapes of earlier runs would make this one's dynamic
        torch.compiler.reset()
    try:
        # Whatever the caller's mode or default dtype is, weights are float32 and get gradients.
        with handlers_kept(), float32(), torch.inference_mode(False), torch.enable_grad():
            try:
                yield
            finally:
                with signals_wait():
                    checkpoint.release()
    finally:
        TRAINING.release()


@contextlib.contextmanager
def float32():
    """Context manager: the default dtype is float32, then the caller's again."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
