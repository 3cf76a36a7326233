"""Atomic files and folders, and JSON from files that may not be trusted."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path

from support.errors import UserError
from support.signals import signals_wait

TMP = ".mdlm-tmp-"  # prefix of everything that is not complete yet
FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", -1), errno.EFBIG, errno.EIO)  # of a disk
MAX_JSON = 1 << 26  # bytes; a larger JSON file is refused unread


@contextlib.contextmanager
def writing(path):
    """Within, an OSError becomes a UserError that names `path`, a run's folder or in one."""
    try:
        yield
    except OSError as e:
        why = e.strerror or e
        fix = "check that path, or give another --out_dir"
        if e.errno in FULL:
            fix = "free some space, or give another --out_dir"
            if any(map(has_saved, (Path(path), Path(path).parent))):
                fix = "free some space; --resume continues from what was saved"
        raise UserError(f"{path} cannot be written ({why}); {fix}") from e


def has_saved(folder):
    """Whether a run in a folder has saved a checkpoint, and is not being overwritten."""
    with contextlib.suppress(OSError, ValueError):
        return (folder / read_small(folder / "latest").strip() / "manifest.json").exists()
    return False


@contextlib.contextmanager
def naming(path):
    """Within, an OSError names `path`: those of write() and fsync() name no file."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno, e.strerror or str(e), str(path)) from e


def temporary(parent):
    """A new name in `parent`, which clean() removes. What gets it obeys the umask, unlike what
    the module tempfile makes."""
    return Path(parent) / f"{TMP}{secrets.token_hex(8)}"


@contextlib.contextmanager
def new_folder(parent):
    """Yield a temporary folder in `parent`, to be filled and renamed; on failure it is removed."""
    tmp = temporary(parent)
    try:
        tmp.mkdir()
        yield tmp
    finally:
        with signals_wait():
            shutil.rmtree(tmp, ignore_errors=True)


def write_synced(path, content):
    """Write bytes and wait until they are on the disk."""
    with naming(path), open(path, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


def write_atomically(path, content):
    """Write bytes under a temporary name, sync, rename: `path` never holds half a file.

    A file that is replaced keeps its permissions.
    """
    tmp = temporary(path.parent)
    try:
        write_synced(tmp, content)
        with contextlib.suppress(OSError):  # there is none yet, or its file system has none
            shutil.copymode(path, tmp)
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def write_all(f, content):
    """Write bytes to a file without a buffer, which may take a part of them at a time."""
    while content:
        content = content[f.write(content) :]


def to_json(value, indent=None):
    """A JSON text, in which null stands for NaN and infinity: JSON has none."""
    value = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(value, indent=indent)


def without_waiting(path, flags):
    """An opener for open(): a pipe that no process writes is empty, and is not waited for."""
    never = getattr(os, "O_NONBLOCK", 0)  # not on Windows
    fd = os.open(path, flags | never)
    if never:
        os.set_blocking(fd, True)
    return fd


def sync(path):
    """Make a file, or the renames in a folder, durable."""
    if os.name == "posix":
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def remove(path):
    """Remove a file, link or folder. A folder is renamed first: its name never holds half of it."""
    if path.is_dir() and not path.is_symlink():
        if not path.name.startswith(TMP):
            remove(path.with_name(TMP + path.name))
            path = path.rename(path.with_name(TMP + path.name))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(folder):
    """Yield a new folder to be filled, which then replaces `folder`; on failure nothing changes."""
    with writing(folder), new_folder(folder.parent) as tmp:
        yield tmp
        remove(folder)
        os.rename(tmp, folder)


def clean(folder):
    """Remove what a killed process left incomplete."""
    for stale in Path(folder).glob(f"{TMP}*"):
        remove(stale)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def most_bytes(path):
    """The largest size of a JSON file that is read."""
    # Ours has another tokenizer.json in a string, in which a letter of 3 bytes may become 6, and a
    # quote 2. Those of large vocabularies have 36 MB.
    return MAX_JSON * (4 if Path(path).name == "tokenizer.json" else 1)


def read_small(path):
    """The text of a UTF-8 file of at most most_bytes(path); else OSError or ValueError."""
    if not Path(path).is_file():
        raise FileNotFoundError("it is missing or not a file")
    if Path(path).stat().st_size > most_bytes(path):
        raise ValueError(f"it has more than {most_bytes(path)} bytes")
    return Path(path).read_text(encoding="utf-8")


def read_json(path, what):
    """The JSON object in a file; raises UserError, which names the file, if there is none."""
    try:
        content = json.loads(read_small(path))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return content
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} is no {what} of this program: {e}") from e
