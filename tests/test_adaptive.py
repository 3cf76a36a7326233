"""An adaptive number of calls: each call reveals what the rule says, in every row alone."""

import itertools
import math
from functools import partial

import pytest
import torch
from conftest import Toy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_blocks import network
from test_sample import chi_square, draws

import sample
from nanomdlm.support import numerics
from nanomdlm.support.infill import adaptive

V = 3
T = 4


def fixed(T, V=3, seed=0, scale=3.0):
    """A model whose logits (T, V) depend on nothing, and these."""
    g = torch.Generator().manual_seed(seed)
    table = scale * torch.randn(T, V, generator=g, dtype=torch.float64)
    return Toy(lambda xt: table.expand(len(xt), -1, -1), V, T), table


def by_enumeration(rule, bound, score):
    """How many of scores, the highest first, a rule reveals: tried one number after another."""
    score = sorted(score, reverse=True)
    fits = []
    for k in range(1, len(score) + 1):
        first = score[:k]
        if rule == "threshold":
            fits.append(all(p > math.log(bound) for p in first))
        else:
            fits.append(sum(-h for h in first) - max(-h for h in first) <= bound + 1e-12)
    return max([1, *(k for k, fit in enumerate(fits, 1) if fit)]) if score else 0


@pytest.mark.parametrize(
    "rule, bounds", [("threshold", (1e-3, 0.2, 0.7, 1)), ("entropy_bound", (1e-3, 0.5, 2, 99))]
)
def test_number_is_that_of_the_rule(rule, bounds):
    g = torch.Generator().manual_seed(1)
    for bound, n in itertools.product(bounds, (0, 1, 2, 7)):
        masked = torch.zeros(40, 9).bool()
        masked[:, torch.randperm(9, generator=g)[:n]] = True
        score = 2 * torch.rand(40, 9, generator=g, dtype=torch.float64).log()
        found = adaptive.count(sample.SamplerSettings(**{rule: bound}), score, masked)
        want = [by_enumeration(rule, bound, row[here].tolist()) for row, here in zip(score, masked)]
        assert found.tolist() == want


@pytest.mark.parametrize(
    "asked",
    [
        dict(threshold=0.8),
        dict(threshold=0.9, order="max_prob"),
        dict(entropy_bound=0.7),
    ],
    ids=str,
)
def test_each_call_reveals_the_positions_of_the_rule(asked):
    """Of given logits, call by call, compared with a few lines of plain Python."""
    model, table = fixed(9)
    logp = table.log_softmax(1)
    x = torch.full((1, 9), V)
    x[0, 3] = 1
    left = [i for i in range(9) if x[0, i] == V]
    for step in sample.unmask(model, x, seed=4, **asked):
        u = sample.uniform(4, step.number - 1, torch.tensor([0]), range(9))[0][0]
        token = numerics.draw(table, u, 1.0, 0, 1.0)
        score = logp.gather(1, token[:, None])[:, 0]
        if asked.get("order") == "max_prob":
            score = logp.amax(1)
        if "entropy_bound" in asked:
            score = (logp.exp() * logp).sum(1)
        order = sorted(left, key=lambda i: -score[i])
        rule = "threshold" if "threshold" in asked else "entropy_bound"
        k = by_enumeration(rule, asked[rule], score[left].tolist())
        assert step.drawn[0].nonzero()[:, 0].tolist() == sorted(order[:k])
        assert torch.equal(step.x[0][order[:k]], token[order[:k]]) and k > 0
        left = [i for i in left if i not in order[:k]]
    assert not left and 1 < step.number < 8


def test_limits_are_the_samplers_that_there_were():
    """All at once, and one after another, with the same draws."""
    model, _ = fixed(12, scale=1.0)
    x = torch.full((5, 12), V)
    run = partial(sample.generate, model, x, seed=2)
    for order in ("confidence", "max_prob"):
        one_by_one = run(order=order, correct=0, steps=12)
        assert torch.equal(run(order=order, threshold=1), one_by_one)
        assert torch.equal(run(order=order, threshold=1e-9), run(steps=1))
        assert not torch.equal(one_by_one, run(steps=1))
    assert torch.equal(run(entropy_bound=1e-9), run(order="entropy", correct=0, steps=12))
    assert torch.equal(run(entropy_bound=1e4), run(steps=1))


def law_of_entropy_bound(world, bound):
    """log q (81,) of all texts as the rule writes them, by hand, and its calls for each (81,)."""
    logq = torch.zeros(len(world.x), dtype=torch.float64)
    calls = torch.zeros(len(world.x), dtype=torch.float64)
    for n, x in enumerate(world.x):
        xt = torch.full_like(x, V)
        while (left := (xt == V).nonzero()[:, 0].tolist()) != []:
            logp = world.exact(xt[None])[0]
            score = (logp.exp() * logp).sum(1)
            k = by_enumeration("entropy_bound", bound, score[left].tolist())
            for i in sorted(left, key=lambda i: -score[i])[:k]:
                logq[n] += logp[i, x[i]]
                xt[i] = x[i]
            calls[n] += 1
    return logq, calls


@pytest.mark.parametrize("bound", [1e-9, 0.5, 1.5])
def test_entropy_bound_bounds_the_error(world, bound):
    """With the true conditionals a call adds at most the bound to the divergence of texts."""
    logq, calls = law_of_entropy_bound(world, bound)
    assert logq.exp().sum().item() == pytest.approx(1)
    divergence = (world.p * (world.p.log() - logq)).sum().item()
    assert -1e-12 < divergence < (world.p * calls).sum().item() * bound
    assert (bound < 0.1) == (divergence < 1e-9) == bool((calls == T).all())
    found = draws(Toy(world.exact, V, T), 10_000, entropy_bound=bound)
    assert abs(chi_square(found, logq.exp())) < 4.5


@settings(max_examples=25, deadline=None)
@given(
    x=st.lists(
        st.lists(st.sampled_from([V, V, V, 0, 1, 2]), min_size=3, max_size=9),
        min_size=2,
        max_size=4,
    ),
    rule=st.sampled_from(["threshold", "entropy_bound"]),
    bound=st.sampled_from([0.2, 0.5, 0.9]),
    steps=st.sampled_from([0, 3, 9]),
    block=st.integers(0, T),
    correct=st.sampled_from(["auto", 0, 2]),
    redraw=st.sampled_from(["low_confidence", "sweep"]),
    end_id=st.sampled_from([None, 2]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_row_does_not_depend_on_its_batch(world, x, rule, bound, seed, **asked):
    width = len(x[0])
    x = torch.tensor([(row * width)[:width] for row in x])
    model = Toy(world.random, V, T)
    asked[rule] = bound

    def run(rows, **asked):
        return sample.generate(model, x[rows], seed=seed, samples=rows, **asked)

    rows = torch.arange(len(x))
    out = run(rows, **asked)
    assert out.max() < V and torch.equal(out[x < V], x[x < V])
    for row in rows[:, None]:
        assert torch.equal(out[row], run(row, **asked))


@pytest.mark.parametrize("S", [4, 16])
def test_blocks_finish_row_by_row(S):
    """Each row as if it were alone, though a batch waits for the slowest one in each block."""
    model = network(S, T=32)
    x = torch.full((3, 32), model.mask_id)
    x[1, :3] = 1
    for asked in (dict(threshold=0.4), dict(entropy_bound=1.5, correct=8)):
        run = partial(sample.unmask, model, seed=3, **asked)
        *_, last = run(x)
        for row in range(3):
            *_, alone = run(x[row : row + 1], samples=torch.tensor([row]))
            assert torch.equal(alone.x[0], last.x[row]) and alone.calls[0] == last.calls[row]
        n = asked.get("correct", 0)
        assert all(32 // S + n <= calls < 32 + n for calls in last.calls.tolist())
        assert len(last.calls.unique()) > 1
    *_, last = sample.unmask(model, x, seed=3, threshold=1)
    assert last.calls.tolist() == [32, 29, 32]


def test_steps_are_the_most():
    model, _ = fixed(12, scale=1.0)
    x = torch.full((3, 12), V)
    for asked in (dict(threshold=1), dict(entropy_bound=1e-9)):
        counts = [step.drawn.sum(1).tolist() for step in sample.unmask(model, x, steps=5, **asked)]
        assert counts == [[n] * 3 for n in (3, 2, 3, 2, 2)], "as many in each as there must be"
    *_, last = sample.unmask(model, x, threshold=0.05, steps=5)
    assert last.calls.max() < 5, "fewer where it is sure"


def test_corrections_follow_in_each_row():
    """As many as were asked for, once the row's own masks are drawn."""
    g = torch.Generator().manual_seed(3)
    table = 2 * torch.randn(13, 13, 4, V, generator=g, dtype=torch.float64)

    def logits(xt):
        near = torch.nn.functional.one_hot(xt, V + 1).double()
        return torch.einsum("bju,ijuv->biv", near, table) / 2

    model = Toy(logits, V, 13)
    x = torch.full((6, 13), V)
    plain = partial(sample.unmask, model, x, seed=1, threshold=0.7)
    *_, without = plain()
    *_, last = plain(correct=3)
    assert (last.calls == without.calls + 3).all() and len(without.calls.unique()) > 1
    begun = {}
    for step in plain(correct=3):
        for row in range(6):
            if (step.x[row] < V).all():
                begun.setdefault(row, []).append(step)
    for row, steps in begun.items():
        assert torch.equal(steps[0].x[row], without.x[row]), "the same text before them"
        assert len([s for s in steps if s.drawn[row].any()]) == 4
    for row in range(6):
        busy = [step.number for step in plain(correct=3) if step.drawn[row].any()]
        assert busy == [*range(1, len(busy) + 1)], "no row waits for others"


@pytest.mark.parametrize(
    "asked, words",
    [
        (dict(threshold=0.5, entropy_bound=1), "threshold"),
        (dict(threshold=0.5, order="spread"), "order"),
        (dict(entropy_bound=float("nan")), "entropy_bound"),
        (dict(threshold=0.5, steps=3, correct=3), "correct"),
    ],
    ids=str,
)
def test_contradictions_are_one_sentence(world, asked, words):
    with pytest.raises(ValueError, match=words) as e:
        draws(Toy(world.random, V, T), 2, **asked)
    assert "\n" not in str(e.value)
