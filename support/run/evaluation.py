"""Statistics of an evaluation: which counts of masks it takes, and the results with their errors.

A window of T tokens has n texts, each masked separately: itself, or its blocks. Arrays are (W, n)
for texts, and (passes, W, n) for the results of passes. A text is weighted by its scored tokens,
`lengths`.
"""

import contextlib
import math

import torch
import torch.nn.functional as F

from nanomdlm.support import numerics
from nanomdlm.support.infill.recorded import predict
from nanomdlm.support.run import graphs


@contextlib.contextmanager
def eval_mode(model):
    """Context manager: a model without dropout; its previous mode is restored at the end."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def stratified_counts(lengths, passes, seed):
    """Draw how many tokens of each text are masked, spread evenly: (passes, W, n) int64.

    lengths: (W, n). A count is from 1 to the length, or 0 if that is 0. Pass k draws it from the
    k-th of `passes` equal intervals.
    """
    flat = lengths.flatten()
    counts = []
    for k in range(passes):
        # In random order: an ordered grid over ordered windows would be biased.
        u = (k + numerics.stratified(len(flat), "evaluate", seed, k)) / passes
        counts.append((1 + (u * flat).long()).minimum(flat))
    return torch.stack(counts).view(passes, *lengths.shape)


def losses(logits, targets):
    """Return the cross-entropy (m,) of logits (m, V), and whether the likeliest token is right."""
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


def judged(model, batch, n, observe=None):
    """Yield a Batch in n parts: (part, and what `losses` returns for its rows). observe: see
    mdlm.evaluate.

    They are without padding, but where calls are replayed as CUDA graphs: there all have the same
    shape, and Python does not wait for the number of masks.
    """
    view = batch.view
    if n == 1 and observe is None and graphs.can_replay(model, view.ids.device):
        rows = batch.at if view.rows is None else view.rows.flatten()
        yield batch, *predict(model, view._replace(rows=rows), losses, batch.targets)
        return
    for part in batch.without_padding().split(n):
        logits = predict(model, part.view)  # (m, V)
        if observe:
            observe(part.at, part.targets, logits)
        yield part, *losses(logits, part.targets)


def add_up(sums, batch, ce, right, T):
    """Add a Batch's tokens (m,) to those of its texts, in sums (4, B, n) float64.

    The rows: weight, weight * CE, weight * (the likeliest token is right), and weight * CE of the
    first tokens of windows. ce (m,), right (m,) bool; a window of T tokens has n texts.
    """
    rows = torch.stack((torch.ones_like(ce), ce, right, ce * (batch.at % T == 0)))
    rows = rows.cpu().double() * batch.weights.cpu().double()
    sums.flatten(1).index_add_(1, batch.at.cpu() // (T // sums.shape[2]), rows)


def mean_by_bin(values, bin, bins):
    """Return the mean of values in each bin, (bins,); bin, of the same shape, numbers them."""
    bin = bin.flatten()
    total = values.new_zeros(bins).index_add(0, bin, values.flatten())
    return total / bin.bincount(minlength=bins)


def by_tenths(values, counts, lengths):
    """Return the mean of values for each tenth of the mask rate counts / lengths.

    counts, of the same shape, are from 1 to lengths. Returns 10 numbers, None for an empty tenth.
    """
    # -1: a tenth includes its upper end, so that a rate of 100 % falls into the last one.
    means = mean_by_bin(values, (10 * counts - 1) // lengths, 10).tolist()
    return [None if math.isnan(mean) else mean for mean in means]


def stratified_error(values, counts, lengths):
    """Return the standard error over windows of the mean of values (passes, W, n).

    Counts are stratified, so the variance that they explain does not contribute to the error: the
    mean over similar counts is subtracted first. counts (passes, W, n): masked tokens of the
    lengths (W, n). Texts of length 0 are left out.
    """
    lengths = lengths.expand(counts.shape)
    some = lengths > 0
    m = int(some.sum())
    bins = max(1, min(32, m // 8))  # with few values per bin, their mean would explain too much
    bin = (counts[some] - 1) * bins // lengths[some]
    residual = torch.zeros_like(values)
    residual[some] = values[some] - mean_by_bin(values[some], bin, bins)[bin]
    return numerics.standard_error(residual.mean((0, 2)) * (m / max(m - bins, 1)) ** 0.5)


def summary(sums, counts, scored, is_exact):
    """Return the dict that mdlm.evaluate returns.

    sums: (4, passes, W, n) of weight, and of weight * CE, hits, and CE of a window's first token.
        Two ranks may have scored the same window; none may have, if time ran out before
    counts: (passes, W, n) masked tokens of each text
    scored: (W, T) bool, the tokens that are scored
    is_exact: all tokens are predicted in one pass, each given those before it
    """
    passes, _, n = counts.shape
    seen = sums[0].sum((0, 2)) > 0  # (W,) windows
    sums, counts, scored = sums[:, :, seen], counts[:, seen], scored[seen]
    lengths = scored.unflatten(1, (n, -1)).sum(2)  # (W, n)
    some = (lengths > 0).expand(counts.shape)
    ce, hit, first = torch.where(some, sums[1:] / sums[0], 0)  # means of each text
    tokens = lengths.sum(1)  # (W,)
    scale = tokens.double().mean()
    by_window = (ce * lengths).sum(2).mean(0) / scale  # in proportion to the tokens of a window
    mean = by_window.mean().item()
    r = dict(windows=len(tokens), passes=passes, by_window=by_window.tolist())
    r["tokens_by_window"] = tokens.tolist()
    if n == 1 and not is_exact:  # with blocks these would be many
        r["by_mask"] = dict(masked=counts[..., 0].tolist(), ce=ce[..., 0].tolist())
    residual = (ce - mean) * lengths * n / scale
    if is_exact:
        r |= dict(nll=mean, se=numerics.standard_error(residual[0, :, 0]))
        # nanoGPT does not score the first token of a window.
        others = (tokens - scored[:, 0].long()).sum().item()
        shifted = ((ce - first) * lengths).sum().item() / max(others, 1)
        return r | dict(ar_shifted=shifted, ce=[mean], accuracy=[hit.mean().item()])
    r |= dict(nelbo=mean, se=stratified_error(residual, counts, lengths))
    facts = counts[some], lengths.expand(counts.shape)[some]
    return r | dict(ce=by_tenths(ce[some], *facts), accuracy=by_tenths(hit[some], *facts))
