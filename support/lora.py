"""LoRA (Hu et al., 2106.09685) by the peft library: --lora=R trains a network of others little.

What is trained are adapters of rank R, beside each linear map of the layers, and the embedding of
[MASK]. The other weights are no parameters any more but buffers that are not saved: so optimizers,
averages, gradients and checkpoints hold the trained ones alone, without knowing of LoRA.

A checkpoint's network.json names the folder of the weights and their checksums. `merge` adds the
adapters to the weights, for an export.
"""

import copy
import hashlib
from pathlib import Path

import torch
import torch.nn as nn

from support.environment import optional
from support.errors import UserError


def library():
    """The peft library; UserError where it is missing."""
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
    """Raise UserError unless the weights that a network.json names are there and as they were.

    base: what `identity` gave; path: the network.json
    """
    known = isinstance(base, dict) and isinstance(base.get("folder"), str)
    if not known or not isinstance(base.get("sha256"), dict) or not base["sha256"]:
        raise UserError(f"{path} is damaged, or of a later version; restore it from a copy")
    folder = Path(base["folder"])
    fix = f"restore them there, or write their folder into {path}"
    if not (folder / "config.json").is_file():
        what = f"the weights that --lora adapted are no longer in {folder}"
        raise UserError(f"{what}; {fix}")
    if identity(folder)["sha256"] != base["sha256"]:
        raise UserError(f"the weights in {folder} are not those that --lora adapted; {fix}")


# ---- Adapters
def add(model, rank, dropout):
    """Add adapters to the layers of a Pretrained, and freeze its other weights; [MASK] is learned.

    Of B A, which is added to a linear map, B is zero at first, so nothing changes.
    """
    peft = library()
    from transformers.pytorch_utils import Conv1D  # linear maps of GPT-2, with W transposed

    prefix = model.layers_name + "."
    maps = [m for m in model.body.named_modules() if isinstance(m[1], (nn.Linear, Conv1D))]
    names = [name for name, _ in maps if name.startswith(prefix)]
    settings = dict(r=rank, lora_alpha=2 * rank, lora_dropout=dropout, target_modules=names)
    settings |= dict(fan_in_fan_out=any(isinstance(m, Conv1D) for _, m in maps))
    peft.inject_adapter_in_model(peft.LoraConfig(**settings), model.body)
    with torch.no_grad():
        at = torch.tensor([model.mask_id], device=model.head_weight.device)
        model.mask_vector = nn.Parameter(model.body.get_input_embeddings()(at)[0].clone())
    freeze(model)


def is_trained(name):
    return "lora_" in name or name == "mask_vector"


def freeze(model):
    """Make a buffer, which is not saved, of every parameter that is not trained; their places are
    in model.frozen."""
    model.frozen = []
    for name, module in [*model.named_modules()]:
        for key, p in [*module._parameters.items()]:
            if p is not None and not is_trained(f"{name}.{key}".lstrip(".")):
                delattr(module, key)
                module.register_buffer(key, p.detach(), persistent=False)
                model.frozen.append((name, key))


def count(model):
    """How many weights a network has, the frozen ones of a Pretrained among them."""
    frozen = getattr(model, "frozen", None) or []
    tensors = {id(t): t for name, key in frozen for t in [model.get_submodule(name)._buffers[key]]}
    return sum(t.numel() for t in (*tensors.values(), *model.parameters()))


def share(model, other):
    """Give `other` the frozen weights of `model`, so that they are in memory once."""
    for name, key in model.frozen:
        other.get_submodule(name)._buffers[key] = model.get_submodule(name)._buffers[key]


@torch.no_grad()
def merge(model):
    """A copy of a Pretrained with its adapters added to its weights, parameters as before `add`."""
    model = copy.deepcopy(model)
    for name, key in model.frozen:
        module = model.get_submodule(name)
        value = module._buffers[key]
        delattr(module, key)
        module.register_parameter(key, nn.Parameter(value))
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
    model.frozen = None
    return model
