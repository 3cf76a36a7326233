"""What --data names: a text, tiny Shakespeare, patterns, records, or a folder of ids."""

import contextlib
import importlib.util
import json
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np

from nanomdlm.support.cli import files
from nanomdlm.support.cli.environment import optional
from nanomdlm.support.cli.files import read_json
from nanomdlm.support.cli.settings import Bounds, Form, UpToHalf
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.data import patterns, records
from nanomdlm.support.data.records import PIECE, read_text
from nanomdlm.support.data.tokenizer import Tokenizer, tokenizer_from_json
from nanomdlm.support.errors import UserError

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NAMES = ("train.bin", "val.bin")
MOST = 1 << 20  # ids of a vocabulary, if nothing states its size
BUILT_IN = ("shakespeare", "patterns", "pydoc")  # values of --data that name no file
BinType = Literal["auto", "uint8", "uint16", "uint32", "int32", "int64"]


@dataclass
class SourceSettings:
    """Synthetic patterns (--data=patterns), .bin files, damaged records."""

    periods: Annotated[str, Form(patterns.periods_in_form)] = "2-4"  # pattern period, LOW-HIGH
    calibration_share: UpToHalf = 0.0  # share of the training text held out to fit the temperature
    unknown: Literal["refuse", "drop"] = "refuse"  # characters unknown to --init_from
    bin_dtype: BinType = "auto"  # dtype of the ids (auto: uint16, or as meta.json says)
    max_bad_records: Annotated[int, Bounds(-1, 1 << 31)] = -1  # skip up to N (-1: all empty ones)


# ---- Texts
def is_ids(name):
    """Whether --data is a folder of ids, ours or nanoGPT's."""
    return name not in BUILT_IN and any(os.path.lexists(Path(name) / file) for file in NAMES)


def is_records(name):
    """Whether --data is a data set of documents."""
    if name in BUILT_IN or is_ids(name):
        return False
    return os.path.isdir(name) or records.suffix_of(name) in records.READERS.keys() - {".txt"}


def has_documents(config):
    """Whether the texts of --data end in [END]; for a folder of ids its tokenizer says so."""
    return bool(config.separator) or is_records(config.data)


def default_data():
    """The default data set: tiny Shakespeare, or without a network a text that needs none."""
    try:
        shakespeare()
        return "shakespeare"
    except OSError as e:
        name = "pydoc" if importlib.util.find_spec("pydoc_data") else "patterns"
        warn(f"Shakespeare cannot be downloaded ({e}); training on --data={name}")
        return name


def find_text(name):
    """The value of --data -> a function that streams its texts, or None for patterns.

    Raises UserError if it is not available: no other text replaces it.
    """
    if name == "patterns":
        return None
    if name == "pydoc":
        from pydoc_data.topics import topics

        return lambda: ["\n\n".join(topics[key] for key in sorted(topics))]
    if name == "shakespeare":
        name = require_shakespeare()
    records.check_plain(name)
    return lambda: read_text(name)


def shakespeare():
    """The path of tiny Shakespeare, downloaded once, its hash checked always. Raises OSError."""
    try:
        pooch = optional("pooch", "the download")
        pooch.get_logger().setLevel("WARNING")
        http = pooch.HTTPDownloader(timeout=(4, 15))  # seconds to connect (per address), to read
        name = "tinyshakespeare.txt"
        return Path(pooch.retrieve(URL, SHA256, name, pooch.os_cache("mdlm"), downloader=http))
    except (OSError, RuntimeError, ValueError) as e:  # RuntimeError: no home folder
        raise OSError(str(e) if isinstance(e, ValueError) else type(e).__name__) from None


def require_shakespeare():
    """`shakespeare`; UserError if it is not here, and cannot be downloaded."""
    try:
        return shakespeare()
    except OSError as e:
        fix = "connect to a network, or give --data=FILE or --data=pydoc"
        raise UserError(f"--data=shakespeare cannot be downloaded ({e}); {fix}") from None


def split_documents(texts, separator, size=PIECE):
    """Stream (piece of at most about `size` characters, whether it ends a document) of texts."""
    if not separator:
        yield from ((text, False) for text in texts)
        return
    rest = ""
    for text in texts:
        *documents, rest = (rest + text).split(separator)
        yield from ((document, True) for document in documents if document)
        if len(rest) > size + len(separator):
            yield rest[: -len(separator)], False
            rest = rest[-len(separator) :]  # it may begin a separator
    if rest:
        yield rest, True


# ---- Folders of ids
def write_meta(folder, tokenizer, meta):
    """Write what open_ids must know about the ids in a folder: tokenizer.json and meta.json."""
    (folder / "tokenizer.json").write_bytes(tokenizer.to_file().encode())
    meta = meta | dict(state=state_of(meta["source"]))
    arrays = [map_ids(folder / name, meta["dtype"]) for name in NAMES]
    meta["checksum"] = cover(meta, checksum_of(tokenizer, arrays))
    (folder / "meta.json").write_text(json.dumps(meta))


def state_of(source):
    """A fingerprint that shows changes: of a file's content, or of a folder's names and sizes."""
    path = Path(source)
    if path.is_file():
        return files.sha256_of(path)
    found = records.find_files(path)[0] if path.is_dir() else []
    return repr([(file.name, file.stat().st_size) for file in found])


def has_changed(source, folder):
    """Whether a source is not what write_meta saw when `folder` was made; False if it is gone."""
    state = read_meta(folder / "meta.json").get("state")
    return state is not None and os.path.exists(source) and state != state_of(source)


# ---- Files of ids (.bin): little-endian numbers of one width, as nanoGPT or llm.c has them
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
HEADER = 1024  # bytes
MAGIC = {20240520: "uint16", 20240801: "uint32"}  # of headers of llm.c: the width of the ids


def map_ids(path, dtype):
    """The ids in a file, (n,), memory-mapped; a header of llm.c says their width, else `dtype`.

    Raises OSError or ValueError for a file that is missing, empty or cut off.
    """
    size = path.stat().st_size
    start = 0
    if size >= HEADER and path.is_file():
        magic, _, n = np.fromfile(path, np.int32, 3)
        if magic in MAGIC:
            dtype = MAGIC[magic]
            start = HEADER
            size = size if n * np.dtype(dtype).itemsize == size - HEADER else 0
    if size % np.dtype(dtype).itemsize or not size or not path.is_file():
        raise UserError(f"{path} is not a whole number of {dtype} ids; see --bin_dtype")
    return np.memmap(path, dtype, mode="r", offset=start)


def slices_of(arrays):
    """Slices of memory-mapped arrays; one that was read leaves the process's memory again."""
    for array in arrays:
        for i in range(0, len(array), PIECE):
            yield array[i : i + PIECE]
            with contextlib.suppress(AttributeError):  # no memory map, or not on Linux
                array._mmap.madvise(mmap.MADV_DONTNEED)


class Ids(NamedTuple):
    """The tokens of a folder of ids."""

    meta: dict  # of meta.json
    arrays: list  # [train, val], memory-mapped
    tokenizer: Tokenizer
    identity: dict  # what --resume compares


def of_config(folder, config):
    """The Ids in a folder, as the settings of a run say; see open_ids."""
    is_token = config.tokenizer.endswith(".json")  # a name; else the number that ends documents
    if config.end and not (is_token or config.end.isdecimal()):
        raise UserError(f"--end={config.end} must be a number, the id that ends documents")
    end_id = int(config.end) if config.end and not is_token else -1
    return open_ids(folder, config.block_size, config.vocab_size, end_id, config.bin_dtype)


def hold_back(ids, share, T, has_prompts=False):
    """(the Ids without the last part of the training text, the Ids with it for validation).

    has_prompts: documents are prompts and answers in turns; a pair is never separated
    """
    train, val = ids.arrays
    n = int(len(train) * (1 - share))
    end_id = ids.tokenizer.end_id
    if end_id is not None:  # whole documents
        ends = 1 + np.flatnonzero(train == end_id)[has_prompts :: 1 + has_prompts]
        n = int(ends[ends <= n].max(initial=0))
    elif ids.meta.get("aligned"):
        n -= n % T
    if min(n, len(train) - n) < T:
        what = f"--calibration_share={share} of {len(train)} tokens leaves {len(train) - n} and {n}"
        raise UserError(f"{what}, but a window needs {T}; give another share, or more text")
    held = ids._replace(arrays=[train[:n], train[n:]])
    return ids._replace(arrays=[train[:n], val]), held


def open_ids(folder, T, V, end_id=-1, bin_dtype="auto"):
    """The Ids in a folder, ours or one in nanoGPT's format.

    V = 0: ids up to the largest; end_id ends a document (-1: there are none). Without a
    tokenizer.json ids are shown as numbers. Raises UserError for ids beyond the vocabulary, and
    for files that are damaged or shorter than T.
    """
    folder = Path(folder)
    meta = read_meta(folder / "meta.json")
    is_ours = "source" in meta  # then meta.json knows the width
    dtype = meta["dtype"] if is_ours or bin_dtype == "auto" else bin_dtype
    arrays = [map_ids(folder / name, dtype) for name in NAMES]
    if is_ours:
        tokenizer = tokenizer_from_json(folder / "tokenizer.json")
    else:
        tokenizer = tokenizer_of_ids(folder, arrays, V, end_id, bin_dtype == "auto")
    if end_id not in (-1, tokenizer.end_id):
        raise UserError(f"--end={end_id}, but {folder} has {tokenizer.end_id}; leave it out")
    checksum = checksum_of(tokenizer, arrays)
    if is_ours and meta["checksum"] != cover(meta, checksum):
        raise UserError(f"{folder} is damaged: its data do not match their checksum")
    n = min(map(len, arrays))
    if tokenizer.end_id is None and n < T:
        what = f"a part of the data has {n} tokens, fewer than --block_size={T}"
        raise UserError(f"{what}; give more text or a smaller block")
    if meta.get("aligned", T) != T:
        raise UserError(f"{folder} has patterns that need --block_size={meta['aligned']}")
    # PyTorch indexes few kinds of unsigned numbers; below V all of them are positive.
    arrays = [ids.view(np.int32) if ids.dtype == np.uint32 else ids for ids in arrays]
    return Ids(meta, arrays, tokenizer, dict(data=checksum, dtype=np.dtype(dtype).name))


def tokenizer_of_ids(folder, arrays, V, end_id, may_be_wider):
    """The tokenizer of a folder that was made elsewhere: of its tokenizer.json, or of V numbers.

    may_be_wider: nothing says that the ids are of 16 bits
    """
    for ids in arrays if may_be_wider else ():
        some = ids[: 1 << 20]
        if ids.dtype == np.uint16 and some[::2].any() and not some[1::2].any():
            raise UserError(f"{folder}: every second id is 0, as with 32-bit ids; give --bin_dtype")
    edges = [int(edge) for piece in slices_of(arrays) for edge in (piece.min(), piece.max())]
    smallest, largest = min(edges), max(edges)
    path = folder / "tokenizer.json"
    end = False if end_id < 0 else end_id
    if path.exists():
        tokenizer = tokenizer_from_json(path)
        if tokenizer.kind == "file" and tokenizer.end is False:  # it does not know what --end says
            tokenizer = Tokenizer("file", tokenizer.vocab, end)
    else:
        tokenizer = Tokenizer("id", V or min(largest, MOST) + 1, end)
    if smallest < 0 or largest >= tokenizer.vocab_size:
        what = f"{folder} has ids {smallest} to {largest}, but V is {tokenizer.vocab_size}"
        raise UserError(f"{what}; check tokenizer.json, --vocab_size or --bin_dtype")
    if end_id >= 0 and not any((piece == end_id).any() for piece in slices_of(arrays[:1])):
        raise UserError(f"--end={end_id}, but {folder}/{NAMES[0]} has no such id")
    return tokenizer


def read_meta(path):
    """The meta.json of a folder of ids, of one made elsewhere the dtype alone (default uint16)."""
    meta = read_json(path, "data") if path.exists() else {}
    if meta.get("dtype", "uint16") not in DTYPES:
        raise UserError(f"{path} has an unknown dtype; give one of {', '.join(DTYPES)}")
    if {"source", "checksum", "dtype"} <= meta.keys():
        return meta
    return dict(dtype=meta.get("dtype", "uint16"))


def checksum_of(tokenizer, arrays):
    """CRC-32 of a tokenizer's JSON and all ids: a run resumes on exactly its data."""
    checksum = zlib.crc32(tokenizer.to_json().encode())
    for piece in slices_of(arrays):
        checksum = zlib.crc32(piece, checksum)
    return checksum


def cover(meta, checksum):
    """A checksum that covers the content of meta.json too, except for the checksum in it."""
    rest = {name: meta[name] for name in meta if name not in ("checksum", "listing")}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode(), checksum)
