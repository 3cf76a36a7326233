"""Output files that a flag names: checked so that they never overwrite something valuable.

An output must not replace an input, nor a file of a run, data set, checkpoint or exported model.
Programs call check_all before their work begins. `write` and Lines check again when they write,
because a run may have begun in the meantime.
"""

import contextlib
import os
from pathlib import Path

from support.errors import UserError
from support.files import (
    TMP,
    make_folder,
    naming,
    read_json,
    rename_over,
    temporary,
    write_all,
    write_atomically,
)
from support.ownership import LOCK, PICTURES, STEP, is_run
from support.settings import READS, WRITES, named_by, names_of
from support.terminal import has_stdout

# Files of a run in its folder, besides checkpoints and data.
RUN_NAMES = ("latest", "log.jsonl", LOCK, *PICTURES)
MODEL_SUFFIXES = (".safetensors", ".onnx", ".gguf")  # a folder with such a file holds a model
PAGE = {"index.html", "model.onnx", "weights.bin"}  # of export.py --to=page
DATA = {"train.bin", "val.bin"}
FIX = "give a file elsewhere"


def names_in(folder):
    """Return the names in a folder, in lower case: some file systems ignore case."""
    try:
        return {name.casefold() for name in os.listdir(folder)}
    except OSError:
        return set()


def what_is_in(folder):
    """Say what a folder holds if no file may be added to it, such as "a checkpoint"; else "".

    A run's folder is not among these: users may add files to it.
    """
    names = names_in(folder)
    if names & DATA:
        return "a data set"
    if {"manifest.json", "config.json"} <= names or {"manifest.json", "model.safetensors"} <= names:
        return "a checkpoint"
    if any(name.endswith(MODEL_SUFFIXES) for name in names) or len(names & PAGE) > 1:
        return "an exported model"
    return ""


def why_not(path, own=()):
    """Say why a file or folder `path` must not be written; "" if it may be.

    own: names of files in a run's folder that the caller may replace
    """
    file = Path(os.path.realpath(path))
    if file.exists() and not file.is_file() and not file.is_dir():
        return ""  # a device or a pipe
    for folder in (file, *file.parents):  # inside a checkpoint or a run's data, at any depth
        name = folder.name.casefold()
        is_kept = STEP.fullmatch(name) or name == "data" or name.startswith(TMP)
        if is_kept and is_run(folder.parent):
            return f"is a part of the run in {folder.parent}"
    name = file.name.casefold()
    if name in RUN_NAMES and name not in own and is_run(file.parent):
        return f"is a part of the run in {file.parent}"
    content = what_is_in(file.parent)
    return f"would be a part of {file.parent}, {content}" if content else ""


def is_same(one, other):
    """Whether two paths name the same file, also by links, or with another spelling or case."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them does not exist yet
        return os.path.realpath(one).casefold() == os.path.realpath(other).casefold()


def is_linked(path):
    """Whether a file has several names (hard links): writing to one changes all of them."""
    return os.path.isfile(path) and os.stat(path).st_nlink > 1


def is_read_with(folder, path):
    """Whether writing `path` would change a folder that is read.

    That is so if the path is in the folder, or is a hard link to a file in it. A run's folder may
    get more files; why_not protects those of the run.
    """
    if is_linked(path):
        contents = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
        if any(is_same(file, path) for file in contents):
            return True
    return is_same(folder, Path(os.path.realpath(path)).parent) and not is_run(Path(folder))


def learned_in(folder):
    """Yield the data and tokenizer files that a run or checkpoint was trained on.

    Programs may read them again, so no output may replace them.
    """
    for config in (Path(folder) / "config.json", *Path(folder).glob("step-*/config.json")):
        with contextlib.suppress(UserError):
            settings = read_json(config, "config").get("config")
            settings = settings if isinstance(settings, dict) else {}
            names = (settings.get("data"), settings.get("tokenizer"))
            yield from (name for name in names if isinstance(name, str) and os.path.exists(name))


def shown(flag):
    """Return a flag as the user types it: --name, or NAME for a positional argument."""
    return flag if flag.isupper() else f"--{flag}"


def check(flag, path, read=None, written=None, own=()):
    """Raise UserError unless the output file --flag=path can be written and replaces nothing.

    read, written: dicts of other flags -> the paths that they read or write
    own: names of files in a run's folder that may be replaced

    The paths "" and "-" (standard output) are not checked, but a PICTURE is a file.
    """
    if (flag, path) == ("PICTURE", "-"):
        raise UserError("PICTURE=-: no picture is written to standard output; give a file")
    if path in ("", "-"):
        return
    what = f"{shown(flag)}={path}"
    read = [(other, name) for other, names in (read or {}).items() for name in names_of(names)]
    others = [*read, *(written or {}).items()]
    # 1. Another flag names the same file.
    for other, name in others:
        if name not in ("", "-") and is_same(name, path):
            both = f"{shown(other)} and {shown(flag)}"
            raise UserError(f"{both} name the same file, {path}; give two files")
    # 2. The file is in a folder that is read, or among the data that a run in it was trained on.
    for other, name in read:
        if os.path.isdir(name) and is_read_with(name, path):
            raise UserError(f"{what} would change {shown(other)}={name}, which is read; {FIX}")
        for text in learned_in(name) if os.path.isdir(name) else ():
            if is_same(text, path) or (os.path.isdir(text) and is_read_with(text, path)):
                raise UserError(f"{what} would change {text}, which {name} learned; {FIX}")
    # 3. It is a file of a run, a data set or a model.
    why = why_not(path, own)
    if why:
        raise UserError(f"{what} {why}; {FIX}")
    # 4. It cannot be written.
    folder = Path(path).parent
    can_write = folder.is_dir() and os.access(path if os.path.exists(path) else folder, os.W_OK)
    if os.path.isdir(path) or not can_write:
        raise UserError(f"{what} cannot be written; give a file in a folder that you may write to")


def check_folder(flag, path, read=None, names=()):
    """Create the output folder --flag=path, and check the files of these names in it.

    The folder may be that of a run, whose files of these names may be replaced. Raises UserError
    under the same conditions as check, and if the folder cannot be created.
    """
    folder = Path(path)
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"--{flag}={path} is no folder; give one, or none")
    why = "" if folder.is_dir() and is_run(folder) else why_not(folder)
    if why:
        raise UserError(f"--{flag}={path} {why}; {FIX}")
    try:
        make_folder(folder)
    except OSError as e:
        fix = "check that path, or give a folder that you may write to"
        raise UserError(f"--{flag}={path} cannot be created ({e.strerror}); {fix}") from None
    for name in names:
        check(flag, str(folder / name), read, own=names)


def check_new_folder(flag, path):
    """Raise UserError unless the folder --flag=path can be created and is not inside a run."""
    what = f"{shown(flag)}={path}"
    if not path:
        raise UserError(f"give the folder to create, such as {shown(flag)}=my-model")
    if os.path.lexists(path):
        raise UserError(f"{what} exists; give the name of a new folder")
    if not Path(path).parent.is_dir():
        why = f"is in {Path(path).parent}, which is not a folder"
        raise UserError(f"{what} {why}; give the name of a new folder in an existing one")
    why = why_not(path)
    run = next((p for p in Path(os.path.realpath(path)).parents if is_run(p)), None)
    if run and not why:
        why = f"would be a part of the run in {run}"
    if why:
        raise UserError(f"{what} {why}; give a folder elsewhere")
    if not os.access(Path(path).parent, os.W_OK):
        fix = "give a folder inside one that you may write to"
        raise UserError(f"{what} cannot be created; {fix}")


def paths_of(options, what):
    """Return {flag: path} for the flags of a dataclass whose paths are read, or written.

    what: READS or WRITES
    """
    return {name: getattr(options, name) for name in named_by(type(options), what)}


def check_all(options, **read):
    """Check every flag of a dataclass that writes a file, and raise UserError as `check` does.

    read: other paths that the program reads, by name
    """
    written = paths_of(options, WRITES)
    read = paths_of(options, READS) | read
    if read.get("out_dir") == "":
        read["out_dir"] = "out"  # the default of all programs
    for flag, path in written.items():
        others = {other: name for other, name in written.items() if other != flag}
        check(flag, path, read, others)
        if path == "-" and not has_stdout():
            raise UserError(f"--{flag}=-: standard output is closed; give a file, or open it")


# ---- Writing
def refuse_kept(path, own=()):
    """Raise UserError if why_not has a reason not to write a file."""
    why = why_not(path, own)
    if why:
        raise UserError(f"{path} {why}; {FIX}")


def open_output(path):
    """Open a file, link or device that the user names, to write bytes."""
    if is_linked(path):  # write a new file, so that the other names keep their content
        os.unlink(path)
    return open(path, "wb", buffering=0)


def write(path, content, own=()):
    """Write bytes to a file, link or device that the user names.

    A file is replaced atomically: it keeps its old content until all is written. Targets of links,
    devices, and files in a folder without write permission are written in place. Raises UserError
    as refuse_kept does; an OSError names the path.
    """
    refuse_kept(path, own)
    path = Path(path)
    with naming(path):
        if is_replaced(path):
            write_atomically(path, content)
        else:
            with open_output(path) as f:
                write_all(f, content)


def is_replaced(path):
    """Whether a file that the user names is written under another name and then renamed: not
    targets of links, devices, and files in a folder without write permission."""
    is_plain = not path.is_symlink() and (path.is_file() or not path.exists())
    return is_plain and os.access(path.parent, os.W_OK)


class Lines:
    """A context manager, and a text file for print(..., file=lines, flush=True), line by line.

    The file has its name when all is written: until then, and after an error, what had that name
    before is there. A device, a pipe or the target of a link gets each line when it is complete.
    An OSError names the path.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.unwritten = b""
        refuse_kept(path)
        self.tmp = temporary(self.path.parent) if is_replaced(self.path) else None
        with naming(path):
            self.file = open(self.tmp, "wb", buffering=0) if self.tmp else open_output(path)

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
            with naming(self.path):
                write_all(self.file, self.unwritten)
            self.unwritten = b""

    def put(self, content):
        """Write bytes at once."""
        with naming(self.path):
            write_all(self.file, content)

    def flush(self):
        """Do nothing: print calls this, but write has written every complete line already."""
