"""How fast is the kernel of x + dropout(y), by warps and elements of a program, beside PyTorch?

    python studies/residual.py                  # on a GPU: check, then time; less than 20 s
    MDLM_TRITON=1 python studies/residual.py    # without one: check in the emulator

Forward reads two tensors and writes one, backward reads and writes one: TB/s are of these alone,
also of what PyTorch does in another way. Those of 16,384 x 384 stay in the L2 cache in part, as
they do in training.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/residual.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch
import torch.nn.functional as F

from nanomdlm.kernels import residual as R
from nanomdlm.kernels.reference import new_seed, residual_dropout_ref
from nanomdlm.kernels.residual import residual_dropout
from studies.tiles import in_emulator, milliseconds

PRESENT = (R.WARPS, R.TILE, R.ROUNDS)
P = 0.2
# Warps and elements of a program, rounds of Philox
VARIANTS = [(w, 256 * w * n, 10) for w in (4, 8) for n in (1, 2, 4)] + [(4, 1024, 7)]


def make(device, *shape):
    """x, y, and the gradient of the output, in bfloat16; a seed."""
    g = torch.Generator(device).manual_seed(0)
    tensors = (torch.randn(shape, generator=g, device=device).bfloat16() for _ in range(3))
    return *tensors, new_seed(device)


def choose(variant):
    """Let the operator use a variant."""
    R.WARPS, R.TILE, R.ROUNDS = variant


def name(variant):
    return "{} warps, {} elements, {} rounds".format(*variant)


def differentiate(function, x, y, grad):
    """The output, and the gradient of y; that of x is `grad` itself."""
    x, y = (z.detach().requires_grad_() for z in (x, y))
    out = function(x, y)
    return out, torch.autograd.grad(out, (x, y), grad)[1]


def with_seed(function, seed):
    """The function of x and y, with a seed that was drawn before."""
    return lambda x, y: function(x, y, P, True, seed, 3)


def check(x, y, grad, seed, variant):
    """Whether a variant of 10 rounds equals the reference: bits of dy, out to its last rounding."""
    choose(variant)
    out, dy = differentiate(with_seed(residual_dropout, seed), x, y, grad)
    plain, dy_plain = differentiate(with_seed(residual_dropout_ref, seed), x, y, grad)
    ok = torch.equal(dy, dy_plain) and torch.allclose(out.float(), plain.float(), 2**-7, 1e-6)
    dropped = (dy == 0).float().mean().item()
    print(f"{name(variant)}: {dropped:.4f} dropped{'' if ok else '  WRONG'}", flush=True)
    return ok


def check_all(*tensors):
    results = [check(*tensors, variant) for variant in VARIANTS if variant[2] == 10]
    return all(results)


def emulated():
    """Check the variants in the emulator; whether all are right."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    importlib.import_module("ptx.driver").install(90)
    return check_all(*make("cpu", 2, 24, 96)) & check_all(*make("cpu", 3, 7, 13))


def show(title, function, x, y, grad):
    """Print the times of forward, as in training, and of forward and backward."""
    inputs = (z.detach().requires_grad_() for z in (x, y))
    both = milliseconds(functools.partial(differentiate, function, x, y, grad), 0.01)
    forward = milliseconds(functools.partial(function, *inputs), 0.005)
    size = x.numel() * x.element_size() / 1e9
    text = f"forward {forward:.4f} ms, {3 * size / forward:.2f} TB/s; "
    text += f"forward + backward {both:.4f} ms, {5 * size / both:.2f} TB/s"
    print(f"{title}: {text}", flush=True)


def ours(x, y):
    return residual_dropout(x, y, P)


def plain(x, y):
    return x + F.dropout(y, P)


def time_all(*shape):
    """Time the variants, then what calls them, then PyTorch; whether all are right."""
    x, y, grad, seed = make("cuda", *shape)
    ok = check_all(x, y, grad, seed)
    print(f"\n{shape[0]} x {shape[1]}")
    for variant in VARIANTS:
        choose(variant)
        show(name(variant), with_seed(residual_dropout, seed), x, y, grad)
    choose(PRESENT)
    show("the present one, which draws its seed", ours, x, y, grad)
    show("the same, compiled", torch.compile(ours, dynamic=False), x, y, grad)
    show("PyTorch, compiled", torch.compile(plain, dynamic=False), x, y, grad)
    show("PyTorch, eager", plain, x, y, grad)
    return ok


def main(argv):
    if not torch.cuda.is_available():
        return in_emulator(emulated)
    ok = time_all(16384, 384)
    return int(not ok & time_all(65536, 768))


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
