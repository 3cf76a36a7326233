"""The page of --html replays every step as it happened, and what a model writes stays text."""

import json
import os
import re
import urllib.error
import urllib.request
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT  # noqa: F401 (puts the root on the path)
from webdriver import Browser

from nanomdlm.support import errors
from nanomdlm.support.cli import entry, outputs
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.infill import display
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


def test_unwritable_files_get_one_sentence(tmp_path, capsys):
    os.mkdir(tmp_path / "folder")
    for path in (tmp_path / "missing" / "page.html", tmp_path / "folder"):
        with pytest.raises(errors.UserError, match="--html="):
            outputs.check("html", str(path))
        assert entry.run(lambda argv: viewer.write_page(*argv), [path, SAMPLES, {}]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and str(path) in said


def test_watch_shows_what_changed(capsys, monkeypatch):
    """In another color, and counted; a token that is drawn again and stays is none."""
    monkeypatch.setattr(display, "has_colors", lambda stream: True)
    monkeypatch.setattr(display.time, "sleep", lambda seconds: None)
    mask = 2
    watch = display.TerminalPlayer(
        Tokenizer("char", ["a", "b"]), torch.tensor([0, mask, mask]), mask, 3
    )
    for ids in ([0, 1, mask], [0, 1, 0], [0, 0, 0]):
        capsys.readouterr()
        watch.add(SimpleNamespace(x=torch.tensor([ids])), 0)
        shown = capsys.readouterr().out
        assert (display.CHANGED in shown) == ("change" in shown) == (ids == [0, 0, 0])
    assert f"{display.CHANGED}a" in shown and "step 3 of 3: 3 of 3 tokens, 1 change\x1b" in shown


def test_film_has_a_step_for_each_call():
    mask = 2
    film = viewer.HtmlRecorder(Tokenizer("char", ["a", "b"]), torch.tensor([mask, mask]), mask)
    for ids in ([0, mask], [0, 1], [0, 1], [1, 1]):
        x = torch.tensor([ids])
        drawn = x != mask
        logp = torch.full((int(drawn.sum()), 2), -0.7)
        film.add(SimpleNamespace(x=x, drawn=drawn, logp=logp), 0)
    assert [[change[1] for change in frame] for frame in film.frames] == [
        [0],
        [0, 1],
        [0, 1],
        [1, 1],
    ]


def test_a_page_replaces_the_last_one(tmp_path):
    for title in ("first", "second"):
        viewer.write_page(tmp_path / "page.html", [dict(SAMPLES[0], title=title)], {})
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "second" in text and '"title":"first"' not in text and len(list(tmp_path.iterdir())) == 1


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


def state(page):
    slider = "Number(document.querySelector('#slider').value)"
    return SimpleNamespace(
        **page.js(f"({{step: step, text: text(), playing: timer > 0, slider: {slider}}})")
    )


def wait(page, condition):
    check = f"if ({condition}) {{ clearInterval(poll); done(); }}"
    script = f"const poll = setInterval(() => {{ {check} }}, 10)"
    page.call(
        "/execute/async", script=f"const done = arguments[arguments.length - 1]; {script}", args=[]
    )


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


def test_corrections_flash_and_are_counted(page):
    """Red where a token changed, not where it was drawn again; old and new on hover."""
    n = len(SAMPLES[0]["frames"])
    first = len(SAMPLES[0]["frames"][0])
    shown = "document.querySelector('[data-p=\"20\"]').className.split(/ +/)"
    counted = "document.querySelector('#revealed').textContent"
    for step, classes, words in (
        (1, ["t", "fresh"], f"{first} of"),
        (4, ["t"], "0 changes"),
        (6, ["t"], "0 changes"),
        (n, ["t", "fresh", "changed"], "2 changes"),
    ):
        found = page.js(f"(jump({step}), {shown})")  # at once: the last step settles
        assert [c for c in found if c] == classes and words in page.js(counted)
    page.mouse("[data-p='20']")
    assert f"step {n}, before: ?, confidence" in page.js("document.querySelector('#tip').innerText")
    color = "getComputedStyle(document.querySelector('.changed')).backgroundColor"
    red = page.js(f"(jump({n}), {color})")
    page.js("jump(2)")
    assert red != page.js("getComputedStyle(document.querySelector('.fresh')).backgroundColor")


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


def test_short_texts_are_shown_large(page):
    """Short ones twice as large as long ones, and none wider than the window."""
    size = "parseFloat(getComputedStyle(document.querySelector('#text')).fontSize)"
    found = []
    for i in range(len(SAMPLES)):
        page.js(f"load({i})")
        found.append((len(SAMPLES[i]["text"]), page.js(size)))
    (_, large), *_, (_, small) = sorted(found)
    assert small < large <= 2 * small
    page.js("load(0)")


def test_text_follows_the_slider(page):
    n, want = len(SAMPLES[0]["frames"]), replay(SAMPLES[0])
    assert state(page).__dict__ == dict(step=0, text=want[0], playing=False, slider=0)
    page.mouse("#slider", click=True)
    now = state(page)
    assert abs(now.step - n / 2) <= 1 and now.slider == now.step and now.text == want[now.step]


def test_keyboard_steps_plays_and_changes_the_sample(page):
    want = replay(SAMPLES[0])
    page.press("right", "right", "right")
    assert (state(page).step, state(page).text) == (3, want[3])
    page.press("left")
    assert (state(page).step, state(page).slider, state(page).text) == (2, 2, want[2])
    page.press("end")
    assert state(page).text == want[-1]
    page.press("space")  # at the end: from the beginning
    assert state(page).playing and state(page).step < len(want) - 1
    page.press("space")
    assert not state(page).playing
    page.press("home", "down")
    assert state(page).text == replay(SAMPLES[1])[0]
    page.press("up", "up", "right")
    assert state(page).text == ""  # from the first to the last, which is empty, and nothing breaks
    page.press("right", "space", "space", "tab", "escape")


def test_play_stops_at_the_last_step(page):
    page.js("load(2)")
    page.mouse("#play", click=True)
    assert state(page).playing
    wait(page, "!timer")
    assert state(page).step == len(SAMPLES[2]["frames"])
    page.mouse("nav button", click=True)
    page.press(
        "home", "space"
    )  # the mouse left the keyboard free: space does not press that button again
    assert state(page).playing


def test_last_step_settles(page):
    """Its marks stay for a moment: then no box is left, and no token is red."""
    marks = "document.querySelectorAll('.fresh, .changed, .mask').length"
    for i, sample in enumerate(SAMPLES[:3]):
        n = len(sample["frames"])
        assert page.js(f"(load({i}), jump({n}), {marks})") > 0
        wait(page, "settled")
        assert page.js(marks) == 0 and state(page).text == sample["text"]
        assert page.js(f"(jump({n - 1}), {marks})") > 0, "earlier steps keep theirs"
    page.js("load(0)")
    page.mouse("[data-p='20']")
    page.js("jump(1e6)")
    wait(page, "settled")
    assert page.js("document.querySelectorAll('.cursor').length") == 1, "a tooltip stays open"


def test_opened_page_plays_once_unless_motion_is_reduced(browser):
    browser.emulate(prefers_reduced_motion="no-preference")
    browser.call("/refresh")
    assert state(browser).playing and state(browser).step < len(SAMPLES[0]["frames"])
    wait(browser, "settled")
    assert not state(browser).playing
    assert state(browser).text == SAMPLES[0]["text"]
    browser.emulate(prefers_reduced_motion="reduce")
    browser.call("/refresh")
    now = state(browser)
    assert (now.playing, now.text) == (False, SAMPLES[0]["text"])
    browser.emulate(prefers_reduced_motion="no-preference")


def test_nothing_moves_while_playing(page):
    places = (
        "[...document.querySelectorAll('.t')].map(t => [t.getBoundingClientRect().x, t.offsetTop])"
    )
    for i in (0, 1):
        page.js(f"load({i})")
        page.js("jump(0)")
        first = page.js(places)
        page.js("jump(1e6)")
        last = page.js(places)
        assert first == [[pytest.approx(x, abs=0.1), y] for x, y in last]
    page.js("load(0)")
    lines = len({y for _, y in page.js(places)})
    assert (
        lines == SAMPLES[0]["text"].count("\n") + 1
    )  # each newline breaks the line, an empty line too


def test_tooltip_tells_confidence_and_alternatives(page):
    tip = (
        "(document.querySelector('#tip').hidden ? null : document.querySelector('#tip').innerText)"
    )
    page.js("jump(1)")
    assert page.js(tip) is None
    page.mouse("[data-p='9']")
    assert re.sub(r"\s+", " ", page.js(tip)) == "? step 1, confidence 13 % ? 13 %"
    page.press("right", "right", "right")  # it stays open and follows: drawn again
    assert re.sub(r"\s+", " ", page.js(tip)) == "? step 1, confidence 25 % ? 25 %"
    page.mouse("[data-p='2']")
    assert re.sub(r"\s+", " ", page.js(tip)) == "M given"
    page.press("escape")
    assert page.js(tip) is None
    page.js("jump(1e6)")
    page.mouse("[data-p='10']", click=True)
    assert re.sub(r"\s+", " ", page.js(tip)).endswith("60 % ↵ 30 % ␣ 10 %")
    page.mouse("#where")
    assert page.js(tip) is None


CONTRAST = """(() => {
  load(0); jump(1e6);
  document.querySelectorAll(".t").forEach(t => t.classList.remove("fresh"));
  const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const luminance = color => {
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map(
      v => v / 255 <= .04045 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const paper = luminance(getComputedStyle(document.body).backgroundColor);
  const shown = [...document.querySelectorAll(".t, #about, #facts, #notes")];
  const contrast = y => (Math.max(y, paper) + .05) / (Math.min(y, paper) + .05);
  return shown.map(t => contrast(luminance(getComputedStyle(t).color)));
})()"""


def test_both_themes_are_legible(page):
    page.emulate(
        prefers_reduced_motion="reduce", prefers_color_scheme="light"
    )  # at once the final colors
    light = page.js(CONTRAST)
    page.emulate(prefers_reduced_motion="reduce", prefers_color_scheme="dark")
    dark = page.js(CONTRAST)
    assert min(light) >= 4.5 and min(dark) >= 4.5  # AA of WCAG 2.2
    assert len(set(light)) > 15 and light != dark


def test_phones_and_reduced_motion_are_respected(page):
    moving = "getComputedStyle(document.querySelector('.t')).transitionDuration"
    assert "0.45s" in page.js(moving)
    page.emulate(prefers_reduced_motion="reduce")
    assert "0.45s" not in page.js(moving)
    for width in (320, 390):
        page.size(width, 800)
        for i in range(len(SAMPLES)):
            page.js(f"load({i})")
            assert page.js("document.documentElement.scrollWidth") <= width


NOTICE = """(notice => {
  if (!notice) return null;
  notice.getAnimations().forEach(animation => animation.finish());  // it waits for a slow network
  return getComputedStyle(notice).visibility + ": " + notice.textContent.replace(/\\s+/g, " ");
})(document.getElementById("notice"))"""


def test_cut_or_damaged_page_says_so(browser, tmp_path):
    """In its style, its data, its script: the sentence that is there from the start stays."""
    path = tmp_path / "page.html"
    viewer.write_page(path, SAMPLES, SETTINGS)
    whole = path.read_bytes()
    begin = whole.index(b"{{") if b"{{" in whole else whole.index(b"sample.py --html.")
    shown = browser.js("location.href")
    for share in (0, 0.1, 0.4, 0.7, 0.9, 0.99):
        path.write_bytes(whole[: begin + 30 + int((len(whole) - begin - 70) * share)])
        browser.call("/url", url=path.as_uri())
        assert browser.js(NOTICE).startswith("visible: This page did not start: it is cut off"), (
            share
        )
    for place, sentence in (
        (b'"samples":', "is damaged: its data"),
        (b"const tokenAt", "did not start"),
    ):
        at = whole.index(place) + len(place) + 6
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 2]) + whole[at + 1 :])
        browser.call("/url", url=path.as_uri())
        assert f"visible: This page {sentence}" in browser.js(NOTICE)
    path.write_bytes(whole)
    browser.call("/url", url=path.as_uri())
    assert browser.js(NOTICE) is None
    browser.call("/url", url=shown)
    browser.call("/se/log", type="browser")  # what the damaged ones said there
