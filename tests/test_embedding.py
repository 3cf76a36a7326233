"""The embedding's gradient: PyTorch's, but in an order that no run changes."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from nanomdlm.kernels.embedding import LIMIT, Embedding, embedding

ROWS = (66, 2 * LIMIT)  # a product, and a sum of sorted positions


def draw(rows, C=8):
    """ids (4, 50) of which half are the last one, a weight, and a gradient of whole numbers."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(rows - 1, (4, 50), generator=g)
    ids[torch.rand(ids.shape, generator=g) < 0.5] = rows - 1
    weight = torch.randn(rows, C, generator=g, requires_grad=True)
    return ids, weight, torch.randint(-99, 99, (4, 50, C), generator=g).float()


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("rows", ROWS)
def test_the_gradient_is_that_of_pytorch(rows, precision):
    """To the bit, where the order of a sum changes nothing; and no setting is left behind."""
    ids, weight, grad = draw(rows)
    torch.set_float32_matmul_precision(precision)
    try:
        for g in (grad, torch.flip(grad, (0,)), grad.transpose(0, 1)):
            at = ids if g.shape[:2] == ids.shape else ids.T
            y = embedding(at, weight)
            assert torch.equal(y, F.embedding(at, weight))
            (ours,) = torch.autograd.grad(y, weight, g)
            (theirs,) = torch.autograd.grad(F.embedding(at, weight), weight, g)
            assert torch.equal(ours, theirs)
        (ours,) = torch.autograd.grad(embedding(ids, weight), weight, grad / 7)
        (theirs,) = torch.autograd.grad(F.embedding(ids, weight), weight, grad / 7)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-5)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("rows", ROWS)
def test_the_operator_is_well_defined(rows):
    ids, _, grad = draw(rows)
    torch.library.opcheck(torch.ops.mdlm.embedding_gradient.default, (grad, ids, rows))


def compiled_operators(lookup, rows):
    """Names of the operators that Inductor would get in backward, and the gradient."""
    ids, weight, grad = draw(rows)
    found = set()

    def note(graph, inputs):
        found.update(str(node.target) for node in graph.graph.nodes)
        return graph

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph,
        bw_compiler=note,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    y = torch.compile(lookup, backend=backend, fullgraph=True)(ids, weight)
    return found, torch.autograd.grad(y, weight, grad)[0]


@pytest.mark.parametrize("rows", ROWS)
def test_no_compiler_makes_atomic_sums_of_it(rows):
    """Which it does of PyTorch's embedding."""
    plain, theirs = compiled_operators(F.embedding, rows)
    assert any("index_put" in name for name in plain)
    found, ours = compiled_operators(embedding, rows)
    assert "mdlm.embedding_gradient.default" in found
    assert not any("index_put" in name or "scatter" in name for name in found)
    assert torch.equal(ours, theirs)


def test_on_a_cpu_it_is_that_of_pytorch():
    """There it is exact, and costs nothing more."""
    layer = Embedding(5, 3)
    y = layer(torch.tensor([1, 2, 1]))
    assert y.grad_fn.name() == "EmbeddingBackward0"
    assert isinstance(layer, torch.nn.Embedding) and list(layer.state_dict()) == ["weight"]
