"""Nothing lost, nothing silent: runs that are killed, interrupted, starved of disk or fed with NaN.

Every fault is real: signals, a full file system, a rank that dies. faults.py forks the runs.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, losses, read_log
from safetensors.torch import load_file

import common
import mdlm

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and forks")


class Nursery:
    """The process that forks the runs; see faults.py."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        env = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
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


class Run:
    """A forked process: call(*args) of faults.py."""

    def __init__(self, nursery, call, *args, **env):
        self.nursery, self.code = nursery, None
        self.files = [Path(tempfile.mkstemp(dir=nursery.folder.name)[1]) for _ in range(2)]
        out, err = map(str, self.files)
        self.pid = nursery.ask(call=call, args=args, env=env, out=out, err=err)

    out = property(lambda self: self.files[0].read_text())
    err = property(lambda self: self.files[1].read_text())

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
        """The exit code, -9 after SIGKILL. Fails the test after so many seconds: nothing may hang."""
        try:
            self.until(lambda: self.poll() is not None, seconds)
        finally:
            self.kill()
        return self.code


@pytest.fixture(scope="module")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.process.stdin.close()
    nursery.process.wait(10)
    nursery.folder.cleanup()


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where there is /dev/shm: these tests sync thousands of files."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def short_text(pydoc, tmp_path_factory):
    """6,000 characters: 167 windows of 32, so that 20 batches of 16 cross an epoch."""
    path = tmp_path_factory.mktemp("short") / "short.txt"
    path.write_text(pydoc[:6000], encoding="utf-8")
    return path


@pytest.fixture
def run(nursery, short_text):
    """run(out_dir, *flags, fault="name:...", **env) begins a tiny run."""

    def begin(out, *flags, fault="", **env):
        args = [*flags, f"--out_dir={out}"]
        if "--resume" not in flags:
            args = [f"--data={short_text}", *TINY, "--batch_size=16", *args]
        return Run(nursery, "train", list(map(str, args)), fault, **env)

    return begin


def begin_two(run, out, *flags, **more):
    """Two ranks of one run, as torchrun would start them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    return [run(out, *flags, RANK=str(r), LOCAL_RANK=str(r), **env, **more) for r in (0, 1)]


def everything(out):
    """All tensors of the last checkpoint: weights, averages, optimizer state; and its step and tokens."""
    folder = common.find_checkpoint(out)
    state = common.read_json(folder / "state.json", "state")
    weights = {f"saved.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    return weights | load_file(folder / "state.safetensors"), (state["step"], state["tokens"])


def assert_equal_to_the_bit(a, b):
    (x, state_x), (y, state_y) = everything(a), everything(b)
    assert state_x == state_y and x.keys() == y.keys()
    assert all(torch.equal(x[k], y[k]) for k in x)
    strip = lambda r: {k: v for k, v in r.items() if k not in ("seconds", "tokens_per_second", "mfu")}
    assert list(map(strip, read_log(a))) == list(map(strip, read_log(b)))


def assert_whole(out):
    """No final name holds an incomplete checkpoint, and `latest` is no fragment."""
    for folder in common.checkpoints(out):
        common.verify(folder)
    if (out / "latest").exists():
        assert (out / "latest").read_text().startswith("step-")


# ------------------------------------------------------------------------------------------------------------
# Kill


def content_of(out):
    return (common.find_checkpoint(out) / "config.json").read_text()


@pytest.mark.parametrize("step, harm", [(10, ""), (20, ""), (30, ""), (20, "damaged"), (15, "rewound")])
def test_a_kill_before_any_action_of_a_save_loses_nothing(nursery, tmp_path, step, harm):
    # There is step-10, mostly step-20 too. The save is cut off before its first action on the disk, its
    # second, ... until it comes to its end: a new checkpoint, the same step again, over a damaged one, or
    # behind one that was damaged.
    for at in range(200):
        out = tmp_path / str(at)
        out.mkdir()
        for s in (10,) if step == 10 else (10, 20):
            common.write_checkpoint(out, f"step-{s}", dict.fromkeys(common.CHECKPOINT_FILES, b"old %d" % s))
        if harm:
            (out / "step-20" / "config.json").write_text("torn")
        run = Run(nursery, "save_and_die", str(out), step, "new", at)
        code = run.wait(10)
        assert code in (0, -9), run.err
        if harm:  # what the test damaged may still be there, under either name
            for folder in (out / "step-20", out / "step-20.old"):
                if folder.exists() and (folder / "config.json").read_text() == "torn":
                    shutil.rmtree(folder)
        assert_whole(out)
        before = "old 20" if step != 10 and not harm else "old 10"
        assert content_of(out) in (("new",) if code == 0 else (before, "new")), (at, list(out.iterdir()))
        common.clean(out)
        common.write_checkpoint(out, "step-40", dict.fromkeys(common.CHECKPOINT_FILES, b"next"))
        assert content_of(out) == "next" and len(common.checkpoints(out)) == 2
        assert {p.name for p in out.iterdir()} == {"latest", *(p.name for p in common.checkpoints(out))}
        if code == 0:
            break
    assert code == 0 and at > 25, "every action was struck once"
    print(f"{at} kills")


def half_saved(out):
    """Whether a checkpoint is under way, or was when its run was killed."""
    return any(out.glob(f"{common.TMP}*/config.json"))


def kill_at_random(run, tmp_path, kills):
    """Kill runs at random moments, `kills` in all; each that comes to its end must equal the reference."""
    flags = ["--max_steps=40", "--eval_interval=2", "--eval_windows=4", "--log_interval=4"]
    assert run(tmp_path / "whole", *flags).wait() == 0
    killed, during_save, ended, r = 0, 0, 0, random.Random(0)
    while killed < kills or not ended:
        out = tmp_path / f"killed-{ended}"
        again = ["--resume"] if common.checkpoints(out) else [*flags, "--overwrite"]
        one = run(out, *again, fault="slow_disk:0.004" if killed < kills else "")
        if killed < kills:
            time.sleep(r.uniform(0.1, 0.8))
            if killed % 2:  # every other one in the midst of a save
                one.until(lambda: one.poll() is not None or half_saved(out))  # noqa: B023
                time.sleep(r.uniform(0, 0.02))
            one.kill()
        code = one.wait()
        assert code in (0, -9), one.err
        if code == 0:
            assert_equal_to_the_bit(tmp_path / "whole", out)
            assert not list(out.glob(f"{common.TMP}*")) and len(common.checkpoints(out)) == 2
            ended += 1
            continue
        killed += 1
        assert_whole(out)
        during_save += half_saved(out)
        if common.checkpoints(out):
            mdlm.load(out)
    print(f"{killed} kills, {during_save} of them during a save, {ended} runs equal to the bit")
    assert during_save >= kills // 4


def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(run, tmp_path):
    kill_at_random(run, tmp_path, 6)


@pytest.mark.slow
def test_a_run_killed_fifty_times_ends_as_if_nothing_had_happened(run, tmp_path):
    kill_at_random(run, tmp_path, 50)


# ------------------------------------------------------------------------------------------------------------
# Exact resume


def resume_after_8_of_20(run, tmp_path, *flags):
    flags = ["--max_steps=20", "--eval_interval=6", "--dropout=0.1", *flags]
    whole = run(tmp_path / "whole", *flags)
    assert whole.wait(300) == 0, whole.err
    first = run(tmp_path / "parts", *flags, fault="interrupt:7")
    assert first.wait(300) == 130, first.err
    assert "stopped at step 8 and saved" in first.out
    assert everything(tmp_path / "parts")[1] == (8, 8 * 16 * 32)
    second = run(tmp_path / "parts", "--resume")
    assert second.wait(300) == 0, second.err
    assert "resuming from" in second.out and "step-8" in second.out
    assert len(losses(tmp_path / "whole")) == 20
    assert_equal_to_the_bit(tmp_path / "whole", tmp_path / "parts")
    samples = [
        [line for line in r.splitlines() if line.startswith("  | ")]
        for r in (whole.out, first.out + second.out)
    ]
    assert samples[0] == samples[1] and len(samples[0]) >= 8, "the printed samples are the same"


@pytest.mark.parametrize("flags", [["--gradient_accumulation_steps=2"], ["--objective=ar", "--ema=0"]])
def test_a_fresh_process_resumes_to_the_bit_across_an_epoch(run, tmp_path, flags):
    resume_after_8_of_20(run, tmp_path, *flags)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--gradient_accumulation_steps=2"], ["--objective=ar"]])
def test_a_fresh_process_resumes_a_compiled_run_to_the_bit(run, tmp_path, flags):
    resume_after_8_of_20(run, tmp_path, "--compile=on", *flags)


def test_a_run_resumes_only_on_the_text_that_it_learned(run, short_text, tmp_path):
    source = tmp_path / "source.txt"
    shutil.copy(short_text, source)
    assert run(tmp_path / "o", f"--data={source}", "--max_steps=2").wait() == 0
    letters = list(source.read_text())
    source.write_text("".join(letters[::-1]))  # the same characters and length: only the order differs
    shutil.rmtree(tmp_path / "o" / "data")
    other = run(tmp_path / "o", "--resume", "--max_steps=4")
    assert other.wait() == 2 and "is not the text that" in other.err and other.err.count("\n") == 1
    shutil.copy(short_text, source)
    assert run(tmp_path / "o", "--resume", "--max_steps=4").wait() == 0


# ------------------------------------------------------------------------------------------------------------
# Disk


def assert_refused_and_intact(one, out, *words):
    assert one.wait() == 2, (one.out, one.err)
    message = [line for line in one.err.splitlines() if line.startswith("mdlm.py:")]
    assert len(message) == 1 and "Traceback" not in one.err
    assert all(word in message[0] for word in words), message
    assert_whole(out)
    assert everything(out)[1][0] == 4 and not list(out.glob(f"{common.TMP}*"))


def test_a_file_that_cannot_grow_stops_the_run_with_a_sentence(run, tmp_path):
    out = tmp_path / "o"
    one = run(out, "--max_steps=12", "--eval_interval=4", fault=f"no_space:6:{1 << 15}")
    assert_refused_and_intact(one, out, "step-8 cannot be written", "File too large", "--resume")
    assert run(out, "--resume").wait() == 0 and everything(out)[1][0] == 12


@contextlib.contextmanager
def small_disk(folder, size):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_stops_the_run_with_a_sentence(run, tmp_path):
    with small_disk(tmp_path / "disk", "700k") as disk:  # a checkpoint takes about 400 kB
        one = run(disk / "o", "--max_steps=12", "--eval_interval=4")
        assert_refused_and_intact(one, disk / "o", "cannot be written", "No space left", "--resume")
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        assert run(disk / "o", "--resume").wait() == 0 and everything(disk / "o")[1][0] == 12
        (disk / "fill").write_bytes(bytes((10 << 20) - 1_600_000))
        other = run(disk / "p", "--max_steps=2", "--n_embd=128")
        assert other.wait() == 2 and "cannot be written (No space left" in other.err


def test_a_folder_that_becomes_read_only_stops_the_run_with_a_sentence(run, tmp_path):
    out = tmp_path / "o"
    one = run(out, "--max_steps=12", "--eval_interval=4", fault=f"read_only:6:{out}")
    assert_refused_and_intact(one, out, "step-8 cannot be written", "Permission denied")
    two = run(out, "--resume", fault=f"read_only:99:{out}")
    assert_refused_and_intact(two, out, f"{out} cannot be written", "Permission denied")
    os.chmod(out, 0o755)
    assert run(out, "--resume").wait() == 0 and everything(out)[1][0] == 12


def test_an_out_dir_that_vanishes_stops_the_run_with_a_sentence(run, tmp_path):
    out = tmp_path / "o"
    one = run(out, "--max_steps=12", "--eval_interval=4", fault=f"deleted:6:{out}")
    assert one.wait() == 2 and "cannot be written (No such file" in one.err and "Traceback" not in one.err
    assert not out.exists()


def test_two_ranks_stop_together_when_the_disk_is_full(run, tmp_path):
    out = tmp_path / "o"
    ranks = begin_two(run, out, "--max_steps=12", "--eval_interval=4", fault=f"no_space:6:{1 << 15}")
    assert [r.wait() for r in ranks] == [2, 2]
    assert "step-8 cannot be written" in ranks[0].err and "Traceback" not in ranks[0].err + ranks[1].err
    assert everything(out)[1][0] == 4


def test_two_runs_never_train_in_one_folder(run, tmp_path):
    out = tmp_path / "o"
    one = run(out, "--max_steps=12", "--eval_interval=4", fault="sleep:6:60")
    one.until(lambda: "step 6:" in one.err)
    before = everything(out)[1]
    for flag in ("--resume", "--overwrite"):
        two = run(out, flag, *["--max_steps=12"] * (flag == "--overwrite"))
        assert_refused_and_intact(two, out, f"{out} is in use", "another --out_dir")
    early = run(tmp_path / "p", "--max_steps=12", fault="slow_start:60")  # nothing is saved there yet
    early.until(lambda: any((tmp_path / "p").glob(f"{common.TMP}*/train.bin")))
    late = run(tmp_path / "p", "--max_steps=12")
    assert late.wait() == 2 and "is in use" in late.err and any((tmp_path / "p").glob(f"{common.TMP}*"))
    one.kill(), early.kill()  # whoever dies holds nothing
    assert (one.wait(), early.wait()) == (-9, -9) and everything(out)[1] == before
    assert run(out, "--resume").wait() == 0 and everything(out)[1][0] == 12
    assert run(tmp_path / "p", "--max_steps=2").wait() == 0


# ------------------------------------------------------------------------------------------------------------
# Signals


def test_a_second_ctrl_c_leaves_at_once(run, tmp_path):
    out = tmp_path / "o"
    one = run(out, "--max_steps=12", "--eval_interval=4", fault="sleep:6:60")
    one.until(lambda: "step 6:" in one.err)
    one.kill(signal.SIGINT)
    one.until(lambda: "a second Ctrl-C leaves at once" in one.err, 5)
    time.sleep(0.2)
    assert one.poll() is None, "the first one waits for the step"
    one.kill(signal.SIGINT)
    assert one.wait(2) == 130
    assert everything(out)[1][0] == 4
    assert run(out, "--resume").wait() == 0 and everything(out)[1][0] == 12


def test_ctrl_c_before_the_first_step_leaves_at_once_and_leaves_nothing(run, tmp_path):
    one = run(tmp_path / "o", "--max_steps=12", fault="slow_start:60")
    one.until(lambda: list((tmp_path / "o").glob(f"{common.TMP}*/train.bin")))
    one.kill(signal.SIGINT)
    assert one.wait(5) == 130 and "Traceback" not in one.err
    assert not list((tmp_path / "o").iterdir())


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_one_of_two_ranks_stops_both_at_one_step(run, tmp_path, number, code):
    out = tmp_path / "o"
    ranks = begin_two(run, out, "--max_steps=1000000", "--optimizer=adamw", "--lr_schedule=constant")
    ranks[0].until(lambda: "step 5:" in ranks[0].err)
    ranks[1].kill(number)
    assert [r.wait(20) for r in ranks] == [code, code], ranks[1].err
    step = everything(out)[1][0]
    assert step >= 5 and f"stopped at step {step} and saved" in ranks[0].out
    assert run(out, "--resume", f"--max_steps={step + 2}").wait() == 0
    assert everything(out)[1][0] == step + 2


# ------------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("what", ["nan", "inf"])
def test_a_number_that_is_not_finite_on_one_rank_changes_nothing_on_any(run, tmp_path, what):
    out, report = tmp_path / "o", tmp_path / "digests"
    flags = ["--max_steps=12", "--eval_interval=4"]
    ranks = begin_two(run, out, *flags, fault=f"not_finite:6:{what}:{report}")
    assert [r.wait() for r in ranks] == [2, 2], (ranks[0].err, ranks[1].err)
    for rank in (0, 1):
        digests = json.loads(Path(f"{report}.{rank}").read_text())
        assert len(digests) == 8 and len(set(digests[:7])) == 7, "seven updates were due, six changed all"
        assert digests[6] == digests[7], "the seventh changed no weight, average or moment"
    assert "at step 6: not kept" in ranks[0].err and "step-4" in ranks[0].err
    assert "--learning_rate" in ranks[0].err and "Traceback" not in ranks[0].err + ranks[1].err
    assert everything(out)[1][0] == 4 and [p.name for p in common.checkpoints(out)] == ["step-4"]
    assert run(out, "--resume").wait() == 0, "without the fault the run goes on"


def test_a_number_that_is_read_late_as_on_a_gpu_is_never_saved_either(run, tmp_path):
    out, report = tmp_path / "o", tmp_path / "digests"
    flags = ["--max_steps=12", "--eval_interval=4", "--log_interval=100"]
    ranks = begin_two(run, out, *flags, fault=f"not_finite:6:nan:{report}:late")
    assert [r.wait() for r in ranks] == [2, 2], (ranks[0].err, ranks[1].err)
    updates = len(json.loads(Path(f"{report}.0").read_text())) - 1
    assert updates == 8, "two more steps were computed, up to the evaluation"
    assert "at step 6: not kept" in ranks[0].err and "step-4" in ranks[0].err
    assert everything(out)[1][0] == 4 and [p.name for p in common.checkpoints(out)] == ["step-4"]


def test_weights_that_are_not_finite_are_never_saved(run, tmp_path):
    config = mdlm.Config(out_dir=str(tmp_path))
    bad = {"w": torch.tensor([1.0, float("nan")])}
    for weights, tensors in ((bad, {}), ({}, bad)):
        with pytest.raises(common.Refusal, match="not finite"):
            mdlm.save(config, mdlm.text.Tokenizer("byte"), weights, tensors, dict(step=3))
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------
# Restarts


def test_torchrun_restarts_after_a_rank_died_and_resumes_by_itself(run, tmp_path):
    # In out_dir there is an older run of exactly these settings, come to its end: --overwrite must replace
    # it, and the restart, whose command says --overwrite too, must go on from what this launch has saved.
    flags = ["--max_steps=12", "--eval_interval=4", "--optimizer=adamw"]
    assert run(tmp_path / "whole", *flags).wait() == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "o")
    data = json.loads((tmp_path / "o" / "step-12" / "config.json").read_text())["config"]["data"]
    marker = tmp_path / "died"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["--max-restarts=2", str(ROOT / "tests" / "faults.py"), f"--data={data}", *TINY]
    command += ["--batch_size=16", *flags, "--overwrite", f"--out_dir={tmp_path / 'o'}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "FAULT_SCRIPT": f"die_once:6:1:{marker}"}
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0 and marker.exists(), process.stderr
    resumed = [line for line in process.stdout.splitlines() if line.startswith("resuming from")]
    assert len(resumed) == 1 and resumed[0].endswith("step-4"), process.stdout
    a, b = losses(tmp_path / "whole"), losses(tmp_path / "o")
    assert len(b) == 12 and b == pytest.approx(a, abs=1e-5)
    assert read_log(tmp_path / "o")[-1]["val_nelbo"] == pytest.approx(
        read_log(tmp_path / "whole")[-1]["val_nelbo"], abs=1e-4
    )
