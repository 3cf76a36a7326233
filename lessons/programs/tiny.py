"""Lesson 2: the loss as a sum over all masks of four tokens, and as an estimate (half a minute).

python lessons/programs/tiny.py
"""

import itertools
import math
import sys

sys.path.insert(0, ".")  # run it in the root of the repository
import torch
import torch.nn.functional as F

import mdlm
from nanomdlm.kernels import operations as kernels

config = mdlm.Config(n_layer=1, n_head=1, n_embd=16, block_size=4, conv=0, dropout=0.0)
torch.manual_seed(0)
model = mdlm.make_model(config, 3, kernels.select("torch")).eval()
for p in model.parameters():
    torch.nn.init.normal_(p, std=0.5)
x0 = torch.tensor(list(itertools.product(range(3), repeat=4)))  # (81, 4): every text

total = 0.0
with torch.no_grad():
    for choice in itertools.product((False, True), repeat=4):
        hide = torch.tensor(choice)
        l = sum(choice)  # noqa: E741
        if l:  # 4 values of l, comb(4, l) subsets of each
            xt = torch.where(hide, model.mask_id, x0)
            logits = model(model.objective.view(xt))  # what the network is shown: here xt alone
            ce = F.cross_entropy(logits.mT, x0, reduction="none")  # (81, 4)
            total += ce[:, hide].mean().item() / 4 / math.comb(4, l)
print(f"all 15 subsets: {total:.4f}")
for passes in (1, 16, 256, 4096):
    r = mdlm.evaluate(model, x0, passes=passes, batch_size=81)
    print(f"{passes:>4} passes: {r['nelbo']:.4f}")
