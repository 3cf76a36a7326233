"""Data that change while a run trains on them, or before it is resumed, are named in a sentence."""

import os

import numpy as np
import pytest
from conftest import read_log, run_mdlm, tiny_flags

import mdlm
from support.training import watch


@pytest.fixture
def changing(monkeypatch):
    """A function: do this after the second step of a run."""
    monkeypatch.setattr(watch, "EVERY", -1)

    def after(change):
        step = mdlm.train_step

        def changed(run, number, progress):
            step(run, number, progress)
            if number == 1:
                change()

        monkeypatch.setattr(mdlm, "train_step", changed)

    return after


def ids(folder, n=4000):
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        (np.arange(n, dtype=np.uint16) % 50).tofile(folder / name)
    return folder


def train(*flags):
    return run_mdlm(*tiny_flags("--max_steps=6", *flags))


def test_data_that_change_under_a_run_are_named(tmp_path, changing, capsys):
    """Once; the run ends, and as the sentence says, --resume takes the former content alone."""
    folder = ids(tmp_path / "ids")
    before = (folder / "train.bin").read_bytes()
    changing(lambda: (np.arange(4000, dtype=np.uint16) % 49).tofile(folder / "train.bin"))
    out = f"--out_dir={tmp_path}/o"
    assert train(f"--data={folder}", out) == 0
    said = capsys.readouterr().err
    assert said.count(f"{folder}/train.bin") == 1
    assert "--resume" in said
    assert run_mdlm("--resume", "--max_steps=8", out) == 2
    (folder / "train.bin").write_bytes(before)
    assert run_mdlm("--resume", "--max_steps=8", out) == 0


def test_data_that_are_cut_end_a_run(tmp_path, changing, capsys):
    """They are mapped into memory: reading on would end the process without a word."""
    folder = ids(tmp_path / "ids")
    before = (folder / "train.bin").read_bytes()
    changing(lambda: os.truncate(folder / "train.bin", 100))
    out = f"--out_dir={tmp_path}/o"
    assert train(f"--data={folder}", out, "--eval_interval=1") == 2
    said = capsys.readouterr().err
    assert f"{folder}/train.bin" in said and "step-2" in said and "--resume" in said
    (folder / "train.bin").write_bytes(before)
    assert run_mdlm("--resume", out) == 0
    assert read_log(tmp_path / "o")[-1]["step"] == 6


def test_source_that_changes_is_named(text_file, tmp_path, changing, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(text_file.read_bytes())
    changing(lambda: text.write_text("something else"))
    assert train(f"--data={text}", f"--out_dir={tmp_path}/o") == 0
    said = capsys.readouterr().err
    assert said.count(str(text)) == 1
    assert run_mdlm("--resume", "--max_steps=8", f"--out_dir={tmp_path}/o") == 0
    assert f"--data={text}" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["add", "grow", "touch"])
def test_folder_that_changes_is_named(change, text_file, tmp_path, changing, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_bytes(text_file.read_bytes()[:9000])
    out = f"--out_dir={tmp_path}/o"
    changing(lambda: os.utime(folder / "a.txt", (1, 1)))
    flags = [f"--data={folder}", out, "--document_length=predicted"]
    assert train(*flags) == 0
    assert str(folder / "a.txt") in capsys.readouterr().err
    if change != "touch":
        name = "c.txt" if change == "add" else "b.txt"
        (folder / name).write_text("more of it " * 2000)
    assert run_mdlm("--resume", "--max_steps=8", out) == 0
    said = f"--data={folder}" in capsys.readouterr().err
    assert said == (change != "touch"), "a time alone is no change between two runs"


def test_data_that_stay_are_not_named(text_file, tmp_path, changing, capsys):
    changing(lambda: None)
    assert train(f"--data={text_file}", f"--out_dir={tmp_path}/o") == 0
    assert str(text_file) not in capsys.readouterr().err
