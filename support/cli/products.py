"""Doors to products: folders of support/ that are imported only when they are used.

So the programs start without them, and also work if they have been removed.
"""


def automata():
    """Regular expressions as automata over tokens."""
    from nanomdlm.support.constrain import automaton

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


def pages():
    """Pages that replay how texts were unmasked."""
    from nanomdlm.support.web import viewer

    return viewer


def word_statistics():
    """Texts side by side, with numbers about their words."""
    from nanomdlm.support.infill import word_statistics

    return word_statistics
