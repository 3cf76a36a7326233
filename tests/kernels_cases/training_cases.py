"""Training with the kernels and with plain PyTorch: the same losses; on a GPU or with TRITON_INTERPRET=1."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

import kernels
import mdlm
from kernels._triton import ENABLED, INTERPRET, LAUNCHES, launch

pytestmark = pytest.mark.skipif(
    not ENABLED or not (torch.cuda.is_available() or INTERPRET),
    reason="needs a GPU or TRITON_INTERPRET=1",
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(name, config, folder, steps):
    """The losses of the first steps with AdamW, and the kernels that were launched."""
    LAUNCHES.clear()
    corpus = mdlm.Corpus(folder, config, DEVICE)
    torch.manual_seed(0)
    model = mdlm.Model(config, corpus.tokenizer.vocab_size, kernels.select(name, DEVICE, 32)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    weights, losses = mdlm.sequence_weights(config).to(DEVICE), []
    for step in range(steps):
        xt, targets, rows, weight = mdlm.make_batch(
            model, corpus, weights, step, torch.arange(config.batch_size)
        )
        if config.masking == "bernoulli":  # with their padding, as a GPU gets them
            k = xt.numel() - len(rows)
            rows, targets, weight = (
                F.pad(rows, (0, k), value=-1),
                F.pad(targets, (0, k)),
                F.pad(weight, (0, k)),
            )
        loss = model(xt, targets, rows, weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, set(LAUNCHES)


SMALL = {"small_head_kernel"}
LARGE = {"gather_kernel", "product_kernel", "ce_chunk_kernel", "scatter_kernel"}


@pytest.mark.parametrize(
    ("more", "V", "head"),
    [(dict(masking="exact"), 90, SMALL), (dict(masking="bernoulli"), 300, LARGE)],
)
def test_twenty_steps_give_the_losses_of_pytorch(tmp_path, more, V, head):
    """float32: only the order of sums differs, and AdamW amplifies that: 2e-6 on a CPU."""
    g = torch.Generator().manual_seed(0)
    for name in ("train.bin", "val.bin"):  # a Zipf law: something to learn
        ids = torch.multinomial(1 / torch.arange(1.0, V + 1), 2000, replacement=True, generator=g)
        ids.to(torch.uint16).numpy().tofile(tmp_path / name)
    size = dict(n_layer=1, n_head=1, n_embd=32, block_size=8, batch_size=4, dropout=0.0, vocab_size=V)
    config = mdlm.Config(**size, **more)
    (got, launched), (wanted, none) = (train(name, config, tmp_path, 20) for name in ("triton", "torch"))
    others = {"mask_kernel", "scale_kernel", "_attention_forward", "_attention_dq", "_attention_dkdv"}
    assert launched == head | others and not none
    assert wanted[-1] < wanted[0] - 0.3, "it learns"
    assert max(abs(a - b) for a, b in zip(got, wanted, strict=True)) < 1e-4


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("V", [65, 5000])
@pytest.mark.parametrize("masking", ["exact", "bernoulli"])
def test_a_step_captures_into_a_cuda_graph_that_reads_seed_and_step_from_the_device(masking, V):
    B, T, H, D = 4, 200, 2, 64
    g = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=g).to(DEVICE, torch.bfloat16).requires_grad_()
    x, a, W = draw(B, T, H * D), draw(H * D, 3 * H * D), draw(V, H * D)
    angles = torch.arange(T)[:, None] * 100.0 ** (-torch.arange(0, D, 2) / D)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    x0 = torch.randint(V, (B, T), generator=g).to(DEVICE)
    level = torch.tensor([20, 181, 77, 124], device=DEVICE)
    level = level if masking == "exact" else level / T
    weight, ids = torch.full((B * T,), 1 / (B * T), device=DEVICE), torch.arange(B, device=DEVICE)
    seed, number = torch.tensor(5, device=DEVICE), torch.tensor(0, device=DEVICE)

    def step():
        xt, _, rows, _ = kernels.mask_tokens(x0, level, V, seed, number, ids)
        h = torch.where((xt == V)[..., None], 0, x)
        rows = rows[: B * (T + 1) // 2 + 1] if masking == "exact" else rows  # 402 are masked: one of padding
        h = h + kernels.attention((h @ a / 16).view(B, T, 3, H, D), cos, sin, True).flatten(2)
        loss = kernels.linear_cross_entropy(h.flatten(0, 1), W, x0.flatten(), rows, weight)
        return xt, loss.detach(), *torch.autograd.grad(loss, (x, a, W))

    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph, seen = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        captured = step()
    for n in (1, 2):
        number.fill_(n)
        graph.replay()
        replayed, wanted = [t.clone() for t in captured], step()
        assert torch.equal(replayed[0], wanted[0]), "the masks of this step, not of the capture"
        for got, expected in zip(replayed[1:], wanted[1:]):
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-4)
        seen.append(replayed[0])
    assert not torch.equal(*seen)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("masking", "V", "head"), [("exact", 90, SMALL), ("bernoulli", 300, LARGE)])
def test_the_kernels_run_on_a_device_that_is_not_the_current_one(tmp_path, monkeypatch, masking, V, head):
    monkeypatch.setitem(globals(), "DEVICE", torch.device("cuda:1"))
    test_twenty_steps_give_the_losses_of_pytorch(tmp_path, dict(masking=masking), V, head)
    assert torch.cuda.current_device() == 0


def test_a_launch_switches_to_the_device_of_its_first_argument(monkeypatch):
    """Without two GPUs: the guard is entered with that tensor before the kernel starts."""
    said = []

    class Guard:
        def __init__(self, tensor):
            said.append(tensor)

        def __enter__(self):
            said.append("in")

        def __exit__(self, *_):
            said.append("out")

    class Kernel:
        fn = Guard

        def __getitem__(self, grid):
            return lambda *args, **options: said.append((grid, args, options))

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    x = torch.zeros(1)
    launch(Kernel(), (3,), x, 4, num_warps=1)
    assert said == [x, "in", ((3,), (x, 4), {"num_warps": 1}), "out"]
