"""Sampling keeps what it was given, fills the rest, and answers mistakes in one sentence."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, run_mdlm

import common
import sample


@pytest.fixture(scope="module", params=["mdlm", "ar"])
def run(request, text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param)
    assert (
        run_mdlm(
            f"--data={text_file}", *TINY, "--max_steps=5", f"--objective={request.param}", f"--out_dir={out}"
        )
        == 0
    )
    return request.param, out


def test_given_text_stays_and_nothing_is_left_masked(run, capsys):
    kind, out = run
    for steps in (1, 3, 64):
        flags = [f"--out_dir={out}", "--num_samples=3", f"--steps={steps}"]
        assert common.run(sample.main, [*flags, "--prompt=The "]) == 0
        shown = capsys.readouterr().out
        assert shown.count("The ") >= 3
        if kind == "mdlm":
            assert common.run(sample.main, [*flags, "--infill=To b██ or ██t"]) == 0
            lines = capsys.readouterr().out
            assert lines.count("To b") == 3 and " or " in lines and "█" not in lines


def test_the_same_seed_gives_the_same_text(run, capsys):
    shown = []
    for seed in (1, 1, 2):
        assert common.run(sample.main, [f"--out_dir={run[1]}", f"--seed={seed}"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]


def test_generate_fills_exactly_the_masked_positions(run):
    model, _, _ = sample.mdlm.load(run[1])
    x = torch.randint(model.vocab_size + 1, (4, 32), generator=torch.Generator().manual_seed(0))
    x[0] = model.mask_id
    out = sample.generate(model, x, steps=7, generator=torch.Generator().manual_seed(0))
    given = x != model.mask_id
    assert torch.equal(out[given], x[given]) and out.max() < model.vocab_size


@pytest.mark.parametrize(
    "args, words",
    [
        (["--infill=nothing"], ["nothing to fill"]),
        (["--infill=a█", "--prompt=b"], ["contradict"]),
        (["--prompt=\u2603"], ["\u2603", "position 0"]),
        (["--prompt=" + "a" * 40], ["40 tokens", "32"]),
        (["--out_dir=nowhere"], ["nowhere", "mdlm.py"]),
        (["--promt=a"], ["--promt", "--prompt"]),
        (["--steps=0"], ["steps"]),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(run, capsys, args, words):
    given = [] if args[0].startswith("--out_dir") else [f"--out_dir={run[1]}"]
    assert common.run(sample.main, given + args) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said


def test_the_command_line_works(run):
    command = [sys.executable, str(ROOT / "sample.py"), f"--out_dir={run[1]}", "--steps=4"]
    r = subprocess.run(command, capture_output=True, text=True)
    assert r.returncode == 0 and len(r.stdout) >= 32, r.stderr
