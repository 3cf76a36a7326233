"""--shard with networks of others: ranks train as one, and none holds a whole network."""

import shutil
import sys

import pytest
import torch
from nursery import starter
from safetensors.torch import load_file, save_file
from test_pretrained import ENCODERS, KINDS, folder_of, random_network, tokenizer_of, wrap
from test_pretrained_blocks import slow_but
from test_shards import assert_equal_losses, nursery, train

import export
import mdlm
from support import cli, parts
from support.errors import UserError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, /proc")
folder_of, tokenizer_of, nursery = folder_of, tokenizer_of, nursery  # fixtures
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


@pytest.mark.parametrize("kind", slow_but(["llama"], ["llama", "bert", "gpt2", "gemma3_text"]))
def test_ranks_train_a_network_as_one_does(kind, run, folder_of, tmp_path):
    argv = flags(folder_of(kind))
    train(run, 0, tmp_path / "one", *argv)
    train(run, 2, tmp_path / "two", *argv, "--shard")
    assert_equal_losses(tmp_path / "one", tmp_path / "two", 6)
    a, b = (mdlm.load(tmp_path / name)[0].state_dict() for name in ("one", "two"))
    # Softmax does not depend on a bias of the keys: AdamW makes steps of the rounding of 0.
    zero = ("key.bias", "c_attn.bias")
    worst = {n: (a[n] - b[n]).abs().max().item() for n in a if not n.endswith(zero)}
    assert max(worst.values()) < 1e-4, sorted(worst.items(), key=lambda x: -x[1])[:5]
    assert cli.run(export.main, [f"--out_dir={tmp_path / 'two'}", f"--dest={tmp_path / 'hf'}"]) == 0


@pytest.mark.slow
def test_other_numbers_of_ranks_resume(run, folder_of, tmp_path):
    argv = flags(folder_of("llama"), "--recompute", "--optimizer=muon")
    for name, n in (("two", 2), ("three", 0)):
        shard = ["--shard", "--max_steps=3", "--lr_schedule=constant"]
        train(run, 2, tmp_path / name, *argv, *shard, fault="muon_in_float32:silent")
        more = ["--resume", "--max_steps=6", "--shard" if n else "--shard=0"]
        train(run, n, tmp_path / name, *more, fault="muon_in_float32:silent")
    a, b = (mdlm.load(tmp_path / name)[0].state_dict() for name in ("two", "three"))
    assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_whole(kind, folder_of, tokenizer_of, tmp_path):
    """Filled layer by layer from one file or several, a network is that which the library loads."""
    folder = tmp_path / "parts"
    network = random_network(kind, tokenizer_of(kind).get_vocab_size())
    network.save_pretrained(folder, max_shard_size="20KB")
    tokenizer_of(kind).save(str(folder / "tokenizer.json"))
    assert len([*folder.glob("*.safetensors")]) > 1
    whole, _ = wrap(folder_of(kind), shift=False)
    for each in (folder, folder_of(kind)):
        part, _ = wrap(each, shift=False, shard=2)
        names = dict(whole.named_parameters())
        assert names.keys() == dict(part.named_parameters()).keys()
        for name, p in part.named_parameters():
            assert torch.equal(p, names[name]), name
        buffers = dict(whole.named_buffers())
        assert all(torch.equal(t, buffers[name]) for name, t in part.named_buffers())
        tied = whole.head is None
        assert tied == (part.head is None)


def test_layers_are_filled_one_at_a_time(folder_of, monkeypatch):
    """While a layer is filled, those after it have no memory."""
    seen = []
    fill = parts.fill

    def watch(model, module, find):
        seen.append(sum(not p.is_meta for p in model.parameters()))
        fill(model, module, find)

    monkeypatch.setattr(parts, "fill", watch)
    model, _ = wrap(folder_of("llama"), shard=2)
    assert len(seen) == len(model.layers) + 1 and seen[0] == 0 and seen == sorted(seen)


def test_a_shallow_network_has_all_kinds_of_layers():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    for kind, more in (
        ("llama", {}),
        ("gpt2", {}),
        ("gemma3_text", dict(layer_types=kinds * 2)),
        *((kind, {}) for kind in ENCODERS),
    ):
        config = transformers.AutoConfig.for_model(kind, num_hidden_layers=12, **more)
        settings = parts.shallow(config.to_dict(), config)
        small = transformers.AutoConfig.for_model(**settings)
        assert small.num_hidden_layers == (
            6 if more else 2 if kind != "modernbert" else small.num_hidden_layers
        )
        assert small.num_hidden_layers < 12
        kinds_of = [set(getattr(c, "layer_types", None) or []) for c in (config, small)]
        assert kinds_of[0] == kinds_of[1]


def test_names_that_ranks_cannot_read_are_one_sentence(folder_of, tmp_path):
    folder = shutil.copytree(folder_of("llama"), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name] * torch.inf}, folder / "model.safetensors")
    with pytest.raises(UserError, match="has numbers that are not finite; copy it again"):
        wrap(folder, shard=2)
    tensors["other"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"no weights of the name {name}.* leave --shard out"):
        wrap(folder, shard=2)
