"""The log of a run: log.jsonl and the terminal."""

import contextlib
import json
import math
import sys
import time
from pathlib import Path

import torch

from support import environment, runtime, shards
from support.cli import escaped
from support.files import write_atomically, writing
from support.runtime import generator, peak_flops


class Log:
    """Only the first rank's log speaks; `silent` is True on the others."""

    def __init__(self, config, start, silent):
        self.start = start  # time.monotonic() when the process began
        self.silent = silent
        self.path = Path(config.out_dir) / "log.jsonl"
        self.last = (0, 0.0)  # tokens and time of the last line on training

    def begin(self, step):
        """Keep the lines up to the step that the run resumes from (-1: none)."""
        runtime.on_first_rank(lambda: self.keep(step))

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
        runtime.on_first_rank(lambda: self.append(json.dumps(values) + "\n"))

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

    def describe(self, run, folder, is_bound, is_variant):
        """Say what is trained, on what and with what; `folder` is the checkpoint to resume."""
        c = run.config
        millions = sum(p.numel() for p in run.model.parameters()) / 1e6
        size = f"{c.n_layer} layers x {c.n_embd}, context {c.block_size}, batch {c.batch_size}"
        how = "compiled" if c.compile == "on" else "eager"
        on = f", a model on {shards.sharing(c.shard, run.world)}" if c.shard else ""
        ops = f"{run.model.ops.name} kernels"
        documents = run.corpus.n_documents
        documents = f" in {documents:,} document{'s' * (documents != 1)}" * run.corpus.documents
        text = f"{len(run.corpus.train):,} training tokens{documents}"
        text += f", {len(run.windows)} validation windows"
        self.say(f"preset {c.preset}: {millions:.2f} M parameters, {size}")
        self.say(f"{run.device}, {c.dtype}, {how}, {run.world} rank(s){on}, {ops}")
        self.say(f"data: {text}, V = {run.model.vocab_size}")
        if folder:
            self.say(f"resuming from {folder}, on the data that it learned")
        if run.model.documents:
            self.say("documents of given lengths (--lengths)")
        if run.model.n > 1:
            whole = f"; in {c.whole:.0%} of the steps all at once" * (c.whole > 0)
            self.say(f"{run.model.n} blocks of {c.block_length} tokens, one after another{whole}")
        if c.objective == "mdlm" and not is_bound:
            self.say("the training loss is no likelihood bound; the evaluation is one")
        elif c.objective == "mdlm" and c.rate_margin and not (is_variant or c.time_conditioning):
            self.say("the training loss is a likelihood bound only at the end (--rate_margin)")

    def restart_clock(self, tokens):
        """Count tokens/s from now on."""
        self.last = (tokens, time.monotonic())

    def training(self, run, lr_scale, flops_per_token):
        """A line on training: loss, gradient norm, tokens/s, and MFU if the GPU's peak is known."""
        tokens, began = self.last
        speed = (run.tokens - tokens) / max(time.monotonic() - began, 1e-3)  # clocks are coarse
        values = dict(loss=run.loss, grad_norm=run.grad_norm, lr_scale=lr_scale)
        values |= dict(tokens_per_second=round(speed))
        text = f"loss {run.loss:.4f}, {speed:,.0f} tokens/s"
        peak = run.dtype == torch.bfloat16 and peak_flops(run.device)
        if peak:
            values["mfu"] = speed * flops_per_token / peak / run.world
            text += f", MFU {values['mfu']:.1%}"
        self.record(run, values)
        self.say(f"step {run.step}: {text}, {run.progress:.0%} done", sys.stderr)
        self.restart_clock(run.tokens)

    def evaluation(self, run, r, raw):
        """A line on the evaluation r of the averaged weights, and that of the raw ones."""
        key = "nll" if "nll" in r else "nelbo"
        raw = raw[key] if raw["windows"] == r["windows"] else None  # as not comparable
        values = {f"val_{key}": r[key], f"val_{key}_se": r["se"], f"val_{key}_raw": raw}
        values["val_bpc"] = None
        text = f"step {run.step}: {key.upper()} {r[key]:.4f} +- {r['se']:.4f} nats per token"
        if r["windows"] < len(run.windows):
            values["windows"] = r["windows"]
            text += f" of {r['windows']} windows"
        if run.corpus.chars_per_token:
            values["val_bpc"] = r[key] / math.log(2) / run.corpus.chars_per_token
            text += f", {values['val_bpc']:.3f} bits per character"
        if run.corpus.entropy:
            text += f", entropy {run.corpus.entropy:.4f}"
        if key == "nll":
            values["val_ar_shifted"] = r["ar_shifted"]
            text += f", shifted {r['ar_shifted']:.4f}"
        else:
            values["ce_by_rate"] = r["ce"]
            shown = ("-" if ce is None else f"{ce:.2f}" for ce in r["ce"])
            text += "; CE by rate: " + " ".join(shown)
        self.record(run, values)
        self.say(text)
        self.restart_clock(run.tokens)

    def samples(self, run, generate):
        """Show two generated texts."""
        x = run.windows[[0, 1 % len(run.windows)]]
        x = torch.where(run.model.learned(x), run.model.mask_id, x)
        g = generator("preview", run.config.seed, run.step)
        was_training = run.averaged.training
        run.averaged.eval()
        with run.autocast():
            filled = generate(run.averaged, x, min(x.shape[1], 64), g)
        run.averaged.train(was_training)
        for ids in filled.tolist():
            self.say("  | " + run.corpus.tokenizer.decode(ids).replace("\n", "\n  | "))
        self.restart_clock(run.tokens)

    def stopped(self, run):
        again = environment.command("mdlm.py")
        if run.world > 1 or run.config.shard:
            again = "torchrun ... mdlm.py"
        again += f" --out_dir={environment.quote(run.config.out_dir)} --resume"
        self.say(f"stopped at step {run.step} and saved; to continue: {again}")

    def done(self, run):
        """The last line: what to type next."""
        now = environment.command("sample.py")
        now += f" --out_dir={environment.quote(run.config.out_dir)}"
        now += " --prompt=TEXT" * bool(run.config.prompt_column)
        self.say(f"done in {run.elapsed():.0f} s. Now type: {now}")

    def say(self, text, stream=None):
        """Show a line on standard output (or stderr), without what could command a terminal."""
        if not self.silent:
            with contextlib.suppress(OSError):  # the reader may have gone: log.jsonl has it all
                print(escaped(text), file=stream, flush=True)
