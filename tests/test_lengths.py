"""Lengths of a gap: one call says which are worth filling."""

import functools
import itertools
import json
import math
import re

import pytest
import torch
from conftest import ROOT, Toy, hashed_world

import sample
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.infill.lengths import score_lengths
from nanomdlm.support.infill.templates import Gap, encode_segments

LETTERS = list("abcde")
V = len(LETTERS)
T = 24
random_world = functools.partial(hashed_world, T, V)


def knowing(text, gap):
    """A model that knows a text. It predicts that unless what follows the gap stands elsewhere."""
    ids = torch.tensor([LETTERS.index(letter) for letter in text])
    known = torch.zeros(T, V)
    known[range(len(ids)), ids] = 12.0
    unsure = torch.zeros(T, V)

    def logits(xt):
        sees = xt[:, : len(ids)]
        fits = ((sees == ids) | (sees == V)).all(1)
        fits &= (xt[:, len(ids) :] == V).all(1)
        return torch.where(fits[:, None, None], known, unsure)

    model = Toy(logits, V, T)
    model.parameters = lambda: iter([torch.zeros(1)])
    return model, Tokenizer("char", LETTERS)


def shapes(before="ab", after="cde", lengths=range(1, 8)):
    """Segments of a text whose gap has each of some lengths."""
    tokenizer = Tokenizer("char", LETTERS)
    return [
        encode_segments([*[before] * bool(before), Gap(n), *[after] * bool(after)], tokenizer)
        for n in lengths
    ]


@pytest.mark.parametrize("after", ["cde", "c", ""])
def test_scores_are_log_probabilities_of_one_call(after):
    """The best fill by the marginals; the first token after the gap, its neighbors unseen."""
    model = random_world(1)
    for n, (next_token, inside) in enumerate(score_lengths(model, shapes(after=after), 1), 1):
        xt = torch.full((T,), V)
        xt[:2] = torch.tensor([0, 1])
        if len(after) > 4:
            xt[2 + n + 4 : 2 + n + len(after)] = torch.tensor([LETTERS.index(c) for c in after[4:]])
        logp = model.logits(xt[None])[0].log_softmax(-1)
        assert inside == pytest.approx(logp[2 : 2 + n].amax(-1).sum().item(), abs=1e-5)
        wanted = logp[2 + n, LETTERS.index(after[0])].item() if after else 0.0
        assert next_token == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("pattern", ["a*", "(ab|c)+", "[^a]b?"])
def test_of_a_gap_that_must_match_the_best_match_counts(pattern):
    pytest.importorskip("outlines_core")
    tokenizer = Tokenizer("char", LETTERS)
    model = random_world(2)
    (gap,) = encode_segments([Gap(pattern=pattern)], tokenizer)
    for n in gap.lengths(4):
        shape = encode_segments(["a", gap.of_length(n), "b"], tokenizer)
        ((_, found),) = score_lengths(model, [shape], 1)
        xt = torch.full((1, T), V)
        xt[0, 0] = 0
        logp = model.logits(xt)[0].log_softmax(-1)[1 : 1 + n]
        matches = [
            sum(logp[i, LETTERS.index(c)].item() for i, c in enumerate(text))
            for text in map("".join, itertools.product(LETTERS, repeat=n))
            if re.fullmatch(pattern, text)
        ]
        assert found == pytest.approx(max(matches), abs=1e-5)


def test_ids_that_are_never_predicted_make_no_nan():
    """Encoders of others have [MASK] among their ids, with a logit of -inf."""
    logits = torch.zeros(T, V + 1)
    logits[:, V] = -math.inf
    model = Toy(lambda xt: logits.expand(len(xt), T, V + 1), V + 1, T)
    model.mask_id = V
    ((next_token, inside),) = score_lengths(model, shapes(lengths=[2]), 1)
    assert inside == pytest.approx(-2 * math.log(V))
    assert next_token == pytest.approx(-math.log(V))


@pytest.mark.parametrize("max_gap", [T, 20])
def test_a_long_gap_is_found_in_few_calls(max_gap):
    """Up to the context, where the model predicts the text only if the length is right."""
    text = "abcde" + "edcbaedcbaedcb" + "abce"
    model, tokenizer = knowing(text, 14)
    (found,) = sample.write(model, tokenizer, "abcde[___]abce", max_gap=max_gap, seed=1)
    assert found == text


@pytest.mark.slow
def test_shipped_weights_fill_a_gap_in_half_of_the_sequences(capsys):
    """3f19056 took 107 for three candidates, and proved nothing."""
    folder = ROOT / "weights" / "shakespeare"
    template = "To [___], or not to be"
    sample.main([f"--out_dir={folder}", "--device=cpu", f"--infill={template}", "--json=-"])
    d = json.loads(capsys.readouterr().out)
    texts = [one["text"] for one in d["candidates"]]
    assert texts[0] == "To me, or not to be" and "To be, or not to be" in texts
    assert d["proven"] and d["compares_lengths"] and d["calls"] <= 55
