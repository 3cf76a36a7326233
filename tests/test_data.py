"""Text becomes the expected tokens and windows, whatever its size and source."""

import contextlib
import itertools
import json
import math
import random
import time
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import corpus_of
from hypothesis import given, settings
from hypothesis import strategies as st

import mdlm
from nanomdlm.support.cli import devices
from nanomdlm.support.data import patterns, sources, tokenizer
from nanomdlm.support.data.texts import prepare
from nanomdlm.support.data.windows import cut_windows
from nanomdlm.support.errors import UserError

CPU = torch.device("cpu")
KINDS = ("char", "byte", "word", "bpe")


def prepared(path, folder, **flags):
    config = mdlm.Config(**dict(data=str(path), block_size=32) | flags)
    folder.mkdir(exist_ok=True)
    prepare(config, folder)
    return corpus_of(folder, config, CPU)


def corpus_of_ids(folder, ids, meta=None, **flags):
    """A corpus whose training and validation parts are both `ids`."""
    for name in ("train.bin", "val.bin"):
        ids.tofile(folder / name)
    if meta:
        (folder / "meta.json").write_text(json.dumps(meta))
    return corpus_of(folder, mdlm.Config(block_size=32, **flags), CPU)


# --------------------------------------------------------------------------------------------------
# Tokenizers


def test_vocabulary_is_learned_from_training_part():
    text = "train " * 50 + "secret " * 50
    for kind in ("word", "bpe"):
        made = tokenizer.build_tokenizer(kind, 300, False, lambda: [(text, False)], 300)
        assert len(made.encode(" train")) == 1
        assert len(made.encode(" secret")) > 1


@pytest.mark.parametrize("unknown", ["A", "é", chr(100 + ord("a")), "😀"])
def test_unknown_character_is_named_with_position(unknown):
    with pytest.raises(UserError, match=unknown):
        tokenizer.Tokenizer("char", ["a", "b"]).encode(f"ab{unknown}")


def test_time_to_spell_tokens_is_linear_in_their_number():
    bytes_alone = tokenizer.build_tokenizer("byte", 0, False, lambda: [], 0)
    start = time.process_time()
    pieces = bytes_alone.pieces("€".encode() * 20_000)  # a character is of three tokens
    assert pieces == ["", "", "€"] * 20_000
    assert time.process_time() - start < 2  # quadratic: 30 s


# --------------------------------------------------------------------------------------------------
# Sources


def test_small_reads_give_the_same_text(tmp_path):
    content = "ä€😀 line\r\n\n" * 300 + "no newline at the end é"
    (tmp_path / "t").write_bytes(content.encode())
    for size in (1, 2, 3, 5, 64, 1 << 20):
        assert "".join(sources.read_text(tmp_path / "t", size)) == content
    for text in itertools.islice(sources.read_text(tmp_path / "t", 64), 50):
        assert text.endswith("\n")
        assert len(text) <= 64 + len("ä€😀 line\r\n")


@pytest.mark.parametrize("separator", ["|", "<||>", "aa"])
def test_document_pieces_join_to_the_documents(separator):
    g = random.Random(0)
    whole = "".join(g.choice(["a", "b", "<", "|", ">", separator]) for _ in range(4000))
    for size in (1, 7, 50):
        cuts = [0, *sorted(g.sample(range(1, 4000), 90)), len(whole)]
        texts = (whole[i:j] for i, j in itertools.pairwise(cuts))
        found = []
        document = ""
        for piece, ends in sources.split_documents(texts, separator, size):
            assert piece, "an [END] follows characters of its document"
            document += piece
            if ends:
                found.append(document)
                document = ""
        assert found == [d for d in whole.split(separator) if d]
        assert document == ""


def exact_entropy(length, low, high):
    """By enumeration: the text of each pattern, with the probabilities of all that are equal."""
    p = Counter()
    for period in range(low, high + 1):
        for symbols in itertools.product(range(15), repeat=period):
            p[(symbols * length)[:length]] += 1 / (high - low + 1) / 15**period
    assert sum(p.values()) == pytest.approx(1)
    return -sum(q * math.log(q) for q in p.values()) / length


@pytest.mark.parametrize("length, low, high", [(64, 2, 4), (4, 1, 2), (6, 1, 3), (6, 3, 3)])
def test_entropy_of_patterns_is_exact(length, low, high):
    """In the shortest texts that are allowed, two periods of a text still share a divisor."""
    found = patterns.entropy(length, (low, high))
    assert found == pytest.approx(exact_entropy(length, low, high), rel=1e-12)


def test_patterns_have_the_stated_length_and_periods():
    x = patterns.make(20_000, 0, 24, (2, 5))
    assert x.shape == (20_000, 24) and x.max() == 14
    has = {p: (x[:, p:] == x[:, :-p]).all(1) for p in (2, 3, 4, 5)}
    assert np.any(list(has.values()), axis=0).all()
    for period, found in has.items():
        expected = sum(15 ** -(p - math.gcd(p, period)) / 4 for p in (2, 3, 4, 5))
        sd = (expected * (1 - expected) / 20_000) ** 0.5
        assert abs(found.mean() - expected) < 4 * sd, period


def test_default_patterns_are_those_of_before():
    """Runs of a version without --periods repeat to the bit."""
    x = patterns.make(100_000, 0)
    assert zlib.crc32(x.tobytes()) == 88886965
    assert patterns.entropy() == pytest.approx(0.14387040909418508, rel=1e-15)


def test_patterns_are_prepared_as_aligned_windows(tmp_path):
    corpus = prepared("patterns", tmp_path / "d", block_size=64)
    x = torch.from_numpy(patterns.make(100_000, 0)).long()
    assert torch.equal(corpus.windows(), x[90_000:])
    powers = 15 ** torch.arange(12)  # the first 12 symbols tell patterns apart
    epoch = corpus.batch(torch.arange(90_000))[0][:, :12] @ powers
    assert torch.equal(epoch.sort().values, (x[:90_000, :12] @ powers).sort().values)
    assert corpus.entropy == patterns.entropy()
    assert corpus.chars_per_token == 1


def test_patterns_of_other_lengths_are_prepared(tmp_path):
    corpus = prepared("patterns", tmp_path / "d", block_size=24, periods="2-5")
    x = torch.from_numpy(patterns.make(100_000, 0, 24, (2, 5))).long()
    assert torch.equal(corpus.windows(), x[90_000:])
    assert corpus.entropy == patterns.entropy(24, (2, 5)) and corpus.n_offsets == 0
    assert corpus.tokenizer.vocab_size == 15
    with pytest.raises(UserError, match=r"--block_size=24"):
        corpus_of(tmp_path / "d", mdlm.Config(block_size=32), CPU)


# --------------------------------------------------------------------------------------------------
# From text to windows


@pytest.mark.parametrize("kind", KINDS)
def test_nine_tenths_of_the_characters_train(pydoc, text_file, tmp_path, kind):
    corpus = prepared(text_file, tmp_path / "d", tokenizer=kind, vocab_size=500)
    assert corpus.tokenizer.vocab_size <= 500
    cut = int(0.9 * len(pydoc))
    assert corpus.tokenizer.decode(corpus.ids["train"].tolist()) == pydoc[:cut]
    assert corpus.tokenizer.decode(corpus.ids["val"].tolist()) == pydoc[cut:]
    assert corpus.chars_per_token == pytest.approx((len(pydoc) - cut) / len(corpus.ids["val"]))


def test_validation_windows_cover_the_text_once(tmp_path):
    corpus = corpus_of_ids(tmp_path, np.arange(1000, dtype=np.uint16))
    assert corpus.windows().flatten().tolist() == list(range(1000 // 32 * 32))
    assert corpus.windows(3)[:, 0].tolist() == [0, 10 * 32, 20 * 32]


def test_epochs_see_every_token_once(tmp_path):
    corpus = corpus_of_ids(tmp_path, np.arange(1000, dtype=np.uint16))  # a token is its position
    n = 1000 // 32 - 1
    x = corpus.batch(torch.arange(3 * n))[0].view(3, n, 32)
    assert (x.diff(dim=2) == 1).all()
    starts = x[:, :, 0].sort(dim=1).values
    assert (starts.diff(dim=1) == 32).all(), "windows neither overlap nor leave gaps"
    assert (starts[:, 0] < 32).all()
    assert not torch.equal(x[0], x[1])
    assert len(starts[:, 0].unique()) > 1, "each epoch is cut at an offset of its own"
    samples = torch.tensor([2 * n + 7, 0, n - 1, n])  # in any order, across epochs
    assert torch.equal(corpus.batch(samples)[0], x.flatten(0, 1)[samples])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_windows_start_at_documents(ids, T):
    expected = []
    start = 0
    for i, token in enumerate(ids):
        if (i - start) % T == 0:
            expected.append(i)
        if token == 3:
            start = i + 1
    kind = dict(learned=dict(document_length="predicted"), ar=dict(objective="ar"), known=dict())
    found = {}
    for name, more in kind.items():
        config = mdlm.Config(block_size=T, **more)
        with contextlib.suppress(UserError):  # nothing but [END]
            found[name] = cut_windows(np.array(ids, np.uint8), config, 3)
    found = {name: [part.tolist() for part in windows] for name, windows in found.items()}
    assert found["learned"][0] == expected and found["learned"][2] == [T] * len(expected)
    windows = [(ids[i : i + T], i) for i in expected]
    windows = [(w[: w.index(3) + 1] if 3 in w else w, i) for w, i in windows]
    assert list(zip(*found["ar"])) == [(i, len(w), len(w)) for w, i in windows]
    texts = [(i, len(w), len(w) - (3 in w)) for w, i in windows if w != [3]]
    assert ("known" in found) == bool(texts)
    assert not texts or list(zip(*found["known"])) == texts


def test_documents_are_filled_up_with_end(tmp_path):
    documents = ["ab", "c" * 70, "def"] * 20
    (tmp_path / "t.txt").write_text("\n\n".join(documents) + "\n\n\n\n")
    corpus = prepared(tmp_path / "t.txt", tmp_path / "d", separator="\\n\\n", pack=False)
    end = corpus.tokenizer.end_id
    x, _ = corpus.batch(torch.arange(18 * 5))  # each of the first 18 * 3 documents once
    shown = Counter(corpus.tokenizer.decode(row.tolist()) for row in x)
    assert shown == {"ab": 18, "c" * 32: 36, "c" * 6: 18, "def": 18}
    for row in x.tolist():
        assert end not in row or set(row[row.index(end) :]) == {end}


def test_uint16_is_widened_on_cuda(monkeypatch):
    """CUDA cannot index it (torch 2.11)."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 10_000))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: (tensor, device.type))
    small = np.array([7, 65535], dtype=np.uint16)
    for ids, place, dtype in (
        (small, "cuda", torch.int32),
        (small.repeat(500), "cpu", torch.uint16),
    ):
        ((tensor, found),) = devices.to_tensors([ids], torch.device("cuda"))
        assert (found, tensor.dtype) == (place, dtype) and tensor.tolist() == ids.tolist()


def test_nanogpt_folder_is_read(tmp_path):
    ids = np.arange(1000, dtype=np.uint16) % 700
    corpus = corpus_of_ids(tmp_path, ids)
    assert corpus.tokenizer.kind == "id"
    assert corpus.tokenizer.vocab_size == 700
    assert corpus.chars_per_token is None
    assert torch.equal(corpus.windows()[1], torch.arange(32, 64))
    assert corpus_of_ids(tmp_path, ids, vocab_size=50257).tokenizer.vocab_size == 50257


def test_checksum_covers_ids_and_tokenizer(tmp_path):
    ids = np.arange(100, dtype=np.uint16)
    checksum = corpus_of_ids(tmp_path, ids).identity["data"]
    assert corpus_of_ids(tmp_path, ids).identity["data"] == checksum
    assert corpus_of_ids(tmp_path, ids, vocab_size=101).identity["data"] != checksum
    ids[[7, 8]] = ids[[8, 7]]
    assert corpus_of_ids(tmp_path, ids).identity["data"] != checksum


# --------------------------------------------------------------------------------------------------
# What a user sees
