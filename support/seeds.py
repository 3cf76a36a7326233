"""Random generators by key: each draw of a run has its own, on every rank and on resume."""

import hashlib

import torch


def seed(*key):
    """A number for a key such as ("levels", seed, step): the same on all ranks and on resume."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key):
    return torch.Generator().manual_seed(seed(*key))


def seed_device(device, *key):
    """Seed the device's own generator, for dropout; torch.manual_seed seeds all devices."""
    source = torch.default_generator if device.type == "cpu" else torch.get_device_module(device)
    source.manual_seed(seed(*key))
