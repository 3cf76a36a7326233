"""The log of a run: records in log.jsonl, and messages on the terminal."""

import contextlib
import json
import math
from pathlib import Path

import torch
from tqdm import tqdm

from nanomdlm.support import abilities
from nanomdlm.support.cli.devices import flops_per_token, peak_flops
from nanomdlm.support.cli.files import to_json, writing
from nanomdlm.support.cli.settings import NO_LIMIT
from nanomdlm.support.cli.terminal import bar, escaped, silence_stdout
from nanomdlm.support.errors import SharedError
from nanomdlm.support.run import ranks, shards
from nanomdlm.support.run.evaluation import eval_mode

BAR = "{percentage:3.0f}%|{bar:16}| {desc}, {elapsed}<{remaining}{postfix}"


def read_lines(content, last=math.inf):
    """Return the lines of a log.jsonl (bytes) up to step `last`, as pairs of (bytes, record)."""
    kept = []
    for line in content.splitlines(True):
        # A crash may have cut a line, so that it is no JSON, or no record.
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(line)
            if record["step"] <= last and line.endswith(b"\n"):
                kept.append((line, record))
    return kept


class Log:
    """Writes log.jsonl and the messages of a run. Only the first rank writes and prints.

    config: the run's Config. silent: whether to print nothing (True on all ranks but the first).
    """

    def __init__(self, config, silent):
        self.silent = silent
        self.path = Path(config.out_dir) / "log.jsonl"
        self.last = (0, 0.0)  # tokens and seconds of training up to the last training record
        self.speed = 0.0  # tokens/s up to then
        self.tracker = None  # on the first rank the Tracker of --tracker
        self.score = {}  # the last evaluation, for its checkpoint
        # For an adapted decoder: its likelihood from left to right before training, and the number
        # of windows it was measured on.
        self.decoder_nll = None
        self.decoder_windows = 0

    # ---- log.jsonl
    def record(self, run, values):
        """Append a JSON object with step, tokens, seconds and `values` to log.jsonl.

        NaN and infinity become null, because JSON has neither. All ranks must call this: if the
        first rank cannot write, all ranks stop.
        """
        seconds = round(run.clock.elapsed(), 3)
        line = to_json(dict(step=run.step, tokens=run.tokens, seconds=seconds) | values)

        def append():
            with writing(self.path):
                # A missing file means that its disk was unmounted. Do not create a new one there.
                self.path.stat()
                with open(self.path, "a") as f:
                    f.write(line + "\n")

        ranks.first(append)
        if self.tracker:
            self.tracker.add(json.loads(line))

    # ---- Before training
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
        limits = [f"{c.max_steps:,} steps"] * (c.max_steps < NO_LIMIT)
        limits += [f"{c.time_limit:g} seconds"] * (c.time_limit > 0)
        self.say(f"the run ends after {' or '.join(limits)}")
        how = [f"{run.device}"]
        if run.device.type == "cpu":
            how += [f"{torch.get_num_threads()} threads"]
        how += [str(run.engine.dtype).removeprefix("torch."), "compiled" if compiled else "eager"]
        if run.engine.world > 1:
            how += [f"{run.engine.world} ranks"]
        if c.shard:
            how += [f"sharded over {shards.sharing(c.shard, run.engine.world)}"]
        how += [f"{run.model.ops.name} kernels"]
        for line in (", ".join(how), *run.objective.notes()):
            self.say(line)

    # ---- During training
    @contextlib.contextmanager
    def progress(self, run):
        """Context manager: show how far a run is; yields a function to call after each step."""
        config = run.config
        done = max(run.step / config.max_steps, run.clock.elapsed() / run.clock.limit)
        of = f"/{config.max_steps}" if config.max_steps < NO_LIMIT else ""
        options = dict(total=1.0, initial=min(done, 1.0), bar_format=BAR, miniters=0)
        options |= dict(desc=f"step {run.step}{of}", leave=True, delay=0, disable=self.silent)
        self.last = (run.tokens, run.clock.training())
        with bar(**options) as shown:

            def show():
                shown.n = run.clock.progress
                shown.desc = f"step {run.step}{of}"
                if math.isfinite(run.loss):  # NaN until the first loss has been read from a GPU
                    speed = self.speed or self.measure(run)
                    shown.postfix = f"loss {run.loss:.4f}, {speed:,.0f} tokens/s"
                shown.update(0)

            yield show
            shown.n = run.clock.progress

    def measure(self, run):
        """Return tokens/s since the last record."""
        tokens, seconds = self.last
        return (run.tokens - tokens) / max(run.clock.training() - seconds, 1e-3)  # coarse clocks

    def training(self, run, lr_scale, margin_scale):
        """Record loss, gradient norm, learning rate, margin of the mask rates, and tokens/s.

        MFU too, if the GPU's peak is known. lr_scale, margin_scale: fractions of their peaks

        tokens/s counts tokens of text. The padding of windows of documents is computed as well, so
        it counts for MFU (model FLOP/s utilization).
        """
        self.speed = self.measure(run)
        self.last = (run.tokens, run.clock.training())
        values = dict(loss=run.loss, grad_norm=run.grad_norm, lr_scale=lr_scale)
        rate_margin = margin_scale * run.objective.rate_margin
        values |= dict(rate_margin=rate_margin, tokens_per_second=round(self.speed))
        peak = run.engine.dtype == torch.bfloat16 and peak_flops(run.device)
        if peak:
            positions = self.speed * run.config.block_size / run.corpus.mean_size
            values["mfu"] = positions * flops_per_token(run.model) / peak / run.engine.world
        self.record(run, values)

    def evaluation(self, run, r, raw, is_last):
        """Record and print an evaluation.

        r, raw: results of mdlm.evaluate with the averaged and with the raw weights.
        """
        self.score = score_of(run, r)
        key = run.objective.metric
        bits = None  # per character
        if run.corpus.chars_per_token:
            bits = r[key] / math.log(2) / run.corpus.chars_per_token
        # The raw weights may have been scored on fewer windows; that is not comparable.
        raw = raw[key] if raw["windows"] == r["windows"] else None
        values = {f"val_{key}": r[key], f"val_{key}_se": r["se"], f"val_{key}_raw": raw}
        values["val_bpc"] = bits
        if r["windows"] < run.eval_windows:
            values["windows"] = r["windows"]
        values |= dict(val_ar_shifted=r["ar_shifted"]) if key == "nll" else dict(ce_by_rate=r["ce"])
        adapts = run.config.init_from and key == "nelbo" and not run.step
        if adapts and getattr(getattr(run.model, "network", None), "is_decoder", False):
            self.decoder_windows = r["windows"]
            self.decoder_nll = values["decoder_nll"] = self.measure_decoder(run)
        elif self.decoder_nll and is_last:  # what it has forgotten
            values["decoder_nll"] = self.measure_decoder(run)
        values["phases"] = run.clock.seconds_by_phase()
        self.record(run, values)
        if not run.step and not run.config.init_from:
            V = run.model.vocab_size
            text = f"before training: a uniform guess costs ln {V} = {math.log(V):.2f} nats per "
            self.say(f"{text}token; the validation {key.upper()} should fall from there")
            return
        text = f"{'the end, ' * is_last}step {run.step}: {key.upper()} {r[key]:.4f}"
        text += f" +- {r['se']:.4f} nats per token"
        if bits is not None:
            text += f", {bits:.3f} bits per character"
        if key == "nll":
            text += f", {r['ar_shifted']:.4f} without the first token of each window"
        if run.corpus.entropy:
            text += f", exact entropy {run.corpus.entropy:.4f}"
        if self.decoder_nll:
            few = "" if r["ce"][0] is None else f"{r['ce'][0]:.4f} with up to 10 % masked, "
            text += f"; {few}{self.decoder_nll:.4f} from left to right before training"
            if is_last:
                text += f", {values['decoder_nll']:.4f} now"
        if "windows" in values:
            text += f" ({r['windows']} of {run.eval_windows} windows)"
        self.say(text)

    def measure_decoder(self, run):
        """The likelihood from left to right.

        Where little is masked, an adapted network must be clearly below the value before training;
        otherwise it fills gaps no better than the decoder.
        """
        n = self.decoder_windows
        windows = run.corpus.windows(run.config.eval_windows)
        windows = windows[torch.arange(n) * len(windows) // n].long()
        with run.autocast(), eval_mode(run.averaged):
            return run.averaged.next_token_nll(windows)

    def samples(self, run, preview, x):
        """Print texts x (2, T), in which the model filled what `preview`, of to_preview, hides."""
        x0, hidden, titles = preview
        cut = run.corpus.tokenizer.cut
        for i, title in enumerate(titles):
            at = hidden[i].nonzero()[:, 0].tolist()  # contiguous
            before, text, after = cut(x[i].tolist(), [at[0], at[-1] + 1])
            _, original, _ = cut(x0[i].tolist(), [at[0], at[-1] + 1])
            if len(original) > 60:
                original = f"{original[:60]}..."
            if ">>" in title:
                text = f">>{text}<<"
            self.say(title.format(json.dumps(original, ensure_ascii=False)))
            self.say("  | " + f"{before}{text}{after}".replace("\n", "\n  | "))

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


def score_of(run, r):
    """The "score" that a checkpoint keeps of a result of mdlm.evaluate; SharedError for NaN.

    unigram: the entropy of the frequencies of single tokens, in nats
    """
    name = run.objective.metric
    if not math.isfinite(r[name]):
        what = f"validation {name} {r[name]} at step {run.step}: not saved."
        raise SharedError(f"{what} {run.advice()}")
    windows = run.corpus.windows(run.config.eval_windows)
    tokens = windows[run.objective.scored_mask(windows)]
    p = tokens.bincount().double() / len(tokens)
    unigram = torch.special.entr(p).sum().item()
    return dict(name=name, value=r[name], step=run.step, unigram=unigram)


def to_preview(run):
    """Return what a preview shows: (windows (2, T), tokens to hide (2, T) bool, their titles).

    In the first window, all tokens are hidden, so that the model writes a text from nothing. In the
    second, its answer is hidden, or a gap of an eighth of it, or its second half. {} in the titles
    stands for the original.
    """
    windows = run.corpus.windows(run.config.eval_windows)
    x0 = windows[[0, 1 % len(windows)]]
    hidden = run.objective.scored_mask(x0)
    if run.config.prompt_column:
        return x0, hidden, ("a prompt, and >>its answer<<:", "another one, whose >>answer<< is {}:")
    at = hidden[1].nonzero()[:, 0]
    n = len(at)
    gap = at[n // 2 :]
    title = "continuing unseen text >>like this<< (the original: {}):"
    if abilities.fills_gaps(run.model):
        gap = at[n // 2 - n // 16 :][: max(1, n // 8)]
        title = "filling >>a gap<< in unseen text (the original: {}):"
    hidden[1] = False
    hidden[1, gap] = True
    return x0, hidden, ("a text written from nothing:", title)
