"""The kernels, compiled for GPUs and executed by the emulator, agree with float64.

In processes of their own, as Triton decides at import whether it interprets, and has one target.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytest.importorskip("triton", reason="Triton exists on Linux only")
TRITON = tuple(int(n) for n in importlib.metadata.version("triton").split(".")[:2])
# Older versions leave out fences between cp.async, registers and wgmma: see results/aot.md.
IS_ORDERED = TRITON >= (3, 9)
needs_order = pytest.mark.skipif(not IS_ORDERED, reason="needs triton 3.9: results/aot.md")


def start(program, *args, **environment):
    """Run a program of this folder, with Triton as for a GPU unless the environment says else."""
    options = dict(MDLM_TRITON="1", TRITON_INTERPRET="0", OMP_NUM_THREADS="1")
    return subprocess.run(
        [sys.executable, str(HERE / program), *map(str, args)],
        env=os.environ | options | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )


def run(program, *args):
    """The lines of JSON that a program of this folder prints."""
    r = start(program, "--json", *args)
    lines = [json.loads(line) for line in r.stdout.splitlines()]
    assert lines and r.returncode in (0, 1), r.stderr[-3000:]
    return lines


def check(results):
    """At most twice PyTorch's error in the same type, plus some; the same integers."""
    for result in results:
        where = f"{result['title']} {result['dtype']} sm_{result['arch']}"
        assert not result["violation"], f"{where}: {result['violation']}"
        assert result["errors"] and result["instructions"], where
        for name, (error, theirs, bound) in result["errors"].items():
            if error is not None:
                assert error <= bound, f"{where}: {name} {error:.1e}, PyTorch's {theirs:.1e}"


def every_kernel():
    sources = [path.read_text() for path in (ROOT / "kernels").glob("*.py")]
    return {name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)}


def test_every_kernel_runs_in_bfloat16():
    """As for an H100 (sm_90), with wgmma and cp.async; documents, an odd length, norm, rotation."""
    results = run("cases.py", f"--arch={90 if IS_ORDERED else 80}")
    assert len(results) == 4
    assert {name for result in results for name in result["kernels"]} == every_kernel()
    assert min(result["instructions"] for result in results) > 1000
    check(results)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, pytest.param(90, marks=needs_order), 120])
def test_every_kind_of_call(arch):
    results = run("cases.py", "--slow", f"--arch={arch}")
    assert len(results) >= 12
    check(results)


@pytest.mark.slow
@needs_order
def test_what_orders_and_bounds_accesses_is_needed():
    """Barriers, waits, fences and bounds of the PTX, each taken away.

    The emulator says so, or the bits are the same. Without a bound a value may be wrong instead.
    """
    results = run("mutations.py", "--places=2")
    assert {result["kernel"] for result in results} == every_kernel()
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
