"""Ranked fills: the likeliest of those drawn, exactly, in few rows of the network."""

import itertools
import json

import pytest
import torch
from conftest import ROOT, Toy

import kernels
import mdlm
import sample
import variants
from support import terminal
from support.data.tokenizer import Tokenizer
from support.infill import calls, likelihood, padding, ranking

V = 6
T = 7


def random_world(seed, hidden=None):
    """A random model in float64: logits by a hash of all it sees; rows it was given in `hidden`."""
    g = torch.Generator().manual_seed(seed)
    table = 2 * torch.randn(997, T, V, generator=g, dtype=torch.float64)
    power = torch.randint(1, 997, (T,), generator=g)

    def logits(xt):
        if hidden is not None:
            hidden.append(len(xt))
        return table[(xt * power).sum(-1) % 997]

    return Toy(logits, V, T)


def all_fills(at):
    """Every fill (V^len(at), T) of a text of zeros at these places."""
    fills = torch.tensor(list(itertools.product(range(V), repeat=len(at))))
    x = torch.arange(T).repeat(len(fills), 1) % V
    x[:, at] = fills
    return x


def exhaustive(model, x, start, stop, known):
    """(sums (B,), how many different texts they need), each sum term by term."""
    each = likelihood.chain_rule(model, x)
    at = torch.arange(T)
    inside = (at >= start[:, None]) & (at < stop[:, None])
    texts = {(i, *row[:i].tolist()) for row, here in zip(x, inside) for i in here.nonzero()[:, 0]}
    return known + (each * inside).sum(1), len(texts)


@pytest.mark.parametrize(
    "gaps, few", [([1, 2], 1), ([0, 3], 4), ([0, 3], 128), ([1, 4, 5], 128)], ids=str
)
def test_ranking_is_exact_in_fewer_rows(gaps, few, monkeypatch):
    """Also with lengths of their own and known beginnings; what is alike is computed once."""
    monkeypatch.setattr(calls, "group_size", lambda *_: few)
    hidden = []
    for seed in range(2):
        model = random_world(seed, hidden)
        x = all_fills(gaps)
        g = torch.Generator().manual_seed(seed)
        for start, stop, known in (
            (torch.full((len(x),), gaps[0]), torch.full((len(x),), T), torch.zeros(len(x))),
            (torch.full((len(x),), gaps[0]), torch.randint(gaps[-1] + 1, T + 1, (len(x),)), None),
        ):
            known = torch.randn(len(x), generator=g) if known is None else known
            known = known.double()
            value, texts = exhaustive(model, x, start, stop, known)
            best = value.argsort(descending=True, stable=True)
            for n in (1, 3, len(x)):
                hidden.clear()
                rows, found = ranking.likeliest(model, x, start, stop, known, n)
                assert rows.tolist() == best[:n].tolist()
                assert torch.allclose(found, value[rows], atol=1e-5)
                assert sum(hidden) <= texts, "a text was computed twice"
                if n == 1 and few == 1:
                    assert sum(hidden) < texts / 2, "fills that cannot win were followed"


def test_equal_fills_keep_their_order():
    model = Toy(lambda xt: torch.zeros(*xt.shape, V, dtype=torch.float64), V, T)
    x = all_fills([1, 2])
    start = torch.ones(len(x), dtype=torch.int64)
    for n in (1, 5):
        rows, found = ranking.likeliest(model, x, start, start + 4, torch.zeros(36).double(), n)
        assert rows.tolist() == list(range(n)) and torch.allclose(found, found[:1])


def test_lengths_of_documents_are_different_texts():
    """A text that begins alike but ends elsewhere is another one to the network."""
    seen = []
    model = random_world(3, seen)
    ends = mdlm.MaskedDiffusion(model.config, V)
    model.objective = variants.choose(model.config, ends, end_id=V - 1)
    x = torch.tensor([[0, 1, 2, 5, 5, 5, 5], [0, 1, 2, 3, 5, 5, 5]])
    start = torch.ones(2, dtype=torch.int64)
    stop = torch.tensor([3, 4])
    known = torch.zeros(2, dtype=torch.float64)
    rows, found = ranking.likeliest(model, x, start, stop, known, 2)
    assert sum(seen) == 5
    value, _ = exhaustive(model, x, start, stop, known)
    assert torch.allclose(found, value[rows])


@pytest.mark.parametrize("limit", [1 << 24, 3 * V])
def test_draws_are_those_without_a_memory(limit, monkeypatch):
    """Texts that draws come to again cost nothing; the draws are the same, whatever it holds."""
    monkeypatch.setattr(calls, "MOST_LOGITS", limit)
    hidden = []
    model = random_world(1, hidden)
    x = torch.full((64, T), V)
    x[:, :4] = torch.tensor([0, 1, 2, 3])
    x[:, 6] = 4
    for how in (dict(), dict(order="confidence"), dict(cfg=1.0), dict(redraw="sweep", distance=1)):
        hidden.clear()
        *_, plain = sample.unmask(model, x, seed=5, **how)
        without = sum(hidden)
        hidden.clear()
        assert torch.equal(sample.generate(model, x, seed=5, **how), plain.x)
        if limit > 3 * V:
            states = 1 + 2 * V
            assert sum(hidden) <= states * (2 if how.get("cfg") else 1) < without


class Bar:
    """Stands in for a progress bar: what it shows after each change."""

    def __init__(self):
        self.n = 0
        self.total = None
        self.shown = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def update(self):
        self.n += 1
        self.shown.append((self.n, self.total))

    def reset(self):
        assert self.n == self.total, "the stretch before did not end at its total"
        self.n = 0
        self.total = None
        self.shown.clear()

    def set_description(self, *_, **__):
        pass


@pytest.fixture(scope="module")
def small():
    """(model, tokenizer) with random weights, whose first block does not attend."""
    config = mdlm.Config(n_layer=2, n_head=2, n_embd=32, block_size=64, attention_every=2)
    torch.manual_seed(0)
    model = mdlm.make_model(config, 6, kernels.select("torch"))
    for p in model.parameters():
        p.data += torch.randn_like(p) / 3
    return model.eval(), Tokenizer("char", list("abc \nd"))


@pytest.mark.parametrize("template", ["ab██ca", "a[___]b", "a[___]bc[___]d", "ab[___]", "█b█ c█"])
def test_progress_has_a_total_and_ends_there(small, template, monkeypatch):
    bar = Bar()
    monkeypatch.setattr(terminal, "progress", lambda *_, **__: bar)
    model, tokenizer = small
    options = sample.resolve(sample.Options(candidates=2, max_gap=3, device="cpu"), model)
    parts = sample.parse(template, tokenizer, model.config.block_size)
    _, _, facts = sample.ranked(model, tokenizer, parts, options)
    totals = [total for _, total in bar.shown]
    assert None not in totals and totals == sorted(totals, reverse=True)
    assert all(n <= total for n, total in bar.shown) and bar.n == bar.total
    assert facts["calls"] >= bar.n and facts["sequences"] >= facts["calls"]


@pytest.mark.parametrize(
    "settings",
    [
        dict(n_layer=4, attention_every=4),
        dict(n_layer=3, attention_every=3, conv=4),
        dict(n_layer=2, attention_every=2, time_conditioning=True),
        dict(n_layer=2, attention_every=2, objective="ar"),
        dict(n_layer=2, attention_every=2, documents=True),
        dict(n_layer=2, attention_every=1),
        dict(n_layer=2, attention_every=2, block_size=4),
    ],
    ids=str,
)
def test_padding_computed_once_changes_no_logits(settings):
    settings = dict(n_head=2, n_embd=32, block_size=32) | settings
    end_id = 4 if settings.pop("documents", False) else None
    model = mdlm.make_model(mdlm.Config(**settings), 5, kernels.select("torch"), end_id).eval()
    for p in model.parameters():
        p.data += torch.randn_like(p, requires_grad=False) / 3
    L = settings["block_size"]
    blocks = model.layers
    computed = []
    model.layers[0].up.register_forward_pre_hook(lambda _, args: computed.append(args[0].numel()))
    with torch.no_grad():
        for n in (0, 3, L // 2, L):
            x = torch.full((3, L), model.objective.pad_id)
            x[:, :n] = torch.randint(4, (3, n))
            x[:, n // 2 : n // 2 + 1] = model.mask_id
            rows = torch.tensor([0, n // 2, L + n // 2, 3 * L - 1])
            view = model.objective.view(x, rows=rows)
            found = padding.compute_once(model)(view)
            assert torch.allclose(found, model(view), atol=1e-5)
            if n == 3 and model.layers[0].qkv is None and L > 4 and model.rate is None:
                assert computed[-2] < computed[-1] / 2
    assert model.layers is blocks and not any(type(b) is padding.OncePadded for b in blocks)
    assert padding.compute_once(model) is model, "not where gradients are wanted"


@pytest.mark.slow
def test_second_command_takes_a_third_of_the_rows(capsys):
    """At 44a18a0 it computed 364 texts of 256 tokens; the answers are the same."""
    folder = ROOT / "weights" / "shakespeare"
    flags = ["--infill=To be, or ███ to be", "--candidates=4", "--json=-"]
    sample.main([f"--out_dir={folder}", "--device=cpu", *flags])
    d = json.loads(capsys.readouterr().out)
    found = [(c["text"][10:13], round(c["score"], 2)) for c in d["candidates"]]
    assert found == [("not", -9.19), ("now", -10.11), ("all", -10.82), ("how", -11.02)]
    assert d["sequences"] <= 130 and d["calls"] <= 40
