"""The folder of a run: marked as its own, and claimed by one process at a time."""

import contextlib
import os
import warnings
from pathlib import Path

import filelock

from nanomdlm.support.cli import files, outputs
from nanomdlm.support.cli.files import LOCK, MARKER, PART, is_run, read_latest
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.data import sources
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import checkpoint

# Content of the file `latest` from --overwrite until its first save: the checkpoints are those of
# the run that is being overwritten.
OVERWRITING = "overwriting"
claimed = contextlib.ExitStack()  # undoes what this process did to claim a folder


def find_to_resume(given):
    """The checkpoint that the given flags continue; None: they begin a new run.

    UserError if that would meet another run in its folder.
    """
    out = Path(given.get("out_dir", "out"))
    resume = given.get("resume")
    overwrite = given.get("overwrite")
    if resume and overwrite:
        raise UserError("--resume and --overwrite contradict each other; give one of them")
    found = checkpoint.checkpoints(out)
    if not resume and not overwrite and found and is_run(out):
        fix = "give --resume to continue it, --overwrite to replace it, or another --out_dir"
        raise UserError(f"--out_dir={out} already holds a run; {fix}")
    if not resume or resume == "auto" and not found:
        return None
    if read_latest(out) == OVERWRITING:
        before = f"remove {out}/latest to go on with the run before, if it had the same data"
        fix = f"give --overwrite again, or {before}"
        raise UserError(f"--overwrite was cut off in {out} before it saved; {fix}")
    return checkpoint.find_checkpoint(out)


def check_place(config, resumed_from):
    """Raise UserError if a run would change what it reads, or a file of the user."""
    out = Path(config.out_dir)
    fix = "give another --out_dir"
    taken = []
    if not is_run(out) and resumed_from in (None, out):  # an older run has no marker
        if why := outputs.why_not(out / "a run"):
            raise UserError(f"--out_dir={out} {why}; {fix}")
        taken = [p for p in out.glob("*") if is_written(p.name) and p.name != "data"]
    is_kept = resumed_from and (out / "data" / "meta.json").exists()
    is_made = not is_kept and not sources.is_ids(config.data)  # out/data, from a text
    if is_made and os.path.lexists(out / "data") and not is_prepared(out / "data"):
        taken.append(out / "data")
    if taken:
        what = f"{taken[0]} was not written by mdlm, and a run would replace it"
        raise UserError(f"{what}; move it away, or {fix}")
    data = Path(os.path.realpath(config.data))
    root = Path(os.path.realpath(out))
    inside = any(p.parent == root and is_written(p.name) for p in (data, *data.parents))
    if is_made and config.data not in sources.BUILT_IN and (inside or data == root):
        raise UserError(f"--out_dir={out} would change --data={config.data}; {fix}")


def is_written(name):
    """Whether a run writes a file or folder of this name."""
    return bool(PART.fullmatch(name)) or name == "loss.png"


def is_prepared(folder):
    """Whether a folder has data that a run has prepared, and nothing else (but hidden files)."""
    names = {p.name for p in folder.glob("[!.]*")}
    with contextlib.suppress(UserError):
        is_ours = "source" in files.read_json(folder / "meta.json", "data")
        return is_ours and names <= {"train.bin", "val.bin", "tokenizer.json", "meta.json"}
    return False


def lock(out):
    """Make, mark and lock the folder of a run, until release().

    UserError if it cannot be written, or if another process trains there.
    """
    release()
    with files.writing(out):
        for folder in (*reversed(out.parents), out):
            if not os.path.lexists(folder):
                claimed.callback(quietly, folder.rmdir)  # if it is empty
        out.mkdir(parents=True, exist_ok=True)
        marker = out / MARKER
        is_new = not marker.exists()
        if is_new:
            marker.touch()
        acquire(out)
        if is_new:
            claimed.callback(forget, out)
        files.clean(out)
        with files.new_folder(out):
            pass  # it can be written


def acquire(out):
    """Lock a folder that is marked. File systems without locks get a warning."""
    path = out / LOCK
    file_lock = filelock.FileLock(path)
    try:
        # Where there are no locks, newer versions of filelock warn and let a file stand for one,
        # which a run that is killed on another machine leaves there for good.
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            file_lock.acquire(timeout=0)
    except filelock.Timeout:
        fix = "stop the run that is training there, or give another --out_dir"
        raise UserError(f"--out_dir={out} is in use; {fix}") from None
    except PermissionError:  # it belongs to another user
        raise
    except (OSError, NotImplementedError, UserWarning) as e:
        quietly(path.unlink)
        why = f"its file system gives no lock ({getattr(e, 'strerror', None) or e})"
        warn(f"--out_dir={out} is not locked, as {why}; do not start a second run there")
        return
    claimed.callback(quietly, file_lock.release)
    claimed.callback(quietly, path.unlink)  # first: a run that opens it meanwhile has no lock


def forget(out):
    """Remove the marker of a folder in which a run has written nothing."""
    if not any(PART.fullmatch(p.name) for p in out.glob("[!.]*")):
        quietly((out / MARKER).unlink)


def quietly(function):
    """Call a function that may raise OSError: the file has gone, the folder is not empty."""
    with contextlib.suppress(OSError):
        function()


def release():
    """Undo the claim of this process: unlock its folder, and remove it if it is empty."""
    claimed.close()


def mark_overwriting(out_dir):
    """Mark that --overwrite has begun, so that --resume does not continue the replaced run."""
    if checkpoint.checkpoints(out_dir):
        latest = Path(out_dir) / "latest"
        with files.writing(latest):
            files.write_atomically(latest, OVERWRITING.encode())
