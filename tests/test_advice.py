"""What a sentence advises is accepted: each is provoked, and then followed to the letter.

The sentences and what to do are the rows of advice.py.
"""

import ast
import importlib
import re
import shlex
import shutil
import sys
from functools import cached_property
from pathlib import Path

import advice
import pytest
import torch
from advice import ADVICE, Because, FollowedIn
from conftest import ROOT, tiny_flags

import bench
import mdlm
import variants
from support import cli, guesses, plots
from support.flags import parse_flags
from support.training import checkpoint, runs
from support.training.log import Log

ROWS = [
    pytest.param(words, wrong, ways, id=f"{file}: {words}"[:70])
    for file, rows in ADVICE.items()
    if not isinstance(rows, Because)
    for words, wrong, *ways in rows
    if not isinstance(wrong, Because)
]


# ---- Steps
class Refused(Exception):
    """A command ended with the exit code of a user's mistake."""


class Began(BaseException):
    """A command has accepted what it was given: it calls the network."""


def begin(*args, **more):
    raise Began


def measure(options, device, book):
    """Stands in for a mode of bench.py: a measurement, if there is time."""
    if bench.time.monotonic() < book.until:
        book.add(dict(ms=1.0))


def set_up(given, start):
    """Stands in for training: what comes before the first step."""
    mdlm.setup(given, start)
    return 0


def set_up_and_save(given, start):
    runs.save(mdlm.setup(given, start))
    return 0


class Place:
    """Where a row's step is taken: a folder, and what there is beside it."""

    def __init__(self, tmp, made, short_run, patch):
        self.tmp = tmp
        self.made = made
        self.short_run = short_run
        self.patch = patch
        self.log = (short_run / "log.jsonl").read_text()
        self.tokenizer = made["tokenizer"]
        self.model = made["model"]
        self.blocks = made["model of blocks"]
        self.x = torch.zeros(2, 32, dtype=torch.int64)
        self.masked = torch.full_like(self.x, self.model.mask_id)

    @cached_property
    def run(self):
        """The folder of a run with step-2 and step-4."""
        return Path(shutil.copytree(self.short_run, "out"))

    def __getitem__(self, name):
        """What {name} of a command is."""
        return getattr(self, name) if name in ("run", "tmp") else self.made[name]

    def take(self, step):
        """Take a step; raises Refused, or a ValueError as Python callers see it."""
        if callable(step):
            step(self)
            return
        files, command = step if isinstance(step, tuple) else (step, step)
        if isinstance(files, dict):
            for name, content in files.items():
                (self.tmp / name).parent.mkdir(exist_ok=True)
                advice.write(self.tmp / name, content)
        if isinstance(command, dict):
            command = f"mdlm --data={next(iter(files)).split('/')[0]}"
        self.do(command)

    def do(self, command, saves=False, trains=False):
        """Run a command until work begins; saves: a run too; trains: until the work is done."""
        program, *argv = [word.format_map(self) for word in shlex.split(command)]
        if program in ("sample", "eval", "export"):
            assert self.run.exists()  # their default
        if program == "mdlm" and "--resume" not in argv:
            argv = self.of_a_tiny_run(argv)
        with self.patch.context() as patch:
            patch.setattr(plots, "save", lambda *args, **more: None)
            patch.setattr(plots, "try_to_draw", lambda *args: True)
            patch.setattr(bench, "MODES", dict.fromkeys(bench.MODES, measure))
            patch.setattr(Log, "samples", lambda *args: None)
            if not trains:
                patch.setattr(mdlm, "report", lambda run: None)
                patch.setattr(mdlm, "train", set_up_and_save if saves else set_up)
                patch.setattr(mdlm.Model, "forward", begin)
            try:
                code = cli.run(main_of(program), argv, checkpoint.release)
            except Began:
                code = 0
        if code:
            raise Refused(command)

    def of_a_tiny_run(self, argv):
        """Flags of a new run: a tiny one's beside those that are given, without each -name."""
        left_out = [f"-{word}" for word in argv if re.match("-[a-z]", word)]
        argv = [word for word in argv if not re.match("-[a-z]", word)]
        base = [f"--data={self['text']}", "--out_dir=new", "--max_steps=5", "--eval_windows=2"]
        known = [flag for flag in tiny_flags(*base) if flag.split("=")[0] not in left_out]
        given = {word.split("=")[0] for word in argv}
        return [flag for flag in known if flag.split("=")[0] not in given] + argv


def of_mdlm(argv):
    """What mdlm.py does with these flags."""
    return mdlm.train(mdlm.parse_args(argv), 0.0)


def main_of(program):
    """The main() of a program, or of one of the lessons or studies."""
    if (ROOT / "studies" / f"{program}.py").exists():
        return importlib.import_module(f"studies.{program}").main
    lesson = ROOT / "lessons" / f"{program}.py"
    if not lesson.exists():
        module = importlib.import_module(program)
        return of_mdlm if module is mdlm else module.main
    name = f"lesson_{program}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, lesson)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name].main


@pytest.fixture(scope="session")
def made(pydoc, short_run, tmp_path_factory):
    """Texts, ids and runs of each kind, by the names that rows give them; not to be changed."""
    at = tmp_path_factory.mktemp("advice")
    at_text = f"--data={at}/text"

    def new_run(name, *flags):
        """A run that is saved before its first step."""
        argv = tiny_flags("--eval_windows=2", f"--out_dir={at}/{name}", *flags)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mdlm, "report", lambda run: None)
            set_up_and_save(mdlm.parse_args(argv), 0.0)
        checkpoint.release()

    text = pydoc[:6000]
    (at / "text").write_text(text, encoding="utf-8")
    (at / "accents").write_text(text + "é" * 99, encoding="utf-8")
    (at / "sentence").write_text(advice.TEXT)
    (at / "words.json").write_text(advice.WORDS)
    (at / "templates").write_text("a█\nb█\n", encoding="utf-8")
    (at / "records.jsonl").write_text(advice.RECORD * 60)
    (at / "pairs.jsonl").write_text(advice.PAIR * 60)
    for folder in ("folder", "ids"):
        (at / folder).mkdir()
    (at / "folder" / "a.txt").write_text(text, encoding="utf-8")
    for name in ("train.bin", "val.bin"):
        advice.IDS.tofile(at / "ids" / name)
    new_run("ar", f"--data={at}/accents", "--objective=ar")
    new_run("blocks", at_text, "--block_length=8")
    new_run("whole", at_text, "--block_length=8", "--infill_share=0.5")
    new_run("documents", f"--data={at}/records.jsonl")
    new_run("prompts", f"--data={at}/pairs.jsonl", "--prompt_column=prompt")
    new_run("words", f"--data={at}/sentence", f"--tokenizer={at}/words.json")
    shutil.copytree(short_run, at / "patterns")
    advice.set_config(at / "patterns", data="patterns", block_size=64)
    shutil.copytree(short_run, at / "changed")
    advice.change_data(at / "changed")
    found = {path.name.removesuffix(".jsonl"): str(path) for path in at.iterdir()}
    found["long"] = "a" * 40
    found["model"], found["tokenizer"], _ = mdlm.load(short_run)
    found["model of blocks"] = mdlm.load(at / "blocks")[0]
    return found


@pytest.fixture
def attempt(made, short_run, tmp_path, monkeypatch, capfd):
    """A function that takes a step in a folder of its own: whether it is accepted, what is said."""
    monkeypatch.setattr(bench.proven, "show", lambda table: None)  # takes 20 s

    def taken(step):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        monkeypatch.chdir(folder)
        accepted = True
        try:
            Place(folder, made, short_run, monkeypatch).take(step)
        except Refused:
            accepted = False
        except ValueError as e:
            accepted = False
            print(e)
        return accepted, "".join(capfd.readouterr())

    return taken


def as_pattern(words):
    """The pattern of a line with a sentence: {} is any text, + is between its parts."""
    parts = (".*".join(map(re.escape, part.split("{}"))) for part in words.split(" + "))
    return "(?m)^" + "".join(f"(?=.*{part})" for part in parts)


@pytest.mark.parametrize("words, wrong, ways", ROWS)
def test_advice_is_accepted(attempt, words, wrong, ways):
    accepted, said = attempt(wrong)
    assert re.search(as_pattern(words), said), said
    assert accepted == (words in advice.WARNINGS), said
    for way in ways:
        accepted, again = attempt(way)
        assert accepted, (said, way, again)
        assert not re.search(as_pattern(words), again), (said, way, again)


REFUSED = [
    (file.__name__.rpartition(".")[2], other)
    for file in variants.VARIANTS
    for other in getattr(file, "REFUSED", ())
]


@pytest.mark.parametrize("pair", [p for p in REFUSED if p[0] != "documents"])
def test_either_of_two_variants_can_be_left_out(attempt, pair):
    """(Documents have lengths that are known by default: a row of their own.)"""
    base, *flags = advice.COMBINED[pair]
    accepted, said = attempt(f"mdlm {base} {' '.join(flags)}")
    assert not accepted and f"{flags[0]} and {flags[1]} cannot be combined: " in said
    assert said.endswith("; leave one of them out\n")
    for flag in flags:
        accepted, said = attempt(f"mdlm {base} {flag}")
        assert accepted, said


def flags_class(program):
    """The dataclass of a program's flags."""
    module = importlib.import_module(program)
    return mdlm.Config if module is mdlm else module.Options


@pytest.mark.parametrize("program", guesses.PROGRAMS)
def test_an_answer_can_be_typed(program):
    """What a flag of others is answered with: flags of this program, or of one that it names."""
    names = guesses.flags_of(program)
    asked = [*guesses.ANSWERS[program], *guesses.ANSWERS[""]]
    for flag in " ".join(asked).split():
        said = guesses.answer(flag, names, program)
        others = [
            name for other in re.findall(r"(\w+)\.py", said) for name in guesses.flags_of(other)
        ]
        named = re.findall(r"--(\w+)", said)
        assert set(named) <= {*names, *others}, (flag, said)
        for name, value in re.findall(r"--(\w+)=([a-z]\w*)", said):
            if name in names:
                assert parse_flags(flags_class(program), [f"--{name}={value}"], "")


# ---- All sentences
# A verb in the imperative where a sentence or a part of it begins, or what is needed.
VERBS = """add|allow|begin|change|check|choose|connect|convert|cut|draw|drop|free|give|install|keep
leave|look|lower|make|mend|move|name|open|prepare|put|raise|remove|rename|restore|return|reveal|run
save|see|set|shorten|split|start|state|stop|swap|take|tell|train|try|type|unpack|use|wait|work
write""".replace("\n", "|")
ADVISES = re.compile(
    rf"(?:^|[;:,.?(] ?|\b(?:and|first|or|so) )(?:{VERBS})\b"
    r"|\b(?:must|needs?|should|such as|to continue|to go on)\b"
    r"|(?:\bor|\bwith|\bgive|;) --\w|\(--(?:help|\w+=\w)|\((?:pip|apt) install|now type: ",
    re.IGNORECASE,
)
FOLDERS = ("variants", "support", "studies", "lessons", "kernels")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
SOURCES = sorted([*ROOT.glob("*.py"), *SOURCES])


def name_of(path):
    """The name of a source; of an __init__.py the folder's."""
    return path.parent.name if path.stem == "__init__" else path.name


def template(node):
    """The text of a string in a source, with {} for what is put in; "" of anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or "{}" for part in node.values)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else ""


def strings(node):
    """The strings of several words in a part of a source but for docstrings and --help."""
    for child in ast.iter_child_nodes(node):
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        is_field = isinstance(child, ast.Call) and getattr(child.func, "id", "") in ("opt", "Order")
        is_help = isinstance(child, ast.keyword) and child.arg == "help"
        if is_docstring or is_field or is_help:
            continue
        if " " in template(child):
            yield template(child)
        elif not isinstance(child, ast.JoinedStr):
            yield from strings(child)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_advice_has_one_row(path):
    sentences = set(strings(ast.parse(path.read_text(encoding="utf-8"))))
    rows = ADVICE.get(name_of(path), [])
    if isinstance(rows, Because):
        return
    named = []
    for part in (part for words, *_ in rows for part in words.split(" + ")):
        found = [s for s in sentences if s == part] or [s for s in sentences if part in s]
        assert len(found) == 1, f"{part!r} is in {len(found)} strings of {path.name}: {found}"
        named += found
    assert len(named) == len(set(named)), f"named twice: {[s for s in named if named.count(s) > 1]}"
    missing = {s for s in sentences if ADVISES.search(s)} - set(named)
    assert not missing, f"advice.py has no row that follows this: {missing}"


def test_what_is_not_followed_here_is_elsewhere():
    """Each file with rows is there, and so is each test that is named in place of steps."""
    assert ADVICE.keys() <= {name_of(path) for path in SOURCES}
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    for rows in ADVICE.values():
        for reason in [rows] if isinstance(rows, Because) else [row[1] for row in rows]:
            if isinstance(reason, FollowedIn):
                assert f"def {reason}(" in tests, reason
