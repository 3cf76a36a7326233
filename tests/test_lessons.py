"""The lessons: their checks accept right answers alone, their commands exist, minimal.py learns."""

import importlib.util
import subprocess
import sys

import pytest
from conftest import ROOT

LESSONS = ROOT / "lessons"
# Flags that lessons use before the programs have them.
# TODO: empty this list when eval.py and sample.py have them.
UPCOMING = ["eval.py --text", "eval.py --rate", "sample.py --compare"]


def load(name):
    spec = importlib.util.spec_from_file_location(name, LESSONS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load("check")

RIGHT = {
    1: """
import torch
def mask(x0, l, mask_id):
    order = torch.rand(x0.shape).argsort(1).argsort(1)
    return torch.where(order < l, mask_id, x0)
""",
    2: """
import torch.nn.functional as F
def loss(logits, x0, xt, mask_id):
    hidden = xt == mask_id
    ce = F.cross_entropy(logits.mT, x0, reduction="none")
    return ((ce * hidden).sum(1) / hidden.sum(1)).mean()
""",
    3: """
def nelbo(ce):
    return sum(ce) / len(ce)
def shown(ce):
    return ce[1]
""",
    4: """
import itertools, math
def bound(log_p, x, mask_id):
    T = len(x)
    total = 0
    for l in range(1, T + 1):
        sets = list(itertools.combinations(range(T), l))
        for hide in sets:
            hide = list(hide)
            xt = x.clone()
            xt[hide] = mask_id
            total -= log_p(xt)[hide, x[hide]].mean() / len(sets)
    return total / T
def bits(nats, tokens, characters):
    return nats * tokens / characters / math.log(2)
""",
    5: """
import torch
def generate(model, x, mask_id, steps):
    x = x.clone()
    for s in range(steps, 0, -1):
        now = (x == mask_id) & (torch.rand(x.shape) < 1 / s)
        if now.any():
            p = model(x)[now].softmax(-1)
            x[now] = torch.multinomial(p, 1)[:, 0]
    return x
""",
    6: """
def parallel_error(p):
    product = p.sum(1, keepdim=True) * p.sum(0, keepdim=True)
    return (p - product).abs().sum() / 2
""",
    7: """
import torch
def log_fill(model, x, fill, mask_id):
    x = x.clone()
    total = 0
    for token in fill:
        i = int((x == mask_id).nonzero()[0])
        total += model(x[None])[0, i].log_softmax(-1)[token]
        x[i] = token
    return total
""",
    8: """
import torch
import torch.nn.functional as F
def ar_inputs(x, bos):
    return torch.cat((torch.full_like(x[:, :1], bos), x[:, :-1]), 1)
def nll(model, x, bos):
    return F.cross_entropy(model(ar_inputs(x, bos)).mT, x)
""",
}
# The usual mistakes: lesson, what is replaced in the right answer, by what, a word of the sentence.
WRONG = {
    "bernoulli": (1, "order < l", "torch.rand(x0.shape) < l / x0.shape[1]", "exactly l"),
    "one order for all": (1, "torch.rand(x0.shape)", "torch.rand(x0[:1].shape)", "equally"),
    "the first l": (1, "order < l", "torch.arange(x0.shape[1]) < l", "equally"),
    "in place": (1, "torch.where(order < l,", "x0.masked_fill_(order < l, mask_id) #", "copy"),
    "a run of neighbours": (
        1,
        ".argsort(1).argsort(1)",
        ".argmax(1, True).add(torch.arange(x0.shape[1])) % x0.shape[1]",
        "equally",
    ),
    "masks shifted": (1, "mask_id, x0", "mask_id, x0.roll(1, 1)", "has changed"),
    "divided by the batch's masks": (2, "/ hidden.sum(1)).mean()", ").sum() / hidden.sum()", "own"),
    "divided by all tokens": (2, ".sum(1) / hidden.sum(1)).mean()", ").mean()", "ln(1 / 0.9)"),
    "all tokens scored": (2, "hidden = xt == mask_id", "hidden = xt > -1", "ln(1 / 0.9)"),
    "bits": (2, "ce = F", "ce = 1.4427 * F", "ln(1 / 0.9)"),
    "no gradient": (2, ".mean()", ".mean().item()", "gradient"),
    "a sum": (3, " / len(ce)", "", "plain mean"),
    "weights by rate": (3, "sum(ce)", "sum(c / (i + 0.5) for i, c in enumerate(ce))", "plain"),
    "the first tenth": (3, "ce[1]", "ce[0]", "second tenth"),
    "the mean of the first two": (3, "ce[1]", "(ce[0] + ce[1]) / 2", "second tenth"),
    "all sets alike": (4, "/ len(sets)", "/ 7 * 3", "mean over sets"),
    "sums over positions": (4, ".mean() /", ".sum() /", "bound of"),
    "the textbook weight forgotten": (4, "return total / T", "return total", "bound of"),
    "bits the other way": (4, "/ math.log(2)", "* math.log(2)", "ln 2"),
    "tokens the other way": (4, "tokens / characters", "characters / tokens", "shared by all"),
    "one over steps": (5, "1 / s)", "1 / steps)", "left at the end"),
    "one over steps, then all": (5, "< 1 / s)", "< (1 / steps if s > 1 else 1))", "1/s"),
    "the likeliest": (5, "torch.multinomial(p, 1)[:, 0]", "p.argmax(-1)", "too rarely"),
    "a fixed number": (
        5,
        "(torch.rand(x.shape) < 1 / s)",
        "(torch.where(x == mask_id, torch.rand(x.shape), 2).argsort(1).argsort(1)"
        " < -(-(x == mask_id).sum(1, True) // s))",
        "on its own",
    ),
    "one call": (5, "model(x)[now]", "model(torch.full_like(x, mask_id))[now]", "at the calls"),
    "given tokens drawn": (5, "(x == mask_id) &", "", "given"),
    "its argument changed": (5, "x = x.clone()", "", "copy"),
    "without the half": (6, " / 2", "", "half the sum"),
    "the largest difference": (6, ".sum() / 2", ".max()", "half the sum"),
    "rows twice": (6, "p.sum(0, keepdim=True)", "p.sum(1)[None]", "half the sum"),
    "all at once": (
        7,
        "        x[i] = token",
        "        x[i] = token\n        model = lambda _, m=model(x[None] * 0 + mask_id): m",
        "in place",
    ),
    "the fill in sight": (
        7,
        "model(x[None])",
        "model(torch.where(x == mask_id, token, x)[None])",
        "log p",
    ),
    "a mean": (7, "return total", "return total / len(fill)", "log p"),
    "no logarithm": (7, ".log_softmax(-1)", ".softmax(-1)", "log p"),
    "no shift": (8, "return torch.cat(", "return x; (", "sees the token"),
    "a roll": (8, "torch.full_like(x[:, :1], bos)", "x[:, -1:]", "leak"),
    "shifted left": (
        8,
        "(torch.full_like(x[:, :1], bos), x[:, :-1])",
        "(x[:, 1:], torch.full_like(x[:, :1], bos))",
        "should be",
    ),
    "the first not scored": (
        8,
        "model(ar_inputs(x, bos)).mT, x)",
        "model(ar_inputs(x, bos)).mT[..., 1:], x[:, 1:])",
        "first included",
    ),
    "a sum over tokens": (8, ".mT, x)", '.mT, x, reduction="sum")', "mean of -log p"),
}


def ask(tmp_path, capsys, lesson, source):
    file = tmp_path / "answer.py"
    file.write_text(source, encoding="utf-8")
    code = check.main([str(lesson), str(file)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("lesson", RIGHT)
def test_right_answer_passes(tmp_path, capsys, lesson):
    code, said = ask(tmp_path, capsys, lesson, RIGHT[lesson])
    assert (code, said[:7]) == (0, "right: "), said


@pytest.mark.parametrize("mistake", WRONG)
def test_usual_mistake_is_named(tmp_path, capsys, mistake):
    lesson, old, new, word = WRONG[mistake]
    assert RIGHT[lesson].count(old) >= 1
    code, said = ask(tmp_path, capsys, lesson, RIGHT[lesson].replace(old, new, 1))
    assert (code, said[:7]) == (1, "wrong: "), said
    assert word in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "source, word",
    [
        ("def masks(x0, l, mask_id): ...", "no function mask"),
        ("def mask(x0, l: ...", "line 1"),
        ("def mask(x0, l, mask_id):\n    return x0[l, 7.5]", "line 2"),
        ("def mask(x0): ...", "TypeError"),
        ("raise SystemExit('bye')", "bye"),
        ("mask = 3", "no function mask"),
    ],
)
def test_file_that_cannot_be_checked(tmp_path, capsys, source, word):
    code, said = ask(tmp_path, capsys, 1, source)
    assert code == 2 and word in said and said.count("\n") == 1


def test_bad_usage_has_no_traceback(tmp_path, capsys):
    for argv in ([], ["1"], ["9", "x.py"], ["one", "x.py"], ["1", "x.py", "y"], ["1", "none.py"]):
        assert check.main(argv) == 2
        said = capsys.readouterr().out
        assert said.startswith("not checked: ") and said.count("\n") == 1
    (tmp_path / "answer.txt").write_text(RIGHT[1])
    assert check.main(["1", str(tmp_path / "answer.txt")]) == 2


def test_check_exits_with_its_code(tmp_path):
    (tmp_path / "a.py").write_text("1 / 0")
    command = [sys.executable, str(LESSONS / "check.py"), "6", "a.py"]
    r = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (r.returncode, r.stderr) == (2, "") and "line 1" in r.stdout
