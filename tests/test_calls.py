"""Network calls for short texts: what is alike is computed once, with the same results."""

import functools

import pytest
import torch
from conftest import hashed_world

import mdlm
import sample
from nanomdlm.kernels import operations as kernels
from nanomdlm.support.infill import model_calls, shared_padding

V = 6
T = 7
random_world = functools.partial(hashed_world, T, V)


@pytest.mark.parametrize("limit", [1 << 24, 3 * V])
def test_draws_are_those_without_a_memory(limit, monkeypatch):
    """Texts that draws come to again cost nothing; the draws are the same, whatever it holds."""
    monkeypatch.setattr(model_calls, "MOST_LOGITS", limit)
    hidden = []
    model = random_world(1, hidden)
    x = torch.full((64, T), V)
    x[:, :4] = torch.tensor([0, 1, 2, 3])
    x[:, 6] = 4
    for settings in (
        dict(),
        dict(order="confidence"),
        dict(cfg=1.0),
        dict(redraw="sweep", spacing=1),
    ):
        hidden.clear()
        *_, plain = sample.unmask(model, x, seed=5, **settings)
        without = sum(hidden)
        hidden.clear()
        assert torch.equal(sample.generate(model, x, seed=5, **settings), plain.x)
        if limit > 3 * V:
            states = 1 + 2 * V
            assert sum(hidden) <= states * (2 if settings.get("cfg") else 1) < without


@pytest.mark.parametrize(
    "settings",
    [
        dict(n_layer=4, attention_every=4),
        dict(n_layer=3, attention_every=3, conv=4),
        dict(n_layer=2, attention_every=2, time_conditioning=True),
        dict(n_layer=2, attention_every=2, objective="ar"),
        dict(n_layer=2, attention_every=2, documents=True),
        dict(n_layer=2, attention_every=1),
        dict(n_layer=2, attention_every=2, block_size=4),
    ],
    ids=str,
)
def test_padding_computed_once_changes_no_logits(settings):
    settings = dict(n_head=2, n_embd=32, block_size=32) | settings
    end_id = 4 if settings.pop("documents", False) else None
    model = mdlm.make_model(mdlm.Config(**settings), 5, kernels.select("torch"), end_id).eval()
    for p in model.parameters():
        p.data += torch.randn_like(p, requires_grad=False) / 3
    L = settings["block_size"]
    blocks = model.layers
    computed = []
    model.layers[0].up.register_forward_pre_hook(lambda _, args: computed.append(args[0].numel()))
    with torch.no_grad():
        for n in (0, 3, L // 2, L):
            x = torch.full((3, L), model.objective.pad_id)
            x[:, :n] = torch.randint(4, (3, n))
            x[:, n // 2 : n // 2 + 1] = model.mask_id
            rows = torch.tensor([0, n // 2, L + n // 2, 3 * L - 1])
            view = model.objective.view(x, rows=rows)
            found = shared_padding.compute_once(model)(view)
            assert torch.allclose(found, model(view), atol=1e-5)
            is_conditioned = model.config.time_conditioning
            if n == 3 and model.layers[0].qkv is None and L > 4 and not is_conditioned:
                assert computed[-2] < computed[-1] / 2
    assert model.layers is blocks and not any(type(b) is shared_padding.OncePadded for b in blocks)
    assert shared_padding.compute_once(model) is model, "not where gradients are wanted"
