"""The log of a run: log.jsonl and the terminal."""

import contextlib
import json
import math
import time
from pathlib import Path

import torch

from support import environment, ranks
from support.devices import peak_flops
from support.files import write_atomically, writing
from support.flags import NO_LIMIT
from support.terminal import escaped
from support.training import shards
from support.training.progress import Progress


class Log:
    """Only the first rank's log speaks; `silent` is True on the others."""

    def __init__(self, config, start, silent):
        self.start = start  # time.monotonic() when the process began
        self.silent = silent
        self.path = Path(config.out_dir) / "log.jsonl"
        self.last = (0, 0.0)  # tokens and time of the last record on training
        self.shown = None  # the Progress, while the run trains

    def begin(self, step):
        """Keep the lines up to the step that the run resumes from (-1: none)."""
        ranks.on_first_rank(lambda: self.keep(step))

    def keep(self, step):
        kept = []
        if step >= 0 and self.path.exists():
            for line in self.path.read_bytes().splitlines(True):
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # cut
                    if json.loads(line)["step"] <= step and line.endswith(b"\n"):
                        kept.append(line)
        with writing(self.path):
            write_atomically(self.path, b"".join(kept))

    def record(self, run, values):
        """Append one JSON object; JSON has no NaN and no infinity, so these become null.

        All ranks call it: if the first one cannot write, all of them stop.
        """
        seconds = round(run.elapsed(), 3)
        values = dict(step=run.step, tokens=run.tokens, seconds=seconds) | values
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None
        ranks.on_first_rank(lambda: self.append(json.dumps(values) + "\n"))

    def append(self, line):
        with writing(self.path):
            self.path.stat()  # it is gone if its folder was unmounted: begin no new one there
            with open(self.path, "a") as f:
                f.write(line)

    def changes(self, run):
        """Say what --resume changes of a run, in both logs."""
        self.record(run, dict(changed={name: new for name, (_, new) in run.changed.items()}))
        said = ", ".join(f"{name} {old} to {new}" for name, (old, new) in run.changed.items())
        self.say(f"changed from step {run.step} on: {said}; no longer the same run to the bit")

    def describe(self, run, folder, compiled):
        """Say what is trained, on what and with what; `folder` is the checkpoint to resume."""
        c = run.config
        millions = sum(p.numel() for p in run.model.parameters()) / 1e6
        size = f"{c.n_layer} layers x {c.n_embd}, context {c.block_size}, batch {c.batch_size}"
        ends = [f"{c.max_steps:,} steps"] if c.max_steps < NO_LIMIT else []
        ends += [f"{c.time_limit:g} seconds"] if c.time_limit else []
        how = "compiled" if compiled else "eager"
        threads = f", {torch.get_num_threads()} threads" if run.device.type == "cpu" else ""
        ranks = f", {run.world} ranks" if run.world > 1 else ""
        ranks += f", a model on {shards.sharing(c.shard, run.world)}" if c.shard else ""
        ops = f"{run.model.ops.name} kernels"
        documents = run.corpus.n_documents
        documents = f" in {documents:,} document{'s' * (documents != 1)}" * run.corpus.documents
        text = f"{len(run.corpus.train):,} training tokens{documents}"
        text += f", {len(run.windows)} validation windows"
        self.say(f"data: {text}, V = {run.model.vocab_size}")
        self.say(f"preset {c.preset}: {millions:.2f} M parameters, {size}")
        self.say(f"the run ends after {' or '.join(ends)}")
        dtype = str(run.dtype).removeprefix("torch.")
        self.say(f"{run.device}{threads}, {dtype}, {how}{ranks}, {ops}")
        if folder:
            self.say(f"resuming from {folder}, on the data that it learned")
        for note in run.objective.notes():
            self.say(note)
        if not run.objective.is_bound:
            self.say("the training loss is no likelihood bound; the evaluation is one")

    @contextlib.contextmanager
    def progress(self, run):
        """A context in which a run is shown: yields what to call after every step."""
        if self.silent:
            yield lambda: None
            return
        self.shown = Progress(run, self.say)
        try:
            yield self.shown.show
        finally:
            self.shown.close()
            self.shown = None

    def restart_clock(self, tokens):
        """Count tokens/s from now on."""
        self.last = (tokens, time.monotonic())
        if self.shown:
            self.shown.restart_clock(tokens)

    def training(self, run, lr_scale, flops_per_token):
        """A record on training: loss, gradient norm, tokens/s, and MFU if the GPU's peak is known.

        Tokens are those of text. What fills up a window of documents is computed too: MFU has it.
        """
        tokens, began = self.last
        speed = (run.tokens - tokens) / max(time.monotonic() - began, 1e-3)  # clocks are coarse
        values = dict(loss=run.loss, grad_norm=run.grad_norm, lr_scale=lr_scale)
        values |= dict(tokens_per_second=round(speed))
        peak = run.dtype == torch.bfloat16 and peak_flops(run.device)
        if peak:
            positions = speed * run.config.block_size / run.corpus.mean_size
            values["mfu"] = positions * flops_per_token / peak / run.world
        self.record(run, values)
        self.last = (run.tokens, time.monotonic())

    def evaluation(self, run, r, raw, is_last):
        """A line on the evaluation r of the averaged weights, and that of the raw ones."""
        key = "nll" if "nll" in r else "nelbo"
        raw = raw[key] if raw["windows"] == r["windows"] else None  # as not comparable
        values = {f"val_{key}": r[key], f"val_{key}_se": r["se"], f"val_{key}_raw": raw}
        values["val_bpc"] = None
        if r["windows"] < len(run.windows):
            values["windows"] = r["windows"]
        if run.corpus.chars_per_token:
            values["val_bpc"] = r[key] / math.log(2) / run.corpus.chars_per_token
        values |= dict(val_ar_shifted=r["ar_shifted"]) if key == "nll" else dict(ce_by_rate=r["ce"])
        self.record(run, values)
        self.say(in_words(run, r, values["val_bpc"], is_last))
        self.restart_clock(run.tokens)

    def samples(self, run, x):
        """Show x (2, T), what a model wrote in place of the hidden tokens of `to_preview`."""
        x0, hidden, title = to_preview(run)
        first, second = (cut(run.corpus.tokenizer, *row) for row in zip(x.tolist(), hidden))
        _, was, _ = cut(run.corpus.tokenizer, x0[1].tolist(), hidden[1])
        texts = {"a text written from nothing:": "".join(first)}
        if run.config.prompt_column:
            texts = {"a prompt, and >>its answer<<:": "{}>>{}<<{}".format(*first)}
        was = was if len(was) <= 60 else f"{was[:60]}..."
        texts[title.format(json.dumps(was, ensure_ascii=False))] = "{}>>{}<<{}".format(*second)
        for title, text in texts.items():
            self.say(title)
            self.say("  | " + text.replace("\n", "\n  | "))
        self.restart_clock(run.tokens)

    def stopped(self, run):
        self.say(f"stopped at step {run.step} and saved; to continue: {again(run)}")

    def ended(self, run):
        """Said in place of training, where --resume finds a run at its end."""
        config = run.config
        longer = f" --time_limit={2 * config.time_limit:g}" * bool(config.time_limit)
        if config.max_steps < NO_LIMIT:
            longer += f" --max_steps={2 * config.max_steps}"
        fix = f"raise what ended it: {again(run)}{longer}"
        self.say(f"this run ended at step {run.step}; to go on, {fix}")

    def done(self, run):
        """The last line: what to type next."""
        now = environment.command("sample.py")
        now += f" --out_dir={environment.quote(run.config.out_dir)}"
        now += " --prompt=TEXT" * bool(run.config.prompt_column)
        self.say(f"done in {run.elapsed():.0f} s. Now type: {now}")

    def say(self, text, stream=None):
        """Show a line on standard output (or stderr), without what could command a terminal."""
        if not self.silent:
            hidden = self.shown.hidden() if self.shown else contextlib.nullcontext()
            with contextlib.suppress(OSError), hidden:  # the reader may have gone: log.jsonl stays
                print(escaped(text), file=stream, flush=True)


# ---- In words
def again(run):
    """What a user types to resume a run."""
    many = run.world > 1 or run.config.shard
    program = "torchrun ... mdlm.py" if many else environment.command("mdlm.py")
    return f"{program} --out_dir={environment.quote(run.config.out_dir)} --resume"


def in_words(run, r, bits, is_last):
    """An evaluation r as a line; bits: per character, or None."""
    V = run.model.vocab_size
    key = "nll" if "nll" in r else "nelbo"
    if not run.step and not run.config.init_from:
        guess = f"untrained, the model guesses: ln {V} = {math.log(V):.2f} nats per token"
        return f"{guess}; the {key.upper()} of validation text falls from here"
    text = f"{'the end, ' * is_last}step {run.step}: {key.upper()} {r[key]:.4f}"
    if math.isfinite(r["se"]):
        text += f" +- {r['se']:.4f}"
    text += " nats per token"
    if bits is not None:
        text += f", {bits:.3f} bits per character"
    if key == "nll":
        text += f", {r['ar_shifted']:.4f} without the first token of a window"
    if run.corpus.entropy:
        text += f", exact entropy {run.corpus.entropy:.4f}"
    if r["windows"] < len(run.windows):
        text += f" ({r['windows']} of {len(run.windows)} windows)"
    return text


def to_preview(run):
    """Two windows (2, T), which tokens of them to hide, (2, T) bool, and a title for the second.

    All of the first: a text from nothing. Of the second a gap, or what follows its beginning.
    """
    x0 = run.windows[[0, 1 % len(run.windows)]]
    hidden = run.objective.scored_mask(x0)
    title, hidden[1] = second_preview(run.model, hidden[1])
    return x0, hidden, title


def second_preview(model, hidden):
    """A title with room for what the text was, and the (T,) tokens to hide: a gap, if it can."""
    config = model.config
    at = hidden.nonzero()[:, 0]
    n = len(at)
    if config.prompt_column:
        return "another one, whose answer is {}:", hidden
    if not model.objective.fills_gaps:
        title = "validation text, and how the model >>goes on<< ({} was there):"
        chosen = at[n // 2 :]
    else:
        title = "a gap in validation text, and what the model >>fills in<< ({} was there):"
        chosen = at[n // 2 - n // 16 :][: max(1, n // 8)]
    return title, torch.zeros_like(hidden).index_fill(0, chosen, True)


def cut(tokenizer, ids, hidden):
    """The text of ids before, in and after the hidden (T,) ones, which follow each other."""
    at = hidden.nonzero()[:, 0].tolist()
    return tokenizer.cut(ids, [at[0], at[-1] + 1])
