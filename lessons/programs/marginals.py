"""Lesson 13: how probable three words are as draws of one call.

python lessons/programs/marginals.py
"""

import math
import sys

sys.path.insert(0, ".")  # run it in the root of the repository

import torch

import mdlm

model, tokenizer, config = mdlm.load("weights/shakespeare")


def marginals(text):
    """p (n, V): the probabilities of each token at each █ of a text, from one call of the model."""
    at = [i for i, c in enumerate(text) if c == "█"]
    x = torch.full((1, config.block_size), model.mask_id)
    x[0, : len(text)] = torch.tensor(tokenizer.encode(text.replace("█", " ")))
    x[0, at] = model.mask_id
    with torch.no_grad():
        return model(x)[0, at].softmax(-1)


if __name__ == "__main__":
    p = marginals("The ████ is dead!")
    for word in ("king", "duke", "fool"):
        ids = tokenizer.encode(word)
        print(word, f"{math.prod(p[i, id].item() for i, id in enumerate(ids)):.1e}")
