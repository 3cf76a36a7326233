"""The folder of a run: claimed by one run at a time, and never one with something else in it."""

import os
from pathlib import Path

from support import outputs, ownership
from support.data import sources
from support.errors import UserError
from support.training import checkpoint


def holds_run(out):
    """Whether a run has saved a checkpoint in `out`, perhaps a damaged one."""
    return any(map(ownership.is_checkpoint, checkpoint.checkpoints(out)))


def find_to_resume(given):
    """The checkpoint that the given flags continue; None: they begin a new run."""
    out = Path(given.get("out_dir", "out"))
    resume = given.get("resume")
    if resume and given.get("overwrite"):
        raise UserError("--resume and --overwrite contradict each other; give one of them")
    if not resume or resume == "auto" and not holds_run(out):
        return None
    if checkpoint.read_latest(out) == ownership.OVERWRITING:
        before = f"remove {out}/latest to go on with the run before, if it had the same data"
        fix = f"give --overwrite again, or {before}"
        raise UserError(f"--overwrite was cut off in {out} before it saved; {fix}")
    real = Path(os.path.realpath(out))
    if ownership.is_checkpoint(real):
        run = real.parent
        fix = f"its run, --out_dir={run}, or " if ownership.is_run(run) else ""
        what = f"--out_dir={out} is a checkpoint, in which no run continues"
        raise UserError(f"{what}; give {fix}a new --out_dir and --init_from={out}")
    return checkpoint.find_checkpoint(out)


def check_unused(given):
    """Raise UserError if a new run would meet another one in its folder."""
    out = Path(given.get("out_dir", "out"))
    if holds_run(out) and not given.get("overwrite"):
        fix = "give --resume to continue it, --overwrite to replace it, or another --out_dir"
        raise UserError(f"--out_dir={out} already holds a run; {fix}")


def claim(config, resumed_from):
    """Lock the folder of a run; UserError if that would replace what is not the run's own.

    resumed_from: its checkpoint, or None for a new run
    """
    out = Path(config.out_dir)
    if not resumed_from:
        check_place(config, out)
    checkpoint.claim_run_dir(out)
    is_kept = resumed_from and (out / "data" / "meta.json").exists()
    ownership.check_run(out, prepares=not (is_kept or sources.is_ids(config.data)))


def check_place(config, out):
    """Raise UserError if a new run in `out` would change what it reads, or what is not its own."""
    why = "" if ownership.is_run(out) else outputs.why_not(out / "latest")
    if why:
        raise UserError(f"--out_dir={out} {why}; give another --out_dir")
    for name in ("data", "tokenizer"):
        path = Path(getattr(config, name))
        if path.is_dir() and sources.is_records(path) and outputs.is_same(path, out):
            raise UserError(f"--out_dir={out} would change --data={path}; give another --out_dir")
        inside = os.path.lexists(path) and outputs.is_same(os.path.dirname(path) or ".", out)
        if inside and path.name.casefold() in outputs.RUN_NAMES:
            raise UserError(f"--{name}={path} would be replaced; give another --out_dir")


def data_folder(config):
    """Where the ids of a run are: --data itself, or what is prepared of it in out_dir."""
    if sources.is_ids(config.data):
        return Path(config.data)
    return Path(config.out_dir) / "data"
