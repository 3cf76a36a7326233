"""Lesson 10: ask runs for the end and the front of the made-up facts.

python lessons/programs/ask.py
"""

import random
import sys

sys.path[:0] = [".", "lessons"]  # run it in the root of the repository
from facts import make_facts

import mdlm
import sample

facts = random.Random(5).sample(make_facts(), 20)
for folder in sys.argv[1:]:
    model, tokenizer, config = mdlm.load(folder)
    end = front = 0
    for fact in facts:
        name, rest = fact[:6], fact[6:]
        ask = f"{name} is the " if config.objective == "ar" else f"{name} is the ██████ of ██████."
        end += sample.write(model, tokenizer, ask, temperature=0)[0] == fact
        if config.objective == "mdlm":
            front += sample.write(model, tokenizer, "██████" + rest, temperature=0)[0] == fact
    print(folder, end, front)
