"""Progress of a run on standard error: a bar on a terminal, otherwise a line from time to time."""

import contextlib
import math
import os
import sys
import time

from support.settings import NO_LIMIT
from support.terminal import is_terminal

REFRESH = 0.2  # seconds between updates of the bar
BAR_COLUMNS = len("100%|| ") + 16  # terminal columns of percentage and bar; the rest is for text
FIRST_GAP = 10.0  # seconds between lines in the first minute
LATER_GAP = 30.0  # seconds between lines afterwards


def duration(seconds):
    """Format seconds as h:mm:ss or m:ss: 3723 gives "1:02:03", infinity gives "?"."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def open_bar():
    """Return a tqdm bar, or None if standard error is no terminal or tqdm is not installed."""
    if not is_terminal(sys.stderr):
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None

    class Bar(tqdm):
        monitor_interval = 0  # no monitor thread: the bar is only redrawn on request

    layout = "{percentage:3.0f}%|{bar:16}| {desc}"
    # nrows: tqdm draws nothing on a terminal that reports too few rows. A fixed value avoids that.
    return Bar(total=1.0, bar_format=layout, ncols=columns(), nrows=24)


def columns():
    """Return the width of the terminal in columns; 80 if it is unknown."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a stream without a file
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 80


def first_that_fit(words, room):
    """Join words with commas, leaving out the last ones if the line exceeds `room` columns.

    At least the first word is kept; no word is cut.
    """
    while len(", ".join(words)) > room and len(words) > 1:
        words = words[:-1]
    return ", ".join(words)


class Progress:
    """Shows step, time, loss and speed of a run on standard error.

    Messages worth keeping go to standard output instead, through `say` (Log.say).
    """

    def __init__(self, run, say):
        self.run = run
        self.say = say
        self.began = (run.step, time.monotonic())
        self.shown_at = -math.inf  # time.monotonic() of the last update
        self.shown = None  # step and progress of the last update
        self.speed_from = (run.tokens, self.began[1])  # start of the current speed measurement
        self.speed = 0.0  # tokens/s
        self.bar = open_bar()

    def show(self):
        """Update the display if enough time has passed since the last update."""
        now = time.monotonic()
        if self.run.step == self.began[0]:  # before the first step there is no speed yet
            return
        gap = REFRESH
        if self.bar is None:
            gap = FIRST_GAP if now - self.began[1] < 60 else LATER_GAP
        if now - self.shown_at >= gap:
            self.draw()

    def draw(self):
        """Update the display now."""
        run = self.run
        self.shown_at = time.monotonic()
        self.shown = (run.step, run.clock.progress)
        done = (
            math.floor(100 * min(1.0, run.clock.progress)) / 100
        )  # round down: 99.6 % is not done
        if self.bar is None:
            text = ", ".join(self.describe("{} elapsed, {} left"))
            self.say(f"{done:4.0%} {text}", sys.stderr)
            return
        self.bar.n = done
        self.bar.ncols = columns()
        text = first_that_fit(self.describe("{}<{}"), self.bar.ncols - BAR_COLUMNS)
        self.bar.set_description_str(text, refresh=False)
        self.call_bar("refresh")

    def call_bar(self, method):
        """Call a method of the bar, if there is one. A terminal that was closed is ignored."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                getattr(self.bar, method)()

    def describe(self, time_format):
        """Return step, times, loss and speed as words, the most important first.

        time_format: a format string for the elapsed and the remaining time.
        """
        run = self.run
        self.measure()
        step = f"step {run.step}"
        if run.config.max_steps < NO_LIMIT:
            step += f"/{run.config.max_steps}"
        words = [
            step,
            time_format.format(duration(run.clock.elapsed()), duration(self.seconds_left())),
        ]
        if math.isfinite(run.loss):  # NaN until the first loss has been read from a GPU
            words.append(f"loss {run.loss:.4f}")
        words.append(f"{self.speed:,.0f} tokens/s")
        return words

    def measure(self):
        """Update the speed, averaged over at least 2 s so that the number is readable."""
        now = time.monotonic()
        tokens, since = self.speed_from
        if now - since >= 2 or not self.speed:
            self.speed = (self.run.tokens - tokens) / max(now - since, 1e-3)  # clocks are coarse
            self.speed_from = (self.run.tokens, now)

    def restart_clock(self, tokens):
        """Exclude the time until now, for example of an evaluation, from tokens/s."""
        self.speed_from = (tokens, time.monotonic())

    def seconds_left(self):
        """Estimate the seconds until the run ends, including its last evaluation.

        After the last step they are 0.
        """
        run = self.run
        if run.clock.progress >= 1:  # the last evaluation says how long it takes
            return 0.0
        left = math.inf
        if run.config.time_limit:
            left = run.config.time_limit - run.clock.elapsed()
        steps = run.step - self.began[0]
        if steps and run.config.max_steps < NO_LIMIT:
            per_step = (time.monotonic() - self.began[1]) / steps
            remaining = (run.config.max_steps - run.step) * per_step
            left = min(left, remaining + run.clock.ending + run.clock.saving)
        return max(0.0, left)

    @contextlib.contextmanager
    def hidden(self):
        """Context manager: hide the bar while other lines are printed."""
        self.call_bar("clear")
        yield
        self.call_bar("refresh")

    def close(self):
        """Show the final state and leave the bar on the terminal."""
        run = self.run
        is_new = run.step > self.began[0] and self.shown != (run.step, run.clock.progress)
        if is_new or self.bar is not None:
            self.draw()
        self.call_bar("close")
        self.bar = None
