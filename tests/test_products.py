"""Products are rooms of support/ that can be deleted: what does not ask for them still works."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TINY

PRODUCTS = ("constrain", "export", "networks", "proofread", "serving", "web")


@pytest.fixture
def copy(tmp_path):
    """A copy of the project in which programs can be called."""
    for name in ("kernels", "support", "variants", "weights"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mdlm.py", "nanomdlm.py", "sample.py"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def call(folder, *command, **env):
    command = [sys.executable, *map(str, command)]
    env = os.environ | env
    r = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    return r.stdout


def trains_and_fills(folder, text_file):
    call(folder, "mdlm.py", f"--data={text_file}", *TINY, "--max_steps=3", "--out_dir=run")
    assert "█" not in call(folder, "sample.py", "--infill=the ███ of", "--out_dir=run")


def test_without_all_products_a_run_and_an_infill_work(copy, text_file):
    for name in PRODUCTS:
        shutil.rmtree(copy / "support" / name)
    trains_and_fills(copy, text_file)
