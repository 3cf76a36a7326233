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
import urllib.parse
import zlib
from importlib.util import find_spec

import numpy as np
import pytest
import test_proofreading
import torch
from conftest import ROOT, Toy
from test_export import save

import export
import mdlm
import sample
from nanomdlm.kernels.reference import philox_words
from nanomdlm.support.cli import entry
from nanomdlm.support.constrain.automaton import automaton_of
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.infill import filling, search, templates
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
PATTERNS = ["[a-c]{2}d?", "(ab|c)*", "a?b+[^a]*", "(?i:B|cd?)+", "a|ab|b{3,}?", ".*\\x61"]
PATTERNS += ["\\w\\D?[e\\]-]*"]
WRONG = ["(a", "a)", "^a", "a$", "a{2,1}", "[a&&b]", "(a)\\1", "(?=a)a", "a*+", "[b-a]", "a\\b"]
WRONG += ["*", "a{x}"]


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
    "[___|ab|c|dd|da]b_a[___:(ab|c)*]",
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
    "[___|é|xa]": "The model never saw all characters of é|xa; change them.",
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
        x = torch.tensor([templates.to_ids(wanted[0].segments, V)])
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
const {cases, settings, table, reading} = JSON.parse(process.argv[1]);
for (const {typed, T, vocab, depends} of cases) {
  const parts = [], predict = (depends ? network : alphabet)(T, vocab.length, table);
  // The page's own script reads the text.
  const live = {vocab, mask: vocab.length, context: T};
  const source = new Function("live", `${reading} return source;`)(live);
  const {text} = source.read(typed, {fix: true});
  for await (const window of proofread(predict, text, vocab, T, settings)) parts.push(...window);
  found.push(parts);
}
console.log(JSON.stringify(found));
"""


def test_page_proofreads_as_sample_fix_does(network):
    """Every kind of change, over several windows: where it is, what it gains, and what is kept.

    In a world that repeats the alphabet, and where each token depends on all others. Characters
    that the model does not know stay as they are.
    """
    line = test_proofreading.LETTERS
    wrong = ["abcdefghizklmnop", "abcdefghiklmnop", "abcdefghijqklmnop", "abcdefghjiklmnop"]
    texts = [line + each + line[16:] + line for each in wrong]
    texts += [
        line * 3,
        "a",
        "bc",
        "\u00e9" + line + "a\U0001f600" + line[2:] * 3 + "zz",
        *(
            line[:9] + c + line[9:] + wrong[0] + c + line[16:]
            for c in ("’", "“", "—", "\t", "\r\n")
        ),
        line[:20] + "ts" + line[22:] + "abcxefg" + line[7:18] + line[19:] + line[:5] + line[6:] * 2,
        "".join(line[(i * i) % 27] if i % 9 == 0 else line[i % 27] for i in range(120)),
    ]
    model, table = network
    g = torch.Generator().manual_seed(0)
    cases = [dict(typed=text, T=32, vocab=list(line)) for text in texts]
    worlds = [test_proofreading.alphabet()] * len(texts)
    # Some letters have more others beside them on a keyboard than others have; some have none.
    for vocab in map(list, ("aqsd\n", "qawsz", "aw \ns", "ABa ,")):
        for row in torch.randint(3 * len(vocab) + 1, (6, 60), generator=g):
            text = "".join((vocab * 3 + ["\u00e9"])[i] for i in row)
            cases.append(dict(typed=text, T=24, vocab=vocab, depends=True))
            worlds.append((model, Tokenizer("char", vocab)))
    given = dict(cases=cases, settings=live_page.proofreading_settings(), table=table.tolist())
    given |= dict(reading=viewer.bundle("pattern.js", "in_browser.js"))
    answer = in_node(PROOFREAD, given, "proofread.js")
    kinds = set()
    for case, world, parts in zip(cases, worlds, answer, strict=True):
        text = case["typed"]
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


LOADER = """
import {open} from %s;
const {wanted, files, runtime} = JSON.parse(process.argv[1]), later = setTimeout, said = [];
console.info = () => {};
globalThis.setTimeout = (f, ms) => later(f, ms === 60_000 ? 20 : ms);  // a minute is over soon
const whole = Uint8Array.from({length: 3000}, (_, i) => i %% 200), half = whole.slice(0, 1500);
const wrong = {"another page": whole.slice(0, 9), "empty": [], "longer": [...whole, 1],
               "spoiled": whole.map((byte, i) => i ? byte : 1), "cut off": half, "broken off": half,
               "stalled": [], "stalled in the middle": half};
// A server that gives FAULT/FILE/NAME; what is wrong with FILE is FAULT, all other files are right.
globalThis.fetch = async (place, {signal}) => {
  const [fault, file, name] = place.split("/"), has = kind => file === name && fault === kind;
  if (has("no answer")) throw new TypeError("fetch failed");
  const aborted = new Promise((_, reject) => signal.addEventListener("abort", reject));
  const content = Uint8Array.from(name === file && wrong[fault] || whole);
  const body = new ReadableStream({
    start: stream => stream.enqueue(content),
    pull(stream) {
      if (has("stalled") || has("stalled in the middle")) return aborted;
      return has("broken off") ? stream.error("gone") : stream.close();
    },
  });
  const headers = {"content-type": has("type") ? "text/plain" : "text/javascript"};
  return new Response(body, {status: has("missing") ? 404 : has("refused") ? 403 : 200, headers});
};
for (const [fault, file] of wanted) {
  const place = `${fault}/${file}/`, about = {files, runtime: {wasm: runtime}, place, tensors: []};
  await open(about, "wasm").catch(sentence => said.push(sentence));
}
console.log(JSON.stringify(said));
"""
FAULTS = ["missing", "refused", "another page", "cut off", "longer", "empty", "spoiled"]
FAULTS += ["broken off", "no answer", "stalled", "stalled in the middle"]


def test_every_fault_of_every_file_is_one_sentence():
    """Missing, cut off, damaged, of another export, of a wrong type, stalled: and what to do."""
    runtime = live_page.RUNTIME_FILES["wasm"]
    files = ["model.onnx", "weights.bin", *runtime]
    sums = dict.fromkeys(files, (3000, zlib.crc32(bytes(range(200)) * 15)))
    wanted = [(fault, file) for fault in FAULTS for file in files]
    wanted += [("type", file) for file in runtime if file.endswith(".mjs")]
    said = in_node(LOADER, dict(wanted=wanted, files=sums, runtime=runtime), "model.js")
    for (fault, file), found in zip(wanted, said, strict=True):
        assert file in found and "\n" not in found, (fault, found)


READ = """
const {reading, cases} = JSON.parse(process.argv[1]);
console.log(JSON.stringify(cases.map(([vocab, typed]) => {
  const live = {vocab: [...vocab], mask: vocab.length, context: 32};
  const source = new Function("live", `${reading} return source;`)(live);
  try {
    return source.read(typed, {}).ids;
  } catch (error) {
    return String(error);
  }
})));
"""


def test_what_is_typed_is_read():
    """A character of the model is no gap. A text that cannot be used gets a sentence."""
    cases = [
        ("ab_", "_a█b[MASK]", [2, 0, 3, 1, 3]),
        ("ab_█[]", "_█[___]a[MASK]b", [2, 3, 4, 2, 2, 2, 5, 0, 6, 1]),
        ("ab", "a" * 33, "33"),
        ("ab", "a" * 32, "nothing to fill"),
        ("ab", "aé", "é"),
    ]
    reading = viewer.bundle("pattern.js", "in_browser.js")
    answer = in_node(READ, dict(cases=[case[:2] for case in cases], reading=reading))
    for (_, _, wanted), found in zip(cases, answer, strict=True):
        assert wanted in found if isinstance(wanted, str) else wanted == found


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


def test_links_to_lessons_hold_no_name_or_key_of_who_cloned():
    for origin in ("https://name:key@github.com/a/b", "git@github.com:a/b.git"):
        assert live_page.lessons_at(origin) == "https://github.com/a/b/blob/HEAD/lessons/README.md"
    assert live_page.lessons_at("/home/name/b") is None


def test_quantized_matrices_are_near():
    array = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)
    array[:, 2] = 0
    values, scale = live_page.quantize(array)
    assert values.dtype == np.int8 and scale.dtype == np.float32 and scale.shape == (7,)
    assert (np.abs(values * scale - array) <= scale / 2 + 1e-7).all() and values.max() == 127


def test_int8_costs_next_to_nothing():
    """The NELBO of the shipped model with rounded matrices, on the same masks."""
    model, tokenizer, config = mdlm.load(WEIGHTS)
    text = (ROOT / "weights" / "excerpt.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer.encode(text))
    windows = ids[: 16 * config.block_size].view(16, -1)
    exact = mdlm.evaluate(model, windows)["by_window"]
    for p in model.parameters():
        if p.ndim == 2:  # transposed, as in the graph: a scale for each output
            values, scale = live_page.quantize(p.detach().numpy().T)
            p.data = torch.from_numpy(values * scale).T.contiguous()
    difference = np.subtract(mdlm.evaluate(model, windows)["by_window"], exact)
    assert 0 < abs(difference).max() < 0.05 and difference.mean() <= 0.005


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
    assert export_page(dest) == 2 and "npm" in capsys.readouterr().err and not dest.exists()


def test_cut_off_or_old_installation_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(live_page, "RUNTIME", tmp_path / "onnxruntime-web")
    assert not live_page.is_installed()
    installed = tmp_path / ".package-lock.json"
    installed.write_text("{}")
    assert live_page.is_installed()
    os.utime(installed, (0, 0))
    assert not live_page.is_installed()


# --------------------------------------------------------------------------------------------------
# In headless Chromium


class Server:
    """A web server for a folder; `asked` are the paths that were asked for."""

    def __init__(self, folder):
        self.asked = asked = []

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, form, *args):
                asked.append(self.path)

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
def test_type_play_and_read(live):
    """Typed keys, one of them for the gap; play, drag; the five likeliest on hover."""
    live.js("($('typed').value = '', 1)")
    live.mouse("#typed", click=True)
    live.type("ab__b a")
    live.chord("control", "enter")
    live.wait("samples[0].frames.length && writing === null && !timer")
    text = live.js("text()")
    assert re.fullmatch(r"ab[^█]{2}b a", text, re.S)
    live.js("document.activeElement.blur()")
    live.press("home")
    assert live.js("text()") == "ab██b a"
    live.mouse("#slider", click=True)
    assert 0 < live.js("step") < live.js("steps")
    live.press("end")
    live.mouse("[data-p='2']")
    assert live.js("document.querySelectorAll('#tip div').length") == 5


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
        found = filling.Filling(model, tokenizer, sample.parse(text, tokenizer, 32), 5).finish()
        assert np.allclose(live.js("samples.map(s => s.p)"), [one.p for one in found], rtol=0.03)
        number = re.search(r"; (?:not )?proven: .* ([\d.e-]+)\xa0%\.$", say(live))[1]
        assert what in say(live) and float(number) <= shown[-1] * 1.1


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
def test_an_example_runs_and_shows_what_is_done(live):
    """One press: while fills are ranked, what the network sees; while a text is read, the text."""
    press = "(addChip({label: 'a', text: %r, what: %r}), $('chips').lastChild.click(), [%s])"
    live.js("""(window.shown = new Set(), new MutationObserver(() =>
      window.shown.add($('hint').textContent)).observe($('hint'), {childList: true}), 1)""")
    found = live.js(press % ("a[___] b", "rank", "$('hint').textContent, $('text').hidden"))
    assert found == ["a[___] b", True], "the text before is gone"
    live.wait("$('said').textContent.startsWith('The likeliest')")
    shown = live.js("[...window.shown]")
    assert len(shown) > 3 and all(re.fullmatch("a.*", text, re.S) for text in shown), shown
    assert live.js("$('text').checkVisibility() && !$('hint').checkVisibility()")
    found = live.js(press % ("ab/b", "fix", "proofText(), $('proof').checkVisibility()"))
    assert found == ["ab/b", True]
    live.wait("writing === null")


@slow
def test_a_syntax_is_put_at_the_cursor(live):
    live.js("($('typed').value = 'a b', $('typed').setSelectionRange(2, 2), 1)")
    live.js(
        "[...$('syntax').querySelectorAll('button')].find(b => b.textContent === '[___]').click()"
    )
    assert live.js("$('typed').value") == "a [___]b"
    assert live.js("$('steps').value") == "32" and "left to right" in live.js("document.title")


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
    assert live.js("proofText()") == "ab<b>b<"
    live.js("changesShown()[0].focus()")
    live.press("space")
    assert live.js("proofText()") == "ab/b<"
    live.js("$('accept').click()")
    assert live.js("proofText()") == "ab<b>b<"
    live.js("$('reject').click()")
    live.press("space")
    live.js("$('use').click()")
    assert live.js("$('typed').value") == live.js("proofText()") == "ab<b>b <"
