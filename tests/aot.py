"""Compile the kernels for GPUs from sm_80 on without one: registers, spills, instructions.

MDLM_TRITON=1 python tests/aot.py           # the main configurations, a table as in results/aot.md
MDLM_TRITON=1 python tests/aot.py --one     # a case of each kernel, for sm_90
MDLM_TRITON=1 python tests/aot.py --grouped   # the main ones of grouped attention
MDLM_TRITON=1 python tests/aot.py --most    # those that need most, too: what the slow tests compile
MDLM_TRITON=1 python tests/aot.py --all     # many more, the rarest for sm_90 alone
MDLM_TRITON=1 python tests/aot.py --json    # one JSON object a line

With a column that says which of them the emulator executes, as in results/aot.md:

python tests/ptx/cases.py --slow --json > cases.jsonl
MDLM_TRITON=1 python tests/aot.py --executed=cases.jsonl
"""

import concurrent.futures
import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from ptx import driver

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
CONSUMER = (86, 89, 120)  # GPUs with less shared memory; only the main cases are compiled for them
# bytes of shared memory a program may have
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10} | dict.fromkeys(CONSUMER, 99 << 10)
TYPES = dict(fp32=torch.float32, fp16=torch.float16, bf16=torch.bfloat16)
OPTIONS = ("num_warps", "num_stages")
# Numbers that usually divide by 16.
STRIDES = ("C", "K", "N", "limit", "n_rows", "q_stride", "k_stride", "v_stride")
# The ends of names of cases: of the main ones for sm_90 one of each kernel, and of all cases those
# that need most registers and memory.
ONE = r"(bf16 even T(, epilogue)?|bf16 even sizes|V=50304 bf16|C=384 bf16|ward D=64 bf16|ward bf16"
ONE += r"|T=256 i64, documents|64 x 384 bf16)$"
MOST = r"(odd T, (documents|blocks)(, epilogue)?|C=2048 \w+, documents|V=50304 \w+"
MOST += r"|T=8192 i64(, documents)?|x 384 bf16)$"


@dataclasses.dataclass
class Case:
    """A kernel as it is launched: each argument has a type, or a value if it is a constant."""

    name: str
    kernel: object
    types: dict  # argument -> "*bf16", "i32" ...
    config: dict  # constants, num_warps, num_stages
    aligned: frozenset = (
        frozenset()
    )  # pointers and numbers that are multiples of 16, as Triton notes
    main: tuple = ()  # architectures for which the default compiles it


def pointers(**types):
    return {f"{name}_ptr": f"*{kind}" for name, kind in types.items()}


def masking_cases():
    masking = import_module("nanomdlm.kernels.masking")
    names = ("count", "rows", "n_rows", "level", "sample", "seed", "step")
    sizes = ((64, "i32"), (64, "i64"), (256, "i64"), (1024, "i64"), (8192, "i64"))
    for (T, integer), never_mask in itertools.product(sizes, (False, True)):
        types = pointers(x0=integer, xt=integer, **dict.fromkeys(names, "i64"))
        types |= dict.fromkeys(("mask_id", "B", "T"), "i32")
        config = masking.row_config(T, never_mask)
        if never_mask:
            types |= pointers(never_mask="u1")  # what Triton calls a bool
        else:
            config |= dict(never_mask_ptr=None)
        main = (90,) if T == 256 else ()
        name = f"masking T={T} {integer}" + ", documents" * never_mask
        yield Case(name, masking.mask_kernel, types, config, main=main)


def head_cases():
    ce = import_module("nanomdlm.kernels.cross_entropy")
    index = dict(target="i64", weight="fp32", unit="fp32", loss="fp32")
    for dtype, V in itertools.product(TYPES, (65, 1000, 50304)):
        types = pointers(z=dtype, **index) | dict(V="i32", limit="i32")
        config = ce.row_config(V, TYPES[dtype])
        main = ARCHITECTURES if (dtype, V) == ("bf16", 50304) else ()
        yield Case(f"head, chunk V={V} {dtype}", ce.ce_chunk_kernel, types, config, main=main)


def convolution_cases():
    """float16 has the tiles of bfloat16."""
    conv = import_module("nanomdlm.kernels.convolution")
    for dtype, C, seen, backward in itertools.product(
        ("bf16", "fp32"), (384, 768, 2048), ("", ", documents"), (False, True)
    ):
        kernel = conv.norm_conv_backward_kernel if backward else conv.norm_conv_forward_kernel
        types = dict.fromkeys(("x", "y", "dx", "dy"), f"*{dtype}") | dict(spans="*i32")
        types |= dict.fromkeys(("weight", "r", "dw"), "*fp32")
        config = dict(EPS=conv.EPS, LEFT=2, K=5) | conv.row_config(C, backward)
        config |= {} if seen else dict(spans=None)
        config = {n: v for n, v in config.items() if n in kernel.arg_names or n in OPTIONS}
        types = {n: types.get(n, "i32") for n in kernel.arg_names if n not in config}
        main = ARCHITECTURES if (dtype, C, seen) == ("bf16", 384, "") else ()
        name = f"norm and convolution, {'backward' if backward else 'forward'} C={C} {dtype}" + seen
        yield Case(name, kernel, types, config, main=main)


def residual_cases():
    residual = import_module("nanomdlm.kernels.residual")
    for dtype, backward in itertools.product(TYPES, (False, True)):
        types = dict.fromkeys(("y", "x", "out"), f"*{dtype}")
        types |= dict(seed="*i64", offset="i32", dropped="i32", scale="fp32", N="i32")
        config = residual.config() | (dict(x=None) if backward else {})
        types = {n: kind for n, kind in types.items() if n not in config}
        main = ARCHITECTURES if dtype == "bf16" else ()
        name = f"dropout and addition, {'backward' if backward else 'forward'} {dtype}"
        yield Case(name, residual.residual_kernel, types, config, main=main)


def relu2_cases():
    """Rows that are whole tiles, as in training, and any others; float16 is like bfloat16."""
    relu2 = import_module("nanomdlm.kernels.relu2")
    for dtype, backward, even in itertools.product(("bf16", "fp32"), (False, True), (True, False)):
        M, N, K, warps, stages = relu2.tiles(TYPES[dtype])
        types = dict.fromkeys(("x", "w", "a", "out"), f"*{dtype}") | dict.fromkeys("MNK", "i32")
        config = dict(TILE_M=M, TILE_N=N, TILE_K=K, EVEN=even, num_warps=warps, num_stages=stages)
        config |= {} if backward else dict(a=None)
        types = {n: kind for n, kind in types.items() if n not in config}
        main = ARCHITECTURES if (dtype, even) == ("bf16", True) else ()
        name = f"ReLU^2, {'backward' if backward else 'forward'} {dtype}"
        name += f" {'even' if even else 'odd'} sizes"
        yield Case(name, relu2.relu2_kernel, types, config, main=main)


def attention_cases():
    """float16 has the tiles of bfloat16."""
    at = import_module("nanomdlm.kernels.attention")
    for dtype, D, backward in itertools.product(("bf16", "fp32"), at.HEAD_DIMS, (False, True)):
        types = dict.fromkeys(("qkv", "qk", "dqkv"), f"*{dtype}")
        types |= dict(cos="*fp32", sin="*fp32", n_rows="i32", T="i32")
        config = dict(EPS=at.EPS, H=384 // D, D=D, NORM=True, BACKWARD=backward, ROWS=2048 // D)
        config |= dict(num_warps=4) | {("qk" if backward else "dqkv"): None}
        types = {n: kind for n, kind in types.items() if n not in config}
        main = ARCHITECTURES if (dtype, D) == ("bf16", 64) else ()
        name = f"norm and rotation, {'backward' if backward else 'forward'} D={D} {dtype}"
        yield Case(name, at.prepare_kernel, types, config, main=main)
    kernels = (at.attention_forward_kernel, at.attention_dq_kernel, at.attention_dkdv_kernel)
    kernels += (at.attention_backward_kernel,)
    spans = ("", ", documents", ", blocks")
    for kernel, dtype, D, even, seen in itertools.product(
        kernels, ("bf16", "fp32"), at.HEAD_DIMS, (True, False), spans
    ):
        if seen == ", documents" and even:  # odd ones need more
            continue
        fused = kernel is at.attention_backward_kernel
        if fused and (seen or dtype == "fp32"):
            continue
        types = dict.fromkeys(("qk", "qkv", "grad", "out", "dqkv"), f"*{dtype}")
        types |= dict.fromkeys(("lse", "delta"), "*fp32") | dict(spans="*i32", scale="fp32")
        T = 256 if even else 255
        M, N, warps, stages = at.tiles(kernel, TYPES[dtype], D, T, bool(seen))
        config = dict(H=384 // D, D=D, N=2, TILE_M=M, TILE_N=N, EVEN=even)
        config |= dict(R=1 + (seen == ", blocks"), num_warps=warps, num_stages=stages)
        config |= {} if seen else dict(spans=None)
        config |= dict(PARTS=256 // N) if fused else {}
        main = (90,) if fused and D == 64 else ()
        if not fused and (dtype, D, even) == ("bf16", 64, seen != ", documents"):
            main = (90,) if seen else ARCHITECTURES
        name = kernel.fn.__name__.removesuffix("_kernel").replace("_", " ")
        name += f" D={D} {dtype} {'even' if even else 'odd'} T" + seen
        has_epilogue = "cos" in kernel.arg_names
        for more in (False, True)[: 1 + has_epilogue]:
            types |= dict(cos="*fp32", sin="*fp32")
            constants = config | (dict(NORM=True) if more else dict(NORM=False, cos=None, sin=None))
            constants |= dict(EPS=at.EPS)
            given = {*kernel.arg_names, *OPTIONS}
            constants = {n: v for n, v in constants.items() if n in given}
            left = {n: types.get(n, "i32") for n in kernel.arg_names if n not in constants}
            yield Case(name + ", epilogue" * more, kernel, left, constants, main=main)


def grouped_attention_cases():
    """32 heads of queries on 8 of keys, and rows that are not whole tiles: these need most."""
    at = import_module("nanomdlm.kernels.grouped_attention")
    kernels = (at.grouped_attention_forward_kernel, at.grouped_attention_dq_kernel)
    kernels += (at.grouped_attention_dkdv_kernel,)
    for kernel, dtype, D, seen in itertools.product(
        kernels, ("bf16", "fp32"), at.HEAD_DIMS, ("documents", "blocks")
    ):
        pointers = ("q", "k", "v", "grad", "out", "dq", "dk", "dv")
        types = dict.fromkeys(pointers, f"*{dtype}") | dict.fromkeys(("lse", "delta"), "*fp32")
        types |= dict(spans="*i32", scale="fp32")
        M, N, warps, stages = at.tiles(kernel, TYPES[dtype], D)
        config = dict(H=32, G=8, D=D, TILE_M=M, TILE_N=N, EVEN=False, R=1 + (seen == "blocks"))
        config |= dict(num_warps=warps, num_stages=stages)
        config = {n: v for n, v in config.items() if n in kernel.arg_names or n in OPTIONS}
        types = {n: types.get(n, "i32") for n in kernel.arg_names if n not in config}
        main = (80, 90, 120) if (dtype, D) == ("bf16", 128) else ()
        name = kernel.fn.__name__.removesuffix("_kernel").replace("_", " ")
        yield Case(f"{name} D={D} {dtype} {seen}", kernel, types, config, main=main)


def muon_cases():
    ns = import_module("nanomdlm.kernels.newton_schulz")
    muon = import_module("nanomdlm.support.run.muon")
    for K, N in ((64, 384), (64, 128), (32, 384), (32, 128)):
        config = ns.config_of(K, N, muon.COEFFICIENTS, muon.EPS)
        main = ARCHITECTURES if (K, N) == (64, 384) else ()
        types = dict(x="*bf16", y="*bf16")
        yield Case(f"Muon {K} x {N} bf16", ns.newton_schulz_kernel, types, config, main=main)


def variants(case):
    """The case with what Triton learns at launch: which arguments divide by 16, which are 1."""
    numbers = {n for n, kind in case.types.items() if kind == "i32"}
    numbers -= {p.name for p in case.kernel.params if p.do_not_specialize}
    memory = {n for n, kind in case.types.items() if kind.startswith("*")}
    always = ({"limit"} & numbers) | ({"T", "M"} & numbers if case.config.get("EVEN") else set())
    usual = always | memory | (numbers & set(STRIDES))
    yield dataclasses.replace(case, aligned=frozenset(usual))
    alone = ("mask_kernel", "newton_schulz_kernel")  # the second copies what is not aligned
    usual_alone = "spans" in case.types or case.kernel.fn.__name__ in alone
    if usual_alone or "fp32" in case.name.split() or "fp16" in case.name:
        return
    attention = "EVEN" in case.config  # it copies what is not aligned
    most = memory | numbers
    if attention and not case.config["EVEN"]:
        most -= {"T"}
    for name, aligned in (("aligned", most), ("unaligned", always)):
        if aligned != usual and not (attention and name == "unaligned"):
            yield dataclasses.replace(
                case, name=f"{case.name}, {name}", aligned=frozenset(aligned), main=()
            )
    ones = numbers & ({"H"} if always else {"B", "T", "H"}) - always
    if ones:
        config = case.config | dict.fromkeys(ones, 1)
        yield dataclasses.replace(
            case, name=f"{case.name}, ones", config=config, aligned=frozenset(usual - ones), main=()
        )


def cases(arch, which="--main"):
    """The cases of an architecture: the main ones, or more or fewer, as above.

    The rare ones are on sm_90 only, as they take long.
    """
    makers = (masking_cases, head_cases, convolution_cases, residual_cases, attention_cases)
    makers += (relu2_cases,)
    chosen = [c for make in (*makers, grouped_attention_cases, muon_cases) for c in make()]
    if arch != 90:
        some = ("bf16", "T=8192", *(["fp32 even"] if arch == 80 else []))  # it has least memory
        chosen = [c for c in chosen if any(word in c.name for word in some)]
        chosen = [c for c in chosen if "PARTS" not in c.config]  # of sm_90 alone
    chosen = [v for c in chosen for v in itertools.islice(variants(c), None if arch == 90 else 1)]
    if which == "--one":
        return [c for c in chosen if arch == 90 and arch in c.main and re.search(ONE, c.name)]
    if which == "--grouped":
        return [c for c in chosen if arch in c.main and c.name.startswith("grouped")]
    if arch in CONSUMER:
        return [c for c in chosen if arch in c.main]
    if which == "--most":
        return [c for c in chosen if arch in c.main or re.search(MOST, c.name)]
    return chosen if which == "--all" else [c for c in chosen if arch in c.main]


def compile_one(index, arch, which):
    """Registers, spills, shared memory, tensor-core instructions of a case on an architecture."""
    import triton
    from triton.backends.compiler import GPUTarget

    case = cases(arch, which)[index]
    names = case.kernel.arg_names
    constants = {n: v for n, v in case.config.items() if n not in OPTIONS}
    if "DTYPE" in constants:
        constants["DTYPE"] = getattr(
            triton.language, str(constants["DTYPE"]).removeprefix("torch.")
        )
    signature = {n: "constexpr" if n in constants else case.types[n] for n in names}
    source = triton.compiler.ASTSource(
        case.kernel,
        signature,
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in case.aligned},
    )
    options = {n: v for n, v in case.config.items() if n in OPTIONS} | dict(enable_fp_fusion=True)
    types = {n: kind for n, kind in case.types.items() if n not in constants}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage, sass = disassemble(compiled.asm["cubin"])
    options = (compiled.metadata.num_warps, compiled.metadata.num_stages)
    described = driver.describe(case.kernel.fn.__name__, types, constants, *options)
    instructions = ("HMMA", "HGMMA", "UTCHMMA")
    return dict(
        name=case.name,
        arch=arch,
        described=described,
        blocks="x".join(str(v) for n, v in constants.items() if n.startswith("TILE")),
        warps=compiled.metadata.num_warps,
        stages=compiled.metadata.num_stages,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        shared=compiled.metadata.shared,
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        dots="tt.dot" in compiled.asm["ttir"],
        half=any(t in compiled.asm["ttir"] for t in ("xf16", "xbf16")),
        **{i.lower(): len(re.findall(rf"\b{i}\b", sass)) for i in instructions},
    )


def disassemble(cubin):
    """What cuobjdump, which Triton bundles, says of resource usage and instructions."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        for flag in ("-res-usage", "-sass"):
            yield subprocess.run(
                [tool, flag, f.name], capture_output=True, text=True, check=True
            ).stdout


def compile_all(which, workers=2, architectures=ARCHITECTURES):
    """One result for each case and architecture, in order, as they come."""
    jobs = [(i, arch, which) for arch in architectures for i in range(len(cases(arch, which)))]
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        yield from pool.map(compile_one, *zip(*jobs, strict=True), chunksize=3)


def read_executed(path):
    """What the emulator executed: pairs of an architecture and what was compiled.

    path: the lines that tests/ptx/cases.py --json prints; of them, the cases within their bounds
    """
    from ptx import cases

    results = map(json.loads, Path(path).read_text().splitlines())
    return {(r["arch"], text) for r in results if cases.is_within(r) for text in r["executed"]}


HEAD = ["kernel", "sm", "warps", "registers", "shared memory, KiB", "spills"]
HEAD += ["tensor-core instructions"]

if __name__ == "__main__":
    as_json = "--json" in sys.argv
    files = [arg.partition("=")[2] for arg in sys.argv if arg.startswith("--executed=")]
    executed = read_executed(files[0]) if files else None
    if not as_json:
        HEAD += ["executed"] if files else []
        print(f"| {' | '.join(HEAD)} |", "| --- " * len(HEAD) + "|", sep="\n")
    given = [flag for flag in ("--one", "--grouped", "--most", "--all") if flag in sys.argv]
    for r in compile_all(given[0] if given else "--main"):
        products = [f"{r[i]} {i.upper()}" for i in ("hmma", "hgmma", "utchmma") if r[i]]
        row = f"| {r['name']} | {r['arch']} | {r['warps']} | {r['registers']} "
        row += f"| {r['shared'] / 1024:.1f} | {r['spills']} | {' '.join(products) or '-'} "
        if files:
            row += f"| {'yes' if (r['arch'], r['described']) in executed else 'no'} "
        row += "|"
        print(json.dumps(r) if as_json else row, flush=True)
