"""Muon for many matrices: those with the same smaller side are orthogonalised together, in fewer products.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest
matrix with all singular values about 1, by Newton-Schulz iterations: X <- (a + b G + c G^2) X with G = X X^T,
an odd polynomial of the singular values. torch.optim.Muon takes five of them, one matrix after another and
always in bfloat16, which processors without bfloat16 products emulate, slowly. Here four do:

- X begins divided by its Schatten 4-norm |X X^T|_F^(1/2), which the first G gives away, not by its larger
  Frobenius norm: no singular value is above 1 either way (Grishina et al., 2506.10935, section 3.4).
- Each polynomial is the closest to 1 on the interval where the last one has left the singular values (Amsel
  et al., 2505.16932), from [0.003, 1.02] on; 1 % is added to each upper end, for rounding.
- The last two are multiplied before they meet X (Zhang et al., 2026, tridao.me/blog/2026/gram-newton-schulz):
  with P = a + b G + c G^2 the next G is P G P. Not the steeper first two: in bfloat16 the singular values of
  small matrices then left their interval (results/muon.md, with what the rest gains).

After that every row of an update (what flows into one neuron) is divided by the running root mean square of
such rows, and the whole keeps its norm (NorMuon: Li et al., 2510.05491).
"""

import torch

from common import pick_dtype

COEFFICIENTS = ((8.2218, -23.3469, 16.6338), (4.0097, -2.9279, 0.5427),
                (3.4951, -2.5693, 0.5032), (2.5040, -1.8181, 0.4223))
EPS = 1e-14  # of G's norm: a gradient of zero gives zero
BETA2 = 0.95  # of the running mean squares


def orthogonalize(stacks, dtype):
    """Stacks (n, A, B) of one smaller side K -> each matrix about U V^T of its singular value decomposition.

    Computed in `dtype`. Singular values above 0.003 of the Schatten 4-norm come out between 0.78 and 1.22
    (bfloat16: 1.27); far smaller ones are multiplied by 289, as noise that stays small.
    """
    xs, sizes, K = [x.to(dtype) for x in stacks], [len(x) for x in stacks], min(stacks[0].shape[1:])
    wide = [x.shape[1] == K for x in xs]

    def gram():
        """(sum of n, K, K): X X^T of all, or X^T X where that is the smaller."""
        G = xs[0].new_empty(sum(sizes), K, K)
        for x, w, out in zip(xs, wide, G.split(sizes)):
            torch.bmm(*((x, x.mT) if w else (x.mT, x)), out=out)
        return G

    *steep, (a3, b3, c3), (a4, b4, c4) = COEFFICIENTS
    G = gram()
    norm = G.flatten(1).norm(dim=1).clamp(min=EPS)[:, None, None]
    G, xs = G / norm, [x / root for x, root in zip(xs, norm.sqrt().split(sizes))]
    for a, b, c in steep:
        P = torch.baddbmm(G, G, G, beta=b, alpha=c).split(sizes)  # b G + c G^2
        xs = [torch.baddbmm(x, p, x, beta=a) if w else torch.baddbmm(x, x, p, beta=a)
              for x, p, w in zip(xs, P, wide)]
        G = gram()
    P = torch.baddbmm(G, G, G, beta=b3, alpha=c3)
    P.diagonal(dim1=1, dim2=2).add_(a3)
    G = P @ (G @ P)
    P = torch.baddbmm(P, torch.baddbmm(G, G, G, beta=b4, alpha=c4), P, beta=a4).split(sizes)
    return [p @ x if w else x @ p for x, p, w in zip(xs, P, wide)]


def level_rows(x, running, scale):
    """x (n, A, B), in place: each row over the root of its running square (n, A, 1), which is updated too,
    and each matrix with `scale` times the norm it had."""
    squares = torch.linalg.vector_norm(x, dim=2, keepdim=True).square()  # (n, A, 1)
    running.lerp_(squares, 1 - BETA2)
    factor = running.clamp(min=1e-30).rsqrt()
    after = (squares * factor.square()).sum(1, keepdim=True).clamp(min=1e-30)
    return x.mul_(factor * (squares.sum(1, keepdim=True) / after).sqrt() * scale)


class Muon(torch.optim.Muon):
    """torch.optim.Muon with what is above, its products in bfloat16 where the hardware has them.

    The state of a matrix (A, B) is its `momentum_buffer` (A, B), as there, and `row_squares` (A, 1): views of
    tensors in which those of all matrices of a shape lie side by side.
    """

    def __init__(self, params, lr, weight_decay, momentum):
        super().__init__(params, lr, weight_decay, momentum)
        self.dtype = pick_dtype("auto", self.param_groups[0]["params"][0].device)
        self.stacks = {}  # shape (A, B) -> the matrices, their momenta (n, A, B) and row squares (n, A, 1)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.stacks = {}

    def stacked(self, shape, params):
        """Momenta (n, A, B) and row squares (n, A, 1): made if there are none yet of just these matrices."""
        known = self.stacks.get(shape, ((),))[0]
        if len(known) != len(params) or any(p is not q for p, q in zip(known, params)):
            new = dict(momentum_buffer=torch.zeros_like, row_squares=lambda p: torch.zeros_like(p[:, :1]))
            stacks = [torch.stack([self.state[p].get(name, zeros(p)) for p in params])
                      for name, zeros in new.items()]
            for p, *views in zip(params, *stacks):
                self.state[p].update(zip(new, views))
            self.stacks[shape] = params, *stacks
        return self.stacks[shape][1:]

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            sides = {}  # smaller side K -> [(matrices of a shape, their updates (n, A, B), row squares)]
            for (A, B), params in shapes.items():
                momentum, running = self.stacked((A, B), params)
                update = torch.stack([p.grad for p in params])  # (n, A, B)
                momentum.lerp_(update, 1 - group["momentum"])
                update.lerp_(momentum, group["momentum"])  # Nesterov
                sides.setdefault(min(A, B), []).append((params, update, running))
            for stacks in sides.values():
                updates = orthogonalize([update for _, update, _ in stacks], self.dtype)
                for (params, _, running), x in zip(stacks, updates):
                    x = level_rows(x.to(running.dtype), running, max(1, x.shape[1] / x.shape[2]) ** 0.5)
                    torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                    torch._foreach_add_(params, list(x), alpha=-group["lr"])
