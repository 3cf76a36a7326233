"""The clock of a run: its progress, when it is evaluated and saved, and how much is evaluated.

With --time_limit, progress follows the clock. With --max_steps alone the clock is never read for
anything that changes a number: what the run computes follows from its settings, so that a resumed
run repeats it bit for bit. Only extra saves and previews, which change no number, are timed.
"""

import contextlib
import math
import time
from typing import NamedTuple

import torch

from nanomdlm.support.cli import signals
from nanomdlm.support.errors import SharedError
from nanomdlm.support.run import ranks

EVALUATIONS = 10  # per run with --eval_interval=0, however long the run is, including the last one
TIME_FRACTION = 0.05  # of the time so far: evaluations that would take more are left out
# Evaluations on the way of a run that ends by steps, as a fraction of the run's computation.
WORK_FRACTION = 0.02
MIN_WINDOWS = 4  # per evaluation: the mean of fewer is too noisy
BATCHES = 4  # batches of windows that an evaluation on the way of a timed run scores
PREVIEW_CALLS = (6, 16, 64)  # network calls of a preview: minimum, on the way of a timed run, last
CALL_COST = 3  # time of a preview's network call (two texts), in windows: small batches are slow
PREVIEW_SECONDS = 20.0  # a preview may take; on a CPU, a call of a large network takes seconds
LAST_FRACTION = 0.1  # of --time_limit that the last evaluation may take
SAVE_EVERY = 600.0  # seconds between extra saves; longer if saving itself takes long


class Budget(NamedTuple):
    """What an evaluation scores, and its deadlines by time.monotonic()."""

    windows: torch.Tensor  # (n, T)
    passes: int
    calls: int  # network calls of the preview, if there is time for them
    began: float
    scored_until: float
    until: float  # the preview included


class Clock:
    """Times of a run with this config. All ranks must call its methods.

    start: time.monotonic() when the process began
    """

    def __init__(self, config, start):
        self.config = config
        self.limit = config.time_limit or math.inf  # in seconds
        self.start = start
        self.seconds = 0.0  # of the processes that this one resumes
        self.progress = 0.0  # from 0 to 1, by steps or by time
        self.tenth = None  # tenths of the run that were done at the step before
        self.signal = 0  # number of the signal that asked the run to stop, else 0
        self.interrupt = None
        self.phases = dict(evaluations=0.0, saves=0.0)  # seconds of this process in each
        self.started = None  # seconds before its first step, without those
        self.evaluating = [0.0, 0.0]  # seconds of the evaluations on the way, and of the last one
        self.per_window = 0.0  # seconds to score a window once
        self.ending = LAST_FRACTION * config.time_limit  # seconds of the last evaluation
        self.saving = 0.0  # seconds that the last save took
        self.saved = -1  # step of the last checkpoint
        self.saved_at = time.monotonic()
        self.must_save = False  # whether that was long ago

    def elapsed(self):
        """Seconds of the run, in all its processes."""
        return time.monotonic() - self.start + self.seconds

    def training(self):
        """Seconds of this process, without evaluations and saves."""
        return time.monotonic() - self.start - sum(self.phases.values())

    def seconds_by_phase(self):
        """Seconds of this process so far, by what it did, rounded: for the log."""
        training = self.training()
        start = training if self.started is None else self.started
        phases = dict(start=start, steps=training - start) | self.phases
        return {name: round(seconds, 1) for name, seconds in phases.items()}

    # ---- Progress
    def goes_on(self, step):
        """Whether to make step number `step`: no signal came, and the run is not over.

        Updates progress and must_save too. Every rank gets the same answer: the maximum over ranks.
        """
        if self.interrupt is None:  # installed late: before the first step Ctrl-C may simply exit
            self.interrupt = signals.Interrupt()
            self.started = self.training()
        by_steps = step / self.config.max_steps
        by_time = self.elapsed() / (self.limit - self.for_evaluation() - self.for_save())
        # Never go back: the time reserved for the end, and so this estimate, may grow.
        progress = min(1.0, max(by_steps, by_time, self.progress))
        # Extra saves may take a twentieth of the time.
        unsaved = time.monotonic() - self.saved_at > max(SAVE_EVERY, 20 * self.saving)
        values = [progress, self.interrupt.signal, unsaved, *self.evaluating]
        values = ranks.all_reduce(torch.tensor(values, dtype=torch.float64), "MAX").tolist()
        self.progress, signal, unsaved, *self.evaluating = values
        self.signal = int(signal)
        self.must_save = bool(unsaved)
        return not self.signal and self.progress < 1

    def for_evaluation(self):
        """Seconds reserved for the last evaluation; it scores fewer windows if it takes longer."""
        return min(self.ending, LAST_FRACTION * self.limit)

    def for_save(self):
        """Seconds reserved for the last save."""
        return min(self.saving + 2, 0.1 * self.limit)

    # ---- When to evaluate, and how much
    def must_evaluate(self, step):
        """Whether to evaluate and save after `step` steps.

        By default this happens after each tenth of the run. The evaluation after the last step is
        not decided here: it always happens.
        """
        config = self.config
        if step >= config.max_steps:
            return False
        if config.eval_interval or not config.time_limit:
            return step % interval(config) == 0
        tenth = int(self.progress * EVALUATIONS)
        is_due = self.tenth is not None and tenth > self.tenth
        self.tenth = tenth
        return is_due and sum(self.evaluating) <= TIME_FRACTION * self.progress * self.limit

    @contextlib.contextmanager
    def evaluate(self, run, is_last):
        """Context manager: the Budget of an evaluation, whose time is measured. It runs eagerly."""
        if is_last and run.step == 0:
            took = f"after {self.elapsed():.0f} s: nothing is trained; give more time"
            raise SharedError(f"--time_limit={self.limit:g} is over before the first step, {took}")
        began = time.monotonic()
        ranks.STOP = self.interrupt if is_last else None  # it may be long: a signal ends it
        try:
            with torch.compiler.set_stance("force_eager"):  # compile nothing for these shapes
                yield self.budget(run, is_last)
        finally:
            ranks.STOP = None
        took = time.monotonic() - began
        self.phases["evaluations"] += took
        if not is_last and is_trained(run):
            self.evaluating = [self.evaluating[0] + took, took]

    def budget(self, run, is_last):
        """The Budget of the next evaluation."""
        began = time.monotonic()
        windows = run.corpus.windows(self.config.eval_windows)
        W = len(windows)
        n, calls = (W, calls_of(run, PREVIEW_CALLS[2])) if is_last else self.size(run, W)
        if n < W:
            windows = windows[torch.arange(n) * W // n]  # evenly spread over the validation text
        until = self.start - self.seconds + self.limit - 2 - self.saving
        if not is_last:
            until -= self.for_evaluation()
            return Budget(windows, 1, calls, began, until, until)
        run.log.say(f"evaluating on up to {n} windows of validation text")
        preview = min(CALL_COST * calls * self.per_window, LAST_FRACTION / 2 * self.limit)
        preview = min(preview, PREVIEW_SECONDS) + run.log.decoder_windows * self.per_window
        passes = 1 if ranks.is_late(until - preview) else 4
        return Budget(windows, passes, calls, began, until - preview, until)

    def size(self, run, W):
        """How many of W windows an evaluation during the run scores, and the calls of its preview.

        The settings fix it, so that the scores of a run are comparable.
        """
        config = self.config
        least, middle, most = (calls_of(run, calls) for calls in PREVIEW_CALLS)
        if not is_trained(run):  # untrained: every window scores about log V
            return min(MIN_WINDOWS, W), 0
        if config.time_limit:
            return min(BATCHES * config.batch_size, W), middle
        evaluations = (config.max_steps - 1) // interval(config) + bool(config.init_from)
        affordable = int(windows_of_work(config) / max(1, evaluations))
        calls = min(most, affordable // (2 * CALL_COST))
        calls = calls if calls >= least else 0
        return min(W, max(MIN_WINDOWS, (affordable - CALL_COST * calls) // 2)), calls

    def preview_calls(self, run, budget, *results):
        """How many network calls the preview may make after an evaluation: the same on all ranks.

        results: what mdlm.evaluate returned, from whose time the clock learns
        """
        scored = sum(r["passes"] * r["windows"] for r in results)
        self.per_window = max(1e-6, (time.monotonic() - budget.began) / scored)
        # The end of a run: four passes with the averaged weights, one with the raw weights, and the
        # preview. A quarter is added because a machine's speed varies.
        least, _, most = (calls_of(run, calls) for calls in PREVIEW_CALLS)
        preview = min(CALL_COST * most * self.per_window, PREVIEW_SECONDS)
        decoder = run.log.decoder_windows * self.per_window  # what it has forgotten: log.py
        self.ending = 1.25 * (5 * run.eval_windows * self.per_window + preview + decoder)
        left = max(0.0, min(PREVIEW_SECONDS, budget.until - decoder - time.monotonic()))
        left /= CALL_COST * self.per_window
        calls = int(ranks.all_reduce(torch.tensor(min(left, float(budget.calls))), "MIN"))
        return calls if calls >= least else 0

    # ---- Saves
    @contextlib.contextmanager
    def save(self, step):
        """Context manager: the save of a checkpoint, whose time is measured."""
        began = time.monotonic()
        yield
        self.saved = step
        self.saved_at = time.monotonic()
        self.saving = self.saved_at - began
        self.phases["saves"] += self.saving

    def resume(self, state):
        """Continue from the state of a checkpoint."""
        self.seconds = state["seconds"]
        self.ending = state["ending"]
        self.saving = state["saving"]
        self.saved = state["step"]


def is_trained(run):
    """Whether the weights of a run are no longer random."""
    return bool(run.step or run.config.init_from)


def interval(config):
    """Number of steps between evaluations, for a run that ends by steps."""
    if config.eval_interval:
        return config.eval_interval
    # Short runs are evaluated less often: each evaluation needs 2 * MIN_WINDOWS (for the raw and
    # the averaged weights), and together they must stay within WORK_FRACTION.
    affordable = int(windows_of_work(config)) // (2 * MIN_WINDOWS)
    return math.ceil(config.max_steps / min(EVALUATIONS, affordable + 1))


def windows_of_work(config):
    """How many windows all evaluations before the last may score together: WORK_FRACTION of a run.

    Training on a window costs three times as much as scoring it (forward and backward).
    """
    return WORK_FRACTION * 3 * config.max_steps * config.batch_size


def calls_of(run, calls):
    """Network calls for a preview, which mdlm.generate writes: at least one for each piece."""
    T = run.config.block_size
    return max(len(run.objective.pieces(T, 1)), min(T, calls))
