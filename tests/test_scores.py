"""Programs say which model they use: its folder, data and score, and whether that is little."""

import json
import os
import shutil

import pytest
from conftest import ROOT

import eval as eval_program
import export
import mdlm
import sample
from nanomdlm.support.cli import entry

PROGRAMS = {
    "text": (sample, ["--length=8", "--steps=2"]),
    "candidates": (sample, ["--infill=Th█ ", "--steps=2", "--candidates=1"]),
    "eval --text": (eval_program, ["--text=The"]),
    "eval": (eval_program, ["--windows=1", "--passes=1"]),
    "export": (export, ["--to=hf"]),
}


def introduction(capsys, program, *flags):
    """What a program says on stderr of its model, one line; all else it says on standard output."""
    capsys.readouterr()
    assert entry.run(program.main, list(flags)) == 0
    said = capsys.readouterr()
    return said.err.splitlines()[0], said


@pytest.mark.parametrize("mode", PROGRAMS)
def test_every_program_says_which_model_it_uses(mode, short_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, flags = PROGRAMS[mode]
    if program is export:
        flags = [*flags, "--dest=exported"]
    line, said = introduction(capsys, program, f"--out_dir={short_run}", *flags)
    assert line.startswith(f"{os.path.relpath(short_run)}/step-4, text.txt, NELBO ")
    assert said.err.count("NELBO") == 1 and "step-4" in line
    assert "barely trained; --out_dir=" in line and line.endswith("is the one that ships")


def test_copied_checkpoint_knows_its_score(short_run, tmp_path, capsys):
    """Also one without its training state, under another name."""
    flags = ["--length=8", "--steps=1"]
    line, _ = introduction(capsys, sample, f"--out_dir={short_run}", *flags)
    score = line.split("NELBO")[1]
    copied = shutil.copytree(short_run / "step-4", tmp_path / "mine")
    manifest = json.loads((copied / "manifest.json").read_text())
    for name in ("state.json", "state.safetensors"):
        (copied / name).unlink()
        del manifest["files"][name]
    (copied / "manifest.json").write_text(json.dumps(manifest))
    line, _ = introduction(capsys, sample, f"--out_dir={copied}", *flags)
    assert "/mine, text.txt, NELBO" in line and line.split("NELBO")[1] == score


def test_shipped_model_has_a_name_and_a_score(tmp_path, capsys, monkeypatch):
    flags = ["--length=8", "--steps=1", "--device=cpu"]
    monkeypatch.chdir(ROOT)
    line, _ = introduction(capsys, sample, "--out_dir=weights/shakespeare", *flags)
    assert line == "weights/shakespeare, shakespeare, NELBO 1.49"
    monkeypatch.chdir(tmp_path)
    line, said = introduction(capsys, sample, *flags)  # as there is no run here
    assert "weights/shakespeare, shakespeare, NELBO 1.49" in line and "no run" in line
    assert len(said.err.splitlines()) == 1


def test_python_callers_hear_nothing(short_run, capsys):
    capsys.readouterr()
    model, tokenizer, _ = mdlm.load(short_run)
    sample.write(model, tokenizer, "Th█", steps=1)
    said = capsys.readouterr()
    assert said.out == said.err == ""
