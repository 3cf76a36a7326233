"""Losses and gradient norms of steps. They are read late: reading makes Python wait for a GPU."""

import math
from pathlib import Path

import torch

from support import ranks
from support.errors import SharedError


class Losses:
    """Of the steps of a run, averaged over its ranks.

    pending: step -> (2,) loss and gradient norm, not yet read. loss, grad_norm: the last ones read
    """

    def __init__(self):
        self.pending = {}
        self.loss = self.grad_norm = math.nan


def check_finite(run):
    """Read the pending losses of a run; SharedError for NaN or inf on any rank."""
    losses = run.losses
    if not losses.pending:
        return
    values = torch.stack([*losses.pending.values()]).cpu().double()
    values = (ranks.all_reduce(values) / run.engine.world).tolist()
    for step, (loss, norm) in zip(losses.pending, values, strict=True):
        if not math.isfinite(loss + norm):
            what = f"loss {loss}, gradient norm {norm} at step {step}: not kept."
            raise SharedError(f"{what} {advice(run)}")
    losses.pending.clear()
    losses.loss, losses.grad_norm = values[-1]


# ---- What to do about a run that cannot go on
def advice(run):
    """What to do when numbers are not finite: flags that the run accepts."""
    config = run.config
    fixes = ["a lower --learning_rate"]
    if config.optimizer == "muon":
        fixes[0] += " and --muon_lr"
    if not config.grad_clip:
        fixes.append("--grad_clip=1")
    if run.engine.dtype != torch.float32:
        fixes.append("--dtype=float32")
    return go_on(run, ", or ".join(fixes))


def go_on(run, fix):
    """How a run that ended goes on with other flags: a sentence."""
    config = run.config
    if saved_step(run) < 0:
        overwrite = "--overwrite and " * config.overwrite
        return f"Nothing is saved yet; start again with {overwrite}{fix}"
    last = Path(config.out_dir) / f"step-{saved_step(run)}"
    return f"The last good checkpoint is {last}; --resume with {fix}"


def saved_step(run):
    """The step of the last checkpoint of a run, -1 for none."""
    return run.clock.saved if run.clock else -1
