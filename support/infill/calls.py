"""Network calls for texts that are being written or scored: how many texts, what each sees."""

import torch
import torch.nn.functional as F

from support.errors import UserError
from support.infill.padding import compute_once


def group_size(model, device):
    """How many sequences to compute at once: at most 2^26 logits."""
    L = model.config.block_size
    # On a CPU larger tensors get new pages every time, which costs as much as the products.
    tokens = 1 << (11 if torch.device(device).type == "cpu" else 15)
    return max(1, min(tokens // L, (1 << 26) // (L * model.vocab_size)))


def call_size(model, device):
    """How many sequences to give to one network call: on a CPU at most 2^10 tokens.

    Twice as many no longer fit into its caches: a fifth slower for each sequence.
    """
    few = group_size(model, device)
    if torch.device(device).type != "cpu":
        return few
    return max(1, min(few, (1 << 10) // model.config.block_size))


def groups(model, n, device, size=None, writing=False):
    """Slices of a batch of n, of `size` or group_size rows.

    writing: more in blocks, as a call computes one of each; prompts and KV caches take 1 GiB.
    """
    few = group_size(model, device)
    if writing:
        c = model.config
        layers = c.n_layer + 7  # what a prompt's forward needs is counted as seven caches
        most = (1 << 26) // (layers * c.block_size * c.n_embd)  # of 16 bytes a text
        few = max(few, min(few * model.objective.n_blocks, most))
    size = size or few
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def checked(logits):
    """logits (n, V); UserError where they give no probabilities."""
    if not (logits.amax(-1).abs() < 1e30).all():  # larger ones overflow in sums
        raise UserError("the model predicts NaN or inf: its weights are damaged; train it again")
    return logits


MOST_LOGITS = 1 << 24  # that a Memo holds


class Memo:
    """Logits that were computed before, by the text that the network saw and the position.

    Draws for a short gap come to the same few texts again and again.
    """

    def __init__(self):
        self.logits = {}  # (bytes of the ids, position) -> (V,)

    def logits_at(self, model, xt, row, at, device):
        """What `logits_at` returns; only texts that are new are computed."""
        texts = [ids.tobytes() for ids in xt.cpu().numpy()]
        keys = [(texts[r], i) for r, i in zip(row.tolist(), at.tolist())]
        if (len(self.logits) + len(keys)) * model.vocab_size > MOST_LOGITS:
            self.logits = {key: self.logits[key] for key in keys if key in self.logits}
        new = {key: i for i, key in enumerate(keys) if key not in self.logits}
        if new:
            which = torch.tensor([*new.values()], device=xt.device)
            rows, inverse = row[which].unique(return_inverse=True)
            found = logits_at(model, xt[rows], inverse, at[which], device)
            self.logits.update(zip(new, found))
        return torch.stack([self.logits[key] for key in keys])


def logits_at(model, xt, row, at, device):
    """(n, V) float logits of xt (B, L) at positions `at` (n,) of rows `row` (n,).

    Equal rows are computed once, in calls of call_size; the last MLP and the head see nothing but
    these positions. device: the model's.
    """
    xt, same = xt.unique(dim=0, return_inverse=True)
    row = same[row]
    L = xt.shape[1]
    parts = groups(model, len(xt), device, call_size(model, device))
    model = compute_once(model)
    if len(parts) == 1:
        view = model.objective.view(xt.to(device), rows=(row * L + at).to(device))
        return checked(model(view).to(xt.device))
    logits = None
    for part in parts:
        here = ((row >= part.start) & (row < part.stop)).nonzero()[:, 0]
        rows = (row[here] - part.start) * L + at[here]
        view = model.objective.view(xt[part].to(device), rows=rows.to(device))
        found = checked(model(view)).to(xt.device)
        if logits is None:
            logits = found.new_empty(len(row), found.shape[1])
        logits[here] = found
    return logits


def predict(model, device, x, given, drawn, at, cfg=0.0, cache=None, memo=None):
    """(n, V) float logits at the n positions `drawn` (B, len(at)) of a range `at` of x (B, T).

    The model sees these masked, in a whole context, as in training: a shorter text is followed by
    [MASK] or [END], of a longer one it sees what ends with `at`. cfg: guidance by the `given`
    tokens (2410.18514). A model of blocks, of which `at` is one, has a variants.cache.Cache, and
    sees what that does not know yet. memo: a Memo, for short gaps of many rows.
    """
    L = model.config.block_size
    rows = drawn.any(1) | (cache is not None)  # a cache keeps all texts
    window = slice(max(0, at.stop - L), max(L, at.stop))
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
        return checked(model(cache.view(seen.to(device), rows)).to(x.device))
    row, at = drawn.nonzero().T
    find = memo.logits_at if memo else logits_at
    logits = find(model, seen, row, at, device)
    if cfg:
        seen = seen.masked_fill(F.pad(given[rows, window], pad), model.mask_id)
        without = find(model, seen, row, at, device)
        logits = without + (1 + cfg) * (logits - without)
    return logits


def next_logits(model, x, row, at):
    """(n, V) float logits of x_i given x_j, j < i, for i = at (n,) in rows of x (B, L)."""
    xt = x[row]
    if not model.objective.one_by_one:  # which sees nothing else anyway
        later = torch.arange(x.shape[1], device=x.device) >= at[:, None]
        xt = xt.masked_fill(later & model.objective.scored_mask(xt), model.mask_id)
    return logits_at(model, xt, torch.arange(len(row), device=x.device), at, x.device)


def next_logp(model, x, row, at):
    """(n,) float64 on the CPU: log p(x_i | x_j, j < i) for i = at (n,) in rows of x (B, L)."""
    logits = next_logits(model, x, row, at)
    return -F.cross_entropy(logits, x[row, at], reduction="none").cpu().double()


def to_context(model, x):
    """x (B, T) filled up to the context, which the model always saw in training."""
    return F.pad(x, (0, model.config.block_size - x.shape[1]), value=model.objective.pad_id)


def end_documents(model, x, u):
    """x (B, T), a beginning and [MASK]: after a length, which is drawn, a row gets [END].

    u (B,) in [0, 1), on the CPU: which of the lengths of training texts that exceed what is given.
    """
    known = (x != model.mask_id).sum(1, keepdim=True).cpu()
    counts = model.length_counts.double().cpu()
    cdf = (counts * (torch.arange(len(counts)) > known)).cumsum(1)  # (B, L + 1)
    n = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).to(x.device)  # (B, 1)
    return torch.where(torch.arange(x.shape[1], device=x.device) < n, x, model.objective.pad_id)
