"""Devices, random generators, ranks and signals: where and how a run computes."""

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from support.cli import RANKS, RankError, SharedError, UserError, is_first_rank


def seed(*key):
    """A number for a key such as ("levels", seed, step): the same on all ranks and on resume."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key):
    return torch.Generator().manual_seed(seed(*key))


def seed_device(device, *key):
    """Seed the device's own generator, for dropout; torch.manual_seed seeds all devices."""
    source = torch.default_generator if device.type == "cpu" else torch.get_device_module(device)
    source.manual_seed(seed(*key))


def pick_device(name):
    """A device's name or "auto" -> torch.device; UserError if it does not exist."""
    available = {"cuda": torch.cuda.is_available() and torch.cuda.device_count()}
    available |= {"mps": torch.backends.mps.is_available(), "cpu": 1}
    if name == "auto":
        name = next(kind for kind in available if available[kind])
    with contextlib.suppress(RuntimeError):  # not even the name of a device
        device = torch.device(name)
        if device.type == "cpu" or (device.index or 0) < available.get(device.type, 0):
            return device
    raise UserError(f"--device={name} is not on this machine; use cpu, cuda, cuda:N, mps or auto")


def use_device(name, local_rank, world):
    """The device of this rank, made the current one; ranks of a machine take different GPUs."""
    device = pick_device(name)
    if device.type == "cuda":
        if world > 1:
            device = pick_device(f"cuda:{local_rank}")
        torch.cuda.set_device(device.index or 0)
        torch.set_float32_matmul_precision("high")  # TF32 for what stays in float32
    return device


def default_preset(device):
    """The preset for a device's name or "auto"."""
    return "gpu" if pick_device(device).type == "cuda" else "cpu"


def pick_dtype(name, device):
    """The dtype of a name; for "auto" bfloat16 if the hardware multiplies it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    fast = False
    if device.type == "cpu":
        features = getattr(torch.cpu, "get_capabilities", dict)()
        fast = features.get("amx_bf16") or features.get("avx512_bf16")
    elif device.type == "cuda":  # from Ampere on
        fast = torch.cuda.get_device_capability(device)[0] >= 8
    return torch.bfloat16 if fast else torch.float32


# Dense bfloat16 TFLOP/s by the makers' data sheets.
PEAK_TFLOPS = {"H100": 989, "H200": 989, "B200": 2250, "A100": 312, "L40S": 362, "4090": 165}


def peak_flops(device):
    """The peak FLOP/s of a known GPU in bfloat16, for MFU; None for any other device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((tflops * 1e12 for key, tflops in PEAK_TFLOPS.items() if key in name), None)


def flops_per_token(model):
    """Of forward and backward: 6 a weight, and 12 C T a block with attention."""
    config = model.config
    body = sum(p.numel() for p in model.blocks.parameters())
    objective = model.objective
    rows = objective.positions  # that the network computes for a token
    body *= rows
    # The head, and the last layer's MLP, compute only what is predicted.
    end = objective.predicted * config.n_embd * model.vocab_size
    end -= 8 * config.n_embd**2 * (rows - objective.predicted)
    attending = sum(block.qkv is not None for block in model.blocks)
    return 6 * (body + end) + 12 * attending * config.n_embd * config.block_size


def to_tensors(arrays, device):
    """numpy arrays as tensors on the device; on the CPU if they would fill much of a GPU."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if sum(array.nbytes for array in arrays) > 0.15 * free:
            device = torch.device("cpu")
    if device.type != "cpu":  # GPUs cannot index uint16; this copies it in host memory first
        arrays = [x.astype(np.int32) if x.dtype == np.uint16 else x for x in arrays]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they cannot be written
        return [torch.from_numpy(array).to(device) for array in arrays]


def is_async(device):
    """Whether Python runs ahead of the device, and waits when it reads a number."""
    return device.type == "cuda"


def to_device(x, device):
    """x on `device`; the copy to a GPU does not make Python wait."""
    if is_async(device) and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def clip_gradients(params, limit):
    """Scale the gradients down to a total norm of `limit` (0: never); returns the norm before."""
    norm = get_total_norm([p.grad for p in params if p.grad is not None])
    total = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # with --shard
    if limit and (is_async(total.device) or total > limit):  # a GPU's norm is not read
        clip_grads_with_norm_(params, limit, norm)
    return total


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
    folders = [ROOT.glob(f"{name}/*.py") for name in ("support", "variants", "kernels")]
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


def launch_id():
    """Names this torchrun in all its attempts, on all nodes with --rdzv_id; "" without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")  # in a folder of this torchrun
    return file.rpartition("attempt_")[0] if name == "none" else name


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
