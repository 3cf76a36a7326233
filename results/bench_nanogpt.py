"""Training steps of nanoGPT and of mdlm at nanoGPT's sizes, taking turns in one process: bench_nanogpt.md.

    OMP_NUM_THREADS=2 python results/bench_nanogpt.py --nanogpt=../nanoGPT --data=tinyshakespeare.txt

nanoGPT is a folder outside this project (github.com/karpathy/nanoGPT); its model.py is imported. What its
train.py does in a step is done here around it: batch from a memory-mapped file, learning rate, forward,
backward, clipping, its own optimizer, and a look at the loss as often as its recipe logs. On a CPU that is
the recipe of its README (4 layers x 128, context 64, no dropout, float32), with batches of 12 and 64; on a
GPU config/train_shakespeare_char.py (6 layers x 384, context 256, batch 64, dropout 0.2, bfloat16). mdlm's
step is bench.training_step, which the tests hold to the losses of mdlm.py.
"""

import contextlib
import io
import itertools
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import bench
import common
import mdlm
from common import Refusal, opt


@dataclass
class Options:
    nanogpt: str = opt("", "folder of nanoGPT, with its model.py")
    data: str = opt("", "text file: tiny Shakespeare")
    device: str = opt("auto", "cpu, cuda, cuda:1; auto: the best there is")
    seconds: float = opt(12.0, "timing of one contestant", bounds=(0, 1e4))
    time_limit: float = opt(0.0, "seconds after which no other is compiled (0: none)", bounds=(0, 1e6))
    json: str = opt("", "write the results to this file; -: to standard output, and nothing else there")


def nanogpt_step(GPT, GPTConfig, folder, size, device, compiled, log_interval):
    """A step of nanoGPT's train.py. size: the settings of that name, block_size to vocab_size."""
    B, T, cuda, steps = size["batch_size"], size["block_size"], device.type == "cuda", itertools.count()
    torch.manual_seed(1337)
    with contextlib.redirect_stdout(io.StringIO()):
        model = GPT(GPTConfig(bias=False, **{k: v for k, v in size.items() if k != "batch_size"})).to(device)
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    fast = torch.compile(model) if compiled else model

    def batch():
        data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - T, (B,)).tolist()
        pair = (torch.stack([torch.from_numpy(data[i + k:i + k + T].astype(np.int64)) for i in starts])
                for k in (0, 1))
        return [x.pin_memory().to(device, non_blocking=True) if cuda else x for x in pair]

    following = [batch()]

    def step():
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):  # on a CPU it stays in float32
            _, loss = fast(*following.pop())
        following.append(batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item() if next(steps) % log_interval == 0 else None

    return step


def race(options, book, device, GPT, GPTConfig, folder, size, start):
    """All contestants at one size: their times, and the ratio of tokens a second to nanoGPT's."""
    cuda, N = device.type == "cuda", size["batch_size"] * size["block_size"]
    dtype = mdlm.pick_dtype("auto", device)
    torch._dynamo.reset()

    def ours(kernel, dtype, **more):
        config = mdlm.Config(**mdlm.PRESETS["gpu" if cuda else "cpu"] | size | more)
        step, calls = bench.training_step(config, folder, device, dtype, kernel, True)[0], itertools.count()

        def looked_at():  # as often as mdlm.py does
            loss = step()
            return loss.item() if not cuda or next(calls) % config.log_interval == 0 else None

        return looked_at

    theirs = lambda compiled: nanogpt_step(GPT, GPTConfig, folder, size, device, compiled, 10 if cuda else 1)
    name = str(dtype)[6:]
    builders = {"nanoGPT, compiled": lambda: theirs(True)}
    for kernel in ("triton", "torch") if cuda else ("torch",):
        for more in (dict(), dict(optimizer="adamw")):
            who = f"mdlm, {kernel} kernels, {name}, compiled" + ", AdamW" * bool(more)
            builders[who] = lambda kernel=kernel, more=more: ours(kernel, dtype, **more)
    builders["nanoGPT, eager"] = lambda: theirs(False)
    if not cuda and dtype != torch.float32:
        builders["mdlm, float32, compiled"] = lambda: ours("torch", torch.float32)
    steps = {}
    for who, build in builders.items():
        if options.time_limit and time.monotonic() - start > options.time_limit:
            book.note(f"{who}: not measured: the time is up")
            continue
        try:
            step = build()
            for _ in range(30):  # compiles, and fills the optimizers' state
                step()
            steps[who] = step
        except Exception as e:  # the others are still worth their time
            book.note(f"{who}: {bench.describe(e)}")
            book.failed = True
    times = bench.race(steps, device, options.seconds, shortest=0.2)
    compiled, eager = (times.get(f"nanoGPT, {how}", (math.nan,))[0] for how in ("compiled", "eager"))
    for who, (t, spread) in times.items():
        cells = {"batch": f"{size['batch_size']} x {size['block_size']}", "step": who, "ms": f"{t * 1e3:.1f}",
                 "+-": f"{spread * 1e3:.1f}", "tokens/s": f"{N / t:,.0f}",
                 "of compiled": f"{compiled / t:.2f}", "of eager": f"{eager / t:.2f}"}
        book.add(dict(size, who=who, ms=t * 1e3, spread=spread * 1e3, ratio=compiled / t), cells)


def main(argv):
    start = time.monotonic()
    options = Options(**common.parse_flags(Options, argv, __doc__.split("\n")[0]))
    common.check_fields(options)
    nanogpt, data = Path(options.nanogpt), Path(options.data)
    if not (nanogpt / "model.py").is_file() or not (nanogpt / "train.py").is_file():
        raise Refusal(f"--nanogpt={nanogpt} is not nanoGPT's folder; clone github.com/karpathy/nanoGPT and "
                      "name that")
    if not data.is_file():
        raise Refusal(f"--data={data} is no file; give tiny Shakespeare as a text file")
    device = mdlm.pick_device(options.device)
    sys.path.insert(0, str(nanogpt))
    from model import GPT, GPTConfig
    sys.path.remove(str(nanogpt))
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as both programs
    text = data.read_text(encoding="utf-8")
    ids = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = np.array([ids[c] for c in text], dtype=np.uint16)
    small = dict(n_layer=4, n_head=4, n_embd=128, block_size=64, dropout=0.0)
    sizes = [dict(small, batch_size=B) for B in (12, 64)]
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        sizes = [dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, dropout=0.2)]
    book = bench.Book("nanogpt", options.json, device)
    with tempfile.TemporaryDirectory() as folder:
        cut = int(0.9 * len(tokens))
        tokens[:cut].tofile(Path(folder, "train.bin"))
        tokens[cut:].tofile(Path(folder, "val.bin"))
        for size in sizes:
            race(options, book, device, GPT, GPTConfig, Path(folder), size | dict(vocab_size=len(ids)), start)
    return book.close()


if __name__ == "__main__":
    sys.exit(common.run(main, sys.argv[1:]))
