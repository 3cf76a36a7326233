"""Sources of training data: text files, tiny Shakespeare, synthetic patterns, folders of ids."""

import concurrent.futures
import contextlib
import json
import math
import mmap
import os
import re
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np

from support import files
from support.data import records
from support.data.ids import DTYPES, check_largest, doubt_width, map_ids
from support.data.records import PIECE, read_text
from support.data.tokenizer import Tokenizer, describe, tokenizer_from_json
from support.environment import optional
from support.errors import UserError
from support.files import read_json
from support.settings import Bounds, Form
from support.terminal import warn

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DOWNLOAD_LIMIT = 120  # seconds
LONGEST_PERIOD = 64  # of --data=patterns
NAMES = ("train.bin", "val.bin")
BinType = Literal["auto", "uint8", "uint16", "uint32", "int32", "int64"]
BUILT_IN = ("shakespeare", "patterns", "pydoc")  # values of --data that name no file


def is_ids(name):
    """Whether --data is a folder of ids, ours or nanoGPT's."""
    return name not in BUILT_IN and any(os.path.lexists(Path(name) / file) for file in NAMES)


def is_records(name):
    """Whether --data is a data set of documents."""
    if name in BUILT_IN or not str(name):
        return False
    is_folder = os.path.isdir(name) and not is_ids(name)
    return is_folder or records.suffix_of(name) in records.READERS.keys() - {".txt"}


def say_left_out(folder):
    """Say which texts beside train.bin and val.bin are not read."""
    names = [file.name for file in records.list_folder(folder)[0]]
    if names:
        warn(f"--data={folder}: train.bin and val.bin read; left out: {', '.join(names[:5])}")


def has_documents(config):
    """Whether the texts of --data end in [END]; for a folder of ids its tokenizer says so."""
    return bool(config.separator) or is_records(config.data)


def end_id_of(config):
    """The id that --end says for .bin files, -1 for none. (In a tokenizer.json it is a token.)"""
    if not config.end or config.tokenizer.endswith(".json"):
        return -1
    if not config.end.isdecimal():
        fix = "give the number that ends documents"
        raise UserError(f"--end={config.end} is no id of --data={config.data}; {fix}")
    return int(config.end)


def ids_have_documents(config):
    """Whether the documents of a folder of ids end in an [END]: by --end, or as prepared here."""
    path = Path(config.data) / "tokenizer.json"
    return bool(config.end) or (path.exists() and describe(path)[2] is not False)


def default_data():
    """What a run without --data learns: tiny Shakespeare, else a text that needs no network."""
    try:
        shakespeare()
        return "shakespeare"
    except OSError as e:
        name = "pydoc" if find_topics() else "patterns"
        text = dict(pydoc="pydoc, Python's reference", patterns="synthetic patterns")[name]
        warn(f"Shakespeare cannot be downloaded ({e}); training on {text}")
        return name


def find_topics():
    """The texts of Python's reference, {} where this Python lacks them."""
    try:
        from pydoc_data.topics import topics

        return topics
    except ImportError:
        return {}


def find_text(name):
    """The value of --data -> a function that streams its texts, or None for patterns.

    Raises UserError for what cannot be had: no other text takes its place.
    """
    if name == "shakespeare":
        try:
            name = shakespeare()
        except OSError as e:
            fix = "connect to a network, or give --data=FILE or --data=pydoc"
            what = f"--data=shakespeare cannot be downloaded ({e})"
            raise UserError(f"{what}; {fix}") from None
    if name == "pydoc":
        topics = find_topics()
        if not topics:
            raise UserError("--data=pydoc: this Python lacks pydoc_data; give --data=FILE")
        return lambda: ["\n\n".join(topics[key] for key in sorted(topics))]
    if name == "patterns":
        return None
    if not str(name):
        raise UserError("--data is empty; give a file or a folder, or leave it out")
    records.check_plain(name)
    return lambda: read_text(name)


def shakespeare():
    """The path of tiny Shakespeare, downloaded once, its hash checked always. Raises OSError.

    In bounded time: a name server, or a server that sends a byte now and then, can take hours.
    """
    path = concurrent.futures.Future()

    def download():
        try:
            path.set_result(download_shakespeare())
        except BaseException as e:  # raised below, by result()
            path.set_exception(e)

    threading.Thread(target=download, daemon=True).start()
    try:
        return path.result(DOWNLOAD_LIMIT)
    except concurrent.futures.TimeoutError:
        raise OSError(f"it takes more than {DOWNLOAD_LIMIT} s") from None


def download_shakespeare():
    """The path of tiny Shakespeare, downloaded if the cache has none. Raises OSError."""
    try:
        pooch = optional("pooch", "the download")
        pooch.get_logger().setLevel("WARNING")
        http = pooch.HTTPDownloader(timeout=(4, 15))  # seconds to connect (per address), to read
        name = "tinyshakespeare.txt"
        return Path(pooch.retrieve(URL, SHA256, name, pooch.os_cache("mdlm"), downloader=http))
    except (OSError, RuntimeError, ValueError) as e:  # RuntimeError: no home folder
        raise OSError(str(e) if isinstance(e, ValueError) else type(e).__name__) from None


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


def parse_periods(value):
    """--periods -> (lowest, highest), both included."""
    match = re.fullmatch(r"(\d{1,2})-(\d{1,2})", value)
    low, high = map(int, match.groups()) if match else (0, 0)
    if not 1 <= low <= high <= LONGEST_PERIOD:
        fix = f"give LOW-HIGH, such as 2-5, from 1 to {LONGEST_PERIOD}"
        raise UserError(f"--periods={value[:40]!r} is not accepted; {fix}")
    return low, high


def periods_in_form(value):
    """--periods in its usual form."""
    return "{}-{}".format(*parse_periods(value))


@dataclass
class SourceSettings:
    """Synthetic patterns (--data=patterns), .bin files, damaged records."""

    periods: Annotated[str, Form(periods_in_form)] = "2-4"  # pattern period in symbols, LOW-HIGH
    unknown: Literal["refuse", "drop"] = "refuse"  # characters that --init_from's tokenizer lacks
    bin_dtype: BinType = "auto"  # dtype of the ids (auto: uint16, or as meta.json says)
    max_bad_records: Annotated[int, Bounds(-1, 1 << 31)] = -1  # skip so many (-1: all empty ones)


def check_patterns(config):
    """Raise UserError for settings that --data=patterns does not have."""
    if config.data != "patterns":
        return
    if (config.tokenizer, config.separator) != ("char", ""):
        why = "leave --tokenizer and --separator out"
        raise UserError(f"--data=patterns has aligned sequences of characters; {why}")
    shortest = 2 * parse_periods(config.periods)[1]
    if config.block_size < shortest:
        given = f"--block_size={config.block_size} and --periods={config.periods}"
        fix = f"give a --block_size of at least {shortest}, twice the longest period"
        raise UserError(f"{given}: a pattern is not repeated; {fix}")


def make_patterns(n, seed, length=64, periods=(2, 4)):
    """(n, length) uint8: each row a random pattern of some of the 15 symbols, repeated.

    periods: of how many symbols patterns are, (lowest, highest); all are equally likely.
    """
    return np.concatenate([*stream_patterns(n, seed, length, periods)])


def stream_patterns(n, seed, length, periods, size=1000):
    """Yield the rows of make_patterns, `size` at a time."""
    rng = np.random.default_rng(seed)
    low, high = periods
    period = rng.integers(low, high + 1, n)
    symbols = rng.integers(0, 15, (n, high), dtype=np.uint8)
    for first in range(0, n, size):
        rows = slice(first, first + size)
        at = np.arange(length) % period[rows, None]
        yield np.take_along_axis(symbols[rows], at, 1)


def patterns_entropy(length=64, periods=(2, 4)):
    """Exact entropy of make_patterns in nats per token, for a length of at least twice a period.

    Then a text with two periods also has their greatest common divisor as a period (Fine and
    Wilf). So each text repeats a word that is no repetition itself, and its periods are the
    multiples of that word's length d.
    """
    low, high = periods
    words = {}  # d -> how many words of d symbols are no repetition of a shorter one
    total = 0.0
    for d in range(1, high + 1):
        words[d] = 15**d - sum(words[part] for part in range(1, d) if d % part == 0)
        p = 0.0  # the probability of each text that repeats such a word
        for period in range(low, high + 1):
            if period % d == 0:
                p += 1 / (high - low + 1) / 15**period
        if p:
            total += words[d] * p * math.log(p)
    return -total / length


# What --data=patterns implies. Most of its entropy is in the symbols that are written first, at
# high mask rates: cosine draws more of those.
PATTERNS = dict(block_size=64, rates="cosine", eval_windows=1000, tokenizer="char", vocab_size=0)
PATTERNS |= dict(lr_schedule="cosine", learning_rate=0.03, batch_size=32, attention_every=1)


def implied(given):
    """The settings that the --data of a new run implies."""
    return PATTERNS if given.get("data") == "patterns" else {}


def write_patterns(folder, config):
    """Write a folder of ids with 100,000 patterns of config.block_size; nine tenths train."""
    length, _ = kind = (config.block_size, parse_periods(config.periods))
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for i, rows in enumerate(stream_patterns(100_000, 0, *kind, size=1000)):
            (train if i < 90 else val).write(rows)
    meta = dict(source="patterns", dtype="uint8", characters=[90_000 * length, 10_000 * length])
    meta |= dict(entropy=patterns_entropy(*kind), aligned=length)
    write_meta(folder, Tokenizer("char", list("abcdefghijklmno")), meta)


def write_meta(folder, tokenizer, meta):
    """Write what open_ids must know about the ids in a folder: tokenizer.json and meta.json."""
    (folder / "tokenizer.json").write_bytes(tokenizer.to_file().encode())
    if Path(meta["source"]).is_file():
        meta = meta | dict(sha256=files.sha256_of(meta["source"]))
    elif Path(meta["source"]).is_dir():
        meta = meta | dict(listing=listing_of(meta["source"]))
    arrays = [map_ids(folder / name, meta["dtype"]) for name in NAMES]
    meta["checksum"] = checksum_with(meta, checksum_of(tokenizer.to_json(), arrays))
    (folder / "meta.json").write_text(json.dumps(meta))


def checksum_with(meta, checksum):
    """CRC-32 that covers meta.json too, but for the checksum in it."""
    rest = {name: value for name, value in meta.items() if name not in ("checksum", "listing")}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode(), checksum)


def has_changed(source, folder):
    """Whether a source is not any more what write_meta saw when `folder` was made from it: a text
    by its content, a folder by the names and sizes of its files."""
    meta = read_meta(folder / "meta.json")
    known = meta.get("sha256")
    if known and Path(source).is_file():
        return files.sha256_of(source) != known
    known = meta.get("listing")
    return bool(known) and Path(source).is_dir() and listing_of(source) != known


def files_of(name):
    """The files that --data names: itself, or those in its folder; none of a built-in text."""
    if name in BUILT_IN:
        return []
    path = Path(name)
    return records.list_folder(path)[0] if path.is_dir() else [path]


def listing_of(folder):
    """CRC-32 of the names and sizes of the files of a data set in a folder."""
    rows = [(path.name, path.stat().st_size) for path in files_of(folder)]
    return zlib.crc32(repr(sorted(rows)).encode())


class Ids(NamedTuple):
    """The tokens of a folder of ids."""

    meta: dict  # of meta.json
    arrays: list  # [train, val], memory-mapped
    tokenizer: Tokenizer
    identity: dict  # what --resume compares


def of_config(folder, config):
    """The Ids in a folder, as the settings of a run say; see open_ids."""
    stated = (end_id_of(config), config.bin_dtype)
    return open_ids(folder, config.block_size, config.vocab_size, *stated)


def open_ids(folder, T, V, end_id=-1, bin_dtype="auto"):
    """The Ids in a folder, ours or one in nanoGPT's format.

    nanoGPT's have no JSON files: ids are shown as numbers; V = 0: up to the largest; a document
    ends with end_id (-1: there are none). A tokenizer.json of the tokenizers library shows text.
    bin_dtype: the width that a user states. Raises UserError for
    ids out of range, and files that are missing, damaged, of another width, or shorter than T.
    """
    folder = Path(folder)
    meta = read_meta(folder / "meta.json")
    is_ours = "source" in meta
    dtype = np.dtype(dtype_of(meta, bin_dtype))
    stated = is_ours or bin_dtype != "auto"
    arrays = [map_ids(folder / name, dtype, stated) for name in NAMES]
    if not is_ours and dtype != np.uint16:
        for name, ids in zip(NAMES, arrays):
            doubt_width(folder / name, ids)
    ranges = [(int(piece.min()), int(piece.max())) for piece in slices_of(arrays)]
    smallest = min(low for low, _ in ranges)
    highs = [high for _, high in ranges]
    if not (V or (folder / "tokenizer.json").exists()):
        check_largest(folder, slices_of(arrays), highs, end_id)
    path = folder / "tokenizer.json"
    tokenizer = tokenizer_of_ids(path, V or max(highs) + 1, end_id, is_ours)
    V = tokenizer.vocab_size
    n, name = min(zip(map(len, arrays), NAMES))
    if tokenizer.end_id is None and n < T:
        what = f"{name} has {n} tokens, fewer than --block_size={T}"
        raise UserError(f"{what}; give more text or a smaller block")
    length = meta.get("aligned", T)  # of a pattern; True: of 64, if that is the entropy
    if length is True:
        length = 64 if meta.get("entropy") == patterns_entropy() else T
    if length != T:
        what = f"{folder} has patterns of {length} tokens, which windows of {T} would cut"
        raise UserError(f"{what}; give other data, or train with --block_size={length}")
    if smallest < 0 or max(highs) >= V:
        advice = "check tokenizer.json, --vocab_size or --bin_dtype"
        raise UserError(f"{folder} has ids {smallest} to {max(highs)}, but V is {V}; {advice}")
    if not is_ours and tokenizer.end_id is not None:
        check_end(folder / NAMES[0], arrays[0], tokenizer.end_id)
    checksum = checksum_of(tokenizer.to_json(), arrays)
    if meta.get("checksum", 0) != checksum_with(meta, checksum) and "checksum" in meta:
        fix = "restore it, or prepare the data again"
        raise UserError(f"{folder} is damaged: its data do not have the checksum noted; {fix}")
    # PyTorch indexes few kinds of unsigned numbers; below V all of them are positive.
    arrays = [ids.view(np.int32) if ids.dtype == np.uint32 else ids for ids in arrays]
    return Ids(meta, arrays, tokenizer, dict(data=checksum, dtype=dtype.name))


def dtype_of(meta, bin_dtype):
    """The name of the width of the ids in a folder: as noted in ours, as stated, as noted."""
    if "source" in meta or bin_dtype == "auto":
        return meta.get("dtype", "uint16")
    return bin_dtype


def check_end(path, ids, end_id):
    """Raise UserError if no document ends in a file, as its [END] never occurs."""
    if not any((piece == end_id).any() for piece in slices_of([ids])):
        fix = "give the id that ends documents, or leave --end out"
        raise UserError(f"{path} has no id {end_id}, which ends a document; {fix}")


def tokenizer_of_ids(path, V, end_id, is_ours):
    """The one in a tokenizer.json, or one that shows V numbers.

    end_id: what --end says, -1 for nothing; a file made elsewhere does not know it (is_ours: the
    folder was prepared here).
    """
    end = False if end_id < 0 else end_id
    tokenizer = tokenizer_from_json(path) if path.exists() else Tokenizer("id", V, end)
    if tokenizer.kind == "file" and tokenizer.end is False and end_id >= 0 and not is_ours:
        tokenizer = Tokenizer("file", tokenizer.vocab, end)
    if end_id >= tokenizer.vocab_size:
        raise UserError(f"--end={end_id} must be below V = {tokenizer.vocab_size}")
    if end_id not in (-1, tokenizer.end_id):
        fix = "leave it out"
        raise UserError(f"--end={end_id}, but {path} has {tokenizer.end_id}; {fix}")
    return tokenizer


def read_meta(path):
    """The meta.json of a folder of ids, {} where there is none; raises UserError if unusable."""
    meta = read_json(path, "data") if path.exists() else {}
    dtype = meta.get("dtype", "uint16")
    entropy = meta.get("entropy") or 0.0
    characters = meta.get("characters") or [0, 0]  # of the text of train.bin and val.bin
    counts = isinstance(characters, list) and [type(n) for n in characters] == [int, int]
    counts = counts and all(0 <= n < 1 << 60 for n in characters)
    known = dtype in DTYPES
    length = meta.get("aligned", True)
    lengths = length is True or (type(length) is int and length > 0)
    valid = type(entropy) is float and math.isfinite(entropy)
    if not (counts and known and lengths and valid):
        accepted = f"dtype is one of {', '.join(DTYPES)}"
        raise UserError(
            f"{path} has an unusable dtype, characters, aligned or entropy ({accepted}); remove it"
        )
    return meta


def checksum_of(tokenizer, arrays):
    """CRC-32 of a tokenizer's JSON and all ids: a run resumes on exactly its data."""
    checksum = zlib.crc32(tokenizer.encode())
    for piece in slices_of(arrays):
        checksum = zlib.crc32(piece, checksum)
    return checksum


def slices_of(arrays):
    """Slices of memory-mapped arrays; one that was read leaves the process's memory again."""
    for array in arrays:
        for i in range(0, len(array), PIECE):
            yield array[i : i + PIECE]
            with contextlib.suppress(AttributeError):  # no memory map, or not on Linux
                array._mmap.madvise(mmap.MADV_DONTNEED)
