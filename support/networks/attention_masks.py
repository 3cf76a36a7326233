"""What tokens of a library's network see: the masks it is given, and whether it obeys them.

With our attention (attention.py) it is given spans in place of masks.

The library takes a 4-D mask as it is, and drops the sliding window of its layers for it: so `masks`
has the windows too. Networks ignore masks silently, and the numbers would be wrong: so `check`
tries a network before it is used.
"""

import torch
import torch.nn as nn

from nanomdlm.kernels.reference import block_spans, document_spans, is_visible, window_spans
from nanomdlm.support.networks import attention, explain
from nanomdlm.support.view import View

N = 6  # tokens of the texts that `check` tries


def windows_of(config):
    """Kind of layers -> their sliding window, or None; a single kind "" where all are alike.

    config: the library's, as some compute the window.
    """
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or [])
    if not kinds:
        return {"": window}
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def masks(view, windows):
    """The library's attention_mask of a View: bool (B or 1, 1, queries, keys), None where all is
    seen, or a dict of these for the kinds of layers. windows: what windows_of gave."""
    T = view.ids.shape[1]
    at = torch.arange(T, device=view.ids.device)
    visible = None  # (B or 1, T, T), of a call with a cache (1, T, all that is kept and these)
    if view.sees is not None:
        visible = is_visible(view.sees, at)
    if view.causal:
        visible = (at[:, None] >= at)[None]
    # Windows are of positions in the text, of which rows of blocks have each one twice.
    of_queries = of_keys = at if view.at.dim() > 1 else view.at
    if view.cache is not None:
        of_keys = torch.arange(view.cache.length + T, device=at.device)
        visible = (of_keys // view.cache.S <= of_queries[:, None] // view.cache.S)[None]
    by_kind = {}
    for kind, window in windows.items():
        mask = visible
        if window is not None and window < len(of_keys):
            distance = (of_queries[:, None] - of_keys).abs()
            # As the library: a causal window counts the position itself.
            near = (distance < window if view.causal else distance <= window)[None]
            mask = near if mask is None else mask & near
        by_kind[kind] = None if mask is None else mask[:, None]
    return by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))


def spans(view, windows):
    """What a View sees as spans (B or 1, 1, lines, T), for networks with our attention; as `masks`
    otherwise. Not for causal Views, nor with a cache.

    Windows are of places in the row: texts stand there in their order, with blocks twice.
    """
    T = view.ids.shape[1]
    by_kind = {}
    for kind, window in windows.items():
        seen = view.sees
        if window is not None and window < T:
            seen = window_spans(seen, window, T, view.ids.device)
        by_kind[kind] = None if seen is None else seen[:, None]
    return by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))


def are_close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def check(model):
    """Raise UserError unless tokens of a Pretrained see what they must and nothing else, by trying.

    Also unless positions count, and the library's logits are what its head gives.
    """
    model.eval()
    at = torch.arange(N)
    ids = torch.randint(model.vocab_size, (1, N), generator=torch.Generator().manual_seed(0))
    whole = View(ids, at)
    kind = model.network.config.model_type

    def require(is_right, why):
        if not is_right:
            model.refuse(why)

    with explain(f"a network of model_type {kind!r} fails with a mask and positions"):
        # 1. The library computes the same without a mask, and returns what its head gives.
        embedded = model.embed(ids)
        read = []
        head = model.body.get_output_embeddings() or nn.Identity()
        hook = head.register_forward_hook(lambda module, args, out: read.append(out))
        plain = model.call_body(embedded)
        hook.remove()
        is_last = not read or torch.equal(read[0], plain)
        require(is_last, "changes its logits after the head")
        h = model.encode(embedded, whole)
        require(are_close(h, plain), "does not compute the same with positions and masks")
        # 2. All is seen; or each of two documents, of the first and the last half; or the past.
        require(influence(model, whole).all(), "is causal, or does not see all of a text")
        half = N // 2
        spans = document_spans((at % half == half - 1)[None])
        documents = View(ids, at % half, sees=spans)
        is_obeyed = torch.equal(influence(model, documents), is_visible(spans, at)[0])
        require(is_obeyed, "does not obey a mask of documents")
        # A change that has no gradient, such as the choice of an expert, must not pass either.
        other = documents._replace(ids=ids.roll(1, 1).where(at >= half, ids))
        first = [model.features(view)[:, :half] for view in (documents, other)]
        require(are_close(*first), "lets a document see another one")
        if model.network.is_decoder:
            past = influence(model, whole._replace(causal=True))
            require(torch.equal(past, at[:, None] >= at), "does not obey a causal mask")
        # 3. Tokens in another order, at their positions, are the same text.
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        moved = model.encode(embedded[:, order], whole._replace(at=order))
        require(are_close(moved, h[:, order]), "does not take the positions that it is given")
        # 4. In windows of width 0 no token sees another one; all do if a kind of layers has none.
        windows = model.windows
        itself = torch.eye(N, dtype=torch.bool)
        for free in (None, *windows) if any(windows.values()) else ():
            model.windows = {kind: None if kind == free else 0 for kind in windows}
            seen = influence(model, whole)
            is_obeyed = seen.all() if free is not None else torch.equal(seen, itself)
            require(is_obeyed, "does not obey the sliding windows of its layers")
        model.windows = windows


@torch.no_grad()
def takes_spans(model):
    """Whether a Pretrained that passed `check` computes the same with our attention, by trying.

    Its weights become larger, so that scores differ by some units. Afterwards it has our attention.
    """
    model.eval()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, 0, 2 * p.shape[-1] ** -0.5)
    at = torch.arange(N)
    ids = torch.randint(model.vocab_size, (2, N), generator=torch.Generator().manual_seed(0))
    documents = document_spans((at % 4 == 3)[None])
    blocks = block_spans(N // 2, 2, at.device)
    views = [View(ids, at), View(ids, at, documents), View(ids, at % (N // 2), blocks)]
    model.windows = {kind: window and 1 for kind, window in model.windows.items()}
    wanted = [model.features(view) for view in views]
    attention.adopt(model.body)
    model.has_our_attention = True
    try:
        found = [model.features(view) for view in views]
    except Exception:  # the library raises errors of all kinds
        return False
    return all(map(are_close, found, wanted))


def influence(model, view):
    """(T, T) bool: whether the features at i depend on the token at j, by gradients."""
    T = view.ids.shape[1]
    embedded = model.embed(view.ids).detach().repeat(T, 1, 1).requires_grad_()
    with torch.enable_grad():
        h = model.encode(embedded, view)
        weight = torch.linspace(-1, 1.3, h.shape[-1])  # not alike: norms
        at = torch.arange(T)
        (grad,) = torch.autograd.grad((h[at, at] * weight).sum(), embedded)
    return grad.abs().sum(-1) > 0
