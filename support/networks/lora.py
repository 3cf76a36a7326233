"""LoRA (Hu et al., 2106.09685) with the peft library: --lora=R trains few weights of a network.

The trained weights are adapters of rank R, parallel to each linear map of the layers, and the
embedding of [MASK]. The network then reports only these as its parameters (named_parameters,
state_dict), so optimizers, averages, gradients and checkpoints hold only trained weights, without
special code. PyTorch's FSDP asks each module, so --shard shards the other weights too.

A checkpoint's network.json names the folder of the weights and their checksums. `merge` adds the
adapters to the weights, for an export.
"""

import copy
import hashlib
import zlib
from pathlib import Path

import torch
import torch.nn as nn

from nanomdlm.support.cli.environment import optional
from nanomdlm.support.errors import UserError


def library():
    """The peft library; UserError if it is missing."""
    return optional("peft", "--lora")


# ---- Which weights
def identity(folder):
    """{"folder": its path, "sha256": {name of a file: its checksum}} of the weights in a folder."""
    sums = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with open(path, "rb") as f:
            sums[path.name] = hashlib.file_digest(f, "sha256").hexdigest()
    return dict(folder=str(Path(folder).resolve()), sha256=sums)


def check_identity(base, path):
    """Raise UserError unless the weights that a network.json names exist and are unchanged.

    base: what `identity` gave; path: the network.json
    """
    known = isinstance(base, dict) and isinstance(base.get("folder"), str)
    if not known or not isinstance(base.get("sha256"), dict) or not base["sha256"]:
        raise UserError(f"{path} is damaged, or of a later version; restore it from a copy")
    folder = Path(base["folder"])
    fix = "restore them there, or make a symbolic link there"
    if not (folder / "config.json").is_file():
        what = f"the weights adapted by --lora are no longer in {folder}"
        raise UserError(f"{what}; {fix}")
    if identity(folder)["sha256"] != base["sha256"]:
        raise UserError(f"the weights in {folder} are not those that --lora adapted; {fix}")


# ---- Adapters
def add(model, rank, dropout, seed):
    """Add adapters to the layers of a Pretrained, and freeze its other weights; [MASK] is learned.

    Of B A, which is added to a linear map, B is zero at first, so nothing changes. What is added to
    a network on the meta device is there too.
    """
    peft = library()
    from transformers.pytorch_utils import Conv1D  # linear maps of GPT-2, with W transposed

    prefix = model.layers_name + "."
    maps = [m for m in model.body.named_modules() if isinstance(m[1], (nn.Linear, Conv1D))]
    names = [name for name, _ in maps if name.startswith(prefix)]
    settings = dict(r=rank, lora_alpha=2 * rank, lora_dropout=dropout, target_modules=names)
    settings |= dict(fan_in_fan_out=any(isinstance(m, Conv1D) for _, m in maps))
    peft.inject_adapter_in_model(peft.LoraConfig(**settings), model.body)
    embedding = model.body.get_input_embeddings()
    model.mask_vector = nn.Parameter(mask_vector(embedding, embedding.weight, model.mask_id))
    freeze(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if is_adapter(name) and not p.is_meta:
                p.copy_(first_value(name, p.shape, seed))


def is_adapter(name):
    return "lora_" in name


def first_value(name, shape, seed):
    """The initial values of an adapter: zeros for B, A (R, inputs) drawn as in nn.Linear.

    They depend only on the name and the seed, so they do not depend on the number of ranks.
    """
    if "lora_B" in name:
        return torch.zeros(shape)
    g = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=g)


@torch.no_grad()
def mask_vector(embedding, weight, mask_id):
    """What an embedding with this weight (rows, C) makes of [MASK], (C,); Gemma's has a scale."""
    at = torch.tensor([mask_id], device=weight.device)
    return torch.func.functional_call(embedding, dict(weight=weight), (at,))[0].clone()


def freeze(model):
    """Freeze every parameter that is not trained; model.frozen has their names."""
    model.frozen = set()
    for name, p in [*nn.Module.named_parameters(model, remove_duplicate=False)]:
        if not is_adapter(name) and name != "mask_vector":
            p.requires_grad_(False)
            model.frozen.add(name)


def all_parameters(model):
    """(name, parameter) of a network, of a Pretrained the frozen ones too."""
    return nn.Module.named_parameters(model)


def count(model):
    """How many weights a network has, including the frozen ones of a Pretrained."""
    return sum(p.numel() for _, p in all_parameters(model))


def share(model, other, within=""):
    """Give `other` the frozen weights of `model`, so that they are in memory once.

    within: beginning of the names of those that are shared
    """
    for name in model.frozen:
        if name.startswith(within):
            place, _, key = name.rpartition(".")
            mine, theirs = (m.get_submodule(place)._parameters for m in (model, other))
            theirs[key] = mine[key]


@torch.no_grad()
def merge(model):
    """A copy of a Pretrained with its adapters added to its weights, parameters as before `add`."""
    model = copy.deepcopy(model)
    model.frozen = None
    model.requires_grad_(True)
    base_kind = library().tuners.tuners_utils.BaseTunerLayer
    for name, module in [*model.body.named_modules()]:
        if isinstance(module, base_kind):
            module.merge()
            model.body.set_submodule(name, module.get_base_layer())
    embedding = model.body.get_input_embeddings()
    at = torch.tensor([model.mask_id], device=embedding.weight.device)
    scale = embedding(at)[0].norm() / embedding.weight[model.mask_id].norm()  # Gemma's have one
    embedding.weight[model.mask_id] = model.mask_vector / scale
    model.mask_vector = None
    return model
