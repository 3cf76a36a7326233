"""The kernels, compiled for GPUs and executed by the emulator, agree with float64.

In processes of their own, as Triton decides at import whether it interprets, and has one target.
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import aot
import numpy as np
import pytest
import torch

from nanomdlm.kernels.launch import distrusts_attention, triton_version

from . import cases, compilers, driver, memory

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytest.importorskip("triton", reason="Triton exists on Linux only")
# Older versions leave out fences between cp.async, registers and wgmma: see results/aot.md.
IS_ORDERED = not distrusts_attention(triton_version(), (9, 0))
needs_order = pytest.mark.skipif(not IS_ORDERED, reason="needs triton 3.7: results/aot.md")


def start(program, *args, **environment):
    """Run a program of this folder, with Triton as for a GPU unless the environment says else."""
    options = dict(MDLM_TRITON="1", TRITON_INTERPRET="0", OMP_NUM_THREADS="1")
    return subprocess.run(
        [sys.executable, str((HERE / program).resolve()), *map(str, args)],
        env=os.environ | options | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )


def run(program, *args):
    """The lines of JSON that a program of this folder prints, and its exit code."""
    r = start(program, "--json", *args)
    assert r.returncode in (0, 1), r.stderr[-3000:]
    return [json.loads(line) for line in r.stdout.splitlines()], r.returncode


def run_cases(which, arch):
    """The results of all cases of a GPU, each within its bounds."""
    results, code = run("cases.py", *(["--slow"] if which == "slow" else []), f"--arch={arch}")
    check(results)
    assert code == 0
    wanted = [(case.title, case.dtype, case.arch) for case in cases.chosen_cases(which, (arch,))]
    # The results of integers do not name the type of their case, bf16.
    dtypes = {"integers": "bf16"}
    got = [(r["title"], dtypes.get(r["dtype"], r["dtype"]), r["arch"]) for r in results]
    assert got == wanted and wanted
    return results


def check(results):
    """At most twice PyTorch's error in the same type, plus some; the same integers."""
    for result in results:
        where = f"{result['title']} {result['dtype']} sm_{result['arch']}"
        assert not result["violation"], f"{where}: {result['violation']}"
        assert result["errors"] and result["instructions"], where
        for name, (error, theirs, bound) in result["errors"].items():
            if error is not None:
                assert error <= bound, f"{where}: {name} {error:.1e}, PyTorch's {theirs:.1e}"


CASE = cases.chosen_cases("quick", (80,), "head")[0]


@pytest.mark.parametrize(("error", "crashed"), [(KeyError("chunk"), True), ("race", False)])
def test_a_call_that_fails_is_a_result(monkeypatch, error, crashed):
    """So the other calls run, and the exit code says whether it crashed (2)."""

    def fail(*args):
        raise memory.Violation(error) if isinstance(error, str) else error

    device = types.SimpleNamespace(instructions={}, executed=set(), ended=set())
    monkeypatch.setattr(driver, "install", lambda arch: device)
    monkeypatch.setitem(cases.CALLS, "head", fail)
    threads = torch.get_num_threads()
    result = cases.run(CASE)
    torch.set_num_threads(threads)
    assert result["violation"] in ("race", "KeyError: 'chunk'") and result["crashed"] == crashed
    assert not cases.is_within(result)
    monkeypatch.setattr(cases, "run_all", lambda *args: [result])
    monkeypatch.setattr(sys, "argv", ["cases.py"])
    assert cases.main() == (2 if crashed else 1)


def test_aot_takes_as_executed_what_was_within_its_bounds(tmp_path):
    """On its own architecture; of the constants, the number of heads alone may be another one."""
    types = {"x": "*bf16", "n": "i32"}
    text, other = (driver.describe("a_kernel", types, dict(H=2, D=D), 4, 3) for D in (32, 64))
    assert text == driver.describe("a_kernel", types, dict(H=6, D=32), 4, 3) != other
    good = dict(arch=80, errors={"y": [0.0, 0.0, 1.0]}, violation=None, instructions=1)
    bad = good | dict(errors={"y": [2.0, 0.0, 1.0]})
    lines = [good | dict(executed=[text]), bad | dict(executed=[other])]
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert aot.read_executed(path) == {(80, text)}


def test_the_table_of_compilers_says_which_kernel_failed():
    """A kernel in which a call ended, not those before it; of a wrong result, all of its call."""
    good = dict(errors={"y": [0.0, 0.0, 1.0]}, violation=None, broken=None, instructions=1)
    raced = dict(violation="a race", errors={}, broken="attention_dq_kernel, spans")
    wrong = dict(errors={"y": [2.0, 0.0, 1.0]}, ended=["residual_kernel"])
    results = [
        good | dict(ended=["attention_forward_kernel, spans"]),
        good | raced | dict(ended=["attention_forward_kernel, spans"]),
        good | wrong,
        good | dict(ended=["residual_kernel", "attention_dq_kernel"]),
    ]
    found = compilers.judge(results)
    assert found == {
        "attention_forward_kernel, spans": "",
        "attention_dq_kernel, spans": "a race",
        "attention_dq_kernel": "",
        "residual_kernel": "a wrong result",
    }
    assert not compilers.is_used("relu2_kernel", "3.8.0", 90)
    assert compilers.cell({80: "", 90: "a race", 120: ""}) == "80, 120; **90 fails**"
    refused = {
        (name, version, arch)
        for name in found
        for version in ("3.6.0", "3.7.1", "3.10.0")
        for arch in (80, 90)
        if not compilers.is_used(name, version, arch)
    }
    attention = {name for name in found if name.startswith("attention")}
    assert refused == {(name, "3.6.0", 90) for name in attention}


def test_a_program_that_crashes_is_no_error_beyond_its_bound():
    """Exit code 2, not Python's 1."""
    assert start("cases.py", "--workers=0").returncode == 2


@pytest.mark.parametrize("ours", [[1.0, math.nan], [1.0, math.inf], [1.0, 2.0, 3.0], [1.0, 2.5]])
def test_what_is_wrong_is_marked_in_the_table(ours):
    """NaN too, whatever the other outputs are; and a result of another shape."""
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    errors = dict(y=cases.measure(CASE, torch.tensor(ours), truth.float(), truth))
    good = cases.measure(CASE, truth.float(), truth.float(), truth)
    for parts in (errors | dict(z=good), dict(z=good) | errors):
        result = dict(arch=80, errors=parts, violation=None, instructions=1)
        assert not cases.is_within(result)
        assert cases.cell([result]).startswith("80: **y ")


FUSED = {"attention_backward_kernel"}  # runs on sm_90 alone


def every_kernel():
    sources = [path.read_text() for path in (ROOT / "kernels").glob("*.py")]
    return {name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)}


def test_every_kernel_runs_in_bfloat16():
    """As for an H100 (sm_90), with wgmma and cp.async; documents, an odd length, norm, rotation."""
    results = run_cases("quick", 90 if IS_ORDERED else 80)
    expected = every_kernel() - (set() if IS_ORDERED else FUSED)
    assert {name for result in results for name in result["kernels"]} == expected
    assert min(result["instructions"] for result in results) > 1000


# A minute each: MDLM_PTX=80,90,120 asks for all (as python tests/ptx/cases.py --slow runs them).
ARCHITECTURES = [int(arch) for arch in os.environ.get("MDLM_PTX", "90").split(",")]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kind_of_call(arch):
    if arch == 90 and not IS_ORDERED:
        pytest.skip("needs triton 3.7: results/aot.md")
    results = run_cases("slow", arch)
    assert len(results) >= 12
    if arch == 90:  # what tests/aot.py --one compiles is executed, with its types and constants
        compiled, code = run("../aot.py", "--one")
        executed = {text for result in results for text in result["executed"]}
        assert code == 0 and len(compiled) >= 5
        assert {case["described"] for case in compiled} <= executed


@pytest.mark.long
@needs_order
def test_what_orders_and_bounds_accesses_is_needed():
    """Barriers, waits, fences and bounds of the PTX, each taken away.

    The emulator says so, or the bits are the same. Without a bound a value may be wrong instead.
    """
    results, code = run("mutations.py", "--places=2")
    assert code == 0
    pairs = {(result["kernel"], result["arch"]) for result in results}
    assert pairs == {*itertools.product(every_kernel(), (80, 90))} - {(*FUSED, 80)}
    caught = {}
    for result in results:
        kind = result["mutation"]
        assert "bound" in kind or result["wrong result"] == 0, result
        caught[kind] = caught.get(kind, 0) + result["caught"]
    assert len(caught) == 8 and min(caught.values()) >= 2, caught


@pytest.mark.slow
def test_the_interpreter_gives_the_same(tmp_path):
    """Triton's operations, of integers, floating-point numbers, tables and matrices."""
    r = start("primitives.py", tmp_path / "a.npz", TRITON_INTERPRET="1", MDLM_TRITON="0")
    assert r.returncode == 0, r.stderr[-3000:]
    interpreted = np.load(tmp_path / "a.npz")
    assert len(interpreted.files) == 7
    for arch in (80, 90, 120):
        r = start("primitives.py", tmp_path / "b.npz", arch, TRITON_DEFAULT_FP_FUSION="1")
        assert r.returncode == 0, r.stderr[-3000:]
        emulated = np.load(tmp_path / "b.npz")
        for name in interpreted.files:
            if interpreted[name].dtype.kind == "i":
                assert np.array_equal(emulated[name], interpreted[name]), name
            else:
                atol = 1e-4 if "products" in name else 1e-30  # sums of 192 products of about 1
                np.testing.assert_allclose(emulated[name], interpreted[name], rtol=1e-6, atol=atol)
