"""Where memory is full, the message says what to lower."""

import sys
from types import SimpleNamespace

import pytest
import torch

from nanomdlm.support.cli import entry
from nanomdlm.support.run import session


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 7.45 GiB for an array"),
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 5000 bytes"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
    ],
    ids=str,
)
def test_full_memory_is_one_sentence(error, monkeypatch, capsys):
    def fail(argv):
        raise error

    monkeypatch.setattr(sys, "argv", ["sample.py"])
    assert entry.run(fail, []) == 2
    said = capsys.readouterr().err
    assert str(error) in said and "--num_samples" in said and said.count("\n") == 1


def test_other_errors_stay_what_they_are():
    here = SimpleNamespace(run=None)
    with pytest.raises(RuntimeError, match="a bug"), session.memory_explained(here):
        raise RuntimeError("a bug")
