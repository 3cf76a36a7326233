"""Triton where there is something to run it on; elsewhere importing the kernels costs and needs nothing.

Triton is imported if there is a CUDA device, if its interpreter is asked for (TRITON_INTERPRET=1), or to
compile the kernels without a GPU (MDLM_TRITON=1, the ahead-of-time tests).
"""

import importlib.util
import os

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
ENABLED = importlib.util.find_spec("triton") is not None and (
    INTERPRET or os.environ.get("MDLM_TRITON") == "1" or torch.cuda.is_available())

if ENABLED:
    import triton
    import triton.language as tl
    jit = triton.jit
else:
    triton = tl = None
    jit = lambda function: function  # kept as it is, never called

LAUNCHES = {}  # kernel name -> launches, so that tests can tell the kernel from the reference


def launch(kernel, grid, *args, **kwargs):
    """Run a kernel on the device of its first argument, a tensor, whatever the current device is."""
    LAUNCHES[kernel.fn.__name__] = LAUNCHES.get(kernel.fn.__name__, 0) + 1
    with torch.cuda.device_of(args[0]):  # does nothing on a CPU
        return kernel[grid](*args, **kwargs)


def runs_on(tensor):
    """Whether the kernels run on this tensor's device: CUDA, or a CPU under the interpreter."""
    return ENABLED and (tensor.is_cuda or (INTERPRET and tensor.device.type == "cpu"))
