"""What a newcomer reads: lessons that answer as printed, --help in 80 columns, advice to type."""

import re
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, run_mdlm

import export
import mdlm
from support import cli
from support.data import sources
from support.training import pace


def test_lessons_name_the_model_that_their_outputs_show():
    """A newcomer has trained a run in out/ before, which a command without --out_dir would ask."""
    for page in sorted((ROOT / "lessons").glob("[1-9]_*.md")):
        for command in re.findall(r"python (?:sample|eval)\.py [^\n`]*", page.read_text("utf-8")):
            assert "--out_dir=" in command or "--compare=" in command, f"{page.name}: {command}"


@pytest.mark.parametrize("flag", ["--help", "--help=all"])
def test_help_fits_in_80_columns(capsys, monkeypatch, flag):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        mdlm.parse_args([flag])
    said = capsys.readouterr().out
    assert "gpt2: n_layer=12" in said and "--data=patterns implies" in said
    assert max(map(len, said.splitlines())) <= 80


def test_second_run_is_refused_before_anything_is_downloaded(tmp_path, monkeypatch, capsys):
    """Each time a newcomer types python mdlm.py again."""
    (tmp_path / "out" / "step-1").mkdir(parents=True)
    monkeypatch.setattr("support.ownership.is_checkpoint", lambda path: True)
    monkeypatch.setattr(sources, "default_data", lambda: pytest.fail("it was asked for"))
    assert run_mdlm(f"--out_dir={tmp_path / 'out'}") == 2
    assert "already holds a run; give --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ending, left, words",
    [
        (30.0, 9.0, "up to 435 windows of validation text, about 9 s"),
        (30.0, 90.0, "435 windows of validation text, about 30 s"),
        (0.5, 90.0, "435 windows of validation text"),
    ],
)
def test_last_evaluation_says_no_more_seconds_than_there_are(ending, left, words):
    assert (
        pace.describe_amount(SimpleNamespace(ending=ending), 435, time.monotonic() + left) == words
    )


def test_export_without_a_folder_says_which_flag_names_it(capsys):
    assert cli.run(export.main, ["--to=page"]) == 2
    said = capsys.readouterr().err
    assert said.endswith(": give the folder to create, such as --dest=my-model\n")


def test_missing_file_is_said_once(tmp_path, capsys):
    missing = tmp_path / "my.txt"
    assert run_mdlm(f"--data={missing}", *TINY, f"--out_dir={tmp_path / 'o'}") == 2
    said = capsys.readouterr().err
    assert f"--data={missing} does not exist; give a text file" in said
