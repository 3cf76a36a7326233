"""Infilling by search: tries many fills of every length, and ranks them by exact likelihood."""

import contextlib
import itertools
import math
from functools import partial
from typing import NamedTuple

import torch

from support import abilities
from support.arguments import check_tokenizer
from support.errors import UserError
from support.infill import constraint
from support.infill.calls import call_size
from support.infill.lengths import N_AFTER, length_scores
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

QUICK_STEPS = 8  # calls, per block, that draw the fills which only compare lengths
N_LENGTHS = 4  # lengths of a gap that are filled, of all those that one call compares
N_SPARE = 1  # fills that are ranked beyond those asked for, of all those drawn


class Fill(NamedTuple):
    """A filled template, or the filled beginning of one."""

    segments: list  # of the template, with the lengths of all gaps
    ids: list  # of a gap at the end of the text: including the token that ends it
    logp: float  # in nats: log p(ids from the first gap on | what precedes it), by the chain rule


class Trial(NamedTuple):
    """A template to fill, up to the end of a stretch: one fill of the earlier ones, one Way."""

    start: int  # where ranking begins
    fill: Fill  # with [MASK] in the gaps of this stretch
    count: int  # how often it is drawn
    gap_end: int  # the position after the gap of unknown length, if there is one
    length: int  # of that gap
    expected: float  # estimate of logp less log p(gaps | the rest), up to a constant


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
    if abilities.knows_lengths(model):
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

    rows: lists of ids, drawn for the Trials `tried`
    at_end: whether the last segment is a gap at the end of the text. It is then cut off before
        [END] or a line break
    end: the id that ends the text after a gap that must match, if that is at the end of the text

    Rows of other ids are kept even if they show the same text: which of them is the likeliest is
    not known yet. Returns a list of (number of the row, where ranking begins, Fill, text).
    """
    rows_kept = {}
    for i, (row, trial) in enumerate(zip(rows, tried)):
        begin, fill = trial[:2]
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
    ends_open = segments[-1] is None and not abilities.knows_lengths(model)
    stretches = [segments[begin:end] for begin, end in cut_stretches(segments)]
    return all(map(has_open, stretches)) and not ends_open


def length_logp(model):
    """Return log p of each document length, (L + 1,) float64 on the CPU.

    The model must be one that is given the length. Lengths count once more than they occur in the
    training data, so that none has probability 0.
    """
    counts = model.length_counts.double().cpu() + 1
    return (counts / counts.sum()).log()


def inside_of(trials, L):
    """Return (B, L) bool: the positions of the texts of Trials."""
    return torch.arange(L) < torch.tensor([len(trial.fill.ids) for trial in trials])[:, None]


def to_rows(trials, L, after, device):
    """Return the ids (B, L) of Trials, followed by the id `after`."""
    rows = [trial.fill.ids + [after] * (L - len(trial.fill.ids)) for trial in trials]
    return torch.tensor(rows, device=device)


def trials(model, tokenizer, stretch, fills, starts, ways, draws, room, at_end):
    """Return a Trial of the segments `stretch` after each of `fills`, for each of the Ways.

    starts: where ranking begins after each of the fills
    draws: how many fills of a gap of known length are drawn
    room: most tokens of a text. Texts that are longer are left out, or cut to fit if at_end
    """
    found = []
    for (fill, start), way in itertools.product(zip(fills, starts), ways):
        length = way.length
        if at_end:
            length = min(length, room - len(fill.ids))
        known = [with_length(segment, length) for segment in stretch]
        ids = list(fill.ids)
        gap_end = 0
        for segment, one in zip(stretch, known):
            is_told = is_open(segment) and way.ids is not None
            ids += way.ids if is_told else to_ids([one], tokenizer, model.mask_id)
            if is_open(segment):
                gap_end = len(ids)
        if len(ids) <= room:
            count = max(1, (way.draws or draws) // len(fills))
            if way.ids is not None and model.mask_id not in ids[len(fill.ids) :]:
                count = 1  # there is nothing to draw
            tried = Fill(fill.segments + known, ids, fill.logp)
            found.append(Trial(start, tried, count, gap_end, length, fill.logp))
    return found


def ranked_as_whole(model, tried, first):
    """Return Trials of the last stretch of documents of given lengths, ranked from `first` on.

    What earlier stretches found counts while lengths are compared, but not in the ranking.
    """
    of_length = length_logp(model)
    found = []
    for trial in tried:
        expected = trial.expected + of_length[len(trial.fill.ids)].item()
        fill = trial.fill._replace(logp=0.0)
        found.append(trial._replace(start=first, fill=fill, expected=expected))
    return found


def most_calls(model, tried, n, device):
    """Return how many calls it takes at most to compare Trials, and to draw and rank n of them."""
    size = call_size(model, device)
    rows = sum(sorted(trial.count for trial in tried)[-n:])
    longest = max(len(trial.fill.ids) - trial.start for trial in tried)
    # Guidance (--cfg) calls twice.
    drawing = 2 * QUICK_STEPS * model.objective.n_texts * math.ceil(rows / size)
    return math.ceil(len(tried) / size) + drawing + math.ceil(rows * longest / size)


def promising(model, trials, n, after, device):
    """Return the n Trials whose length is the most promising by `length_scores`, in their order.

    after: the id that follows the texts. Trials of several beginnings are compared by the logp of
    these as well. What `expected` holds is added to the score of a length, and of the fills later.
    """
    L = model.config.block_size
    x = to_rows(trials, L, after, device)
    gap = (x == model.mask_id) & inside_of(trials, L).to(device)
    ends = torch.tensor([trial.gap_end for trial in trials], device=device)[:, None]
    at = torch.arange(L, device=device)
    known = inside_of(trials, L).to(device) & ~gap & (at >= ends) & (at < ends + N_AFTER)
    best, next_token = length_scores(model, x, gap, known)
    expected = next_token + torch.tensor([trial.expected for trial in trials], dtype=torch.float64)
    chosen = (best + expected).argsort(descending=True, stable=True)[:n].sort()[0].tolist()
    return [trials[i]._replace(expected=expected[i].item()) for i in chosen]


def best_drawn(found, tried, drawn, n):
    """Return those of the rows that `distinct` found which show the n most promising texts.

    drawn: (B, L) float64, log p of each token that was drawn beside all others, else NaN. Its sum
    and what is `expected` of the length estimate the log p that fills are ranked by. The most
    promising come first.
    """
    expected = torch.tensor([trial.expected for trial in tried], dtype=torch.float64)
    score = (drawn.nansum(1) + expected).tolist()
    found = sorted(found, key=lambda row: -score[row[0]])
    texts = dict.fromkeys(text for *_, text in found)
    kept = set(itertools.islice(texts, n))
    return [row for row in found if row[-1] in kept]


def hypotheses(
    model, tokenizer, segments, n, draw, device, max_gap=16, draws=16, expect=None, reach=None
):
    """Find the n likeliest of many fills of a template; return distinct Fills, the best first.

    segments: the template, as from templates.parse
    draw: function draw(x, fill, may_end, quick), called once for each stretch (see cut_stretches).
        It draws the positions fill (B, L) bool of x (B, L) and returns x. quick: the stretch has a
        gap of unknown length, of which many lengths are tried with few draws each. It also gets
        `allowed` (as from templates.allowed_by_row) if a gap's first token must begin with a space,
        `expect(calls)` if expect is given, and `drawn` (B, L) of NaN, which gets log p of each
        token that is drawn, if the fills of a few lengths are compared by that
    max_gap: largest length tried for a gap of unknown length
    draws: number of draws for each stretch and length; fewer for long gaps
    expect: called as expect(calls, stretch, stretches) with the largest number of network calls
        that stretch number `stretch` may still take
    reach: tokens after the last gap that count in the ranking; None: all

    Of more than 4 lengths (n, if that is more) one call over all of them says which to fill, see
    lengths.py, and of these fills those are ranked that are the likeliest by their draws.

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
        at_end = stretch == [None] and is_last and not abilities.knows_lengths(model)
        several = has_open(stretch) and not at_end
        # 1. Try every length of the gap after every fill of the previous stretches; each text, if
        # the gap has a list of them.
        ways = [Way(1)]  # of no effect: the stretch has no gap of unknown length
        if several:
            ways = ways_to_fill(next(filter(is_open, stretch)), max_gap, draws)
        elif at_end:
            ways = [Way(max_gap)]
        tried = trials(model, tokenizer, stretch, fills, starts, ways, draws, room, at_end)
        if is_last and abilities.knows_lengths(model):
            tried = ranked_as_whole(model, tried, first)
        # 2. Of many lengths, one call over all of them says which to fill. Not of a gap that must
        # match: the call knows nothing of its pattern.
        after = model.objective.pad_id if is_last else model.mask_id
        n_chosen = max(N_LENGTHS, n, 2 * len(fills))
        is_chosen = several and None in stretch and len(tried) > n_chosen
        if is_chosen:
            # Few lengths are left, so that there are more draws for each.
            share = 9 * draws / 4 / len(fills)
            tried = [
                trial._replace(count=max(1, int(share / (trial.length + 5)))) for trial in tried
            ]
            tell(number, 0, most_calls(model, tried, n_chosen, device))
            tried = promising(model, tried, n_chosen, after, device)
        # 3. Draw.
        tried = [trial for trial in tried for _ in range(trial.count)]
        inside = inside_of(tried, L)
        sequences = sum(len(trial.fill.ids) - trial.start for trial in tried)  # to rank, at most
        later = math.ceil(sequences / call_size(model, device))
        options = dict(expect=partial(tell, number, later)) if expect else {}
        templates = [trial.fill.segments for trial in tried]
        if allowed := allowed_by_row(templates, tokenizer, L):
            options["allowed"] = allowed
        if constraints := constraint.by_row(templates):
            options["constraints"] = constraints
        if is_chosen:
            options["drawn"] = torch.full((len(tried), L), math.nan, dtype=torch.float64)
        x = to_rows(tried, L, after, device)
        x = draw(x, inside.to(device), at_end, several, **options)
        # 4. Keep each sequence of ids once; several may show the same text.
        end = None
        if is_last and is_open(segments[-1]) and not at_end:
            end = line_end(model, tokenizer)
        kept = distinct(x.tolist(), tried, at_end, tokenizer, end)
        n_kept = n if is_last else max(n, 8)
        if is_chosen:
            kept = best_drawn(kept, tried, options["drawn"], max(n_kept, 3) + N_SPARE)
        rows, starts, fills, texts = zip(*kept)
        x = x[list(rows)]
        if end is not None:
            for row, fill in zip(x, fills):
                row[: len(fill.ids)] = torch.tensor(fill.ids)
        # 5. Rank them, and continue with the best.
        stop = torch.tensor([len(fill.ids) for fill in fills])
        known = torch.tensor([fill.logp for fill in fills], dtype=torch.float64)
        if is_last and abilities.knows_lengths(model):
            known += length_logp(model)[stop]
        if is_last and reach is not None and isinstance(segments[-1], str):
            stop -= max(0, len(segments[-1].ids) - reach)
        n_texts = len(set(texts))
        n_kept = min(n_texts, n_kept)
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
