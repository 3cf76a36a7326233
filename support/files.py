"""Atomic files and folders, and JSON from files that may not be trusted."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from support.cli import UserError

TMP = ".mdlm-tmp-"  # prefix of everything that is not complete yet
MAX_JSON = 1 << 26  # bytes; a larger JSON file is refused unread


@contextlib.contextmanager
def writing(path):
    """Within, an OSError becomes a UserError that names `path`."""
    try:
        yield
    except OSError as e:
        why = e.strerror or e
        fix = "free some space or use another --out_dir. Complete checkpoints are intact"
        raise UserError(f"{path} cannot be written ({why}); {fix}; --resume continues") from e


@contextlib.contextmanager
def new_folder(parent):
    """Yield a temporary folder in `parent`, to be filled and renamed; on failure it is removed."""
    tmp = Path(tempfile.mkdtemp(dir=parent, prefix=TMP))
    try:
        os.chmod(tmp, 0o755)  # mkdtemp gives 0700
        yield tmp
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def write_synced(path, content):
    """Write bytes and wait until they are on the disk."""
    with open(path, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


def write_atomically(path, content):
    """Write bytes under a temporary name, sync, rename: `path` never holds half a file."""
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=TMP)
    os.close(fd)
    try:
        write_synced(tmp, content)
        os.chmod(tmp, 0o644)  # mkstemp gives 0600
        os.replace(tmp, path)
    finally:
        Path(tmp).unlink(missing_ok=True)


def check_output(flag, path):
    """Raise UserError if the file --flag=path cannot be written; "" and "-" name none."""
    fit = os.access(path if os.path.exists(path) else Path(path).parent, os.W_OK)
    if path not in ("", "-") and (os.path.isdir(path) or not fit):
        raise UserError(f"--{flag}={path} cannot be written; give a file in a folder that is yours")


def write_output(path, content):
    """Write bytes to a file, link or device that the user names; an OSError names it too."""
    try:
        Path(path).write_bytes(content)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None


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


def replace_folder(folder, fill, names):
    """Fill a new folder by fill(path) and replace `folder` by it, which may hold `names` alone."""
    found = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    found = {name for name in found if not name.startswith(".")}  # what file managers leave
    if folder.exists() and not (found and found <= names):
        raise UserError(f"{folder} exists and is not mdlm's; give another --out_dir")
    with writing(folder), new_folder(folder.parent) as tmp:
        fill(tmp)
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


def read_small(path):
    """The text of a UTF-8 file of at most MAX_JSON bytes; else OSError or ValueError."""
    if not Path(path).is_file():
        raise FileNotFoundError("it is missing or not a file")
    if Path(path).stat().st_size > MAX_JSON:
        raise ValueError(f"it has more than {MAX_JSON} bytes")
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
