"""Training with the kernels and with plain PyTorch: the same losses. Started by test_kernels.py."""

import pytest
import torch
import torch.nn.functional as F

import kernels
import mdlm
from kernels._triton import LAUNCHES

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
            rows = F.pad(rows, (0, len(targets) - len(rows)), value=-1)
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
