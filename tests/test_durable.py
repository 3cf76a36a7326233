"""Nothing of a user is replaced, and a failure names what failed: outputs, out_dir, signals, ranks.

Everything runs in this process; what needs processes of its own is in test_reliability.py.
"""

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import CHECKPOINT_FILES, ROOT, TINY, call, read_log, run_mdlm, tiny_flags

import bench
import eval
import export
import mdlm
import sample
from nanomdlm.support.cli import entry, files, outputs, settings
from nanomdlm.support.run import checkpoint, ranks, session
from nanomdlm.support.run import folder as run_folder


def lesson(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "lessons" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_refused(r, *words):
    """One sentence, exit code 2, before any work."""
    assert r.code == 2, (r.out, r.err)
    assert r.err.count("\n") == 1 and "Traceback" not in r.err, r.err
    assert all(str(word) in r.err for word in words), r.err


def content_of(folder):
    """Every path below a folder: its kind, and the hash of its content."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
        text = os.readlink(path) if kind == "link" else ""
        if kind == "file":
            text = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = (kind, text)
    return found


@pytest.fixture
def quick(monkeypatch):
    """Runs do not evaluate, show no samples and draw nothing: most of the time of a tiny run."""
    monkeypatch.setattr(mdlm, "report", lambda run, is_last=False: None)
    monkeypatch.setattr(session.plots, "try_to_draw", lambda plot, path: None)


# --------------------------------------------------------------------------------------------------
# What a flag writes

PROGRAMS = dict(sample=sample, eval=eval, bench=bench, export=export)
# Flags that make a folder, and which command of the program writes something there.
MORE = dict(bench=["sample", "--device=cpu"], eval=["--device=cpu"], sample=["--device=cpu"])


def writing_flags():
    """(program, flag) for all that a flag writes, by the mark in the dataclass of its flags."""
    for name, program in PROGRAMS.items():
        for flag in outputs.paths_of(program.Options(), settings.WRITES):
            yield name, flag
    yield "eval", "pictures"


@pytest.fixture(scope="module")
def world(short_run, tmp_path_factory):
    """A run, a folder of ids, two exports, a checkpoint alone, and files of the user's own."""
    root = tmp_path_factory.mktemp("world")
    shutil.copytree(short_run, root / "run")
    shutil.copytree(short_run / "step-4", root / "alone")
    for folder, names in (
        ("ids", ["train.bin", "val.bin", "notes.txt"]),
        ("hf", ["config.json", "model.safetensors", "README.md"]),
        ("page", ["index.html", "weights.bin", "model.onnx"]),
        ("corpus", ["a.txt", "b.jsonl"]),
    ):
        (root / folder).mkdir()
        for name in names:
            (root / folder / name).write_text(f"{folder} {name}")
    (root / "to-train").symlink_to(root / "run" / "data" / "train.bin")
    (root / "to-run").symlink_to(root / "run")
    (root / "run" / "old.json").symlink_to("latest")
    return root


TARGETS = [
    *("run/latest", "run/LATEST", "run/log.jsonl", "run/.mdlm-run", "run/step-4", "run/step-9"),
    *("run/data", "run/data/train.bin", "run/data/new", "run/step-4/model.safetensors"),
    *("run/step-4/new", "run/.mdlm-lock", "run/old.json", "to-train", "to-run/log.jsonl"),
    *("to-run/data/meta.json", "hf/../run/latest", "ids/train.bin", "ids/new", "hf/config.json"),
    *("hf/new", "page/index.html", "page/new", "alone/config.json", "alone/new"),
]


@pytest.mark.parametrize("target", TARGETS)
def test_no_flag_replaces_what_is_kept(world, capsys, target):
    before = content_of(world)
    flags = [*writing_flags()]
    assert len(flags) >= 6
    for name, flag in flags:
        path = world / target
        if flag == "pictures" and path.is_dir() and "step" not in target and "data" not in target:
            continue
        r = call(PROGRAMS[name].main, capsys, *MORE.get(name, []), f"--{flag}={path}")
        assert_refused(r, f"--{flag}={path}")
    for name, args in (("animate", [ROOT / "README.md"]), ("patterns", ["x"]), ("pictures", [])):
        assert_refused(call(lesson(name).main, capsys, *args, path), path)
    assert content_of(world) == before


def test_no_input_of_the_same_command_is_replaced(world, tmp_path, capsys):
    corpus = shutil.copytree(world / "corpus", tmp_path / "corpus")
    text = tmp_path / "text.txt"
    text.write_text("To█\n")
    os.link(text, tmp_path / "hard")
    (tmp_path / "soft").symlink_to(text)
    before = content_of(tmp_path)
    for path in (text, tmp_path / "hard", tmp_path / "soft", f"{tmp_path}/corpus/../text.txt"):
        for main, args in (
            (sample.main, [f"--batch={text}", f"--json={path}"]),
            (eval.main, [f"--data={text}", f"--json={path}"]),
            (bench.main, ["sample", f"--data={text}", f"--json={path}", "--device=cpu"]),
            (lesson("animate").main, [text, path]),
        ):
            assert_refused(call(main, capsys, *args))
    for path in (corpus / "a.txt", corpus / "new.json"):
        r = call(eval.main, capsys, f"--data={corpus}", f"--json={path}")
        assert_refused(r, f"--data={corpus}")
    assert content_of(tmp_path) == before


def test_a_file_with_two_names_keeps_the_other(world, tmp_path):
    """Not an input of the command: another name of it keeps what it has."""
    (tmp_path / "mine").write_text("mine")
    os.link(tmp_path / "mine", tmp_path / "other")
    outputs.write(tmp_path / "other", b"new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "other").read_text() == "new"


def test_new_files_beside_a_run_are_written(run):
    for content in (b"one", b"two"):
        outputs.check("json", str(run / "samples.json"), dict(out_dir=str(run)))
        outputs.write(run / "samples.json", content)
    assert (run / "samples.json").read_bytes() == b"two"


# --------------------------------------------------------------------------------------------------
# What a run replaces

OTHERS_LOG = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n'
FOREIGN = {
    "data/train.bin": {"data/train.bin": "mine", "data/val.bin": "mine"},
    "data/meta.json": {"data/train.bin": "mine", "data/meta.json": '{"vocab": 3}'},
    "notes in data": {"data/notes": "mine"},
    "a log of words": {"log.jsonl": "mine\n"},
    "a log of another program": {"log.jsonl": OTHERS_LOG},
    "latest": {"latest": "releases/5"},
    "latest is a folder": {"latest/notes": "mine"},
    "loss.png": {"loss.png": "mine"},
    "step-5 of another program": {"step-5/config.json": "{}", "step-5/model.safetensors": "mine"},
    "step-3 is a file": {"step-3": "mine"},
}


@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_run_replaces_no_file_of_others(tmp_path, text_file, capsys, files):
    out = tmp_path / "out"
    for name, content in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(content)
    before = content_of(out)
    argv = [f"--data={text_file}", *TINY, "--max_steps=1", f"--out_dir={out}", "--overwrite"]
    capsys.readouterr()
    assert run_mdlm(*argv) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(out) in said
    assert content_of(out) == before


def test_a_folder_of_the_user_in_a_run_is_kept(run, text_file, quick):
    """Though it is named as a checkpoint: it has no manifest."""
    (run / "step-9").mkdir()
    (run / "step-9" / "config.json").write_text("mine")
    assert run_mdlm(f"--out_dir={run}", "--resume", "--max_steps=5") == 0
    flags = [f"--data={text_file}", *TINY, "--max_steps=1", f"--out_dir={run}", "--overwrite"]
    assert run_mdlm(*flags) == 0
    assert (run / "step-9" / "config.json").read_text() == "mine"


def test_a_run_without_a_marker_is_known_by_its_checkpoint(run, text_file, quick, capsys):
    """It gets one when it is resumed or overwritten."""
    marker = run / files.MARKER
    for flags in (["--resume", "--max_steps=5"], [f"--data={text_file}", *TINY, "--overwrite"]):
        marker.unlink()
        path = run / "log.jsonl"
        assert_refused(call(sample.main, capsys, f"--out_dir={run}", f"--json={path}"), path)
        assert run_mdlm(f"--out_dir={run}", *flags, "--max_steps=6") == 0
        assert marker.is_file()


def test_data_of_the_user_in_the_folder_of_a_run_are_kept(run, text_file, tmp_path):
    """A run that reads ids prepares none, so a folder named data is not its own."""
    out = tmp_path / "out"
    flags = [*TINY, "--max_steps=1", f"--out_dir={out}", "--overwrite"]
    assert run_mdlm(f"--data={run / 'data'}", *flags) == 0
    for name in ("train.bin", "val.bin", "meta.json"):
        (out / "data").mkdir(exist_ok=True)
        (out / "data" / name).write_text("{}")
    assert run_mdlm(f"--data={text_file}", *flags) == 2
    (out / "data" / "text.txt").write_text("mine" * 999)
    before = content_of(out / "data")
    assert run_mdlm(f"--data={out / 'data' / 'text.txt'}", *flags) == 2
    assert content_of(out / "data") == before


@pytest.mark.parametrize("place", ["run/step-4", "run/data", "hf", "ids", "page"])
def test_no_run_begins_among_other_things(world, text_file, capsys, place):
    before = content_of(world)
    argv = [f"--data={text_file}", *TINY, f"--out_dir={world / place}", "--overwrite"]
    assert run_mdlm(*argv) == 2
    assert "--out_dir" in capsys.readouterr().err
    assert content_of(world) == before


def test_no_run_replaces_its_own_input(run, world, tmp_path, capsys):
    corpus = shutil.copytree(world / "corpus", tmp_path / "corpus")
    for data, out in ((corpus, corpus), (run / "log.jsonl", run)):
        before = content_of(out)
        assert run_mdlm(f"--data={data}", *TINY, f"--out_dir={out}", "--overwrite") == 2
        assert f"={data}" in capsys.readouterr().err
        assert content_of(out) == before


def test_what_a_killed_run_left_is_its_own(run, text_file):
    """Without a checkpoint: data, a log whose last line is cut off, something incomplete."""
    for step in (2, 4):
        shutil.rmtree(run / f"step-{step}")
    (run / "latest").unlink()
    with open(run / "log.jsonl", "a") as f:
        f.write('{"step": 5, "tok')
    (run / f"{files.TMP}1").mkdir()
    assert run_mdlm(f"--data={text_file}", *TINY, "--max_steps=1", f"--out_dir={run}") == 0
    assert (run / "step-1").is_dir() and len(read_log(run)) == 3


# --------------------------------------------------------------------------------------------------
# --resume=auto


def test_resume_auto_begins_or_goes_on(text_file, tmp_path, capsys):
    argv = [*TINY, f"--data={text_file}", f"--out_dir={tmp_path / 'o'}", "--resume=auto"]
    assert run_mdlm(*argv, "--max_steps=2") == 0, "there is none: it begins one"
    assert run_mdlm(*argv, "--max_steps=4") == 0
    assert [record["step"] for record in read_log(tmp_path / "o") if "loss" in record][-1] == 4
    assert "resuming from" in capsys.readouterr().out
    config = json.loads((tmp_path / "o" / "step-4" / "config.json").read_text())["config"]
    assert config["resume"] is True, "what was decided, as before"


def test_resume_auto_replaces_no_run(tmp_path, short_run, capsys):
    """One that cannot be resumed is refused: it is not begun again."""
    run = shutil.copytree(short_run, tmp_path / "o")
    argv = [f"--out_dir={run}", "--resume=auto", "--max_steps=5"]
    assert run_mdlm(*argv, "--n_layer=3") == 2
    assert "--n_layer=3" in capsys.readouterr().err
    latest = (run / "latest").read_text()
    (run / "latest").write_text(run_folder.OVERWRITING)
    assert run_mdlm(*argv) == 2
    assert "--overwrite" in capsys.readouterr().err
    (run / "latest").write_text(latest)
    for folder in run.glob("step-*"):
        (folder / "model.safetensors").write_bytes(b"")
    before = content_of(run)
    assert run_mdlm(*argv) == 2
    assert str(run) in capsys.readouterr().err
    assert content_of(run) == before


# --------------------------------------------------------------------------------------------------
# What --resume may change


def test_changed_batch_repeats_and_skips_no_sample(run, quick, monkeypatch, capsys):
    seen = []
    batch = mdlm.Corpus.batch

    def watched(corpus, samples):
        seen.extend(samples.tolist())
        return batch(corpus, samples)

    monkeypatch.setattr(mdlm.Corpus, "batch", watched)
    resume = [f"--out_dir={run}", "--resume"]
    settings = ["--batch_size=4", "--learning_rate=0.001", "--muon_lr=0.01", "--weight_decay=0"]
    settings += ["--grad_clip=0.5", "--dtype=bfloat16"]
    assert run_mdlm(*resume, "--max_steps=6", *settings) == 0
    said = capsys.readouterr().out
    assert "batch_size" in said and "learning_rate" in said
    [record] = [r for r in read_log(run) if "changed" in r]
    assert record["step"] == 4 and record["changed"]["dtype"] == "bfloat16"
    assert run_mdlm(*resume, "--max_steps=7") == 0, "the checkpoint remembers how many were seen"
    assert run_mdlm(*resume, "--max_steps=8", "--batch_size=8") == 0
    assert seen == list(range(4 * 8, 4 * 8 + 3 * 4 + 8))
    tokens = {r["step"]: r["tokens"] for r in read_log(run)}
    assert [tokens[step] // 32 for step in (4, 6, 7, 8)] == [32, 40, 44, 52]


def test_what_no_resume_may_change_is_refused(run, capsys):
    for flag in (
        "--n_layer=3",
        "--separator=x",
        "--seed=1",
        "--ema=0.5",
        "--lr_schedule=linear",
        "--dropout=0.5",
    ):
        assert run_mdlm(f"--out_dir={run}", "--resume", flag) == 2
        assert flag.partition("=")[0] in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Ranks that meet


def test_ranks_compare_what_they_load(run, quick, tmp_path, monkeypatch):
    data = f"--data={run.parent / 'text.txt'}"
    (run.parent / "text.txt").write_text("To be, or not to be. " * 50)
    seen = []
    monkeypatch.setattr(ranks, "check_alike", seen.append)

    def compared(word, *flags):
        seen.clear()
        assert run_mdlm(*flags) == 0
        return {value for mine in seen for name, value in mine.items() if word in name}

    once = []
    for name in ("step-2", "step-4", "step-4"):
        out = f"--out_dir={tmp_path / 'new'}"
        flags = [
            *tiny_flags("--max_steps=1"),
            data,
            out,
            "--overwrite",
            f"--init_from={run / name}",
        ]
        once.append(compared("--init_from", *flags))
    assert once[0] != once[1] == once[2] and len(once[1]) == 1
    first = compared("/step-", f"--out_dir={run}", "--resume")
    again = compared("/step-", f"--out_dir={run}", "--resume", "--max_steps=5")
    assert first == again != compared("/step-", f"--out_dir={run}", "--resume")


# --------------------------------------------------------------------------------------------------
# Reading while a run saves


def test_reading_while_a_run_saves_always_works(short_run, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    step = short_run / "step-4"
    contents = {name: (step / name).read_bytes() for name in CHECKPOINT_FILES}
    checkpoint.write_checkpoint(out, "step-1", contents)
    stop = threading.Event()

    def save():
        number = 1
        while not stop.is_set():
            number += 1
            checkpoint.write_checkpoint(out, f"step-{number}", contents)
            checkpoint.write_checkpoint(out, f"step-{number}", contents)  # the same one again

    def read(folder):
        return [(folder / name).read_bytes() for name in checkpoint.MODEL_FILES]

    wanted = read(step)
    thread = threading.Thread(target=save)
    thread.start()
    try:
        for i in range(120):
            assert checkpoint.read_newest(out, read)[1] == wanted
            if i % 12 == 0:
                mdlm.load(out)
    finally:
        stop.set()
        thread.join()
    assert capsys.readouterr().err == "", "and nothing is said"


def test_steps_go_on_while_a_checkpoint_is_written(short_run, tmp_path, monkeypatch, quick):
    """As on a GPU. The files are those of a run that waits for them."""
    flags = [f"--data={short_run.parent / 'text.txt'}", *tiny_flags("--eval_interval=2")]
    flags += ["--max_steps=6", "--calibration_share=0.1"]
    assert run_mdlm(*flags, f"--out_dir={tmp_path / 'waits'}") == 0
    begun = []

    def write_later(out_dir, name, contents, score=None, write=checkpoint.write_checkpoint):
        begun.append(name)
        until = int(name.removeprefix("step-")) + (1 if len(begun) < 3 else 0)
        for _ in range(1000):
            if read_log(out_dir)[-1]["step"] >= until:
                return write(out_dir, name, contents, score)
            time.sleep(0.02)
        raise AssertionError("no step was made meanwhile")

    monkeypatch.setattr(session, "can_write_beside", lambda run: True)
    monkeypatch.setattr(checkpoint, "write_checkpoint", write_later)
    assert run_mdlm(*flags, f"--out_dir={tmp_path / 'beside'}") == 0
    assert begun == ["step-2", "step-4", "step-6"]
    for name in ("step-4", "step-6"):
        for file in ("model.safetensors", "state.safetensors"):
            wanted = (tmp_path / "waits" / name / file).read_bytes()
            assert (tmp_path / "beside" / name / file).read_bytes() == wanted, (name, file)


def test_a_checkpoint_that_cannot_be_written_beside_steps_ends_the_run(
    short_run, tmp_path, monkeypatch, quick, capsys
):
    def fail(out_dir, name, contents, score=None, write=checkpoint.write_checkpoint):
        with files.writing(Path(out_dir) / name):
            if name == "step-4":
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(out_dir, name, contents, score)

    monkeypatch.setattr(session, "can_write_beside", lambda run: True)
    monkeypatch.setattr(checkpoint, "write_checkpoint", fail)
    flags = [f"--data={short_run.parent / 'text.txt'}", *tiny_flags("--eval_interval=2")]
    r = call(mdlm.main, capsys, *flags, "--max_steps=20", f"--out_dir={tmp_path / 'out'}")
    assert r.code == 2 and "step-4 cannot be written" in r.err and "--resume" in r.err
    assert checkpoint.find_checkpoint(tmp_path / "out").name == "step-2"


def test_checkpoint_removed_while_read_is_sought_again(run):
    def read(folder):
        if folder.name == "step-4":
            contents = {name: (folder / name).read_bytes() for name in CHECKPOINT_FILES}
            checkpoint.write_checkpoint(run, "step-6", contents)
            shutil.rmtree(run / "step-4")
        return (folder / "config.json").read_bytes()

    assert checkpoint.read_newest(run, read)[0] == run / "step-6"


# --------------------------------------------------------------------------------------------------
# What failed is what is named


needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")


@needs_full
@pytest.mark.parametrize(
    "main, flags",
    [
        (sample.main, ["--steps=1", "--length=8", "--json=/dev/full"]),
        (sample.main, ["--steps=1", "--length=8", "--html=/dev/full"]),
        (eval.main, ["--windows=1", "--passes=1", "--pictures=none", "--json=/dev/full"]),
    ],
)
def test_full_disk_names_the_file(short_run, capsys, main, flags):
    r = call(main, capsys, *flags, f"--out_dir={short_run}", "--device=cpu")
    assert r.code == 2 and "Traceback" not in r.err
    assert "/dev/full" in r.err and "No space left" in r.err and "standard output" not in r.err


@contextlib.contextmanager
def file_size_limit(size):
    """Within, no file can get larger than `size` bytes: the disk is full."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("before", [None, b"before"])
def test_full_disk_leaves_a_file_as_it_was(tmp_path, before):
    path = tmp_path / "page.html"
    if before:
        path.write_bytes(before)
        path.chmod(0o640)
    with file_size_limit(100), pytest.raises(OSError, match=r"page\.html"):
        outputs.write(path, bytes(1000))
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [before] * bool(before)
    outputs.write(path, b"after")
    assert path.read_bytes() == b"after"
    assert not before or path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("before", [b"", b"before"])
def test_full_disk_leaves_a_whole_file_of_lines_or_none(tmp_path, before):
    path = tmp_path / "texts.jsonl"
    if before:
        path.write_bytes(before)
        path.chmod(0o640)
    with (
        file_size_limit(10),
        pytest.raises(OSError, match=r"texts\.jsonl"),
        outputs.Lines(path) as lines,
    ):
        print("one", file=lines, flush=True)
        assert path.exists() == bool(before) and (not before or path.read_bytes() == before)
        print("a longer line", file=lines, flush=True)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [before] * bool(before)
    with outputs.Lines(path) as lines:
        print("two", file=lines, flush=True)
    assert path.read_text() == "two\n"
    assert not before or path.stat().st_mode & 0o777 == 0o640


WRITES = """
import os, signal, sys
sys.path.insert(0, "{root}")
import {program}
from nanomdlm.support.cli import entry, files
{patch}
sys.argv[0] = "{program}.py"
sys.exit(entry.run({program}.main, sys.argv[1:]))
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize(
    "program, flags, moment",
    [
        ("sample", "--json={tmp}/f --num_samples=2 --length=8 --steps=1", "os.replace"),
        ("sample", "--json={tmp}/f --num_samples=2 --length=8 --steps=1", "os.fsync"),
        ("eval", "--json={tmp}/f --windows=1 --passes=1 --pictures=none", "os.replace"),
    ],
)
def test_killed_program_leaves_the_old_file(run, tmp_path, program, flags, moment):
    """kill -9 before the new file is complete, or just before it gets its name."""
    path = tmp_path / "f"
    path.write_bytes(b"before")
    patch = f"{moment} = lambda *args: {KILLED}"
    code = WRITES.format(root=ROOT, program=program, patch=patch)
    flags = [*flags.format(tmp=tmp_path).split(), f"--out_dir={run}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    r = subprocess.run([sys.executable, "-c", code, *flags], env=env, capture_output=True)
    assert r.returncode == -signal.SIGKILL, r.stderr[-500:]
    assert path.read_bytes() == b"before"


def test_full_disk_is_what_numpy_is_stopped_by(tmp_path, capsys):
    with file_size_limit(10_000):
        flags = ["--data=patterns", "--device=cpu", f"--out_dir={tmp_path / 'o'}"]
        assert_refused(call(mdlm.main, capsys, *flags))


@needs_full
def test_standard_error_that_fails_ends_no_work(run, monkeypatch, tmp_path):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        flags = [f"--out_dir={run}", "--device=cpu", "--steps=1", "--length=8"]
        assert entry.run(sample.main, [*flags, f"--json={tmp_path / 'texts'}"]) == 0
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert json.loads((tmp_path / "texts").read_text())["text"]


def test_json_for_a_closed_standard_output_is_refused(capsys, monkeypatch):
    with open(os.devnull, "w") as closed:  # what make_streams_usable puts there
        monkeypatch.setattr("sys.stdout", closed)
        code = entry.run(sample.main, ["--device=cpu", "--json=-"])
    assert code == 2 and "--json" in capsys.readouterr().err


@pytest.mark.parametrize("name, flag", list(writing_flags()))
def test_place_below_a_file_is_refused(tmp_path, capsys, name, flag):
    (tmp_path / "file").write_text("mine")
    r = call(PROGRAMS[name].main, capsys, *MORE.get(name, []), f"--{flag}={tmp_path}/file/new")
    assert_refused(r, f"--{flag}={tmp_path}/file/new")


# --------------------------------------------------------------------------------------------------
# Signals, the umask


def test_signal_cuts_the_last_evaluation_short(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    evaluate = mdlm.evaluate
    scored = []

    def struck(model, windows, passes=1, **settings):
        if passes == 4:  # the last one
            scored.clear()
            os.kill(os.getpid(), signal.SIGTERM)
        r = evaluate(model, windows, passes, **settings)
        scored.append(r["windows"] / len(windows))
        return r

    flags = [*tiny_flags("--max_steps=2"), f"--data={run.parent / 'text.txt'}"]
    (run.parent / "text.txt").write_text("To be, or not to be. " * 400)
    with monkeypatch.context() as patched:
        patched.setattr(mdlm, "evaluate", struck)
        assert run_mdlm(*flags, f"--out_dir={out}") == 128 + signal.SIGTERM
    assert max(scored) < 1
    assert not checkpoint.read_state(out / "step-2")["finished"]
    assert run_mdlm(f"--out_dir={out}", "--resume") == 0
    assert checkpoint.read_state(out / "step-2")["finished"]
    ends = [r for r in read_log(out) if r["step"] == 2 and "val_nelbo" in r]
    assert len(ends) == 1 and "windows" not in ends[0], "all windows"


def test_umask_is_obeyed(short_run, tmp_path):
    mask = 0o027
    contents = {name: (short_run / "step-4" / name).read_bytes() for name in CHECKPOINT_FILES}
    before = os.umask(mask)
    try:
        (tmp_path / "out").mkdir()
        checkpoint.write_checkpoint(tmp_path / "out", "step-4", contents)
        files.write_atomically(tmp_path / "out" / "log.jsonl", b"")
        outputs.write(tmp_path / "page.html", b"")
        argv = [f"--out_dir={short_run}", f"--dest={tmp_path / 'hf'}"]
        assert entry.run(export.main, argv) == 0
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert path.stat().st_mode & 0o777 == wanted, path
