"""A run that ends by the clock learns at once, while another process compiles."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, read_log, tiny_flags
from nursery import has_logged

from nanomdlm.kernels.launch import can_compile
from nanomdlm.support.run import checkpoint, compiling

needs_compiler = pytest.mark.skipif(
    os.name != "posix" or not can_compile(torch.device("cpu")), reason="a C++ compiler, POSIX"
)


class Program:
    """`python mdlm.py` on a text, with a compiler's cache of its own and a process group."""

    def __init__(self, text, folder):
        self.folder = folder
        self.said = folder / "said"
        flags = tiny_flags("--compile=on", f"--data={text}", f"--out_dir={folder / 'out'}")
        with open(self.said, "w") as f:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "mdlm.py"), *flags, "--time_limit=900"],
                env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")},
                stdout=f,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, words):
        self.wait_until(lambda: words in self.said.read_text())

    def wait_for_step(self, step):
        self.wait_until(lambda: has_logged(self.folder / "out", step))

    def wait_until(self, condition, seconds=300):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < deadline, self.said.read_text()
            time.sleep(0.1)

    def press_ctrl_c(self):
        """As a terminal does: the signal goes to all processes."""
        os.killpg(self.process.pid, signal.SIGINT)
        assert self.process.wait(60) == 130
        assert "Traceback" not in self.said.read_text()
        deadline = time.monotonic() + 10
        with pytest.raises(ProcessLookupError):  # soon none is left
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(0.1)


@needs_compiler
@pytest.mark.slow
def test_run_learns_while_compiler_works(text_file, tmp_path):
    program = Program(text_file, tmp_path)
    program.wait_for("compiled from step ")
    said = program.said.read_text()
    compiled_from = int(said.split("compiled from step ")[1].split()[0])
    program.wait_for_step(compiled_from + 2)
    program.press_ctrl_c()
    assert compiled_from > 2
    graphs = list((tmp_path / "cache" / "aotautograd").iterdir())
    assert len(graphs) == 3, "the run found what the other process had compiled"
    losses = [r["loss"] for r in read_log(tmp_path / "out") if "loss" in r]
    assert losses[-1] < losses[0]


@needs_compiler
@pytest.mark.slow
def test_ctrl_c_ends_the_compiler_quietly(text_file, tmp_path):
    program = Program(text_file, tmp_path)
    program.wait_for_step(1)
    program.press_ctrl_c()
    assert "compiled from" not in program.said.read_text()
    assert checkpoint.find_checkpoint(tmp_path / "out")


@pytest.mark.parametrize("exitcode", [0, 1, -9])
def test_blocks_are_compiled_when_process_ends(monkeypatch, exitcode):
    alive = [True, True, False]
    compiled = []
    said = []
    monkeypatch.setattr(compiling, "compile_layers", compiled.append)
    threads = torch.get_num_threads()
    compiler = SimpleNamespace(
        is_alive=lambda: alive.pop(0), exitcode=exitcode, threads=threads + 1
    )
    run = SimpleNamespace(
        engine=SimpleNamespace(compiler=compiler),
        model=SimpleNamespace(layers="layers"),
        log=SimpleNamespace(say=said.append),
        step=7,
    )
    for _ in range(2):
        compiling.use_compiled(run)
        assert not compiled
    for _ in range(2):
        compiling.use_compiled(run)
        assert compiled == ([] if exitcode else ["layers"]), "once"
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    words = f"exit code {exitcode}" if exitcode else "compiled from step 8 on"
    assert len(said) == 1 and words in said[0]
