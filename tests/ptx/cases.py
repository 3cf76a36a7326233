"""Runs every kernel of the project in the emulator, and compares with float64 beside PyTorch.

    python tests/ptx/cases.py                      # the quick ones: sm_80 and sm_90, bfloat16
    python tests/ptx/cases.py --slow               # as the slow tests: the table in results/aot.md
    python tests/ptx/cases.py --all                # each call in each type for each GPU: 20 minutes
    python tests/ptx/cases.py --all --only=blocks  # those whose name has this word
    python tests/ptx/cases.py --json               # one JSON object a line

Exit codes: 0, all is within its bounds; 1, something is not; 2, a call or this program crashed.

Errors are the largest difference from float64 divided by the largest value. PyTorch's are those of
the reference in the same type.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import os
import sys
import time
import traceback
import zlib
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

ARCHITECTURES = (80, 90, 120)
DTYPES = dict(bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32)
# What is allowed beside twice PyTorch's error: half a unit in the last place of the largest value,
# which is the last rounding's; in float32 more, as sums are made in another order.
ABSOLUTE = dict(bf16=2**-9, fp16=2**-12, fp32=2e-6)
LOSSES = 2.5e-4  # of the losses of training steps: 0.001 of about 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an operator, forward and backward: what of, in what type, for which GPU."""

    kind: str  # a key of CALLS: attention, convolution, residual, head, masking, muon ...
    name: str  # what is special about it
    sizes: tuple  # what the function of this kind takes
    dtype: str
    arch: int
    when: str  # quick, slow, all

    @property
    def title(self):
        return f"{self.kind} {self.name}"


# ---- The calls. Each returns: what was computed -> (result, of PyTorch in this type, of float64)
def differentiate(function, inputs, grad, *more):
    """The output and the gradients of the inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(*inputs, *more)
    gradients = torch.autograd.grad(y, inputs, grad.to(y.dtype))
    return [y.detach(), *gradients]


def exact(x):
    """Floating-point tensors in float64, all else as it is."""
    return x.double() if torch.is_tensor(x) and x.is_floating_point() else x


def compare(ours, reference, inputs, grad, more, names):
    results = differentiate(ours, inputs, grad, *more)
    plain = differentiate(reference, inputs, grad, *more)
    # The kernels add the eps of float32, which F.rms_norm would not take for float64.
    norm = functools.partial(F.rms_norm, eps=torch.finfo(torch.float32).eps)
    with mock.patch.object(F, "rms_norm", norm):
        truth = differentiate(reference, [exact(x) for x in inputs], exact(grad), *map(exact, more))
    return dict(zip(names, zip(results, plain, truth, strict=True), strict=True))


def attention(dtype, g, B, T, H, D, seen, norm, rotation):
    """With a single head, on sm_90, the backward of one kernel; otherwise that of two."""
    from nanomdlm.kernels import operations as kernels
    from nanomdlm.kernels.reference import block_spans

    sys.modules["nanomdlm.kernels.attention"].FUSED_T = 256 if H == 1 else 0

    qkv = (1.5 * torch.randn(B, T, 3, H, D, generator=g)).to(dtype)
    grad = torch.randn(B, T, H, D, generator=g).to(dtype)
    angles = torch.arange(T)[:, None] * 100.0 ** (-torch.arange(0, D, 2) / D)
    tables = (angles.cos(), angles.sin()) if rotation else (None, None)
    spans = documents(B, T, g) if seen == "documents" else None
    if isinstance(seen, int):
        spans = block_spans(T // 2, seen, "cpu")
    more = (*tables, norm, False, spans)
    found = compare(kernels.attention, kernels.attention_ref, [qkv], grad, more, ("out", "dqkv"))
    parts = {"out": found["out"]}
    for i, name in enumerate(("dq", "dk", "dv")):
        parts[name] = tuple(x[:, :, i] for x in found["dqkv"])
    return parts


def attention_epilogue(dtype, g, *sizes):
    """The same with the gradients of norm and rotation in the kernels of dQ, dK and dV."""
    module = import_module("nanomdlm.kernels.attention")
    with mock.patch.object(module, "EPILOGUE", True):
        return attention(dtype, g, *sizes)


def grouped_attention(dtype, g, B, T, H, G, D, seen, window):
    """H heads of queries on G heads of keys, slices of one tensor; window: 0 for none."""
    from nanomdlm.kernels import operations as kernels
    from nanomdlm.kernels.reference import block_spans, window_spans

    packed = (1.5 * torch.randn(B, T, H + 2 * G, D, generator=g)).to(dtype)
    grad = torch.randn(B, T, H, D, generator=g).to(dtype)
    spans = documents(B, T, g) if seen == "documents" else None
    if isinstance(seen, int):
        spans = block_spans(T // 2, seen, "cpu")
    if window:
        spans = window_spans(spans, window, T, "cpu")
    functions = (kernels.grouped_attention, kernels.grouped_attention_ref)
    functions = [lambda x, *more, f=f: f(*x.split((H, G, G), 2), *more) for f in functions]
    found = compare(*functions, [packed], grad, (None, spans), ("out", "d"))
    parts = {"out": found["out"]}
    gradients = zip(*(d.split((H, G, G), 2) for d in found["d"]), strict=True)
    return parts | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def documents(B, T, g):
    """Spans of documents: long ones, single positions, and a row that is one document."""
    from nanomdlm.kernels.reference import document_spans

    ends = torch.rand(B, T, generator=g) < 0.03
    ends[:, T // 3 : T // 3 + 3] = True
    ends[1:] = False
    return document_spans(ends)


def convolution(dtype, g, B, T, C, K, causal, seen):
    from nanomdlm.kernels import operations as kernels

    x = (torch.randn(B, T, C, generator=g) * torch.rand(B, T, 1, generator=g)).to(dtype)
    weight = torch.randn(K, C, generator=g) / 2
    grad = torch.randn(B, T, C, generator=g).to(dtype)
    more = (causal, documents(B, T, g) if seen else None)
    names = ("y", "dx", "dw")
    return compare(kernels.norm_conv, kernels.norm_conv_ref, [x, weight], grad, more, names)


def residual(dtype, g, B, T, C, p):
    """The same elements are dropped: so the gradient of y is equal, too, as it is one product."""
    from nanomdlm.kernels.reference import residual_dropout_ref
    from nanomdlm.kernels.residual import residual_dropout

    x, y, grad = (torch.randn(B, T, C, generator=g).to(dtype) for _ in range(3))
    seed = torch.randint(1 << 62, (), generator=g)
    more = (p, True, seed, 3)
    names = ("out", "dx", "dy")
    operations = (residual_dropout, residual_dropout_ref)
    found = compare(*operations, [x, y], grad, more, names)
    for name, (ours, plain, _) in list(found.items()):
        found[f"{name} is 0"] = (ours == 0, plain == 0, plain == 0)
    return found


def relu2(dtype, g, M, C, F):
    from nanomdlm.kernels.reference import relu2_mlp_ref
    from nanomdlm.kernels.relu2 import relu2_mlp

    h, grad = (torch.randn(M, C, generator=g).to(dtype) for _ in range(2))
    up = (torch.randn(F, C, generator=g) / C**0.5).to(dtype)
    down = (torch.randn(C, F, generator=g) / F**0.5).to(dtype)
    names = ("y", "dh", "d_up", "d_down")
    return compare(relu2_mlp, relu2_mlp_ref, [h, up, down], grad, (), names)


def head(dtype, g, V, M, integer):
    """With rows of weight 0 whose target is no token; of int64 one that int32 cannot hold."""
    from nanomdlm.kernels import operations as kernels

    h = torch.randn(M, 64, generator=g).to(dtype)
    W = (torch.randn(V, 64, generator=g) / 4).to(dtype)
    targets = torch.randint(V, (M,), generator=g).to(integer)
    weight = torch.rand(M, generator=g) / M
    weight[1:3] = 0
    targets[1] = -100
    targets[2] = 1 << (40 if integer == torch.int64 else 30)

    def reference(h, W, targets, weight):  # PyTorch refuses such targets, whatever their weight
        used = weight != 0
        loss = F.cross_entropy(F.linear(h[used], W), targets[used].long(), reduction="none")
        return (loss.to(weight.dtype) * weight[used]).sum()

    more = (targets, weight)
    one = torch.ones(())
    found = compare(
        kernels.linear_cross_entropy, reference, [h, W], one, more, ("loss", "dh", "dW")
    )
    return found


def wrong_target(dtype, g, V):
    """A target outside of the vocabulary: the loss is NaN, and nothing is read beyond its end."""
    from nanomdlm.kernels import operations as kernels

    h = torch.randn(2, 64, generator=g).to(dtype)
    W = torch.randn(V, 64, generator=g).to(dtype)
    loss = kernels.linear_cross_entropy(h, W, torch.tensor([3, 1 << 40]), torch.ones(2))
    return {"is NaN": (loss.isnan(), torch.tensor(True), torch.tensor(True))}


def masking(dtype, g, B, T, integer, never):
    """Samples beyond int32 and int64, more counts than there are positions, none, all."""
    from nanomdlm.kernels import operations as kernels

    x0 = torch.randint(70, (B, T), generator=g).to(integer)
    counts = torch.tensor([T // 2, T + 3, 0, 1])[torch.arange(B) % 4]
    ids = torch.tensor([100, 2**31 + 5, 2**32 - 1])[torch.arange(B) % 3]
    fixed = torch.rand(B, T, generator=g) < 0.4 if never else None
    args = (x0, counts, 70, torch.tensor(2**32 - 1), 2**31 + 5, ids, fixed)
    got = kernels.mask_tokens(*args)
    wanted = kernels.mask_tokens_ref(*args)
    names = ("xt", "count", "rows", "n_rows")
    return {name: (a, b, b) for name, a, b in zip(names, got, wanted, strict=True)}


def muon(dtype, g, n, K, N):
    """Newton-Schulz iterations of random matrices, and of one with few large singular values."""
    from nanomdlm.kernels import newton_schulz
    from nanomdlm.support.run.muon import iterate, orthogonalize_all

    x = torch.randn(n, K, N, generator=g)
    x[-1] = x[-1, :, :3] @ x[-1, :3] / 30 + 0.01 * x[-1]
    x = x.to(dtype)
    if not newton_schulz.fits(x, dtype):
        raise ValueError(f"no kernel takes {K} x {N}")
    (ours,) = orthogonalize_all([x], dtype, has_kernels=True)
    plain, truth = (iterate([x], kind)[0] for kind in (dtype, torch.float64))
    names = ("random", "ill-conditioned")
    halves = [z.split((n - 1, 1)) for z in (ours, plain, truth)]
    return dict(zip(names, zip(*halves, strict=True), strict=True))


def training(dtype, g, steps):
    """Losses of the first steps of a small model: with the kernels, with PyTorch, in float32."""
    import tempfile

    import mdlm
    from nanomdlm.kernels import operations as kernels
    from nanomdlm.support.data import sources

    size = dict(n_layer=2, n_head=2, n_embd=64, block_size=16, batch_size=4, vocab_size=65)
    config = mdlm.Config(**size, dropout=0.0, eval_windows=1, warmup_steps=2)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train.bin", "val.bin"):
            ids = torch.multinomial(1 / torch.arange(1.0, 66), 4000, True, generator=g)
            ids.to(torch.uint16).numpy().tofile(Path(folder, name))
        losses = []
        for kind, precision in (("triton", dtype), ("torch", dtype), ("torch", torch.float32)):
            device = torch.device("cpu")
            corpus = mdlm.variants.open_corpus(
                mdlm.Corpus, sources.of_config(folder, config), config, device
            )
            ops = kernels.select(kind, device, 32, precision)
            run = mdlm.make_run(config, corpus, mdlm.devices.Machine(device, precision, ops))
            losses.append([])
            for step in range(steps):
                mdlm.train_step(run, step, progress=step / 100)
                losses[-1].append(run.loss)
    ours, plain, single = map(torch.tensor, losses)
    return {"losses": (ours, plain, single), "losses like PyTorch's": (ours, plain, plain)}


def far(dtype, g, kind, *sizes):
    """Programs whose offsets need more than 32 bits: the same bits as those of the first programs.

    The launches of a small call are repeated as if they were the last ones of a huge call: with the
    places of programs that come so late, and with pointers as far before the tensors. Their outputs
    are filled before, so that a launch that writes nothing is seen.
    """
    from ptx import driver

    (device,) = driver.INSTALLED
    device.launches.clear()
    device.record = True
    CALLS[kind](dtype, g, *sizes)
    device.record = False
    results = {}
    for launch in device.launches:
        # Of a convolution the first program reads rows before its own, which exist only later.
        skipped = int(kind == "convolution")
        launch.grid = (launch.grid[0] - skipped, 1, 1)
        launch = launch.copy()
        given = dict(zip(launch.names, launch.args, strict=True))
        for name in OUTPUTS[launch.kernel] & given.keys():
            given[name].view(torch.uint8).fill_(UNWRITTEN)
        near = launch.copy()
        near.run(first=skipped)
        late = launch.copy()
        first, shifts, numbers = FAR[kind](late)
        missing = {*shifts, *numbers} - set(late.names)
        if missing:
            raise ValueError(
                f"{launch.kernel} has no argument {sorted(missing)}: mend FAR in cases.py"
            )
        late.args = [numbers.get(n, a) for n, a in zip(late.names, late.args, strict=True)]
        late.run(first=skipped + first, shifts=shifts)
        changed = set()
        for name, a, b, c in zip(late.names, late.args, near.args, launch.args, strict=True):
            if torch.is_tensor(a):
                a, b, c = (x.reshape(-1).view(torch.uint8) for x in (a, b, c))
                results[f"{launch.kernel} {name}"] = (a, b, b)
                if not torch.equal(a, c):
                    changed.add(name)
        written = (OUTPUTS[launch.kernel] | IN_PLACE.get(launch.kernel, set())) & given.keys()
        yes = torch.tensor(True)
        results[f"{launch.kernel} writes"] = (torch.tensor(changed == written), yes, yes)
    return results


def beyond(size, multiple):
    """The smallest multiple for which a multiple of `size` elements is beyond int32."""
    return ((1 << 31) // size // multiple + 1) * multiple


def far_attention(launch):
    """One sample: the tensors follow those of earlier samples. Of prepare_kernel: tokens."""
    given = zip(launch.names, launch.args, strict=True)
    tensors = {n: len(a) * a.stride(0) for n, a in given if torch.is_tensor(a)}
    given = dict(zip(launch.names, launch.args, strict=True))
    if launch.kernel != "prepare_kernel":
        samples = beyond(tensors["lse"], 1)
        tensors = {n: size for n, size in tensors.items() if n not in ("cos", "sin")}
        return samples * launch.grid[0], {n: samples * size for n, size in tensors.items()}, {}
    rows = 2048 // given["cos"].shape[1] // 2  # of a program
    D = 2 * given["cos"].shape[1]
    first = beyond(rows * D, given["T"])
    shifts = {n: first * rows * D // 2 * 3 for n in ("qkv", "dqkv") if n in given}
    shifts |= {n: first * rows * D for n in ("qk",) if n in given}
    return first, shifts, dict(n_rows=given["n_rows"] + first * rows)


def far_convolution(launch):
    """Sequences after many others. Each program has 8 rows."""
    given = dict(zip(launch.names, launch.args, strict=True))
    first = beyond(given["program_rows"] * given["C"], given["T"])
    rows = first * given["program_rows"]
    shifts = {name: rows * given["C"] for name in ("x", "y", "dx", "dy") if name in given}
    shifts |= dict(r=rows, spans=2 * rows)
    if "dw" in given:
        shifts["dw"] = first * given["weight"].numel()
    return first, shifts, dict(N=given["N"] + rows)


def far_residual(launch):
    """Elements after many others: other bits, so its rate is too small for any to be dropped."""
    given = dict(zip(launch.names, launch.args, strict=True))
    tile = import_module("nanomdlm.kernels.residual").TILE
    first = beyond(tile, 1)
    elements = first * tile
    shifts = {name: elements for name in ("y", "x", "out") if name in given}
    return first, shifts, dict(N=given["N"] + elements)


def far_relu2(launch):
    """Rows after many others: M is a multiple of the rows of a program."""
    given = dict(zip(launch.names, launch.args, strict=True))
    rows = import_module("nanomdlm.kernels.relu2").tiles(torch.bfloat16)[0]
    programs = launch.grid[0] // -(-given["M"] // rows)  # of the same rows
    first = beyond(rows * given["K"], 1)
    shifts = {name: first * rows * given[n] for name, n in (("x", "K"), ("out", "N"), ("a", "N"))}
    shifts = {name: shift for name, shift in shifts.items() if name in given}
    return first * programs, shifts, dict(M=given["M"] + first * rows)


def far_head(launch):
    """Rows after many others."""
    given = dict(zip(launch.names, launch.args, strict=True))
    first = beyond(given["limit"], 1)
    shifts = dict.fromkeys(("target_ptr", "weight_ptr", "loss_ptr"), first)
    return first, shifts | dict(z_ptr=first * given["limit"]), {}


def far_muon(launch):
    """Matrices after many others."""
    given = dict(zip(launch.names, launch.args, strict=True))
    size = given["x"][0].numel()
    first = beyond(size, 1)
    return first, dict(x=first * size, y=first * size), {}


# What each kernel writes: the arguments that it only writes, and those that it also reads.
OUTPUTS = dict(
    attention_forward_kernel={"out", "lse"},
    attention_dq_kernel={"delta", "dqkv"},
    attention_dkdv_kernel={"dqkv"},
    attention_backward_kernel={"dqkv"},
    grouped_attention_forward_kernel={"out", "lse"},
    grouped_attention_dq_kernel={"delta", "dq"},
    grouped_attention_dkdv_kernel={"dk", "dv"},
    prepare_kernel={"qk"},
    norm_conv_forward_kernel={"y", "r"},
    norm_conv_backward_kernel={"dx", "dw"},
    relu2_kernel={"out"},
    residual_kernel={"out"},
    ce_chunk_kernel={"loss_ptr"},
    newton_schulz_kernel={"y"},
)
IN_PLACE = dict(prepare_kernel={"dqkv"}, ce_chunk_kernel={"z_ptr"})
UNWRITTEN = 0xA5  # each byte of what is only written, before a launch
FAR = dict(attention=far_attention, convolution=far_convolution, head=far_head, muon=far_muon)
FAR |= {"attention, epilogue": far_attention}
FAR |= {"relu2": far_relu2, "residual": far_residual, "grouped attention": far_attention}
CALLS = dict(attention=attention, convolution=convolution, head=head, masking=masking, muon=muon)
CALLS |= {"attention, epilogue": attention_epilogue}
CALLS |= {"relu2": relu2, "residual": residual, "grouped attention": grouped_attention}
CALLS |= {"head, wrong target": wrong_target, "far offsets": far, "training": training}


# ---- Which calls, in which types, for which GPUs
def calls():
    """Yield kind, name, sizes and when, of every kind of call of the project."""
    for D in (32, 64):
        odd = 130 + 40 * (D == 32)
        size = "slow" if D == 64 else "all"
        whole = D == 64  # with norm and rotation, as models have them
        yield "attention", f"D={D} even T", (1, 256, 2, D, None, whole, whole), "slow"
        yield "attention", f"D={D} even T, one head", (1, 256, 1, D, None, whole, whole), size
        yield "attention", f"D={D} odd T", (2, odd, 1, D, None, True, True), size
        when = "quick" if D == 64 else "all"  # on sm_90, the backward of one kernel
        yield "attention", f"D={D} odd T, short", (1, 43, 1, D, None, False, False), when
        yield "attention", f"D={D} odd T, one row", (1, 1, 1, D, None, False, False), "all"
        # A multiple of the tiles of keys, but for D=32 not of those of queries.
        when = "slow" if D == 32 else "all"
        yield "attention", f"D={D} T=192", (1, 192, 1, D, None, False, False), when
        yield "attention", f"D={D} even T, long", (1, 640, 1, D, None, False, True), "all"
        yield "attention", f"D={D} even T, norm alone", (1, 128, 1, D, None, True, False), "all"
        yield (
            "attention",
            f"D={D} documents, even T",
            (2, 128, 1, D, "documents", False, True),
            "all",
        )
        when = "quick" if D == 64 else "all"
        yield "attention", f"D={D} documents, odd T", (1, odd, 1, D, "documents", True, True), when
        yield "attention", f"D={D} blocks of 16, even T", (1, 128, 1, D, 16, whole, whole), size
        yield "attention", f"D={D} blocks of 15, odd T", (1, 150, 2, D, 15, True, True), "slow"
    epilogue = "attention, epilogue"
    yield epilogue, "D=64 odd T, short", (1, 43, 2, 64, None, True, True), "quick"
    yield epilogue, "D=64 odd T", (1, 130, 2, 64, None, True, True), "slow"
    yield epilogue, "D=64 even T", (1, 256, 2, 64, None, True, True), "slow"
    yield epilogue, "D=32 documents, odd T", (1, 170, 2, 32, "documents", True, True), "slow"
    yield epilogue, "D=64 blocks of 15, odd T", (1, 150, 2, 64, 15, True, True), "all"
    yield epilogue, "D=32 norm alone", (1, 70, 2, 32, None, True, False), "all"
    yield epilogue, "D=32 rotation alone", (1, 70, 2, 32, None, False, True), "all"
    # B, T, heads, heads of keys, D, documents or length of blocks, window
    grouped = "grouped attention"
    yield grouped, "D=128 documents, window", (1, 70, 2, 1, 128, "documents", 9), "quick"
    yield grouped, "D=128 blocks of 15, odd T", (1, 90, 2, 1, 128, 15, 0), "slow"
    yield grouped, "D=128 blocks of 16, window", (1, 128, 3, 1, 128, 16, 20), "all"
    yield grouped, "D=128 even T", (1, 128, 2, 2, 128, None, 0), "slow"
    yield grouped, "D=128 odd T", (2, 43, 4, 2, 128, None, 0), "all"
    yield grouped, "D=64 documents", (2, 130, 2, 1, 64, "documents", 0), "slow"
    yield grouped, "D=64 blocks of 16, window", (1, 128, 2, 1, 64, 16, 20), "all"
    yield grouped, "D=32 window", (1, 130, 4, 1, 32, None, 9), "all"
    yield "convolution", "C=96 K=5", (2, 19, 96, 5, False, False), "slow"
    yield "convolution", "C=96 K=5, documents", (2, 37, 96, 5, False, True), "quick"
    yield "convolution", "C=384 K=5, documents", (1, 33, 384, 5, False, True), "all"
    yield "convolution", "C=130 K=3, causal", (3, 5, 130, 3, True, False), "slow"
    yield "convolution", "C=1500 K=1", (1, 9, 1500, 1, False, False), "all"
    yield "convolution", "C=2048 K=8", (1, 9, 2048, 8, False, False), "slow"
    yield "residual", "C=96", (2, 19, 96, 0.2), "quick"
    yield "residual", "odd C", (1, 37, 67, 0.5), "slow"
    yield "relu2", "C=80", (37, 80, 144), "quick"
    yield "relu2", "C=320, whole tiles", (128, 320, 128), "slow"
    yield "relu2", "C=48, two tiles each way", (150, 48, 160), "all"
    yield "head", "V=65", (65, 41, torch.int64), "slow"
    yield "head", "V=65, int32 targets", (65, 9, torch.int32), "all"
    yield "head", "V=1000", (1000, 9, torch.int64), "quick"
    yield "head", "V=50304", (50304, 4, torch.int64), "slow"
    yield "head, wrong target", "V=65", (65,), "slow"
    yield "head, wrong target", "V=50304", (50304,), "all"
    for never in (False, True):
        also = ", never_mask" * never
        yield "masking", f"T=63 int32{also}", (4, 63, torch.int32, never), "slow"
        when = "quick" if never else "slow"
        yield "masking", f"T=256{also}", (3, 256, torch.int64, never), when
        yield "masking", f"T=1111{also}", (3, 1111, torch.int64, never), "slow"
        yield "masking", f"T=8192{also}", (1, 8192, torch.int64, never), "all"
    yield "masking", "T=1", (4, 1, torch.int64, False), "all"
    yield "masking", "T=5, 260 rows", (260, 5, torch.int64, False), "slow"
    yield "muon", "64 x 384", (3, 64, 384), "quick"
    yield "muon", "64 x 256", (2, 64, 256), "all"
    yield "muon", "32 x 384", (2, 32, 384), "slow"
    yield "muon", "32 x 128", (2, 32, 128), "all"
    sizes = (1, 70, 1, 64, "documents", True, True)
    yield "far offsets", "attention", ("attention", *sizes), "slow"
    sizes = (1, 70, 1, 64, None, True, True)  # on sm_90, the backward of one kernel
    yield "far offsets", "attention without spans", ("attention", *sizes), "slow"
    sizes = (1, 70, 2, 64, None, True, True)
    yield "far offsets", epilogue, (epilogue, *sizes), "slow"
    sizes = (1, 70, 2, 1, 128, "documents", 9)
    yield "far offsets", grouped, (grouped, *sizes), "slow"
    yield "far offsets", "convolution", ("convolution", 2, 19, 96, 5, False, True), "slow"
    yield "far offsets", "residual", ("residual", 1, 19, 96, 2**-16), "slow"
    yield "far offsets", "relu2", ("relu2", 19, 48, 144), "slow"
    yield "far offsets", "head", ("head", 1000, 3, torch.int64), "slow"
    yield "far offsets", "muon", ("muon", 2, 32, 128), "slow"
    yield "training", "10 steps", (10,), "slow"


ORDER = ("quick", "slow", "all")


def all_cases():
    for kind, name, sizes, when in calls():
        for dtype, arch in itertools.product(DTYPES, ARCHITECTURES):
            if kind == "masking" and dtype != "bf16":  # it has integers alone
                continue
            if kind in ("muon", "training", "far offsets") and dtype != "bf16":
                continue
            if "long" in name and dtype == "fp32":  # millions of instructions
                continue
            yield Case(kind, name, sizes, dtype, arch, rank(when, kind, name, dtype, arch))


def rank(when, kind, name, dtype, arch):
    """When a case runs: bfloat16 on each GPU, the other types and the integers on one of them."""
    has_products = kind in ("grouped attention", "muon", "relu2", "training")
    has_products |= kind in ("attention", "attention, epilogue")
    main = arch if has_products or when == "quick" else 90
    if dtype != "bf16":
        main = 80 if dtype == "fp16" else 120
        is_typical = name in ("D=64 odd T", "D=64 blocks of 16, even T", "C=96 K=5", "V=1000")
        is_typical |= name in ("D=128 documents, window", "C=80")
        when = max(when, "slow" if is_typical else "all", key=ORDER.index)
    if arch != main:
        return when if has_products else "all"
    return "slow" if when == "quick" and arch == 120 else when


def chosen_cases(which, architectures=ARCHITECTURES, only=""):
    """The cases of quick, slow or all, for some GPUs, with `only` in their title."""
    return [
        case
        for case in all_cases()
        if ORDER.index(case.when) <= ORDER.index(which)
        and only in case.title
        and case.arch in architectures
    ]


# ---- Running them
def run(case):
    """Run a case in this process, which must be new for its architecture; return a dictionary.

    violation: what the emulator found, or the exception with which the call ended, or None
    crashed: whether it was such an exception; it does not end the other cases
    ended, broken: the kernels that ran to their end, and the one in which the call ended, or None
    """
    torch.set_num_threads(1)
    from ptx import driver, memory

    device = driver.install(case.arch)
    from nanomdlm.kernels.launch import LAUNCHES

    LAUNCHES.clear()
    device.instructions.clear()
    device.executed.clear()
    device.ended.clear()
    device.running = None
    began = time.monotonic()
    g = torch.Generator().manual_seed(zlib.crc32(case.title.encode()))
    errors = {}
    said = None
    crashed = False
    try:
        results = CALLS[case.kind](DTYPES[case.dtype], g, *case.sizes)
        for name, (ours, plain, truth) in results.items():
            errors[name] = measure(case, ours, plain, truth)
    except memory.Violation as violation:
        said = str(violation)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        crashed = True
        traceback.print_exc()
    return dict(
        title=case.title,
        dtype="integers" if case.kind == "masking" else case.dtype,
        arch=case.arch,
        errors=errors,
        violation=said,
        crashed=crashed,
        kernels=sorted(LAUNCHES),
        executed=sorted(device.executed),
        ended=sorted(device.ended),
        broken=device.running,
        instructions=sum(device.instructions.values()),
        seconds=time.monotonic() - began,
    )


def measure(case, ours, plain, truth):
    """Return our error, PyTorch's and the bound; None, None, None of integers that are equal."""
    if ours.shape != truth.shape:
        return math.inf, 0.0, 0.0
    if not truth.is_floating_point():
        is_same = torch.equal(ours, truth.to(ours.dtype))
        return (None, None, None) if is_same else (math.inf, 0.0, 0.0)
    size = truth.double().abs().max().clamp(min=1e-30)
    error = ((ours.double() - truth.double()).abs().max() / size).item()
    theirs = ((plain.double() - truth.double()).abs().max() / size).item()
    return error, theirs, 2 * theirs + (LOSSES if case.kind == "training" else ABSOLUTE[case.dtype])


def is_within(result):
    """Whether a kernel ran, nothing was found wrong, and each error is within its bound."""
    if result["violation"] or not result["errors"] or not result["instructions"]:
        return False
    return all(error is None or error <= bound for error, _, bound in result["errors"].values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slow", action="store_const", dest="which", const="slow", default="quick")
    parser.add_argument("--all", action="store_const", dest="which", const="all")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, action="append")
    parser.add_argument("--only", default="", help="a part of a case's name")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    args = parser.parse_args()
    wanted = chosen_cases(args.which, args.arch or ARCHITECTURES, args.only)
    results = []
    for result in run_all(wanted, args.workers):
        results.append(result)
        if args.json:
            print(json.dumps(result), flush=True)
        else:
            print(f"{len(results)}/{len(wanted)} {result['title']}", file=sys.stderr)
    if not args.json:
        print_table(results)
    failed = sum(not is_within(result) for result in results)
    print(f"{len(wanted)} cases, {failed} beyond their bound", file=sys.stderr)
    return 2 if any(result["crashed"] for result in results) else int(failed > 0)


def print_table(results):
    """A row for each call, as in results/aot.md: in each type the GPUs, and the worst error."""
    print("| call |", " | ".join(DTYPES), "|")
    print("| --- " * (1 + len(DTYPES)) + "|")
    by_title = {}
    for result in results:
        by_title.setdefault(result["title"], []).append(result)
    for title, same in by_title.items():
        cells = [cell([r for r in same if r["dtype"] in (name, "integers")]) for name in DTYPES]
        print(f"| {title} | {' | '.join(cells)} |")


def cell(results):
    """The GPUs on which a call ran in a type, and its worst output there."""
    archs = sorted({result["arch"] for result in results})
    return f"{', '.join(map(str, archs))}: {worst(results)}" if archs else "-"


def worst(results):
    """The output that comes nearest to its bound: its name, our error, PyTorch's."""
    said = [result["violation"] for result in results if result["violation"]]
    if said:
        return f"**{said[0]}**"
    errors = [(*e, name) for r in results for name, e in r["errors"].items() if e[0] is not None]
    if not errors:
        return "equal bits"
    error, theirs, bound, name = max(errors, key=nearness)
    text = f"{name} {error:.1e} / {theirs:.1e}"
    return text if error <= bound else f"**{text}**"


def nearness(measured):
    """The error divided by its bound; infinite where either is NaN, so that it is the largest."""
    ratio = measured[0] / max(measured[2], 1e-30)
    return math.inf if math.isnan(ratio) else ratio


def run_all(cases, workers):
    """Yield the results, in order. Kernels stay compiled in a process; each has one GPU's."""
    for _, group in itertools.groupby(sorted(cases, key=lambda c: c.arch), lambda c: c.arch):
        group = list(group)
        with concurrent.futures.ProcessPoolExecutor(min(workers, len(group))) as pool:
            yield from pool.map(run, group)


if __name__ == "__main__":
    os.environ["MDLM_TRITON"] = "1"  # the kernels are compiled by Triton, with no GPU
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        code = main()
    except Exception:  # Python's own exit code, 1, is that of an error beyond its bound
        traceback.print_exc()
        code = 2
    sys.exit(code)
