"""Measure kernels, training steps and sampling, against plain PyTorch and whatever peers are installed.

    python bench.py                          # the three operations, each checked before it is timed
    python bench.py train --preset=gpu       # whole training steps: Triton and PyTorch, eager and compiled
    python bench.py sample --out_dir=out     # quality, entropy and seconds by order, steps and temperature

A time is the median over rounds in which the contestants take turns, on inputs that rotate; +- is half the
distance between its quartiles. `share` is the least time that the machine's own limits allow (a large copy
and a large matrix product, measured first) over the time taken. A contestant whose result is wrong gets no
time; if it is mdlm or the plain PyTorch beside it, the exit code is 1.
"""

import contextlib
import gc
import importlib.metadata
import itertools
import json
import math
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import common
import frontier
import kernels
import mdlm
from common import Refusal, opt
from kernels import contestants

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of a whole tensor; bfloat16 has 8 bits


@dataclass
class Options:
    json: str = opt("", "write the results to this file; -: to standard output, and nothing else there")
    device: str = opt("auto", "cpu, cuda, cuda:1; auto: the best there is")
    time_limit: float = opt(0.0, "seconds after which nothing new begins and what is left is listed (kernels "
                            "on a GPU: 35 earlier, to end in time; 0: 90 for kernels on a CPU, else none)",
                            bounds=(0, 1e6))
    seconds: float = opt(0.5, "timing of one contestant", bounds=(0, 1e4))
    preset: str = opt("all", "train: of mdlm.py; all: cpu, and on a GPU also gpu and gpt2",
                      "all", *mdlm.PRESETS)
    cuda_graphs: bool = opt(False, "train: also compiled steps whose kernels are replayed as CUDA graphs")
    out_dir: str = opt("out", "sample: run folder or checkpoint folder of a diffusion model")
    ar_dir: str = opt("", "sample: run folder of an autoregressive model, to compare with")
    data: str = opt("", "sample: compare with this text, or a folder of tokens (default: the run's)")
    pictures: str = opt("", "sample: folder for the pictures; none: draw nothing (default: the run's; none "
                        "where --out_dir is a checkpoint without the log of its run)")
    num_samples: int = opt(32, "sample: texts to draw for each line", bounds=(1, 1 << 16))


# ------------------------------------------------------------------------------------------------------------
# Timing


def clock(call, n, device):
    """Seconds per call of n calls: by CUDA events, or by a clock where calls return when they are done."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(n):
            call()
        return (time.perf_counter() - start) / n
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(n):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / n


def race(calls, device, seconds, shortest=0.01):
    """name -> (median, spread) of seconds per call. Contestants take turns of at least `shortest` seconds."""
    times, turns = {name: [] for name in calls}, {}
    for name, call in calls.items():
        clock(call, 2, device)  # warm-up
        turns[name] = max(1, min(200, int(shortest / max(clock(call, 2, device), 1e-7))))
    until = time.monotonic() + seconds * len(calls)
    while calls and (len(times[name]) < 3 or time.monotonic() < until):
        for name, call in calls.items():
            times[name].append(clock(call, turns[name], device))
    quartiles = {name: np.quantile(values, (0.25, 0.5, 0.75)).tolist() for name, values in times.items()}
    return {name: (middle, (high - low) / 2) for name, (low, middle, high) in quartiles.items()}


def captured(f, sets):
    """A call that replays one CUDA graph with f on each set of inputs."""
    stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        for inputs in sets:
            f(*inputs)
    stream.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for inputs in sets:
                f(*inputs)
    finally:  # a capture that fails raises before PyTorch leaves its stream
        torch.cuda.set_stream(stream)
    return graph.replay


def peak_memory(call):
    """Megabytes that a call takes beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def measure_limits(device, dtypes):
    """{"bandwidth": bytes/s of a large copy, read and written; dtype: FLOP/s of a large matrix product}."""
    cuda = device.type == "cuda"
    a = torch.randint(255, (1 << (31 if cuda else 27),), dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    limits = dict(bandwidth=2 * a.numel() / min(clock(lambda: b.copy_(a), 3, device) for _ in range(5)))
    n = 8192 if cuda else 1024
    for dtype in dtypes:
        x = torch.randn(n, n, device=device).to(dtype)
        limits[dtype] = 2 * n**3 / min(clock(lambda x=x: x @ x, 3, device) for _ in range(5))
    return limits


def least_seconds(cost, limits, dtype):
    """What the limits allow for (FLOPs, bytes): the slower of the two decides."""
    flops, size = cost
    return max(flops / limits[dtype] if flops else 0, size / limits["bandwidth"])


# ------------------------------------------------------------------------------------------------------------
# Results


class Book:
    """Lines of a Markdown table as they come, and the same as JSON."""

    def __init__(self, mode, path, device):
        self.path, self.failed = path, False
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
        versions = {"Python": platform.python_version(), "torch": torch.__version__}
        for package in ("triton", "liger-kernel", "cut-cross-entropy"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        self.content = dict(mode=mode, hardware=name, threads=torch.get_num_threads(), versions=versions,
                            cuda=torch.version.cuda, notes=[], rows=[])
        self.say(f"{name}, {torch.get_num_threads()} thread(s), CUDA {torch.version.cuda or 'none'}, "
                 + ", ".join(f"{k} {v}" for k, v in versions.items()))
        self.write()

    def say(self, text):
        print(text, file=sys.stderr if self.path == "-" else sys.stdout, flush=True)

    def note(self, text):
        self.content["notes"].append(text)
        self.say(text)

    def add(self, row, cells):
        if not self.content["rows"]:
            self.say("\n| " + " | ".join(cells) + " |\n" + "| --- " * len(cells) + "|")
        self.say("| " + " | ".join(cells.values()) + " |")
        self.content["rows"].append(row)
        self.write()  # now: a run that is cut off keeps what it measured

    def result(self, where, contestant, seconds, spread, rate, share, peak_mb, speed_up, **more):
        self.add(where | dict(contestant=contestant, ms=seconds * 1e3, spread=spread * 1e3, rate=rate,
                              share=share, peak_mb=peak_mb, speed_up=speed_up) | more,
                 where | {"contestant": contestant, "ms": f"{seconds * 1e3:.4g}", "+-": f"{spread * 1e3:.2g}",
                          "rate": rate, "share": f"{share:.1%}",
                          "peak MB": f"{peak_mb:,.0f}" if peak_mb is not None else "",
                          "speed-up": f"{speed_up:.2f}" if speed_up else ""})

    def trouble(self, where, contestant, text, fatal):
        """A contestant without a time: the table says why. fatal: so do stderr and the exit code."""
        self.add(where | dict(contestant=contestant, trouble=text),
                 where | {"contestant": contestant, "ms": text} | dict.fromkeys("ABCDE", ""))
        if fatal:
            self.failed = True
            print(f"bench.py: {', '.join(where.values())}, {contestant}: {text}", file=sys.stderr)

    def write(self):
        if self.path not in ("", "-"):
            try:
                common.write_atomically(Path(self.path), (json.dumps(self.content, indent=1) + "\n").encode())
            except OSError as e:
                raise Refusal(f"--json={self.path} cannot be written ({e.strerror}); "
                              "give a file in a folder that exists") from None

    def close(self):
        """The exit code."""
        if self.path == "-":
            print(json.dumps(self.content))
        return int(self.failed)


def cpu_name():
    """The processor as Linux names it, else as Python does."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def rate(amount, seconds, unit):
    """As text: 1e12 FLOP in a second are 1 TFLOP/s."""
    scale, prefix = (1e12, "T") if unit == "FLOP" and amount / seconds >= 1e12 else (1e9, "G")
    return f"{amount / seconds / scale:.4g} {prefix}{unit}/s"


def describe(error):
    """An exception in one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:100]}".replace("|", "/")


# ------------------------------------------------------------------------------------------------------------
# Kernels


def relative_error(results, exact):
    """The largest over all tensors of |result - exact| / |exact|; what is missing or NaN is wrong."""
    worst = 0.0 if len(results) == len(exact) else math.inf
    for r, e in zip(results, exact):
        r = r[:len(e)] if e.ndim else r  # of large tensors `exact` holds the first rows
        error = (torch.linalg.vector_norm(r.double() - e) / torch.linalg.vector_norm(e)).item()
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def check(case, backward, name, exact):
    """Why a contestant cannot be timed; "" if it computes what it should."""
    try:
        results = case.canonical(case.contestants[name](backward, *case.inputs(0)))  # some overwrite inputs
        if case.differs:
            return "WRONG RESULT" if case.differs(name, results, exact) else ""
        error = relative_error(results, exact if backward else exact[:1])
    except Exception as e:  # a peer may raise anything: its line says what
        return describe(e)
    return "" if error <= TOLERANCE[case.dtype] else f"WRONG RESULT, relative error {error:.2g}"


def start_line(case, exact, sets, backward, launch, device):
    """name -> call, name -> peak memory, name -> why it is not timed, of the contestants of a case."""
    calls, peaks, trouble = {}, {}, {}
    for name, f in case.contestants.items():
        trouble[name] = check(case, backward, name, exact)
        if trouble[name]:
            continue
        turns = itertools.cycle(sets)
        calls[name] = lambda f=f, turns=turns: f(backward, *next(turns))
        peaks[name] = peak_memory(calls[name]) if device.type == "cuda" else None
        if launch == "graph" and name in case.waits:
            trouble[name] = "waits for the GPU: no graph"
            del calls[name]
        elif launch == "graph":
            try:
                calls[name] = captured(lambda *inputs, f=f: f(backward, *inputs), sets)
            except RuntimeError as e:
                trouble[name] = "not captured: " + describe(e)
                del calls[name]
    return calls, peaks, trouble


def measure(case, book, limits, device, seconds):
    """Check each contestant of a case; time those that are right, and say of the others what is wrong."""
    forward, first, exact = {}, next(iter(case.contestants)), case.exact(*case.inputs(0))
    size = sum(x.numel() * x.element_size() for x in case.inputs(0))
    sets = [case.inputs(seed) for seed in range(max(1, min(16, -(-(1 << 28) // size))))]  # beyond the cache
    for backward, launch in itertools.product((False, True) if case.backward else (False,), case.launches):
        where = dict(operation=case.name, shape=f"{case.shape} {str(case.dtype)[6:]}", what=("forward"
                     + " + backward" * backward + ", graph" * (launch == "graph")))
        with torch.set_grad_enabled(backward):
            calls, peaks, trouble = start_line(case, exact, sets, backward, launch, device)
            times = race(calls, device, seconds)
        cost, a_call = case.cost(backward), len(sets) if launch == "graph" else 1
        for name in case.contestants:
            if trouble[name]:
                ours, yardstick = name.startswith("mdlm"), name == first or name.startswith("PyTorch")
                fatal = ours or (yardstick and trouble[name].startswith("WRONG"))
                book.trouble(where, name, trouble[name], fatal)
                continue
            t, spread = (x / a_call for x in times[name])
            speed = rate(cost[0] or cost[1], t, "FLOP" if cost[0] else "B")
            if backward and case.name == "attention" and t > forward.get(name, t):  # backward by difference
                speed += f" (backward {rate(cost[0] - case.cost(False)[0], t - forward[name], 'FLOP')})"
            forward[name] = t
            book.result(where, name, t, spread, speed, least_seconds(cost, limits, case.dtype) / t,
                        peaks[name], times[first][0] / times[name][0] if first in times else None,
                        flops=cost[0], bytes=cost[1])


def bench_kernels(options, device, book):
    """All cases of the device, as far as time allows."""
    start, cuda = time.monotonic(), device.type == "cuda"
    if not cuda:
        book.note("No CUDA device: Triton cannot be timed here. This compares what the CPU path really does.")
    dtypes = [torch.bfloat16] if cuda else [torch.float32, torch.bfloat16]
    limits = measure_limits(device, dtypes)
    last = (options.time_limit or math.inf) - 35 if cuda else options.time_limit or 90  # to compile and time
    book.note(f"limits measured: copy {limits['bandwidth'] / 1e9:,.0f} GB/s, matrix product "
              + ", ".join(f"{str(d)[6:]} {limits[d] / 1e12:.3g} TFLOP/s" for d in dtypes))
    for make in contestants.cases(device):
        torch._dynamo.reset()  # forget what was compiled for another shape
        case = make()
        if time.monotonic() - start > last:
            where = dict(operation=case.name, shape=f"{case.shape} {str(case.dtype)[6:]}", what="")
            book.trouble(where, "all", "not measured: the time is up", fatal=False)
        else:
            measure(case, book, limits, device, options.seconds)
        if cuda:
            try:
                torch.cuda.empty_cache()
            except RuntimeError as e:  # PyTorch's allocator may take a failed capture for one that goes on
                book.note("memory is not given back: " + describe(e))


# ------------------------------------------------------------------------------------------------------------
# Training: the step of mdlm.train, without what only a run needs


def training_step(config, folder, device, dtype, kernel, compiled, graphs=False):
    """A fresh model on the data in `folder`: (step, which returns the loss as a tensor; the model)."""
    corpus = mdlm.Corpus(folder, config, device)
    torch.manual_seed(config.seed)
    model = mdlm.Model(config, corpus.tokenizer.vocab_size, kernels.select(kernel, device)).to(device)
    optimizers, params = mdlm.make_optimizers(model, config, device), list(model.parameters())
    ema, weight = [p.detach().clone() for p in params], mdlm.sequence_weights(config).to(device)
    fast = mdlm.compile_model(model, device, graphs) if compiled else model
    parts, steps = config.gradient_accumulation_steps, itertools.count()
    B = config.batch_size // parts

    def step():
        k, loss = next(steps), 0
        for part in range(parts):
            batch = mdlm.make_batch(model, corpus, weight, k, torch.arange(B) + part * B)
            if config.dropout:
                torch.manual_seed(k * parts + part)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                part_loss = fast(*batch) / parts
            part_loss.backward()
            loss = loss + part_loss.detach()
        common.clip_gradients(params, config.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch._foreach_lerp_(ema, [p.detach() for p in params], 1 - config.ema)
        return loss

    return step, model


def warmed_up(*args):
    """training_step after three steps, which compile and make the optimizers' state: and the third's loss."""
    step, model = training_step(*args)
    return step, model, [step() for _ in range(3)][-1].item()


def race_steps(config, folder, device, book, options, start):
    """Time the steps of a preset: PyTorch and Triton, first compiled, as one trains, then eager."""
    cuda, dtype = device.type == "cuda", mdlm.pick_dtype("auto", device)
    N, peak = config.batch_size * config.block_size, common.peak_flops(device, dtype)
    base = None  # seconds of the first that is timed: the others' speed-up is over it
    where = dict(operation="training step", shape=f"V={config.vocab_size} T={config.block_size} "
                 f"batch={config.batch_size} {str(dtype)[6:]}", what=config.preset)
    late = lambda: options.time_limit and time.monotonic() - start > options.time_limit
    exact = None if late() else third_loss(config, folder, device, dtype, book)
    for compiled in (True, False):
        steps, peaks, flops = {}, {}, 0
        replayed = (False, True) if compiled and options.cuda_graphs else (False,)
        for kernel, graphs in itertools.product(("torch", "triton") if cuda else ("torch",), replayed):
            how = ("compiled" if compiled else "eager") + ", CUDA graphs" * graphs
            name = f"--kernels={kernel}, {how}"
            if late():
                book.trouble(where, name, "not measured: the time is up", fatal=False)
                continue
            step = model = None
            gc.collect()  # what the last pair and the yardstick took is given back before memory is counted
            before = torch.cuda.memory_allocated() if cuda else 0
            skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
            try:
                step, model, loss = warmed_up(config, folder, device, dtype, kernel, compiled, graphs)
            except Exception as e:  # no compiler, no memory, no Triton: the line says what
                book.trouble(where, name, describe(e), fatal=kernel == "triton" and not graphs)
                continue
            exact = loss if exact is None else exact
            if not abs(loss - exact) <= 0.02:
                text = f"WRONG RESULT, its third loss is {abs(loss - exact):.2g} off"
                book.trouble(where, name, text, fatal=True)
                continue
            steps[name], flops = step, mdlm.flops_per_token(model)
            skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
            if graphs and skips > skipped:
                book.note(f"{name}: torch.compile left CUDA graphs out, {skips - skipped} time(s)")
            if cuda and not graphs:  # a graph's own memory is not the allocator's
                peaks[name] = (torch.cuda.memory_allocated() - before) / 1e6 + peak_memory(step)
        for name, (t, spread) in race(steps, device, options.seconds).items():
            base = base or t
            book.result(where, name, t, spread, f"{N / t:,.0f} tokens/s", N / t * flops / peak,
                        peaks.get(name), base / t, tokens_per_second=N / t)


def third_loss(config, folder, device, dtype, book):
    """The loss of eager PyTorch, by which the others are judged; None if it has none here."""
    try:
        return warmed_up(config, folder, device, dtype, "torch", False)[2]
    except Exception as e:  # most likely no memory: the others may need less
        book.note("eager PyTorch, the yardstick of the losses, fails: " + describe(e))
    return None


def bench_training(options, device, book):
    """Whole steps of the presets, on random tokens."""
    if options.cuda_graphs and device.type != "cuda":
        raise Refusal(f"--cuda_graphs needs a CUDA device, and this is {device}; leave the flag out")
    start, presets = time.monotonic(), ("gpu", "gpt2", "cpu") if device.type == "cuda" else ("cpu",)
    torch.set_float32_matmul_precision("high")  # as mdlm.py
    book.note("share: MFU, of the maker's peak of a known GPU, else of a large matrix product")
    for preset in presets if options.preset == "all" else (options.preset,):
        V = 50257 if preset == "gpt2" else 65
        config = mdlm.Config(**mdlm.PRESETS[preset] | dict(preset=preset, vocab_size=V))
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as folder:
            for name, n in (("train.bin", 4 << 20), ("val.bin", 1 << 14)):
                np.random.default_rng(0).integers(V, size=n, dtype=np.uint16).tofile(Path(folder, name))
            race_steps(config, folder, device, book, options, start)


MODES = dict(kernels=bench_kernels, train=bench_training, sample=frontier.bench_sampling)


def main(argv):
    mode, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("kernels", argv)
    if mode not in MODES:
        raise Refusal(f"{mode!r} is nothing that bench.py measures; give {', '.join(MODES)} or nothing")
    late = [a for a in flags if a in MODES and flags is argv]
    if late:
        raise Refusal(f"{late[0]!r} comes first: python bench.py {late[0]} "
                      + " ".join(a for a in flags if a != late[0]))
    options = Options(**common.parse_flags(Options, flags, __doc__))
    common.check_fields(options)
    device = mdlm.pick_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # where streams, events and memory are counted
    torch.manual_seed(0)
    book = Book(mode, options.json, device)
    MODES[mode](options, device, book)
    return book.close()


if __name__ == "__main__":
    sys.exit(common.run(main, sys.argv[1:]))
