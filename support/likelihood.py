"""Exact likelihoods by the chain rule, and fills of a template ranked by them.

log p(x) = sum_i log p(x_i | x_1 .. x_{i-1}), the others masked: the exact log-likelihood of the
sampler that goes from left to right. It costs one sequence in a network call for each token.
"""

import itertools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from support.arguments import check_ids, check_length
from support.cli import UserError
from support.templates import encode_parts, joined, keeps_spaces, to_ids, to_texts


def group_size(model, device):
    """How many sequences to compute at once: at most 2^26 logits."""
    L = model.config.block_size
    # On a CPU larger tensors get new pages every time, which costs as much as the products.
    tokens = 1 << (11 if torch.device(device).type == "cpu" else 15)
    return max(1, min(tokens // L, (1 << 26) // (L * model.vocab_size)))


def groups(model, n, device, size=None, writing=False):
    """Slices of a batch of n, of `size` or group_size rows.

    writing: more in blocks, as a call computes one of each; prompts and KV caches take 1 GiB.
    """
    few = group_size(model, device)
    if writing:
        c = model.config
        layers = c.n_layer + 7  # what a prompt's forward needs is counted as seven caches
        most = (1 << 26) // (layers * c.block_size * c.n_embd)  # of 16 bytes a text
        few = max(few, min(few * model.n, most))
    size = size or few
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def checked(logits):
    """logits (n, V); UserError where they give no probabilities."""
    if not (logits.amax(-1).abs() < 1e30).all():  # larger ones overflow in sums
        raise UserError("the model predicts NaN or inf: its weights are damaged; train it again")
    return logits


def check_gaps(model, x, fill):
    """Raise UserError if a model of blocks does not see all text after `fill` (B, T) in x."""
    if model.n == 1 or not x.numel():
        return
    S = model.config.block_length
    block = torch.arange(x.shape[1], device=x.device) // S
    last = torch.where((x != model.mask_id) & ~fill, block, 0)
    if (fill & (block < last.amax(1, keepdim=True))).any():
        given = f"this model (--block_length={S}) does not see text in blocks after a gap"
        fix = "take one without blocks, or one of mdlm.py --whole by mdlm.load(path, whole=True)"
        raise UserError(f"{given}; {fix}")


def logits_at(model, xt, row, at, device):
    """(n, V) float logits of xt (B, L) at positions `at` (n,) of rows `row` (n,).

    Equal rows are computed once; the last MLP and the head see nothing but these positions.
    device: the model's.
    """
    xt, same = xt.unique(dim=0, return_inverse=True)
    rows = (same[row] * xt.shape[1] + at).to(device)
    return checked(model(xt.to(device), rows=rows).to(xt.device))


def predict(model, device, x, given, drawn, at, cfg=0.0, cache=None):
    """(n, V) float logits at the n positions `drawn` (B, len(at)) of a range `at` of x (B, T).

    The model sees these masked, in a whole context, as in training: a shorter text is followed by
    [MASK] or [END], of a longer one it sees what ends with `at`. cfg: guidance by the `given`
    tokens (2410.18514). A model of blocks, of which `at` is one, has a kernels.cache.Cache, and
    sees what that does not know yet.
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
    seen = F.pad(seen, pad, value=model.pad_id).masked_fill(drawn, model.mask_id)
    if cache:
        rows = drawn.flatten().nonzero()[:, 0].to(device)
        return checked(model(seen.to(device), rows=rows, cache=cache).to(x.device))
    row, at = drawn.nonzero().T
    logits = logits_at(model, seen, row, at, device)
    if cfg:
        seen = seen.masked_fill(F.pad(given[rows, window], pad), model.mask_id)
        without = logits_at(model, seen, row, at, device)
        logits = without + (1 + cfg) * (logits - without)
    return logits


def next_logits(model, x, row, at):
    """(n, V) float logits of x_i given x_j, j < i, for i = at (n,) in rows of x (B, L)."""
    xt = x[row]
    if model.config.objective != "ar":  # which sees nothing else anyway
        later = torch.arange(x.shape[1], device=x.device) >= at[:, None]
        xt = xt.masked_fill(later & model.learned(xt), model.mask_id)
    return logits_at(model, xt, torch.arange(len(row), device=x.device), at, x.device)


def next_logp(model, x, row, at):
    """(n,) float64 on the CPU: log p(x_i | x_j, j < i) for i = at (n,) in rows of x (B, L)."""
    logits = next_logits(model, x, row, at)
    return -F.cross_entropy(logits, x[row, at], reduction="none").cpu().double()


def to_context(model, x):
    """x (B, T) filled up to the context, which the model always saw in training."""
    return F.pad(x, (0, model.config.block_size - x.shape[1]), value=model.pad_id)


def end_documents(model, x, u):
    """x (B, T), a beginning and [MASK]: after a length, which is drawn, a row gets [END].

    u (B,) in [0, 1), on the CPU: which of the lengths of training texts that exceed what is given.
    """
    known = (x != model.mask_id).sum(1, keepdim=True).cpu()
    counts = model.length_counts.double().cpu()
    cdf = (counts * (torch.arange(len(counts)) > known)).cumsum(1)  # (B, L + 1)
    n = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).to(x.device)  # (B, 1)
    return torch.where(torch.arange(x.shape[1], device=x.device) < n, x, model.pad_id)


@torch.no_grad()
def chain_rule(model, x, batch_size=None, update=lambda n: None):
    """(B, L) float64: log p(x_i | x_j, j < i) in nats, 0 after T and where no token is learned.

    x (B, T) ids, T at most the context L.
    batch_size: positions per network call; update(n) is called after n more of them.
    """
    check_ids(model, x, masks=False)
    check_length(model, x)
    T = x.shape[1]
    x = to_context(model, x)
    out = torch.zeros(x.shape, dtype=torch.float64)
    row, at = model.learned(x)[:, :T].nonzero().T
    for part in groups(model, len(row), x.device, batch_size):
        out[row[part].cpu(), at[part].cpu()] = next_logp(model, x, row[part], at[part])
        update(len(row[part]))
    return out


@torch.no_grad()
def likeliest(model, x, start, stop, known, n):
    """The n rows of x (B, T) with the highest known + log p(x[start:stop] | x[:start]), exactly.

    start, stop (B,) int64, known (B,) float64, all on the CPU. Returns rows (n,) and values (n,),
    the highest first. A row is followed from left to right while it may still be one of the n:
    its value never rises.
    """
    x = to_context(model, x)
    value = known.clone()
    at = start.clone()
    size = group_size(model, x.device)
    while True:
        done = at >= stop
        least = value[done].topk(n)[0][-1] if done.sum() >= n else -math.inf
        rows = (~done & (value > least)).nonzero()[:, 0]
        if len(rows) == 0:
            rows = done.nonzero()[:, 0]
            rows = rows[value[rows].argsort(descending=True, stable=True)[:n]]
            return rows, value[rows]
        rows = rows[value[rows].argsort(descending=True, stable=True)[:size]]
        ahead = at[rows, None] + torch.arange(max(1, size // len(rows)))  # the next few of each
        which, k = (ahead < stop[rows, None]).nonzero().T
        row = rows[which]
        found = next_logp(model, x, row.to(x.device), ahead[which, k].to(x.device))
        value.index_add_(0, row, found)
        at[rows] = ahead[:, -1] + 1


class Fill(NamedTuple):  # of a template, or of its beginning
    parts: list  # every length known
    ids: list  # up to what ended a gap at the end of the text
    logp: float  # log p(ids from the first gap on | what precedes it) by the chain rule, in nats


def until_break(tokenizer, ids, start=0):
    """How many ids from `start` on, at least 1, precede [END] or a line break (all without one)."""
    texts = tokenizer.pieces(ids, start)
    for i in range(1, len(texts)):
        if ids[start + i] == tokenizer.end_id or "\n" in texts[i]:
            return i
    return len(texts)


def hypotheses(model, tokenizer, parts, n, draw, device, max_gap=16, draws=16):
    """The n likeliest of many fills of a template, distinct as texts: Fills, the likeliest first.

    draw(x, fill, may_end, quick) fills positions (B, L) of x (B, L), for each stretch of the
    template up to the next gap of unknown length. Such a gap is tried with 1 .. max_gap tokens,
    quickly, and the best 8 (or n) go on. All compete by logp: a gap's sum favours short ones, its
    mean easy ones. A gap at the end has max_gap tokens, of which those before [END] or a line break
    are kept; that counts in logp. Of documents with given lengths, log p(length) counts too.
    """
    L = model.config.block_size
    parts = encode_parts(parts, tokenizer)
    unknown = [i for i, part in enumerate(parts) if part is None]
    cuts = {0, *unknown[1:], len(parts)}
    if parts[-1] is None:
        cuts.add(len(parts) - 1)
    fills = [Fill([], [], 0.0)]
    start = [len(to_ids(parts[:1], tokenizer)) if isinstance(parts[0], str) else 0]
    for begin, end in itertools.pairwise(sorted(cuts)):
        stretch = parts[begin:end]
        room = L - len(to_ids(parts[end:], tokenizer))
        is_last = end == len(parts)
        at_end = stretch == [None] and is_last and not model.documents
        several = None in stretch and not at_end
        # 1. Draw: every length after every fill of what precedes.
        tried = []
        for i, length in itertools.product(range(len(fills)), range(max_gap) if several else [0]):
            before = fills[i]
            length = min(max_gap, room - len(before.ids)) if at_end else length + 1
            known = [length if part is None else part for part in stretch]
            ids = before.ids + to_ids(known, tokenizer, model.mask_id)
            if len(ids) <= room:
                # Short gaps are cheap, and have most of the likely fills.
                each = max(1, draws // (2 * length if several else 1) // len(fills))
                tried += [(start[i], Fill(before.parts + known, ids, before.logp))] * each
        after = model.pad_id if is_last else model.mask_id
        rows = [fill.ids + [after] * (L - len(fill.ids)) for _, fill in tried]
        inside = torch.arange(L) < torch.tensor([len(fill.ids) for _, fill in tried])[:, None]
        x = draw(torch.tensor(rows, device=device), inside.to(device), at_end, several)
        # 2. Keep what differs.
        found = {}
        others = {}  # without a space that the template asks for
        for i, (row, (begun, fill)) in enumerate(zip(x.tolist(), tried)):
            ids = row[: len(fill.ids)]
            if at_end:
                gap = fill.parts[-1]
                kept = until_break(tokenizer, ids, len(ids) - gap)
                ids = ids[: len(ids) - gap + kept + 1]
                fill = fill._replace(parts=[*fill.parts[:-1], kept])
            kept = found if keeps_spaces(fill.parts, ids, tokenizer) else others
            kept[joined(to_texts(fill.parts, ids, tokenizer))] = (i, begun, fill._replace(ids=ids))
        rows, start, fills = zip(*(found or others).values())
        # 3. Rank.
        stop = torch.tensor([len(fill.ids) for fill in fills])
        known = torch.tensor([fill.logp for fill in fills], dtype=torch.float64)
        if is_last and model.documents:  # a text's length has a probability too
            seen = model.length_counts.double().cpu() + 1
            known += (seen / seen.sum()).log()[stop]
        most = min(len(fills), n if is_last else max(n, 8))
        best, logp = likeliest(model, x[list(rows)], torch.tensor(start), stop, known, most)
        fills = [fills[i]._replace(logp=p) for i, p in zip(best.tolist(), logp.tolist())]
        start = [len(fill.ids) for fill in fills]
    return fills
