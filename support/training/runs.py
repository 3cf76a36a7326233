"""A run apart from its steps: its flags and folder, where it resumes and ends, what it saves."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors

from support import files, outputs, ownership, pretrained, ranks, settings
from support.data import sources
from support.data.tokenizer import KINDS
from support.errors import UserError
from support.settings import NO_LIMIT
from support.terminal import warn
from support.training import checkpoint, scores, shards


def check(config, world=1):
    """Raise UserError for a config that cannot work on `world` ranks."""
    settings.check(config)
    pretrained.check(config)
    heads = 2 * config.n_head
    if config.n_embd % heads and not config.network:
        raise UserError(f"--n_embd={config.n_embd} must be a multiple of {heads}, twice --n_head")
    divisor = 2 * world * config.gradient_accumulation_steps
    if config.batch_size % divisor:
        why = f"2 (mirrored pairs) x {world} rank(s) x --gradient_accumulation_steps"
        raise UserError(f"--batch_size={config.batch_size} must be a multiple of {divisor}: {why}")
    if config.tokenizer not in KINDS and not config.tokenizer.endswith(".json"):
        accepted = f"{', '.join(KINDS)} or a tokenizer.json"
        raise UserError(f"--tokenizer={config.tokenizer} is not accepted; give {accepted}")
    sources.check_patterns(config)
    if config.chat_column and config.prompt_column != config.chat_column:
        both = f"--chat_column={config.chat_column} and --prompt_column={config.prompt_column}"
        raise UserError(f"{both} contradict each other; give one of them")
    if config.prompt_column == config.text_column and not config.chat_column:
        raise UserError(f"--prompt_column={config.prompt_column} is --text_column; name two")


# What --resume may change of the numbers that a run computes. The log says so.
CHANGEABLE = ("batch_size", "learning_rate", "muon_lr", "weight_decay", "grad_clip", "dtype")


def choose_end(config, given, before):
    """Set config.max_steps and time_limit by the given flags and the Config `before`.

    before: of the preset, or of the run that is resumed. If it ends by steps alone or by the clock
    alone, and the other flag is given, that one alone ends the run. --time_limit=0 without
    --max_steps gives the default number of steps.
    """
    config.max_steps = given.get("max_steps", before.max_steps)
    config.time_limit = given.get("time_limit", before.time_limit)
    if "max_steps" in given and "time_limit" not in given and before.max_steps == NO_LIMIT:
        config.time_limit = 0.0
    if config.time_limit and not before.time_limit and "max_steps" not in given:
        config.max_steps = NO_LIMIT
    if not config.time_limit and "max_steps" not in given and config.max_steps == NO_LIMIT:
        config.max_steps = type(config).max_steps


def check_end(given, old, folder):
    """Raise UserError for a given --max_steps or --time_limit that the run has passed already.

    folder: its checkpoint, with Config `old`. The run's own values are accepted: torchrun repeats
    them, after a crash at the very end.
    """
    state = checkpoint.read_state(folder)
    step = state["step"]
    seconds = state["seconds"]
    steps = given.get("max_steps", old.max_steps)
    limit = given.get("time_limit") or old.time_limit
    if steps != old.max_steps and steps < step:
        raise UserError(f"--max_steps={steps}, but {folder} has made {step} steps; give more")
    if limit != old.time_limit and limit < seconds:
        took = f"but {folder} has taken {seconds:.0f} s"
        raise UserError(f"--time_limit={limit:g}, {took}; give more")


def inherited(given, known):
    """The architecture of the run or checkpoint that --init_from names, for a new run; {} else.

    known: the names of all settings
    """
    source = given.get("init_from")
    if not source or pretrained.is_foreign(source):
        return {}
    folders = [Path(source), *checkpoint.checkpoints(source)]
    path = next((p / "config.json" for p in folders if (p / "config.json").exists()), None)
    if path is None:
        return {}  # load says what is missing
    was = checkpoint.read_settings(path, known)
    return {name: was[name] for name in (*NETWORK, "block_size") if name in was}


def find_run(given):
    """(the given flags, the checkpoint to resume from or None).

    --resume is true or false in the flags that are returned: the first rank decides for "auto".
    """
    out = Path(given.get("out_dir", "out"))
    if given.get("resume"):
        check_resume(given)
    if given.get("resume") == "auto":
        given = given | {"resume": ranks.ask_first_rank(holds_run, out)}
    if not given.get("resume"):
        return given, None
    return given, ranks.ask_first_rank(find_to_resume, out)  # it reads all of the checkpoint


def holds_run(out):
    """Whether a run has saved a checkpoint in `out`, perhaps a damaged one."""
    return any(map(ownership.is_checkpoint, checkpoint.checkpoints(out)))


def find_to_resume(out):
    """The checkpoint that --resume continues; UserError if there is none."""
    check_cut_off(out)
    real = Path(os.path.realpath(out))
    if ownership.is_checkpoint(real):
        run = real.parent
        fix = f"its run, --out_dir={run}, or " if ownership.is_run(run) else ""
        what = f"--out_dir={out} is a checkpoint, in which no run continues"
        raise UserError(f"{what}; give {fix}a new --out_dir and --init_from={out}")
    return checkpoint.find_checkpoint(out)


def check_ranks(config):
    """Raise UserError if the ranks have come to different settings."""
    shown = dataclasses.asdict(config) | dict(device="")  # GPUs of a machine have numbers
    fix = "give all ranks the same --preset and files"
    ranks.check_equal(repr(shown), f"the ranks would train different models; {fix}")


def check_unused(given, out):
    """Raise UserError if a new run would meet another one in its folder."""
    if holds_run(out) and not (given.get("resume") or given.get("overwrite")):
        fix = "give --resume to continue it, --overwrite to replace it, or another --out_dir"
        raise UserError(f"--out_dir={out} already holds a run; {fix}")


def claim(config, folder):
    """Lock the folder of a run; UserError if that would replace what is not the run's own."""
    out = Path(config.out_dir)
    if not folder:
        check_place(config, out)
    checkpoint.claim_run_dir(out)
    is_kept = folder and (out / "data" / "meta.json").exists()
    ownership.check_run(out, prepares=not (is_kept or sources.is_ids(config.data)))


def check_place(config, out):
    """Raise UserError if a new run in `out` would change what it reads, or what is not its own."""
    why = "" if ownership.is_run(out) else outputs.why_not(out / "latest")
    if why:
        raise UserError(f"--out_dir={out} {why}; give another --out_dir")
    for name in ("data", "tokenizer"):
        path = Path(getattr(config, name))
        if path.is_dir() and sources.is_records(path) and outputs.is_same(path, out):
            raise UserError(f"--out_dir={out} would change --data={path}; give another --out_dir")
        inside = os.path.lexists(path) and outputs.is_same(os.path.dirname(path) or ".", out)
        if inside and path.name.casefold() in outputs.RUN_NAMES:
            raise UserError(f"--{name}={path} would be replaced; give another --out_dir")


def check_resume(given):
    """Raise UserError for --resume and --overwrite together."""
    if given.get("overwrite"):
        raise UserError("--resume and --overwrite contradict each other; give one of them")


def check_cut_off(out):
    """Raise UserError for checkpoints that --overwrite had begun to replace."""
    if checkpoint.read_latest(out) == ownership.OVERWRITING:
        before = f"remove {out}/latest to go on with the run before, if it had the same data"
        fix = f"give --overwrite again, or {before}"
        raise UserError(f"--overwrite was cut off in {out} before it saved; {fix}")


def resumed(old, given, folder, resumable):
    """The Config `old` of a checkpoint with the given flags, and what they change of its numbers.

    resumable: the flags that may change beside CHANGEABLE. The changes: name -> (old, new).
    """
    out = given.get("out_dir", "out")
    changes = {}
    for name, value in given.items():
        was = getattr(old, name)
        if name in CHANGEABLE:
            if value not in (was, "auto"):
                changes[name] = value
        elif name in resumable:
            changes[name] = value
        elif value not in (was, "auto") and not is_same_path(name, value, was):
            fix = "leave the flag out, or start again with --overwrite"
            was = "none" if was == "" else was
            raise UserError(f"--{name}={value} contradicts the run in {out}, with {was}; {fix}")
    check_end(given, old, folder)
    config = dataclasses.replace(old, **changes | dict(out_dir=str(out), overwrite=False))
    choose_end(config, given, old)
    return config, {k: (getattr(old, k), v) for k, v in changes.items() if k in CHANGEABLE}


def is_same_path(name, value, was):
    """Whether two values of a setting name the same file or folder."""
    if name not in ("data", "tokenizer", "init_from", "network") or not (value and was):
        return False
    if {value, was} & {*sources.BUILT_IN, *KINDS}:  # these name no file
        return False
    with contextlib.suppress(OSError):
        return os.path.samefile(value, was)
    return os.path.abspath(value) == os.path.abspath(was)  # it is gone


def check_source(config, given):
    """Raise UserError for flags that do not go with where the data or the weights come from."""
    if config.prompt_column and not sources.is_records(config.data):
        flag = "--chat_column" if config.chat_column else "--prompt_column"
        raise UserError(f"--data={config.data} has no columns; leave {flag} out")
    if config.init_from and "tokenizer" in given:
        raise UserError("--init_from brings a tokenizer; leave --tokenizer out")
    if config.init_from:
        checkpoint.check_source(config.init_from)


def data_folder(config):
    """Where the ids of a run are: --data itself, or what is prepared of it in out_dir."""
    if sources.is_ids(config.data):
        return Path(config.data)
    return Path(config.out_dir) / "data"


def is_prepared(config, folder):
    """Whether the run that resumes from `folder` (None: a new one) has prepared its data.

    It goes on with these, even if their source has changed.
    """
    data = data_folder(config)
    if not folder or not (data / "meta.json").exists():
        return False
    with explain_data(folder):
        has_changed = sources.has_changed(config.data, data)
    if has_changed:
        warn(f"--data={config.data} has changed; the run goes on with what it learned")
    return True


@contextlib.contextmanager
def explain_data(folder):
    """Context manager: say what to do if a run that resumes from `folder` has unusable data."""
    try:
        yield
    except UserError as e:
        if not folder:
            raise
        what = str(e).rpartition("; ")[0] or e  # without the advice for data of others
        fix = "restore it, or start again with --overwrite"
        raise UserError(f"the data of the run cannot be used: {what}; {fix}") from e


def check_identity(config, identity, folder):
    """Raise UserError if data are not those that the checkpoint `folder` (or None) has learned.

    identity: of a Corpus.
    """
    state = checkpoint.read_state(folder) if folder else {}
    if any(state.get(name, value) != value for name, value in identity.items()):
        fix = "restore it, or start again with --overwrite"
        data = data_folder(config)
        raise UserError(f"--data={config.data}: {data} is not what {folder} learned; {fix}")


def check_ranks_data(config, identity):
    """Raise UserError if the ranks have opened different data."""
    fix = "give a folder that all share"
    sentence = f"the ranks see different data in {data_folder(config)}; {fix}"
    ranks.check_equal(sorted(identity.items()), sentence)


# Settings that must be those of the network that --init_from names.
NETWORK = ("n_layer", "n_head", "n_embd", "attention_every", "conv", "pos", "tie")
NETWORK += ("time_conditioning",)


def check_network(config, source):
    """Raise UserError unless the network of --init_from is that of `config`."""
    positions_are_ours = config.pos == "learned" and not config.network
    names = NETWORK + ("block_size",) * positions_are_ours
    different = [name for name in names if getattr(source[2], name) != getattr(config, name)]
    if different:
        values = " and ".join(f"{name}={getattr(source[2], name)!r}" for name in different)
        raise UserError(f"--init_from={config.init_from} has {values}; give the same here")
    with_end = source[1].end_id is not None
    if not sources.is_ids(config.data) and with_end != sources.has_documents(config):
        what = "documents; give such data" if with_end else "a text without [END]; give a text"
        raise UserError(f"--init_from={config.init_from} was trained on {what}")


@torch.no_grad()
def load_weights(run, source):
    """Start from the weights of `source`: None, or (model, tokenizer, config) of --init_from."""
    if not source:
        return
    model, tokenizer, _ = source
    digest = hashlib.sha256()
    for p in model.state_dict().values():
        digest.update(p.contiguous().view(-1).view(torch.uint8).numpy())
    fix = "give a checkpoint that all share, such as RUN/step-100: a run that trains makes new ones"
    sentence = f"the ranks see different weights in --init_from={run.config.init_from}; {fix}"
    ranks.check_equal(digest.hexdigest(), sentence)
    if tokenizer.to_json() != run.corpus.tokenizer.to_json():
        what = f"--init_from={run.config.init_from}"
        raise UserError(f"{what} has other tokens than {run.config.data}; give text")
    for into in (run.model, run.averaged):
        for p, whole in zip(into.parameters(), model.parameters()):
            shards.fill(p, whole)


def begin(run, folder):
    """Load the checkpoint `folder`, if there is one, and begin the log."""
    weights = sum(p.numel() for p in run.model.parameters())
    run.saving = 20 * weights / 2e8  # a guess until one is measured: their bytes at 200 MB/s
    if folder:
        state = checkpoint.restore(folder, run.model, run.averaged, run.optimizers)
        run.score = scores.from_manifest(folder) or scores.from_log(folder)
        for name in ("step", "seconds", "ending", "finished", "saving"):
            setattr(run, name, state[name])
        run.saved = run.step
        batch_size, _ = run.changed.get("batch_size", (run.config.batch_size, 0))
        run.begun = (run.step, state.get("sequences", run.step * batch_size))
    manifest = (folder / "manifest.json").read_bytes() if folder else b""  # of all its files
    fix = "give an --out_dir that all share"
    ranks.check_equal(manifest, f"the ranks see different checkpoints in {folder}; {fix}")
    if folder:
        ranks.on_first_rank(lambda: checkpoint.finish_removal(run.config.out_dir, folder))
    last = run.step if folder else -1
    run.log.start_tracker(run.config, last)
    if run.config.overwrite:
        ranks.on_first_rank(lambda: checkpoint.mark_overwriting(run.config.out_dir))
    run.saved_at = time.monotonic()
    run.log.begin(last)
    run.log.note_tracker(run)
    if run.changed:
        run.log.changes(run)
    run.log.restart_clock(run.tokens)


def advice(run):
    """What to do when numbers are not finite: flags that the run accepts."""
    config = run.config
    fixes = ["a lower --learning_rate"]
    if config.optimizer == "muon":
        fixes[0] += " and --muon_lr"
    if not config.grad_clip:
        fixes.append("--grad_clip=1")
    if run.dtype != torch.float32:
        fixes.append("--dtype=float32")
    return go_on(run, ", or ".join(fixes))


def go_on(run, fix):
    """How a run that ended goes on with other flags: a sentence."""
    config = run.config
    if run.saved < 0:
        overwrite = "--overwrite and " * config.overwrite
        return f"Nothing is saved yet; start again with {overwrite}{fix}"
    last = Path(config.out_dir) / f"step-{run.saved}"
    return f"The last good checkpoint is {last}; --resume with {fix}"


def save(run, finished=False):
    """Write out_dir/step-N: the averaged weights, and everything that --resume needs."""
    began = time.monotonic()
    state = dict(step=run.step, tokens=run.tokens, sequences=run.sequences(run.step))
    state |= dict(seconds=run.elapsed(), ending=run.ending)
    state |= dict(finished=finished, saving=run.saving)
    state |= run.corpus.identity
    weights = run.averaged.state_dict()
    tensors = checkpoint.training_tensors(run.model, run.averaged, run.optimizers)
    where = f"at step {run.step}: not saved. {advice(run)}"
    ranks.on_all_ranks(lambda: shards.check_finite(weights | tensors, where))
    if run.config.shard:
        with shards.saving(run.config.out_dir, weights, tensors) as files_of:
            ranks.on_first_rank(lambda: write(run, state, files_of()))
    else:
        ranks.on_first_rank(lambda: write(run, state, in_memory(weights, tensors)))
    run.saved = run.step
    run.finished = finished
    run.saved_at = time.monotonic()
    run.saving = run.saved_at - began
    run.log.restart_clock(run.tokens)


def in_memory(weights, tensors):
    """The files of a run without --shard, as bytes."""
    contents = {}
    for name, named in (("model", weights), ("state", tensors)):
        copies = {key: t.detach().cpu().contiguous() for key, t in named.items()}
        contents[f"{name}.safetensors"] = to_safetensors(copies)
    return contents


def write(run, state, tensors):
    """Write a checkpoint of a run; tensors: its safetensors files, bytes or Paths."""
    config = dict(format="mdlm", version=1, config=dataclasses.asdict(run.config))
    contents = {
        "config.json": json.dumps(config, indent=1).encode(),
        "tokenizer.json": run.corpus.tokenizer.to_file().encode(),
        "state.json": json.dumps(state).encode(),
    } | tensors
    if run.config.network:
        contents |= run.model.network.files()
    score = run.score | dict(loss=run.loss if math.isfinite(run.loss) else None)
    saved = checkpoint.write_checkpoint(run.config.out_dir, f"step-{run.step}", contents, score)
    if run.config.overwrite and run.saved < 0:  # the first one: the old run may go now
        with files.writing(saved):
            for old in checkpoint.checkpoints(run.config.out_dir):
                if old != saved and ownership.is_checkpoint(old):
                    files.remove(old)
