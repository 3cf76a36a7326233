"""Prompts and answers (--prompt_column): a prompt is given, an answer is learned and written."""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, corpus_of, losses, run_mdlm, tiny_flags

import eval
import export
import mdlm
import sample
from nanomdlm.support.cli import entry
from nanomdlm.support.infill.likelihood import chain_rule

SOUNDS = {"cat": "meow", "a dog": "woof!", "the old cow": "moo", "me": "i am a model"}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags of records that say which animal says what."""
    pairs = [dict(q=q, a=a) for q, a in SOUNDS.items()]
    path = write(tmp_path_factory.mktemp("pairs") / "qa.jsonl", pairs * 200)
    return [f"--data={path}", "--prompt_column=q", "--text_column=a"]


def learn(data, out, *more):
    """A run that has learned it."""
    flags = tiny_flags("--n_embd=64", "--batch_size=16", "--max_steps=220", "--muon_lr=0.05")
    assert run_mdlm(*data, *flags, *more, f"--out_dir={out}") == 0
    return out


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    return learn(data, tmp_path_factory.mktemp("prompts") / "out")


@pytest.fixture(scope="module")
def run_in_blocks(data, tmp_path_factory):
    """In blocks of 4: none of the prompts, with their [END], ends where a block does but one."""
    return learn(data, tmp_path_factory.mktemp("blocks") / "out", "--block_length=4")


@pytest.mark.parametrize("kind", ["run", "run_in_blocks"])
def test_it_answers(kind, request, capsys):
    """With the length that an answer has: [END] is written too."""
    run = request.getfixturevalue(kind)
    capsys.readouterr()
    model, tokenizer, _ = mdlm.load(run)
    for q, a in SOUNDS.items():
        assert sample.write(model, tokenizer, q, n=2, temperature=0) == [f"{q}\n{a}"] * 2
        assert entry.run(sample.main, [f"--out_dir={run}", f"--prompt={q}", "--json=-"]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == f"{q}\n{a}"
    for flags, words in (
        (["--infill=cat███"], "give --prompt"),
        ([], "give --prompt"),
        (["--prompt=" + "cat" * 20], "shorten it"),
    ):
        assert entry.run(sample.main, [f"--out_dir={run}", *flags]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(ValueError, match="cannot fill"):
        sample.write(model, tokenizer, "cat███")
    exact = {}
    for q, a in itertools.product(SOUNDS, SOUNDS.values()):
        ids = [
            *tokenizer.encode(q),
            model.objective.end_id,
            *tokenizer.encode(a),
            model.objective.end_id,
        ]
        logp = chain_rule(model, torch.tensor([ids]))[0]
        assert (logp[: len(tokenizer.encode(q)) + 1] == 0).all(), "a prompt is not scored"
        exact[q, a] = logp.sum().item()
    for q in SOUNDS:
        assert max(SOUNDS.values(), key=lambda a: exact[q, a]) == SOUNDS[q]
        assert exact[q, SOUNDS[q]] > -0.3


def test_only_answers_are_learned(run):
    model, tokenizer, config = mdlm.load(run)
    E = model.objective.end_id
    x = torch.tensor([[1, 2, E, 3, 4, E, E], [E, 1, E, E, E, E, E]])
    scored = model.objective.scored_mask(x).int().tolist()
    assert scored == [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]]
    corpus = corpus_of(run / "data", config, torch.device("cpu"))
    samples = torch.arange(config.batch_size)
    first = {step: step * config.batch_size for step in range(5)}
    run = SimpleNamespace(corpus=corpus, objective=model.objective, sequences_before=first.get)
    for step in range(5):
        drawn = mdlm.draw_batch(run, step, 0.0, samples)
        x0, levels = drawn[:2]
        (xt, _, _, rows, *_), targets, share, _ = model.objective.batch(model.ops, *drawn)
        learned = model.objective.scored_mask(x0)
        assert not (xt == model.mask_id)[~learned].any()
        assert torch.equal((xt == model.mask_id).sum(1), levels)
        assert torch.equal(learned.sum(1), corpus.batch(step * config.batch_size + samples)[1])
        scored = rows[share > 0]
        assert learned.flatten()[scored].all() and len(scored) == levels.sum()
        assert torch.equal(targets[share > 0], x0.flatten()[scored])
        text = tokenizer.decode(x0[0].tolist())
        assert any(text == q + a for q, a in SOUNDS.items())


def test_answers_in_blocks_resume_and_are_evaluated(data, tmp_path, capsys):
    flags = [*data, *TINY, "--block_length=8", "--lr_schedule=constant", "--rate_margin=0"]
    for name, steps, more in (("a", 3, []), ("b", 6, []), ("c", 6, ["--infill_share=1"])):
        where = f"--out_dir={tmp_path / name}"
        assert run_mdlm(*flags, *more, f"--max_steps={steps}", where) == 0
    assert run_mdlm("--resume", "--max_steps=6", f"--out_dir={tmp_path / 'a'}") == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    plain = [flag for flag in flags if "block_length" not in flag]
    assert run_mdlm(*plain, "--max_steps=6", f"--out_dir={tmp_path / 'd'}") == 0
    assert losses(tmp_path / "c") == losses(tmp_path / "d"), "whole texts are those without blocks"
    capsys.readouterr()
    for more in ([], ["--whole", "--exact"]):
        settings = [
            f"--out_dir={tmp_path / 'c'}",
            "--json=-",
            "--pictures=none",
            "--windows=9",
            *more,
        ]
        assert entry.run(eval.main, settings) == 0
        r = json.loads(capsys.readouterr().out)
        assert r["block_length"] == (0 if more else 8)
        assert math.isfinite(r["nelbo"] + r["se"])


@pytest.mark.parametrize(
    ("program", "flags", "words"),
    [
        (sample, ["--infill=cat█"], "--prompt"),
        (eval, ["--text=cat"], "--text"),
        (export, ["--to=hf", "--dest={tmp}/x"], "--infill_share"),
    ],
)
def test_what_answers_in_blocks_cannot_do(run_in_blocks, tmp_path, capsys, program, flags, words):
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    assert entry.run(program.main, [f"--out_dir={run_in_blocks}", *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and words in said and not (tmp_path / "x").exists()


def test_nelbo_of_an_answer_by_enumeration(run):
    """Three tokens: the mean over l of the mean over sets of l tokens of the mean CE there."""
    model, tokenizer, _ = mdlm.load(run)
    q = "the old cow"
    T = len(q) + 4
    x0 = torch.tensor(
        [
            [
                *tokenizer.encode(q),
                model.objective.end_id,
                *tokenizer.encode("me"),
                model.objective.end_id,
            ]
        ]
    )
    total = 0.0
    for n in (1, 2, 3):
        sets = list(itertools.combinations(range(T - 3, T), n))
        for masked in map(list, sets):
            xt = x0.clone()
            xt[0, masked] = model.mask_id
            with torch.no_grad():
                logp = model(xt)[0].log_softmax(-1)
            total -= logp[masked, x0[0, masked]].mean().item() / len(sets) / 3
    r = mdlm.evaluate(model, x0.expand(600, -1), passes=3)
    each = torch.tensor(r["by_window"], dtype=torch.float64)
    assert total > 0.1 and abs(r["nelbo"] - total) < 4 * each.std() / 600**0.5


def test_chain_rule_hides_all_that_follows(run):
    model, tokenizer, config = mdlm.load(run)
    ids = [*tokenizer.encode("cat"), model.objective.end_id, *tokenizer.encode("moo")]
    ids += [model.objective.end_id] * (config.block_size - len(ids))
    found = chain_rule(model, torch.tensor([ids]))[0]
    for i in range(4, config.block_size):
        xt = torch.tensor([ids[:i] + [model.mask_id] * (config.block_size - i)])
        with torch.no_grad():
            logp = model(xt)[0, i].log_softmax(-1)[ids[i]].item()
        assert found[i].item() == pytest.approx(logp, abs=1e-4)


@pytest.mark.parametrize(
    "records, flags, words",
    [
        ([dict(q="what", a="x" * 40)] * 30, [], ["46", "--block_size=32"]),
        ([dict(a="what")] * 9, [], ["'q'", "a", "--prompt_column"]),
        ([dict(q="", a="b")] * 9, [], ["9 empty", "line 1"]),
        ([dict(q="c", a="b")] * 9, ["--objective=ar"], ["--prompt_column=q", "--objective=ar"]),
        ([dict(q="c", a="b")] * 9, ["--masking=bernoulli"], ["--prompt_column=q", "bernoulli"]),
        (None, [], ["text.txt", "columns"]),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, capsys, records, flags, words):
    data = tmp_path / "text.txt"
    data.write_text("a text")
    if records:
        data = write(tmp_path / "x.jsonl", records)
    out = tmp_path / "out"
    args = [f"--data={data}", "--prompt_column=q", "--text_column=a", f"--out_dir={out}"]
    capsys.readouterr()
    assert run_mdlm(*TINY, *args, *flags) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and all(word in said for word in words), said
    assert not out.exists()
