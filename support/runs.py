"""What surrounds the training of a run: its flags and folder, clock, losses and checkpoints."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors

from support import checkpoint, files, outputs, ownership, runtime, scores, shards, sources
from support.cli import NO_LIMIT, UserError, check_fields, warn
from support.log import Log
from support.optimizers import average
from support.tokenizer import KINDS


@dataclasses.dataclass
class Run:
    """What the steps, reports and checkpoints of a run share."""

    config: object
    corpus: object
    model: torch.nn.Module
    averaged: torch.nn.Module  # the EMA of the weights, evaluated and saved; `model` if --ema=0
    optimizers: list
    device: torch.device
    dtype: torch.dtype  # of matrix products
    network: torch.nn.Module  # the model as it is trained: compiled, in DDP
    rank: int = 0
    world: int = 1
    average: Callable = average  # updates `averaged`
    windows: torch.Tensor = None  # (W, T) validation text
    compiler: object = None  # the process that compiles, until it is done
    log: Log = None
    step: int = 0  # steps done
    begun: tuple = (0, 0)  # the step that this process began with, the sequences learned before it
    changed: dict = dataclasses.field(default_factory=dict)  # on --resume: setting -> (old, new)
    progress: float = 0.0  # from 0 to 1, by steps or by time
    seconds: float = 0.0  # of the processes that this one resumes
    ending: float = 0.0  # seconds that the last evaluation and its samples will take
    evaluating: float = 0.0  # seconds that evaluations on the way have taken
    per_window: float = 0.0  # seconds to score a window once (0: not yet known)
    few_windows: int = 0  # that evaluations on the way score (0: not yet chosen)
    tenth: int = None  # of the run, when it was last asked for an evaluation
    saving: float = 0.0  # seconds that the last save took
    saved: int = -1  # step of the last checkpoint
    saved_at: float = 0.0  # time.monotonic() then
    save_is_due: float = 0.0  # whether that is long ago
    finished: bool = False  # whether that checkpoint is the end of a run
    pending: dict = dataclasses.field(default_factory=dict)  # step -> (loss, norm), not yet read
    loss: float = math.nan  # the last ones that were read
    grad_norm: float = math.nan
    score: dict = dataclasses.field(default_factory=dict)  # the last evaluation, for its checkpoint

    def __post_init__(self):
        self.new_share = torch.zeros((), device=self.device)  # of new weights, in the EMA

    def sequences(self, step):
        """How many sequences are learned before a step; --resume may have changed batch_size."""
        first, before = self.begun
        return before + (step - first) * self.config.batch_size

    @property
    def tokens(self):
        """Tokens of text in the steps done, on average: not what fills up windows of documents."""
        return round(self.sequences(self.step) * self.corpus.mean_size)

    @property
    def objective(self):
        return self.model.objective

    @property
    def micro_batch(self):  # sequences of this rank at a time
        return self.config.batch_size // self.world // self.config.gradient_accumulation_steps

    def elapsed(self):
        return time.monotonic() - self.log.start + self.seconds

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def check(config, world=1):
    """Raise UserError for a config that cannot work on `world` ranks."""
    check_fields(config)
    heads = 2 * config.n_head
    if config.n_embd % heads:
        raise UserError(f"--n_embd={config.n_embd} must be a multiple of {heads}, twice --n_head")
    parts = 2 * world * config.gradient_accumulation_steps
    if config.batch_size % parts:
        why = f"2 (mirrored pairs) x {world} rank(s) x --gradient_accumulation_steps"
        raise UserError(f"--batch_size={config.batch_size} must be a multiple of {parts}: {why}")
    if config.tokenizer not in KINDS and not config.tokenizer.endswith(".json"):
        accepted = f"{', '.join(KINDS)} or a tokenizer.json"
        raise UserError(f"--tokenizer={config.tokenizer} is not accepted; give {accepted}")
    text = (config.block_size, config.tokenizer, config.separator)
    if config.data == "patterns" and text != (64, "char", ""):
        why = "leave --block_size, --tokenizer and --separator out"
        raise UserError(f"--data=patterns has aligned sequences of 64 characters; {why}")
    if config.prompt_column == config.text_column:
        raise UserError(f"--prompt_column={config.prompt_column} is --text_column; name two")


# What --resume may change of the numbers that a run computes. The log says so.
CHANGEABLE = ("batch_size", "learning_rate", "muon_lr", "weight_decay", "grad_clip", "dtype")


def choose_end(config, given, before):
    """Set config.max_steps and time_limit: the given flags, over the end that was there `before`.

    before: the Config of the preset, or of the run that is resumed. If it ends by one of the two
    alone, the other flag replaces it: with --max_steps no clock enters, with --time_limit no
    number of steps. (A clock that is taken away, --time_limit=0, leaves the usual number.)
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
    """Raise UserError for an end that the run in `folder`, a checkpoint with Config `old`, is past.

    A value that the run had already is none: torchrun repeats it, after a crash at the very end.
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


def open_run(given, cls, new_config, check, world, resumable):
    """The `cls` of the given flags, the checkpoint to resume from (None: a new run), and what it
    changes: setting -> (old, new).
    """
    out = Path(given.get("out_dir", cls.out_dir))
    folder = None
    # torchrun repeats the flags that began the run.
    if not given.get("resume") and runtime.ask_first_rank(checkpoint.was_restarted, out):
        given = {k: v for k, v in given.items() if k != "overwrite"} | {"resume": True}
    if given.get("resume"):
        check_resume(given, out)
        folder = runtime.ask_first_rank(checkpoint.find_checkpoint, out)  # it reads all of it

    def make_config():
        if folder:
            made = resumed_config(given, cls, check, folder, out, resumable)
        else:
            made = new_config(given), {}
            check_source(made[0], given)
        check(made[0], world)
        shards.check(made[0].shard, world)
        check_unused(given, out)
        return made

    if not folder and "data" not in given:
        runtime.on_all_ranks(make_config)  # refuses what is wrong before a network is asked
        given = given | {"data": runtime.ask_first_rank(sources.default_data)}
    config, changed = runtime.on_all_ranks(make_config)
    shown = dataclasses.asdict(config) | dict(device="")  # GPUs of a machine have numbers
    fix = "give all ranks the same --preset and files"
    runtime.check_equal(repr(shown), f"the ranks would train different models; {fix}")
    runtime.on_first_rank(lambda: take(config, folder))
    return config, folder, changed


def check_unused(given, out):
    """Raise UserError if a new run would meet another one in its folder."""
    has_saved = any(map(ownership.is_checkpoint, checkpoint.checkpoints(out)))
    if has_saved and not (given.get("resume") or given.get("overwrite")):
        fix = "give --resume to continue it, --overwrite to replace it, or another --out_dir"
        raise UserError(f"--out_dir={out} already holds a run; {fix}")


def take(config, folder):
    """Lock the folder of a run, in which nothing but its own may be replaced."""
    out = Path(config.out_dir)
    if not folder:
        check_place(config, out)
    checkpoint.take(out)
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


def check_resume(given, out):
    """Raise UserError where --resume does not make sense."""
    if given.get("overwrite"):
        raise UserError("--resume and --overwrite contradict each other; give one of them")
    if checkpoint.read_latest(out) == ownership.OVERWRITING:
        before = f"remove {out}/latest to go on with the run before, if it had the same data"
        fix = f"give --overwrite again, or {before}"
        raise UserError(f"--overwrite was cut off in {out} before it saved; {fix}")


def resumed_config(given, cls, check, folder, out, resumable):
    """The config of a checkpoint with the given flags, and what they change of its numbers."""
    old = checkpoint.read_config(cls, folder / "config.json", check)
    changes = {}
    for name, value in given.items():
        was = getattr(old, name)
        if name in CHANGEABLE:
            if value not in (was, "auto"):
                changes[name] = value
        elif name in resumable:
            changes[name] = value
        elif value not in (was, "auto"):
            fix = "leave the flag out, or start again with --overwrite"
            raise UserError(f"--{name}={value} contradicts the run in {out}, with {was}; {fix}")
    check_end(given, old, folder)
    config = dataclasses.replace(old, **changes | dict(out_dir=str(out), overwrite=False))
    choose_end(config, given, old)
    return config, {k: (getattr(old, k), v) for k, v in changes.items() if k in CHANGEABLE}


def check_source(config, given):
    """Raise UserError for flags that do not go with where the data or the weights come from."""
    if config.prompt_column and not sources.is_records(config.data):
        raise UserError(f"--data={config.data} has no columns; leave --prompt_column out")
    if config.init_from and "tokenizer" in given:
        raise UserError("--init_from brings a tokenizer; leave --tokenizer out")
    if config.init_from:
        checkpoint.check_source(config.init_from)


def open_data(config, folder, device, prepare, corpus_of, source):
    """The corpus of config.data: a folder as it is; all else is prepared in out_dir/data.

    A run that resumes from `folder` finds its data there, and trains on nothing else. Other data is
    replaced only after the new one, with the tokenizer of `source`, has proved usable.
    """
    if source:
        check_network(config, source)
    data = Path(config.data)
    state = checkpoint.read_state(folder) if folder else {}

    def opened(path, device):
        try:
            corpus = corpus_of(path, config, device)
        except UserError as e:
            if not state:
                raise
            fix = "restore it, or start again with --overwrite"
            raise UserError(f"the data of the run cannot be used: {e}; {fix}") from e
        if any(state.get(name, value) != value for name, value in corpus.identity.items()):
            fix = "restore it, or start again with --overwrite"
            raise UserError(f"--data={config.data}: {path} is not what {folder} learned; {fix}")
        return corpus

    def fill(path):
        prepare(config, path, source[1] if source else None)
        opened(path, torch.device("cpu"))

    def make():
        if folder and (data / "meta.json").exists():
            if sources.has_changed(config.data, data):
                warn(f"--data={config.data} has changed; the run goes on with what it learned")
        else:
            files.replace_folder(data, fill)

    if not sources.is_ids(config.data):
        data = Path(config.out_dir) / "data"
        runtime.on_first_rank(make)
    corpus = runtime.on_all_ranks(lambda: opened(data, device))
    sentence = f"the ranks see different data in {data}; give a folder that all share"
    runtime.check_equal(sorted(corpus.identity.items()), sentence)
    if sources.is_ids(config.data) and not folder:
        runtime.on_first_rank(lambda: sources.say_left_out(data))
    return corpus


# Settings that must be those of the network that --init_from names.
NETWORK = ("n_layer", "n_head", "n_embd", "attention_every", "conv", "pos", "tie")
NETWORK += ("time_conditioning",)


def check_network(config, source):
    """Raise UserError unless the network of --init_from is that of `config`."""
    names = NETWORK + ("block_size",) * (config.pos == "learned")
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
    if tokenizer.to_json() != run.corpus.tokenizer.to_json():
        given = f"--init_from={run.config.init_from}"
        raise UserError(f"{given} has other tokens than {run.config.data}; give text")
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
            setattr(run, name, state.get(name, getattr(run, name)))  # older states lack "saving"
        run.saved = run.step
        batch_size, _ = run.changed.get("batch_size", (run.config.batch_size, 0))
        run.begun = (run.step, state.get("sequences", run.step * batch_size))
    if runtime.all_reduce(torch.tensor(float(run.step))) != run.step * run.world:
        raise UserError("the ranks see different checkpoints; give an --out_dir that all share")
    if run.config.overwrite:
        runtime.on_first_rank(lambda: checkpoint.disown(run.config.out_dir))
    run.saved_at = time.monotonic()
    run.log.begin(run.step if folder else -1)
    if run.changed:
        run.log.changes(run)
    run.log.restart_clock(run.tokens)


def check_finite(run):
    """Read the pending losses, averaged over ranks; UserError for NaN or inf on any rank."""
    if run.pending:
        values = torch.stack([*run.pending.values()]).cpu().double()
        values = (runtime.all_reduce(values) / run.world).tolist()
        for step, (loss, norm) in zip(run.pending, values, strict=True):
            if not math.isfinite(loss + norm):
                what = f"loss {loss}, gradient norm {norm} at step {step}: not kept."
                raise UserError(f"{what} {advice(run)}")
        run.pending.clear()
        run.loss, run.grad_norm = values[-1]


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
    fix = ", or ".join(fixes)
    if run.saved < 0:
        how = " with --overwrite and" * config.overwrite or " with"
        return f"Nothing is saved yet; start again{how} {fix}"
    last = Path(config.out_dir) / f"step-{run.saved}"
    return f"The last good checkpoint is {last}; --resume with {fix}"


def save(run, finished=False):
    """Write out_dir/step-N: the averaged weights, and everything that --resume needs."""
    check_finite(run)
    began = time.monotonic()
    state = dict(step=run.step, tokens=run.tokens, sequences=run.sequences(run.step))
    state |= dict(seconds=run.elapsed(), ending=run.ending)
    state |= dict(finished=finished, launch=runtime.launch_id(), saving=run.saving)
    state |= run.corpus.identity
    weights = run.averaged.state_dict()
    tensors = checkpoint.training_tensors(run.model, run.averaged, run.optimizers)
    where = f"at step {run.step}: not saved. {advice(run)}"
    runtime.on_all_ranks(lambda: shards.check_finite(weights | tensors, where))
    if run.config.shard:
        with shards.saving(run.config.out_dir, weights, tensors) as found:
            runtime.on_first_rank(lambda: write(run, state, found()))
    else:
        runtime.on_first_rank(lambda: write(run, state, in_memory(weights, tensors)))
    run.saved = run.step
    run.finished = finished
    run.saved_at = time.monotonic()
    run.saving = run.saved_at - began
    run.log.restart_clock(run.tokens)


def in_memory(weights, tensors):
    """The files of a run without --shard, as bytes."""
    found = {}
    for name, part in (("model", weights), ("state", tensors)):
        part = {key: t.detach().cpu().contiguous() for key, t in part.items()}
        found[f"{name}.safetensors"] = to_safetensors(part)
    return found


def write(run, state, tensors):
    """Write a checkpoint of a run; tensors: its safetensors files, bytes or Paths."""
    config = dict(format="mdlm", version=1, config=dataclasses.asdict(run.config))
    contents = {
        "config.json": json.dumps(config, indent=1).encode(),
        "tokenizer.json": run.corpus.tokenizer.to_json().encode(),
        "state.json": json.dumps(state).encode(),
    } | tensors
    score = run.score | dict(loss=run.loss if math.isfinite(run.loss) else None)
    saved = checkpoint.write_checkpoint(run.config.out_dir, f"step-{run.step}", contents, score)
    if run.config.overwrite and run.saved < 0:  # the first one: the old run may go now
        with files.writing(saved):
            for old in checkpoint.checkpoints(run.config.out_dir):
                if old != saved and ownership.is_checkpoint(old):
                    files.remove(old)
