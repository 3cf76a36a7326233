"""Evaluation is exact where it says so, honest about its error, repeatable, and drawn."""

import json
import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, Toy, chain_rule, read_log, run_mdlm

import common
import eval
import kernels
import mdlm
import pictures
import sample

CORPUS = SimpleNamespace(chars_per_token=2.0, entropy=None)


def lively(V=11, T=16, **more):
    """A real model with random weights, so that every part of it matters."""
    torch.manual_seed(0)
    config = mdlm.Config(n_layer=2, n_head=2, n_embd=32, block_size=T, dropout=0.0, **more)
    model = mdlm.Model(config, V, kernels.select("torch"))
    for p in model.parameters():
        p.data.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def drawn(world):
    """3,000 windows drawn from the world's p, and their -log p per token."""
    g = torch.Generator().manual_seed(0)
    which = torch.multinomial(world.p, 3000, replacement=True, generator=g)
    return world.x[which], -world.p.log()[which] / world.T


# ------------------------------------------------------------------------------------------------------------
# The numbers


def test_the_estimators_agree_where_the_likelihood_is_known(world, drawn):
    windows, truth = drawn
    r = eval.evaluate(Toy(world.exact, world.V, world.T), CORPUS, windows, passes=4, exact=True)
    assert r["exact"]["nll"] == pytest.approx(truth.mean().item(), abs=1e-6)
    assert r["exact"]["se"] == pytest.approx(truth.std().item() / 3000**0.5, abs=1e-6)
    assert abs(r["nelbo"] - r["exact"]["nll"]) < 4 * r["se"] and 0 < r["se"] < 0.03
    assert r["perplexity"] == pytest.approx(math.exp(r["nelbo"]))
    assert r["bpc"] == pytest.approx(r["nelbo"] / math.log(2) / 2)
    assert r["exact"]["bpc"] == pytest.approx(r["exact"]["nll"] / math.log(2) / 2)


def test_the_chain_rule_is_minus_log_p_window_by_window(world):
    nll = -sample.chain_rule(Toy(world.exact, world.V, world.T), world.x)
    assert torch.allclose(nll.sum(1), -world.p.log(), atol=1e-5)


def test_exact_equals_a_straightforward_loop(world):
    fast = -sample.chain_rule(Toy(world.random, world.V, world.T), world.x).mean(1)
    assert torch.allclose(fast, chain_rule(world.random, world.x, world.V, range(world.T)), atol=1e-6)

    model, windows = lively(), torch.randint(11, (3, 16), generator=torch.Generator().manual_seed(1))
    slow = torch.zeros(3, 16, dtype=torch.float64)
    with torch.no_grad():
        for w in range(3):
            for i in range(16):
                xt = windows[w].clone()
                xt[i:] = model.mask_id
                slow[w, i] = -model(xt[None])[0, i].double().log_softmax(-1)[windows[w, i]]
    assert torch.allclose(-sample.chain_rule(model, windows), slow, atol=1e-5)
    assert slow.std() > 0.1, "the positions differ, so that a mix-up would show"


def test_an_autoregressive_likelihood_is_exact_and_shifted_leaves_the_first_token_out(world, drawn):
    windows, truth = drawn

    def logits(xt):  # what the exact posterior says of token i, given the tokens to its left
        out = []
        for i in range(world.T):
            left = torch.full_like(xt, world.V)
            left[:, :i] = xt[:, 1 : i + 1]
            out.append(world.exact(left)[:, i])
        return torch.stack(out, 1)

    r = eval.evaluate(Toy(logits, world.V, world.T, objective="ar"), CORPUS, windows)
    assert r["nll"] == r["exact"]["nll"] == pytest.approx(truth.mean().item(), abs=1e-6)
    first = world.exact(torch.full((1, world.T), world.V))[0, 0][windows[:, 0]]  # log p of the first tokens
    shifted = (truth * world.T + first).mean().item() / (world.T - 1)
    assert r["ar_shifted"] == pytest.approx(shifted, abs=1e-6) != r["nll"]
    assert "nelbo" not in r and len(r["by_position"]["confidence"]) == world.T


@pytest.mark.parametrize("objective", ["mdlm", "ar"])
def test_evaluation_is_deterministic_and_does_not_depend_on_the_batch_size(objective):
    model, windows = lively(objective=objective), torch.randint(11, (50, 16))
    first, again = (eval.evaluate(model, CORPUS, windows, exact=True) for _ in range(2))
    assert first == again, "equal to the last bit"
    for B in (1, 7, 50):
        r = eval.measure(model, windows, batch_size=B)
        for key in ("nelbo", "nll", "se", "ar_shifted", "ce", "accuracy"):
            assert (key in r) == (key in first) and r.get(key) == pytest.approx(first.get(key), abs=1e-5)
        assert r["by_position"]["confidence"] == pytest.approx(first["by_position"]["confidence"], abs=1e-5)
        assert r["calibration"]["ece"] == pytest.approx(first["calibration"]["ece"], abs=1e-3)
    fast, slow = (-sample.chain_rule(model, windows[:4], batch_size=B) for B in (64, 5))
    assert torch.allclose(fast, slow, atol=1e-5)


def test_measuring_more_does_not_change_the_likelihood():
    model, windows = lively(), torch.randint(11, (50, 16))
    plain, r = mdlm.evaluate(model, windows, passes=4), eval.measure(model, windows, batch_size=64)
    assert {k: r[k] for k in plain} == plain


def test_calibration_and_the_curves_of_a_model_whose_confidence_is_known():
    T, windows = 8, torch.zeros(400, 8, dtype=torch.long)
    windows[:, 1::2] = 1  # the model always says 0, with p = 0.75: right at even positions
    logits = lambda xt: torch.tensor([math.log(3.0), 0.0]).expand(*xt.shape, 2)
    r = eval.measure(Toy(logits, 2, T), windows)
    assert r["by_position"]["confidence"] == pytest.approx([0.75] * T)
    assert r["by_position"]["accuracy"] == [1.0, 0.0] * (T // 2)
    c = r["calibration"]
    assert c["share"] == [0.0] * 7 + [1.0] + [0.0] * 2
    assert c["confidence"][7] == pytest.approx(0.75) and 0.45 < c["accuracy"][7] < 0.55
    assert c["ece"] == pytest.approx(0.75 - c["accuracy"][7])
    assert all(v is None for i, v in enumerate(c["accuracy"]) if i != 7)


def test_an_exact_posterior_is_calibrated_and_a_sharpened_one_is_not(world, drawn):
    ece = lambda logits: eval.measure(Toy(logits, world.V, world.T), drawn[0])["calibration"]["ece"]
    assert ece(world.exact) < 0.02
    assert ece(lambda xt: 3 * world.exact(xt)) > 0.1


def test_the_forward_process_masks_more_and_more_of_a_line_and_its_expected_share():
    t = torch.arange(6) / 5
    masked = pictures.mask(torch.zeros(6, 2000, dtype=torch.long), t, 7) == 7
    assert (masked[1:] | ~masked[:-1]).all(), "what is masked stays masked"
    sd = (t * (1 - t) / 2000).sqrt()
    assert ((masked.double().mean(1) - t).abs() <= 4 * sd + 1e-7).all()


# ------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def runs(pydoc, tmp_path_factory):
    """Runs of both objectives whose averaged and raw weights differ, and the text that they learned."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(pydoc[:20_000], encoding="utf-8")
    for objective in ("mdlm", "ar"):
        flags = [*TINY, "--max_steps=10", "--ema=0.9", "--warmup_steps=0", "--lr_schedule=constant"]
        flags += [f"--objective={objective}", "--eval_windows=16"]
        assert run_mdlm(f"--data={folder}/text.txt", *flags, f"--out_dir={folder}/{objective}") == 0
    shutil.copytree(folder / "mdlm" / "step-10", folder / "shipped")  # a checkpoint without its run
    (folder / "text.txt").rename(folder / "elsewhere.txt")
    return folder


def results(capsys, *flags):
    capsys.readouterr()
    assert common.run(eval.main, [*map(str, flags), "--json=-", "--pictures=none", "--windows=16"]) == 0
    return json.loads(capsys.readouterr().out)  # which refuses anything beside one JSON value


@pytest.mark.parametrize("objective, key", [("mdlm", "nelbo"), ("ar", "nll")])
def test_averaged_and_raw_weights_evaluate_to_what_the_run_logged(runs, capsys, objective, key):
    logged = read_log(runs / objective)[-1]
    averaged = results(capsys, f"--out_dir={runs}/{objective}", "--passes=4")
    raw = results(capsys, f"--out_dir={runs}/{objective}", "--passes=1", "--raw")
    assert (averaged["weights"], raw["weights"]) == ("ema", "raw")
    assert averaged[key] == pytest.approx(logged[f"val_{key}"], abs=1e-5)
    assert averaged["se"] == pytest.approx(logged[f"val_{key}_se"], abs=1e-5)
    assert averaged["bpc"] == pytest.approx(logged["val_bpc"], abs=1e-5)
    assert raw[key] == pytest.approx(logged[f"val_{key}_raw"], abs=1e-5)
    assert abs(raw[key] - averaged[key]) > 1e-3


def test_a_shipped_model_scores_a_text_that_is_split_as_in_training(runs, capsys):
    own = results(capsys, f"--out_dir={runs}/mdlm", "--exact")
    other = results(capsys, f"--out_dir={runs}/shipped", f"--data={runs}/elsewhere.txt", "--exact")
    same = own.keys() - {"checkpoint", "data"}
    assert {k: own[k] for k in same} == {k: other[k] for k in same}
    assert own["exact"]["windows"] == own["windows"] == 16
    (runs / "few.txt").write_text("the cat sat on the mat. " * 200)  # its own alphabet would be smaller
    assert results(capsys, f"--out_dir={runs}/shipped", f"--data={runs}/few.txt")["windows"] == 15


def test_json_goes_to_a_file_too_and_one_window_has_no_error(runs, capsys, tmp_path):
    flags = [f"--out_dir={runs}/mdlm", "--windows=1", "--exact", "--pictures=none"]
    assert common.run(eval.main, [*flags, f"--json={tmp_path}/r.json"]) == 0
    r = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity
    assert r["exact"]["se"] is None and r["exact"]["nll"] > 0 and r["windows"] == 1
    said = capsys.readouterr().out
    assert f"{r['nelbo']:.4f}" in said and f"{r['exact']['nll']:.4f}" in said


def test_the_pictures_are_drawn(runs, tmp_path, capsys):
    for objective, names in (
        ("mdlm", {"loss.png", "rates.png", "confidence.png", "forward.png", "predictions.png"}),
        ("ar", {"loss.png", "confidence.png", "predictions.png"}),
    ):
        folder = tmp_path / objective
        flags = [f"--out_dir={runs}/{objective}", "--windows=16", f"--pictures={folder}"]
        assert common.run(eval.main, flags) == 0
        assert {p.name for p in folder.iterdir()} == names
        assert all(p.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for p in folder.iterdir())
        assert str(folder / "loss.png") in capsys.readouterr().out


def test_a_checkpoint_without_its_run_gets_no_pictures_unless_they_are_asked_for(runs, tmp_path):
    flags = [f"--out_dir={runs}/shipped", f"--data={runs}/elsewhere.txt", "--windows=2"]
    before = sorted((runs / "shipped").iterdir())
    assert common.run(eval.main, flags) == 0
    assert sorted((runs / "shipped").iterdir()) == before
    assert common.run(eval.main, [*flags, f"--pictures={tmp_path}/p"]) == 0
    assert (tmp_path / "p" / "rates.png").exists()


def test_runs_are_compared_by_what_they_logged(runs, tmp_path, capsys):
    both = f"--compare={runs}/mdlm,{runs}/ar"
    assert common.run(eval.main, [both, f"--json={tmp_path}/r.json", f"--pictures={tmp_path}"]) == 0
    rows, said = json.loads((tmp_path / "r.json").read_text())["runs"], capsys.readouterr().out
    assert [row["objective"] for row in rows] == ["mdlm", "ar"]
    for row, key in zip(rows, ("val_nelbo", "val_nll")):
        last = read_log(row["run"])[-1]
        assert (row["value"], row["se"], row["step"]) == (last[key], last[f"{key}_se"], 10)
        assert f"{row['value']:.4f}" in said
    assert (tmp_path / "compare.png").stat().st_size > 10_000


def test_the_tour_goes_through_the_ideas_in_order_without_colours_in_a_pipe(runs):
    command = [sys.executable, str(ROOT / "eval.py"), "--tour", "--windows=16", "--pictures=none"]
    r = subprocess.run([*command, f"--out_dir={runs}/mdlm"], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    at = [r.stdout.find(f"{i}. ") for i in range(1, 9)]
    assert -1 not in at and at == sorted(at) and "\033" not in r.stdout
    assert "t = 0.4" in r.stdout and "ECE" in r.stdout and "python sample.py" in r.stdout[at[-1] :]


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert eval.paint("word", 1) == "word"
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert eval.paint("word", 1) == "\033[1mword\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert eval.paint("word", 1) == "word"


def test_without_matplotlib_the_numbers_come_and_one_sentence(runs, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert common.run(eval.main, [f"--out_dir={runs}/mdlm", "--windows=2", f"--pictures={tmp_path}/p"]) == 0
    said = capsys.readouterr()
    assert "NELBO" in said.out and said.err.count("\n") == 1 and "pip install matplotlib" in said.err
    eval.plot_losses([runs / "mdlm"], tmp_path / "loss.png")  # as a run ends
    assert "pip install matplotlib" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--out_dir=nowhere"], ["nowhere", "mdlm.py"]),
        (["--out_dir={runs}/shipped"], ["text.txt", "--data=FILE"]),
        (["--out_dir={runs}/shipped", "--data=missing.txt"], ["missing.txt", "text file"]),
        (["--out_dir={runs}/mdlm", "--data=patterns"], ["patterns", "vocabulary"]),
        (["--windows=0"], ["windows", "1"]),
        (["--passes=0"], ["passes", "1"]),
        (["--exactt"], ["--exactt", "--exact"]),
        (["--compare={runs}/mdlm", "--exact"], ["--compare", "--exact"]),
        (["--compare={runs}/shipped"], ["shipped", "log"]),
        (["--compare=,"], ["--compare"]),
        (["--tour", "--json=-"], ["--tour", "--json"]),
        (["--out_dir={runs}/ar", "--tour"], ["autoregressive", "--tour"]),
        (["--out_dir={runs}/mdlm", "--json=/nowhere/r.json"], ["/nowhere/r.json"]),
        (["--out_dir={runs}/mdlm", "--windows=2", "--pictures={runs}/elsewhere.txt/p"], ["--pictures"]),
        (["--device=warp"], ["warp", "cpu"]),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(runs, capsys, flags, words):
    capsys.readouterr()
    assert common.run(eval.main, [f.format(runs=runs) for f in flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said


def test_raw_weights_that_are_not_there_are_refused(runs, capsys):
    model, _, config = mdlm.load(runs / "mdlm")
    with pytest.raises(common.Refusal, match="--ema=0"):
        eval.load_raw(model, runs, mdlm.dataclasses.replace(config, ema=0.0))
    other = mdlm.Model(mdlm.dataclasses.replace(config, n_embd=64), model.vocab_size, model.ops)
    with pytest.raises(common.Refusal, match=r"came without .*leave --raw out"):
        eval.load_raw(model, runs, config)  # a folder without a state
    with pytest.raises(common.Refusal, match="raw weights"):
        eval.load_raw(other, runs / "shipped", config)


def test_tokens_of_any_tokenizer_are_shown_character_by_character(tmp_path):
    import text

    word = text.Tokenizer("word", [" the", "cat"], end=True)
    shown = pictures.pieces(word, [257, 256, 10, word.end_id])
    assert shown == ["cat", " the", "↵", "∎"]
    assert pictures.pieces(text.Tokenizer("id", 7), [3, 5]) == ["3 ", "5 "]
    cells = [("cat", True, "$x", 0.5), (" the", False, "", 0.9), ("↵", True, "↵", 1.0)]
    cells.append(("∎", True, "", 0.1))
    pictures.plot_predictions(cells * 20, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_the_logits_of_masked_positions_are_the_models(world):
    """What is shown of a text: half is masked, and there is what the model finds likeliest."""
    model = lively(V=5, T=20)
    tokenizer = SimpleNamespace(kind="char", end_id=None, decode=lambda ids: "abcde"[ids[0]])
    x0 = torch.randint(5, (20,), generator=torch.Generator().manual_seed(2))
    cells = pictures.predict(model, tokenizer, x0)
    masked = torch.tensor([c[1] for c in cells])
    assert "".join(c[0] for c in cells) == "".join("abcde"[i] for i in x0) and masked.sum() == 10
    with torch.no_grad():
        p = F.softmax(model(torch.where(masked, model.mask_id, x0)[None])[0], -1)
    for i in masked.nonzero()[:, 0].tolist():
        assert cells[i][2] == "abcde"[p[i].argmax()] and cells[i][3] == pytest.approx(p[i].max().item())
