"""Several Views in one network call, with results that do not depend on the others.

The last bits of a product over M rows depend on M: on CPUs MKL computes fewer than four rows, and
the last M % 4 of a thread's share, by other instructions. So the rows of every product are padded
to a multiple of MULTIPLE, here and in shared_padding.py. A text then gets the same logits alone and
together with others, to the bit in float32 on a CPU: sample.py and a server that merges the calls
of many clients draw the same text for the same seed.

On Intel's processors that takes MKL_CBWR=AUTO,STRICT in the environment (MKL's mode of reproducible
results), by which products of up to eight rows take up to twice as long. Without it, logits there
differ by rounding (1e-6 to 2e-5), as on GPUs, whose products choose their tiles by M.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from nanomdlm.support.infill import prefixes
from nanomdlm.support.view import View

MULTIPLE = 4  # with MKL on Zen 5, by its instructions of AVX-512 and of AVX2, on 1 to 16 threads


def padded(n):
    """The least multiple of MULTIPLE from n on."""
    return -(-n // MULTIPLE) * MULTIPLE


def are_alike(one, other):
    """Whether two Views can be computed in one call."""
    if one.cache is not None or other.cache is not None:
        caches = (one.cache, other.cache)
        return all(cache is not None and cache.merges for cache in caches)
    N = one.ids.shape[1]
    if N % MULTIPLE or other.ids.shape[1] != N or one.causal != other.causal:
        return False
    for name in ("at", "sees", "rows", "rate"):
        a = getattr(one, name)
        b = getattr(other, name)
        if (a is None) != (b is None) or (a is not None and a.shape[1:] != b.shape[1:]):
            return False
    # (N,) positions are those of all rows.
    return one.at.dim() == 2 or one.at.data_ptr() == other.at.data_ptr() or one.at.equal(other.at)


@torch.no_grad()
def compute(model, views):
    """Return the logits of each View, in one call of the network; they must be alike.

    model: a network, or a stand-in that merges calls itself, like that of a server
    views: Views, as made by objectives and caches

    A View with rows gets (n, V), one without (B, N, V).
    """
    if not isinstance(model, nn.Module):
        return [model(view) for view in views]
    if views[0].cache is not None:
        return compute_cached(model, views)
    sizes = [view.ids.numel() if view.rows is None else len(view.rows) for view in views]
    logits = prefixes.call(model, merge(views))
    if views[0].rows is None:
        return logits.split([len(view.ids) for view in views])
    return logits[: sum(sizes)].split(sizes)


def merge(views):
    """One View of the rows of all. Its predicted rows are padded; their last one is repeated."""
    first = views[0]
    starts = [0, *itertools.accumulate(view.ids.numel() for view in views)]
    rows = first.rows
    if rows is not None:
        rows = torch.cat([view.rows + start for view, start in zip(views, starts)])
        rows = pad_rows(rows)
    if len(views) == 1:
        return first._replace(rows=rows)
    at = first.at
    if at.dim() == 2:
        at = torch.cat([view.at.expand(view.ids.shape) for view in views])
    joint = first._replace(ids=torch.cat([view.ids for view in views]), at=at, rows=rows)
    return joint._replace(**{name: field_of(views, name) for name in ("sees", "rate")})


def field_of(views, name):
    """The values of all rows of a field that may be None, or one value that holds for all rows."""
    values = [getattr(view, name) for view in views]
    if values[0] is None or all(len(value) == 1 and value.equal(values[0]) for value in values):
        return values[0]
    sizes = [len(view.ids) for view in views]
    return torch.cat([value.expand(n, *value.shape[1:]) for value, n in zip(values, sizes)])


def pad_rows(rows):
    """Pad rows (n,) to a multiple of MULTIPLE by repeating the last."""
    more = padded(len(rows)) - len(rows)
    return torch.cat((rows, rows[-1:].expand(more))) if more and len(rows) else rows


# ---- Views with caches, of models of blocks
def compute_cached(model, views):
    """`compute` for Views with caches: the network sees one row of all their tokens."""
    # Views of equal lengths side by side, as their convolutions are computed together.
    order = sorted(range(len(views)), key=lambda i: views[i].ids.shape[1])
    views = [views[i] for i in order]
    n = sum(view.ids.numel() for view in views)
    padding = padded(n) - n
    is_simple = not padding and views[0].rows is not None  # then padding would change nothing
    if len(views) == 1 and (is_simple or not views[0].cache.merges):
        rows = views[0].rows
        if rows is None:
            return [model(views[0])]
        return [model(views[0]._replace(rows=pad_rows(rows)))[: len(rows)]]
    at = torch.cat([view.at.repeat(len(view.ids)) for view in views])
    ids = torch.cat([view.ids.flatten() for view in views])
    starts = [0, *itertools.accumulate(view.ids.numel() for view in views)]
    rows = [
        torch.arange(view.ids.numel(), device=ids.device) if view.rows is None else view.rows
        for view in views
    ]
    sizes = [len(each) for each in rows]
    rows = pad_rows(torch.cat([each + start for each, start in zip(rows, starts)]))
    ids, at = (F.pad(x, (0, padding)) for x in (ids, at))
    cache = views[0].cache.joint(views, padding)
    logits = model(View(ids[None], at, rows=rows, cache=cache))[: sum(sizes)].split(sizes)
    results = [
        part if view.rows is not None else part.unflatten(0, view.ids.shape)
        for view, part in zip(views, logits)
    ]
    return [results[order.index(i)] for i in range(len(order))]
