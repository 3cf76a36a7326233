"""Former names and values of settings: they work as before, in commands and in old checkpoints.

`flags.modern` and `flags.modern_argv` translate them; --help does not show them. A name that others
use for a flag is not here but in guesses.py.
"""


def rates_of(mask_schedule, min_rate, max_rate):
    span = f"{min_rate}-{max_rate}"  # of all rates too: variants/rates.py shortens that
    return span if mask_schedule == "linear" else f"{mask_schedule}:{span}"


def end_of_id(end_id):
    return None if str(end_id) == "-1" else str(end_id)


def unchanged(value):
    return value


def renamed(**names):
    """A function of a value that may have one of these former names."""
    return lambda value: names.get(str(value), value)


# Program -> rows of (the name now, the former names with their defaults, a function of the former
# values, in that order). It returns the value now; None stands for the default.
ALIASES = {
    "mdlm": [
        ("rates", dict(mask_schedule="linear", min_rate=0.0, max_rate=1.0), rates_of),
        ("end", dict(end_token=""), lambda token: token or None),
        ("end", dict(end_id=-1), end_of_id),
        ("infill_share", dict(whole=0.0), unchanged),
        ("document_length", dict(lengths="known"), renamed(known="given", learned="predicted")),
    ],
}
