"""bench.py counts right, times nothing that is wrong, and says what it could not measure."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, losses, run_mdlm, tiers
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import bench
import mdlm
from nanomdlm.kernels import operations as kernels
from nanomdlm.support.cli import entry
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import word_statistics
from nanomdlm.support.run import plots

CPU = torch.device("cpu")


# ---- Counts


def test_attention_cost_is_that_of_sdpa():
    q = (2, 3, 8, 4)  # B, H, T, D
    forward, both = bench.attention(CPU, torch.bfloat16, 2, 8, 3, 4).cost.values()
    assert forward[0] == sdpa_flop_count(q, q, q) == 2 * (2 * 8 * 8 * 4) * 6
    assert both[0] == forward[0] + sdpa_backward_flop_count(q, q, q, q)
    one = 2 * 8 * 3 * 4 * 2  # bytes of q
    assert forward[1] == 4 * one  # q k v, O
    assert both[1] == 12 * one  # ... q k v O dO, dq dk dv
    blocks = bench.attention(CPU, torch.bfloat16, 2, 8, 3, 4, S=2).cost["forward"]
    # Of 4 tokens in 2 blocks: masked text and text see 2, 2, 4 and 4 tokens.
    assert blocks == (forward[0] * 2 * 12 // 64, forward[1])


def test_head_cost_is_that_of_its_products():
    M, C, V = 12, 5, 7
    h = torch.randn(M, C, requires_grad=True)
    W = torch.randn(V, C, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        loss = F.cross_entropy(F.linear(h, W), torch.zeros(M, dtype=torch.int64))
        loss.backward()
    ((flops, n_bytes),) = bench.head(CPU, torch.bfloat16, M, C, V).cost.values()
    assert flops == counter.get_total_flops()
    assert n_bytes == 2 * 2 * (12 * 5 + 7 * 5)  # h, W; dh, dW


def test_contestants_take_turns(monkeypatch):
    turns = []
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def contestant(name, seconds):
        def call():
            turns.append(name)
            now[0] += next(seconds)

        return call

    slow = iter([1.0] * 4 + [2.0, 3.0, 100.0])  # warm-up, then three rounds
    calls = {"a": contestant("a", slow), "b": contestant("b", iter([5.0] * 7))}
    times = bench.race(calls, CPU, seconds=0, shortest=0)
    assert turns[-6:] == ["a", "b"] * 3
    assert times["a"] == (3.0, (51.5 - 2.5) / 2)  # the median of all rounds
    assert times["b"] == (5.0, 0.0)


def rows_of(**ms):
    """Rows of the head and of a step: contestant -> milliseconds."""
    where = dict(operation="head", shape="M=1", what="forward")
    both = where | dict(what="forward + backward")
    other = both | dict(shape="M=2")
    rows = [where | dict(contestant=name, ms=9.0) for name in ms]
    rows += [both | dict(contestant=name, ms=t, spread=0.0) for name, t in ms.items()]
    rows += [other | dict(contestant=name, ms=9.0) for name in ms]
    step = dict(operation="training step", shape="V=65", what="gpu")
    contestants = {"--kernels=auto, compiled": 2.0, "--kernels=torch, compiled": 3.0}
    return rows + [step | dict(contestant=name, ms=t) for name, t in contestants.items()]


def test_against_an_older_file(tmp_path, capsys):
    """Rows of the same place are compared; those that became slower are named."""
    old = tmp_path / "old.json"
    old.write_text(json.dumps(dict(rows=rows_of(mdlm=2.0, peer=2.0), hardware="an abacus")))
    table = bench.ResultsTable("kernels", bench.Options(against=str(old)), CPU)
    both = [row for row in rows_of(mdlm=2.5, peer=1.0) if "spread" in row]
    table.add(*both)
    assert [row["vs_old"] for row in table.content["rows"]] == [0.8, 2.0]
    assert table.close() == 0
    said = capsys.readouterr().out
    assert "slower by more than 5%: head, M=1, forward + backward, mdlm 0.80x\n" in said
    assert "other hardware, an abacus" in said
    old.write_text("[1]")
    with pytest.raises(UserError, match=r"--against=.*old\.json"):
        bench.read_times(str(old))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows has no such signal")
def test_the_time_limit_cuts_off_what_compiles(small_preset, monkeypatch, tmp_path):
    """What comes after it is still timed."""

    def compile_forever(model, options):
        time.sleep(600)

    monkeypatch.setattr(torch, "compile", compile_forever)
    monkeypatch.setattr(bench, "EAGER_SHARE", 0.999)  # so it is cut off at once
    path = tmp_path / "train.json"
    flags = ["train", "--device=cpu", "--seconds=0", "--time_limit=300", f"--json={path}"]
    began = time.monotonic()
    assert entry.run(bench.main, flags) == 0
    assert time.monotonic() - began < 300
    compiled, eager = json.loads(path.read_text())["rows"]
    assert compiled["trouble"] == bench.LATE and compiled["contestant"].endswith("compiled")
    assert eager["ms"] > 0 and eager["contestant"].endswith("eager")


def test_json_has_no_infinity(tmp_path):
    path = str(tmp_path / "file")
    table = bench.ResultsTable("sample", bench.Options(json=path), CPU)
    table.add(dict(sampler="default", calls=1, twin=math.nan, twin_se=math.inf))
    assert table.close() == 0
    text = (tmp_path / "file").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text)["rows"][0] == dict(sampler="default", calls=1, twin=None, twin_se=None)


# ---- Kernels

GPU_ONLY = {"SDPA CUDNN", "SDPA EFFICIENT", "FlexAttention", "FlexAttention, v copied"}


def tiny_cases(device):
    """Without CUDA graphs and contestants that a CPU has not."""
    for case in (
        bench.masking(device, 4, 16),
        bench.head(device, torch.float32, 64, 8, 11),
        bench.attention(device, torch.bfloat16, 2, 16, 2, 32),
    ):
        case = dataclasses.replace(case, graph=False)
        for name in GPU_ONLY & case.contestants.keys():
            del case.contestants[name]
        yield partial(dataclasses.replace, case)


def measure_kernels(argv):
    """bench.py kernels, which is refused on a CPU."""
    given = dict(word.removeprefix("--").split("=") for word in argv)
    options = bench.Options(json=given.pop("json"), **{k: float(v) for k, v in given.items()})
    table = bench.ResultsTable("kernels", options, CPU)
    bench.bench_kernels(options, CPU, table)
    return table.close()


@pytest.fixture
def no_compiler(monkeypatch):
    """Compiling would take its time."""
    monkeypatch.setattr(bench, "compile_fixed", lambda f, mode="": f)


@pytest.fixture
def tiny(no_compiler, monkeypatch, tmp_path):
    """Run bench.py kernels on tiny cases: (exit code, the JSON)."""
    monkeypatch.setattr(bench, "kernel_cases", tiny_cases)
    monkeypatch.setattr(bench, "head_peers", lambda: [])
    monkeypatch.setattr(bench, "race", few_turns)
    path = tmp_path / "bench.json"

    def run():
        code = entry.run(measure_kernels, ["--seconds=0", f"--json={path}"])
        return code, json.loads(path.read_text())

    return run


def few_turns(calls, device, seconds, shortest=0, race=bench.race):
    return race(calls, device, seconds, shortest=0)


@pytest.fixture
def with_peer(monkeypatch):
    """Add contestants to the case of the head: a function of those that are there."""

    def add(more):
        def head(*args, original=bench.head):
            case = original(*args)
            case.contestants |= more(case.contestants)
            return case

        monkeypatch.setattr(bench, "head", head)

    return add


def test_every_contestant_is_timed(tiny):
    code, results = tiny()
    assert code == 0
    assert results["versions"]["torch"] == torch.__version__
    assert results["hardware"]
    assert len(results["rows"]) == 3 + 3 + 2 * 4  # masking has no backward, the head both
    for row in results["rows"]:
        assert row["ms"] > 0 and row["spread"] >= 0
        assert row["vs_eager"] > 0 and row["vs_compiled"] > 0
        assert row["error"] == 0 if row["operation"] == "masking" else 0 <= row["error"] < 8e-3
        assert row["share"] > 0 and row["host_us"] > 0


def off_by_three_percent(f):
    return lambda *args: 1.03 * f(*args)


def wrong_gradient(f):
    return lambda h, *args: f(h.detach() + 0 * h, *args)  # the loss is right, dh is 0


def not_a_number(f):
    return lambda *args: f(*args) * math.nan


@pytest.mark.parametrize("spoil", [off_by_three_percent, wrong_gradient, not_a_number])
def test_wrong_result_fails_and_has_no_time(tiny, monkeypatch, capsys, spoil):
    monkeypatch.setattr(kernels, "linear_cross_entropy", spoil(kernels.linear_cross_entropy))
    code, results = tiny()
    said = capsys.readouterr().err
    assert code == 1
    assert "WRONG RESULT" in said and "head + loss" in said and "mdlm" in said
    rows = results["rows"]
    wrong = [row for row in rows if row["contestant"] == "mdlm" and "trouble" in row]
    assert wrong and all(row["operation"] == "head + loss" and "ms" not in row for row in wrong)
    assert [row for row in rows if row["operation"] == "attention" and "ms" in row]


def test_wrong_masks_fail(tiny, monkeypatch, capsys):
    right = kernels.mask_tokens

    def one_less(x0, level, *more):
        return right(x0, (level - 1).clamp(min=0), *more)

    monkeypatch.setattr(kernels, "mask_tokens", one_less)
    assert tiny()[0] == 1
    assert "masking" in capsys.readouterr().err


def test_failing_peer_has_a_line(tiny, with_peer):
    def broken(*args):
        raise RuntimeError("no such kernel\nand a long trace")

    with_peer(lambda contestants: {"a peer": broken})
    code, results = tiny()
    assert code == 0
    lines = [row["trouble"] for row in results["rows"] if row["contestant"] == "a peer"]
    assert lines == ["RuntimeError: no such kernel"]


@pytest.mark.parametrize("name, code", [("a peer", 0), ("PyTorch eager", 1)])
def test_wrong_yardstick_fails_not_a_peer(tiny, with_peer, capsys, name, code):
    def spoiled(contestants):
        right = contestants["mdlm"]
        return {name: lambda *args: tuple(1.1 * r for r in right(*args))}

    with_peer(spoiled)
    found, results = tiny()
    assert found == code
    assert (f"{name}: WRONG RESULT" in capsys.readouterr().err) == bool(code)
    wrong = [row for row in results["rows"] if "trouble" in row]
    assert [row["contestant"] for row in wrong] == [name]
    assert all(row["trouble"].startswith("WRONG RESULT") and "ms" not in row for row in wrong)


@pytest.mark.parametrize("backward", [False, True])
def test_contestants_of_a_gpu_are_right(no_compiler, backward):
    """As far as a CPU has them; those that it lacks are named."""
    checked = set()
    for case in (
        bench.masking(CPU, 4, 16),
        bench.head(CPU, torch.float32, 64, 8, 11),
        bench.attention(CPU, torch.float32, 2, 16, 2, 32),
        bench.attention(CPU, torch.float32, 2, 16, 2, 32, S=4),
        bench.attention(CPU, torch.float32, 2, 16, 2, 32, prepares=True),
        bench.norm_conv(CPU, torch.float32, 2, 16, 32),
    ):
        exact = case.exact(*case.inputs(0))
        names = case.contestants.keys() - GPU_ONLY
        if case.name == "masking" and backward:
            continue
        for name in names:
            if case.contestants[name] is None:  # a package that is not installed
                continue
            with torch.set_grad_enabled(backward):
                bench.check(case, name, backward, exact)  # raises if it is wrong
            checked.add((case.name, name))
    assert {("attention", "SDPA FLASH"), ("head + loss", "PyTorch eager")} <= checked
    ours = {case for case, name in checked if name == "mdlm"}
    assert ours >= {"attention", "attention with norm and rotation", "norm and convolution"}


@pytest.mark.parametrize("settings", [dict(S=4), dict(prepares=True)])
def test_flex_attention_sees_the_same(no_compiler, settings):
    case = bench.attention(CPU, torch.float32, 2, 16, 2, 32, **settings)
    exact = case.exact(*case.inputs(0))
    inputs = [x.detach() for x in case.inputs(0)]  # no backward on a CPU
    for name in ("FlexAttention", "FlexAttention, v copied"):
        bench.check_close(case.contestants[name](False, *inputs), exact[:1], 1e-4)


# ---- Training


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ids")
    for name in ("train.bin", "val.bin"):
        np.random.default_rng(0).integers(20, size=4000, dtype=np.uint16).tofile(folder / name)
    return folder


def test_timed_step_is_that_of_training(ids, tmp_path):
    flags = [*TINY, f"--data={ids}", "--gradient_accumulation_steps=2", "--ema=0.9"]
    flags += ["--rate_margin=0", "--warmup_steps=0", "--lr_schedule=constant", "--max_steps=6"]
    assert run_mdlm(*flags, f"--out_dir={tmp_path / 'out'}") == 0
    config = mdlm.load(tmp_path / "out")[2]
    run = bench.start_run(config, ids, CPU, torch.float32, "torch", compiled=False)
    found = [run.loss for _, _ in zip(range(6), bench.steps_of(run))]
    assert found == pytest.approx(losses(tmp_path / "out"), abs=1e-6)


@pytest.fixture
def small_preset(monkeypatch):
    small = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=4, dropout=0.0)
    monkeypatch.setitem(mdlm.PRESETS, "cpu", small)
    monkeypatch.setattr(bench, "race", few_turns)


def test_training_is_timed_eager_and_compiled(small_preset, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda model, options: model)
    path = tmp_path / "train.json"
    assert entry.run(bench.main, ["train", "--device=cpu", "--seconds=0", f"--json={path}"]) == 0
    compiled, eager = json.loads(path.read_text())["rows"]  # the figure that counts comes first
    assert eager["contestant"].endswith("eager")
    assert compiled["contestant"].endswith("compiled")
    for row in (eager, compiled):
        assert row["tokens_per_second"] == pytest.approx(64 / row["ms"] * 1e3)  # 4 x 16 tokens
        assert row["share"] is None  # the peak of a CPU is not known


def test_generation_is_timed_by_call(small_preset, monkeypatch, tmp_path):
    monkeypatch.setattr(
        bench,
        "race",
        lambda calls, device, seconds: {
            name: (bench.clock(call, 1, device), 0.0) for name, call in calls.items()
        },
    )
    monkeypatch.setattr(bench, "race_writers", partial(bench.race_writers, block=8))
    path = tmp_path / "generate.json"
    assert entry.run(bench.main, ["generate", "--device=cpu", f"--json={path}"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["contestant"] for row in rows} == {"eager, float32"}
    assert [row["shape"] for row in rows] == ["batch 1", "batch 8"] * 2
    assert {row["what"] for row in rows} == {"cpu", "cpu, blocks of 8"}
    for row, B in zip(rows, (1, 8, 1, 8)):
        assert row["calls"] == 32
        seconds = row["ms"] * row["calls"] / 1e3
        assert row["tokens_per_second"] == pytest.approx(16 * B / seconds)


@pytest.mark.slow
def test_compiled_gradients_are_within_tolerance(small_preset, ids):
    config = mdlm.Config(**mdlm.PRESETS["cpu"] | dict(vocab_size=20))
    exact = bench.gradients(config, ids, CPU, torch.float32, "torch", False)
    for dtype in (torch.float32, torch.bfloat16):
        found = bench.gradients(config, ids, CPU, dtype, "torch", dtype == torch.float32)
        bench.check_close(found, exact, bench.STEP_TOLERANCE[dtype])


class Scaled(torch.autograd.Function):
    """x, whose gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@pytest.mark.parametrize("wrong", ["loss", "dq", "dk", "dv"])
def test_wrong_step_has_no_time(small_preset, monkeypatch, capsys, wrong):
    """Attention's gradients too, though what follows it starts at zero."""

    def spoil(run, compiled):
        model = run.model
        if compiled and wrong == "loss":
            run.engine.network = lambda *batch: 1.1 * model(*batch).detach() + 0 * model(*batch)
        elif compiled:
            factor = torch.ones(3, 1, 1)
            factor["qkv".index(wrong[1])] = 1.5
            right = model.ops.attention

            def attention(qkv, *more, **options):
                return right(Scaled.apply(qkv, factor), *more, **options)

            model.ops = SimpleNamespace(**vars(model.ops) | dict(attention=attention))

    monkeypatch.setattr(bench.compiling, "compile_network", spoil)
    assert entry.run(bench.main, ["train", "--device=cpu", "--seconds=0"]) == 1
    said = capsys.readouterr()
    assert "compiled: WRONG RESULT, relative error" in said.err
    assert said.out.count("tokens/s") == 1  # of the eager step


# ---- Sampling


def test_judge_counts_words_and_characters():
    statistics = word_statistics.WordStatistics("to be or not to be")
    found = statistics(["x to be or x", "x to be no x"])
    assert found["words"] == 5 / 6 and found["distinct"] == 4 / 6
    assert found["words_se"] == pytest.approx((0.5**2 + 0.5**2) ** 0.5 / 6)
    long = word_statistics.WordStatistics("there be three", shortest=5)
    assert long(["x to there be thare x"])["words"] == 1 / 2
    many = ["x one two x"] * word_statistics.GROUP + ["x one one x"] * word_statistics.GROUP
    assert word_statistics.distinct(many) == (2 / 32 + 1 / 32) / 2  # the mean over groups


@pytest.fixture(scope="module")
def runs(short_run, tmp_path_factory):
    """Folders of a diffusion run and of an autoregressive one on the same text."""
    ar = tmp_path_factory.mktemp("ar")
    flags = [*TINY, "--max_steps=1", "--n_layer=1", "--eval_windows=2", "--objective=ar"]
    assert run_mdlm(*flags, f"--data={short_run.parent / 'text.txt'}", f"--out_dir={ar}") == 0
    return SimpleNamespace(mdlm=shutil.copytree(short_run, ar / "mdlm"), ar=ar)


def test_frontier_has_every_sampler(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "CALLS", (8, 16))
    path = tmp_path / "sample.json"
    flags = [f"--out_dir={runs.mdlm}", f"--ar_dir={runs.ar}", "--num_samples=2", f"--json={path}"]
    picture = tmp_path / "sample.svg"
    command = ["sample", "--device=cpu", *flags, f"--picture={picture}"]
    assert entry.run(bench.main, command) == 0
    before = picture.read_bytes()
    assert before.rstrip().endswith(b"</svg>")
    assert entry.run(bench.main, [*command, "--time_limit=1e-9"]) == 2, "nothing to draw"
    assert picture.read_bytes() == before
    assert entry.run(bench.main, command) == 0
    rows = json.loads(path.read_text())["rows"]
    names = {*bench.SAMPLERS, "AR twin", "real text"}
    assert {row["sampler"] for row in rows} == names
    calls = {row["sampler"]: row["calls"] for row in rows}
    assert calls["AR twin"] == 32 and calls["confidence"] == 16
    for row in rows[1:]:
        assert len(row["by_seed"]) == 2 and row["seconds"] > 0
        assert row["twin"] == pytest.approx(sum(seed["twin"] for seed in row["by_seed"]) / 2)
        assert row["expected"] > 0 and 0 <= row["told"] <= 1
    unknown = [row | dict(words=None, words_se=None) for row in rows]  # no word was counted
    plots.plot_frontier(unknown, picture)
    assert b"known words" in before and b"known words" not in picture.read_bytes()


def test_a_classifier_tells_what_differs_and_nothing_else():
    """Texts of one Markov chain, of another one, and of the same again."""
    g = torch.Generator().manual_seed(0)

    def texts(n, p):
        x = torch.randint(20, (n, 256), generator=g)
        for i in range(1, 256):  # with probability p the letter after the one before
            follows = torch.rand(n, generator=g) < p
            x[:, i] = torch.where(follows, (x[:, i - 1] + 1) % 20, x[:, i])
        return x

    same, error = bench.tell_apart(texts(150, 0.2), texts(150, 0.2))
    assert abs(same - 0.5) < 4 * error
    other, _ = bench.tell_apart(texts(150, 0.2), texts(150, 0.35))
    assert other > 0.9


# ---- Studies
REHEARSED = [
    ("newton_schulz.py", "singular values"),
    ("residual.py", ""),
    ("relu2.py", "8 warps"),
    ("gpu.py generate", "Llama, 2 x 32"),
    ("gpu.py repeat", "equal to the bit: True"),
]


@pytest.mark.parametrize("program, said", tiers(REHEARSED, slow=REHEARSED[:4]))
def test_what_a_gpu_is_asked_runs_without_one(program, said):
    """A rehearsal: the prototypes in the emulator, the studies on a CPU with tiny sizes."""
    command = [sys.executable, *f"studies/{program}".split()]
    env = os.environ | dict(MDLM_TRITON="1")
    r = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert r.returncode == 0 and said in r.stdout, r.stdout + r.stderr
    assert "WRONG" not in r.stdout
