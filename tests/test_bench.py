"""bench.py counts right, times nothing that is wrong, and says what it could not measure."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, losses, run_mdlm
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import bench
import common
import frontier
import kernels
import mdlm
from kernels import contestants

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------------------
# Counts


def test_attention_is_counted_as_pytorch_counts_sdpa():
    B, T, H, D, size = 2, 8, 3, 4, 2
    q = (B, H, T, D)
    forward, backward = (contestants.attention_cost(B, T, H, D, size, b) for b in (False, True))
    assert forward[0] == sdpa_flop_count(q, q, q) == 2 * (2 * 8 * 8 * 4) * 6
    assert backward[0] == forward[0] + sdpa_backward_flop_count(q, q, q, q)
    one = 2 * 8 * 3 * 4 * 2  # bytes of q
    assert forward[1] == 4 * one  # q k v, O
    assert backward[1] == 12 * one  # ... q k v O dO, dq dk dv


@pytest.mark.parametrize("backward", [False, True])
def test_the_head_is_counted_as_pytorch_counts_its_products(backward):
    N, M, C, V = 24, 12, 5, 7
    h, W = torch.randn(M, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        loss = F.cross_entropy(F.linear(h, W), torch.zeros(M, dtype=torch.int64))
        if backward:
            loss.backward()
    flops, size = contestants.head_cost(N, M, C, V, 2, backward)
    assert flops == counter.get_total_flops() == (3 if backward else 1) * 2 * 12 * 5 * 7
    assert size == 2 * ((12 * 5 + 7 * 5) + (24 * 5 + 7 * 5) * backward)


def test_bytes_of_cross_entropy_and_masking():
    assert contestants.cross_entropy_cost(3, 5, 2, False) == (0, 3 * 5 * 2)
    assert contestants.cross_entropy_cost(3, 5, 2, True) == (0, 2 * 3 * 5 * 2)
    tokens, out, rows, a_row = 2 * 4 * 8, 2 * 4 * 8, 2 * 4 * 8, 8 + 8 + 8
    assert contestants.masking_cost(2, 4) == (0, tokens + out + rows + 2 * a_row)


def test_the_slower_of_the_two_limits_decides():
    limits = {"bandwidth": 10.0, torch.float32: 100.0}
    assert bench.least_seconds((200, 10), limits, torch.float32) == 2
    assert bench.least_seconds((200, 40), limits, torch.float32) == 4
    assert bench.least_seconds((0, 40), limits, torch.int64) == 4  # no products, no limit for their dtype


def test_contestants_take_turns_and_the_median_is_of_all_rounds(monkeypatch):
    turns, now = [], [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def contestant(name, seconds):
        def call():
            turns.append(name)
            now[0] += next(seconds)

        return call

    slow = iter([1.0] * 4 + [2.0, 3.0, 100.0])  # warm-up, then three rounds
    times = bench.race(
        {"a": contestant("a", slow), "b": contestant("b", iter([5.0] * 7))}, CPU, seconds=0, shortest=0
    )
    assert turns[-6:] == ["a", "b"] * 3
    assert times["a"] == (3.0, (51.5 - 2.5) / 2) and times["b"] == (5.0, 0.0)


# ------------------------------------------------------------------------------------------------------------
# Kernels


def tiny_cases(device):
    yield lambda: contestants.masking(device, 4, 16)
    yield lambda: contestants.head(device, torch.float32, 64, 8, 11)
    yield lambda: contestants.attention(device, torch.bfloat16, 2, 16, 2, 32)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Run bench.py kernels on tiny cases: (exit code, the JSON)."""
    monkeypatch.setattr(contestants, "cases", tiny_cases)
    monkeypatch.setattr(bench, "measure_limits", lambda device, dtypes: dict.fromkeys(dtypes, 1e9) | LIMIT)
    path = tmp_path / "bench.json"

    def run():
        code = common.run(bench.main, ["--device=cpu", "--seconds=0", f"--json={path}"])
        return code, json.loads(path.read_text())

    return run


LIMIT = dict(bandwidth=1e9)


def test_every_contestant_has_a_time_and_its_share_of_the_limit(tiny, capsys):
    code, results = tiny()
    assert code == 0 and results["versions"]["torch"] == torch.__version__ and results["hardware"]
    assert len(results["rows"]) == 2 + 2 * 2 + 2 * 2  # masking has no backward
    for row in results["rows"]:
        assert row["ms"] > 0 and row["spread"] >= 0 and row["speed_up"] > 0
    for row in results["rows"]:  # the limit is 1 GFLOP/s and 1 GB/s
        if row["operation"] == "head + loss":
            least = contestants.head_cost(64, 32, 8, 11, 4, "backward" in row["what"])
            assert math.isclose(row["share"], max(least) / 1e9 / (row["ms"] / 1e3))
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(results["rows"]) and len({line.count("|") for line in table}) == 1


def off_by_three_percent(f):
    return lambda *args: 1.03 * f(*args)


def wrong_gradient(f):
    return lambda h, *args: f(h.detach() + 0 * h, *args)  # the loss is right, dh is 0


def no_number(f):
    return lambda *args: f(*args) * math.nan


@pytest.mark.parametrize("spoil", [off_by_three_percent, wrong_gradient, no_number])
def test_a_wrong_result_is_told_loudly_and_gets_no_time(tiny, monkeypatch, capsys, spoil):
    monkeypatch.setattr(kernels, "linear_cross_entropy", spoil(kernels.linear_cross_entropy))
    code, results = tiny()
    said = capsys.readouterr()
    assert code == 1 and "WRONG RESULT" in said.err and "head + loss" in said.err and "mdlm" in said.err
    wrong = [row for row in results["rows"] if row["contestant"] == "mdlm" and "trouble" in row]
    assert wrong and all(row["operation"] == "head + loss" and "ms" not in row for row in wrong)
    assert [r for r in results["rows"] if r["operation"] == "attention" and "ms" in r]  # the rest goes on


def test_wrong_masks_are_told(tiny, monkeypatch, capsys):
    right = kernels.mask_tokens
    monkeypatch.setattr(kernels, "mask_tokens", lambda x0, l, *more: right(x0, (l - 1).clamp(min=0), *more))
    assert tiny()[0] == 1 and "masking" in capsys.readouterr().err


def test_a_peer_that_fails_has_a_line_that_says_why(tiny, monkeypatch):
    def broken(*args):
        raise RuntimeError("no such kernel\nand a long trace")

    original = contestants.head

    def with_peer(*args):
        case = original(*args)
        case.contestants["a peer"] = broken
        return case

    monkeypatch.setattr(contestants, "head", with_peer)
    code, results = tiny()
    assert code == 0
    lines = [row["trouble"] for row in results["rows"] if row["contestant"] == "a peer"]
    assert lines == ["RuntimeError: no such kernel"] * 2


def test_a_wrong_peer_loses_its_time_and_a_wrong_yardstick_is_told(tiny, monkeypatch, capsys):
    spoiled, original = ["a peer"], contestants.head

    def with_peer(*args):
        case = original(*args)
        case.contestants["a peer"] = case.contestants["mdlm"]
        right = case.contestants[spoiled[0]]
        case.contestants[spoiled[0]] = lambda *args: tuple(1.1 * r for r in right(*args))
        return case

    monkeypatch.setattr(contestants, "head", with_peer)
    code, results = tiny()
    assert code == 0 and not capsys.readouterr().err
    wrong = [row for row in results["rows"] if "trouble" in row]
    assert [row["contestant"] for row in wrong] == ["a peer"] * 2
    assert all(row["trouble"].startswith("WRONG RESULT") and "ms" not in row for row in wrong)
    spoiled[0] = "PyTorch, all rows"
    assert tiny()[0] == 1 and "PyTorch, all rows: WRONG RESULT" in capsys.readouterr().err


@pytest.mark.parametrize("backward", [False, True])
def test_the_contestants_of_a_gpu_compute_what_they_should(monkeypatch, backward):
    """As far as a CPU takes them; those that it lacks are named."""
    monkeypatch.setattr(contestants, "on_gpu", lambda device: True)
    monkeypatch.setattr(contestants, "compiled", lambda f: f)  # the real one takes its time
    gpu_only = {
        "SDPA CUDNN",
        "SDPA EFFICIENT",
        "liger-kernel",
        "cut-cross-entropy",
        "cut-cross-entropy, exact",
    }
    f32, checked = torch.float32, set()
    for case in (
        contestants.masking(CPU, 4, 16),
        contestants.head(CPU, f32, 64, 8, 11),
        contestants.cross_entropy(CPU, f32, 16, 11),
        contestants.attention(CPU, f32, 2, 16, 2, 32),
        contestants.attention(CPU, f32, 2, 16, 2, 32, block=True),
    ):
        exact = case.exact(*case.inputs(0))
        for name in case.contestants.keys() - gpu_only if case.backward or not backward else ():
            with torch.set_grad_enabled(backward):
                assert bench.check(case, backward, name, exact) == "", (case.name, name)
            checked.add((case.name, name))
    assert {("attention", "SDPA MATH"), ("head + loss", "PyTorch eager, all rows")} <= checked
    assert {case for case, name in checked if name == "mdlm"} >= {"attention block", "cross-entropy"}


def test_on_a_cpu_it_says_what_it_cannot_do_and_lists_what_it_did_not(tmp_path):
    command = [sys.executable, ROOT / "bench.py", "--device=cpu", "--seconds=0", "--time_limit=1", "--json=-"]
    r = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert r.returncode == 0, r.stderr
    results = json.loads(r.stdout)  # nothing else on standard output
    assert "Triton cannot be timed" in results["notes"][0] and "Triton cannot be timed" in r.stderr
    operations = {row["operation"] for row in results["rows"]}
    assert operations == {"masking", "head + loss", "attention"}
    late = [row for row in results["rows"] if "trouble" in row]
    assert late and all(row["trouble"] == "not measured: the time is up" for row in late)


# ------------------------------------------------------------------------------------------------------------
# Training


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ids")
    for name in ("train.bin", "val.bin"):
        np.random.default_rng(0).integers(20, size=4000, dtype=np.uint16).tofile(folder / name)
    return folder


def test_the_step_that_is_timed_is_the_step_of_training(ids, tmp_path):
    flags = [*TINY, f"--data={ids}", "--gradient_accumulation_steps=2", "--ema=0.9", "--rate_margin=0"]
    flags += ["--warmup_steps=0", "--lr_schedule=constant", "--max_steps=6", f"--out_dir={tmp_path / 'out'}"]
    assert run_mdlm(*flags) == 0
    config = mdlm.load(tmp_path / "out")[2]
    step, _ = bench.training_step(config, ids, CPU, torch.float32, "torch", compiled=False)
    assert [step().item() for _ in range(6)] == pytest.approx(losses(tmp_path / "out"), abs=1e-6)


@pytest.fixture
def small_preset(monkeypatch):
    small = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=4, dropout=0.0)
    monkeypatch.setitem(mdlm.PRESETS, "cpu", small)


def test_training_is_timed_eager_and_compiled(small_preset, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda model, options: model)  # the real one takes 20 s
    path = tmp_path / "train.json"
    assert common.run(bench.main, ["train", "--device=cpu", "--seconds=0", f"--json={path}"]) == 0
    compiled, eager = json.loads(path.read_text())["rows"]  # the figure that counts comes first
    assert eager["contestant"].endswith("eager") and compiled["contestant"].endswith("compiled")
    for row in (eager, compiled):
        assert row["tokens_per_second"] == pytest.approx(64 / row["ms"] * 1e3)  # 4 x 16 tokens
        assert 0 < row["share"] < 1


def test_a_step_that_computes_something_else_gets_no_time(small_preset, monkeypatch, capsys):
    class Wrong(torch.nn.Module):
        def __init__(self, model, options):
            super().__init__()
            self.model = model

        def forward(self, *batch):
            return self.model(*batch) + 0.1

    monkeypatch.setattr(torch, "compile", Wrong)
    assert common.run(bench.main, ["train", "--device=cpu", "--seconds=0"]) == 1
    said = capsys.readouterr()
    assert "WRONG RESULT" in said.err and "0.1 off" in said.err and said.out.count("tokens/s") == 1


# ------------------------------------------------------------------------------------------------------------
# Sampling


def test_quality_of_the_text_itself_and_of_foreign_text():
    words, pairs = {"to", "be", "or"}, frontier.Counter(zip("to be or", "o be or"))
    same = frontier.quality(["to be or"], words, pairs)
    assert same["words"] == 1 and same["divergence"] == pytest.approx(0, abs=1e-12)
    p = [2 / 8, 2 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 8]  # spaces, o, t b e r
    assert same["entropy"] == pytest.approx(-sum(x * math.log(x) for x in p))
    foreign = frontier.quality(["xx yy zz"], words, pairs)
    assert foreign["words"] == 0 and foreign["divergence"] == pytest.approx(math.log(2))
    with pytest.raises(common.Refusal, match=r"two characters.*--block_size"):
        frontier.quality(["t", "o"], words, pairs)


@pytest.fixture(scope="module")
def runs(text_file, tmp_path_factory):
    """A diffusion run and an autoregressive one."""
    out = {}
    for kind in ("mdlm", "ar"):
        out[kind] = tmp_path_factory.mktemp(kind)
        flags = [*TINY, f"--data={text_file}", "--max_steps=3", "--n_layer=1"]
        assert run_mdlm(*flags, f"--objective={kind}", f"--out_dir={out[kind]}") == 0
    return SimpleNamespace(**out)


def test_the_frontier_has_every_order_its_calls_and_pictures(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(frontier, "TEMPERATURES", (1.0, 0.6))
    path = tmp_path / "sample.json"
    flags = [f"--out_dir={runs.mdlm}", f"--ar_dir={runs.ar}", "--num_samples=2", f"--json={path}"]
    assert common.run(bench.main, ["sample", "--device=cpu", *flags]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["order"] for row in rows} == {*frontier.ORDERS, "AR left_to_right"}
    calls = {(row["order"], row["steps"], row["temperature"]): row["calls"] for row in rows}
    assert calls["one_shot", "1", "1.0"] == 1 and calls["AR left_to_right", "32", "1.0"] == 32
    assert (
        calls["confidence", "8", "0.6"] == 8 and calls["ancestral", "32", "1.0"] < 32
    )  # some steps are idle
    assert all(0 <= row["divergence"] <= math.log(2) and row["seconds"] > 0 for row in rows)
    for picture in ("frontier.png", "trajectories.png"):
        assert (runs.mdlm / picture).read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_alone_needs_its_text_and_stays_as_it_is(runs, monkeypatch, tmp_path, capsys):
    """Nothing is downloaded and no other text takes its place; pictures only where they are asked for."""
    monkeypatch.setattr(frontier, "grid", lambda config: [("confidence", 2, 1.0)])
    alone, text = tmp_path / "alone", tmp_path / "text.txt"
    shutil.copytree(runs.mdlm / "step-3", alone)
    monkeypatch.setattr(mdlm, "load", lambda path, device, load=mdlm.load: moved(load(path, device)))
    flags = ["sample", "--device=cpu", f"--out_dir={alone}", "--num_samples=2"]
    assert common.run(bench.main, flags) == 2 and "--data=FILE" in capsys.readouterr().err
    text.write_text("the cat sat on the mat. " * 200)
    before = sorted(alone.iterdir())
    assert common.run(bench.main, [*flags, f"--data={text}"]) == 0
    assert sorted(alone.iterdir()) == before
    assert common.run(bench.main, [*flags, f"--data={text}", f"--pictures={tmp_path}/p"]) == 0
    assert {p.name for p in (tmp_path / "p").iterdir()} == {"frontier.png", "trajectories.png"}


def moved(loaded):
    """A model whose text is no longer where it was."""
    model, tokenizer, config = loaded
    return model, tokenizer, dataclasses.replace(config, data="/nowhere/text.txt")


# ------------------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    "args, words",
    [
        (["kernel"], ["'kernel'", "kernels", "train", "sample"]),
        (["--secnds=1"], ["--secnds", "--seconds"]),
        (["train", "--preset=huge"], ["huge", "gpt2"]),
        (["train", "--device=cpu", "--cuda_graphs"], ["CUDA", "cpu"]),
        (["--device=cuda:77"], ["cuda:77"]),
        (["--json=nowhere/at/all.json"], ["nowhere/at/all.json"]),
        (["sample", "--out_dir=nowhere"], ["nowhere"]),
        (["--seconds=-1"], ["seconds"]),
        (["--preset=gpu", "train"], ["first", "bench.py train --preset=gpu"]),
        (["sample", "--out_dir={runs.mdlm}", "--data=missing.txt"], ["missing.txt", "text file"]),
        (["sample", "--out_dir={runs.mdlm}", "--pictures={runs.mdlm}/log.jsonl/p"], ["--pictures", "none"]),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(args, words, runs, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert common.run(bench.main, [a.format(runs=runs) for a in args]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said


def test_an_autoregressive_run_is_no_diffusion_run(runs, capsys):
    assert common.run(bench.main, ["sample", f"--out_dir={runs.ar}"]) == 2
    assert "--out_dir" in capsys.readouterr().err
    assert common.run(bench.main, ["sample", f"--out_dir={runs.mdlm}", f"--ar_dir={runs.mdlm}"]) == 2
    assert "--ar_dir" in capsys.readouterr().err
