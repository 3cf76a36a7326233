"""--shard with networks of others: ranks train as one, and none holds a whole network."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, tiers
from nursery import nursery_of_a_file, starter
from safetensors.torch import load_file, save_file
from test_pretrained import (
    ENCODERS,
    KINDS,
    assert_exported,
    folder_of,
    random_network,
    tokenizer_of,
    wrap,
)
from test_shards import assert_equal_losses, train

import mdlm
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import checkpoint
from studies import scale

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, /proc")
folder_of, tokenizer_of = folder_of, tokenizer_of  # fixtures
nursery_of_a_file = nursery_of_a_file  # another one
SOME = ["--batch_size=8", "--max_steps=6", "--eval_interval=3", "--learning_rate=1e-3"]
SOME += ["--optimizer=adamw", "--block_size=16", "--eval_windows=4"]


@pytest.fixture
def run(nursery, pydoc, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(pydoc[:6000], encoding="utf-8")
    return starter(nursery, text, without=["--n_layer", "--n_head", "--n_embd", "--dropout"])


def flags(folder, *more):
    """Those of a run that begins with the network of a folder, on any number of ranks."""
    return [f"--init_from={folder}", *SOME, *more]


SHARDED = ["llama", "bert", "gpt2", "gemma3_text"]


def are_close(a, b):
    """Whether two runs end with the same weights."""
    a, b = (mdlm.load(out)[0].state_dict() for out in (a, b))
    # Softmax does not depend on a bias of the keys: AdamW makes steps of the rounding of 0.
    zero = ("key.bias", "c_attn.bias")
    return all(torch.allclose(a[n], b[n], atol=1e-4) for n in a if not n.endswith(zero))


@pytest.mark.parametrize("kind", tiers(SHARDED, slow=["bert"]))
def test_ranks_train_a_network_as_one_does(kind, run, folder_of, tmp_path):
    """With --recompute in the decoders; the export of a sharded run is the library's."""
    argv = flags(folder_of(kind))
    more = [] if kind in ENCODERS else ["--recompute"]
    train(run, 0, tmp_path / "one", *argv)
    train(run, 2, tmp_path / "whole", *argv)
    train(run, 2, tmp_path / "two", *argv, "--shard", *more)
    for other in ("whole", "two"):
        assert_equal_losses(tmp_path / "one", tmp_path / other, 6)
        assert are_close(tmp_path / "one", tmp_path / other)
    assert_exported(kind, tmp_path / "two", tmp_path / "hf")


@pytest.mark.parametrize("kind", tiers(SHARDED, slow=["llama"]))
def test_ranks_train_adapters_as_one_does(kind, run, folder_of, tmp_path):
    """--lora: the other weights are spread too, and checkpoints hold adapters alone."""
    pytest.importorskip("peft")
    argv = flags(folder_of(kind), "--lora=3", "--learning_rate=0.01")
    train(run, 0, tmp_path / "one", *argv, fault=f"measure:{tmp_path / 'one'}")
    train(run, 2, tmp_path / "two", *argv, "--shard", fault=f"measure:{tmp_path / 'two'}")
    assert_equal_losses(tmp_path / "one", tmp_path / "two", 6)
    assert are_close(tmp_path / "one", tmp_path / "two")
    newest = checkpoint.find_checkpoint(tmp_path / "two")
    names = load_file(newest / "model.safetensors").keys()
    assert all("lora_" in name or name == "mask_vector" for name in names)
    # Both networks of a run share what is frozen in the layers; of a rank it is half.
    model, *_ = mdlm.load(tmp_path / "two")
    layers = f"body.{model.layers_name}."
    named = torch.nn.Module.named_parameters(model)
    frozen = {name: p.nbytes for name, p in named if name in model.frozen}
    ends = sum(n for name, n in frozen.items() if not name.startswith(layers))
    held = [json.loads((tmp_path / f"two.{rank}").read_text())["frozen"] for rank in range(2)]
    assert held == pytest.approx([(sum(frozen.values()) + ends) / 2] * 2, rel=0.05)
    assert_exported(kind, tmp_path / "two", tmp_path / "hf")


def go_back(out, copy):
    """A copy of a run of six steps as it was after three."""
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "step-6")
    (copy / "latest").write_text("step-3")


OTHER_RANKS = ["--optimizer=muon", "--lora=2"]


@pytest.mark.parametrize("flag", tiers(OTHER_RANKS, slow=OTHER_RANKS[:1]))
def test_other_numbers_of_ranks_resume(flag, run, folder_of, tmp_path):
    """What two ranks saved goes on on one, and what one saved on two, with and without --shard."""
    silent = dict(fault="muon_in_float32:silent")
    argv = flags(folder_of("llama"), flag, *["--recompute"] * ("muon" in flag))
    train(run, 0, tmp_path / "one", *argv, **silent)
    train(run, 2, tmp_path / "two", *argv, "--shard", **silent)
    for out, n, shard in (("two", 0, "--shard=0"), ("two", 1, "--shard"), ("one", 2, "--shard")):
        copy = tmp_path / f"{out} on {n}"
        go_back(tmp_path / out, copy)
        train(run, n, copy, "--resume", shard, **silent)
        assert_equal_losses(tmp_path / "one", copy, 6)
        assert are_close(tmp_path / "one", copy)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_bytes_of_a_rank_fall_with_the_ranks():
    """Of a Llama of 49 M parameters; no rank of several ever has the memory of a whole one."""
    command = [sys.executable, str(ROOT / "studies" / "held.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    for found in map(json.loads, done.stdout.splitlines()):
        n = found["ranks"]
        P = found["parameters"]
        for kind, numbers in dict(weights=P, gradients=P, average=P, moments=2 * P).items():
            assert found[kind] == pytest.approx(4 * numbers / n, rel=0.01), (n, kind)
        # Parts of two networks, and for a moment the whole embedding and head of one of them.
        ends = 4 * 2 * 8192 * 512
        assert 6 * P / n < found["loading"] < 8 * P / n + 2 * ends + 20e6, n
    assert n == 4 and found["loading"] < 4 * P, "a whole network"


# ---- The formula of docs/scale.md
def test_the_formula_counts_the_parameters_of_the_library(folder_of):
    """Of the three networks of the table, and of tiny ones."""
    known = {"Qwen3-0.6B": 596_049_920, "Llama-3.1-8B": 8_030_261_248}
    known |= {"Llama-3.1-70B": 70_553_706_496}
    assert {model.name: model.parameters for model in scale.DECODERS} == known
    for kind, made in TINY.items():
        body = decoder(kind, "meta")
        assert made.parameters == sum(p.numel() for p in body.parameters())
        matrices = [p.numel() for p in body.model.layers.parameters() if p.dim() == 2]
        assert made.layers * made.matrices == sum(matrices)


TINY = {
    "llama": scale.Decoder("", 3, 48, 100, heads=4, kv_heads=2, inner=80, head_dim=16),
    "qwen3": scale.Decoder("", 3, 48, 100, 4, 2, 80, 16, is_tied=True, qk_norms=2),
}


def decoder(kind, device):
    """The network of the library that an entry of TINY describes."""
    made = TINY[kind]
    settings = dict(hidden_size=made.width, num_hidden_layers=made.layers, vocab_size=100)
    settings |= dict(num_attention_heads=made.heads, num_key_value_heads=made.kv_heads)
    settings |= dict(intermediate_size=made.inner, head_dim=made.head_dim, is_causal=False)
    config = transformers.AutoConfig.for_model(kind, **settings, tie_word_embeddings=made.is_tied)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("n", [1, 2])
def test_the_formula_counts_what_a_layer_keeps(kind, n):
    """n = 2: weights that are gathered in bfloat16; 1: in float32, which autocast casts."""
    body = decoder(kind, "cpu")
    stream = torch.bfloat16 if n > 1 else torch.float32
    body = body.to(stream)
    B, T = 2, 9
    x = torch.randn(B, T, 48, dtype=stream, requires_grad=True)
    at = torch.arange(T)[None]
    kept = {}

    def pack(t):
        is_of_tokens = t.shape[:2] in ((B, T), (B, 2), (B, 4)) or len(t) == B * T
        if is_of_tokens:  # not tables, nor weights
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autocast("cpu", torch.bfloat16):
        tables = body.model.rotary_emb(x, at)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            body.model.layers[1](x, position_embeddings=tables, position_ids=at)
    n_bytes = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert n_bytes == B * T * TINY[kind].kept(n)


@pytest.mark.parametrize("kind", tiers(KINDS, ["bert", "gpt2", "gemma3_text"], ["llama"]))
def test_parts_are_the_whole(kind, folder_of, tokenizer_of, tmp_path):
    """Filled layer by layer from one file or several, a network is that which the library loads.
    Its embedding may have more rows than the tokenizer has tokens (Qwen): [MASK] takes one."""
    folder = tmp_path / "parts"
    network = random_network(kind, tokenizer_of(kind).get_vocab_size() + 5)
    network.save_pretrained(folder, max_shard_size="20KB")
    tokenizer_of(kind).save(str(folder / "tokenizer.json"))
    assert len([*folder.glob("*.safetensors")]) > 1
    for each in (folder, folder_of(kind)):
        whole, _ = wrap(each, shift=False)
        part, _ = wrap(each, shift=False, shard=2)
        names = dict(whole.named_parameters())
        assert names.keys() == dict(part.named_parameters()).keys()
        for name, p in part.named_parameters():
            assert torch.equal(p, names[name]), name
        buffers = dict(whole.named_buffers())
        assert all(torch.equal(t, buffers[name]) for name, t in part.named_buffers())
        tied = whole.head is None
        assert tied == (part.head is None)


def test_a_name_that_ranks_cannot_read_is_refused(folder_of, tmp_path):
    folder = shutil.copytree(folder_of("llama"), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["other"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="--shard"):
        wrap(folder, shard=2)
