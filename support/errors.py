"""User errors: one sentence each, which a program prints and a Python caller catches."""


class UserError(ValueError):
    """A user's mistake in one sentence: what was given, what is accepted, what to do.

    It is one line, whatever was given.
    """

    def __init__(self, sentence):
        super().__init__(str(sentence).replace("\n", "\\n"))


class TooLong(UserError):
    """A text that has more tokens than fit into the context."""


class RankError(UserError):
    """An error that may concern only this rank: each rank reports its own."""


class SharedError(UserError):
    """An error that all ranks raise: the first rank reports it."""
