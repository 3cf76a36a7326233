"""Probabilities of texts and tokens equal direct computation, for every kind of model."""

import itertools
import json
import math
import time

import pytest
import torch
from conftest import Toy
from test_blocks import network
from test_sample import save_model

import sample
from nanomdlm.support import abilities
from nanomdlm.support.cli import entry
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.infill.likelihood import chain_rule
from nanomdlm.support.infill.probabilities import token_logprobs

V = 5
LETTERS = Tokenizer("char", "abcde")
WITH_END = Tokenizer("char", "abcd", end=True)  # [END] is 4

# kind -> (tokenizer, end_id of the model, settings)
KINDS = {
    "default": (LETTERS, None, {}),
    "ar": (LETTERS, None, dict(objective="ar")),
    "blocks of 4": (LETTERS, None, dict(block_length=4)),
    "blocks of 1": (LETTERS, None, dict(block_length=1)),
    "given lengths": (WITH_END, 4, {}),
    "learned lengths": (WITH_END, 4, dict(document_length="predicted")),
    "documents ar": (WITH_END, 4, dict(objective="ar")),
    "rates told": (LETTERS, None, dict(time_conditioning=True)),
}


def made(kind, T=16):
    """(model, tokenizer) of a kind: a float64 network with random weights."""
    tokenizer, end_id, settings = KINDS[kind]
    settings = dict(settings)
    model = network(settings.pop("block_length", 0), T, end_id, **settings)
    if kind == "rates told":  # a rate is float32
        model.float()
    return model, tokenizer


def context_of(model, tokenizer, text):
    """(1, L) ids of a text as a model sees it: with its [END], and what is unknown."""
    ids = tokenizer.encode(text)
    if tokenizer.end_id is not None and not abilities.knows_lengths(model):
        ids.append(tokenizer.end_id)
    n = len(ids)
    ids += [model.objective.pad_id] * (model.config.block_size - n)
    return torch.tensor([ids]), n


@pytest.mark.parametrize("kind", KINDS)
def test_score_is_the_chain_rule_in_float64(kind):
    """And the NELBO is above it, or the same where there is one order."""
    model, tokenizer = made(kind)
    for text in ("abcadbca", "ab", "abcdabcdabcdabc"):
        x, n = context_of(model, tokenizer, text)
        want = 0.0
        for i in range(n):
            xt = x.clone()
            if kind != "given lengths":
                xt[:, i:] = model.mask_id
            else:
                xt[:, i:n] = model.mask_id
            seen = x if "ar" in kind.split() else xt
            want += model(seen)[0, i].double().log_softmax(-1)[x[0, i]].item()
        (found,) = sample.score(model, tokenizer, text)
        assert found.tokens == n and found.logp == pytest.approx(want, abs=1e-5)
        if "ar" in kind.split() or kind == "blocks of 1":
            assert found.nelbo == pytest.approx(-want / n, abs=1e-6) and found.se < 1e-12
        else:
            assert found.nelbo > 0 and (found.se > 0 or n == 1)
    if tokenizer is LETTERS:
        ids = torch.tensor([tokenizer.encode(text)])
        assert found.logp == pytest.approx(chain_rule(model, ids).sum().item(), abs=1e-5)


def enumerated(ce, places):
    """The mean over l and all sets of l of these places of the mean of ce(set)."""
    means = []
    for size in range(1, len(places) + 1):
        sets = [*itertools.combinations(places, size)]
        means.append(sum(ce(s).mean().item() for s in sets) / len(sets))
    return sum(means) / len(means)


def test_bound_is_the_enumeration_at_three_tokens(world):
    tokenizer = Tokenizer("char", "abc")
    model = Toy(world.random, world.V, world.T)
    x = torch.tensor([[1, 0, 2, world.V]])

    def ce(hidden):
        xt = x.clone()
        xt[0, list(hidden)] = world.V
        logp = world.random(xt)[0].log_softmax(-1)
        return -logp[list(hidden)].gather(1, x[0, list(hidden)][:, None])

    want = enumerated(ce, range(3))
    (found,) = sample.score(model, tokenizer, "bac", passes=6000)
    assert abs(found.nelbo - want) < 4.5 * found.se < 0.05
    few = [sample.score(model, tokenizer, "bac", passes=8, seed=seed)[0] for seed in range(60)]
    nelbo, se = torch.tensor([(f.nelbo, f.se) for f in few], dtype=torch.float64).T
    assert nelbo.std() == pytest.approx(se.square().mean().sqrt().item(), rel=0.3)
    assert sample.score(model, tokenizer, "bac", passes=8, seed=3)[0] == few[3]


def test_bound_of_blocks_is_the_enumeration():
    """A block that is filled in part has the rest of it masked."""
    model = network(2, T=4)
    x = torch.tensor([[1, 0, 3, V]])

    def ce(hidden):
        xt = x.clone()
        xt[0, list(hidden)] = V
        logp = model(xt, x)[0].double().log_softmax(-1)
        return -logp[list(hidden)].gather(1, x[0, list(hidden)][:, None])

    want = (2 * enumerated(ce, [0, 1]) + enumerated(ce, [2])) / 3
    (found,) = sample.score(model, LETTERS, "bad", passes=2000)
    assert abs(found.nelbo - want) < 4.5 * found.se < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_is_given_all_that_the_model_sees(kind):
    model, tokenizer = made(kind)
    text = "abcadbcabd"
    ids = tokenizer.encode(text)
    x = context_of(model, tokenizer, text)[0]
    x[0, len(ids) :] = model.objective.pad_id
    (tokens,) = sample.logprobs(model, tokenizer, text, k=3)
    assert "".join(token.text for token in tokens) == text
    for i, token in enumerate(tokens):
        xt = x.clone()
        xt[0, i] = model.mask_id
        logp = model(x if "ar" in kind.split() else xt, x)[0, i].log_softmax(-1)
        assert token.logp == pytest.approx(logp[ids[i]].item(), abs=1e-5)
        p, best = logp.topk(3)
        assert [p for _, p in token.likeliest] == pytest.approx(p.tolist(), abs=1e-5)
        assert [t for t, _ in token.likeliest] == [tokenizer.piece(v) for v in best.tolist()]
        assert token.drawn is None


@pytest.mark.parametrize("kind", ["default", "ar", "blocks of 4"])
def test_long_texts(kind):
    """Scored in windows that begin anew; each token is seen in a whole context."""
    model, tokenizer = made(kind)
    text = "abcde" * 8
    whole, *parts = sample.score(model, tokenizer, [text, text[:16], text[16:32], text[32:]])
    assert whole.tokens == 40 and whole.logp == pytest.approx(sum(p.logp for p in parts))
    assert whole.nelbo * 40 == pytest.approx(sum(p.nelbo * p.tokens for p in parts))
    (tokens,) = sample.logprobs(model, tokenizer, text, k=1)
    i = 29
    start = {"default": 21, "ar": 14, "blocks of 4": 16}[kind]
    (near,) = sample.logprobs(model, tokenizer, text[start : start + 16], k=1)
    assert len(tokens) == 40 and tokens[i] == near[i - start]


def test_a_context_is_given():
    model, tokenizer = made("default")
    both, context, given = sample.score(model, tokenizer, ["abcabd", "abc", ("abc", "abd")])
    assert given.logp == pytest.approx(both.logp - context.logp, abs=1e-5) and given.tokens == 3
    assert sample.score(model, tokenizer, ("abc", "abd")) == [given]


def test_answers_are_given_their_prompt():
    tokenizer = WITH_END
    for S in (0, 4):
        model = network(S, 16, 4, prompt_column="prompt")
        (found,) = sample.score(model, tokenizer, ("abc", "dda"))
        ids = torch.tensor([[*tokenizer.encode("abc"), 4, *tokenizer.encode("dda"), 4]])
        assert found.tokens == 4
        assert found.logp == pytest.approx(chain_rule(model, ids).sum().item(), abs=1e-5)
        (tokens,) = sample.logprobs(model, tokenizer, "abc")
        assert [token.logp for token in tokens] == [None] * 3, "prompts are not learned"


# ---- What was drawn
@pytest.mark.parametrize("kind", ["default", "blocks of 4", "ar", "learned lengths"])
def test_draws_keep_their_probability(kind):
    """The last one of each position, as the steps of `unmask` show it."""
    model, tokenizer = made(kind)
    asked = dict(seed=5)
    made_texts = sample.write_with_logprobs(model, tokenizer, "ab", n=2, length=12, k=2, **asked)
    assert [text for text, _ in made_texts] == sample.write(
        model, tokenizer, "ab", n=2, length=12, **asked
    )
    x = torch.full((2, 12), model.mask_id)
    x[:, :2] = torch.tensor([0, 1])
    last = torch.full((2, 12), math.nan)
    for step in sample.unmask(model, x, end_id=tokenizer.end_id, **asked):
        for (row, i), logp in zip(step.drawn.nonzero().tolist(), step.logp):
            last[row, i] = logp[step.x[row, i]]
    for (text, tokens), row in zip(made_texts, last):
        assert "".join(token.text for token in tokens) == text
        drawn = [token.drawn for token in tokens]
        assert drawn[:2] == [None, None]
        assert drawn[2:] == pytest.approx(row[2 : len(drawn)].tolist(), abs=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("char"), Tokenizer("char", [*"abcde ."]))


def lines_of(capsys, *argv):
    capsys.readouterr()
    code = entry.run(sample.main, ["--device=cpu", *argv])
    said = capsys.readouterr()
    assert code == 0, said.err
    return [json.loads(line) for line in said.out.splitlines()]


def test_lines_of_json_have_all_tokens(run, capsys, tmp_path):
    (tmp_path / "batch").write_text("ab█ e\na[___]d█.\n")
    templates = ["ab█ e", "a[___]d█.", "[___]b[___]e█", "ab██c[___]"]
    flags = [f"--out_dir={run}", "--logprobs=2", "--max_gap=3"]
    several = [lines_of(capsys, *flags, "--json=-", f"--infill={t}") for t in templates[1:]]
    several.append(
        lines_of(capsys, f"--out_dir={run}", "--logprobs=2", f"--batch={tmp_path}/batch")
    )
    several.append(lines_of(capsys, *flags[:2], "--json=-", "--num_samples=2", "--infill=a██d"))
    several.append(lines_of(capsys, *flags[:2], "--json=-", "--prompt=ab", "--steps=2"))
    for line in itertools.chain(*several):
        tokens = line["logprobs"]
        assert "".join(token["text"] for token in tokens) == line["text"]
        assert all(token["logp"] < 0 and len(token["likeliest"]) == 2 for token in tokens)
        filled = [token["text"] for token in tokens if token["drawn"] is not None]
        assert "".join(filled) == "".join(line.get("fills", [line["text"][2:]]))
        assert all(token["drawn"] <= 0 for token in tokens if token["drawn"] is not None)
        assert all(keys == ["text", "drawn", "logp", "likeliest"] for keys in map(list, tokens))


@pytest.mark.parametrize("more", [[], ["--num_samples=1"], ["--threshold=0.3"]], ids=str)
def test_gaps_with_a_pattern_have_them_too(run, capsys, more):
    pytest.importorskip("outlines_core")
    flags = [f"--out_dir={run}", "--logprobs=1", "--json=-", *more]
    for template, given in (("a[___:b{1,4}]e█", "ae"), ("c[███:[ab]+] e", "c e")):
        (line,) = lines_of(capsys, *flags, f"--infill={template}")
        tokens = line["logprobs"]
        assert "".join(token["text"] for token in tokens) == line["text"]
        assert "".join(token["text"] for token in tokens if token["drawn"] is None) == given


def test_tokens_of_a_gap_have_what_they_cost_in_the_search(run, capsys):
    """Their log p when they were filled in, whose sum is that of the fill."""
    pytest.importorskip("outlines_core")
    flags = [f"--out_dir={run}", "--logprobs=1", "--json=-", "--infill=a[___|b|dd]c█e"]
    (line,) = lines_of(capsys, *flags)
    n = len(line["fills"][0])
    drawn = [token["drawn"] for token in line["logprobs"]]
    assert [each is not None for each in drawn] == [False] + [True] * n + [False, True, False]
    assert sum(filter(None, drawn)) == pytest.approx(math.log(line["p"]), abs=1e-4)


@pytest.mark.parametrize("asked", [dict(texts=""), dict(texts="axb"), dict(texts="a", passes=3)])
def test_wrong_texts_get_no_number(asked):
    with pytest.raises(ValueError):
        sample.score(*made("default"), **asked)


def test_answers_need_their_prompt():
    model = network(0, 16, 4, prompt_column="prompt")
    with pytest.raises(ValueError, match="give pairs"):
        sample.score(model, WITH_END, "abc")


def test_a_pair_of_numbers_is_not_one_number():
    """Of ids without a tokenizer: ("0 1", "2") goes on with 2, as ("0 1 ", "2") does."""
    numbers = Tokenizer("id", 20)
    for context, text in (("0 1", "2"), ("0 1 ", "2"), ("0 1", " 2")):
        assert numbers.encode_pair(context, text) == ([0, 1], [2])


def test_one_token_after_a_long_text_costs_one_sequence():
    """Not a pass over the text for each of its tokens: a server's clients wait for it."""
    model, tokenizer = made("default")
    ids = [0, 1, 2, 3] * 4000
    began = time.process_time()
    (token,) = token_logprobs(model, tokenizer, ids, first=len(ids) - 1)
    assert time.process_time() - began < 3  # quadratic: 10 s
    assert token.text == "d" and token.logp < 0
