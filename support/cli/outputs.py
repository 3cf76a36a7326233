"""Output files that a flag names: checked before the work, written atomically.

An output replaces an ordinary file of the user, but no input of the same command, nothing that a
run keeps in its folder, and nothing in a folder with a model or a data set.
"""

import os
from pathlib import Path

from filelock import FileLock, Timeout

from nanomdlm.support.cli.files import (
    PART,
    is_run,
    naming,
    rename_over,
    temporary,
    write_atomically,
)
from nanomdlm.support.cli.settings import READS, WRITES, names_of, types_of
from nanomdlm.support.cli.terminal import has_stdout
from nanomdlm.support.errors import UserError

# A folder that has a file with such a name holds a model or a data set.
MODEL = (".safetensors", ".onnx", ".gguf", "train.bin", "val.bin")
FIX = "give a file elsewhere"


# ---- Checks
def why_not(path):
    """Say why a file or folder `path` must not be written; "" if it may be."""
    file = Path(os.path.realpath(path))
    if file.exists() and not file.is_file() and not file.is_dir():
        return ""  # a device or a pipe
    for place in (file, *file.parents):
        if PART.fullmatch(place.name) and is_run(place.parent):
            return f"is a part of the run in {place.parent}"
    if file.parent.is_dir() and any(name.endswith(MODEL) for name in os.listdir(file.parent)):
        return f"would be a part of {file.parent}, which holds a model or a data set"
    return ""


def is_same(one, other):
    """Whether two paths name the same file or folder, also by links."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them does not exist yet
        return os.path.realpath(one) == os.path.realpath(other)


def is_input(path, read):
    """Whether writing `path` would change `read`: the same file, or a folder that has it.

    A run's folder may get more files: why_not protects those of the run.
    """
    if os.path.isdir(read) and not is_run(read):
        return is_same(os.path.dirname(path) or ".", read)
    return is_same(path, read)


def named(flag, path):
    """Return a flag as the user types it: --name=path, or NAME=path of a positional argument."""
    return f"{flag}={path}" if flag.isupper() else f"--{flag}={path}"


def check(flag, path, read=None, written=None):
    """Raise UserError unless the output file --flag=path can be written and replaces nothing.

    read, written: dicts of other flags -> the paths that they read or write. The paths "" and "-"
    (standard output) are not checked.
    """
    if path in ("", "-"):
        return
    what = named(flag, path)
    read = [(other, name) for other, names in (read or {}).items() for name in names_of(names)]
    for other, name in [*read, *(written or {}).items()]:
        if name not in ("", "-") and is_input(path, name):
            raise UserError(f"{what} would change {named(other, name)}; {FIX}")
    why = why_not(path)
    if why:
        raise UserError(f"{what} {why}; {FIX}")
    folder = Path(path).parent
    can_write = folder.is_dir() and os.access(path if os.path.exists(path) else folder, os.W_OK)
    if os.path.isdir(path) or not can_write:
        raise UserError(f"{what} cannot be written; give a file in a folder that you may write to")


def check_folder(flag, path, read, names):
    """Create the output folder --flag=path, and check the files of these names in it."""
    why = why_not(path) or why_not(Path(path) / names[0])
    if why:
        raise UserError(f"--{flag}={path} {why}; {FIX}")
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as e:
        raise UserError(f"--{flag}={path} cannot be created ({e.strerror})") from None
    for name in names:
        check(flag, os.path.join(path, name), read)


def check_new_folder(flag, path):
    """Raise UserError unless the folder --flag=path can be created."""
    parent = Path(path).parent
    why = why_not(path)
    if not path:
        raise UserError(f"give the folder to create, such as --{flag}=my-model")
    if os.path.lexists(path):
        why = "exists"
    elif not parent.is_dir() or not os.access(parent, os.W_OK):
        why = f"cannot be created in {parent}"
    if why:
        raise UserError(f"--{flag}={path} {why}; give the name of a new folder in an existing one")


def paths_of(options, role):
    """Return {flag: path} for the flags of a dataclass whose paths have this role: READS, WRITES"""
    types = types_of(type(options))
    return {name: getattr(options, name) for name, (_, marks) in types.items() if role in marks}


def check_all(options, **read):
    """Check every flag of a dataclass that writes a file, and raise UserError as `check` does.

    read: other paths that the program reads, by name
    """
    written = paths_of(options, WRITES)
    read = paths_of(options, READS) | read
    if read.get("out_dir") == "":
        read["out_dir"] = "out"  # the default of all programs
    for flag, path in written.items():
        check(flag, path, read, {name: other for name, other in written.items() if name != flag})
        if path == "-" and not has_stdout():
            raise UserError(f"--{flag}=-: standard output is closed; give a file, or open it")


# ---- Writing
def write(path, content):
    """Write bytes to a file, link or device that the user names, as Lines does."""
    with Lines(path) as file:
        file.put(content)


def is_replaced(path):
    """Whether a file is replaced: not the target of a link, a device, or one in a folder without
    write permission."""
    is_plain = not path.is_symlink() and (path.is_file() or not path.exists())
    return is_plain and os.access(path.parent, os.W_OK)


class Lines:
    """A context manager, and a text file for print(..., file=lines, flush=True), line by line.

    A file is replaced atomically: the old file stays until everything is written, and after an
    error. A device, a pipe or the target of a link gets each line when it is complete.
    Raises UserError if the path must not be written; an OSError names it.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.unwritten = b""
        why = why_not(path)  # again: a run may have begun there meanwhile
        if why:
            raise UserError(f"{path} {why}; {FIX}")
        self.tmp = temporary(self.path.parent) if is_replaced(self.path) else None
        with naming(path):
            self.file = open(self.tmp or path, "wb", buffering=0)

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        try:
            with naming(self.path):
                if self.tmp and not error:
                    os.fsync(self.file.fileno())
                    self.file.close()
                    rename_over(self.tmp, self.path)
        finally:
            self.file.close()
            if self.tmp:
                self.tmp.unlink(missing_ok=True)

    def write(self, text):
        """Add text; write it when it ends with a line end."""
        self.unwritten += text.encode()
        if text.endswith("\n"):
            self.put(self.unwritten)
            self.unwritten = b""

    def put(self, content):
        """Write bytes at once, also those that an unbuffered file does not accept at once."""
        with naming(self.path):
            while content:
                content = content[self.file.write(content) :]

    def flush(self):
        """Do nothing: print calls this, but write has written every complete line already."""


class Continued(Lines):
    """Lines of a job that may be stopped: finished lines stay in PATH.part until all are done.

    job: its identity, 64 hexadecimal digits. When the same job is started again, `done` is the
    number of lines that exist already. Raises UserError if PATH.part belongs to another job, or if
    another process writes it.
    """

    def __init__(self, path, job):
        self.whole = Path(path)
        why = why_not(path)
        if why:
            raise UserError(f"{path} {why}; {FIX}")
        part = self.whole.with_name(f"{self.whole.name}.part")
        self.lock = FileLock(f"{part}.lock")
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"another process writes {part}; wait for it, or {FIX}") from None
        head = f"{job}\n".encode()
        with naming(part):
            content = part.read_bytes() if part.exists() else head
            if not content.startswith(head):
                self.unlock()
                raise UserError(f"{part} is of another job; remove it to start over, or {FIX}")
            content = content[: content.rindex(b"\n") + 1]  # a kill may have cut the last line
            self.done = content.count(b"\n") - 1
            write_atomically(part, content)
            self.path = part
            self.tmp = None
            self.unwritten = b""
            self.file = open(part, "ab", buffering=0)

    def unlock(self):
        self.lock.release()
        Path(self.lock.lock_file).unlink(missing_ok=True)

    def __exit__(self, error, *_):
        self.file.close()
        if not error:
            with naming(self.whole):
                _, _, content = self.path.read_bytes().partition(b"\n")
                write_atomically(self.whole, content)
                self.path.unlink()
        self.unlock()
