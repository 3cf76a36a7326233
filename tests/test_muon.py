"""The batched Muon does what torch.optim.Muon does, closer to the orthogonal matrix, with the same state."""

import pytest
import torch
from conftest import ROOT  # noqa: F401 (puts the root on the path)

from kernels.muon import COEFFICIENTS, Muon, orthogonalize

SHAPES = ((96, 32), (32, 32), (128, 32), (32, 128), (96, 32), (40, 72))


def parameters(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=g).to(dtype)) for shape in SHAPES]


def matrices(A, B, singular_values, seed=0):
    """(3, A, B) float64 with these singular values and random vectors."""
    x = torch.randn(3, A, B, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u * singular_values @ v


def test_it_steps_where_torch_does_and_either_reads_the_others_state():
    mine, theirs = parameters(), parameters()
    a, b = Muon(mine, 0.02, 0.1, 0.95), torch.optim.Muon(theirs, 0.02, 0.1, 0.95)
    g = torch.Generator().manual_seed(1)
    for step in range(6):
        before = [p.detach().clone() for p in mine]
        for p, q in zip(mine, theirs, strict=True):
            p.grad = q.grad = torch.randn(p.shape, generator=g)
            q.data.copy_(p.data)
        a.step(), b.step()
        for old, p, q in zip(before, mine, theirs, strict=True):
            x, y = ((w.detach() - old * (1 - 0.02 * 0.1)).flatten() for w in (p, q))
            # Both are the orthogonal matrix, times the same, up to the spread of their singular values.
            assert torch.cosine_similarity(x, y, dim=0) > 0.96
            assert 0.9 < x.norm() / y.norm() < 1.3
            torch.testing.assert_close(*(o.state[w]["momentum_buffer"] for o, w in ((a, p), (b, q))))
        if step == 2:
            state_a, state_b = a.state_dict(), b.state_dict()
            a.load_state_dict(state_b), b.load_state_dict(state_a)


def test_momenta_that_are_written_to_in_place_are_those_that_count():
    """So a run resumes: mdlm.py copies what it saved into state_dict()'s tensors."""
    first, second = parameters(), parameters()
    a, b = Muon(first, 0.02, 0.1, 0.95), Muon(second, 0.02, 0.1, 0.95)
    for p, q in zip(first, second, strict=True):
        p.grad, q.grad = torch.ones_like(p), -torch.ones_like(q)
    a.step(), b.step()
    for p, q in zip(first, second, strict=True):
        b.state[q]["momentum_buffer"].copy_(a.state[p]["momentum_buffer"])
        q.data.copy_(p.data)
        p.grad = q.grad = torch.linspace(-1, 1, p.numel()).view_as(p)
    a.step(), b.step()
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize("B", [48, 128])
def test_two_polynomials_at_a_time_are_the_polynomials_one_by_one(B):
    x = matrices(48, B, torch.logspace(0, -5, 48, dtype=torch.float64))
    norm = (x @ x.mT).flatten(1).norm(dim=1).sqrt()[:, None, None]
    one = x / norm
    for a, b, c in (polynomial for pair in COEFFICIENTS for polynomial in pair):
        gram = one @ one.mT
        one = a * one + (b * gram + c * gram @ gram) @ one
    torch.testing.assert_close(orthogonalize(x, torch.float64), one)


@pytest.mark.parametrize("dtype, slack", [(torch.float64, 0), (torch.float32, 0.001), (torch.bfloat16, 0.05)])
def test_singular_values_from_0_003_to_1_of_the_norm_come_out_near_one(dtype, slack):
    x = matrices(32, 128, torch.logspace(0, -2, 32, dtype=torch.float64))  # the last: 0.008 of the norm
    values = torch.linalg.svdvals(orthogonalize(1e-3 * x, dtype).double())
    assert 0.787 - slack < values.min() and values.max() < 1.213 + slack
    if dtype == torch.bfloat16:  # its rounding of the matrix itself is larger than what follows
        return
    tiny = matrices(32, 128, torch.tensor([1.0] + [1e-4] * 31, dtype=torch.float64))
    values = torch.linalg.svdvals(orthogonalize(tiny, dtype).double())
    assert (values[:, 1:] - 288.5e-4).abs().max() < 0.0005 + slack  # in proportion: noise stays noise


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_one_gradient_of_rank_one_stays_bounded_in_bfloat16(scale):
    """There the largest singular value is the norm: rounding puts it above 1, where polynomials explode."""
    g = torch.Generator().manual_seed(0)
    for A, B in ((32, 32), (64, 192), (128, 512)):
        x = scale * torch.randn(5, A, 1, generator=g) @ torch.randn(5, 1, B, generator=g)
        assert torch.linalg.svdvals(orthogonalize(x, torch.bfloat16).double()).max() < 1.3


def test_a_matrix_without_gradient_stays_and_zero_gives_no_nan():
    (p, *_), (q, *_) = parameters(), parameters()
    optimizer = Muon([p, q], 0.02, 0.0, 0.95)
    p.grad, before = torch.zeros_like(p), q.clone()
    optimizer.step()
    assert p.isfinite().all() and torch.equal(q, before)
    q.grad = torch.ones_like(q)
    optimizer.step()
    assert not torch.equal(q, before)
