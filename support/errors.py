"""Mistakes of users: one sentence each, which a program prints and a Python caller catches."""


class UserError(ValueError):
    """A user's mistake in one sentence: what was given, what is accepted, what to do.

    It is one line, whatever was given.
    """

    def __init__(self, sentence):
        super().__init__(str(sentence).replace("\n", "\\n"))


class TooLong(UserError):
    """A text that has more tokens than fit into the context."""


class RankError(UserError):
    """One that may concern this rank alone of several: each says it for itself."""


class SharedError(UserError):
    """One that all ranks raise: the first one says it."""
