"""Checks of arguments from Python callers: silent mistakes raise a UserError, a ValueError.

They run once per call, before any work. Nothing here runs in a training step.
"""

import re

import torch

from nanomdlm.support.abilities import can_fill, is_causal
from nanomdlm.support.cli.settings import plain, shown
from nanomdlm.support.errors import UserError
from nanomdlm.support.view import View


def whole_number(name, value, low, high=(1 << 63) - 1):
    """`value`, also of numpy or PyTorch, as an int; UserError unless it is from low to high."""
    value = plain(value)
    if type(value) is not int or not low <= value <= high:
        raise UserError(f"{name}={shown(value)} must be a whole number, at least {low}")
    return value


def check_text(text):
    """The text; UserError unless it is a string that UTF-8 can encode."""
    if not isinstance(text, str) or re.search("[\ud800-\udfff]", text):
        raise UserError("the text is not a string, or not UTF-8; convert it, or set a UTF-8 locale")
    return text


# ---- Ids
def whole_ids(ids, limit):
    """Ids of a list, an array or a tensor (n,) as ints; UserError unless they are 0 to `limit`."""
    ids = list(ids.tolist() if hasattr(ids, "tolist") else ids)
    if any(type(plain(i)) is not int for i in ids):
        raise UserError("ids must be whole numbers (n,); give those that encode returned")
    if ids and not 0 <= min(ids) <= max(ids) <= limit:
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise UserError(f"{bad} is not an id of this tokenizer; give 0 to {limit}")
    return ids


def check_ids(model, x, name="x", masks=True):
    """Raise UserError unless x is (B, T) int64 of tokens, or of [MASK] if masks, in the context."""
    limit = model.vocab_size - 1
    if masks:  # ours is behind all tokens; that of a pretrained encoder is one of them
        limit = max(limit, model.mask_id)
    if x.dtype != torch.int64 or x.dim() != 2:
        raise UserError(
            f"{name} must be a tensor (B, T) of int64 ids, not {tuple(x.shape)} {x.dtype}"
        )
    if x.numel() and not 0 <= x.min() <= x.max() <= limit:
        raise UserError(f"{name} has ids from {x.min()} to {x.max()}; give 0 to {limit}")
    if not masks and (x == model.mask_id).any():
        raise UserError(f"{name} has {model.mask_id}, which is [MASK]; give the true tokens")


def check_length(model, x, name="x"):
    """Raise UserError if x (B, T) is longer than the context."""
    L = model.config.block_size
    if x.shape[1] > L:
        raise UserError(f"{name} has {x.shape[1]} tokens, but the context has only {L}; shorten it")


def to_view(model, args, kwargs):
    """Forward pre-hook of loaded models, by which model(xt, x0=None, rows=None) takes ids too: the
    model's objective makes a View of them."""
    if args and isinstance(args[0], View):
        return None
    view = model.objective.view(*args, **kwargs)
    if not torch.compiler.is_compiling():
        check_length(model, args[0] if args else kwargs["xt"], "xt")
    return (view,), {}


# ---- Models and tokenizers
def check_mode(model):
    """Raise UserError for a model whose dropout is on: its predictions are random."""
    modules = model.modules() if getattr(model, "training", False) else ()
    if any(getattr(module, "p", 0) for module in modules if "Dropout" in type(module).__name__):
        raise UserError("the model is in training mode, with dropout; call model.eval() first")


def check_tokenizer(tokenizer, model):
    """Raise UserError for a tokenizer that is not the model's, or dropout that is on."""
    check_mode(model)
    check_vocabulary(tokenizer, model)


def check_vocabulary(tokenizer, model):
    """Raise UserError for a tokenizer that is not the model's."""
    same = tokenizer.vocab_size == model.vocab_size
    same &= getattr(model, "vocab", tokenizer.vocab) == tokenizer.vocab
    if not same or model.objective.end_id not in (-1, tokenizer.end_id):
        raise UserError("the tokenizer is of another model; give that of mdlm.load")


def check_gaps(model, x, fill):
    """Raise UserError if the gaps `fill` (B, T) of x (B, T) have text after them that the model
    does not see. (An autoregressive one fills any, from what precedes it.)"""
    if is_causal(model) or can_fill(model, x, fill):
        return
    what = f"this model, with --block_length={model.config.block_length},"
    raise UserError(f"{what} does not see text after a gap; train it with --infill_share too")


# ---- Calls
def row_numbers(samples, B, device):
    """The numbers (B,) of the rows as int64: 0 .. B-1, or `samples`."""
    if samples is None:
        return torch.arange(B, device=device)
    numbers = torch.as_tensor(samples).to(torch.int64)
    if numbers.shape != (B,) or (B and not 0 <= numbers.min() <= numbers.max() < 1 << 32):
        raise UserError(f"samples={shown(samples)} must be {B} whole numbers from 0 to 2^32 - 1")
    return numbers.to(device)


def check_filling(model, x, fill, samples, end_id=None, forbid=(), allowed=None):
    """Check the arguments of sample.unmask and generate; returns (samples (B,), end_id, forbid)."""
    check_mode(model)
    check_ids(model, x)
    V = model.vocab_size
    if fill is not None and (fill.dtype != torch.bool or fill.shape != x.shape):
        raise UserError(f"fill must be a bool tensor {tuple(x.shape)}")
    if end_id is not None:
        end_id = whole_number("end_id", end_id, 0, V - 1)
    forbid = sorted({whole_number("an id in forbid", i, 0, V - 1) for i in forbid if i is not None})
    if len(forbid) == V:
        raise UserError(f"forbid has all {V} ids, so nothing can be drawn; leave some out")
    for place, ids in (allowed or {}).items():
        whole_number("a position in allowed", place, 0, x.shape[1] - 1)
        if ids.dtype != torch.bool or ids.shape != (V,):
            raise UserError(f"allowed must have bool tensors ({V},), but at {place} it does not")
        if not ids.cpu().index_fill(0, torch.tensor(forbid, dtype=torch.int64), False).any():
            raise UserError(f"nothing is allowed at {place}, or it is forbidden; allow an id")
    return row_numbers(samples, len(x), x.device), end_id, forbid


def check_reversing(model, x, steps):
    """Check the arguments of mdlm.generate."""
    check_mode(model)
    check_ids(model, x)
    check_length(model, x)
    whole_number("steps", steps, 1)


def check_evaluation(model, windows, scored):
    """Check the arguments of mdlm.evaluate; returns scored (W, T) bool, the objective's default."""
    check_ids(model, windows, "windows", masks=scored is not None)
    check_length(model, windows, "windows")
    W, T = windows.shape
    L = model.config.block_size
    objective = model.objective
    if objective.n_texts > 1 and T != L:
        raise UserError(f"windows has {T} tokens; a model of blocks needs all {L} of its context")
    if objective.n_texts > 1 and scored is not None and not scored.all():
        raise UserError("scored is not for a model of blocks; leave it out")
    if scored is None:
        scored = objective.scored_mask(windows)
    if (scored & (windows == model.mask_id)).any():
        raise UserError("windows has [MASK] where a token is scored; give the true tokens there")
    if not W or not scored.any(1).all():
        raise UserError("a window has no token to score, or there are no windows")
    return scored
