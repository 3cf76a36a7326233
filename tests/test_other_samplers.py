"""Exports of adapted networks, read as the samplers of other projects read a model.

The two conventions: LLaDA, dllm and diffusers read the logits of token i at position i; Dream, and
dllm with right_shift_logits, at position i - 1, and those of the first token at its own position.
The samplers here are short ones of these conventions. Those of the projects themselves were run by
hand (results/pretrained.md).
"""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import run_mdlm, tiers, tiny_flags
from test_pretrained import ONE_KEY, SIZES, folder_of, random_ids, tokenizer_of, view_of, wrap

import export
import mdlm
from nanomdlm.support.cli import entry
from nanomdlm.support.networks.model import Pretrained

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
folder_of, tokenizer_of = folder_of, tokenizer_of  # fixtures
CYCLE = "abcd"  # the texts repeat it, so one token tells all others
T = 12
NETWORKS = {
    "encoder": dict(model_type="modernbert", architectures=["ModernBertForMaskedLM"]),
    "encoder without a head": dict(model_type="modernbert", architectures=["ModernBertModel"]),
    "decoder, --shift": dict(model_type="llama", architectures=["LlamaForCausalLM"]) | ONE_KEY,
    "decoder": dict(model_type="llama", architectures=["LlamaForCausalLM"]) | ONE_KEY,
}
SHIFTED = "decoder, --shift"


# ---- Samplers
def at_own_place(logits):
    return logits


def one_to_the_right(logits):
    return torch.cat((logits[:, :1], logits[:, :-1]), 1)


@torch.no_grad()
def fill(model, x, mask_id, convention, block):
    """Fill the masks of x (B, T) from the left, block by block, the surest token first."""
    x = x.clone()
    for begin in range(0, x.shape[1], block):
        for _ in range(block):
            hidden = x == mask_id
            hidden[:, begin + block :] = False
            output = model(x, attention_mask=torch.ones_like(x))
            p, token = convention(output.logits).softmax(-1).max(-1)
            rows = hidden.any(1).nonzero()[:, 0]
            at = p.masked_fill(~hidden, -1).argmax(1)[rows]
            x[rows, at] = token[rows, at]
    return x


# ---- Trained exports
@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A function: the name of a NETWORKS -> (a trained run, its export)."""
    at = tmp_path_factory.mktemp("trained")
    (at / "text.txt").write_text(" ".join(CYCLE * 500))
    special = ["[PAD]", "[UNK]", "[SEP]", "[MASK]"]

    def made(name):
        folder = at / name.replace(" ", "-")
        if folder.exists():
            return folder / "run", folder / "hf"
        folder.mkdir()
        own = special if name.startswith("encoder") else ["[UNK]"]
        vocab = {token: i for i, token in enumerate([*own, *CYCLE])}
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        words.add_special_tokens(own)
        words.save(str(folder / "tokenizer.json"))
        sizes = SIZES | dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id"), 0)
        sizes |= dict(vocab_size=len(vocab), initializer_range=0.2)
        (folder / "config.json").write_text(json.dumps(sizes | NETWORKS[name]))
        flags = [f"--network={folder}/config.json", f"--tokenizer={folder}/tokenizer.json"]
        flags += [f"--data={at}/text.txt", f"--out_dir={folder}/run", f"--block_size={T}"]
        flags += ["--max_steps=300", "--optimizer=adamw", "--learning_rate=0.01"]
        flags += ["--batch_size=16", "--eval_windows=4", "--ema=0", "--log_interval=50"]
        flags += ["--shift"] * (name == SHIFTED)
        ours = ("--n_layer", "--n_head", "--n_embd", "--dropout")
        flags = [flag for flag in tiny_flags(*flags) if not flag.startswith(ours)]
        assert run_mdlm(*flags) == 0
        assert entry.run(export.main, [f"--out_dir={folder}/run", f"--dest={folder}/hf"]) == 0
        return folder / "run", folder / "hf"

    return made


def library_model(folder, with_hook):
    """The export of a folder as the library loads it, or as the code of its card does."""
    names = dict(__name__="card")
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    if with_hook:
        exec(code.replace('"hf"', repr(str(folder))), names)
        return names["model"]
    (name,) = transformers.AutoConfig.from_pretrained(folder).architectures
    return getattr(transformers, name).from_pretrained(folder).eval()


def masked_texts(tokenizer, mask_id):
    """(x0, xt) (4, T): the cycle from each of its tokens; the first and another one are given."""
    x0 = torch.tensor([tokenizer.encode(" ".join(CYCLE * 4)[2 * i :])[:T] for i in range(4)])
    xt = torch.full_like(x0, mask_id)
    for i, given in enumerate((5, 1, 9, 7)):
        xt[i, [0, given]] = x0[i, [0, given]]
    return x0, xt


@pytest.mark.parametrize("name", tiers(list(NETWORKS), [SHIFTED]))
def test_each_convention_reads_our_logits_and_fills_a_text(name, exports):
    """With the hook of the card at a token's own place; as loaded, by the convention of the run."""
    run, folder = exports(name)
    ours, tokenizer, _ = mdlm.load(run)
    x0, xt = masked_texts(tokenizer, ours.mask_id)
    wanted = ours.eval()(view_of(xt)).detach().clamp(min=Pretrained.NEVER_DRAWN)

    def own(x, attention_mask=None):
        return SimpleNamespace(logits=ours(view_of(x)))

    hooked = library_model(folder, with_hook=True)
    ways = [(hooked, at_own_place)]
    if name != "encoder without a head":
        convention = one_to_the_right if name == SHIFTED else at_own_place
        ways.append((library_model(folder, with_hook=False), convention))
    tokens = [i for i in range(ours.vocab_size) if i != ours.mask_id]
    for model, convention in ways:
        found = convention(model(xt).logits.detach())
        assert torch.allclose(found[..., tokens], wanted[..., tokens], atol=1e-5, rtol=1e-5)
        for block in (T, 4):
            filled = fill(model, xt, ours.mask_id, convention, block)
            assert torch.equal(filled, fill(own, xt, ours.mask_id, at_own_place, block))
            assert (filled == x0).float().mean() > 0.75  # by chance a quarter is
    other = at_own_place if name == SHIFTED else one_to_the_right
    model, _ = ways[-1]
    misread = fill(model, xt, ours.mask_id, other, T)
    assert (misread == x0).float().mean() < 0.75, "the convention matters"
    assert hooked.config.mask_token_id == ours.mask_id
    words = transformers.AutoTokenizer.from_pretrained(folder)
    assert words.mask_token_id == ours.mask_id
    if name.startswith("decoder"):
        assert hooked.config.is_causal is False


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_an_exported_encoder_never_draws_its_mask(kind, folder_of):
    """Nor where it likes it best; what it says of all other tokens stays, and is finite."""
    model, _ = wrap(folder_of(kind))
    model.bias[model.mask_id] = 1e3
    ids = random_ids(model, 2, 9)
    ids[:, ::2] = model.mask_id
    logits = model.to_library()(input_ids=ids).logits
    assert logits.isfinite().all()
    assert (logits.softmax(-1)[..., model.mask_id] == 0).all()
    known = torch.arange(model.vocab_size) != model.mask_id
    assert torch.allclose(logits[..., known], model(view_of(ids))[..., known], atol=1e-5)
    assert model.bias[model.mask_id] == 1e3, "the run keeps its own"


@torch.no_grad()
@pytest.mark.parametrize("kind, pads_move", [("bert", True), ("roberta", False), ("llama", False)])
def test_padding_on_the_left_moves_learned_positions(kind, pads_move, folder_of):
    """As docs/pretrained.md warns of LLaDA's padding, and for RoBERTa of positions from 0."""
    model, _ = wrap(folder_of(kind), shift=False)
    theirs = model.to_library()
    ids = random_ids(model, 1, 9)
    alone = theirs(input_ids=ids).logits
    padded = torch.cat((torch.full((1, 3), theirs.config.pad_token_id), ids), 1)
    is_text = (torch.arange(12) >= 3).long()[None]
    found = theirs(input_ids=padded, attention_mask=is_text).logits[:, 3:]
    assert torch.allclose(found, alone, atol=1e-4) != pads_move
    placed = theirs(input_ids=ids, position_ids=torch.arange(9)[None]).logits
    assert torch.allclose(placed, alone, atol=1e-4) != (kind == "roberta")
    right = torch.cat((ids, torch.full((1, 3), theirs.config.pad_token_id)), 1)
    found = theirs(input_ids=right, attention_mask=is_text.flip(1)).logits[:, :9]
    assert torch.allclose(found, alone, atol=1e-4), "padding on the right is not seen"


@pytest.mark.skipif(not importlib.util.find_spec("diffusers"), reason="no diffusers")
@pytest.mark.parametrize("name", tiers(list(NETWORKS), slow=[SHIFTED]))
def test_llada2_pipeline_fills_a_text(name, exports):
    from diffusers import BlockRefinementScheduler, LLaDA2Pipeline

    run, folder = exports(name)
    ours, tokenizer, _ = mdlm.load(run)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = library_model(folder, with_hook=name in (SHIFTED, "encoder without a head"))
    pipe = LLaDA2Pipeline(model=model, scheduler=BlockRefinementScheduler(), tokenizer=words)
    pipe.set_progress_bar_config(disable=True)
    x0, _ = masked_texts(tokenizer, ours.mask_id)
    settings = dict(gen_length=T - 4, block_length=T, num_inference_steps=T, output_type="seq")
    # No edits: they are of tokens that the network sees, whose logits are not trained.
    found = pipe(input_ids=x0[:, :4], editing_threshold=None, **settings).sequences
    right = (found == x0[:, 4:]).float().mean()
    assert right > 0.75, right  # read at the wrong place a quarter is
