"""--objective=ar: the autoregressive twin, for comparison: same network, data and scored tokens.

Its input is [MASK], then the text without its last token. Each position sees itself and earlier
positions, and predicts the text's token at that position.
"""

import torch
import torch.nn.functional as F

from nanomdlm.support.view import Batch

from .variant import Variant

REFUSED = dict(
    blocks="an autoregressive model writes token by token",
    prompts="prompts are for masked diffusion",
    time_conditioning="an autoregressive model has no mask rate",
)


FLAG = "objective"


def wrap(objective, end_id, mean_length):
    if objective.config.document_length == "given":
        return Autoregressive(objective, end_id, mean_length)
    return Autoregressive(objective, None, None)


def has_rates(config):
    return config.objective == "ar"  # it has none


class Autoregressive(Variant):
    """Every token is predicted from those before it, and all have the same weight."""

    metric = "nll"

    def __init__(self, inner, end_id, mean_length):
        super().__init__(inner)
        self.end_id = -1 if end_id is None else end_id
        self.mean_length = mean_length or self.T

    def view(self, xt, x0=None, rows=None):
        begin = torch.full_like(xt[:, :1], self.mask_id)
        ids = torch.cat((begin, xt[:, :-1]), 1)
        return self.inner.view(ids, rows=rows)._replace(causal=True)

    def scored_mask(self, x0):
        """Text and the [END] after it, which is learned too; not the padding of a window."""
        is_text = x0 != self.end_id
        return is_text | F.pad(is_text[:, :-1], (1, 0), value=True)

    def mask_counts(self, step, margin, samples, lengths):
        return lengths  # all are predicted

    def batch(self, ops, x0, counts, step, samples, seed=None, scored=None):
        if scored is None:
            scored = self.scored_mask(x0)
        weights = (counts / self.mean_length).float() / (counts * len(x0))  # (B,)
        weights = (scored * weights[:, None]).flatten()
        at = torch.arange(x0.numel(), device=x0.device)
        return Batch(self.view(x0), x0.flatten(), weights, at)

    def pieces(self, T, steps):
        return [(range(i, i + 1), 1) for i in range(T)]
