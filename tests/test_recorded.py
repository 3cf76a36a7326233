"""Predictions as CUDA graphs, on a machine without a GPU: a stand-in records and replays kernels.

It does what a graph does: each operation is computed again on the tensors that it had while it was
recorded. What a GPU refuses to record, because Python waits for a value, it refuses as well.
"""

import contextlib
import dataclasses
import functools

import pytest
import torch
from test_engine import V, network, texts_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mdlm
import sample
from nanomdlm.support.cli import terminal
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import batching, recorded
from nanomdlm.support.run import evaluation, graphs
from nanomdlm.support.view import masked_rows

aten = torch.ops.aten
# Python reads a value, or a shape depends on values.
WAITS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero, aten.masked_select}
WAITS |= {aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave}


def waits(operation, args):
    """Whether Python waits for a GPU in an operation."""
    if operation.overloadpacket in (aten.index, aten.index_put, aten.index_put_):  # by a mask
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return operation.overloadpacket in WAITS


def storage(x):
    return x.untyped_storage().data_ptr()


class Graph(TorchDispatchMode):
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self):
        super().__init__()
        self.kernels = []
        self.replays = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if waits(operation, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {operation}")
        out = operation(*args, **kwargs or {})
        self.kernels.append((operation, args, kwargs or {}, out))
        return out

    def replay(self):
        self.replays += 1
        for operation, args, kwargs, out in self.kernels:
            again = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def gpu(monkeypatch):
    """A CPU that replays as a GPU does; the graphs that were recorded."""
    made = []

    @contextlib.contextmanager
    def record(graph, pool, capture_error_mode):
        made.append(graph)
        with graph:
            yield
        for _, args, _, out in graph.kernels:  # nothing is computed before the replay
            given = {storage(x) for x in tree_leaves(args) if torch.is_tensor(x)}
            for x in tree_leaves(out):
                if x.is_floating_point() and storage(x) not in given:
                    x.fill_(float("nan"))

    monkeypatch.setattr(graphs, "warn", pytest.fail)  # of a call that cannot be recorded
    monkeypatch.setattr(graphs.gc, "collect", lambda: None)  # it takes long among all tests
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)

    def can_replay(model, device):
        off = getattr(graphs.SWITCH, "off", False)
        return not (off or torch.is_grad_enabled() or model.training)

    monkeypatch.setattr(graphs, "can_replay", can_replay)
    return made


def ids(B, N=32, seed=0):
    return torch.randint(V + 1, (B, N), generator=torch.Generator().manual_seed(seed))


# ---- The network
def test_predictions_are_recorded_once_for_each_size(gpu):
    """1, 3, 9 and 10 sequences: 9 are computed as 10. The same bits as without a graph."""
    model = network(attention_every=1)
    with torch.no_grad():
        for seed in range(4):
            for B in (1, 3, 9, 10):
                rows = torch.arange(seed, B * 32, 5)
                view = model.objective.view(ids(B, seed=seed), rows=rows)
                (found,) = batching.compute(model, [view])
                with graphs.run_eagerly():
                    assert found.equal(batching.compute(model, [view])[0])
    assert len(gpu) == 3
    assert sum(graph.replays for graph in gpu) == 4 * 4 - 3, "the first call of a size is eager"


@pytest.mark.parametrize("more", [dict(block_length=4), dict(time_conditioning=True)], ids=str)
def test_all_views_are_replayed(gpu, more):
    model = network(**more)
    with torch.no_grad():
        for seed in range(3):
            for x in (ids(2, seed=seed), ids(5, seed=seed)):
                view = model.objective.view(x)
                assert recorded.predict(model, view).equal(model(view))
    assert [graph.replays for graph in gpu] == [2, 2]


def test_results_are_not_overwritten_by_the_next_call(gpu):
    model = network()
    with torch.no_grad():
        found = [
            recorded.predict(model, model.objective.view(ids(1, seed=seed))) for seed in range(5)
        ]
        for seed, logits in enumerate(found):
            assert logits.equal(model(model.objective.view(ids(1, seed=seed))))


def test_new_weights_are_seen(gpu):
    """Those that a step changes in place, and those that replace others."""
    model = network()
    view = model.objective.view(ids(2))

    def check():
        assert recorded.predict(model, view).equal(model(view))

    with torch.no_grad():
        for _ in range(3):
            check()
            for p in model.parameters():
                p.mul_(0.9)
        assert len(gpu) == 1
        for p in model.parameters():
            p.data = p.data.double()
        for name in ("cos", "sin"):
            setattr(model, name, getattr(model, name).double())
        for _ in range(3):
            check()
    assert len(gpu) == 2


def test_graphs_end_with_their_model(gpu):
    model = network()
    with torch.no_grad():
        for _ in range(2):
            recorded.predict(model, model.objective.view(ids(1)))
    assert model in graphs.CALLS
    before = len(graphs.CALLS)
    del model
    assert len(graphs.CALLS) == before - 1


def test_few_graphs_are_kept(gpu, monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 2)
    model = network()
    with torch.no_grad():
        for B in (1, 2, 3, 1, 2, 3):
            for _ in range(2):
                recorded.predict(model, model.objective.view(ids(B)))
    assert len(graphs.CALLS[model].known) == 2 and len(gpu) == 6


@pytest.mark.parametrize(
    "wait",
    [torch.Tensor.item, torch.Tensor.nonzero, bool, lambda x: x[x > 0], torch.Tensor.unique],
    ids=["item", "nonzero", "bool", "index by a mask", "unique"],
)
def test_network_that_waits_is_called_eagerly(gpu, monkeypatch, capsys, wait):
    """With one warning, and the right results."""
    monkeypatch.setattr(graphs, "warn", terminal.warn)
    model = network()
    model.register_forward_hook(lambda module, args, logits: wait(logits[0, 0, :1]) and None)
    with torch.no_grad():
        for B in (1, 1, 1, 2, 2):
            view = model.objective.view(ids(B))
            assert recorded.predict(model, view).equal(model(view))
    assert capsys.readouterr().err.count("not permitted") == 1


@pytest.mark.parametrize("bound", [dict(attention_every=1), dict(block_length=4), dict(conv=0)])
def test_a_prediction_reads_no_value(monkeypatch, bound):
    """On PyTorch's meta device, which has shapes alone: see test_graphs.py."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    model = network(**bound).to("meta")
    x = torch.zeros(2, 32, dtype=torch.int64, device="meta")
    rows = torch.zeros(8, dtype=torch.int64, device="meta")
    targets = rows.clone()
    with torch.no_grad():
        ce, right = evaluation.losses(model(model.objective.view(x, rows=rows)), targets)
    assert ce.is_meta and right.is_meta


# ---- Evaluations
@pytest.mark.parametrize(
    "more", [{}, dict(block_length=4), dict(objective="ar"), dict(time_conditioning=True)], ids=str
)
def test_evaluation_replays_one_graph(gpu, monkeypatch, more):
    """Whatever its batches have masked. The same bits; its 35 windows are three batches."""
    model = network(block_size=32, **more).double()
    windows = ids(35).clamp(max=V - 1)
    with graphs.run_eagerly():
        expected = mdlm.evaluate(model, windows, passes=4, batch_size=12)
    monkeypatch.setattr(mdlm, "masked_rows", functools.partial(masked_rows, waits=False))
    assert mdlm.evaluate(model, windows, passes=4, batch_size=12) == expected
    assert len(gpu) == 1 and gpu[0].replays == (2 if "objective" in more else 11)


def test_observed_evaluation_is_the_same(gpu):
    """What eval.py does: it gets the logits, without padding."""
    model = network().double()
    windows = ids(35).clamp(max=V - 1)
    seen = []

    def evaluate():
        def observe(at, targets, logits):
            seen.append((at, targets, logits))

        return mdlm.evaluate(model, windows, batch_size=12, observe=observe)

    with graphs.run_eagerly():
        expected = evaluate()
    assert evaluate() == expected and gpu
    for a, b in zip(seen[:3], seen[3:], strict=True):
        assert all(x.equal(y) for x, y in zip(a, b, strict=True))


# ---- Samplers
def all_steps(model, **more):
    """What each step has done to texts of which some tokens are given."""
    x = torch.full((3, 32), model.mask_id)
    x[1, :5] = 1
    x[2, 8:11] = 2
    steps = list(sample.unmask(model, x, **more))
    return [tensor for step in steps for tensor in (torch.tensor(step.number), *step[1:])]


SAMPLERS = [
    {},
    dict(steps=12, order="ancestral", seed=3),
    dict(steps=12, order="margin", temperature=0.5, top_k=4),
    dict(redraw="sweep", top_p=0.8),
    dict(cfg=0.5, block=16),
    dict(threshold=0.3, correct=2),
    dict(entropy_bound=2.0),
    dict(end_id=0, forbid=[2], allowed={7: torch.arange(V) == 3}, steps=8),
]


@pytest.mark.parametrize("more", SAMPLERS, ids=str)
def test_steps_are_replayed(gpu, more):
    """Draws, too: what each step of a text does is the same."""
    model = network(attention_every=1)
    with graphs.run_eagerly():
        expected = all_steps(model, **more)
    got = all_steps(model, **more)
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert a.dtype == b.dtype and a.equal(b)
    assert 1 <= len(gpu) <= 2, "at most one for each block"


@pytest.mark.parametrize(
    "more", [dict(objective="ar"), dict(time_conditioning=True), dict(document_length="given")]
)
def test_texts_of_other_models_are_the_same(gpu, more):
    model = network(attention_every=1, **more)
    for seed in range(2):
        got = texts_of(model, seed, steps=8)
        with graphs.run_eagerly():
            assert got.equal(texts_of(model, seed, steps=8))
    assert gpu


def test_texts_that_outgrow_the_context_are_the_same(gpu):
    model = network(attention_every=1)
    x = torch.full((1, 70), model.mask_id)
    got = sample.generate(model, x, seed=1, steps=8)
    with graphs.run_eagerly():
        assert got.equal(sample.generate(model, x, seed=1, steps=8))


@pytest.mark.parametrize("S", [1, 4])
def test_blocks_are_replayed_with_a_fixed_cache(gpu, S):
    """Whose length changes; texts that outgrow the context, with prompts, and a second time."""
    model = network(S, block_size=16, attention_every=1)
    for T, given in ((16, 0), (40, 9), (14, 0)):
        x = torch.full((2, T), model.mask_id)
        x[:, :given] = 1
        more = dict(seed=T, steps=32, end_id=0)
        with graphs.run_eagerly():
            expected = list(sample.unmask(model, x, **more))
        got = list(sample.unmask(model, x, **more))
        assert [step.number for step in got] == [step.number for step in expected]
        for a, b in zip(got, expected):
            assert a.x.equal(b.x) and a.drawn.equal(b.drawn) and a.calls.equal(b.calls)
            torch.testing.assert_close(a.logp, b.logp, rtol=1e-4, atol=1e-4)
    assert len(gpu) <= 8, "not one for each block"


@pytest.mark.parametrize("S", [0, 4])
def test_two_texts_in_turn_do_not_mix(gpu, S):
    model = network(S, attention_every=1)
    x = torch.full((1, 32), model.mask_id)
    alone = [sample.generate(model, x, seed=seed, steps=8) for seed in range(2)]
    both = [sample.unmask(model, x, seed=seed, steps=8) for seed in range(2)]
    steps = [*zip(*both, strict=True)]
    assert all(step.x.equal(text) for step, text in zip(steps[-1], alone))


@pytest.mark.parametrize("S", [0, 4])
@pytest.mark.parametrize("more", [{}, dict(order="margin", cfg=0.5), dict(redraw="sweep")], ids=str)
def test_a_step_reads_no_value(monkeypatch, S, more):
    """On PyTorch's meta device: also none that a CPU has."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    model = network(S)
    x = torch.full((2, 32), model.mask_id)
    settings = sample.from_keywords(more if not S else {}, model)
    chunk = next(sample.plan(model, x == x, torch.arange(2), settings))
    n = len(chunk.at)
    never = torch.zeros(2 * n, V, dtype=torch.bool)
    u = torch.zeros(2, n, dtype=torch.float64)
    cache = model.objective.cache()
    if cache:
        x = x[:, :n]
        cache = cache.fixed(model, 2)
    inputs = [torch.tensor(0), torch.tensor(0), x, x != x, never, u, u]
    inputs += [getattr(chunk, field.name) for field in dataclasses.fields(chunk)[3:]]
    inputs = [tensor.to("meta") for tensor in inputs]
    with torch.no_grad():
        found = sample.fixed_step(model.to("meta"), settings, chunk.at, 0, cache, *inputs)
    assert all(tensor.is_meta for tensor in found)


def test_damaged_weights_are_refused(gpu):
    model = network(attention_every=1)
    model.head.weight.data[0, 0] = float("nan")
    for _ in range(2):
        with pytest.raises(UserError, match="damaged"):
            texts_of(model, 0)


def test_textbook_sampler_writes_the_same(gpu):
    model = network()
    x = torch.full((2, 32), model.mask_id)
    texts = [
        mdlm.generate(one, x, 8, torch.Generator().manual_seed(0))
        for one in (model, recorded.Recorded(model), recorded.Recorded(model))
    ]
    assert texts[1].equal(texts[0]) and texts[2].equal(texts[0])
    assert len(gpu) == 1
