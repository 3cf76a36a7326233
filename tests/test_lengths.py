"""Lengths of a gap: one call says which are worth filling; only these are filled and ranked."""

import functools
import json
import math

import pytest
import torch
from conftest import ROOT, Toy, hashed_world

import sample
from studies import lengths
from support.data.tokenizer import Tokenizer
from support.errors import UserError
from support.infill import likelihood, search
from support.infill.lengths import length_scores
from support.infill.templates import joined, parse, to_texts

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


def of_length(n, before="ab", after="cde", mask=V):
    """(ids (T,), gap, after (T,) bool) of a text whose gap has n masks."""
    ids = [LETTERS.index(c) for c in before] + [mask] * n + [LETTERS.index(c) for c in after]
    begin = len(before)
    at = torch.arange(T)
    gap = (at >= begin) & (at < begin + n)
    follows = (at >= begin + n) & (at < len(ids))
    return torch.tensor(ids + [mask] * (T - len(ids))), gap, follows


@pytest.mark.parametrize("after", ["cde", "c", ""])
def test_scores_are_log_probabilities_of_one_call(after):
    """The best fill by the marginals; the first token after the gap, its neighbours unseen."""
    model = random_world(1)
    rows = [of_length(n, after=after) for n in range(1, 8)]
    best, known = length_scores(model, *map(torch.stack, zip(*rows)))
    for i, (x, gap, follows) in enumerate(rows):
        xt = x.masked_fill(gap | follows, V)
        logp = model.logits(xt[None])[0].log_softmax(-1)
        assert best[i].item() == pytest.approx(logp[gap].amax(-1).sum().item(), abs=1e-5)
        wanted = 0.0
        if after:
            place = int(follows.nonzero()[0])
            wanted = logp[place, x[place]].item()
        assert known[i].item() == pytest.approx(wanted, abs=1e-5)


def test_ids_that_are_never_predicted_make_no_nan():
    """Encoders of others have [MASK] among their ids, with a logit of -inf."""
    logits = torch.zeros(T, V + 1)
    logits[:, V] = -math.inf
    model = Toy(lambda xt: logits.expand(len(xt), T, V + 1), V + 1, T)
    model.mask_id = V
    best, known = length_scores(model, *(one[None] for one in of_length(2)))
    assert best.item() == pytest.approx(-2 * math.log(V))
    assert known.item() == pytest.approx(-math.log(V))


def drawing(calls, logp=lambda fill: 0.0):
    """A `draw` that fills row i of a length by counting; keeps its arguments in `calls`."""

    def draw(x, fill, may_end, quick, **options):
        calls.append((x.clone(), options))
        drawn = options.get("drawn")
        seen = {}
        for i, row in enumerate(x):
            at = ((row == V) & fill[i]).nonzero()[:, 0]
            number = seen[len(at)] = seen.get(len(at), -1) + 1
            row[at] = torch.tensor([number // V**k % V for k in range(len(at))])
            if drawn is not None and len(at):
                drawn[i, at] = logp(row[at].tolist()) / len(at)
        return x

    return draw


def search_in(model, template, draw, n=3, **limits):
    tokenizer = Tokenizer("char", LETTERS)
    segments = parse(template, tokenizer, T)
    return search.hypotheses(model, tokenizer, segments, n, draw, "cpu", **limits)


def test_only_the_most_promising_lengths_are_filled():
    for seed in range(3):
        model = random_world(seed)
        rows = [of_length(n) for n in range(1, 13)]
        best, known = length_scores(model, *map(torch.stack, zip(*rows)))
        wanted = {int(i) + 1 for i in (best + known).topk(4)[1]}
        calls = []
        search_in(model, "ab[___]cde", drawing(calls), max_gap=12)
        [(x, options)] = calls
        filled = x[:, 2:].eq(V).long().cumprod(1).sum(1)
        assert set(filled.tolist()) == wanted and "drawn" in options
        each = {n: 36 // (n + 5) for n in wanted}
        assert dict(zip(*map(torch.Tensor.tolist, filled.unique(return_counts=True)))) == each


def test_few_lengths_are_all_filled():
    """The call that compares them would cost as much as it saves; so would one for N candidates."""
    for max_gap, n in ((4, 3), (9, 9)):
        calls = []
        search_in(random_world(0), "ab[___]cde", drawing(calls), n=n, max_gap=max_gap)
        [(x, options)] = calls
        filled = x[:, 2:].eq(V).long().cumprod(1).sum(1)
        assert set(filled.tolist()) == set(range(1, max_gap + 1)) and "drawn" not in options


@pytest.mark.parametrize("n", [1, 3, 4])
def test_fills_that_were_likely_when_drawn_are_ranked_exactly(n):
    """Of all that is drawn N + 1 texts are ranked (4 at least), by the chain rule."""
    for seed in range(3):
        model = random_world(seed)
        calls = []
        found = search_in(
            model, "ab[___]cde", drawing(calls, lambda ids: -float(sum(ids))), n, max_gap=12
        )
        [(_, options)] = calls
        x = calls[0][0]
        lengths = x[:, 2:].eq(V).long().cumprod(1).sum(1)
        rows = [of_length(k) for k in range(1, 13)]
        known = length_scores(model, *map(torch.stack, zip(*rows)))[1]
        score = options["drawn"].nansum(1) + known[lengths - 1]
        draw = drawing([])
        at = torch.arange(T)
        filled = draw(x.clone(), at < (5 + lengths)[:, None], False, True)
        wanted = {}
        for i in score.argsort(descending=True, stable=True).tolist():
            end = 5 + int(lengths[i])
            if len(wanted) > max(n, 3):
                break  # several rows may show the same text
            each = likelihood.chain_rule(model, filled[i : i + 1, :end])[0, 2:end]
            wanted[tuple(filled[i, :end].tolist())] = each.sum().item()
        best = sorted(wanted, key=wanted.get, reverse=True)[:n]
        assert [tuple(fill.ids) for fill in found] == best
        assert [fill.logp for fill in found] == pytest.approx([wanted[ids] for ids in best])


@pytest.mark.parametrize("max_gap", [T, 20])
def test_a_long_gap_is_found_in_few_calls(max_gap):
    """Up to the context, where the model predicts the text only if the length is right."""
    text = "abcde" + "edcbaedcbaedcb" + "abce"
    model, tokenizer = knowing(text, 14)
    (found,) = sample.write(model, tokenizer, "abcde[___]abce", max_gap=max_gap, seed=1)
    assert found == text


def test_several_gaps_of_unknown_length():
    """Beginnings and lengths compete together; what is returned is ranked exactly."""
    hidden = []
    model = random_world(2, hidden)
    calls = []
    found = search_in(model, "a[___]b[___]c", drawing(calls), max_gap=9)
    assert len(calls) == 2 and len(found) == 3
    (first, _), (second, options) = calls
    assert first[:, 1:].eq(V).long().cumprod(1).sum(1).unique().numel() == 4
    beginnings = {tuple(row[row != V].tolist()) for row in second}
    texts = {tuple(row.tolist()) for row in second}
    assert len(texts) == 16, "twice as many as there are beginnings"
    assert len(beginnings) <= 8 and "drawn" in options
    for fill in found:
        each = likelihood.chain_rule(model, torch.tensor([fill.ids]))[0, 1 : len(fill.ids)]
        assert fill.logp == pytest.approx(each.sum().item(), abs=1e-5)
        shown = to_texts(fill.segments, fill.ids, Tokenizer("char", LETTERS))
        assert joined(shown)[0] == "a" and joined(shown)[-1] == "c"


def test_draws_say_how_likely_they_were():
    """fill_gaps writes log p of each draw where it was drawn, and only there."""
    model = random_world(3)
    x, gap, follows = of_length(1)
    drawn = torch.full((4, T), math.nan, dtype=torch.float64)
    settings = sample.resolve(sample.SamplerSettings(), model)
    fill = (gap | follows).repeat(4, 1)
    out = sample.fill_gaps(
        model, Tokenizer("char", LETTERS), settings, x.repeat(4, 1), fill, False, True, drawn=drawn
    )
    logp = model.logits(x[None])[0].log_softmax(-1)
    assert drawn.isnan().equal(~gap.expand(4, T))
    assert drawn[:, gap][:, 0].tolist() == pytest.approx(logp[gap][0, out[:, gap][:, 0]].tolist())


def test_constrained_gaps_try_every_length():
    """The call knows nothing of a pattern, so it must not leave out what alone matches."""
    pytest.importorskip("outlines_core")
    calls = []
    tokenizer = Tokenizer("char", LETTERS)
    model = random_world(0)
    settings = sample.resolve(sample.SamplerSettings(), model)
    fill = functools.partial(sample.fill_gaps, model, tokenizer, settings)

    def draw(x, *args, **options):
        calls.append(x.clone())
        return fill(x, *args, **options)

    search.hypotheses(
        model, tokenizer, parse("ab[___:a*]cde", tokenizer, T), 3, draw, "cpu", max_gap=9
    )
    lengths = calls[0][:, 2:].eq(V).long().cumprod(1).sum(1)
    assert set(range(1, 10)) <= set(lengths.tolist())


@pytest.mark.slow
def test_shipped_weights_find_the_same_in_a_third_of_the_sequences(capsys):
    """At 44a18a0 it took 327 sequences."""
    folder = ROOT / "weights" / "shakespeare"
    template = "To [___], or not to be"
    sample.main([f"--out_dir={folder}", "--device=cpu", f"--infill={template}", "--json=-"])
    d = json.loads(capsys.readouterr().out)
    assert (d["text"], round(d["score"], 2)) == ("To me, or not to be", -20.81)
    assert d["sequences"] <= 130


def test_the_yardstick_hides_one_gap_in_a_line_and_counts_what_it_was():
    text = "\n".join(f"we see {n} of it as it is, so" for n in range(30))
    gaps = lengths.choose_gaps(text, 9, 16, seed=1)
    assert gaps == lengths.choose_gaps(text, 9, 16, seed=1)
    assert [kind for kind, *_ in gaps[:3]] == list(lengths.KINDS)
    assert len({line for _, line, *_ in gaps}) == 9
    for kind, line, begin, end in gaps:
        words = line[begin:end].split()
        assert begin > 0 and end < len(line) and end - begin <= 16
        assert kind == "half a line" or len(words) in (lengths.KINDS.index(kind) + 1, 3)
    gap = ("word", "the cat sat", 4, 7)
    shown = [dict(text=t) for t in ("the dog sat", "the cat sat")]
    answer = dict(text="the dog sat", candidates=shown, score=-3.0, calls=2, seconds=1.0)
    row = lengths.compare(gap, -5.0, answer)
    assert row["found"] == "dog" and row["exact_length"] and not row["exact"] and row["among"]
    assert row["gain"] == 2 and row["sequences"] is None
    rows = [dict(name="search") | row, dict(name="before") | row | dict(seconds=4.0)]
    line = lengths.table(rows).splitlines()[2]
    assert line.startswith("| all | search | 1 | 100.0") and line.endswith("| 1.0 | 0.25 |")


def test_the_yardstick_says_what_it_needs(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and ate the rat\n" * 20, encoding="utf-8")
    results = f"--results={tmp_path / 'r.jsonl'}"
    for argv, words in (
        ([], "--data is missing; give the text that the model has learned"),
        ([f"--data={text}"], "the text has 1 lines with such gaps, not 400; give fewer --gaps"),
        (
            [f"--data={text}", "--training", "--gaps=1", "--skip=nobody"],
            "names no contestant; give some of search, candidates, known",
        ),
    ):
        with pytest.raises(UserError, match=words):
            lengths.main([*argv, results])
    assert not (tmp_path / "r.jsonl").exists()
