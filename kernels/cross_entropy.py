"""Cross-entropy where it counts: at the masked positions.

    loss = sum_i weight_i * (logsumexp(z_i) - z_i[target_i]),     z_i = W h_i
    dz_i = weight_i * (softmax(z_i) - onehot(target_i)),          dh_i = W^T dz_i,   dW = sum_i dz_i h_i^T

An unmasked position has weight 0: neither its row of logits nor its product with the head is needed.
"""

import torch
import torch.nn.functional as F


def masked_cross_entropy_ref(logits, targets, weight):
    """sum_i weight_i * CE(logits_i, targets_i), a float32 scalar; rows of weight 0 are not read.

    logits (N, V) floating; targets (N,) integer, in [0, V) where weight != 0; weight (N,) float32.
    """
    rows = weight.nonzero().squeeze(1)
    ce = F.cross_entropy(logits[rows].float(), targets[rows].long(), reduction="none")
    return (ce * weight[rows]).sum()


def linear_cross_entropy_ref(h, W, targets, rows, weight):
    """LM head and cross-entropy on chosen rows only: sum over r in rows of weight_r * CE(W h_r, targets_r).

    h        (N, C) features           W       (V, C) head
    targets  (N,) integer              weight  (N,) float32
    rows     (M,) integer, indices into N, padded with -1 (padding costs time but adds nothing)

    Returns a float32 scalar; gradients flow to h and W.
    """
    safe = rows.clamp(min=0)
    ce = F.cross_entropy(F.linear(h[safe], W).float(), targets[safe].long(), reduction="none")
    return (ce * torch.where(rows >= 0, weight[safe], 0)).sum()


masked_cross_entropy = masked_cross_entropy_ref
linear_cross_entropy = linear_cross_entropy_ref
