"""Networks of the transformers library: BERT, GPT-2, Llama, Qwen ... in place of mdlm.Model."""

import contextlib

from nanomdlm.support.cli.environment import optional
from nanomdlm.support.errors import UserError


def library():
    """The transformers library, without its warnings; UserError if it is missing."""
    transformers = optional("transformers", "a network of Hugging Face")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@contextlib.contextmanager
def explain(what):
    """Context manager: turn what the library raises into a UserError of one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:  # it raises errors of all kinds
        why = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise UserError(f"{what} ({why}); give another one") from e
