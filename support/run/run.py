"""A run: its model and optimizers, how its steps are computed, and its progress."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanomdlm.support.errors import SharedError
from nanomdlm.support.run import ranks
from nanomdlm.support.run.optimizers import average, scale_gradients


def run_eagerly(function, run, *tensors):
    """Call a function of a step. (graphs.Recorder.call replays it as a CUDA graph.)"""
    return function(run, *tensors)


def exchange_nothing(now):
    """On a single rank, there is nothing to exchange. (Otherwise see shards.exchanger.)"""


@dataclasses.dataclass
class Engine:
    """How the steps of a run are computed: eagerly, unless compiling.compile_network changes it."""

    network: torch.nn.Module  # the model as it is trained: compiled, in DDP
    dtype: torch.dtype  # of matrix products
    ema_weight: torch.Tensor  # () of the newest weights in the averaged ones
    rank: int = 0
    world: int = 1
    call: Callable = run_eagerly
    exchange: Callable = exchange_nothing  # exchange(now): whether backward sums over ranks
    average: Callable = average  # updates the averaged weights
    scale_gradients: Callable = scale_gradients  # to clip them
    compiler: Any = None  # the second process while it compiles, else None


@dataclasses.dataclass
class Run:
    """The state that the steps, reports and checkpoints of a run share."""

    config: Any
    corpus: Any
    model: torch.nn.Module
    averaged: torch.nn.Module  # the EMA of the weights, evaluated and saved; `model` if --ema=0
    optimizers: list
    device: torch.device
    engine: Engine
    log: Any = None  # log.Log
    clock: Any = None  # clock.Clock
    step: int = 0  # steps done
    begins_at: tuple = (0, 0)  # the step that this process began with, the sequences before it
    pending: dict = dataclasses.field(default_factory=dict)  # step -> (loss, norm), not yet read
    loss: float = math.nan  # of the last step that was read
    grad_norm: float = math.nan

    @property
    def objective(self):
        return self.model.objective

    @property
    def micro_batch(self):
        """Sequences of this rank at a time."""
        config = self.config
        return config.batch_size // self.engine.world // config.gradient_accumulation_steps

    @property
    def eval_windows(self):
        """The maximum number of validation windows in the final evaluation."""
        W = self.corpus.n_validation
        return min(self.config.eval_windows or W, W)

    def sequences_before(self, step):
        """Sequences learned before a step. (--resume may have changed batch_size.)"""
        first, before = self.begins_at
        return before + (step - first) * self.config.batch_size

    @property
    def tokens(self):
        """Tokens of text learned so far; for documents, by the mean number per window."""
        return round(self.sequences_before(self.step) * self.corpus.mean_size)

    def check_finite(self):
        """Read the pending losses, averaged over ranks; SharedError for NaN or inf on any rank."""
        if not self.pending:
            return
        values = torch.stack([*self.pending.values()]).cpu().double()
        values = (ranks.all_reduce(values) / self.engine.world).tolist()
        for step, (loss, norm) in zip(self.pending, values, strict=True):
            if not math.isfinite(loss + norm):
                what = f"loss {loss}, gradient norm {norm} at step {step}: not kept."
                raise SharedError(f"{what} {self.advice()}")
        self.pending.clear()
        self.loss, self.grad_norm = values[-1]

    def autocast(self):
        dtype = self.engine.dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    # ---- What to do if it cannot continue: sentences that name flags which it accepts
    def advice(self):
        """If numbers are not finite."""
        rates = "--learning_rate" + " and --muon_lr" * (self.config.optimizer == "muon")
        return self.to_continue(f"a lower {rates}, --grad_clip=1, or --dtype=float32")

    def advice_on_memory(self):
        """If memory is full."""
        config = self.config
        n = 2 * config.gradient_accumulation_steps
        fixes = []
        if config.batch_size % (2 * self.engine.world * n) == 0:
            fixes.append(f"--gradient_accumulation_steps={n}")
        if not config.recompute:
            fixes.append("--recompute")
        return self.to_continue(" or ".join(fixes) or "more memory")

    def to_continue(self, fix):
        if not self.clock or self.clock.saved < 0:
            overwrite = "--overwrite and " * self.config.overwrite
            return f"Nothing is saved yet; start again with {overwrite}{fix}"
        last = Path(self.config.out_dir) / f"step-{self.clock.saved}"
        return f"The last good checkpoint is {last}; --resume with {fix}"
