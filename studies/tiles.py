"""Which tile sizes of the attention and loss kernels are the fastest on this GPU?

    python studies/tiles.py              # about 40 s after compiling, which uses all cores
    python studies/tiles.py --compile    # compile the candidates alone
    python studies/tiles.py --time       # time them alone, compiling as needed

Each candidate is checked against PyTorch in float32 and timed on inputs larger than the L2 cache.
A table for each case, the fastest first; the present choice is marked.
"""

import argparse
import functools
import multiprocessing
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/tiles.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch

from nanomdlm.kernels import attention as A
from nanomdlm.kernels import convolution as N
from nanomdlm.kernels import cross_entropy as C
from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels.launch import ENABLED
from nanomdlm.kernels.reference import block_spans, document_spans
from nanomdlm.support.errors import UserError

CHOOSE = A.tiles
# TILE_M (queries), TILE_N (keys), warps, stages
ROWS = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (128, 64, 4, 3), (64, 128, 4, 2)]
ROWS += [(64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3)]
ROWS += [(64, 32, 4, 2), (128, 32, 4, 2), (64, 128, 4, 1), (128, 64, 8, 1), (128, 64, 4, 1)]
COLS = [(32, 128, 8, 2), (64, 128, 8, 2), (64, 64, 4, 1), (64, 64, 4, 2), (32, 64, 4, 2)]
COLS += [(64, 128, 8, 1), (64, 128, 4, 1), (32, 64, 4, 1), (32, 64, 4, 3), (128, 64, 4, 1)]
COLS += [(128, 128, 8, 1), (32, 128, 4, 2), (64, 128, 4, 2), (128, 64, 8, 1), (16, 64, 4, 2)]
CANDIDATES = {
    A.attention_forward_kernel: ROWS,
    A.attention_dq_kernel: ROWS,
    A.attention_dkdv_kernel: COLS,
}
# T, D, spans
SHAPES = [(256, 64, ""), (1024, 64, ""), (256, 32, ""), (512, 64, "documents"), (512, 64, "blocks")]
LOSS = [(8192, 4), (8192, 8), (8192, 16), (4096, 8), (4096, 4), (4096, 16), (2048, 4), (2048, 8)]
LOSS += [(16384, 16), (16384, 32), (8192, 32), (1024, 4)]


def make(T, D, kind, tokens=32768):
    """qkv, the gradient of the output, spans."""
    H = 768 // D
    g = torch.Generator("cuda").manual_seed(0)
    size = (tokens // T, T, 3, H, D)
    qkv = torch.randn(size, generator=g, device="cuda").to(torch.bfloat16)
    grad = torch.randn(qkv[:, :, 0].shape, generator=g, device="cuda").to(torch.bfloat16)
    spans = None
    if kind == "blocks":
        spans = block_spans(T // 2, 16, "cuda")
    if kind == "documents":
        ends = torch.rand(tokens // T, T, generator=g, device="cuda") < 4 / T
        spans = document_spans(ends)
    return qkv, grad, spans


def tensors_of(kernel, qkv, grad, spans):
    """The tensors that a kernel takes after qk and qkv, with right values where it reads them."""
    out, lse, _ = A._forward(qkv, None, None, False, spans)
    delta = torch.empty_like(lse)
    dqkv = torch.empty_like(qkv)
    if kernel is A.attention_forward_kernel:
        return out, lse
    A._run(A.attention_dq_kernel, qkv, qkv, (grad, out, lse, delta, dqkv), spans)
    if kernel is A.attention_dq_kernel:
        return grad, out, lse, delta, dqkv
    return grad, lse, delta, dqkv


def compile_one(job):
    """Compile a candidate by launching it on little data; say what went wrong, or None."""
    i, shape, tile = job
    kernel = list(CANDIDATES)[i]
    try:
        A.tiles = CHOOSE
        data = make(*shape, tokens=2 * shape[0])
        tensors = tensors_of(kernel, *data)
        A.tiles = lambda *_: tile
        A._run(kernel, data[0], data[0], tensors, data[2])
        torch.cuda.synchronize()
    except Exception as e:
        return f"{type(e).__name__}: {str(e).splitlines()[0][:60]}"


def compile_all():
    """{job: trouble or None}, in as many processes as there are cores."""
    jobs = [
        (i, shape, tile)
        for i, tiles in enumerate(CANDIDATES.values())
        for shape in SHAPES
        for tile in tiles
    ]
    workers = min(12, os.cpu_count() - 1 or 1)
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=None) as pool:
        return dict(zip(jobs, pool.map(compile_one, jobs, chunksize=4)))


def in_emulator(emulated):
    """The exit code of a study without a GPU; emulated(): whether the emulator's results agree."""
    if not ENABLED:
        raise UserError("there is no CUDA device; MDLM_TRITON=1 checks it in the emulator")
    print("no CUDA device: nothing is timed; the emulator executes the PTX of sm_90")
    return int(not emulated())


def milliseconds(call, seconds=0.04):
    """The median over CUDA graphs of several calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            call()
    times = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    while sum(times) < seconds * 1e3 or len(times) < 5:
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] / 5


def result_of(kernel, tensors):
    """What a kernel computes, among its tensors."""
    if kernel is A.attention_forward_kernel:
        return tensors[0]
    return tensors[-1][:, :, :1] if kernel is A.attention_dq_kernel else tensors[-1][:, :, 1:]


def attention_case(kernel, shape, tiles, troubles):
    """Time the candidates of a kernel; their results are compared with those of the present one."""
    qkv, grad, spans = make(*shape)
    present = CHOOSE(kernel, qkv.dtype, shape[1], shape[0], spans is not None)
    tensors = tensors_of(kernel, qkv, grad, spans)
    result = result_of(kernel, tensors)
    call = functools.partial(A._run, kernel, qkv, qkv, tensors, spans)
    call()
    exact = result.float().clone()
    lines = []
    for tile in tiles:
        A.tiles = lambda *_, tile=tile: tile
        text = troubles.get(tile)
        ms = float("inf")
        if not text:
            result.zero_()
            try:
                ms = milliseconds(call)
                error = ((result.float() - exact).norm() / exact.norm()).item()
                text = f"{ms:.4f} ms" + (f", WRONG: differs by {error:.1e}" if error > 1e-2 else "")
            except Exception as e:
                text = f"{type(e).__name__}: {str(e).splitlines()[0][:60]}"
        lines.append((ms, tile, text))
    A.tiles = CHOOSE
    T, D, kind = shape
    print(f"\n{kernel.fn.__name__} T={T} D={D} {kind}")
    for _, tile, text in sorted(lines):
        print(f"{'*' if tile == present else ' '} {tile}: {text}", flush=True)


def loss_case(V, rows):
    limit = -(-V // 64) * 64
    g = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(rows, limit, generator=g, device="cuda").to(torch.bfloat16)
    targets = torch.randint(V, (rows,), generator=g, device="cuda")
    weight = torch.full((rows,), 1 / rows, device="cuda")
    unit, loss = weight.max(), torch.empty(rows, device="cuda")
    present = C.row_config(V, logits.dtype)
    lines = []
    for tile, warps in LOSS if V > 16384 else [(128, 1), (128, 2), (128, 4), (256, 1), (256, 2)]:
        options = dict(TILE=tile, num_warps=warps)
        args = (logits, targets, weight, unit, loss, V, limit)
        call = functools.partial(C.launch, C.ce_chunk_kernel, (rows,), *args, **options)
        ms = milliseconds(call)
        n_bytes = 2 * logits.numel() * 2
        mark = "*" if options == present else " "
        lines.append(
            (ms, f"{mark} {tile} x {warps} warps: {ms:.4f} ms, {n_bytes / ms / 1e9:.2f} TB/s")
        )
    print(f"\nce_chunk_kernel V={V}, {rows} rows")
    print("\n".join(text for _, text in sorted(lines)))


def norm_case(tokens, width):
    """The normalization with its convolution, by warps and programs."""
    x, grad = (torch.randn(16, tokens // 16, width, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(5, width, device="cuda")
    choose, most = N.row_config, N.MAX_PROGRAMS
    r = N._forward(x, weight, 2, None)[1]
    for backward in (False, True):
        present = choose(width, backward)
        call = functools.partial(N._forward, x, weight, 2, None)
        if backward:
            call = functools.partial(N._backward, grad, x, weight, r, 2, None)
        lines = []
        for warps in (1, 2, 4, 8, 16):
            if not 64 <= present["TILE"] / warps <= 512:
                continue
            for programs in (512, 1024, 2048, 4096):
                options = present | dict(num_warps=warps)
                N.row_config = lambda *_, options=options: options
                N.MAX_PROGRAMS = programs
                ms = milliseconds(call, 0.01)
                mark = "*" if warps == present["num_warps"] and programs == most else " "
                n_bytes = x.numel() * x.element_size() * (3 if backward else 2)
                speed = f"{n_bytes / ms / 1e9:.2f} TB/s"
                lines.append(
                    (ms, f"{mark} {warps} warps, {programs} programs: {ms:.4f} ms, {speed}")
                )
        N.row_config, N.MAX_PROGRAMS = choose, most
        print(f"\nnorm_conv {'backward' if backward else 'forward'}, {tokens} x {width}")
        print("\n".join(text for _, text in sorted(lines)))


def chunks():
    """Head and loss, forward and backward, by the number of logits in a chunk."""
    M, width, V = 32768, 768, 50304
    h = torch.randn(M, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    W = torch.randn(V, width, device="cuda", dtype=torch.bfloat16) * 2 / width**0.5
    W.requires_grad_()
    targets = torch.randint(V, (M,), device="cuda")
    weight = torch.full((M,), 1 / M, device="cuda")
    present = C.CHUNK
    print(f"\nhead + loss, forward + backward, M={M} C={width} V={V}")
    for log in (24, 25, 26, 27, 28, 29, 30):
        C.CHUNK = 1 << log

        def call():
            loss = kernels.linear_cross_entropy(h, W, targets, weight)
            torch.autograd.grad(loss, (h, W))

        for _ in range(2):
            call()
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        mark = "*" if present == C.CHUNK else " "
        print(f"{mark} 2^{log} logits ({C.CHUNK // V} rows): {sorted(times)[2]:.3f} ms")
    C.CHUNK = present


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile the candidates alone")
    parser.add_argument("--time", action="store_true", help="compile each as it is timed")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UserError("there is no CUDA device: nothing to time")
    troubles = {} if options.time else compile_all()
    if options.compile:
        return 0
    for i, (kernel, tiles) in enumerate(CANDIDATES.items()):
        for shape in SHAPES:
            known = {tile: troubles.get((i, shape, tile)) for tile in tiles}
            attention_case(kernel, shape, tiles, known)
    for V, rows in ((50304, 5336), (65, 8192)):
        loss_case(V, rows)
    norm_case(16384, 384)
    norm_case(65536, 768)
    chunks()
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
