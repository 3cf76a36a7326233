"""What a run says where the memory is full: sizes, and flags that take less (docs/scale.md)."""

import contextlib

from support import memory
from support.errors import RankError
from support.training import runs


def advice(run):
    """What to do about a full memory: flags that this run accepts."""
    config = run.config
    n = 2 * config.gradient_accumulation_steps
    fixes = []
    if config.batch_size % (2 * run.world * n) == 0:
        fixes.append(f"--gradient_accumulation_steps={n}")
    if not config.recompute:
        fixes.append("--recompute")
    if not fixes:
        fixes = ["a lower --block_size and --n_embd" if run.saved < 0 else "more memory"]
    return runs.go_on(run, " or ".join(fixes))


@contextlib.contextmanager
def explained(run):
    """Context manager: turn an error of a full memory into one sentence, a RankError."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if not memory.is_full(e):
            raise
        config = run.config
        batch = f"{run.micro_batch} sequences of {config.block_size} tokens at a time"
        millions = sum(p.numel() for p in run.model.parameters()) / 1e6
        model = f"{millions:.2f} M parameters in {config.n_layer} layers x {config.n_embd}"
        what = f"out of memory on {run.device}{memory.asked_for(e)}, with {batch}, {model}"
        raise RankError(f"{what}. {advice(run)}") from e
