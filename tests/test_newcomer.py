"""What a newcomer reads: lessons that answer as printed, --help, what happens on a second run."""

import json
import re

import pytest
from conftest import ROOT, run_mdlm, tiny_flags

import mdlm
import sample
from nanomdlm.support.cli import entry
from nanomdlm.support.data import sources


def test_lessons_name_the_model_that_their_outputs_show():
    """A newcomer has trained a run in out/ before, which a command without --out_dir would ask."""
    for page in sorted((ROOT / "lessons").glob("[1-9]_*.md")):
        for command in re.findall(r"python (?:sample|eval)\.py [^\n`]*", page.read_text("utf-8")):
            assert "--out_dir=" in command or "--compare=" in command, f"{page.name}: {command}"


def test_help_shows_a_plain_run_and_on_request_all(capsys):
    shown = []
    for flag in ("--help", "--help=all"):
        with pytest.raises(SystemExit) as end:
            mdlm.main([flag])
        assert not end.value.code
        shown.append(capsys.readouterr().out)
    assert all(name in shown[0] for name in ("--data", "--out_dir", "--max_steps", "--n_layer"))
    assert "block_length" in shown[1] and len(shown[1]) > len(shown[0])


def test_the_names_of_nanogpt_work(text_file, tmp_path):
    """Typed out of habit; --lr is answered (test_mistakes.py), as Muon has a rate of its own."""
    out = f"--out_dir={tmp_path / 'out'}"
    flags = ["--max_iters=2", "--warmup_iters=1", f"--data={text_file}", "--eval_windows=2", out]
    assert run_mdlm(*tiny_flags(*flags)) == 0
    config = mdlm.load(tmp_path / "out")[2]
    assert (config.max_steps, config.warmup_steps) == (2, 1)
    more = ["--start=the", "--steps=1", "--length=9", f"--json={tmp_path / 'texts'}"]
    assert entry.run(sample.main, [out, *more]) == 0
    assert json.loads((tmp_path / "texts").read_text())["text"].startswith("the")


def test_second_run_is_refused_before_anything_is_downloaded(run, monkeypatch, capsys):
    """Each time a newcomer types python mdlm.py again."""
    monkeypatch.setattr(sources, "default_data", lambda: pytest.fail("it was asked for"))
    assert run_mdlm(f"--out_dir={run}") == 2
    said = capsys.readouterr().err
    assert "--resume" in said and "--overwrite" in said
