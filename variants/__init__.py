"""Variants of masked diffusion. Each wraps the default objective, MaskedDiffusion of mdlm.py.

An objective says two things: what the network is shown (a support.view.View), and which tokens
count how much. A variant changes some of that and leaves the rest to the objective that it wraps.
`choose` is the only place that lists them.
"""

from support.errors import UserError

from . import blocks, rates
from .autoregressive import Autoregressive
from .blocks import BlockDiffusion
from .documents import Documents, Prompts
from .prompts_in_blocks import PromptsInBlocks
from .rates import OtherRates
from .time_conditioning import TimeConditioned


def choose(config, default, end_id=None, mean_length=None):
    """The objective of a config: `default`, wrapped by the variants that the settings ask for.

    end_id: the id of [END] if the data have documents, else None. mean_length: of the texts of the
    training windows, in tokens; a model that only predicts does not need it.
    """
    check_together(config, end_id is not None and not config.prompt_column)
    objective = default
    texts = (end_id, mean_length)
    if config.objective == "ar":
        is_given = config.document_length == "given"
        return Autoregressive(objective, *(texts if is_given else (None, None)))
    if rates.are_other(config):
        objective = OtherRates(objective)
    if end_id is not None and config.prompt_column:
        objective = Prompts(objective, *texts)
    elif end_id is not None and config.document_length == "given":
        objective = Documents(objective, *texts)
    if blocks.are_asked(config):
        answers = end_id is not None and config.prompt_column
        objective = PromptsInBlocks(objective) if answers else BlockDiffusion(objective)
    if config.time_conditioning:
        objective = TimeConditioned(objective)
    return objective


# ---- What cannot be combined: (variant, variant) -> why
REFUSED = {
    ("ar", "blocks"): "an autoregressive model writes token by token",
    ("ar", "prompts"): "prompts are for masked diffusion",
    ("ar", "time"): "an autoregressive model has no mask rate",
    ("blocks", "documents"): "a text goes on block by block until its [END]: its length is learned",
    ("blocks", "rates"): "each block is masked as the default masks a text",
    ("blocks", "time"): "each block has a rate of its own",
    ("prompts", "documents"): "an answer goes on until its [END], so its length is learned",
    ("prompts", "rates"): "prompts take the default's masks and weights",
    ("documents", "rates"): "documents of known lengths take the default's masks and weights",
}


def asked(config, has_documents):
    """The variants that a config asks for: name -> the flag that asks for it.

    has_documents: whether the data are documents, not prompts and answers.
    """
    is_given = config.document_length == "given"
    is_mdlm = config.objective == "mdlm"
    variants_asked = {
        "ar": (not is_mdlm, "--objective=ar"),
        "rates": (rates.are_other(config), rates.flag(config)),
        "prompts": (config.prompt_column, f"--prompt_column={config.prompt_column}"),
        "documents": (has_documents and is_given and is_mdlm, "--document_length=given"),
        "blocks": (blocks.are_asked(config), f"--block_length={config.block_length}"),
        "time": (config.time_conditioning, "--time_conditioning"),
    }
    return {name: flag for name, (is_asked, flag) in variants_asked.items() if is_asked}


def check(config):
    """Raise UserError for flags of variants that do not fit, whatever the data are."""
    is_asked = blocks.are_asked(config) or bool(config.prompt_column)
    check_together(config, has_documents=is_asked)  # these refuse given lengths
    blocks.check(config)


def check_together(config, has_documents):
    """Raise UserError for variants that cannot be combined."""
    flags = asked(config, has_documents)
    for (first, second), why in REFUSED.items():
        if first in flags and second in flags:
            both = f"{flags[first]} and {flags[second]} cannot be combined"
            fix = "leave one of them out"
            if first == "documents":  # a default, which cannot be left out
                fix = f"leave {flags[second]} out, or add --document_length=predicted"
            raise UserError(f"{both}: {why}; {fix}")
