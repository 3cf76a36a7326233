"""Lesson 9: how sure the model is at each mask, by your `confidence` from my/sure.py.

python lessons/programs/bars.py
"""

import sys

sys.path[:0] = [".", "my", "lessons/solutions"]  # run it in the root of the repository
import torch
from sure import confidence

import mdlm

model, tokenizer, config = mdlm.load("weights/shakespeare")
text = "I pray you, ██████ to the ████ of thi█ house."
ids = torch.tensor(tokenizer.encode(text.replace("█", " ")))
x = torch.full((config.block_size,), model.mask_id)
x[: len(text)] = ids
x[[i for i, c in enumerate(text) if c == "█"]] = model.mask_id
with torch.no_grad():
    sure = confidence(model, x, model.mask_id)
for i, c in enumerate(text):
    if c == "█":
        print(f"{i:>2} {sure[i]:.2f} {'#' * round(40 * sure[i].item())}")
