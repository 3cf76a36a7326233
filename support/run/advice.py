"""Advice for a run that cannot continue: sentences that name flags which it accepts."""

from pathlib import Path


def advice(run):
    """What to do when numbers are not finite."""
    rates = "--learning_rate" + " and --muon_lr" * (run.config.optimizer == "muon")
    return go_on(run, f"a lower {rates}, --grad_clip=1, or --dtype=float32")


def advice_on_memory(run):
    """What to do if memory is full."""
    config = run.config
    n = 2 * config.gradient_accumulation_steps
    fixes = []
    if config.batch_size % (2 * run.engine.world * n) == 0:
        fixes.append(f"--gradient_accumulation_steps={n}")
    if not config.recompute:
        fixes.append("--recompute")
    return go_on(run, " or ".join(fixes) or "more memory")


def go_on(run, fix):
    """A sentence on how to continue a run that ended, with other flags."""
    config = run.config
    if not run.clock or run.clock.saved < 0:
        overwrite = "--overwrite and " * config.overwrite
        return f"Nothing is saved yet; start again with {overwrite}{fix}"
    last = Path(config.out_dir) / f"step-{run.clock.saved}"
    return f"The last good checkpoint is {last}; --resume with {fix}"
