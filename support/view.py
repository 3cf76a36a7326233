"""What a network is shown: the seam between objectives, which make Views, and networks.

A network takes a View and gives logits, or a loss, at its rows. It knows no objective: documents,
blocks, prompts and text from left to right differ in the View alone.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """What a network is shown, and where it predicts."""

    ids: Tensor  # (B, N) tokens, [MASK] where they are hidden
    at: Tensor  # (N,) or (B, N) their positions
    sees: Tensor | None = None  # spans (kernels/reference.py): who sees whom; None: all see all
    rows: Tensor | None = None  # the predicted positions of the flat batch, any shape; None: all
    causal: bool = False  # each position sees itself and the earlier ones
    rate: Tensor | None = None  # (B, 1, 1) or (B, N, 1) share of masked text, if a network asks
    cache: Any = None  # what computes in place of the network's operations and keeps keys, values


def masked_rows(rows, n_rows, weights, T, waits=None):
    """The rows (n,) of masked positions and their weights (n,), where n is not known before.

    rows, n_rows: of mask_tokens. weights (B,): of a masked token of each text of T tokens. Python
    does not wait for a GPU to know n_rows (waits=False): the padding of rows, -1, stays, and weighs
    nothing.
    """
    if waits is None:
        waits = rows.device.type == "cpu"
    if waits:
        rows = rows[: int(n_rows)]
    weights = torch.where(rows < 0, 0, weights[rows // T])
    # Padding may point anywhere, as its weight is 0.
    return torch.where(rows < 0, torch.arange(len(rows), device=rows.device), rows), weights
