"""What bench.py measures: each operation beside plain PyTorch and the peers that are installed.

A case is an operation at one shape. Its contestants are functions of (backward, *inputs) that return a tuple:
the output and, with backward, the gradients. They are compared with `exact`, computed in float64, before any
is timed. Peers (github.com): linkedin/Liger-Kernel, apple/ml-cross-entropy, and PyTorch's own
F.scaled_dot_product_attention under each backend and F.linear_cross_entropy.
"""

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernels
from kernels import cross_entropy as ce


@dataclass
class Case:
    name: str
    shape: str
    dtype: torch.dtype
    cost: Callable  # backward -> (FLOPs, bytes)
    inputs: Callable  # seed -> tensors
    exact: Callable  # inputs -> [output, gradients], or the first rows of those that are large
    contestants: dict  # name -> function; the others' speed-up is over the first
    canonical: Callable = tuple  # what a contestant returns -> what `exact` does
    backward: bool = True  # whether there is one
    launches: tuple = ("",)  # "graph": replayed as a CUDA graph, where no time of the host counts
    differs: Callable = None  # (name, results, exact) -> whether wrong; None: by the relative error
    waits: tuple = ("liger-kernel", "cut-cross-entropy", "cut-cross-entropy, exact", "rand and argsort")
    # ... these wait for the GPU: no graph can hold them


# ------------------------------------------------------------------------------------------------------------
# FLOPs, and the fewest bytes that must move between memory and chip. size: of an element. With backward,
# forward is included.


def attention_cost(B, T, H, D, size, backward):
    """Forward has 2 products, reads q, k, v, writes O. Backward has 5 (one builds the scores again), reads
    q, k, v, O and dO, writes dq, dk, dv."""
    return (7 if backward else 2) * 2 * B * H * T * T * D, (12 if backward else 4) * B * T * H * D * size


def head_cost(N, M, C, V, size, backward):
    """M of N rows times a (V, C) head. Backward has two more such products, writes dh (N, C) and dW."""
    return (3 if backward else 1) * 2 * M * C * V, (M * C + V * C + (N * C + V * C) * backward) * size


def cross_entropy_cost(N, V, size, backward):
    """Logits are read and their gradient is written; the arithmetic does not count."""
    return 0, (2 if backward else 1) * N * V * size


def masking_cost(B, T):
    """int64 tokens are read, tokens and row indices written; also each row's level, number and count."""
    return 0, 8 * (3 * B * T + 3 * B)


# ------------------------------------------------------------------------------------------------------------
# Cases


def outcome(out, leaves, backward, grad=None):
    return (out, *torch.autograd.grad(out, leaves, grad)) if backward else (out,)


def on_gpu(device):
    """Whether the contestants are those of a GPU; a test takes them on a CPU too."""
    return device.type == "cuda"


def compiled(f):
    return torch.compile(f, dynamic=False)


def attention(device, dtype, B, T, H, D, block=False):
    """block: with rotary positions and QK-norm, from the packed projections, as the model has it."""
    cuda = on_gpu(device)
    angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
    more = dict(cos=angles.cos().to(device), sin=angles.sin().to(device), qk_norm=True) if block else {}

    def inputs(seed):
        g = torch.Generator(device).manual_seed(seed)
        qkv = torch.randn(B, T, 3, H, D, generator=g, device=device).to(dtype)
        grad = torch.randn(B, T, H, D, generator=g, device=device).to(dtype)
        separate = () if block else (x.transpose(1, 2).contiguous().requires_grad_() for x in qkv.unbind(2))
        return qkv.requires_grad_(), grad, *separate

    def packed(f):
        return lambda backward, qkv, grad, *_: outcome(f(qkv, **more), (qkv,), backward, grad)

    def separate(f):  # what the peers like best: q, k, v (B, H, T, D), contiguous
        return lambda backward, _, grad, *qkv: outcome(f(*qkv).transpose(1, 2), qkv, backward, grad)

    def explicit(q, k, v):
        return torch.softmax((q @ k.transpose(-1, -2)) * D**-0.5, -1) @ v

    def sdpa(backend):
        def f(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v)
        return f

    def exact(qkv, grad, *_):
        parts = []
        for x, g in zip(qkv.detach().double().split(1), grad.double().split(1)):  # of (1, H, T, T) scores
            x.requires_grad_()
            parts.append(outcome(kernels.attention_ref(x, **more), (x,), True, g))
        return [torch.cat(p).detach() for p in zip(*parts)]

    def canonical(out):  # gradients of q, k, v -> one of qkv
        return out if len(out) < 4 else (out[0], torch.stack([g.transpose(1, 2) for g in out[1:]], 2))

    ours = {"mdlm": packed(kernels.attention)}
    if block:
        contestants = {"PyTorch eager": packed(kernels.attention_ref),
                       "PyTorch compiled": packed(compiled(kernels.attention_ref))} | ours
    elif cuda:
        contestants = {"PyTorch eager": separate(explicit), "PyTorch compiled": separate(compiled(explicit)),
                       "SDPA FLASH": separate(sdpa(SDPBackend.FLASH_ATTENTION)),
                       "SDPA CUDNN": separate(sdpa(SDPBackend.CUDNN_ATTENTION)),
                       "SDPA EFFICIENT": separate(sdpa(SDPBackend.EFFICIENT_ATTENTION)),
                       "SDPA MATH": separate(sdpa(SDPBackend.MATH))} | ours
    else:
        contestants = {"SDPA": separate(F.scaled_dot_product_attention)} | ours
    return Case("attention block" if block else "attention", f"B={B} T={T} H={H} D={D}", dtype,
                lambda backward: attention_cost(B, T, H, D, dtype.itemsize, backward), inputs, exact,
                contestants, canonical, launches=("graph",) if cuda else ("",))


def peers_of_head():
    """name -> f(h, W, targets), the mean cross-entropy; the peers that are installed."""
    peers = {}
    if hasattr(F, "linear_cross_entropy"):
        peers["F.linear_cross_entropy"] = F.linear_cross_entropy
    if hasattr(nn, "LinearCrossEntropyOptions"):
        peers["F.linear_cross_entropy, chunks"] = lambda h, W, y: F.linear_cross_entropy(
            h, W, y, options=nn.LinearCrossEntropyOptions())
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
        exact = dict(accum_dtype=torch.float32) if "accum_dtype" in inspect.signature(
            liger_fused_linear_cross_entropy).parameters else {}  # it adds chunks of dW in bfloat16 otherwise
        peers["liger-kernel"] = lambda h, W, y: liger_fused_linear_cross_entropy(h, W, y, **exact)
    with contextlib.suppress(ImportError):
        from cut_cross_entropy import linear_cross_entropy
        peers["cut-cross-entropy"] = linear_cross_entropy  # leaves out gradients below a threshold
        peers["cut-cross-entropy, exact"] = lambda h, W, y: linear_cross_entropy(h, W, y, filter_eps=None)
    return peers


def head(device, dtype, N, C, V):
    """LM head and loss: half of N rows are masked; the loss is the mean over those."""
    M, cuda = N // 2, on_gpu(device)

    def inputs(seed):
        g = torch.Generator(device).manual_seed(seed)
        h = torch.randn(N, C, generator=g, device=device).to(dtype)
        W = (torch.randn(V, C, generator=g, device=device) * 2 / C**0.5).to(dtype)
        targets = torch.randint(V, (N,), generator=g, device=device)
        rows = torch.randperm(N, generator=g, device=device)[:M].sort().values
        weight = torch.zeros(N, device=device).index_fill_(0, rows, 1 / M)
        return h.requires_grad_(), W.requires_grad_(), targets, rows, weight

    def of(f):
        return lambda backward, h, W, *rest: outcome(f(h, W, *rest), (h, W), backward)

    def all_rows(h, W, targets, rows, weight):
        return (F.cross_entropy(F.linear(h, W).float(), targets, reduction="none") * weight).sum()

    def gathered(f):
        return of(lambda h, W, targets, rows, weight: f(h[rows], W, targets[rows]))

    def exact(h, W, targets, rows, weight):
        (h, W), loss = (x.detach().double().requires_grad_() for x in (h, W)), 0
        for at in rows.split(1024):
            part = F.cross_entropy(h[at] @ W.T, targets[at], reduction="sum") / M
            part.backward()
            loss = loss + part.detach()
        return loss, h.grad, W.grad

    plain = kernels.linear_cross_entropy_ref
    ours = {"mdlm": of(kernels.linear_cross_entropy)}  # on a CPU it is the plain one
    if cuda:
        contestants = {"PyTorch eager": of(plain), "PyTorch compiled": of(compiled(plain)),
                       "PyTorch eager, all rows": of(all_rows)} | ours
        contestants |= {name: gathered(f) for name, f in peers_of_head().items()}
    else:
        contestants = {"PyTorch, all rows": of(all_rows)} | ours
    return Case("head + loss", f"N={N} C={C} V={V}", dtype,
                lambda backward: head_cost(N, M, C, V, dtype.itemsize, backward), inputs, exact, contestants,
                launches=("", "graph") if cuda and V <= ce.SMALL_V else ("",))


def cross_entropy(device, dtype, N, V):
    """Cross-entropy of logits, summed over N rows."""

    def inputs(seed):
        g = torch.Generator(device).manual_seed(seed)
        z = (2 * torch.randn(N, V, generator=g, device=device, dtype=dtype)).requires_grad_()
        every = torch.arange(N, device=device)
        return z, torch.randint(V, (N,), generator=g, device=device), every, torch.ones(N, device=device)

    def of(f):
        return lambda backward, z, y, *_: outcome(f(z, y), (z,), backward)

    def in_place(backward, z, y, every, one):  # as in the fused head: the gradient takes the logits' place
        loss = torch.empty_like(one)
        ce.launch(ce.ce_chunk_kernel, (N,), z, every, y, one, one[:1], loss, V, V, GRAD=backward, FILL=True,
                  **ce._row_config(V, z.dtype))
        return (loss.sum(), z) if backward else (loss.sum(),)

    def exact(z, y, *_):  # of the first gradients only: all would take four times the memory of the logits
        z, first = z.detach(), z[:1024].detach().double().requires_grad_()
        ce64 = lambda z, y: F.cross_entropy(z.double(), y, reduction="sum")
        loss = sum(ce64(*part) for part in zip(z.split(1024), y.split(1024)))
        return loss, torch.autograd.grad(ce64(first, y[:1024]), first)[0]

    plain = lambda z, y: F.cross_entropy(z.float(), y, reduction="sum")
    contestants = {"PyTorch eager": of(plain), "PyTorch compiled": of(compiled(plain)),
                   "mdlm": lambda backward, z, y, every, one: outcome(
                       kernels.masked_cross_entropy(z, y, one), (z,), backward)}
    if V % 64 == 0:
        contestants["mdlm, in place"] = in_place
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers.functional import liger_cross_entropy
        contestants["liger-kernel"] = of(lambda z, y: liger_cross_entropy(z, y, reduction="sum"))
    return Case("cross-entropy", f"N={N} V={V}", dtype,
                lambda backward: cross_entropy_cost(N, V, dtype.itemsize, backward), inputs, exact,
                contestants)


def masking(device, B, T, V=65):
    """Exact counts, mirrored as in training; tokens, counts and ascending row indices."""
    cuda = on_gpu(device)

    def inputs(seed):
        g = torch.Generator(device).manual_seed(seed)
        level = torch.randint(1, T + 1, (B,), generator=g, device=device)
        level[B // 2:] = T + 1 - level[:B // 2]
        x0, ids = torch.randint(V, (B, T), generator=g, device=device), torch.arange(B, device=device)
        seed, step = torch.tensor(seed, device=device), torch.tensor(7, device=device)
        return x0, level, seed, step, ids

    def of(f):
        return lambda _, x0, level, seed, step, ids: f(x0, level, V, seed, step, ids)

    def unkeyed(_, x0, level, *rest):
        """What one writes first: not reproducible elsewhere, and it waits for the GPU."""
        masked = torch.rand(x0.shape, device=x0.device).argsort(1).argsort(1) < level[:, None]
        rows = masked.flatten().nonzero()[:, 0]
        return torch.where(masked, V, x0), masked.sum(1), rows, torch.tensor(len(rows))

    def exact(*tensors):
        return [r.to(device) for r in of(kernels.mask_tokens_ref)(False, *(x.cpu() for x in tensors))]

    def differs(name, results, exact):  # the same bits; only "rand" has positions of its own
        if name.startswith("rand"):
            masked = (results[0].flatten() == V).nonzero()[:, 0]
            return not (torch.equal(results[1], exact[1]) and torch.equal(results[2], masked))
        return not all(torch.equal(r, e) for r, e in zip(results, exact, strict=True))

    plain = kernels.mask_tokens_ref
    contestants = {"rand and argsort": unkeyed}
    if cuda:
        contestants |= {"PyTorch eager": of(plain), "PyTorch compiled": of(compiled(plain))}
    return Case("masking", f"B={B} T={T}", torch.int64, lambda backward: masking_cost(B, T), inputs, exact,
                contestants | {"mdlm": of(kernels.mask_tokens)}, backward=False, differs=differs,
                launches=("", "graph") if cuda else ("",))


def cases(device):
    """The cases, as functions, the most important first. On a GPU: sizes of the presets, and small ones."""
    bf16 = torch.bfloat16
    if not on_gpu(device):
        yield lambda: masking(device, 32, 128)
        for dtype in (torch.float32, bf16):
            for V in (65, 4096):
                yield lambda dtype=dtype, V=V: head(device, dtype, 32 * 128, 192, V)
            for T in (128, 512):
                yield lambda dtype=dtype, T=T: attention(device, dtype, 4096 // T, T, 3, 64)
        return
    at = lambda T, D, block=False: lambda: attention(  # 768 wide, 32,768 tokens, half as many if T is long
        device, bf16, (32768 if T <= 1024 else 16384) // T, T, 768 // D, D, block)
    yield lambda: head(device, bf16, 65536, 768, 50304)
    for T in (256, 512, 1024):
        yield lambda T=T: masking(device, 64, T)
        yield at(T, 64)
        yield at(T, 64, block=True)
    yield lambda: head(device, bf16, 16384, 384, 65)
    yield lambda: cross_entropy(device, bf16, 32768, 50304)
    yield lambda: cross_entropy(device, bf16, 16384, 65)
    for T, D in ((64, 64), (128, 64), (4096, 64), (256, 32), (1024, 32), (1024, 128), (128, 32)):
        yield at(T, D)
    yield at(128, 64, block=True)
    yield lambda: masking(device, 8, 8192)
