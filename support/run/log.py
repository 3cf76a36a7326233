"""The log of a run: records in log.jsonl, and messages on the terminal."""

import contextlib
import json
import math
import time
from pathlib import Path

import torch
from tqdm import tqdm

from nanomdlm.support import abilities
from nanomdlm.support.cli import environment, progress
from nanomdlm.support.cli.devices import flops_per_token, peak_flops
from nanomdlm.support.cli.files import to_json, writing
from nanomdlm.support.cli.settings import NO_LIMIT
from nanomdlm.support.cli.terminal import escaped, silence_stdout
from nanomdlm.support.errors import SharedError
from nanomdlm.support.run import ranks, shards
from nanomdlm.support.run.advice import advice

BAR = "{percentage:3.0f}%|{bar:16}| {desc}, {elapsed}<{remaining}{postfix}"


class Log:
    """Writes log.jsonl and the messages of a run. Only the first rank writes and prints.

    config: the run's Config. silent: whether to print nothing (True on all ranks but the first).
    """

    def __init__(self, config, silent):
        self.silent = silent
        self.path = Path(config.out_dir) / "log.jsonl"
        self.last = (0, 0.0)  # tokens and time.monotonic() of the last training record
        self.speed = 0.0  # tokens/s up to then
        self.tracker = None  # on the first rank the Tracker of --tracker
        self.score = {}  # the last evaluation, for its checkpoint

    # ---- log.jsonl
    def lines(self, step):
        """Return the lines of log.jsonl up to a step, as pairs of (bytes, record)."""
        kept = []
        if step >= 0 and self.path.exists():
            for line in self.path.read_bytes().splitlines(True):
                # A crash may have cut a line, so that it is no JSON, or no record.
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    record = json.loads(line)
                    if record["step"] <= step and line.endswith(b"\n"):
                        kept.append((line, record))
        return kept

    def record(self, run, values):
        """Append a JSON object with step, tokens, seconds and `values` to log.jsonl.

        NaN and infinity become null, because JSON has neither. All ranks must call this: if the
        first rank cannot write, all ranks stop.
        """
        seconds = round(run.clock.elapsed(), 3)
        line = to_json(dict(step=run.step, tokens=run.tokens, seconds=seconds) | values)
        ranks.first(lambda: self.append(line + "\n"))
        if self.tracker:
            self.tracker.add(json.loads(line))

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
        text = f"data: {len(run.corpus.ids['train']):,} training tokens"
        if run.corpus.has_documents:
            text += f", documents: {run.corpus.n_documents:,}"
        self.say(f"{text}, {run.eval_windows} validation windows, V = {run.model.vocab_size}")
        size = f"{sum(p.numel() for p in run.model.parameters()) / 1e6:.2f} M parameters"
        if c.lora:
            named = torch.nn.Module.named_parameters(run.model)  # the frozen ones too
            size += f" trained, of {sum(p.numel() for _, p in named) / 1e6:.2f} M"
        size += f", {c.n_layer} layers x {c.n_embd}, context {c.block_size}, batch {c.batch_size}"
        self.say(f"preset {c.preset}: {size}")
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
        """Context manager: show how far a run is; yields a function to call after each step."""
        config = run.config
        done = run.step / config.max_steps
        if config.time_limit:
            done = min(1.0, run.clock.elapsed() / config.time_limit)
        of = f"/{config.max_steps}" if config.max_steps < NO_LIMIT else ""
        options = dict(total=1.0, initial=done, desc=f"step {run.step}{of}", bar_format=BAR)
        options |= dict(miniters=0, leave=True, delay=0, disable=self.silent)
        self.restart_clock(run.tokens)
        with progress.bar(**options) as bar:

            def show():
                bar.n = run.clock.progress
                bar.desc = f"step {run.step}{of}"
                if math.isfinite(run.loss):  # NaN until the first loss has been read from a GPU
                    speed = self.speed or self.measure(run)
                    bar.postfix = f"loss {run.loss:.4f}, {speed:,.0f} tokens/s"
                bar.update(0)

            yield show
            bar.n = run.clock.progress

    def restart_clock(self, tokens):
        """Measure tokens/s from now on, leaving out the time since the last record.

        tokens: the number of tokens trained on so far.
        """
        self.last = (tokens, time.monotonic())

    def measure(self, run):
        """Return tokens/s since the last record."""
        tokens, began = self.last
        return (run.tokens - tokens) / max(time.monotonic() - began, 1e-3)  # clocks are coarse

    def training(self, run, lr_scale, margin_scale):
        """Record loss, gradient norm, learning rate, margin of the mask rates, and tokens/s.

        MFU too, if the GPU's peak is known. lr_scale, margin_scale: fractions of their peaks

        tokens/s counts tokens of text. The padding of windows of documents is computed as well, so
        it counts for MFU (model FLOP/s utilization).
        """
        self.speed = self.measure(run)
        values = dict(loss=run.loss, grad_norm=run.grad_norm, lr_scale=lr_scale)
        rate_margin = margin_scale * run.objective.rate_margin
        values |= dict(rate_margin=rate_margin, tokens_per_second=round(self.speed))
        peak = run.engine.dtype == torch.bfloat16 and peak_flops(run.device)
        if peak:
            positions = self.speed * run.config.block_size / run.corpus.mean_size
            values["mfu"] = positions * flops_per_token(run.model) / peak / run.engine.world
        self.record(run, values)
        self.restart_clock(run.tokens)

    def evaluation(self, run, r, raw, is_last):
        """Record and print an evaluation.

        r, raw: results of mdlm.evaluate with the averaged and with the raw weights.
        """
        self.score = score_of(run, r)
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
        end = f"time_limit={2 * run.config.time_limit:g}"
        if not run.config.time_limit:
            end = f"max_steps={2 * run.config.max_steps}"
        self.say(
            f"this run ended at step {run.step}; to continue, raise that: {again(run)} --{end}"
        )

    def done(self, run):
        """Print the last message of a run: the command that samples from the model."""
        command = environment.command("sample.py")
        command += f" --out_dir={environment.quote(run.config.out_dir)}"
        if run.config.prompt_column:
            command += " --prompt=TEXT"
        self.say(f"done in {run.clock.elapsed():.0f} s. Now type: {command}")

    def say(self, text):
        """Print a line to standard output, with control characters escaped.

        If the output was closed, the run continues, and log.jsonl has its numbers.
        """
        if self.silent:
            return
        with contextlib.suppress(OSError), tqdm.external_write_mode():
            try:
                print(escaped(text), flush=True)
            except BrokenPipeError:  # its reader has gone: at exit nothing is left to flush
                silence_stdout()


# ---- The score that a checkpoint keeps; see scores.py
def unigram_entropy(tokens):
    """Of ids (n,), in nats."""
    p = tokens.bincount().double() / len(tokens)
    return torch.special.entr(p).sum().item()


def score_of(run, r):
    """The "score" that a checkpoint keeps of a result of mdlm.evaluate; SharedError for NaN."""
    name = run.objective.metric
    if not math.isfinite(r[name]):
        what = f"validation {name} {r[name]} at step {run.step}: not saved."
        raise SharedError(f"{what} {advice(run)}")
    windows = run.corpus.windows(run.config.eval_windows)
    unigram = unigram_entropy(windows[run.objective.scored_mask(windows)])
    return dict(name=name, value=r[name], step=run.step, unigram=unigram)


# ---- Results and settings in words
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
    """Describe the results r of an evaluation in one line. bits: per character, or None."""
    V = run.model.vocab_size
    key = "nll" if "nll" in r else "nelbo"
    if not run.step and not run.config.init_from:
        guess = f"before training: a uniform guess costs ln {V} = {math.log(V):.2f} nats per token"
        return f"{guess}; the validation {key.upper()} should fall from there"
    text = f"step {run.step}: {key.upper()} {r[key]:.4f}"
    if is_last:
        text = f"the end, {text}"
    if math.isfinite(r["se"]):
        text += f" +- {r['se']:.4f}"
    text += " nats per token"
    if bits is not None:
        text += f", {bits:.3f} bits per character"
    if key == "nll":
        text += f", {r['ar_shifted']:.4f} without the first token of each window"
    if run.corpus.entropy:
        text += f", exact entropy {run.corpus.entropy:.4f}"
    if r["windows"] < run.eval_windows:
        text += f" ({r['windows']} of {run.eval_windows} windows)"
    return text


# ---- Previews
def to_preview(run):
    """Return what a preview shows: (windows (2, T), tokens to hide (2, T) bool, a title).

    In the first window, all tokens are hidden, so that the model writes a text from nothing. In the
    second, its answer is hidden, or a gap of an eighth of it, or its second half. The title
    describes the second, with {} for the original.
    """
    windows = run.corpus.windows(run.config.eval_windows)
    x0 = windows[[0, 1 % len(windows)]]
    hidden = run.objective.scored_mask(x0)
    if run.config.prompt_column:
        return x0, hidden, "another one, whose answer is {}:"
    at = hidden[1].nonzero()[:, 0]
    n = len(at)
    gap = at[n // 2 :]
    title = "continuing unseen text >>like this<< (the original: {}):"
    if abilities.fills_gaps(run.model):
        gap = at[n // 2 - n // 16 :][: max(1, n // 8)]
        title = "filling >>a gap<< in unseen text (the original: {}):"
    hidden[1] = False
    hidden[1, gap] = True
    return x0, hidden, title


def cut(tokenizer, ids, hidden):
    """Return the text before, in and after the hidden (T,) tokens, which must be contiguous."""
    at = hidden.nonzero()[:, 0].tolist()
    return tokenizer.cut(ids, [at[0], at[-1] + 1])
