"""The training loss, the sampler and the evaluation are what the mathematics says."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    TINY,
    Toy,
    chain_rule,
    counts_of,
    draw,
    exhaustive_nelbo,
    run_mdlm,
    watch_masks,
)
from safetensors.numpy import load_file

import mdlm
from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels.reference import attention_ref
from nanomdlm.support.errors import UserError
from nanomdlm.support.view import masked_rows
from nanomdlm.variants import rates

VARIANTS = [
    dict(masking="bernoulli"),
    dict(rates="cosine"),
    dict(rates="0.1-1"),
    dict(rates="0-0.9"),
    dict(loss_weight="uniform"),
]
# What a newcomer might add to rates.SCHEDULES, and the inverse of each by hand.
SCHEDULES = {"sqrt": torch.sqrt, "square": torch.square, "falling": lambda u: 1 - u}
INVERSES = {
    "uniform": lambda t: t,
    "cosine": lambda t: 1 - 2 / math.pi * t.acos(),
    "sqrt": torch.square,
    "square": torch.sqrt,
    "falling": lambda t: 1 - t,
}


@pytest.fixture
def schedules(monkeypatch):
    for name, schedule in SCHEDULES.items():
        monkeypatch.setitem(rates.SCHEDULES, name, schedule)


def untrained(V=65, **more):
    settings = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=8, dropout=0.0)
    return mdlm.make_model(mdlm.Config(**settings | more), V, kernels.select("torch"))


def scrambled(V=65, **more):
    """A model with random weights; untrained ones have a head of zeros."""
    model = untrained(V, **more)
    g = torch.Generator().manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=g)
    return model


def make_batch(model, x0, step=0):
    return model.objective.batch(model.ops, *draw(model, x0, step))


def batch_loss(model, x0, step):
    view, targets, weights, _ = make_batch(model, x0, step)
    logits = model(view).flatten(0, -2)
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum().item()


def predict(model, x):
    """(B, T, V) logits of ids (B, T)."""
    return model(model.objective.view(x))


# --------------------------------------------------------------------------------------------------
# The loss


def test_loss_is_mean_ce_over_masked_tokens():
    model = scrambled()
    x0 = torch.randint(65, (8, 16), generator=torch.Generator().manual_seed(1))
    for step in range(3):
        batch = make_batch(model, x0, step)
        xt = batch[0].ids
        masked = xt == 65
        assert torch.equal(masked.sum(1), counts_of(model.config, step))
        assert torch.equal(xt[~masked], x0[~masked])
        ce = F.cross_entropy(predict(model, xt).transpose(1, 2), x0, reduction="none")  # (8, 16)
        wanted = torch.stack([ce[i][masked[i]].mean() for i in range(8)]).mean()
        torch.testing.assert_close(model(*batch[:3]), wanted)


@pytest.mark.parametrize("more", [dict(), dict(objective="ar"), *VARIANTS])
def test_uniform_model_has_loss_ln_v(more):
    model = untrained(**more)
    x0 = torch.randint(65, (8, 16))
    values = torch.tensor([batch_loss(model, x0, step) for step in range(200)])
    error = values.std() / len(values) ** 0.5
    assert abs(values.mean() - math.log(65)) < 4 * error + 1e-4
    if more in (dict(), dict(objective="ar")):  # then each single batch gives it
        assert values.sub(math.log(65)).abs().max() < 1e-4


@pytest.mark.parametrize("masking", ["exact", "bernoulli"])
@pytest.mark.parametrize("schedule", ["uniform", "cosine", "square"])
def test_training_loss_is_unbiased(world, schedules, masking, schedule):
    windows = world.x.repeat(2, 1)[:128]
    settings = dict(batch_size=128, masking=masking, rates=schedule)
    toy = Toy(world.random, world.V, world.T, **settings)
    truth = exhaustive_nelbo(world.random, windows, world.V).mean().item()
    values = torch.tensor([batch_loss(toy, windows, step) for step in range(300)]).double()
    error = values.std().item() / len(values) ** 0.5
    assert abs(values.mean().item() - truth) < 4 * error
    assert error < 0.01 * truth, "so that a wrong weight would be seen"


def test_loss_varies_less_than_textbook_loss():
    """A profile of CE by mask rate with noise of tokens: L = 256, 2,000 batches of 64."""
    L = 256
    N = 64
    steps = 2000
    g = torch.Generator().manual_seed(0)

    def profile(n):
        noise = torch.randn(n.shape, generator=g) / n.clamp(min=1) ** 0.5
        return 0.4 + 2.9 * (n / L) ** 0.7 + noise

    config = mdlm.Config(block_size=L, batch_size=N)
    counts = torch.stack([counts_of(config, step) for step in range(steps)]).double()
    ours = profile(counts).mean(1).std()

    def textbook(t, weight):
        n = torch.binomial(torch.full_like(t, L), t, generator=g)
        return (weight(t, n) * n * profile(n) / L).mean(1).std()

    strata = (torch.arange(N) + torch.rand(steps, N, generator=g)) / N
    eps = 1e-3
    stratified = textbook(eps + (1 - eps) * strata, lambda t, n: 1 / t)
    uniform = torch.rand(steps, N, generator=g)
    independent = textbook(eps + (1 - eps) * uniform, lambda t, n: 1 / t)
    rao_blackwell = textbook(strata, lambda t, n: (L + 1) / n.clamp(min=1))
    assert ours < rao_blackwell < stratified < independent
    assert ours < 0.6 * stratified


def test_both_objectives_score_the_same_tokens():
    x0 = torch.randint(65, (8, 16))
    for objective in ("mdlm", "ar"):
        (xt, _, _, rows, *_), targets, share, _ = make_batch(untrained(objective=objective), x0)
        assert torch.equal(targets, x0.flatten() if rows is None else x0.flatten()[rows])
        assert xt.shape == x0.shape
        assert share.sum() == pytest.approx(1, abs=1e-5)
        if objective == "mdlm":
            assert (xt.flatten()[rows] == 65).all()
            assert (xt == 65).sum() == len(rows) == 8 * 17 // 2


@pytest.mark.parametrize("more", [dict(), dict(masking="bernoulli"), dict(time_conditioning=True)])
def test_scoring_only_masked_rows_changes_nothing(more):
    model = scrambled(n_layer=2, **more)
    x0 = torch.randint(65, (8, 16))
    view, targets, share, _ = make_batch(model, x0)
    weights = list(model.parameters())
    some = model(view, targets, share)
    some_gradients = torch.autograd.grad(some, weights)
    ce = F.cross_entropy(
        predict(model, view.ids).flatten(0, 1)[view.rows], targets, reduction="none"
    )
    everything = (ce * share).sum()
    torch.testing.assert_close(some, everything)
    for a, b in zip(some_gradients, torch.autograd.grad(everything, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_padded_rows_count_for_nothing():
    """As on a GPU, where Python does not wait to know how many rows are masked."""
    model = scrambled(n_layer=2, masking="bernoulli")
    x0 = torch.randint(65, (8, 16), generator=torch.Generator().manual_seed(0))
    rates = torch.linspace(0, 1, 8, dtype=torch.float64)
    masked = model.ops.mask_tokens(x0, rates, model.mask_id, 0, 0, torch.arange(8))
    xt, count, rows, n_rows = masked
    share = model.objective.weights[count] / (count.clamp(min=1) * 8)
    cut, cut_weights = masked_rows(rows, n_rows, share, 16)
    padded, weights = masked_rows(rows, n_rows, share, 16, waits=False)
    assert len(cut) == n_rows < len(padded) == x0.numel()
    assert padded.bincount().max() <= 2, "the gradient of no position is added up often"
    found = [
        model(model.objective.view(xt, rows=at), x0.flatten()[at], w)
        for at, w in ((cut, cut_weights), (padded, weights))
    ]
    torch.testing.assert_close(*found)


def test_only_masked_rows_reach_the_head(monkeypatch):
    seen = []
    model = untrained()
    batch = make_batch(model, torch.randint(65, (8, 16)))
    linear = F.linear

    def watched(x, w, b=None):
        if w.shape[0] == 65:
            seen.append(tuple(x.shape))
        return linear(x, w, b)

    monkeypatch.setattr(F, "linear", watched)
    model(*batch[:3])
    assert seen == [(8 * 17 // 2, 32)]


# --------------------------------------------------------------------------------------------------
# Mask rates


def chi_square(counts, expected):
    return ((counts - expected) ** 2 / expected).sum()


def limit(n):
    """A bound of chi-square with n degrees of freedom, at five standard deviations."""
    return n + 5 * (2 * n) ** 0.5


def draws(config, steps, early=0.0):
    return torch.stack([counts_of(config, step, early) for step in range(steps)])


def test_counts_are_mirrored_and_uniform():
    counts = draws(mdlm.Config(block_size=64, batch_size=16), 2000)  # (2000, 16)
    assert (counts[:, 0::2] + counts[:, 1::2] == 65).all()
    assert counts.min() == 1
    assert counts.max() == 64
    found = counts.flatten().bincount(minlength=65)[1:]
    assert chi_square(found, counts.numel() / 64) < limit(63)  # strata only make it smaller


def test_levels_depend_on_step_and_seed_only():
    config = mdlm.Config(block_size=64, batch_size=16)
    assert torch.equal(counts_of(config, 3), counts_of(config, 3))
    assert not torch.equal(counts_of(config, 3), counts_of(config, 4))
    other = mdlm.Config(block_size=64, batch_size=16, seed=1)
    assert not torch.equal(counts_of(config, 3), counts_of(other, 3))


def test_early_steps_leave_out_extreme_rates():
    config = mdlm.Config(block_size=64, batch_size=16, rate_margin=0.25)
    for early, low, high in ((1, 17, 48), (0.5, 9, 56), (0, 1, 64)):
        counts = draws(config, 1000, early)
        assert (counts[:, 0::2] + counts[:, 1::2] == 65).all(), "shapes stay as they are"
        assert counts.min() == low
        assert counts.max() == high
        found = counts.flatten().bincount(minlength=65)[low : high + 1]
        assert chi_square(found, counts.numel() / (high - low + 1)) < limit(high - low)
    # The default: half of the tokens.
    for L, half in ((1, {1}), (2, {1, 2}), (64, {32, 33}), (65, {33})):
        assert set(counts_of(mdlm.Config(block_size=L), 0, 1).tolist()) == half


@pytest.mark.parametrize("more", [*VARIANTS, dict(time_conditioning=True)])
def test_variants_have_no_rate_margin(more):
    config = mdlm.Config(**more)
    assert torch.equal(counts_of(config, 5, 1), counts_of(config, 5))


def test_rates_open_in_the_second_half(short_run, tmp_path, monkeypatch):
    masked = watch_masks(monkeypatch)
    text = short_run.parent / "text.txt"
    out = tmp_path / "out"
    flags = ["--eval_windows=2", "--max_steps=12", f"--out_dir={out}"]
    assert run_mdlm(f"--data={text}", *TINY, *flags) == 0
    spread = [int(n.max() - n.min()) for n in masked]  # of 32 tokens
    assert set(spread[:7]) == {1}, spread
    assert all(s > 1 for s in spread[7:]), spread
    assert spread[-1] >= 16, spread


@pytest.mark.parametrize("L", [1, 7, 256, 8192])
@pytest.mark.parametrize("name", INVERSES)
def test_weights_of_any_schedule_keep_the_bound(schedules, name, L):
    config = mdlm.Config(block_size=L, rates=name)
    P = rates.count_probabilities(config)
    edges = INVERSES[name](torch.arange(L + 1, dtype=torch.float64) / L)
    by_hand = edges.diff().abs()
    torch.testing.assert_close(P[1:], by_hand, rtol=1e-6, atol=1e-12)
    assert P.sum().item() == pytest.approx(1)
    weight = rates.text_weights(config)
    assert weight[0] == 0
    product = L * by_hand * weight[1:].double()
    torch.testing.assert_close(product, torch.ones(L).double(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("L", [1, 7, 256])
@pytest.mark.parametrize("name", ["uniform", "square", "falling"])
def test_bernoulli_weights_keep_the_bound(schedules, name, L):
    config = mdlm.Config(block_size=L, rates=name, masking="bernoulli")
    n = torch.arange(L + 1, dtype=torch.float64)
    by_hand = torch.full_like(n, 1 / (L + 1))
    if name == "square":  # the integral of binomial(L, t) dt / (2 sqrt(t)), a beta function
        by_hand = torch.lgamma(n + 0.5) - torch.lgamma(n + 1) - math.lgamma(L + 1.5)
        by_hand = (by_hand + math.lgamma(L + 1)).exp() / 2
    torch.testing.assert_close(rates.count_probabilities(config), by_hand, rtol=2e-3, atol=0)
    weight = rates.text_weights(config)[1:].double()
    torch.testing.assert_close(L * by_hand[1:] * weight, torch.ones(L).double(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("masking", ["exact", "bernoulli"])
@pytest.mark.parametrize("name", INVERSES)
def test_probabilities_are_those_of_the_draws(schedules, name, masking):
    settings = dict(n_embd=8, block_size=8, batch_size=1024, rates=name, masking=masking)
    config = mdlm.Config(**settings)
    ops = kernels.select("torch")
    x0 = torch.zeros(1024, 8, dtype=torch.long)
    found = torch.zeros(9)
    for step in range(20):
        levels = counts_of(config, step)
        xt, *_ = ops.mask_tokens(x0, levels, 1, 0, step, torch.arange(1024))
        found += xt.sum(1).bincount(minlength=9)
    expected = rates.count_probabilities(config) * found.sum()
    if masking == "exact":
        assert found[0] == 0
        found = found[1:]
        expected = expected[1:]
    assert chi_square(found, expected) < limit(8)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda u: 0 * u + 0.5,  # flat
        lambda u: 0.9 * u,  # does not reach 1
        lambda u: 0.1 + 0.9 * u,  # does not reach 0
        lambda u: torch.sin(math.pi * u),  # rises and falls
        lambda u: (2 * u - 1).clamp(0, 1),  # flat in a part
    ],
)
@pytest.mark.parametrize("masking", ["exact", "bernoulli"])
def test_unsuitable_schedule_is_refused(monkeypatch, schedule, masking):
    monkeypatch.setitem(rates.SCHEDULES, "new", schedule)
    with pytest.raises(UserError, match=r"the schedule new .* must go from 0 to 1"):
        untrained(rates="new", masking=masking)


def test_clipped_and_uniform_losses_are_no_bound(capsys, short_run, tmp_path):
    assert rates.is_bound(mdlm.Config())
    assert rates.is_bound(mdlm.Config(rates="cosine", masking="bernoulli"))
    for more in (dict(rates="0.15-1"), dict(rates="0-0.5"), dict(loss_weight="uniform")):
        assert not rates.is_bound(mdlm.Config(**more))
    bert = mdlm.Config(rates="0.15-0.15", block_size=100)
    assert (counts_of(bert, 0) == 16).all()  # 1 + floor(0.15 * 100)
    text = short_run.parent / "text.txt"
    flags = ["--max_steps=1", f"--out_dir={tmp_path / 'out'}", "--overwrite", "--eval_windows=2"]
    for more, said in (("--loss_weight=uniform", True), ("--masking=bernoulli", False)):
        assert run_mdlm(f"--data={text}", *TINY, *flags, more) == 0
        assert ("not the training loss" in capsys.readouterr().out) == said


@pytest.mark.parametrize("masking", ["exact", "bernoulli"])
def test_bert_loss_is_mean_over_masked_tokens(masking):
    settings = dict(rates="0.15-0.15", block_size=100, loss_weight="uniform")
    weight = rates.text_weights(mdlm.Config(masking=masking, **settings))
    masked = 16 if masking == "exact" else 15  # 1 + floor(15), and the expected number
    assert weight[masked] == pytest.approx(1, abs=1e-5)
    assert weight[30] == pytest.approx(30 / masked, abs=1e-4)


# --------------------------------------------------------------------------------------------------
# Sampling


@pytest.mark.parametrize("objective, steps", [("mdlm", 64), ("ar", 1)])
def test_generate_samples_the_true_distribution(world, objective, steps):
    toy = Toy(world.exact, world.V, world.T, objective=objective)
    n = 4000
    x = torch.full((n, world.T), world.V)
    sample = mdlm.generate(toy, x, steps, torch.Generator().manual_seed(0))
    number = (sample * world.V ** torch.arange(world.T).flip(0)).sum(1)
    assert torch.equal(world.x[number], sample)
    found = number.bincount(minlength=81).double()
    common = n * world.p >= 5
    rest = torch.stack((found[~common].sum(), n * world.p[~common].sum()))
    value = chi_square(found[common], n * world.p[common]) + (rest[0] - rest[1]) ** 2 / rest[1]
    assert common.sum() > 20
    assert value < limit(common.sum())


def test_generate_fills_gaps_and_keeps_given_tokens(world):
    toy = Toy(world.exact, world.V, world.T)
    x = torch.tensor([[1, 3, 3, 2], [3, 0, 3, 3], [0, 1, 2, 0]])
    given = x.clone()
    for steps in (1, 2, 8):
        out = mdlm.generate(toy, x, steps, torch.Generator().manual_seed(0))
        assert (out < world.V).all()
        assert torch.equal(out[given < world.V], given[given < world.V])
        assert torch.equal(x, given), "its argument is not changed"
        again = mdlm.generate(toy, x, steps, torch.Generator().manual_seed(0))
        assert torch.equal(out, again)


def test_generate_reveals_at_the_textbook_rate(world):
    seen = []

    def watched(xt):
        seen.append((xt == world.V).float().mean().item())
        return world.exact(xt)

    toy = Toy(watched, world.V, world.T)
    seen.clear()
    x = torch.full((5000, world.T), world.V)
    mdlm.generate(toy, x, 4, torch.Generator().manual_seed(0))
    assert seen == pytest.approx([1, 0.75, 0.5, 0.25], abs=0.02)


def test_autoregressive_generate_goes_left_to_right(world):
    seen = []

    def watched(xt):
        seen.append(xt.clone())
        return world.exact(xt)

    toy = Toy(watched, world.V, world.T, objective="ar")
    seen.clear()
    x = torch.full((5, world.T), world.V)
    x[1, 2] = 0  # given
    mdlm.generate(toy, x, generator=torch.Generator().manual_seed(0))
    for i, xt in enumerate(seen):
        assert ((xt[0] == world.V) == (torch.arange(world.T) >= i)).all()
        assert xt[1, 2] == 0
    assert len(seen) == world.T


# --------------------------------------------------------------------------------------------------
# Evaluation


def test_uniform_model_evaluates_to_ln_v():
    windows = torch.randint(65, (40, 16))
    for objective, key in (("mdlm", "nelbo"), ("ar", "nll")):
        value = mdlm.evaluate(untrained(objective=objective), windows)[key]
        assert value == pytest.approx(math.log(65), abs=1e-5)


def test_exact_posterior_gives_exact_likelihood(world):
    wanted = -world.p.log() / world.T
    nelbo = exhaustive_nelbo(world.exact, world.x, world.V)
    assert torch.allclose(nelbo, wanted, atol=1e-9)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        nll = chain_rule(world.exact, world.x, world.V, order)
        assert torch.allclose(nll, wanted, atol=1e-9)


def test_mean_over_all_orders_is_the_nelbo(world):
    orders = list(itertools.permutations(range(4)))
    total = sum(chain_rule(world.random, world.x, world.V, order) for order in orders)
    nelbo = exhaustive_nelbo(world.random, world.x, world.V)
    assert torch.allclose(total / len(orders), nelbo, atol=1e-12)


def draw_windows(world, n, g):
    return world.x[torch.multinomial(world.p, n, replacement=True, generator=g)]


@pytest.mark.parametrize("which", ["exact", "random"])
def test_evaluate_is_right_within_its_error(world, which):
    logits = getattr(world, which)
    windows = draw_windows(world, 3000, torch.Generator().manual_seed(0))
    truth = exhaustive_nelbo(logits, windows, world.V).mean().item()
    toy = Toy(logits, world.V, world.T)
    for passes in (1, 3):
        r = mdlm.evaluate(toy, windows, passes=passes)
        # The windows are given and only masks are random: the standard error is an upper bound.
        assert abs(r["nelbo"] - truth) < 4 * r["se"]
        assert 0.001 < r["se"] < 0.05
    assert r == mdlm.evaluate(toy, windows, passes=passes), "evaluation is deterministic"


def test_standard_error_covers_data_and_masks(world):
    g = torch.Generator().manual_seed(1)
    truth = (world.p * exhaustive_nelbo(world.random, world.x, world.V)).sum().item()
    toy = Toy(world.random, world.V, world.T)
    z = []
    for seed in range(40):
        r = mdlm.evaluate(toy, draw_windows(world, 500, g), seed=seed, batch_size=500)
        z.append((r["nelbo"] - truth) / r["se"])
    z = torch.tensor(z)
    assert abs(z.mean()) < 4 / 40**0.5
    assert 0.6 < z.std() < 1.4


@pytest.mark.parametrize("W, passes", [(15, 1), (32, 1), (32, 4)])
def test_standard_error_holds_with_few_windows(W, passes):
    T = 128
    V = 5
    slope = torch.linspace(0.2, 2.0, T)  # CE depends on the window and on the mask rate

    def logits(xt):
        sharp = slope[(xt == V).sum(1) - 1][:, None, None]
        return F.one_hot(xt * 0 + 1, V) * sharp

    g = torch.Generator().manual_seed(0)
    toy = Toy(logits, V, T)
    estimates = []
    errors = []
    for seed in range(80):
        share = torch.rand(W, 1, generator=g)
        windows = (torch.rand(W, T, generator=g) > share).long()
        r = mdlm.evaluate(toy, windows, passes=passes, seed=seed)
        estimates.append(r["nelbo"])
        errors.append(r["se"])
    ratio = torch.tensor(errors).square().mean().sqrt() / torch.tensor(estimates).std()
    assert 0.75 < ratio < 1.6, ratio


# --------------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize(
    "n_layer, every, wanted", [(5, 3, [1, 4]), (4, 4, [3]), (3, 1, [0, 1, 2]), (2, 9, [1])]
)
def test_attention_is_counted_from_the_last_block(n_layer, every, wanted):
    blocks = untrained(n_layer=n_layer, attention_every=every).layers
    assert [i for i, block in enumerate(blocks) if block.qkv is not None] == wanted


def test_model_gives_v_logits_and_reads_both_sides():
    model = scrambled(V=10)
    x = torch.randint(11, (2, 16))
    y = predict(model, x)
    assert y.shape == (2, 16, 10)
    assert y.dtype == torch.float32
    for i in (0, 15):
        changed = x.clone()
        changed[:, i] = (x[:, i] + 1) % 11
        assert (predict(model, changed) - y)[:, 8].abs().max() > 1e-6


@pytest.mark.parametrize("pos", ["rope", "learned", "sinusoidal"])
def test_autoregressive_model_shifts_by_itself(pos):
    model = scrambled(V=10, objective="ar", pos=pos)
    x = torch.randint(10, (2, 16))
    y = predict(model, x)
    for i in (0, 8, 15):
        changed = x.clone()
        changed[:, i] = (x[:, i] + 1) % 10
        after = predict(model, changed)
        assert torch.allclose(y[:, : i + 1], after[:, : i + 1], atol=1e-6)
        if i < 15:
            assert (y - after)[:, i + 1].abs().max() > 1e-6, "token i is seen at i + 1"


@pytest.mark.parametrize("pos", ["rope", "learned", "sinusoidal"])
def test_weights_may_be_bfloat16(pos):
    model = scrambled(V=10, pos=pos)
    x = torch.randint(11, (2, 16))
    y = predict(model, x)
    for p in model.parameters():
        p.data = p.data.bfloat16()
    assert (predict(model, x) - y).norm() < 0.05 * y.norm()


@pytest.mark.parametrize("causal", [False, True])
def test_bfloat16_attention_errs_like_pytorchs(causal):
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 70, 3, 2, 32, generator=g)
    grad = torch.randn(2, 70, 2, 32, generator=g)

    def run(attention, dtype):
        x = qkv.to(dtype).requires_grad_()
        y = attention(x)
        dx = torch.autograd.grad(y, x, grad.to(dtype))[0].double()
        return y.detach().double(), *dx.unbind(2)

    def sdpa(x):
        q, k, v = x.transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    exact = run(sdpa, torch.float64)
    ours = run(lambda x: attention_ref(x, causal=causal), torch.bfloat16)
    theirs = run(sdpa, torch.bfloat16)
    for name, e, a, b in zip(("y", "dq", "dk", "dv"), exact, ours, theirs, strict=True):
        assert (a - e).abs().max() <= 2 * (b - e).abs().max() + 2e-3, name


def test_shipped_weights_match_a_second_implementation():
    folder = ROOT / "weights" / "shakespeare"
    model, tokenizer, _ = mdlm.load(folder)
    w = {name: t.astype(np.float64) for name, t in load_file(folder / "model.safetensors").items()}
    c = json.loads((folder / "config.json").read_text())["config"]
    T = 100
    C = c["n_embd"]
    H = c["n_head"]
    D = C // H
    angle = np.arange(T)[:, None, None] * 10000.0 ** (-np.arange(0, D, 2) / D)

    def norm(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.finfo(np.float32).eps)

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def near(h, kernel):
        padded = np.pad(h, ((len(kernel) // 2,) * 2, (0, 0)))
        return h + sum(padded[i : i + T] * kernel[i] for i in range(len(kernel)))

    def turn(x):
        a, b = np.split(norm(x), 2, -1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    xt = np.arange(T) * 7 % (tokenizer.vocab_size + 1)  # all characters and [MASK]
    x = norm(w["embed.weight"][xt])
    for i in range(c["n_layer"]):
        block = {k.split(".")[2]: v for k, v in w.items() if k.startswith(f"blocks.{i}.")}
        conv = block["conv"]
        if "qkv" in block:
            parts = (near(norm(x), conv[0]) @ block["qkv"].T).reshape(T, 3, H, -1)
            q, k, v = np.moveaxis(parts, 1, 0)
            p = softmax(np.einsum("qhd,khd->hqk", turn(q), turn(k)) / D**0.5)
            x = x + np.einsum("hqk,khd->qhd", p, v).reshape(T, C) @ block["proj"].T
        x = x + np.maximum(near(norm(x), conv[-1]) @ block["up"].T, 0) ** 2 @ block["down"].T
    ours = model(torch.from_numpy(xt)[None])[0].softmax(-1).detach().numpy()
    np.testing.assert_allclose(ours, softmax(norm(x) @ w["head.weight"].T), atol=1e-4)


def test_batches_of_an_evaluation_are_spread(world):
    """One that a deadline cuts off has seen windows from everywhere."""
    V = 32
    toy = Toy(lambda xt: torch.zeros(*xt.shape, V), V, 4)
    windows = torch.arange(V)[:, None].expand(V, 4)
    seen = set()
    r = mdlm.evaluate(
        toy,
        windows,
        passes=2,
        batch_size=8,
        observe=lambda rows, targets, logits: seen.update(targets.tolist()),
        deadline=-math.inf,
    )
    assert r["windows"] == 8 and seen == set(range(0, V, 4))
    assert r["nelbo"] == pytest.approx(math.log(V))


def test_tied_head_scores_a_token_by_its_own_embedding():
    model = scrambled(tie=True)
    xt = torch.arange(32).view(2, 16) % (model.vocab_size + 1)
    features = model.features(model.objective.view(xt))  # (2, 16, C)
    for id in (0, model.vocab_size - 1):
        wanted = features @ model.embed.weight[id]
        torch.testing.assert_close(model(model.objective.view(xt))[..., id], wanted)
