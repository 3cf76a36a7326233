"""How likely texts are, and each of their tokens.

Every token is predicted in the model's own way. Its log-probability given all others is that of
log p(x_i | x_j, j != i), where x_i alone is masked. A model of blocks sees no later block, and an
autoregressive one no later token, so there it is given what the model sees.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanomdlm.support import abilities
from nanomdlm.support.cli.python_arguments import (
    check_ids,
    check_text,
    check_tokenizer,
    whole_number,
)
from nanomdlm.support.data.tokenizer import Tokenizer
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.batching import compute
from nanomdlm.support.infill.display import likeliest
from nanomdlm.support.infill.model_calls import (
    call_size,
    checked,
    device_of,
    groups,
    logits_at,
    to_context,
)
from nanomdlm.support.infill.shared_padding import compute_once
from nanomdlm.support.infill.templates import given_text
from nanomdlm.support.numerics import generator
from nanomdlm.support.run.calibration import calibrated


class TokenLogprob(NamedTuple):
    """A token of a text. All log-probabilities are in nats."""

    text: str
    drawn: float | None  # log p when it was drawn; None: it was given
    logp: float | None  # given all others that the model sees; None: the model predicts no such one
    likeliest: list[tuple[str, float]]  # the likeliest tokens there, with theirs


class Score(NamedTuple):
    """How likely a text is."""

    tokens: int  # that are scored
    logp: float  # log p of all of them, nats: exact, for the model that is read from left to right
    nelbo: float  # nats per token: an upper bound of -log p, from random masks
    se: float  # the standard error of nelbo; 0 where one order is all there is


# ---- Each token given the others
def predictions(
    model: torch.nn.Module, x: torch.Tensor, where: torch.Tensor, given_all: bool = True
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (rows (n,), positions (n,), logits (n, V)) until each True of `where` is predicted.

    x: (B, L) ids of whole contexts
    where: (B, L) bool, tokens that the model is trained to predict
    given_all: each is given all others that the model sees; else those before it alone

    Each token is a sequence in a network call. In blocks of S, the tokens at one place of all
    blocks share a sequence (S sequences for a text), and of an autoregressive model all tokens do.
    """
    objective = model.objective
    L = x.shape[1]
    at = torch.arange(L, device=x.device)
    scored = objective.scored_mask(x)
    if not abilities.fills_gaps(model):
        S = abilities.piece_size(model)
        for place in range(S):
            here = at % S
            hidden = scored & ((here == place) if given_all else (here >= place))
            xt = x if abilities.is_causal(model) else x.masked_fill(hidden, model.mask_id)
            for batch in groups(model, len(x), x.device):
                row, i = (where[batch] & (here == place)).nonzero().T
                if len(row):
                    view = objective.view(xt[batch], x[batch], row * L + i)
                    yield row + batch.start, i, checked(compute(model, [view])[0])
        return
    rows, places = where.nonzero().T
    for batch in groups(model, len(rows), x.device):
        row = rows[batch]
        i = places[batch]
        hidden = (at == i[:, None]) if given_all else (at >= i[:, None])
        xt = x[row].masked_fill(hidden & scored[row], model.mask_id)
        yield row, i, logits_at(model, xt, torch.arange(len(row), device=x.device), i, x.device)


def window_start(model, i, T, given_all=True):
    """Where the context begins in which token i of T is predicted, if T is more than the context.

    Around the token; where no later block or token is seen, up to the end of its own.
    """
    L = model.config.block_size
    if abilities.fills_gaps(model) and not given_all:
        return max(0, i + 1 - L)
    if abilities.fills_gaps(model):
        return min(max(0, i - L // 2), T - L)
    S = abilities.piece_size(model)
    return max(0, (i // S + 1) * S - L)


def predict_each(model, ids, shown, given_all=True):
    """Yield (position, logits (V,)) of the tokens `shown` (T,) of a text ids (T,).

    given_all: as for `predictions`

    Those that the model is not trained to predict are left out. T may exceed the context: each
    token then has a context of its own, see window_start.
    """
    T = len(ids)
    L = model.config.block_size
    windows = {}  # first position -> the tokens that are predicted in it
    for i in filter(shown.__getitem__, range(T)):
        start = window_start(model, i, T, given_all) if T > L else 0
        windows.setdefault(start, []).append(i - start)
    for start, inside in sorted(windows.items()):
        x = to_context(model, ids[None, start : start + L])
        where = torch.zeros_like(x, dtype=torch.bool)
        where[0, inside] = True
        where &= model.objective.scored_mask(x)
        for _, at, logits in predictions(model, x, where, given_all):
            yield from zip((at + start).tolist(), logits)


@torch.no_grad()
def token_logprobs(model, tokenizer, ids, drawn=None, k=5, n=None, first=0, given_all=True):
    """A list of TokenLogprob for the tokens of a text, without its [END].

    ids: list of all that the model sees, at least one context if the text ends with [END]
    drawn: (T,) float64, log p of each when it was drawn, NaN for the given ones; None: all are
    k: how many of the likeliest tokens; first, n: only for ids first .. n - 1
    given_all: each given all others that the model sees; else given those before it, as in `score`
    """
    model = calibrated(model)
    n = len(ids) if n is None else n
    shown = [first <= i < n and ids[i] != tokenizer.end_id for i in range(len(ids))]
    texts = tokenizer.pieces(ids[:n])
    found = {}
    x = torch.tensor(ids, device=device_of(model))
    for i, logits in predict_each(model, x, shown, given_all):
        logp = logits.log_softmax(-1)
        likely = [pair for pair in likeliest(tokenizer, logp, k, i == 0) if pair[1] > -math.inf]
        found[i] = (logp[ids[i]].item(), likely)
    tokens = []
    for i in filter(shown.__getitem__, range(n)):
        was = None if drawn is None or drawn[i].isnan() else drawn[i].item()
        tokens.append(TokenLogprob(texts[i], was, *found.get(i, (None, []))))
    return tokens


def logprobs(
    model: torch.nn.Module, tokenizer: Tokenizer, texts: str | Sequence[str], k: int = 5
) -> list[list[TokenLogprob]]:
    """The TokenLogprobs of each text as it is: a list for each.

    texts: a text or a list of them, of any length. In one beyond the context, a token is seen with
        as many tokens on either side as fit into it
    k: how many of the likeliest tokens are named at each place

    Each token costs a sequence in a network call; see `predictions`. Raises UserError for a text
    that the tokenizer cannot encode.
    """
    check_tokenizer(tokenizer, model)
    k = whole_number("k", k, 1, model.vocab_size)
    several = list(texts) if isinstance(texts, (list, tuple)) else [texts]
    rows = [tokenizer.encode_lossless(check_text(text)) for text in several]
    return [token_logprobs(model, tokenizer, ids, None, k) if ids else [] for ids in rows]


def as_json(tokens):
    """TokenLogprobs as dicts for JSON, with six digits after the point."""

    def rounded(p):
        return p if p is None else round(p, 6)

    return [
        token._asdict()
        | dict(drawn=rounded(token.drawn), logp=rounded(token.logp))
        | dict(likeliest=[(text, rounded(p)) for text, p in token.likeliest])
        for token in tokens
    ]


# ---- Whole texts
@torch.no_grad()
def score(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    texts: str | tuple[str, str] | Sequence[str | tuple[str, str]],
    passes: int = 64,
    seed: int = 0,
) -> list[Score]:
    """The exact log-likelihood of each text and its NELBO, a Score for each.

    texts: a text, a pair (context, text) for log p(text | context), or a list of these. A model
        that learned answers (--prompt_column) needs pairs (prompt, answer)
    passes: random masks of a text (or of a context of it), an even number; more make `se` smaller
    seed: of the masks; the same one gives the same numbers

    log p is the chain rule from left to right, log p = sum_i log p(x_i | x_1 .. x_{i-1}), and the
    NELBO the mean over l in 1..n and random sets of l masked tokens of the mean CE there (per block
    in a model of blocks), as in mdlm.evaluate. What follows the text is unknown: [MASK].

    Documents: with given lengths all is given the length; else the [END] that ends a text is a
    token of it. A text beyond the context is cut into windows of that size, each of which begins
    anew, as in eval.py; a pair must fit. Raises UserError if it does not, for texts that cannot be
    encoded, and for those without a token to score.
    """
    check_tokenizer(tokenizer, model)
    model = calibrated(model)
    passes = whole_number("passes", passes, 2, 1 << 20)
    if passes % 2:
        raise UserError(f"passes={passes} is odd; give an even number, because masks come in pairs")
    seed = whole_number("seed", seed, 0, (1 << 32) - 1)
    is_list = isinstance(texts, (list, tuple)) and not is_pair(texts)
    cuts = [cut_windows(model, tokenizer, text) for text in (texts if is_list else [texts])]
    windows = [window for several in cuts for window in several]
    if not windows:
        return []
    x, scored = (torch.cat(several) for several in zip(*windows))  # (W, L)
    logp = chain(model, x, scored)
    bounds = [masked_bound(model, *row, passes, seed) for row in zip(x[:, None], scored[:, None])]
    scores = []
    done = 0
    for several in cuts:
        rows = slice(done, done + len(several))
        done = rows.stop
        n = scored[rows].sum(1).double().cpu()  # (w,)
        nelbo, se = torch.tensor(bounds[rows], dtype=torch.float64).T
        total = n.sum()
        numbers = (logp[rows].sum(), (n * nelbo).sum() / total, (n * se).norm() / total)
        scores.append(Score(int(total), *(number.item() for number in numbers)))
    return scores


def is_pair(text):
    """Whether it is a pair (context, text), not a list of texts."""
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(t, str) for t in text)


def cut_windows(model, tokenizer, text):
    """[(ids (1, L), which of them are scored (1, L))] of a text, or of a pair (context, text)."""
    L = model.config.block_size
    context = ""
    if is_pair(text):
        context, text = text
    check_text(text)
    learned_answers = model.config.prompt_column
    if learned_answers and not context:
        raise UserError("this model learned to answer prompts; give pairs (prompt, answer)")
    end = [] if tokenizer.end_id is None or abilities.knows_lengths(model) else [tokenizer.end_id]
    if learned_answers:
        given = given_text(context, tokenizer, model.config).ids
        ids = tokenizer.encode_lossless(text)
    elif context:
        given, ids = tokenizer.encode_pair(context, text)
    else:
        given, ids = [], tokenizer.encode_lossless(text)
    if not (ids or end):
        raise UserError(f"{text[:40]!r} has no token to score; give some text")
    ids = [*given, *ids, *end]
    if given and len(ids) > L:
        raise UserError(f"a pair has {len(ids)} tokens, but the context has only {L}; shorten it")
    windows = []
    device = device_of(model)
    for start in range(0, len(ids), L):
        part = torch.tensor([ids[start : start + L]], device=device)
        check_ids(model, part, "a text", masks=False)
        at = torch.arange(L, device=device)[None]
        scored = (at >= len(given)) & (at < part.shape[1])
        windows.append((to_context(model, part), scored))
    return windows


def chain(model, x, scored):
    """(B,) float64 log p of the scored tokens (B, L) of x (B, L), each given those before it."""
    total = torch.zeros(len(x), dtype=torch.float64)
    for row, at, logits in predictions(model, x, scored, given_all=False):
        ce = F.cross_entropy(logits, x[row, at], reduction="none").cpu().double()
        total.index_add_(0, row.cpu(), -ce)
    return total


def masked_bound(model, x, scored, passes, seed):
    """(NELBO in nats per token, its standard error) of the scored tokens of one text x (1, L).

    Two masks, drawn independently, have their number of masks from each of passes / 2 equal ranges:
    so counts are spread evenly, and half of the mean squared difference of two is the variance.
    """
    objective = model.objective
    L = x.shape[1]
    n_texts = objective.n_texts
    n = scored.view(n_texts, -1).sum(1).cpu()  # (n_texts,) scored tokens
    if abilities.is_causal(model):  # all tokens are predicted in one call
        return -chain(model, x, scored).item() / int(n), 0.0
    half = passes // 2
    g = generator("score", seed)
    range_of = torch.rand(half, n_texts, generator=g, dtype=torch.float32).argsort(0)
    u = (range_of + torch.rand(2, half, n_texts, generator=g, dtype=torch.float64)) / half
    counts = (1 + (u * n).long()).minimum(n).flatten(0, 1).to(x.device)  # (passes, n_texts)
    sums = torch.zeros(counts.shape, dtype=torch.float64)
    network = compute_once(model)
    for batch in groups(model, passes, x.device, call_size(model, x.device)):
        samples = torch.arange(batch.start, batch.stop, device=x.device)
        x0 = x.expand(len(samples), -1).contiguous()
        key = (0, samples, seed, scored.expand(len(samples), -1))
        made = objective.batch(model.ops, x0, counts[batch].flatten(), *key).without_padding()
        logits = checked(compute(network, [made.view])[0])
        ce = F.cross_entropy(logits, made.targets, reduction="none").cpu().double()
        text = made.at.cpu() // (L // n_texts) + batch.start * n_texts
        sums.view(-1).index_add_(0, text, ce)
    mean = sums / counts.clamp(min=1).cpu()  # of each text's masked tokens
    each = (mean * n).sum(1) / n.sum()  # (passes,)
    first, second = each.view(2, half)
    return each.mean().item(), (first - second).norm().item() / passes
