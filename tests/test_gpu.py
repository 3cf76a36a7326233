"""On a GPU: training with the Triton kernels gives what training in plain PyTorch gives.

Run by studies/gpu.sh, which may name a text file in MDLM_GPU_TEXT; without one the text is pydoc.
"""

import os
import statistics
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, corpus_of, losses, read_log, run_mdlm

import bench
import mdlm
import sample
from nanomdlm.support.run import compiling, graphs
from nanomdlm.support.run import run as support_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FLAGS = [
    "--device=cuda",
    "--preset=gpu",
    "--compile=off",
    "--dropout=0",  # it draws other numbers where other kernels run
    f"--data={os.environ.get('MDLM_GPU_TEXT') or 'pydoc'}",
    "--eval_interval=100000",
    "--log_interval=1",
    "--warmup_steps=10",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(losses of all steps, NELBO, its standard error) of a run."""

    def train(kernels, steps, seed, dtype="bfloat16"):
        out = tmp_path_factory.mktemp(kernels)
        flags = [f"--kernels={kernels}", f"--max_steps={steps}", f"--seed={seed}"]
        assert run_mdlm(*FLAGS, *flags, f"--dtype={dtype}", f"--out_dir={out}") == 0
        last = [r for r in read_log(out) if "val_nelbo" in r][-1]
        return losses(out), last["val_nelbo"], last["val_nelbo_se"]

    return train


def test_first_losses_are_as_near_to_float32_as_those_of_pytorch(run):
    """Training amplifies what bfloat16 rounds, so the losses of both drift away from float32's."""
    exact = run("torch", 50, 0, "float32")[0]
    drift = {}
    for kernels in ("triton", "torch"):
        differences = [abs(a - b) for a, b in zip(run(kernels, 50, 0)[0], exact, strict=True)]
        drift[kernels] = sum(differences) / 50
        print(f"\n{kernels}: losses differ by {drift[kernels]:.5f}, at most {max(differences):.5f}")
    assert drift["triton"] <= 2 * drift["torch"] + 1e-3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_final_nelbo_agrees(run, seed):
    """Within two standard errors of the difference."""
    (_, a, a_se), (_, b, b_se) = (run(kernels, 200, seed) for kernels in ("triton", "torch"))
    print(f"\nseed {seed}: NELBO triton {a:.4f} +- {a_se:.4f}, torch {b:.4f} +- {b_se:.4f}")
    assert abs(a - b) <= 2 * (a_se**2 + b_se**2) ** 0.5


@pytest.mark.parametrize("compiled", [True, False])
def test_steps_as_cuda_graphs_compute_the_same(tmp_path, compiled):
    """Also with dropout, an evaluation between two steps, and rates that change."""
    values = []
    for recorded in (True, False):
        folder = tmp_path / str(recorded)
        folder.mkdir()
        config = mdlm.Config(**mdlm.PRESETS["gpu"] | dict(n_layer=2, vocab_size=65, dropout=0.1))
        bench.write_tokens(folder, 65)
        device = torch.device("cuda")
        corpus = corpus_of(folder, config, device)
        ops = mdlm.devices.select_kernels("auto", device, config, torch.bfloat16)
        run = mdlm.make_run(config, corpus, mdlm.devices.Machine(device, torch.bfloat16, ops))
        compiling.compile_network(run, compiled)
        if not recorded:
            run.engine.call = support_run.run_eagerly
        for step in range(20):
            mdlm.train_step(run, step, progress=step / 20)
            if step == 10:
                mdlm.evaluate(run.averaged, corpus.windows(64))
        values.append(torch.stack([*run.pending.values()]).cpu())
        if recorded:
            recorder = run.engine.call.__self__
            assert len(recorder.recorded) == 3 and not recorder.failed
    print("\nlosses and norms differ by at most", (values[0] - values[1]).abs().amax(0).tolist())
    torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_shards_on_gpus_train_alike(tmp_path, compiled):
    """--shard on all GPUs of the machine, one or more, against DDP on as many, in bfloat16."""
    ranks = torch.cuda.device_count()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(ROOT / "mdlm.py"), *FLAGS, "--max_steps=60"]
    command += [f"--compile={compiled}", f"--batch_size={32 * ranks}", "--eval_windows=512"]
    for name, more in dict(plain=[], shards=["--shard"], less=["--shard", "--recompute"]).items():
        out = tmp_path / name
        args = [*command, *more, f"--out_dir={out}"]
        done = subprocess.run(args, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr[-4000:]
        speed = [r["tokens_per_second"] for r in read_log(out) if "loss" in r]
        print(f"\n{ranks} GPU(s), {name}: {statistics.median(speed):,.0f} tokens/s")
    plain, shards, less = (losses(tmp_path / name) for name in ("plain", "shards", "less"))
    print("losses differ by at most", max(abs(a - b) for a, b in zip(plain, shards, strict=True)))
    # As between kernels: bfloat16 rounds otherwise where weights are gathered in it.
    assert shards == pytest.approx(plain, abs=0.02)
    assert less == pytest.approx(shards, abs=0.02)
    # What the shards have saved goes on without them.
    resume = [f"--out_dir={tmp_path / 'shards'}", "--resume", "--shard=0", "--max_steps=70"]
    assert run_mdlm(*resume) == 0
    assert len(losses(tmp_path / "shards")) == 70


@pytest.mark.parametrize("more", [{}, dict(block_length=16)], ids=str)
def test_predictions_as_cuda_graphs_are_the_same(more):
    """In float64 networks, whose rounding hardly ever decides a draw: texts and an evaluation."""
    config = mdlm.Config(**mdlm.PRESETS["gpu"] | dict(n_layer=2, dropout=0.0, kernels="torch"))
    for name, value in more.items():
        setattr(config, name, value)
    ops = mdlm.devices.select_kernels("torch", torch.device("cuda"), config)
    model = mdlm.make_model(config, 65, ops).to("cuda", torch.float64).eval()
    g = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.copy_(0.1 * torch.randn(p.shape, generator=g))
    windows = torch.randint(65, (100, config.block_size), generator=g).cuda()
    x = torch.full((3, config.block_size), model.mask_id).cuda()

    def results():
        texts = [sample.generate(model, x, seed=seed, steps=32) for seed in range(3)]
        return torch.stack(texts), mdlm.evaluate(model, windows, passes=2)["nelbo"]

    with graphs.run_eagerly():
        texts, nelbo = results()
    got, got_nelbo = results()
    calls = graphs.CALLS[model]
    assert not calls.failed and sum(bool(found) for found in calls.known.values()) >= 2
    assert got.equal(texts)
    assert got_nelbo == pytest.approx(nelbo, rel=1e-7)
