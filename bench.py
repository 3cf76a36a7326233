"""Measure kernels, training steps and sampling against plain PyTorch and installed peers.

    python bench.py kernels               # on a GPU: each operation of kernels/, checked and timed
    python bench.py train --preset=gpu    # a training step: Triton or PyTorch, compiled or not
    python bench.py profile --preset=gpu  # on a GPU: which kernels take the time of a step
    python bench.py generate              # how long a sampler takes for a network call
    python bench.py sample --out_dir=out  # quality of generated texts, by number of network calls

Without a mode: kernels on a GPU, train on a CPU. (Kernels without a GPU: studies/smoke.py for their
errors, tests/aot.py for their registers.)

The contestants of a case (mdlm, PyTorch, peers) are timed in turns; a time is the median over
rounds, and `spread` half its interquartile range. Results are checked first; a contestant with a
wrong result gets no time. The last line sums up the speed-ups of mdlm.

`share` of an operation is the shortest time that its FLOPs and bytes allow, at the measured speed
of products and copies on this GPU, as a fraction of its time; `error` is relative to float64, and
`host_us` is the host time per call in microseconds.
`share` of a training step is MFU: the model's FLOP/s as a fraction of the GPU's peak. In a profile,
it is the fraction of the time of all kernels. `vs_compiled` and `vs_eager` are speed-ups over
PyTorch, compiled and eager; `vs_old` over the same row of the file of --against.
"""

from nanomdlm.support.cli import entry, settings, terminal

entry.start(__name__)

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import itertools
import json
import math
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import eval
import mdlm
import sample
from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels.reference import block_spans, prepare, rotary_tables
from nanomdlm.support.cli import devices, outputs
from nanomdlm.support.cli.files import naming, to_json
from nanomdlm.support.cli.networks import open_network
from nanomdlm.support.cli.settings import Amount, Count, Reads, Seed, Writes
from nanomdlm.support.data import sources
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import word_statistics
from nanomdlm.support.infill.ensemble import read_newest
from nanomdlm.support.infill.model_calls import groups
from nanomdlm.support.numerics import generator, standard_error
from nanomdlm.support.run import compiling, graphs, plots, ranks
from nanomdlm.support.run import config as run_config
from nanomdlm.support.run.run import run_eagerly

# Relative, of a tensor. In bfloat16 right ones have 2e-3 to 5e-3 (results/hopper.md).
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8e-3, torch.int64: 0}
STEP_TOLERANCE = TOLERANCE | {torch.bfloat16: 2e-2}  # gradients of a step pass through more
LATE = "not measured: the time is up"


@dataclass
class Options:
    """What to measure: kernels, train, profile and generate time; sample judges texts."""

    # Every mode
    json: Writes = ""  # write the results to this file (-: standard output)
    device: str = "auto"  # cpu, cuda or cuda:1; auto: a GPU if there is one
    against: Reads = ""  # compare the times with this file, written by --json earlier
    time_limit: Amount = 0.0  # stop after about this many seconds (0: no limit)
    # Times
    seconds: Amount = 0.5  # seconds of timing per contestant
    only: str = ""  # kernels: measure only the operations whose name contains this text
    preset: Literal["all", "cpu", "gpu", "gpt2"] = "all"  # of training steps (all that fit)
    autotune: bool = False  # on a GPU, also time torch.compile with max-autotune (takes minutes)
    # Samples
    out_dir: Reads = "out"  # run or checkpoint folder of a diffusion model
    ar_dir: Reads = ""  # run folder of an autoregressive model that scores texts
    data: Reads = ""  # compare the texts with this file or folder (default: the run's data)
    num_samples: Count = 64  # texts to write per row of the table and seed
    seed: Seed = 1000  # first seed
    seeds: Count = 2  # number of consecutive seeds
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of matrix products
    trust_remote_code: bool = False  # allow custom code from the checkpoint
    picture: Writes = ""  # draw quality by network calls into this file, .png or .svg


# How the table shows the numbers of a row; those without a format are only in the JSON.
FORMATS = dict(ms=".4g", spread=".2g", share=".1%", peak_mb=",.0f")
FORMATS |= dict(vs_compiled=".2f", vs_eager=".2f", vs_old=".2f")
FORMATS |= dict(error=".1e", host_us=".3g", calls="d", seconds=".2f")
FORMATS |= dict(words=".1%", words_se=".1%", distinct=".3f", told=".1%", told_se=".1%")
FORMATS |= dict(twin=".3f", twin_se=".3f", expected=".3f")
WHERE = ("operation", "shape", "what")  # of a row; in the table, the heading above it


SLOWER = 0.05  # what --against names
# The contestant whose speed-up the last line gives -> PyTorch compiled, PyTorch eager
YARDSTICKS = {
    "mdlm": ("PyTorch compiled", "PyTorch eager"),
    "--kernels=auto, compiled": ("--kernels=torch, compiled", "--kernels=torch, eager"),
}
# It is also timed where "auto" leaves attention to PyTorch (kernels/operations.py); then it counts.
YARDSTICKS["--kernels=triton, compiled"] = YARDSTICKS["--kernels=auto, compiled"]


def heading(row):
    return ", ".join(row[key] for key in WHERE if row.get(key))


def place(row):
    """What a row measures: operation, shape, what and contestant."""
    return tuple(row.get(key, "") for key in (*WHERE, "contestant"))


def aligned(cells, widths):
    """A line of a Markdown table; numbers stand at the right."""
    padded = []
    for name, width in widths.items():
        text = cells.get(name, "")
        padded.append(text.rjust(width) if name in FORMATS else text.ljust(width))
    return f"| {' | '.join(padded)} |"


def read_times(path):
    """(place -> milliseconds, hardware) of a file written by --json; ({}, "") without one."""
    if not path:
        return {}, ""
    try:
        old = json.loads(Path(path).read_bytes())
        rows = [row for row in old["rows"] if row.get("ms") and "contestant" in row]
        return {place(row): row["ms"] for row in rows}, old["hardware"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--against={path} was not written by bench.py --json") from error


def speed_ups(rows):
    """In words: the speed-up of each operation and step over PyTorch compiled (eager); or "".

    Of each operation the first shape counts, with the backward pass if that was timed.
    """
    times = {}
    for row in rows:
        if row.get("ms") and "contestant" in row:
            times.setdefault(place(row)[:3], {})[row["contestant"]] = row["ms"]
    shapes = {}
    said = {}
    for (operation, shape, what), ms in times.items():
        name = f"step of {what}" if operation == "training step" else operation
        for ours, (compiled, eager) in YARDSTICKS.items():
            if {ours, compiled} <= ms.keys() and shapes.setdefault(name, shape) == shape:
                also = f" ({ms[eager] / ms[ours]:.2f}x)" if eager in ms else ""
                said[name] = f"{name} {ms[compiled] / ms[ours]:.2f}x{also}"
    words = ", ".join(said.values())
    return words and f"speed-up over PyTorch compiled (eager): {words}"


class ResultsTable:
    """The results: lines of a Markdown table, printed as they come, and the same as JSON."""

    def __init__(self, mode, options, device):
        self.path = options.json
        self.until = time.monotonic() + (options.time_limit or math.inf)
        self.failed = False
        self.measured = 0  # lines with numbers
        self.above = None  # the heading and the header above the next line
        self.old_file = options.against
        self.old, self.old_hardware = read_times(options.against)
        versions = {"Python": platform.python_version(), "torch": torch.__version__}
        for package in ("triton", "liger-kernel", "quack-kernels", "cut-cross-entropy"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        cpu = Path("/proc/cpuinfo")
        named = re.search(r"model name\s*: (.*)", cpu.read_text() if cpu.exists() else "")
        hardware = named[1] if named else platform.machine()
        if device.type == "cuda":
            hardware = torch.cuda.get_device_name(device)
        machine = dict(hardware=hardware, threads=torch.get_num_threads(), cuda=torch.version.cuda)
        machine |= clocks() if device.type == "cuda" else {}
        self.content = dict(mode=mode, **machine, versions=versions, notes=[], rows=[])
        self.say(", ".join(f"{key} {value}" for key, value in (machine | versions).items()))
        self.write()

    def say(self, text):
        if self.path == "-":
            terminal.warn(text)
        else:
            print(text, flush=True)

    def note(self, text):
        self.content["notes"].append(text)
        self.say(text)
        self.write()

    def begin(self, title):
        """A new table: the next line has a header above it."""
        self.above = (title, ())
        self.say(f"\n{title}")

    def add(self, *rows):
        """Lines of the table, aligned with one another."""
        for row in rows:
            if "ms" in row and "contestant" in row and place(row) in self.old:
                row["vs_old"] = self.old[place(row)] / row["ms"]
        lines = []
        for row in rows:
            shown = {k: v for k, v in row.items() if isinstance(v, str) or k in FORMATS}
            shown = {k: v for k, v in shown.items() if k not in WHERE}
            for k, v in shown.items():
                if not isinstance(v, str):
                    shown[k] = "" if v is None else format(v, FORMATS[k])
            lines.append(shown)
        header = {k: k for line in lines for k in line}
        widths = {}
        for k in header:
            least = 8 if k in FORMATS else 24
            widths[k] = max(least, *(len(line.get(k, "")) for line in [header, *lines]))
        above = (heading(rows[0]), tuple(header))
        if above != self.above:
            if above[0] and above[0] != (self.above or [""])[0]:
                self.say(f"\n{above[0]}")
            self.above = above
            dashes = {k: "-" * (widths[k] - 1) + (":" if k in FORMATS else "-") for k in header}
            self.say("\n" + aligned(header, widths) + "\n" + aligned(dashes, widths))
        for row, line in zip(rows, lines, strict=True):
            self.say(aligned(line, widths))
            self.measured += "ms" in row or row.get("calls") is not None
            self.content["rows"].append(row)
        self.write()  # now: a run that is cut off keeps what it measured

    def fail(self, where, contestant, text, fatal=False):
        """A contestant without a time. If fatal, stderr and the exit code say so too."""
        row = where | dict(contestant=contestant)
        self.content["rows"].append(row | dict(trouble=text))
        if heading(row) != (self.above or [""])[0]:
            self.begin(heading(row))
        self.say(f"- {contestant}: {text}")
        self.write()
        if fatal:
            self.failed = True
            terminal.warn(f"bench.py: {', '.join(row.values())}: {text}")

    def write(self):
        if self.path not in ("", "-"):
            outputs.write(self.path, (to_json(self.content, indent=1) + "\n").encode())

    def draw(self, path):
        """Draw the rows of `bench.py sample`; raises UserError if they are too few."""
        rows = self.content["rows"]
        if not any("by_seed" in row for row in rows):
            raise UserError(f"{path} is not drawn: no sampler was measured; raise --time_limit")
        plots.plot_frontier(rows, path)
        self.say(f"picture: {path}")

    def close(self):
        """The exit code, after the last lines; raises UserError if nothing was measured."""
        for text in (speed_ups(self.content["rows"]), self.compared()):
            if text:
                self.note(f"\n{text}")
        if self.path == "-":
            print(to_json(self.content))
        if not (self.measured or self.failed):
            raise UserError("nothing was measured: the lines above say why; raise --time_limit")
        return int(self.failed)

    def compared(self):
        """In words: what is slower than in the file of --against; "" without it."""
        if not self.old:
            return ""
        both = [row for row in self.content["rows"] if "vs_old" in row]
        if not both:
            return "nothing that was measured is in the file of --against"
        middle = np.median([row["vs_old"] for row in both])
        slower = [row for row in both if row["vs_old"] < 1 - SLOWER]
        text = f"against {self.old_file}: {len(both)} rows, {middle:.2f}x in the middle; "
        if self.old_hardware != self.content["hardware"]:
            text += f"it was measured on other hardware, {self.old_hardware}; "
        each = "; ".join(
            f"{heading(row)}, {row['contestant']} {row['vs_old']:.2f}x" for row in slower
        )
        return f"{text}slower by more than {SLOWER:.0%}: {each or 'none'}"


def clocks():
    """The GPU's driver, clock, highest clock and power limit, by nvidia-smi; {} without it."""
    query = "driver_version,clocks.sm,clocks.max.sm,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    names = ("driver", "clock", "highest_clock", "power_limit")
    return dict(zip(names, said.stdout.splitlines()[0].split(", ")))


def describe(error):
    """An exception in one short line."""
    lines = str(error).strip().splitlines() or [""]
    name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{name}{lines[0][:100]}".replace("|", "/")


# ---- Timing: in turns, on an idle device, by a median
def clock(call, n, device):
    """Seconds per call of n calls, until the device is idle."""
    start = time.perf_counter()
    for _ in range(n):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / n


def race(calls, device, seconds, shortest=0.01):
    """name -> (median, spread) of seconds per call, in turns of at least `shortest` seconds."""
    times = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        clock(call, 2, device)  # warm-up
        repeats[name] = max(1, int(shortest / max(clock(call, 2, device), 1e-7)))
    until = time.monotonic() + seconds * len(calls)
    while calls and (len(times[name]) < 3 or time.monotonic() < until):
        for name, call in calls.items():
            times[name].append(clock(call, repeats[name], device))
    quartiles = {name: np.quantile(t, (0.25, 0.5, 0.75)).tolist() for name, t in times.items()}
    return {name: (middle, (high - low) / 2) for name, (low, middle, high) in quartiles.items()}


class TimeUp(KeyboardInterrupt):
    """The time limit has passed while something compiles; like Ctrl-C, no library catches it."""


@contextlib.contextmanager
def limited(until):
    """Raise TimeUp at a time of time.monotonic(), where there are signals (not on Windows)."""

    def stop(*args):
        raise TimeUp

    seconds = until - time.monotonic()
    if math.isinf(seconds) or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def captured(f, sets):
    """A call that replays one CUDA graph of f on each set of inputs."""
    stream = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    contexts = (torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(graph))
    try:
        for context in contexts:  # the first is the warm-up that a capture needs
            torch.cuda.synchronize()
            with context:
                for inputs in sets:
                    f(*inputs)
    finally:  # a failed capture raises before PyTorch leaves its stream
        torch.cuda.set_stream(stream)
    return graph.replay


def peak_memory(call, device, before=None):
    """Megabytes of GPU memory that a call needs beyond `before` bytes (those now); else None."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if before is None else before
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def host_time(call, device, n=10):
    """Microseconds of host time for a call: until it is launched, not until it is done."""
    clock(call, 1, device)
    start = time.perf_counter()
    for _ in range(n):
        call()
    seconds = (time.perf_counter() - start) / n
    clock(call, 1, device)  # until it is done
    return seconds * 1e6


def ceilings(device, seconds=0.2):
    """(FLOP/s of a product in bfloat16, bytes/s of a copy), as measured on this device."""
    n = 8192 if device.type == "cuda" else 256
    a, b, c = (torch.randn(n, n, device=device).bfloat16() for _ in range(3))
    source, target = (torch.empty(16 * n * n, dtype=torch.uint8, device=device) for _ in range(2))
    calls = dict(product=lambda: torch.mm(a, b, out=c), copy=lambda: target.copy_(source))
    times = race(calls, device, seconds)
    return 2 * n**3 / times["product"][0], 2 * len(source) / times["copy"][0]


def rate(x, unit):
    """As text: 1e12 FLOP/s are 1 TFLOP/s."""
    return f"{x / 1e12:.4g} T{unit}" if x >= 1e12 else f"{x / 1e9:.4g} G{unit}"


# ---- Kernels: an operation at one shape, beside plain PyTorch and installed peers
# Peers: github.com/linkedin/Liger-Kernel, github.com/apple/ml-cross-entropy, and PyTorch's own.
compile_fixed = partial(torch.compile, dynamic=False)
AUTOTUNED = "PyTorch, max-autotune"
AUTOTUNE_MODE = "max-autotune-no-cudagraphs"  # the graphs are ours


@dataclass
class Case:
    """An operation at one shape. Its contestants are functions of (backward, *inputs) -> output
    and, with backward, gradients, compared with `exact` (float64) before they are timed."""

    name: str
    shape: str
    dtype: torch.dtype
    # "forward", "forward + backward" -> (FLOPs, the fewest bytes between memory and chip)
    cost: dict
    inputs: Callable  # seed -> tensors
    exact: Callable  # inputs -> [output, gradients]
    contestants: dict  # name -> function; speed-ups are relative to the first
    graph: bool  # replayed as a CUDA graph, which hides the host's time


def outcome(out, inputs, backward, grad=None):
    return (out, *torch.autograd.grad(out, inputs, grad)) if backward else (out,)


def yardsticks(contestant, f):
    return {
        "PyTorch eager": contestant(f),
        "PyTorch compiled": contestant(compile_fixed(f)),
        AUTOTUNED: contestant(autotuned(f)),
    }


def autotuned(f):
    """f, compiled with max-autotune when it is first called: that imports much."""
    compiled = functools.cache(lambda: compile_fixed(f, mode=AUTOTUNE_MODE))
    return lambda *args, **more: compiled()(*args, **more)


def flex_mask(spans):
    """FlexAttention's mask of spans that hold for all texts, or None."""
    if spans is None:
        return None
    start, end = spans[0, :4:2], spans[0, 1:4:2]  # (1 or 2, T)

    def visible(b, h, q, k):
        first = (start[0, q] <= k) & (k < end[0, q])
        return first | ((start[-1, q] <= k) & (k < end[-1, q]))

    return create_block_mask(visible, None, None, start.shape[1], start.shape[1], spans.device)


def grouped_flex(spans):
    """FlexAttention with the arguments of kernels.grouped_attention; spans: as of `flex`."""
    mask = flex_mask(spans)

    def f(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return compile_fixed(f)


def flex(spans, copies=False):
    """FlexAttention (Dong et al., 2412.05496): it visits the tiles that block_spans say, or all.

    Compiled together with the normalization and rotation before it. copies: v too is made
    contiguous, as torch 2.13 is wrong on a CPU where v alone is a view.
    """
    mask = flex_mask(spans)

    def f(qkv, cos, sin, qk_norm, spans):
        q, k, v = (z.transpose(1, 2) for z in prepare(qkv, cos, sin, qk_norm))  # (B, H, T, D)
        if copies:
            v = v.contiguous()
        return flex_attention(q, k, v, block_mask=mask).transpose(1, 2)

    return compile_fixed(f)


def attention(device, dtype, B, T, H, D, S=0, prepares=False):
    """On packed projections, whose gradient is packed too, as in the model: there SDPA reads q, k,
    v by their strides, and its gradients are stacked. S: T rows that block_spans describes.
    prepares: queries and keys are normalized and rotated first, as in the model."""
    ref = kernels.attention_ref
    spans = block_spans(T // 2, S, device) if S else None
    tables = [x.to(device) for x in rotary_tables(T, D)] if prepares else (None, None)

    def inputs(seed):
        g = torch.Generator(device).manual_seed(seed)
        qkv = torch.randn(B, T, 3, H, D, generator=g, device=device).to(dtype)
        grad = torch.randn(B, T, H, D, generator=g, device=device).to(dtype)
        return qkv.requires_grad_(), grad

    def contestant(f):
        return lambda backward, qkv, grad: outcome(
            f(qkv, *tables, prepares, spans=spans), (qkv,), backward, grad
        )

    def exact(qkv, grad):
        outcomes = []
        # One sequence at a time: (1, H, T, T) scores in float64.
        for x, g in zip(qkv.detach().double().split(1), grad.double().split(1)):
            x.requires_grad_()
            outcomes.append(outcome(ref(x, *tables, prepares, spans=spans), (x,), True, g))
        return [torch.cat(tensors).detach() for tensors in zip(*outcomes)]

    contestants = yardsticks(contestant, ref)
    for name in ("EFFICIENT",) if S else ("FLASH", "CUDNN", "EFFICIENT"):
        backend = sdpa_kernel(getattr(SDPBackend, f"{name}_ATTENTION"))
        contestants[f"SDPA {name}"] = contestant(backend(ref))
    if S or prepares:
        contestants["FlexAttention"] = contestant(flex(spans))
        contestants["FlexAttention, v copied"] = contestant(flex(spans, copies=True))
    contestants["mdlm"] = contestant(kernels.attention)
    shape = f"B={B} T={T} H={H} D={D} {str(dtype)[6:]}" + f" S={S}" * bool(S)
    # With n blocks of S tokens both halves see S^2 (1 + ... + n) pairs.
    pairs = T // 2 * (T // 2 + S) if S else T * T
    product = 2 * B * H * pairs * D  # FLOPs
    n = B * T * H * D * dtype.itemsize  # bytes of q
    # Forward reads q, k, v, writes O; backward reads q, k, v, O, dO, writes dq, dk, dv. Backward
    # computes the scores again, then four gradients.
    cost = {"forward": (2 * product, 4 * n), "forward + backward": (7 * product, 12 * n)}
    name = "attention with norm and rotation" if prepares else "attention"
    return Case(name, shape, dtype, cost, inputs, exact, contestants, True)


def head_peers():
    """Names and f(h, W, targets), the mean cross-entropy over all rows of h; None if missing."""
    yield "F.linear_cross_entropy", getattr(F, "linear_cross_entropy", None)
    # By default Liger adds the chunks of dW in bfloat16.
    liger = optional("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    yield "liger-kernel", liger and partial(liger, accum_dtype=torch.float32)
    on_hopper = optional(
        "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90",
        "LigerFusedLinearCrossEntropySM90Function",
    )
    yield "liger-kernel, for Hopper", on_hopper and on_hopper.apply
    quack = optional("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    yield "quack-kernels, in chunks", quack
    # By default it leaves out gradients below a threshold: wrong by 2.5 % (results/hopper.md).
    cut = optional("cut_cross_entropy", "linear_cross_entropy")
    yield "cut-cross-entropy", cut and partial(cut, filter_eps=None)


def optional(module, name):
    """An attribute of a module, or None if that cannot be imported."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def head(device, dtype, M, C, V):
    """The mean loss over M rows: the model gives the head the masked ones alone."""

    def inputs(seed):
        g = torch.Generator(device).manual_seed(seed)
        h = torch.randn(M, C, generator=g, device=device).to(dtype)
        W = (torch.randn(V, C, generator=g, device=device) * 2 / C**0.5).to(dtype)
        targets = torch.randint(V, (M,), generator=g, device=device)
        weight = torch.full((M,), 1 / M, device=device)
        return h.requires_grad_(), W.requires_grad_(), targets, weight

    def contestant(f):
        return lambda backward, h, W, *more: outcome(f(h, W, *more), (h, W), backward)

    def exact(h, W, targets, weight):
        h, W = (x.detach().double().requires_grad_() for x in (h, W))
        loss = 0
        for x, y in zip(h.split(1024), targets.split(1024)):
            chunk_loss = F.cross_entropy(x @ W.T, y, reduction="sum") / M
            chunk_loss.backward()
            loss += chunk_loss.detach()
        return [loss, h.grad, W.grad]

    contestants = yardsticks(contestant, kernels.linear_cross_entropy_ref)
    for name, f in head_peers():
        contestants[name] = f and contestant(lambda h, W, targets, _, f=f: f(h, W, targets))
    contestants["mdlm"] = contestant(kernels.linear_cross_entropy)
    shape = f"M={M} C={C} V={V} {str(dtype)[6:]}"
    # Three products. Forward reads h and W; backward writes their gradients.
    cost = {"forward + backward": (3 * 2 * M * C * V, 2 * (M + V) * C * dtype.itemsize)}
    # No graph: some peers wait for the GPU.
    return Case("head + loss", shape, dtype, cost, inputs, exact, contestants, False)


def norm_conv(device, dtype, B, T, C, k=5):
    """RMSNorm and the convolution over k positions."""

    def inputs(seed):
        g = torch.Generator(device).manual_seed(seed)
        x, grad = (torch.randn(B, T, C, generator=g, device=device).to(dtype) for _ in range(2))
        weight = torch.randn(k, C, generator=g, device=device) / 2
        return x.requires_grad_(), weight.requires_grad_(), grad

    def contestant(f):
        return lambda backward, x, weight, grad: outcome(f(x, weight), (x, weight), backward, grad)

    def exact(x, weight, grad):
        x, weight = (z.detach().double().requires_grad_() for z in (x, weight))
        results = outcome(kernels.norm_conv_ref(x, weight), (x, weight), True, grad.double())
        return [z.detach() for z in results]

    contestants = yardsticks(contestant, kernels.norm_conv_ref)
    contestants["mdlm"] = contestant(kernels.norm_conv)
    n = B * T * C * dtype.itemsize  # bytes of x
    # Forward reads x and writes y; backward reads x and dy, and writes dx.
    cost = {"forward": (0, 2 * n), "forward + backward": (0, 5 * n)}
    shape = f"B={B} T={T} C={C} {str(dtype)[6:]}"
    return Case("norm and convolution", shape, dtype, cost, inputs, exact, contestants, True)


def masking(device, B, T, V=65):
    """Exact, mirrored counts as in training; returns tokens, counts and ascending row indices."""

    def inputs(seed):
        g = torch.Generator(device).manual_seed(seed)
        level = torch.randint(1, T + 1, (B,), generator=g, device=device)
        level[B // 2 :] = T + 1 - level[: B // 2]
        x0 = torch.randint(V, (B, T), generator=g, device=device)
        key = [torch.tensor(number, device=device) for number in (seed, 7)]  # seed and step
        return x0, level, *key, torch.arange(B, device=device)

    def keyed(f):
        return lambda backward, x0, level, *key: f(x0, level, V, *key)

    contestants = yardsticks(keyed, kernels.mask_tokens_ref)
    contestants["mdlm"] = keyed(kernels.mask_tokens)
    exact = partial(keyed(kernels.mask_tokens_ref), False)
    # Reads int64 tokens, writes tokens and row indices; and each row's level, number and count.
    cost = {"forward": (0, 8 * (3 * B * T + 3 * B))}
    shape = f"B={B} T={T} int64"
    return Case("masking", shape, torch.int64, cost, inputs, exact, contestants, True)


def kernel_cases(device):
    """Functions that build the cases, the most important first."""
    bf16 = torch.bfloat16

    def attention_at(T, D, S=0):
        tokens = 32768 if T <= 1024 else 16384
        return partial(attention, device, bf16, tokens // T, T, 768 // D, D, S)

    yield partial(head, device, bf16, 8192, 384, 65)  # first those of the preset gpu
    yield partial(masking, device, 64, 256)
    yield attention_at(256, 64)
    yield partial(norm_conv, device, bf16, 64, 256, 384)
    for T in (256, 512, 1024):
        yield partial(attention_at(T, 64), prepares=True)
    yield partial(norm_conv, device, bf16, 64, 1024, 768)
    yield partial(head, device, bf16, 32768, 768, 50304)
    for T in (512, 1024):
        yield partial(masking, device, 64, T)
        yield attention_at(T, 64)
    for T, S in ((512, 4), (512, 16), (2048, 16)):
        yield attention_at(T, 64, S)
    for T, D in ((128, 64), (4096, 64), (256, 32), (1024, 32)):
        yield attention_at(T, D)
    yield partial(head, device, bf16, 4096, 768, 262144)  # the vocabulary of Gemma 3


# ---- Kernels: checked, then timed
def check_close(results, exact, tolerance):
    """The largest |result - exact| / |exact| of a tensor; UserError if it is too large or NaN."""
    errors = [(r.double() - e).norm() / e.double().norm() for r, e in zip(results, exact)]
    error = torch.stack(errors).nan_to_num(math.inf, math.inf).max().item()
    if len(results) != len(exact) or error > tolerance:
        raise UserError(f"WRONG RESULT, relative error {error:.2g}")
    return error


def check(case, name, backward, exact):
    """The relative error of a contestant; UserError if it does not compute what it should."""
    inputs = case.inputs(0)  # fresh ones: some contestants overwrite them
    results = case.contestants[name](backward, *inputs)
    forward_only = case.dtype.is_floating_point and not backward
    return check_close(results, exact[:1] if forward_only else exact, TOLERANCE[case.dtype])


def measure(case, table, device, seconds, limits):
    """Check and time the contestants of a case; report what is wrong with those that get no time.

    limits: FLOP/s and bytes/s of the device, see `ceilings`.
    """
    first = next(iter(case.contestants))
    exact = case.exact(*case.inputs(0))
    size = sum(x.numel() * x.element_size() for x in case.inputs(0))
    n_sets = max(1, min(16, math.ceil((1 << 28) / size)))  # together beyond the cache
    sets = [case.inputs(seed) for seed in range(n_sets)]
    for what, (flops, n_bytes) in case.cost.items():
        backward = "backward" in what
        where = dict(operation=case.name, shape=case.shape, what=what)
        calls = {}
        facts = {}
        with torch.set_grad_enabled(backward):
            for name in case.contestants:
                if case.contestants[name] is None:
                    table.fail(where, name, "missing")
                    continue
                try:
                    with limited(table.until):
                        error = check(case, name, backward, exact)
                        f = partial(case.contestants[name], backward)
                        call = partial(next, itertools.starmap(f, itertools.cycle(sets)))
                        facts[name] = dict(peak_mb=peak_memory(call, device), error=error)
                        facts[name]["host_us"] = host_time(call, device)
                        calls[name] = captured(f, sets) if case.graph else call
                except TimeUp:
                    table.fail(where, name, LATE)
                except Exception as e:  # a peer may raise anything; its line shows it
                    text = describe(e)
                    yardstick = name == first or name.startswith("PyTorch")
                    fatal = name == "mdlm" or (yardstick and text.startswith("WRONG"))
                    table.fail(where, name, text, fatal)
            times = race(calls, device, seconds)
        rows = []
        for name in times:
            t, spread = (x / (n_sets if case.graph else 1) for x in times[name])
            speed = rate(flops / t, "FLOP/s") if flops else rate(n_bytes / t, "B/s")
            row = dict(contestant=name, ms=t * 1e3, spread=spread * 1e3, rate=speed)
            row |= dict(share=max(flops / limits[0], n_bytes / limits[1]) / t)
            for key, yardstick in zip(("vs_compiled", "vs_eager"), YARDSTICKS["mdlm"]):
                base = times.get(yardstick)
                row[key] = base and base[0] / times[name][0]
            rows.append(where | row | facts[name] | dict(flops=flops, bytes=n_bytes))
        if rows:
            table.add(*rows)


def bench_kernels(options, device, table):
    """All cases, as far as time allows."""
    every = [make() for make in kernel_cases(device)]
    cases = [case for case in every if options.only in case.name]
    if not cases:
        names = ", ".join(dict.fromkeys(case.name for case in every))
        raise UserError(f"--only={options.only} matches no operation; give one of {names}")
    limits = ceilings(device)
    both = f"{rate(limits[0], 'FLOP/s')} in a bfloat16 product, {rate(limits[1], 'B/s')} in a copy"
    table.note(f"share: of what this device does, {both}")
    for case in cases:
        if not options.autotune:
            case.contestants.pop(AUTOTUNED, None)
        torch._dynamo.reset()  # forget what was compiled for another shape
        if ranks.is_late(table.until):
            table.fail(dict(operation=case.name, shape=case.shape, what=""), "all", LATE)
        else:
            measure(case, table, device, options.seconds, limits)
        with contextlib.suppress(RuntimeError):  # the allocator may think a capture goes on
            torch.cuda.empty_cache()


# ---- Training
def start_run(config, folder, device, dtype, kernel, compiled):
    """A mdlm.Run on the data in `folder`."""
    corpus = mdlm.variants.open_corpus(
        mdlm.Corpus, sources.of_config(folder, config), config, device
    )
    ops = mdlm.devices.select_kernels(kernel, device, config, dtype)
    if device.type == "cuda" and kernel == "auto" and ops.name != "triton":
        raise RuntimeError("Triton cannot run here: --kernels=auto would be PyTorch")
    run = mdlm.make_run(config, corpus, devices.Machine(device, dtype, ops))
    compiling.compile_network(run, compiled)
    return run


def steps_of(run):
    """An iterator over training steps; it reads the losses as often as training does."""
    for step in itertools.count():
        mdlm.train_step(run, step, progress=0.75)
        if (step + 1) % run.config.log_interval == 0:
            run.check_finite()
        yield


def gradients(config, *run_args):
    """The loss of a step and all gradients, with two layers (soon compiled) and without dropout."""
    run = start_run(replace(config, n_layer=2, dropout=0.0), *run_args)
    g = torch.Generator().manual_seed(0)
    for p in run.model.parameters():
        if not p.any():  # gradients would not reach the layers before it
            p.data.copy_(0.02 * torch.randn(p.shape, generator=g))
    loss = mdlm.compute_gradients(run, step=0, margin_scale=0.5)
    return [loss] + [p.grad for p in run.model.parameters()]


# How a step can be executed. On a GPU, training replays compiled and eager steps as CUDA graphs.
EAGER_GRAPHS = "eager, as CUDA graphs"
EXECUTIONS = ("compiled", EAGER_GRAPHS, "compiled, without CUDA graphs", "eager")
EAGER_SHARE = 0.4  # of the time that is left: what compiled steps leave to those after them
AUTOTUNED_STEP = "compiled with max-autotune"


def set_execution(run, execution):
    """Let a run from `start_run` execute its steps in one of EXECUTIONS."""
    if "without" in execution or execution == "eager":
        run.engine.call = run_eagerly


def start_step(exact, kernel, config, folder, device, dtype, execution):
    """(run, call of a step, megabytes) of a contestant whose gradients are right."""
    run_args = (folder, device, dtype, kernel, execution.startswith("compiled"))
    if execution == AUTOTUNED_STEP:
        torch._dynamo.reset()  # or it would find what was compiled without
        inductor = importlib.import_module("torch._inductor")
        with inductor.config.patch(inductor.list_mode_options(AUTOTUNE_MODE)):
            return start_step(exact, kernel, config, folder, device, dtype, "compiled")
    if exact:
        check_close(gradients(config, *run_args), exact, STEP_TOLERANCE[dtype])
    gc.collect()  # free unused memory before measuring it
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    run = start_run(config, *run_args)
    set_execution(run, execution)
    step = partial(next, steps_of(run))
    for _ in range(graphs.WARM_UP + 2):  # compiles, makes the state of the optimizers, records
        step()
    recorder = getattr(run.engine.call, "__self__", None)
    if recorder and recorder.failed:
        raise RuntimeError("the steps cannot be recorded as CUDA graphs")
    return run, step, peak_memory(step, device, before)


def step_kernels(device):
    """The values of --kernels whose steps are compared."""
    if device.type != "cuda":
        return ["torch"]
    # A Triton whose attention auto does not trust: also with it.
    return ["auto", "torch"] + ["triton"] * bool(kernels.distrusts(device))


def race_steps(
    config,
    folder,
    device,
    table,
    options,
    executions=EXECUTIONS,
    kernels=None,
    checks=True,
    what="",
):
    """Time the steps of a config with PyTorch and Triton, first as in training.

    what: the config's name, if it is not its preset's
    kernels: values of --kernels (default: those of step_kernels); checks: whether gradients are
    first compared with eager PyTorch's in float32
    """
    dtype = devices.pick_dtype("auto", device)
    size = f"V={config.vocab_size} T={config.block_size} batch={config.batch_size}"
    where = dict(operation="training step", shape=f"{size} {str(dtype)[6:]}")
    where["what"] = what or config.preset
    peak = devices.peak_flops(device) if dtype == torch.bfloat16 else None
    exact = None
    try:
        if checks and not ranks.is_late(table.until):
            exact = gradients(config, folder, device, torch.float32, "torch", False)
    except Exception as e:  # most likely out of memory; the others may need less
        table.note("eager PyTorch, the yardstick of the gradients, fails: " + describe(e))
    kernels = kernels or step_kernels(device)
    base = None  # speed-ups are relative to PyTorch, compiled if that works
    executions = [x for x in executions if "CUDA" not in x or device.type == "cuda"]
    for i, execution in enumerate(executions):
        ready = {}
        stopped = None
        # Compiling may not take all the time: eager steps, which need little, are timed at last.
        deadline = table.until
        if i < len(executions) - 1 and not math.isinf(deadline):
            deadline -= EAGER_SHARE * max(0.0, table.until - time.monotonic())
        for kernel in kernels:
            name = f"--kernels={kernel}, {execution}"
            try:
                if ranks.is_late(table.until):
                    raise UserError(LATE)
                with limited(deadline):
                    ready[name] = start_step(
                        exact, kernel, config, folder, device, dtype, execution
                    )
            except Exception as e:  # no compiler, memory or Triton; the line shows which
                text = describe(e)
                broken = kernel != "torch" and text != LATE
                table.fail(where, name, text, broken or text.startswith("WRONG"))
            except TimeUp:
                table.fail(where, name, LATE)
            except KeyboardInterrupt as e:  # cut off while it compiles: time those that are ready
                stopped = e
                break
        calls = {name: step for name, (run, step, peak_mb) in ready.items()}
        # At least 0.1 s at once: training does not wait for the GPU after each step either.
        raced = race(calls, device, 0.2 if stopped else options.seconds, shortest=0.1)
        base = base or raced.get(f"--kernels=torch, {execution}", [None])[0]
        rows = []
        for name, (t, spread) in raced.items():
            run, _, peak_mb = ready[name]
            speed = config.batch_size * config.block_size / t
            mfu = peak and speed * devices.flops_per_token(run.model) / peak
            row = dict(contestant=name, ms=t * 1e3, spread=spread * 1e3)
            row |= dict(rate=f"{speed:,.0f} tokens/s", share=mfu, peak_mb=peak_mb)
            rows.append(where | row | dict(vs_compiled=base and base / t, tokens_per_second=speed))
        if rows:
            table.add(*rows)
        if stopped:
            raise stopped


def preset_config(preset):
    V = 50257 if preset == "gpt2" else 65
    return mdlm.Config(**mdlm.PRESETS[preset] | dict(preset=preset, vocab_size=V))


def write_tokens(folder, V):
    """A corpus of random tokens."""
    for name, n in (("train.bin", 4 << 20), ("val.bin", 1 << 14)):
        ids = np.random.default_rng(0).integers(V, size=n, dtype=np.uint16)
        with naming(folder):
            Path(folder, name).write_bytes(ids.tobytes())


def bench_training(options, device, table):
    """The steps of each requested preset, on random tokens."""
    torch.set_float32_matmul_precision("high")  # as mdlm.py
    presets = ("gpu", "gpt2", "cpu") if device.type == "cuda" else ("cpu",)
    for preset in presets if options.preset == "all" else (options.preset,):
        config = preset_config(preset)
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as folder:
            write_tokens(folder, config.vocab_size)
            is_slow = options.autotune and device.type == "cuda"
            executions = EXECUTIONS + (AUTOTUNED_STEP,) * is_slow
            race_steps(config, folder, device, table, options, executions)
            if device.type == "cuda":  # half of the gain on PyTorch may be the convolution's
                torch._dynamo.reset()
                more = dict(executions=("compiled",), checks=False, what=f"{preset}, --conv=0")
                race_steps(replace(config, conv=0), folder, device, table, options, **more)


def bench_profile(options, device, table):
    """What a compiled training step consists of: how busy the GPU is, and its longest kernels."""
    torch.set_float32_matmul_precision("high")
    preset = "gpu" if options.preset == "all" else options.preset
    config = preset_config(preset)
    dtype = devices.pick_dtype("auto", device)
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(folder, config.vocab_size)
        run = start_run(config, folder, device, dtype, "auto", True)
        step = partial(next, steps_of(run))
        for _ in range(12):
            step()
        _, (seconds, _) = race(dict(step=step), device, options.seconds, shortest=0.1).popitem()
        n = 5
        with torch.profiler.profile() as profiler:
            for _ in range(n):
                step()
            torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.device_type.name == "CUDA"]
    kernels = [e for e in events if not e.is_user_annotation]  # those span kernels
    busy = sum(e.self_device_time_total for e in kernels) / n / 1e3
    launches = sum(e.count for e in kernels) / n
    ms = seconds * 1e3
    of_kernels = f"kernels {busy:.4g} ms in {launches:g} launches"
    table.note(f"{preset}: a step takes {ms:.4g} ms; {of_kernels}")
    kernels.sort(key=lambda e: -e.self_device_time_total)
    for e in kernels[:40]:
        t = e.self_device_time_total / n / 1e3
        row = dict(operation=preset, kernel=e.key[:90].replace("|", "/"), ms=t)
        table.add(row | dict(share=t / busy, calls=round(e.count / n)))


# ---- Generation
LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=49152)
LLAMA |= dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30)  # SmolLM2-135M
LLAMA |= dict(num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048)
BLOCK = 32  # tokens, of models that write in blocks


def make_writer(config, V, device, dtype, pretrained=None):
    """A network with random weights in this dtype."""
    ops = devices.select_kernels("auto", device, config, dtype)
    model = mdlm.make_model(config, V, ops, pretrained=pretrained).to(device).eval()
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def make_llama(shape, device, dtype):
    """The same for a Llama of the transformers library that sees both sides."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        with naming(folder):
            path.write_text(json.dumps(shape))
        given = dict(network=str(path), data="", block_size=256, device="cpu")
        config = run_config.new(mdlm.Config, given)
        network = open_network(config)
    V = shape["vocab_size"]
    network.mask_id = V
    network.config.vocab_size = V + 1
    return make_writer(config, V, device, dtype, network)


def race_writers(config, device, table, options, batches=(1, 8, 64), shape=LLAMA, block=BLOCK):
    """Time the writing of texts by a network of this Config, by one that writes blocks of `block`
    tokens, and by a Llama of this shape (None: without it)."""
    config = replace(config, dropout=0.0)
    V = config.vocab_size
    writers = {config.preset: partial(make_writer, config, V)}
    in_blocks = replace(config, block_length=block)
    writers[f"{config.preset}, blocks of {block}"] = partial(make_writer, in_blocks, V)
    if shape:
        layers, width = shape["num_hidden_layers"], shape["hidden_size"]
        writers[f"Llama, {layers} x {width}"] = partial(make_llama, shape)
    dtypes = dict.fromkeys([devices.dtype_of_predictions("auto", device), torch.float32])
    for name, make in writers.items():
        models = {}
        for B in batches:
            where = dict(operation="generate", what=name, shape=f"batch {B}")
            if ranks.is_late(table.until):
                table.fail(where, "all", LATE)
                continue
            try:
                models = models or {dtype: make(device, dtype) for dtype in dtypes}
                time_writers(where, models, B, table, options)
            except (RuntimeError, UserError) as e:  # no memory, or no transformers
                table.fail(where, "all", describe(e))


def bench_generating(options, device, table):
    """Times of sample.generate for texts from nothing, by network call, and tokens per second.

    On a GPU with its calls as CUDA graphs, in the dtype that is fast and in float32, and eager.
    """
    torch.set_float32_matmul_precision("high")
    is_gpu = device.type == "cuda"
    preset = options.preset if options.preset != "all" else "gpu" if is_gpu else "cpu"
    small = {} if is_gpu else dict(batches=(1, 8), shape=None)  # others take minutes on a CPU
    race_writers(preset_config(preset), device, table, options, **small)


def time_writers(where, models, B, table, options):
    """Rows of the table for B texts of these networks: dtype -> model."""
    contestants = {}
    for dtype, model in models.items():
        T = model.config.block_size
        device = next(model.parameters()).device
        x = torch.full((B, T), model.mask_id, device=device)
        write = partial(sample.generate, model, x, seed=options.seed)
        if device.type == "cuda":
            contestants[f"CUDA graphs, {str(dtype)[6:]}"] = write
        if len(contestants) < 2:  # eager in the first dtype alone, as most is Python's time
            contestants[f"eager, {str(dtype)[6:]}"] = graphs.run_eagerly()(write)
    # As many calls as steps, for each of the groups into which the texts are split.
    calls = sum(1 for _ in sample.unmask(model, x[:1], seed=options.seed))
    calls *= len(groups(model, B, device, writing=True))
    rows = []
    for name, (t, spread) in race(contestants, device, options.seconds).items():
        speed = B * T / t
        row = dict(contestant=name, ms=t / calls * 1e3, spread=spread / calls * 1e3, calls=calls)
        row |= dict(rate=f"{speed:,.0f} tokens/s", tokens_per_second=speed)
        rows.append(where | row)
    table.add(*rows)


# ---- Sampling
# name -> settings of sample.generate; the first is the default
SAMPLERS = {
    "default": dict(),
    "sweep": dict(redraw="sweep", spacing=8),
    "random order": dict(order="random", correct=0),
    "confidence": dict(order="confidence", correct=0),
}
CALLS = (4, 8, 16, 32, 64)


def open_model(path, objective, options, device):
    """(folder of the checkpoint, model, tokenizer, config) of a run with this objective."""
    trusted = options.trust_remote_code
    read = partial(mdlm.load, device=device, trust_remote_code=trusted)
    (folder, *_), (model, tokenizer, config) = read_newest(path, read)
    if config.objective != objective or config.prompt_column:
        raise UserError(f"{path} is no run of --objective={objective} on texts; give one")
    return folder, model, tokenizer, config


def judge_by(twin, x):
    """The mean nats per token of texts x (B, T) under an autoregressive model, its error, and the
    mean entropy of what the model expects along them: both are equal for its own texts.

    They are ids: the text of some, encoded again, would have others.
    """
    entropy = []

    def observe(at, targets, logits):
        p = logits.float().softmax(-1)
        entropy.append(torch.special.entr(p).sum(-1).double().cpu())

    device = next(twin.parameters()).device
    r = mdlm.evaluate(twin, x.to(device), batch_size=8, observe=observe)
    each = torch.tensor(r["by_window"], dtype=torch.float64)
    expected = torch.cat(entropy).mean().item()
    return dict(twin=each.mean().item(), twin_se=standard_error(each), expected=expected)


def write_texts(model, n, seeds, dtype, settings):
    """The ids (B, T) of n texts from nothing with each seed, and the seconds that one took."""
    device = next(model.parameters()).device
    x = torch.full((n, model.config.block_size), model.mask_id, device=device)
    began = time.monotonic()
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        ids = torch.cat([sample.generate(model, x, seed=seed, **settings) for seed in seeds])
    return ids.cpu(), (time.monotonic() - began) / len(ids)


# Can a classifier tell texts from real ones?
FEATURES = 4096  # n-grams of tokens are hashed to so many counts
LONGEST = 4
FOLDS = 5
DECAY = 1e-3


def count_ngrams(x):
    """(B, FEATURES): log(1 + the counts of hashed n-grams) of texts of ids x (B, T)."""
    found = torch.zeros(len(x), FEATURES)
    code = torch.zeros_like(x)
    for n in range(1, LONGEST + 1):
        # Of all n-grams that begin at a position; the factors are those of a common hash.
        ends = x.shape[1] - n + 1
        code = (code[:, :ends] * 1_000_003 + x[:, n - 1 :] + 1) % (1 << 31)
        found.scatter_add_(1, (code * 2_654_435_761 + n) % FEATURES, torch.ones(code.shape))
    return found.log1p()


def tell_apart(x, real, seed=0):
    """(accuracy, its standard error) of a logistic regression between texts x and real (B, T).

    On texts that it was not fitted to it is 0.5 if they cannot be told apart, whatever it looks at
    (Lopez-Paz & Oquab, 1610.06545). Both have as many texts as the smaller one; five-fold
    cross-validation.
    """
    n = min(len(x), len(real))
    g = generator("told apart", seed)
    both = [texts[torch.randperm(len(texts), generator=g)[:n]] for texts in (x, real)]
    features = count_ngrams(torch.cat(both).long())
    label = torch.arange(2 * n) < n
    fold = torch.cat([torch.arange(n) % FOLDS] * 2)
    right = torch.zeros(2 * n, dtype=torch.bool)
    for k in range(FOLDS):
        train, test = fold != k, fold == k
        mean, spread = features[train].mean(0), features[train].std(0) + 1e-3
        inside, outside = ((features[part] - mean) / spread for part in (train, test))
        weights = torch.zeros(FEATURES + 1, requires_grad=True)
        optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

        def closure(inside=inside, train=train, weights=weights, optimizer=optimizer):
            optimizer.zero_grad()
            logits = inside @ weights[1:] / FEATURES**0.5 + weights[0]
            loss = F.binary_cross_entropy_with_logits(logits, label[train].float())
            loss = loss + DECAY * weights[1:].square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            logits = outside @ weights[1:] / FEATURES**0.5 + weights[0]
        right[test] = (logits > 0) == label[test]
    p = right.float().mean().item()
    return p, (p * (1 - p) / (2 * n)) ** 0.5


def bench_sampling(options, device, table):
    """Every sampler over numbers of calls; real text and the autoregressive twin beside them.

    No number says it alone (Pynadath et al., 2604.02718): a low negative log-likelihood under other
    models may be bought with dull texts. So beside it stand the entropy that this model expects
    along the text, distinct words, and how often a classifier tells the texts from real ones. Short
    words are nearly always known, so only those of five letters and more count.
    """
    folder, model, tokenizer, config = open_model(options.out_dir, "mdlm", options, device)
    twin = open_model(options.ar_dir, "ar", options, device)[1] if options.ar_dir else None
    with eval.open_data(options.data, folder, tokenizer, config, device) as (corpus, _):
        training = tokenizer.decode(corpus.ids["train"][:2_000_000].tolist())
        windows = corpus.windows().long().cpu()
    by_text = word_statistics.WordStatistics(training, shortest=5)

    def statistics(x):
        texts = [tokenizer.decode(ids) for ids in x.tolist()]
        return by_text(texts) | (judge_by(twin, x) if twin else {})

    def telling(x, real):
        return dict(zip(("told", "told_se"), tell_apart(x, real)))

    seeds = range(options.seed, options.seed + options.seeds)
    n = options.num_samples
    table.note(f"{n} texts of {config.block_size} tokens for each of the seeds {list(seeds)}")
    facts = dict(sampler="real text", calls=None, seconds=None)
    table.add(facts | statistics(windows) | telling(windows[::2], windows[1::2]))
    calls = dict.fromkeys(min(n, config.block_size) for n in CALLS)
    cases = [(model, name, more | dict(steps=n)) for name, more in SAMPLERS.items() for n in calls]
    if twin:
        cases.insert(0, (twin, "AR twin", {}))
    for writer, name, more in cases:
        steps = more.get("steps", config.block_size)
        if ranks.is_late(table.until):
            table.note(f"the time is up: nothing measured from {name}, {steps} calls on")
            break
        x, seconds = write_texts(writer, n, seeds, options.dtype, more)
        facts = dict(sampler=name, calls=steps, seconds=seconds)
        by_seed = [statistics(texts) for texts in x.split(n)]
        table.add(facts | statistics(x) | telling(x, windows) | dict(by_seed=by_seed))
    if options.picture:
        table.draw(options.picture)


MODES = dict(
    kernels=bench_kernels,
    train=bench_training,
    profile=bench_profile,
    generate=bench_generating,
    sample=bench_sampling,
)


def main(argv):
    mode = argv[0] if argv and not argv[0].startswith("-") else ""
    if mode not in ("", *MODES) or (not mode and set(argv) & set(MODES)):
        raise UserError(f"{' '.join(argv)!r}: first give {', '.join(MODES)} or nothing, then flags")
    usage = f"[{'|'.join(MODES)}] [--flag=value ...]"
    options = Options(**settings.parse(Options, argv[bool(mode) :], __doc__, usage=usage))
    outputs.check_all(options)
    if options.picture:
        plots.check_picture("--picture", options.picture)  # now: measuring takes long
    device = devices.pick_device(options.device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device.index or 0)  # where streams and memory are counted
    mode = mode or ("kernels" if cuda else "train")
    if mode in ("kernels", "profile") and not cuda:
        raise UserError(
            f"{mode} runs on a CUDA device, not on {device}; give train, generate or sample"
        )
    table = ResultsTable(mode, options, device)
    MODES[mode](options, device, table)
    return table.close()


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
