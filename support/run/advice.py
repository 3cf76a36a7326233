"""Advice for a run that cannot continue: sentences that name flags which it accepts."""

from pathlib import Path

import torch


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
    """A sentence on how to continue a run that ended, with other flags."""
    config = run.config
    if saved_step(run) < 0:
        overwrite = "--overwrite and " * config.overwrite
        return f"Nothing is saved yet; start again with {overwrite}{fix}"
    last = Path(config.out_dir) / f"step-{saved_step(run)}"
    return f"The last good checkpoint is {last}; --resume with {fix}"


def saved_step(run):
    """The step of the last checkpoint of a run, -1 for none."""
    return run.clock.saved if run.clock else -1


# ---- A full memory
def advice_on_memory(run):
    """What to do if memory is full: flags that this run accepts."""
    config = run.config
    n = 2 * config.gradient_accumulation_steps
    fixes = []
    if config.batch_size % (2 * run.engine.world * n) == 0:
        fixes.append(f"--gradient_accumulation_steps={n}")
    if not config.recompute:
        fixes.append("--recompute")
    if not fixes:
        fixes = ["a lower --block_size and --n_embd" if saved_step(run) < 0 else "more memory"]
    return go_on(run, " or ".join(fixes))
