"""Data sets of documents: .jsonl, .ndjson, .json, .parquet, and folders of these and of .txt."""

import codecs
import contextlib
import gzip
import io
import itertools
import json
import os
import re
import shlex
import stat
import zlib
from pathlib import Path

from support import chat, files
from support.environment import optional
from support.errors import UserError

LARGEST = 1 << 26  # bytes of a record, which is held in memory
PIECE = 1 << 24  # characters or ids that are held at a time, so that memory is bounded
CHUNK = 1 << 20  # characters of a .json file that are read at a time
PROMPT = "prompt"  # marks a text that is a prompt: its answer follows
BLANK = re.compile(r"[ \t\r\n]*")
KINDS = {
    dict: "an object",
    list: "an array",
    str: "a text",
    type(None): "null",
    bool: "a truth value",
}
# Names of .json files that often lie beside texts but hold none.
METADATA = {"meta", "metadata", "dataset_info", "dataset_infos", "state", "config", "package"}
METADATA |= {"tokenizer", "tokenizer_config", "special_tokens_map", "vocab", "generation_config"}
# Names of files that are rarely meant to be trained on.
HELD_OUT = re.compile(r"(^|[^a-z])(test|valid|validation|val|dev|eval|holdout)([^a-z]|$)")

# ---- Which files


def suffix_of(path):
    """The suffix that names a file's format, in lower case: .jsonl.gz for X.JSONL.GZ."""
    name = Path(path).name.lower()
    packed = ".gz" * name.endswith(".gz")
    return Path(name.removesuffix(".gz")).suffix + packed


def check_regular(path):
    """Raise UserError unless a path names a regular file: texts are read more than once."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        if os.path.islink(path):
            why = f"a link to what is not there: {why}"
        accepted = "a text file, .jsonl, .json, .parquet, a folder, shakespeare, patterns or pydoc"
        why = "" if isinstance(e, FileNotFoundError) and not os.path.islink(path) else f" ({why})"
        raise UserError(f"--data={path} does not exist{why}; give {accepted}") from None
    kinds = (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a folder")
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in kinds if is_kind(mode)), "a device")
        what = f"--data={path} is no regular file but {kind}, and a text is read more than once"
        raise UserError(f"{what}; save it to a file, or remove it from the folder")


# Formats that are not read, and what to do with such a file.
TABLE = "save its column of texts as .parquet or .jsonl"
PACKED = "unpack it"
TENSORS = "give texts, or a folder with ids in train.bin and val.bin"
WRITTEN = "save it as plain text, .txt"
PICTURE = "give texts"
UNREAD = (
    (".csv .tsv .psv .xls .xlsx .ods .arrow .feather .ipc .orc .avro .db .sqlite .sqlite3", TABLE),
    (".duckdb .h5 .hdf5 .mdb .dta .sav .rds .rdata .lance .tfrecord .msgpack .bson", TABLE),
    (
        ".gz .zst .zstd .zip .tar .tgz .xz .txz .bz2 .tbz .tbz2 .7z .rar .lz4 .lzma .br .z .zz",
        PACKED,
    ),
    (".bin .idx .npy .npz .pkl .pickle .pt .pth .ckpt .safetensors .gguf .onnx .mmap", TENSORS),
    (".pdf .doc .docx .odt .rtf .epub .mobi .djvu .ppt .pptx .odp .ipynb .ps", WRITTEN),
    (".png .jpg .jpeg .gif .webp .bmp .tif .tiff .heic .svgz .mp3 .wav .flac .ogg", PICTURE),
    (".m4a .mp4 .mkv .mov .avi .webm .exe .dll .so .pyc .o .a .class .jar .wasm .iso", PICTURE),
)
ADVICE = {suffix: advice for suffixes, advice in UNREAD for suffix in suffixes.split()}
# How files begin whose names do not say it.
SIGNS = (
    (b"\x1f\x8b\x08", "gzip", PACKED),
    (b"\x28\xb5\x2f\xfd", "Zstandard", PACKED),
    (b"\xfd7zXZ\0", "xz", PACKED),
    (b"BZh91AY&SY", "bzip2", PACKED),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", PACKED),
    (b"PK\x03\x04", "a zip archive, a document or weights", "unpack it, or save it as plain text"),
    (b"PAR1", "parquet", "name it .parquet"),
    (b"ARROW1", "Arrow", TABLE),
    (b"SQLite format 3\0", "SQLite", TABLE),
    (b"\x89HDF", "HDF5", TABLE),
    (b"\x93NUMPY", "a .npy array", TENSORS),
    (b"\x80\x04\x95", "a pickle", TENSORS),
    (b"\x80\x05\x95", "a pickle", TENSORS),
    (b"%PDF-", "PDF", WRITTEN),
    (b"{\\rtf", "RTF", WRITTEN),
    (b"\xd0\xcf\x11\xe0", "an old Office document", WRITTEN),
    (b"\0\5\x16\7", "the hidden half of a file of macOS", "give the file without ._"),
    (b"\x89PNG", "a picture", PICTURE),
    (b"\xff\xd8\xff", "a picture", PICTURE),
    (b"\x7fELF", "a program", PICTURE),
)


def check_signs(path):
    """Raise UserError if a file begins like a format that is not read."""
    with files.open_regular(path) as f:
        head = f.read(4096)
    for sign, kind, advice in SIGNS:
        if head.startswith(sign):
            raise UserError(f"--data={path} is {kind}, not text; {advice}")
    for width, encoding in ((4, "UTF-32"), (2, "UTF-16")):  # without a byte order mark
        nuls = [head[i::width].count(0) * width / max(1, len(head)) for i in range(width)]
        if len(head) >= 16 and min(nuls) < 0.1 and sorted(nuls)[1] > 0.8:
            encoding += "LE" if nuls[0] < 0.1 else "BE"
            fix = f"convert it: iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > new.txt"
            what = f"--data={path} has NULs beside every character, as {encoding} has"
            raise UserError(f"{what}; {fix}")
    if head[257:262] == b"ustar":
        raise UserError(f"--data={path} is a tar archive, not text; {PACKED}")


def holds_records(path):
    """Whether a text begins with a line that is a JSON object, as files of records do."""
    try:
        with files.open_regular(path) as f:
            line = f.readline(CHUNK).removeprefix(codecs.BOM_UTF8)
        return line[:1] == b"{" and isinstance(json.loads(line), dict)
    except (OSError, ValueError, RecursionError):
        return False


def check_plain(path):
    """Raise UserError for what is no plain text by its kind, its name or its first bytes."""
    check_regular(path)
    suffix = suffix_of(path)
    advice = ADVICE.get(suffix) or (PACKED if suffix.endswith(".gz") else None)
    if advice:
        what = f"--data={path}: a {suffix} file is not read as text"
        raise UserError(f"{what}; {advice}")
    try:
        check_signs(path)
    except OSError as e:
        raise UserError(f"--data={path} cannot be read ({e.strerror}); give a text file") from None


def is_data(path):
    """Whether the name of a file in a folder is that of texts."""
    suffix = suffix_of(path)
    return suffix in READERS and not (suffix == ".json" and path.stem.lower() in METADATA)


def list_folder(path):
    """(files to read, sorted by name; what is left out, in words) of a folder."""
    try:
        names = sorted(os.listdir(path))
    except OSError as e:
        raise UserError(f"--data={path} cannot be read ({e.strerror}); give a text file") from None
    visible = [Path(path) / name for name in names if name[0] != "."]
    folders = {p for p in visible if p.is_dir()}
    data = [p for p in visible if is_data(p) and p not in folders]
    others = [p.name for p in visible if not is_data(p) and p not in folders]
    hidden = len(names) - len(visible)
    words = others[:5]
    words += [f"{len(others) - 5} more files"] * (len(others) > 5)
    words += [f"{hidden} hidden"] * (hidden > 0)
    words += [f"{len(folders)} folder(s), whose files are not read"] * bool(folders)
    return data, ", ".join(words)


def find_files(path):
    """The files of a data set: itself, or those in a folder, sorted by name."""
    path = Path(path)
    if not os.path.isdir(path):
        return [path]
    for sign, what, fix in (
        ("latest", "the folder of a run", f"its data is in {path}/data"),
        ("manifest.json", "a checkpoint", "give texts, or load it with --init_from"),
    ):
        if (path / sign).exists():
            raise UserError(f"--data={path} is {what}; {fix}")
    data, left_out = list_folder(path)
    if not data:
        accepted = f"{', '.join(READERS)}, or train.bin and val.bin"
        held = f" (left out: {left_out})" if left_out else ""
        what = f"--data={path} is a folder without files to train on{held}"
        raise UserError(f"{what}; give {accepted}")
    return data


def has_columns(path):
    """Whether a data set has records with columns; text files in a folder have none."""
    return any(suffix_of(file) != ".txt" for file in find_files(path))


def describe_folder(path):
    """Lines that say what a folder of texts held, what was left out, and what may be a mistake."""
    data, left_out = list_folder(path)
    counts = {}
    for file in data:
        counts[suffix_of(file)] = counts.get(suffix_of(file), 0) + 1
    held = ", ".join(f"{n} {suffix}" for suffix, n in counts.items())
    lines = [f"{held} read" + f"; left out: {left_out}" * bool(left_out)]
    odd = [p.name for p in data if HELD_OUT.search(p.name.lower())]
    if odd and len(odd) < len(data):
        names = ", ".join(odd[:5]) + " ..." * (len(odd) > 5)
        lines.append(f"{names} read too; move away what is not meant for training")
    return lines


# ---- Reading


class Skipped:
    """Counts the records that are left out: empty ones, and damaged ones up to a limit.

    limit (--max_bad_records): how many may be left out; -1: any empty one, but no damaged one.
    """

    def __init__(self, limit=-1):
        self.limit = limit
        self.clear()

    def clear(self):
        self.empty = 0
        self.damaged = 0
        self.first = None  # where the first one is

    def add(self, where, error=None):
        """Count a record that is left out: empty or, with an `error`, damaged.

        Raises UserError above the limit.
        """
        if error and self.limit < 0:
            raise error
        self.first = self.first or where
        self.damaged += bool(error)
        self.empty += not error
        if 0 <= self.limit < self.empty + self.damaged:
            error = error or f"{where} is empty; mend or remove it"
            raise UserError(f"{error} (or raise --max_bad_records={self.limit})")

    def describe(self):
        """A sentence, or "" if nothing was left out."""
        counts = [(self.empty, "empty"), (self.damaged, "damaged")]
        words = " and ".join(f"{n:,} {kind}" for n, kind in counts if n)
        return words and f"{words} record(s) skipped; the first is {self.first}"


def read(path, columns, skipped):
    """Yield (text, end, where) for each text in `columns` of each record.

    end: True if the text ends a document, False if the document goes on, PROMPT if it is a prompt.
    where: the Path of plain text, else a file and the place of the record in it. Raises UserError,
    which says where.
    """
    skipped.clear()
    for file in find_files(path):
        check_regular(file)
        with explain_read_errors(file):
            yield from READERS[suffix_of(file)](file, columns, skipped)


@contextlib.contextmanager
def explain_read_errors(path):
    """Context manager: turn what files and decompression raise into a UserError with the path."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as e:  # gzip raises all three
        why = getattr(e, "strerror", None) or e
        raise UserError(f"--data={path} cannot be read ({why}); restore it") from None


class Conversations(tuple):
    """The name of a column of conversations: lists of messages, each a record's only value."""


def take(record, columns, where, skipped):
    """Yield (text, end, where) for each text in `columns` of a record; nothing if it is skipped."""
    try:
        texts = texts_of(record, columns, where)
    except UserError as e:
        skipped.add(where, e)
        return
    if isinstance(columns, Conversations):
        is_empty = not texts[0] or not chat.has_answer(texts[0])
    else:
        is_empty = any(text.isspace() or not text for text in texts)
    if is_empty:
        skipped.add(where)
        return
    for text, mark in zip(texts, (PROMPT, True)[-len(texts) :]):
        yield text, mark, where


def texts_of(record, columns, where):
    """The texts in `columns` of a record; if one of them is null or empty, "" for all."""
    if not isinstance(record, dict):
        kind = KINDS.get(type(record), "a number")
        example = json.dumps(dict.fromkeys(columns, "..."))
        raise UserError(f"{where} is {kind}, no JSON object; write it as {example}, or remove it")
    check_columns(columns, record, where)
    texts = [record[name] for name in columns]
    if any(text is None or text == "" or text != text for text in texts):
        return [""] * len(texts)
    for name, text in zip(columns, texts):
        if isinstance(columns, Conversations):
            chat.check(text, f"{where}: {name}")
            text = "".join(message["content"] for message in text)
        check_text(text, f"{where}: {name}")
    return texts


def check_text(text, where):
    if not isinstance(text, str):
        raise UserError(f"{where} is {str(text)[:40]!r}, not a text; mend or remove it")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"{where} has half of a surrogate pair at {e.start}; mend it") from None


def check_columns(columns, names, where):
    for name in columns:
        if name not in names:
            words = ", ".join(names)[:200] or "no column"
            flag = "--text_column" if name == columns[-1] else "--prompt_column"
            flag = "--chat_column" if isinstance(columns, Conversations) else flag
            fix = f"give {flag}, or leave this file out"
            raise UserError(f"{where} has no {name!r}, but {words}; {fix}")


def first_invalid(f):
    """The number of the first byte of a binary file that is not UTF-8, and its line."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = 0
    line = 1
    while True:
        held = len(decoder.getstate()[0])
        chunk = f.read(CHUNK)
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as e:
            return at - held + e.start, line + e.object[held : e.start].count(b"\n")
        at += len(chunk)
        line += chunk.count(b"\n")


def read_text(path, size=PIECE):
    """Stream a UTF-8 file as texts of about `size` characters, cut after a line if possible."""
    rest = ""
    try:
        f = files.open_regular(path)
        with io.TextIOWrapper(f, encoding="utf-8-sig", newline="\n") as f:  # no byte order mark
            while chunk := f.read(size):
                rest += chunk
                cut = rest.rfind("\n") + 1 or len(rest)
                yield rest[:cut]
                rest = rest[cut:]
    except OSError as e:
        raise UserError(f"--data={path} cannot be read ({e.strerror}); give a text file") from None
    except UnicodeDecodeError:
        with files.open_regular(path) as raw:
            at, line = first_invalid(raw)
        advice = "convert it with iconv, or give a folder with train.bin and val.bin"
        what = f"--data={path} is not UTF-8 text (byte {at}), line {line}"
        raise UserError(f"{what}; {advice}") from None
    if rest:
        yield rest


def read_txt(path, columns, skipped):
    """A text file is one document."""
    if len(columns) > 1:
        raise UserError(f"{path} has no column {columns[0]!r}; give .jsonl or .parquet files")
    check_plain(path)
    held = None
    is_first = True
    pieces = read_text(path)
    if path.stat().st_size <= PIECE:  # in one piece, as seams may change what BPE makes of a text
        pieces = ["".join(pieces)]
    for piece in pieces:
        if held is not None:
            yield held, False, path
            is_first = False
        held = piece
    if not held or (is_first and held.isspace()):
        skipped.add(path)
    else:
        yield held, True, path


def open_binary(path):
    is_packed = path.name.lower().endswith(".gz")
    return files.open_regular(path, gzip.open if is_packed else open)


def read_jsonl(path, columns, skipped):
    """One JSON object a line; blank lines are skipped."""
    with open_binary(path) as f:
        number = 0
        while line := f.readline(LARGEST + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > LARGEST:
                skipped.add(where, UserError(f"{where} has more than {LARGEST} bytes; split it"))
                while len(line) > LARGEST and not line.endswith(b"\n"):
                    line = f.readline(LARGEST + 1)
                continue
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as e:
                fix = (
                    "if it is one array, name it .json" if line[:1] == b"[" else "mend or remove it"
                )
                skipped.add(where, UserError(f"{where} is no JSON ({e}); {fix}"))
                continue
            if isinstance(record, list) and any(isinstance(each, dict) for each in record):
                fix = "name it .json, as it holds an array"
                skipped.add(where, UserError(f"{where} is no JSON object; {fix}"))
                continue
            yield from take(record, columns, where, skipped)


def read_json(path, columns, skipped):
    """An array of objects, objects one after the other, or an object that holds one such array."""
    try:
        with open_binary(path) as f:
            values = stream_json(io.TextIOWrapper(f, encoding="utf-8-sig", newline=""), path)
            first = next(values, None)
            second = next(values, None)
            start = [value for value in (first, second) if value]
            if second is None and first is not None:
                start = unwrap(first, columns)
            for number, (line, record) in enumerate(itertools.chain(start, values), 1):
                place = f"record {number}, line {line}"
                yield from take(record, columns, f"{path}, {place}", skipped)
    except UnicodeDecodeError:
        with open_binary(path) as raw:
            at, line = first_invalid(raw)
        what = f"--data={path} is not UTF-8 text (byte {at}), line {line}"
        raise UserError(f"{what}; convert it with iconv") from None


def unwrap(value, columns):
    """The (line, record) pairs of a file's only value: itself, or those of the list in it."""
    line, record = value
    if not isinstance(record, dict) or any(name in record for name in columns):
        return [value]
    lists = [v for v in record.values() if v and isinstance(v, list) and isinstance(v[0], dict)]
    return [(line, each) for each in lists[0]] if len(lists) == 1 else [value]


def stream_json(f, path):
    """Yield (line, value): the elements of the array in a JSON file, or all its values."""
    decode = json.JSONDecoder().raw_decode
    text = ""
    at = 0
    line = 1  # of text[at]
    state = "start"  # then "value" and "comma" in an array, "values" if there is none, "end"

    def fail(why, position):
        number = line + text.count("\n", at, position)
        raise UserError(f"{path}, line {number} is no JSON ({why}); mend it")

    while True:
        end = BLANK.match(text, at).end()
        line += text.count("\n", at, end)
        at = end
        if at == len(text):
            text = f.read(CHUNK)
            at = 0
            if text:
                continue
            if state in ("first", "value", "comma"):
                fail("the array does not end", at)
            return
        if state == "start":
            state = "first" if text[at] == "[" else "values"
            at += state == "first"
        elif state in ("first", "comma") and text[at] == "]":
            state = "end"
            at += 1
        elif state == "comma" and text[at] == ",":
            state = "value"
            at += 1
        elif state in ("comma", "end"):
            fail(f"{text[at]!r} where {'a comma' if state == 'comma' else 'nothing'} belongs", at)
        else:
            try:
                value, end = decode(text, at)
            except (ValueError, RecursionError) as e:
                more = f.read(max(CHUNK, len(text) - at))  # it may be cut off
                if not more or len(text) - at > LARGEST:
                    why = f"more than {LARGEST} characters" if more else getattr(e, "msg", e)
                    fail(why, getattr(e, "pos", at))
                text = text[at:] + more
                at = 0
                continue
            yield line, value
            line += text.count("\n", at, end)
            at = end
            state = "values" if state == "values" else "comma"


def read_parquet(path, columns, skipped):
    """One row after the other; pages that have checksums are checked."""
    pyarrow = optional("pyarrow", f"--data={path}")
    from pyarrow.parquet import ParquetFile

    advice = "restore it"
    try:
        with ParquetFile(path, page_checksum_verification=True) as file:
            check_columns(columns, file.schema_arrow.names, path)
            for name in columns if not isinstance(columns, Conversations) else ():
                kind = file.schema_arrow.field(name).type
                check_type(pyarrow.types, kind, f"{path}: {name}")
            # Checksums do not cover how many rows a page or the file has.
            groups = range(file.metadata.num_row_groups)
            expected = sum(file.metadata.row_group(i).num_rows for i in groups)
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=list(columns)):
                for record in batch.to_pylist():
                    number += 1
                    yield from take(record, columns, f"{path}, row {number}", skipped)
            if not number == expected == file.metadata.num_rows:
                why = f"{number} rows in place of {expected}"
                raise UserError(f"--data={path} is no intact parquet file ({why}); {advice}")
    except (pyarrow.ArrowException, UnicodeDecodeError, KeyError) as e:
        why = str(e).replace("\n", " ")[:200]
        raise UserError(f"--data={path} is no intact parquet file ({why}); {advice}") from None


def check_type(types, kind, where):
    """Raise UserError unless a column of parquet holds texts, or nothing."""
    if types.is_dictionary(kind):
        kind = kind.value_type
    known = (types.is_string, types.is_large_string, types.is_null)
    known += (getattr(types, "is_string_view", types.is_null),)  # newer than some versions
    if not any(is_kind(kind) for is_kind in known):
        raise UserError(f"{where} has {kind}, not texts; give --text_column")


LINES = (".jsonl", ".ndjson", ".jsonlines")
READERS = {suffix + packed: read_jsonl for suffix in LINES for packed in ("", ".gz")}
READERS |= {".json": read_json, ".json.gz": read_json, ".parquet": read_parquet}
READERS |= {".txt": read_txt}  # in a folder
