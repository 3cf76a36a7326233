"""wandb and TensorBoard have what log.jsonl has, and --resume goes on with the same."""

import sys

import pytest
from conftest import StopAt, read_log, run_mdlm, tiny_flags

from nanomdlm.support.cli import signals
from nanomdlm.support.run import trackers

COUNTED = ("tokens", "seconds", "loss", "lr_scale", "tokens_per_second", "val_nelbo", "val_bpc")


def flags_of(text, out, log, *more):
    flags = tiny_flags("--max_steps=6", "--eval_interval=3", f"--tracker={log}", f"--out_dir={out}")
    return [f"--data={text}", *flags, *more]


def logged(out):
    """What log.jsonl has: {(step, name): number}."""
    return {(r["step"], key): r[key] for r in read_log(out) for key in COUNTED if key in r}


def in_tensorboard(folder):
    """{(step, name): number} of all event files of a folder, as TensorBoard shows them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder), size_guidance={reader.SCALARS: 0})
    events.Reload()
    names = events.Tags()["scalars"]
    return {(e.step, name): e.value for name in names for e in events.Scalars(name)}


def check_same(found, out):
    wanted = logged(out)
    assert {key for _, key in wanted} == {*COUNTED}
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key


def test_tensorboard_has_what_the_log_has(text_file, tmp_path, monkeypatch):
    """Of an interrupted and resumed run too, in the same folder; a rollback hides what it undid."""
    pytest.importorskip("tensorboard")
    out = tmp_path / "out"
    monkeypatch.setattr(signals, "Interrupt", lambda: StopAt(5))
    assert run_mdlm(*flags_of(text_file, out, "tensorboard")) == 130
    (out / "latest").write_text("step-3")  # as if step 5 had not been saved
    monkeypatch.undo()
    assert run_mdlm("--resume", f"--out_dir={out}") == 0
    assert len(list((out / "tensorboard").iterdir())) == 2
    check_same(in_tensorboard(out / "tensorboard"), out)
    before = {*(out / "tensorboard").iterdir()}  # others may have written some of them
    assert run_mdlm(*flags_of(text_file, out, "tensorboard", "--overwrite", "--max_steps=3")) == 0
    assert before < {*(out / "tensorboard").iterdir()}
    found = in_tensorboard(out / "tensorboard")
    assert max(step for step, _ in found) == 3, "nothing of the run before"
    check_same(found, out)


class Sent:
    """Stands in for a run of wandb. (test_reliability.py has a real one.)"""

    def __init__(self, id):
        self.id = id
        self.found = {}

    def log(self, values):
        self.found |= {(values["step"], name): value for name, value in values.items()}

    def define_metric(self, name, step_metric):
        pass

    def finish(self):
        pass


def test_wandb_has_what_the_log_has(text_file, tmp_path, monkeypatch):
    """A resumed run goes on with the same id, a new one gets another."""
    wandb = pytest.importorskip("wandb")
    runs = []

    def init(id, **settings):
        runs.append(Sent(id or f"run {len(runs)}"))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", init)
    out = tmp_path / "out"
    monkeypatch.setattr(signals, "Interrupt", lambda: StopAt(5))
    assert run_mdlm(*flags_of(text_file, out, "wandb")) == 130
    monkeypatch.setattr(signals, "Interrupt", lambda: StopAt(1000))
    assert run_mdlm("--resume", f"--out_dir={out}") == 0
    check_same(runs[0].found | runs[1].found, out)
    assert {r["wandb"] for r in read_log(out) if "wandb" in r} == {"run 0"}
    assert run_mdlm(*flags_of(text_file, out, "wandb", "--overwrite")) == 0
    assert [run.id for run in runs] == ["run 0", "run 0", "run 2"]


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_missing_package_is_one_sentence(name, text_file, tmp_path, monkeypatch, capsys):
    """Before anything is written, and before a run that is replaced loses anything."""
    monkeypatch.setitem(sys.modules, name, None)
    assert run_mdlm(*flags_of(text_file, tmp_path / "out", name)) == 2
    said = capsys.readouterr().err
    assert f"--tracker={name}" in said and "install" in said
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()


def test_tracker_that_fails_does_not_end_a_run(text_file, tmp_path, monkeypatch, capsys):
    def fail(*values):
        raise OSError(28, "No space left on device")

    failing = trackers.Tracker("tensorboard", fail, fail)
    monkeypatch.setattr(trackers, "start", lambda config, log: failing)
    monkeypatch.setitem(sys.modules, "tensorboard", trackers)  # as if it were installed
    assert run_mdlm(*flags_of(text_file, tmp_path / "out", "tensorboard")) == 0
    said = capsys.readouterr().err
    assert said.count("--tracker=tensorboard") == 1
    assert "log.jsonl" in said
    assert read_log(tmp_path / "out")[-1]["step"] == 6


def test_nulls_and_lists_become_numbers():
    record = dict(step=1, loss=None, lr_scale=0.5, ce_by_rate=[2.0, None], changed=dict(a=1))
    assert trackers.scalars(record) == {"step": 1, "lr_scale": 0.5, "ce_by_rate/0-10": 2.0}
