"""--tracker=wandb and --tracker=tensorboard: the numbers of log.jsonl in these programs too.

log.jsonl remains the record of a run: whatever a tracker does, the run continues, and reads back
only the id of its wandb run.
"""

import dataclasses
import os
from pathlib import Path

from nanomdlm.support.cli.environment import optional
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.errors import UserError


def start(config, log):
    """Return the Tracker of a run that continues the records in `log`, a list of dicts."""
    starts = dict(wandb=start_wandb, tensorboard=start_tensorboard)
    return starts[config.tracker](config, log)


def start_tensorboard(config, log):
    """Write event files to out_dir/tensorboard; TensorBoard hides those of steps made again."""
    from torch.utils.tensorboard import SummaryWriter

    first = log[-1]["step"] + 1 if log else 0
    writer = SummaryWriter(Path(config.out_dir) / "tensorboard", purge_step=first)

    def send(values):
        for name, value in values.items():
            writer.add_scalar(name, value, values["step"])
        writer.flush()

    return Tracker("tensorboard", send, writer.close)


def start_wandb(config, log):
    """Start a run of Weights & Biases, or continue the one in `log`; its files are in out_dir.

    Its horizontal axis is `step`. WANDB_* variables are its own. Raises UserError without a login.
    """
    wandb = optional("wandb", "--tracker=wandb")
    ids = [record["wandb"] for record in log if "wandb" in record]
    try:
        run = wandb.init(
            id=ids[-1] if ids else None,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "mdlm"),
            name=Path(config.out_dir).resolve().name,
            dir=config.out_dir,
            config=dataclasses.asdict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.errors.Error as e:
        fix = "type: wandb login, or set WANDB_MODE=offline"
        raise UserError(f"--tracker=wandb cannot begin a run ({e}); {fix}") from e
    run.define_metric("*", step_metric="step")
    return Tracker("wandb", run.log, run.finish, run.id)


def scalars(record):
    """Return the numbers of a record, a dict; one of a list is named by its tenth of mask rates."""
    found = {}
    for name, value in record.items():
        values = {name: value}
        if isinstance(value, list):
            values = {f"{name}/{10 * i}-{10 * i + 10}": x for i, x in enumerate(value)}
        found |= {key: x for key, x in values.items() if type(x) in (int, float)}
    return found


class Tracker:
    """Receives the records of log.jsonl. Its first error gives a warning and stops it.

    send(values), end(): functions of its library. id: what --resume needs, if anything
    """

    def __init__(self, name, send=lambda values: None, end=lambda: None, id=None):
        self.name = name
        self.send = send
        self.end = end
        self.id = id

    def add(self, record):
        """Send a record of log.jsonl."""
        self.attempt(lambda: self.send(scalars(record)))

    def close(self):
        """Wait until everything is sent, or kept for later."""
        self.attempt(self.end)

    def attempt(self, do):
        """Call do(); after its first error (of a network, a disk), do nothing."""
        try:
            do()
        except Exception as e:
            what = f"--tracker={self.name} fails ({type(e).__name__}: {e})"
            warn(f"{what}; the run continues, and log.jsonl has its numbers")
            self.send = lambda values: None
            self.end = lambda: None
