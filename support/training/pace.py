"""Timing of a run: its progress, when it is evaluated and saved, and how long evaluations may take.

With --time_limit, progress follows the clock. With --max_steps alone the clock is never read for
anything that changes a number: what the run computes follows from its settings, so that a resumed
run repeats it bit for bit. Only extra saves, which change no number, are timed by the clock.
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

EVALUATIONS = 10  # per run with --eval_interval=0, however long the run is, including the last one
TIME_FRACTION = 0.03  # of --time_limit for all evaluations but the last, including previews
# The same limit for runs that end by steps, as a fraction of the run's computation. It is lower
# because evaluations run eagerly and in small batches, which are slower per window.
WORK_FRACTION = 0.02
MIN_WINDOWS = 4  # per evaluation: the mean of fewer is too noisy
PREVIEW_CALLS = (6, 64)  # minimum and maximum of network calls for the texts of a preview
CALL_COST = 3  # time of a preview's network call (two texts), in windows: small batches are slow
SAVE_EVERY = 600.0  # seconds between extra saves; longer if saving itself takes long


# ---- Progress
def update_progress(run, interrupt):
    """Update run.progress (0 to 1) and run.save_is_due; return the signal to stop for, or 0.

    Every rank gets the same values: the maximum over ranks.
    """
    progress = run.step / run.config.max_steps
    limit = run.config.time_limit
    if limit:
        progress = max(progress, run.elapsed() / (limit - seconds_for_the_end(run)))
    # Never go back: the time reserved for the end, and so this estimate, may grow.
    progress = max(progress, run.progress)
    # run.saving: seconds of a save. Extra saves may take a twentieth of the time.
    unsaved = time.monotonic() - run.saved_at > max(SAVE_EVERY, 20 * run.saving)
    values = torch.tensor([progress, interrupt.signal, unsaved], dtype=torch.float64)
    run.progress, stop, run.save_is_due = ranks.all_reduce(values, "MAX").tolist()
    return int(stop)


def check_steps(run):
    """Raise SharedError if the time limit has passed before the first step."""
    if run.step == 0:
        what = f"--time_limit={run.config.time_limit:g} is over before the first step"
        took = f"after {run.elapsed():.0f} s: nothing is trained; give more time"
        raise SharedError(f"{what}, {took}")


# ---- When to evaluate
def must_evaluate(run):
    """Whether to evaluate and save after the step that was just made.

    By default this happens after each tenth of the run. The evaluation after the last step is not
    decided here: it always happens.
    """
    config = run.config
    if run.step >= config.max_steps:
        return False
    if config.eval_interval or not config.time_limit:
        return run.step % interval(config) == 0
    tenth = int(run.progress * EVALUATIONS)
    previous = run.tenth
    run.tenth = tenth
    return previous is not None and tenth > previous


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


# ---- How much to evaluate
class Plan(NamedTuple):
    """What an evaluation scores, and its deadlines."""

    windows: torch.Tensor  # (n, T)
    passes: int
    calls: int  # network calls for the preview, if there is time for them
    until: float  # deadline of evaluation and preview, on the clock of time.monotonic()
    scored_until: float  # deadline of the evaluation alone


def is_unmeasured(run):
    """Whether the time per window is needed now but has not been measured yet."""
    is_trained = run.step or run.config.init_from
    return bool(run.config.time_limit and is_trained and not run.per_window)


def plan(run, is_last):
    """Return the Plan of the next evaluation, within the time that the run has left."""
    n, passes, calls = amounts(run, is_last)
    W = len(run.windows)
    windows = run.windows
    if n < W:
        windows = run.windows[torch.arange(n) * W // n]  # evenly spread over the validation text
    until = deadline(run, is_last)
    scored_until = until
    if is_last:  # reserve time for the preview, which is always shown at the end
        scored_until -= min(CALL_COST * calls * run.per_window, seconds_for_the_end(run) / 4)
        run.log.say(f"evaluating on {describe_amount(run, n, until)}")
    if ranks.is_late(scored_until):
        passes = 1  # no time is left: score as little as possible
    return Plan(windows, passes, calls, until, scored_until)


def amounts(run, is_last):
    """Return (windows, passes, network calls of the preview) of the next evaluation."""
    W = len(run.windows)
    min_calls, max_calls = preview_calls(run)
    if is_last:
        return W, 4, max_calls
    if not run.step and not run.config.init_from:  # untrained: every window scores about log V
        n = run.micro_batch if run.config.time_limit else MIN_WINDOWS
        return min(n, W), 1, 0
    affordable = int(windows_now(run))
    n = run.few_windows  # the same windows at every evaluation, so that scores are comparable
    if not n:
        preview = CALL_COST * min(max_calls, affordable // (2 * CALL_COST))
        if preview < CALL_COST * min_calls:
            preview = 0
        n = max(MIN_WINDOWS, (affordable - preview) // 2)
    calls = max(0, min(max_calls, (affordable - 2 * n) // CALL_COST))
    agreed = ranks.all_reduce(torch.tensor([min(n, W), calls]), "MIN").tolist()
    run.few_windows, calls = agreed
    if calls < min_calls:
        calls = 0
    return run.few_windows, 1, calls


def preview_calls(run):
    """The minimum and maximum number of network calls for a useful preview by mdlm.generate."""
    T = run.config.block_size
    least = len(run.objective.pieces(T, 1))
    return tuple(max(least, min(T, calls)) for calls in PREVIEW_CALLS)


def windows_now(run):
    """How many windows the next evaluation may cost: both weights and the preview together."""
    config = run.config
    if config.time_limit:
        return seconds_now(run) / run.per_window
    n_evaluations = (config.max_steps - 1) // interval(config) + bool(config.init_from)
    return windows_of_work(config) / max(1, n_evaluations)


def seconds_now(run):
    """Seconds that the next evaluation may take: TIME_FRACTION of the time that has passed."""
    budget = TIME_FRACTION * run.config.time_limit
    tenth = 1 / EVALUATIONS
    # run.seconds: the time of earlier processes of a resumed run. They used up their fraction.
    taken = run.evaluating + TIME_FRACTION * run.seconds
    left = max(0.0, budget * max(run.progress, tenth) - taken)
    return left if run.config.eval_interval else min(left, budget * tenth)


def note(run, plan, score, seconds):
    """Store a score and the time per window; return how many calls the preview may make.

    Sets run.score, run.per_window and run.ending. `seconds` is the measured time per window.
    Raises SharedError if the score is not finite.
    """
    key = run.objective.metric
    if not math.isfinite(score):
        what = f"validation {key} {score} at step {run.step}: not saved."
        raise SharedError(f"{what} {advice(run)}")
    scored = run.windows[run.objective.scored_mask(run.windows)]
    run.score = dict(name=key, value=score, step=run.step, unigram=unigram_entropy(scored))
    # Windows in small batches take longer: such a measurement may only lower the estimate.
    if len(plan.windows) < run.micro_batch and run.per_window:
        seconds = min(seconds, run.per_window)
    run.per_window = seconds
    # The end of a run: four passes with the averaged weights, one with the raw weights, and the
    # preview. A quarter is added because a machine's speed varies.
    W = len(run.windows)
    run.ending = 1.25 * (5 * W + CALL_COST * preview_calls(run)[1]) * run.per_window
    return calls_in_time(run, plan.calls, plan.until)


def describe_amount(run, n, until):
    """Describe the last evaluation in words: the number of windows, and the seconds it takes."""
    left = max(0.0, until - time.monotonic())
    seconds = min(run.ending, left)
    text = f"{n} windows of validation text"
    if run.ending > left + 1:
        text = f"up to {text}"
    if seconds >= 2:
        text += f", about {seconds:.0f} s"
    return text


def calls_in_time(run, calls, until):
    """How many of a preview's network calls fit before `until`; 0 if too few for a preview."""
    if not run.config.time_limit:
        return calls
    affordable = torch.tensor(max(0.0, until - time.monotonic()) / (CALL_COST * run.per_window))
    calls = min(calls, int(ranks.all_reduce(affordable, "MIN").item()))
    return calls if calls >= preview_calls(run)[0] else 0


@contextlib.contextmanager
def counted(run):
    """Context manager: add the time spent inside to run.evaluating.

    The evaluation before the first step is not counted: the budget is for those of a trained model.
    """
    began = time.monotonic()
    yield
    if run.step or run.config.init_from:
        run.evaluating += time.monotonic() - began


def seconds_for_the_end(run):
    """Seconds of --time_limit reserved for the last evaluation and save.

    At most a fifth of the limit. If that is not enough, the last evaluation scores fewer windows.
    """
    return min(run.ending + run.saving + 2, run.config.time_limit / 5)


def deadline(run, is_last):
    """When the evaluation that begins now must end, on the clock of time.monotonic()."""
    limit = run.config.time_limit
    if not limit:
        return math.inf
    if not run.step and not run.config.init_from:
        return -math.inf  # untrained: stop after the first batch
    end = run.log.start - run.seconds + limit
    if is_last:
        return end - 2 - run.saving
    return min(end - seconds_for_the_end(run), time.monotonic() + seconds_now(run))
