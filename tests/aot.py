"""Compile every kernel in every configuration that is used for sm_80, sm_90 and sm_100, without a GPU.

MDLM_TRITON=1 python tests/aot.py            # a Markdown table, as in results/aot.md
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
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes a program may have


def configurations():
    for name in ("masking", "cross_entropy", "attention"):
        yield from getattr(importlib.import_module(f"kernels.{name}"), "aot_configs", list)()


def compile_one(index, arch):
    """Registers, spills, shared memory, tensor-core instructions of a configuration on an architecture."""
    import triton
    from triton.backends.compiler import GPUTarget

    name, kernel, signature, constants, options = list(configurations())[index]
    signature = signature | dict.fromkeys(constants, "constexpr")
    order = {k: signature[k] for k in kernel.arg_names}
    source = triton.compiler.ASTSource(
        kernel, order, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()}
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
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        dots="tt.dot" in compiled.asm["ttir"],
        **{i.lower(): len(re.findall(rf"\b{i}\b", sass)) for i in ("HMMA", "HGMMA", "UTCHMMA", "FFMA")},
        half=any(t in compiled.asm["ttir"] for t in ("xf16", "xbf16")),
    )


def compile_all(workers=2):
    """One result for each configuration and architecture, in order."""
    jobs = [(i, arch) for i in range(len(list(configurations()))) for arch in ARCHITECTURES]
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        return list(pool.map(compile_one, *zip(*jobs, strict=True), chunksize=3))


if __name__ == "__main__":
    results = compile_all()
    if "--json" in sys.argv:
        print("\n".join(map(json.dumps, results)))
    else:
        print(
            "| kernel | sm | warps | registers | shared memory, KiB | spills | tensor-core instructions |\n"
            + "| --- " * 7
            + "|"
        )
        for r in results:
            print(
                f"| {r['name']} | {r['arch']} | {r['warps']} | {r['registers']} "
                f"| {r['shared'] / 1024:.1f} | {r['spills']} | "
                f"{' '.join(f'{r[i]} {i.upper()}' for i in ('hmma', 'hgmma', 'utchmma') if r[i]) or '-'} |"
            )
