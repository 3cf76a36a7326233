"""What a model can do, by its objective: programs test for abilities, not for kinds of models."""


def piece_size(model):
    """Return how many tokens the model writes at a time: the whole context, a block, or one."""
    positions, _ = model.objective.pieces(model.config.block_size, 1)[0]
    return len(positions)


def fills_gaps(model):
    """Return whether the model sees the text after a gap: it writes a text as one piece."""
    return piece_size(model) == model.config.block_size


def is_causal(model):
    """Return whether one call predicts all tokens, each given those before it."""
    return model.objective.metric == "nll"


def knows_lengths(model):
    """Return whether the length of a text is known before it is written: [END] fills it up."""
    return model.objective.pad_id != model.mask_id


def can_fill(model, x, fill):
    """Return whether the model sees all text around the gaps `fill` (B, T) of x (B, T).

    It does not if a later piece of the text has some, as a model of blocks or an autoregressive one
    writes piece by piece.
    """
    pieces = model.objective.pieces(x.shape[1], 1)
    if len(pieces) == 1 or not x.numel():
        return True
    sizes = x.new_tensor([len(positions) for positions, _ in pieces])
    piece = x.new_tensor(range(len(pieces))).repeat_interleave(sizes)  # (T,)
    last = piece.where((x != model.mask_id) & ~fill, 0).amax(1, keepdim=True)
    return not (fill & (piece < last)).any()


def uncompiled(model):
    """Return the module that torch.compile(model) wraps.

    Attributes that are set in the wrapper, or in a copy of it, are set in the module.
    """
    return getattr(model, "_orig_mod", model)
