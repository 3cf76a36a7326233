"""Sampling draws from the model's distribution and keeps what it was given; mistakes are named."""

import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Toy, chain_rule, tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as to_safetensors

import mdlm
import sample
from nanomdlm.kernels import operations as kernels
from nanomdlm.support import abilities, numerics
from nanomdlm.support.cli import entry
from nanomdlm.support.data.tokenizer import Tokenizer, build_tokenizer
from nanomdlm.support.infill import likelihood, model_calls
from nanomdlm.support.run import checkpoint
from nanomdlm.support.web import viewer

V = 3
T = 4


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draws(model, n, **settings):
    """(n, T) samples from nothing but [MASK]."""
    return sample.generate(model, torch.full((n, T), V), generator=seeded(), **settings)


def chi_square(x, p):
    """Chi-square of samples (n, T) against p over all 81 outcomes, in standard deviations."""
    index = (x * V ** torch.arange(T - 1, -1, -1)).sum(1)
    seen = index.bincount(minlength=V**T).double()
    expected = p * len(x)
    big = expected >= 5  # the rest are one class
    seen, expected = (torch.cat((c[big], c[~big].sum()[None])) for c in (seen, expected))
    df = len(seen) - 1
    return (((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum().item() - df) / (2 * df) ** 0.5


# --------------------------------------------------------------------------------------------------
# Exactness, on a world whose posterior is known


@pytest.mark.parametrize(
    "settings",
    [
        dict(order="ancestral", steps=100),
        dict(order="spread", steps=T),
        dict(order="random", steps=T),
        dict(order="random", steps=50),
        dict(order="left_to_right", steps=T),
        dict(order="max_prob", steps=T),
        dict(order="margin", steps=T),
        dict(order="entropy", steps=T),
        dict(order="max_prob", steps=T, block=2),
    ],
    ids=str,
)
def test_one_token_at_a_time_is_exact(world, settings):
    """The posterior is exact, so any choice of positions by what is visible is exact."""
    found = draws(Toy(world.exact, V, T), 4000, correct=0, **settings)
    assert abs(chi_square(found, world.p)) < 4.5


def test_few_steps_are_biased_as_computed(world):
    """One step is the product of the marginals; more steps come closer to the truth."""
    onehot = torch.nn.functional.one_hot(world.x, V).double()  # (81, T, V)
    marginals = torch.einsum("n,niv->iv", world.p, onehot)
    product = (onehot * marginals).sum(-1).prod(1)
    model = Toy(world.exact, V, T)
    assert abs(chi_square(draws(model, 20_000, order="one_shot"), product)) < 4.5
    found = [draws(model, 20_000, steps=1)]
    found += [draws(model, 20_000, steps=n, order="random", correct=0) for n in (2, 4)]
    steps = [chi_square(x, world.p) for x in found]
    assert steps[0] > steps[1] > 10 > abs(steps[2])


def test_autoregressive_models_are_sampled_exactly(world):
    def causal(xt):
        """What an autoregressive model returns at i: log p(token i | those before it)."""
        out = torch.zeros(*xt.shape, V, dtype=torch.float64)
        for i in range(T):
            seen = torch.full_like(xt, V)
            seen[:, :i] = xt[:, :i]
            out[:, i] = world.exact(seen)[:, i]
        return out

    assert abs(chi_square(draws(Toy(causal, V, T, objective="ar"), 10_000), world.p)) < 4.5


def test_neutral_settings_change_nothing(world):
    toy = Toy(world.random, V, T)
    plain = draws(toy, 500, order="random", steps=3)
    same = dict(temperature=1.0, top_p=1.0, top_k=V)
    assert torch.equal(plain, draws(toy, 500, order="random", steps=3, **same))
    greedy = draws(toy, 500, order="random", steps=3, temperature=0)
    assert torch.equal(greedy, draws(toy, 500, order="random", steps=3, top_k=1))
    assert not torch.equal(greedy, plain)


@pytest.mark.parametrize(
    "settings, expected",
    [
        (dict(), [0.1, 0.4, 0.3, 0.2]),
        (dict(top_k=2), [0, 4 / 7, 3 / 7, 0]),
        (dict(top_p=0.75), [0, 4 / 9, 3 / 9, 2 / 9]),
        (dict(top_p=0.7 - 1e-6), [0, 4 / 7, 3 / 7, 0]),
        (dict(temperature=0.5), [1 / 30, 16 / 30, 9 / 30, 4 / 30]),
    ],
    ids=str,
)
def test_filters_keep_exactly_the_named_tokens(settings, expected):
    settings = dict(settings)
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log().expand(4000, -1)
    u = (torch.arange(4000) + 0.5).double() / 4000
    heat = settings.pop("temperature", 1.0)
    token = numerics.draw(logits, u, heat, **(dict(top_k=0, top_p=1.0) | settings))
    assert token.bincount(minlength=4).div(4000).tolist() == pytest.approx(expected, abs=1e-3)


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert numerics.draw(logits, u, 1.0, 0, 1.0).tolist() == [1, 2]


def test_draws_over_50000_classes_match_in_the_tail():
    n = 50_000
    rows = 1000
    p = 1 / torch.arange(1, n + 1).double()
    p = p / p.sum()
    logits = p.log().float()
    u = sample.uniform(3, 1, torch.arange(rows), range(1))[0][:, 0]
    parts = [numerics.draw(logits.expand(250, -1), part, 1.0, 0, 1.0) for part in u.split(250)]
    edges = torch.tensor([0, 1, 10, 100, 1000, 5000, 10_000, 20_000, 35_000, n])
    expected = [p[a:b].sum() for a, b in itertools.pairwise(edges.tolist())]  # the last one: 3 %
    expected = rows * torch.stack(expected)
    seen = torch.histogram(torch.cat(parts).double(), edges.double()).hist
    chi2 = ((seen - expected) ** 2 / expected).sum().item()
    assert chi2 < 8 + 4.5 * 4, chi2
    # Inverting the distribution function at an even grid leaves no error but rounding.
    even = (torch.arange(250) + 0.5).double() / 250
    grid = numerics.draw(logits.expand(250, -1), even, 1.0, 0, 1.0)
    cdf = torch.softmax(logits.double(), 0).cumsum(0)
    assert torch.equal(grid, torch.searchsorted(cdf, even))


def test_uniform_numbers_depend_on_their_keys_alone():
    first = sample.uniform(5, 7, torch.arange(6), range(40))
    part = sample.uniform(5, 7, torch.tensor([3, 4]), range(5, 11))
    for a, b in zip(first, part, strict=True):
        assert torch.equal(a[3:5, 5:11], b)
    others = [*sample.uniform(6, 7, torch.arange(6), range(40))]
    others += sample.uniform(5, 8, torch.arange(6), range(40))
    for a, b in itertools.combinations((*first, *others), 2):
        assert not (a == b).any() and b.min() >= 0 and b.max() < 1


def test_guidance_is_the_published_formula(world):
    x = torch.tensor([[1, V, V, 2]])
    w = 1.5
    got = model_calls.predict(Toy(world.exact, V, T), "cpu", x, x != V, x == V, range(T), w)
    conditional = world.exact(x)[x == V].float()
    without = world.exact(torch.full_like(x, V))[x == V].float()
    assert torch.allclose(got, without + (1 + w) * (conditional - without))


def test_chain_rule_is_the_left_to_right_score(world):
    model = Toy(world.random, V, T)
    x = world.x
    whole = likelihood.chain_rule(model, x).sum(1)
    assert torch.allclose(whole, -T * chain_rule(world.random, x, V, range(T)), atol=1e-5)
    head = likelihood.chain_rule(model, x[:, :2])  # what follows is unseen
    assert (
        torch.equal(head[:, :2], likelihood.chain_rule(model, x)[:, :2]) and not head[:, 2:].any()
    )


def test_confidence_is_that_of_the_drawn_token(world):
    """What is revealed was drawn with at least the probability of what was not."""
    logp = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]]).log()
    score = sample.ORDERS["confidence"].score(logp, torch.tensor([1, 1]))
    assert score.exp().tolist() == pytest.approx([0.3, 0.4])
    assert sample.ORDERS["max_prob"].score(logp, torch.tensor([1, 1])).argmax() == 0


# --------------------------------------------------------------------------------------------------
# With any options


@settings(max_examples=60, deadline=None)
@given(
    x=st.lists(st.lists(st.integers(0, V), min_size=1, max_size=11), min_size=1, max_size=4),
    order=st.sampled_from(list(sample.ORDERS)),
    steps=st.integers(1, 12),
    block=st.integers(0, T),
    correct=st.sampled_from(["auto", 0, 3]),
    redraw=st.sampled_from(["low_confidence", "sweep"]),
    spacing=st.integers(1, 5),
    temperature=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    top_k=st.integers(0, 4),
    top_p=st.sampled_from([1e-9, 0.5, 1.0]),
    cfg=st.sampled_from([0.0, 2.0]),
    end_id=st.sampled_from([None, 2]),
    ar=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_given_tokens_stay_and_rows_are_independent(world, x, ar, seed, **settings):
    width = len(x[0])
    x = torch.tensor([(row * width)[:width] for row in x])
    if settings["correct"] == 3:
        settings["steps"] += 3
    if settings["order"] == "one_shot":
        settings |= dict(correct=0, steps=0)
    model = Toy(world.random, V, T, objective="ar" if ar else "mdlm")
    if ar:
        settings |= dict(order="auto", cfg=0.0)
    if (x == V).all(1).any():
        settings["cfg"] = 0.0
    fill = x == V

    def run(rows, **settings):
        where = dict(generator=seeded(seed), samples=rows, fill=fill[rows])
        return sample.generate(model, x[rows], **where, **settings)

    rows = torch.arange(len(x))
    out = run(rows, **settings)
    assert out.shape == x.shape and out.max() < V and out.min() >= 0
    assert torch.equal(out[~fill], x[~fill])
    assert torch.equal(out, run(rows, **settings))
    last = torch.tensor([len(x) - 1])
    assert torch.equal(out[last], run(last, **settings))


def test_a_call_that_reveals_nothing_in_a_row_changes_nothing_in_it(world):
    """Ancestral steps may reveal nothing in a row, while another one draws."""
    model = Toy(world.random, V, T)
    x = torch.full((2, T), V)
    settings = dict(order="ancestral", steps=9, correct=3)
    for seed in range(10):
        both = sample.generate(model, x, seed=seed, **settings)
        alone = sample.generate(model, x[1:], seed=seed, samples=[1], **settings)
        assert torch.equal(both[1:], alone)


def test_network_is_called_at_most_once_a_step(world):
    """And not at all where nothing is revealed."""
    batches = []
    model = Toy(lambda xt: batches.append(len(xt)) or world.random(xt), V, T)
    several = [order for order in sample.ORDERS if order != "one_shot"]
    for order, steps in [("auto", 1), ("one_shot", 1), *itertools.product(several, (3, 50))]:
        batches.clear()
        *_, last = sample.unmask(model, torch.full((6, T), V), steps=steps, order=order)
        assert len(batches) <= steps
        assert last.calls.max() <= 4 * T and last.calls.sum() >= sum(batches)  # equal rows are one


def test_watched_steps_add_up_to_the_text(world):
    before = torch.full((30, T), V)
    changed = 0
    for step in sample.unmask(Toy(world.random, V, T), before, steps=9, order="random"):
        assert (step.drawn | (before == step.x)).all() and len(step.logp) == step.drawn.sum()
        changed += ((before != step.x) & (before != V)).sum()
        before = step.x
    assert changed > 0 and before.max() < V


def test_nothing_follows_a_drawn_end(world):
    model = Toy(world.random, V, T)
    x = torch.full((200, T), V)
    out = sample.generate(model, x, generator=seeded(), end_id=2)
    ended = (out == 2).cumsum(1) > 0
    assert ended.any() and (out[ended] == 2).all()
    before = x
    for step in sample.unmask(model, x, end_id=2, steps=12):  # nor is anything drawn there
        assert not (step.drawn & ((before == 2).cumsum(1) > 1)).any()
        before = step.x
    assert not (sample.generate(model, x, generator=seeded(), forbid=[2]) == 2).any()


def test_what_follows_a_drawn_end_takes_no_time():
    """Ancestral steps are as many as asked for, though nothing is left to draw."""
    model = Toy(lambda xt: torch.tensor([0.0, 0.0, 99.0]).expand(*xt.shape, V), V, T)
    x = torch.full((1, 1000), V)
    settings = dict(order="ancestral", steps=2000, correct=0, end_id=2)
    began = time.process_time()
    assert (sample.generate(model, x, **settings) == 2).all()
    assert time.process_time() - began < 15


def test_given_text_takes_no_steps():
    """However small the blocks are, and however many steps a context has."""
    model = Toy(lambda xt: torch.zeros(*xt.shape, V), V, T)
    x = torch.zeros(1, 20_000, dtype=torch.int64)
    x[0, -1] = V
    began = time.process_time()
    *_, last = sample.unmask(model, x, steps=8192, block=1)
    assert last.calls == 1 and time.process_time() - began < 4


def test_each_step_reveals_as_many_tokens():
    x = torch.full((1, 30), V)
    model = Toy(lambda xt: torch.zeros(*xt.shape, V), V, 32)
    for steps, expected in ((10, [3] * 10), (4, [8, 7, 8, 7])):
        found = sample.unmask(model, x, steps=steps, order="random", correct=0)
        assert [int(step.drawn.sum()) for step in found] == expected


def test_long_texts_are_written_block_by_block():
    L = 8
    seen = []
    model = Toy(lambda xt: seen.append(xt.clone()) or torch.zeros(*xt.shape, 5), 5, L)
    x = torch.full((1, 20), 5)
    x[0, :6] = torch.arange(6) % 5
    seen.clear()
    settings = dict(steps=4, order="left_to_right", correct=0)  # 4 tokens in two steps
    *_, last = sample.unmask(model, x, **settings)
    assert last.calls.item() == len(seen) == 1 + 3 * 2 + 1 and (last.x < 5).all()
    for xt, end in zip(seen, (8, 8, 12, 12, 16, 16, 20, 20), strict=True):
        known = xt[0] < 5
        assert torch.equal(xt[0][known], last.x[0, end - L : end][known])
        assert known[: L - 4].all()  # all that was there before the block
    options = sample.resolve(sample.SamplerSettings(steps=1), model)
    blocks = sample.plan(model, x == 5, torch.arange(1), options)
    assert [block.steps for block in blocks] == [1] * 4  # the first is all given


def test_films_keep_confidences_up_to_the_end(world):
    tokenizer = Tokenizer("char", list("ab"), end=True)
    x = torch.full((20, T), V)
    films = [viewer.HtmlRecorder(tokenizer, row, V) for row in x]
    steps = list(sample.unmask(Toy(world.random, V, T), x, steps=4, order="random", end_id=2))
    for step in steps:
        for row, film in enumerate(films):
            film.add(step, row)
    for row, (ids, film) in enumerate(zip(steps[-1].x.tolist(), films, strict=True)):
        page = film.page(ids)
        assert page["tokens"] == [tokenizer.decode([i]) for i in ids if i != 2]
        drawn = [step for step in steps if step.drawn[row].any()]
        for step, frame in zip(drawn, page["frames"], strict=True):
            p = torch.zeros(20, T, V, dtype=torch.float64)
            p[step.drawn] = step.logp.double().exp()
            shown = step.drawn[row].nonzero()[:, 0].tolist()
            assert [i for i, *_ in frame] == [i for i in shown if i < len(page["tokens"])]
            for i, token, sure, others in frame:
                assert sure == pytest.approx(p[row, i, step.x[row, i]].item(), abs=1e-4)
                assert others[0][1] == pytest.approx(p[row, i].max().item(), abs=1e-4)
                assert token == tokenizer.decode([step.x[row, i].item()])


# --------------------------------------------------------------------------------------------------
# The program


def save_model(out, tokenizer, **settings):
    """A checkpoint with random weights."""
    size = dict(n_layer=1, n_head=2, n_embd=32, block_size=32, dropout=0.0, preset="cpu")
    config = mdlm.Config(**(size | settings))
    torch.manual_seed(0)
    ops = kernels.select("torch")
    model = mdlm.make_model(config, tokenizer.vocab_size, ops, tokenizer.end_id)
    weights = {name: p + torch.randn_like(p) / 4 for name, p in model.named_parameters()}
    if abilities.knows_lengths(model):
        weights["length_counts"] = torch.arange(33.0)
    config = dict(format="mdlm", version=1, config=dataclasses.asdict(config))
    contents = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": tokenizer.to_json().encode(),
        "model.safetensors": to_safetensors({k: v.detach() for k, v in weights.items()}),
    }
    out.mkdir(exist_ok=True)
    checkpoint.write_checkpoint(out, "step-1", contents)
    return out


@pytest.fixture(
    scope="module", params=["char", "byte", "word", "bpe", "documents", "learned", "ar"]
)
def run(request, pydoc, tmp_path_factory):
    """A model that was not trained, with each kind of tokenizer."""
    kind = request.param if request.param in ("byte", "word", "bpe") else "char"
    end = request.param in ("documents", "learned")
    tokenizer = build_tokenizer(kind, 400, end, lambda: [(pydoc, end)], len(pydoc))
    settings = dict(ar=dict(objective="ar"), learned=dict(document_length="predicted"))
    settings = settings.get(request.param, {})
    out = save_model(tmp_path_factory.mktemp(request.param), tokenizer, **settings)
    return SimpleNamespace(kind=request.param, out=out)


@pytest.fixture
def say(capsys):
    """Run sample.py in this process: (exit code, standard output, standard error)."""

    def call(run, *args):
        capsys.readouterr()
        code = entry.run(sample.main, [f"--out_dir={run.out}", "--device=cpu", *args])
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return call


def page_samples(page):
    """What viewer.write_page wrote into a page."""
    pattern = r"<script[^>]*application/json[^>]*>(.*?)</script>"
    found = re.search(pattern, page.read_text(encoding="utf-8"), re.S)
    return json.loads(found[1])["samples"]


def replay(sample):
    """The text that the frames of a page end with; each change has a confidence."""
    shown = [
        t if given else None for t, given in zip(sample["tokens"], sample["given"], strict=True)
    ]
    for frame in sample["frames"]:
        for i, token, sure, others in frame:
            assert not sample["given"][i] and (token is None or 0 <= sure <= 1 and others)
            shown[i] = token
    return "".join(shown)


def test_every_tokenizer_keeps_prompts_and_templates(run, say):
    steps = [] if run.kind == "ar" else ["--steps=5"]
    r = say(run, "--prompt=The ", "--num_samples=3", "--json=-", *steps)
    assert r.code == 0, r.err
    lines = [json.loads(line) for line in r.out.splitlines()]
    assert len(lines) == 3 and all(d["text"].startswith("The ") for d in lines)
    assert {"text", "steps", "calls", "seconds"} <= lines[0].keys()
    assert 0 < lines[0]["calls"] <= lines[0]["steps"] <= 32
    page = run.out / "page.html"
    shown = say(run, "--prompt=The ", f"--html={page}", "--json=-", *steps)
    assert replay(page_samples(page)[0]) == json.loads(shown.out)["text"]
    longer = say(run, "--prompt=The ", "--length=100", "--json=-", *steps)
    assert longer.code == 0
    if run.kind in ("char", "ar"):
        assert len(json.loads(longer.out)["text"]) == 100
    if run.kind == "ar":
        return
    for template in ("To b██ or ██t", "a\nb█\n\nc"):
        d = json.loads(say(run, f"--infill={template}", "--json=-", *steps).out)
        at = 0
        for piece in filter(None, template.split("█")):
            at = d["text"].index(piece, at) + len(piece)
        assert d["template"] == template and "█" not in d["text"] and d["text"].endswith(piece)


@pytest.mark.parametrize("run", ["ar"], indirect=True)
def test_autoregressive_models_fill_gaps_by_search(run, say):
    """With the text after the gap in the score: they do not see it."""
    d = json.loads(say(run, "--infill=The █ of", "--json=-").out)
    assert d["text"].startswith("The ") and d["text"].endswith(" of") and d["compares_lengths"]
    r = say(run, "--infill=The █ of", "--num_samples=1")
    assert r.code == 0 and len(r.out) == len("The █ of\n")


@pytest.mark.parametrize("run", ["ar"], indirect=True)
@pytest.mark.parametrize("flag", ["--order=random", "--cfg=1"])
def test_autoregressive_models_refuse_what_they_cannot(run, say, flag):
    r = say(run, flag)
    assert r.code == 2 and "autoregressive" in r.err and r.err.count("\n") == 1


@pytest.mark.parametrize("run", ["char"], indirect=True)
class TestCharacters:
    def test_unknown_gaps_and_candidates(self, run, say):
        d = json.loads(say(run, "--infill=The [___] of", "--max_gap=3", "--json=-").out)
        assert d["text"].startswith("The ") and d["text"].endswith(" of")
        assert 1 <= len(d["fills"][0]) <= 3
        r = say(run, "--infill=The ██ of", "--candidates=4")
        *fills, certificate = r.out.splitlines()
        assert r.code == 0 and len(fills) == 4 and "proven: any other has" in certificate
        d = json.loads(say(run, "--infill=The ██ of", "--candidates=4", "--json=-").out)
        assert d["score"] == d["candidates"][0]["score"] < 0 and d["calls"] > 0
        p, shares, texts = ([c[key] for c in d["candidates"]] for key in ("p", "share", "text"))
        assert sum(shares) == pytest.approx(1) and p == sorted(p, reverse=True)
        assert d["proven"] and d["p"] == p[0] and d["bound"] <= math.log(p[-1])
        assert len(set(texts)) == 4 and d["text"] == texts[0]

    def test_template_gets_the_best_of_many(self, run, say):
        """In few calls; flags of the sampler ask for draws."""
        d = json.loads(say(run, "--infill=The ███", "--json=-").out)
        assert d["candidates"][0]["text"] == d["text"] and d["calls"] <= 400
        plain = [
            json.loads(say(run, "--infill=The ███", *flags, "--json=-").out)
            for flags in (["--num_samples=1"], ["--seed=1"], ["--seed=0", "--steps=32"])
        ]
        assert plain[0]["text"] == plain[2]["text"] != plain[1]["text"]
        assert "candidates" not in plain[0]

    def test_compare_writes_what_each_setting_writes_alone(self, run, say, tmp_path):
        flags = ["--steps=4", "--length=20", "--num_samples=3", "--seed=5"]
        page = tmp_path / "page.html"
        r = say(run, "--compare=temperature=0.3,1", *flags, f"--html={page}", "--json=-")
        rows = [json.loads(line) for line in r.out.splitlines()]
        assert [row["setting"] for row in rows] == ["temperature=0.3", "temperature=1"]
        for row in rows:
            assert row["calls"] == 4 and row["tokens/s"] == pytest.approx(20 / row["seconds"])
        samples = page_samples(page)
        assert [s["title"] for s in samples] == ["temperature=0.3", "temperature=1"]
        alone = json.loads(say(run, *flags, "--json=-").out.splitlines()[0])
        assert samples[1]["text"] == alone["text"] != samples[0]["text"]

    def test_batch_answers_line_by_line(self, run, say, tmp_path):
        file = tmp_path / "templates"
        file.write_text("The ██ of\na [___] b\n█\n", encoding="utf-8")
        r = say(run, f"--batch={file}", "--max_gap=2")
        lines = [json.loads(line) for line in r.out.splitlines()]
        assert [d["template"] for d in lines] == ["The ██ of", "a [___] b", "█"]
        assert say(run, f"--batch={file}", "--max_gap=2", f"--json={tmp_path}/x").out == ""
        again = [json.loads(line) for line in (tmp_path / "x").read_text().splitlines()]
        assert [d["text"] for d in again] == [d["text"] for d in lines]

    @pytest.mark.parametrize("wrong", ["The \u2603 █\n".encode(), b"a\xff\n"])
    def test_batch_is_checked_before_any_answer(self, run, say, tmp_path, wrong):
        (tmp_path / "b").write_bytes("The ██\n".encode() + wrong)
        r = say(run, f"--batch={tmp_path / 'b'}")
        assert (r.code, r.out) == (2, "") and "line 2" in r.err and r.err.count("\n") == 1

    def test_json_lines_are_single_for_every_reader(self, run, say, monkeypatch):
        text = "a\x85b\u2028c\u2029d\ne"
        monkeypatch.setattr(sample, "to_texts", lambda *_: [(text, True)])
        lines = say(run, "--num_samples=2", "--json=-").out.splitlines()
        assert [json.loads(line)["text"] for line in lines] == [text] * 2

    def test_same_seed_gives_the_same_text(self, run, say):
        shown = [say(run, f"--seed={i}", "--num_samples=2", "--json=-").out for i in (1, 1, 2)]
        texts = [[json.loads(line)["text"] for line in s.splitlines()] for s in shown]
        assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]
        assert json.loads(say(run, "--seed=1", "--json=-").out)["text"] == texts[0][0]


def test_ids_are_shown_apart_and_checked(tmp_path, say):
    run = SimpleNamespace(out=save_model(tmp_path, Tokenizer("id", 50), block_size=16))
    ids = [int(i) for i in say(run, "--prompt=1 2 3", "--length=10").out.split()]
    assert len(ids) == 10 and ids[:3] == [1, 2, 3] and max(ids) < 50
    ids = [int(i) for i in say(run, "--infill=1 2██3", "--num_samples=1").out.split()]
    assert len(ids) == 5 and (ids[:2], ids[4]) == ([1, 2], 3)
    for wrong in ("50", "1" * 30, "a", "-1"):
        r = say(run, f"--prompt=1 {wrong}")
        assert (r.code, r.out) == (2, "") and wrong[:20] in r.err


@pytest.mark.parametrize("run", ["documents"], indirect=True)
def test_write_returns_filled_texts(run):
    model, tokenizer, _ = mdlm.load(run.out)
    torch.manual_seed(1)
    texts = sample.write(model, tokenizer, "To be███ not", n=3, steps=3)
    assert len(texts) == 3 and len(set(texts)) > 1
    assert all(re.fullmatch("To be... not", text, re.S) for text in texts)
    same = [sample.write(model, tokenizer, "a█c", generator=seeded(), steps=1) for _ in range(2)]
    assert same[0] == same[1]
    (text,) = sample.write(model, tokenizer, "To [___] not", max_gap=2, steps=1)
    assert re.fullmatch("To ..? not", text, re.S)
    for wrong in (dict(remask=0.1), dict(block=-3), dict(n=-1), dict(length=3)):
        with pytest.raises(ValueError):
            sample.write(model, tokenizer, "To [___] be", **wrong)
    assert sample.write(model, tokenizer, n=0) == []
    for text, length in (("To be", 12), (None, 12), ("To be", 0)):
        (found,) = sample.write(model, tokenizer, text, length=length, steps=2)
        assert found.startswith(text or "") and len(found) <= 2 * (length or 32)


def test_speed_is_of_the_tokens_up_to_the_end(say, tmp_path):
    save_model(tmp_path, Tokenizer("char", "abc", True), objective="ar")
    flags = ["--compare=temperature=1", "--length=20", "--num_samples=9", "--seed=2", "--json=-"]
    row = json.loads(say(SimpleNamespace(out=tmp_path), *flags).out)
    assert row["calls"] < 20  # one per token, and for [END]
    assert row["tokens/s"] * row["seconds"] == pytest.approx(row["calls"])


def test_shipped_weights_keep_a_clone_small():
    for name, most in (("shakespeare", 24), ("record", 20)):  # MiB
        size = sum(f.stat().st_size for f in (ROOT / "weights" / name).iterdir())
        assert size <= most << 20


MANY = [(65, 256, ["--order=one_shot"]), (50_257, 18, ["--order=confidence", "--steps=2"])]


@pytest.mark.parametrize("vocabulary, samples, settings", tiers(MANY, slow=MANY[:1]))
def test_memory_is_bounded_for_256_long_samples(vocabulary, samples, settings, tmp_path):
    """Peak of the whole program for 1,024 tokens each: all in one step, and by confidence.

    The logits of 18 such texts over 50,257 tokens take 3.7 GB at once; 256 would take minutes.
    """
    from tokenizers import Tokenizer as BPE
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary == 65:
        tokenizer = Tokenizer("char", letters[:65])
    else:
        merges = [(a, b) for a in letters for b in letters][: vocabulary - 256]
        vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
        bpe = BPE(models.BPE(vocab, merges))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        tokenizer = Tokenizer("bpe", bpe.to_str())
    assert tokenizer.vocab_size == vocabulary
    save_model(tmp_path, tokenizer, n_embd=64, block_size=1024)
    program = (
        "import resource, sys, sample; from nanomdlm.support.cli import entry\n"
        "code = entry.run(sample.main, sys.argv[1:])\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20\n"
        "print(peak, file=sys.stderr); sys.exit(code)"
    )
    flags = [f"--out_dir={tmp_path}", f"--num_samples={samples}", "--json=-", *settings]
    command = [sys.executable, "-c", program, *flags]
    r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 0 and len(r.stdout.splitlines()) == samples, r.stderr
    peak = float(r.stderr.split()[-1])
    print(f"vocabulary {vocabulary}, {settings[0]}: peak {peak:.2f} GiB")
    assert peak < 3
