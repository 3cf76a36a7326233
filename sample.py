"""Sample from a trained model: generate text, continue a prompt, fill gaps, watch it happen.

    python sample.py                                         # a text from nothing
    python sample.py --prompt "ROMEO:" --length=600          # a beginning that stays as it is
    python sample.py --infill "To be███" --candidates=5      # every █ is one token to fill; fills ranked
    python sample.py --infill "To [___], or not to be"       # a gap of unknown length
    python sample.py --watch --html=page.html                # see it in the terminal, and in a page to keep

The reverse process of masked diffusion: start from [MASK], reveal some positions in each step, until none is
left (Sahoo et al., 2406.07524). Without --out_dir, and where there is no run in out/, the small Shakespeare
model in weights/ answers.
"""

import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import common
import mdlm
import viewer
from common import Refusal, opt
from kernels.masking import philox_words

BREAKS = {c: f"\\u{c:04x}" for c in (0x85, 0x2028, 0x2029)}  # some programs would break a line of JSON there
SHIPPED = Path(__file__).parent / "weights" / "shakespeare"


@dataclass
class Options:
    out_dir: str = opt("", "run folder or checkpoint folder (default: out, else the model in weights/)")
    # what to write
    prompt: str = opt("", "beginning of the text")
    infill: str = opt("", "template: █ is a token to fill, [___] a gap of unknown length (-: standard input)")
    batch: str = opt("", "file with a template a line; writes a JSON object a line")
    length: int = opt(0, "tokens of the text, prompt included (0: the context)", bounds=(0, 1 << 20))
    num_samples: int = opt(1, "texts to draw", bounds=(1, 1 << 20))
    candidates: int = opt(0, "show the N likeliest of many different fills, ranked", bounds=(0, 1024))
    max_gap: int = opt(16, "longest fill of [___], in tokens", bounds=(1, 8192))
    top: int = opt(0, "fill nothing: show the N likeliest tokens of every gap", bounds=(0, 1 << 20))
    # how
    steps: int = opt(64, "network calls at most for a context of text; each --block takes one at least",
                     bounds=(1, 1 << 20))
    order: str = opt("auto", "revealed first: anything (ancestral, random), what is surest (confidence, "
                     "margin, entropy), the left, all; auto: ancestral, left_to_right if autoregressive",
                     "auto", "ancestral", "random", "confidence", "margin", "entropy", "left_to_right",
                     "one_shot")
    schedule: str = opt("linear", "how many in each step: equally many, or few at first", "linear", "cosine")
    threshold: float = opt(0.0, "reveal all that the model gives this probability (0: off)", bounds=(0, 1))
    block: int = opt(0, "finish so many tokens before the next ones (0: all at once; half the context where "
                        "the text is longer than it)", bounds=(0, 8192))
    remask: float = opt(0.0, "mask a revealed token again, with up to this probability a step", bounds=(0, 1))
    temperature: float = opt(1.0, "below 1: likelier tokens, 0: the likeliest; above: more varied",
                             bounds=(0, 100))
    temperature_end: float = opt(-1.0, "temperature of the last step, reached linearly (-1: the same)",
                                 bounds=(-1, 100))
    top_k: int = opt(0, "draw from the k likeliest tokens only (0: all)", bounds=(0, 1 << 31))
    top_p: float = opt(1.0, "draw from the likeliest tokens that have this share together", bounds=(1e-9, 1))
    cfg: float = opt(0.0, "strength of guidance by the given text; doubles the calls", bounds=(0, 100))
    seed: int = opt(0, "of the random draws", bounds=(0, (1 << 32) - 1))
    device: str = opt("auto", "cpu, cuda, cuda:1, mps; auto: the best there is")
    # how to show it
    watch: bool = opt(False, "show the unmasking in the terminal")
    html: str = opt("", "write a page that plays the unmasking to this file")
    json: str = opt("", "write a JSON object for each text to this file (-: standard output)")


# ------------------------------------------------------------------------------------------------------------
# The loop: choose positions, then draw tokens at those positions


# Which positions come first: (b, t, V) log-probabilities, (b, t) noise -> (b, t) scores, the highest first.
# Ancestral sampling and one_shot take random positions too; they differ in how many.
ORDERS = dict(
    ancestral=lambda logp, noise: -noise,
    random=lambda logp, noise: -noise,
    one_shot=lambda logp, noise: -noise,
    left_to_right=lambda logp, noise: -torch.arange(noise.shape[1], device=noise.device).expand_as(noise),
    confidence=lambda logp, noise: logp.amax(-1),
    margin=lambda logp, noise: -logp.exp().topk(min(2, logp.shape[-1])).values.diff(dim=-1).sum(-1),
    entropy=lambda logp, noise: -torch.special.entr(logp.exp()).sum(-1),
)
PREDICTIVE = ("confidence", "margin", "entropy")  # these need the network before they can choose


class Step(NamedTuple):
    """What a step of `unmask` did to a batch."""
    number: int  # of the step, 1 for the first
    x: torch.Tensor  # (B, T) ids afterwards
    revealed: torch.Tensor  # (B, T) bool: filled in this step
    remasked: torch.Tensor  # (B, T) bool: masked again in this step
    logp: torch.Tensor  # (n, V) log-probabilities of the revealed positions, row by row, at temperature 1
    calls: torch.Tensor  # (B,) network calls so far


def left_after(s, steps, schedule):
    """Share of the masks that is left after s steps, from 1 to 0 (cosine: Chang et al., 2202.04200)."""
    return 0.0 if s >= steps else math.cos(math.pi / 2 * s / steps) if schedule == "cosine" else 1 - s / steps


def uniform(seed, step, samples, T, purpose):
    """(B, T) float64 in [0, 1), functions of seed, step, sample and position alone; 53 bits for a token."""
    word = lambda i: philox_words(seed, 4 * step + i, samples, T)
    if purpose == "token":
        return ((word(0) << 21) | (word(1) >> 11)).double() / 2**53
    return word(dict(reveal=2, remask=3)[purpose]).double() / 2**32


def draw(logits, u, temperature, top_k, top_p):
    """Tokens (n,) from logits (n, V) by inverting the distribution function at u (n,), in float64.

    (Gumbel noise in float32 lowers the temperature: Zheng et al., 2409.02908.)
    """
    if temperature == 0:
        return logits.argmax(-1)
    if logits.numel() > 1 << 24:  # in float64 this is 128 MiB, a few times over
        few = max(1, (1 << 24) // logits.shape[1])
        parts = zip(logits.split(few), u.split(few))
        return torch.cat([draw(*part, temperature, top_k, top_p) for part in parts])
    p = torch.softmax((logits - logits.amax(-1, keepdim=True)).double() / temperature, -1)
    if top_k or top_p < 1:
        sorted_p, token = p.sort(dim=-1, descending=True, stable=True)
        sorted_p = torch.where(sorted_p.cumsum(-1) - sorted_p < top_p, sorted_p, 0)
        sorted_p[:, top_k or p.shape[1]:] = 0
        p = torch.zeros_like(p).scatter(-1, token, sorted_p)
    cdf = p.cumsum(-1)
    # The first token whose cdf is above u: its p is not 0, and u * total is below total, also when rounded.
    return torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0]


def predict(model, device, x, fill, rows, a, b, cfg=0.0):
    """(n, b - a, V) float logits of positions a..b of some rows of x (B, T), on the device of x.

    The model sees a window of its whole context, since training never showed it less: where T is shorter the
    rest is [MASK], and not scored; where T is longer the window ends at b. fill (B, T): what is not given.
    """
    L, mask, ar = model.config.block_size, model.mask_id, model.config.objective == "ar"
    left = max(0, b - L)
    pad = lambda part, value: F.pad(part[rows, left:left + L], (0, max(0, L - x.shape[1])), value=value)
    seen, given = pad(x, mask), pad(~fill, False)

    def call(xt):
        xt = mdlm.shift_right(xt, mask) if ar else xt
        return model(xt.to(device))[:, a - left:b - left].float().to(x.device)

    logits = call(seen)
    if cfg:
        without = call(seen.masked_fill(given, mask))
        logits = without + (1 + cfg) * (logits - without)
    return logits


def highest(score, among, k):
    """(B, t) bool: in each row the k (B,) positions with the highest score among `among` (B, t) bool."""
    rank = score.double().masked_fill(~among, -math.inf).argsort(dim=1, descending=True, stable=True)
    first = torch.arange(score.shape[1], device=score.device) < k[:, None]
    return torch.zeros_like(among).scatter(1, rank, first)


def plan(config, T, steps, order, block):
    """The blocks of a text of T tokens: (begin, end, its share of `steps` for each context, one at least)."""
    L = config.block_size
    block = block or (T if T <= L else max(1, L // 2))
    if block > L:
        raise ValueError(f"block={block} is more than the context of {L}")
    each = lambda a, b: (b - a if config.objective == "ar" else 1 if order == "one_shot" else
                         max(1, steps * b // min(T, L) - steps * a // min(T, L)))
    return [(a, min(a + block, T), each(a, min(a + block, T))) for a in range(0, T, block)]


@torch.no_grad()
def unmask(model, x, steps=64, order="ancestral", schedule="linear", threshold=0.0, block=0, remask=0.0,
           temperature=1.0, temperature_end=None, top_k=0, top_p=1.0, cfg=0.0, fill=None, forbid=(),
           end_id=None, seed=0, samples=None):
    """Fill [MASK] positions of x (B, T) step by step; yields a Step after each one that changed something.

    steps            for each context of text, shared among its blocks, of which each has one at least
    order            ancestral: each masked position is revealed with the probability of the exact reverse
                     process; random: so many as the schedule says, anywhere; confidence, margin, entropy: so
                     many, where the model is surest by that measure; left_to_right; one_shot: all in one step
    threshold        above 0: also reveal what the model gives that probability, and one position at least
    block            finish so many positions before the next ones. T may exceed the context then: the model
                     sees the last `context` positions up to the block's end; half the context by default
    remask           mask revealed tokens again, with probability min(remask, masked share after the step /
                     revealed share before it) (ReMDM-cap: Wang et al., 2503.00307)
    temperature_end  temperature of the last step, if it is to change linearly
    cfg              logits = without + (1 + cfg) * (with - without the given tokens) (Nie et al., 2410.18514)
    fill             (B, T) bool: fill only these; other [MASK] positions stay, unseen text
    forbid           ids that are never drawn
    end_id           the id of [END], if there is one: all behind a drawn [END] is [END]
    seed, samples    the random numbers are functions of seed, samples (B,) (0 .. B-1), step and position

    An autoregressive model goes left to right, a token a call, whatever steps, threshold and remask. Raises
    ValueError for an order or block that cannot be.
    """
    (B, T), mask, ar = x.shape, model.mask_id, model.config.objective == "ar"
    if order not in ORDERS or ar and order not in ("ancestral", "left_to_right") or steps < 1:
        raise ValueError(f"order={order!r} with steps={steps} cannot be; "
                         f"order is one of {', '.join(ORDERS)} (autoregressive models: left_to_right)")
    blocks = plan(model.config, T, steps, order, block)
    if ar:
        order, threshold, remask = "left_to_right", 0.0, 0.0
    device, home = x.device, "cpu" if x.device.type == "mps" else x.device  # MPS lacks float64
    x, fill = x.to(home, copy=True), (x == mask if fill is None else fill & (x == mask)).to(home)
    samples = torch.arange(B, device=home) if samples is None else samples.to(home)
    calls, number = torch.zeros(B, dtype=torch.int64, device=home), 0
    temperature_end = temperature if temperature_end is None else temperature_end
    last = int(fill.sum(1).max()) if ar else sum(n for *_, n in blocks)  # the last step's number
    for a, b, n in blocks:
        to_fill, begin, number = fill[:, a:b], number, number + (int(fill[:, a:b].sum(1).max()) if ar else n)
        total = to_fill.sum(1) - (to_fill & (x[:, a:b] != mask)).sum(1)  # [END] may have filled some already
        for s in range(n):
            masked = to_fill & (x[:, a:b] == mask)  # (B, b - a)
            if not (masked.any() or remask):
                break
            # 1. how many positions to reveal in each row, and which tokens to mask again
            random = lambda purpose, at=begin + s: uniform(seed, at, samples, T, purpose)[:, a:b]  # noqa: B023
            before, after = left_after(s, n, schedule), left_after(s + 1, n, schedule)
            noise, sigma, again = random("reveal"), 0.0, torch.zeros_like(masked)
            if remask and before < 1:
                sigma = min(remask, after / (1 - before))
                again = to_fill & ~masked & (x[:, a:b] != end_id) & (random("remask") < sigma)
            if ar:
                k = masked.any(1).long()
            elif order == "ancestral":  # a binomial number of random positions: each one on its own
                k = (masked & (noise < ((1 - after) - (1 - sigma) * (1 - before)) / before)).sum(1)
            else:
                k = masked.sum(1) + again.sum(1) - (total * after + 1e-9).long()
            k = k.clamp(min=1 if threshold else 0).minimum(masked.sum(1))
            # 2. which ones; the network is called only for rows in which something happens
            rows, chosen = k.nonzero()[:, 0], torch.zeros_like(masked)
            logp = torch.zeros(0, model.vocab_size, device=home)
            if len(rows):
                logits = predict(model, device, x, fill, rows, a, b, cfg)
                logits[..., list(forbid)] = -math.inf
                calls[rows] += 2 if cfg else 1
                every = logits.log_softmax(-1) if order in PREDICTIVE or threshold else None
                chosen[rows] = highest(ORDERS[order](every, noise[rows]), masked[rows], k[rows])
                if threshold:
                    chosen[rows] |= masked[rows] & (every.amax(-1) >= math.log(threshold))
                # 3. tokens, there only
                logits = logits[chosen[rows]]
                heat = temperature + (temperature_end - temperature) * (begin + s) / max(last - 1, 1)
                x[:, a:b][chosen] = draw(logits, random("token")[chosen], heat, top_k, top_p)
                logp = logits.log_softmax(-1)
            x[:, a:b][again] = mask
            if end_id is not None:
                x[(((x == end_id) & fill).cumsum(1) > 0) & fill] = end_id
            if len(rows) or again.any():
                whole = [F.pad(part, (a, T - b)) for part in (chosen, again)]
                yield Step(begin + s + 1, x.clone(), *whole, logp, calls.clone())


def groups(model, B, device, n=None):
    """Slices of a batch of B that bound the memory: 2^15 tokens, 2^26 logits at a time (or n rows).

    On a CPU 2^11 tokens: tensors of 32 MB and more get new pages each time, which took as long as
    the products.
    """
    L, tokens = model.config.block_size, 1 << (11 if torch.device(device).type == "cpu" else 15)
    n = n or max(1, min(tokens // L, (1 << 26) // (L * model.vocab_size)))
    return [slice(i, min(i + n, B)) for i in range(0, B, n)]


def generate(model, x, steps=64, order="ancestral", generator=None, samples=None, fill=None, **how):
    """Fill the [MASK] positions of x (B, T) and return the ids (B, T); given tokens stay as they are.

    generator   torch.Generator from which one number is drawn, the seed (None: torch's own)
    samples     (B,) the rows' numbers: with the same seed a row does not depend on the batch that it is in
    fill, how   as in `unmask`, which does the work and says what they mean
    """
    where = generator.device if generator is not None else "cpu"
    seed = int(torch.randint(1 << 32, (), generator=generator, device=where))
    samples, out = torch.arange(len(x)) if samples is None else samples, x.clone()
    for part in groups(model, len(x), x.device):
        for step in unmask(model, x[part], steps, order, seed=seed, samples=samples[part],
                           fill=None if fill is None else fill[part], **how):
            out[part] = step.x
    return out


@torch.no_grad()
def chain_rule(model, x, start=None, stop=None, batch_size=None, update=lambda n: None):
    """(B, L) float64: log p(x_i | x_j, j < i) in nats, for i from start (B,) up to stop (B,); elsewhere 0.

    x (B, T) ids, T at most the context L. Each position is predicted from those on its left, with all others
    masked: the sum is the exact log-likelihood of the sampler that fills from left to right. That takes a
    network call a position, of which only one row reaches the head. batch_size: positions in a call;
    update(n): told of progress.
    """
    (B, T), L, mask = x.shape, model.config.block_size, model.mask_id
    x, position = F.pad(x, (0, L - T), value=mask), torch.arange(L, device=x.device)
    start = torch.full((B,), 0, device=x.device) if start is None else start
    stop = torch.full((B,), T, device=x.device) if stop is None else stop
    row, at = ((position >= start[:, None]) & (position < stop[:, None])).nonzero().T
    out = torch.zeros(B, L, dtype=torch.float64)
    for part in groups(model, len(row), x.device, batch_size):
        r, i, each = row[part], at[part], torch.arange(len(row[part]), device=x.device)
        xt = mdlm.shift_right(x[r], mask) if model.config.objective == "ar" else (
            x[r].masked_fill(position >= i[:, None], mask))
        logits = F.linear(model.features(xt, each * L + i), model.head_weight()).float()  # (n, V)
        out[r.cpu(), i.cpu()] = -F.cross_entropy(logits, x[r, i], reduction="none").cpu().double()
        update(len(r))
    return out


def preview(model, tokenizer, windows, generator):
    """Two generated texts and a window of validation text with a gap filled, for the log of a run."""
    T = model.config.block_size
    x = torch.full((3, T), model.mask_id, device=windows.device)
    gap = slice(T // 2, T // 2 + max(1, T // 10))
    x[2] = windows[0]
    x[2, gap] = model.mask_id
    if model.config.objective == "ar":  # reads only to the left, so it cannot fill a gap
        x = x[:2]
    out = generate(model, x, steps=min(T, 64), generator=generator).tolist()
    texts = [tokenizer.decode(ids) for ids in out[:2]]
    return texts + [f"{tokenizer.decode(ids[:gap.start])}[{tokenizer.decode(ids[gap])}]"
                    f"{tokenizer.decode(ids[gap.stop:])}" for ids in out[2:]]


# ------------------------------------------------------------------------------------------------------------
# Templates: lists of parts, each a literal string, a number of tokens to fill (███), or None: any number


def need_utf8(text):
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise Refusal(f"the text is not UTF-8 from position {e.start} on; convert it") from None


def parse(template, tokenizer, context):
    """The parts of a template; refused if it is empty, unknown to the tokenizer, complete or too long."""
    if not template:
        raise Refusal("the template is empty; write a text in which █ marks each missing token")
    need_utf8(template)
    marks = re.compile(r"(█+|\[___\])")
    any_known = tokenizer.vocab[0] if tokenizer.kind == "char" else " " if tokenizer.kind == "id" else "0"
    tokenizer.encode(marks.sub(lambda m: any_known * len(m[0]), template))  # names an unknown one's position
    parts = [len(p) if p[0] == "█" else None if p == "[___]" else p for p in marks.split(template) if p]
    if all(isinstance(p, str) for p in parts):
        raise Refusal(f"{template[:40]!r} has nothing to fill; mark each missing token with █, or a gap of "
                      "unknown length with [___]")
    if any(a is None and not isinstance(b, str) for a, b in zip(parts, [*parts[1:], None])):
        raise Refusal("behind a gap of unknown length must come text, by which its lengths can compete; "
                      "write █ for each token, or continue a text with --prompt")
    n = len(to_ids(parts, tokenizer, 0))
    if n > context:
        raise Refusal(f"the template has {n} tokens, the context only {context}; shorten it")
    return parts


def to_ids(parts, tokenizer, mask):
    """The ids of parts, `mask` in gaps; a gap of unknown length counts as one token."""
    return [i for p in parts for i in (tokenizer.encode(p) if isinstance(p, str) else [mask] * (p or 1))]


def to_texts(parts, ids, tokenizer):
    """(text, filled?) of each part of a filled template. Literals are the template's own characters."""
    shown, at = [], 0
    for part in parts:
        n = len(to_ids([part], tokenizer, 0))
        text = part if isinstance(part, str) else tokenizer.decode(ids[at:at + n])
        if tokenizer.kind == "id":  # numbers need a space between them
            text = " " * bool(shown) + text.strip()
        shown.append((text, not isinstance(part, str)))
        at += n
    return shown


class Fill(NamedTuple):
    parts: list  # those of the template, every length known
    ids: list  # all filled
    logp: float  # log p(all from the first gap on | what precedes it), the chain rule's sum, nats


def hypotheses(model, tokenizer, parts, keep, draws, max_gap, device, generator, beam=8, **how):
    """The `keep` likeliest among many distinct fills of a template, the likeliest first: a list of Fill.

    A gap of unknown length is tried with 1 .. max_gap tokens, `draws` times each. All compete by
    log p(from the first gap on | prefix), left to right, not normalised: sums over the gap alone would favour
    short gaps, means easy ones. Several unknown gaps are settled one after the other; `beam` fills (`keep`,
    if that is more) of the text up to the next one go on. Fills are distinct as texts.
    """
    L, mask, unknown = model.config.block_size, model.mask_id, [i for i, p in enumerate(parts) if p is None]
    first = next(i for i, p in enumerate(parts) if not isinstance(p, str))
    start = len(to_ids(parts[:first], tokenizer, mask))
    fills = [Fill([], [], 0.0)]
    for begin, end in zip([0, *unknown[1:]], [*unknown[1:], len(parts)], strict=True):
        stage, room = parts[begin:end], L - len(to_ids(parts[end:], tokenizer, mask))
        lengths = range(1, max_gap + 1) if None in stage else (0,)
        tried = [(f, known, f.ids + to_ids(known, tokenizer, mask)) for f in fills for known in (
            [n if p is None else p for p in stage] for n in lengths)]
        tried = [t for t in tried if len(t[2]) <= room for _ in range(-(-draws // len(fills)))]
        x = torch.tensor([ids + [mask] * (L - len(ids)) for *_, ids in tried], device=device)
        stop = torch.tensor([len(ids) for *_, ids in tried], device=device)
        fill = torch.arange(L, device=device) < stop[:, None]
        x = generate(model, x, generator=generator, fill=fill, **how)
        texts = [tokenizer.decode(row[:n]) for row, n in zip(x.tolist(), stop.tolist())]
        i = torch.tensor(list({text: i for i, text in enumerate(texts)}.values()), device=device)
        since = torch.tensor([len(f.ids) or start for f, *_ in tried], device=device)  # scored before: f.logp
        logp = chain_rule(model, x[i], since[i], stop[i]).sum(1).tolist()
        fills = [Fill(tried[j][0].parts + tried[j][1], x[j, :stop[j]].tolist(), tried[j][0].logp + p)
                 for j, p in zip(i.tolist(), logp)]
        fills = sorted(fills, key=lambda f: -f.logp)[:max(keep, beam)]
    return fills[:keep]


# ------------------------------------------------------------------------------------------------------------
# The program


def check(options, given):
    """Refuse options that contradict each other; `given` are those of the command line."""
    def clash(one, *others, why):
        for other in others:
            if one in given and other in given:
                raise Refusal(f"--{one} and --{other} contradict each other; {why}")

    common.check_fields(options)
    clash("infill", "prompt", "batch", "length", why="a template says by itself what to write")
    clash("batch", "prompt", "length", "watch", "html", "num_samples", "top", why="leave one of them out")
    clash("candidates", "num_samples", "watch", "html", "top", why="candidates are a ranked list of fills")
    clash("top", "num_samples", "watch", "html", "json", why="--top fills nothing")
    clash("watch", "json", why="watch one text, or write many for a program")
    for name in {"batch", "html", "json"} & given.keys():
        if getattr(options, name) in ("", "-" * (name == "html")):
            raise Refusal(f"--{name}={getattr(options, name)} names no file; give one or leave the flag out")
    if -1 < options.temperature_end < 0:
        raise Refusal(f"--temperature_end={options.temperature_end} is below 0; give 0 or more, or nothing")
    if options.order == "one_shot":
        clash("order", "steps", why="one_shot is one step")
    if not (options.infill or options.batch):
        for name in {"candidates", "max_gap", "top"} & given.keys():
            raise Refusal(f"--{name} needs a template; give --infill or --batch")


def find_model(options):
    """(model, tokenizer, config, device) of --out_dir, or of out/, or of the weights that come with mdlm."""
    device, path = mdlm.pick_device(options.device), options.out_dir
    if not path:
        path = "out"
        if not common.checkpoints("out") and SHIPPED.is_dir():
            path = str(SHIPPED)
            print("no run in out/: the small Shakespeare model of weights/ answers", file=sys.stderr)
    return *mdlm.load(path, device), device


def settings(options, given, config, tokenizer):
    """The keywords for `unmask`; an option that the model cannot follow is refused."""
    how = {name: getattr(options, name) for name in (
        "steps", "order", "schedule", "threshold", "block", "remask", "temperature", "top_k", "top_p", "cfg")}
    how["temperature_end"] = None if options.temperature_end < 0 else options.temperature_end
    how["end_id"] = tokenizer.end_id
    if options.block > config.block_size:
        raise Refusal(f"--block={options.block} is more than the context of {config.block_size}; lower it")
    if config.objective == "ar":
        if options.infill or options.batch:
            raise Refusal("an autoregressive model reads only to the left and cannot infill; use --prompt")
        for name in {"steps", "schedule", "threshold", "remask", "cfg"} & given.keys():
            raise Refusal(f"--{name} means nothing to an autoregressive model, which makes a call a token; "
                          "leave it out")
        if options.order not in ("auto", "left_to_right"):
            raise Refusal(f"--order={options.order} is not for an autoregressive model; use left_to_right")
    how["order"] = "left_to_right" if config.objective == "ar" else options.order.replace("auto", "ancestral")
    how["steps"] = 1 if how["order"] == "one_shot" else how["steps"]
    if options.infill or options.batch:  # a template's text does not end in a gap
        how |= dict(end_id=None, forbid=() if tokenizer.end_id is None else (tokenizer.end_id,))
    return how


def top_tokens(model, tokenizer, parts, device, n):
    """Print the n likeliest tokens of each gap, nothing filled in."""
    if None in parts:
        raise Refusal("--top shows gaps of known length; write █ for each token instead of [___]")
    ids = to_ids(parts, tokenizer, model.mask_id)
    x = torch.tensor([ids + [model.mask_id] * (model.config.block_size - len(ids))], device=device)
    with torch.no_grad():
        p = model(x)[0].softmax(-1)
    for i, token in enumerate(ids):
        if token == model.mask_id:
            best = p[i].topk(min(n, len(p[i])))
            print(f"token {i + 1:>4}   " + "   ".join(
                f"{tokenizer.decode([v])!r} {100 * q:.1f} %"
                for q, v in zip(best.values.tolist(), best.indices.tolist(), strict=True)))


def sampled(model, tokenizer, parts, options, how, device, pages):
    """Draw --num_samples fills of parts whose lengths are known: yields (texts, facts), adds to pages."""
    ids, mask = to_ids(parts, tokenizer, model.mask_id), model.mask_id
    n, end, blocks = options.num_samples, how["end_id"], plan(
        model.config, len(ids), how["steps"], how["order"], how["block"])
    steps = ids.count(mask) if model.config.objective == "ar" else sum(steps for *_, steps in blocks)
    for part in [slice(i, i + 1) for i in range(n)] if options.watch else groups(model, n, device):
        began, samples = time.monotonic(), torch.arange(part.start, part.stop)
        x = torch.tensor(ids, device=device).repeat(len(samples), 1)
        logp = torch.zeros(x.shape, dtype=torch.float64)
        watch = viewer.Watch(tokenizer, x[0], mask, steps) if options.watch else None
        films = [viewer.Film(row, mask) for row in x] if options.html else []
        for step in unmask(model, x, seed=options.seed, samples=samples, **how):
            step = Step(step.number, *(part.cpu() for part in step[1:]))
            logp[step.revealed] = step.logp.gather(1, step.x[step.revealed][:, None])[:, 0].double()
            logp[step.remasked] = 0
            if watch:
                watch.show(step.number, step.x[0], step.revealed[0])
            for film, *of_row in zip(films, step.x, step.revealed, step.remasked,
                                     step.logp.split(step.revealed.sum(1).tolist())):
                film.add(*of_row)
        if end is not None:  # behind the first [END] nothing counts
            logp[((step.x == end) & (x.cpu() == mask)).cumsum(1).cumsum(1) > 1] = 0
        if watch:
            watch.clear()
        seconds = (time.monotonic() - began) / len(samples)
        for row, total, calls in zip(step.x.tolist(), logp.sum(1).tolist(), step.calls.tolist()):
            facts, texts = (dict(steps=steps, calls=calls, seconds=seconds, logprob=total),
                            to_texts(parts, row, tokenizer))
            if films:
                pages.append(films.pop(0).page(
                    tokenizer, row, text="".join(t for t, _ in texts), title=f"sample {len(pages) + 1}",
                    calls=calls, seconds=round(seconds, 2)))
            yield texts, facts


def ranked(model, tokenizer, parts, options, how, device):
    """--candidates fills (one at least), the likeliest first: a list of (Fill, texts, share), and facts."""
    from tqdm import tqdm
    keep, began, calls = max(1, options.candidates), time.monotonic(), []
    with tqdm(desc="trying fills", unit=" calls", leave=False, disable=None, dynamic_ncols=True) as bar:

        def count(_, args):
            calls.append(len(args[0]))
            bar.update(calls[-1])

        counter = model.blocks[0].register_forward_pre_hook(count)
        fills = hypotheses(model, tokenizer, parts, keep, max(2, keep) if None in parts else 8 * keep,
                           options.max_gap, device, mdlm.generator("fill", options.seed), **how)
        counter.remove()
    share = torch.softmax(torch.tensor([f.logp for f in fills], dtype=torch.float64), 0).tolist()
    found = [(f, to_texts(f.parts, f.ids, tokenizer), s) for f, s in zip(fills, share, strict=True)]
    return found, dict(steps=how["steps"], calls=sum(calls), seconds=time.monotonic() - began,
                       score=fills[0].logp)


def read_batch(path, tokenizer, context):
    """(template, parts) of each line of a file, all checked before any work begins."""
    try:
        text = (sys.stdin if path == "-" else open(path, encoding="utf-8")).read()
    except (OSError, UnicodeDecodeError) as e:
        raise Refusal(f"--batch={path} cannot be read ({e}); give a UTF-8 file, a template a line") from None
    found = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        try:
            found.append((line, parse(line, tokenizer, context)))
        except Refusal as e:
            raise Refusal(f"line {number} of {path}: {e}") from None
    return found


def jobs(options, given, tokenizer, context):
    """What to write: a list of (template or None, parts)."""
    if options.batch:
        return read_batch(options.batch, tokenizer, context)
    if "infill" in given:
        try:
            template = sys.stdin.read().removesuffix("\n") if options.infill == "-" else options.infill
        except UnicodeDecodeError as e:
            raise Refusal(f"standard input is not UTF-8 ({e}); convert it") from None
        return [(template, parse(template, tokenizer, context))]
    need_utf8(options.prompt)
    n, length = len(tokenizer.encode(options.prompt)), options.length or context
    if n >= length:
        raise Refusal(f"the prompt has {n} tokens, which leaves nothing to write of {length}; raise --length")
    return [(None, [p for p in (options.prompt, length - n) if p])]


def main(argv):
    given = common.parse_flags(Options, argv, __doc__.split("\n")[0])
    options = Options(**given)
    check(options, given)
    model, tokenizer, config, device = find_model(options)
    how, pages = settings(options, given, config, tokenizer), []
    todo = jobs(options, given, tokenizer, config.block_size)
    for number, (_, parts) in enumerate(todo, 1):
        if options.cfg and not any(isinstance(p, str) for p in parts):
            raise Refusal((f"line {number}: " if options.batch else "") + "--cfg guides by the given text, "
                          "and there is none; give --prompt, or a template with text")
    to_stdout = options.json == "-" or (options.batch and not options.json)
    quiet = to_stdout or options.batch  # standard output is for a program, or for nobody
    for path in {options.json, options.html} - {"", "-"}:
        if Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK):
            raise Refusal(f"{path} cannot be written; name a file in a folder that can be")
    lines = sys.stdout if to_stdout else open(options.json, "w", encoding="utf-8") if options.json else None

    joined = lambda texts: "".join(t for t, _ in texts)

    def show(texts, head=""):
        if not quiet:
            print(head + viewer.highlighted(texts), flush=True)

    def record(template, texts, facts, **more):
        if lines:
            of_template = dict(template=template, fills=[t for t, filled in texts if filled])
            line = dict(text=joined(texts)) | (of_template if template else {}) | facts | more
            lines.write(json.dumps(line, ensure_ascii=False).translate(BREAKS) + "\n")
            lines.flush()

    if options.batch and sys.stderr.isatty():
        from tqdm import tqdm
        todo = tqdm(todo, unit="template", dynamic_ncols=True)
    for template, parts in todo:
        if None in parts and "num_samples" in given:
            raise Refusal("a gap of unknown length has one best answer; give --candidates, not --num_samples")
        if options.top:
            top_tokens(model, tokenizer, parts, device, options.top)
            continue
        if options.candidates or None in parts:
            found, facts = ranked(model, tokenizer, parts, options, how, device)
            if None in parts and (options.watch or options.html):
                n = [p for p, old in zip(found[0][0].parts, parts) if old is None]
                print(f"the likeliest length is {', '.join(map(str, n))}: filled once more to be seen",
                      file=sys.stderr)
            parts = found[0][0].parts  # of known lengths now
        if options.candidates:
            for fill, texts, share in found:
                show(texts, f"{100 * share:5.1f} %  log p {fill.logp:.2f}  ")
            record(template, found[0][1], facts, candidates=[
                dict(text=joined(texts), score=f.logp, share=share) for f, texts, share in found])
        elif template and "[___]" in template and not (options.watch or options.html):
            show(found[0][1])
            record(template, found[0][1], facts)
        else:
            spent = facts["calls"] if template and "[___]" in template else 0  # to find the length
            for texts, facts in sampled(model, tokenizer, parts, options, how, device, pages):
                show(texts)
                record(template, texts, facts | dict(calls=facts["calls"] + spent))
    if options.html:
        n = sum(p.numel() for p in model.parameters())
        viewer.write_page(options.html, pages, dict(
            model=f"{n / 1e6:.1f} M parameters, context {config.block_size}", order=how["order"],
            steps=how["steps"], temperature=how["temperature"], seed=options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(common.run(main, sys.argv[1:]))
