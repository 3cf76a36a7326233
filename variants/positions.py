"""--pos=learned, --pos=sinusoidal: position vectors, added to the token embeddings.

The default, RoPE, rotates queries and keys in every layer.
"""

import torch
import torch.nn as nn

from nanomdlm.kernels.reference import rotary_tables

FLAG = "pos"


def with_positions(Model):
    """The class of networks with such positions, derived from that of networks with RoPE."""

    class Positioned(Model):
        def initialize(self):
            T, C = self.config.block_size, self.config.n_embd
            if self.config.pos == "learned":
                self.positions = nn.Parameter(torch.randn(T, C) / 10)
            for name, table in zip(("cos", "sin"), rotary_tables(T, C)):
                self.register_buffer(name, table, persistent=False)
            super().initialize()

        def inputs(self, view):
            x, cos, sin = super().inputs(view)
            if self.config.pos == "learned":
                vectors = self.positions[view.at]
            else:
                vectors = torch.cat((sin, cos), -1)
            return x + vectors.to(x.dtype), None, None

    return Positioned


model_class = with_positions
