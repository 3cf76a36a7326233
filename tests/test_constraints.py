"""Gaps that must match a regular expression: every fill does, drawn as the definition says."""

import itertools
import json
import math
import re
import sys
import time
from functools import partial

import numpy as np
import pytest
import tokenizer_kinds
import torch
from conftest import Toy
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import mdlm
import sample
from nanomdlm.kernels import operations as kernels
from nanomdlm.support.cli import entry
from nanomdlm.support.constrain import automaton as automata
from nanomdlm.support.constrain import build_automaton
from nanomdlm.support.constrain.automaton import automaton_of
from nanomdlm.support.data.tokenizer import Tokenizer, build_tokenizer
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import filling, filters, templates
from nanomdlm.support.infill.templates import Gap

pytest.importorskip("outlines_core")
LETTERS = Tokenizer("char", list("abcd"))
V = 4
L = 32
RUN_BUILDER = automata.run_builder
slow = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def builds_here():
    """Automata are built without a process of their own; one test below is of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automata, "run_builder", in_this_process)
        yield
    automata.byte_automaton.cache_clear()
    automata.automaton_of.cache_clear()


def in_this_process(pattern):
    try:
        return np.array(build_automaton.build(pattern), np.int32)
    except ValueError as e:
        raise UserError(e) from None


class Double(Toy):
    """A Toy whose logits stay in float64."""

    def __call__(self, view, rows=None):
        if isinstance(view, torch.Tensor):
            view = self.objective.view(view, rows=rows)
        ids = view.ids
        if view.causal:
            ids = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=self.mask_id)
        logits = self.logits(ids)
        return logits if view.rows is None else logits.flatten(0, 1)[view.rows]

    def parameters(self):
        return iter([torch.zeros(1)])


def table_model(V=V, T=L, sharpness=3.0, seed=0, **config):
    """Each visible token moves the logits of each position."""
    g = torch.Generator().manual_seed(seed)
    table = sharpness * torch.randn(T, T, V, V + 1, generator=g, dtype=torch.float64)

    def logits(xt):
        near = torch.nn.functional.one_hot(xt, V + 1).double()
        return torch.einsum("bju,ijvu->biv", near, table) / T**0.5

    return Double(logits, V, T, **config)


def all_texts(letters, n):
    return ["".join(text) for text in itertools.product(letters, repeat=n)]


# ---- The distribution


def fills_of(model, x, pattern, length, start, **settings):
    """The last Step of x (B, T) whose tokens from `start` on must match."""
    matches = {start: sample.matching(pattern, length, LETTERS)}
    *_, step = sample.unmask(model, x, matches=matches, **settings)
    return step


def direct(model, x, pattern, length, start):
    """{fill: p} of one row: the product of the marginals, given that the fill matches."""
    logp = model.logits(x)[0].log_softmax(-1)
    p = {}
    for text in all_texts("abcd", length):
        ids = torch.tensor(LETTERS.encode(text))
        old = x[0, start : start + length]
        if re.fullmatch(pattern, text) and ((old == V) | (old == ids)).all():
            at = torch.arange(start, start + length)[old == V]
            p[text] = logp[at, ids[old == V]].sum().exp().item()
    total = sum(p.values())
    return {text: value / total for text, value in p.items()}


@pytest.mark.parametrize("standing", [{}, {4: 1}, {3: 0, 6: 0}], ids=str)
@pytest.mark.parametrize("pattern", ["a?b+[cd]*a?", "(ab|c){2,3}a?", "(a|b|cd)*"])
def test_one_call_draws_the_product_of_marginals_given_a_match(pattern, standing):
    model = table_model(T=8, sharpness=6.0)
    x = torch.full((1, 8), V)
    x[0, 0] = 2
    for place, id in standing.items():
        x[0, place] = id
    want = direct(model, x, pattern, 4, 3)
    n = 2500
    step = fills_of(model, x.repeat(n, 1), pattern, 4, 3, order="one_shot", seed=3)
    texts = [LETTERS.decode(ids) for ids in step.x[:, 3:7].tolist()]
    assert set(texts) <= set(want)
    # The probability of each fill, token by token.
    found = {}
    logp = iter(step.logp.split(step.drawn.sum(1).tolist()))
    for row, text in enumerate(texts):
        mine = next(logp)
        at = step.drawn[row].nonzero()[:, 0].tolist()
        inside = [i for i in at if 3 <= i < 7]
        ps = [mine[at.index(i), step.x[row, i]] for i in inside]
        found.setdefault(text, sum(ps).exp().item())
    for text, p in found.items():
        assert abs(p - want[text]) < 1e-12
    assert abs(sum(want[text] for text in found) - 1) < 0.01
    # And what is drawn: chi-square in standard deviations, rare fills as one class.
    counts = {text: texts.count(text) for text in want}
    often = [text for text in want if n * want[text] >= 5]
    cells = [(counts[text], n * want[text]) for text in often]
    rest = n - sum(count for count, _ in cells), n - sum(e for _, e in cells)
    cells += [rest] if rest[1] >= 5 else []
    df = len(cells) - 1
    chi2 = sum((count - e) ** 2 / e for count, e in cells)
    assert not df or (chi2 - df) / (2 * df) ** 0.5 < 4.5


def test_marginals_far_below_the_smallest_number_lead_to_no_dead_end():
    """Weights of e^-30000 are compared as others are."""
    logits = torch.zeros(L, V, dtype=torch.float64)
    logits[:, 0] = 10_000
    logits[:, 1] = -20_000
    logits[:, 2] = -20_000 + torch.log(torch.tensor(3.0))
    model = Double(lambda xt: logits.expand(len(xt), L, V), V, L)
    x = torch.full((500, L), V)
    step = fills_of(model, x, "[bc]{8}", 8, 2, order="one_shot", seed=1)
    c = (step.x[:, 2:10] == 2).double()
    assert set(step.x[:, 2:10].flatten().tolist()) == {1, 2} and abs(c.mean() - 0.75) < 0.02


# ---- A pattern that everything matches

ALL_SETTINGS = [
    dict(order="ancestral"),
    dict(order="spread", redraw="sweep", spacing=2),
    dict(order="confidence", temperature=0.7, top_k=3),
    dict(order="entropy", top_p=0.8, correct=0),
    dict(order="margin", cfg=2.0),
    dict(order="random", block=16),
    dict(temperature=0),
]


@pytest.mark.parametrize("asked", ALL_SETTINGS, ids=str)
def test_a_pattern_that_everything_matches_changes_no_draw(asked):
    """To the bit."""
    model = table_model()
    x = torch.full((6, L), V)
    x[:, ::5] = 1
    asked = dict(asked, steps=12, seed=9)
    free = list(sample.unmask(model, x, **asked))
    gap = sample.matching("(?s:.*)", 4, LETTERS)
    matches = {1: gap, 6: gap}
    for step, other in zip(free, sample.unmask(model, x, matches=matches, **asked), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(step[1:], other[1:]))


# ---- Every fill matches


@st.composite
def patterns(draw, depth=3):
    """Regular expressions of a, b, c, d: alternations, classes, counts, optional parts."""
    kind = draw(
        st.sampled_from(["atom", "atom", "both", "or", "count"]) if depth else st.just("atom")
    )
    if kind == "atom":
        return draw(st.sampled_from([*"abcd", "[ab]", "[^a]", "[b-d]", ".", "a", "\\w", "(?i:B)"]))
    one = draw(patterns(depth=depth - 1))
    if kind == "count":
        least = draw(st.integers(0, 3))
        counts = ["*", "+", "?", f"{{{least}}}", f"{{{least},}}", f"{{{least},{least + 2}}}"]
        lazy = draw(st.sampled_from(["", "", "?"]))
        return f"(?:{one}){draw(st.sampled_from(counts))}{lazy}"
    other = draw(patterns(depth=depth - 1))
    return one + other if kind == "both" else f"({one}|{other})"


WAYS = st.fixed_dictionaries(
    dict(steps=st.sampled_from([1, 3, 8]), seed=st.integers(0, 99)),
    optional=dict(
        order=st.sampled_from([name for name in sample.ORDERS if name != "one_shot"]),
        correct=st.sampled_from(["auto", "0"]),
        redraw=st.sampled_from(["low_confidence", "sweep"]),
        spacing=st.integers(1, 4),
        temperature=st.sampled_from([0.0, 0.3, 2.0]),
        top_k=st.sampled_from([1, 2]),
        top_p=st.sampled_from([1e-9, 0.5]),
        cfg=st.sampled_from([1.0, 50.0]),
        block=st.sampled_from([1, 5, 16]),
    ),
) | st.sampled_from([dict(steps=3, correct="2"), dict(threshold=0.6), dict(entropy_bound=0.5)])


def matched(pattern, way, seed, model, kind):
    """Fill two gaps in each of two rows; both match the pattern, by Python's re too."""
    try:
        automaton = automaton_of(pattern, LETTERS)
    except UserError as e:
        # Counts of \w within counts may be refused, as there are so many letters in Unicode.
        assert "no text" in str(e) or ("too large" in str(e) and "\\w" in pattern)
        return
    lengths = [n for n in automaton.lengths(24) if n]
    if not lengths:
        return
    rng = np.random.default_rng(seed)
    first, second = rng.choice(lengths, 2)
    if kind in ("ar", "blocks"):  # what follows a gap is not seen
        second = 0
        way = {name: way[name] for name in way if name not in ("cfg", "block")}
        if kind == "ar":
            way.pop("order", None)
    T = int(2 + first + second)
    x = torch.full((2, T), V)
    x[:, 0] = 1
    if second:
        x[:, 1 + first] = 2
    places = {1: int(first)} | ({2 + int(first): int(second)} if second else {})
    matches = {at: sample.matching(pattern, n, LETTERS) for at, n in places.items()}
    run = partial(sample.generate, model, x, matches=matches)
    try:
        found = run(**way)
    except UserError:  # settings that this kind of model does not take
        assert kind != "plain"
        found = run(seed=seed)
    for row in found.tolist():
        for at, n in places.items():
            text = LETTERS.decode(row[at : at + n])
            assert re.fullmatch(pattern, text) and V not in row, (pattern, text, way)


def block_network():
    """A network of blocks of 4, with random weights."""
    flags = dict(n_layer=2, n_head=2, n_embd=16, block_size=52, block_length=4, dropout=0.0)
    torch.manual_seed(1)
    model = mdlm.make_model(mdlm.Config(**flags), V, kernels.REFERENCES).double().eval()
    for p in model.parameters():
        p.data.normal_(0, 0.5)
    return model


MODELS = dict(
    plain=table_model(T=52),
    long=table_model(T=16),  # texts beyond the context
    ar=table_model(T=52, objective="ar"),
    blocks=block_network(),
)
KINDS = st.sampled_from([*["plain"] * 5, "long", "ar", "blocks"])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(patterns(), WAYS, st.integers(0, 99), KINDS)
@example("(a|b)*a(a|b){4}", dict(steps=3, seed=0, order="confidence"), 0, "plain")
@example("(ab|c){3,9}", dict(steps=8, seed=0), 0, "blocks")
@example("(ab|c){2,9}d?", dict(threshold=0.6, seed=1), 1, "plain")
@example("(ab|c){2,9}d?", dict(entropy_bound=0.5, seed=2), 2, "plain")
@example("(a|bc)+d", dict(steps=8, seed=0), 0, "long")
@example("ab?|b?c", dict(steps=8, seed=0, temperature=0.0, cfg=50.0), 1, "plain")
def test_every_fill_matches(pattern, way, seed, kind):
    matched(pattern, way, seed, MODELS[kind], kind)


@settings(max_examples=40, deadline=None)
@given(patterns())
@example("a|ab")
@example("a*?|b")
@example("(|a)(b|bc)?")
def test_automata_agree_with_python(pattern):
    """Over characters: each text of up to five letters is taken or refused as re.fullmatch does."""
    accepts = automata.byte_automaton(pattern)[1]
    automaton = automaton_of(pattern, LETTERS) if accepts.any() else None
    for n in range(4):
        for text in all_texts("abcd", n):
            matches = bool(re.fullmatch(pattern, text))
            assert automaton.matches(text) == matches
            assert automaton.takes(LETTERS.encode(text)) == matches


@pytest.mark.parametrize("pattern", ["|\U0010ffff", "\U0010ffff?", "((.|.){2})?", ".?"])
def test_a_fill_may_have_what_marks_the_end_of_patterns(pattern):
    """U+10FFFF and U+10FFFE, also where it may be empty."""
    letters = "a\U0010fffe\U0010ffff"
    tokenizer = Tokenizer("char", list(letters))
    automaton = automaton_of(pattern, tokenizer)
    for n in range(4):
        for text in all_texts(letters, n):
            assert automaton.takes(tokenizer.encode(text)) == bool(re.fullmatch(pattern, text))


# ---- What is shown


@pytest.fixture(scope="module")
def made(pydoc):
    """name -> Tokenizer of 6,000 characters."""
    text = pydoc[:6000] + "\nThe value of a class (x) the val e"
    known = {"id": Tokenizer("id", 40, 3)}

    def make(name):
        if name not in known and name in OWN:
            known[name] = build_tokenizer(name, 500, False, lambda: [(text, False)], len(text))
        elif name not in known:
            known[name] = Tokenizer("file", tokenizer_kinds.KINDS[name](text).to_str())
        return known[name]

    return make


OWN = ("char", "byte", "word", "bpe")
SHOWN = [
    "The [██:[a-z]+] of a class",
    "The[██: ?[a-z]{2,}] of a class",
    "[██:[A-Za-z ]+] of ([██:[a-z]+( [a-z]+)*]) the",
    "The [___:(val|[xyz])[a-z]*] of a",
    "The [___|value|class|thing] of a",
    "val[██:[a-z]+] of █[██:.*] x",
    "The [___:[^a-z]+]",
]
NUMBERS = ["1 [██:[0-9 ]+] 2", "1 [___:\\d+ 3\\d] 2", "[██:1\\d 2\\d]", "1 [___|10 12|4]"]


def whole_pattern(template, tokenizer):
    """What a filled template must match, as Python reads it."""
    parts = []
    for segment in templates.split(template, templates.gap_pattern(tokenizer)):
        is_text = isinstance(segment, str)
        parts.append(re.escape(segment) if is_text else segment.pattern or "(?s:.*)")
    return "".join(map("(?:{})".format, parts))


@pytest.mark.parametrize("name", [*OWN, *tokenizer_kinds.KINDS, "id"])
def test_what_is_shown_matches(made, name):
    """Spaces that belong to tokens, pieces of words, bytes: the text counts, not the ids."""
    tokenizer = made(name)
    T = 24
    logits = torch.randn(T, tokenizer.vocab_size, generator=torch.Generator().manual_seed(0))
    model = Double(lambda xt: logits.expand(len(xt), -1, -1), tokenizer.vocab_size, T)
    filled = 0
    for template in NUMBERS if name == "id" else SHOWN:
        try:
            texts = sample.write(model, tokenizer, template, n=2, steps=4)
        except UserError:
            assert name == "words"
            continue
        filled += 1
        for text in texts:
            assert re.fullmatch(whole_pattern(template, tokenizer), text), (template, text)
    assert filled >= 3


# ---- Ranking


@pytest.mark.parametrize(
    "template, pattern",
    [
        ("a[___:b[cd]?|c{3}]d", "a(b[cd]?|c{3})d"),
        ("a[___|b|dcb||cc]d", "a(b|dcb||cc)d"),
        ("[██:a?.b?]c[___:d*]b", "(a.|.b)cd{0,3}b"),
        ("a[___|b|cc]d[___|a|bb]c", "a(b|cc)d(a|bb)c"),
    ],
)
def test_a_search_lists_all_that_match(template, pattern, monkeypatch):
    """Of all lengths, proven. (test_search.py compares their probabilities.)"""
    monkeypatch.setattr(filling, "N_LENGTHS", 16)
    model = table_model(T=8, sharpness=1.0)
    found = sample.search(model, LETTERS, template, top=1000, max_gap=3, limit=10_000)
    all_that_match = {
        text for n in range(1, 9) for text in all_texts("abcd", n) if re.fullmatch(pattern, text)
    }
    assert {one.text for one in found} == all_that_match
    assert found.proven and found.bound == -math.inf


def test_a_gap_at_the_end_of_a_text_counts_the_line_break():
    """Without it the shortest text would always be the likeliest."""
    lines = Tokenizer("char", list("abc\n"))
    logits = torch.zeros(10, 4)
    logits[1:4, 1] = 5.0  # bbb, then a line break
    logits[4, 3] = 5.0
    model = Double(lambda xt: logits.expand(len(xt), -1, -1).double(), 4, 10)
    assert sample.write(model, lines, "a[___:b+]", max_gap=6) == ["abbb"]
    assert sample.write(model, lines, "a[___|b|bbb|bbbb]") == ["abbb"]


# ---- What is refused

REFUSED = [
    # (a gap, gaps that are accepted instead)
    ("[___:a(b]", "[___:a(b)]", "[___:a\\(b]"),
    ("[___:^a$]", "[___:a]", "[___:\\^?a]"),
    ("[___:a++b]", "[___:a+b]"),
    # A set with [ for Python, a class within a class for the library; and their differences.
    ("[___:[:[a]b]]", "[___:[:\\[a]b]"),
    ("[___:[a&&b]]", "[___:[a\\&b]]"),
    ("[___:[a--b]]", "[___:[ab-]]"),
    ("[___:[a~~b]]", "[___:[a~b]]"),
    ("[___:(?=a)a]", "[___:a]"),
    ("[___:(a|b)\\1]", "[___|aa|bb]"),
    ("[___:\u00e9+]", "[___:a+]"),
    ("[___:" + "b" * (1 << 16) + "c]", "[___:b{9}c]"),
    ("[___:a", "[___:a]", "\\[___:a█"),
    ("[███:ab]", "[██:ab]", "[___:ab]"),
    ("[___|]", "[___|a|]"),
    ("[___:a]█", "[█:a]█"),
]


@pytest.mark.parametrize("gap, better", [(gap, better) for gap, *better in REFUSED])
def test_a_refused_pattern_can_be_mended(gap, better):
    """One sentence before any call of the network, from which each way out works."""

    def fail(xt):
        raise AssertionError("the network was called")

    letters = Tokenizer("char", list("abc()^&[:"))
    with pytest.raises(UserError) as refused:
        sample.write(Double(fail, 9, L), letters, f"a{gap}b")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
    logits = torch.zeros(L, 9)
    model = Double(lambda xt: logits.expand(len(xt), -1, -1), 9, L)
    for one in better:
        assert sample.write(model, letters, f"a{one}b", steps=2)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b)*a(a|b){14}",  # 2^15 states
        "((\\w{50}){50}){50}",
        pytest.param("a{10000}(b{10000}|c{10000}){9999}", marks=slow),
    ],
)
def test_a_large_automaton_is_refused_in_bounded_time_and_memory(pattern, monkeypatch):
    """In a process of its own, which limits itself and is stopped."""
    monkeypatch.undo()
    monkeypatch.setattr(automata, "run_builder", RUN_BUILDER)
    monkeypatch.setattr(automata, "SECONDS", 5)
    began = time.monotonic()
    with pytest.raises(UserError):
        automata.byte_automaton(pattern)
    assert time.monotonic() - began < 30


def test_the_process_builds_what_this_one_builds(monkeypatch):
    monkeypatch.setattr(automata, "run_builder", RUN_BUILDER)
    for pattern in ("a|ab", "[^é]{2}"):
        assert (automata.run_builder(pattern) == in_this_process(pattern)).all()
    with pytest.raises(UserError):
        automata.byte_automaton("a[^\\s\\S]")


def test_states_times_classes_are_bounded(monkeypatch):
    for name in ("MOST_CELLS", "MOST_STEPS"):
        with monkeypatch.context() as patch:
            automata.automaton_of.cache_clear()
            patch.setattr(automata, name, 20)
            with pytest.raises(UserError):
                automaton_of("[ab]{9}c", LETTERS)
    automata.automaton_of.cache_clear()
    assert automaton_of("[ab]{9}c", LETTERS).lengths(20) == [10]


def test_a_missing_package_is_one_sentence(monkeypatch):
    automata.byte_automaton.cache_clear()
    automata.automaton_of.cache_clear()
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(UserError):
        sample.write(table_model(), LETTERS, "a[___:b]c")


def test_what_python_callers_give_is_checked():
    model = table_model()
    x = torch.full((2, L), V)
    gap = sample.matching("ab*", 3, LETTERS)
    assert sample.generate(model, x, seed=0, matches={2: gap})[:, 2:5].tolist() == [[0, 1, 1]] * 2
    other = sample.matching("ab*", 3, Tokenizer("char", list("ab")))
    for matches in ({40: gap}, {L - 2: gap}, {2: gap, 4: gap}, {2: other}):
        with pytest.raises(UserError):
            sample.generate(model, x, matches=matches)
    with pytest.raises(UserError):
        sample.generate(model, x, matches={2: gap}, end_id=3)
    with pytest.raises(UserError):
        sample.matching("abc", 2, LETTERS)
    x[0, 3] = 0  # given, and no text that matches has it there
    with pytest.raises(UserError):
        sample.generate(model, x, seed=0, matches={2: gap})


def test_templates_are_read():
    def gap(pattern, length=None, choices=()):
        return Gap(length, pattern, choices)

    for template, want in {
        "a[___:[0-9]+]b": ["a", gap("[0-9]+"), "b"],
        "[██:a[]x]b\\]]c": [gap("a[]x]b\\]", 2), "c"],
        "[___:[^]]|\\]]": [gap("[^]]|\\]")],
        "[___|yes|no [sic\\]|]": [gap("yes|no\\ \\[sic\\]|", choices=("yes", "no [sic]", ""))],
        "[___|a\\|b|\\:|a.c]": [gap("a\\|b|:|a\\.c", choices=("a|b", ":", "a.c"))],
        "\\[███:a]": ["[", Gap(3), ":a]"],
        "\\[___:a]█": ["[___:a]", Gap(1)],
        "[███]": ["[", Gap(3), "]"],
    }.items():
        assert templates.split(template, templates.GAP) == want
    for text in ("yes", "a.b", "[x]|\\y", "a-b#c&d~e", "^é$", "x y\n"):
        pattern = automata.pattern_of_choices((text, "zz"))
        assert re.fullmatch(pattern, text) and not re.fullmatch(pattern, f"{text}z")
        table = automata.automaton_of(pattern, Tokenizer("byte"))
        assert table.matches(text) and not table.matches("a" + text)


def test_the_program_fills_what_must_match(short_run, tmp_path, capfd):
    """--infill, --batch and a text without a flag; ranked and plain; no call before all is read."""
    flags = [f"--out_dir={short_run}", "--json=-"]

    def run(*more):
        assert entry.run(sample.main, [*more, *flags]) == 0
        return [json.loads(line) for line in capfd.readouterr().out.splitlines()]

    (ranked_fill,) = run("--infill=The [___:[a-z]{2}|of] a", "--candidates=2")
    assert len(ranked_fill["candidates"]) == 2
    plain = run("the [██:[x-z]+] is", "--num_samples=3")
    batch = tmp_path / "batch"
    batch.write_text("a [___|yes|no]\n[█:[0-9]]█[█:[0-9]]\n", encoding="utf-8")
    one, two = run(f"--batch={batch}")
    fills = [one["text"] for one in ranked_fill["candidates"]]
    assert all(re.fullmatch("The [a-z]{2} a", text) for text in fills)
    assert all(re.fullmatch("the [x-z]{2} is", one["text"]) for one in plain)
    assert one["text"] in ("a yes", "a no") and re.fullmatch("(?s:[0-9].[0-9])", two["text"])
    batch.write_text("a█\na[___:(]\n")
    assert entry.run(sample.main, [f"--batch={batch}", *flags]) == 2
    out = capfd.readouterr()
    assert not out.out and "line 2 of" in out.err and "not a regular expression" in out.err


def test_partial_fills_share_what_follows_them():
    """A search asks for the tokens at each offset of many fills that end alike."""
    texts = ["".join(letters) + "ab" * 40 for letters in itertools.product("abcd", repeat=4)]
    automaton = automaton_of("|".join(texts), LETTERS)
    ahead = {(): automaton.accepts}
    began = time.process_time()
    for text in texts[::20]:
        ids = LETTERS.encode(text)
        for k in range(len(ids) - 1):
            part = [*ids[:k], *[-1] * (len(ids) - k - 1), ids[-1]]
            allowed = filters.matching(automaton, part, k, ahead)
            assert allowed[ids[k]] and (k < 4 or allowed.sum() == 1)
    assert time.process_time() - began < 10  # each by itself: a minute


def test_what_follows_is_remembered_right(monkeypatch):
    """Also if the memo is full and begins anew."""
    monkeypatch.setattr(filters, "MAX_SUFFIXES", 3)
    automaton = automaton_of("(ab|ba|c)*d(aa|b)*", LETTERS)
    ahead = {(): automaton.accepts}
    g = torch.Generator().manual_seed(0)
    for _ in range(300):
        n = int(torch.randint(1, 9, (), generator=g))
        ids = torch.randint(0, 4, (n,), generator=g)
        part = ids.masked_fill(torch.rand(n, generator=g) < 0.7, -1).tolist()
        k = int(torch.randint(0, n, (), generator=g))
        fresh = filters.matching(automaton, part, k, {(): automaton.accepts})
        assert torch.equal(filters.matching(automaton, part, k, ahead), fresh)
        assert len(ahead) <= 3 + 3 * 9
