"""Triton kernels for the operations special to masked diffusion: masking, cross-entropy, attention.

operations.py chooses between them and their PyTorch equivalents, which are in reference.py.

Hugging Face has a package called kernels too, which transformers imports if it is installed. So
this project imports this folder as support.kernels (see support/__init__.py). `import kernels` in
the project's folder gives Hugging Face's package if it is installed, else the modules of
support.kernels. Those must be the same objects, because an operator can be registered only once in
a process.
"""

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path


def find_other():
    """Return the spec of another installed package called kernels, or None."""
    project = Path(__file__).resolve().parent.parent
    elsewhere = [folder for folder in sys.path if Path(folder).resolve() != project]
    for finder in sys.meta_path:
        spec = finder.find_spec("kernels", elsewhere) if hasattr(finder, "find_spec") else None
        if spec and spec.origin and Path(spec.origin).resolve() != Path(__file__).resolve():
            return spec
    return None


def hand_over():
    """Replace this module in sys.modules, so that `import kernels` returns the right package."""
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
        norm_conv,
        norm_conv_ref,
        select,
    )
    from .reference import residual_dropout_ref  # noqa: F401
    from .residual import residual_dropout  # noqa: F401
