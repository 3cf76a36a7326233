"""Gaps that a model fills from left to right: what it computes again, and lines of code."""

import inspect
import json
import re
import sys

import pytest
import torch
from conftest import CPU
from test_pretrained import folder_of, make_tokenizer, native, random_network, some_text
from test_pretrained import tokenizer_of as tokenizer_of
from test_untrained import next_logits

import mdlm
import sample
from nanomdlm.support.constrain.automaton import LINE
from nanomdlm.support.infill import filters, model_calls, prefixes, templates

transformers = pytest.importorskip("transformers")
folder_of, some_text = folder_of, some_text  # fixtures


def whole(model, view):
    return model(view)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_what_is_kept_changes_no_number(kind, folder_of, monkeypatch):
    """Texts and fills are those of a model that computes all of each text, in every call."""
    model, tokenizer, _ = mdlm.load(folder_of(kind))
    tokens = []
    forward = type(model).forward

    def counting(self, view, *args):
        tokens.append(view.ids.numel())
        return forward(self, view, *args)

    monkeypatch.setattr(type(model), "forward", counting)

    def results():
        tokens.clear()
        texts = sample.write(model, tokenizer, "the name of", n=3, length=14, seed=5)
        found = sample.search(model, tokenizer, "the [___] of it", top=4, max_gap=3, limit=60)
        return texts, [one.text for one in found], [one.logp for one in found]

    texts, fills, logp = results()
    computed = sum(tokens)
    monkeypatch.setattr(prefixes, "call", whole)
    wanted = results()
    assert (texts, fills) == wanted[:2] and logp == pytest.approx(wanted[2], abs=1e-4)
    assert 2 * computed < sum(tokens)


def test_a_search_that_must_stop_at_once_writes_the_likeliest_tokens(folder_of):
    model, tokenizer, _ = mdlm.load(folder_of("llama"))
    (found,) = sample.search(model, tokenizer, "the [___] of it", top=1, max_gap=8, limit=1)
    places = [i for i, logp in enumerate(found.drawn) if logp is not None]
    assert len(places) == 8
    places = places[1:]  # the first must begin with a space
    x = torch.tensor([found.ids])
    at = torch.tensor(places)
    with torch.no_grad():
        logp = model_calls.next_logits(model, x, torch.zeros_like(at), at).log_softmax(-1)
    best = logp.masked_fill(~filters.drawable(tokenizer, model.vocab_size), -torch.inf).amax(1)
    assert [found.drawn[i] for i in places] == pytest.approx(best.tolist(), abs=1e-4)


@pytest.mark.parametrize("how", ["in place", "data", "new", "in place, open", "new, open"])
def test_what_is_kept_is_forgotten_when_weights_change(how, folder_of, monkeypatch):
    model, tokenizer, _ = mdlm.load(folder_of("llama"))

    def text():
        found = sample.search(model, tokenizer, "the name [___] of", top=1, max_gap=1)
        (text,) = sample.write(model, tokenizer, "the name of", length=14, temperature=0)
        return text, found[0].text

    before = text()
    layer = model.layers[0].self_attn.v_proj
    ids = [*tokenizer.encode("the name of"), *[model.mask_id] * 8]
    steps = sample.unmask(model, torch.tensor([ids]), seed=1)
    if how.endswith("open"):  # as an animation does that was put aside
        next(steps)
    with torch.no_grad():
        if how.startswith("in place"):
            layer.weight.mul_(-3)
        elif how == "data":
            layer.weight.data.mul_(-3)
        else:
            layer.weight = torch.nn.Parameter(-3 * layer.weight)
    after = text()
    steps.close()
    monkeypatch.setattr(prefixes, "call", whole)
    assert after == text() != before


# ---- Lines of code
@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    """(model, tokenizer, the library's) of a Llama whose tokenizer joins line breaks and spaces."""
    folder = tmp_path_factory.mktemp("coder")
    made = make_tokenizer(inspect.getsource(json.decoder) + inspect.getsource(json.encoder), False)
    made.save(str(folder / "tokenizer.json"))
    random_network("llama", made.get_vocab_size()).save_pretrained(folder)
    model, tokenizer, _ = mdlm.load(folder)
    return model, tokenizer, native("llama", folder, is_causal=True)


@pytest.mark.parametrize(
    "before, gap, line, after",
    [
        ("def f(a):\n", "", "    return a", "\n"),
        ("def f(a):\n    ", "", "return a", "\n"),
        ("if a:\n        b()\n\n    ", LINE, "return (a)", "\n\nx"),
        ("def f(a):\n", LINE, "    if a:", "\n        b()\n"),
        ("def f(a):\n    return", LINE, " a", "\n"),
    ],
)
def test_a_fill_has_the_tokens_of_the_whole_text(coder, before, gap, line, after):
    """A line break and indentation before a gap are joined with the tokens of its fill."""
    model, tokenizer, _ = coder
    template = before + (f"[___:{gap}]" if gap else "[___]") + after
    left, open, right = templates.parse(template, tokenizer, 64)
    ids = tokenizer.encode(before + line + after)
    begin, end = len(left.ids), len(ids) - len(right.ids)
    assert (left.ids, right.ids) == (ids[:begin], ids[end:])
    assert open.automaton.takes(ids[begin:end])
    for found in sample.search(model, tokenizer, template, top=2, limit=40):
        assert found.text == before + found.fills[0] + after == tokenizer.decode(found.ids)
        assert not gap or re.fullmatch(gap, found.fills[0])


@torch.no_grad()
@pytest.mark.parametrize("reach", [1, 3, 64])
def test_fills_are_ranked_by_as_many_tokens_as_reach_says(coder, reach):
    pytest.importorskip("outlines_core")
    model, tokenizer, theirs = coder
    after = "\n    return a + b\n"
    template = f"def f(a):\n    [___:[ab] = [0-6]]{after}"
    found = sample.search(model, tokenizer, template, top=3, reach=reach, limit=2000)
    assert found.proven
    before = len(tokenizer.encode("def f(a):"))
    for one in found:
        logp = next_logits(theirs, torch.tensor([one.ids])).double().log_softmax(-1)[0]
        end = len(one.ids) - len(tokenizer.encode(after))
        at = torch.arange(before, min(len(one.ids), end + reach))
        wanted = logp[at, torch.tensor(one.ids)[at]].sum().item()
        assert one.logp == pytest.approx(wanted, abs=1e-3)
    # The best of all 14 texts, by enumeration.
    scores = {}
    for name in "ab":
        for digit in "0123456":
            ids = tokenizer.encode(f"def f(a):\n    {name} = {digit}{after}")
            logp = next_logits(theirs, torch.tensor([ids])).double().log_softmax(-1)[0]
            end = len(ids) - len(tokenizer.encode(after))
            at = torch.arange(before, min(len(ids), end + reach))
            scores[f"{name} = {digit}"] = logp[at, torch.tensor(ids)[at]].sum().item()
    assert found[0].logp >= max(scores.values()) - 1e-3


# ---- Over HTTP
@pytest.fixture(scope="module")
def client(coder):
    for package in ("greenlet", "starlette", "uvicorn", "httpx", "pydantic"):
        pytest.importorskip(package)
    from starlette.testclient import TestClient

    import serve
    from nanomdlm.support.serving import app, engine, writing

    model, tokenizer, _ = coder
    options = serve.Options()
    computes = engine.Engine(CPU, options.max_active, options.max_waiting)
    engine.start(computes)
    writer = writing.Writer(model, model, tokenizer, serve.sampler)
    server = app.Server(computes, writer, "out", 0, options)
    return TestClient(app.make_app(server), base_url="http://localhost")


@pytest.mark.parametrize("prefix", ["x = 1\n", "def f(a):\n" + 40 * " ", "def f(a):\n    return"])
def test_an_editor_gets_one_line(prefix, client, monkeypatch):
    """Without a library for patterns, however short it may be."""
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    for n in (1, 2, 8):
        body = dict(input_prefix=prefix, input_suffix="\n\nx = 2\n", n_predict=n)
        answer = client.post("/infill", json=body)
        assert answer.status_code == 200, answer.text
        line = answer.json()["content"]
        assert line.strip() and "\n" not in line


def test_the_page_ranks_fills(client, coder):
    body = dict(infill="def f(a):\n    [___]\n", rank=True, max_tokens=3)
    events = client.post("/page", json=body).text.split("\n\n")
    found = sample.search(*coder[:2], body["infill"], max_gap=3)
    shown = [json.loads(line[6:]) for line in events if line][-1]["fills"]
    assert [one["logp"] for one in shown] == pytest.approx([one.logp for one in found], abs=1e-3)
