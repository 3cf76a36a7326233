"""The three operations special to masked diffusion. Every public function has a PyTorch twin, `*_ref`."""

from types import SimpleNamespace

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
    """The ops for --kernels on a device, a namespace: mask_tokens, linear_cross_entropy, attention, name."""
    if name == "torch":
        return SimpleNamespace(name=name, mask_tokens=mask_tokens_ref,
                               linear_cross_entropy=linear_cross_entropy_ref, attention=attention_ref)
    return SimpleNamespace(name="torch", mask_tokens=mask_tokens,
                           linear_cross_entropy=linear_cross_entropy, attention=attention)
