"""Promises of kernels/attention.py, on a GPU or (TRITON_INTERPRET=1) in the interpreter."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import tiers

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanomdlm.kernels import launch
from nanomdlm.kernels.attention import _packed
from nanomdlm.kernels.operations import attention, attention_ref
from nanomdlm.kernels.reference import block_spans, document_spans

pytestmark = pytest.mark.skipif(
    not launch.ENABLED or not (torch.cuda.is_available() or launch.INTERPRET),
    reason="needs a GPU or TRITON_INTERPRET=1",
)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# What is allowed beside twice PyTorch's error, relative to the largest value of an output: half a
# unit in its last place, which is the last rounding's; in float32 more, as sums are made in another
# order.
RELATIVE = {torch.float32: 2e-6, torch.float16: 2**-12, torch.bfloat16: 2**-9}
HALF = torch.float16  # the interpreter multiplies bfloat16 wrongly
DTYPES = [torch.float32, HALF] + [torch.bfloat16] * GPU
KERNELS = {"attention_forward_kernel", "attention_dq_kernel", "attention_dkdv_kernel"}
FUSED = {"attention_forward_kernel", "attention_backward_kernel"}
MODULE = sys.modules["nanomdlm.kernels.attention"]
MODULE.FUSED_T = 256


def draw(B, T, H, D, dtype, seed=0):
    """qkv, the gradient of the output, rotary tables."""
    g = torch.Generator().manual_seed(seed)
    qkv = torch.randn(B, T, 3, H, D, generator=g) * 1.5
    grad = torch.randn(B, T, H, D, generator=g)
    angles = torch.arange(T)[:, None] * 100.0 ** (-torch.arange(0, D, 2) / D)
    tables = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    return qkv.to(DEVICE, dtype), grad.to(DEVICE, dtype), *tables


def run(function, qkv, grad, *args):
    """Output and gradient of qkv."""
    qkv = qkv.detach().requires_grad_()
    out = function(qkv, *args)
    return out.detach(), torch.autograd.grad(out, qkv, grad)[0]


def kernels_of(qkv, spans=None):
    return FUSED if MODULE._fuses(qkv, spans) else KERNELS


def check(qkv, grad, *args):
    """Output, gradients of q, k, v: at most twice the error of PyTorch in this dtype, plus some."""
    launch.LAUNCHES.clear()
    out, dqkv = run(attention, qkv, grad, *args)
    prepared = {"prepare_kernel"} if args[:1] != () and (args[0] is not None or args[2]) else set()
    expected = kernels_of(qkv, *args[4:]) | prepared
    assert set(launch.LAUNCHES) == expected, "the reference ran, not the kernels"
    assert out.dtype == qkv.dtype and out.is_contiguous()
    tables = [x.double() if torch.is_tensor(x) else x for x in args]
    exact, exact_d = run(attention_ref, qkv.double(), grad.double(), *tables)
    # Copies, which are aligned: cuDNN's backward fails on other memory, and so does all after it.
    plain, plain_d = run(attention_ref, qkv.clone(), grad.clone(), *args)
    results = {"out": (out, plain, exact)}
    for i, name in enumerate(("dq", "dk", "dv")):
        results[name] = [d[:, :, i] for d in (dqkv, plain_d, exact_d)]
    for name, (ours, theirs, truth) in results.items():
        error = (ours - truth).abs().max()
        # With one position dq and dk are 0: differences of numbers as large as dv, times q, k.
        size = max(truth.abs().max(), exact_d.abs().max() / 8)
        bound = 2 * (theirs - truth).abs().max() + RELATIVE[qkv.dtype] * size
        assert error <= bound, f"{name}: error {error:.2e}, bound {bound:.2e}"


SLOW = [(1, 32), (2, 64), (31, 32), (64, 64), (111, 32), (128, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "D"), tiers([(33, 64), *SLOW, (257, 32)], [(33, 64)], SLOW))
def test_forward_and_every_gradient(T, D, dtype):
    qkv, grad, cos, sin = draw(2, T, 1 + (T < 64), D, dtype)
    check(qkv, grad)
    check(qkv, grad, cos, sin, True)


@pytest.mark.parametrize("T", [33, 130])
def test_two_kernels_compute_the_backward_of_short_rows_as_well(T, monkeypatch):
    """As they do on other GPUs than Hopper."""
    qkv, grad, cos, sin = draw(2, T, 1, 64, HALF)
    monkeypatch.setattr(MODULE, "FUSED_T", 0)
    check(qkv, grad)
    check(qkv, grad, cos, sin, True)


EPILOGUES = [(1, 32, None), (64, 64, None), (111, 32, "documents"), (86, 64, "blocks")]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about rows that are never stored
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "D", "seen"),
    tiers([(35, 64, None), *EPILOGUES, (257, 32, None)], [(35, 64, None)], EPILOGUES),
)
def test_gradients_of_norm_and_rotation_in_epilogues(T, D, seen, dtype, monkeypatch):
    """Each alone and both, in the kernels of dQ, dK and dV: prepare_kernel runs forward alone."""
    monkeypatch.setattr(MODULE, "EPILOGUE", True)
    monkeypatch.setattr(MODULE, "FUSED_T", 0)
    qkv, grad, cos, sin = draw(1 + (T > 35), T, 2, D, dtype)
    spans = dict(documents=split(len(qkv), T), blocks=block_spans(T // 2, 16, DEVICE)).get(seen)
    for prepared in ((cos, sin, True), (cos, sin, False), (None, None, True)):
        check(qkv, grad, *prepared, False, spans)
        assert launch.LAUNCHES["prepare_kernel"] == 1
    check(qkv, grad)


def test_the_kernel_for_short_rows_has_no_epilogue(monkeypatch):
    monkeypatch.setattr(MODULE, "EPILOGUE", True)
    qkv, grad, cos, sin = draw(1, 33, 1, 32, HALF)
    check(qkv, grad, cos, sin, True)


@pytest.mark.parametrize(("T", "D"), [(1, 32), (128, 32), (130, 64), (256, 64), (256, 32)])
def test_one_row_even_blocks_several_blocks(T, D):
    qkv, grad, cos, sin = draw(1, T, 1, D, HALF)
    check(qkv, grad, cos, sin, True)


def split(B, T, seed=0):
    """Spans of rows of documents: long ones, single positions, and a row that is one document."""
    ends = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < 0.03
    ends[:, T // 3 : T // 3 + 3] = True
    ends[-1] = False
    return document_spans(ends.to(DEVICE))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about rows that are never stored
@pytest.mark.parametrize(
    ("T", "D", "dtype"),  # float32 has smaller tiles
    [
        *((70 if dtype == torch.float32 else 170, 32, dtype) for dtype in DTYPES),
        *(pytest.param(128, 64, dtype, marks=pytest.mark.slow) for dtype in DTYPES),
        *(pytest.param(257, 32, dtype, marks=pytest.mark.long) for dtype in DTYPES),
    ],
)
def test_documents_see_themselves_alone(T, D, dtype):
    qkv, grad, cos, sin = draw(2, T, 1, D, dtype)
    check(qkv, grad, cos, sin, True, False, split(2, T))
    spans = split(2, T).flip(0)
    check(qkv, grad, None, None, False, False, spans)
    other = qkv.clone()
    first = spans[1, 1, 0]  # where the first document of the second row ends
    other[1, first:] = 7.0  # the other documents
    ours, theirs = (attention(x, spans=spans)[1, :first] for x in (qkv, other))
    assert torch.equal(ours, theirs)


BLOCKS = [(40, 4, 32), (64, 64, 32), (96, 32, 64), (43, 1, 32), (75, 15, 64)]  # T, S, D


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about rows that are never stored
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "S", "D"),
    [(65, 13, 32), *(pytest.param(*size, marks=pytest.mark.slow) for size in BLOCKS)],
)
def test_blocks_see_themselves_and_earlier_text(T, S, D, dtype):
    """Tiles of the kernel may hold several blocks, or the end of the one half and the other."""
    qkv, grad, cos, sin = draw(2, 2 * T, 1, D, dtype)
    spans = block_spans(T, S, DEVICE)
    check(qkv, grad, cos, sin, True, False, spans)
    other = qkv.clone()
    other[:, T // S // 2 * S : T] = other[:, T + T // S // 2 * S :] = 7.0  # later blocks
    ours, theirs = (attention(x, spans=spans)[:, : T // S // 2 * S] for x in (qkv, other))
    assert torch.equal(ours, theirs)


@pytest.mark.skipif(not GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [32, 64])
@pytest.mark.parametrize("T", [128, 257, 512, 1023, 2048])
def test_long_rows(T, D, dtype):
    qkv, grad, cos, sin = draw(2, T, 3, D, dtype)
    check(qkv, grad)
    check(qkv, grad, cos, sin, True)
    check(qkv, grad, cos, sin, True, False, split(2, T))
    if T % 2 == 0:
        for S in (4, 16, 64):
            check(qkv, grad, cos, sin, True, False, block_spans(T // 2, S, DEVICE))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about rows that are never stored
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_very_negative_scores_beside_a_tail(dtype):
    """lse far below 0: a key beyond the end, whose score would be 0, must not turn into inf * 0."""
    qkv, grad, _, _ = draw(1, 40, 1, 32, dtype)
    qkv[:, :, 0] = 10 + qkv[:, :, 0] / 100
    qkv[:, :, 1] = -10 + qkv[:, :, 1] / 100  # scores are about -566
    out, d = run(attention, qkv, grad)
    assert out.isfinite().all() and d.isfinite().all()
    atol = 1e-4 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.double(), attention_ref(qkv.double()), rtol=0, atol=atol)


ORDERS = [(0, 1, 2, 3, 4), (1, 3, 2, 0, 4), (0, 1, 2, 4, 3)]  # the last one has no unit stride


@pytest.mark.parametrize(
    "order", [(2, 0, 3, 1, 4), *(pytest.param(o, marks=pytest.mark.slow) for o in ORDERS)]
)
def test_any_strides(order):
    qkv, grad, cos, sin = draw(2, 19, 2, 32, HALF)
    back = [order.index(i) for i in range(5)]
    strided = qkv.permute(order).contiguous().permute(back)
    assert torch.equal(strided, qkv)
    check(strided, grad.transpose(0, 1).contiguous().transpose(0, 1), cos, sin, True)
    check(strided[:, ::2], grad[:, ::2])


def test_memory_that_is_not_aligned():
    qkv, grad, cos, sin = draw(1, 19, 1, 32, HALF)
    shifted = []
    for x in (qkv, grad):
        room = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)
        shifted.append(room[1:].view_as(x).copy_(x))
    assert shifted[0].data_ptr() % 16 and _packed(qkv) is qkv
    assert _packed(shifted[0]).data_ptr() % 16 == 0
    check(*shifted, cos, sin, True)


def test_equal_bits_whatever_the_batch():
    qkv, grad, cos, sin = draw(2, 130, 1, 32, HALF)
    before = qkv.clone()
    first = run(attention, qkv, grad, cos, sin, True)
    second = run(attention, qkv, grad, cos, sin, True)
    one = run(attention, qkv[1:], grad[1:], cos, sin, True)
    assert torch.equal(qkv, before), "the input was overwritten"
    for a, b, c in zip(first, second, one, strict=True):
        assert torch.equal(a, b) and torch.equal(a[1:], c)


def test_lse_is_log_sum_exp():
    qkv, _, _, _ = draw(1, 45, 2, 32, torch.float32)
    q, k, _ = qkv.double().permute(2, 0, 3, 1, 4)
    exact = torch.logsumexp(q @ k.transpose(-1, -2) * 32**-0.5, -1)
    lse = torch.ops.mdlm.attention(qkv, None, None, False, None)[1]
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)


UTILS = ["test_schema", "test_autograd_registration", "test_faketensor"]  # quick
ALL_UTILS = [*UTILS, "test_aot_dispatch_dynamic"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("utils", [UTILS, pytest.param(ALL_UTILS, marks=pytest.mark.slow)])
def test_the_operator_is_well_formed(utils):
    qkv, _, cos, sin = draw(1, 18, 1, 32, HALF)
    ends = torch.arange(18, device=DEVICE) % 5 == 4
    for prepared in ((None, None, False), (cos, sin, True)):
        args = (qkv.requires_grad_(), *prepared, document_spans(ends[None]))
        torch.library.opcheck(torch.ops.mdlm.attention, args, test_utils=utils)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_rotation_each_alone(dtype):
    qkv, grad, cos, sin = draw(2, 37, 2, 32, dtype)
    check(qkv, grad, None, None, True)
    check(qkv, grad, cos, sin, False)


def test_compiles_as_one_graph():
    qkv, grad, cos, sin = draw(1, 34, 1, 32, HALF)
    whole = torch.compile(attention, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    for args, atol in (((), 0), ((cos, sin, True), 4e-3)):  # inductor rounds the norm elsewhere
        launch.LAUNCHES.clear()
        compiled = run(whole, qkv, grad, *args)
        assert set(launch.LAUNCHES) == kernels_of(qkv) | ({"prepare_kernel"} if args else set())
        expected = run(attention, qkv, grad, *args)
        torch.testing.assert_close(compiled, expected, rtol=0, atol=atol * GPU)
    wide = draw(1, 10, 1, 48, torch.float32)[0]  # goes to the reference
    torch.testing.assert_close(whole(wide), attention_ref(wide))


def test_autocast_gradient_reaches_the_projection():
    """As a model uses it: a view of one linear layer's output, and a gradient without storage."""
    x = torch.randn(2, 23, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    layer = torch.nn.Linear(64, 192).to(DEVICE)
    gradients = []
    for function in (attention, attention_ref):
        with torch.autocast(DEVICE, HALF):
            y = function(layer(x).view(2, 23, 3, 2, 32))
        assert y.dtype == HALF
        gradients += torch.autograd.grad(y.float().sum(), layer.weight)
    assert gradients[0].dtype == torch.float32
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)


def test_second_derivatives_are_refused():
    qkv, _, cos, sin = draw(1, 9, 1, 32, torch.float32)
    qkv.requires_grad_()
    (dqkv,) = torch.autograd.grad(attention(qkv, cos, sin, True).sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError):
        dqkv.sum().backward()


def test_documents_of_one_text_serve_all():
    qkv, grad, _, _ = draw(3, 33, 1, 32, torch.float32)
    spans = split(3, 33)[:1]
    results = (
        run(f, qkv, grad, None, None, False, False, spans) for f in (attention, attention_ref)
    )
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_tables_that_are_too_short_are_refused():
    qkv, _, cos, sin = draw(1, 9, 1, 32, torch.float32)
    with pytest.raises(ValueError, match="each of 9 positions"):
        attention(qkv, cos[:8], sin[:8])


def test_an_empty_batch():
    qkv = torch.zeros(0, 5, 3, 1, 32, device=DEVICE, requires_grad=True)
    y = attention(qkv)
    y.sum().backward()
    assert y.shape == (0, 5, 1, 32) and qkv.grad.shape == qkv.shape


@pytest.mark.parametrize(
    ("T", "D", "dtype", "causal"),
    [
        (11, 48, torch.float32, False),
        (11, 128, HALF, False),
        (11, 32, torch.float64, False),
        (11, 32, HALF, True),
        (8193, 32, torch.float32, False),
    ],
)
def test_the_rest_goes_to_the_reference(T, D, dtype, causal, monkeypatch):
    monkeypatch.setattr(MODULE, "attention_ref", lambda *args: "reference")
    assert attention(torch.zeros(1, T, 3, 1, D, dtype=dtype), causal=causal) == "reference"
