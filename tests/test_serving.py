"""serve.py: many clients get what each would get alone, and none can harm another."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, run_mdlm, tiers

import mdlm
import sample
import serve

for package in ("greenlet", "starlette", "uvicorn", "httpx", "pydantic"):
    pytest.importorskip(package)
import httpx
from test_engine import PATIENCE, network

from nanomdlm.support.serving import writing
from studies import serving as study

UNITS = ("n", "ms", "per_token_ms", "per_second")  # of the timings of llama.cpp
get, post, request = (
    partial(getattr(httpx, name), timeout=PATIENCE) for name in ("get", "post", "request")
)


# ---- A process, and clients
def program_of(*argv):
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [sys.executable, str(ROOT / "serve.py"), "--port=0", "--device=cpu", *map(str, argv)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@contextlib.contextmanager
def serving(*argv):
    """A server, with its `url`; ended if a test does not."""
    process = program_of(*argv)
    try:
        for line in process.stdout:
            if found := re.search(r"http://\S+?(?=;)", line):
                break
        else:
            raise AssertionError(process.stderr.read())
        yield SimpleNamespace(url=found[0], process=process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(short_run):
    with serving(f"--out_dir={short_run}", "--max_body=65536", "--max_active=8") as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def alone(tmp_path):
    """A function of flags: the objects that sample.py writes with them."""

    def objects(run, *argv):
        file = tmp_path / "lines.json"
        assert sample.main([f"--out_dir={run}", "--device=cpu", f"--json={file}", *argv]) == 0
        return [json.loads(line) for line in file.read_text().splitlines()]

    return objects


def test_openai_client_gets_what_sample_writes(client, short_run, alone):
    answer = client.completions.create(
        model="out", prompt="The ", max_tokens=12, n=2, seed=3, temperature=0.8
    )
    flags = ["--prompt=The ", "--length=16", "--num_samples=2", "--seed=3", "--temperature=0.8"]
    wanted = [each["text"] for each in alone(short_run, *flags)]
    assert ["The " + choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24 and answer.usage.prompt_tokens == 4


def test_openai_client_fills_gaps(client, short_run, alone):
    answer = client.completions.create(
        model="out", prompt="The ", suffix=" is", max_tokens=3, n=2, seed=1
    )
    (wanted,) = alone(
        short_run, "--infill=The [___] is", "--max_gap=3", "--candidates=2", "--seed=1"
    )
    wanted = [each["text"] for each in wanted["candidates"]]
    assert [f"The {choice.text} is" for choice in answer.choices] == wanted
    assert answer.choices[0].finish_reason == "stop"


def test_openai_client_streams(client):
    about = dict(model="out", prompt=["The ", "a"], max_tokens=20, seed=4)
    whole = client.completions.create(**about)
    texts = ["", ""]
    usage = None
    for chunk in client.completions.create(
        **about, stream=True, stream_options=dict(include_usage=True)
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert usage.completion_tokens == 40


def test_logprobs_and_scores_are_those_of_python(client, server, short_run):
    about = dict(model="out", prompt="The ", max_tokens=6, seed=4, logprobs=2)
    model, tokenizer, _ = mdlm.load(short_run)
    choice = client.completions.create(**about).choices[0]
    assert choice.logprobs.tokens == list(choice.text)
    assert choice.logprobs.text_offset == list(range(6))
    settings = dict(length=10, seed=4, k=2)
    ((text, tokens),) = sample.write_with_logprobs(model, tokenizer, "The ", **settings)
    assert text == "The " + choice.text
    assert choice.logprobs.token_logprobs == pytest.approx([t.logp for t in tokens[4:]], abs=1e-5)
    assert choice.logprobs.drawn == pytest.approx([t.drawn for t in tokens[4:]], abs=1e-5)
    assert choice.logprobs.top_logprobs[0].keys() == dict(tokens[4].likeliest).keys()
    filled = client.completions.create(**about | dict(suffix=" is", max_tokens=2)).choices[0]
    assert filled.logprobs.tokens == list(filled.text)
    body = dict(input=["The first", ["The ", "rest"]], passes=4)
    r = post(f"{server.url}/v1/score", json=body).json()
    wanted = sample.score(model, tokenizer, ["The first", ("The ", "rest")], passes=4)
    for found, score in zip(r["data"], wanted, strict=True):
        assert found["logp"] == pytest.approx(score.logp, abs=1e-4)
        assert found["nelbo"] == pytest.approx(score.nelbo, abs=1e-4)


def test_fills_match(server, short_run):
    pytest.importorskip("outlines_core")
    url = f"{server.url}/v1/completions"
    body = dict(prompt="The ", suffix=" is", max_tokens=4, seed=1, n=3)
    found = post(url, json=body | dict(regex="[a-c]{2,3}")).json()["choices"]
    assert found and all(re.fullmatch("[a-c]{2,3}", choice["text"]) for choice in found)
    found = post(url, json=body | dict(choices=["one", "two"], logprobs=1)).json()["choices"]
    assert {choice["text"] for choice in found} == {"one", "two"}
    assert all(len(choice["logprobs"]["tokens"]) == 3 for choice in found)
    end = post(url, json=dict(prompt="The ", regex="[0-9]{2}", max_tokens=4)).json()["choices"]
    assert re.fullmatch("[0-9]{2}", end[0]["text"])
    wrong = post(url, json=body | dict(regex="(a"))
    assert wrong.status_code == 400 and wrong.json()["error"]["message"]


def test_errors_are_those_of_openai(client, server):
    openai = pytest.importorskip("openai")
    for kind, param, fields in (
        (openai.BadRequestError, None, dict(prompt="The \u4e00")),  # a character it does not know
        (openai.BadRequestError, "temperature", dict(prompt="a", temperature=-1)),
        (openai.UnprocessableEntityError, "max_tokens", dict(prompt="a", max_tokens=5000)),
        (openai.NotFoundError, "model", dict(prompt="a", model="gpt-9")),
    ):
        with pytest.raises(kind) as e:
            client.completions.create(**dict(model="out") | fields)
        assert "--" not in e.value.body["message"], "a client has no flags"
        assert e.value.body["param"] == param


def test_models_health_and_metrics(client, server):
    assert [model.id for model in client.models.list()] == ["out"]
    assert client.models.retrieve("out").owned_by == "mdlm"
    assert get(f"{server.url}/health").json() == dict(status="ok")
    text = get(f"{server.url}/metrics").text
    for line in text.splitlines():
        assert line.startswith("# ") or re.fullmatch(r"mdlm_\w+(\{[^{}]*\})? [-+.\de]+", line), line
    assert re.search(r"^mdlm_calls_total [1-9]", text, re.M)


def test_infill_of_llama_cpp(server, short_run, alone):
    body = dict(input_prefix="The ", input_suffix=" is", n_predict=3, seed=1, stream=False)
    body |= dict(cache_prompt=True, samplers=["top_k"], input_extra=[], prompt="")
    answer = post(f"{server.url}/infill", json=body).json()
    (wanted,) = alone(short_run, "--infill=The [___] is", "--max_gap=3")
    assert f"The {answer['content']} is" == wanted["text"]
    assert answer["stop"] is True and answer["stop_type"] == "eos"
    fields = ["content", "timings/predicted_n", "generation_settings/n_predict", "nothing"]
    picks = body | dict(response_fields=fields)
    found = post(f"{server.url}/infill", json=picks).json()
    assert found == {
        "content": answer["content"],
        "timings/predicted_n": answer["tokens_predicted"],
        "generation_settings/n_predict": 3,
    }
    everything = post(f"{server.url}/infill", json=body | dict(response_fields=[])).json()
    assert everything.keys() == answer.keys()
    ignored = dict(temperature=-1, top_k=-5, top_p="x", order="sideways", n_probs=5)
    assert post(f"{server.url}/infill", json=body | ignored).json()["content"] == answer["content"]
    raw = post(f"{server.url}/infill", json=picks).text
    assert re.search(r'^\s*{.*"content"\s*:"', raw), "llama.vim ignores what does not match this"
    names = {f"timings/{what}_{unit}" for what in ("prompt", "predicted") for unit in UNITS}
    plugin = body | dict(response_fields=[*names])  # it shows no numbers if one is missing
    assert post(f"{server.url}/infill", json=plugin).json().keys() == names
    for ms in (1, 0, -1):  # how long an editor waits; 0, -1: no limit
        r = post(f"{server.url}/infill", json=body | dict(t_max_predict_ms=ms))
        assert r.json()["stop"] is True
    none = body | dict(n_predict=0, input_prefix="", input_suffix="", temperature=0.0)
    assert post(f"{server.url}/infill", json=none).json()["content"] == ""
    long = body | dict(input_prefix="x = 1\n" * 40, input_suffix="\ny = 2" * 40, stream=True)
    events = [
        json.loads(line[6:])
        for line in post(f"{server.url}/infill", json=long).text.split("\n\n")
        if line.startswith("data: ")
    ]
    assert events[-1]["stop"] is True and events[-1]["tokens_evaluated"] <= 32


def test_infill_takes_what_the_tokenizer_knows_around_the_cursor(server):
    """An editor's file may have characters that the model never saw; completions are strict."""

    def content(before, after, **more):
        body = dict(input_prefix=before, input_suffix=after, n_predict=3, seed=1) | more
        return post(f"{server.url}/infill", json=body).json()["content"]

    known = content("The ", " is")
    assert content("caf\u2603 \u2603The ", " is\u2603 The\u2603") == known
    assert content("\u2603", "", prompt="The ") == content("The ", "")
    assert content("The \u2603", "\u2603") == content("", "")
    r = post(f"{server.url}/v1/completions", json=dict(prompt="\u2603The ", suffix=" is"))
    assert r.status_code == 400 and "\u2603" in r.json()["error"]["message"]


def test_of_a_long_file_no_more_is_encoded_than_may_fit(monkeypatch):
    """It would take the time of all clients."""
    model = network(block_size=32)
    tokenizer = mdlm.Tokenizer("char", list("abcdefghij"), True)
    writer = writing.Writer(model, model, tokenizer, serve.sampler)
    sizes = []
    encode = tokenizer.encode_lossless

    def watched(text, *args, **more):
        sizes.append(len(text))
        return encode(text, *args, **more)

    monkeypatch.setattr(tokenizer, "encode_lossless", watched)
    before = "abcde" * 10**5
    after = "fghij" * 10**5
    for texts, wanted in (
        ((before, after), (before[-24:], after[:8])),
        ((before, "fgh"), (before[-29:], "fgh")),
        (("abX" + "c" * 99, "gX" + after), ("c" * 31, "g")),
    ):
        assert writer.cut(*texts, 32) == wanted
    assert max(sizes) <= 64 and sum(sizes) < 10**4


@pytest.mark.parametrize(
    "method, path, body, status",
    [
        ("GET", "/v1/nothing", None, 404),
        ("POST", "/v1/fix", b"{}", 400),
        ("GET", "/v1/completions", None, 405),
        ("FOO", "/v1/completions", None, 405),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[" * 60000, 400),
        ("POST", "/v1/completions", b"\xff", 400),
        ("POST", "/v1/completions", b'{"temperature": NaN}', 400),
        ("POST", "/v1/completions", b'{"n": ' + b"9" * 9999 + b"}", 400),
        ("POST", "/v1/completions", b" " * 70000, 413),
    ],
)
def test_every_refusal_is_one_json_sentence(server, method, path, body, status):
    r = request(method, server.url + path, content=body)
    assert r.status_code == status
    error = r.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"] and len(error["message"]) < 300


def talk(server, content, seconds=PATIENCE):
    """What the server answers to bytes."""
    host, port = server.url[7:].split(":")
    with socket.create_connection((host, int(port)), seconds) as s:
        s.sendall(content)
        answer = b""
        while part := s.recv(1 << 16):
            answer += part
            if b"}" in answer:
                break
    return answer


def test_body_of_100_mb_is_not_read_into_memory(server):
    size = 100 << 20
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
    assert talk(server, head.encode() + b" " * 1000).startswith(b"HTTP/1.1 413")

    def parts():
        for _ in range(100):
            yield b" " * (1 << 20)

    with contextlib.suppress(httpx.HTTPError):  # it may be cut off while it sends
        assert post(f"{server.url}/v1/completions", content=parts()).status_code == 413
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    assert int(re.search(r"VmHWM:\s+(\d+)", status)[1]) < 1 << 20, "less than 1 GiB in all"


def metric(server, name):
    text = get(f"{server.url}/metrics", headers=getattr(server, "headers", {})).text
    return float(re.search(rf"^mdlm_{name} (\S+)", text, re.M)[1])


def wait_for(server, name, value):
    """Until a metric has this value, or more."""
    deadline = time.monotonic() + PATIENCE
    while metric(server, name) < value:
        assert time.monotonic() < deadline, f"{name} stays below {value}"
        time.sleep(0.02)


def test_client_that_leaves_in_mid_stream_stops_costing(server):
    """And one that leaves before anything was sent."""
    before = metric(server, "given_up_total")
    for stream in (True, False):
        body = dict(prompt="a", max_tokens=2000, n=16, seed=1, stream=stream, steps=4000)
        url = f"{server.url}/v1/completions"
        with (
            contextlib.suppress(httpx.ReadTimeout),
            httpx.stream("POST", url, json=body, timeout=1.0) as r,
        ):
            next(r.iter_bytes())
    deadline = time.monotonic() + PATIENCE
    while metric(server, "active") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert metric(server, "active") == 0
    assert metric(server, "given_up_total") == before + 2


def test_sigterm_finishes_what_has_begun(short_run):
    """New requests get 503 meanwhile; and no text of a client is in the log."""
    with serving(f"--out_dir={short_run}", "--drain=60") as found:
        for prompt in ("secretword ", "secret\u4e00word"):
            post(f"{found.url}/v1/completions", json=dict(prompt=prompt, max_tokens=1))
        get(f"{found.url}/secretword")
        body = dict(prompt="a", max_tokens=100, steps=64, seed=1)
        with ThreadPoolExecutor(8) as pool:
            answers = [
                pool.submit(post, f"{found.url}/v1/completions", json=body) for _ in range(4)
            ]
            wait_for(found, "active", 4)
            found.process.send_signal(signal.SIGTERM)
            while get(f"{found.url}/health").status_code == 200:
                time.sleep(0.02)
            refused = post(f"{found.url}/v1/completions", json=body)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "stopping"
            texts = {a.result().json()["choices"][0]["text"] for a in answers}
        assert len(texts) == 1
        out, err = found.process.communicate(timeout=PATIENCE)
    assert found.process.returncode == 0
    assert "secret" not in out + err


def test_drain_ends(short_run):
    """What is not finished by then is told so."""
    with serving(f"--out_dir={short_run}", "--drain=0.2") as found:
        body = dict(prompt="a", max_tokens=2000, steps=8000, n=16)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, f"{found.url}/v1/completions", json=body)
            wait_for(found, "active", 1)
            found.process.send_signal(signal.SIGTERM)
            assert answer.result().status_code == 503
        assert found.process.wait(PATIENCE) == 0


# ---- Models of blocks
@pytest.fixture(scope="module")
def blocks_run(text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("blocks") / "out"
    flags = ["--max_steps=3", "--block_length=4", "--infill_share=0.5", "--eval_windows=2"]
    assert run_mdlm(f"--data={text_file}", *TINY, *flags, f"--out_dir={out}") == 0
    return out


def parts_of(url, body):
    """The texts of a stream that are not empty."""
    lines = post(url, json=body | dict(stream=True)).text.split("\n\n")
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [text for part in parts if (text := part["choices"][0]["text"])]


def test_blocks_stream_as_they_are_written(blocks_run, alone):
    """And fill gaps, if they learned to."""
    with serving(f"--out_dir={blocks_run}") as found:
        url = f"{found.url}/v1/completions"
        body = dict(prompt="The ", max_tokens=24, seed=2)
        whole = post(url, json=body).json()["choices"][0]["text"]
        texts = parts_of(url, body)
        assert "".join(texts) == whole and len(texts) >= 5, "block by block"
        filled = post(url, json=body | dict(suffix=" is", max_tokens=2)).json()
        assert filled["choices"][0]["finish_reason"] == "stop"
    (wanted,) = alone(blocks_run, "--prompt=The ", "--length=28", "--seed=2")
    assert "The " + whole == wanted["text"]


def test_a_text_in_one_piece_streams_what_can_no_longer_change(server):
    """Without corrections, all before the first mask; with them, all of it at the end."""
    url = f"{server.url}/v1/completions"
    for correct, least in ((0, 12), (4, 1)):
        body = dict(prompt="The ", max_tokens=24, seed=2, order="left_to_right", correct=correct)
        whole = post(url, json=body).json()["choices"][0]["text"]
        texts = parts_of(url, body)
        assert "".join(texts) == whole and len(texts) >= least


def test_a_client_that_leaves_in_its_body_is_no_failure(server):
    host, port = server.url[7:].split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    with socket.create_connection((host, int(port)), PATIENCE) as left:
        left.sendall(head)
        time.sleep(0.2)
    while 'path="/v1/completions",status="499"' not in (said := get(f"{server.url}/metrics").text):
        time.sleep(0.05)
    assert 'status="500"' not in said


def test_as_many_connections_as_allowed_are_served(short_run):
    with serving(f"--out_dir={short_run}", "--max_connections=2") as found:
        host, port = found.url[7:].split(":")
        with socket.create_connection((host, int(port)), PATIENCE):
            time.sleep(0.3)
            assert get(f"{found.url}/health").status_code == 200, "the second"
            with socket.create_connection((host, int(port)), PATIENCE):
                time.sleep(0.3)
                assert get(f"{found.url}/health").status_code == 503, "the third"


# ---- Long ones
@pytest.mark.long
def test_a_slow_body_ends_and_connections_are_bounded(short_run):
    with serving(f"--out_dir={short_run}", "--max_connections=100") as found:
        host, port = found.url[7:].split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
        with socket.create_connection((host, int(port)), PATIENCE) as slow:
            slow.sendall(head)
            for _ in range(45):
                with contextlib.suppress(OSError):
                    slow.sendall(b" ")
                time.sleep(1)
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408")
        idle = [socket.create_connection((host, int(port)), 5) for _ in range(120)]
        assert get(f"{found.url}/health").status_code == 503
        for each in idle:
            each.close()
        time.sleep(1)
        assert get(f"{found.url}/health").status_code == 200


@pytest.mark.parametrize("kind", tiers(["whole", "blocks"], slow=["blocks"]))
def test_load_gives_each_client_its_own_text(kind, short_run, blocks_run, capsys):
    run = dict(whole=short_run, blocks=blocks_run)[kind]
    flags = ["--mode=load", "--clients=16", "--seconds=10", f"--out_dir={run}"]
    assert study.main(flags) == 0, capsys.readouterr().out
