"""eval.py --compare=a.json,b.json: the paired difference of two evaluations, with its error."""

import json
import statistics

import numpy as np
import pytest
import torch
from conftest import run_mdlm, tiny_flags

import eval
from nanomdlm.support import numerics
from nanomdlm.support.cli import entry
from nanomdlm.support.run import comparing
from nanomdlm.support.run.evaluation import by_tenths, stratified_counts


def evaluation(seed, W=400, T=50, passes=2, hard=1.0, better=0.0, masks=0, **more):
    """What eval.py --json writes of a model that is `better` by so much: windows differ by `hard`,
    the rest is noise of this seed."""
    masked = stratified_counts(torch.full((W, 1), T), passes, masks)[..., 0]
    g = np.random.default_rng(seed)
    windows = hard * np.random.default_rng(99).standard_normal(W)
    ce = 3 + windows + 0.1 * g.standard_normal((passes, W)) - better
    values = torch.tensor(ce)
    r = dict(checkpoint=f"run/step-{seed}", crc=1, tokenizer=2, block_size=T)
    r |= dict(tokens_by_window=[T] * W, by_window=ce.mean(0).tolist(), nelbo=ce.mean())
    r |= dict(by_mask=dict(masked=masked.tolist(), ce=ce.tolist()))
    return r | dict(ce=by_tenths(values, masked, torch.full((W,), T))) | more


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """A function of two evaluations: what --compare has of the second."""
    monkeypatch.chdir(tmp_path)

    def call(a, b):
        for name, r in (("a.json", a), ("b.json", b)):
            (tmp_path / name).write_text(json.dumps(r))
        return comparing.compare(["a.json", "b.json"])["runs"][0]

    return call


def test_difference_is_the_mean_over_windows(compared):
    """As numpy says it, and 14 times as sharp as without the pairs."""
    a, b = evaluation(1), evaluation(2, better=0.02, masks=1)
    r = compared(a, b)["bound"]
    more = np.subtract(b["by_window"], a["by_window"])
    assert r["difference"] == pytest.approx(more.mean())
    assert r["se"] == pytest.approx(more.std(ddof=1) / len(more) ** 0.5)
    assert r["se"] < 0.1 * numerics.standard_error(torch.tensor(a["by_window"]))


def test_error_says_how_far_the_difference_is_off(compared):
    """Over 200 pairs of models, the difference is off by 1 standard error on average."""
    z = []
    for seed in range(200):
        r = compared(evaluation(seed, W=64), evaluation(1000 + seed, W=64, better=0.02))["bound"]
        z.append((r["difference"] + 0.02) / r["se"])
    assert abs(statistics.mean(z)) < 4 / 200**0.5
    assert 0.85 < statistics.stdev(z) < 1.15


def test_error_over_blocks_holds_where_neighbors_are_alike(compared):
    """Losses that drift: over windows the error is too small, over blocks it is right."""
    z = {"se": [], "se_blocks": []}
    for seed in range(200):
        pair = [evaluation(1, W=400), evaluation(1, W=400)]
        drift = np.repeat(np.random.default_rng(seed).normal(size=100), 4) / 10
        pair[1]["by_window"] = (np.array(pair[0]["by_window"]) + drift).tolist()
        for r in pair:
            del r["by_mask"]
        found = compared(*pair)["bound"]
        for name, ratios in z.items():
            ratios.append(found["difference"] / found[name])
    assert statistics.stdev(z["se"]) > 1.7
    assert 0.85 < statistics.stdev(z["se_blocks"]) < 1.2
    assert numerics.block_error(torch.ones(39)) == float("inf")


def test_what_the_counts_explain_is_no_error(compared):
    """A difference that depends on the mask rate alone is known, as both have the same rates."""
    a = evaluation(1)
    b = json.loads(json.dumps(a))
    masked = np.array(a["by_mask"]["masked"])
    b["by_mask"]["ce"] = (np.array(a["by_mask"]["ce"]) + masked / 50).tolist()
    b["by_window"] = np.mean(b["by_mask"]["ce"], 0).tolist()
    same = compared(a, b)["bound"]
    del b["by_mask"]
    without = compared(a, b)["bound"]
    assert same["difference"] == pytest.approx(masked.mean() / 50)
    assert same["difference"] == pytest.approx(without["difference"])
    assert same["se"] < 0.2 * without["se"]


def test_long_windows_count_for_more(compared):
    """Per token: the difference of the sums over windows of different lengths, and its error."""
    g = np.random.default_rng(0)
    tokens = g.integers(1, 50, 300)
    weight = tokens / tokens.mean()
    pair = []
    for seed in (1, 2):
        r = evaluation(seed, W=300)
        del r["by_mask"]
        r["tokens_by_window"] = tokens.tolist()
        r["by_window"] = (weight * r["by_window"] * (0.9 if seed == 2 else 1)).tolist()
        pair.append(r)
    r = compared(*pair)["bound"]
    sums = [np.array(x["by_window"]) / weight * tokens for x in pair]  # nats of a window
    assert r["difference"] == pytest.approx((sums[1] - sums[0]).sum() / tokens.sum())
    some = [g.integers(300, size=300) for _ in range(2000)]
    resampled = [(sums[1] - sums[0])[at].sum() / tokens[at].sum() for at in some]
    assert r["se"] == pytest.approx(np.std(resampled), rel=0.1)


def test_difference_by_mask_rate(compared):
    a, b = evaluation(1), evaluation(2, better=0.02)
    rates = compared(a, b)["by_rate"]
    for tenth, before, after in zip(rates, a["ce"], b["ce"]):
        assert tenth["difference"] == pytest.approx(after - before)
    z = []
    for seed in range(60):
        a, b = evaluation(seed, W=100, passes=12), evaluation(500 + seed, W=100, passes=12)
        z += [tenth["difference"] / tenth["se"] for tenth in compared(a, b)["by_rate"]]
    assert 0.9 < statistics.stdev(z) < 1.1, "also where a window is in a tenth several times"
    other = compared(a, evaluation(2, masks=1, W=100, passes=12))
    assert "by_rate" not in other, "masks that differ are not paired"


@pytest.fixture(scope="module")
def evaluated(text_file, tmp_path_factory):
    """A folder with evaluations of two runs, mdlm.json and ar.json, of their own text."""
    folder = tmp_path_factory.mktemp("evaluated")
    for name in ("mdlm", "ar"):
        flags = [f"--data={text_file}", f"--objective={name}", "--max_steps=3"]
        assert run_mdlm(*tiny_flags(*flags, f"--out_dir={folder}/{name}")) == 0
        run = [f"--out_dir={folder}/{name}", f"--json={folder}/{name}.json"]
        assert entry.run(eval.main, [*run, "--exact", "--windows=40", "--pictures=none"]) == 0
    return folder


def test_files_are_compared_window_by_window(evaluated, capsys, monkeypatch):
    monkeypatch.chdir(evaluated)
    a, b = (json.loads((evaluated / f"{name}.json").read_text()) for name in ("mdlm", "ar"))
    assert len(a["by_window"]) == 40 and len(a["by_mask"]["ce"]) == 4
    assert sum(a["by_window"]) / 40 == pytest.approx(a["nelbo"])
    assert sum(a["exact"]["by_window"]) / 40 == pytest.approx(a["exact"]["nll"])
    capsys.readouterr()
    assert entry.run(eval.main, ["--compare=mdlm.json,ar.json", "--json=-"]) == 0
    r = json.loads(capsys.readouterr().out)
    assert (r["first"], r["windows"]) == ("mdlm.json", 40)
    for name, key in (("bound", "nll"), ("exact", "exact")):
        more = r["runs"][0][name]["difference"]
        after, before = (b["nll"], a["nelbo"]) if key == "nll" else (b["nll"], a["exact"]["nll"])
        assert more == pytest.approx(after - before)
    assert entry.run(eval.main, ["--compare=mdlm.json,ar.json"]) == 0
    said = capsys.readouterr().out
    assert f"NLL against NELBO: {r['runs'][0]['bound']['difference']:+.4f} +- " in said
    assert f"exact: {r['runs'][0]['exact']['difference']:+.4f} +- " in said


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(crc=5), "b.json has other windows than a.json"),
        (dict(tokenizer=5), "b.json has another tokenizer than a.json"),
        (dict(block_size=7), "b.json has windows of another length than a.json"),
        (None, "b.json"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(tmp_path, monkeypatch, capsys, change, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(evaluation(1)))
    (tmp_path / "b.json").write_text(json.dumps(evaluation(2) | change if change else {}))
    assert entry.run(eval.main, ["--compare=a.json,b.json", "--json=r.json"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not (tmp_path / "r.json").exists()


def test_files_that_are_compared_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(evaluation(1)))
    before = (tmp_path / "b.json").read_bytes()
    assert entry.run(eval.main, ["--compare=a.json,b.json", "--json=b.json"]) == 2
    said = capsys.readouterr().err
    assert "--compare" in said and "--json" in said
    assert (tmp_path / "b.json").read_bytes() == before


def test_no_run_is_left_out_of_its_group():
    """Runs of one seed count once, by their mean, whatever their order."""
    rows = [dict(run=name, value=value) for name, value in zip("abcde", (1.0, 2.0, 4.0, 3.0, 5.0))]
    settings = [dict(seed=0, a=1), dict(seed=0, a=1), dict(seed=1, a=1)]
    settings += [dict(seed=0, a=2), dict(seed=1, a=2)]
    first, second = comparing.by_seed(rows, settings)
    assert first["runs"] == ["a", "b", "c"] and first["seeds"] == [0, 1]
    assert first["mean"] == (1.5 + 4.0) / 2
    assert second["difference"] == (1.5 + 1.0) / 2
