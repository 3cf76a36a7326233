"""How well and how fast gaps of unknown length are filled, beside the search of another commit.

    git worktree add ../before 44a18a0
    python studies/lengths.py --data=tinyshakespeare.txt --before=../before --results=lengths.jsonl
    python studies/lengths.py --data=tinyshakespeare.txt --results=long.jsonl --max_gap=64

The gaps are of one word, of two words and of half a line, each in a line of validation text
(--training: of training text) with text before and after it; nothing tells how long they are.
Each is filled by

    search      sample.py, as a user runs it
    candidates  the same with --candidates=5: is the text among them?
    known       the same, given the length
    confident   a draw, given the length, with --order=confidence --correct=0
    before      sample.py of the commit in --before, with the weights of that commit

through `sample.py --batch --json=-`, ten gaps at a time, in turns: a machine with other work slows
all of them alike. --results gets a line for each gap and contestant. A study that is run again goes
on after them, so it can be run in parts (--gaps=40, then --gaps=80 ...); the table is of all.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/lengths.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import json
import random
import re
import statistics
import subprocess
import tempfile
from dataclasses import dataclass

import torch

import mdlm
from nanomdlm.support.cli.settings import Count, Natural, Reads, Writes, parse
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.likelihood import chain_rule
from nanomdlm.support.run.calibration import calibrated
from nanomdlm.support.run.checkpoint import default_run

WORD = re.compile("[A-Za-z']+")
KINDS = ("word", "two words", "half a line")
AT_ONCE = 10  # gaps that a contestant fills before the next one does


@dataclass
class Options:
    data: Reads = ""  # the text that the model has learned; nine tenths train
    out_dir: Reads = ""  # run or checkpoint folder (default: out, or what ships)
    before: Reads = ""  # a folder with the files of another commit
    results: Writes = "lengths.jsonl"  # lines of JSON, to which this adds
    gaps: Count = 400  # how many gaps
    max_gap: Count = 16  # longest gap, in characters
    skip: str = ""  # contestants to leave out, with commas between them
    training: bool = False  # gaps in training text, to choose settings by
    seed: Natural = 0  # which gaps


def spans(line, kind, longest):
    """[(begin, end)] of the possible gaps of a line, each with a word before and one after it."""
    words = [match.span() for match in WORD.finditer(line)]
    n = {"word": 1, "two words": 2, "half a line": len(words) // 2}[kind]
    if kind == "half a line" and n < 3:
        return []
    found = [(words[i][0], words[i + n - 1][1]) for i in range(1, len(words) - n)]
    return [(begin, end) for begin, end in found if end - begin <= longest]


def choose_gaps(text, n, longest, seed):
    """[(kind, line, begin, end)] of n gaps in different lines of a text, the kinds in turns."""
    lines = sorted({line for line in text.split("\n") if 20 <= len(line) <= 120})
    draw = random.Random(seed)
    draw.shuffle(lines)
    gaps = []
    for line in lines:
        kind = KINDS[len(gaps) % len(KINDS)]
        if len(gaps) < n and (found := spans(line, kind, longest)):
            gaps.append((kind, line, *draw.choice(found)))
    if len(gaps) < n:
        raise UserError(
            f"the text has {len(gaps)} lines with such gaps, not {n}; give fewer --gaps"
        )
    return gaps


def contestants(options):
    """Name -> (folder of the program, its flags, whether it is given the length)."""
    run = [f"--out_dir={default_run(options.out_dir)}"]
    unknown = [f"--max_gap={options.max_gap}"]
    entries = {
        "search": (ROOT, [*run, *unknown], False),
        "candidates": (ROOT, [*run, *unknown, "--candidates=5"], False),
        "known": (ROOT, run, True),
        "confident": (ROOT, [*run, "--order=confidence", "--correct=0"], True),
    }
    if options.before:
        before = Path(options.before)
        weights = f"--out_dir={before / 'weights' / 'shakespeare'}"
        entries["before"] = (before, [weights, *unknown], False)
    skip = set(filter(None, options.skip.split(",")))
    if skip - entries.keys():
        accepted = ", ".join(entries)
        raise UserError(f"--skip={options.skip} names no contestant; give some of {accepted}")
    return {name: entry for name, entry in entries.items() if name not in skip}


def fill(gaps, folder, argv, is_known):
    """The JSON object that a program answers for each of the gaps."""
    templates = [
        line[:begin] + ("█" * (end - begin) if is_known else "[___]") + line[end:]
        for _, line, begin, end in gaps
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as f:
        f.write("\n".join(templates) + "\n")
        f.flush()
        command = [sys.executable, "sample.py", "--device=cpu", f"--batch={f.name}", "--json=-"]
        run = subprocess.run([*command, *argv], cwd=folder, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in run.stdout.decode().splitlines()]


def logp_from(model, tokenizer, text, begin):
    """log p(the text from `begin` on | what precedes it) by the chain rule, in nats."""
    x = torch.tensor([tokenizer.encode(text)])
    start = len(tokenizer.encode(text[:begin]))
    return chain_rule(model, x)[0, start:].sum().item()


def compare(gap, gain, answer):
    """What counts of a program's answer to a gap; gain: its log p less that of the true text."""
    kind, line, begin, end = gap
    texts = [one["text"] for one in answer["candidates"]]
    return dict(
        kind=kind,
        line=line,
        begin=begin,
        end=end,
        found=answer["text"][begin : len(answer["text"]) - (len(line) - end)],
        exact_length=len(answer["text"]) == len(line),
        exact=answer["text"] == line,
        among=line in texts,
        gain=gain,
        calls=answer["calls"],
        sequences=answer.get("sequences", answer["calls"]),
        seconds=answer["seconds"],
    )


def share(values):
    """A share in per cent and its standard error."""
    p = statistics.mean(map(float, values))
    return f"{100 * p:.1f} +- {100 * (p * (1 - p) / len(values)) ** 0.5:.1f}"


def mean(values):
    values = [value for value in values if value is not None]
    return f"{statistics.mean(values):.1f}" if values else ""


def table(rows):
    """Lines of Markdown: the contestants, in all and for each kind of gap.

    log p: of what was found, less that of the true text. seconds: also as a median ratio to those
    of `before` for the same gap.
    """
    names = list(dict.fromkeys(row["name"] for row in rows))
    before = {(r["line"], r["begin"]): r["seconds"] for r in rows if r["name"] == "before"}
    columns = [
        "gaps",
        "contestant",
        "n",
        "exact length, %",
        "exact text, %",
        "among those shown, %",
    ]
    columns += ["log p - true", "calls", "sequences", "seconds", "of before's"]
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for kind in ("all", *KINDS):
        for name in names:
            of = [r for r in rows if r["name"] == name and kind in ("all", r["kind"])]
            if not of:
                continue
            ratios = [
                r["seconds"] / before[r["line"], r["begin"]]
                for r in of
                if (r["line"], r["begin"]) in before
            ]
            cells = [kind, name, str(len(of)), share([r["exact_length"] for r in of])]
            cells += [share([r["exact"] for r in of]), share([r["among"] for r in of])]
            cells += [f"{statistics.mean(r['gain'] for r in of):.2f}"]
            cells += [mean([r[key] for r in of]) for key in ("calls", "sequences", "seconds")]
            cells += [f"{statistics.median(ratios):.2f}" if ratios else ""]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    if not options.data:
        raise UserError("--data is missing; give the text that the model has learned")
    text = Path(options.data).read_text(encoding="utf-8")
    at = int(0.9 * len(text))
    part = text[:at] if options.training else text[at:]
    gaps = choose_gaps(part, options.gaps, options.max_gap, options.seed)
    model, tokenizer, _ = mdlm.load(default_run(options.out_dir), device="cpu")
    model = calibrated(model)
    entries = contestants(options)
    results = Path(options.results)
    old = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    rows = [json.loads(line) for line in old]
    done = {(row["name"], row["line"], row["begin"]) for row in rows}
    with open(results, "a", encoding="utf-8") as f:
        for first in range(0, len(gaps), AT_ONCE):
            some = gaps[first : first + AT_ONCE]
            logp = {}
            for name, entry in entries.items():
                todo = [gap for gap in some if (name, gap[1], gap[2]) not in done]
                for gap, answer in zip(todo, fill(todo, *entry) if todo else []):
                    texts = (gap[1], answer["text"])
                    for one in texts:
                        if (gap, one) not in logp:
                            logp[gap, one] = logp_from(model, tokenizer, one, gap[2])
                    gain = logp[gap, texts[1]] - logp[gap, texts[0]]
                    rows.append(dict(name=name) | compare(gap, gain, answer))
                    print(json.dumps(rows[-1]), file=f, flush=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
