"""Distill several networks into one, on windows that they have partly rewritten.

    python studies/distill.py weights/shakespeare,weights/record 0.5 --data=tinyshakespeare.txt \\
        --init_from=weights/record --max_steps=20000 --out_dir=student

The first word names the teachers: their mean, calibrated. The second is the share of windows that
are rewritten before they are masked: half of their tokens, drawn by the teachers in four calls.
What follows are flags of mdlm.py. The student's targets are the teachers' probabilities, so it
never sees a hard label, and with rewriting the text does not end. results/record.md has what it
gained.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/distill.py, from anywhere

from nanomdlm.support.cli import entry

PROCESS_START = entry.start(__name__)

import torch

import mdlm
from nanomdlm.support.errors import UserError
from nanomdlm.support.numerics import generator
from nanomdlm.support.run import calibration, compiling
from nanomdlm.variants.variant import Variant

CALLS = 4  # of the teachers, to rewrite a window
USES = 4  # steps in which a rewritten window is shown: rewriting costs more than a step


class Distilled(Variant):
    """Shows rewritten windows, and learns the probabilities of `teacher`."""

    def __init__(self, inner, teacher, share):
        super().__init__(inner)
        self.teacher = teacher
        self.share = share  # of windows to rewrite
        self.kept = None  # (n, T) windows that were rewritten last

    def texts(self, x0, step, samples):
        x0 = self.inner.texts(x0, step, samples).clone()
        n = round(self.share * len(x0))
        if n and (step % USES == 0 or self.kept is None):
            self.kept = self.rewritten(x0[:n], step)
        if n:
            x0[:n] = self.kept
        return x0

    def rewritten(self, x0, step):
        g = generator("rewrite", self.seed, step)
        hidden = torch.rand(x0.shape, generator=g) < 0.5
        with torch.autocast("cpu", torch.bfloat16):
            return mdlm.generate(self.teacher, x0.masked_fill(hidden, self.mask_id), CALLS, g)

    def loss(self, network, batch):
        with torch.no_grad():
            p = self.teacher(batch.view).softmax(-1)  # (n, V)
        ce = -(p * network(batch.view).log_softmax(-1)).sum(-1)
        return (ce * batch.weights).sum()


def train(objective, flags, start):
    """Train as mdlm.py does with these flags, and objective(the default one, the model)."""
    make_run = mdlm.make_run

    def make_distilled(*args, **more):
        run = make_run(*args, **more)
        run.model.objective = objective(run.model.objective, run.model)
        return run

    mdlm.make_run = make_distilled
    return mdlm.main(flags, start)


def main(argv):
    if len(argv) < 2 or argv[0].startswith("-"):
        raise UserError("first give the teachers, and the share of windows to rewrite")
    names, share, *flags = argv
    teacher = calibration.calibrated(mdlm.load(names)[0])
    for network in getattr(teacher, "networks", [teacher]):
        network.compile(options=compiling.OPTIONS)

    def objective(inner, model):
        return Distilled(inner, teacher, float(share))

    return train(objective, flags, PROCESS_START)


if __name__ == "__main__":
    with entry.program() as end:
        end.code = main(sys.argv[1:])
    sys.exit(end.code)
