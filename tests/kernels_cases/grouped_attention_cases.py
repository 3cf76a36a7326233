"""Promises of kernels/grouped_attention.py, on a GPU or (TRITON_INTERPRET=1) in the interpreter."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import tiers

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanomdlm.kernels import launch
from nanomdlm.kernels.grouped_attention import _readable
from nanomdlm.kernels.operations import grouped_attention, grouped_attention_ref
from nanomdlm.kernels.reference import block_spans, document_spans, is_visible, window_spans

pytestmark = [
    pytest.mark.skipif(
        not launch.ENABLED or not (torch.cuda.is_available() or launch.INTERPRET),
        reason="needs a GPU or TRITON_INTERPRET=1",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about rows that are not stored
]
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# What is allowed beside twice PyTorch's error, relative to the largest value of an output: half a
# unit in its last place, which is the last rounding's; in float32 more, as sums are made in another
# order.
RELATIVE = {torch.float32: 2e-6, torch.float16: 2**-12, torch.bfloat16: 2**-9}
HALF = torch.float16  # the interpreter multiplies bfloat16 wrongly
DTYPES = [torch.float32, HALF] + [torch.bfloat16] * GPU
KERNELS = {f"grouped_attention_{name}_kernel" for name in ("forward", "dq", "dkdv")}
NAMES = ("out", "dq", "dk", "dv")


def draw(B, T, H, G, D, dtype, seed=0):
    """q, k, v and the gradient of the output."""
    g = torch.Generator().manual_seed(seed)
    heads = (H, G, G, H)
    return [(1.5 * torch.randn(B, T, n, D, generator=g)).to(DEVICE, dtype) for n in heads]


def run(function, q, k, v, grad, *args):
    """Output and gradients of q, k and v."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*inputs, *args)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def check(tensors, *args):
    """Output, gradients: at most twice the error of PyTorch in this dtype, plus some."""
    launch.LAUNCHES.clear()
    ours = run(grouped_attention, *tensors, *args)
    assert set(launch.LAUNCHES) == KERNELS, "the reference ran, not the kernels"
    truth = run(grouped_attention_ref, *(x.double() for x in tensors), *args)
    plain = run(grouped_attention_ref, *tensors, *args)
    dtype = tensors[0].dtype
    largest = max(x.abs().max() for x in truth[1:])
    for name, our, their, exact in zip(NAMES, ours, plain, truth, strict=True):
        assert our.dtype == dtype and our.shape == exact.shape and our.is_contiguous()
        # With one position dq and dk are exactly 0: differences of numbers as large as dv.
        size = max(exact.abs().max(), largest / 64)
        bound = 2 * (their - exact).abs().max() + RELATIVE[dtype] * size
        error = (our - exact).abs().max()
        assert error <= bound, f"{name}: error {error:.2e}, bound {bound:.2e}"


def make_spans(kind, B, T):
    """Spans of rows of T positions: documents, blocks of 7 of T / 2, or None; "+ window" of 5."""
    spans = None
    if "documents" in kind:  # a long one, some short ones, single positions
        ends = torch.arange(T) % 31 > 27
        spans = document_spans(ends.expand(B, T).to(DEVICE))
    if "blocks" in kind:
        spans = block_spans(T // 2, 7, DEVICE)
    return window_spans(spans, 5, T, DEVICE) if "window" in kind else spans


slow = pytest.mark.slow
SHAPES = [  # heads, heads of keys, D, spans
    (4, 2, 128, ""),
    (2, 1, 128, "documents + window"),
    (2, 1, 128, "blocks"),
    (2, 1, 128, "blocks + window"),
    (6, 2, 64, "documents"),
    (3, 3, 64, "blocks + window"),
    (4, 2, 32, ""),
    (4, 1, 32, "window"),
]
QUICK = [(*SHAPES[0], HALF), (*SHAPES[1], torch.float32), (*SHAPES[2], HALF)]
CASES = [(*shape, dtype) for shape in SHAPES for dtype in DTYPES]


@pytest.mark.parametrize(("H", "G", "D", "spans", "dtype"), tiers(CASES, QUICK, CASES))
def test_forward_and_every_gradient(H, G, D, spans, dtype):
    T = 42 if dtype == torch.float32 else 70  # it has smaller tiles
    check(draw(1, T, H, G, D, dtype), None, make_spans(spans, 1, T))


@pytest.mark.parametrize("T", [1, *(pytest.param(T, marks=slow) for T in (64, 130))])
def test_one_row_even_tiles_and_another_scale(T):
    check(draw(2, T, 2, 1, 128, HALF), 0.3)


@pytest.mark.parametrize("kind", ["", "documents", "blocks"])
def test_a_window_is_what_is_near(kind):
    """Spans of a window against the distance of positions, both ways: who sees and who is seen."""
    T = 42
    plain = make_spans(kind, 2, T)
    spans = make_spans(kind + " + window", 2, T)
    at = torch.arange(T, device=DEVICE)
    position = at % (T // 2) if kind == "blocks" else at
    near = (position[:, None] - position).abs() <= 5
    wanted = near[None] if plain is None else near & is_visible(plain, at)
    assert torch.equal(is_visible(spans, at), wanted)
    if kind == "blocks":  # the other four lines are of those that see a position
        assert torch.equal(is_visible(spans[:, 4:], at), wanted.mT)


@pytest.mark.skipif(not GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("T", [126, 511, 1024, 2048])
def test_long_rows(T, D, dtype):
    for kind in ("", "documents", "window", "blocks" * (T % 2 == 0)):
        check(draw(2, T, 8, 2, D, dtype), None, make_spans(kind, 2, T))


def test_strides_of_projections_are_read_in_place():
    """Slices of a packed tensor, and heads before positions, as libraries have them."""
    q, _, v, grad = draw(2, 19, 4, 2, 32, HALF)
    packed = torch.cat((q, draw(2, 19, 2, 2, 32, HALF, seed=1)[0]), 2)
    q, k = packed.split((4, 2), 2)  # the strides of k are not those of v
    assert all(_readable(x) is x for x in (q, k, v))
    check((q, k, v, grad))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, grad)]
    assert _readable(turned[0]) is not turned[0]
    for a, b in zip(run(grouped_attention, q, k, v, grad), run(grouped_attention, *turned)):
        assert torch.equal(a, b)
    shifted = torch.empty(q.numel() + 1, dtype=HALF, device=DEVICE)[1:].view(q.shape).copy_(q)
    assert shifted.data_ptr() % 16 and _readable(shifted).data_ptr() % 16 == 0


def test_equal_bits_whatever_the_batch():
    """dK and dV are sums over four heads, in one order."""
    tensors = draw(2, 50, 4, 1, 32, HALF)
    first = run(grouped_attention, *tensors)
    second = run(grouped_attention, *tensors)
    one = run(grouped_attention, *(x[1:] for x in tensors))
    for a, b, c in zip(first, second, one, strict=True):
        assert torch.equal(a, b) and torch.equal(a[1:], c)


UTILS = ["test_schema", "test_autograd_registration", "test_faketensor"]  # quick
ALL_UTILS = [*UTILS, "test_aot_dispatch_dynamic"]


@pytest.mark.parametrize("utils", [UTILS, pytest.param(ALL_UTILS, marks=pytest.mark.slow)])
def test_the_operator_is_well_formed(utils):
    q, k, v, _ = (x.requires_grad_() for x in draw(1, 18, 2, 1, 32, HALF))
    args = (q, k, v, 0.2, make_spans("documents", 1, 18))
    torch.library.opcheck(torch.ops.mdlm.grouped_attention, args, test_utils=utils)


def test_compiles_as_one_graph():
    tensors = draw(1, 34, 2, 1, 32, HALF)
    backend = "inductor" if GPU else "aot_eager"
    whole = torch.compile(grouped_attention, fullgraph=True, backend=backend)
    spans = make_spans("window", 1, 34)
    launch.LAUNCHES.clear()
    compiled = run(whole, *tensors, None, spans)
    assert set(launch.LAUNCHES) == KERNELS
    expected = run(grouped_attention, *tensors, None, spans)
    torch.testing.assert_close(compiled, expected, rtol=0, atol=0)


def test_second_derivatives_are_refused():
    q, k, v, _ = (x.requires_grad_() for x in draw(1, 9, 2, 1, 32, HALF))
    (dq,) = torch.autograd.grad(grouped_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        dq.sum().backward()


def test_an_empty_batch():
    q, k, v, _ = (x.requires_grad_() for x in draw(0, 5, 2, 1, 32, HALF))
    y = grouped_attention(q, k, v)
    y.sum().backward()
    assert y.shape == q.shape and k.grad.shape == k.shape


@pytest.mark.parametrize(
    ("D", "T_of_keys", "dtype", "other"),
    [
        (48, 9, HALF, HALF),
        (256, 9, HALF, HALF),
        (32, 9, torch.float64, torch.float64),
        (32, 12, HALF, HALF),
        (32, 9, HALF, torch.float32),
    ],
)
def test_the_rest_goes_to_the_reference(D, T_of_keys, dtype, other, monkeypatch):
    """Other heads and types; keys of a cache; types that differ."""
    module = sys.modules["nanomdlm.kernels.grouped_attention"]
    monkeypatch.setattr(module, "grouped_attention_ref", lambda *args: "reference")
    q = torch.zeros(1, 9, 2, D, dtype=dtype)
    k = torch.zeros(1, T_of_keys, 1, D, dtype=other)
    assert grouped_attention(q, k, k) == "reference"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["documents", "blocks"])
def test_a_network_of_transformers_learns_the_same_through_the_kernels(name):
    """Qwen 2 with heads of 128, grouped queries and a window in one of its layers."""
    networks = pytest.importorskip("test_our_attention")
    ours = networks.make("qwen2", networks.OURS)
    theirs = networks.make("qwen2", networks.operations.REFERENCES)
    view = networks.views()[name]
    launch.LAUNCHES.clear()
    results = networks.outcome(ours, view)
    assert set(launch.LAUNCHES) == KERNELS
    torch.testing.assert_close(results, networks.outcome(theirs, view), rtol=1e-4, atol=1e-5)
