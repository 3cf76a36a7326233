"""Lesson 12: how many tokens are masked at BERT's rate, and at all rates.

python lessons/programs/two_rates.py
"""

import sys

sys.path.insert(0, ".")  # run it in the root of the repository
import torch

import mdlm
from nanomdlm import variants

for rates in ("0.15-0.15", "uniform"):
    config = mdlm.Config(batch_size=8, block_size=128, rates=rates)
    objective = variants.choose(config, mdlm.MaskedDiffusion(config, 30522))
    l = objective.mask_counts(0, 0.0, torch.arange(8), torch.full((8,), 128))  # noqa: E741
    print(rates, l.tolist())
