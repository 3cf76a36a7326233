"""The three operations special to masked diffusion. Every public function has a PyTorch twin, `*_ref`."""

import sys
from types import SimpleNamespace

import torch

from common import Refusal
from kernels._triton import ENABLED, INTERPRET
from kernels.attention import attention, attention_ref
from kernels.cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_ref,
    masked_cross_entropy,
    masked_cross_entropy_ref,
)
from kernels.masking import MAX_T, mask_tokens, mask_tokens_ref

__all__ = ["MAX_T", "attention", "attention_ref", "linear_cross_entropy", "linear_cross_entropy_ref",
           "mask_tokens", "mask_tokens_ref", "masked_cross_entropy", "masked_cross_entropy_ref", "select"]


def select(name="auto", device="cpu"):
    """The ops for --kernels on a device: a namespace with mask_tokens, linear_cross_entropy, attention, name.

    auto: Triton on CUDA, plain PyTorch elsewhere; triton: that or a Refusal; torch: plain PyTorch anywhere.
    """
    cuda = torch.device(device).type == "cuda"
    runs = ENABLED and (cuda or INTERPRET)
    if name == "triton" and not runs:
        raise Refusal("--kernels=triton needs Triton and a CUDA device (or TRITON_INTERPRET=1 on a CPU); "
                      "use --kernels=auto")
    if name == "auto" and cuda and not runs:
        print("Triton is missing: training goes on in plain PyTorch; pip install triton", file=sys.stderr)
    if name == "torch" or not runs:
        return SimpleNamespace(name="torch", mask_tokens=mask_tokens_ref, attention=attention_ref,
                               linear_cross_entropy=linear_cross_entropy_ref)
    return SimpleNamespace(name="triton", mask_tokens=mask_tokens, attention=attention,
                           linear_cross_entropy=linear_cross_entropy)
