"""Seconds to write a text: all of it in few calls, or block by block with a cache (lesson 11).

python lessons/programs/seconds.py      # a minute
"""

import string
import sys
import time

sys.path[:0] = ["."]  # run it in the root of the repository
import torch

import mdlm
import sample

T = 256  # characters
CALLS = {T: (8, 16, 32, 64), 16: (32, 64), 4: (64,), 1: (T,)}  # tokens in a block -> calls to try
NETWORK = dict(n_layer=8, n_head=4, n_embd=256, attention_every=3, block_size=T)


def measure(model, calls):
    """The seconds of a processor core for one text; the better of two."""
    best = float("inf")
    for seed in range(2):
        begin = time.process_time()
        for _ in sample.unmask(model, torch.full((1, T), model.mask_id), steps=calls, seed=seed):
            pass
        best = min(best, time.process_time() - begin)
    return best


torch.set_num_threads(1)
for S, numbers in CALLS.items():
    # Not trained: random weights are as fast as others.
    model, _, _ = mdlm.new(string.printable, block_length=S if S < T else 0, **NETWORK)
    for calls in numbers:
        seconds = measure(model.eval(), calls)
        print(f"blocks of {S:>3}, {calls:>3} calls: {seconds:.2f} s", flush=True)
