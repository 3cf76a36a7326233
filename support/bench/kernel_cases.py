"""What `python bench.py kernels` times: each operation beside plain PyTorch and installed peers.

A case is an operation at one shape. Its contestants are functions of (backward, *inputs) -> output
and, with backward, gradients, compared with `exact` (float64) before they are timed. Peers:
github.com/linkedin/Liger-Kernel, github.com/apple/ml-cross-entropy, and PyTorch's own.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels.reference import block_spans, prepare, rotary_tables

compiled = partial(torch.compile, dynamic=False)


@dataclass
class Case:
    name: str
    shape: str
    dtype: torch.dtype
    # "forward", "forward + backward" -> (FLOPs, the fewest bytes between memory and chip)
    cost: dict
    inputs: Callable  # seed -> tensors
    exact: Callable  # inputs -> [output, gradients]
    contestants: dict  # name -> function; speed-ups are relative to the first
    graph: bool  # replayed as a CUDA graph, which hides the host's time


def outcome(out, inputs, backward, grad=None):
    return (out, *torch.autograd.grad(out, inputs, grad)) if backward else (out,)


def yardsticks(contestant, f):
    return {"PyTorch eager": contestant(f), "PyTorch compiled": contestant(compiled(f))}


def flex(spans, copies=False):
    """FlexAttention (Dong et al., 2412.05496): it visits the tiles that block_spans say, or all.

    Compiled together with the normalization and rotation before it. copies: v too is made
    contiguous, as torch 2.13 is wrong on a CPU where v alone is a view.
    """
    mask = None
    if spans is not None:
        start, end, start2, end2 = spans[0, :4]

        def visible(b, h, q, k):
            return ((start[q] <= k) & (k < end[q])) | ((start2[q] <= k) & (k < end2[q]))

        mask = create_block_mask(visible, None, None, len(start), len(start), spans.device)

    def f(qkv, cos, sin, qk_norm, spans):
        q, k, v = (z.transpose(1, 2) for z in prepare(qkv, cos, sin, qk_norm))  # (B, H, T, D)
        if copies:
            v = v.contiguous()
        return flex_attention(q, k, v, block_mask=mask).transpose(1, 2)

    return compiled(f)


def attention(device, dtype, B, T, H, D, S=0, prepares=False):
    """On packed projections, whose gradient is packed too, as in the model: there SDPA reads q, k,
    v by their strides, and its gradients are stacked. S: T rows that block_spans describes.
    prepares: queries and keys are normalized and rotated first, as in the model."""
    ref = kernels.attention_ref
    spans = block_spans(T // 2, S, device) if S else None
    tables = [x.to(device) for x in rotary_tables(T, D)] if prepares else (None, None)

    def inputs(seed):
        g = torch.Generator(device).manual_seed(seed)
        qkv = torch.randn(B, T, 3, H, D, generator=g, device=device).to(dtype)
        grad = torch.randn(B, T, H, D, generator=g, device=device).to(dtype)
        return qkv.requires_grad_(), grad

    def contestant(f):
        return lambda backward, qkv, grad: outcome(
            f(qkv, *tables, prepares, spans=spans), (qkv,), backward, grad
        )

    def exact(qkv, grad):
        outcomes = []
        # One sequence at a time: (1, H, T, T) scores in float64.
        for x, g in zip(qkv.detach().double().split(1), grad.double().split(1)):
            x.requires_grad_()
            outcomes.append(outcome(ref(x, *tables, prepares, spans=spans), (x,), True, g))
        return [torch.cat(tensors).detach() for tensors in zip(*outcomes)]

    contestants = yardsticks(contestant, ref)
    for name in ("EFFICIENT",) if S else ("FLASH", "CUDNN", "EFFICIENT"):
        backend = sdpa_kernel(getattr(SDPBackend, f"{name}_ATTENTION"))
        contestants[f"SDPA {name}"] = contestant(backend(ref))
    if S or prepares:
        contestants["FlexAttention"] = contestant(flex(spans))
        contestants["FlexAttention, v copied"] = contestant(flex(spans, copies=True))
    contestants["mdlm"] = contestant(kernels.attention)
    shape = f"B={B} T={T} H={H} D={D} {str(dtype)[6:]}" + f" S={S}" * bool(S)
    # With n blocks of S tokens both halves see S^2 (1 + ... + n) pairs.
    pairs = T // 2 * (T // 2 + S) if S else T * T
    product = 2 * B * H * pairs * D  # FLOPs
    n = B * T * H * D * dtype.itemsize  # bytes of q
    # Forward reads q, k, v, writes O; backward reads q, k, v, O, dO, writes dq, dk, dv. Backward
    # computes the scores again, then four gradients.
    cost = {"forward": (2 * product, 4 * n), "forward + backward": (7 * product, 12 * n)}
    name = "attention with norm and rotation" if prepares else "attention"
    return Case(name, shape, dtype, cost, inputs, exact, contestants, True)


def head_peers():
    """Names and f(h, W, targets), the mean cross-entropy over all rows of h."""
    if hasattr(F, "linear_cross_entropy"):
        yield "F.linear_cross_entropy", F.linear_cross_entropy
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        # By default it adds the chunks of dW in bfloat16.
        yield "liger-kernel", partial(liger, accum_dtype=torch.float32)
    with contextlib.suppress(ImportError):
        from cut_cross_entropy import linear_cross_entropy as cut

        # By default it leaves out gradients below a threshold: wrong by 2.5 % (results/hopper.md).
        yield "cut-cross-entropy", partial(cut, filter_eps=None)


def head(device, dtype, M, C, V):
    """The mean loss over M rows: the model gives the head the masked ones alone."""

    def inputs(seed):
        g = torch.Generator(device).manual_seed(seed)
        h = torch.randn(M, C, generator=g, device=device).to(dtype)
        W = (torch.randn(V, C, generator=g, device=device) * 2 / C**0.5).to(dtype)
        targets = torch.randint(V, (M,), generator=g, device=device)
        weight = torch.full((M,), 1 / M, device=device)
        return h.requires_grad_(), W.requires_grad_(), targets, weight

    def contestant(f):
        return lambda backward, h, W, *more: outcome(f(h, W, *more), (h, W), backward)

    def exact(h, W, targets, weight):
        h, W = (x.detach().double().requires_grad_() for x in (h, W))
        loss = 0
        for x, y in zip(h.split(1024), targets.split(1024)):
            chunk_loss = F.cross_entropy(x @ W.T, y, reduction="sum") / M
            chunk_loss.backward()
            loss += chunk_loss.detach()
        return [loss, h.grad, W.grad]

    contestants = yardsticks(contestant, kernels.linear_cross_entropy_ref)
    for name, f in head_peers():
        contestants[name] = contestant(lambda h, W, targets, _, f=f: f(h, W, targets))
    contestants["mdlm"] = contestant(kernels.linear_cross_entropy)
    shape = f"M={M} C={C} V={V} {str(dtype)[6:]}"
    # Three products. Forward reads h and W; backward writes their gradients.
    cost = {"forward + backward": (3 * 2 * M * C * V, 2 * (M + V) * C * dtype.itemsize)}
    # No graph: some peers wait for the GPU.
    return Case("head + loss", shape, dtype, cost, inputs, exact, contestants, False)


def norm_conv(device, dtype, B, T, C, k=5):
    """RMSNorm and the convolution over k positions."""

    def inputs(seed):
        g = torch.Generator(device).manual_seed(seed)
        x, grad = (torch.randn(B, T, C, generator=g, device=device).to(dtype) for _ in range(2))
        weight = torch.randn(k, C, generator=g, device=device) / 2
        return x.requires_grad_(), weight.requires_grad_(), grad

    def contestant(f):
        return lambda backward, x, weight, grad: outcome(f(x, weight), (x, weight), backward, grad)

    def exact(x, weight, grad):
        x, weight = (z.detach().double().requires_grad_() for z in (x, weight))
        results = outcome(kernels.norm_conv_ref(x, weight), (x, weight), True, grad.double())
        return [z.detach() for z in results]

    contestants = yardsticks(contestant, kernels.norm_conv_ref)
    contestants["mdlm"] = contestant(kernels.norm_conv)
    n = B * T * C * dtype.itemsize  # bytes of x
    # Forward reads x and writes y; backward reads x and dy, and writes dx.
    cost = {"forward": (0, 2 * n), "forward + backward": (0, 5 * n)}
    shape = f"B={B} T={T} C={C} {str(dtype)[6:]}"
    return Case("norm and convolution", shape, dtype, cost, inputs, exact, contestants, True)


def masking(device, B, T, V=65):
    """Exact, mirrored counts as in training; returns tokens, counts and ascending row indices."""

    def inputs(seed):
        g = torch.Generator(device).manual_seed(seed)
        level = torch.randint(1, T + 1, (B,), generator=g, device=device)
        level[B // 2 :] = T + 1 - level[: B // 2]
        x0 = torch.randint(V, (B, T), generator=g, device=device)
        key = [torch.tensor(number, device=device) for number in (seed, 7)]  # seed and step
        return x0, level, *key, torch.arange(B, device=device)

    def keyed(f):
        return lambda backward, x0, level, *key: f(x0, level, V, *key)

    contestants = yardsticks(keyed, kernels.mask_tokens_ref)
    contestants["mdlm"] = keyed(kernels.mask_tokens)
    exact = partial(keyed(kernels.mask_tokens_ref), False)
    # Reads int64 tokens, writes tokens and row indices; and each row's level, number and count.
    cost = {"forward": (0, 8 * (3 * B * T + 3 * B))}
    shape = f"B={B} T={T} int64"
    return Case("masking", shape, torch.int64, cost, inputs, exact, contestants, True)


def cases(device):
    """Functions that build the cases, the most important first."""
    bf16 = torch.bfloat16

    def attention_at(T, D, S=0):
        tokens = 32768 if T <= 1024 else 16384
        return partial(attention, device, bf16, tokens // T, T, 768 // D, D, S)

    yield partial(head, device, bf16, 8192, 384, 65)  # first those of the preset gpu
    yield partial(masking, device, 64, 256)
    yield attention_at(256, 64)
    yield partial(norm_conv, device, bf16, 64, 256, 384)
    for T in (256, 512, 1024):
        yield partial(attention_at(T, 64), prepares=True)
    yield partial(norm_conv, device, bf16, 64, 1024, 768)
    yield partial(head, device, bf16, 32768, 768, 50304)
    for T in (512, 1024):
        yield partial(masking, device, 64, T)
        yield attention_at(T, 64)
    for T, S in ((512, 4), (512, 16), (2048, 16)):
        yield attention_at(T, 64, S)
    for T, D in ((128, 64), (4096, 64), (256, 32), (1024, 32)):
        yield attention_at(T, D)
    yield partial(head, device, bf16, 4096, 768, 262144)  # the vocabulary of Gemma 3
