"""Settings are types: flags, config.json and Python callers are read alike; mistakes are named."""

import dataclasses
import importlib
import json

import pytest
from conftest import TINY, run_mdlm

import bench
import eval
import export
import mdlm
import sample
import serve
from nanomdlm.support.cli import settings
from nanomdlm.support.errors import UserError

PROGRAMS = dict(mdlm=mdlm.Config, sample=sample.Options, eval=eval.Options, bench=bench.Options)
PROGRAMS |= dict(export=export.Options, serve=serve.Options)


def read(*words, cls=mdlm.Config, **more):
    return settings.parse(cls, list(words), "", **more)


@pytest.mark.parametrize(
    "words, given",
    [
        (["--n_layer=3"], dict(n_layer=3)),
        (["--n_layer", "3", "--tie"], dict(n_layer=3, tie=True)),
        (["--n-layer=3", "--tie", "false"], dict(n_layer=3, tie=False)),
        (["--resume", "--out_dir=o"], dict(resume=True, out_dir="o")),
        (["--resume=auto"], dict(resume="auto")),
        (["--shard"], dict(shard=-1)),
        (["--shard", "2"], dict(shard=2)),
        (["--shard", "--tie"], dict(shard=-1, tie=True)),
        (["--max_iters=7", "--lr=1e-3"], dict(max_steps=7, learning_rate=1e-3)),
        (["--rates=0-1"], dict(rates="uniform")),  # its usual form
        (["--separator= "], dict(separator=" ")),
        (["--dropout=0"], dict(dropout=0.0)),
    ],
)
def test_flags_are_read(words, given):
    assert read(*words) == given


def test_a_text_needs_no_flag_where_one_is_expected():
    options = dict(cls=sample.Options, free="text")
    assert read("--watch", "To be███", **options) == dict(watch=True, text="To be███")
    assert read("--seed=3", "--", "--x", **options) == dict(seed=3, text="--x")
    assert read("- a list ███", **options) == dict(text="- a list ███")
    assert read("--caution", "-1", **options) == dict(caution=-1.0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_flag_shows_in_help_with_its_default(name, capsys):
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main(["--help=all" if name == "mdlm" else "--help"])
    shown = capsys.readouterr().out
    assert end.value.code in (None, 0)
    for field in dataclasses.fields(PROGRAMS[name]):
        assert f"--{field.name} " in shown
    assert "default" in shown


@pytest.mark.parametrize(
    "changes, name",
    [(dict(n_layer="3"), "n_layer"), (dict(dropout=7), "dropout"), (dict(pos="x"), "pos"),
     (dict(tie=1), "tie"), (dict(n_layer=None), "n_layer")],
)  # fmt: skip
def test_python_and_config_json_are_checked_as_flags_are(changes, name):
    with pytest.raises(UserError, match=name):
        mdlm.Config(**changes).check()


def test_init_from_brings_the_architecture(short_run, text_file, tmp_path):
    shapes = ("--n_layer", "--n_head", "--n_embd", "--block_size")
    flags = [flag for flag in TINY if not flag.startswith(shapes)]
    out = tmp_path / "out"
    text = short_run.parent / "text.txt"
    args = [f"--init_from={short_run}", f"--data={text}", "--max_steps=1", f"--out_dir={out}"]
    assert run_mdlm(*args, *flags) == 0
    was = json.loads((short_run / "step-4" / "config.json").read_text())["config"]
    now = json.loads((out / "step-1" / "config.json").read_text())["config"]
    names = ("n_layer", "n_head", "n_embd", "block_size", "conv", "attention_every", "tie")
    assert [now[name] for name in names] == [was[name] for name in names]


def test_unknown_characters_are_named_at_once_or_left_out(short_run, tmp_path, capsys):
    text = (short_run.parent / "text.txt").read_text()
    data = tmp_path / "more.txt"
    data.write_text(text + "☃é☃" + text)
    args = [f"--init_from={short_run}", f"--data={data}", *TINY, "--max_steps=1"]
    assert run_mdlm(*args, f"--out_dir={tmp_path}/a") == 2
    said = capsys.readouterr().err
    assert "'☃' (2)" in said and "'é' (1)" in said and "--unknown=drop" in said
    assert run_mdlm(*args, "--unknown=drop", f"--out_dir={tmp_path}/a") == 0
    tokenizer = mdlm.load(tmp_path / "a")[1]
    with pytest.raises(UserError, match="☃"):  # a user's text loses nothing
        tokenizer.encode("☃")


def test_idle_flags_that_would_be_believed_are_refused(text_file, tmp_path, capsys):
    for words in (
        ["--objective=ar", "--masking=bernoulli"],
        ["--objective=ar", "--rates=cosine"],
        ["--objective=ar", "--loss_weight=uniform"],
        ["--objective=ar", "--rate_margin=0.2"],
        ["--masking=bernoulli", "--rate_margin=0.2"],
        ["--rates=cosine", "--rate_margin=0.2"],
        ["--optimizer=adamw", "--muon_lr=0.1"],
        ["--lora=4"],
    ):
        args = [f"--data={text_file}", *TINY, *words, f"--out_dir={tmp_path}/o", "--max_steps=1"]
        assert run_mdlm(*args) == 2
        assert words[-1].partition("=")[0] in capsys.readouterr().err
        assert not (tmp_path / "o").exists()
