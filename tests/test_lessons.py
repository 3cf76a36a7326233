"""The lessons: their checks accept right answers alone, their commands exist, minimal.py learns."""

import ast
import importlib.util
import itertools
import json
import re
import shlex
import subprocess
import sys
import time
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
from nanomdlm.support.networks.model import Pretrained
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
    "masks shifted": ("mask", "mask_id, x0", "mask_id, x0.roll(1, 1)", "has changed"),
    "divided by the batch's masks": (
        "loss",
        "/ hidden.sum(1)).mean()",
        ").sum() / hidden.sum()",
        "own",
    ),
    "all tokens scored": ("loss", "hidden = xt == mask_id", "hidden = xt > -1", "ln(1 / 0.9)"),
    "logits the wrong way round": ("loss", "logits.mT", "logits", "logits.mT"),
    "a number for each text": ("loss", ".mean()", "", "2 numbers"),
    "a sum over masks": ("loss", " / hidden.sum(1)", "", "is a sum"),
    "no gradient": ("loss", ".mean()", ".mean().item()", "gradient"),
    "not scaled": ("network", " / q.shape[-1] ** 0.5", "", "not divided"),
    "a softmax over queries": ("network", ".softmax(-1)", ".softmax(-2)", "each key"),
    "heads mixed": ("network", "scores.softmax", "scores.mean(1, True).softmax", "in each head"),
    "no biases": ("network", "(near + attention", "(near - 9 * C + attention", "has a bias"),
    "one layer": ("network", "layers * (near", "(near", "several"),
    "a loss in bits": ("schedule", "math.log(V)", "math.log2(V)", "in bits"),
    "[MASK] among the guesses": ("schedule", "math.log(V)", "math.log(V + 1)", "not among"),
    "no warm-up": ("schedule", "(step + 1) / (warmup + 1)", "1", "no warm-up"),
    "a decay from the start": ("schedule", "2 * (1 - step / steps)", "1 - step / steps", "half"),
    "rates drawn alike": ("tenths", "c * s for", "c / 10 for", "second tenth"),
    "the shares themselves": ("tenths", "1 / len(share) / s for", "s for", "count a tenth"),
    "the right ratios": ("tenths", "1 / len(share) / s for", "1 / s for", "count a tenth"),
    "a rate never drawn": ("tenths", "return None", "return 10 * [1.0]", "return None"),
    "all sets alike": ("bound", "/ len(sets)", "/ 7 * 3", "mean over sets"),
    "the textbook weight forgotten": ("bound", "return total / T", "return total", "bound of"),
    "tokens the other way": (
        "bound",
        "tokens / characters",
        "characters / tokens",
        "shared by all",
    ),
    "one over steps": ("reverse", "1 / s)", "1 / steps)", "left at the end"),
    "the likeliest": ("reverse", "torch.multinomial(p, 1)[:, 0]", "p.argmax(-1)", "too rarely"),
    "given tokens drawn": ("reverse", "(x == mask_id) &", "", "given"),
    "a bar for each token": ("nucleus", "before < share", "sorted_p > share", "none is kept"),
    "not divided": ("nucleus", "return p / p.sum(-1, keepdim=True)", "return p", "sum to 1"),
    "left sorted": ("nucleus", ".scatter(-1, order, kept)", ".add(kept)", "sorted order"),
    "without the half": ("parallel", " / 2", "", "half the sum"),
    "rows twice": ("parallel", "p.sum(0, keepdim=True)", "p.sum(1)[None]", "half the sum"),
    "the most doubtful": ("order", "entropy = -(", "entropy = (", "most doubtful"),
    "the visible chosen": ("order", ".masked_fill(~masked, torch.inf)", "", "visible"),
    "one more": ("order", "topk(n,", "topk(n + 1,", "n is 1"),
    "an index": (
        "sweep",
        "min(s for s, q in zip(steps, quality) if",
        "min(i for i, q in enumerate(quality) if",
        "an index",
    ),
    "a fixed bar": ("sweep", "share * max(quality)", "share", "should be"),
    "the fill in sight": (
        "fill",
        "model(x[None])",
        "model(torch.where(x == mask_id, token, x)[None])",
        "log p",
    ),
    "a mean": ("fill", "return total", "return total / len(fill)", "log p"),
    "logits": ("sure", ".softmax(-1)", "", "not a probability"),
    "visible tokens predicted": (
        "sure",
        "torch.where(x == mask_id, p.amax(-1), 1.0)",
        "p.amax(-1)",
        "is certain",
    ),
    "no shift": ("twin", "return torch.cat(", "return x; (", "sees the token"),
    "a roll": ("twin", "torch.full_like(x[:, :1], bos)", "x[:, -1:]", "leak"),
    "a sum over tokens": ("twin", ".mT, x)", '.mT, x, reduction="sum")', "mean of -log p"),
    "a leak": (
        "sees",
        "(reader == read, read < reader)",
        "(reader == read, read <= reader)",
        "own",
    ),
    "masks of earlier blocks": ("sees", "(reader == read,", "(read <= reader,", "earlier blocks"),
    "clean text sees all": (
        "sees",
        ", read <= reader), 1)",
        ", (read <= reader) | True), 1)",
        "not written yet",
    ),
    "rows for columns": (
        "sees",
        "torch.cat((masked, clean))",
        "torch.cat((masked, clean)).T",
        "exchanged",
    ),
    "a cache that fills itself": ("sees", " + S * (T // S - 1)", "", "without masks"),
    "not aligned": ("decoder", "- (at > 0).long()", "+ 0 * at", "nothing is shifted"),
    "documents forgotten": ("decoder", "(at > 0)", "(at[:1] > 0)", "document before it"),
    "texts forgotten": (
        "decoder",
        "logits.take_along_dim(rows[..., None], 1)",
        "logits.flatten(0, 1).roll(1, 0).view(logits.shape)",
        "another text",
    ),
    "[MASK] may be drawn": ("decoder", "[..., :-1]", "", "column of [MASK]"),
    "a mask row of zeros": (
        "decoder",
        "embedding.mean(0, keepdim=True)",
        "embedding[:1] * 0",
        "is zero",
    ),
    "the mask in front": (
        "decoder",
        "(embedding, embedding.mean(0, keepdim=True))",
        "(embedding.mean(0, keepdim=True), embedding)",
        "in front",
    ),
    "all states accept": (
        "match",
        "accepts.to(p.dtype)",
        "torch.ones(len(next))",
        "a state accepts",
    ),
    "fills counted": ("match", "(row * b[0][next])", "b[0][next]", "p is left out, so"),
    "from the wrong end": ("match", "p.flip(0)", "p", "wrong end"),
    "one row of b too few": ("match", "torch.stack(b)", "torch.stack(b[1:])", "of shape (4, 8)"),
    "the backward pass forgotten": ("match", " * b[i + 1][next[q]]", "", "dead end"),
    "b of the place before": ("match", "b[i + 1]", "b[i]", "dead end"),
    "the likeliest fill": (
        "match",
        "torch.multinomial(weight, 1)",
        "weight.argmax()",
        "the same fill",
    ),
    "the first state kept": ("match", "        q = next[q, v]\n", "", "follow the state"),
}


def pages_of(lesson):
    """The pages of a lesson: 8 has two, 8_... and 8b_..."""
    return [*LESSONS.glob(f"{lesson}_*.md"), *LESSONS.glob(f"{lesson}[a-z]_*.md")]


def ask(tmp_path, lesson, source):
    file = tmp_path / "answer.py"
    file.write_text(source, encoding="utf-8")
    verdict, sentence = checks.judge(lesson, str(file))  # check.py does so in another process
    return check.EXIT_CODES[verdict], f"{verdict}: {sentence}\n"


@pytest.mark.parametrize("name", RIGHT)
def test_right_answer_passes(tmp_path, name):
    code, said = ask(tmp_path, LESSON_OF[name], RIGHT[name])
    assert (code, said[:7]) == (0, "right: "), said
    pages = [path.read_text("utf-8") for path in pages_of(LESSON_OF[name])]
    assert any(said in page for page in pages), "the lesson prints what the checker says"


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
        pages = [page.read_text("utf-8") for page in pages_of(lesson)]
        assert any(f"(solutions/{name}.py)" in page for page in pages), name
        assert any(f"`my/{name}.py`" in page for page in pages), name


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
    features = Pretrained.features(decoder, View(at, at))
    assert torch.equal(features[..., :-1], answer["align"](h, at))


@pytest.mark.parametrize(
    "source, word",
    [
        ("def masks(x0, l, mask_id): ...", "no function mask"),
        ("def mask(x0, l: ...", "line 1"),
        ("def mask(x0, l, mask_id):\n    return x0[l, 7.5]", "line 2"),
        ("raise SystemExit('bye')", "bye"),
    ],
)
def test_file_that_cannot_be_checked(tmp_path, source, word):
    code, said = ask(tmp_path, 1, source)
    assert code == 2 and word in said and said.count("\n") == 1


def test_answer_is_found_in_the_folder_my(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert check.main(["2", "loss.py"]) == 2 and "or in my/" in capsys.readouterr().out
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "loss.py").write_text(RIGHT["loss"])
    assert check.main(["2", "loss.py"]) == 0


def test_endless_answer_is_stopped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "LIMIT", 0.3)
    (tmp_path / "a.py").write_text("while True:\n    print('x')")
    assert check.main(["2", str(tmp_path / "a.py")]) == 2
    assert "0.3 s" in capsys.readouterr().out.splitlines()[-1]


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
    numbers = [re.match(r"(\d+)[a-z]?_", path.name) for path in TEXTS]
    assert {int(found[1]) for found in numbers if found} == {0, *checks.CHECKS}, "0 has none"


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


def test_one_file_holds_the_readme_all_lessons_in_order_and_the_docs():
    command = [sys.executable, LESSONS / "one_file.py"]
    printed = subprocess.run(command, capture_output=True, text=True, encoding="utf-8").stdout
    docs = [ROOT / "README.md", *TEXTS, *(ROOT / "docs").glob("*.md")]
    assert all(path.read_text(encoding="utf-8").strip() in printed for path in docs)
    headings = re.findall(r"^# (\d+b?)\. ", printed, re.M)
    assert headings == [*map(str, range(9)), "8b", *map(str, range(9, 14))]


def test_llms_txt_names_each_lesson_and_page_of_the_docs():
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    linked = [ROOT / link for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert all(path.is_file() for path in linked)
    assert {*TEXTS, *(ROOT / "docs").glob("*.md")} <= {*linked}
    assert text.startswith("# mdlm\n\n> "), "a title, then a summary, as llmstxt.org says"


# --------------------------------------------------------------------------------------------------
# lessons/programs/: what a lesson runs is a file, and what it shows is in that file


OF_LESSONS = {path.stem: path.read_text("utf-8") for path in (LESSONS / "programs").glob("*.py")}


def page_of(name):
    """The page that says how to run lessons/programs/NAME.py."""
    pages = [path.read_text(encoding="utf-8") for path in TEXTS]
    return next(page for page in pages if f"python lessons/programs/{name}.py" in page)


@pytest.fixture
def run_program(monkeypatch, capsys):
    """Run lessons/programs/NAME.py in the root; return what it prints."""

    def run(name, *args, replace=("", "")):
        source = OF_LESSONS[name]
        assert replace[0] in source
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "path", [str(LESSONS / "programs"), *sys.path])
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        for module in OF_LESSONS:
            monkeypatch.delitem(sys.modules, module, raising=False)
        attention = torch.nn.functional.scaled_dot_product_attention  # who_sees.py replaces it
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        capsys.readouterr()
        exec(source.replace(*replace) if replace[0] else source, {"__name__": "__main__"})
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", OF_LESSONS)
def test_lesson_shows_its_program_as_it_is(name):
    source = OF_LESSONS[name].replace("  # noqa: E741", "")
    shown = re.findall(r"```python\n(.+?)```", page_of(name), re.S)
    assert any(block in source for block in shown)


def test_no_lesson_asks_to_copy_a_program():
    for path in TEXTS:
        assert not re.search(r"[Ss]ave (this|it)\s+as", path.read_text("utf-8")), path.name


@pytest.mark.parametrize("name", ["draws", "schedules", "two_rates"])
def test_program_without_random_digits_prints_what_the_lesson_shows(name, run_program):
    assert f"```\n{run_program(name)}```" in page_of(name)


def test_loss_by_hand_is_what_the_lesson_enumerates(run_program):
    """All masks one by one, and a few random ones."""
    printed = run_program("tiny", replace=("(1, 16, 256, 4096)", "(1, 16)"))
    assert printed in page_of("tiny") and len(printed.splitlines()) == 3


@pytest.mark.parametrize("name", ["who_sees", "bars", "marginals", "lengths"])
def test_program_prints_nearly_what_the_lesson_shows(name, run_program):
    """The same words and lines, and numbers that may differ a little between machines."""
    printed = run_program(name)
    blocks = re.findall(r"```\n([^`]+)```", page_of(name))
    shown = "\n".join(blocks)
    number = r"-?\d+\.\d+(?:e-?\d+)?"
    for line in printed.splitlines():
        like = re.escape(re.sub(number, "@", re.sub("#+$", "", line))).replace("@", f"({number})")
        found = [re.search(rf"^{like}#*$", each) for each in shown.splitlines()]
        values = [[float(v) for v in match.groups()] for match in found if match]
        wanted = pytest.approx([float(v) for v in re.findall(number, line)], rel=0.05, abs=0.03)
        assert wanted in values, line


def test_the_reverse_process_of_a_reader_writes_a_text(run_program):
    printed = run_program("try_reverse", replace=("(8, 256)", "(2,)"))
    assert printed.startswith("--- 2 steps\nROMEO:\n") and len(printed) > 250


def test_seconds_of_lesson_11_are_of_whole_texts_and_of_blocks(run_program):
    calls = "T: (8, 16, 32, 64), 16: (32, 64), 4: (64,), 1: (T,)"
    printed = run_program("seconds", replace=(calls, "T: (2,), 128: (2,)"))
    assert re.fullmatch(r"(blocks of \d+,   2 calls: \d\.\d\d s\n){2}", printed)


def test_models_of_lesson_0_run_and_neighbors_know_more(run_program, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 200)
    loss = {}
    for name, replace in (("frequencies", ("", "")), ("neighbors", ("", ""))):
        printed = run_program(name, text, replace=replace)
        loss[name] = float(re.search(r"^loss (\d\.\d+) nats", printed, re.M)[1])
        assert printed.count("\n| ") == 2, "two texts"
    assert loss["neighbors"] < 0.8 * loss["frequencies"]
    printed = run_program("network", text, replace=("64, 1500", "64, 3"))
    assert "step 0: loss" in printed and printed.count("\n| ") == 2


def test_row_and_line_of_lesson_8_give_sample_an_order_and_a_schedule_of_its_own(
    capsys, monkeypatch
):
    text = (LESSONS / "8b_orders_and_schedules.md").read_text(encoding="utf-8")
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


def test_minimal_is_plain_pytorch_on_one_page():
    source = (LESSONS / "minimal.py").read_text(encoding="utf-8")
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    assert names == {"torch", "argparse", "pydoc_data"}
    lines = [line for line in source.splitlines() if line.strip()]
    assert len(lines) <= 80, "the whole method on one page"


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
    x = torch.tensor([[0, 1, *[model.mask_id] * 6, 2]])
    texts = pictures.unmask(model, x, "left_to_right", 3, seed=1)
    assert torch.equal(texts[:1], x) and len(texts) == 4
    final = sample.generate(model, x, order="left_to_right", correct=0, seed=1, steps=3)
    assert torch.equal(texts[3:], final)


# ---- The pictures beside their sentences
FIGURES = {  # the picture of each page, by its command; those of runs are drawn in other tests
    path.name: [args for program, *args in commands(path) if program == "lessons/pictures.py"]
    for path in TEXTS
}
SHIPPED = f"--run={ROOT / 'weights' / 'shakespeare'}"


def test_pictures_of_lessons_are_there_light_and_dark():
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        assert len(re.findall('srcset=".+_dark', text)) == text.count("<img "), path.name
        for name in re.findall(r'(?:srcset|src)="(.+?)"', text):
            assert (path.parent / name).is_file(), name


DRAWN = ["idea", "noise", "strips", "guesses", "look", "joint", "waves"]
DRAWN += ["means", "jensen", "search", "twin", "sees", "automaton"]


def test_each_picture_of_the_lessons_is_shown():
    words = "".join(path.read_text(encoding="utf-8") for path in TEXTS)
    for path in (LESSONS / "pictures").iterdir():
        assert f'"pictures/{path.name}"' in words, path


@pytest.mark.parametrize("name", DRAWN)
def test_picture_is_drawn_by_the_command_beside_it(name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    (args,) = [a for figures in FIGURES.values() for a in figures if f"--draw={name}" in a]
    monkeypatch.chdir(tmp_path)
    args = [SHIPPED if word.startswith("--run=") else word for word in args]
    assert entry.run(load("pictures").main, args) == 0
    assert (tmp_path / args[0]).stat().st_size > 5000


def test_drawing_that_cannot_be_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert entry.run(load("pictures").main, ["x.png", "--run=nowhere", "--text=█"]) == 2
    said = capsys.readouterr().err
    assert "nowhere" in said and said.count("\n") == 1 and not any(tmp_path.iterdir())


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


def test_patterns_are_valid_by_the_periods_of_their_run():
    patterns = load("patterns")
    for n in range(1, 7):
        text = ("abcdef"[:n] * 20)[:64]
        assert patterns.is_pattern(text) == (n in (1, 2, 3, 4)), "one symbol repeats as two"
        assert patterns.is_pattern(text, (2, 5)) == (n <= 5)
        assert patterns.is_pattern(text, (6, 6)) == (n in (1, 2, 3, 6))


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


SAMPLE = dict(
    tokens=["a", "b"], given=[True, False], frames=[[[1, "b", 0.5, []]]], calls=1, seconds=0.1
)


def test_page_with_other_types_is_no_page(tmp_path, capsys):
    animate = load("animate")
    page = tmp_path / "page.html"
    wrong = [SAMPLE | {key: None} for key in ("tokens", "given", "frames", "calls")]
    wrong += [SAMPLE | dict(frames=[[[99, "b"]]]), SAMPLE | dict(given=[[]]), 5, SAMPLE]
    for value in wrong:
        page.write_text(f'<script id="data">{json.dumps(dict(samples=[value]))}</script>')
        code = entry.run(animate.main, [str(page), str(tmp_path / "a.svg")])
        assert code == (0 if value is SAMPLE else 2), value
        assert code == 0 or str(page) in capsys.readouterr().err
