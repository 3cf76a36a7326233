"""--lora=R: adapters and the embedding of [MASK] are trained and saved, the rest stays as it is."""

import json
import shutil

import pytest
import torch
from conftest import StopAt, losses, run_mdlm, saved
from test_pretrained import auto, flags_of, folder_of, random_ids, some_text, tokenizer_of, view_of

import eval
import export
import mdlm
import sample
from nanomdlm.support.cli import entry, signals
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


def logits_of(model):
    ids = random_ids(model, 2, 12)
    ids[:, ::3] = model.mask_id
    with torch.no_grad():
        return ids, model(view_of(ids))


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_run_resumes_to_the_bit(kind, runs, folder_of, some_text, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(signals, "Interrupt", lambda: StopAt(2))
        assert run_mdlm(*flags_of(folder_of(kind), some_text, tmp_path / "cut", *MORE)) > 2
    assert run_mdlm("--resume", f"--out_dir={tmp_path / 'cut'}", "--device=cpu") == 0
    assert losses(tmp_path / "cut") == losses(runs(kind))
    first, second = (saved(path)[0] for path in (tmp_path / "cut", runs(kind)))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_frozen_weights_are_in_memory_once(folder_of, some_text, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(mdlm, "report", lambda run, *args, **more: runs.append(run))
    assert run_mdlm(*flags_of(folder_of("llama"), some_text, tmp_path / "run", *MORE)) == 0
    run = runs[0]
    assert run.averaged is not run.model
    for name in run.model.frozen:
        one, two = (m.get_parameter(name) for m in (run.model, run.averaged))
        assert one.data_ptr() == two.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_export_merges_the_adapters(kind, runs, some_text, tmp_path):
    """The library alone has the logits of the run, and a run can begin with it."""
    out = f"--out_dir={runs(kind)}"
    assert entry.run(export.main, [out, f"--dest={tmp_path / 'hf'}"]) == 0
    model, *_ = mdlm.load(runs(kind))
    model.config.shift = False
    ids, wanted = logits_of(model)
    theirs = auto(kind).from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        found = theirs(input_ids=ids).logits[..., : model.vocab_size]
    known = wanted[0, 0] > -torch.inf
    assert torch.allclose(found[..., known], wanted[..., known], atol=1e-4, rtol=1e-4)
    assert not any("lora" in name for name in theirs.state_dict())
    argv = flags_of(tmp_path / "hf", some_text, tmp_path / "again", "--max_steps=1")
    assert run_mdlm(*argv) == 0


def test_it_writes_fills_and_is_evaluated(runs, capfd):
    out = f"--out_dir={runs('llama')}"
    assert entry.run(sample.main, [out, "--infill", "the [___] of"]) == 0
    assert entry.run(eval.main, [out, "--windows=4", "--pictures=none"]) == 0
    assert "NELBO" in capfd.readouterr().out


def test_mistakes_get_one_sentence(runs, folder_of, some_text, tmp_path, capfd, monkeypatch):
    def said(*argv):
        assert run_mdlm(*argv) == 2
        return capfd.readouterr().err.strip().splitlines()[-1]

    folder = shutil.copytree(folder_of("llama"), tmp_path / "hf")
    new = flags_of(folder, some_text, tmp_path / "new", *MORE)
    network = [flag for flag in new if "init_from" not in flag] + [
        f"--network={folder}/config.json"
    ]
    network.append(f"--tokenizer={folder}/tokenizer.json")
    assert "--lora=2" in said(*network)
    assert "--lora" in said(*(flag for flag in new if "init_from" not in flag))
    assert "--lora" in said(*flags_of(runs("llama"), some_text, tmp_path / "new"))
    assert run_mdlm(*new) == 0
    (folder.rename(tmp_path / "moved"), folder.symlink_to(tmp_path / "moved"))  # as is advised
    assert mdlm.load(tmp_path / "new")
    (folder.unlink(), (tmp_path / "moved").rename(folder))
    for change, words in (
        (lambda: (folder / "model.safetensors").write_bytes(b"other"), "are not those that --lora"),
        (lambda: shutil.rmtree(folder), "the weights adapted by --lora are no longer in"),
    ):
        change()
        with pytest.raises(UserError, match=words):
            mdlm.load(tmp_path / "new")
        assert words in said("--resume", f"--out_dir={tmp_path / 'new'}", "--max_steps=9")
    path = checkpoint.find_checkpoint(runs("bert")) / "network.json"
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    said_last = said(*flags_of(folder_of("llama"), some_text, tmp_path / "none", *MORE))
    assert "peft" in said_last
    assert not (tmp_path / "none").exists() and path.exists()
