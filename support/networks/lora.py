"""LoRA (Hu et al., 2106.09685) by the peft library: --lora=R trains adapters, not the weights.

Trained are adapters of rank R, beside each linear map of the layers, and the embedding of [MASK].
`Pretrained.named_parameters` and `state_dict` give these alone. So optimizers, averages, gradients,
and checkpoints hold what is trained, without knowing of LoRA. PyTorch's FSDP asks each module, so
--shard spreads the other weights too.

A checkpoint's network.json names the folder of the weights and their checksums. `merge` adds the
adapters to the weights, for an export.
"""

import zlib
from pathlib import Path

import torch
import torch.nn as nn

from nanomdlm.support.cli import files
from nanomdlm.support.cli.environment import optional
from nanomdlm.support.errors import UserError


def library():
    """The peft library; UserError if it is missing."""
    return optional("peft", "--lora")


# ---- Which weights
def identity(folder):
    """{"folder": its path, "sha256": {name of a file: its checksum}} of the weights in a folder."""
    paths = [path for path in sorted(Path(folder).glob("*.safetensors")) if path.is_file()]
    sums = {path.name: files.sha256_of(path) for path in paths}
    return dict(folder=str(Path(folder).resolve()), sha256=sums)


def check_identity(base):
    """Raise UserError unless the weights that a network.json names are there and as they were.

    base: what `identity` gave
    """
    folder = Path(base["folder"])
    if identity(folder)["sha256"] != base["sha256"]:
        fix = "restore them there, or make a symbolic link there"
        raise UserError(f"the weights that --lora adapted are no longer in {folder}; {fix}")


# ---- Adapters
def add(model, rank, dropout):
    """Add adapters to the layers of a Pretrained, and freeze its other weights; [MASK] is learned.

    The network is on the meta device, and so is what is added. `first_value` has the values.
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
    for name, p in [*nn.Module.named_parameters(model, remove_duplicate=False)]:
        if not is_trained(name):
            p.requires_grad_(False)
            model.frozen.add(name)


def is_trained(name):
    return "lora_" in name or name == "mask_vector"


def first_value(name, shape, seed):
    """The values with which an adapter begins: B zeros, so that nothing changes at first, and A
    (R, inputs) as nn.Linear draws them.

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


def share(model, other, within):
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
    """Add the adapters of a Pretrained to its weights; its parameters are those before `add`."""
    model.frozen = set()
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
