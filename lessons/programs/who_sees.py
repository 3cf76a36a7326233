"""Lesson 3: which positions see which, and what tells them their order.

python lessons/programs/who_sees.py
"""

import sys

sys.path.insert(0, "lessons")  # run it in the root of the repository
import torch
import torch.nn as nn
import torch.nn.functional as F
from minimal import Model

torch.manual_seed(0)
model = Model(65)
x = torch.randint(65, (1, 12))
other = x.clone()
other[0, 8] = (x[0, 8] + 1) % 65  # token 8 is another one
order = torch.randperm(12)


@torch.no_grad()
def changed():
    """Where the output changes if token 8 does."""
    differs = (model(x) - model(other)).abs().amax(-1)[0] > 1e-6
    return "".join("x" if each else "." for each in differs)


@torch.no_grad()
def depends_on_order():
    """Shuffle the text, or shuffle its output: how much do the two differ?"""
    return f"{(model(x[:, order]) - model(x)[:, order]).abs().max():.6f}"


print("attention to all         ", changed())
print("positions and convolution", depends_on_order())
nn.init.zeros_(model.place)
print("convolution alone        ", depends_on_order())
for layer in model.layers:
    nn.init.zeros_(layer.near.weight)
print("neither                  ", depends_on_order())
attention = F.scaled_dot_product_attention
F.scaled_dot_product_attention = lambda *qkv: attention(*qkv, is_causal=True)
print("attention as in a GPT    ", changed())
