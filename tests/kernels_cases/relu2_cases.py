"""Promises of kernels/relu2.py, on a GPU or (TRITON_INTERPRET=1) in the interpreter."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanomdlm.kernels import launch, relu2
from nanomdlm.kernels.reference import relu2_mlp_ref
from nanomdlm.kernels.relu2 import relu2_mlp

pytestmark = pytest.mark.skipif(
    not launch.ENABLED or not (torch.cuda.is_available() or launch.INTERPRET),
    reason="needs a GPU or TRITON_INTERPRET=1",
)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.float16  # the interpreter multiplies bfloat16 wrongly
DTYPES = [torch.float32, HALF] + [torch.bfloat16] * GPU
# What is allowed beside twice PyTorch's error, relative to the largest value of an output: half a
# unit in its last place; in float32 more, as sums are made in another order.
RELATIVE = {torch.float32: 2e-6, torch.float16: 2**-12, torch.bfloat16: 2**-9}


def draw(shape, F, dtype=torch.float32, out=None, seed=0):
    """h, up and down, and the gradient of the output; of a size that `a` has values near 1."""
    C = shape[-1]
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(shape, generator=g)
    up = torch.randn(F, C, generator=g) / C**0.5
    down = torch.randn(out or C, F, generator=g) / F**0.5
    grad = torch.randn(*shape[:-1], out or C, generator=g)
    return tuple(x.to(DEVICE, dtype) for x in (h, up, down, grad))


def run(function, *tensors):
    """y, dh, d_up, d_down"""
    *inputs, grad = tensors
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, grad.to(y.dtype))


def close(name, ours, theirs, truth):
    """At most twice the error of PyTorch in this dtype, plus some."""
    error = (ours - truth).abs().max()
    bound = 2 * (theirs - truth).abs().max() + RELATIVE[ours.dtype] * truth.abs().max()
    assert error <= bound, f"{name}: error {error:.2e}, bound {bound:.2e}"


def check(*tensors):
    launch.LAUNCHES.clear()
    results = run(relu2_mlp, *tensors)
    assert launch.LAUNCHES == {"relu2_kernel": 2}, "the reference ran, not the kernel"
    plain = run(relu2_mlp_ref, *tensors)
    exact = run(relu2_mlp_ref, *(x.double() for x in tensors))
    for name, *same in zip(("y", "dh", "d_up", "d_down"), results, plain, exact, strict=True):
        assert same[0].dtype == same[1].dtype and same[0].shape == same[1].shape
        close(name, *same)


SIZES = [((2, 19, 48), 144), ((128, 64), 128), ((130, 16), 16), ((1, 1, 80), 160)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "F"),
    [
        ((3, 43, 80), 208),
        *(pytest.param(*size, marks=pytest.mark.slow) for size in SIZES),
        pytest.param((257, 192), 768, marks=pytest.mark.long),
    ],
)
def test_output_and_every_gradient(shape, F, dtype):
    check(*draw(shape, F, dtype))


@pytest.mark.skipif(not GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "F"), [((64, 256, 384), 1536), ((5, 301, 768), 3072)])
def test_sizes_of_training(shape, F, dtype):
    check(*draw(shape, F, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_product_with_what_follows_it(dtype):
    """What the kernel stores, without the other products."""
    h, up, down, grad = draw((70, 48), 96, dtype)
    truth = [x.double() for x in (h, up, down, grad)]
    a = relu2._run(h, up)
    exact = (truth[0] @ truth[1].T).relu().square()
    close("a", a, (h @ up.T).relu().square(), exact)
    dz = relu2._run(grad, down, a)
    exact = truth[3] @ truth[2] * 2 * a.double().sqrt()
    close("dz", dz, grad @ down * 2 * a.sqrt(), exact)


def test_not_a_number_stays_one():
    tensors = draw((40, 32), 64)
    tensors[0][3, 5] = torch.nan
    for ours, plain in zip(run(relu2_mlp, *tensors), run(relu2_mlp_ref, *tensors), strict=True):
        assert torch.equal(ours.isnan(), plain.isnan())


def test_any_strides_and_alignment():
    h, up, down, grad = draw((6, 12, 32), 64, HALF)
    exact = run(relu2_mlp, h, up, down, grad)
    h, grad = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (h, grad))
    room = torch.empty(up.numel() + 1, dtype=HALF, device=DEVICE)
    up = room[1:].view_as(up).copy_(up)
    down = down.t().contiguous().t()
    assert up.data_ptr() % 16 and not down.is_contiguous()
    results = run(relu2_mlp, h, up, down, grad)
    for ours, plain in zip(results, exact, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=2e-3)  # of PyTorch's own products
    one = grad[:1, :1, :1].expand_as(grad)  # the gradient of a sum
    check(h, up, down, one)


def test_another_width_of_the_output():
    check(*draw((33, 48), 96, out=16))


def test_no_rows():
    h, up, down, grad = draw((0, 8, 32), 64)
    results = run(relu2_mlp, h, up, down, grad)
    assert [z.shape for z in results] == [h.shape, h.shape, up.shape, down.shape]
    assert not results[2].any() and not results[3].any()


def test_frozen_weights_cost_no_launch():
    """Backward needs one for dh and d_up, and none for d_down."""
    h, up, down, grad = draw((33, 32), 64)
    for wanted, n in ((h, 2), (up, 2), (down, 1)):
        launch.LAUNCHES.clear()
        wanted.requires_grad_()
        relu2_mlp(h, up, down).backward(grad)
        wanted.requires_grad_(False)
        assert launch.LAUNCHES["relu2_kernel"] == n
    plain = run(relu2_mlp_ref, h, up, down, grad)[1:]
    torch.testing.assert_close(tuple(x.grad for x in (h, up, down)), plain)


def test_one_tensor_of_the_hidden_size_is_saved():
    h, up, down, _ = draw((40, 32), 128)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda z: saved.append(z) or z, lambda z: z):
        relu2_mlp(h.requires_grad_(), up, down)
    assert [z.numel() for z in saved].count(40 * 128) == 1


def test_autocast_gradient_reaches_the_weights():
    h, up, down, grad = draw((2, 23, 32), 64)
    results = []
    for function in (relu2_mlp, relu2_mlp_ref):
        with torch.autocast(DEVICE, HALF):
            results += [run(function, h, up, down, grad)]
    assert [z.dtype for z in results[0]] == [HALF, *[torch.float32] * 3]
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_second_derivatives_are_refused():
    h, up, down, _ = draw((9, 32), 64)
    h.requires_grad_()
    (dh,) = torch.autograd.grad(relu2_mlp(h, up, down).sum(), h, create_graph=True)
    with pytest.raises(RuntimeError):
        dh.sum().backward()


@pytest.mark.parametrize("utils", ["test_schema", "test_faketensor", "test_autograd_registration"])
def test_the_operator_is_well_formed(utils):
    h, up, down, _ = draw((18, 32), 64)
    args = (h.requires_grad_(), up.requires_grad_(), down)
    torch.library.opcheck(relu2._relu2_mlp, args, test_utils=utils)


def test_compiles_as_one_graph():
    tensors = draw((2, 24, 32), 64)
    compiled = torch.compile(relu2_mlp, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, run(relu2_mlp, *tensors), run(compiled, *tensors)))


@pytest.mark.parametrize(
    ("C", "F", "dtype"), [(24, 64, HALF), (32, 72, HALF), (32, 64, torch.float64)]
)
def test_the_rest_goes_to_the_reference(C, F, dtype, monkeypatch):
    monkeypatch.setattr(relu2, "relu2_mlp_ref", lambda *args: "reference")
    assert relu2_mlp(*draw((8, C), F, dtype)[:3]) == "reference"
    assert relu2_mlp(*draw((8, 32), 64, HALF, out=8)[:3]) == "reference"
