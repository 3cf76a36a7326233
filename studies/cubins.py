"""Does the code that another version of Triton makes compute the right thing on this GPU?

    pip install --no-deps --target build/triton triton==3.7.1
    export MDLM_TRITON=1                                    # a GPU is not needed to compile
    PYTHONPATH=build/triton python studies/cubins.py make   # for sm_90
    python studies/cubins.py run                            # on an H100 or H200, any Triton

`make` calls each operation on the CPU, and compiles what it would launch. `run` calls them on the
GPU, and launches that code by the driver's own functions in place of Triton's. Results and
gradients are compared with float64 as in studies/smoke.py, and each launch is repeated, with equal
bits or not: 3.7.1 is the Triton of torch 2.13, and no GPU has run it (results/aot.md).
"""

import argparse
import ctypes
import importlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/cubins.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch

from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels.launch import ENABLED
from nanomdlm.kernels.reference import block_spans, document_spans
from nanomdlm.support.errors import UserError
from studies import smoke

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "cubins"
OPERATIONS = ("attention", "linear_cross_entropy", "norm_conv", "mask_tokens")
SCALARS = dict(i32=ctypes.c_int32, i64=ctypes.c_int64, fp32=ctypes.c_float)
SCALARS |= dict(u32=ctypes.c_uint32, u64=ctypes.c_uint64, i1=ctypes.c_int8)


def call_all():
    """Call each operation, forward and backward; whether smoke.compare finds all right."""
    ok = True
    T = 512
    ends = torch.rand(8, T, generator=torch.Generator().manual_seed(0)) < 0.02
    for D in (32, 64):
        for spans, name in (
            (None, ""),
            (document_spans(ends), "documents"),
            (block_spans(T // 2, 16, "cpu"), "blocks"),
        ):
            spans = None if spans is None else spans.to(smoke.DEVICE)
            ok &= smoke.attention(torch.bfloat16, 8, T, 3, D, spans, name)
    ok &= smoke.norm_conv(torch.bfloat16, 8, 256, 384)
    ok &= smoke.head(torch.bfloat16, 512, 384, 65) & smoke.head(torch.bfloat16, 512, 384, 1000)
    return ok & smoke.masking(64, 256)


def key_of(kernel, args, options):
    """What a launch is, as text: equal on both machines, and without asking Triton."""
    parts = [str(x.dtype) if torch.is_tensor(x) else repr(x) for x in args]
    parts += [f"{name}={options[name]}" for name in sorted(options)]
    return f"{kernel.fn.__name__}({', '.join(parts)})"


def bits(x):
    return x.reshape(-1).view(torch.uint8)


def replace_launch(launch):
    for name in OPERATIONS:
        sys.modules[getattr(kernels, name).__module__].launch = launch


def compare_nothing():
    """Let smoke.py call operations on a CPU where no kernel computes anything."""
    smoke.DEVICE = "cpu"
    smoke.compare = lambda *results: True
    smoke.say = lambda *results: None


# ---- make
def make():
    """Compile what the calls launch, for sm_90, into FOLDER."""
    triton = importlib.import_module("triton")
    sys.path.append(str(ROOT / "tests"))
    importlib.import_module("ptx.driver").install(90)
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = {}

    def compile_launch(kernel, grid, *args, **options):
        key = key_of(kernel, args, options)
        if key in made:
            return
        code = kernel.warmup(*args, grid=grid, **options, enable_fp_fusion=True)
        names = list(code.src.signature)
        constants = {path[0] for path in code.src.constants}
        given = [i for i in range(len(names)) if i not in constants]
        path = FOLDER / f"{len(made)}.cubin"
        path.write_bytes(code.asm["cubin"])
        made[key] = dict(
            cubin=path.name,
            name=code.metadata.name,
            shared=code.metadata.shared,
            threads=32 * code.metadata.num_warps,
            args=[(i, code.src.signature[names[i]]) for i in given],
        )

    replace_launch(compile_launch)
    compare_nothing()
    call_all()
    text = json.dumps(dict(triton=triton.__version__, launches=made), indent=1)
    (FOLDER / "launches.json").write_text(text)
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"{len(made)} launches by triton {triton.__version__}, {size >> 10} KiB, in {FOLDER}")


# ---- run
class Launcher:
    """Launches the code in FOLDER by CUDA's driver, and repeats each launch."""

    def __init__(self, repetitions):
        read = json.loads((FOLDER / "launches.json").read_text())
        self.triton, self.launches = read["triton"], read["launches"]
        self.repetitions = repetitions
        self.functions = {}  # name of a file -> function, loaded
        self.unequal = {}  # key -> repetitions with other bits
        self.cuda = ctypes.CDLL("libcuda.so.1") if torch.cuda.is_available() else None

    def call(self, name, *args):
        if code := getattr(self.cuda, name)(*args):
            raise RuntimeError(f"{name} fails: CUDA error {code}")

    def load(self, made):
        if made["cubin"] not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            image = (FOLDER / made["cubin"]).read_bytes()
            self.call("cuModuleLoadData", ctypes.byref(module), image)
            name = made["name"].encode()
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name)
            if made["shared"] > 48 << 10:  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self.call("cuFuncSetAttribute", function, 8, ctypes.c_int(made["shared"]))
            self.functions[made["cubin"]] = function
        return self.functions[made["cubin"]]

    def launch(self, kernel, grid, *args, **options):
        """In place of kernels.launch.launch."""
        key = key_of(kernel, args, options)
        if key not in self.launches:
            raise UserError(f"{FOLDER} has no {key}; run `studies/cubins.py make` again")
        made = self.launches[key]
        values = []
        for i, kind in made["args"]:
            if kind.startswith("*"):
                values.append(ctypes.c_uint64(args[i].data_ptr()))
            else:
                value = args[i].item() if torch.is_tensor(args[i]) else args[i]
                values.append(SCALARS[kind](value))
        values += [ctypes.c_uint64(0)] * 2  # scratch memory, which these kernels do not use
        if self.cuda is None:
            return
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        function = self.load(made)
        size = (*grid, *[1] * (3 - len(grid)), made["threads"], 1, 1, made["shared"])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        size = [ctypes.c_uint(n) for n in size]
        before = [x.clone() for x in args if torch.is_tensor(x)]
        self.call("cuLaunchKernel", function, *size, stream, pointers, None)
        first = [x.clone() for x in args if torch.is_tensor(x)]
        unequal = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(self.repetitions):
            tensors = [x for x in args if torch.is_tensor(x)]
            for x, y in zip(tensors, before):
                x.copy_(y)
            self.call("cuLaunchKernel", function, *size, stream, pointers, None)
            differ = [(bits(x) != bits(y)).any() for x, y in zip(tensors, first)]
            unequal += torch.stack(differ).any()
        if n := int(unequal):
            self.unequal[key] = n


def run(repetitions):
    launcher = Launcher(repetitions)
    print(f"{len(launcher.launches)} launches by triton {launcher.triton}")
    replace_launch(launcher.launch)
    if launcher.cuda is None:
        for name in OPERATIONS:
            sys.modules[getattr(kernels, name).__module__].runs_on = lambda tensor: True
        compare_nothing()
        call_all()
        print("no CUDA device: each launch was found and its arguments packed; none was begun")
        return True
    ok = call_all()
    for key, n in launcher.unequal.items():
        print(f"{n} of {repetitions} repetitions have other bits: {key}")
    print("all agree" if ok and not launcher.unequal else "not all agree")
    return ok and not launcher.unequal


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["make", "run"])
    parser.add_argument("--repetitions", type=int, default=1000, help="of each launch")
    options = parser.parse_args(argv)
    if not ENABLED:
        raise UserError("there is no CUDA device; set MDLM_TRITON=1 to compile without one")
    if options.what == "make":
        make()
        return 0
    if not (FOLDER / "launches.json").exists():
        raise UserError(f"{FOLDER} is missing; first run `python studies/cubins.py make`")
    return int(not run(options.repetitions))


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
