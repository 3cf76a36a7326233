"""The batched Muon: orthogonal updates with level rows, bounded in bfloat16, and a state that resumes."""

import pytest
import torch
from conftest import ROOT  # noqa: F401 (puts the root on the path)

from kernels.muon import BETA2, Muon, orthogonalize

SHAPES = ((96, 32), (32, 32), (128, 32), (32, 128), (96, 32), (40, 72))


def parameters(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=g).to(dtype)) for shape in SHAPES]


def matrices(A, B, singular_values, seed=0):
    """(3, A, B) float64 with these singular values and random vectors."""
    x = torch.randn(3, A, B, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u * singular_values @ v


def test_a_step_is_that_of_the_formulas_matrix_by_matrix():
    params = parameters()
    optimizer = Muon(params, 0.02, 0.1, 0.95)
    momenta = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    running = [torch.zeros(len(p), 1, dtype=torch.float64) for p in params]
    g = torch.Generator().manual_seed(1)
    optimizer.dtype = torch.float32
    for _ in range(4):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g) * torch.logspace(0, 2, len(p))[:, None]
        wanted = []
        for p, m, v in zip(params, momenta, running, strict=True):
            m.lerp_(p.grad.double(), 0.05)
            x = orthogonalize([(0.95 * m + 0.05 * p.grad.double())[None]], torch.float64)[0][0]
            v.lerp_(x.square().sum(1, keepdim=True), 1 - BETA2)
            row = x / v.sqrt()
            row *= x.norm() / row.norm() * max(1, p.shape[0] / p.shape[1]) ** 0.5
            wanted.append(p.detach().double() * (1 - 0.02 * 0.1) - 0.02 * row)
        optimizer.step()
        for p, w in zip(params, wanted, strict=True):
            torch.testing.assert_close(p.detach().double(), w, atol=1e-5, rtol=0)


def test_momenta_are_torchs_and_either_reads_the_others_state():
    mine, theirs = parameters(), parameters()
    a, b = Muon(mine, 0.02, 0.1, 0.95), torch.optim.Muon(theirs, 0.02, 0.1, 0.95)
    g = torch.Generator().manual_seed(1)
    for step in range(6):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = q.grad = torch.randn(p.shape, generator=g)
        a.step(), b.step()
        for p, q in zip(mine, theirs, strict=True):
            torch.testing.assert_close(*(o.state[w]["momentum_buffer"] for o, w in ((a, p), (b, q))))
        if step == 2:
            state_a, state_b = a.state_dict(), b.state_dict()
            a.load_state_dict(state_b), b.load_state_dict(state_a)


def test_rows_that_are_often_small_grow_and_the_norm_stays():
    """Otherwise neurons whose rows the orthogonal matrix leaves short hardly learn."""
    (p,) = (torch.nn.Parameter(torch.zeros(64, 16)),)
    optimizer = Muon([p], 1.0, 0.0, 0.0)
    g = torch.Generator().manual_seed(0)
    strength = torch.linspace(0.1, 1, 64)[:, None]
    for _ in range(60):
        p.data.zero_()
        p.grad = strength * torch.randn(64, 16, generator=g)
        optimizer.step()
    rows = p.detach().norm(dim=1)
    weak, strong = rows[:16].mean(), rows[-16:].mean()
    plain = orthogonalize([p.grad[None]], torch.float32)[0][0]
    assert plain.norm(dim=1)[:16].mean() < 0.5 * plain.norm(dim=1)[-16:].mean()
    assert 0.8 < weak / strong < 1.25
    assert p.detach().norm() == pytest.approx(plain.norm().item() * 2, rel=0.02)  # the factor of 64 x 16


def test_state_that_is_written_to_in_place_is_what_counts():
    """So a run resumes: mdlm.py copies what it saved into state_dict()'s tensors."""
    first, second = parameters(), parameters()
    a, b = Muon(first, 0.02, 0.1, 0.95), Muon(second, 0.02, 0.1, 0.95)
    for p, q in zip(first, second, strict=True):
        p.grad, q.grad = torch.ones_like(p), -torch.ones_like(q)
    a.step(), b.step()
    for p, q in zip(first, second, strict=True):
        for name, x in a.state[p].items():
            b.state[q][name].copy_(x)
        q.data.copy_(p.data)
        p.grad = q.grad = torch.linspace(-1, 1, p.numel()).view_as(p)
    a.step(), b.step()
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype, slack", [(torch.float64, 0), (torch.float32, 0.001), (torch.bfloat16, 0.05)])
def test_singular_values_from_0_003_to_1_of_the_norm_come_out_near_one(dtype, slack):
    x = matrices(32, 128, torch.logspace(0, -2, 32, dtype=torch.float64))  # the last: 0.008 of the norm
    values = torch.linalg.svdvals(orthogonalize([1e-3 * x], dtype)[0].double())
    assert 0.787 - slack < values.min() and values.max() < 1.213 + slack
    if dtype == torch.bfloat16:  # its rounding of the matrix itself is larger than what follows
        return
    tiny = matrices(32, 128, torch.tensor([1.0] + [1e-4] * 31, dtype=torch.float64))
    values = torch.linalg.svdvals(orthogonalize([tiny], dtype)[0].double())
    assert (values[:, 1:] - 288.5e-4).abs().max() < 0.0005 + slack  # in proportion: noise stays noise


@pytest.mark.parametrize(
    "A, B, n", [(8, 8, 300), (16, 32, 300), (32, 32, 200), (128, 32, 100), (64, 256, 20)]
)
def test_in_bfloat16_no_singular_value_escapes_whatever_the_spectrum(A, B, n):
    """Beyond its interval a polynomial explodes. Rank one: the largest singular value is the norm itself.

    1.21 without rounding; bfloat16 has 8 bits and adds 0.05 at most, an escape a factor."""
    g, i = torch.Generator().manual_seed(0), torch.arange(1, min(A, B) + 1)
    u, _, v = torch.linalg.svd(torch.randn(n, A, B, generator=g), full_matrices=False)
    spectra = [i**-p for p in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)] + [(i <= 1).float(), 0.03 + (i <= 2)]
    for x in (torch.randn(n, A, B, generator=g), *(u * s @ v for s in spectra)):
        for scale in (1e-6, 1e3):
            assert torch.linalg.svdvals(orthogonalize([scale * x], torch.bfloat16)[0].float()).max() < 1.28


def test_a_matrix_without_gradient_stays_and_zero_gives_no_nan():
    (p, *_), (q, *_) = parameters(), parameters()
    optimizer = Muon([p, q], 0.02, 0.0, 0.95)
    p.grad, before = torch.zeros_like(p), q.clone()
    optimizer.step()
    assert p.isfinite().all() and torch.equal(q, before)
    q.grad = torch.ones_like(q)
    optimizer.step()
    assert not torch.equal(q, before)
