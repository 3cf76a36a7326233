"""Train a masked diffusion language model. Config, data, model, objective, evaluation, loop, top to bottom.

    python mdlm.py                                   # tiny Shakespeare, sized for this machine
    python mdlm.py --data=my.txt --time_limit=300    # any text, five minutes
    torchrun --standalone --nproc_per_node=8 mdlm.py --preset=gpt2 --data=FOLDER     # train.bin and val.bin

The model sees a text in which some tokens are replaced by [MASK], at any rate from 0 to 1, and predicts those
(Sahoo et al., 2406.07524; Shi et al., 2406.04329; Ou et al., 2406.03736). Then run sample.py and eval.py.
"""

import time

PROCESS_START = time.monotonic()  # --time_limit and the log's seconds include the imports below

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import common
import kernels
import text
from common import Refusal, all_reduce, is_async, on_first_rank, opt, pick_device, pick_dtype, to_device

# ------------------------------------------------------------------------------------------------------------
# Config: one flat dataclass; the command line, --help and config.json all come from it

@dataclass
class Config:
    # the run
    data: str = opt("shakespeare", "text file, folder of train.bin and val.bin, shakespeare, patterns, pydoc")
    out_dir: str = opt("out", "folder for checkpoints, log.jsonl and pictures")
    resume: bool = opt(False, "go on from the last checkpoint in out_dir")
    overwrite: bool = opt(False, "replace the run in out_dir")
    init_from: str = opt("", "start from the weights and tokenizer of this run or checkpoint (fine-tuning)")
    preset: str = opt("auto", "defaults (below); auto: gpu with CUDA, else cpu", "auto", "cpu", "gpu", "gpt2")
    seed: int = opt(0, "of weights, data order and masks", bounds=(0, (1 << 32) - 1))
    device: str = opt("auto", "cpu, cuda, cuda:1, mps; auto: the best there is")
    dtype: str = opt("auto", "of products; auto: bfloat16 if in hardware", "auto", "float32", "bfloat16")
    kernels: str = opt("auto", "auto: Triton on CUDA, PyTorch elsewhere and for causal attention",
                       "auto", "triton", "torch")
    compile: str = opt("auto", "torch.compile the model; auto: where it pays", "auto", "on", "off")
    # data
    tokenizer: str = opt("char", "how text becomes tokens", "char", "byte", "word", "bpe")
    vocab_size: int = opt(0, "for word and bpe: at most so many tokens (0: 16384); for a folder of ids: V",
                          bounds=(0, 1 << 31))
    separator: str = opt("", "text between documents (\\n and \\t work); [END] is learned after each")
    # the model
    n_layer: int = opt(6, "blocks", bounds=(1, 1024))
    n_head: int = opt(6, "attention heads", bounds=(1, 1024))
    n_embd: int = opt(384, "width", bounds=(2, 1 << 16))
    block_size: int = opt(256, "context length T, in tokens", bounds=(1, 8192))
    dropout: float = opt(0.2, "dropout rate in the blocks", bounds=(0, 0.99))
    conv: int = opt(5, "window of the convolutions before attention and MLP (0: none)", bounds=(0, 63))
    pos: str = opt("rope", "positions", "rope", "learned", "sinusoidal")
    tie: bool = opt(False, "head and embedding share their weights")
    time_conditioning: bool = opt(False, "tell the model its mask rate (adaLN); the optimum does not need it")
    # the objective
    objective: str = opt("mdlm", "masked diffusion, or the autoregressive baseline", "mdlm", "ar")
    masking: str = opt("exact", "so many positions a sequence, or the textbook process", "exact", "bernoulli")
    mask_schedule: str = opt("linear", "distribution of the mask rate; the bound stays", "linear", "cosine")
    loss_weight: str = opt("bound", "uniform: all masked tokens count the same; no bound", "bound", "uniform")
    min_rate: float = opt(0.0, "smallest training mask rate; above 0 the loss is no bound", bounds=(0, 1))
    max_rate: float = opt(1.0, "largest training mask rate; below 1 the loss is no bound", bounds=(1e-6, 1))
    rate_margin: float = opt(0.5, "in the first half of a run mask rates lie between this and 1 - this, then "
                             "widen to all, the exact bound (no margin where the loss is no bound, with "
                             "mask_schedule=cosine or time_conditioning)", bounds=(0, 0.5))
    # the optimizer
    batch_size: int = opt(64, "sequences in one optimizer step, over all ranks and accumulation steps",
                          bounds=(2, 1 << 24))
    gradient_accumulation_steps: int = opt(1, "parts in which each rank computes its share of the batch",
                                           bounds=(1, 1 << 20))
    max_steps: int = opt(5000, "optimizer steps (no limit if only --time_limit is set)", bounds=(1, 1 << 31))
    time_limit: float = opt(0.0, "seconds for all, start and last save included (0: none)", bounds=(0, 1e9))
    optimizer: str = opt("muon", "Muon for matrices and AdamW for the rest, or AdamW alone", "muon", "adamw")
    muon_lr: float = opt(0.02, "learning rate of Muon", bounds=(0, 1e3))
    learning_rate: float = opt(3e-3, "learning rate of AdamW", bounds=(0, 1e3))
    weight_decay: float = opt(0.01, "decoupled; with Muon only of its matrices, else of all", bounds=(0, 1e3))
    beta1: float = opt(0.9, "of AdamW", bounds=(0, 0.9999))
    beta2: float = opt(0.95, "of AdamW", bounds=(0, 0.999999))
    momentum: float = opt(0.9, "of Muon", bounds=(0, 0.9999))
    grad_clip: float = opt(1.0, "largest gradient norm (0: no clipping)", bounds=(0, 1e9))
    lr_schedule: str = opt("trapezoid", "learning rate after the warm-up; trapezoid: falls in the last half",
                           "trapezoid", "cosine", "linear", "constant")
    warmup_steps: int = opt(100, "of linear warm-up", bounds=(0, 1 << 31))
    ema: float = opt(0.999, "decay of the averaged weights, which are evaluated and saved (0: none); less of "
                     "it while the learning rate falls", bounds=(0, 0.999999))
    # what you see of it
    eval_interval: int = opt(500, "steps between evaluations; each saves a checkpoint", bounds=(1, 1 << 31))
    eval_passes: int = opt(1, "masks per validation window (four times as many at the end)", bounds=(1, 4096))
    eval_windows: int = opt(4096, "validation windows at most, evenly spread (0: all)", bounds=(0, 1 << 31))
    log_interval: int = opt(20, "steps between lines of the log", bounds=(1, 1 << 31))
    wandb: str = opt("", "log to this Weights & Biases project")
    tensorboard: bool = opt(False, "write TensorBoard events to out_dir")


# What a preset changes (cpu: measured in results/cpu.md). An explicit flag always wins.
PRESETS = {
    "cpu": dict(n_layer=4, n_head=3, n_embd=192, block_size=128, dropout=0.0, batch_size=32, warmup_steps=50,
                learning_rate=0.01, max_steps=2000),
    "gpu": dict(),
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, dropout=0.0, tokenizer="bpe",
                 vocab_size=50257, batch_size=512, gradient_accumulation_steps=8, max_steps=20000,
                 warmup_steps=500, tie=True, eval_interval=1000, eval_windows=1024),
}
# What --data=patterns implies. Nearly all its entropy is in the first few symbols: cosine trains there more.
PATTERNS = dict(block_size=64, mask_schedule="cosine", lr_schedule="cosine", learning_rate=0.03,
                eval_windows=1000)
# Only these may change on --resume.
RESUMABLE = {"out_dir", "resume", "device", "kernels", "compile", "max_steps", "time_limit",
             "gradient_accumulation_steps", "eval_interval", "eval_passes", "eval_windows", "log_interval",
             "wandb", "tensorboard"}


def parse_args(argv):
    """The flags that were given, as a dict of Config fields."""
    lines = [f"  {name}: " + (" ".join(f"{k}={v}" for k, v in values.items()) or "the defaults above")
             for name, values in PRESETS.items()]
    lines.append("--data=patterns implies " + " ".join(f"{k}={v}" for k, v in PATTERNS.items()))
    return common.parse_flags(Config, argv, __doc__.split("\n")[0], "presets:\n" + "\n".join(lines))


def check(config, world=1):
    """Refuse a config that cannot work on `world` ranks."""
    common.check_fields(config)
    if config.n_embd % config.n_head or config.n_embd // config.n_head % 2:
        raise Refusal(f"--n_embd={config.n_embd} over --n_head={config.n_head} is no even head size; "
                      "choose n_embd = n_head x 32, 64 or 128")
    parts = 2 * world * config.gradient_accumulation_steps
    if config.batch_size % parts:
        raise Refusal(f"--batch_size={config.batch_size} must be a multiple of {parts}: sequences come in "
                      f"mirrored pairs, on {world} rank(s) with {config.gradient_accumulation_steps} "
                      "accumulation step(s)")
    if config.min_rate > config.max_rate:
        raise Refusal(f"--min_rate={config.min_rate} is above --max_rate={config.max_rate}; swap them")
    if config.data == "patterns" and (config.block_size, config.tokenizer + config.separator) != (64, "char"):
        raise Refusal("--data=patterns has aligned sequences of 64 characters; leave --block_size, "
                      "--tokenizer and --separator out")
    if config.objective == "ar" and config.time_conditioning:
        raise Refusal("--objective=ar has no mask rate to be told; leave --time_conditioning out")


def generator(*key):
    """A generator for a key such as ("levels", seed, step): the same on every rank, exact on resume."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


# ------------------------------------------------------------------------------------------------------------
# Data: any source becomes a folder with train.bin, val.bin, tokenizer.json and meta.json; training reads it

def prepare(config, folder, tokenizer=None):
    """Tokenize config.data into `folder`: int(0.9 n) characters train, the rest validates; bounded memory."""
    texts, meta = (text.find_text(config.data),
                   dict(source=config.data, dtype="uint8", characters=None, entropy=None, aligned=False))
    if texts is None:
        meta.update(aligned=True, entropy=text.patterns_entropy(), characters=[90_000 * 64, 10_000 * 64])
        sequences = text.make_patterns(100_000, seed=0)
        sequences[:90_000].tofile(folder / "train.bin")
        sequences[90_000:].tofile(folder / "val.bin")
        tokenizer = text.Tokenizer("char", list("abcdefghijklmno"))
    else:
        separator = config.separator.replace("\\n", "\n").replace("\\t", "\t")
        pieces = lambda: text.split_documents(texts(), separator)
        n, at = sum(len(piece) for piece, _ in pieces()), 0
        if n == 0:
            raise Refusal(f"--data={config.data} is empty; give a file with text in it")
        cut = int(0.9 * n)
        tokenizer = tokenizer or text.build_tokenizer(config.tokenizer, config.vocab_size or 16384,
                                                      bool(separator), pieces, cut)
        dtype = next(d for d in (np.uint8, np.uint16, np.int32)
                     if tokenizer.vocab_size - 1 <= np.iinfo(d).max)
        meta.update(dtype=np.dtype(dtype).name, characters=[cut, n - cut])
        with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
            for piece, ends in pieces():
                k = min(max(cut - at, 0), len(piece))
                at += len(piece)
                for f, part in ((train, piece[:k]), (val, piece[k:])):
                    if part:
                        f.write(np.append(tokenizer.encode_array(part), [tokenizer.end_id] * ends)
                                .astype(dtype).tobytes())
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "meta.json").write_text(json.dumps(meta))


class Corpus:
    """Windows of T tokens from a folder: one of ours, or one in nanoGPT's format (uint16, no tokenizer).

    An epoch cuts the training text at a random offset into windows and shuffles them: every token but for the
    margins is seen once, and not twice at the same place. With documents (an [END] in the vocabulary) a
    window starts at a document, or T tokens further in a long one, and is filled up with [END].
    """

    def __init__(self, folder, config, device):
        self.T, self.seed, self.device, self.cached = config.block_size, config.seed, device, {}
        meta, arrays, self.tokenizer, self.checksum = text.open_ids(folder, self.T, config.vocab_size)
        self.entropy, aligned, characters = (meta.get(k) for k in ("entropy", "aligned", "characters"))
        self.documents = self.tokenizer.end_id is not None
        n, T = len(arrays[0]), self.T
        if self.documents:
            self.train_starts, self.val_starts = (self.document_starts(a) for a in arrays)
        else:  # one window less than fit leaves room for the epoch's offset; patterns stay where they are
            self.train_starts, self.val_starts = (torch.arange(w) * T for w in (
                n // T if aligned else max(1, n // T - 1), len(arrays[1]) // T))
        self.room = 0 if self.documents or aligned else min(T, n - len(self.train_starts) * T + 1)
        scored = len(self.val_starts) * T if self.documents else len(arrays[1])
        self.chars_per_token = characters[1] / scored if characters else None
        fits = (device.type != "cuda"
                or sum(a.nbytes for a in arrays) < 0.3 * torch.cuda.mem_get_info(device)[0])
        self.train, self.val = (torch.from_numpy(a).to(device if fits else "cpu") for a in arrays)

    def document_starts(self, ids):
        """Where windows of documents begin, (n,) int64: at a document, and every T tokens in a longer one."""
        ends = [i + (ids[i:i + (1 << 24)] == self.tokenizer.end_id).nonzero()[0]
                for i in range(0, len(ids), 1 << 24)]
        edges = np.unique(np.concatenate([[0], *(e + 1 for e in ends), [len(ids)]]))
        windows = -(-np.diff(edges) // self.T)  # a document, rounded up
        nth = np.arange(windows.sum()) - np.repeat(windows.cumsum() - windows, windows)
        return torch.from_numpy(np.repeat(edges[:-1], windows) + nth * self.T)

    def gather(self, ids, starts):
        """(B,) starts -> (B, T) int64 windows on the device; behind a document's [END] all is [END]."""
        at = to_device(starts, ids.device)[:, None] + torch.arange(self.T, device=ids.device)
        short = ids.dtype == torch.uint16  # which CUDA does not index: the same bits as int16, and back
        x = (ids.view(torch.int16) if short else ids)[at.clamp(max=len(ids) - 1)]
        x = to_device(x, self.device).long() & (0xFFFF if short else -1)
        if self.documents:
            over = ((x == self.tokenizer.end_id).cumsum(1) > 0) | to_device(at >= len(ids), self.device)
            x = torch.where(over, self.tokenizer.end_id, x)
        return x

    def epoch(self, e):
        """The shuffled window starts of epoch e, a function of the seed alone; the last two are kept."""
        if e not in self.cached:
            g = generator("epoch", self.seed, e)
            offset = torch.randint(self.room, (1,), generator=g) if self.room else 0
            starts = self.train_starts[torch.randperm(len(self.train_starts), generator=g)] + offset
            self.cached = {k: v for k, v in self.cached.items() if k == e - 1} | {e: starts}
        return self.cached[e]

    def batch(self, samples):
        """Training windows (B, T) of sample numbers (B,), counted from the beginning of the run."""
        epoch, starts = samples // len(self.train_starts), torch.empty_like(samples)
        for e in epoch.unique().tolist():
            starts[epoch == e] = self.epoch(e)[samples[epoch == e] % len(self.train_starts)]
        return self.gather(self.train, starts)

    def windows(self, most=0):
        """Validation windows (W, T), non-overlapping, at most `most` of them (0: all), evenly spread."""
        starts, W = self.val_starts, len(self.val_starts)
        return self.gather(self.val, starts if not most or most >= W else
                           starts[torch.arange(most) * W // most])


# ------------------------------------------------------------------------------------------------------------
# Model: a pre-norm bidirectional transformer

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_head, self.dropout, self.causal = c.n_head, c.dropout, c.objective == "ar"
        self.qkv = nn.Linear(c.n_embd, 3 * c.n_embd, bias=False)
        self.proj = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.up = nn.Linear(c.n_embd, 4 * c.n_embd, bias=False)
        self.down = nn.Linear(4 * c.n_embd, c.n_embd, bias=False)
        self.conv = nn.Parameter(torch.zeros(2, c.conv, c.n_embd)) if c.conv else None
        self.adaln = nn.Linear(c.n_embd, 4 * c.n_embd, bias=False) if c.time_conditioning else None

    def norm(self, x, part, scale, shift):
        """RMSNorm, then a depthwise convolution: neighbours are what a character needs (results/cpu.md)."""
        h, T = F.rms_norm(x, x.shape[-1:]).to(x.dtype) * (1 + scale) + shift, x.shape[1]  # (B, T, C)
        if self.conv is None:
            return h
        conv, k = self.conv[part].to(h.dtype), self.conv.shape[1]
        near = F.pad(h, (0, 0, k - 1, 0) if self.causal else (0, 0, k // 2, k // 2))
        return h + sum(near[:, i:i + T] * w for i, w in enumerate(conv))

    def forward(self, x, cos, sin, rate, ops, rows=None):
        B, T, C = x.shape
        scale1, shift1, scale2, shift2 = (
            (0, 0, 0, 0) if self.adaln is None else self.adaln(rate)[:, None].chunk(4, -1))
        qkv = self.qkv(self.norm(x, 0, scale1, shift1)).view(B, T, 3, self.n_head, -1)
        y = ops.attention(qkv, cos, sin, qk_norm=True, causal=self.causal).reshape(B, T, C)
        x = x + F.dropout(self.proj(y), self.dropout, self.training)
        h = self.norm(x, 1, scale2, shift2)
        if rows is not None:  # behind the last block nobody reads the other positions
            x, h = (z.flatten(0, 1).index_select(0, rows) for z in (x, h))  # (n, C)
        return x + F.dropout(self.down(F.relu(self.up(h)).square()), self.dropout, self.training)


class Model(nn.Module):
    """Tokens and [MASK] in, logits for V tokens out: [MASK] is the embedding's last row and has no logit."""

    def __init__(self, config, vocab_size, ops):
        super().__init__()
        c, self.config, self.vocab_size, self.mask_id, self.ops = config, config, vocab_size, vocab_size, ops
        self.embed = nn.Embedding(vocab_size + 1, c.n_embd)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.head = None if c.tie else nn.Linear(c.n_embd, vocab_size, bias=False)
        self.positions = (nn.Parameter(torch.randn(c.block_size, c.n_embd) / 10)
                          if c.pos == "learned" else None)
        self.rate = nn.Linear(c.n_embd, c.n_embd, bias=False) if c.time_conditioning else None
        D = c.n_embd // c.n_head if c.pos == "rope" else c.n_embd
        angles = torch.arange(c.block_size)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
        self.register_buffer("cos", angles.cos(), persistent=False)  # (T, D/2)
        self.register_buffer("sin", angles.sin(), persistent=False)
        # What writes into the residual stream starts at zero: blocks begin as the identity, the loss at ln V.
        for name, p in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight", "head.weight", "adaln.weight")):
                nn.init.zeros_(p)
        if c.tie:
            nn.init.normal_(self.embed.weight, std=0.02)

    def head_weight(self):
        return self.head.weight if self.head is not None else self.embed.weight[:-1]  # (V, C)

    def features(self, xt, rows=None):
        """(B, T) ids -> (B, T, C), which the head reads; rows (n,) of the flat batch: only those, (n, C)."""
        T, C, pos = xt.shape[1], self.config.n_embd, self.config.pos
        x, cos, sin, rate = F.rms_norm(self.embed(xt), (C,)), self.cos[:T], self.sin[:T], None
        if pos != "rope":
            x = x + (self.positions[:T] if pos == "learned" else torch.cat((sin, cos), -1))
            cos = sin = None
        if self.rate is not None:  # l / L, a function of xt
            share = (xt == self.mask_id).float().mean(1, keepdim=True)
            rate = F.silu(self.rate(torch.cos(share * math.pi * torch.arange(C, device=xt.device))))
        if torch.is_autocast_enabled(x.device.type):  # the residual stream too: memory traffic is what costs
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.blocks[:-1]:
            x = block(x, cos, sin, rate, self.ops)
        x = self.blocks[-1](x, cos, sin, rate, self.ops, rows)
        return F.rms_norm(x, (C,)).to(x.dtype)  # CUDA's autocast would leave float32

    def forward(self, xt, targets=None, rows=None, weight=None):
        """(B, T) ids -> (B, T, V) float logits; with rows of the flat batch (n,), or None for all, and their
        targets and weights (n,): the loss on them."""
        used = None  # all that the head gets, unless rows end in padding: any position, marked by -1
        if rows is not None and not has_static_rows(self.config):
            place = torch.arange(len(rows), device=rows.device)
            used, rows = torch.where(rows < 0, rows, place), torch.where(rows < 0, place, rows)
        h = self.features(xt, rows)  # (B, T, C), or (n, C)
        if targets is None:
            return F.linear(h, self.head_weight()).float()
        return self.ops.linear_cross_entropy(h.flatten(0, -2), self.head_weight(), targets, used, weight)


# ------------------------------------------------------------------------------------------------------------
# Objective
#
# NELBO per token = the mean, over l uniform on {1..L} and random sets of l masked positions, of the mean CE
# there (Hoogeboom et al., 2110.02037, eq. 7; Ou et al., 2406.03736). Where counts come with another
# probability P(l) > 0, a sequence weighs 1 / (L P(l)): the expectation is the same.

def rates(u, config):
    """Uniform u in [0, 1) -> mask rates."""
    rate = torch.cos(math.pi / 2 * (1 - u)) if config.mask_schedule == "cosine" else u
    return config.min_rate + (config.max_rate - config.min_rate) * rate


def is_bound(config):
    return config.loss_weight == "bound" and config.min_rate == 0 and config.max_rate == 1


def first_margin(c):
    """--rate_margin, or 0 where it has no place: it would change chosen rates, or those a model is told."""
    return c.rate_margin * (is_bound(c) and c.mask_schedule == "linear" and not c.time_conditioning)


def has_static_rows(c):
    """Whether every pair of sequences has exactly L + 1 masked positions, so that all shapes are static."""
    return c.objective == "ar" or (c.masking == "exact" and c.mask_schedule == "linear"
                                   and c.min_rate == 0 and c.max_rate == 1)


def sequence_weights(config):
    """(L+1,) float32, made in float64: the weight of the mean CE of a sequence with l masked positions."""
    c, L = config, config.block_size
    l = torch.arange(L + 1, dtype=torch.float64)
    t = rates((torch.arange(1 << 14, dtype=torch.float64) + 0.5) / (1 << 14), c)  # for averages over rates
    if c.masking == "exact" and c.mask_schedule == "linear":
        P = torch.full_like(l, 1 / L)
    elif c.masking == "exact":  # l = 1 + floor(rate L), and rate < x iff u < 1 - arccos(x) 2 / pi
        P = torch.diff(1 - torch.arccos(l / L) * 2 / math.pi, prepend=l[:1])
    elif c.mask_schedule == "linear":  # then 1 / (L P(l)) is the Rao-Blackwell weight: E[1/t | l] = (L+1)/l
        P = torch.full_like(l, 1 / (L + 1))
    else:  # the binomial's probabilities, averaged over the rates
        choose = math.lgamma(L + 1) - torch.lgamma(l + 1) - torch.lgamma(L - l + 1)
        P = torch.stack([(choose[k] + k * t.log() + (L - k) * (-t).log1p()).exp().mean()
                         for k in range(L + 1)])
    if c.loss_weight == "uniform":  # sum of CE over its expected number of terms, a constant
        mean = (t * L if c.masking == "bernoulli" else (1 + (t * L).floor()).clamp(max=L)).mean()
        weight = l / mean
    else:  # a clipped range has no P(l) > 0 everywhere, and no bound: the plain mean
        weight = 1 / (L * P) if is_bound(c) else torch.ones_like(l)
    weight[0] = 0  # nothing is masked, nothing to predict
    return weight.float()


def draw_levels(config, step, early=0.0):
    """(N,) mask levels of a step's global batch, stratified and mirrored: counts, or rates if bernoulli.

    Each of the N/2 pairs draws u from a stratum of its own; its two sequences, neighbours, get u and 1 - u.
    As exact counts of the linear schedule these are l and L + 1 - l. early is 1 in the first half of a run,
    then falls to 0; times the margin it is the share of rates left out at both ends, where the mean over few
    tokens is noise (2503.09573), or few are visible: the middle teaches more (results/cpu.md).
    """
    half, L, g = config.batch_size // 2, config.block_size, generator("levels", config.seed, step)
    u = (torch.randperm(half, generator=g) + torch.rand(half, generator=g, dtype=torch.float64)) / half
    margin = first_margin(config) * early
    t = rates(margin + (1 - 2 * margin) * torch.stack((u, 1 - u), 1), config)  # (N/2, 2)
    if config.masking == "bernoulli":
        return t.flatten()
    l = (1 + (t * L).long()).clamp(max=L)
    if has_static_rows(config):
        l[:, 1] = L + 1 - l[:, 0]
    return l.flatten()


def shift_right(x0, mask_id):
    """The autoregressive input: [MASK] as the beginning, then x[0..T-2]; position i predicts token i."""
    return torch.cat((torch.full_like(x0[:, :1], mask_id), x0[:, :-1]), 1)


def make_batch(model, corpus, weight_of_count, step, samples, early=0.0):
    """What model.forward takes to give the loss of samples (B,), numbers in this step's global batch."""
    config = model.config
    # 1. windows of text; the step's samples are numbers step * N, step * N + 1 ... of the run
    x0 = corpus.batch(step * config.batch_size + samples)  # (B, T)
    B, T = x0.shape
    if config.objective == "ar":
        return (shift_right(x0, model.mask_id), x0.flatten(), None,  # None: all rows
                torch.full((B * T,), 1 / (B * T), device=x0.device))
    # 2. how much of each to mask, and where
    levels, samples = (to_device(x, x0.device) for x in (draw_levels(config, step, early)[samples], samples))
    xt, count, rows, n_rows = model.ops.mask_tokens(x0, levels, model.mask_id, config.seed, step, samples)
    # 3. only masked rows reach the head: cut the padding off where that needs no message from a GPU
    if has_static_rows(config):
        rows = rows[:B * (T + 1) // 2]
    elif x0.device.type == "cpu":
        rows = rows[:int(n_rows)]
    # 4. weigh: the mean CE over a sequence's masked positions, times 1 / (L P(l)), averaged over sequences
    weight = weight_of_count[count] / (count.clamp(min=1) * B)  # (B,)
    # 5. the model sums weight * CE over the rows; what pads them (-1) has none
    return xt, x0.flatten()[rows], rows, torch.where(rows < 0, 0, weight[rows // T])


# ------------------------------------------------------------------------------------------------------------
# Evaluation

@torch.no_grad()
def evaluate(model, windows, passes=1, seed=0, batch_size=64, rank=0, world=1, observe=lambda *_: None):
    """Likelihood of validation windows (W, T), in nats per token. Deterministic; ranks share the work.

    Masked diffusion: a window gets `passes` exact counts, one from each of so many strata of {1..T}, permuted
    against the windows' order. `nelbo`: the mean over all of the mean CE over masked positions, an upper
    bound of NLL. `se`: its standard error, over windows, of CE minus the mean CE of its bin of counts.
    Autoregressive: `nll` over all T tokens, its `se`, and `ar_shifted`, without a window's first token.
    `ce` and top-1 `accuracy` are lists, by tenths of the mask rate (one entry if autoregressive).
    observe(rows, y, logits) sees each batch: scored rows (n,) of the flat batch, their tokens, (n, V).
    """
    (W, T), ar, device, was_training = (
        windows.shape, model.config.objective == "ar", windows.device, model.training)
    model.eval()
    passes = 1 if ar else passes
    ce, hit, first = torch.zeros(3, passes, W, dtype=torch.float64)
    count = torch.full((passes, W), T)
    for k in range(passes):
        g = generator("evaluate", seed, k)
        u = (k + (torch.randperm(W, generator=g)
                  + torch.rand(W, generator=g, dtype=torch.float64)) / W) / passes
        count[k] = T if ar else (1 + (u * T).long()).clamp(max=T)
        for i in range(rank * batch_size, W, world * batch_size):
            at = torch.arange(i, min(i + batch_size, W))
            x0, l = windows[at.to(device)], count[k, at].to(device)
            if ar:
                xt, rows = shift_right(x0, model.mask_id), torch.arange(x0.numel(), device=device)
            else:
                xt, _, rows, n = model.ops.mask_tokens(x0, l, model.mask_id, seed ^ 0x5EED, k, at.to(device))
                rows = rows[:int(n)]
            logits = F.linear(model.features(xt, rows), model.head_weight()).float()
            y, row = x0.flatten()[rows], rows // T
            each = F.cross_entropy(logits, y, reduction="none")
            observe(rows, y, logits)
            zero = torch.zeros(len(at), device=device)
            ce[k, at] = (zero.index_add(0, row, each) / l).cpu().double()
            hit[k, at] = (zero.index_add(0, row, (logits.argmax(-1) == y).float()) / l).cpu().double()
            first[k, at] = each.view(len(at), T)[:, 0].cpu().double() if ar else 0
    ce, hit, first = all_reduce(torch.stack((ce, hit, first)))
    model.train(was_training)
    se = lambda x: x.std().item() / W**0.5 if W > 1 else math.inf
    if ar:
        shifted = (ce * T - first) / max(T - 1, 1)
        return dict(nll=ce.mean().item(), se=se(ce[0]), ar_shifted=shifted.mean().item(),
                    windows=W, ce=[ce.mean().item()], accuracy=[hit.mean().item()])

    def by_bin(values, bins):  # the mean of the values whose count falls into each bin, and each value's bin
        b = ((count - 1) * bins // T).flatten()
        return values.new_zeros(bins).index_add(0, b, values.flatten()) / b.bincount(minlength=bins), b

    bins = max(1, min(32, W * passes // 8))  # few values a bin would explain themselves
    mean, b = by_bin(ce, bins)
    residual = (ce - mean[b].view_as(ce)).mean(0) * (W * passes / max(W * passes - bins, 1)) ** 0.5  # (W,)
    tenths = {name: [None if math.isnan(v) else v for v in by_bin(values, 10)[0].tolist()]  # None: no count
              for name, values in (("ce", ce), ("accuracy", hit))}
    return dict(nelbo=ce.mean().item(), se=se(residual), windows=W, passes=passes, **tenths)


# ------------------------------------------------------------------------------------------------------------
# Checkpoints (how they are kept safe on disk: common.py)

def load(path="out", device="cpu", kernel="auto"):
    """(model, tokenizer, config) of a run (its latest checkpoint) or a checkpoint folder, ready to predict.

    The weights are float32: the averaged ones where the run kept an average. kernel: auto, triton or torch.
    Raises Refusal, a ValueError, for anything but an intact checkpoint. Nothing is ever unpickled.
    """
    folder = common.find_checkpoint(path)
    config, tokenizer = (common.read_fields(Config, folder / "config.json", check),
                         text.tokenizer_from_json(folder / "tokenizer.json"))
    ops = kernels.select(kernel, device, config.n_embd // config.n_head)
    size = 4 * config.n_embd * (12 * config.n_layer * config.n_embd + tokenizer.vocab_size)
    if size > (folder / "model.safetensors").stat().st_size:  # before memory is taken for it
        raise Refusal(f"{folder}/model.safetensors does not fit its config: it is too small; train anew")
    model = Model(config, tokenizer.vocab_size, ops)
    model.load_state_dict(common.read_tensors(folder / "model.safetensors", model.state_dict()))
    return model.to(device).eval(), tokenizer, config


def to_resume(model, ema, optimizers):
    """Name -> tensor: the optimizers' state, and the raw weights where averaged ones are kept beside them."""
    tensors = {f"raw.{name}": p.detach() for name, p in model.named_parameters() if ema}
    for i, optimizer in enumerate(optimizers):
        for j, slots in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer{i}.{j}.{name}": t for name, t in slots.items()}
    return tensors


def save(config, tokenizer, weights, tensors, state):
    """Write out_dir/step-N, N = state["step"]: `weights` to use, and `tensors` and `state` to resume."""
    from safetensors.torch import save as to_bytes
    weights, tensors = ({n: t.detach().cpu().contiguous() for n, t in d.items()} for d in (weights, tensors))
    if not all(t.isfinite().all() for t in (*weights.values(), *tensors.values())):
        raise Refusal(f"the weights of step {state['step']} are not finite: not saved; use --resume to go on "
                      "from the checkpoint before, or start anew with a lower --learning_rate")
    return common.write_checkpoint(config.out_dir, f"step-{state['step']}", {
        "config.json": json.dumps(
            dict(format="mdlm", version=1, config=dataclasses.asdict(config)), indent=1).encode(),
        "tokenizer.json": tokenizer.to_json().encode(), "state.json": json.dumps(state).encode(),
        "model.safetensors": to_bytes(weights), "state.safetensors": to_bytes(tensors)})


@torch.no_grad()
def restore(folder, model, ema, optimizers):
    """Load what `save` wrote into the model, the averaged weights and the optimizers; returns the state."""
    state = common.read_json(folder / "state.json", "training state")
    for name, kind in dict(step=int, seconds=float, ending=float, finished=bool).items():
        if type(state.get(name)) is not kind or not 0 <= state[name] < 1 << 31:
            raise Refusal(f"{folder}/state.json is damaged: {name} is {str(state.get(name))[:40]!r}")
    if state["step"]:  # the first step makes the optimizers' tensors; all it changes is overwritten below
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    into = to_resume(model, ema, optimizers)
    tensors = common.read_tensors(folder / "state.safetensors", into)
    averaged = common.read_tensors(folder / "model.safetensors", model.state_dict())
    for name, t in into.items():
        t.copy_(tensors[name])
    for (name, _), t in zip(model.named_parameters(), ema or model.parameters(), strict=True):
        t.copy_(averaged[name])
    return state


# ------------------------------------------------------------------------------------------------------------
# Training

def make_optimizers(model, c, device):
    """Muon for the matrices of the blocks (Jordan et al., 2024) and AdamW for the rest, or AdamW alone."""
    muon = [p for n, p in model.named_parameters() if c.optimizer == "muon" and n.startswith("blocks.")
            and "adaln" not in n and "conv" not in n]
    rest = [p for p in model.parameters() if not any(p is q for q in muon)]
    adamw = torch.optim.AdamW(rest, c.learning_rate, (c.beta1, c.beta2), fused=device.type in ("cuda", "cpu"),
                              weight_decay=c.weight_decay if c.optimizer == "adamw" else 0.0)
    return [kernels.Muon(muon, c.muon_lr, c.weight_decay, c.momentum), adamw] if muon else [adamw]


def compile_model(model, device, cuda_graphs=False):
    """On a CPU dropout draws from PyTorch's generator: with inductor's own a step took a fifth longer."""
    return torch.compile(model, options={"fallback_random": device.type == "cpu",
                                         "triton.cudagraphs": cuda_graphs})


def lr_scale(config, step, progress):
    """Warm-up by steps, then down by progress in [0, 1]: that of steps or of time, whichever is further."""
    down = dict(trapezoid=min(1.0, 2 * (1 - progress)), linear=1 - progress, constant=1.0,
                cosine=0.5 + 0.5 * math.cos(math.pi * progress))[config.lr_schedule]
    return min(1.0, (step + 1) / (config.warmup_steps + 1)) * down


def flops_per_token(model):
    """Forward and backward: 6 a weight, and 12 L C T for attention; the end sees only the masked half."""
    c, body = model.config, sum(p.numel() for p in model.blocks.parameters())
    end = c.n_embd * model.vocab_size  # the head and the last block's MLP
    if c.objective == "mdlm":
        end = end / 2 - 8 * c.n_embd**2 / 2
    return 6 * (body + end) + 12 * c.n_layer * c.n_embd * c.block_size


def open_run(given, world):
    """The Config of the flags given, checked, and the checkpoint to resume from (None for a new run)."""
    out, folder = Path(given.get("out_dir", Config.out_dir)), None
    if common.was_restarted(out):
        given = {k: v for k, v in given.items() if k != "overwrite"} | dict(resume=True)
    if given.get("resume"):
        if given.get("overwrite"):
            raise Refusal("--resume and --overwrite contradict each other; give one of them")
        folder = common.find_checkpoint(out)
        saved = common.read_fields(Config, folder / "config.json", check)
        for name, value in given.items():
            if name not in RESUMABLE and value not in (getattr(saved, name), "auto"):
                raise Refusal(f"--{name}={value} contradicts the run in {out}, which has "
                              f"{getattr(saved, name)}; leave the flag out, or start anew with --overwrite")
        config = dataclasses.replace(saved, **{k: v for k, v in given.items() if k in RESUMABLE})
        config.out_dir, config.overwrite = str(out), False
    else:
        preset = given.get("preset", "auto")
        if preset == "auto":
            preset = "gpu" if pick_device(given.get("device", "auto")).type == "cuda" else "cpu"
        implied = PATTERNS if given.get("data") == "patterns" else {}
        if given.get("time_limit"):
            implied = implied | dict(max_steps=1 << 31)
        config = Config(**PRESETS[preset] | implied | given | dict(preset=preset))
    check(config, world)
    if common.checkpoints(out) and not (config.resume or config.overwrite):
        raise Refusal(f"--out_dir={out} already holds a run; give --resume to go on with it, "
                      "--overwrite to replace it, or another --out_dir")
    on_first_rank(lambda: common.take(out))
    return config, folder


def open_corpus(config, device, checkpoint, tokenizer=None):
    """The corpus of config.data: a folder as it is; all else is tokenized by rank 0 into out_dir/data.

    With the given tokenizer, or one of its own. A run that resumes finds it there. Before anything there is
    replaced, the new data has proved usable.
    """
    folder = Path(config.data)
    learned = common.read_json(checkpoint / "state.json", "training state") if checkpoint else {}

    def opened(folder, device):
        corpus = Corpus(folder, config, device)
        if learned.get("data", corpus.checksum) != corpus.checksum:
            raise Refusal(f"--data={config.data} in {folder} is not the text that {checkpoint} learned; "
                          "restore it, or start anew with --overwrite")
        return corpus

    def make():
        if checkpoint and (folder / "meta.json").exists():
            return
        if folder.exists() and not (folder / "meta.json").exists():
            raise Refusal(f"{folder} exists and is not mdlm's; give another --out_dir")
        with common.writing(folder), common.new_folder(config.out_dir) as tmp:
            prepare(config, tmp, tokenizer)
            opened(tmp, torch.device("cpu"))
            common.remove(folder)
            os.rename(tmp, folder)

    if not folder.is_dir() or config.data in ("shakespeare", "patterns", "pydoc"):
        folder = Path(config.out_dir) / "data"
        on_first_rank(make)
    return opened(folder, device)


def train(given, start):
    """Train with the flags that were given, a dict of Config fields. Returns the exit code."""
    # 1. ranks, config, device, data
    rank, world, local = common.join_ranks()
    config, folder = open_run(given, world)
    device = pick_device(config.device)
    if device.type == "cuda":
        device = pick_device(f"cuda:{local}") if world > 1 else device
        torch.cuda.set_device(device.index or 0)
    dtype = pick_dtype(config.dtype, device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    ops = kernels.select(config.kernels, device, config.n_embd // config.n_head, dtype)
    torch.set_float32_matmul_precision("high")  # TF32 for what stays in float32 on a GPU
    source = load(config.init_from) if config.init_from and not folder else None
    same = ["n_layer", "n_head", "n_embd", "conv", "pos", "tie", "time_conditioning", "separator"]
    differ = [f"{k}={getattr(source[2], k)!r}" for k in same + ["block_size"] * (config.pos == "learned")
              if source and getattr(source[2], k) != getattr(config, k)]
    if differ:
        raise Refusal(f"--init_from={config.init_from} has {' and '.join(differ)}; give the same here")
    log = common.Log(config, silent=rank > 0)
    corpus = open_corpus(config, device, folder, source and source[1])
    tokenizer, val = corpus.tokenizer, corpus.windows(config.eval_windows)

    # 2. model, averaged weights, optimizers
    torch.manual_seed(config.seed)
    model = Model(config, tokenizer.vocab_size, ops)
    if source:
        if source[1].to_json() != tokenizer.to_json():
            raise Refusal(f"--init_from={config.init_from} has other tokens than {config.data}; give text")
        model.load_state_dict(source[0].state_dict())
    params = list(model.to(device).parameters())
    ema = [p.detach().clone() for p in params] if config.ema else None
    optimizers = make_optimizers(model, config, device)
    state = (restore(folder, model, ema, optimizers) if folder else
             dict(step=0, seconds=0.0, ending=0.0, finished=False))
    step, ending = state["step"], state["ending"]  # steps done; seconds that the end of the run will take
    pending = {}  # step -> loss and gradient norm that nobody has looked at yet
    elapsed = lambda: time.monotonic() - start + state["seconds"]

    # 3. compile where it pays: on a CPU it takes 20 s, a C++ compiler and Python's headers, and wins a third
    N, accumulate, T = config.batch_size, config.gradient_accumulation_steps, config.block_size
    B, flops = N // world // accumulate, flops_per_token(model)
    peak = common.peak_flops(device, dtype) * world
    seconds = min(config.time_limit or math.inf, 2 * flops * N * T * config.max_steps / peak)  # a guess
    compiled = common.should_compile(config.compile, device, seconds >= 120)
    config.compile, config.dtype = "on" if compiled else "off", str(dtype)[6:]
    fast = compile_model(model, device) if compiled else model
    fast = nn.parallel.DistributedDataParallel(fast) if world > 1 else fast
    log.say(f"preset {config.preset}: {sum(p.numel() for p in params) / 1e6:.2f} M parameters, "
            f"{config.n_layer} layers x {config.n_embd}, context {T}, batch {N}\n"
            f"{device}, {str(dtype)[6:]}, {'compiled' if compiled else 'eager'}, {world} rank(s), "
            f"{model.ops.name} kernels, peak {peak / 1e12:.2f} TFLOP/s\n"
            f"data: {len(corpus.train):,} training tokens, {len(val)} validation windows, "
            f"V = {tokenizer.vocab_size}" + (f"\nresuming from {folder}" if folder else "")
            + (f"\nexact entropy: {corpus.entropy:.4f} nats per token" if corpus.entropy else ""))
    if config.objective == "mdlm" and (first_margin(config) or not is_bound(config)):
        when = "before the end (--rate_margin)" if is_bound(config) else "with these rates or weights"
        log.say(f"the training loss is no likelihood bound {when}; the evaluation is one")

    def swap():
        for p, e in zip(params, ema or [], strict=False):
            p.data, e.data = e.data, p.data

    @contextlib.contextmanager
    def averaged():
        """Within, the model has the averaged weights."""
        swap()
        yield
        swap()

    def settle():
        """The last step's loss and gradient norm, averaged over the ranks: a NaN of one is a NaN of all.

        Refuses what is not finite in any step since the last call; None if there was none.
        """
        if pending:
            values = (all_reduce(torch.stack([*pending.values()]).cpu().double()) / world).tolist()
            for at, (loss, norm) in zip(pending, values, strict=True):
                if not math.isfinite(loss + norm):
                    raise Refusal(f"loss {loss}, gradient norm {norm} at step {at}: not kept. {advice()}")
            pending.clear()
            return loss, norm

    def report(passes):
        """Evaluate, log, and show samples."""
        nonlocal ending
        settle()
        began, key = time.monotonic(), "nll" if config.objective == "ar" else "nelbo"
        # one context for each set of weights: autocast keeps their bfloat16 copies until it ends
        with autocast:
            raw = evaluate(model, val, batch_size=B, rank=rank, world=world)[key] if ema and step else None
        with averaged(), autocast:
            one = time.monotonic()
            r = evaluate(model, val, passes, batch_size=B, rank=rank, world=world)
            a_pass = (time.monotonic() - one) / passes
            if not math.isfinite(r[key]):
                raise Refusal(f"validation {key.upper()} {r[key]} at step {step}: not saved. {advice()}")
            bpc = r[key] / math.log(2) / corpus.chars_per_token if corpus.chars_per_token else None
            more = dict(ce_by_rate=r["ce"]) if key == "nelbo" else dict(val_ar_shifted=r["ar_shifted"])
            log.record(step=step, tokens=step * N * T, seconds=round(elapsed(), 3), **{
                f"val_{key}": r[key], f"val_{key}_se": r["se"],
                f"val_{key}_raw": r[key] if raw is None else raw, "val_bpc": bpc}, **more)
            log.say(f"step {step}: {key.upper()} {r[key]:.4f} +- {r['se']:.4f} nats per token"
                    + (f", {bpc:.3f} bits per character" if bpc else "")
                    + (f", entropy {corpus.entropy:.4f}" if corpus.entropy else "")
                    + (f", shifted {r['ar_shifted']:.4f}" if key == "nll" else
                       "; CE by rate: " + " ".join("-" if x is None else f"{x:.2f}" for x in r["ce"])))
            if rank == 0 and step:
                import sample
                model.eval()
                for shown in sample.preview(model, tokenizer, val, generator("preview", config.seed, step)):
                    log.say("  | " + shown.replace("\n", "\n  | "))
                model.train()
        # The end: four passes with the averaged weights, one with the raw ones, samples, a save, a picture.
        ending = (4 * config.eval_passes + 1 - passes) * a_pass + time.monotonic() - began + 2

    def advice():
        kept = common.checkpoints(config.out_dir)
        return (f"The last good checkpoint is {kept[0] if kept else 'none yet'}; lower --learning_rate and "
                "--muon_lr, or try --dtype=float32")

    def checkpoint(finished=False):
        settle()
        with averaged():
            weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        on_first_rank(lambda: save(
            config, tokenizer, weights, to_resume(model, ema, optimizers),
            dict(step=step, tokens=step * N * T, seconds=elapsed(), ending=ending, finished=finished,
                 data=corpus.checksum, launch=common.launch())))

    # 4. the loop
    if all_reduce(torch.tensor(float(step))) != step * world:  # all are ready: a run to replace may go now
        raise Refusal("the ranks see different checkpoints; give an --out_dir that all of them share")
    if config.overwrite and rank == 0:
        for old in common.checkpoints(config.out_dir):
            common.remove(old)
    log.begin(step if folder else -1, config.max_steps if config.max_steps < 1 << 31 else None)
    if not folder:
        report(passes=1)
    weight_of_count, progress, saved = sequence_weights(config).to(device), 0.0, step if folder else None
    logged, logged_at = step, time.monotonic()
    interrupt = common.Interrupt()  # only now: until here nothing would be lost by leaving at once
    while True:
        if config.time_limit:
            progress = max(progress, elapsed() / max(config.time_limit - ending, 0.01))
        progress, stop = max(progress, step / config.max_steps), interrupt.signal
        # all ranks go by the same clock and stop at the same step
        progress, stop = all_reduce(torch.tensor([progress, stop], dtype=torch.float64), "MAX").tolist()
        if stop or progress >= 1:
            break
        scale, early = lr_scale(config, step, progress), min(1.0, 2 * (1 - progress))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = scale * optimizer.defaults["lr"]
        loss = 0
        for part in range(accumulate):
            samples = torch.arange(B) + (rank * accumulate + part) * B  # of the global batch
            batch = make_batch(model, corpus, weight_of_count, step, samples, early)
            if compiled and not has_static_rows(config):  # one compilation for any number of rows
                for x in batch[1:]:
                    torch._dynamo.mark_dynamic(x, 0)
            if config.dropout:
                torch.manual_seed(generator("dropout", config.seed, step, rank, part).initial_seed())
            last = world == 1 or part == accumulate - 1  # gradients travel once a step
            with contextlib.nullcontext() if last else fast.no_sync():
                with autocast:
                    part_loss = fast(*batch) / accumulate
                part_loss.backward()
            loss = loss + part_loss.detach()
        pending[step] = torch.stack((loss, common.clip_gradients(params, config.grad_clip)))
        if not is_async(device) or (step + 1) % config.log_interval == 0:  # a GPU does not wait for Python
            loss, norm = settle()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if ema:  # as steps get smaller the average looks back over fewer: it would lag behind the weights
            new = (1 - min(config.ema, (1 + step) / (10 + step))) / max(scale, 1e-6)
            torch._foreach_lerp_(ema, [p.detach() for p in params], min(new, 1))
        step += 1
        if step % config.log_interval == 0:
            speed = (step - logged) * N * T / (time.monotonic() - logged_at)
            peak = max(peak, speed * flops)  # other programs may have run when it was measured
            log.record(step=step, tokens=step * N * T, seconds=round(elapsed(), 3), loss=loss, grad_norm=norm,
                       lr_scale=scale, tokens_per_second=round(speed), mfu=speed * flops / peak)
            log.progress(step, f"loss {loss:.4f}, {speed:,.0f} tokens/s, MFU {speed * flops / peak:.1%}")
            logged, logged_at = step, time.monotonic()
        if step % config.eval_interval == 0 and step < config.max_steps:
            report(config.eval_passes)
            checkpoint()
            saved, logged, logged_at = step, step, time.monotonic()

    # 5. the end: an evaluation and a save of the same step
    if stop:
        if saved != step:
            checkpoint()
        log.say(f"stopped at step {step} and saved; "
                f"to go on: python mdlm.py --out_dir={config.out_dir} --resume")
    elif saved == step and state["finished"]:
        log.say(f"this run ended at step {step}; to go on, raise --max_steps or --time_limit")
    else:
        report(4 * config.eval_passes)
        checkpoint(finished=True)
        if rank == 0:
            import eval
            eval.plot_losses([config.out_dir], Path(config.out_dir) / "loss.png")
        infill = ' --infill "To be███"' if config.objective == "mdlm" and tokenizer.knows("To be") else ""
        log.say(f"done in {elapsed():.0f} s. Now type: python sample.py --out_dir={config.out_dir}{infill}")
    log.close()
    common.leave_ranks()
    return 128 + int(stop) if stop else 0


if __name__ == "__main__":
    sys.exit(common.run(lambda argv: train(parse_args(argv), PROCESS_START), sys.argv[1:]))
