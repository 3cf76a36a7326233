"""A run's surroundings: its ranks, settings, folder, data, log and clock; how it begins and ends.

    with open_session(Config, given, start) as session:
        ...

All ranks call the same functions in the same order. What may fail on one of them is a vote, by
ranks.together or ranks.first: its error is raised on all, so that none waits for another. Votes do
not nest, and no other collective operation is inside one.
"""

import contextlib
import hashlib
import json
import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors

from nanomdlm.support.cli import devices, environment, files, networks
from nanomdlm.support.cli.entry import is_out_of_memory
from nanomdlm.support.cli.signals import handlers_kept, signals_wait
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.data import sources, windows
from nanomdlm.support.data.texts import prepare
from nanomdlm.support.errors import RankError, UserError
from nanomdlm.support.run import (
    calibration,
    checkpoint,
    checkpoint_score,
    plots,
    ranks,
    shards,
    trackers,
)
from nanomdlm.support.run import config as settings_of_run
from nanomdlm.support.run import folder as run_folder
from nanomdlm.support.run.clock import Clock
from nanomdlm.support.run.log import Log, read_lines

CALIBRATION_WINDOWS = 32  # four masks of each
TRAINING = threading.Lock()  # held by the run: the state of the process belongs to it


@contextlib.contextmanager
def open_session(Config, given, start):
    """Context manager: the Session of a run with the given flags.

    At its end, the run's folder is unlocked, and removed if it is empty.

    Config: the dataclass of the settings. given: the flags, a dict of them. start:
    time.monotonic() when the process began
    """
    with process_of_a_run():
        rank, world, local_rank = ranks.join_ranks(given)
        config, resumed_from, changed = ranks.first(lambda: find(Config, given, world))
        config.device = given.get("device", config.device)  # each rank may have its own
        machine = ranks.together(lambda: use_machine(config, rank, local_rank, world))
        session = Session(config, resumed_from, changed, machine, start)
        with memory_explained(session), session.writer:  # it ends what it writes
            yield session
            session.wait_for_save()
        if session.log.tracker:
            session.log.tracker.close()
        if ranks.CONTROL:
            ranks.leave_ranks()


def find(Config, given, world):
    """Find or claim the folder of a run: (Config, checkpoint to resume from or None, changes)."""
    resumed_from = run_folder.find_to_resume(given)
    if given.get("resume") == "auto":
        given = given | dict(resume=bool(resumed_from))
    if resumed_from:
        before = settings_of_run.read(Config, resumed_from)
        config, changed = settings_of_run.resumed(before, given)
    else:
        before = Config
        changed = {}
        if "data" not in given:
            given = given | dict(data=sources.default_data())
        config = settings_of_run.new(Config, given)
        settings_of_run.check_source(config, given)
    config.check(world)
    settings_of_run.check_idle(config, given, before)
    if config.shard:
        shards.check(config.shard, world)
    if config.tracker != "none":
        environment.optional(config.tracker, f"--tracker={config.tracker}")
    run_folder.check_place(config, resumed_from)
    run_folder.lock(Path(config.out_dir))
    return config, resumed_from, changed


def use_machine(config, rank, local_rank, world):
    """The devices.Machine of this rank."""
    device = devices.use_device(config.device, local_rank, world)
    dtype = devices.pick_dtype(config.dtype, device)
    ops = devices.select_kernels(config.kernels, device, config, dtype)
    return devices.Machine(device, dtype, ops, rank, world)


class Session:
    """The surroundings of a run on this rank.

    config: its settings. resumed_from: the checkpoint that it continues, or None. machine: the
    devices.Machine
    """

    def __init__(self, config, resumed_from, changed, machine, start):
        self.config = config
        self.resumed_from = resumed_from
        self.changed = changed  # by --resume: setting -> (old, new)
        self.machine = machine
        self.log = Log(config, silent=machine.rank > 0)
        self.clock = Clock(config, start)
        self.ended_at = -1  # the step of the checkpoint, if it is the end of a run
        self.run = None
        self.held = None  # sources.Ids of the text that --calibration_share holds back
        self.writer = ThreadPoolExecutor(1)
        self.writing = None  # the Future of a checkpoint that is being written

    @property
    def is_over(self):
        """Whether nothing is left to do: the run had ended, and no step has been made since."""
        return self.run.step == self.ended_at

    def open_source(self, load):
        """(a networks.Network or None: ours, what load(--init_from) returns or None)."""
        config = self.config
        if not (config.network or config.init_from):
            return None, None

        def read():
            network = networks.open_network(config, self.resumed_from)
            has_weights = network is not None and network.folder is not None
            if self.resumed_from or not config.init_from or has_weights:
                return network, None
            source = load(config.init_from, trust_remote_code=config.trust_remote_code)
            settings_of_run.check_network(config, source)
            return network, source

        return ranks.together(read)

    # ---- Data
    def open_data(self, network, source):
        """The sources.Ids of config.data: a folder of ids as it is; all else is prepared in
        out_dir/data, with the tokenizer of `source` if there is one.

        Other data there is replaced only after the new one has proved usable.
        """
        config = self.config
        self.log.say("reading the data")
        is_prepared = sources.is_ids(config.data)
        folder = Path(config.data) if is_prepared else Path(config.out_dir) / "data"
        ranks.first(lambda: self.prepare(folder, network, source))
        ids = ranks.together(lambda: self.proved(folder, network))
        ranks.check_alike({f"{folder}'s {name}": value for name, value in ids.identity.items()})
        if share := config.calibration_share:
            T = config.block_size
            has_prompts = bool(config.prompt_column)
            ids, self.held = ranks.together(lambda: sources.hold_back(ids, share, T, has_prompts))
        return ids

    def prepare(self, folder, network, source):
        """Tokenize config.data into a folder, unless that is done."""
        config = self.config
        if sources.is_ids(config.data):
            return
        if self.resumed_from and (folder / "meta.json").exists():
            if sources.has_changed(config.data, folder):
                warn(f"--data={config.data} has changed; the run continues with the prepared copy")
            return
        with files.replacing(folder) as new:
            prepare(config, new, source and source[1], network)
            ids = self.proved(new, network)
            if ids.tokenizer.end_id is not None:
                windows.cut_windows(ids.arrays[0], config, ids.tokenizer.end_id)
            del ids  # it maps files that are renamed now

    def proved(self, folder, network):
        """The Ids in a folder; UserError unless these are what the checkpoint learned."""
        config = self.config
        ids = sources.of_config(folder, config)
        if network:
            network.fit_data(ids)
        state = checkpoint.read_state(self.resumed_from) if self.resumed_from else {}
        if any(state.get(name, value) != value for name, value in ids.identity.items()):
            what = f"{folder} is not what {self.resumed_from} learned"
            raise UserError(f"--data={config.data}: {what}; restore it")
        return ids

    # ---- The beginning and the end
    def begin(self, run, source):
        """Fill a new Run: with the weights of `source`, what load returned, or the checkpoint."""
        run.log = self.log
        run.clock = self.clock
        self.run = run
        weights = sum(p.numel() for p in run.model.parameters())
        run.clock.saving = 20 * weights / 2e8  # a guess until one is measured: 200 MB/s
        if source:
            start_from(run, source)
        if folder := self.resumed_from:
            self.log.say(f"resuming from {folder}, on the same data")
            ranks.check_alike({f"{folder}'s sha256": files.sha256_of(folder / "manifest.json")})
            has_ended = restore(run, folder, self.changed)
            self.ended_at = run.step if has_ended else -1
        tracked = ranks.first(lambda: self.begin_folder(run.step))
        if tracked:  # --resume goes on with the same run of wandb
            run.log.record(run, dict(wandb=tracked))
        if self.changed:
            run.log.record(
                run, dict(changed={name: new for name, (_, new) in self.changed.items()})
            )
            changes = ", ".join(f"{k} {old} to {new}" for k, (old, new) in self.changed.items())
            self.log.say(f"changed from step {run.step} on: {changes}; not the same run to the bit")

    def begin_folder(self, step):
        """What the first rank changes in the folder of a run before its step number `step`.

        Returns the id of its tracker, or None.
        """
        out_dir = self.config.out_dir
        lines = []
        if self.resumed_from and self.log.path.exists():
            lines = read_lines(self.log.path.read_bytes(), step)
        if self.config.tracker != "none":  # first, as it may be refused
            self.log.tracker = trackers.start(self.config, [record for _, record in lines])
        if self.resumed_from:
            checkpoint.finish_removal(out_dir, self.resumed_from)
        if self.config.overwrite:
            run_folder.mark_overwriting(out_dir)
        with files.writing(self.log.path):  # without the records after that step
            files.write_atomically(self.log.path, b"".join(line for line, _ in lines))
        return self.log.tracker and self.log.tracker.id

    def save(self, run, finished=False):
        """Write out_dir/step-N: the averaged weights, and everything that --resume needs.

        On a GPU, files are written while the next steps are computed; an error then ends the run at
        its next save.

        finished: this is the end of a run. UserError for weights that are not finite
        """
        clock = run.clock
        self.wait_for_save()
        state = dict(step=run.step, tokens=run.tokens, sequences=run.sequences_before(run.step))
        state |= dict(seconds=clock.elapsed(), ending=clock.ending, saving=clock.saving)
        state |= dict(finished=finished) | run.corpus.identity
        with clock.save(run.step):
            if self.held:
                run.averaged.calibration = self.calibrate(run)
            weights = run.averaged.state_dict()
            tensors = checkpoint.training_tensors(run.model, run.averaged, run.optimizers)
            ranks.together(lambda: check_finite(run, weights | tensors))
            if run.config.shard:
                with shards.saving(run.config.out_dir, weights, tensors) as files_of:
                    ranks.first(lambda: write(*contents_of(run, state, files_of())))
            elif can_write_beside(run) and not finished:
                contents = contents_of(run, state, in_memory(weights, tensors))
                self.writing = self.writer.submit(write, *contents)
            else:
                ranks.first(lambda: write(*contents_of(run, state, in_memory(weights, tensors))))

    def wait_for_save(self):
        """Wait for the checkpoint that is being written; raise the error if it could not be."""
        if self.writing:
            writing, self.writing = self.writing, None
            self.clock.saving = writing.result()

    def calibrate(self, run):
        """Fit the temperature of the averaged weights to the held-out text."""
        corpus = type(run.corpus)(self.held, run.config, run.device)
        windows = corpus.windows(CALIBRATION_WINDOWS)
        with run.autocast():
            temperature = calibration.fit(run.averaged, windows, passes=4)
        share = run.config.calibration_share
        source = f"the last {share:g} of the training text, held back: {len(windows)} windows"
        return dict(temperature=temperature, source=source)

    def end(self, run):
        """Save unsaved work, and report how the run ended; returns the exit code."""
        say = run.log.say
        run.clock.goes_on(run.step)  # a signal may have come since
        interrupted = run.clock.signal
        self.wait_for_save()
        out_dir = f"--out_dir={environment.quote(run.config.out_dir)}"
        program = "torchrun ... mdlm.py" if ranks.CONTROL else environment.command("mdlm.py")
        again = f"{program} {out_dir} --resume"
        if self.is_over and not interrupted:
            limit = "time_limit" if run.config.time_limit else "max_steps"
            say(f"this run ended at step {run.step}; to continue: {again} --{limit}=MORE")
            return 0
        if not interrupted or run.clock.saved != run.step:
            self.save(run, finished=not interrupted)
        if interrupted:
            say(f"stopped at step {run.step} and saved; to continue: {again}")
            return 128 + interrupted  # as a shell reports the signal
        if self.held:
            say(f"calibrated: temperature {run.averaged.calibration['temperature']}")
        if ranks.is_first_rank():
            plots.try_to_draw(plots.plot_losses, run.log.path.with_name("loss.png"))
        prompt = " --prompt=TEXT" * bool(run.config.prompt_column)
        sample = f"{environment.command('sample.py')} {out_dir}{prompt}"
        phases = run.clock.seconds_by_phase().items()
        took = ", ".join(f"{name} {seconds}" for name, seconds in phases)
        say(f"done in {run.clock.elapsed():.0f} s ({took}). Now type: {sample}")
        return 0


# ---- Weights
@torch.no_grad()
def start_from(run, source):
    """Start from the weights of `source`: (model, tokenizer, config) of --init_from."""
    model, tokenizer, _ = source
    digest = hashlib.sha256()
    for p in model.state_dict().values():
        digest.update(p.contiguous().view(-1).view(torch.uint8).numpy())
    name = f"--init_from={run.config.init_from}"
    ranks.check_alike({f"{name}'s sha256": digest.hexdigest()})
    if tokenizer.to_json() != run.corpus.tokenizer.to_json():
        raise UserError(f"{name} has different tokens than {run.config.data}; give text")
    for into in (run.model, run.averaged):
        for p, whole in zip(into.parameters(), model.parameters()):
            shards.fill(p, whole)


def restore(run, folder, changed):
    """Load a checkpoint; returns whether it is the end of a run."""
    state = checkpoint.restore(folder, run.model, run.averaged, run.optimizers)
    run.log.score = checkpoint_score.read(folder)
    run.step = state["step"]
    run.clock.resume(state)
    batch_size, _ = changed.get("batch_size", (run.config.batch_size, 0))
    run.begins_at = (run.step, state.get("sequences", run.step * batch_size))
    return state["finished"]


def check_finite(run, tensors):
    """Raise RankError if a tensor, or this rank's part of it, has NaN or infinity."""
    for name, t in tensors.items():
        part = t.to_local() if hasattr(t, "to_local") else t  # with --shard
        if not part.isfinite().all():
            raise RankError(f"{name} is not finite at step {run.step}: not saved. {run.advice()}")


def in_memory(weights, tensors):
    """The files of a run without --shard, as bytes."""
    contents = {}
    for name, named in (("model", weights), ("state", tensors)):
        copies = {key: t.detach().cpu().contiguous() for key, t in named.items()}
        contents[f"{name}.safetensors"] = to_safetensors(copies)
    return contents


def can_write_beside(run):
    """Whether files are written while a run goes on: one GPU computes steps without the CPU."""
    return run.device.type == "cuda" and run.engine.world == 1


def contents_of(run, state, tensors):
    """The arguments of `write`; tensors: the safetensors files of a run, bytes or Paths."""
    contents = checkpoint.describing(run.config, run.corpus.tokenizer, run.averaged)
    contents |= {"state.json": json.dumps(state).encode()} | tensors
    loss = run.loss if math.isfinite(run.loss) else None  # JSON has no NaN
    replaces = run.config.overwrite and run.clock.saved < 0  # the first one: the old run may go now
    folder = Path(run.config.out_dir) / f"step-{run.step}"
    return folder, contents, run.log.score | dict(loss=loss), replaces


def write(folder, contents, score, replaces):
    """Write a checkpoint of a run; returns how many seconds it took.

    replaces: whether it is all that remains in the run's folder
    """
    began = time.monotonic()
    checkpoint.write_checkpoint(folder.parent, folder.name, contents, score)
    if replaces:
        with files.writing(folder):
            for old in checkpoint.checkpoints(folder.parent):
                if old != folder:
                    files.remove(old)
    return time.monotonic() - began


@contextlib.contextmanager
def memory_explained(session):
    """Context manager: turn an out-of-memory error of a run into one sentence, a RankError."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        run = session.run
        if not is_out_of_memory(e) or run is None:
            raise
        batch = f"{run.micro_batch} sequences of {run.config.block_size} tokens at a time"
        size = f"{sum(p.numel() for p in run.model.parameters()):,} parameters"
        what = f"out of memory on {run.device}, with {batch} and {size}"
        raise RankError(f"{what}. {run.advice_on_memory()}") from e


# ---- The state of the process
@contextlib.contextmanager
def process_of_a_run():
    """Context manager: one run in this process, whose state is restored for the caller.

    The run's folder is unlocked, and removed if it is empty. Raises UserError if another run
    trains.
    """
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):  # it keeps copies of old weights
        raise UserError("a run cannot start inside torch.autocast; call mdlm.main outside of it")
    if not TRAINING.acquire(blocking=False):
        raise UserError("another thread of this process is training; wait for its end")
    if "torch._dynamo" in sys.modules:  # else shapes of earlier runs would make this one's dynamic
        torch.compiler.reset()
    try:
        # Whatever the caller's modes are, weights are float32 and get gradients.
        with (
            handlers_kept(),
            devices.float32_by_default(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            try:
                yield
            finally:
                with signals_wait():
                    run_folder.release()
    finally:
        TRAINING.release()
