"""Networks of transformers are what they were there, and see, learn and write as a View says."""

import itertools
import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
import tokenizer_kinds
import torch
import torch.nn.functional as F
from conftest import (
    StopAt,
    chain_rule,
    draw,
    exhaustive_nelbo,
    losses,
    run_mdlm,
    saved,
    sign,
    tiers,
    tiny_flags,
)
from safetensors.torch import load_file, save_file

import eval
import export
import mdlm
import sample
from nanomdlm.kernels.operations import REFERENCES
from nanomdlm.kernels.reference import document_spans
from nanomdlm.support import abilities
from nanomdlm.support.cli import entry, networks, signals
from nanomdlm.support.data.tokenizer import open_tokenizer
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import likelihood
from nanomdlm.support.networks import network as network_file
from nanomdlm.support.networks.attention_masks import influence
from nanomdlm.support.networks.model import Pretrained
from nanomdlm.support.run import checkpoint
from nanomdlm.support.view import View
from studies import adapt, first_token

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
ENCODERS = ("bert", "roberta", "modernbert")
# Tiny networks; the windows of those that slide are shorter than the texts of the tests.
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
SIZES |= dict(max_position_embeddings=66)
ONE_KEY = dict(num_key_value_heads=1)
FAMILIES = {
    "bert": {},
    "roberta": dict(pad_token_id=1),
    "modernbert": dict(local_attention=8, global_attn_every_n_layers=2),
    "gpt2": {},
    "llama": ONE_KEY,
    "qwen2": ONE_KEY,
    "qwen3": dict(num_key_value_heads=1, head_dim=16),
    "mistral": dict(num_key_value_heads=1, sliding_window=4),
    "smollm3": dict(num_key_value_heads=1, no_rope_layers=[1, 0]),
    "gemma3_text": dict(num_key_value_heads=1, head_dim=16, sliding_window=4)
    | dict(layer_types=["sliding_attention", "full_attention"]),
}
KINDS = list(FAMILIES)
SLIDING = ("modernbert", "mistral", "gemma3_text")
FAST = ("bert", "llama")  # an encoder and a decoder


def auto(kind):
    is_encoder = kind in ENCODERS
    return transformers.AutoModelForMaskedLM if is_encoder else transformers.AutoModelForCausalLM


def make_tokenizer(text, is_encoder):
    """A WordPiece with [MASK], or a byte-level BPE with <|endoftext|>."""
    library = tokenizers
    if is_encoder:
        made = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
        made.normalizer = library.normalizers.BertNormalizer()
        made.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        made.decoder = library.decoders.WordPiece()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = library.trainers.WordPieceTrainer
    else:
        made = library.Tokenizer(library.models.BPE())
        made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = library.decoders.ByteLevel()
        special = ["<|endoftext|>"]
        trainer = library.trainers.BpeTrainer
    learned = trainer(vocab_size=300, special_tokens=special, show_progress=False)
    made.train_from_iterator([text], learned)
    return made


def random_network(kind, V, **more):
    """A network of the library whose weights are large enough to tell it from others."""
    ids = dict.fromkeys(("pad", "bos", "eos", "cls", "sep"), 0)
    ids = {f"{name}_token_id": id for name, id in ids.items()}
    settings = SIZES | ids | FAMILIES.get(kind, {}) | dict(vocab_size=V) | more
    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    network = auto(kind).from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    with torch.no_grad():
        for p in network.parameters():
            if p.dim() == 2:
                p.normal_(0, 0.2)
    return network.eval()


@pytest.fixture(scope="session")
def tokenizer_of(pydoc):
    made = {is_encoder: make_tokenizer(pydoc[:20_000], is_encoder) for is_encoder in (True, False)}
    return lambda kind: made[kind in ENCODERS]


@pytest.fixture(scope="session")
def folder_of(tokenizer_of, tmp_path_factory):
    """A function: kind -> a folder of Hugging Face with such a network; not to be changed."""
    at = tmp_path_factory.mktemp("networks")

    def folder(kind):
        if not (at / kind).exists():
            tokenizer = tokenizer_of(kind)
            random_network(kind, tokenizer.get_vocab_size()).save_pretrained(at / kind)
            tokenizer.save(str(at / kind / "tokenizer.json"))
        return at / kind

    return folder


def wrap(folder, **given):
    """(model, tokenizer) of a folder, as a run begins with it."""
    given = dict(init_from=str(folder), block_size=16) | given
    config = mdlm.run_config.new(mdlm.Config, given)
    network = networks.open_network(config)
    tokenizer = open_tokenizer(folder / "tokenizer.json", False)
    network.fit(tokenizer)
    end_id = given.get("end_id")
    model = mdlm.make_model(config, tokenizer.vocab_size, REFERENCES, end_id, pretrained=network)
    return model.eval(), tokenizer


def native(kind, folder, is_causal=False):
    config = transformers.AutoConfig.from_pretrained(folder)
    if kind not in ENCODERS:
        config.is_causal = is_causal
    return auto(kind).from_pretrained(folder, config=config, dtype=torch.float32).eval()


def random_ids(model, *shape, seed=0):
    """Ids of text, without [MASK]."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.vocab_size - 1, shape, generator=g)
    return torch.where(ids >= model.mask_id, ids + 1, ids)


def view_of(ids):
    return View(ids, torch.arange(ids.shape[1]))


# ---- A network is what it was
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_the_library(kind, folder_of):
    """To the last bit, above the window of layers that have one; logits within 1e-5."""
    model, _ = wrap(folder_of(kind), shift=False)
    theirs = native(kind, folder_of(kind))
    ids = random_ids(model, 3, 14)
    seen = []
    model.body.base_model.register_forward_hook(lambda *call: seen.append(call[-1][0]))
    logits = model(view_of(ids))
    assert torch.equal(seen[0], theirs.base_model(input_ids=ids)[0])
    wanted = theirs(input_ids=ids).logits[..., : model.vocab_size]
    known = torch.arange(model.vocab_size) != model.mask_id
    assert torch.allclose(logits[..., known], wanted[..., known], atol=1e-5, rtol=1e-5)
    assert (logits[..., ~known] == -math.inf).all()
    if kind in SLIDING:
        model.masks = lambda view: torch.ones(1, 1, 14, 14, dtype=torch.bool)
        assert not torch.allclose(model(view_of(ids)), logits, atol=1e-2), "the window is tested"


HALF = dict(layer_types=["sliding_attention", "full_attention"])
WINDOWED = {
    "phi3": {},
    "starcoder2": {},
    "olmo3": HALF,
    "qwen2": dict(use_sliding_window=True, max_window_layers=0),
    "smollm3": dict(use_sliding_window=True, no_rope_layers=[1, 0]) | HALF,
    "mixtral": dict(num_local_experts=2),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_of_more_families_are_those_of_the_library(kind, tokenizer_of, tmp_path):
    tokenizer = tokenizer_of(kind)
    own = ONE_KEY | dict(sliding_window=4) | WINDOWED[kind]
    random_network(kind, tokenizer.get_vocab_size(), **own).save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model, _ = wrap(tmp_path, shift=False)
    ids = random_ids(model, 3, 14)
    for is_causal in (False, True):
        logits = model(view_of(ids)._replace(causal=is_causal))
        wanted = native(kind, tmp_path, is_causal)(input_ids=ids).logits[..., : model.vocab_size]
        assert torch.allclose(logits, wanted, atol=1e-5, rtol=1e-5)
    model.masks = lambda view: torch.ones(1, 1, 14, 14, dtype=torch.bool)
    assert not torch.allclose(model(view_of(ids)), logits, atol=1e-2), "the window is tested"


@pytest.mark.parametrize(
    "kind, dropped",
    [*((kind, "all") for kind in SLIDING), ("modernbert", "one"), ("gemma3_text", "one")],
)
def test_a_dropped_window_is_refused(kind, dropped, folder_of, tmp_path, monkeypatch):
    """Also a long one, by a library that takes a mask, but not that of each kind of layers."""
    folder = shutil.copytree(folder_of(kind), tmp_path / "folder")
    name = "local_attention" if kind == "modernbert" else "sliding_window"
    set_in("config.json", **{name: 4096})(folder)
    assert dropped == "all" or len(wrap(folder)[0].windows) == 2
    encode = Pretrained.encode

    def drop(model, embedded, view):
        windows = model.windows
        last = [*windows][-1]
        model.windows = dict.fromkeys(windows, windows[last] if dropped == "one" else None)
        try:
            return encode(model, embedded, view)
        finally:
            model.windows = windows

    monkeypatch.setattr(Pretrained, "encode", drop)
    with pytest.raises(UserError, match="window"):
        wrap(folder)


@pytest.mark.parametrize("kind", FAST)
def test_ignored_positions_are_refused(kind, folder_of, monkeypatch):
    """Rotary ones too, which are relative: in rows of blocks a position is there twice."""

    def ignore(model, embedded, view):
        return model.call_body(embedded, attention_mask=model.masks(view))

    monkeypatch.setattr(Pretrained, "encode", ignore)
    with pytest.raises(UserError, match="position"):
        wrap(folder_of(kind))


@torch.no_grad()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ENCODERS])
def test_causal_view_is_the_decoder_as_it_was(kind, folder_of):
    model, _ = wrap(folder_of(kind))
    theirs = native(kind, folder_of(kind), is_causal=True)
    ids = random_ids(model, 3, 14)
    logits = model(view_of(ids)._replace(causal=True))
    wanted = theirs(input_ids=ids).logits[..., : model.vocab_size]
    assert torch.allclose(logits, wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_sees_no_other_one(kind, folder_of):
    """Documents side by side are predicted as each alone: masks, windows, positions, --shift."""
    model, _ = wrap(folder_of(kind), shift=kind not in ENCODERS)
    ids = random_ids(model, 2, 16)
    lengths = (6, 1, 9)
    ends = torch.zeros(2, 16, dtype=torch.bool)
    starts = [*itertools.accumulate(lengths, initial=0)]
    ends[:, [start - 1 for start in starts[1:]]] = True
    at = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    packed = model(View(ids, at, sees=document_spans(ends)))
    alone = torch.cat([model(view_of(ids[:, i:j])) for i, j in itertools.pairwise(starts)], 1)
    assert torch.allclose(packed, alone, atol=1e-5, rtol=1e-5)
    document = at[:1].eq(0).cumsum(1)
    seen_by = influence(model, View(ids[:1], at[:1], sees=document_spans(ends[:1])))
    assert not seen_by[document != document.T].any() and seen_by.diagonal().all()


@pytest.mark.parametrize("kind", FAST)
def test_loss_and_gradients_are_those_of_the_logits(kind, folder_of):
    model, _ = wrap(folder_of(kind))
    ids = random_ids(model, 2, 9)
    rows = torch.tensor([0, 3, 8, 9, 17])
    view = view_of(ids)._replace(rows=rows)
    targets = random_ids(model, 5, seed=1)
    weights = torch.linspace(0.1, 1, 5)
    model(view, targets, weights).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    ce = torch.nn.functional.cross_entropy(model(view), targets, reduction="none")
    (ce * weights).sum().backward()
    for name, p in model.named_parameters():
        assert torch.allclose(found[name], p.grad, atol=1e-6, rtol=1e-4), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_and_every_token_learns(kind, folder_of):
    """DDP needs the first; the library gives no gradient to the token that it takes for padding."""
    model, _ = wrap(folder_of(kind))
    ids = random_ids(model, 2, 8)
    ids[:, 2] = model.body.config.pad_token_id
    rows = torch.arange(16)
    model(view_of(ids)._replace(rows=rows), random_ids(model, 16), torch.ones(16)).backward()
    assert all(p.grad is not None for p in model.parameters())
    h = model.features(view_of(ids))
    embedding = model.body.get_input_embeddings().weight
    (grad,) = torch.autograd.grad((h * torch.linspace(-1, 1.3, h.shape[-1])).sum(), embedding)
    assert (grad[ids.unique()].norm(dim=1) > 0).all()


@torch.no_grad()
@pytest.mark.parametrize("more", [0, 20])
def test_mask_of_a_decoder_is_the_mean_of_its_tokens(more, tokenizer_of, tmp_path):
    """Rows for no token are never predicted; the first one becomes [MASK]."""
    tokenizer = tokenizer_of("llama")
    V = tokenizer.get_vocab_size()
    random_network("llama", V + more).save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model, words = wrap(tmp_path)
    embedding = model.body.get_input_embeddings().weight
    assert model.mask_id == words.mask_id == V and len(embedding) == V + max(more, 1)
    for weight in (embedding, *[model.head] * (not more)):
        assert torch.allclose(weight[V], weight[:V].mean(0), atol=1e-6)
    assert model(view_of(random_ids(model, 1, 5))).shape[-1] == V


# ---- What a network must not do
@pytest.mark.parametrize("kind, causal", [("bert", True), ("llama", False)])
def test_network_that_ignores_masks_is_refused(kind, causal, folder_of, runs, monkeypatch):
    """Where a run begins, and where a checkpoint is read: the library may be another one then.

    causal: whether causal masks are obeyed, and no other ones; or the other way round
    """
    run = runs(kind)
    masks = Pretrained.masks

    def some(model, view):
        if causal:
            return masks(model, view) if view.causal else None
        return masks(model, view._replace(causal=False))

    monkeypatch.setattr(Pretrained, "masks", some)
    for read in (wrap, mdlm.load):
        with pytest.raises(UserError, match="obey"):
            read(folder_of(kind) if read is wrap else run)


def test_network_that_counts_positions_otherwise_is_refused(folder_of, monkeypatch):
    monkeypatch.setattr(network_file.Network, "first_position", 0)
    with pytest.raises(UserError, match="roberta"):
        wrap(folder_of("roberta"))


def test_network_that_changes_its_logits_is_refused(tokenizer_of, tmp_path):
    V = tokenizer_of("gemma3_text").get_vocab_size()
    random_network("gemma3_text", V, final_logit_softcapping=30.0).save_pretrained(tmp_path)
    tokenizer_of("gemma3_text").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="gemma3_text"):
        wrap(tmp_path)


# ---- The bound, by enumeration
def small(kind, V=6, T=3, **settings):
    """A network of a few tokens, all weights random; of an encoder one of them is [MASK]."""
    made = random_network(kind, V).config
    made.is_causal = False
    network = network_file.Network(made, "masked" if kind in ENCODERS else "causal")
    own = {"[MASK]": 2} if kind in ENCODERS else {}
    network.fit(SimpleNamespace(vocab_size=V, special_ids=lambda: own))
    config = mdlm.Config(block_size=T, n_layer=2, dropout=0, network="config.json", **settings)
    torch.manual_seed(1)
    model = mdlm.make_model(config, V, REFERENCES, pretrained=network).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.7)
    return model


BOTH = [("bert", {}), ("llama", dict(shift=True)), ("llama", {})]


def with_mask(model):
    """The function of ids, with V for [MASK], to logits."""
    V = model.vocab_size
    return lambda xt: model(view_of(torch.where(xt == V, model.mask_id, xt)))


@torch.no_grad()
@pytest.mark.parametrize("kind, settings", BOTH)
def test_nelbo_and_training_loss_are_those_of_enumeration(kind, settings):
    model = small(kind, batch_size=32, rate_margin=0.0, **settings)
    x0 = random_ids(model, 32, 3)
    truth = exhaustive_nelbo(with_mask(model), x0, model.vocab_size).mean().item()
    evaluated = [mdlm.evaluate(model, x0, passes=4, seed=i)["nelbo"] for i in range(12)]
    trained = []
    for step in range(60):
        made = model.objective.batch(model.ops, *draw(model, x0, step))
        trained.append(model(*made[:3]).item())
    for values in map(torch.tensor, (evaluated, trained)):
        error = values.std().item() / len(values) ** 0.5
        assert abs(values.mean().item() - truth) < 4 * error
        assert error < 0.02 * truth, "so that a wrong weight would be seen"


@torch.no_grad()
@pytest.mark.parametrize("kind, settings", BOTH)
def test_exact_likelihoods_of_all_texts_sum_to_one(kind, settings):
    model = small(kind, T=2, **settings)
    tokens = [i for i in range(model.vocab_size) if i != model.mask_id]
    x = torch.tensor([*itertools.product(tokens, repeat=2)])
    logp = likelihood.chain_rule(model, x)
    assert abs(logp.sum(1).exp().sum().item() - 1) < 1e-5
    wanted = chain_rule(with_mask(model), x, model.vocab_size, range(2))
    assert torch.allclose(-logp.mean(1), wanted, atol=1e-5)


# ---- Runs
def flags_of(folder, text_file, out, *more):
    given = ["--block_size=16", "--max_steps=4", "--eval_windows=4", "--batch_size=4", *more]
    flags = [f"--init_from={folder}", f"--data={text_file}", f"--out_dir={out}", *given]
    sizes = ("--n_layer", "--n_head", "--n_embd", "--dropout")
    return [flag for flag in tiny_flags(*flags) if not flag.startswith(sizes)]


@pytest.fixture(scope="module")
def some_text(pydoc, tmp_path_factory):
    path = tmp_path_factory.mktemp("some") / "text.txt"
    path.write_text(pydoc[:6000], encoding="utf-8")
    return path


def assert_resumes(argv, whole, monkeypatch, *trust):
    """The run of these flags, cut off in the middle and resumed, ends as that in `whole` did."""
    cut = next(flag.partition("=")[2] for flag in argv if flag.startswith("--out_dir"))
    with monkeypatch.context() as patch:
        patch.setattr(signals, "Interrupt", lambda: StopAt(2))
        assert run_mdlm(*argv) > 2
    assert run_mdlm("--resume", *trust, f"--out_dir={cut}", "--device=cpu") == 0
    assert losses(cut) == losses(whole)
    first, second = (saved(path)[0] for path in (cut, whole))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def assert_exported(kind, out, dest):
    """The library alone has the logits of the run in `out`; returns its model, and ours."""
    assert entry.run(export.main, [f"--out_dir={out}", f"--dest={dest}"]) == 0
    model, *_ = mdlm.load(out)
    model.config.shift = False
    ids = random_ids(model, 2, 12)
    ids[:, ::3] = model.mask_id
    wanted = model(view_of(ids))
    theirs = auto(kind).from_pretrained(dest).eval()
    found = theirs(input_ids=ids).logits[..., : model.vocab_size]
    known = wanted[0, 0] > -torch.inf
    assert torch.allclose(found[..., known], wanted[..., known], atol=1e-4, rtol=1e-4)
    return theirs, model


RESUMED = [(kind, optimizer) for kind in KINDS for optimizer in ("adamw", "muon")]
FEW = [("bert", "adamw"), ("gemma3_text", "adamw")]


@pytest.mark.parametrize("kind, optimizer", tiers(RESUMED, FEW, [("llama", "muon")]))
def test_a_run_resumes_to_the_bit(kind, optimizer, folder_of, some_text, tmp_path, monkeypatch):
    more = [f"--optimizer={optimizer}", "--dropout=0.1", "--learning_rate=0.01"]
    whole, cut = (
        flags_of(folder_of(kind), some_text, tmp_path / name, *more) for name in ("whole", "cut")
    )
    assert run_mdlm(*whole) == 0
    assert_resumes(cut, tmp_path / "whole", monkeypatch)
    model, tokenizer, _ = mdlm.load(tmp_path / "cut")
    assert tokenizer.mask_id == model.mask_id
    texts = sample.write(model, tokenizer, "the █████ of", n=2, steps=2)
    assert all("█" not in text for text in texts)


@pytest.fixture(scope="module")
def runs(folder_of, some_text, tmp_path_factory):
    """A function: kind -> a run that began with such a network; not to be changed."""
    at = tmp_path_factory.mktemp("runs")

    def run(kind, *more):
        out = at / "-".join([kind, *(flag.strip("-") for flag in more)])
        if not out.exists():
            flags = ["--max_steps=2", "--learning_rate=0.01", *more]
            assert run_mdlm(*flags_of(folder_of(kind), some_text, out, *flags)) == 0
        return out

    return run


@torch.no_grad()
def test_the_log_has_what_the_decoder_knew(runs, folder_of, some_text):
    """The likelihood from left to right before training, as the library computes it."""
    out = runs("llama")
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    first, last = (r for r in records if "decoder_nll" in r)
    assert first["step"] == 0 < last["step"] and first["decoder_nll"] != last["decoder_nll"]
    _, tokenizer, config = mdlm.load(out)
    folder = checkpoint.find_checkpoint(str(out))
    with eval.open_data("", folder, tokenizer, config, torch.device("cpu")) as (corpus, _):
        windows = corpus.windows(config.eval_windows)
    n = first.get("windows", len(windows))
    windows = windows[torch.arange(n) * len(windows) // n].long()
    theirs = native("llama", folder_of("llama"), is_causal=True)
    assert first["decoder_nll"] == pytest.approx(
        theirs(windows, labels=windows).loss.item(), abs=1e-2
    )
    model = mdlm.load(out)[0]
    assert last["decoder_nll"] == pytest.approx(model.next_token_nll(windows), abs=1e-2)
    encoder = (runs("bert") / "log.jsonl").read_text()
    assert "decoder_nll" not in encoder


TUNED = [("bert", ""), ("llama", ""), ("llama", "--shift=false")]


@pytest.mark.parametrize("kind, flag", tiers(TUNED, TUNED[1:2], TUNED[:1]))
def test_fine_tuning_goes_on_from_a_run_and_from_an_export(kind, flag, runs, some_text, tmp_path):
    out = runs(kind, *[flag] * bool(flag))
    assert entry.run(export.main, [f"--out_dir={out}", f"--dest={tmp_path / 'hf'}"]) == 0
    before = mdlm.load(out)[0]
    for name, source in (("run", out), ("export", tmp_path / "hf")):
        more = ["--max_steps=1", "--optimizer=adamw", "--learning_rate=0"]
        argv = flags_of(source, some_text, tmp_path / name, *more)
        assert run_mdlm(*argv, "--weight_decay=0", "--block_size=12") == 0
        after, _, config = mdlm.load(tmp_path / name)
        assert config.shift == before.config.shift
        assert after.mask_id == before.mask_id
        theirs = before.state_dict()
        for key, p in after.state_dict().items():
            same = torch.isclose(p, theirs[key], atol=1e-7, rtol=1e-5)
            if key == "bias":  # that of [MASK], which is not drawn, is another one in an export
                same[before.mask_id] = True
            assert same.all(), key


@pytest.mark.parametrize("kind", tiers(KINDS, FAST, KINDS))
def test_export_is_a_model_of_the_library(kind, runs, folder_of, tmp_path):
    """It has the same logits there, is not causal, and its tokenizer has [MASK]."""
    theirs, model = assert_exported(kind, runs(kind), tmp_path / "hf")
    tokenizer = mdlm.load(runs(kind))[1]
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert words.mask_token_id == model.mask_id
    assert words("some text")["input_ids"] == tokenizer.encode("some text")
    before = native(kind, folder_of(kind)).config.to_dict()
    after = theirs.config.to_dict()
    assert all(after[name] == before[name] for name in before if "dropout" in name)


@pytest.mark.parametrize("kind", tiers(["llama", "bert"], ["llama"], ["bert"]))
def test_programs_work_with_a_network_of_others(kind, runs, tmp_path):
    """Each way to look at a model: in a terminal, as a page, ranked, exactly."""
    out = f"--out_dir={runs(kind)}"
    for name, flags in (
        ("watch", ["--watch", "--infill=the ███ of"]),
        ("html", ["--html={tmp}/page.html", "--prompt=the", "--length=9"]),
        ("guided", ["--infill=the ███ of", "--cfg=1", "--num_samples=2"]),
        ("ranked", ["--infill=the [___] of", "--candidates=4", "--max_gap=2"]),
    ):
        flags = [flag.format(tmp=tmp_path) for flag in flags]
        json_file = [] if name == "watch" else [f"--json={tmp_path}/{name}"]
        assert entry.run(sample.main, [out, *flags, "--steps=2", *json_file]) == 0, name
    assert "█" not in json.loads((tmp_path / "html").read_text())["text"]
    assert (tmp_path / "page.html").stat().st_size > 1000
    model, tokenizer, _ = mdlm.load(runs(kind))
    candidates = json.loads((tmp_path / "ranked").read_text())["candidates"]
    scores = [candidate["score"] for candidate in candidates]
    assert len(scores) > 1 and scores == sorted(scores, reverse=True)
    found = sample.search(model, tokenizer, "the [___] of", top=4, max_gap=2)
    assert [one.text for one in found] == [candidate["text"] for candidate in candidates]
    assert found.proven and found.compares_lengths
    flags = [out, "--windows=4", "--exact", "--pictures=none", f"--json={tmp_path}/r.json"]
    assert entry.run(eval.main, flags) == 0
    r = json.loads((tmp_path / "r.json").read_text())
    assert r["exact"]["nll"] < r["nelbo"] + 4 * r["se"]
    assert entry.run(eval.main, [out, "--text=the name of", "--pictures=none"]) == 0


def headless(folder, to):
    """A copy of a folder as sentence encoders are: without the head."""
    shutil.copytree(folder, to)
    body = transformers.AutoModel.from_pretrained(to)
    body.save_pretrained(to)
    return to


@torch.no_grad()
def test_sentence_encoder_predicts_by_its_embedding(folder_of, some_text, tmp_path):
    folder = headless(folder_of("bert"), tmp_path / "sentences")
    with torch.enable_grad():
        assert run_mdlm(*flags_of(folder, some_text, tmp_path / "out", "--max_steps=1")) == 0
    assert mdlm.load(tmp_path / "out")[0].network.head == network_file.EMBEDDING
    model, _ = wrap(folder)
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    ids = random_ids(model, 2, 9)
    h = theirs(input_ids=ids).last_hidden_state
    wanted = h @ theirs.get_input_embeddings().weight.T
    known = [i for i in range(model.vocab_size) if i != model.mask_id]
    assert torch.allclose(model(view_of(ids))[..., known], wanted[..., known], atol=1e-5)


@pytest.mark.parametrize("kind", tiers(["bert", "llama"], ["bert"], ["llama"]))
def test_documents_are_learned(kind, folder_of, tmp_path, pydoc):
    """Packed, of given lengths; [END] is the tokenizer's own end of text, or what --end says."""
    records = tmp_path / "records.jsonl"
    texts = [pydoc[i : i + 40] for i in range(0, 6000, 40)]
    records.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
    out = tmp_path / "out"
    more = ["--block_size=32", *["--end=[CLS]"] * (kind in ENCODERS)]
    assert run_mdlm(*flags_of(folder_of(kind), records, out, *more)) == 0
    model, tokenizer, _ = mdlm.load(out)
    end = "[CLS]" if kind in ENCODERS else "<|endoftext|>"
    assert tokenizer.end_id == tokenizer.special_ids()[end]
    assert abilities.knows_lengths(model)
    assert sample.write(model, tokenizer, "a ███", n=1)


# A family, the tokenizer that its models have, and the [MASK] of encoders.
OWN_TOKENIZERS = [
    ("llama", "llama", ""),
    ("gemma3_text", "gemma", ""),
    ("qwen3", "qwen", ""),
    ("bert", "bert_cased", "[MASK]"),
    ("roberta", "roberta", "<mask>"),
    ("roberta", "albert", "<mask>"),  # as XLM-RoBERTa's
    ("modernbert", "gpt2", "[MASK]"),
]


@pytest.mark.parametrize(
    "kind, words, mask", tiers(OWN_TOKENIZERS, slow=[OWN_TOKENIZERS[0], OWN_TOKENIZERS[3]])
)
def test_tokenizers_stay_what_they_are(kind, words, mask, pydoc, some_text, tmp_path):
    """Adapted, exported, and adapted again: the same ids for a text, and seams at gaps."""
    theirs = tokenizer_kinds.KINDS[words](pydoc[:20_000])
    if mask and theirs.token_to_id(mask) is None:  # RoBERTa's takes the space before it
        is_eager = words != "bert_cased"
        theirs.add_special_tokens([tokenizers.AddedToken(mask, lstrip=is_eager, special=True)])
    V = theirs.get_vocab_size()
    random_network(kind, V).save_pretrained(tmp_path / "hf")
    theirs.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(dict(mask_token=mask)))
    text = "the name of the class, and its value"
    ids = theirs.encode(text, add_special_tokens=False).ids
    source = tmp_path / "hf"
    for turn in ("first", "second"):
        out = tmp_path / turn
        assert run_mdlm(*flags_of(source, some_text, out, "--max_steps=1")) == 0
        model, tokenizer, _ = mdlm.load(out)
        assert tokenizer.encode(text) == ids
        assert model.mask_id == (theirs.token_to_id(mask) if mask else V)
        (written,) = sample.write(model, tokenizer, "the name ███ the class", n=1)
        assert written.startswith("the name") and written.endswith("the class")
        source = tmp_path / f"{turn}-hf"
        assert entry.run(export.main, [f"--out_dir={out}", f"--dest={source}"]) == 0
        exported = transformers.AutoTokenizer.from_pretrained(source)
        assert exported(text)["input_ids"] == ids
        gap = exported(f"the name{exported.mask_token} the class")["input_ids"]
        begin, end = (tokenizer.encode(part) for part in ("the name", "the name the class"))
        assert gap[: len(begin)] == begin and gap[len(begin)] == model.mask_id
        if words not in ("bert_cased",):
            assert gap[len(begin) + 1 :] == end[len(begin) :], "the space after a gap stays"


def test_network_begins_from_nothing(folder_of, some_text, tmp_path):
    """--network with our characters: [MASK] is a further row, as of our own networks."""
    out = tmp_path / "out"
    config = folder_of("bert") / "config.json"
    flags = flags_of("", some_text, out, f"--network={config}", "--max_steps=2")
    assert run_mdlm(*[flag for flag in flags if not flag.startswith("--init_from")]) == 0
    model, tokenizer, _ = mdlm.load(out)
    assert tokenizer.kind == "char" and model.mask_id == tokenizer.vocab_size
    assert len(model.body.get_input_embeddings().weight) == model.mask_id + 1
    assert sample.write(model, tokenizer, "the ███", n=1)


def ar_run(config, text_file, out, *more):
    """A run of a decoder from nothing that predicts the next token."""
    more = ["--objective=ar", "--learning_rate=0.01", *more]
    flags = flags_of("", text_file, out, f"--network={config}", *more)
    assert run_mdlm(*[flag for flag in flags if not flag.startswith("--init_from")]) == 0
    return out


@pytest.mark.parametrize("kind", tiers(["llama", "gpt2"], ["llama"]))
@torch.no_grad()
def test_autoregressive_export_generates_in_the_library(kind, folder_of, some_text, tmp_path):
    """As it writes here, with the same likelihoods; and it goes on from there in both ways."""
    words = f"--tokenizer={folder_of(kind)}/tokenizer.json"
    with torch.enable_grad():
        out = ar_run(folder_of(kind) / "config.json", some_text, tmp_path / "ar", words)
    hf = tmp_path / "hf"
    assert entry.run(export.main, [f"--out_dir={out}", f"--dest={hf}"]) == 0
    model, tokenizer, _ = mdlm.load(out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf).eval()
    begins = transformers.AutoTokenizer.from_pretrained(hf)
    assert theirs.config.is_causal and begins.bos_token_id == model.mask_id
    assert theirs.generation_config.bos_token_id == model.mask_id
    ids = begins("the name", return_tensors="pt").input_ids
    assert ids[0].tolist() == [model.mask_id, *tokenizer.encode("the name")]
    assert theirs.generation_config.suppress_tokens == [model.mask_id], "it is never drawn"
    assert theirs.generation_config.use_cache, "as the library has it"
    n = 16 - (ids.shape[1] - 1)
    written = theirs.generate(ids, do_sample=False, max_new_tokens=n)[0, 1:]
    (text,) = sample.write(model, tokenizer, "the name", length=16, temperature=0.0)
    assert len(written) == 16 and tokenizer.decode(written) == text
    code = (hf / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names = {}
    exec(code.replace('"hf"', repr(str(hf))), names)
    assert names["ids"][0, 0] == model.mask_id and len(names["written"][0]) > len(names["ids"][0])
    # The likelihood of a text.
    x = random_ids(model, 2, 16)
    begun = torch.cat((torch.full_like(x[:, :1], model.mask_id), x[:, :-1]), 1)
    logits = theirs(begun).logits[..., : model.vocab_size]
    found = -torch.nn.functional.cross_entropy(logits.mT, x, reduction="none").double()
    assert torch.allclose(found, likelihood.chain_rule(model, x), atol=1e-5)
    nll = mdlm.evaluate(model, x)["nll"]
    assert abs(nll + found.mean().item()) < 1e-5
    # On from there.
    same = ["--max_steps=1", "--optimizer=adamw", "--learning_rate=0", "--weight_decay=0"]
    for objective in ("ar", "mdlm"):
        out = tmp_path / f"on-{objective}"
        argv = flags_of(hf, some_text, out, f"--objective={objective}", *same)
        with torch.enable_grad():
            assert run_mdlm(*argv) == 0
        after, _, config = mdlm.load(out)
        assert config.shift == (objective == "mdlm") and after.mask_id == model.mask_id
        for (name, p), (_, q) in zip(after.state_dict().items(), model.state_dict().items()):
            assert torch.allclose(p, q, atol=1e-7), name
    again = mdlm.load(tmp_path / "on-ar")[0]
    logp = likelihood.chain_rule(again, x)
    assert torch.allclose(logp, likelihood.chain_rule(model, x), atol=1e-5)


# (network, optimizer, tolerance): Muon, the default, orthogonalizes in bfloat16.
TRAINED = [("bert", "adamw", 1e-5), ("llama", "adamw", 1e-5), ("llama", "muon", 1e-2)]


@pytest.mark.parametrize("kind, optimizer, tolerance", tiers(TRAINED, slow=TRAINED[2:]))
def test_compiled_layers_give_the_same_losses(
    kind, optimizer, tolerance, folder_of, some_text, tmp_path
):
    for name, more in (("eager", []), ("compiled", ["--compile=on"]), ("again", ["--recompute"])):
        flags = flags_of(
            folder_of(kind), some_text, tmp_path / name, f"--optimizer={optimizer}", *more
        )
        assert run_mdlm(*flags) == 0
    eager = losses(tmp_path / "eager")
    for name in ("compiled", "again"):
        both = map(torch.tensor, (eager, losses(tmp_path / name)))
        assert torch.allclose(*both, atol=max(tolerance, 1e-4))


# ---- What came in goes out again
@pytest.mark.parametrize("objective", ["mdlm", "ar"])
def test_export_keeps_number_type_generation_and_tokenizer(
    objective, tokenizer_of, some_text, tmp_path
):
    """Of weights in bfloat16, through a checkpoint; --weights=float32 asks for more digits."""
    tokenizer = tokenizer_of("llama")
    tokenizer.save(str((tmp_path / "hf").mkdir() or tmp_path / "hf" / "tokenizer.json"))
    network = random_network("llama", tokenizer.get_vocab_size()).to(torch.bfloat16)
    network.save_pretrained(tmp_path / "hf")
    generation = dict(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[0, 7])
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(generation))
    words = dict(bos_token="<|endoftext|>", padding_side="left", add_bos_token=True)
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(words))
    out = tmp_path / "run"
    more = ["--max_steps=1", f"--objective={objective}"]
    assert run_mdlm(*flags_of(tmp_path / "hf", some_text, out, *more)) == 0
    for weights in ("auto", "float32"):
        argv = [f"--out_dir={out}", f"--dest={tmp_path / weights}", f"--weights={weights}"]
        assert entry.run(export.main, argv) == 0
    tensors = [load_file(tmp_path / name / "model.safetensors") for name in ("auto", "float32")]
    assert {t.dtype for t in tensors[0].values()} == {torch.bfloat16}
    assert all(torch.equal(t, tensors[1][name].bfloat16()) for name, t in tensors[0].items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "auto")
    assert theirs.dtype == torch.bfloat16
    kept = theirs.generation_config.to_dict()
    assert (kept["temperature"], kept["top_p"], kept["do_sample"]) == (0.6, 0.9, True)
    assert kept["eos_token_id"] == [0, 7]
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "auto")
    assert exported.padding_side == "left"
    begin = dict(mdlm="<|endoftext|>", ar="[MASK]")[objective]
    assert exported.bos_token == begin
    ids = tokenizer.encode("the name").ids
    assert exported("the name")["input_ids"] == [exported.mask_token_id] * (begin == "[MASK]") + ids


# ---- Refused
def without(*names):
    def change(folder):
        for name in names:
            (folder / name).unlink()

    return change


def set_in(name, **values):
    def change(folder):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))

    return change


def only_pickles(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def damaged(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without_head(folder):
    """The weights of a masked language model lack a part of the head."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["cls.predictions.transform.dense.weight"]
    save_file(tensors, folder / "model.safetensors", dict(format="pt"))


def with_adapters(folder):
    """As peft leaves them beside whole weights: the library would load both."""
    content = dict(peft_type="LORA", base_model_name_or_path="some/model")
    (folder / "adapter_config.json").write_text(json.dumps(content))
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")


def without_mask_token(folder):
    text = (folder / "tokenizer.json").read_text().replace("[MASK]", "[NONE]")
    (folder / "tokenizer.json").write_text(text)


def nothing(folder):
    pass


# What is done to a folder of BERT; flags; and a name that the sentence must have.
REFUSED = [
    (only_pickles, [], "pytorch_model.bin"),
    (without("model.safetensors"), [], "model.safetensors"),
    (damaged, [], "model.safetensors"),
    (with_adapters, [], "adapters"),
    (without_head, [], "cls.predictions.transform.dense.weight"),
    (set_in("config.json", num_hidden_layers=1), [], "layers"),
    (set_in("config.json", model_type="nonesuch"), [], "nonesuch"),
    (set_in("config.json", attention_window=4096), [], "attention_window"),
    (without("tokenizer.json"), [], "tokenizer.json"),
    (without_mask_token, [], "[MASK]"),
    (nothing, ["--block_size=128"], "66"),
    (nothing, ["--shift"], "--shift"),
    (nothing, ["--objective=ar"], "--objective=ar"),
    (nothing, ["--block_length=4"], "--block_length"),
    (nothing, ["--network={folder}/config.json"], "--init_from"),
]


@pytest.mark.parametrize("change, flags, name", REFUSED)
def test_a_folder_that_does_not_fit_is_refused(
    change, flags, name, folder_of, some_text, tmp_path, capfd
):
    """By one sentence, exit code 2, and nothing is left."""
    folder = shutil.copytree(folder_of("bert"), tmp_path / "hf")
    change(folder)
    capfd.readouterr()
    flags = [flag.format(folder=folder) for flag in flags]
    assert run_mdlm(*flags_of(folder, some_text, tmp_path / "out", "--max_steps=1", *flags)) == 2
    said = capfd.readouterr().err
    assert name in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [{}, dict(shard=2)])
def test_sizes_beyond_the_weights_take_no_memory(more, folder_of, tmp_path, monkeypatch):
    """They are compared with the header of the file before anything is built."""
    folder = shutil.copytree(folder_of("llama"), tmp_path / "hf")
    set_in("config.json", vocab_size=1 << 24)(folder)
    built = []
    monkeypatch.setattr(network_file.Network, "load", lambda self: built.append(1))
    monkeypatch.setattr(network_file.Network, "try_out", lambda self: built.append(1))
    with pytest.raises(UserError, match=f"{1 << 24}"):
        wrap(folder, **more)
    assert not built


def test_without_the_library_one_sentence_says_what_to_install(
    folder_of, some_text, tmp_path, capfd, monkeypatch
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run_mdlm(*flags_of(folder_of("bert"), some_text, tmp_path / "out")) == 2
    said = capfd.readouterr().err
    assert "transformers" in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_signed", [False, True])
def test_damaged_checkpoint_is_refused(is_signed, runs, tmp_path):
    """By its sums. Of a forged one network.json must not ask for more weights than it has."""
    folder = shutil.copytree(checkpoint.find_checkpoint(runs("bert")), tmp_path / "step-2")
    network = json.loads((folder / "network.json").read_text())
    network["config"] |= dict(hidden_size=1 << 14, intermediate_size=1 << 20)
    (folder / "network.json").write_text(json.dumps(network))
    if is_signed:
        sign(folder)
    with pytest.raises(UserError):
        mdlm.load(folder, kernel="torch")


# ---- Encoders' own [MASK]
def test_text_with_the_mask_of_an_encoder_is_refused(tokenizer_of, tmp_path, folder_of):
    """A text that spells [MASK] is a text; a tokenizer that reads it as the token is refused."""
    _, tokenizer = wrap(folder_of("bert"))
    assert tokenizer.mask_id not in tokenizer.encode("a [MASK] b")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "[MASK]": 1, "[UNK]": 2}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["[MASK]"])
    words.save(str(tmp_path / "tokenizer.json"))
    read = open_tokenizer(tmp_path / "tokenizer.json", False)
    assert read.encode("a [MASK] a") == [0, 1, 0]
    read.mask_id = 1
    assert read.decode([0, 1]) == "a█" or read.decode([0, 1]) == "a █"
    with pytest.raises(UserError, match=r"\[MASK\]"):
        read.encode("a [MASK] a")


def test_own_mask_is_no_token_of_a_text(folder_of):
    model, tokenizer = wrap(folder_of("bert"))
    x = torch.full((2, 16), model.mask_id)
    with pytest.raises(UserError, match=str(model.mask_id)):
        mdlm.evaluate(model, x)
    with pytest.raises(UserError, match=str(model.vocab_size - 1)):
        sample.generate(model, x + model.vocab_size, steps=1)
    with pytest.raises(UserError, match=str(model.vocab_size)):
        tokenizer.decode([model.vocab_size])
    x[:, 0] = 7
    filled = sample.generate(model, x, steps=4, cfg=1.0)
    assert (filled != model.mask_id).all()


@torch.no_grad()
def test_own_mask_is_never_drawn(folder_of):
    """Nor where the network likes it best, with guidance or without."""
    model, _ = wrap(folder_of("bert"))
    model.bias[model.mask_id] = 1e3
    x = torch.full((4, 16), model.mask_id)
    x[:, 0] = 7
    for cfg in (0.0, 1.5):
        assert (sample.generate(model, x, steps=2, cfg=cfg) != model.mask_id).all()
    targets = random_ids(model, 4)
    view = view_of(x)._replace(rows=torch.tensor([1, 20, 33, 50]))
    loss = model(view, targets, torch.full((4,), 0.25))
    ce = torch.nn.functional.cross_entropy(model(view), targets)
    assert torch.allclose(loss, ce, rtol=1e-5)


@pytest.mark.parametrize(
    "kind, mask, code", [("bert", 9, 0), ("bert", 4, 2), ("llama", 9, 2), ("", 9, 2)]
)
def test_ids_must_be_those_of_the_tokenizer(kind, mask, code, folder_of, tmp_path):
    """Without the [MASK] of an encoder, 4; of no other tokenizer, and not without one."""
    ids = tmp_path / "ids"
    ids.mkdir()
    if kind:
        shutil.copy(folder_of(kind) / "tokenizer.json", ids)
    text = (torch.arange(400) % 30 + 5).to(torch.int16).numpy()
    text[33] = mask
    for name in ("train.bin", "val.bin"):
        text.tofile(ids / name)
    assert run_mdlm(*flags_of(folder_of("bert"), ids, tmp_path / "out", "--max_steps=1")) == code
    assert (tmp_path / "out").exists() == (code == 0)


@pytest.mark.long
def test_the_study_trains_two_runs_at_a_time(folder_of, some_text, tmp_path, capfd):
    """Each on a core of its own, and each once; the table has them all."""
    argv = [f"--data={some_text}", f"--out_dir={tmp_path / 'runs'}", "--kind=encoder"]
    argv += [f"--model={folder_of('bert')}", "--max_steps=2", "--block_size=16", "--cores=2"]
    for _ in range(2):
        assert entry.run(adapt.main, argv) == 0
    said = capfd.readouterr().out
    nelbo = [adapt.read_curve(tmp_path / "runs" / name, "step") for name in ("adapted", "nothing")]
    assert said.count("the end | " + " | ".join(f"{c[-1][1]:.3f} +- {c[-1][2]:.3f}" for c in nelbo))
    nats = adapt.nll_of_frequencies(tmp_path / "runs" / "adapted")
    assert f"{nats:.3f}" in said
    assert 1 < nats < math.log(1000)


def test_a_given_first_token_moves_the_texts_by_one(folder_of):
    """A text behind a [MASK] is predicted as any text with --shift is, from its second token on."""
    model, _ = wrap(folder_of("llama"), shift=True)
    ids = random_ids(model, 3, 12)
    ids[:, ::3] = model.mask_id
    with torch.no_grad():
        found = model(first_token.view_after_mask(model.objective, ids))
        longer = F.pad(ids, (1, 0), value=model.mask_id)
        wanted = model(model.objective.view(longer))[:, 1:]
        some = torch.tensor([0, 5, 12, 35])
        rows = model(first_token.view_after_mask(model.objective, ids, rows=some))
    assert torch.equal(found, wanted)
    assert torch.allclose(rows, wanted.flatten(0, 1)[some], atol=1e-5)


# ---- Other families (docs/pretrained.md names them): tiny random networks, tried as all are
HEADS = dict(num_key_value_heads=1, head_dim=16)
EXPERTS = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32) | ONE_KEY
OTHERS = {
    "xlm-roberta": dict(pad_token_id=1),
    "camembert": dict(pad_token_id=1),
    "distilbert": dict(dim=32, n_layers=2, n_heads=2, hidden_dim=64),
    "electra": dict(embedding_size=32),
    "ernie": {},
    "nomic_bert": {},
    "eurobert": ONE_KEY,
    "gpt_neox": {},
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32),
    "falcon": {},
    "phi": {},
    "phi3": ONE_KEY,
    "olmo2": ONE_KEY,
    "olmo3": ONE_KEY,
    "starcoder2": ONE_KEY,
    "gemma": HEADS,
    "glm4": HEADS,
    "apertus": ONE_KEY,
    "exaone4": ONE_KEY,
    "mixtral": dict(num_local_experts=2) | ONE_KEY,
    "qwen2_moe": EXPERTS | dict(shared_expert_intermediate_size=32),
    "qwen3_moe": EXPERTS,
}
UNFIT = {
    "stablelm": ONE_KEY,
    "nemotron": ONE_KEY,
    "cohere": ONE_KEY,
    "granite": ONE_KEY | dict(logits_scaling=8.0),
    "gemma2": HEADS,
    "deberta": {},
    "mpnet": {},
    "bloom": dict(n_layer=2, n_head=2),
    "falcon": dict(alibi=True),
    "albert": dict(embedding_size=32),
    "t5": dict(d_model=32, num_layers=2, num_heads=2),
    "mamba": {},
}


def open_random(kind, more, folder):
    """Try a network with random weights of a kind, as --network does."""
    ids = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos")}
    settings = SIZES | ids | dict(vocab_size=300) | more
    config = transformers.AutoConfig.for_model(kind, **settings)
    path = folder / "config.json"
    path.write_text(config.to_json_string(use_diff=False))
    torch.manual_seed(0)
    return network_file.read(path, False).open()


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_other_families_pass(kind, tmp_path):
    open_random(kind, OTHERS[kind], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNFIT)
def test_families_that_do_not_fit_are_refused(kind, tmp_path):
    with pytest.raises(UserError):
        open_random(kind, UNFIT[kind], tmp_path)
