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
    jit = lambda function, **options: function  # kept as it is, never called

LAUNCHES = {}  # kernel name -> launches, so that tests can tell the kernel from the reference
TUNES = ENABLED and not INTERPRET and os.environ.get("MDLM_AUTOTUNE") != "0"
TUNED = {}  # (kernel, device, key and dtypes of a launch) -> the configuration that measured fastest


def launch(kernel, grid, *args, choices=({},), key=(), repeatable=True, **constants):
    """Run a kernel on the device of its first argument, a tensor, whatever the current device is.

    choices     configurations (block sizes, num_warps, num_stages), first the one that is used unmeasured
                and where memory is not aligned (read by elements it takes more registers, which the others
                may not have)
    key         names of the arguments on which it depends which one is fastest, besides the dtypes
    repeatable  whether a launch may be repeated: False for one that adds to what it finds
    """
    LAUNCHES[kernel.fn.__name__] = LAUNCHES.get(kernel.fn.__name__, 0) + 1
    with torch.cuda.device_of(args[0]):  # does nothing on a CPU
        chosen = choices[0]
        if TUNES and len(choices) > 1 and all(x.data_ptr() % 16 == 0 for x in args if torch.is_tensor(x)):
            chosen = fastest(kernel, grid, args, constants, choices, key, repeatable)
        return kernel[grid](*args, **constants, **chosen)


def fastest(kernel, grid, args, constants, choices, key, repeatable):
    """The configuration for a launch: measured once for each key, or the first where nothing can be measured.

    Measuring waits for the device, which a CUDA graph forbids while it is captured. Triton keeps the timings
    beside its compiled kernels (~/.triton/cache, or TRITON_CACHE_DIR), by version, architecture, source,
    choices and key: later runs on the machine choose the same and give the same bits. MDLM_AUTOTUNE=0 takes
    the first choice everywhere, for equal bits across machines; TRITON_PRINT_AUTOTUNING=1 shows the choices.
    """
    named = dict(zip(kernel.arg_names, args)) | constants
    case = (kernel.fn, args[0].device, *(named[k] for k in key),
            *(x.dtype for x in args if torch.is_tensor(x)))
    if case not in TUNED:
        if not repeatable or torch.cuda.is_current_stream_capturing():
            return choices[0]
        options = ("num_warps", "num_stages")
        configs = [triton.Config({k: v for k, v in c.items() if k not in options},
                                 **{k: c[k] for k in options}) for c in choices]
        tuner = triton.autotune(configs, list(key), do_bench=measure, cache_results=True)(kernel)
        tuner[grid](*args, **constants)
        TUNED[case] = choices[configs.index(tuner.best_config)]
    return TUNED[case]


def measure(call, quantiles):
    """Milliseconds of a kernel. Launches for 12 ms, against Triton's 125, so that a run starts quickly; each
    finds the L2 cache empty, as a training step leaves it (256 MiB that are written before it)."""
    return triton.testing.do_bench(call, warmup=2, rep=10, quantiles=quantiles)


def processors(device):
    """Multiprocessors of a GPU. A launch of fewer programs is too small to say which choice is fastest."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def runs_on(tensor):
    """Whether the kernels run on this tensor's device: CUDA, or a CPU under the interpreter."""
    return ENABLED and (tensor.is_cuda or (INTERPRET and tensor.device.type == "cpu"))
