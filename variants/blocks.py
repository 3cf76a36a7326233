"""Block diffusion, --block_length: blocks of S tokens from left to right, diffusion inside each.

The form in which diffusion language models are deployed (Arriola et al., 2503.09573): what precedes
a block does not change any more, so a sampler keeps its keys and values (cache.py). S = T is the
default objective, S = 1 an autoregressive model.

In training the network sees rows of 2T positions, [xt; x0]: a masked block sees itself and the
clean text of the blocks before it. So one call trains all blocks.
"""

from dataclasses import dataclass

import torch

from support import numerics
from support.errors import UserError
from support.kernels.reference import block_spans
from support.settings import Natural, Share
from support.view import View

from .cache import Cache, LibraryCache
from .variant import Variant


@dataclass
class BlockSettings:
    """Block diffusion."""

    block_length: Natural = 0  # tokens per block, written from left to right (0: off)
    infill_share: Share = 0.0  # share of the steps on whole windows, to learn to fill gaps too


def are_asked(config):
    return config.block_length not in (0, config.block_size)


def check(config):
    """Raise UserError for a --block_length that does not fit, or --infill_share without blocks."""
    if not are_asked(config):
        if config.infill_share:
            needs = f"needs a --block_length below --block_size={config.block_size}"
            raise UserError(f"--infill_share={config.infill_share} {needs}")
    elif config.block_size % config.block_length:
        what = f"--block_length={config.block_length}"
        raise UserError(f"{what} must divide --block_size={config.block_size}")


class BlockDiffusion(Variant):
    """Each block is a text of S tokens for `texts`, an objective like `inner` but of that length.

    In --infill_share of the steps a window is a single text, as for `inner`: so the model learns to
    fill gaps too.
    """

    fills_gaps = False

    def __init__(self, inner):
        super().__init__(inner)
        self.block_length = self.config.block_length
        self.n_blocks = self.T // self.block_length
        # The masked text, and the clean one that later blocks see.
        self.positions_per_token = 2 - self.config.infill_share
        self.steps_are_alike = not self.config.infill_share
        self.texts = inner.resized(self.block_length, inner.batch_size * self.n_blocks)

    @property
    def n_pieces(self):
        return self.n_blocks

    def numbers(self, samples):
        """(B,) numbers of windows -> (B n,) numbers of their blocks."""
        n = self.n_blocks
        return (samples[:, None] * n + torch.arange(n, device=samples.device)).flatten()

    # ---- Training
    def is_whole(self, step):
        if not self.config.infill_share:
            return False
        return numerics.stratified(1, "whole", self.seed, step) < self.config.infill_share

    def rate_margin(self, margin_scale):
        if self.block_length == 1 and not self.config.infill_share:
            return 0.0  # a block of a single token has one mask rate
        return self.inner.rate_margin(margin_scale)

    def mask_counts(self, step, margin_scale, samples, lengths):
        """(B n,) of every block; (B,) in a step of whole texts."""
        if self.is_whole(step):
            return self.inner.mask_counts(step, margin_scale, samples, lengths)
        return self.block_counts(step, margin_scale, samples, lengths)

    def block_counts(self, step, margin_scale, samples, lengths):
        """(B n,) how many tokens of each block to mask."""
        S = torch.full((len(samples) * self.n_blocks,), self.block_length)
        return self.texts.mask_counts(step, margin_scale, self.numbers(samples), S)

    def batch(self, ops, x0, counts, step, samples):
        if len(counts) == len(x0):  # a step of whole windows
            return self.inner.batch(ops, x0, counts, step, samples)
        numbers = self.numbers(samples)
        view, targets, weights = self.block_batch(ops, x0, counts, step, numbers)
        return self.view(view.ids.view(x0.shape), x0, view.rows), targets, weights

    def block_batch(self, ops, x0, counts, step, numbers):
        """What `texts` makes of the blocks of x0 (B, T), which have these numbers (B n,)."""
        return self.texts.batch(ops, x0.view(len(counts), -1), counts, step, numbers)

    # ---- What the network is shown
    def view(self, xt, x0=None, rows=None):
        """x0 (B, T): the text that later blocks see (default: as xt shows it)."""
        B, T = xt.shape
        spans = block_spans(T, self.block_length, xt.device)
        at = torch.arange(T, device=xt.device).repeat(2)
        if rows is None:
            rows = torch.arange(B * T, device=xt.device).view(B, T)
        ids = torch.cat((xt, xt if x0 is None else x0), 1)
        before = self.places_before(xt.device) if self.config.shift else None
        rows = rows + rows // T * T  # row b of xt begins at 2 b T in [xt; x0]
        return View(ids, at, spans, rows, before=before)

    def places_before(self, device):
        """(2 T,) of View.before: before a block is the clean text that it sees."""
        T, S = self.T, self.block_length
        before = torch.arange(-1, 2 * T - 1, device=device)
        before[:T:S] += T
        return before

    # ---- What `evaluate` and `generate` ask
    def eval_counts(self, lengths, passes, seed):
        return numerics.stratified_counts(lengths, passes, seed, self.n_blocks)

    def hide(self, ops, x0, counts, seed, step, samples, never_mask):
        blocks = x0.view(len(counts), -1)
        numbers = self.numbers(samples)
        xt, rows, n_rows = self.inner.hide(ops, blocks, counts, seed, step, numbers, never_mask)
        return xt.view(x0.shape), rows, n_rows

    def pieces(self, T, steps):
        S = min(self.block_length, T) or 1
        starts = range(0, T, S)
        calls = max(1, steps * S // T) if S > 1 else 1
        return [(range(begin, min(begin + S, T)), calls) for begin in starts]

    def cache(self):
        return LibraryCache(self.config) if self.config.network else Cache(self.config)

    def check_gaps(self, x, fill):
        """Raise UserError if a gap has text in a later block, which this model does not see.

        x (B, T) ids; fill (B, T) bool.
        """
        S = self.block_length
        if not x.numel():
            return
        block = torch.arange(x.shape[1], device=x.device) // S
        last = torch.where((x != self.mask_id) & ~fill, block, 0)
        if (fill & (block < last.amax(1, keepdim=True))).any():
            what = f"this model (--block_length={S}) does not see text in blocks after a gap"
            learned = "mdlm.py --infill_share by mdlm.load(path, whole=True)"
            fix = f"take one without blocks, or one of {learned}"
            raise UserError(f"{what}; {fix}")

    def notes(self):
        fraction = self.config.infill_share
        whole = f"; in {fraction:.0%} of the steps all at once" * (fraction > 0)
        return [f"{self.n_blocks} blocks of {self.block_length} tokens, one after another{whole}"]
