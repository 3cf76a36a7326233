"""Corrections draw from the model's conditionals: exact where theory says so, closer elsewhere."""

import itertools
import math

import pytest
import torch
from conftest import Toy

import sample
from nanomdlm.kernels.reference import philox_words
from nanomdlm.support import numerics

V = 2
T = 8
X = torch.tensor(list(itertools.product(range(V), repeat=T)))  # (256, 8)


def markov(order, seed=3):
    """p (256,) of a random binary Markov chain: a token depends on the `order` before it."""
    g = torch.Generator().manual_seed(seed)
    table = torch.sigmoid(2.5 * torch.randn([2] * order, generator=g, dtype=torch.float64))
    p = torch.ones(len(X), dtype=torch.float64)
    for i in range(T):
        before = [X[:, i - j - 1] if i > j else torch.zeros(len(X)).long() for j in range(order)]
        one = table[tuple(before)]
        p = p * torch.where(X[:, i] == 1, one, 1 - one)
    return p


def posterior(p):
    """The function from (B, T) ids to exact log-probabilities (B, T, V) given the unmasked."""
    onehot = torch.nn.functional.one_hot(X, V).double()

    def logits(xt):
        agrees = ((xt[:, None] == X) | (xt[:, None] == V)).all(-1).double()  # (B, 256)
        joint = torch.einsum("bn,n,niv->biv", agrees, p, onehot)
        return (joint / joint.sum(-1, keepdim=True).clamp(min=1e-300)).clamp(min=1e-300).log()

    return logits


def swept(p, logits, spacing):
    """The distribution after one whole sweep from p, by enumeration."""
    options = sample.SamplerSettings(
        steps=T + spacing, correct=spacing, redraw="sweep", spacing=spacing
    )
    toy = Toy(logits, V, T)
    settings = sample.resolve(options, toy)
    (block,) = sample.plan(toy, torch.ones(1, T).bool(), torch.zeros(1), settings)
    noise = torch.zeros(1, T)
    for s in range(T, T + spacing):
        drawn = sample.to_correct(settings, block, s, torch.ones(1, T).bool(), noise)[0]
        logp = logits(X.masked_fill(drawn, V))  # (256, T, V)
        new = torch.zeros_like(p)
        for values in itertools.product(range(V), repeat=int(drawn.sum())):
            y = X.clone()
            y[:, drawn] = torch.tensor(values)
            chance = logp.gather(2, y[..., None])[..., 0][:, drawn].sum(1).exp()
            new.index_add_(0, (y * V ** torch.arange(T - 1, -1, -1)).sum(1), p * chance)
        p = new
    return p


def variation(p, q):
    return (p - q).abs().sum().item() / 2


@pytest.mark.parametrize("order, spacing", [(1, 2), (1, 5), (2, 3), (3, 4), (3, 8)])
def test_sweep_leaves_a_chain_of_lower_order_alone(order, spacing):
    p = markov(order)
    assert variation(swept(p, posterior(p), spacing), p) < 1e-12


def test_sweep_is_biased_up_to_the_order():
    p = markov(3)
    bias = [variation(swept(p, posterior(p), spacing), p) for spacing in (1, 2, 3, 4)]
    assert bias[0] > bias[1] > bias[2] > 0.005 and bias[3] < 1e-12, bias


@pytest.mark.parametrize("order, spacing", [(1, 2), (2, 3)])
def test_drawn_texts_keep_the_chain(order, spacing):
    """Chi-square of 8,000 texts: revealed one at a time, then corrected in two sweeps."""
    p = markov(order)
    n = 8000
    settings = dict(order="random", redraw="sweep", spacing=spacing, correct=2 * spacing)
    x = torch.full((n, T), V)
    x = sample.generate(Toy(posterior(p), V, T), x, seed=5, steps=T + 2 * spacing, **settings)
    seen = (x * V ** torch.arange(T - 1, -1, -1)).sum(1).bincount(minlength=len(X))
    chi2 = ((seen - n * p) ** 2 / (n * p)).sum().item()
    df = len(X) - 1
    assert abs(chi2 - df) / (2 * df) ** 0.5 < 4.5


class LongChain:
    """A Markov chain of order 2 over 3 symbols, and its exact posterior (Rabiner, 1989)."""

    L = 64
    V = 3

    def __init__(self):
        g = torch.Generator().manual_seed(1)
        sharp = 2 * torch.randn(self.V, self.V, self.V, generator=g, dtype=torch.float64)
        self.next = sharp.softmax(-1)  # p(c | a, b)
        pair = torch.arange(self.V**2)
        self.first = pair // self.V
        self.second = pair % self.V
        step = torch.zeros(self.V**2, self.V, self.V, dtype=torch.float64)
        step[pair, self.second] = self.next[self.first, self.second]
        self.step = step.flatten(1)  # (pairs, pairs)

    def logits(self, xt):
        """log p(x_i | what is visible), by the forward-backward algorithm over pairs of symbols."""
        seen = (xt[..., None] == torch.arange(self.V)) | (xt[..., None] == self.V)
        allowed = seen.double()  # (B, L, V)
        forward = torch.ones(*xt.shape, self.V**2, dtype=torch.float64)  # of pairs (i - 1, i)
        backward = forward.clone()
        forward[:, 1] = allowed[:, 0][:, self.first] * allowed[:, 1][:, self.second]
        for i in range(2, self.L):
            p = (forward[:, i - 1] @ self.step) * allowed[:, i][:, self.second]
            forward[:, i] = p / p.sum(1, keepdim=True)
        for i in range(self.L - 2, 0, -1):
            p = (backward[:, i + 1] * allowed[:, i + 1][:, self.second]) @ self.step.T
            backward[:, i] = p / p.sum(1, keepdim=True)
        both = forward * backward
        out = torch.zeros(*xt.shape, self.V, dtype=torch.float64)
        out.index_add_(2, self.second, both)
        out[:, 0] = 0
        out[:, 0].index_add_(1, self.first, both[:, 1])
        return out.clamp(min=1e-300).log()

    def texts(self, n):
        g = torch.Generator().manual_seed(9)
        x = torch.randint(self.V, (n, self.L), generator=g)
        for i in range(2, self.L):
            x[:, i] = torch.multinomial(self.next[x[:, i - 2], x[:, i - 1]], 1, generator=g)[:, 0]
        return x

    def trigrams(self, x):
        code = (x[:, :-2] * self.V + x[:, 1:-1]) * self.V + x[:, 2:]
        return code.flatten().bincount(minlength=self.V**3).double() / code.numel()


def test_few_calls_are_closer_with_correction():
    """Trigrams of random order in 16 calls, all revealing or half of them sweeping."""
    chain = LongChain()
    model = Toy(chain.logits, chain.V, chain.L)
    want = chain.trigrams(chain.texts(20_000))
    x = torch.full((800, chain.L), chain.V)
    bias = []
    for settings in (dict(correct=0), dict(redraw="sweep")):
        found = sample.generate(model, x, seed=3, steps=16, order="random", **settings)
        bias.append(variation(chain.trigrams(found), want))
    assert bias[1] < 0.8 * bias[0], bias


def test_spread_begins_evenly():
    """Any first k of 2^n positions are as far apart as k allows."""
    place = numerics.reversed_bits(torch.arange(1 << 16))
    assert torch.equal(place.sort()[0], torch.arange(1 << 16)) and place[1 << 15] == 1
    order = numerics.reversed_bits(torch.arange(64)).argsort()
    for k in (2, 4, 8, 16):
        assert (order[:k].sort()[0].diff() == 64 // k).all()


def test_short_gaps_are_drawn_and_redrawn():
    table = torch.randn(3**5, 5, 2, generator=torch.Generator().manual_seed(0))
    model = Toy(lambda xt: table[(xt * 3 ** torch.arange(5)).sum(1)], V, 5)
    x = torch.tensor([[0, V, V, V, 1]])
    for redraw in ("low_confidence", "sweep"):
        times = torch.zeros(5)
        for step in sample.unmask(model, x, steps=12, redraw=redraw, spacing=3):
            times += step.drawn[0]
            assert step.x[0, 0] == 0 and step.x[0, 4] == 1
        assert times[0] == times[4] == 0 and times[1:4].min() >= 2 and times.sum() == 9
    assert len(list(sample.unmask(model, torch.tensor([[0, V, 1, 0, 1]]), steps=12))) == 1


def test_redrawing_begins_where_the_draw_was_unlikely():
    """Of nine sure tokens and an unlikely one, that one, whatever else is drawn again."""
    logits = torch.zeros(1, 10, V)
    logits[..., 1] = -9
    logits[:, 4] = torch.tensor([0.0, 0.0])
    model = Toy(lambda xt: logits.expand(len(xt), -1, -1), V, 10)
    x = torch.full((50, 10), V)
    steps = list(sample.unmask(model, x, steps=2, correct=1))
    assert steps[1].drawn[:, 4].all() and (steps[1].drawn.sum(1) < 6).all()
    wide = steps[1].drawn[:, :3].sum(1)
    assert (wide <= 1).all()  # two of them would be nearer than three positions


def test_another_program_draws_the_same_text():
    """All that is needed in another language: Philox words, sums and comparisons; no torch."""
    seed = 11
    L = 12
    g = torch.Generator().manual_seed(2)
    table = 3 * torch.randn(L, L, 3, 4, generator=g, dtype=torch.float64)

    def logits(xt):  # each visible token moves the logits of each position
        near = torch.nn.functional.one_hot(xt, 4).double()
        return torch.einsum("bju,ijvu->biv", near, table) / 3

    for steps, row in ((6, 0), (16, 3), (40, 1)):
        x = torch.full((1, L), 3)
        x[0, 5] = 1
        model = Toy(logits, 3, L)
        *_, last = sample.unmask(model, x, samples=torch.tensor([row]), steps=steps, seed=seed)
        assert last.x[0].tolist() == by_hand(logits, x[0].tolist(), steps, seed, row)


def by_hand(logits, x, steps, seed, row):
    """The default sampler for one row of at most 16 gaps."""
    mask = 3

    def word(step, stream, position):
        return philox_words(seed, 4 * step + stream, torch.tensor([row]), len(x))[
            0, position
        ].item()

    gaps = [i for i in range(len(x)) if x[i] == mask]
    correct = min(steps - min(max(steps // 2, 4), 16), 3 * len(gaps))
    reveals = min(steps - correct, len(gaps))
    shift = word(0, 3, 0) >> 16

    def turn(i):
        return int(f"{(gaps.index(i) + shift) % 2**16:016b}"[::-1], 2)

    order = sorted(gaps, key=turn)
    doubt = dict.fromkeys(gaps, 0.0)
    done = 0
    for step in range(reveals + correct):
        if step < reveals:
            until = len(gaps) - math.floor(len(gaps) * (1 - (step + 1) / reveals) + 1e-9)
            drawn = order[done:until]
            done = until
        else:
            noise = {i: doubt[i] + 1e-9 * word(step, 2, i) / 2**32 for i in gaps}
            drawn = [i for i in gaps if noise[i] == max(noise[j] for j in gaps if abs(i - j) < 3)]
        for i in drawn:
            x[i] = mask
        rows = logits(torch.tensor([x]))[0].tolist()
        doubt = {i: d + 0.3 for i, d in doubt.items()}
        for i in sorted(drawn):
            u = ((word(step, 0, i) << 21) | (word(step, 1, i) >> 11)) / 2**53
            weights = [math.exp(v - max(rows[i])) for v in rows[i]]
            total = sum(weights)
            x[i] = next(k for k in range(3) if u < sum(weights[: k + 1]) / total)
            doubt[i] = -math.log(weights[x[i]] / total)
    return x
