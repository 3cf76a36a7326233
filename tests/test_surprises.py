"""What a new user would stumble over, and what an attacker would try: one sentence, or it works."""

import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, call, read_log, run_mdlm, sign, tiny_flags
from safetensors.torch import load_file, save_file

import eval
import mdlm
import sample
from nanomdlm.support.cli import entry, outputs, terminal
from nanomdlm.support.data import sources
from nanomdlm.support.data.texts import prepare
from nanomdlm.support.run import checkpoint, plots

HOSTILE = "a\x1b]0;mine\x07b\x1b[2Jc\x9b1md\u202ee\x7f\rf\n"
OURS = re.compile(r"\x1b\[[0-9;]*[mAJ]|\r(?=\x1b\[J)")  # what viewer.py sends to a terminal


def assert_one_sentence(r, *words):
    assert r.code == 2 and r.out in ("", "reading the data\n")
    assert r.err.count("\n") == 1 and "Traceback" not in r.err
    assert all(word in r.err for word in words), r.err


def train(capsys, *args):
    return call(lambda argv: mdlm.main(argv), capsys, *args)


# --------------------------------------------------------------------------------------------------
# Hostile text


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The run folder and the terminal output of a model of a hostile text."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "text.txt").write_bytes((HOSTILE * 300).encode())
    flags = [f"--data={folder / 'text.txt'}", *TINY, "--max_steps=30", f"--out_dir={folder / 'o'}"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        assert run_mdlm(*flags) == 0
    return folder / "o", said.getvalue()


def test_log_of_a_run_shows_control_characters_escaped(hostile):
    said = hostile[1]
    assert not terminal.UNSAFE.search(said)
    assert "  | " in said and "\\x1b" in said


@pytest.mark.parametrize("more", [["--watch"], ["--infill=a\x1b█\u202e█f"]])
def test_terminal_gets_samples_escaped(hostile, capsys, monkeypatch, more):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sample.display.time, "sleep", lambda seconds: None)
    flags = [f"--out_dir={hostile[0]}", "--steps=3", *more]
    if "infill" not in str(more):
        flags.append("--length=30")
    capsys.readouterr()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    code = entry.run(sample.main, flags)
    shown = capsys.readouterr()
    assert code == 0 and shown.out
    assert not terminal.UNSAFE.search(OURS.sub("", shown.out))
    assert "--watch" not in more or not terminal.UNSAFE.search(shown.err)


def test_json_keeps_the_true_text(hostile, capsys):
    flags = [f"--out_dir={hostile[0]}", "--infill=a\x1b\x9b\u202e█\x7ff", "--json=-", "--steps=2"]
    r = call(sample.main, capsys, *flags)
    assert r.code == 0
    assert json.loads(r.out)["text"].startswith("a\x1b\x9b\u202e")
    assert not terminal.UNSAFE.search(r.out)


def test_sentences_about_mistakes_are_escaped_too(capsys, tmp_path):
    flags = [f"--data=\x1b[2J\u202e{tmp_path}", f"--out_dir={tmp_path}/out"]
    assert_one_sentence(train(capsys, *flags), "--data=\\x1b[2J\\u202e")


# --------------------------------------------------------------------------------------------------
# Weights, memory, files


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_useless_weights_give_no_answer(run, capsys, value):
    folder = checkpoint.find_checkpoint(run)
    weights = load_file(folder / "model.safetensors")
    weights["head.weight"][:, :] = value  # 3e38: finite, but its products are not
    save_file(weights, folder / "model.safetensors")
    sign(folder)
    for main, flags in ((sample.main, ["--steps=2"]), (eval.main, ["--pictures=none"])):
        r = call(main, capsys, f"--out_dir={run}", *flags)
        assert r.code == 2 and not r.out and "Traceback" not in r.err


MEMORY = """
import resource, sys, time
sys.path.insert(0, "{root}")
import mdlm
from nanomdlm.support.cli import entry
from nanomdlm.support.run import folder as run_folder
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (400 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.argv[0] = "mdlm.py"
main = lambda argv: mdlm.main(argv)
sys.exit(entry.run(main, sys.argv[1:], run_folder.release))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="sizes of processes")
def test_too_little_memory_is_one_sentence(text_file, tmp_path):
    flags = [f"--data={text_file}", *tiny_flags("--batch_size=16384", "--n_embd=128")]
    command = [sys.executable, "-c", MEMORY.format(root=ROOT), *flags, f"--out_dir={tmp_path}/o"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    r = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert r.returncode == 2 and "Traceback" not in r.stderr
    *_, last = r.stderr.splitlines()
    assert "memory" in last and "--gradient_accumulation_steps=2" in last and "16384" in last
    assert not list(tmp_path.glob("o/step-*"))


def test_text_that_changes_while_read_is_refused(tmp_path, monkeypatch):
    texts = iter([["abc\n" * 99], ["abc\n" * 99], ["abc\n" * 9]])
    monkeypatch.setattr(sources, "find_text", lambda name: lambda: next(texts))
    with pytest.raises(ValueError):
        prepare(mdlm.Config(), tmp_path)


def test_changed_text_is_said_on_resume(run, capsys):
    text = Path(mdlm.load(run)[2].data)
    before = text.read_bytes()
    flags = [f"--out_dir={run}", "--resume", "--max_steps=5"]
    assert str(text) not in train(capsys, *flags).err
    try:
        text.write_bytes(before + b"more")
        r = train(capsys, *flags)
        assert r.code == 0 and str(text) in r.err
    finally:
        text.write_bytes(before)


# --------------------------------------------------------------------------------------------------
# Pictures and logs


def test_no_picture_ends_a_run(run, capsys, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(plots, "plot_losses", broken)
    r = train(capsys, f"--out_dir={run}", "--resume", "--max_steps=5")
    assert r.code == 0 and "loss.png" in r.err and "no fonts" in r.err
    r = call(eval.main, capsys, f"--compare={run}", f"--pictures={run}")
    assert r.code == 2 and "value" in r.out, "the table is there, the picture is not"


# --------------------------------------------------------------------------------------------------
# Flags


@pytest.mark.parametrize("old", [True, False], ids=["over a run", "in an empty folder"])
def test_killed_first_save_of_overwrite_can_be_resumed(
    text_file, run, tmp_path, capsys, monkeypatch, old
):
    out = run if old else tmp_path / "new"
    flags = [f"--data={text_file}", *TINY, f"--out_dir={out}", "--overwrite", "--max_steps=1"]

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "remove_all_but_two", killed)  # `latest` is written
    assert train(capsys, *flags).code == 130
    monkeypatch.undo()
    r = train(capsys, f"--out_dir={out}", "--resume", "--max_steps=2")
    assert r.code == 0 and "step-1" in r.out


def test_overwrite_keeps_the_old_run_until_it_saves(text_file, run, capsys):
    before = {p.name for p in checkpoint.checkpoints(run)}
    flags = [f"--data={text_file}", *TINY, f"--out_dir={run}", "--overwrite"]
    assert train(capsys, *flags, "--time_limit=1e-6").code == 2
    assert {p.name for p in checkpoint.checkpoints(run)} == before
    r = train(capsys, f"--out_dir={run}", "--resume")
    assert_one_sentence(r, "--overwrite")
    assert train(capsys, *flags, "--max_steps=1").code == 0
    assert [p.name for p in checkpoint.checkpoints(run)] == ["step-1"]
    assert train(capsys, f"--out_dir={run}", "--resume", "--max_steps=2").code == 0


def test_ids_of_another_width_are_not_resumed(run, capsys):
    meta = json.loads((run / "data" / "meta.json").read_text())
    (run / "data" / "meta.json").write_text(json.dumps(meta | dict(dtype="int32")))
    r = train(capsys, f"--out_dir={run}", "--resume", "--max_steps=5")
    assert_one_sentence(r, "data")


def test_json_keeps_the_text_in_any_encoding(run):
    env = os.environ | dict(PYTHONIOENCODING="ascii", OMP_NUM_THREADS="1")
    command = [sys.executable, "-OO", "sample.py", f"--out_dir={run}", "--json=-", "--steps=1"]
    r = subprocess.run([*command, "--infill=’█"], cwd=ROOT, env=env, capture_output=True)
    assert r.returncode == 0, r.stderr
    assert json.loads(r.stdout)["template"] == "’█"


def test_devices_are_written_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    outputs.write(tmp_path / "pipe", b"content")
    assert os.read(reader, 99) == b"content"
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    outputs.write(tmp_path / "link", b"content")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"content"


def test_a_device_that_takes_no_output_is_no_success(run):
    """Also for a text that is larger than the buffer of standard output."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from nanomdlm.support.cli import entry
sys.exit(entry.run(lambda argv: print("x" * 100_000) or 0, []))
"""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", program]
        r = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert r.returncode == 2 and "No space left" in r.stderr


# --------------------------------------------------------------------------------------------------
# Output


def without_reader(*command):
    """The exit code of a command whose reader has gone, as after `| head -1`, and its errors."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as stdout:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        r = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=env, text=True)
    return r.returncode, r.stderr


@pytest.mark.skipif(os.name != "posix", reason="pipes with a signal")
@pytest.mark.parametrize(
    "command",
    [
        "sample.py --out_dir={run} --length=8 --steps=1",
        "mdlm.py --help",
    ],
)
def test_program_whose_reader_has_gone_ends_quietly(run, command):
    """With 141, as a shell says of what SIGPIPE ends; subprocess says -SIGPIPE."""
    name, *flags = command.format(run=run).split()
    code, said = without_reader(sys.executable, str(ROOT / name), *flags)
    assert code in (141, -signal.SIGPIPE) and "Traceback" not in said and "Broken" not in said


@pytest.mark.skipif(os.name != "posix", reason="pipes with a signal")
def test_run_whose_reader_has_gone_goes_on(text_file, tmp_path):
    flags = [f"--data={text_file}", *tiny_flags("--max_steps=2"), f"--out_dir={tmp_path}/o"]
    code, said = without_reader(sys.executable, str(ROOT / "mdlm.py"), *flags)
    assert code == 0 and "Traceback" not in said
    assert read_log(tmp_path / "o")[-1]["step"] == 2
