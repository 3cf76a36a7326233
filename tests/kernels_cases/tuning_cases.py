"""Which configuration a kernel is launched with: natively on a GPU or, about the choice alone, anywhere.

Without a GPU a process of its own (this file, run as a script) sets up Triton as on one: a device of sm_90
that only says so, and a kernel that notes its configuration instead of running. Triton's autotuner and its
cache on disk are the real ones.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from kernels import _triton

GPU = torch.cuda.is_available()
CHOICES = [dict(BLOCK=b, num_warps=w, num_stages=1) for b, w in ((128, 4), (256, 8), (512, 8))]
SPEEDS = [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]  # milliseconds of the choices, in one process and the next


def pretend_device(milliseconds):
    """Launches on a device that is none; returns what a kernel ran with, and what was measured."""
    import triton
    from triton.backends.compiler import GPUTarget

    @triton.jit
    def kernel(x_ptr, n, BLOCK: triton.language.constexpr):
        triton.language.store(x_ptr, n)

    ran, measured = [], []
    names = ("BLOCK", "num_warps", "num_stages")
    kernel.run = lambda *args, grid, warmup, **options: ran.append({k: options[k] for k in names})

    def measure(call, quantiles):
        call()
        measured.append(ran.pop()["BLOCK"])
        return [milliseconds[[c["BLOCK"] for c in CHOICES].index(measured[-1])]] * len(quantiles)

    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    triton.runtime.driver.set_active(driver)
    _triton.measure = measure

    def launch(n, **more):
        before = len(measured)
        ran.clear()
        grid = lambda c: (triton.cdiv(n, c["BLOCK"]),)
        _triton.launch(kernel, grid, torch.zeros(1), n, choices=CHOICES, key=("n",), **more)
        return dict(ran=ran[-1], measured=measured[before:])

    return launch


def script(milliseconds):
    """The launches of one process, in order; JSON on standard output."""
    launch, log = pretend_device(milliseconds), {}
    torch.cuda.is_current_stream_capturing = lambda: True
    log["captured"] = launch(1000)
    torch.cuda.is_current_stream_capturing = lambda: False
    log["adds"] = launch(1000, repeatable=False)
    log["first"] = launch(1000)
    log["again"] = launch(1000)
    log["adds, measured"] = launch(1000, repeatable=False)
    log["other"] = launch(2000)
    torch.cuda.is_current_stream_capturing = lambda: True
    log["captured, measured"] = launch(1000)
    print(json.dumps(log))


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """The same launches in three processes that share a cache; the clock of the second is another."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"MDLM_TRITON": "1", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    return [
        json.loads(
            subprocess.run(
                [sys.executable, __file__, json.dumps(speeds)],
                env=environment | more,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for speeds, more in ((SPEEDS[0], {}), (SPEEDS[1], {}), (SPEEDS[0], {"MDLM_AUTOTUNE": "0"}))
    ]


def test_each_choice_is_measured_once_and_the_fastest_is_used(processes):
    log = processes[0]
    assert log["first"] == dict(ran=CHOICES[2], measured=[128, 256, 512])
    assert log["again"] == dict(ran=CHOICES[2], measured=[])
    assert log["other"] == dict(ran=CHOICES[2], measured=[128, 256, 512])  # another key


def test_nothing_is_measured_inside_a_cuda_graph(processes):
    log = processes[0]
    assert log["captured"] == dict(ran=CHOICES[0], measured=[])
    assert log["captured, measured"] == dict(ran=CHOICES[2], measured=[])


def test_what_adds_to_its_output_is_not_measured_but_uses_the_choice(processes):
    log = processes[0]
    assert log["adds"] == dict(ran=CHOICES[0], measured=[])
    assert log["adds, measured"] == dict(ran=CHOICES[2], measured=[])


def test_a_later_process_reads_the_choice_from_disk(processes):
    """It would choose otherwise: by its clock the first is the fastest."""
    first, second, _ = processes
    assert second["first"] == dict(ran=CHOICES[2], measured=[])
    assert [v["ran"] for v in second.values()] == [v["ran"] for v in first.values()]


def test_tuning_can_be_switched_off(processes):
    assert all(v == dict(ran=CHOICES[0], measured=[]) for v in processes[2].values())


@pytest.mark.skipif(GPU, reason="about the interpreter")
def test_the_interpreter_takes_the_first_choice(monkeypatch):
    from kernels import attention

    def refuse(*args, **more):
        raise AssertionError("measured in the interpreter")

    monkeypatch.setattr(_triton, "measure", refuse)
    module = importlib.import_module("kernels.attention")  # where it is used; the package has the function
    monkeypatch.setattr(module, "processors", lambda device: 1)
    attention(torch.randn(2, 70, 3, 2, 32, dtype=torch.float16))
    assert not _triton.TUNED


def fields(B=64, T=256):
    return torch.randn(B, T, 3, 6, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def attend(qkv):
    from kernels import attention

    out = attention(qkv)
    return out, torch.autograd.grad(out.float().square().sum(), qkv)[0]


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_training_shape_is_tuned_once_whatever_the_batch(monkeypatch, tmp_path):
    measured = []
    measure = _triton.measure
    monkeypatch.setattr(_triton, "measure", lambda *a, **k: measured.append(1) or measure(*a, **k))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _triton.TUNED.clear()
    a = attend(qkv := fields())
    n, tuned = len(measured), dict(_triton.TUNED)
    assert len(tuned) == 3 and n >= 6  # forward, dQ, and dK with dV
    b = attend(qkv)
    attend(fields(B=32))
    _triton.TUNED.clear()
    c = attend(qkv)  # from disk
    assert len(measured) == n and tuned == _triton.TUNED
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(a, b, c, strict=True))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_every_choice_gives_the_same_numbers(monkeypatch):
    from kernels.attention import attention_ref, configs

    qkv, asked = fields(B=32), []  # 32 * 6 heads * 2 blocks: programs for every multiprocessor
    exact = attention_ref(qkv.double())
    (exact_grad,) = torch.autograd.grad(exact.square().sum(), qkv)
    for i in range(max(len(configs(k, qkv.dtype, 64, 256, False, True)) for k in ("forward", "dq", "dkdv"))):

        def choose(*args, i=i):
            asked.append(args[0].fn.__name__)
            return args[4][min(i, len(args[4]) - 1)]

        monkeypatch.setattr(_triton, "fastest", choose)
        out, grad = attend(qkv)
        assert set(asked) == {"_attention_forward", "_attention_dq", "_attention_dkdv"}
        asked.clear()
        assert (out - exact).abs().max() < 2e-2
        assert (grad - exact_grad).abs().max() < 2e-2 * exact_grad.abs().max()


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_an_untuned_kernel_can_be_captured(monkeypatch):
    from kernels import attention

    qkv = fields(T=384).detach()
    monkeypatch.setattr(_triton, "TUNES", False)
    expected = attention(qkv)  # compiled: by the first choice
    monkeypatch.setattr(_triton, "TUNES", True)
    _triton.TUNED.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(qkv)
    graph.replay()
    assert torch.equal(out, expected) and not _triton.TUNED


if __name__ == "__main__":
    script(json.loads(sys.argv[1]))
