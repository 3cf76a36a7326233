"""REPR-ALIGN (2605.06885): adapt a decoder by staying near its own representations.

    python studies/align.py 1 --init_from=FOLDER --data=FILE --compile=off --out_dir=aligned

The first word is the weight of the alignment: to the loss it adds the mean, over layers and
positions, of 1 - cos(hidden state, hidden state of the original decoder on the clean text). The
original is kept as it was, and reads from left to right. What follows are flags of mdlm.py;
compile=off, because hidden states are read by hooks. results/language.md says what it gains.
"""

import copy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/align.py, from anywhere

from nanomdlm.support.cli import entry

PROCESS_START = entry.start(__name__)

import torch
import torch.nn.functional as F

from nanomdlm.studies import distill
from nanomdlm.support.errors import UserError
from nanomdlm.support.view import View
from nanomdlm.variants.variant import Variant


class Aligned(Variant):
    """Adds `weight` times the distance of the hidden states to those of the original."""

    def __init__(self, inner, model, weight):
        super().__init__(inner)
        self.weight = weight
        self.model = model
        self.original = None  # until the first step, when the model has its weights
        self.was, self.now = ([], [])  # hidden states (B, T, C) of the layers in a call

    def begin(self):
        self.original = copy.deepcopy(self.model).eval().requires_grad_(False)
        for network, states in ((self.original, self.was), (self.model, self.now)):
            for layer in network.layers:
                layer.register_forward_hook(keeping(states))

    def loss(self, network, batch):
        if self.original is None:
            self.begin()
        self.was.clear()
        self.now.clear()
        x0 = batch.view.ids.flatten().clone()
        x0[batch.at] = batch.targets
        with torch.no_grad():
            self.original.features(View(x0.view_as(batch.view.ids), batch.view.at, causal=True))
        loss = self.inner.loss(network, batch)
        pairs = zip(self.now, self.was, strict=True)
        near = torch.stack([F.cosine_similarity(a, b, -1).mean() for a, b in pairs]).mean()
        # The weights of a micro-batch sum to its share of the texts in a step.
        return loss + self.weight * (1 - near) * batch.weights.sum()


def keeping(states):
    """A hook that appends what a layer returns."""

    def hook(layer, inputs, output):
        states.append(output[0] if isinstance(output, tuple) else output)

    return hook


def main(argv):
    if not argv or argv[0].startswith("-"):
        raise UserError("first give the weight of the alignment, such as 1")
    weight, *flags = argv
    if any(flag.startswith("--resume") for flag in flags):
        raise UserError("the original network is not saved, so a run cannot be resumed")

    def objective(inner, model):
        return Aligned(inner, model, float(weight))

    return distill.train(objective, flags, PROCESS_START)


if __name__ == "__main__":
    with entry.program() as end:
        end.code = main(sys.argv[1:])
    sys.exit(end.code)
