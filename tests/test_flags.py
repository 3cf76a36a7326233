"""No flag of mdlm.py is without effect: what does nothing in a run is refused before it begins."""

import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from advice import WORDS
from conftest import ROOT, read_log

import mdlm
from support import flags, plots
from support.data import sources
from support.errors import UserError
from support.training import checkpoint

TINY = dict(device="cpu", compile="off", dtype="float32", preset="cpu", n_layer=2, n_head=2)
TINY |= dict(n_embd=8, block_size=16, batch_size=4, dropout=0.1, max_steps=2, warmup_steps=1)
TINY |= dict(log_interval=1, eval_interval=2, eval_windows=2)

# Where a flag may do something: name -> flags; {names} are files of the fixture `files`.
CONTEXTS = {
    "text": dict(data="{text}"),
    "one layer": dict(data="{text}", n_layer=1),
    "AdamW": dict(data="{text}", optimizer="adamw"),
    "word": dict(data="{text}", tokenizer="word"),
    "bpe": dict(data="{text}", tokenizer="bpe", vocab_size=280),
    "byte": dict(data="{text}", tokenizer="byte"),
    "file": dict(data="{words}", tokenizer="{tokenizer}"),
    "patterns": dict(data="patterns", block_size=64),
    "ar": dict(data="{text}", objective="ar"),
    "bernoulli": dict(data="{text}", masking="bernoulli"),
    "cosine": dict(data="{text}", rates="cosine"),
    "clipped": dict(data="{text}", rates="0.3-0.8"),
    "uniform weights": dict(data="{text}", loss_weight="uniform"),
    "time": dict(data="{text}", time_conditioning=True),
    "blocks": dict(data="{text}", block_length=4),
    "blocks of one": dict(data="{text}", block_length=1),
    "blocks and whole": dict(data="{text}", block_length=4, infill_share=0.5),
    "documents": dict(data="{records}"),
    "documents predicted": dict(data="{records}", document_length="predicted"),
    "documents apart": dict(data="{records}", pack=False),
    "documents ar": dict(data="{records}", objective="ar"),
    "documents in blocks": dict(data="{records}", block_length=4),
    "documents of a file": dict(data="{records}", tokenizer="{tokenizer}", end="[EOT]"),
    "separator": dict(data="{text}", separator=" "),
    "prompts": dict(data="{records}", prompt_column="prompt", block_size=64),
    "texts in a folder": dict(data="{folder}"),
    "ids": dict(data="{ids}"),
    "ids of documents": dict(data="{ids}", end="3"),
    "ids that mdlm.py prepared": dict(data="{text run}/data"),
    "documents that mdlm.py prepared": dict(data="{documents run}/data"),
    "init_from": dict(data="{text}", init_from="{text run}"),
}
# Another value for each flag.
VALUES = dict(init_from="{text run}", preset="gpu", seed=1, dtype="bfloat16", max_steps=1)
VALUES |= dict(gradient_accumulation_steps=2, tokenizer="byte", vocab_size=300, n_layer=3, n_head=1)
VALUES |= dict(n_embd=16, block_size=8, dropout=0.5, attention_every=1, conv=3, pos="learned")
VALUES |= dict(tie=True, batch_size=8, rate_margin=0.3, optimizer="adamw", muon_lr=0.1)
VALUES |= dict(learning_rate=0.02, lr_schedule="linear", warmup_steps=2, weight_decay=0.5)
VALUES |= dict(grad_clip=0.01, ema=0.01, eval_interval=1, eval_windows=1, log_interval=2)
VALUES |= dict(text_column="other", max_bad_records=0, separator=", ", end="1", pack=True)
VALUES |= dict(document_length="predicted", prompt_column="prompt", bin_dtype="uint8")
VALUES |= dict(block_length=8, infill_share=1, rates="0.2-0.7", masking="bernoulli")
VALUES |= dict(loss_weight="uniform", objective="ar", time_conditioning=True, periods="2-5")
# Where those would only say what happens anyway, or are taken otherwise.
OTHER_VALUES = {
    **{(context, "pack"): False for context in CONTEXTS if "documents" in context},
    **{(context, "pack"): False for context in ("separator", "texts in a folder")},
    **{(context, "pack"): True for context in ("documents predicted", "documents ar")},
    ("documents in blocks", "pack"): True,
    ("documents in blocks", "document_length"): "given",
    ("prompts", "document_length"): "given",
    ("patterns", "preset"): "gpt2",
    ("patterns", "attention_every"): 2,
    ("patterns", "lr_schedule"): "constant",
    ("one layer", "attention_every"): 2,
}
# Flags whose effect these runs do not show.
UNSEEN = dict(
    data="every context has its own",
    out_dir="it says where a run is",
    resume="it needs a run that has begun",
    overwrite="it allows to replace a run, and does nothing where there is none",
    time_limit="what it changes depends on the clock",
    device="there may be a single one",
    kernels="all give the same numbers, and Triton needs a GPU",
    compile="the numbers are the same, and the compiler is slow",
    recompute="the numbers are the same, in less memory",
    shard="it needs several ranks",
    network="it contradicts the flags of a tiny run; see test_pretrained.py",
    shift="it is for networks of others; see test_pretrained.py",
    chat_column="it is for networks of others; see test_chat.py",
    lora="it is for networks of others; see test_lora.py",
    trust_remote_code="it is for networks of others; see test_remote_code.py",
    log="it needs a package, and the numbers are the same",
)
# What no rule is about, so a third of the contexts will do.
ALWAYS = ["gradient_accumulation_steps", "n_layer", "n_head", "n_embd", "dropout", "conv", "pos"]
ALWAYS += ["tie", "batch_size", "seed", "optimizer", "learning_rate", "lr_schedule", "warmup_steps"]
ALWAYS += ["weight_decay", "grad_clip", "ema", "dtype", "max_steps", "eval_interval"]
ALWAYS += ["eval_windows", "log_interval"]
PAIRS = [
    pytest.param(context, name, id=f"{context}: {name}")
    for (i, context), name in itertools.product(enumerate(CONTEXTS), VALUES)
    if name not in CONTEXTS[context] and (name not in ALWAYS or (i + ALWAYS.index(name)) % 3 == 0)
]
REPORT = mdlm.report
make_patterns = functools.cache(sources.make_patterns)
IDS = np.arange(600, dtype=np.uint16) % 7


def write_records(path):
    words = itertools.cycle(["some words", "words , some", "some , some words", ""])
    records = [
        dict(prompt=f"{text} ,", text=text, other="words") for _, text in zip(range(99), words)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="session")
def files(pydoc, tmp_path_factory):
    """Texts, ids and runs of several kinds, by name; not to be changed."""
    at = tmp_path_factory.mktemp("flags")
    (at / "text").write_text(pydoc[:3000], encoding="utf-8")
    (at / "words").write_text("some words, " * 400)
    (at / "tokenizer.json").write_text(WORDS)
    write_records(at / "records.jsonl")
    for folder in ("folder", "ids"):
        (at / folder).mkdir()
    for i in range(60):
        (at / "folder" / f"{i}.txt").write_text(pydoc[i * 9 : i * 9 + i % 9], encoding="utf-8")
    for name in ("train.bin", "val.bin"):
        IDS.tofile(at / "ids" / name)
    found = {path.name.partition(".")[0]: str(path) for path in at.iterdir()}
    for name, context in (("text run", "text"), ("documents run", "documents")):
        found[name] = str(at / name)
        outcome_of(CONTEXTS[context], found, at / name)
    return found


def outcome_of(given, files, out):
    """What comes of a tiny run with these flags: its log, tensors and data; or a refusal.

    Nothing is synced or drawn.
    """
    given = TINY | given
    argv = [f"--{name}={str(value).format_map(files)}" for name, value in given.items()]
    with contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(plots, "try_to_draw", lambda *args: None)
        patch.setattr(mdlm, "show_samples", lambda *args: None)
        patch.setattr(sources, "make_patterns", make_patterns)
        patch.setattr(mdlm, "report", lambda run, **settings: run.step and REPORT(run, **settings))
        try:
            mdlm.train(mdlm.parse_args([*argv, f"--out_dir={out}"]), time.monotonic())
        except UserError as e:
            return str(e)
        finally:
            checkpoint.release()
    log = [
        {name: value for name, value in record.items() if "second" not in name}
        for record in read_log(out)
    ]
    folder = checkpoint.find_checkpoint(out)
    read = [*out.glob("data/*.bin"), folder / "model.safetensors", folder / "state.safetensors"]
    return log, [hashlib.sha256(path.read_bytes()).hexdigest() for path in read]


@pytest.fixture(scope="session")
def baseline(files, tmp_path_factory):
    """A function of the name of a context: what comes of it without more flags."""
    found = {}

    def of(context):
        if context not in found:
            out = tmp_path_factory.mktemp("baseline") / "out"
            found[context] = outcome_of(CONTEXTS[context], files, out)
        return found[context]

    return of


def does_something(context, name, files, baseline, out):
    """Whether a flag changes what comes of a context, or contradicts it; False if it is refused as
    one without effect. Fails for a flag that does nothing."""
    before = baseline(context)
    assert not isinstance(before, str), before
    value = OTHER_VALUES.get((context, name), VALUES[name])
    after = outcome_of(CONTEXTS[context] | {name: value}, files, out)
    assert after != before, f"--{name}={value} does nothing"
    if not isinstance(after, str) or f"--{name} has no effect with --" not in after:
        return True
    assert not out.exists(), "it is refused before anything is written"
    return False


@pytest.mark.parametrize("context, name", PAIRS[::23])
def test_flag_without_effect_is_refused(context, name, files, baseline, tmp_path):
    does_something(context, name, files, baseline, tmp_path / "out")


@pytest.mark.slow
def test_no_flag_is_without_effect(files, baseline, tmp_path):
    """Every flag in every context; and each does something in one of them."""
    wrong = []
    used = set()
    for i, pair in enumerate(PAIRS):
        context, name = pair.values
        try:
            if does_something(context, name, files, baseline, tmp_path / str(i)):
                used.add(name)
        except AssertionError as e:
            wrong.append(f"{context}: {e}")
    assert not wrong, "\n".join(wrong)
    assert used == VALUES.keys()


def test_every_flag_is_tried():
    names = {field.name for field in dataclasses.fields(mdlm.Config)}
    assert names == VALUES.keys() | UNSEEN.keys()


def test_flag_without_effect_is_refused_on_resume(files, tmp_path):
    """A changed rate that nothing uses; what repeats the run's own settings is accepted."""
    outcome_of(dict(data="{text}", optimizer="adamw"), files, tmp_path / "out")
    before = (tmp_path / "out" / "log.jsonl").read_bytes()
    said = outcome_of(dict(resume=True, muon_lr=0.5), files, tmp_path / "out")
    assert said.startswith("--muon_lr has no effect with --optimizer=adamw; leave it out")
    assert (tmp_path / "out" / "log.jsonl").read_bytes() == before
    again = outcome_of(dict(resume=True, muon_lr=0.02, max_steps=3), files, tmp_path / "out")
    assert not isinstance(again, str), again


@pytest.mark.parametrize("given", ["pack=false", "rate_margin=0", "vocab_size=0", "shard=0"])
def test_flag_that_asks_for_nothing_is_accepted(given):
    name, _, _ = given.partition("=")
    given = mdlm.parse_args([f"--{given}"])
    assert flags.without_off(mdlm.Config, given) == {}
    flags.check_effects(flags.without_off(mdlm.Config, given), [(name, False, "here")])


@pytest.mark.parametrize("flag", ["data", "out_dir", "max_steps", "end"])
def test_two_dashes_are_no_value(flag):
    with pytest.raises(UserError, match=f"--{flag}=-- is not accepted"):
        mdlm.parse_args([f"--{flag}=--"])


def test_a_config_without_settings_says_so(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"format": "mdlm", "version": 1}')
    with pytest.raises(UserError, match="has no settings"):
        checkpoint.read_settings(path, {"seed"})


@pytest.mark.parametrize("flag", ["--MASK_SCHEDULE=cosine", "--mask_shedule=cosine"])
def test_former_names_are_near_too(flag):
    with pytest.raises(UserError, match=r"no flag .*; the nearest is --rates "):
        mdlm.main([flag])


@pytest.mark.parametrize(
    "program", ["mdlm", "sample", "eval", "bench", "export", "serve", "lessons/facts"]
)
def test_help_needs_no_docstrings(program):
    command = [sys.executable, "-OO", f"{program}.py", "--help"]
    r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 0 and "usage:" in r.stdout and not r.stderr
