"""How often samplers find the likeliest fill of a gap, which a search proves, and what they lose.

    python studies/regret.py --data=tinyshakespeare.txt --results=regret.jsonl
    python studies/regret.py --data=tinyshakespeare.txt --networks=A,B --results=regret.jsonl

For gaps of 2 to 12 characters in the middle of a context of validation text, whose length is
known: the nats that a sampler's fill is less likely than the best of all, log p(best | both sides)
- log p(fill | both sides), by the calibrated network; and how often it is the best one.

    one call    the likeliest token at every mask
    confidence, margin, entropy    one token a call, the likeliest, in that order
    threshold   all tokens above 0.5 in a call (--threshold=0.5), the likeliest ones
    draw        a draw in 32 calls, half of which correct: the sampler's default
    remasking   the same with 64 calls, 48 of which correct
    sixteen     the likeliest of sixteen draws

(The last two in gaps only; the networks compute in bfloat16.) And for whole words of 4 to 8
letters, who restores the word: the samplers, the search by one network and by two (--networks), and
a beam over a 6-gram model that sees both sides.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/regret.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import json
import statistics
from dataclasses import dataclass

import torch

import mdlm
import sample
from nanomdlm.support.cli.settings import Count, Natural, Reads, Writes, parse
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import filling, search
from nanomdlm.support.infill.templates import Gap, encode_segments
from nanomdlm.support.run.calibration import calibrated
from nanomdlm.support.run.checkpoint import default_run
from studies import search as study
from studies.proofreading import NGrams

LIMIT = 1000  # sequences of a search, so that nearly all are proven
BEAM = 64
GREEDY = dict(temperature=0.0, correct=0)
SAMPLERS = {
    "one call": (1, dict(order="one_shot", temperature=0.0)),
    "confidence": (1, dict(order="max_prob", **GREEDY)),
    "margin": (1, dict(order="margin", **GREEDY)),
    "entropy": (1, dict(order="entropy", **GREEDY)),
    "threshold": (1, dict(threshold=0.5, order="max_prob", temperature=0.0)),
    "draw": (1, dict()),
    "remasking": (1, dict(steps=64, correct=48)),
    "sixteen": (16, dict()),
}
SLOW = ("remasking", "sixteen")


@dataclass
class Options:
    data: Reads = ""  # the text that the model has learned; its last tenth is used
    out_dir: Reads = ""  # run or checkpoint folder (default: out, or what ships)
    networks: Reads = ""  # A,B: two networks that search together, too
    results: Writes = "regret.jsonl"  # lines of JSON, to which this adds
    gaps: Count = 200  # gaps of 2 to 12 characters
    words: Count = 400  # words
    seed: Natural = 0  # which gaps, and of all draws


def frame_of(model, tokenizer, text, gap):
    _, begin, end = gap
    L = model.config.block_size
    first = begin - (L - (end - begin)) // 2
    segments = [text[first:begin], Gap(end - begin), text[end : first + L]]
    return filling.frame_of(model, tokenizer, encode_segments(segments, tokenizer), False, None)


def best_of(model, tokenizer, text, gap, only=None):
    """The finished search.Search in a gap; only: fills, of which it finds the likeliest."""
    frame = frame_of(model, tokenizer, text, gap)
    if only is not None:
        frame.filter.only = [(0, torch.tensor(sorted(only)).numpy())]
    found = search.Search([frame], len(only) if only else 1)
    search.run(model, [found], LIMIT)
    return found


def fills_of(model, tokenizer, text, gap, name, seed):
    """(the fills of a sampler, tuples of ids; network calls for them)."""
    n, settings = SAMPLERS[name]
    frame = frame_of(model, tokenizer, text, gap)
    x = torch.tensor([frame.x]).repeat(n, 1)
    if settings.get("order") in ("max_prob", "margin", "entropy") and "threshold" not in settings:
        settings = settings | dict(steps=len(frame.open))
    *_, step = sample.unmask(model, x, seed=seed, forbid=[tokenizer.end_id], **settings)
    return {tuple(row) for row in step.x[:, frame.open].tolist()}, int(step.calls.max()) * n


def by_six_grams(grams, text, gap):
    """The likeliest word by a beam over a 6-gram model, which scores the text after it too."""
    _, begin, end = gap
    n = 5  # letters of context
    ids = [grams.index[c] for c in text]
    beams = [(0.0, tuple(ids[begin - n : begin]))]
    for _ in range(end - begin):
        grown = []
        for score, context in beams:
            logp, _ = grams.logp(context[-n:])
            grown += [(score + value, (*context, i)) for i, value in enumerate(logp)]
        beams = sorted(grown, reverse=True)[:BEAM]
    best = None
    for score, context in beams:
        for at in range(end, end + n):
            logp, _ = grams.logp(context[-n:])
            score += logp[ids[at]]
            context = (*context, ids[at])
        best = max(best or (score, context), (score, context))
    return "".join(grams.alphabet[i] for i in best[1][n : n + end - begin])


def measure(model, two, tokenizer, grams, text, gap, seed):
    """One row: the best fill, whether it is proven, each sampler's regret in nats, and words."""
    kind, begin, end = gap
    true = text[begin:end]
    best = calibrated(model)
    found = best_of(best, tokenizer, text, gap)
    names = [name for name in SAMPLERS if kind != "word" or name not in SLOW]
    fills = {name: fills_of(model, tokenizer, text, gap, name, seed) for name in names}
    drawn = {fill for some, _ in fills.values() for fill in some}
    scored = {one.ids: one.logp for one in best_of(best, tokenizer, text, gap, drawn).fills}
    top = found.fills[0]
    row = dict(kind=kind, begin=begin, end=end, true=true, proven=found.is_proven)
    row |= dict(best=tokenizer.decode(top.ids), logp=top.logp, sequences=found.sequences)
    row["samplers"] = {}
    for name, (some, calls) in fills.items():
        fill = max(some, key=scored.get)
        regret = top.logp - scored[fill]
        row["samplers"][name] = dict(fill=tokenizer.decode(fill), regret=regret, calls=calls)
    if kind == "word":
        row["six-gram"] = by_six_grams(grams, text, gap)
        if two:
            together = best_of(calibrated(two), tokenizer, text, gap).fills[0]
            row["two networks"] = tokenizer.decode(together.ids)
    return row


def table(rows):
    """Lines of Markdown: regret by kind of gap; and words that are restored."""
    proven = [row for row in rows if row["proven"]]
    lines = [f"{len(rows)} gaps; the best fill is proven in {len(proven)}, which count here.", ""]
    kinds = [*study.KINDS, "word"]
    lines += [f"| sampler | calls | {' | '.join(kinds)} |", "|" + " --- |" * (len(kinds) + 2)]
    for name in SAMPLERS:
        told = [row | row["samplers"][name] for row in proven if name in row["samplers"]]
        cells = [name, f"{statistics.mean(row['calls'] for row in told):.0f}"]
        for kind in kinds:
            of = [row for row in told if row["kind"] == kind]
            best = 100 * statistics.mean(row["fill"] == row["best"] for row in of) if of else 0
            nats = statistics.mean(row["regret"] for row in of) if of else 0
            cells.append(f"{best:.0f} %, {nats:.2f}" if of else "")
        lines.append(f"| {' | '.join(cells)} |")
    words = [row for row in rows if row["kind"] == "word"]
    lines += ["", "| whole words | restored, % |", "| --- | --- |"]
    who = {"search": lambda row: row["best"], "6-gram beam": lambda row: row["six-gram"]}
    names = [name for name in SAMPLERS if name not in SLOW]
    who |= {name: lambda row, name=name: row["samplers"][name]["fill"] for name in names}
    if words and "two networks" in words[0]:
        who["search, two networks"] = lambda row: row["two networks"]
    for name, of in who.items():
        p = statistics.mean(of(row) == row["true"] for row in words)
        lines.append(f"| {name} | {100 * p:.1f} ± {100 * (p * (1 - p) / len(words)) ** 0.5:.1f} |")
    return "\n".join(lines)


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    if not options.data:
        raise UserError("--data is missing; give the text that the model has learned")
    model, tokenizer, config = mdlm.load(default_run(options.out_dir), device="cpu")
    two = mdlm.load(options.networks, device="cpu")[0] if options.networks else None
    text = Path(options.data).read_text(encoding="utf-8")
    at = int(0.9 * len(text))
    grams = NGrams(text[:at])
    results = Path(options.results)
    old = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    rows = [json.loads(line) for line in old]
    done = {(row["begin"], row["end"]) for row in rows}
    with open(results, "a", encoding="utf-8") as f:
        for gap in study.choose(text[at:], options, config.block_size):
            if (gap[1], gap[2]) not in done:
                measured = (model, two, tokenizer, grams, text[at:], gap, options.seed)
                with torch.autocast("cpu", torch.bfloat16):
                    rows.append(measure(*measured))
                print(json.dumps(rows[-1]), file=f, flush=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
