"""Runs of mdlm.py that something happens to, for test_reliability.py.

As a program without $FAULT_SCRIPT: a nursery. It imports torch once and forks a run for every request that it
reads, one JSON object a line. With $FAULT_SCRIPT: one rank under torchrun.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import common
import mdlm

RANK = lambda: int(os.environ.get("RANK", 0))


def before_step(at, strike):
    """Call strike() when the run makes the first batch of step number `at` (steps count from 0)."""
    make_batch, done = mdlm.make_batch, []

    def hooked(model, corpus, weight_of_count, step, *more):
        if step == int(at) and not done:
            done.append(step)
            strike()
        return make_batch(model, corpus, weight_of_count, step, *more)

    mdlm.make_batch = hooked


def interrupt(at):
    """A real Ctrl-C while step `at` is computed."""
    before_step(at, lambda: os.kill(os.getpid(), signal.SIGINT))


def sleep(at, seconds):
    before_step(at, lambda: time.sleep(float(seconds)))


def slow_start(seconds):
    """The run sleeps when its data are nearly complete."""
    prepare = mdlm.prepare
    mdlm.prepare = lambda *args: (prepare(*args), time.sleep(float(seconds)))


def die_once(at, rank, marker):
    """The power of one rank fails, once."""

    def strike():
        if RANK() == int(rank) and not os.path.exists(marker):
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    before_step(at, strike)


def slow_disk(seconds):
    """Every fsync takes so long: a kill at a random moment is then likely to be one during a save."""
    fsync = os.fsync
    os.fsync = lambda fd: (time.sleep(float(seconds)), fsync(fd))[1]


def no_space(at, size):
    """No file can grow beyond `size` bytes any more."""
    before_step(at, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size))))


def read_only(at, folder):
    """The folder becomes read-only, for root too: that takes away the capabilities of this process."""
    if os.getuid() == 0:
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None).capset(header, none) == 0
    before_step(at, lambda: os.chmod(folder, 0o555))


def deleted(at, folder):
    before_step(at, lambda: shutil.rmtree(folder))


def not_finite(at, what, report, late=""):
    """On rank 1 the loss (what=nan) or only the gradient (what=inf) of a step is not finite.

    late: losses are read as from a GPU, which Python does not wait for.

    Every rank writes to report.RANK the digests of its weights, averages and moments: before each update, and
    when the run is over.
    """
    forward, clip = mdlm.Model.forward, mdlm.common.clip_gradients
    make_optimizers, lerp = mdlm.make_optimizers, mdlm.torch._foreach_lerp_
    armed, digests, seen = [], [], {}

    def digest():
        h = hashlib.sha256()
        for t in [*seen["model"].parameters(), *seen.get("ema", [])]:
            h.update(t.detach().numpy().tobytes())
        for optimizer in seen["optimizers"]:
            for slots in optimizer.state_dict()["state"].values():
                for t in slots.values():
                    h.update(t.numpy().tobytes())
        return h.hexdigest()

    def broken_forward(self, xt, *rest):
        out = forward(self, xt, *rest)
        if armed and rest and RANK() == 1:
            if what == "nan":
                return out * math.nan
            out.register_hook(lambda g: g * math.inf)
        return out

    def watched_optimizers(model, *rest):
        seen.update(model=model, optimizers=make_optimizers(model, *rest))
        return seen["optimizers"]

    def watched_lerp(ema, *rest):
        seen["ema"] = ema
        return lerp(ema, *rest)

    def watched_clip(*args):
        digests.append(digest())
        return clip(*args)

    def write():
        Path(f"{report}.{RANK()}").write_text(json.dumps([*digests, digest()]))

    if late:
        mdlm.is_async = lambda device: True
        mdlm.to_device = lambda x, device: x  # there is none to copy to
    mdlm.Model.forward, mdlm.common.clip_gradients = broken_forward, watched_clip
    mdlm.make_optimizers, mdlm.torch._foreach_lerp_ = watched_optimizers, watched_lerp
    before_step(at, lambda: armed.append(1))
    return write


FAULTS = (interrupt, sleep, slow_start, die_once, slow_disk, no_space, read_only, deleted, not_finite)


def train(argv, fault=""):
    """mdlm.py with these flags and this fault; its exit code."""
    sys.argv[0] = "mdlm.py"
    common.peak_flops = lambda device, dtype: 1e11  # measuring it takes longer than such a run
    name, *rest = fault.split(":")
    afterwards = {f.__name__: f for f in FAULTS}[name](*rest) if name else None
    code = common.run(lambda argv: mdlm.train(mdlm.parse_args(argv), time.monotonic()), argv)
    if afterwards:
        afterwards()
    return code


def save_and_die(out_dir, step, content, at):
    """Write a checkpoint; SIGKILL comes before the `at`-th thing that is done to the disk."""
    left, fsync = [int(at)], os.fsync

    def count(event, args):
        if event in ("open", "fsync", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    os.fsync = lambda fd: (count("fsync", ()), fsync(fd))[1]
    common.write_checkpoint(out_dir, f"step-{step}", {n: content.encode() for n in common.CHECKPOINT_FILES})
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
    mdlm.torch.set_num_threads(1)
    # what a run imports when it needs it: the optimizers' compiler, the previews, the last picture
    import matplotlib.pyplot  # noqa: F401
    import torch._dynamo  # noqa: F401

    import eval  # noqa: F401
    import sample  # noqa: F401

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
