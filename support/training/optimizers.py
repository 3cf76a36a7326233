"""A run's optimizers and its average; their rates are tensors, for a CUDA graph to read."""

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from support.devices import is_async
from support.training import shards
from support.training.muon import Muon


def effects(config):
    """Rules of flags.check_effects."""
    why = f"with --optimizer={config.optimizer}; leave it out, or give --optimizer=muon"
    return [("muon_lr", config.optimizer == "muon", why)]


def make_optimizers(model, config, device):
    """Muon for the matrices of the layers and AdamW for the rest, or AdamW alone: a list."""
    matrices = []
    rest = []
    rows = {}
    for name, p in model.named_parameters():
        is_matrix = name.startswith("layers.") and "adaln" not in name and "conv" not in name
        (matrices if is_matrix and config.optimizer == "muon" else rest).append(p)
        if name.endswith("qkv.weight"):  # each head's queries, keys and values apart
            rows[p] = config.n_embd // config.n_head
    adamw = torch.optim.AdamW(
        rest,
        config.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.0 if matrices else config.weight_decay,
        fused=device.type in ("cuda", "cpu"),
        capturable=device.type == "cuda",
    )
    optimizers = [adamw]
    if matrices:
        optimizers = [Muon(matrices, config.muon_lr, config.weight_decay, rows=rows), adamw]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=device if is_async(device) else "cpu")
    return optimizers


def clip_gradients(params, limit):
    """Scale the gradients down to a total norm of `limit` (0: never); returns the norm before."""
    norm = get_total_norm([p.grad for p in params if p.grad is not None])
    total = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # with --shard
    if limit and (is_async(total.device) or total > limit):  # a GPU's norm is not read
        clip_grads_with_norm_(params, limit, norm)
    return total


def set_rates(run, step, scale):
    """Fill in the learning rates, `scale` of their peaks, and the EMA's share of new weights."""
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"].fill_(scale * optimizer.defaults["lr"])
    # Shorten the EMA window as the learning rate decays: it would lag behind the weights.
    new = (1 - min(run.config.ema, (1 + step) / (10 + step))) / max(scale, 1e-6)
    run.new_share.fill_(min(new, 1))


def average(averaged, weights, share):
    """Move averaged weights towards the new ones, by a share of the way, a 0-dim tensor."""
    torch._foreach_lerp_(averaged, weights, [share] * len(weights))


@torch.no_grad()
def update(run):
    """Update the weights by their gradients, and then their average."""
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if run.averaged is not run.model:
        both = ([shards.local(p) for p in m.parameters()] for m in (run.averaged, run.model))
        run.average(*both, run.new_share)
