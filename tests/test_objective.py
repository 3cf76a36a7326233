"""The training loss and the evaluation are what the mathematics says."""

import itertools
import json
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, Toy, chain_rule, exhaustive_nelbo, run_mdlm
from safetensors.numpy import load_file

import kernels
import mdlm


def untrained(V=65, **more):
    config = mdlm.Config(
        **dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=8, dropout=0.0) | more
    )
    return mdlm.Model(config, V, kernels.select("torch"))


def batch_loss(model, corpus, weights, step):
    samples = torch.arange(model.config.batch_size)
    xt, targets, rows, weight = mdlm.make_batch(model, corpus, weights, step, samples)
    h = model.features(xt, rows).flatten(0, -2)
    return model.ops.linear_cross_entropy(h, model.head_weight(), targets, None, weight).item()


def test_a_uniform_model_evaluates_to_ln_v():
    windows = torch.randint(65, (40, 16))
    for objective, key in (("mdlm", "nelbo"), ("ar", "nll")):
        assert mdlm.evaluate(untrained(objective=objective), windows)[key] == pytest.approx(
            math.log(65), abs=1e-5
        )


@pytest.mark.parametrize(
    "more",
    [
        dict(),
        dict(mask_schedule="cosine"),
        dict(masking="bernoulli"),
        dict(objective="ar"),
        dict(masking="bernoulli", mask_schedule="cosine"),
        dict(loss_weight="uniform"),
    ],
)
def test_the_training_loss_of_a_uniform_model_is_ln_v_in_expectation(more):
    model = untrained(**more)
    corpus = SimpleNamespace(batch=lambda samples: torch.randint(65, (len(samples), 16)))
    weights = mdlm.sequence_weights(model.config)
    values = torch.tensor([batch_loss(model, corpus, weights, step) for step in range(400)])
    error = values.std() / len(values) ** 0.5
    assert abs(values.mean() - math.log(65)) < 4 * error + 1e-4
    if more in (dict(), dict(objective="ar")):  # then even every single batch gives it
        assert values.sub(math.log(65)).abs().max() < 1e-4


def test_with_an_exact_posterior_nelbo_and_chain_rule_are_minus_log_p(world):
    wanted = -world.p.log() / world.T
    assert torch.allclose(exhaustive_nelbo(world.exact, world.x, world.V), wanted, atol=1e-9)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        assert torch.allclose(chain_rule(world.exact, world.x, world.V, order), wanted, atol=1e-9)


def test_the_mean_over_all_24_orders_is_the_nelbo_of_any_model(world):
    orders = list(itertools.permutations(range(4)))
    mean = sum(chain_rule(world.random, world.x, world.V, order) for order in orders) / len(orders)
    assert len(orders) == 24
    assert torch.allclose(mean, exhaustive_nelbo(world.random, world.x, world.V), atol=1e-12)


@pytest.mark.parametrize("which", ["exact", "random"])
def test_evaluate_estimates_the_nelbo_within_its_standard_error(world, which):
    logits = getattr(world, which)
    windows = world.x[
        torch.multinomial(world.p, 3000, replacement=True, generator=torch.Generator().manual_seed(0))
    ]
    truth = exhaustive_nelbo(logits, windows, world.V).mean().item()
    for passes in (1, 3):
        r = mdlm.evaluate(Toy(logits, world.V, world.T), windows, passes=passes)
        # The windows are given and only masks are random: the standard error, of both, is an upper bound.
        assert abs(r["nelbo"] - truth) < 4 * r["se"]
        assert 0.001 < r["se"] < 0.05
    assert r == mdlm.evaluate(Toy(logits, world.V, world.T), windows, passes=passes), (
        "evaluation is deterministic"
    )


def test_the_standard_error_is_that_of_the_data_and_the_masks(world):
    g = torch.Generator().manual_seed(1)
    truth = (world.p * exhaustive_nelbo(world.random, world.x, world.V)).sum().item()
    z = []
    for seed in range(60):
        windows = world.x[torch.multinomial(world.p, 500, replacement=True, generator=g)]
        r = mdlm.evaluate(Toy(world.random, world.V, world.T), windows, seed=seed)
        z.append((r["nelbo"] - truth) / r["se"])
    z = torch.tensor(z)
    assert abs(z.mean()) < 4 / 60**0.5
    assert 0.7 < z.std() < 1.3


@pytest.mark.parametrize("masking", ["exact", "bernoulli"])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_training_loss_is_unbiased(world, masking, schedule):
    windows = world.x.repeat(2, 1)[:128]
    toy = Toy(world.random, world.V, world.T, batch_size=128, masking=masking, mask_schedule=schedule)
    corpus = SimpleNamespace(batch=lambda samples: windows)
    weights = mdlm.sequence_weights(toy.config)
    truth = exhaustive_nelbo(world.random, windows, world.V).mean().item()
    values = torch.tensor(
        [batch_loss(toy, corpus, weights, step) for step in range(1500)], dtype=torch.float64
    )
    z = (values.mean().item() - truth) / (values.std().item() / len(values) ** 0.5)
    assert abs(z) < 4, f"mean {values.mean():.5f}, truth {truth:.5f}"


def test_the_loss_varies_less_than_stratified_one_over_t():
    """A profile of CE by mask rate with noise of tokens: L = 256, batches of 64, 20,000 of each."""
    L, N, steps = 256, 64, 20_000
    g = torch.Generator().manual_seed(0)
    profile = lambda l: 0.4 + 2.9 * (l / L) ** 0.7 + torch.randn(l.shape, generator=g) / l.clamp(min=1) ** 0.5

    config = mdlm.Config(block_size=L, batch_size=N)
    l = torch.stack([mdlm.draw_levels(config, step) for step in range(steps)]).double()
    ours = profile(l).mean(1).std()

    def one_over_t(t, weight):
        l = torch.binomial(torch.full_like(t, L), t, generator=g)
        return (weight(t, l) * l * profile(l) / L).mean(1).std()

    strata = (torch.arange(N) + torch.rand(steps, N, generator=g)) / N
    eps = 1e-3
    stratified = one_over_t(eps + (1 - eps) * strata, lambda t, l: 1 / t)
    independent = one_over_t(eps + (1 - eps) * torch.rand(steps, N, generator=g), lambda t, l: 1 / t)
    rao_blackwell = one_over_t(strata, lambda t, l: (L + 1) / l.clamp(min=1))
    assert ours < rao_blackwell < stratified < independent
    assert ours < 0.6 * stratified


def test_every_micro_batch_has_the_same_number_of_masked_rows_and_counts_are_uniform():
    config = mdlm.Config(block_size=64, batch_size=16)
    l = torch.stack([mdlm.draw_levels(config, step) for step in range(2000)])  # (2000, 16)
    assert (l[:, 0::2] + l[:, 1::2] == 65).all()
    assert l.min() == 1 and l.max() == 64
    expected = l.numel() / 64
    chi2 = ((l.flatten().bincount(minlength=65)[1:] - expected) ** 2 / expected).sum()
    assert chi2 < 63 + 5 * (2 * 63) ** 0.5  # stratification only makes it smaller


def test_the_levels_of_a_step_do_not_depend_on_who_computes_them():
    config = mdlm.Config(block_size=64, batch_size=16)
    assert torch.equal(mdlm.draw_levels(config, 3), mdlm.draw_levels(config, 3))
    assert not torch.equal(mdlm.draw_levels(config, 3), mdlm.draw_levels(config, 4))


def test_the_model_gives_v_logits_and_reads_both_sides():
    model = untrained(V=10)
    torch.manual_seed(0)
    for p in model.parameters():
        p.data.normal_(std=0.3)
    x = torch.randint(11, (2, 16))
    y = model(x)
    assert y.shape == (2, 16, 10) and y.dtype == torch.float32
    for i in (0, 15):
        changed = x.clone()
        changed[:, i] = (x[:, i] + 1) % 11
        assert (model(changed) - y)[:, 8].abs().max() > 1e-6


def test_the_autoregressive_model_reads_only_to_the_left():
    for more in (dict(), dict(pos="learned"), dict(pos="sinusoidal")):
        model = untrained(V=10, objective="ar", **more)
        for p in model.parameters():
            p.data.normal_(std=0.3)
        x = torch.randint(10, (2, 16))
        changed = x.clone()
        changed[:, 8] = (x[:, 8] + 1) % 10
        before, after = (model(mdlm.shift_right(z, 10)) for z in (x, changed))
        assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6), "token 8 is seen from position 9 on"
        assert (before - after)[:, 9].abs().max() > 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_bfloat16_on_a_cpu_errs_no_more_than_twice_pytorchs(causal):
    g = torch.Generator().manual_seed(0)
    qkv, grad = torch.randn(2, 70, 3, 2, 32, generator=g), torch.randn(2, 70, 2, 32, generator=g)

    def run(attention, dtype):
        x = qkv.to(dtype).requires_grad_()
        y = attention(x)
        return y.detach().double(), *torch.autograd.grad(y, x, grad.to(dtype))[0].double().unbind(2)

    def sdpa(x):
        q, k, v = x.transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    exact = run(sdpa, torch.float64)
    ours = run(lambda x: kernels.attention_ref(x, causal=causal), torch.bfloat16)
    for name, e, a, b in zip(("y", "dq", "dk", "dv"), exact, ours, run(sdpa, torch.bfloat16), strict=True):
        assert (a - e).abs().max() <= 2 * (b - e).abs().max() + 2e-3, name


def test_both_objectives_score_the_same_tokens():
    x0 = torch.randint(65, (8, 16))
    corpus = SimpleNamespace(batch=lambda samples: x0[samples % 8])
    for objective in ("mdlm", "ar"):
        model = untrained(objective=objective)
        xt, targets, rows, weight = mdlm.make_batch(
            model, corpus, mdlm.sequence_weights(model.config), 0, torch.arange(8)
        )
        assert torch.equal(targets, x0.flatten() if rows is None else x0.flatten()[rows])
        assert xt.shape == x0.shape and weight.sum() == pytest.approx(1, abs=1e-5)
        if objective == "mdlm":
            assert (xt.flatten()[rows] == 65).all() and (xt == 65).sum() == len(rows) == 8 * 17 // 2


@pytest.mark.parametrize("more", [dict(), dict(masking="bernoulli"), dict(time_conditioning=True)])
def test_computing_only_what_is_scored_changes_neither_loss_nor_gradient(more):
    model = untrained(n_layer=2, **more)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x0 = torch.randint(65, (8, 16))
    xt, targets, rows, weight = mdlm.make_batch(
        model, SimpleNamespace(batch=lambda s: x0), mdlm.sequence_weights(model.config), 0, torch.arange(8)
    )
    if not mdlm.has_static_rows(model.config):  # as on a GPU, where padding of weight 0 follows
        rows, targets, weight = F.pad(rows, (0, 9), value=-1), F.pad(targets, (0, 9)), F.pad(weight, (0, 9))
    some = model(xt, targets, rows, weight)
    some_gradients = torch.autograd.grad(some, list(model.parameters()))
    ce = F.cross_entropy(model(xt).flatten(0, 1)[rows], targets, reduction="none")
    everything = (ce * weight).sum()
    torch.testing.assert_close(some, everything)
    for a, b in zip(some_gradients, torch.autograd.grad(everything, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_only_masked_rows_reach_the_head(monkeypatch):
    seen = []
    model = untrained()
    x0 = torch.randint(65, (8, 16))
    batch = mdlm.make_batch(
        model, SimpleNamespace(batch=lambda s: x0), mdlm.sequence_weights(model.config), 0, torch.arange(8)
    )
    linear = F.linear
    monkeypatch.setattr(
        F,
        "linear",
        lambda x, w, b=None: (seen.append(tuple(x.shape)) if w.shape[0] == 65 else None) or linear(x, w, b),
    )
    model(*batch)
    assert seen == [(8 * 17 // 2, 32)]


def test_clipped_rates_and_uniform_weights_are_no_bound():
    assert mdlm.is_bound(mdlm.Config()) and mdlm.is_bound(mdlm.Config(mask_schedule="cosine"))
    assert not mdlm.is_bound(mdlm.Config(min_rate=0.15)) and not mdlm.is_bound(mdlm.Config(max_rate=0.5))
    assert not mdlm.is_bound(mdlm.Config(loss_weight="uniform"))
    levels = mdlm.draw_levels(mdlm.Config(min_rate=0.15, max_rate=0.15, block_size=100), 0)
    assert (levels == 16).all()  # 1 + floor(0.15 * 100)


def test_early_in_a_run_both_ends_of_the_rates_are_left_out():
    config = mdlm.Config(block_size=64, batch_size=16, rate_margin=0.25)
    for early, low, high in ((1, 17, 48), (0.5, 9, 56), (0, 1, 64)):
        l = torch.stack([mdlm.draw_levels(config, step, early) for step in range(2000)])
        assert (l[:, 0::2] + l[:, 1::2] == 65).all(), "shapes stay as they are"
        assert l.min() == low and l.max() == high
        expected = l.numel() / (high - low + 1)
        chi2 = ((l.flatten().bincount(minlength=65)[low : high + 1] - expected) ** 2 / expected).sum()
        assert chi2 < high - low + 5 * (2 * (high - low)) ** 0.5, "uniform in between"
    for L, half in ((1, {1}), (2, {1, 2}), (64, {32, 33}), (65, {33})):  # the default: half of the tokens
        assert set(mdlm.draw_levels(mdlm.Config(block_size=L), 0, early=1).tolist()) == half
    assert (mdlm.draw_levels(mdlm.Config(masking="bernoulli"), 0, early=1) == 0.5).all()
    for more in (
        dict(min_rate=0.1),  # chosen rates and weights stay as they are
        dict(loss_weight="uniform"),
        dict(mask_schedule="cosine"),
        dict(time_conditioning=True),  # a model that is told its rate must have seen the others
    ):
        config = mdlm.Config(**more)
        assert torch.equal(mdlm.draw_levels(config, 5, early=1), mdlm.draw_levels(config, 5))


@pytest.mark.parametrize("limit", ["--max_steps=12", "--time_limit=12"])
def test_a_run_begins_at_half_of_the_tokens_and_ends_with_any_number(text_file, tmp_path, monkeypatch, limit):
    make_batch, masked = mdlm.make_batch, []

    def hooked(model, *more):
        batch = make_batch(model, *more)
        masked.append((batch[0] == model.mask_id).sum(1))
        time.sleep(0.1)
        return batch

    monkeypatch.setattr(mdlm, "make_batch", hooked)
    assert run_mdlm(f"--data={text_file}", *TINY, f"--out_dir={tmp_path / 'out'}", limit) == 0
    spread = [int(l.max() - l.min()) for l in masked]  # of 32 tokens
    assert spread[0] == 1 and spread[-1] >= 16, spread
    if "steps" in limit:
        assert set(spread[:7]) == {1} and all(s > 1 for s in spread[7:]), spread


@pytest.mark.parametrize("masking", ["exact", "bernoulli"])
def test_bert_masking_with_uniform_weights_is_the_mean_over_masked_tokens(masking):
    config = mdlm.Config(min_rate=0.15, max_rate=0.15, block_size=100, loss_weight="uniform", masking=masking)
    weight = mdlm.sequence_weights(config)
    masked = 16 if masking == "exact" else 15  # 1 + floor(15), and the expected number
    assert weight[masked] == pytest.approx(1, abs=1e-5) and weight[30] == pytest.approx(30 / masked, abs=1e-4)


@pytest.mark.parametrize("W, passes", [(15, 1), (32, 1), (32, 4)])
def test_the_standard_error_is_honest_with_few_windows(W, passes):
    T, V = 128, 5
    slope = torch.linspace(0.2, 2.0, T)  # a model whose CE depends on the window and on the mask rate

    def logits(xt):
        sharp = slope[(xt == V).sum(1) - 1][:, None, None]
        return torch.nn.functional.one_hot((xt * 0 + 1), V) * sharp

    g, estimates, errors = torch.Generator().manual_seed(0), [], []
    for seed in range(80):
        share = torch.rand(W, 1, generator=g)
        windows = (torch.rand(W, T, generator=g) > share).long()
        r = mdlm.evaluate(Toy(logits, V, T), windows, passes=passes, seed=seed)
        estimates.append(r["nelbo"])
        errors.append(r["se"])
    ratio = torch.tensor(errors).square().mean().sqrt() / torch.tensor(estimates).std()
    assert 0.75 < ratio < 1.6, ratio


def test_the_shipped_weights_mean_what_a_second_implementation_in_float64_makes_of_their_file():
    folder, tokenizer = ROOT / "weights" / "shakespeare", mdlm.load(ROOT / "weights" / "shakespeare")[1]
    w = {name: t.astype(np.float64) for name, t in load_file(folder / "model.safetensors").items()}
    c = json.loads((folder / "config.json").read_text())["config"]
    T, C, H = 100, c["n_embd"], c["n_head"]
    angle = np.arange(T)[:, None, None] * 10000.0 ** (-np.arange(0, C // H, 2) / (C // H))

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
        conv, qkv, proj, up, down = (
            w[f"blocks.{i}.{name}"]
            for name in ("conv", "qkv.weight", "proj.weight", "up.weight", "down.weight")
        )
        q, k, v = np.moveaxis((near(norm(x), conv[0]) @ qkv.T).reshape(T, 3, H, -1), 1, 0)
        p = softmax(np.einsum("qhd,khd->hqk", turn(q), turn(k)) / (C // H) ** 0.5)
        x = x + np.einsum("hqk,khd->qhd", p, v).reshape(T, C) @ proj.T
        x = x + np.maximum(near(norm(x), conv[1]) @ up.T, 0) ** 2 @ down.T
    model = mdlm.load(folder)[0]
    np.testing.assert_allclose(
        model(torch.from_numpy(xt)[None])[0].softmax(-1).detach().numpy(),
        softmax(norm(x) @ w["head.weight"].T),
        atol=1e-4,
    )
