"""What tokens of a library's network see: the masks it is given, and whether it obeys them.

The library takes a 4-D mask as it is, and drops the sliding window of its layers for it: so `masks`
has the windows too. Networks ignore masks silently, and the numbers would be wrong: so `check`
tries a network before it is used.
"""

import torch

from nanomdlm.kernels.reference import document_spans, is_visible
from nanomdlm.support.networks import explain
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


@torch.no_grad()
def check(model):
    """Raise UserError unless tokens of a Pretrained see what they must and nothing else, by trying.

    Also unless positions count, and the logits are what its head gives.
    """
    model.eval()
    ids = torch.randint(model.vocab_size, (1, N), generator=torch.Generator().manual_seed(0))
    view = View(ids, torch.arange(N))
    kind = model.network.config.model_type
    with explain(f"a network of model_type {kind!r} fails with a mask and positions"):
        check_head(model, view)
        check_documents(model, view)
        check_positions(model, view)
        check_windows(model, view)


def are_close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def check_head(model, view):
    """The library must return what the head gives, and see all without a mask."""
    given = []  # what Features, in place of the head, is given
    place = model.body.get_submodule(model.head_place) if model.head_place else None
    if place is not None:
        hook = place.register_forward_hook(lambda module, args, out: given.append(out))
    embedded = model.embed(view.ids)
    plain = model.call_body(inputs_embeds=embedded)
    if place is not None:
        hook.remove()
        if not torch.equal(given[0], plain):
            model.refuse("changes its logits after the head, or has weights that are not finite")
    if not are_close(model.encode(embedded, view), plain):
        model.refuse("does not compute the same with positions and masks")


def check_documents(model, view):
    """Documents must not see each other, nor tokens what is later in a causal View."""
    at = view.at
    half = N // 2
    if not influence(model, view).all():
        model.refuse("is causal, or does not see all of a text")
    spans = document_spans((at == half - 1)[None] | (at == N - 1))
    documents = view._replace(at=at % half, sees=spans)
    if not torch.equal(influence(model, documents), is_visible(spans, at)[0]):
        model.refuse("does not obey a mask of documents")
    # A change that has no gradient, such as the choice of an expert, must not pass either.
    other = documents._replace(ids=view.ids.roll(1, 1).where(at >= half, view.ids))
    if not are_close(*(model.features(each)[:, :half] for each in (documents, other))):
        model.refuse("lets a document see another one")
    causal = view._replace(causal=True)
    if model.network.is_decoder and not torch.equal(influence(model, causal), at[:, None] >= at):
        model.refuse("does not obey a causal mask")


def check_positions(model, view):
    """Tokens in another order, at their positions, must be the same text."""
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    embedded = model.embed(view.ids)
    moved = model.encode(embedded[:, order], view._replace(at=order))
    if not are_close(moved, model.encode(embedded, view)[:, order]):
        model.refuse("does not take the positions that it is given")


def check_windows(model, view):
    """Layers with a sliding window must obey it: with windows of width 0 no token may see another
    one, and all may if one kind of layers has none."""
    windows = model.windows
    if not any(windows.values()):
        return
    itself = torch.eye(N, dtype=torch.bool)
    for free in (None, *windows):  # the kind of layers without a window
        model.windows = {kind: None if kind == free else 0 for kind in windows}
        wanted = itself if free is None else torch.ones_like(itself)
        if not torch.equal(influence(model, view), wanted):
            model.refuse("does not obey the sliding windows of its layers")
    model.windows = windows


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
