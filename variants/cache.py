"""A KV cache: stores what a model of blocks has computed for the text before a block."""

import itertools
import weakref

import torch
import torch.nn.functional as F

from nanomdlm.kernels.reference import neighbors, norm_conv_ref, prepare
from nanomdlm.support.view import View

UNUSED = weakref.WeakKeyDictionary()  # model -> its last FixedCache, whose graphs can be used again
NUMBERS = itertools.count()  # of FixedCaches


class Cache:
    """Replaces a network's operations: network(cache.view(text)), text in whole blocks.

    Attention keeps its keys and values, and the convolution its inputs. A block sees the cached
    text, and the call's text up to its own end (Arriola et al., 2503.09573). When a text outgrows
    the context, about half is dropped and the rest computed again: as in training, in constant
    memory.
    """

    merges = True  # whether several texts, each with its own cache, can share a network call
    can_be_fixed = True  # whether `fixed` works

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
        """The network's input for text (B, n), which begins after the cached text."""
        self.turn = 0
        at = torch.arange(text.shape[1], device=text.device) + self.length
        return View(text, at, rows=rows, cache=self)

    def extend(self, x):
        """x (B, n, ...) -> (B, length + n, ...) with the cached part before it."""
        if self.turn not in self.buffers:
            self.buffers[self.turn] = x.new_empty(len(x), self.context, *x.shape[2:])
        buffer = self.buffers[self.turn]
        self.turn += 1
        end = self.length + x.shape[1]
        buffer[:, self.length : end] = x
        return buffer[:, :end]

    def attention(self, qkv, cos, sin, qk_norm, causal, spans):
        q, k, v = prepare(qkv, cos, sin, qk_norm)
        return self.attend(q, torch.stack((k, v), 2))

    def norm_conv(self, *args):
        return norm_conv_ref(*args, neighbors=self.neighbors)

    def neighbors(self, x, left, k, spans):
        return [
            z.reshape(x.shape) for z in neighbors_in_blocks([self.reach(x, left)], left, k, self.S)
        ]

    def attend(self, q, kv):
        """Attention of q (B, n, H, D) to the cache and to keys and values kv (B, n, 2, H, D)."""
        k, v = (z.transpose(1, 2) for z in self.extend(kv).unbind(2))  # (B, H, length + n, D)
        visible = None
        if q.shape[1] > self.S:
            at = torch.arange(k.shape[2], device=q.device)
            visible = at // self.S <= at[self.length :, None] // self.S
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, visible).transpose(1, 2)

    def reach(self, x, left):
        """x (B, n, C) and the `left` positions before it, (B, left + n, C); 0 before a text."""
        need = left + x.shape[1]
        near = self.extend(x)[:, -need:]
        return F.pad(near, (0, 0, need - near.shape[1], 0))

    @staticmethod
    def joint(views, padding):
        return JointCache(views, padding)

    def fixed(self, model, B):
        """A FixedCache for B texts in place of this one, which is empty."""
        cache = UNUSED.pop(model, None)
        return cache.emptied() if cache and cache.B == B else FixedCache(self, B)

    def end(self, model):
        """The texts are written."""


class FixedCache(Cache):
    """The same in fixed shapes, for CUDA graphs: attention reads all of the context, and masks what
    is not there yet; the length of the kept text is a tensor.

    The numbers are the same up to rounding.
    """

    merges = False

    def __init__(self, cache, B):
        self.S = cache.S
        self.context = cache.context
        self.B = B
        self.number = next(NUMBERS)
        self.buffers = {}  # of the i-th operation of a forward, a dtype and a device
        self.start = 0  # `length`, in a CUDA graph as a tensor ()
        self.emptied()

    def emptied(self):
        self.first = self.length = self.final = 0
        return self

    def fixed(self, model, B):
        return self

    def follow(self, begin):
        first = super().follow(begin)
        self.start = self.length
        return first

    def end(self, model):
        UNUSED[model] = self

    def view(self, text, rows=None):
        """As Cache.view."""
        self.turn = 0
        n = text.shape[1]
        at = self.start + torch.arange(n, device=text.device)
        context = torch.arange(self.context, device=text.device)
        self.visible = context // self.S <= at[:, None] // self.S  # (n, context)
        return View(text, at, rows=rows, cache=self)

    def extend(self, x):
        """x (B, n, ...) -> (B, context, ...) with the cached part before it."""
        key = self.turn, x.dtype, x.device
        self.turn += 1
        if key not in self.buffers:  # zeros, as what is masked must be finite
            self.buffers[key] = x.new_zeros(len(x), self.context, *x.shape[2:])
        at = self.start + torch.arange(x.shape[1], device=x.device)
        return self.buffers[key].index_copy_(1, at, x)

    def attend(self, q, kv):
        k, v = (z.transpose(1, 2) for z in self.extend(kv).unbind(2))  # (B, H, context, D)
        seen = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, self.visible)
        return seen.transpose(1, 2)

    def reach(self, x, left):
        at = self.start + torch.arange(-left, x.shape[1], device=x.device)
        near = self.extend(x).index_select(1, at.clamp(min=0))
        return near.masked_fill((at < 0)[:, None], 0)


class LibraryCache(Cache):
    """The same for a Hugging Face network: the library's own cache keeps keys and values.

    With --shift, the first token of a block is predicted at the position before the block, so each
    call includes that position.
    """

    merges = False
    can_be_fixed = False

    def __init__(self, config):
        super().__init__(config)
        self.shift = config.shift
        self.past = None  # the library's cache

    def follow(self, begin):
        start = super().follow(begin)
        if self.shift and self.first < start == begin:
            self.length -= 1
            start -= 1
        return start

    def update(self):
        """The library's cache, cropped to the kept length; a call of the network extends it."""
        if self.length == 0:
            from transformers import DynamicCache  # optional, and there: it made the network

            self.past = DynamicCache()
        if excess := self.past.get_seq_length() - self.length:
            self.past.crop(-excess)
        return self.past


def neighbors_in_blocks(texts, left, k, S):
    """`neighbors` of blocks of S tokens: k tensors (tokens, C).

    texts: tensors (B, left + n, C), n tokens in whole blocks and the `left` positions before them
    """
    blocks = [near.unfold(1, left + S, S).flatten(0, 1).mT for near in texts]
    blocks = torch.cat(blocks) if len(blocks) > 1 else blocks[0]  # (all blocks, left + S, C)
    return [z[:, left:].flatten(0, 1) for z in neighbors(blocks, left, k, None)]


class JointCache:
    """The Caches of several Views, which a network sees as a single row (1, M, C): the tokens of
    all Views, one View after another, then `padding` tokens, which see nothing.

    Operations that do not mix tokens are one product for all; attention and convolution are done by
    each Cache. views: ordered by length
    """

    def __init__(self, views, padding):
        self.views = views
        self.padding = padding

    def parts(self, x):
        """x (1, M, ...) -> for each View its Cache and its (B, n, ...)."""
        sizes = [view.ids.numel() for view in self.views]
        for view, part in zip(self.views, x[0].split([*sizes, self.padding])):
            yield view.cache, part.unflatten(0, view.ids.shape)

    def attention(self, qkv, cos, sin, qk_norm, causal, spans):
        q, k, v = prepare(qkv, cos, sin, qk_norm)  # (1, M, H, D)
        kv = torch.stack((k, v), 2)
        seen = [
            cache.attend(queries, kept).flatten(0, 1)
            for (cache, queries), (_, kept) in zip(self.parts(q), self.parts(kv))
        ]
        return torch.cat((*seen, q.new_zeros(self.padding, *q.shape[2:])))[None]

    def norm_conv(self, *args):
        return norm_conv_ref(*args, neighbors=self.neighbors)

    def neighbors(self, x, left, k, spans):
        by_length = {}
        for cache, part in self.parts(x):
            by_length.setdefault(part.shape[1], []).append(cache.reach(part, left))
        texts = [torch.cat(near) if len(near) > 1 else near[0] for near in by_length.values()]
        shifted = neighbors_in_blocks(texts, left, k, self.views[0].cache.S)
        return [F.pad(z, (0, 0, 0, self.padding))[None] for z in shifted]
