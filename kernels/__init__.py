"""The three operations special to masked diffusion, in Triton: masking, cross-entropy, attention.

operations.py chooses between them and their PyTorch twins, which are in reference.py.

A package of Hugging Face is called kernels too, and transformers imports it where it is installed.
So this project imports the folder as support.kernels (see support/__init__.py). `import kernels` in
the project's folder gives that package if it is installed, else the modules of support.kernels:
the same objects, as Triton's operators can be registered only once in a process.
"""

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path


def find_other():
    """The spec of an installed package that is called kernels too, or None."""
    project = Path(__file__).resolve().parent.parent
    elsewhere = [folder for folder in sys.path if Path(folder).resolve() != project]
    for finder in sys.meta_path:
        spec = finder.find_spec("kernels", elsewhere) if hasattr(finder, "find_spec") else None
        if spec and spec.origin and Path(spec.origin).resolve() != Path(__file__).resolve():
            return spec
    return None


def hand_over():
    """Put what `import kernels` shall give in the place of this module: Python returns that."""
    other = find_other()
    if other:
        sys.modules["kernels"] = importlib.util.module_from_spec(other)
        other.loader.exec_module(sys.modules["kernels"])
        return
    own = importlib.import_module("support.kernels")
    for module in pkgutil.iter_modules(own.__path__):
        name = module.name
        sys.modules[f"kernels.{name}"] = importlib.import_module(f"support.kernels.{name}")
    sys.modules["kernels"] = own


if __name__ == "kernels":
    hand_over()
else:
    from .operations import (  # noqa: F401
        REFERENCES,
        TRITON,
        attention,
        attention_of_documents,
        attention_ref,
        linear_cross_entropy,
        linear_cross_entropy_ref,
        mask_tokens,
        mask_tokens_ref,
        neighbours,
        select,
    )
