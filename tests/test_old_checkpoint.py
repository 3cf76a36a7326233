"""Checkpoints of earlier versions load, sample and resume.

checkpoint_e2302bb.tar.xz is a run that commit e2302bb (before this layout) stopped at step 10 of
20, checkpoint_e2302bb.json the losses of its next five steps.
"""

import hashlib
import json
import shutil

import pytest
import torch
from conftest import ROOT, losses, run_mdlm, sign

import mdlm
import sample
from support.errors import UserError

DATA = ROOT / "tests" / "data"


@pytest.fixture
def old_run(tmp_path):
    shutil.unpack_archive(DATA / "checkpoint_e2302bb.tar.xz", tmp_path / "old")
    return tmp_path / "old"


def change_config(run, change):
    path = run / "step-10" / "config.json"
    content = json.loads(path.read_text())
    change(content["config"])
    path.write_text(json.dumps(content))
    sign(run / "step-10")


def test_old_checkpoint_loads_and_samples(old_run, capsys):
    model, tokenizer, config = mdlm.load(old_run)
    assert (config.n_layer, config.n_embd, config.block_size) == (2, 32, 32)
    x = torch.full((2, 32), model.mask_id)
    for generate in (sample.generate, mdlm.generate):
        out = generate(model, x, steps=8, generator=torch.Generator().manual_seed(0))
        assert len(tokenizer.decode(out[0].tolist())) == 32
    assert capsys.readouterr().err == "", "no warning: its retired settings had their defaults"


def test_old_checkpoint_resumes_with_its_losses(old_run):
    wanted = json.loads((DATA / "checkpoint_e2302bb.json").read_text())["losses"]
    assert run_mdlm("--resume", f"--out_dir={old_run}") == 0
    assert losses(old_run)[0] == pytest.approx(wanted[0], rel=1e-5)
    # Since then Muon treats each head apart, from the same moments.
    assert losses(old_run)[1:5] == pytest.approx(wanted[1:], rel=1e-3)
    assert len(losses(old_run)) == 10


def test_retired_settings_are_ignored_with_a_warning(old_run, capsys):
    change_config(old_run, lambda config: config.update(momentum=0.8))
    mdlm.load(old_run)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "momentum=0.8 is ignored" in said


def test_missing_settings_get_their_defaults(old_run):
    change_config(old_run, lambda config: [config.pop(name) for name in ("conv", "grad_clip")])
    _, _, config = mdlm.load(old_run)
    assert (config.conv, config.grad_clip) == (5, 1.0)


def test_unknown_settings_are_refused(old_run):
    change_config(old_run, lambda config: config.update(of_the_future=1))
    with pytest.raises(UserError, match="of_the_future"):
        mdlm.load(old_run)


def test_shipped_config_is_unchanged():
    content = (ROOT / "weights" / "shakespeare" / "config.json").read_bytes()
    wanted = "b1ac5d7260c1b857e7a06cc10013e63bb4afb81b904a22d72893ed69abdb4d79"
    assert hashlib.sha256(content).hexdigest() == wanted
