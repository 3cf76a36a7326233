"""Former names and values of settings: they work as before, in commands and in old checkpoints.

`flags.modern` and `flags.modern_argv` translate them; --help does not show them. A name that others
use for a flag is not here but in guesses.py.
"""


def unchanged(value):
    return value


def renamed(**names):
    """A function of a value that may have one of these former names."""
    return lambda value: names.get(str(value), value)


# Program -> rows of (the name now, the former names with their defaults, a function of the former
# values, in that order). It returns the value now; None stands for the default.
ALIASES = {
    "sample": [
        ("redraw", dict(redraw="low_confidence"), renamed(doubtful="low_confidence")),
        ("spacing", dict(distance=3), unchanged),
    ],
}
