"""What programs and functions are given: guesses work or are answered, mistakes get a sentence."""

import copy
import dataclasses
import importlib.util
import io
import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

import bench
import eval
import export
import mdlm
import sample
from support import cli, guesses
from support.aliases import ALIASES
from support.data.tokenizer import Tokenizer, tokenizer_from_json
from support.errors import UserError
from support.flags import parse_flags
from support.infill import likelihood, ranking, search, templates
from support.training import checkpoint

PROGRAMS = dict(mdlm=mdlm.Config, sample=sample.Options, eval=eval.Options)
PROGRAMS |= dict(bench=bench.Options, export=export.Options)
SHIPPED = ROOT / "weights" / "shakespeare"


@pytest.fixture(scope="module")
def tiny(short_run):
    """(model, tokenizer): 2 layers, a context of 32, characters."""
    return mdlm.load(short_run)[:2]


@pytest.fixture(scope="module")
def shakespeare():
    """The tokenizer of the shipped model, which has no _ and no [."""
    return tokenizer_from_json(SHIPPED / "tokenizer.json")


def flags(program, *argv, **more):
    return parse_flags(PROGRAMS[program], list(argv), "", **more)


def refusal(call, *args, **more):
    """The sentence with which a call is refused."""
    with pytest.raises(UserError) as e:
        call(*args, **more)
    assert "\n" not in str(e.value)
    return str(e.value)


def lesson(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "lessons" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --------------------------------------------------------------------------------------------------
# An empty value is a value


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_flag_takes_an_empty_value(program):
    for field in dataclasses.fields(PROGRAMS[program]):
        for value in ("", " ", "\n\t") if field.type is str else ("",):
            if value and field.metadata.get("text"):
                assert flags(program, f"--{field.name}={value}") == {field.name: value}
            else:
                assert f"--{field.name}" in refusal(flags, program, f"--{field.name}={value}")
                assert f"--{field.name}" in refusal(flags, program, f"--{field.name}", value)


def test_lessons_take_no_empty_value(tmp_path, capsys, monkeypatch):
    picture = str(tmp_path / "x.png")
    for name, argv in (
        ("pictures", [picture, "--run="]),
        ("pictures", [picture, "--text="]),
        ("pictures", [""]),
        ("patterns", ["", picture]),
        ("patterns", [str(SHIPPED), " "]),
        ("likeliest", ["", "a█"]),
        ("likeliest", [str(SHIPPED), ""]),
        ("check", ["1", ""]),
    ):
        assert cli.run(lesson(name).main, argv) == 2
        said = "".join(capsys.readouterr())
        assert said.count("\n") == 1 and ("empty" in said or "no file" in said), said
    for argv in ([""], ["", "--seconds=1"], ["--template="]):
        monkeypatch.setattr(sys, "argv", ["minimal.py", *argv])
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(ROOT / "lessons" / "minimal.py"), run_name="__main__")
        assert "is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_empty_parts_of_values_are_refused():
    assert "''" in refusal(bench.main, [""])
    assert "--compare" in refusal(eval.main, ["--compare=out,"])
    assert "--compare" in refusal(eval.main, ["--compare=,out"])
    assert "no path" in refusal(mdlm.load, "\ud800")
    assert "empty" in refusal(mdlm.load, "") and "empty" in refusal(mdlm.load, " ")


def test_a_place_where_nothing_may_be_drawn_is_refused(tiny):
    model = tiny[0]
    x = torch.full((1, 4), model.mask_id)
    only = {2: torch.arange(model.vocab_size) == 5}
    assert "forbid has all" in refusal(sample.generate, model, x, allowed=only, forbid=[5])


@pytest.mark.parametrize("given, wanted", [("~/x", "{}/x"), ("~", "{}"), ("a~/x", "a~/x")])
def test_home_folder_is_found_behind_an_equals_sign(monkeypatch, tmp_path, given, wanted):
    """Shells leave --out_dir=~/x as it is; a folder called ~ would be made, and removed one day."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    wanted = wanted.format(tmp_path)
    for program, name in (
        *(("mdlm", name) for name in ("data", "out_dir", "init_from", "tokenizer")),
        *(("sample", name) for name in ("out_dir", "batch", "html", "json")),
        *(("eval", name) for name in ("out_dir", "data", "json", "pictures")),
        *(("bench", "json"), ("export", "out_dir"), ("export", "dest")),
    ):
        assert flags(program, f"--{name}={given}") == {name: wanted}
    assert flags("sample", "--prompt=~/x") == dict(prompt="~/x")
    if given != "~":
        assert f"{wanted} holds no" in refusal(mdlm.load, given)


def test_empty_settings_of_a_checkpoint_stay(tmp_path):
    kept = dict(data="", separator="", init_from="", end="", out_dir="")
    content = dict(format="mdlm", version=1, config=kept)
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = mdlm.read_config(tmp_path)
    assert kept.items() <= vars(config).items()


# --------------------------------------------------------------------------------------------------
# Guesses


@pytest.mark.parametrize(
    "program, argv, wanted",
    [
        ("mdlm", "--block-size=64 --n-layer 2", dict(block_size=64, n_layer=2)),
        ("mdlm", "--batch=8 --n_layers=3 --heads 2", dict(batch_size=8, n_layer=3, n_head=2)),
        ("mdlm", "--context=32 --d-model=64 --bs=4", dict(block_size=32, n_embd=64, batch_size=4)),
        ("mdlm", "--output-dir=o --max_iters=5", dict(out_dir="o", max_steps=5)),
        ("mdlm", "--steps=5 --wd=0.1 --dataset=x", dict(max_steps=5, weight_decay=0.1, data="x")),
        ("mdlm", "--time-limit=5 --resume", dict(time_limit=5.0, resume=True)),
        ("mdlm", "--resume auto --overwrite no", dict(resume="auto", overwrite=False)),
        ("sample", "--num-samples=2 --temp=0.8 --ckpt=x", None),
        ("sample", "--top-k=2 --watch --max-gap 3", dict(top_k=2, watch=True, max_gap=3)),
        ("eval", "--model=x --pictures=none", dict(out_dir="x", pictures="none")),
        ("export", "--model=x --out=y --pad-to-context", None),
        ("bench", "--time-limit=3", dict(time_limit=3.0)),
    ],
)
def test_names_that_mean_the_same_work(program, argv, wanted):
    found = flags(program, *argv.split())
    if program == "sample" and wanted is None:
        wanted = dict(num_samples=2, temperature=0.8, out_dir="x")
    if program == "export":
        wanted = dict(out_dir="x", dest="y", pad_to_context=True)
    assert found == wanted


def test_tables_of_guesses_fit_the_flags():
    for program, cls in PROGRAMS.items():
        names = {field.name for field in dataclasses.fields(cls)}
        assert names == set(guesses.flags_of(program))
        synonyms = guesses.SYNONYMS[program]
        others = " ".join(synonyms.values()).split()
        answered = " ".join(guesses.ANSWERS[program]).split()
        assert set(synonyms) <= names
        assert len(set(others)) == len(others) and not set(others) & names
        assert not (set(others) | names) & set(answered)
        assert not (set(others) | names) & set(" ".join(guesses.ANSWERS[""]).split())


@pytest.mark.parametrize(
    "program, flag, words",
    [
        ("mdlm", "--lr=1", ["--learning_rate", "--muon_lr"]),
        ("mdlm", "--epochs=2", ["--max_steps", "--batch_size", "--block_size"]),
        ("mdlm", "--wandb", ["log.jsonl", "loss.png", "--log=wandb"]),
        ("sample", "--tensorboard", ["log.jsonl"]),
        ("mdlm", "--prompt=a", ["sample.py"]),
        ("mdlm", "--model=gpt2", ["--preset", "--init_from"]),
        ("mdlm", "--config=a.yaml", ["each setting is a flag"]),
        ("mdlm", "--bf16", ["--dtype=bfloat16"]),
        ("eval", "--cuda", ["--device=cpu, cuda"]),
        ("sample", "--max_new_tokens=9", ["--length"]),
        ("sample", "--text=a", ["--prompt", "--infill"]),
        ("sample", "--lenght=9", ["the nearest is --length"]),
        ("mdlm", "--Data=x", ["the nearest is --data"]),
        ("mdlm", "-data=x", ["the nearest is --data"]),
        ("mdlm", "data=x", ["--data=x"]),
        ("export", "out", ["--out_dir="]),
    ],
)
def test_what_cannot_work_is_answered(program, flag, words):
    said = refusal(flags, program, flag)
    assert all(word in said for word in words), said


def test_flags_of_another_program_name_it():
    for program, other in (("sample", "mdlm"), ("eval", "sample"), ("mdlm", "eval")):
        names = guesses.flags_of(program)
        for name in set(guesses.flags_of(other)) - set(names):
            known = guesses.ours(name, names, program) or name in str(guesses.ANSWERS[program])
            is_former = any(name in former for _, former, _ in ALIASES.get(program, ()))
            if not (known or is_former):
                assert f"{other}.py" in refusal(flags, program, f"--{name}=1"), name


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_nonsense_is_proposed(program):
    for flag in ("--wandb", "--zzz", "--foo_bar=1", "--q", "--xyz123", "--lr"):
        assert "nearest" not in refusal(flags, program, flag)


def test_lessons_refuse_unknown_flags_in_a_sentence(tmp_path, capsys):
    assert cli.run(lesson("patterns").main, [str(SHIPPED), "x.png", "--seed=3"]) == 2
    assert "the nearest is --seeds" in capsys.readouterr().err
    assert cli.run(lesson("pictures").main, [str(tmp_path / "x.png"), "--wandb"]) == 2
    said = capsys.readouterr().err
    assert "no flag --wandb" in said and said.count("\n") == 1 and "nearest" not in said


@pytest.mark.parametrize("script", ["lessons/facts.py", "studies/scale.py"])
def test_programs_without_flags_refuse_what_is_given(script):
    for argument in ("--foo", "--foo=1", "x", "-z"):
        command = [sys.executable, str(ROOT / script), argument]
        r = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (r.returncode, r.stdout, r.stderr.count("\n")) == (2, "", 1)
        assert argument.partition("=")[0] in r.stderr


LONG_PATHS = [
    (name, field.name)
    for name, cls in PROGRAMS.items()
    for field in dataclasses.fields(cls)
    if field.metadata["path"]
]


@pytest.mark.parametrize("program, flag", LONG_PATHS)
def test_a_path_that_is_too_long_names_its_flag(program, flag):
    for path in (5000 * "a", "./" + 300 * "a", "a/" * 4000):
        said = refusal(flags, program, f"--{flag}={path}")
        assert f"--{flag}=" in said and len(said) < 200


def test_other_paths_that_are_too_long_are_named_too(tmp_path, capsys):
    path = 5000 * "a"
    assert cli.run(eval.main, [f"--compare={path}"]) == 2
    assert "--compare=aa" in capsys.readouterr().err
    assert cli.run(lesson("patterns").main, [str(SHIPPED), f"{path}.png"]) == 2
    assert "PICTURE=aa" in capsys.readouterr().err
    assert lesson("check").main(["1", path]) == 2
    assert "there is no file aa" in capsys.readouterr().out


@pytest.mark.parametrize("preset", mdlm.PRESETS)
def test_every_preset_takes_every_kind_of_data(preset, tmp_path, text_file):
    """What a preset implies contradicts no data: then no advice could be followed."""
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n')
    (tmp_path / "ids").mkdir()
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "ids" / "train.bin")
    for data in ("patterns", text_file, tmp_path / "a.jsonl", tmp_path / "ids"):
        given = mdlm.parse_args([f"--preset={preset}", f"--data={data}", f"--out_dir={tmp_path}/o"])
        config, _ = mdlm.make_config(given, None, 1)
        assert config.preset == preset


@pytest.mark.parametrize(
    "name, words",
    [
        ("gpt2", "nothing is loaded from a hub"),
        ("gpt2", "hf download NAME --local-dir FOLDER"),
        ("gpt2-xl", "docs/pretrained.md"),
        ("kuleshov-group/mdlm-owt", "nothing is loaded from a hub"),
        ("scratch", "leave it out"),
        ("resume", "--resume"),
        ("{tmp}/hf", "has no model.safetensors"),
        ("{tmp}/nanogpt", "a run of nanoGPT"),
        ("{tmp}/model.pt", "is a file"),
    ],
)
def test_init_from_says_what_can_be_loaded(name, words, tmp_path, text_file):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "nanogpt").mkdir()
    (tmp_path / "nanogpt" / "ckpt.pt").touch()
    (tmp_path / "model.pt").touch()
    name = name.format(tmp=tmp_path)
    argv = [f"--data={text_file}", f"--init_from={name}", f"--out_dir={tmp_path}/out"]
    try:
        said = refusal(mdlm.main, [*argv, "--device=cpu"])
    finally:
        checkpoint.release()
    assert not (tmp_path / "out").exists()
    if name == f"{tmp_path}/hf" and not importlib.util.find_spec("transformers"):
        assert "pip install transformers" in said  # first of all: its config.json cannot be read
        return
    assert name in said and words in said
    assert "mdlm.py" in said or name in ("scratch", "resume", f"{tmp_path}/hf")


# --------------------------------------------------------------------------------------------------
# Texts and templates


@pytest.mark.parametrize(
    "template, with_line, without",
    [
        ("a[MASK]b", ["a", 1, "b"], ["a", 1, "b"]),
        ("a[MASK][MASK]█b", ["a", 3, "b"], ["a", 3, "b"]),
        ("a█_█[MASK]", ["a", 1, "_", 2], ["a", 4]),
        ("a___b", None, ["a", 3, "b"]),
        ("_", None, [1]),
        ("a[___]b_", ["a", None, "b_"], ["a", None, "b", 1]),
        ("\\[MASK]█", ["[MASK]", 1], ["[MASK]", 1]),
    ],
)
def test_marks_of_gaps(template, with_line, without):
    characters = list("ab[]MASK")
    for vocabulary, wanted in (([*characters, "_"], with_line), (characters, without)):
        tokenizer = Tokenizer("char", sorted(vocabulary))
        assert templates.is_template(template, tokenizer) == (wanted is not None)
        if wanted is None:
            assert "nothing to fill" in refusal(templates.parse, template, tokenizer, 32)
        else:
            assert templates.parse(template, tokenizer, 32) == wanted


def test_underscores_are_text_where_they_can_be_spelled():
    for tokenizer in (Tokenizer("byte"), Tokenizer("word", ["a_b"])):
        assert templates.parse("a_b█", tokenizer, 32) == ["a_b", 1]
    ids = Tokenizer("id", 9)
    assert templates.parse("1 _ [MASK]", ids, 9) == ["1 ", 1, " ", 1]


def test_unknown_characters_keep_their_place(shakespeare):
    assert "position 8" in refusal(templates.parse, "a[MASK]b\u2603█", shakespeare, 256)
    assert "position 3" in refusal(templates.parse, "___\u2603", shakespeare, 256)


def test_a_text_needs_no_flag(tmp_path, monkeypatch):
    def place(*argv):
        given = sample.place_text(flags("sample", *argv, free="text"))
        return {name: given[name] for name in ("prompt", "infill") if name in given}

    shipped = f"--out_dir={SHIPPED}"
    assert place("ROMEO:") == place("--watch", "ROMEO:") == dict(prompt="ROMEO:")
    assert place("--steps=3", "To be█") == dict(infill="To be█")
    assert place("To [___] be", "--seed=1") == dict(infill="To [___] be")
    assert place("To [MASK] be") == dict(infill="To [MASK] be")
    assert place(shipped, "To ___ be") == dict(infill="To ___ be")
    assert place("-") == dict(infill="-") and place("--", "--steps=█") == dict(infill="--steps=█")
    tokenizer = Tokenizer("char", list("_b"))
    monkeypatch.setattr(sample, "tokenizer_from_json", lambda path: tokenizer)
    assert place(shipped, "a_b") == dict(prompt="a_b")
    for argv in (["a", "--prompt=b"], ["a█", "--batch=b"], ["a", "b"], [""], ["--sdg"]):
        refusal(place, *argv)
    assert "--out_dir" in refusal(place, str(tmp_path))


def test_a_text_without_a_flag_is_written(short_run, capsys):
    argv = [f"--out_dir={short_run}", "--steps=1", "--json=-", "--device=cpu"]
    assert sample.main([*argv, "the", "--length=9"]) == 0
    assert json.loads(capsys.readouterr().out)["text"].startswith("the")
    assert sample.main([*argv, "the [MASK] of", "--num_samples=1"]) == 0
    assert len(json.loads(capsys.readouterr().out)["text"]) == len("the █ of")
    assert "--infill" in refusal(sample.main, [*argv, "--prompt=the██"])


def test_lists_of_texts_are_written_one_by_one(tiny):
    def write(text, **settings):
        return sample.write(*tiny, text, steps=2, correct=0, seed=3, **settings)

    alone = [write("th███")[0], write("of██")[0]]
    assert write(["th███", "of██"]) == alone == write(("th███", "of██"))
    assert write(["th███", "of██"], n=2) == write("th███", n=2) + write("of██", n=2)
    assert write([]) == []
    assert "\\u2603" in ascii(refusal(write, ["th███", "\u2603█"]))


# --------------------------------------------------------------------------------------------------
# Line ends


@pytest.mark.parametrize(
    "content, lines, whole",
    [
        ("a█\nb█\n", ["a█", "b█"], "a█\nb█"),
        ("a█\r\nb█\r\n", ["a█", "b█"], "a█\r\nb█"),
        ("a█\r\nb█", ["a█", "b█"], "a█\r\nb█"),
        ("a\rb█\n", ["a\rb█"], "a\rb█"),
        ("a█\r\r\n", ["a█\r"], "a█\r"),
        ("a█\r", ["a█\r"], "a█\r"),
        ("a█\n\n", ["a█", ""], "a█\n"),
        (
            "a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029█\n",
            ["a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029█"],
            None,
        ),
        ("\ufeffa█\r\n", ["a█"], "a█"),
    ],
)
def test_line_ends_are_those_of_the_text(content, lines, whole, tmp_path, monkeypatch):
    (tmp_path / "batch").write_bytes(content.encode())

    def stdin():
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode()), "ascii"))
        return "-"

    assert templates.read_templates("", str(tmp_path / "batch")) == lines
    assert templates.read_templates("", stdin()) == lines
    assert templates.read_templates(stdin(), "") == [lines[0] if whole is None else whole]


def test_a_template_of_several_lines_keeps_their_ends():
    tokenizer = Tokenizer("char", list("\n\rab"))
    segments = templates.parse("a\r\n█\rb\n", tokenizer, 32)
    assert segments == ["a\r\n", 1, "\rb\n"]
    ids = templates.to_ids(segments, tokenizer, 2)
    assert templates.joined(templates.to_texts(segments, ids, tokenizer)) == "a\r\na\rb\n"


# --------------------------------------------------------------------------------------------------
# Python callers

V, T = 60, 8  # less than the vocabulary of `tiny`


def ids_of(shape=(2, T), value=1, dtype=torch.int64):
    return torch.full(shape, value, dtype=dtype)


TENSORS = {
    "float": ids_of(dtype=torch.float32),
    "bool": ids_of(dtype=torch.bool),
    "uint8": ids_of(dtype=torch.uint8),
    "1 axis": ids_of((T,)),
    "3 axes": ids_of((1, 2, T)),
    "negative": ids_of(value=-1),
    "above V": ids_of(value=1 << 20),
    "numpy": np.ones((2, T), np.int64),
    "list": [[1, 2]],
    "None": None,
    "meta": ids_of().to("meta"),
    "sparse": ids_of().to_sparse(),
}
TOO_LONG = {"long": ids_of((1, 33))}
COUNTS = {"zero": 0, "negative": -1, "a fraction": 1.5, "text": "3", "None": None, "bool": True}
COUNTS["meta"] = torch.ones((), dtype=torch.int64, device="meta")
SETTINGS = {key: COUNTS[key] for key in COUNTS if key not in ("zero",)}
GENERATORS = {"a number": 3, "numpy": np.random.default_rng(0), "text": "x"}
MASKS = {
    "shape": torch.ones(2, 3, dtype=torch.bool),
    "row": torch.ones(T, dtype=torch.bool),
    "dtype": torch.ones(2, T),
    "list": [[True]],
    "numpy": np.ones((2, T), bool),
    "meta": torch.ones(2, T, dtype=torch.bool, device="meta"),
}
FORBIDDEN = {"above": [1 << 20], "negative": [-1], "number": 3, "text": "ab", "fraction": [0.5]}
FORBIDDEN |= {"tensor": torch.tensor(1), "all": range(1 << 12), "None": None, "nested": [[1]]}
FORBIDDEN["meta"] = ids_of((2,)).to("meta")
ALLOWED = {"number": 3, "list": [1], "no tensor": {1: 2}, "shape": {1: torch.ones(3).bool()}}
ALLOWED["meta"] = {1: torch.ones(65, dtype=torch.bool, device="meta")}
ALLOWED |= {"text": "ab", "tensor": torch.ones(2, 2), "place": {99: torch.ones(3).bool()}}
ALLOWED |= {"a place": {"a": torch.ones(3).bool()}, "negative": {-1: torch.ones(3).bool()}}
NO_FUNCTIONS = {"number": 3, "zero": 0, "text": "x", "tensor": torch.ones(2, 2)}
ROWS = {"number": 3, "list": [1], "axes": ids_of((2, 2)), "float": torch.ones(2)}
ROWS |= {"above": ids_of((2,), 2 * T), "negative": ids_of((2,), -1)}
SAMPLES = {"length": torch.arange(3), "negative": torch.tensor([-1, 0]), "float": torch.rand(2)}
SAMPLES |= {"text": "ab", "shape": torch.zeros(2, 1, dtype=torch.int64), "large": [1 << 32, 0]}
SAMPLES["meta"] = torch.arange(2, device="meta")
TEXTS = {"bytes": b"a", "number": 5, "surrogate": "\ud800", "dict": {"a": 1}}
PATHS = {
    "long": "a" * 5000,
    "NUL": "a\0b",
    "None": None,
    "bytes": b"out",
    "number": 3,
    "empty": "",
    "list": ["out"],
}

# function: (a call of it with keywords that are right, argument -> wrong values)
CALLS = {
    "sample.generate": (
        lambda model, tokenizer, x=None, **settings: sample.generate(model, x, **settings),
        dict(x=TENSORS, fill=MASKS, samples=SAMPLES, generator=GENERATORS, seed=SETTINGS)
        | dict(steps=SETTINGS, top_k=SETTINGS, block=SETTINGS, spacing=COUNTS, forbid=FORBIDDEN)
        | dict(temperature={"nan": float("nan"), "text": "1", "None": None, "negative": -0.5})
        | dict(order={"unknown": "best", "number": 5, "None": None}, nonsense={"any": 1})
        | dict(allowed=ALLOWED, expect=NO_FUNCTIONS, memo={"number": 3})
        | dict(end_id={"above": 1 << 20, "negative": -1, "fraction": 0.5, "text": "a"}),
    ),
    "sample.unmask": (
        lambda model, tokenizer, x=None, **settings: list(sample.unmask(model, x, **settings)),
        dict(x=TENSORS, fill=MASKS, samples=SAMPLES, forbid=FORBIDDEN, seed=SETTINGS)
        | dict(allowed=ALLOWED, memo=NO_FUNCTIONS),
    ),
    "sample.write": (
        lambda model, tokenizer, x=None, text="th██", **settings: sample.write(
            model, tokenizer, text, **settings
        ),
        dict(text=TEXTS | {"a list": ["a█", 5]}, n=SETTINGS, length=SETTINGS, max_gap=COUNTS)
        | dict(generator=GENERATORS, steps=SETTINGS, fill={"None": None}),
    ),
    "sample.score": (
        lambda model, tokenizer, x=None, texts="th", **settings: sample.score(
            model, tokenizer, texts, **settings
        ),
        dict(texts=TEXTS | {"a list": ["a", 5], "a pair": ("a", "b" * 99), "set": {"a"}})
        | dict(passes=COUNTS | {"odd": 3}, seed=SETTINGS),
    ),
    "sample.logprobs": (
        lambda model, tokenizer, x=None, texts="th", **settings: sample.logprobs(
            model, tokenizer, texts, **settings
        ),
        dict(texts=TEXTS | {"a list": ["a", 5], "a pair": [("a", "b")]}, k=COUNTS),
    ),
    "sample.write_with_logprobs": (
        lambda model, tokenizer, x=None, text="th██", **settings: sample.write_with_logprobs(
            model, tokenizer, text, **settings
        ),
        dict(text=TEXTS, k=COUNTS, n=SETTINGS),
    ),
    "mdlm.generate": (
        lambda model, tokenizer, x=None, **settings: mdlm.generate(model, x, **settings),
        dict(x=TENSORS | TOO_LONG, steps=COUNTS, generator=GENERATORS),
    ),
    "mdlm.evaluate": (
        lambda model, tokenizer, x=None, windows=None, **settings: mdlm.evaluate(
            model, ids_of() if windows is None else windows, **settings
        ),
        dict(
            windows={k: v for k, v in TENSORS.items() if v is not None}
            | TOO_LONG
            | {"[MASK]": "mask", "no rows": ids_of((0, T)), "no tokens": ids_of((2, 0))},
            scored=MASKS | {"nothing": torch.zeros(2, T, dtype=torch.bool)},
            passes=COUNTS,
            batch_size=COUNTS,
            seed=SETTINGS,
            observe={"number": 3},
            deadline={"None": None, "text": "soon", "nan": float("nan")},
        ),
    ),
    "chain_rule": (
        lambda model, tokenizer, x=None, batch_size=None: likelihood.chain_rule(
            model, x if batch_size is None else ids_of(), batch_size
        ),
        dict(x=TENSORS | TOO_LONG | {"[MASK]": "mask"})
        | dict(batch_size={k: v for k, v in COUNTS.items() if v is not None}),
    ),
    "model": (
        lambda model, tokenizer, x=None, **settings: model(x, **settings),
        dict(x=TENSORS | TOO_LONG | {"no rows": ids_of((0, T))})
        | dict(
            x0={"number": 3, "shape": ids_of((2, 3)), "sparse": ids_of().to_sparse()}
            | {"above": ids_of(value=1 << 20)}
        )
        | dict(rows=ROWS),
    ),
    "mdlm.load": (
        lambda model, tokenizer, x=None, path=SHIPPED, **settings: mdlm.load(path, **settings),
        dict(path=PATHS, device={"None": None, "number": 5, "text": "gpu7"})
        | dict(kernel={"None": None, "text": "fast"}, whole={"number": 3, "text": "yes"}),
    ),
    "encode": (
        lambda model, tokenizer, x=None, text="a": tokenizer.encode(text),
        dict(text=TEXTS | {"None": None, "list": ["a"]}),
    ),
    "decode": (
        lambda model, tokenizer, x=None, ids=(): tokenizer.decode(ids),
        dict(
            ids={"None": None, "number": 5, "negative": [-1], "above": [1 << 20], "huge": [1 << 70]}
            | {"float": [1.5], "text": "ab", "texts": ["a"], "2 axes": torch.ones(1, 1).long()}
            | {"no axis": torch.tensor(1), "float tensor": torch.ones(2), "numpy": np.ones((1, 1))}
            | {"a mask": torch.ones(2).bool(), "truth values": [True, np.bool_(False)]}
        ),
    ),
}


@pytest.mark.parametrize("function", CALLS)
def test_python_callers_get_one_sentence(tiny, function):
    call, arguments = CALLS[function]
    right = ids_of(value=tiny[0].mask_id)
    for argument, values in arguments.items():
        for kind, value in values.items():
            if isinstance(value, str) and value == "mask":
                value = right
            said = ""
            try:
                call(*tiny, **dict(x=right) | {argument: value})
            except BaseException as e:
                said = e
            where = f"{function}({argument}: {kind})"
            assert isinstance(said, UserError) and "\n" not in str(said), (where, said)


SEVERAL_LINES = {
    "tensor": torch.zeros(2, 2),
    "ids": ids_of((3, 3)),
    "array": np.zeros((3, 3)),
    "text": "a\nb",
    "list": ["a\nb"],
    "long": 9 * [torch.zeros(2, 2)],
}


@pytest.mark.parametrize("function", CALLS)
def test_refusals_of_values_of_several_lines_are_one_line(tiny, function):
    """Whatever is refused, by whichever check: a tensor as a path, an array as a number."""
    call, arguments = CALLS[function]
    refused = 0
    for argument, (kind, value) in itertools.product(arguments, SEVERAL_LINES.items()):
        try:
            call(*tiny, **dict(x=ids_of(value=tiny[0].mask_id)) | {argument: value})
        except ValueError as e:
            refused += 1
            where = f"{function}({argument}: {kind})"
            assert isinstance(e, UserError) and "\n" not in str(e), (where, e)
            assert len(str(e)) < 300, (where, e)
    assert refused > len(arguments)


def test_models_without_values_are_refused(tiny):
    """On meta nothing can be computed; with NaN in its weights a model predicts nothing."""
    model, tokenizer = (copy.deepcopy(each) for each in tiny)
    x = ids_of(value=model.mask_id)
    next(model.parameters()).data.fill_(float("nan"))
    for kind in ("predicts NaN or inf", "model is on meta"):
        with pytest.raises(UserError, match=kind):
            mdlm.generate(model, x) if "NaN" in kind else mdlm.generate(model, x.to("meta"))
        with pytest.raises(UserError, match=kind):
            sample.write(model, tokenizer, "th██")
        model = model.to("meta")


def test_models_and_tokenizers_are_told_apart(tiny):
    model, tokenizer = tiny
    x = ids_of()
    refusal(sample.write, tokenizer, model, "a█")
    refusal(sample.write, None, tokenizer, "a█")
    refusal(sample.write, model, None, "a█")
    for call in (sample.generate, mdlm.generate, mdlm.evaluate):
        assert "mdlm.load" in refusal(call, tokenizer, x)


def test_a_tokenizer_of_another_model_is_refused(tiny):
    model, tokenizer = tiny
    fill = torch.ones(2, T, dtype=torch.bool)
    x = ids_of(value=model.mask_id)
    settings = sample.resolve(sample.SamplerSettings(), model)
    letters = tokenizer.vocab
    for other in (
        tokenizer_from_json(SHIPPED / "tokenizer.json"),
        Tokenizer("byte"),
        Tokenizer("id", 1 << 20),
        Tokenizer("char", letters, end=True),
        Tokenizer("char", letters[:-1]),
    ):
        both = (model, other)
        for call, args in (
            (sample.write, ()),
            (sample.write, ("a", 1, 8)),
            (sample.write, ("a[___]",)),
            (sample.fill_gaps, (settings, x, fill, False, False)),
            (search.hypotheses, (["a", 1], 1, None, "cpu")),
        ):
            said = refusal(call, *both, *args)
            assert "the one that mdlm.load returns with this model" in said
    other = Tokenizer("char", letters, end=3)
    documents = mdlm.make_model(model.config, model.vocab_size, model.ops, end_id=4)
    assert "[END]" in refusal(sample.write, documents, other)


@pytest.mark.parametrize("kind, x", TENSORS.items())
def test_ids_that_do_not_fit_are_not_ranked(tiny, kind, x):
    start = torch.zeros(2, dtype=torch.int64)
    refusal(ranking.likeliest, tiny[0], x, start, start + 2, start.double(), 1)


def test_numbers_of_numpy_and_torch_are_numbers(tiny):
    model, tokenizer = tiny
    x = ids_of(value=model.mask_id)
    settings = dict(steps=4, correct=1, temperature=0.5, top_k=3, seed=5, order="random", spacing=2)
    wanted = sample.generate(model, x, samples=torch.tensor([3, 1]), forbid=[2], **settings)
    for number in (np.int64, torch.tensor, np.array):
        same = {k: v if k in ("order", "temperature") else number(v) for k, v in settings.items()}
        same |= dict(order=np.str_("random"), temperature=np.float32(0.5))
        found = sample.generate(model, x, samples=[3, 1], forbid=np.array([2]), **same)
        assert torch.equal(found, wanted)
    for dtype in ("uint8", "int8", "int16", "uint16", "int32", "uint32", "uint64"):
        for numbers in (np.array([3, 1], dtype), torch.tensor([3, 1], dtype=getattr(torch, dtype))):
            assert torch.equal(
                sample.generate(model, x, samples=numbers, forbid=[2], **settings), wanted
            )
    texts = sample.write(model, tokenizer, "[___]", n=np.int64(2), max_gap=np.int8(3), seed=1)
    assert texts == sample.write(model, tokenizer, "[___]", n=2, max_gap=3, seed=1)
    g = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(*(mdlm.generate(model, x, n, h) for n, h in zip((3, np.int64(3)), g)))
    windows = ids_of()
    same = mdlm.evaluate(model, windows, np.int64(2), seed=np.uint8(1), batch_size=np.int32(1))
    assert same == mdlm.evaluate(model, windows, 2, seed=1, batch_size=1)
    ids = tokenizer.encode(np.str_("the"))
    for kind in (tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint16), iter):
        assert tokenizer.decode(kind(ids)) == "the"


def test_paths_and_devices_may_be_objects(short_run):
    model, _, config = mdlm.load(Path(short_run), torch.device("cpu"), whole=np.bool_(False))
    assert model(ids_of()).shape == (2, T, model.vocab_size) and config.block_size == 32


def test_ids_are_checked_without_a_hook_in_training(short_run):
    """Training's model is not one of `load`, so no step of it waits for a check."""
    config = mdlm.load(short_run)[2]
    model = mdlm.make_model(config, 9, mdlm.kernels.select("torch"))
    assert not model._forward_pre_hooks and mdlm.load(short_run)[0]._forward_pre_hooks
