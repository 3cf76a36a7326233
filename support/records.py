"""Data sets of documents: .jsonl, .jsonl.gz, .parquet, and folders of these and of .txt."""

import gzip
import json
import zlib
from pathlib import Path

from support.cli import UserError, optional

LARGEST = 1 << 26  # bytes of a record, which is held in memory


def find_files(path):
    """The files of a data set: itself, or those in a folder, sorted by name."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    if (path / "latest").exists():
        raise UserError(f"--data={path} is the folder of a run; its data is in {path}/data")
    found = sorted(p for p in path.iterdir() if p.name.endswith(tuple(READERS)))
    if not found:
        accepted = f"{', '.join(READERS)}, or train.bin and val.bin"
        raise UserError(f"--data={path} is a folder without files to train on; give {accepted}")
    return found


def read(path, *columns):
    """Stream lists of texts, those columns of each record; UserError says where one is wrong."""
    for file in find_files(path):
        reader = next(READERS[suffix] for suffix in READERS if file.name.endswith(suffix))
        try:
            for place, texts in reader(file, columns):
                where = (f"{file}{place}{name}" for name in (columns if place else ("",)))
                yield list(map(check_text, texts, where))
        except (OSError, EOFError, zlib.error) as e:  # gzip raises all three
            why = getattr(e, "strerror", None) or e
            raise UserError(f"--data={file} cannot be read ({why}); restore it") from None


def check_text(text, where):
    if not isinstance(text, str) or not text:
        raise UserError(f"{where} is {str(text)[:40]!r}, not a text; mend or remove it")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"{where} has half of a surrogate pair at {e.start}; mend it") from None
    return text


def read_txt(path, columns):
    """A text file is one document."""
    if len(columns) > 1:
        raise UserError(f"{path} has no column {columns[0]!r}; give .jsonl or .parquet files")
    try:
        yield "", [path.read_text(encoding="utf-8-sig")]
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 text (byte {e.start}); convert it") from None


def read_jsonl(path, columns):
    """One JSON object a line; blank lines are skipped."""
    with gzip.open(path) if path.name.endswith(".gz") else open(path, "rb") as f:
        number = 0
        while line := f.readline(LARGEST + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > LARGEST:
                raise UserError(f"{where} has more than {LARGEST} bytes; split it")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise UserError(f"{where} is no JSON ({e}); mend or remove it") from None
            record = record if isinstance(record, dict) else {}
            check_columns(columns, record, where)
            yield f", line {number}: ", [record[name] for name in columns]


def check_columns(columns, found, where):
    for name in columns:
        if name not in found:
            words = ", ".join(found)[:200] or "no JSON object"
            flag = "--text_column" if name == columns[-1] else "--prompt_column"
            raise UserError(f"{where} has no {name!r}, but {words}; give {flag}")


def read_parquet(path, columns):
    pyarrow = optional("pyarrow", f"--data={path}")
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            check_columns(columns, file.schema_arrow.names, path)
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=list(columns)):
                for record in batch.to_pylist():
                    number += 1
                    yield f", row {number}: ", [record[name] for name in columns]
    except (pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise UserError(f"--data={path} is no intact parquet file ({e}); restore it") from None


READERS = {
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".parquet": read_parquet,
    ".txt": read_txt,  # in a folder
}
