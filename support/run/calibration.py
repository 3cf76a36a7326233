"""Temperature calibration: one number per network, by which its logits are divided.

A network that saw its training text many times is overconfident. A temperature above 1 corrects
that (Guo et al., 1706.04599). It is fitted to text that the network has not learned, and kept in
config.json with its source: {"temperature": 1.1, "source": ...}. Likelihoods and rankings use it;
the sampler does not, because its texts do not improve (results/sampling.md).
"""

import copy
import weakref
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from nanomdlm.support.abilities import uncompiled
from nanomdlm.support.cli import terminal
from nanomdlm.support.infill.model_calls import checked, group_size
from nanomdlm.support.run.evaluation import eval_mode, stratified_counts

# Temperatures that `fit` compares. A network that has hardly learned may need a very low one.
GRID = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0]
GRID += [2.5, 3.0, 4.0, 5.0]


# ---- Using it
def at_temperature(model, temperature):
    """A copy of a network, hooks included, whose logits are divided; it shares all parameters."""
    model = uncompiled(model)
    other = copy.copy(model)
    other._forward_hooks = OrderedDict(model._forward_hooks)  # copy.copy shares it
    other.register_forward_hook(lambda module, args, logits: logits / temperature)
    return other


def temperature_of(model):
    """The temperature of a network, or the list of those of an Ensemble, if they differ."""
    if hasattr(model, "networks"):
        all_of_them = [temperature_of(network) for network in model.networks]
        return all_of_them if len(set(all_of_them)) > 1 else all_of_them[0]
    return (getattr(model, "calibration", None) or dict(temperature=1.0))["temperature"]


# network -> (its temperature, its copy): one copy, so that a server can merge calls
CALIBRATED = weakref.WeakKeyDictionary()


def calibrated(model):
    """The model with the temperature of each of its networks; itself if they have none.

    model: a network, an Ensemble, or what stands in for one of them
    """
    if not isinstance(model, nn.Module):
        return model.calibrated() if hasattr(model, "calibrated") else model
    temperature = temperature_of(model)
    if temperature == 1 or getattr(model, "is_calibrated", False):
        return model
    if CALIBRATED.get(model, (None,))[0] != temperature:
        is_one = not hasattr(model, "networks")
        other = at_temperature(model, temperature) if is_one else model.replaced(calibrated)
        other.is_calibrated = True  # its `calibration` stays, because a checkpoint keeps it
        CALIBRATED[model] = (temperature, other)
    return CALIBRATED[model][1]


# ---- Fitting it
@torch.no_grad()
def fit(model, windows, passes=8, seed=0):
    """The temperature, to two digits, with the lowest NELBO (NLL) of windows (W, T).

    One pass computes the bound at each temperature of GRID, with the same masks; the minimum of a
    parabola through the best three in 1 / temperature, in which cross-entropy is convex.
    """
    objective = model.objective
    W = len(windows)
    n = objective.n_texts
    scored = objective.scored_mask(windows)
    lengths = scored.unflatten(1, (n, -1)).sum(2).cpu()
    is_exact = objective.metric == "nll"
    counts = lengths[None] if is_exact else stratified_counts(lengths, passes, seed)
    B = group_size(model, windows.device)
    totals = torch.zeros(len(GRID), dtype=torch.float64)
    with eval_mode(model), terminal.bar(total=len(counts) * W, desc="calibrating") as bar:
        for k, count in enumerate(counts):
            for some in torch.arange(W).split(B):
                samples = some.to(windows.device)
                key = dict(seed=seed ^ 0x5EED, step=k, samples=samples, scored=scored[samples])
                numbers = count[some].flatten().to(windows.device)
                made = objective.batch(model.ops, windows[samples], numbers, **key)
                made = made.without_padding()
                logits = checked(model(made.view))
                for i, temperature in enumerate(GRID):
                    ce = F.cross_entropy(logits / temperature, made.targets, reduction="none")
                    totals[i] += len(some) * (ce * made.weights).sum().item()
                bar.update(len(some))
    best = int(totals.argmin())
    if best in (0, len(GRID) - 1):
        return GRID[best]
    x = [1 / t for t in GRID[best - 1 : best + 2]]
    y = totals[best - 1 : best + 2].tolist()
    left = (y[1] - y[0]) / (x[1] - x[0])  # slopes between neighbors
    right = (y[2] - y[1]) / (x[2] - x[1])
    curvature = (right - left) / (x[2] - x[0])
    lowest = (x[0] + x[1]) / 2 - left / (2 * curvature) if curvature > 0 else x[1]
    return round(1 / min(max(lowest, x[2]), x[0]), 2)
