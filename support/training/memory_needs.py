"""The memory that a run needs: an estimate before it begins, and what to lower if it is not enough.

The estimate counts what must be kept, as the layers of mdlm.py are written. Compiling and the
kernels keep less, allocators lose some: expect the true peak within a factor of FACTOR.
"""

import contextlib

from support import devices, memory
from support.errors import RankError
from support.memory import in_words
from support.terminal import warn
from support.training import runs

FACTOR = (
    1.5  # between the estimate and the peak that was measured, for runs of 0.5 to 4.5 GB on CPUs
)
PROGRAM = 0.5e9  # Python and PyTorch themselves; on a GPU about as much for CUDA and its libraries
TEMPORARY = 50  # numbers for each token and channel that a layer's backward needs beside the kept
SAVED = 1 << 28  # logits that the kernel of the loss makes at a time (kernels/cross_entropy.py)


def estimate(run, most_logits):
    """The bytes that a run needs on this rank's device: a dict {part: bytes}.

    most_logits: how many logits an evaluation makes at a time, at most.
    """
    weights, moments = count_numbers(run)
    averaged = weights if run.averaged is not run.model else 0
    kept = 2 * weights + averaged  # with the gradients
    parts = dict(program=PROGRAM, weights=4 * kept, optimizer=4 * moments)
    tensors = (run.windows, run.corpus.train, run.corpus.val)
    parts["data"] = sum(x.nbytes for x in tensors if x.device == run.device)
    if run.device.type == "cpu":
        parts["data"] = run.windows.nbytes  # ids in files take no memory of their own
    # A step, an evaluation and a save come one after another: the largest counts.
    alternatives = [
        dict(activations=activations(run), logits=logits(run)),
        dict(evaluation=2 * 4 * evaluated(run, most_logits)),
    ]
    if run.device.type == "cpu" and not run.config.shard:  # copies, and the bytes to write
        alternatives.append(dict(saving=2 * 4 * (weights + averaged + moments)))
    return parts | max(alternatives, key=lambda each: sum(each.values()))


def count_numbers(run):
    """(weights, moments of the optimizers) of this rank."""
    weights = 0
    moments = 0
    for optimizer in run.optimizers:
        n_moments = 1 if type(optimizer).__name__ == "Muon" else 2
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            n = (p.to_local() if hasattr(p, "to_local") else p).numel()
            weights += n
            moments += n_moments * n
    return weights, moments


def activations(run):
    """Bytes that the layers keep for the backward pass of a micro-batch."""
    config = run.config
    size = run.dtype.itemsize
    tokens = run.micro_batch * config.block_size * devices.positions_per_token(run.model)
    # Numbers for each token and channel, kept for each layer:
    each = bool(config.conv) + (config.dropout > 0)  # of a convolution and of a dropout
    mlp = 10 + each  # the residual stream, its norm, and twice four after the first matrix
    attention = 8 + each  # the stream, its norm, q, k and v before and after RoPE, the result
    if size < 4:
        mlp += 3  # norms are in float32
        attention += 3
        if run.device.type == "cpu" and config.block_size <= 512:  # attention_ref keeps its scores
            attention += 2 * config.block_size * config.n_head / config.n_embd
    kept = mlp * config.n_layer + attention * devices.attending(run.model)
    if config.recompute:
        kept = config.n_layer + mlp + attention
    numbers = (kept + TEMPORARY) * tokens * config.n_embd
    copies = sum(p.numel() for p in run.model.parameters()) if size < 4 else 0  # of the weights
    return size * (numbers + copies)


def logits(run):
    """Bytes of the logits, their softmax and its gradient."""
    rows = run.micro_batch * run.config.block_size * devices.predicted_fraction(run.model)
    n = rows * run.model.vocab_size
    if run.model.ops.name == "triton":
        return run.dtype.itemsize * min(n, SAVED)
    return 3 * 4 * n


def evaluated(run, most_logits):
    """How many logits an evaluation makes at a time."""
    n = run.config.block_size * run.model.vocab_size  # of a window
    return min(run.micro_batch * n, most_logits)


def say(run, most_logits):
    """Print what the run needs, and warn if the device does not have it."""
    parts = estimate(run, most_logits)
    needed = sum(parts.values())
    there_is = devices.free_memory(run.device)
    sizes = ", ".join(f"{name} {in_words(n)}" for name, n in parts.items() if n >= 1e6)
    of = ""
    if there_is is not None:
        there_is += taken(run)
        of = f" of {in_words(there_is)}"
    run.log.say(f"memory: about {in_words(needed)}{of} ({sizes})")
    if there_is is not None and needed > there_is:
        what = f"this run needs about {in_words(needed)} on {run.device}, which has"
        warn(f"{what} {in_words(there_is)}. {advice(run)}", on_every_rank=True)


def taken(run):
    """Bytes of the estimate that this process has taken already: the program and the weights."""
    weights, _ = count_numbers(run)
    copies = 1 + (run.averaged is not run.model)
    return PROGRAM + 4 * weights * copies


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
