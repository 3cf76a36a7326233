"""View and Batch: what objectives make. A network reads a View; a Batch adds what it must predict.

A network takes a View and returns logits, or a loss, at the rows that the View names. It does not
know the objective: documents, blocks, prompts and autoregressive models differ only in their Views.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """The tokens that a network sees, and the positions at which it predicts."""

    ids: Tensor  # (B, N) tokens, [MASK] where they are hidden
    at: Tensor  # (N,) or (B, N) positions of the tokens in their text
    # Spans, from document_spans or block_spans in kernels/reference.py: which positions each one
    # attends to; None: all.
    sees: Tensor | None = None
    rows: Tensor | None = None  # indices of predicted positions in the flat batch; None: all
    causal: bool = False  # each position attends only to itself and earlier positions
    rate: Tensor | None = None  # (B, 1, 1) or (B, N, 1) mask rate, with --time_conditioning
    # (N,) the place of the position before each in the row, at which networks with --shift predict;
    # None: its left neighbor.
    before: Tensor | None = None
    cache: Any = None  # KV cache: replaces the network's operations, stores keys and values


class Batch(NamedTuple):
    """A View, and the tokens to predict: a loss is the sum of weight * cross-entropy."""

    view: View
    targets: Tensor  # (n,) tokens
    weights: Tensor  # (n,) of their cross-entropy in the loss; 0: padding
    at: Tensor  # (n,) where they are in the flat texts x0

    def without_padding(self):
        """Only the tokens that count. (On a GPU, Python waits for their number.)"""
        counts = self.weights > 0
        rows = self.at if self.view.rows is None else self.view.rows
        view = self.view._replace(rows=rows.flatten()[counts])
        return Batch(view, self.targets[counts], self.weights[counts], self.at[counts])

    def split(self, n):
        """n Batches of the same texts, each with a part of the rows; not with padding."""
        parts = zip(*(x.tensor_split(n) for x in (self.view.rows, *self[1:])))
        return [Batch(self.view._replace(rows=rows), *rest) for rows, *rest in parts]


def masked_rows(rows, n_rows, weights, T, waits=None):
    """Return the rows (n,) of masked positions and the loss weight (n,) of each.

    rows, n_rows: as returned by mask_tokens: indices padded with -1, and how many are valid
    weights: (B,) weight of a masked token in each text of T tokens
    waits: whether to read n_rows and remove the padding. By default only on a CPU: on a GPU, Python
        would have to wait for the number. The padding then gets valid indices and weight 0
    """
    if waits is None:
        waits = rows.device.type == "cpu"
    if waits:
        rows = rows[: int(n_rows)]
    weights = torch.where(rows < 0, 0, weights[rows // T])
    # Padding may point anywhere, as its weight is 0.
    return torch.where(rows < 0, torch.arange(len(rows), device=rows.device), rows), weights
