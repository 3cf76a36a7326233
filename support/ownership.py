"""Tells the files of a run from those of the user: a run must replace only the former.

Every check reads the content of a file, not only its name: a manifest or config written by mdlm, a
log whose lines are records of a run, the meta.json of prepared data.
"""

import contextlib
import json
import os
import re
from pathlib import Path

from support.errors import UserError
from support.files import read_json, read_small

# The folder of a checkpoint. .old: it was being replaced when its run was killed.
STEP = re.compile(r"step-\d{1,12}(\.old)?")
# Content of the file `latest` from --overwrite until its first save: the checkpoints are those of
# the run that is being overwritten.
OVERWRITING = "overwriting"
LOCK = ".mdlm-lock"  # an empty file, locked while a run trains in the folder
MAX_LINE = 1 << 20  # bytes of a line of a log; reading stops there in a file that has no lines
PREPARED = {"train.bin", "val.bin", "tokenizer.json", "meta.json"}
PICTURES = ("loss.png", "confidence.png", "rates.png", "compare.png", "predictions.png")


def is_ours(path):
    """Whether mdlm wrote a JSON file: it says so in "format"."""
    with contextlib.suppress(UserError):
        return read_json(path, "file").get("format") == "mdlm"
    return False


def is_checkpoint(folder):
    """Whether a folder is a checkpoint, possibly a damaged one."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return is_ours(folder / "manifest.json") or is_ours(folder / "config.json")


def is_latest(path):
    """Whether a file named `latest` was written by a run."""
    with contextlib.suppress(OSError, ValueError):
        name = "" if path.is_symlink() else read_small(path).strip()
        return name == OVERWRITING or bool(STEP.fullmatch(name))
    return False


def is_lock(path):
    """Whether a file LOCK is that of a run."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size == 0


def is_prepared(folder):
    """Whether a folder holds data that a run has prepared, and nothing else."""
    if not folder.is_dir():
        return False
    # Hidden files, which file managers leave behind, do not count.
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    with contextlib.suppress(UserError):
        meta = read_json(folder / "meta.json", "data")
        return names <= PREPARED and {"source", "dtype"} <= meta.keys()
    return False


def is_record(line):
    """Whether a line (bytes) is a record of a run's log."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        return isinstance(record, dict) and {"step", "tokens", "seconds"} <= record.keys()
    return False


def is_log(path, max_lines=1 << 40):
    """Whether a file is the log of a run; reads at most max_lines lines.

    All lines must be records of a run. Only the last may be cut off, by a crash. An empty file
    counts as a log.
    """
    if path.is_symlink() or not path.is_file():
        return False
    is_empty_or_has_records = path.stat().st_size == 0
    with contextlib.suppress(OSError), open(path, "rb") as f:
        for _ in range(max_lines):
            line = f.readline(MAX_LINE)
            if not is_record(line):
                is_cut = line.startswith(b'{"step": ') and not line.endswith(b"\n")
                return not f.read(1) and (is_empty_or_has_records or is_cut)
            is_empty_or_has_records = True
    return is_empty_or_has_records


def is_run(folder):
    """Whether a run has begun in a folder."""
    if not folder.is_dir():
        return False
    if is_latest(folder / "latest") or is_prepared(folder / "data"):
        return True
    log = folder / "log.jsonl"
    if log.exists() and log.stat().st_size and is_log(log, max_lines=1):
        return True
    return any(STEP.fullmatch(p.name) and is_checkpoint(p) for p in folder.glob("step-*"))


def foreign(out_dir, prepares):
    """Yield the paths that a run in out_dir would replace although no run wrote them.

    prepares: whether the run will write out_dir/data
    """
    out = Path(out_dir)
    has_run = is_run(out)
    checks = {  # name -> function that tells whether the file at a path is that of a run
        "latest": lambda path: is_latest(path) or (has_run and path.is_file()),
        "log.jsonl": is_log,
        LOCK: is_lock,
        "loss.png": lambda path: has_run and path.is_file() and not path.is_symlink(),
    }
    if prepares:
        checks["data"] = is_prepared
    for name, is_own in checks.items():
        path = out / name
        if os.path.lexists(path) and not is_own(path):
            yield path
    yield from (p for p in out.glob("step-*") if STEP.fullmatch(p.name) and not is_checkpoint(p))


def check_run(out_dir, prepares):
    """Raise UserError if a run in out_dir would replace a file that no run wrote."""
    for path in foreign(out_dir, prepares):
        fix = "move it away, or give another --out_dir"
        raise UserError(f"{path} was not written by mdlm, and a run would replace it; {fix}")
