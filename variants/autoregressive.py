"""--objective=ar: the autoregressive twin, to compare with: same network, data and tokens scored.

Its input is [MASK] as the beginning of a text, then the text without its last token; each position
sees itself and earlier ones, and predicts the token that stands there.
"""

import torch
import torch.nn.functional as F

from support import numerics

from .variant import Variant


class Autoregressive(Variant):
    """Every token is predicted from those before it, and counts alike."""

    metric = "nll"
    predicted_fraction = 1.0
    fills_gaps = False
    one_by_one = True

    def __init__(self, inner, end_id, mean_length):
        super().__init__(inner)
        self.end_id = -1 if end_id is None else end_id
        self.mean_length = mean_length or self.T

    def view(self, xt, x0=None, rows=None):
        begin = torch.full_like(xt[:, :1], self.mask_id)
        ids = torch.cat((begin, xt[:, :-1]), 1)
        return self.inner.view(ids, rows=rows)._replace(causal=True)

    def scored_mask(self, x0):
        """Text and the [END] after it, which it learns too; not what fills up a window."""
        is_text = x0 != self.end_id
        return is_text | F.pad(is_text[:, :-1], (1, 0), value=True)

    def rate_margin(self, margin_scale):
        return 0.0  # there are no mask rates

    def mask_counts(self, step, margin_scale, samples, lengths):
        return lengths  # all are predicted

    def batch(self, ops, x0, counts, step, samples):
        weights = (counts / self.mean_length).float() / (counts * len(x0))  # (B,)
        weights = self.scored_mask(x0) * weights[:, None]
        return self.view(x0), x0.flatten(), weights.flatten()

    # ---- What `evaluate` and `generate` ask
    def eval_counts(self, lengths, passes, seed):
        return lengths[None, :, None]  # one pass is exact

    def hide(self, ops, x0, counts, seed, step, samples, never_mask):
        rows = (~never_mask).flatten().nonzero()[:, 0]
        return x0, rows, len(rows)

    def tally(self, ce, right, rows, counts, T):
        """Beside the means the cross-entropy of each text's first token, if it is scored."""
        begins = rows % T == 0
        first = torch.zeros(len(counts), dtype=torch.float64)
        first[(rows[begins] // T).cpu()] = ce[begins].cpu().double()
        both = self.inner.tally(ce, right, rows, counts, T)
        return torch.cat((both, first[None]))

    def summary(self, sums, counts, scored):
        """`nll` over all tokens, its `se`, and `ar_shifted`, without the first one of a window."""
        (ce, hit, first), seen = numerics.seen_windows(sums)
        T = scored.sum(1)[seen]
        first_tokens = scored[seen, 0].long()
        weight = T / T.double().mean()  # a window counts by its length
        mean = (ce * weight).mean().item()
        r = dict(windows=len(T), passes=len(ce), by_window=(ce * weight).mean(0).tolist())
        r |= dict(tokens_by_window=T.tolist())
        shifted = (ce * T - first).sum().item() / max((T - first_tokens).sum().item(), 1)
        r |= dict(nll=mean, se=numerics.standard_error(((ce - mean) * weight)[0]))
        return r | dict(ar_shifted=shifted, ce=[mean], accuracy=[hit.mean().item()])

    @property
    def n_pieces(self):
        return self.T

    def pieces(self, T, steps):
        return [(range(i, i + 1), 1) for i in range(T)]
