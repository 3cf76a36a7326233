"""The memory of a run is estimated before it begins, and what to lower is said where it is full."""

import sys
from types import SimpleNamespace

import pytest
import torch

from nanomdlm.support.cli import entry
from nanomdlm.support.run import session

LARGE = ["--preset=gpu", "--device=cpu", "--compile=off", "--n_head=3", "--eval_windows=2"]
LARGE += ["--max_steps=1", "--eval_interval=1000", "--log_interval=1"]


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
    assert entry.run(fail, []) == 2
    said = capsys.readouterr().err
    assert words in said and "--num_samples" in said and said.count("\n") == 1


def test_other_errors_stay_what_they_are():
    here = SimpleNamespace(run=None)
    with pytest.raises(RuntimeError, match="a bug"), session.memory_explained(here):
        raise RuntimeError("a bug")
