"""Print the three most probable tokens at each gap of a template, given the visible text.

    python lessons/likeliest.py weights/shakespeare "To be, or ███ to be"

The probabilities come from one network call with all gaps masked, so those at one gap do not
depend on the tokens at another.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanomdlm.support import abilities, errors
from nanomdlm.support.cli import entry

entry.start(__name__)

import torch

import mdlm
from nanomdlm.support.infill import templates


@torch.no_grad()
def main(argv):
    if len(argv) != 2:
        raise errors.UserError(
            'give the folder of a run and a template: weights/shakespeare "To be, or ███ to be"'
        )
    model, tokenizer, config = mdlm.load(argv[0], whole=True)
    if not abilities.fills_gaps(model) or "[___]" in argv[1]:
        raise errors.UserError("this needs a model that fills gaps, and █ for each missing token")
    segments = templates.parse(argv[1], tokenizer, config.block_size)
    ids = templates.to_ids(segments, model.mask_id)
    x = torch.tensor([ids + [model.objective.pad_id] * (config.block_size - len(ids))])
    for i, p in enumerate(model(x)[0, : len(ids)].softmax(-1)):
        if ids[i] == model.mask_id:
            best = zip(*p.topk(3))
            best = (
                f"{tokenizer.piece(int(token), first=i == 0)!r} {100 * q:.1f} %"
                for q, token in best
            )
            print(f"token {i + 1:>4}", *best, sep="   ")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
