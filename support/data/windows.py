"""Windows of documents: ids (n,) in which end_id ends each of them."""

import itertools

import numpy as np
import torch

from nanomdlm.support.data.records import PIECE
from nanomdlm.support.data.sources import slices_of
from nanomdlm.support.errors import UserError


def count_documents(ids, end_id, prompt_column):
    """How many documents there are in ids (n,), where end_id ends each, and each prompt too."""
    ends = sum(int((piece == end_id).sum()) for piece in slices_of([ids]))
    return ends // 2 if prompt_column else ends + int(ids[-1] != end_id)


def cut_windows(ids, config, end_id):
    """(W,) int64: where windows start, how many tokens they take, how many of these are learned.

    They start at each document, and every T tokens in a longer one. The text is learned; with
    --objective=ar also its [END]; with predicted lengths also the padding of a window.
    """
    T = config.block_size
    ends = [np.zeros(0, np.int64)]
    for i, piece in zip(itertools.count(0, PIECE), slices_of([ids])):
        ends.append(i + 1 + (piece == end_id).nonzero()[0])
    ends = np.concatenate(ends)
    prompts = ends[::2]
    if config.prompt_column:
        ends = ends[1::2]
    edges = np.unique(np.concatenate([[0], ends, [len(ids)]]))
    windows = -(-np.diff(edges) // T)  # windows in each document, rounded up
    last = windows.cumsum() - 1  # the number of its last one
    sizes = np.full(windows.sum(), T, np.int32)
    sizes[last] = np.diff(edges) - (windows - 1) * T
    starts = sizes.cumsum(dtype=np.int32 if len(ids) + T < 1 << 31 else np.int64)
    starts -= sizes
    learned = np.full_like(sizes, T)
    if config.document_length == "given":
        learned = sizes.copy()
    if config.document_length == "given" and config.objective == "mdlm":
        learned[last] -= 1
        learned[-1] += ids[-1] != end_id  # the last document may be cut off
    if config.prompt_column:
        if (windows > 1).any():
            longest = f"a prompt and its answer take {np.diff(edges).max()} tokens"
            raise UserError(f"{longest}, more than --block_size={T}; shorten them or raise it")
        learned = (T - (prompts - edges[:-1])).astype(np.int32)
    if not learned.any():
        raise UserError("there is no text apart from document ends, or no answer; give some")
    some = slice(None) if learned.all() else learned > 0
    return [torch.from_numpy(each[some]) for each in (starts, sizes, learned)]


def count_lengths(starts, sizes, learned, T):
    """(T + 1,) how many texts there are of each length, those above T counted as T."""
    goes_on = (starts[1:] == starts[:-1] + T) & (learned[:-1] == T)
    return torch.cat((learned[:1], learned[1:][~goes_on])).bincount(minlength=T + 1)


def pack_windows(starts, sizes, learned, T):
    """The windows of documents, as many neighbors in one as fit into T tokens."""
    starts, sizes, learned = (each.numpy() for each in (starts, sizes, learned))
    end = np.searchsorted(starts + sizes, starts + T, side="right")  # of each, the first too many
    n = i = 0
    while i < len(end):
        end[n] = i = end[i]
        n += 1
    end = end[:n].copy()
    first = np.concatenate([[0], end[:-1]])
    begin = starts[first]
    sizes = starts[end - 1] + sizes[end - 1] - begin
    return [torch.from_numpy(each) for each in (begin, sizes, np.add.reduceat(learned, first))]
