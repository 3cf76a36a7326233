"""serve.py: nothing that a client sends stops it, and what real clients send is accepted."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

for package in ("greenlet", "starlette", "uvicorn", "httpx", "pydantic"):
    pytest.importorskip(package)
import httpx
from test_engine import PATIENCE
from test_served_answers import ask, client_of
from test_serving import post, serving

from nanomdlm.support.constrain import automaton
from nanomdlm.support.errors import UserError
from nanomdlm.support.serving import app, rendering, writing

SLOW = r"((\w{50}){50}){50}"  # a pattern whose automaton takes all the time that it gets


def refused(client, path="/v1/completions", status=400, headers=(), **body):
    r = client.post(path, json=body, headers=list(headers))
    assert r.status_code == status, r.text
    error = r.json()["error"]
    assert error["message"] and error.keys() == {"message", "type", "param", "code"}
    return error


# ---- Work before bounds
def test_an_answer_has_a_bounded_number_of_logprobs():
    """Else the event loop makes 100 MB of JSON, and nobody else is answered."""
    client = client_of()
    text = "the cat sat on " * 500
    body = dict(prompt=text, max_tokens=0, echo=True, logprobs=32)
    error = refused(client, status=422, **body, n=16)
    assert error["param"] == "logprobs" and error["code"] == "too_large"
    error = refused(client, status=422, prompt="the", max_tokens=2048, n=16, logprobs=32)
    assert error["param"] == "logprobs"
    (one,) = ask(client, **body | dict(prompt=text[:60]), n=1)["choices"]
    assert len(one["logprobs"]["tokens"]) == 60


@pytest.mark.parametrize("path", ["completions", "score", "fix"])
def test_a_megabyte_is_too_long_by_its_beginning(path):
    """Else its tokens are counted for seconds, and no other prompt is read meanwhile."""
    client = client_of(tokenizer="file")
    text = "the cat " * 120_000
    began = time.process_time()
    error = refused(client, f"/v1/{path}", **{"prompt" if path == "completions" else "input": text})
    assert error["code"] == "context_length_exceeded"
    assert time.process_time() - began < 0.5
    cut = dict(input_prefix=text[:400_000], input_suffix=text[:400_000], n_predict=2)
    assert ask(client, "/infill", **cut)["content"], "of an editor's file what fits is read"


def test_a_large_pattern_is_not_for_a_long_gap(monkeypatch):
    """An automaton's cost in a call grows with both: with 17,000 states, 8 s for a gap of 54."""
    monkeypatch.setattr(writing, "MOST_CELLS", 2_000)
    client = client_of()
    words = "|".join(a + b + c for a in "abcde" for b in "aeiou" for c in "rst")
    large = f"({words})[a-z]*"
    ask(client, infill=f"the [████:{large}] sat")
    ask(client, infill="the [████████████:[a-z]+] sat")
    error = refused(client, status=422, infill=f"the [████████████:{large}] sat")
    assert error["code"] == "too_large"


MANY = [1] * 400_000


@pytest.mark.parametrize(
    "path, body",
    [
        ("completions", dict(prompt=MANY)),
        ("completions", dict(stop=MANY)),
        ("completions", dict(choices=MANY)),
        ("chat/completions", dict(messages=MANY)),
        ("chat/completions", dict(messages=[dict(role="user", content=MANY)])),
        ("score", dict(input=MANY)),
        ("fix", dict(input=MANY)),
        ("completions", {str(i): 1 for i in range(90_000)}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_body_with_many_mistakes_costs_as_little_as_one(path, body):
    client = client_of()
    began = time.process_time()
    refused(client, f"/v1/{path}", **body)
    assert time.process_time() - began < 1.5  # all of them, listed, take 2 to 5 s


@pytest.mark.parametrize(
    "body",
    [
        dict(prompt="the", regex="[" * 65_000),
        dict(prompt="the", regex="[[[[\\" * 13_000),
        dict(prompt="the", regex="a" * 70_000),
        dict(prompt="the", regex=""),
        dict(infill="[___:" + "[" * 65_000),
        dict(infill="[___:a{1}]b" * 60_000),
        dict(infill="".join(f"[___:a{{{i}}}]b" for i in range(1, 99))),
        dict(infill="[___|a|b]c" * 2_000),
        dict(infill="█[___]" * 100_000),
        dict(infill="_a" * 500_000),
    ],
    ids=lambda body: str(body)[:40],
)
def test_what_is_too_much_is_refused_at_once(body):
    client = client_of()
    began = time.process_time()
    r = client.post("/v1/completions", json=body)
    assert r.status_code in (400, 422), r.text
    assert time.process_time() - began < 4


@pytest.mark.parametrize(
    "body",
    [
        dict(prompt="the", max_tokens=20, spacing=1 << 31, redraw="low_confidence"),
        dict(prompt="the", max_tokens=20, spacing=1 << 31, redraw="sweep"),
        dict(infill="[___]".join("the cat sat on"), max_tokens=2),
        dict(infill=" ".join(["[___|a|he|the]"] * 12), max_tokens=3),
        dict(prompt="the cat " * 1000, max_tokens=2048, n=16, steps=8192, block=1),
    ],
    ids=["spacing", "sweep", "gaps", "lists", "blocks"],
)
def test_what_is_allowed_delays_no_other_client(body):
    """Between two network calls little is computed, whatever a field says."""
    if "[___|" in body.get("infill", ""):
        pytest.importorskip("outlines_core")
    client = client_of(block_size=64, time_limit=4.0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "/v1/completions", json=body)
        while not asked.done():
            began = time.monotonic()
            ask(client, prompt="the", max_tokens=1, steps=1)
            assert time.monotonic() - began < 3
        assert asked.result().status_code in (200, 503), asked.result().text


def test_patterns_are_built_only_for_texts_that_fit(monkeypatch):
    built = []
    run = automaton.run_builder
    monkeypatch.setattr(automaton, "run_builder", lambda p: built.append(p) or run(p))
    error = refused(client_of(), infill="[___:[ab]{2}]" + "the cat " * 9)
    assert error["code"] == "context_length_exceeded" and not built
    body = dict(infill="the [___:ab|ca(t]")
    assert refused(client_of(), **body) and built == ["ab|ca(t"]


def test_a_pattern_is_built_under_the_clock_of_its_request():
    pytest.importorskip("outlines_core")
    client = client_of(block_size=31, time_limit=1.0)
    began = time.monotonic()
    error = refused(client, status=503, prompt="the", regex=SLOW)
    assert error["code"] == "time_limit" and time.monotonic() - began < 8


def test_clients_that_leave_keep_no_place_where_patterns_are_built(short_run):
    """And others are answered meanwhile; SIGTERM is heard while patterns are built."""
    pytest.importorskip("outlines_core")
    with serving(f"--out_dir={short_run}", "--drain=0.1") as server:
        url = f"{server.url}/v1/completions"

        def leave(i):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=dict(prompt="a", regex=SLOW + "a" * i), timeout=1.0)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(leave, range(6)))
            began = time.monotonic()
            assert post(url, json=dict(prompt="The ", regex="[a-c]{2}")).status_code == 200
            assert time.monotonic() - began < 10
            slow = pool.submit(post, url, json=dict(prompt="a", regex=SLOW + "b"))
            time.sleep(0.5)
            began = time.monotonic()
            assert post(url, json=dict(prompt="a", max_tokens=2)).status_code == 200
            assert time.monotonic() - began < 10
            server.process.terminate()
            assert slow.result().json()["error"]["code"] == "stopping"
        assert server.process.wait(PATIENCE) == 0


def test_a_chat_template_has_seconds_and_a_process_of_its_own(monkeypatch):
    pytest.importorskip("transformers")
    messages = [dict(role="user", content="cat")]
    render = rendering.Renderer()
    assert render(messages, "{{ messages[0].content }}!", {}) == "cat!"
    monkeypatch.setattr(rendering, "SECONDS", 0.5)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for endless in (loop, "{{ 9 ** (9 ** 9) }}"):  # the second holds the interpreter's lock
        began = time.monotonic()
        with pytest.raises(UserError, match="template"):
            render(messages, endless, {})
        assert time.monotonic() - began < 30
    monkeypatch.undo()
    with pytest.raises(ValueError):
        render(messages, "{{ raise_exception('no') }}", {})
    assert render(messages, "{{ messages[0].content }}{{ bos_token }}", dict(bos_token="<s>"))
    render.process.kill()
    render.process.wait()


# ---- Bounds of fields
NAMES = sorted({name for model, _ in app.WRITES.values() for name in model.model_fields})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5) | JSON


@settings(max_examples=30, deadline=None)
@given(BODIES)
def test_any_body_is_answered(body):
    for path in ("/v1/completions", "/infill", "/v1/chat/completions"):
        r = client_of().post(path, content=json.dumps(body).encode())
        assert r.status_code in (200, 400, 404, 422), r.text
        assert r.status_code == 200 or r.json()["error"]["message"]


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 400, "1e999", "NaN"])
def test_every_number_has_bounds(number):
    client = client_of()
    floats = ("temperature", "top_p", "threshold", "entropy_bound", "cfg", "presence_penalty")
    whole = ("n", "max_tokens", "seed", "steps", "top_k", "spacing", "block", "logprobs", "correct")
    for name in (*floats, *whole):
        body = f'{{"prompt": "the", "{name}": {number}}}'
        r = client.post("/v1/completions", content=body)
        assert r.status_code in (400, 422), (name, r.text)
        if number != "NaN":
            assert r.json()["error"]["param"] == name
    for path, name in (("/v1/fix", "caution"), ("/v1/score", "passes"), ("/v1/score", "seed")):
        r = client.post(path, content=f'{{"input": "the", "{name}": {number}}}')
        assert r.status_code in (400, 422), (name, r.text)


def test_all_bits_of_a_seed_count():
    client = client_of()
    seeds = [5, 5 + (1 << 32), 5 + (1 << 40), 5 + (1 << 63), -5, (1 << 64) - 1]
    found = [ask(client, prompt="the ", max_tokens=9, seed=seed) for seed in seeds]
    assert found[0]["seed"] == 5, "that of sample.py"
    assert len({answer["seed"] for answer in found}) == len(seeds)
    again = ask(client, prompt="the ", max_tokens=9, seed=seeds[3])
    assert again["choices"] == found[3]["choices"]
    refused(client, prompt="the", seed=1 << 64, status=422)


@pytest.mark.parametrize("name", ["origin", "authorization"])
def test_a_header_that_says_who_asks_comes_once(name):
    client = client_of()
    headers = [(name, "http://localhost"), (name, "http://localhost")]
    refused(client, headers=headers, prompt="the")
    assert client.post("/v1/completions", json={}, headers=headers[:1]).status_code == 200


# ---- What real clients send
def test_stops_of_real_clients(short_run):
    """Continue sends 14; "" is that of a form left empty."""
    client = client_of()
    whole = ask(client, prompt="the ", max_tokens=20, seed=1)["choices"][0]["text"]
    stops = [f"<|{i}|>" for i in range(20)]
    body = dict(prompt="the ", max_tokens=20, seed=1)
    assert ask(client, **body, stop=["", *stops])["choices"][0]["text"] == whole
    assert ask(client, **body, stop="")["choices"][0]["text"] == whole
    cut = ask(client, **body, stop=[*stops, whole[7:9]])["choices"][0]
    assert cut["text"] == whole[: whole.index(whole[7:9])] and cut["finish_reason"] == "stop"


def test_fields_that_ask_for_nothing_are_accepted():
    nothing = dict(model="", user="me", best_of=1, logit_bias={}, presence_penalty=0, suffix="")
    nothing |= dict(frequency_penalty=0.0, logprobs=None, stream_options=None, top_k=-1, seed=None)
    ask(client_of(), prompt="the", **nothing)
    for name, value in dict(best_of=4, presence_penalty=0.5, logit_bias={"5": 1}).items():
        r = client_of().post("/v1/completions", json={"prompt": "the", name: value})
        assert r.status_code in (400, 422) and r.json()["error"]["param"] == name
    assert refused(client_of(), max_token=4)["param"] == "max_token"


def test_no_tokens_and_an_echo():
    answer = ask(client_of(), prompt=["the cat ", "a"], max_tokens=0, echo=True)
    assert [choice["text"] for choice in answer["choices"]] == ["the cat ", "a"]
    assert answer["usage"]["completion_tokens"] == 0
    answer = ask(client_of(), prompt="the", suffix=" cat", max_tokens=0, echo=True)
    assert answer["choices"][0]["text"] == "the cat"


def test_messages_need_a_model_that_answers():
    """One of prompts takes one message of the user, another one none."""
    path = "/v1/chat/completions"
    one = dict(role="user", content="cat")
    refused(client_of(), path, messages=[one])
    refused(client_of("answers"), path, messages=[one, one | dict(role="assistant"), one])
    answer = ask(client_of("answers"), path, messages=[one])
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_a_prompt_that_is_too_long_has_the_error_of_openai():
    """Clients shorten a conversation at its code."""
    for body in (
        dict(prompt="the cat " * 2000),
        dict(prompt="the cat " * 20, suffix=" on"),
        dict(infill="the [___] " * 20),
    ):
        error = refused(client_of(), **body)
        assert error["code"] == "context_length_exceeded" and "max_gap" not in error["message"]


@pytest.mark.parametrize("text", ["it’s “late” — no", "the\tcat", "the cat\r\nsat", "the 🐈 sat"])
@pytest.mark.parametrize("tokenizer", ["char", "bpe", "bert"])
def test_proofreading_takes_characters_that_the_model_does_not_know(text, tokenizer):
    client = client_of(tokenizer=tokenizer)
    (found,) = ask(client, "/v1/fix", input=text)["data"]
    assert found["text"] if found["changes"] else found["text"] == text
    r = client.post("/page", json=dict(fix=text))
    assert r.status_code == 200 and '"error"' not in r.text and '"done":true' in r.text


def test_texts_have_the_index_of_their_prompt():
    """Also if a prompt has fewer fills than were asked for."""
    body = dict(prompt=["the ", "a "], choices=["cat", "dog"], n=3)
    found = ask(client_of(), **body)["choices"]
    assert [choice["index"] for choice in found] == [0, 1, 3, 4]


def test_health_is_seen_without_a_key_and_nothing_else():
    client = client_of(api_key="abc")
    assert client.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics"):
        for key in ("", "Bearer abd", "abc"):
            r = client.get(path, headers=dict(authorization=key))
            assert r.status_code == 401 and r.json()["error"]["code"] == "invalid_api_key"
        assert client.get(path, headers=dict(authorization="Bearer abc")).status_code == 200


def test_more_requests_than_may_wait_are_refused():
    client = client_of(max_active=1, max_waiting=1)
    body = dict(prompt="a", max_tokens=90, steps=90)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/completions", json=body), range(8)))
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 429} and codes.count(200) >= 2
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)


def test_other_sites_are_kept_out_and_allowed_ones_let_in():
    client = client_of(origin="https://a.example")
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-stainless-lang",
    }
    r = client.options("/v1/completions", headers=asked | dict(origin="https://a.example"))
    assert r.headers["access-control-allow-origin"] == "https://a.example"
    for headers in (dict(origin="https://evil.example"), dict(host="evil.example")):
        r = client.post("/v1/completions", json={}, headers=headers)
        assert r.status_code == 403 and "access-control-allow-origin" not in r.headers
    # Hosts are the same in any case.
    assert client.get("/health", headers=dict(host="LocalHost:8000")).status_code == 200
    same = dict(origin="https://A.example")
    assert client.post("/v1/completions", json={}, headers=same).status_code != 403
    r = client.post("/v1/completions", json={}, headers=dict(origin="https://a.example"))
    assert r.headers["access-control-allow-origin"] == "https://a.example"
