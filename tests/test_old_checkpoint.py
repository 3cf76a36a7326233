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
from nanomdlm.support.data.tokenizer import tokenizer_from_json
from nanomdlm.support.errors import UserError

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
    found = losses(old_run)[10:]
    assert found[0] == pytest.approx(WANTED["old"][0], rel=1e-5)
    # Muon's products of bfloat16 differ by processor: with and without instructions for it.
    assert found == pytest.approx(WANTED["old"], rel=1.5e-3)


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


FORMER = [  # what is said by names of before, and by names of now
    (dict(mask_schedule="cosine"), dict(rates="cosine")),
    (dict(min_rate=0.3, max_rate=0.8), dict(rates="0.3-0.8")),
    (dict(mask_schedule="cosine", max_rate=0.5), dict(rates="cosine:0-0.5")),
    (dict(end_token="[EOT]"), dict(end="[EOT]")),
    (dict(end_id=0), dict(end="0")),
    (
        dict(whole=0.5, block_length=8, lengths="learned"),
        dict(infill_share=0.5, block_length=8, document_length="predicted"),
    ),
    (dict(lengths="known"), dict(document_length="given")),
    (dict(log="wandb"), dict(tracker="wandb")),
]


@pytest.mark.parametrize("former, now", FORMER, ids=str)
def test_former_names_in_a_config_json_mean_the_same(old_run, former, now):
    def read(settings):
        names = [name for both in FORMER for side in both for name in side]
        change_config(old_run, lambda config: [config.pop(name, None) for name in names])
        change_config(old_run, lambda config: config.update(settings))
        return mdlm.run_config.read(mdlm.Config, old_run / "step-10")

    assert read(former) == read(now)


def test_new_runs_have_names_of_now_alone(short_run):
    content = json.loads((short_run / "step-4" / "config.json").read_text())
    names = {field.name for field in dataclasses.fields(mdlm.Config)}
    assert content["config"].keys() == names


def test_the_shipped_model_has_the_files_of_now():
    folder = ROOT / "weights" / "shakespeare"
    config = json.loads((folder / "config.json").read_text())["config"]
    now = dataclasses.asdict(mdlm.run_config.read(mdlm.Config, folder))
    assert config.items() <= now.items(), "a setting that is newer has its default"
    tokenizer = tokenizer_from_json(folder / "tokenizer.json")
    assert tokenizer.to_file() == (folder / "tokenizer.json").read_text(encoding="utf-8")
    weights = (folder / "model.safetensors").read_bytes()
    wanted = "c8023d52c809e0ab29ea1b7cb07aaec4fcc865803fa26790caab9e09c175dd4e"
    assert hashlib.sha256(weights).hexdigest() == wanted
