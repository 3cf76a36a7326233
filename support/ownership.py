"""What a run has written, told from what the user has: a run replaces the former alone.

Each proof reads the content, never the name: a manifest or config of mdlm, a log whose lines are
those of a run, a meta.json of prepared data.
"""

import contextlib
import json
import os
import re
from pathlib import Path

from support.errors import UserError
from support.files import read_json, read_small

STEP = re.compile(r"step-\d{1,12}(\.old)?")  # .old: it was being replaced when its run was killed
OVERWRITING = "overwriting"  # in `latest`, until --overwrite has saved: all checkpoints are older
LOCK = ".mdlm-lock"  # empty; locked while a run trains in the folder
LONGEST = 1 << 20  # bytes of a line of a log
PREPARED = {"train.bin", "val.bin", "tokenizer.json", "meta.json"}
PICTURES = ("loss.png", "confidence.png", "rates.png", "compare.png")


def is_ours(path):
    """Whether a JSON file says that mdlm wrote it."""
    with contextlib.suppress(UserError):
        return read_json(path, "file").get("format") == "mdlm"
    return False


def is_checkpoint(folder):
    """Whether a folder is a checkpoint, perhaps a damaged one."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return is_ours(folder / "manifest.json") or is_ours(folder / "config.json")


def is_latest(path):
    """Whether a file `latest` is that of a run."""
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
    found = {path.name for path in folder.iterdir()}
    found = {name for name in found if not name.startswith(".")}  # what file managers leave
    with contextlib.suppress(UserError):
        meta = read_json(folder / "meta.json", "data")
        return found <= PREPARED and {"source", "dtype"} <= meta.keys()
    return False


def is_record(line):
    """Whether a line of bytes is one of a run's log."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        return isinstance(record, dict) and {"step", "tokens", "seconds"} <= record.keys()
    return False


def is_log(path, most=1 << 40):
    """Whether a file is the log of a run: all lines (`most` of them) but the last, perhaps cut."""
    if path.is_symlink() or not path.is_file():
        return False
    begun = path.stat().st_size == 0
    with contextlib.suppress(OSError), open(path, "rb") as f:
        for _ in range(most):
            line = f.readline(LONGEST)
            if not is_record(line):
                is_cut = line.startswith(b'{"step": ') and not line.endswith(b"\n")
                return not f.read(1) and (begun or is_cut)
            begun = True
    return begun


def is_run(folder):
    """Whether a run has begun in a folder."""
    if not folder.is_dir():
        return False
    if is_latest(folder / "latest") or is_prepared(folder / "data"):
        return True
    log = folder / "log.jsonl"
    if log.exists() and log.stat().st_size and is_log(log, most=1):
        return True
    return any(STEP.fullmatch(p.name) and is_checkpoint(p) for p in folder.glob("step-*"))


def foreign(out_dir, prepares):
    """What a run in out_dir would replace though no run wrote it: yields paths.

    prepares: whether it writes out_dir/data.
    """
    out = Path(out_dir)
    has_run = is_run(out)
    own = {
        "latest": lambda path: is_latest(path) or (has_run and path.is_file()),
        "log.jsonl": is_log,
        LOCK: is_lock,
        "loss.png": lambda path: has_run and path.is_file() and not path.is_symlink(),
    }
    if prepares:
        own["data"] = is_prepared
    for name, is_own in own.items():
        path = out / name
        if os.path.lexists(path) and not is_own(path):
            yield path
    yield from (p for p in out.glob("step-*") if STEP.fullmatch(p.name) and not is_checkpoint(p))


def check_run(out_dir, prepares):
    """Raise UserError if a run in out_dir would replace what is not a run's own."""
    for path in foreign(out_dir, prepares):
        fix = "move it away, or give another --out_dir"
        raise UserError(f"{path} exists and is not mdlm's, and a run would replace it; {fix}")
