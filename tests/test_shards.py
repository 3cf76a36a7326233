"""--shard: several ranks that hold one model train it as one rank would, and lose nothing.

Ranks are processes on the CPU, with gloo; faults.py forks them.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, corpus_of, losses, read_log, tiers
from nursery import begin_ranks, free_port, nursery_of_a_file, starter
from safetensors.torch import load_file, save_file

import mdlm
from nanomdlm.kernels import operations as kernels
from nanomdlm.support import errors
from nanomdlm.support.cli import files
from nanomdlm.support.run import checkpoint
from studies import scale

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, /proc")
nursery_of_a_file = nursery_of_a_file  # a fixture


@pytest.fixture
def run(nursery, pydoc, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(pydoc[:6000], encoding="utf-8")
    return starter(nursery, text)


def train(run, n, out, *flags, **more):
    """Train on n ranks to the end; n = 0: without ranks. Returns the first one's output."""
    if not n:
        ranks = [run(out, *flags, **more)]
    else:
        ranks = begin_ranks(n, run, out, *flags, TORCHELASTIC_RUN_ID="test", **more)
    assert [r.wait(120) for r in ranks] == [0] * len(ranks), [r.err for r in ranks]
    assert all(r.out == "" for r in ranks[1:]), "only the first rank speaks"
    return ranks[0].out


def results(out):
    """Losses and gradient norms of each step; values of each evaluation."""
    log = read_log(out)
    values = [r[key] for r in log if "val_nelbo" in r for key in ("val_nelbo", "val_nelbo_raw")]
    return losses(out), [r["grad_norm"] for r in log if "loss" in r], values


def assert_equal_losses(a, b, steps, tolerance=1e-5):
    (losses_a, norms_a, values_a), (losses_b, norms_b, values_b) = results(a), results(b)
    assert len(losses_a) == len(losses_b) == steps
    assert losses_a == pytest.approx(losses_b, abs=tolerance)
    assert norms_a == pytest.approx(norms_b, abs=100 * tolerance)
    assert values_a == pytest.approx(values_b, abs=10 * tolerance)


def shown(output):
    """What a run shows: the lines of its evaluations and samples."""
    return [line for line in output.splitlines() if line.startswith(("  |", "  ]"))]


# What two ranks save goes on without ranks, or on three.
SAVED = ["--batch_size=24", "--max_steps=8", "--eval_interval=4"]


def test_shards_train_save_and_resume(run, tmp_path):
    flags = [*SAVED, "--recompute", "--gradient_accumulation_steps=2"]
    one = train(run, 0, tmp_path / "one", *SAVED, fault="muon_in_float32")
    two = train(run, 2, tmp_path / "two", *flags, "--shard", fault="muon_in_float32")
    assert_equal_losses(tmp_path / "one", tmp_path / "two", 8)
    assert shown(one) == shown(two) and len(shown(one)) >= 2
    folder = tmp_path / "two" / "step-8"
    assert {p.name for p in folder.glob("state-*")} == {
        "state-00001-of-00002.safetensors",
        "state-00002-of-00002.safetensors",
    }
    a, b = (mdlm.load(tmp_path / name)[0].state_dict() for name in ("one", "two"))
    assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)
    # What step 4 left, resumed without ranks.
    shutil.rmtree(folder)
    (tmp_path / "two" / "latest").write_text("step-4")
    train(run, 0, tmp_path / "two", "--resume", "--shard=0", fault="muon_in_float32")
    assert_equal_losses(tmp_path / "one", tmp_path / "two", 8)


ALIKE = ["--batch_size=24", "--max_steps=20", "--n_layer=3", "--n_embd=48", "--dropout=0"]


@pytest.mark.parametrize("optimizer", tiers(["adamw", "muon"], slow=["muon"]))
def test_any_number_of_ranks_trains_alike(run, tmp_path, optimizer):
    flags = [*ALIKE, f"--optimizer={optimizer}"]
    train(run, 0, tmp_path / "0", *flags, fault="muon_in_float32:silent")
    for name, n, shard in (
        ("1", 1, "--shard"),
        ("2", 2, "--shard"),
        ("4", 4, "--shard"),
        ("2x2", 4, "--shard=2"),
        ("ddp", 4, "--shard=0"),
    ):
        train(run, n, tmp_path / name, *flags, shard, fault="muon_in_float32:silent")
        assert_equal_losses(tmp_path / "0", tmp_path / name, 20, tolerance=1e-5)
    assert losses(tmp_path / "0") == losses(tmp_path / "1"), "to the bit"


@pytest.mark.slow
def test_dropout_is_that_of_unsharded_ranks(run, tmp_path):
    flags = [*SAVED, "--dropout=0.3", "--optimizer=adamw", "--gradient_accumulation_steps=2"]
    train(run, 2, tmp_path / "whole", *flags)
    train(run, 2, tmp_path / "shards", *flags, "--shard", "--recompute")
    assert_equal_losses(tmp_path / "whole", tmp_path / "shards", 8)
    train(run, 2, tmp_path / "again", *flags, "--recompute")
    assert losses(tmp_path / "again") == losses(tmp_path / "whole"), "to the bit"


NETWORKS = {
    "tied": ["--tie", "--pos=learned", "--dropout=0.1"],
    "adaLN": ["--time_conditioning", "--pos=sinusoidal", "--n_head=4"],
    "ar": ["--objective=ar", "--conv=0"],
    "variant": ["--masking=bernoulli", "--rates=cosine", "--ema=0"],
    "documents": ["--separator=\\n", "--time_conditioning"],
}


@pytest.mark.parametrize("name", tiers(list(NETWORKS), slow=["adaLN", "variant"]))
def test_every_network_can_be_spread(run, tmp_path, name):
    """In float32 as without shards; in bfloat16, where other casts happen, nearly so."""
    flags = [*SAVED, *NETWORKS[name], "--optimizer=adamw", "--learning_rate=1e-3"]
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 5e-3)):
        for n, shard in ((0, "--shard=0"), (1, "--shard")):
            out = tmp_path / f"{dtype}{n}"
            train(run, n, out, *flags, shard, f"--dtype={dtype}")
        a, b = (losses(tmp_path / f"{dtype}{n}") for n in (0, 1))
        assert len(a) == 8 and a == pytest.approx(b, abs=tolerance)
        mdlm.load(out)


@pytest.mark.parametrize("optimizer", tiers(["adamw", "muon"], slow=["muon"]))
def test_fewer_ranks_resume_what_four_saved(run, tmp_path, optimizer):
    flags = [*SAVED, f"--optimizer={optimizer}"]
    train(run, 0, tmp_path / "whole", *flags, fault="muon_in_float32:silent")
    train(run, 4, tmp_path / "4", *flags, "--shard", fault="muon_in_float32:silent")
    shutil.rmtree(tmp_path / "4" / "step-8")
    (tmp_path / "4" / "latest").write_text("step-4")
    for n, *more in ((1,), (2, "--shard=0"), (3,), (4, "--shard=2")):
        out = shutil.copytree(tmp_path / "4", tmp_path / f"on{n}")
        said = train(run, n, out, "--resume", *more, fault="muon_in_float32:silent")
        assert "resuming from" in said and "step-4" in said
        assert_equal_losses(tmp_path / "whole", out, 8)
    # And shards go on with what one process saved.
    shutil.rmtree(tmp_path / "whole" / "step-8")
    (tmp_path / "whole" / "latest").write_text("step-4")
    train(run, 2, tmp_path / "whole", "--resume", "--shard", fault="muon_in_float32:silent")
    assert_equal_losses(tmp_path / "on1", tmp_path / "whole", 8)


@pytest.mark.slow
def test_compiled_shards_train_alike(run, tmp_path):
    flags = [*SAVED, "--optimizer=adamw", "--eval_windows=4"]
    train(run, 0, tmp_path / "one", *flags)
    said = train(run, 2, tmp_path / "two", *flags, "--compile=on", "--shard", "--recompute")
    assert "compiled, 2 ranks, sharded over 2" in said
    assert_equal_losses(tmp_path / "one", tmp_path / "two", 8)


# --------------------------------------------------------------------------------------------------
# Faults


def checkpoints(out):
    for folder in checkpoint.checkpoints(out):
        checkpoint.verify(folder)
    return [p.name for p in checkpoint.checkpoints(out)]


# A part of the second rank does not fit, or the file that the first one joins.
@pytest.mark.parametrize("which, size", [(1, 1 << 14), (0, 50_000)])
def test_full_disk_of_one_rank_is_one_sentence(run, tmp_path, which, size):
    flags = [*SAVED, "--optimizer=adamw", "--shard", "--n_layer=1", "--conv=0", "--ema=0"]
    fault = f"no_space:5:{size}:{which}"
    ranks = begin_ranks(2, run, tmp_path / "o", *flags, TORCHELASTIC_RUN_ID="a", fault=fault)
    assert [r.wait(60) for r in ranks] == [2, 2], [r.err for r in ranks]
    assert "cannot be written (File too large)" in ranks[0].err
    assert "--resume continues" in ranks[0].err and "Traceback" not in ranks[1].err
    assert checkpoints(tmp_path / "o") == ["step-4"]
    assert not list((tmp_path / "o").glob(f"{files.TMP}*")), "nothing half-written is left"


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_rank_that_dies_in_a_save_loses_nothing(run, tmp_path, which):
    out = tmp_path / "o"
    flags = [*SAVED, "--optimizer=adamw", "--shard"]
    train(run, 0, tmp_path / "whole", *SAVED, "--optimizer=adamw")
    more = dict(TORCHELASTIC_RUN_ID="a", fault=f"die_while_saving:8:{which}")
    ranks = begin_ranks(2, run, out, *flags, **more)
    assert ranks[which].wait(60) == -9
    time.sleep(0.5)
    ranks[1 - which].kill()  # as torchrun would
    assert checkpoints(out) == ["step-4"]
    train(run, 2, out, "--resume")
    assert checkpoints(out) == ["step-8", "step-4"]
    assert_equal_losses(tmp_path / "whole", out, 8)


@pytest.fixture(scope="module")
def parts(nursery, pydoc, tmp_path_factory):
    """A run of two ranks; not to be changed."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "text.txt").write_text(pydoc[:6000], encoding="utf-8")
    run = starter(nursery, folder / "text.txt")
    train(run, 2, folder / "o", "--max_steps=2", "--eval_interval=1", "--shard")
    return folder / "o"


def forge(folder, change):
    """Change the tensors of a part, and the manifest so that the checksums are right."""
    path = folder / "state-00002-of-00002.safetensors"
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    tensors = load_file(path)
    save_file(change(tensors), path, header["__metadata__"])
    manifest = json.loads((folder / "manifest.json").read_text())
    listed = dict(size=path.stat().st_size, sha256=files.sha256_of(path))
    manifest["files"][path.name] = listed
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_forged_parts_are_refused(parts, tmp_path):
    def cut(tensors):
        return {name: t[:1].contiguous() if t.dim() else t for name, t in tensors.items()}

    def spoil(tensors):
        return {name: t * torch.nan for name, t in tensors.items()}

    for change, words in ((cut, "does not fit its config"), (spoil, "is not finite")):
        out = shutil.copytree(parts, tmp_path / change.__name__)
        forge(out / "step-2", change)
        config = mdlm.run_config.read(mdlm.Config, out / "step-2")
        ops = kernels.select("torch")
        device = torch.device("cpu")
        corpus = corpus_of(out / "data", config, device)
        config.shard = 0
        run = mdlm.make_run(config, corpus, mdlm.devices.Machine(device, torch.float32, ops))
        with pytest.raises(errors.UserError, match=words):
            checkpoint.restore(out / "step-2", run.model, run.averaged, run.optimizers)


def test_a_missing_part_is_named(parts, tmp_path):
    out = shutil.copytree(parts, tmp_path / "o")
    (out / "step-2" / "state-00001-of-00002.safetensors").unlink()
    with pytest.raises(errors.UserError, match="state-00001-of-00002"):
        checkpoint.verify(out / "step-2")
    assert checkpoint.find_checkpoint(out).name == "step-1"


# --------------------------------------------------------------------------------------------------
# What a rank holds


@pytest.mark.long
def test_bytes_fall_with_the_ranks(run, tmp_path):
    L, C = 12, 512
    flags = [f"--n_embd={C}", f"--n_layer={L}", "--max_steps=2", "--batch_size=16"]
    flags += ["--eval_windows=2", "--attention_every=1", "--gradient_accumulation_steps=2"]
    making = {}
    for n in (2, 4):
        fault = f"measure:{tmp_path / 'r'}{n}:exactly"
        train(run, n, tmp_path / str(n), *flags, "--shard", fault=fault)
        for rank in range(n):
            found = json.loads(Path(f"{tmp_path / 'r'}{n}.{rank}").read_text())
            P = found["parameters"]
            matrices = found["matrices"]
            for kind, each in dict(weights=4 * P, gradients=4 * P, average=4 * P).items():
                assert found[kind] == pytest.approx(each / n, rel=0.03), (kind, n, rank)
            moments = 4 * matrices + 8 * (P - matrices)
            assert found["reduced too early"] == 0, "gradients are exchanged once a step"
            assert found["moments"] == pytest.approx(moments / n, rel=0.03)
            # Muon: every rank sends its share of all matrices there and back.
            expected = 2 * 4 * matrices / n * (1 - 1 / n)
            assert found["sent"] / found["steps"] == pytest.approx(expected, rel=0.03)
            making[n] = max(found["making"], making.get(n, 0))
    # Two models, that which learns and the average, a block of which is whole; and PyTorch's own.
    assert making[4] < 2 * 4 * P / 4 + 4 * 12 * C**2 + 60e6 < 2 * 4 * P / 2
    assert making[2] > 2 * 4 * P / 2 * 0.9


@pytest.mark.slow
def test_recomputation_keeps_little(run, tmp_path):
    """Of the activations: the inputs of the blocks, and one block's own."""
    L, C, tokens = 8, 256, 16 * 64
    flags = [f"--n_embd={C}", f"--n_layer={L}", "--block_size=64", "--batch_size=16", "--shard"]
    flags += ["--max_steps=2", "--eval_windows=1", "--attention_every=1", "--n_head=4"]
    taken = []
    for more in ([], ["--recompute"]):
        out = tmp_path / f"o{len(more)}"
        train(run, 1, out, *flags, *more, fault=f"measure:{tmp_path / 'r'}:exactly")
        found = json.loads((tmp_path / "r.0").read_text())
        taken.append(found["step"] - found["gradients"])
    assert losses(tmp_path / "o0") == pytest.approx(losses(tmp_path / "o1"), abs=1e-6)
    value = 4 * C * tokens  # bytes of one value for each token and unit of width
    assert 15 * L < taken[0] / value < 45 * L
    assert taken[1] / value < L + 45


@pytest.mark.long
def test_eight_gigabytes_of_ids_take_little_memory(tmp_path):
    """A rank on a sparse file of 8 GB, limited to 1.5 GB of memory of its own."""
    folder = tmp_path / "ids"
    folder.mkdir()
    for name, size in (("train.bin", 8 << 30), ("val.bin", 1 << 20)):
        with open(folder / name, "wb") as f:
            f.truncate(size)
    script = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (3 << 29, 3 << 29))
sys.path.insert(0, {str(ROOT)!r})
import mdlm
sys.exit(mdlm.entry.run(mdlm.main, sys.argv[1:]))
"""
    (tmp_path / "limited.py").write_text(script)
    flags = [*TINY, f"--data={folder}", "--vocab_size=64", "--max_steps=2", "--shard"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=1", str(tmp_path / "limited.py"), *flags]
    command += [f"--out_dir={tmp_path / 'o'}", "--block_size=256"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4,294,967,296 training tokens" in done.stdout


# --------------------------------------------------------------------------------------------------
# Nodes


def agent(port, args, log):
    """torchrun on one of two nodes: on this machine, but with a rendezvous as between machines."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    command += ["--rdzv_backend=c10d", "--rdzv_id=job", f"--rdzv_endpoint=127.0.0.1:{port}"]
    command += ["--max-restarts=3", str(ROOT / "tests" / "faults.py"), *args]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    env |= {"FAULT_SCRIPT": "sleep:1000:0", "PYTHONUNBUFFERED": "1"}
    with open(log, "w") as f:
        return subprocess.Popen(command, env=env, stdout=f, stderr=f)


def keeps_the_store(port):
    """Wait until the first node listens: the ranks cannot go on without the one that does."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)


def fail(process):
    """The power of a node fails: its agent and its rank."""
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        subprocess.run(["pkill", "-9", "-P", str(process.pid)], check=False)
        process.kill()
        process.wait()


@pytest.mark.long
def test_a_node_that_comes_back_resumes(run, tmp_path, pydoc):
    port = free_port()
    flags = [*TINY, "--batch_size=24", "--eval_windows=4", "--optimizer=adamw"]
    flags += ["--max_steps=120", "--eval_interval=20", "--learning_rate=1e-3"]
    text = tmp_path / "text.txt"
    train(run, 0, tmp_path / "whole", *flags)
    args = [f"--data={text}", *flags, "--shard", "--resume=auto", f"--out_dir={tmp_path / 'o'}"]
    first = agent(port, args, tmp_path / "first.log")
    keeps_the_store(port)
    second = agent(port, args, tmp_path / "second.log")
    try:
        deadline = time.monotonic() + 60
        while not checkpoint.checkpoints(tmp_path / "o") and time.monotonic() < deadline:
            time.sleep(0.05)
        fail(second)
        time.sleep(1)
        again = agent(port, args, tmp_path / "again.log")
        try:
            assert first.wait(150) == 0, (tmp_path / "first.log").read_text()[-4000:]
            assert again.wait(20) == 0
        finally:
            fail(again)
    finally:
        fail(first)
        fail(second)
    said = (tmp_path / "first.log").read_text() + (tmp_path / "again.log").read_text()
    assert len(re.findall("resuming from", said)) == 1
    assert_equal_losses(tmp_path / "whole", tmp_path / "o", 120, tolerance=1e-4)


def test_table_of_scale_is_its_formula():
    document = (ROOT / "docs" / "scale.md").read_text()
    assert scale.table(scale.MODELS) in document and scale.table(scale.DECODERS) in document
