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


def mistakes_are_named(model):
    x = torch.zeros(1, model.config.block_size + 1, dtype=torch.long)
    y = x[:, :4]
    for kwargs, words in (
        (dict(input_ids=x), "context"),
        (dict(input_ids=y, attention_mask=torch.ones(1, 1, 4, 4)), "attention_mask"),
        (dict(input_ids=y, position_ids=torch.arange(1, 5)[None]), "position_ids"),
    ):
        try:
            model(**kwargs)
        except ValueError as e:
            assert words in str(e), e
        else:
            raise AssertionError(f"accepted: {words}")


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
    assert AutoTokenizer.from_pretrained(again)(wanted["texts"][:5]).input_ids == wanted["ids"][:5]


def fine_tuning_learns(model):
    """A step towards the labels lowers their loss, of full windows; -100 is not scored."""
    T = model.config.block_size
    x = torch.full((2, T), model.config.mask_token_id)
    labels = torch.tensor([[1, -100, 2, 3, 1, 2] * T] * 2)[:, :T]
    before = model(x, labels=labels).loss
    assert torch.isfinite(before)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    before.backward()
    optimizer.step()
    assert model(x, labels=labels).loss < before


def main(root):
    for folder in sorted(path.parent for path in root.glob("*/config.json")):
        torch.manual_seed(0)
        wanted = json.loads(root.joinpath(f"{folder.name}.json").read_text())
        logits = torch.load(root / f"{folder.name}.pt")
        for kind in (AutoModel, AutoModelForMaskedLM):
            model = logits_are_equal(folder, kind, logits)
        padding_changes_nothing(model)
        mistakes_are_named(model)
        texts_and_ids_are_equal(folder, wanted)
        fill = pipeline("fill-mask", model=str(folder), tokenizer=str(folder), **TRUST)
        best = fill(wanted["texts"][0][:3] + fill.tokenizer.mask_token)[0]
        assert 0 < best["score"] <= 1 and best["token"] < wanted["mask_id"]
        fine_tuning_learns(model)
        print("fine:", folder.name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
