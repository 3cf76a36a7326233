"""--lora=R: adapters and the embedding of [MASK] are trained and saved, the rest stays as it is."""

import json
import shutil
import sys

import pytest
import torch
from conftest import run_mdlm, saved, tiers
from test_pretrained import (
    assert_exported,
    assert_resumes,
    auto,
    flags_of,
    folder_of,
    some_text,
    tokenizer_of,
)

import mdlm
from nanomdlm.support.cli.devices import load_in
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import checkpoint

pytest.importorskip("transformers")
pytest.importorskip("peft")
folder_of, some_text, tokenizer_of = folder_of, some_text, tokenizer_of  # fixtures
KINDS = ("bert", "gpt2", "llama", "gemma3_text")  # linear maps, those of GPT-2, scaled embeddings
MORE = ["--lora=2", "--learning_rate=0.01", "--dropout=0.1"]


@pytest.fixture(scope="module")
def runs(folder_of, some_text, tmp_path_factory):
    """A function: kind -> a run of four steps with adapters; not to be changed."""
    at = tmp_path_factory.mktemp("runs")

    def run(kind):
        if not (at / kind).exists():
            assert run_mdlm(*flags_of(folder_of(kind), some_text, at / kind, *MORE)) == 0
        return at / kind

    return run


@pytest.mark.parametrize("kind", tiers(KINDS, ["llama", "bert"]))
def test_only_adapters_are_trained_and_saved(kind, runs, folder_of):
    model, _, config = mdlm.load(runs(kind))
    assert (config.optimizer, config.lora) == ("adamw", 2)
    weights = {n: t for n, t in saved(runs(kind))[0].items() if not n.startswith("optimizer")}
    assert all("lora_" in n or n.endswith("mask_vector") for n in weights), [*weights]
    assert any(t.abs().sum() > 0 for name, t in weights.items() if "lora_B" in name), "it learned"
    theirs = auto(kind).from_pretrained(folder_of(kind)).state_dict()
    same = 0
    for name in model.frozen:
        now = model.get_parameter(name)
        was = theirs.get(name.removeprefix("body.").replace(".base_layer.", "."))
        if was is not None:
            same += 1
            assert torch.equal(now[: len(was)], was), name
    assert same > 8
    newest = checkpoint.find_checkpoint(runs(kind))
    size = (newest / "model.safetensors").stat().st_size
    assert size < (folder_of(kind) / "model.safetensors").stat().st_size / 3


def test_nothing_changes_before_the_first_step(folder_of, some_text, tmp_path):
    for name, more in (("plain", []), ("lora", MORE[:1])):
        argv = flags_of(folder_of("llama"), some_text, tmp_path / name, *more, "--max_steps=1")
        assert run_mdlm(*argv) == 0
    first = [
        json.loads((tmp_path / n / "log.jsonl").read_text().split("\n")[0])
        for n in ("plain", "lora")
    ]
    assert first[0]["step"] == 0
    assert first[0]["val_nelbo"] == pytest.approx(first[1]["val_nelbo"], abs=1e-5)


@pytest.mark.parametrize("kind", tiers(["bert", "llama"], ["llama"]))
def test_a_run_resumes_to_the_bit(kind, runs, folder_of, some_text, tmp_path, monkeypatch):
    argv = flags_of(folder_of(kind), some_text, tmp_path / "cut", *MORE)
    assert_resumes(argv, runs(kind), monkeypatch)


def test_the_frozen_weights_are_in_memory_once(folder_of, some_text, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(mdlm, "report", lambda run, *args, **more: runs.append(run))
    assert run_mdlm(*flags_of(folder_of("llama"), some_text, tmp_path / "run", *MORE)) == 0
    run = runs[0]
    assert run.averaged is not run.model
    for name in run.model.frozen:
        one, two = (m.get_parameter(name) for m in (run.model, run.averaged))
        assert one.data_ptr() == two.data_ptr()


@pytest.mark.parametrize("kind", tiers(KINDS, ["llama"], ["bert"]))
def test_export_merges_the_adapters(kind, runs, some_text, tmp_path):
    """The library alone has the logits of the run, and a run can begin with it."""
    theirs, _ = assert_exported(kind, runs(kind), tmp_path / "hf")
    assert not any("lora" in name for name in theirs.state_dict())
    argv = flags_of(tmp_path / "hf", some_text, tmp_path / "again", "--max_steps=1")
    assert run_mdlm(*argv) == 0


@torch.no_grad()
@pytest.mark.parametrize("kind", tiers(KINDS, ["gpt2"], ["gemma3_text"]))
def test_writing_merges_the_adapters(kind, runs):
    """sample.py and serve.py: the same logits, in as many layers as the network had."""
    before, after = mdlm.load(runs(kind))[0], load_in("float32", mdlm.load, runs(kind))[0]
    ids = torch.arange(2, 14)[None] % before.vocab_size
    ids[:, ::3] = before.mask_id
    assert torch.allclose(before(ids), after(ids), atol=1e-5)
    assert any("lora" in name for name, _ in before.named_modules())
    assert not any("lora" in name for name, _ in after.named_modules())


def test_other_weights_are_refused(folder_of, some_text, tmp_path, capfd):
    """A run goes on only with the weights that its adapters are for, wherever a link leads."""
    folder = shutil.copytree(folder_of("llama"), tmp_path / "hf")
    assert run_mdlm(*flags_of(folder, some_text, tmp_path / "run", *MORE)) == 0
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert mdlm.load(tmp_path / "run")
    for change in (
        lambda: (folder / "model.safetensors").write_bytes(b"other"),
        lambda: folder.unlink(),
    ):
        change()
        with pytest.raises(UserError, match=str(folder)):
            mdlm.load(tmp_path / "run")
        assert run_mdlm("--resume", f"--out_dir={tmp_path / 'run'}", "--max_steps=9") == 2
        assert str(folder) in capfd.readouterr().err


def test_adapters_need_weights_and_peft(runs, folder_of, some_text, tmp_path, capfd, monkeypatch):
    argv = flags_of(folder_of("llama"), some_text, tmp_path / "new", *MORE)
    nothing = [flag for flag in argv if "init_from" not in flag]
    network = [f"--network={folder_of('llama')}/config.json"]
    for flags in (nothing, nothing + network, flags_of(runs("llama"), some_text, tmp_path / "new")):
        assert run_mdlm(*flags) == 2
        assert "--lora" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "peft", None)
    assert run_mdlm(*argv) == 2
    assert "peft" in capfd.readouterr().err
    assert not (tmp_path / "new").exists()
