"""A KV cache: what a model of blocks has computed for the text before a block."""

import torch
import torch.nn.functional as F

from kernels.reference import neighbours, prepare


class Cache:
    """Takes the place of a model's ops: model(block, cache=cache), block (B, S).

    Attention keeps its keys and values, and the convolution its inputs. A block sees all that is
    kept and itself, so no mask is needed (Arriola et al., 2503.09573). When a text outgrows the
    context, about half of it is dropped and the rest seen anew: as in training, in constant memory.
    """

    def __init__(self, config):
        self.S = config.block_length
        self.context = config.block_size
        self.first = 0  # position in the text of the first token that is kept
        self.length = 0
        self.buffers = {}  # of the i-th operation of a forward: (B, context, ...)
        self.turn = 0  # i

    def follow(self, model, x, begin):
        """See the text x (B, T) up to the block that begins at `begin`."""
        half = max(self.S, self.context // 2 // self.S * self.S)
        excess = max(0, begin + self.S - self.context)
        first = -(-excess // half) * half
        if first != self.first:
            self.first = first
            self.length = 0
        nowhere = torch.zeros(0, dtype=torch.int64, device=x.device)  # no logits are needed
        for at in range(first + self.length, begin, self.S):
            model(x[:, at : at + self.S], rows=nowhere, cache=self)
            self.length += self.S

    def extend(self, x):
        """x (B, S, ...) of a block -> (B, length + S, ...) with what is kept."""
        if self.turn not in self.buffers:
            self.buffers[self.turn] = x.new_empty(len(x), self.context, *x.shape[2:])
        buffer = self.buffers[self.turn]
        self.turn += 1
        end = self.length + x.shape[1]
        buffer[:, self.length : end] = x
        return buffer[:, :end]

    def attention(self, qkv, cos, sin, qk_norm, causal, spans):
        q, k, v = prepare(qkv, cos, sin, qk_norm)
        kv = self.extend(torch.stack((k, v), 2))  # (B, length + S, 2, H, D)
        q, k, v = (z.transpose(1, 2) for z in (q, *kv.unbind(2)))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def neighbours(self, x, left, k, spans):
        S = x.shape[1]
        near = self.extend(x)[:, -(S + left) :]
        return [z[:, -S:] for z in neighbours(near, left, k, None)]
