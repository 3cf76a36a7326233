"""Judge an entry to the speedrun on tiny Shakespeare; the rules are in results/speedrun.md.

    python studies/speedrun.py --out_dir=out
    python studies/speedrun.py --out_dir=out --target=1.60    # with a GPU

The weights of the last checkpoint are evaluated again, on all windows; a run whose log ends with
another NELBO is refused.
"""

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/speedrun.py, from anywhere

import mdlm
from support import checkpoint, cli, plots, runtime, sources
from support.cli import UserError, opt

TOLERANCE = 0.005  # of a NELBO: it was logged in bfloat16, perhaps on another machine


@dataclass
class Options:
    out_dir: str = opt("out", "the run to judge")
    target: float = opt(1.75, "the NELBO to reach, nats per character", bounds=(0, 10))
    device: str = opt("auto", "cpu, cuda, cuda:1 or mps; auto: the best available")


def read_entry(out_dir, folder, config):
    """The log's last evaluation; UserError unless it is the end of a run that may enter."""
    _, evaluations = plots.validations(plots.read_log(out_dir))
    state = checkpoint.read_state(folder)
    last = evaluations[-1] if evaluations else {}
    if config.objective != "mdlm":
        raise UserError(f"{out_dir} is autoregressive: its NLL is no NELBO; train with masks")
    if config.init_from:
        raise UserError(f"{out_dir} began with --init_from={config.init_from}; train from nothing")
    if not state["finished"] or last.get("step") != state["step"]:
        given = f"{out_dir} has weights of step {state['step']} and no last evaluation of them"
        raise UserError(f"{given}; let the run end by itself")
    return last


def characters_per_token(out_dir, corpus):
    """Of the validation text; UserError unless it is tiny Shakespeare's, split as nanoGPT does."""
    parts = [corpus.tokenizer.decode(ids.tolist()) for ids in (corpus.train, corpus.val)]
    text = "".join(parts)
    is_shakespeare = hashlib.sha256(text.encode()).hexdigest() == sources.SHA256
    if not is_shakespeare or len(parts[0]) != int(0.9 * len(text)):
        raise UserError(f"{out_dir}/data is not tiny Shakespeare; train with --data=shakespeare")
    scored = corpus.val_windows[2].sum().item() if corpus.documents else len(corpus.val)
    return len(parts[1]) / scored


def judge(options):
    """Seconds, logged and measured NELBO, its standard error; UserError where they disagree."""
    device = runtime.pick_device(options.device)
    folder = checkpoint.find_checkpoint(options.out_dir)
    model, _, config = mdlm.load(folder, device)
    last = read_entry(options.out_dir, folder, config)
    corpus = mdlm.Corpus(Path(options.out_dir) / "data", config, device)
    per_character = 1 / characters_per_token(options.out_dir, corpus)
    windows = corpus.windows()
    scored = last.get("windows", min(config.eval_windows or len(windows), len(windows)))
    if scored < len(windows):
        given = f"{options.out_dir} scored {scored} of {len(windows)} windows at its end"
        raise UserError(f"{given}; leave --eval_windows out, and give it time for all")
    r = mdlm.evaluate(model, windows, passes=4)
    logged = last["val_nelbo"]
    if abs(r["nelbo"] - logged) > TOLERANCE:
        given = f"the log of {options.out_dir} says {logged:.4f}, its weights {r['nelbo']:.4f}"
        raise UserError(f"{given}: they are not of one run; give a folder as training left it")
    nats = (value * per_character for value in (logged, r["nelbo"], r["se"]))
    return last["seconds"], *nats


def main(argv):
    options = Options(**cli.parse_flags(Options, argv, __doc__))
    seconds, logged, nelbo, se = judge(options)
    print(f"NELBO {nelbo:.4f} +- {se:.4f} nats per character (logged: {logged:.4f}), {seconds} s")
    if nelbo > options.target:
        raise UserError(f"{nelbo:.4f} is above the target of {options.target}; train for longer")
    print(f"valid: {options.target} reached in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
