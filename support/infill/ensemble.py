"""Several networks as one model, which predicts the mean of their probabilities.

Networks that were trained separately make different mistakes, so the mean is often better than each
(results/record.md). Its loss is never above the mean of their losses, because -log is convex. A
mean of distributions is a distribution, so its NELBO is a bound and its chain rule is exact, as for
one network.
"""

import copy
import math

import torch
import torch.nn as nn

from nanomdlm.support import abilities
from nanomdlm.support.cli.python_arguments import to_view
from nanomdlm.support.cli.settings import names_of
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import checkpoint

# Settings that the networks have in common, because they are shown the same View.
SHARED = ("objective", "block_size", "time_conditioning", "shift", "prompt_column")


class Ensemble(nn.Module):
    """The mean of the probabilities of several networks, as a model like each of them.

    networks: models as mdlm.load returns them, with one vocabulary and one context length
    """

    def __init__(self, networks):
        super().__init__()
        self.networks = nn.ModuleList(networks)
        first = networks[0]
        self.config = first.config
        self.objective = first.objective
        self.ops = first.ops
        self.vocab_size = first.vocab_size
        self.mask_id = first.mask_id
        for name in checkpoint.saved_buffers(first):  # of which lengths texts are
            self.register_buffer(name, getattr(first, name))
        self.register_forward_pre_hook(to_view, with_kwargs=True)  # ids in place of a View

    def forward(self, view):
        """Return log-probabilities (n, V) at view.rows, or (B, N, V): logits that are normalized.

        view: a View
        """
        total = None
        for network in self.networks:
            log_p = network(view).log_softmax(-1)
            total = log_p if total is None else torch.logaddexp(total, log_p)
        return total - math.log(len(self.networks))

    def replaced(self, function):
        """Return a copy, hooks included, with each network replaced by function(network)."""
        other = copy.copy(self)
        # copy.copy shares the dict of submodules: replace it in the copy alone.
        other._modules = dict(networks=nn.ModuleList(map(function, self.networks)))
        return other


def read_newest(path, read):
    """Like checkpoint.read_newest, for a path, or for several (see names_of).

    read: a function of a folder that returns (model, tokenizer, config)

    Returns the folders of the checkpoints, and what `read` returns. Of several checkpoints the
    model is an Ensemble; the tokenizer and config are those of the first.
    """
    loaded = [checkpoint.read_newest(name, read) for name in names_of(path)]
    folders = [folder for folder, _ in loaded]
    if len({*folders}) < len(folders):
        raise UserError(f"{path} names a checkpoint twice; name each once")
    return folders, together(loaded) if len(loaded) > 1 else loaded[0][1]


def together(loaded):
    """(model, tokenizer, config) of several checkpoints, pairs (folder, what `read` returned)."""
    folder, first = loaded[0]
    for path, other in loaded[1:]:
        check_alike(folder, first, path, other)
        texts = [first[2].data, other[2].data]
        if texts[0] != texts[1]:
            learned = f"{folder} learned {texts[0]}, {path} {texts[1]}"
            warn(f"{learned}: if the texts differ, one may have learned what validates the other")
    return Ensemble([model for _, (model, _, _) in loaded]).eval(), *first[1:]


def check_alike(one, first, folder, other):
    """Raise UserError unless two loaded checkpoints can be in one Ensemble."""
    fix = "networks that predict together have one of each; give such runs"
    both = f"{one} and {folder} have"
    if first[1].to_json() != other[1].to_json() or first[0].mask_id != other[0].mask_id:
        raise UserError(f"{both} two vocabularies; {fix}")
    shared = SHARED
    given = [abilities.knows_lengths(model) for model in (first[0], other[0])]
    if any(given):  # of their documents
        shared += ("document_length", "pos")
    for name in shared:
        values = [getattr(config, name) for config in (first[2], other[2])]
        if values[0] != values[1]:
            raise UserError(f"{both} two values of --{name}, {values[0]} and {values[1]}; {fix}")
    for model, path in ((first[0], one), (other[0], folder)):
        if model.objective.n_texts > 1:
            raise UserError(f"{path} writes block by block; give it on its own")
