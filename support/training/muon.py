"""Muon for many matrices at once: those of one shape share their matrix products.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by
the nearest matrix whose singular values are all about 1, by Newton-Schulz iterations: polynomials
X <- (a + b G + c G^2) X of G = X X^T. torch.optim.Muon takes five; four are enough here, because X
starts with a smaller norm (Grishina et al., 2506.10935, section 3.4) and each polynomial is optimal
for what the last one left (Amsel et al., 2505.16932). Then the rows of an update are brought to a
common scale (NorMuon: Li et al., 2510.05491). What each is worth: results/muon.md.
"""

import torch

from support.devices import pick_dtype
from support.training import shards

COEFFICIENTS = (
    (8.2218, -23.3469, 16.6338),
    (4.0097, -2.9279, 0.5427),
    (3.4951, -2.5693, 0.5032),
    (2.5040, -1.8181, 0.4223),
)
EPS = 1e-14  # added to the norm: a gradient of zero gives zero
BETA2 = 0.95  # decay of the running mean squares


def orthogonalize(x, dtype):
    """Matrices (n, A, B) -> about U V^T of the SVD of each, in `dtype`.

    Singular values above 0.003 of the Schatten 4-norm come out between 0.78 and 1.22 (bfloat16:
    1.27), much smaller ones multiplied by 289: noise stays small.
    """
    is_tall = x.shape[1] > x.shape[2]
    x = x.to(dtype)
    for i, (a, b, c) in enumerate(COEFFICIENTS):
        G = x.mT @ x if is_tall else x @ x.mT  # Gram matrices (n, K, K), K the smaller side
        if i == 0:
            norm = G.flatten(1).norm(dim=1).clamp(min=EPS)[:, None, None]
            G = G / norm
            x = x / norm.sqrt()
        P = torch.baddbmm(G, G, G, beta=b, alpha=c)  # b G + c G^2
        pair = (x, P) if is_tall else (P, x)
        x = torch.baddbmm(x, *pair, beta=a)
    return x


def level_rows(x, running, scale):
    """Divide rows of x (n, A, B) in place by their running size; norms become `scale` times."""
    squares = torch.linalg.vector_norm(x, dim=2, keepdim=True).square()  # (n, A, 1)
    running.lerp_(squares, 1 - BETA2)
    factor = running.clamp(min=1e-30).rsqrt()
    after = (squares * factor.square()).sum(1, keepdim=True).clamp(min=1e-30)
    return x.mul_(factor * (squares.sum(1, keepdim=True) / after).sqrt() * scale)


def update(parts, lr, momentum, kept, dtype):
    """Update matrices: parts of (params, grads, momenta, squares, rows, turns), alike in a part.

    momenta (A, B) and squares (A, 1) are running means; each `rows` rows of a parameter (A, B) are
    a matrix of their own. kept: what weight decay leaves of the weights. turns: with --shard, where
    tensors hold a part of each matrix: who makes which update.
    """
    for params, grads, momenta, squares, rows, turns in parts:
        torch._foreach_lerp_(momenta, grads, 1 - momentum)
        x = torch.stack(torch._foreach_lerp(grads, momenta, momentum))  # Nesterov
        running = torch.stack(squares)
        n, A, B = x.shape
        if turns:
            x, running = turns.gather(torch.cat((x, running), 2)).split((B, 1), 2)
        x = orthogonalize(x.reshape(-1, rows, B), dtype).to(x.dtype)
        running = running.reshape(-1, rows, 1)
        x = level_rows(x, running, lr * max(1, rows / B) ** 0.5)
        if turns:
            both = torch.cat((x, running), 2).view(-1, turns.A, B + 1)
            x, running = turns.scatter(both).split((B, 1), 2)
        torch._foreach_copy_(squares, list(running.view(n, A, 1)))
        torch._foreach_mul_(params, kept)
        torch._foreach_sub_(params, list(x.view(n, A, B)))


class Muon(torch.optim.Muon):
    """torch.optim.Muon with the above, its products in bfloat16 where the hardware has them.

    rows: parameter -> how many of its rows make a matrix of their own (default: all).
    """

    def __init__(self, params, lr, weight_decay, momentum=0.9, rows=None):
        super().__init__(params, lr, weight_decay, momentum)
        self.dtype = pick_dtype("auto", self.param_groups[0]["params"][0].device)
        self.rows = rows or {}
        self.update = update

    def compile(self):
        """Fuse what surrounds the matrix products."""
        self.update = torch.compile(update)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            alike = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault((p.shape, self.rows.get(p, len(p))), []).append(p)
            parts = []
            first = 0
            for (_, rows), params in alike.items():
                turns = None
                if shards.is_spread(params[0]):
                    turns = shards.MatrixShuffle(params[0], len(params), first)
                first += len(params)
                local = [shards.local(p) for p in params]
                grads = [shards.local(p.grad) for p in params]
                states = [self.state[p] for p in params]
                for state, p in zip(states, local):
                    if "row_squares" not in state:
                        state.setdefault("momentum_buffer", torch.zeros_like(p))
                        state["row_squares"] = torch.zeros_like(p[:, :1])
                momenta = [state["momentum_buffer"] for state in states]
                squares = [state["row_squares"] for state in states]
                parts.append((local, grads, momenta, squares, rows, turns))
            kept = 1 - group["lr"] * group["weight_decay"]
            self.update(parts, group["lr"], group["momentum"], kept, self.dtype)
