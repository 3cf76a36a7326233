"""Stands in for the CUDA driver: Triton compiles and launches as for a GPU, the PTX is emulated.

    from ptx import driver

    driver.install(90)  # an H100; before any kernel is compiled, in a process with MDLM_TRITON=1
    y = attention(qkv)  # tensors on the CPU

Triton asks its driver for the target, for the launcher of a compiled kernel and to load its binary.
Here the "binary" is the text of the PTX, and the launcher runs it. So what is tested is all of
Triton's path: specialization of arguments, compilation, the order of arguments, shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
from importlib import import_module
from pathlib import Path

import torch

from .memory import GlobalMemory
from .program import Program, run_grid

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}  # bytes, of a program
INSTALLED = []  # the Driver of this process
OPERATORS = ("attention", "convolution", "cross_entropy", "grouped_attention", "masking")
OPERATORS += ("newton_schulz", "relu2", "residual")


parse = functools.cache(Program)


def describe(kernel, types, constants, warps, stages):
    """What was compiled, as text: equal for tests/aot.py and for a launch here if the code is.

    kernel: its name; types: argument -> type as Triton writes it, such as "*bf16"
    constants: argument -> value. Those of H and G, the numbers of heads, are left out: calls in the
    emulator have fewer heads than a model, and they are only factors of offsets, and a loop's count

    Which numbers and addresses are multiples of 16 is left out, too.
    """
    parts = [f"{name}: {kind}" for name, kind in types.items() if kind.startswith("*")]
    parts += [f"{name}={value}" for name, value in constants.items() if name not in ("H", "G")]
    return f"{kernel}({', '.join(sorted(parts))}), {warps} warps, {stages} stages"


def duplicate(x):
    """A copy with the same strides, on which the kernel's arguments depend."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


@dataclasses.dataclass
class Launch:
    """A launch, so that a test can run its PTX again, changed."""

    kernel: str
    ptx: str
    grid: tuple  # of 3
    names: list  # of the arguments, in the order of the PTX
    args: list  # tensors and numbers
    shared: int  # bytes

    def copy(self):
        """The same launch, with copies of the tensors as they are now."""
        args = [duplicate(a) if torch.is_tensor(a) else a for a in self.args]
        return dataclasses.replace(self, args=args)

    def run(self, ptx=None, first=0, shifts=()):
        """Run its PTX, or another one, on its arguments; return the number of instructions.

        first: place of the first program; so the arguments are those of the programs from there on
        shifts: name -> how many elements before an argument's tensor its pointer points
        """
        program = parse(ptx or self.ptx)
        tensors = {n: a for n, a in zip(self.names, self.args) if torch.is_tensor(a)}
        memory = GlobalMemory(tensors.items())
        values = [memory.address(a.data_ptr()) if torch.is_tensor(a) else a for a in self.args]
        for name, elements in dict(shifts).items():
            values[self.names.index(name)] -= elements * tensors[name].element_size()
        values += [0, 0]  # pointers to scratch memory, which these kernels do not use
        return run_grid(program, values, self.grid, memory, self.shared, first)


class Driver:
    """What Triton asks of a driver (triton/backends/driver.py)."""

    def __init__(self, architecture):
        self.architecture = architecture
        self.launches = []  # with copies of their arguments, if `record` is set
        self.record = False
        self.instructions = {}  # kernel -> number of instructions that its programs executed
        self.executed = set()  # what `describe` says of each kernel that was launched
        self.running = None  # the kernel that was launched last, if it has not ended
        self.ended = set()  # the kernels that ran to their end; ", spans" if they were given some
        self.utils = self
        self.ptx = None  # of the kernel that is being loaded

    def get_current_target(self):
        compiler = import_module("triton.backends.compiler")
        return compiler.GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return dict(max_shared_mem=SHARED[self.architecture])

    def note_files(self, module, function, name, files, hash):
        """Triton calls this before it loads a kernel: remember the text of its PTX."""
        self.ptx = next(Path(path).read_text() for n, path in files.items() if n.endswith(".ptx"))

    def load_binary(self, name, cubin, shared, device):
        """Return module, function, registers, spills, and threads of a program at most."""
        return self.ptx, self.ptx, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        """Return what launches a kernel."""
        names = list(source.signature)
        constants = {names[path[0]]: value for path, value in source.constants.items()}
        given = [i for i, name in enumerate(names) if name not in constants]
        options = (metadata.num_warps, metadata.num_stages)
        types = {names[i]: source.signature[names[i]] for i in given}
        described = describe(source.fn.__name__, types, constants, *options)

        def launch(x, y, z, stream, ptx, packed, launch_metadata, enter, leave, *args):
            name = source.fn.__name__
            values = [args[i] for i in given]
            job = Launch(name, ptx, (x, y, z), [names[i] for i in given], values, metadata.shared)
            if self.record:
                self.launches.append(job.copy())
            self.executed.add(described)
            self.running = name + ", spans" * ("spans" in job.names)
            self.instructions[name] = self.instructions.get(name, 0) + job.run()
            self.ended.add(self.running)
            self.running = None

        return launch


def install(architecture):
    """Make this Triton's driver, and let our operators run their kernels on CPU tensors.

    architecture: 80, 86, 89, 90 or 120. A process has one: Triton keeps what it has compiled

    Returns the Driver.
    """
    runtime = import_module("triton.runtime")
    if INSTALLED:
        (driver,) = INSTALLED
        if driver.architecture != architecture:
            raise ValueError(f"this process runs kernels for sm_{driver.architecture}")
        return driver
    driver = Driver(architecture)
    INSTALLED.append(driver)
    runtime.driver.set_active(driver)
    knobs = import_module("triton.knobs")
    knobs.runtime.kernel_load_start_hook.add(driver.note_files)
    for name in OPERATORS:
        import_module(f"nanomdlm.kernels.{name}").runs_on = lambda tensor: True
    import_module("nanomdlm.kernels.operations")._missing = lambda device: ""
    return driver
