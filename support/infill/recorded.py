"""A network's predictions, which on a GPU are replayed as CUDA graphs: one for each size of call.

A GPU computes a short text faster than Python launches the kernels of a network (results/hopper.md:
0.4 ms, and 8 ms a call). A graph has fixed shapes, so the sequences of a call and the positions at
which it predicts are padded to one of few sizes (run/graphs.py records and replays).
"""

import torch

from nanomdlm.support.run import graphs
from nanomdlm.support.view import View


def sequences(n):
    """The least number of sequences of a recorded call that holds n: 1 to 8, 10, 12, 14, 16, 20 ...

    Those that are added cost as much as others: at most a quarter more.
    """
    step = max(1, (1 << n.bit_length()) >> 3)
    return -(-n // step) * step


def positions(n):
    """The same for n positions at which it predicts, powers of two from 4 on: they cost little."""
    return max(4, 1 << (n - 1).bit_length())


def pad(x, n):
    """x (m, ...) -> (n, ...): its last row is repeated."""
    return torch.cat((x, x[-1:].expand(n - len(x), *x.shape[1:]))) if len(x) < n else x


def predict(model, view, function=None, *more):
    """function(logits, *more), a tuple of tensors; logits (n, V) are model(view), at view.rows.
    Without a function, the logits; then a View may have no rows.

    more: tensors (n, ...). Row i of what the function returns depends only on row i of each.
    """
    is_empty = not len(view.ids) or (view.rows is not None and not len(view.rows))
    if view.cache is not None or is_empty or not graphs.can_replay(model, view.ids.device):
        logits = model(view)
        return function(logits, *more) if function else logits
    B = len(view.ids)
    n = B if view.rows is None else len(view.rows)
    padded = sequences(B)
    fields = view._asdict()
    tensors = {name: x for name, x in fields.items() if isinstance(x, torch.Tensor)}
    for name, x in tensors.items():
        if name == "rows":
            tensors[name] = pad(x, positions(n))
        elif x.dim() > 1 and len(x) == B:  # of each sequence, not of all
            tensors[name] = pad(x, padded)
    rest = {name: x for name, x in fields.items() if name not in tensors}
    names = (*tensors,)
    more = [pad(x, positions(n)) for x in more]

    def call(*inputs):
        logits = model(View(**dict(zip(names, inputs)), **rest))
        return function(logits, *inputs[len(names) :]) if function else (logits,)

    inputs = (*tensors.values(), *more)
    found = graphs.replay(model, call, inputs, "predict", names, view.causal, function)
    found = tuple(x[:n] for x in found)
    return found if function else found[0]


class Recorded:
    """Stands in for a model: its calls are those of `predict`."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, view):
        return predict(self.model, view)
