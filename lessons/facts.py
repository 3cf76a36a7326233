"""Print 300 made-up facts, 21 times each, one a line: python lessons/facts.py > facts.txt

Each line is "NAME is the TRADE of TOWN." Names, trades and towns have six letters. Each name occurs
in one fact only, and so does each pair of trade and town: a question about either has one answer.
"""

import argparse
import itertools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanomdlm.support.cli import entry

TRADES = """
barber cooper draper farmer fuller glover grocer hosier hunter joiner
lawyer mercer miller porter potter sailor tailor tanner turner weaver
"""
TOWNS = """
Ambrin Bestow Corvan Dunley Elmsby Fenwil Galdor Hexton
Ildham Jorvel Kelmot Lanver Marsby Norvik Ostrey
"""


def make_facts(seed=0):
    """300 strings, the same ones for the same seed."""
    draw = random.Random(seed)
    syllables = ["".join(pair) for pair in itertools.product("bdfklmnrstvz", "aeiou")]
    pairs = list(itertools.product(TRADES.split(), TOWNS.split()))
    names = set()
    while len(names) < len(pairs):
        names.add("".join(draw.choices(syllables, k=3)).capitalize())
    names = draw.sample(sorted(names), len(names))
    return [f"{n} is the {a} of {b}." for n, (a, b) in zip(names, pairs, strict=True)]


def main(argv):
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    print("\n".join(random.Random(1).sample(make_facts() * 21, 6300)))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
