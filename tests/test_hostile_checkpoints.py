"""Checkpoints that are damaged or forged: one sentence, bounded memory, no pickle."""

import contextlib
import functools
import hashlib
import json
import math
import os
import pickle
import random
import resource
import shutil
import struct
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINT_FILES, TINY, run_mdlm, sign
from safetensors.torch import load_file, save_file

import mdlm
from nanomdlm.support.data.tokenizer import Tokenizer, tokenizer_from_json
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import checkpoint

CPU = torch.device("cpu")


def resume(folder):
    """What --resume does with a checkpoint: a model, averages and optimizers that load it."""
    config = mdlm.run_config.read(mdlm.Config, folder)
    tokenizer = tokenizer_from_json(folder / "tokenizer.json")
    if (config.n_embd, config.n_layer, tokenizer.vocab_size) > (64, 4, 200):
        return None  # training would take what the config asks for; load() must not
    ops = mdlm.devices.select_kernels("torch", CPU, config)
    lengths = torch.zeros(config.block_size + 1)
    corpus = SimpleNamespace(tokenizer=tokenizer, length_counts=lengths, mean_length=1.0)
    run = mdlm.make_run(config, corpus, mdlm.devices.Machine(CPU, torch.float32, ops))
    return checkpoint.restore(folder, run.model, run.averaged, run.optimizers)


def weights_of(model):
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextlib.contextmanager
def bounded(seconds=20, megabytes=400):
    began = time.monotonic()
    before = peak_mb()
    yield
    assert time.monotonic() - began < seconds
    assert peak_mb() - before < megabytes


# --------------------------------------------------------------------------------------------------
# Fuzzing

NASTY = [None, True, -1, 0, 1.5, 10**30, float("inf"), float("nan"), "", "x" * 10_000, "../../x"]
NASTY += ["\ud800", [], {}, [1, "a"], {"a": None}]
NASTY += [functools.reduce(lambda x, _: [x], range(500), 1)]


def spoil_bytes(content, r):
    """Cut the content off, flip bits, or write over a part of it."""
    content = bytearray(content)
    kind = r.randrange(3)
    if kind == 0 or not content:
        return bytes(content[: r.randrange(len(content) + 1)])
    if kind == 1:
        for _ in range(r.randint(1, 8)):
            content[r.randrange(len(content))] ^= 1 << r.randrange(8)
        return bytes(content)
    i = r.randrange(len(content))
    return bytes(content[:i] + r.randbytes(r.randint(1, 64)) + content[i + 16 :])


def spoil_json(content, r):
    """Put something nasty in the place of a value, remove a key or add one."""
    d = at = json.loads(content)
    while isinstance(at.get(k := r.choice(sorted(at))), dict) and at[k] and r.random() < 0.9:
        at = at[k]
    action = r.randrange(4)
    if action == 0:
        del at[k]
    elif action == 1:
        at["surplus"] = r.choice(NASTY)
    else:
        at[k] = r.choice(NASTY)
    return json.dumps(d).encode()


def spoil(path, r):
    content = path.read_bytes()
    deep = path.suffix == ".json" and r.random() < 0.6
    try:
        json.loads(content if deep else b"?")
    except ValueError:  # also a file that was spoiled before, and is JSON no more
        deep = False
    path.write_bytes((spoil_json if deep else spoil_bytes)(content, r))


def fuzz_damage(original, folder, cases):
    """What loads is one of the two checkpoints to the bit, or nothing; never another model."""
    known = {weights_of(mdlm.load(original / f"step-{n}")[0]): n for n in (2, 4)}
    count = {2: 0, 4: 0, "refused": 0}
    r = random.Random(1)
    for case in range(cases):
        out = folder / "case"
        shutil.copytree(original, out)
        for _ in range(1 + (case % 3 == 0)):  # sometimes both
            step = out / r.choice(["step-2", "step-4", "step-4"])
            spoil(r.choice([out / "latest", *sorted(step.iterdir())]), r)
        try:
            model, _, config = mdlm.load(out)
            assert (config.n_embd, config.n_layer) == (32, 2)
            count[known[weights_of(model)]] += 1
        except UserError:
            count["refused"] += 1
        shutil.rmtree(out)
    return count


def fuzz_forgery(original, folder, cases):
    """The checksums fit what was spoiled: a UserError, or a model and state of the right make."""
    count = dict(loaded=0, resumed=0, refused=0)
    r = random.Random(2)
    for case in range(cases):
        step = folder / "case" / "step-4"
        shutil.copytree(original / "step-4", step)
        spoil(step / CHECKPOINT_FILES[case % 5], r)
        sign(step)
        try:
            model, tokenizer, config = mdlm.load(step)
            x = torch.full((1, min(config.block_size, 32)), model.mask_id)
            assert model(x).shape[-1] == tokenizer.vocab_size == model.mask_id
            tokenizer.decode(range(tokenizer.vocab_size)).encode()
            count["loaded"] += 1
        except UserError:
            count["refused"] += 1
        try:
            resume(step)
            count["resumed"] += 1
        except UserError:
            count["refused"] += 1
        shutil.rmtree(folder / "case")
    return count


def test_spoiled_files_never_give_another_model(short_run, tmp_path):
    with bounded(seconds=200):
        damage = fuzz_damage(short_run, tmp_path, 100)
        forgery = fuzz_forgery(short_run, tmp_path, 100)
    assert min(*damage.values(), *forgery.values()) > 2


# --------------------------------------------------------------------------------------------------
# Forgery


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_no_pickle_is_ever_loaded(run, tmp_path):
    marker = tmp_path / "executed"
    seen = []

    def hook(event, args):
        if event == "pickle.find_class":
            seen.append(args)

    sys.addaudithook(hook)
    payload = pickle.dumps(Payload(marker))
    pickle.loads(payload)
    assert marker.exists(), "the payload works"
    assert seen, "the hook sees it"
    marker.rmdir()
    seen.clear()
    for name in CHECKPOINT_FILES:
        kept = (run / "step-4" / name).read_bytes()
        (run / "step-4" / name).write_bytes(payload)
        sign(run / "step-4")
        with pytest.raises(UserError):
            mdlm.load(run / "step-4")
            resume(run / "step-4")
        (run / "step-4" / name).write_bytes(kept)
    sign(run / "step-4")
    for folder in (run / "step-4", run / "data"):
        for name in ("meta.pkl", "pytorch_model.bin", "ckpt.pt", "data.pkl"):  # as nanoGPT has
            (folder / name).write_bytes(payload)
    mdlm.load(run)
    assert run_mdlm("--resume", f"--out_dir={run}", "--max_steps=5") == 0
    flags = [f"--data={run / 'data'}", *TINY, "--max_steps=1", f"--out_dir={tmp_path / 'p'}"]
    assert run_mdlm(*flags) == 0
    assert not marker.exists()
    assert not seen


def safetensors_file(header, data=b"", length=None):
    header = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(shape, offsets, dtype="F32"):
    return dict(dtype=dtype, shape=shape, data_offsets=offsets)


@pytest.mark.parametrize(
    "content",
    [
        safetensors_file(b"{}", length=(1 << 64) - 1),
        safetensors_file(b"{}", length=1 << 40),
        safetensors_file(b"", length=0),
        safetensors_file(b" " * 50 + b"{" * 50),
        safetensors_file({"head.weight": tensor([1 << 40, 32], [0, 1 << 47])}),
        safetensors_file({"head.weight": tensor([1 << 62, 1 << 62], [0, 16])}, bytes(16)),
        safetensors_file({"head.weight": tensor([-1, 4], [0, 16])}, bytes(16)),
        safetensors_file({"head.weight": tensor([4], [16, 0])}, bytes(16)),
        safetensors_file(dict.fromkeys(["head.weight", "x"], tensor([4], [0, 16])), bytes(16)),
        safetensors_file({"head.weight": tensor([2], [0, 16], "O")}, bytes(16)),
        safetensors_file({f"t{i}": tensor([0], [0, 0]) for i in range(20_000)}),
        b"",
        b"\x80\x04" + bytes(100),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors"])
def test_forged_safetensors_file_is_refused(run, name, content):
    (run / "step-4" / name).write_bytes(content)
    sign(run / "step-4")
    with bounded(seconds=10), pytest.raises(UserError, match=name):
        (mdlm.load if name.startswith("model") else resume)(run / "step-4")


def former(name):
    return name.replace("layers.", "blocks.")


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors"])
def test_tensors_under_both_names_of_the_layers_are_refused(run, name):
    """Which of two tensors counts is not chosen by the order in a file."""
    path = run / "step-4" / name
    tensors = load_file(path)
    others = {former(name): t + 1 for name, t in tensors.items()}
    save_file(others | tensors, path)
    sign(run / "step-4")
    with pytest.raises(UserError):
        (mdlm.load if name.startswith("model") else resume)(run / "step-4")
    save_file({former(name): t for name, t in tensors.items()}, path)
    sign(run / "step-4")
    (mdlm.load if name.startswith("model") else resume)(run / "step-4")


def change_config(run, changes):
    path = run / "step-4" / "config.json"
    content = json.loads(path.read_text())
    content["config"] |= changes
    path.write_text(json.dumps(content))
    sign(run / "step-4")


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(n_layer=10**9), "config"),
        (dict(conv=10**7), "config"),
        (dict(pos="learned", block_size=10**7), "config"),
        (dict(n_layer=3), "config"),
        (dict(block_size=8192, pos="learned"), "config"),
        (dict(n_embd=-32), "n_embd"),
        (dict(n_layer="2"), "n_layer"),
        (dict(dropout=float("nan")), "dropout"),
        (dict(learning_rate=float("inf")), "learning_rate"),
        (dict(objective="x" * 10**6), "objective"),
        (dict(mask_schedule="unheard_of"), "unheard_of"),
        (dict(n_layers=2), "n_layers"),
        (dict(__class__="os"), "__class__"),
    ],
)
def test_forged_config_is_refused(run, changes, word):
    change_config(run, changes)
    with bounded(seconds=10), pytest.raises(UserError, match=word):
        mdlm.load(run / "step-4")


@pytest.mark.parametrize("n", [-1, 1, 20_000])
def test_a_tokenizer_of_another_size_is_refused(run, n):
    """Though the manifest was signed again."""
    path = run / "step-4" / "tokenizer.json"
    tokenizer = tokenizer_from_json(path)
    V = tokenizer.vocab_size
    more = [chr(0x4E00 + i) for i in range(n)]
    changed = Tokenizer("char", tokenizer.vocab[: V + min(n, 0)] + more, tokenizer.end)
    path.write_bytes(changed.to_file().encode())
    sign(path.parent)
    with pytest.raises(UserError, match="does not fit"):
        mdlm.load(run / "step-4")


@pytest.mark.parametrize(
    "file, old, new, word",
    [
        ("config.json", b'"version": 1', b'"version": 2', "version 2"),
        ("config.json", b'"format": "mdlm"', b'"format": "gpt"', "'gpt'"),
        ("tokenizer.json", b'"version":"1.0"', b'"version":"1.0","new":1', "tokenizer.json"),
    ],
)
def test_other_formats_and_versions_are_refused(run, file, old, new, word):
    content = (run / "step-4" / file).read_bytes()
    assert old in content
    (run / "step-4" / file).write_bytes(content.replace(old, new, 1))
    sign(run / "step-4")
    with pytest.raises(UserError, match=word):
        mdlm.load(run / "step-4")


@pytest.mark.parametrize("name", ["../bashrc", "/tmp/bashrc", "..", "a\\b", "c:b"])
def test_manifest_names_nothing_outside_of_its_checkpoint(run, name):
    """So no export of it writes elsewhere."""
    folder = run / "step-4"
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = dict(size=0, sha256=hashlib.sha256(b"").hexdigest())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError):
        mdlm.load(folder)
    with pytest.raises(UserError):
        checkpoint.find_checkpoint(folder)


@pytest.mark.parametrize("name", checkpoint.MODEL_FILES)
def test_manifest_must_name_every_file(run, name):
    path = run / "step-4" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"][name]
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"lacks.*{name}"):
        mdlm.load(run / "step-4")


@pytest.mark.parametrize(
    "latest",
    [
        b"../../x",
        b"/etc",
        b"step-4/../../x",
        b"\xff\xfe\x00",
        b"step-99",
        b"",
        b"step-2\n",
        1 << 40,
    ],
)
def test_latest_names_only_the_runs_checkpoints(run, tmp_path, latest):
    shutil.copytree(run / "step-2", tmp_path / "x")
    if isinstance(latest, int):
        os.truncate(run / "latest", latest)  # a file of a terabyte, full of holes
    else:
        (run / "latest").write_bytes(latest)
    with bounded(seconds=5):
        found = checkpoint.find_checkpoint(run)
    assert found == run / ("step-2" if latest == b"step-2\n" else "step-4")


def test_links_are_not_followed(run, tmp_path):
    """A run that removes what is named like a checkpoint of it removes links alone."""
    shutil.copytree(run / "step-4", tmp_path / "precious")
    for link in ("step-1", ".mdlm-tmp-stale"):
        (run / link).symlink_to(tmp_path / "precious")
    os.mkfifo(run / "step-0")
    assert run_mdlm("--resume", f"--out_dir={run}", "--max_steps=5") == 0
    assert sorted(p.name for p in checkpoint.checkpoints(run)) == ["step-4", "step-5"]
    assert len(list((tmp_path / "precious").iterdir())) == 6
    assert not (run / ".mdlm-tmp-stale").is_symlink() and (run / "step-0").exists()


@pytest.mark.parametrize("name", ["step", "seconds", "ending", "finished", "tokens", "saving"])
@pytest.mark.parametrize("value", ["x", None, -5, [1], math.nan])
def test_damaged_state_is_refused(run, name, value):
    path = run / "step-4" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    sign(run / "step-4")
    with pytest.raises(UserError, match=name):
        checkpoint.read_state(run / "step-4")


@pytest.mark.parametrize(
    "name, content",
    [
        ("config.json", None),
        ("tokenizer.json", b"[" * 10**6),
        ("state.json", b"9" * 10**5),
    ],
)
def test_endless_json_is_refused_unread(run, name, content):
    step = run / "step-4"
    if content is None:  # a file of a terabyte, full of holes
        os.truncate(step / name, 1 << 40)
        files = {n: dict(size=1 << 40, sha256="") for n in CHECKPOINT_FILES}
        manifest = dict(format="mdlm", version=1, files=files)
        (step / "manifest.json").write_text(json.dumps(manifest))
    else:
        (step / name).write_bytes(content)
        sign(step)
    with bounded(seconds=5), pytest.raises(UserError, match=name):
        mdlm.load(step)
        resume(step)


@pytest.mark.parametrize(
    "change",
    [dict(format="x"), dict(version=2), dict(files=[]), dict(files={"config.json": 5}), []],
)
def test_manifest_of_other_content_is_refused(run, change):
    folder = checkpoint.checkpoints(run)[0]
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | change if isinstance(change, dict) else change))
    with pytest.raises(UserError):
        checkpoint.verify(folder)
