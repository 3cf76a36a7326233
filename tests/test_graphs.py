"""CUDA graphs of training steps, as far as a machine without a GPU can tell (see test_gpu.py)."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from conftest import corpus_of

import bench
import mdlm
from nanomdlm.kernels import operations as kernels
from nanomdlm.support.run import compiling, graphs, optimizers
from nanomdlm.support.run.run import run_eagerly


class Graph:
    """Stands in for torch.cuda.CUDAGraph: what is called while it records is called by replay."""

    def replay(self):
        for work in self.works:
            work()


@pytest.fixture
def recording(monkeypatch):
    """Graphs that are being recorded, one at most."""
    now = []

    @contextlib.contextmanager
    def record(graph, pool):
        graph.works = []
        now.append(graph)
        yield
        now.clear()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    return now


def steps(recording, n, before=0):
    """A step is forward, update; `before` forwards come first. What each step has computed."""
    run = SimpleNamespace(model=torch.nn.Linear(1, 1), seen=[])
    out = torch.zeros(())

    def forward(run, x):
        def work():
            out.copy_(x * 2)

        recording[0].works.append(work) if recording else work()
        return out

    def update(run):
        def work():
            run.seen.append(out.item())

        recording[0].works.append(work) if recording else work()

    recorder = graphs.Recorder(last=update)
    for _ in range(before):
        recorder.call(forward, run, torch.tensor(-1.0))
    recorded = []
    for i in range(n):
        recorder.call(forward, run, torch.tensor(float(i)))
        recorder.call(update, run)
        recorded.append(len(recorder.recorded))
    return run.seen, recorded


@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_step_is_recorded_as_a_whole(recording, before):
    """Also where its first function was called before: to compile it, say."""
    seen, recorded = steps(recording, 8, before)
    assert seen == [2.0 * i for i in range(8)]
    assert set(recorded) == {0, 2} and recorded.index(2) == graphs.WARM_UP


def test_what_cannot_be_recorded_is_called(recording, monkeypatch, capsys):
    """A function that waits for the GPU, say; each step is still computed once."""

    @contextlib.contextmanager
    def fails(graph, pool):
        yield
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    run = SimpleNamespace(model=torch.nn.Linear(2, 1))
    p = run.model.weight
    calls = []

    def backward(run):
        calls.append(p.grad)
        p.grad = torch.ones_like(p)

    recorder = graphs.Recorder(last=backward)
    for _ in range(graphs.WARM_UP + 3):
        p.grad = None
        recorder.call(backward, run)
    assert recorder.failed and len(calls) == graphs.WARM_UP + 4
    assert all(grad is None for grad in calls), "of the recording that failed"
    said = capsys.readouterr().err
    assert said.count("operation not permitted") == 1 and said.count("\n") == 1


def test_gradients_are_clipped_alike_without_reading_the_norm(monkeypatch):
    """What a GPU does: it scales always."""
    for size in (0.01, 10.0):
        clipped = []
        for is_async in (True, False):
            monkeypatch.setattr(optimizers, "is_async", lambda device, a=is_async: a)
            g = torch.Generator().manual_seed(0)
            params = [torch.nn.Parameter(torch.zeros(n, 3)) for n in (4, 5)]
            for p in params:
                p.grad = size * torch.randn(p.shape, generator=g)
            norm = optimizers.clip_gradients(params, 1.0)
            clipped.append([norm, *(p.grad for p in params)])
        assert (clipped[0][0] > 1) == (size > 1)
        torch.testing.assert_close(*clipped)


def test_the_average_that_is_compiled_is_the_same():
    g = torch.Generator().manual_seed(0)
    averaged, weights = ([torch.randn(n, 3, generator=g) for n in (2, 5)] for _ in range(2))
    for share in (0.0, 0.1, 0.7, 1.0):
        results = [[x.clone() for x in averaged] for _ in range(2)]
        optimizers.average(results[0], weights, torch.tensor(share))
        optimizers.average_to_compile(results[1], weights, torch.tensor(share))
        torch.testing.assert_close(*results)


@pytest.fixture
def without_values(monkeypatch, tmp_path):
    """A run on PyTorch's meta device, whose tensors have shapes alone, in place of a GPU.

    There, reading a value raises, and so does a shape that depends on values: what would make
    Python wait for a GPU, and what a CUDA graph cannot record.
    """

    def start(**settings):
        small = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, vocab_size=20)
        config = mdlm.Config(**small | dict(dropout=0.1, ema=0.9) | settings)
        bench.write_tokens(tmp_path, 20)
        device = torch.device("meta")
        machine = mdlm.devices.Machine(device, torch.float32, kernels.select("torch"))
        run = mdlm.make_run(config, corpus_of(tmp_path, config, device), machine)
        drawn = mdlm.draw_batch(run, 0, 0.0, torch.arange(4))
        nothing = contextlib.nullcontext()  # autocast has no such device
        monkeypatch.setattr(type(run), "autocast", lambda run: nothing)
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
        monkeypatch.setattr(optimizers, "is_async", lambda device: True)
        return run, drawn

    return start


@pytest.mark.parametrize(
    "settings",
    [{}, dict(optimizer="adamw", tie=True, attention_every=2), dict(conv=0, block_length=4)],
    ids=str,
)
def test_a_step_reads_no_value(without_values, settings):
    """So it can be recorded, also without torch.compile."""
    run, drawn = without_values(**settings)
    loss = mdlm.backward(run, *drawn)
    norm = mdlm.clip(run)
    mdlm.update(run)
    assert loss.is_meta and norm.is_meta and loss.shape == norm.shape == ()


@pytest.mark.parametrize(
    "wait",
    [torch.Tensor.item, torch.Tensor.nonzero, lambda x: x[x > 0]],
    ids=["item", "nonzero", "index by a mask"],
)
def test_a_step_that_waits_for_the_gpu_is_found(without_values, monkeypatch, wait):
    run, drawn = without_values()
    loss = type(run.objective).loss

    def waits(self, *args):
        wait(loss(self, *args))

    monkeypatch.setattr(type(run.objective), "loss", waits)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)meta"):
        mdlm.backward(run, *drawn)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("settings", "alike", "is_recorded"),
    [
        ({}, False, True),
        (dict(gradient_accumulation_steps=2), False, False),
        (dict(network="x"), False, False),
        (dict(network="x"), True, True),
    ],
    ids=str,
)
def test_steps_on_a_gpu_are_recorded(
    recording, monkeypatch, compiled, settings, alike, is_recorded
):
    """Whether they are compiled or not.

    alike: what a pretrained network says of its steps
    """
    monkeypatch.setattr(compiling, "compile_parts", lambda run, in_background: False)
    engine = SimpleNamespace(world=1, dtype=torch.float32, call=run_eagerly, average=None)
    config = mdlm.Config(**settings)
    objective = SimpleNamespace(steps_are_alike=True)
    device = torch.device("cuda")
    run = SimpleNamespace(engine=engine, config=config, device=device, objective=objective)
    run.model = SimpleNamespace(steps_are_alike=alike)
    compiling.compile_network(run, compiled)
    assert (engine.call is not run_eagerly) == is_recorded
    assert (engine.average is not None) == (is_recorded and not compiled)
