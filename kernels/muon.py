"""Muon for matrices of few shapes: the Newton-Schulz iteration of all matrices of a shape in one batch.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest
matrix with all singular values about 1. torch.optim.Muon does that one matrix after another and always in
bfloat16, which processors without bfloat16 products emulate, slowly. The update here is the same up to
rounding; the state is the same, and so are checkpoints.
"""

import torch

from common import pick_dtype

COEFFICIENTS, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # those of torch.optim.Muon


def orthogonalize(x, dtype):
    """(n, A, B), A <= B, to about U V^T of the singular value decomposition of each, in `dtype`."""
    a, b, c = COEFFICIENTS
    x = x.to(dtype)
    x = x / x.flatten(1).norm(dim=1).clamp(min=EPS)[:, None, None]
    for _ in range(ITERATIONS):
        gram = x @ x.mT  # (n, A, A)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Muon):
    """torch.optim.Muon with its Newton-Schulz iteration batched, in bfloat16 where the hardware has it."""

    def __init__(self, params, lr, weight_decay, momentum):
        super().__init__(params, lr, weight_decay, momentum)
        self.dtype = pick_dtype("auto", self.param_groups[0]["params"][0].device)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params, grads, momenta = [], [], []
            self._init_group(group, params, grads, momenta)
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, momenta, group["momentum"])  # Nesterov
            shapes = {}
            for p, update in zip(params, updates):
                shapes.setdefault(tuple(sorted(p.shape)), []).append((p, update))
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            for pairs in shapes.values():
                wide = lambda x: x.mT if len(x) > x.shape[1] else x
                done = orthogonalize(torch.stack([wide(u) for _, u in pairs]), self.dtype)
                for (p, _), u in zip(pairs, done):
                    u = u if u.shape == p.shape else u.mT.contiguous()  # faster than adding across strides
                    p.add_(u, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)
