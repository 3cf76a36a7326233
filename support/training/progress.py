"""How far a run is: a bar on a terminal; elsewhere, or without tqdm, a line now and then."""

import contextlib
import math
import os
import sys
import time

from support.flags import NO_LIMIT

EVERY = 0.2  # seconds between drawings of the bar
BESIDE = len("100%|| ") + 16  # columns of the bar beside its words
SOON, LATER = 10.0, 30.0  # seconds between lines, in the first minute and after it


def duration(seconds):
    """1:02:03 for 3723 seconds; ? for infinity."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def open_bar():
    """A tqdm bar on standard error, or None where that is no terminal or tqdm is not installed."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None

    class Bar(tqdm):
        monitor_interval = 0  # no thread: every drawing is asked for

    shape = "{percentage:3.0f}%|{bar:16}| {desc}"
    return Bar(total=1.0, bar_format=shape, ncols=columns(), nrows=24)  # any number of lines


def columns():
    """The width of the terminal; 80 where it does not say."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a stream without a file
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 80


def first_that_fit(words, room):
    """As many of the words, joined, as `room` columns hold: none is cut in two."""
    while len(", ".join(words)) > room and len(words) > 1:
        words = words[:-1]
    return ", ".join(words)


class Progress:
    """Shown on standard error; what is worth keeping goes to standard output, by Log.say."""

    def __init__(self, run, say):
        self.run = run
        self.say = say
        self.began = (run.step, time.monotonic())
        self.shown_at = -math.inf  # time.monotonic() of the last line or drawing
        self.shown_step = -1
        self.speed_from = (run.tokens, self.began[1])  # since when tokens are counted
        self.speed = 0.0  # tokens/s
        self.bar = open_bar()

    def show(self):
        """Show the state, if it is time to."""
        now = time.monotonic()
        if self.run.step == self.began[0]:
            return
        gap = EVERY
        if self.bar is None:
            gap = SOON if now - self.began[1] < 60 else LATER
        if now - self.shown_at >= gap:
            self.draw()

    def draw(self):
        run = self.run
        self.shown_at = time.monotonic()
        self.shown_step = run.step
        done = math.floor(100 * min(1.0, run.progress)) / 100  # 99.6 % is not 100 %
        if self.bar is None:
            text = ", ".join(self.describe("{} elapsed, {} left"))
            self.say(f"{done:4.0%} {text}", sys.stderr)
            return
        self.bar.n = done
        self.bar.ncols = columns()
        text = first_that_fit(self.describe("{}<{}"), self.bar.ncols - BESIDE)
        self.bar.set_description_str(text, refresh=False)
        self.draw_bar("refresh")

    def draw_bar(self, how):
        """Call a method of the bar; that the terminal is gone ends no run."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                getattr(self.bar, how)()

    def describe(self, times):
        """Step, times (a format), loss and speed: words, of which the last ones matter least."""
        run = self.run
        self.measure()
        of = f"/{run.config.max_steps}" if run.config.max_steps < NO_LIMIT else ""
        times = times.format(duration(run.elapsed()), duration(self.seconds_left()))
        loss = [f"loss {run.loss:.4f}"] if math.isfinite(run.loss) else []  # a GPU's is read late
        return [f"step {run.step}{of}", times, *loss, f"{self.speed:,.0f} tokens/s"]

    def measure(self):
        """Update the speed: over some seconds, so that it can be read."""
        now = time.monotonic()
        tokens, since = self.speed_from
        if now - since >= 2 or not self.speed:
            self.speed = (self.run.tokens - tokens) / max(now - since, 1e-3)  # clocks are coarse
            self.speed_from = (self.run.tokens, now)

    def restart_clock(self, tokens):
        """Leave the time until now out of tokens/s."""
        self.speed_from = (tokens, time.monotonic())

    def seconds_left(self):
        """An estimate for the whole run, with its last evaluation."""
        run = self.run
        left = math.inf
        if run.config.time_limit:
            left = run.config.time_limit - run.elapsed()
        steps = run.step - self.began[0]
        if steps and run.config.max_steps < NO_LIMIT:
            per_step = (time.monotonic() - self.began[1]) / steps
            to_go = (run.config.max_steps - run.step) * per_step
            left = min(left, to_go + run.ending + run.saving)
        return max(0.0, left)

    @contextlib.contextmanager
    def hidden(self):
        """Take the bar off the terminal while other lines are printed."""
        self.draw_bar("clear")
        yield
        self.draw_bar("refresh")

    def close(self):
        """Show the state once more; then the bar stays as it is."""
        if self.run.step > max(self.began[0], self.shown_step) or self.bar is not None:
            self.draw()
        self.draw_bar("close")
        self.bar = None
