"""Chooses the implementation of each operation: Triton kernels, or PyTorch (reference.py)."""

from types import SimpleNamespace

import torch

from .attention import HEAD_DIMS, MAX_OURS, attention
from .convolution import norm_conv
from .cross_entropy import linear_cross_entropy
from .grouped_attention import grouped_attention
from .launch import (
    ENABLED,
    INTERPRET,
    c_compilers,
    can_build,
    distrusts_attention,
    triton_version,
    warn,
)
from .masking import mask_tokens
from .reference import (
    attention_ref,
    grouped_attention_ref,
    linear_cross_entropy_ref,
    mask_tokens_ref,
    norm_conv_ref,
    prepare,
)

REFERENCES = SimpleNamespace(
    name="torch",
    mask_tokens=mask_tokens_ref,
    attention=attention_ref,
    grouped_attention=grouped_attention_ref,
    norm_conv=norm_conv_ref,
    linear_cross_entropy=linear_cross_entropy_ref,
)
TRITON = dict(name="triton", mask_tokens=mask_tokens, attention=attention)
TRITON |= dict(norm_conv=norm_conv, linear_cross_entropy=linear_cross_entropy)
TRITON |= dict(grouped_attention=grouped_attention)


def attention_of_documents(qkv, cos=None, sin=None, qk_norm=False, causal=False, spans=None):
    """Attention for long windows: PyTorch's (cuDNN), or the kernel if there are spans.

    The kernel skips tiles of other documents, which PyTorch computes.
    """
    implementation = attention_ref if spans is None else attention
    return implementation(qkv, cos, sin, qk_norm, causal, spans)


def attention_of_wide_heads(qkv, cos=None, sin=None, qk_norm=False, causal=False, spans=None):
    """Attention for heads of 128: PyTorch's (cuDNN), or the kernels if there are spans."""
    if causal or spans is None:
        return attention_ref(qkv, cos, sin, qk_norm, causal, spans)
    return grouped_attention(*prepare(qkv, cos, sin, qk_norm), spans=spans)


def select(name="auto", device="cpu", head_dim=None, dtype=torch.float32, causal=False, T=0):
    """Choose the operations for --kernels on a device.

    name      auto: Triton on CUDA, else PyTorch; attention for which the installed Triton makes
              code that PTX does not allow runs in PyTorch, too (launch.py, distrusts_attention)
              triton: raise ValueError if Triton cannot run; attention runs with any Triton
              torch: PyTorch
    head_dim  n_embd / n_head. The attention kernels support 32 and 64, and 128 for documents and
              blocks. With any other, attention runs in PyTorch (SDPA); "triton" accepts none
    dtype     of matrix products
    causal    whether the model is autoregressive: then attention runs in PyTorch
    T         tokens of a window: above MAX_OURS, "auto" uses PyTorch for attention without spans

    Returns a namespace with name, mask_tokens, attention, grouped_attention, norm_conv and
    linear_cross_entropy.
    Warns on stderr if a requested operation does not run in Triton.
    """
    if name not in ("auto", "triton", "torch"):
        raise ValueError(f"kernels={str(name)[:40]!r} is not accepted; give auto, triton or torch")
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
    ops = _triton(name, head_dim, dtype, causal, T)
    if distrusts(device):
        said = f"triton {triton_version()} leaves out a fence in attention for Hopper"
        where = "runs, as --kernels=triton asks" if name == "triton" else "runs in PyTorch"
        warn(f"{said}: it {where}; install triton 3.7 or newer (see results/aot.md)")
        if name == "auto":
            ops.attention = attention_ref
            ops.grouped_attention = grouped_attention_ref
    return ops


def distrusts(device):
    """Whether attention as the installed Triton makes it for a device is not to be trusted."""
    if torch.device(device).type != "cuda":
        return False
    return distrusts_attention(triton_version(), torch.cuda.get_device_capability(device))


def _triton(name, head_dim, dtype, causal, T):
    """The operations that run in Triton, as far as the kernels support the shapes."""
    is_unsupported = head_dim not in (None, 128, *HEAD_DIMS)
    if name == "triton" and is_unsupported:
        fix = "change n_embd / n_head, or use --kernels=auto"
        raise ValueError(f"--kernels=triton takes heads of 32, 64 or 128, not {head_dim}; {fix}")
    if INTERPRET and dtype == torch.bfloat16:
        why = "Triton's interpreter (TRITON_INTERPRET=1) multiplies bfloat16 wrongly"
        raise ValueError(f"--kernels={name}: {why}; use --dtype=float32")
    if is_unsupported or (name == "triton" and (causal or head_dim == 128)):
        what = "causal attention" if causal else f"n_embd / n_head = {head_dim}: attention"
        takes = "heads of 32 and 64, and of 128 for documents and blocks, not causal"
        warn(f"{what} runs in PyTorch (SDPA): the kernels take {takes}")
    ops = SimpleNamespace(**vars(REFERENCES) | TRITON)
    if head_dim == 128:
        ops.attention = attention_of_wide_heads
        return ops
    if name == "auto" and T > MAX_OURS:
        ops.attention = attention_of_documents
    return ops


def _missing(device):
    """Say why the kernels cannot run on a device; "" if they can."""
    if device.type == "cpu" and ENABLED and INTERPRET:
        return ""
    if device.type != "cuda":
        return "The kernels need a CUDA device"
    if torch.version.hip:
        return "The kernels have not been tried on AMD GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"This GPU has compute capability {major}.{minor}, below the 8.0 of the kernels"
    if not ENABLED:
        return "Triton is missing (pip install triton)"
    if not can_build(*c_compilers()):  # Triton compiles C code that launches its kernels
        return "Triton finds no C compiler or no Python.h (apt install gcc python3-dev)"
    return ""
