"""The mistakes of a first hour: one sentence that names what was wrong, and nothing written.

Each row is a command, the names that its sentence must have, and the same command made right, where
a row has one. No sentence is quoted here: only the flag, the path or the character that matters.
"""

import importlib
import shlex
import sys

import numpy as np
import pytest
from conftest import tiny_flags

from nanomdlm.support.cli import entry
from nanomdlm.support.run import folder as run_folder

TINY = tiny_flags("--max_steps=1", "--eval_windows=2", "--data={text}", "--out_dir=new")

# (command, names, the command made right). {names} are files and runs of `made`; {run} is a copy
# that a command may change. A new run of mdlm.py is a tiny one but for the flags of its row.
OF_TRAINING = [
    # Data
    ("--data=nowhere.txt", "--data nowhere.txt", "--data={text}"),
    ("--data={empty}", "empty", "--data={text}"),
    ("--data={short}", "--block_size=32", "--data={text} --block_size=8"),
    ("--data={latin}", "latin", "--data={text}"),
    ("--data={no_files}", "no_files", "--data={folder}"),
    ("--data={binary}", "binary", "--data={text}"),
    ("{text}", "--data", "--data={text}"),
    ("--data={broken}", "broken.jsonl 2", "--data={records}"),
    ("--data={records} --text_column=nothing", "nothing text", "--data={records}"),
    ("--data={ids} --vocab_size=3", "--vocab_size 6", "--data={ids} --vocab_size=7"),
    ("--tokenizer=bytes", "--tokenizer bytes", "--tokenizer=byte"),
    # Flags
    ("--n_lyer=2", "--n_lyer --n_layer", "--n_layer=2"),
    ("--n_layer=two", "--n_layer two", "--n_layer=2"),
    ("--n_layer", "--n_layer", "--n_layer 1"),
    ("--dropout=nan", "--dropout nan", "--dropout=0"),
    # Combinations
    ("--n_embd=34", "--n_embd 34", "--n_embd=36"),
    ("--block_length=5", "--block_length --block_size", "--block_length=8"),
    # Runs
    ("--out_dir={run}", "{run} --resume --overwrite", "--out_dir={run} --overwrite"),
    ("--out_dir={ids} --data={text}", "{ids}", ""),
    ("--data={folder} --out_dir={folder}", "{folder}", ""),
    ("--out_dir=nowhere --resume", "nowhere", ""),
    ("--out_dir={run} --resume --overwrite", "--resume --overwrite", "--out_dir={run} --overwrite"),
    ("--out_dir={run} --resume --n_layer=3", "--n_layer", "--out_dir={run} --resume --max_steps=5"),
    ("--init_from=nowhere", "--init_from=nowhere", "--init_from={run}"),
    ("--init_from={nanogpt}", "{nanogpt}", ""),
    ("--init_from={run} --n_embd=64", "n_embd=32", "--init_from={run} --n_embd=32"),
]
OF_OTHERS = [
    # sample.py
    ("sample --out_dir=nowhere", "nowhere", "sample --out_dir={run}"),
    ("sample {run}", "--out_dir", "sample --out_dir={run}"),
    ("sample --out_dir={run} --infill=the", "the █", "sample --out_dir={run} --infill=the█"),
    ("sample --out_dir={run} --prompt=the█", "--infill", "sample --out_dir={run} --infill=the█"),
    ("sample --out_dir={run} --infill=t☃█", "☃", "sample --out_dir={run} --infill=te█"),
    ("sample --out_dir={run} --infill={long}█", "41 32", "sample --out_dir={run} --infill=a█"),
    ("sample --out_dir={run} To be█", "be█", "sample --out_dir={run} 'to be█'"),
    ("sample --out_dir={run} --batch=nowhere", "nowhere", ""),
    ("sample --out_dir={run} --batch={empty}", "{empty}", "sample --out_dir={run} --batch={gaps}"),
    ("sample --out_dir={run} --temperature=hot", "--temperature hot", ""),
    ("sample --out_dir={run} --order=best", "--order best random", ""),
    ("sample --out_dir={run} --json={folder}", "{folder}", "sample --out_dir={run} --json=new"),
    # The other programs
    ("eval --out_dir=nowhere", "nowhere", "eval --out_dir={run}"),
    ("eval --out_dir={run} --data=nowhere", "nowhere", "eval --out_dir={run} --data={text}"),
    ("eval --out_dir={run} --data={accents}", "é", "eval --out_dir={run} --data={text}"),
    ("eval --out_dir={run} --text={long}", "--text 40 32", "eval --out_dir={run} --text=abc"),
    ("eval --compare={run},nowhere", "nowhere", "eval --compare={run}"),
    ("export --out_dir={run}", "--dest", "export --out_dir={run} --dest=new"),
    ("export --out_dir={run} --dest={folder}", "{folder}", ""),
    ("serve --out_dir={run} --host=0.0.0.0", "0.0.0.0", ""),
    ("bench training", "training train", ""),
]
ROWS = [(f"mdlm {wrong}", names, right and f"mdlm {right}") for wrong, names, right in OF_TRAINING]
ROWS += OF_OTHERS


@pytest.fixture(scope="session")
def made(pydoc, short_run, tmp_path_factory):
    """Texts, ids and runs of each kind, by the names that rows give them; not to be changed."""
    at = tmp_path_factory.mktemp("mistakes")
    text = pydoc[:6000]
    (at / "text").write_text(text, encoding="utf-8")
    (at / "accents").write_text(text + "é" * 99, encoding="utf-8")
    (at / "empty").touch()
    (at / "short").write_text("a few words")
    (at / "latin").write_bytes("caf\xe9 ".encode("latin-1") * 99)
    (at / "binary").write_bytes(bytes(range(256)) * 99)
    (at / "gaps").write_text("a█\nb█\n", encoding="utf-8")
    (at / "records.jsonl").write_text('{"text": "some words"}\n' * 60)
    (at / "broken.jsonl").write_text('{"text": "some words"}\n{"text": \n' * 60)
    for folder in ("no_files", "folder", "ids", "nanogpt"):
        (at / folder).mkdir()
    (at / "nanogpt" / "ckpt.pt").touch()
    (at / "folder" / "a.txt").write_text(text, encoding="utf-8")
    for name in ("train.bin", "val.bin"):
        (np.arange(300, dtype=np.uint16) % 7).tofile(at / "ids" / name)
    found = {path.name.removesuffix(".jsonl"): str(path) for path in at.iterdir()}
    return found | dict(long="a" * 40, broken=str(at / "broken.jsonl"))


def typed(command, places):
    """(program, flags) of a command of a row."""
    program, *flags = [word.format_map(places) for word in shlex.split(command)]
    given = {flag.partition("=")[0] for flag in flags}
    if program == "mdlm" and "--resume" not in flags:
        more = [flag.format_map(places) for flag in TINY]
        flags = [flag for flag in more if flag.partition("=")[0] not in given] + flags
    if program == "sample":
        flags += ["--device=cpu"] + ["--steps=1"] * ("--compare" not in given)
    if program == "eval" and "--text" not in given:
        flags += ["--pictures=none"]
        flags += ["--windows=1"] * (not {"--windows", "--compare"} & given)
    return program, flags


def what_is_in(folder):
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize("wrong, names, right", ROWS, ids=[wrong[:60] for wrong, *_ in ROWS])
def test_a_mistake_is_one_sentence(wrong, names, right, made, run, tmp_path, monkeypatch, capfd):
    """Exit code 2, one line that names what matters, nothing written; made right, it works."""
    monkeypatch.chdir(tmp_path)
    if wrong.startswith("serve "):
        for package in ("starlette", "uvicorn", "greenlet", "pydantic"):
            pytest.importorskip(package)
    places = made | dict(run=str(run))
    before = what_is_in(tmp_path)
    program, flags = typed(wrong, places)
    monkeypatch.setattr(sys, "argv", [f"{program}.py"])
    assert entry.run(importlib.import_module(program).main, flags, run_folder.release) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"{program}.py: "), said
    assert all(name.format_map(places) in said for name in names.split()), said
    assert what_is_in(tmp_path) == before
    if right:
        program, flags = typed(right, places)
        assert entry.run(importlib.import_module(program).main, flags, run_folder.release) == 0
