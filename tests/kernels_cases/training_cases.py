"""Training with the kernels gives what PyTorch gives; on a GPU or with TRITON_INTERPRET=1."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from conftest import corpus_of

import mdlm
from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels.launch import ENABLED, INTERPRET, LAUNCHES, launch

pytestmark = pytest.mark.skipif(
    not ENABLED or not (torch.cuda.is_available() or INTERPRET),
    reason="needs a GPU or TRITON_INTERPRET=1",
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEAD = {"ce_chunk_kernel"}
ATTENTION = {"attention_forward_kernel", "attention_dq_kernel", "attention_dkdv_kernel"}
ATTENTION |= {"prepare_kernel", "norm_conv_forward_kernel", "norm_conv_backward_kernel"}


def train(name, config, folder, steps, device):
    """The losses of the first steps with AdamW, and the kernels that were launched."""
    LAUNCHES.clear()
    corpus = corpus_of(folder, config, device)
    torch.manual_seed(0)
    ops = kernels.select(name, device, config.n_embd // config.n_head)
    run = mdlm.make_run(config, corpus, mdlm.devices.Machine(device, torch.float32, ops))
    model = run.model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    samples = torch.arange(config.batch_size)
    losses = []
    for step in range(steps):
        drawn = mdlm.draw_batch(run, step, 0.0, samples)
        loss = model(*run.objective.batch(ops, *drawn)[:3])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, set(LAUNCHES)


def compare(folder, masking, V, steps, device=DEVICE):
    """float32: only the order of sums differs, and AdamW amplifies that: 2e-6 on a CPU."""
    g = torch.Generator().manual_seed(0)
    for name in ("train.bin", "val.bin"):  # a Zipf law: something to learn
        ids = torch.multinomial(1 / torch.arange(1.0, V + 1), 2000, replacement=True, generator=g)
        ids.to(torch.uint16).numpy().tofile(folder / name)
    size = dict(n_layer=1, n_head=1, n_embd=32, block_size=8, batch_size=4, dropout=0.0)
    config = mdlm.Config(**size, vocab_size=V, masking=masking)
    got, launched = train("triton", config, folder, steps, device)
    wanted, none = train("torch", config, folder, steps, device)
    mask = {"mask_kernel"} if masking == "exact" else set()
    assert launched == HEAD | ATTENTION | mask and not none
    assert min(wanted[1:]) < wanted[0], "it learns"
    assert max(abs(a - b) for a, b in zip(got, wanted, strict=True)) < 1e-4


CASES = pytest.mark.parametrize(("masking", "V"), [("exact", 90), ("bernoulli", 300)])


@CASES
def test_the_losses_are_those_of_pytorch(tmp_path, masking, V):
    compare(tmp_path, masking, V, steps=20 if DEVICE.type == "cuda" else 4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@CASES
def test_on_a_device_that_is_not_current(tmp_path, masking, V):
    compare(tmp_path, masking, V, steps=20, device=torch.device("cuda:1"))
    assert torch.cuda.current_device() == 0


def test_a_launch_enters_its_tensors_device(monkeypatch):
    """Without two GPUs: the guard is entered with the first tensor before the kernel starts."""
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


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("V", [65, 5000])
@pytest.mark.parametrize("masking", ["exact", "bernoulli"])
def test_a_cuda_graph_reads_seed_and_step(masking, V):
    """A captured step draws the masks of the step that the device holds, not of the capture."""
    B, T, H, D = 4, 200, 2, 64
    g = torch.Generator().manual_seed(0)
    x, a, W = (
        torch.randn(*size, generator=g).to(DEVICE, torch.bfloat16).requires_grad_()
        for size in ((B, T, H * D), (H * D, 3 * H * D), (V, H * D))
    )
    angles = torch.arange(T)[:, None] * 100.0 ** (-torch.arange(0, D, 2) / D)
    tables = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    x0 = torch.randint(V, (B, T), generator=g).to(DEVICE)
    level = torch.tensor([20, 181, 77, 124], device=DEVICE)
    level = level if masking == "exact" else level / T
    weight = torch.full((B * T,), 1 / (B * T), device=DEVICE)
    ids = torch.arange(B, device=DEVICE)
    seed, number = (torch.tensor(n, device=DEVICE) for n in (5, 0))

    def step():
        xt, _, rows, _ = kernels.mask_tokens(x0, level, V, seed, number, ids)
        h = torch.where((xt == V)[..., None], 0, x)
        if masking == "exact":
            rows = rows[: B * (T + 1) // 2 + 1]  # 402 are masked: one of padding
        h = h + kernels.attention((h @ a / 16).view(B, T, 3, H, D), *tables, True).flatten(2)
        listed = rows >= 0
        at = torch.where(listed, rows, 0)
        row_weight = torch.where(listed, weight[: len(rows)], 0)
        loss = kernels.linear_cross_entropy(h.flatten(0, 1)[at], W, x0.flatten()[at], row_weight)
        return xt, loss.detach(), *torch.autograd.grad(loss, (x, a, W))

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    seen = []
    for n in (1, 2):
        number.fill_(n)
        graph.replay()
        replayed = [t.clone() for t in captured]
        wanted = step()
        assert torch.equal(replayed[0], wanted[0]), "other masks"
        for got, expected in zip(replayed[1:], wanted[1:], strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-4)
        seen.append(replayed[0])
    assert not torch.equal(*seen)
