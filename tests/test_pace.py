"""When a run ends, is evaluated and saved, what that costs, and what is shown meanwhile."""

import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, corpus_of, losses, read_log, run_mdlm, saved, sign, tiny_flags

import mdlm
from nanomdlm import variants
from nanomdlm.support.cli import settings
from nanomdlm.support.run import clock, session

ALWAYS = settings.NO_LIMIT


def records(out_dir):
    """The log without what a clock told."""
    told = ("seconds", "tokens_per_second", "phases")
    return [{k: v for k, v in r.items() if k not in told} for r in read_log(out_dir)]


# --------------------------------------------------------------------------------------------------
# The end


@pytest.mark.parametrize(
    "given, end",
    [
        ({}, (ALWAYS, 300.0)),
        ({"max_steps": 10}, (10, 0.0)),
        ({"time_limit": 60.0}, (ALWAYS, 60.0)),
        ({"max_steps": 10, "time_limit": 60.0}, (10, 60.0)),
        ({"time_limit": 0.0}, (5000, 0.0)),
        ({"preset": "gpu"}, (5000, 0.0)),
    ],
)
def test_plain_cpu_run_ends_by_time(given, end):
    config = mdlm.run_config.new(mdlm.Config, {"device": "cpu"} | given)
    assert (config.max_steps, config.time_limit) == end


@pytest.mark.parametrize(
    "before, given, end",
    [
        ((ALWAYS, 300.0), {}, (ALWAYS, 300.0)),
        ((ALWAYS, 300.0), {"max_steps": 9000}, (9000, 0.0)),
        ((ALWAYS, 300.0), {"time_limit": 600.0}, (ALWAYS, 600.0)),
        ((20, 0.0), {"max_steps": 30}, (30, 0.0)),
        ((20, 300.0), {"max_steps": 30}, (30, 300.0)),
    ],
)
def test_resumed_run_ends_as_it_is_told(before, given, end):
    names = ("max_steps", "time_limit")
    config = mdlm.Config(**dict(zip(names, before, strict=True)) | given)
    mdlm.run_config.choose_end(config, given, mdlm.Config(**dict(zip(names, before, strict=True))))
    assert (config.max_steps, config.time_limit) == end


def test_a_run_that_ended_by_the_clock_goes_on(run, capsys):
    """A run that ended by the clock goes on with --max_steps alone."""
    text = run.parent / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 60)
    flags = [f"--data={text}", *TINY, "--overwrite", f"--out_dir={run}", "--time_limit=1e9"]
    assert run_mdlm(*flags, "--max_steps=2") == 0  # it stands for one of five minutes
    path = run / "step-2" / "config.json"
    content = json.loads(path.read_text())
    content["config"] |= dict(max_steps=ALWAYS, time_limit=1e-3)
    path.write_text(json.dumps(content))
    sign(run / "step-2")
    capsys.readouterr()
    assert run_mdlm("--resume", f"--out_dir={run}") == 0
    assert run_mdlm("--resume", f"--out_dir={run}", "--max_steps=3") == 0
    assert read_log(run)[-1]["step"] == 3


# --------------------------------------------------------------------------------------------------
# No clock in a run of steps


def test_no_clock_enters_a_run_of_steps(text_file, tmp_path, monkeypatch):
    """Logs and weights are the same at any speed; a slow run saves more often."""
    flags = tiny_flags("--eval_interval=0", "--eval_windows=8", "--max_steps=50", "--ema=0.9")
    save = session.Session.save
    found = []
    for name, step in (("fast", 1e-4), ("slow", 20.0)):
        time_is = SimpleNamespace(now=0.0)
        saves = []

        def tick(time_is=time_is, step=step):
            time_is.now += step
            return time_is.now

        def counted(self, run, finished=False, saves=saves):
            saves.append(run.step)
            save(self, run, finished)

        monkeypatch.setattr(time, "monotonic", tick)
        monkeypatch.setattr(session.Session, "save", counted)
        assert run_mdlm(f"--data={text_file}", *flags, f"--out_dir={tmp_path / name}") == 0
        found.append(saves)
    assert records(tmp_path / "fast") == records(tmp_path / "slow")
    fast, slow = (saved(tmp_path / name)[0] for name in ("fast", "slow"))
    assert all(torch.equal(slow[name], t) for name, t in fast.items())
    assert set(found[0]) < set(found[1]), "saved at least every ten minutes"
    assert len(found[0]) in range(3, 11)


# --------------------------------------------------------------------------------------------------
# How often, and on how much


def a_run(**config):
    """What a clock asks of a run."""
    config = mdlm.Config(**config)
    objective = variants.choose(config, mdlm.MaskedDiffusion(config, 9))
    log = SimpleNamespace(decoder_windows=0)
    return SimpleNamespace(config=config, objective=objective, step=1, log=log)


@pytest.mark.parametrize("objective", ["mdlm", "ar"])
@pytest.mark.parametrize("batch_size", [16, 512])
@pytest.mark.parametrize("max_steps, fewest", [(1, 0), (57, 6), (5000, 9)])
def test_evaluations_take_three_percent_of_the_work(max_steps, fewest, batch_size, objective):
    run = a_run(max_steps=max_steps, batch_size=batch_size, objective=objective)
    it = clock.Clock(run.config, 0.0)
    on_the_way = sum(it.must_evaluate(step) for step in range(1, max_steps + 1))
    assert fewest <= on_the_way <= 9
    windows, calls = it.size(run, 435)
    assert windows >= 4
    scored = on_the_way * (2 * windows + clock.CALL_COST * calls)  # two networks, and the previews
    assert scored <= 0.03 * 3 * max_steps * batch_size


@pytest.mark.parametrize("seconds, calls", [(0.001, 64), (0.5, 13), (5.0, 0)])
def test_preview_takes_twenty_seconds_at_most(seconds, calls, monkeypatch):
    """Of a run that ends by steps, too: a window of a large network takes seconds on a CPU."""
    run = a_run(max_steps=100)
    run.eval_windows = 10
    budget = clock.Budget(None, 1, 64, 0.0, math.inf, math.inf)
    monkeypatch.setattr(time, "monotonic", lambda: 10 * seconds)  # ten windows have been scored
    results = dict(passes=1, windows=10)
    assert clock.Clock(run.config, 0.0).preview_calls(run, budget, results) == calls


# --------------------------------------------------------------------------------------------------
# Memory


def test_logits_of_an_evaluation_are_bounded(short_run, monkeypatch):
    model, _, config = mdlm.load(short_run)
    windows = corpus_of(short_run / "data", config, torch.device("cpu")).windows(15)
    sizes = []

    def observe(rows, targets, logits):
        sizes.append(logits.numel())

    at_once = mdlm.evaluate(model, windows, passes=2, observe=observe)
    whole = max(sizes)
    V = model.vocab_size
    for most in (40 * V, 3 * 32 * V):  # a window has 32 V at most: parts of one, a few
        monkeypatch.setattr(mdlm, "MAX_LOGITS", most)
        sizes.clear()
        r = mdlm.evaluate(model, windows, passes=2, observe=observe)
        assert max(sizes) <= most < whole
        assert r["nelbo"] == pytest.approx(at_once["nelbo"], abs=1e-6)
        assert r["by_window"] == pytest.approx(at_once["by_window"], abs=1e-5)
    monkeypatch.setattr(mdlm, "MAX_LOGITS", 5 * V)
    sizes.clear()
    assert mdlm.evaluate(model, windows)["windows"] == 15
    mdlm.evaluate(model, windows, observe=observe)
    assert max(sizes) <= 5 * V


# --------------------------------------------------------------------------------------------------
# What is counted; work that was not done


def test_tokens_are_those_of_text(tmp_path, capsys):
    """Documents of 4 and 12 letters fill windows of 32 up with [END], which is no text."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(["abcd", "efghijklmnop"] * 60))
    flags = [f"--data={text}", *TINY, "--separator=\\n", "--pack=false", "--max_steps=3"]
    assert run_mdlm(*flags, f"--out_dir={tmp_path / 'o'}") == 0
    corpus = corpus_of(tmp_path / "o" / "data", mdlm.load(tmp_path / "o")[2], torch.device("cpu"))
    windows, _ = corpus.take("train", torch.arange(corpus.W), 0)
    texts = (windows != corpus.tokenizer.end_id).sum(1) + 1.0  # each with its own [END]
    assert abs(texts.mean().item() - corpus.mean_size) < 0.02  # the last one may have none
    assert read_log(tmp_path / "o")[-1]["tokens"] == round(3 * 8 * corpus.mean_size) < 3 * 8 * 16
    assert (
        run_mdlm(*flags, f"--out_dir={tmp_path / 'p'}", "--objective=ar", "--document_length=given")
        == 0
    )
    assert losses(tmp_path / "p")
