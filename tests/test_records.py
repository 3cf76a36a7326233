"""Data sets of records: each is a document, read in order, and what is wrong is named."""

import gzip
import json

import pytest
import torch
from conftest import TINY, losses, read_log, run_mdlm

import mdlm
from nanomdlm.support.data import sources
from nanomdlm.support.data.texts import prepare

TEXTS = [f"Record {i} says: " + "na " * (i % 7) + "ü\n" for i in range(400)]


def write_jsonl(path, texts, column="text"):
    lines = [json.dumps({"id": i, column: text}) for i, text in enumerate(texts)]
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


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
    WRITERS[name](tmp_path / name, TEXTS)
    folder = tmp_path / "ids"
    folder.mkdir()
    config = mdlm.Config(data=str(tmp_path / name), block_size=32)
    prepare(config, folder)
    meta, ids, tokenizer, _ = sources.open_ids(folder, 32, 0)
    end = tokenizer.end_id
    found = [list(part) for part in ids]
    assert found[0][-1] == found[1][-1] == end, "the split falls between records"
    texts = [tokenizer.decode(part) for part in split(found[0] + found[1], end)]
    assert texts == TEXTS
    characters = [len("".join(t)) for t in (TEXTS[: found[0].count(end)], TEXTS)]
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
    write_jsonl(data, TEXTS, "body")
    flags = [*TINY, f"--data={data}", "--text_column=body", f"--out_dir={tmp_path / 'out'}"]
    assert run_mdlm(*flags, "--max_steps=4") == 0
    assert "documents of given lengths" in capsys.readouterr().out
    write_jsonl(data, TEXTS[:-1], "body")
    assert run_mdlm("--resume", "--max_steps=5", f"--out_dir={tmp_path / 'out'}") == 0
    assert "on the same data" in capsys.readouterr().out
    data.unlink()
    assert run_mdlm("--resume", "--max_steps=6", f"--out_dir={tmp_path / 'out'}") == 0
    assert len(losses(tmp_path / "out")) == 6
    assert read_log(tmp_path / "out")[-1]["val_bpc"] > 0
    model, tokenizer, _ = mdlm.load(tmp_path / "out")
    assert model.length_counts.sum() > 300 and tokenizer.end_id is not None


GOOD = json.dumps(dict(text="a good record\n" * 9)) + "\n"
WRONG = [
    (GOOD + '{"txt": "a"}', "line 2: there is no 'text', but txt"),
    (GOOD + '{"text": 7}', "line 2: '7' is not a text"),
    (GOOD + '{"text": "\\ud800"}', "line 2: half of a surrogate pair"),
    (GOOD + '{"text": "a"', "line 2: it is not JSON"),
    (GOOD + "[" * 100_000, "line 2: it is not JSON"),
    (GOOD + '["text"]', "line 2: it is not a JSON object"),
    (GOOD.encode() + b'{"text": "\xff"}', "line 2: it is not JSON"),
    ("", "is empty"),
]


def is_refused(tmp_path, capsys, data, words):
    out = tmp_path / "out"
    assert run_mdlm(*TINY, f"--data={data}", "--max_steps=1", f"--out_dir={out}") == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1, said
    assert not out.exists() or not list(out.iterdir()), "something was left"


@pytest.mark.parametrize("content, words", WRONG)
def test_wrong_records_are_named(tmp_path, capsys, content, words):
    data = tmp_path / "x.jsonl"
    data.write_bytes(content if isinstance(content, bytes) else content.encode())
    is_refused(tmp_path, capsys, data, words)


def test_broken_files_are_named(tmp_path, capsys):
    whole = gzip.compress(GOOD.encode() * 1000)
    for content in (whole[:-9], b"no gzip", whole[:40] + b"x" * 40):
        (tmp_path / "x.jsonl.gz").write_bytes(content)
        is_refused(tmp_path, capsys, tmp_path / "x.jsonl.gz", "cannot be read")
    (tmp_path / "d").mkdir()
    is_refused(tmp_path, capsys, tmp_path / "d", "without files to train on")
    (tmp_path / "d" / "b.txt").write_bytes(b"abc\xff")
    is_refused(tmp_path, capsys, tmp_path / "d", "is not UTF-8 text (byte 3)")
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 but not for long PAR1")
    is_refused(tmp_path, capsys, tmp_path / "x.parquet", "cannot be read as parquet")
    arrow = pytest.importorskip("pyarrow")
    raw = arrow.array([b"good", b"\xff"], arrow.binary()).view(arrow.string())
    arrow.parquet.write_table(arrow.table({"text": raw}), tmp_path / "x.parquet")
    is_refused(tmp_path, capsys, tmp_path / "x.parquet", "cannot be read as parquet")
    write_parquet(tmp_path / "x.parquet", [1, 2])
    is_refused(tmp_path, capsys, tmp_path / "x.parquet", "row 1: '1' is not a text")
    write_parquet(tmp_path / "x.parquet", ["a"], "body")
    is_refused(tmp_path, capsys, tmp_path / "x.parquet", "there is no 'text', but id, body")


def test_folders_of_runs_are_no_records(tmp_path, short_run, capsys):
    is_refused(tmp_path, capsys, short_run, "log.jsonl")
    is_refused(tmp_path, capsys, short_run / "step-4", "there is no 'text'")


def test_a_record_may_be_shorter_than_a_window(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", ["some text"] * 9 + ["short"])
    flags = [*TINY, f"--data={tmp_path / 'x.jsonl'}", f"--out_dir={tmp_path / 'out'}"]
    assert run_mdlm(*flags, "--max_steps=1") == 0


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
