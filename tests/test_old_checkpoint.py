"""Checkpoints of earlier versions load, sample and resume.

checkpoint_44a18a0.tar.xz has two runs that commit 44a18a0 saved at step 10 of 20, the second on two
ranks with --shard; checkpoint_44a18a0.json has the losses of their next ten steps there.
"""

import dataclasses
import hashlib
import json
import shutil

import pytest
import torch
from conftest import ROOT, losses, run_mdlm, sign

import mdlm
import sample
from support.aliases import ALIASES
from support.data.tokenizer import tokenizer_from_json
from support.errors import UserError

DATA = ROOT / "tests" / "data"


WANTED = json.loads((DATA / "checkpoint_44a18a0.json").read_text())


@pytest.fixture
def old_run(tmp_path):
    shutil.unpack_archive(DATA / "checkpoint_44a18a0.tar.xz", tmp_path)
    return tmp_path / "old"


def change_config(run, change):
    path = run / "step-10" / "config.json"
    content = json.loads(path.read_text())
    change(content["config"])
    path.write_text(json.dumps(content))
    sign(run / "step-10")


def test_old_checkpoint_loads_and_samples(old_run, capsys):
    model, tokenizer, config = mdlm.load(old_run)
    assert (config.n_layer, config.n_embd, config.block_size) == (3, 32, 32)
    x = torch.full((2, 32), model.mask_id)
    for generate in (sample.generate, mdlm.generate):
        out = generate(model, x, steps=8, generator=torch.Generator().manual_seed(0))
        assert len(tokenizer.decode(out[0].tolist())) == 32
    assert capsys.readouterr().err == ""


def test_old_checkpoint_resumes_with_its_losses(old_run):
    assert run_mdlm("--resume", f"--out_dir={old_run}") == 0
    assert losses(old_run)[10:] == pytest.approx(WANTED["old"], rel=1e-5)


def test_old_shards_are_joined(old_run):
    """One process goes on with what two ranks had spread over them."""
    run = old_run.with_name("sharded")
    assert run_mdlm("--resume", "--shard=0", f"--out_dir={run}") == 0
    assert losses(run)[10:] == pytest.approx(WANTED["sharded"], rel=1e-3)


def test_missing_settings_get_their_defaults(old_run):
    change_config(old_run, lambda config: [config.pop(name) for name in ("conv", "grad_clip")])
    _, _, config = mdlm.load(old_run)
    assert (config.conv, config.grad_clip) == (5, 1.0)


@pytest.mark.parametrize("name", ["of_the_future", "wandb", "beta1", "eval_passes"])
def test_unknown_settings_are_refused(old_run, name):
    """Those of the future, and those that checkpoints from before 44a18a0 have."""
    change_config(old_run, lambda config: config.update({name: ""}))
    with pytest.raises(UserError, match=name):
        mdlm.load(old_run)


FORMER_NAMES = [name for _, names, _ in ALIASES["mdlm"] for name in names]
FORMER = [  # what is said by names of before, and by names of now
    (dict(mask_schedule="cosine"), dict(rates="cosine")),
    (dict(mask_schedule="linear", min_rate=0.0, max_rate=1.0), dict(rates="uniform")),
    (dict(min_rate=0.3, max_rate=0.8), dict(rates="0.3-0.8")),
    (dict(max_rate=1e-6), dict(rates="0-1e-06")),
    (dict(mask_schedule="cosine", max_rate=0.5), dict(rates="cosine:0-0.5")),
    (dict(end_token="[EOT]"), dict(end="[EOT]")),
    (dict(end_token="", end_id=-1), {}),
    (dict(end_id=0), dict(end="0")),
    (
        dict(whole=0.5, block_length=8, lengths="learned"),
        dict(infill_share=0.5, block_length=8, document_length="predicted"),
    ),
    (dict(lengths="known"), dict(document_length="given")),
    (dict(lengths="learned"), dict(document_length="predicted")),
]


@pytest.mark.parametrize("former, now", FORMER, ids=str)
def test_former_names_mean_the_same(old_run, former, now):
    def read(settings):
        names = [*FORMER_NAMES, *now]
        change_config(old_run, lambda config: [config.pop(name, None) for name in names])
        change_config(old_run, lambda config: config.update(settings))
        return mdlm.read_config(old_run / "step-10")

    assert read(former) == read(now)
    words = [f"--{name}={value}" for name, value in former.items() if value not in ("", -1)]
    assert mdlm.parse_args(words) == now
    apart = [part for word in words for part in word.replace("_", "-").split("=")]
    assert mdlm.parse_args(apart) == now


def refusal(call, *args, **more):
    with pytest.raises(UserError) as e:
        call(*args, **more)
    assert "\n" not in str(e.value)
    return str(e.value)


def of_config(old_run, **settings):
    """The sentence with which a config.json with these settings is refused."""
    change_config(old_run, lambda config: config.update(settings))
    said = refusal(mdlm.load, old_run)
    change_config(old_run, lambda config: [config.pop(name) for name in settings])
    assert "config.json" in said
    return said


@pytest.mark.parametrize("row", ALIASES["mdlm"], ids=lambda row: "-".join(row[1]))
def test_a_former_and_a_present_name_together_are_refused(old_run, row):
    """In each way to give settings, and both are named: neither wins silently."""
    new, former, _ = row
    value = dict(rates="cosine", end="5", infill_share=0.5, document_length="given")[new]
    for name, default in former.items():
        said = of_config(old_run, **{name: default, new: value})
        assert name in said and new in said
        if default != "":
            said = refusal(mdlm.parse_args, [f"--{name}={default}", f"--{new}={value}"])
            assert f"--{name}" in said and f"--{new}" in said


def test_two_former_names_of_one_setting_are_refused(old_run):
    for both in (dict(end_token="[EOT]", end_id=5), dict(end_id=0, end_token="x")):
        said = of_config(old_run, **both)
        assert "end_token" in said and "end_id" in said
        for words in ([f"--{name}={value}" for name, value in both.items()], ["--end_token=x"]):
            words = words if len(words) > 1 else [*words, "--end_id=-1"]
            said = refusal(mdlm.parse_args, words)
            assert "--end_token" in said and "--end_id" in said and "--rates" not in said
    said = refusal(mdlm.parse_args, ["--whole=0.5", "--min_rate=0.3", "--rates=0.1-0.2"])
    assert "--whole" not in said


def test_python_callers_may_not_give_two_names_of_one_setting(old_run):
    model, tokenizer, _ = mdlm.load(old_run)
    x = torch.full((2, 32), model.mask_id)
    for call, given in ((sample.generate, (x,)), (sample.write, (tokenizer, "a█"))):
        said = refusal(call, model, *given, distance=2, spacing=4)
        assert "distance" in said and "spacing" in said
        assert "distance" in refusal(call, model, *given, distance="2")


WRONG = {str: (5, None, True, ["x"]), float: ("0.5", None, True, [1]), int: ("5", 5.5, True, None)}


@pytest.mark.parametrize("name", FORMER_NAMES)
def test_wrong_types_of_former_names_are_refused(old_run, name):
    kind = next(type(former[name]) for _, former, _ in ALIASES["mdlm"] if name in former)
    for value in WRONG[kind]:
        assert f"--{name}=" in of_config(old_run, **{name: value})


def test_former_default_is_a_value_on_resume(old_run, capsys):
    """--end_id=-1 asks for no [END]; a run that has one refuses that, as it does other ones."""
    change_config(old_run, lambda config: config.update(end_id=5))
    assert run_mdlm("--resume", f"--out_dir={old_run}", "--end_id=-1") == 2
    said = capsys.readouterr().err
    assert "--end_id=-1" in said
    change_config(old_run, lambda config: config.update(end_id=-1))
    assert mdlm.parse_args(["--end_id=-1"]) == {"end": ""}


@pytest.mark.parametrize(
    "words",
    [
        ["--whole=2"],
        ["--whole=x"],
        ["--min_rate=x"],
        ["--min_rate=0.9", "--max_rate=0.1"],
        ["--mask_schedule=wave"],
        ["--end_id=x"],
        ["--end_id=1.5"],
        ["--lengths=long"],
        ["--whole=0.5"],
        ["--end_id=7"],
        ["--lengths=learned"],
        ["--max_rate=0.5", "--objective=ar"],
    ],
    ids=" ".join,
)
def test_errors_name_the_flag_that_was_given(text_file, tmp_path, capsys, words):
    """Also the errors of what is checked after the flags alone."""
    out = tmp_path / "out"
    flags = [f"--data={text_file}", f"--out_dir={out}", "--max_steps=1", "--device=cpu"]
    assert run_mdlm(*flags, *words) == 2
    said = capsys.readouterr().err
    assert words[0] in said.replace("'", "") and said.count("\n") == 1
    assert run_mdlm(*flags, "--rates=7", "--infill_share=0.5", "--end=x") == 2
    assert "is now" not in capsys.readouterr().err


def test_former_names_are_not_shown(capsys):
    with pytest.raises(SystemExit):
        mdlm.parse_args(["--help=all"])
    shown = capsys.readouterr().out
    assert not [name for name in FORMER_NAMES if f"--{name} " in shown]


def test_new_runs_have_names_of_now_alone(short_run):
    content = json.loads((short_run / "step-4" / "config.json").read_text())
    names = {field.name for field in dataclasses.fields(mdlm.Config)}
    assert content["config"].keys() == names


def test_the_shipped_model_has_the_files_of_now():
    folder = ROOT / "weights" / "shakespeare"
    config = json.loads((folder / "config.json").read_text())["config"]
    now = dataclasses.asdict(mdlm.read_config(folder))
    assert config.items() <= now.items(), "a setting that is newer has its default"
    tokenizer = tokenizer_from_json(folder / "tokenizer.json")
    assert tokenizer.to_file() == (folder / "tokenizer.json").read_text(encoding="utf-8")
    weights = (folder / "model.safetensors").read_bytes()
    wanted = "c8023d52c809e0ab29ea1b7cb07aaec4fcc865803fa26790caab9e09c175dd4e"
    assert hashlib.sha256(weights).hexdigest() == wanted
