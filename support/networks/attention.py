"""Our attention in networks of transformers, by the library's AttentionInterface.

The library hands a 4-D attention_mask to its layers as it is. A network that `adopt` has changed is
given none that is dense, but the spans of kernels/reference.py, int32 (B or 1, 1, lines, T): which
range each token sees. So kernels/grouped_attention.py visits no tile outside of the documents,
blocks and windows, and nothing of T x T elements is stored.

Masks that are no spans (bool: causal, or with a cache) and dropout go to the library's SDPA.
"""

import functools

import torch

from nanomdlm.kernels.grouped_attention import HEAD_DIMS
from nanomdlm.kernels.operations import grouped_attention
from nanomdlm.kernels.reference import is_visible
from nanomdlm.support.networks import library

NAME = "mdlm"  # in the library's list of implementations
# Whether whole texts, which need no mask, use our kernels too. False: they use cuDNN or
# FlashAttention through SDPA, beside which ours have not been timed (results/hopper.md).
WHOLE_TEXTS = False


def adopt(body):
    """Make a module of the library use `attend`; masks that are spans are for such modules only."""
    implementations = library().AttentionInterface()
    if NAME not in implementations:
        implementations.register(NAME, functools.partial(attend, implementations["sdpa"]))
    body.set_attn_implementation(NAME)


def is_for(config):
    """Whether our kernels support the heads of the library's configuration."""
    heads = config.num_attention_heads
    return (getattr(config, "head_dim", None) or config.hidden_size // heads) in HEAD_DIMS


def attend(sdpa, module, query, key, value, attention_mask, dropout=0.0, scaling=None, **more):
    """Attention as the library's layers call it, but for the first argument: the library's SDPA.

    query (B, H, T, D), key and value (B, G, T, D); attention_mask: spans (B or 1, 1, lines, T), a
    dense mask, or None: all is seen

    Returns (B, T, H, D), and None in place of the probabilities.
    """
    has_spans = attention_mask is not None and attention_mask.dtype == torch.int32
    is_ours = has_spans or (attention_mask is None and WHOLE_TEXTS)
    if dropout or not is_ours:
        if has_spans:
            at = torch.arange(key.shape[2], device=key.device)
            attention_mask = is_visible(attention_mask[:, 0], at)[:, None]
        given = (query, key, value, attention_mask, dropout, scaling)
        return sdpa(module, *given, **more | dict(is_causal=False))
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as SDPA: rotated queries and keys are float32
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    spans = attention_mask[:, 0] if has_spans else None
    return grouped_attention(q, k, v, scaling, spans), None
