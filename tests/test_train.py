"""Runs of mdlm.py from end to end: they learn, stop, resume and refuse, on one process and on two."""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, TINY, losses, read_log, run_mdlm
from safetensors.torch import load_file

import common
import mdlm
import sample


def start(*args, ranks=0):
    """mdlm.py in a process of its own, or in `ranks` of them under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "mdlm.py"), *map(str, args)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},  # says where it died
    )


class StopAt:
    """Stands in for common.Interrupt: a Ctrl-C that arrives before step number `at`."""

    def __init__(self, at):
        self.left = at

    @property
    def signal(self):
        self.left -= 1
        return signal.SIGINT if self.left < 0 else 0


def final(out_dir):
    """All tensors of the last checkpoint, and its state without the clock."""
    folder = common.find_checkpoint(out_dir)
    state = json.loads((folder / "state.json").read_text())
    return load_file(folder / "model.safetensors") | load_file(folder / "state.safetensors"), (
        state["step"],
        state["tokens"],
    )


def snapshot(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*")} if folder.exists() else None


def test_a_run_learns_and_leaves_everything_it_promises(text_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        run_mdlm(
            f"--data={text_file}",
            f"--out_dir={out}",
            *TINY,
            "--max_steps=150",
            "--eval_interval=60",
            "--n_embd=64",
        )
        == 0
    )
    names = {p.name for p in out.iterdir()}
    assert names == {"data", "latest", "log.jsonl", "loss.png", "step-120", "step-150"}, (
        "the last two are kept, nothing is left over"
    )
    assert (out / "latest").read_text() == "step-150"
    assert {p.name for p in (out / "step-150").iterdir()} == set(common.CHECKPOINT_FILES) | {"manifest.json"}
    evaluations = [r for r in read_log(out) if "val_nelbo" in r]
    assert [r["step"] for r in evaluations] == [0, 60, 120, 150]
    assert {
        "step",
        "tokens",
        "seconds",
        "val_nelbo",
        "val_nelbo_se",
        "val_nelbo_raw",
        "val_bpc",
    } <= evaluations[-1].keys()
    model, tokenizer, config = mdlm.load(out)
    assert evaluations[0]["val_nelbo"] == pytest.approx(math.log(tokenizer.vocab_size), abs=1e-3)
    assert evaluations[-1]["val_nelbo"] < evaluations[0]["val_nelbo"] - 1.0
    assert evaluations[-1]["tokens"] == 150 * 8 * 32
    windows = mdlm.Corpus(out / "data", config, torch.device("cpu")).windows(32)
    assert mdlm.evaluate(model, windows, passes=4)["nelbo"] == pytest.approx(
        evaluations[-1]["val_nelbo"], abs=1e-5
    ), "the logged value is that of exactly the weights in model.safetensors"
    shown = capsys.readouterr().out
    assert "python sample.py" in shown.splitlines()[-1]
    xt = torch.full((2, 32), model.mask_id)
    assert model(xt).shape == (2, 32, tokenizer.vocab_size) and model.mask_id == tokenizer.vocab_size


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--objective=ar"],
        ["--gradient_accumulation_steps=2", "--dropout=0.1"],
        ["--optimizer=adamw", "--ema=0", "--masking=bernoulli"],
    ],
)
def test_resuming_continues_to_the_bit_as_if_nothing_had_happened(text_file, tmp_path, monkeypatch, more):
    # 60,000 characters have 1,687 windows of 32: with batches of 128, step 13 crosses an epoch.
    args = [f"--data={text_file}", *TINY, "--batch_size=128", "--block_size=32", "--max_steps=20", *more]
    assert run_mdlm(*args, f"--out_dir={tmp_path / 'whole'}") == 0
    monkeypatch.setattr(common, "Interrupt", lambda: StopAt(8))
    assert run_mdlm(*args, f"--out_dir={tmp_path / 'parts'}") == 130
    assert final(tmp_path / "parts")[1][0] == 8
    monkeypatch.undo()
    assert run_mdlm("--resume", f"--out_dir={tmp_path / 'parts'}") == 0
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts") and len(losses(tmp_path / "whole")) == 20
    (a, state_a), (b, state_b) = final(tmp_path / "whole"), final(tmp_path / "parts")
    assert state_a == state_b and a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    key = "val_nll" if "--objective=ar" in more else "val_nelbo"
    assert read_log(tmp_path / "whole")[-1][key] == read_log(tmp_path / "parts")[-1][key]


@pytest.mark.parametrize("optimizer, tolerance", [("adamw", 1e-5), ("muon", 1e-3)])
def test_one_and_two_ranks_give_the_same_losses(text_file, tmp_path, optimizer, tolerance):
    args = [f"--data={text_file}", *TINY, "--max_steps=20", f"--optimizer={optimizer}"]
    assert run_mdlm(*args, f"--out_dir={tmp_path / 'one'}") == 0
    process = start(*args, f"--out_dir={tmp_path / 'two'}", ranks=2)
    output = process.communicate(timeout=120)
    assert process.returncode == 0, "\n".join(output)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == len(two) == 20
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < tolerance
    evaluations = [
        next(r for r in reversed(read_log(tmp_path / d)) if "val_nelbo" in r)["val_nelbo"]
        for d in ("one", "two")
    ]
    assert abs(evaluations[0] - evaluations[1]) < 10 * tolerance


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_at_the_step_boundary(text_file, tmp_path, number, code):
    process = start(f"--data={text_file}", *TINY, "--max_steps=1000000", f"--out_dir={tmp_path / 'out'}")
    for line in process.stderr:
        if line.startswith("step 5:"):
            break
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    step = final(tmp_path / "out")[1][0]
    assert step >= 5 and f"stopped at step {step} and saved" in out
    assert run_mdlm("--resume", f"--out_dir={tmp_path / 'out'}", f"--max_steps={step + 2}") == 0
    assert final(tmp_path / "out")[1][0] == step + 2


def test_a_time_limit_covers_everything(text_file, tmp_path):
    began = time.monotonic()
    process = start(
        f"--data={text_file}",
        *TINY,
        "--max_steps=1000000",
        "--time_limit=20",
        f"--out_dir={tmp_path / 'out'}",
    )
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert 8 < time.monotonic() - began < 24  # more than 20: Python's own start and end are outside
    log = read_log(tmp_path / "out")
    assert "val_nelbo" in log[-1] and log[-1]["seconds"] < 20
    assert [r["lr_scale"] for r in log if "lr_scale" in r][-1] < 0.1, (
        "the learning rate has come down by the end"
    )


def test_fine_tuning_starts_from_given_weights(text_file, tmp_path):
    args = [f"--data={text_file}", *TINY]
    assert run_mdlm(*args, "--max_steps=30", f"--out_dir={tmp_path / 'a'}") == 0
    assert (
        run_mdlm(*args, "--max_steps=1", f"--init_from={tmp_path / 'a'}", f"--out_dir={tmp_path / 'b'}") == 0
    )
    assert read_log(tmp_path / "b")[0]["val_nelbo"] == pytest.approx(
        mdlm.evaluate(
            mdlm.load(tmp_path / "a")[0],
            mdlm.Corpus(tmp_path / "a" / "data", mdlm.load(tmp_path / "a")[2], torch.device("cpu")).windows(
                32
            ),
        )["nelbo"],
        abs=1e-4,
    )
    assert run_mdlm(*args, "--n_layer=3", f"--init_from={tmp_path / 'a'}", f"--out_dir={tmp_path / 'c'}") == 2


def test_fine_tuning_keeps_the_tokenizer_and_refuses_another_network(text_file, tmp_path, capsys):
    other = tmp_path / "other.txt"  # with fewer characters, so that its own tokenizer would be another
    other.write_text("the other text has few characters\n" * 40)
    a, b = tmp_path / "a", tmp_path / "b"
    assert run_mdlm(f"--data={text_file}", *TINY, "--max_steps=2", f"--out_dir={a}") == 0
    args = [f"--data={other}", *TINY, "--max_steps=1", f"--init_from={a}"]
    assert run_mdlm(*args, f"--out_dir={b}") == 0
    assert mdlm.load(a)[1].to_json() == mdlm.load(b)[1].to_json()
    capsys.readouterr()
    for flag, word in (
        ("--n_head=1", "n_head=2"),
        ("--pos=sinusoidal", "pos='rope'"),
        ("--conv=3", "conv=5"),
    ):
        assert run_mdlm(*args, flag, f"--out_dir={tmp_path / 'c'}") == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and word in said and "give the same" in said, said
        assert not (tmp_path / "c").exists()
    other.write_text("what it never saw: \u2603\n" * 200)
    assert run_mdlm(*args, f"--out_dir={tmp_path / 'c'}") == 2 and "\u2603" in capsys.readouterr().err


def test_the_command_that_a_run_ends_with_works(text_file, tmp_path, capsys):
    (tmp_path / "digits.txt").write_text("3.14159 26535\n" * 200)
    for data, has in ((text_file, True), (tmp_path / "digits.txt", False)):
        assert (
            run_mdlm(f"--data={data}", *TINY, "--max_steps=1", f"--out_dir={tmp_path / 'out'}", "--overwrite")
            == 0
        )
        said = capsys.readouterr().out.splitlines()[-1]
        assert ("--infill" in said) == has
        assert common.run(sample.main, shlex.split(said)[shlex.split(said).index("sample.py") + 1 :]) == 0


def test_without_a_compiler_a_run_that_asks_for_one_goes_on_and_says_so(
    text_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(common, "can_compile", lambda device: False)
    args = [f"--data={text_file}", *TINY, "--max_steps=1", "--compile=on"]
    assert run_mdlm(*args, f"--out_dir={tmp_path / 'out'}") == 0
    said = capsys.readouterr()
    assert "eager" in said.out and said.err.count("going on without") == 1


def test_a_loss_that_is_not_finite_stops_the_run_and_overwrites_nothing(
    text_file, tmp_path, monkeypatch, capsys
):
    forward, calls = mdlm.Model.forward, []

    def broken(self, xt, *rest):
        out = forward(self, xt, *rest)
        if rest:
            calls.append(1)
            if len(calls) == 7:
                out = out * float("nan")
        return out

    monkeypatch.setattr(mdlm.Model, "forward", broken)
    args = [f"--data={text_file}", *TINY, "--max_steps=10", "--eval_interval=5"]
    assert run_mdlm(*args, f"--out_dir={tmp_path / 'out'}") == 2
    said = capsys.readouterr().err
    assert "at step 6" in said and "step-5" in said
    assert final(tmp_path / "out")[1][0] == 5
    assert all(torch.isfinite(t).all() for t in final(tmp_path / "out")[0].values())


def test_the_default_run_without_a_network_trains_on_pydoc(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys.modules["text"], "SHAKESPEARE_URL", "http://127.0.0.1:9/none")
    assert run_mdlm(*TINY, "--max_steps=2", f"--out_dir={tmp_path / 'out'}") == 0
    assert "pydoc" in capsys.readouterr().err
    assert (tmp_path / "out" / "data" / "train.bin").stat().st_size > 300_000


@pytest.mark.parametrize(
    "args, words",
    [
        (["--data=missing.txt"], ["missing.txt", "does not exist"]),
        (["--batchsize=4"], ["--batchsize", "--batch_size"]),
        (["--batch_size=7"], ["multiple of 2"]),
        (["--batch_size=many"], ["many"]),
        (["--n_embd=50", "--n_head=4"], ["--n_embd=50", "head"]),
        (["--block_size=100000"], ["8192"]),
        (["--block_size=8192"], ["longer than", "val.bin"]),
        (["--preset=huge"], ["huge", "cpu"]),
        (["--device=cuda:9"], ["cuda:9", "cpu"]),
        (["--device=toaster"], ["toaster", "cpu"]),
        (["--tokenizer=letters"], ["letters", "char"]),
        (["--resume", "--overwrite"], ["contradict"]),
        (["--resume"], ["no intact checkpoint"]),
        (["--min_rate=0.5", "--max_rate=0.2"], ["swap"]),
        (["--dropout=1.5"], ["dropout"]),
        (["--max_steps=0"], ["max_steps"]),
        (["--time_limit=-1"], ["time_limit"]),
        (["--learning_rate=nan"], ["learning_rate"]),
        (["--data=patterns", "--block_size=32"], ["64"]),
        (["--data=patterns", "--block_size=64", "--tokenizer=byte"], ["--tokenizer"]),
        (["--objective=ar", "--time_conditioning"], ["mask rate"]),
        (["--tokenizer=bpe", "--vocab_size=100"], ["vocab_size=100"]),
        (["--init_from=nowhere"], ["nowhere"]),
        (["--compile=maybe"], ["maybe"]),
        (["--kernels=triton"], ["--kernels=triton", "CUDA"]),
        (["surplus"], ["surplus"]),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(text_file, tmp_path, capsys, args, words):
    out = tmp_path / "out"
    given = [a for a in TINY if a.split("=")[0] not in {b.split("=")[0] for b in args}]
    data = [] if any(a.startswith("--data") for a in args) else [f"--data={text_file}"]
    assert run_mdlm(*data, *given, f"--out_dir={out}", *args) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said
    assert not common.checkpoints(out) and not list(out.glob("tmp-*"))


@pytest.mark.parametrize(
    "content, words", [(b"", ["empty"]), (b"\xff\xfe\x00\x01" * 100, ["UTF-8"]), (b"short", ["block_size"])]
)
def test_a_file_that_is_no_text_gets_one_sentence_and_leaves_nothing(tmp_path, capsys, content, words):
    (tmp_path / "t").write_bytes(content)
    assert run_mdlm(f"--data={tmp_path / 't'}", *TINY, f"--out_dir={tmp_path / 'out'}") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_run_is_only_touched_on_request(text_file, tmp_path, capsys):
    out = tmp_path / "out"
    args = [f"--data={text_file}", *TINY, f"--out_dir={out}"]
    assert run_mdlm(*args, "--max_steps=3") == 0
    before = snapshot(out)
    assert run_mdlm(*args, "--max_steps=4") == 2 and "--resume" in capsys.readouterr().err
    assert (
        run_mdlm("--resume", f"--out_dir={out}", "--n_embd=64") == 2
        and "--n_embd=64 contradicts" in capsys.readouterr().err
    )
    assert run_mdlm(*args, "--overwrite", "--data=missing") == 2, (
        "--overwrite removes nothing before the new run can start"
    )
    assert snapshot(out) == before
    assert run_mdlm("--resume", f"--out_dir={out}") == 0
    assert "raise --max_steps" in capsys.readouterr().out
    assert run_mdlm(*args, "--max_steps=2", "--overwrite") == 0
    assert [p.name for p in common.checkpoints(out)] == ["step-2"]


def test_an_out_dir_that_cannot_be_written_is_refused(text_file, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run_mdlm(f"--data={text_file}", *TINY, f"--out_dir={tmp_path / 'file'}") == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "harm, words",
    [
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-5]),
            ["bytes instead of"],
        ),
        (
            lambda d: (d / "config.json").write_bytes(
                (d / "config.json").read_bytes().replace(b"mdlm", b"mdlx", 1)
            ),
            ["checksum"],
        ),
        (
            lambda d: (d / "manifest.json").write_text(
                json.dumps(json.loads((d / "manifest.json").read_text()) | {"version": 2})
            ),
            ["version"],
        ),
        (lambda d: (d / "tokenizer.json").unlink(), ["tokenizer.json"]),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(text_file, tmp_path, capsys, harm, words):
    out = tmp_path / "out"
    assert (
        run_mdlm(f"--data={text_file}", *TINY, f"--out_dir={out}", "--max_steps=4", "--eval_interval=2") == 0
    )
    harm(out / "step-4")
    capsys.readouterr()
    mdlm.load(out)
    said = capsys.readouterr().err
    assert "step-4" in said and all(word in said for word in words), said
    assert run_mdlm("--resume", f"--out_dir={out}") == 0
    assert [p.name for p in common.checkpoints(out)] == ["step-4", "step-2"]
    mdlm.load(out / "step-4")
    shutil.rmtree(out / "step-2")
    harm(out / "step-4")
    assert run_mdlm("--resume", f"--out_dir={out}") == 2
    with pytest.raises(common.Refusal, match="restore it from a copy"):
        mdlm.load(out / "step-4")


def test_help_lists_every_setting_once(capsys):
    with pytest.raises(SystemExit) as stop:
        mdlm.parse_args(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    for name in mdlm.Config.__dataclass_fields__:
        assert f"--{name} " in shown
    assert all(f"  {preset}: " in shown for preset in mdlm.PRESETS)


def test_flags_take_both_spellings():
    assert (
        mdlm.parse_args(["--n_layer=3", "--tie"])
        == mdlm.parse_args(["--n_layer", "3", "--tie=true"])
        == {"n_layer": 3, "tie": True}
    )


def test_importing_has_no_side_effects_and_needs_no_triton(tmp_path):
    program = (
        "import sys; sys.modules['triton'] = None; sys.path.insert(0, sys.argv[1])\n"
        "import mdlm, sample, eval, kernels\n"
        "assert not {'matplotlib', 'torch._dynamo', 'tokenizers'} & sys.modules.keys()"
    )
    r = subprocess.run(
        [sys.executable, "-c", program, str(ROOT)], capture_output=True, text=True, cwd=tmp_path
    )
    assert (r.returncode, r.stdout, r.stderr) == (0, "", "") and not list(tmp_path.iterdir())


def test_in_bfloat16_the_logged_value_is_that_of_the_averaged_weights(text_file, tmp_path):
    # autocast keeps bfloat16 copies of weights: in one context both would be evaluated with the same ones
    args = [a for a in TINY if not a.startswith("--dtype")] + ["--dtype=bfloat16", "--ema=0.99"]
    assert (
        run_mdlm(
            f"--data={text_file}",
            *args,
            "--max_steps=60",
            "--lr_schedule=constant",
            f"--out_dir={tmp_path}/o",
        )
        == 0
    )
    logged = read_log(tmp_path / "o")[-1]
    model, _, config = mdlm.load(tmp_path / "o")
    windows = mdlm.Corpus(tmp_path / "o" / "data", config, torch.device("cpu")).windows(32)
    with torch.autocast("cpu", torch.bfloat16):
        again = mdlm.evaluate(model, windows, passes=4)["nelbo"]
    assert again == pytest.approx(logged["val_nelbo"], abs=1e-4)
    assert abs(logged["val_nelbo"] - logged["val_nelbo_raw"]) > 1e-3, "raw and averaged weights differ here"


def test_the_average_does_not_lag_behind_weights_that_have_settled(text_file, tmp_path):
    lag = {}
    for schedule in ("constant", "trapezoid"):
        flags = [
            "--max_steps=40",
            "--warmup_steps=0",
            f"--lr_schedule={schedule}",
            f"--out_dir={tmp_path / schedule}",
        ]
        assert run_mdlm(f"--data={text_file}", *TINY, *flags) == 0
        tensors = final(tmp_path / schedule)[0]
        distance = [(tensors[n] - tensors[f"raw.{n}"]).norm() for n in tensors if f"raw.{n}" in tensors]
        lag[schedule] = torch.stack(distance).norm()
    assert lag["trapezoid"] < 0.1 * lag["constant"], lag


@pytest.mark.parametrize(
    "more",
    [
        ["--data=patterns", "--block_size=64"],
        ["--separator=\\n\\n"],
        ["--tie", "--pos=learned"],
        ["--time_conditioning", "--pos=sinusoidal"],
        ["--tokenizer=bpe", "--vocab_size=400"],
    ],
)
def test_every_kind_of_run_learns(text_file, tmp_path, more):
    args = [a for a in TINY if a.split("=")[0] not in {b.split("=")[0] for b in more}]
    data = [] if "--data=patterns" in more else [f"--data={text_file}"]
    steps = 150 if "--data=patterns" in more else 40  # there is no simple statistic to learn first
    assert run_mdlm(*data, *args, *more, f"--max_steps={steps}", f"--out_dir={tmp_path}/o") == 0
    first, last = (read_log(tmp_path / "o")[i]["val_nelbo"] for i in (0, -1))
    assert last < first - 0.3
    mdlm.load(tmp_path / "o")


@pytest.mark.parametrize("masking", ["exact", "bernoulli"])
def test_a_compiled_run_gives_the_losses_of_an_eager_one(text_file, tmp_path, masking):
    args = [f"--data={text_file}", *TINY, "--max_steps=4", f"--masking={masking}"]
    assert run_mdlm(*args, f"--out_dir={tmp_path}/eager") == 0
    assert run_mdlm(*args, "--compile=on", f"--out_dir={tmp_path}/compiled") == 0
    assert losses(tmp_path / "eager") == pytest.approx(losses(tmp_path / "compiled"), abs=1e-4)


def test_accumulation_changes_no_loss(text_file, tmp_path):
    args = [f"--data={text_file}", *TINY, "--max_steps=6", "--optimizer=adamw"]
    for parts in (1, 4):
        assert run_mdlm(*args, f"--gradient_accumulation_steps={parts}", f"--out_dir={tmp_path}/{parts}") == 0
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "4"), abs=1e-5)


def test_two_ranks_resume_what_one_began_and_stop_together(text_file, tmp_path):
    args = [f"--data={text_file}", *TINY, "--optimizer=adamw", "--rate_margin=0"]
    assert run_mdlm(*args, "--max_steps=5", "--lr_schedule=constant", f"--out_dir={tmp_path}/o") == 0
    assert run_mdlm(*args, "--max_steps=8", "--lr_schedule=constant", f"--out_dir={tmp_path}/whole") == 0
    process = start("--resume", "--max_steps=1000000", f"--out_dir={tmp_path}/o", ranks=2)
    for line in process.stderr:
        if line.startswith("step 9:"):
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    step = final(tmp_path / "o")[1][0]
    assert step >= 9 and f"stopped at step {step} and saved" in out, (out, err)
    assert losses(tmp_path / "o")[:8] == pytest.approx(losses(tmp_path / "whole"), abs=1e-4)


def test_a_run_resumes_from_its_own_data_whatever_became_of_the_source(pydoc, tmp_path, capsys):
    source = tmp_path / "text.txt"
    source.write_text(pydoc)
    assert run_mdlm(f"--data={source}", *TINY, "--max_steps=3", f"--out_dir={tmp_path}/o") == 0
    source.unlink()
    assert run_mdlm("--resume", "--max_steps=4", f"--out_dir={tmp_path}/o") == 0
    shutil.rmtree(tmp_path / "o" / "data")
    source.write_text(pydoc[:20_000] + "\u2603")
    assert run_mdlm("--resume", "--max_steps=5", f"--out_dir={tmp_path}/o") == 2
    assert "is not the text" in capsys.readouterr().err
    source.write_text(pydoc)
    os.rename(tmp_path / "o", tmp_path / "moved")
    assert run_mdlm("--resume", "--max_steps=5", f"--out_dir={tmp_path}/moved") == 0
    assert not (tmp_path / "o").exists() and final(tmp_path / "moved")[1][0] == 5


def test_a_run_stopped_at_its_very_end_is_still_evaluated(text_file, tmp_path, monkeypatch):
    args = [f"--data={text_file}", *TINY, "--max_steps=3", f"--out_dir={tmp_path}/o"]
    monkeypatch.setattr(common, "Interrupt", lambda: StopAt(3))
    assert run_mdlm(*args) == 130
    monkeypatch.undo()
    assert run_mdlm("--resume", f"--out_dir={tmp_path}/o") == 0
    assert read_log(tmp_path / "o")[-1]["step"] == 3 and "val_nelbo" in read_log(tmp_path / "o")[-1]


def test_a_folder_named_data_that_is_not_ours_stays(text_file, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("mine")
    assert run_mdlm(f"--data={text_file}", *TINY, f"--out_dir={tmp_path}") == 2
    assert (tmp_path / "data" / "precious").exists() and "not mdlm's" in capsys.readouterr().err


@pytest.mark.parametrize(
    "file, old, new, words",
    [
        ("config.json", b'"n_layer": 2', b'"n_layer": "2"', ["n_layer"]),
        ("config.json", b'"n_layer": 2', b'"n_layer": 3', ["does not fit"]),
        ("config.json", b'"version": 1', b'"version": 2', ["version 2"]),
        ("config.json", b'"n_layer": 2', b'"n_layers": 2', ["unknown or missing"]),
        ("tokenizer.json", b'"kind": "char"', b'"kind": "wild"', ["no tokenizer"]),
    ],
)
def test_a_checkpoint_of_another_version_or_config_is_refused(text_file, tmp_path, file, old, new, words):
    assert run_mdlm(f"--data={text_file}", *TINY, "--max_steps=1", f"--out_dir={tmp_path}/o") == 0
    folder = tmp_path / "o" / "step-1"
    content = (folder / file).read_bytes()
    assert old in content
    (folder / file).write_bytes(content.replace(old, new, 1))
    manifest = json.loads((folder / "manifest.json").read_text())  # as whoever made such a folder would
    manifest["files"][file] = dict(
        size=(folder / file).stat().st_size, sha256=common.sha256_of(folder / file)
    )
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(common.Refusal) as refusal:
        mdlm.load(tmp_path / "o")
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_gradients_are_scaled_down_to_the_limit_and_small_ones_stay_to_the_bit():
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(n, 8)) for n in (3, 40, 5)]
    for size, limit in ((100.0, 1.0), (1e-3, 1.0), (100.0, 0.0)):
        before = [size * torch.randn(p.shape, generator=g) for p in params[:2]]  # the third has none
        for p, x in zip(params, before, strict=False):
            p.grad = x.clone()
        norm = common.clip_gradients(params, limit).item()
        wanted = torch.cat([x.flatten() for x in before]).norm().item()
        assert norm == pytest.approx(wanted, rel=1e-5)
        after = torch.cat([p.grad.flatten() for p in params[:2]]).norm().item()
        if limit and wanted > limit:
            assert after == pytest.approx(limit, rel=1e-4)
        else:
            assert all(torch.equal(p.grad, x) for p, x in zip(params, before, strict=False))
