"""The keys and values of the texts that a pretrained network computed last, if it is causal.

A call then computes only what none of these texts begins with: one token of each text while they
are written, and what follows the first difference while fills of a gap are compared. The numbers
are the same up to rounding.
"""

import weakref

MOST_BYTES = 1 << 28  # kept for a network
HELD = weakref.WeakKeyDictionary()  # module of the library -> Held


class Held:
    """What the network has computed of texts ids (R, n): `past`, a cache of the library.

    A View has it as its `cache`: each token sees itself and all before it, like blocks of one.
    """

    S = 1

    def __init__(self, ids, past, version):
        self.ids = ids
        self.past = past
        self.version = version
        self.length = 0  # tokens that a call reuses

    def update(self):
        return self.past

    def select(self, ids, most):
        """Keep the beginnings of ids (B, N) that all have in `past`: at most `most` tokens."""
        same = ids[:, None, : self.ids.shape[1]] == self.ids[None, :, : ids.shape[1]]  # (B, R, n)
        lengths, rows = same.cumprod(-1).sum(-1).max(1)  # (B,)
        self.length = min(int(lengths.min()), most)
        if self.length:
            self.past.crop(self.length - self.ids.shape[1])
            self.past.batch_select_indices(rows)


def version_of(body):
    """A number that grows when the weights change."""
    return sum(p._version for p in body.parameters())


def call(model, view):
    """Return model(view), the logits (n, V) at view.rows. The network may be any, and on a call
    that asks for no rows, or whose Views are not causal, nothing is reused."""
    body = getattr(model, "body", None)
    is_usual = view.rows is not None and len(view.rows) and view.at.dim() == 1
    if body is None or not (view.causal and is_usual) or view.sees is not None or model.training:
        return model(view)
    from transformers import DynamicCache  # optional, and there: it made the network

    N = view.ids.shape[1]
    version = version_of(body)
    held = HELD.pop(body, None)  # by one thread
    if held is None or held.version != version:
        held = Held(view.ids[:, :0], DynamicCache(), version)
    held.select(view.ids, int((view.rows % N).min()))
    P = held.length
    if not P:
        held = Held(view.ids, DynamicCache(), version)
    rows = view.rows // N * (N - P) + view.rows % N - P
    short = view._replace(ids=view.ids[:, P:], at=view.at[P:], rows=rows, cache=held)
    logits = model(short)
    held.ids = view.ids
    size = sum(t.nbytes for layer in held.past.layers for t in (layer.keys, layer.values))
    if size <= MOST_BYTES:
        HELD[body] = held
    return logits
