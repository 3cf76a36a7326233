"""Masked cross-entropy by Triton, natively on a GPU or (TRITON_INTERPRET=1) in the interpreter on a CPU."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from kernels import _triton
from kernels import cross_entropy as ce

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # not in the interpreter
ABSOLUTE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
ops = torch.ops.mdlm

pytestmark = pytest.mark.skipif(
    not _triton.ENABLED or (DEVICE == "cpu" and not _triton.INTERPRET),
    reason="needs a GPU or TRITON_INTERPRET=1",
)


def make(N, V, C, M, dtype, W_dtype=None, seed=0):
    """h, W, targets, rows, weight: M of N rows listed, a few -1. What must not be read is garbage."""
    g = torch.Generator().manual_seed(seed)
    h, W = torch.randn(N, C, generator=g), 2 * torch.randn(V, C, generator=g) / C**0.5
    targets = torch.randint(V, (N,), generator=g)
    weight = torch.rand(N, generator=g) + 0.1
    rows = torch.randperm(N, generator=g)[:M].sort().values
    if M > 2:
        weight[rows[1]] = 0  # listed, but without weight
    used = torch.zeros(N, dtype=torch.bool)
    used[rows] = weight[rows] != 0
    h[~used], targets[~used] = float("nan"), 1 << 40
    rows = torch.cat((rows, rows.new_full((5,), -1)))
    return (
        h.to(DEVICE, dtype).requires_grad_(),
        W.to(DEVICE, W_dtype or dtype).requires_grad_(),
        targets.to(DEVICE),
        rows.to(DEVICE),
        weight.to(DEVICE),
    )


def used_rows(rows, weight):
    rows = rows[rows >= 0]
    return rows[weight[rows] != 0]


def by_torch(h, W, targets, rows, weight, dtype):
    """The plain operation in a dtype: loss, gradients to h and W."""
    r = used_rows(rows, weight)
    hd, Wd = (x.detach().to(dtype).requires_grad_() for x in (h, W))
    z = F.linear(hd[r], Wd)
    z = z if dtype == torch.float64 else z.float()
    loss = (F.cross_entropy(z, targets[r].long(), reduction="none") * weight[r]).sum()
    loss.backward()
    return loss.detach(), hd.grad, Wd.grad


def assert_close(got, exact, plain, dtype):
    """At most twice the error of the plain operation in this dtype, plus a small absolute term."""
    for name, x, e, p in zip(("loss", "dh", "dW"), got, exact, plain):
        error, bound = (x.double() - e).abs(), 2 * (p.double() - e).abs().max() + ABSOLUTE[dtype]
        if name == "loss":
            bound = bound + ABSOLUTE[dtype] * e.abs()
        assert error.max() <= bound, (name, error.max(), bound)


def launches(kernel):
    return _triton.LAUNCHES.get(kernel, 0)


def check_linear(h, W, targets, rows, weight, kernel):
    dtype, before = h.dtype, launches(kernel)
    inputs = (h, W, targets, rows, weight)
    copies = [x.detach().clone() for x in inputs]
    loss = ce.linear_cross_entropy(*inputs)
    loss.backward()
    assert launches(kernel) > before
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert all(torch.equal(a.detach().nan_to_num(7), b.nan_to_num(7)) for a, b in zip(inputs, copies))
    got = loss.detach(), h.grad, W.grad
    assert got[1].dtype == h.dtype and got[2].dtype == W.dtype
    assert_close(got, by_torch(*inputs, torch.float64), by_torch(*inputs, dtype), dtype)
    unused = torch.ones(len(h), dtype=torch.bool, device=h.device)
    unused[used_rows(rows, weight)] = False
    assert (h.grad[unused] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [2, 65, 257, 1000])
def test_logits_value_and_gradient(V, dtype):
    N, g = 13, torch.Generator().manual_seed(V)
    weight = torch.rand(N, generator=g) + 0.1
    weight[[0, 4, 12]] = 0
    used = weight != 0
    targets = torch.randint(V, (N,), generator=g)
    z = 3 * torch.randn(N, V, generator=g)
    targets[~used], z[~used] = -5, float("nan")  # neither read nor needed
    base = torch.zeros(N, V + 7, dtype=dtype, device=DEVICE)
    base[:, :V] = z
    logits = base[:, :V].requires_grad_()  # rows with a stride
    targets, weight, used = targets.to(DEVICE), weight.to(DEVICE), used.to(DEVICE)
    copy, before = base.detach().clone(), (launches("ce_forward_kernel"), launches("ce_backward_kernel"))
    loss = ce.masked_cross_entropy(logits, targets, weight)
    (grad,) = torch.autograd.grad(3 * loss, logits)
    assert (launches("ce_forward_kernel"), launches("ce_backward_kernel")) == (before[0] + 1, before[1] + 1)
    assert torch.equal(base.nan_to_num(7), copy.nan_to_num(7)) and loss.dtype == torch.float32
    results = []
    for kind in (torch.float64, torch.float32):
        x = logits.detach()[used].to(kind if kind == torch.float64 else dtype).requires_grad_()
        wide = x if kind == torch.float64 else x.float()
        value = (F.cross_entropy(wide, targets[used], reduction="none") * weight[used]).sum()
        results.append((value.detach(), *torch.autograd.grad(3 * value, x)))
    assert_close((loss.detach(), grad[used]), *results, dtype)
    assert (grad[~used] == 0).all()


def test_logits_of_a_large_vocabulary_with_columns_apart():
    V, N = 50257, 3
    logits = torch.randn(V, N, generator=torch.Generator().manual_seed(0)).to(DEVICE).t().requires_grad_()
    targets, weight = torch.tensor([0, 7, V - 1], device=DEVICE), torch.tensor([0.5, 0, 2], device=DEVICE)
    loss = ce.masked_cross_entropy(logits, targets, weight)
    (grad,) = torch.autograd.grad(loss, logits)
    x = logits.detach().double().requires_grad_()
    exact = (F.cross_entropy(x, targets, reduction="none") * weight).sum()
    (expected,) = torch.autograd.grad(exact, x)
    assert abs(loss - exact) < 1e-4 and (grad - expected).abs().max() < 1e-6


def test_logits_may_hold_minus_infinity_and_a_wrong_target_is_not_silent():
    logits = torch.full((2, 300), -float("inf"), device=DEVICE)
    logits[:, 299] = 1
    targets, weight = torch.tensor([299, 299], device=DEVICE), torch.ones(2, device=DEVICE)
    assert ce.masked_cross_entropy(logits, targets, weight) == 0
    assert ce.masked_cross_entropy(logits, targets + 1, weight).isnan()
    h, W, targets, rows, weight = make(9, 65, 24, 9, torch.float32)
    targets[rows[0]] = 65
    assert ce.linear_cross_entropy(h, W, targets, rows, weight).isnan()


@pytest.mark.parametrize("active", ["all", "none", "one"])
def test_logits_all_none_or_one_row_active(active):
    logits = torch.randn(5, 17, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()
    targets = torch.arange(5, device=DEVICE)
    weight = torch.full((5,), 1.0 if active == "all" else 0.0, device=DEVICE)
    if active == "one":
        weight[3] = 1
    loss = ce.masked_cross_entropy(logits, targets, weight)
    (grad,) = torch.autograd.grad(loss, logits)
    other = ce.masked_cross_entropy_ref(logits, targets, weight)
    (expected,) = torch.autograd.grad(other, logits) if active != "none" else (torch.zeros_like(logits),)
    assert torch.allclose(loss, other) and torch.allclose(grad, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [2, 65, 256, 257, 1000])
def test_head_value_and_gradients(V, dtype):
    kernel = "small_head_kernel" if V <= ce.SMALL_V else "ce_chunk_kernel"
    check_linear(*make(41, V, 40, 30, dtype), kernel)


@pytest.mark.parametrize("V", [65, 257])
def test_head_with_several_blocks_a_program_and_several_chunks(V, monkeypatch):
    monkeypatch.setattr(ce, "CHUNK", 64)
    kernel = "small_head_kernel" if V <= ce.SMALL_V else "ce_chunk_kernel"
    check_linear(*make(190, V, 24, 170, torch.float32), kernel)


@pytest.mark.parametrize("V", [65, 257])
@pytest.mark.parametrize("M", [0, 1, 7])
def test_head_with_no_row_one_row_and_every_row(V, M):
    h, W, targets, rows, weight = make(7, V, 16, M, torch.float32)
    for listed in (rows, rows[:M], rows.int()):  # padded, not padded, other integers
        h.grad = W.grad = None
        if M:
            check_linear(
                h,
                W,
                targets.int(),
                listed,
                weight,
                "small_head_kernel" if V <= ce.SMALL_V else "ce_chunk_kernel",
            )
        else:
            loss = ce.linear_cross_entropy(h, W, targets, listed, weight)
            loss.backward()
            assert loss == 0 and (h.grad == 0).all() and (W.grad == 0).all()


def poisoned(monkeypatch):
    """Memory that torch.empty gives holds NaN from now on."""
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *size, **kind: (
            empty(*size, **kind).fill_(float("nan"))
            if kind.get("dtype") in (*DTYPES, torch.bfloat16)
            else empty(*size, **kind)
        ),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "V", "M"), [(150, 257, 70), (41, 1000, 41), (41, 257, 1), (41, 257, 0)])
def test_head_where_only_the_device_knows_the_number_of_rows(N, V, M, dtype, monkeypatch):
    """rows with a place for each of N: products by the kernel; NaN in unlisted rows, and in workspaces."""
    monkeypatch.setattr(ce, "CHUNK", 64)
    poisoned(monkeypatch)
    h, W, targets, rows, weight = make(N, V, 40, M, dtype)
    rows = F.pad(rows[:M], (0, N - M), value=-1)
    before = launches("product_kernel")
    check_linear(h, W, targets, rows, weight, "product_kernel")
    assert launches("product_kernel") == before + 3 * -(-N // 64)
    if M == 0:
        assert (W.grad == 0).all()


@pytest.mark.parametrize("V", [65, 257])
def test_head_on_all_rows_without_a_list(V, monkeypatch):
    """rows=None, what autoregressive training gives: nothing to count, so the large head uses cuBLAS."""
    h, W, targets, _, weight = make(19, V, 24, 19, torch.float32)
    every, before = torch.arange(19, device=DEVICE), launches("product_kernel")
    loss = ce.linear_cross_entropy(h, W, targets, None, weight)
    loss.backward()
    exact = by_torch(h, W, targets, every, weight, torch.float64)
    assert_close((loss.detach(), h.grad, W.grad), exact, exact, torch.float32)
    assert launches("product_kernel") == before
    clean = h.detach().nan_to_num(), W.detach(), targets.clamp(max=V - 1)
    assert torch.allclose(ce.linear_cross_entropy_ref(*clean, None, weight), loss, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 3, 70, 75, 200])
def test_product_stops_at_the_row_that_the_device_names(n, dtype):
    """A chunk that begins at row 5 of n: rows behind the n-th hold NaN in a and b, and stay in c."""
    M, K, N, start = 100, 50, 72, 5
    live, g = min(max(n - start, 0), M), torch.Generator().manual_seed(n)
    count = torch.tensor(n, device=DEVICE)
    draw = lambda *size: torch.randn(*size, generator=g).to(DEVICE, dtype)
    a, b, c = draw(M, K), draw(N, K).t(), torch.full((M, N), 7.0, dtype=dtype, device=DEVICE)
    a[live:] = float("nan")
    ce._product(c, a, b, count, start)
    rtol = 1.6e-2 if dtype == torch.bfloat16 else 4e-3  # both are rounded to bf16: two steps of 2^-7
    torch.testing.assert_close(c[:live], a[:live] @ b, rtol=rtol, atol=ABSOLUTE[dtype])
    assert (c[live:] == 7).all()
    x, total = draw(M, N), torch.full((K, N), 7.0, device=DEVICE)
    x[live:] = float("nan")
    for add, base in ((True, 7), (False, 0)):
        ce._product(total, a.t(), x, count, start, summed=True, add=add)
        exact = base + a[:live].double().t() @ x[:live].double()
        torch.testing.assert_close(total.double(), exact, rtol=1e-4, atol=1e-4)  # summed in float32


@pytest.mark.parametrize("V", [65, 257])
def test_head_takes_strided_features_and_a_slice_of_the_embedding(V):
    h, W, targets, rows, weight = make(20, V, 24, 15, torch.float32)
    wide = torch.zeros(20, 50, device=DEVICE)
    wide[:, 3:27] = h.detach()
    table = torch.cat((W.detach(), torch.ones(1, 24, device=DEVICE))).requires_grad_()
    features = wide[:, 3:27].requires_grad_()
    loss = ce.linear_cross_entropy(features, table[:-1], targets, rows, weight)
    loss.backward()
    exact = by_torch(h, W, targets, rows, weight, torch.float64)
    assert_close((loss.detach(), features.grad, table.grad[:-1]), exact, exact, torch.float32)
    assert (table.grad[-1] == 0).all()


@pytest.mark.parametrize("V", [65, 257])
def test_without_gradients_only_the_loss_is_computed(V):
    h, W, targets, rows, weight = make(20, V, 24, 15, torch.float32)
    expected = ce.linear_cross_entropy(h, W, targets, rows, weight)
    before = launches("scatter_kernel"), launches("scale_kernel")
    with torch.no_grad():
        loss = ce.linear_cross_entropy(h, W, targets, rows, weight)
        parts = ops.linear_cross_entropy(h, W, targets, rows, weight, torch.float32, False)
    assert loss == expected and not loss.requires_grad
    assert parts[1].numel() == parts[2].numel() == 0
    assert before == (launches("scatter_kernel"), launches("scale_kernel"))


@pytest.mark.parametrize("V", [65, 257])
def test_the_same_call_gives_the_same_bits(V):
    results = []
    for _ in range(2):
        h, W, targets, rows, weight = make(80, V, 24, 70, torch.float32)
        loss = ce.linear_cross_entropy(h, W, targets, rows, weight)
        loss.backward()
        results.append((loss.detach(), h.grad, W.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("V", [65, 257])
def test_half_precision_does_not_lose_small_weights(V):
    """With weights of 1e-6 and a loss scale, the gradient is as good as with weights of 1."""
    h, W, targets, rows, weight = make(30, V, 32, 20, torch.float16, torch.float32)
    exact = by_torch(h, W, targets, rows, weight, torch.float64)
    with torch.autocast(DEVICE, dtype=torch.float16):
        (ce.linear_cross_entropy(h, W, targets, rows, weight * 1e-6) * 65536).backward()
    for got, wanted in ((h.grad, exact[1]), (W.grad, exact[2])):
        assert (got.double() / (65536 * 1e-6) - wanted).abs().max() < 4e-3 * wanted.abs().max()


@pytest.mark.parametrize("V", [65, 257])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_autocast_multiplies_in_16_bits_and_returns_the_parameters_dtype(V, dtype):
    h, W, targets, rows, weight = make(40, V, 24, 30, torch.float32)
    with torch.autocast(DEVICE, dtype=dtype):
        loss = ce.linear_cross_entropy(h, W, targets, rows, weight)
    loss.backward()
    assert h.grad.dtype == W.grad.dtype == torch.float32
    rounded = [x.detach().to(dtype) for x in (h, W)]
    exact, plain = (by_torch(*rounded, targets, rows, weight, kind) for kind in (torch.float64, dtype))
    assert_close((loss.detach(), h.grad, W.grad), exact, plain, dtype)
    single = by_torch(h, W, targets, rows, weight, torch.float32)
    assert not torch.equal(W.grad, single[2])  # it did multiply in 16 bits


def test_opcheck():
    for V in (65, 257):
        h, W, targets, rows, weight = make(12, V, 16, 9, torch.float32)
        h.data.nan_to_num_()
        inputs = h, W, targets, rows, weight
        torch.library.opcheck(ops.linear_cross_entropy.default, (*inputs, torch.float32, True))
        torch.library.opcheck(
            ops.linear_cross_entropy.default,
            (*inputs, torch.float16, False),
            test_utils=("test_schema", "test_faketensor"),
        )
    loss, dh, dW, unit = ops.linear_cross_entropy(h, W, targets, rows, weight, torch.float16, True)
    torch.library.opcheck(
        ops.linear_cross_entropy_backward.default, (loss.detach(), unit, dh, dW, torch.float32, torch.float16)
    )
    logits, targets = torch.randn(6, 40, device=DEVICE).requires_grad_(), torch.arange(6, device=DEVICE)
    weight = torch.arange(6.0, device=DEVICE)
    torch.library.opcheck(ops.masked_cross_entropy.default, (logits, targets, weight))
    loss, lse = (x.detach() for x in ops.masked_cross_entropy(logits, targets, weight))
    torch.library.opcheck(
        ops.masked_cross_entropy_backward.default, (loss, logits.detach(), targets, weight, lse)
    )


@pytest.mark.parametrize("V", [65, 257])
def test_compiles_as_one_graph(V):
    h, W, targets, rows, weight = make(20, V, 24, 15, torch.float32)

    def head(h, W):
        with torch.autocast(DEVICE, dtype=torch.float16):
            return ce.linear_cross_entropy(h * 2, W, targets, rows, weight)

    def logits(h, W):
        z = F.linear(h.nan_to_num(), W)
        return ce.masked_cross_entropy(z, targets.clamp(max=V - 1), weight)

    for function in (head, logits):
        h.grad = W.grad = None
        loss = function(h, W)
        loss.backward()
        expected = loss.detach(), h.grad, W.grad
        h.grad = W.grad = None
        loss = torch.compile(function, fullgraph=True, backend="aot_eager")(h, W)
        loss.backward()
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip((loss.detach(), h.grad, W.grad), expected))


def test_other_dtypes_are_refused_in_one_sentence():
    h, W, targets, rows, weight = make(4, 8, 16, 3, torch.float64)
    with pytest.raises(ValueError, match=r"float32, float16 or bfloat16, got torch.float64"):
        ce.linear_cross_entropy(h, W, targets, rows, weight)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize(("listed", "places"), [(16000, 16000), (8000, 16384)])
def test_the_logits_never_exist_whole(listed, places):
    """Beyond inputs and gradients, less than a quarter of the logits, whether rows are cut or not."""
    N, V, C = 16384, 50304, 256
    h, W, targets, rows, weight = make(N, V, C, listed, torch.bfloat16)
    rows = F.pad(rows[:listed], (0, places - listed), value=-1)
    ce.linear_cross_entropy(h, W, targets, rows, weight).backward()  # tunes, which takes memory of its own
    h.grad = W.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ce.linear_cross_entropy(h, W, targets, rows, weight).backward()
    gradients = 4 * V * C + 2 * V * C + 2 * 2 * N * C  # dW is summed in float32
    assert torch.cuda.max_memory_allocated() - before - gradients < 2 * N * V / 4
