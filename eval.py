"""Evaluate a run: its likelihood and the error of it, where it is right and how sure; pictures; a tour.

    python eval.py                                # NELBO, accuracy, calibration of the run in out/; pictures
    python eval.py --exact --windows=64           # and the exact left-to-right likelihood of those windows
    python eval.py --tour                         # the same step by step, with a sentence each
    python eval.py --compare=out-mdlm,out-ar      # the logs of several runs: a table and their loss curves

Everything is measured on the run's validation text, in one way: windows and masks do not depend on the batch,
and on a CPU the same command gives the same numbers to the last bit.
"""

import contextlib
import dataclasses
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import common
import mdlm
import pictures
import sample
import text
from common import Refusal, opt
from pictures import plot_losses, read_log, validations


@dataclass
class Options:
    out_dir: str = opt("out", "run folder or checkpoint folder")
    data: str = opt("", "score the last tenth of this text, or a folder's val.bin (default: the run's)")
    windows: int = opt(4096, "validation windows at most, evenly spread", bounds=(1, 1 << 31))
    passes: int = opt(4, "masks per window", bounds=(1, 4096))
    exact: bool = opt(False, "also the exact left-to-right likelihood: block_size network calls a window")
    raw: bool = opt(False, "evaluate the weights as trained, not the averaged ones")
    tour: bool = opt(False, "for learners: what the model does, step by step")
    compare: str = opt("", "RUN,RUN,...: compare what these runs logged; evaluates nothing")
    json: str = opt("", "write the results to this file as one JSON object; -: to standard output")
    pictures: str = opt("", "folder for the pictures; none: draw nothing (default: the run's; none where "
                        "--out_dir is a checkpoint without the log of its run)")
    device: str = opt("auto", "cpu, cuda, cuda:1, mps; auto: the best there is")
    dtype: str = opt("float32", "of products; bfloat16 is faster on a GPU and moves the fourth decimal",
                     "float32", "bfloat16")


# ------------------------------------------------------------------------------------------------------------
# What is evaluated


def load_raw(model, folder, config):
    """Give the model the weights as trained, which state.safetensors keeps beside the averaged ones."""
    if not config.ema:
        raise Refusal(f"--raw: {folder} was trained without an average (--ema=0), so its weights are the raw "
                      "ones already; leave --raw out")
    if not (folder / "state.safetensors").exists():
        raise Refusal(f"--raw: {folder} came without the state of its training (state.safetensors), which "
                      "alone holds the raw weights; leave --raw out, or name the run that trained it")
    raw = {name[4:]: t for name, t in common.read_tensors(folder / "state.safetensors").items()
           if name.startswith("raw.")}
    if {n: t.shape for n, t in raw.items()} != {n: p.shape for n, p in model.state_dict().items()}:
        raise Refusal(f"--raw: {folder}/state.safetensors holds no raw weights; leave --raw out")
    model.load_state_dict(raw)


@contextlib.contextmanager
def open_data(data, folder, tokenizer, config, device):
    """Within, (mdlm.Corpus, its name) of a checkpoint folder: `data`, the run's own, or what config names.

    Text is tokenized by the model's own tokenizer and split where training splits it.
    """
    kept = folder.parent / "data"
    source = data or (str(kept) if (kept / "meta.json").exists() else config.data)
    path = Path(source)
    if source == "shakespeare":
        try:
            path = text.shakespeare()
        except (OSError, RuntimeError) as e:  # training takes another text then, which would be wrong here
            raise Refusal(f"Shakespeare cannot be downloaded ({e}); give the text with --data=FILE") from None
    elif source not in ("patterns", "pydoc") and not path.exists():
        raise Refusal(f"--data={data} does not exist; give a text file or a folder with val.bin" if data else
                      f"{source}, the data of {folder}, is not here; give the text with --data=FILE")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        if not path.is_dir():
            mdlm.prepare(dataclasses.replace(config, data=str(path)), Path(tmp), tokenizer)
            path = Path(tmp)
        corpus = mdlm.Corpus(path, config, device)
        if corpus.tokenizer.to_json() != tokenizer.to_json():
            raise Refusal(f"the data in {source} has another vocabulary than {folder}; "
                          "give the model's own text with --data=FILE")
        yield corpus, source


def rows_at_once(model, windows):
    """Sequences in a batch: what a CPU's cache or a GPU likes, and at most 1 GiB of logits."""
    tokens = 1 << (12 if windows.device.type == "cpu" else 17)
    return max(1, min(tokens, (1 << 28) // model.vocab_size) // windows.shape[1])


def progress(what, total):
    """A bar on standard error, where that is a terminal."""
    from tqdm import tqdm
    return tqdm(desc=what, total=total, disable=None, leave=False, dynamic_ncols=True)


# ------------------------------------------------------------------------------------------------------------
# What is measured

BINS = 10  # of confidence


def measure(model, windows, passes=4, batch_size=None):
    """mdlm.evaluate of windows (W, T), and from the same network calls how sure and how right the model is.

    by_position   confidence and accuracy, (T,) lists over the masked tokens there (None: never masked)
    calibration   bins of confidence: share of predictions, mean confidence, accuracy; and their `ece`, the
                  mean over predictions of |accuracy - confidence| of their bin (Guo et al., 1706.04599)
    Every prediction of a masked token counts the same here; in the NELBO every sequence does.
    """
    W, T = windows.shape
    B = batch_size or rows_at_once(model, windows)
    positions, bins = torch.zeros(3, T, dtype=torch.float64), torch.zeros(3, BINS, dtype=torch.float64)

    def observe(rows, y, logits):
        p, guess = logits.softmax(-1).max(-1)
        p, right = p.cpu().double(), (guess == y).cpu().double()
        facts = torch.stack((torch.ones_like(p), p, right))  # (3, n)
        positions.index_add_(1, rows.cpu() % T, facts)
        bins.index_add_(1, (p * BINS).long().clamp(max=BINS - 1), facts)
        bar.update()

    with progress("masked evaluation", -(-W // B) * passes) as bar:
        r = mdlm.evaluate(model, windows, passes, batch_size=B, observe=observe)
    mean = lambda table: {name: [v / n if n else None for n, v in zip(table[0].tolist(), values.tolist())]
                          for name, values in (("confidence", table[1]), ("accuracy", table[2]))}
    share, ece = bins[0] / bins[0].sum(), (bins[1] - bins[2]).abs().sum() / bins[0].sum()
    return dict(r, by_position=mean(positions),
                calibration=dict(mean(bins), share=share.tolist(), ece=ece.item()))


def per_character(nats, corpus):
    return nats / math.log(2) / corpus.chars_per_token if corpus.chars_per_token else None


def evaluate(model, corpus, windows, passes=4, exact=False):
    """All figures of a model on windows (W, T) of a corpus, as a dict that is ready for JSON.

    nats per token: `nelbo` (autoregressive: `nll`, `ar_shifted`) and `se`; `perplexity`; bits per character:
    `bpc`, `bpc_se`; curves as in `measure`; `exact`: the left-to-right likelihood, which an autoregressive
    model gives without further calls.
    """
    r = measure(model, windows, passes)
    ar, key = "nll" in r, "nll" if "nll" in r else "nelbo"
    r.update(perplexity=math.exp(min(r[key], 700)), bpc=per_character(r[key], corpus),
             bpc_se=per_character(r["se"], corpus), entropy=corpus.entropy,
             uniform=math.log(model.vocab_size))
    if ar:
        r["exact"] = dict(nll=r["nll"], se=r["se"], bpc=r["bpc"], windows=len(windows))
    elif exact:
        r["exact"] = exact_likelihood(model, corpus, windows)
    return r


def exact_likelihood(model, corpus, windows):
    """The chain rule's mean over windows (W, T), with the standard error over windows."""
    with progress("exact likelihood", windows.numel()) as bar:
        logp = sample.chain_rule(model, windows, batch_size=rows_at_once(model, windows), update=bar.update)
    nll = -logp.mean(1)  # (W,)
    mean, se = nll.mean().item(), nll.std().item() / len(nll) ** 0.5 if len(nll) > 1 else math.inf
    return dict(nll=mean, se=se, bpc=per_character(mean, corpus), windows=len(windows))


# ------------------------------------------------------------------------------------------------------------
# What is said


def paint(words, code):
    """Words in an ANSI colour, where standard output is a terminal that wants colours (no-color.org)."""
    return f"\033[{code}m{words}\033[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else words


def plus_minus(value, se):
    return f"{value:.4f}" + (f" +- {se:.4f}" if math.isfinite(se) else "")


def likelihood(r):
    """The line of the NELBO or NLL."""
    key = "nll" if "nll" in r else "nelbo"
    return (f"{key.upper()} {plus_minus(r[key], r['se'])} nats per token"
            + (f", {plus_minus(r['bpc'], r['bpc_se'])} bits per character" if r["bpc"] else "")
            + f", perplexity {r['perplexity']:.2f}, "
            + (f"shifted {r['ar_shifted']:.4f}" if key == "nll" else f"{r['passes']} masks a window"))


def exact_line(r):
    e = r["exact"]
    return (f"exact likelihood, left to right: {plus_minus(e['nll'], e['se'])} nats per token"
            + (f", {e['bpc']:.4f} bits per character" if e["bpc"] else "") + f", {e['windows']} windows")


def rate_table(r):
    rows = (("masked, %", [f"{10 * i}-{10 * i + 10}" for i in range(10)]),
            ("CE", ["-" if v is None else f"{v:.2f}" for v in r["ce"]]),
            ("accuracy", ["-" if v is None else f"{v:.2f}" for v in r["accuracy"]]))
    return "\n".join(f"{name:10}" + "".join(f"{v:>7}" for v in values) for name, values in rows)


def calibration_line(r):
    c = r["calibration"]
    mean = lambda values: sum(share * v for share, v in zip(c["share"], values) if share)
    return (f"mean confidence {mean(c['confidence']):.3f}, accuracy {mean(c['accuracy']):.3f}, "
            f"calibration error (ECE) {c['ece']:.3f}")


def report(r):
    """The results in a few lines."""
    weights = dict(ema="averaged weights", raw="raw weights", only="weights")[r["weights"]]
    lines = [f"{r['checkpoint']}, {weights}; {r['windows']} windows of {r['block_size']} tokens, {r['data']}",
             likelihood(r)]
    lines += [exact_line(r)] if "exact" in r and "nelbo" in r else []
    lines += [f"exact entropy of the patterns: {r['entropy']:.4f} nats per token"] if r["entropy"] else []
    return "\n".join(lines + ([rate_table(r)] if "nelbo" in r else []) + [calibration_line(r)])


def tour(r, forward, cells, log, out_dir):
    """What a masked diffusion model does, in the order of the ideas: (title, sentence, what is shown)."""
    texts, t, masked = forward
    colours = bool(paint("", 1))
    lines = ["".join("█" * len(s) if hidden else s for s, hidden in zip(texts, row))
             for row in masked.tolist()]
    yield ("The forward process",
           "From t = 0 to t = 1 every token turns into [MASK] with probability t.",
           "\n".join(f"t = {t[i]:.1f}  {line}  {100 * masked[i].double().mean():.0f} % masked"
                     for i, line in enumerate(lines)))
    hidden = [(guess, s) for s, hidden, guess, _ in cells if hidden]
    right = sum(guess == s for guess, s in hidden)
    wrong = lambda guess, s: paint(guess.replace(" ", "␣"), "1;31") if colours else f"[{guess}/{s}]"
    shown = [s if not hidden else paint(guess, "1;34") if guess == s else wrong(guess, s)
             for s, hidden, guess, _ in cells]
    shown = [words + "\n" * cell[0].endswith("↵") for words, cell in zip(shown, cells)]
    yield ("Back in one step",
           "The model sees half of this text and predicts all the rest at once; "
           + ("right is blue, wrong is red." if colours else "[predicted/true] where it is wrong."),
           "".join(shown) + f"\n{right} of {len(hidden)} are right")
    yield ("Mask rates",
           f"The more is hidden the harder it is; knowing nothing costs ln V = {r['uniform']:.2f} nats.",
           rate_table(r))
    sure = torch.tensor([v or 0.0 for v in r["by_position"]["confidence"]])
    yield ("Confidence",
           "At the edges of a window a token has neighbours on one side only; and a model that is calibrated "
           "is right as often as it is confident.",
           f"first position {sure[0]:.3f}, last position {sure[-1]:.3f}\n" + calibration_line(r))
    yield ("One number",
           "The cross-entropy averaged over all mask rates is a bound on the likelihood: the NELBO.",
           likelihood(r))
    yield ("The exact likelihood",
           "Filled strictly from left to right the model has a likelihood, not only a bound on it, at the "
           "price of a network call for every token.", exact_line(r))
    yield ("How it got there",
           "The NELBO of text that it never trained on, step by step.",
           "\n".join(f"step {v['step']:>7}  {v['val_nelbo']:.4f}" for v in validations(log)[1])
           or "(this model came without its log)")
    yield ("What next",
           "Watch it write, score all of the text exactly, or train a model of your own and compare.",
           f"python sample.py --out_dir={out_dir}\npython eval.py --out_dir={out_dir} --exact\n"
           "python mdlm.py --data=my.txt --out_dir=out-my"
           + (f"\npython eval.py --compare={out_dir},out-my" if log else ""))


# ------------------------------------------------------------------------------------------------------------


def finite(x):
    """JSON has no NaN and no infinity: null."""
    if isinstance(x, dict):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def check(given):
    """The Options of the flags that were given; Refusal where they contradict each other."""
    options = Options(**given)
    common.check_fields(options)
    for one, others in (("compare", {"out_dir", "data", "windows", "passes", "exact", "raw", "tour"}),
                        ("tour", {"json"})):
        clash = sorted(others & given.keys()) if getattr(options, one) else ()
        if clash:
            raise Refusal(f"--{one} and --{clash[0]} contradict each other; give one of them")
    path = Path(options.json)
    if options.json not in ("", "-") and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise Refusal(f"--json={path} cannot be written; give a file in a folder that exists, or -")
    pictures.check_folder(options.pictures)
    return options


def compare(options):
    """(results, words, folder for pictures, pictures) of --compare: the last evaluations that runs logged."""
    runs, rows = [run for run in options.compare.split(",") if run], []
    if not runs:
        raise Refusal(f"--compare={options.compare} names no run; give folders with commas between them")
    for run in runs:
        key, val = validations(read_log(run))
        if not val:
            raise Refusal(f"{run} has logged no evaluation yet; wait for the first one, or leave it out")
        best, last = min(val, key=lambda v: v[key]), val[-1]
        rows.append(dict(
            run=run, objective="ar" if key == "val_nll" else "mdlm", value=last[key], se=last[f"{key}_se"],
            bpc=last["val_bpc"], ar_shifted=last.get("val_ar_shifted"),
            step=last["step"], tokens=last["tokens"], seconds=last["seconds"], best=best[key],
            best_step=best["step"]))
    width = max(map(len, runs))
    lines = [f"{'run':{width}}  objective      step  seconds  nats per token      bits/char  best (step)"]
    lines += [f"{x['run']:{width}}  {x['objective']:9}  {x['step']:>8}  {x['seconds']:>7.0f}  "
              f"{plus_minus(x['value'], x['se'] or math.inf):17}  {x['bpc'] or math.nan:>10.3f}  "
              f"{x['best']:.4f} ({x['best_step']})" for x in rows]
    lines.append("mdlm: NELBO, an upper bound; ar: exact NLL; compare only with the same text and tokenizer")
    draw = {"compare.png": lambda path: plot_losses(runs, path)}
    return dict(runs=rows), "\n".join(lines), Path(runs[0]), draw


def evaluation(options):
    """(results, words, folder for pictures or None, pictures) of a run."""
    device = mdlm.pick_device(options.device)
    folder = common.find_checkpoint(options.out_dir)
    model, tokenizer, config = mdlm.load(folder, device)
    if options.raw:
        load_raw(model, folder, config)
    if options.tour and config.objective == "ar":
        raise Refusal(f"--tour shows masked diffusion, and {folder} is autoregressive; leave --tour out")
    with open_data(options.data, folder, tokenizer, config, device) as (corpus, source):
        windows = corpus.windows(options.windows)
    run = pictures.run_of(folder)
    log = read_log(run) if run else []
    with torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
        r = dict(checkpoint=str(folder), weights="raw" if options.raw else "ema" if config.ema else "only",
                 data=source, objective=config.objective, block_size=config.block_size,
                 **evaluate(model, corpus, windows, options.passes, options.exact))
        if options.tour and not options.exact:
            r["exact"] = exact_likelihood(model, corpus, windows[::-(-len(windows) // 8)])
        cells = pictures.predict(model, tokenizer, windows[0])
        forward = pictures.forward_process(model, tokenizer, windows) if config.objective == "mdlm" else None
    draw = {"loss.png": lambda path: plot_losses([run], path)} if log else {}
    draw["confidence.png"] = lambda path: pictures.plot_confidence(r, path)
    draw["predictions.png"] = lambda path: pictures.plot_predictions(cells, path)
    if forward:
        draw["rates.png"] = lambda path: pictures.plot_rates(r, path)
        draw["forward.png"] = lambda path: pictures.plot_forward(forward, path)
    words = report(r)
    if options.tour:
        stops = enumerate(tour(r, forward, cells, log, options.out_dir), 1)
        words = "\n\n".join(f"{paint(f'{i}. {title}', 1)}\n{sentence}\n\n{shown}\n"
                            for i, (title, sentence, shown) in stops)
    return r, words, run, draw


def main(argv):
    options = check(common.parse_flags(Options, argv, __doc__.split("\n")[0]))
    result, words, folder, draw = (compare if options.compare else evaluation)(options)
    if options.json == "-":
        print(json.dumps(finite(result), allow_nan=False))
    else:
        print(words)
    if options.json not in ("", "-"):
        common.write_atomically(Path(options.json), json.dumps(finite(result), allow_nan=False).encode())
    pictures.save(draw, options.pictures or folder, options.json != "-")
    return 0


if __name__ == "__main__":
    sys.exit(common.run(main, sys.argv[1:]))
