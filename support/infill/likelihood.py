"""Exact likelihoods by the chain rule.

log p(x) = sum_i log p(x_i | x_1 .. x_{i-1}), the others masked: the exact log-likelihood of the
sampler that goes from left to right. It costs one sequence in a network call for each token.
"""

import torch

from support.arguments import check_ids, check_length, whole_number
from support.infill.calls import groups, next_logp, to_context


@torch.no_grad()
def chain_rule(model, x, batch_size=None, update=lambda n: None):
    """(B, L) float64: log p(x_i | x_j, j < i) in nats, 0 after T and where no token is learned.

    x (B, T) ids, T at most the context L.
    batch_size: positions per network call; update(n) is called after n more of them.
    """
    check_ids(model, x, masks=False)
    check_length(model, x)
    if batch_size is not None:
        batch_size = whole_number("batch_size", batch_size, 1)
    T = x.shape[1]
    x = to_context(model, x)
    out = torch.zeros(x.shape, dtype=torch.float64)
    row, at = model.objective.scored_mask(x)[:, :T].nonzero().T
    for part in groups(model, len(row), x.device, batch_size):
        out[row[part].cpu(), at[part].cpu()] = next_logp(model, x, row[part], at[part])
        update(len(row[part]))
    return out
