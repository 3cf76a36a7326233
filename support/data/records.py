"""Files of texts: plain text, and records in .jsonl, .ndjson, .json and .parquet, or a folder."""

import gzip
import io
import json
import os
import zlib
from pathlib import Path

from nanomdlm.support.cli import files
from nanomdlm.support.cli.environment import optional
from nanomdlm.support.data import chat
from nanomdlm.support.errors import UserError

PIECE = 1 << 22  # characters or ids that are held at a time, so that memory is bounded
PROMPT = "prompt"  # marks a text that is a prompt: its answer follows
# Tables and ids can be valid UTF-8, and would be learned as a text that they are not.
NOT_TEXT = (".bin", ".csv", ".tsv")


# ---- Which files
def suffix_of(path):
    """The suffix that names a file's format, in lower case: .jsonl.gz for X.JSONL.GZ."""
    name = Path(path).name.lower()
    packed = ".gz" * name.endswith(".gz")
    return Path(name.removesuffix(".gz")).suffix + packed


def check_regular(path):
    """Raise UserError unless a path names a regular file: pipes cannot be read twice."""
    if not os.path.isfile(path):
        accepted = "a text file, .jsonl, .json, .parquet, a folder, shakespeare, patterns or pydoc"
        raise UserError(f"--data={path} is not a file; give {accepted}")


def check_plain(path):
    """Raise UserError for a file whose name or first bytes show that it is not plain text."""
    check_regular(path)
    if suffix_of(path) in NOT_TEXT:
        fix = "save texts as .jsonl or .parquet; for ids, give the folder with train.bin"
        raise UserError(f"--data={path} is not read as plain text; {fix}")
    with files.open_regular(path) as f:
        at = f.read(8192).find(b"\0")
    if at >= 0:  # UTF-16 without a mark is valid UTF-8
        what = f"--data={path} is not UTF-8 text: it has a NUL at byte {at}, as UTF-16 has"
        raise UserError(f"{what}; convert it, for example with iconv, or unpack it")


def find_files(path):
    """(files to read, sorted by name; what is left out, except hidden files) of a data set.

    In a folder, other formats and subfolders are left out.
    """
    path = Path(path)
    if not path.is_dir():
        return [path], []
    data = []
    left_out = []
    for file in sorted(path.iterdir()):
        is_about = file.name.startswith("dataset_info")  # of a hub
        is_data = suffix_of(file) in READERS and not (is_about or file.is_dir())
        if file.name[0] != ".":
            (data if is_data else left_out).append(file)
    return data, left_out


# ---- Reading
def read(path, columns, template=None):
    """Yield (texts, where) for each record of a data set; texts: [(text, end), ...].

    texts is a UserError for a bad record, [] for one without text. end: True if the text ends a
    document, False if it goes on, PROMPT if it is a prompt. where: the file, and the place of the
    record in it. template: a chat.ChatTemplate, for a column of conversations. Raises UserError for
    a damaged file.
    """
    data, _ = find_files(path)
    if not data:
        accepted = f"{', '.join(READERS)}, or train.bin and val.bin"
        raise UserError(f"--data={path} is a folder without files to train on; give {accepted}")
    for file in data:
        check_regular(file)
        try:
            for record, where in READERS[suffix_of(file)](file, columns):
                try:
                    texts = texts_of(record, columns, template)
                except UserError as e:
                    texts = UserError(f"{where}: {e}")
                yield texts, where
        except (OSError, EOFError, zlib.error) as e:  # gzip raises all three
            why = getattr(e, "strerror", None) or e
            raise UserError(f"--data={file} cannot be read ({why}); restore it") from None


def texts_of(record, columns, template):
    """[(text, end)] in the columns of a record, [] if one is empty; UserError for a bad record.

    record: a dict; [(text, end)] of plain text; or what is wrong with it as a UserError
    """
    if isinstance(record, UserError):
        raise record
    if isinstance(record, list) and all(isinstance(each, tuple) for each in record):
        return record
    if not isinstance(record, dict):
        raise UserError("it is not a JSON object with texts; fix or remove it")
    check_columns(record, columns)
    values = [record[name] for name in columns]
    if None in values:
        return []
    texts = [*zip(values, [PROMPT] * (len(values) - 1) + [True])]
    if template:
        chat.check(values[0], columns[0])
        pairs = [(prompt, text) for prompt, text in template.pairs(values[0]) if text.strip()]
        texts = [each for prompt, text in pairs for each in ((prompt, PROMPT), (text, True))]
    for text, _ in texts:
        check_text(text)
    return texts if all(text.strip() for text, _ in texts) else []


def check_columns(names, columns):
    """Raise UserError if a record, or a file, lacks one of these columns."""
    for name in columns:
        if name not in names:
            flags = "--text_column, --prompt_column or --chat_column"
            raise UserError(f"there is no {name!r}, but {', '.join(names)[:200]}; give {flags}")


def check_text(text):
    if not isinstance(text, str):
        raise UserError(f"{str(text)[:40]!r} is not a text; fix or remove it")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"half of a surrogate pair at {e.start}; fix or remove it") from None


def read_text(path, size=PIECE):
    """Stream a UTF-8 file as texts of about `size` characters, cut after a line if possible."""
    raw = files.open_regular(path)
    with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="\n") as f:  # no byte order mark
        try:
            text = f.read(size)
            while more := f.read(size):
                cut = text.rfind("\n") + 1 or len(text)
                yield text[:cut]
                text = text[cut:] + more
        except UnicodeDecodeError as e:
            at = raw.tell() - len(e.object) + e.start
            advice = "convert it, for example with iconv, or unpack it"
            raise UserError(f"--data={path} is not UTF-8 text (byte {at}); {advice}") from None
        if text:
            yield text


# The readers yield (record, where).


def read_document(path, columns):
    """A text file in a folder is one document, which comes in pieces."""
    if len(columns) > 1:
        raise UserError(f"{path} has no column {columns[0]!r}; give .jsonl or .parquet files")
    check_plain(path)
    text = ""
    goes_on = False
    for piece in read_text(path):
        if text:
            yield [(text, False)], path
            goes_on = True
        text = piece
    yield [(text, True)] if goes_on or text.strip() else [], path


def read_jsonl(path, columns):
    """One record per line; blank lines are skipped."""
    with opened(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield parse(line), f"{path}, line {number}"


def opened(path):
    """A file to read bytes, unpacked if it is a .gz."""
    return files.open_regular(path, gzip.open if suffix_of(path).endswith(".gz") else open)


def parse(content):
    """The content of JSON, or a UserError if it is damaged."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as e:
        return UserError(f"it is not JSON ({e}); fix or remove it")


def read_json(path, columns):
    """An array of objects, an object that holds one such array, or one object per line."""
    with opened(path) as f:
        found = parse(f.read())
    if isinstance(found, UserError) and "Extra data" in str(found):  # a line is not all of it
        yield from read_jsonl(path, columns)
        return
    if isinstance(found, UserError):
        raise UserError(f"{path}: {found}")
    if isinstance(found, dict) and columns[0] not in found:
        arrays = [value for value in found.values() if value and isinstance(value, list)]
        arrays = [array for array in arrays if isinstance(array[0], dict)]
        found = arrays[0] if len(arrays) == 1 else found
    records = found if isinstance(found, list) else [found]
    for number, record in enumerate(records, 1):
        yield record, f"{path}, record {number}"


def read_parquet(path, columns):
    """One record per row; pages that have checksums are checked."""
    pyarrow = optional("pyarrow", f"--data={path}")
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path, page_checksum_verification=True) as file:
            check_columns(file.schema_arrow.names, columns)
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=list(columns)):
                for record in batch.to_pylist():
                    number += 1
                    yield record, f"{path}, row {number}"
            if number != file.metadata.num_rows:  # checksums do not cover it
                raise UserError(f"{number} rows instead of {file.metadata.num_rows}")
    except (pyarrow.ArrowException, UserError, UnicodeDecodeError, KeyError) as e:
        raise UserError(f"--data={path} cannot be read as parquet ({str(e)[:400]})") from None


READERS = {".jsonl": read_jsonl, ".ndjson": read_jsonl, ".json": read_json}
READERS |= {f"{suffix}.gz": reader for suffix, reader in READERS.items()}
READERS |= {".parquet": read_parquet, ".txt": read_document}  # .txt: in a folder
