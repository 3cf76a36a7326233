"""The memory of a run is estimated before it begins, and what to lower is said where it is full."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_mdlm, tiny_flags

from support import cli, devices, memory
from support.training import memory_needs

LARGE = ["--preset=gpu", "--device=cpu", "--compile=off", "--n_head=3", "--eval_windows=2"]
LARGE += ["--max_steps=1", "--eval_interval=1000", "--log_interval=1"]


# mdlm.py, then its peak. (That of rusage may be its parent's, before exec.)
MEASURED = """
import pathlib, re, runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    status = pathlib.Path("/proc/self/status").read_text()
    print("peak", re.search(r"VmHWM:\\s*(\\d+) kB", status)[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory of a process")
@pytest.mark.parametrize(
    "flags",
    [
        # activations of one layer that attends, then with dropout and more of everything
        ["--n_layer=4", "--n_embd=192", "--attention_every=4", "--dropout=0", "--batch_size=16"],
        pytest.param(
            ["--n_layer=4", "--n_embd=192", "--dtype=bfloat16", "--batch_size=32", "--conv=0"],
            marks=pytest.mark.slow,
        ),
        # the copies of a save
        ["--n_layer=4", "--n_embd=768", "--block_size=32", "--batch_size=2", "--dropout=0"],
        # logits
        pytest.param(
            ["--n_layer=1", "--n_embd=48", "--batch_size=16", "--tokenizer={tokenizer}"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_estimate_is_near_the_peak(flags, text_file, tmp_path, tokenizer_of_40_000):
    """Within the factor that support/training/memory_needs.py states."""
    flags = [flag.format(tokenizer=tokenizer_of_40_000) for flag in flags]
    program = [sys.executable, "-c", MEASURED, str(ROOT / "mdlm.py"), f"--data={text_file}"]
    command = [*program, *LARGE, *flags, f"--out_dir={tmp_path}/o"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    r = subprocess.run(command, env=env, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr[-2000:]
    text = r.stdout
    estimated = float(re.search(r"memory: about ([\d.]+) GB", text)[1]) * 1e9
    peak = int(re.search(r"^peak (\d+)$", text, re.M)[1]) << 10
    assert estimated / memory_needs.FACTOR < peak < estimated * memory_needs.FACTOR, text


@pytest.fixture(scope="module")
def tokenizer_of_40_000(tmp_path_factory):
    """The path of a tokenizer.json with many words."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(39_000)} | {chr(i): 39_000 + i for i in range(32, 127)}
    words |= {"[UNK]": 39_000}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    made.save(str(path))
    return path


def test_run_that_is_too_large_is_warned(text_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(devices, "free_memory", lambda device: 0)
    flags = [f"--data={text_file}", *tiny_flags("--max_steps=1")]
    assert run_mdlm(*flags, f"--out_dir={tmp_path}/o") == 0, "an estimate refuses nothing"
    said = capsys.readouterr().err
    assert re.search(r"this run needs about [\d.]+ GB on cpu, which has 0\.\d GB\. ", said)
    assert "--gradient_accumulation_steps=2" in said


def test_run_that_fits_is_not_warned(text_file, tmp_path, capsys):
    flags = [f"--data={text_file}", *tiny_flags("--max_steps=1"), f"--out_dir={tmp_path}/o"]
    assert run_mdlm(*flags) == 0
    said = capsys.readouterr()
    assert "memory: about 0.5 GB of " in said.out and "needs" not in said.err


def test_limit_of_a_container_counts(tmp_path):
    """What a control group of Linux still allows; files in its cache can be dropped."""
    for names in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        folder = tmp_path / names[0]
        folder.mkdir()
        assert memory.free_in_group(folder) is None
        (folder / names[0]).write_text("1000\n")
        (folder / names[1]).write_text("900\n")
        (folder / "memory.stat").write_text("active_file 50\ninactive_file 30\n")
        assert memory.free_in_group(folder) == 130
        (folder / names[0]).write_text("max\n")
        assert memory.free_in_group(folder) is None


@pytest.mark.parametrize(
    "error, words",
    [
        (MemoryError(), "memory"),
        (MemoryError("Unable to allocate 7.45 GiB for an array"), "8.0 GB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                      "5000000000 bytes. Error code 12"), "5.0 GB"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
         "21.0 MB"),
    ],
)  # fmt: skip
def test_programs_say_how_much_was_asked_for(error, words, monkeypatch, capsys):
    def fail(argv):
        raise error

    monkeypatch.setattr(sys, "argv", ["sample.py"])
    assert cli.run(fail, []) == 2
    said = capsys.readouterr().err
    assert words in said and "--num_samples" in said and said.count("\n") == 1


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="a bug"), memory_needs.explained(None):
        raise RuntimeError("a bug")


def test_advice_on_memory_is_followed(text_file, tmp_path, monkeypatch, capsys):
    """Each flag that is advised is accepted, and is not advised again."""
    monkeypatch.setattr(devices, "free_memory", lambda device: 0)
    half, quarter = (f"--gradient_accumulation_steps={n}" for n in (2, 4))
    advised = {
        (): f"{half} --recompute",
        (half,): f"{quarter} --recompute",
        (quarter,): "--recompute",
        (half, "--recompute"): quarter,
        (quarter, "--recompute"): "--block_size --n_embd",
    }
    for given, names in advised.items():
        flags = tiny_flags("--max_steps=1", "--overwrite", *given, f"--out_dir={tmp_path}/o")
        assert run_mdlm(f"--data={text_file}", *flags) == 0
        said = capsys.readouterr().err
        assert all(name in said for name in names.split()), (given, said)
