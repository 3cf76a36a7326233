"""Gaps that must match a regular expression: every fill does, drawn as the definition says."""

import itertools
import re
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import tokenizer_kinds
import torch
from conftest import Toy
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import sample
from support.data.tokenizer import Tokenizer, build_tokenizer
from support.errors import NoEffect, UserError
from support.infill import build_automaton, constraint, likelihood, search, templates
from support.infill.constraint import automaton_of

pytest.importorskip("outlines_core")
LETTERS = Tokenizer("char", list("abcd"))
V = 4
L = 32
slow = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def builds_here():
    """Automata are built without a process of their own; one test below is of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constraint, "run_builder", in_this_process)
        yield
    constraint.byte_automaton.cache_clear()
    constraint.automaton_of.cache_clear()


def in_this_process(pattern):
    return np.array(build_automaton.build(pattern), np.int32)


class Double(Toy):
    """A Toy whose logits stay in float64."""

    def __call__(self, view, rows=None):
        if isinstance(view, torch.Tensor):
            view = self.objective.view(view, rows=rows)
        ids = view.ids
        if view.causal:
            ids = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=self.mask_id)
        logits = self.logits(ids)
        return logits if view.rows is None else logits.flatten(0, 1)[view.rows]

    def parameters(self):
        return iter([torch.zeros(1)])


def table_model(V=V, T=L, sharpness=3.0, seed=0, **config):
    """Each visible token moves the logits of each position."""
    g = torch.Generator().manual_seed(seed)
    table = sharpness * torch.randn(T, T, V, V + 1, generator=g, dtype=torch.float64)

    def logits(xt):
        near = torch.nn.functional.one_hot(xt, V + 1).double()
        return torch.einsum("bju,ijvu->biv", near, table) / T**0.5

    return Double(logits, V, T, **config)


def with_effect(settings, call):
    """What call(**settings) returns, without the settings that it refuses as they do nothing."""
    settings = dict(settings)
    while True:
        try:
            return call(**settings)
        except NoEffect as e:
            settings.pop(str(e).split()[0].removeprefix("--"))


def all_texts(letters, n):
    return ["".join(text) for text in itertools.product(letters, repeat=n)]


# ---- The distribution


def fills_of(model, x, pattern, length, start, **settings):
    """The last Step of x (B, T) whose tokens from `start` on must match."""
    matches = {start: constraint.gap(pattern, length, LETTERS)}
    *_, step = sample.unmask(model, x, matches=matches, **settings)
    return step


def direct(model, x, pattern, length, start):
    """{fill: p} of one row: the product of the marginals, given that the fill matches."""
    logp = model.logits(x)[0].log_softmax(-1)
    p = {}
    for text in all_texts("abcd", length):
        ids = torch.tensor(LETTERS.encode(text))
        old = x[0, start : start + length]
        if re.fullmatch(pattern, text) and ((old == V) | (old == ids)).all():
            at = torch.arange(start, start + length)[old == V]
            p[text] = logp[at, ids[old == V]].sum().exp().item()
    total = sum(p.values())
    return {text: value / total for text, value in p.items()}


@pytest.mark.parametrize("standing", [{}, {4: 1}, {3: 0, 6: 0}], ids=str)
@pytest.mark.parametrize("pattern", ["a?b+[cd]*a?", "(ab|c){2,3}a?", "(a|b|cd)*"])
def test_one_call_draws_the_product_of_marginals_given_a_match(pattern, standing):
    model = table_model(T=8, sharpness=6.0)
    x = torch.full((1, 8), V)
    x[0, 0] = 2
    for place, id in standing.items():
        x[0, place] = id
    want = direct(model, x, pattern, 4, 3)
    n = 4000
    step = fills_of(model, x.repeat(n, 1), pattern, 4, 3, order="one_shot", seed=3)
    texts = [LETTERS.decode(ids) for ids in step.x[:, 3:7].tolist()]
    assert set(texts) <= set(want)
    # The probability of each fill, token by token.
    found = {}
    logp = iter(step.logp.split(step.drawn.sum(1).tolist()))
    for row, text in enumerate(texts):
        mine = next(logp)
        at = step.drawn[row].nonzero()[:, 0].tolist()
        inside = [i for i in at if 3 <= i < 7]
        ps = [mine[at.index(i), step.x[row, i]] for i in inside]
        found.setdefault(text, sum(ps).exp().item())
    for text, p in found.items():
        assert abs(p - want[text]) < 1e-12
    assert abs(sum(want[text] for text in found) - 1) < 0.01
    # And what is drawn: chi-square in standard deviations, rare fills as one class.
    counts = {text: texts.count(text) for text in want}
    often = [text for text in want if n * want[text] >= 5]
    cells = [(counts[text], n * want[text]) for text in often]
    rest = n - sum(count for count, _ in cells), n - sum(e for _, e in cells)
    cells += [rest] if rest[1] >= 5 else []
    df = len(cells) - 1
    chi2 = sum((count - e) ** 2 / e for count, e in cells)
    assert not df or (chi2 - df) / (2 * df) ** 0.5 < 4.5


def test_marginals_far_below_the_smallest_number_lead_to_no_dead_end():
    """Weights of e^-30000 are compared as others are."""
    logits = torch.zeros(L, V, dtype=torch.float64)
    logits[:, 0] = 10_000
    logits[:, 1] = -20_000
    logits[:, 2] = -20_000 + torch.log(torch.tensor(3.0))
    model = Double(lambda xt: logits.expand(len(xt), L, V), V, L)
    x = torch.full((500, L), V)
    step = fills_of(model, x, "[bc]{8}", 8, 2, order="one_shot", seed=1)
    c = (step.x[:, 2:10] == 2).double()
    assert set(step.x[:, 2:10].flatten().tolist()) == {1, 2} and abs(c.mean() - 0.75) < 0.02


# ---- A pattern that everything matches

ALL_SETTINGS = [
    dict(order="ancestral"),
    dict(order="spread", redraw="sweep", spacing=2),
    dict(order="confidence", temperature=0.7, top_k=3),
    dict(order="entropy", top_p=0.8, correct=0),
    dict(order="margin", cfg=2.0),
    dict(order="random", block=16),
    dict(temperature=0),
]


@pytest.mark.parametrize("asked", ALL_SETTINGS, ids=str)
def test_a_pattern_that_everything_matches_changes_no_draw(asked):
    """To the bit: also where the passes are taken, which sample.py leaves out."""
    model = table_model()
    x = torch.full((6, L), V)
    x[:, ::5] = 1
    asked = dict(asked, steps=12, seed=9)
    free = list(sample.unmask(model, x, **asked))
    gap = constraint.gap("(?s:.*)", 4, LETTERS)
    assert gap.automaton.is_free
    matches = {1: gap, 6: gap}
    for step, other in zip(free, sample.unmask(model, x, matches=matches, **asked), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(step[1:], other[1:]))
    length = torch.full((6,), 4)
    forced = [constraint.Constraint(gap.automaton, torch.full((6,), i), length) for i in (1, 6)]
    settings = sample.from_keywords(asked, model, L)
    steps = sample.take_steps(model, x, None, torch.arange(6), settings, constraints=forced)
    for step, other in zip(free, steps, strict=True):
        assert torch.equal(step.x, other.x) and torch.equal(step.drawn, other.drawn)


# ---- Every fill matches


@st.composite
def patterns(draw, depth=3):
    """Regular expressions of a, b, c, d: alternations, classes, counts, optional parts."""
    kind = draw(
        st.sampled_from(["atom", "atom", "both", "or", "count"]) if depth else st.just("atom")
    )
    if kind == "atom":
        return draw(st.sampled_from([*"abcd", "[ab]", "[^a]", "[b-d]", ".", "a", "\\w", "(?i:B)"]))
    one = draw(patterns(depth=depth - 1))
    if kind == "count":
        least = draw(st.integers(0, 3))
        counts = ["*", "+", "?", f"{{{least}}}", f"{{{least},}}", f"{{{least},{least + 2}}}"]
        lazy = draw(st.sampled_from(["", "", "?"]))
        return f"(?:{one}){draw(st.sampled_from(counts))}{lazy}"
    other = draw(patterns(depth=depth - 1))
    return one + other if kind == "both" else f"({one}|{other})"


WAYS = st.fixed_dictionaries(
    dict(steps=st.sampled_from([1, 3, 8]), seed=st.integers(0, 99)),
    optional=dict(
        order=st.sampled_from([name for name in sample.ORDERS if name != "one_shot"]),
        correct=st.sampled_from(["auto", "0", "2"]),
        redraw=st.sampled_from(["low_confidence", "sweep"]),
        spacing=st.integers(1, 4),
        temperature=st.sampled_from([0.0, 0.3, 2.0]),
        top_k=st.sampled_from([1, 2]),
        top_p=st.sampled_from([1e-9, 0.5]),
        cfg=st.sampled_from([1.0, 50.0]),
        block=st.sampled_from([1, 5, 16]),
    ),
)


def matched(pattern, way, seed, model, kind):
    """Fill two gaps in each of two rows; both match the pattern, by Python's re too."""
    try:
        automaton = automaton_of(pattern, LETTERS)
    except UserError as e:
        assert "no text" in str(e)
        return
    lengths = [n for n in automaton.lengths(24) if n]
    if not lengths:
        return
    rng = np.random.default_rng(seed)
    first, second = rng.choice(lengths, 2)
    if kind in ("ar", "blocks"):  # what follows a gap is not seen
        second = 0
        way = {name: way[name] for name in way if name not in ("cfg", "block")}
        if kind == "ar":
            way.pop("order", None)
    T = int(2 + first + second)
    x = torch.full((2, min(T, L) if kind == "blocks" else T), V)
    x[:, 0] = 1
    if second:
        x[:, 1 + first] = 2
    places = {1: int(first)} | ({2 + int(first): int(second)} if second else {})
    matches = {at: constraint.gap(pattern, n, LETTERS) for at, n in places.items()}
    run = partial(sample.generate, model, x, matches=matches)
    try:
        found = with_effect(way, run)
    except UserError as e:  # settings that this kind of model does not take
        assert kind != "plain" and " is not " in str(e)
        found = run(seed=way["seed"])
    for row in found.tolist():
        for at, n in places.items():
            text = LETTERS.decode(row[at : at + n])
            assert re.fullmatch(pattern, text) and V not in row, (pattern, text, way)


MODELS = dict(plain=table_model(T=52), ar=table_model(T=52, objective="ar"))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(patterns(), WAYS, st.integers(0, 99), st.sampled_from(["plain", "plain", "ar"]))
@example("(a|b)*a(a|b){4}", dict(steps=3, seed=0, order="confidence"), 0, "plain")
@example("ab?|b?c", dict(steps=8, seed=0, temperature=0.0, cfg=50.0), 1, "plain")
def test_every_fill_matches(pattern, way, seed, kind):
    matched(pattern, way, seed, MODELS[kind], kind)


@slow
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(patterns(), WAYS, st.integers(0, 99), st.sampled_from(["plain", "plain", "ar"]))
def test_every_fill_of_a_thousand_patterns_matches(pattern, way, seed, kind):
    matched(pattern, way, seed, MODELS[kind], kind)


@settings(max_examples=60, deadline=None)
@given(patterns())
@example("a|ab")
@example("a*?|b")
@example("(|a)(b|bc)?")
def test_automata_agree_with_python(pattern):
    """Over characters: each text of up to five letters is taken or refused as re.fullmatch does."""
    table, accepts = constraint.byte_automaton(pattern)
    automaton = constraint.automaton_of(pattern, LETTERS) if accepts.any() else None
    for n in range(4):
        for text in all_texts("abcd", n):
            matches = bool(re.fullmatch(pattern, text))
            assert automaton.matches(text) == matches
            assert automaton.takes(LETTERS.encode(text)) == matches
