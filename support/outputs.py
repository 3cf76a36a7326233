"""Files that a flag writes: never over an input, nor over what a run, a data set, a checkpoint or
an export holds.

Programs call check_all before their work begins, and write with `write` or Lines, which look again:
a run may have begun meanwhile.
"""

import contextlib
import dataclasses
import os
from pathlib import Path

from support.errors import UserError
from support.files import TMP, naming, read_json, write_all, write_atomically
from support.flags import READS, WRITES
from support.ownership import LOCK, PICTURES, STEP, is_run
from support.terminal import has_stdout

# What a run's folder keeps for the run, beside checkpoints and data.
RUN_NAMES = ("latest", "log.jsonl", LOCK, *PICTURES)
MODEL_SUFFIXES = (".safetensors", ".onnx", ".gguf")  # a folder with such a file holds a model
PAGE = {"index.html", "model.onnx", "weights.bin"}  # of export.py --to=page
DATA = {"train.bin", "val.bin"}
FIX = "give a file elsewhere"


def names_in(folder):
    """The names in a folder, in lower case: some file systems do not tell cases apart."""
    try:
        return {name.casefold() for name in os.listdir(folder)}
    except OSError:
        return set()


def what_is_in(folder):
    """What a folder holds to which no file may be added, in words; "" if nothing."""
    names = names_in(folder)
    if names & DATA:
        return "a data set"
    if {"manifest.json", "config.json"} <= names or {"manifest.json", "model.safetensors"} <= names:
        return "a checkpoint"
    if any(name.endswith(MODEL_SUFFIXES) for name in names) or len(names & PAGE) > 1:
        return "an exported model"
    return ""


def why_not(path, own=()):
    """Why a file or folder `path` may not be written, in words; "" if it may.

    own: names of a run's folder that the caller may replace.
    """
    file = Path(os.path.realpath(path))
    if file.exists() and not file.is_file() and not file.is_dir():
        return ""  # a device or a pipe
    for part in (file, *file.parents):  # what is in a checkpoint or in a run's data, at any depth
        name = part.name.casefold()
        is_kept = STEP.fullmatch(name) or name == "data" or name.startswith(TMP)
        if is_kept and is_run(part.parent):
            return f"is a part of a run, that in {part.parent}"
    name = file.name.casefold()
    if name in RUN_NAMES and name not in own and is_run(file.parent):
        return f"is a part of a run, that in {file.parent}"
    found = what_is_in(file.parent)
    return f"would be a part of {file.parent}, {found}" if found else ""


def is_same(one, other):
    """Whether two paths name one file: by links, other spellings or another case of letters."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # one does not exist yet
        return os.path.realpath(one).casefold() == os.path.realpath(other).casefold()


def is_linked(path):
    """Whether a file has several names (hard links): who writes to one writes to all."""
    return os.path.isfile(path) and os.stat(path).st_nlink > 1


def is_read_with(folder, path):
    """Whether `path` would change a folder that is read: it lies there, or is a file of it.

    In the folder of a run only the run's names are kept (why_not).
    """
    if is_linked(path):
        parts = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
        if any(is_same(part, path) for part in parts):
            return True
    return is_same(folder, Path(os.path.realpath(path)).parent) and not is_run(Path(folder))


def learned_in(folder):
    """The files and folders that a run or checkpoint learned: programs may read them again."""
    for config in (Path(folder) / "config.json", *Path(folder).glob("step-*/config.json")):
        with contextlib.suppress(UserError):
            settings = read_json(config, "config").get("config")
            settings = settings if isinstance(settings, dict) else {}
            names = (settings.get("data"), settings.get("tokenizer"))
            yield from (name for name in names if isinstance(name, str) and os.path.exists(name))


def shown(flag):
    """A flag as it is typed; in capitals an argument without one."""
    return flag if flag.isupper() else f"--{flag}"


def check(flag, path, read=None, written=None, own=()):
    """Raise UserError unless the file --flag=path can be written and replaces nothing.

    read, written: dicts of other flags -> what they name. "" and "-" name nothing.
    """
    if path in ("", "-"):
        return
    given = f"{shown(flag)}={path}"
    read = {other: name for other, name in (read or {}).items() if name not in ("", "-")}
    written = {other: name for other, name in (written or {}).items() if name not in ("", "-")}
    for other, name in (read | written).items():
        if is_same(name, path):
            both = f"{shown(other)} and {shown(flag)}"
            raise UserError(f"{both} name the same file, {path}; give two files")
    for other, name in read.items():
        if os.path.isdir(name) and is_read_with(name, path):
            raise UserError(f"{given} would change {shown(other)}={name}, which is read; {FIX}")
        for text in learned_in(name) if os.path.isdir(name) else ():
            if is_same(text, path) or (os.path.isdir(text) and is_read_with(text, path)):
                raise UserError(f"{given} would change {text}, which {name} learned; {FIX}")
    why = why_not(path, own)
    if why:
        raise UserError(f"{given} {why}; {FIX}")
    folder = Path(path).parent
    fit = folder.is_dir() and os.access(path if os.path.exists(path) else folder, os.W_OK)
    if os.path.isdir(path) or not fit:
        raise UserError(f"{given} cannot be written; give a file in a folder that is yours")


def check_folder(flag, path, read=None, names=()):
    """As check, for files of these names in a folder, which is made; a run's may hold them."""
    folder = Path(path)
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"--{flag}={path} is no folder; give one, or none")
    why = "" if folder.is_dir() and is_run(folder) else why_not(folder)
    if why:
        raise UserError(f"--{flag}={path} {why}; {FIX}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        fix = "check that path, or give a folder that is yours"
        raise UserError(f"--{flag}={path} cannot be made ({e.strerror}); {fix}") from None
    for name in names:
        check(flag, str(folder / name), read, own=names)


def check_new_folder(flag, path):
    """Raise UserError unless --flag=path names a folder that can be made, outside of all runs."""
    given = f"{shown(flag)}={path}"
    if not path:
        raise UserError(f"give the folder to make, such as {shown(flag)}=my-model")
    if os.path.lexists(path) or not Path(path).parent.is_dir():
        why = "exists" if os.path.lexists(path) else "is no name in a folder that exists"
        raise UserError(f"{given} {why}; give that of a new folder")
    why = why_not(path)
    run = next((p for p in Path(os.path.realpath(path)).parents if is_run(p)), None)
    if run and not why:
        why = f"would be a part of a run, that in {run}"
    if why:
        raise UserError(f"{given} {why}; give a folder elsewhere")
    if not os.access(Path(path).parent, os.W_OK):
        raise UserError(f"{given} cannot be made; give a folder in one that is yours")


def paths_of(options, what):
    """Flag -> value, for the flags of a dataclass that name what is read, or written."""
    fields = [field for field in dataclasses.fields(options) if field.metadata["path"] == what]
    return {field.name: getattr(options, field.name) for field in fields}


def check_all(options, **read):
    """Check every flag of a dataclass that writes a file; read: more that is read."""
    written = paths_of(options, WRITES)
    read = paths_of(options, READS) | read
    if read.get("out_dir") == "":
        read["out_dir"] = "out"  # the default of all programs, where a run is there
    for flag, path in written.items():
        others = {other: name for other, name in written.items() if other != flag}
        check(flag, path, read, others)
        if path == "-" and not has_stdout():
            raise UserError(f"--{flag}=-: standard output is closed; give a file, or open it")


def refuse_kept(path, own=()):
    """Raise UserError if why_not says why a file that the user names may not be written."""
    why = why_not(path, own)
    if why:
        raise UserError(f"{path} {why}; {FIX}")


def open_output(path):
    """Open a file, link or device that the user names to write bytes."""
    if is_linked(path):  # its other names keep what they have
        os.unlink(path)
    return open(path, "wb", buffering=0)


def write(path, content, own=()):
    """Write bytes to a file, link or device that the user names; an OSError names it too.

    A file has what it had before until all is written. What a link or a device leads to is
    written in place, and so is a file in a folder that is not the user's.
    """
    refuse_kept(path, own)
    path = Path(path)
    is_plain = not path.is_symlink() and (path.is_file() or not path.exists())
    with naming(path):
        if is_plain and os.access(path.parent, os.W_OK):
            write_atomically(path, content)
        else:
            with open_output(path) as f:
                write_all(f, content)


class Lines:
    """A text file of lines for print(..., file=, flush=True); an OSError names it.

    A line is written when its end comes; on a full disk no part of one stays.
    """

    def __init__(self, path):
        self.path = path
        self.held = b""
        refuse_kept(path)
        with naming(path):
            self.file = open_output(path)

    def write(self, text):
        self.held += text.encode()
        if not text.endswith("\n"):
            return
        end = self.file.tell() if self.file.seekable() else None
        with naming(self.path):
            try:
                write_all(self.file, self.held)
            except OSError:
                with contextlib.suppress(OSError):  # a device
                    if end is not None:
                        self.file.truncate(end)
                raise
        self.held = b""

    def flush(self):
        pass  # whole lines are not held back
