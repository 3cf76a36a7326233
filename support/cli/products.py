"""Doors to products: rooms of support/ that are imported only where they are asked for.

So the programs start without them, and work where they have been removed.
"""

from nanomdlm.support.cli import environment


def automata():
    """Regular expressions as automata over tokens."""
    from nanomdlm.support.constrain import automaton

    environment.optional("outlines_core", "a gap that must match")

    return automaton


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


def word_statistics():
    """Texts side by side, with numbers about their words."""
    from nanomdlm.support.infill import word_statistics

    return word_statistics
