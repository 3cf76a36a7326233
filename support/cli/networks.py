"""The door to Hugging Face networks: their settings, and how to open one. The rest is in
networks/pretrained.py, which is imported only if such a network is used."""

from dataclasses import dataclass

from nanomdlm.support.cli.settings import Natural, Reads


@dataclass
class NetworkSettings:
    """Hugging Face networks."""

    network: Reads = ""  # train the architecture of this config.json from scratch
    shift: bool = False  # predict a token at the position before it, as decoders do (on for them)
    lora: Natural = 0  # train only adapters of this rank and [MASK]'s embedding (0: all weights)
    trust_remote_code: bool = False  # allow custom code from the checkpoint (never saved)


def implied(given, settings):
    """The settings that --network or --init_from implies; {} for our own network.

    given: the flags of a new run. settings: those of its preset
    """
    from nanomdlm.support.networks import pretrained

    return pretrained.implied(given, settings)


def open_network(config, folder=None):
    """The pretrained.Network of a run with this Config; None: ours. folder: the checkpoint that it
    resumes from, or None."""
    if not config.network:
        return None
    from nanomdlm.support.networks import pretrained

    return pretrained.open_network(config, folder)


def count(model):
    """The number of all weights of a run with --lora, including those that it does not train."""
    from nanomdlm.support.networks import lora

    return lora.count(model)
