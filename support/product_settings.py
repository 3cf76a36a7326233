"""The settings of products, which core programs show without importing them."""

from dataclasses import dataclass

from support.settings import Natural, Reads


@dataclass
class NetworkSettings:
    """Networks of Hugging Face."""

    network: Reads = ""  # train the architecture of this config.json from random weights
    shift: bool = False  # predict a token at the position before it, as decoders do (on for them)
    lora: Natural = 0  # train only adapters of this rank and [MASK]'s embedding (0: all weights)
    trust_remote_code: bool = False  # allow custom code from the checkpoint (never saved)
