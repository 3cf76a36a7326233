"""Devices: which one computes, in which dtype, how fast it may be; tensors on their way to it."""

import contextlib
import warnings

import numpy as np
import torch

from support.errors import UserError


def pick_device(name):
    """A device's name or "auto" -> torch.device; UserError if it does not exist."""
    available = {"cuda": torch.cuda.is_available() and torch.cuda.device_count()}
    available |= {"mps": torch.backends.mps.is_available(), "cpu": 1}
    if name == "auto":
        name = next(kind for kind in available if available[kind])
    with contextlib.suppress(RuntimeError):  # not even the name of a device
        device = torch.device(name)
        if device.type == "cpu" or (device.index or 0) < available.get(device.type, 0):
            return device
    raise UserError(f"--device={name} is not on this machine; use cpu, cuda, cuda:N, mps or auto")


def use_device(name, local_rank, world):
    """The device of this rank, made the current one; ranks of a machine take different GPUs."""
    device = pick_device(name)
    if device.type == "cuda":
        if world > 1:
            device = pick_device(f"cuda:{local_rank}")
        torch.cuda.set_device(device.index or 0)
        torch.set_float32_matmul_precision("high")  # TF32 for what stays in float32
    return device


def default_preset(device):
    """The preset for a device's name or "auto"."""
    return "gpu" if pick_device(device).type == "cuda" else "cpu"


def pick_dtype(name, device):
    """The dtype of a name; for "auto" bfloat16 if the hardware multiplies it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    fast = False
    if device.type == "cpu":
        features = getattr(torch.cpu, "get_capabilities", dict)()
        fast = features.get("amx_bf16") or features.get("avx512_bf16")
    elif device.type == "cuda":  # from Ampere on
        fast = torch.cuda.get_device_capability(device)[0] >= 8
    return torch.bfloat16 if fast else torch.float32


# Dense bfloat16 TFLOP/s by the makers' data sheets.
PEAK_TFLOPS = {"H100": 989, "H200": 989, "B200": 2250, "A100": 312, "L40S": 362, "4090": 165}


def peak_flops(device):
    """The peak FLOP/s of a known GPU in bfloat16, for MFU; None for any other device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((tflops * 1e12 for key, tflops in PEAK_TFLOPS.items() if key in name), None)


def flops_per_token(model):
    """Of forward and backward: 6 a weight, and 12 C T a layer with attention."""
    config = model.config
    body = sum(p.numel() for p in model.layers.parameters())
    objective = model.objective
    rows = objective.positions  # that the network computes for a token
    body *= rows
    # The head, and the last layer's MLP, compute only what is predicted.
    end = objective.predicted * config.n_embd * model.vocab_size
    end -= 8 * config.n_embd**2 * (rows - objective.predicted)
    attending = sum(layer.qkv is not None for layer in model.layers)
    return 6 * (body + end) + 12 * attending * config.n_embd * config.block_size


def to_tensors(arrays, device):
    """numpy arrays as tensors on the device; on the CPU if they would fill much of a GPU."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if sum(array.nbytes for array in arrays) > 0.15 * free:
            device = torch.device("cpu")
    if device.type != "cpu":  # GPUs cannot index uint16; this copies it in host memory first
        arrays = [x.astype(np.int32) if x.dtype == np.uint16 else x for x in arrays]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they cannot be written
        return [torch.from_numpy(array).to(device) for array in arrays]


def is_async(device):
    """Whether Python runs ahead of the device, and waits when it reads a number."""
    return device.type == "cuda"


def to_device(x, device):
    """x on `device`; the copy to a GPU does not make Python wait."""
    if is_async(device) and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
