"""Checks of the arguments of Python calls: a mistake is a UserError (a ValueError), one sentence.

They run once per call, before any work. Nothing here runs in a training step.
"""

import math
import operator
import re

import torch

from support.abilities import can_fill, is_causal
from support.errors import UserError
from support.settings import plain, shown
from support.view import View

INT64 = (1 << 63) - 1


def whole_number(name, value, low, high=INT64):
    """`value`, also of numpy or PyTorch, as an int; UserError unless it is from low to high."""
    value = plain(value)
    if type(value) is not int or not low <= value <= high:
        most = f"to {high}" if high < INT64 else "on"
        raise UserError(f"{name}={shown(value)} must be a whole number from {low} {most}")
    return value


def truth(name, value):
    """`value`, also of numpy or PyTorch, as a bool; UserError unless it is one."""
    value = plain(value)
    if type(value) is not bool:
        raise UserError(f"{name}={shown(value)} must be True or False")
    return value


def kind_of(value):
    """A few words about an argument that is not accepted."""
    if isinstance(value, torch.Tensor):
        sparse = "sparse " * (value.layout != torch.strided)
        empty = " without values, on meta" * value.is_meta
        return f"a {sparse}tensor {tuple(value.shape)} of {str(value.dtype)[6:]}{empty}"
    return f"of type {type(value).__name__}"


def check_text(text):
    """The text; UserError unless it is a string that UTF-8 can encode."""
    if not isinstance(text, str) or re.search("[\ud800-\udfff]", text):
        raise UserError("the text is no string, or not UTF-8; convert it, or set a UTF-8 locale")
    return text


def accepted_ids(most, mask_id):
    """The ids from 0 to `most`, and which of them is [MASK], in words."""
    which = "which is [MASK]" if mask_id == most else f"[MASK] is {mask_id}"
    return f"0 to {most}, {which}"


def last_id(model):
    """The largest id that a model takes: [MASK] of ours, a token of an encoder of others."""
    return max(model.vocab_size - 1, model.mask_id)


def whole_ids(ids, most, mask_id):
    """Ids (n,) of a list, an array or a tensor as ints; UserError unless they are 0 to `most`.

    mask_id: which of them is [MASK], for the message.
    """
    if isinstance(ids, str) or len(getattr(ids, "shape", [1])) != 1:
        raise UserError(f"ids must be a list or tensor (n,) of whole numbers, not {kind_of(ids)}")
    try:
        ids = list(ids.tolist() if hasattr(ids, "tolist") else ids)
        if any(type(plain(i)) is bool for i in ids):  # a mask is no list of ids
            raise TypeError
        ids = [operator.index(i) for i in ids]
    except (TypeError, RuntimeError, ValueError):  # no iterable; floats; tensors of several numbers
        raise UserError("ids must be whole numbers (n,); give those that encode returned") from None
    for i in ids if ids and (min(ids) < 0 or max(ids) > most) else ():
        if not 0 <= i <= most:
            raise UserError(f"{i} is no id of this tokenizer; give {accepted_ids(most, mask_id)}")
    return ids


def is_tensor(value, dtypes, dim):
    """Whether it is a dense tensor with values, of one of these dtypes and with `dim` axes."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta:
        return False
    return value.dtype in dtypes and value.dim() == dim


def check_model(model):
    """Raise UserError unless it is a model, as mdlm.load returns it."""
    if not hasattr(model, "mask_id") or not hasattr(model, "config"):
        raise UserError(f"model is {kind_of(model)}; give the first thing that mdlm.load returns")
    if isinstance(model, torch.nn.Module) and next(model.parameters(), torch.ones(())).is_meta:
        raise UserError("model is on meta, without values; give the first thing of mdlm.load")


def check_tokenizer(tokenizer, model):
    """Raise UserError unless it is a tokenizer, as mdlm.load returns it, and fits the model."""
    check_model(model)
    if not hasattr(tokenizer, "encode") or not hasattr(tokenizer, "end_id"):
        wrong = f"tokenizer is {kind_of(tokenizer)}"
        raise UserError(f"{wrong}; give the second thing that mdlm.load returns")
    fix = "give the one that mdlm.load returns with this model"
    if tokenizer.vocab_size != model.vocab_size:
        given = f"the tokenizer has {tokenizer.vocab_size} ids, the model {model.vocab_size}"
        raise UserError(f"{given}; {fix}")
    if model.objective.end_id not in (-1, tokenizer.end_id):
        given = f"the tokenizer's [END] is {tokenizer.end_id}, the model's {model.objective.end_id}"
        raise UserError(f"{given}; {fix}")


def check_ids(model, x, name="x", masks=True):
    """Raise UserError unless x is (B, T) int64 of tokens, or of [MASK] if masks."""
    check_model(model)
    most = last_id(model) if masks else model.vocab_size - 1
    accepted = accepted_ids(most, model.mask_id) if masks else f"0 to {most}"
    if not is_tensor(x, [torch.int64], 2):
        wrong = f"{name} must be a tensor (B, T) of int64 ids"
        raise UserError(f"{wrong}, not {kind_of(x)}; give {accepted}")
    check_device(model, x, name)
    low, high = x.aminmax() if x.numel() else (0, 0)
    if low < 0 or high > most:
        raise UserError(f"{name} has ids from {low} to {high}; give {accepted}")
    if not masks and (x == model.mask_id).any():
        raise UserError(f"{name} has {model.mask_id}, which is [MASK]; give the true tokens")


def check_device(model, x, name):
    """Raise UserError if x is not where the model is."""
    weights = next(model.parameters(), x) if isinstance(model, torch.nn.Module) else x
    if x.device != weights.device:
        raise UserError(f"{name} is on {x.device}, the model on {weights.device}; move one of them")


def check_length(model, x, name="x"):
    """Raise UserError if x (B, T) is longer than the context."""
    L = model.config.block_size
    if x.shape[1] > L:
        raise UserError(f"{name} has {x.shape[1]} tokens, the context only {L}; cut it")


def check_mask(mask, x, name):
    """Raise UserError unless `mask` is None or a bool tensor of the shape of x."""
    if mask is None:
        return
    if not is_tensor(mask, [torch.bool], x.dim()) or mask.shape != x.shape:
        wrong = f"{name} must be a bool tensor {tuple(x.shape)}"
        raise UserError(f"{wrong} like the ids, not {kind_of(mask)}")


def check_generator(generator, on_cpu=False):
    """Raise UserError unless it is None or a torch.Generator (on_cpu: of the CPU)."""
    if generator is not None and not isinstance(generator, torch.Generator):
        wrong = f"generator must be a torch.Generator or None, not {kind_of(generator)}"
        raise UserError(f"{wrong}; a number is a seed: torch.Generator().manual_seed(0)")
    if on_cpu and generator is not None and generator.device.type != "cpu":
        raise UserError(f"generator is on {generator.device}; give one on the CPU")


def row_numbers(samples, B, device):
    """The numbers (B,) of the rows as int64: 0 .. B-1, or `samples`, checked."""
    if samples is None:
        return torch.arange(B, device=device)
    try:
        numbers = torch.as_tensor(samples)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.zeros(0, 0)
    is_whole = not (numbers.is_floating_point() or numbers.is_complex())
    bad = numbers.is_meta or not is_whole or numbers.dtype == torch.bool
    numbers = numbers if bad else numbers.to(torch.int64)  # narrow and unsigned ones compare badly
    if bad or numbers.shape != (B,) or (B and not 0 <= numbers.min() <= numbers.max() < 1 << 32):
        wrong = f"samples must be {B} whole numbers from 0 to {(1 << 32) - 1}, one for each row"
        what = shown(samples) if isinstance(samples, (list, tuple)) else kind_of(samples)
        raise UserError(f"{wrong}, not {what}")
    return numbers.to(device)


def check_ends(model, end_id, forbid):
    """Check end_id and forbid; returns (end_id or None, the list of ids that are never drawn)."""
    V = model.vocab_size
    if end_id is not None:
        end_id = whole_number("end_id", end_id, 0, V - 1)
    if isinstance(forbid, (str, bytes)) or not hasattr(forbid, "__iter__"):
        raise UserError(f"forbid must be a list of ids, not {kind_of(forbid)}")
    try:
        ids = {whole_number("an id in forbid", i, 0, V - 1) for i in forbid if i is not None}
    except TypeError:  # a tensor without axes
        raise UserError(f"forbid must be a list of ids, not {kind_of(forbid)}") from None
    if len(ids) == V:
        raise UserError(f"forbid has all {V} ids, so nothing can be drawn; leave some out")
    return end_id, sorted(ids)


def check_allowed(model, x, allowed):
    """Raise UserError unless it is None or a dict: position -> (V,) bool, the ids to draw from."""
    V = model.vocab_size
    wrong = f"allowed must be a dict of positions below {x.shape[1]} to bool tensors ({V},)"
    if allowed is not None and not isinstance(allowed, dict):
        raise UserError(f"{wrong}, not {kind_of(allowed)}")
    for place, ids in (allowed or {}).items():
        whole_number("a position in allowed", place, 0, x.shape[1] - 1)
        if not is_tensor(ids, [torch.bool], 1) or len(ids) != V:
            raise UserError(f"{wrong}; at {place} it is {kind_of(ids)}")
        if not ids.any():
            raise UserError(f"allowed has no id at position {place}; leave it out, or allow one")


def check_filling(model, x, fill, samples, end_id=None, forbid=(), allowed=None, expect=None):
    """Check the arguments of sample.unmask and generate; returns (samples (B,), end_id, forbid)."""
    check_ids(model, x)
    check_mask(fill, x, "fill")
    check_allowed(model, x, allowed)
    end_id, forbid = check_ends(model, end_id, forbid)
    for place, ids in (allowed or {}).items():
        if not ids.cpu().index_fill(0, torch.tensor(forbid, dtype=torch.int64), False).any():
            raise UserError(f"forbid has all ids that allowed has at {place}; leave one out of it")
    if expect is not None and not callable(expect):
        raise UserError(f"expect must be a function or None, not {kind_of(expect)}")
    return row_numbers(samples, len(x), x.device), end_id, forbid


def check_reversing(model, x, steps, generator):
    """Check the arguments of mdlm.generate; returns steps."""
    check_ids(model, x)
    check_length(model, x)
    check_generator(generator, on_cpu=True)
    return whole_number("steps", steps, 1, 1 << 31)


def check_evaluation(model, windows, passes, seed, batch_size, observe, deadline, scored):
    """Check the arguments of mdlm.evaluate; returns (passes, seed, batch_size)."""
    if observe is not None and not callable(observe):
        raise UserError(f"observe must be a function, not {kind_of(observe)}")
    if type(plain(deadline)) not in (int, float) or math.isnan(plain(deadline)):
        raise UserError(f"deadline must be a time.monotonic(), not {shown(deadline)}")
    check_ids(model, windows, "windows", masks=scored is not None)
    check_length(model, windows, "windows")
    W, T = windows.shape
    if not windows.numel():
        raise UserError(f"windows is empty, {W} x {T}; give at least a window of a token")
    L = model.config.block_size
    n_texts = model.objective.n_texts
    if n_texts > 1 and T != L:
        raise UserError(f"windows has {T} tokens; a model of blocks needs all {L} of its context")
    if isinstance(scored, torch.Tensor):
        check_device(model, scored, "scored")
    check_mask(scored, windows, "scored")
    if scored is not None and (scored & (windows == model.mask_id)).any():
        raise UserError("windows has [MASK] where a token is scored; give the true tokens there")
    counts = (model.objective.scored_mask(windows) if scored is None else scored).sum(1)
    if not counts.all():
        raise UserError(f"window {int((counts == 0).nonzero()[0])} has no token to score")
    if n_texts > 1 and scored is not None and not scored.all():
        raise UserError("scored is not for a model of blocks; leave it out")
    passes = whole_number("passes", passes, 1, 1 << 20)
    return passes, whole_number("seed", seed, 0), whole_number("batch_size", batch_size, 1)


def check_gaps(model, x, fill):
    """Raise UserError if the gaps `fill` (B, T) of x (B, T) have text after them that the model
    does not see. (An autoregressive one fills any, from what precedes it.)"""
    if is_causal(model) or can_fill(model, x, fill):
        return
    what = f"this model (--block_length={model.config.block_length}) does not see text in blocks"
    learned = "mdlm.py --infill_share by mdlm.load(path, whole=True)"
    fix = f"take one without blocks, or one of {learned}"
    raise UserError(f"{what} after a gap; {fix}")


def to_view(model, args, kwargs):
    """Forward pre-hook of loaded models, by which model(xt, x0=None, rows=None) takes ids too: the
    model's objective makes a View of them. Raises UserError for ids that no call can take.
    """
    if args and isinstance(args[0], View):
        return None
    arguments = named(*args, **kwargs)
    if not torch.compiler.is_compiling():
        check_input(model, *arguments)
    return (model.objective.view(*arguments),), {}


def named(xt, x0=None, rows=None):
    return xt, x0, rows


def check_input(model, xt, x0, rows):
    """Raise UserError for ids (B, T), text (B, T) or rows (n,) that a model cannot take.

    The range of ids on a GPU is not read, as Python would wait for it.
    """
    most = last_id(model)
    kinds = (torch.int64, torch.int32)
    if not is_tensor(xt, kinds, 2):
        wrong = f"xt must be a tensor (B, T) of int64 ids, not {kind_of(xt)}"
        raise UserError(f"{wrong}; give {accepted_ids(most, model.mask_id)}")
    if not xt.numel():
        raise UserError(f"xt is empty, {tuple(xt.shape)}; give at least a row of a token")
    if x0 is not None and (not is_tensor(x0, kinds, 2) or x0.shape != xt.shape):
        raise UserError(f"x0 must be ids {tuple(xt.shape)} like xt, or None, not {kind_of(x0)}")
    if rows is not None and not is_tensor(rows, kinds, 1):
        raise UserError(f"rows must be a tensor (n,) of int64, or None, not {kind_of(rows)}")
    check_device(model, xt, "xt")
    check_length(model, xt, "xt")
    if xt.device.type != "cpu":
        return
    for name, ids in (("xt", xt), ("x0", x0)):
        if ids is not None and not 0 <= ids.min() <= ids.max() <= most:
            accepted = accepted_ids(most, model.mask_id)
            raise UserError(f"{name} has ids from {ids.min()} to {ids.max()}; give {accepted}")
    if rows is not None and rows.numel() and not 0 <= rows.min() <= rows.max() < xt.numel():
        raise UserError(f"rows has numbers that are not from 0 to {xt.numel() - 1}")
