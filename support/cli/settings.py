"""Settings are dataclasses: a line each, `n_layer: Count = 6  # layers`.

The type says what is accepted, the comment is the help (help.py). `parse` returns the flags that
were given, `check` validates values from Python or a config.json as flags are.
"""

import contextlib
import dataclasses
import difflib
import functools
import os
import re
import types
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from nanomdlm.support.cli import products
from nanomdlm.support.errors import UserError

NO_LIMIT = 1 << 31


class Bounds(NamedTuple):
    """The lowest and highest value of a setting."""

    low: float
    high: float


class Form(NamedTuple):
    """A function that returns a value in its usual form, or raises UserError."""

    function: Any


# What a program does with the file or folder that a setting names (outputs.py).
READS = "reads"
WRITES = "writes"
MAKES = "makes"  # a folder for files, which the program checks one by one
BLANK = "blank"  # white space is a value too
BARE = "bare"  # the flag alone means -1

Count = Annotated[int, Bounds(1, NO_LIMIT)]
Context = Annotated[int, Bounds(0, 8192)]
Natural = Annotated[int, Bounds(0, NO_LIMIT)]
Seed = Annotated[int, Bounds(0, (1 << 32) - 1)]
Amount = Annotated[float, Bounds(0, 1e9)]
Share = Annotated[float, Bounds(0, 1)]
BelowOne = Annotated[float, Bounds(0, 0.999999)]
UpToHalf = Annotated[float, Bounds(0, 0.5)]
Shard = Annotated[int, Bounds(-1, 4096), BARE]
Reads = Annotated[str, READS]
Writes = Annotated[str, WRITES]
Makes = Annotated[str, MAKES]
Text = Annotated[str, BLANK]

TRUE = ("true", "1", "yes", "on")
FALSE = ("false", "0", "no", "off")
# nanoGPT's names, where difflib does not find ours.
NANOGPT = dict(max_iters="max_steps", dataset="data", lr="learning_rate", start="prompt")
NANOGPT |= dict(warmup_iters="warmup_steps", eval_iters="eval_windows")


# ---- Types
@functools.cache
def types_of(cls):
    """{setting: (its type, a tuple of its marks: Bounds, Form, Role ...)} of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        marks = getattr(kind, "__metadata__", ())
        found[field.name] = (get_args(kind)[0] if marks else kind, marks)
    return found


def choices_of(kind):
    """The words that a type accepts besides values of its plain types: those of its Literals."""
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [word for part in parts if get_origin(part) is Literal for word in get_args(part)]


def is_switch(kind):
    """Whether a setting is true or false, and perhaps another word."""
    return kind is bool or bool in get_args(kind)


def in_short(value):
    """A value as --help shows it."""
    if isinstance(value, (bool, str)):
        return str(value).lower()
    return "unlimited" if value == NO_LIMIT else f"{value:.10g}"


def check(settings):
    """Raise UserError for a value that has a wrong type, is not a choice, or is out of bounds.

    Numbers of numpy and PyTorch and paths become plain ones, and values take their usual form.
    """
    for name, (kind, marks) in types_of(type(settings)).items():
        value = plain(getattr(settings, name))
        plain_types = [t for t in get_args(kind) or (kind,) if isinstance(t, type)]
        plain_types += [int] * (float in plain_types)
        choices = choices_of(kind)
        if type(value) not in plain_types and not (isinstance(value, str) and value in choices):
            accepted = ", ".join([t.__name__ for t in plain_types] * (not choices) + choices)
            raise UserError(f"--{name}={shown(value)!r} is not accepted; give {accepted}")
        for mark in marks:
            if isinstance(mark, Bounds) and not mark.low <= value <= mark.high:
                span = f"from {mark.low:g} to {mark.high:g}"
                span = f"{mark.low:g} or more" if mark.high == NO_LIMIT else span
                raise UserError(f"--{name}={value} is not accepted; give {span}")
            if isinstance(mark, Form) and value != getattr(type(settings), name, None):
                value = mark.function(value)
        setattr(settings, name, value)


def plain(value):
    """A number of numpy, or of an array or tensor without axes, and a path as Python's own."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def shown(value, limit=40):
    """A value as error messages show it: on one line, shortened."""
    return " ".join(str(value).split())[:limit]


# ---- Command lines
def parse(
    cls,
    argv,
    description,
    default=None,
    groups=(),
    short=(),
    free="",
    usage="[--flag=value ...]",
):
    """The flags in argv, as a dict of fields of the dataclass `cls`, checked.

    default: an instance, whose values --help shows
    groups: dataclasses that cls inherits from; --help shows each with its docstring as a title
    short: those of them that --help shows, if only --help=all shows all
    free: the name under which a text without a flag is returned ("": it is refused)
    """
    if help_words := [word for word in argv if word in ("-h", "--help", "--help=all")]:
        short = () if help_words[0] == "--help=all" else short
        products.help_pages().show(cls, description, default or cls(), groups, short, usage)
    pairs, words = split(cls, argv)
    known = types_of(cls)
    if words:
        check_words(words, known, free)
    given = {name: value_of(known[name][0], word) for name, word in pairs}
    checked = cls(**given)
    check(checked)
    given = {name: getattr(checked, name) for name in given}
    return given | ({free: words[0]} if words else {})


def check_words(words, known, free):
    """Raise UserError for words without a flag, unless it is one and may be there (free)."""
    if not free:
        name = next((n for n in ("data", "out_dir") if n in known), next(iter(known)))
        fix = f"such as --{name}=" if words[0].partition("=")[0] not in known else "the dashes"
        raise UserError(f"{shown(words[0])!r} needs a flag before it, {fix} (see --help)")
    if len(words) > 1:
        raise UserError(f"{' '.join(words)!r} are {len(words)} values; put a text in quotes")


def unknown_flag(word, name, known):
    """The UserError for a flag that does not exist, with the nearest that does."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    fix = f"; did you mean --{near[0]}?" if near else ""
    return UserError(f"there is no flag {word.partition('=')[0]}{fix} (see --help)")


def value_of(kind, word):
    """A word of the command line as a value of a type; the word itself if it is none."""
    if word in choices_of(kind):
        return word
    reads = {bool: read_bool, int: int, float: float}
    for plain_type in get_args(kind) or (kind,):
        with contextlib.suppress(ValueError):
            return reads.get(plain_type, str)(word)
    return word


def read_bool(word):
    if word.lower() not in TRUE + FALSE:
        raise ValueError("give true or false")
    return word.lower() in TRUE


def split(cls, argv):
    """([(name, text)] of the flags in argv, the words without a flag); raises UserError."""
    known = types_of(cls)
    pairs = []
    words = []
    argv = list(argv)
    while argv:
        word = argv.pop(0)
        if word == "--":
            return pairs, words + argv
        flag = re.fullmatch(r"--?([A-Za-z][\w-]*)(=(.*))?", word, re.DOTALL)
        if not flag or not word.startswith("--") and " " in word:
            words.append(word)
            continue
        name = flag[1].replace("-", "_")
        name = name if name in known else NANOGPT.get(name, name)
        if name not in known or not word.startswith("--"):
            raise unknown_flag(word, name, known)
        kind, marks = known[name]
        value = flag[3]
        if value is None and is_switch(kind):
            takes = (*TRUE, *FALSE, *choices_of(kind))
            value = argv.pop(0) if argv and argv[0].lower() in takes else "true"
        elif value is None and BARE in marks:
            value = argv.pop(0) if argv and argv[0].lstrip("-").isdecimal() else "-1"
        elif value is None:
            if not argv or re.match("--[a-z]", argv[0]):
                raise UserError(f"--{name} needs a value: --{name}=VALUE")
            value = argv.pop(0)
        if not (value if BLANK in marks else value.strip()):
            raise UserError(f"--{name}={value!r} is empty: is a variable not set? Give a value")
        if {READS, WRITES, MAKES} & {*marks}:
            value = os.path.expanduser(value)
        pairs.append((name, value))
    return pairs, words


# ---- Flags that contradict each other, or do nothing
def check_clashes(clashes, given):
    """Raise UserError for flags that contradict each other: of (flag, "flags it excludes", why)."""
    for one, others, why in clashes:
        for other in others.split():
            if one in given and other in given:
                raise UserError(f"--{one} and --{other} contradict each other; {why}")


def check_idle(given, rules):
    """Raise UserError for a flag that seems to take effect, but does not.

    rules: of ("flags", whether they have no effect here, "with what")
    """
    for names, is_idle, why in rules:
        for name in names.split():
            if is_idle and name in given:
                raise UserError(f"--{name} has no effect {why}; leave it out")


# ---- Paths
def names_of(path):
    """The paths that A,B or a list names; an existing path is one path, even with commas."""
    if isinstance(path, (list, tuple)):
        return list(path)
    whole = os.path.expanduser(path)
    if "," not in whole or os.path.lexists(whole):
        return [path]
    names = whole.split(",")
    if not all(names):
        raise UserError(f"{shown(path)} has an empty name; give the folder of a run")
    return [os.path.expanduser(name) for name in names]
