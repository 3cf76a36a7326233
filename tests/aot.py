"""Compile every kernel in every configuration that is used for sm_80, sm_90 and sm_100, without a GPU.

MDLM_TRITON=1 python tests/aot.py [--few]    # a Markdown table, as in results/aot.md
MDLM_TRITON=1 python tests/aot.py --json     # one JSON object a line
"""

import concurrent.futures
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

ARCHITECTURES = (80, 90, 100)
USUAL = {"sb", "st", "s3", "sh", "C", "N", "K"}  # numbers that usually divide by 16
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes a program may have


def variants(config):
    """A configuration with what Triton learns at launch: (name, ..., arguments divisible by 16, equal to 1).

    First what is usual, then numbers that happen to divide by 16, memory that does not, and sizes of 1.
    """
    name, kernel, signature, constants, _ = config
    pointers = {k for k, kind in signature.items() if kind.startswith("*")}
    general = constants.keys() | {p.name for p in kernel.params if p.do_not_specialize}
    integers = {k for k, kind in signature.items() if kind == "i32" and k not in general}
    even, summed = constants.get("EVEN"), constants.get("SUM")
    # The factors of dW are buffers of ours.
    always = (
        {"limit", "start"} | ({"T"} if even else set()) | (pointers | {"M", "stride_ak"} if summed else set())
    )
    usual = always | USUAL | {k for k in integers if k.startswith("stride_")}
    ones = set() if even else integers & {"B", "T", "H", "M"} - always
    if "odd width" in name:  # a kernel that has a configuration of its own for that
        yield name, *config[1:], (pointers | integers) & always, set()
        return
    yield name, *config[1:], pointers | integers & usual, set()
    yield name + ", aligned", *config[1:], pointers | integers - ({"T"} if even is False else set()), set()
    # Attention copies what it cannot read wide; elsewhere the first choice is taken for that.
    if not summed and even is None and "choice" not in name:
        yield name + ", unaligned", *config[1:], (pointers | integers) & always, set()
    if ones:
        yield name + ", ones", *config[1:], pointers | integers & usual - ones, ones


def configurations(arch, few):
    """The configurations in use on sm_<arch>, as variants gives them.

    fp16 and fp32 as is usual; integers and bf16 in all variants. `few`: no fp16 and fp32, nothing unusual,
    and fewer shapes, on sm_80 and sm_100 of heads only the usual size, and of what autotuning chooses from
    only the first.
    """
    masking, cross_entropy, attention = (
        importlib.import_module(f"kernels.{name}") for name in ("masking", "cross_entropy", "attention")
    )
    found = [
        *masking.aot_configs(),
        *cross_entropy.aot_configs(),
        *attention.aot_configs(arch, every=not few),
    ]
    usual = lambda name: "bf16" in name or name.startswith("masking")
    if not few:
        return [v for c in found for v in (variants(c) if usual(c[0]) else [next(variants(c))])]
    drop = ["V=1000", "V=256", "V=2 ", "filled", "odd width", "T=1024", "T=64 i64"]
    drop += ["D32", "D128", "T=64", "T=256", "loss only", "choice"] if arch != 90 else ["D32_T64", "D128_T64"]
    choice = lambda name: "choice" not in name or any(k in name for k in ("D64_T512", "V=65 bf16", "product"))
    return [
        next(variants(c)) for c in found if usual(c[0]) and choice(c[0]) and not any(d in c[0] for d in drop)
    ]


def compile_one(index, arch, few):
    """Registers, spills, shared memory, tensor-core instructions of a configuration on an architecture."""
    import triton
    from triton.backends.compiler import GPUTarget

    name, kernel, signature, constants, options, divisible, ones = configurations(arch, few)[index]
    constants = constants | dict.fromkeys(ones, 1)
    signature = signature | dict.fromkeys(constants, "constexpr")
    order = {k: signature[k] for k in kernel.arg_names}
    source = triton.compiler.ASTSource(
        kernel,
        order,
        constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()},
        attrs={(kernel.arg_names.index(k),): [["tt.divisibility", 16]] for k in divisible},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        usage, sass = (
            subprocess.run(
                [tools / "cuobjdump", flag, f.name], capture_output=True, text=True, check=True
            ).stdout
            for flag in ("-res-usage", "-sass")
        )
    return dict(
        name=name,
        arch=arch,
        blocks="x".join(str(v) for k, v in constants.items() if k.startswith("BLOCK")),
        stages=compiled.metadata.num_stages,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        dots="tt.dot" in compiled.asm["ttir"],
        **{i.lower(): len(re.findall(rf"\b{i}\b", sass)) for i in ("HMMA", "HGMMA", "UTCHMMA", "FFMA")},
        half=any(t in compiled.asm["ttir"] for t in ("xf16", "xbf16")),
    )


def compile_all(few=False, workers=2):
    """One result for each configuration and architecture, in order, as they come."""
    jobs = [(i, arch, few) for arch in ARCHITECTURES for i in range(len(configurations(arch, few)))]
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        yield from pool.map(compile_one, *zip(*jobs, strict=True), chunksize=3)


HEAD = "| kernel | sm | warps | registers | shared memory, KiB | spills | tensor-core instructions |"

if __name__ == "__main__":
    as_json = "--json" in sys.argv
    if not as_json:
        print(HEAD, "| --- " * 7 + "|", sep="\n")
    for r in compile_all(few="--few" in sys.argv):
        products = " ".join(f"{r[i]} {i.upper()}" for i in ("hmma", "hgmma", "utchmma") if r[i]) or "-"
        row = f"| {r['name']} | {r['arch']} | {r['warps']} | {r['registers']} | {r['shared'] / 1024:.1f} "
        print(json.dumps(r) if as_json else f"{row}| {r['spills']} | {products} |", flush=True)
