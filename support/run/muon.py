"""The Muon optimizer, which orthogonalizes matrices of equal shape in batches.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) replaces a matrix's momentum by the
nearest matrix whose singular values are all about 1. It uses Newton-Schulz iterations: polynomials
X <- (a + b G + c G^2) X of G = X X^T. This file differs from torch.optim.Muon in two ways:

1. Four iterations instead of five, because X starts with a smaller norm (Grishina et al.,
   2506.10935, section 3.4) and each polynomial is optimal for the range of singular values that
   the previous one produces (Amsel et al., 2505.16932).
2. The rows of each update are then scaled to a common size (NorMuon: Li et al., 2510.05491).

results/muon.md measures the effect of each.
"""

import torch

from nanomdlm.kernels import newton_schulz
from nanomdlm.support.cli.devices import pick_dtype
from nanomdlm.support.run import shards

COEFFICIENTS = (  # (a, b, c) of each iteration
    (8.2218, -23.3469, 16.6338),
    (4.0097, -2.9279, 0.5427),
    (3.4951, -2.5693, 0.5032),
    (2.5040, -1.8181, 0.4223),
)
EPS = 1e-14  # lower bound of the norm, so that a gradient of zero gives an update of zero
BETA2 = 0.95  # decay of the running mean squares of rows


def orthogonalize(x, dtype):
    """Approximate U V^T of the singular value decomposition of each matrix of x.

    x: (n, A, B). The products are computed, and the result returned, in `dtype`.

    Singular values above 0.003 of the Schatten 4-norm become values between 0.78 and 1.22 (1.27 in
    bfloat16). Much smaller ones are multiplied by 289, so that noise stays small.
    """
    return iterate([x], dtype)[0]


def orthogonalize_all(batches, dtype, has_kernels=False):
    """Return [orthogonalize(x, dtype) for x in batches], with fewer products.

    has_kernels: whether the kernel of kernels/newton_schulz.py may compute what it fits.
    """
    results = {}  # place of a batch -> its result
    alike = {}  # K -> the places of batches with Gram matrices of K x K
    for i, x in enumerate(batches):
        if has_kernels and newton_schulz.fits(x, dtype):
            results[i] = newton_schulz.newton_schulz_heads(x, COEFFICIENTS, EPS)
        else:
            alike.setdefault(min(x.shape[1:]), []).append(i)
    for places in alike.values():
        found = iterate([batches[i] for i in places], dtype)
        results |= zip(places, found, strict=True)
    return [results[i] for i in range(len(batches))]


def iterate(batches, dtype):
    """Orthogonalize the matrices of several batches, whose Gram matrices have equal shapes.

    batches: tensors (n, A, B) with equal K = min(A, B) and any n. The polynomials of all their Gram
        matrices are one batch of products; small batches would not fill a GPU.
    """
    sizes = [len(x) for x in batches]
    tall = [x.shape[1] > x.shape[2] for x in batches]
    xs = [x.to(dtype) for x in batches]
    for i, (a, b, c) in enumerate(COEFFICIENTS):
        grams = [x.mT @ x if is_tall else x @ x.mT for x, is_tall in zip(xs, tall, strict=True)]
        G = torch.cat(grams) if len(grams) > 1 else grams[0]  # (sum of n, K, K)
        if i == 0:
            # The Frobenius norm of G is the square of the Schatten 4-norm of X.
            norm = G.flatten(1).norm(dim=1).clamp(min=EPS)[:, None, None]
            G = G / norm
            xs = [x / root for x, root in zip(xs, norm.sqrt().split(sizes), strict=True)]
        # Not P = a I + b G + c G^2 and X = P X, which would copy less: in bfloat16, its error can
        # be 1.5 times that of what follows.
        P = torch.baddbmm(G, G, G, beta=b, alpha=c)  # b G + c G^2
        for j, (x, p) in enumerate(zip(xs, P.split(sizes), strict=True)):
            factors = (x, p) if tall[j] else (p, x)
            xs[j] = torch.baddbmm(x, *factors, beta=a)
    return xs


def level_rows(x, running, scale):
    """Divide each row of x (n, A, B) in place by its running RMS, then restore the matrix norms.

    running: (n, A, 1) running mean squares of the rows, updated in place. Each matrix ends with
    `scale` times its norm before the call.
    """
    squares = torch.linalg.vector_norm(x, dim=2, keepdim=True).square()  # (n, A, 1)
    running.lerp_(squares, 1 - BETA2)
    factor = running.clamp(min=1e-30).rsqrt()
    divided = (squares * factor.square()).sum(1, keepdim=True).clamp(min=1e-30)
    return x.mul_(factor * (squares.sum(1, keepdim=True) / divided).sqrt() * scale)


def update(groups, lr, momentum, weight_kept, dtype, has_kernels=False):
    """Update the parameters of each group in place.

    groups: tuples (params, grads, momenta, squares, rows, shuffle), each of parameters (A, B) of
        equal shape. momenta (A, B) and squares (A, 1) are running means. Every `rows` rows of a
        parameter form a matrix that is orthogonalized separately. shuffle: with --shard, where
        each rank holds some rows of each matrix, the MatrixShuffle that exchanges them, else None
    weight_kept: what weight decay multiplies the weights by
    dtype: of the matrix products
    has_kernels: whether Triton kernels may compute them
    """
    batches = []
    means = []  # running squares (matrices, rows, 1) of each batch
    for _, grads, momenta, squares, rows, shuffle in groups:
        torch._foreach_lerp_(momenta, grads, 1 - momentum)
        x = torch.stack(torch._foreach_lerp(grads, momenta, momentum))  # Nesterov
        running = torch.stack(squares)
        B = x.shape[2]
        if shuffle:  # one exchange for both: the running squares travel as an extra column
            x, running = shuffle.gather(torch.cat((x, running), 2)).split((B, 1), 2)
        # What is kept until all are orthogonalized has its own memory, and x is in `dtype` already.
        batches.append(x.reshape(-1, rows, B).to(dtype))
        means.append(running.contiguous().view(-1, rows, 1))
    batches = orthogonalize_all(batches, dtype, has_kernels)
    for (params, _, _, squares, rows, shuffle), x, running in zip(
        groups, batches, means, strict=True
    ):
        n = len(params)
        A, B = params[0].shape
        x = level_rows(x.to(running.dtype), running, lr * max(1, rows / B) ** 0.5)
        if shuffle:
            both = torch.cat((x, running), 2).view(-1, shuffle.A, B + 1)
            x, running = shuffle.scatter(both).split((B, 1), 2)
        torch._foreach_copy_(squares, list(running.view(n, A, 1)))
        torch._foreach_mul_(params, weight_kept)
        torch._foreach_sub_(params, list(x.view(n, A, B)))


class Muon(torch.optim.Muon):
    """torch.optim.Muon with the update of this file.

    Matrix products are in bfloat16 where the hardware supports it.
    rows: dict of parameter -> number of its rows that form a separate matrix (default: all).
    has_kernels: whether Triton kernels may compute the products.
    """

    def __init__(self, params, lr, weight_decay, momentum=0.9, rows=None, has_kernels=False):
        super().__init__(params, lr, weight_decay, momentum)
        device = self.param_groups[0]["params"][0].device
        self.dtype = pick_dtype("auto", device)
        self.rows = rows or {}
        self.has_kernels = has_kernels and newton_schulz.is_compiled_right(device)
        self.update = update

    def compile(self):
        """Compile the update, which fuses the operations around the matrix products."""
        self.update = torch.compile(update)

    @torch.no_grad()
    def step(self):
        """Update all parameters that have a gradient, those of equal shape together."""
        for group in self.param_groups:
            equal_shape = {}
            for p in group["params"]:
                if p.grad is not None:
                    equal_shape.setdefault((p.shape, self.rows.get(p, len(p))), []).append(p)
            batches = []
            n_before = 0  # matrices of earlier batches; balances the work of the ranks
            for (_, rows), params in equal_shape.items():
                shuffle = None
                local = params
                grads = [p.grad for p in params]
                if hasattr(params[0], "to_local"):  # --shard: this rank has a part of each
                    shuffle = shards.MatrixShuffle(params[0], len(params), n_before)
                    local = [p.to_local() for p in params]
                    grads = [grad.to_local() for grad in grads]
                n_before += len(params)
                states = [self.state[p] for p in params]
                for state, p in zip(states, params):
                    if "row_squares" not in state:
                        # torch.optim.Muon has momentum alone: a state of it keeps that.
                        state.setdefault("momentum_buffer", torch.zeros_like(p))
                        state["row_squares"] = torch.zeros_like(p).sum(1, keepdim=True)
                momenta = [shards.local(state["momentum_buffer"]) for state in states]
                squares = [shards.local(state["row_squares"]) for state in states]
                batches.append((local, grads, momenta, squares, rows, shuffle))
            weight_kept = 1 - group["lr"] * group["weight_decay"]
            rates = (group["lr"], group["momentum"], weight_kept)
            self.update(batches, *rates, self.dtype, self.has_kernels)
