"""The record on tiny Shakespeare: a recipe chosen on the training text alone, then measured once.

    python results/record.py sweep --data=tinyshakespeare.txt --seconds=540     # call again: it goes on
    python results/record.py final --data=tinyshakespeare.txt --seconds=540     # seeds 0, 1, 2; the AR twin
    python results/record.py table                                              # record.md from what has run

sweep: the first 90 % of the text are all that it sees; mdlm.py holds out the last tenth of that. One setting
after another is varied, the best value kept (coordinate descent). final: the recipe so chosen, on the whole
text, whose last tenth has chosen nothing. Each run is a process of its own, its log stays in --out_dir; one
that is there is not run again, so a sweep may be cut off at any time.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import common
import mdlm
from common import Refusal, opt

PARAMETERS = 10_700_000  # nanoGPT's baby has 10.65 M
# In the order in which they are tried, most promising first; the first value is where the sweep begins.
SETTINGS = [
    ("dropout", (0.2, 0.1, 0.3)),
    ("rate_margin", (0.5, 0.25, 0.0)),
    ("muon_lr", (0.02, 0.01, 0.04)),
    ("momentum", (0.9, 0.95)),
    ("max_steps", (5000, 10_000, 20_000)),
    ("weight_decay", (0.01, 0.1, 0.3)),
    ("learning_rate", (3e-3, 1e-2, 1e-3)),
    ("n_layer,n_head,n_embd", ((6, 6, 384), (8, 5, 320), (4, 7, 448))),
    ("ema", (0.999, 0.9995, 0.998)),
    ("batch_size", (64, 32, 128)),
    ("conv", (5, 9, 0)),
    ("mask_schedule", ("linear", "cosine")),
]


@dataclass
class Options:
    data: str = opt("", "the text: tiny Shakespeare as a file")
    out_dir: str = opt("out-record", "folder of the runs")
    seconds: float = opt(540.0, "no run begins later", bounds=(1, 1e6))
    scale: float = opt(1.0, "of all max_steps, to try the script", bounds=(1e-4, 10))
    preset: str = opt("gpu", "of mdlm.py", "gpu", "cpu")
    windows: int = opt(64, "final: validation windows of the exact likelihood", bounds=(1, 4096))


def flags_of(recipe, scale):
    """The flags of mdlm.py for a recipe, {setting: value}; a setting may be several at once."""
    flags = {}
    for names, values in recipe.items():
        flags |= dict(zip(names.split(","), values)) if "," in names else {names: values}
    flags["max_steps"] = max(1, int(flags["max_steps"] * scale))
    return flags


def parameters(flags):
    config = mdlm.Config(**{k: v for k, v in flags.items() if k in ("n_layer", "n_head", "n_embd", "conv")})
    return sum(p.numel() for p in mdlm.Model(config, 65, None).parameters())


class Runs:
    """Runs of mdlm.py in --out_dir, by their flags."""

    def __init__(self, options):
        self.options, self.until = options, time.monotonic() + options.seconds
        self.folder = Path(options.out_dir)
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self, text, **flags):
        """The last evaluation of a run with these flags, from its log; None: no time to begin it."""
        flags = dict(preset=self.options.preset, eval_interval=1 << 30, log_interval=100) | flags
        name = hashlib.blake2b(repr(sorted(flags.items())).encode() + text.name.encode(), digest_size=5)
        out = self.folder / f"{text.stem}-{name.hexdigest()}"
        if not (out / "result.json").exists():
            if time.monotonic() > self.until:
                return None
            shutil.rmtree(out, ignore_errors=True)
            command = [f"--{k}={v}" for k, v in flags.items()]
            began = time.monotonic()
            program = [sys.executable, ROOT / "mdlm.py", f"--data={text}", f"--out_dir={out}"]
            r = subprocess.run([*program, *command], capture_output=True, text=True)
            if r.returncode:
                raise Refusal(f"a run failed: {' '.join(command)}\n{r.stderr[-2000:]}")
            log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
            last = [v for v in log if "val_nelbo" in v or "val_nll" in v][-1]
            result = dict(out=str(out), command=" ".join(command), wall=time.monotonic() - began)
            result |= flags | last
            common.write_atomically(out / "result.json", json.dumps(result).encode())
        result = json.loads((out / "result.json").read_text())
        value = result.get("val_nelbo", result.get("val_nll"))
        print(f"{value:.4f}  {result['wall']:5.0f} s  {result['command']}", flush=True)
        return result


def sweep(options, runs, text):
    """The best recipe found so far, and whether the sweep is complete."""
    train = runs.folder / "train.txt"
    characters = text.read_text(encoding="utf-8")
    common.write_atomically(train, characters[:int(0.9 * len(characters))].encode())
    best, score = {names: values[0] for names, values in SETTINGS}, None
    for names, values in SETTINGS:
        for value in values:
            recipe = best | {names: value}
            flags = flags_of(recipe, options.scale)
            if parameters(flags) > PARAMETERS:
                raise Refusal(f"{flags} has more than {PARAMETERS} parameters")
            result = runs.run(train, **flags)
            if result is None:
                return best, False
            if score is None or result["val_nelbo"] < score:
                best, score = recipe, result["val_nelbo"]
    common.write_atomically(runs.folder / "best.json", json.dumps(flags_of(best, options.scale)).encode())
    return best, True


def final(options, runs, text):
    """Seeds 0, 1, 2 of the best recipe on the whole text, the AR twin, and their exact likelihoods."""
    path = runs.folder / "best.json"
    if not path.exists():
        raise Refusal(f"{path} is not there yet; let the sweep end first")
    flags, outs = json.loads(path.read_text()), []
    for more in (dict(seed=0), dict(seed=1), dict(seed=2), dict(seed=0, objective="ar")):
        result = runs.run(text, **flags, **more, **(dict(eval_interval=max(1, flags["max_steps"] // 40))))
        if result is None:
            return False
        exact = Path(result["out"]) / "exact.json"
        if not exact.exists():
            subprocess.run([sys.executable, ROOT / "eval.py", f"--out_dir={result['out']}", "--exact",
                            f"--windows={options.windows}", "--pictures=none", f"--json={exact}"], check=True)
        e = json.loads(exact.read_text())["exact"]
        print(f"        exact {e['nll']:.4f} +- {e['se']:.4f} on {e['windows']} windows", flush=True)
        outs.append(result["out"])
    subprocess.run([sys.executable, ROOT / "eval.py", f"--compare={outs[0]},{outs[-1]}",
                    f"--pictures={runs.folder}"], check=True)
    return True


def seen(r):
    """(best value of the run, seconds since its start until NELBO 1.65) from its log; None: never there."""
    log = [json.loads(line) for line in (Path(r["out"]) / "log.jsonl").read_text().splitlines()]
    values = [(v.get("val_nelbo", v.get("val_nll")), v["seconds"]) for v in log if "val_bpc" in v]
    return min(values)[0], next((s for v, s in values if v <= 1.65 and "val_nelbo" in r), None)


def table(runs):
    """record.md: every run, best first; those on the whole text apart."""
    results = [json.loads(p.read_text()) for p in runs.folder.glob("*/result.json")]
    value = lambda r: r.get("val_nelbo", r.get("val_nll"))
    head = "last, +-, kind, exact, best seen, s to 1.65, held out, seed, steps, seconds, flags"
    lines = ["| " + head.replace(",", " |") + " |", "| --- " * 11 + "|"]
    for r in sorted(results, key=lambda r: (Path(r["out"]).name.startswith("train-"), value(r))):
        inner, path = Path(r["out"]).name.startswith("train-"), Path(r["out"]) / "exact.json"
        kind, se = ("NELBO", r.get("val_nelbo_se")) if "val_nelbo" in r else ("NLL", r.get("val_nll_se"))
        exact = json.loads(path.read_text())["exact"] if path.exists() else {}
        best, until = seen(r)
        held_out = "end of the training text" if inner else "validation text"
        lines.append(f"| {value(r):.4f} | {se or float('nan'):.4f} | {kind} | "
                     + ("{nll:.4f} +- {se:.4f} ({windows} windows)".format(**exact) if exact else "")
                     + f" | {best:.4f} | {f'{until:.0f}' if until else ''} | {held_out} | "
                     f"{r.get('seed', 0)} | {r['step']} | {r['wall']:.0f} | `{r['command']}` |")
    lines += ["", "last: of the last step, averaged weights. best seen: the lowest of all evaluations,"]
    lines += ["a choice made on the held-out text."]
    lines += ["s to 1.65: since the process began; the first run compiles, later ones find that on disk."]
    common.write_atomically(runs.folder / "record.md", ("\n".join(lines) + "\n").encode())
    print(f"{runs.folder}/record.md: {len(results)} runs")


def main(argv):
    mode, flags = (argv[0], argv[1:]) if argv else ("", [])
    if mode not in ("sweep", "final", "table"):
        raise Refusal(f"{mode!r} is no part of the record; give sweep, final or table")
    options = Options(**common.parse_flags(Options, flags, __doc__.split("\n")[0]))
    common.check_fields(options)
    text, runs = Path(options.data), Runs(options)
    if mode != "table" and not text.is_file():
        raise Refusal(f"--data={options.data} is no file; give tiny Shakespeare as a text file")
    done = True
    if mode == "sweep":
        best, done = sweep(options, runs, text)
        print("best so far:", " ".join(f"--{k}={v}" for k, v in flags_of(best, options.scale).items()))
    if mode == "final":
        done = final(options, runs, text)
    table(runs)
    print("complete" if done else "the time is up: call it again to go on")
    return 0


if __name__ == "__main__":
    sys.exit(common.run(main, sys.argv[1:]))
