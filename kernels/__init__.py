"""The three operations special to masked diffusion. Every public function has a PyTorch twin, `*_ref`."""

import sys
from types import SimpleNamespace

import torch

from common import Refusal, c_compilers, can_build
from kernels._triton import ENABLED, INTERPRET
from kernels.attention import HEAD_DIMS, attention, attention_auto, attention_ref
from kernels.cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_ref,
    masked_cross_entropy,
    masked_cross_entropy_ref,
)
from kernels.masking import MAX_T, mask_tokens, mask_tokens_ref
from kernels.muon import Muon

__all__ = ["MAX_T", "Muon", "attention", "attention_ref", "linear_cross_entropy", "linear_cross_entropy_ref",
           "mask_tokens", "mask_tokens_ref", "masked_cross_entropy", "masked_cross_entropy_ref", "select"]


def select(name="auto", device="cpu", head_dim=None, dtype=torch.float32):
    """The ops for --kernels on a device: a namespace with mask_tokens, linear_cross_entropy, attention, name.

    auto: Triton on CUDA, plain PyTorch elsewhere; triton: that or a Refusal, also for a model whose head_dim
    or whose dtype of products the kernels do not take; torch: plain PyTorch anywhere. Causal attention
    (--objective=ar) is PyTorch's in all of them.
    """
    device = torch.device(device)
    cuda = device.type == "cuda"
    old = cuda and torch.cuda.get_device_capability(device) < (8, 0)  # the kernels are made for sm_80 and on
    builds = not cuda or can_build(*c_compilers())  # Triton its launchers
    runs = ENABLED and (cuda and not old and builds or INTERPRET and device.type == "cpu")
    if name == "triton" and not runs:
        raise Refusal("--kernels=triton needs Triton, a C compiler, Python's headers and a CUDA device of "
                      "compute capability 8.0 or later (or TRITON_INTERPRET=1 on a CPU), "
                      f"not {device} as it is here; use --kernels=auto")
    if name == "triton" and head_dim not in (None, *HEAD_DIMS):
        raise Refusal(f"--kernels=triton takes heads of 32, 64 or 128, not {head_dim}; "
                      "change n_embd / n_head, or use --kernels=auto")
    if name != "torch" and runs and INTERPRET and dtype == torch.bfloat16:
        raise Refusal(f"--kernels={name} in Triton's interpreter (TRITON_INTERPRET=1) multiplies bfloat16 "
                      "wrongly; use --dtype=float32")
    if name == "auto" and cuda and not runs:
        why = ("This GPU is too old for Triton here" if old else "Triton is missing (pip install triton)"
               if not ENABLED else "Triton finds no C compiler or no Python.h (apt install gcc python3-dev)")
        print(f"{why}: training goes on in plain PyTorch", file=sys.stderr)
    if name == "auto" and runs and head_dim not in (None, *HEAD_DIMS):
        print(f"attention runs in plain PyTorch: the kernels take heads of 32, 64 or 128, not {head_dim} "
              "(n_embd / n_head)", file=sys.stderr)
    if name == "torch" or not runs:
        return SimpleNamespace(name="torch", mask_tokens=mask_tokens_ref, attention=attention_ref,
                               linear_cross_entropy=linear_cross_entropy_ref)
    return SimpleNamespace(name="triton", mask_tokens=mask_tokens,
                           attention=attention if name == "triton" else attention_auto,
                           linear_cross_entropy=linear_cross_entropy)
