"""Files of ids (.bin): little-endian numbers of one width, as nanoGPT or llm.c has them."""

import contextlib
import mmap

import numpy as np

from support.data.records import PIECE
from support.errors import UserError

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
HEADER = 1024  # bytes
MAGIC = {20240520: "uint16", 20240801: "uint32"}  # of headers of llm.c: the width of the ids


def map_ids(path, dtype):
    """The ids in a file, (n,), memory-mapped; a header of llm.c says their width, else `dtype`.

    Raises UserError for a file that is missing, empty or cut off.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing or no regular file; restore it")
    size = path.stat().st_size
    dtype = np.dtype(dtype)
    header = np.fromfile(path, np.int32, 3)  # magic number, version, number of tokens
    offset = 0
    if size >= HEADER and header[0] in MAGIC:
        dtype = np.dtype(MAGIC[header[0]])
        offset = HEADER
        if int(header[2]) * dtype.itemsize != size - offset:
            what = f"{path} has a header of llm.c for {header[2]} tokens, and {size} bytes"
            raise UserError(f"{what}: it is cut off; restore it")
    if size % dtype.itemsize:
        fix = "restore it, or state the width with --bin_dtype"
        raise UserError(f"{path} has {size} bytes, no whole number of {dtype} ids; {fix}")
    if size == offset:
        raise UserError(f"{path.name} has no tokens; give more text")
    return np.memmap(path, dtype, mode="r", offset=offset)


def refuse_wide(path, ids):
    """Raise UserError for ids of 4 or 8 bytes that are read as uint16: every second one is then
    tiny, and the vocabulary has all of them."""
    some = ids[: PIECE // 2 * 2]
    if ids.dtype == np.uint16 and len(some) > 1 and some[1::2].max() < 16 and some[::2].max() > 255:
        fix = "give --bin_dtype=uint32 or int64, or --bin_dtype=uint16 if that is how they are"
        raise UserError(f"{path}: every second id is below 16, so they seem wider; {fix}")


def slices_of(arrays):
    """Slices of memory-mapped arrays; one that was read leaves the process's memory again."""
    for array in arrays:
        for i in range(0, len(array), PIECE):
            yield array[i : i + PIECE]
            with contextlib.suppress(AttributeError):  # no memory map, or not on Linux
                array._mmap.madvise(mmap.MADV_DONTNEED)
