"""Files of ids (.bin): their header, the width of an id, and whether a width is plausible."""

import codecs
import contextlib

import numpy as np

from support.data.records import SIGNS
from support.errors import UserError
from support.terminal import warn

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
HEADER = 1024  # bytes
MAGIC = {20240520: "uint16", 20240801: "uint32"}  # of headers: the width of the ids
MOST = 1 << 24  # ids of a vocabulary, as --vocab_size accepts them
FEW = 8  # pairs of ids; fewer may be small by chance
SAMPLED = 1 << 18  # ids that are looked at, at the begin, in the middle, at the end


def map_ids(path, dtype, stated=True):
    """The ids in a file, (n,), memory-mapped.

    A header of llm.c says the width, else it is `dtype`. Unless that is stated by a user, bytes
    that look like another width are refused. Raises UserError for what is no file of ids.
    """
    size = path.stat().st_size if path.is_file() else -1
    dtype = np.dtype(dtype)
    refuse_formats(path, size)
    header = np.fromfile(path, np.int32, 256) if size >= HEADER else [0, 0, 0]
    offset = 0
    if header[0] in MAGIC:  # of llm.c and modded-nanogpt: magic number, version, number of tokens
        dtype = np.dtype(MAGIC[header[0]])
        offset = HEADER
        if int(header[2]) * dtype.itemsize != size - offset:
            what = f"{path} has a header of llm.c for {header[2]} tokens, and {size} bytes"
            raise UserError(f"{what}: it is cut off; restore it")
    elif is_new_header(header, size):
        known = " and ".join(map(str, MAGIC))
        what = f"{path} has a header with the magic number {header[0]}"
        raise UserError(f"{what}, and {known} are known; remove its {HEADER} bytes")
    if size < 0:
        raise UserError(f"{path} is missing or no regular file; restore it")
    if size % dtype.itemsize:
        fix = "restore it, or state the width with --bin_dtype"
        raise UserError(f"{path} has {size} bytes, no whole number of {dtype} ids; {fix}")
    if size == offset:
        raise UserError(f"{path.name} has no tokens; give more text")
    ids = np.memmap(path, dtype, mode="r", offset=offset)
    if not stated and not offset:
        check_width(path, ids)
    return ids


def has_header(path):
    """Whether a file has a header of llm.c, which says the width of its ids."""
    size = path.stat().st_size if path.is_file() else 0
    return size >= HEADER and int(np.fromfile(path, np.int32, 1)[0]) in MAGIC


def is_new_header(header, size):
    """Whether a file seems to begin with a header as llm.c's, whose magic number is a date."""
    sizes = [int(header[2]) * width for width in (1, 2, 4, 8)]
    return 20200101 <= header[0] <= 20991231 and size - HEADER in sizes


def refuse_formats(path, size):
    """Raise UserError for a file that begins as another format does."""
    if size < 2:
        return
    with open(path, "rb") as f:
        head = f.read(16)
    advice = "write the ids alone, with numpy's ids.tofile"
    for sign, kind, _ in SIGNS:
        if head.startswith(sign):
            raise UserError(f"{path} is {kind}, not ids; {advice}")
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < size:
        raise UserError(f"{path} is a safetensors file, not ids; {advice}")


def sample_of(ids):
    """(n,) at most 3 SAMPLED ids of an array, in runs that begin at a multiple of four."""
    starts = {0, len(ids) // 2 // 4 * 4, max(0, (len(ids) - SAMPLED) // 4 * 4)}
    runs = [np.asarray(ids[i : i + SAMPLED]) for i in sorted(starts)]
    return np.concatenate([run[: len(run) // 4 * 4] for run in runs])


def check_width(path, ids):
    """Raise UserError for ids of 16 bits that look like numbers of another width.

    A user who knows better says so: --bin_dtype ends the doubt.
    """
    sample = sample_of(ids)
    if ids.dtype != np.uint16 or not sample.any():
        return
    why, as_dtype = guess_width(sample)
    if not why:
        return
    right = f"--bin_dtype={as_dtype}" if as_dtype else "write ids there, in little-endian order"
    fix = f"give {right}" if as_dtype else right
    what = f"{path} is read as uint16, but {why}"
    raise UserError(f"{what}; {fix} (or --bin_dtype=uint16 if it is right)")


def doubt_width(path, ids):
    """Warn of ids of a stated width of which every second one is 0: that is half a number."""
    sample = sample_of(ids)
    wider = {1: "uint16", 2: "uint32", 4: "int64"}.get(ids.dtype.itemsize)
    if wider and len(sample) >= 8 and sample.any() and not sample[1::2].any():
        warn(f"{path}: every second id is 0; if that is wrong, give --bin_dtype={wider}")


def guess_width(x):
    """(why uint16 numbers x (n,) seem to be something else, or ""; that dtype or None)."""
    pairs = x.reshape(-1, 2)
    low, high = pairs[:, 0], pairs[:, 1]  # of numbers of 32 bits
    small = (high < 16) | (high == 0xFFFF)  # also of negative numbers
    lower = pairs[::2]  # of numbers of 64 bits
    upper = pairs[1::2]
    signs = np.where(lower[:, 1] == 0xFFFF, 0xFFFF, 0)[:, None]
    if (upper == signs).all() and small[::2].all() and lower[:, 0].any() and len(pairs) >= FEW:
        return "half of every four numbers is 0, as in int64", "int64"
    signed = "int32" if (high == 0xFFFF).any() else "uint32"
    if small.all() and (not high.any() or low.max() >= 4096) and len(pairs) >= FEW:
        return f"every second number is 0 or small, as in {signed}", signed
    if not low.any() and len(pairs) >= FEW:
        return "every second number is 0, as in floats or big-endian numbers", None
    if seem_floats(x):
        return "its bytes are those of floats", None
    return guess_bytes(x)


def seem_floats(x):
    """Whether nearly all bits are those of floats of common sizes."""
    for dtype in (np.float32, np.float64, np.float16):
        with np.errstate(all="ignore"):
            values = np.abs(x.view(dtype).astype(np.float64))
            least, most = (1e-3, 1e3) if dtype == np.float16 else (1e-6, 1e6)
            common = (values == 0) | ((values > least) & (values < most))
        if len(values) >= 256 and common.mean() > 0.99 and values.any():
            return True
    return False


def is_text(content):
    """Whether bytes, of which a character may be cut off at the end, are UTF-8 that can be read."""
    with contextlib.suppress(UnicodeDecodeError):
        text = codecs.getincrementaldecoder("utf-8")().decode(content)
        return all(c.isprintable() or c in "\t\n\f\r" for c in text)
    return False


def guess_bytes(x):
    """`guess_width` by the two bytes of each number: of text they are alike, of ids they differ."""
    low = np.bincount(x & 255, minlength=256) / len(x)
    high = np.bincount(x >> 8, minlength=256) / len(x)
    if not low[1:].any() and (high > 0).sum() > 2:
        return "all are multiples of 256, as big-endian ids are", None
    if len(x) >= 64 and is_text(x[:4096].tobytes()):
        return "its bytes are those of a text", None
    if len(x) < 2048:
        return "", None
    alike = np.abs(low - high).sum() / 2 < 0.1
    few = not low[250:].any() and not high[250:].any()
    if alike and (few or entropy(low) < 7) and (high > 0).sum() > 2:
        return "both bytes of its numbers are alike, as in uint8", "uint8"
    # The low bytes of ids take all values, the high ones only those below V / 256.
    many = (high > 0).sum() > 240 and not low[high.nonzero()[0].max() - 2 :].any()
    if many or entropy(high) > entropy(low) + 0.5:
        return "the high byte of its numbers says more than the low one, as big-endian", None
    return "", None


def entropy(p):
    return -(p[p > 0] * np.log2(p[p > 0])).sum()


def check_largest(folder, pieces, largest, end_id):
    """Raise UserError for a largest id that makes an implausible vocabulary.

    pieces: slices of all ids; largest: the largest id in each of them. V is the largest id + 1: a
    single damaged id would take all memory, or add many tokens that never occur.
    """
    top = max(largest)
    fix = "restore the file, or give --vocab_size if it is right"
    if top >= MOST:
        fix = "restore the file, or give another --bin_dtype"
    if top >= 1 << 20:
        raise UserError(f"{folder} has the id {top}: that is no usual vocabulary; {fix}")
    others = [each for each in largest if each < top]
    if top < 256 or top == end_id or max(others, default=0) * 4 + 256 >= top:
        return
    second = max(others, default=0)
    count = 0
    for piece, most in zip(pieces, largest):
        if most == top:
            lower = piece[piece < top]
            second = max(second, int(lower.max()) if len(lower) else 0)
            count += len(piece) - len(lower)
    if second * 4 + 256 < top and count <= 3:
        what = f"{folder} has the id {top} {count} time(s), and no other one above {second}"
        fix += f", or --end={top} if it ends documents" * (end_id < 0)
        raise UserError(f"{what}: it may be damaged; {fix}")
