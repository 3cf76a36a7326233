"""Infilling by search: tries many fills of every length, and ranks them by exact likelihood."""

import contextlib
import itertools
import math
from functools import partial
from typing import NamedTuple

import torch

from support.arguments import check_tokenizer
from support.errors import UserError
from support.infill import constraint
from support.infill.calls import call_size
from support.infill.ranking import likeliest
from support.infill.templates import (
    allowed_by_row,
    check_lengths,
    check_match,
    encode_segments,
    has_open,
    is_open,
    joined,
    keeps_spaces,
    matches,
    to_ids,
    to_texts,
    with_length,
)


class Fill(NamedTuple):
    """A filled template, or the filled beginning of one."""

    segments: list  # of the template, with the lengths of all gaps
    ids: list  # of a gap at the end of the text: including the token that ends it
    logp: float  # in nats: log p(ids from the first gap on | what precedes it), by the chain rule


def until_break(tokenizer, ids, start=0):
    """Return how many ids from `start` on precede [END] or a line break.

    Without either of them that is all of the ids. A line break at `start` is text, as after
    "ROMEO:"; an [END] at `start` is not: then nothing precedes it.
    """
    texts = tokenizer.pieces(ids, start)
    for i, text in enumerate(texts):
        if ids[start + i] == tokenizer.end_id or (i and "\n" in text):
            return i
    return len(texts)


class Way(NamedTuple):
    """How a gap of unknown length may be filled."""

    length: int
    draws: int = 0  # of how many fills; 0: as many as of a gap of known length
    ids: tuple | None = None  # this fill alone


def ways_to_fill(gap, max_gap, draws):
    """Return the Ways of a gap of unknown length; draws: how many fills of a known one are drawn.

    Short gaps are drawn more often: they are cheap and have most of the likely fills. A list of
    texts needs no draws.
    """
    if gap is not None and gap.spelled:
        return [Way(len(ids), 1, ids) for ids in gap.spelled]
    lengths = range(1, max_gap + 1) if gap is None else gap.automaton.lengths(max_gap)
    least = 1 if gap is None else draws // len(lengths)
    return [Way(n, max(1, least, draws // (2 * max(1, n)))) for n in lengths]


def line_end(model, tokenizer):
    """The id that ends a text of unknown length, [END] or a line break; None if there is none."""
    if model.objective.lengths_are_given:
        return None
    if tokenizer.end_id is not None:
        return tokenizer.end_id
    with contextlib.suppress(UserError):
        ids = tokenizer.encode_lossless("\n", after_gap=True)
        return ids[0] if len(ids) == 1 else None
    return None


def distinct(rows, tried, at_end, tokenizer, end=None):
    """Remove rows with the same ids and text, those without a space that the template asks for, and
    those with a gap that must match and does not.

    rows: lists of ids, drawn for the pairs `tried` (where ranking begins, Fill)
    at_end: whether the last segment is a gap at the end of the text. It is then cut off before
        [END] or a line break
    end: the id that ends the text after a gap that must match, if that is at the end of the text

    Rows of other ids are kept even if they show the same text: which of them is the likeliest is
    not known yet. Returns a list of (number of the row, where ranking begins, Fill, text).
    """
    rows_kept = {}
    for i, (row, (begin, fill)) in enumerate(zip(rows, tried)):
        ids = row[: len(fill.ids)]
        if at_end:
            gap_start = len(ids) - fill.segments[-1]
            length = until_break(tokenizer, ids, gap_start)
            ids = ids[: gap_start + length + 1]  # with the token that ends the text
            fill = fill._replace(segments=[*fill.segments[:-1], length])
        if keeps_spaces(fill.segments, ids, tokenizer):
            texts = to_texts(fill.segments, ids, tokenizer)
            if matches(fill.segments, texts, tokenizer):
                text = joined(texts)
                ids = [*ids, end] if end is not None and len(ids) < len(row) else ids
                rows_kept[text, tuple(ids)] = (i, begin, fill._replace(ids=ids), text)
    if not rows_kept:
        check_match(fill.segments, texts, tokenizer)  # of the last one
    return list(rows_kept.values())


def cut_stretches(segments):
    """Cut a template into stretches with at most one gap of unknown length, filled one by one.

    Returns the pairs (begin, end) of segments. A stretch ends where the next gap of unknown length
    begins. Such a gap at the end of the text is a stretch of its own.
    """
    unknown = [i for i, segment in enumerate(segments) if is_open(segment)]
    cuts = {0, *unknown[1:], len(segments)}
    if segments[-1] is None:
        cuts.add(len(segments) - 1)
    return [*itertools.pairwise(sorted(cuts))]


def all_are_compared(model, segments):
    """Whether each stretch of a template has a gap of unknown length whose lengths are compared."""
    ends_open = segments[-1] is None and not model.objective.lengths_are_given
    stretches = [segments[begin:end] for begin, end in cut_stretches(segments)]
    return all(map(has_open, stretches)) and not ends_open


def length_logp(model):
    """Return log p of each document length, (L + 1,) float64 on the CPU.

    The model must be one that is given the length. Lengths count once more than they occur in the
    training data, so that none has probability 0.
    """
    counts = model.length_counts.double().cpu() + 1
    return (counts / counts.sum()).log()


def hypotheses(model, tokenizer, segments, n, draw, device, max_gap=16, draws=16, expect=None):
    """Find the n likeliest of many fills of a template; return distinct Fills, the best first.

    segments: the template, as from templates.parse
    draw: function draw(x, fill, may_end, quick), called once for each stretch (see cut_stretches).
        It draws the positions fill (B, L) bool of x (B, L) and returns x. quick: the stretch has a
        gap of unknown length, of which many lengths are tried with few draws each. It also gets
        `allowed` (as from templates.allowed_by_row) if a gap's first token must begin with a space,
        and `expect(calls)` if expect is given
    max_gap: largest length tried for a gap of unknown length
    draws: number of draws for each stretch and length; fewer for long gaps
    expect: called as expect(calls, stretch, stretches) with the largest number of network calls
        that stretch number `stretch` may still take

    After each stretch the best 8 fills (or n, if that is more) continue. Of several sequences of
    ids with the same text the likeliest counts, with its own logp. Fills compete by logp,
    which includes the text after the gaps: the sum of log p over the gaps alone would favour short
    ones, the mean easy ones. For a gap at the end of the text, max_gap tokens are drawn. Those
    before [END] or a line break are kept, and the token that ends the text counts in logp. If
    documents have given lengths, log p(length) counts instead, and the network sees [END] after the
    text. Where that is, is known only in the last stretch, so that one ranks the whole text;
    earlier ones choose what continues by logp with [MASK] after it.
    """
    check_tokenizer(tokenizer, model)
    L = model.config.block_size
    segments = encode_segments(segments, tokenizer)
    check_lengths(segments, max_gap)
    stretches = cut_stretches(segments)
    fills = [Fill([], [], 0.0)]
    # Where the ranking of each fill begins: the text before the first gap is given.
    first = len(to_ids(segments[:1], tokenizer)) if isinstance(segments[0], str) else 0
    starts = [first]

    def tell(number, later, calls):
        if expect:
            expect(calls + later, number, len(stretches))

    for number, (begin, end) in enumerate(stretches, 1):
        stretch = segments[begin:end]
        room = L - len(to_ids(segments[end:], tokenizer))
        is_last = end == len(segments)
        at_end = stretch == [None] and is_last and not model.objective.lengths_are_given
        several = has_open(stretch) and not at_end
        if is_last and model.objective.lengths_are_given:
            fills = [fill._replace(logp=0.0) for fill in fills]
            starts = [first] * len(fills)
        # 1. Draw: every length of the gap after every fill of the previous stretches; each text, if
        # the gap has a list of them.
        ways = [Way(1)]  # of no effect: the stretch has no gap of unknown length
        if several:
            ways = ways_to_fill(next(filter(is_open, stretch)), max_gap, draws)
        elif at_end:
            ways = [Way(max_gap)]
        tried = []
        for i, way in itertools.product(range(len(fills)), ways):
            length = way.length
            if at_end:
                length = min(length, room - len(fills[i].ids))
            known = [with_length(segment, length) for segment in stretch]
            ids = list(fills[i].ids)
            for segment, one in zip(stretch, known):
                is_told = is_open(segment) and way.ids is not None
                ids += way.ids if is_told else to_ids([one], tokenizer, model.mask_id)
            if len(ids) <= room:
                each = max(1, (way.draws or draws) // len(fills))
                if way.ids is not None and model.mask_id not in ids[len(fills[i].ids) :]:
                    each = 1  # there is nothing to draw
                tried += [(starts[i], Fill(fills[i].segments + known, ids, fills[i].logp))] * each
        after = model.objective.pad_id if is_last else model.mask_id
        rows = [fill.ids + [after] * (L - len(fill.ids)) for _, fill in tried]
        inside = torch.arange(L) < torch.tensor([len(fill.ids) for _, fill in tried])[:, None]
        sequences = sum(len(fill.ids) - start for start, fill in tried)  # to rank them, at most
        later = math.ceil(sequences / call_size(model, device))
        options = dict(expect=partial(tell, number, later)) if expect else {}
        templates = [fill.segments for _, fill in tried]
        if allowed := allowed_by_row(templates, tokenizer, L):
            options["allowed"] = allowed
        if constraints := constraint.by_row(templates):
            options["constraints"] = constraints
        x = draw(torch.tensor(rows, device=device), inside.to(device), at_end, several, **options)
        # 2. Keep each sequence of ids once; several may show the same text.
        end = None
        if is_last and is_open(segments[-1]) and not at_end:
            end = line_end(model, tokenizer)
        kept = distinct(x.tolist(), tried, at_end, tokenizer, end)
        rows, starts, fills, texts = zip(*kept)
        x = x[list(rows)]
        if end is not None:
            for row, fill in zip(x, fills):
                row[: len(fill.ids)] = torch.tensor(fill.ids)
        # 3. Rank them, and continue with the best.
        stop = torch.tensor([len(fill.ids) for fill in fills])
        known = torch.tensor([fill.logp for fill in fills], dtype=torch.float64)
        if is_last and model.objective.lengths_are_given:
            known += length_logp(model)[stop]
        n_texts = len(set(texts))
        n_kept = min(n_texts, n if is_last else max(n, 8))
        starts = torch.tensor(starts)
        report = partial(tell, number, 0)
        # So many more that n_kept texts are left if each is kept with its likeliest ids.
        n_ranked = n_kept + len(texts) - n_texts
        best, logp = likeliest(model, x, starts, stop, known, n_ranked, report)
        ranked = {}
        for i, p in zip(best.tolist(), logp.tolist()):
            ranked.setdefault(texts[i], fills[i]._replace(logp=p))
        fills = list(ranked.values())[:n_kept]
        starts = [len(fill.ids) for fill in fills]
    return fills
