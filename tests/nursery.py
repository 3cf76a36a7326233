"""Forked runs of mdlm.py, for the tests of faults and of ranks: faults.py forks them."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY


class Nursery:
    """The process that forks the runs; see faults.py."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        env = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        env["PYTHONUNBUFFERED"] = ""  # as users have it: what cannot be written is held
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "faults.py")],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module", name="nursery")
def nursery_of_a_file():
    nursery = Nursery()
    yield nursery
    nursery.process.stdin.close()
    nursery.process.wait(60)
    nursery.folder.cleanup()


class Run:
    """A forked process: call(*args) of faults.py."""

    def __init__(self, nursery, call, *args, **env):
        self.nursery = nursery
        self.code = None
        self.files = [Path(tempfile.mkstemp(dir=nursery.folder.name)[1]) for _ in range(2)]
        out, err = map(str, self.files)
        self.pid = nursery.ask(call=call, args=args, env=env, out=out, err=err)

    @property
    def out(self):
        return self.files[0].read_text()

    @property
    def err(self):
        return self.files[1].read_text()

    def poll(self):
        if self.code is None:
            self.code = self.nursery.ask(poll=self.pid)
        return self.code

    def kill(self, number=signal.SIGKILL):
        if self.poll() is None:
            os.kill(self.pid, number)

    def until(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.out, self.err)
            time.sleep(0.005)

    def wait(self, seconds=60):
        """The exit code, -9 after SIGKILL. Fails the test after `seconds`: nothing may hang."""
        try:
            self.until(lambda: self.poll() is not None, seconds)
        finally:
            self.kill()
        return self.code


def starter(nursery, text, without=()):
    """run(out_dir, *flags, fault="name:...", **env) begins a tiny run on `text`.

    without: beginnings of flags of TINY that are left out
    """
    tiny = [flag for flag in TINY if not flag.startswith(tuple(without))]

    def begin(out, *flags, fault="", **env):
        args = [*flags, f"--out_dir={out}"]
        if "--resume" not in flags:
            args = [f"--data={text}", *tiny, "--batch_size=16", "--eval_windows=4", *args]
        return Run(nursery, "train", list(map(str, args)), fault, **env)

    return begin


def has_logged(out, step):
    """Whether the log of the run in `out` has a record of this step."""
    path = Path(out) / "log.jsonl"
    return path.exists() and f'"step": {step}, ' in path.read_text()


def free_port():
    """A port on which nothing listens, below those that Linux gives to outgoing connections: until
    a rank has started and listens there, one of these could take it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def begin_ranks(n, run, out, *flags, each=None, **more):
    """n ranks of one run, as torchrun would start them; each: more flags of every rank."""
    env = dict(WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **more)
    each = each or [[]] * n
    return [run(out, *flags, *each[r], RANK=str(r), LOCAL_RANK=str(r), **env) for r in range(n)]
