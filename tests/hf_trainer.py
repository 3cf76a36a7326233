"""What a user of an exported model runs to fine-tune it: the Trainer of transformers, alone.

    python -I tests/hf_trainer.py FOLDER

FOLDER holds exported models of a network of bytes. Trains each on a CPU, saves it as NAME-tuned,
and beside it NAME-tuned.pt, the logits (as it is in memory) of one batch. Prints a line for each
model for which the promises hold, and fails at the first that does not.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    logging,
)

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()
warnings.simplefilter("ignore")
TRUST = dict(trust_remote_code=True)


def texts_of(tokenizer, model):
    """Texts of several lengths, so that batches are padded; [END] is last where it is given."""
    end = tokenizer.eos_token if model.config.end_id >= 0 else ""
    texts = ["to be or not to be"[:n] + end for n in (18, 12, 7, 15)] * 8
    return [dict(tokenizer(text)) for text in texts]


def random_words_of_the_collator_are_never_padding(tokenizer, model, texts):
    """Its ids are below len(tokenizer), so some are [PAD]: the model reads these as [MASK]."""
    collate = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.5, mask_replace_prob=0.0, random_replace_prob=1.0, seed=0
    )
    found = 0
    for _ in range(40):
        batch = collate(texts)
        assert batch["input_ids"].max() < len(tokenizer) == model.config.vocab_size
        scored = batch["labels"] != -100
        assert (batch["attention_mask"][scored] == 1).all()
        padding = scored & (batch["input_ids"] == tokenizer.pad_token_id)
        found += int(padding.sum())
        if padding.any():
            masked = batch["input_ids"].masked_fill(padding, tokenizer.mask_token_id)
            with torch.no_grad():
                output, wanted = model(**batch), model(**batch | dict(input_ids=masked))
            assert torch.equal(output.logits, wanted.logits) and output.loss == wanted.loss
    assert found > 0


def trainer_of(folder, texts, out, **settings):
    model = AutoModelForMaskedLM.from_pretrained(folder, **TRUST)
    tokenizer = AutoTokenizer.from_pretrained(folder, **TRUST)
    defaults = dict(
        max_steps=30,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        seed=0,
    )
    return Trainer(
        model,
        TrainingArguments(str(out), **defaults | settings),
        train_dataset=texts,
        eval_dataset=texts,
        data_collator=DataCollatorForLanguageModeling(tokenizer),
        processing_class=tokenizer,
    )


def loss_falls(trainer):
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    assert len(losses) == trainer.args.max_steps and torch.tensor(losses).isfinite().all()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.7 * before, (before, after)


def training_goes_on_from_its_checkpoint(folder, texts, out):
    settings = dict(max_steps=8, save_strategy="steps", save_steps=4)
    whole = trainer_of(folder, texts, out, **settings)
    whole.train()
    rest = trainer_of(folder, texts, out, **settings)
    rest.train(resume_from_checkpoint=str(out / "checkpoint-4"))
    assert rest.state.global_step == 8
    for (name, a), b in zip(whole.model.named_parameters(), rest.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=0), name


def checkpointing_is_refused(folder, texts, out):
    try:
        trainer_of(folder, texts, out, gradient_checkpointing=True).train()
    except ValueError as e:
        assert "does not support" in str(e) and "\n" not in str(e), e
    else:
        raise AssertionError("gradient checkpointing was accepted")


def folder_is_complete(folder, like):
    names = {"config.json", "model.safetensors", "modeling_mdlm.py", "tokenizer.json"}
    names |= {"tokenizer_config.json"}
    assert names <= {path.name for path in folder.iterdir()}
    config, first = (json.loads((f / "config.json").read_text()) for f in (folder, like))
    assert config["auto_map"] == first["auto_map"]


def main(root):
    folders = sorted(path.parent for path in root.glob("*/config.json"))
    for folder in folders:
        torch.manual_seed(0)
        out = root / f"{folder.name}-checkpoints"
        trainer = trainer_of(folder, None, out)
        model, tokenizer = trainer.model, trainer.processing_class
        texts = texts_of(tokenizer, model)
        random_words_of_the_collator_are_never_padding(tokenizer, model.eval(), texts)
        loss_falls(trainer_of(folder, texts, out, gradient_accumulation_steps=2))
        training_goes_on_from_its_checkpoint(folder, texts, out)
        checkpointing_is_refused(folder, texts, out)
        trainer = trainer_of(folder, texts, out)
        loss_falls(trainer)
        tuned = folder.with_name(f"{folder.name}-tuned")
        trainer.save_model(tuned)
        folder_is_complete(tuned, folder)
        x = torch.tensor([texts[0]["input_ids"]])
        x[:, :9:2] = tokenizer.mask_token_id
        with torch.no_grad():
            torch.save((x, trainer.model.eval()(x).logits), f"{tuned}.pt")
        print("fine:", folder.name, flush=True)
    for folder in folders:  # last: accelerate keeps the precision of a process
        trainer = trainer_of(folder, None, root / "bf16", bf16=True)
        trainer.train_dataset = trainer.eval_dataset = texts_of(
            trainer.processing_class, trainer.model
        )
        loss_falls(trainer)
        print("fine in bf16:", folder.name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
