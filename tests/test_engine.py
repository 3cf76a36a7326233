"""The engine of serve.py: requests that are computed together get what each gets alone."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import ROOT

import mdlm
import sample
from nanomdlm.kernels import operations as kernels
from nanomdlm.support.infill import batching
from nanomdlm.support.infill.shared_padding import compute_once

greenlet = pytest.importorskip("greenlet")
from nanomdlm.support.serving import engine as engines

V = 11
PATIENCE = 120  # seconds, as the machine may have other work


def network(block_length=0, block_size=32, **more):
    """A float32 network whose weights are all random."""
    config = mdlm.Config(n_layer=3, n_head=2, n_embd=32, block_size=block_size, dropout=0.0)
    config.block_length = block_length
    config.attention_every = 2
    config.document_length = "predicted"
    for name, value in more.items():
        setattr(config, name, value)
    torch.manual_seed(1)
    model = mdlm.make_model(config, V, kernels.REFERENCES).eval()
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    return model


# ---- A row does not depend on its batch
def test_texts_in_one_piece_get_the_same_bits_in_any_call():
    """Alone, among others in any order, and with equal padding computed once."""
    check_pieces()


def check_pieces(calls=12, **more):
    model = network(block_size=64, **more)
    quick = compute_once(model)
    g = torch.Generator().manual_seed(0)

    def view():
        B = int(torch.randint(1, 5, (), generator=g))
        x = torch.full((B, 64), model.mask_id)
        for row in x:
            n = int(torch.randint(1, 64, (), generator=g))
            row[:n] = torch.randint(V, (n,), generator=g)
        n = int(torch.randint(1, 12, (), generator=g))
        return model.objective.view(x, rows=torch.randperm(B * 64, generator=g)[:n].sort().values)

    with torch.no_grad():
        views = [view() for _ in range(8)]
        alone = [batching.compute(model, [each])[0] for each in views]
        for _ in range(calls):
            pick = torch.randperm(8, generator=g)[: int(torch.randint(1, 9, (), generator=g))]
            for one in (model, quick):
                found = batching.compute(one, [views[i] for i in pick])
                assert all(a.equal(alone[i]) for a, i in zip(found, pick))


@pytest.mark.parametrize("S", [1, 2, 3, 4, 8])
def test_blocks_get_the_same_bits_in_any_call(S):
    """Each text is at a block of its own, and some see their last block for the first time."""
    check_blocks(S)


def check_blocks(S, **more):
    model = network(S, block_size=24, **more)
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(V, (B, 8 * S), generator=g) for B in (1, 2, 1, 3)]
    begins = [0, 2, 1, 0]

    def view(cache, x, n):
        window = slice(cache.follow(n * S), (n + 1) * S)
        ids = x[:, window].clone()
        ids[:, -S:] = model.mask_id
        rows = torch.arange(ids.numel()).view(ids.shape)[:, -S:].flatten()
        return cache.view(ids, rows)

    def numbers(begin):
        return [n for n in range(begin, begin + 4) for _ in range(2)]

    with torch.no_grad():
        alone = []
        for x, begin in zip(texts, begins):
            cache = model.objective.cache()
            alone.append([batching.compute(model, [view(cache, x, n)])[0] for n in numbers(begin)])
        caches = [model.objective.cache() for _ in texts]
        done = [0] * len(texts)
        while min(done) < 8:
            here = [i for i in range(4) if done[i] < 8 and torch.rand((), generator=g) < 0.6]
            if not here:
                continue
            views = [view(caches[i], texts[i], numbers(begins[i])[done[i]]) for i in here]
            for i, found in zip(here, batching.compute(model, views)):
                assert found.equal(alone[i][done[i]])
                done[i] += 1


def test_two_threads_give_the_same_bits_in_any_call():
    """In a network so wide that MKL shares its products out to both of them."""
    # Set after the import, which sets one thread.
    code = "import torch, test_engine as t; torch.set_num_threads(2); "
    code += "t.check_pieces(4, n_embd=256); t.check_blocks(4, n_embd=256); "
    code += "assert torch.get_num_threads() == 2"
    command = [sys.executable, "-c", code]
    # Threads that wait must not take the processor from each other.
    env = os.environ | dict(OMP_WAIT_POLICY="passive")
    run = subprocess.run(command, cwd=ROOT / "tests", env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# ---- The engine
@contextlib.contextmanager
def running(**limits):
    engine = engines.Engine(torch.device("cpu"), **limits)
    thread = engines.start(engine)
    yield engine
    engine.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


class Answer:
    """Submits a function of a model, and waits for what comes of it."""

    def __init__(self, engine, model, function, deadline=float("inf")):
        self.event = threading.Event()
        self.request = engines.Request(
            lambda stand_in: function(stand_in(model)), self.done, deadline
        )
        engine.submit(self.request)

    def done(self, result, error):
        self.result = result
        self.error = error
        self.event.set()

    def wait(self):
        assert self.event.wait(PATIENCE), "a request was lost"
        if self.error:
            raise self.error
        return self.result


def texts_of(model, seed, **more):
    x = torch.full((2, 32), model.mask_id)
    x[:, : seed % 7] = seed % V
    return sample.generate(model, x, seed=seed, **more)


@pytest.mark.parametrize("S", [0, 4])
def test_requests_together_get_what_each_gets_alone(S):
    """Whatever their steps, orders and temperatures."""
    model = network(S)
    kinds = [{}, dict(steps=48, order="margin"), dict(temperature=0.5), dict(steps=24)]
    alone = [texts_of(model, i, **kinds[i % 4]) for i in range(9)]
    with running() as engine:
        answers = [
            Answer(engine, model, lambda m, i=i: texts_of(m, i, **kinds[i % 4])) for i in range(9)
        ]
        assert all(a.wait().equal(b) for a, b in zip(answers, alone))
    assert engine.counts.calls < 0.6 * engine.counts.merged_calls, "calls are merged"


def test_short_text_does_not_wait_for_a_long_one():
    model = network()
    order = []
    with running() as engine:
        long = Answer(engine, model, lambda m: [texts_of(m, i, steps=30) for i in range(8)])
        long.request.done = lambda *_: (order.append("long"), long.done(*_))
        short = Answer(engine, model, lambda m: texts_of(m, 1, steps=4))
        short.request.done = lambda *_: (order.append("short"), short.done(*_))
        long.wait()
        short.wait()
    assert order == ["short", "long"]


def fails_between_calls(m):
    texts_of(m, 1, steps=4)
    raise ZeroDivisionError


def fails_in_a_call(m):
    return m(m.objective.view(torch.full((1, 32), 99)))  # no such id


@pytest.mark.parametrize(
    "fail, error", [(fails_between_calls, ZeroDivisionError), (fails_in_a_call, IndexError)]
)
def test_request_that_fails_fails_alone(fail, error):
    model = network()
    with running() as engine:
        wrong = Answer(engine, model, fail)
        right = Answer(engine, model, lambda m: texts_of(m, 2, steps=8))
        assert right.wait().equal(texts_of(model, 2, steps=8))
        with pytest.raises(error):
            wrong.wait()


def test_full_memory_lowers_what_is_merged(monkeypatch):
    model = network()
    forward = mdlm.Model.forward

    def limited(self, view, *more):
        if len(view.ids) > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: out of memory")
        return forward(self, view, *more)

    monkeypatch.setattr(mdlm.Model, "forward", limited)
    with running() as engine:
        answers = [Answer(engine, model, lambda m, i=i: texts_of(m, i)) for i in range(6)]
        assert all(a.wait().equal(texts_of(model, i)) for i, a in enumerate(answers))
    assert 1 <= engine.counts.shed <= 3


def test_given_up_request_ends_within_a_call():
    model = network()
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(time.monotonic()))
    with running() as engine:
        answer = Answer(engine, model, lambda m: [texts_of(m, i) for i in range(1000)])
        while len(calls) < 3:
            time.sleep(0.001)
        answer.request.give_up()
        n = len(calls)
        with pytest.raises(engines.GivenUp):
            answer.wait()
        assert len(calls) <= n + 2
    assert engine.counts.given_up == 1


def test_waiting_requests_that_nobody_wants_make_room():
    model = network()
    with running(most_active=1, most_waiting=2) as engine:
        first = Answer(engine, model, lambda m: [texts_of(m, i) for i in range(1000)])
        while engine.waiting()[0]:
            time.sleep(0.001)
        left = Answer(engine, model, lambda m: texts_of(m, 0))
        late = Answer(engine, model, lambda m: texts_of(m, 0), time.monotonic())
        left.request.give_up()
        for answer, error in ((left, engines.GivenUp), (late, engines.TookTooLong)):
            with pytest.raises(error):
                answer.wait()
        assert engine.waiting() == (0, 1)
        first.request.give_up()


def test_limits_of_the_engine():
    model = network()
    with running(most_active=1, most_waiting=1) as engine:
        late = Answer(
            engine, model, lambda m: [texts_of(m, i) for i in range(1000)], time.monotonic() + 0.2
        )
        while engine.waiting()[0]:
            time.sleep(0.001)
        second = Answer(engine, model, lambda m: texts_of(m, 0, steps=2))
        with pytest.raises(engines.Full):
            Answer(engine, model, lambda m: texts_of(m, 0, steps=2))
        with pytest.raises(engines.TookTooLong):
            late.wait()
        second.wait()
    with running(most_active=1, most_waiting=0) as engine:
        first = Answer(engine, model, lambda m: [texts_of(m, i, steps=30) for i in range(8)])
        with pytest.raises(engines.Full):
            Answer(engine, model, lambda m: texts_of(m, 0, steps=2))
        first.wait()
    with pytest.raises(engines.Closed):
        Answer(engine, model, lambda m: texts_of(m, 0, steps=2))
