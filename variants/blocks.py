"""Block diffusion, --block_length: blocks of S tokens from left to right, diffusion inside each.

Diffusion language models are deployed in this form (Arriola et al., 2503.09573): the text before a
block does not change any more, so a sampler keeps its keys and values (cache.py). S = T is the
default objective, S = 1 an autoregressive model.

In training the network sees rows of 2T positions, [xt; x0]: a masked block sees itself and the
clean text of the blocks before it. So one call trains all blocks.
"""

from dataclasses import dataclass, replace

import torch

from nanomdlm.kernels.reference import block_spans
from nanomdlm.support import numerics
from nanomdlm.support.cli.settings import Natural, Share
from nanomdlm.support.errors import UserError
from nanomdlm.support.view import View

from .cache import Cache, LibraryCache
from .prompts import Prompts
from .variant import Variant

REFUSED = dict(
    documents="a text continues block by block until its [END], so its length is learned",
    rates="each block is masked as the default masks a text",
    time_conditioning="each block has its own rate",
)


@dataclass
class Settings:
    """Block diffusion."""

    block_length: Natural = 0  # block size for semi-autoregressive generation, in tokens (0: off)
    infill_share: Share = 0.0  # share of steps on whole windows, to learn to fill gaps too


def are_asked(config):
    return config.block_length not in (0, config.block_size)


def asked(config, has_documents):
    return f"--block_length={config.block_length}" if are_asked(config) else ""


def wrap(objective, end_id, mean_length):
    is_answering = isinstance(objective, Prompts)
    return PromptsInBlocks(objective) if is_answering else BlockDiffusion(objective)


def is_of_tokens(config):
    """Whether each block is a single token, which has one mask rate."""
    return are_asked(config) and config.block_length == 1 and not config.infill_share


has_rates = is_of_tokens


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
    """Each block is a text of S tokens for `block`, an objective like the default of that length.

    In --infill_share of the steps, a window is a single text, as for `inner`, so that the model
    also learns to fill gaps.
    """

    def __init__(self, inner):
        super().__init__(inner)
        config = self.config
        self.block_length = config.block_length
        self.n_texts = self.T // self.block_length
        self.steps_are_alike = not config.infill_share
        sizes = dict(block_size=self.block_length, batch_size=config.batch_size * self.n_texts)
        self.block = self.of_block(inner, replace(config, **sizes))

    def of_block(self, inner, config):
        """The objective for a block: `inner` with the sizes of `config`."""
        return type(inner)(config, self.mask_id)

    def numbers(self, samples):
        """(B,) numbers of windows -> (B n,) numbers of their blocks."""
        n = self.n_texts
        return (samples[:, None] * n + torch.arange(n, device=samples.device)).flatten()

    # ---- Training
    def is_whole(self, step):
        if not self.config.infill_share:
            return False
        return numerics.stratified(1, "whole", self.seed, step) < self.config.infill_share

    def mask_counts(self, step, margin, samples, lengths):
        """(B n,) of every block; (B,) in a step of whole texts."""
        if self.is_whole(step):
            return self.inner.mask_counts(step, margin, samples, lengths)
        return self.block_counts(step, margin, samples, lengths)

    def block_counts(self, step, margin, samples, lengths):
        """(B n,) how many tokens of each block to mask."""
        S = torch.full((len(samples) * self.n_texts,), self.block_length)
        return self.block.mask_counts(step, margin, self.numbers(samples), S)

    def batch(self, ops, x0, counts, step, samples, seed=None, scored=None):
        if len(counts) == len(x0):  # a step of whole windows
            return self.inner.batch(ops, x0, counts, step, samples, seed, scored)
        blocks = x0.view(len(counts), -1)
        if scored is not None:
            scored = scored.reshape(blocks.shape)
        numbers = self.numbers(samples)
        made = self.block.batch(ops, blocks, counts, step, numbers, seed, scored)
        # The blocks of a window follow each other, so made.at also indexes tokens in x0.
        return made._replace(view=self.view(made.view.ids.view(x0.shape), x0, made.view.rows))

    # ---- What the network is shown
    def view(self, xt, x0=None, rows=None):
        """x0 (B, T): the text that later blocks see (default: xt)."""
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
        """(2 T,) for View.before: before a block comes the clean text that it sees."""
        T, S = self.T, self.block_length
        before = torch.arange(-1, 2 * T - 1, device=device)
        before[:T:S] += T
        return before

    def pieces(self, T, steps):
        S = min(self.block_length, T) or 1
        starts = range(0, T, S)
        calls = max(1, steps * S // T) if S > 1 else 1
        return [(range(begin, min(begin + S, T)), calls) for begin in starts]

    def cache(self):
        return LibraryCache(self.config) if self.config.network else Cache(self.config)

    def notes(self):
        fraction = self.config.infill_share
        whole = f"; in {fraction:.0%} of the steps all at once" * (fraction > 0)
        blocks = f"{self.n_texts} blocks of {self.block_length} tokens, one after another{whole}"
        return [*self.inner.notes(), blocks]


class PromptsInBlocks(BlockDiffusion):
    """Prompts in blocks: an answer is written block by block. `inner` is Prompts.

    A prompt may end anywhere, so the block in which it ends is partly given; the blocks before it
    have nothing to predict. The scored tokens of a block are treated as a text:

        NELBO = sum over blocks b of n_b * (mean over l uniform on {1 .. n_b} of the mean CE at l
                random ones of the n_b scored tokens of block b), divided by the sum of n_b.
    """

    def of_block(self, inner, config):
        mean_length = inner.mean_length * config.block_size / self.T
        return Prompts(super().of_block(inner.inner, config), inner.end_id, mean_length)

    def block_lengths(self, lengths):
        """(B,) how many tokens, at the end of a window, are scored -> (B, n) in its blocks."""
        S = self.block_length
        later = torch.arange(self.n_texts - 1, -1, -1) * S  # (n,) tokens after a block
        return (lengths[:, None] - later).clamp(0, S)

    def block_counts(self, step, margin, samples, lengths):
        n_scored = self.block_lengths(lengths).flatten()  # (B n,)
        counts = self.block.mask_counts(step, margin, self.numbers(samples), n_scored)
        return counts.minimum(n_scored)  # the mirror of 0 masks, 1, where nothing is predicted: 0

    def batch(self, ops, x0, counts, step, samples, seed=None, scored=None):
        if scored is None:
            scored = self.scored_mask(x0)  # a block alone cannot tell
        return super().batch(ops, x0, counts, step, samples, seed, scored)
