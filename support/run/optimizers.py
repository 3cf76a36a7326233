"""The optimizers of a run, their learning rates, and the moving average (EMA) of the weights.

Learning rates and the EMA weight are tensors, not numbers, so that a CUDA graph reads their current
values.
"""

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from nanomdlm.support.cli.devices import is_async
from nanomdlm.support.run.muon import Muon


def make_optimizers(model, config, device):
    """Return a list of optimizers that together update all parameters.

    With --optimizer=muon: Muon for the matrices of the layers, AdamW for everything else.
    Otherwise AdamW alone.
    """
    matrices = []
    others = []
    rows = {}
    in_layers = set(model.layers.parameters())
    for name, p in model.named_parameters():
        is_matrix = p in in_layers and p.dim() == 2 and "adaln" not in name
        (matrices if is_matrix and config.optimizer == "muon" else others).append(p)
        if name.endswith("qkv.weight"):  # orthogonalize each head's q, k and v separately
            rows[p] = config.n_embd // config.n_head
    adamw = torch.optim.AdamW(
        others,
        config.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.0 if matrices else config.weight_decay,
        fused=device.type in ("cuda", "cpu"),
        capturable=device.type == "cuda",
    )
    optimizers = [adamw]
    if matrices:
        rates = (config.muon_lr, config.weight_decay)
        optimizers = [Muon(matrices, *rates, rows=rows), adamw]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=device if is_async(device) else "cpu")
    return optimizers


def scale_gradients(tensors, factor):
    """Multiply tensors in place by a 0-dim tensor."""
    torch._foreach_mul_(tensors, factor)


def clip_gradients(params, limit, scale=scale_gradients):
    """Scale the gradients down to a total norm of at most `limit`; return the norm before that.

    limit: 0 turns clipping off.
    """
    grads = [p.grad for p in params if p.grad is not None]
    norm = get_total_norm(grads)
    total = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor with --shard
    if limit and is_async(total.device) and total is norm:
        # Comparing with the limit would make Python wait for the norm, so always scale: gradients
        # below the limit stay as they are.
        scale(grads, (limit / (norm + 1e-6)).clamp(max=1))
    elif limit and (is_async(total.device) or total > limit):
        clip_grads_with_norm_(params, limit, norm)
    return total


def clip(run):
    """Scale the gradients down to a norm of --grad_clip at most; return the norm before that."""
    params = list(run.model.parameters())
    return clip_gradients(params, run.config.grad_clip, run.engine.scale_gradients)


def set_rates(run, step, scale):
    """Set the learning rates and the EMA weight for a step.

    scale: the learning rate as a fraction of its peak, from the schedule.
    """
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"].fill_(scale * optimizer.defaults["lr"])
    # Shorten the EMA window as the learning rate decays: it would lag behind the weights.
    new = (1 - min(run.config.ema, (1 + step) / (10 + step))) / max(scale, 1e-6)
    run.engine.ema_weight.fill_(min(new, 1))


def average(averaged, weights, new_weight):
    """Update averaged weights in place: averaged += new_weight * (weights - averaged).

    new_weight: a 0-dim tensor.
    """
    torch._foreach_lerp_(averaged, weights, [new_weight] * len(weights))


def average_to_compile(averaged, weights, new_weight):
    """`average` in operations that torch.compile makes one kernel of; of lerp it makes many."""
    differences = torch._foreach_sub(weights, averaged)
    torch._foreach_add_(averaged, torch._foreach_mul(differences, new_weight))


@torch.no_grad()
def update(run):
    """Make an optimizer step, reset the gradients, and update the averaged weights."""
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if run.averaged is not run.model:  # they are the same with --ema=0
        both = [[*m.parameters()] for m in (run.averaged, run.model)]
        if run.config.shard:  # each rank has a part of them
            both = [[p.to_local() for p in params] for params in both]
        run.engine.average(*both, run.engine.ema_weight)
