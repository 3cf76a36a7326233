"""The embedding of tokens, whose gradient on a GPU is the same in every run.

    y_p = W[ids_p],     dW_v = the sum of dy_p over all positions p with ids_p = v

torch.compile adds the terms of a sum atomically, in an order that varies: compiled runs would
differ in their last bits. So the sum is one operator, into which it does not look. With a small
vocabulary it is the product of a matrix of zeros and ones (V, N) and dy (N, C), in full float32.
With a larger one it is PyTorch's own, which sorts the positions by their tokens; it would be slow
for few tokens, of which [MASK] has half of the positions. Neither waits for the GPU.
"""

import torch
import torch.nn.functional as F

from .launch import LIBRARY

LIMIT = 1024  # rows of W up to which the gradient is a product


def embedding_gradient(grad, ids, rows):
    """Sum grad (..., C) over the positions (...) of each id: (rows, C)."""
    if rows > LIMIT:
        return torch.ops.aten.embedding_dense_backward(grad, ids, rows, -1, False)
    one_hot = torch.arange(rows, device=ids.device)[:, None] == ids.flatten()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 would round the gradients
    try:
        return one_hot.to(grad.dtype) @ grad.reshape(-1, grad.shape[-1])
    finally:
        torch.set_float32_matmul_precision(precision)


LIBRARY.define("embedding_gradient(Tensor grad, Tensor ids, int rows) -> Tensor")
LIBRARY.impl("embedding_gradient", embedding_gradient, "CompositeExplicitAutograd")


@torch.library.register_fake("mdlm::embedding_gradient", lib=LIBRARY)
def _fake(grad, ids, rows):
    return grad.new_empty(rows, grad.shape[-1])


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids):
        ctx.save_for_backward(ids)
        ctx.rows = len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        return torch.ops.mdlm.embedding_gradient(grad, ids, ctx.rows), None


def embedding(ids, weight):
    """F.embedding, with the gradient of this file."""
    return _Lookup.apply(weight, ids)


class Embedding(torch.nn.Embedding):
    """nn.Embedding, which on a GPU has the gradient of this file. On a CPU, PyTorch's is exact."""

    def forward(self, ids):
        return embedding(ids, self.weight) if ids.is_cuda else super().forward(ids)
