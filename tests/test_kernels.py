"""The Triton kernels: against their references, and compiled for three generations of GPUs.

Each file of kernels_cases runs in a process of its own, since Triton decides at import whether it interprets:
natively where there is a GPU, else in the interpreter on the CPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from aot import SHARED

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | (
    {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
)
pytest.importorskip("triton", reason="Triton exists on Linux only")


@pytest.mark.parametrize("name", sorted(p.stem for p in (HERE / "kernels_cases").glob("*_cases.py")))
def test_the_kernels_agree_with_their_references(name):
    r = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            str(HERE / "kernels_cases" / f"{name}.py"),
            "-p",
            "no:cacheprovider",
        ],
        env=ENVIRONMENT,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(r.stdout[-4000:])
    assert r.returncode == 0, r.stdout[-4000:] + r.stderr[-2000:]
    assert " passed" in r.stdout or "100%" in r.stdout


@pytest.fixture(scope="module", params=["--few", pytest.param("--all", marks=pytest.mark.slow)])
def compiled(request):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"MDLM_TRITON": "1"}
    r = subprocess.run(
        [sys.executable, str(HERE / "aot.py"), "--json", request.param],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert r.returncode == 0, r.stderr[-3000:]
    return [json.loads(line) for line in r.stdout.splitlines()]


def test_every_kernel_compiles_for_three_generations_without_spills(compiled):
    assert {r["arch"] for r in compiled} == {80, 90, 100}
    for r in compiled:
        assert r["spills"] == 0, r
        assert r["shared"] <= SHARED[r["arch"]], r


def test_matrix_products_in_half_precision_use_tensor_cores(compiled):
    for r in compiled:
        if r["dots"] and r["half"]:
            assert r["hmma"] + r["hgmma"] + r["utchmma"] > 0, r
