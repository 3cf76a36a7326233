"""Block diffusion: blocks of S tokens from left to right, diffusion inside (--block_length)."""

import itertools
import json
import math
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, draw, losses, read_log, run_mdlm, saved, tiers

import eval
import export
import mdlm
import sample
from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels import reference
from nanomdlm.support.cli import entry
from nanomdlm.support.cli.python_arguments import to_view
from nanomdlm.support.infill.likelihood import chain_rule
from nanomdlm.support.infill.model_calls import groups
from nanomdlm.support.view import masked_rows
from nanomdlm.variants import documents
from nanomdlm.variants.cache import Cache

V = 5


def network(S, T=16, end_id=None, mean_length=None, **settings):
    """A float64 network whose weights are all random."""
    flags = dict(n_layer=3, n_head=2, n_embd=16, block_size=T, block_length=S, attention_every=2)
    config = mdlm.Config(**flags | dict(dropout=0.0) | settings)
    torch.manual_seed(1)
    model = mdlm.make_model(config, V, kernels.REFERENCES, end_id, mean_length).double().eval()
    model.register_forward_pre_hook(to_view, with_kwargs=True)  # as mdlm.load does
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    return model


def texts(B=2, T=16, rate=0.5):
    g = torch.Generator().manual_seed(2)
    x0 = torch.randint(V, (B, T), generator=g)
    return torch.where(torch.rand(B, T, generator=g) < rate, V, x0), x0


def one_block(model, x0, xt, b):
    """Logits of block b of xt after the text of earlier ones, by a plain block-causal network."""
    S, C = model.config.block_length, model.config.n_embd
    x = F.rms_norm(model.embed(torch.cat((x0[:, : b * S], xt[:, b * S : (b + 1) * S]), 1)), (C,))
    B, n, _ = x.shape
    block = torch.arange(n) // S

    def norm(part, x):
        h = F.rms_norm(x, (C,))
        out = h.clone()
        k = len(part)
        for i, offset in itertools.product(range(n), range(-(k // 2), k - k // 2)):
            j = i + offset
            if 0 <= j < n and block[j] <= block[i]:
                out[:, i] += h[:, j] * part[offset + k // 2]
        return out

    cos, sin = model.cos[:n], model.sin[:n]
    for layer in model.layers:
        if layer.qkv is not None:
            qkv = layer.qkv(norm(layer.conv[0], x)).view(B, n, 3, model.config.n_head, -1)
            q, k, v = (z.transpose(1, 2) for z in reference.prepare(qkv, cos, sin, True))
            scores = q @ k.mT / q.shape[-1] ** 0.5
            scores = scores.masked_fill(block[:, None] < block, -math.inf)
            y = scores.softmax(-1) @ v
            x = x + layer.proj(y.transpose(1, 2).reshape(B, n, C))
        x = x + layer.down(F.relu(layer.up(norm(layer.conv[-1], x))).square())
    return F.linear(F.rms_norm(x, (C,)), model.head.weight).float()[:, b * S :]


@pytest.mark.parametrize("S", [1, 4, 8])
def test_training_sees_what_the_sampler_sees(S):
    """The forward of 2T rows equals that of each block after the text of earlier ones."""
    model = network(S)
    xt, x0 = texts()
    with torch.no_grad():
        logits = model(xt, x0=x0)
        for b in range(16 // S):
            wanted = one_block(model, x0, xt, b)
            assert torch.allclose(logits[:, b * S : (b + 1) * S], wanted, atol=1e-6)


@pytest.mark.parametrize("S", [1, 4, 8])
def test_no_token_sees_a_later_block(S):
    model = network(S)
    xt, x0 = texts()
    embedded = []

    def keep(module, ids, x):
        embedded.append(x.detach().requires_grad_())
        return embedded[0]

    model.embed.register_forward_hook(keep)
    logits = model(xt, x0=x0)
    for b in range(16 // S):
        (g,) = torch.autograd.grad(
            logits[:, b * S : (b + 1) * S].sum(), embedded[0], retain_graph=True
        )
        seen = g.abs().sum((0, 2)) > 0
        noisy, text = seen.split(16)
        assert noisy.nonzero()[:, 0].tolist() == list(range(b * S, (b + 1) * S))
        assert text.nonzero()[:, 0].tolist() == list(range(b * S))


def exhaustive(model, x0):
    """(B,) the NELBO per token: the mean over blocks, counts and sets of masked positions."""
    S = model.config.block_length
    B, T = x0.shape
    total = torch.zeros(B, dtype=torch.float64)
    for b, size in itertools.product(range(T // S), range(1, S + 1)):
        sets = list(itertools.combinations(range(b * S, (b + 1) * S), size))
        for s in map(list, sets):
            xt = x0.clone()
            xt[:, s] = V
            with torch.no_grad():
                logp = model(xt, x0=x0).log_softmax(-1).gather(2, x0[..., None])[..., 0]
            total -= logp[:, s].double().mean(1) / len(sets) / S / (T // S)
    return total


@pytest.mark.parametrize("S", [1, 2, 4])
def test_nelbo_is_that_of_all_masks(S):
    model = network(S, T=8)
    _, x0 = texts(B=6, T=8)
    wanted = exhaustive(model, x0)
    copies = 1 if S == 1 else 250
    r = mdlm.evaluate(model, x0.repeat(copies, 1), passes=8, batch_size=2000)
    each = torch.tensor(r["by_window"], dtype=torch.float64).view(copies, -1).mean(0)
    assert torch.allclose(each, wanted, atol=1e-5 if S == 1 else 0.08)
    assert abs(r["nelbo"] - wanted.mean()) < (1e-5 if S == 1 else 0.02)


def test_blocks_of_one_token_are_the_chain_rule():
    model = network(1)
    _, x0 = texts(B=5)
    exact = -chain_rule(model, x0).sum(1) / 16
    found = torch.tensor(mdlm.evaluate(model, x0)["by_window"], dtype=torch.float64)
    assert torch.allclose(found, exact, atol=1e-6)


@pytest.mark.parametrize("S", [1, 4, 8])
def test_training_loss_is_unbiased(S):
    model = network(S, T=8, batch_size=4, rate_margin=0.0)
    _, x0 = texts(B=4, T=8)
    wanted = exhaustive(model, x0).mean()
    found = []
    with torch.no_grad():
        for step in range(20 if S == 1 else 200):
            drawn = draw(model, x0, step)
            counts = drawn[1]
            assert len(counts) == 4 * 8 // S and (counts[::2] + counts[1::2] == S + 1).all()
            found.append(model(*model.objective.batch(model.ops, *drawn)[:3]).double())
    found = torch.stack(found)
    z = (found.mean() - wanted) / (found.std() / len(found) ** 0.5)
    assert abs(z) < 4 if S > 1 else abs(found - wanted).max() < 1e-5


# --------------------------------------------------------------------------------------------------
# Prompts, which are given: they end within a block, where one ends, and after several

END = V - 1
PROMPTS = (2, 4, 1, 7)  # tokens, with the [END] of each


def answerer(S, x0=None, **settings):
    """A network that learns what follows prompts, in blocks of S of 8 tokens."""
    mean = None if x0 is None else 8 - sum(PROMPTS) / len(PROMPTS)
    settings = dict(prompt_column="q", batch_size=4, rate_margin=0.0) | settings
    return network(S, 8, END, mean, **settings)


def prompted():
    """(4, 8) ids: prompts, their [END] and what is to follow."""
    x0 = texts(B=4, T=8)[1]
    for row, n in zip(x0, PROMPTS):
        row[:n] = row[:n].clamp(max=END - 1)
        row[n - 1] = END
    return x0


def losses_of_answers(model, x0):
    """(4,) nats of each text, by the bound: the sum over blocks of n_b times the mean over l of the
    mean over sets of l scored positions of the mean CE there."""
    S = model.config.block_length or 8
    total = torch.zeros(4, dtype=torch.float64)
    for row, first in enumerate(PROMPTS):
        for begin in range(0, 8, S):
            inside = range(max(first, begin), begin + S)
            n = len(inside)
            for size in range(1, n + 1):
                sets = list(itertools.combinations(inside, size))
                xt = x0[row].repeat(len(sets), 1)
                for i, s in enumerate(map(list, sets)):
                    xt[i, s] = V
                with torch.no_grad():
                    logp = model(xt, x0=x0[row].expand_as(xt)).log_softmax(-1).double()
                ce = -logp.gather(2, x0[row].expand_as(xt)[..., None])[..., 0] * (xt == V)
                total[row] += n * ce.sum().item() / size / len(sets) / n
    return total


def expected_loss(model, x0, monkeypatch):
    """The training loss, averaged over all counts and all masks that may be drawn."""
    S = model.config.block_length or 8
    objective = model.objective
    numbers = torch.arange(4)
    scored = objective.scored_mask(x0).view(-1, S)  # (n, S) of all blocks
    n = len(scored)
    parts = math.lcm(*range(1, S + 1))
    share = torch.zeros(n, S + 1, dtype=torch.float64)  # how often a block has each count
    for i in range(parts):
        u = torch.full((n // 2,), (i + 0.5) / parts, dtype=torch.float64)
        monkeypatch.setattr(mdlm, "stratified", lambda *key, u=u: u)
        counts = objective.mask_counts(0, 0.0, numbers, objective.scored_mask(x0).sum(1))
        assert (counts <= scored.sum(1)).all() and ((counts > 0) == scored.any(1)).all()
        assert counts.sum() <= n * (S + 1) // 2, "what compiled shapes hold"
        share[torch.arange(n), counts] += 1 / parts
    found = 0.0
    for block, size in share[:, 1:].nonzero().tolist():  # of a block the loss is a term of its own
        size += 1
        sets = list(itertools.combinations(scored[block].nonzero()[:, 0].tolist(), size))
        counts = torch.zeros(n, dtype=torch.int64).index_fill(0, torch.tensor([block]), size)
        for s in map(list, sets):
            hidden = torch.zeros(n, S, dtype=torch.bool)
            hidden[block, s] = True
            with torch.no_grad():
                drawn = (x0, counts, 0, numbers)
                loss = model(*objective.batch(hide_these(hidden, ~scored), *drawn)[:3]).item()
            found += loss / len(sets) * share[block, size].item()
    return found


def hide_these(hidden, given):
    """Operations that mask these positions (B, T), where the objective gives those `given`."""

    def mask_tokens(x0, counts, mask_id, seed, step, samples, fixed):
        assert torch.equal(fixed, given)
        rows = hidden.flatten().nonzero()[:, 0]
        padded = F.pad(rows, (0, x0.numel() - len(rows)), value=-1)
        return x0.masked_fill(hidden, mask_id), counts, padded, torch.tensor(len(rows))

    return SimpleNamespace(mask_tokens=mask_tokens)


@pytest.mark.parametrize("S", [1, 2, 4, 8])
def test_training_loss_of_answers_is_the_bound(S, monkeypatch):
    """In expectation over all counts and masks; with blocks of one token it is the chain rule; with
    one block it is that of prompts without blocks."""
    x0 = prompted()
    model = answerer(S, x0)
    nats = losses_of_answers(model, x0)
    n_scored = 32 - sum(PROMPTS)
    loss = expected_loss(model, x0, monkeypatch)
    assert loss == pytest.approx(nats.sum().item() / n_scored, rel=1e-5)
    if S == 1:
        assert torch.allclose(-chain_rule(model, x0).sum(1), nats, atol=1e-5)


def test_batches_of_answers_are_the_same_in_parts_and_padded(monkeypatch):
    """Whatever ranks and accumulation make of them; a GPU's, whose size is static, too."""
    x0 = prompted()
    model = answerer(4, x0)
    drawn = draw(model, x0)
    made = model.objective.batch(model.ops, *drawn)
    for at in ([0, 1], [2, 3]):
        part = draw(model, x0, samples=torch.tensor(at))
        assert torch.equal(part[1], drawn[1].view(4, -1)[at].flatten())
        part = model.objective.batch(model.ops, *part)
        assert torch.equal(part[0].ids, made[0].ids[at])
    monkeypatch.setattr(documents, "masked_rows", partial(masked_rows, waits=False))
    padded = model.objective.batch(model.ops, *drawn)
    assert len(padded[1]) == 4 * 8 * 5 // 4 // 2 > len(made[1])
    assert model(*padded[:3]).item() == pytest.approx(model(*made[:3]).item(), rel=1e-6)


@pytest.mark.parametrize("S", [1, 2, 4])
def test_evaluation_of_answers_is_the_bound(S):
    x0 = prompted()
    model = answerer(S)
    wanted = losses_of_answers(model, x0)
    copies = 1 if S == 1 else 200
    r = mdlm.evaluate(model, x0.repeat(copies, 1), passes=4, batch_size=2000)
    mean = 8 - sum(PROMPTS) / 4
    each = torch.tensor(r["by_window"], dtype=torch.float64).view(copies, -1) * mean
    error = each.std(0) / copies**0.5 if S > 1 else 1e-6
    assert ((each.mean(0) - wanted).abs() < 4 * error + 1e-5).all()
    assert r["nelbo"] == pytest.approx(sum(r["by_window"]) / len(each) / 4)
    assert abs(r["nelbo"] - wanted.mean() / mean) < 0.01


def test_error_of_answers_is_that_of_windows():
    """What other windows and masks would give differs by it: within 4 errors of 60 trials."""
    model = network(4, end_id=END, prompt_column="q")
    g = torch.Generator().manual_seed(0)
    found = []
    for seed in range(60):
        x0 = torch.randint(END, (64, 16), generator=g)
        prompts = torch.randint(1, 14, (64,), generator=g)  # tokens of each, with its [END]
        x0[torch.arange(64), prompts - 1] = END
        r = mdlm.evaluate(model, x0, seed=seed)
        found.append((r["nelbo"], r["se"]))
    nelbo, error = torch.tensor(found).T
    assert error.mean().item() == pytest.approx(nelbo.std().item(), rel=4 / (2 * 60) ** 0.5)


@pytest.mark.parametrize("S", [2, 4])
def test_answers_to_no_prompt_are_texts(S, monkeypatch):
    """With nothing given, blocks are masked, weighed and evaluated as those of text."""
    _, x0 = texts(B=4, T=8)
    model = answerer(S, rate_margin=0.5)
    monkeypatch.setattr(type(model.objective.inner), "scored_mask", lambda _, x0: x0 >= 0)
    plain = network(S, 8, batch_size=4, rate_margin=0.5)
    for step in range(3):
        found = []
        for m in (model, plain):
            view, targets, weights, _ = m.objective.batch(m.ops, *draw(m, x0, step, margin=0.25))
            found.append((view.ids, view.rows, targets, weights))
        assert all(torch.equal(*pair) for pair in zip(*found))
    ours, theirs = (mdlm.evaluate(m, x0, passes=2) for m in (model, plain))
    for key in ("nelbo", "by_window", "ce", "accuracy"):
        assert ours[key] == pytest.approx(theirs[key])


# --------------------------------------------------------------------------------------------------
# The cache


def first_seen(end, T, S):
    """Where the window of a block up to `end` begins: half a context is dropped at a time."""
    half = max(S, T // 2 // S * S)
    first = 0
    while end - first > T:
        first += half
    return first


OTHER = [(4, dict(pos="learned")), (16, dict(pos="sinusoidal", conv=4))]


@pytest.mark.parametrize("S, settings", [(1, {}), (4, {}), (16, {}), *OTHER])
def test_cache_sees_what_training_sees(S, settings):
    """Of 4 T tokens too: then as in a window that holds the last ones alone."""
    T = 32
    model = network(S, T, **settings)
    xt, x0 = texts(T=4 * T)
    cache = Cache(model.config)
    with torch.no_grad():
        for begin in range(0, 4 * T, 3 * S):
            end = begin + S
            first = first_seen(end, T, S)
            wanted = model(xt[:, first:end], x0=x0[:, first:end])[:, -S:]
            for _ in range(2):  # first with three blocks that it does not know, then with none
                text = torch.cat((x0[:, :begin], xt[:, begin:end]), 1)[:, cache.follow(begin) :]
                found = model(cache.view(text))[:, -S:]
                assert torch.allclose(found, wanted, atol=1e-6)
    assert all(buffer.shape[1] == T for buffer in cache.buffers.values()), "memory is constant"
    bound = 8 * 4 * 3 * T * 16  # bytes a text: 4 values a layer, of which groups() keeps 1 GiB
    assert sum(buffer[0].nbytes for buffer in cache.buffers.values()) <= bound


def test_memory_of_all_caches_is_bounded():
    """Of many texts at once, however small the blocks are."""
    for L, C, T, wanted in ((4, 192, 256, 124), (12, 768, 1024, 4), (96, 4096, 1024, 2)):
        config = SimpleNamespace(n_layer=L, n_embd=C, block_size=T)
        objective = SimpleNamespace(n_texts=T // 4)
        model = SimpleNamespace(config=config, objective=objective, vocab_size=65)
        size = groups(model, 1000, "cpu", writing=True)[0].stop
        assert size == wanted and size <= max(groups(model, 1000, "cpu")[0].stop, 2**26 / L / C / T)


def without_cache(model, device, x, given, drawn, at, cfg, cache):
    T, S = model.config.block_size, model.config.block_length
    begin, end = at.start, at.start + S
    first = first_seen(end, T, S)
    text = F.pad(x, (0, S), value=V)[:, first:end].clone()
    where = F.pad(drawn, (begin - first, S - len(at)))
    text[where] = V
    return model(text)[where]


ORDERS = ["spread", "confidence", "left_to_right", "ancestral"]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("S, order", [(1, "auto"), (8, "spread"), *((4, o) for o in ORDERS)])
def test_draws_are_the_same_without_the_cache(S, order, asks, monkeypatch):
    """Also of an answer, whose prompt may end within a block."""
    model = network(S, end_id=END, prompt_column="q") if asks else network(S)
    x = torch.full((3, 42), V)  # the last block is cut off
    prompt = torch.arange(3 * 21).view(3, 21) % (V - 1)  # longer than the context
    if asks:
        prompt[:, -1] = END
    x[:, :21] = prompt
    settings = dict(seed=5, order=order, end_id=V - 1) | (dict(steps=12) if S > 1 else {})
    steps = list(sample.unmask(model, x, **settings))
    alone = sample.generate(model, x[1:2], samples=torch.tensor([1]), **settings)
    monkeypatch.setattr(sample, "predict", without_cache)
    plain = list(sample.unmask(model, x, **settings))
    assert len(steps) == len(plain) and torch.equal(steps[-1].calls, plain[-1].calls)
    assert all(torch.equal(a.x, b.x) for a, b in zip(steps, plain))
    assert torch.equal(alone[0], steps[-1].x[1])
    assert torch.equal(steps[-1].x[:, :21], prompt) and not (steps[-1].x == V).any()


def seen_by(model):
    """A list that grows by the number of tokens in each network call, without its padding."""
    seen = []

    def count(_, args):
        views = getattr(args[0].cache, "views", args)  # of a call that several share
        seen.append(sum(view.ids.numel() for view in views))

    model.register_forward_pre_hook(count)
    return seen


def test_a_block_costs_the_same_anywhere():
    model = network(4)
    seen = seen_by(model)
    sample.generate(model, torch.full((1, 16 * 20), V), seed=0, steps=8, correct=4)
    assert len(seen) == 80 * 2, "no call to see what is written"
    assert max(seen) == 8 + 4, "half a context is kept, and a block written"
    assert abs(sum(seen[:80]) - sum(seen[80:])) < 32


@pytest.mark.parametrize("T", [4, 8, 16, 40])
def test_a_block_takes_eight_calls(T):
    """By default, however long the text is."""
    model = network(4)
    *_, last = sample.unmask(model, torch.full((1, T), V))
    assert last.calls.item() == 8 * T // 4
    assert sample.resolve(sample.SamplerSettings(), model).order == "confidence"
    assert (
        sample.resolve(sample.SamplerSettings(), network(32, 64)).order == "spread"
    )  # (results/blocks.md)


def test_nothing_to_fill_is_no_mistake():
    for model in (network(4), network(16)):
        x = torch.zeros(1, 0, dtype=torch.int64)
        assert sample.generate(model, x, seed=0).shape == mdlm.generate(model, x).shape == (1, 0)


def test_end_stops_a_text():
    model = network(4)
    seen = seen_by(model)
    x = torch.full((4, 160), V)
    settings = dict(seed=1, steps=16, order="left_to_right", correct=0)
    out = sample.generate(model, x, **settings)
    full = len(seen)
    seen.clear()
    *_, last = sample.unmask(model, x, end_id=2, **settings)
    assert len(seen) < full / 2, "nothing is computed after the last [END]"
    for row, whole in zip(last.x.tolist(), out.tolist()):
        n = row.index(2)
        assert row[:n] == whole[:n] and set(row[n:]) == {2}


def test_unseen_text_after_a_gap_is_refused():
    model = network(4)
    x = torch.full((1, 12), V)
    x[0, 3] = 1  # in the block of the first gap
    assert sample.generate(model, x, seed=0)[0, 3] == 1
    x[0, 5] = 1  # in the next one
    with pytest.raises(ValueError):
        sample.generate(model, x, seed=0)
    for setting in (dict(cfg=1.0), dict(block=2)):
        with pytest.raises(ValueError, match="--block_length=4"):
            sample.generate(model, x[:, :3], **setting)


# --------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def run(text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("blocks") / "run"
    flags = [f"--data={text_file}", *TINY, "--block_length=8", f"--out_dir={out}"]
    assert run_mdlm(*flags, "--max_steps=6", "--eval_interval=3") == 0
    return out


def test_a_run_of_blocks_resumes_and_is_evaluated(run, text_file, tmp_path, capsys):
    flags = [f"--data={text_file}", *TINY, "--block_length=8", f"--out_dir={tmp_path / 'a'}"]
    constant = ["--lr_schedule=constant", "--rate_margin=0", "--infill_share=0.5"]
    assert run_mdlm(*flags, *constant, "--max_steps=3") == 0
    assert "4 blocks of 8 tokens" in capsys.readouterr().out
    assert run_mdlm(f"--out_dir={tmp_path / 'a'}", "--resume", "--max_steps=6") == 0
    whole = [*flags[:-1], f"--out_dir={tmp_path / 'b'}", *constant, "--max_steps=6"]
    assert run_mdlm(*whole) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    path = tmp_path / "r.json"
    assert (
        entry.run(eval.main, [f"--out_dir={run}", "--exact", f"--json={path}", "--windows=9"]) == 0
    )
    r = json.loads(path.read_text())
    assert math.isfinite(r["nelbo"] + r["se"] + r["exact"]["nll"]) and r["windows"] == 9
    assert read_log(run)[-1]["val_nelbo"] < 5


def test_whole_steps_are_those_without_blocks(text_file, tmp_path, monkeypatch):
    """To the last bit, as is a block of all tokens. They come as often as --whole says, and what is
    evaluated are blocks."""
    flags = [f"--data={text_file}", *TINY, "--max_steps=5"]
    assert run_mdlm(*flags, f"--out_dir={tmp_path / 'a'}") == 0
    assert run_mdlm(*flags, "--block_length=32", f"--out_dir={tmp_path / 'c'}") == 0
    evaluated = []

    def evaluate(model, *args, original=mdlm.evaluate, **settings):
        evaluated.append(model.objective.n_texts)
        return original(model, *args, **settings)

    monkeypatch.setattr(mdlm, "evaluate", evaluate)
    blocks = ["--block_length=8", "--infill_share=1"]
    assert run_mdlm(*flags, *blocks, f"--out_dir={tmp_path / 'b'}") == 0
    ours, *others = (saved(tmp_path / name)[0] for name in "abc")
    for name, theirs in zip("bc", others):
        assert losses(tmp_path / "a") == losses(tmp_path / name)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert set(evaluated) == {4} and len(evaluated) == 4, "averaged and raw, before and after"
    objective = network(8, 32, infill_share=0.25).objective
    found = [bool(objective.is_whole(step)) for step in range(1000)]
    assert abs(found.count(True) - 250) < 60 and objective.n_texts == 4


def test_whole_steps_teach_to_fill_gaps(text_file, tmp_path, capsys):
    """One network writes in blocks, and sees the text after a gap where it fills one."""
    out = tmp_path / "o"
    flags = [f"--data={text_file}", *TINY, "--block_length=8", "--infill_share=0.5"]
    assert run_mdlm(*flags, "--max_steps=4", f"--out_dir={out}") == 0
    assert "4 blocks of 8 tokens, one after another; in 50% of the steps" in capsys.readouterr().out
    assert mdlm.load(out)[0].objective.n_texts == 4
    model, tokenizer, config = mdlm.load(out, whole=True)
    assert model.objective.n_texts == 1 and config.block_length == 0
    template = "to ██ or not to be, it is"
    x0 = torch.tensor([tokenizer.encode("to be or not to be, it is a text")])
    xt = x0.index_fill(1, torch.tensor([3]), model.mask_id)
    later = xt.index_fill(1, torch.tensor([20]), x0[0, 0].item())
    assert not torch.equal(model(xt)[0, 3], model(later)[0, 3]), "it sees the text after a gap"
    blocks = mdlm.load(out)[0]
    assert torch.equal(blocks(xt)[0, 3], blocks(later)[0, 3])
    text = sample.write(model, tokenizer, template, steps=2)[0]
    assert text.startswith("to ") and text.endswith(" or not to be, it is")
    nelbos = []
    for more in ([f"--infill={template}"], ["--length=40"]):
        assert entry.run(sample.main, [f"--out_dir={out}", *more, "--json=-"]) == 0
        assert json.loads(capsys.readouterr().out)["calls"] > 0
    for more in ([], ["--whole"]):
        flags = [f"--out_dir={out}", "--windows=9", "--json=-", "--pictures=none", *more]
        assert entry.run(eval.main, flags) == 0
        r = json.loads(capsys.readouterr().out)
        assert r["block_length"] == (0 if more else 8)
        nelbos.append(r["nelbo"])
    assert nelbos[0] != nelbos[1]
    hf = ["--to=hf", f"--out_dir={out}", f"--dest={tmp_path / 'hf'}"]
    assert entry.run(export.main, hf) == 0
    assert "not logged" in (tmp_path / "hf" / "README.md").read_text(), "the log has that of blocks"


@pytest.mark.parametrize("block_length", [0, 4])
def test_weights_go_on_with_other_blocks(run, text_file, tmp_path, block_length):
    flags = [f"--data={text_file}", *TINY, f"--block_length={block_length}", "--max_steps=1"]
    assert run_mdlm(*flags, f"--init_from={run}", f"--out_dir={tmp_path / 'o'}") == 0


def test_documents_end(text_file, tmp_path, capsys):
    flags = [*TINY, "--block_length=8", "--max_steps=2", f"--out_dir={tmp_path}"]
    assert run_mdlm(*flags, f"--data={text_file}", "--separator=\\n") == 0
    model, tokenizer, config = mdlm.load(tmp_path)
    assert config.document_length == "predicted" and tokenizer.end_id is not None
    assert model.objective.end_id == -1
    assert len(sample.write(model, tokenizer, n=2, length=70)) == 2


@pytest.mark.parametrize(
    ("program", "flags", "words"),
    [
        (mdlm, ["--block_length=64"], ["--block_length=64"]),
        (mdlm, ["--block_length=8", "--masking=bernoulli"], ["=8 and --masking=bernoulli"]),
        (eval, ["--whole"], ["--whole", "leave it out"]),
        (export, ["--to=hf", "--dest={tmp}/x"], ["--to=hf", "--block_length"]),
        (sample, ["--infill=To ██ or not to be, it is", "--seed=1"], ["does not see text"]),
    ],
)
def test_what_blocks_cannot_do_is_one_sentence(
    run, text_file, tmp_path, capsys, program, flags, words
):
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    if program is mdlm:
        code = run_mdlm(f"--data={text_file}", *TINY, *flags, f"--out_dir={tmp_path / 'o'}")
    else:
        code = entry.run(program.main, [f"--out_dir={run}", *flags])
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and all(word in said for word in words), said
    assert not (tmp_path / "o").exists() and not (tmp_path / "x").exists()


def test_gaps_of_unknown_length_are_filled(run, capsys):
    for template in ("to [___]", "to [___] be"):  # within the first block: 8 tokens
        flags = [f"--out_dir={run}", f"--infill={template}", "--max_gap=2", "--json=-"]
        assert entry.run(sample.main, flags) == 0
        assert json.loads(capsys.readouterr().out)["text"].startswith("to ")


def test_sample_writes_beyond_the_context(run, capsys):
    flags = [f"--out_dir={run}", "--prompt=to be ", "--length=100", "--steps=8", "--json=-"]
    assert entry.run(sample.main, flags) == 0
    line = json.loads(capsys.readouterr().out)
    assert len(line["text"]) == 100 and line["text"].startswith("to be ")


def learned(asks, text_file, tmp_path):
    """Flags of what is learned: a text, or the ends of its lines from their beginnings."""
    if not asks:
        return [f"--data={text_file}"]
    lines = [line for line in text_file.read_text().splitlines() if 24 < len(line) < 99][:300]
    pairs = [dict(q=line[: 5 + n % 9], text=line[-12:]) for n, line in enumerate(lines)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return [f"--data={path}", "--prompt_column=q"]


@pytest.mark.parametrize("asks", tiers([False, True], slow=[True]))
def test_compiled_blocks_train_alike(text_file, tmp_path, asks):
    data = learned(asks, text_file, tmp_path)
    flags = [*data, *TINY, "--block_length=8", "--infill_share=0.5", "--max_steps=6"]
    objective = network(8, 32, infill_share=0.5).objective
    kinds = {bool(objective.is_whole(step)) for step in range(5)}
    assert kinds == {False, True}, "both kinds of step, not only the last"
    for mode in ("on", "off"):
        assert run_mdlm(*flags, f"--compile={mode}", f"--out_dir={tmp_path / mode}") == 0
    on, off = (losses(tmp_path / mode) for mode in ("on", "off"))
    assert len(on) == 6 and on == pytest.approx(off, abs=1e-4)


@pytest.mark.parametrize("asks", tiers([False, True], slow=[True]))
def test_two_ranks_train_like_one(text_file, tmp_path, asks):
    """Sharded, too: two ranks hold one model."""
    data = learned(asks, text_file, tmp_path)
    flags = [*data, *TINY, "--block_length=8", "--infill_share=0.5", "--max_steps=5"]
    flags += ["--optimizer=adamw", "--batch_size=4"]
    assert run_mdlm(*flags, f"--out_dir={tmp_path / 'one'}") == 0
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "mdlm.py"]
    command = [sys.executable, *launcher, *flags, "--shard", f"--out_dir={tmp_path / 'two'}"]
    r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert r.returncode == 0, r.stderr[-3000:]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


@pytest.mark.parametrize("steps, calls", [(16, 16), (8, 8), (2, 4)])  # at least one a block
def test_steps_are_all_calls_of_the_textbook_sampler(steps, calls):
    model = network(4)
    made = []
    model.register_forward_hook(lambda *args: made.append(1))
    mdlm.generate(model, torch.full((64, 16), V), steps, torch.Generator().manual_seed(0))
    assert len(made) == calls
