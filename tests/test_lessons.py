"""The lessons: their checks accept right answers alone, their commands exist, minimal.py learns."""

import ast
import importlib.util
import itertools
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from conftest import ROOT, unknown_flags

import mdlm
import sample
from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels.reference import block_spans, is_visible
from nanomdlm.support.cli import entry
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.networks import pretrained
from nanomdlm.support.run import plots
from nanomdlm.support.view import View
from nanomdlm.support.web import viewer

LESSONS = ROOT / "lessons"


def load(name):
    spec = importlib.util.spec_from_file_location(name, LESSONS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load("check")
checks = load("checks")

# The right answers: lessons/solutions/NAME.py, by the lesson that asks for them.
LESSON_OF = {
    "mask": 1,
    "loss": 2,
    "network": 3,
    "schedule": 4,
    "tenths": 5,
    "bound": 6,
    "reverse": 7,
    "nucleus": 7,
    "parallel": 8,
    "order": 8,
    "sweep": 8,
    "fill": 9,
    "sure": 9,
    "twin": 10,
    "sees": 11,
    "decoder": 12,
    "match": 13,
}
RIGHT = {name: (LESSONS / "solutions" / f"{name}.py").read_text("utf-8") for name in LESSON_OF}
# The usual mistakes: solution, what is replaced in it, by what, a word of the sentence.
WRONG = {
    "bernoulli": ("mask", "order < l", "torch.rand(x0.shape) < l / x0.shape[1]", "exactly l"),
    "one order for all": ("mask", "torch.rand(x0.shape)", "torch.rand(x0[:1].shape)", "equally"),
    "the first l": ("mask", "order < l", "torch.arange(x0.shape[1]) < l", "equally"),
    "in place": ("mask", "torch.where(order < l,", "x0.masked_fill_(order < l, mask_id) #", "copy"),
    "a run of neighbors": (
        "mask",
        ".argsort(1)",
        ".argmax(1, True).add(torch.arange(x0.shape[1])) % x0.shape[1]",
        "equally",
    ),
    "masks shifted": ("mask", "mask_id, x0", "mask_id, x0.roll(1, 1)", "has changed"),
    "divided by the batch's masks": (
        "loss",
        "/ hidden.sum(1)).mean()",
        ").sum() / hidden.sum()",
        "own",
    ),
    "divided by all tokens": ("loss", ".sum(1) / hidden.sum(1)).mean()", ").mean()", "ln(1 / 0.9)"),
    "all tokens scored": ("loss", "hidden = xt == mask_id", "hidden = xt > -1", "ln(1 / 0.9)"),
    "bits": ("loss", "ce = F", "ce = 1.4427 * F", "ln(1 / 0.9)"),
    "no gradient": ("loss", ".mean()", ".mean().item()", "gradient"),
    "a causal mask": (
        "network",
        "scores.softmax",
        "scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf).softmax",
        "causal",
    ),
    "not scaled": ("network", " / q.shape[-1] ** 0.5", "", "not divided"),
    "scaled by D": ("network", " ** 0.5", "", "divided by D"),
    "a softmax over queries": ("network", ".softmax(-1)", ".softmax(-2)", "each key"),
    "no softmax": ("network", ".softmax(-1)", "", "take the softmax"),
    "keys ask": ("network", "q @ k.mT", "k @ q.mT", "exchanged"),
    "heads mixed": ("network", "scores.softmax", "scores.mean(1, True).softmax", "in each head"),
    "no row for [MASK]": ("network", "(V + 1) * C", "V * C", "row for [MASK]"),
    "a column for [MASK]": ("network", "C * V + V", "C * (V + 1) + V + 1", "no column"),
    "no positions": ("network", " + T * C", "", "places"),
    "no biases": ("network", "(near + attention", "(near - 9 * C + attention", "has a bias"),
    "a dense convolution": ("network", "5 * C + C", "5 * C * C + C", "no C x C"),
    "one layer": ("network", "layers * (near", "(near", "several"),
    "a loss in bits": ("schedule", "math.log(V)", "math.log2(V)", "in bits"),
    "to the base of 10": ("schedule", "math.log(V)", "math.log10(V)", "to 10"),
    "[MASK] among the guesses": ("schedule", "math.log(V)", "math.log(V + 1)", "not among"),
    "a probability, no loss": ("schedule", "math.log(V)", "1 / V", "it should be"),
    "no warm-up": ("schedule", "(step + 1) / (warmup + 1)", "1", "no warm-up"),
    "a first step of zero": ("schedule", "(step + 1) / (warmup + 1)", "step / warmup", "nothing"),
    "a decay from the start": ("schedule", "2 * (1 - step / steps)", "1 - step / steps", "half"),
    "no decay": ("schedule", "2 * (1 - step / steps)", "1", "straight line"),
    "a cosine": (
        "schedule",
        "2 * (1 - step / steps)",
        "1 + math.cos(math.pi * step / steps)",
        "straight line",
    ),
    "a sum": ("tenths", " / len(ce)", "", "plain mean"),
    "weights by rate": (
        "tenths",
        "sum(ce)",
        "sum(c / (i + 0.5) for i, c in enumerate(ce))",
        "plain",
    ),
    "the first tenth": ("tenths", "ce[1]", "ce[0]", "second tenth"),
    "the mean of the first two": ("tenths", "ce[1]", "(ce[0] + ce[1]) / 2", "second tenth"),
    "all sets alike": ("bound", "/ len(sets)", "/ 7 * 3", "mean over sets"),
    "sums over positions": ("bound", ".mean() /", ".sum() /", "bound of"),
    "the textbook weight forgotten": ("bound", "return total / T", "return total", "bound of"),
    "bits the other way": ("bound", "/ math.log(2)", "* math.log(2)", "ln 2"),
    "tokens the other way": (
        "bound",
        "tokens / characters",
        "characters / tokens",
        "shared by all",
    ),
    "one over steps": ("reverse", "1 / s)", "1 / steps)", "left at the end"),
    "one over steps, then all": ("reverse", "< 1 / s)", "< (1 / steps if s > 1 else 1))", "1/s"),
    "the likeliest": ("reverse", "torch.multinomial(p, 1)[:, 0]", "p.argmax(-1)", "too rarely"),
    "a fixed number": (
        "reverse",
        "(torch.rand(x.shape) < 1 / s)",
        "(torch.where(x == mask_id, torch.rand(x.shape), 2).argsort(1).argsort(1)"
        " < -(-(x == mask_id).sum(1, True) // s))",
        "on its own",
    ),
    "one call": (
        "reverse",
        "model(x)[now]",
        "model(torch.full_like(x, mask_id))[now]",
        "at the calls",
    ),
    "given tokens drawn": ("reverse", "(x == mask_id) &", "", "given"),
    "its argument changed": ("reverse", "x = x.clone()", "", "copy"),
    "a bar for each token": ("nucleus", "before < share", "sorted_p > share", "none is kept"),
    "the last one left out": (
        "nucleus",
        "before < share",
        "sorted_p.cumsum(-1) <= share",
        "is left out",
    ),
    "one too many": ("nucleus", "before < share", "before - sorted_p < share", "more is kept"),
    "not divided": ("nucleus", "return p / p.sum(-1, keepdim=True)", "return p", "sum to 1"),
    "left sorted": ("nucleus", ".scatter(-1, order, kept)", ".add(kept)", "sorted order"),
    "the unlikeliest": ("nucleus", "descending=True", "descending=False", "unlikely token"),
    "p halved in place": (
        "nucleus",
        "sorted_p, order = p",
        "sorted_p, order = p.mul_(0.5)",
        "copy",
    ),
    "without the half": ("parallel", " / 2", "", "half the sum"),
    "the largest difference": ("parallel", ".sum() / 2", ".max()", "half the sum"),
    "rows twice": ("parallel", "p.sum(0, keepdim=True)", "p.sum(1)[None]", "half the sum"),
    "the most doubtful": ("order", "entropy = -(", "entropy = (", "most doubtful"),
    "the visible chosen": ("order", ".masked_fill(~masked, torch.inf)", "", "visible"),
    "the likeliest token": (
        "order",
        "-(p * p.clamp(min=1e-30).log()).sum(-1)",
        "-p.amax(-1)",
        "likeliest token",
    ),
    "not a number": ("order", ".clamp(min=1e-30)", "", "0 ln 0"),
    "one more": ("order", "topk(n,", "topk(n + 1,", "n is 1"),
    "places, not a mask": (
        "order",
        "torch.zeros_like(masked).scatter(1, at, True)",
        "at",
        "(B, T) bool",
    ),
    "one place for all texts": (
        "order",
        "entropy.topk",
        "entropy.mean(0, keepdim=True).expand(len(p), -1).topk",
        "they should be",
    ),
    "an index": (
        "sweep",
        "min(s for s, q in zip(steps, quality) if",
        "min(i for i, q in enumerate(quality) if",
        "an index",
    ),
    "the last is not the best": ("sweep", "max(quality)", "quality[-1]", "should be"),
    "a fixed bar": ("sweep", "share * max(quality)", "share", "should be"),
    "the best itself": ("sweep", "q >= share * max(quality)", "q == max(quality)", "should be"),
    "all at once": (
        "fill",
        "        x[i] = token",
        "        x[i] = token\n        model = lambda _, m=model(x[None] * 0 + mask_id): m",
        "in place",
    ),
    "the fill in sight": (
        "fill",
        "model(x[None])",
        "model(torch.where(x == mask_id, token, x)[None])",
        "log p",
    ),
    "a mean": ("fill", "return total", "return total / len(fill)", "log p"),
    "no logarithm": ("fill", ".log_softmax(-1)", ".softmax(-1)", "log p"),
    "logits": ("sure", ".softmax(-1)", "", "not a probability"),
    "a softmax over positions": ("sure", ".softmax(-1)", ".softmax(0)", "at position 0"),
    "visible tokens predicted": (
        "sure",
        "torch.where(x == mask_id, p.amax(-1), 1.0)",
        "p.amax(-1)",
        "is certain",
    ),
    "a call for each position": (
        "sure",
        "model(x[None])[0]",
        "torch.stack([model(x[None])[0, i] for i in range(len(x))])",
        "3 calls",
    ),
    "no shift": ("twin", "return torch.cat(", "return x; (", "sees the token"),
    "a roll": ("twin", "torch.full_like(x[:, :1], bos)", "x[:, -1:]", "leak"),
    "shifted left": (
        "twin",
        "(torch.full_like(x[:, :1], bos), x[:, :-1])",
        "(x[:, 1:], torch.full_like(x[:, :1], bos))",
        "should be",
    ),
    "the first not scored": (
        "twin",
        "model(ar_inputs(x, bos)).mT, x)",
        "model(ar_inputs(x, bos)).mT[..., 1:], x[:, 1:])",
        "first included",
    ),
    "a sum over tokens": ("twin", ".mT, x)", '.mT, x, reduction="sum")', "mean of -log p"),
    "a leak": (
        "sees",
        "(reader == read, read < reader)",
        "(reader == read, read <= reader)",
        "own",
    ),
    "masks of earlier blocks": ("sees", "(reader == read,", "(read <= reader,", "earlier blocks"),
    "left to right in a block": (
        "sees",
        "(reader == read,",
        "((reader == read).tril(),",
        "whole",
    ),
    "clean text sees masks": (
        "sees",
        "torch.zeros(T, T, dtype=torch.bool)",
        "reader == read",
        "keeps",
    ),
    "clean text sees all": (
        "sees",
        ", read <= reader), 1)",
        ", (read <= reader) | True), 1)",
        "not written yet",
    ),
    "clean text blind": ("sees", "read <= reader", "read < reader", "does not see itself"),
    "clean text causal": ("sees", "read <= reader)", "(read <= reader).tril())", "a clean token"),
    "rows for columns": (
        "sees",
        "torch.cat((masked, clean))",
        "torch.cat((masked, clean)).T",
        "exchanged",
    ),
    "one block's calls": (
        "sees",
        "without = T * calls * (T // S)",
        "without = T * calls",
        "one block",
    ),
    "a cache that fills itself": ("sees", " + S * (T // S - 1)", "", "without masks"),
    "the last block cached": ("sees", "(T // S - 1)", "(T // S)", "followed by none"),
    "not aligned": ("decoder", "- (at > 0).long()", "+ 0 * at", "nothing is shifted"),
    "aligned the other way": (
        "decoder",
        "- (at > 0).long()",
        "+ (at < 5).long()",
        "wrong direction",
    ),
    "aligned by a roll": (
        "decoder",
        "- (at > 0).long()",
        "- 1 + 6 * (at[:1] == 0)",
        "wrapped around",
    ),
    "documents forgotten": ("decoder", "(at > 0)", "(at[:1] > 0)", "document before it"),
    "texts forgotten": (
        "decoder",
        "logits.take_along_dim(rows[..., None], 1)",
        "logits.flatten(0, 1).roll(1, 0).view(logits.shape)",
        "another text",
    ),
    "one row less": ("decoder", "[..., :-1]", "[:, 1:, :-1]", "T - 1 rows"),
    "[MASK] may be drawn": ("decoder", "[..., :-1]", "", "column of [MASK]"),
    "the column of token 0 left out": ("decoder", "[..., :-1]", "[..., 1:]", "column of token 0"),
    "the column hidden in place": (
        "decoder",
        "    rows =",
        "    logits[..., -1] = -torch.inf\n    rows =",
        "align changes logits",
    ),
    "probabilities": ("decoder", "[..., :-1]", "[..., :-1].softmax(-1)", "none of the rows"),
    "a mask row of zeros": (
        "decoder",
        "embedding.mean(0, keepdim=True)",
        "embedding[:1] * 0",
        "is zero",
    ),
    "a mask row of a token": (
        "decoder",
        "embedding.mean(0, keepdim=True)",
        "embedding[:1]",
        "of a token",
    ),
    "a sum of rows": ("decoder", "mean(0", "sum(0", "is not the mean"),
    "the mask in front": (
        "decoder",
        "(embedding, embedding.mean(0, keepdim=True))",
        "(embedding.mean(0, keepdim=True), embedding)",
        "in front",
    ),
    "the embedding centered": (
        "decoder",
        "((embedding,",
        "((embedding - embedding.mean(0),",
        "V tokens",
    ),
    "the embedding enlarged in place": (
        "decoder",
        "return torch.cat((embedding, embedding.mean(0, keepdim=True)))",
        "mean = embedding.mean(0)\n    embedding.resize_(6, 3)[-1] = mean\n    return embedding",
        "add_mask_row changes embedding",
    ),
    "memory of the caller": (
        "decoder",
        "return torch.cat((embedding, embedding.mean(0, keepdim=True)))",
        "whole = torch.cat((embedding, embedding.mean(0, keepdim=True)))\n"
        "    embedding.set_(whole[:-1])\n    return whole",
        "shares its memory",
    ),
    "all states accept": (
        "match",
        "accepts.to(p.dtype)",
        "torch.ones(len(next))",
        "a state accepts",
    ),
    "the likeliest match": ("match", ".sum(1))", ".amax(1))", "likeliest match"),
    "a state counted twice": ("match", ".sum(1))", ".sum(1) + accepts)", "counted twice"),
    "fills counted": ("match", "(row * b[0][next])", "b[0][next]", "p is left out, so"),
    "from the wrong end": ("match", "p.flip(0)", "p", "wrong end"),
    "states in place of tokens": (
        "match",
        "(row * b[0][next]).sum(1)",
        "torch.stack([(row * b[0][to])[[to.tolist().index(q) for q in to.unique()]].sum()"
        " for to in next])",
        "once",
    ),
    "a backward pass with rows divided": (
        "match",
        "torch.stack(b)",
        "torch.stack([row / row.max() for row in b])",
        "up to a factor",
    ),
    "one row of b too few": ("match", "torch.stack(b)", "torch.stack(b[1:])", "of shape (4, 8)"),
    "another value of b": ("match", "torch.stack(b)", "torch.stack(b) ** 2", "it should be"),
    "marginals changed": ("match", ".sum(1))", ".sum(1))\n        p.mul_(0.5)", "backward changes"),
    "the backward pass forgotten": ("match", " * b[i + 1][next[q]]", "", "dead end"),
    "what can be reached": ("match", "* b[i + 1][next[q]]", "* (b[i + 1][next[q]] > 0)", "above 0"),
    "b of the place before": ("match", "b[i + 1]", "b[i]", "dead end"),
    "b of the state itself": ("match", "b[i + 1][next[q]]", "b[i + 1][q]", "weights are 0"),
    "p twice": ("match", "= p[i] *", "= p[i] ** 2 *", "of p is counted twice"),
    "b twice": ("match", "b[i + 1][next[q]]", "b[i + 1][next[q]] ** 2", "of b is counted twice"),
    "b alone": ("match", "= p[i] *", "= 0 * p[i] +", "p is left out; the"),
    "the likeliest fill": (
        "match",
        "torch.multinomial(weight, 1)",
        "weight.argmax()",
        "the same fill",
    ),
    "the first state kept": ("match", "        q = next[q, v]\n", "", "follow the state"),
    "states in place of a fill": ("match", "append(v)", "append(int(next[q, v]) + 1)", "below 3"),
    "no fill": ("match", "return fill", "return None", "not a list"),
    "marginals weighed in place": (
        "match",
        "p[i] * b[i + 1][next[q]]",
        "p[i].mul_(b[i + 1][next[q]])",
        "draw changes",
    ),
}


def ask(tmp_path, lesson, source):
    file = tmp_path / "answer.py"
    file.write_text(source, encoding="utf-8")
    verdict, sentence = checks.judge(lesson, str(file))  # check.py does so in another process
    return check.EXIT_CODES[verdict], f"{verdict}: {sentence}\n"


@pytest.mark.parametrize("name", RIGHT)
def test_right_answer_passes(tmp_path, name):
    code, said = ask(tmp_path, LESSON_OF[name], RIGHT[name])
    assert (code, said[:7]) == (0, "right: "), said
    pages = [path.read_text("utf-8") for path in LESSONS.glob(f"{LESSON_OF[name]}_*.md")]
    assert len(pages) == 1 and said in pages[0], "the lesson prints what the checker says"


@pytest.mark.parametrize("mistake", WRONG)
def test_usual_mistake_is_named(tmp_path, mistake):
    name, old, new, word = WRONG[mistake]
    assert RIGHT[name].count(old) >= 1
    wrong = "import torch\n" + RIGHT[name].replace(old, new, 1)
    code, said = ask(tmp_path, LESSON_OF[name], wrong)
    assert (code, said[:7]) == (1, "wrong: "), said
    assert word in said and said.count("\n") == 1


def test_every_exercise_has_a_solution_that_its_lesson_names():
    exercises = {(lesson, each[1]) for lesson, several in checks.CHECKS.items() for each in several}
    solved = {
        (lesson, asked)
        for name, lesson in LESSON_OF.items()
        for _, *functions in checks.CHECKS[lesson]
        for asked in functions[:1]
        if f"def {asked}(" in RIGHT[name]
    }
    assert solved == exercises
    assert {path.stem for path in (LESSONS / "solutions").glob("*.py")} == set(LESSON_OF)
    for name, lesson in LESSON_OF.items():
        (page,) = LESSONS.glob(f"{lesson}_*.md")
        assert f"(solutions/{name}.py)" in page.read_text("utf-8"), name


def test_answers_to_two_exercises_may_be_in_one_file(tmp_path):
    both = RIGHT["reverse"] + RIGHT["nucleus"]
    code, said = ask(tmp_path, LESSON_OF["reverse"], both)
    assert code == 0
    code, said = ask(tmp_path, LESSON_OF["reverse"], RIGHT["mask"])
    assert code == 2 and "generate" in said and "top_p" in said


def test_answer_on_decoders_is_what_shifted_networks_do():
    """Rows of the library's features in the order in which tokens are predicted, documents too."""
    answer = {}
    exec(RIGHT["decoder"], answer)
    h = torch.randn(2, 6, 5)
    at = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3]])
    decoder = SimpleNamespace(config=SimpleNamespace(shift=True))
    decoder.embed = lambda ids: None
    decoder.encode = lambda embedded, view: h
    features = pretrained.Pretrained.features(decoder, View(at, at))
    assert torch.equal(features[..., :-1], answer["align"](h, at))


@pytest.mark.parametrize(
    "source, word",
    [
        ("def masks(x0, l, mask_id): ...", "no function mask"),
        ("def mask(x0, l: ...", "line 1"),
        ("def mask(x0, l, mask_id):\n    return x0[l, 7.5]", "line 2"),
        ("def mask(x0): ...", "TypeError"),
        ("raise SystemExit('bye')", "bye"),
        ("mask = 3", "no function mask"),
        ("mask = 3\0", "is not Python: source code string cannot contain null bytes\n"),
        ("raise type('Odd', (BaseException,), {})('no\\nline')", "Odd: no"),
    ],
)
def test_file_that_cannot_be_checked(tmp_path, source, word):
    code, said = ask(tmp_path, 1, source)
    assert code == 2 and word in said and said.count("\n") == 1


def test_endless_answer_is_stopped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "LIMIT", 0.3)
    (tmp_path / "a.py").write_text("while True:\n    print('x')")
    assert check.main(["2", str(tmp_path / "a.py")]) == 2
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("not checked: a.py took more than 0.3 s for lesson 2;")


# What an answer does beside answering, and a word of the last line; all of it at once is too much.
DISTURBING = """
import os, subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
os.chdir(os.sep)
print("\x1b[2J" + "much " * 10**6)
"""
SEVERE = {
    "ends Python": ("import os\nos._exit(0)", "ended Python (exit code 0) before"),
    "takes all memory": (
        "import torch\ntorch.empty(1 << 33)",
        "line 2 with a lack of memory; it may take 4 GB",
    ),
}


def test_answer_that_disturbs_is_checked_all_the_same(tmp_path):
    """Megabytes, threads and processes that go on, another folder, a closed stream."""
    last = "sys.stdout.close()\nprint = None\n"
    (tmp_path / "a.py").write_text(DISTURBING + RIGHT["parallel"] + last)
    command = [sys.executable, str(LESSONS / "check.py"), str(LESSON_OF["parallel"]), "a.py"]
    r = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    lines = r.stdout.splitlines()
    assert (r.returncode, r.stderr) == (0, "") and lines[-1].startswith("right: ")
    assert len(r.stdout) < 3000 and lines[0].startswith(r"| \x1b[2Jmuch much")
    assert "prints more" in lines[1]


@pytest.mark.parametrize("kind", SEVERE)
def test_answer_that_ends_its_process_is_one_sentence(kind, tmp_path, capsys):
    if kind == "takes all memory" and sys.platform != "linux":
        pytest.skip("no limit of memory")
    source, sentence = SEVERE[kind]
    (tmp_path / "a.py").write_text(source)
    assert check.main(["2", str(tmp_path / "a.py")]) == 2
    said = capsys.readouterr().out
    assert said.startswith("not checked: a.py ") and sentence in said and said.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# The texts: what they tell the reader to type exists


TEXTS = sorted(LESSONS.glob("*.md"))
PROGRAMS = ("mdlm.py", "sample.py", "eval.py")


def commands(path):
    """The `python ...` commands of a lesson, as lists of words."""
    found = re.findall(r"^(?:\$ )?python (.+)$", path.read_text(encoding="utf-8"), re.M)
    return [shlex.split(line, comments=True) for line in found]


def test_each_check_has_its_lesson():
    numbers = [int(path.name.split("_")[0]) for path in TEXTS if path.name[0].isdigit()]
    assert sorted(numbers) == list(checks.CHECKS)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_commands_of_a_lesson_exist(path):
    own = re.findall(r'^ +"(\w+)": Order\(', path.read_text(encoding="utf-8"), re.M)
    for program, *args in commands(path):
        args = list(itertools.takewhile(lambda word: word not in ("|", ">", "2>&1", "&&"), args))
        args = [word for word in args if word not in [f"--order={name}" for name in own]]
        if program in PROGRAMS:
            assert not unknown_flags(program.removesuffix(".py"), args), args
        elif program.startswith("lessons/"):
            assert (ROOT / program).is_file(), program
        else:
            assert program in ("-c", "-m") or "def " in path.read_text(encoding="utf-8"), program


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_of_a_lesson_resolve(path):
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert link.startswith("http") or (path.parent / link).exists(), link


SHOWN = re.compile(r"```python\n([^`]+)```\n\n(?:.+\n\n)?```\n([^`]+)```")
QUICK = ("mask_counts(", "lr_scale(")  # snippets whose output has no random digits


@pytest.mark.parametrize("lesson", ["1_masking", "4_a_training_run", "12_from_bert_to_a_writer"])
def test_quick_snippets_print_what_the_lesson_shows(lesson, capsys):
    found = SHOWN.findall((LESSONS / f"{lesson}.md").read_text(encoding="utf-8"))
    ((source, shown),) = [pair for pair in found if any(call in pair[0] for call in QUICK)]
    exec(source, {})
    assert capsys.readouterr().out == shown


def test_loss_by_hand_is_what_the_lesson_enumerates(capsys):
    """`tiny.py` of lesson 2 runs: all masks one by one, and a few random ones."""
    found = SHOWN.findall((LESSONS / "2_one_loss_by_hand.md").read_text(encoding="utf-8"))
    ((source, shown),) = [pair for pair in found if "itertools" in pair[0]]
    exec(source.replace("(1, 16, 256, 4096)", "(1, 16)"), {})
    assert capsys.readouterr().out.splitlines() == shown.splitlines()[:3]


def test_row_and_line_of_lesson_8_give_sample_an_order_and_a_schedule_of_its_own(
    capsys, monkeypatch
):
    text = (LESSONS / "8_steps_and_quality.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^    \"right_to_left\": Order.*\n", text, re.M)
    (line,) = re.findall(r"^    after = .*\n", text, re.M)
    (command,) = re.findall(r"^python sample.py (.*--order=right_to_left.*) 2>&1", text, re.M)
    (shown,) = re.findall(r"right_to_left.*?```\n\n```\n(.*?)\.\.\.\n```", text, re.S)

    source = (ROOT / "sample.py").read_text(encoding="utf-8")
    for before, new in [('    "one_shot": Order(', row), ("    k = masked.sum(1) - (chunk", line)]:
        assert source.count(before) == 1
        source = source.replace(before, new + before)
    own = ModuleType("own_sample")
    own.__file__ = str(ROOT / "sample.py")
    monkeypatch.setitem(sys.modules, "own_sample", own)
    exec(compile(source, "own_sample", "exec"), own.__dict__)
    command = command.replace("weights/shakespeare", str(ROOT / "weights/shakespeare"))
    assert own.main(shlex.split(command)) == 0

    frames = [line for line in capsys.readouterr().err.splitlines() if "█" in line]
    masks = [line.count("█") for line in frames]
    expected = [line.count("█") for line in shown.splitlines() if "█" in line]
    assert masks[: len(expected)] == expected == [48, 47, 46, 44]
    assert not [line for line in frames if "█" in line.lstrip("█")], "the masks are on the left"


# --------------------------------------------------------------------------------------------------
# The programs of the lessons


def test_minimal_is_plain_pytorch():
    source = (LESSONS / "minimal.py").read_text(encoding="utf-8")
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    assert names <= {"torch", "argparse", "os", "time", "pydoc_data", "sys", "signal"}


@pytest.mark.parametrize(
    "mistake", ["no file", "no text", "short", "template", "long", "empty", ""]
)
def test_minimal_answers_a_mistake_with_one_sentence(mistake, tmp_path):
    path = tmp_path / "text.txt"
    content = {"no text": b"\xff\xfe", "short": b"too short"}.get(mistake, b"To be or not. " * 100)
    if mistake != "no file":
        path.write_bytes(content)
    template = {"template": "x█", "long": "T" * 65, "empty": ""}.get(mistake, "To █e")
    command = [sys.executable, LESSONS / "minimal.py", path, "--seconds=0", "--template", template]
    r = subprocess.run(command, capture_output=True, text=True)
    assert r.returncode == (2 if mistake else 0) and "Traceback" not in r.stderr
    assert r.stderr.count("error:") == bool(mistake)
    assert bool(r.stdout) != bool(mistake)


def test_answer_on_the_network_counts_the_model_that_the_lesson_shows():
    """The code in the lesson is that of minimal.py, and its parameters are as many."""
    answer = {}
    exec(RIGHT["network"], answer)
    minimal = load("minimal")
    count = sum(p.numel() for p in minimal.Model(65).parameters())
    assert answer["parameters"](65, minimal.T, minimal.C, minimal.LAYERS) == count
    source = (LESSONS / "minimal.py").read_text("utf-8")
    (page,) = LESSONS.glob("*_the_network.md")
    blocks = re.findall(r"```python\n(.+?)```", page.read_text("utf-8"), re.S)
    for block in blocks[:-2]:
        for line in block.splitlines():
            assert line == "..." or line.partition("  # ")[0].removeprefix("return ") in source


def test_answer_on_schedules_is_what_a_run_does():
    answer = {}
    exec(RIGHT["schedule"], answer)
    config = mdlm.Config(warmup_steps=50)
    for step in range(600):
        expected = mdlm.lr_scale(config, step, step / 600)
        assert answer["scale"](step, 600, 50) == pytest.approx(expected)


def test_answer_on_blocks_is_what_the_library_sees():
    """Spans of `block_spans`: two ranges of columns for each row."""
    answer = {}
    exec(RIGHT["sees"], answer)
    for T, S in ((8, 2), (12, 4), (4, 1)):
        spans = block_spans(T, S, "cpu")
        columns = torch.arange(2 * T)
        found = is_visible(spans, columns)
        assert torch.equal(found.reshape(2 * T, 2 * T), answer["sees"](T, S))


def test_minimal_learns_and_fills_gaps(capsys, monkeypatch):
    minimal = load("minimal")
    monkeypatch.setattr(minimal, "BATCH", 8)
    clock = itertools.count()  # a step a second, whatever the machine
    monkeypatch.setattr(minimal, "time", SimpleNamespace(time=lambda: next(clock)))
    torch.manual_seed(0)
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7] * 200)
    model = minimal.Model(8)
    before = minimal.compute_loss(model, ids[:1024].view(-1, 64)).item()
    minimal.train(model, ids, 60)
    after = minimal.compute_loss(model, ids[:1024].view(-1, 64)).item()
    assert before > 1.9 and after < 0.5 * before, "ln 8 is 2.08"
    x = ids[:64][None].clone()
    x[:, 20:24] = model.mask_id
    given = x != model.mask_id
    filled = minimal.generate(model, x, steps=8)
    assert torch.equal(filled[given], x[given]) and (filled < 8).all()


def test_masking_statistics_are_of_both_processes():
    pictures = load("pictures")
    counts = pictures.count_masks()
    T = pictures.T
    for rate, (bernoulli, exact) in counts.items():
        assert len(bernoulli) == 1000 and set(exact) == {round(T * rate)}
        sd = (T * rate * (1 - rate)) ** 0.5
        assert abs(statistics.mean(bernoulli) - T * rate) < 4 * sd / 1000**0.5
        assert statistics.stdev(bernoulli) == pytest.approx(sd, rel=0.15)
    densities = pictures.schedule_densities()
    assert densities["uniform"] == pytest.approx([1] * T)
    assert sum(densities["cosine"]) == pytest.approx(T) and densities["cosine"][-1] > 3


def lively(end_id=None, **more):
    """A model of random weights, of two blocks with two heads of 16."""
    torch.manual_seed(0)
    config = mdlm.Config(n_layer=2, n_head=2, n_embd=32, block_size=16, dropout=0.0, **more)
    model = mdlm.make_model(config, 11, kernels.select("torch", "cpu"), end_id)
    for p in model.parameters():
        p.data.normal_(std=0.2)
    return model


@pytest.mark.parametrize("settings", [{}, dict(end_id=5), dict(objective="ar")], ids=str)
def test_attention_maps_are_what_attention_does(settings, monkeypatch):
    """With the identity as values (16 tokens, heads of 16) attention returns its probabilities."""
    model = lively(**settings)
    x = torch.randint(11, (1, 16), generator=torch.Generator().manual_seed(4))
    attention = model.ops.attention
    seen = []

    def spy(qkv, *rest):
        of_units = qkv.clone()
        of_units[:, :, 2] = torch.eye(16)[None, :, None]
        seen.append(attention(of_units, *rest)[0].transpose(0, 1))  # (H, T, T)
        return attention(qkv, *rest)

    monkeypatch.setattr(model.ops, "attention", spy)
    maps = load("pictures").attention_maps(model, x)
    assert list(maps) == [0, 1] and model.ops.attention is spy
    for found, expected in zip(maps.values(), seen, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_trajectories_show_the_text_after_each_step():
    pictures = load("pictures")
    model = lively()
    tokenizer = Tokenizer("char", list("abcdefghij\n"))
    x = torch.tensor([[0, 1, *[model.mask_id] * 6, 2]])
    texts = pictures.unmask(model, x, "left_to_right", 3, seed=1)
    assert torch.equal(texts[:1], x) and len(texts) == 4
    final = sample.generate(model, x, order="left_to_right", correct=0, seed=1, steps=3)
    assert torch.equal(texts[3:], final)
    lines = pictures.trajectory_cells(tokenizer, texts, model.mask_id)
    for k, line in enumerate(lines):
        n = 2 * k  # tokens drawn so far
        kinds = ["given"] * 2 + ["old"] * max(0, n - 2) + ["new"] * min(n, 2) + ["mask"] * (6 - n)
        faces = {None: "given", "#dddddd": "mask", plots.BLUE: "new", (plots.BLUE, 0.2): "old"}
        assert [faces[cell.face] for cell in line] == [*kinds, "given"]
        words = "".join(cell.text for cell in line).replace(" ", "")
        shown = [i for i in texts[k].tolist() if i != model.mask_id]
        assert words == tokenizer.decode(shown).replace("\n", "↵")


def test_two_orders_are_drawn_side_by_side(monkeypatch, tmp_path):
    pictures = load("pictures")
    drawn = []
    monkeypatch.setattr(pictures, "write_figure", lambda fig, path, **more: drawn.append(fig))
    shipped = f"--run={ROOT / 'weights' / 'shakespeare'}"
    args = ["--orders=random,spread", "--text=To ███ be", "--steps=2", shipped]
    assert entry.run(pictures.main, [str(tmp_path / "t.png"), *args]) == 0
    left, right = drawn[0].axes
    titles = [f"--order={order} --correct=0: 2 steps" for order in ("random", "spread")]
    assert [ax.get_title() for ax in (left, right)] == titles
    for ax in (left, right):
        assert len([p for p in ax.patches if p.get_facecolor()[:3] == (0, 0x72 / 255, 0xB2 / 255)])
        assert len(ax.patches) == 9, "three masks, before and after each of two steps"
        assert ax.get_ylim() == (3, 0)


def test_losses_by_rate_are_drawn_for_each_evaluation(monkeypatch, tmp_path, capsys):
    """The points are the values of the files, in their order, the legend names them."""
    pictures = load("pictures")
    drawn = []
    monkeypatch.setattr(pictures, "write_figure", lambda fig, path, **more: drawn.append(fig))
    ce = {"bert": [float(i) for i in range(10)], "writer": [None, *[2.0] * 9]}
    for name, values in ce.items():
        r = dict(checkpoint="run", crc=1, tokenizer=1, block_size=4, nelbo=2.0, ce=values)
        r |= dict(tokens_by_window=[4], by_window=[2.0])
        (tmp_path / f"{name}.json").write_text(json.dumps(r))
    monkeypatch.chdir(tmp_path)
    args = ["x.png", "--compare=bert.json,writer.json"]
    for more, theme in ([], plots.LIGHT), (["--dark"], plots.DARK):
        colors = (theme.red, theme.blue)
        assert entry.run(pictures.main, [*args, *more]) == 0
        (ax,) = drawn.pop().axes
        curves = [line for line in ax.lines if line.get_marker() == "o"]
        for curve, values, color in zip(curves, ce.values(), colors):
            assert list(curve.get_xdata()) == [*range(5, 100, 10)]
            given = [math.nan if y is None else y for y in values]
            assert list(curve.get_ydata()) == pytest.approx(given, nan_ok=True)
            assert curve.get_color() == color
        labels = [text.get_text() for text in ax.get_legend().get_texts()]
        assert labels == [f"{name}: NELBO 2.00, the area below" for name in ce]


# ---- The pictures beside their sentences
FIGURES = {  # the picture of each page, by its command; those of runs are drawn in other tests
    path.name: [args for program, *args in commands(path) if program == "lessons/pictures.py"]
    for path in TEXTS
}
SHIPPED = f"--run={ROOT / 'weights' / 'shakespeare'}"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_picture_of_a_lesson_is_there_light_and_dark_with_words_and_its_command(path):
    text = path.read_text(encoding="utf-8")
    assert "![" not in text, "a picture that is not for dark backgrounds too"
    found = re.findall(r"<picture>\n(.*?)</picture>", text, re.S)
    assert len(found) == text.count("<img ") == text.count("<picture>")
    for lines in found:
        dark = re.search(r'<source media="\(prefers-color-scheme: dark\)" srcset="(.+?)">', lines)[
            1
        ]
        light, alt = re.search(r'<img src="(.+?)" alt="(.*?)"', lines).groups()
        assert light != dark and light == dark.replace("_dark.", "_light.")
        assert len(alt) > 40, "say what is to be seen"
        for name in (light, dark):
            content = (path.parent / name).read_bytes()
            assert 1000 < len(content) < 80_000, name
        if light.startswith("pictures/"):
            shown = Path(light).name.replace("_light", "")
            assert re.search(rf"^python lessons/\w+\.py .*\b{shown}\b", text, re.M), shown


def test_each_picture_of_the_lessons_is_shown():
    words = "".join(path.read_text(encoding="utf-8") for path in TEXTS)
    for path in (LESSONS / "pictures").iterdir():
        assert f'"pictures/{path.name}"' in words, path


@pytest.mark.parametrize(
    "name, more",
    [
        *((name, []) for name in ("idea", "noise", "strips", "guesses", "look", "joint", "waves")),
        ("guesses", ["--dark"]),
        ("joint", ["--dark"]),
    ],
    ids=str,
)
def test_picture_is_drawn_by_the_command_beside_it(name, more, tmp_path, monkeypatch):
    (args,) = [a for figures in FIGURES.values() for a in figures if f"--draw={name}" in a]
    monkeypatch.chdir(tmp_path)
    args = [SHIPPED if word.startswith("--run=") else word for word in args]
    assert entry.run(load("pictures").main, [*args, *more]) == 0
    image = matplotlib_image(tmp_path / args[0])
    paper = (1, 1, 1) if not more else (0x0F / 255, 0x11 / 255, 0x18 / 255)
    assert image[0, 0, :3].tolist() == pytest.approx(paper, abs=0.02)
    assert image.shape[1] < 1300 and image[..., :3].std() > 0.03


def matplotlib_image(path):
    return pytest.importorskip("matplotlib.image").imread(path)


@pytest.fixture
def drawings(monkeypatch):
    """lessons/drawings.py with a list of the figures that it draws instead of writing them."""
    module = load("drawings")
    module.drawn = []
    monkeypatch.setattr(module, "write_figure", lambda fig, *args, **more: module.drawn.append(fig))
    return module


def words_of(fig):
    return [text.get_text() for ax in fig.axes for text in ax.texts]


def test_masks_of_the_noise_grow_with_the_rate(drawings):
    """A token that is masked stays so; each is masked with the probability of its row."""
    n = 4000
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(1)).tolist()
    masked = drawings.mask_at_rates([5] * n, uniform, 9)
    assert [*masked] == [0, 0.2, 0.5, 0.8, 1]
    for rate, ids in masked.items():
        assert set(ids) <= {5, 9}
        assert abs(ids.count(9) - rate * n) <= 4 * (n * rate * (1 - rate)) ** 0.5
    for few, many in itertools.pairwise(masked.values()):
        assert all(b == 9 for a, b in zip(few, many) if a == 9)


def test_noise_of_a_text_has_a_row_for_each_rate_and_masks_are_empty(drawings):
    theme = plots.LIGHT
    cells = drawings.noise_cells(["a", "\n", "c"], [False, False, True], theme)
    assert [(cell.text, cell.face) for cell in cells] == [
        ("a", None),
        ("↵", None),
        (" ", theme.mask),
    ]
    drawings.draw_noise({0: [cells], 0.5: [cells]}, None, theme)
    said = words_of(drawings.drawn[0])
    assert said.count("a") == 2 and "t = 0" in said and "t = 0.5" in said


def test_guesses_have_bars_as_long_as_their_probabilities(drawings):
    likeliest = [("b", 0.6), ("a", 0.3), ("c", 0.004)]
    wrong = dict(text="a", mark="x", likeliest=likeliest)
    right = dict(text="b", mark="+", likeliest=likeliest)
    given = dict(text="z", mark="", likeliest=[])
    drawings.draw_guesses([given, wrong, right], None, plots.LIGHT)
    (fig,) = drawings.drawn
    (ax,) = fig.axes
    bars = [p for p in ax.patches if p.get_height() == 0.9]
    widths = [bar.get_width() for bar in bars]
    assert [w / widths[0] for w in widths] == pytest.approx([1, 0.5, 1 / 150] * 2)
    blue = drawings.mixed(plots.BLUE, 0.45, plots.LIGHT)
    assert [bar.get_facecolor()[:3] == pytest.approx(blue) for bar in bars] == [
        *(False, True, False),
        *(True, False, False),
    ]
    assert "1 of 2 are right" in fig.get_suptitle()
    assert [w for w in words_of(fig) if "%" in w] == ["60%", "30%", "< 1%"] * 2


def test_look_of_a_mask_is_its_row_of_each_head(drawings):
    maps = torch.rand(2, 16, 16, generator=torch.Generator().manual_seed(0))
    drawings.draw_look(["a", "b", "?", "d"], maps, 2, None, plots.LIGHT)
    (ax,) = drawings.drawn[0].axes
    frames = [p for p in ax.patches if p.get_facecolor()[3] == 0]
    faces = [p.get_facecolor()[:3] for p in ax.patches if p.get_facecolor()[3]]
    assert [(p.get_x(), p.get_y()) for p in frames] == [(2, 0), (2, 1.6)]
    rows = maps[:, 2, :4]
    shares = (0.8 * rows / rows.max()).flatten().tolist()
    expected = [drawings.mixed(plots.BLUE, share, plots.LIGHT) for share in shares]
    assert [x for face in faces for x in face] == pytest.approx([x for e in expected for x in e])


def test_joint_table_is_beside_the_product_of_its_marginals(drawings):
    drawings.draw_joint([[0.5, 0.0], [0.25, 0.25]], None, plots.LIGHT)
    left, right = ([t.get_text() for t in ax.texts] for ax in drawings.drawn[0].axes)
    assert left == ["00", "50%", "01", "never", "10", "25%", "11", "25%"]
    assert right == ["00", "38%", "01", "12%\nnot in the data", "10", "38%", "11", "12%"]


def write_log(folder, opens, steps=400):
    """A run whose rates open after step `opens` (None: never)."""
    at = dict(step=0, tokens=0, seconds=0.0, val_nelbo=4.0, val_nelbo_se=0.0, val_bpc=None)
    records = [at]
    for step in range(20, steps + 1, 20):
        at = dict(step=step, tokens=step, seconds=float(step))
        margin = 0.5 if opens is None or step <= opens else 0.4
        records.append(at | dict(loss=2 + 1 / step, rate_margin=margin))
    records.append(at | dict(val_nelbo=2.5, val_nelbo_se=0.1, val_bpc=None))
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_losses_of_runs_are_drawn_with_the_reason_for_a_rise(drawings, tmp_path):
    write_log(tmp_path / "a", 200)
    write_log(tmp_path / "b", None)
    log = {name: plots.read_log(tmp_path / name) for name in "ab"}
    drawings.draw_losses(dict(a=log["a"]), None, plots.LIGHT)
    drawings.draw_losses(dict(b=log["b"]), None, plots.LIGHT)
    drawings.draw_losses(log, None, plots.LIGHT)
    drawings.draw_losses(dict(untrained=log["a"][:1]), None, plots.LIGHT)
    one, steady, two, untrained = drawings.drawn
    assert words_of(untrained) == ["before the first step: 4.00"]
    losses = [2 + 1 / step for step in range(20, 401, 20)]
    thin, bold = one.axes[0].lines[:2]
    assert list(thin.get_ydata()) == losses
    assert bold.get_ydata()[0] == pytest.approx(sum(losses[:5]) / 5) and len(bold.get_ydata()) == 16
    assert "before the first step: 4.00" in words_of(one)
    assert any("the line may rise" in word for word in words_of(one))
    assert "half of each text\nis masked" in words_of(one)
    assert not any("the line may rise" in word for word in words_of(steady) + words_of(two))
    names = [text.get_text() for text in two.axes[0].get_legend().get_texts()]
    assert names == ["a", "b"] and list(two.axes[0].lines[1].get_ydata()) == losses


def test_losses_are_those_of_the_run_that_is_named(tmp_path, monkeypatch, capsys):
    write_log(tmp_path / "out-first", 200)
    monkeypatch.chdir(tmp_path)
    main = load("pictures").main
    (args,) = [a for a in FIGURES["4_a_training_run.md"] if "--run=out-first" in a]
    assert entry.run(main, args) == 0 and (tmp_path / args[0]).stat().st_size > 5000
    assert entry.run(main, ["x.png", "--draw=losses", "--run=out-first,nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, name",
    [
        (["--draw=noise", SHIPPED, "--text=" + "a" * 65], "65"),
        (["--draw=look", SHIPPED, "--text=abc"], "abc"),
        (["--draw=losses", "--run=a,b,c,d,e"], "5"),
        (["--draw=rembrandt"], "rembrandt"),
        (["--run=nowhere", "--text=To be, or ███ to be"], "nowhere"),
    ],
    ids=str,
)
def test_drawing_that_cannot_be_is_one_sentence(flags, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert entry.run(load("pictures").main, ["x.png", *flags]) == 2
    said = capsys.readouterr().err
    assert name in said and said.count("\n") == 1 and not any(tmp_path.iterdir())


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path, capsys):
    main = load("pictures").main
    text = "--text=To be, or ███ to be"
    shipped = f"--run={ROOT / 'weights' / 'shakespeare'}"
    for name, flags in (("masking.png", []), ("attention.png", [text, shipped])):
        assert main([str(tmp_path / name), *flags]) == 0
        assert (tmp_path / name).stat().st_size > 20_000
    assert "128.0 +- 0.0" in capsys.readouterr().out


def test_animation_ends_on_the_text(tmp_path):
    animate = load("animate")
    frames = [[[1, "x", 0.5, []]], [[3, "b", 0.9, []], [1, "a", 0.9, []]]]
    about = dict(title="", text="<a&b", calls=2, seconds=0.1)
    made = dict(tokens=list("<a&b"), given=[True, False, True, False], frames=frames, **about)
    viewer.write_page(tmp_path / "page.html", [made], {})
    svg = tmp_path / "x.svg"
    assert entry.run(animate.main, [str(tmp_path / "page.html"), str(svg), "--dark"]) == 0
    root = ElementTree.parse(svg).getroot()
    style = root.find("{*}style").text
    stays = [t for t in root.findall("{*}text") if f".{t.get('class')}{{opacity:0" not in style]
    at_end = sorted((float(t.get("x")), t.text) for t in stays if t.get("class") != "c")
    assert "".join(text for _, text in at_end) == "<a&b"
    assert animate.THEMES["dark"]["ink"] in svg.read_text()


@pytest.mark.parametrize("name", ["infill_light.svg", "infill_dark.svg"])
def test_picture_of_the_readme_is_small(name):
    svg = ROOT / "results" / name
    assert svg.stat().st_size < 1 << 20 and "animation" in svg.read_text()
    ElementTree.parse(svg)


@pytest.mark.slow
def test_patterns_find_the_sweet_spot(tmp_path, capsys):
    patterns = load("patterns")
    assert patterns.sweet_spot([[0.0], [0.5], [0.96], [1.0]]) == 2
    shares = {name: [[0.1, 0.2]] * 6 for name in patterns.SAMPLERS}
    texts = [[("abab" * 16, True)] * 16] * 6
    patterns.draw(shares, [1.0] * 6, texts, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 20_000
    args = [str(ROOT / "weights" / "shakespeare"), str(tmp_path / "x.png")]
    assert entry.run(patterns.main, args) == 2
    assert "--data=patterns" in capsys.readouterr().err


def test_patterns_are_valid_by_the_periods_of_their_run():
    patterns = load("patterns")
    for n in range(1, 7):
        text = ("abcdef"[:n] * 20)[:64]
        assert patterns.is_pattern(text) == (n in (1, 2, 3, 4)), "one symbol repeats as two"
        assert patterns.is_pattern(text, (2, 5)) == (n <= 5)
        assert patterns.is_pattern(text, (6, 6)) == (n in (1, 2, 3, 6))


@pytest.mark.parametrize("n", [1, 4, 17])
def test_few_sequences_of_patterns_are_drawn_too(n, monkeypatch, tmp_path):
    """Up to 16 rows of each number of steps; there may be fewer."""
    patterns = load("patterns")
    drawn = []
    monkeypatch.setattr(patterns, "write_figure", lambda fig, *args, **more: drawn.append(fig))
    shares = {name: [[0.0, 1.0]] * 6 for name in patterns.SAMPLERS}
    patterns.draw(shares, [1.0] * 6, [[("abab" * 16, True)] * n] * 6, tmp_path / "p.png")
    grids = [ax for ax in drawn[0].findobj(match=type(drawn[0].axes[0])) if ax.images]
    assert [len(ax.images[0].get_array()) for ax in grids] == [min(n, 16)] * 6
    assert [len(ax.get_yticks()) for ax in grids] == [min(n, 16)] * 6


@pytest.mark.long
def test_tour_runs_from_top_to_bottom():
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    tour = nbformat.read(LESSONS / "tour.ipynb", 4)
    where = dict(metadata=dict(path=str(LESSONS)))
    began = time.monotonic()
    nbclient.NotebookClient(tour, timeout=300, resources=where).execute()  # raises if a cell does
    assert time.monotonic() - began < 300, "three minutes, were nothing else running"
    outputs = [output for cell in tour.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    printed = "".join(output.get("text", "") for output in outputs)
    assert len(pictures) == 7 and "0.1054" in printed
    assert "My lord, I pray you, brother, to the king" in printed, "an infill that convinces"
    assert "The king is dead!" in printed


def test_tour_is_shipped_with_its_pictures():
    tour = json.loads((LESSONS / "tour.ipynb").read_text(encoding="utf-8"))
    outputs = [output for cell in tour["cells"] for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 7
    assert not any(output["output_type"] == "error" for output in outputs)
    assert all(cell.get("outputs") or cell["cell_type"] == "markdown" for cell in tour["cells"][2:])


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/dev/null", "{tmp}"])
def test_minimal_reads_no_device_and_no_folder(tmp_path, path):
    path = path.format(tmp=tmp_path)
    command = [sys.executable, LESSONS / "minimal.py", path]
    r = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert r.returncode == 2 and not r.stdout and "Traceback" not in r.stderr


def test_minimal_reads_no_more_than_it_says(tmp_path):
    with open(tmp_path / "huge.txt", "w") as f:
        f.truncate(1 << 36)
    command = [sys.executable, LESSONS / "minimal.py", tmp_path / "huge.txt"]
    r = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert r.returncode == 2 and "10000000" in r.stderr


SAMPLE = dict(
    tokens=["a", "b"], given=[True, False], frames=[[[1, "b", 0.5, []]]], calls=1, seconds=0.1
)
OTHER_VALUES = (None, 5, "ab", [], [None], [[]], [None, None], {}, {"0": 1}, [[[0]]], [["ab"]])


@pytest.mark.parametrize("key", ["tokens", "given", "frames", "calls"])
def test_page_with_other_types_is_no_page(tmp_path, capsys, key):
    animate = load("animate")
    page = tmp_path / "page.html"
    entries = [[[99, "b"]], [[-1, "b"]], [["1", "b"]], [[1, 5]], [[1, None]], [[1.0, "b"]]]
    for value in (*OTHER_VALUES, *([each] for each in entries)):
        if key == "calls" and value == 5:
            continue
        content = json.dumps(dict(samples=[SAMPLE | {key: value}]))
        page.write_text(f'<script id="data">{content}</script>')
        assert entry.run(animate.main, [str(page), str(tmp_path / "a.svg")]) == 2, value
        assert str(page) in capsys.readouterr().err
    for content in (None, [], 5, {}, dict(samples=None), dict(samples=[5]), dict(samples="ab")):
        page.write_text(f'<script id="data">{json.dumps(content)}</script>')
        assert entry.run(animate.main, [str(page), str(tmp_path / "a.svg")]) == 2, content
    assert not (tmp_path / "a.svg").exists()
    page.write_text(f'<script id="data">{json.dumps(dict(samples=[SAMPLE]))}</script>')
    assert entry.run(animate.main, [str(page), str(tmp_path / "a.svg")]) == 0
