"""Muon: orthogonal updates with level rows, bounded in bfloat16, and a state that resumes."""

import pytest
import torch
from conftest import ROOT  # noqa: F401 (puts the root on the path)
from torch._inductor.utils import run_and_get_code

from nanomdlm.kernels.launch import can_compile
from nanomdlm.support.run.muon import BETA2, Muon, orthogonalize, orthogonalize_all
from nanomdlm.support.run.optimizers import average, average_to_compile

SHAPES = ((96, 32), (32, 32), (128, 32), (32, 128), (96, 32), (40, 72))


def parameters():
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=g)) for shape in SHAPES]


def matrices(A, B, singular_values, seed=0):
    """(3, A, B) float64 with these singular values and random vectors."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, A, B, generator=g, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u * singular_values @ v


def singular_values(x, dtype):
    return torch.linalg.svdvals(orthogonalize(x, dtype).double())


def test_step_follows_the_formulas_of_each_matrix():
    params = parameters()
    optimizer = Muon(params, 0.02, 0.1, 0.95)
    optimizer.dtype = torch.float32
    momenta = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    running = [torch.zeros(len(p), 1, dtype=torch.float64) for p in params]
    g = torch.Generator().manual_seed(1)
    for _ in range(4):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g) * torch.logspace(0, 2, len(p))[:, None]
        wanted = []
        for p, m, v in zip(params, momenta, running, strict=True):
            m.lerp_(p.grad.double(), 0.05)
            nesterov = 0.95 * m + 0.05 * p.grad.double()
            x = orthogonalize(nesterov[None], torch.float64)[0]
            v.lerp_(x.square().sum(1, keepdim=True), 1 - BETA2)
            row = x / v.sqrt()
            row *= x.norm() / row.norm() * max(1, p.shape[0] / p.shape[1]) ** 0.5
            wanted.append(p.detach().double() * (1 - 0.02 * 0.1) - 0.02 * row)
        optimizer.step()
        for p, w in zip(params, wanted, strict=True):
            torch.testing.assert_close(p.detach().double(), w, atol=1e-5, rtol=0)


def test_momenta_are_those_of_torch():
    mine = parameters()
    theirs = parameters()
    a = Muon(mine, 0.02, 0.1, 0.95)
    b = torch.optim.Muon(theirs, 0.02, 0.1, 0.95)
    g = torch.Generator().manual_seed(1)
    for step in range(6):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = q.grad = torch.randn(p.shape, generator=g)
        a.step()
        b.step()
        for p, q in zip(mine, theirs, strict=True):
            momenta = (a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"])
            torch.testing.assert_close(*momenta)
        if step == 2:  # each reads the other's state
            state_a = a.state_dict()
            state_b = b.state_dict()
            a.load_state_dict(state_b)
            b.load_state_dict(state_a)


@pytest.mark.parametrize(
    "dtype, slack", [(torch.float64, 0), (torch.float32, 0.001), (torch.bfloat16, 0.05)]
)
def test_singular_values_come_out_near_one(dtype, slack):
    spectrum = torch.logspace(0, -2, 32, dtype=torch.float64)  # the last: 0.008 of the norm
    values = singular_values(1e-3 * matrices(32, 128, spectrum), dtype)
    assert 0.787 - slack < values.min()
    assert values.max() < 1.213 + slack
    if dtype == torch.bfloat16:  # its rounding of the matrix itself is larger than what follows
        return
    tiny = matrices(32, 128, torch.tensor([1.0] + [1e-4] * 31, dtype=torch.float64))
    values = singular_values(tiny, dtype)
    # In proportion: noise stays noise.
    assert (values[:, 1:] - 288.5e-4).abs().max() < 0.0005 + slack


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_batches_together_are_as_each_alone(dtype):
    """Tall, wide and square ones share products; one has other Gram matrices, one no matrices."""
    g = torch.Generator().manual_seed(0)
    shapes = ((3, 96, 32), (2, 32, 32), (1, 48, 40), (4, 32, 64), (0, 32, 64))
    batches = [torch.randn(*shape, generator=g) * 10.0**i for i, shape in enumerate(shapes)]
    before = [x.clone() for x in batches]
    together = orthogonalize_all(batches, dtype)
    for x, y, old in zip(batches, together, before, strict=True):
        assert y.dtype == dtype and torch.equal(x, old)
        torch.testing.assert_close(y, orthogonalize(x, dtype))


@pytest.mark.parametrize("A, B, n", [(8, 8, 100), (16, 32, 50), (64, 256, 2)])
def test_bfloat16_keeps_singular_values_bounded(A, B, n):
    """Beyond its interval a polynomial explodes. Rank one: the largest value is the norm itself.

    1.21 without rounding; bfloat16 has 8 bits and adds 0.06 at most, an escape a factor.
    """
    g = torch.Generator().manual_seed(0)
    i = torch.arange(1, min(A, B) + 1)
    u, _, v = torch.linalg.svd(torch.randn(n, A, B, generator=g), full_matrices=False)
    spectra = [i**-p for p in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)]
    spectra += [(i <= 1).float(), 0.03 + (i <= 2)]
    for x in (torch.randn(n, A, B, generator=g), *(u * s @ v for s in spectra)):
        for scale in (1e-6, 1e3):
            assert singular_values(scale * x, torch.bfloat16).max() < 1.28


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a compiler")
def test_compiled_update_is_the_same_in_one_graph():
    """As on a GPU: of all matrices."""
    rates = dict(lr=torch.tensor(0.02), weight_decay=0.1)
    runs = []
    for compiled in (False, True):
        params = parameters()
        optimizer = Muon(params, 0.02, 0.1)
        optimizer.dtype = torch.float32
        optimizer.param_groups[0].update(rates)
        for step in range(3):
            g = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=g)
            if compiled and step == 1:
                optimizer.compile()
            torch._dynamo.utils.counters.clear()
            _, codes = run_and_get_code(optimizer.step)
        runs.append(params)
    for p, q in zip(*runs, strict=True):
        torch.testing.assert_close(p, q)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(codes) == 1


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a compiler")
@pytest.mark.parametrize("function", [average, average_to_compile])
def test_compiled_average_reads_its_share_anew(function):
    averaged = [torch.zeros(4, 3), torch.zeros(5)]
    weights = [torch.ones(4, 3), torch.ones(5)]
    share = torch.tensor(0.5)
    compiled = torch.compile(function)
    for value, wanted in ((0.5, 0.5), (0.2, 0.6)):
        share.fill_(value)
        compiled(averaged, weights, share)
        assert all(torch.allclose(x, torch.tensor(wanted)) for x in averaged)


def test_zero_and_missing_gradients_are_harmless():
    p, *_ = parameters()
    q, *_ = parameters()
    optimizer = Muon([p, q], 0.02, 0.0, 0.95)
    before = q.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert p.isfinite().all()
    assert torch.equal(q, before)
    q.grad = torch.ones_like(q)
    optimizer.step()
    assert not torch.equal(q, before)
