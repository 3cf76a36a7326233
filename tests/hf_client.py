"""What a user of an exported model runs: transformers, without this project on the path.

    python -I tests/hf_client.py FOLDER

FOLDER holds exported models and, for each, NAME.pt and NAME.json with what it must give. Prints one
line for each promise that holds, and fails at the first that does not.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    logging,
    pipeline,
)

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()
warnings.simplefilter("ignore")
TRUST = dict(trust_remote_code=True)


def is_refused(words, call, *args, **kwargs):
    """With a ValueError that says these words."""
    try:
        call(*args, **kwargs)
    except ValueError as e:
        assert words in str(e), e
    else:
        raise AssertionError(f"accepted: {words}")


@torch.no_grad()
def logits_are_equal(folder, auto, wanted):
    """As loaded, and as saved and loaded again."""
    for again in (False, True):
        model = auto.from_pretrained(folder, **TRUST).eval()
        V = model.config.vocab_size - 2
        for x, logits in wanted:
            exported = model(x).logits
            assert torch.equal(exported[..., :V], logits), (exported[..., :V] - logits).abs().max()
            assert (exported[..., V:] == -1e4).all()
        if not again:
            folder = folder.with_name(f"{folder.name}-again")
            model.save_pretrained(folder)
    return model


@torch.no_grad()
def padding_changes_nothing(model):
    V = model.config.vocab_size - 2
    T = model.config.max_length if V < 0 else model.config.block_size - 1
    x = torch.randint(V + 1, (4, T), generator=torch.Generator().manual_seed(1))
    keep = torch.ones_like(x)
    keep[0, 5:] = keep[1, :3] = keep[3, ::2] = 0
    padded = torch.where(keep.bool(), x, model.config.pad_token_id)
    for given in (model(x, attention_mask=keep), model(padded)):
        for row in range(4):
            alone = model(x[row, keep[row].bool()][None]).logits[0]
            there = given.logits[row, keep[row].bool()]
            assert torch.allclose(there, alone, atol=1e-5, rtol=0), (there - alone).abs().max()
            assert torch.equal(there.argmax(-1), alone.argmax(-1))
    assert (model(padded).logits.softmax(-1)[..., V:] == 0).all(), "[MASK] and [PAD] are drawn"
    with_mask, without = model(x).logits, model(torch.full_like(x, V)).logits
    guided = without + 1e3 * (with_mask - without)
    assert guided.isfinite().all() and guided.log_softmax(-1).isfinite().all()


@torch.no_grad()
def arguments_are_obeyed(model, wanted):
    """What callers of a transformers model pass: forms of output, segments, caches, labels."""
    config = model.config
    for x, logits in wanted:
        V = logits.shape[-1]
        tokenizers_give = dict(attention_mask=torch.ones_like(x), token_type_ids=torch.ones_like(x))
        positions = torch.arange(x.shape[1])[None]
        output = model(x, **tokenizers_give, position_ids=positions, use_cache=True)
        assert torch.equal(output.logits[..., :V], logits) and output.keys() == {"logits"}
        (first,) = model(x, return_dict=False)
        assert torch.equal(first, output.logits)
        hidden = model(x, output_hidden_states=True).hidden_states
        assert len(hidden) == config.n_layer + 1
        assert {h.shape for h in hidden} == {(*x.shape, config.n_embd)}
        head = model.get_output_embeddings()
        assert torch.allclose(head(hidden[-1])[..., :V], logits, atol=1e-5, rtol=0)
        labels = torch.where(torch.rand(x.shape) < 0.5, torch.randint(V, x.shape), -100)
        labels[x == config.end_id] = -100
        loss = model(x, labels=labels).loss
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        assert torch.allclose(loss, expected, atol=1e-5, rtol=0)
        loss, first, kept = model(x, labels=labels, output_hidden_states=True, return_dict=False)
        assert loss.ndim == 0 and torch.equal(first, output.logits) and len(kept) == len(hidden)
        assert model(x, labels=torch.full_like(x, -100)).loss == 0


@torch.no_grad()
def hidden_states_of_padded_rows_are_those_of_each_alone(model):
    T = model.config.block_size - 1
    x = torch.randint(model.config.mask_token_id, (2, T))
    keep = torch.ones_like(x)
    keep[0, 5:] = 0
    found = model(x, attention_mask=keep, output_hidden_states=True).hidden_states
    alone = model(x[:1, :5], output_hidden_states=True).hidden_states
    for padded, row in zip(found, alone, strict=True):
        assert torch.allclose(padded[0, :5], row[0], atol=1e-5, rtol=0)
        assert (padded[0, 5:] == 0).all()


@torch.no_grad()
def random_ids_of_collators_are_masked(model):
    """[PAD] is no padding where it has the label of a token; so with [END] where it is given."""
    T = model.config.block_size - 1
    V = model.config.mask_token_id
    specials = [model.config.pad_token_id, *[model.config.end_id] * (model.config.end_id >= 0)]
    for special in specials:
        x = torch.randint(V, (2, T))
        x[x == model.config.end_id] = V
        labels = torch.full_like(x, -100)
        labels[:, 2] = 1
        masked, replaced = x.clone(), x.clone()
        masked[:, 2] = V
        replaced[:, 2] = special
        replaced[1, -3:] = masked[1, -3:] = model.config.pad_token_id  # padding, which stays
        found, wanted = (model(ids, labels=labels) for ids in (replaced, masked))
        assert torch.equal(found.logits, wanted.logits) and torch.equal(found.loss, wanted.loss)


def embeddings_can_be_resized(auto, folder, wanted):
    """Added tokens change nothing of the others, are learned, and stay when saved and loaded."""
    model = auto.from_pretrained(folder, **TRUST).eval()
    V = model.config.vocab_size - 2
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (
        len(embed.weight) == len(head.weight) == len(AutoTokenizer.from_pretrained(folder, **TRUST))
    )
    assert (embed.weight is head.weight) == model.config.tie
    x, logits = wanted[0]
    with torch.no_grad():
        for mean in (True, False):
            model.resize_token_embeddings(len(embed.weight) + 3, mean_resizing=mean)
            found = model(x).logits
            assert found.shape[-1] == len(embed.weight) == model.config.vocab_size
            assert torch.equal(found[..., :V], logits) and (found[..., V : V + 2] == -1e4).all()
    x = x.clone()
    x[:, 1] = V + 3  # an added token
    labels = torch.where(torch.rand(x.shape) < 0.5, V + 4, -100)
    model(x, labels=labels).loss.backward()
    assert (model.get_input_embeddings().weight.grad[V + 3] != 0).any()
    assert (model.get_output_embeddings().weight.grad[V + 4] != 0).any()
    again = folder.with_name(f"{folder.name}-more")
    model.save_pretrained(again)
    loaded = auto.from_pretrained(again, **TRUST).eval()
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == (
        model.config.tie
    )
    model.resize_token_embeddings(V + 2)
    assert torch.equal(model(wanted[0][0]).logits[..., :V], logits)
    is_refused(f"{V + 2} or more", model.resize_token_embeddings, V + 1)  # [PAD] keeps its row
    assert model.config.vocab_size == V + 2


@torch.no_grad()
def loads_in_bfloat16(auto, folder, wanted):
    """Weights of bfloat16, and positions as exact as in float32."""
    model = auto.from_pretrained(folder, dtype=torch.bfloat16, **TRUST).eval()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    exact = auto.from_pretrained(folder, **TRUST).eval()
    for name in ("cos", "sin"):
        assert torch.equal(getattr(model.model, name), getattr(exact.model, name)), name
    for p in exact.parameters():
        p.copy_(p.bfloat16())
    for x, _ in wanted:
        V = model.config.mask_token_id
        found, expected = model(x).logits[..., :V], exact(x).logits[..., :V]
        assert found.dtype == torch.float32
        # Rounded to 8 bits at each of a dozen operations: about 1% of the logits' size.
        error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < 0.03, error


def mistakes_are_named(model):
    x = torch.zeros(1, model.config.block_size + 1, dtype=torch.long)
    y = x[:, :4]
    V = model.config.mask_token_id
    for kwargs, words in (
        (dict(input_ids=x), "context"),
        (dict(input_ids=y, output_attentions=True), "output_attentions"),
        (dict(input_ids=y, labels=y + V), "never predicted"),
        (dict(input_ids=y, labels=y - 1), "ids below"),
        (dict(input_ids=y, labels=y[:, 1:]), "labels must be (B, T)"),
        (dict(input_ids=y, labels=y, attention_mask=y), "padding is not scored"),
        (dict(input_ids=y, attention_mask=torch.ones(1, 1, 4, 4)), "attention_mask"),
        (dict(input_ids=y, position_ids=torch.arange(1, 5)[None]), "position_ids"),
    ):
        is_refused(words, model, **kwargs)


def texts_and_ids_are_equal(folder, wanted):
    tokenizer = AutoTokenizer.from_pretrained(folder, **TRUST)
    assert tokenizer.mask_token_id == wanted["mask_id"]
    assert tokenizer.pad_token_id == wanted["mask_id"] + 1
    encoded = tokenizer(wanted["texts"], add_special_tokens=False).input_ids
    for text, ids, expected, back in zip(
        wanted["texts"], encoded, wanted["ids"], wanted["decoded"]
    ):
        assert ids == expected, (text, ids, expected)
        assert tokenizer.decode(ids) == back, (text, back, tokenizer.decode(ids))
        if wanted["end"] is not None:
            assert tokenizer.eos_token_id == wanted["end"]
            assert tokenizer.decode([*ids, wanted["end"]], skip_special_tokens=True) == back
    again = folder.with_name(f"{folder.name}-again")
    tokenizer.save_pretrained(again)
    texts = wanted["texts"][:5]
    assert AutoTokenizer.from_pretrained(again, **TRUST)(texts).input_ids == wanted["ids"][:5]


def fine_tuning_learns(model):
    """A step toward the labels lowers their loss, of full windows; -100 is not scored."""
    T = model.config.block_size
    x = torch.full((2, T), model.config.mask_token_id)
    labels = torch.tensor([[1, -100, 2, 3, 1, 2] * T] * 2)[:, :T]
    before = model(x, labels=labels).loss
    assert torch.isfinite(before)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    before.backward()
    optimizer.step()
    assert model(x, labels=labels).loss < before


@torch.no_grad()
def a_prompt_is_continued(model, folder, wanted):
    """generate writes what mdlm writes greedily: of one prompt, and of a padded batch of them."""
    tokenizer = AutoTokenizer.from_pretrained(folder, **TRUST)
    prompts = wanted["continued"]
    settings = dict(do_sample=False, max_new_tokens=len(next(iter(prompts.values()))))
    for prompt, more in prompts.items():
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert model.generate(ids, **settings)[0, ids.shape[1] :].tolist() == more, prompt
    batch = tokenizer([*prompts], return_tensors="pt", padding=True)
    assert tokenizer.padding_side == "left"
    found = model.generate(**batch, **settings)[:, batch.input_ids.shape[1] :].tolist()
    assert found == [*prompts.values()]
    assert pipeline("text-generation", model=str(folder), tokenizer=str(folder), **TRUST)(
        next(iter(prompts)), max_new_tokens=2, do_sample=False, return_full_text=False
    )
    is_refused("max_new_tokens", model.generate, ids, max_new_tokens=model.config.block_size)


def next_tokens_are_learned(model, wanted):
    """The loss is that of the next tokens: labels are the ids, and the first one is not scored."""
    x, _ = wanted[0]
    x = x.clamp(max=model.config.mask_token_id - 1)
    labels = x.clone()
    labels[0, 4:] = -100
    output = model(x, labels=labels)
    logp = output.logits[:, :-1].log_softmax(-1)
    ce = -logp.gather(2, x[:, 1:, None])[..., 0]
    scored = labels[:, 1:] != -100
    assert torch.allclose(output.loss, ce[scored].mean(), atol=1e-5)
    output.loss.backward()
    torch.optim.SGD(model.parameters(), 0.01).step()
    assert model(x, labels=labels).loss < output.loss


def check_masked(folder, wanted, logits):
    for kind in (AutoModel, AutoModelForMaskedLM):
        model = logits_are_equal(folder, kind, logits)
    padding_changes_nothing(model)
    arguments_are_obeyed(model, logits)
    hidden_states_of_padded_rows_are_those_of_each_alone(model)
    random_ids_of_collators_are_masked(model)
    embeddings_can_be_resized(kind, folder, logits)
    loads_in_bfloat16(kind, folder, logits)
    mistakes_are_named(model)
    fill = pipeline("fill-mask", model=str(folder), tokenizer=str(folder), **TRUST)
    best = fill(wanted["texts"][0][:3] + fill.tokenizer.mask_token)[0]
    assert 0 < best["score"] <= 1 and best["token"] < wanted["mask_id"]
    fine_tuning_learns(model)


def check_causal(folder, wanted, logits):
    for kind in (AutoModel, AutoModelForCausalLM):
        model = logits_are_equal(folder, kind, logits)
    padding_changes_nothing(model)
    hidden_states_of_padded_rows_are_those_of_each_alone(model)
    loads_in_bfloat16(kind, folder, logits)
    mistakes_are_named(model)
    a_prompt_is_continued(model, folder, wanted)
    next_tokens_are_learned(model, logits)


def main(root):
    for folder in sorted(path.parent for path in root.glob("*/config.json")):
        torch.manual_seed(0)
        wanted = json.loads(root.joinpath(f"{folder.name}.json").read_text())
        logits = torch.load(root / f"{folder.name}.pt")
        (check_causal if "continued" in wanted else check_masked)(folder, wanted, logits)
        texts_and_ids_are_equal(folder, wanted)
        print("fine:", folder.name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
