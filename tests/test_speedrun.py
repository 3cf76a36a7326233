"""The judge of the speedrun believes the weights, not the log."""

import hashlib
import json

import pytest
import torch
from conftest import read_log, run_mdlm, sign, tiny_flags
from safetensors.torch import load_file, save_file

import eval
from support import cli, sources


@pytest.fixture
def entry(pydoc, tmp_path, monkeypatch):
    """A finished run on a text that stands in for tiny Shakespeare."""
    text = pydoc[:6000]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sources, "SHA256", hashlib.sha256(text.encode()).hexdigest())
    return train(tmp_path)


def train(tmp_path, *flags):
    out = tmp_path / f"out{len(flags)}"
    flags = tiny_flags("--max_steps=4", "--eval_windows=0", *flags)
    assert run_mdlm(f"--data={tmp_path / 'text.txt'}", *flags, f"--out_dir={out}") == 0
    return out


def judge(out, target=5):
    argv = [f"--out_dir={out}", f"--speedrun={target}", "--device=cpu", "--pictures=none"]
    return cli.run(eval.main, argv)


def rewrite_log(out, **changes):
    lines = read_log(out)
    lines[-1] |= changes
    (out / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_honest_entry_is_valid(entry, capsys):
    assert judge(entry) == 0
    last = read_log(entry)[-1]
    said = capsys.readouterr().out
    assert f"valid: {last['val_nelbo']:.4f} nats per character, 5.0 reached in" in said
    assert f"in {last['seconds']:.0f} s" in said
    assert judge(entry, target=1) == 2


def test_log_and_weights_must_agree(entry, capsys):
    rewrite_log(entry, val_nelbo=read_log(entry)[-1]["val_nelbo"] - 0.01)
    assert judge(entry) == 2
    assert "its log says" in capsys.readouterr().err


def test_other_weights_are_refused(entry, capsys):
    path = entry / "step-4" / "model.safetensors"
    tensors = load_file(path)
    tensors["head.weight"] += 0.1 * torch.randn(tensors["head.weight"].shape)
    save_file(tensors, path)
    sign(entry / "step-4")
    assert judge(entry) == 2
    assert "its log says" in capsys.readouterr().err


def test_other_evaluations_are_refused(entry, tmp_path, capsys):
    assert judge(train(tmp_path, "--objective=ar")) == 2
    assert "autoregressive" in capsys.readouterr().err
    argv = [f"--out_dir={entry}", "--speedrun=5", "--device=cpu", "--pictures=none", "--windows=2"]
    assert cli.run(eval.main, argv) == 2
    assert "2 windows are not all" in capsys.readouterr().err


def test_unfinished_run_is_refused(entry, capsys):
    rewrite_log(entry, step=3)
    assert judge(entry) == 2
    assert "no last evaluation" in capsys.readouterr().err


def test_head_start_is_refused(entry, tmp_path, capsys):
    assert judge(train(tmp_path, f"--init_from={entry}")) == 2
    assert "it began with" in capsys.readouterr().err


def test_claimed_characters_change_nothing(entry, capsys):
    path = entry / "data" / "meta.json"
    meta = json.loads(path.read_text())
    meta["characters"] = [10 * n for n in meta["characters"]]
    path.write_text(json.dumps(meta))
    assert judge(entry) == 0
    assert f"valid: {read_log(entry)[-1]['val_nelbo']:.4f}" in capsys.readouterr().out


def test_other_text_is_refused(entry, monkeypatch, capsys):
    monkeypatch.setattr(sources, "SHA256", "0" * 64)
    assert judge(entry) == 2
    assert "is not tiny Shakespeare" in capsys.readouterr().err
