"""Nothing is lost and nothing is silent: runs that are killed, interrupted, or fed with NaN.

Every fault is real: signals, a full file system, a rank that dies. faults.py forks the runs.
"""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch
from conftest import CHECKPOINT_FILES, TINY, losses, read_log, saved, tiers
from nursery import Run, begin_ranks, has_logged, nursery_of_a_file, starter

import mdlm
from nanomdlm.support.cli import files
from nanomdlm.support.run import checkpoint
from nanomdlm.support.run import folder as run_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and forks")
nursery_of_a_file = nursery_of_a_file  # a fixture


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
    return starter(nursery, short_text)


def without_clock(record):
    return {k: v for k, v in record.items() if k not in ("seconds", "tokens_per_second", "phases")}


def assert_equal_to_the_bit(a, b):
    (x, state_x), (y, state_y) = saved(a), saved(b)
    assert state_x == state_y
    assert x.keys() == y.keys()
    assert all(torch.equal(x[k], y[k]) for k in x)
    assert list(map(without_clock, read_log(a))) == list(map(without_clock, read_log(b)))


def assert_whole(out):
    """No final name holds an incomplete checkpoint, and `latest` is no fragment."""
    for folder in checkpoint.checkpoints(out):
        checkpoint.verify(folder)
    if (out / "latest").exists():
        assert (out / "latest").read_text().startswith("step-")


# --------------------------------------------------------------------------------------------------
# Kill


def write(out, step, content):
    contents = dict.fromkeys(CHECKPOINT_FILES, content.encode())
    checkpoint.write_checkpoint(out, f"step-{step}", contents)


def content_of(out):
    return (checkpoint.find_checkpoint(out) / "config.json").read_text()


def torn(folder):
    return folder.exists() and (folder / "config.json").read_text() == "torn"


@pytest.mark.parametrize(
    "step, harm", [(10, ""), (20, ""), (30, ""), (20, "damaged"), (15, "rewound")]
)
def test_kill_during_a_save_loses_nothing(nursery, tmp_path, step, harm):
    # There is step-10, mostly step-20 too. The save is cut off before its first action on the disk,
    # its second, ... until it comes to its end: a new checkpoint, the same step again, over a
    # damaged one, or after a damaged one.
    for at in range(200):
        out = tmp_path / str(at)
        out.mkdir()
        for s in (10,) if step == 10 else (10, 20):
            write(out, s, f"old {s}")
        if harm:
            (out / "step-20" / "config.json").write_text("torn")
        run = Run(nursery, "save_and_die", str(out), step, "new", at)
        code = run.wait(10)
        assert code in (0, -9), run.err
        if harm:  # what the test damaged may still be there, under either name
            for folder in (out / "step-20", out / "step-20.old"):
                if torn(folder):
                    shutil.rmtree(folder)
        assert_whole(out)
        before = "old 20" if step != 10 and not harm else "old 10"
        expected = ("new",) if code == 0 else (before, "new")
        assert content_of(out) in expected, (at, list(out.iterdir()))
        files.clean(out)
        write(out, 40, "next")
        assert content_of(out) == "next"
        assert len(checkpoint.checkpoints(out)) == 2
        kept = {p.name for p in checkpoint.checkpoints(out)}
        assert {p.name for p in out.iterdir()} == {"latest", *kept}
        if code == 0:
            break
    assert code == 0
    assert at > 25, "every action was struck once"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files")
def test_everything_is_synced_before_its_rename(tmp_path, monkeypatch):
    # SIGKILL leaves what is in the page cache; a power failure does not.
    synced = []
    renamed = []
    fsync = os.fsync

    def watched_fsync(fd):
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def watched(do):
        def call(old, new):
            old = Path(old)
            parts = {old, *old.iterdir()} if old.is_dir() else {old}
            assert parts <= set(synced), "no file or folder gets its name before it is synced"
            if Path(new).name == "latest":
                assert tmp_path in synced, "nor does `latest` name what might not be there"
            synced.clear()
            renamed.append((Path(new).name, len(parts)))
            do(old, new)

        return call

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched(os.rename))
    monkeypatch.setattr(os, "replace", watched(os.replace))
    write(tmp_path, 7, "content")
    assert renamed == [("step-7", 7), ("latest", 1)]
    assert synced == [tmp_path], "the rename of `latest`, too"


def half_saved(out):
    """Whether a checkpoint is under way, or was when its run was killed."""
    return any(out.glob(f"{files.TMP}*/config.json"))


def test_killed_run_ends_as_if_not_killed(run, tmp_path, kills=4):
    """Runs are killed at random moments; each that ends equals the reference."""
    flags = ["--max_steps=40", "--eval_interval=2", "--log_interval=4"]
    assert run(tmp_path / "whole", *flags).wait() == 0
    killed = during_save = ended = 0
    r = random.Random(0)
    while killed < kills or not during_save or not ended:
        out = tmp_path / f"killed-{ended}"
        again = ["--resume"] if checkpoint.checkpoints(out) else [*flags, "--overwrite"]
        must_kill = killed < kills or not during_save
        one = run(out, *again, fault="slow_disk:0.004" if must_kill else "")
        if must_kill:
            time.sleep(r.uniform(0.1, 0.8))
            if killed % 2:  # every other one in the midst of a save
                one.until(lambda: one.poll() is not None or half_saved(out))  # noqa: B023
                time.sleep(r.uniform(0, 0.02))
            one.kill()
        code = one.wait()
        assert code in (0, -9), one.err
        if code == 0:
            assert_equal_to_the_bit(tmp_path / "whole", out)
            assert not list(out.glob(f"{files.TMP}*"))
            assert len(checkpoint.checkpoints(out)) == 2
            ended += 1
            continue
        killed += 1
        assert_whole(out)
        during_save += half_saved(out)
        if checkpoint.checkpoints(out):
            mdlm.load(out)


def test_resumed_run_removes_what_a_killed_one_left(run, tmp_path):
    """Killed after its last save, before that had removed the oldest checkpoint."""
    out = tmp_path / "run"
    flags = ["--max_steps=6", "--eval_interval=2", "--log_interval=2"]
    assert run(out, *flags).wait() == 0
    shutil.copytree(out / "step-4", out / "step-2")
    assert run(out, "--resume").wait() == 0
    assert {p.name for p in checkpoint.checkpoints(out)} == {"step-6", "step-4"}
    shutil.copytree(out / "step-4", out / "step-2")
    shutil.copytree(out / "step-6", out / "step-8")  # saved, but killed before `latest` named it
    inside = run(out / "step-6", "--resume", "--max_steps=8")
    assert inside.wait() == 2 and f"{out}/step-6 is a part of the run in {out}" in inside.err
    kept = {"step-2", "step-4", "step-6", "step-8"}
    assert {p.name for p in checkpoint.checkpoints(out)} == kept, "they are of another run"
    shutil.rmtree(out / "step-2")
    checkpoint.finish_removal(out, out / "step-6")
    assert {p.name for p in checkpoint.checkpoints(out)} == kept - {"step-2"}, "newer ones stay"


# --------------------------------------------------------------------------------------------------
# Exact resume


def resume_after_8_of_20(run, tmp_path, *flags):
    flags = ["--max_steps=20", "--eval_interval=6", "--dropout=0.1", *flags]
    whole = run(tmp_path / "whole", *flags)
    assert whole.wait(300) == 0, whole.err
    first = run(tmp_path / "parts", *flags, fault="interrupt:7")
    assert first.wait(300) == 130, first.err
    assert "stopped at step 8 and saved" in first.out
    assert saved(tmp_path / "parts")[1] == (8, 8 * 16 * 32)
    second = run(tmp_path / "parts", "--resume")
    assert second.wait(300) == 0, second.err
    assert "resuming from" in second.out
    assert "step-8" in second.out
    assert len(losses(tmp_path / "whole")) == 20
    assert_equal_to_the_bit(tmp_path / "whole", tmp_path / "parts")
    samples = []
    for out in (whole.out, first.out + second.out):
        samples.append([line for line in out.splitlines() if line.startswith("  | ")])
    assert samples[0] == samples[1], "the printed samples are the same"
    assert len(samples[0]) >= 2


VARIANTS = [
    ["--gradient_accumulation_steps=2"],
    ["--objective=ar", "--ema=0"],
    ["--optimizer=adamw", "--masking=bernoulli"],
]


@pytest.mark.parametrize("flags", VARIANTS)
def test_fresh_process_resumes_to_the_bit(run, tmp_path, flags):
    resume_after_8_of_20(run, tmp_path, *flags)


@pytest.mark.parametrize("flags", tiers(VARIANTS, slow=VARIANTS[:1]))
def test_compiled_run_resumes_to_the_bit(run, tmp_path, flags):
    resume_after_8_of_20(run, tmp_path, "--compile=on", *flags)


# --------------------------------------------------------------------------------------------------
# Disk


def assert_refused_and_intact(one, out, *words):
    assert one.wait() == 2, (one.out, one.err)
    message = [line for line in one.err.splitlines() if line.startswith("mdlm.py:")]
    assert len(message) == 1
    assert "Traceback" not in one.err
    assert all(word in message[0] for word in words), message
    assert_whole(out)
    assert saved(out)[1][0] == 4
    assert not list(out.glob(f"{files.TMP}*"))


TWELVE_STEPS = ("--max_steps=12", "--eval_interval=4")


def test_file_size_limit_stops_the_run(run, tmp_path):
    out = tmp_path / "o"
    one = run(out, *TWELVE_STEPS, fault=f"no_space:6:{1 << 15}")
    assert_refused_and_intact(one, out, "step-8 cannot be written", "File too large", "--resume")
    assert run(out, "--resume").wait() == 0
    assert saved(out)[1][0] == 12


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


def test_full_disk_stops_the_run(run, tmp_path):
    with small_disk(tmp_path / "disk", "700k") as disk:  # a checkpoint takes about 400 kB
        one = run(disk / "o", *TWELVE_STEPS)
        words = ("cannot be written", "No space left", "--resume")
        assert_refused_and_intact(one, disk / "o", *words)
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        assert run(disk / "o", "--resume").wait() == 0
        assert saved(disk / "o")[1][0] == 12
        (disk / "fill").write_bytes(bytes((10 << 20) - 1_600_000))
        other = run(disk / "p", "--max_steps=2", "--n_embd=128")
        assert other.wait() == 2
        assert "cannot be written (No space left" in other.err


def test_read_only_folder_stops_the_run(run, tmp_path):
    out = tmp_path / "o"
    one = run(out, *TWELVE_STEPS, fault=f"read_only:6:{out}")
    assert_refused_and_intact(one, out, "step-8 cannot be written", "Permission denied")
    two = run(out, "--resume", fault=f"read_only:99:{out}")
    assert_refused_and_intact(two, out, f"{out} cannot be written", "Permission denied")
    os.chmod(out, 0o755)
    assert run(out, "--resume").wait() == 0
    assert saved(out)[1][0] == 12


def test_full_disk_stops_all_ranks(run, tmp_path):
    out = tmp_path / "o"
    ranks = begin_ranks(2, run, out, *TWELVE_STEPS, fault=f"no_space:6:{1 << 15}")
    assert [r.wait() for r in ranks] == [2, 2]
    assert "step-8 cannot be written" in ranks[0].err
    assert "Traceback" not in ranks[0].err + ranks[1].err
    assert saved(out)[1][0] == 4


def test_vanished_folder_stops_all_ranks(run, tmp_path):
    out = tmp_path / "o"
    ranks = begin_ranks(2, run, out, *TWELVE_STEPS, fault=f"deleted:6:{out}:0")
    assert [r.wait(30) for r in ranks] == [2, 2], (ranks[0].err, ranks[1].err)
    assert "log.jsonl cannot be written (No such file" in ranks[0].err
    assert "Traceback" not in ranks[0].err + ranks[1].err
    assert not out.exists()


def test_ranks_with_other_flags_stop_at_once(run, tmp_path):
    each = [["--max_steps=4"], ["--max_steps=5"]]
    ranks = begin_ranks(2, run, tmp_path / "o", each=each)
    assert [r.wait(30) for r in ranks] == [2, 2], (ranks[0].err, ranks[1].err)
    for rank in ranks:
        sentences = [line for line in rank.err.splitlines() if line.startswith("mdlm.py: ")]
        assert len(sentences) == 1
        assert "rank 1 has --max_steps 5, the first rank 4" in sentences[0]
        assert "Traceback" not in rank.err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS])
def test_folders_without_locks_are_used(monkeypatch, tmp_path, recwarn, capsys, error):
    """Some network file systems have none. No file stands for a lock: who would remove it?

    A warning says that nothing keeps a second run out.
    """
    fcntl = pytest.importorskip("fcntl")
    out = tmp_path / "o"

    def no_locks(*args):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    run_folder.lock(out)
    assert [p.name for p in out.iterdir()] == [files.MARKER] and not list(recwarn)
    said = capsys.readouterr().err
    assert str(out) in said and said.count("\n") == 1
    run_folder.release()
    assert not out.exists(), "it was left empty"


def test_two_runs_never_share_a_folder(run, tmp_path):
    out = tmp_path / "o"
    one = run(out, *TWELVE_STEPS, fault="sleep:6:60")
    one.until(lambda: has_logged(out, 6))
    before = saved(out)[1]
    for flags in (["--resume"], ["--overwrite", "--max_steps=12"]):
        two = run(out, *flags)
        assert_refused_and_intact(two, out, f"{out} is in use", "another --out_dir")
    early = run(tmp_path / "p", "--max_steps=12", fault="slow_start:60")  # nothing is saved yet
    early.until(lambda: any((tmp_path / "p").glob(f"{files.TMP}*/meta.json")))
    late = run(tmp_path / "p", "--max_steps=12")
    assert late.wait() == 2
    assert "is in use" in late.err
    assert any((tmp_path / "p").glob(f"{files.TMP}*"))
    one.kill()
    early.kill()  # a process that dies holds nothing
    assert (one.wait(), early.wait()) == (-9, -9)
    assert saved(out)[1] == before
    assert run(out, "--resume").wait() == 0
    assert saved(out)[1][0] == 12
    assert run(tmp_path / "p", "--max_steps=2").wait() == 0


# --------------------------------------------------------------------------------------------------
# Signals and mistakes


def test_second_ctrl_c_exits_at_once(run, tmp_path):
    out = tmp_path / "o"
    one = run(out, *TWELVE_STEPS, fault="sleep:6:60")
    one.until(lambda: has_logged(out, 6))
    one.kill(signal.SIGINT)
    one.until(lambda: "Ctrl-C" in one.err, 5)
    time.sleep(0.1)
    assert one.poll() is None, "the first one waits for the step"
    one.kill(signal.SIGINT)
    assert one.wait(20) == 130
    assert saved(out)[1][0] == 4


def test_ctrl_c_before_training_leaves_nothing(run, tmp_path):
    one = run(tmp_path / "o", "--max_steps=12", fault="slow_start:60")
    one.until(lambda: list((tmp_path / "o").glob(f"{files.TMP}*/meta.json")))
    one.kill(signal.SIGINT)
    assert one.wait(20) == 130
    assert "Traceback" not in one.err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_signal_to_one_rank_stops_both(run, tmp_path, number, code):
    out = tmp_path / "o"
    flags = ["--max_steps=1000000", "--optimizer=adamw", "--lr_schedule=constant"]
    ranks = begin_ranks(2, run, out, *flags)
    ranks[0].until(lambda: has_logged(out, 5))
    ranks[1].kill(number)
    assert [r.wait(20) for r in ranks] == [code, code], ranks[1].err
    step = saved(out)[1][0]
    assert step >= 5
    assert f"stopped at step {step} and saved" in ranks[0].out
    assert run(out, "--resume", f"--max_steps={step + 2}").wait() == 0
    assert saved(out)[1][0] == step + 2


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no SIGHUP")
def test_closed_terminal_stops_and_saves(run, tmp_path):
    out = tmp_path / "o"
    assert run(out, *TWELVE_STEPS, fault="hangup:5").wait() == 129
    assert saved(out)[1][0] == 6
    assert run(out, "--resume", fault="hangup:8:ignored").wait() == 0, "nohup ignores SIGHUP"
    assert saved(out)[1][0] == 12


def test_program_mistake_gives_a_traceback(run, tmp_path):
    out = tmp_path / "o"
    one = run(out, *TWELVE_STEPS, fault="raises:6")
    assert one.wait() == 1
    assert "Traceback" in one.err
    assert "ValueError: a mistake in the program" in one.err
    assert saved(out)[1][0] == 4


# --------------------------------------------------------------------------------------------------
# Numbers that are not finite


@pytest.mark.parametrize("what", ["nan", "inf"])
def test_bad_loss_of_one_rank_changes_nothing(run, tmp_path, what):
    out = tmp_path / "o"
    report = tmp_path / "digests"
    ranks = begin_ranks(2, run, out, *TWELVE_STEPS, fault=f"not_finite:6:{what}:{report}")
    assert [r.wait() for r in ranks] == [2, 2], (ranks[0].err, ranks[1].err)
    for rank in (0, 1):
        digests = json.loads(Path(f"{report}.{rank}").read_text())
        assert len(digests) == 8
        assert len(set(digests[:7])) == 7, "seven updates were due, six changed all"
        assert digests[6] == digests[7], "the seventh changed no weight, average or moment"
    assert "at step 6: not kept" in ranks[0].err
    assert "step-4" in ranks[0].err
    assert "--learning_rate" in ranks[0].err
    assert "Traceback" not in ranks[0].err + ranks[1].err
    assert [p.name for p in checkpoint.checkpoints(out)] == ["step-4"]
    assert run(out, "--resume").wait() == 0, "without the fault the run goes on"


def test_late_nan_is_not_saved(run, tmp_path):
    out = tmp_path / "o"
    report = tmp_path / "digests"
    flags = [*TWELVE_STEPS, "--log_interval=100"]
    ranks = begin_ranks(2, run, out, *flags, fault=f"not_finite:6:nan:{report}:late")
    assert [r.wait() for r in ranks] == [2, 2], (ranks[0].err, ranks[1].err)
    updates = len(json.loads(Path(f"{report}.0").read_text())) - 1
    assert updates == 8, "two more steps were computed, up to the evaluation"
    assert "at step 6: not kept" in ranks[0].err
    assert "step-4" in ranks[0].err
    assert [p.name for p in checkpoint.checkpoints(out)] == ["step-4"]


# --------------------------------------------------------------------------------------------------
# Ranks


@pytest.mark.parametrize("optimizer, tolerance", [("adamw", 1e-5), ("muon", 1e-3)])
def test_two_ranks_give_the_losses_of_one(run, tmp_path, optimizer, tolerance):
    flags = ["--max_steps=12", f"--optimizer={optimizer}", "--eval_windows=15"]
    one = run(tmp_path / "one", *flags)
    assert one.wait() == 0
    ranks = begin_ranks(2, run, tmp_path / "two", *flags, "--gradient_accumulation_steps=2")
    assert [r.wait() for r in ranks] == [0, 0], ranks[0].err
    assert "2 ranks" in ranks[0].out
    assert ranks[1].out == "", "only the first rank speaks"
    a, b = (losses(tmp_path / name) for name in ("one", "two"))
    assert len(a) == 12
    assert a == pytest.approx(b, abs=tolerance)
    a, b = (read_log(tmp_path / name) for name in ("one", "two"))
    assert a[0]["val_nelbo"] == pytest.approx(b[0]["val_nelbo"], abs=1e-6)
    for name, factor in dict(val_nelbo=10, val_nelbo_se=10, val_nelbo_raw=10).items():
        assert a[-1][name] == pytest.approx(b[-1][name], abs=factor * tolerance)


def test_two_ranks_keep_a_time_limit(run, tmp_path):
    flags = ["--max_steps=1000000", "--time_limit=3", "--eval_interval=50", "--eval_windows=100"]
    ranks = begin_ranks(2, run, tmp_path / "o", *flags)
    assert [r.wait(20) for r in ranks] == [0, 0], ranks[0].err
    last = read_log(tmp_path / "o")[-1]
    assert last["seconds"] < 4 and last["val_nelbo"] and saved(tmp_path / "o")[1][0] == last["step"]


def test_first_rank_alone_tracks(run, tmp_path):
    pytest.importorskip("wandb")
    flags = ["--max_steps=2", "--tracker=wandb"]
    ranks = begin_ranks(2, run, tmp_path / "o", *flags, WANDB_MODE="offline")
    assert [r.wait() for r in ranks] == [0, 0], ranks[1].err
    assert "--tracker" not in ranks[0].err, "its failure would be a warning"
    assert len(list((tmp_path / "o" / "wandb").glob("offline-run-*"))) == 1
    assert sum("wandb" in record for record in read_log(tmp_path / "o")) == 1


def test_two_ranks_resume_what_one_began(run, tmp_path):
    flags = ["--optimizer=adamw", "--rate_margin=0", "--lr_schedule=constant", "--max_steps=8"]
    assert run(tmp_path / "whole", *flags).wait() == 0
    out = tmp_path / "o"
    assert run(out, *flags, fault="interrupt:4").wait() == 130
    assert saved(out)[1][0] == 5
    ranks = begin_ranks(2, run, out, "--resume")
    assert [r.wait() for r in ranks] == [0, 0], ranks[0].err
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), abs=1e-4)


@pytest.mark.slow
def test_torchrun_restarts_and_resumes(run, nursery, tmp_path):
    """The same command begins the run, goes on after a rank was killed, and finds it ended."""
    out = tmp_path / "o"
    flags = ["--max_steps=12", "--eval_interval=4", "--optimizer=adamw"]
    ranks = begin_ranks(2, run, tmp_path / "whole", *flags)
    assert [r.wait() for r in ranks] == [0, 0], ranks[0].err
    config = json.loads((tmp_path / "whole" / "step-12" / "config.json").read_text())["config"]
    args = [f"--data={config['data']}", *TINY, "--batch_size=16", "--eval_windows=4", *flags]
    args += ["--resume=auto", f"--out_dir={out}"]
    marker = tmp_path / "died"
    said = []
    for _ in range(2):
        process = Run(nursery, "torchrun", args, f"die_once:6:1:{marker}", 2, 2)
        assert process.wait(120) == 0, process.err
        said += process.out.splitlines()
        weights = [name / "step-12" / "model.safetensors" for name in (tmp_path / "whole", out)]
        assert weights[0].read_bytes() == weights[1].read_bytes(), "exact to the bit"
        assert losses(out) == losses(tmp_path / "whole")
    assert marker.exists()
    resumed = [line for line in said if line.startswith("resuming from")]
    assert ["step-4," in line for line in resumed] == [True, False], "killed, then at its end"
