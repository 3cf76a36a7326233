"""Evaluation is exact where it says so, honest about its error, repeatable, and drawn."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, Toy, read_log, run_mdlm, sign
from safetensors.torch import load_file, save_file

import eval
import mdlm
from nanomdlm.kernels import operations as kernels
from nanomdlm.support.cli import entry
from nanomdlm.support.data import sources
from nanomdlm.support.infill import likelihood, model_calls
from nanomdlm.support.run import checkpoint, evaluation, plots

CORPUS = SimpleNamespace(chars_per_token=2.0, entropy=None)


def lively(V=11, T=16, **more):
    """A real model with random weights, so that every part of it matters."""
    torch.manual_seed(0)
    config = mdlm.Config(n_layer=2, n_head=2, n_embd=32, block_size=T, dropout=0.0, **more)
    model = mdlm.make_model(config, V, kernels.select("torch", "cpu"))
    for p in model.parameters():
        p.data.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def drawn(world):
    """3,000 windows drawn from the world's p, and their -log p per token."""
    g = torch.Generator().manual_seed(0)
    which = torch.multinomial(world.p, 3000, replacement=True, generator=g)
    return world.x[which], -world.p.log()[which] / world.T


# --------------------------------------------------------------------------------------------------
# The numbers


def test_estimates_agree_with_known_likelihood(world, drawn):
    windows, truth = drawn
    r = eval.evaluate(Toy(world.exact, world.V, world.T), CORPUS, windows, passes=4, exact=True)
    assert r["exact"]["nll"] == pytest.approx(truth.mean().item(), abs=1e-6)
    assert r["exact"]["se"] == pytest.approx(truth.std().item() / 3000**0.5, abs=1e-6)
    assert abs(r["nelbo"] - r["exact"]["nll"]) < 4 * r["se"] and 0 < r["se"] < 0.03
    assert r["perplexity"] == pytest.approx(math.exp(r["nelbo"]))
    assert r["bpc"] == pytest.approx(r["nelbo"] / math.log(2) / 2)
    assert r["exact"]["bpc"] == pytest.approx(r["exact"]["nll"] / math.log(2) / 2)


def test_autoregressive_likelihood_is_exact(world, drawn):
    windows, truth = drawn

    def logits(x):  # what the exact posterior says of token i, given the tokens to its left
        out = []
        for i in range(world.T):
            left = torch.full_like(x, world.V)
            left[:, :i] = x[:, :i]
            out.append(world.exact(left)[:, i])
        return torch.stack(out, 1)

    r = eval.evaluate(Toy(logits, world.V, world.T, objective="ar"), CORPUS, windows)
    assert r["nll"] == r["exact"]["nll"] == pytest.approx(truth.mean().item(), abs=1e-6)
    first = world.exact(torch.full((1, world.T), world.V))[0, 0][windows[:, 0]]
    shifted = (truth * world.T + first).mean().item() / (world.T - 1)  # without the first token
    assert r["ar_shifted"] == pytest.approx(shifted, abs=1e-6) != r["nll"]
    assert "nelbo" not in r and len(r["by_position"]["confidence"]) == world.T


def test_autoregressive_likelihood_of_some_tokens(world, drawn):
    """Of those that are scored, in some windows without the first one."""
    windows = drawn[0]
    scored = torch.rand(windows.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    scored[:, 2] = True
    r = mdlm.evaluate(Toy(world.random, 3, 4, objective="ar"), windows, scored=scored)
    shown = torch.nn.functional.pad(windows[:, :-1], (0, 1), value=3)  # the last token is not
    ce = -world.random(shown).log_softmax(-1).gather(2, windows[:, :, None])[:, :, 0]
    assert r["nll"] == pytest.approx(ce[scored].mean().item(), abs=1e-6)
    scored[:, 0] = False
    assert r["ar_shifted"] == pytest.approx(ce[scored].mean().item(), abs=1e-6)


@pytest.mark.parametrize("objective", ["mdlm", "ar"])
def test_results_repeat_at_any_batch_size(objective):
    model = lively(objective=objective)
    windows = torch.randint(11, (50, 16), generator=torch.Generator().manual_seed(2))
    first, again = (eval.evaluate(model, CORPUS, windows, exact=True) for _ in range(2))
    assert json.dumps(first) == json.dumps(again), "equal to the last bit"
    plain = mdlm.evaluate(model, windows, passes=4)
    observed = eval.evaluate(model, CORPUS, windows, batch_size=64)
    assert {k: observed[k] for k in plain} == plain, "measuring more changes nothing"
    for B in (1, 7):
        r = eval.evaluate(model, CORPUS, windows, batch_size=B)
        masks = r.pop("by_mask", {})
        for key in plain.keys() - {"by_mask"}:
            assert r[key] == pytest.approx(first[key], abs=1e-5)
        for key in masks:
            assert np.allclose(masks[key], first["by_mask"][key], atol=1e-5)
        confidence = first["by_position"]["confidence"]
        assert r["by_position"]["confidence"] == pytest.approx(confidence, abs=1e-5)
        assert r["calibration"]["ece"] == pytest.approx(first["calibration"]["ece"], abs=1e-3)
    fast, slow = (likelihood.chain_rule(model, windows[:4], batch_size=B) for B in (64, 5))
    assert torch.allclose(fast, slow, atol=1e-5)


def test_rates_belong_to_the_tenth_that_they_end():
    T = torch.tensor([1, 5, 5, 10])
    found = evaluation.by_tenths(
        torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1, 1, 5, 1]]), T
    )
    assert found[9] == 2.0, "all of 1 and of 5 tokens are 100 %"
    assert found[1] == 2.0 and found[0] == 4.0 and found[2:9] == [None] * 7


def test_calibration_of_a_known_confidence():
    def logits(xt):  # always says 0, with p = 0.75
        return torch.tensor([math.log(3.0), 0.0]).expand(*xt.shape, 2)

    windows = torch.zeros(400, 8, dtype=torch.long)
    windows[:, 1::2] = 1  # right at even positions
    r = eval.evaluate(Toy(logits, 2, 8), CORPUS, windows)
    assert r["by_position"]["confidence"] == pytest.approx([0.75] * 8)
    assert r["by_position"]["accuracy"] == [1.0, 0.0] * 4
    c = r["calibration"]
    assert c["share"] == [0.0] * 7 + [1.0] + [0.0] * 2
    assert c["confidence"][7] == pytest.approx(0.75) and 0.45 < c["accuracy"][7] < 0.55
    assert c["ece"] == pytest.approx(0.75 - c["accuracy"][7])
    assert all(math.isnan(v) for i, v in enumerate(c["accuracy"]) if i != 7)


def test_exact_posterior_is_calibrated_sharpened_not(world, drawn):
    for scale, low, high in ((1, 0.0, 0.02), (3, 0.1, 1.0)):
        model = Toy(lambda xt, scale=scale: scale * world.exact(xt), world.V, world.T)
        assert low <= eval.evaluate(model, CORPUS, drawn[0])["calibration"]["ece"] < high


# --------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def runs(pydoc, tmp_path_factory):
    """Runs of both objectives whose averaged and raw weights differ, and the text they learned."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(pydoc[:20_000], encoding="utf-8")
    flags = [*TINY, "--max_steps=10", "--ema=0.9", "--warmup_steps=0", "--lr_schedule=constant"]
    flags += [f"--data={folder}/text.txt", "--eval_windows=16"]
    for objective in ("mdlm", "ar"):
        out_dir = folder / objective
        assert run_mdlm(*flags, f"--objective={objective}", f"--out_dir={out_dir}") == 0
    shutil.copytree(folder / "mdlm" / "step-10", folder / "shipped")  # a checkpoint without its run
    (folder / "text.txt").rename(folder / "elsewhere.txt")
    return folder


def evaluate(*flags):
    return entry.run(eval.main, [str(flag) for flag in flags])


def results(capsys, *flags):
    capsys.readouterr()
    assert evaluate(*flags, "--json=-", "--pictures=none", "--windows=16") == 0
    return json.loads(capsys.readouterr().out)  # which refuses anything beside one JSON value


@pytest.mark.parametrize("objective, key", [("mdlm", "nelbo"), ("ar", "nll")])
def test_evaluation_repeats_what_the_run_logged(runs, capsys, objective, key):
    logged = read_log(runs / objective)[-1]
    averaged = results(capsys, f"--out_dir={runs}/{objective}", "--passes=4")
    assert averaged[key] == pytest.approx(logged[f"val_{key}"], abs=1e-5)
    assert averaged["se"] == pytest.approx(logged[f"val_{key}_se"], abs=1e-5)
    assert averaged["bpc"] == pytest.approx(logged["val_bpc"], abs=1e-5)


@pytest.mark.parametrize("objective, key", [("mdlm", "nelbo"), ("ar", "nll")])
def test_temperature_divides_the_logits(runs, capsys, tmp_path, objective, key):
    soft = shutil.copytree(runs / objective / "step-10", tmp_path / "soft")
    tensors = load_file(soft / "model.safetensors")
    tensors["head.weight"] /= 2
    save_file(tensors, soft / "model.safetensors")
    sign(soft)
    flags = [f"--data={runs}/elsewhere.txt", "--exact"]
    wanted = results(capsys, f"--out_dir={soft}", *flags)
    found = results(capsys, f"--out_dir={runs}/{objective}", "--temperature=2", *flags)
    plain = results(capsys, f"--out_dir={runs}/{objective}", *flags)
    assert (found["temperature"], plain["temperature"]) == (2.0, 1.0)
    for value in (lambda r: r[key], lambda r: r["exact"]["nll"], lambda r: r["calibration"]["ece"]):
        assert value(found) == pytest.approx(value(wanted), abs=1e-6)
        assert abs(value(found) - value(plain)) > 1e-3


def test_shipped_model_splits_text_as_in_training(runs, capsys):
    own = results(capsys, f"--out_dir={runs}/mdlm", "--exact")
    shipped = f"--out_dir={runs}/shipped"
    other = results(capsys, shipped, f"--data={runs}/elsewhere.txt", "--exact")
    same = own.keys() - {"checkpoint", "data"}
    assert {k: own[k] for k in same} == {k: other[k] for k in same}
    assert own["exact"]["windows"] == own["windows"] == 16
    (runs / "few.txt").write_text("the cat sat on the mat. " * 200)  # its own alphabet is smaller
    assert results(capsys, shipped, f"--data={runs}/few.txt")["windows"] == 15


def test_without_a_run_the_shipped_model_answers(runs, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "SHIPPED", runs / "shipped")
    assert results(capsys, f"--data={runs}/elsewhere.txt")["checkpoint"] == f"{runs}/shipped"


def test_json_file_has_no_infinity(runs, capsys, tmp_path):
    flags = [f"--out_dir={runs}/mdlm", "--windows=1", "--exact", "--pictures=none"]
    assert evaluate(*flags, f"--json={tmp_path}/r.json") == 0
    r = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert r["exact"]["se"] is None, "one window has no standard error"
    assert r["exact"]["nll"] > 0 and r["windows"] == 1
    said = capsys.readouterr().out
    assert f"{r['nelbo']:.4f}" in said and f"{r['exact']['nll']:.4f}" in said


def test_pictures_are_drawn_into_the_folder(runs, tmp_path, capsys):
    names = {"loss.png", "rates.png", "confidence.png", "predictions.png"}
    of_ar = {"loss.png", "confidence.png"}
    for objective, expected in (("mdlm", names), ("ar", of_ar)):
        folder = tmp_path / objective
        flags = [f"--out_dir={runs}/{objective}", "--windows=8", f"--pictures={folder}"]
        assert evaluate(*flags) == 0
        assert {p.name for p in folder.iterdir()} == expected
        assert all(p.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for p in folder.iterdir())
        assert str(folder / "loss.png") in capsys.readouterr().out


def test_text_is_masked_and_predicted(runs, tmp_path, capsys):
    text = "The cat\nsat on the mat."
    flags = [f"--out_dir={runs}/mdlm", f"--text={text}", "--rate=0.3", f"--json={tmp_path}/r.json"]
    assert evaluate(*flags) == 0
    r = json.loads((tmp_path / "r.json").read_text())
    assert "".join(token["text"] for token in r["tokens"]) == text
    hidden = torch.tensor([bool(token["mark"]) for token in r["tokens"]])
    assert hidden.sum() == round(0.3 * len(text))
    # What the model says where only these are masked.
    model, tokenizer, _ = mdlm.load(runs / "mdlm")
    x0 = torch.tensor([tokenizer.encode(text)])
    xt = model_calls.to_context(model, torch.where(hidden, model.mask_id, x0))
    best = model(xt)[0].argmax(-1)
    for i in hidden.nonzero()[:, 0].tolist():
        token = r["tokens"][i]
        assert token["likeliest"][0][0] == tokenizer.decode([best[i]])
        assert (token["mark"] == "+") == (best[i] == x0[0, i]) and len(token["likeliest"]) == 3
    said = capsys.readouterr().out
    # Accuracy and cross-entropy by mask rate are those of an evaluation of this text.
    scored = torch.arange(32)[None].expand(128, -1) < len(text)
    again = mdlm.evaluate(model, model_calls.to_context(model, x0).expand(128, -1), scored=scored)
    assert r["accuracy"] == pytest.approx(again["accuracy"], abs=1e-6)
    assert f"{r['ce'][4]:.2f}" in said


def test_checkpoint_without_log_stays_untouched(runs, monkeypatch):
    monkeypatch.setattr(plots, "figure", pytest.fail)
    before = sorted((runs / "shipped").iterdir())
    assert evaluate(f"--out_dir={runs}/shipped", f"--data={runs}/elsewhere.txt", "--windows=2") == 0
    assert sorted((runs / "shipped").iterdir()) == before


def test_compare_shows_what_runs_logged(runs, tmp_path, capsys):
    both = f"--compare={runs}/mdlm,{runs}/ar"
    assert evaluate(both, f"--json={tmp_path}/r.json", f"--pictures={tmp_path}") == 0
    rows = json.loads((tmp_path / "r.json").read_text())["runs"]
    said = capsys.readouterr().out
    assert [row["objective"] for row in rows] == ["mdlm", "ar"]
    for row, key in zip(rows, ("val_nelbo", "val_nll")):
        last = read_log(row["run"])[-1]
        assert (row["value"], row["se"], row["step"]) == (last[key], last[f"{key}_se"], 10)
        assert f"{row['value']:.4f}" in said
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    assert "one seed" in said


def test_compare_pairs_seeds(runs, tmp_path, capsys):
    """Groups of runs that differ in their seed alone: mean, spread, and paired differences."""
    for name in ("mdlm", "ar"):
        for seed, more in ((1, 0.1), (2, 0.3)):
            copy = shutil.copytree(runs / name, tmp_path / f"{name}{seed}")
            path = copy / "step-10" / "config.json"
            config = json.loads(path.read_text())
            config["config"] |= dict(seed=seed, out_dir=str(copy))
            path.write_text(json.dumps(config))
            log = copy / "log.jsonl"
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            key = "val_nll" if name == "ar" else "val_nelbo"
            lines[-1][key] = more + (seed == 2) * (0.05 if name == "ar" else 0)
            log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = [tmp_path / f"{name}{seed}" for name in ("mdlm", "ar") for seed in (1, 2)]
    flags = [f"--compare={','.join(map(str, names))}", "--json=-", "--pictures=none"]
    assert evaluate(*flags) == 0
    first, second = json.loads(capsys.readouterr().out)["seeds"]
    assert first["seeds"] == [1, 2] and first["runs"] == [str(name) for name in names[:2]]
    assert (first["mean"], first["spread"]) == pytest.approx((0.2, 0.02**0.5))
    assert second["difference"] == pytest.approx(0.025)
    assert second["se"] == pytest.approx(0.025)  # differences 0 and 0.05


@pytest.mark.parametrize(
    "flags, name",
    [
        (["--out_dir={runs}/shipped"], "text.txt"),
        (["--out_dir={runs}/mdlm", "--data=shakespeare"], "--data"),
    ],
)
def test_no_other_text_takes_the_place_of_a_missing_one(runs, capsys, monkeypatch, flags, name):
    def offline():
        raise OSError("no network")

    monkeypatch.setattr(sources, "shakespeare", offline)
    assert evaluate(*(flag.format(runs=runs) for flag in flags)) == 2
    assert name in capsys.readouterr().err
