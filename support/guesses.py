"""What others call our flags: names that work as ours, and answers to flags that cannot.

Each program is known by the name of its file. A flag that another program of ours has is answered
with that program's name, and a mistyped one with the nearest name, if there is one near enough.
"""

import difflib
import re
from pathlib import Path

from support.aliases import ALIASES

ROOT = Path(__file__).parent.parent
PROGRAMS = ("mdlm", "sample", "eval", "bench", "export", "serve")
NEAR = 0.7  # the least likeness of a name that is proposed: above 0.6, --wandb is like --dataset

# Program -> our flag -> other names that mean exactly the same.
READ_FROM = "model model_dir model_path checkpoint checkpoint_dir ckpt run run_dir"
SYNONYMS = {
    "mdlm": dict(
        data="dataset file input corpus text_file train_file train_data data_path",
        out_dir="out output output_dir save_dir run_dir",
        overwrite="force overwrite_output_dir",
        seed="random_seed",
        recompute="gradient_checkpointing activation_checkpointing",
        vocab_size="vocab n_vocab",
        n_layer="n_layers layers num_layers num_hidden_layers depth",
        n_head="n_heads heads num_heads num_attention_heads",
        n_embd="n_embed d_model hidden_size embed_dim embedding_dim width",
        block_size="context context_length context_size ctx seq_len seq_length sequence_length",
        dropout="dropout_rate",
        batch_size="batch bs bsz global_batch_size",
        gradient_accumulation_steps="grad_accum grad_accum_steps accumulation_steps accum_steps",
        max_steps="steps iters max_iters num_steps n_steps iterations train_steps max_train_steps",
        time_limit="max_time seconds max_seconds",
        weight_decay="wd",
        lora="lora_r lora_rank",
        chat_column="messages_column conversations_column",
        grad_clip="clip clip_grad max_grad_norm gradient_clip_val",
        lr_schedule="scheduler lr_scheduler lr_scheduler_type",
        warmup_steps="warmup warmup_iters num_warmup_steps lr_warmup_steps",
        ema="ema_decay",
        eval_interval="eval_every eval_steps",
        log_interval="log_every logging_steps",
        log="logger report_to",
    ),
    "sample": dict(
        out_dir=READ_FROM + " out",
        prompt="start",
        infill="template fill",
        batch="templates batch_file",
        length="max_length",
        num_samples="n samples n_samples num_return_sequences",
        steps="num_steps n_steps sampling_steps diffusion_steps",
        temperature="temp",
        top_k="topk",
        top_p="topp",
        cfg="guidance guidance_scale cfg_scale",
        seed="random_seed",
    ),
    "eval": dict(out_dir=READ_FROM + " out", data="dataset file", compare="runs"),
    "bench": dict(out_dir=READ_FROM + " out", num_samples="samples n_samples"),
    "export": dict(out_dir=READ_FROM, dest="out output output_dir destination", to="format"),
    "serve": dict(
        out_dir=READ_FROM + " out",
        api_key="key",
        origin="cors origins allow_origins allowed_origins",
        max_tokens="n_predict",
        max_active="parallel max_num_seqs np",
    ),
}

# Flags that mean nothing here -> what there is instead.
CONFIG_FILES = "there are no configuration files; each setting is a flag"
LOGGERS = (
    "a run writes its numbers to log.jsonl in its folder, one JSON object a line, and draws "
    "loss.png; mdlm.py --log=wandb or --log=tensorboard sends them there too; eval.py --compare "
    "shows several runs"
)
DEVICES = "give --device=cpu, cuda or mps"
TEXTS = "a text is given by --prompt, a text with gaps by --infill, or either without a flag"
ANSWERS = {
    "": {  # all programs
        "config config_file conf yaml": CONFIG_FILES,
        "cpu cuda gpu no_cuda use_cuda mps": DEVICES,
        "wandb wandb_log wandb_project wandb_run_name use_wandb no_wandb": LOGGERS,
        "tensorboard tb log_dir logdir": LOGGERS,
        "verbose v debug quiet q": "what a program says cannot be changed",
        "fp16 bf16 amp mixed_precision half": "--dtype gives the type of products",
    },
    "mdlm": {
        "lr max_lr": "the learning rates are --learning_rate (of AdamW) and --muon_lr (of Muon, "
        "which trains the matrices unless --optimizer=adamw)",
        "min_lr lr_decay_iters": "the rate falls to 0 at the end of the run; see --lr_schedule",
        "epochs epoch num_epochs n_epochs max_epochs num_train_epochs": "give --max_steps; an "
        "epoch has (tokens of the training text) / (--batch_size x --block_size) steps",
        "per_device_train_batch_size micro_batch_size train_batch_size": "--batch_size counts the "
        "sequences of an optimizer step on all ranks; --gradient_accumulation_steps divides it",
        "fp16 bf16 amp mixed_precision half precision": "give --dtype=bfloat16 or float32",
        "no_compile": "give --compile=off",
        "model model_name model_name_or_path": "the size is --preset, or --n_layer, --n_head and "
        "--n_embd; --init_from=FOLDER fine-tunes a run of mdlm.py or a model of Hugging Face",
        "checkpoint ckpt load load_from pretrained from_pretrained finetune": "--init_from=FOLDER "
        "fine-tunes a run of mdlm.py or a model of Hugging Face, --resume continues the run in "
        "--out_dir",
        "resume_from resume_from_checkpoint": "--resume continues the run in --out_dir",
        "val_data val_file valid_file validation_file test_file eval_data val_split": "the last "
        "tenth of --data validates",
        "dataset_name dataset_config hf_dataset": "save the data set as .jsonl or .parquet, and "
        "give that as --data",
        "name run_name exp_name experiment": "--out_dir names the run",
        "save_every save_steps save_interval": "each evaluation saves: --eval_interval",
        "num_workers workers dataloader_num_workers": "the data needs no workers; leave it out",
        "mask_ratio mask_rate mask_prob mask_probability mlm_probability": "all mask rates are "
        "learned; --rates gives other ones, such as --rates=0.15-0.15",
        "text start": "sample.py writes texts; to train on a text file give --data=FILE",
        "lora_alpha peft use_peft freeze": "--lora=8 trains adapters of rank 8 (alpha is 16) and "
        "the embedding of [MASK], with a network of Hugging Face",
    },
    "sample": {
        "max_new_tokens max_tokens new_tokens": "--length counts the tokens of the prompt too",
        "text input": TEXTS,
        "output_file out_file save": "--json and --html write files, --output a text of --fix",
        "batch_size": "as many texts are written at once as memory allows; leave it out",
        "block_length": "it is a setting of training; --block finishes as many tokens at a time",
    },
    "eval": {"output output_file out_file save": "--json writes the results, --pictures pictures"},
    "bench": {"output output_file out_file save": "--json writes the results"},
    "export": {},
    "serve": {
        "workers num_workers": "one process computes all requests together; leave it out",
        "ssl ssl_keyfile ssl_certfile": "it has no TLS; put a proxy before it that has",
    },
}


def ours(name, names, program):
    """The one of `names`, our flags, that a flag `name` means: itself or a synonym; else None."""
    name = name.replace("-", "_")
    if name in names:
        return name
    for our, others in SYNONYMS.get(program, {}).items():
        if our in names and name in others.split():
            return our
    return None


def answer(name, names, program):
    """What to do instead of a flag `name` that `program` does not have, as a part of a sentence."""
    name = name.replace("-", "_")
    for answers in (ANSWERS.get(program, {}), ANSWERS[""]):
        for asked, advice in answers.items():
            named = set(re.findall(r"--(\w+)", advice))
            if name in asked.split() and (named <= set(names) or ".py" in advice):
                return advice
    others = [f"{other}.py" for other in PROGRAMS if program and name in flags_of(other)]
    if others and name not in names:
        return f"it belongs to {', '.join(others)}"
    synonyms = " ".join(SYNONYMS.get(program, {}).values()).split()
    former = {k: new for new, old, _ in ALIASES.get(program, ()) for k in old if new in names}
    known = [*names, *synonyms, *former]
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=NEAR)
    now = former.get(near[0]) or ours(near[0], names, program) if near else ""
    return f"the nearest is --{now}" if near else ""


def flags_of(program):
    """The names of all flags of a program, as its source says. Read where a flag is refused."""
    path = ROOT / f"{program}.py"
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    return re.findall(r"^    (\w+): \w+ = opt\(", source, re.MULTILINE)
