"""--time_conditioning: condition on the mask rate (adaLN; Peebles and Xie, 2212.09748).

The optimum does not need it, because the rate can be read off the text (Zheng et al., 2409.02908).
It is here for comparison.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanomdlm.kernels.reference import masked_fraction

from .variant import Variant


@dataclass
class Settings:
    """Time conditioning."""

    time_conditioning: bool = False  # condition on the mask rate (adaLN)


FLAG = "time_conditioning"


def wrap(objective, end_id, mean_length):
    return TimeConditioned(objective)


def has_rates(config):
    return config.time_conditioning  # the network must learn all rates, from the first step on


class TimeConditioned(Variant):
    """Shows the network the share of text that is masked, separately for each document."""

    def with_rate(self, view):
        text = view.ids != self.end_id
        return view._replace(rate=masked_fraction(view.ids == self.mask_id, text, view.sees))

    def view(self, xt, x0=None, rows=None):
        return self.with_rate(self.inner.view(xt, x0, rows))

    def batch(self, *args, **more):
        made = self.inner.batch(*args, **more)
        return made._replace(view=self.with_rate(made.view))


# ---- What a network does with the rate
class RateEmbedding(nn.Linear):
    """A linear layer on cosines of the rate."""

    def forward(self, rate):
        """The input of the layers for mask rates: (B, 1, C), or (B, N, C) with documents."""
        C = self.in_features
        waves = torch.cos(rate * math.pi * torch.arange(C, device=rate.device))
        return F.silu(super().forward(waves.to(self.weight.dtype)))


class AdaLN(nn.Linear):
    """Adaptive normalization (Peebles and Xie, 2212.09748), without gates."""

    def forward(self, rate):
        """Scale and shift of both norms of a layer, for the output of RateEmbedding."""
        return super().forward(rate).chunk(4, -1)


def told_rate(Model):
    """The class of networks conditioned on the rate, derived from Model."""

    class ConditionedLayer(Model.Layer):
        def __init__(self, config, attends=True):
            super().__init__(config, attends)
            self.adaln = AdaLN(config.n_embd, 4 * config.n_embd, bias=False)
            nn.init.zeros_(self.adaln.weight)  # at first it changes nothing

        def before_mlp(self, x, cos, sin, view, ops):
            view = view._replace(rate=self.adaln(view.rate))
            return super().before_mlp(x, cos, sin, view, ops)

        def norm_attention(self, x, view, ops):
            scale, shift, _, _ = view.rate
            return ops.norm_conv(x, self.conv_attention, view.causal, view.sees, scale, shift)

        def norm_mlp(self, x, view, ops):
            _, _, scale, shift = view.rate
            return ops.norm_conv(x, self.conv_mlp, view.causal, view.sees, scale, shift)

    class Conditioned(Model):
        Layer = ConditionedLayer

        def initialize(self):
            C = self.config.n_embd
            self.rate = RateEmbedding(C, C, bias=False)
            super().initialize()

        def features(self, view):
            return super().features(view._replace(rate=self.rate(view.rate)))

    return Conditioned


model_class = told_rate
