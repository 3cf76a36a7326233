"""Lesson 1: how many tokens of each text a training step masks.

python lessons/programs/draws.py
"""

import sys

sys.path.insert(0, ".")  # run it in the root of the repository
import torch

import mdlm

objective = mdlm.MaskedDiffusion(mdlm.Config(batch_size=8, block_size=10), mask_id=65)
lengths = torch.full((8,), 10)
for step in range(3):
    l = objective.mask_counts(step, 0.0, torch.arange(8), lengths)  # noqa: E741
    print(l.tolist(), int(l.sum()))
