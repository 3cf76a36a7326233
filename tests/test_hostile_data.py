"""Texts, tokenizers, data folders and downloads that are damaged, huge or malicious."""

import contextlib
import functools
import hashlib
import http.server
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, corpus_of, tiers
from hypothesis import given, settings
from hypothesis import strategies as st

import mdlm
from nanomdlm.support.data import sources, tokenizer
from nanomdlm.support.data.texts import prepare
from nanomdlm.support.errors import UserError

CPU = torch.device("cpu")
CONFIG = mdlm.Config(block_size=32)


def prepared(content, folder):
    """A data folder for a text file with this content (bytes)."""
    (folder / "t").write_bytes(content)
    (folder / "data").mkdir()
    prepare(mdlm.Config(data=str(folder / "t"), block_size=32), folder / "data")
    return folder / "data"


# --------------------------------------------------------------------------------------------------
# Text

GREEK = "αβγ δεζ"
HEBREW = "שלום עולם"
ARABIC = "\u202eمرحبا بالعالم\u202c"


@pytest.mark.parametrize(
    "content",
    [
        "\ufeffwith a byte order mark ".encode() * 20,
        b"line\r\nline\rline\n" * 40,
        b"control characters \x01\x02\x1b\x7f" * 40,
        "👩‍👩‍👧‍👦 🏳️‍🌈 é é ".encode() * 40,
        f"{HEBREW} {ARABIC} {GREEK}\n".encode() * 40,
        b"a" * 1000,
        b"\n" * 1000,
        b"one line without an end" * 50,
    ],
)
def test_any_text_is_kept_as_it_is(tmp_path, content):
    corpus = corpus_of(prepared(content, tmp_path), CONFIG, CPU)
    ids = corpus.ids["train"].tolist() + corpus.ids["val"].tolist()
    assert corpus.tokenizer.decode(ids) == content.decode("utf-8-sig")


@pytest.mark.parametrize(
    "content, at",
    [
        (b"good " * 100 + b"\xff bad", 500),
        (b"\xef\xbb\xbfabc\xff", 6),  # after a byte order mark
        (b"a" * 10_000 + b"\xe2\x82", 10_000),  # cut within a character, in the second read
        (b"\xc0\x80" * 200, 0),  # an overlong NUL
        (b"\xed\xa0\x80" * 200, 0),  # a lone surrogate
        (("text " * 100).encode("utf-16"), 0),
    ],
)
@pytest.mark.parametrize("size", [2, 1 << 20])
def test_invalid_utf8_is_located(tmp_path, content, at, size):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(UserError, match=str(at)):
        list(sources.read_text(tmp_path / "t", size))


LARGE = [
    ("char", 3 * 10**8, b"many short lines\n"),
    ("char", 10**8, b"words in a line that never ends "),
    ("word", 10**8, b"x"),
    ("bpe", 10**8, b"x"),
]


@pytest.mark.parametrize("kind, size, unit", tiers(LARGE, slow=LARGE[:1]))
def test_large_files_train_in_bounded_memory(tmp_path, kind, size, unit):
    with open(tmp_path / "t", "wb") as f:
        for _ in range(100):
            f.write(unit * (size // 100 // len(unit)))
    program = (
        "import resource, subprocess, sys; r = subprocess.run([sys.executable] + sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r.returncode)"
    )
    flags = [f"--data={tmp_path / 't'}", *TINY, f"--tokenizer={kind}"]
    flags += ["--vocab_size=400"] if kind in ("word", "bpe") else []
    flags += ["--max_steps=2", f"--out_dir={tmp_path / 'o'}"]
    command = [sys.executable, "-c", program, str(ROOT / "mdlm.py"), *flags]
    r = subprocess.run(command, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    peak = int(r.stdout.split()[-1]) / 1e6  # kB -> GB
    print(f"{kind}: peak resident memory {peak:.2f} GB")
    assert peak < 1.5


# --------------------------------------------------------------------------------------------------
# Tokenizers and data folders


def ours(**content):
    return dict(format="mdlm-tokenizer", version=1, end=False) | content


def bpe(**changes):
    pieces = [("some words to merge " * 50, False)]
    made = tokenizer.build_tokenizer("bpe", 300, False, lambda: pieces, 1000)
    return ours(kind="bpe", vocab=json.dumps(json.loads(made.vocab) | changes))


@pytest.mark.parametrize(
    "content",
    [
        lambda: json.loads(bpe()["vocab"]) | {"of_the_future": 1},
        lambda: ours(kind="char", vocab=["a", "ab"]),
        lambda: ours(kind="char", vocab=[]),
        lambda: ours(kind="byte", vocab=None, end="1"),
        lambda: ours(kind="byte", vocab=None, version=2),
        lambda: ours(kind="other", vocab=["a"]),
        lambda: {"added_tokens": [], "model": {"type": "Unigram", "vocab": [["a"]]}},
    ],
)
def test_foreign_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content()))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        tokenizer.tokenizer_from_json(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "train, meta, word",
    [
        (bytes(201), None, "whole number"),
        (np.full(200, 256, np.uint16).tobytes(), None, "256"),
        (np.full(200, -5, np.int32).tobytes(), dict(dtype="int32"), "-5"),
        (bytes(200), dict(dtype="O"), "meta.json"),
        (bytes(200), dict(dtype=["uint8"]), "meta.json"),
        (b"", None, "whole number"),
        (bytes(20), None, "block_size=32"),
    ],
)
def test_unusable_data_folder_is_refused(tmp_path, train, meta, word):
    (tmp_path / "train.bin").write_bytes(train)
    (tmp_path / "val.bin").write_bytes(bytes(200))
    if meta:
        (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=word):
        corpus_of(tmp_path, mdlm.Config(block_size=32, vocab_size=256), CPU)


@pytest.fixture(scope="module")
def files(pydoc, tmp_path_factory):
    """The files of a data folder, name -> bytes."""
    folder = prepared(pydoc[:6000].encode(), tmp_path_factory.mktemp("data"))
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def windows_are_sound_or_refused(files):
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        with contextlib.suppress(UserError):
            corpus = corpus_of(Path(folder), CONFIG, CPU)
            for x in (corpus.windows(8), corpus.batch(torch.arange(8))[0]):
                assert x.shape[1] == 32
                assert x.min() >= 0
                assert x.max() < corpus.tokenizer.vocab_size


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_data_gives_no_wrong_ids(files, data):
    name = data.draw(st.sampled_from(sorted(files)))
    start = data.draw(st.integers(0, len(files[name])))
    removed = data.draw(st.integers(0, 64) | st.just(1 << 20))
    content = files[name][:start] + data.draw(st.binary(max_size=64))
    windows_are_sound_or_refused(files | {name: content + files[name][start + removed :]})


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [1 << 40, b"[" * 10**6])  # a sparse file of a terabyte; deep
def test_huge_json_is_refused_unread(files, tmp_path, name, content):
    for other in files:
        (tmp_path / other).write_bytes(files[other])
    if isinstance(content, int):
        os.truncate(tmp_path / name, content)
    else:
        (tmp_path / name).write_bytes(content)
    began = time.monotonic()
    with pytest.raises(UserError, match=name):
        corpus_of(tmp_path, CONFIG, CPU)
    assert time.monotonic() - began < 5


# --------------------------------------------------------------------------------------------------
# Download

CONTENT = b"what was asked for\n" * 5000


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The file that a local server offers as tiny Shakespeare; the cache is tmp_path / "cache"."""
    (tmp_path / "www").mkdir()
    handler = functools.partial(QuietHandler, directory=tmp_path / "www")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(sources, "URL", f"http://127.0.0.1:{server.server_port}/file")
        monkeypatch.setattr(sources, "SHA256", hashlib.sha256(CONTENT).hexdigest())
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield tmp_path / "www" / "file"
        server.shutdown()


def test_damaged_cache_is_replaced(served, tmp_path, capsys):
    cached = tmp_path / "cache" / "mdlm" / "tinyshakespeare.txt"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(CONTENT[:-500])
    served.write_bytes(CONTENT)
    assert "".join(sources.find_text("shakespeare")()) == CONTENT.decode()
    assert cached.read_bytes() == CONTENT
    served.unlink()
    assert sources.shakespeare() == cached, "not downloaded again"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("cause", ["no network", "no cache folder", "no pooch"])
def test_without_download_pydoc_is_taken(tmp_path, monkeypatch, capsys, cause):
    monkeypatch.setattr(sources, "URL", "http://127.0.0.1:9/closed")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if cause == "no cache folder":
        monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    if cause == "no pooch":
        monkeypatch.setitem(sys.modules, "pooch", None)
    assert sources.default_data() == "pydoc"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pydoc" in said


def test_without_pydoc_patterns_are_taken(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    monkeypatch.setattr(sources, "URL", "http://127.0.0.1:9/closed")
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert sources.default_data() == "patterns"
    assert "patterns" in capsys.readouterr().err


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_forged_json_gives_no_wrong_ids(files, data):
    name = data.draw(st.sampled_from(["meta.json", "tokenizer.json"]))
    content = json.loads(files[name])
    key = data.draw(st.sampled_from(sorted(content)))
    content[key] = data.draw(JSON)
    windows_are_sound_or_refused(files | {name: json.dumps(content).encode()})


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_pickles_in_a_data_folder_are_ignored(files, tmp_path):
    for name in files:
        (tmp_path / name).write_bytes(files[name])
    for name in ("meta.pkl", "data.pkl"):  # nanoGPT writes meta.pkl
        (tmp_path / name).write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    corpus_of(tmp_path, CONFIG, CPU)
    assert not (tmp_path / "executed").exists()


def test_wrong_download_leaves_no_file(served, tmp_path):
    served.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(OSError, match="hash"):
        sources.shakespeare()
    assert list((tmp_path / "cache").rglob("*.*")) == []
