"""Ranked fills: the likeliest of those drawn, exactly, in few rows of the network."""

import functools
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from conftest import ROOT, Toy, hashed_world

import kernels
import mdlm
import sample
import variants
from support import progress
from support.data.tokenizer import Tokenizer
from support.infill import calls, likelihood, padding, ranking, search, templates

V = 6
T = 7
random_world = functools.partial(hashed_world, T, V)


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
    for settings in (
        dict(),
        dict(order="confidence"),
        dict(cfg=1.0),
        dict(redraw="sweep", spacing=1),
    ):
        hidden.clear()
        *_, plain = sample.unmask(model, x, seed=5, **settings)
        without = sum(hidden)
        hidden.clear()
        assert torch.equal(sample.generate(model, x, seed=5, **settings), plain.x)
        if limit > 3 * V:
            states = 1 + 2 * V
            assert sum(hidden) <= states * (2 if settings.get("cfg") else 1) < without


# ---- log p of a fill, against an enumeration of all fills


def draw_all(x, fill, may_end, quick, **_):
    """Fills equal rows with one after another of all that may stand there, in place of a draw."""
    tokens = range(V if may_end else V - 1)  # the last is [END]
    texts = {}
    for row, here in zip(x, fill):
        at = ((row == V) & here).nonzero()[:, 0]
        key = tuple(row.tolist()), tuple(at.tolist())
        texts.setdefault(key, itertools.cycle(itertools.product(tokens, repeat=len(at))))
        row[at] = torch.tensor(next(texts[key]), dtype=torch.int64)
    return x


def chain_of(model, ids, start, after):
    """log p(ids[start:] | ids[:start]) in float64, token by token; after: the id past the text."""
    total = 0.0
    for i in range(start, len(ids)):
        xt = torch.full((1, T), after)
        xt[0, : len(ids)] = torch.tensor([*ids[:i], *[V] * (len(ids) - i)])
        total += model.logits(xt)[0, i].log_softmax(-1)[ids[i]].item()
    return total


def all_texts(segments, max_gap, ends_open):
    """Ids of all fills of a template of literals (lists), numbers and None, and what they show.

    ends_open: whether a gap at the end of the text stops at [END] or a line break
    """
    found = [([], [])]
    for i, segment in enumerate(segments, 1):
        choices = [(segment, segment)] if isinstance(segment, list) else []
        if segment is None and ends_open and i == len(segments):
            for ids in itertools.product(range(V), repeat=max_gap):
                stops = [k for k, id in enumerate(ids) if id == V - 1 or (k and id == V - 2)]
                n = stops[0] if stops else max_gap
                choices.append((list(ids[: n + 1]), list(ids[:n])))
        elif not isinstance(segment, list):
            for n in range(1, max_gap + 1) if segment is None else [segment]:
                for ids in itertools.product(range(V - 1), repeat=n):
                    choices.append((list(ids), list(ids)))
        found = [(a + c, b + d) for a, b in found for c, d in choices]
    return found


def fills_of(model, segments, max_gap, draws, **more):
    """{text: log p} of the fills that `hypotheses` finds where all are drawn; more: settings."""
    tokenizer = Tokenizer("char", list("abcd\n"), end=True)
    segments = [
        tokenizer.decode(segment) if isinstance(segment, list) else segment for segment in segments
    ]
    limits = dict(max_gap=max_gap, draws=draws) | more
    found = search.hypotheses(model, tokenizer, segments, 10**6, draw_all, "cpu", **limits)
    shown = [templates.joined(templates.to_texts(f.segments, f.ids, tokenizer)) for f in found]
    assert len(set(shown)) == len(shown)
    assert [f.logp for f in found] == sorted((f.logp for f in found), reverse=True)
    return dict(zip(shown, (f.logp for f in found)))


@pytest.mark.parametrize(
    "segments, max_gap",
    [([[0, 1], None], 1), ([[0, 1], None], 3), ([None], 3), ([[2], 1, None], 2)],
)
def test_logp_of_an_open_end_is_the_chain_rule(segments, max_gap):
    """[END] counts once, also where it is the first token of the gap."""
    model = random_world(2)
    start = len(segments[0]) if isinstance(segments[0], list) else 0
    wanted = {}
    tokenizer = Tokenizer("char", list("abcd\n"), end=True)
    total = 0.0
    for ids, shown in dict.fromkeys(
        (tuple(a), tuple(b)) for a, b in all_texts(segments, max_gap, 1)
    ):
        text = tokenizer.decode(shown)
        logp = chain_of(model, list(ids), start, V)
        wanted[text] = max(logp, wanted.get(text, -math.inf))  # of its two ends, the likelier
        total += math.exp(logp)
    if segments == [[0, 1], None] or segments == [None]:
        assert total == pytest.approx(1), "the fills are not all that may follow"
    assert fills_of(model, segments, max_gap, 5 * V**max_gap) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    "segments",
    [[[0], None], [[0], None, [1], None], [None, [2], None, [0]], [1, [2], None]],
    ids=str,
)
def test_logp_of_documents_of_given_lengths_is_the_chain_rule(segments):
    """In every stretch the network sees [END] after the text, as in training."""
    model = random_world(4)
    ends = mdlm.MaskedDiffusion(model.config, V)
    model.objective = variants.choose(model.config, ends, end_id=V - 1)
    model.length_counts = torch.arange(T + 1) % 3
    p = (model.length_counts.double() + 1) / (model.length_counts + 1).sum()
    tokenizer = Tokenizer("char", list("abcd\n"), end=True)
    start = len(segments[0]) if isinstance(segments[0], list) else 0
    wanted = {}
    for ids, _ in all_texts(segments, 2, False):
        if len(ids) <= T:
            logp = p[len(ids)].log().item() + chain_of(model, ids, start, V - 1)
            wanted[tokenizer.decode(ids)] = max(logp, wanted.get(tokenizer.decode(ids), -math.inf))
    draws = 4 * 30 * 25  # two lengths of up to 30 beginnings, 25 fills of a gap of two
    assert fills_of(model, segments, 2, draws) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("reach", [0, 1, 9])
def test_reach_counts_the_first_tokens_after_the_gap(reach):
    model = random_world(2)
    segments = [[0], None, [1, 2]]
    wanted = {}
    for ids, shown in all_texts(segments, 2, False):
        counted = ids[: len(ids) - max(0, 2 - reach)]
        wanted["".join("abcd\n"[i] for i in shown)] = chain_of(model, counted, 1, V)
    found = fills_of(model, segments, 2, 5 * V**2, reach=reach)
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    "segments", [["a", 2, "a"], ["a", None, "a"], ["a", None], [None]], ids=str
)
def test_a_text_has_its_likeliest_ids(segments):
    """Of several sequences of ids with one text the likeliest counts, whichever is drawn last."""
    vocab = dict(a=0, b=1, aa=2, ab=3, ba=4)
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    library.decoder = tokenizers.decoders.Fuse()
    library.add_special_tokens(["[END]"])  # 5
    tokenizer = Tokenizer("file", library.to_str(), 5)
    literals = [
        tokenizer.encode(segment) if isinstance(segment, str) else segment for segment in segments
    ]
    start = 1 if segments[0] == "a" else 0
    several = False
    for seed in range(3):
        model = random_world(seed)
        wanted = {}
        for ids, shown in dict.fromkeys((tuple(a), tuple(b)) for a, b in texts_of(literals)):
            text = tokenizer.decode(shown)
            logp = chain_of(model, list(ids), start, V)
            several |= text in wanted
            wanted[text] = max(logp, wanted.get(text, -math.inf))
        settings = dict(max_gap=2, draws=5 * V**2)
        best = search.hypotheses(model, tokenizer, segments, 10**6, draw_all, "cpu", **settings)
        shown = [templates.joined(templates.to_texts(f.segments, f.ids, tokenizer)) for f in best]
        assert dict(zip(shown, (f.logp for f in best))) == pytest.approx(wanted, abs=1e-4)
        assert len(shown) == len(wanted)
        few = search.hypotheses(model, tokenizer, segments, 3, draw_all, "cpu", **settings)
        assert [f.logp for f in few] == [f.logp for f in best[:3]]
    assert several


def texts_of(segments):
    """all_texts of a vocabulary without a line break: an open end stops at [END] alone."""
    open_end = segments[-1] is None
    if not open_end:
        return all_texts(segments, 2, False)
    tails = itertools.product(range(V), repeat=2)
    cut = [tail[: tail.index(V - 1) + 1] if V - 1 in tail else tail for tail in tails]
    heads = all_texts(segments[:-1], 2, False)
    return [(a + list(c), b + [id for id in c if id != V - 1]) for a, b in heads for c in set(cut)]


def test_an_empty_end_is_a_fill(capsys, monkeypatch):
    """A model that ends the text at once: it is shown, and nothing is left to draw."""
    tokenizer = Tokenizer("char", list("abcd\n"), end=True)
    logits = torch.zeros(T, V, dtype=torch.float64)
    logits[:, V - 1] = 20
    model = Toy(lambda xt: logits.expand(len(xt), T, V), V, T)
    model.register_forward_pre_hook = lambda hook: SimpleNamespace(remove=lambda: None)
    model.parameters = lambda: iter([torch.zeros(1)])
    for text, shown in (("ab[___]", "ab"), ("[___]", "")):
        assert sample.write(model, tokenizer, text, n=2) == [shown] * 2
        segments = sample.parse(text, tokenizer, T)
        for settings in (dict(candidates=2), dict(num_samples=2, html="x"), dict(watch=True)):
            options = sample.resolve(sample.Options(device="cpu", **settings), model)
            pages = []
            for texts, _ in sample.answers(model, tokenizer, text, segments, options, pages):
                assert templates.joined(texts[0]) == shown
            for page in pages:
                assert page["text"] == shown and page["tokens"] == list(shown)


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


@pytest.mark.parametrize(
    "template, max_gap",
    [
        ("ab██ca", 3),
        ("a[___]b", 3),
        ("a[___]bc[___]d", 3),
        ("a[___]bc[___]d", 9),
        ("ab[___]", 3),
        ("█b█ c█", 3),
    ],
)
def test_progress_has_a_total_and_ends_there(small, template, max_gap, monkeypatch):
    bar = Bar()
    monkeypatch.setattr(progress, "bar", lambda *_, **__: bar)
    model, tokenizer = small
    options = sample.resolve(sample.Options(candidates=2, max_gap=max_gap, device="cpu"), model)
    segments = sample.parse(template, tokenizer, model.config.block_size)
    _, _, facts = sample.ranked(model, tokenizer, segments, options)
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
            is_conditioned = model.config.time_conditioning
            if n == 3 and model.layers[0].qkv is None and L > 4 and not is_conditioned:
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
