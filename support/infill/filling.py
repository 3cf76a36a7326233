"""Fills a template: finds lengths for its gaps, and their most likely fills, with proof.

1. One call over all lengths of a gap of unknown length says which are likely (lengths.py). (Of
   models that do not see what follows, a good fill of each length does.)
2. For each of these, log p(after | before) with masks in the gaps: a chain rule over the next REACH
   tokens of given text. Tokens that are further away tell hardly anything about a length.
3. One search for the likeliest fills, whatever their length (search.py): by log p(gap, after |
   before) = log p(after | before) + log p(gap | before, after). The chain rule holds in any order.

With known lengths, it begins at 3, with log p(gap | both sides). A gap at the end of the text has
all of its lengths in one search, because its fills end with [END] or a line break. If there is too
much to fill for a search, a sampler draws some fills, which are then ranked.
"""

import functools
import heapq
import itertools
import math
import time
from collections import Counter
from typing import NamedTuple

import torch

from nanomdlm.support import abilities
from nanomdlm.support.cli.python_arguments import check_tokenizer
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import from_left, search
from nanomdlm.support.infill.filters import Filter, drawable
from nanomdlm.support.infill.lengths import score_lengths
from nanomdlm.support.infill.model_calls import call_size, device_of, groups, next_logp
from nanomdlm.support.infill.templates import (
    Gap,
    Text,
    check_lengths,
    encode_segments,
    joined,
    to_ids,
    to_texts,
)
from nanomdlm.support.run.calibration import calibrated

LIMIT = 400  # sequences in which a search must end
N_REFINED = 8  # lengths of a gap, if there are several gaps, of which one fill is found
N_LENGTHS = 3  # lengths that are searched, of all those that one call compares
LONG = 24  # tokens to fill beyond which a sampler draws the fills
DRAWS = 8  # fills that it draws
MAX_GAP = 16  # tokens of the longest fill of a gap, by default
MAX_LINE = 32  # of one that must match and is filled from left to right, such as a line of code
REACH = 8  # tokens of text after the last gap that compare lengths
MOST_SHAPES = 64  # combinations of the lengths of several gaps that are kept, the likeliest


class Candidate(NamedTuple):
    """A filled template."""

    text: str
    fills: tuple  # the text of each gap
    p: float  # p(gap | both sides) among fills of its length; p(gap, after | before) if joint
    logp: float  # nats: what candidates are ranked by, see Candidates.compares_lengths
    segments: list  # of the template, with the lengths of all gaps
    ids: list  # of the whole text
    parts: list  # (text, whether it was filled) of each segment
    drawn: list  # log p of each id when it was filled, None where it was given


class Candidates(list):
    """Candidates, the likeliest first, and what is known of the other fills.

    Joint: of a model that does not see all text after the gaps, which predicts that text as well.

    proven            no other fill, of the lengths that were searched, is likelier than the last
    bound             log p of every other fill is at most this, nats
    excluded          the probability of fills that are not allowed (and, if joint, of other
                      text after them) that the search has met; of the best one's length
    rest              that of all fills of this length that are neither listed nor excluded
    compares_lengths  whether `logp` is log p(gap, after | before); else log p(gap | both sides)
    sequences         sequences that the network has computed
    seconds           of all this
    """

    proven = False
    bound = 0.0
    excluded = 0.0
    rest = 0.0
    compares_lengths = False
    sequences = 0
    seconds = 0.0


def finish(fillings, limit=LIMIT):
    """Search in several Fillings, in shared network calls, up to the first of their deadlines."""
    if fillings:
        deadline = min(one.deadline for one in fillings)
        by_search = {id(one.search): one for one in fillings}
        search.run(
            fillings[0].model,
            [one.search for one in fillings],
            limit,
            deadline,
            lambda one: by_search[id(one)].update(1),
        )


class Filling:
    """A template that is being filled, with its n likeliest fills.

    segments: the template, as from templates.parse. max_gap: the longest fill of a gap of unknown
    length, in tokens (0: see longest_gap). draw(segments, n): a sampler's fills of a template whose
    lengths are known, as sample.Written. update(n): called when the network has seen n more texts.
    deadline: time.monotonic() after which the search stops. reach: tokens of text after a gap that
    rank its fills, if it is filled from left to right

    Raises UserError if no fill can be shown.
    """

    def __init__(
        self,
        model,
        tokenizer,
        segments,
        n,
        max_gap=0,
        draw=None,
        update=lambda n: None,
        deadline=math.inf,
        reach=from_left.REACH,
    ):
        check_tokenizer(tokenizer, model)
        self.began = time.monotonic()
        self.deadline = deadline
        self.model = calibrated(model)
        self.tokenizer = tokenizer
        self.update = update
        self.sequences = 0  # that the network has seen before the search
        segments = encode_segments(segments, tokenizer)
        max_gap = longest_gap(model, segments, max_gap)
        check_lengths(segments, max_gap)
        is_endless = segments[-1] == Gap() and not abilities.knows_lengths(model)
        if not is_endless and is_from_left(model, segments):
            frames = frames_of_lengths(self.model, tokenizer, segments, max_gap)
            self.is_drawn, self.is_whole, self.compares_lengths = False, True, True
            self.search = from_left.FromLeft(frames, n, reach)
            return
        shapes, is_cut = likely_shapes(
            self.model, tokenizer, segments, max_gap, is_endless, self.count, deadline
        )
        if self.is_late():
            shapes = shapes[:1]
        draws = None
        if draw and not is_endless:
            draws = functools.partial(self.draw, draw)
        frames = [frame_of(self.model, tokenizer, shape, is_endless, draws) for shape in shapes]
        self.is_drawn = any(frame.is_drawn for frame in frames)
        self.is_whole = not (self.is_drawn or is_cut)
        self.compares_lengths = len(frames) > 1 or frames[0].is_joint
        if len(frames) > 1 and not frames[0].is_joint:
            for frame, logp in zip(frames, after_given_before(self.model, frames, self.count)):
                frame.start = -logp
        self.search = search.Search(frames, n)

    def count(self, n):
        self.sequences += n
        self.update(n)

    def draw(self, draw, segments):
        """What a sampler draws: lists of ids."""
        made = draw(segments, DRAWS)
        self.count(sum(one.calls for one in made))
        return [one.ids for one in made]

    def is_late(self):
        """Whether half of the time is over; the rest is reserved for one length."""
        return 2 * time.monotonic() > self.began + self.deadline

    def finish(self, limit=LIMIT):
        """Search until the list is proven, or a limit is reached; returns the Candidates."""
        finish([self], limit)
        return self.candidates()

    def candidates(self):
        """The Candidates that the search has found so far."""
        fills = self.search.fills
        if not fills:
            self.raise_why()
        made = Candidates(map(self.candidate, fills))
        best = fills[0].frame
        made.proven = self.search.is_proven and self.is_whole
        made.excluded = self.search.excluded[best]
        made.rest = self.search.rest(best)
        made.bound = self.search.bound
        if self.is_drawn:  # any other fill may have all the rest
            made.excluded = 0.0
            rests = [1.0] * len(self.search.frames)
            for one in fills:
                rests[one.frame] -= one.p
            made.rest = rests[best]
            made.bound = max(
                math.log(max(rest, 1e-300)) - frame.start
                for rest, frame in zip(rests, self.search.frames)
            )
        made.compares_lengths = self.compares_lengths
        made.sequences = self.sequences + self.search.sequences
        made.seconds = time.monotonic() - self.began
        return made

    def candidate(self, found):
        frame = self.search.frames[found.frame]
        segments, ids = frame.filter.placed(found.ids)
        if not segments[-1] and segments[-1].size:  # what ends the text is not shown
            segments = segments[:-1]
        ids = ids[: total(segments)]
        texts = to_texts(segments, ids, self.tokenizer)
        drawn = [None] * len(ids)
        for at, value in zip(frame.open, found.drawn):
            if at < len(ids):
                drawn[at] = value
        fills = tuple(text for text, is_filled in texts if is_filled)
        return Candidate(joined(texts), fills, found.p, found.logp, segments, ids, texts, drawn)

    def raise_why(self):
        """Raise UserError where no fill was found."""
        for segment in self.search.frames[0].filter.segments:
            if segment.is_gap and segment.pattern:
                what = f"no fill of {segment.pattern[:40]!r} was found that is shown as it matches"
                raise UserError(f"{what}; put a space beside the gap, or leave the pattern out")
        raise UserError("no fill was found within the given time or number of calls; give more")


# ---- Lengths
def is_from_left(model, segments):
    """Whether the search of from_left.py fills these segments: one gap of unknown length."""
    gaps = [segment for segment in segments if segment.is_gap]
    return abilities.is_causal(model) and len(gaps) == 1 and gaps[0].is_open


def longest_gap(model, segments, max_gap):
    """The longest fill of a gap of unknown length, in tokens: max_gap, or if 0 a default."""
    gaps = [segment for segment in segments if segment.is_open]
    if max_gap or not gaps:
        return max_gap or MAX_GAP
    is_line = is_from_left(model, segments) and gaps[0].pattern
    return MAX_LINE if is_line else MAX_GAP


def frames_of_lengths(model, tokenizer, segments, max_gap):
    """A search.Frame for each length of the only gap."""
    if segments[-1].is_open:
        segments = ended(model, tokenizer, segments)
    (i,) = [i for i, segment in enumerate(segments) if segment.is_gap]
    room = model.config.block_size - total(one for one in segments if not one.is_gap)
    lengths = [length for length in segments[i].lengths(max_gap) if length <= room]
    if not lengths:
        what = f"no fill leaves room for the whole text in {model.config.block_size} tokens"
        raise UserError(f"{what}; shorten it")
    shapes = ([*segments[:i], segments[i].of_length(m), *segments[i + 1 :]] for m in lengths)
    return [frame_of(model, tokenizer, shape, False, None) for shape in shapes]


def likely_shapes(model, tokenizer, segments, max_gap, is_endless, count, deadline):
    """(the likeliest shapes, the best first: lists of segments whose gaps have known lengths;
    whether combinations of lists were left out, because there are too many).

    Each gap's lengths are scored with the others of a usual length; scores of several gaps add up.
    is_endless: the last gap, of any length, is at the end of the text. deadline: time.monotonic()
    after which lengths are no longer compared
    """
    L = model.config.block_size
    options = {i: s.lengths(max_gap) for i, s in enumerate(segments) if s.is_open}
    known = list(segments)
    if is_endless:
        options.pop(len(segments) - 1)
        known[-1] = Gap(1)
    elif segments[-1].is_open:
        known = ended(model, tokenizer, known)
    for i, lengths in options.items():
        usual = min(lengths, key=lambda length: abs(length - 4))
        known[i] = segments[i].of_length(usual)
    if total(known) > L:
        for i, lengths in options.items():
            known[i] = segments[i].of_length(min(lengths))
    room = L - sum(s.size for i, s in enumerate(known) if i not in options)
    n_options = math.prod(len(lengths) for lengths in options.values())
    # This many for each combination of the lengths of lists, whose texts are all compared.
    n_kept = N_LENGTHS + len(options) - 1
    listed = [k for k, i in enumerate(options) if segments[i].spelled]
    n_listed = math.prod(len(options[i]) for i in options if segments[i].spelled)
    combined = {(): 0.0}  # lengths of the gaps so far -> score
    is_cut = False
    later = sum(map(min, options.values()))  # tokens that the gaps to come need
    for i, lengths in options.items():
        later -= min(lengths)
        scores = dict.fromkeys(lengths, 0.0)
        if n_options > n_listed * n_kept:
            is_refined = len(options) > 1
            gap = (i, segments[i])
            scores = scores_of(model, tokenizer, known, gap, lengths, is_refined, count, deadline)
        combined = {
            (*before, m): score + scores[m]
            for before, score in combined.items()
            for m in scores
            if sum(before) + m + later <= room
        }
        if len(combined) > MOST_SHAPES:
            best = heapq.nsmallest(MOST_SHAPES, combined, key=lambda m: (-combined[m], m))
            combined = {lengths: combined[lengths] for lengths in best}
            is_cut = is_cut or bool(listed)
    if not combined:
        raise UserError(f"no fill leaves room for the whole text in {L} tokens; shorten it")
    shapes = []
    taken = Counter()
    for lengths in sorted(combined, key=lambda lengths: (-combined[lengths], lengths)):
        of_lists = tuple(lengths[k] for k in listed)
        taken[of_lists] += 1
        if taken[of_lists] > n_kept:
            continue
        shape = list(known)
        for i, m in zip(options, lengths):
            shape[i] = segments[i].of_length(m)
        if is_endless:
            shape[-1] = Gap(max(1, min(max_gap, L - total(shape[:-1]))))
        shapes.append(shape)
    return shapes, is_cut


def scores_of(model, tokenizer, known, gap, lengths, is_refined, count, deadline):
    """{length: score} of a gap, (its number, the segment), the others of a usual length.

    is_refined: of the likely lengths, by a good fill of each. Gaps that must be filled together
    leave less room for the errors of one call, and a model that does not see what follows has not
    learned to predict it in one. After the deadline, it is less exact
    """
    L = model.config.block_size
    number, segment = gap
    before, after = known[:number], known[number + 1 :]
    shapes = {m: [*before, segment.of_length(m), *after] for m in lengths}
    shapes = {m: shape for m, shape in shapes.items() if total(shape) <= L}
    sees_after = abilities.fills_gaps(model)
    if sees_after:
        may_draw = drawable(tokenizer, model.vocab_size)
        found = score_lengths(model, [*shapes.values()], number, may_draw, deadline)
        count(len(found))
        next_token = {m: terms[0] for m, terms in zip(shapes, found)}
        scores = {m: sum(terms) for m, terms in zip(shapes, found)}
        if not is_refined or time.monotonic() > deadline:
            return scores
        likely = sorted(scores, key=lambda m: -scores[m])[:N_REFINED]
    else:
        next_token = dict.fromkeys(shapes, 0.0)
        scores = dict.fromkeys(shapes, -math.inf)
        likely = [*shapes]
    searches = []
    for m in likely:
        frame = frame_of(model, tokenizer, hidden(model, shapes[m], number), False, None)
        frame.after = frame.after[:REACH]
        searches.append(search.Search([frame], 1))
    # Enough for one fill of each, and some more.
    reach = 0 if sees_after else REACH
    search.run(model, searches, max(likely) + reach + 4, deadline, lambda one: count(1))
    return {
        m: next_token[m] + one.fills[0].logp if one.fills else scores[m]
        for m, one in zip(likely, searches)
    }


def hidden(model, segments, number):
    """The segments with text that is hidden from the network in place of all gaps but one."""
    made = []
    for i, segment in enumerate(segments):
        if segment.is_gap and i != number:
            segment = Text("", [model.mask_id] * segment.size)
        elif not segment.is_gap:  # hidden text has no token that could begin with its space
            segment = Text(segment, segment.ids, segment.lends_space and i + 1 == number)
        made.append(segment)
    return made


def ended(model, tokenizer, segments):
    """The segments with what ends a text: a gap of another kind than [___] may be its end."""
    if abilities.knows_lengths(model):
        return segments
    if tokenizer.end_id is not None:
        return [*segments, Text("", [tokenizer.end_id])]
    try:
        ids = tokenizer.encode_lossless("\n", after_gap=True)
    except UserError:
        return segments
    return [*segments, Text("", ids)] if len(ids) == 1 else segments


def total(segments):
    return sum(segment.size for segment in segments)


# ---- Frames
def frame_of(model, tokenizer, segments, is_endless, draw):
    """The search.Frame of segments whose gaps have known lengths."""
    L = model.config.block_size
    x = to_ids(segments, model.mask_id)
    is_gap = [segment.is_gap for segment in segments for _ in range(segment.size)]
    ends = [*itertools.accumulate(segment.size for segment in segments)]
    where = [i for i, segment in enumerate(segments) if segment.is_gap]
    gaps = (ends[where[0]] - segments[where[0]].size, ends[where[-1]])
    open = [at for at, gap in enumerate(is_gap) if gap]
    after = [
        at
        for at, gap in enumerate(is_gap)
        if at >= gaps[0] and not gap and x[at] != model.mask_id  # not of a `hidden` gap
    ]
    only = []  # lists of texts, and fills that were drawn
    k = 0
    for segment in segments:
        if segment.is_gap and segment.spelled:
            only.append((k, [ids for ids in segment.spelled if len(ids) == segment.length]))
        k += segment.size if segment.is_gap else 0
    n_free = sum(one.size for one in segments if one.is_gap and not one.spelled)
    is_drawn = n_free > LONG and draw is not None
    if is_drawn:
        fills = {tuple(ids[at] for at in open) for ids in draw(segments)}
        only.append((0, sorted(fills)))
    size = len(x)
    x += [model.objective.pad_id] * (L - size)
    filter = Filter(model, tokenizer, segments, open, only, is_endless)
    frame = search.Frame(model, x, open, filter, after, gaps, size, is_ordered=is_endless)
    frame.is_drawn = is_drawn
    return frame


# ---- Several lengths
def length_logp(model):
    """log p of each document length, (L + 1,) float64, of models that are given the length.

    Lengths count once more than they occur in the training data, so that none has probability 0.
    """
    counts = model.length_counts.double().cpu() + 1
    return (counts / counts.sum()).log()


def after_given_before(model, frames, count):
    """log p(after | before) of each Frame, with masks in its gaps, nats: a list."""
    device = device_of(model)
    x = torch.tensor([frame.x for frame in frames], device=device)
    places = [places_after(frame) for frame in frames]
    row = torch.arange(len(frames)).repeat_interleave(torch.tensor([*map(len, places)]))
    at = torch.tensor([i for each in places for i in each], dtype=torch.int64)
    sums = torch.zeros(len(frames), dtype=torch.float64)
    for some in groups(model, len(row), device, call_size(model, device)):
        logp = next_logp(model, x, row[some].to(device), at[some].to(device))
        sums.index_add_(0, row[some], logp)
        count(len(logp))
    if abilities.knows_lengths(model):
        sums += length_logp(model)[[frame.size for frame in frames]]
    return sums.tolist()


def places_after(frame):
    """The positions of given text between the gaps, and of REACH tokens after the last one."""
    begin, end = frame.gaps
    return [at for at in range(begin, min(frame.size, end + REACH)) if at not in frame.open]
