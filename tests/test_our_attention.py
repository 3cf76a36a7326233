"""Networks of transformers with our attention compute what they compute with SDPA and dense masks.

On a CPU the kernels' reference runs; the kernels are in kernels_cases/grouped_attention_cases.py.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, losses, tiers

import mdlm
from nanomdlm.kernels import operations
from nanomdlm.kernels.reference import block_spans, document_spans
from nanomdlm.support.networks import attention
from nanomdlm.support.networks import network as network_file
from nanomdlm.support.view import View

transformers = pytest.importorskip("transformers")
OURS = SimpleNamespace(**vars(operations.REFERENCES))
OURS.grouped_attention = operations.grouped_attention
V, T = 12, 16
SIZES = dict(vocab_size=V, hidden_size=48, num_hidden_layers=2, intermediate_size=64)
SIZES |= dict(num_attention_heads=2, max_position_embeddings=64)
WIDE = dict(head_dim=128, num_key_value_heads=1)
SLIDING = dict(use_sliding_window=True, sliding_window=3)
KINDS = {
    "llama": WIDE,
    "qwen2": WIDE | SLIDING | dict(layer_types=["sliding_attention", "full_attention"]),
    "qwen3": WIDE,
    "mistral": WIDE | dict(sliding_window=3),
    "smollm3": dict(hidden_size=128, num_key_value_heads=1, no_rope_layers=[1, 0]),
    "gpt2": dict(hidden_size=64),
    "bert": dict(hidden_size=64),
    "modernbert": dict(hidden_size=64, local_attention=6, global_attn_every_n_layers=2),
}


def make(kind, ops, **settings):
    """A Pretrained of random weights with these operations, those of a run."""
    ids = dict.fromkeys(("pad", "bos", "eos", "cls", "sep"), 0)
    ids = {f"{name}_token_id": id for name, id in ids.items()}
    made = transformers.AutoConfig.for_model(kind, **SIZES | ids | KINDS.get(kind, {}) | settings)
    made.is_causal = False
    is_encoder = "bert" in kind
    network = network_file.Network(made, "masked" if is_encoder else "causal")
    own = {"[MASK]": 2} if is_encoder else {}
    network.fit(SimpleNamespace(vocab_size=V, special_ids=lambda: own))
    config = mdlm.Config(block_size=T, dropout=settings.get("dropout", 0.0), network="config.json")
    torch.manual_seed(1)
    model = mdlm.make_model(config, V, ops, pretrained=network)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    return model


def views():
    """name -> View of 2 texts: whole, several documents, blocks of 4, and from left to right."""
    ids = torch.randint(V - 1, (2, T), generator=torch.Generator().manual_seed(0))
    ids[ids == 2] = V - 1  # of encoders 2 is [MASK]
    at = torch.arange(T)
    ends = torch.stack((at % 7 == 6, at == 2))
    spans = document_spans(ends)
    rows = torch.arange(0, 2 * T, 3)
    return {
        "whole": View(ids, at, rows=rows),
        "documents": View(ids, at - spans[:, 0], spans, rows),
        "blocks": View(ids.repeat(1, 2), at.repeat(2), block_spans(T, 4, at.device), rows),
        "causal": View(ids, at, rows=rows, causal=True),
    }


def outcome(model, view):
    """The logits, the loss, and the gradients of all parameters."""
    targets = torch.arange(len(view.rows)) % 2
    model.zero_grad()
    loss = model(view, targets, torch.linspace(0.1, 1, len(targets)))
    loss.backward()
    return [model(view).detach(), loss.detach(), *(p.grad for p in model.parameters())]


@pytest.fixture
def calls(monkeypatch):
    """The spans with which our attention is called; it is called for whole texts as well."""
    seen = []

    def count(q, k, v, scale, spans):
        seen.append(spans)
        return operations.grouped_attention(q, k, v, scale, spans)

    monkeypatch.setattr(attention, "grouped_attention", count)
    monkeypatch.setattr(attention, "WHOLE_TEXTS", True)
    return seen


@pytest.mark.parametrize("kind", tiers(list(KINDS), ["llama", "qwen2"], list(KINDS)))
def test_logits_losses_and_gradients_are_those_of_sdpa_and_dense_masks(kind, calls):
    ours = make(kind, OURS)
    theirs = make(kind, operations.REFERENCES)
    assert ours.has_our_attention and not theirs.has_our_attention
    for name, view in views().items():
        if name == "causal" and not ours.network.is_decoder:
            continue
        calls.clear()
        results = zip(outcome(ours, view), outcome(theirs, view), strict=True)
        for a, b in results:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        # Two layers, with and without targets. No mask of T x T elements among what they are given.
        assert len(calls) == (0 if name == "causal" else 4), name
        n_lines = dict(whole=2, documents=2, blocks=8).get(name)
        assert all(x is None or x.shape[1] == n_lines for x in calls)
        assert any(x is not None for x in calls) or name in ("whole", "causal")


def test_whole_texts_use_sdpa_by_default():
    """It needs no mask for them, and cuDNN is fast. Not those of layers with a window."""
    model = make("llama", OURS)
    assert not attention.WHOLE_TEXTS and model.masks(views()["whole"]) is None
    masks = make("qwen2", OURS).masks(views()["whole"])
    assert masks["full_attention"] is None and masks["sliding_attention"].shape == (1, 1, 2, T)


@pytest.mark.parametrize(
    ("settings", "ops", "is_said"),
    [
        (dict(), operations.REFERENCES, False),  # --kernels=torch, or no GPU
        (dict(head_dim=16), OURS, True),
        (dict(dropout=0.1), OURS, True),
    ],
)
def test_it_is_not_used_where_the_kernels_are_not_made_for_it(settings, ops, is_said, capsys):
    operations.warn.cache_clear()
    assert not make("llama", ops, **settings).has_our_attention
    assert ("SDPA" in capsys.readouterr().err) == is_said


def test_a_network_that_computes_something_else_with_it_keeps_sdpa(monkeypatch, capsys):
    operations.warn.cache_clear()
    monkeypatch.setattr(attention, "grouped_attention", lambda q, *more: q)
    model = make("qwen2", OURS)
    assert not model.has_our_attention and model.body.config._attn_implementation == "sdpa"
    assert "SDPA" in capsys.readouterr().err
    mask = model.masks(views()["documents"])["full_attention"]
    assert mask.dtype == torch.bool and mask.shape == (2, 1, T, T)


def test_autocast_reaches_it(calls, monkeypatch):
    """Rotated queries and keys are float32 then, values are not: SDPA casts them as well."""
    model = make("llama", OURS)
    seen = []
    real = operations.grouped_attention
    monkeypatch.setattr(
        attention, "grouped_attention", lambda *args: seen.append(args[:3]) or real(*args)
    )
    with torch.autocast("cpu", torch.bfloat16):
        model(views()["documents"])
    assert len(seen) == 2 and {x.dtype for call in seen for x in call} == {torch.bfloat16}


def test_layers_with_it_compile_as_one_graph():
    """As a run compiles them: each layer whole."""
    model = make("qwen2", OURS)
    view = views()["blocks"]
    wanted = outcome(model, view)
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(model, view), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", tiers(list(KINDS), ["qwen2"], list(KINDS)))
def test_a_step_reads_no_value(kind, monkeypatch):
    """So it can be recorded as a CUDA graph. On the meta device, reading a value raises."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it has none
    model = make(kind, OURS)
    assert model.steps_are_alike
    model.to("meta")
    for name, view in views().items():
        if name == "causal":
            continue
        view = View(*(x.to("meta") if torch.is_tensor(x) else x for x in view))
        targets = torch.zeros(len(view.rows), dtype=torch.long, device="meta")
        loss = model(view, targets, torch.ones(len(targets), device="meta"))
        loss.backward()
        assert loss.is_meta and model.body.get_input_embeddings().weight.grad.is_meta


def test_steps_that_leave_out_layers_at_random_are_not_alike():
    model = make("llama", OURS)
    model.body.config.layerdrop = 0.1
    assert not model.steps_are_alike
    assert not make("llama", operations.REFERENCES).steps_are_alike


@pytest.mark.slow
def test_a_run_with_the_kernels_has_the_losses_of_one_without(text_file, tmp_path):
    """In the interpreter, in a process of its own: python mdlm.py --network in blocks."""
    pytest.importorskip("triton")
    settings = SIZES | dict(model_type="llama", num_key_value_heads=1, head_dim=32)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings | dict(architectures=["LlamaForCausalLM"])))
    args = [f"--network={path}", f"--data={text_file}", "--block_size=16", "--block_length=4"]
    args += ["--batch_size=2", "--max_steps=3", "--eval_windows=1", "--compile=off"]
    args += ["--dtype=float32", "--device=cpu", "--log_interval=1"]
    found = []
    for kernels, interpreted in (("torch", "0"), ("triton", "1")):
        out = tmp_path / kernels
        command = [sys.executable, "mdlm.py", *args, f"--kernels={kernels}", f"--out_dir={out}"]
        env = os.environ | dict(TRITON_INTERPRET=interpreted, OMP_NUM_THREADS="1")
        r = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
        assert r.returncode == 0, r.stderr[-3000:]
        found.append(losses(out))
    assert len(found[0]) == 3
    torch.testing.assert_close(*map(torch.tensor, found), rtol=1e-5, atol=1e-5)
