"""Promises of kernels/convolution.py, on a GPU or (TRITON_INTERPRET=1) in the interpreter."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanomdlm.kernels import launch
from nanomdlm.kernels.operations import norm_conv, norm_conv_ref
from nanomdlm.kernels.reference import document_spans

pytestmark = pytest.mark.skipif(
    not launch.ENABLED or not (torch.cuda.is_available() or launch.INTERPRET),
    reason="needs a GPU or TRITON_INTERPRET=1",
)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU
# What is allowed beside twice PyTorch's error, relative to the largest value of an output: half a
# unit in its last place, which is the last rounding's; in float32 more, as sums are made in another
# order.
RELATIVE = {torch.float32: 2e-6, torch.float16: 2**-12, torch.bfloat16: 2**-9}
KERNELS = {"norm_conv_forward_kernel", "norm_conv_backward_kernel"}


def draw(B, T, C, K, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, C, generator=g) * torch.rand(B, T, 1, generator=g)
    weight = torch.randn(K, C, generator=g) / 2
    grad = torch.randn(B, T, C, generator=g)
    return x.to(DEVICE, dtype), weight.to(DEVICE), grad.to(DEVICE, dtype)


def run(function, x, weight, grad, *args):
    x, weight = (z.detach().requires_grad_() for z in (x, weight))
    y = function(x, weight, *args)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad)


def check(x, weight, grad, *args):
    """y, dx, dw: at most twice the error of PyTorch in this dtype, plus some."""
    launch.LAUNCHES.clear()
    ours = run(norm_conv, x, weight, grad, *args)
    assert set(launch.LAUNCHES) == KERNELS, "the reference ran, not the kernels"
    exact = run(norm_conv_ref, x.double(), weight.double(), grad.double(), *args)
    plain = run(norm_conv_ref, x, weight, grad, *args)
    for name, a, b, truth in zip(("y", "dx", "dw"), ours, plain, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == truth.shape
        error = (a - truth).abs().max()
        size = truth.abs().max()
        bound = 2 * (b - truth).abs().max() + RELATIVE[x.dtype] * size
        assert error <= bound, f"{name}: error {error:.2e}, bound {bound:.2e}"
    return ours


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "T", "C", "K", "causal"),
    [
        (2, 33, 96, 5, False),
        (1, 1, 32, 5, False),
        (3, 5, 130, 3, True),
        (2, 2, 64, 5, True),
        (1, 19, 1500, 1, False),
        (1, 9, 128, 8, False),
    ],
)
def test_results_and_gradients(B, T, C, K, causal, dtype):
    check(*draw(B, T, C, K, dtype), causal)


def test_second_derivatives_are_refused():
    x, weight, _ = draw(1, 9, 32, 5, torch.float32)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(norm_conv(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


@pytest.mark.skipif(not GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "T", "C"), [(64, 256, 384), (4, 1024, 768), (2, 301, 2048)])
def test_sizes_of_training(B, T, C, dtype):
    x, weight, grad = draw(B, T, C, 5, dtype)
    check(x, weight, grad)
    ends = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 0.02
    check(x, weight, grad, False, document_spans(ends.to(DEVICE)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_documents_see_themselves_alone(dtype):
    x, weight, grad = draw(2, 40, 64, 5, dtype)
    ends = torch.zeros(2, 40, dtype=torch.bool, device=DEVICE)
    ends[0, [3, 4, 20]] = ends[1, 39] = True
    spans = document_spans(ends)
    check(x, weight, grad, False, spans)
    other = x.clone()
    other[0, 4:] = 7.0
    ours, theirs = (norm_conv(z, weight, False, spans)[0, :4] for z in (x, other))
    assert torch.equal(ours, theirs)


def test_more_tiles_than_programs(monkeypatch):
    """Each program then adds up several parts of dw."""
    monkeypatch.setattr(sys.modules[norm_conv.__module__], "MAX_PROGRAMS", 2)
    check(*draw(3, 21, 1000, 5, torch.float32))


def test_equal_bits_whatever_the_batch():
    x, weight, grad = draw(4, 17, 96, 5, torch.float16)
    before = x.clone()
    first = run(norm_conv, x, weight, grad)
    second = run(norm_conv, x, weight, grad)
    one = run(norm_conv, x[1:], weight, grad[1:])
    assert torch.equal(x, before), "the input was overwritten"
    assert all(map(torch.equal, first, second))
    assert all(torch.equal(a[1:], b) for a, b in zip(first[:2], one[:2]))


def test_any_strides():
    x, weight, grad = draw(2, 12, 64, 5, torch.float32)
    exact = run(norm_conv, x, weight, grad)
    strided = (z.transpose(0, 1).contiguous().transpose(0, 1) for z in (x, weight, grad))
    for a, b in zip(exact, run(norm_conv, *strided), strict=True):
        assert torch.equal(a, b)


def test_no_rows():
    y, dx, dw = run(norm_conv, *draw(0, 8, 32, 3, torch.float32))
    assert y.shape == dx.shape == (0, 8, 32) and not dw.any()


def test_rows_of_zeros():
    x, weight, grad = draw(1, 6, 32, 3, torch.float32)
    check(torch.zeros_like(x), weight, 1e-4 * grad)


@pytest.mark.parametrize("utils", ["test_schema", "test_faketensor", "test_autograd_registration"])
def test_the_operator_is_well_formed(utils):
    x, weight, _ = draw(2, 8, 32, 3, torch.float32)
    x.requires_grad_()
    weight.requires_grad_()
    operator = sys.modules[norm_conv.__module__]._norm_conv
    torch.library.opcheck(operator, (x, weight, 1, None), test_utils=utils)


def test_compiles_as_one_graph():
    x, weight, grad = draw(2, 24, 64, 5, torch.float32)
    exact = run(norm_conv, x, weight, grad)
    compiled = torch.compile(norm_conv, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, exact, run(compiled, x, weight, grad)))
