"""Computes the requests of many clients in one thread, and merges their network calls.

Each request is an ordinary function that writes, fills or ranks texts. It runs in a greenlet, a
function that can be put aside in the middle: in place of the network it is given a Standin, whose
call puts the request aside and hands its View to the engine. As soon as every request waits for the
network, the engine computes the Views that wait longest in one call (support/infill/batching.py).

So each request has a plan, an order and a temperature of its own, and long texts do not hold up
short ones by more than a call. A request that is given up, or takes too long, ends at its next
call.
"""

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from nanomdlm.support.cli.entry import is_out_of_memory
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.infill.batching import are_alike, compute
from nanomdlm.support.infill.model_calls import call_size
from nanomdlm.support.infill.shared_padding import compute_once
from nanomdlm.support.run.calibration import calibrated
from nanomdlm.support.view import View


class GivenUp(Exception):
    """Raised in a request, at a network call, when its client has left."""


class TookTooLong(Exception):
    """Raised in a request, at a network call, after its time limit."""


class Full(Exception):
    """Raised by Engine.submit: too many requests wait."""


class Closed(Exception):
    """Raised by Engine.submit, and in requests that are cut short: the server stops."""


class Standin:
    """Stands in for a model, in a request: its calls wait until the engine has computed them."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, view, *more, **rows):
        if not isinstance(view, View):
            view = self.model.objective.view(view, *more, **rows)
        return getcurrent().parent.switch((self.model, view))

    def calibrated(self):
        return Standin(calibrated(self.model))


@dataclass
class Request:
    """A function that is computed, and who is told what comes of it."""

    work: Callable  # work(Standin) -> its result
    done: Callable  # done(result, error) is called once, in the engine's thread; one is None
    deadline: float = float("inf")  # time.monotonic() after which it ends
    error: Exception | None = None  # is raised in it at its next network call
    thread: greenlet | None = None  # once it has begun
    waits_for: Any = None  # (model, View)
    calls: int = 0

    def give_up(self):
        """End it at its next network call; from any thread."""
        self.error = self.error or GivenUp()


@dataclass
class Counts:
    """What an engine has done so far."""

    calls: int = 0  # network calls
    merged_calls: int = 0  # calls of requests that these were
    rows: int = 0  # sequences in network calls
    network_tokens: int = 0  # tokens in network calls
    network_seconds: float = 0.0  # seconds in network calls
    busy_seconds: float = 0.0  # seconds of work
    shed: int = 0  # calls taken apart as memory was full
    given_up: int = 0  # requests whose clients had left


@dataclass
class Engine:
    """Runs Requests. `run` is its loop, for a thread; other methods may be called from any.

    most_active: requests that are computed at a time; others wait
    most_waiting: those that may wait; `submit` raises Full for more
    """

    device: torch.device
    most_active: int = 64
    most_waiting: int = 256
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self):
        self.new = deque()  # Requests that have not begun
        self.active = deque()  # those that wait for the network, the longest waiting first
        self.n_active = 0  # of all that have begun
        self.changed = threading.Condition()
        self.closing = False
        self.quick = functools.cache(compute_once)
        self.most_sequences = None  # in a call, after memory was full

    @property
    def room(self):
        """How many requests it takes at a time."""
        return self.most_active + self.most_waiting

    # ---- For other threads
    def submit(self, request):
        """Add a Request; Full if too many wait, Closed after `close`."""
        with self.changed:
            if self.closing:
                raise Closed()
            if self.n_active + len(self.new) >= self.room:
                raise Full()
            self.new.append(request)
            self.changed.notify()

    def close(self):
        """Cut short what is not finished, and end the loop."""
        with self.changed:
            self.closing = True
            self.changed.notify()

    def waiting(self):
        """(how many requests wait to begin, how many are computed)"""
        return len(self.new), self.n_active

    # ---- The loop
    @torch.no_grad()
    def run(self):
        """Compute Requests until `close`."""
        while True:
            with self.changed:
                while not (self.new or self.active or self.closing):
                    self.changed.wait()
                if self.closing:
                    break
            began = time.monotonic()
            self.begin_new()
            self.end_some()
            if self.active:
                for request, logits, error in self.computed(self.choose()):
                    self.resume(request, logits, error)
            self.counts.busy_seconds += time.monotonic() - began
        while self.active:
            self.resume(self.active.popleft(), error=Closed())
        for request in self.new:
            request.done(None, Closed())

    def begin_new(self):
        while self.new and self.n_active < self.most_active:
            with self.changed:
                request = self.new.popleft()
            self.resume(request)

    def end_some(self):
        """Raise in requests what ends them: their client has left, or their time is over.

        Those that wait end too, to make room.
        """
        now = time.monotonic()
        for request in [*self.new, *self.active]:
            if request.error is None and now > request.deadline:
                request.error = TookTooLong()
            if request.error:
                with self.changed:
                    (self.active if request.thread else self.new).remove(request)
                self.resume(request, error=request.error)

    def resume(self, request, logits=None, error=None):
        """Run a request until it waits for the network again, or ends."""
        if request.thread is None:
            self.n_active += 1
            if error or request.error:
                self.finish(request, None, error or request.error)
                return
            request.thread = greenlet(lambda *_: request.work(Standin))
        try:
            if error:
                answer = request.thread.throw(error)
            else:
                answer = request.thread.switch(logits)
        except Exception as e:
            self.finish(request, None, e)
            return
        if request.thread.dead:
            self.finish(request, answer, None)
        else:
            request.waits_for = answer
            self.active.append(request)

    def finish(self, request, result, error):
        self.n_active -= 1
        self.counts.given_up += isinstance(error, (GivenUp, Closed))
        with contextlib.suppress(RuntimeError):  # whom to tell is gone: the server has stopped
            request.done(result, error)

    # ---- The network
    def choose(self):
        """Take the requests of the next call: the longest waiting one, and those that go with it.

        How many texts in one piece a CPU takes, `most_sequences` says.
        """
        first = self.active.popleft()
        model, view = first.waits_for
        most = self.most_sequences or most_sequences(model, view, self.device)
        chosen = [first]
        size = len(view.ids)
        kept = deque()
        while self.active:
            request = self.active.popleft()
            other_model, other = request.waits_for
            fits = size + len(other.ids) <= most
            if fits and other_model is model and are_alike(view, other):
                chosen.append(request)
                size += len(other.ids)
            else:
                kept.append(request)
        self.active = kept
        return chosen

    def computed(self, requests):
        """[(request, its logits or None, an error or None)] of one call.

        If that fails, each is computed alone, so that a mistake of one fails no other. A full
        memory lowers how much is merged from then on.
        """
        try:
            return list(zip(requests, self.compute(requests), [None] * len(requests)))
        except Exception as e:
            error = e
        is_full = is_out_of_memory(error)
        if is_full:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.counts.shed += 1
            n = sum(len(request.waits_for[1].ids) for request in requests)
            self.most_sequences = max(1, n // 2)
        if len(requests) == 1:
            return [(requests[0], None, error)]
        return [result for request in requests for result in self.computed([request])]

    def compute(self, requests):
        """The logits of each of the requests, which wait for one model."""
        model = requests[0].waits_for[0]
        views = [request.waits_for[1] for request in requests]
        began = time.monotonic()
        if views[0].cache is None:
            model = self.quick(model)
        results = compute(model, views)
        counts = self.counts
        counts.calls += 1
        counts.merged_calls += len(views)
        counts.rows += sum(len(view.ids) for view in views)
        counts.network_tokens += sum(view.ids.numel() for view in views)
        counts.network_seconds += time.monotonic() - began
        for request in requests:
            request.calls += 1
        return results


def most_sequences(model, view, device):
    """How many sequences like those of a View one call takes at most.

    On a CPU the hidden numbers of an MLP, four times as wide as the network, take at most 2 MiB:
    in a network of 256 a call of two texts of 256 tokens costs as much for each as a call of one,
    and a call of four a fifth more, as they no longer fit into a core's cache.
    """
    if view.cache is None:
        most = call_size(model, device)
        if device.type == "cpu":
            most = min(most, (1 << 17) // (model.config.block_size * model.config.n_embd))
        return max(1, most)
    tokens = (1 << 10) if device.type == "cpu" else (1 << 15)
    return max(1, tokens // view.ids.shape[1])


def start(engine):
    """Run an engine in a thread; returns the thread. If the loop fails, the process ends: without
    it no request would ever be answered."""

    def run():
        try:
            engine.run()
        except BaseException as e:
            warn(f"serve.py: the engine failed ({type(e).__name__}), so the server ends")
            os._exit(70)

    thread = threading.Thread(target=run, name="engine", daemon=True)
    thread.start()
    return thread
