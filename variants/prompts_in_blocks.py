"""Prompts in blocks, --prompt_column with --block_length: an answer is written block by block.

A prompt may end anywhere, so the block that it ends in is partly given; the blocks before that one
have nothing to predict. What is scored of a block is a text of its own, as in blocks.py:

    NELBO = sum over blocks b of n_b * (mean over l uniform on {1 .. n_b} of the mean CE at l random
            ones of the n_b scored tokens of block b), divided by the sum of n_b.
"""

import torch

from support import numerics

from .blocks import BlockDiffusion


class PromptsInBlocks(BlockDiffusion):
    """Blocks of windows of which only the last tokens are scored, for an `inner` of Prompts."""

    def block_lengths(self, lengths):
        """(B,) how many tokens are scored, the last ones of a window -> (B, n) in its blocks."""
        S = self.block_length
        later = torch.arange(self.n_blocks - 1, -1, -1) * S  # (n,) tokens after a block
        return (lengths[:, None] - later).clamp(0, S)

    # ---- Training
    def block_counts(self, step, margin_scale, samples, lengths):
        n_scored = self.block_lengths(lengths).flatten()  # (B n,)
        counts = self.texts.mask_counts(step, margin_scale, self.numbers(samples), n_scored)
        return counts.minimum(n_scored)  # the mirror of 0 masks, 1, where nothing is predicted: 0

    def block_batch(self, ops, x0, counts, step, numbers):
        scored = self.scored_mask(x0).view(len(counts), -1)  # (B n, S): a block alone cannot tell
        return self.texts.batch(ops, x0.view(scored.shape), counts, step, numbers, scored)

    # ---- What `evaluate` asks
    def eval_counts(self, lengths, passes, seed):
        n_scored = self.block_lengths(lengths)
        counts = numerics.stratified_counts(n_scored.flatten(), passes, seed)
        return counts.view(passes, *n_scored.shape)

    def tally(self, ce, right, rows, counts, T):
        return self.inner.tally(ce, right, rows, counts.clamp(min=1), T)  # some blocks have no row

    def summary(self, sums, counts, scored):
        """Blocks weigh by their scored tokens. The standard error is over windows, stratified by
        how many tokens of a window are masked; `ce` and `accuracy` are by a block's mask rate."""
        lengths = scored.unflatten(1, (self.n_blocks, -1)).sum(2)  # (W, n)
        length = lengths.sum(1)  # (W,)
        means = (sums * lengths).sum(3, keepdim=True) / length[:, None]  # (4, passes, W, 1)
        r = numerics.summary(means, counts.sum(2, keepdim=True), length)
        del r["by_mask"]  # of whole windows, not of blocks as what follows
        lengths = lengths.expand(counts.shape)
        some = (lengths > 0) & (sums[3] > 0)  # (passes, W, n): scored, and there was time for it
        for name, x in zip(("ce", "accuracy"), sums):
            r[name] = numerics.by_tenths((x / sums[3])[some], counts[some], lengths[some])
        return r
