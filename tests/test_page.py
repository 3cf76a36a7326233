"""The page of export.py --to=page: the same model, the same sampler, in a browser of its own."""

import functools
import http.server
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import zlib
from importlib.util import find_spec
from statistics import median

import numpy as np
import pytest
import test_proofreading
import torch
from conftest import ROOT, Toy
from test_export import save
from webdriver import Browser

import export
import mdlm
import sample
from nanomdlm.kernels.reference import philox_words
from nanomdlm.support.cli import entry
from nanomdlm.support.constrain.automaton import automaton_of
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.infill import filling, search, templates
from nanomdlm.support.proofread import mistakes
from nanomdlm.support.run import checkpoint
from nanomdlm.support.web import live_page, viewer

WEIGHTS = ROOT / "weights" / "shakespeare"
LETTERS = Tokenizer("char", list("ab <&>\"'/\n"))
slow = pytest.mark.slow


def export_page(dest, *flags):
    return entry.run(export.main, ["--to=page", f"--dest={dest}", *map(str, flags)])


# --------------------------------------------------------------------------------------------------
# Without a browser: the sampler in Node.js, the weights, mistakes

NETWORK = """
const network = (T, V, table) => async seen => seen.map(ids => {  // as `toy` below
  const xt = [...ids, ...Array(T).fill(V)].slice(0, T);
  const total = xt.reduce((sum, id) => sum + id + 1, 0);
  const at = i => (31 * total + 7 * (xt[i - 1] ?? V) + 3 * (xt[i + 1] ?? V) + i) % table.length;
  return Float32Array.from(xt.flatMap((_, i) => table[at(i)]));
});
"""


def toy(T, temperature=1.0, V=5):
    """A cheap function of the whole text as a model, and its table; the same as in JavaScript."""
    table = torch.randn(97, V, generator=torch.Generator().manual_seed(3)) * 2

    def logits(xt):
        total = (xt + 1).sum(1, keepdim=True)
        before = torch.nn.functional.pad(xt[:, :-1], (1, 0), value=V)
        after = torch.nn.functional.pad(xt[:, 1:], (0, 1), value=V)
        at = (31 * total + 7 * before + 3 * after + torch.arange(T)) % len(table)
        return table[at]

    model = Toy(logits, V, T)
    model.calibrated = lambda: Toy(lambda xt: logits(xt) / temperature, V, T)
    return model, table


@pytest.fixture(scope="module")
def network():
    return toy(24)


def in_node(code, given, *modules):
    """What a script prints in Node.js, from JSON. modules: of the page, whose paths it imports."""
    if not shutil.which("node"):
        pytest.skip("no Node.js")
    paths = tuple(json.dumps((live_page.PAGE / name).as_uri()) for name in modules)
    command = ["node", "--input-type=module", "-e", NETWORK + code % paths, json.dumps(given)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


SAMPLER = """
import {plan, unmask, words} from %s;
const {rows, T, V, table, asked} = JSON.parse(process.argv[1]);
const predict = network(T, V, table);
const found = [];
for (const settings of asked) {
  const plans = rows.map((ids, sample) => plan(ids, sample, V, settings)), steps = [];
  for await (const frames of unmask(predict, plans, V, settings)) steps.push(frames);
  found.push({texts: plans.map(row => row.ids), steps});
}
console.log(JSON.stringify({found, words: words(2 ** 32 - 1, 17, 123456789, 11)}));
"""


def test_sampler_draws_what_sample_py_draws(network):
    """Tokens, orders, corrections and probabilities; the random words."""
    model, table = network
    V, T = model.vocab_size, model.config.block_size
    x = torch.full((3, 20), V)
    x[:, :4] = torch.tensor([0, 1, 2, 3])
    x[:, 9] = 2
    asked = [dict(seed=s, steps=k, temperature=t) for s, k, t in
             ((0, 16, 1), (5, 7, 0.7), (2**32 - 1, 40, 1.3), (9, 1, 1), (8, 32, 0))]  # fmt: skip
    given = dict(rows=x.tolist(), T=T, V=V, table=table.tolist(), asked=asked)
    answer = in_node(SAMPLER, given, "sampler.js")
    words = philox_words(2**32 - 1, 17, torch.tensor([123456789]), 11)
    assert answer["words"] == words[0].tolist()
    for settings, found in zip(asked, answer["found"], strict=True):
        steps = list(sample.unmask(model, x, **settings))
        assert found["texts"] == steps[-1].x.tolist()
        assert len(found["steps"]) == len(steps)
        for step, frames in zip(steps, found["steps"]):
            drawn = [[r, i] for r, frame in enumerate(frames) for i, *_ in frame]
            assert drawn == step.drawn.nonzero().tolist()
            p = [q for frame in frames for _, _, q, _ in frame]
            token = step.x[step.drawn]
            assert np.allclose(p, step.logp.exp().gather(1, token[:, None])[:, 0], atol=1e-6)
            best = [q for frame in frames for *_, likeliest in frame for _, q in likeliest]
            assert np.allclose(best, step.logp.exp().topk(5)[0].flatten(), atol=1e-6)


MATCHES = """
import {toAutomaton, toPattern} from %s;
import {plan, unmask} from %s;
const {rows, T, V, table, asked, vocab, texts, wrong} = JSON.parse(process.argv[1]);
const predict = network(T, V, table);
const takes = ({next, accepts}, text) =>
  !!accepts[[...text].reduce((q, c) => q < 0 ? q : next[q * V + vocab.indexOf(c)], 0)];
const found = [], language = {}, said = {};
for (const {gaps, ...settings} of asked) {
  const matches = gaps.map(([start, length, pattern]) =>
    ({start, length, ...toAutomaton(pattern, vocab)}));
  const plans = rows.map((ids, sample) => plan(ids, sample, V, {...settings, matches})), p = [];
  for await (const frames of unmask(predict, plans, V, settings))
    p.push(...frames.flat().map(([, , q]) => q));
  found.push({texts: plans.map(row => row.ids), p});
}
for (const [pattern, some] of Object.entries(texts)) {
  const automaton = toAutomaton(pattern, vocab);
  language[pattern] = some.filter(text => takes(automaton, text));
}
for (const pattern of wrong) {
  try { toAutomaton(pattern, vocab); } catch (error) { said[pattern] = String(error); }
}
const automaton = toAutomaton(toPattern("a|b\\\\]c|[d|"), [...vocab, "[", "]"]);
const list = ["a", "b]c", "[d", "", "b", "a|", "bc"].map(text => [...text].reduce((q, c) =>
  q < 0 ? q : automaton.next[q * (V + 2) + [...vocab, "[", "]"].indexOf(c)], 0));
const accepted = list.map(q => automaton.accepts[q] ?? 0);
console.log(JSON.stringify({found, language, said, list: accepted}));
"""
PATTERNS = [
    "[a-c]{2}d?",
    "(ab|c)*",
    "a?b+[^a]*",
    "(?i:B|cd?)+",
    "a|ab|b{3,}?",
    ".*\\x61",
    "\\w\\D?[e\\]-]*",
]
WRONG = [
    "(a",
    "a)",
    "^a",
    "a$",
    "a{2,1}",
    "[a&&b]",
    "(a)\\1",
    "(?=a)a",
    "a*+",
    "[b-a]",
    "a\\b",
    "*",
    "a{x}",
]


def test_page_draws_the_constrained_fills_of_sample_py(network):
    """Equal seeds, several gaps; patterns match as in Python; a wrong one is a sentence."""
    pytest.importorskip("outlines_core")
    model, table = network
    V, T = model.vocab_size, model.config.block_size
    letters = Tokenizer("char", list("abcde"))
    x = torch.full((3, 20), V)
    x[:, :4] = torch.tensor([0, 1, 2, 3])
    x[:, 11] = 2
    gaps = [(5, 4, "[ab]c?(d|ea?)+"), (12, 6, "(ab|c|de){3,4}b?")]
    asked = [dict(seed=s, steps=k, temperature=t, gaps=gaps) for s, k, t in
             ((0, 16, 1), (5, 7, 0.7), (7, 40, 1.3), (9, 1, 1), (8, 32, 0))]  # fmt: skip
    some = ["".join(t) for n in range(5) for t in itertools.product("abcde", repeat=n)]
    given = dict(rows=x.tolist(), T=T, V=V, table=table.tolist(), asked=asked, vocab=letters.vocab)
    given |= dict(texts=dict.fromkeys(PATTERNS, some), wrong=WRONG)
    answer = in_node(MATCHES, given, "pattern.js", "sampler.js")
    for pattern, taken in answer["language"].items():
        assert taken == [text for text in some if re.fullmatch(pattern, text)], pattern
        automaton = automaton_of(pattern, letters)
        assert taken == [text for text in some if automaton.takes(letters.encode(text))], pattern
    assert answer["said"].keys() == set(WRONG)
    assert all("no pattern that this page takes" in said for said in answer["said"].values())
    assert answer["list"] == [1, 1, 1, 1, 0, 0, 0]
    for settings, found in zip(asked, answer["found"], strict=True):
        matches = {at: sample.matching(p, n, letters) for at, n, p in settings.pop("gaps")}
        steps = list(sample.unmask(model, x, matches=matches, **settings))
        assert found["texts"] == steps[-1].x.tolist()
        for at, n, pattern in gaps:
            for ids in found["texts"]:
                assert re.fullmatch(pattern, letters.decode(ids[at : at + n]))
        tokens = [step.x[step.drawn][:, None] for step in steps]
        p = [step.logp.exp().gather(1, token)[:, 0] for step, token in zip(steps, tokens)]
        assert np.allclose(found["p"], torch.cat(p), atol=1e-6)


SEARCH = """
import {plan, unmask} from %s;
import {search} from %s;
const {reading, T, V, table, asked, vocab, temperature, wrong} = JSON.parse(process.argv[1]);
const predict = network(T, V, table);
// The page's own script reads the text.
const source = new Function("live", `${reading} return source;`)({vocab, mask: V, context: T});
const toSegments = text => source.read(text, {rank: true}).segments;
const model = {mask: V, context: T, end: vocab.indexOf("\\n"), temperature}, found = [], said = {};
for (const {template, n, ...how} of asked) {
  const answer = await search(predict, toSegments(template), n, model, how), [best] = answer.fills;
  const row = plan(best.given, 0, V, {...how, matches: best.matches});
  for await (const frames of unmask(predict, [row], V, how));
  found.push({...answer, written: row.ids});
}
for (const template of wrong) {
  try {
    await search(predict, toSegments(template), 1, model);
  } catch (error) {
    said[template] = String(error);
  }
}
console.log(JSON.stringify({found, said}));
"""
TEMPLATES = [
    "a___cb",
    "_b[██|ab|cd]d____",
    "[███:[ab]c?.+]a[██:.*]",
    "a" + "_" * 19 + "b",  # more than can be proven
    "_" * 22 + "c__d_",  # so many that they are drawn
    "a[___:[ab]c?(d|ba?)+]cb",
    "[___|ab|c|dd|dé]b_a[___:(ab|c)*]",
    "_[___:[^a]{2,3}|d+]b[██:ab|cd]",
    "d[___:c*]a[___:a?]b[___:.]",
    "a[___|a|]b",
    "a[___]bcda",
    "[___]b_a[___]d",
    "_ab[___]",
    "d[___:c*]a[___|a|]b[___:.]",
    "abcdabcdabcdabcdab[___]bc[___]cd",
    "_c[___]dcb",
    "ab[___]",
    "a[___:b*]c[___]",
    "[___]",
    "abcdabcdabcdabcdabcdabcdabcda[___]",
]
WRONG_TEXTS = {
    "a[___:b]_": "A gap must not follow one of unknown length",
    "[___:b{17}]": "No text of up to 16 characters of this model matches b{17}; change it.",
    "[___|é|xa]": "The model never saw the characters of é|xa; change them.",
    "a[___:b*]" + "a" * 32: "The text has 33 characters, the model takes 32; shorten it.",
    "[___:aa]" + "a" * 31: "The text has at least 33 characters, the model takes 32; shorten it.",
    "[___]_a": "A gap must not follow one of unknown length",
    "a" * 30 + "[___:ab]": "No fill leaves room for the whole text in 32 characters",
}


def test_page_lists_and_proves_what_sample_py_does(monkeypatch):
    """Equal fills, log p, bounds and proofs for gaps of every kind, by a calibrated network."""
    pytest.importorskip("outlines_core")
    monkeypatch.setattr(search, "ROWS", 1)  # as in a browser
    model, table = toy(32, temperature=1.3)
    letters = Tokenizer("char", list("abcd\n"))
    V, T = model.vocab_size, model.config.block_size
    asked = [
        dict(template=template, n=1 + 4 * (i % 2), seed=i, steps=6 + 3 * i, temperature=1 + i / 8)
        for i, template in enumerate(TEMPLATES)
    ]
    reading = viewer.bundle("pattern.js", "in_browser.js")
    given = dict(reading=reading, T=T, V=V, table=table.tolist(), asked=asked, vocab=letters.vocab)
    given |= dict(temperature=1.3, wrong=list(WRONG_TEXTS))
    answer = in_node(SEARCH, given, "sampler.js", "search.js")
    for template, sentence in WRONG_TEXTS.items():
        assert answer["said"][template].startswith(sentence)
    proven = []
    for settings, found in zip(asked, answer["found"], strict=True):
        template, n = settings.pop("template"), settings.pop("n")
        resolved = sample.resolve(sample.SamplerSettings(**settings), model)
        segments = sample.parse(template, letters, T)
        wanted = sample.Writer(model, letters, resolved).filling(segments, n, 16).finish()
        texts = [letters.decode(fill["ids"]) for fill in found["fills"]]
        assert texts == [one.text for one in wanted], template
        for fill, one in zip(found["fills"], wanted):
            assert (fill["logp"], fill["p"]) == pytest.approx((one.logp, one.p), rel=1e-5)
            drawn = {i: math.exp(v) for i, v in enumerate(one.drawn) if v is not None}
            assert {i: p for i, _, p, _ in fill["frames"][0]} == pytest.approx(drawn, rel=1e-5)
        bound = -math.inf if found["bound"] is None else found["bound"]  # JSON has no infinity
        assert bound == pytest.approx(wanted.bound, abs=1e-5)
        assert found["proven"] == wanted.proven
        assert found["comparesLengths"] == wanted.compares_lengths
        proven.append(wanted.proven)
        # What is written then has the lengths of the likeliest fill.
        starts = [0, *itertools.accumulate(segment.size for segment in wanted[0].segments)]
        pairs = zip(starts, wanted[0].segments)
        matches = {at: each for at, each in pairs if getattr(each, "automaton", 0) and each.length}
        x = torch.tensor([templates.to_ids(wanted[0].segments, letters, V)])
        *_, step = sample.unmask(model, x, matches=matches, **settings)
        assert found["written"] == step.x[0].tolist()
    assert 0 < sum(proven) < len(proven)


PROOFREAD = """
import {proofread} from %s;
const f = Math.fround, found = [];
const alphabet = (T, V) => async seen => seen.map(ids => {  // as in test_proofreading.py
  const votes = new Float32Array(T * V), xt = [...ids, ...Array(T).fill(V)].slice(0, T);
  for (const d of [-4, -3, -2, -1, 1, 2, 3, 4])
    for (let at = Math.max(0, d); at < Math.min(T, T + d); at++)
      if (xt[at - d] !== V)
        votes[at * V + (xt[at - d] + d + V) %% V] += f((d > 0 ? 3 : 1.5) / Math.abs(d) ** .5);
  return votes.map(vote => 3 * vote);
});
const {cases, settings, table} = JSON.parse(process.argv[1]);
for (const {text, T, vocab, depends} of cases) {
  const parts = [], predict = (depends ? network : alphabet)(T, vocab.length, table);
  for await (const window of proofread(predict, text, vocab, T, settings)) parts.push(...window);
  found.push(parts);
}
console.log(JSON.stringify(found));
"""


def test_page_proofreads_as_sample_fix_does(network):
    """Every kind of change, over several windows: where it is, what it gains, and what is kept.

    In a world that repeats the alphabet, and where each token depends on all others.
    """
    line = test_proofreading.LETTERS
    wrong = ["abcdefghizklmnop", "abcdefghiklmnop", "abcdefghijqklmnop", "abcdefghjiklmnop"]
    texts = [line + each + line[16:] + line for each in wrong]
    texts += [
        line * 3,
        "a",
        "bc",
        "\u00e9" + line + "a\U0001f600" + line[2:] * 3 + "zz",
        line[:20] + "ts" + line[22:] + "abcxefg" + line[7:18] + line[19:] + line[:5] + line[6:] * 2,
        "".join(line[(i * i) % 27] if i % 9 == 0 else line[i % 27] for i in range(120)),
    ]
    model, table = network
    g = torch.Generator().manual_seed(0)
    cases = [dict(text=text, T=32, vocab=list(line)) for text in texts]
    worlds = [test_proofreading.alphabet()] * len(texts)
    # Some letters have more others beside them on a keyboard than others have; some have none.
    for vocab in map(list, ("aqsd\n", "qawsz", "aw \ns", "ABa ,")):
        for row in torch.randint(3 * len(vocab) + 1, (15, 60), generator=g):
            text = "".join((vocab * 3 + ["\u00e9"])[i] for i in row)
            cases.append(dict(text=text, T=24, vocab=vocab, depends=True))
            worlds.append((model, Tokenizer("char", vocab)))
    given = dict(cases=cases, settings=live_page.proofreading_settings(), table=table.tolist())
    answer = in_node(PROOFREAD, given, "proofread.js")
    kinds = set()
    for case, world, parts in zip(cases, worlds, answer, strict=True):
        text = case["text"]
        fixed = sample.fix(*world, text)
        assert "".join(part["before"] for part in parts) == text
        assert "".join(part["after"] for part in parts) == fixed.text
        position = 0
        changes = []
        for part in parts:
            if part["change"]:
                changes.append((position, part))
            position += len(part["before"])
        assert len(changes) == len(fixed.changes)
        for (at, part), change in zip(changes, fixed.changes):
            found = (at, part["before"], part["after"], part["change"]["kind"])
            assert found == (change.position, change.before, change.after, change.kind)
            assert part["change"]["gain"] == pytest.approx(change.gain, abs=1e-4)
            for name, p in (("pBefore", change.p_before), ("pAfter", change.p_after)):
                assert part["change"][name] == (p and pytest.approx(p, rel=1e-4))
            kinds.add(change.kind)
    assert kinds == {"substitution", "insertion", "deletion", "swap"}


MISTAKES = """
import {priorOf} from %s;
const {vocab, settings} = JSON.parse(process.argv[1]);
const ids = [...vocab.keys()], prior = priorOf(vocab, settings);
console.log(JSON.stringify({
  one: [prior.cost, prior.cost, prior.deletion(0, []), prior.deletion(0, [vocab.length])],
  substitution: ids.map(a => ids.map(b => prior.substitution(a, b))),
  wrong: ids.map(a => ids.map(b => prior.wrong(a, b))),
  deletion: ids.map(a => ids.map(b => prior.deletion(a, [b, 2]))),
}));
"""


def test_page_has_the_prior_of_mistakes():
    """Costs of all repairs in a vocabulary with letters of both cases and others."""
    vocab = list("asdfqwertzSWA .\n\u00e9")
    given = dict(vocab=vocab, settings=live_page.proofreading_settings())
    found = in_node(MISTAKES, given, "proofread.js")
    V = len(vocab)
    prior = mistakes.Prior(vocab, V)
    one = [prior.insertion(), prior.swap(), prior.deletion(0, []), prior.deletion(0, [V])]
    assert found["one"] == pytest.approx(one)
    assert np.allclose(found["wrong"], prior.wrong.T)
    for a, b in itertools.product(range(V), repeat=2):
        assert found["substitution"][a][b] == pytest.approx(prior.substitution(a, b))
        assert found["deletion"][a][b] == pytest.approx(prior.deletion(a, [b, 2]))


LOADER = """
import {open} from %s;
const {cases, files, runtime} = JSON.parse(process.argv[1]), later = setTimeout, said = {};
console.info = () => {};
// Where a file stalls, a minute is over when it alone is waited for.
const waiting = new Map(), clear = clearTimeout;
let stalls;
globalThis.setTimeout = (f, ms) => {
  if (ms !== 60_000) return later(f, ms);
  waiting.set(f, f);
  return f;
};
globalThis.clearTimeout = timer => waiting.delete(timer) || clear(timer);
setInterval(() => { if (stalls && waiting.size === 1) for (const f of waiting.values()) f(); }, 10);
for (const [name, place] of Object.entries(cases)) {
  stalls = name.startsWith("stalled");
  const about = {files, runtime: {wasm: runtime}, place, tensors: [], bytes: 0};
  await open(about, "wasm").catch(sentence => said[name] = sentence);
}
console.log(JSON.stringify(said));
process.exit();
"""
FAULTS = {
    "missing": "FILE is missing (404): put all files",
    "refused": "The server does not give FILE (403): put all files",
    "another page": "FILE has 11 bytes, 3000 were written: it is cut off, or of another export",
    "cut off": "FILE has 1500 bytes, 3000 were written: it is cut off",
    "longer": "FILE has 4000 bytes, 3000 were written: it is cut off, or of another export",
    "empty": "FILE has 0 bytes, 3000 were written",
    "spoiled": "FILE has the right length, but a wrong checksum: it is damaged",
    "broken off": "FILE broke off after 1500 of 3000 bytes; check the connection",
    "no answer": "FILE cannot be loaded: no answer",
    "stalled": "FILE does not come: the server sent nothing for 60 s",
    "stalled in the middle": "FILE does not come: the server sent nothing for 60 s",
}


class Faulty(http.server.BaseHTTPRequestHandler):
    """Gives /FAULT/FILE/NAME; what is wrong with FILE is FAULT, all other files are right."""

    content = bytes(range(200)) * 15

    def log_message(self, *args):
        pass

    def do_GET(self):
        fault, file, name = urllib.parse.unquote(self.path)[1:].split("/")
        content, status, length, kind = self.content, 200, 0, "text/javascript"
        if file == name:
            status = {"missing": 404, "refused": 403}.get(fault, 200)
            changed = {
                "another page": b"<html>hello",
                "empty": b"",
                "longer": content + content[:1000],
            }
            changed |= {"spoiled": b"\1" + content[1:]}
            if fault in ("cut off", "broken off", "stalled in the middle"):
                content = content[:1500]
            content = changed.get(fault, content)
            length = 3000 * (fault in ("broken off", "stalled in the middle"))
            kind = "text/plain" if fault == "type" else kind
            if fault == "no answer":
                return
            if fault == "stalled":
                self.server.end.wait(30)
            if fault == "stalled":
                return
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length or len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()
        if file == name and fault == "stalled in the middle":
            self.server.end.wait(30)


def test_every_fault_of_every_file_is_one_sentence():
    """Missing, cut off, damaged, of another export, of a wrong type, stalled: and what to do."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    server.end = threading.Event()
    server.handle_error = lambda *args: None  # a client that has gone
    threading.Thread(target=server.serve_forever, daemon=True).start()
    runtime = live_page.RUNTIME_FILES["wasm"]
    files = ["model.onnx", "weights.bin", *runtime]
    sums = dict.fromkeys(files, (3000, zlib.crc32(Faulty.content)))
    wanted = {(fault, file): said for fault, said in FAULTS.items() for file in files}
    served = "FILE comes as text/plain, which no browser runs: let the server send .mjs"
    wanted |= {("type", file): served for file in runtime if file.endswith(".mjs")}
    url = f"http://127.0.0.1:{server.server_port}"
    cases = {
        f"{fault}/{file}": f"{url}/{urllib.parse.quote(fault)}/{file}/" for fault, file in wanted
    }
    given = dict(cases=cases, files=sums, runtime=runtime)
    try:
        said = in_node(LOADER, given, "model.js")
    finally:
        server.end.set()
        server.shutdown()
        server.server_close()
    for (fault, file), sentence in wanted.items():
        found = said[f"{fault}/{file}"]
        assert found.startswith(sentence.replace("FILE", file)), (fault, found)
        assert "reload" in found and "\n" not in found


def test_recorded_text_is_that_of_sample_py(network):
    """A filled template and a text of its own; its steps are the calls; it takes little room."""
    model, _ = network
    letters = Tokenizer("char", list("abcde"))
    for template, n in (("ab██e██a", 8), ("", model.config.block_size)):
        film = live_page.record(model, letters, template, sample.unmask)
        x = torch.full((1, n), model.mask_id)
        for i, c in enumerate(template):
            if c != "█":
                x[0, i] = letters.encode(c)[0]
        *_, last = sample.unmask(model, x, **live_page.RECORDED)
        assert "".join(film["tokens"]) == letters.decode(last.x[0])
        assert film["given"] == (x[0] != model.mask_id).tolist()
        assert film["calls"] == len(film["frames"]) == last.calls.item()
        assert film["title"] == "" and all(len(c) == 3 for frame in film["frames"] for c in frame)


SHAKESPEARE = mdlm.Config(data="shakespeare", block_size=256)
LETTERS_OF_ALL = [chr(c) for c in range(10, 127)]


@pytest.mark.parametrize(
    "tokenizer, config, labels",
    [
        (
            Tokenizer("char", LETTERS_OF_ALL),
            SHAKESPEARE,
            ["fill gaps", "any length", "scene", "ROMEO"],
        ),
        (Tokenizer("char", list("abc")), SHAKESPEARE, ["text"]),
        (Tokenizer("byte"), mdlm.Config(data="my.txt"), ["any length", "text"]),
        (Tokenizer("byte"), SHAKESPEARE, ["fill gaps", "any length", "scene", "ROMEO"]),
        (
            Tokenizer("byte"),
            mdlm.Config(data="shakespeare", block_size=64),  # the passage is longer
            ["any length", "scene", "ROMEO"],
        ),
    ],
)
def test_examples_fit_the_model(tokenizer, config, labels):
    found = live_page.examples(tokenizer, config, "█", patterns=False, open_gaps=True)
    assert [one["label"].split("\u201c")[-1].split(" a ")[-1] for one in found] == [
        {"any length": "gap of any length", "ROMEO": "ROMEO:\u201d"}.get(name, name)
        for name in labels
    ]
    for one in found:
        given = re.sub(r"█|\[___\]", "", one["text"])
        assert tokenizer.decode(tokenizer.encode_lossless(given)) == given


def test_examples_of_another_text_are_made_of_one_that_the_model_wrote():
    letters = Tokenizer("char", list("abcde \n"))
    config = mdlm.Config(data="my.txt")
    first, text, begun = live_page.examples(letters, config, "_", own="abc de ab\ncc dd ee a b")
    assert first == dict(label="fill gaps", text="abc de __\ncc __ ee a", what="write")
    assert text == dict(label="write a text", text="", what="write")
    assert begun == dict(label="go on from \u201cabc de\u201d", text="abc de", what="write")
    for own in ("abcabcabc", "a b c [d e"):  # no words; what may begin a gap
        assert len(live_page.examples(letters, config, "_", own=own)) == 1


@pytest.mark.parametrize(
    "origin, address",
    [
        ("https://github.com/a/b.git", "a/b"),
        ("https://name:key@github.com/a/b", "a/b"),
        ("git@github.com:a/b.git", "a/b"),
        ("ssh://git@github.com/a-c/b.d.git", "a-c/b.d"),
        ("https://example.org/a/b.git", ""),
        ("/home/name/b", ""),
        ("", ""),
    ],
)
def test_lessons_are_linked_where_the_clone_came_from(origin, address):
    """On GitHub alone, and without the names and keys of who cloned it."""
    found = live_page.lessons_at(origin)
    assert found == (address and f"https://github.com/{address}/blob/HEAD/lessons/README.md")


def test_quantized_matrices_are_near():
    array = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)
    array[:, 2] = 0
    values, scale = live_page.quantize(array)
    assert values.dtype == np.int8 and scale.dtype == np.float32 and scale.shape == (7,)
    assert (np.abs(values * scale - array) <= scale / 2 + 1e-7).all() and values.max() == 127


@pytest.mark.parametrize(
    "settings, tokenizer, said",
    [
        (dict(objective="ar"), LETTERS, "--objective=ar"),
        (dict(), Tokenizer("byte"), "--tokenizer=byte"),
        (dict(), Tokenizer("char", ["a", "b"], end=True), "documents"),
    ],
)
def test_models_that_no_page_runs_get_one_sentence(settings, tokenizer, said, tmp_path, capsys):
    save(tmp_path / "out", tokenizer, **settings)
    assert export_page(tmp_path / "page", f"--out_dir={tmp_path / 'out'}") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_page_needs_is_named(tmp_path, monkeypatch, capsys):
    dest = tmp_path / "page"
    installed = {"pip"}
    monkeypatch.setattr(live_page.environment, "is_installed", lambda name: name in installed)
    assert export_page(dest) == 2 and "onnx" in capsys.readouterr().err
    installed |= {"onnx", "onnxscript"}
    monkeypatch.setattr(live_page, "RUNTIME", tmp_path / "none")
    monkeypatch.setenv("PATH", "")
    assert export_page(dest) == 2 and "npm" in capsys.readouterr().err
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert export_page(dest) == 2
    error = capsys.readouterr().err
    assert "npm" in error and "no network" in error and not dest.exists()
    npm.write_text("#!/bin/sh\nsleep 5 &\nsleep 5\n")  # what it started lives on, as under Windows
    monkeypatch.setattr(live_page, "NPM_LIMIT", 0.2)
    began = time.monotonic()
    assert export_page(dest) == 2 and time.monotonic() - began < 20
    error = capsys.readouterr().err
    assert "0.2 s" in error and not dest.exists()


def test_cut_off_installation_is_not_taken(tmp_path, monkeypatch):
    """Nor that of another version than the lock file's."""
    runtime = tmp_path / "onnxruntime-web"
    (runtime / "dist").mkdir(parents=True)
    monkeypatch.setattr(live_page, "RUNTIME", runtime)
    for names in live_page.RUNTIME_FILES.values():
        for name in names:
            (runtime / "dist" / name).write_bytes(b"half")
    lock = json.loads((live_page.PAGE / "package-lock.json").read_text())
    installed = tmp_path / ".package-lock.json"
    assert not live_page.is_installed()
    installed.write_text(json.dumps(lock))
    assert live_page.is_installed()
    lock["packages"]["node_modules/onnxruntime-web"]["version"] = "1.0.0"
    installed.write_text(json.dumps(lock))
    assert not live_page.is_installed()


def test_workflow_builds_the_shipped_page():
    """What is published is what one command of the program makes."""
    text = (ROOT / ".github" / "workflows" / "pages.yml").read_text()
    command = re.search(r"python export\.py (.*)", text)[1].split()
    assert sorted(command) == ["--dest=page", "--out_dir=weights/shakespeare", "--to=page"]
    assert re.search(r"upload-pages-artifact@v\d+\n\s+with:\n\s+path: page\n", text)


# --------------------------------------------------------------------------------------------------
# In headless Chromium


class Server:
    """A web server for a folder; `asked` are the paths that were asked for.

    gate: an Event that the second half of each .wasm file waits for
    """

    def __init__(self, folder, gate=None):
        self.asked = asked = []

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, form, *args):
                asked.append(self.path)

            def copyfile(self, source, outputfile):
                if gate and self.path.endswith(".wasm"):
                    size = os.fstat(source.fileno()).st_size
                    outputfile.write(source.read(size // 2))
                    outputfile.flush()
                    gate.wait(60)
                super().copyfile(source, outputfile)

        handler = functools.partial(Handler, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def build(folder, *flags):
    for package in ("onnx", "onnxscript"):
        if not find_spec(package):
            pytest.skip(f"no {package}")
    if not shutil.which("npm"):
        pytest.skip("no npm")
    assert export_page(folder, *flags) == 0
    return folder


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The page of the shipped model in float32."""
    folder = tmp_path_factory.mktemp("shipped") / "page"
    return build(folder, f"--out_dir={WEIGHTS}", "--weights=float32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The page of a small network with random weights, whose letters are those of HTML."""
    folder = tmp_path_factory.mktemp("tiny")
    save(folder / "out", LETTERS, block_size=32)
    checkpoint.calibrate(folder / "out" / "step-1", dict(temperature=1.5, source="none"))
    return build(folder / "page", f"--out_dir={folder / 'out'}")


@pytest.fixture(scope="module")
def browser():
    b = Browser()
    b.call("/timeouts", script=60_000)
    yield b
    b.close()


def visit(browser, folder, fragment=""):
    """Open a folder's page on a new server, and wait for its model."""
    server = Server(folder)
    browser.size(1200, 800)
    browser.call("/url", url=server.url + fragment)
    browser.wait("ready || $('said').className === 'error'")
    return server


@pytest.fixture
def live(browser, tiny):
    """The page of the small network, just opened."""
    server = visit(browser, tiny)
    yield browser
    server.close()


def say(browser):
    return browser.js("$('said').textContent")


def write(browser, text, **settings):
    """Set the form, press Write, wait for the end; the text."""
    for name, value in dict(typed=text, **settings).items():
        browser.js(f"$('{name}').value = {json.dumps(str(value))}")
    browser.js("start()")
    browser.wait("writing === null")
    return browser.js("samples.at(-1).tokens.join('')")


@slow
def test_logits_are_those_of_pytorch(browser, shipped, tmp_path):
    folder = shutil.copytree(shipped, tmp_path / "page")
    for name in ("crc.js", "model.js"):
        shutil.copy(live_page.PAGE / name, folder)
    server = visit(browser, folder)
    model, _, config = mdlm.load(WEIGHTS)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(model.mask_id, (3, config.block_size), generator=g)
    x[1:][torch.rand(2, config.block_size, generator=g) < 0.5] = model.mask_id
    script = """const [rows, done] = arguments;
      import("./model.js").then(async ({open, predict}) => {
        await open({...live, place: document.baseURI}, "wasm");
        done((await predict(rows)).map(logits => Array.from(logits)));
      }).catch(error => done(String(error)));"""
    found = browser.call("/execute/async", script=script, args=[x.tolist()])
    with torch.no_grad():
        wanted = model(x).flatten(1).numpy()
    assert np.abs(np.array(found) - wanted).max() < 1e-4
    server.close()


@slow
def test_equal_seeds_give_equal_texts(browser, shipped):
    """At least three of four; another text begins with a draw within 1e-4 of a boundary."""
    server = visit(browser, shipped)
    model, tokenizer, config = mdlm.load(WEIGHTS)
    x = torch.full((1, config.block_size), model.mask_id)
    equal = 0
    for seed in range(4):
        text = write(browser, "", seed=seed, steps=16)
        steps = list(sample.unmask(model, x, seed=seed, steps=16))
        if text == tokenizer.decode(steps[-1].x[0]):
            equal += 1
            continue
        shown = browser.js("samples.at(-1).frames.map(f => f.map(([i, token]) => [i, token]))")
        for step, frame in zip(steps, shown):
            drawn = step.drawn[0].nonzero()[:, 0].tolist()
            assert [i for i, _ in frame] == drawn
            tokens = tokenizer.encode("".join(token for _, token in frame))
            differ = [k for k, i in enumerate(drawn) if tokens[k] != step.x[0, i]]
            u = sample.uniform(seed, step.number - 1, torch.tensor([0]), range(len(x[0])))[0][0]
            for k in differ:
                cdf = step.logp[k].double().softmax(0).cumsum(0)
                low = min(tokens[k], int(step.x[0, drawn[k]]))
                assert abs(cdf[low] - u[drawn[k]]) < 1e-4
            if differ:
                break
    assert equal >= 3
    server.close()


@slow
@pytest.mark.parametrize(
    "template",
    [
        "To be, or ███ to be",
        "The [___|king|duke|fool] is [___:d(ea|rea)d]!",
        "To be, or [___] to be",
    ],
)
def test_fills_and_their_proof_are_those_of_sample_py(browser, shipped, template):
    if "[" in template:
        pytest.importorskip("outlines_core")
    server = visit(browser, shipped)
    browser.js(f"$('typed').value = {json.dumps(template)}")
    browser.js("$('rank').click()")
    browser.wait("$('said').textContent.startsWith('The likeliest')", 120)
    model, tokenizer, config = mdlm.load(WEIGHTS)
    segments = sample.parse(template, tokenizer, config.block_size)
    found = filling.fill(model, tokenizer, segments, 5)
    assert browser.js("samples.map(s => s.tokens.join(''))") == [one.text for one in found]
    shown = browser.js("samples.map(s => [s.logp, s.p])")
    assert np.allclose(shown, [(one.logp, one.p) for one in found], rtol=1e-3)
    assert ("; proven: " in say(browser)) == found.proven
    server.close()


@slow
def test_speed_is_near_that_of_onnx_runtime(browser, shipped):
    """256 characters in 16 calls against ONNX Runtime itself, in one thread each, in turns."""
    native = session_of(shipped)
    server = visit(browser, shipped)
    ids = np.full((1, 256), 65, np.int32)
    ratios = []
    for seed in range(2):
        start = time.perf_counter()
        for _ in range(16):
            native.run(None, {"ids": ids})
        seconds = time.perf_counter() - start
        write(browser, "", seed=seed, steps=16)
        ratios.append(browser.js("samples.at(-1).seconds") / seconds)
    print(f"{median(ratios):.2f} times")
    assert median(ratios) <= 12
    server.close()


def session_of(folder):
    """The page's model in ONNX Runtime, in one thread."""
    ort = pytest.importorskip("onnxruntime")
    live = read_live(folder)
    packed = (folder / "weights.bin").read_bytes()
    data = np.zeros(live["bytes"] // 4, np.float32)
    at = 0
    for offset, n, columns in live["tensors"]:
        if columns:
            values = np.frombuffer(packed, np.int8, n, at).reshape(-1, columns)
            scale = np.frombuffer(packed, np.float32, columns, at + n)
            values = (values * scale).ravel()
            at += n + 4 * columns
        else:
            values = np.frombuffer(packed, np.float32, n, at)
            at += 4 * n
        data[offset // 4 : offset // 4 + n] = values
    assert at == len(packed)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    external = (["model.onnx.data"], [data.tobytes()], [live["bytes"]])
    options.add_external_initializers_from_files_in_memory(*external)
    return ort.InferenceSession((folder / "model.onnx").read_bytes(), options)


@slow
def test_int8_costs_next_to_nothing(shipped, tmp_path):
    """The NELBO of the page's own weights: 64 masked windows of the excerpt, paired."""
    rounded = build(tmp_path / "page", f"--out_dir={WEIGHTS}")
    text = (ROOT / "weights" / "excerpt.txt").read_text(encoding="utf-8")
    _, tokenizer, config = mdlm.load(WEIGHTS)
    ids = torch.tensor(tokenizer.encode(text))
    windows = ids[: len(ids) // 256 * 256].view(-1, 256)
    found = []
    for folder in (shipped, rounded):
        session = session_of(folder)

        def logits(xt, run=session.run):
            rows = [run(None, {"ids": x[None].int().numpy()})[0] for x in xt]
            return torch.from_numpy(np.concatenate(rows))

        model = Toy(logits, tokenizer.vocab_size, config.block_size)
        passes = math.ceil(64 / len(windows))
        found.append(mdlm.evaluate(model, windows, passes=passes)["by_window"])
    difference = np.subtract(*found[::-1])
    size = (rounded / "weights.bin").stat().st_size
    print(f"NELBO {np.mean(found[0]):.4f}, int8 {difference.mean():+.5f}, {size / 1e6:.1f} MB")
    assert 0 < abs(difference).max() < 0.05  # it was rounded
    assert difference.mean() <= 0.005 and 4 * size < 1.1 * (shipped / "weights.bin").stat().st_size


def read_live(folder):
    text = (folder / "index.html").read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text)[1])["live"]


@slow
def test_type_play_and_read(live):
    """Typed keys, one of them for the gap; play, pause, step, drag; the five likeliest on hover."""
    live.js("($('typed').value = '', 1)")
    live.mouse("#typed", click=True)
    live.type("ab__b a")
    live.chord("control", "enter")
    live.wait("samples[0].frames.length && writing === null && !timer")
    text = live.js("text()")
    assert re.fullmatch(r"ab[^█]{2}b a", text, re.S)
    assert live.js("step") == live.js("steps") == live.js("samples[0].calls") > 2
    live.js("document.activeElement.blur()")
    live.press("home")
    assert live.js("text()") == "ab██b a"
    live.press("space")
    assert live.js("timer > 0")
    live.mouse("#play", click=True)
    assert not live.js("timer > 0")
    live.mouse("#slider", click=True)
    assert 0 < live.js("step") < live.js("steps")
    live.press("end")
    live.mouse("[data-p='2']")
    assert live.js("document.querySelectorAll('#tip div').length") == 5
    assert "confidence" in live.js("$('tip').innerText")
    live.press("escape")
    live.type("]]]")
    assert live.js("cursor") == 2 and live.js("document.querySelectorAll('#tip div').length") == 5


@slow
def test_recorded_text_plays_while_the_model_loads(browser, shipped):
    """Above the fold, with a bar in MB; a chip that is pressed meanwhile begins afterwards."""
    gate = threading.Event()
    server = Server(shipped, gate)
    for width, height in ((390, 844), (1280, 657)):
        browser.size(width, height)
        browser.call("/url", url=server.url)
        browser.wait("timer && step > 1 && $('bar').value > 1e6")
        assert browser.js("[ready, $('stop').disabled, $('write').disabled]") == [
            False,
            True,
            False,
        ]
        found = re.fullmatch(r"(\d+\.\d) of (\d+\.\d) MB", browser.js("$('counted').textContent"))
        assert found and 1 < float(found[1]) < float(found[2])
        assert browser.js("scrollY") == 0
        for element in ("text", "write"):
            box = browser.js(f"$('{element}').getBoundingClientRect().toJSON()")
            assert 0 < box["top"] < box["bottom"] <= height and box["right"] <= width
    assert browser.js("$('typed').value") == live_page.passage(*known_shipped(), "█")
    browser.js("([...$('chips').children].find(c => c.textContent === 'write a scene').click(), 1)")
    assert say(browser) == "It begins when the model is loaded."
    assert browser.js("[timer, step === steps, $('typed').value]") == [0, True, ""]
    browser.emulate(prefers_reduced_motion="reduce")
    other = Server(shipped, gate)
    browser.call("/window/new", type="tab")
    first, second = browser.call("/window/handles", method="GET")
    browser.call("/window", handle=second)
    browser.emulate(prefers_reduced_motion="reduce")
    browser.call("/url", url=other.url)
    assert browser.js("[ready, timer, step === steps, step > 10]") == [False, 0, True, True]
    browser.call("/window", method="DELETE")
    browser.call("/window", handle=first)
    browser.emulate(prefers_reduced_motion="no-preference")
    gate.set()
    browser.wait("ready && writing?.frames?.length")
    assert not browser.js("$('progress').checkVisibility()") and browser.js("samples.length") == 1
    browser.js("($('stop').click(), 1)")
    server.close()
    other.close()


def known_shipped():
    _, tokenizer, config = mdlm.load(WEIGHTS)
    return tokenizer, config


@slow
def test_recorded_text_ends_with_the_load_and_the_first_text(live):
    assert live.js("[timer, step === steps, Boolean(samples[0].note)]") == [0, True, True]
    assert live.js("$('calls').textContent") == "recorded when this page was made"
    write(live, "a_b", steps=1)
    assert live.js("samples.length") == 1 and not live.js("samples[0].note")
    assert live.js("$('calls').textContent").startswith("1 network call, ")


@slow
def test_counts_agree(live):
    """Steps are calls, of which few gaps take fewer than were asked for."""
    write(live, "ab__b a", steps=16)
    live.js("(jump(1e6), 1)")
    n = live.js("steps")
    assert n < 16 and live.js("$('where').textContent") == f"Step {n} of {n}"
    assert live.js("$('calls').textContent").startswith(f"{n} network calls, ")
    assert live.js("$('calls-name').textContent") == "calls, at most"


@slow
def test_marks_settle_while_the_next_call_is_waited_for(live):
    """After a second; those of a step that the user stopped at stay."""
    write(live, "a____b", steps=8)
    for playing, wanted in (("play(true)", 0), ("play(false)", 1)):
        live.js(f"(play(false), go(2), {playing}, clearInterval(timer), go(3), 1)")
        time.sleep(1.3)
        assert live.js("document.querySelectorAll('.fresh').length > 0") == wanted
    live.js("(play(false), 1)")


@slow
def test_a_search_counts_texts_and_has_a_stop(live):
    for text in ("a__ b" + "_" * 20, "a[___]b [___]a"):
        live.js(f"($('typed').value = {json.dumps(text)}, start('rank'), 1)")
        live.wait("!$('progress').hidden && parseInt($('counted').textContent) > 2")
        live.js("($('stop').click(), 1)")
        assert re.fullmatch(r"\d+ texts seen", live.js("$('counted').textContent"))
        assert live.js("[$('bar').hidden, $('progress').hidden]") == [True, True]
        assert live.js("[writing, $('said').textContent]") == [None, "stopped"]
    live.js("start('rank')")
    live.wait("writing === null")
    assert re.match(r"\d+ texts seen for 5 fills, ", live.js("$('calls').textContent"))


@slow
def test_fills_have_probabilities_and_a_certificate(live, tiny):
    """p of known lengths, shares of several, calibrated; any other has at most, in this unit."""
    model, tokenizer, _ = mdlm.load(tiny.parent / "out")
    for text, what in (("a_ b", "probability in this text"), ("a[___] b", "shares of their sum")):
        live.js(f"($('typed').value = {json.dumps(text)}, start('rank'), 1)")
        live.wait("$('said').textContent.startsWith('The likeliest')")
        titles = live.js("samples.map(s => s.title)")
        shown = [float(re.match(r"([\d.e-]+)\xa0% ", title)[1]) for title in titles]
        assert shown == sorted(shown, reverse=True) and sum(shown) < 103
        found = filling.fill(model, tokenizer, sample.parse(text, tokenizer, 32), 5)
        assert np.allclose(live.js("samples.map(s => s.p)"), [one.p for one in found], rtol=0.03)
        number = re.search(r"; (?:not )?proven: .* ([\d.e-]+)\xa0%\.$", say(live))[1]
        assert what in say(live) and float(number) <= shown[-1] * 1.1
    bounds = dict(fills=[dict(logp=-2, share=0.5)], comparesLengths=True)
    for proven, bound, said in (
        (True, -4, "proven: any other has at most 6.8\xa0%."),
        (False, -4, "not proven: another may have up to 6.8\xa0%."),
        (False, -1, "not proven: another may be likelier."),
        (True, -1e300, "there are no others."),
    ):
        certificate = live.js(
            f"certificate({json.dumps(bounds | dict(proven=proven, bound=bound))})"
        )
        assert certificate.endswith(f"; {said}")


@slow
def test_corrections_flash(live):
    write(live, "", steps=32, seed=1)
    changed = live.js("""[...Array(steps + 1).keys()].map(s => {
      jump(s);
      return document.querySelectorAll('.changed').length; })""")
    assert sum(changed) > 3 and not any(changed[:17])  # the first sixteen calls reveal


@slow
def test_a_text_is_shown_while_it_is_written(live):
    """Play begins before the last call; a pause keeps the step, the text goes on."""
    live.js("$('typed').value = ''")
    live.js("$('steps').value = 128")
    live.js("start()")
    live.wait("writing?.frames.length > 2")
    live.js("play(false)")
    step = live.js("step")
    assert live.js("writing.frames.length") < live.js("steps") and "█" in live.js("text()")
    live.wait("writing === null")
    assert live.js("step") == step and live.js("steps") == 128


@slow
def test_a_newer_request_replaces_an_older(live):
    live.js("$('typed').value = ''")
    live.js("$('steps').value = 128")
    live.js("start()")
    live.wait("writing?.frames.length > 2")
    assert write(live, "a█b", steps=4).startswith("a")
    assert live.js("samples.length") == 1 and live.js("samples[0].frames.length") <= 4


@slow
def test_a_link_shows_the_same_text(live, tiny):
    text = write(live, "a██ b", steps=9, seed=7, temperature=0.8)
    fragment = live.js("location.hash")
    asked = dict(urllib.parse.parse_qsl(fragment[1:]))
    assert asked == dict(typed="a██ b", steps="9", seed="7", temperature="0.8")
    again = write(live, "a██ b", steps=9, seed=7, temperature=0.8)
    assert live.js("$('seed').value") == "8" and live.js("samples.length") == 2  # another text
    server = visit(live, tiny, fragment)
    live.wait("writing === null && samples[0].frames.length > 0")
    assert live.js("samples[0].tokens.join('')") == text, again
    server.close()


@slow
def test_nothing_is_sent_anywhere(browser, tiny):
    """Its own files once, then nothing; without a network it goes on; a policy keeps it so."""
    other = Server(tiny)
    server = visit(browser, tiny)
    asked = [path for path in server.asked if path != "/favicon.ico"]
    assert asked and all((tiny / (path.strip("/") or "index.html")).is_file() for path in asked)
    browser.cdp("Network.enable")
    browser.cdp("Network.emulateNetworkConditions", offline=True, latency=0,
                downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip
    server.close()
    assert len(write(browser, "ab", steps=8)) == 32
    assert [path for path in server.asked if path != "/favicon.ico"] == asked
    browser.cdp("Network.emulateNetworkConditions", offline=False, latency=0,
                downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip
    send = f"fetch('{other.url}').then(() => 'sent').catch(() => 'refused')"
    script = f"""const done = arguments[0], place = URL.createObjectURL(
        new Blob([`{send}.then(postMessage)`], {{type: "text/javascript"}}));
      {send}.then(page => {{
        new Worker(place, {{type: "module"}}).onmessage = ({{data}}) => done([page, data]);
      }});"""
    assert browser.call("/execute/async", script=script, args=[]) == ["refused", "refused"]
    assert other.asked == []
    other.close()


@slow
def test_hostile_text_stays_text(live):
    attack = "<b>a</b>'\"&"
    assert write(live, attack + "█", steps=4).startswith(attack)
    assert live.js("text()").startswith(attack)
    live.js("$('typed').value = '<img src=x onerror=alert(1)>'")
    live.js("start()")
    assert say(live).startswith('The model never saw the character "i" (position 2)')
    fragment = "#typed=" + urllib.parse.quote(attack) + "&seed=<script>"
    live.js(f"location.hash = {json.dumps(fragment)}")
    assert live.js("document.querySelectorAll('img, #text b, nav b, #said b').length") == 0


@slow
def test_wrong_or_missing_file_is_named(browser, tiny, tmp_path):
    """Whichever it is: the page holds its own scripts and styles, so that there are no others."""
    folder = shutil.copytree(tiny, tmp_path / "page")
    names = [
        path.name for path in folder.iterdir() if not re.search("html|webgpu|asyncify", path.name)
    ]
    assert sorted(names) == sorted(["model.onnx", "weights.bin", *live_page.RUNTIME_FILES["wasm"]])
    for name in names:
        content = (folder / name).read_bytes()
        middle = len(content) // 2
        spoiled = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for changed, sentence in (
            (None, f"{name} is missing (404)"),
            (content[:middle], f"{name} has {middle} bytes, {len(content)} were written"),
            (spoiled, f"{name} has the right length, but a wrong checksum"),
        ):
            os.remove(folder / name)
            if changed is not None:
                (folder / name).write_bytes(changed)
            visit(browser, folder).close()
            assert say(browser).startswith(sentence) and browser.js("$('write').disabled")
            assert browser.js("$('said').className") == "error"
            (folder / name).write_bytes(content)
    visit(browser, folder).close()
    assert browser.js("ready") and say(browser) == ""


def rename(folder, letters):
    """Let the page in `folder` call its first characters so."""
    path = folder / "index.html"
    text = path.read_text(encoding="utf-8")
    checksum, data = re.search(r'data-crc32="(\d+)" id="data">(.*?)</script>', text).groups()
    content = json.loads(data)
    vocab = content["live"]["vocab"]
    content["live"]["vocab"] = [*letters, *"cdefghijkl"][: len(vocab)]
    changed = json.dumps(content).translate(viewer.TAGS)
    text = text.replace(data, changed).replace(checksum, str(zlib.crc32(changed.encode())))
    path.write_text(text, encoding="utf-8")


@slow
@pytest.mark.parametrize(
    "letters, signs, literal",
    [("ab_", "█", "_"), ("ab█", "_", "█"), ("ab_█[]", "[MASK]", "_█[___]"), ("ab", "_ or █", "")],
)
def test_character_of_the_model_is_no_gap(browser, tiny, tmp_path, letters, signs, literal):
    folder = shutil.copytree(tiny, tmp_path / "page")
    rename(folder, letters)
    server = visit(browser, folder)
    assert browser.js("$('help').textContent").startswith(f"Each {signs} is a character to fill")
    sign = signs.split()[0]
    text = write(browser, f"{literal}a{sign}b[MASK]", steps=2)
    assert text.startswith(f"{literal}a") and len(text) == len(literal) + 4
    assert browser.js("samples.at(-1).given") == [True] * (len(literal) + 1) + [False, True, False]
    browser.js(f"$('typed').value = {json.dumps('[MASK]' + 'a' * 31)}")
    browser.js("start()")
    assert browser.js("$('said').className") == "", "[MASK] is one of 32 characters"
    browser.wait("writing === null")
    for typed, wanted in (
        ("ab", f"no gap to rank fills for: type {sign}"),
        ("[MASK]é", 'character "é" (position 7)'),
        *[("a[___]", "no gap to rank")] * ("[" in letters),
    ):
        browser.js(f"$('typed').value = {json.dumps(typed)}")
        browser.js("start('rank')")
        assert wanted in say(browser)
    if "[" not in letters:
        browser.js("$('typed').value = 'a[___]b'")
        browser.js("start('rank')")
        browser.wait("$('said').textContent.startsWith('The likeliest')")
    server.close()


@slow
def test_what_a_browser_lacks_is_said(tiny):
    b = Browser()
    code = "Object.defineProperty(window, 'WebAssembly', {value: undefined})"
    b.cdp("Page.addScriptToEvaluateOnNewDocument", source=code)
    visit(b, tiny).close()
    assert "no WebAssembly; use a newer one" in say(b)
    b.call("/url", url=(tiny / "index.html").as_uri())
    assert "python -m http.server" in say(b)
    b.close()


@slow
def test_wrong_texts_get_one_sentence(live):
    for text, said in (
        ("a" * 33, "The text has 33 characters, the model takes 32; shorten it."),
        ("a" * 32, "There is nothing to fill: type _ where a character is missing."),
        ("aé", 'The model never saw the character "é" (position 2); remove it.'),
    ):
        live.js(f"$('typed').value = {json.dumps(text)}")
        live.js("start()")
        assert say(live) == said and live.js("samples[0].title") == ""
    live.js("$('typed').value = 'ab'")
    live.js("start('rank')")
    assert "no gap to rank" in say(live)


@slow
def test_a_worker_that_fails_in_use_can_be_asked_again(live):
    live.js("$('typed').value = 'ab' + '_'.repeat(24)")
    live.js("start()")
    live.js("worker.dispatchEvent(new ErrorEvent('error', {message: 'out of memory'}))")
    assert "worker failed (out of memory); try again" in say(live)
    assert not live.js("document.querySelector('#composer button').disabled")
    assert write(live, "ab__").startswith("ab")


@slow
def test_a_typed_pattern_is_matched(live):
    """Written and ranked; texts around it keep their places; wrong patterns are one sentence."""
    for text, pattern in (
        ("a[███:[b<]+&?]b_", "a[b<]+&?b."),
        ("[██|ab|<>] [█:b]", "(ab|<>) b"),
        ("a[___:[b<]{1,3}&]b_", "a[b<]{1,3}&b."),
        ("a[___]b_", "a.{1,16}b."),
        ("ab[___]", "ab.{1,16}"),
        ("[___|ab|<>&] b[___:a{2,3}]", "(ab|<>&) ba{2,3}"),
    ):
        live.js(f"$('typed').value = {json.dumps(text)}")
        live.js("start()")
        live.wait("writing === null")
        shown = live.js("samples.at(-1).tokens.join('')")
        assert re.fullmatch(f"(?s:{pattern})", shown), shown
        live.js("start('rank')")
        live.wait("$('said').textContent.startsWith('The likeliest')")
        for shown in live.js("samples.map(s => s.tokens.join(''))"):
            assert re.fullmatch(f"(?s:{pattern})", shown), shown
    for text, said in (
        ("a[██:b", "The gap [██:b has no ] at its end; write one."),
        ("a[██:b]", "No text of 2 characters of this model matches b; change one of them."),
        ("a[██:(b]", '"(b" is no pattern that this page takes: a ( has no ).'),
        ("a[██:b+]é", 'The model never saw the character "é" (position 9); remove it.'),
        ("a[___:b]_", "A gap must not follow one of unknown length"),
    ):
        live.js(f"$('typed').value = {json.dumps(text)}")
        live.js("start()")
        assert say(live).startswith(said)


@pytest.mark.long
def test_page_finds_the_mistakes_that_sample_py_finds(browser, shipped):
    server = visit(browser, shipped)
    text = "ROMEO:\nI wlil not speak of thee, my loord, nor of teh king."
    browser.js(f"$('typed').value = {json.dumps(text)}")
    browser.js("$('proofread').click()")
    browser.wait("writing === null", seconds=300)
    model, tokenizer, _ = mdlm.load(WEIGHTS)
    fixed = sample.fix(model, tokenizer, text)
    assert fixed.changes
    shown = browser.js("changesShown().map(b => [b.dataset.before, b.dataset.after])")
    assert shown == [[change.before, change.after] for change in fixed.changes]
    browser.js("$('use').click()")
    assert browser.js("$('typed').value") == fixed.text
    server.close()


@slow
def test_changes_are_accepted_and_rejected_one_by_one(live):
    """Shown as windows are read, beside what was there; the field gets what is accepted."""
    live.js("$('typed').value = 'ab/b <'")
    live.js("$('proofread').click()")
    live.wait("$('said').textContent === 'Nothing to change was found.'")
    assert live.js("proofText()") == "ab/b <" and not live.js("$('judge').checkVisibility()")
    change = dict(kind="substitution", gain=9.5, pBefore=0.01, pAfter=0.5)
    parts = [("ab", "ab", None), ("/", "<b>", change), ("b", "b", None), (" ", "", change)]
    parts = [dict(before=before, after=after, change=one) for before, after, one in parts]
    live.js("openProof($('typed').value)")
    texts = "[...document.querySelectorAll('#proof del, #proof ins')].map(e => e.textContent)"
    for window in (parts[:2], parts[2:]):
        live.js(f"showParts({json.dumps(window)})")
    assert live.js(texts) == ["/", "<b>", " ", ""]
    assert live.js("document.querySelector('.unread').textContent") == "<"
    assert live.js("proofText()") == "ab<b>b<"
    said = "substitution: 9.5 nats likelier, before 1\u00a0%, after 50\u00a0%"
    assert live.js("changesShown()[0].title") == said
    live.js("changesShown()[0].focus()")
    assert live.js("document.activeElement.ariaLabel") == "/ becomes <b>"
    live.press("space")
    assert live.js("proofText()") == "ab/b<"
    live.press("tab", "space")
    assert live.js("proofText()") == "ab/b <" and len(live.js("changesShown()")) == 2
    live.js("$('accept').click()")
    assert live.js("proofText()") == "ab<b>b<"
    live.js("$('reject').click()")
    live.press("space")
    live.js("$('use').click()")
    assert live.js("$('typed').value") == live.js("proofText()") == "ab/b<"
    live.js("$('typed').value = ' '")
    live.js("$('proofread').click()")
    assert say(live) == "There is no text to proofread; type one."


@slow
def test_ranking_ends_what_is_being_written(live):
    """The text stays as it is; tabs, keys and the timer go on; more gaps than one in a title."""
    live.js("$('typed').value = 'a__ b__' + 'a'.repeat(20)")
    live.js("$('steps').value = 128")
    script = """const [done] = arguments;
      worker.addEventListener("message", ({data}) => {
        if (data.frame && writing.frames.length === 2) done(start("rank"));
      });
      start();"""
    live.call("/execute/async", script=script, args=[])  # in the page: it writes faster than we ask
    live.press("down", "up")
    assert live.js("samples.length") == 1 and live.js("steps === sample.frames.length")
    live.wait("$('said').textContent.startsWith('The likeliest')")
    assert live.js("samples.every(s => s.title.includes('…'))") and live.js("which") == 0
    live.js("document.querySelector('nav button').focus()")
    live.press("right", "down")
    assert live.js("document.activeElement.tagName") == "BUTTON" and live.js("which") == 1


@slow
def test_a_pasted_link_is_followed(live):
    """Another fragment in the address of the open page; _ in it is a gap; odd seeds are not run."""
    live.js("location.hash = '#typed=ab_b&seed=5&steps=4'")
    live.wait("typeof ready !== 'undefined' && ready && samples[0].frames.length > 0")
    assert re.fullmatch("ab.b", live.js("samples[0].tokens.join('')"), re.S)
    assert live.js("$('seed').value") == "5"
    live.js("location.hash = '#typed=ab_b&seed=-3'")
    live.wait("typeof ready !== 'undefined' && ready && $('seed').value === '-3'")
    assert live.js("samples[0].title") == ""


@slow
def test_keyboard_alone_is_enough(live):
    """Tab goes through every control, in order; arrows set the sliders."""
    names = []
    chips = live.js("$('chips').children.length")
    for _ in range(chips + 7):
        live.press("tab")
        names.append(live.js("document.activeElement.id"))
        if names[-1] == "steps":
            live.press("right")
    order = ["typed", "write", "rank", "proofread", "steps", "temperature", "seed"]
    assert [name for name in names if name] == order
    assert live.js("$('steps').value") == "17"
    labels = live.js("""[...document.querySelectorAll("input, textarea, button")]
      .filter(e => e.checkVisibility())
      .map(e => e.labels?.[0]?.innerText || e.getAttribute("aria-label") || e.textContent)""")
    # With Play, the slider and Stop, which can be pressed while it writes.
    assert len(labels) == chips + 10 and all(labels)


@slow
def test_phones_and_both_themes(live):
    write(live, "", steps=8)
    live.size(390, 700)
    live.js("scrollTo(0, 0)")
    live.js("samples.splice(0)")
    write(live, "", steps=8)
    top = live.js("$('text').getBoundingClientRect().top")
    assert 0 <= top < 600, "the text begins in sight"
    assert not live.js("$('seed').checkVisibility()")
    live.js("($('more').open = true, 1)")
    assert live.js("$('seed').checkVisibility() && $('help').checkVisibility()")
    for width in (320, 390, 1200):
        live.size(width, 800)
        assert live.js("document.documentElement.scrollWidth") <= width
    colors = set()
    for theme in ("light", "dark"):
        live.emulate(prefers_color_scheme=theme)
        colors.add(live.js("getComputedStyle($('typed')).backgroundColor"))
    assert len(colors) == 2
