"""Which lengths of a gap are worth filling: one batched call over all of them says it.

The call shows each length side by side, as masks between the text before the gap and the text after
it. The first tokens after the gap are masked too. Two sums estimate from this call alone, in nats,

    log p(likeliest fill, first token after the gap | the rest of the text):

the largest log-probability at each position of the gap, and the log-probability of the first token
after it. That token would be no news beside its neighbours: after a word comes a space wherever the
next word begins. So three more tokens are masked.

The estimate needs no calibration by length, as the mean entropy in the gap does (CAL, 2602.00476):
like log p(gap, text after it | text before it), by which fills are ranked, it falls with every
token. So it serves every model. results/lengths.md compares it with other statistics.
"""

import torch

from support.infill.calls import call_size, groups, logits_at

N_AFTER = 4  # tokens after the gap that are masked as well


@torch.no_grad()
def length_scores(model, x, gap, after):
    """Score the lengths of gaps, in one batched call.

    x: (B, L) ids, of one length each
    gap, after: (B, L) bool, on the same device as x: the positions of the gap; those after it that
        are masked too. Of a text that ends with its gap there are none

    Returns two float64 tensors (B,) on the CPU, in nats: the sum of the largest log-probabilities
    in the gap, and the log-probability of the first token after it (0 without one).
    """
    xt = x.masked_fill(gap | after, model.mask_id)
    first = after & (after.cumsum(1) == 1)
    best = torch.zeros(len(x), dtype=torch.float64)
    known = torch.zeros(len(x), dtype=torch.float64)
    # In groups: the logits of all lengths together may need gigabytes.
    for rows in groups(model, len(x), x.device, call_size(model, x.device)):
        row, at = (gap | first)[rows].nonzero().T
        logp = logits_at(model, xt[rows], row, at, x.device).log_softmax(-1)
        is_gap = gap[rows][row, at]
        best[rows] = row_sums(len(xt[rows]), row[is_gap], logp[is_gap].amax(-1))
        token = x[rows][row, at][~is_gap]
        known[rows] = row_sums(
            len(xt[rows]), row[~is_gap], logp[~is_gap].gather(1, token[:, None])[:, 0]
        )
    return best, known


def row_sums(n, row, value):
    """Return the sums (n,) of value (m,) by row (m,), float64 on the CPU."""
    return torch.zeros(n, dtype=torch.float64).index_add(0, row.cpu(), value.cpu().double())
