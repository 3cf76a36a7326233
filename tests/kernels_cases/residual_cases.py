"""Promises of kernels/residual.py, on a GPU or (TRITON_INTERPRET=1) in the interpreter."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanomdlm.kernels import launch
from nanomdlm.kernels.reference import residual_dropout_ref
from nanomdlm.kernels.residual import residual_dropout

pytestmark = pytest.mark.skipif(
    not launch.ENABLED or not (torch.cuda.is_available() or launch.INTERPRET),
    reason="needs a GPU or TRITON_INTERPRET=1",
)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU


def draw(shape, dtype=torch.float32, seed=0):
    """x, y and the gradient of the output."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=g).to(DEVICE, dtype) for _ in range(3))


def key(number):
    return torch.tensor(number, device=DEVICE)


SEED = 0x1234_5678_9ABC_DEF0  # both halves of it count


def run(function, x, y, grad, *args):
    """out, dx, dy"""
    x, y = (z.detach().requires_grad_() for z in (x, y))
    out = function(x, y, *args)
    return out.detach(), *torch.autograd.grad(out, (x, y), grad.to(out.dtype))


def is_dropped(shape, p, seed, offset=0):
    one = torch.ones(shape, device=DEVICE)
    return residual_dropout(torch.zeros_like(one), one, p, True, key(seed), offset) == 0


def check(x, y, grad, p=0.2, offset=0, seed=SEED):
    """The same bits of the mask and the gradients; in the sum, a GPU does not round the product."""
    launch.LAUNCHES.clear()
    args = (p, True, key(seed), offset)
    out, dx, dy = run(residual_dropout, x, y, grad, *args)
    assert launch.LAUNCHES == {"residual_kernel": 2}, "the reference ran, not the kernel"
    wanted, _, dy_wanted = run(residual_dropout_ref, x, y, grad, *args)
    assert out.dtype == wanted.dtype and dy.dtype == y.dtype
    assert torch.equal(dx, grad) and torch.equal(dy, dy_wanted)
    if GPU:
        torch.testing.assert_close(out, wanted)
    else:
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(2, 33, 96), (1, 1, 1), (3, 5, 7), (1, 1, 9), (1500,), (16, 64), (2, 2, 5, 67)]
)
def test_results_and_gradients(shape, dtype):
    check(*draw(shape, dtype))


@pytest.mark.parametrize("p", [2**-16, 0.1, 0.5, 0.9, 1 - 2**-16, 1 - 2**-20])
@pytest.mark.parametrize("offset", [0, 1, 16, 2**31 - 1])
def test_rates_and_offsets(p, offset):
    check(*draw((4, 21, 32)), p, offset)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**62 - 1, 2**63 - 1, -1])
def test_seeds(seed):
    check(*draw((2, 9, 32)), seed=seed)


@pytest.mark.skipif(not GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 256, 384), (4, 1024, 768), (2, 301, 2047)])
def test_sizes_of_training(shape, dtype):
    check(*draw(shape, dtype))


def test_the_bits_are_those_of_philox():
    """Its words for key 0 and counter 0, in Random123: 6627e8d5 e169c58d bc57ac4c 9b00dbd8."""
    halves = [0xE8D5, 0x6627, 0xC58D, 0xE169, 0xAC4C, 0xBC57, 0xDBD8, 0x9B00]
    for i, u in enumerate(halves):
        assert not is_dropped((8,), u / 2**16, 0)[i]
        assert is_dropped((8,), (u + 1) / 2**16, 0)[i]


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5])
def test_the_rate_is_that_which_was_asked_for(p):
    dropped = is_dropped((64, 1024), p, 5).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean() - p) < 4 * sigma / dropped.numel() ** 0.5
    # And at each place of a group of 8, which share a call of the generator.
    places = dropped.view(-1, 8).mean(0)
    assert (places - p).abs().max() < 4 * sigma / (dropped.numel() / 8) ** 0.5


def test_masks_are_independent():
    """Of other offsets, of other seeds (in either half), and of the neighbors in a group."""
    p, shape = 0.3, (32, 1024)
    first = is_dropped(shape, p, 7)
    others = [is_dropped(shape, p, 7, offset) for offset in (1, 2)]
    others += [is_dropped(shape, p, seed) for seed in (8, 7 + 2**32)]
    others += [first.roll(i, 1) for i in (1, 2, 3, 4, 8)]
    n = first.numel()
    sigma = (p * p * (1 - p * p) / n) ** 0.5
    for other in others:
        assert abs((first & other).double().mean() - p * p) < 4 * sigma
    assert torch.equal(first, is_dropped(shape, p, 7))


def test_a_seed_is_drawn_by_the_generator_of_pytorch():
    x, y, _ = draw((4, 64))
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs += [[residual_dropout(x, y, 0.5) for _ in range(2)]]
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
    assert not torch.equal(outputs[0][0], outputs[0][1])
    assert not torch.equal(outputs[0][0], outputs[2][0])


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (2**-18, True), (0.5, False)])
def test_nothing_is_dropped(p, training):
    launch.LAUNCHES.clear()
    x, y, grad = draw((2, 5, 8))
    assert all(
        map(torch.equal, run(residual_dropout, x, y, grad, p, training), (x + y, grad, grad))
    )
    assert not launch.LAUNCHES


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_rates_that_are_none(p):
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        residual_dropout(*draw((2, 8))[:2], p)


def test_two_dtypes():
    x, y, grad = draw((2, 9, 16))
    check(x, y.half(), grad)


def test_any_strides():
    x, y, grad = draw((6, 12, 40))
    args = (0.3, True, key(SEED))
    exact = run(residual_dropout, x, y, grad, *args)
    strided = [z.transpose(0, 1).contiguous().transpose(0, 1) for z in (x, y, grad)]
    assert all(map(torch.equal, exact, run(residual_dropout, *strided, *args)))
    one = grad[:1, :1, :1].expand_as(grad)  # the gradient of a sum
    assert all(
        map(
            torch.equal,
            run(residual_dropout, x, y, one, *args),
            run(residual_dropout_ref, x, y, one, *args),
        )
    )


def test_no_elements():
    x, y, grad = draw((0, 8, 32))
    assert all(z.shape == (0, 8, 32) for z in run(residual_dropout, x, y, grad, 0.2))


def test_backward_saves_the_seed_alone():
    x, y, _ = draw((2, 9, 32))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda z: saved.append(z) or z, lambda z: z):
        residual_dropout(x, y.requires_grad_(), 0.2)
    assert [z.numel() for z in saved] == [1]


def test_second_derivatives_are_refused():
    x, y, _ = draw((2, 9, 32))
    y.requires_grad_()
    (dy,) = torch.autograd.grad(residual_dropout(x, y, 0.2).square().sum(), y, create_graph=True)
    with pytest.raises(RuntimeError):
        dy.sum().backward()


@pytest.mark.parametrize("utils", ["test_schema", "test_faketensor", "test_autograd_registration"])
def test_the_operator_is_well_formed(utils):
    x, y, _ = draw((2, 8, 32))
    operator = sys.modules[residual_dropout.__module__]._residual
    args = (x.requires_grad_(), y.requires_grad_(), key(SEED), 3, 1000)
    torch.library.opcheck(operator, args, test_utils=utils)


def test_compiles_as_one_graph():
    x, y, grad = draw((2, 24, 64))
    args = (0.2, True, key(SEED), 2)
    exact = run(residual_dropout, x, y, grad, *args)
    compiled = torch.compile(residual_dropout, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, exact, run(compiled, x, y, grad, *args)))
    run(compiled, x, y, grad, 0.2)  # which draws a seed


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_each_replay_of_a_graph_drops_others():
    x, y, _ = draw((4, 256))
    residual_dropout(x, y, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = residual_dropout(x, y, 0.5)
    outputs = []
    for _ in range(2):
        graph.replay()
        outputs.append(out.clone())
    assert not torch.equal(*outputs)
