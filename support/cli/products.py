"""Doors to products: folders of support/ that are imported only when they are used.

So the programs start without them, and also work if they have been removed. (--help is not a
product, but is rarely used as well.)
"""

import importlib.util
from types import SimpleNamespace

from nanomdlm.support.cli import environment


def automata(pattern=None):
    """Regular expressions as automata over tokens. pattern: the one that is needed."""
    from nanomdlm.support.constrain import automaton

    if pattern not in automaton.BUILT_IN:
        environment.optional("outlines_core", "a gap that must match")

    return automaton


def has_automata():
    """Whether this copy of the project has them: without, templates do not use them."""
    return importlib.util.find_spec("nanomdlm.support.constrain") is not None


def drawing():
    """Draws of gaps that must match."""
    from nanomdlm.support.constrain import drawing

    return drawing


def proofreading():
    """Proofreading of texts."""
    from nanomdlm.support.proofread import proofreader

    return proofreader


def proofreading_of_files():
    """Proofreading of a file, window by window."""
    from nanomdlm.support.proofread import file

    return file


def pages():
    """Pages that replay how texts were unmasked."""
    from nanomdlm.support.web import viewer

    return viewer


def word_statistics():
    """Texts side by side, with numbers about their words."""
    from nanomdlm.support.infill import word_statistics

    return word_statistics


def serving():
    """The server: what serve.py puts together."""
    for package in ("pydantic", "starlette", "uvicorn", "greenlet"):
        environment.optional(package, "serve.py")
    from nanomdlm.support.serving import app, engine, rendering, requests, writing
    from nanomdlm.support.web import served_page

    modules = (app, engine, rendering, requests, writing, served_page)
    return SimpleNamespace(**{module.__name__.rpartition(".")[2]: module for module in modules})


def help_pages():
    """--help of the programs; tyro takes a quarter of a second to import."""
    from nanomdlm.support.cli import help

    return help
