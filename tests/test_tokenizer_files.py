"""Tokenizers of the tokenizers library, and folders of ids as others write them."""

import json
import random
import re
import shutil
import sys
import unicodedata

import numpy as np
import pytest
import tokenizer_kinds
import tokenizers
import torch
from conftest import TINY, Toy, corpus_of, read_log, run_mdlm

import export
import mdlm
import sample
from nanomdlm.support.cli import entry
from nanomdlm.support.data import sources
from nanomdlm.support.data.texts import prepare
from nanomdlm.support.data.tokenizer import (
    Tokenizer,
    build_tokenizer,
    open_tokenizer,
    tokenizer_from_json,
    train_bpe,
)
from nanomdlm.support.errors import UserError

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def path(tmp_path_factory, pydoc):
    """A byte-level BPE as GPT-2's, whose end of text is neither the first nor the last token."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    specials = ["<pad>", END]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    library.train_from_iterator([pydoc], trainer)
    library.enable_padding(length=7)
    library.enable_truncation(5)  # what a file brings along must not cut a text
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(file))
    return file


def plain(path):
    library = tokenizers.Tokenizer.from_file(str(path))
    library.no_padding()
    library.no_truncation()
    return library


def test_ids_are_those_of_the_library(path, pydoc):
    ours = open_tokenizer(path, end=True)
    assert (ours.end_id, ours.vocab_size) == (1, 400)
    text = pydoc[:30_000] + "ünïcödé 漢字 \x00\t"
    assert ours.encode(text) == plain(path).encode(text).ids
    assert ours.decode(ours.encode(text)) == text
    spelled = f"a{END}b"
    assert 1 not in ours.encode(spelled) and ours.decode(ours.encode(spelled)) == spelled
    assert ours.decode([*ours.encode("a"), 1, *ours.encode("b"), 400]) == "ab█"


def test_tokenizer_that_changes_a_text_is_said(text_file, tmp_path, capsys):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "the": 1, "a": 2}, "?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "words.json"))
    flags = [*TINY, f"--data={text_file}", f"--tokenizer={tmp_path / 'words.json'}"]
    assert run_mdlm(*flags, "--max_steps=1", f"--out_dir={tmp_path / 'out'}") == 0
    assert "words.json" in capsys.readouterr().err


def test_a_tokenizer_whose_tokens_end_words_is_refused(text_file, pydoc, tmp_path, capsys):
    """As GPT-1's: at its end a text has no space. Its tokens alone do not say what a text is."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE(end_of_word_suffix="</w>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.decoder = tokenizers.decoders.BPEDecoder("</w>")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, end_of_word_suffix="</w>")
    library.train_from_iterator([pydoc], trainer)
    library.save(str(tmp_path / "words.json"))
    flags = [*TINY, f"--data={text_file}", f"--tokenizer={tmp_path / 'words.json'}"]
    assert run_mdlm(*flags, "--max_steps=1", f"--out_dir={tmp_path / 'out'}") == 2
    assert "depends on their neighbors" in capsys.readouterr().err


def test_an_end_that_the_tokenizer_has_not_is_refused(path, tmp_path):
    with pytest.raises(UserError, match="<end>"):
        open_tokenizer(path, True, "<end>")
    assert open_tokenizer(path, True, "<pad>").end_id == 0
    content = path.read_text().replace(END, "<fin>")
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(UserError, match="--end"):
        open_tokenizer(tmp_path / "other.json", True)


def spelling(name, pydoc):
    """(tokenizer.json, its end token) of a kind that has the token for a text that spells it."""
    if name == "t5":
        return tokenizer_kinds.KINDS[name](pydoc), "</s>"
    models = dict(
        word_level=tokenizers.models.WordLevel({"[END]": 0, "a": 1, "b": 2, "?": 3}, "?"),
        bpe=tokenizers.models.BPE(dict(zip("[END]ab▁?", range(9))) | {"[END]": 9}, []),
    )
    library = tokenizers.Tokenizer(models[name])
    if name == "bpe":
        library.model.ignore_merges = True
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["[END]"])
    return library, "[END]"


SPELL = ("t5", "word_level", "bpe")


@pytest.fixture(params=SPELL)
def spelled(request, pydoc, tmp_path):
    library, end = spelling(request.param, pydoc)
    library.save(str(tmp_path / "spelled.json"))
    return tmp_path / "spelled.json", end


def test_text_never_has_the_id_of_the_end(spelled):
    """A prompt, a template's literals, a pair, a long text: one sentence that names the token."""
    tokenizer = open_tokenizer(spelled[0], True)
    end = spelled[1]
    assert tokenizer.encode("a b") and tokenizer.end_id not in tokenizer.encode("a b")
    model = Toy(lambda xt: torch.zeros(*xt.shape, tokenizer.vocab_size), tokenizer.vocab_size, 32)
    text = f"a {end} b"
    calls = [
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode_lossless(f" {text}", after_gap=True),
        lambda: tokenizer.encode_array("a b " * 20_000 + text),
        lambda: tokenizer.encode_pair("a", f" {text}"),
        lambda: tokenizer.encode_pair(text, " b"),
        lambda: sample.write(model, tokenizer, text),
        lambda: sample.write(model, tokenizer, f"a █ {text}"),
        lambda: sample.write(model, tokenizer, f"a [___] {text}"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(repr(end)) + ".*ends a document"):
            call()
    known = tokenizer_from_json(saved(tokenizer, spelled[0].parent))  # as a run has it
    with pytest.raises(UserError):
        known.encode(text)
    assert tokenizer.end_id in open_tokenizer(spelled[0], False).encode(text), "no [END], no matter"


def test_data_that_spells_the_end_is_refused(spelled, tmp_path, capsys):
    path, end = spelled
    lines = ["a b " * 9] * 30
    lines[20] = f"a {end} b"
    (tmp_path / "t.txt").write_text("\n".join(lines))
    records = "\n".join(json.dumps(dict(text=line)) for line in lines)
    (tmp_path / "t.jsonl").write_text(records)
    flags = [f"--tokenizer={path}", f"--end={end}", f"--out_dir={tmp_path / 'o'}", "--max_steps=1"]
    for data, where in (("t.txt", "t.txt, line 21: "), ("t.jsonl", "t.jsonl, line 21: ")):
        separator = ["--separator=\\n"] if data == "t.txt" else []
        assert run_mdlm(*TINY, f"--data={tmp_path / data}", *separator, *flags) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert where in said and f"{end!r}" in said
        assert not list((tmp_path / "o").glob("data/*.bin"))


def write_ids(folder, ids, header=None):
    folder.mkdir(exist_ok=True)
    for name in sources.NAMES:
        start = np.zeros(256, np.int32)
        start[:3] = header or (0, 0, 0)
        before = start.tobytes() if header else b""
        (folder / name).write_bytes(before + np.asarray(ids, np.uint16).tobytes())


def test_folder_of_ids_gets_documents_and_text(path, tmp_path, capsys):
    library = plain(path)
    documents = [library.encode(f"This is the text {i}.").ids for i in range(200)]
    write_ids(tmp_path / "ids", [i for ids in documents for i in (*ids, 1)])
    flags = [*TINY, f"--data={tmp_path / 'ids'}", "--max_steps=2"]
    assert run_mdlm(*flags, "--end=1", f"--out_dir={tmp_path / 'a'}") == 0
    assert "documents of given lengths" in capsys.readouterr().out
    model, tokenizer, _ = mdlm.load(tmp_path / "a")
    assert tokenizer.kind == "id" and model.length_counts.sum() == 200
    (tmp_path / "ids" / "tokenizer.json").write_bytes(path.read_bytes())
    assert run_mdlm(*flags, "--end=1", f"--out_dir={tmp_path / 'b'}") == 0
    corpus = corpus_of(tmp_path / "ids", mdlm.Config(block_size=32, end="1"), torch.device("cpu"))
    assert corpus.tokenizer.decode(corpus.windows(1)[0].tolist()) == "This is the text 0."
    prepared = [*TINY, f"--data={tmp_path / 'own'}", "--max_steps=1", "--end=3"]
    (tmp_path / "own").mkdir()
    (tmp_path / "t.txt").write_text("some text to learn. " * 200)
    prepare(mdlm.Config(data=str(tmp_path / "t.txt"), block_size=32), tmp_path / "own")
    assert run_mdlm(*prepared, f"--out_dir={tmp_path / 'd'}") == 2
    assert "--end=3, but" in capsys.readouterr().err
    with pytest.raises(UserError):
        tokenizer.encode("3 1 4")


@pytest.mark.parametrize("magic, dtype", [(20240520, np.uint16), (20240801, np.uint32)])
def test_headers_of_llm_c_are_no_tokens(tmp_path, magic, dtype):
    ids = np.arange(500, dtype=dtype) % 70
    header = np.zeros(256, np.int32)
    header[:3] = (magic, 1, 500)
    for name in sources.NAMES:
        (tmp_path / name).write_bytes(header.tobytes() + ids.tobytes())
    _, found, tokenizer, _ = sources.open_ids(tmp_path, 32, 0)
    assert tokenizer.vocab_size == 70 and [list(part) for part in found] == [list(ids)] * 2
    (tmp_path / "val.bin").write_bytes(header.tobytes() + ids[:-1].tobytes())
    with pytest.raises(UserError):
        sources.open_ids(tmp_path, 32, 0)


# --------------------------------------------------------------------------------------------------
# Every tokenizer.json is one of the library


TEXT = "The value\n of a class, and of the other: the end.\tNaïve 漢字 🙂 ½\n" * 9
CHARACTERS = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cn", "Cs")]


def own(kind, end):
    return build_tokenizer(kind, 300, end, lambda: [(TEXT, False)], len(TEXT))


def saved(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer.to_file().encode())
    return path


@pytest.mark.parametrize("kind", ["char", "byte", "word", "bpe"])
@pytest.mark.parametrize("end", [False, True])
def test_the_library_reads_each_kind_as_we_do(kind, end, tmp_path):
    """Random texts of all characters that the tokenizer knows, and random ids: broken bytes too."""
    ours = own(kind, end)
    library = tokenizers.Tokenizer.from_file(str(saved(ours, tmp_path)))
    assert json.loads(library.to_str()) == json.loads(ours.to_file()), "nothing is left out"
    r = random.Random(0)
    known = sorted(set(TEXT)) if kind == "char" else CHARACTERS
    some = sorted(set(TEXT))
    for _ in range(2000):
        text = "".join(r.choice(r.choice((known, some))) for _ in range(r.randint(0, 30)))
        ids = ours.encode(text)
        assert library.encode(text).ids == ids
        assert library.decode(ids) == ours.decode(ids) == text
        ids = r.choices(range(ours.vocab_size), k=r.randint(0, 12))
        ids = [i for i in ids if i != ours.end_id]
        assert library.decode(ids) == ours.decode(ids)
    if kind == "char":
        with pytest.raises(Exception, match=r"\[UNK\]"):  # unknown: an error, not another character
            library.encode("The ß")
    else:
        text = "".join(f"a{c} {c}, {c}:{c}a" for c in CHARACTERS if c.isspace() or ord(c) < 128)
        assert library.encode(text).ids == ours.encode(text)
    V = ours.vocab_size
    names = {"[MASK]": V, "[PAD]": V + 1} | ({"[END]": V - 1} if end else {})
    assert {name: library.token_to_id(name) for name in names} == names
    assert library.decode([*names.values()]) == ""


@pytest.mark.parametrize("kind", ["char", "byte", "word"])
def test_plain_kinds_need_no_library(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for end in (False, True):
        ours = own(kind, end)
        read = tokenizer_from_json(saved(ours, tmp_path))
        assert "format" not in json.loads(ours.to_file())
        assert read.to_json() == ours.to_json() and read.encode(TEXT) == ours.encode(TEXT)


@pytest.mark.parametrize("name", tokenizer_kinds.KINDS)
def test_a_file_is_kept_to_the_byte(name, pydoc, tmp_path):
    """With an [END] it has a post-processor more, which changes nothing."""
    library = tokenizer_kinds.KINDS[name](pydoc[:9000])
    library.add_special_tokens(["[CLS]", "<fin>"])
    ends = [(token, library.token_to_id(token)) for token in ("[CLS]", "<fin>")]
    around = tokenizers.processors.TemplateProcessing("[CLS] $A", "[CLS] $A $B", ends)
    for post_processor in (library.post_processor, around):
        library.post_processor = post_processor
        content = json.dumps(json.loads(library.to_str()), indent=2)
        assert Tokenizer("file", content).to_file() == content
        ours = Tokenizer("file", content, library.token_to_id("<fin>"))
        read = tokenizer_from_json(saved(ours, tmp_path))
        assert (read.kind, read.vocab, read.end) == ("file", content, ours.end)
        named = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        for texts in (("The value of",), ("The value", "of a class")):
            for adds in (True, False):
                a, b = (t.encode(*texts, add_special_tokens=adds) for t in (library, named))
                assert (a.ids, a.type_ids, a.offsets) == (b.ids, b.type_ids, b.offsets)


def test_what_the_library_cannot_say_has_the_small_format(path, tmp_path):
    """Ids without a text, an [END] that is no special token, and a [MASK] of their own."""
    with_mask = json.loads(train_bpe([TEXT], 300))
    with_mask["model"]["vocab"]["[MASK]"] = 300
    content = json.dumps(json.loads(path.read_text()), separators=(",", ":"))
    no_place = json.dumps({k: v for k, v in json.loads(content).items() if k != "post_processor"})
    for ours in (
        Tokenizer("id", 40, 7),
        Tokenizer("file", content, 40),
        Tokenizer("file", no_place, 1),
        Tokenizer("bpe", json.dumps(with_mask, separators=(",", ":"))),
    ):
        assert ours.to_file() == ours.to_json()
        read = tokenizer_from_json(saved(ours, tmp_path))
        assert read.to_json() == ours.to_json()


def test_a_run_on_a_file_goes_on_as_such(path, tmp_path):
    """With documents and without, as text and as a folder of ids with this file beside them.

    The run has the file: another one, or none, may be where it was.
    """
    own = tmp_path / "own.json"
    text = tmp_path / "x.txt"
    text.write_text(TEXT * 30)
    records = tmp_path / "x.jsonl"
    records.write_text("\n".join([json.dumps(dict(text=TEXT))] * 30))
    write_ids(tmp_path / "ids", [i for _ in range(99) for i in (*plain(path).encode(TEXT).ids, 1)])
    shutil.copy(path, tmp_path / "ids" / "tokenizer.json")
    kinds = [
        [f"--data={text}", f"--tokenizer={own}"],
        [f"--data={records}", f"--tokenizer={own}"],
    ]
    kinds += [[f"--data={tmp_path / 'ids'}", *end] for end in ([], ["--end=1"])]
    for i, flags in enumerate(kinds):
        out = tmp_path / f"out{i}"
        shutil.copy(path, own)
        assert run_mdlm(*TINY, *flags, "--max_steps=1", f"--out_dir={out}") == 0
        own.unlink()
        assert i > 1 or read_log(out)[0]["val_bpc"] < 7, "of a character; a token has 8.6 bits"
        saved = out / "step-1" / "tokenizer.json"
        assert tokenizers.Tokenizer.from_file(str(saved)).get_vocab_size() == 400
        assert (saved.read_bytes() == path.read_bytes()) == (i in (0, 2)), "without documents"
        assert mdlm.load(out)[1].end == (False, 1)[i % 2]
        assert run_mdlm("--resume", f"--out_dir={out}", "--max_steps=2") == 0
        more = [f"--init_from={out}", "--max_steps=1", f"--out_dir={tmp_path / f'tuned{i}'}"]
        assert run_mdlm(*TINY, flags[0], *(f for f in flags if "end" in f), *more) == 0


@pytest.mark.parametrize("kind", ["char", "word", "bpe"])
def test_exports_and_other_runs_take_the_file_of_a_run(kind, tmp_path):
    data = tmp_path / "x.txt"
    data.write_text(TEXT * 30)
    size = ["--vocab_size=300"] if kind in ("word", "bpe") else []
    flags = [*TINY, f"--data={data}", "--max_steps=1"]
    assert run_mdlm(*flags, f"--tokenizer={kind}", *size, f"--out_dir={tmp_path / 'a'}") == 0
    file = tmp_path / "a" / "step-1" / "tokenizer.json"
    assert entry.run(export.main, [f"--out_dir={tmp_path / 'a'}", f"--dest={tmp_path / 'hf'}"]) == 0
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert run_mdlm(*flags, f"--tokenizer={file}", f"--out_dir={tmp_path / 'b'}") == 0
    assert (tmp_path / "b" / "step-1" / "tokenizer.json").read_bytes() == file.read_bytes()
    with_end = open_tokenizer(file, end=True)
    assert (with_end.kind, with_end.end) == (kind, True)
    with pytest.raises(UserError, match="</s>"):
        open_tokenizer(file, True, "</s>")
