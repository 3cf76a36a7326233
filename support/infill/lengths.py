"""How likely the lengths of a gap are: a score for each length, from a single call.

The network sees the text with the gap and the first N_AFTER tokens after it masked. The score adds

    the log-probability of the first token after the gap, in its own distribution
    the largest log-probability at each mask of the gap, of fills that may stand there

The first one would be too sure if it were seen right behind its place: hence the masks after the
gap. The second needs no calibration by length, as the mean entropy in the gap does (CAL,
2602.00476): like log p(gap, text after it | text before it), by which fills are ranked, it falls
with every token. So it serves every model. results/lengths.md compares it with other statistics.
"""

import math
import time

import torch

from nanomdlm.support.infill.model_calls import call_size, device_of, groups, logits_at
from nanomdlm.support.infill.templates import to_ids

N_AFTER = 4  # tokens after the gap that are masked as well


@torch.no_grad()
def score_lengths(model, shapes, number, may_draw=None, deadline=math.inf):
    """[(log p of the token after it, the largest log p inside)] of gap `number` of some shapes.

    shapes: lists of segments, whose gaps have known lengths. The sum is the score of a length.
    may_draw: (V,) bool, the ids that are text; None: all. deadline: time.monotonic() after which no
    further call begins; the list is shorter then
    """
    scores = []
    device = device_of(model)
    # In groups: the logits of all lengths together may need gigabytes.
    for some in groups(model, len(shapes), device, call_size(model, device)):
        if scores and time.monotonic() > deadline:
            break
        rows = [masked(model, shape, number) for shape in shapes[some]]
        places = [gap + after[:1] for _, gap, after in rows]
        x = torch.tensor([ids for ids, _, _ in rows])
        row = torch.arange(len(rows)).repeat_interleave(torch.tensor(list(map(len, places))))
        at = torch.tensor([i for each in places for i in each], dtype=torch.int64)
        logp = logits_at(model, x, row, at, device).double().log_softmax(-1).cpu()
        for (_, gap, after), shape, own in zip(rows, shapes[some], logp.split([*map(len, places)])):
            token = ids_of(model, shape)[after[0]] if after else 0
            next_token = own[-1, token].item() if after else 0.0
            inside = own[: len(gap)]
            if may_draw is not None:
                inside = inside.masked_fill(~may_draw, -math.inf)
            scores.append((next_token, largest(shape[number], inside)))
    return scores


def ids_of(model, shape):
    """The ids of a shape, a whole context."""
    ids = to_ids(shape, model.mask_id)
    return ids + [model.objective.pad_id] * (model.config.block_size - len(ids))


def masked(model, shape, number):
    """(ids with the tokens after a gap masked, the positions of the gap, of these tokens)."""
    ids = ids_of(model, shape)
    sizes = [segment.size for segment in shape]
    begin = sum(sizes[:number])
    end = begin + sizes[number]
    after = [at for at in range(end, min(end + N_AFTER, sum(sizes))) if ids[at] != model.mask_id]
    for at in after:
        ids[at] = model.mask_id
    return ids, [*range(begin, end)], after if after[:1] == [end] else []


def largest(gap, logp):
    """The largest sum over the positions of a gap, logp (n, V), of fills that it may have."""
    if not gap.pattern:
        return logp.amax(1).sum().item()
    if not gap.length:  # the automaton, or the list, has an empty text
        return 0.0
    if gap.spelled:
        fills = torch.tensor([ids for ids in gap.spelled if len(ids) == len(logp)])
        return logp.gather(1, fills.T.reshape(len(logp), -1)).sum(0).max().item()
    automaton = gap.automaton
    best = torch.where(automaton.accepts, 0.0, -torch.inf).double()
    for row in reversed(class_largest(automaton, logp)):  # the best way from each state on
        best = (row[automaton.follows] + best[automaton.after]).amax(1)
    return best[0].item()


def class_largest(automaton, logp):
    """(n, C + 1): the largest of logp (n, V) in each class of tokens, -infinity for the last."""
    none = logp.new_full((len(logp), automaton.C + 1), -torch.inf)
    return none.scatter_reduce(1, automaton.classes.expand(len(logp), -1), logp, "amax")
