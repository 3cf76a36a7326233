"""--help, from the comments and docstrings of dataclasses, by tyro (github.com/brentyi/tyro)."""

import contextlib
import dataclasses
import io
import re
import sys
import textwrap
from pathlib import Path

import tyro

from nanomdlm.support.cli.settings import in_short
from nanomdlm.support.cli.terminal import STDOUT

RULES = tyro.constructors.ConstructorRegistry()


@RULES.primitive_rule
def show_plain(info):
    """How tyro shows a bool, an int, a float: as settings.value_of reads them."""
    shown = {bool: "true|false", int: "N", float: "X"}
    if info.type not in shown:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=shown[info.type],
        instance_from_str=lambda words: words[0],
        is_instance=lambda x: isinstance(x, (int, float)),
        str_from_instance=lambda x: [in_short(x)],
    )


def show(cls, description, default, groups, short, usage):
    """Print the help of the dataclass `cls`, or of each of the groups, and exit.

    description: a text, or a function that returns it. short: the groups to show instead of all
    """
    if callable(description):
        description = description()
    if short:
        groups = short
        description += "\n--help=all shows the settings of variants too."
    if len(groups) == 1:
        (cls,) = groups
        default = of_group(cls, default)
    elif groups:  # a class with a field for each; tyro shows their docstrings as titles
        fields = [(title_of(group), group) for group in groups]
        cls = dataclasses.make_dataclass("All", fields)
        default = cls(**{name: of_group(group, default) for name, group in fields})
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        tyro.cli(
            cls,
            args=["--help"],
            default=default,
            description="",
            use_underscores=True,
            registry=RULES,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
        )
    paragraphs = [
        f"usage: {Path(sys.argv[0]).name} {usage}",
        *description.strip("\n").split("\n\n"),
    ]
    folded = [p if p[:1] == " " else textwrap.fill(p, 79) for p in paragraphs]
    flags = said.getvalue().partition("\n\n")[2]  # tyro would join the lines of a description
    flags = re.sub(r"\s+\(default:\s+''\)", "", flags)  # empty: off
    blocks = re.split(r"(?m)^(?=  --)", flags)  # (0: ...) says the default
    flags = "".join(re.sub(r"\s+\(default:\s+0\)", "", b) if "(0:" in b else b for b in blocks)
    flags = "\n".join(line.rstrip() for line in flags.split("\n"))
    # Of "NAME options", a line, the group's docstring and a line: the docstring and a line.
    flags = re.sub(r"(?m)^ \w+ options\n( -+\n)((?:  .+\n)+?)  -+\n", r"\2\1", flags)
    flags = re.sub(r"(?m)^  (?=\w)", " ", flags)
    try:
        print(*folded, flags, sep="\n\n", end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as e:
        raise OSError(e.errno, e.strerror, STDOUT) from e
    sys.exit(0)


def title_of(group):
    """The title of a group of settings: the name of its file, or of its class."""
    name = group.__name__.removesuffix("Settings").lower()
    return name or group.__module__.rpartition(".")[2]


def of_group(group, settings):
    return group(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(group)})
