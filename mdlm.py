"""Train a masked diffusion language model: data, model, loss, sampling, evaluation, training loop.

    python mdlm.py                                   # tiny Shakespeare
    python mdlm.py --data=my.txt --time_limit=300    # any text, five minutes
    torchrun --standalone --nproc_per_node=8 mdlm.py --preset=gpt2 --data=FOLDER

The model sees a text in which some tokens, at any rate from 0 to 1, are replaced by [MASK], and
predicts them. Its mean loss is an upper bound on -log p(text), the NELBO (Sahoo et al., 2406.07524;
Shi et al., 2406.04329; Ou et al., 2406.03736). Read this file from top to bottom; code that is not
about diffusion is in support/. sample.py has a better sampler.
"""

from nanomdlm.support.cli import entry

PROCESS_START = entry.start(__name__)  # a run's seconds include the imports below

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanomdlm import variants
from nanomdlm.kernels.embedding import Embedding
from nanomdlm.kernels.reference import rotary_tables  # kernels/reference.py
from nanomdlm.support.cli import devices
from nanomdlm.support.cli.networks import NetworkSettings, open_network
from nanomdlm.support.cli.python_arguments import check_evaluation, check_reversing, to_view
from nanomdlm.support.cli.settings import (
    NO_LIMIT,
    Amount,
    BelowOne,
    Count,
    Natural,
    Reads,
    Seed,
    Shard,
    UpToHalf,
    Writes,
)
from nanomdlm.support.data.sources import SourceSettings
from nanomdlm.support.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_of
from nanomdlm.support.infill import ensemble
from nanomdlm.support.infill.recorded import Recorded
from nanomdlm.support.numerics import Dropout, checked, generator, seed_device, stratified
from nanomdlm.support.run import checkpoint, compiling, ranks, shards
from nanomdlm.support.run import config as run_config
from nanomdlm.support.run.checkpoint import save as save  # for callers: mdlm.save
from nanomdlm.support.run.evaluation import add_up, eval_mode, judged, stratified_counts, summary
from nanomdlm.support.run.log import to_preview
from nanomdlm.support.run.optimizers import clip, make_optimizers, set_rates, update
from nanomdlm.support.run.run import Engine, Run
from nanomdlm.support.run.session import open_session
from nanomdlm.support.view import Batch, View, masked_rows


# ---- Settings, one per line; the command line, --help and config.json all come from them
@dataclasses.dataclass
class Core:
    """The settings of a plain run."""

    # The run
    data: Reads = "shakespeare"  # text, .jsonl, .parquet, folder; or shakespeare, pydoc, patterns
    out_dir: Writes = "out"  # folder for checkpoints, log.jsonl and loss.png
    resume: bool | Literal["auto"] = False  # continue the run in out_dir; auto: if there is one
    overwrite: bool = False  # replace the run in out_dir by a new one
    init_from: Reads = ""  # fine-tune this run, checkpoint, or Hugging Face model (folder or name)
    preset: Literal["auto", "cpu", "gpu", "gpt2"] = "auto"  # size of the model, length of the run
    max_steps: Count = 5000  # stop after this many optimizer steps
    time_limit: Amount = 0.0  # stop after this many seconds in total (0: no limit)
    seed: Seed = 0  # random seed of initial weights, data order, masks and dropout
    # The machine
    device: str = "auto"  # cpu, cuda, cuda:1 or mps; auto: a GPU if there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 if supported
    kernels: Literal["auto", "triton", "torch"] = "auto"  # auto: Triton on CUDA, else PyTorch
    compile: Literal["auto", "on", "off"] = "auto"  # auto: on a GPU, and for runs of 120 s or more
    gradient_accumulation_steps: Count = 1  # micro-batches per step and rank, to save memory
    recompute: bool = False  # recompute layers in the backward pass: less memory, a third slower
    shard: Shard = 0  # FSDP over groups of this many ranks (bare flag or -1: all ranks)
    # Tokens
    tokenizer: Reads = "char"  # char, byte, word, bpe, or the path of a tokenizer.json
    vocab_size: Natural = 0  # for word and bpe (0: 16384), or of .bin files (0: the largest id + 1)
    # Model
    n_layer: Count = 6  # layers
    n_head: Count = 6  # attention heads per layer
    n_embd: Count = 384  # width, a multiple of 2 n_head
    block_size: Count = 256  # context: tokens that the model sees at once
    dropout: BelowOne = 0.2  # dropout rate
    attention_every: Count = 1  # only every k-th layer has attention; the last one always does
    conv: Natural = 5  # width of the convolution before attention and MLP
    pos: Literal["rope", "learned", "sinusoidal"] = "rope"  # positional encoding
    tie: bool = False  # share weights between the token embedding and the output layer
    # Training
    objective: Literal["mdlm", "ar"] = "mdlm"  # masked diffusion; ar: autoregressive, to compare
    batch_size: Count = 64  # global batch size, in sequences
    rate_margin: UpToHalf = 0.5  # m: first half of the run uses mask rates in [m, 1-m], then widen
    optimizer: Literal["muon", "adamw"] = "muon"  # muon: for matrices, with AdamW for the rest
    muon_lr: Amount = 0.02  # peak learning rate of Muon
    learning_rate: Amount = 3e-3  # peak learning rate of AdamW
    lr_schedule: Literal["trapezoid", "cosine", "linear", "constant"] = "trapezoid"  # decay shape
    warmup_steps: Natural = 100  # steps over which the learning rate rises to its peak
    weight_decay: Amount = 0.01  # decoupled weight decay; with muon, only on the matrices
    grad_clip: Amount = 1.0  # maximum gradient norm (0: no clipping)
    ema: BelowOne = 0.999  # decay of the averaged weights, which are evaluated and saved (0: off)
    # Evaluation and logging
    eval_interval: Natural = 0  # steps between evaluations (0: about ten per run)
    eval_windows: Natural = 4096  # validation windows in the final evaluation (0: all)
    log_interval: Count = 20  # steps between records in log.jsonl
    tracker: Literal["none", "wandb", "tensorboard"] = "none"  # also send the log's numbers here


# What a preset changes (cpu: measured in results/cpu.md). CPUs differ in speed by a factor of ten,
# so a run on one ends after five minutes, unless --max_steps is given. A given flag always wins.
PRESETS = {
    "cpu": dict(n_layer=4, n_head=3, n_embd=192, block_size=256, dropout=0.0, batch_size=16)
    | dict(warmup_steps=50, learning_rate=0.01, attention_every=4)
    | dict(max_steps=NO_LIMIT, time_limit=300.0),
    "gpu": dict(),
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, dropout=0.0, batch_size=512)
    | dict(warmup_steps=500, max_steps=20000, gradient_accumulation_steps=8, tie=True)
    | dict(tokenizer="bpe", vocab_size=50257, eval_windows=1024),
}


@dataclasses.dataclass
class Config(Core, *variants.SETTINGS, SourceSettings, NetworkSettings):
    """All settings: those of a plain run, of variants (each in its file in variants/: documents,
    prompts, blocks, mask rates, time conditioning), of data sources and of pretrained networks."""

    presets: ClassVar[dict] = PRESETS

    def check(self, world=1):
        """Raise UserError for settings that do not fit together or do not work on `world` ranks."""
        run_config.check(self, world)
        variants.check(self)


# ---- Data: windows of a text (support/data turns any source into a folder of ids)
@functools.lru_cache(maxsize=2)  # a batch may begin in one epoch and end in the next
def shuffle(W, n_offsets, seed, epoch):
    """The order (W,) of an epoch's windows, and their shift in tokens: below n_offsets."""
    g = generator("epoch", seed, epoch)
    offset = torch.randint(n_offsets, (1,), generator=g).item() if n_offsets else 0
    return torch.randperm(W, generator=g), offset


class Corpus:
    """Windows of T tokens of a text. (For documents: variants/documents.py.)

    An epoch cuts the training text into windows, shifted by a random offset of up to T - 1 tokens,
    and shuffles them: each token is seen once, except for a few at both ends.
    """

    has_documents = False
    chars_per_token = None  # in the validation text; None: unknown

    def __init__(self, ids, config, device):
        self.T = config.block_size
        self.seed = config.seed
        self.device = device
        self.tokenizer = ids.tokenizer
        self.identity = ids.identity  # what --resume compares with
        self.entropy = ids.meta.get("entropy")  # exact, known for --data=patterns only
        self.ids = dict(zip(("train", "val"), devices.to_tensors(ids.arrays, device)))
        self.cut(ids, config)

    def cut(self, ids, config):
        """Count the windows and the possible shifts of an epoch."""
        train, val = map(len, ids.arrays)
        self.n_validation = val // self.T
        self.W = train // self.T
        self.n_offsets = 0
        if not ids.meta.get("aligned"):  # --data=patterns: a window is a pattern, never shifted
            self.W = max(1, self.W - 1)  # room for the offset
            self.n_offsets = min(self.T, train - self.W * self.T + 1)
        self.mean_size = float(self.T)  # tokens of text in a window, on average (documents: fewer)
        self.mean_length = float(self.T)  # how many of these are to be predicted
        if ids.meta.get("characters"):
            self.chars_per_token = ids.meta["characters"][1] / val

    def take(self, part, windows, offset):
        """Numbers (B,) of windows of "train" or "val" -> their tokens (B, T) int64 on the device,
        and how many of each are to be predicted (B,)."""
        ids = self.ids[part]
        starts = devices.to_device(windows * self.T + offset, ids.device)[:, None]  # (B, 1)
        x = ids[starts + torch.arange(self.T, device=ids.device)].long()
        return devices.to_device(x, self.device), torch.full((len(x),), self.T)

    def batch(self, sequences):
        """`take` for sequences (B,), numbered from the start of the run: an epoch has W of them."""
        epochs = sequences // self.W
        window = torch.zeros_like(sequences)
        offset = torch.zeros_like(sequences)
        for epoch in epochs.unique().tolist():
            here = epochs == epoch
            order, offset[here] = shuffle(self.W, self.n_offsets, self.seed, epoch)
            window[here] = order[sequences[here] % self.W]
        return self.take("train", window, offset)

    def windows(self, limit=0):
        """Validation windows (n, T), evenly spread, without overlap; at most `limit` (0: all)."""
        W = self.n_validation
        n = min(limit or W, W)
        return self.take("val", torch.arange(n) * W // n, 0)[0]


# ---- Model: a pre-norm bidirectional transformer
#
# Its input is a View (support/view.py): `ids` of tokens; `at`, their positions; `rows`, where to
# predict; and for variants `causal`, `sees` (the span to which each position attends; None: all),
# and `cache` (keys and values of earlier blocks). `ops` are the kernels, Triton's or PyTorch's.
class Layer(nn.Module):
    def __init__(self, config, attends=True):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.dropout = Dropout(config.dropout) if config.dropout else nn.Identity()
        self.qkv = nn.Linear(C, 3 * C, bias=False) if attends else None
        self.proj = nn.Linear(C, C, bias=False) if attends else None
        self.up = nn.Linear(C, 4 * C, bias=False)
        self.down = nn.Linear(4 * C, C, bias=False)
        n_conv = 2 if attends else 1  # before attention and before the MLP
        self.conv = nn.Parameter(torch.zeros(n_conv, config.conv, C)) if config.conv else None

    @property
    def conv_attention(self):  # (k, C) taps of the convolution before attention
        return None if self.conv is None else self.conv[0]

    @property
    def conv_mlp(self):  # (k, C) taps of the convolution before the MLP
        return None if self.conv is None else self.conv[-1]

    # RMSNorm, plus a depthwise convolution of it (zero at first). It mixes neighbors in layers
    # without attention, too.
    def norm_attention(self, x, view, ops):
        return ops.norm_conv(x, self.conv_attention, view.causal, view.sees)

    def norm_mlp(self, x, view, ops):
        return ops.norm_conv(x, self.conv_mlp, view.causal, view.sees)

    def before_mlp(self, x, cos, sin, view, ops):
        """Attention; returns the residual stream and the input of the MLP. A separate method, so
        that attention and MLP can be compiled separately (support/run/compiling.py)."""
        B, T, C = x.shape
        if self.qkv is not None:
            h = self.norm_attention(x, view, ops)
            qkv = self.qkv(h).view(B, T, 3, self.n_head, -1)
            # q and k are normalized and rotated by their positions; then softmax(q k^T / sqrt(D)) v
            spans = dict(causal=view.causal, spans=view.sees)
            y = ops.attention(qkv, cos, sin, qk_norm=True, **spans)  # (B, T, H, D)
            x = x + self.dropout(self.proj(y.reshape(B, T, C)))
        return x, self.norm_mlp(x, view, ops)

    def mlp(self, x, h):
        return x + self.dropout(self.down(F.relu(self.up(h), inplace=True).square()))

    def forward(self, x, cos, sin, view, ops, rows=None):
        """rows: flat positions, of any shape, at which the last layer's output is needed."""
        x, h = self.before_mlp(x, cos, sin, view, ops)
        if rows is not None:
            x, h = (z.flatten(0, 1).index_select(0, rows.flatten()) for z in (x, h))
            x, h = (z.view(*rows.shape, z.shape[-1]) for z in (x, h))  # (*rows.shape, C)
        return self.mlp(x, h)


class Model(nn.Module):
    """A View of tokens and [MASK] -> logits of V tokens; [MASK] is the last row of `embed`."""

    Layer = Layer

    def __init__(self, config, vocab_size, ops, shard_fn=lambda module: module):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.vocab_size = vocab_size
        self.mask_id = vocab_size
        self.ops = ops
        self.embed = Embedding(vocab_size + 1, C)
        # Which layers attend: every k-th, counted back from the last.
        attends = [i % config.attention_every == 0 for i in range(config.n_layer)][::-1]
        self.layers = nn.ModuleList(shard_fn(self.Layer(config, attend)) for attend in attends)
        self.head = None if config.tie else nn.Linear(C, vocab_size, bias=False)
        tables = rotary_tables(config.block_size, C // config.n_head)
        for name, table in zip(("cos", "sin"), tables):
            self.register_buffer(name, table, persistent=False)
        self.initialize()

    def initialize(self):
        # These start at zero: layers are the identity, and the loss is ln V (about that, if tied).
        for name, p in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight", "head.weight")):
                nn.init.zeros_(p)
        if self.config.tie:
            nn.init.normal_(self.embed.weight, std=0.02)

    def inputs(self, view):
        """Vectors of the tokens (B, N, C), and RoPE's tables (..., D / 2) of their positions.
        (variants/positions.py has others.)"""
        x = F.rms_norm(self.embed(view.ids), (self.config.n_embd,))
        return x, self.cos[view.at], self.sin[view.at]

    def features(self, view):
        """What the head reads: (B, N, C), or (*rows.shape, C) at view.rows of the flat batch."""
        x, cos, sin = self.inputs(view)
        if torch.is_autocast_enabled(x.device.type):  # the residual stream too: it is memory-bound
            x = x.to(torch.get_autocast_dtype(x.device.type))
        # A sampler's KV cache replaces the ops: it computes attention and convolution itself.
        ops = view.cache or self.ops
        for layer in self.layers[:-1]:
            x = layer(x, cos, sin, view, ops)
        x = self.layers[-1](x, cos, sin, view, ops, rows=view.rows)
        return F.rms_norm(x, x.shape[-1:]).to(x.dtype)  # CUDA's autocast would leave float32

    def forward(self, view, targets=None, weights=None):
        """Logits, float32: (n, V) at view.rows, or (B, N, V). With targets (n,) and their weights
        (n,), the loss: the sum of weight * cross-entropy."""
        h = self.features(view)
        W = self.embed.weight[:-1] if self.head is None else self.head.weight  # (V, C)
        if targets is None:
            return F.linear(h, W).float()
        return self.ops.linear_cross_entropy(h.flatten(0, -2), W, targets, weights)


# ---- Objective: what the network is shown, and which tokens count how much
#
# NELBO per token = the mean, over l uniform on {1..T} and random sets of l masked positions, of
# the mean cross-entropy there (Hoogeboom et al., 2110.02037, eq. 7; Ou et al., 2406.03736). Why it
# bounds -log p(x) / T from above: the model may write the tokens one by one in any order; p(x) is
# the mean over orders, and -log of a mean is at most the mean of -log (Jensen). In a random order,
# when l tokens are still masked, each of them is equally likely to be written next: hence the mean
# over masked positions. MDLM and MD4 mask each token with probability t and weigh its loss by 1/t.
# Their integral over t is the same number: l is uniform on {0..T}, t given l is Beta(l + 1, T - l
# + 1), so E[1/t | l] = (T + 1) / l, and l = 0 adds nothing. Drawing l has less variance.
class MaskedDiffusion:
    """The default: mask l tokens of a text, predict them, average. A variant that wraps it is a
    file in variants/, listed in VARIANTS (variants/__init__.py).

    T: tokens in a text, which is a window of the corpus (in variants, or a block of one).
    batch_size: texts in a step's batch, over all ranks. samples (B,): their numbers in that batch.
    """

    metric = "nelbo"  # what `evaluate` estimates; "nll": exact, each token given those before it
    n_texts = 1  # texts per window, each masked separately; in variants, the blocks of a window
    end_id = -1  # the id of [END] if it is never predicted, because lengths are given; else -1
    steps_are_alike = True  # whether steps differ only in values: then CUDA graphs can replay them

    def __init__(self, config, mask_id):
        self.config = config
        self.seed = config.seed
        self.mask_id = mask_id
        # What pads a sampler's window: [MASK], because later text is unknown; or [END], if the
        # length of a text is known before it is written.
        self.pad_id = mask_id
        self.T = config.block_size
        self.batch_size = config.batch_size
        self.rate_margin = variants.rate_margin(config)  # 0 for variants with rates of their own

    def mask_counts(self, step, margin_scale, samples, lengths):
        """(B,) the number l of tokens to mask in texts with `lengths` (B,) tokens to predict (T).

        margin_scale: factor on --rate_margin. The margin is the share of the mask rates that is
        left out at each end: with 0.5, as in the first half of a run, l is T / 2 or T / 2 + 1; with
        0, it is uniform on {1..T}.

        Neighbors get l and T + 1 - l, so B texts mask exactly B (T + 1) / 2 tokens, and shapes are
        static. (Micro-batches begin with an even sample. Variants with shorter texts mask fewer,
        and have their own `batch`.)
        """
        # A fraction u of the text for each pair of neighbors: one from each of batch_size / 2 equal
        # ranges, in random order.
        u = stratified(self.batch_size // 2, "levels", self.seed, step)  # in [0, 1)
        # Both ends are left out at first: the mean over few masked tokens is noisy, and few visible
        # ones carry little information. That saves half of the steps (results/cpu.md). The margin
        # ends at 0: then the loss is the bound. Related: 2503.09573 (clipped), 2605.13026 (bell).
        margin = self.rate_margin * margin_scale
        u = (margin + (1 - 2 * margin) * u).repeat_interleave(2)[samples]
        count = 1 + (u * lengths).long().minimum(lengths - 1)  # the minimum: u * T may round up
        count[1::2] = (lengths + 1 - count)[1::2]  # both of a pair have the same u: mirror one
        return count

    def view(self, xt, x0=None, rows=None):
        """The network's input for xt (B, T), tokens and [MASK]; each position sees all others.

        x0 (B, T): the text without masks, which variants/blocks.py shows too. rows: where to
        predict.
        """
        return View(xt, torch.arange(xt.shape[1], device=xt.device), rows=rows)

    def batch(self, ops, x0, counts, step, samples, seed=None, scored=None):
        """The Batch to predict for texts x0 (B, T). counts (B,): l, how many tokens to mask.

        The masks depend only on (seed, step, sample). Only evaluations pass a seed, for masks
        that are the same in all runs, and scored (B, T) bool: only these tokens are masked.
        """
        B, T = x0.shape
        # 1. Mask exactly l tokens of each text. rows (B T,): their places in the flat batch, in the
        # first n_rows entries; the rest is padding, -1. count: l, or all that may be masked.
        key = (self.seed if seed is None else seed, step, samples)
        given = None if scored is None else ~scored
        xt, count, rows, n_rows = ops.mask_tokens(x0, counts, self.mask_id, *key, given)
        # 2. Average over the masked tokens of a text, and over texts: each token weighs 1 / (B l).
        weights = 1 / (count * B)  # (B,)
        if seed is None:
            # Mirrored counts mask exactly this many tokens: there is no padding.
            rows = rows[: B * (T + 1) // 2]
            weights = weights[rows // T]
        else:  # counts of an evaluation are not mirrored
            rows, weights = masked_rows(rows, n_rows, weights, T)
        # 3. Predict what they were.
        return Batch(self.view(xt, rows=rows), x0.flatten()[rows], weights, rows)

    def loss(self, network, batch):
        """The loss of a step's Batch. (A variant may add terms.)"""
        return network(batch.view, batch.targets, batch.weights)

    def texts(self, x0, step, samples):
        """The texts (B, T) to train on, for windows x0 (B, T). (A variant may rewrite them.)"""
        return x0

    def scored_mask(self, x0):
        """(B, T) bool: the tokens that are predicted and scored."""
        return torch.ones_like(x0, dtype=torch.bool)

    def pieces(self, T, steps):
        """[(positions, calls)] of the parts of a text that are written one after another."""
        return [(range(T), steps)]

    def cache(self):
        """A cache for pieces that a sampler has written, or None."""
        return None

    def notes(self):
        """Lines that a run prints about its objective."""
        return []


# ---- Step: draw texts and masks, compute the loss and its gradients, update
#
# A Run has the model, its corpus and optimizers, and an engine, which decides how a step is
# computed: engine.network is the model as it is trained (compiled, in DDP), and engine.call(f, run)
# calls f(run), or on a GPU replays it as a CUDA graph (support/run/run.py).
def draw_batch(run, step, margin_scale, samples):
    """Texts (B, T), counts of masks (B,), step and samples, on the device. samples (B,): numbers in
    the step's batch, of all ranks and micro-batches. After this there is no host sync."""
    x0, lengths = run.corpus.batch(run.sequences_before(step) + samples)
    x0 = run.objective.texts(x0, step, samples)
    counts = run.objective.mask_counts(step, margin_scale, samples, lengths)
    return x0, *(devices.to_device(x, x0.device) for x in (counts, torch.tensor(step), samples))


def backward(run, x0, counts, step, samples):
    """Add the gradients of a micro-batch from draw_batch; returns its share of the loss."""
    with run.autocast():
        batch = run.objective.batch(run.model.ops, x0, counts, step, samples)
        loss = run.objective.loss(run.engine.network, batch)
        loss = loss / run.config.gradient_accumulation_steps
    loss.backward()
    return loss.detach()


def compute_gradients(run, step, margin_scale):
    """Accumulate the gradients of this rank's micro-batches of a step; returns their mean loss."""
    engine = run.engine
    n = run.config.gradient_accumulation_steps
    loss = 0
    for k in range(n):
        samples = torch.arange(run.micro_batch) + (engine.rank * n + k) * run.micro_batch
        seed_device(run.device, "dropout", run.config.seed, step, engine.rank, k)
        drawn = draw_batch(run, step, margin_scale, samples)
        engine.exchange(k == n - 1)  # only the last backward averages gradients over ranks
        loss = loss + engine.call(backward, run, *drawn)
    return loss


def lr_scale(config, step, progress):
    """The learning rate over its peak: linear warm-up by steps, decay by progress in [0, 1]."""
    decay = {
        "trapezoid": min(1.0, 2 * (1 - progress)),
        "linear": 1 - progress,
        "constant": 1.0,
        "cosine": 0.5 + 0.5 * math.cos(math.pi * progress),
    }
    return min(1.0, (step + 1) / (config.warmup_steps + 1)) * decay[config.lr_schedule]


def margin_scale(progress):
    """The factor on --rate_margin: 1 in the first half of a run, then down to 0 at its end."""
    return min(1.0, 2 * (1 - progress))


def train_step(run, step, progress):
    """One optimizer step; its loss and gradient norm go to run.pending."""
    set_rates(run, step, lr_scale(run.config, step, progress))
    loss = compute_gradients(run, step, margin_scale(progress))
    norm = run.engine.call(clip, run)
    run.pending[step] = torch.stack((loss, norm))
    if not devices.is_async(run.device):
        run.check_finite()  # before the update; on a GPU later, because reading would block Python
    run.engine.call(update, run)  # the optimizers' step, then the EMA


# ---- Sampling: the textbook reverse process; sample.py has the good sampler
@torch.no_grad()
def generate(
    model: Model,
    x: torch.Tensor,
    steps: int = 64,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Fill the [MASK] positions of x (B, T) in `steps` network calls, or fewer; returns (B, T).

    Going from time s / steps to (s - 1) / steps, each masked position is revealed with probability
    1 / s, and drawn from the model (Sahoo et al., 2406.07524, eq. 7). A model of blocks writes one
    block after another, each in at least one call.
    """
    check_reversing(model, x, steps)
    x = x.clone()
    for piece, calls in model.objective.pieces(x.shape[1], steps):
        for s in range(calls, 0, -1):
            reveal = (torch.rand(x.shape, generator=generator) < 1 / s).to(x.device)
            reveal &= x == model.mask_id
            reveal[:, : piece.start] = reveal[:, piece.stop :] = False
            if reveal.any():
                logits = checked(model(model.objective.view(x))[reveal])  # (n, V)
                p = logits.softmax(-1).cpu()
                x[reveal] = torch.multinomial(p, 1, generator=generator)[:, 0].to(x.device)
    return x


# ---- Evaluation
MAX_LOGITS = 1 << 27  # computed at once: 512 MiB in float32


def score(model, batch, T, sums, observe=None):
    """Add the tokens of a Batch of windows (B, T) to `sums` (4, B, n) over their texts: weight,
    weight * CE, weight * (top-1 is right), and weight * CE of a window's first token."""
    n_parts = math.ceil(T * model.vocab_size / MAX_LOGITS)  # a window may have too many logits
    for part, ce, is_right in judged(model, batch, n_parts, observe):  # on a GPU, CUDA graphs
        add_up(sums, part, ce, is_right, T)


@torch.no_grad()
def evaluate(
    model: Model,
    windows: torch.Tensor,
    passes: int = 1,
    seed: int = 0,
    batch_size: int = 64,
    observe: Callable | None = None,
    deadline: float = math.inf,
    scored: torch.Tensor | None = None,
) -> dict:
    """Likelihood of validation windows (W, T), nats per token. Deterministic; ranks share the work.

    `nelbo`: the mean over windows and passes of the mean CE over masked tokens (an upper bound on
    the NLL), `se`: its standard error. `by_window` (W,): the loss of each window over the mean of
    `tokens_by_window`, so their mean is `nelbo`. `by_mask`: tokens masked and their mean CE,
    (passes, W) lists (not for blocks); `ce`, `accuracy` (top-1): by tenths of the mask rate. (For
    an autoregressive model, `nll` instead of `nelbo`, and `ar_shifted`: without the first tokens.)
    observe(at, targets, logits): called for each batch: (n,) places in the flat windows, (n,), and
    (n, V). deadline: time.monotonic() after which no further batch begins; a partial result is
    fair, because each batch has windows from all over the text. scored (W, T) bool: mask and score
    only these tokens.
    """
    scored = check_evaluation(model, windows, scored)
    W, T = windows.shape
    objective = model.objective
    n = objective.n_texts  # per window, each masked separately
    # 1. How many tokens of each text to mask: spread evenly over windows and passes.
    is_exact = objective.metric == "nll"  # then all tokens are predicted in one pass
    lengths = scored.unflatten(1, (n, -1)).sum(2).cpu()  # (W, n)
    counts = lengths[None] if is_exact else stratified_counts(lengths, int(passes), int(seed))
    sums = torch.zeros(4, *counts.shape, dtype=torch.float64)  # (4, passes, W, n)
    batch_size = max(1, min(batch_size, MAX_LOGITS // (T * model.vocab_size)))
    n_batches = math.ceil(W / batch_size)
    with eval_mode(model):
        for i in ranks.split_work(range(n_batches)):
            numbers = torch.arange(i, W, n_batches)  # all over the text
            samples = numbers.to(windows.device)
            x0 = windows[samples]  # (B, T)
            for k, count in enumerate(counts):
                # 2. Mask, weigh and predict as in training; a pass stands for a step.
                count = count[numbers].flatten().to(x0.device)  # (B n,)
                key = dict(seed=int(seed) ^ 0x5EED, step=k, samples=samples)
                batch = objective.batch(model.ops, x0, count, **key, scored=scored[samples])
                # 3. Add up by text. (`summary` divides by the sum of weights, so B cancels.)
                found = torch.zeros(4, len(x0), n, dtype=torch.float64)
                score(model, batch, T, found, observe)
                sums[:, k, numbers] = found
            if ranks.is_late(deadline):  # or a signal came
                break
    return summary(ranks.all_reduce(sums), counts, scored.cpu(), is_exact)


# ---- Build and load (support/run/checkpoint.py keeps checkpoints intact)
@devices.float32_by_default()
def make_model(
    config, vocab_size, ops, end_id=None, mean_length=None, shard_fn=lambda m: m, pretrained=None
):
    """A Model, or a pretrained one, with its objective. (end_id, mean_length: variants.choose.)"""
    build = pretrained.build if pretrained else variants.model_class(config, Model)
    model = build(config, vocab_size, ops, shard_fn)
    objective = MaskedDiffusion(config, model.mask_id)
    model.objective = variants.choose(config, objective, end_id, mean_length)
    if model.objective.pad_id != model.mask_id:  # given lengths: how many texts have each, 0 to T
        model.register_buffer("length_counts", torch.zeros(config.block_size + 1))
    return shard_fn(model)


def ready(model, device):
    """A model for predictions, or for your own training loop: model(ids) works too."""
    model.register_forward_pre_hook(to_view, with_kwargs=True)
    return model.to(device)


def new(text: str, tokenizer: str = "char", **settings) -> tuple[Model, Tokenizer, Config]:
    """(model, tokenizer, config), untrained, for your own training loop; `save` saves it.

    tokenizer: char, byte, word or bpe, built from the text, or the path of a tokenizer.json.
    settings: fields of Config, such as n_layer=2; the preset of the device sets the others.
    """
    default = dict(device="cpu", tokenizer=tokenizer, data="a text of mdlm.new")
    config = run_config.new(Config, default | settings)
    config.check()
    size = config.vocab_size or 16384
    pieces = [(text, False)]  # the text, and whether a document ends there
    made = build_tokenizer(config.tokenizer, size, False, lambda: pieces, len(text))
    ops = devices.select_kernels(config.kernels, devices.pick_device(config.device), config)
    torch.manual_seed(config.seed)
    return ready(make_model(config, made.vocab_size, ops), config.device), made, config


def load(
    path: str | Path | list = "out",
    device: str | torch.device = "cpu",
    kernel: str = "auto",
    whole: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Model, Tokenizer, Config]:
    """(model, tokenizer, config) of a checkpoint or a run (its latest one), ready to predict.

    For several, a list of folders or "A,B", the model predicts the mean of their probabilities.

    Weights are float32, with --ema the averaged ones. kernel: auto, triton or torch. whole: load a
    model of blocks trained with --infill_share as one without blocks, which sees text after gaps.
    trust_remote_code: run the code that came with its network; nothing else is run or unpickled.
    Raises UserError, a ValueError, unless the checkpoint is intact.
    """
    device = devices.pick_device(str(device))

    def read(folder):
        config = run_config.read(Config, folder)
        config.trust_remote_code = trust_remote_code
        if whole and config.infill_share:
            config.block_length = 0
        tokenizer = tokenizer_of(folder)
        network = open_network(config, folder) if config.network else None
        checkpoint.check_size(folder, config, tokenizer, network)  # before allocating memory
        ops = devices.select_kernels(kernel, device, config)
        model = make_model(config, tokenizer.vocab_size, ops, tokenizer.end_id, pretrained=network)
        model.load_state_dict(checkpoint.read_weights(folder, model))
        model.calibration = checkpoint.read_calibration(folder)
        model.vocab = tokenizer.vocab  # callers may confuse tokenizers of two models
        return ready(model, device).eval(), tokenizer, config

    _, loaded = ensemble.read_newest(path, read)
    return loaded


# ---- Training
def make_run(config, corpus, machine, pretrained=None):
    """A Run with fresh weights on a devices.Machine. pretrained: a networks.Network, or ours."""
    device, dtype, ops, rank, world = machine
    shard_fn = functools.partial(nn.Module.to, device=device)  # of each layer, and of the model
    if config.shard:
        shard_fn = shards.make_shard_fn(config.shard, device, dtype, world)
    V, end_id = corpus.tokenizer.vocab_size, corpus.tokenizer.end_id

    def build():  # twice, with the same weights
        torch.manual_seed(config.seed)
        model = make_model(config, V, ops, end_id, corpus.mean_length, shard_fn, pretrained)
        if hasattr(model, "length_counts"):
            model.length_counts.copy_(corpus.length_counts)
        return model

    model = build()
    averaged = build().eval() if config.ema else model
    optimizers = make_optimizers(model, config, device)
    engine = Engine(model, dtype, ema_weight=torch.zeros((), device=device), rank=rank, world=world)
    return Run(config, corpus, model, averaged, optimizers, device, engine)


def report(run, is_last=False):
    """Evaluate the averaged and the raw weights, log the result and show samples."""
    run.check_finite()
    with run.clock.evaluate(run, is_last) as budget:
        how = dict(batch_size=run.micro_batch, deadline=budget.scored_until)
        with run.autocast():
            r = evaluate(run.averaged, budget.windows, budget.passes, **how)
            raw = r if run.averaged is run.model else evaluate(run.model, budget.windows, **how)
        calls = run.clock.preview_calls(run, budget, r, raw)
        if is_last and ranks.was_stopped():
            return  # stopped by a signal, so partial: --resume evaluates again
        run.log.evaluation(run, r, raw, is_last)
        # With --shard every rank must take part in each call of the model.
        if (run.engine.rank == 0 or run.config.shard) and run.step and calls:
            show_samples(run, calls)


def show_samples(run, calls):
    """Show what the model writes in `calls` network calls: from nothing, and in real text."""
    x0, hidden, _ = preview = to_preview(run)
    g = generator("preview", run.config.seed, run.step)
    with run.autocast(), eval_mode(run.averaged):
        model = Recorded(run.averaged)  # on a GPU its calls are CUDA graphs
        x = generate(model, torch.where(hidden, run.model.mask_id, x0), calls, g)
    run.log.samples(run, preview, x)


def set_up(session):
    """The Run of a session: new, with the weights of --init_from, or from a checkpoint."""
    pretrained, source = session.open_source(load)
    ids = session.open_data(pretrained, source)
    corpus = variants.open_corpus(Corpus, ids, session.config, session.machine.device)
    run = make_run(session.config, corpus, session.machine, pretrained)
    session.begin(run, source)  # loads the weights, or on --resume all that a checkpoint has
    if compiling.prepare_engine(run):  # the first call compiles; do it now, not in the first step
        compute_gradients(run, run.step, 0.0)
        run.model.zero_grad()
    return run


def train(given, start):
    """Train with the given flags, a dict of Config fields; returns the exit code."""
    with open_session(Config, given, start) as session:
        run = set_up(session)
        config, log, clock = run.config, run.log, run.clock
        if not session.resumed_from:
            report(run)
        with log.progress(run) as show_progress:
            # goes_on updates clock.progress; a Ctrl-C or SIGTERM ends the loop after the step.
            while clock.goes_on(run.step):
                train_step(run, run.step, clock.progress)
                run.step += 1
                show_progress()
                compiling.use_compiled(run)  # once a second process has compiled the network
                # Once in a while: a record in the log; an evaluation; a checkpoint.
                if run.step % config.log_interval == 0:
                    run.check_finite()
                    scale = lr_scale(config, run.step - 1, clock.progress)  # as in that step
                    log.training(run, scale, margin_scale(clock.progress))
                if clock.must_evaluate(run.step):
                    report(run)
                    session.save(run)  # the averaged weights, and what --resume needs
                elif clock.must_save:
                    session.save(run)

        # The end is an evaluation and a save of the same step; an interrupted run is only saved.
        if not clock.signal and not session.is_over:  # --resume found nothing to do
            report(run, is_last=True)
        return session.end(run)


def main(argv, start=None):
    """Run the command with these flags; start: its time.monotonic() (None: now)."""
    given = run_config.parse(Config, argv, __doc__)
    return train(given, time.monotonic() if start is None else start)


if __name__ == "__main__":
    with entry.program() as end:
        end.code = main(sys.argv[1:], PROCESS_START)
    sys.exit(end.code)
