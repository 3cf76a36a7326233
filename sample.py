"""Sample from a trained model: generate text, continue a prompt, fill gaps, watch it happen.

    python sample.py                                    # a text from nothing
    python sample.py "ROMEO:" --length=600              # continue a beginning
    python sample.py "To be███"                         # each █ is a token
    python sample.py --infill "To [___], or not to be"  # an unknown length
    python sample.py --fix=letter.txt                   # find mistakes, show what to change
    python sample.py --watch --html=page.html           # see it, and keep it

One loop, two moves. Reveal: draw some of the tokens that are still [MASK]. Correct: mask some that
were drawn, and draw them again beside all the others. What is drawn in one call is far apart, where
tokens hardly depend on each other. Without --out_dir and a run in out/, it uses weights/.
"""

from support import cli, terminal

cli.start(__name__)

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F

import mdlm
from studies import word_statistics
from support import abilities, arguments, outputs, progress
from support.data.tokenizer import Tokenizer, tokenizer_from_json
from support.devices import pick_device
from support.ensemble import read_newest
from support.errors import NoEffect, UserError
from support.infill import adaptive, constraint, fixing, proofreading, templates
from support.infill.calls import Memo, call_size, end_documents, group_size, groups, predict
from support.infill.constraint import ConstrainedGap, ask_ahead, draw_matching
from support.infill.probabilities import (
    TokenLogprob,
    as_json,
    drawn_in_search,
    note_draws,
    token_logprobs,
)
from support.infill.probabilities import logprobs as logprobs
from support.infill.probabilities import score as score
from support.infill.search import QUICK_STEPS, hypotheses
from support.infill.templates import (
    has_open,
    joined,
    of_prompt,
    parse,
    to_ids,
    to_texts,
)
from support.kernels.reference import philox_words
from support.numerics import draw, reversed_bits, top2_margin, topk_mask
from support.settings import (
    Amount,
    Bounds,
    Context,
    Count,
    Natural,
    Reads,
    Seed,
    Share,
    Text,
    Writes,
    check_clashes,
    names_of,
    plain,
    shown,
)
from support.settings import check as check_settings
from support.settings import parse as parse_settings
from support.training import scores
from support.training.checkpoint import default_run, find_checkpoint
from support.web import viewer

DOUBT_PER_CALL = (
    0.3  # nats of doubt that a token gains with each call after its own (results/sampling.md)
)


class Order(NamedTuple):
    """What to reveal first: the masks with the highest score, equal ones by a random number."""

    meaning: str
    # (i (B, T): which mask of the text it is, u (B, 1) in [0, 1)) -> (B, T)
    score: Callable = lambda i, u: 0 * i
    network_first: bool = False  # then (log p (n, V), tokens (n,) drawn from it) -> (n,)


ORDERS = {
    "spread": Order("far apart", lambda i, u: -reversed_bits((i + (u * 2**16).long()) % 2**16)),
    "ancestral": Order("each alike, the exact reverse process"),
    "random": Order("any, a fixed number"),
    "left_to_right": Order("the leftmost", lambda i, u: -i),
    "one_shot": Order("all in one step"),
    # Draw at every mask, keep the likeliest draws (MaskGIT, 2202.04200; LLaDA, 2502.09992).
    "confidence": Order("likely draws", lambda p, token: p.gather(1, token[:, None])[:, 0], True),
    "max_prob": Order("a likely best token", lambda p, token: p.amax(1), True),
    "margin": Order(
        "a best token far before the next", lambda p, token: top2_margin(p.exp()), True
    ),
    "entropy": Order("low entropy", lambda p, token: -torch.special.entr(p.exp()).sum(1), True),
}
MEANINGS = "; ".join(f"{name}: {order.meaning}" for name, order in ORDERS.items())
OrderName = Literal[("auto", *ORDERS)]
Probability = Annotated[float, Bounds(1e-9, 1)]
Factor = Annotated[float, Bounds(0, 100)]
Caution = Annotated[float, Bounds(-1000, 1000)]


@dataclass
class SamplerSettings:
    """How to write it."""

    steps: Natural = 0  # network calls for a context of text at most (0: 32, or 8 per block)
    correct: str = "auto"  # how many of them redraw tokens, after all are drawn; auto: half
    redraw: Literal["low_confidence", "sweep"] = "low_confidence"  # least likely, or all in turn
    spacing: Count = 3  # least distance between tokens that one call redraws
    order: OrderName = "auto"  # what to reveal first (below)
    threshold: Share = 0.0  # reveal all above this probability, and at least one (0: off)
    entropy_bound: Amount = 0.0  # reveal while the entropies' sum is at most this, in nats (0: off)
    block: Natural = 0  # finish this many tokens before the next (0: all, or half a context)
    temperature: Factor = 1.0  # below 1: likelier tokens; 0: the likeliest; above 1: varied ones
    top_k: Natural = 0  # draw only from the k likeliest tokens (0: from all)
    top_p: Probability = 1.0  # draw only from the likeliest tokens with this total probability
    cfg: Factor = 0.0  # strength of guidance by the given text (0: none); doubles the calls
    seed: Seed = 0  # of all random numbers; the same seed gives the same text


@dataclass
class TextFlags:
    """What to write."""

    out_dir: Reads = ""  # run or checkpoint, or several, A,B: their mean (default: out or weights/)
    prompt: Text = ""  # beginning of the text, which stays as it is
    infill: str = ""  # text with gaps: █ is a token to fill, [___] a gap of any length (-: stdin)
    batch: Reads = ""  # file with a text with gaps on each line (-: stdin); writes JSON lines
    length: Natural = 0  # tokens of the text, prompt included (0: the context, or drawn)
    num_samples: Natural = 0  # texts to write (0: one; with gaps the likeliest)
    candidates: Natural = 0  # show this many of the likeliest fills, with scores (0: 3)
    max_gap: Context = 16  # longest fill of [___], in tokens
    fix: Reads = ""  # proofread this text file (-: stdin); the file stays as it is
    output: Writes = ""  # write the text of --fix with its changes here (-: stdout)
    caution: Caution = 0.0  # nats that a change of --fix must gain beyond the default
    compare: str = ""  # NAME=VALUE,VALUE,...: a table of texts with each value of a setting


@dataclass
class OutputFlags:
    """Where to compute, and how to show it."""

    device: str = "auto"  # cpu, cuda, cuda:1 or mps; auto: a GPU if there is one
    trust_remote_code: bool = False  # allow custom code from the checkpoint
    watch: bool = False  # show the unmasking in the terminal
    html: Writes = ""  # write a page that plays the unmasking to this file
    json: Writes = ""  # write a JSON object per text to this file (-: stdout)
    logprobs: Natural = 0  # add log-probabilities to JSON lines, with this many likeliest (0: none)


@dataclass
class Options(SamplerSettings, TextFlags, OutputFlags):
    """All flags."""


GROUPS = (TextFlags, SamplerSettings, OutputFlags)
SETTINGS = [field.name for field in fields(SamplerSettings)]


class Step(NamedTuple):  # what a step of `unmask` did to a batch
    number: int  # 1 for the first
    x: torch.Tensor  # (B, T) ids after it
    drawn: torch.Tensor  # (B, T) bool: revealed or corrected in this step
    logp: torch.Tensor  # (n, V) log-probabilities at the drawn positions, at temperature 1
    calls: torch.Tensor  # (B,) network calls so far


def uniform(seed, step, samples, at):
    """For the tokens, ties and rows of a step: (B, n) float64 in [0, 1) each, Philox words of
    (seed, step, sample, position) at a range of n positions; 53 bits a token."""
    return next(uniforms(seed, range(step, step + 1), samples, at))


def uniforms(seed, steps, samples, at):
    """Yields `uniform` of each of a range of steps. Several are computed at once: of short texts
    the number of operations counts, not their size."""
    device = samples.device
    some = max(1, (1 << 12) // max(1, len(samples) * len(at)))
    for first in range(steps.start, steps.stop, some):
        streams = torch.arange(4 * first, 4 * min(first + some, steps.stop), device=device)
        words = philox_words(seed, streams[:, None, None], samples, len(at), at.start)
        high, low, *others = words.unflatten(0, (-1, 4)).unbind(1)  # (steps, B, n) each
        token = ((high << 21) | (low >> 11)).double() / 2**53
        yield from zip(token, *(word.double() / 2**32 for word in others))


def resolve(settings, model):
    """SamplerSettings without "auto"; UserError for what the model cannot follow."""
    settings = replace(settings, correct=str(plain(settings.correct)))
    check_settings(settings)
    config = model.config
    is_causal = abilities.is_causal(model)
    if settings.block > config.block_size:
        what = f"block={settings.block}"
        raise UserError(f"{what} is more than the context of {config.block_size}; give less")
    n = model.objective.n_texts
    is_adaptive = adaptive.rule_of(settings) is not None
    steps = 1 if settings.order == "one_shot" else settings.steps or max(32, 8 * n)
    unfit = ()
    if is_causal:
        if settings.order not in ("auto", "ancestral", "left_to_right"):
            raise UserError(f"order={settings.order}: an autoregressive model needs left_to_right")
        unfit = ("cfg", "threshold", "entropy_bound")
        kind = "an autoregressive model"
    elif n > 1:
        unfit = ("block", "cfg")
        kind = f"a model of --block_length={config.block_length}"
    for name in unfit:
        if getattr(settings, name) != getattr(SamplerSettings, name):
            raise UserError(f"{name} is not for {kind}; leave it out")
    if is_causal:
        return replace(settings, steps=steps, order="left_to_right", correct=0)
    if is_adaptive:
        settings = adaptive.resolve(settings, config.block_size)
        steps = settings.steps
    if settings.order == "auto":
        is_small = n > 1 and config.block_length <= 16
        settings = replace(settings, order="confidence" if is_small else "spread")
    if settings.correct == "auto":  # half of the calls reveal, but 4 to 16 (results/sampling.md)
        correct = max(0, steps - min(max(steps // 2, 4), 16 * n))
        return replace(settings, steps=steps, correct=correct)
    if not re.fullmatch("[0-9]{1,7}", settings.correct) or int(settings.correct) >= steps:
        accepted = f"auto, or a number below the {steps} steps"
        raise UserError(f"correct={shown(settings.correct)} is not accepted; give {accepted}")
    return replace(settings, steps=steps, correct=int(settings.correct))


def from_keywords(keywords, model):
    """Resolved SamplerSettings of a Python caller; UserError for what is wrong."""
    if unknown := keywords.keys() - set(SETTINGS):
        raise UserError(f"{shown(min(unknown))} is no setting; give {', '.join(SETTINGS)}")
    asked = SamplerSettings(**keywords)
    if asked.order == "one_shot" and plain(asked.steps) not in (0, 1):
        raise UserError(f"order=one_shot and steps={asked.steps} contradict each other; give one")
    return resolve(asked, model)


@dataclass
class Chunk:  # n positions of a text, filled and corrected before the next ones
    at: range  # the positions
    first: int  # number of its first step
    steps: int  # of the row that needs most
    gaps: torch.Tensor  # (B, n) bool: positions to fill
    reveals: torch.Tensor  # (B,) steps that reveal, at most if that is adaptive; after them
    corrections: torch.Tensor  # (B,) steps that correct
    index: torch.Tensor  # (B, n) the number of each gap in its row
    u: torch.Tensor  # (B, 2 + steps) random numbers of the row: for its order, for each sweep
    doubt: torch.Tensor  # (B, n) of each token that was drawn: its surprise, growing with age

    def age(self, drawn, logp, token):
        """After a call that drew the tokens (m,) from logp (m, V) at `drawn` (B, n)."""
        # Only in rows that drew: a call for other rows must not change what this one becomes.
        self.doubt += DOUBT_PER_CALL * drawn.any(1, keepdim=True)
        self.doubt[drawn] = -logp.gather(1, token[:, None])[:, 0].double()

    def begin_to_correct(self, s, masked):
        """After step s: rows without `masked` (B, n) positions correct from the next step on."""
        is_done = ~masked.any(1)
        self.reveals = torch.where(is_done, self.reveals.clamp(max=s + 1), self.reveals)

    def goes_on(self, s):
        """Whether step s has something to do in any row."""
        return bool((s < self.reveals + self.corrections).any())


def plan(model, fill, samples, settings):
    """Yields the Chunks of a text; fill (B, T): positions to fill."""
    L = model.config.block_size
    T = fill.shape[1]
    size = settings.block or max(1, T if T <= L else L // 2)
    context = min(T, L)  # of which settings.steps are the calls
    if model.objective.n_texts > 1:  # the chunks are the model's blocks
        size = L // model.objective.n_texts
        context = L
    first = 0
    for begin in range(0, T, size):
        end = min(begin + size, T)
        gaps = fill[:, begin:end].clone()
        n = gaps.sum(1)
        steps = max(1, settings.steps * end // context - settings.steps * begin // context)
        if abilities.is_causal(model):
            steps = end - begin
        # A single token would be drawn from the same distribution again.
        corrections = (n > 1) * (3 * n).clamp(max=steps * settings.correct // settings.steps)
        reveals = steps - corrections
        if settings.order != "ancestral":  # which may reveal nothing in a step
            reveals = reveals.minimum(n).clamp(min=1)
        index = gaps.cumsum(1) - 1
        u = uniform(settings.seed, first, samples, range(2 + steps))[2]
        doubt = torch.zeros(gaps.shape, dtype=torch.float64, device=fill.device)
        needed = max([0, *(reveals + corrections).tolist()])
        at = range(begin, end)
        yield Chunk(at, first, needed, gaps, reveals, corrections, index, u, doubt)
        first += steps


def count_to_reveal(settings, chunk, s, masked, noise):
    """(B,) how many of the `masked` positions (B, n) to reveal in step s of a chunk."""
    left = (chunk.reveals - s).clamp(min=1).double()  # (B,) steps that reveal, with this one
    after = (left - 1) / chunk.reveals  # the fraction of masks
    k = masked.sum(1) - (chunk.gaps.sum(1) * after + 1e-9).long()
    if adaptive.rule_of(settings):  # at least these: what the network says comes later
        k = k.clamp(min=1).minimum(masked.sum(1))
    if settings.order == "ancestral":  # the exact reverse process reveals each position on its own
        k = (masked & (noise < 1 / left[:, None])).sum(1)
    return k.clamp(min=0)


def to_reveal(settings, chunk, masked, noise, k, logp=None, token=None):
    """(B, n) bool: which of the `masked` positions to reveal, k (B,) in each row, at least where
    the number is adaptive.

    logp (m, V), token (m,): what the network says there, for orders that need it; all before.
    """
    order = ORDERS[settings.order]
    if order.network_first and logp is None:
        return masked
    if order.network_first:
        score = torch.zeros(masked.shape, dtype=torch.float64, device=masked.device)
        score[masked] = order.score(logp, token).double()
        if adaptive.rule_of(settings):
            k = k.maximum(adaptive.count(settings, score, masked))
    else:
        score = order.score(chunk.index, chunk.u[:, :1])
    return topk_mask(score, noise, masked, k)


def keep_best(settings, chunk, masked, corrected, noise, k, logp, token):
    """Of what was drawn at the positions `masked` and `corrected` (B, n), all corrections and the k
    (B,) best others: their positions (B, n), log p (m, V) and tokens (m,)."""
    if not masked.any():  # a call that corrects: all of it is kept
        return corrected, logp, token
    drawn = masked | corrected
    is_new = masked[drawn]
    new = to_reveal(settings, chunk, masked, noise, k, logp[is_new], token[is_new])
    keep = (new | corrected)[drawn]
    return new | corrected, logp[keep], token[keep]


def to_correct(settings, chunk, s, filled, noise):
    """(B, n) bool: which of the `filled` positions to draw again in step s.

    low_confidence  those more doubtful than all others nearer than --spacing
    sweep           every --spacing'th gap, all in turn: blocked Gibbs sampling, which leaves a
                    Markov chain of a lower order than --spacing exactly alone
    """
    c = s - chunk.reveals  # (B,) number of the correction
    is_turn = (c >= 0) & (c < chunk.corrections)
    if not is_turn.any():
        return torch.zeros_like(filled)
    filled = filled & is_turn[:, None]
    if settings.redraw == "low_confidence":
        doubt = (chunk.doubt + 1e-9 * noise).masked_fill(~filled, -math.inf)
        peak = F.max_pool1d(doubt[:, None], 2 * settings.spacing - 1, 1, settings.spacing - 1)[:, 0]
        return filled & (doubt == peak)
    sweep = (c.clamp(min=0) // settings.spacing)[:, None]
    turns = torch.arange(settings.spacing, device=c.device)
    turns = turns[reversed_bits(turns).argsort()]  # far from the last turn
    index = chunk.index + (chunk.u.gather(1, 1 + sweep) * settings.spacing).long()
    return filled & (index % settings.spacing == turns[c % settings.spacing][:, None])


def places(allowed, x):
    """Pairs (where (B, T) bool, ids (V,) bool) of an `allowed` of `unmask`, for all rows of x."""
    at = torch.arange(x.shape[1])
    return [((at == place).expand(x.shape), ids) for place, ids in (allowed or {}).items()]


def exclude(logits, drawn, at, forbid, allowed):
    """Set those of logits (n, V) to -inf that must not be drawn: ids in forbid, and others than in
    `allowed` (see `places`). drawn: (B, len(at)) bool, n places in the range `at` of positions."""
    if forbid:
        logits[:, forbid] = -math.inf
    for where, ids in allowed:
        here = where[:, at.start : at.stop].to(drawn.device)[drawn]
        logits[here] = logits[here].masked_fill(~ids.to(logits.device), -math.inf)


def has_effect(model, **settings):
    """Whether each of the settings, as in `generate`, does something; few calls leave no choice."""
    try:
        from_keywords(settings, model)
    except NoEffect:
        return False
    return True


def unmask(
    model: mdlm.Model,
    x: torch.Tensor,
    fill: torch.Tensor | None = None,
    samples: torch.Tensor | None = None,
    end_id: int | None = None,
    forbid: Sequence[int | None] = (),
    allowed: dict[int, torch.Tensor] | None = None,
    memo: Memo | None = None,
    matches: dict[int, ConstrainedGap] | None = None,
    **settings,
) -> Iterator[Step]:
    """Fill [MASK] positions of x (B, T); yields a Step after each network call.

    fill      (B, T) bool: fill only these; other [MASK] positions stay, as unseen text
    samples   (B,) the rows' numbers (0 .. B-1); draws depend on seed, number, step and position
    end_id    the id of [END], if there is one: all that follows a drawn [END] becomes [END]
    forbid    ids that are never drawn (None is ignored)
    allowed   {position: (V,) bool, the ids that may be drawn there}; others may have any
    memo      a likelihood.Memo: a text that the network has seen costs no call
    matches   {position: constraint.gap(pattern, length, tokenizer)}: the tokens of the gap that
              begins there match
    settings  SamplerSettings by name; ValueError if one cannot be followed or has no effect

    T may exceed the context: the model then sees the last positions up to the end of a chunk, half
    a context by default. Each token of an autoregressive model takes a call.
    """
    may_draw = (end_id, forbid, allowed)
    samples, end_id, forbid = arguments.check_filling(model, x, fill, samples, *may_draw)
    settings = from_keywords(settings, model)
    may_draw = (
        end_id,
        forbid,
        places(allowed, x),
        constraint.everywhere(model, x, matches, end_id),
    )
    return take_steps(model, x, fill, samples, settings, *may_draw, memo)


def has_given_text(model, x):
    """Whether x (B, T) has a token that is neither [MASK] nor a given [END]."""
    return bool(((x != model.mask_id) & (x != model.objective.end_id)).any())


@torch.no_grad()
def take_steps(
    model,
    x,
    fill,
    samples,
    settings,
    end_id=None,
    forbid=(),
    allowed=(),
    constraints=(),
    memo=None,
):
    """Yields the Steps of `unmask`, whose arguments are checked; settings: resolved.

    allowed: pairs, see `places`; constraints: see constraint.by_row.
    """
    mask = model.mask_id
    device = x.device
    x = x.to("cpu" if device.type == "mps" else device, copy=True)  # MPS lacks float64
    fill = x == mask if fill is None else fill.to(x.device) & (x == mask)
    samples = samples.to(x.device)
    calls = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    is_given = ~fill & (x != model.objective.end_id)
    arguments.check_gaps(model, x, fill)
    cache = model.objective.cache()
    find = partial(predict, memo=memo) if memo else predict
    forbid = [i for i in forbid if i is not None]
    is_adaptive = adaptive.rule_of(settings) is not None
    for chunk in plan(model, fill, samples, settings):
        text = x[:, chunk.at.start : chunk.at.stop]  # a view: what is drawn is in x
        steps = range(chunk.first, chunk.first + chunk.steps)
        numbers = uniforms(settings.seed, steps, samples, chunk.at)
        for s in range(chunk.steps):
            if is_adaptive and not chunk.goes_on(s):
                break
            masked = chunk.gaps & (text == mask)
            filled = chunk.gaps & ~masked & (((text == end_id) & chunk.gaps).cumsum(1) <= 1)
            u, noise, _ = next(numbers)
            # 1. Where to draw: first reveal masks, then correct what was drawn.
            k = count_to_reveal(settings, chunk, s, masked, noise)
            masked &= (k > 0)[:, None]
            corrected = to_correct(settings, chunk, s, filled, noise)
            drawn = to_reveal(settings, chunk, masked, noise, k) | corrected
            if not drawn.any():
                continue
            asked = drawn
            if constraints and not abilities.is_causal(model):
                asked = ask_ahead(constraints, drawn, chunk.gaps & (text == mask), chunk.at)
            # 2. Draw there: the network sees all of it masked.
            logits = find(model, device, x, is_given, asked, chunk.at, settings.cfg, cache)
            exclude(logits, asked, chunk.at, forbid, allowed)
            calls += drawn.any(1) * (2 if settings.cfg else 1)
            logp = logits.log_softmax(-1)
            rule = (settings.temperature, settings.top_k, settings.top_p)
            token = draw(logits, u[asked], *rule)
            if constraints:
                is_ahead_known = not abilities.is_causal(model)
                asking = (asked, chunk.at, is_ahead_known)
                draw_matching(constraints, x, *asking, logits, u[asked], rule, token, logp)
                token, logp = token[drawn[asked]], logp[drawn[asked]]
            # 3. Keep it; if the order had to wait for the network, the best of it.
            if ORDERS[settings.order].network_first:
                both = (logp, token)
                drawn, logp, token = keep_best(settings, chunk, masked, corrected, noise, k, *both)
            text[drawn] = token
            if end_id is not None and end_id in token:
                x[(((x == end_id) & fill).cumsum(1) > 0) & fill] = end_id
            chunk.age(drawn, logp, token)
            if is_adaptive:
                chunk.begin_to_correct(s, chunk.gaps & (text == mask))
            everywhere = F.pad(drawn, (chunk.at.start, x.shape[1] - chunk.at.stop))
            yield Step(chunk.first + s + 1, x.clone(), everywhere, logp, calls.clone())
        if end_id is not None:
            fill &= x == mask  # not what follows [END]


def generate(
    model: mdlm.Model,
    x: torch.Tensor,
    generator: torch.Generator | None = None,
    samples: torch.Tensor | None = None,
    fill: torch.Tensor | None = None,
    expect: Callable[[int], object] | None = None,
    end_id: int | None = None,
    forbid: Sequence[int | None] = (),
    allowed: dict[int, torch.Tensor] | None = None,
    matches: dict[int, ConstrainedGap] | None = None,
    **settings,
) -> torch.Tensor:
    """Fill the [MASK] positions of x (B, T) as `unmask` does and return the ids (B, T).

    seed is the key of the random numbers; without it a generator gives one (None: torch's own).
    A row depends on the seed and its number in `samples`, not on its batch. expect(calls) is told
    how many network calls it will still take, at most.
    """
    may_draw = (end_id, forbid, allowed)
    samples, end_id, forbid = arguments.check_filling(model, x, fill, samples, *may_draw)
    if "memo" in settings:
        raise UserError("memo is for unmask; generate has one of its own, so leave it out")
    is_seeded = "seed" in settings
    settings = from_keywords(settings, model)
    if not is_seeded:
        settings = replace(settings, seed=draw_seed(generator))
    may_draw = dict(end_id=end_id, forbid=forbid, allowed=places(allowed, x))
    may_draw["constraints"] = constraint.everywhere(model, x, matches, end_id)
    return fill_masks(model, x, settings, fill, samples, expect, may_draw)


def draw_seed(generator):
    """A seed from a torch.Generator; None: from torch's own."""
    where = generator.device if generator is not None else "cpu"
    return int(torch.randint(1 << 32, (), generator=generator, device=where))


def fill_masks(model, x, settings, fill, samples, expect, may_draw, drawn=None):
    """What `generate` does, whose arguments are checked; settings: resolved; may_draw: end_id,
    forbid, allowed and constraints of `take_steps`; drawn (B, T) float64: gets log p of what is
    drawn."""
    fill = (x == model.mask_id) & (True if fill is None else fill)
    memo, size = merge_calls(model, fill)
    slices = groups(model, len(x), x.device, size, writing=True)
    left = []  # (calls, calls a step) of each slice of rows
    if expect:
        left = [most_calls(model, fill[rows], samples[rows], settings) for rows in slices]
        expect(sum(calls for calls, _ in left))
    out = x.clone()
    for i, rows in enumerate(slices):
        inputs = (x[rows], fill[rows], samples[rows])
        allowed = [(where[rows], ids) for where, ids in may_draw["allowed"]]
        of_rows = [each.of_rows(rows) for each in may_draw["constraints"]]
        own = may_draw | dict(allowed=allowed, constraints=of_rows)
        steps = take_steps(model, *inputs, settings, memo=memo, **own)
        for done, step in enumerate(steps, 1):
            out[rows] = step.x
            if drawn is not None:
                note_draws(drawn[rows], step)
            if expect:
                calls, a_step = left[i]
                expect(calls - done * a_step + sum(calls for calls, _ in left[i + 1 :]))
    return out


SHORT = 16  # tokens; draws for longer gaps hardly ever come to the same text


def merge_calls(model, fill):
    """(Memo, rows to draw at once) where many rows have short gaps, else (None, None)."""
    longest = max([0, *fill.sum(1).tolist()])
    if model.objective.n_texts > 1 or longest > SHORT:
        return None, None
    most = (1 << 24) // (model.vocab_size * max(1, longest))  # 2^24 logits a step
    return Memo(), max(most, group_size(model, fill.device))


def most_calls(model, fill, samples, settings):
    """How many network calls `unmask` takes at most: in all, and for each step."""
    steps = sum(chunk.steps for chunk in plan(model, fill, samples.to(fill.device), settings))
    rows = 1
    if model.objective.n_texts == 1:
        rows = math.ceil(len(fill) / call_size(model, fill.device))
    a_step = rows * (2 if settings.cfg else 1)
    return steps * a_step, a_step


def ends(model, tokenizer, is_template):
    """[END] ends a text; it is never drawn within a template, nor where lengths are given."""
    is_drawn = not is_template and not abilities.knows_lengths(model)
    return dict(end_id=tokenizer.end_id) if is_drawn else dict(forbid=[tokenizer.end_id])


def quick(settings, model):
    """Resolved settings that draw the fills which only compare lengths."""
    most = QUICK_STEPS * model.objective.n_texts
    return replace(settings, steps=min(settings.steps, most), correct=0)


def fill_gaps(
    model,
    tokenizer,
    settings,
    x,
    fill,
    may_end,
    is_quick,
    expect=None,
    allowed=(),
    constraints=(),
    new_seed=None,
    draws=None,
    drawn=None,
):
    """Fill gaps of a template. may_end: at the end of the text; is_quick: to compare lengths.

    settings: resolved; allowed: pairs, see `places`; constraints: see constraint.by_row; new_seed()
    gives a seed in place of theirs; draws: a list that gets what was drawn, see `drawn_in_search`;
    drawn (B, T) float64 on the CPU: gets log p of what is drawn.
    """
    arguments.check_tokenizer(tokenizer, model)
    if is_quick:
        settings = quick(settings, model)
    if new_seed:
        settings = replace(settings, seed=new_seed())
    may_draw = dict(allowed=allowed, constraints=constraints)
    may_draw |= ends(model, tokenizer, not may_end)
    samples = torch.arange(len(x), device=x.device)
    if drawn is None and draws is not None:
        drawn = not_drawn(x)
    x = fill_masks(model, x, settings, fill, samples, expect, may_draw, drawn)
    if draws is not None:
        draws.append((x.cpu(), drawn, fill.cpu()))
    return x


def not_drawn(x):
    """(B, T) NaN on the CPU, for `note_draws`: the text x (B, T) before the first draw."""
    return torch.full(x.shape, math.nan, dtype=torch.float64)


def write(
    model: mdlm.Model,
    tokenizer: Tokenizer,
    text: str | Sequence[str] | None = None,
    n: int = 1,
    length: int = 0,
    generator: torch.Generator | None = None,
    max_gap: int = 16,
    **settings,
) -> list[str]:
    """Write n texts: a list of str. settings: as in `generate`.

    text    None: a text from nothing; "To be███" or "To [___] be": fill it; else its beginning.
            A list of them: n texts of the first, then n of the second, and so on
    length  tokens of a text that is no template (0: the context, or drawn for documents)
    """
    rows = write_ids(model, tokenizer, text, n, length, generator, max_gap, settings)
    return [joined(to_texts(segments, ids, tokenizer)) for segments, ids, _ in rows]


def write_with_logprobs(
    model: mdlm.Model,
    tokenizer: Tokenizer,
    text: str | Sequence[str] | None = None,
    n: int = 1,
    length: int = 0,
    generator: torch.Generator | None = None,
    max_gap: int = 16,
    k: int = 5,
    **settings,
) -> list[tuple[str, list[TokenLogprob]]]:
    """The texts that `write` returns for these arguments, each with its tokens' log-probabilities.

    k       how many of the likeliest tokens are named at each place

    A token's `drawn` is log p of its last draw, given what the network saw then, at temperature 1,
    and with guidance if there is one.
    """
    k = arguments.whole_number("k", k, 1)
    rows = write_ids(model, tokenizer, text, n, length, generator, max_gap, settings)
    made = []
    for segments, ids, drawn in rows:
        tokens = token_logprobs(model, tokenizer, ids, drawn, k)
        made.append((joined(to_texts(segments, ids, tokenizer)), tokens))
    return made


def write_ids(model, tokenizer, text, n, length, generator, max_gap, settings):
    """(segments, ids, log p when they were drawn) of each text of `write`."""
    limits = TextFlags(num_samples=n, length=length, max_gap=max_gap)
    check_settings(limits)
    arguments.check_tokenizer(tokenizer, model)
    settings, given = from_keywords(settings, model), settings
    several = list(text) if isinstance(text, (list, tuple)) else [text]
    todo = [to_fill(model, tokenizer, one, limits.length) for one in several]
    new_seed = None if "seed" in given else partial(draw_seed, generator)
    for segments, _ in todo:
        templates.check_lengths(segments, limits.max_gap)
    made = partial(fill_segments, model, tokenizer, limits, settings, new_seed, generator)
    return [done for segments in todo for done in made(*segments)]


def to_fill(model, tokenizer, text, length):
    """(the segments, whether it is a template) of a text that `write` is given."""
    config = model.config
    text = arguments.check_text("" if text is None else text)
    if not templates.is_template(text, tokenizer):
        return of_prompt(text, tokenizer, length, config), False
    if config.objective == "ar" or config.prompt_column:
        text = text[:40]
        raise UserError(f"{text!r} has gaps, and this model fills none; give only a beginning")
    if length:
        raise UserError(f"length={length} and a template, which has its own length; leave one out")
    return parse(text, tokenizer, config.block_size), True


def fill_segments(model, tokenizer, limits, settings, new_seed, generator, segments, is_template):
    """What `write_ids` returns, of what `to_fill` returned: a list of --num_samples."""
    device = next(model.parameters()).device
    n = limits.num_samples
    if templates.has_open(segments):  # the likeliest lengths
        fill = partial(fill_gaps, model, tokenizer, settings, new_seed=new_seed)
        search = (model, tokenizer, segments, 1, fill, device, limits.max_gap)
        segments = hypotheses(*search)[0].segments
    known = to_ids(segments, tokenizer, model.mask_id)  # none, if the likeliest [___] is empty
    x = torch.tensor(known, dtype=torch.int64, device=device).repeat(n, 1)
    if not (is_template or limits.length) and abilities.knows_lengths(model):
        where = generator.device if generator is not None else "cpu"
        u = torch.rand(n, generator=generator, device=where)
        x = end_documents(model, x, u.cpu().double())
    if new_seed:
        settings = replace(settings, seed=new_seed())
    may_draw = ends(model, tokenizer, is_template)
    may_draw["allowed"] = places(templates.allowed_tokens(segments, tokenizer), x)
    may_draw["constraints"] = constraint.by_row([segments] * n)
    samples = torch.arange(n, device=device)
    drawn = not_drawn(x)
    filled = fill_masks(model, x, settings, None, samples, None, may_draw, drawn).tolist()
    for ids in filled:
        templates.check_match(segments, to_texts(segments, ids, tokenizer), tokenizer)
    return [(segments, *row) for row in zip(filled, drawn)]


def fix(
    model: mdlm.Model, tokenizer: Tokenizer, text: str, caution: float = 0.0
) -> proofreading.Fixed:
    """Proofread a text: (text, changes), the new text and a list of proofreading.Change.

    caution: nats that a change must gain beyond the default. ValueError for a model that does not
    see the text on both sides of a token.
    """
    limits = TextFlags(caution=caution)
    check_settings(limits)
    return proofreading.fix(model, tokenizer, arguments.check_text(text), limits.caution)


CLASHES = [
    ("infill", "prompt batch length", "a template says by itself what to write"),
    ("batch", "prompt length watch html num_samples", "leave one of them out"),
    ("candidates", "num_samples watch html", "candidates are a ranked list of fills"),
    ("watch", "json", "watch one text, or write many for a program"),
    ("compare", "batch candidates watch", "--compare writes texts with several settings"),
    ("compare", "logprobs", "the lines of --compare have no texts"),
    ("compare", "max_gap", "--compare needs gaps of known lengths; leave --max_gap out"),
]


def place_text(given):
    """Flags of which a text without a flag has become --infill, if it has gaps, or --prompt."""
    given = dict(given)
    text = given.pop("text", None)
    if text is None:
        return given
    for name in ("prompt", "infill", "batch", "fix"):
        if name in given:
            raise UserError(f"{text[:40]!r} is a second text, beside --{name}; give one of them")
    if os.path.exists(text):
        fix = "give it as --out_dir or --batch; if it is a text, as --prompt"
        raise UserError(f"{text!r} is a file or folder; {fix}")
    gap = templates.GAP
    if "_" in text and not gap.search(text):  # a gap if the model's vocabulary has no _
        name = names_of(default_run(given.get("out_dir", "")))[0]
        folder = find_checkpoint(name)
        gap = templates.gap_pattern(tokenizer_from_json(folder / "tokenizer.json"))
    is_template = text == "-" or gap.search(text)
    return given | {"infill" if is_template else "prompt": text}


def check(options, given):
    """Raise UserError for flags that contradict each other; given: those of the command line."""
    check_clashes(CLASHES, given)
    if (options.output, options.json) == ("-", "-"):
        raise UserError("--output=- and --json=- are both standard output; give a file for one")
    if options.order == "one_shot" and "steps" in given:
        raise UserError("--order=one_shot and --steps contradict each other; one_shot is one step")
    for name in ("candidates", "max_gap"):
        if name in given and not (options.infill or options.batch):
            raise UserError(f"--{name} needs a template; give --infill or --batch")
    if options.logprobs and not (options.json or options.batch):
        raise UserError("--logprobs is written to lines of JSON; give --json or --batch")
    for name in ("infill", "batch", "html", "json"):
        if given.get(name) == "" or (name, options.html) == ("html", "-"):
            raise UserError(f"--{name}={given[name]} is no file or text; give one or leave it out")
    arguments.check_text(options.prompt + options.infill)
    if re.search("█|\\[___[]:|]", options.prompt):
        raise UserError("--prompt has gaps; give it as --infill, or without a flag before it")
    reads_stdin = "-" in (options.infill, options.batch, options.fix)
    stdin = dict(stdin="/dev/stdin") if reads_stdin else {}
    outputs.check_all(replace(options, output=""), **stdin)
    fixing.check_output(options)
    for name in ("output", "caution"):
        if name in given and not options.fix:
            raise UserError(f"--{name} needs a text to proofread; give --fix")


def load(options, given):
    """(model, tokenizer, config, folders, options) of --out_dir, of out/ or of weights/."""
    device = pick_device(options.device)
    gaps = bool(options.infill or options.batch or options.fix)
    trusted = options.trust_remote_code
    read = partial(mdlm.load, device=device, whole=gaps, trust_remote_code=trusted)
    folders, (model, tokenizer, config) = read_newest(default_run(options.out_dir), read)
    if config.prompt_column and not (options.prompt or options.fix):
        raise UserError("this model learned to answer prompts; give --prompt, no template")
    if config.objective == "ar":
        for name in ("infill", "batch"):
            if name in given:
                raise UserError(f"--{name} is not for an autoregressive model; leave it out")
    L = config.block_size
    if config.prompt_column and options.length > L:
        fix = f"give at most {L}, or leave it out"
        raise UserError(f"--length={options.length} is more than prompt and answer may have; {fix}")
    return model, tokenizer, config, folders, replace(options, device=str(device))


def sampled(model, tokenizer, segments, options, template, pages):
    """Fill segments of known lengths --num_samples times: yields (texts, facts), adds to pages."""
    mask = model.mask_id
    ids = torch.tensor(to_ids(segments, tokenizer, mask), dtype=torch.int64)
    may_draw = ends(model, tokenizer, template)
    allowed = templates.allowed_tokens(segments, tokenizer)
    constraints = constraint.by_row([segments])
    size = 1 if options.watch else None
    for rows in groups(model, max(1, options.num_samples), options.device, size, writing=True):
        began = time.monotonic()
        samples = torch.arange(rows.start, rows.stop)
        x = ids.repeat(len(samples), 1)
        if not (template or options.length) and abilities.knows_lengths(model):
            x = end_documents(model, x, uniform(options.seed, -1, samples, range(1))[2][:, 0])
        steps = sum(chunk.steps for chunk in plan(model, x == mask, samples, options))
        films = [viewer.HtmlRecorder(tokenizer, ids, mask) for _ in samples if options.html]
        watches = [
            viewer.TerminalPlayer(tokenizer, ids, mask, steps) for _ in samples if options.watch
        ]
        with progress.bar(total=steps, desc="writing", unit=" steps", disable=options.watch) as bar:
            may_draw["allowed"] = places(allowed, x)
            one = torch.zeros_like(samples)  # all rows are alike
            may_draw["constraints"] = [each.of_rows(one) for each in constraints]
            where = (x.to(options.device), None, samples)
            # What stays where nothing is left to fill: the likeliest [___] may be empty.
            nothing = torch.zeros(0, model.vocab_size)
            step = Step(0, x, x == mask, nothing, torch.zeros(len(x), dtype=torch.int64))
            drawn = not_drawn(x)
            for step in take_steps(model, *where, options, **may_draw):
                bar.update()
                step = Step(step.number, *(tensor.cpu() for tensor in step[1:]))
                note_draws(drawn, step)
                for row, show in [*enumerate(films), *enumerate(watches)]:
                    show.add(step, row)
        for watch in watches:
            watch.clear()
        seconds = (time.monotonic() - began) / len(samples)
        for row, calls, logp in zip(step.x.tolist(), step.calls.tolist(), drawn):
            facts = dict(steps=steps, calls=calls, seconds=seconds)
            texts = to_texts(segments, row, tokenizer)
            templates.check_match(segments, texts, tokenizer)
            if films:
                about = dict(text=joined(texts), title=f"sample {len(pages) + 1}")
                pages.append(facts | about | films.pop(0).page(row))
            if options.logprobs:
                tokens = token_logprobs(model, tokenizer, row, logp, options.logprobs)
                facts["logprobs"] = as_json(tokens)
            yield texts, facts


class Calls:
    """Counts the network calls of a model, and shows on a bar how many are left at most."""

    def __init__(self, model, bar):
        self.bar = bar
        self.calls = 0
        self.sequences = 0
        self.stretch = 1
        self.hook = model.register_forward_pre_hook(self.count)

    def count(self, model, args):
        self.calls += 1
        self.sequences += len(args[0].ids)
        self.bar.update()

    def expect(self, left, stretch, stretches):
        """Between gaps of unknown length a template is filled in stretches, each with its total."""
        if stretch != self.stretch:
            self.stretch = stretch
            self.bar.reset()
            self.bar.set_description(f"trying fills, gap {stretch} of {stretches}", refresh=False)
        total = self.bar.n + left
        self.bar.total = min(total, self.bar.total or total)


def ranked(model, tokenizer, segments, options):
    """(segments of the likeliest fill, the texts of the --candidates likeliest, facts)"""
    began = time.monotonic()
    with progress.bar(desc="trying fills", unit=" calls") as bar:
        done = Calls(model, bar)
        draws = [] if options.logprobs else None
        fill = partial(fill_gaps, model, tokenizer, options, draws=draws)
        limits = dict(max_gap=options.max_gap, draws=max(16, 6 * options.candidates))
        limits |= dict(device=options.device, expect=done.expect)
        try:
            n = options.candidates or 3
            fills = hypotheses(model, tokenizer, segments, n, fill, **limits)
        finally:
            done.hook.remove()
    if len(fills) < options.candidates:
        terminal.warn(f"{len(fills)} different fills were found, not {options.candidates}")
    seconds = time.monotonic() - began
    texts = [to_texts(fill.segments, fill.ids, tokenizer) for fill in fills]
    p = torch.tensor([fill.logp for fill in fills], dtype=torch.float64).softmax(0).tolist()
    rows = [dict(text=joined(t), score=f.logp, share=q) for f, t, q in zip(fills, texts, p)]
    facts = dict(steps=options.steps, calls=done.calls, seconds=seconds, score=fills[0].logp)
    facts |= dict(sequences=done.sequences, candidates=rows)
    if options.logprobs:
        facts["logprobs"] = as_json(of_fill(model, tokenizer, fills[0], draws, options.logprobs))
    return fills[0].segments, texts, facts


def of_fill(model, tokenizer, fill, draws, k):
    """The TokenLogprobs of a search.Fill; draws: as in `drawn_in_search`."""
    is_filled = []
    for segment in fill.segments:
        n = len(to_ids([segment], tokenizer))
        is_listed = getattr(segment, "spelled", None)  # each text of a list is tried: none is drawn
        is_filled += [not (isinstance(segment, str) or is_listed)] * n
    n = len(is_filled)
    is_filled += [True] * (len(fill.ids) - n)  # what ends the text
    drawn = drawn_in_search(draws, fill.ids, is_filled)
    return token_logprobs(model, tokenizer, fill.ids, drawn, k, n)


def is_plain(options, template):
    """Whether texts are written as they come, not ranked."""
    return bool(options.num_samples or options.watch or options.html or template is None)


def answers(model, tokenizer, template, segments, options, pages):
    """Fill a template, or a text (None), of segments; yields ([texts, the best first], facts)."""
    if not is_plain(options, template) or has_open(segments):
        segments, texts, facts = ranked(model, tokenizer, segments, options)
        if not is_plain(options, template):
            yield texts, facts
            return
        terminal.warn("[___] has its likeliest length now, and is filled again")
    for texts, facts in sampled(model, tokenizer, segments, options, template is not None, pages):
        yield [texts], facts


def main(argv):
    about = f"{__doc__}\n\n--order: {MEANINGS}."
    given = place_text(parse_settings(Options, argv, about, groups=GROUPS, free="text"))
    options = Options(**given)
    check(options, given)
    model, tokenizer, config, folders, options = load(options, given)
    if options.fix:
        reader = proofreading.Proofreader(model, tokenizer, options.caution)
        scores.introduce(folders, config, tokenizer.vocab_size, options.out_dir)
        fixing.fix_file(options, reader)
        return 0
    variants = word_statistics.variants(options, given, SETTINGS, partial(resolve, model=model))
    resolve(options, model)  # refuses what the model cannot follow, before templates are read

    def to_segments(template):
        if template is None:
            segments = of_prompt(options.prompt, tokenizer, options.length, config)
        else:
            segments = parse(template, tokenizer, config.block_size)
        templates.check_lengths(segments, options.max_gap)
        if has_open(segments) and variants:
            raise UserError("--compare needs gaps of known lengths; write █ for each token")
        if options.cfg and not any(isinstance(segment, (str, list)) for segment in segments):
            raise UserError("--cfg guides by the given text, and there is none; give some")
        x = torch.tensor([to_ids(segments, tokenizer, model.mask_id)])
        arguments.check_gaps(model, x, x == model.mask_id)
        return segments

    todo = templates.parse_all(options.infill, options.batch, to_segments)
    options = resolve(options, model)
    to_stdout = options.json == "-" or (options.batch and not options.json)
    if to_stdout:
        sys.stdout.reconfigure(encoding="utf-8")  # JSON's, whatever the locale's is
    scores.introduce(folders, config, tokenizer.vocab_size, options.out_dir)
    pages = []
    target = contextlib.nullcontext(sys.stdout)
    if not to_stdout:
        target = outputs.Lines(options.json or os.devnull)
    with target as lines:
        if variants:
            [(template, segments)] = todo
            training = word_statistics.training_text(folders[0], tokenizer, config)
            statistics = word_statistics.WordStatistics(training)
            fill = partial(sampled, model, tokenizer, segments, template=template is not None)
            n = to_ids(segments, tokenizer, model.mask_id).count(model.mask_id)
            pages = word_statistics.compare(variants, fill, statistics, n, lines)
            todo = []
        # No bar beside the lines of JSON on a terminal.
        hide = not options.batch or (to_stdout and terminal.is_terminal(sys.stdout))
        for template, segments in progress.bar(todo, unit=" templates", disable=hide):
            rule = ""  # between texts
            for texts, facts in answers(model, tokenizer, template, segments, options, pages):
                if not (to_stdout or options.batch):
                    print(rule, end="")
                    viewer.show(texts, facts, "candidates" in given)
                    rule = "-" * 40 + "\n" if template is None else ""
                print(viewer.json_line(template, texts[0], facts), file=lines, flush=True)
    if options.html:
        about = viewer.settings(model, options)
        about.pop(options.compare.partition("=")[0], None)  # each tab has its own
        viewer.write_page(options.html, pages, about)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
