"""What is given as --data is read as what it is, or refused in one sentence; never silently wrong.

By kind: files with checksums, what is no file, formats and their names, records, ids of a stated
width, marks that never occur, the place of a mistake, texts that cannot be had, few records.
"""

import gzip
import json
import os
import pickle
import random
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, call, corpus_of, losses, read_log, run_mdlm

import eval
import mdlm
import sample
from nanomdlm.support.data import sources, texts
from nanomdlm.support.data.texts import prepare
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import checkpoint

CPU = torch.device("cpu")
TEXTS = [f"Record {i} says: " + "na " * (i % 7) + "ü\n" for i in range(60)]


def documents(data, **flags):
    """The documents of --data as mdlm.py learns them, in order."""
    config = mdlm.Config(data=str(data), **flags)
    source = texts.open_source(config)
    source.survey()
    found = [""]
    for text, end in source():
        found[-1] += text
        found += [""] * bool(end)
    return found[:-1]


def prepared(data, folder, **flags):
    """A corpus, and the text of train.bin and val.bin, with | for [END]."""
    config = mdlm.Config(**dict(data=str(data), block_size=8) | flags)
    folder.mkdir()
    prepare(config, folder)
    corpus = corpus_of(folder, config, CPU)
    spell = corpus.tokenizer.decode
    parts = [
        "".join(spell([i]) or "|" for i in ids.tolist())
        for ids in (corpus.ids["train"], corpus.ids["val"])
    ]
    return corpus, *parts


def write_jsonl(path, found=TEXTS, column="text"):
    content = "".join(json.dumps({column: text}) + "\n" for text in found).encode()
    path.write_bytes(gzip.compress(content) if path.name.lower().endswith(".gz") else content)
    return path


def refused(data, *words, **flags):
    with pytest.raises(UserError) as e:
        documents(data, **flags)
    said = str(e.value)
    assert all(word in said for word in words), said
    return said


# --------------------------------------------------------------------------------------------------
# Files with checksums


@pytest.mark.parametrize(
    "flags",
    [
        dict(),
        dict(compression="none"),
        dict(use_dictionary=False, compression="none"),
        dict(data_page_version="2.0", compression="gzip"),
    ],
)
def test_damaged_parquet_gives_no_other_text(tmp_path, flags):
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    settings = dict(row_group_size=25, write_page_checksum=True, **flags)
    arrow.parquet.write_table(arrow.table({"text": TEXTS}), path, **settings)
    whole = path.read_bytes()
    draw = random.Random(0)
    outcomes = []
    for _ in range(40):
        bit = draw.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            outcomes.append(documents(path))
        except UserError as e:
            assert str(path) in str(e)
            outcomes.append(None)
    assert all(found in (None, TEXTS) for found in outcomes)
    assert outcomes.count(None) > 10


def test_rows_that_a_file_lost_are_missed(tmp_path):
    """Page checksums do not cover how many rows a page has: the footer says it again."""
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    settings = dict(compression="none", use_dictionary=False, write_statistics=False)
    arrow.parquet.write_table(arrow.table({"text": ["a", "b"] * 30}), path, **settings)
    whole = path.read_bytes()
    for at in range(len(whole)):  # 120 is the zigzag form of 60, which the page and footer say
        if whole[at] == 120:
            path.write_bytes(whole[:at] + bytes([100]) + whole[at + 1 :])
            try:
                assert documents(path) == ["a", "b"] * 30
            except UserError as e:
                assert "parquet" in str(e) or "cannot be read" in str(e)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["a bit", "cut", "gone"])
def test_damaged_prepared_data_is_refused(run, tmp_path, name, damage, capsys):
    """By --resume; if it is not known as a folder of other ids then, by a new run and eval.py."""
    path = run / "data" / name
    content = path.read_bytes()
    at = content.index(b"[") + 2 if name.endswith("json") else 40
    changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    path.write_bytes(changed if damage == "a bit" else content[: len(content) // 2])
    new = [f"--data={run / 'data'}", *TINY, "--max_steps=1", f"--out_dir={tmp_path / 'o'}"]
    calls = [
        (mdlm.main, [f"--out_dir={run}", "--resume", "--max_steps=5"]),
        (mdlm.main, new),
        (eval.main, [f"--out_dir={run}", "--windows=1", "--pictures=none"]),
    ]
    if damage == "gone":
        path.unlink()
    for main, flags in calls[: 1 if damage == "gone" else 3]:
        r = call(main, capsys, *flags)
        assert r.code == 2 and str(run) in r.err and r.err.count("\n") == 1, r.err


def test_eval_scores_only_what_a_run_learned(run, capsys):
    """Also where the prepared data is whole, but another one."""
    meta = json.loads((run / "data" / "meta.json").read_text())
    del meta["checksum"]  # as earlier versions wrote it
    (run / "data" / "meta.json").write_text(json.dumps(meta))
    flags = [f"--out_dir={run}", "--windows=1", "--passes=1", "--pictures=none"]
    assert call(eval.main, capsys, *flags).code == 0
    ids = np.fromfile(run / "data" / "val.bin", np.uint8)
    ids[::-1].tofile(run / "data" / "val.bin")
    r = call(eval.main, capsys, *flags)
    assert r.code == 2 and str(run / "data") in r.err
    assert call(eval.main, capsys, *flags, f"--data={run / 'data'}").code == 0


# --------------------------------------------------------------------------------------------------
# What is no file


def make(kind, path):
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")


@pytest.mark.skipif(sys.platform == "win32", reason="has no such files")
@pytest.mark.parametrize("kind", ["pipe", "device", "dangling link"])
@pytest.mark.parametrize("suffix", ["txt", "parquet"])
def test_what_is_no_file_never_hangs(tmp_path, kind, suffix):
    path = tmp_path / f"x.{suffix}"
    make(kind, path)
    refused(path, str(path))
    write_jsonl(tmp_path / "a.jsonl")
    refused(tmp_path, str(path))  # among others


@pytest.mark.skipif(sys.platform == "win32", reason="has no such files")
def test_a_batch_may_be_a_pipe(run, tmp_path, capsys):
    """It is read once, and its writer may come later: then a sentence says what is waited for."""
    read, write = os.pipe()
    os.write(write, "The█\n".encode())
    os.close(write)
    flags = [f"--out_dir={run}", "--steps=1"]
    assert call(sample.main, capsys, *flags, f"--batch=/dev/fd/{read}").code == 0
    os.close(read)
    os.mkfifo(tmp_path / "b")
    writer = threading.Timer(1.5, (tmp_path / "b").write_text, ["The█\nA█\n"])
    writer.start()
    r = call(sample.main, capsys, *flags, f"--batch={tmp_path / 'b'}")
    assert r.code == 0 and len(r.out.splitlines()) == 2


# --------------------------------------------------------------------------------------------------
# Formats and their names


def array(found):
    return json.dumps([dict(text=text) for text in found])


def pretty(found):
    return json.dumps([dict(text=text, id=[i]) for i, text in enumerate(found)], indent=2)


def lines(found):
    return "\n\r\n".join(json.dumps(dict(text=text)) for text in found)


def inner(found):
    return json.dumps(dict(version=1, tags=["a"], data=[dict(text=text) for text in found]))


@pytest.mark.parametrize(
    "name, write",
    [
        ("X.JSONL", lines),
        ("x.ndjson", lines),
        ("x.NDJSON.GZ", lines),
        ("x.Jsonl.gz", lines),
        ("x.json", array),
        ("x.json", pretty),
        ("x.json", lines),
        ("x.json", inner),
        ("x.JSON.gz", pretty),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_format_is_known_whatever_its_case(tmp_path, name, write, mark):
    content = (mark + write(TEXTS)).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.lower().endswith("gz") else content)
    assert documents(path) == TEXTS
    assert sources.is_records(path)
    path.rename(tmp_path / f"-{name}")
    assert documents(tmp_path) == TEXTS  # in a folder too


@pytest.mark.parametrize(
    "content, names",
    [
        ("", ""),
        ('[{"text": "a"},\n\n{"text": "b"]', "3"),
        ('[{"text": "a"}]\n[]', "1"),
        ('[{"text": "a"},\n{"txt": "b"}]', "2 text txt"),
        ('[{"text": "a"},\n{"text": 3}]', "2 text"),
        ('["a", "b"]', "1"),
        ('{"text": "a"}\n{"text": "b"', "2"),
        ('{"a": [{"text": "x"}], "b": [{"text": "y"}]}', "text a b"),
        ('[{"text": "\\ud800"}]', "1"),
        (b'[{"text": "\xff"}]', "1"),
    ],
)
def test_wrong_json_is_named(tmp_path, content, names):
    path = tmp_path / "x.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(path, str(path), *names.split())


@pytest.mark.parametrize("name", ["x.csv", "X.TSV", "train.bin"])
def test_unread_formats_are_refused_by_name(tmp_path, name):
    """Those that would pass as a text."""
    (tmp_path / name).write_text("a,b\n1,2\n" * 30)
    refused(tmp_path / name, name)


@pytest.mark.parametrize("kind", ["gzip", "pickle", "ids", "utf-16", "utf-16-le", "utf-32-le"])
def test_no_text_is_known_by_its_bytes(tmp_path, kind):
    made = dict(gzip=gzip.compress(b"plain words " * 99, mtime=0), pickle=pickle.dumps(["a" * 99]))
    made["ids"] = np.arange(100, dtype=np.uint16).tobytes()
    for name in ("x", "x.txt"):
        (tmp_path / name).write_bytes(made.get(kind) or ("plain words " * 99).encode(kind))
        refused(tmp_path / name, name, "byte")
    refused(tmp_path, "x.txt", "byte")


def test_a_folder_says_what_it_held(tmp_path, capsys):
    for name in ("a.txt", "B.TXT", "c.jsonl", "d.jsonl", "e.txt"):
        (tmp_path / name).write_text('{"text": "some words"}\n')
    for name in ("._a.txt", ".DS_Store", ".~lock.a.txt#"):
        (tmp_path / name).write_bytes(b"\xff\xfe\0")
    for name in ("notes.csv", "README.md"):
        (tmp_path / name).write_text("x")
    for name in ("more", "f.txt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "e.txt").write_text("never read")
    plain = '{"text": "some words"}\n'
    assert documents(tmp_path) == [plain] * 2 + ["some words"] * 2 + [plain], "sorted by name"
    said = capsys.readouterr().err
    assert all(name in said for name in ("README.md", "notes.csv", "more", "f.txt")), "left out"


# --------------------------------------------------------------------------------------------------
# Records

MANY = [f"Record {i} says: " + "na " * (i % 7) + "ü\n" for i in range(400)]


def write_parquet(path, texts, column="text"):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"id": list(range(len(texts))), column: texts})
    arrow.parquet.write_table(table, path, row_group_size=37)


def write_folder(path, texts):
    """Three files, whose names give their order, and one that is no data."""
    path.mkdir()
    write_jsonl(path / "a.jsonl", texts[:100])
    (path / "b.txt").write_text(texts[100], encoding="utf-8")
    write_jsonl(path / "c.jsonl.gz", texts[101:])
    (path / "README.md").write_text("no data")


WRITERS = {
    "x.jsonl": write_jsonl,
    "x.jsonl.gz": write_jsonl,
    "x.parquet": write_parquet,
    "folder": write_folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_documents(tmp_path, name):
    pytest.importorskip("pyarrow.parquet" if "parquet" in name else "json")
    WRITERS[name](tmp_path / name, MANY)
    folder = tmp_path / "ids"
    folder.mkdir()
    config = mdlm.Config(data=str(tmp_path / name), block_size=32)
    prepare(config, folder)
    meta, ids, tokenizer, _ = sources.open_ids(folder, 32, 0)
    end = tokenizer.end_id
    found = [list(part) for part in ids]
    assert found[0][-1] == found[1][-1] == end, "the split falls between records"
    texts = [tokenizer.decode(part) for part in split(found[0] + found[1], end)]
    assert texts == MANY
    characters = [len("".join(t)) for t in (MANY[: found[0].count(end)], MANY)]
    assert meta["characters"] == [characters[0], characters[1] - characters[0]]
    assert abs(characters[0] / characters[1] - 0.9) < 0.01


def split(ids, end):
    found = [[]]
    for i in ids:
        if i == end:
            found.append([])
        else:
            found[-1].append(i)
    return found[:-1]


def test_run_on_records_resumes_without_them(tmp_path, capsys):
    data = tmp_path / "x.jsonl"
    write_jsonl(data, MANY, "body")
    flags = [*TINY, f"--data={data}", "--text_column=body", f"--out_dir={tmp_path / 'out'}"]
    assert run_mdlm(*flags, "--max_steps=4") == 0
    assert "documents of given lengths" in capsys.readouterr().out
    write_jsonl(data, MANY[:-1], "body")
    assert run_mdlm("--resume", "--max_steps=5", f"--out_dir={tmp_path / 'out'}") == 0
    assert "on the same data" in capsys.readouterr().out
    data.unlink()
    assert run_mdlm("--resume", "--max_steps=6", f"--out_dir={tmp_path / 'out'}") == 0
    assert len(losses(tmp_path / "out")) == 6
    assert read_log(tmp_path / "out")[-1]["val_bpc"] > 0
    model, tokenizer, _ = mdlm.load(tmp_path / "out")
    assert model.length_counts.sum() > 300 and tokenizer.end_id is not None


def test_a_broken_file_is_named_and_nothing_is_left(tmp_path, capsys):
    arrow = pytest.importorskip("pyarrow")
    whole = gzip.compress(b'{"text": "a good record"}\n' * 1000)
    raw = arrow.array([b"good", b"\xff"], arrow.binary()).view(arrow.string())
    packed, table = tmp_path / "x.jsonl.gz", tmp_path / "x.parquet"
    out = tmp_path / "out"
    for path, write in (
        (packed, lambda: packed.write_bytes(whole[:-9])),
        (packed, lambda: packed.write_bytes(whole[:40] + b"x" * 40)),
        (table, lambda: table.write_bytes(b"PAR1 but not for long PAR1")),
        (table, lambda: arrow.parquet.write_table(arrow.table({"text": raw}), table)),
        (table, lambda: write_parquet(table, [1, 2])),
        (table, lambda: write_parquet(table, ["a"], "body")),
    ):
        write()
        r = call(mdlm.main, capsys, *TINY, f"--data={path}", "--max_steps=1", f"--out_dir={out}")
        assert r.code == 2 and str(path) in r.err and r.err.count("\n") == 1, r.err
        assert not out.exists()


def test_fine_tuning_keeps_to_documents(tmp_path, text_file, capsys):
    write_jsonl(tmp_path / "x.jsonl", ["To be or not to be, that is it."] * 100)
    short = [*TINY, "--max_steps=1"]
    whole, records = (f"--data={path}" for path in (text_file, tmp_path / "x.jsonl"))
    assert run_mdlm(*short, whole, f"--out_dir={tmp_path / 'a'}") == 0
    tuned = [*short, f"--init_from={tmp_path / 'a'}", f"--out_dir={tmp_path / 'b'}"]
    assert run_mdlm(*tuned, records) == 2
    assert "[END]" in capsys.readouterr().err
    assert run_mdlm(*short, f"{whole}", "--separator=\\n", f"--out_dir={tmp_path / 'c'}") == 0
    tuned = [*short, f"--init_from={tmp_path / 'c'}", f"--out_dir={tmp_path / 'd'}"]
    assert run_mdlm(*tuned, records) == 0
    assert torch.isfinite(torch.tensor(losses(tmp_path / "d"))).all()


# --------------------------------------------------------------------------------------------------
# Ids


def zipf(n, V, seed=0):
    """Ids as those of a text: a few are frequent."""
    rng = np.random.default_rng(seed)
    return np.minimum(V * rng.random(n) ** 4, V - 1).astype(np.int64)


def write_ids(folder, ids, dtype, n_val=4000):
    folder.mkdir(exist_ok=True)
    ids[:-n_val].astype(dtype).tofile(folder / "train.bin")
    ids[-n_val:].astype(dtype).tofile(folder / "val.bin")
    return folder


def open_ids(folder, **settings):
    return sources.open_ids(folder, 32, settings.pop("V", 0), **settings)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("how", ["flag", "meta.json"])
def test_ids_of_a_stated_width_become_windows(tmp_path, dtype, how):
    ids = zipf(3000, 200)
    write_ids(tmp_path, ids, dtype, n_val=320)
    if how == "meta.json":
        (tmp_path / "meta.json").write_text(json.dumps(dict(dtype=dtype)))
    config = mdlm.Config(block_size=32, bin_dtype=dtype if how == "flag" else "auto")
    corpus = corpus_of(tmp_path, config, CPU)
    assert corpus.windows().flatten().tolist() == ids[-320:].tolist()
    assert corpus.batch(torch.arange(8))[0].shape == (8, 32)


def test_ids_of_32_bits_are_not_read_as_twice_as_many(tmp_path):
    for name in ("train.bin", "val.bin"):
        (np.arange(400) % 90).astype(np.uint32).tofile(tmp_path / name)
    with pytest.raises(UserError, match="--bin_dtype"):
        open_ids(tmp_path)
    assert len(open_ids(tmp_path, bin_dtype="uint32").arrays[0]) == 400


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
@pytest.mark.parametrize("where", ["train.bin", "val.bin"])
def test_a_damaged_id_makes_no_vocabulary(tmp_path, dtype, where):
    """One of billions would take all memory."""
    write_ids(tmp_path, zipf(9000, 500), dtype)
    with open(tmp_path / where, "r+b") as f:
        f.seek(np.dtype(dtype).itemsize * 77)
        f.write(np.array(1 << 30, dtype).tobytes())
    with pytest.raises(UserError, match=str(tmp_path)):
        open_ids(tmp_path, bin_dtype=dtype)
    with pytest.raises(UserError, match="500"):
        open_ids(tmp_path, bin_dtype=dtype, V=500)


def test_a_tokenizer_for_ids_is_not_ignored(tmp_path, capsys):
    """Nor the --end that goes with it: documents would have no ends."""
    folder = write_ids(tmp_path / "ids", zipf(9000, 200), "uint16")
    flags = [
        f"--data={folder}",
        "--tokenizer=x/tokenizer.json",
        "--end=7",
        f"--out_dir={tmp_path}/o",
    ]
    assert run_mdlm(*flags) == 2
    assert "tokenizer.json" in capsys.readouterr().err
    assert run_mdlm(flags[0], flags[3], "--end=<|endoftext|>") == 2
    assert "--end" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Marks that never occur


@pytest.mark.parametrize(
    "content, separator",
    [
        ("one\r\n\r\ntwo\r\n\r\n" * 9, "\\n\\n"),
        ("one<eot>two<eot>" * 9, "<EOT>"),
        ("one and no end " * 9, "\\n\\n"),
        ("one and no end but the last " * 9 + "\n\n", "\\n\\n"),
    ],
)
def test_a_separator_that_never_occurs_is_refused(tmp_path, content, separator):
    path = tmp_path / "t.txt"
    path.write_bytes(content.encode())
    refused(path, "t.txt", "--separator", separator=separator)


def test_an_end_that_never_occurs_is_refused(tmp_path):
    ids = zipf(9000, 500)
    ids[ids == 7] = 8
    write_ids(tmp_path, ids, np.uint16)
    with pytest.raises(UserError, match="--end=7"):
        open_ids(tmp_path, end_id=7)
    ids[::100] = 7
    write_ids(tmp_path, ids, np.uint16)
    assert open_ids(tmp_path, end_id=7)[2].end_id == 7


# --------------------------------------------------------------------------------------------------
# The place of a mistake


def test_an_unknown_character_is_located(run, tmp_path, capsys):
    """In every kind of data, when eval.py reads it in the tokens of a run."""
    known = json.loads((run / "data" / "tokenizer.json").read_text())["model"]["vocab"]
    good = "".join(c for c in known if c.isalpha()) + " "
    body = "".join(f"{good}\n" for _ in range(50)) + f"{good}\u2603\n" + f"{good}\n" * 9
    (tmp_path / "t.txt").write_text(body, encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text(good * 20)
    (folder / "b.txt").write_text(body, encoding="utf-8")
    write_jsonl(tmp_path / "x.jsonl", [good] * 50 + [f"{good}\u2603"] + [good] * 9)
    (tmp_path / "x.json").write_text(pretty([good] * 50 + [f"{good}\u2603"] + [good] * 9))
    for name, place in (
        ("t.txt", "t.txt, line 51"),
        ("folder", "b.txt, line 51"),
        ("x.jsonl", "x.jsonl, line 51"),
        ("x.json", "x.json, record 51"),
    ):
        r = call(eval.main, capsys, f"--out_dir={run}", f"--data={tmp_path / name}")
        assert r.code == 2 and place in r.err and "\u2603" in r.err, r.err


# --------------------------------------------------------------------------------------------------
# Texts that cannot be had


@pytest.fixture
def offline(monkeypatch):
    def no_network():
        raise OSError("no network")

    monkeypatch.setattr(sources, "shakespeare", no_network)


def test_only_the_default_falls_back(offline, tmp_path, monkeypatch, capsys):
    topics = SimpleNamespace(topics={"a": "Python's words. " * 99, "b": "b"})
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", topics)
    flags = [*TINY, "--max_steps=1", f"--out_dir={tmp_path / 'o'}"]
    assert run_mdlm(*flags, "--data=shakespeare") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--data=FILE" in said and "--data=pydoc" in said
    assert not (tmp_path / "o").exists()
    with pytest.raises(ValueError, match="shakespeare"):
        prepare(mdlm.Config(data="shakespeare"), tmp_path)
    assert run_mdlm(*flags) == 0
    assert "pydoc" in capsys.readouterr().err
    config = json.loads((tmp_path / "o" / "step-1" / "config.json").read_text())["config"]
    assert config["data"] == "pydoc", "what it learned is recorded"
    assert run_mdlm("--resume", "--max_steps=2", flags[-1]) == 0
    monkeypatch.setattr(sources, "shakespeare", lambda: tmp_path / "never read")
    assert run_mdlm("--resume", "--max_steps=3", flags[-1]) == 0, "online too"
    assert checkpoint.read_state(tmp_path / "o" / "step-3")["step"] == 3


# --------------------------------------------------------------------------------------------------
# Few records, empty records


def test_a_separator_splits_between_documents(tmp_path):
    """The same ids as of records: no document is in both parts."""
    texts = [f"doc {i} " + "abc" * (i % 9) for i in range(200)]
    (tmp_path / "x.txt").write_text("###".join(texts), encoding="utf-8")
    write_jsonl(tmp_path / "x.jsonl", texts)
    found = [prepared(tmp_path / "x.txt", tmp_path / "a", separator="###")[0]]
    found.append(prepared(tmp_path / "x.jsonl", tmp_path / "b")[0])
    for part in ("train", "val"):
        assert torch.equal(*(corpus.ids[part] for corpus in found))


def books(folder, sizes):
    folder.mkdir()
    for i, n in enumerate(sizes):
        (folder / f"{i:03}.txt").write_text("".join(chr(97 + (i + j) % 26) for j in range(n)))
    return folder


@pytest.mark.parametrize("sizes", [[300] * 5, [1000], [300, 5], [10, 1000], [100] * 30 + [3000]])
def test_few_records_are_split_within_one(tmp_path, capsys, sizes):
    folder = books(tmp_path / "books", sizes)
    corpus, train, val = prepared(folder, tmp_path / "d")
    n = sum(sizes)
    assert len(val.replace("|", "")) == n - int(0.9 * n)
    assert (train + val).replace("|", "") == "".join(documents(folder))
    assert not train.endswith("|") and val.endswith("|"), "its front has no [END]"
    assert (train + val).count("|") == len(sizes)
    assert len(corpus.windows()) > 0


@pytest.mark.parametrize("n", [10, 20, 60])
def test_enough_records_are_split_between(tmp_path, capsys, n):
    _, train, val = prepared(write_jsonl(tmp_path / "x.jsonl", TEXTS[:n]), tmp_path / "d")
    assert train.endswith("|") and val.endswith("|")


@pytest.mark.parametrize("n", [2, 3, 5, 19])
def test_no_prompt_is_split_from_its_answer(tmp_path, n):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"q": "x{"y" * i}", "a": "z"}}\n' for i in range(n)))
    flags = dict(prompt_column="q", text_column="a", document_length="predicted", block_size=32)
    _, train, val = prepared(path, tmp_path / "d", **flags)
    assert train.startswith("x") and val.startswith("x")
    assert train.endswith("z|") and val.endswith("z|")


EMPTY = [None, "", " ", "\n\t\u00a0"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "folder"])
def test_empty_records_are_skipped_and_counted(tmp_path, capsys, name):
    path = tmp_path / name
    found = TEXTS[:40] + EMPTY + TEXTS[40:]
    if name == "x.parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet")
        arrow.parquet.write_table(arrow.table({"text": found}), path)
    elif name == "x.json":
        path.write_text(array(found))
    elif name == "folder":
        path.mkdir()
        for i, text in enumerate(found):
            (path / f"{i:03}.txt").write_text(text or "")
    else:
        write_jsonl(path, found)
    assert documents(path) == TEXTS
    said = capsys.readouterr().err
    assert "4 empty" in said
    assert ("41" if name != "folder" else "040.txt") in said
    assert documents(path, max_bad_records=4) == TEXTS
    refused(path, "--max_bad_records=3", max_bad_records=3)


def test_damaged_records_are_skipped_on_request(tmp_path, capsys):
    lines = [json.dumps(dict(text=text)) for text in TEXTS]
    bad = [
        '{"text": 7}',
        '{"txt": "a"}',
        "[1]",
        '{"text": "a',
        '{"text": "\\ud800"}',
        '{"text":""}',
    ]
    for i, line in enumerate(bad):
        lines.insert(7 * i + 3, line)
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(lines))
    refused(path, "line 4")
    assert documents(path, max_bad_records=6) == TEXTS
    said = capsys.readouterr().err
    assert "6 " in said and "line 4" in said
    refused(path, "--max_bad_records=5", max_bad_records=5)


def test_an_answer_without_text_skips_its_prompt(tmp_path):
    path = tmp_path / "x.jsonl"
    pairs = [("a", "b"), ("c", None), ("", "d"), ("e", "f")] * 9
    path.write_text("".join(json.dumps(dict(q=q, a=a)) + "\n" for q, a in pairs))
    flags = dict(prompt_column="q", text_column="a", document_length="predicted")
    assert documents(path, **flags) == ["a", "b", "e", "f"] * 9


@pytest.mark.parametrize("written, read", [("uint16", "uint32"), ("uint8", "uint16")])
def test_ids_of_another_width_are_not_in_the_vocabulary(tmp_path, written, read):
    write_ids(tmp_path, zipf(20_000, 200), written)
    with pytest.raises(UserError, match="--bin_dtype"):
        open_ids(tmp_path, V=200, bin_dtype=read)


def test_padding_of_labels_is_no_id(tmp_path):
    ids = zipf(9000, 500)
    ids[::50] = -100
    write_ids(tmp_path, ids, np.int32)
    with pytest.raises(UserError, match="-100"):
        open_ids(tmp_path, bin_dtype="int32")


def test_a_stated_width_is_trained_and_scored(tmp_path, capsys):
    dtype = "uint32"
    folder = write_ids(tmp_path / "ids", zipf(3000, 200), dtype, n_val=300)
    out = f"--out_dir={tmp_path / 'out'}"
    flags = [*TINY, f"--data={folder}", "--max_steps=2", f"--bin_dtype={dtype}", out]
    assert run_mdlm(*flags) == 0
    assert run_mdlm(out, "--resume", "--max_steps=3") == 0
    assert len(read_log(tmp_path / "out")) > 3
    assert call(eval.main, capsys, out, "--windows=2", "--passes=1", "--pictures=none").code == 0


def test_a_single_pair_is_refused(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", ["answer"])
    (tmp_path / "x.jsonl").write_text('{"q": "a", "text": "b"}')
    refused(tmp_path / "x.jsonl", prompt_column="q", document_length="predicted")
