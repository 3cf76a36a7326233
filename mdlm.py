"""Train a masked diffusion language model: data, model, loss, sampling, evaluation, training loop.

    python mdlm.py                                   # tiny Shakespeare, sized for this machine
    python mdlm.py --data=my.txt --time_limit=300    # any text, five minutes
    torchrun --standalone --nproc_per_node=8 mdlm.py --preset=gpt2 --data=FOLDER

The model sees a text in which some tokens, at any rate from 0 to 1, are replaced by [MASK], and
predicts them; its mean loss is a bound of -log p(text), the NELBO (Sahoo et al., 2406.07524; Shi et
al., 2406.04329; Ou et al., 2406.03736). Read this file from top to bottom; what is not about
diffusion is in support/. sample.py has a better sampler.
"""

from support import cli

PROCESS_START = cli.start(__name__)  # --time_limit and the log's seconds include the imports below

import dataclasses
import math
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from support import (
    checkpoint,
    compiling,
    kernels,
    numerics,
    pace,
    plots,
    runs,
    runtime,
    shards,
    sources,
    texts,
)
from support.arguments import check_evaluation, check_input, check_reversing, truth
from support.cli import COUNT, NO_LIMIT, READS, WRITES, UserError, opt
from support.ids import DTYPES
from support.kernels.launch import can_compile
from support.kernels.reference import block_spans, document_spans, masked_share, rotary_tables
from support.log import Log
from support.optimizers import make_optimizers, set_rates, update
from support.runs import Run
from support.runtime import all_reduce, generator, to_device
from support.tokenizer import build_tokenizer, tokenizer_from_json

# ---- Config: one flat dataclass; the command line, --help and config.json all come from it


# Mask schedules map u, uniform in [0, 1), to a mask rate. To add one, write its line here: it must
# rise or fall strictly between 0 and 1. Its weights follow (count_probabilities): the bound stays.
SCHEDULES = {
    "linear": lambda u: u,
    "cosine": lambda u: torch.cos(math.pi / 2 * (1 - u)),
}


@dataclasses.dataclass
class Config:
    # The run
    data: str = opt(
        "shakespeare",
        "text, .jsonl, .json, .parquet, folder, shakespeare, patterns, pydoc",
        path=READS,
    )
    out_dir: str = opt("out", "folder for checkpoints, log.jsonl and loss.png", path=WRITES)
    resume: bool = opt(False, "continue from the last checkpoint in out_dir")
    overwrite: bool = opt(False, "replace the run in out_dir")
    init_from: str = opt(
        "", "fine-tune the weights of this run or checkpoint, with its tokenizer", path=READS
    )
    preset: str = opt("auto", "size (below); auto: by device", "auto", "cpu", "gpu", "gpt2")
    seed: int = opt(0, "seed of weights, data order and masks", bounds=(0, (1 << 32) - 1))
    device: str = opt("auto", "cpu, cuda, cuda:1, mps; auto: the best available")
    dtype: str = opt("auto", "of matrix products", "auto", "float32", "bfloat16")
    kernels: str = opt("auto", "auto: Triton on CUDA, else PyTorch", "auto", "triton", "torch")
    compile: str = opt("auto", "torch.compile; auto: GPU, or from 120 s on", "auto", "on", "off")
    shard: int = opt(0, "how many ranks share a model (no value: all)", bounds=(-1, 4096), bare=-1)
    recompute: bool = opt(False, "recompute layers in backward: a third slower, less memory")
    # Data
    tokenizer: str = opt(
        "char", "char, byte, word, bpe, or a tokenizer.json (of Hugging Face)", path=READS
    )
    vocab_size: int = opt(0, "V of word, bpe (0: 16384) or .bin files", bounds=(0, 1 << 24))
    text_column: str = opt("text", "column of .jsonl, .json, .parquet; a record is a document")
    prompt_column: str = opt("", "column of prompts, which are given; --text_column: answers")
    separator: str = opt("", "text between documents (\\n, \\t), which end in [END]", text=True)
    end_token: str = opt("", "[END] in a tokenizer.json (default: its end of text)")
    end_id: int = opt(-1, "[END] in a folder of .bin files (-1: none)", bounds=(-1, 1 << 24))
    bin_dtype: str = opt(
        "auto", "of ids in .bin files (auto: uint16, or as noted)", "auto", *DTYPES
    )
    max_bad_records: int = opt(
        -1, "records to skip (-1: all empty, none damaged)", bounds=(-1, 1 << 31)
    )
    pack: bool = opt(True, "several documents of known lengths in a window, where they fit")
    lengths: str = opt("known", "of documents: given, or [END] is learned", "known", "learned")
    # Model
    n_layer: int = opt(6, "number of layers", bounds=(1, 1024))
    n_head: int = opt(6, "attention heads", bounds=(1, 1024))
    n_embd: int = opt(384, "width C", bounds=(2, 1 << 16))
    block_size: int = opt(256, "context length T, in tokens", bounds=(1, 8192))
    block_length: int = opt(0, "finish S tokens before the next (0: all at once)", bounds=(0, 8192))
    whole: float = opt(0.0, "share of steps with a single block: to fill gaps too", bounds=(0, 1))
    dropout: float = opt(0.2, "dropout rate", bounds=(0, 0.99))
    attention_every: int = opt(1, "attention in every k-th layer, from the last", bounds=(1, 1024))
    conv: int = opt(5, "convolution window before attention and MLP (0: none)", bounds=(0, 63))
    pos: str = opt("rope", "positional encoding", "rope", "learned", "sinusoidal")
    tie: bool = opt(False, "share the weights of embedding and head")
    time_conditioning: bool = opt(False, "tell the model its mask rate (adaLN)")
    # Objective
    objective: str = opt("mdlm", "masked diffusion, or autoregressive (baseline)", "mdlm", "ar")
    masking: str = opt("exact", "exactly l tokens, or each with rate t", "exact", "bernoulli")
    mask_schedule: str = opt("linear", "distribution of the mask rate", *SCHEDULES)
    loss_weight: str = opt("bound", "uniform: all masked tokens alike", "bound", "uniform")
    min_rate: float = opt(0.0, "smallest mask rate in training (above 0: no bound)", bounds=(0, 1))
    max_rate: float = opt(1.0, "largest mask rate (below 1: no bound)", bounds=(1e-6, 1))
    rate_margin: float = opt(0.5, "rates left out at both ends early; no variants", bounds=(0, 0.5))
    # Optimizer
    batch_size: int = opt(64, "sequences in an optimizer step, all ranks", bounds=(2, 1 << 24))
    gradient_accumulation_steps: int = opt(1, "micro-batches of a rank", bounds=(1, 1 << 20))
    max_steps: int = opt(5000, "optimizer steps (unlimited with only --time_limit)", bounds=COUNT)
    time_limit: float = opt(0.0, "seconds for the whole run (0: no limit)", bounds=(0, 1e9))
    optimizer: str = opt("muon", "muon: for matrices, AdamW for the rest", "muon", "adamw")
    muon_lr: float = opt(0.02, "learning rate of Muon", bounds=(0, 1e3))
    learning_rate: float = opt(3e-3, "learning rate of AdamW", bounds=(0, 1e3))
    weight_decay: float = opt(0.01, "decoupled; with Muon only for its matrices", bounds=(0, 1e3))
    grad_clip: float = opt(1.0, "largest gradient norm (0: no clipping)", bounds=(0, 1e9))
    lr_schedule: str = opt("trapezoid", "decay", "trapezoid", "cosine", "linear", "constant")
    warmup_steps: int = opt(100, "steps of linear warm-up", bounds=(0, NO_LIMIT))
    ema: float = opt(0.999, "EMA decay (0: off), lower as the rate decays", bounds=(0, 0.999999))
    # Evaluation and logging
    eval_interval: int = opt(0, "steps between evaluations (0: ten a run)", bounds=(0, NO_LIMIT))
    eval_windows: int = opt(4096, "most windows of the last one (0: all)", bounds=(0, NO_LIMIT))
    log_interval: int = opt(20, "steps between records in log.jsonl", bounds=COUNT)


# What a preset changes (cpu: measured in results/cpu.md). A flag that is given always wins.
# CPUs differ in speed by ten times: cpu ends after five minutes, unless --max_steps is given.
PRESETS = {
    "cpu": dict(n_layer=4, n_head=3, n_embd=192, block_size=256, dropout=0.0, batch_size=16)
    | dict(warmup_steps=50, learning_rate=0.01, attention_every=4)
    | dict(max_steps=NO_LIMIT, time_limit=300.0),
    "gpu": dict(),
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, dropout=0.0, batch_size=512)
    | dict(warmup_steps=500, max_steps=20000, gradient_accumulation_steps=8, tie=True)
    | dict(tokenizer="bpe", vocab_size=50257, eval_windows=1024),
}
# What --data=patterns implies. Most of its entropy is in the first symbols: cosine trains these.
PATTERNS = dict(block_size=64, mask_schedule="cosine", eval_windows=1000)
PATTERNS |= dict(lr_schedule="cosine", learning_rate=0.03, batch_size=32, attention_every=1)
# Flags that may change on --resume, beside runs.CHANGEABLE.
RESUMABLE = {
    *("out_dir", "resume", "device", "kernels", "compile", "shard", "recompute"),
    *("max_steps", "time_limit", "gradient_accumulation_steps"),
    *("eval_interval", "eval_windows", "log_interval"),
}


def n_blocks(config, step=-1):
    """How many blocks a window is written in, one after another (--block_length; 1: at once).

    In a --whole share of the training steps it is 1: so the model learns to fill gaps too.
    """
    if step >= 0 and numerics.stratified(1, "whole", config.seed, step) < config.whole:
        return 1
    return config.block_size // (config.block_length or config.block_size)


def parse_args(argv):
    """The flags that were given, as a dict of Config fields."""
    implied = "--data=patterns implies " + " ".join(f"{k}={v}" for k, v in PATTERNS.items())
    notes = cli.fold(implied, "", "    ")
    notes += "\nA run ends by --max_steps or --time_limit, or by both; with neither by its preset."
    notes += "\nWith --max_steps alone no clock enters: on a CPU such runs repeat to the bit."
    return cli.parse_flags(Config, argv, __doc__, notes, PRESETS, runtime.default_preset("auto"))


def new_config(given):
    """The Config of a new run: the given flags, over its preset and what they imply."""
    preset = given.get("preset", "auto")
    if preset == "auto":
        preset = runtime.default_preset(given.get("device", "auto"))
    settings = PRESETS[preset] | (PATTERNS if given.get("data") == "patterns" else {})
    config = Config(**settings | given | {"preset": preset})
    runs.choose_end(config, given, Config(**settings))
    if config.prompt_column or n_blocks(config) > 1:
        config.lengths = given.get("lengths", "learned")  # a text goes on until its [END]
    return config


# ---- Data: every source becomes a folder with train.bin, val.bin, tokenizer.json and meta.json
def prepare(config, folder, tokenizer=None):
    """Tokenize config.data into `folder`: nine tenths of its text train, the rest validates."""
    if sources.has_documents(config):
        sources.check_documents(config, is_variant)
    source = texts.open_source(config)
    if source is None:
        sources.write_patterns(folder)
        return
    n = source.survey()  # characters to learn a tokenizer from
    if tokenizer is None:
        how = (config.tokenizer, config.vocab_size or 16384, sources.has_documents(config))
        tokenizer = build_tokenizer(*how, source, n, config.end_token)
    largest = tokenizer.vocab_size - 1
    dtype = next(d for d in (np.uint8, np.uint16, np.int32) if largest <= np.iinfo(d).max)
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for ids, trains in source.encode(tokenizer):
            (train if trains else val).write(ids.astype(dtype).tobytes())
    characters = [source.cut, source.n - source.cut]
    meta = dict(source=config.data, dtype=np.dtype(dtype).name, characters=characters)
    sources.write_meta(folder, tokenizer, meta)


class Corpus:
    """Windows of T tokens from a folder: one of ours, or one in nanoGPT's format.

    An epoch cuts the training text into windows from a random offset on and shuffles them: every
    token but a few at the margins is seen once. With documents (an [END] in the vocabulary) windows
    start at a document, or T tokens further in a long one, and are filled up with [END]; with
    --pack a window of training holds as many as there is room for. [END] is not learned, or only
    the one after a text (objective ar), or all that fill up a window too (--lengths=learned).
    """

    def __init__(self, folder, config, device):
        self.T = T = config.block_size
        self.seed = config.seed
        self.device = device
        V = config.vocab_size
        how = (T, V, config.end_id, config.bin_dtype)
        meta, ids, self.tokenizer, self.identity = sources.open_ids(folder, *how)
        self.entropy = meta.get("entropy")
        self.documents = self.tokenizer.end_id is not None
        self.n_documents = 0  # that train
        if self.documents:
            how = (self.tokenizer.end_id, config.prompt_column)
            self.n_documents = sources.count_documents(ids[0], *how)
        # (W,) where windows start, how many tokens they take, how many of these are learned
        self.train_windows = sources.cut_windows(ids[0], config, self.tokenizer.end_id)
        self.val_windows = sources.cut_windows(ids[1], config, self.tokenizer.end_id)
        self.length_counts = sources.count_lengths(*self.train_windows, T)
        if config.pack and config.lengths == "known" and config.objective == "mdlm":
            self.train_windows = sources.pack_windows(*self.train_windows, T)
        self.mean_size = self.train_windows[1].double().mean().item()
        self.mean_length = self.train_windows[2].double().mean().item()
        self.offsets = 0  # of an epoch's first window: 0 to offsets - 1
        if not self.documents and not meta.get("aligned"):
            W = max(1, len(self.train_windows[0]) - 1)
            self.train_windows = [part[:W] for part in self.train_windows]  # room for the offset
            self.offsets = min(T, len(ids[0]) - W * T + 1)
        self.chars_per_token = None
        if meta.get("characters") and not config.prompt_column:
            scored = int(self.val_windows[2].sum()) if self.documents else len(ids[1])
            self.chars_per_token = meta["characters"][1] / scored
        self.epochs = {}
        self.train, self.val = runtime.to_tensors(ids, device)

    def gather(self, ids, windows):
        """(3, B) windows -> (B, T) int64 on the device, filled up with [END]."""
        starts, sizes, _ = to_device(windows, ids.device)[:, :, None]  # (B, 1)
        at = torch.arange(self.T, device=ids.device)
        x = ids[(starts + at).clamp(max=len(ids) - 1)].long()
        if self.documents:
            x = torch.where(at < sizes, x, self.tokenizer.end_id)
        return to_device(x, self.device)

    def epoch(self, number):
        """The order (W,) of an epoch's windows, and their offset: functions of the seed alone."""
        if number not in self.epochs:
            g = generator("epoch", self.seed, number)
            offset = torch.randint(self.offsets, (1,), generator=g) if self.offsets else 0
            order = torch.randperm(len(self.train_windows[0]), generator=g)
            self.epochs.pop(number - 2, None)
            self.epochs[number] = (order, offset)
        return self.epochs[number]

    def find(self, samples):
        """Sample numbers (B,), counted from the start of the run -> their (3, B) windows."""
        W = len(self.train_windows[0])
        epoch = samples // W
        found = samples.repeat(3, 1)
        for number in epoch.unique().tolist():
            here = epoch == number
            order, offset = self.epoch(number)
            at = order[samples[here] % W]
            found[:, here] = torch.stack([part[at].long() for part in self.train_windows])
            found[0, here] += offset
        return found

    def batch(self, samples):
        """Training windows (B, T) of sample numbers (B,)."""
        return self.gather(self.train, self.find(samples))

    def windows(self, most=0):
        """Validation windows (W, T), non-overlapping; at most `most` (0: all), evenly spread."""
        W = len(self.val_windows[0])
        n = min(most or W, W)
        at = torch.arange(n) * W // n
        return self.gather(self.val, torch.stack([part[at].long() for part in self.val_windows]))


# ---- Model: a pre-norm bidirectional transformer
class Block(nn.Module):
    def __init__(self, config, attends=True):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.dropout = nn.Dropout(config.dropout)
        self.causal = config.objective == "ar"
        self.qkv = nn.Linear(C, 3 * C, bias=False) if attends else None
        self.proj = nn.Linear(C, C, bias=False) if attends else None
        self.up = nn.Linear(C, 4 * C, bias=False)
        self.down = nn.Linear(4 * C, C, bias=False)
        self.conv = nn.Parameter(torch.zeros(1 + attends, config.conv, C)) if config.conv else None
        self.adaln = nn.Linear(C, 4 * C, bias=False) if config.time_conditioning else None

    def norm(self, x, part, scale, shift, spans, ops):
        """RMSNorm and a depthwise convolution, thanks to which some blocks need no attention."""
        h = F.rms_norm(x, x.shape[-1:]).to(x.dtype)  # (B, T, C)
        if self.adaln is not None:
            h = h * (1 + scale) + shift
        if self.conv is None:
            return h
        conv = self.conv[part].to(h.dtype)  # (k, C)
        k = len(conv)
        left = k - 1 if self.causal else k // 2
        first, *others = (x * w for x, w in zip(ops.neighbours(h, left, k, spans), conv))
        return h + sum(others, first)

    def before_mlp(self, x, cos, sin, rate, spans, ops):
        B, T, C = x.shape
        scale1 = shift1 = scale2 = shift2 = 0
        if self.adaln is not None:
            scale1, shift1, scale2, shift2 = self.adaln(rate).chunk(4, -1)
        if self.qkv is not None:
            h = self.norm(x, 0, scale1, shift1, spans, ops)
            qkv = self.qkv(h).view(B, T, 3, self.n_head, -1)
            y = ops.attention(qkv, cos, sin, True, self.causal, spans)  # (B, T, H, D)
            x = x + self.dropout(self.proj(y.reshape(B, T, C)))
        return x, self.norm(x, -1, scale2, shift2, spans, ops)  # the MLP reads this, and adds to x

    def mlp(self, x, h):
        return x + self.dropout(self.down(F.relu(self.up(h), inplace=True).square()))

    def forward(self, x, cos, sin, rate, spans, ops, rows=None):
        x, h = self.before_mlp(x, cos, sin, rate, spans, ops)
        if rows is not None:  # after the last block only these rows are read: (n, C)
            x, h = (z.flatten(0, 1).index_select(0, rows) for z in (x, h))
        return self.mlp(x, h)


class Model(nn.Module):
    """Ids of tokens and [MASK] in, logits of V tokens out: [MASK] is the embedding's last row only.

    An autoregressive model shifts its input by itself: its output at position i predicts token i.
    end_id: of [END], where lengths are known; else -1. As it is never masked it says where each
    document of a window ends, and none sees another one. With --prompt_column it ends a prompt.
    place: what happens to a block as soon as it is made (--shard: it is spread over the ranks).
    """

    def __init__(self, config, vocab_size, ops, end_id=-1, place=lambda module: module):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.vocab_size = vocab_size
        self.mask_id = vocab_size
        self.end_id = end_id
        self.pad_id = vocab_size  # what follows a short text: [MASK], as it is not known, or [END]
        # Each sees itself alone.
        self.documents = end_id >= 0 and config.objective == "mdlm" and not config.prompt_column
        if self.documents:
            self.pad_id = end_id
            # How many texts of each length there were: sample.py draws from them.
            self.register_buffer("length_counts", torch.zeros(config.block_size + 1))
        self.ops = ops
        self.embed = nn.Embedding(vocab_size + 1, C)
        attends = [i % config.attention_every == 0 for i in range(config.n_layer)][::-1]
        self.blocks = nn.ModuleList(place(Block(config, here)) for here in attends)
        self.head = None if config.tie else nn.Linear(C, vocab_size, bias=False)
        self.positions = None
        if config.pos == "learned":
            self.positions = nn.Parameter(torch.randn(config.block_size, C) / 10)
        self.rate = nn.Linear(C, C, bias=False) if config.time_conditioning else None
        self.n = n_blocks(config)
        D = C // config.n_head if config.pos == "rope" else C
        for name, table in zip(("cos", "sin"), rotary_tables(config.block_size, D)):
            self.register_buffer(name, table, persistent=False)
        if is_variant(config):
            self.register_buffer("weights", sequence_weights(config), persistent=False)
        # What writes into the residual stream starts at zero: blocks as the identity, loss at ln V.
        for name, p in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight", "head.weight", "adaln.weight")):
                nn.init.zeros_(p)
        if config.tie:
            nn.init.normal_(self.embed.weight, std=0.02)

    def learned(self, x0):
        """(B, T) bool: the tokens that are learned and scored: text, not [END] or what follows."""
        is_text = x0 != self.end_id
        if self.config.prompt_column:  # what follows the first [END], others too
            return F.pad(~is_text[:, :-1], (1, 0)).cumsum(1) > 0
        if self.config.objective == "ar":  # which learns where a text ends
            return is_text | F.pad(is_text[:, :-1], (1, 0), value=True)
        return is_text

    def features(self, xt, rows=None, x0=None, cache=None):
        """(B, T) ids -> what the head reads: (B, T, C), or (n, C) at rows of the flat batch.

        With --block_length: x0 (B, T) is the text that later blocks see (default: as xt shows it);
        or a kernels.cache.Cache has seen the text of earlier blocks, and xt is what follows.
        """
        T = xt.shape[1]
        C = self.config.n_embd
        ops = self.ops
        spans = None
        at = torch.arange(T, device=xt.device)
        if self.config.objective == "ar":  # [MASK] as the beginning, then x[0..T-2]
            xt = torch.cat((torch.full_like(xt[:, :1], self.mask_id), xt[:, :-1]), 1)
        if cache is not None:
            ops = cache
            cache.turn = 0
            at = at + cache.length
        elif self.n > 1:  # rows of 2T: what is predicted, and the text that later blocks see
            spans = block_spans(T, self.config.block_length, xt.device)
            xt = torch.cat((xt, xt if x0 is None else x0), 1)
            at = at.repeat(2)
            if rows is not None:
                rows = rows + rows // T * T
        x = F.rms_norm(self.embed(xt), (C,))
        cos = self.cos[at]
        sin = self.sin[at]
        if self.documents:
            spans = document_spans(xt == self.end_id)
            at = at - spans[:, 0]  # (B, T) from a document's start
        if self.config.pos != "rope":
            table = self.positions
            if table is None:
                table = torch.cat((self.sin, self.cos), -1)
            x = x + table[at]
            cos = sin = None
        rate = None
        if self.rate is not None:  # the share of masked tokens, a function of xt
            share = masked_share(xt == self.mask_id, xt != self.end_id, spans)
            waves = torch.cos(share * math.pi * torch.arange(C, device=xt.device))
            rate = F.silu(self.rate(waves))  # (B, 1, C), or (B, T, C) with documents
        if torch.is_autocast_enabled(x.device.type):  # the residual stream too: it is memory-bound
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.blocks[:-1]:
            x = block(x, cos, sin, rate, spans, ops)
        x = self.blocks[-1](x, cos, sin, rate, spans, ops, rows)
        if rows is None:
            x = x[:, :T]
        return F.rms_norm(x, (C,)).to(x.dtype)  # CUDA's autocast would leave float32

    def forward(self, xt, targets=None, rows=None, share=None, x0=None, cache=None):
        """(B, T) ids -> (B, T, V) float logits, or (n, V) at some rows (n,) of the flat batch. With
        their targets and shares (n,) of make_batch -> the loss, sum of share * cross-entropy."""
        h = self.features(xt, rows, x0, cache)
        W = self.embed.weight[:-1] if self.head is None else self.head.weight  # (V, C)
        if targets is None:
            return F.linear(h, W).float()
        return self.ops.linear_cross_entropy(h.flatten(0, -2), W, targets, share)


# ---- Masking and loss
#
# NELBO per token = the mean, over l uniform on {1..L} and random sets of l masked positions, of
# the mean cross-entropy there (Hoogeboom et al., 2110.02037, eq. 7; Ou et al., 2406.03736): an
# upper bound of -log p(x) / L.
def draw_levels(config, step, early=0.0, lengths=None):
    """(N,) how many tokens to mask in each sequence of a step's batch, over all ranks.

    Neighbours get l and T + 1 - l, so every batch masks exactly N (T + 1) / 2 tokens: static
    shapes. l is T / 2 while `early` is 1, in the first half of a run, and uniform on {1..T} at 0.
    Of shorter documents, with `lengths` (N,) in place of T, it masks fewer. With --block_length S
    it is (N * T / S,): each block is masked as a text of S tokens.
    """
    if config.objective == "ar":  # all are predicted
        return lengths
    n = n_blocks(config, step)
    u = numerics.stratified(n * config.batch_size // 2, "levels", config.seed, step)  # in [0, 1)
    if is_variant(config):
        return variant_levels(config, u)
    # The margin leaves out both ends, where few masked tokens give a noisy mean, few visible ones
    # say little: worth twice the steps (results/cpu.md). It ends at 0: then the loss is the bound.
    # Related: clipped rates (2503.09573), bell-shaped rates (2605.13026).
    margin = 0.0 if config.time_conditioning else config.rate_margin * early
    u = (margin + (1 - 2 * margin) * u).repeat_interleave(2)
    if lengths is None or n > 1:
        lengths = torch.full((n * config.batch_size,), config.block_size // n)
    count = 1 + (u * lengths).long().minimum(lengths - 1)
    count[1::2] = (lengths + 1 - count)[1::2]
    return count


def draw_batch(config, corpus, step, samples, early=0.0, first=None):
    """What Python draws for samples (B,), numbers in a step's global batch: windows (B, T), levels
    and weights (B,), the step and the samples, on the device. From here on it works alone."""
    # 1. Windows of text. Over a run, samples are numbered step * N, step * N + 1, ..., unless N was
    #    another one before a --resume: then `first` is the number of the step's first sample.
    if first is None:
        first = step * config.batch_size
    x0 = corpus.batch(first + samples)
    lengths = corpus.find(first + torch.arange(config.batch_size))[2]
    levels = draw_levels(config, step, early, lengths)
    weights = (lengths / corpus.mean_length).float()  # a sequence counts by its length
    levels = levels.view(config.batch_size, -1)[samples].flatten()  # (B,), or of all blocks
    drawn = (levels, weights[samples], torch.tensor(step), samples)
    return x0, *(to_device(x, x0.device) for x in drawn)


def make_batch(model, x0, levels, weights, step, samples):
    """The arguments of Model.forward for what draw_batch drew."""
    config = model.config
    B, T = x0.shape
    if config.objective == "ar":  # all tokens count alike
        share = model.learned(x0) * (weights / (levels * B))[:, None]
        return x0, x0.flatten(), None, share.flatten()
    # 2. Mask exactly l tokens of each.
    fixed = None
    if model.end_id >= 0:
        fixed = ~model.learned(x0)
    xt, count, rows, n_rows = mask_blocks(model, x0, levels, config.seed, step, samples, fixed)
    # 3. Say where the masked tokens are, what they were, and how much each counts: the loss is the
    #    mean over sequences of the mean cross-entropy over their masked tokens, so 1 / (B l).
    if is_variant(config):
        share = model.weights[count] / (count.clamp(min=1) * B)  # (B,)
        return take_rows(xt, x0, share, rows, n_rows)
    S = T // model.n
    rows = rows[: B * model.n * (S + 1) // 2]  # those of the flat batch that are masked
    share = weights.repeat_interleave(model.n) / (count * len(count))  # (B,), or of all blocks
    if fixed is not None:
        return take_rows(xt, x0, share, rows, n_rows)
    return xt, x0.flatten()[rows], rows, share[rows // S], x0


def mask_blocks(model, x0, levels, seed, step, samples, fixed=None):
    """mask_tokens for x0 (B, T) by the level of each block; a text is a single one by default."""
    samples = samples[:, None] * model.n + torch.arange(model.n, device=samples.device)
    key = (model.mask_id, seed, step, samples.flatten())
    xt, *found = model.ops.mask_tokens(x0.view(len(levels), -1), levels, *key, fixed)
    return xt.view(x0.shape), *found


def take_rows(xt, x0, share, rows, n_rows):
    """The arguments of Model.forward where the number of masked tokens is not known before."""
    if x0.device.type == "cpu":
        rows = rows[: int(n_rows)]
    # Python does not wait for a GPU to know n_rows: the padding of rows, -1, stays, with share 0.
    share = torch.where(rows < 0, 0, share[rows // x0.shape[1]])
    rows = torch.where(rows < 0, torch.arange(len(rows), device=rows.device), rows)
    return xt, x0.flatten()[rows], rows, share


def draw_parts(run, step, early):
    """What Python draws of a step, for each of this rank's micro-batches when its turn comes."""
    parts = run.config.gradient_accumulation_steps
    for part in range(parts):
        samples = torch.arange(run.micro_batch) + (run.rank * parts + part) * run.micro_batch
        runtime.seed_device(run.device, "dropout", run.config.seed, step, run.rank, part)
        first = run.sequences(step)
        yield draw_batch(run.config, run.corpus, step, samples, early, first)


def compute_gradients(run, drawn):
    """Accumulate the gradients of the micro-batches of draw_parts; returns their loss."""
    parts = run.config.gradient_accumulation_steps
    loss = 0
    for part, inputs in enumerate(drawn):
        run.model.n = len(inputs[1]) // len(inputs[0])  # levels of a window: --whole may be 1
        shards.exchange_gradients(run.network, part == parts - 1)  # once a step
        with run.autocast():
            part_loss = run.network(*make_batch(run.model, *inputs)) / parts
        part_loss.backward()
        loss = loss + part_loss.detach()
    run.model.n = n_blocks(run.config)
    return loss


# Variants, to compare with. The bound stays if a count has probability P(l) > 0 for every l and its
# sequence weighs 1 / (L P(l)). A clipped range (BERT: 15 %) and uniform weights give no bound.
def is_bound(config):
    return config.loss_weight == "bound" and config.min_rate == 0 and config.max_rate == 1


def is_variant(config):
    return (config.masking, config.mask_schedule) != ("exact", "linear") or not is_bound(config)


def variant_levels(config, u):
    """(N/2,) u in [0, 1) -> (N,) mask rates t if bernoulli, else counts 1 + floor(t L)."""
    L = config.block_size
    t = SCHEDULES[config.mask_schedule](torch.stack((u, 1 - u), 1).flatten())
    t = config.min_rate + (config.max_rate - config.min_rate) * t
    return t if config.masking == "bernoulli" else 1 + (t * L).long().clamp(max=L - 1)


def count_probabilities(config):
    """P(l) of masking l of L tokens, (L+1,) float64, for rates from 0 to 1."""
    L = config.block_size
    count = torch.arange(L + 1, dtype=torch.float64)
    schedule = SCHEDULES[config.mask_schedule]
    if config.masking == "exact":  # u the inverse of the schedule: P(l) = |u(l/L) - u((l-1)/L)|
        u = numerics.invert(schedule, count / L)
        return u.diff(prepend=u[:1]).abs()
    if config.mask_schedule == "linear":  # then E[1/t | l] = (L + 1) / l, the textbook weight
        return torch.full_like(count, 1 / (L + 1))
    return numerics.binomial_mixture(L, schedule)


def sequence_weights(config):
    """(L+1,) float32, made in float64: the weight of a sequence with l masked tokens."""
    L = config.block_size
    count = torch.arange(L + 1, dtype=torch.float64)
    weight = torch.ones_like(count)  # a clipped range: the plain mean
    if config.loss_weight == "uniform":  # the sum of CE over its expected number of terms
        grid = (torch.arange(1 << 13, dtype=torch.float64) + 0.5) / (1 << 14)
        terms = variant_levels(config, grid).double().mean()
        weight = count / (terms * L if config.masking == "bernoulli" else terms)
    elif is_bound(config):
        weight = 1 / (L * count_probabilities(config))
    weight[0] = 0  # nothing is masked, so there is nothing to predict
    return weight.float()


# ---- Sampling: the textbook reverse process; sample.py has the good sampler
@torch.no_grad()
def generate(model, x, steps=64, generator=None):
    """Fill the [MASK] positions of x (B, T) in `steps` network calls, or fewer; returns (B, T).

    Going from time s / steps to (s - 1) / steps, each masked position is revealed with probability
    1 / s, and drawn from the model (Sahoo et al., 2406.07524, eq. 7). With --block_length blocks
    do so in turn, each in at least a call; of an autoregressive model each token is a block.
    """
    steps = check_reversing(model, x, steps, generator)
    x = x.clone()
    T = x.shape[1]
    S = 1 if model.config.objective == "ar" else min(model.config.block_length or T, T) or 1
    if S == 1:
        steps = T
    for begin in range(0, T, S):
        for s in range(max(1, steps * S // T), 0, -1):
            reveal = (torch.rand(x.shape, generator=generator) < 1 / s).to(x.device)
            reveal &= x == model.mask_id
            reveal[:, :begin] = reveal[:, begin + S :] = False
            if reveal.any():
                p = model(x)[reveal].softmax(-1).cpu()  # (n, V)
                x[reveal] = torch.multinomial(p, 1, generator=generator)[:, 0].to(x.device)
    return x


# ---- Evaluation
LOGITS = 1 << 27  # are made at a time, at most: 512 MiB in float32


def score_rows(model, xt, x0, rows, observe=None):
    """Cross-entropy (n,) and whether the likeliest token is right, (n,), at rows of a flat batch.

    A window with more than LOGITS logits goes through the network several times.
    """
    T = x0.shape[1]
    scores = []
    for some in rows.tensor_split(math.ceil(T * model.vocab_size / LOGITS)):
        logits = model(xt, rows=some, x0=x0)  # (n, V)
        targets = x0.flatten()[some]
        if observe:
            observe(some, targets, logits)
        ce = F.cross_entropy(logits, targets, reduction="none")
        scores.append((ce, logits.argmax(-1) == targets))
    return map(torch.cat, zip(*scores))


@torch.no_grad()
def evaluate(
    model, windows, passes=1, seed=0, batch_size=64, observe=None, deadline=math.inf, scored=None
):
    """Likelihood of validation windows (W, T), nats per token. Deterministic; ranks share the work.

    Masked diffusion: `nelbo`, the mean over windows and passes of the mean CE over masked tokens
    (an upper bound of the NLL), and its standard error `se`. Autoregressive: `nll` over all T
    tokens, its `se`, and `ar_shifted`, without the first token of a window. `by_window`: one mean
    each; `ce` and `accuracy` (top-1): by tenths of the mask rate. observe(rows, targets, logits)
    sees each batch: the scored rows (n,) of the flat batch, their tokens (n,), logits (n, V). Each
    takes windows from everywhere; none but the first begins after the deadline (time.monotonic()).
    scored (W, T) bool: these tokens alone, the others are given (default: model.learned(windows)).
    """
    given = (passes, seed, batch_size, observe, deadline, scored)
    passes, seed, batch_size = check_evaluation(model, windows, *given)
    W, T = windows.shape
    batch_size = max(1, min(batch_size, LOGITS // (T * model.vocab_size)))
    device = windows.device
    causal = model.config.objective == "ar"
    if scored is None:
        scored = model.learned(windows)
    length = scored.sum(1).cpu()  # (W,)
    n = model.n
    count = length[None, :, None]  # (passes, W, n): of each block
    if not causal:
        count = numerics.stratified_counts(length, passes, seed, n)
    sums = torch.zeros(4, *count.shape, dtype=torch.float64)
    ce, hit, first, done = sums  # views
    batches = math.ceil(W / batch_size)
    was_training = model.training
    model.eval()
    for i in runtime.share(range(batches)):
        at = torch.arange(i, W, batches)
        for k in range(len(count)):
            xt = x0 = windows[at.to(device)]
            masked = count[k, at].flatten().to(device)  # (B * n,) how many tokens to score
            these = scored[at.to(device)].view(len(masked), -1)  # by block
            rows = these.flatten().nonzero()[:, 0]
            if not causal:
                key = (seed ^ 0x5EED, k, at.to(device))  # other masks than in training
                xt, _, rows, n_rows = mask_blocks(model, x0, masked, *key, ~these)
                rows = rows[: int(n_rows)]
            each, right = score_rows(model, xt, x0, rows, observe)
            block = rows // (T // n)
            ce[k, at] = numerics.means_of(each, block, masked).view(-1, n)
            hit[k, at] = numerics.means_of(right, block, masked).view(-1, n)
            if causal:
                begins = rows % T == 0
                first[k, at[these[:, 0].cpu()], 0] = each[begins].cpu().double()
        done[:, at] = 1
        if runtime.is_late(deadline):
            break
    model.train(was_training)
    return numerics.summary(all_reduce(sums), count, length, causal, scored[:, 0].cpu().long())


# ---- Load (support/runs.py saves; support/checkpoint.py keeps checkpoints intact)
def select_kernels(name, device, config, dtype=torch.float32):
    """The ops for --kernels: the one place where a ValueError becomes a UserError."""
    shape = (config.n_embd // config.n_head, dtype, config.objective == "ar", config.block_size)
    try:
        return kernels.select(name, device, *shape)
    except ValueError as e:
        raise UserError(str(e)) from e


def load(path="out", device="cpu", kernel="auto", whole=False):
    """(model, tokenizer, config) of a checkpoint or a run (its latest one), ready to predict.

    Weights are float32: the averaged ones, with --ema. kernel: auto, triton or torch. whole: to
    fill gaps, a model of blocks that learned it (--whole) becomes one without. Raises UserError, a
    ValueError, for anything but an intact checkpoint; nothing is unpickled.
    """
    whole = truth("whole", whole)
    device = runtime.pick_device(str(device))
    return checkpoint.read_newest(path, lambda folder: load_from(folder, device, kernel, whole))[1]


def load_from(folder, device, kernel, whole):
    """`load` for the folder of an intact checkpoint."""
    config = checkpoint.read_config(Config, folder / "config.json", runs.check)
    if whole and config.whole:
        config.block_length = 0
    tokenizer = tokenizer_from_json(folder / "tokenizer.json")
    checkpoint.check_size(folder, config, tokenizer.vocab_size)  # before memory is taken for it
    ops = select_kernels(kernel, device, config)
    end_id = sources.given_end(config, tokenizer, is_variant)
    model = Model(config, tokenizer.vocab_size, ops, end_id)
    model.load_state_dict(checkpoint.read_tensors(folder / "model.safetensors", model.state_dict()))
    model.register_forward_pre_hook(check_input, with_kwargs=True)
    return model.to(device).eval(), tokenizer, config


# ---- Training
def make_run(config, corpus, device, dtype, ops, rank=0, world=1):
    """A Run with fresh weights, not compiled."""
    end_id = sources.given_end(config, corpus.tokenizer, is_variant)
    place = shards.make_place(config.shard, device, dtype, world)

    def build():
        torch.manual_seed(config.seed)
        model = place(Model(config, corpus.tokenizer.vocab_size, ops, end_id, place))
        if model.documents:
            model.length_counts.copy_(corpus.length_counts)
        return model

    model = build()
    averaged = build().eval() if config.ema else model
    optimizers = make_optimizers(model, config, device)
    return Run(config, corpus, model, averaged, optimizers, device, dtype, model, rank, world)


def lr_scale(config, step, progress):
    """Linear warm-up by steps, then decay by progress in [0, 1]."""
    decay = {
        "trapezoid": min(1.0, 2 * (1 - progress)),
        "linear": 1 - progress,
        "constant": 1.0,
        "cosine": 0.5 + 0.5 * math.cos(math.pi * progress),
    }
    return min(1.0, (step + 1) / (config.warmup_steps + 1)) * decay[config.lr_schedule]


def train_step(run, step, progress):
    """One optimizer step; its loss and gradient norm go to run.pending."""
    set_rates(run, step, lr_scale(run.config, step, progress))
    loss = compute_gradients(run, draw_parts(run, step, early=min(1.0, 2 * (1 - progress))))
    norm = runtime.clip_gradients(list(run.model.parameters()), run.config.grad_clip)
    run.pending[step] = torch.stack((loss, norm))
    if not runtime.is_async(run.device):
        runs.check_finite(run)  # before the update; a GPU's numbers are read before they are saved
    update(run)


def report(run, is_last=False):
    """Evaluate the averaged weights, log the result and show samples."""
    runs.check_finite(run)
    # Eager: compile nothing for these shapes.
    with pace.counted(run), torch.compiler.set_stance("force_eager"):
        r, raw, calls = pace.score(run, evaluate, is_last)
        if is_last and runtime.is_late(math.inf):
            return  # cut short by a signal: --resume evaluates again
        run.log.evaluation(run, r, raw, is_last)
        if (run.rank == 0 or run.config.shard) and run.step and calls:
            run.log.samples(run, generate, calls)


def setup(given, start):
    """Everything before the loop: the Run of the given flags."""
    rank, world, local_rank = runtime.join_ranks(given)
    config, folder, changed = runs.open_run(given, Config, new_config, world, RESUMABLE)
    device = runtime.on_all_ranks(lambda: runtime.use_device(config.device, local_rank, world))
    dtype = runtime.pick_dtype(config.dtype, device)
    ops = runtime.on_all_ranks(lambda: select_kernels(config.kernels, device, config, dtype))
    log = Log(config, start, silent=rank > 0)
    source = None
    if config.init_from and not folder:
        source = runtime.on_all_ranks(lambda: load(config.init_from))
    log.say("reading the data")
    corpus = runs.open_data(config, folder, device, prepare, Corpus, source)
    run = make_run(config, corpus, device, dtype, ops, rank, world)
    run.log = log
    run.changed = changed
    run.windows = corpus.windows(config.eval_windows)
    runs.load_weights(run, source)

    def gradients():  # of a step: to time it, to compile
        return compute_gradients(run, draw_parts(run, 0, 0.0))

    compiled = compiling.should_compile(run, can_compile(device), gradients)
    log.describe(run, folder, compiled, is_bound(config))
    compiling.compile_network(run, compiled, gradients)
    runs.begin(run, folder)
    if not folder:
        report(run)
    return run


def train(given, start):
    """Train with the given flags, a dict of Config fields; returns the exit code."""
    run = setup(given, start)
    config = run.config
    interrupt = runtime.Interrupt()  # installed late: before the first step Ctrl-C may simply exit
    with run.log.progress(run) as show_progress:
        while True:
            compiling.use_compiled(run)
            stop = pace.poll(run, interrupt)
            show_progress()
            if stop or run.progress >= 1:
                break
            train_step(run, run.step, run.progress)
            run.step += 1
            # Once in a while: a record in the log; an evaluation; a checkpoint.
            if run.step % config.log_interval == 0:
                runs.check_finite(run)
                scale = lr_scale(config, run.step - 1, run.progress)
                run.log.training(run, scale, runtime.flops_per_token(run.model))
            if pace.must_evaluate(run):
                report(run)
                runs.save(run)
            elif run.save_is_due:
                runs.save(run)
    stop = finish(run, stop, interrupt)
    runtime.leave_ranks()
    return stop and 128 + stop  # as a shell reports the signal


def finish(run, stop, interrupt):
    """The end: an evaluation and a save of the same step; an interrupted run is only saved.

    Returns the signal that interrupted it, or 0: in the evaluation too, as that may take long.
    """
    if not (stop or (run.finished and run.saved == run.step)):
        pace.check_steps(run)
        with runtime.stopped_by(interrupt):
            report(run, is_last=True)
            stop = pace.poll(run, interrupt)
    if stop:
        if run.saved != run.step:
            runs.save(run)
        run.log.stopped(run)
    elif run.finished and run.saved == run.step:
        run.log.ended(run)
    else:
        runs.save(run, finished=True)
        if run.rank == 0:
            plots.try_to_draw(plots.plot_losses, run.log.path.with_name("loss.png"))
        run.log.done(run)
    return stop


def main(argv):
    return train(parse_args(argv), PROCESS_START)


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:], checkpoint.release))
