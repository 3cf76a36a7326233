"""Texts of which some tokens are given: documents of known lengths, answers to prompts.

[END] follows each document or prompt. It is never masked, so the network always sees where a text
ends, and only text is predicted and scored.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from support.kernels.reference import document_spans
from support.settings import Text
from support.view import masked_rows

from .variant import Variant


@dataclass
class DocumentSettings:
    """Documents, of .jsonl, .json, .parquet, folders, --separator, or .bin files with --end."""

    text_column: str = "text"  # the column of a record that has the text
    separator: Text = ""  # text between the documents of a text file, such as \n\n
    end: str = ""  # end-of-document token, shown as [END]; of .bin files, its id
    document_length: Literal["given", "predicted"] = "given"  # predicted: learn where [END] comes
    pack: bool = True  # put several documents of given lengths into a window


@dataclass
class PromptSettings:
    """Prompts and answers."""

    prompt_column: str = ""  # the column of prompts, which are given; --text_column is learned
    chat_column: str = ""  # the column of conversations; the assistant's messages are learned


def view_of_documents(view, end_id, restart_positions):
    """A View of windows of several documents: each sees itself alone.

    restart_positions: they begin at 0 in each. (Rotary ones are relative, so they need not.)
    """
    spans = document_spans(view.ids == end_id)
    starts = spans[:, 0]  # (B, T) where each token's document begins
    at = view.at - starts if restart_positions else view.at  # (B, T) or (T,)
    return view._replace(sees=spans, at=at)


class GivenTokens(Variant):
    """Masks and scores the tokens of scored_mask alone; a text weighs by how many these are."""

    def __init__(self, inner, end_id, mean_length):
        super().__init__(inner)
        self.end_id = end_id
        self.mean_length = mean_length or self.T

    def resized(self, T, batch_size):
        """The same objective for parts of T tokens, which have their share of the scored ones."""
        other = copy.copy(self)
        other.inner = self.inner.resized(T, batch_size)
        other.mean_length = self.mean_length * T / self.T
        return other

    def batch(self, ops, x0, counts, step, samples, scored=None):
        """scored (B, T) bool: the tokens to score, where x0 alone does not tell."""
        if scored is None:
            scored = self.scored_mask(x0)
        key = (self.seed, step, samples)
        xt, count, rows, n_rows = ops.mask_tokens(x0, counts, self.mask_id, *key, ~scored)
        B, T = x0.shape
        # The mean over masked tokens, times the text's share of all scored tokens. (Where none is
        # scored, none is masked.)
        weights = (scored.sum(1) / self.mean_length) / (count.clamp(min=1) * B)
        rows, weights = masked_rows(rows[: B * (T + 1) // 2], n_rows, weights, T)
        return self.view(xt, rows=rows), x0.flatten()[rows], weights


class Documents(GivenTokens):
    """Several documents in a window, each of a known length (--document_length=given)."""

    lengths_are_given = True

    @property
    def pad_id(self):
        return self.end_id

    def scored_mask(self, x0):
        return x0 != self.end_id

    def view(self, xt, x0=None, rows=None):
        view = self.inner.view(xt, x0, rows)
        return view_of_documents(view, self.end_id, self.config.pos != "rope")

    def buffers(self):
        """How many texts there were of each length: a sampler draws lengths from them."""
        return dict(length_counts=torch.zeros(self.T + 1))

    def notes(self):
        return ["documents of given lengths (--document_length)"]


class Prompts(GivenTokens):
    """A prompt and its answer in each window; what follows the first [END] is predicted."""

    def scored_mask(self, x0):
        is_end = x0[:, :-1] == self.end_id
        return F.pad(is_end, (1, 0)).cumsum(1) > 0  # from the token after the first [END] on
