"""Where should a network of others predict the first token of a text? None is before it.

    python studies/first_token.py measure --out_dir=RUN
    python studies/first_token.py train --init_from=RUN --data=FILE --out_dir=OUT

measure: the cross-entropy of the first tokens of validation windows, in nats: alone masked (all
         else seen), and at the mask counts of the bound; beside it that of later tokens, and what
         the frequencies of tokens in the training text give
train:   takes the flags of mdlm.py, for a decoder with --shift: a given [MASK] stands before each
         text, and the first token is predicted there, as the decoder did when it predicted the
         next token. Compare its log with those of mdlm.py; other programs do not know of that
         [MASK], so they cannot use the run
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/first_token.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import eval
import mdlm
from nanomdlm.support.cli.settings import Count, Natural, Reads, parse
from nanomdlm.support.errors import UserError
from nanomdlm.support.numerics import standard_error
from nanomdlm.support.run.checkpoint import find_checkpoint
from nanomdlm.support.view import View
from studies import adapt


@dataclass
class Options:
    out_dir: Reads = "out"  # a run of a network of others
    windows: Natural = 256  # windows of validation text
    passes: Count = 3  # mask counts drawn for each window and token
    seed: Natural = 0  # of the masks


def view_after_mask(objective, xt, x0=None, rows=None):
    """The View of MaskedDiffusion.view, of texts xt (B, T) behind a given [MASK] each."""
    B, T = xt.shape
    if rows is None:
        rows = torch.arange(B * T, device=xt.device).view(B, T)
    ids = F.pad(xt, (1, 0), value=objective.mask_id)  # (B, T + 1)
    return View(ids, torch.arange(T + 1, device=xt.device), rows=rows + rows // T + 1)


def train(argv):
    """mdlm.py with these flags, whose texts begin with a given [MASK]."""
    mdlm.MaskedDiffusion.view = view_after_mask
    return mdlm.main(argv)


def cross_entropies(model, xt, x0, at):
    """(W,) of the tokens x0[:, at], given xt (W, T)."""
    T = x0.shape[1]
    found = []
    for some, true in zip(xt.split(8), x0[:, at].split(8), strict=True):
        rows = torch.arange(len(some)) * T + at
        logits = model(model.objective.view(some, rows=rows))
        found.append(F.cross_entropy(logits, true, reduction="none"))
    return torch.cat(found).double()


def mask_with(x0, at, counts, mask_id, generator):
    """x0 (W, T) with the token `at` and counts - 1 drawn others masked, counts (W,) from 1 to T."""
    scores = torch.rand(x0.shape, generator=generator)
    scores[:, at] = -1.0
    place = scores.argsort(1).argsort(1)  # 0: masked first
    return x0.masked_fill(place < counts[:, None], mask_id)


@torch.no_grad()
def measure(argv):
    """Print a table of cross-entropies by position."""
    options = Options(**parse(Options, argv, __doc__))
    folder = find_checkpoint(options.out_dir)
    model, tokenizer, config = mdlm.load(folder, "cpu")
    if config.objective != "mdlm" or not config.network:
        raise UserError(f"--out_dir={options.out_dir} is no diffusion model of others; give one")
    with eval.open_data("", folder, tokenizer, config, torch.device("cpu")) as (corpus, _):
        x0 = corpus.windows(options.windows).long()
        logp = -adapt.frequencies(corpus.ids["train"], model.vocab_size).log()
    W, T = x0.shape
    g = torch.Generator().manual_seed(options.seed)

    def show(values):
        return f"{values.mean():.3f} +- {standard_error(values):.3f}"

    print("| token | all else seen | at the counts of the bound | frequencies alone |")
    print("| --- | --- | --- | --- |")
    for at in sorted({0, 1, 2, T // 2}):
        alone = x0.clone()
        alone[:, at] = model.mask_id
        draws = []
        for k in range(options.passes):
            stratum = (torch.arange(W) * options.passes + k) / (W * options.passes)
            counts = 1 + (stratum * T).long()
            xt = mask_with(x0, at, counts, model.mask_id, g)
            draws.append(cross_entropies(model, xt, x0, at))
        each = [cross_entropies(model, alone, x0, at), torch.stack(draws).mean(0)]
        print(f"| {at} | {' | '.join(map(show, [*each, logp[x0[:, at]]]))} |", flush=True)
    return 0


def main(argv):
    modes = dict(measure=measure, train=train)
    if not argv or argv[0] not in modes:
        if set(argv) & {"-h", "--help"}:
            return measure(argv)
        given = argv[0] if argv else "nothing"
        raise UserError(f"{given} is no mode; give {' or '.join(modes)}, and then the flags")
    return modes[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
