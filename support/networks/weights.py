"""The weights of a folder of Hugging Face, read one by one, so that none is needed twice.

`on_meta` makes a network whose parameters have no memory; `WeightFiles` reads single tensors of the
safetensors; `fill` gives memory to a layer. So with --shard no process holds the whole network.
"""

import contextlib

import torch
import torch.nn as nn
from safetensors import safe_open

from nanomdlm.support.cli import files
from nanomdlm.support.errors import UserError
from nanomdlm.support.networks import explain
from nanomdlm.support.run.checkpoint import explain_safetensors


class WeightFiles:
    """The safetensors of a folder; at first only their headers are read.

    Raises UserError for files that are missing, damaged, or not regular (a FIFO would block).
    """

    def __init__(self, folder):
        self.folder = folder
        self.prefix = "."  # of names in the library; those in the files may have it or lack it
        self.paths = {}  # name in the files -> its file
        self.shapes = {}
        for path in weight_files(folder):
            if not path.is_file():
                raise UserError(f"{path} is missing, or not a file; copy the whole model again")
            with explain_safetensors(path), safe_open(path, "pt") as f:
                for name in f.keys():  # noqa: SIM118 (it is no dict)
                    self.paths[name] = path
                    self.shapes[name] = f.get_slice(name).get_shape()

    def locate(self, names):
        """The name in the files of a tensor that has one of these names in the library; or None."""
        for name in names:
            for each in (name, name.removeprefix(self.prefix), self.prefix + name):
                if each in self.paths:
                    return each
        return None

    def find(self, names, shape):
        """The tensor, float32, that has one of these names in the library; None: there is none."""
        name = self.locate(names)
        if name is None:
            return None
        with safe_open(self.paths[name], "pt") as f:
            return f.get_tensor(name).float()

    def check_shapes(self, body, prefix=None):
        """Raise UserError if a parameter of `body`, on the meta device, has another shape here.

        So a config.json cannot ask for more memory than its weights are. prefix: of the names,
        which the files may have or lack; that of the library for all but the head, unless given
        """
        self.prefix = f"{prefix or body.base_model_prefix}."
        for name, p in body.named_parameters():
            stored = self.locate([name])
            if stored and self.shapes[stored] != list(p.shape):
                sizes = f"{self.shapes[stored]}, but config.json makes it {list(p.shape)}"
                raise UserError(f"{self.folder}: {stored} is {sizes}; copy the whole model again")


def weight_files(folder):
    """The paths of the safetensors of a folder."""
    whole = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if (folder / "adapter_config.json").exists():  # the library would load other weights too
        fix = "merge them into the weights (merge_and_unload of peft) and save that"
        raise UserError(f"{folder} has adapters of peft; {fix}")
    if whole.exists():
        return [whole]
    if index.exists():
        content = files.read_json(index, "index of weights")
        with explain(f"{index} names no files"):
            return sorted({folder / name for name in content["weight_map"].values()})
    pickles = [*folder.glob("*.bin"), *folder.glob("*.pt")]
    kind = f", only {pickles[0].name}, a pickle, which is never loaded" if pickles else ""
    fix = "save it as safetensors: save_pretrained of transformers does"
    raise UserError(f"{folder} has no model.safetensors{kind}; {fix}")


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


def shallow(config):
    """The configuration of a network with as few layers as have all kinds of them, at least 2."""
    depth = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""] * depth
    n = min(depth, max(2, 1 + max(kinds.index(kind) for kind in kinds)))
    settings = config.to_dict()
    settings |= {k: v[:n] for k, v in settings.items() if isinstance(v, list) and len(v) == depth}
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return type(config).from_dict(settings | {name: n})


@torch.no_grad()
def fill(model, find, prefix=""):
    """Give the parameters of a Pretrained memory, and the values of find(name, shape); buffers too.

    prefix: beginning of the names of those that are filled. What find does not know (None) stays as
    it is.
    """
    filled = {}  # one that has several names is one
    for name, t in nn.Module.state_dict(model, keep_vars=True).items():
        is_parameter = isinstance(t, nn.Parameter)
        if not name.startswith(prefix) or (is_parameter and not t.is_meta):
            continue
        value = filled[id(t)] if id(t) in filled else find(name, t.shape)
        if value is not None and is_parameter:
            place, _, key = name.rpartition(".")
            if id(t) not in filled:
                filled[id(t)] = nn.Parameter(value, requires_grad=t.requires_grad)
            model.get_submodule(place)._parameters[key] = filled[id(t)]
        elif value is not None:
            t.copy_(value)
