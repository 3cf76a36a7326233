"""The site of lessons/build.py: its links, its notebooks, and widgets whose numbers are right."""

import functools
import http.server
import importlib.util
import json
import math
import re
import shutil
import threading
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch
from conftest import ROOT

import export
import mdlm
import sample
from nanomdlm.support.cli import entry
from nanomdlm.support.constrain.automaton import automaton_of
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import filling

LESSONS = ROOT / "lessons"
spec = importlib.util.spec_from_file_location("build", LESSONS / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
slow = pytest.mark.slow
# Each widget: its lesson, as a glob.
WIDGETS = {
    "mask-rate": "1_*",
    "you-are-the-model": "2_*",
    "two-orders": "6_*",
    "gpt-race": "7_*",
    "race": "8_*",
    "search-tree": "9_*",
    "who-sees-whom": "11_*",
    "automaton": "13_*",
}
SIZES = [(1280, 800, "light"), (390, 844, "dark"), (1280, 800, "dark"), (390, 844, "light")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site without a model, in a folder "lessons" beside where the live page would be."""
    missing = [name for name in build.PACKAGES if not find_spec(name)]
    if missing or not shutil.which("npm"):
        pytest.skip(f"no {', '.join(missing) or 'npm'}")
    try:
        build.install_katex()
    except UserError as e:
        pytest.skip(str(e))
    folder = tmp_path_factory.mktemp("site") / "lessons"
    folder.mkdir()
    build.write_site(folder, folder.parent)
    return folder


# ---- Without a browser
class Links(HTMLParser):
    """The links and the ids of a page."""

    def __init__(self, path):
        super().__init__()
        self.links = []
        self.ids = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.links += [found[name] for name in ("href", "src", "srcset") if name in found]
        self.ids |= {found["id"]} if "id" in found else set()


def test_every_link_leads_somewhere(site):
    """Each page, picture, script and heading that a page names is in the site."""
    pages = {path: Links(path) for path in site.rglob("*.html")}
    live = site.parent / "index.html"  # which export.py writes
    lost = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            name, _, fragment = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if target == live:
                continue
            if not target.is_file() or (fragment and fragment not in pages[target].ids):
                lost.append((str(path.relative_to(site)), link))
    assert len(pages) > 20 and lost == []


def test_each_lesson_has_a_page_and_a_notebook(site):
    for path in LESSONS.glob("[0-9]*_*.md"):
        assert (site / f"{path.stem}.html").is_file() and (site / f"{path.stem}.ipynb").is_file()
    for name in ("index", *(path.stem for path in LESSONS.glob("*.md") if path.stem != "README")):
        text = (site / f"{name}.html").read_text(encoding="utf-8")
        assert "<!-- widget" not in text and "$$" not in text and "katex-error" not in text


def test_notebooks_are_valid_and_their_python_compiles(site):
    """A cell is what the lesson has, or writes the file that the lesson names."""
    nbformat = pytest.importorskip("nbformat")
    written = set()
    for path in site.glob("*.ipynb"):
        book = nbformat.read(path, as_version=4)
        nbformat.validate(book)
        lesson = (LESSONS / f"{path.stem}.md").read_text(encoding="utf-8")
        first, *cells = [cell for cell in book.cells if cell.cell_type == "code"]
        compile(first.source, path.name, "exec")
        for cell in cells:
            assert cell.metadata.tags == ["runnable"]
            lines = cell.source.splitlines()
            if all(line.startswith(("!", "#", " ")) or not line for line in lines):
                commands = re.sub("^!", "", cell.source, flags=re.M)
                is_told = f"```sh\n{commands}\n```" in lesson or f"`{commands}`" in lesson
                assert is_told or commands.removeprefix("python ") in written
                continue
            if lines[0].startswith("%%writefile"):
                written.add(Path(lines.pop(0).split()[1]).name)
            code = "\n".join(lines)
            compile(code, path.name, "exec")
            assert f"```python\n{code}\n```" in lesson
    asked = {path.name for path in (LESSONS / "solutions").glob("*.py")}
    assert asked <= written  # each exercise is a file that check.py reads


def test_each_widget_has_its_place(site):
    """Each hook of a lesson names a widget that exists, and each widget is in its lesson."""
    script = (site / "widgets.js").read_text(encoding="utf-8")
    assert set(re.findall(r'^define\("([\w-]+)"', script, re.M)) == WIDGETS.keys()
    for name, lesson in WIDGETS.items():
        (page,) = site.glob(f"{lesson}.html")
        assert f'data-widget="{name}"' in page.read_text(encoding="utf-8")
    used = {
        n for p in site.glob("*.html") for n in re.findall(r'data-widget="([\w-]+)"', p.read_text())
    }
    assert used == WIDGETS.keys()


def test_what_is_missing_is_one_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build.environment, "is_installed", lambda name: name != "nbformat")
    assert entry.run(build.main, [f"--out={tmp_path / 'site'}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install nbformat" in error
    assert not (tmp_path / "site").exists()
    with pytest.raises(UserError, match="--objective=ar"):
        build.write_gpt(tmp_path, ROOT / "weights" / "shakespeare")


# ---- In headless Chromium
class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def served(site):
    """The address of the site with its model."""
    for package in ("onnx", "onnxscript"):
        if not find_spec(package):
            pytest.skip(f"no {package}")
    page = site.parent / "model"
    weights = ROOT / "weights" / "shakespeare"
    assert entry.run(export.main, ["--to=page", f"--out_dir={weights}", f"--dest={page}"]) == 0
    for path in page.iterdir():
        path.rename(site.parent / path.name)
    build.write_gpt(site, LESSONS / "gpt")
    handler = functools.partial(Quiet, directory=str(site.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/lessons/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def network():
    """The model as the page has it up to rounding to int8, as a function from a text to log p."""
    model, tokenizer, config = mdlm.load(ROOT / "weights" / "shakespeare")

    def logp(ids):
        x = torch.full((1, config.block_size), model.mask_id)
        x[0, : len(ids)] = torch.tensor(ids)
        with torch.no_grad():
            return model(x)[0].log_softmax(-1)

    return logp, tokenizer, model


def view(name):
    return f"document.querySelector('[data-widget={name}] .view')"


def said(browser, name):
    """What a widget says, once it has said it."""
    return browser.js(f"{view(name)}.parentElement.querySelector('.said').textContent")


def visit(browser, address, name, **settings):
    """Open the link of a widget, and wait until it has drawn."""
    (page,) = LESSONS.glob(f"{WIDGETS[name]}.md")
    browser.call("/url", url="about:blank")
    state = urlencode(dict(widget=name, **settings))
    browser.call("/url", url=f"{address}{page.stem}.html#{state}")
    drawn(browser, name)


def drawn(browser, name):
    browser.wait(f"{view(name)}.dataset.drawn", 120)
    assert not browser.js(f"{view(name)}.parentElement.querySelector('.error')")


def control(browser, name, label, value):
    """Set the control with this label, as a user does, and wait for what it changes."""
    browser.js(
        f"""(() => {{
        const place = document.querySelector('[data-widget={name}]');
        const label = [...place.querySelectorAll('label')]
          .find(one => one.firstChild.textContent === {json.dumps(label)});
        const input = label.querySelector('input, textarea, select');
        input.value = {json.dumps(value)};
        delete place.querySelector('.view').dataset.drawn;
        input.dispatchEvent(new Event(input.tagName === 'SELECT' ? 'change' : 'input'));
        return 1;
      }})()"""
    )
    drawn(browser, name)


@slow
def test_bars_are_the_softmax_of_the_model(browser, served, network):
    """Up to int8; a higher rate adds masks; the link holds the state; a wrong one is a sentence."""
    logp, tokenizer, model = network
    text = "My lord, the king is dead"
    visit(browser, served, "mask-rate", text=text, rate=30, seed=5)
    cells = f"[...{view('mask-rate')}.querySelectorAll('.cells > li')]"
    hidden = f"{cells}.map(li => li.classList.contains('masked'))"
    masks = browser.js(hidden)
    assert sum(masks) == round(0.3 * len(text)) and len(masks) == len(text)
    x0 = tokenizer.encode(text)
    xt = [model.mask_id if is_masked else id for id, is_masked in zip(x0, masks)]
    wanted = logp(xt).exp()
    bars = browser.js(
        f"{cells}.map(li => [...li.querySelectorAll('.bars li')].map(b => "
        "[b.querySelector('code').textContent, Number(b.dataset.p), b.className]))"
    )
    losses = []
    for i, (row, is_masked) in enumerate(zip(bars, masks)):
        assert bool(row) == is_masked
        for token, p, kind in row:
            token = {"␣": " ", "↵": "\n"}.get(token, token)
            assert p == pytest.approx(float(wanted[i, tokenizer.encode(token)[0]]), abs=0.02)
            assert (kind == "is-true") == (token == text[i])
        losses += [-math.log(p) for _, p, kind in row if kind]
    told = said(browser, "mask-rate")
    loss = float(re.search(r"Loss: ([\d.]+) nats", told)[1])
    assert loss == pytest.approx(sum(losses) / len(losses), abs=0.005)
    control(browser, "mask-rate", "mask rate", "60")
    more = browser.js(hidden)
    assert sum(more) == round(0.6 * len(text)) and all(b for a, b in zip(masks, more) if a)
    assert browser.js(f"{view('mask-rate')}.querySelectorAll('.plot circle').length") == 2
    browser.wait("location.hash.includes('rate=60')")
    browser.js("(document.querySelector('[data-widget=mask-rate] input').value = 'a é', 1)")
    browser.js(
        "document.querySelector('[data-widget=mask-rate] input').dispatchEvent(new Event('input'))"
    )
    browser.wait("document.querySelector('[data-widget=mask-rate] .said.error')")
    assert "“é”" in said(browser, "mask-rate")


@slow
def test_a_guess_costs_what_was_not_given_to_it(browser, served, network):
    logp, tokenizer, model = network
    visit(browser, served, "you-are-the-model", text="Good my lord", rate=50, round=3)
    place = "document.querySelector('[data-widget=you-are-the-model]')"
    line = browser.js(f"{place}.querySelector('.masked-line').textContent")
    at = line.index("?")
    ids = [model.mask_id if c in "█?" else tokenizer.encode(c)[0] for c in line]
    browser.js(f"({place}.querySelector('.one').value = 'Z', 1)")
    browser.js(f"{place}.querySelector('button.main').click()")
    told = said(browser, "you-are-the-model")
    you, its = map(float, re.findall(r"([\d.]+) nats", told))
    truth = "Good my lord"[at]
    assert you == pytest.approx(-math.log(0.5 / 64), abs=0.006)
    p = float(logp(ids)[at, tokenizer.encode(truth)[0]].exp())
    assert math.exp(-its) == pytest.approx(p, abs=0.02)
    browser.js(f"[...{place}.querySelectorAll('button')].at(-1).click()")
    browser.wait(f"{place}.querySelector('.said').textContent.startsWith('Round 4')")


@slow
def test_two_orders_are_chain_rules_of_one_text(browser, served, network):
    logp, tokenizer, model = network
    visit(browser, served, "two-orders", text="king", first="left", second="right", seed=1)
    data = browser.js(f"({view('two-orders')}.dataset)")
    found = json.loads(data["totals"])
    x0 = tokenizer.encode("king")
    for total, order in zip(found, (range(4), reversed(range(4)))):
        seen = [model.mask_id] * 4
        wanted = 0
        for at in order:
            wanted -= float(logp(seen)[at, x0[at]])
            seen[at] = x0[at]
        assert total == pytest.approx(wanted, abs=0.1)
    mean = -math.log(sum(math.exp(-t) for t in found) / 2)
    assert float(data["mean"]) == pytest.approx(mean, abs=1e-6)
    assert float(data["mean"]) <= float(data["bound"]) == pytest.approx(sum(found) / 2)


@slow
def test_gpt_writes_likely_text_and_sees_no_ending(browser, served):
    lanes = f"[...{view('gpt-race')}.querySelectorAll('.lanes > li')]"
    begin, end = "ROMEO:\nMy ", " your throne."
    found = []
    for ending in ("", end):
        asked = dict(text=begin, end=ending, length=48, calls=6, seed=3)
        visit(browser, served, "gpt-race", **asked)
        assert browser.js(f"{lanes}.map(l => Number(l.dataset.calls))") == [48, 6]
        found.append(browser.js(f"{lanes}.map(l => l.querySelector('pre').textContent)"))
    (gpt, diffusion), others = found
    assert others[0] == gpt + end and others[1] != diffusion + end and others[1].endswith(end)
    assert all(len(text) == len(begin) + 48 and text.startswith(begin) for text in (gpt, diffusion))
    model, tokenizer, _ = mdlm.load(LESSONS / "gpt")
    ids = torch.tensor(tokenizer.encode(gpt))
    with torch.no_grad():
        logp = model(ids[None])[0].log_softmax(-1)[range(len(ids)), ids]
    assert -logp[len(begin) :].mean() < 2.2  # its NLL is 1.44; knowing nothing costs 4.17


@slow
def test_race_fills_all_masks_in_its_calls(browser, served, network):
    visit(browser, served, "race", text="My ", length=8, calls=4, seed=2)
    lanes = f"[...{view('race')}.querySelectorAll('.lanes > li')]"
    assert browser.js(f"{lanes}.map(l => Number(l.dataset.calls))") == [8, 4, 4, 4]
    texts = browser.js(f"{lanes}.map(l => l.querySelector('pre').textContent)")
    assert all(text.startswith("My ") and len(text) == 11 and "█" not in text for text in texts)
    browser.js(
        "[...document.querySelectorAll('[data-widget=race] button')]"
        ".find(b => b.textContent.startsWith('How')).click()"
    )
    browser.wait(f"{lanes}.every(l => l.dataset.loss)", 120)
    logp, tokenizer, _ = network
    for text, loss in zip(texts, browser.js(f"{lanes}.map(l => Number(l.dataset.loss))")):
        ids = tokenizer.encode(text)
        wanted = -sum(float(logp(ids[:i])[i, ids[i]]) for i in range(3, 11)) / 8
        assert loss == pytest.approx(wanted, abs=0.1)
    control(browser, "race", "calls", "1")
    assert browser.js(f"{lanes}.map(l => Number(l.dataset.calls))") == [8, 1, 1, 1]


@slow
def test_tree_holds_the_fills_that_sample_py_proves(browser, served, network):
    _, tokenizer, model = network
    visit(browser, served, "search-tree", text="The k__g is dead!", top=2)
    data = browser.js(f"({view('search-tree')}.dataset)")
    segments = sample.parse("The k██g is dead!", tokenizer, model.config.block_size)
    wanted = filling.Filling(model, tokenizer, segments, 2).finish()
    assert data["proven"] == "true" and wanted.proven
    assert json.loads(data["fills"])[0] == pytest.approx(wanted[0].logp, abs=0.1)
    found = f"{view('search-tree')}.querySelectorAll('.found').length"
    assert browser.js(found) == 2
    assert browser.js(f"{view('search-tree')}.querySelector('.found code').textContent") == "in"


@slow
def test_table_of_lesson_11_is_what_a_block_sees(browser, served):
    """That of the solution of its exercise, and without blocks."""
    spec = importlib.util.spec_from_file_location("sees", LESSONS / "solutions" / "sees.py")
    solution = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(solution)
    yes = (
        f"[...{view('who-sees-whom')}.querySelectorAll('tr')].slice(1)"
        ".map(r => [...r.querySelectorAll('td')].map(d => d.classList.contains('yes')))"
    )
    for T, S in ((6, 2), (12, 3), (4, 1)):
        visit(browser, served, "who-sees-whom", kind="training", tokens=T, block=S, row=2)
        wanted = solution.sees(T, S)
        assert browser.js(yes) == wanted.tolist()
        seen = json.loads(browser.js(f"{view('who-sees-whom')}.dataset.seen"))
        assert seen == wanted[1].nonzero()[:, 0].tolist()
    control(browser, "who-sees-whom", "model", "gpt")
    assert browser.js(yes) == torch.ones(4, 4).tril().bool().tolist()
    control(browser, "who-sees-whom", "model", "diffusion")
    assert browser.js(yes) == torch.ones(4, 4).bool().tolist()
    control(browser, "who-sees-whom", "row", "4")
    assert "position 4" in said(browser, "who-sees-whom")


@slow
def test_automaton_goes_where_the_lesson_says(browser, served):
    """The states of lesson 13, and matches as in Python."""
    visit(browser, served, "automaton", pattern="so|not|now|sea", text="")
    place = f"{view('automaton')}.dataset"
    ways = {"": [0], "n": [0, 1], "no": [0, 1, 3], "so": [0, 2, 4], "sea": [0, 2, 5, 6]}
    for text, path in ways.items():
        control(browser, "automaton", "text", text)
        assert json.loads(browser.js(f"{place}.path")) == path
    letters = Tokenizer("char", list("abcdno "))
    for pattern in ("(ab|c)*d?", "[a-c]{2}n+", "a.*b"):
        if not find_spec("outlines_core"):
            break
        control(browser, "automaton", "pattern", pattern)
        for text in ("", "ab", "abd", "can", "acb", "bann", "ccc", "d", "a bob"):
            control(browser, "automaton", "text", text)
            wanted = automaton_of(pattern, letters).takes(letters.encode(text))
            assert browser.js(f"{place}.matches") == str(wanted).lower(), (pattern, text)
    browser.js("[...document.querySelectorAll('[data-widget=automaton] input')][0].focus()")


@slow
@pytest.mark.parametrize("width, height, theme", SIZES)
def test_pages_fit_and_speak_in_both_themes(browser, served, width, height, theme):
    """No sideways scroll; each control has a label, and can be reached by the keyboard."""
    browser.size(width, height)
    browser.emulate(prefers_color_scheme=theme)
    for name, lesson in WIDGETS.items():
        (page,) = LESSONS.glob(f"{lesson}.md")
        browser.call("/url", url=f"{served}{page.stem}.html")
        browser.wait(f"{view(name)}")
        assert browser.js("document.documentElement.scrollWidth <= innerWidth"), name
        place = f"document.querySelector('[data-widget={name}]')"
        inputs = f"[...{place}.querySelectorAll('input, select, textarea')]"
        assert browser.js(
            f"{inputs}.length && {inputs}.every(i => i.labels.length && i.tabIndex === 0)"
        )
        assert browser.js(f"document.getElementById({place}.getAttribute('aria-labelledby'))")
        paper = browser.js("getComputedStyle(document.body).backgroundColor")
        lightness = float(re.search(r"[\d.]+", paper)[0])
        assert (lightness > 0.5) == (theme == "light"), paper
    for path in LESSONS.glob("*.md"):
        name = "index" if path.name == "README.md" else path.stem
        browser.call("/url", url=f"{served}{name}.html")
        assert browser.js("document.documentElement.scrollWidth <= innerWidth"), name
    browser.size(1280, 800)


@slow
def test_pages_read_from_files(browser, site):
    """Without a server all works but the model, which says so."""
    (page,) = site.glob("13_*.html")
    browser.call("/url", url=f"{page.as_uri()}#widget=automaton&text=not")
    drawn(browser, "automaton")
    assert browser.js(f"{view('automaton')}.dataset.matches") == "true"
    (page,) = site.glob("1_*.html")
    browser.call("/url", url=f"{page.as_uri()}#widget=mask-rate")
    browser.wait("document.querySelector('[data-widget=mask-rate] .said.error')")
    told = said(browser, "mask-rate")
    assert "http.server" in told
