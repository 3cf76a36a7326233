"""Ranks of torchrun: how they meet, compare what they were started with, and agree."""

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from support.errors import RankError, SharedError, UserError
from support.numerics import seed
from support.terminal import is_first_rank

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
CONTROL = None  # gloo group for control messages, which never wait for a GPU
STORE = None  # where the ranks found each other


def read_ranks():
    """(rank, number of ranks, rank on this machine) of the environment; UserError for nonsense."""
    found = {name: os.environ[name] for name in RANKS if name in os.environ}
    if not found:
        return 0, 1, 0
    numbers = [int(found[name]) for name in RANKS[:3] if found.get(name, "").isdecimal()]
    if len(found) == len(RANKS) and len(numbers) == 3 and numbers[0] < numbers[1]:
        return tuple(numbers)
    shown = " ".join(f"{name}={value}" for name, value in found.items())
    fix = "start with torchrun, which sets all five, or unset them"
    raise RankError(f"the environment says {shown}, of {', '.join(RANKS)}; {fix}")


MEETING = timedelta(minutes=5)  # ranks may start one after another, but not hours apart
ROOT = Path(__file__).parent.parent


def join_ranks(given):
    """(rank, number of ranks, rank on this machine); under torchrun the ranks meet here.

    given: the flags, a dict. UserError on all ranks if they were not started alike.
    """
    global CONTROL, STORE
    rank, world, local_rank = read_ranks()
    if world > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun keeps one store for all attempts. Without a prefix the ranks of a second attempt
        # may read the addresses of the first one's, which are dead, and hang. With a new store for
        # each (docs/scale.md) nodes count their attempts on their own.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
            attempt = "any"
        where = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
        fix = "check that address, and that all ranks run"
        try:
            store = next(distributed.rendezvous("env://", timeout=MEETING))[0]
        except (RuntimeError, ValueError) as e:
            raise UserError(f"the ranks do not meet at {where} ({e}); {fix}") from None
        STORE = distributed.PrefixStore(attempt, store)
        try:
            if world > 1:
                check_alike(STORE, rank, world, given)
        except RuntimeError as e:  # no answer within MEETING
            why = str(e).splitlines()[0]
            raise RankError(f"the ranks do not all meet at {where} ({why}); {fix}") from None
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, store=STORE, rank=rank, world_size=world)
        wait = timedelta(hours=12)  # while the first rank prepares data or joins a checkpoint
        CONTROL = distributed.new_group(backend="gloo", timeout=wait)
        atexit.register(distributed.destroy_process_group)  # else its threads abort a failed run
    return rank, world, local_rank


def how_started(world, given):
    """What all ranks must have alike, name -> text. Each may have a --device of its own."""
    found = {f"--{name}": str(value) for name, value in given.items() if name != "device"}
    digest = hashlib.sha256()
    folders = [ROOT.glob(f"{name}/**/*.py") for name in ("support", "variants", "kernels")]
    for path in sorted([ROOT / "mdlm.py", *itertools.chain(*folders)]):
        digest.update(path.read_bytes())
    found |= {"WORLD_SIZE": str(world), "torch": torch.__version__}
    return found | {"the program (checksum)": digest.hexdigest()[:12]}


def difference(first, rank, theirs):
    """How rank `rank` was started in another way than the first one, in words; "" if in the same.

    first, theirs: what how_started says.
    """
    for name in sorted(first.keys() | theirs.keys()):
        one, other = (started.get(name, "none") for started in (first, theirs))
        if one != other:
            why = f"rank {rank} has {name} {other}, the first rank {one}"
            return f"the ranks were not started alike: {why}; start all with the same flags"
    return ""


def check_alike(store, rank, world, given):
    """Raise RankError on every rank if one was started with other flags, or another program.

    Else they would wait for each other for hours, as each does something else. The first rank
    compares all; each other one compares itself too, as with another WORLD_SIZE the first one may
    not know of it.
    """
    mine = how_started(world, given)
    store.set(f"started {rank}", json.dumps(mine))
    if rank:
        store.wait(["started 0"], MEETING)
        wrong = difference(json.loads(store.get("started 0")), rank, mine)
        if not wrong:
            store.wait(["verdict"], MEETING)
            wrong = store.get("verdict").decode()
        store.set(f"read {rank}", "")
    else:
        others = range(1, world)
        store.wait([f"started {other}" for other in others], MEETING)
        found = (json.loads(store.get(f"started {other}")) for other in others)
        found = (difference(mine, other, theirs) for other, theirs in zip(others, found))
        wrong = next(filter(None, found), "")
        store.set("verdict", wrong)
        if wrong:  # the store ends with this rank: until then the others may read it
            with contextlib.suppress(RuntimeError):
                store.wait([f"read {other}" for other in others], timedelta(seconds=10))
    if wrong:
        raise RankError(wrong)


def leave_ranks():
    """Wait for all ranks, then part: in the store, as leaving a collective resets connections."""
    if CONTROL:
        for word in ("ready", "leaving"):
            STORE.set(f"{word} {distributed.get_rank()}", "")
            if word == "ready" or is_first_rank():  # the first rank, which keeps the store, is last
                STORE.wait([f"{word} {rank}" for rank in range(distributed.get_world_size())])
        distributed.destroy_process_group()
        atexit.unregister(distributed.destroy_process_group)


def share(items):
    """Every n-th of the items, for the n ranks; all get equally many, if need be twice."""
    if not CONTROL:
        return items
    world = distributed.get_world_size()
    each = -(-len(items) // world)
    return [items[(distributed.get_rank() + k * world) % len(items)] for k in range(each)]


def all_reduce(values, how="SUM"):
    """The sum (or MAX, MIN) over ranks of a CPU tensor."""
    if CONTROL:
        distributed.all_reduce(values, getattr(distributed.ReduceOp, how), CONTROL)
    return values


def is_late(deadline):
    """Whether any rank is past the deadline (time.monotonic()), or was asked to stop within
    stopped_by; asked by all of them."""
    late = time.monotonic() >= deadline or bool(STOP and STOP.signal)
    return all_reduce(torch.tensor(float(late)), "MAX").item() > 0


STOP = None  # the Interrupt of stopped_by


@contextlib.contextmanager
def stopped_by(interrupt):
    """Within, it is late for all ranks (is_late) when one of them gets a signal."""
    global STOP
    STOP = interrupt
    try:
        yield
    finally:
        STOP = None


@contextlib.contextmanager
def all_ranks():
    """Context manager: what each rank does within; a UserError of one is raised on all of them.

    The first rank says what the first of those that failed would say.
    """
    error = None
    try:
        yield
    except UserError as e:
        error = e
    raise_together(error)


def raise_together(error):
    """Raise the UserError of any rank, or return if all have none (None)."""
    rank, world = 0, 1
    if CONTROL:
        rank, world = distributed.get_rank(), distributed.get_world_size()
    failed = int(all_reduce(torch.tensor(rank if error else world), "MIN"))
    if failed == world:
        return
    said = [str(error)]
    if CONTROL:
        distributed.broadcast_object_list(said, failed, CONTROL)
    if error and (rank == 0 or isinstance(error, RankError)):
        raise error
    if error and failed:
        raise RankError(str(error)) from error
    raise SharedError(f"rank {failed}: {said[0]}" if failed else said[0])


def on_all_ranks(do):
    """do() of each rank, returned there; a UserError of one is raised on all of them."""
    with all_ranks():
        return do()


def check_equal(value, sentence):
    """Raise SharedError with this sentence on all ranks unless `value` is the same on them."""
    mine = torch.tensor(float(seed(value) % (1 << 40)), dtype=torch.float64)
    low, high = (all_reduce(mine.clone(), how) for how in ("MIN", "MAX"))
    if low != high:
        raise SharedError(sentence)


def on_first_rank(do):
    """Call do() on the first rank while the others wait; its UserError is raised on all of them."""
    on_all_ranks(lambda: is_first_rank() and do())


def ask_first_rank(question, *args):
    """question(*args) of the first rank, on all of them; its UserError is raised on all of them."""
    answer = [None]

    def ask():
        answer[0] = question(*args)

    on_first_rank(ask)
    if CONTROL:
        distributed.broadcast_object_list(answer, 0, CONTROL)
    return answer[0]
