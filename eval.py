"""Evaluate a model: its likelihood with an error, accuracy and calibration; pictures.

    python eval.py                              # the run in out/, else the model in weights/
    python eval.py --exact --windows=64         # also the exact left-to-right likelihood
    python eval.py --text="To be, or not to be" # what the model sees and predicts in a text
    python eval.py --temperature=1.1            # for a model that is too sure of itself
    python eval.py --compare=out-mdlm,out-ar    # the logs of several runs: a table, loss curves
    python eval.py --compare=a.json,b.json      # two files of --json: their paired difference

Pictures of a run go into its folder. On a CPU the same command gives the same bits.
"""

from support import cli

cli.start(__name__)

import contextlib
import dataclasses
import json
import math
import os
import sys
import tempfile
import zlib
from functools import partial
from pathlib import Path
from statistics import mean, pstdev
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import mdlm
from kernels import reference
from support import numerics, plots, sources, viewer
from support.checkpoint import SHIPPED, default_run, find_checkpoint
from support.cli import UserError, opt
from support.files import read_json, write_output
from support.likelihood import chain_rule, checked, group_size, groups, to_context
from support.runtime import pick_device

EXCERPT = SHIPPED.parent / "excerpt.txt"  # what the shipped model is scored on without a network


@dataclasses.dataclass
class Options:
    # What to evaluate
    out_dir: str = opt("", "run or checkpoint folder; empty: out, else the model in weights/")
    data: str = opt("", "text whose last tenth is scored, or a folder; empty: the run's")
    compare: str = opt("", "RUN,RUN,...: their logs; or files of --json, window by window")
    text: str = opt("", "a text of your own: mask it, and show what the model predicts")
    rate: float = opt(0.5, "share of the tokens of --text to mask", bounds=(0, 1))
    # How to measure
    windows: int = opt(4096, "at most N validation windows, evenly spread", bounds=(1, 1 << 31))
    passes: int = opt(4, "masks per window", bounds=(1, 4096))
    temperature: float = opt(1.0, "divides the logits; above 1: less sure", bounds=(0.01, 100))
    exact: bool = opt(False, "also the exact left-to-right likelihood: T network calls a window")
    device: str = opt("auto", "cpu, cuda, cuda:1 or mps; auto: the fastest that is there")
    dtype: str = opt("float32", "bfloat16 is faster, less exact", "float32", "bfloat16")
    # What to show
    json: str = opt("", "write the results to this file as one JSON object; -: to standard output")
    pictures: str = opt("", "folder for pictures, or none; empty: the run's, if it has a log")


@contextlib.contextmanager
def open_data(data, folder, tokenizer, config, device):
    """Context manager of (mdlm.Corpus, its name): `data` in the model's tokens, or the run's."""
    prepared = folder.parent / "data"
    source = data or (str(prepared) if (prepared / "meta.json").exists() else config.data)
    path = Path(source)
    if source == "shakespeare":
        try:
            path = sources.shakespeare()
        except OSError as e:  # training would take another text, which is no substitute here
            if folder.resolve() != SHIPPED:
                fix = "give --data=FILE"
                raise UserError(f"Shakespeare cannot be downloaded ({e}); {fix}") from None
            cli.warn(f"Shakespeare cannot be downloaded ({e}): scoring {EXCERPT}, an imitation")
            source = str(EXCERPT)
    elif not data and source not in ("patterns", "pydoc") and not path.exists():
        raise UserError(f"{source}, the data of {folder}, is not here; give --data=FILE")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        if source == str(EXCERPT):  # all of it, where other texts are scored on their last tenth
            path = Path(tmp) / "text"
            path.write_text(10 * EXCERPT.read_text(encoding="utf-8"), encoding="utf-8")
        if not sources.is_ids(path):
            mdlm.prepare(dataclasses.replace(config, data=str(path)), Path(tmp), tokenizer)
            path = Path(tmp)
        corpus = mdlm.Corpus(path, config, device)
        if corpus.tokenizer.to_json() != tokenizer.to_json():
            raise UserError(f"{source} has another vocabulary than {folder}; give --data=FILE")
        yield corpus, source


def evaluate(model, corpus, windows, passes=4, exact=False, batch_size=None):
    """All figures of a model on windows (W, T) of a corpus, as a dict for JSON.

    Beside those of mdlm.evaluate, in nats per token: `perplexity`; `bpc`, `bpc_se`: bits per
    character; `by_position`: mean confidence and accuracy, (T,) lists; `calibration`: share of
    predictions, confidence and accuracy by bin of confidence, and `ece`, the mean of |accuracy -
    confidence| (Guo et al., 1706.04599); `exact`: from left to right. NaN stands for no data.
    """
    W, T = windows.shape
    B = batch_size or group_size(model, windows.device)
    positions = torch.zeros(3, T, dtype=torch.float64)  # sums of 1, confidence and hits
    bins = torch.zeros(3, 10, dtype=torch.float64)  # the same by confidence

    def observe(rows, y, logits):
        confidence, guess = checked(logits).softmax(-1).max(-1)  # (n,)
        facts = torch.stack((torch.ones_like(confidence), confidence, guess == y))
        facts = facts.cpu().double()  # (3, n)
        positions.index_add_(1, rows.cpu() % T, facts)
        bins.index_add_(1, (facts[1] * 10).long().clamp(max=9), facts)
        bar.update()

    with cli.progress("masked", " batches", total=math.ceil(W / B) * passes) as bar:
        r = mdlm.evaluate(model, windows, passes, batch_size=B, observe=observe)
    for name, sums in (("by_position", positions), ("calibration", bins)):
        confidence, accuracy = (sums[1:] / sums[0]).tolist()
        r[name] = dict(confidence=confidence, accuracy=accuracy)
    ece = (bins[1] - bins[2]).abs().sum() / bins[0].sum()
    r["calibration"] |= dict(share=(bins[0] / bins[0].sum()).tolist(), ece=ece.item())
    nats = r.get("nll", r.get("nelbo"))
    r |= dict(perplexity=math.exp(min(nats, 700)), bpc=per_character(nats, corpus))
    r |= dict(bpc_se=per_character(r["se"], corpus), entropy=corpus.entropy)
    r["uniform"] = math.log(model.vocab_size)
    if "nll" in r:
        r["exact"] = {name: r[name] for name in ("nll", "se", "bpc", "windows", "by_window")}
    elif exact:
        r["exact"] = exact_likelihood(model, corpus, windows)
    return r


def per_character(nats, corpus):
    return nats / math.log(2) / (corpus.chars_per_token or math.nan)


def exact_likelihood(model, corpus, windows):
    """The chain rule's mean over windows (W, T), with its standard error over windows."""
    length = model.learned(windows).sum(1).double().cpu()
    with cli.progress("exact likelihood", " tokens", total=int(length.sum())) as bar:
        nll = -chain_rule(model, windows, update=bar.update).sum(1)  # (W,)
    nll /= length.mean()  # nats per token, and a window counts by its length
    mean = nll.mean().item()
    se = numerics.standard_error(nll - mean * length / length.mean())
    r = dict(nll=mean, se=se, bpc=per_character(mean, corpus))
    return r | dict(windows=len(windows), by_window=nll.tolist())


def likelihood(r):
    error = f" +- {r['se']:.4f}" if math.isfinite(r["se"]) else ""
    bits = f", {r['bpc']:.4f} bits per character" if math.isfinite(r["bpc"]) else ""
    return f"{r.get('nll', r.get('nelbo')):.4f}{error} nats per token{bits}"


def report(r):
    """The results as lines of text."""
    windows = f"{r['windows']} windows of {r['block_size']} tokens, {r['data']}"
    temperature = f", temperature {r['temperature']}" if r["temperature"] != 1 else ""
    lines = [f"{r['checkpoint']}{temperature}; {windows}"]
    perplexity = f"perplexity {r['perplexity']:.2f}"
    if "nll" in r:
        lines.append(f"NLL {likelihood(r)}, shifted {r['ar_shifted']:.4f}, {perplexity}")
    else:
        lines.append(f"NELBO {likelihood(r)}, {r['passes']} masks a window, {perplexity}")
        tenths = [f"{i}-{i + 10}" for i in range(0, 100, 10)]
        rows = [["masked, %", *tenths], ["CE", *r["ce"]], ["accuracy", *r["accuracy"]]]
        lines.append(plots.table(rows, digits=2))
    if "exact" in r and "nelbo" in r:
        windows = r["exact"]["windows"]
        lines.append(f"exact, left to right: {likelihood(r['exact'])}, {windows} windows")
    if r["entropy"]:
        lines.append(f"exact entropy of the patterns: {r['entropy']:.4f} nats per token")
    c = r["calibration"]
    both = [sum(n * v for n, v in zip(c["share"], c[k]) if n) for k in ("confidence", "accuracy")]
    words = "mean confidence {:.3f}, accuracy {:.3f}".format(*both)
    lines.append(f"{words}, calibration error (ECE) {c['ece']:.3f}")
    return "\n".join(lines)


def check(given):
    """The Options of the flags that were given; raises UserError where they are wrong."""
    options = Options(**given)
    for path in (options.data, *options.compare.split(",")):
        cli.check_files({"compare" if options.compare else "data": path}, dict(json=options.json))
    measured = "out_dir data windows passes temperature exact"
    cli.check_clashes([("compare", measured, "give one of them")], given)
    measured = "data compare windows passes temperature exact"
    cli.check_clashes([("text", measured, "--text measures nothing else")], given)
    if given.keys() & {"text", "rate"} and not options.text:
        raise UserError("--text is empty or missing; give one, --rate alone masks nothing")
    path = Path(options.json)
    if options.json not in ("", "-") and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise UserError(f"--json={path} cannot be written; give a file in an existing folder, or -")
    plots.check_folder(options.pictures)
    return options


def read_windows(path):
    """A file of --json: {figure: (W,) float64 nats per token}, and what was scored."""
    r = read_json(path, "result of eval.py --json")
    try:
        parts = {"NELBO or NLL": r} | ({"exact": r["exact"]} if "exact" in r else {})
        values = {k: torch.tensor(v["by_window"], dtype=torch.float64) for k, v in parts.items()}
        if any(v.shape != (r["windows"],) for v in values.values()):
            raise ValueError("another number of windows")
        return values, (r["crc"], r["windows"])
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise UserError(f"{path} is not from eval.py --json; evaluate that run again") from None


def compare_windows(names):
    """--compare of files of --json: how each differs from the first, on the same windows."""
    first, scored = read_windows(names[0])
    rows = []
    for name in names:
        values, same = read_windows(name)
        if same != scored:
            given = f"{name} and {names[0]} scored other windows"
            raise UserError(f"{given}; evaluate both on the same text, with the same --windows")
        for figure in sorted(values.keys() & first.keys()):
            more = values[figure] - first[figure]
            row = dict(file=name, figure=figure, value=values[figure].mean().item())
            rows.append(row | dict(more=more.mean().item(), se=numerics.standard_error(more)))
    words = plots.table([rows[0].keys(), *(row.values() for row in rows)], digits=4)
    words += f"\nnats per token; more: than {names[0]}; se: its standard error, window by window"
    return dict(runs=rows), words, None, {}


def compare(options):
    """--compare: (results, words, folder for pictures, pictures) of the last logged evaluations."""
    runs = options.compare.strip(",").split(",")
    if all(name.endswith(".json") for name in runs):
        return compare_windows(runs)
    rows = []
    for name in runs:
        key, val = plots.validations(plots.read_log(name))
        if not val:
            raise UserError(f"{name} has logged no evaluation yet; wait for one, or leave it out")
        last = val[-1]
        best = min(val, key=lambda v: v[key])
        row = dict(run=name, objective="ar" if key == "val_nll" else "mdlm", value=last[key])
        row |= dict(se=last[f"{key}_se"], bpc=last["val_bpc"], step=last["step"])
        row |= dict(tokens=last["tokens"], seconds=last["seconds"])
        row |= dict(ar_shifted=last.get("val_ar_shifted"), best=best[key], best_step=best["step"])
        rows.append(row)
    words = plots.table([rows[0].keys(), *(row.values() for row in rows)], digits=4)
    words += "\nvalue: nats per token, comparable for one text and tokenizer; ar: exact, with [END]"
    draw = {"compare.png": partial(plots.plot_losses, out_dirs=runs)}
    return dict(runs=rows), words, Path(runs[0]), draw


def evaluation(options):
    """(results, words, folder for pictures or None, pictures) of one model."""
    device = pick_device(options.device)
    folder = find_checkpoint(default_run(options.out_dir))
    model, tokenizer, config = mdlm.load(folder, device)
    with open_data(options.data, folder, tokenizer, config, device) as (corpus, source):
        windows = corpus.windows(options.windows)
    if options.temperature != 1:
        model.register_forward_hook(lambda _, args, logits: logits / options.temperature)
    r = dict(checkpoint=str(folder), temperature=options.temperature, data=source)
    r |= dict(objective=config.objective, block_size=config.block_size)
    r |= dict(crc=zlib.crc32(windows.cpu().numpy()))
    with torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
        r |= evaluate(model, corpus, windows, options.passes, options.exact)
    home = folder.parent if (folder.parent / "log.jsonl").exists() else None
    draw = {"loss.png": partial(plots.plot_losses, out_dirs=[home])} if home else {}
    draw["confidence.png"] = partial(plots.plot_confidence, r)
    if config.objective == "mdlm":
        draw["rates.png"] = partial(plots.plot_rates, r)
    return r, report(r), home, draw


# ---- --text: what a model sees and does in one text
RATES = (0.2, 0.5, 0.8)
DRAWS = 64  # random masks, over which accuracy and cross-entropy are means


@torch.no_grad()
def predict(model, x0, n, rate):
    """Mask the first n tokens of x0 (1, T) at a rate, DRAWS times.

    Returns xt (T,), bool (T,) which of it is masked, p (T, V) there (all of the first time), and
    the means of accuracy and cross-entropy.
    """
    count = torch.tensor([max(1, round(rate * n))], device=x0.device)
    rest = torch.arange(x0.shape[1], device=x0.device)[None] >= n  # what follows the text
    sums = torch.zeros(2)
    for part in groups(model, DRAWS, x0.device):
        draws = torch.arange(part.start, part.stop, device=x0.device)
        x = x0.repeat(len(draws), 1)
        fixed = rest.expand_as(x)
        key = (model.mask_id, 0x7EA7, 0, draws)
        xt, _, rows, k = model.ops.mask_tokens(x, count.expand(len(x)), *key, fixed)
        rows = rows[: int(k)]
        logits = checked(model(xt, rows=rows))  # (k, V)
        truth = x.flatten()[rows]
        hits = (logits.argmax(-1) == truth).sum()
        sums += torch.stack((hits, F.cross_entropy(logits, truth, reduction="sum"))).cpu()
        if part.start == 0:
            masked = (xt == model.mask_id)[0] & ~rest[0]
            first = (xt[0], masked, model(xt[:1])[0].softmax(-1))
    return *first, *(sums / (DRAWS * count.item())).tolist()


@torch.no_grad()
def attention_maps(model, xt):
    """What each head attends to: {number of the block: (H, T, T) probabilities} for xt (1, T).

    Computed explicitly, as a fused kernel never has them.
    """
    ops = model.ops
    maps = []

    def explicit(qkv, cos, sin, qk_norm, causal, spans):
        q, k, _ = reference.prepare(qkv, cos, sin, qk_norm)  # (1, T, H, D)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        if spans is not None:
            at = torch.arange(xt.shape[1], device=xt.device)
            scores = scores.masked_fill(~reference.is_visible(spans, at)[:, None], -math.inf)
        maps.append(scores.softmax(-1)[0].cpu())
        return ops.attention(qkv, cos, sin, qk_norm, causal, spans)

    model.ops = SimpleNamespace(attention=explicit)
    model(xt)
    model.ops = ops
    numbers = [i for i, block in enumerate(model.blocks) if block.qkv is not None]
    return dict(zip(numbers, maps))


def count_masks(T, draws=1000):
    """How many of T tokens are masked, by rate: {rate: two lists (draws,), Bernoulli and exact}."""
    x0 = torch.zeros(draws, T, dtype=torch.int64)
    found = {}
    for rate in RATES:
        bernoulli = torch.full((draws,), rate)
        exact = (bernoulli * T).round().long()
        key = (1, 0, 0, torch.arange(draws))  # the id of [MASK], seed, step, samples
        masks = [reference.mask_tokens_ref(x0, how, *key) for how in (bernoulli, exact)]
        found[rate] = [count.tolist() for _, count, _, _ in masks]
    return found


def schedule_densities(config):
    """How often each mask rate is drawn in training: {schedule: (T,), 1 where all are alike}."""
    found = {}
    for name in mdlm.SCHEDULES:
        variant = dataclasses.replace(config, masking="exact", mask_schedule=name)
        found[name] = (mdlm.count_probabilities(variant)[1:] * config.block_size).tolist()
    return found


@torch.no_grad()
def time_embedding(model):
    """What --time_conditioning tells the blocks, at mask rates from 0 to 1: (101, C)."""
    rates = torch.linspace(0, 1, 101, device=model.cos.device)[:, None]
    waves = torch.cos(rates * math.pi * torch.arange(model.config.n_embd, device=rates.device))
    return F.silu(model.rate(waves)).cpu()


def text_report(r):
    """The results of show_text as lines of text."""
    tokens = r["tokens"]
    masked = [token for token in tokens if token["likeliest"]]
    lines = [f"{r['checkpoint']}: {len(masked)} of {len(tokens)} tokens masked"]
    lines += viewer.aligned(tokens)
    for token in masked:
        best = [f"{text!r} {p:.1%}" for text, p in token["likeliest"]]
        head = f"token {token['number']:>4} {token['mark']} {token['text']!r}:"
        lines.append("   ".join((head, *best)))
    lines.append(f"The same text, means over {DRAWS} random masks:")
    columns = zip(*(row.values() for row in r["by_rate"]))
    rows = [[name, *column] for name, column in zip(("rate", "accuracy", "CE"), columns)]
    lines.append(plots.table(rows, digits=3))
    lines.append(f"Masked tokens of {r['block_size']}, 1,000 draws, mean +- standard deviation:")
    rows = [["rate", "each token at this rate (Bernoulli)", "exact number"]]
    for rate, draws in r["counts"].items():
        rows.append([rate, *(f"{mean(n):.1f} +- {pstdev(n):.1f}" for n in draws)])
    lines.append(plots.table(rows, digits=1))
    return "\n".join(lines)


def show_text(options):
    """--text: (results, words, folder for pictures or None, pictures)."""
    device = pick_device(options.device)
    folder = find_checkpoint(default_run(options.out_dir))
    model, tokenizer, config = mdlm.load(folder, device)
    if config.objective == "ar" or config.prompt_column:
        raise UserError(f"--text is for models that fill gaps, and {folder} does not; leave it out")
    ids = tokenizer.encode(options.text)
    n = len(ids)
    if not 0 < n <= config.block_size:
        raise UserError(f"--text has {n} tokens; give 1 to {config.block_size}")
    x0 = to_context(model, torch.tensor([ids], device=device))
    xt, masked, p, *_ = predict(model, x0, n, options.rate)
    tokens = []
    for i, text in enumerate(viewer.pieces(tokenizer, ids)):
        token = dict(number=i + 1, text=text, mark="", likeliest=[])
        if masked[i]:
            token["likeliest"] = viewer.likeliest(tokenizer, p[i], 3)
            token["mark"] = "+" if p[i].argmax() == ids[i] else "x"
        tokens.append(token)
    by_rate = []
    for rate in RATES:
        *_, accuracy, ce = predict(model, x0, n, rate)
        by_rate.append(dict(rate=rate, accuracy=accuracy, ce=ce))
    r = dict(checkpoint=str(folder), rate=options.rate, tokens=tokens, by_rate=by_rate)
    r |= dict(block_size=config.block_size, counts=count_masks(config.block_size))
    maps = {i: m[:, :n, :n] for i, m in attention_maps(model, xt[None]).items()}
    draw = {"attention.png": partial(plots.plot_attention, maps, tokens)}
    schedules = schedule_densities(config)
    draw["masking.png"] = partial(plots.plot_masking, r["counts"], config.block_size, schedules)
    if config.time_conditioning:
        draw["time.png"] = partial(plots.plot_time, time_embedding(model))
    home = folder.parent if (folder.parent / "log.jsonl").exists() else None
    return r, text_report(r), home, draw


def main(argv):
    options = check(cli.parse_flags(Options, argv, __doc__))
    kind = compare if options.compare else show_text if options.text else evaluation
    results, words, folder, draw = kind(options)
    content = json.dumps(json.loads(json.dumps(results), parse_constant=lambda _: None))  # no NaN
    if sys.stdout.isatty():
        words = cli.escaped(words)
    print(content if options.json == "-" else words)
    if options.json not in ("", "-"):
        write_output(Path(options.json), content.encode())
    plots.save(draw, options.pictures or folder, verbose=options.json != "-")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:], sizes=lambda: "give --device=cpu or --dtype=bfloat16"))
