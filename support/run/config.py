"""The settings of a run: from its flags, or of the checkpoint that it resumes; which ones fit.

mdlm.Config is a dataclass of all settings, whose `presets` are {name: {setting: value}}.
"""

import contextlib
import dataclasses
import functools
import os

from nanomdlm.support.cli import devices, hub, networks, settings
from nanomdlm.support.cli.settings import NO_LIMIT
from nanomdlm.support.data import patterns, sources
from nanomdlm.support.data.tokenizer import KINDS
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import checkpoint

# What --resume may change of the numbers that a run computes. The log says so.
CHANGEABLE = ("batch_size", "learning_rate", "muon_lr", "weight_decay", "grad_clip", "dtype")
# What it may change without changing a number.
RESUMABLE = ("out_dir", "resume", "device", "kernels", "compile", "shard", "recompute")
RESUMABLE += ("max_steps", "time_limit", "gradient_accumulation_steps", "trust_remote_code")
RESUMABLE += ("eval_interval", "eval_windows", "log_interval", "tracker")
# What must be as in the network that --init_from names, and is taken from there.
NETWORK = ("n_layer", "n_head", "n_embd", "attention_every", "conv", "pos", "tie")
NETWORK += ("time_conditioning",)


# ---- New runs
def parse(Config, argv, doc):
    """The flags in argv, as a dict of settings. doc: of the program, which --help shows."""
    preset = devices.default_preset("auto")
    default = Config(**Config.presets[preset] | dict(preset=preset))
    core, *_ = groups = Config.__bases__  # --help=all shows each with a title
    description = functools.partial(describe, Config, doc)
    return settings.parse(Config, argv, description, default, groups, short=(core,))


def describe(Config, doc):
    """What --help says before the flags: the program, its presets, when a run ends."""
    title = "\n\n".join((doc or "").split("\n\n")[:2])  # with the commands that follow it
    for name, values in Config.presets.items():
        changed = " ".join(f"{k}={settings.in_short(v)}" for k, v in values.items())
        title += f"\n\n--preset={name}: {changed or 'the defaults'}"
    return (
        f"{title}\n\nA run ends after --max_steps or --time_limit, without both as its preset says."
    )


def located(given):
    """The given flags, with paths in place of names of models and data on a hub."""
    found = {}
    if given.get("init_from"):
        found["init_from"] = str(hub.local(given["init_from"]))
    if given.get("data", "").startswith(hub.DATASETS):
        found["data"] = hub.dataset(given["data"])
    return given | found


def new(Config, given):
    """The Config of a new run: the given flags, over its preset and what they imply."""
    given = located(given)
    preset = given.get("preset", "auto")
    if preset == "auto":
        preset = devices.default_preset(given.get("device", "auto"))
    implied = dict(Config.presets[preset])
    if given.get("data") == "patterns":
        implied |= patterns.IMPLIED
    if given.get("init_from"):
        implied |= inherited(given, settings.types_of(Config))
    if given.get("network") or given.get("init_from"):
        implied |= networks.implied(given, implied)
    config = Config(**implied | given | {"preset": preset})
    config.prompt_column = config.prompt_column or config.chat_column
    choose_end(config, given, Config(**implied))
    if config.prompt_column or config.block_length not in (0, config.block_size):
        # Blocks and answers are written until [END], so the model must predict it.
        config.document_length = given.get("document_length", "predicted")
    return config


def inherited(given, known):
    """The architecture of the run or checkpoint that --init_from names; {} if it is not ours.

    known: the names of all settings
    """
    source = given["init_from"]
    if checkpoint.is_foreign(source):
        return {}
    path = networks.file_of_run(source, "config.json")
    if path is None:
        return {}  # load says what is missing
    was = checkpoint.read_settings(path, known)
    return {name: was[name] for name in (*NETWORK, "block_size") if name in was}


def choose_end(config, given, before):
    """Set config.max_steps and time_limit by the given flags and the Config `before`.

    before: of the preset, or of the run that is resumed. If it ends by steps alone or by the clock
    alone, and the other flag is given, that one alone ends the run. --time_limit=0 without
    --max_steps gives the default number of steps.
    """
    config.max_steps = given.get("max_steps", before.max_steps)
    config.time_limit = given.get("time_limit", before.time_limit)
    if "max_steps" in given and "time_limit" not in given and before.max_steps == NO_LIMIT:
        config.time_limit = 0.0
    if config.time_limit and not before.time_limit and "max_steps" not in given:
        config.max_steps = NO_LIMIT
    if not config.time_limit and "max_steps" not in given and config.max_steps == NO_LIMIT:
        config.max_steps = type(config).max_steps


# ---- Checkpoints, and runs that are resumed
def read(Config, folder):
    """The Config of a checkpoint, or of a model of the transformers library; it trusts no code."""
    if checkpoint.is_foreign(folder):
        return networks.config_of(lambda given: new(Config, given), folder)
    path = folder / "config.json"
    values = checkpoint.read_settings(path, settings.types_of(Config))
    config = Config(**values | {"trust_remote_code": False})
    try:
        settings.check(config)
    except UserError as e:
        raise UserError(f"{path}: {e}") from e
    return config


def resumed(old, given):
    """The Config `old` of a checkpoint with the given flags, and what they change of its numbers.

    The changes: name -> (old, new).
    """
    given = located(given)
    out = given.get("out_dir", "out")
    changes = {}
    for name, value in given.items():
        was = getattr(old, name)
        if name in CHANGEABLE:
            if value not in (was, "auto"):
                changes[name] = value
        elif name in RESUMABLE:
            changes[name] = value
        elif value not in (was, "auto") and not is_same_path(name, value, was):
            fix = "leave the flag out, or start again with --overwrite"
            was = "none" if was == "" else was
            raise UserError(f"--{name}={value} contradicts the run in {out}, with {was}; {fix}")
    config = dataclasses.replace(old, **changes | dict(out_dir=str(out), overwrite=False))
    choose_end(config, given, old)
    return config, {k: (getattr(old, k), v) for k, v in changes.items() if k in CHANGEABLE}


def is_same_path(name, value, was):
    """Whether two values of a setting name the same file or folder."""
    if name not in ("data", "tokenizer", "init_from", "network") or not (value and was):
        return False
    if {value, was} & {*sources.BUILT_IN, *KINDS}:  # these name no file
        return False
    with contextlib.suppress(OSError):
        return os.path.samefile(value, was)
    return os.path.abspath(value) == os.path.abspath(was)  # it is gone


# ---- Checks
def check(config, world=1):
    """Raise UserError for settings that cannot work on `world` ranks, whatever the variants."""
    settings.check(config)
    heads = 2 * config.n_head
    if config.n_embd % heads and not config.network:
        raise UserError(f"--n_embd={config.n_embd} must be a multiple of {heads}, twice --n_head")
    divisor = 2 * world * config.gradient_accumulation_steps
    if config.batch_size % divisor:
        why = f"2 (mirrored pairs) x {world} rank(s) x --gradient_accumulation_steps"
        raise UserError(f"--batch_size={config.batch_size} must be a multiple of {divisor}: {why}")
    if config.tokenizer not in KINDS and not config.tokenizer.endswith(".json"):
        accepted = f"{', '.join(KINDS)} or a tokenizer.json"
        raise UserError(f"--tokenizer={config.tokenizer} is not accepted; give {accepted}")
    if config.network and config.time_conditioning:
        raise UserError(f"--time_conditioning does not work with --network={config.network}")
    if config.data == "patterns":
        patterns.check(config)
    if config.chat_column and config.prompt_column != config.chat_column:
        raise UserError("--chat_column and --prompt_column contradict each other; give one of them")
    if config.prompt_column == config.text_column and not config.chat_column:
        raise UserError(f"--prompt_column={config.prompt_column} is also --text_column; name two")


def check_idle(config, given, before):
    """Raise UserError for a flag that seems to take effect, but does not.

    before: the Config that the flags change; a flag with its value changes nothing.
    """
    is_ar = config.objective == "ar"
    names = ("masking", "rates", "loss_weight")
    other = next((n for n in names if getattr(config, n) != getattr(type(config), n)), "")
    sized = "n_layer n_head n_embd attention_every conv pos tie"
    rules = [
        ("masking rates loss_weight rate_margin", is_ar, "with --objective=ar, which has no masks"),
        ("rate_margin", other, f"with --{other}, which sets the mask rates of the whole run"),
        (
            "rate_margin",
            config.time_conditioning,
            "with --time_conditioning, which learns all rates",
        ),
        ("muon_lr", config.optimizer != "muon", f"with --optimizer={config.optimizer}"),
        (sized, config.network, f"with --network={config.network}, which determines it"),
        ("shift lora", not config.network, "with the network of mdlm.py"),
    ]
    asked = {k: v for k, v in given.items() if v and v != getattr(before, k)}
    settings.check_idle(asked, rules)


def check_source(config, given):
    """Raise UserError for flags that do not fit the source of the data or the weights."""
    if config.prompt_column and not sources.is_records(config.data):
        flag = "--chat_column" if config.chat_column else "--prompt_column"
        raise UserError(f"--data={config.data} has no columns; leave {flag} out")
    if given.get("tokenizer", "").endswith(".json") and sources.is_ids(config.data):
        fix = "put that file there as tokenizer.json, and leave --tokenizer out"
        raise UserError(f"--data={config.data} is a folder of ids; {fix}")
    if config.init_from and "tokenizer" in given:
        raise UserError("--init_from brings a tokenizer; leave --tokenizer out")
    if config.init_from:
        checkpoint.check_source(config.init_from)


def check_network(config, source):
    """Raise UserError unless `source`, what --init_from loads, fits a run's network and data."""
    _, tokenizer, other = source
    positions_are_ours = config.pos == "learned" and not config.network
    names = NETWORK + ("block_size",) * positions_are_ours
    different = [name for name in names if getattr(other, name) != getattr(config, name)]
    if different:
        values = " and ".join(f"{name}={getattr(other, name)!r}" for name in different)
        raise UserError(f"--init_from={config.init_from} has {values}; give the same here")
    with_end = tokenizer.end_id is not None
    if not sources.is_ids(config.data) and with_end != sources.has_documents(config):
        what = "documents; give such data" if with_end else "a text without [END]; give a text"
        raise UserError(f"--init_from={config.init_from} was trained on {what}")
