"""Ranks of torchrun: how they connect, check that all were started alike, and share errors."""

import atexit
import contextlib
import hashlib
import itertools
import json
import math
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from nanomdlm.support.cli.terminal import is_first_rank
from nanomdlm.support.errors import RankError, SharedError, UserError
from nanomdlm.support.numerics import seed

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
CONTROL = None  # process group for control messages; gloo, so that they never wait for a GPU
STORE = None  # the key-value store through which the ranks connected


# ---- Starting and leaving
def read_ranks():
    """Return (rank, number of ranks, rank on this machine) from the environment.

    Raises RankError if the variables of torchrun are incomplete or contradict each other.
    """
    variables = {name: os.environ[name] for name in RANKS if name in os.environ}
    if not variables:
        return 0, 1, 0
    numbers = [int(variables[name]) for name in RANKS[:3] if variables.get(name, "").isdecimal()]
    if len(variables) == len(RANKS) and len(numbers) == 3 and numbers[0] < numbers[1]:
        return tuple(numbers)
    shown = " ".join(f"{name}={value}" for name, value in variables.items())
    fix = "start with torchrun, which sets all five, or unset them"
    raise RankError(f"the environment says {shown}, of {', '.join(RANKS)}; {fix}")


CONNECT_LIMIT = timedelta(minutes=5)  # within which all ranks must start
ROOT = Path(__file__).parents[2]


def join_ranks(given):
    """Connect the ranks under torchrun; return (rank, number of ranks, rank on this machine).

    given: the flags of the command line, a dict. Raises UserError on all ranks if they do not
    connect or were not started alike.
    """
    rank, world, local_rank = read_ranks()
    if world > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        connect(rank, world, given)
    return rank, world, local_rank


def connect(rank, world, given):
    """Make the process group of the ranks."""
    global CONTROL, STORE
    # torchrun restarts failed ranks and keeps one store for all attempts. Without a prefix the
    # ranks of a second attempt could read addresses of the first, which are dead, and hang.
    # If each attempt has a new store (docs/scale.md), nodes count attempts independently: then
    # the prefix must not depend on the number.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
        attempt = "any"
    where = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
    fix = "check that address, and that all ranks run"
    try:
        store = next(distributed.rendezvous("env://", timeout=CONNECT_LIMIT))[0]
    except (RuntimeError, ValueError) as e:
        raise UserError(f"the ranks cannot connect at {where} ({e}); {fix}") from None
    STORE = distributed.PrefixStore(attempt, store)
    try:
        if world > 1:
            check_alike(STORE, rank, world, given)
    except RuntimeError as e:  # no answer within CONNECT_LIMIT
        why = str(e).splitlines()[0]
        raise RankError(f"not all ranks have connected at {where} ({why}); {fix}") from None
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, store=STORE, rank=rank, world_size=world)
    # Long enough for the first rank to prepare data or to join the files of a checkpoint.
    patience = timedelta(hours=12)
    CONTROL = distributed.new_group(backend="gloo", timeout=patience)
    # Without this, threads of the group abort a process that exits with an error.
    atexit.register(distributed.destroy_process_group)


def start_settings(world, given):
    """Return what must be the same on all ranks, as {name: text}: flags, versions, the source.

    --device is not included: each rank may have its own.
    """
    started = {f"--{name}": str(value) for name, value in given.items() if name != "device"}
    digest = hashlib.sha256()
    folders = [ROOT.glob(f"{name}/**/*.py") for name in ("support", "variants", "kernels")]
    for path in sorted([ROOT / "mdlm.py", *itertools.chain(*folders)]):
        digest.update(path.read_bytes())
    started |= {"WORLD_SIZE": str(world), "torch": torch.__version__}
    return started | {"the program (checksum)": digest.hexdigest()[:12]}


def difference(first, rank, theirs):
    """Return a sentence on the first difference between a rank and the first rank; "" if none.

    first, theirs: start_settings of the first rank and of rank `rank`
    """
    for name in sorted(first.keys() | theirs.keys()):
        expected = first.get(name, "none")
        actual = theirs.get(name, "none")
        if expected != actual:
            why = f"rank {rank} has {name} {actual}, the first rank {expected}"
            return f"the ranks were not started alike: {why}; start all with the same flags"
    return ""


def check_alike(store, rank, world, given):
    """Raise RankError on every rank if one was started with different flags or another program.

    Such ranks would do different things and wait for each other for hours.

    The first rank compares all ranks that it knows. Each other rank also compares itself, because
    with a different WORLD_SIZE the first one may not know of it.
    """
    mine = start_settings(world, given)
    store.set(f"started {rank}", json.dumps(mine))
    if rank:
        store.wait(["started 0"], CONNECT_LIMIT)
        problem = difference(json.loads(store.get("started 0")), rank, mine)
        if not problem:
            store.wait(["verdict"], CONNECT_LIMIT)
            problem = store.get("verdict").decode()
        store.set(f"read {rank}", "")
    else:
        others = range(1, world)
        store.wait([f"started {other}" for other in others], CONNECT_LIMIT)
        problem = ""
        for other in others:
            theirs = json.loads(store.get(f"started {other}"))
            problem = problem or difference(mine, other, theirs)
        store.set("verdict", problem)
        if problem:  # the store ends with this process: give the others time to read it
            with contextlib.suppress(RuntimeError):
                store.wait([f"read {other}" for other in others], timedelta(seconds=10))
    if problem:
        raise RankError(problem)


def leave_ranks():
    """Wait for all ranks, then disconnect.

    The ranks wait through the store: a rank that leaves during a collective operation resets the
    connections of the others.
    """
    if CONTROL:
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
    """Whether any rank is past a deadline (time.monotonic()) or got a signal inside stopped_by.

    All ranks must call this, and all get the same answer.
    """
    late = time.monotonic() >= deadline or bool(STOP and STOP.signal)
    return all_reduce(torch.tensor(float(late)), "MAX").item() > 0


def was_stopped():
    """Whether any rank got a signal inside stopped_by."""
    return is_late(math.inf)


STOP = None  # the Interrupt of stopped_by


@contextlib.contextmanager
def stopped_by(interrupt):
    """Context manager: a signal to any rank makes is_late true on all ranks."""
    global STOP
    STOP = interrupt
    try:
        yield
    finally:
        STOP = None


# ---- Errors of one rank, raised on all
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
    raise_together(error)
    return result


def first(do):
    """Call do() on the first rank while the others wait; all get its result, or its UserError."""
    result = [together(lambda: do() if is_first_rank() else None)]
    if CONTROL:
        distributed.broadcast_object_list(result, 0, CONTROL)
    return result[0]


def raise_together(error):
    """Raise the UserError of any rank on all ranks; return if no rank has one.

    error: this rank's error, or None
    """
    rank = distributed.get_rank()
    world = distributed.get_world_size()
    failed = int(all_reduce(torch.tensor(rank if error else world), "MIN"))
    if failed == world:
        return
    message = [str(error)]
    distributed.broadcast_object_list(message, failed, CONTROL)
    if error and (rank == 0 or isinstance(error, RankError)):
        raise error
    if error and failed:
        raise RankError(str(error)) from error
    raise SharedError(f"rank {failed}: {message[0]}" if failed else message[0])


def check_equal(value, sentence):
    """Raise SharedError with this sentence on all ranks unless they all have the same `value`."""
    if not CONTROL:
        return
    # float64 holds integers below 2^53 exactly.
    mine = torch.tensor(float(seed(value) % (1 << 40)), dtype=torch.float64)
    low = all_reduce(mine.clone(), "MIN")
    high = all_reduce(mine.clone(), "MAX")
    if low != high:
        raise SharedError(sentence)
