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


def configurations(arch, few):
    """The configurations in use on sm_<arch>; with `few`, without fp16 and fp32 and with fewer shapes."""
    masking, cross_entropy, attention = (
        importlib.import_module(f"kernels.{name}") for name in ("masking", "cross_entropy", "attention")
    )
    found = [
        *masking.aot_configs(),
        *cross_entropy.aot_configs(),
        *attention.aot_configs(arch, every=not few),
    ]
    if few:
        found = [c for c in found if "fp" not in c[0] and "V=1000" not in c[0] and "V=256" not in c[0]]
    if few and arch != 90:  # what differs most between generations: the usual head size
        found = [c for c in found if not c[0].startswith("attention") or "D64" in c[0]]
    return found


def compile_one(index, arch, few):
    """Registers, spills, shared memory, tensor-core instructions of a configuration on an architecture."""
    import triton
    from triton.backends.compiler import GPUTarget

    name, kernel, signature, constants, options = configurations(arch, few)[index]
    signature = signature | dict.fromkeys(constants, "constexpr")
    order = {k: signature[k] for k in kernel.arg_names}
    # At run time Triton knows that torch's memory is aligned; attention needs that to read wide.
    aligned = [
        k
        for k, kind in order.items()
        if name.startswith("attention")
        and (kind.startswith("*") or k in ("sb", "st", "s3", "sh") or (k == "T" and constants["EVEN"]))
    ]
    source = triton.compiler.ASTSource(
        kernel,
        order,
        constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()},
        attrs={(kernel.arg_names.index(k),): [["tt.divisibility", 16]] for k in aligned},
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


def compile_all(few=False, workers=2):
    """One result for each configuration and architecture, in order."""
    jobs = [(i, arch, few) for arch in ARCHITECTURES for i in range(len(configurations(arch, few)))]
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        return list(pool.map(compile_one, *zip(*jobs, strict=True), chunksize=3))


if __name__ == "__main__":
    results = compile_all(few="--few" in sys.argv)
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
