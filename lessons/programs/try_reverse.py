"""Lesson 7: your `generate` writes a text, from my/reverse.py or the solution.

python lessons/programs/try_reverse.py
"""

import sys

sys.path[:0] = [".", "my", "lessons/solutions"]  # run it in the root of the repository
import torch
from reverse import generate

import mdlm

model, tokenizer, config = mdlm.load("weights/shakespeare")
torch.manual_seed(0)
x = torch.full((1, config.block_size), model.mask_id)
prompt = torch.tensor(tokenizer.encode("ROMEO:\n"))
x[0, : len(prompt)] = prompt  # given: it stays
for steps in (8, 256):
    with torch.no_grad():
        out = generate(model, x, model.mask_id, steps)
    print(f"--- {steps} steps")
    print(tokenizer.decode(out[0].tolist()))
