"""Muon for matrices of few shapes: all of a shape are orthogonalised in one batch, in fewer products.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest
matrix with all singular values about 1, by Newton-Schulz iterations: X <- (a + b G + c G^2) X with G = X X^T,
an odd polynomial of the singular values. torch.optim.Muon takes five of them, one matrix after another and
always in bfloat16, which processors without bfloat16 products emulate, slowly. Here four do:

- X begins divided by its Schatten 4-norm |X X^T|_F^(1/2), which the first G gives away, not by its larger
  Frobenius norm: no singular value is above 1 either way (Grishina et al., 2506.10935, section 3.4).
- Each polynomial is the closest to 1 on the interval where the last one has left the singular values (Amsel
  et al., 2505.16932), from [0.003, 1.02] on; 1 % is added to each upper end, for rounding.
- Two polynomials at a time are multiplied as (A, A) matrices, and X by their product alone (Zhang et al.,
  2026, dao-lab.ai/blog/2026/gram-newton-schulz). Over more than two, bfloat16 may diverge.

results/muon.md has what each of these gains.
"""

import torch

from common import pick_dtype

COEFFICIENTS = (((8.2218, -23.3469, 16.6338), (4.0097, -2.9279, 0.5427)),
                ((3.4951, -2.5693, 0.5032), (2.5040, -1.8181, 0.4223)))
EPS = 1e-14  # of G's norm: momenta below 1e-7 are taken for zero, as in torch.optim.Muon


def orthogonalize(x, dtype):
    """(n, A, B) to about U V^T of the singular value decomposition of each, in `dtype`.

    Singular values above 0.003 of the Schatten 4-norm come out between 0.78 and 1.22, smaller ones 289 times
    as large as they were (of the norm).
    """
    x, scaled, wide = x.to(dtype), False, x.shape[1] <= x.shape[2]
    for (a, b, c), (d, e, f) in COEFFICIENTS:
        gram = x @ x.mT if wide else x.mT @ x  # G, of the smaller side
        if not scaled:
            norm = gram.flatten(1).norm(dim=1).clamp(min=EPS)[:, None, None]
            gram, x, scaled = gram / norm, x / norm.sqrt(), True
        first = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        first.diagonal(dim1=1, dim2=2).add_(a)  # a + b G + c G^2
        gram = first @ gram @ first  # that of X multiplied by it
        second = torch.baddbmm(gram, gram, gram, beta=e, alpha=f)
        both = torch.baddbmm(first, second, first, beta=d)
        x = both @ x if wide else x @ both
    return x


class Muon(torch.optim.Muon):
    """torch.optim.Muon with the orthogonalisation above, in bfloat16 where the hardware has it.

    The state is the same, but momenta of matrices of a shape lie side by side: `momentum_buffer` is a view.
    """

    def __init__(self, params, lr, weight_decay, momentum):
        super().__init__(params, lr, weight_decay, momentum)
        self.dtype = pick_dtype("auto", self.param_groups[0]["params"][0].device)
        self.stacks = {}  # shape (A, B) -> the matrices, and their momenta (n, A, B)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.stacks = {}

    def momenta(self, shape, params):
        """(n, A, B): made from the state where there is none yet of exactly these matrices."""
        known, stack = self.stacks.get(shape, ((), None))
        if len(known) != len(params) or any(p is not q for p, q in zip(known, params)):
            stack = torch.stack([self.state[p].get("momentum_buffer", torch.zeros_like(p)) for p in params])
            for p, x in zip(params, stack):
                self.state[p]["momentum_buffer"] = x
            self.stacks[shape] = params, stack
        return stack

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for (A, B), params in shapes.items():
                gradient, momentum = torch.stack([p.grad for p in params]), self.momenta((A, B), params)
                momentum.lerp_(gradient, 1 - group["momentum"])
                x = orthogonalize(gradient.lerp_(momentum, group["momentum"]), self.dtype)  # Nesterov
                x = x.to(gradient.dtype) * max(1, A / B) ** 0.5
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(x), alpha=-group["lr"])
