"""The Triton kernels: against their references, and compiled for all GPUs from sm_80 on.

The files of kernels_cases run in a process of their own, since Triton decides at import whether it
interprets: natively where there is a GPU, else in the interpreter on the CPU.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from aot import ARCHITECTURES, SHARED
from conftest import TINY, losses, run_mdlm, tiers

import mdlm
from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels.reference import document_spans

HERE = Path(__file__).parent
FAST = "not slow and not long"
INTERPRETED = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
pytest.importorskip("triton", reason="Triton exists on Linux only")


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | environment,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.mark.parametrize("marks", tiers([FAST, "slow", "long"], [FAST], ["slow"]))
def test_the_kernels_agree_with_their_references(marks):
    files = sorted((HERE / "kernels_cases").glob("*_cases.py"))
    r = run("-m", "pytest", "-n0", "-m", marks, "-p", "no:cacheprovider", *files, **INTERPRETED)
    print(r.stdout[-4000:])
    assert r.returncode == 0, r.stdout[-4000:] + r.stderr[-2000:]
    assert " passed" in r.stdout  # not that all was skipped


@pytest.mark.long
def test_the_oldest_triton_compiles_and_agrees(tmp_path):
    """README promises 3.6. Its interpreter fails with the newest numpy."""
    wanted = ("triton==3.6.0", "numpy<2.4")
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path)
    if subprocess.run([*pip, *wanted], capture_output=True).returncode:
        pytest.skip("triton 3.6 cannot be fetched")
    old = dict(PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1")
    said = run("-c", "import triton; print(triton.__version__)", **old).stdout
    assert said == "3.6.0\n"
    r = run(HERE / "aot.py", "--json", "--main", MDLM_TRITON="1", **old)
    assert r.returncode == 0, r.stderr[-3000:]
    compiled = [json.loads(line) for line in r.stdout.splitlines()]
    assert {case["arch"] for case in compiled} == set(ARCHITECTURES)
    assert {case["name"] for case in compiled if case["spills"] and case["arch"] > 80} == set()
    files = sorted((HERE / "kernels_cases").glob("*_cases.py"))
    args = ("-n0", "-m", FAST, "-p", "no:cacheprovider", *files)
    r = run("-m", "pytest", *args, TRITON_INTERPRET="1", **old)
    assert r.returncode == 0 and " passed" in r.stdout, r.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks need two GPUs")
def test_two_ranks_with_kernels_match_one_without(text_file, tmp_path):
    args = [f"--data={text_file}", *TINY, "--n_head=1", "--block_size=16", "--eval_windows=1"]
    args += ["--optimizer=adamw", "--max_steps=3", "--batch_size=4"]
    assert run_mdlm(*args, f"--out_dir={tmp_path / 'one'}") == 0
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "mdlm.py"]
    r = run(*launcher, *args, "--kernels=triton", f"--out_dir={tmp_path / 'two'}", **INTERPRETED)
    assert r.returncode == 0, r.stderr[-3000:]
    one = losses(tmp_path / "one")
    two = losses(tmp_path / "two")
    assert len(two) == 3 and max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-5


@pytest.fixture
def as_if(monkeypatch):
    """Pretend that Triton is here, in the interpreter or on a GPU of sm_90. Nothing is launched."""

    def pretend(interpreter):
        kernels.warn.cache_clear()
        monkeypatch.setattr(kernels, "ENABLED", True)
        monkeypatch.setattr(kernels, "INTERPRET", interpreter)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    return pretend


@pytest.mark.skipif(torch.cuda.is_available(), reason="about what is refused without a GPU")
@pytest.mark.parametrize(
    ("args", "interpreter", "words"),
    [
        (["--n_head=2"], True, ["32, 64 or 128", "not 16", "n_embd / n_head"]),
        (["--n_head=1", "--dtype=bfloat16"], True, ["bfloat16", "--dtype=float32"]),
        (["--n_head=1"], False, ["CUDA", "not cpu", "--kernels=auto"]),
    ],
)
def test_kernels_that_cannot_run_are_refused(
    text_file, tmp_path, as_if, capsys, args, interpreter, words
):
    as_if(interpreter)
    args = [*args, "--kernels=triton", f"--out_dir={tmp_path / 'out'}"]
    assert run_mdlm(f"--data={text_file}", *TINY, *args) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in ["--kernels=triton", *words])


def test_auto_leaves_long_windows_to_pytorch(as_if, monkeypatch):
    """Not those of documents, of which the kernel skips most."""
    as_if(interpreter=True)
    for name, T, wanted in (
        ("auto", 1024, kernels.attention),
        ("auto", 1025, kernels.attention_of_documents),
        ("triton", 2048, kernels.attention),
    ):
        config = mdlm.Config(n_head=1, n_embd=64, block_size=T)
        ops = mdlm.devices.select_kernels(name, torch.device("cpu"), config)
        assert ops.attention is wanted and ops.mask_tokens is kernels.mask_tokens
    for name in ("attention", "attention_ref"):
        monkeypatch.setattr(kernels, name, lambda qkv, *more, name=name: name)
    assert kernels.attention_of_documents(None) == "attention_ref"
    assert kernels.attention_of_documents(None, spans=torch.zeros(1)) == "attention"


def test_wide_heads_use_the_kernels_for_documents_and_blocks(as_if, monkeypatch):
    """cuDNN is fast for whole texts; documents are an input of the kernels, not a dense mask."""
    as_if(interpreter=True)
    qkv = torch.randn(2, 12, 3, 1, 128, generator=torch.Generator().manual_seed(0))
    spans = document_spans((torch.arange(12) % 5 == 4)[None])
    wanted = kernels.attention_ref(qkv, None, None, True, spans=spans)
    calls = []

    def grouped(*args, **more):
        calls.append(args)
        return kernels.grouped_attention_ref(*args, **more)

    monkeypatch.setattr(kernels, "grouped_attention", grouped)
    ops = kernels.select("auto", "cpu", 128, T=4096)
    for given in (spans, None):
        torch.testing.assert_close(
            ops.attention(qkv, None, None, True, spans=given),
            wanted if given is not None else kernels.attention_ref(qkv, None, None, True),
        )
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("hip", "capability", "words"), [("6.4", (9, 4), "AMD"), (None, (7, 5), "capability 7.5")]
)
def test_a_gpu_that_the_kernels_do_not_fit_uses_pytorch(
    as_if, monkeypatch, capsys, hip, capability, words
):
    as_if(interpreter=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernels.select("auto", "cuda", 64).name == "torch"
    assert words in capsys.readouterr().err
    with pytest.raises(ValueError, match="CUDA device from sm_80"):
        kernels.select("triton", "cuda", 64)


@pytest.mark.parametrize("name", ["auto", "triton"])
@pytest.mark.parametrize(
    ("version", "capability", "distrusted"),
    [
        ("3.6.0", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("3.10.0", (9, 0), False),
        ("3.6.0", (8, 0), False),
        ("3.6.0", (12, 0), False),
    ],
)
def test_attention_of_a_triton_that_is_not_trusted_runs_in_pytorch(
    as_if, monkeypatch, capsys, version, capability, distrusted, name
):
    """It says why; --kernels=triton runs it all the same, and says so."""
    as_if(interpreter=False)
    monkeypatch.setattr(kernels, "can_build", lambda *compilers: True)
    monkeypatch.setattr(kernels, "triton_version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for T in (256, 4096):
        ops = kernels.select(name, "cuda", 64, torch.bfloat16, T=T)
        if distrusted and name == "auto":
            assert ops.attention is kernels.attention_ref
        elif name == "auto" and T > kernels.MAX_OURS:
            assert ops.attention is kernels.attention_of_documents
        else:
            assert ops.attention is kernels.attention
    said = capsys.readouterr().err
    assert said.count("\n") == distrusted
    if distrusted:
        assert version in said and "aot.md" in said
        assert ("--kernels=triton" in said) == (name == "triton")


@pytest.mark.parametrize(
    ("compiler", "installed"), [("", ()), ("absent", ("gcc", "clang"))]
)  # none; or CC names what is not installed
def test_a_gpu_without_a_compiler_uses_pytorch(as_if, monkeypatch, capsys, compiler, installed):
    as_if(interpreter=False)
    with monkeypatch.context() as complete:
        complete.setattr(kernels, "can_build", lambda *compilers: True)
        assert kernels.select("auto", "cuda", 64).name == "triton"
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in installed else None)
    assert kernels.select("auto", "cuda", 64).name == "torch"
    assert "C compiler" in capsys.readouterr().err
    with pytest.raises(ValueError, match="C compiler"):
        kernels.select("triton", "cuda", 64)


@pytest.mark.parametrize(
    ("cases", "architectures"),
    [
        ("--one", {90}),
        pytest.param("--grouped", {80, 90, 120}, marks=pytest.mark.slow),
        pytest.param("--most", set(ARCHITECTURES), marks=pytest.mark.long),
    ],
)
def test_kernels_compile_without_spills(cases, architectures):
    """Within shared memory, with tensor cores for products in 16 bits; slow: for all GPUs."""
    r = run(HERE / "aot.py", "--json", cases, TRITON_INTERPRET="0", MDLM_TRITON="1")
    assert r.returncode == 0, r.stderr[-3000:]
    compiled = [json.loads(line) for line in r.stdout.splitlines()]
    assert {case["arch"] for case in compiled} == architectures
    assert len(compiled) >= 5, "the five kernels"
    version = importlib.metadata.version("triton").split(".")
    spill = {80} if [int(n) for n in version[:2]] < [3, 9] else set()  # results/aot.md
    for case in compiled:
        assert case["spills"] == 0 or case["arch"] in spill, case
        assert case["shared"] <= SHARED[case["arch"]], case
        if case["dots"] and case["half"]:
            assert case["hmma"] + case["hgmma"] + case["utchmma"] > 0, case
