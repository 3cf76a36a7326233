"""How far a run is; when it is evaluated and saved; how much of its time the evaluations take.

A run with --time_limit goes by the clock. In a run with --max_steps alone no clock enters: what it
computes follows from its settings, so that a resumed run repeats it to the bit. Only the moments
of additional saves, which change no number, are told by the clock.
"""

import contextlib
import math
import time
from typing import NamedTuple

import torch

from support import ranks
from support.errors import SharedError
from support.training.runs import advice
from support.training.scores import unigram_entropy

EVALUATIONS = 10  # of a run, however long it is, with --eval_interval=0; the last one included
SHARE = 0.03  # of a run's time, for all evaluations but the last, raw weights and previews too
SHARE_OF_WORK = 0.02  # the same by computation: they run eagerly, and in small batches
FEWEST = 4  # windows of an evaluation: fewer say too little
PREVIEW = (6, 64)  # the fewest and the most network calls for the texts that are shown
CALL = 3  # what a call for two texts costs, in windows: small batches are slow
SAVE_EVERY = 600.0  # seconds, or more where saving itself takes long


# ---- How far a run is
def update_progress(run, interrupt):
    """Update run.progress and run.save_is_due; returns the signal to stop for, or 0.

    All are the same on all ranks.
    """
    progress = run.step / run.config.max_steps
    limit = run.config.time_limit
    if limit:
        progress = max(progress, run.elapsed() / (limit - seconds_for_the_end(run)))
    progress = max(progress, run.progress)
    unsaved = time.monotonic() - run.saved_at > max(SAVE_EVERY, 20 * run.saving)
    values = torch.tensor([progress, interrupt.signal, unsaved], dtype=torch.float64)
    run.progress, stop, run.save_is_due = ranks.all_reduce(values, "MAX").tolist()
    return int(stop)


def check_steps(run):
    """Raise SharedError for a run that has no time left for a single step."""
    if run.step == 0:
        given = f"--time_limit={run.config.time_limit:g} is over before the first step"
        took = f"after {run.elapsed():.0f} s: nothing is trained; give more time"
        raise SharedError(f"{given}, {took}")


# ---- When to evaluate
def must_evaluate(run):
    """Whether an evaluation, and a save, follow the step that was just made.

    By default one follows each tenth of the run. (The one after the last step is not asked for.)
    """
    config = run.config
    if run.step >= config.max_steps:
        return False
    if config.eval_interval or not config.time_limit:
        return run.step % interval(config) == 0
    tenth = int(run.progress * EVALUATIONS)
    before = run.tenth
    run.tenth = tenth
    return before is not None and tenth > before


def interval(config):
    """Steps between evaluations of a run that ends by steps."""
    if config.eval_interval:
        return config.eval_interval
    affordable = int(windows_of_work(config)) // (2 * FEWEST)
    return math.ceil(config.max_steps / min(EVALUATIONS, affordable + 1))


def windows_of_work(config):
    """How many windows all evaluations on the way may score: SHARE_OF_WORK of the run.

    A step is three times the work of a forward pass.
    """
    return SHARE_OF_WORK * 3 * config.max_steps * config.batch_size


# ---- On how much
class Plan(NamedTuple):
    """What an evaluation scores, and until when."""

    windows: torch.Tensor  # (n, T)
    passes: int
    calls: int  # network calls of the preview, if there is time for them
    until: float  # the end of both, on the clock of time.monotonic()
    scored_until: float  # the end of the evaluation


def is_unmeasured(run):
    """Whether the time that a window takes must be known now, and is not."""
    is_trained = run.step or run.config.init_from
    return bool(run.config.time_limit and is_trained and not run.per_window)


def plan(run, is_last):
    """The Plan of the evaluation that comes now, as far as the run's time allows."""
    n, passes, calls = amounts(run, is_last)
    W = len(run.windows)
    windows = run.windows if n == W else run.windows[torch.arange(n) * W // n]
    until = scored_until = deadline(run, is_last)
    if is_last:  # then a preview is shown in any case
        scored_until -= min(CALL * calls * run.per_window, seconds_for_the_end(run) / 4)
        run.log.say(f"evaluating on {how_much(run, n, until)}")
    if ranks.is_late(scored_until):
        passes = 1
    return Plan(windows, passes, calls, until, scored_until)


def amounts(run, is_last):
    """(windows, passes, network calls of the preview) of the evaluation that comes now."""
    W = len(run.windows)
    least, most = preview_calls(run)
    if is_last:
        return W, 4, most
    if not run.step and not run.config.init_from:  # untrained: all windows alike
        n = run.micro_batch if run.config.time_limit else FEWEST
        return min(n, W), 1, 0
    affordable = int(windows_now(run))
    n = run.few_windows  # the same windows each time
    if not n:
        preview = CALL * min(most, affordable // (2 * CALL))
        n = max(FEWEST, (affordable - preview * (preview >= CALL * least)) // 2)
    calls = max(0, min(most, (affordable - 2 * n) // CALL))
    agreed = ranks.all_reduce(torch.tensor([min(n, W), calls]), "MIN").tolist()
    run.few_windows, calls = agreed
    return run.few_windows, 1, calls if calls >= least else 0


def preview_calls(run):
    """The fewest and the most network calls with which mdlm.generate shows something."""
    T = run.config.block_size
    return tuple(max(run.objective.n_pieces, min(T, calls)) for calls in PREVIEW)


def windows_now(run):
    """How many windows the evaluation that comes now may score, of both weights and in previews."""
    config = run.config
    if config.time_limit:
        return seconds_now(run) / run.per_window
    held = (config.max_steps - 1) // interval(config) + bool(config.init_from)
    return windows_of_work(config) / max(1, held)


def seconds_now(run):
    """Seconds of --time_limit for the evaluation that comes now: SHARE of what has passed."""
    budget = SHARE * run.config.time_limit
    tenth = 1 / EVALUATIONS
    taken = run.evaluating + SHARE * run.seconds  # the processes before had their share
    left = max(0.0, budget * max(run.progress, tenth) - taken)
    return left if run.config.eval_interval else min(left, budget * tenth)


def note(run, plan, score, seconds):
    """Keep a score and the seconds that a window took; returns how many calls to preview with.

    Raises UserError for a score that is not finite. Sets run.score, per_window and ending.
    """
    key = run.objective.metric
    if not math.isfinite(score):
        what = f"validation {key} {score} at step {run.step}: not saved."
        raise SharedError(f"{what} {advice(run)}")
    scored = run.windows[run.objective.scored_mask(run.windows)]
    run.score = dict(name=key, value=score, step=run.step, unigram=unigram_entropy(scored))
    if len(plan.windows) < run.micro_batch and run.per_window:  # small batches are slow
        seconds = min(seconds, run.per_window)
    run.per_window = seconds
    # The end: four passes with the averaged weights, one with the raw ones, samples; and a quarter
    # more, as machines are not always equally fast.
    W = len(run.windows)
    run.ending = 1.25 * (5 * W + CALL * preview_calls(run)[1]) * run.per_window
    return calls_in_time(run, plan.calls, plan.until)


def how_much(run, n, until):
    """Words for the last evaluation, of n windows if there is time: how many, how long."""
    left = max(0.0, until - time.monotonic())
    seconds = min(run.ending, left)
    up_to = "up to " * (run.ending > left + 1)
    about = f", about {seconds:.0f} s" * (seconds >= 2)
    return f"{up_to}{n} windows of validation text{about}"


def calls_in_time(run, calls, until):
    """As many of the `calls` of a preview as there is time for, or 0 if these are too few."""
    if not run.config.time_limit:
        return calls
    in_time = torch.tensor(max(0.0, until - time.monotonic()) / (CALL * run.per_window))
    found = min(calls, int(ranks.all_reduce(in_time, "MIN").item()))
    return found if found >= preview_calls(run)[0] else 0


@contextlib.contextmanager
def counted(run):
    """Add what happens within to the seconds that evaluations on the way have taken."""
    began = time.monotonic()
    yield
    if run.step or run.config.init_from:
        run.evaluating += time.monotonic() - began


def seconds_for_the_end(run):
    """Seconds of --time_limit kept for the end: at most a fifth, then fewer windows are scored."""
    return min(run.ending + run.saving + 2, run.config.time_limit / 5)


def deadline(run, is_last):
    """When the evaluation that begins now must end, on the clock of time.monotonic()."""
    limit = run.config.time_limit
    if not limit:
        return math.inf
    if not run.step and not run.config.init_from:
        return -math.inf  # one batch
    end = run.log.start - run.seconds + limit
    if is_last:
        return end - 2 - run.saving
    return min(end - seconds_for_the_end(run), time.monotonic() + seconds_now(run))
