"""The page of --html replays every step as it happened, and what a model writes stays text."""

import json
import re
import urllib.error
import urllib.request
from html.parser import HTMLParser

import pytest
from conftest import ROOT  # noqa: F401 (puts the root on the path)
from webdriver import Browser

from nanomdlm.support.web import viewer

ATTACK = (
    "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> &lt; __DATA__ \u2028'\""
)
SETTINGS = {"model": "1.8 M parameters", "temperature": 1.0, "<b>order</b>": ATTACK}


def make_sample(title, text, given=(), wrong=()):
    """Positions appear in a scattered order, two a step; those in `wrong` first as "?", twice."""
    n = len(text)
    order = sorted((i for i in range(n) if i not in given), key=lambda i: (i * 7919) % 101)
    frames = [
        [
            [i, text[i], 0.5 + i / (3 * n), [[text[i], 0.6], ["\n", 0.3], [" ", 0.1]]]
            for i in order[k : k + 2]
        ]
        for k in range(0, len(order), 2)
    ]
    frames.insert(0, [[i, "?", 0.125, [["?", 0.125]]] for i in wrong])
    frames.insert(3, [[i, "?", 0.25, [["?", 0.25]]] for i in wrong])
    frames.insert(5, [])  # a step that drew nothing
    for i in wrong:  # corrected last of all
        frames = [[change for change in f if change[:2] != [i, text[i]]] for f in frames]
        frames.append([[i, text[i], 1.0, [[text[i], 1.0]]]])
    made = dict(given=[i in given for i in range(n)], tokens=list(text), frames=frames)
    return dict(text=text, title=title, calls=len(frames), seconds=0.25) | made


PIECES = [
    [[2, "", 0.9, [["", 0.9]]], [3, ",\n", 0.8, []]],
    [[0, "To", 0.7, []], [1, " was\n", 0.2, []]],
    [[1, " is\n", 0.1, []], [4, "or", 0.6, []]],
    [[5, "\n\n", 0.9, []], [1, " be", 1.0, []]],
]
SAMPLES = [
    make_sample(
        "ROMEO:", "ROMEO:\nBut, soft! what light\n\nthrough  yonder ", range(7), wrong=(9, 20)
    ),
    make_sample("hostile " + ATTACK, ATTACK + "\t<b>é, 語, 🙂</b>&amp;"),
    dict(
        make_sample("pieces", "abcdef"),
        tokens=["To", " be", "", ",\n", "or", "\n\n"],
        text="To be,\nor\n\n",
        frames=PIECES,
    ),
    dict(make_sample("nothing to fill", "given" * 20, range(100)), frames=[]),
    dict(make_sample("empty", ""), frames=[]),
]


def replay(sample):
    """What is visible before the first step and after each one."""
    shown = [t if g else "█" for t, g in zip(sample["tokens"], sample["given"], strict=True)]
    texts = ["".join(shown)]
    for frame in sample["frames"]:
        for position, token, *_ in frame:
            shown[position] = token
        texts.append("".join(shown))
    return texts


# --------------------------------------------------------------------------------------------------
# The file


class Scripts(HTMLParser):
    """The scripts of a page, and its policy, as an HTML parser sees them."""

    def __init__(self, page):
        super().__init__()
        self.found, self.tags, self.policy = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "script":
            self.found.append("")
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"]

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script":
            self.found[-1] += data


def test_page_holds_exactly_the_samples(tmp_path):
    hostile = [*SAMPLES, dict(SAMPLES[3], text="\udc80\x00\ud83d", title="half a character")]
    viewer.write_page(tmp_path / "page.html", hostile, SETTINGS)
    page = Scripts((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len(page.found) == page.tags.count("script") == 2 and "img" not in page.tags
    data = json.loads(page.found[0])
    assert data["samples"] == hostile
    assert data["settings"] == {**SETTINGS, "temperature": "1.0"}


def test_page_loads_nothing(tmp_path):
    viewer.write_page(str(tmp_path / "page.html"), SAMPLES[:1], {})
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(
        r"\w+://|@import|url\((?!#)|<link|\bsrc=|\bfetch\(|innerHTML|XMLHttpRequest", text
    )
    policy = Scripts(text).policy
    assert "default-src 'none'" in policy and "http" not in policy
    assert len(text) < 40_000  # the page itself is small; the rest is the samples


# --------------------------------------------------------------------------------------------------
# The page in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """The page of SAMPLES, opened once; at the end: no error, no dialog, no request."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    viewer.write_page(path, SAMPLES, SETTINGS)
    b = Browser()
    b.call("/url", url=path.as_uri())
    yield b
    with pytest.raises(urllib.error.HTTPError, match="404"):  # "no such alert"
        b.call("/alert/text", method="GET")
    assert b.call("/se/log", type="browser") == []
    assert b.js("performance.getEntriesByType('resource').length") == 0
    b.close()


@pytest.fixture
def page(browser):
    """The page at step 0 of its first sample."""
    browser.size(1200, 750)
    browser.emulate(prefers_color_scheme="light", prefers_reduced_motion="no-preference")
    browser.js("load(0)")
    browser.js("jump(0)")
    browser.js("document.activeElement.blur()")
    return browser


def texts(page, order):
    return page.js(f"{json.dumps(order)}.map(s => {{ jump(s); return text(); }})")


def test_frames_are_the_replay_in_any_order(page):
    for i, sample in enumerate(SAMPLES):
        want = replay(sample)
        assert want[-1] == sample["text"]
        page.js(f"load({i})")
        assert page.js("steps") == len(sample["frames"])
        steps = list(range(len(want)))
        assert texts(page, steps) == want
        assert texts(page, steps[::-1]) == want[::-1]
        scattered = sorted(steps, key=lambda s: (s * 7919) % 31)
        assert texts(page, scattered) == [want[s] for s in scattered]
        assert texts(page, [-1, 10**6]) == [want[0], want[-1]]


def test_corrections_are_counted(page):
    """Where a token changed, not where it was drawn again; old and new on hover."""
    n = len(SAMPLES[0]["frames"])
    counted = "document.querySelector('#revealed').textContent"
    for step, words in ((4, "0 changes"), (6, "0 changes"), (n, "2 changes")):
        assert words in page.js(f"(jump({step}), {counted})")
    page.mouse("[data-p='20']")
    assert f"step {n}, before: ?, confidence" in page.js("document.querySelector('#tip').innerText")


def test_attacks_stay_text(page):
    page.js("load(1)")
    page.js("jump(1e6)")
    assert page.js("document.querySelector('#text').textContent") == SAMPLES[1]["text"]
    assert page.js("document.scripts.length") == 2
    assert page.js("document.querySelectorAll('img, #text b, #facts b, nav b').length") == 0
    said = page.js("document.querySelector('#facts').textContent")
    assert said == f"model 1.8 M parameters, temperature 1.0, <b>order</b> {ATTACK}"
    page.js("load(0)")
    page.js("jump(0)")
    assert page.js("document.querySelectorAll('.mask').length") == replay(SAMPLES[0])[0].count("█")
    assert (
        page.js("document.querySelector('#text').textContent") == "ROMEO:\n"
    )  # a mask hides no text
