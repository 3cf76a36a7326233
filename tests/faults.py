"""Runs of mdlm.py with faults, for test_reliability.py.

As a program without $FAULT_SCRIPT: a nursery. It imports torch once and forks a run for every
request that it reads, one JSON object a line. With $FAULT_SCRIPT: one rank under torchrun.
Either way a fault "name:argument:..." strikes at a step of the run.
"""

import ctypes
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import distributed

import mdlm
from nanomdlm.support.cli import devices, entry
from nanomdlm.support.run import checkpoint, muon, optimizers, session
from nanomdlm.support.run import folder as run_folder
from studies import held


def rank():
    return int(os.environ.get("RANK", 0))


def before_step(at, strike):
    """Call strike() when the run makes the first batch of step number `at` (steps count from 0)."""
    draw_batch = mdlm.draw_batch
    done = []

    def hooked(run, step, *more):
        if step == int(at) and not done:
            done.append(step)
            strike()
        return draw_batch(run, step, *more)

    mdlm.draw_batch = hooked


def interrupt(at):
    """A real Ctrl-C while step `at` is computed."""
    before_step(at, lambda: os.kill(os.getpid(), signal.SIGINT))


def hangup(at, ignored=""):
    """The terminal is closed while step `at` is computed; ignored: the run was begun by nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    def strike():
        if not ignored:  # nohup gave the run a file for its output
            read, write = os.pipe()
            os.close(read)
            os.dup2(write, 1)
            os.dup2(write, 2)
        os.kill(os.getpid(), signal.SIGHUP)

    before_step(at, strike)


def sleep(at, seconds):
    before_step(at, lambda: time.sleep(float(seconds)))


def raises(at):
    """A mistake in the program, not of its user."""

    def strike():
        raise ValueError("a mistake in the program")

    before_step(at, strike)


def slow_start(seconds):
    """The run sleeps when its data are nearly complete."""
    prepare = session.prepare

    def hooked(*args):
        prepare(*args)
        for _ in range(20 * int(seconds)):  # a signal right before a sleep does not end it
            time.sleep(0.05)

    session.prepare = hooked


def die_once(at, which, marker):
    """The power of one rank fails, once."""

    def strike():
        if rank() == int(which) and not os.path.exists(marker):
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    before_step(at, strike)


def slow_disk(seconds):
    """Each fsync takes this long: a kill at a random moment is then likely during a save."""
    fsync = os.fsync

    def slow(fd):
        time.sleep(float(seconds))
        fsync(fd)

    os.fsync = slow


def no_space(at, size, which=""):
    """No file can grow beyond `size` bytes any more, on all ranks or on one."""
    limit = (int(size), int(size))
    if which in ("", str(rank())):
        before_step(at, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))


def read_only(at, folder):
    """The folder becomes read-only, for root too: this process loses its capabilities."""
    if os.getuid() == 0:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        none = (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None).capset(header, none) == 0
    before_step(at, lambda: os.chmod(folder, 0o555))


def deleted(at, folder, which=""):
    """The folder vanishes, by one rank if there are several."""
    if which in ("", str(rank())):
        before_step(at, lambda: shutil.rmtree(folder))


def digest(run):
    """Of the weights, averages and moments of a run."""
    h = hashlib.sha256()
    for t in [*run.model.parameters(), *run.averaged.parameters()]:
        h.update(t.detach().numpy().tobytes())
    for optimizer in run.optimizers:
        for slots in optimizer.state_dict()["state"].values():
            for t in slots.values():
                h.update(t.numpy().tobytes())
    return h.hexdigest()


def not_finite(at, what, report, late=""):
    """On rank 1 the loss (what=nan) or only the gradient (what=inf) of a step is not finite.

    late: losses are read as from a GPU, which Python does not wait for. Every rank writes to
    report.RANK its digests: before each update, and at the end.
    """
    forward = mdlm.Model.forward
    clip = optimizers.clip_gradients
    make_run = mdlm.make_run
    armed = []
    digests = []
    runs = []

    def broken_forward(self, view, *rest):
        out = forward(self, view, *rest)
        if armed and rest and rank() == 1:
            if what == "nan":
                return out * math.nan
            out.register_hook(lambda g: g * math.inf)
        return out

    def watched_run(*args):
        runs.append(make_run(*args))
        return runs[0]

    def watched_clip(*args):
        digests.append(digest(runs[0]))
        return clip(*args)

    def write():
        Path(f"{report}.{rank()}").write_text(json.dumps([*digests, digest(runs[0])]))

    if late:
        devices.is_async = optimizers.is_async = lambda device: True
        mdlm.devices.to_device = lambda x, device: x  # there is no device to copy to
    mdlm.Model.forward = broken_forward
    mdlm.make_run = watched_run
    optimizers.clip_gradients = watched_clip
    before_step(at, lambda: armed.append(1))
    return write


def die_while_saving(at, which):
    """The power of one rank fails when it has written its part of the checkpoint of step `at`."""
    check_finite = session.check_finite

    def hooked(run, tensors):
        fsync = os.fsync

        def strike(fd):
            fsync(fd)
            os.kill(os.getpid(), signal.SIGKILL)

        if rank() == int(which) and run.step == int(at):
            os.fsync = strike
        check_finite(run, tensors)

    session.check_finite = hooked


def muon_in_float32(silent=""):
    """No fault: matrix products without the rounding that makes losses differ between ranks.

    silent: without samples, which take most of the time of four ranks on two cores.
    """
    muon.pick_dtype = lambda *name: torch.float32
    if silent:
        mdlm.generate = lambda model, x, *rest: x


def measure(report, exactly=""):
    """No fault: write to report.RANK what this rank holds and sends, in bytes."""
    make_run = mdlm.make_run
    clip = optimizers.clip_gradients
    draw_batch = mdlm.draw_batch
    all_to_all = distributed.all_to_all_single
    figures = {"sent": 0, "reduced too early": 0}
    runs = []

    if exactly:  # what is freed goes back to the system at once, which is slow
        ctypes.CDLL(None).mallopt(-3, 1 << 16)

    def watched_run(*args):
        held.peak()
        before = held.peak()
        runs.append(make_run(*args))
        figures["making"] = held.peak() - before
        return runs[0]

    def watched_draw(*args):
        held.peak()
        figures["before"] = held.peak()
        early = held.bytes_held(runs[0])["gradients"]  # after a micro-batch that was not the last
        figures["reduced too early"] += early
        return draw_batch(*args)

    def watched_clip(*args):
        figures["gradients"] = held.bytes_held(runs[0])["gradients"]
        figures["step"] = held.peak() - figures["before"]
        return clip(*args)

    def watched_exchange(got, sent, sizes, splits, group):
        own = splits[group.rank()]
        figures["sent"] += (sum(splits) - own) * sent.itemsize
        return all_to_all(got, sent, sizes, splits, group)

    def write():
        run = runs[0]
        kept = held.bytes_held(run)
        figures.update({kind: kept[kind] for kind in ("weights", "average", "moments", "frozen")})
        figures["steps"] = run.step
        figures["parameters"] = sum(p.numel() for p in run.model.parameters())
        figures["matrices"] = sum(p.numel() for p in run.optimizers[0].param_groups[0]["params"])
        Path(f"{report}.{rank()}").write_text(json.dumps(figures))

    mdlm.generate = lambda model, x, *rest: x  # samples would take most of the time
    mdlm.make_run = watched_run
    mdlm.draw_batch = watched_draw
    optimizers.clip_gradients = watched_clip
    distributed.all_to_all_single = watched_exchange
    return write


FAULTS = (
    *(interrupt, hangup, sleep, raises, slow_start, die_once, slow_disk),
    *(no_space, read_only, deleted, not_finite, die_while_saving, muon_in_float32, measure),
)


def train(argv, fault=""):
    """mdlm.py with these flags and this fault; its exit code."""
    sys.argv[0] = "mdlm.py"
    name, *rest = fault.split(":")
    afterwards = {f.__name__: f for f in FAULTS}[name](*rest) if name else None

    def main(argv):
        return mdlm.main(argv)

    code = entry.run(main, argv, run_folder.release)
    if afterwards:
        afterwards()
    return code


def rank_of_launch(argv, fault):
    code = train(argv, fault)
    if code:  # an agent restarts what fails
        sys.exit(code)


def torchrun(argv, fault, n, restarts):
    """What `torchrun --standalone` does; but its agent forks the ranks, which import nothing."""
    launcher = import_module("torch.distributed.launcher.api")
    config = launcher.LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    launcher.elastic_launch(config, rank_of_launch)(argv, fault)
    return 0


ACTIONS = ("open", "fsync", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod")


def save_and_die(out_dir, step, content, at):
    """Write a checkpoint; SIGKILL comes before the `at`-th action on the disk."""
    left = [int(at)]
    fsync = os.fsync

    def count(event, args):
        if event in ACTIONS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(fd):
        count("fsync", ())
        fsync(fd)

    sys.addaudithook(count)
    os.fsync = counted
    contents = {
        name: content.encode()
        for name in (*checkpoint.MODEL_FILES, "state.json", "state.safetensors")
    }
    checkpoint.write_checkpoint(out_dir, f"step-{step}", contents)
    return 0


def child(request):
    os.setsid()
    for fd, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), fd)
    os.environ.update(request["env"])
    try:
        code = globals()[request["call"]](*request["args"])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def nursery():
    torch.set_num_threads(1)
    # What a run imports when it needs it: the optimizers' compiler and the last picture.
    # And what --shard needs.
    for name in ("matplotlib.pyplot", "torch._dynamo", "torch.distributed.checkpoint"):
        import_module(name)
    import_module("torch.distributed.fsdp")

    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "call" in request:
            pid = os.fork()
            if pid == 0:
                child(request)
            print(pid, flush=True)
        else:  # the exit code as subprocess gives it, or null
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)


if __name__ == "__main__":
    if "FAULT_SCRIPT" in os.environ:
        sys.exit(train(sys.argv[1:], os.environ["FAULT_SCRIPT"]))
    nursery()
