"""Text becomes the tokens that one expects, whatever its size and source."""

import itertools
import json
import math
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import mdlm
import text
from common import Refusal

CPU = torch.device("cpu")


def corpus_of(path, folder, **more):
    config = mdlm.Config(**dict(data=str(path), block_size=32) | more)
    folder.mkdir(exist_ok=True)
    mdlm.prepare(config, folder)
    return mdlm.Corpus(folder, config, CPU)


def test_the_text_is_split_at_nine_tenths_of_its_characters(pydoc, text_file, tmp_path):
    for kind in ("char", "byte", "word", "bpe"):
        corpus = corpus_of(text_file, tmp_path / kind, tokenizer=kind, vocab_size=500)
        cut = int(0.9 * len(pydoc))
        assert corpus.tokenizer.decode(corpus.train.tolist()) == pydoc[:cut]
        assert corpus.tokenizer.decode(corpus.val.tolist()) == pydoc[cut:]
        assert corpus.chars_per_token == pytest.approx((len(pydoc) - cut) / len(corpus.val))
        windows = corpus.windows()
        assert (
            torch.equal(windows.flatten(), corpus.val[: windows.numel()].long())
            and len(corpus.val) - windows.numel() < 32
        )


def test_a_file_read_in_small_pieces_gives_the_same_text(tmp_path):
    content = "ä€😀 line\r\n\n" * 300 + "no newline at the end é"
    (tmp_path / "t").write_bytes(content.encode())
    for size in (1, 2, 3, 5, 64, 1 << 20):
        assert "".join(text.read_text(tmp_path / "t", size)) == content
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbfabc")
    assert "".join(text.read_text(tmp_path / "t")) == "abc", "a byte order mark is no text"
    for broken, at in ((b"abc\xff", 3), (b"abc\xe2\x82", 3)):
        (tmp_path / "t").write_bytes(broken)
        with pytest.raises(Refusal, match=f"byte {at}"):
            list(text.read_text(tmp_path / "t", 2))


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=80), st.text(max_size=80))
def test_every_tokenizer_is_lossless(known, other):
    stream = lambda: [(known * 3, False)]
    for kind in ("byte", "word"):
        tokenizer = text.build_tokenizer(kind, 300, False, stream, 1000)
        for t in (known, other):
            assert tokenizer.decode(tokenizer.encode(t)) == t
    tokenizer = text.build_tokenizer("char", 0, False, stream, 1000)
    assert tokenizer.decode(tokenizer.encode(known)) == known and tokenizer.vocab_size == len(set(known))


def test_bpe_is_lossless_on_text_it_has_not_seen(pydoc):
    tokenizer = text.build_tokenizer("bpe", 400, False, lambda: [(pydoc, False)], 10_000)
    unseen = "Zürich, 東京 and 😀\n\tunseen  words"
    assert tokenizer.vocab_size == 400 and tokenizer.decode(tokenizer.encode(unseen)) == unseen
    assert len(tokenizer.encode(pydoc)) < 0.7 * len(pydoc)


def test_a_tokenizer_survives_its_file(pydoc, tmp_path):
    for kind in ("char", "byte", "word", "bpe"):
        for end in (False, True):
            a = text.build_tokenizer(kind, 300, end, lambda: [(pydoc, False)], 10_000)
            (tmp_path / "tokenizer.json").write_text(a.to_json())
            b = text.tokenizer_from_json(tmp_path / "tokenizer.json")
            assert b.encode(pydoc[:500]) == a.encode(pydoc[:500]) and (a.vocab_size, a.end_id) == (
                b.vocab_size,
                b.end_id,
            )
            assert not end or a.decode([a.end_id]) == ""


def test_an_unknown_character_is_named_with_its_position():
    with pytest.raises(Refusal, match="'é' at position 2"):
        text.Tokenizer("char", ["a", "b"]).encode("abé")


def test_an_epoch_sees_every_token_once_and_each_epoch_differently(text_file, tmp_path):
    corpus = corpus_of(text_file, tmp_path / "d")
    n = len(corpus.train_starts)
    for e in (0, 1, 5):
        starts = corpus.epoch(e).sort().values
        assert (starts.diff() == 32).all(), "windows neither overlap nor leave gaps"
        assert starts[0] < 32 and starts[-1] + 32 <= len(corpus.train)
    assert not torch.equal(corpus.epoch(0), corpus.epoch(1))
    x = corpus.batch(torch.tensor([n - 1, n, 3 * n + 7]))  # across epochs
    for row, (e, i) in zip(x, ((0, n - 1), (1, 0), (3, 7)), strict=True):
        start = int(corpus.epoch(e)[i])
        assert torch.equal(row, corpus.train[start : start + 32].long())


def test_documents_start_their_windows_and_are_filled_with_end(tmp_path):
    (tmp_path / "t.txt").write_text("ab\n\n" + "c" * 70 + "\n\n\n\ndef\n\n" * 60)
    corpus = corpus_of(tmp_path / "t.txt", tmp_path / "d", separator="\\n\\n")
    end = corpus.tokenizer.end_id
    assert end == corpus.tokenizer.vocab_size - 1
    x = corpus.gather(corpus.train, corpus.train_starts)
    shown = [corpus.tokenizer.decode(row.tolist()) for row in x]
    assert shown[:5] == ["ab", "c" * 32, "c" * 32, "c" * 6, "\n\ndef"[2:]]
    for row in x.tolist():
        assert end not in row or set(row[row.index(end) :]) == {end}


class AsOnCuda(TorchFunctionMode):
    """CUDA has no indexing of unsigned integers but those of 8 bits (torch 2.11's index_kernel)."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__ and args[0].dtype == torch.uint16:
            raise NotImplementedError("\"index_cuda\" not implemented for 'UInt16'")
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("dtype, most", [("uint8", 255), ("uint16", 65535), ("int32", 70000)])
def test_ids_of_any_width_come_back_as_they_were_on_cuda_too(tmp_path, dtype, most):
    ids = np.linspace(0, most, 640).astype(dtype)
    for name in ("train.bin", "val.bin"):
        ids.tofile(tmp_path / name)
    (tmp_path / "meta.json").write_text(json.dumps(dict(dtype=dtype, entropy=None, characters=None)))
    corpus = mdlm.Corpus(tmp_path, mdlm.Config(block_size=32), CPU)
    with AsOnCuda():
        x = corpus.windows()
        corpus.batch(torch.arange(4))
    assert x.dtype == torch.int64 and x.flatten().tolist() == ids.tolist()


@pytest.mark.parametrize("separator", ["|", "<||>", "aa"])
def test_long_documents_come_in_pieces_and_are_the_same_documents(separator):
    g = random.Random(0)
    whole = "".join(g.choice(["a", "b", "<", "|", ">", separator]) for _ in range(4000))
    wanted = [d for d in whole.split(separator) if d]
    for size in (1, 7, 50):
        cuts = [0, *sorted(g.sample(range(1, 4000), 90)), len(whole)]
        pieces = list(
            text.split_documents((whole[i:j] for i, j in itertools.pairwise(cuts)), separator, size)
        )
        found, document = [], ""
        for piece, ends in pieces:
            assert piece, "an [END] goes with characters of its document"
            document += piece
            if ends:
                found.append(document)
                document = ""
        assert found == wanted and not document
    pieces = [piece for piece, _ in text.split_documents(["xy"] * 100, separator, size=4)]
    assert "".join(pieces) == "xy" * 100 and max(map(len, pieces)) <= 4 + 2 + len(separator)


def test_a_folder_in_nanogpts_format_is_read_as_it_is(tmp_path):
    ids = np.arange(1000, dtype=np.uint16) % 700
    ids.tofile(tmp_path / "train.bin")
    ids[:300].tofile(tmp_path / "val.bin")
    corpus = mdlm.Corpus(tmp_path, mdlm.Config(block_size=32), CPU)
    assert (
        corpus.tokenizer.kind == "id"
        and corpus.tokenizer.vocab_size == 700
        and corpus.chars_per_token is None
    )
    assert torch.equal(corpus.windows()[1], torch.arange(32, 64))
    assert (
        mdlm.Corpus(tmp_path, mdlm.Config(block_size=32, vocab_size=50257), CPU).tokenizer.vocab_size == 50257
    )
    with pytest.raises(Refusal, match="699"):
        mdlm.Corpus(tmp_path, mdlm.Config(block_size=32, vocab_size=600), CPU)


def test_the_entropy_of_the_patterns_is_exact():
    p = Counter()
    symbols = "abcdefghijklmno"
    for length in (2, 3, 4):
        patterns = [""]
        for _ in range(length):
            patterns = [s + c for s in patterns for c in symbols]
        for s in patterns:
            p[(s * 6)[:12]] += 1 / 3 / 15**length
    assert sum(p.values()) == pytest.approx(1)
    assert text.patterns_entropy() == pytest.approx(-sum(q * math.log(q) for q in p.values()) / 64, rel=1e-9)
    x = text.make_patterns(20_000, 0)
    assert x.shape == (20_000, 64) and x.max() == 14
    two = (x[:, 2:] == x[:, :-2]).all(1).mean()  # period 2: a third, and what of 3 and 4 has it too
    assert abs(two - (1 / 3 + 1 / 3 / 225 + 1 / 3 / 225)) < 4 * (two / 20_000) ** 0.5


@pytest.mark.slow
def test_a_file_of_1_gb_trains_in_less_than_3_gb(pydoc, tmp_path):
    path = tmp_path / "large.txt"
    with open(path, "w", encoding="utf-8") as f:
        while f.tell() < 10**9:
            f.write(pydoc)
    program = (
        "import resource, subprocess, sys; r = subprocess.run([sys.executable] + sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r.returncode)"
    )
    r = subprocess.run(
        [
            sys.executable,
            "-c",
            program,
            str(ROOT / "mdlm.py"),
            f"--data={path}",
            f"--out_dir={tmp_path / 'out'}",
            "--max_steps=20",
            "--compile=off",
            "--device=cpu",
            "--eval_windows=64",
        ],
        capture_output=True,
        text=True,
    )
    assert r.returncode == 0, r.stderr
    peak = int(r.stdout.split()[-1]) / 1e6  # kB -> GB
    print(f"peak resident memory {peak:.2f} GB")
    assert peak < 3
