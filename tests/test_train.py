"""Runs of mdlm.py from end to end: they learn, stop, resume and refuse."""

import dataclasses
import functools
import json
import math
import shlex
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    CHECKPOINT_FILES,
    CPU,
    ROOT,
    TINY,
    corpus_of,
    losses,
    read_log,
    run_mdlm,
    saved,
    sign,
    tiny_flags,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mdlm
import sample
from nanomdlm.support import errors, numerics, view
from nanomdlm.support.cli import entry
from nanomdlm.support.run import checkpoint, optimizers, session
from nanomdlm.support.run.clock import Clock


def snapshot(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*")}


@pytest.fixture
def clock(monkeypatch):
    """Replaces time.monotonic: clock.now seconds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


# --------------------------------------------------------------------------------------------------
# What a run leaves


def test_run_leaves_log_picture_and_checkpoints(trained):
    names = {p.name for p in trained.iterdir()}
    kept = {".mdlm-run", "data", "latest", "log.jsonl", "loss.png", "step-60", "step-90"}
    assert names == kept, "the last two are kept, nothing is left over"
    assert (trained / "latest").read_text() == "step-90"
    files = {p.name for p in (trained / "step-90").iterdir()}
    assert files == {*CHECKPOINT_FILES, "manifest.json"}
    evaluations = [r for r in read_log(trained) if "val_nelbo" in r]
    assert [r["step"] for r in evaluations] == [0, 30, 60, 90]
    fields = {"step", "tokens", "seconds", "val_nelbo", "val_nelbo_se", "val_nelbo_raw", "val_bpc"}
    assert all(fields <= r.keys() for r in evaluations)
    assert evaluations[-1]["tokens"] == 90 * 8 * 32
    steps = [r for r in read_log(trained) if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 91))
    fields = {"step", "tokens", "seconds", "loss", "grad_norm", "lr_scale", "tokens_per_second"}
    fields.add("rate_margin")
    assert all(fields == r.keys() for r in steps), "a CPU has no mfu"
    margins = [r["rate_margin"] for r in steps]
    assert margins[:46] == [0.5] * 46, "half of the run"
    assert margins[46:] == pytest.approx([0.5 * (2 - 2 * k / 90) for k in range(46, 90)])


def test_run_learns(trained):
    _, tokenizer, _ = mdlm.load(trained)
    first, *_, last = [r["val_nelbo"] for r in read_log(trained) if "val_nelbo" in r]
    assert first == pytest.approx(math.log(tokenizer.vocab_size), abs=1e-3)
    assert last < first - 1.0


def test_logged_value_is_of_saved_weights(trained, pydoc):
    model, tokenizer, config = mdlm.load(trained)
    windows = corpus_of(trained / "data", config, CPU).windows(32)
    validation = pydoc[int(0.9 * len(pydoc)) :]
    assert all(tokenizer.decode(window.tolist()) in validation for window in windows)
    value = mdlm.evaluate(model, windows, passes=4)["nelbo"]
    logged = read_log(trained)[-1]
    assert value == pytest.approx(logged["val_nelbo"], abs=1e-5)
    assert abs(logged["val_nelbo_raw"] - value) > 1e-3, "the averaged weights, not the raw ones"
    characters = sum(len(tokenizer.decode(window.tolist())) for window in windows)
    bits = value / math.log(2) * windows.numel() / characters
    assert logged["val_bpc"] == pytest.approx(bits, rel=1e-4)


def test_loaded_model_has_the_promised_interface(trained):
    model, tokenizer, config = mdlm.load(trained)
    xt = torch.full((2, config.block_size), model.mask_id)
    assert model(xt).shape == (2, 32, tokenizer.vocab_size)
    assert model(xt).dtype == torch.float32
    assert model.mask_id == tokenizer.vocab_size
    assert not model.training
    assert tokenizer.decode(tokenizer.encode("keyword")) == "keyword"


def test_bfloat16_evaluates_the_averaged_weights(text_file, tmp_path):
    # autocast keeps bfloat16 copies of weights: these must not be those of the raw model
    flags = ["--dtype=bfloat16", "--ema=0.99", "--max_steps=30", "--lr_schedule=constant"]
    out = tmp_path / "out"
    assert run_mdlm(f"--data={text_file}", *tiny_flags(*flags), f"--out_dir={out}") == 0
    logged = read_log(out)[-1]
    model, _, config = mdlm.load(out)
    windows = corpus_of(out / "data", config, CPU).windows(32)
    with torch.autocast("cpu", torch.bfloat16):
        again = mdlm.evaluate(model, windows, passes=4)["nelbo"]
    assert again == pytest.approx(logged["val_nelbo"], abs=1e-4)
    assert abs(logged["val_nelbo"] - logged["val_nelbo_raw"]) > 1e-3, "raw and averaged differ here"


@pytest.mark.parametrize(
    "more",
    [
        ["--data=patterns", "--block_size=64"],
        ["--separator=\\n\\n", "--tie", "--pos=learned"],
        ["--time_conditioning", "--pos=sinusoidal", "--conv=0"],
        ["--tokenizer=bpe", "--vocab_size=400", "--objective=ar"],
    ],
)
def test_every_kind_of_run_learns(text_file, tmp_path, more):
    data = [] if "--data=patterns" in more else [f"--data={text_file}"]
    steps = 120 if "--data=patterns" in more else 25  # patterns have no simple statistic
    flags = [*data, *tiny_flags(*more), f"--max_steps={steps}", f"--out_dir={tmp_path / 'out'}"]
    assert run_mdlm(*flags) == 0
    key = "val_nll" if "--objective=ar" in more else "val_nelbo"
    log = read_log(tmp_path / "out")
    assert log[-1][key] < log[0][key] - 0.3
    mdlm.load(tmp_path / "out")


def test_last_line_is_a_command_that_works(text_file, tmp_path, capsys):
    out = tmp_path / "my run"
    assert run_mdlm(f"--data={text_file}", *TINY, "--max_steps=1", f"--out_dir={out}") == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert f"--out_dir={out}" in command
    assert entry.run(sample.main, command[command.index("sample.py") + 1 :]) == 0


# --------------------------------------------------------------------------------------------------
# Steps


def make_run(folder, **more):
    """A Run with fresh weights on the data of a run."""
    settings = dict(n_layer=1, n_head=2, n_embd=32, block_size=32, batch_size=8, dropout=0.0)
    config = mdlm.Config(**settings | dict(warmup_steps=0) | more)
    ops = mdlm.devices.select_kernels("torch", CPU, config)
    corpus = corpus_of(folder / "data", config, CPU)
    return mdlm.make_run(config, corpus, mdlm.devices.Machine(CPU, torch.float32, ops))


def copies(model):
    return [p.detach().clone() for p in model.parameters()]


def test_averaged_weights_are_a_second_model(trained):
    run = make_run(trained, ema=0.5, lr_schedule="linear")
    assert run.averaged is not run.model
    assert not run.averaged.training
    before = copies(run.averaged)
    mdlm.train_step(run, step=20, progress=0.25)  # the decay: min(ema, 21 / 30), shortened by 0.75
    for old, new, mean in zip(before, copies(run.model), copies(run.averaged), strict=True):
        torch.testing.assert_close(mean, old.lerp(new, 0.5 / 0.75))
    assert any(not torch.equal(p, q) for p, q in zip(before, copies(run.model), strict=True))


def test_accumulation_changes_no_gradient(trained):
    gradients = {}
    for parts in (1, 4):
        run = make_run(trained, gradient_accumulation_steps=parts)
        for p in run.model.parameters():
            torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
        loss = mdlm.compute_gradients(run, 3, 0.0)
        gradients[parts] = [loss, *(p.grad for p in run.model.parameters())]
    torch.testing.assert_close(gradients[1], gradients[4], rtol=1e-4, atol=1e-6)


class Watched(TorchDispatchMode):
    """Writes down every operation with its Python numbers and shapes; one that reads fails."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reads = ("aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh")
        assert func.name() not in reads, "the host reads, or makes a tensor of its number"
        leaves = tree_leaves((args, kwargs or {}))
        if func.name() == "aten::index.Tensor":
            assert all(x.dtype != torch.bool for x in leaves[1:]), "the host counts"
        shapes = [x.shape for x in leaves if isinstance(x, torch.Tensor)]
        numbers = [x for x in leaves if isinstance(x, (bool, int, float))]
        self.seen.append((func.name(), shapes, numbers))
        return func(*args, **(kwargs or {}))


VARIANTS = {
    "dropout": ["--dropout=0.5", "--ema=0", "--attention_every=2"],
    "ar": ["--objective=ar", "--pos=learned", "--conv=0"],
    "time": ["--time_conditioning", "--tie"],
    "rates": ["--rates=cosine", "--loss_weight=uniform", "--optimizer=adamw"],
    "predicted": ["--separator=\\n\\n", "--document_length=predicted"],
    "blocks, whole": ["--block_length=4", "--infill_share=0.5"],
    "prompts in blocks": ["--prompt_column=q", "--block_length=4"],
}


def does_not_vary(folder, monkeypatch):
    """Whether a run's steps do the same on the device, but for its tensors; and what it says."""
    config = mdlm.run_config.read(mdlm.Config, checkpoint.find_checkpoint(folder))
    config = dataclasses.replace(config, warmup_steps=3, lr_schedule="linear")
    monkeypatch.setattr("nanomdlm.support.run.optimizers.is_async", lambda device: True)
    monkeypatch.setattr(mdlm.devices, "to_device", lambda x, device: x)
    for module in ("documents", "rates"):
        masked_rows = functools.partial(view.masked_rows, waits=False)
        monkeypatch.setattr(f"nanomdlm.variants.{module}.masked_rows", masked_rows)
    ops = mdlm.devices.select_kernels("torch", CPU, config)
    corpus = corpus_of(folder / "data", config, CPU)
    run = mdlm.make_run(config, corpus, mdlm.devices.Machine(CPU, torch.float32, ops))
    draw_batch = mdlm.draw_batch
    seen = []
    for step in range(4):
        mdlm.set_rates(run, step, mdlm.lr_scale(run.config, step, step / 5))
        drawn = draw_batch(run, step, 1.0 - step / 4, torch.arange(run.micro_batch))
        monkeypatch.setattr(mdlm, "draw_batch", lambda *args, drawn=drawn: drawn)
        with Watched() as watched:
            mdlm.compute_gradients(run, step, 1.0 - step / 4)
            mdlm.clip(run)
            mdlm.update(run)
        states = [s for o in run.optimizers for s in (*o.state.values(), *o.param_groups)]
        kept = [x.data_ptr() for x in tree_leaves(states) if isinstance(x, torch.Tensor)]
        seen.append((watched.seen, kept, run.engine.ema_weight.data_ptr()))
    assert seen[2][0]
    # The first step makes the optimizers' state.
    return seen[2] == seen[3], run.objective.steps_are_alike


@pytest.mark.parametrize("name", VARIANTS)
def test_device_does_the_same_in_every_step(name, text_file, tmp_path, monkeypatch):
    """Else one CUDA graph could not be all steps: nothing is read, no Python number changes."""
    flags = VARIANTS[name]
    data = text_file
    if any("prompt" in flag for flag in flags):
        data = tmp_path / "qa.jsonl"
        pairs = [dict(q="q" * (i % 5 + 1), text="a" * (i % 7 + 1)) for i in range(400)]
        data.write_text("\n".join(map(json.dumps, pairs)))
    folder = tmp_path / "run"
    argv = [*tiny_flags(*flags), f"--data={data}", "--max_steps=1", f"--out_dir={folder}"]
    assert run_mdlm(*argv) == 0
    assert does_not_vary(folder, monkeypatch) == (("whole" not in name,) * 2)


@pytest.mark.parametrize("where", ["weights", "average", "moment"])
def test_weights_not_finite_are_not_saved(trained, tmp_path, where):
    run = make_run(trained, out_dir=str(tmp_path))
    run.clock = Clock(run.config, 0.0)
    mdlm.train_step(run, 0, 0.0)
    run.check_finite()
    spoiled = dict(weights=run.model.embed.weight, average=run.averaged.embed.weight)
    moments = run.optimizers[1].state[run.model.embed.weight]
    (spoiled | dict(moment=moments["exp_avg"]))[where].data[0, 0] = math.nan
    with pytest.raises(errors.UserError, match="step 0"):
        session.Session(run.config, None, {}, SimpleNamespace(rank=0), 0.0).save(run)
    assert not list(tmp_path.iterdir())


def test_learning_rate_warms_up_then_decays(trained):
    config = mdlm.Config(warmup_steps=9)
    for schedule, values in dict(
        trapezoid=(1, 1, 0.5, 0),
        linear=(1, 0.5, 0.25, 0),
        constant=(1, 1, 1, 1),
        cosine=(1, 0.5, 0.1464, 0),
    ).items():
        config.lr_schedule = schedule
        found = [mdlm.lr_scale(config, 1000, progress) for progress in (0, 0.5, 0.75, 1)]
        assert found == pytest.approx(values, abs=1e-4)
        assert [mdlm.lr_scale(config, step, 0) for step in (0, 4, 9)] == pytest.approx(
            [0.1, 0.5, 1]
        )
    run = make_run(trained, lr_schedule="linear", learning_rate=0.1, muon_lr=0.4)
    mdlm.train_step(run, 0, 0.75)
    assert [o.param_groups[0]["lr"].item() for o in run.optimizers] == pytest.approx([0.1, 0.025])


def test_large_gradients_are_clipped_small_ones_untouched():
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(n, 8)) for n in (3, 40, 5)]
    for size, limit in ((100.0, 1.0), (1e-3, 1.0), (100.0, 0.0)):
        before = [
            size * torch.randn(p.shape, generator=g) for p in params[:2]
        ]  # the third has none
        for p, x in zip(params, before, strict=False):
            p.grad = x.clone()
        norm = optimizers.clip_gradients(params, limit).item()
        wanted = torch.cat([x.flatten() for x in before]).norm().item()
        assert norm == pytest.approx(wanted, rel=1e-5)
        after = torch.cat([p.grad.flatten() for p in params[:2]]).norm().item()
        if limit and wanted > limit:
            assert after == pytest.approx(limit, rel=1e-4)
        else:
            assert all(torch.equal(p.grad, x) for p, x in zip(params, before, strict=False))


# --------------------------------------------------------------------------------------------------
# Time and compilation


@pytest.fixture
def slow(monkeypatch, clock):
    """slow(data=..., call=..., first=...): seconds on the clock for preparing the data, for each
    network call, and more for the first one."""

    def begin(data=0.0, call=0.0, first=0.0):
        prepare = session.prepare
        features = mdlm.Model.features
        extra = [first]

        def slow_prepare(*args):
            clock.now += data
            prepare(*args)

        def slow_features(*args):
            clock.now += call + (extra.pop() if extra else 0)
            return features(*args)

        monkeypatch.setattr(session, "prepare", slow_prepare)
        monkeypatch.setattr(mdlm.Model, "features", slow_features)

    return begin


def run_for_100_seconds(text_file, out, *more):
    """The exit code and log of a tiny run with --time_limit=100: batches of 8, 32 windows."""
    code = run_mdlm(f"--data={text_file}", *TINY, "--time_limit=100", f"--out_dir={out}", *more)
    return code, read_log(out)


def test_time_limit_covers_everything(text_file, tmp_path, clock, slow):
    slow(call=0.25)
    code, log = run_for_100_seconds(text_file, tmp_path / "out", "--eval_interval=0")
    assert code == 0
    assert 90 < log[-1]["seconds"] <= clock.now <= 100
    scored = [r.get("windows") for r in log if "val_nelbo" in r][1:]
    assert len(scored) in range(2, 11) and scored.pop() is None, "all of them at the end"
    assert [r["lr_scale"] for r in log if "lr_scale" in r][-1] < 0.1


@pytest.mark.parametrize("call, interval, steps", [(2, 10, 20), (7, 1000, 9)])
def test_slow_evaluation_never_breaks_the_limit(
    text_file, tmp_path, clock, slow, call, interval, steps
):
    # Four masks for each of 32 windows and one with the raw weights would take 20 calls.
    slow(call=call)
    out = tmp_path / "out"
    code, log = run_for_100_seconds(text_file, out, f"--eval_interval={interval}")
    assert code == 0
    assert clock.now <= 100 + call + 4 * call + 2, "a step, a batch with its four masks, 2 s"
    assert log[-1]["step"] >= steps, "most of the time is for training"
    assert log[-1]["windows"] in (8, 16, 24)
    assert math.isfinite(log[-1]["val_nelbo"])


@pytest.mark.parametrize(
    "seconds, taken",
    [
        (dict(data=150), 150),
        (dict(first=130, call=1), 132),
    ],
)
def test_run_without_a_step_is_no_success(text_file, tmp_path, capsys, slow, seconds, taken):
    slow(**seconds)
    code, log = run_for_100_seconds(text_file, tmp_path / "out")
    assert code == 2
    assert len(log) == 1 and log[0]["step"] == 0
    assert not checkpoint.checkpoints(tmp_path / "out")
    said = capsys.readouterr().err
    assert "--time_limit=100" in said and f"{taken} s" in said


def check_compiled_run(text_file, tmp_path, *more):
    flags = tiny_flags("--n_layer=3", "--max_steps=3", "--eval_windows=4", *more)
    flags = [f"--data={text_file}", *flags]
    assert run_mdlm(*flags, f"--out_dir={tmp_path / 'eager'}") == 0
    torch._dynamo.reset()  # what other tests compiled
    torch._dynamo.utils.counters.clear()
    assert run_mdlm(*flags, "--compile=on", f"--out_dir={tmp_path / 'compiled'}") == 0
    # Before the MLP, with attention and without, and the MLP: for all three blocks.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert losses(tmp_path / "eager") == pytest.approx(losses(tmp_path / "compiled"), abs=1e-4)


def test_compiled_run_gives_eager_losses(text_file, tmp_path):
    check_compiled_run(text_file, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--objective=ar", "--dropout=0.1"]])
def test_compiled_variants_give_eager_losses(text_file, tmp_path, more):
    check_compiled_run(text_file, tmp_path, *more)


# --------------------------------------------------------------------------------------------------
# Fine-tuning


def test_fine_tuning_keeps_weights_and_tokenizer(run, tmp_path):
    other = tmp_path / "other.txt"  # with fewer characters: its own tokenizer would be another
    other.write_text("the other text has few letters\n" * 40)
    flags = [f"--data={other}", *TINY, "--max_steps=1", f"--init_from={run}"]
    out = tmp_path / "b"
    assert run_mdlm(*flags, f"--out_dir={out}") == 0
    source, tokenizer, config = mdlm.load(run)
    assert tokenizer.to_json() == mdlm.load(out)[1].to_json()
    windows = corpus_of(out / "data", config, CPU).windows(32)
    begins_at = mdlm.evaluate(source, windows)["nelbo"]
    assert read_log(out)[0]["val_nelbo"] == pytest.approx(begins_at, abs=1e-4)


def test_importing_has_no_side_effects(tmp_path):
    """Nor does it import what is optional; the time of a run includes the imports."""
    program = (
        "import sys, time; sys.modules['triton'] = None; sys.path.insert(0, sys.argv[1])\n"
        "began = time.monotonic()\n"
        "import mdlm\n"
        "assert 0 < 4 * (mdlm.PROCESS_START - began) < time.monotonic() - began\n"
        "import sample, eval, bench, export\n"
        "heavy = {'matplotlib', 'torch._dynamo', 'tokenizers', 'pooch', 'pyarrow'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    command = [sys.executable, "-c", program, str(ROOT)]
    r = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (r.returncode, r.stdout, r.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------
# The folder of a run


def test_existing_run_is_only_touched_on_request(run, capsys):
    text = json.loads((run / "step-4" / "config.json").read_text())["config"]["data"]
    flags = [f"--data={text}", *TINY, f"--out_dir={run}"]
    before = snapshot(run)
    assert run_mdlm(*flags, "--max_steps=4") == 2
    assert "--resume" in capsys.readouterr().err
    assert run_mdlm(*flags, "--overwrite", "--data=missing") == 2
    assert snapshot(run) == before, "--overwrite removes nothing before the new run can start"
    assert run_mdlm("--resume", f"--out_dir={run}") == 0
    assert run_mdlm(*flags, "--max_steps=2", "--overwrite") == 0
    assert [p.name for p in checkpoint.checkpoints(run)] == ["step-2"]
    assert [r["step"] for r in read_log(run)] == [0, 1, 2, 2]


def test_resume_works_without_source_or_elsewhere(run, tmp_path):
    # short_run's text may be gone: the run has its own copy of the ids
    path = run / "step-4" / "config.json"
    content = json.loads(path.read_text())
    content["config"]["data"] = str(tmp_path / "gone.txt")
    path.write_text(json.dumps(content))
    sign(run / "step-4")
    moved = run.rename(tmp_path / "moved")
    assert run_mdlm("--resume", "--max_steps=5", f"--out_dir={moved}") == 0
    assert not run.exists()
    assert saved(moved)[1][0] == 5


def test_run_resumes_only_on_its_text(pydoc, tmp_path, capsys):
    source = tmp_path / "source.txt"
    source.write_text(pydoc[:6000])
    out = tmp_path / "out"
    resume = ["--resume", "--max_steps=4", f"--out_dir={out}"]
    assert run_mdlm(f"--data={source}", *TINY, "--max_steps=2", f"--out_dir={out}") == 0
    shutil.rmtree(out / "data")
    source.write_text(pydoc[:6000][::-1])  # the same characters and length: another order
    capsys.readouterr()
    assert run_mdlm(*resume) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    source.write_text(pydoc[:6000])
    assert run_mdlm(*resume) == 0


@pytest.mark.parametrize("harm", ["cut", "changed", "version", "missing"])
def test_damaged_checkpoint_is_named_and_skipped(run, capsys, harm):
    def damage():
        path = run / "step-4" / "model.safetensors"
        manifest = run / "step-4" / "manifest.json"
        content = path.read_bytes()
        if harm == "cut":
            path.write_bytes(content[:-5])
        elif harm == "changed":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif harm == "version":
            manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 2}))
        else:
            (run / "step-4" / "tokenizer.json").unlink()

    damage()
    assert_loads_step_2(run, capsys)
    assert run_mdlm("--resume", f"--out_dir={run}") == 0
    assert [p.name for p in checkpoint.checkpoints(run)] == ["step-4", "step-2"]
    mdlm.load(run / "step-4")
    shutil.rmtree(run / "step-2")
    damage()
    assert run_mdlm("--resume", f"--out_dir={run}") == 2
    with pytest.raises(errors.UserError, match="step-4"):
        mdlm.load(run / "step-4")


def assert_loads_step_2(run, capsys):
    capsys.readouterr()
    model, *_ = mdlm.load(run)
    said = capsys.readouterr().err
    assert "step-4" in said
    before, *_ = mdlm.load(run / "step-2")
    assert all(map(torch.equal, model.parameters(), before.parameters()))


@pytest.mark.parametrize("p", [0.1, 1e-9])
def test_dropout_has_its_rate_and_mean(p):
    torch.manual_seed(0)
    dropout = numerics.Dropout(p)
    x = torch.ones(3, 333_333, requires_grad=True)  # no multiple of the four values of a word
    y = dropout(x)
    y.sum().backward()
    kept = y > 0
    rate = round(65536 * p) / 65536
    error = (rate * (1 - rate) / x.numel()) ** 0.5
    assert abs((~kept).double().mean().item() - rate) <= 5 * error
    assert y[kept].unique().tolist() == pytest.approx([1 / (1 - rate)])
    assert torch.equal(x.grad, y), "backward drops the same values"
    assert not torch.equal(dropout(x), y) or not rate, "each call draws anew"
    assert torch.equal(dropout.eval()(x), x)
