"""Sampling draws from the model's distribution, keeps what it was given, names mistakes in one sentence."""

import itertools
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, Toy, chain_rule, run_mdlm
from hypothesis import given, settings
from hypothesis import strategies as st

import common
import sample
import text

V, T = 3, 4
FIXED = torch.Generator


def draws(model, n, seed=0, **how):
    """(n, T) samples from nothing but [MASK]."""
    return sample.generate(model, torch.full((n, T), V), generator=FIXED().manual_seed(seed), **how)


def chi_square(x, p):
    """The chi-square statistic of samples (n, T) against p over all 81 outcomes, in standard deviations."""
    index = (x * V ** torch.arange(T - 1, -1, -1)).sum(1)
    seen, expected = index.bincount(minlength=V**T).double(), p * len(x)
    big = expected >= 5  # the rest are one class
    pool = lambda c: torch.cat((c[big], c[~big].sum()[None]))
    terms = (pool(seen) - pool(expected)) ** 2 / pool(expected).clamp(min=1e-9)
    df = len(terms) - 1
    return (terms.sum().item() - df) / (2 * df) ** 0.5


# ------------------------------------------------------------------------------------------------------------
# Exactness, on a world whose posterior is known


@pytest.mark.parametrize(
    "how",
    [
        dict(order="ancestral", steps=200),
        dict(order="ancestral", steps=200, schedule="cosine"),
        dict(order="ancestral", steps=200, remask=0.02),
        dict(order="random", steps=T),
        dict(order="random", steps=50),
        dict(order="left_to_right", steps=T),
        dict(order="confidence", steps=T),
        dict(order="margin", steps=T),
        dict(order="entropy", steps=T),
        dict(order="confidence", steps=T, block=2),
    ],
    ids=str,
)
def test_one_token_at_a_time_in_any_order_is_exact(world, how):
    """The posterior is exact, so whatever chooses the positions by what is visible gives the distribution."""
    assert abs(chi_square(draws(Toy(world.exact, V, T), 10_000, **how), world.p)) < 4.5


def test_few_steps_are_biased_and_one_step_is_the_product_of_marginals(world):
    onehot = torch.nn.functional.one_hot(world.x, V).double()  # (81, T, V)
    marginals = torch.einsum("n,niv->iv", world.p, onehot)
    product = (onehot * marginals).sum(-1).prod(1)
    x = draws(Toy(world.exact, V, T), 20_000, order="one_shot")
    assert abs(chi_square(x, product)) < 4.5
    distance = [
        chi_square(draws(Toy(world.exact, V, T), 20_000, order="random", steps=steps), world.p)
        for steps in (1, 2, 4)
    ]
    assert distance[0] > distance[1] > 10 > abs(distance[2])


def test_an_autoregressive_model_is_sampled_exactly(world):
    """Its logits at i are those of token i, given the tokens before it: model(shift_right(x))."""

    def causal(xt):
        out = torch.zeros(*xt.shape, V, dtype=torch.float64)
        for i in range(T):
            seen = torch.full_like(xt, V)
            seen[:, :i] = xt[:, 1 : i + 1]
            out[:, i] = world.exact(seen)[:, i]
        return out

    assert abs(chi_square(draws(Toy(causal, V, T, objective="ar"), 20_000), world.p)) < 4.5


def test_temperature_1_and_top_p_1_change_nothing_and_top_k_1_is_the_likeliest(world):
    toy = Toy(world.random, V, T)
    plain = draws(toy, 500, order="random", steps=3)
    same = dict(temperature=1.0, temperature_end=1.0, top_p=1.0, top_k=V)
    assert torch.equal(plain, draws(toy, 500, order="random", steps=3, **same))
    greedy = draws(toy, 500, order="random", steps=3, temperature=0)
    assert torch.equal(greedy, draws(toy, 500, order="random", steps=3, top_k=1))
    assert not torch.equal(greedy, plain)


def test_filters_keep_exactly_the_tokens_that_they_name():
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log().expand(4000, -1)
    u = (torch.arange(4000) + 0.5).double() / 4000
    share = lambda **how: (
        sample.draw(logits, u, **(dict(temperature=1, top_k=0, top_p=1.0) | how))
        .bincount(minlength=4)
        .div(4000)
        .tolist()
    )
    assert share() == pytest.approx([0.1, 0.4, 0.3, 0.2], abs=1e-3)
    assert share(top_k=2) == pytest.approx([0, 4 / 7, 3 / 7, 0], abs=1e-3)
    assert share(top_p=0.75) == pytest.approx([0, 4 / 9, 3 / 9, 2 / 9], abs=1e-3)
    assert share(top_p=0.7 - 1e-6) == pytest.approx([0, 4 / 7, 3 / 7, 0], abs=1e-3)
    assert share(temperature=0.5) == pytest.approx([x / 30 for x in (1, 16, 9, 4)], abs=1e-3)


def test_draws_over_50000_classes_match_in_the_tail():
    n, rows = 50_000, 2000
    p = 1 / torch.arange(1, n + 1).double()
    logits = (p / p.sum()).log().float()
    u = sample.uniform(3, 1, torch.arange(rows), 1, "token")[:, 0]
    token = torch.cat([sample.draw(logits.expand(250, -1), part, 1.0, 0, 1.0) for part in u.split(250)])
    edges = torch.tensor([0, 1, 10, 100, 1000, 5000, 10_000, 20_000, 35_000, n])
    expected = torch.stack(
        [(p / p.sum())[a:b].sum() for a, b in itertools.pairwise(edges.tolist())]
    )  # the last class holds 3 %
    seen = torch.histogram(token.double(), edges.double()).hist
    chi2 = ((seen - rows * expected) ** 2 / (rows * expected)).sum().item()
    assert chi2 < 8 + 4.5 * 4, chi2
    # Inverting the distribution function at an even grid leaves no error but rounding.
    even = (torch.arange(250) + 0.5).double() / 250
    grid = sample.draw(logits.expand(250, -1), even, 1.0, 0, 1.0)
    assert torch.equal(grid, torch.searchsorted(torch.softmax(logits.double(), 0).cumsum(0), even))


def test_uniform_numbers_depend_on_seed_sample_step_and_position_alone():
    a = sample.uniform(5, 7, torch.arange(6), 40, "reveal")
    assert torch.equal(a[3:5, :11], sample.uniform(5, 7, torch.tensor([3, 4]), 11, "reveal"))
    others = [(6, 7, "reveal"), (5, 8, "reveal"), (5, 7, "remask"), (5, 7, "token")]
    for seed, step, purpose in others:
        b = sample.uniform(seed, step, torch.arange(6), 40, purpose)
        assert not (a == b).any() and b.min() >= 0 and b.max() < 1


def test_guidance_is_the_published_formula(world):
    x, w = torch.tensor([[1, V, V, 2]]), 1.5
    model = Toy(world.exact, V, T)
    got = sample.predict(model, "cpu", x, x == V, torch.tensor([0]), 0, T, w)
    with_, without = world.exact(x).float(), world.exact(torch.full_like(x, V)).float()
    assert torch.allclose(got, without + (1 + w) * (with_ - without))


def test_the_score_of_a_text_is_the_left_to_right_chain_rule(world):
    model, x = Toy(world.random, V, T), world.x
    whole = sample.chain_rule(model, x).sum(1)
    assert torch.allclose(whole, -T * chain_rule(world.random, x, V, range(T)), atol=1e-5)
    head = sample.chain_rule(model, x[:, :2]).sum(1)
    tail = sample.chain_rule(model, x, torch.full((81,), 2), torch.full((81,), T)).sum(1)
    assert torch.allclose(head + tail, whole)


@pytest.mark.parametrize("parts", [["a", None, "c"], [2, "b"], [None, "b", None], ["a", 1, None]], ids=str)
def test_candidates_are_the_likeliest_fills_of_all_lengths(world, parts):
    tokenizer, model = text.Tokenizer("char", list("abc")), Toy(world.random, V, T)
    found = sample.hypotheses(
        model, tokenizer, parts, 100, 600, 2, "cpu", FIXED().manual_seed(0), order="random", temperature=3.0
    )
    gaps = [range(1, 3) if p is None else (p,) if isinstance(p, int) else (None,) for p in parts]
    texts = set()
    for lengths in itertools.product(*gaps):
        pieces = [
            [p] if n is None else ["".join(c) for c in itertools.product("abc", repeat=n)]
            for p, n in zip(parts, lengths, strict=True)
        ]
        texts |= {"".join(t) for t in itertools.product(*pieces) if len("".join(t)) <= T}
    start = 0 if not isinstance(parts[0], str) else 1

    def score(t):
        ids = torch.tensor([tokenizer.encode(t) + [V] * (T - len(t))])
        return sample.chain_rule(model, ids, torch.tensor([start]), torch.tensor([len(t)])).sum().item()

    best = sorted(texts, key=score, reverse=True)
    assert [tokenizer.decode(f.ids) for f in found] == best[: len(found)]
    assert len(found) == min(len(best), 100) and found[0].logp == pytest.approx(score(best[0]), abs=1e-5)


# ------------------------------------------------------------------------------------------------------------
# Whatever the options


@settings(max_examples=150, deadline=None)
@given(
    x=st.lists(st.lists(st.integers(0, V), min_size=1, max_size=11), min_size=1, max_size=4),
    order=st.sampled_from(sorted(sample.ORDERS)),
    steps=st.integers(1, 12),
    schedule=st.sampled_from(["linear", "cosine"]),
    threshold=st.sampled_from([0.0, 0.4, 0.9]),
    block=st.integers(0, T),
    remask=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    top_k=st.integers(0, 4),
    top_p=st.sampled_from([1e-9, 0.5, 1.0]),
    cfg=st.sampled_from([0.0, 2.0]),
    end_id=st.sampled_from([None, 2]),
    ar=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_given_tokens_stay_nothing_is_left_masked_and_a_row_does_not_depend_on_its_batch(
    world, x, ar, seed, **how
):
    width = len(x[0])
    x = torch.tensor([(row * width)[:width] for row in x])
    model = Toy(lambda xt: world.random(xt), V, T, objective="ar" if ar else "mdlm")
    if ar:
        how["order"] = "left_to_right"
    run = lambda rows: sample.generate(
        model, x[rows], generator=FIXED().manual_seed(seed), samples=rows, fill=fill[rows], **how
    )
    fill = x == V
    out = run(torch.arange(len(x)))
    assert out.shape == x.shape and out.max() < V and out.min() >= 0
    assert torch.equal(out[~fill], x[~fill])
    assert torch.equal(out, run(torch.arange(len(x))))
    if how["block"] == 0 and width <= T:  # with blocks: among rows with the same gaps
        last = torch.tensor([len(x) - 1])
        assert torch.equal(out[last], run(last))


def test_the_network_is_called_at_most_once_a_step_and_not_when_nothing_is_revealed(world):
    batches = []
    model = Toy(lambda xt: batches.append(len(xt)) or world.random(xt), V, T)
    for order, steps in itertools.product(sample.ORDERS, (1, 3, 50)):
        batches.clear()
        *_, last = sample.unmask(model, torch.full((6, T), V), steps=steps, order=order)
        assert len(batches) <= (1 if order == "one_shot" else steps)
        assert last.calls.max() <= T and last.calls.sum() == sum(batches)
    calls = []
    for threshold in (0.0, 0.35):
        *_, last = sample.unmask(model, torch.full((50, T), V), order="confidence", threshold=threshold)
        calls.append(last.calls.double().mean())
    assert calls[1] < calls[0] == T


def test_steps_that_are_watched_add_up_to_the_text(world):
    model, x = Toy(world.random, V, T), torch.full((30, T), V)
    before, remasked = x.clone(), 0
    for step in sample.unmask(model, x, steps=9, order="random", remask=0.5):
        changed = before != step.x
        assert torch.equal(changed | (step.remasked & step.revealed), step.revealed | step.remasked)
        assert len(step.logp) == step.revealed.sum() and (step.x[step.remasked] == V).all()
        before, remasked = step.x, remasked + step.remasked.sum()
    assert remasked > 0 and before.max() < V


def test_behind_a_drawn_end_there_is_nothing(world):
    x = torch.full((200, T), V)
    out = sample.generate(Toy(world.random, V, T), x, generator=FIXED().manual_seed(0), end_id=2)
    ended = (out == 2).cumsum(1) > 0
    assert ended.any() and (out[ended] == 2).all()
    x[:, 3] = 0
    out = sample.generate(Toy(world.random, V, T), x, generator=FIXED().manual_seed(0), forbid=(2,))
    assert not (out == 2).any()


def test_the_cosine_schedule_and_the_annealed_temperature_are_what_they_say(world, monkeypatch):
    assert sample.left_after(1, 2, "cosine") == pytest.approx(2**-0.5)
    model, T = Toy(lambda xt: torch.zeros(*xt.shape, V), V, 32), 32
    counts = [
        step.revealed.sum().item()
        for step in sample.unmask(model, torch.full((1, T), V), steps=8, order="random", schedule="cosine")
    ]
    left = [int(T * sample.left_after(s, 8, "cosine") + 1e-9) for s in range(9)]
    assert counts == [a - b for a, b in itertools.pairwise(left) if a > b] and counts[0] < counts[-1]
    heats, draw = [], sample.draw
    monkeypatch.setattr(
        sample, "draw", lambda logits, u, heat, *rest: heats.append(heat) or draw(logits, u, heat, *rest)
    )
    for how in (dict(), dict(block=8)):  # blocks do not begin anew
        heats.clear()
        how |= dict(steps=8, order="random", temperature=1.0, temperature_end=0.3)
        list(sample.unmask(model, torch.full((1, T), V), **how))
        assert heats == pytest.approx([1 - 0.1 * s for s in range(8)])


def test_a_long_text_takes_its_steps_by_the_context_and_sees_what_came_before():
    L, V, seen = 8, 5, []
    model = Toy(lambda xt: seen.append(xt.clone()) or torch.zeros(*xt.shape, V), V, L)
    x = torch.full((1, 20), V)
    x[0, :6] = torch.arange(6) % V
    *_, last = sample.unmask(model, x, steps=4, order="left_to_right")  # blocks of 4, two steps each
    assert last.calls.item() == len(seen) == 1 + 3 * 2 + 1 and (last.x < V).all()
    for xt, end in zip(seen, (8, 8, 12, 12, 16, 16, 20, 20), strict=True):
        known = xt[0] < V
        assert torch.equal(xt[0][known], last.x[0, end - L : end][known])
        assert known[: L - 4].all()  # all that was there before the block
    assert [n for *_, n in sample.plan(model.config, 20, 1, "random", 0)] == [1] * 5


def test_the_log_probability_is_that_of_the_tokens_that_count(world):
    """By hand, from the steps; behind an [END] nothing counts."""
    tokenizer, model = text.Tokenizer("char", list("ab"), end=True), Toy(world.random, V, T)
    options = SimpleNamespace(num_samples=40, watch=False, html="", seed=3)
    how = dict(steps=4, order="random", block=0, end_id=2)
    found = [facts for _, facts in sample.sampled(model, tokenizer, [T], options, how, "cpu", [])]
    logp, x = torch.zeros(40, T, dtype=torch.float64), torch.full((40, T), V)
    for step in sample.unmask(model, x, seed=3, **how):
        for (row, i), p in zip(step.revealed.nonzero().tolist(), step.logp, strict=True):
            logp[row, i] = p[step.x[row, i]].double()
    for row, ids in enumerate(step.x.tolist()):
        n = ids.index(2) + 1 if 2 in ids else T
        assert found[row]["logprob"] == pytest.approx(logp[row, :n].sum().item(), abs=1e-6)
    assert 0 < (step.x == 2).any(1).sum() < 40


# ------------------------------------------------------------------------------------------------------------
# The program


@pytest.fixture(scope="module", params=["char", "byte", "word", "bpe", "documents", "ar"])
def run(request, text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param)
    flags = {
        "documents": ["--separator=\\n\\n"],
        "ar": ["--objective=ar"],
        "bpe": ["--tokenizer=bpe", "--vocab_size=400"],
    }.get(request.param, [f"--tokenizer={request.param}"])
    flags += [*TINY, "--max_steps=3", "--eval_windows=8"]
    assert run_mdlm(f"--data={text_file}", *flags, f"--out_dir={out}") == 0
    return SimpleNamespace(kind=request.param, out=out)


def page_samples(page):
    """What viewer.write_page wrote into a page."""
    found = re.search(
        r"<script[^>]*application/json[^>]*>(.*?)</script>", page.read_text(encoding="utf-8"), re.S
    )
    return json.loads(found[1])["samples"]


def replay(sample):
    """The text that the frames of a page end with; every step reveals or masks, with a confidence."""
    shown = [t if given else None for t, given in zip(sample["tokens"], sample["given"], strict=True)]
    for frame in sample["frames"]:
        for i, token, sure, others in frame:
            assert not sample["given"][i] and (token is None or 0 < sure <= 1 and others)
            shown[i] = token
    return "".join(shown)


@pytest.fixture
def say(capsys):
    """Run sample.py in this process: (exit code, standard output, standard error)."""

    def call(run, *args):
        capsys.readouterr()
        code = common.run(sample.main, [f"--out_dir={run.out}", "--device=cpu", *args])
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return call


def test_every_tokenizer_keeps_prompts_and_templates(run, say):
    steps = [] if run.kind == "ar" else ["--steps=5"]
    r = say(run, "--prompt=The ", "--num_samples=3", "--json=-", *steps)
    assert r.code == 0, r.err
    lines = [json.loads(line) for line in r.out.splitlines()]
    assert len(lines) == 3 and all(d["text"].startswith("The ") for d in lines)
    assert {"text", "steps", "calls", "seconds", "logprob"} <= lines[0].keys() and lines[0]["logprob"] < 0
    assert lines[0]["calls"] <= lines[0]["steps"] <= 32
    page = run.out / "page.html"
    shown = say(
        run, "--prompt=The ", f"--html={page}", "--json=-", *([] if steps == [] else ["--remask=0.3"])
    )
    assert replay(page_samples(page)[0]) == json.loads(shown.out)["text"]
    longer = say(run, "--prompt=The ", "--length=100", "--json=-")
    assert longer.code == 0
    if run.kind in ("char", "ar"):
        assert len(json.loads(longer.out)["text"]) == 100
    if run.kind == "ar":
        return
    for template in ("To b██ or ██t", "a\nb█\n\nc"):
        d = json.loads(say(run, f"--infill={template}", "--json=-").out)
        pieces, at = [p for p in template.split("█") if p], 0
        for piece in pieces:
            at = d["text"].index(piece, at) + len(piece)
        assert d["template"] == template and "█" not in d["text"] and d["text"].endswith(pieces[-1])


@pytest.mark.parametrize("run", ["char"], indirect=True)
class TestCharacters:
    def test_unknown_gaps_and_candidates(self, run, say):
        d = json.loads(say(run, "--infill=The [___] of", "--max_gap=3", "--json=-").out)
        assert d["text"].startswith("The ") and d["text"].endswith(" of") and 1 <= len(d["fills"][0]) <= 3
        r = say(run, "--infill=The ██ of", "--candidates=4")
        assert r.code == 0 and len(r.out.splitlines()) == 4 and r.out.count("log p") == 4
        d = json.loads(say(run, "--infill=The ██ of", "--candidates=4", "--json=-").out)
        assert d["score"] == d["candidates"][0]["score"] < 0 and d["calls"] > 0
        shares, texts = ([c[key] for c in d["candidates"]] for key in ("share", "text"))
        assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
        assert len(set(texts)) == 4 and d["text"] == texts[0]

    def test_batch_answers_line_by_line(self, run, say, tmp_path):
        file = tmp_path / "templates"
        file.write_text("The ██ of\na [___] b\n█\n", encoding="utf-8")
        r = say(run, f"--batch={file}", "--max_gap=2")
        lines = [json.loads(line) for line in r.out.splitlines()]
        assert [d["template"] for d in lines] == ["The ██ of", "a [___] b", "█"]
        assert say(run, f"--batch={file}", "--max_gap=2", f"--json={tmp_path}/x").out == ""
        again = [json.loads(line) for line in (tmp_path / "x").read_text().splitlines()]
        assert [d["text"] for d in again] == [d["text"] for d in lines]
        file.write_text("The ██\nThe \u2603 █\n", encoding="utf-8")
        r = say(run, f"--batch={file}")
        assert (r.code, r.out) == (2, "") and "line 2" in r.err and "position 4" in r.err

    def test_a_line_of_json_is_one_line_to_every_reader(self, run, say, monkeypatch):
        text = "a\x85b\u2028c\u2029d\ne"
        monkeypatch.setattr(sample, "to_texts", lambda *_: [(text, True)])
        lines = say(run, "--num_samples=2", "--json=-").out.splitlines()
        assert [json.loads(line)["text"] for line in lines] == [text] * 2

    def test_top_shows_probabilities_and_fills_nothing(self, run, say):
        r = say(run, "--infill=Th██", "--top=3")
        assert r.code == 0 and len(r.out.splitlines()) == 2 and r.out.count("%") == 6
        assert r.out.splitlines()[0].startswith("token    3")

    def test_watch_is_plain_lines_in_a_pipe_and_colour_in_a_terminal(self, run, say):
        r = say(run, "--infill=Th██ is", "--watch", "--steps=4")
        assert r.code == 0 and "\x1b" not in r.out + r.err
        assert r.err.splitlines()[0] == "step 0 of 4: 5 of 7 tokens" and "7 of 7 tokens" in r.err
        command = [sys.executable, "sample.py", f"--out_dir={run.out}", "--watch", "--steps=4", "--length=30"]
        main, side = pty.openpty()
        environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"}
        p = subprocess.Popen(command, cwd=ROOT, stdout=side, stderr=side, env=environment)
        os.close(side)
        shown = b""
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
        assert p.wait(60) == 0 and b"\x1b[" in shown and "░".encode() in shown and b"step 4 of 4" in shown

    def test_templates_come_from_standard_input(self, run):
        command = [sys.executable, "sample.py", f"--out_dir={run.out}", "--infill=-", "--json=-"]
        r = subprocess.run(command, cwd=ROOT, input="one\ntw█\n", capture_output=True, text=True)
        assert r.returncode == 0 and json.loads(r.stdout)["text"].startswith("one\ntw"), r.stderr

    def test_the_page_holds_every_sample(self, run, say, tmp_path):
        page = tmp_path / "page.html"
        r = say(run, "--num_samples=2", "--length=20", f"--html={page}", f"--json={tmp_path}/texts")
        assert r.code == 0, r.err
        texts = [json.loads(line)["text"] for line in (tmp_path / "texts").read_text().splitlines()]
        assert [replay(s) for s in page_samples(page)] == texts and len(texts) == 2

    def test_a_reader_that_leaves_and_a_full_disk_get_no_traceback(self, run):
        command = f"{sys.executable} sample.py --out_dir={run.out} --num_samples=300 --steps=1 --length=9"
        full = ("> /dev/full", "--json=/dev/full") if Path("/dev/full").is_char_device() else ()
        for end in ("| head -n 1 > /dev/null", ">&-", *full):
            r = subprocess.run(f"{command} {end}", shell=True, cwd=ROOT, capture_output=True, text=True)
            assert "Traceback" not in r.stderr and r.stderr.count("\n") <= 1, r.stderr
            assert ("full" in end) == (r.returncode == 2 and "No space" in r.stderr), (end, r)

    def test_the_same_seed_gives_the_same_text(self, run, say):
        shown = [say(run, f"--seed={seed}", "--num_samples=2", "--json=-").out for seed in (1, 1, 2)]
        texts = [[json.loads(line)["text"] for line in s.splitlines()] for s in shown]
        assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]
        assert json.loads(say(run, "--seed=1", "--json=-").out)["text"] == texts[0][0]

    @pytest.mark.parametrize(
        "args, words",
        [
            (["--infill=nothing"], ["nothing to fill"]),
            (["--infill="], ["empty"]),
            (["--infill=a█", "--prompt=b"], ["contradict"]),
            (["--infill=ab█\u2603"], ["\u2603", "position 3"]),
            (["--prompt=\u2603"], ["\u2603", "position 0"]),
            (["--infill=█" + "a" * 40], ["41 tokens", "32"]),
            (["--prompt=" + "a" * 40], ["40 tokens", "32", "--length"]),
            (["--out_dir=nowhere"], ["nowhere", "mdlm.py"]),
            (["--promt=a"], ["--promt", "--prompt"]),
            (["--steps=0"], ["steps"]),
            (["--order=best"], ["best", "ancestral"]),
            (["--order=one_shot", "--steps=5"], ["one_shot", "steps"]),
            (["--block=33"], ["33", "32"]),
            (["--candidates=3"], ["--candidates", "--infill"]),
            (["--infill=a█", "--candidates=3", "--num_samples=2"], ["contradict"]),
            (["--infill=a█", "--length=9"], ["contradict"]),
            (["--cfg=1"], ["--cfg", "--prompt"]),
            (["--infill=[___] a", "--top=2"], ["known length"]),
            (["--infill=a [___]"], ["behind a gap", "--prompt"]),
            (["--infill=a[___][___]b"], ["behind a gap"]),
            (["--infill=a [___] b", "--num_samples=3"], ["--candidates"]),
            (["--batch="], ["--batch", "no file"]),
            (["--html=-"], ["--html", "no file"]),
            (["--infill=██", "--cfg=1"], ["--cfg"]),
            (["--temperature_end=-0.5"], ["temperature_end"]),
            (["--json=" + "a" * 300], ["name too long"]),
            (["--batch=nowhere"], ["nowhere", "cannot be read"]),
            (["--html=nowhere/x.html"], ["nowhere", "cannot be written"]),
            (["--json=-", "--watch"], ["contradict"]),
        ],
        ids=lambda a: a[0] if a[0].startswith("--") else "",
    )
    def test_a_mistake_gets_one_sentence_and_exit_code_2(self, run, say, args, words):
        r = say(run, *args)
        assert r.code == 2 and r.out == ""
        assert r.err.count("\n") == 1 and all(word in r.err for word in words), r.err

    def test_a_text_that_is_not_utf_8_gets_one_sentence(self, run, say):
        for flag in ("--prompt=a\udcff", "--infill=a\udcff█"):
            r = say(run, flag, "--json=-")
            assert (
                (r.code, r.out) == (2, "") and r.err.count("\n") == 1 and "not UTF-8 from position 1" in r.err
            )
        command = [sys.executable, "sample.py", f"--out_dir={run.out}", "--infill=-"]
        strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
        r = subprocess.run(command, cwd=ROOT, input=b"a\xff", capture_output=True, env=strict)
        assert r.returncode == 2 and r.stderr.count(b"\n") == 1 and b"not UTF-8" in r.stderr, r.stderr

    def test_a_batch_is_checked_whole_before_its_first_line_is_answered(self, run, say, tmp_path):
        (tmp_path / "b").write_text("a█\n██\n", encoding="utf-8")
        r = say(run, f"--batch={tmp_path / 'b'}", "--cfg=1")
        assert (r.code, r.out) == (2, "") and "line 2" in r.err and "--cfg" in r.err


def test_ids_are_shown_apart_and_only_known_ones_are_taken(tmp_path, say):
    config = sample.mdlm.Config(n_layer=1, n_head=1, n_embd=32, block_size=16, out_dir=str(tmp_path))
    model = sample.mdlm.Model(config, 50, None)
    sample.mdlm.save(config, text.Tokenizer("id", 50), model.state_dict(), {}, dict(step=1))
    run = SimpleNamespace(out=tmp_path)
    ids = [int(i) for i in say(run, "--prompt=1 2 3", "--length=10").out.split()]
    assert len(ids) == 10 and ids[:3] == [1, 2, 3] and max(ids) < 50
    ids = [int(i) for i in say(run, "--infill=1 2██3").out.split()]
    assert len(ids) == 5 and (ids[:2], ids[4]) == ([1, 2], 3)
    for wrong in ("50", "99", "1" * 30, "a", "-1"):
        r = say(run, f"--prompt=1 {wrong}")
        assert (r.code, r.out) == (2, "") and wrong[:20] in r.err and "below 50" in r.err, r.err


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [65, 50_257])
def test_memory_is_bounded_for_256_samples_of_1024_tokens(vocabulary, tmp_path):
    """Peak memory of the whole program, at the widest: all positions in one step, and by confidence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in letters for b in letters][: vocabulary - 256] if vocabulary > 256 else []
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    bpe = Tokenizer(models.BPE(vocab, merges))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = text.Tokenizer("bpe", bpe.to_str()) if merges else text.Tokenizer("char", letters[:65])
    assert tokenizer.vocab_size == vocabulary
    config = sample.mdlm.Config(
        n_layer=1, n_head=2, n_embd=64, block_size=1024, dropout=0.0, preset="cpu", out_dir=str(tmp_path)
    )
    model = sample.mdlm.Model(config, vocabulary, None)
    sample.mdlm.save(config, tokenizer, model.state_dict(), {}, dict(step=1))
    program = (
        "import resource, sys; sys.argv[0] = 'sample.py'; import common, sample\n"
        "code = common.run(sample.main, sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, file=sys.stderr); sys.exit(code)"
    )
    for how in (["--order=one_shot"], ["--order=confidence", "--steps=2"]):
        command = [
            sys.executable,
            "-c",
            program,
            f"--out_dir={tmp_path}",
            "--num_samples=256",
            "--json=-",
            *how,
        ]
        r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert r.returncode == 0 and len(r.stdout.splitlines()) == 256, r.stderr
        peak = float(r.stderr.split()[-1])
        print(f"vocabulary {vocabulary}, {how[0]}: peak {peak:.2f} GiB")
        assert peak < 3


@pytest.mark.parametrize("run", ["ar"], indirect=True)
@pytest.mark.parametrize("flag", ["--infill=a█", "--order=random", "--steps=3", "--remask=0.1"])
def test_an_autoregressive_model_refuses_what_it_cannot(run, say, flag):
    r = say(run, flag)
    assert r.code == 2 and "autoregressive" in r.err and r.err.count("\n") == 1
    assert say(run, "--order=left_to_right", "--length=20").code == 0


def test_the_shipped_weights_answer_where_there_is_no_run(tmp_path):
    command = [sys.executable, str(ROOT / "sample.py"), "--infill=The k██g is d███."]
    r = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode == 0 and r.stdout.startswith("The king is d"), r.stdout + r.stderr
    assert "weights/" in r.stderr and r.stderr.count("\n") == 1
    size = sum(f.stat().st_size for f in (ROOT / "weights").rglob("*"))
    assert size <= 24 << 20
