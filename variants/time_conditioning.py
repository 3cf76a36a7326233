"""--time_conditioning: the network is told its mask rate (adaLN; Peebles and Xie, 2212.09748).

The optimum does not need it, as the rate can be read off the text (Zheng et al., 2409.02908): it is
here to compare with.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from support.kernels.reference import masked_fraction

from .variant import Variant


@dataclass
class TimeSettings:
    """Time conditioning."""

    time_conditioning: bool = False  # condition on the mask rate (adaLN)


class TimeConditioned(Variant):
    """Shows the network the share of text that is masked, in each document on its own."""

    def rate_margin(self, margin_scale):
        return 0.0  # the network must learn all rates

    def mask_counts(self, step, margin_scale, samples, lengths):
        return self.inner.mask_counts(step, 0.0, samples, lengths)

    def with_rate(self, view):
        text = view.ids != self.end_id
        return view._replace(rate=masked_fraction(view.ids == self.mask_id, text, view.sees))

    def view(self, xt, x0=None, rows=None):
        return self.with_rate(self.inner.view(xt, x0, rows))

    def batch(self, ops, x0, counts, step, samples):
        view, targets, weights = self.inner.batch(ops, x0, counts, step, samples)
        return self.with_rate(view), targets, weights


# ---- What a network does with the rate
class RateEmbedding(nn.Linear):
    """A linear layer on cosines of the rate."""

    def forward(self, rate):
        """What layers are told of mask rates: (B, 1, C), or (B, N, C) of documents."""
        C = self.in_features
        waves = torch.cos(rate * math.pi * torch.arange(C, device=rate.device))
        return F.silu(super().forward(waves))


class AdaLN(nn.Linear):
    """Adaptive normalization (Peebles and Xie, 2212.09748), without gates."""

    def forward(self, rate):
        """Scale and shift of both norms of a layer, for what RateEmbedding returns."""
        return super().forward(rate).chunk(4, -1)
