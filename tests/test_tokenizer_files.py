"""Tokenizers of the tokenizers library, and folders of ids as others write them."""

import json

import numpy as np
import pytest
import tokenizers
import torch
from conftest import TINY, read_log, run_mdlm

import mdlm
import sample
from support.data import sources
from support.data.tokenizer import open_tokenizer, tokenizer_from_json
from support.errors import UserError

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


def test_run_keeps_its_tokenizer(path, pydoc, tmp_path, capsys):
    data = tmp_path / "x.jsonl"
    lines = [line for line in pydoc[:40_000].split("\n\n") if line]
    data.write_text("\n".join(json.dumps(dict(text=line)) for line in lines))
    own = tmp_path / "own.json"
    own.write_bytes(path.read_bytes())
    flags = [*TINY, f"--data={data}", f"--tokenizer={own}", f"--out_dir={tmp_path / 'out'}"]
    assert run_mdlm(*flags, "--max_steps=30") == 0
    assert "changes the text" not in capsys.readouterr().err
    own.unlink()  # the run has it
    log = read_log(tmp_path / "out")
    assert log[-1]["val_nelbo"] < log[0]["val_nelbo"] - 0.3
    assert log[0]["val_bpc"] < 6, "bits of a character, not of a token"
    model, tokenizer, _ = mdlm.load(tmp_path / "out")
    assert tokenizer.end_id == model.objective.end_id == 1
    (text,) = sample.write(model, tokenizer, "The ███ of", steps=2, generator=torch.Generator())
    assert text.startswith("The ") and text.endswith(" of")


def test_tokenizer_that_changes_a_text_is_said(text_file, tmp_path, capsys):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "the": 1, "a": 2}, "?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "words.json"))
    flags = [*TINY, f"--data={text_file}", f"--tokenizer={tmp_path / 'words.json'}"]
    assert run_mdlm(*flags, "--max_steps=1", f"--out_dir={tmp_path / 'out'}") == 0
    assert "changes the text" in capsys.readouterr().err


def test_unusable_tokenizers_are_refused(path, tmp_path, capsys):
    with pytest.raises(UserError, match="--end=<end> is no special token"):
        open_tokenizer(path, True, "<end>")
    assert open_tokenizer(path, True, "<pad>").end_id == 0
    content = path.read_text().replace(END, "<fin>")
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(UserError, match="name its --end"):
        open_tokenizer(tmp_path / "other.json", True)
    (tmp_path / "no.json").write_text('{"model": 3}')
    for file in ("no.json", "missing.json"):
        with pytest.raises(UserError, match="is no file of the tokenizers library"):
            open_tokenizer(tmp_path / file, False)
    ours = dict(format="mdlm-tokenizer", version=1, kind="file", vocab=content, end=400)
    (tmp_path / "forged.json").write_text(json.dumps(ours))
    with pytest.raises(UserError, match="400, which is no id"):
        tokenizer_from_json(tmp_path / "forged.json")
    assert run_mdlm(*TINY, "--tokenizer=gpt2", "--max_steps=1", f"--out_dir={tmp_path}") == 2
    assert "give char, byte, word, bpe or a tokenizer.json" in capsys.readouterr().err


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
    corpus = mdlm.Corpus(tmp_path / "ids", mdlm.Config(block_size=32, end="1"), torch.device("cpu"))
    assert corpus.tokenizer.decode(corpus.windows(1)[0].tolist()) == "This is the text 0."
    prepared = [*TINY, f"--data={tmp_path / 'own'}", "--max_steps=1", "--end=3"]
    (tmp_path / "own").mkdir()
    (tmp_path / "t.txt").write_text("some text to learn. " * 200)
    mdlm.prepare(mdlm.Config(data=str(tmp_path / "t.txt"), block_size=32), tmp_path / "own")
    assert run_mdlm(*prepared, f"--out_dir={tmp_path / 'd'}") == 2
    assert "--end=3, but" in capsys.readouterr().err
    with pytest.raises(UserError, match="'1' is no id of a text"):
        tokenizer.encode("3 1 4")
    assert run_mdlm(*flags, "--end=400", f"--out_dir={tmp_path / 'c'}") == 2
    assert "--end=400 must be below V = 400" in capsys.readouterr().err


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
    with pytest.raises(UserError, match="header of llm"):
        sources.open_ids(tmp_path, 32, 0)
