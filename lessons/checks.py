"""The checks of the lessons' exercises. lessons/check.py runs one of them in its own process:

    python lessons/checks.py VERDICT LESSON FILE    # writes "right", "wrong" or "not checked" and
                                                    # a sentence to the file VERDICT, as JSON

Random numbers have a fixed seed, and tolerances are 6 standard errors or more: a correct answer
passes.
"""

import contextlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import sys
import traceback
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # answers may import mdlm too

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch

MASK = 3  # [MASK] in the small worlds below, after the tokens 0, 1, 2
BOS = 3
MEMORY = 4 << 30  # bytes that an answer may use, PyTorch included


class Wrong(Exception):
    """A wrong answer: what is wrong, in one sentence."""


class Unusable(Exception):
    """Nothing to check: a wrong command, file or function, in one sentence."""


def demand(condition, sentence):
    if not condition:
        raise Wrong(sentence)


def number(value, name):
    """Convert what a function returned to a float."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"{name} returns a {type(value).__name__}, not one number") from None


def close(value, wanted, name, hint):
    result = number(value, name)
    good = abs(result - wanted) <= 1e-4 * max(1, abs(wanted))
    demand(good, f"{name} gives {result:.4f}, it should be {wanted:.4f}: {hint}")


def demand_ids(xt, like, name):
    good = isinstance(xt, torch.Tensor) and xt.shape == like.shape and xt.dtype == like.dtype
    shape = f"a tensor of shape {tuple(like.shape)} and type {like.dtype}"
    demand(good, f"{name} should return {shape}")


# ---- Small worlds: every sequence of 3 tokens out of {0, 1, 2} has a known probability
SEQUENCES = torch.tensor(list(itertools.product(range(3), repeat=3)))  # (27, 3)


def probabilities():
    """(27,) probabilities of SEQUENCES, whose tokens depend strongly on each other."""
    g = torch.Generator().manual_seed(3)
    return torch.softmax(3 * torch.randn(27, generator=g, dtype=torch.float64), 0)


def exact_model(xt):
    """(B, 3) ids, some of them MASK -> (B, 3, 3) logits: the true conditional probabilities."""
    agrees = ((xt[:, None] == SEQUENCES) | (xt[:, None] == MASK)).all(-1).double()  # (B, 27)
    one_hot = torch.nn.functional.one_hot(SEQUENCES, 3).double()
    joint = torch.einsum("bn,n,niv->biv", agrees, probabilities(), one_hot)
    return (joint / joint.sum(-1, keepdim=True).clamp(min=1e-300)).clamp(min=1e-300).log()


def table_model(xt):
    """As exact_model, but with random predictions that fit no distribution over sequences."""
    g = torch.Generator().manual_seed(5)
    table = 2 * torch.randn(4, 4, 4, 3, 3, generator=g, dtype=torch.float64)
    return table[xt[:, 0], xt[:, 1], xt[:, 2]]


# ---- 1: masking
# Detects: each token masked with probability l / T (another count), the same mask for every row, a
# run of neighbors, positions drawn with repeats, the first l tokens, x0 changed in place.
def check_mask(mask):
    T = 8
    x0 = torch.randint(0, 50, (4000, T))
    before = x0.clone()
    l = torch.randint(1, T + 1, (4000, 1))  # noqa: E741
    xt = mask(x0, l, 99)
    demand(torch.equal(x0, before), "mask changes x0; work on a copy")
    demand_ids(xt, x0, "mask")
    hidden = xt == 99
    demand(torch.equal(xt[~hidden], x0[~hidden]), "a token that is not masked has changed")
    counts = hidden.sum(1, keepdim=True)
    row = int((counts != l).int().argmax())
    wanted = f"row {row} has {int(counts[row])} masks, l says {int(l[row])}"
    demand(torch.equal(counts, l), f"not exactly l tokens are masked: {wanted}")
    # Each of the 6 pairs of 4 positions has the same probability, and rows are drawn separately.
    n = 6000
    pairs = mask(torch.zeros(n, 4, dtype=torch.int64), torch.full((n, 1), 2), 99) == 99
    numbers = Counter(map(tuple, pairs.tolist()))
    least = n / 6 - 6 * math.sqrt(n * 5 / 36)
    most = n / 6 + 6 * math.sqrt(n * 5 / 36)
    good = len(numbers) == 6 and all(least < count < most for count in numbers.values())
    largest = max(numbers.values()) / n
    demand(good, f"not every pair of 4 positions is equally likely: one has {largest:.0%} of all")
    return "exactly l tokens of each row, every set of positions equally likely"


# ---- 2: the loss
# Detects: dividing by the batch's masked count or by all tokens, unmasked tokens scored, sums in
# place of means, no mean over texts, base 2, probabilities taken for logits, a float without
# gradient, logits that cross_entropy reads the wrong way round.
def check_loss(answer):
    def loss(*given):
        try:
            value = answer(*given)
        except RuntimeError as e:
            hint = "F.cross_entropy takes the V logits of a token in dimension 1: give it logits.mT"
            demand("target size" not in str(e), hint)
            raise
        n = value.numel() if isinstance(value, torch.Tensor) else 1
        demand(n == 1, f"loss returns {n} numbers; the last step is the mean over the sequences")
        return value

    p = torch.full((1, 4, 5), 0.025)
    x0 = torch.tensor([[0, 1, 2, 3]])
    p[0, range(4), x0[0]] = torch.tensor([0.9, 0.9, 0.9, 0.2])
    xt = torch.tensor([[9, 9, 9, 3]])
    each = math.log(1 / 0.9)
    value = number(loss(p.log(), x0, xt, 9), "loss")
    for wrong, why in ((3 * each, "a sum: divide it"), (3 * each / 4, "divided by all 4: divide")):
        demand(abs(value - wrong) > 1e-4, f"{value:.4f} is {why} by the 3 masked tokens")
    hint = "the three masked tokens have probability 0.9 each, so the mean is ln(1 / 0.9)"
    close(value, each, "the loss of the lesson's example", hint)
    logits = torch.randn(2, 4, 5, requires_grad=True)
    x0 = torch.tensor([[0, 1, 2, 3], [4, 0, 1, 2]])
    xt = torch.tensor([[9, 1, 2, 3], [9, 9, 1, 9]])
    ce = -logits.detach().log_softmax(-1).gather(-1, x0[..., None])[..., 0]
    texts = ce[0, 0].item(), ce[1, [0, 1, 3]].mean().item()
    value = loss(logits, x0, xt, 9)
    found = number(value, "loss")
    for wrong, why in (
        ((texts[0] + 3 * texts[1]) / 4, "divides by the masked tokens of the batch"),
        (sum(texts), "is the sum over the sequences"),
    ):
        hint = "take the mean of each sequence over its own masked tokens, then their mean"
        demand(abs(found - wrong) > 1e-4, f"with 1 and 3 masked tokens the loss {why}: {hint}")
    hint = "first the mean of each sequence over its own masked tokens, then the mean of sequences"
    close(found, sum(texts) / 2, "with 1 and 3 masked tokens the loss", hint)
    good = isinstance(value, torch.Tensor) and value.requires_grad
    demand(good, "the loss has no gradient; return a tensor, without .item() or .detach()")
    return "the mean over sequences of the mean cross-entropy over masked tokens, 0.1054 by hand"


# ---- 3: the network
# Detects in attend: a causal mask, no division by the root of D, a softmax over the queries, no
# softmax, queries and keys exchanged, heads mixed. In parameters: the row of [MASK] forgotten, its
# column in the head, biases or positions forgotten, a convolution of all channels.
def check_network(attend, parameters):
    q, k, v = torch.randn(3, 2, 3, 5, 4)
    before = [each.clone() for each in (q, k, v)]
    result = attend(q, k, v)
    demand(all(map(torch.equal, before, (q, k, v))), "attend changes q, k or v; work on copies")
    good = isinstance(result, torch.Tensor) and result.shape == v.shape
    demand(good, f"attend should return a tensor of shape (B, H, T, D), here {tuple(v.shape)}")
    right = torch.nn.functional.scaled_dot_product_attention

    def is_like(wanted):
        return torch.allclose(result, wanted, atol=1e-4)

    scores = q @ k.mT / 2
    causal = "a causal mask: each position sees the earlier ones alone; here it sees all"
    demand(not is_like(right(q, k, v, is_causal=True)), causal)
    hint = "divide the products by the root of D, which is 2 here"
    demand(not is_like((2 * scores).softmax(-1) @ v), f"the products are not divided: {hint}")
    demand(not is_like((scores / 2).softmax(-1) @ v), f"the products are divided by D: {hint}")
    why = "the weights of each query should sum to 1, here those of each key do: softmax(-1)"
    demand(not is_like(scores.softmax(-2) @ v), why)
    demand(not is_like(scores @ v), "the weights of a query do not sum to 1; take the softmax")
    why = "queries and keys are exchanged: row i of the weights is of query i"
    demand(not is_like(scores.mT.softmax(-1) @ v), why)
    demand(is_like(right(q, k, v)), "attend differs from softmax(q k^T / root of D) v in each head")
    for V, T, C, layers in ((65, 64, 128, 3), (10, 7, 4, 1)):
        layer = (5 * C + C) + (3 * C * C + 3 * C) + (C * C + C) + (8 * C * C + 5 * C)
        wanted = (V + 1) * C + T * C + layers * layer + C * V + V
        called = f"parameters({V}, {T}, {C}, {layers})"
        found = number(parameters(V, T, C, layers), "parameters")
        named = {
            "the embedding has a row for [MASK] too": C,
            "the head has no column for [MASK]": -C - 1,
            "the vectors of the T places are learned too": T * C,
            "each linear map of a layer has a bias": layers * 9 * C,
            "the head has a bias": V,
            "the convolution has a bias": layers * C,
            "the convolution has five numbers for each channel, no C x C matrix": layers
            * (5 * C - 5 * C * C),
            "there are several layers": (layers - 1) * layer,
            "the convolution is forgotten": layers * 6 * C,
        }
        for why, difference in named.items():
            demand(difference == 0 or found != wanted - difference, f"{called}: {why}")
        demand(found == wanted, f"{called} gives {found:,.0f}, it should be {wanted:,}")
    return "each position attends to all, and no parameter is forgotten"


# ---- 4: a training run
# Detects: bits, base 10, [MASK] counted as a guess; no warm-up, a first step of 0, a decay from the
# start, a cosine, no decay, an end above 0.
def check_schedule(at_start, scale):
    for V in (65, 30522):
        value = number(at_start(V), "at_start")
        demand(abs(value - math.log2(V)) > 1e-4, "that is in bits; a nat needs the logarithm to e")
        demand(abs(value - math.log10(V)) > 1e-4, "that is the logarithm to 10; take that to e")
        why = "[MASK] is never predicted, so it is not among the V tokens to guess from"
        demand(abs(value - math.log(V + 1)) > 1e-6, why)
        hint = "each of V tokens has the probability 1 / V"
        close(value, math.log(V), f"at_start({V})", hint)
    steps, warmup = 100, 9

    def at(step):
        return number(scale(step, steps, warmup), "scale")

    demand(at(0) != 0, "step 0 has a rate of 0 and learns nothing; it is 1 / (warmup + 1)")
    demand(abs(at(0) - 1) > 1e-4, "there is no warm-up: step 0 has the full rate")
    for step, wanted, hint in (
        (30, 1.0, "it stays at its peak up to half of the steps"),
        (50, 1.0, "the decay begins at half of the steps, and with 1"),
        (0, 0.1, "step 0 has 1 / (warmup + 1)"),
        (4, 0.5, "it rises by 1 / (warmup + 1) at each step"),
        (9, 1.0, "at step `warmup` it is at its peak"),
        (75, 0.5, "it falls in a straight line, to 0 at the end"),
        (99, 0.02, "it falls in a straight line, to 0 at the end"),
    ):
        close(at(step), wanted, f"scale({step}, {steps}, {warmup})", hint)
    return "ln V at first; the rate rises, stays for half of the run, and falls to 0"


# ---- 5: BERT's rate or all rates
# Detects: a plain mean of the ten, one share read as another, weights that are the shares, that are
# not divided by ten, that only have the right ratios, that are made up for rates never drawn.
def check_rates(shown, weights):
    ce = [0.8, 0.9, 1.1, 1.3, 1.5, 1.8, 2.1, 2.4, 2.8, 3.2]
    bert = [0.0, 1.0] + 8 * [0.0]
    rising = [(2 * i + 1) / 100 for i in range(10)]
    for share, hint in (
        (bert, "a run that only draws the second tenth shows the loss of the second tenth"),
        (10 * [0.1], "a run that draws all rates equally shows the mean of the ten"),
        (rising, "each loss counts as often as its tenth is drawn"),
    ):
        close(shown(list(ce), list(share)), sum(map(math.prod, zip(ce, share))), "shown", hint)
    for share in (10 * [0.1], rising):
        found = weights(list(share))
        good = isinstance(found, (list, tuple)) and len(found) == 10
        demand(good, "weights should return a list of ten numbers if all tenths are drawn")
        found = [number(w, "weights") for w in found]
        mean = sum(s * w * loss for s, w, loss in zip(share, found, ce))
        hint = "each tenth should count a tenth, however often it is drawn"
        close(mean, sum(ce) / 10, "the mean loss with these weights", hint)
        for s, w in zip(share, found):
            close(w, 0.1 / s, f"the weight of a tenth drawn with {s:.0%}", hint)
    why = "no weight turns losses of the second tenth into those of the others: return None"
    demand(weights(list(bert)) is None, why)
    return "a run shows the rates that it draws; with weights it shows the bound, if it draws all"


# ---- 6: the bound
# Detects: the same weight for all subsets (each count should have the same weight), the empty set
# counted, sums in place of means, unmasked tokens scored; bits by ln 2 the wrong way round.
def check_bound(bound, bits):
    def one(model):
        return lambda xt: model(torch.as_tensor(xt).reshape(1, 3))[0].log_softmax(-1)

    for model in (table_model, exact_model):
        log_p = one(model)
        for x in ([0, 1, 2], [2, 2, 0]):
            wanted = 0.0
            for l in (1, 2, 3):  # noqa: E741
                sets = list(itertools.combinations(range(3), l))
                for hide in sets:
                    xt = [MASK if i in hide else x[i] for i in range(3)]
                    ce = [-log_p(xt)[i, x[i]].item() for i in hide]
                    wanted += sum(ce) / l / len(sets) / 3
            hint = (
                "the mean over l = 1..3 of the mean over sets of l positions of the mean over them"
            )
            text = torch.tensor(x)
            close(bound(log_p, text, MASK), wanted, f"the bound of {x}", hint)
            demand(text.tolist() == x, "bound changes x; work on a copy")
    hint = "the sum of nats is shared by all characters, and a bit is ln 2 nats"
    close(bits(2.0, 300, 1000), 0.6 / math.log(2), "bits(2.0, 300, 1000)", hint)
    return "equal to the enumeration, and for true conditionals to -log p(x) / T"


# ---- 7: the reverse process
# Detects: revealing with probability 1/steps, the likeliest token in place of a draw, a fixed
# number, everything drawn in the first call, left to right, too many calls, x changed in place.
def check_generate(generate):
    seen = []

    def even(xt):
        demand(len(seen) < 4, "more than `steps` network calls")
        seen.append((xt == MASK).double())
        return torch.zeros(*xt.shape, 3)

    x = torch.full((400, 50), MASK)
    x[:, :10] = 1
    before = x.clone()
    out = generate(even, x, MASK, 4)
    demand(torch.equal(x, before), "generate changes x; work on a copy")
    demand_ids(out, x, "generate")
    demand(not (out == MASK).any(), "some [MASK] is left at the end; in the last step 1/s is 1")
    demand(bool((out[:, :10] == 1).all()), "given tokens have changed; draw at [MASK] alone")
    fractions = [masked[:, 10:].mean().item() for masked in seen]
    good = len(fractions) == 4 and all(
        abs(a - b) < 0.025 for a, b in zip(fractions, (1, 0.75, 0.5, 0.25), strict=True)
    )
    shown = ", ".join(f"{fraction:.0%}" for fraction in fractions)
    wanted = "in 4 steps 100, 75, 50, 25 % should be masked at the calls"
    demand(good, f"{wanted}, here {shown}: reveal each with probability 1/s, s = steps .. 1")
    spread = seen[1][:, 10:].sum(1).std().item()
    apart = "each [MASK] is revealed on its own, independently of the others, so the number varies"
    demand(spread > 1.5, f"every text reveals the same number; {apart}")
    places = seen[1][:, 10:].mean(0)
    demand(
        places.max() - places.min() < 0.35, f"some positions are revealed before others; {apart}"
    )
    # The distribution of three steps, exactly, against counts.
    n = 30000
    numbers = Counter(map(tuple, generate(exact_model, torch.full((n, 3), MASK), MASK, 3).tolist()))
    wanted = reverse_process(3)
    chi2 = sum((numbers[x] - n * p) ** 2 / (n * p) for x, p in wanted.items() if n * p >= 5)
    hint = "draw tokens at random from the probabilities, and call the model again in each step"
    demand(
        chi2 < 100,
        f"with three steps some texts occur too often or too rarely (chi2 {chi2:.0f}): {hint}",
    )
    return "the texts of three steps have the probabilities of the reverse process"


def reverse_process(steps):
    """{sequence: probability} after the reverse process with the true conditionals."""
    states = {(MASK,) * 3: 1.0}
    for s in range(steps, 0, -1):
        after = Counter()
        for x, weight in states.items():
            p = exact_model(torch.tensor([x]))[0].softmax(-1).tolist()
            options = []
            for i in range(3):
                if x[i] == MASK:
                    options.append([(v, p[i][v] / s) for v in range(3)] + [(MASK, 1 - 1 / s)])
                else:
                    options.append([(x[i], 1.0)])
            for choice in itertools.product(*options):
                chance = math.prod(c for _, c in choice)
                after[tuple(v for v, _ in choice)] += weight * chance
        states = {x: p for x, p in after.items() if p > 0}
    return states


# ---- 7: a draw from the likeliest tokens
# Detects: a threshold for each token, the token that crosses the share left out, no division by
# the sum, probabilities left in sorted order, the unlikeliest kept, p changed in place.
def check_top_p(top_p):
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.02, 0.01, 0.95, 0.02]])
    before = p.clone()
    result = top_p(p, 0.6)
    demand(torch.equal(p, before), "top_p changes p; work on a copy")
    good = isinstance(result, torch.Tensor) and result.shape == p.shape
    demand(good, f"top_p should return a tensor of shape {tuple(p.shape)}")
    hint = "keep the likeliest tokens until they have the share together"
    kept = (result > 0).tolist()
    crossing = "0.4 alone has less than 0.6, so 0.3 is kept too"
    why = f"the token with which the share is reached is left out: {crossing}"
    demand(kept[0] != [False, True, False, False], why)
    demand(all(map(any, kept)), f"of {p[0].tolist()} or {p[1].tolist()} none is kept: {hint}")
    why = "the result is in sorted order; put each probability back where its token is"
    demand(kept[0] != [True, True, False, False] or not kept[1][0], why)
    demand(not kept[0][0], f"an unlikely token is kept: {hint}")
    demand(not kept[0][2], f"more is kept than the share needs: {hint}")
    why = "the probabilities that are kept do not sum to 1; divide by their sum"
    demand(torch.allclose(result.sum(-1), torch.ones(2)), why)
    found = ", ".join(f"{value:.3f}" for value in result[0])
    wanted = "[0.1, 0.4, 0.2, 0.3] with a share of 0.6 gives [0, 0.571, 0, 0.429]"
    right = torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7], [0.0, 0.0, 1.0, 0.0]])
    demand(torch.allclose(result, right, atol=1e-4), f"{wanted}, here [{found}]")
    p = torch.softmax(3 * torch.randn(50, 9), -1)
    ordered, order = p.sort(-1, descending=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < 0.8)
    right = torch.zeros_like(p).scatter(-1, order, kept)
    right = right / right.sum(-1, keepdim=True)
    why = "in 50 rows drawn at random some probabilities differ"
    demand(torch.allclose(top_p(p, 0.8), right, atol=1e-4), f"{why}: {hint}")
    whole = torch.allclose(top_p(p, 1.0), p, atol=1e-4)
    demand(whole, "with a share of 1 all tokens are kept, here some are not")
    return "the likeliest tokens that have the share together, divided by their sum"


# ---- 8: the error of too few steps
# Detects: no factor 1/2, the largest difference, a divergence, marginals swapped.
def check_parallel(parallel_error):
    hint = "half the sum of |p(a, b) - p(a) p(b)|"
    same = torch.eye(2) / 2
    close(parallel_error(same), 0.5, "for two tokens that are always equal parallel_error", hint)
    free = torch.tensor([0.2, 0.8])[:, None] * torch.tensor([0.5, 0.5])
    close(parallel_error(free), 0.0, "for independent tokens parallel_error", hint)
    p = torch.softmax(torch.randn(9), 0).view(3, 3)
    wanted = (p - p.sum(1, keepdim=True) * p.sum(0, keepdim=True)).abs().sum() / 2
    close(parallel_error(p), wanted.item(), "for a table drawn at random parallel_error", hint)
    return "the share of texts that two draws in one call get wrong"


# ---- 8: an order of one's own
# Detects: the most doubtful first, the visible chosen, the same for all texts, another number, the
# likeliest token in place of the entropy, an entropy that is nan where a probability is 0.
def check_order(choose):
    p = torch.zeros(2, 4, 4)
    p[0] = torch.tensor([[0.5, 0.5, 0, 0], [0.6, 0.2, 0.1, 0.1], [0.25] * 4, [1, 0, 0, 0]])
    p[1] = p[0].flip(0)
    masked = torch.tensor([[True, True, True, False], [False, True, True, True]])
    before = masked.clone()
    chosen = choose(p, masked, 1)
    demand(torch.equal(masked, before), "choose changes masked; work on a copy")
    good = isinstance(chosen, torch.Tensor) and chosen.dtype == torch.bool
    demand(good and chosen.shape == masked.shape, "choose should return (B, T) bool, as masked is")
    demand(not (chosen & ~masked).any(), "a visible token is chosen; choose among the masked ones")
    counts = chosen.sum(1).tolist()
    demand(counts == [1, 1], f"n is 1, but {counts} tokens of the two texts are chosen")
    places = chosen.int().argmax(1).tolist()
    hint = "choose where the entropy, -sum p ln p, is lowest"
    demand(places != [2, 1], f"the most doubtful place is chosen: {hint}")
    why = "the place with the likeliest token is chosen, but another has less entropy (0 ln 0 is 0)"
    demand(places != [1, 2], f"{why}: {hint}")
    demand(places == [0, 3], f"the places {places} are chosen, they should be [0, 3]: {hint}")
    p = torch.softmax(3 * torch.randn(20, 12, 7), -1)
    masked = torch.rand(20, 12).argsort(1) < 8
    entropy = (-p * p.log()).sum(-1).masked_fill(~masked, torch.inf)
    right = torch.zeros_like(masked).scatter(1, entropy.topk(3, largest=False).indices, True)
    why = "with three places in each of 20 texts some are others"
    demand(torch.equal(choose(p, masked, 3), right), f"{why}: {hint}")
    return "the places where the distribution has the lowest entropy"


# ---- 8: a sweep of steps
# Detects: an index, the last value taken for the best, a fixed bar, the best itself.
def check_sweep(fewest):
    steps = [8, 16, 32, 64, 128, 256]
    for share, quality, wanted in (
        (0.5, [0.0, 0.1, 0.3, 0.45, 0.76, 0.8], 64),
        (0.95, [0.0, 0.1, 0.3, 0.6, 0.76, 0.8], 128),
        (1.0, [0.1, 0.2, 0.9, 0.88, 0.91, 0.6], 128),
        (0.9, [0.1, 0.9, 0.7, 0.8, 0.9, 1.0], 16),
    ):
        result = number(fewest(steps, list(quality), share), "fewest")
        called = f"fewest({steps}, {quality}, {share})"
        index = steps.index(wanted)
        demand(result != index, f"{called} gives {index}, an index; return the number of steps")
        hint = "the smallest number of steps whose quality is at least share times the best one"
        demand(result == wanted, f"{called} gives {result:g}, it should be {wanted}: {hint}")
    return "the fewest steps that give this share of the best quality"


# ---- 9: the probability of a fill
# Detects: all gaps from one call, the fill left in sight, a mean, probabilities in place of logs.
def check_fill(log_fill):
    for model in (table_model, exact_model):
        for x, gap in (([MASK, 1, MASK], (0, 2)), ([MASK] * 3, (0, 1, 2)), ([0, MASK, 2], (1,))):
            total = 0.0
            for fill in itertools.product(range(3), repeat=len(gap)):
                xt = torch.tensor([x])
                wanted = 0.0
                for i, token in zip(gap, fill, strict=True):
                    wanted += model(xt)[0, i].log_softmax(-1)[token].item()
                    xt[0, i] = token
                text = torch.tensor(x)
                hint = "log p of each token, the gap's earlier ones in place, the later ones masked"
                result = log_fill(model, text, list(fill), MASK)
                close(result, wanted, f"log_fill of {x} with {list(fill)}", hint)
                demand(text.tolist() == x, "log_fill changes x; work on a copy")
                total += math.exp(number(result, "log_fill"))
            demand(abs(total - 1) < 1e-3, "the probabilities of all fills do not sum to 1")
    return "the chain rule: the probabilities of all fills of a gap sum to 1"


# ---- 9: confidence by position
# Detects: logits, a softmax over positions, each mask asked alone, the visible tokens' predictions,
# x changed in place.
def check_confidence(confidence):
    x = torch.tensor([MASK, 1, MASK])
    before = x.clone()
    calls = []

    def model(xt):
        calls.append(xt.clone())
        return table_model(xt)

    result = confidence(model, x, MASK)
    demand(torch.equal(x, before), "confidence changes x; work on a copy")
    good = isinstance(result, torch.Tensor) and result.shape == x.shape
    demand(good, "confidence should return a tensor of shape (T,)")
    hint = "one call shows the model x as it is, with all of its masks"
    demand(len(calls) == 1 and torch.equal(calls[0], x[None]), f"{len(calls)} calls: {hint}")
    demand(result[1] == 1, "a visible token is given, so it is certain: its confidence is 1")
    logits = table_model(x[None])[0]
    why = "the largest logit is not a probability; take the softmax first"
    demand(not torch.allclose(result[[0, 2]].double(), logits.amax(-1)[[0, 2]]), why)
    p = logits.softmax(-1)
    for i in (0, 2):
        hint = "the largest of the V probabilities at this position"
        close(result[i], p[i].max().item(), f"at position {i} the confidence", hint)
    return "the probability of the likeliest token at each mask, from one call"


# ---- 10: the autoregressive twin
# Detects: no shift or a roll (the model sees what it predicts), a shift to the left, the first
# token not scored, a sum over tokens.
def check_autoregressive(ar_inputs, nll):
    x = torch.tensor([[0, 1, 2, 1], [2, 2, 0, 1]])
    before = x.clone()
    wanted = torch.tensor([[BOS, 0, 1, 2], [BOS, 2, 2, 0]])
    inputs = ar_inputs(x, BOS)
    demand(torch.equal(x, before), "ar_inputs changes x; work on a copy")
    demand_ids(inputs, x, "ar_inputs")
    demand(not torch.equal(inputs, x), "without a shift the model sees the token that it predicts")
    demand(not (inputs[:, 0] == x[:, -1]).all(), "the last token was moved to the front: a leak")
    hint = f"the input of {x[0].tolist()} should be {wanted[0].tolist()}"
    demand(torch.equal(inputs, wanted), f"{hint}, here it is {inputs[0].tolist()}")
    table = torch.randn(4, 4, 3)  # logits, by the last two inputs

    def causal(inputs):
        last = torch.nn.functional.pad(inputs[:, :-1], (1, 0), value=BOS)
        return table[last, inputs]

    logp = causal(wanted).log_softmax(-1).gather(-1, x[..., None])[..., 0]
    hint = "the mean of -log p over all tokens, the first included"
    close(nll(causal, x, BOS), -logp.mean().item(), "nll", hint)
    return "each token is predicted from the earlier ones alone, and all are scored"


# ---- 11: blocks and the cache
# Detects in sees: a masked block that sees its own text or the masks of earlier blocks, left to
# right inside a block, clean text that sees masks, later blocks or not its own block, rows and
# columns exchanged. In rows: a cache that is never filled or filled too often, calls of one block.
def block_patterns(T, S):
    """(the right pattern, {sentence: a wrong one})."""
    block = torch.arange(T) // S
    own = block[:, None] == block
    before = block < block[:, None]
    none = torch.zeros(T, T, dtype=torch.bool)
    so_far = own | before

    def pattern(*quarters):
        top = torch.cat(quarters[:2], 1)
        return torch.cat((top, torch.cat(quarters[2:], 1)))

    right = pattern(own, before, none, so_far)
    return right, {
        "a masked block sees its own text without masks, which it should predict": pattern(
            own, so_far, none, so_far
        ),
        "a masked block sees the masks of earlier blocks; it sees their clean text": pattern(
            so_far, before, none, so_far
        ),
        "inside a block a mask sees the positions before it alone; it sees the whole block": (
            pattern(own.tril(), before, none, so_far)
        ),
        "the clean text sees masked text; a sampler keeps what is finished, without masks": pattern(
            own, before, own, so_far
        ),
        "the clean text sees later blocks, which are not written yet": pattern(
            own, before, none, ~none
        ),
        "a clean block does not see itself": pattern(own, before, none, before),
        "a clean token sees the tokens before it alone; it sees its whole block": pattern(
            own, before, none, (own | before).tril()
        ),
        "rows and columns are exchanged: row i says what position i sees": right.T,
    }


def check_blocks(sees, rows):
    for T, S in ((6, 2), (8, 4), (4, 1), (4, 4)):
        found = sees(T, S)
        good = isinstance(found, torch.Tensor) and found.dtype == torch.bool
        good = good and found.shape == (2 * T, 2 * T)
        demand(good, f"sees({T}, {S}) should return a (2 T, 2 T) bool tensor, here 2 T is {2 * T}")
        right, wrong = block_patterns(T, S)
        for sentence, pattern in wrong.items():
            demand(torch.equal(pattern, right) or not torch.equal(found, pattern), sentence)
        i, j = divmod(int((found != right).int().argmax()), 2 * T)
        here = f"sees({T}, {S})[{i}, {j}] is {bool(found[i, j])}"
        demand(torch.equal(found, right), f"{here}, it should be {bool(right[i, j])}")
    for T, S, calls in ((256, 16, 4), (12, 4, 3)):
        n = T // S
        result = rows(T, S, calls)
        good = isinstance(result, (tuple, list)) and len(result) == 2
        demand(good, "rows should return two numbers: without a cache, with one")
        without, cached = (number(value, "rows") for value in result)
        called = f"rows({T}, {S}, {calls})"
        why = f"{called}: each of the {n} blocks takes {calls} calls, here one block alone does"
        demand(without != T * calls, why)
        close(without, T * calls * n, f"{called} without a cache", "T rows in each call")
        in_calls = S * calls * n
        why = "the keys and values of a finished block are computed once more, without masks"
        demand(cached != in_calls, f"{called}: {why}, in the first call of the next block")
        why = "the last block is followed by none, so it need not be put into the cache"
        demand(cached != in_calls + S * n, f"{called}: {why}")
        demand(cached != 2 * in_calls, f"{called}: {why}; and each block is put there once")
        close(cached, in_calls + S * (n - 1), f"{called} with a cache", "S rows in each call")
    return "a block sees itself and the finished text before it, which is computed once"


# ---- 12: from BERT to a writer
# Detects: no shift, a shift the wrong way, a roll (the last row wraps around), a first token that
# another document or text predicts, T - 1 rows, [MASK] that can be drawn, logits changed in place;
# a mask row of zeros, of one token, in front, a mean of each row, the embedding changed.
def check_decoder(align, add_mask_row):
    T, V, C = 6, 5, 3
    whole, packed = [0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]
    logits = torch.randn(2, T, V + 1)
    before = logits.clone()
    check_rows(align(logits, torch.tensor([whole, packed])), before)
    demand(torch.equal(logits, before), "align changes logits; work on a copy")
    embedding = torch.randn(V, C)
    before = embedding.clone()
    result = add_mask_row(embedding)
    demand(torch.equal(embedding, before), "add_mask_row changes embedding; work on a copy")
    check_embedding(result, before)
    result.detach().zero_()
    good = torch.equal(embedding, before)
    demand(good, "the new embedding shares its memory with the old one; return a copy")
    return "a token is predicted at the position before it, the first of a document at its own"


def check_rows(result, logits):
    """Compare with the rows of logits (2, T, V + 1), the second text of which is two documents."""
    B, T, columns = logits.shape
    wanted = [[0, 0, 1, 2, 3, 4], [0, 0, 1, 3, 3, 4]]
    shape = getattr(result, "shape", None)
    why = "align returns T - 1 rows for T tokens: a first token has none before it, but needs one"
    demand(shape != (B, T - 1, columns) and shape != (B, T - 1, columns - 1), why)
    hint = "leave it out, it is the last"
    why = "the column of [MASK] is still there, but [MASK] is never predicted"
    demand(shape != logits.shape, f"{why}: {hint}")
    demand_ids(result, logits[..., 1:], "align")
    equal = (result[:, :, None, None] == logits[..., :-1]).all(-1)  # (B, T, B, T)
    other = (result[:, :, None, None] == logits[..., 1:]).all(-1)
    demand(not other.any(), f"the column of token 0 is left out, not that of [MASK]: {hint}")
    demand(equal.flatten(2).any(2).all(), "a row that align returns is none of the rows of logits")
    places = equal.flatten(2).int().argmax(2)
    good = torch.equal(places // T, torch.arange(B)[:, None].expand(B, T))
    demand(good, "a text has the row of another text, which knows nothing of it")
    rows = (places % T).tolist()
    demand(rows[0] != [0, 1, 2, 3, 4, 5], "nothing is shifted: row i still predicts token i + 1")
    hint = "token i is predicted by row i - 1"
    demand(rows[0][1:-1] != [2, 3, 4, 5], f"a shift in the wrong direction: {hint}")
    hint = "a first token is predicted at its own position"
    demand(rows[0][0] != T - 1, f"the last row is wrapped around to the first token: {hint}")
    why = "the first token of the second document is predicted by the document before it"
    demand(rows[0] != wanted[0] or rows[1][3] != 2, f"{why}: where `at` is 0, {hint}")
    for found, right in zip(rows, wanted, strict=True):
        demand(found == right, f"the rows of {T} tokens are {found}, they should be {right}")


def check_embedding(result, embedding):
    """Compare with embedding (V, C) and a further row, the mean of the others."""
    V, C = embedding.shape
    demand_ids(result, embedding.new_empty(V + 1, C), "add_mask_row")
    why = "the new row is in front, so each token gets the row of the one before it"
    demand(not torch.equal(result[1:], embedding), f"{why}: append it, the id of [MASK] is V")
    demand(torch.equal(result[:-1], embedding), "the rows of the V tokens have changed")
    row = result[-1]
    hint = "take the mean of the V others, a token of which nothing is known"
    demand(row.any(), f"the row of [MASK] is zero, so the first layer gets nothing of it: {hint}")
    demand(not (row == embedding).all(1).any(), f"the row of [MASK] is that of a token: {hint}")
    good = torch.allclose(row, embedding.mean(0), atol=1e-5)
    demand(good, "the row of [MASK] is not the mean of the V others, taken for each of C numbers")


# ---- 13: gaps that must match
# Detects in backward: states that do not accept at the end, the largest term in place of the sum, a
# state that accepts counted before the gap is full, p left out, its rows from the wrong end, tokens
# that lead to one state counted once, rows divided by a number. In draw: no filter (dead ends), b
# only asked whether it is above 0, the b of the place before, p or b twice, p left out, the
# likeliest token, the first state kept, arguments changed.
def table_of(text):
    """A string of digits for each state -> (S, V) int64: the state after each token."""
    return torch.tensor([[int(state) for state in row] for row in text.split()])


# The lesson's example: the tokens are n s o e t w a and any other; state 7 is the dead end.
LETTERS = "nsoetwa."
SO_NOT_NOW_SEA = table_of("12777777 77377777 77457777 77776677 77777777 77777767 77777777 77777777")
BY_HAND = {0: dict(n=0.3, s=0.6), 1: dict(o=0.8, e=0.2), 2: dict(t=0.5, w=0.2, a=0.1)}
# Another one, of three tokens: two tokens lead to the same state, one state accepts and goes on.
LOOP = table_of("124 331 344 441 444")


def backward_by(p, next, accepts, step):
    """(n + 1, S): b where step(row of p, (S, V) b of the states after) is what one token adds."""
    b = [accepts.to(p.dtype)]
    for row in p.flip(0):
        b.insert(0, step(row, b[0][next]))
    return torch.stack(b)


def wrong_backwards(p, next, accepts):
    """{sentence: what backward gives if it makes this mistake}"""

    def right(row, after):
        return (row * after).sum(1)

    def once(row, after):
        is_first = torch.stack([(next[:, :v] != next[:, v, None]).all(1) for v in range(len(row))])
        return (row * after * is_first.T).sum(1)

    def early(row, after):
        return right(row, after) + accepts

    def one(rows, step):
        return backward_by(rows, next, accepts, step)

    everywhere = torch.ones_like(accepts)
    hint = "that is the likeliest match, not the probability of all"
    return {
        "b[n] is 1 for every state; it is 1 where a state accepts, else 0": backward_by(
            p, next, everywhere, right
        ),
        f"the largest term is taken instead of the sum: {hint}": one(
            p, lambda row, after: (row * after).amax(1)
        ),
        "a state that accepts is counted twice, also before the gap is full: only in b[n]": one(
            p, early
        ),
        "p is left out, so b counts the fills that match; weigh each token by p[i]": one(
            p, lambda row, after: after.sum(1)
        ),
        "the rows of p are taken from the wrong end: b[i] is made of p[i] and b[i + 1]": one(
            p.flip(0), right
        ),
        "tokens that lead to the same state are counted once; sum over tokens, not states": one(
            p, once
        ),
    }


def check_backward(backward, p, next, accepts, name):
    """Compare with the sum over all sequences of tokens."""
    n, V = p.shape
    given = [each.clone() for each in (p, next, accepts)]
    b = backward(p, next, accepts)
    unchanged = all(map(torch.equal, given, (p, next, accepts)))
    demand(unchanged, "backward changes p, next or accepts; work on a copy")
    good = isinstance(b, torch.Tensor) and b.shape == (n + 1, len(next)) and b.is_floating_point()
    demand(good, f"backward should return a float tensor of shape {(n + 1, len(next))}")
    wanted = torch.zeros(n + 1, len(next), dtype=torch.float64)
    for i in range(n + 1):
        for fill in itertools.product(range(V), repeat=n - i):
            states = torch.arange(len(next))
            weight = 1.0
            for place, v in enumerate(fill, i):
                weight *= p[place, v].item()
                states = next[states, v]
            wanted[i] += weight * accepts[states]
    b = b.double()
    for sentence, wrong in wrong_backwards(p.double(), next, accepts).items():
        differs = not torch.allclose(wrong, wanted, atol=1e-6)
        demand(not (differs and torch.allclose(b, wrong, atol=1e-6)), f"{name}: {sentence}")
    ratio = b / wanted
    known = wanted > 0
    scaled = all(row[each].std(correction=0) < 1e-5 for row, each in zip(ratio, known, strict=True))
    is_right = torch.allclose(b, wanted, atol=1e-6)
    why = "each row of b is right up to a factor; here leave it as it is, a probability"
    demand(is_right or not scaled or (b[~known] != 0).any(), f"{name}: {why}")
    i, q = divmod(int((b - wanted).abs().argmax()), len(next))
    hint = "the sum over tokens v of p[i, v] b[i + 1, next[q, v]]"
    found = f"b[{i}, {q}] is {b[i, q]:.4f}, it should be {wanted[i, q]:.4f}"
    demand(is_right, f"{name}: {found}: {hint}")


def fills_by(p, next, weight):
    """{fill: probability} if v is drawn in proportion to weight(i, q, v) in state q."""
    fills = {(): (1.0, 0)}
    for i in range(len(p)):
        after = {}
        for fill, (value, q) in fills.items():
            weights = [float(weight(i, q, v)) for v in range(p.shape[1])]
            for v, each in enumerate(weights):
                if each > 0:
                    after[(*fill, v)] = (value * each / sum(weights), int(next[q, v]))
        fills = after
    return {fill: value for fill, (value, _) in fills.items()}


def chi_squared(counts, wanted):
    """Of counts of fills, against their probabilities."""
    n = counts.total()
    if any(fill not in wanted for fill in counts):
        return math.inf
    return sum((counts[fill] - n * p) ** 2 / (n * p) for fill, p in wanted.items())


def one_fill(draw, p, next, b):
    """A fill as a tuple of n tokens."""
    try:
        fill = draw(p, next, b)
    except (RuntimeError, ValueError) as e:
        if "weights" not in str(e) and "sum of prob" not in str(e):
            raise
        hint = "weigh v by p[i, v] b[i + 1, next[q, v]], and follow the state"
        raise Wrong(f"at some token of a gap all weights are 0: {hint}") from None
    try:
        fill = tuple(int(v) for v in fill)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"draw returns a {type(fill).__name__}, not a list of tokens") from None
    good = len(fill) == len(p) and all(0 <= v < p.shape[1] for v in fill)
    demand(good, f"draw returns {list(fill)[:9]}, not {len(p)} tokens below {p.shape[1]}")
    return fill


def check_draw(draw, p, next, accepts, b):
    """Compare how often each fill is drawn with the product of the rows of p, given a match."""
    given = [each.clone() for each in (p, next, b)]
    one_fill(draw, p, next, b)
    unchanged = all(map(torch.equal, given, (p, next, b)))
    demand(unchanged, "draw changes p, next or b; work on a copy")
    counts = Counter(one_fill(draw, p, next, b) for _ in range(3000))
    for fill in counts:
        q = 0
        for v in fill:
            q = int(next[q, v])
        why = f"draws {list(fill)}, which does not match: it went into a dead end"
        demand(accepts[q], f"{why}; weigh each token by b[i + 1] of the state that it leads to")
    hint = "draw at random, in proportion to the weights"
    demand(len(counts) > 1, f"draw always gives the same fill: {hint}")

    def after(i, q, v):
        return b[i + 1, next[q, v]]

    wrong = {
        "all draws match, but b is only asked whether it is above 0; it is a weight": (
            lambda i, q, v: p[i, v] * (after(i, q, v) > 0)
        ),
        "the weight of p is counted twice": lambda i, q, v: p[i, v] ** 2 * after(i, q, v),
        "the weight of b is counted twice": lambda i, q, v: p[i, v] * after(i, q, v) ** 2,
        "p is left out; the weight of v is p[i, v] b[i + 1, next[q, v]]": after,
    }
    fills = fills_by(p, next, lambda i, q, v: p[i, v] * after(i, q, v))
    is_right = chi_squared(counts, fills) < 80
    for sentence, weight in wrong.items():
        found = chi_squared(counts, fills_by(p, next, weight))
        demand(is_right or found > 80, sentence)
    why = "some fills are drawn too often or too rarely"
    demand(is_right, f"{why}: the weight of v is p[i, v] b[i + 1, next[q, v]]")


def check_matching(backward, draw):
    p = torch.zeros(3, len(LETTERS))
    for row, values in zip(p, BY_HAND.values(), strict=True):
        for letter, value in values.items():
            row[LETTERS.index(letter)] = value
        row[-1] = 1 - row.sum()
    accepts = torch.zeros(8, dtype=torch.bool)
    accepts[[4, 6]] = True  # after "so", and after three letters
    check_backward(backward, p, SO_NOT_NOW_SEA, accepts, "in the lesson's example")
    p = torch.tensor([[0.3, 0.5, 0.2], [0.5, 0.2, 0.3], [0.2, 0.35, 0.45], [0.6, 0.3, 0.1]])
    accepts = torch.tensor([False, False, False, True, False])
    check_backward(backward, p, LOOP, accepts, "with four tokens out of three")
    b = backward(p, LOOP, accepts)
    check_draw(draw, p, LOOP, accepts, b)
    return "every fill matches, as often as the product of the marginals says of those that match"


# The exercises of each lesson: what checks them, and the functions that they ask for.
CHECKS = {
    1: [(check_mask, "mask")],
    2: [(check_loss, "loss")],
    3: [(check_network, "attend", "parameters")],
    4: [(check_schedule, "at_start", "scale")],
    5: [(check_rates, "shown", "weights")],
    6: [(check_bound, "bound", "bits")],
    7: [(check_generate, "generate"), (check_top_p, "top_p")],
    8: [(check_parallel, "parallel_error"), (check_order, "choose"), (check_sweep, "fewest")],
    9: [(check_fill, "log_fill"), (check_confidence, "confidence")],
    10: [(check_autoregressive, "ar_inputs", "nll")],
    11: [(check_blocks, "sees", "rows")],
    12: [(check_decoder, "align", "add_mask_row")],
    13: [(check_matching, "backward", "draw")],
}


def where(error, path):
    """The last line of the reader's file in the traceback, in words; "" if there is none."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f" in line {lines[-1]}" if lines else ""


def load(path):
    """Import the reader's file as a module."""
    spec = importlib.util.spec_from_file_location("answer", path)
    if spec is None:
        raise Unusable(f"{path} is no Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def choose_exercises(lesson, module, name):
    """The exercises of a lesson that the file answers: [(check, functions)], at least one."""
    exercises = []
    for check_answer, *asked in CHECKS[lesson]:
        functions = [getattr(module, each, None) for each in asked]
        if any(map(inspect.isfunction, functions)):
            exercises.append((check_answer, asked, functions))
    if not exercises:
        asked = " or ".join(each[1] for each in CHECKS[lesson])
        raise Unusable(f"{name} has no function {asked}; lesson {lesson} asks for it")
    for _, asked, functions in exercises:
        for each, function in zip(asked, functions, strict=True):
            if not inspect.isfunction(function):
                raise Unusable(f"{name} has no function {each}; lesson {lesson} asks for it")
    return [(check_answer, functions) for check_answer, _, functions in exercises]


def check(lesson, path):
    """Check the file; return what is right in it, or raise Wrong or Unusable."""
    name = Path(path).name
    random.seed(lesson)
    torch.manual_seed(lesson)
    try:
        said = []
        for check_answer, functions in choose_exercises(lesson, load(path), name):
            torch.manual_seed(lesson)
            said.append(check_answer(*functions))
        return "; ".join(said)
    except (Wrong, Unusable):
        raise
    except SyntaxError as e:
        line = f" in line {e.lineno}" if e.lineno else ""  # none: it is no text
        raise Unusable(f"{name} is not Python: {e.msg}{line}") from e
    except BaseException as e:  # whatever an answer raises, also SystemExit
        what = f"{type(e).__name__}: {e}".splitlines()[0][:300]
        if isinstance(e, MemoryError) or "can't allocate memory" in str(e):
            what = f"a lack of memory; it may take {MEMORY >> 30} GB"
        raise Unusable(f"{name} stopped{where(e, path)} with {what}") from e


def judge(lesson, path):
    """Check the answer in a file: ("right", "wrong" or "not checked", a sentence)."""
    try:
        return "right", check(lesson, path)
    except Wrong as e:
        return "wrong", str(e)
    except Unusable as e:
        return "not checked", str(e)


def limit_memory():
    """Limit this process's memory to MEMORY bytes, if the system can."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def main(argv):
    verdict, lesson, path = argv
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # answers may import mdlm
    limit_memory()
    result = judge(int(lesson), path)
    Path(verdict).write_text(json.dumps(result), encoding="utf-8")
    with contextlib.suppress(Exception):  # an answer may have closed it
        sys.stdout.flush()
    os._exit(0)  # at once, even if threads of the answer still run


if __name__ == "__main__":
    main(sys.argv[1:])
