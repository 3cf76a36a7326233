"""Evaluate a model: its likelihood with an error, accuracy and calibration; pictures.

    python eval.py                            # the run in out/, else the model that ships
    python eval.py --exact --windows=64       # also the exact likelihood
    python eval.py --text="To be, or not"     # show its predictions; --pictures=FOLDER draws them
    python eval.py --calibrate=held_out.txt   # fit and save the temperature of its logits
    python eval.py --compare=out-mdlm,out-ar  # compare the logs of runs: a table, curves
    python eval.py --compare=a.json,b.json    # two files of --json, window by window

Pictures of a run go into its folder. On a CPU, results are reproducible bit for bit.
"""

from nanomdlm.support.cli import entry, environment, terminal

entry.start(__name__)

import contextlib
import dataclasses
import math
import sys
import tempfile
import zlib
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch

import mdlm
from nanomdlm.support import abilities, numerics
from nanomdlm.support.cli import hub, outputs
from nanomdlm.support.cli.devices import dtype_of_predictions, pick_device
from nanomdlm.support.cli.files import naming, to_json
from nanomdlm.support.cli.settings import (
    READS,
    Bounds,
    Count,
    Makes,
    Reads,
    Share,
    Text,
    Writes,
    check_clashes,
    names_of,
    parse,
)
from nanomdlm.support.data import sources, texts
from nanomdlm.support.data.texts import prepare
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import display
from nanomdlm.support.infill.ensemble import read_newest
from nanomdlm.support.infill.likelihood import chain_rule
from nanomdlm.support.infill.model_calls import checked, device_of, group_size, to_context
from nanomdlm.support.run import calibration, checkpoint, checkpoint_score, comparing, plots
from nanomdlm.support.run import config as run_config
from nanomdlm.support.run.checkpoint import default_run, read_state

Temperature = Annotated[float, Bounds(0, 100)]
Passes = Annotated[int, Bounds(1, 4096)]


@dataclasses.dataclass
class Options:
    """What to evaluate, how, and what to show."""

    out_dir: Reads = ""  # run, or checkpoint; A,B: their mean (default: out, or what ships)
    data: Reads = ""  # text, whose last tenth is scored, or a folder (default: the run's data)
    compare: Reads = ""  # RUN,RUN,...: their logs; or A.json,B.json,...: window by window
    text: Text = ""  # mask this text, and show what the model predicts
    rate: Share = 0.5  # fraction of the tokens of --text to mask, at least one
    windows: Count = 4096  # score at most this many validation windows, evenly spread
    passes: Passes = 4  # random masks per window
    temperature: Temperature = 0.0  # divide the logits by this (0: the network's, by --calibrate)
    calibrate: Reads = ""  # fit the network's temperature to this text, which it has not learned
    whole: bool = False  # score a model trained with --infill_share as one without blocks
    exact: bool = False  # also compute the exact left-to-right likelihood, one call per token
    device: str = "auto"  # cpu, cuda, cuda:1 or mps; auto: a GPU if there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"  # bfloat16: faster, less accurate
    trust_remote_code: bool = False  # allow custom code from the checkpoint
    json: Writes = ""  # write the results to this file as JSON (-: standard output)
    pictures: Makes = ""  # folder for the pictures, or none (default: the folder of the run)


def open_model(options, whole):
    """(folders of the checkpoints, (model, tokenizer, config)) of --out_dir."""
    settings = dict(device=pick_device(options.device), whole=whole)
    read = partial(mdlm.load, **settings, trust_remote_code=options.trust_remote_code)
    return read_newest(default_run(options.out_dir), read)


@contextlib.contextmanager
def open_data(data, folder, tokenizer, config, device):
    """Context manager of (mdlm.Corpus, its name): `data` in the model's tokens, or the run's data.

    Never another text, as training without a network takes.
    """
    if data.startswith(hub.DATASETS):
        data = hub.dataset(data)
    prepared = folder.parent / "data"
    is_own = not data and (prepared / "meta.json").exists()
    source = str(prepared) if is_own else data or config.data
    path = Path(source)
    if source == "shakespeare":
        path = sources.require_shakespeare()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        is_ids = sources.is_ids(path)
        if not is_ids:
            settings = texts.to_score(dataclasses.replace(config, data=str(path)))
            with naming(tmp):
                prepare(settings, Path(tmp), tokenizer)
            path = Path(tmp)
        corpus = mdlm.variants.open_corpus(
            mdlm.Corpus, sources.of_config(path, config), config, device
        )
        if corpus.tokenizer.to_json() != tokenizer.to_json():
            raise UserError(f"{source} has a different vocabulary than {folder}; give --data=FILE")
        # The ids of a run, unless its checkpoint is one without a training state.
        if is_ids and not data and (folder / "state.json").exists():
            state = read_state(folder)
            if any(state.get(name, value) != value for name, value in corpus.identity.items()):
                fix = f"restore it, or give --data={source} to score it as it is"
                raise UserError(f"{source} is not what {folder} learned; {fix}")
        yield corpus, source


def evaluate(model, corpus, windows, passes=4, exact=False, batch_size=None):
    """All figures of a model on windows (W, T) of a corpus, as a dict for JSON.

    In addition to those of mdlm.evaluate, in nats per token: `perplexity`; `bpc`, `bpc_se`: bits
    per character; `se_blocks`: the standard error over 20 blocks of neighboring windows, whose
    losses are alike (infinity below 40 windows); `by_position`: mean confidence and accuracy, (T,)
    lists; `calibration`: share of predictions, confidence and accuracy by bin of confidence, and
    `ece`, the mean of |accuracy - confidence| (Guo et al., 1706.04599); `exact`: from left to
    right. NaN means no data.
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

    with terminal.bar(total=math.ceil(W / B) * passes, desc="masked", unit=" batches") as bar:
        r = mdlm.evaluate(model, windows, passes, batch_size=B, observe=observe)
    for name, sums in (("by_position", positions), ("calibration", bins)):
        confidence, accuracy = (sums[1:] / sums[0]).tolist()
        r[name] = dict(confidence=confidence, accuracy=accuracy)
    ece = (bins[1] - bins[2]).abs().sum() / bins[0].sum()
    r["calibration"] |= dict(share=(bins[0] / bins[0].sum()).tolist(), ece=ece.item())
    nats = r.get("nll", r.get("nelbo"))
    r |= dict(perplexity=math.exp(min(nats, 700)), bpc=per_character(nats, corpus))
    r |= dict(bpc_se=per_character(r["se"], corpus), entropy=corpus.entropy)
    length = torch.tensor(r["tokens_by_window"], dtype=torch.float64)
    residual = torch.tensor(r["by_window"]) - nats * length / length.mean()
    r["se_blocks"] = numerics.block_error(residual)
    if "nll" in r:
        r["exact"] = {name: r[name] for name in ("nll", "se", "bpc", "windows", "by_window")}
    elif exact:
        r["exact"] = exact_likelihood(model, corpus, windows)
    return r


def per_character(nats, corpus):
    return nats / math.log(2) / (corpus.chars_per_token or math.nan)


def exact_likelihood(model, corpus, windows):
    """The chain rule's mean over windows (W, T), with its standard error over windows."""
    length = model.objective.scored_mask(windows).sum(1).double().cpu()
    with terminal.bar(total=int(length.sum()), desc="exact likelihood", unit=" tokens") as bar:
        nll = -chain_rule(model, windows, update=bar.update).sum(1)  # (W,)
    nll /= length.mean()  # nats per token, with windows weighted by their length
    mean = nll.mean().item()
    se = numerics.standard_error(nll - mean * length / length.mean())
    r = dict(nll=mean, se=se, bpc=per_character(mean, corpus))
    return r | dict(windows=len(windows), by_window=nll.tolist())


def likelihood(r):
    nats = r.get("nll", r.get("nelbo"))
    bits = f", {r['bpc']:.4f} bits per character" if math.isfinite(r["bpc"]) else ""
    error = f" +- {r['se']:.4f}" if math.isfinite(r["se"]) else ""
    return f"{nats:.4f}{error} nats per token{bits}"


def by_rate(r):
    """A table of cross-entropy and accuracy."""
    tenths = [f"{i}-{i + 10}" for i in range(0, 100, 10)]
    rows = [["masked, %", *tenths], ["CE", *r["ce"]], ["accuracy", *r["accuracy"]]]
    return plots.table(rows, digits=2)


def report(r):
    """The results as lines of text."""
    blocks = f" in blocks of {r['block_length']}" * bool(r["block_length"])
    windows = f"{r['windows']} windows of {r['block_size']} tokens{blocks}, {r['data']}"
    temperature = f", temperature {r['temperature']}" if r["temperature"] != 1 else ""
    temperature += " (calibrated)" * r["calibrated"]
    lines = [f"{r['checkpoint']}{temperature}; {windows}"]
    perplexity = f"perplexity {r['perplexity']:.2f}"
    if "nll" in r:
        lines.append(f"NLL {likelihood(r)}, shifted {r['ar_shifted']:.4f}, {perplexity}")
    else:
        lines.append(f"NELBO {likelihood(r)}, {r['passes']} masks per window, {perplexity}")
        lines.append(by_rate(r))
    if "exact" in r and "nelbo" in r:
        windows = r["exact"]["windows"]
        lines.append(f"exact, left to right: {likelihood(r['exact'])}, {windows} windows")
    if math.isfinite(r["se_blocks"]):
        lines.append(f"over 20 blocks of neighboring windows: +- {r['se_blocks']:.4f}")
    if r["entropy"]:
        lines.append(f"exact entropy of the patterns: {r['entropy']:.4f} nats per token")
    c = r["calibration"]
    both = [sum(n * v for n, v in zip(c["share"], c[k]) if n) for k in ("confidence", "accuracy")]
    words = "mean confidence {:.3f}, accuracy {:.3f}".format(*both)
    lines.append(f"{words}, calibration error (ECE) {c['ece']:.3f}")
    return "\n".join(lines)


def check(given):
    """The Options for the given flags; raises UserError if they are wrong."""
    options = Options(**given)
    measured = "data windows passes temperature calibrate whole exact"
    clashes = [
        ("compare", f"out_dir {measured}", "give one of them"),
        ("text", f"compare dtype {measured}", "--text measures nothing else"),
        ("calibrate", "data temperature exact pictures", "fit first, then measure"),
    ]
    check_clashes(clashes, given)
    if "rate" in given and not options.text:
        raise UserError("--rate needs a text to mask; give --text")
    outputs.check_all(options)  # now, because measuring takes long
    if options.pictures not in ("", "none"):
        environment.optional("matplotlib", "--pictures")
        read = outputs.paths_of(options, READS) | dict(json=options.json)
        outputs.check_folder("pictures", options.pictures, read, plots.PICTURES)
    return options


def settings_of(run):
    """The settings of a run as a dict; of a log without a checkpoint its name alone."""
    newest = next(iter(checkpoint.checkpoints(Path(run))), None)
    if newest is None:
        return dict(seed=None, name=run)
    return vars(run_config.read(mdlm.Config, newest))


def compare(options):
    """--compare: (results, words, folder for pictures or None, pictures) of evaluations: the final
    ones in the logs of runs, or those in files of --json."""
    runs = names_of(options.compare)
    if all(name.endswith(".json") for name in runs):
        r = comparing.compare(runs)
        return r, comparing.in_words(r), None, {}
    rows = []
    settings = []
    for name in runs:
        key, val = plots.validations(plots.read_log(name))
        if not val:
            raise UserError(f"{name} has logged no evaluation yet; wait for one, or leave it out")
        last = val[-1]
        row = dict(run=name, objective="ar" if key == "val_nll" else "mdlm", value=last[key])
        row |= dict(se=last[f"{key}_se"], bpc=last["val_bpc"])
        row |= {k: last[k] for k in ("step", "tokens", "seconds")}
        rows.append(row | dict(ar_shifted=last.get("val_ar_shifted")))
        settings.append(settings_of(name))
    words = plots.table([rows[0].keys(), *(row.values() for row in rows)], digits=4)
    words += "\nvalue: nats per token; compare only with the same text and tokenizer"
    words += "\nar: exact, with [END]"
    groups = comparing.by_seed(rows, settings)
    words += f"\n{comparing.seeds_in_words(groups)}"
    draw = {"compare.png": partial(plots.plot_losses, out_dirs=runs)}
    return dict(runs=rows, seeds=groups), words, Path(runs[0]), draw


def evaluation(options):
    """(results, words, folder for pictures or None, pictures) of one model."""
    folders, (model, tokenizer, config) = open_model(options, options.whole)
    folder = folders[0]
    if options.whole and not config.infill_share:
        raise UserError(
            f"--whole is for models of mdlm.py --infill_share, not {folder}; leave it out"
        )
    device = device_of(model)
    with open_data(options.data, folder, tokenizer, config, device) as (corpus, source):
        windows = corpus.windows(options.windows)
    checkpoint_score.introduce(folders, options.out_dir)
    temperature = options.temperature or calibration.temperature_of(model)
    if options.temperature:
        model = calibration.at_temperature(model, temperature)
    else:
        model = calibration.calibrated(model)
    r = dict(
        checkpoint=",".join(map(str, folders)),
        temperature=temperature,
        data=source,
        calibrated=not options.temperature and temperature != 1,
        objective=config.objective,
        block_size=config.block_size,
        crc=zlib.crc32(windows.cpu().numpy()),
        block_length=config.block_length,
        tokenizer=zlib.crc32(tokenizer.to_json().encode()),
    )
    dtype = dtype_of_predictions(options.dtype, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        r |= evaluate(model, corpus, windows, options.passes, options.exact)
    is_of_a_run = len(folders) == 1 and (folder.parent / "log.jsonl").exists()
    home = folder.parent if is_of_a_run else None
    draw = {"loss.png": partial(plots.plot_losses, out_dirs=[home])} if home else {}
    draw["confidence.png"] = partial(plots.plot_confidence, r)
    if config.objective == "mdlm":
        draw["rates.png"] = partial(plots.plot_rates, r)
    if shows_gaps(model):
        draw["predictions.png"] = partial(plot_window, model, tokenizer, windows[:1])
    return r, report(r), home, draw


# ---- --calibrate: the temperature at which a text is likeliest
def calibrate(options):
    """(results, words, None, {}): fit the temperature of a checkpoint, and write it there."""
    folders, (model, tokenizer, config) = open_model(options, options.whole)
    device = device_of(model)
    if len(folders) > 1:
        raise UserError("--calibrate fits a single network; give one run as --out_dir")
    folder = folders[0]
    path = options.calibrate
    with open_data(path, folder, tokenizer, config, device) as (corpus, _):
        windows = corpus.windows(options.windows)
        room = options.windows - len(windows)
        some = torch.arange(min(room, corpus.W)) * corpus.W // max(1, min(room, corpus.W))
        windows = torch.cat((windows, corpus.take("train", some, 0)[0]))
    is_own = False
    try:
        with open_data("", folder, tokenizer, config, device) as (corpus, _):
            known = [ids.cpu().numpy() for ids in corpus.ids.values()]
            some = windows[:: len(windows) // 8 or 1].cpu().numpy()
            middles = [middle_of(window, tokenizer.end_id) for window in some]
            found = sum(any(occurs(ids, middle) for ids in known) for middle in middles)
            # Short texts occur anywhere: of these, most must be known.
            are_long = min(len(tokenizer.decode(middle.tolist())) for middle in middles) >= 40
            is_own = found > 0 if are_long else 2 * found > len(middles)
    except (OSError, UserError) as e:
        terminal.warn(f"{e}: cannot check whether {folder} was trained on {path}")
    if is_own:
        what = f"{path} is the text that {folder} learned, or that validates it"
        raise UserError(f"{what}; give similar text that it has never seen")
    checkpoint_score.introduce(folders, options.out_dir)
    temperature = calibration.fit(model, windows, options.passes)
    source = f"{Path(path).name}, {len(windows)} windows of {config.block_size}"
    found = dict(temperature=temperature, source=source)
    checkpoint.calibrate(folder, found)
    r = dict(checkpoint=str(folder)) | found
    return r, f"{folder}: temperature {temperature}, fitted to {source}", None, {}


def middle_of(window, end_id):
    """The middle of a window (T,) of tokens, without the [END]s that fill it up."""
    n = len(window)
    while n > 1 and window[n - 1] == window[n - 2] == end_id:
        n -= 1
    return window[:n][n // 4 :][:64]


def occurs(ids, middle):
    """Whether some tokens (n,) occur in an array of ids."""
    places = np.flatnonzero(ids[: len(ids) - len(middle) + 1] == middle[0])
    for i, id in enumerate(middle):
        places = places[ids[places + i] == id]
    return len(places) > 0


# ---- --text: what a model sees and predicts in one text
DRAWS = 128  # random masks to average accuracy and cross-entropy over


def shows_gaps(model):
    return abilities.fills_gaps(model) and not model.config.prompt_column


@torch.no_grad()
def predict(model, tokenizer, x0, n, scored, rate):
    """Mask `rate` of the scored tokens of a text, at least one, and predict them.

    x0: (1, T) ids. n: how many of them are the text. scored: (1, T) bool. Returns a dict for each
    of the n tokens: number, text, mark ("+": masked and predicted; "x": masked, but another token
    is likelier; "": not masked), likeliest: [(text, probability)] of three.
    """
    count = (rate * scored.sum(1)).round().long().clamp(min=1)
    key = (model.mask_id, 0x7EA7, 0, torch.zeros(1, dtype=torch.int64, device=x0.device))
    xt = model.ops.mask_tokens(x0, count, *key, ~scored)[0]
    p = checked(model(xt)[0]).softmax(-1)  # (T, V)
    ids = x0[0, :n].tolist()
    tokens = []
    for i, text in enumerate(tokenizer.pieces(ids)):
        token = dict(number=i + 1, text=text, mark="", likeliest=[])
        if xt[0, i] == model.mask_id:
            token["likeliest"] = display.likeliest(tokenizer, p[i], 3, first=i == 0)
            token["mark"] = "+" if p[i].argmax() == ids[i] else "x"
        tokens.append(token)
    return tokens


def plot_window(model, tokenizer, x0, path):
    """Plot what a model predicts in a half-masked window (1, T)."""
    scored = model.objective.scored_mask(x0)
    tokens = predict(model, tokenizer, x0, x0.shape[1], scored, 0.5)
    plots.plot_predictions(tokens, path)


@torch.no_grad()
def show_text(options):
    """--text: (results, words, folder for pictures or None, pictures)."""
    folders, (model, tokenizer, config) = open_model(options, True)
    device = device_of(model)
    folder = folders[0]
    if not shows_gaps(model):
        raise UserError(f"--text is for models that fill gaps, unlike {folder}; leave it out")
    ids = tokenizer.encode_lossless(options.text)
    n = len(ids)
    if not 0 < n <= config.block_size:
        raise UserError(f"--text has {n} tokens; give 1 to {config.block_size}")
    checkpoint_score.introduce(folders, options.out_dir)
    model = calibration.calibrated(model)
    x0 = to_context(model, torch.tensor([ids], device=device))  # (1, T)
    is_text = torch.arange(x0.shape[1], device=device)[None] < n
    tokens = predict(model, tokenizer, x0, n, is_text, options.rate)
    settings = dict(batch_size=group_size(model, device), scored=is_text.expand(DRAWS, -1))
    r = mdlm.evaluate(model, x0.expand(DRAWS, -1), **settings)
    shown = ",".join(map(str, folders))
    r = dict(checkpoint=shown, tokens=tokens, ce=r["ce"], accuracy=r["accuracy"])
    return r, text_report(r), None, {"predictions.png": partial(plots.plot_predictions, tokens)}


def text_report(r):
    """The results of show_text as lines of text."""
    masked = [token for token in r["tokens"] if token["mark"]]
    lines = [f"{r['checkpoint']}: {len(masked)} of {len(r['tokens'])} tokens masked"]
    lines += display.aligned(r["tokens"])
    for token in masked:
        best = [f"{text!r} {p:.1%}" for text, p in token["likeliest"]]
        head = f"token {token['number']:>4} {token['mark']} {token['text']!r}:"
        lines.append("   ".join((head, *best)))
    return "\n".join([*lines, f"this text under {DRAWS} random masks:", by_rate(r)])


def main(argv):
    options = check(parse(Options, argv, __doc__))
    kind = compare if options.compare else show_text if options.text else evaluation
    kind = calibrate if options.calibrate else kind
    results, words, folder, draw = kind(options)
    content = to_json(results)
    if terminal.is_terminal(sys.stdout):
        words = terminal.escaped(words)
    print(content if options.json == "-" else words)
    if options.json not in ("", "-"):
        outputs.write(options.json, content.encode())
    plots.save(draw, options.pictures or folder, verbose=options.json != "-")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
