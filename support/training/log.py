"""The log of a run: records in log.jsonl, and messages on the terminal."""

import contextlib
import json
import math
import time
from pathlib import Path

import torch

from support import abilities, environment, lora, ranks
from support.devices import flops_per_token, peak_flops
from support.files import write_atomically, writing
from support.settings import NO_LIMIT
from support.terminal import escaped, silence_stdout
from support.training import scores, shards, trackers
from support.training.progress import Progress


class Log:
    """Writes log.jsonl and the messages of a run. Only the first rank writes and prints.

    config: the run's Config. silent: whether to print nothing (True on all ranks but the first).
    """

    def __init__(self, config, silent):
        self.silent = silent
        self.path = Path(config.out_dir) / "log.jsonl"
        self.last = (0, 0.0)  # tokens and time.monotonic() of the last training record
        self.shown = None  # the Progress, while the run trains
        self.tracker = trackers.Tracker()  # of --tracker
        self.score = {}  # the last evaluation, for its checkpoint

    # ---- log.jsonl
    def begin(self, step):
        """Remove the records after the step that the run resumes from; -1 removes all."""
        ranks.first(lambda: self.keep(step))

    def lines(self, step):
        """The lines of log.jsonl up to a step: a list of (bytes, record)."""
        kept = []
        if step >= 0 and self.path.exists():
            for line in self.path.read_bytes().splitlines(True):
                # A crash may have cut a line, so that it is no JSON, or no record.
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    record = json.loads(line)
                    if record["step"] <= step and line.endswith(b"\n"):
                        kept.append((line, record))
        return kept

    def keep(self, step):
        """Rewrite log.jsonl with its records up to a step."""
        with writing(self.path):
            write_atomically(self.path, b"".join(line for line, _ in self.lines(step)))

    def start_tracker(self, config, step):
        """Start what --tracker asks for, before anything is written: it may be refused."""
        records = [record for _, record in self.lines(step)]

        def start():
            self.tracker = trackers.start(config, records)

        ranks.first(start)

    def note_tracker(self, run):
        """Record what --resume needs to go on with the same tracker, if it is new."""
        new = ranks.first(lambda: self.tracker.id)
        if new:
            self.record(run, {run.config.tracker: new})

    def record(self, run, values):
        """Append a JSON object with step, tokens, seconds and `values` to log.jsonl.

        NaN and infinity become null, because JSON has neither. All ranks must call this: if the
        first rank cannot write, all ranks stop.
        """
        seconds = round(run.clock.elapsed(), 3)
        values = dict(step=run.step, tokens=run.tokens, seconds=seconds) | values
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None
        ranks.first(lambda: self.append(json.dumps(values) + "\n"))
        self.tracker.add(values)

    def append(self, line):
        """Append a line to log.jsonl; raise UserError if that fails or the file is gone."""
        with writing(self.path):
            # A missing file means that its disk was unmounted. Do not create a new one there.
            self.path.stat()
            with open(self.path, "a") as f:
                f.write(line)

    # ---- Before training
    def changes(self, run, changed):
        """Record and print which settings --resume changes: name -> (old, new)."""
        self.record(run, dict(changed={name: new for name, (_, new) in changed.items()}))
        changes = ", ".join(f"{name} {old} to {new}" for name, (old, new) in changed.items())
        self.say(f"changed from step {run.step} on: {changes}; no longer the same run to the bit")

    def describe(self, run, compiled):
        """Print the data, the model, when the run ends, and how it computes."""
        c = run.config
        self.say(f"data: {describe_data(run)}, V = {run.model.vocab_size}")
        millions = sum(p.numel() for p in run.model.parameters()) / 1e6
        size = f"{c.n_layer} layers x {c.n_embd}, context {c.block_size}, batch {c.batch_size}"
        if c.lora:
            whole = lora.count(run.model) / 1e6
            size = f"{size}; trained: {millions:.3g} M of {whole:.2f} M parameters"
            self.say(f"preset {c.preset}: {size}")
        else:
            self.say(f"preset {c.preset}: {millions:.2f} M parameters, {size}")
        limits = []
        if c.max_steps < NO_LIMIT:
            limits.append(f"{c.max_steps:,} steps")
        if c.time_limit:
            limits.append(f"{c.time_limit:g} seconds")
        self.say(f"the run ends after {' or '.join(limits)}")
        self.say(describe_hardware(run, compiled))
        for note in run.objective.notes():
            self.say(note)

    # ---- During training
    @contextlib.contextmanager
    def progress(self, run):
        """Context manager: show the run's progress; yields a function to call after each step."""
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
        """Measure tokens/s from now on, leaving out the time since the last record.

        tokens: the number of tokens trained on so far.
        """
        self.last = (tokens, time.monotonic())
        if self.shown:
            self.shown.restart_clock(tokens)

    def training(self, run, lr_scale, margin_scale):
        """Record loss, gradient norm, learning rate, margin of the mask rates, and tokens/s.

        MFU too, if the GPU's peak is known. lr_scale, margin_scale: fractions of their peaks

        tokens/s counts tokens of text. The padding of windows of documents is computed as well, so
        it counts for MFU (model FLOP/s utilization).
        """
        tokens, began = self.last
        speed = (run.tokens - tokens) / max(time.monotonic() - began, 1e-3)  # clocks are coarse
        values = dict(loss=run.loss, grad_norm=run.grad_norm, lr_scale=lr_scale)
        rate_margin = margin_scale * run.objective.rate_margin
        values |= dict(rate_margin=rate_margin, tokens_per_second=round(speed))
        peak = run.engine.dtype == torch.bfloat16 and peak_flops(run.device)
        if peak:
            positions = speed * run.config.block_size / run.corpus.mean_size
            values["mfu"] = positions * flops_per_token(run.model) / peak / run.engine.world
        self.record(run, values)
        self.last = (run.tokens, time.monotonic())

    def evaluation(self, run, r, raw, is_last):
        """Record and print an evaluation.

        r, raw: results of mdlm.evaluate with the averaged and with the raw weights.
        """
        self.score = scores.of_evaluation(run, r)
        key = "nll" if "nll" in r else "nelbo"
        # The raw weights may have been scored on fewer windows; that is not comparable.
        raw = raw[key] if raw["windows"] == r["windows"] else None
        values = {f"val_{key}": r[key], f"val_{key}_se": r["se"], f"val_{key}_raw": raw}
        values["val_bpc"] = None
        if r["windows"] < run.eval_windows:
            values["windows"] = r["windows"]
        if run.corpus.chars_per_token:
            values["val_bpc"] = r[key] / math.log(2) / run.corpus.chars_per_token
        values |= dict(val_ar_shifted=r["ar_shifted"]) if key == "nll" else dict(ce_by_rate=r["ce"])
        self.record(run, values)
        self.say(in_words(run, r, values["val_bpc"], is_last))
        self.restart_clock(run.tokens)

    def samples(self, run, x):
        """Print a preview: texts x (2, T), in which the model filled what to_preview hides."""
        x0, hidden, title = to_preview(run)
        tokenizer = run.corpus.tokenizer
        # Each is a triple: the text before, in and after what was hidden.
        first, second = (cut(tokenizer, *row) for row in zip(x.tolist(), hidden))
        _, original, _ = cut(tokenizer, x0[1].tolist(), hidden[1])
        if len(original) > 60:
            original = f"{original[:60]}..."
        texts = {"a text written from nothing:": "".join(first)}
        if run.config.prompt_column:
            texts = {"a prompt, and >>its answer<<:": "{}>>{}<<{}".format(*first)}
        title = title.format(json.dumps(original, ensure_ascii=False))
        texts[title] = "{}>>{}<<{}".format(*second)
        for title, text in texts.items():
            self.say(title)
            self.say("  | " + text.replace("\n", "\n  | "))
        self.restart_clock(run.tokens)

    # ---- At the end
    def stopped(self, run):
        """Print that a signal stopped the run, and how to continue it."""
        self.say(f"stopped at step {run.step} and saved; to continue: {again(run)}")

    def ended(self, run):
        """Print, instead of training, that the run to --resume has already ended."""
        config = run.config
        longer = ""  # suggests twice the limits
        if config.time_limit:
            longer += f" --time_limit={2 * config.time_limit:g}"
        if config.max_steps < NO_LIMIT:
            longer += f" --max_steps={2 * config.max_steps}"
        fix = f"raise what ended it: {again(run)}{longer}"
        self.say(f"this run ended at step {run.step}; to go on, {fix}")

    def done(self, run):
        """Print the last message of a run: the command that samples from the model."""
        command = environment.command("sample.py")
        command += f" --out_dir={environment.quote(run.config.out_dir)}"
        if run.config.prompt_column:
            command += " --prompt=TEXT"
        share = run.clock.share_of_processor()
        if share < 0.5:
            cores = f"{torch.get_num_threads()} cores"
            what = f"{run.step} steps: this run had {share:.0%} of {cores}, as others used them"
            self.say(f"{what}; on an idle machine it learns more in the same time")
        self.say(f"done in {run.clock.elapsed():.0f} s. Now type: {command}")

    def close(self):
        """End the tracker, when all is recorded."""
        self.tracker.close()

    def say(self, text, stream=None):
        """Print a line to standard output, or to `stream`.

        Escapes control characters. If the output was closed, the error is ignored: the run goes on,
        and log.jsonl has its numbers.
        """
        if not self.silent:
            hidden = self.shown.hidden() if self.shown else contextlib.nullcontext()
            with contextlib.suppress(OSError):
                try:
                    with hidden:
                        print(escaped(text), file=stream, flush=True)
                except BrokenPipeError:  # its reader has gone: at exit nothing is left to flush
                    if stream is None:
                        silence_stdout()


# ---- Results and settings in words
def describe_data(run):
    """Describe the sizes of the training and validation data."""
    text = f"{len(run.corpus.ids['train']):,} training tokens"
    if run.corpus.has_documents:
        n = run.corpus.n_documents
        noun = "document" if n == 1 else "documents"
        text += f" in {n:,} {noun}"
    return f"{text}, {run.eval_windows} validation windows"


def describe_hardware(run, compiled):
    """Describe device, dtype, compilation, ranks and kernels."""
    words = [str(run.device)]
    if run.device.type == "cpu":
        words.append(f"{torch.get_num_threads()} threads")
    words.append(str(run.engine.dtype).removeprefix("torch."))
    words.append("compiled" if compiled else "eager")
    if run.engine.world > 1:
        words.append(f"{run.engine.world} ranks")
    if run.config.shard:
        words.append(f"sharded over {shards.sharing(run.config.shard, run.engine.world)}")
    words.append(f"{run.model.ops.name} kernels")
    return ", ".join(words)


def again(run):
    """Return the command that resumes a run."""
    many = run.engine.world > 1 or run.config.shard
    program = "torchrun ... mdlm.py" if many else environment.command("mdlm.py")
    return f"{program} --out_dir={environment.quote(run.config.out_dir)} --resume"


def in_words(run, r, bits, is_last):
    """Describe the results r of an evaluation in a line. bits: per character, or None."""
    V = run.model.vocab_size
    key = "nll" if "nll" in r else "nelbo"
    if not run.step and not run.config.init_from:
        guess = f"untrained, the model guesses: ln {V} = {math.log(V):.2f} nats per token"
        return f"{guess}; the {key.upper()} of validation text falls from here"
    text = f"step {run.step}: {key.upper()} {r[key]:.4f}"
    if is_last:
        text = f"the end, {text}"
    if math.isfinite(r["se"]):
        text += f" +- {r['se']:.4f}"
    text += " nats per token"
    if bits is not None:
        text += f", {bits:.3f} bits per character"
    if key == "nll":
        text += f", {r['ar_shifted']:.4f} without the first token of a window"
    if run.corpus.entropy:
        text += f", exact entropy {run.corpus.entropy:.4f}"
    if r["windows"] < run.eval_windows:
        text += f" ({r['windows']} of {run.eval_windows} windows)"
    return text


# ---- Previews
def to_preview(run):
    """Return what a preview shows: (windows (2, T), tokens to hide (2, T) bool, a title).

    All tokens of the first window are hidden: the model writes a text from nothing. In the second
    a gap is hidden, or its second half. The title describes the second.
    """
    windows = run.corpus.windows(run.config.eval_windows)
    x0 = windows[[0, 1 % len(windows)]]
    hidden = run.objective.scored_mask(x0)
    title, hidden[1] = second_preview(run.model, hidden[1])
    return x0, hidden, title


def second_preview(model, hidden):
    """Return a title with {} for the original text, and the tokens (T,) bool to hide.

    hidden: (T,) bool, the tokens of the window that may be hidden.
    """
    config = model.config
    at = hidden.nonzero()[:, 0]
    n = len(at)
    if config.prompt_column:
        return "another one, whose answer is {}:", hidden
    if not abilities.fills_gaps(model):
        title = "validation text, and how the model >>goes on<< ({} was there):"
        chosen = at[n // 2 :]
    else:
        title = "a gap in validation text, and what the model >>fills in<< ({} was there):"
        start = n // 2 - n // 16  # a gap of an eighth of the text, in the middle
        chosen = at[start:][: max(1, n // 8)]
    return title, torch.zeros_like(hidden).index_fill(0, chosen, True)


def cut(tokenizer, ids, hidden):
    """Return the text before, in and after the hidden (T,) tokens, which must be contiguous."""
    at = hidden.nonzero()[:, 0].tolist()
    return tokenizer.cut(ids, [at[0], at[-1] + 1])
