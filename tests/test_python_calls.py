"""The Python calls of README.md and docs/python.md: their code runs, and they say their types."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, tiny_flags

import eval
import mdlm
import sample
from nanomdlm.support.cli import files, signals
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.ensemble import Ensemble
from nanomdlm.support.run.checkpoint import SHIPPED


def code_of(path):
    """The Python of a page, one string for each block."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.findall(r"(?ms)^```python\n(.*?)^```", text)


@pytest.fixture
def in_clone(tmp_path, monkeypatch):
    """A folder with a model in out/ and a text my.txt, as the pages assume."""
    shutil.copytree(SHIPPED, tmp_path / "out")
    (tmp_path / "my.txt").write_text("To be, or not to be, that is the question.\n" * 400)
    monkeypatch.chdir(tmp_path)


def test_code_of_the_python_page_runs(in_clone):
    names = {}
    blocks = [b for b in code_of("docs/python.md") if "class Spans" not in b]
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert len(blocks) >= 7
    assert names["best"] == "t", "of: To be, or no█ to be"
    assert names["doubtful"].text == "q" and names["doubtful"].likeliest[0][0] == "o"
    right, wrong = names["scores"]
    assert wrong.logp < right.logp < 0 < right.se < right.nelbo
    assert names["letters"][11].drawn < 0 and names["letters"][0].drawn is None
    assert names["logp"] < 0 < names["result"]["nelbo"]
    assert names["loss"].requires_grad and names["W"].grad.isfinite().all()
    assert (names["tokens"] < 65).all(), "no [MASK] is left"
    assert names["config"].n_layer == 1 and names["model"].mask_id == 17, "the loop's own model"


def test_the_variant_of_the_python_page_is_one_file_and_one_line(text_file, tmp_path):
    """Its flag, its settings in a checkpoint and its masks work in a copy of the project."""
    for name in ("variants", "support", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mdlm.py", "nanomdlm.py"):
        shutil.copy(ROOT / name, tmp_path)
    (code,) = [b for b in code_of("docs/python.md") if "class Spans" in b]
    (tmp_path / "variants" / "spans.py").write_text(code)
    listed = (ROOT / "variants" / "__init__.py").read_text()
    listed = listed.replace("from . import autoregressive", "from . import spans, autoregressive")
    listed = listed.replace("    autoregressive,\n]", "    spans,\n    autoregressive,\n]")
    (tmp_path / "variants" / "__init__.py").write_text(listed)
    flags = [f"--data={text_file}", *tiny_flags("--span=4", "--max_steps=2"), "--out_dir=out"]
    command = [sys.executable, "mdlm.py", *flags]
    r = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    config = json.loads((tmp_path / "out" / "step-2" / "config.json").read_text())["config"]
    assert config["span"] == 4
    command += ["--overwrite", "--objective=ar"]
    r = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode == 2 and "--span=4" in r.stderr and r.stderr.count("\n") == 1


def test_code_of_the_readme_runs(in_clone):
    """Its loss and its sampler, with the model that comes with the repository; its first lines of
    Python. What it shows of how to change the program is a part of a line each: not run."""
    blocks = code_of("README.md")
    loss = next(b for b in blocks if "loss.backward" in b)
    sampler = next(b for b in blocks if "multinomial" in b)
    calls = next(b for b in blocks if "mdlm.load" in b)
    names = {}
    exec(compile(calls, "README.md", "exec"), names)
    model, tokenizer = names["model"], names["tokenizer"]
    assert len(names["texts"]) == 3 and all(t.startswith("To be") for t in names["texts"])
    B, T = 8, 48
    torch.manual_seed(0)
    text = "To be, or not to be, that is the question of all".ljust(T)[:T]
    x0 = torch.tensor([tokenizer.encode(text)]).repeat(B, 1)
    names |= dict(F=F, B=B, T=T, x0=x0)
    exec(compile(loss, "README.md", "exec"), names)
    assert 0.1 < names["loss"].item() < 4, "nats per token of a text that the model knows"
    exec(compile(sampler, "README.md", "exec"), names)
    assert names["x"].shape == (B, T) and (names["x"] < model.mask_id).all()


# ---- Models in memory and in files
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_weights_are_float32_whatever_the_default_is(default, short_run):
    expected = mdlm.load(short_run)[0].state_dict()
    torch.set_default_dtype(default)
    try:
        loaded = mdlm.load(short_run)[0].state_dict()
        made = mdlm.new("a text", n_layer=1)[0].state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(loaded[name], t) for name, t in expected.items())
    assert {t.dtype for t in made.values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["float64", "compiled"])
def test_what_is_saved_can_be_loaded(kind, short_run, tmp_path):
    model, tokenizer, config = mdlm.load(short_run)
    shown = model.double() if kind == "float64" else torch.compile(model, backend="eager")
    mdlm.save(tmp_path / "saved", shown, tokenizer, config)
    loaded = mdlm.load(tmp_path / "saved")[0].state_dict()
    assert all(torch.equal(loaded[name].to(t), t) for name, t in model.state_dict().items())


def test_what_could_not_be_loaded_is_not_saved(short_run, tmp_path):
    model, tokenizer, config = mdlm.load(short_run)
    other = mdlm.new("another text")[1]
    with pytest.raises(UserError, match="tokenizer"):
        mdlm.save(tmp_path / "saved", model, other, config)
    with pytest.raises(UserError, match="several networks"):
        mdlm.save(tmp_path / "saved", Ensemble([model, model]), tokenizer, config)
    assert not (tmp_path / "saved").exists()


# ---- mdlm.main as a call: nothing of a run stays in the process
def a_run(text_file, out, *more):
    return [
        f"--data={text_file}",
        *tiny_flags("--max_steps=3", "--dropout=0.1"),
        *more,
        f"--out_dir={out}",
    ]


def state_of_process():
    """What a caller of mdlm.main would notice if it changed."""
    return dict(
        handlers=[signal.getsignal(n) for n in (signal.SIGINT, *signals.ENDING)],
        threads=torch.get_num_threads(),
        precision=torch.get_float32_matmul_precision(),
        dtype=torch.get_default_dtype(),
        gradients=torch.is_grad_enabled(),
        # Of the compiler, which sets it when it is imported for the first time.
        environment={k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
    )


def weights_and_losses(out):
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    weights = (out / "step-3" / "model.safetensors").read_bytes()
    return weights, [r["loss"] for r in records if "loss" in r]


def test_two_calls_are_two_commands(text_file, tmp_path):
    argv = [a_run(text_file, tmp_path / f"{name}") for name in ("a", "b", "command")]
    before = state_of_process()
    with torch.no_grad():
        assert mdlm.main(tuple(argv[0])) == 0
    assert state_of_process() == before
    torch.manual_seed(1)
    assert not (tmp_path / "a" / files.LOCK).exists()
    assert mdlm.main(argv[1]) == 0
    environment = dict(os.environ, OMP_NUM_THREADS=str(torch.get_num_threads()))
    subprocess.run([sys.executable, "mdlm.py", *argv[2]], cwd=ROOT, env=environment, check=True)
    first, second, command = (weights_and_losses(tmp_path / n) for n in ("a", "b", "command"))
    assert first == second == command


def test_a_failed_call_leaves_no_folder_and_no_handlers(text_file, tmp_path):
    (tmp_path / "short.txt").write_text("ab")
    before = state_of_process()
    for data, lacks in (
        (tmp_path / "short.txt", "give more text"),
        (tmp_path / "none.txt", "none.txt"),
    ):
        with pytest.raises(ValueError, match=lacks):
            mdlm.main(a_run(data, tmp_path / "out" / "run"))
        assert not (tmp_path / "out").exists()
    assert state_of_process() == before
    assert mdlm.main(a_run(text_file, tmp_path / "out" / "run")) == 0


def test_a_call_that_a_signal_stops_gives_the_handlers_back(text_file, tmp_path, monkeypatch):
    step = mdlm.train_step

    def interrupted(run, *args):
        step(run, *args)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(mdlm, "train_step", interrupted)
    before = state_of_process()
    assert mdlm.main(a_run(text_file, tmp_path / "out")) == 128 + signal.SIGTERM
    assert state_of_process() == before
    assert (tmp_path / "out" / "step-1").exists()


def test_a_call_trains_in_a_thread_and_no_second_one_beside_it(text_file, tmp_path, monkeypatch):
    said = []
    step = mdlm.train_step

    def with_another(run, *args):
        step(run, *args)
        with pytest.raises(ValueError) as e:
            mdlm.main(a_run(text_file, tmp_path / "other"))
        said.append(e)

    monkeypatch.setattr(mdlm, "train_step", with_another)
    codes = []
    argv = a_run(text_file, tmp_path / "out")
    thread = threading.Thread(target=lambda: codes.append(mdlm.main(argv)))
    thread.start()
    thread.join()
    assert codes == [0] and len(said) == 3 and not (tmp_path / "other").exists()


def test_a_run_within_autocast_is_refused(text_file, tmp_path):
    """It would train on copies of the first weights, and learn nothing."""
    argv = [f"--data={text_file}", *tiny_flags("--max_steps=1"), f"--out_dir={tmp_path / 'o'}"]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        mdlm.main(argv)
    assert mdlm.main(argv) == 0


def test_calls_work_without_a_console(text_file, tmp_path, monkeypatch):
    """sys.stderr and sys.stdout are None in pythonw and in some graphical programs."""
    for stream in ("stderr", "stdout"):
        monkeypatch.setattr(sys, stream, None)
    out = tmp_path / "out"
    assert mdlm.main(a_run(text_file, out)) == 0
    page = str(tmp_path / "page.html")
    assert (
        sample.main([f"--out_dir={out}", "--infill=a █", "--num_samples=1", f"--html={page}"]) == 0
    )
    json_file = tmp_path / "e.json"
    flags = ["--windows=2", "--pictures=none", f"--json={json_file}"]
    assert eval.main([f"--out_dir={out}", *flags]) == 0
    assert json.loads(json_file.read_text())["nelbo"] > 0
