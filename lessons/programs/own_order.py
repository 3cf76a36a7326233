"""Lesson 8: three orders and two schedules on patterns, with your `choose` from my/order.py.

python lessons/programs/own_order.py
"""

import math
import sys

sys.path[:0] = [".", "my", "lessons", "lessons/solutions"]  # run it in the root
import torch
from order import choose
from patterns import is_pattern

import mdlm

model, tokenizer, config = mdlm.load("out-patterns")


def anywhere(p, masked, n):
    order = torch.rand(masked.shape).masked_fill(~masked, 2).argsort(1)
    return torch.zeros_like(masked).scatter(1, order[:, :n], True)


def likeliest(p, masked, n):
    at = p.amax(-1).masked_fill(~masked, -1).topk(n).indices
    return torch.zeros_like(masked).scatter(1, at, True)


def equally(r):  # r: the share of the steps that is left -> the share of tokens that is masked
    return r


def few_first(r):  # MaskGIT's cosine
    return math.sin(math.pi / 2 * r)


def many_first(r):
    return 1 - math.cos(math.pi / 2 * r)


@torch.no_grad()
def write(choose, steps, left=equally, coldest=1.0):
    """The share of valid texts among 64; the temperature goes from 1 to `coldest`."""
    torch.manual_seed(0)
    x = torch.full((64, config.block_size), model.mask_id)
    for s in range(steps, 0, -1):
        masked = x == model.mask_id
        n = int(masked[0].sum()) - int(left((s - 1) / steps) * config.block_size)
        if n:
            temperature = coldest + (1 - coldest) * s / steps
            p = (model(x) / temperature).softmax(-1)
            now = choose(p, masked, n)
            x[now] = torch.multinomial(p[now], 1)[:, 0]
    return sum(is_pattern(tokenizer.decode(row)) for row in x.tolist()) / len(x)


for order in (anywhere, likeliest, choose):
    print(order.__name__, [write(order, steps) for steps in (8, 16, 32)])
for left in (few_first, many_first):
    print(left.__name__, write(choose, 16, left))
print("colder", write(choose, 16, coldest=0.5))
