"""The Triton kernels: against their references, and compiled for three generations of GPUs.

Each file of kernels_cases runs in a process of its own, since Triton decides at import whether it interprets:
natively where there is a GPU, else in the interpreter on the CPU.
"""

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from aot import SHARED
from conftest import TINY, losses, run_mdlm

import kernels
from common import Refusal

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | (
    {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
)
pytest.importorskip("triton", reason="Triton exists on Linux only")


CASES = sorted(p.stem for p in (HERE / "kernels_cases").glob("*_cases.py"))


def run(*command, **more):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=ENVIRONMENT | more,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def cases():
    """name -> the run of its file; two at a time, for this takes long."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(
                run, "-m", "pytest", HERE / "kernels_cases" / f"{name}.py", "-p", "no:cacheprovider"
            )
            for name in CASES
        }


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_their_references(cases, name):
    r = cases[name].result()
    print(r.stdout[-4000:])
    assert r.returncode == 0, r.stdout[-4000:] + r.stderr[-2000:]
    assert " passed" in r.stdout  # not that all was skipped


@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks need two GPUs")
def test_two_ranks_with_the_kernels_give_the_losses_of_one_without(text_file, tmp_path):
    args = [f"--data={text_file}", *TINY, "--n_head=1", "--block_size=16", "--eval_windows=1"]
    args += ["--optimizer=adamw", "--max_steps=3", "--batch_size=4"]
    assert run_mdlm(*args, f"--out_dir={tmp_path / 'one'}") == 0
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    r = run(*launcher, HERE.parent / "mdlm.py", *args, "--kernels=triton", f"--out_dir={tmp_path / 'two'}")
    assert r.returncode == 0, r.stderr[-3000:]
    assert "2 rank(s), triton kernels" in r.stdout
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(two) == 3 and max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="about what is refused without a GPU")
@pytest.mark.parametrize(
    ("args", "interpreter", "words"),
    [
        (["--n_head=2"], "1", ["32, 64 or 128", "not 16", "n_embd / n_head"]),
        (["--n_head=1", "--dtype=bfloat16"], "1", ["bfloat16", "--dtype=float32"]),
        (["--n_head=1"], "0", ["CUDA", "not cpu", "--kernels=auto"]),
    ],
)
def test_kernels_that_cannot_run_are_refused_in_one_sentence(text_file, tmp_path, args, interpreter, words):
    r = run(
        *(
            "mdlm.py",
            f"--data={text_file}",
            *TINY,
            *args,
            "--kernels=triton",
            f"--out_dir={tmp_path / 'out'}",
        ),
        TRITON_INTERPRET=interpreter,
    )
    assert r.returncode == 2 and r.stderr.count("\n") == 1, r.stderr
    assert all(word in r.stderr for word in ["--kernels=triton", *words])


@pytest.mark.parametrize("head_dim, sentences", [(48, 1), (64, 0), (None, 0)])
def test_auto_says_where_attention_stays_with_pytorch(monkeypatch, capsys, head_dim, sentences):
    monkeypatch.setattr(kernels, "ENABLED", True)
    monkeypatch.setattr(kernels, "INTERPRET", True)  # as on a GPU: the kernels run
    assert kernels.select("auto", "cpu", head_dim).name == "triton"
    said = capsys.readouterr().err
    assert said.count("\n") == sentences and ("48" in said and "attention" in said) == bool(sentences)


def test_a_gpu_without_a_compiler_trains_in_pytorch_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "ENABLED", True)
    monkeypatch.setattr(kernels, "INTERPRET", False)
    with monkeypatch.context() as all_is_there:
        all_is_there.setattr(kernels, "can_build", lambda *compilers: True)
        assert kernels.select("auto", "cuda", 64).name == "triton"
    for compiler, there in (("", ()), ("absent", ("gcc", "clang"))):  # none; or CC names what is not there
        monkeypatch.setenv("CC", compiler)
        monkeypatch.setattr(shutil, "which", lambda name, there=there: name if name in there else None)
        assert kernels.select("auto", "cuda", 64).name == "torch"
        assert "C compiler" in capsys.readouterr().err
    with pytest.raises(Refusal, match="C compiler"):
        kernels.select("triton", "cuda", 64)


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
