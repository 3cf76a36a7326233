"""The clock of a run: its progress, when it is evaluated and saved, and how much is evaluated.

With --time_limit, progress follows the clock. With --max_steps alone the clock is never read for
anything that changes a number: what the run computes follows from its settings, so that a resumed
run repeats it bit for bit. Only extra saves, which change no number, are timed by the clock.
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
LAST_FRACTION = 0.1  # of --time_limit that the last evaluation may take
SAVE_EVERY = 600.0  # seconds between extra saves; longer if saving itself takes long


class Budget(NamedTuple):
    """What an evaluation scores, and its deadline by time.monotonic()."""

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
        self.start = start
        self.seconds = 0.0  # of the processes that this one resumes
        self.progress = 0.0  # from 0 to 1, by steps or by time
        self.tenth = None  # tenths of the run that were done at the step before
        self.signal = 0  # number of the signal that asked the run to stop, else 0
        self.interrupt = None
        self.evaluating = torch.zeros(2, dtype=torch.float64)  # seconds: on the way; the last one
        self.per_window = math.nan  # seconds to score a window once
        self.ending = LAST_FRACTION * config.time_limit  # seconds of the last evaluation
        self.saving = 0.0  # seconds that the last save took
        self.saved = -1  # step of the last checkpoint
        self.saved_at = time.monotonic()
        self.must_save = False  # whether that was long ago

    def elapsed(self):
        """Seconds of the run, in all its processes."""
        return time.monotonic() - self.start + self.seconds

    # ---- Progress
    def goes_on(self, step):
        """Whether to make step number `step`: no signal came, and the run is not over.

        Updates progress and must_save too. Every rank gets the same answer: the maximum over ranks.
        """
        if self.interrupt is None:  # installed late: before the first step Ctrl-C may simply exit
            self.interrupt = signals.Interrupt()
        progress = step / self.config.max_steps
        if limit := self.config.time_limit:
            progress = max(progress, self.elapsed() / (limit - self.seconds_for_the_end()))
        # Never go back: the time reserved for the end, and so this estimate, may grow.
        progress = min(1.0, max(progress, self.progress))
        # Extra saves may take a twentieth of the time.
        unsaved = time.monotonic() - self.saved_at > max(SAVE_EVERY, 20 * self.saving)
        values = torch.tensor([progress, self.interrupt.signal, unsaved, *self.evaluating])
        self.progress, signal, unsaved, *spent = ranks.all_reduce(values, "MAX").tolist()
        self.signal = int(signal)
        self.must_save = bool(unsaved)
        self.evaluating = torch.tensor(spent, dtype=torch.float64)
        return not self.signal and self.progress < 1

    def seconds_for_the_end(self):
        """Seconds of --time_limit reserved for the last evaluation and save.

        If that is not enough, the last evaluation scores fewer windows.
        """
        limit = self.config.time_limit
        return min(self.ending, LAST_FRACTION * limit) + min(self.saving + 2, 0.1 * limit)

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
        return is_due and self.evaluating.sum() <= TIME_FRACTION * self.progress * config.time_limit

    @contextlib.contextmanager
    def evaluate(self, run, is_last):
        """Context manager: the Budget of an evaluation, whose time is measured. It runs eagerly."""
        if is_last and run.step == 0:
            what = f"--time_limit={self.config.time_limit:g} is over before the first step"
            took = f"after {self.elapsed():.0f} s: nothing is trained; give more time"
            raise SharedError(f"{what}, {took}")
        began = time.monotonic()
        budget = self.budget(run, is_last)
        # Eager: compile nothing for these shapes. A signal ends the last one, which may be long.
        interrupt = self.interrupt if is_last else None
        with torch.compiler.set_stance("force_eager"), ranks.stopped_by(interrupt):
            yield budget
        took = time.monotonic() - began
        if not is_last and is_trained(run):
            self.evaluating = torch.tensor([self.evaluating[0] + took, took], dtype=torch.float64)

    def budget(self, run, is_last):
        """The Budget of the next evaluation."""
        windows = run.corpus.windows(self.config.eval_windows)
        W = len(windows)
        n, calls = (W, calls_of(run, PREVIEW_CALLS[2])) if is_last else self.size(run, W)
        if n < W:
            windows = windows[torch.arange(n) * W // n]  # evenly spread over the validation text
        end = self.start - self.seconds + (self.config.time_limit or math.inf)  # of --time_limit
        until = end - 2 - self.saving
        if not is_last:
            until -= min(self.ending, LAST_FRACTION * self.config.time_limit)
        scored_until = until
        if is_last and self.config.time_limit:  # the preview is always shown at the end
            preview = CALL_COST * calls * self.per_window
            scored_until -= min(preview, LAST_FRACTION * self.config.time_limit / 2)
            run.log.say(f"evaluating on {self.describe(n, until)}")
        passes = 4 if is_last and not ranks.is_late(scored_until) else 1
        return Budget(windows, passes, calls, time.monotonic(), scored_until, until)

    def size(self, run, W):
        """How many of W windows an evaluation during the run scores, and the calls of its preview.

        The settings fix it, so that the scores of a run are comparable.
        """
        config = self.config
        if not is_trained(run):  # untrained: every window scores about log V
            return min(MIN_WINDOWS, W), 0
        least = calls_of(run, PREVIEW_CALLS[0])
        if config.time_limit:
            return min(BATCHES * config.batch_size, W), max(least, calls_of(run, PREVIEW_CALLS[1]))
        evaluations = (config.max_steps - 1) // interval(config) + bool(config.init_from)
        affordable = int(windows_of_work(config) / max(1, evaluations))
        preview = CALL_COST * min(calls_of(run, PREVIEW_CALLS[2]), affordable // (2 * CALL_COST))
        if preview < CALL_COST * least:
            preview = 0
        n = min(W, max(MIN_WINDOWS, (affordable - preview) // 2))
        calls = max(0, min(calls_of(run, PREVIEW_CALLS[2]), (affordable - 2 * n) // CALL_COST))
        return n, calls if calls >= least else 0

    def preview_calls(self, run, budget, *results):
        """How many network calls the preview may make after an evaluation: the same on all ranks.

        results: what mdlm.evaluate returned, from whose time the clock learns
        """
        scored = sum(r["passes"] * r["windows"] for r in results)
        self.per_window = max(1e-6, (time.monotonic() - budget.began) / scored)
        # The end of a run: four passes with the averaged weights, one with the raw weights, and the
        # preview. A quarter is added because a machine's speed varies.
        W = run.eval_windows
        self.ending = 1.25 * (5 * W + CALL_COST * calls_of(run, PREVIEW_CALLS[2])) * self.per_window
        if not self.config.time_limit:
            return budget.calls
        left = max(0.0, budget.until - time.monotonic()) / (CALL_COST * self.per_window)
        calls = min(budget.calls, int(ranks.all_reduce(torch.tensor(left), "MIN").item()))
        return calls if calls >= calls_of(run, PREVIEW_CALLS[0]) else 0

    def describe(self, n, until):
        """The last evaluation in words: the number of windows, and the seconds it takes."""
        left = max(0.0, until - time.monotonic())
        text = f"{n} windows of validation text"
        if self.ending > left + 1:
            text = f"up to {text}"
        seconds = min(self.ending, left)
        return text + (f", about {seconds:.0f} s" if seconds >= 2 else "")

    # ---- Saves
    @contextlib.contextmanager
    def save(self, step):
        """Context manager: the save of a checkpoint, whose time is measured."""
        began = time.monotonic()
        yield
        self.saved = step
        self.saved_at = time.monotonic()
        self.saving = self.saved_at - began

    def resume(self, state):
        """Continue from the state of a checkpoint."""
        for name in ("seconds", "ending", "saving"):
            setattr(self, name, state[name])
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
