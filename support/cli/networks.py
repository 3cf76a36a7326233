"""The door to pretrained networks: settings, what flags imply, and what opens one. The rest is in
support/networks/, which is imported only where such a network is asked for."""

from dataclasses import dataclass
from pathlib import Path

from nanomdlm.support.cli import files
from nanomdlm.support.cli.environment import optional
from nanomdlm.support.cli.settings import Natural, Reads
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import checkpoint

FILE = "network.json"  # in checkpoints
CONTEXT = 512  # tokens that a model sees which was not trained here, if it has as many positions
# What suits weights that are trained already (docs/pretrained.md), and what an architecture that is
# not ours.
FINE_TUNING = dict(optimizer="muon", learning_rate=3e-4, muon_lr=0.01, weight_decay=0.01)
LORA = dict(optimizer="adamw", learning_rate=3e-3, weight_decay=0.0)
FROM_NOTHING = dict(optimizer="muon", learning_rate=1e-3, muon_lr=0.02, weight_decay=0.1)


@dataclass
class NetworkSettings:
    """Hugging Face networks."""

    network: Reads = ""  # train the architecture of this config.json from scratch
    shift: bool = False  # predict a token at the position before it, as decoders do (on for them)
    lora: Natural = 0  # train only adapters of this rank and [MASK]'s embedding (0: all weights)
    trust_remote_code: bool = False  # allow custom code from the checkpoint (never saved)


def find_network(given):
    """The Network that the flags of a new run ask for; None: ours."""
    from nanomdlm.support.networks import network

    source = given.get("init_from")
    is_trusted = given.get("trust_remote_code", False)
    if given.get("network"):
        if source:
            raise UserError("--init_from brings a network; leave --network out")
        return network.read(Path(given["network"]), is_trusted)
    if checkpoint.is_foreign(source):
        found = network.read(Path(source) / "config.json", is_trusted)
        found.folder = Path(source)
        return found
    path = file_of_run(source)
    found = network.read(path, is_trusted) if path else None
    if found and found.base:
        raise UserError(f"--init_from={source} is a run with --lora; export it, and give that")
    return found


def file_of_run(source, name=FILE):
    """The file of this name in a run's newest checkpoint, or in a checkpoint; None if none is."""
    folders = [Path(source), *checkpoint.checkpoints(source)]
    return next((p / name for p in folders if (p / name).exists()), None)


def open_network(config, folder=None):
    """The Network of a run with this Config; None: ours. folder: the checkpoint that it resumes
    from, or None."""
    if not config.network:
        return None
    from nanomdlm.support.networks import network

    in_parts = bool(config.shard)
    is_trusted = config.trust_remote_code
    if folder and not checkpoint.is_foreign(folder):
        return network.read(folder / FILE, is_trusted).open_checkpoint(folder, in_parts)
    source = dict(init_from=config.init_from) if config.init_from else dict(network=config.network)
    found = find_network(source | dict(trust_remote_code=is_trusted))
    return found.open(in_parts, is_base=bool(config.lora))


def config_of(new, folder):
    """The Config of a model of the transformers library as it is: a decoder predicts the next
    token, an encoder masked ones, and an export of ours what it was trained for.

    new(given): the Config of a run with these flags.
    """
    found = find_network(dict(init_from=str(folder)))
    given = dict(init_from=str(folder), data="", device="cpu")
    is_diffusion = files.read_json(folder / "config.json", "network").get("is_causal") is False
    if found.is_decoder and not is_diffusion:
        given |= dict(objective="ar")
    positions = getattr(found.config, "max_position_embeddings", CONTEXT) - found.first_position
    if positions < 1:
        raise UserError(f"{folder / 'config.json'} has no positions for a text; give another model")
    return new(given | dict(block_size=min(CONTEXT, positions)))


def implied(given, settings):
    """The settings that a pretrained network implies, beside those of the preset; {} for ours.

    given: the flags of a new run. Raises UserError for flags that do not go with such a network.
    """
    network = find_network(given)
    if network is None:
        return {}
    source = given.get("init_from")
    sizes = network.config
    positions = getattr(sizes, "max_position_embeddings", None) or 1 << 16
    positions -= network.first_position
    check_flags(given, network, positions)
    result = dict(n_layer=sizes.num_hidden_layers, n_head=sizes.num_attention_heads)
    result |= dict(n_embd=sizes.hidden_size, attention_every=1, conv=0, pos="learned", tie=False)
    result |= dict(dropout=0.0, block_size=min(settings["block_size"], positions))
    result |= FINE_TUNING if source else FROM_NOTHING
    result |= LORA if given.get("lora") else {}
    is_shifted = False
    if network.folder:
        result["network"] = str(network.folder / "config.json")
        result["tokenizer"] = str(network.folder / "tokenizer.json")
        is_shifted = getattr(sizes, "mdlm_shift", network.is_decoder)
        if not Path(result["tokenizer"]).exists():
            raise UserError(f"--init_from={source} has no tokenizer.json (of a fast tokenizer)")
    elif source:
        path = file_of_run(source)
        result["network"] = str(path)
        was = files.read_json(path.with_name("config.json"), "config")["config"]
        is_shifted = bool(was.get("shift")) or was.get("objective") == "ar"
    result["shift"] = is_shifted and given.get("objective") != "ar"
    return result


def check_flags(given, network, positions):
    """Raise UserError for flags that do not fit a pretrained network."""
    kind = f"a network of model_type {network.config.model_type}"
    wrong = [f"--{name}" for name in ("block_length", "shift") if given.get(name)]
    wrong += ["--objective=ar"] if given.get("objective") == "ar" else []
    wrong = [flag for flag in wrong if flag != "--shift" or not network.code]
    if wrong and not network.is_decoder:
        raise UserError(f"{wrong[0]} does not work with {kind}, an encoder; leave it out")
    if given.get("lora"):
        optional("peft", "--lora")
        if not network.folder:
            what = f"--lora={given['lora']} needs --init_from=FOLDER with a model of Hugging Face"
            raise UserError(f"{what}; `export.py --to=hf` makes one of a run")
    if positions < given.get("block_size", 0):
        raise UserError(f"--block_size={given['block_size']}, but {kind} has {positions} positions")
