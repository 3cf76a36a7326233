"""No flag is silently without effect: with it something else comes out, or it is refused.

Every flag of sample.py, eval.py, bench.py, export.py and the lessons' programs, in every context.
"""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, tiny_flags
from safetensors.torch import load_file, save_file
from test_arguments import lesson

import bench
import eval
import export
import mdlm
import sample
from studies import frontier
from support import cli
from support.errors import NoEffect
from support.training import checkpoint, runs
from support.web import live_page

slow = pytest.mark.slow

# What a model learned: flags of mdlm.py.
KINDS = {
    "default": "--data={text}",
    "ar": "--data={text} --objective=ar",
    "blocks": "--data={text} --block_length=4",
    "blocks of 1": "--data={text} --block_length=1",
    "whole": "--data={text} --block_length=4 --infill_share=0.5",
    "documents": "--data={records}",
    "learned lengths": "--data={records} --document_length=predicted",
    "documents ar": "--data={records} --objective=ar",
    "prompts": "--data={pairs} --prompt_column=prompt",
}


@pytest.fixture(scope="session")
def kinds(pydoc, tmp_path_factory):
    """A function: name of a kind -> the folder of a run with random weights."""
    at = tmp_path_factory.mktemp("kinds")
    words = re.findall(r"[a-z]+", pydoc)[:900]
    files = dict(text=at / "text.txt", records=at / "records.jsonl", pairs=at / "pairs.jsonl")
    files["text"].write_text(" ".join(words))
    groups = [words[i : i + 2 + i % 2] for i in range(0, 800, 3)]
    texts = [" ".join(group)[:7] for group in groups]
    records = [json.dumps(dict(text=text)) for text in texts]
    pairs = [json.dumps(dict(prompt=text[:2], text=text[2:5])) for text in texts]
    files["records"].write_text("\n".join(records))
    files["pairs"].write_text("\n".join(pairs))
    made = {}

    def make(name):
        if name in made:
            return made[name]
        flags = [flag.format_map(files) for flag in KINDS[name].split()]
        out = at / name.replace(" ", "_")
        size = ["--n_embd=16", "--block_size=8", "--n_layer=1", f"--out_dir={out}"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mdlm, "report", lambda run: None)
            run = mdlm.setup(mdlm.parse_args(tiny_flags(*size, *flags)), 0.0)
            g = torch.Generator().manual_seed(0)
            for key, tensor in run.averaged.state_dict().items():
                if tensor.is_floating_point() and key != "length_counts":
                    tensor += torch.randn(tensor.shape, generator=g) / 2
            runs.save(run)
        checkpoint.release()
        made[name] = str(out)
        return made[name]

    make.files = files
    return make


@pytest.fixture
def tried(kinds, monkeypatch, tmp_path, capfd):
    """A function: main and argv -> what came out, files too; None: refused in one sentence."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batch").write_text("th██ i\na█\n")
    (tmp_path / "gaps").write_text("th██ i\na[___]b\n")
    loaded = {}

    def read_once(path, read):
        key = (path, str(read.keywords))
        if key not in loaded:
            loaded[key] = checkpoint.read_newest(path, read)
        return loaded[key]

    monkeypatch.setattr(sample, "read_newest", read_once)
    monkeypatch.setattr(sample.word_statistics, "training_text", lambda *_: "")

    def run(main, argv):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        code = cli.run(main, argv, checkpoint.release)
        said = capfd.readouterr()
        files = {}
        for path in tmp_path.rglob("*"):
            if path.is_file() and path not in before:
                files[path.name] = comparable(path.read_bytes().decode(errors="replace"))
                path.unlink()
        if code:
            assert code == 2 and said.err.count("\n") == 1, (argv, said.err)
            return None, said.err
        return (comparable(said.out), files), said.err

    run.known = {}
    return run


def comparable(text):
    """Output without what differs from run to run, and without what only repeats a flag."""
    text = text.partition("\nsetting ")[0]  # of --compare: the texts, not the table
    return re.sub(r'"(seconds|tokens/s|steps|setting)": [^,}]+', "", text)


def has_effect(run, main, base, flag):
    """Whether a flag changes what comes out; also if it is refused."""
    name = flag.partition("=")[0]
    argv = [word for word in base if word.partition("=")[0] != name]
    if str(argv) not in run.known:
        run.known[str(argv)] = run(main, argv)
    plain, said = run.known[str(argv)]
    if plain is None:  # it needs what the flag replaces
        plain, said = run(main, base)
    assert plain is not None, (argv, said)
    with_flag, said = run(main, [*argv, flag])
    return with_flag is None or with_flag != plain


# ---- sample.py

SAMPLE = """--steps=2 --correct=2 --redraw=sweep --spacing=1 --order=random --order=confidence
    --order=one_shot --block=3 --temperature=0.3 --top_k=2 --top_p=0.4 --cfg=3 --seed=7 --length=3
    --num_samples=3 --candidates=5 --max_gap=2 --prompt=an --html=page.html --infill=o██e
    --batch=batch --compare=temperature=1,2 --json=out.json""".split()
ABSENT = {
    "--out_dir": "another model, as all other tests show",
    "--device": "the same texts on any device",
    "--watch": "what it shows is no text (test_watch_i_plain_lines_in_a_pipe)",
}
CONTEXTS = {
    "nothing": "",
    "few": "--steps=3",
    "one": "--steps=1",
    "greedy": "--temperature=0",
    "top": "--top_k=1",
    "reveals": "--correct=0",
    "ordered": "--order=left_to_right --correct=0 --temperature=0",
    "one shot": "--order=one_shot",
    "short": "--length=6",
    "long": "--length=14",
    "prompt": "--prompt=the",
    "several": "--num_samples=2",
    "page": "--html=page.html",
    "chunks of 1": "--block=1",
    "ranked": "--infill=t███_i",
    "one gap": "--infill=th█_i",
    "drawn": "--infill=t███_i --num_samples=1",
    "unknown": "--infill=th[___]i",
    "unknown drawn": "--infill=[___] --num_samples=2",
    "open": "--infill=th[___]",
    "both": "--infill=t█[___]o",
    "batch": "--batch=batch",
    "gaps": "--batch=gaps",
    "steps": "--compare=steps=4,8 --num_samples=2",
    "orders": "--compare=order=random,one_shot --num_samples=2",
}
ELSEWHERE = ("nothing", "greedy", "prompt", "long", "ranked", "both")
PLACES = [
    (kind, context)
    for kind in KINDS
    for context in (CONTEXTS if kind == "default" else ELSEWHERE)
    if kind in ("default", "whole", "documents", "learned lengths")
    or "infill" not in CONTEXTS[context]
]


def sample_base(kinds, kind, context):
    base = [f"--out_dir={kinds(kind)}", "--device=cpu", *CONTEXTS[context].split()]
    base += ["--json=-"] * ("compare" not in CONTEXTS[context])
    if kind not in ("ar", "documents ar", "blocks of 1") and "steps" not in CONTEXTS[context]:
        base += ["--steps=8"] * (context not in ("one shot", "chunks of 1", "orders"))
    return [word.replace("_i", " i") for word in base]


def check_sample(kinds, tried, kind, context, flags):
    base = sample_base(kinds, kind, context)
    if kind == "prompts" and "--prompt" not in CONTEXTS[context]:
        base.append("--prompt=the")
    if tried(sample.main, base)[0] is None:
        return  # nothing that can be asked for
    silent = [flag for flag in flags if not has_effect(tried, sample.main, base, flag)]
    assert not silent, (base, silent)


@pytest.mark.parametrize("context", [*CONTEXTS])
def test_flags_of_sample_have_an_effect(kinds, tried, context):
    n = [*CONTEXTS].index(context)
    check_sample(kinds, tried, "default", context, SAMPLE[n % 4 :: 4])


@slow
@pytest.mark.parametrize("kind, context", PLACES)
def test_every_flag_of_sample_has_an_effect(kinds, tried, kind, context):
    check_sample(kinds, tried, kind, context, SAMPLE)
