"""Network calls for generation and scoring: batch sizes, and what the model sees of each text."""

import math

import torch
import torch.nn.functional as F

from nanomdlm.support import abilities
from nanomdlm.support.infill.batching import compute
from nanomdlm.support.infill.shared_padding import compute_once
from nanomdlm.support.numerics import checked


def device_of(model):
    """The device of a model, or of what stands in for one."""
    return next(model.parameters()).device if hasattr(model, "parameters") else torch.device("cpu")


# ---- Batch sizes
def group_size(model, device):
    """Return how many sequences to process at once: at most 2^26 logits (256 MiB in float32)."""
    L = model.config.block_size
    # On a CPU, memory for larger tensors comes fresh from the system at every call. That costs as
    # much time as the matrix products.
    tokens = 1 << (11 if torch.device(device).type == "cpu" else 15)
    return max(1, min(tokens // L, (1 << 26) // (L * model.vocab_size)))


def call_size(model, device):
    """Return how many sequences to give to one network call: on a CPU at most 2^10 tokens.

    Twice as many tokens no longer fit into its caches, which costs a fifth more time per sequence.
    """
    size = group_size(model, device)
    if torch.device(device).type != "cpu":
        return size
    return max(1, min(size, (1 << 10) // model.config.block_size))


def rows_per_call(model, device, positions=1):
    """Return how many sequences to give to one network call that predicts at some positions of
    each.

    A pretrained causal network computes only what follows their common beginning (prefixes.py), so
    more sequences fit; their logits take at most 128 MiB.
    """
    if not is_large(model):
        return call_size(model, device)
    fits = (1 << 25) // (positions * model.vocab_size)
    most = 8 if torch.device(device).type == "cpu" else max(8, call_size(model, device))
    return max(1, min(most, fits))


def groups(model, n, device, size=None, writing=False):
    """Split a batch of n rows into slices of `size` rows (default: group_size).

    writing: the rows are being generated. A model of blocks then computes one block per row at a
    time, so more rows fit, as long as prompts and KV caches take at most 1 GiB.
    """
    rows = group_size(model, device)
    if writing:
        c = model.config
        layers = c.n_layer + 7  # the forward pass of a prompt needs as much as seven KV caches
        max_rows = (1 << 26) // (layers * c.block_size * c.n_embd)  # 16 bytes for each of these
        rows = max(rows, min(rows * model.objective.n_texts, max_rows))
    size = size or rows
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


# ---- Logits at chosen positions
MOST_LOGITS = 1 << 24  # numbers that a Memo holds at most: 64 MiB in float32


class Memo:
    """Caches logits by position and by the text that the network saw.

    The many draws for a short gap produce the same few texts again and again.
    """

    def __init__(self):
        self.logits = {}  # (bytes of the ids, position) -> (V,)

    def logits_at(self, model, xt, row, at, device):
        """Return the same as the function logits_at, computing only what is not remembered."""
        texts = [ids.tobytes() for ids in xt.cpu().numpy()]
        keys = [(texts[r], i) for r, i in zip(row.tolist(), at.tolist())]
        if (len(self.logits) + len(keys)) * model.vocab_size > MOST_LOGITS:
            # Full: forget everything but what this call needs.
            self.logits = {key: self.logits[key] for key in keys if key in self.logits}
        new = {key: i for i, key in enumerate(keys) if key not in self.logits}
        if new:
            places = torch.tensor([*new.values()], device=xt.device)
            rows, inverse = row[places].unique(return_inverse=True)
            computed = logits_at(model, xt[rows], inverse, at[places], device)
            self.logits.update(zip(new, computed))
        return torch.stack([self.logits[key] for key in keys])


def logits_at(model, xt, row, at, device):
    """Return the logits (n, V) of n positions.

    xt: (B, L) tokens, on any device
    row, at: (n,) the row and the position in xt of each
    device: the model's device

    Equal rows are computed once, in calls of rows_per_call. The last MLP and the head compute only
    the n positions.
    """
    xt, same = xt.unique(dim=0, return_inverse=True)
    row = same[row]
    L = xt.shape[1]
    positions = math.ceil(len(at) / max(1, len(xt)))
    slices = groups(model, len(xt), device, rows_per_call(model, device, positions))
    model = compute_once(model)
    if len(slices) == 1:
        view = model.objective.view(xt.to(device), rows=(row * L + at).to(device))
        return checked(compute(model, [view])[0].to(xt.device))
    logits = None
    for batch in slices:
        here = ((row >= batch.start) & (row < batch.stop)).nonzero()[:, 0]
        rows = (row[here] - batch.start) * L + at[here]
        view = model.objective.view(xt[batch].to(device), rows=rows.to(device))
        computed = checked(compute(model, [view])[0]).to(xt.device)
        if logits is None:
            logits = computed.new_empty(len(row), computed.shape[1])
        logits[here] = computed
    return logits


def is_large(model):
    """Whether a network that sees no later token is a pretrained one: it computes no more than the
    text up to there, in about as many fewer seconds."""
    return abilities.is_causal(model) and hasattr(model, "network")


def predict(model, device, x, given, drawn, at, cfg=0.0, cache=None, memo=None):
    """Return the logits (n, V) of the n positions to draw.

    x: (B, T) tokens; T may exceed the context
    given: (B, T) bool, tokens of the prompt or template; only cfg needs them
    drawn: (B, len(at)) bool, the positions to draw within the range `at` of positions of x. The
        model sees them masked
    cfg: strength of classifier-free guidance by the given tokens (2410.18514); 0 turns it off
    cache: a variants.cache.Cache for a model of blocks, where `at` is one block. The model then
        sees only what the cache does not hold yet
    memo: a Memo, useful for many draws of short gaps

    As in training, the model sees a whole context (see is_large): shorter texts are padded with
    [MASK] or [END], and of longer texts it sees the last tokens up to the end of `at`.
    """
    L = model.config.block_size
    # A cache holds all rows, so none is left out.
    rows = slice(None) if cache is not None else drawn.any(1)
    window = slice(max(0, at.stop - L), at.stop if is_large(model) else max(L, at.stop))
    if cache:
        window = slice(cache.follow(at.start), at.start + cache.S)
    n = window.stop - window.start
    seen = x[rows, window]
    pad = (0, n - seen.shape[1])
    before = at.start - window.start
    drawn = F.pad(drawn[rows], (before, n - before - len(at)))  # (rows, n)
    seen = F.pad(seen, pad, value=model.objective.pad_id).masked_fill(drawn, model.mask_id)
    if cache:
        rows = drawn.flatten().nonzero()[:, 0].to(device)
        view = cache.view(seen.to(device), rows)
        return checked(compute(model, [view])[0].to(x.device))
    row, at = drawn.nonzero().T
    find = memo.logits_at if memo else logits_at
    logits = find(model, seen, row, at, device)
    if cfg:
        seen = seen.masked_fill(F.pad(given[rows, window], pad), model.mask_id)
        unguided = find(model, seen, row, at, device)
        guided = unguided + (1 + cfg) * (logits - unguided)
        logits = torch.where(logits == -torch.inf, logits, guided)  # never drawn
    return logits


def predict_everywhere(model, x, given, drawn, at, cfg=0.0, cache=None):
    """As `predict` for all positions in the range `at`, without waiting for a value.

    x, given: (B, n) what the network sees, but for the padding after it: the last context, or what
    is not in the cache

    Returns the logits (B len(at), V), and whether they are finite (B len(at),).
    """
    N = at.start + cache.S if cache else model.config.block_size
    here = torch.arange(at.start, at.stop, device=x.device)
    rows = (torch.arange(len(x), device=x.device)[:, None] * N + here).flatten()
    pad = (0, N - x.shape[1])
    x = F.pad(x, pad, value=model.objective.pad_id)
    hidden = F.pad(drawn, (at.start, N - at.stop))

    def find(hidden):
        seen = x.masked_fill(hidden, model.mask_id)
        view = cache.view(seen, rows) if cache else model.objective.view(seen, rows=rows)
        logits = model(view)
        return logits, logits.amax(-1).abs() < 1e30

    logits, is_finite = find(hidden)
    if cfg:
        unguided, is_finite_too = find(hidden | F.pad(given, pad))
        guided = unguided + (1 + cfg) * (logits - unguided)
        logits = torch.where(logits == -torch.inf, logits, guided)  # never drawn
        is_finite = is_finite & is_finite_too
    return logits, is_finite


# ---- From left to right
def next_logits(model, x, row, at):
    """Return the logits (n, V) of x_i given x_j, j < i.

    x: (B, L) ids; row, at: (n,) the row and the position i of each.
    """
    if abilities.is_causal(model) and len(at):  # it sees no later token
        x = x[:, : 1 + int(at.max())]
    xt = x[row]
    if not abilities.is_causal(model):
        later = torch.arange(x.shape[1], device=x.device) >= at[:, None]
        xt = xt.masked_fill(later & model.objective.scored_mask(xt), model.mask_id)
    return logits_at(model, xt, torch.arange(len(row), device=x.device), at, x.device)


def next_logp(model, x, row, at):
    """Return log p(x_i | x_j, j < i) in nats, (n,) float64 on the CPU; arguments as next_logits."""
    logits = next_logits(model, x, row, at)
    return -F.cross_entropy(logits, x[row, at], reduction="none").cpu().double()


def to_context(model, x):
    """Pad x (B, T) to the context (B, L), because the model saw whole contexts in training."""
    return F.pad(x, (0, model.config.block_size - x.shape[1]), value=model.objective.pad_id)


def end_documents(model, x, u):
    """Draw a length for each row and put [END] after it, for models that are given the length.

    x: (B, T), given tokens followed by [MASK]
    u: (B,) in [0, 1) on the CPU; selects one of the lengths of training texts that exceed the
        number of given tokens
    """
    known = (x != model.mask_id).sum(1, keepdim=True).cpu()
    counts = model.length_counts.double().cpu()
    cdf = (counts * (torch.arange(len(counts)) > known)).cumsum(1)  # (B, L + 1)
    n = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).to(x.device)  # (B, 1)
    return torch.where(torch.arange(x.shape[1], device=x.device) < n, x, model.objective.pad_id)
