"""What a run says where the memory is full: sizes, and flags that take less (docs/scale.md)."""

import contextlib

from support import memory
from support.errors import RankError
from support.training.advice import go_on, saved_step


def advice(run):
    """What to do about a full memory: flags that this run accepts."""
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


@contextlib.contextmanager
def explained(here):
    """Context manager: turn an error of a full memory into one sentence, a RankError.

    here: a session, whose run is there once it has begun
    """
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        run = here.run
        if not memory.is_full(e) or run is None:
            raise
        config = run.config
        batch = f"{run.micro_batch} sequences of {config.block_size} tokens at a time"
        millions = sum(p.numel() for p in run.model.parameters()) / 1e6
        model = f"{millions:.2f} M parameters in {config.n_layer} layers x {config.n_embd}"
        what = f"out of memory on {run.device}{memory.asked_for(e)}, with {batch}, {model}"
        raise RankError(f"{what}. {advice(run)}") from e
