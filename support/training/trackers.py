"""--tracker=wandb and --tracker=tensorboard: the numbers of log.jsonl in these programs too.

log.jsonl stays the record of a run: whatever a tracker does, the run goes on, and reads nothing
back but the id of its wandb run. Only the first rank has a tracker.
"""

import contextlib
import dataclasses
import json
import math
import os
from pathlib import Path

from support.environment import optional
from support.errors import UserError
from support.terminal import is_first_rank, warn

# --log -> the packages that it needs. (PyTorch's writer for TensorBoard imports the second one.)
PACKAGES = dict(wandb="wandb", tensorboard="tensorboard")


def check(config):
    """Raise UserError if the package for --log is missing on the first rank."""
    if config.tracker in PACKAGES and is_first_rank():
        optional(PACKAGES[config.tracker], f"--tracker={config.tracker}")


def start(config, log):
    """The tracker of a run that goes on from the records in `log`, a list of dicts."""
    kinds = dict(wandb=Wandb, tensorboard=TensorBoard)
    return kinds[config.tracker](config, log) if config.tracker in kinds else Tracker()


def scalars(record, config):
    """The numbers of a record of log.jsonl, flat: {name: number}; without those that are null.

    Beside what the record has, the learning rates themselves.
    """
    found = {}
    for name, value in record.items():
        values = {name: value}
        if isinstance(value, list):  # by tenths of the mask rate
            values = {f"{name}/{10 * i}-{10 * i + 10}": x for i, x in enumerate(value)}
        for key, x in values.items():
            if type(x) in (int, float) and math.isfinite(x):
                found[key] = x
    if "lr_scale" in found:
        found["learning_rate"] = config.learning_rate * found["lr_scale"]
        if config.optimizer == "muon":
            found["muon_lr"] = config.muon_lr * found["lr_scale"]
    return found


class Tracker:
    """The base of all trackers, which tracks nothing."""

    id = None  # what the log must keep, so that --resume goes on with the same one

    def add(self, record):
        """Send a record of log.jsonl."""

    def close(self):
        """Wait until everything is sent, or kept for later."""


class Guarded(Tracker):
    """A tracker that is given up at its first error, with a warning: the run goes on."""

    def __init__(self, config):
        self.config = config
        self.failed = False

    def add(self, record):
        with self.guarded():
            self.send(record["step"], scalars(record, self.config))

    def close(self):
        with self.guarded():
            self.end()

    @contextlib.contextmanager
    def guarded(self):
        """Context manager: warn of an error, once; do not raise it."""
        try:
            yield
        except Exception as e:  # of a library, a network, a disk: nothing that a run depends on
            if not self.failed:
                what = f"--tracker={self.config.tracker} fails ({type(e).__name__}: {e})"
                warn(f"{what}; the run goes on, and log.jsonl has its numbers")
            self.failed = True
            self.send = lambda step, values: None


class TensorBoard(Guarded):
    """Event files in out_dir/tensorboard; those after the step of a resumed run are hidden."""

    def __init__(self, config, log):
        super().__init__(config)
        optional("tensorboard", "--tracker=tensorboard")
        writers = optional("torch.utils.tensorboard", "--tracker=tensorboard")
        folder = Path(config.out_dir) / "tensorboard"
        # From this step on TensorBoard hides what is there: all of the run that --overwrite
        # replaces. The files stay, as others may have written them.
        first = log[-1]["step"] + 1 if log else 0
        self.writer = writers.SummaryWriter(folder, purge_step=first)
        if not log:
            settings = json.dumps(dataclasses.asdict(config), indent=1)
            self.writer.add_text("config", f"```json\n{settings}\n```", 0)

    def send(self, step, values):
        for name, value in values.items():
            if name != "step":
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self):
        self.writer.close()


class Wandb(Guarded):
    """A run of Weights & Biases, whose files are in out_dir/wandb. WANDB_* variables are its own.

    The horizontal axis is `step`: after a rollback the numbers of the steps that are made again
    stand beside the old ones.
    """

    def __init__(self, config, log):
        super().__init__(config)
        wandb = optional("wandb", "--tracker=wandb")
        ids = [r["wandb"] for r in log if isinstance(r.get("wandb"), str)]
        settings = wandb.Settings(silent=True, console="off")
        where = dict(dir=config.out_dir, name=Path(config.out_dir).resolve().name)
        where["project"] = os.environ.get("WANDB_PROJECT", "mdlm")
        how = dict(id=ids[-1], resume="allow") if ids else {}
        try:
            self.run = wandb.init(
                **where | how,
                config=dataclasses.asdict(config),
                settings=settings,
            )
        except wandb.errors.Error as e:
            fix = "type: wandb login, or set WANDB_MODE=offline"
            raise UserError(f"--tracker=wandb cannot begin a run ({e}); {fix}") from e
        self.run.define_metric("*", step_metric="step")
        self.id = None if ids else self.run.id

    def send(self, step, values):
        self.run.log(values)

    def end(self):
        self.run.finish()
