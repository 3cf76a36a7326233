"""What a run changes in its process, put back at its end: for callers of mdlm.main in Python."""

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
    """Context manager: one run in this process, which finds it as a command does and restores it.

    Restored: signal handlers, random numbers, threads, gradients, precisions, the current GPU; the
    run's folder is unlocked, and removed if it is empty. Raises UserError if another run trains.
    """
    if not TRAINING.acquire(blocking=False):
        fix = "wait for its end, or start another process"
        raise UserError(f"another thread of this process is training; {fix}")
    if "torch._dynamo" in sys.modules:  # else shapes of earlier runs would make this one's dynamic
        torch.compiler.reset()
    try:
        with handlers_kept(), torch_kept():
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


@contextlib.contextmanager
def autocast_kept():
    """Context manager: without the caller's autocast, which is on again at the end.

    No autocast(enabled=False) around the run: PyTorch keeps what it has cast, also of weights that
    an optimizer has changed since, until the outermost autocast ends. So if the caller is in one,
    nothing is kept.
    """
    kinds = ("cpu", "cuda")
    before = {kind: torch.is_autocast_enabled(kind) for kind in kinds}
    keeps = torch.is_autocast_cache_enabled()
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    if depth > 1:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(keeps)
        for kind, enabled in before.items():
            torch.set_autocast_enabled(kind, enabled)


@contextlib.contextmanager
def torch_kept():
    """Context manager: PyTorch's defaults, with gradients; then the caller's settings again."""
    on_gpu = torch.cuda.is_initialized()
    state = torch.get_rng_state()
    gpu_states = torch.cuda.get_rng_state_all() if on_gpu else None
    gpu = torch.cuda.current_device() if on_gpu else 0
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad(), autocast_kept():
            yield
    finally:
        torch.set_rng_state(state)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        if torch.cuda.is_initialized():
            torch.cuda.set_device(gpu)
        if on_gpu:
            torch.cuda.set_rng_state_all(gpu_states)
