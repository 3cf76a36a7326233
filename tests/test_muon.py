"""The batched Muon is torch.optim.Muon: the same weights, the same state."""

import pytest
import torch
from conftest import ROOT  # noqa: F401 (puts the root on the path)

from kernels.muon import Muon, orthogonalize

SHAPES = ((96, 32), (32, 32), (128, 32), (32, 128), (96, 32), (40, 72))


def parameters(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=g).to(dtype)) for shape in SHAPES]


def test_it_steps_as_torch_does_and_either_reads_the_others_state():
    mine, theirs = parameters(), parameters()
    a, b = Muon(mine, 0.02, 0.1, 0.95), torch.optim.Muon(theirs, 0.02, 0.1, 0.95)
    g = torch.Generator().manual_seed(1)
    for step in range(6):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = q.grad = torch.randn(p.shape, generator=g)
        a.step(), b.step()
        for p, q in zip(mine, theirs, strict=True):  # rounding in bfloat16: a few times 2^-8 of 0.02
            torch.testing.assert_close(p, q, atol=5e-4, rtol=0)
        if step == 2:
            state_a, state_b = a.state_dict(), b.state_dict()
            a.load_state_dict(state_b), b.load_state_dict(state_a)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_singular_values_come_close_to_one(dtype, tolerance):
    """0.7 to 1.2 is where the published coefficients leave them; float64 says what exactly."""
    x = torch.randn(3, 32, 128, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(x, dtype).double())
    assert values.min() > 0.6 and values.max() < 1.3
    exact = torch.linalg.svdvals(orthogonalize(x.double(), torch.float64))
    assert (values - exact).abs().max() < tolerance


def test_a_matrix_without_gradient_stays_and_zero_gives_no_nan():
    (p, *_), (q, *_) = parameters(), parameters()
    optimizer = Muon([p, q], 0.02, 0.0, 0.95)
    p.grad, before = torch.zeros_like(p), q.clone()
    optimizer.step()
    assert p.isfinite().all() and torch.equal(q, before)
