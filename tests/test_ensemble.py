"""Several networks, --out_dir=A,B, predict the mean of their probabilities, in every program."""

import json
import shutil

import pytest
import torch
from test_sample import save_model

import eval
import mdlm
import sample
from nanomdlm.support.cli import entry
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.ensemble import Ensemble
from nanomdlm.support.infill.shared_padding import compute_once

LETTERS = Tokenizer("char", [*"abcde"])
TEXT = "abcadbcaeabcddcbaabceabcdabcadbca" * 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two networks of different sizes."""
    folder = tmp_path_factory.mktemp("runs")
    small = save_model(folder / "small", LETTERS)
    return small, save_model(folder / "large", LETTERS, n_layer=2, n_embd=64, attention_every=2)


@pytest.fixture(scope="module")
def letters_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def named(runs):
    return ",".join(map(str, runs))


def evaluated(capsys, out_dir, *flags):
    """What eval.py --json says."""
    args = [f"--out_dir={out_dir}", "--pictures=none", "--json=-", *map(str, flags)]
    assert entry.run(eval.main, args) == 0
    return json.loads(capsys.readouterr().out)


def test_probabilities_are_the_mean(runs):
    both = mdlm.load(runs)[0]
    x = torch.randint(6, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mean = sum(mdlm.load(run)[0](x).softmax(-1) for run in runs) / 2
        torch.testing.assert_close(both(x).exp(), mean, rtol=1e-5, atol=1e-6)
        rows = torch.tensor([5, 40])  # and at chosen rows
        torch.testing.assert_close(both(x, rows=rows).exp(), mean.flatten(0, 1)[rows])
        quick = compute_once(both.eval())
        assert isinstance(quick, Ensemble) and quick is not both
        torch.testing.assert_close(quick(x).exp(), mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "task", ["--infill=abc███dab", "--infill=ab[___]cd", "--prompt=abc", "--fix"]
)
def test_sample_writes_with_all(runs, tmp_path, task, capsys):
    if task == "--fix":
        (tmp_path / "letters.txt").write_text(TEXT[:30])
        task = f"--fix={tmp_path / 'letters.txt'}"
        flags = [f"--output={tmp_path / 'out.txt'}"]
    else:
        flags = ["--json=-", "--seed=1"]
    assert entry.run(sample.main, [f"--out_dir={named(runs)}", task, *flags]) == 0
    captured = capsys.readouterr()
    assert "the mean of 2 networks: " in captured.err
    if "--json=-" in flags:
        text = json.loads(captured.out.splitlines()[0])["text"]
        assert set(text) <= set("abcde") and text[:2] == "ab"


def refused(out_dir, main=eval.main, *flags):
    """Check that a program refuses --out_dir, or a flag with it."""
    assert entry.run(main, [f"--out_dir={out_dir}", *flags]) == 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (dict(tokenizer=Tokenizer("char", [*"abcdf"])), "two vocabularies"),
        (dict(block_size=16), "two values of --block_size, 32 and 16"),
        (dict(objective="ar"), "two values of --objective, mdlm and ar"),
        (dict(block_length=4, document_length="predicted"), "writes block by block"),
    ],
)
def test_networks_that_do_not_fit_are_refused(runs, tmp_path, settings, says, capsys):
    settings = dict(settings)
    other = save_model(tmp_path / "other", settings.pop("tokenizer", LETTERS), **settings)
    refused(named([runs[0], other]))
    error = capsys.readouterr().err
    assert says in error and str(other) in error and error.count("\n") == 1
    with pytest.raises(UserError, match=says):
        mdlm.load([runs[0], other])


def test_a_folder_with_a_comma_is_one(runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "a,b")
    assert not isinstance(mdlm.load(folder)[0], Ensemble)
    assert not isinstance(mdlm.load(str(folder))[0], Ensemble)


@pytest.mark.parametrize("home", [False, True])
def test_nothing_is_written_over_what_the_second_learned(runs, tmp_path, monkeypatch, home, capsys):
    """Also where its path begins with ~/, which shells leave as it is there."""
    text = tmp_path / "learned.txt"
    text.write_text(TEXT)
    other = shutil.copytree(runs[0], tmp_path / "other")
    path = other / "step-1" / "config.json"
    settings = json.loads(path.read_text())
    settings["config"]["data"] = str(text)
    path.write_text(json.dumps(settings))
    monkeypatch.setenv("HOME", str(tmp_path))
    refused(f"{runs[0]},{'~/other' if home else other}", eval.main, f"--json={text}")
    assert str(other) in capsys.readouterr().err
    assert text.read_text() == TEXT


def test_temperature_divides_the_logits_of_the_mean(runs, letters_file, capsys):
    """Also in the exact likelihood, where texts are short and padding is computed once."""
    flags = (f"--data={letters_file}", "--exact", "--windows=4")
    cold, warm = (evaluated(capsys, named(runs), *flags, f"--temperature={t}") for t in (1, 2))
    model, tokenizer, _ = mdlm.load(runs)
    ids = torch.tensor(tokenizer.encode(letters_file.read_text()))
    windows = ids[int(0.9 * len(ids)) :][:32][None]
    assert cold["windows"] == warm["windows"] == 1
    for r, temperature in ((cold, 1), (warm, 2)):
        total = 0
        for i in range(32):
            xt = torch.where(torch.arange(32) < i, windows, model.mask_id)
            with torch.no_grad():
                logp = (model(xt)[0, i] / temperature).log_softmax(-1)
            total -= logp[windows[0, i]].item()
        assert r["exact"]["nll"] == pytest.approx(total / 32, abs=1e-4)


def test_documents_and_learned_lengths(tmp_path, capsys):
    tokenizer = Tokenizer("char", [*"abcd"], end=True)
    given = [save_model(tmp_path / f"given{n}", tokenizer, n_layer=n) for n in (1, 2)]
    learned = [
        save_model(tmp_path / f"learned{n}", tokenizer, n_layer=n, document_length="predicted")
        for n in (1, 2)
    ]
    for pair in (given, learned):
        for task in ("--infill=ab[___]cd", "--prompt=abc"):
            assert entry.run(sample.main, [f"--out_dir={named(pair)}", task, "--json=-"]) == 0
            assert json.loads(capsys.readouterr().out)["text"][:2] == "ab"
    refused(named([given[0], learned[0]]))
    assert "--document_length" in capsys.readouterr().err


def test_autoregressive_networks(tmp_path, letters_file, capsys):
    pair = [save_model(tmp_path / str(n), LETTERS, objective="ar", n_layer=n) for n in (1, 2)]
    first, second = (evaluated(capsys, run, f"--data={letters_file}")["nll"] for run in pair)
    both = evaluated(capsys, named(pair), f"--data={letters_file}")["nll"]
    assert both <= (first + second) / 2
    assert entry.run(sample.main, [f"--out_dir={named(pair)}", "--prompt=abc"]) == 0


def test_texts_that_differ_are_named(runs, tmp_path, letters_file, capsys):
    """A network may have learned what validates another."""
    other = save_model(tmp_path / "other", LETTERS, data="pydoc")
    mdlm.load([runs[0], other])
    error = capsys.readouterr().err
    assert "learned shakespeare" in error and "pydoc: if the texts differ" in error
    evaluated(capsys, named([runs[0], other]), f"--data={letters_file}")
    mdlm.load(runs)
    assert "differ" not in capsys.readouterr().err


def test_pictures_of_one_run_stay(trained, tmp_path, monkeypatch):
    """An evaluation of several networks draws into no run's folder."""
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(trained, tmp_path / "run")
    both = f"--out_dir={run / 'step-60'},{run / 'step-90'}"
    before = sorted(path.name for path in run.iterdir())
    assert entry.run(eval.main, [both, "--windows=2", "--passes=1"]) == 0
    assert sorted(path.name for path in run.iterdir()) == before
    flags = ["--windows=2", "--passes=1", "--pictures=drawn"]
    assert entry.run(eval.main, [both, *flags]) == 0
    assert "confidence.png" in {path.name for path in (tmp_path / "drawn").iterdir()}
