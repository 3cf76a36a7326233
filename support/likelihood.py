"""Exact likelihoods by the chain rule, and fills of a template ranked by them.

log p(x) = sum_i log p(x_i | x_1 .. x_{i-1}), the others masked: the exact log-likelihood of the
sampler that goes from left to right. It costs one sequence in a network call for each token.
"""

import itertools
import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from support.arguments import check_ids, check_length, whole_number
from support.cli import UserError
from support.padding import compute_once
from support.templates import allowed_in_all, encode_parts, joined, keeps_spaces, to_ids, to_texts


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


@torch.no_grad()
def chain_rule(model, x, batch_size=None, update=lambda n: None):
    """(B, L) float64: log p(x_i | x_j, j < i) in nats, 0 after T and where no token is learned.

    x (B, T) ids, T at most the context L.
    batch_size: positions per network call; update(n) is called after n more of them.
    """
    check_ids(model, x, masks=False)
    check_length(model, x)
    if batch_size is not None:
        batch_size = whole_number("batch_size", batch_size, 1)
    T = x.shape[1]
    x = to_context(model, x)
    out = torch.zeros(x.shape, dtype=torch.float64)
    row, at = model.objective.scored_mask(x)[:, :T].nonzero().T
    for part in groups(model, len(row), x.device, batch_size):
        out[row[part].cpu(), at[part].cpu()] = next_logp(model, x, row[part], at[part])
        update(len(row[part]))
    return out


def prefixes(model, x, start, stop):
    """(B, L) int64 on the CPU: numbers of the texts that give log p(x_i | x_j, j < i).

    Equal numbers: equal texts, one row of a network call. Between start and stop (B,) alone.
    """
    B, L = x.shape
    x = x.cpu()
    begin = int(start.min())
    masked = model.objective.scored_mask(x) & (torch.arange(L) >= begin)
    number = x.masked_fill(masked, model.mask_id).unique(dim=0, return_inverse=True)[1]
    numbers = torch.zeros(B, L, dtype=torch.int64)
    for i in range(begin, int(stop.max())):
        numbers[:, i] = i * B + number
        number = (number * (model.vocab_size + 1) + x[:, i]).unique(return_inverse=True)[1]
    return numbers.unique(return_inverse=True)[1]


class Race:
    """Rows x (B, L), of which the n with the highest known + log p(x[start:stop] | x[:start]) win.

    Terms of that sum are computed in any order. None is positive, so what is known of a sum bounds
    it: a row is out as soon as n others have ended above that.
    """

    def __init__(self, model, x, start, stop, known, n):
        self.x = x.cpu()
        self.known = known
        self.n = n
        at = torch.arange(x.shape[1])
        self.inside = (at >= start[:, None]) & (at < stop[:, None])
        self.open = self.inside.clone()  # (B, L) bool: terms that are not computed
        self.loss = torch.zeros(x.shape, dtype=torch.float64)  # the others, negative
        self.to_end = torch.where(self.inside, stop[:, None] - at, 0)  # (B, L)
        self.text = prefixes(model, x, start, stop)
        self.alive = torch.ones(len(x), dtype=torch.bool)  # rows that may win and have open terms
        self.update()

    def best(self):
        """The rows that have ended, the highest sum first, equal ones in their order; n at most."""
        done = (~self.open.any(1)).nonzero()[:, 0]
        return done[self.value[done].argsort(descending=True, stable=True)[: self.n]]

    def update(self):
        self.value = self.known - self.loss.sum(1)  # (B,)
        self.alive &= self.open.any(1)
        best = self.best()
        if len(best) == self.n:
            last = best[-1]
            row = torch.arange(len(self.x))
            least = self.value[last]
            self.alive &= (self.value > least) | ((self.value == least) & (row < last))

    def left(self):
        """How many network rows it takes at most from here."""
        return len(self.text[self.open & self.alive[:, None]].unique())

    def next(self, k):
        """(row, at): places of at most k different texts to compute next.

        First those of the rows that promise most, so that others are soon out; of a row the term
        that will probably lower it most, and the others that share it. What to expect: the mean of
        the terms at the same distance from the end, where most rows have the same text.
        """
        seen = self.inside & ~self.open
        size = self.to_end.shape[1] + 1
        count = self.to_end[seen].bincount(minlength=size)
        total = self.to_end[seen].bincount(self.loss[seen], minlength=size)
        usual = total.sum() / count.sum() if count.sum() else 1.0
        guess = torch.where(count > 0, total / count.clamp(min=1), usual)[self.to_end]
        here = self.open & self.alive[:, None]
        shared = self.text[here].bincount(minlength=int(self.text.max()) + 1)
        gain = (guess * shared[self.text]).masked_fill(~here, -math.inf)
        hope = (self.value - (guess * self.open).sum(1)).masked_fill(~self.alive, -math.inf)
        rows = hope.argsort(descending=True, stable=True)[: min(4 * k, int(self.alive.sum()))]
        order = gain[rows].argsort(dim=1, descending=True, stable=True)
        row = rows.repeat(order.shape[1])  # the best term of each row, then the second of each ...
        at = order.T.flatten()
        is_open = here[row, at]
        row = row[is_open]
        at = at[is_open]
        first = np.unique(self.text[row, at].numpy(), return_index=True)[1]
        first = torch.from_numpy(np.sort(first)[:k])
        return row[first], at[first]

    def enter(self, row, at, logp):
        """Take log p (k, V) of the texts at these places, for all rows that have them."""
        which = torch.full((int(self.text.max()) + 1,), -1)
        which[self.text[row, at]] = torch.arange(len(row))
        which = which[self.text].masked_fill(~self.open, -1)  # (B, L)
        rows, places = (which >= 0).nonzero().T
        found = logp[which[rows, places], self.x[rows, places]]
        self.loss[rows, places] = -found.double()
        self.open[rows, places] = False
        self.update()


@torch.no_grad()
def likeliest(model, x, start, stop, known, n, expect=lambda calls: None):
    """The n rows of x (B, T) with the highest known + log p(x[start:stop] | x[:start]), exactly.

    start, stop (B,) int64, known (B,) float64, all on the CPU. Returns rows (n,) and values (n,),
    the highest first, equal ones in their order. A row is computed only as far as it may still be
    one of the n, and what begins alike is computed once. expect(calls): how many network calls it
    will still take, at most.
    """
    x = to_context(model, x)
    size = call_size(model, x.device)
    race = Race(model, x, start, stop, known, n)
    while race.alive.any():
        expect(math.ceil(race.left() / size))
        row, at = race.next(size)
        logits = next_logits(model, x, row.to(x.device), at.to(x.device))
        race.enter(row, at, logits.log_softmax(-1).cpu())
    expect(0)
    best = race.best()
    return best, race.value[best]


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


def distinct(rows, tried, at_end, tokenizer):
    """Of rows of ids that were drawn for `tried` ones, those that differ as texts, each once.

    Returns (number of the row, where its ranking begins, Fill). at_end: the last part is a gap at
    the end of the text, which ends before [END] or a line break.
    """
    found = {}
    others = {}  # without a space that the template asks for
    for i, (row, (begun, fill)) in enumerate(zip(rows, tried)):
        ids = row[: len(fill.ids)]
        if at_end:
            gap = fill.parts[-1]
            kept = until_break(tokenizer, ids, len(ids) - gap)
            ids = ids[: len(ids) - gap + kept + 1]
            fill = fill._replace(parts=[*fill.parts[:-1], kept])
        kept = found if keeps_spaces(fill.parts, ids, tokenizer) else others
        kept[joined(to_texts(fill.parts, ids, tokenizer))] = (i, begun, fill._replace(ids=ids))
    return (found or others).values()


def cut_stretches(parts):
    """(begin, end) of the stretches of parts, each up to the next gap of unknown length.

    Such a gap at the end of the text has one of its own.
    """
    unknown = [i for i, part in enumerate(parts) if part is None]
    cuts = {0, *unknown[1:], len(parts)}
    if parts[-1] is None:
        cuts.add(len(parts) - 1)
    return [*itertools.pairwise(sorted(cuts))]


def length_logp(model):
    """(L + 1,) float64 on the CPU: log p of a document's length, where lengths are given."""
    seen = model.length_counts.double().cpu() + 1
    return (seen / seen.sum()).log()


def hypotheses(model, tokenizer, parts, n, draw, device, max_gap=16, draws=16, expect=None):
    """The n likeliest of many fills of a template, distinct as texts: Fills, the likeliest first.

    draw(x, fill, may_end, quick) fills positions (B, L) of x (B, L), for each stretch of the
    template up to the next gap of unknown length. Such a gap is tried with 1 .. max_gap tokens,
    quickly, and the best 8 (or n) go on. All compete by logp: a gap's sum favours short ones, its
    mean easy ones. A gap at the end has max_gap tokens, of which those before [END] or a line break
    are kept; that counts in logp. Of documents with given lengths, log p(length) counts too.
    expect(calls, stretch, stretches), where it is given, is told how many network calls a stretch
    will still take at most; draw has an `expect` (calls) then, too. So it has an `allowed`, as
    sample.unmask, where a tokenizer's first token of a gap has to begin with a space.
    """
    L = model.config.block_size
    parts = encode_parts(parts, tokenizer)
    stretches = cut_stretches(parts)
    fills = [Fill([], [], 0.0)]
    start = [len(to_ids(parts[:1], tokenizer)) if isinstance(parts[0], str) else 0]

    def tell(number, later, calls):
        if expect:
            expect(calls + later, number, len(stretches))

    for number, (begin, end) in enumerate(stretches, 1):
        stretch = parts[begin:end]
        room = L - len(to_ids(parts[end:], tokenizer))
        is_last = end == len(parts)
        at_end = stretch == [None] and is_last and not model.objective.lengths_are_given
        several = None in stretch and not at_end
        # 1. Draw: every length after every fill of what precedes.
        lengths = range(1, max_gap + 1) if several else [max_gap if at_end else 1]
        tried = []
        for i, length in itertools.product(range(len(fills)), lengths):
            if at_end:
                length = min(length, room - len(fills[i].ids))
            known = [length if part is None else part for part in stretch]
            ids = fills[i].ids + to_ids(known, tokenizer, model.mask_id)
            if len(ids) <= room:
                # Short gaps are cheap, and have most of the likely fills.
                each = max(1, draws // (2 * length if several else 1) // len(fills))
                tried += [(start[i], Fill(fills[i].parts + known, ids, fills[i].logp))] * each
        after = model.objective.pad_id if is_last else model.mask_id
        rows = [fill.ids + [after] * (L - len(fill.ids)) for _, fill in tried]
        inside = torch.arange(L) < torch.tensor([len(fill.ids) for _, fill in tried])[:, None]
        ranking = sum(len(fill.ids) - begun for begun, fill in tried)  # network rows, at most
        later = math.ceil(ranking / call_size(model, device))
        how = dict(expect=partial(tell, number, later)) if expect else {}
        if allowed := allowed_in_all([fill.parts for _, fill in tried], tokenizer):
            how["allowed"] = allowed
        x = draw(torch.tensor(rows, device=device), inside.to(device), at_end, several, **how)
        # 2. Keep what differs.
        rows, start, fills = zip(*distinct(x.tolist(), tried, at_end, tokenizer))
        x = x[list(rows)]
        # 3. Rank.
        stop = torch.tensor([len(fill.ids) for fill in fills])
        known = torch.tensor([fill.logp for fill in fills], dtype=torch.float64)
        if is_last and model.objective.lengths_are_given:  # a text's length has a probability too
            known += length_logp(model)[stop]
        most = min(len(fills), n if is_last else max(n, 8))
        at = (torch.tensor(start), stop)
        best, logp = likeliest(model, x, *at, known, most, partial(tell, number, 0))
        fills = [fills[i]._replace(logp=p) for i, p in zip(best.tolist(), logp.tolist())]
        start = [len(fill.ids) for fill in fills]
    return fills
