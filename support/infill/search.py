"""Many fills of a template, of every length that its gaps may have, ranked by exact likelihood."""

import itertools
import math
from functools import partial
from typing import NamedTuple

import torch

from support.infill.calls import call_size
from support.infill.ranking import likeliest
from support.infill.templates import (
    allowed_in_all,
    encode_parts,
    joined,
    keeps_spaces,
    to_ids,
    to_texts,
)


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


def all_are_compared(model, parts):
    """Whether each stretch of parts has a gap of unknown length whose lengths are compared."""
    ends_open = parts[-1] is None and not model.objective.lengths_are_given
    stretches = [parts[begin:end] for begin, end in cut_stretches(parts)]
    return all(None in stretch for stretch in stretches) and not ends_open


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
