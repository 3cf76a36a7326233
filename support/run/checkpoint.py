"""Atomic checkpoint folders: config.json, tokenizer.json, model.safetensors and the training state.

A checkpoint is a folder out/step-N/ with a manifest of sizes and sha256. It is written under a
temporary name, synced and renamed, so it is complete or absent; `out/latest` names the newest and
the last two are kept. Weights are safetensors and the rest is JSON: nothing is ever unpickled.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors

from nanomdlm.support.abilities import uncompiled
from nanomdlm.support.cli import environment, files, hub
from nanomdlm.support.cli.files import STEP, read_latest
from nanomdlm.support.cli.python_arguments import check_vocabulary
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import shards

MODEL_FILES = ("config.json", "tokenizer.json", "model.safetensors")  # --resume needs more


# ---- Saving
def checkpoints(out_dir):
    """The checkpoint folders of a run: the one that `latest` names, then by descending step."""
    paths = [p.parent for p in Path(out_dir).glob("step-*/manifest.json")]
    folders = [p for p in paths if STEP.fullmatch(p.name)]
    latest = read_latest(out_dir)
    return sorted(folders, key=lambda p: (p.name != latest, -step_of(p), p.name))


def step_of(checkpoint):
    return int(re.search(r"\d+", checkpoint.name)[0])


def write_checkpoint(out_dir, name, contents, score=None):
    """Write `contents` as out_dir/name; keep it and the one before it.

    contents: dict of file name -> bytes, or the Path of a file that is moved there. score: of the
    model, for the manifest (checkpoint_score.py). Returns the path of the checkpoint. Whenever the
    process is killed, the last complete checkpoint still exists.
    """
    final = Path(out_dir) / name
    with files.writing(final):
        with files.new_folder(out_dir) as tmp:
            write_files(tmp, contents, score)
            swap(tmp, final)
        files.sync(out_dir)
        files.write_atomically(final.parent / "latest", name.encode())
        files.sync(out_dir)
        remove_all_but_two(final)
    return final


def describing(config, tokenizer, model):
    """The files of a checkpoint that describe its weights, name -> bytes."""
    content = dict(format="mdlm", version=1, config=dataclasses.asdict(config))
    if calibration := getattr(model, "calibration", None):
        content["calibration"] = calibration
    contents = {"config.json": json.dumps(content, indent=1).encode()}
    contents["tokenizer.json"] = tokenizer.to_file().encode()
    return contents | (model.network.files() if config.network else {})


@torch.no_grad()
def save(folder: str | Path, model: torch.nn.Module, tokenizer: Tokenizer, config: object) -> None:
    """Write a checkpoint folder, from which mdlm.load and --init_from read the model.

    It is written under another name and renamed, so that it is complete or absent. Raises UserError
    if there is something of this name, weights are not finite, the tokenizer is another model's, or
    the model is several networks.
    """
    check_vocabulary(tokenizer, model)
    if hasattr(model, "networks"):
        raise UserError("the model is several networks; save each of model.networks")
    model = uncompiled(model)
    folder = Path(folder)
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists; give the name of a new folder")
    weights = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    for name, t in weights.items():
        if not t.isfinite().all():
            raise UserError(f"{name} is not finite: {folder} is not saved")
    contents = describing(config, tokenizer, model)
    contents["model.safetensors"] = to_safetensors(weights)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.writing(folder), files.new_folder(folder.parent) as tmp:
        write_files(tmp, contents, {})
        os.rename(tmp, folder)
        files.sync(folder.parent)


def calibrate(folder, calibration):
    """Put a calibration, a dict, into the config.json of a checkpoint.

    A copy takes the place of the folder, so that the checkpoint is never damaged.
    """
    manifest = files.read_json(folder / "manifest.json", "manifest")
    config = files.read_json(folder / "config.json", "config") | dict(calibration=calibration)
    with files.writing(folder), files.new_folder(folder.parent) as tmp:
        shutil.copytree(folder, tmp, dirs_exist_ok=True)
        content = json.dumps(config, indent=1).encode()
        files.write_synced(tmp / "config.json", content)
        about = dict(size=len(content), sha256=files.sha256_of(tmp / "config.json"))
        manifest["files"]["config.json"] = about
        files.write_synced(tmp / "manifest.json", json.dumps(manifest, indent=1).encode())
        for path in tmp.rglob("*"):
            files.sync(path)
        files.sync(tmp)
        swap(tmp, folder)
        files.remove(folder.with_name(f"{folder.name}.old"))
        files.sync(folder.parent)


def swap(new, final):
    """Rename a folder to `final`; one that is there becomes final.old."""
    if final.exists():  # the same step again, or a damaged one
        old = final.with_name(f"{final.name}.old")
        files.remove(old)
        os.rename(final, old)
    os.rename(new, final)


def write_files(folder, contents, score):
    """Write the files of a checkpoint, and the manifest of their sizes and checksums."""
    listed = {}
    for file, content in contents.items():
        if isinstance(content, Path):
            os.rename(content, folder / file)
            files.sync(folder / file)
        else:
            files.write_synced(folder / file, content)
        size = (folder / file).stat().st_size
        listed[file] = dict(size=size, sha256=files.sha256_of(folder / file))
    manifest = dict(format="mdlm", version=1, files=listed) | dict(score=score or {})
    files.write_synced(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
    files.sync(folder)


def remove_all_but_two(final, newer=True):
    """Keep `final` and the checkpoint before it. Newer ones belong to a run that was rolled back;
    whether they go too."""
    folders = checkpoints(final.parent)
    earlier = [p for p in folders if step_of(p) < step_of(final)]
    before = max(earlier, key=lambda p: (step_of(p), p.suffix != ".old"), default=final)
    for other in folders:
        if other not in (final, before) and (newer or step_of(other) <= step_of(final)):
            files.remove(other)


def finish_removal(out_dir, folder):
    """Remove what the save of `folder` would have removed, had its run not been killed before.

    Newer ones stay until the run saves: whether it was rolled back is not known.
    """
    if folder.name == read_latest(out_dir):
        with files.writing(folder):
            remove_all_but_two(folder, newer=False)


# ---- Reading
def verify(folder):
    """Raise UserError unless every file has the size and sha256 that the manifest names."""
    try:
        manifest = files.read_json(folder / "manifest.json", "manifest")
        if (manifest["format"], manifest["version"]) != ("mdlm", 1):
            raise ValueError("manifest.json is not of version 1 of format 'mdlm'")
        for name in sorted({*MODEL_FILES, *manifest["files"]}):
            wanted = manifest["files"][name]
            if name in ("", ".", "..") or re.search(r"[/\\:\0]", name):
                raise ValueError(f"manifest.json names {name!r}, which is not in the checkpoint")
            size = (folder / name).stat().st_size
            if size != wanted["size"] or name.endswith(".json") and size > files.most_bytes(name):
                raise ValueError(f"{name} has {size} bytes, which is a wrong size")
            if files.sha256_of(folder / name) != wanted["sha256"]:
                raise ValueError(f"{name} does not have the checksum of the manifest")
    except (UserError, OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        why = f"manifest.json lacks {e}" if isinstance(e, KeyError) else e
        raise UserError(f"the checkpoint {folder} is damaged or incomplete: {why}") from e


def find_checkpoint(path):
    """The newest intact checkpoint of a run, or `path` itself; warns about damaged ones."""
    return read_newest(path, lambda folder: None)[0]


def read_newest(path, read):
    """(folder, read(folder)) of the newest intact checkpoint of a run, or of `path` itself, which
    may also be a model of the transformers library, or the name of one (hub.local).

    A run may be training there: if it replaces or removes a checkpoint that is being read, the
    newest one is looked for again. UserError if there is none, or if read(folder) raises one.
    """
    path = Path(path) if os.path.isdir(path) else hub.local(path)
    if (path / "manifest.json").exists():
        verify(path)
        return path, read(path)
    if is_export(path) or is_foreign(path):
        return path, read(path)
    while True:
        with contextlib.suppress(Changed):
            folder = find_intact(path)
            with unchanged(folder):
                return folder, read(folder)


def find_intact(out_dir):
    """The newest intact checkpoint of a run; warns about damaged ones. May raise Changed."""
    folders = checkpoints(out_dir)
    for folder in folders:
        try:
            with unchanged(folder):
                verify(folder)
            return folder
        except UserError as e:
            warn(f"{e}; trying the one before it")
    what = f"{out_dir} holds no intact checkpoint of mdlm.py"
    inside = sorted(path.parent.name for path in Path(out_dir).glob("*/manifest.json"))
    if inside and not folders:
        raise UserError(f"{what}; give {' or '.join(f'{out_dir}/{name}' for name in inside)}")
    command = f"{environment.command('mdlm.py')} --out_dir={environment.quote(out_dir)}"
    raise UserError(f"{what}; train one with: {command}{' --overwrite' * bool(folders)}")


class Changed(Exception):
    """A checkpoint was replaced or removed while it was read."""


@contextlib.contextmanager
def unchanged(folder):
    """Context manager: raise Changed if a run replaces a checkpoint that is read, or removes it."""
    before = identity(folder)
    try:
        yield
    except (UserError, OSError):
        if before is None or identity(folder) != before:
            raise Changed from None
        raise
    if identity(folder) not in (before, None):  # None: removed after all of it was read
        raise Changed


def identity(folder):
    """An identity that distinguishes a folder from a later one of the same name, or None."""
    with contextlib.suppress(OSError):
        about = os.stat(folder)
        return about.st_dev, about.st_ino, about.st_mtime_ns
    return None


def check_source(name):
    """Raise UserError for an --init_from that does not exist."""
    if not Path(name).exists():
        fix = "give the folder of a run or of a model, FILE.gguf, or OWNER/NAME of a hub"
        raise UserError(f"--init_from={name} does not exist; {fix}")


SHIPPED = Path(__file__).parent.parent.parent / "weights" / "shakespeare"


def default_run(out_dir):
    """out_dir if it is given, else out/ if it has a run, else the included model."""
    if out_dir or checkpoints("out") or not SHIPPED.is_dir():
        return Path(out_dir or "out")
    return SHIPPED


def is_export(folder):
    """Whether a folder is an export of our own network by export.py --to=hf."""
    with contextlib.suppress(UserError):
        return files.read_json(folder / "config.json", "config").get("model_type") == "mdlm"
    return False


def is_foreign(folder):
    """Whether a folder holds a model of the transformers library, not an export of ours."""
    with contextlib.suppress(UserError):
        content = files.read_json(Path(folder) / "config.json", "config")
        return isinstance(content.get("model_type"), str) and content["model_type"] != "mdlm"
    return False


def settings_of_export(content, known):
    """The settings of the network in the config.json of an export; all others have defaults."""
    ours = {name: content[name] for name in known if name in content}
    ours.pop("vocab_size", None)  # that of the library counts [MASK] and [PAD]
    is_given = content.get("end_id", -1) >= 0 and not content.get("prompt_column")
    return ours | dict(document_length="given" if is_given else "predicted")


def upgraded(config):
    """The settings in a config.json of an earlier version, by their current names."""
    config = dict(config)
    for old, new in dict(log="tracker", whole="infill_share", lengths="document_length").items():
        if old in config:
            value = config.pop(old)
            config[new] = dict(known="given", learned="predicted").get(str(value), value)
    if {"mask_schedule", "min_rate", "max_rate"} & config.keys():
        schedule = config.pop("mask_schedule", "linear")
        span = f"{config.pop('min_rate', 0.0)}-{config.pop('max_rate', 1.0)}"
        config["rates"] = span if schedule == "linear" else f"{schedule}:{span}"
    if "end_id" in config or "end_token" in config:
        end = str(config.pop("end_id", -1))
        config["end"] = config.pop("end_token", "") or ("" if end == "-1" else end)
    return config


def read_settings(path, known):
    """The settings in a config.json, a dict; known: the names that there are.

    A setting that the file lacks is newer than the file and takes its default, which must then
    reproduce what the program did before.
    """
    content = files.read_json(path, "config")
    if content.get("model_type") == "mdlm":
        return settings_of_export(content, known)
    kind, version, settings = (content.get(key) for key in ("format", "version", "config"))
    if (kind, version) != ("mdlm", 1) or not isinstance(settings, dict):
        raise UserError(f"{path} has version {version!r} of format {kind!r}, not 1 of mdlm")
    if settings.keys() - known:
        settings = upgraded(settings)
    for name in sorted(settings.keys() - known):
        raise UserError(f"{path} has a setting of another version: {name[:40]!r}")
    return settings


def read_calibration(folder):
    """The calibration in the config.json of a checkpoint or an export, a dict; None without one."""
    return files.read_json(folder / "config.json", "config").get("calibration")


def check_size(folder, config, tokenizer, network):
    """Raise UserError if a file of weights is too small for its config and tokenizer.

    network: a networks.Network; None: ours. A forged config must not allocate memory.
    """
    if network:
        network.fit(tokenizer)  # its sizes were compared when it was opened
        return
    path = folder / "model.safetensors"
    rows = tokenizer.vocab_size + config.n_layer * config.conv
    rows += config.block_size if config.pos == "learned" else 0
    least = config.n_embd * (8 * config.n_layer * config.n_embd + rows)
    if path.stat().st_size < 2 * least:  # a number has 2 or 4 bytes
        raise UserError(f"{path} does not fit its config: it is too small; train again")


def name_now(name):
    """The name of a tensor of a checkpoint: the layers were called blocks once, and exports put
    model. in front."""
    return re.sub(r"^(raw\.)?blocks\.", r"\1layers.", name.removeprefix("model."))


@contextlib.contextmanager
def explain_safetensors(path):
    """Context manager: turn what reading a safetensors file raises into a UserError."""
    try:
        yield
    except (SafetensorError, OSError, KeyError, OverflowError, MemoryError) as e:
        raise UserError(f"{path} is not a safetensors file: {e}") from e


def names_in(path):
    """Name of a tensor now -> its name in a safetensors file. UserError if one has two names."""
    with explain_safetensors(path), safe_open(path, "pt") as f:
        stored = list(f.keys())
    names = {name_now(name): name for name in stored}
    if len(names) < len(stored):
        raise UserError(f"{path} has a tensor twice; use an earlier checkpoint, or train again")
    return names


def read_tensors(path, expected=None, kinds=("F32",)):
    """A safetensors file as a dict; names and shapes must be those of `expected`, if that is given.

    kinds: the dtypes that these may have in the file; with `expected`, float32 is returned.
    """
    names = names_in(path)
    with explain_safetensors(path), safe_open(path, "pt") as f:
        slices = {name: f.get_slice(stored) for name, stored in names.items()}
        if expected is not None:  # compared before any tensor is read
            shapes = {name: s.get_shape() for name, s in slices.items() if s.get_dtype() in kinds}
            wanted = {name: list(t.shape) for name, t in expected.items()}
            for name in sorted(slices.keys() | wanted.keys()):
                if name not in wanted or shapes.get(name) != wanted[name]:
                    raise UserError(f"{path} does not fit its config: the tensor {name} differs")
        tensors = {name: f.get_tensor(stored) for name, stored in names.items()}
    if expected is not None:
        tensors = {name: t.float() for name, t in tensors.items()}
    for name, t in tensors.items():
        if t.is_floating_point() and not t.isfinite().all():
            raise UserError(f"{path}: {name} has numbers that are not finite")
    return tensors


def saved_buffers(model):
    """The names of a model's tensors that a checkpoint keeps besides the weights."""
    return model.state_dict().keys() & dict(model.named_buffers(recurse=False)).keys()


KINDS = ("F32", "BF16", "F16", "F64")  # dtypes of weights in a file


def read_weights(folder, model):
    """The weights of a checkpoint or an export, with the names and shapes of the model's."""
    if is_foreign(folder):  # the library has read them
        return model.state_dict()
    path = folder / "model.safetensors"
    if is_export(folder):
        return read_exported(path, model)
    return read_tensors(path, model.state_dict(), KINDS)


def read_exported(path, model):
    """The weights of a model of ours that export.py has written."""
    expected = model.state_dict()
    unknown = {name: torch.ones_like(expected.pop(name)) for name in saved_buffers(model)}
    stored = dict(expected)
    vocabularies = {"embed.weight", "head.weight"} & expected.keys()
    for name in vocabularies:  # a row for each id of the library, [MASK] and [PAD] among them
        C = expected[name].shape[1]
        stored[name] = torch.empty(model.vocab_size + 2, C, device="meta")
    tensors = read_tensors(path, stored, KINDS)
    for name in vocabularies:
        tensors[name] = tensors[name][: len(expected[name])]
    return tensors | unknown  # lengths of documents: all are as likely


def without_state(folder, dtype, exact):
    """The files of a checkpoint, name -> bytes, without what --resume needs besides the weights.

    dtype: the torch.dtype of the weights in the file. exact: names of tensors that keep theirs.
    """
    manifest = files.read_json(folder / "manifest.json", "manifest")
    state = re.compile(r"state\.json|state(-\d+-of-\d+)?\.safetensors")
    names = [name for name in manifest["files"] if not state.fullmatch(name)]
    contents = {name: (folder / name).read_bytes() for name in names}
    tensors = from_safetensors(contents["model.safetensors"])
    for name, t in tensors.items():
        if t.is_floating_point() and name_now(name) not in exact:
            tensors[name] = t.to(dtype)
    contents["model.safetensors"] = to_safetensors(tensors)
    manifest["files"] = {
        name: dict(size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
    return contents | {"manifest.json": json.dumps(manifest, indent=1).encode()}


def training_tensors(model, averaged, optimizers):
    """Name -> tensor: the optimizers' state, and the raw weights if averaged ones are saved too."""
    raw = model.named_parameters() if averaged is not model else ()
    tensors = {f"raw.{name}": p.detach() for name, p in raw}
    for i, optimizer in enumerate(optimizers):
        for j, slots in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer{i}.{j}.{name}": t for name, t in slots.items()}
    return tensors


def read_state(folder):
    """The JSON part of the training state, checked."""
    state = files.read_json(folder / "state.json", "training state")
    kinds = dict(step=int, tokens=int, sequences=int, finished=bool)
    kinds |= dict(seconds=float, ending=float, saving=float)
    for name, kind in kinds.items():
        value = (dict(tokens=0, sequences=0) | state).get(name)  # older states lack these
        if type(value) is not kind or not 0 <= value < 1 << 62:
            raise UserError(f"{folder}/state.json is damaged: {name} is {str(value)[:40]!r}")
    return state


@torch.no_grad()
def restore(folder, model, averaged, optimizers):
    """Load a checkpoint into the models and optimizers of a run; returns its state."""
    state = read_state(folder)
    if state["step"]:  # a step makes the optimizers' tensors; all it changes is overwritten below
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    into = training_tensors(model, averaged, optimizers)
    weights = averaged.state_dict()
    whole = folder / "state.safetensors"
    if whole.exists() and not shards.is_spread(next(model.parameters())):
        tensors = read_tensors(whole, into) | read_tensors(folder / "model.safetensors", weights)
        for name, t in (into | weights).items():
            t.copy_(tensors[name])
    else:
        parts = folder.glob("*.safetensors")
        stored = {now: name for part in parts for now, name in names_in(part).items()}
        into |= weights
        shards.load(folder, {stored.get(name, name): t for name, t in into.items()})
    return state
