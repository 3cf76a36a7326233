"""Promises of kernels/cross_entropy.py, on a GPU or (TRITON_INTERPRET=1) in the interpreter."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanomdlm.kernels import cross_entropy as ce
from nanomdlm.kernels import launch
from nanomdlm.kernels.operations import linear_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16  # the interpreter multiplies bfloat16 wrongly
DTYPES = [torch.float32, HALF] + [torch.bfloat16] * (DEVICE == "cuda")
FRACTION = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
SIZES = pytest.mark.parametrize("V", [65])
ops = torch.ops.mdlm

pytestmark = pytest.mark.skipif(
    not launch.ENABLED or (DEVICE == "cpu" and not launch.INTERPRET),
    reason="needs a GPU or TRITON_INTERPRET=1",
)


def make(N, V, C, M, dtype, W_dtype=None):
    """h, W, targets, weight: M of N rows have one. The targets of the others must not be read."""
    g = torch.Generator().manual_seed(0)
    h = torch.randn(N, C, generator=g)
    W = 2 * torch.randn(V, C, generator=g) / C**0.5
    targets = torch.randint(V, (N,), generator=g)
    weight = torch.rand(N, generator=g) + 0.1
    unused = torch.randperm(N, generator=g)[M:]
    weight[unused] = 0
    targets[unused] = 1 << 40
    h = h.to(DEVICE, dtype).requires_grad_()
    W = W.to(DEVICE, W_dtype or dtype).requires_grad_()
    return h, W, targets.to(DEVICE), weight.to(DEVICE)


def by_torch(h, W, targets, weight, dtype):
    """The plain operation in a dtype: loss, gradients to h and W."""
    r = weight != 0
    h, W = (x.detach().to(dtype).requires_grad_() for x in (h, W))
    z = F.linear(h[r], W)
    z = z if dtype == torch.float64 else z.float()
    loss = (F.cross_entropy(z, targets[r].long(), reduction="none") * weight[r]).sum()
    return loss.detach(), *torch.autograd.grad(loss, (h, W))


def assert_close(got, exact, plain, dtype):
    """At most twice the error of the plain operation in this dtype, plus a small fraction of the
    largest value: few numbers are summed, and the plain operation may be exact by chance."""
    for name, x, e, p in zip(("loss", "dh", "dW"), got, exact, plain, strict=True):
        error = (x.double() - e).abs()
        bound = 2 * (p.double() - e).abs().max() + FRACTION[dtype] * e.abs().max()
        assert error.max() <= bound, (name, error.max(), bound)


def differentiate(h, W, *args):
    loss = linear_cross_entropy(h, W, *args)
    return loss.detach(), *torch.autograd.grad(loss, (h, W))


def check(h, W, targets, weight):
    inputs = (h, W, targets, weight)
    copies = [x.detach().clone() for x in inputs]
    launch.LAUNCHES.clear()
    got = differentiate(*inputs)
    assert "ce_chunk_kernel" in launch.LAUNCHES
    for x, copy in zip(inputs, copies, strict=True):
        assert torch.equal(x.detach(), copy), "an input was overwritten"
    assert got[0].dtype == torch.float32 and got[0].shape == ()
    assert got[1].dtype == h.dtype and got[2].dtype == W.dtype
    exact, plain = (by_torch(*inputs, dtype) for dtype in (torch.float64, h.dtype))
    assert_close(got, exact, plain, h.dtype)
    assert (got[1][weight == 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "V", [65, 257, *(pytest.param(V, marks=pytest.mark.slow) for V in (2, 256, 1000))]
)
def test_loss_and_both_gradients(V, dtype):
    check(*make(41, V, 40, 30, dtype))


@SIZES
def test_several_blocks_and_several_chunks(V, monkeypatch):
    monkeypatch.setattr(ce, "CHUNK", 32 * 320)  # 32 rows
    check(*make(90, V, 24, 80, torch.float32))


@SIZES
@pytest.mark.parametrize("M", [0, 1, 7])
def test_no_row_one_row_every_row(V, M):
    inputs = make(7, V, 16, M, torch.float32)
    if M:
        check(*inputs)
    else:
        assert all((x == 0).all() for x in differentiate(*inputs))
    h, W, targets, weight = (x[:0] if len(x) == 7 else x for x in inputs)
    assert all((x == 0).all() for x in differentiate(h, W, targets, weight))


@SIZES
@pytest.mark.parametrize("M", [0, 50])
def test_padding_with_nan_in_workspaces(V, M, monkeypatch):
    """Bernoulli masks: a place for each of N rows. What torch.empty gives is never used."""
    empty = torch.empty

    def poisoned(*size, **kind):
        x = empty(*size, **kind)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(ce, "CHUNK", 32 * 320)  # 32 rows
    monkeypatch.setattr(torch, "empty", poisoned)
    h, W, targets, weight = make(100, V, 40, M, HALF)
    if M:
        check(h, W, targets, weight)
    else:
        assert all((x == 0).all() for x in differentiate(h, W, targets, weight))


@SIZES
def test_features_and_head_may_be_strided(V):
    h, W, targets, weight = make(19, V, 24, 19, torch.float32)
    h = F.pad(h.detach(), (3, 2))[:, 3:27].requires_grad_()
    table = F.pad(W.detach(), (0, 0, 0, 1)).requires_grad_()  # the embedding has a row for [MASK]
    loss = linear_cross_entropy(h, table[:-1], targets, weight)
    dh, dtable = torch.autograd.grad(loss, (h, table))
    exact = by_torch(h, W, targets, weight, torch.float64)
    assert_close((loss.detach(), dh, dtable[:-1]), exact, exact, torch.float32)
    assert (dtable[-1] == 0).all()


@SIZES
def test_the_same_call_gives_equal_bits(V):
    inputs = make(80, V, 24, 70, torch.float32)
    for a, b in zip(differentiate(*inputs), differentiate(*inputs), strict=True):
        assert torch.equal(a, b)


@SIZES
def test_autocast_multiplies_in_half_precision(V):
    h, W, targets, weight = make(40, V, 24, 30, torch.float32)
    with torch.autocast(DEVICE, dtype=HALF):
        got = differentiate(h, W, targets, weight)
    assert got[1].dtype == got[2].dtype == torch.float32
    rounded = [x.detach().to(HALF) for x in (h, W)]
    exact, plain = (by_torch(*rounded, targets, weight, d) for d in (torch.float64, HALF))
    assert_close(got, exact, plain, HALF)
    single = by_torch(h, W, targets, weight, torch.float32)
    assert not torch.equal(got[2], single[2]), "it multiplied in float32"


@SIZES
def test_half_precision_keeps_small_weights(V):
    """With weights of 1e-6 and a loss scale, the gradient is as good as with weights of 1."""
    h, W, targets, weight = make(30, V, 32, 20, HALF, torch.float32)
    exact = by_torch(h, W, targets, weight, torch.float64)
    with torch.autocast(DEVICE, dtype=HALF):
        loss = linear_cross_entropy(h, W, targets, weight * 1e-6) * 65536
    for got, wanted in zip(torch.autograd.grad(loss, (h, W)), exact[1:], strict=True):
        assert (got.double() / (65536 * 1e-6) - wanted).abs().max() < 4e-3 * wanted.abs().max()


def test_second_derivatives_are_refused():
    h, W, targets, weight = make(9, 65, 24, 9, torch.float32)
    loss = linear_cross_entropy(h, W, targets, weight)
    (dh,) = torch.autograd.grad(loss, h, create_graph=True)
    with pytest.raises(RuntimeError):
        dh.sum().backward()


@SIZES
def test_a_wrong_target_is_not_silent(V):
    h, W, targets, weight = make(9, V, 24, 9, torch.float32)
    targets[0] = V
    assert linear_cross_entropy(h, W, targets, weight).isnan()


UTILS = ["test_schema", "test_autograd_registration", "test_faketensor"]  # quick
ALL_UTILS = [*UTILS, "test_aot_dispatch_dynamic"]


@SIZES
@pytest.mark.parametrize("utils", [UTILS, pytest.param(ALL_UTILS, marks=pytest.mark.slow)])
def test_the_operators_are_well_formed(V, utils):
    h, W, targets, weight = make(12, V, 16, 9, torch.float32)
    args = (h, W, targets, weight, torch.float32)
    torch.library.opcheck(ops.linear_cross_entropy.default, args, test_utils=utils)


@SIZES
def test_compiles_as_one_graph(V):
    h, W, targets, weight = make(20, V, 24, 15, torch.float32)

    def head(h, W):
        with torch.autocast(DEVICE, dtype=HALF):
            return linear_cross_entropy(h * 2, W, targets, weight)

    results = []
    for function in (head, torch.compile(head, fullgraph=True, backend="aot_eager")):
        loss = function(h, W)
        results.append((loss.detach(), *torch.autograd.grad(loss, (h, W))))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"got torch.float64"):
        linear_cross_entropy(*make(4, 8, 16, 3, torch.float64))


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_the_logits_never_exist_whole():
    """Beyond inputs and gradients less than half of the logits."""
    N, V, C = 16384, 50304, 256
    inputs = make(N, V, C, 16000, torch.bfloat16)
    differentiate(*inputs)  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    differentiate(*inputs)
    gradients = 4 * V * C + 2 * V * C + 2 * 2 * N * C  # dW is summed in float32
    assert torch.cuda.max_memory_allocated() - before - gradients < 2 * N * V / 2
