"""Imports Triton where it can run, launches kernels, and finds compilers.

Triton is imported only if there is a CUDA device, if its interpreter is requested
(TRITON_INTERPRET=1), or to compile the kernels without a GPU (MDLM_TRITON=1, see tests/aot.py).
Elsewhere the kernels can be imported without Triton.
"""

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
ASKED = INTERPRET or os.environ.get("MDLM_TRITON") == "1" or torch.cuda.is_available()
ENABLED = ASKED and importlib.util.find_spec("triton") is not None

if ENABLED:
    import triton
    import triton.language as tl

    jit = triton.jit
    LOG2E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x log2 e)
else:
    triton = None
    tl = None
    LOG2E = None

    def jit(function):
        """Return the function unchanged. Without Triton, no kernel is ever called."""
        return function


LIBRARY = torch.library.Library("mdlm", "FRAGMENT")  # of our operators, as long as it lives
LAUNCHES = {}  # kernel name -> number of launches, so that tests know that a kernel has run


def launch(kernel, grid, *args, **options):
    """Run a kernel on the device of its first argument, a tensor, even if another is current."""
    LAUNCHES[kernel.fn.__name__] = LAUNCHES.get(kernel.fn.__name__, 0) + 1
    # Multiply and add in one instruction: from version 3.10 on, Triton does not by default.
    options |= {} if INTERPRET else dict(enable_fp_fusion=True)
    with torch.cuda.device_of(args[0]):  # does nothing on a CPU
        return kernel[grid](*args, **options)


def register(name, schema, function, fake, backward=None, save=None):
    """Register a function as the operator mdlm::name, a single node for torch.compile.

    schema: its signature in PyTorch's notation
    fake: a function that returns empty outputs of the right shapes and dtypes
    backward, save: autograd's backward and setup_context, if it is differentiable

    Returns the operator, or None without Triton. A call costs a quarter less host time than one of
    torch.library.custom_op, which checks more (results/aot.md).
    """
    if not ENABLED:
        return None
    LIBRARY.define(name + schema)
    # Also on a CPU: there the operator runs the kernel in Triton's interpreter, for tests.
    for device in ("CUDA", "CPU"):
        LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"mdlm::{name}", fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"mdlm::{name}", backward, setup_context=save, lib=LIBRARY)
    return getattr(torch.ops.mdlm, name).default


def triton_version():
    """Return the version of Triton that is installed, such as "3.7.1"."""
    return importlib.metadata.version("triton")


def distrusts_attention(version, capability):
    """Whether a Triton makes attention for a GPU that PTX does not allow (results/aot.md).

    version: of Triton, such as "3.7.1"; capability: of the GPU, such as (9, 0)

    Before 3.7 it leaves out a fence before the products of Hopper read shared memory.
    """
    return capability == (9, 0) and tuple(map(int, version.split(".")[:2])) < (3, 7)


def runs_on(tensor):
    """Whether the kernels run on this tensor's device: CUDA, or a CPU under the interpreter."""
    return ENABLED and (tensor.is_cuda or (INTERPRET and tensor.device.type == "cpu"))


@functools.cache  # prints each warning only once in a process
def warn(message):
    """Print a warning on standard error, on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)


def c_compilers():
    """Return the names of the C compilers that Triton looks for."""
    return (os.environ["CC"],) if os.environ.get("CC") else ("gcc", "clang")


def can_build(*compilers):
    """Whether one of these compilers and Python's headers exist; Triton and Inductor need both."""
    headers = (sysconfig.get_config_var("INCLUDEPY") or "", sysconfig.get_path("include"))
    has_headers = any(Path(folder, "Python.h").exists() for folder in headers)
    return has_headers and any(map(shutil.which, compilers))


def can_compile(device):
    """Whether torch.compile can work for a device: that needs Linux, Triton and a compiler."""
    compilers = {"cpu": ("g++",), "cuda": c_compilers()}.get(device.type, ())
    has_triton = importlib.util.find_spec("triton") is not None
    return sys.platform == "linux" and has_triton and can_build(*compilers)
