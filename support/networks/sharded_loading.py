"""Hugging Face networks that no process has to hold whole (--shard).

`on_meta` makes a network whose parameters have no memory; `WeightFiles` reads single tensors of
its safetensors, so that layers can be filled and spread over the ranks one by one.
"""

import contextlib
import json

import torch
import torch.nn as nn
from safetensors import safe_open

from nanomdlm.support.errors import UserError
from nanomdlm.support.networks import lora


@contextlib.contextmanager
def on_meta():
    """Context manager: parameters of new modules are on the meta device; buffers are not."""
    register = nn.Module.register_parameter

    def register_on_meta(module, name, p):
        if p is not None and not p.is_meta:
            p = nn.Parameter(p.to("meta"), requires_grad=p.requires_grad)
        register(module, name, p)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


class WeightFiles:
    """The tensors of a network, each read when it is asked for.

    folder: of Hugging Face, whose files have been checked. prefix: the library's name for all but
    the head, which files may have or lack.
    """

    def __init__(self, folder, prefix):
        self.folder = folder
        self.prefix = f"{prefix}."
        self.paths = {}  # name in the files -> its file
        index = folder / "model.safetensors.index.json"
        whole = folder / "model.safetensors"
        if whole.exists():
            with safe_open(whole, "pt") as f:
                self.paths = dict.fromkeys(f.keys(), whole)
        else:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self.paths = {name: folder / file for name, file in names.items()}

    def find(self, names):
        """The tensor, float32, of a parameter that has one of these names in the library."""
        for name in names:
            bare = name.removeprefix(self.prefix)
            for each in (name, bare, self.prefix + name):
                if each in self.paths:
                    return self.read(each)
        what = f"{self.folder} has no weights of the name {names[0]}, by which ranks read them"
        raise UserError(f"{what}; leave --shard out")

    def read(self, name):
        with safe_open(self.paths[name], "pt") as f:
            t = f.get_tensor(name)
        if not t.isfinite().all():
            what = f"{self.folder}: {name} has numbers that are not finite"
            raise UserError(f"{what}; copy it again")
        return t.float()


def shallow(settings, config):
    """Settings of the same network with the fewest layers, at least 2, that include all kinds."""
    name = getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    depth = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""] * depth
    n = min(depth, max(2, 1 + max(kinds.index(kind) for kind in kinds)))
    lists = {k: v[:n] for k, v in settings.items() if isinstance(v, list) and len(v) == depth}
    return settings | lists | {name: n}


@torch.no_grad()
def fill(model, module, find):
    """Give the parameters of a module of `model` memory, and the values of find(name, shape).

    name: of the parameter in `model`. One for which find returns None stays without memory.
    """
    names = {id(p): name for name, p in lora.all_parameters(model)}
    filled = {}
    for each in module.modules():
        for key, p in [*each._parameters.items()]:
            if p is None or not p.is_meta:
                continue
            if id(p) not in filled:
                value = find(names[id(p)], p.shape)
                kept = p if value is None else nn.Parameter(value, requires_grad=p.requires_grad)
                filled[id(p)] = kept
            each._parameters[key] = filled[id(p)]
