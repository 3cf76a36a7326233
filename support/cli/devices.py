"""Devices: choice of device and dtype, peak FLOP/s, and copying of tensors to a device."""

import contextlib
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch

from nanomdlm.kernels import operations as kernels
from nanomdlm.support.abilities import is_causal
from nanomdlm.support.cli.settings import shown
from nanomdlm.support.errors import UserError


class Machine(NamedTuple):
    """What a rank computes with."""

    device: torch.device
    dtype: torch.dtype  # of matrix products
    ops: Any  # the kernels, or their references in PyTorch
    rank: int = 0
    world: int = 1  # how many ranks there are


# ---- Choice of device and dtype
def pick_device(name):
    """Return the torch.device of a name or of "auto"; raise UserError if it does not exist.

    auto: the first of cuda, mps and cpu that exists
    """
    # The driver may count devices that it cannot use: is_available() tries.
    gpus = torch.cuda.is_available() and torch.cuda.device_count()
    numbers = dict(cuda=gpus, mps=torch.backends.mps.is_available(), cpu=1)
    if name == "auto":
        name = next(kind for kind, number in numbers.items() if number)
    with contextlib.suppress(RuntimeError):  # PyTorch does not know the name
        device = torch.device(name)
        if (device.index or 0) < numbers.get(device.type, 0):
            return device
    name = shown(name)
    raise UserError(f"--device={name} is not on this machine; use cpu, cuda, cuda:N, mps or auto")


def use_device(name, local_rank, world):
    """Return the device of this rank and make it the current one.

    With several ranks, each one on a machine takes the GPU of its local rank.
    """
    device = pick_device(name)
    if device.type == "cuda":
        if world > 1:
            device = pick_device(f"cuda:{local_rank}")
        torch.cuda.set_device(device.index or 0)
        torch.set_float32_matmul_precision("high")  # TF32 for products in float32
    return device


def default_preset(device):
    """Return the preset, "gpu" or "cpu", for a device's name or "auto"."""
    return "gpu" if pick_device(device).type == "cuda" else "cpu"


def pick_dtype(name, device):
    """Return the torch.dtype of a name.

    auto: bfloat16 if the device has fast matrix products in it, else float32
    """
    if name != "auto":
        return getattr(torch, name)
    fast = False
    if device.type == "cpu":
        features = getattr(torch.cpu, "get_capabilities", dict)()
        fast = features.get("amx_bf16") or features.get("avx512_bf16")
    elif device.type == "cuda":  # since Ampere (sm_80)
        fast = torch.cuda.get_device_capability(device)[0] >= 8
    return torch.bfloat16 if fast else torch.float32


def dtype_of_predictions(name, device):
    """As pick_dtype, for programs that only predict: without a GPU, auto is float32, in which a
    seed gives the same text on all CPUs."""
    return torch.float32 if name == "auto" and device.type != "cuda" else pick_dtype(name, device)


def load_in(dtype, load, path, **how):
    """What `load` returns, mdlm.load's (model, tokenizer, config), with weights in this dtype (see
    dtype_of_predictions); on a GPU, products in float32 are then in TF32.

    bfloat16 halves memory and, where a call reads weights more than it computes, time. Buffers,
    such as the frequencies of RoPE, keep their dtype. Adapters of --lora are added to the weights,
    which makes a call a tenth faster.
    """
    model, *rest = load(path, **how)
    device = next(model.parameters()).device
    dtype = dtype_of_predictions(dtype, device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    if hasattr(model, "merge_adapters"):
        model.merge_adapters()
    for p in torch.nn.Module.parameters(model):  # frozen ones too
        p.data = p.data.to(dtype)
    return model, *rest


@contextlib.contextmanager
def float32_by_default():
    """Context manager: new tensors are float32, whatever the caller's default is.

    The default belongs to the process: threads that change it at the same time disturb each other.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def select_kernels(name, device, config, dtype=torch.float32):
    """Return the ops for --kernels: a ValueError of kernels.select becomes a UserError."""
    head_dim = None if config.network else config.n_embd // config.n_head  # None: not our attention
    shape = (head_dim, dtype, config.objective == "ar", config.block_size)
    try:
        return kernels.select(name, device, *shape)
    except ValueError as e:
        raise UserError(str(e)) from e


# ---- FLOP/s
# Part of a GPU's name -> dense bfloat16 TFLOP/s, from the vendors' data sheets.
PEAK_TFLOPS = {"H100": 989, "H200": 989, "B200": 2250, "A100": 312, "L40S": 362, "4090": 165}


def peak_flops(device):
    """Return the peak FLOP/s of a GPU in bfloat16, for MFU; None if it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((tflops * 1e12 for key, tflops in PEAK_TFLOPS.items() if key in name), None)


def flops_per_token(model):
    """Return the FLOPs of forward and backward for each token of text.

    6 for each weight, and 12 C T for each layer with attention (C: width, T: context).
    """
    config = model.config
    text = torch.zeros(1, config.block_size, dtype=torch.int64)
    # Positions that the network has for each token of text in training; the steps of infill_share
    # take whole texts.
    rows = model.objective.view(text).ids.numel() / text.numel() - config.infill_share
    predicted = 1.0 if is_causal(model) else 0.5  # share of the tokens that reach the head
    attending = len(model.layers)  # in a pretrained network, all of them
    body = rows * sum(p.numel() for p in model.layers.parameters())
    # The head and the last layer's MLP compute only the predicted positions.
    end = predicted * config.n_embd * model.vocab_size
    if not config.network:
        end -= 8 * config.n_embd**2 * (rows - predicted)
        attending = sum(layer.qkv is not None for layer in model.layers)
    return 6 * (body + end) + 12 * attending * config.n_embd * config.block_size


# ---- Copies to a device
def to_tensors(arrays, device):
    """Return numpy arrays as tensors on the device; on the CPU if they need over 15 % of a GPU."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if sum(array.nbytes for array in arrays) > 0.15 * free:
            device = torch.device("cpu")
    if device.type != "cpu":  # PyTorch cannot index uint16 on GPUs
        arrays = [x.astype(np.int32) if x.dtype == np.uint16 else x for x in arrays]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that memory-mapped arrays are read-only
        return [torch.from_numpy(array).to(device) for array in arrays]


def is_async(device):
    """Whether the device is asynchronous: Python waits for it when it reads a tensor's value."""
    return device.type == "cuda"


def to_device(x, device):
    """Return x on `device`. Python does not wait for a copy to a GPU."""
    if is_async(device) and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
