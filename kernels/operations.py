"""The three operations special to masked diffusion. Their PyTorch twins are in reference.py."""

from types import SimpleNamespace

import torch

from .attention import HEAD_DIMS, MAX_OURS, attention
from .cross_entropy import linear_cross_entropy
from .launch import ENABLED, INTERPRET, c_compilers, can_build, warn
from .masking import mask_tokens
from .reference import attention_ref, linear_cross_entropy_ref, mask_tokens_ref, neighbours

REFERENCES = SimpleNamespace(
    name="torch",
    mask_tokens=mask_tokens_ref,
    attention=attention_ref,
    neighbours=neighbours,
    linear_cross_entropy=linear_cross_entropy_ref,
)
TRITON = dict(name="triton", mask_tokens=mask_tokens, attention=attention)
TRITON |= dict(linear_cross_entropy=linear_cross_entropy)


def attention_of_documents(qkv, cos=None, sin=None, qk_norm=False, causal=False, spans=None):
    """For long windows: cuDNN's, by PyTorch; where there are documents, the kernel skips others."""
    f = attention_ref if spans is None else attention
    return f(qkv, cos, sin, qk_norm, causal, spans)


def select(name="auto", device="cpu", head_dim=None, dtype=torch.float32, causal=False, T=0):
    """Choose the operations for --kernels on a device.

    name      auto: Triton on CUDA, else PyTorch; triton: Triton, or a ValueError; torch: PyTorch
    head_dim  n_embd / n_head. The attention kernels take 32 and 64; with 128 attention runs in
              PyTorch (SDPA, where cuDNN is strong), with others too, which triton refuses
    dtype     of the products
    causal    whether the model is autoregressive: then attention runs in PyTorch
    T         tokens of a window: above MAX_OURS auto leaves attention over all to PyTorch

    Returns a namespace with name, mask_tokens, attention, neighbours (PyTorch's), and
    linear_cross_entropy. Warns on stderr if less than was asked for runs in Triton. Raises
    ValueError, in one sentence, if name cannot run.
    """
    if name not in ("auto", "triton", "torch"):
        raise ValueError(f"kernels={name!r} is not accepted; give auto, triton or torch")
    device = torch.device(device)
    missing = _missing(device)
    if name == "triton" and missing:
        needs = "Triton, a C compiler, Python's headers and a CUDA device from sm_80 on"
        fix = f"not {device} as it is here; use --kernels=auto"
        raise ValueError(f"--kernels=triton needs {needs} (or TRITON_INTERPRET=1 on a CPU), {fix}")
    if name == "auto" and missing and device.type == "cuda":
        warn(f"{missing}: using plain PyTorch")
    if name == "torch" or missing:
        return SimpleNamespace(**vars(REFERENCES))
    odd = head_dim not in (None, 128, *HEAD_DIMS)
    if name == "triton" and odd:
        fix = "change n_embd / n_head, or use --kernels=auto"
        raise ValueError(f"--kernels=triton takes heads of 32, 64 or 128, not {head_dim}; {fix}")
    if INTERPRET and dtype == torch.bfloat16:
        why = "Triton's interpreter (TRITON_INTERPRET=1) multiplies bfloat16 wrongly"
        raise ValueError(f"--kernels={name}: {why}; use --dtype=float32")
    if odd or (name == "triton" and (causal or head_dim == 128)):
        what = "causal attention" if causal else f"n_embd / n_head = {head_dim}: attention"
        warn(f"{what} runs in PyTorch (SDPA): the kernels take heads of 32 and 64, not causal")
    ops = SimpleNamespace(**vars(REFERENCES) | TRITON)
    if name == "auto" and T > MAX_OURS:
        ops.attention = attention_of_documents
    return ops


def _missing(device):
    """Why the kernels cannot run on a device; empty if they can."""
    if device.type != "cuda":
        interpreted = ENABLED and INTERPRET and device.type == "cpu"
        return "" if interpreted else "The kernels need a CUDA device"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "This GPU is too old for Triton here"
    if not ENABLED:
        return "Triton is missing (pip install triton)"
    if not can_build(*c_compilers()):  # Triton compiles the code that starts its kernels
        return "Triton finds no C compiler or no Python.h (apt install gcc python3-dev)"
    return ""
