"""Muon for many matrices at once: those with the same smaller side share their matrix products.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by
the nearest matrix whose singular values are all about 1, by Newton-Schulz iterations: polynomials
X <- (a + b G + c G^2) X of G = X X^T. torch.optim.Muon takes five; four are enough here, because X
starts with a smaller norm (Grishina et al., 2506.10935, section 3.4) and each polynomial is optimal
for what the last one left (Amsel et al., 2505.16932). The last two are multiplied with each other
first (Zhang et al., 2026, tridao.me/blog/2026/gram-newton-schulz). Then the rows of an update are
brought to a common scale (NorMuon: Li et al., 2510.05491). What each is worth: results/muon.md.
"""

import torch

from support import shards
from support.runtime import pick_dtype

COEFFICIENTS = (
    (8.2218, -23.3469, 16.6338),
    (4.0097, -2.9279, 0.5427),
    (3.4951, -2.5693, 0.5032),
    (2.5040, -1.8181, 0.4223),
)
EPS = 1e-14  # added to the norm: a gradient of zero gives zero
BETA2 = 0.95  # decay of the running mean squares


def orthogonalize(stacks, dtype):
    """Stacks (n, A, B) with one smaller side K -> about U V^T of each matrix's SVD, in `dtype`.

    Singular values above 0.003 of the Schatten 4-norm come out between 0.78 and 1.22 (bfloat16:
    1.27), much smaller ones multiplied by 289: noise stays small.
    """
    K = min(stacks[0].shape[1:])
    sizes = [len(x) for x in stacks]
    xs = [x.to(dtype) for x in stacks]
    wide = [x.shape[1] == K for x in xs]

    def gram():
        """(sum of n, K, K): X X^T of all matrices, or X^T X where that is the smaller one."""
        G = xs[0].new_empty(sum(sizes), K, K)
        for x, is_wide, out in zip(xs, wide, G.split(sizes)):
            if is_wide:
                torch.bmm(x, x.mT, out=out)
            else:
                torch.bmm(x.mT, x, out=out)
        return G

    G = gram()
    norm = G.flatten(1).norm(dim=1).clamp(min=EPS)[:, None, None]
    G = G / norm
    xs = [x / root for x, root in zip(xs, norm.sqrt().split(sizes))]
    *steep, (a3, b3, c3), (a4, b4, c4) = COEFFICIENTS
    for a, b, c in steep:
        P = torch.baddbmm(G, G, G, beta=b, alpha=c).split(sizes)  # b G + c G^2
        for i, (x, p, is_wide) in enumerate(zip(xs, P, wide)):
            pair = (p, x) if is_wide else (x, p)
            xs[i] = torch.baddbmm(x, *pair, beta=a)
        G = gram()
    P = torch.baddbmm(G, G, G, beta=b3, alpha=c3)
    P.diagonal(dim1=1, dim2=2).add_(a3)
    G = P @ (G @ P)
    P = torch.baddbmm(P, torch.baddbmm(G, G, G, beta=b4, alpha=c4), P, beta=a4).split(sizes)
    return [p @ x if is_wide else x @ p for x, p, is_wide in zip(xs, P, wide)]


def level_rows(x, running, scale):
    """Divide rows of x (n, A, B) in place by their running size; norms become `scale` times."""
    squares = torch.linalg.vector_norm(x, dim=2, keepdim=True).square()  # (n, A, 1)
    running.lerp_(squares, 1 - BETA2)
    factor = running.clamp(min=1e-30).rsqrt()
    after = (squares * factor.square()).sum(1, keepdim=True).clamp(min=1e-30)
    return x.mul_(factor * (squares.sum(1, keepdim=True) / after).sqrt() * scale)


def update(parts, lr, momentum, kept, dtype):
    """Update matrices with one smaller side: parts of
    (params, grads, momenta, squares, rows, turns).

    momenta (n, A, B) and squares (n, A, 1) are a part's running means; each `rows` rows of a
    parameter (A, B) are a matrix of their own. kept: what weight decay leaves of the weights.
    turns: with --shard, where tensors hold a part of each matrix: who makes which update.
    """
    updates = []
    running = []
    for _, grads, momenta, squares, rows, turns in parts:
        x = torch.stack(grads)  # (n, A, B)
        momenta.lerp_(x, 1 - momentum)
        x.lerp_(momenta, momentum)  # Nesterov
        if turns:
            x, squares = turns.gather(torch.cat((x, squares), 2)).split((x.shape[2], 1), 2)
        updates.append(x.reshape(-1, rows, x.shape[2]))
        running.append(squares.reshape(-1, rows, 1))
    updates = orthogonalize(updates, dtype)
    for (params, _, momenta, squares, _, turns), x, sizes in zip(parts, updates, running):
        scale = lr * max(1, x.shape[1] / x.shape[2]) ** 0.5
        x = level_rows(x.to(sizes.dtype), sizes, scale)
        if turns:
            both = torch.cat((x, sizes), 2).view(-1, turns.A, x.shape[2] + 1)
            x, sizes = turns.scatter(both).split((x.shape[2], 1), 2)
            squares.copy_(sizes)
        torch._foreach_mul_(params, kept)
        torch._foreach_sub_(params, list(x.view(momenta.shape)))


class Muon(torch.optim.Muon):
    """torch.optim.Muon with the above, its products in bfloat16 where the hardware has them.

    rows: parameter -> how many of its rows make a matrix of their own (default: all).
    """

    def __init__(self, params, lr, weight_decay, momentum=0.9, rows=None):
        super().__init__(params, lr, weight_decay, momentum)
        self.dtype = pick_dtype("auto", self.param_groups[0]["params"][0].device)
        self.rows = rows or {}
        self.update = update
        # (A, B), rows -> the parameters, and tensors of which their states are views: the
        # momentum_buffer (n, A, B) and row_squares (n, A, 1) of all.
        self.stacks = {}

    def compile(self):
        """Fuse what surrounds the matrix products."""
        self.update = torch.compile(update)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.stacks = {}

    def stacked(self, key, params):
        """Momenta (n, A, B) and row squares (n, A, 1), made if `params` have none yet."""
        known = self.stacks.get(key, ((),))[0]
        if len(known) != len(params) or any(p is not q for p, q in zip(known, params)):
            old = [self.state[p] for p in params]
            zero = torch.zeros_like(shards.local(params[0]))
            momenta = torch.stack([s.get("momentum_buffer", zero) for s in old])
            squares = torch.stack([s.get("row_squares", zero[:, :1]) for s in old])
            for p, momentum, square in zip(params, momenta, squares):
                self.state[p].update(momentum_buffer=momentum, row_squares=square)
            self.stacks[key] = (params, momenta, squares)
        return self.stacks[key][1:]

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            kept = 1 - group["lr"] * group["weight_decay"]
            alike = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault((p.shape, self.rows.get(p, len(p))), []).append(p)
            sides = {}  # smaller side K -> the parts of update()
            first = 0
            for (shape, rows), params in alike.items():
                turns = None
                if shards.is_spread(params[0]):
                    turns = shards.Turns(params[0], len(params), first)
                first += len(params)
                means = self.stacked((shape, rows), params)
                grads = [shards.local(p.grad) for p in params]
                part = ([shards.local(p) for p in params], grads, *means, rows, turns)
                sides.setdefault(min(rows, shape[1]), []).append(part)
            for parts in sides.values():
                self.update(parts, group["lr"], group["momentum"], kept, self.dtype)
