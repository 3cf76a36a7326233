"""Promises of kernels/attention.py, natively on a GPU or (TRITON_INTERPRET=1) in the interpreter."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import kernels
from kernels import _triton, attention, attention_ref
from kernels.attention import readable, unsupported

pytestmark = pytest.mark.skipif(
    not _triton.ENABLED or not (torch.cuda.is_available() or _triton.INTERPRET),
    reason="needs a GPU or TRITON_INTERPRET=1",
)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ABSOLUTE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # bf16: steps 8 times coarser
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU  # the interpreter multiplies bf16 wrongly


def draw(B, T, H, D, dtype, seed=0):
    """qkv, the gradient of the output, rotary tables."""
    g = torch.Generator().manual_seed(seed)
    angles = torch.arange(T)[:, None] * 100.0 ** (-torch.arange(0, D, 2) / D)
    made = (torch.randn(B, T, 3, H, D, generator=g) * 1.5, torch.randn(B, T, H, D, generator=g))
    return *(x.to(DEVICE, dtype) for x in made), angles.cos().to(DEVICE), angles.sin().to(DEVICE)


def run(function, qkv, grad, *args):
    """Output and gradient of qkv."""
    qkv = qkv.detach().requires_grad_()
    out = function(qkv, *args)
    return out.detach(), torch.autograd.grad(out, qkv, grad)[0]


def launches(function):
    """What function returns, and the kernels that it launched."""
    before = dict(_triton.LAUNCHES)
    result = function()
    return result, {k: n - before.get(k, 0) for k, n in _triton.LAUNCHES.items() if n > before.get(k, 0)}


def check(qkv, grad, *args, kernels=None):
    """Output and gradients of q, k and v: at most twice the error of PyTorch in this dtype, plus a little."""
    got, launched = launches(lambda: run(attention, qkv, grad, *args))
    assert launched.get("_attention_forward") == 1 and len(launched) > 1, "the reference ran, not the kernels"
    assert kernels is None or set(launched) == kernels
    tables = [x.double() if torch.is_tensor(x) else x for x in args]
    exact = run(attention_ref, qkv.double(), grad.double(), *tables)
    torch_ = run(attention_ref, qkv, grad, *args)
    assert got[0].dtype == qkv.dtype and got[0].is_contiguous()
    for name, a, b, x in [("out", *(r[0] for r in (got, torch_, exact)))] + [
        (n, *(r[1][:, :, i] for r in (got, torch_, exact))) for i, n in enumerate(("dq", "dk", "dv"))
    ]:
        error, bound = (a - x).abs().max(), 2 * (b - x).abs().max() + ABSOLUTE[qkv.dtype]
        assert error <= bound, f"{name}: error {error:.2e}, bound {bound:.2e}"


ROW = {"_attention_forward", "_attention_row"}
BLOCKS = {"_attention_forward", "_attention_dq", "_attention_dkdv"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "D"), [(1, 32), (17, 64), (63, 32), (111, 64), (33, 128), (64, 64)])
def test_forward_and_every_gradient(T, D, dtype):
    qkv, grad, _, _ = draw(1 + (T < 64), T, 1 + (T < 64), D, dtype)
    check(qkv, grad, kernels=BLOCKS if dtype == torch.float32 else ROW)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "D"), [(1, 64), (31, 32), (150, 32), (65, 64), (17, 128)])
def test_rotary_and_qk_norm(T, D, dtype):
    """In the kernels for 16-bit types and D <= 64, before them elsewhere."""
    qkv, grad, cos, sin = draw(1, T, 1 + (T < 64), D, dtype)
    check(qkv, grad, cos, sin, True)


@pytest.mark.parametrize("parts", ["rotary", "norm"])
def test_rotary_and_qk_norm_alone(parts):
    qkv, grad, cos, sin = draw(1, 40, 1, 32, torch.float16)
    check(qkv, grad, *((cos, sin, False) if parts == "rotary" else (None, None, True)))


@pytest.mark.parametrize("T", [257, 256])
def test_several_blocks_of_each_kind(T):
    qkv, grad, cos, sin = draw(1, T, 1, 32, torch.float16)
    check(qkv, grad, cos, sin, True, kernels=BLOCKS)


@pytest.mark.skipif(not GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("T", [128, 257, 512, 1023, 2048])
def test_long_rows(T, D, dtype):
    qkv, grad, cos, sin = draw(2, T, 3, D, dtype)
    check(qkv, grad)
    check(qkv, grad, cos, sin, True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about rows that are never stored
def test_very_negative_scores_beside_a_tail():
    """lse far below 0: a key beyond the end, whose score would be 0, must not turn into inf * 0."""
    for T, dtype in ((20, torch.float16), (20, torch.float32), (40, torch.float32)):  # one program, blocks
        qkv, grad, _, _ = draw(1, T, 1, 32, dtype)
        qkv[:, :, 0], qkv[:, :, 1] = 10 + qkv[:, :, 0] / 100, -10 + qkv[:, :, 1] / 100  # scores about -566
        out, d = run(attention, qkv, grad)
        assert out.isfinite().all() and d.isfinite().all()
        torch.testing.assert_close(
            out.double(), attention_ref(qkv.double()), rtol=0, atol=1e-4 if dtype == torch.float32 else 4e-3
        )


def test_any_strides():
    qkv, grad, cos, sin = draw(2, 19, 2, 32, torch.float16)
    for order in ((0, 1, 2, 3, 4), (2, 0, 3, 1, 4), (1, 3, 2, 0, 4), (0, 1, 2, 4, 3)):  # last: no unit stride
        back = [order.index(i) for i in range(5)]
        strided = qkv.permute(order).contiguous().permute(back)
        assert torch.equal(strided, qkv)
        check(strided, grad, cos, sin, True)
        check(strided[:, ::2], grad[:, ::2])
    wide = torch.cat((qkv, qkv), -1)[..., :32]  # a slice of wider heads
    check(wide, grad.transpose(0, 1).contiguous().transpose(0, 1))


def test_memory_that_is_not_aligned_is_copied():
    qkv, grad, cos, sin = draw(1, 19, 1, 32, torch.float16)
    shifted = [
        torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view_as(x).copy_(x) for x in (qkv, grad)
    ]
    assert all(x.data_ptr() % 16 for x in shifted) and readable(qkv) is qkv
    assert readable(shifted[0]).data_ptr() % 16 == 0
    check(*shifted, cos, sin, True)


def test_the_gradient_reaches_a_projection():
    """As a model uses it: a view of one linear layer's output, and a gradient without storage."""
    g = torch.Generator().manual_seed(1)
    x, W = torch.randn(2, 21, 64, generator=g).to(DEVICE), torch.randn(192, 64, generator=g).to(DEVICE) / 8
    W.requires_grad_()
    d = []
    for function in (attention, attention_ref):
        y = function((x @ W.t()).view(2, 21, 3, 2, 32))
        d += torch.autograd.grad(y.sum(), W)
    torch.testing.assert_close(*d, rtol=1e-4, atol=1e-4)


def test_two_runs_give_equal_bits_whatever_the_batch():
    for T in (50, 130):
        qkv, grad, cos, sin = draw(2, T, 1, 32, torch.float16)
        a, b = (run(attention, qkv, grad, cos, sin, True) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(a, b))
        one = run(attention, qkv[1:], grad[1:], cos, sin, True)
        assert all(torch.equal(x[1:], y) for x, y in zip(a, one))


def test_inputs_are_left_alone():
    tensors = draw(1, 18, 1, 32, torch.float16)
    before = [x.clone() for x in tensors]
    run(attention, *tensors, True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before))


def test_lse_is_the_log_of_the_sum_of_exponentials():
    qkv, _, _, _ = draw(1, 45, 2, 32, torch.float32)
    q, k, _ = qkv.double().permute(2, 0, 3, 1, 4)
    exact = torch.logsumexp(q @ k.transpose(-1, -2) * 32**-0.5, -1)
    torch.testing.assert_close(
        torch.ops.mdlm.attention(qkv, None, None, False)[1].double(), exact, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_opcheck(dtype):
    qkv, _, cos, sin = draw(1, 18, 1, 32, dtype)
    for args in ((None, None, False), (cos, sin, True)):
        torch.library.opcheck(torch.ops.mdlm.attention, (qkv.requires_grad_(), *args))


def test_compiles_as_one_graph():
    qkv, grad, cos, sin = draw(1, 34, 1, 32, torch.float16)
    whole = torch.compile(attention, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    (out, d), launched = launches(lambda: run(whole, qkv, grad, cos, sin, True))
    assert set(launched) == ROW
    expected = run(attention, qkv, grad, cos, sin, True)
    torch.testing.assert_close((out, d), expected, rtol=0, atol=0)


def test_what_goes_to_the_reference_compiles_too():
    qkv = draw(1, 10, 1, 48, torch.float32)[0]
    whole = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(qkv), attention_ref(qkv))


def test_autocast():
    g = torch.Generator().manual_seed(2)
    x, layer = torch.randn(2, 23, 64, generator=g).to(DEVICE), torch.nn.Linear(64, 192).to(DEVICE)
    _, _, cos, sin = draw(1, 23, 1, 32, torch.float32)
    with torch.autocast(DEVICE, torch.float16):
        qkv = layer(x).view(2, 23, 3, 2, 32)
        y, launched = launches(lambda: attention(qkv, cos, sin, True))
    assert qkv.dtype == y.dtype == torch.float16 and "_attention_forward" in launched
    exact = attention_ref(qkv.detach().double(), cos.double(), sin.double(), True)
    assert (y - exact).abs().max() < 2e-3
    y.float().square().mean().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.isfinite().all() and layer.weight.grad.abs().sum() > 0


def test_an_empty_batch():
    qkv = torch.zeros(0, 5, 3, 1, 32, device=DEVICE, requires_grad=True)
    y = attention(qkv)
    y.sum().backward()
    assert y.shape == (0, 5, 1, 32) and qkv.grad.shape == qkv.shape


@pytest.mark.parametrize(
    ("shape", "dtype", "word"),
    [
        ((1, 8, 3, 1, 48), torch.float32, "48"),
        ((1, 8, 3, 1, 32), torch.float64, "float64"),
        ((1, 8193, 3, 1, 32), torch.float16, "8193"),
        ((1, 8, 2, 1, 32), torch.float32, "(1, 8, 2, 1, 32)"),
    ],
)
def test_what_the_kernels_do_not_take_is_said_in_one_sentence(shape, dtype, word):
    said = unsupported(torch.zeros(shape, dtype=dtype, device=DEVICE))
    assert "attention kernels take" in said and word in said and "\n" not in said


def test_a_device_without_kernels_is_named():
    assert "got a tensor on meta" in unsupported(torch.zeros(1, 8, 3, 1, 32, device="meta"))
    assert unsupported(torch.zeros(1, 8, 3, 1, 32, device=DEVICE)) is None


def test_the_rest_goes_to_the_reference():
    g = torch.Generator().manual_seed(3)
    for D, dtype, causal in ((48, torch.float32, False), (32, torch.float64, False), (32, torch.half, True)):
        qkv = torch.randn(1, 11, 3, 1, D, generator=g).to(DEVICE, dtype)
        y, launched = launches(lambda: attention(qkv, causal=causal))  # noqa: B023
        assert not launched and torch.equal(y, attention_ref(qkv, causal=causal))


def test_rotary_tables_of_another_length_are_refused():
    qkv, _, cos, sin = draw(1, 9, 1, 32, torch.float32)
    with pytest.raises(ValueError, match=r"\(T, D/2\) = \(9, 16\)"):
        attention(qkv, cos[:8], sin[:8])


def test_auto_leaves_long_rows_of_wide_heads_to_pytorch():
    for T, D, ours in ((40, 128, True), (513, 128, False), (513, 32, True)):
        qkv = draw(1, T, 1, D, torch.float16)[0]
        out, launched = launches(lambda qkv=qkv: kernels.select("auto", DEVICE).attention(qkv))
        assert bool(launched) == ours
        torch.testing.assert_close(out, attention_ref(qkv), atol=5e-3, rtol=0)
