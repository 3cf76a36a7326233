"""Variants of masked diffusion. Each wraps the default objective, MaskedDiffusion of mdlm.py.

An objective says two things: what the network is shown (a support.view.View), and which tokens
count how much. A variant changes some of that and leaves the rest to the objective that it wraps.
To add one, write its file and name it in VARIANTS. The file has one of

    FLAG                          the setting that enables it by any value other than the default
    asked(config, has_documents)  the flag that enables it, such as "--span=4"; "": none does

and, as needed,

    Settings                      a dataclass of its flags; its docstring is their --help=all title
    REFUSED                       what it cannot be combined with: name of the file -> why
    wrap(objective, end_id, mean_length)  the wrapped objective
    model_class(Model)            its class of models, derived from Model
    has_rates(config)             whether it sets the mask rates, and --rate_margin has no effect
    check(config)                 raises UserError for settings that do not fit
"""

from nanomdlm.support.data.sources import has_documents as has_texts
from nanomdlm.support.errors import UserError

from . import autoregressive, blocks, documents, positions, prompts, rates, time_conditioning

VARIANTS = [  # in the order in which they wrap each other
    rates,
    prompts,
    documents,
    blocks,
    time_conditioning,
    positions,
    autoregressive,
]
SETTINGS = [file.Settings for file in VARIANTS if hasattr(file, "Settings")]


def asked(config, has_documents=False):
    """The variants that a config enables: name -> (file, the flag that enables it).

    has_documents: whether the data are documents, not prompts and answers.
    """
    found = {}
    for file in VARIANTS:
        if hasattr(file, "FLAG"):
            value = getattr(config, file.FLAG)
            is_default = value == getattr(type(config), file.FLAG)
            flag = "" if is_default else f"--{file.FLAG}" + f"={value}" * (value is not True)
        else:
            flag = file.asked(config, has_documents)
        if flag:
            found[file.__name__.rpartition(".")[2]] = (file, flag)
    return found


def having(name, config, has_documents=False):
    """The attributes with this name in the files of the variants that a config enables."""
    files = [file for file, _ in asked(config, has_documents).values()]
    return [getattr(file, name) for file in files if hasattr(file, name)]


def choose(config, default, end_id=None, mean_length=None):
    """The objective of a config: `default`, wrapped by the variants that the settings enable.

    end_id: the id of [END] if the data have documents, else None. mean_length: mean number of
    tokens in the texts of training windows; a model that only predicts does not need it.
    """
    has_documents = end_id is not None and not config.prompt_column
    check_together(config, has_documents)
    objective = default
    for wrap in having("wrap", config, has_documents):
        objective = wrap(objective, end_id, mean_length)
    return objective


def open_corpus(Corpus, ids, config, device):
    """The Corpus of sources.Ids; a corpus of documents if their vocabulary has an [END]."""
    if ids.tokenizer.end_id is not None:
        Corpus = documents.corpus_of_documents(Corpus)
    return Corpus(ids, config, device)


def model_class(config, Model):
    """The class of the networks of a config: Model, or a class that variants derive from it."""
    for of_variant in having("model_class", config):
        Model = of_variant(Model)
    return Model


def rate_margin(config):
    """--rate_margin, or 0 if a variant sets the mask rates."""
    has_own = any(has_rates(config) for has_rates in having("has_rates", config))
    return 0.0 if has_own else config.rate_margin


def check(config):
    """Raise UserError for flags of variants that do not fit. (`choose` knows what the data are.)"""
    has_documents = has_texts(config) or bool(config.prompt_column) or blocks.are_asked(config)
    check_together(config, has_documents)  # the last two refuse given lengths
    for file in VARIANTS:
        if hasattr(file, "check"):
            file.check(config)


def check_together(config, has_documents):
    """Raise UserError for variants that cannot be combined."""
    files = asked(config, has_documents)
    for file, flag in reversed(files.values()):
        for name, why in getattr(file, "REFUSED", {}).items():
            if name in files:
                other = files[name][1]
                fix = "leave one of them out"
                if hasattr(file, "INSTEAD"):
                    fix = f"leave {other} out, or add {file.INSTEAD}"
                raise UserError(f"{flag} and {other} cannot be combined: {why}; {fix}")
