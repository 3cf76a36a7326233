"""Calibration: one temperature per network, fitted to text that it has not learned."""

import json
import math
import random

import numpy as np
import pytest
import torch
from conftest import Toy, read_log, run_mdlm, saved, tiny_flags

import eval
import mdlm
import sample
from nanomdlm.support.cli import entry
from nanomdlm.support.data import sources
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.ensemble import Ensemble
from nanomdlm.support.run import calibration, checkpoint


@pytest.mark.parametrize("truth", [0.4, 0.8, 1.25, 2.5])
def test_the_fit_finds_the_temperature(world, truth):
    """Of texts drawn from a known distribution, and a network that is too sure of it, or not."""
    g = torch.Generator().manual_seed(1)
    windows = world.x[torch.multinomial(world.p, 4000, True, generator=g)]
    model = Toy(lambda xt: truth * world.exact(xt), world.V, world.T)
    assert calibration.fit(model, windows) == pytest.approx(truth, rel=0.04)


def test_likelihoods_use_it_and_the_network_does_not(short_run):
    model, tokenizer, config = mdlm.load(short_run)
    text = "The value of a class"
    x = torch.full((1, config.block_size), model.mask_id)
    before = model(x)
    plain = sample.score(model, tokenizer, text)[0]
    model.calibration = dict(temperature=1.5, source="a text")
    assert torch.equal(model(x), before)
    ids = tokenizer.encode(text)
    wanted = 0.0
    for i, id in enumerate(ids):
        xt = x.clone()
        xt[0, :i] = torch.tensor(ids[:i])
        wanted += (model(xt)[0, i] / 1.5).double().log_softmax(-1)[id].item()
    found = sample.score(model, tokenizer, text)[0]
    assert found.logp == pytest.approx(wanted, abs=1e-3) and found.logp != plain.logp
    assert sample.score(calibration.calibrated(model), tokenizer, text)[0] == found, "used once"
    (letters,) = sample.logprobs(model, tokenizer, "ab█"[:2], k=2)
    assert all(math.isfinite(letter.logp) for letter in letters)


def test_networks_together_have_each_its_own(short_run):
    models = [mdlm.load(short_run)[0] for _ in range(2)]
    models[0].calibration = dict(temperature=2.0, source="a text")
    both = Ensemble(models)
    x = torch.full((1, both.config.block_size), both.mask_id)
    view = both.objective.view(x)
    with torch.no_grad():
        p = [(models[0](view) / 2).softmax(-1), models[1](view).softmax(-1)]
        found = calibration.calibrated(both)(view).exp()
    assert torch.allclose(found, (p[0] + p[1]) / 2, atol=1e-6)
    assert calibration.temperature_of(both) == [2.0, 1.0]


def test_a_file_calibrates_a_checkpoint(run, pydoc, tmp_path, capsys):
    """The checkpoint stays intact and keeps it; a run's own text is refused."""
    new = tmp_path / "new.txt"
    text = pydoc[:6000]
    new.write_text(text.translate(str.maketrans("aeiou", "eioua")), encoding="utf-8")
    own = tmp_path / "own.txt"
    own.write_text(text[:3000], encoding="utf-8")
    flags = [f"--out_dir={run}", "--windows=16", "--passes=2"]
    assert entry.run(eval.main, [*flags, f"--calibrate={own}"]) == 2
    assert "learned" in capsys.readouterr().err
    assert entry.run(eval.main, [*flags, f"--calibrate={new}", "--json=-"]) == 0
    found = json.loads(capsys.readouterr().out)
    folder = checkpoint.find_checkpoint(run)
    checkpoint.verify(folder)
    assert not list(run.glob("*.old")) and checkpoint.read_latest(run) == folder.name
    model, _, _ = mdlm.load(run)
    assert model.calibration == dict(temperature=found["temperature"], source=found["source"])
    assert "new.txt" in found["source"]
    assert entry.run(eval.main, [*flags, "--json=-", "--pictures=none"]) == 0
    assert json.loads(capsys.readouterr().out)["temperature"] == found["temperature"]
    assert entry.run(eval.main, [*flags, "--temperature=1", "--json=-", "--pictures=none"]) == 0
    assert json.loads(capsys.readouterr().out)["temperature"] == 1


def test_a_run_holds_text_back_and_calibrates_its_checkpoints(text_file, tmp_path, capsys):
    out = tmp_path / "run"
    flags = tiny_flags(f"--data={text_file}", f"--out_dir={out}", "--max_steps=4")
    assert run_mdlm(*flags, "--calibration_share=0.25") == 0
    assert "calibrated: temperature" in capsys.readouterr().out
    model, _, config = mdlm.load(out)
    assert "held back" in model.calibration["source"] and config.calibration_share == 0.25
    ids = sources.of_config(out / "data", config)
    kept, held = sources.hold_back(ids, 0.25, config.block_size)
    n = len(ids.arrays[0])
    assert len(kept.arrays[0]) == n * 3 // 4 and len(held.arrays[1]) == n - n * 3 // 4
    assert (held.arrays[1] == ids.arrays[0][n * 3 // 4 :]).all()
    assert read_log(out) and saved(out)
    assert run_mdlm(*flags, "--calibration_share=0.1", "--resume") == 2
    assert "calibration_share" in capsys.readouterr().err
    assert run_mdlm(*flags, "--overwrite", "--calibration_share=0.00001") == 2
    assert "calibration_share" in capsys.readouterr().err


@pytest.fixture(scope="module")
def answering(tmp_path_factory):
    """(a run that learned short prompts with answers, which [END]s fill up; their file)"""
    folder = tmp_path_factory.mktemp("answering")
    r = random.Random(1)
    asked = ["".join(r.choices("abcdefgh", k=6)) for _ in range(300)]
    rows = [json.dumps(dict(q=q, a=f"xyz{q[0]}{q[0]}z")) + "\n" for q in asked]
    (folder / "qa.jsonl").write_text("".join(rows))
    flags = ["--prompt_column=q", "--text_column=a", "--block_size=48", "--max_steps=2"]
    flags = tiny_flags(f"--data={folder}/qa.jsonl", f"--out_dir={folder}/run", *flags)
    assert run_mdlm(*flags) == 0
    return folder / "run", folder / "qa.jsonl"


def test_a_prompt_is_held_back_with_its_answer(answering):
    out, _ = answering
    _, tokenizer, config = mdlm.load(out)
    ids = sources.of_config(out / "data", config)
    for share in (0.1, 0.1006, 0.25, 0.333):
        kept, held = sources.hold_back(ids, share, config.block_size, True)
        for part in (kept.arrays[0], held.arrays[1]):
            assert (part == tokenizer.end_id).sum() % 2 == 0 and part[-1] == tokenizer.end_id
        assert len(kept.arrays[0]) + len(held.arrays[1]) == len(ids.arrays[0])
    one = np.arange(200) % 9  # one document, which no part may cut
    one[one == tokenizer.end_id] = 0
    one[-1] = tokenizer.end_id
    with pytest.raises(UserError, match="calibration_share"):
        sources.hold_back(ids._replace(arrays=[one, one]), 0.25, 48)


def test_texts_that_fill_no_window_are_known_as_the_run_s_own(answering, tmp_path, capsys):
    out, own = answering
    flags = [f"--out_dir={out}", "--windows=16", "--passes=2"]
    assert entry.run(eval.main, [*flags, f"--calibrate={own}"]) == 2
    assert "learned" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(dict(q=q * 4, a="zyx")) + "\n" for q in "abcdefgh" * 9))
    assert entry.run(eval.main, [*flags, f"--calibrate={other}"]) == 0


def test_short_windows_that_occur_anywhere_are_not_the_run_s_own(tmp_path):
    r = random.Random(2)
    words = ["".join(r.choices("aeinost", k=r.randint(2, 6))) for _ in range(60)]
    for name, n in (("learned", 9000), ("new", 2000)):
        (tmp_path / name).write_text(" ".join(r.choices(words, k=n)))
    flags = tiny_flags(f"--data={tmp_path}/learned", f"--out_dir={tmp_path}/run", "--max_steps=1")
    assert run_mdlm(*[f for f in flags if "block" not in f], "--block_size=14") == 0
    flags = [f"--out_dir={tmp_path}/run", "--windows=16", "--passes=2"]
    assert entry.run(eval.main, [*flags, f"--calibrate={tmp_path}/new"]) == 0
    assert entry.run(eval.main, [*flags, f"--calibrate={tmp_path}/learned"]) == 2
