"""How many mistakes proofreading finds and repairs, beside a spelling checker and a 6-gram model.

    python studies/proofreading.py --data=tinyshakespeare.txt --characters=4000 --dtype=bfloat16
    python studies/proofreading.py --data=tinyshakespeare.txt --tune
    python studies/proofreading.py --join=some.json,more.json

Mistakes are put into the beginning of the validation text. random: a substituted or inserted
character is any of the training text; keyboard: one beside the right one on a keyboard (QWERTY).
substitutions: these alone; all: also insertions, deletions and swaps, each as often.

    nothing    the text as it is
    symspell   symspellpy with the words of the training text, if it is installed
    6-gram     characters, interpolated Kneser-Ney, with a beam search over what may have been meant
    mdlm       sample.fix

The 6-gram model and mdlm have the same prior of mistakes, support/proofread/mistakes.py, which is
not fitted to any text. --tune chooses the settings of the first two on the last tenth of the
training text, which they then have not seen. Of mdlm it shows how much right and wrong changes gain
beyond their cost, at the beginning of the training text.

found: F1 of the places that are changed; repaired: mistakes after which the right text stands;
spoiled: right characters that are wrong afterwards, per 1,000; left: the edit distance to the right
text, per mistake; error: the standard error of found, by the bootstrap over pieces of 1,100
characters; ahead: by how much found of the last method is higher, with its error on the same
pieces; seconds of the processor per 1,000 characters; substitution ... swap: how many mistakes of
this kind are found, of how many, and false alarms that would repair one.
"""

import sys
from pathlib import Path
from typing import Literal

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/proofreading.py, from anywhere

from nanomdlm.support.cli import entry, outputs
from nanomdlm.support.run import plots

entry.start(__name__)

import bisect
import difflib
import heapq
import itertools
import json
import math
import os
import random
import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

import mdlm
from nanomdlm.support.cli import environment
from nanomdlm.support.cli.settings import Natural, Reads, Writes, parse
from nanomdlm.support.errors import UserError
from nanomdlm.support.proofread.mistakes import KINDS, Prior, beside
from nanomdlm.support.proofread.proofreader import Proofreader

ORDER = 6
BEAM = 24
LETTERS_TRIED = 4  # of the 6-gram model: characters that are tried at each place
START = "\n"
PIECE = 1100  # characters of text that have their own mistakes
DRAWS = 200  # of pieces, for a standard error
ABOUT = ("rate", "source", "kinds", "method", "begin")  # of a row; the rest is summed
SUMMED = ("mistakes", "characters", "seconds")  # of every row


@dataclass
class Options:
    data: Reads = ""  # the text that the model learned; its last tenth validates
    out_dir: Reads = "weights/shakespeare"  # run or checkpoint folder
    characters: Natural = 4000  # of text with 2 % of mistakes
    others: Natural = 2000  # of text with 1 and 5 % (0: none)
    begin: Natural = 0  # where in the validation text they begin
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the network
    tune: bool = False  # choose settings on training text
    seed: Natural = 0  # of the mistakes
    kinds: Literal["", "all", "substitutions"] = ""  # of mistakes (default: both)
    source: Literal["", "random", "keyboard"] = ""  # of mistakes (default: both)
    methods: str = "nothing,symspell,6-gram,mdlm"  # which to measure
    json: Writes = ""  # write the counts of each piece of text to this file
    join: str = ""  # measure nothing: the table of these files of --json (commas between)


class Mistake(NamedTuple):
    """text[start:stop] became `wrong`, which begins at `at` in the text with mistakes."""

    start: int
    stop: int
    wrong: str
    at: int
    kind: str


class Edit(NamedTuple):
    """What a method does: text[start:stop], of the text with mistakes, becomes `new`."""

    start: int
    stop: int
    new: str


# ---- Mistakes
def with_mistakes(text, rate, source, kinds, alphabet, rng):
    """(the text with mistakes, its Mistakes)"""
    near = beside()
    pieces = []
    mistakes = []
    i = n = 0  # in the text, and in the one with mistakes
    while i < len(text):
        c = text[i]
        is_wrong = rng.random() < rate
        kind = rng.choice(kinds)
        others = near.get(c, "") if source == "keyboard" else alphabet.replace(c, "")
        stop = i + (0 if kind == "insertion" else 2 if kind == "swap" else 1)
        old = text[i:stop]
        wrong = ""
        if kind in ("substitution", "insertion"):
            others = others if kind == "substitution" else others or c
            wrong = rng.choice(others) if others else c
        elif kind == "swap":
            wrong = old[::-1]
        if is_wrong and wrong != old and i > 1:
            mistakes.append(Mistake(i, stop, wrong, n, kind))
            old = wrong
        elif stop == i or stop == i + 2:
            stop = i + 1
            old = c
        pieces.append(old)
        n += len(old)
        i = stop
        if mistakes and mistakes[-1].stop == i and i < len(text):  # a right one after each
            pieces.append(text[i])
            n += 1
            i += 1
    return "".join(pieces), mistakes


# ---- How good a result is
def distance(a, b):
    """The edit distance of two short texts."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above = row
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
    return row[-1]


def kind_of(edits, text):
    """The kind of mistake that edits of a text near each other would repair."""
    if len(edits) > 1:
        return "substitution"
    [edit] = edits
    old = text[edit.start : edit.stop]
    if not old or not edit.new:
        return "deletion" if edit.new else "insertion"
    return "swap" if len(old) == 2 and edit.new == old[::-1] else "substitution"


def judge(text, wrong, mistakes, edits):
    """Counts of a result: what was found, repaired and spoiled.

    Mistakes and edits that touch, or nearly, are judged together.
    """
    spans = [(m.at, m.at + len(m.wrong), 0, m) for m in mistakes]
    spans += [(e.start, e.stop, 1, e) for e in edits]
    groups = []
    for span in sorted(spans, key=lambda span: span[:3]):
        if groups and span[0] <= max(s[1] for s in groups[-1]) + 1:
            groups[-1].append(span)
        else:
            groups.append([span])
    n = Counter(mistakes=len(mistakes), characters=len(text))
    n.update(f"mistakes {m.kind}" for m in mistakes)
    shift = 0  # of the right text against the one with mistakes
    for group in groups:
        start = min(s[0] for s in group)
        stop = max(s[1] for s in group)
        made = [s[3] for s in group if s[2]]
        inside = [s[3] for s in group if not s[2]]
        growth = sum(m.stop - m.start - len(m.wrong) for m in inside)
        right = text[start + shift : stop + shift + growth]
        shift += growth
        result = []
        at = start
        for edit in sorted(made):
            result += [wrong[at : edit.start], edit.new]
            at = edit.stop
        result = "".join([*result, wrong[at:stop]])
        left = distance(result, right)
        n["left"] += left
        if made:
            n["found"] += len(inside)
            n.update(f"found {m.kind}" for m in inside)
        if made and not inside:
            n["false"] += 1
            n[f"false {kind_of(made, wrong)}"] += 1
        n["repaired"] += len(inside) * (result == right)
        n["spoiled"] += max(0, left - distance(wrong[start:stop], right))
    return n


def rates(n):
    """What the counts of a text say."""
    precision = n["found"] / max(1, n["found"] + n["false"])
    recall = n["found"] / max(1, n["mistakes"])
    return dict(
        mistakes=n["mistakes"],
        precision=precision,
        recall=recall,
        found=2 * precision * recall / max(1e-9, precision + recall),
        repaired=n["repaired"] / max(1, n["mistakes"]),
        spoiled=1000 * n["spoiled"] / max(1, n["characters"]),
        left=n["left"] / max(1, n["mistakes"]),
    )


# ---- A spelling checker
class Speller:
    """symspellpy: words that the training text does not have become the nearest that it has."""

    WORD = re.compile(r"[^\s\-]+")
    EDGES = ".,;:!?'\"()&$"

    def __init__(self, training, most=1, shortest=1):
        symspellpy = environment.optional("symspellpy", "the method symspell")
        self.top = symspellpy.Verbosity.TOP
        self.most = most
        self.shortest = shortest
        self.checker = symspellpy.SymSpell(most, 7)
        words = Counter(self.core(m[0])[1].lower() for m in self.WORD.finditer(training))
        self.known = words
        for word, count in words.items():
            if word:
                self.checker.create_dictionary_entry(word, count)

    def core(self, word):
        """(how many characters of a word are marks before it, the word without marks)"""
        left = len(word) - len(word.lstrip(self.EDGES))
        return left, word.strip(self.EDGES)

    def __call__(self, text):
        edits = []
        for match in self.WORD.finditer(text):
            left, word = self.core(match[0])
            if len(word) < self.shortest or word.lower() in self.known:
                continue
            found = self.checker.lookup(word, self.top, self.most, transfer_casing=True)
            if found:
                start = match.start() + left
                blocks = difflib.SequenceMatcher(None, word, found[0].term, False)
                for tag, i, j, k, m in blocks.get_opcodes():
                    if tag != "equal":
                        edits.append(Edit(start + i, start + j, found[0].term[k:m]))
        return edits


# ---- A 6-gram model
class NGrams:
    """Interpolated Kneser-Ney over characters: log p of the next one after ORDER - 1 others."""

    def __init__(self, training):
        self.alphabet = "".join(sorted(set(training)))
        self.index = {c: i for i, c in enumerate(self.alphabet)}
        V = self.V = len(self.alphabet)
        ids = np.array([self.index[c] for c in training])
        self.levels = [None]  # for each order: codes of its n-grams, sorted, counts and discount
        longer = None
        for n in range(ORDER, 0, -1):
            if longer is None:
                codes = np.zeros(len(ids) - n + 1, np.int64)
                for k in range(n):
                    codes = codes * V + ids[k : len(ids) - n + 1 + k]
                codes, counts = np.unique(codes, return_counts=True)
            else:  # how many different characters come before
                codes, counts = np.unique(longer % V**n, return_counts=True)
            ones = (counts == 1).sum()
            twos = (counts == 2).sum()
            self.levels.insert(1, (codes, counts, ones / max(1, ones + 2 * twos)))
            longer = codes
        self.cache = {}

    def p(self, context):
        """(V,) probabilities after a context, a tuple of at most ORDER - 1 ids."""
        if context in self.cache:
            return self.cache[context]
        below = self.p(context[1:]) if context else np.full(self.V, 1 / self.V)
        codes, counts, discount = self.levels[len(context) + 1]
        code = 0
        for i in context:
            code = code * self.V + i
        low, high = np.searchsorted(codes, (code * self.V, (code + 1) * self.V))
        p = below
        if high > low:
            here = counts[low:high]
            total = here.sum()
            p = below * (discount * len(here) / total)
            p[codes[low:high] % self.V] += np.maximum(here - discount, 0) / total
        self.cache[context] = p
        return p

    def logp(self, context):
        """(V,) log p, and the ids that are likeliest."""
        key = ("log", context)
        if key not in self.cache:
            logp = np.log(self.p(context))
            best = np.argpartition(-logp, LETTERS_TRIED)[:LETTERS_TRIED]
            self.cache[key] = (logp.tolist(), best.tolist())
        return self.cache[key]


class BeamSearch:
    """What was probably meant, by a 6-gram model, a rate of mistakes and proofreading's prior.

    The prior says what a mistake leaves, as it does for the network; the rate is its own. States
    that end in the same characters at the same place go on alike: the better one stays.
    """

    def __init__(self, model, rate=0.003):
        self.model = model
        self.rate = rate
        self.prior = prior = Prior(list(model.alphabet), model.V)
        self.wrong = prior.wrong.tolist()
        letters = beside()
        near = [letters.get(c, "") for c in model.alphabet]
        self.near = [[model.index[c] for c in others if c in model.index] for others in near]

    def __call__(self, text):
        model = self.model
        each = math.log(self.rate / len(KINDS))
        fine = math.log(1 - self.rate)
        ids = [model.index.get(c) for c in text]
        first = (model.index[START],) * (ORDER - 1)
        beams = {0: {first: (0.0, None)}}  # place -> last ids -> (log p, edits as a linked list)

        def reach(place, context, score, edits):
            states = beams.setdefault(place, {})
            if context not in states or states[context][0] < score:
                states[context] = (score, edits)

        for i, y in enumerate(ids):
            states = heapq.nlargest(BEAM, beams.pop(i).items(), key=lambda item: item[1][0])
            for context, (score, edits) in states:
                logp, best = model.logp(context)
                if y is None:
                    reach(i + 1, context, score, edits)
                    continue
                after = (*context[1:], y)
                reach(i + 1, after, score + fine + logp[y], edits)
                around = [context[-1], *(z for z in ids[i + 1 : i + 2] if z is not None)]
                more = score + each + self.prior.each - self.prior.deletion(y, around)
                reach(i + 1, context, more, (edits, Edit(i, i + 1, "")))
                for c in {*best, *self.near[y]} - {y}:
                    more = score + each + self.wrong[c][y] + logp[c]
                    edit = Edit(i, i + 1, model.alphabet[c])
                    reach(i + 1, (*context[1:], c), more, (edits, edit))
                for c in best:
                    ahead = (*context[1:], c)
                    more = score + each + fine + logp[c] + model.logp(ahead)[0][y]
                    edit = Edit(i, i, model.alphabet[c])
                    reach(i + 1, (*ahead[1:], y), more, (edits, edit))
                z = ids[i + 1] if i + 1 < len(ids) else None
                if z is not None and z != y:
                    ahead = (*context[1:], z)
                    more = score + each + logp[z] + model.logp(ahead)[0][y]
                    edit = Edit(i, i + 2, text[i + 1] + text[i])
                    reach(i + 2, (*ahead[1:], y), more, (edits, edit))
        edits = max(beams[len(ids)].values(), key=lambda state: state[0])[1]
        found = []
        while edits:
            edits, edit = edits
            found.append(edit)
        return found[::-1]


# ---- The network
class Network:
    def __init__(self, model, tokenizer, dtype, caution=0.0):
        self.reader = Proofreader(model, tokenizer, caution)
        self.dtype = dtype

    def __call__(self, text):
        device = next(self.reader.model.parameters()).device.type
        edits = []
        with torch.autocast(device, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            for part in self.reader.parts(text):
                if part.change:
                    start = part.change.position
                    edits.append(Edit(start, start + len(part.before), part.after))
        return edits


# ---- Choosing settings
def tune(options, training, model, tokenizer, alphabet):
    """Choose the settings of all methods on training text; yields rows."""
    cut = int(0.9 * len(training))
    parts = dict(held=training[cut:], seen=training)
    ngrams = NGrams(training[:cut])
    methods = [
        ("6-gram", f"rate={r}", "held", BeamSearch(ngrams, r))
        for r in (0.0003, 0.001, 0.003, 0.01, 0.02)
    ]
    try:
        for most in (1, 2):
            for shortest in (1, 3, 4):
                speller = Speller(training[:cut], most, shortest)
                methods.append(("symspell", f"most={most} shortest={shortest}", "held", speller))
    except UserError as e:
        print(e, file=sys.stderr)
    wanted = options.methods.split(",")
    for name, settings, part, method in methods:
        if name in wanted:
            n = Counter()
            for source in ("random", "keyboard"):
                text = parts[part][: options.characters]
                n += measure(text, 0.02, source, KINDS, alphabet, options.seed, method)[0]
            yield dict(method=name, settings=settings) | rates(n)
    if "mdlm" in wanted:
        yield from tune_network(options, training[: options.characters], model, tokenizer, alphabet)


def tune_network(options, text, model, tokenizer, alphabet):
    """A row for each kind of edit: what the right and the wrong ones gain beyond their cost.

    The network knows this text by heart, so few wrong edits gain anything here.
    """
    right = {kind: {} for kind in KINDS}  # mistake -> gain of the best edit that repairs it
    wrong = {kind: {} for kind in KINDS}  # place -> gain of the best edit that repairs nothing
    total = 0
    for source in ("random", "keyboard"):
        rng = random.Random(options.seed)
        garbled, mistakes = with_mistakes(text, 0.02, source, KINDS, alphabet, rng)
        method = Network(model, tokenizer, options.dtype, caution=1e9)
        method.reader.judged = []
        method(garbled)
        total += len(mistakes)
        for at, edit in method.reader.judged:
            made = Edit(at, at + edit.stop - edit.start, tokenizer.decode(edit.ids))
            near = [m for m in mistakes if m.at - 1 <= made.stop and made.start <= m.at + 3]
            repairs = judge(text, garbled, mistakes, [made])["repaired"] > 0
            gains = (right if repairs else wrong)[edit.kind]
            key = (source, near[0] if near else at)
            if repairs or not near:
                gains[key] = max(edit.gain - edit.cost, gains.get(key, -math.inf))
    for kind in KINDS:
        gains = sorted(right[kind].values())
        row = dict(method="mdlm", kind=kind, mistakes=total, repairs=len(gains))
        row["wrong"] = " ".join(f"{g:.1f}" for g in sorted(wrong[kind].values())[-6:])
        row["right"] = " ".join(f"{g:.1f}" for g in gains[:8])
        yield row


# ---- The table
def measure(text, rate, source, kinds, alphabet, seed, method):
    """(counts, seconds of the processor) of a method on a text with mistakes."""
    wrong, mistakes = with_mistakes(text, rate, source, kinds, alphabet, random.Random(seed))
    began = time.process_time()
    edits = method(wrong)
    seconds = time.process_time() - began
    return judge(text, wrong, mistakes, edits), seconds


def measure_pieces(pieces, rate, source, kinds, alphabet, seed, method):
    """Yield (begin, counts, seconds of the processor) for each of the pieces of one text.

    pieces: [(begin, text)]. Each has its own mistakes; the method gets the whole text.
    """
    garbled = []
    for begin, text in pieces:
        rng = random.Random(f"{seed} {begin}")
        garbled.append(with_mistakes(text, rate, source, kinds, alphabet, rng))
    whole = "".join(wrong for wrong, _ in garbled)
    began = time.process_time()
    edits = method(whole)
    seconds = time.process_time() - began
    starts = [0, *itertools.accumulate(len(wrong) for wrong, _ in garbled)][:-1]
    edits_of = {start: [] for start in starts}
    for edit in edits:
        start = starts[bisect.bisect(starts, edit.start) - 1]
        edits_of[start].append(Edit(edit.start - start, edit.stop - start, edit.new))
    for (begin, text), (wrong, mistakes), here in zip(pieces, garbled, edits_of.values()):
        yield begin, judge(text, wrong, mistakes, here), seconds * len(wrong) / len(whole)


def rows_of_pieces(options, training, validation, model, tokenizer, alphabet):
    """Yield a row of counts for each piece of text, rate, source, kind of mistakes and method."""
    makers = {
        "nothing": lambda: lambda text: [],
        "symspell": lambda: Speller(training),
        "6-gram": lambda: BeamSearch(NGrams(training)),
        "mdlm": lambda: Network(model, tokenizer, options.dtype),
    }
    wanted = options.methods.split(",")
    if unknown := set(wanted) - makers.keys():
        raise UserError(f"{min(unknown)!r} is no method; give some of {', '.join(makers)}")
    methods = {name: makers[name]() for name in wanted}
    sets = [("all", KINDS), ("substitutions", KINDS[:1])]
    sets = [(which, kinds) for which, kinds in sets if options.kinds in ("", which)]
    sources = [source for source in ("random", "keyboard") if options.source in ("", source)]
    for rate in (0.02, 0.01, 0.05):
        size = options.characters if rate == 0.02 else options.others
        text = validation[options.begin : options.begin + size]
        pieces = [(options.begin + at, text[at : at + PIECE]) for at in range(0, len(text), PIECE)]
        for (which, kinds), source in itertools.product(sets, sources) if pieces else ():
            for name, method in methods.items():
                about = dict(rate=rate, source=source, kinds=which, method=name)
                noise = (rate, source, kinds, alphabet, options.seed)
                for begin, n, seconds in measure_pieces(pieces, *noise, method):
                    yield about | dict(begin=begin, seconds=seconds) | n


def total(rows):
    """The sum of counts."""
    n = Counter()
    for row in rows:
        n.update({k: v for k, v in row.items() if k not in ABOUT})
    return n


def error(rows, others=None):
    """The standard error of F1, or of the difference to another method, by the bootstrap.

    rows: counts of pieces, which are drawn with replacement; others: of the same pieces
    """
    rng = random.Random(0)
    values = []
    for _ in range(DRAWS):
        drawn = rng.choices(range(len(rows)), k=len(rows))
        value = rates(total(rows[i] for i in drawn))["found"]
        if others:
            value -= rates(total(others[i] for i in drawn))["found"]
        values.append(value)
    return float(np.std(values))


def table(rows):
    """Yield a row for each rate, source, kinds and method, of the counts of pieces.

    Then one for each rate and method, of all sources and kinds together. Only pieces that all of
    its methods have count in a row.
    """
    groups = {}
    for row in rows:
        noise = tuple(row[k] for k in ("rate", "source", "kinds"))
        for group in (noise, (row["rate"], "both", "both")):
            piece = (row["begin"], *noise)
            groups.setdefault(group, {}).setdefault(row["method"], {})[piece] = row
    for noise, methods in sorted(groups.items(), key=lambda item: "both" in item[0]):
        last = list(methods.values())[-1]
        common = sorted(set.intersection(*map(set, methods.values())))
        for name, parts in methods.items() if common else ():
            here = [parts[piece] for piece in common]
            other = [last[piece] for piece in common]
            n = total(here)
            row = dict(zip(("rate", "source", "kinds"), noise), method=name) | rates(n)
            row["error"] = error(here)
            row["ahead"] = rates(total(other))["found"] - row["found"]
            row["its error"] = error(here, other)
            row["seconds"] = 1000 * n["seconds"] / n["characters"]
            for kind in KINDS:
                row[kind] = f"{n[f'found {kind}']}/{n[f'mistakes {kind}']}"
                row[kind] += f" {n[f'false {kind}']}"
            yield row


def read_rows(paths):
    """The rows of files of --json. Raises UserError for other files."""
    fix = "give files that --json of this study wrote"
    rows = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as f:
                rows += map(json.loads, f)
            is_table = all(
                isinstance(row, dict) and {*ABOUT, *SUMMED} <= row.keys() for row in rows
            )
        except (OSError, ValueError) as e:
            raise UserError(f"--join={path} cannot be read ({e}); {fix}") from None
        if not is_table:
            raise UserError(f"--join={path} has no counts of this study; {fix}")
    if not rows:
        raise UserError(f"--join names empty files; {fix}")
    return rows


def show(rows):
    rows = list(rows)
    print(plots.table([rows[-1].keys(), *(row.values() for row in rows)], digits=3))


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    outputs.check_all(options)
    if options.join:
        show(table(read_rows(options.join.split(","))))
        return 0
    if not options.data:
        raise UserError("--data is missing; give the text that the model learned")
    with open(options.data, encoding="utf-8", newline="") as f:
        text = f.read()
    model, tokenizer, _ = mdlm.load(options.out_dir)
    cut = int(0.9 * len(text))
    training = text[:cut]
    alphabet = "".join(sorted(set(training)))
    if options.tune:
        show(tune(options, training, model, tokenizer, alphabet))
        return 0
    kept = []
    with outputs.Lines(options.json or os.devnull) as lines:
        for row in rows_of_pieces(options, training, text[cut:], model, tokenizer, alphabet):
            kept.append(row)
            print(json.dumps(row), file=lines, flush=True)
    show(table(kept))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
