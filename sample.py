"""Sample from a trained model: generate text, continue a prompt, fill gaps, watch it happen.

    python sample.py                                    # a text from nothing
    python sample.py "ROMEO:" --length=600              # continue a prompt
    python sample.py "To be███"                         # each █ is a token
    python sample.py --infill "To [___], or not to be"  # a gap of unknown length
    python sample.py --fix=letter.txt                   # find mistakes, show what to change
    python sample.py --watch --html=page.html           # watch it, and keep it

Gaps get their most likely fill, by a search (support/infill/search.py). Other text is drawn, by a
loop with two moves. Reveal: draw some of the tokens that are still [MASK]. Correct: mask some that
were drawn, and draw them again given all the others. The tokens drawn in one call are far apart,
where they hardly depend on each other. Without --out_dir and a run in out/, it uses the model that
ships.
"""

from nanomdlm.support.cli import entry, terminal

entry.start(__name__)

import contextlib
import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F

import mdlm
from nanomdlm.kernels.reference import philox_words
from nanomdlm.support import abilities
from nanomdlm.support.cli import outputs, products, python_arguments
from nanomdlm.support.cli.devices import load_in, pick_device
from nanomdlm.support.cli.settings import (
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
    check_idle,
    names_of,
    plain,
    shown,
)
from nanomdlm.support.cli.settings import check as check_settings
from nanomdlm.support.cli.settings import parse as parse_settings
from nanomdlm.support.data.tokenizer import Tokenizer, tokenizer_from_json
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import adaptive, display, filling, templates
from nanomdlm.support.infill.ensemble import read_newest
from nanomdlm.support.infill.filling import Candidates
from nanomdlm.support.infill.from_left import REACH
from nanomdlm.support.infill.model_calls import (
    Memo,
    device_of,
    end_documents,
    group_size,
    groups,
    is_large,
    predict,
    predict_everywhere,
)
from nanomdlm.support.infill.prefixes import keeps
from nanomdlm.support.infill.probabilities import (
    TokenLogprob,
    as_json,
    token_logprobs,
)
from nanomdlm.support.infill.probabilities import logprobs as logprobs
from nanomdlm.support.infill.probabilities import score as score
from nanomdlm.support.infill.templates import Gap, joined, of_prompt, parse, to_ids, to_texts
from nanomdlm.support.infill.templates import matching as matching
from nanomdlm.support.numerics import checked, draw, reversed_bits, top2_margin, topk_mask
from nanomdlm.support.run import checkpoint_score, graphs
from nanomdlm.support.run.checkpoint import default_run, find_checkpoint

# Nats of doubt that a token gains with each call after its own (results/sampling.md)
DOUBT_PER_CALL = 0.3


class Order(NamedTuple):
    """What to reveal first: the masks with the highest score, ties broken at random."""

    meaning: str
    # (i (B, T): which mask of the text it is, u (B, 1) in [0, 1)) -> (B, T)
    score: Callable = lambda i, u: 0 * i
    network_first: bool = False  # then (log p (n, V), tokens (n,) drawn from it) -> (n,)


ORDERS = {
    "spread": Order("far apart", lambda i, u: -reversed_bits((i + (u * 2**16).long()) % 2**16)),
    "ancestral": Order("the exact reverse process"),
    "random": Order("at random, a fixed number"),
    "left_to_right": Order("the leftmost", lambda i, u: -i),
    "one_shot": Order("all in one step"),
    # Draw at every mask, keep the likeliest draws (MaskGIT, 2202.04200; LLaDA, 2502.09992).
    "confidence": Order("likely draws", lambda p, token: p.gather(1, token[:, None])[:, 0], True),
    "max_prob": Order("where the top token is most probable", lambda p, token: p.amax(1), True),
    "margin": Order(
        "where it leads the second by most", lambda p, token: top2_margin(p.exp()), True
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

    steps: Natural = 0  # maximum network calls per context of text (0: 32, or 8 per block)
    correct: str = "auto"  # how many of them redraw tokens, after all are drawn; auto: half
    redraw: Literal["low_confidence", "sweep"] = "low_confidence"  # least likely, or all in turn
    spacing: Count = 3  # minimum distance between tokens that one call redraws
    order: OrderName = "auto"  # what to reveal first (see above)
    threshold: Share = 0.0  # reveal all above this probability, and at least one (0: off)
    entropy_bound: Amount = 0.0  # reveal while the sum of entropies is at most this, nats (0: off)
    block: Natural = 0  # finish this many tokens before the next (0: all, or half a context)
    temperature: Factor = 1.0  # below 1: likelier tokens; 0: the likeliest; above 1: more varied
    top_k: Natural = 0  # draw only from the k likeliest tokens (0: from all)
    top_p: Probability = 1.0  # draw only from the likeliest tokens with this total probability
    cfg: Factor = 0.0  # strength of guidance by the given text (0: off); doubles the calls
    seed: Seed = 0  # random seed; the same seed gives the same text

    @property
    def is_adaptive(self):
        """Whether what the network predicts decides how many tokens a call reveals."""
        return bool(self.threshold or self.entropy_bound)


@dataclass
class TextFlags:
    """What to write."""

    out_dir: Reads = ""  # run, or checkpoint; A,B: their mean (default: out, or what ships)
    prompt: Text = ""  # beginning of the text, which stays unchanged
    infill: str = ""  # text with gaps: █ is a token to fill, [___] a gap of any length (-: stdin)
    batch: Reads = ""  # file with one text with gaps per line (-: stdin); writes JSON lines
    length: Natural = 0  # length of the text in tokens, prompt included (0: the context, or drawn)
    num_samples: Natural = 0  # texts to write (0: one; with gaps, the likeliest)
    candidates: Natural = 0  # show this many of the likeliest fills, with scores (0: 3)
    max_gap: Context = 0  # longest fill of [___], in tokens (0: 16; 32 of a line, objective ar)
    reach: Count = REACH  # objective ar: tokens of text after [___] that rank its fills
    fix: Reads = ""  # proofread this text file (-: stdin), without changing it
    output: Writes = ""  # write the text corrected by --fix here (-: stdout)
    caution: Caution = 0.0  # additional gain, in nats, that a change of --fix needs
    compare: str = ""  # NAME=VALUE,VALUE,...: a table of texts with each value of a setting


@dataclass
class OutputFlags:
    """Where to compute, and how to show it."""

    device: str = "auto"  # cpu, cuda, cuda:1 or mps; auto: a GPU if there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of weights; auto: bfloat16 on a GPU
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


class Step(NamedTuple):  # one step of `unmask` for a batch
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
    """Yields `uniform` for each of a range of steps. Several are computed at once: for short texts,
    the number of operations matters, not their size."""
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
        raise UserError(f"block={settings.block} exceeds the context of {config.block_size}")
    n = model.objective.n_texts
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
    if settings.is_adaptive:
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
        raise UserError(f"{shown(min(unknown))} is not a setting; give {', '.join(SETTINGS)}")
    return resolve(SamplerSettings(**keywords), model)


@dataclass
class Chunk:  # n positions of a text, filled and corrected before the next ones
    at: range  # the positions
    first: int  # number of its first step
    steps: int  # of the row that needs the most
    gaps: torch.Tensor  # (B, n) bool: positions to fill
    reveals: torch.Tensor  # (B,) steps that reveal (adaptive: at most this many), followed by
    corrections: torch.Tensor  # (B,) steps that correct
    index: torch.Tensor  # (B, n) the number of each gap in its row
    u: torch.Tensor  # (B, n) random numbers of the row: for its order, for each sweep
    doubt: torch.Tensor  # (B, n) for each drawn token: its surprise, growing with age

    def age(self, drawn, logp, token):
        """After a call that drew the tokens (m,) from logp (m, V) at `drawn` (B, n), or predicted
        them everywhere."""
        # Only in rows that drew: a call for other rows must not change what this one becomes.
        self.doubt += DOUBT_PER_CALL * drawn.any(1, keepdim=True)
        surprise = -logp.gather(1, token[:, None])[:, 0].double()
        if len(token) == drawn.numel():  # everywhere
            self.doubt = torch.where(drawn, surprise.view(drawn.shape), self.doubt)
        else:
            self.doubt[drawn] = surprise

    def begin_to_correct(self, s, masked):
        """After step s: rows without `masked` (B, n) positions correct from the next step on."""
        is_done = ~masked.any(1)
        self.reveals = torch.where(is_done, self.reveals.clamp(max=s + 1), self.reveals)

    def corrects(self, s):
        """(B,) bool: the rows that correct in step s."""
        return (s >= self.reveals) & (s < self.reveals + self.corrections)

    def settled(self, x, mask):
        """(B,) the position before which rows of x (B, T) can no longer change."""
        is_open = x[:, self.at.start : self.at.stop] == mask
        first = torch.where(is_open.any(1), is_open.int().argmax(1), len(self.at))
        return self.at.start + torch.where(self.corrections > 0, 0, first)

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
        if not n.any():
            first += steps
            continue
        # A single token would be drawn from the same distribution again.
        corrections = (n > 1) * (3 * n).clamp(max=steps * settings.correct // settings.steps)
        reveals = steps - corrections
        if settings.order != "ancestral":  # which may reveal nothing in a step
            reveals = reveals.minimum(n).clamp(min=1)
        reveals = torch.where(n > 0, reveals, 1)
        index = gaps.cumsum(1) - 1
        u = uniform(settings.seed, first, samples, range(2 + int(corrections.max())))[2]
        doubt = torch.zeros(gaps.shape, dtype=torch.float64, device=fill.device)
        needed = max([0, *(reveals + corrections).tolist()])
        at = range(begin, end)
        yield Chunk(at, first, needed, gaps, reveals, corrections, index, u, doubt)
        first += steps


def count_to_reveal(settings, chunk, s, masked, noise):
    """(B,) how many of the `masked` positions (B, n) to reveal in step s of a chunk."""
    left = (chunk.reveals - s).clamp(min=1).double()  # (B,) steps that reveal, with this one
    if settings.order == "ancestral":  # the exact reverse process reveals each position on its own
        return (masked & (noise < 1 / left[:, None])).sum(1)
    after = (left - 1) / chunk.reveals  # the fraction of masks
    k = masked.sum(1) - (chunk.gaps.sum(1) * after + 1e-9).long()
    if settings.is_adaptive:  # at least these: what the network says comes later
        k = k.clamp(min=1).minimum(masked.sum(1))
    return k.clamp(min=0)


def to_reveal(settings, chunk, masked, noise, k, logp=None, token=None):
    """(B, n) bool: which of the `masked` positions to reveal, k (B,) in each row, or at least k if
    the number is adaptive.

    logp (m, V), token (m,): the network's predictions there, or everywhere, for orders that need
    them; until they are given, such orders return all positions.
    """
    order = ORDERS[settings.order]
    if order.network_first and logp is None:
        return masked
    if order.network_first:
        score = torch.zeros(masked.shape, dtype=torch.float64, device=masked.device)
        found = order.score(logp, token).double()
        if len(found) == masked.numel():  # of all positions
            score = found.view(masked.shape)
        else:
            score[masked] = found
        if settings.is_adaptive:
            k = k.maximum(adaptive.count(settings, score, masked))
    else:
        score = order.score(chunk.index, chunk.u[:, :1])
    return topk_mask(score, noise, masked, k)


def keep_best(settings, chunk, masked, corrected, noise, k, logp, token):
    """Keep, among the draws at `masked` and `corrected` (B, n), all corrections and the k (B,) best
    others: their positions (B, n), log p (m, V) and tokens (m,)."""
    if not masked.any():  # a call that corrects: all of it is kept
        return corrected, logp, token
    drawn = masked | corrected
    is_new = masked[drawn]
    new = to_reveal(settings, chunk, masked, noise, k, logp[is_new], token[is_new])
    keep = (new | corrected)[drawn]
    return new | corrected, logp[keep], token[keep]


def to_correct(settings, chunk, s, filled, noise):
    """(B, n) bool: which of the `filled` positions to draw again in step s.

    low_confidence  those more doubtful than all others within --spacing
    sweep           every --spacing'th gap, all in turn: blocked Gibbs sampling, which leaves the
                    distribution of a Markov chain of a lower order than --spacing unchanged
    """
    is_turn = chunk.corrects(s)
    if not torch.is_tensor(s) and not is_turn.any():  # a graph cannot wait for it
        return torch.zeros_like(filled)
    c = s - chunk.reveals  # (B,) number of the correction
    filled = filled & is_turn[:, None]
    spacing = min(settings.spacing, filled.shape[1])  # no two are further apart
    if settings.redraw == "low_confidence":
        doubt = (chunk.doubt + 1e-9 * noise).masked_fill(~filled, -math.inf)
        peak = F.max_pool1d(doubt[:, None], 2 * spacing - 1, 1, spacing - 1)[:, 0]
        return filled & (doubt == peak)
    sweep = (c.clamp(min=0) // spacing)[:, None].clamp(max=chunk.u.shape[1] - 2)
    turns = torch.arange(spacing, device=c.device)
    turns = turns[reversed_bits(turns).argsort()]  # far from the last turn
    index = chunk.index + (chunk.u.gather(1, 1 + sweep) * spacing).long()
    return filled & (index % spacing == turns[c % spacing][:, None])


def to_draw(settings, chunk, s, text, mask_id, end_id, noise):
    """Where step s of a chunk with the tokens `text` (B, n) draws, (B, n) bool: reveals, the number
    of these to keep (B,), corrections, and all.

    s: a number, or a tensor: then Python waits for no value.
    """
    masked = chunk.gaps & (text == mask_id)
    filled = chunk.gaps & ~masked
    k = count_to_reveal(settings, chunk, s, masked, noise)
    masked = masked & (k > 0)[:, None]
    if not torch.is_tensor(s) and not (k.any() or chunk.corrects(s).any()):
        return masked, k, masked, masked  # nothing: of many ancestral steps, most
    filled &= ((text == end_id) & chunk.gaps).cumsum(1) <= 1
    corrected = to_correct(settings, chunk, s, filled, noise)
    return masked, k, corrected, to_reveal(settings, chunk, masked, noise, k) | corrected


def exclude(logits, drawn, at, forbid, allowed):
    """Set logits (n, V) of tokens that must not be drawn to -inf: ids in forbid, and ids not in
    `allowed` of unmask. drawn: (B, len(at)) bool, n places in the range `at` of positions."""
    if forbid:
        logits[:, forbid] = -math.inf
    for place, ids in allowed.items():
        if place in at:
            here = drawn.nonzero()[:, 1] == place - at.start
            logits[here] = logits[here].masked_fill(~ids.to(logits.device), -math.inf)


def unmask(
    model: mdlm.Model,
    x: torch.Tensor,
    fill: torch.Tensor | None = None,
    samples: torch.Tensor | None = None,
    end_id: int | None = None,
    forbid: Sequence[int | None] = (),
    allowed: dict[int, torch.Tensor] | None = None,
    memo: Memo | None = None,
    matches: dict[int, Gap] | None = None,
    **settings,
) -> Iterator[Step]:
    """Fill [MASK] positions of x (B, T); yields a Step after each network call.

    fill      (B, T) bool: fill only these; other [MASK] positions stay, as unseen text
    samples   (B,) the rows' numbers (0 .. B-1); draws depend on seed, number, step and position
    end_id    the id of [END], if there is one: everything after a drawn [END] becomes [END]
    forbid    ids that are never drawn (None is ignored)
    allowed   {position: (V,) bool, the ids that may be drawn there}; elsewhere any may be drawn
    memo      a model_calls.Memo: a text that the network has seen costs no call
    matches   {position: matching(pattern, length, tokenizer)}: the tokens of the gap that begins
              there match
    settings  SamplerSettings by name; ValueError if one cannot be used

    T may exceed the context: the model then sees the last positions up to the end of a chunk, half
    a context by default. An autoregressive model needs one call per token.
    """
    may_draw = (end_id, forbid, allowed)
    samples, end_id, forbid = python_arguments.check_filling(model, x, fill, samples, *may_draw)
    settings = from_keywords(settings, model)
    may_draw = dict(end_id=end_id, forbid=forbid, allowed=allowed)
    may_draw["constraints"] = constraints_of(model, x, matches, end_id)
    return take_steps(model, x, fill, samples, settings, memo=memo, **may_draw)


def constraints_of(model, x, matches, end_id):
    """The constraints that take_steps needs for gaps that must match."""
    if not matches:
        return ()
    return products.drawing().of_positions(model, x, matches, end_id)


@torch.no_grad()
@keeps
def take_steps(
    model,
    x,
    fill,
    samples,
    settings,
    end_id=None,
    forbid=(),
    allowed=None,
    constraints=(),
    memo=None,
):
    """Yields the Steps of `unmask`, whose arguments are checked; settings: resolved;
    constraints: those of support/constrain/drawing.py."""
    mask = model.mask_id
    device = x.device
    x = x.to("cpu" if device.type == "mps" else device, copy=True)  # MPS lacks float64
    fill = x == mask if fill is None else fill.to(x.device) & (x == mask)
    samples = samples.to(x.device)
    calls = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    is_given = ~fill & (x != model.objective.end_id)
    python_arguments.check_gaps(model, x, fill)
    cache = model.objective.cache()
    find = partial(predict, memo=memo) if memo else predict
    forbid = [i for i in forbid if i is not None]
    allowed = allowed or {}
    for chunk in plan(model, fill, samples, settings):
        text = x[:, chunk.at.start : chunk.at.stop]  # a view: what is drawn is in x
        steps = range(chunk.first, chunk.first + chunk.steps)
        numbers = uniforms(settings.seed, steps, samples, chunk.at)
        left = range(chunk.steps)
        if not (memo or constraints) and can_replay(model, x, chunk.at, cache):
            # On a GPU: all of a step is a CUDA graph.
            cache = cache and cache.fixed(model, len(x))
            state = (x, fill, is_given, calls, numbers, cache)
            yield from replay_steps(model, settings, chunk, *state, end_id, forbid, allowed)
            left = ()
        for s in left:
            if settings.is_adaptive and not chunk.goes_on(s):
                break
            u, noise, _ = next(numbers)
            # 1. Where to draw: first reveal masks, then correct what was drawn.
            where = to_draw(settings, chunk, s, text, mask, end_id, noise)
            masked, k, corrected, drawn = where
            if not drawn.any():
                continue
            asked = drawn
            if constraints and not abilities.is_causal(model):
                asked = products.drawing().ask_ahead(
                    constraints, drawn, chunk.gaps & (text == mask), chunk.at
                )
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
                draw_matching = products.drawing().draw_matching
                draw_matching(constraints, x, *asking, logits, u[asked], rule, token, logp)
                token, logp = token[drawn[asked]], logp[drawn[asked]]
            # 3. Keep all draws, or the best if the order needs the network's predictions.
            if ORDERS[settings.order].network_first:
                both = (logp, token)
                drawn, logp, token = keep_best(settings, chunk, masked, corrected, noise, k, *both)
            text[drawn] = token
            if end_id is not None and end_id in token:
                x[(((x == end_id) & fill).cumsum(1) > 0) & fill] = end_id
            chunk.age(drawn, logp, token)
            if settings.is_adaptive:
                chunk.begin_to_correct(s, chunk.gaps & (text == mask))
            everywhere = F.pad(drawn, (chunk.at.start, x.shape[1] - chunk.at.stop))
            yield Step(chunk.first + s + 1, x.clone(), everywhere, logp, calls.clone())
        if end_id is not None:
            fill &= x == mask  # not what follows [END]
    if cache:
        cache.end(model)


# ---- The same in fixed shapes, for CUDA graphs: Python waits for no value within a step
MOST_LOGITS = 1 << 24  # of a step that draws at all positions: 128 MiB in float64


def can_replay(model, x, at, cache):
    """Whether the steps for positions `at` of texts x (B, T) can be CUDA graphs."""
    if is_large(model) or (cache and not cache.can_be_fixed):
        return False
    is_small = len(x) * len(at) * model.vocab_size <= MOST_LOGITS
    return is_small and graphs.can_replay(model, x.device)


def fixed_step(model, settings, at, end_id, cache, s, start, x, given, never, u, noise, *tensors):
    """A step of `take_steps`, which predicts and draws at all n positions `at` of the window x.

    s (), start (): numbers of the step, and of tokens in the cache (FixedCache). x, given: (B, N),
    see predict_everywhere. never (B n, V) bool: what must not be drawn. u, noise: (B, n) random
    numbers. tensors: those of a Chunk.

    Returns the tokens (B, n) after it, the chunk's doubt, where it drew (B, n), log p (B n, V),
    network calls (B,), and (2,) bool: whether it drew, and whether the logits are finite there.
    """
    chunk = Chunk(at, 0, 0, *(tensor.clone() for tensor in tensors))
    text = x[:, at.start : at.stop]
    masked, k, corrected, drawn = to_draw(settings, chunk, s, text, model.mask_id, end_id, noise)
    calls = drawn.any(1) * (2 if settings.cfg else 1)
    if cache:
        cache.start = start
    logits, is_finite = predict_everywhere(model, x, given, drawn, at, settings.cfg, cache)
    facts = torch.stack((drawn.any(), (is_finite.view(drawn.shape) | ~drawn).all()))
    logits = logits.masked_fill(never, -math.inf)
    logp = logits.log_softmax(-1)
    token = draw(logits, u.flatten(), settings.temperature, settings.top_k, settings.top_p)
    token = token.clamp(max=model.vocab_size - 1)  # of logits that are not finite
    if ORDERS[settings.order].network_first:
        drawn = to_reveal(settings, chunk, masked, noise, k, logp, token) | corrected
    chunk.age(drawn, logp, token)
    text = torch.where(drawn, token.view(drawn.shape), text)
    return text, chunk.doubt, drawn, logp, calls, facts


def replay_steps(
    model, settings, chunk, x, fill, given, calls, numbers, cache, end_id, forbid, allowed
):
    """Yields the Steps of a chunk, as `take_steps` does; changes x and calls."""
    if not chunk.gaps.any():
        return
    at = chunk.at
    text = x[:, at.start : at.stop]
    never = torch.zeros(*text.shape, model.vocab_size, dtype=torch.bool, device=x.device)
    never[..., forbid] = True
    for place, ids in allowed.items():
        if place in at:
            never[:, place - at.start] |= ~ids.to(x.device)
    never = never.flatten(0, 1)
    # What a step depends on; its seed and numbers of steps are in the tensors.
    rule = replace(settings, seed=0, steps=0, correct=0, block=0)
    context = model.config.block_size
    for s in range(chunk.steps):
        if settings.is_adaptive and not chunk.goes_on(s):
            break
        u, noise, _ = next(numbers)
        if settings.order == "ancestral":  # of many steps, most draw nothing: no call for these
            *_, drawn = to_draw(settings, chunk, s, text, model.mask_id, end_id, noise)
            if not drawn.any():
                continue
        first = cache.follow(at.start) if cache else max(0, at.stop - context)
        window = slice(first, at.stop if cache else first + context)
        inside = range(at.start - first, at.stop - first)
        constants = (s, cache.length if cache else 0)
        inputs = [torch.full((), value, device=x.device) for value in constants]
        inputs += [x[:, window], given[:, window], never, u, noise, chunk.gaps, chunk.reveals]
        inputs += [chunk.corrections, chunk.index, chunk.u, chunk.doubt]
        step = partial(fixed_step, model, rule, inside, end_id, cache)
        key = ("step", inside, end_id, cache and cache.number, *astuple(rule))
        found = graphs.replay(model, step, inputs, *key)
        new, chunk.doubt, drawn, logp, each, facts = found
        is_some, is_finite = facts.tolist()
        if not is_finite:
            checked(logp.new_full((1, 1), math.nan))  # raises the error
        if not is_some:
            continue
        text.copy_(new)
        calls += each
        if end_id is not None:
            ended = (((x == end_id) & fill).cumsum(1) > 0) & fill
            x.masked_fill_(ended, end_id)
        if settings.is_adaptive:
            chunk.begin_to_correct(s, chunk.gaps & (text == model.mask_id))
        everywhere = F.pad(drawn, (at.start, x.shape[1] - at.stop))
        yield Step(chunk.first + s + 1, x.clone(), everywhere, logp[drawn.flatten()], calls.clone())


def generate(
    model: mdlm.Model,
    x: torch.Tensor,
    generator: torch.Generator | None = None,
    samples: torch.Tensor | None = None,
    fill: torch.Tensor | None = None,
    end_id: int | None = None,
    forbid: Sequence[int | None] = (),
    allowed: dict[int, torch.Tensor] | None = None,
    matches: dict[int, Gap] | None = None,
    **settings,
) -> torch.Tensor:
    """Fill the [MASK] positions of x (B, T) as `unmask` does and return the ids (B, T).

    Without a seed, one is drawn from the generator (None: torch's own). A row depends on the seed
    and its number in `samples`, not on its batch.
    """
    may_draw = (end_id, forbid, allowed)
    samples, end_id, forbid = python_arguments.check_filling(model, x, fill, samples, *may_draw)
    if "memo" in settings:
        raise UserError("memo is for unmask; generate has its own, so leave it out")
    is_seeded = "seed" in settings
    settings = from_keywords(settings, model)
    if not is_seeded:
        settings = replace(settings, seed=draw_seed(generator))
    fill = (x == model.mask_id) & (True if fill is None else fill)
    may_draw = dict(end_id=end_id, forbid=forbid, allowed=allowed)
    may_draw["constraints"] = constraints_of(model, x, matches, end_id)
    memo, size = merge_calls(model, fill)
    out = x.clone()
    for rows in groups(model, len(x), x.device, size, writing=True):
        inputs = (x[rows], fill[rows], samples[rows], settings)
        for step in take_steps(model, *inputs, memo=memo, **may_draw):
            out[rows] = step.x
    return out


def draw_seed(generator):
    """A seed from a torch.Generator; None: from torch's own."""
    where = generator.device if generator is not None else "cpu"
    return int(torch.randint(1 << 32, (), generator=generator, device=where))


SHORT = 16  # tokens; draws for longer gaps hardly ever come to the same text


def merge_calls(model, fill):
    """(Memo, rows to draw at once) if many rows have short gaps, else (None, None)."""
    longest = max([0, *fill.sum(1).tolist()])
    if model.objective.n_texts > 1 or longest > SHORT:
        return None, None
    limit = (1 << 24) // (model.vocab_size * max(1, longest))  # 2^24 logits per step
    return Memo(), max(limit, group_size(model, fill.device))


# ---- Texts in, texts out
class Written(NamedTuple):
    """A text that a Writer has written."""

    segments: list  # with the lengths of all gaps
    ids: list
    drawn: torch.Tensor  # (T,) float64, log p of each token when it was last drawn; NaN: given
    calls: int
    parts: list  # (text, whether it was filled) of each segment

    @property
    def text(self):
        return joined(self.parts)

    def tokens(self, end_id):
        """How many tokens were written, up to the [END] that ended it."""
        new = [id for id, logp in zip(self.ids, self.drawn.tolist()) if not math.isnan(logp)]
        return new.index(end_id) + 1 if end_id in new else len(new)


class Rows:
    """Some rows of one text, while they are written.

    segments: with known lengths. is_template: the text ends where the template ends; otherwise
    [END] may end it. has_length: for documents, the length is given, not drawn.
    """

    def __init__(self, writer, segments, samples, is_template, has_length=False, memo=None):
        model, tokenizer, settings = writer.model, writer.tokenizer, writer.settings
        self.writer = writer
        self.segments = segments
        self.samples = samples
        self.memo = memo
        ids = to_ids(segments, model.mask_id)
        self.x = torch.tensor(ids, dtype=torch.int64).repeat(len(samples), 1)
        is_given = abilities.knows_lengths(model)  # the length of a text, before it is written
        if is_given and not (is_template or has_length):
            u = uniform(settings.seed, -1, samples, range(1))[2][:, 0]
            self.x = end_documents(model, self.x, u)
        self.drawn = torch.full(self.x.shape, math.nan, dtype=torch.float64)
        self.calls = torch.zeros(len(samples), dtype=torch.int64)
        ends = not (is_template or is_given)
        self.may_draw = dict(end_id=tokenizer.end_id) if ends else dict(forbid=[tokenizer.end_id])
        self.may_draw["allowed"] = templates.allowed_tokens(segments, tokenizer)
        if any(segment.is_gap and segment.pattern for segment in segments):
            self.may_draw["constraints"] = products.drawing().of_template(segments)

    def chunks(self):
        """The Chunks in which it is written; see `plan`."""
        model = self.writer.model
        return plan(model, self.x == model.mask_id, self.samples, self.writer.settings)

    def steps(self):
        """Yields a Step, on the CPU, after each network call."""
        writer = self.writer
        x = self.x.to(writer.device)
        settings = (self.samples, writer.settings)
        for step in take_steps(writer.model, x, None, *settings, memo=self.memo, **self.may_draw):
            step = Step(step.number, *(tensor.cpu() for tensor in step[1:]))
            token = step.x[step.drawn][:, None]
            self.drawn[step.drawn] = step.logp.gather(1, token)[:, 0].double()
            self.x = step.x
            self.calls = step.calls
            yield step

    def written(self):
        """[Written] of all rows; UserError if a displayed text does not match its pattern."""
        tokenizer = self.writer.tokenizer
        made = []
        for ids, drawn, calls in zip(self.x.tolist(), self.drawn, self.calls.tolist()):
            parts = to_texts(self.segments, ids, tokenizer)
            must_match = "constraints" in self.may_draw
            if must_match and not templates.matches(self.segments, parts, tokenizer):
                what = "a gap does not match as it is shown"
                raise UserError(f"{what}: the tokens beside it change its text")
            made.append(Written(self.segments, ids, drawn, calls, parts))
        return made


class Writer:
    """Writes texts and fills gaps: for the command line, a server and Python callers.

    settings: SamplerSettings, resolved
    """

    def __init__(self, model, tokenizer, settings):
        python_arguments.check_tokenizer(tokenizer, model)
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.device = device_of(model)

    def segments(self, text, length=0):
        """(the segments of a text, whether it is a template); length: in tokens, if it is not."""
        config = self.model.config
        text = python_arguments.check_text("" if text is None else text)
        if not templates.is_template(text, self.tokenizer):
            return of_prompt(text, self.tokenizer, length, config), False
        if config.prompt_column:
            fix = "it answers prompts, so give only a prompt"
            raise UserError(f"{text[:40]!r} has gaps, which this model cannot fill: {fix}")
        if length:
            fix = "leave one of them out"
            raise UserError(f"length={length} and a template, which has its own length; {fix}")
        return parse(text, self.tokenizer, config.block_size), True

    def check(self, segments):
        """Raise UserError for gaps that this model cannot draw, not seeing what follows."""
        x = torch.tensor([to_ids(segments, self.model.mask_id)])
        python_arguments.check_gaps(self.model, x, x == self.model.mask_id)

    def batches(self, segments, n, is_template, has_length=False, size=None):
        """Yields Rows of n texts, whose numbers are 0 .. n - 1."""
        ids = torch.tensor([to_ids(segments, self.model.mask_id)])
        memo, merged = merge_calls(self.model, ids == self.model.mask_id) if n > 1 else (None, None)
        for rows in groups(self.model, n, self.device, size or merged, writing=True):
            samples = torch.arange(rows.start, rows.stop)
            yield Rows(self, segments, samples, is_template, has_length, memo)

    def write(self, segments, n, is_template, has_length=False):
        """[Written] of n texts."""
        made = []
        for rows in self.batches(segments, n, is_template, has_length):
            for _ in rows.steps():
                pass
            made += rows.written()
        return made

    def filling(
        self, segments, n, max_gap=0, update=lambda n: None, deadline=math.inf, reach=REACH
    ):
        """The filling.Filling that searches for the n likeliest fills of a template."""

        def draw(segments, n):
            if deadline < math.inf:
                n = 1
            gaps = [segment for segment in segments if segment.is_gap]
            if abilities.is_causal(self.model) or any(gap.pattern or gap.choices for gap in gaps):
                return self.write(segments, n, True)
            # Filling the surest token in each call gets closer to the best fill than most draws
            # (results/infilling.md).
            steps = sum(gap.size for gap in gaps)
            if deadline < math.inf:
                steps = min(steps, 16)
            greedy = SamplerSettings(steps, order="max_prob", temperature=0.0, correct="0")
            surest = Writer(self.model, self.tokenizer, resolve(greedy, self.model))
            return self.write(segments, n - 1, True) + surest.write(segments, 1, True)

        settings = (self.model, self.tokenizer, segments, n, max_gap, draw, update, deadline)
        return filling.Filling(*settings, reach)


def write(
    model: mdlm.Model,
    tokenizer: Tokenizer,
    text: str | Sequence[str] | None = None,
    n: int = 1,
    length: int = 0,
    generator: torch.Generator | None = None,
    max_gap: int = 0,
    **settings,
) -> list[str]:
    """Write n texts: a list of str. settings: as in `generate`.

    text    None: a text from nothing; "To be███" or "To [___] be": fill it; else its beginning.
            For a list: n texts for the first, then n for the second, and so on
    length  tokens of a text that is not a template (0: the context, or drawn for documents)
    """
    rows = write_rows(model, tokenizer, text, n, length, generator, max_gap, settings)
    return [row.text for row in rows]


def write_with_logprobs(
    model: mdlm.Model,
    tokenizer: Tokenizer,
    text: str | Sequence[str] | None = None,
    n: int = 1,
    length: int = 0,
    generator: torch.Generator | None = None,
    max_gap: int = 0,
    k: int = 5,
    **settings,
) -> list[tuple[str, list[TokenLogprob]]]:
    """The texts that `write` returns for these arguments, each with its tokens' log-probabilities.

    k       how many of the likeliest tokens to return at each position

    A token's `drawn` is log p of its last draw, given what the network saw then, at temperature 1,
    and with guidance if there is one.
    """
    k = python_arguments.whole_number("k", k, 1)
    rows = write_rows(model, tokenizer, text, n, length, generator, max_gap, settings)
    return [(row.text, token_logprobs(model, tokenizer, row.ids, row.drawn, k)) for row in rows]


def write_rows(model, tokenizer, text, n, length, generator, max_gap, settings):
    """[Written] of the texts of `write`."""
    limits = TextFlags(num_samples=n, length=length, max_gap=max_gap)
    check_settings(limits)
    is_seeded = "seed" in settings
    writer = Writer(model, tokenizer, from_keywords(settings, model))
    several = list(text) if isinstance(text, (list, tuple)) else [text]
    todo = [writer.segments(one, limits.length) for one in several]
    for segments, _ in todo:
        templates.check_lengths(segments, filling.longest_gap(model, segments, max_gap))
    made = []
    for segments, is_template in todo:
        if templates.has_open(segments):  # the likeliest lengths
            segments = writer.filling(segments, 1, limits.max_gap).finish()[0].segments
        if not is_seeded:
            writer.settings = replace(writer.settings, seed=draw_seed(generator))
        made += writer.write(segments, limits.num_samples, is_template, bool(limits.length))
    return made


def search(
    model: mdlm.Model,
    tokenizer: Tokenizer,
    text: str,
    top: int = 5,
    max_gap: int = 0,
    limit: int = filling.LIMIT,
    seconds: float = math.inf,
    reach: int = REACH,
) -> Candidates:
    """The most likely fills of a template, as filling.Candidates: a list, best first.

    text     "To be███", "To [___] be", "My [___|name|sword]": as for --infill
    top      how many fills
    max_gap  the longest fill of [___], in tokens (0: 16, or 32 if an autoregressive model fills it
             and it must match: a line of code)
    limit    maximum number of sequences that the search computes
    reach    tokens of text after [___] that rank its fills, of autoregressive models
    seconds  time limit. Comparing lengths comes before it, and the list always has a fill

    Each candidate has `text`, `fills` (of each gap), `p`, its probability among all fills of its
    length given the text on both sides, and `logp`, by which they are ranked. (For autoregressive
    models and models of blocks, p is that of the gap and the text after it.) Candidates.proven says
    that no other fill of the lengths searched is likelier; Candidates.bound is an upper bound on
    log p of every fill that is not listed.
    """
    began = time.monotonic()
    top = python_arguments.whole_number("top", top, 1)
    limit = python_arguments.whole_number("limit", limit, 1)
    max_gap = python_arguments.whole_number("max_gap", max_gap, 0)
    reach = python_arguments.whole_number("reach", reach, 1)
    if not (isinstance(seconds, (int, float)) and seconds >= 0):
        raise UserError(f"seconds={seconds!r} is not a time; give a number from 0 on")
    writer = Writer(model, tokenizer, from_keywords({}, model))
    segments, is_template = writer.segments(text)
    if not is_template:
        raise UserError(f"{text[:40]!r} has no gap; write █ or [___] where text is missing")
    deadline = began + seconds
    return writer.filling(segments, top, max_gap, deadline=deadline, reach=reach).finish(limit)


def fix(
    model: mdlm.Model, tokenizer: Tokenizer, text: str, caution: float = 0.0
) -> tuple[str, list]:
    """Proofread a text: (text, changes), the new text and a list of changes.Change.

    caution: additional gain, in nats, that a change needs. ValueError for a model that does not see
    the text on both sides of a token.
    """
    limits = TextFlags(caution=caution)
    check_settings(limits)
    return products.proofreading().fix(
        model, tokenizer, python_arguments.check_text(text), limits.caution
    )


# ---- The command line
CLASHES = [
    ("infill", "prompt batch length", "a template determines what to write"),
    ("batch", "prompt length watch html num_samples", "leave one of them out"),
    ("candidates", "num_samples watch html", "candidates are a ranked list of fills"),
    ("fix", "prompt infill batch length num_samples candidates watch compare", "it proofreads"),
    ("watch", "json", "watch a text, or write JSON for a program"),
    ("compare", "batch candidates watch max_gap", "--compare draws texts of known lengths"),
]


def place_text(given):
    """The flags, with the text without a flag as --infill, if it has gaps, or as --prompt."""
    given = dict(given)
    text = given.pop("text")
    for name in ("prompt", "infill", "batch", "fix"):
        if name in given:
            raise UserError(f"{text[:40]!r} is a second text besides --{name}; give one of them")
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
    python_arguments.check_text(options.prompt + options.infill)
    if templates.GAP.search(options.prompt):
        raise UserError("--prompt has gaps; give it as --infill, or without a flag before it")
    if options.html or options.json:
        stdin = "/dev/stdin" if "-" in (options.infill, options.batch, options.fix) else ""
        outputs.check_all(replace(options, output=""), stdin=stdin)
    if options.output:
        products.proofreading_of_files().check_output(options)
    rules = [
        ("candidates max_gap reach", not (options.infill or options.batch), "without gaps"),
        ("logprobs", not (options.json or options.batch), "without --json"),
        ("output caution", not options.fix, "without --fix"),
        ("steps", options.order == "one_shot", "with --order=one_shot, which is one step"),
    ]
    check_idle(given, rules)


def load(options):
    """(model, tokenizer, folders, options) of --out_dir, of out/ or the one that ships."""
    device = pick_device(options.device)
    gaps = bool(options.infill or options.batch or options.fix)
    trusted = options.trust_remote_code
    how = dict(device=device, whole=gaps, trust_remote_code=trusted)
    read = partial(load_in, options.dtype, mdlm.load, **how)
    folders, (model, tokenizer, config) = read_newest(default_run(options.out_dir), read)
    if config.prompt_column and not (options.prompt or options.fix):
        raise UserError("this model learned to answer prompts; give --prompt, not a template")
    return model, tokenizer, folders, replace(options, device=str(device))


def show_samples(writer, segments, options, is_template, pages):
    """Write --num_samples texts: yields (parts, facts) of each, and adds to pages for --html."""
    tokenizer, mask = writer.tokenizer, writer.model.mask_id
    n = max(1, options.num_samples)
    size = 1 if options.watch else None
    for rows in writer.batches(segments, n, is_template, bool(options.length), size):
        began = time.monotonic()
        total = sum(chunk.steps for chunk in rows.chunks())
        given = rows.x[0] if is_template else torch.tensor(to_ids(segments, mask))
        films = []
        if options.html:
            films = [products.pages().HtmlRecorder(tokenizer, given, mask) for _ in rows.x]
        watches = [
            display.TerminalPlayer(tokenizer, given, mask, total) for _ in rows.x if options.watch
        ]
        with terminal.bar(total=total, desc="writing", unit=" steps", disable=options.watch) as bar:
            for step in rows.steps():
                bar.update()
                for row, show in [*enumerate(films), *enumerate(watches)]:
                    show.add(step, row)
        for watch in watches:
            watch.clear()
        seconds = (time.monotonic() - began) / len(rows.x)
        for one in rows.written():
            facts = dict(steps=total, calls=one.calls, seconds=seconds)
            if films:
                about = dict(text=one.text, title=f"sample {len(pages) + 1}")
                pages.append(facts | about | films.pop(0).page(one.ids))
            facts["tokens"] = one.tokens(tokenizer.end_id)
            if options.logprobs:
                facts["logprobs"] = logprobs_of(writer, one.ids, one.drawn, options.logprobs)
            yield one.parts, facts


def logprobs_of(writer, ids, drawn, k):
    return as_json(token_logprobs(writer.model, writer.tokenizer, ids, drawn, k))


def show_search(writer, found, options):
    """(the parts of each candidate, facts) of Candidates."""
    total = sum(math.exp(one.logp - found[0].logp) for one in found)
    rows = [
        dict(text=one.text, p=one.p, score=one.logp)
        | dict(share=math.exp(one.logp - found[0].logp) / total)
        for one in found
    ]
    facts = dict(steps=found.sequences, calls=found.sequences, seconds=found.seconds)
    facts |= dict(score=found[0].logp, p=found[0].p)
    bound = found.bound if math.isfinite(found.bound) else None  # none is left: JSON has no inf
    facts |= dict(proven=found.proven, bound=bound, excluded=found.excluded)
    facts |= dict(compares_lengths=found.compares_lengths, candidates=rows)
    if options.logprobs:
        drawn = [math.nan if value is None else value for value in found[0].drawn]
        drawn = torch.tensor(drawn, dtype=torch.float64)
        facts["logprobs"] = logprobs_of(writer, found[0].ids, drawn, options.logprobs)
    return [one.parts for one in found], facts


def attempt(of_batch, function, *arguments):
    """function(*arguments); in a batch, a UserError becomes a warning, and the result is None."""
    try:
        return function(*arguments)
    except UserError as e:
        if not of_batch:
            raise
        terminal.warn(str(e))
        return None


def drawn(writer, todo, options, pages):
    """Yields (template, [parts], facts) of all texts to draw, in order; adds to pages for --html.

    todo: pairs (template or None, segments)
    """
    for template, segments in todo:
        if templates.has_open(segments):
            segments = writer.filling(segments, 1, options.max_gap).finish()[0].segments
            terminal.warn("all samples use the most likely length of [___]")
        is_template = template is not None
        for parts, facts in show_samples(writer, segments, options, is_template, pages):
            yield template, [parts], facts


def searched(writer, todo, options):
    """Yields (template, [parts, best first], facts) of all templates, in order; todo: as above."""
    n = options.candidates or (1 if options.batch else 3)
    hide = bool(options.batch)  # a bar of all templates is there
    with terminal.bar(desc="searching", unit=" texts", disable=hide) as bar:

        def begin(segments):
            return writer.filling(segments, n, options.max_gap, bar.update, reach=options.reach)

        for some in (todo[i : i + TOGETHER] for i in range(0, len(todo), TOGETHER)):
            began = time.monotonic()
            made = [attempt(options.batch, begin, segments) for _, segments in some]
            filling.finish([one for one in made if one])
            seconds = (time.monotonic() - began) / len(some)
            for (template, _), one in zip(some, made):
                found = one and attempt(options.batch, one.candidates)
                if not found:
                    yield template, [[]], dict(steps=0, calls=0, seconds=seconds, error="no fill")
                    continue
                found.seconds = seconds
                if len(found) < options.candidates:
                    terminal.warn(f"there are {len(found)} fills, not {options.candidates}")
                yield template, *show_search(writer, found, options)


TOGETHER = 32  # templates whose searches share network calls


def segments_of(template, writer, options, is_drawn):
    """The segments of a template; None: of --prompt. UserError if it cannot be written."""
    config = writer.model.config
    if template is None:
        return of_prompt(options.prompt, writer.tokenizer, options.length, config)
    segments = parse(template, writer.tokenizer, config.block_size)
    longest = filling.longest_gap(writer.model, segments, options.max_gap)
    templates.check_lengths(segments, longest)
    if is_drawn:
        writer.check(segments)
    return segments


def compare(options, model, tokenizer, folders):
    """--compare: texts with each value of a setting, and a table of them."""
    words = products.word_statistics()
    variants = words.variants(options, SETTINGS, partial(resolve, model=model))
    writer = Writer(model, tokenizer, resolve(options, model))
    segments = segments_of(options.infill or None, writer, options, True)
    if templates.has_open(segments):
        raise UserError("--compare needs gaps of known lengths; write █ for each token")
    checkpoint_score.introduce(folders, options.out_dir)
    statistics = words.WordStatistics(words.training_text(folders[0], tokenizer, model.config))

    def fill(settings, pages):
        with_them = Writer(model, tokenizer, settings)
        return show_samples(with_them, segments, settings, bool(options.infill), pages)

    with open_lines(options) as lines:
        pages = words.compare(variants, fill, statistics, lines)
    if options.html:
        about = products.pages().settings(model, resolve(options, model))
        about.pop(options.compare.partition("=")[0], None)  # each tab has its own
        products.pages().write_page(options.html, pages, about)
    return 0


def open_lines(options):
    """A context manager for the file that gets the lines of JSON, or for None."""
    if options.json == "-" or (options.batch and not options.json):
        sys.stdout.reconfigure(encoding="utf-8")  # JSON's, whatever the locale's is
        return contextlib.nullcontext(sys.stdout)
    return outputs.Lines(options.json) if options.json else contextlib.nullcontext()


def open_batch(options, todo, folders):
    """(what open_lines returns, what is left to do) of a batch; a stopped batch continues."""
    if not options.json or options.json == "-" or not outputs.is_replaced(Path(options.json)):
        return open_lines(options), todo
    settings = asdict(replace(options, json=""))
    weights = [(folder / "model.safetensors").stat().st_mtime_ns for folder in folders]
    content = repr(([template for template, _ in todo], settings, [*map(str, folders)], weights))
    lines = outputs.Continued(options.json, hashlib.sha256(content.encode()).hexdigest())
    return lines, todo[lines.done :]


def main(argv):
    about = f"{__doc__}\n--order: {MEANINGS}."
    given = parse_settings(Options, argv, about, groups=GROUPS, free="text")
    if "text" in given:
        given = place_text(given)
    options = Options(**given)
    check(options, given)
    model, tokenizer, folders, options = load(options)
    if options.fix:
        return products.proofreading_of_files().fix_file(options, model, tokenizer, folders)
    if options.compare:
        return compare(options, model, tokenizer, folders)
    options = resolve(options, model)  # refuses what the model cannot follow, before reading
    writer = Writer(model, tokenizer, options)
    is_template = bool(options.infill or options.batch)
    # Sampler flags ask for draws instead of the likeliest fills.
    is_asked = not options.candidates and bool({*SETTINGS} & given.keys())
    is_drawn = options.num_samples or options.watch or options.html or is_asked or not is_template
    to_segments = partial(segments_of, writer=writer, options=options, is_drawn=is_drawn)
    if is_template:
        todo = templates.parse_all(options.infill, options.batch, to_segments)
    else:
        todo = [(None, to_segments(None))]
    checkpoint_score.introduce(folders, options.out_dir)
    if options.batch:
        opened, todo = open_batch(options, todo, folders)
    else:
        opened = open_lines(options)
    pages = []
    if is_drawn:
        answers = drawn(writer, todo, options, pages)
    else:
        answers = searched(writer, todo, options)
    with opened as lines:
        # No bar beside the lines of JSON on a terminal.
        hide = not options.batch or (lines is sys.stdout and terminal.is_terminal(sys.stdout))
        rule = ""  # between texts
        with terminal.bar(total=len(todo), unit=" templates", disable=hide) as bar:
            for template, texts, facts in answers:
                if lines is not sys.stdout and not options.batch:
                    print(rule, end="")
                    display.show(texts, facts, "candidates" in given)
                    rule = "-" * 40 + "\n" if template is None else ""
                if lines:
                    print(display.json_line(template, texts[0], facts), file=lines, flush=True)
                bar.update()
    if options.html:
        replay = products.pages()
        replay.write_page(options.html, pages, replay.settings(model, options))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
