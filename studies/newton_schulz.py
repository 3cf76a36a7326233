"""What the update of the optimizers costs on a GPU: Muon's products, before and now.

    python studies/newton_schulz.py                  # on a GPU: check, then time; half a minute
    MDLM_TRITON=1 python studies/newton_schulz.py    # without one: check in the emulator

Preset gpu has 108 matrices of 64 x 384 (q, k and v of each head), which batched products read and
write in each of four iterations; the kernel of kernels/newton_schulz.py keeps each on the chip. The
other three shapes all have Gram matrices of 384 x 384: one batch of 18 products instead of three of
6. Predicted on an H100: 10 us in place of about 80, and 10 us in place of 24.

Timed is optimizers.update (Muon, AdamW, averages), replayed as a CUDA graph, as in training.
"""

import functools
import importlib
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/newton_schulz.py, anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch

import bench
from nanomdlm.support.run import muon
from nanomdlm.support.run.optimizers import average_to_compile, update
from studies.tiles import in_emulator, milliseconds

BEGAN = time.monotonic()


def say(text):
    print(f"{time.monotonic() - BEGAN:5.1f} s  {text}", flush=True)


# ---- As it was before: each batch of matrices by itself, no kernel
def orthogonalize_before(x, dtype):
    """See muon.orthogonalize."""
    is_tall = x.shape[1] > x.shape[2]
    x = x.to(dtype)
    for i, (a, b, c) in enumerate(muon.COEFFICIENTS):
        G = x.mT @ x if is_tall else x @ x.mT
        if i == 0:
            norm = G.flatten(1).norm(dim=1).clamp(min=muon.EPS)[:, None, None]
            G = G / norm
            x = x / norm.sqrt()
        P = torch.baddbmm(G, G, G, beta=b, alpha=c)
        factors = (x, P) if is_tall else (P, x)
        x = torch.baddbmm(x, *factors, beta=a)
    return x


def update_before(groups, lr, momentum, weight_kept, dtype, has_kernels):
    """See muon.update."""
    for params, grads, momenta, squares, rows, _ in groups:
        torch._foreach_lerp_(momenta, grads, 1 - momentum)
        x = torch.stack(torch._foreach_lerp(grads, momenta, momentum))
        running = torch.stack(squares)
        n, A, B = x.shape
        x = orthogonalize_before(x.reshape(-1, rows, B), dtype).to(x.dtype)
        running = running.reshape(-1, rows, 1)
        x = muon.level_rows(x, running, lr * max(1, rows / B) ** 0.5)
        torch._foreach_copy_(squares, list(running.view(n, A, 1)))
        torch._foreach_mul_(params, weight_kept)
        torch._foreach_sub_(params, list(x.view(n, A, B)))


# ---- The kernel
def with_kernel(x):
    return muon.orthogonalize_all([x], torch.bfloat16, has_kernels=True)[0]


def check(x):
    """Print the kernel's error and PyTorch's, both against float64; whether it is right."""
    exact = muon.orthogonalize(x.cpu().double(), torch.float64)
    results = with_kernel(x), muon.orthogonalize(x, torch.bfloat16)
    errors = [((r.cpu().double() - exact).norm() / exact.norm()).item() for r in results]
    values = torch.linalg.svdvals(results[0].cpu().double())
    ok = errors[0] <= 1.2 * errors[1] and values.min() > 0.6 and values.max() < 1.3
    mark = "" if ok else "  WRONG"
    said = f"error of the kernel {errors[0]:.4f}, PyTorch's in bfloat16 {errors[1]:.4f}"
    say(f"{said}; singular values {values.min():.3f} to {values.max():.3f}{mark}")
    return bool(ok)


def random_heads(n, device):
    x = torch.randn(n, 64, 384, generator=torch.Generator().manual_seed(0))
    return x.bfloat16().to(device)


def emulated():
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    driver = importlib.import_module("ptx.driver")
    driver.install(90)
    return check(random_heads(2, "cpu"))


def time_heads():
    x = random_heads(108, "cuda")
    ok = check(x)
    for name, call in {
        "batched products, eager": functools.partial(orthogonalize_before, x, torch.bfloat16),
        "the kernel": functools.partial(with_kernel, x),
    }.items():
        say(f"108 matrices of 64 x 384, {name}: {milliseconds(call):.4f} ms")
    return ok


# ---- The update of preset gpu
def start():
    """A run of preset gpu, and random gradients."""
    config = bench.preset_config("gpu")
    with tempfile.TemporaryDirectory() as folder:
        bench.write_tokens(folder, config.vocab_size)
        run = bench.start_run(config, folder, torch.device("cuda"), torch.bfloat16, "auto", False)
    run.engine.average = torch.compile(average_to_compile)
    g = torch.Generator("cuda").manual_seed(0)
    params = [*run.model.parameters()]
    return run, [0.01 * torch.randn(p.shape, device="cuda", generator=g) for p in params]


def step(run, grads):
    for p, grad in zip(run.model.parameters(), grads, strict=True):
        p.grad = grad
    update(run)


def time_update(name, run, grads):
    """Print the time of the update as a graph, and what it launches; return the weights' change."""
    began = time.monotonic()
    step(run, grads)
    torch.cuda.synchronize()
    say(f"{name}: the first call takes {time.monotonic() - began:.1f} s")
    for _ in range(2):
        step(run, grads)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step(run, grads)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(50):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    with torch.profiler.profile() as profiler:
        graph.replay()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.device_type.name == "CUDA"]
    ms = sum(e.self_device_time_total for e in events) / 1e3
    launches = sum(e.count for e in events)
    replayed = f"{sorted(times)[25]:.4f} ms a replay"
    say(f"{name}: {replayed}; {launches} kernels and copies, {ms:.4f} ms in them")
    for e in sorted(events, key=lambda e: -e.self_device_time_total)[:12]:
        line = f"{e.self_device_time_total / 1e3:.4f} ms, {e.count} x {e.key[:80]}"
        print(f"         {line}", flush=True)


def time_updates():
    """The update before and now; whether both change the weights alike."""
    run, grads = start()
    optimizer = run.optimizers[0]
    say("a run of preset gpu is made")
    params = [*run.model.parameters()]
    weights = [p.detach().clone() for p in params]
    ways = {
        "before, compiled": torch.compile(update_before),
        "now, compiled": torch.compile(muon.update),
        "now, eager": muon.update,
    }
    changes = []
    for name, way in ways.items():
        optimizer.update = way
        for state in optimizer.state.values():
            for x in state.values():
                x.zero_()
        for p, w in zip(params, weights, strict=True):
            p.data.copy_(w)
        time_update(name, run, grads)
        matrices = [
            (p.detach() - w).flatten()
            for p, w in zip(params, weights, strict=True)
            if p in optimizer.state
        ]
        changes.append(torch.cat(matrices))
    ok = True
    for name, change in zip(ways, changes, strict=True):
        difference = ((change - changes[0]).norm() / changes[0].norm()).item()
        ok &= difference < 0.08
        say(f"{name}: weights change by {change.norm():.3f}, of which new {difference:.4f}")
    return ok


def main(argv):
    if not torch.cuda.is_available():
        return in_emulator(emulated)
    torch.set_float32_matmul_precision("high")  # as mdlm.py
    ok = time_heads()
    return int(not (time_updates() & ok))


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
