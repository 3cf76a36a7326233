"""--document_length=given: documents of known lengths; texts of which some tokens are given.

[END] follows each document. It is never masked, so the network always sees where a text ends, and
only text is predicted and scored.
"""

from dataclasses import dataclass
from typing import Literal

from support.kernels.reference import document_spans
from support.settings import Text
from support.view import Batch, masked_rows

from .variant import Variant

REFUSED = dict(rates="documents of known lengths take the default's masks and weights")
INSTEAD = "--document_length=predicted"  # as it is a default, it cannot be left out


def asked(config, has_documents):
    is_given = config.document_length == "given" and config.objective == "mdlm"
    return "--document_length=given" if has_documents and is_given else ""


def wrap(objective, end_id, mean_length):
    return Documents(objective, end_id, mean_length)


@dataclass
class DocumentSettings:
    """Documents, of .jsonl, .json, .parquet, folders, --separator, or .bin files with --end."""

    text_column: str = "text"  # the column of a record that has the text
    separator: Text = ""  # text between the documents of a text file, such as \n\n
    end: str = ""  # end-of-document token, shown as [END]; of .bin files, its id
    document_length: Literal["given", "predicted"] = "given"  # predicted: learn where [END] comes
    pack: bool = True  # put several documents of given lengths into a window


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

    def batch(self, ops, x0, counts, step, samples, seed=None, scored=None):
        if scored is None:
            scored = self.scored_mask(x0)
        key = (self.seed if seed is None else seed, step, samples)
        xt, count, rows, n_rows = ops.mask_tokens(x0, counts, self.mask_id, *key, ~scored)
        B, T = x0.shape
        # The mean over masked tokens, times the text's share of all scored tokens. (Where none is
        # scored, none is masked.)
        weights = (scored.sum(1) / self.mean_length) / (count.clamp(min=1) * B)
        if seed is None:  # pairs of counts are mirrored in training alone
            rows = rows[: B * (T + 1) // 2]
        rows, weights = masked_rows(rows, n_rows, weights, T)
        return Batch(self.view(xt, rows=rows), x0.flatten()[rows], weights, rows)


class Documents(GivenTokens):
    """Several documents in a window, each of a known length (--document_length=given)."""

    @property
    def pad_id(self):
        return self.end_id

    def scored_mask(self, x0):
        return x0 != self.end_id

    def view(self, xt, x0=None, rows=None):
        view = self.inner.view(xt, x0, rows)
        return view_of_documents(view, self.end_id, self.config.pos != "rope")

    def notes(self):
        return ["documents of given lengths (--document_length)"]
