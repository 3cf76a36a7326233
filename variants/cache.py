"""A KV cache: what a model of blocks has computed for the text before a block."""

import torch
import torch.nn.functional as F

from support.kernels.reference import neighbours, norm_conv_ref, prepare
from support.view import View


class Cache:
    """Takes the place of a network's operations: network(cache.view(text)), text in whole blocks.

    Attention keeps its keys and values, and the convolution its inputs. A block sees what is kept,
    and the call's text up to its own end (Arriola et al., 2503.09573). When a text outgrows the
    context, about half is dropped and the rest seen anew: as in training, in constant memory.
    """

    def __init__(self, config):
        self.S = config.block_length
        self.context = config.block_size
        self.first = 0  # position in the text of the first token that is kept
        self.length = 0  # of what is kept
        self.final = 0  # tokens before the last block of the last call: they will not change
        self.buffers = {}  # of the i-th operation of a forward: (B, context, ...)
        self.turn = 0  # i

    def follow(self, begin):
        """Before each call: where in the text it starts; its last block starts at `begin`."""
        half = max(self.S, self.context // 2 // self.S * self.S)
        excess = max(0, begin + self.S - self.context)
        first = -(-excess // half) * half
        self.length = self.final if first == self.first else 0
        self.first = first
        self.final = begin - first
        return first + self.length

    def view(self, text, rows=None):
        """What a network is shown of text (B, n), which begins after what is kept."""
        self.turn = 0
        at = torch.arange(text.shape[1], device=text.device) + self.length
        return View(text, at, rows=rows, cache=self)

    def extend(self, x):
        """x (B, n, ...) -> (B, length + n, ...) with what is kept."""
        if self.turn not in self.buffers:
            self.buffers[self.turn] = x.new_empty(len(x), self.context, *x.shape[2:])
        buffer = self.buffers[self.turn]
        self.turn += 1
        end = self.length + x.shape[1]
        buffer[:, self.length : end] = x
        return buffer[:, :end]

    def attention(self, qkv, cos, sin, qk_norm, causal, spans):
        q, k, v = prepare(qkv, cos, sin, qk_norm)
        kv = self.extend(torch.stack((k, v), 2))  # (B, length + n, 2, H, D)
        q, k, v = (z.transpose(1, 2) for z in (q, *kv.unbind(2)))
        visible = None
        if q.shape[2] > self.S:
            at = torch.arange(k.shape[2], device=q.device)
            visible = at // self.S <= at[self.length :, None] // self.S
        return F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2)

    def norm_conv(self, *args):
        return norm_conv_ref(*args, neighbours=self.neighbours)

    def neighbours(self, x, left, k, spans):
        need = x.shape[1] + left
        near = self.extend(x)[:, -need:]
        near = F.pad(near, (0, 0, need - near.shape[1], 0))
        blocks = near.unfold(1, left + self.S, self.S).flatten(0, 1).mT  # (B n/S, left + S, C)
        return [z[:, left:].reshape(x.shape) for z in neighbours(blocks, left, k, None)]
