"""Training steps of nanoGPT and of mdlm at nanoGPT's sizes, in turn: results/bench_nanogpt.md.

    OMP_NUM_THREADS=2 python -m studies.nanogpt --nanogpt=../nanoGPT --data=tinyshakespeare.txt

nanoGPT's model.py is imported; what its train.py does in a step is repeated, with its own recipes.
"""

import contextlib
import itertools
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/nanogpt.py, from anywhere

import bench
import mdlm
from support import cli, runtime, sources
from support.cli import UserError, opt

CPU_SHAPE = dict(n_layer=4, n_head=4, n_embd=128, block_size=64, dropout=0.0)
GPU_SHAPE = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.2)


@dataclass
class Options:
    # settings
    nanogpt: str = opt("", "clone of github.com/karpathy/nanoGPT")
    data: str = opt("shakespeare", "text file, or shakespeare")
    device: str = opt("auto", "cpu, cuda, cuda:1; auto: the best there is")
    seconds: float = opt(12.0, "time to measure one contestant", bounds=(0, 1e4))
    time_limit: float = opt(0.0, "seconds after which no other is compiled", bounds=(0, 1e6))
    json: str = opt("", "write the results to this file; -: to standard output, and nothing else")


def nanogpt_steps(B, shape, vocab_size, folder, device, compiled):
    """An iterator over training steps as in nanoGPT's train.py."""
    from model import GPT, GPTConfig  # nanoGPT's own

    cuda = device.type == "cuda"
    dtype = np.uint8 if vocab_size <= 256 else np.uint16
    T = shape["block_size"]

    def next_batch():  # inputs (B, T) and the next tokens (B, T)
        data = np.memmap(folder / "train.bin", dtype=dtype, mode="r")  # anew, as it does
        starts = torch.randint(len(data) - T, (B,)).tolist()
        pair = [np.stack([data[i + shift : i + shift + T] for i in starts]) for shift in (0, 1)]
        return [runtime.to_device(torch.from_numpy(x.astype(np.int64)), device) for x in pair]

    torch.manual_seed(1337)
    with contextlib.redirect_stdout(sys.stderr):
        model = GPT(GPTConfig(bias=False, vocab_size=vocab_size, **shape)).to(device)
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    network = torch.compile(model) if compiled else model
    batch = next_batch()
    for step in itertools.count():
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):  # float32 on a CPU
            _, loss = network(*batch)
        batch = next_batch()  # while the GPU computes
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not cuda or step % 10 == 0:  # as often as the recipe logs
            loss.item()
        yield


def compare(B, shape, vocab_size, folder, book, device, seconds, until):
    """Time all contestants at one size, the most important first, relative to nanoGPT."""
    torch._dynamo.reset()
    cuda = device.type == "cuda"
    T = shape["block_size"]
    dtype = runtime.pick_dtype("auto", device)
    theirs = partial(nanogpt_steps, B, shape, vocab_size, folder, device)

    def ours(dtype, kernel, **more):
        more = dict(attention_every=1) | more | shape | dict(batch_size=B)
        config = mdlm.Config(**mdlm.PRESETS["gpu" if cuda else "cpu"] | more)
        yield from bench.steps_of(bench.start_run(config, folder, device, dtype, kernel, True))

    steps = {"nanoGPT, compiled": theirs(compiled=True)}
    for kernel in ("triton", "torch") if cuda else ("torch",):
        name = f"mdlm, {kernel} kernels, {str(dtype)[6:]}, compiled"
        steps[name] = ours(dtype, kernel)
        steps[f"{name}, AdamW"] = ours(dtype, kernel, optimizer="adamw")
    if not cuda:
        steps[f"{name}, attention in the last block alone"] = ours(dtype, kernel, attention_every=4)
    steps["nanoGPT, eager"] = theirs(compiled=False)
    if not cuda and dtype != torch.float32:
        steps["mdlm, float32, compiled"] = ours(torch.float32, "torch")
    calls = {}
    for name, iterator in steps.items():
        try:
            if time.monotonic() > until:
                raise bench.Untimed(bench.LATE)
            for _ in range(30):  # compiles, and makes the state of the optimizers
                next(iterator)
            calls[name] = partial(next, iterator)
        except Exception as e:  # the others are still worth their time
            book.note(f"{name}: {bench.describe(e)}")
            book.failed |= not isinstance(e, bench.Untimed)
    times = bench.race(calls, device, seconds, shortest=0.2)
    for name, (t, spread) in times.items():
        row = dict(batch=f"{B} x {T}", step=name, ms=t * 1e3, spread=spread * 1e3)
        row["rate"] = f"{B * T / t:,.0f} tokens/s"
        for how in ("compiled", "eager"):
            row[f"of_{how}"] = times.get(f"nanoGPT, {how}", (math.nan,))[0] / t
        book.add(row)


def main(argv):
    options = Options(**cli.parse_flags(Options, argv, __doc__))
    if not Path(options.nanogpt, "model.py").is_file():
        raise UserError(f"--nanogpt={options.nanogpt} is no clone of github.com/karpathy/nanoGPT")
    sys.path.append(options.nanogpt)  # at the end: nanoGPT has a bench.py too
    device = runtime.use_device(options.device, 0, 1)
    book = bench.Book("nanogpt", options.json, device)
    until = time.monotonic() + (options.time_limit or math.inf)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mdlm.prepare(mdlm.Config(data=options.data), folder)
        vocab_size = sources.open_ids(folder, 1, 0)[2].vocab_size
        cuda = device.type == "cuda"
        for B, shape in [(64, GPU_SHAPE)] if cuda else [(12, CPU_SHAPE), (64, CPU_SHAPE)]:
            compare(B, shape, vocab_size, folder, book, device, options.seconds, until)
    return book.close()


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
