"""What sample.py and Python callers are given: templates, texts, line ends, ids, numbers."""

import io
import json
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, run_mdlm, tiny_flags

import mdlm
import sample
from nanomdlm.support.cli import entry
from nanomdlm.support.data.tokenizer import Tokenizer, tokenizer_from_json
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import templates
from nanomdlm.support.infill.templates import Gap

SHIPPED = ROOT / "weights" / "shakespeare"


@pytest.fixture(scope="module")
def tiny(short_run):
    """(model, tokenizer): 2 layers, a context of 32, characters."""
    return mdlm.load(short_run)[:2]


@pytest.fixture(scope="module")
def shakespeare():
    """The tokenizer of the shipped model, which has no _ and no [."""
    return tokenizer_from_json(SHIPPED / "tokenizer.json")


def refusal(call, *args, **more):
    """The sentence with which a call is refused."""
    with pytest.raises(UserError) as e:
        call(*args, **more)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_home_folder_is_found_behind_an_equals_sign(short_run, monkeypatch, tmp_path):
    """Shells leave --out_dir=~/x as it is; a folder called ~ would be made, and removed one day."""
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes((short_run.parent / "text.txt").read_bytes())
    flags = tiny_flags("--max_steps=1", "--eval_windows=2", "--data=~/text", "--out_dir=~/out")
    assert run_mdlm(*flags) == 0
    flags = ["--out_dir=~/out", "--steps=1", "--device=cpu"]
    assert entry.run(sample.main, [*flags, "--json=~/json", "--html=~/page"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"text", "out", "json", "page"}
    assert mdlm.load("~/out")[2].data == str(tmp_path / "text")


# --------------------------------------------------------------------------------------------------
# Texts and templates


@pytest.mark.parametrize(
    "template, with_line, without",
    [
        ("a[MASK]b", ["a", Gap(1), "b"], ["a", Gap(1), "b"]),
        ("a[MASK][MASK]█b", ["a", Gap(3), "b"], ["a", Gap(3), "b"]),
        ("a█_█[MASK]", ["a", Gap(1), "_", Gap(2)], ["a", Gap(4)]),
        ("a___b", None, ["a", Gap(3), "b"]),
        ("_", None, [Gap(1)]),
        ("a[___]b_", ["a", Gap(), "b_"], ["a", Gap(), "b", Gap(1)]),
        ("\\[MASK]█", ["[MASK]", Gap(1)], ["[MASK]", Gap(1)]),
    ],
)
def test_marks_of_gaps(template, with_line, without):
    characters = list("ab[]MASK")
    for vocabulary, wanted in (([*characters, "_"], with_line), (characters, without)):
        tokenizer = Tokenizer("char", sorted(vocabulary))
        assert templates.is_template(template, tokenizer) == (wanted is not None)
        if wanted is None:
            refusal(templates.parse, template, tokenizer, 32)
        else:
            assert templates.parse(template, tokenizer, 32) == wanted


def test_underscores_are_text_where_they_can_be_spelled():
    for tokenizer in (Tokenizer("byte"), Tokenizer("word", ["a_b"])):
        assert templates.parse("a_b█", tokenizer, 32) == ["a_b", Gap(1)]
    ids = Tokenizer("id", 9)
    assert templates.parse("1 _ [MASK]", ids, 9) == ["1 ", Gap(1), " ", Gap(1)]


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
    assert segments == ["a\r\n", Gap(1), "\rb\n"]
    ids = templates.to_ids(segments, 2)
    assert templates.joined(templates.to_texts(segments, ids, tokenizer)) == "a\r\na\rb\n"


# --------------------------------------------------------------------------------------------------
# Python callers

V, T = 60, 8  # less than the vocabulary of `tiny`


def ids_of(shape=(2, T), value=1, dtype=torch.int64):
    return torch.full(shape, value, dtype=dtype)


WRONG_IDS = {
    "float": ids_of(dtype=torch.float32),
    "one row": ids_of((T,)),
    "negative": ids_of(value=-1),
    "above [MASK]": ids_of(value=1 << 20),
}


@pytest.mark.parametrize("x", WRONG_IDS.values(), ids=WRONG_IDS)
def test_ids_that_the_model_has_not_get_no_text_and_no_number(tiny, x):
    model = tiny[0]
    for call in (sample.generate, mdlm.evaluate, mdlm.generate):
        with pytest.raises(ValueError):
            call(model, x)
    with pytest.raises((IndexError, RuntimeError)):  # PyTorch's own errors
        model(x)


def test_wrong_settings_from_python_are_refused(tiny):
    model = tiny[0]
    x = ids_of(value=model.mask_id)
    for settings in (dict(steps=-1), dict(temperature=float("nan")), dict(order="best")):
        with pytest.raises(ValueError, match=next(iter(settings))):
            sample.generate(model, x, **settings)
    with pytest.raises(ValueError):
        mdlm.evaluate(model, x)  # [MASK] is no text to score
    with pytest.raises(ValueError):
        sample.generate(model, x, forbid=range(model.vocab_size))


def test_a_model_whose_dropout_is_on_gets_no_random_answers(tiny):
    text = "The cat sat on the mat and looked at the dog."
    model, tokenizer, _ = mdlm.new(text=text, dropout=0.2, n_head=2, n_embd=32, block_size=16)
    x = torch.full((1, 8), model.mask_id)
    calls = (
        lambda: sample.write(model, tokenizer, "cat█"),
        lambda: sample.search(model, tokenizer, "cat█"),
        lambda: sample.score(model, tokenizer, "cat"),
        lambda: sample.fix(model, tokenizer, "cat"),
        lambda: sample.generate(model, x),
        lambda: list(sample.unmask(model, x)),
        lambda: mdlm.generate(model, x),
    )
    for call in calls:
        with pytest.raises(ValueError, match="eval"):
            call()
    model.eval()
    assert sample.score(model, tokenizer, "cat") == sample.score(model, tokenizer, "cat")


@pytest.mark.parametrize("temperature", [None, 1.5])
def test_a_compiled_model_is_used_as_it_is_and_left_as_it_was(short_run, temperature):
    def answers(model):
        found = sample.search(model, tokenizer, "th██cat", top=2)
        logp = [round(fill.logp, 4) for fill in (*found, *sample.score(model, tokenizer, "a cat"))]
        return sample.write(model, tokenizer, "th██cat", seed=1), [f.text for f in found], logp

    model, tokenizer, _ = mdlm.load(short_run)
    if temperature:
        model.calibration = dict(temperature=temperature)
    before = answers(model)
    compiled = torch.compile(model, backend="eager")
    for each in (compiled, compiled, model):
        assert answers(each) == before


def test_a_tokenizer_of_another_model_is_refused(tiny):
    model, tokenizer = tiny
    letters = tokenizer.vocab
    for other in (
        tokenizer_from_json(SHIPPED / "tokenizer.json"),
        Tokenizer("byte"),
        Tokenizer("id", 1 << 20),
        Tokenizer("char", letters, end=True),
        Tokenizer("char", letters[:-1]),
        Tokenizer("char", [*letters[:-1], "☃"]),  # as many
    ):
        both = (model, other)
        for call, args in (
            (sample.write, ()),
            (sample.write, ("a", 1, 8)),
            (sample.write, ("a[___]",)),
            (sample.search, ("a█",)),
        ):
            refusal(call, *both, *args)
    other = Tokenizer("char", letters, end=3)
    documents = mdlm.make_model(model.config, model.vocab_size, model.ops, end_id=4)
    refusal(sample.write, documents, other)


def test_numbers_of_numpy_and_torch_are_numbers(tiny):
    model, tokenizer = tiny
    x = ids_of(value=model.mask_id)
    settings = dict(steps=4, correct=1, temperature=0.5, top_k=3, seed=5, order="random", spacing=2)
    wanted = sample.generate(model, x, samples=torch.tensor([3, 1]), forbid=[2], **settings)
    for number in (np.int64, torch.tensor):
        same = {k: v if k in ("order", "temperature") else number(v) for k, v in settings.items()}
        same |= dict(order=np.str_("random"), temperature=np.float32(0.5))
        found = sample.generate(model, x, samples=np.uint16([3, 1]), forbid=np.array([2]), **same)
        assert torch.equal(found, wanted)
    texts = sample.write(model, tokenizer, "[___]", n=np.int64(2), max_gap=np.int8(3), seed=1)
    assert texts == sample.write(model, tokenizer, "[___]", n=2, max_gap=3, seed=1)
    g = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(*(mdlm.generate(model, x, n, h) for n, h in zip((3, np.int64(3)), g)))
    windows = ids_of()
    same = mdlm.evaluate(model, windows, np.int64(2), seed=np.int64(1), batch_size=np.int32(1))
    assert same == mdlm.evaluate(model, windows, 2, seed=1, batch_size=1)
    ids = tokenizer.encode(np.str_("the"))
    for kind in (tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint16), iter):
        assert tokenizer.decode(kind(ids)) == "the"
