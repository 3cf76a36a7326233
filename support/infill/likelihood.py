"""Exact log-likelihoods by the chain rule.

log p(x) = sum_i log p(x_i | x_1 .. x_{i-1}), where the model sees x_1 .. x_{i-1} and masks for the
rest. This is the exact log-likelihood of sampling from left to right. Each token costs one
sequence in a network call.
"""

from collections.abc import Callable

import torch

from nanomdlm.support.cli.python_arguments import check_ids, check_length, whole_number
from nanomdlm.support.infill.model_calls import groups, next_logp, to_context


@torch.no_grad()
def chain_rule(
    model: torch.nn.Module,
    x: torch.Tensor,
    batch_size: int | None = None,
    update: Callable[[int], object] = lambda n: None,
) -> torch.Tensor:
    """Return log p(x_i | x_j, j < i) in nats for each token, (B, L) float64.

    x: (B, T) ids; T must not exceed the context L
    batch_size: positions per network call (default: as memory allows)
    update: called with n whenever n more positions are done

    The result is 0 beyond T, and at tokens on which the model was not trained. Raises UserError for
    ids outside the vocabulary and for texts that are too long.
    """
    check_ids(model, x, masks=False)
    check_length(model, x)
    if batch_size is not None:
        batch_size = whole_number("batch_size", batch_size, 1)
    T = x.shape[1]
    x = to_context(model, x)
    out = torch.zeros(x.shape, dtype=torch.float64)
    row, at = model.objective.scored_mask(x)[:, :T].nonzero().T
    for batch in groups(model, len(row), x.device, batch_size):
        out[row[batch].cpu(), at[batch].cpu()] = next_logp(model, x, row[batch], at[batch])
        update(len(row[batch]))
    return out
