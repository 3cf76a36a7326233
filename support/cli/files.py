"""Files: atomic writes, reading damaged or hostile files, and the names in a run's folder.

A run marks its folder with a file, MARKER. In a marked folder, the names of PART belong to the run,
which may replace them; in any other folder they belong to the user.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
from pathlib import Path

from nanomdlm.support.cli.signals import signals_wait
from nanomdlm.support.errors import UserError

TMP = ".mdlm-tmp-"  # prefix of the names of incomplete files and folders
MARKER = ".mdlm-run"  # an empty file in the folder of a run
LOCK = ".mdlm-lock"  # an empty file, locked while a run trains in the folder
# The folder of a checkpoint. .old: it was being replaced when its run was killed.
STEP = re.compile(r"step-\d{1,12}(\.old)?")
PART = re.compile(rf"latest|log\.jsonl|data|{STEP.pattern}|\.mdlm-(run|lock)", re.IGNORECASE)
# Errors of a disk that is full or fails. Windows has no EDQUOT (quota exceeded).
FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", -1), errno.EFBIG, errno.EIO)
MAX_JSON = 1 << 26  # bytes; larger JSON files are not read


# ---- The folder of a run
def read_latest(folder):
    """Return the name of a run's newest checkpoint, as the file `latest` says it, or ""."""
    with contextlib.suppress(OSError, ValueError):
        return read_small(Path(folder) / "latest").strip()
    return ""


def has_saved(folder):
    """Whether a run in a folder has a checkpoint to resume, and is not being overwritten."""
    latest = read_latest(folder)
    return bool(STEP.fullmatch(latest)) and (Path(folder) / latest / "manifest.json").exists()


def is_run(folder):
    """Whether a folder is that of a run. Older runs, which have no marker, have saved something."""
    return (Path(folder) / MARKER).is_file() or has_saved(folder)


# ---- Errors of writing
@contextlib.contextmanager
def writing(path):
    """Context manager: turn an OSError into a UserError that names the path.

    path: a run's folder, or a file or folder in it
    """
    try:
        yield
    except OSError as e:
        why = e.strerror or e
        fix = "check that path, or give another --out_dir"
        if e.errno in FULL:
            fix = "free some space, or give another --out_dir"
            if has_saved(path) or has_saved(Path(path).parent):
                fix = "free some space; --resume continues from what was saved"
        raise UserError(f"{path} cannot be written ({why}); {fix}") from e


@contextlib.contextmanager
def naming(path):
    """Context manager: add the path to an OSError. Those of write() and fsync() name no file."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno, e.strerror or str(e), str(path)) from e


# ---- Atomic writing
def temporary(parent):
    """Return a new name in `parent` for an incomplete file or folder, which clean() removes.

    The module tempfile is not used because its files ignore the umask.
    """
    return Path(parent) / f"{TMP}{secrets.token_hex(8)}"


@contextlib.contextmanager
def new_folder(parent):
    """Context manager: yield a temporary folder in `parent`, for the caller to fill and rename.

    If it has not been renamed at the end, it is removed.
    """
    tmp = temporary(parent)
    try:
        tmp.mkdir()
        yield tmp
    finally:
        with signals_wait():
            shutil.rmtree(tmp, ignore_errors=True)


def write_synced(path, content):
    """Write bytes to a file and wait until they are on the disk."""
    with naming(path), open(path, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


def write_atomically(path, content):
    """Write bytes to a temporary file, sync it, and rename it to `path`.

    So `path` never holds half a file, even after a crash. A file that is replaced keeps its
    permissions.
    """
    tmp = temporary(path.parent)
    try:
        write_synced(tmp, content)
        rename_over(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def rename_over(tmp, path):
    """Rename a file that is on the disk to `path`; one that it replaces keeps its permissions."""
    with contextlib.suppress(OSError):  # there is no old file, or no permissions
        shutil.copymode(path, tmp)
    os.replace(tmp, path)


def to_json(value, indent=None):
    """Convert a value to JSON text, with null for NaN and infinity, which JSON does not have."""
    value = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(value, indent=indent)


def sync(path):
    """Wait until a file, or the renames in a folder, are on the disk (nothing on Windows)."""
    if os.name == "posix":
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def remove(path):
    """Remove a file, link or folder.

    A folder is renamed first, so that its name never refers to a folder that is half removed.
    """
    if path.is_dir() and not path.is_symlink():
        if not path.name.startswith(TMP):
            # A killed process may have left a folder with the temporary name.
            remove(path.with_name(TMP + path.name))
            path = path.rename(path.with_name(TMP + path.name))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(folder):
    """Context manager: yield a new folder for the caller to fill, which then replaces `folder`.

    If the caller fails, `folder` stays as it was. Raises UserError if it cannot be written.
    """
    with writing(folder), new_folder(folder.parent) as tmp:
        yield tmp
        remove(folder)
        os.rename(tmp, folder)


def clean(folder):
    """Remove the incomplete files and folders that a killed process left in a folder."""
    for stale in Path(folder).glob(f"{TMP}*"):
        remove(stale)


# ---- Reading
def open_regular(path, opener=open):
    """Open a regular file to read bytes; a file that states a size of 0 reads as empty.

    Files that the system creates while they are read, such as those of /proc, state a size of 0,
    and reading some of them (/proc/kmsg) never returns.
    """
    return opener(path, "rb") if os.stat(path).st_size else io.BytesIO()


def sha256_of(path):
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def most_bytes(path):
    """Return the maximum size of a JSON file that is read."""
    # Our tokenizer.json holds the text of another tokenizer.json (36 MB for large vocabularies) as
    # a JSON string. There a character of 3 bytes may become 6 bytes, and a quote 2.
    return MAX_JSON * (4 if Path(path).name == "tokenizer.json" else 1)


def read_small(path):
    """Return the text of a UTF-8 file; raise OSError or ValueError if it has none or is too big."""
    if not Path(path).is_file():
        raise FileNotFoundError("it is missing or not a file")
    if Path(path).stat().st_size > most_bytes(path):
        raise ValueError(f"it has more than {most_bytes(path)} bytes")
    return Path(path).read_text(encoding="utf-8")


def read_json(path, what):
    """Return the JSON object in a file as a dict; raise UserError if the file has none.

    what: what the file should be, for the message, such as "config"
    """
    try:
        content = json.loads(read_small(path))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return content
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} is not a {what} of this program ({e})") from e
