"""--document_length=given: documents of known lengths; texts in which some tokens are given.

[END] follows each document. It is never masked, so the network always sees where a text ends, and
only text is predicted and scored.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from nanomdlm.kernels.reference import document_spans
from nanomdlm.support.cli.devices import to_device
from nanomdlm.support.cli.settings import Text
from nanomdlm.support.data import windows
from nanomdlm.support.view import Batch, masked_rows

from .variant import Variant

REFUSED = dict(rates="documents of known lengths need the default's masks and weights")
INSTEAD = "--document_length=predicted"  # the flag is a default, so it cannot be left out


def asked(config, has_documents):
    is_given = config.document_length == "given" and config.objective == "mdlm"
    return "--document_length=given" if has_documents and is_given else ""


def wrap(objective, end_id, mean_length):
    return Documents(objective, end_id, mean_length)


@dataclass
class Settings:
    """Documents: .jsonl, .json, .parquet, folders, --separator, or .bin files with --end."""

    text_column: str = "text"  # the column of a record that contains the text
    separator: Text = ""  # text between the documents of a text file, such as \n\n
    end: str = ""  # end-of-document token, shown as [END]; for .bin files, its id
    document_length: Literal["given", "predicted"] = "given"  # predicted: learn to predict [END]
    pack: bool = True  # put several documents of given lengths into one window


def corpus_of_documents(Corpus):
    """The class of corpora with an [END] in their vocabulary, derived from that of plain text.

    Windows start at a document, or every T tokens in a long one, and are padded with [END]; with
    --pack, a training window holds as many documents as fit. Which [END] are learned: none with
    given lengths; the one that ends a document with --objective=ar; all of them with predicted
    lengths.
    """

    class DocumentCorpus(Corpus):
        has_documents = True

        def cut(self, ids, config):
            end_id = ids.tokenizer.end_id
            self.n_documents = windows.count_documents(ids.arrays[0], end_id, config.prompt_column)
            # Three rows (W,): where windows start, how many tokens each takes, how many are learned
            train, val = (windows.cut_windows(array, config, end_id) for array in ids.arrays)
            self.length_counts = windows.count_lengths(*train, self.T)
            if config.pack and config.document_length == "given" and config.objective == "mdlm":
                train = windows.pack_windows(*train, self.T)
            self.mean_size = train[1].double().mean().item()
            self.mean_length = train[2].double().mean().item()
            self.windows_of = {"train": train, "val": val}
            self.W = len(train[0])
            self.n_validation = len(val[0])
            self.n_offsets = 0
            scored = int(val[2].sum())
            if ids.meta.get("characters") and not config.prompt_column:
                self.chars_per_token = ids.meta["characters"][1] / scored

        def take(self, part, windows, offsets):
            starts, sizes, learned = (row[windows].long() for row in self.windows_of[part])
            ids = self.ids[part]
            begin, size = to_device(torch.stack((starts, sizes)), ids.device)[:, :, None]  # (B, 1)
            at = torch.arange(self.T, device=ids.device)
            x = ids[(begin + at).clamp(max=len(ids) - 1)].long()
            return to_device(torch.where(at < size, x, self.tokenizer.end_id), self.device), learned

    return DocumentCorpus


# ---- Documents of given lengths
def view_of_documents(view, end_id, restart_positions):
    """A View of windows of several documents, each of which sees only itself.

    restart_positions: positions begin at 0 in each. (Rotary ones are relative and need not.)
    """
    spans = document_spans(view.ids == end_id)
    starts = spans[:, 0]  # (B, T) where each token's document begins
    at = view.at - starts if restart_positions else view.at  # (B, T) or (T,)
    return view._replace(sees=spans, at=at)


class GivenTokens(Variant):
    """Masks and scores only the tokens of scored_mask; a text is weighted by their number."""

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
        # The mean over masked tokens, times the text's share of all scored tokens. (If no token is
        # scored, none is masked.)
        weights = (scored.sum(1) / self.mean_length) / (count.clamp(min=1) * B)
        if seed is None:  # pairs of counts are mirrored only in training
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
