"""The page of serve.py: the form and the viewer of test_page.py, and a server that computes."""

import json
import re
import time

import pytest
from conftest import ROOT

import mdlm
import sample
import serve
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import filling
from nanomdlm.support.infill.templates import parse

for package in ("greenlet", "starlette", "uvicorn", "httpx", "pydantic"):
    pytest.importorskip(package)
import httpx
from test_engine import network
from test_serving import get, post, serving, wait_for

from nanomdlm.support.serving import writing
from nanomdlm.support.web import live_page, served_page

SAID = "$('said').textContent"
LOADED = "typeof ready !== 'undefined' && ready"
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def server(short_run):
    with serving(f"--out_dir={short_run}") as found:
        yield found


# ---- Without a browser
def events(server, **body):
    """What the page gets; each event but the last says what is written so far."""
    r = post(f"{server.url}/page", json=body)
    assert r.status_code == 200, r.text
    found = [json.loads(line[6:]) for line in r.text.split("\n\n") if line.startswith("data: ")]
    assert [event for event in found if event.get("done")] == found[-1:]
    return found


@pytest.mark.parametrize("prompt", ["The ", ""])
def test_page_is_sent_each_call(server, short_run, prompt):
    """The text that the frames add up to is that of sample.py."""
    model, tokenizer, _ = mdlm.load(short_run)
    begin, *found, end = events(server, prompt=prompt, max_tokens=12, seed=3)
    frames = [event for event in found if "frame" in event]  # others say that it goes on
    n = len(prompt)
    assert "".join(begin["tokens"]) == prompt and begin["given"] == [True] * n + [False] * 12
    tokens = list(begin["tokens"])
    for event in frames:
        for i, token, p, likeliest in event["frame"]:
            assert not begin["given"][i] and 0 <= p <= 1 and len(likeliest) == 5
            tokens[i] = token
    assert tokens == end["sample"]["tokens"]
    assert 8 < len(frames) <= end["sample"]["calls"]
    assert end["sample"]["frames"] == [event["frame"] for event in frames]
    (wanted,) = sample.write(model, tokenizer, prompt, n=1, length=n + 12, seed=3)
    assert "".join(tokens) == wanted


@pytest.mark.parametrize("template", ["The [___] is", "The ██ is"])
def test_page_gets_the_fills_and_the_proof_of_sample_py(server, short_run, template):
    """And meanwhile how many texts the network has seen."""
    model, tokenizer, config = mdlm.load(short_run)
    *told, end = events(server, infill=template, seed=1, rank=True)
    wanted = filling.Filling(
        model, tokenizer, parse(template, tokenizer, config.block_size), 5
    ).finish()
    assert ["".join(fill["tokens"]) for fill in end["fills"]] == [one.text for one in wanted]
    for fill, one in zip(end["fills"], wanted):
        assert (fill["p"], fill["logp"]) == pytest.approx((one.p, one.logp), rel=1e-4)
        filled = [i for i, is_given in enumerate(fill["given"]) if not is_given]
        assert [i for i, *_ in fill["frames"][0]] == filled
    assert sum(fill["share"] for fill in end["fills"]) == pytest.approx(1)
    assert (end["proven"], end["compares_lengths"]) == (wanted.proven, wanted.compares_lengths)
    assert end["bound"] == pytest.approx(wanted.bound, rel=1e-4)
    seen = [event["tried"] for event in told]
    assert seen and seen == sorted(seen) and seen[-1] <= end["tried"] == wanted.sequences


def test_fixes_and_changes_are_those_of_sample_fix(server, short_run):
    model, tokenizer, _ = mdlm.load(short_run)
    text = "The valeu of the object is is returned"
    wanted = [sample.fix(model, tokenizer, one) for one in (text, "The name")]
    r = post(f"{server.url}/v1/fix", json=dict(input=[text, "The name"], caution=0))
    for found, one in zip(r.json()["data"], wanted, strict=True):
        assert found["text"] == one.text
        assert found["changes"] == [change._asdict() for change in one.changes]
    *_, end = events(server, fix=text)
    assert end["changes"] == [change._asdict() for change in wanted[0].changes]


def test_page_runs_its_own_script_alone(server):
    """And loads nothing from elsewhere."""
    r = get(server.url)
    rules = dict(
        rule.split(" ", 1) for rule in re.split(" ?; ", r.headers["content-security-policy"])
    )
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules["script-src"])
    assert rules["frame-ancestors"] == "'none'"
    loaded = re.sub(r'<a href="https://github.com/[\w./-]+"', "", r.text)  # a link, to the lessons
    assert not re.search(r"""(src|href)=["']|url\(|@import|https?://(?!localhost)""", loaded)


@pytest.mark.parametrize(
    "settings, fills, fixes, steps",
    [
        ({}, True, True, dict(max=128, value=32)),
        (dict(objective="ar"), False, False, None),
        (dict(block_length=4), False, False, dict(min=8, max=128, step=8, value=64)),
    ],
)
def test_page_offers_what_the_model_can(settings, fills, fixes, steps):
    model = network(**settings)
    tokenizer = mdlm.Tokenizer("char", list("abcdefghij"), True)
    writer = writing.Writer(model, model, tokenizer, serve.sampler)
    html = served_page.page(writer, "out", "CPU", serve.Options(api_key="abc"))
    live = json.loads(re.search(r'id="data">(.*?)</script>', html)[1])["live"]
    assert (live["fills"], live["fixes"], live["key"]) == (fills, fixes, True)
    assert live["steps"] == steps and live["blocks"] == (8 if "block_length" in settings else 1)
    own = dict(label="write a text", text="", what="write")
    assert live["examples"] == [own], "the model knows none of the characters of others"


def test_examples_are_texts_that_the_model_knows():
    _, tokenizer, config = mdlm.load(ROOT / "weights" / "shakespeare")
    can = {"fill", "open", "match", "begin", "fix"}
    found = live_page.examples(tokenizer, config, "█", can)
    assert [one["what"] for one in found] == ["write", "rank", "write", "write", "rank", "fix"]
    for one in found:
        try:
            tokenizer.encode_lossless(re.sub(r"█|\[___.*\]", "", one["text"]))
        except UserError as e:
            raise AssertionError(one) from e


# ---- In headless Chromium
@pytest.fixture
def page(browser, server):
    visit(browser, server)
    return browser


def visit(browser, server):
    browser.size(1280, 657)
    browser.call("/url", url=server.url)
    browser.wait(LOADED)


def ask(browser, text, what="write", **fields):
    """Fill in the form, and press a button."""
    for name, value in (dict(typed=text, seed=1, tokens=12) | fields).items():
        browser.js(f"($('{name}').value = {json.dumps(str(value))}, 1)")
    button = dict(write="write", rank="rank", fix="proofread")[what]
    browser.js(f"($('{button}').click(), 1)")


def written(browser):
    browser.wait("writing === null", 120)
    assert browser.js("$('said').className") == "", browser.js(SAID)
    return browser.js("samples.at(-1).tokens.join('')")


@slow
def test_page_writes_at_once(page):
    """The first example; the next text takes its place, and the address is left as it was."""
    page.wait("samples[0].frames.length > 0", 120)
    assert page.js("[location.hash, $('text').checkVisibility()]") == ["", True]
    assert re.fullmatch("To be, or .* to be", written(page), re.S)
    ask(page, "The ")
    assert written(page).startswith("The ") and page.js("samples.length") == 1


@slow
def test_page_writes_what_sample_writes(page, short_run):
    model, tokenizer, _ = mdlm.load(short_run)
    ask(page, "The ")
    (wanted,) = sample.write(model, tokenizer, "The ", n=1, length=16, seed=1)
    assert written(page) == wanted
    page.js("(go(1e6), 1)")
    assert page.js("text()") == wanted and page.js("samples[0].calls") > 8
    for signs in ("██", "█[MASK]"):
        ask(page, f"The {signs} is")
        assert re.fullmatch("The .. is", written(page), re.S)


@slow
def test_page_stops_at_once(page, server):
    """The server stops computing too, and what was written stays."""
    ask(page, "The ", tokens=2000, steps=128)
    page.wait("writing?.frames?.length > 2", 120)
    planned = page.js("writing.planned")
    page.js("($('stop').click(), 1)")
    assert page.js("[writing, $('stop').disabled]") == [None, True]
    assert page.js(SAID) == "stopped" and 2 < page.js("samples.at(-1).frames.length") < planned
    deadline = time.monotonic() + 60
    while "mdlm_active 0" not in get(f"{server.url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@slow
def test_page_asks_for_a_key_and_says_when_the_queue_is_full(browser, short_run):
    flags = ["--api_key=abc", "--max_active=1", "--max_waiting=0"]
    with serving(f"--out_dir={short_run}", *flags) as found:
        found.headers = dict(authorization="Bearer abc")
        visit(browser, found)
        assert browser.js("$('key').checkVisibility()")
        for key, said in (("", "needs a key"), ("abd", "does not take this key")):
            ask(browser, "The ", key=key)
            browser.wait(f"{SAID}.includes('{said}')")
        ask(browser, "The ", key="abc")
        assert len(written(browser)) == 16
        body = dict(prompt="a", max_tokens=2000, steps=4000, stream=True)
        url = f"{found.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=found.headers, timeout=60):
            wait_for(found, "active", 1)
            ask(browser, "The ", seed=9)
            browser.wait(f"{SAID}.includes('too many requests')")
            assert browser.js("writing") is None


@slow
def test_page_needs_no_mouse_and_fits(page):
    """Tab reaches everything in order; on wide screens and phones nothing moves or is cut off."""
    names = []
    for _ in range(20):
        page.press("tab")
        names.append(page.js("document.activeElement.id"))
    wanted = ["typed", "write", "rank", "proofread", "tokens", "steps", "temperature", "seed"]
    assert [name for name in names if name in wanted][: len(wanted)] == wanted
    ask(page, "The ")
    written(page)
    where = page.js("[$('typed'), $('write')].map(e => e.getBoundingClientRect().y)")
    ask(page, "The ", seed=2)
    written(page)
    assert page.js("[$('typed'), $('write')].map(e => e.getBoundingClientRect().y)") == where
    box = page.js("$('text').getBoundingClientRect().toJSON()")
    assert box["top"] < 657 / 2, "the text is above the fold"
    for width in (320, 390, 700, 1280):
        page.size(width, 800)
        assert page.js("document.documentElement.scrollWidth") <= width
