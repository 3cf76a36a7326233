"""What a sentence advises is accepted: each is provoked, and then followed to the letter.

CASES holds the sentences that flags provoke, FILES those about what is in a file, OUTSIDE those
that are not followed here, by reason. The last test finds a sentence that is in none of them.
"""

import ast
import re
import shlex
import shutil

import numpy as np
import pytest

import bench
import eval
import export
import mdlm
import sample
from support import checkpoint, cli, guesses
from tests.conftest import ROOT, run_mdlm, tiny_flags

# Program, the words of the advice, the flags that provoke it, and those of each way to follow it.
# Flags of a new run come after those of a tiny one; {names} are the files of the fixture `files`.
CASES = [
    # ---- mdlm.py: settings
    ("mdlm", "--n_embd={} must be a multiple of", "--n_embd=34", "--n_embd=36"),
    ("mdlm", "--batch_size={} must be a multiple of", "--batch_size=7", "--batch_size=8"),
    ("mdlm", "swap them", "--min_rate=0.9 --max_rate=0.2", "--min_rate=0.2 --max_rate=0.9"),
    (
        "mdlm",
        "--tokenizer={} is not accepted; give",
        "--tokenizer=bytes",
        "--tokenizer=byte",
        "--tokenizer=char",
    ),
    (
        "mdlm",
        "leave --block_size, --tokenizer and --separator out",
        "--data=patterns --block_size=32 --tokenizer=byte",
        "--data=patterns -block_size",
    ),
    (
        "mdlm",
        "; name two",
        "--data={pairs} --prompt_column=text",
        "--data={pairs} --prompt_column=prompt",
        "--data={pairs} --prompt_column=prompt --text_column=text",
    ),
    (
        "mdlm",
        "leave --objective and --lengths out",
        "--data={pairs} --prompt_column=prompt --objective=ar --lengths=known",
        "--data={pairs} --prompt_column=prompt",
    ),
    ("mdlm", "needs a --block_length below", "--whole=0.5", "--whole=0.5 --block_length=8"),
    (
        "mdlm",
        "leave --time_conditioning out",
        "--objective=ar --time_conditioning",
        "--objective=ar",
    ),
    ("mdlm", "must divide --block_size", "--block_length=5", "--block_length=8"),
    (
        "mdlm",
        " needs --",
        "--block_length=8 --masking=bernoulli",
        "--block_length=8 --masking=exact",
    ),
    (
        "mdlm",
        "add --lengths=learned",
        "--data={records} --lengths=known --masking=bernoulli",
        "--data={records} --lengths=known",
        "--data={records} --lengths=learned --masking=bernoulli",
    ),
    ("mdlm", "or give --shard=0", "--shard", "--shard=0"),
    # ---- mdlm.py: where a run begins and goes on
    (
        "mdlm",
        "give --resume to continue it, --overwrite to replace it, or another --out_dir",
        "--out_dir={run}",
        "= --out_dir={run} --resume",
        "--out_dir={run} --overwrite",
        "--out_dir={run}-other",
    ),
    (
        "mdlm",
        "contradict each other; give one of them",
        "= --out_dir={run} --resume --overwrite",
        "= --out_dir={run} --resume",
    ),
    (
        "mdlm",
        "leave the flag out, or start again with --overwrite",
        "= --out_dir={run} --resume --n_layer=3",
        "= --out_dir={run} --resume",
        "--out_dir={run} --overwrite --n_layer=3",
    ),
    (
        "mdlm",
        "steps; give more",
        "= --out_dir={run} --resume --max_steps=2",
        "= --out_dir={run} --resume --max_steps=5",
    ),
    ("mdlm", "train one with: ", "= --out_dir={tmp}/none --resume", "--out_dir={tmp}/none"),
    (
        "mdlm",
        "would change --data={}; give another",
        "--data={records_folder} --out_dir={records_folder}",
        "--data={records_folder}",
    ),
    ("mdlm", "leave --prompt_column out", "--data={ids} --prompt_column=prompt", "--data={ids}"),
    ("mdlm", "leave --tokenizer out", "--init_from={run} --tokenizer=char", "--init_from={run}"),
    ("mdlm", "leave it out to start from random weights", "--init_from=scratch", ""),
    (
        "mdlm",
        "to continue the run in --out_dir give --resume",
        "--out_dir={run} --init_from=resume --overwrite",
        "= --out_dir={run} --resume",
    ),
    (
        "mdlm",
        "--init_from fine-tunes the folder of a run",
        "--init_from=org/model",
        "--init_from={run}",
    ),
    (
        "mdlm",
        "; give the same here",
        "--init_from={run} --n_layer=1 --n_embd=64",
        "--init_from={run} --n_layer=2 --n_embd=32",
    ),
    (
        "mdlm",
        "a text without [END]; give a text",
        "--init_from={run} --data={records}",
        "--init_from={run}",
    ),
    (
        "mdlm",
        "documents; give such data",
        "--init_from={documents} --data={text}",
        "--init_from={documents} --data={records}",
    ),
    # ---- mdlm.py: data
    ("mdlm", "is not UTF-8 text (byte", "--data={latin}", "--data={ids}"),
    (
        "mdlm",
        "; give .jsonl or .parquet files",
        "--data={mixed} --prompt_column=prompt",
        "--data={pairs} --prompt_column=prompt",
    ),
    ("mdlm", "its data is in ", "--data={run}", "--data={run}/data"),
    ("mdlm", "or load it with --init_from", "--data={run}/step-4", "--init_from={run}/step-4"),
    (
        "mdlm",
        "or leave this file out",
        "--data={records} --text_column=body",
        "--data={records} --text_column=text",
    ),
    (
        "mdlm",
        "which is, or leave it out",
        "--data={crlf} '--separator=\\n\\n'",
        "--data={crlf} '--separator=\\r\\n\\r\\n'",
        "--data={crlf}",
    ),
    (
        "mdlm",
        "or leave --end_id out",
        "--data={ids} --vocab_size=20 --end_id=9",
        "--data={ids} --end_id=3",
        "--data={ids}",
    ),
    (
        "mdlm",
        " must be below V = ",
        "--data={ids} --end_id=9 --vocab_size=7",
        "--data={ids} --end_id=3 --vocab_size=7",
    ),
    (
        "mdlm",
        "check tokenizer.json, --vocab_size or --bin_dtype",
        "--data={ids} --vocab_size=3",
        "--data={ids} --vocab_size=7",
    ),
    (
        "mdlm",
        "give more text or a smaller block",
        "--data={ids} --block_size=512",
        "--data={ids} --block_size=8",
    ),
    (
        "mdlm",
        "--block_size={}; shorten them or raise it",
        "--data={pairs} --prompt_column=prompt --block_size=8",
        "--data={pairs} --prompt_column=prompt --block_size=64",
    ),
    ("mdlm", " is empty: ", "--data=", "--data={text}"),
    (
        "mdlm",
        "the 256 bytes take",
        "--tokenizer=bpe --vocab_size=100",
        "--tokenizer=bpe --vocab_size=300",
    ),
    # ---- mdlm.py: the command line
    ("mdlm", " needs dashes: --", "n_layer=1", "--n_layer=1"),
    ("mdlm", " needs a flag before it, ", "{text}", "--data={text}"),
    ("mdlm", "use cpu, cuda, cuda:N, mps or auto", "--device=tpu", "--device=cpu", "--device=auto"),
    # ---- sample.py
    ("sample", "a second text, beside --", "hello --prompt=be", "hello", "--prompt=be"),
    (
        "sample",
        "give it as --out_dir or --batch; if it is a text, as --prompt",
        "{run}",
        "--out_dir={run}",
        "--prompt={run}",
    ),
    (
        "sample",
        "give it as --out_dir or --batch; if it is a text, as --prompt",
        "{templates}",
        "--batch={templates}",
    ),
    (
        "sample",
        "one_shot is one step",
        "--order=one_shot --steps=4",
        "--order=one_shot",
        "--steps=4",
    ),
    (
        "sample",
        "give --infill or --batch",
        "--candidates=2",
        "--candidates=2 --infill=a█",
        "--candidates=2 --batch={templates}",
    ),
    (
        "sample",
        "is no file or text; give one or leave it out",
        "--html=-",
        "--html={tmp}/page.html",
        "",
    ),
    (
        "sample",
        "--prompt has gaps; give it as --infill, or without a flag before it",
        "--prompt=a█",
        "--infill=a█",
        "a█",
    ),
    ("sample", "a template says by itself what to write", "--infill=a█ --length=4", "--infill=a█"),
    (
        "sample",
        "leave one of them out",
        "--batch={templates} --watch",
        "--batch={templates}",
        "--watch",
    ),
    (
        "sample",
        "watch one text, or write many for a program",
        "--watch --json=-",
        "--watch",
        "--json=-",
    ),
    (
        "sample",
        "--compare writes texts with several settings",
        "--compare=temperature=0.5,1 --watch",
        "--compare=temperature=0.5,1",
    ),
    (
        "sample",
        "give --prompt, no template",
        "--out_dir={prompts} --infill=a█",
        "--out_dir={prompts} --prompt=aa",
    ),
    (
        "sample",
        "is not for an autoregressive model; leave it out",
        "--out_dir={ar} --steps=3",
        "--out_dir={ar}",
    ),
    (
        "sample",
        "an autoregressive model needs left_to_right",
        "--out_dir={ar} --order=random",
        "--out_dir={ar} --order=left_to_right",
    ),
    (
        "sample",
        "{} is not for {}; leave it out",
        "--out_dir={ar} --cfg=1 --prompt=a",
        "--out_dir={ar} --prompt=a",
    ),
    ("sample", "correct={} is not accepted", "--correct=all", "--correct=auto", "--correct=2"),
    (
        "sample",
        "write █ for each token",
        "--compare=temperature=0.5,1 --infill=a[___]",
        "--compare=temperature=0.5,1 --infill=a██",
    ),
    ("sample", "and there is none; give some", "--cfg=1", "--cfg=1 --prompt=a"),
    (
        "sample",
        "take one without blocks",
        "--out_dir={blocks} '--infill=█ and a text of two blocks'",
        "--out_dir={run} '--infill=█ and a text of two blocks'",
    ),
    (
        "sample",
        "give one of {}, as in --compare",
        "--compare=block_size=1,2",
        "--compare=temperature=0.5,1",
    ),
    (
        "sample",
        "mark each missing token with █ or [MASK], a gap of unknown length",
        "--infill=abc",
        "--infill=ab█",
        "'--infill=ab[MASK]'",
    ),
    ("sample", "a gap must not follow [___]", "--infill=a[___]█", "--infill=a██"),
    (
        "sample",
        "raise --length, or shorten it",
        "--prompt=abcd --length=2",
        "--prompt=abcd --length=6",
        "--prompt=a --length=2",
    ),
    ("sample", "; shorten it", "--infill={long}█", "--infill=a█"),
    ("sample", "remove it, or train on text that has it", "--prompt=é", "--prompt=e"),
    ("sample", "values; put a text in quotes", "a b", "'a b'"),
    (
        "sample",
        "; give two files",
        "--json={tmp}/o --html={tmp}/o",
        "--json={tmp}/o --html={tmp}/p",
    ),
    ("sample", "give a file elsewhere", "--json={run}/log.jsonl", "--json={tmp}/elsewhere"),
    ("sample", "give a file in a folder that is yours", "--json={tmp}/no/o", "--json={tmp}/o"),
    (
        "sample",
        "; give the folder of a run that mdlm.py trained",
        "--out_dir={text}",
        "--out_dir={run}",
    ),
    # ---- eval.py
    ("eval", "give one of them", "--compare={run} --windows=2", "--compare={run}", "--windows=2"),
    ("eval", "--text measures nothing else", "--text=a --windows=2", "--text=a", "--windows=2"),
    ("eval", "--text is missing; give one", "--rate=0.2", "--rate=0.2 --text=abc"),
    ("eval", "is for models of mdlm.py --whole", "--whole --windows=2", "--windows=2"),
    (
        "eval",
        "is for models that fill gaps",
        "--out_dir={ar} --text=abc",
        "--out_dir={ar} --windows=2",
    ),
    ("eval", " tokens; give 1 to ", "--text={long}", "--text=abc"),
    ("eval", "; name the folder of one", "--compare={text}", "--compare={run}"),
    (
        "eval",
        "is no folder; give one, or none",
        "--windows=2 --pictures={text}",
        "--windows=2 --pictures=none",
        "--windows=2 --pictures={tmp}/pictures",
    ),
    (
        "eval",
        "has another vocabulary than",
        "--data={ids} --windows=2",
        "--data={text} --windows=2",
    ),
    # ---- bench.py
    (
        "bench",
        "or nothing, then flags",
        "training --preset=cpu",
        "train --preset=cpu",
        "--preset=cpu",
    ),
    (
        "bench",
        "give train or sample",
        "kernels --device=cpu",
        "train --device=cpu",
        "sample --device=cpu",
    ),
    # ---- export.py
    (
        "export",
        "give the folder to make, such as ",
        "--out_dir={run}",
        "--out_dir={run} --dest={tmp}/e",
    ),
    (
        "export",
        "; give that of a new folder",
        "--out_dir={run} --dest={run}",
        "--out_dir={run} --dest={tmp}/f",
    ),
    (
        "export",
        "; give a folder elsewhere",
        "--out_dir={run} --dest={run}/hf",
        "--out_dir={run} --dest={tmp}/g",
    ),
]
PROGRAMS = dict(mdlm=mdlm, sample=sample, eval=eval, bench=bench, export=export)


def new_run(*flags):
    assert run_mdlm(*tiny_flags("--eval_windows=2", "--max_steps=1", *flags)) == 0


@pytest.fixture(scope="session")
def files(pydoc, tmp_path_factory):
    """Texts, ids and runs of each kind, by the name that CASES gives them; not to be changed."""
    at = tmp_path_factory.mktemp("advice")
    text = pydoc[:6000]
    (at / "text.txt").write_text(text, encoding="utf-8")
    (at / "latin.txt").write_bytes((text[:2000] + "é").encode("latin-1"))
    (at / "crlf.txt").write_bytes(b"one two three\r\n\r\n" * 100)
    (at / "templates").write_text("a█\nb█\n", encoding="utf-8")
    (at / "records.jsonl").write_text('{"text": "some words"}\n' * 60)
    (at / "pairs.jsonl").write_text('{"prompt": "abc", "text": "defghi"}\n' * 60)
    (at / "mixed").mkdir()
    shutil.copy(at / "text.txt", at / "mixed")
    shutil.copy(at / "pairs.jsonl", at / "mixed")
    (at / "ids").mkdir()
    for name in ("train.bin", "val.bin"):
        (np.arange(300, dtype=np.uint16) % 7).tofile(at / "ids" / name)
    new_run(f"--data={at}/text.txt", "--objective=ar", f"--out_dir={at}/ar")
    new_run(f"--data={at}/text.txt", "--block_length=8", f"--out_dir={at}/blocks")
    new_run(f"--data={at}/records.jsonl", f"--out_dir={at}/documents")
    new_run(f"--data={at}/pairs.jsonl", "--prompt_column=prompt", f"--out_dir={at}/prompts")
    named = {path.stem: str(path) for path in at.iterdir()}
    return named | dict(long="a" * 40)


def arguments(program, typed, names):
    """The arguments of a command: `=` begins one of mdlm.py that is complete."""
    words = [word.format(**names) for word in shlex.split(typed)]
    if program != "mdlm":
        return words
    if words[:1] == ["="]:
        return words[1:]
    left_out = [word[1:] for word in words if re.match("-[a-z]", word)]
    words = [word for word in words if not re.match("-[a-z]", word)]
    base = [f"--data={names['text']}", f"--out_dir={names['tmp']}/new", "--max_steps=5"]
    given = {word.split("=")[0] for word in words}
    base = [flag for flag in base if flag.split("=")[0] not in given]
    base += tiny_flags("--eval_windows=2", *words)
    return [flag for flag in base if flag.split("=")[0].lstrip("-") not in left_out]


@pytest.fixture
def follow(files, short_run, tmp_path, monkeypatch):
    """A function of a program and what is typed: its exit code. It stops where work would begin."""
    monkeypatch.setattr(mdlm, "report", lambda run: None)
    monkeypatch.setattr(mdlm, "train", lambda given, start: mdlm.setup(given, start) and 0)
    monkeypatch.setattr(bench, "MODES", dict.fromkeys(bench.MODES, lambda *args: None))
    monkeypatch.setattr(bench.Book, "close", lambda book: 0)

    def typed(program, words):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        monkeypatch.chdir(folder)
        shutil.copytree(short_run, "out")
        shutil.copy(files["records"], folder)
        here = dict(run="out", tmp=str(folder), records_folder=str(folder))
        argv = arguments(program, words, files | here)
        return cli.run(PROGRAMS[program].main, argv, checkpoint.release)

    return typed


def as_pattern(words):
    """The pattern of a sentence, in which {} is any text."""
    return ".*".join(map(re.escape, words.split("{}")))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]}"[:60])
def test_advice_is_accepted(follow, capfd, case):
    program, words, typed, *ways = case
    assert follow(program, typed) == 2
    said = capfd.readouterr().err
    assert re.search(as_pattern(words), said), said
    for way in ways:
        code = follow(program, way)
        again = capfd.readouterr().err
        assert code == 0, (said, way, again)
        assert not re.search(as_pattern(words), again), (said, way, again)


# What is in a file, the words of the advice, and what then is in a file of this name.
RECORD = '{"text": "some words"}\n'
FILES = [
    ("a.txt", "abc ".encode("utf-16-le") * 99, "convert it: iconv", ("a.txt", b"abc " * 99)),
    ("a.csv", b"text\nabc\n" * 9, "save its column of texts as", ("a.jsonl", RECORD * 60)),
    ("a.txt", b"", "; give a file with text in it", ("a.txt", b"abc " * 99)),
    ("a.json", b"[1", "mend it", ("a.json", '[{"text": "' + "abc " * 99 + '"}]')),
    ("a.jsonl", RECORD * 60 + "{", "; mend or remove it", ("a.jsonl", RECORD * 60)),
    (
        "a.jsonl",
        '{"text": 5}\n' + RECORD * 60,
        "not a text; mend or remove",
        ("a.jsonl", RECORD * 60),
    ),
    ("a.jsonl", '"abc"\n' + RECORD * 60, "; write it as ", ("a.jsonl", RECORD * 61)),
    ("a.jsonl", RECORD * 60 + '{"text": "\\ud800"}', "; mend it", ("a.jsonl", RECORD * 61)),
    ("a.jsonl", "[" + RECORD.strip() + "]\n", "name it .json", ("a.json", f"[{RECORD * 1}]")),
    (
        "._a.txt",
        b"\x00\x05\x16\x07" + bytes(99),
        "give the file without ._",
        ("a.txt", b"abc " * 99),
    ),
]


@pytest.mark.parametrize(("name", "content", "words", "then"), FILES)
def test_advice_about_a_file_works(tmp_path, monkeypatch, capsys, name, content, words, then):
    monkeypatch.setattr(mdlm, "train", lambda given, start: mdlm.setup(given, start) and 0)
    monkeypatch.setattr(mdlm, "report", lambda run: None)
    codes = []
    for file, held in ((name, content), then):
        (tmp_path / file).write_bytes(held if isinstance(held, bytes) else held.encode())
        flags = tiny_flags("--block_size=8", "--eval_windows=2", f"--out_dir={tmp_path}/out")
        codes.append(run_mdlm(f"--data={tmp_path / file}", *flags))
        if not codes[1:]:
            assert words in capsys.readouterr().err
    assert codes == [2, 0], capsys.readouterr().err


@pytest.mark.parametrize("program", guesses.PROGRAMS)
def test_an_answer_names_flags_that_there_are(program):
    """What a flag of others is answered with: the flags of this program, or of one it names."""
    names = guesses.flags_of(program)
    asked = [*guesses.ANSWERS[program], *guesses.ANSWERS[""]]
    for flag in " ".join(asked).split():
        said = guesses.answer(flag, names, program)
        others = [
            name for other in re.findall(r"(\w+)\.py", said) for name in guesses.flags_of(other)
        ]
        named = re.findall(r"--(\w+)", said)
        assert set(named) <= {*names, *others}, (flag, said)


# ---- All sentences
# An imperative, where a sentence or a part of it begins.
VERB = (
    "give|leave|lower|raise|swap|restore|remove|convert|write|unpack|save|name|take|train|try|"
    "check|connect|use|put|mend|split|shorten|begin|add|start|make|move|free|install|type|stop|"
    "cut|set|allow|wait|run|state|prepare|draw|see|need"
)
ADVICE = re.compile(rf"(?:^|[;:,(] ?|\bor |\band )(?:{VERB})\b|such as |must be a multiple|needs")
SOURCES = [
    ROOT.glob("*.py"),
    *(ROOT.glob(f"{at}/*.py") for at in ("support", "studies", "lessons")),
]


def template(node):
    """The text of a string in a source, with {} for what is put in; "" of anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            template(part) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else ""


def strings(node):
    """The strings in a part of a source but for docstrings and the help of flags."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.Call) and getattr(child.func, "id", "") in ("opt", "Order"):
            continue
        if template(child):
            yield template(child)
        elif not isinstance(child, ast.JoinedStr):
            yield from strings(child)


def advising():
    """(file, sentence) of all sources that advises something."""
    for path in sorted(path for found in SOURCES for path in found):
        for text in strings(ast.parse(path.read_text(encoding="utf-8"))):
            if " " in text and ADVICE.search(text):
                yield path.name, text


# File -> the words of advice that no test here follows. By reason.
OUTSIDE = {
    "it needs another machine, network, package, disk or more memory": """
        eval.py: connect to a network
        sources.py: connect to a network | this Python lacks pydoc_data
        export.py: needs onnx, onnxscript and npm
        minimal.py: -m pip install torch
        harness.py: this needs lm-evaluation-harness
        cli.py: needs the package | =check that path | check that and the free space
        cli.py: out of memory
        compiling.py: --compile=on needs Triton
        environment.py: make .venv | this needs Python 3.10 | ; type:
        files.py: check that path | free some space
        outputs.py: check that path | in one that is yours | standard output is closed
        page.py: connect-src | the packages onnx | npm, a part of | it needs a network
        page.py: check it, then run this again | remove node_modules
        plots.py: give --pictures=FOLDER or none
        arguments.py: move one of them | give one on the CPU
        bench.py: raise --time_limit | is in no name of an operation
        runs.py: --time_limit={}, {}; give more
        pace.py: nothing is trained; give more time""",
    "it needs several ranks, or a run that is training": """
        eval.py: wait for one, or leave it out
        checkpoint.py: stop the run that is training there
        runs.py: give all ranks the same | a folder that all share | an --out_dir that all share
        runs.py: give a checkpoint that all share
        runtime.py: start with torchrun | and that all ranks run | start all with the same flags
        shards.py: give a number that does | --shard is not for | that all share""",
    "it asks for what was lost or damaged, from a copy of the user's": """
        eval.py: restore it, or give --data
        checkpoint.py: restore it from a copy | use the version that wrote it
        checkpoint.py: too small; train again | take an earlier checkpoint
        shards.py: take an earlier checkpoint
        likelihood.py: its weights are damaged
        ids.py: it is cut off: restore it | is missing or no regular file
        records.py: cannot be read ({}); restore it | =restore it
        runs.py: restore it, or start again with --overwrite
        sources.py: restore it, or prepare the data again
        texts.py: changed while it was read
        tokenizer.py: take one with a smaller vocabulary""",
    "it asks Python callers for another argument, not for a flag": """
        arguments.py: those that encode returned | is no id of this tokenizer | the first thing that
        arguments.py: the second thing that | {}, not {}; give {} | has ids from | ; cut it
        arguments.py: leave some out | leave it out, or allow one | leave one out of it
        arguments.py: at least a window | needs all {} of its context | the true tokens there
        arguments.py: scored is not for | {}; give 0 to {} | at least a row of a token
        arguments.py: or set a UTF-8 locale
        sample.py: is no setting; give
        checkpoint.py: is no path; give | is no path that can be
        sources.py: --data is empty
        tokenizer.py: is no id of a text""",
    "it is about exercises and pictures of a reader, tried in test_lessons.py": """
        animate.py: give a page that | check.py: give a lesson
        checks.py: a tensor of shape | draw at [MASK] alone | draw tokens from | ends in .py
        likeliest.py: the folder of a run | needs a model that fills gaps
        patterns.py: give --seeds of | a run with --data=patterns
        plots.py: give .png or .svg
        pictures.py: draw what | give --run without | train with --time_conditioning""",
    "test_an_answer_names_flags_that_there_are checks it": """
        guesses.py: give --device | name run_name | see --lr_schedule | give --max_steps
        guesses.py: give --dtype | give --compile | give that as --data | leave it out""",
    "another test follows it: in test_durable.py, test_pace.py or test_data_kinds.py": """
        runs.py: give --overwrite again | Nothing is saved yet
        log.py: raise what ended it
        ids.py: or state the width | give --vocab_size if | another --bin_dtype | =give {}""",
    "it could be followed, and is not yet": """
        runs.py: /latest to go on | --out_dir={} {}; give another | would be replaced; give another
        runs.py: has other tokens than
        ids.py: every second id is 0 | remove its {} bytes | has no tokens; give more text
        ids.py: write the ids alone | write ids there
        sources.py: left out: | =leave it out | remove it | or no answer; give some
        texts.py: name it .jsonl | =leave it out | give more records
        seams.py: begin it with a space | leave out what it lacks | take another model
        ownership.py: move it away
        export.py: train without it | a tokenizer without gaps
        harness.py: give a number
        cli.py: --{}={} is not accepted; give {} | such as --{}=
        records.py: does not exist | save it to a file | =unpack it | give texts | .txt
        records.py: unpack it, or save | name it .parquet | give a text file | {}, or train.bin
        records.py: ={}; give {} | move away what | or raise --max_bad_records
        records.py: convert it with iconv
        records.py: split it | =mend or remove it | give --text_column
        templates.py: give UTF-8 text | give a word, or no prompt | write a text with
        tokenizer.py: give one | name its --end_token""",
}


def outside():
    """(file, words) of OUTSIDE; words that begin with = are all of a sentence."""
    for text in OUTSIDE.values():
        file = ""
        for part in re.split(r"\n| \| ", text):
            named = re.match(r"\s*(\w+\.py): (.*)", part)
            if named:
                file, part = named.groups()
            if part.strip():
                yield file, part.strip()


def fits(sentence, words):
    return sentence == words[1:] if words.startswith("=") else words in sentence


def test_every_advice_is_in_a_table():
    found = list(advising())
    known = list(outside())
    followed = [words for _, words, *_ in CASES] + [words for _, _, words, _ in FILES]
    for file, sentence in found:
        is_known = any(file == name and fits(sentence, words) for name, words in known)
        assert is_known or any(words in sentence for words in followed), (file, sentence)
    for file, words in known:
        assert any(file == name and fits(s, words) for name, s in found), f"not said: {words}"
