"""Ranks of torchrun: how they connect, check that all were started alike, and share errors."""

import atexit
import hashlib
import math
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from nanomdlm.support.cli.terminal import is_first_rank
from nanomdlm.support.errors import RankError, SharedError, UserError

CONTROL = None  # process group for control messages; gloo, so that they never wait for a GPU
STORE = None  # the key-value store through which the ranks connected
STOP = None  # a signals.Interrupt: a signal to any rank then makes is_late true on all ranks


# ---- Starting and leaving
CONNECT_LIMIT = timedelta(minutes=5)  # within which all ranks must start
ROOT = Path(__file__).parents[2]


def join_ranks(given):
    """Connect the ranks under torchrun; return (rank, number of ranks, rank on this machine).

    given: the flags of the command line, a dict. Raises UserError on all ranks if they were not
    started alike.
    """
    if "RANK" not in os.environ:
        return 0, 1, 0
    rank, world, local_rank = (int(os.environ[x]) for x in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        connect(rank, world)
        check_alike(start_settings(given))
    return rank, world, local_rank


def connect(rank, world):
    """Make the process group of the ranks."""
    global CONTROL, STORE
    # torchrun restarts failed ranks and keeps one store for all attempts. Without a prefix the
    # ranks of a second attempt could read addresses of the first, which are dead, and hang.
    # If each attempt has a new store (docs/scale.md), nodes count attempts independently: then
    # the prefix must not depend on the number.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
        attempt = "any"
    store = next(distributed.rendezvous("env://", timeout=CONNECT_LIMIT))[0]
    STORE = distributed.PrefixStore(attempt, store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, store=STORE, rank=rank, world_size=world)
    # Long enough for the first rank to prepare data or to join the files of a checkpoint.
    CONTROL = distributed.new_group(backend="gloo", timeout=timedelta(hours=12))
    # Without this, threads of the group abort a process that exits with an error.
    atexit.register(distributed.destroy_process_group)


def start_settings(given):
    """Return what must be the same on all ranks, as {name: value}: flags, versions, the source.

    --device is not included: each rank may have its own.
    """
    started = {f"--{name}": str(value) for name, value in given.items() if name != "device"}
    digest = hashlib.sha256()
    folders = [ROOT.glob(f"{name}/**/*.py") for name in ("support", "variants", "kernels")]
    for path in sorted([ROOT / "mdlm.py", *(path for folder in folders for path in folder)]):
        digest.update(path.read_bytes())
    return started | {"torch": torch.__version__, "program's checksum": digest.hexdigest()[:12]}


def leave_ranks():
    """Wait for all ranks, then disconnect.

    The ranks wait through the store: a rank that leaves during a collective operation resets the
    connections of the others.
    """
    numbers = range(distributed.get_world_size())
    STORE.set(f"ready {distributed.get_rank()}", "")
    STORE.wait([f"ready {rank}" for rank in numbers])
    STORE.set(f"leaving {distributed.get_rank()}", "")
    if is_first_rank():  # its process holds the store, so it leaves last
        STORE.wait([f"leaving {rank}" for rank in numbers])
    distributed.destroy_process_group()
    atexit.unregister(distributed.destroy_process_group)


# ---- Splitting work, and common decisions
def split_work(items):
    """Return this rank's items: every n-th of them, for n ranks.

    All ranks get the same number. If the items do not divide evenly, some are given to two ranks.
    """
    if not CONTROL:
        return items
    world = distributed.get_world_size()
    each = -(-len(items) // world)
    return [items[(distributed.get_rank() + k * world) % len(items)] for k in range(each)]


def all_reduce(values, operation="SUM"):
    """Reduce a CPU tensor in place over all ranks by SUM, MAX or MIN, and return it."""
    if CONTROL:
        distributed.all_reduce(values, getattr(distributed.ReduceOp, operation), CONTROL)
    return values


def is_late(deadline):
    """Whether any rank is past a deadline (time.monotonic()), or STOP got a signal there.

    All ranks must call this, and all get the same answer.
    """
    late = time.monotonic() >= deadline or bool(STOP and STOP.signal)
    return all_reduce(torch.tensor(float(late)), "MAX").item() > 0


def was_stopped():
    """Whether STOP got a signal on any rank."""
    return is_late(math.inf)


# ---- Errors of one rank, raised on all
def gather(value):
    """Return the values of all ranks, in a list."""
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value, CONTROL)
    return values


def together(do):
    """Call do() on each rank and return its result; a UserError of one is raised on all ranks.

    This is a vote. Inside, no other one may be taken, nor may ranks exchange anything else: a rank
    that has failed would not take part. The first rank prints the message of the first that failed.
    """
    if not CONTROL:
        return do()
    result = error = None
    try:
        result = do()
    except UserError as e:
        error = e
    messages = gather(error and str(error))
    failed = next((rank for rank, message in enumerate(messages) if message is not None), None)
    if failed is None:
        return result
    if error and (is_first_rank() or isinstance(error, RankError)):
        raise error
    if error and failed:
        raise RankError(str(error)) from error
    raise SharedError(f"rank {failed}: {messages[failed]}" if failed else messages[failed])


def first(do):
    """Call do() on the first rank while the others wait; all get its result, or its UserError."""
    if not CONTROL:
        return do()
    result = [together(lambda: do() if is_first_rank() else None)]
    distributed.broadcast_object_list(result, 0, CONTROL)
    return result[0]


def check_alike(mine):
    """Raise RankError on all ranks if one differs from the first: such ranks would hang.

    mine: what must be the same on all of them, {name: value}
    """
    if not CONTROL:
        return
    everyone = gather(mine)
    names = sorted({name for theirs in everyone for name in theirs})
    for rank, theirs in enumerate(everyone):
        for name in names:
            here, there = everyone[0].get(name, "none"), theirs.get(name, "none")
            if there != here:
                raise RankError(f"rank {rank} has {name} {there}, the first rank {here}")
