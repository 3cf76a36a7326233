"""Training steps of nanoGPT, for python bench.py train --nanogpt=CLONE (results/bench_nanogpt.md).

nanoGPT's model.py is imported; what its train.py does in a step is repeated, with its own recipe.
"""

if __name__ == "__main__":
    raise SystemExit("this is a part of bench.py; run: python bench.py train --nanogpt=CLONE")

import contextlib
import itertools
import sys
from pathlib import Path

import numpy as np
import torch

from support import runtime
from support.cli import UserError


def check(clone):
    """Raise UserError for a --nanogpt that is no clone; "" is none."""
    if clone and not Path(clone, "model.py").is_file():
        raise UserError(f"--nanogpt={clone} is no clone of github.com/karpathy/nanoGPT")


def steps(clone, config, folder, device, compiled):
    """An iterator over training steps at the sizes of a mdlm.Config."""
    sys.path.append(clone)  # at the end: nanoGPT has a bench.py too
    from model import GPT, GPTConfig

    cuda = device.type == "cuda"
    parts = config.gradient_accumulation_steps
    B = config.batch_size // parts
    T = config.block_size
    names = ("vocab_size", "n_layer", "n_head", "n_embd", "block_size", "dropout")
    shape = {name: getattr(config, name) for name in names}

    def next_batch():  # inputs (B, T) and the next tokens (B, T)
        data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")  # anew, as it does
        starts = torch.randint(len(data) - T, (B,)).tolist()
        pair = [np.stack([data[i + shift : i + shift + T] for i in starts]) for shift in (0, 1)]
        return [runtime.to_device(torch.from_numpy(x.astype(np.int64)), device) for x in pair]

    torch.manual_seed(1337)
    with contextlib.redirect_stdout(sys.stderr):
        model = GPT(GPTConfig(bias=False, **shape)).to(device)
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    network = torch.compile(model) if compiled else model
    batch = next_batch()
    for step in itertools.count():
        for _ in range(parts):
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):  # float32 on a CPU
                _, loss = network(*batch)
            batch = next_batch()  # while the GPU computes
            (loss / parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not cuda or step % 10 == 0:  # as often as the recipe logs
            loss.item()
        yield
