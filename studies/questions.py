"""Questions and answers that a program makes, and how many a tuned model answers right.

    python studies/questions.py write --dest=qa.jsonl
    python mdlm.py --data=qa.jsonl --prompt_column=question --text_column=answer --block_size=48 \\
        --time_limit=240 --out_dir=qa
    python studies/questions.py ask --data=qa.jsonl --out_dir=qa

    write   20,000 records {"question", "answer"} of four kinds, each as often: sums of numbers in
            words; and of random words of two to nine letters out of eight the reverse, the upper
            case, the length
    ask     the share of right answers to the last tenth of the records, which a training run does
            not see, at temperature 0, for each kind. Only words that the first nine tenths do not
            have count. --loose: capitals and spaces do not count
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/questions.py, from anywhere

from nanomdlm.support.cli import entry, outputs

entry.start(__name__)

import json
import random
import re
from dataclasses import dataclass

import mdlm
import sample
from nanomdlm.support.cli.settings import Count, Natural, Reads, Writes, parse
from nanomdlm.support.run import plots

NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
NUMBERS = (NUMBERS + " fifteen sixteen seventeen eighteen nineteen twenty").split()
LETTERS = "abcdefgh"
TRAINING = 0.9  # of the records


@dataclass
class WriteOptions:
    dest: Writes = "qa.jsonl"  # the file to write
    records: Natural = 20000  # how many
    seed: Natural = 0  # of the words


@dataclass
class AskOptions:
    data: Reads = "qa.jsonl"  # what `write` wrote
    out_dir: Reads = "out"  # a run that was tuned on it
    steps: Count = 8  # network calls of an answer
    most: Count = 200  # questions of each kind
    loose: bool = False  # ignore capitals and spaces, for a tokenizer that loses them


def records(n, seed):
    """Yield n pairs (question, answer)."""
    draw = random.Random(seed)
    for _ in range(n):
        kind = draw.randrange(4)
        word = "".join(draw.choices(LETTERS, k=draw.randint(2, 9)))
        a, b = draw.randrange(11), draw.randrange(11)
        yield [
            (f"What is {NUMBERS[a]} plus {NUMBERS[b]}?", NUMBERS[a + b]),
            (f"Reverse {word}.", word[::-1]),
            (f"Upper case: {word}.", word.upper()),
            (f"How long is {word}?", NUMBERS[len(word)]),
        ][kind]


KINDS = {"What is": "sums", "Reverse": "reverse", "Upper": "upper case", "How": "length"}
WORD = re.compile(rf"\b[{LETTERS}]+\b")


def kind_of(question):
    return next(kind for begin, kind in KINDS.items() if question.startswith(begin))


def unseen(pairs):
    """{kind: pairs of the last tenth}, without words that are in the other nine."""
    cut = int(TRAINING * len(pairs))
    words = {word for question, _ in pairs[:cut] for word in WORD.findall(question)}
    found = {kind: [] for kind in KINDS.values()}
    for question, answer in pairs[cut:]:
        kind = kind_of(question)
        if kind == "sums" or not words & set(WORD.findall(question)):
            found[kind].append((question, answer))
    return found


def write(argv):
    options = WriteOptions(**parse(WriteOptions, argv, __doc__))
    outputs.check_all(options)
    with outputs.Lines(options.dest) as lines:
        for question, answer in records(options.records, options.seed):
            print(json.dumps(dict(question=question, answer=answer)), file=lines)
    return 0


def read(path):
    """The pairs of a file that `write` wrote."""
    with open(path, encoding="utf-8") as f:
        return [(row["question"], row["answer"]) for row in map(json.loads, f)]


def ask(argv):
    options = AskOptions(**parse(AskOptions, argv, __doc__))
    pairs = read(options.data)
    model, tokenizer, _ = mdlm.load(options.out_dir)
    rows = [("kind", "questions", "right", "%")]

    def shown(text):
        return re.sub(r"\s", "", text).lower() if options.loose else text.strip()

    for kind, some in unseen(pairs).items():
        some = some[: options.most]
        right = 0
        for question, answer in some:
            [text] = sample.write(
                model, tokenizer, question, temperature=0, steps=options.steps, correct=0
            )
            right += shown(text.partition("\n")[2]) == shown(answer)
        rows.append((kind, len(some), right, 100 * right / max(1, len(some))))
    print(plots.table(rows, digits=3))
    return 0


def main(argv):
    modes = dict(write=write, ask=ask)
    if not argv or argv[0] not in modes:
        print(__doc__)
        return 2 if argv[:1] not in (["-h"], ["--help"]) else 0
    return modes[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
