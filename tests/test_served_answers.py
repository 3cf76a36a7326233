"""serve.py: a stream, a whole answer, an echo, and the offsets of tokens agree, for every model."""

import functools
import itertools
import json
import random

import pytest
import tokenizer_kinds
import torch

for package in ("greenlet", "starlette", "uvicorn", "httpx", "pydantic"):
    pytest.importorskip(package)
from conftest import CPU
from starlette.testclient import TestClient

import mdlm
import serve
from nanomdlm.kernels import operations as kernels
from nanomdlm.support.data.tokenizer import Tokenizer, train_bpe
from nanomdlm.support.infill import filling
from nanomdlm.support.serving import app, engine, writing

TEXT = "the cat sat on the mat, and the dog ran to the old red barn. it was late " * 20
MODELS = dict(whole={}, blocks=dict(block_length=4), ar=dict(objective="ar"))
MODELS["ends"] = dict(objective="ar")  # predicts [END]
PROMPTS = dict(none="", short="the cat", space="the cat ", long=TEXT[:150])  # beyond the context
FIELDS = {
    "echo": dict(echo=True),
    "suffix": dict(suffix=" on the mat"),
    "infill": dict(infill="the [___] sat on ██ mat"),
    "stop": dict(stop=["e", "at"]),
    "n": dict(n=2),
    "logprobs": dict(logprobs=2),
    "several": dict(prompt=["the dog", "it was "]),
    "direct": dict(correct=0),  # of one piece, a stream has several parts
}


@functools.cache
def tokenizer_of(kind):
    if kind == "char":
        return Tokenizer("char", sorted(set(TEXT + "è")))
    if kind == "byte":
        return Tokenizer("byte", [])
    if kind == "word":
        return Tokenizer("word", [*"abcdefghijklmnopqrstuvwxyz., "])
    if kind == "bpe":
        return Tokenizer("bpe", train_bpe([TEXT], 300))
    return Tokenizer("file", tokenizer_kinds.bert(TEXT).to_str())


@functools.cache
def client_of(model="whole", tokenizer="char", block_size=32, **options):
    """A client of a server in this process, whose network has random weights."""
    config = mdlm.Config(n_layer=2, n_head=2, n_embd=32, block_size=block_size, dropout=0.0)
    for name, value in MODELS[model].items():
        setattr(config, name, value)
    tokenizer = tokenizer_of(tokenizer)
    if model in ("ends", "lengths", "answers"):
        end = tokenizer.special_ids()["[SEP]"] if tokenizer.kind == "file" else True
        tokenizer = Tokenizer(tokenizer.kind, tokenizer.vocab, end)
    torch.manual_seed(1)
    V, ops = tokenizer.vocab_size, kernels.REFERENCES
    network = mdlm.make_model(config, V, ops, tokenizer.end_id).eval()
    for p in network.parameters():
        p.data.normal_(0, 0.3)
    if model == "lengths":
        network.length_counts.fill_(1)
    writer = writing.Writer(network, network, tokenizer, serve.sampler)
    options = serve.Options(**options)
    computes = engine.Engine(CPU, options.max_active, options.max_waiting)
    engine.start(computes)
    server = app.Server(computes, writer, "out", 0, options)
    return TestClient(app.make_app(server), base_url="http://localhost")


def ask(client, path="/v1/completions", **body):
    r = client.post(path, json=body)
    assert r.status_code == 200, (r.text, body)
    return r.json()


def streamed(client, **body):
    """The choices of a stream, with their parts joined, by index; and its usage."""
    options = dict(stream=True, stream_options=dict(include_usage=True))
    r = client.post("/v1/completions", json=body | options)
    assert r.status_code == 200, (r.text, body)
    events = [line[6:] for line in r.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    found = {}
    for event in map(json.loads, events[:-1]):
        for choice in event["choices"]:
            before = found.get(choice["index"], dict(text="", finish_reason=None))
            assert before["finish_reason"] is None, "nothing follows the end"
            found[choice["index"]] = choice | dict(text=before["text"] + choice["text"])
    return [found[i] for i in sorted(found)], json.loads(events[-2])["usage"]


KINDS = [*MODELS]
MODELS["lengths"] = {}  # of documents: a length is drawn before the text
MODELS["answers"] = dict(prompt_column="prompt", text_column="answer")


def cases():
    """(model, tokenizer, body) of all combinations that exist."""
    names = [*FIELDS]
    for model, tokenizer, prompt in itertools.product(KINDS, ("char", "bpe", "bert"), PROMPTS):
        for chosen in itertools.product((False, True), repeat=len(names)):
            fields = [name for name, use in zip(names, chosen) if use]
            if "infill" in fields and ({"suffix", "several"} & {*fields} or prompt != "none"):
                continue
            if prompt == "long" and "suffix" in fields or prompt != "none" and "several" in fields:
                continue
            body = dict(prompt=PROMPTS[prompt], max_tokens=10, seed=3, steps=8)
            if {"suffix", "infill"} & {*fields}:
                body["max_tokens"] = 2
            for name in fields:
                body |= FIELDS[name]
            yield model, tokenizer, body


def check(model, tokenizer, body):
    client = client_of(model, tokenizer)
    answer = ask(client, **body)
    whole = answer["choices"]
    assert [choice["index"] for choice in whole] == [*range(len(whole))]
    assert streamed(client, **body) == (whole, answer["usage"])
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    for choice in whole:
        text = choice["text"]
        if body.get("echo") and "infill" not in body:
            assert any(text.startswith(prompt) for prompt in prompts)
        if "echo" in body and "suffix" in body and not body.get("stop"):
            assert text.endswith(body["suffix"])
        if shown := choice["logprobs"]:
            tokens, offsets = shown["tokens"], shown["text_offset"]
            assert all(text[at:].startswith(token) for at, token in zip(offsets, tokens))
            if "echo" in body or "infill" not in body:
                assert "".join(tokens) == text


def test_a_stream_is_the_whole_answer_and_offsets_are_those_of_tokens():
    """A sample of all combinations of fields, models, tokenizers, and prompts."""
    for case in random.Random(5).sample([*cases()], 32):
        check(*case)
    for seed in range(6):  # stopped by a text before [END], which a stream does not wait for
        body = dict(prompt="", max_tokens=25, seed=seed, stop=["e", "a"], correct=0)
        check("ends", "char", body)


@pytest.mark.long
def test_all_streams_are_the_whole_answer():
    for case in cases():
        check(*case)


@pytest.mark.parametrize("model", [*MODELS][:3])  # a score of the last also counts its [END]
@pytest.mark.parametrize("tokenizer", ["char", "bpe", "bert"])
def test_log_probabilities_of_an_echo_add_up_to_the_score(model, tokenizer):
    """As harnesses add them up: of the tokens of a text after its context. Without `max_tokens: 0`
    the last token is one that was written."""
    client = client_of(model, tokenizer)
    context, text = "the cat sat", " on the old mat"
    body = dict(prompt=context + text, max_tokens=0, echo=True, logprobs=1, temperature=0)
    (choice,) = ask(client, **body)["choices"]
    assert choice["text"] == context + text
    shown = choice["logprobs"]
    scores = ask(client, "/v1/score", input=[context + text, [context, text]])["data"]
    assert sum(shown["token_logprobs"]) == pytest.approx(scores[0]["logp"], abs=1e-3)
    after = [p for p, at in zip(shown["token_logprobs"], shown["text_offset"]) if at >= 11]
    assert sum(after) == pytest.approx(scores[1]["logp"], abs=1e-3)
    (more,) = ask(client, **body | dict(max_tokens=1))["choices"]
    given = more["logprobs"]["token_logprobs"][:-1]
    assert given == pytest.approx(shown["token_logprobs"], abs=1e-4)
    assert max(shown["token_logprobs"]) < -0.001


def test_what_is_cut_off_has_no_part_in_an_echo():
    """A text of a length that was drawn may be longer than `max_tokens`."""
    client = client_of("lengths", "char")
    body = dict(prompt="the ca", max_tokens=6, echo=True, logprobs=0, n=6, seed=2)
    for choice in ask(client, **body)["choices"]:
        (score,) = ask(client, "/v1/score", input=[choice["text"]])["data"]
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(score["logp"], abs=1e-3)


def test_every_byte_of_a_character_that_is_cut_has_a_log_probability():
    client = client_of("whole", "byte")
    body = dict(prompt="the ", max_tokens=3, logprobs=0, steps=1, n=16, temperature=2)
    part = 0
    for seed in range(25):
        for choice in ask(client, **body, seed=seed)["choices"]:
            assert len(choice["logprobs"]["tokens"]) == 3
            part += choice["logprobs"]["tokens"][-1] == ""
    assert part


@pytest.mark.parametrize("model", ["answers", "lengths", "whole"])
def test_the_page_shows_what_was_written(model):
    """Also after the [END] with which a prompt ends that is to be answered."""
    client = client_of(model, "char")
    body = dict(prompt="the cat", max_tokens=12, seed=4)
    (choice,) = ask(client, **body)["choices"]
    *_, end = [
        json.loads(line[6:]) for line in client.post("/page", json=body).text.split("\n\n") if line
    ]
    sample = end["sample"]
    text = sample["tokens"]
    for frame in sample["frames"]:
        for i, token, *_ in frame:
            text[i] = token
    prompt = "the cat\n" if model == "answers" else "the cat"
    assert choice["text"] and "".join(text).startswith(prompt + choice["text"])


def test_of_tokens_that_show_alike_the_likeliest_is_named():
    """Words of one letter, and bytes."""
    answer = ask(client_of(tokenizer="word"), prompt="the", max_tokens=24, logprobs=32, seed=1)
    found = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert any(len(likeliest) < 32 for likeliest in found)
    for likeliest in found:
        assert [*likeliest.values()] == sorted(likeliest.values(), reverse=True)


@pytest.mark.parametrize("model", ["whole", "ar"])
def test_many_gaps_leave_room_for_each_other(model, monkeypatch):
    """Ten, of a token each at least, in a text with ten places left."""

    def longest_first(model, tokenizer, known, gap, lengths, *more):
        return {n: float(n) for n in lengths}

    monkeypatch.setattr(filling, "scores_of", longest_first)
    text = "the cat sat on the mat"
    template = "[___]".join(text[i : i + 2] for i in range(0, 22, 2))
    answer = ask(client_of(model), infill=template)["choices"][0]["text"]
    assert len(answer) == 32
