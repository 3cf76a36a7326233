"""Bidirectional attention on packed projections, with rotary positions and QK-norm.

    S = scale * Q K^T,   P = softmax(S),   O = P V,     scale = 1 / sqrt(D)
    rotary (Su et al., 2104.09864): (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), the halves of a head
    QK-norm (Henry et al., 2010.04245): q and k are divided by their root mean square, before the rotation
"""

import torch
import torch.nn.functional as F


def rotate(x, cos, sin):
    """Rotary positions: x (B, T, H, D); cos, sin (T, D/2)."""
    x1, x2 = x.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def attention_ref(qkv, cos=None, sin=None, qk_norm=False, causal=False):
    """Attention over all positions (or, if causal, over earlier ones and itself).

    qkv       (B, T, 3, H, D), the packed projections, any strides
    cos, sin  (T, D/2) rotary tables, or None
    qk_norm   RMS-normalise q and k over D

    Returns (B, T, H, D) in the dtype of qkv.
    """
    q, k, v = qkv.unbind(2)  # each (B, T, H, D)
    T, D = q.shape[1], q.shape[3]
    if qk_norm:
        q, k = F.rms_norm(q, (D,)), F.rms_norm(k, (D,))
    if cos is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    q, k, v = (z.transpose(1, 2).to(qkv.dtype) for z in (q, k, v))  # (B, H, T, D)
    if q.device.type == "cpu" and T <= 512 and not causal:
        # On a CPU with bf16 units the backward of SDPA is 3 to 10 times slower than two plain products
        # (results/cpu.md).
        return (torch.softmax((q @ k.transpose(-1, -2)) * D**-0.5, -1) @ v).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


attention = attention_ref
