"""wandb and TensorBoard have what log.jsonl has, and --resume goes on with the same."""

import json
import struct
import sys
import time

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


def records_of(path):
    """The serialized records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at = 7
    record = b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is padding
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            yield record
            record = b""


def written(path):
    """The records of a .wandb file, when the last one is there: wandb's own process, which lives
    as long as this one, may write it after finish() has returned."""
    from wandb.proto import wandb_internal_pb2

    until = time.monotonic() + 30
    while True:
        records = [*map(wandb_internal_pb2.Record.FromString, records_of(path))]
        if (records and records[-1].HasField("exit")) or time.monotonic() > until:
            return records
        time.sleep(0.1)


def in_wandb(folder):
    """{(step, name): number} and the ids of the offline runs of a folder, from their files."""
    pytest.importorskip("wandb")
    found = {}
    ids = []
    for path in sorted(folder.glob("offline-run-*/run-*.wandb")):
        ids.append(path.stem.removeprefix("run-"))
        for record in written(path):
            items = {}
            for item in record.history.item:
                items[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            found |= {(items["step"], k): v for k, v in items.items() if "step" in items}
    return found, ids


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


def test_wandb_has_what_the_log_has(text_file, tmp_path, monkeypatch):
    """Offline; a resumed run goes on with the same id, a new one gets another."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "out"
    monkeypatch.setattr(signals, "Interrupt", lambda: StopAt(5))
    assert run_mdlm(*flags_of(text_file, out, "wandb")) == 130
    monkeypatch.setattr(signals, "Interrupt", lambda: StopAt(1000))
    assert run_mdlm("--resume", f"--out_dir={out}") == 0
    found, ids = in_wandb(out / "wandb")
    check_same(found, out)
    assert len(ids) == 2 and len({*ids}) == 1
    assert {r["wandb"] for r in read_log(out) if "wandb" in r} == {*ids}
    assert run_mdlm(*flags_of(text_file, out, "wandb", "--overwrite")) == 0
    assert len({*in_wandb(out / "wandb")[1]}) == 2


def test_wandb_without_a_login(text_file, tmp_path, monkeypatch, capsys):
    """One sentence, whose advice test_wandb_has_what_the_log_has follows."""
    wandb = pytest.importorskip("wandb")

    def refuse(**settings):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    assert run_mdlm(*flags_of(text_file, tmp_path / "out", "wandb")) == 2
    said = capsys.readouterr().err
    assert "--tracker=wandb" in said


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
    monkeypatch.setattr(trackers, "check", lambda config: None)
    assert run_mdlm(*flags_of(text_file, tmp_path / "out", "tensorboard")) == 0
    said = capsys.readouterr().err
    assert said.count("--tracker=tensorboard") == 1
    assert "log.jsonl" in said
    assert read_log(tmp_path / "out")[-1]["step"] == 6


def test_nulls_and_lists_become_numbers():
    record = dict(step=1, loss=None, lr_scale=0.5, ce_by_rate=[2.0, None], changed=dict(a=1))
    assert trackers.scalars(record) == {"step": 1, "lr_scale": 0.5, "ce_by_rate/0-10": 2.0}
