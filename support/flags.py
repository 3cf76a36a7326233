"""Flags from a dataclass: one field each, with its help, its default and what it accepts."""

import argparse
import contextlib
import dataclasses
import errno
import functools
import inspect
import itertools
import os
import re
import textwrap
from pathlib import Path

from support import guesses
from support.aliases import ALIASES
from support.errors import NoEffect, UserError
from support.terminal import STDOUT

NO_LIMIT = 1 << 31
COUNT = (1, NO_LIMIT)  # bounds of a flag that counts something
TRUE = ("true", "1", "yes", "on")
FALSE = ("false", "0", "no", "off")
READS = "reads"  # what a flag does with the file or folder that it names
WRITES = "writes"
MAKES = "makes"  # a folder for files, which the program checks one by one


def check_clashes(clashes, given):
    """Raise UserError for flags that contradict each other: of (flag, "flags it excludes", why)."""
    for one, others, why in clashes:
        for other in others.split():
            if one in given and other in given:
                raise UserError(f"--{one} and --{other} contradict each other; {why}")


def check_effects(given, rules):
    """Raise UserError for a flag that does nothing in what was asked for.

    given: the flags that were given, names or a dict. rules: of ("flags", whether they have an
    effect here, what makes them do nothing and what to do about it).
    """
    for flags, has_effect, why in rules:
        for name in flags.split():
            if name in given and not has_effect:
                raise NoEffect(f"--{name} has no effect {why}")


def without_off(cls, given):
    """The given flags, without those that turn something off: these are never refused."""
    off = {}
    for field in dataclasses.fields(cls):
        has_auto = "auto" in (field.default, *(field.metadata["choices"] or ()))
        off[field.name] = (field.metadata["off"], *["auto"] * has_auto)
    return {k: v for k, v in given.items() if v is not False and v not in off[k]}


FORMER = {}  # name of a flag -> what the command line called it, a sentence; see `naming_former`


def in_names_of_now(settings, program):
    """Yield (name, the former names that are given, the value) for settings with former names.

    settings: a dict. The value is None if what is given is the default of before. Raises UserError
    for values of a wrong type.
    """
    for new, former, value_now in ALIASES.get(program, ()):
        names = [name for name in former if name in settings]
        values = dict(former)
        for name in names:
            value = plain(settings[name])
            types = (int, float) if type(former[name]) is float else (type(former[name]),)
            if type(value) not in types and name != new:
                accepted = type(former[name]).__name__
                raise UserError(f"--{name}={shown(value)!r} is not accepted; give {accepted}")
            values[name] = value
        if names:
            yield new, names, value_now(*values.values())


def modern(settings, program):
    """A dict of settings that may have former names and values (aliases.py), with those of now.

    Raises UserError for settings that say the same in two ways.
    """
    settings = dict(settings)
    renamed = {}  # name -> (what else it is called here, the values that are no default)
    for new, names, value in in_names_of_now(settings, program):
        others, values = renamed.setdefault(new, ([], []))
        others += names
        values += [] if value is None else [value]
    given = {}
    rest = {name: value for name, value in settings.items() if name_now(name, program) == name}
    for new, (names, values) in renamed.items():
        if (new in settings and new not in names) or len(values) > 1:
            same = " and ".join(names + [new] * (new in settings))
            raise UserError(f"{same} are the same setting; give {new} alone")
        if values:
            given[new] = values[0]
    return rest | given


def name_now(name, program):
    """The name of a setting that may be given by a former one."""
    return next((new for new, former, _ in ALIASES.get(program, ()) if name in former), name)


def take_former(argv, program):
    """(argv without the flags that have former names, {name: text} of those)"""
    types = {k: type(v) for _, former, _ in ALIASES.get(program, ()) for k, v in former.items()}
    argv = list(argv)
    former_flags = {}
    rest = []
    while argv:
        word = argv.pop(0)
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        if not flag.startswith("--") or name not in types:
            rest.append(word)
            continue
        if not equals and not (argv and not argv[0].startswith("--")):
            raise UserError(f"--{name} needs a value: --{name}=VALUE")
        former_flags[name] = value if equals else argv.pop(0)
        check_not_empty(f"--{name}", former_flags[name])
        with contextlib.suppress(ValueError):  # in_names_of_now refuses what is no number
            former_flags[name] = types[name](former_flags[name])
    return rest, former_flags


def modern_argv(argv, program):
    """argv with the flags of now in place of former ones (aliases.py), and the names of those whose
    default is asked for by a former one. FORMER gets what is said of them in errors."""
    rest, former_flags = take_former(argv, program)
    given = {word.partition("=")[0][2:].replace("-", "_") for word in rest}
    asked = {}  # name -> the former flags that stand for it
    defaults = []
    for new, names, value in in_names_of_now(former_flags, program):
        former = " and ".join(f"--{name}" for name in names)
        if new in given:
            raise UserError(f"--{new} is what {former} said before; give --{new} alone")
        if new in asked:
            raise UserError(f"{asked[new]} and {former} are both --{new} now; give --{new} alone")
        asked[new] = former
        if value is None:
            defaults.append(new)
        else:
            rest.append(f"--{new}={value}")
        if names != [new]:
            typed = " ".join(f"--{name}={former_flags[name]}" for name in names)
            now = f"the default of --{new}" if value is None else f"--{new}={value}"
            FORMER[new] = f"{typed} is now {now}"
    return rest, defaults


def naming_former(sentence):
    """A sentence about flags of now, with the former ones that were given in their place."""
    for name, said in FORMER.items():
        if re.search(rf"--{name}\b", sentence) and said not in sentence:
            sentence = f"{sentence} ({said})"
    return sentence


def opt(
    default,
    meaning,
    *choices,
    bounds=None,
    bare=None,
    text=False,
    path=None,
    common=False,
    off=None,
    form=None,
):
    """A dataclass field and flag: its default, help, and choices or (low, high) bounds.

    choices of a bool: what it may be beside true and false.
    bare: what the flag alone means, where it needs no value. text: white space is a value too.
    path: READS, WRITES or MAKES, if it names a file or folder: support/outputs.py keeps what is
    read, and runs, from being replaced. In such a value ~/ is the home folder.
    common: shown on the first screen of --help. off: a value that asks for nothing, beside False
    and "auto".
    form: a function of the value that returns it in its usual form, or raises UserError.
    """
    metadata = {"help": meaning, "choices": choices, "bounds": bounds, "bare": bare}
    metadata |= {"text": text, "path": path, "common": common, "off": off, "form": form}
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(options):
    """Raise UserError for a value that has the wrong type, is no choice or is out of bounds.

    Numbers of numpy and PyTorch and paths become plain ones, and values take their usual form, in
    `options` itself.
    """
    for field in dataclasses.fields(options):
        value = plain(getattr(options, field.name))
        setattr(options, field.name, value)
        choices = field.metadata["choices"]
        bounds = field.metadata["bounds"]
        types = (int, float) if field.type is float else (field.type,)
        if field.type is bool and choices:
            choices = (True, False, *choices)
            types = (bool, str)
        if type(value) not in types or (choices and value not in choices):
            accepted = ", ".join(map(str, choices)) or field.type.__name__
            text = shown(value)
            raise UserError(f"--{field.name}={text!r} is not accepted; give {accepted}")
        if bounds and not bounds[0] <= value <= bounds[1]:
            raise UserError(f"--{field.name}={value} must be from {bounds[0]} to {bounds[1]}")
        if field.metadata["form"]:
            setattr(options, field.name, field.metadata["form"](value))


def plain(value):
    """A number of numpy, or of an array or tensor without axes, and a path as Python's own."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value if getattr(value, "is_meta", False) else value.item()
    return value


def shown(value, most=40):
    """A value that is not accepted, as errors show it: in one line, cut off."""
    return " ".join(str(value).split())[:most]


def at_home(path):
    """A path that begins with ~/, which shells leave as it is in --flag=~/path, in full."""
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else path


def names_of(path):
    """The paths that A,B or a list names; a path that exists is one, commas or not."""
    if isinstance(path, (list, tuple)):
        if not path:
            raise UserError("an empty list names no run; give the folder of a run or a checkpoint")
        return list(path)
    is_path = isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str)
    if not is_path or "," not in os.fspath(path) or os.path.lexists(at_home(os.fspath(path))):
        return [path]
    return [at_home(name) for name in os.fspath(path).split(",")]


def check_path(name, path):
    """Raise UserError if no file can have the path that `name` gives, as it is too long."""
    try:
        os.lstat(path)
    except (OSError, ValueError) as e:
        if isinstance(e, ValueError) or e.errno == errno.ENAMETOOLONG:
            why = getattr(e, "strerror", None) or e
            fix = "give the path of a file or folder"
            raise UserError(f"{name}={shown(path)}... is no path ({why}); {fix}") from None


def check_not_empty(name, value, text=False):
    """Raise UserError for an empty value, such as that of a variable that is not set.

    White space is empty too, except in a text.
    """
    if isinstance(value, str) and not (value if text else value.strip()):
        why = "is a variable not set?"
        raise UserError(f"{name}={value!r} is empty: {why} Give a value (see --help)")


@functools.cache
def headings(cls):
    """Field name -> the last comment line above it in its class: the groups of --help=all."""
    titles = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        heading = "settings"
        for line in inspect.getsource(base).splitlines():
            line = line.strip()
            if line.startswith("# "):
                heading = line[2:]
            elif field := re.match(r"(\w+): \w+ = ", line):
                titles[field[1]] = heading
    return titles


def parse_bool(text, others=()):
    if text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    if text.lower() in others:
        return text.lower()
    accepted = ", ".join(("true", "false", *others))
    raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give {accepted}")


def first_line(doc):
    """The first line of a docstring; "" for None, as python -OO keeps none."""
    return (doc or "").partition("\n")[0]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are UserErrors. No flag is abbreviated, no value empty."""

    def __init__(self, **settings):
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message):
        number = re.fullmatch(r"argument (--\w+): invalid (int|float) value: (.*)", message)
        if number:  # argparse does not say what is accepted
            accepted = dict(int="a whole number such as 4", float="a number such as 0.5")
            message = f"{number[1]}={number[3]} is not accepted; give {accepted[number[2]]}"
        raise UserError(message)

    def print_help(self, file=None):
        try:
            print(self.format_help(), end="", file=file, flush=True)  # argparse ignores failures
        except BrokenPipeError:
            raise
        except OSError as e:
            raise OSError(e.errno, e.strerror, STDOUT) from e

    def parse_args(self, argv):
        argv = checked_argv(argv)
        given, unknown = self.parse_known_args(argv)
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        if unknown:
            refuse(unknown[0], [flag[2:] for flag in flags])
        words = [argument.partition("=")[0] for argument in argv]
        for name, value in vars(given).items():
            is_flag = f"--{name}" in flags
            if not is_flag or f"--{name}" in words:  # a default may be empty
                check_not_empty(f"--{name}" if is_flag else name, value)
        return given


def in_our_words(argv, names, switches, program):
    """argv with our names for flags that others call otherwise, and underscores for dashes.

    switches: name -> the values that it takes beside true and false. A switch needs no value, and
    takes the next argument only if that is one of its values.
    """
    words = []
    for argument, following in itertools.zip_longest(argv, argv[1:], fillvalue="true"):
        flag, equals, value = argument.partition("=")
        our = flag.startswith("--") and guesses.ours(flag[2:], names, program)
        if our:
            argument = f"--{our}{equals}{value}"
            if our in switches and not equals and following.strip():
                takes = (*TRUE, *FALSE, *switches[our])
                argument += "" if following.lower() in takes else "=true"
        words.append(argument)
    return words


def refuse(argument, names, program=""):
    """Raise UserError for an argument that is none of the flags `names`: say what was meant."""
    flag, equals, _ = argument.partition("=")
    if not argument.startswith("-"):
        if equals and flag in names:
            raise UserError(f"{argument!r} needs dashes: --{argument}")
        if names == ["help"]:
            raise UserError(f"{shown(argument)!r} is too much: nothing is given here")
        example = next((name for name in ("data", "out_dir") if name in names), names[0])
        fix = f"such as --{example}= (see --help)"
        raise UserError(f"{argument!r} needs a flag before it, {fix}")
    advice = guesses.answer(flag.lstrip("-"), names, program)
    advice = f"; {advice}" if advice else ""
    raise UserError(f"there is no flag {flag}{advice} (see --help)")


def shown_value(value):
    """A default as --help shows it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "unlimited" if value == NO_LIMIT else value


def parse_flags(
    cls,
    argv,
    description,
    epilog="",
    presets=None,
    preset=None,
    free="",
    usage="[--flag=value ...]",
):
    """The flags given in argv, as a dict of fields of `cls`, whose comments group --help=all.

    presets: name -> {setting: default}; --help shows the defaults of `preset`.
    free: the name under which a value without a flag is returned ("": it is refused).
    usage: what follows the program's name, as --help says it.
    """
    argv = checked_argv(argv)
    texts = (usage, description, epilog, presets, preset)
    all_fields = dataclasses.fields(cls)
    parser = make_parser(cls, all_fields, *texts)
    common = [field for field in all_fields if field.metadata["common"]]
    parser.first_screen = functools.partial(make_parser, cls, common or all_fields, *texts)
    program = Path(inspect.getsourcefile(cls)).stem
    try:
        return parse_words(cls, argv, parser, program, free)
    except UserError as e:
        raise type(e)(naming_former(str(e))) from e


def checked_argv(argv):
    """Arguments from Python as a list; UserError if they are no list or tuple of strings."""
    if not isinstance(argv, (list, tuple)) or not all(isinstance(word, str) for word in argv):
        given = shown(repr(argv), 80)
        raise UserError(f'the flags {given} are no list of strings; give ["--flag=value", ...]')
    return list(argv)


def parse_words(cls, argv, parser, program, free):
    """What parse_flags returns, without former names in errors."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    switches = {
        name: field.metadata["choices"] for name, field in fields.items() if field.type is bool
    }
    n = argv.index("--") if "--" in argv else len(argv)  # what follows -- is no flag
    if not any(field.metadata["common"] for field in fields.values()):  # one screen shows all
        argv = ["--help" if word == "--help=all" else word for word in argv]
    flags, defaults = modern_argv(argv[:n], program)
    flags = in_our_words(flags, list(fields), switches, program)
    given, unknown = parser.parse_known_args(flags)
    given = vars(given)
    words = unknown + argv[n + 1 :]
    for argument in words if not free else filter(is_flag, unknown):
        refuse(argument, list(fields), program)
    for name, value in given.items():
        if value == []:  # what argparse makes of --name=--
            raise UserError(f"--{name}=-- is not accepted: -- is no value")
        check_not_empty(f"--{name}", value, fields[name].metadata["text"])
        if fields[name].metadata["path"]:
            given[name] = at_home(value)
            is_read = fields[name].metadata["path"] == READS
            for path in names_of(given[name]) if is_read else [given[name]]:
                check_path(f"--{name}", path)
    given |= {name: fields[name].default for name in defaults}
    checked = cls(**given)
    check_fields(checked)
    given = {name: getattr(checked, name) for name in given}
    if len(words) > 1:
        raise UserError(f"{' '.join(words)!r} are {len(words)} values; put a text in quotes")
    if words:
        check_not_empty(free, words[0], text=True)
        given[free] = words[0]
    return given


def is_flag(argument):
    """Whether an argument looks like a flag: not like -, a number, or a text of several words."""
    return bool(re.fullmatch(r"(--|-(?!\d))[\w-]*(=.*)?", argument, re.DOTALL)) and argument != "-"


def fold(text, first, others):
    """Wrap a text to 80 columns. first, others: what the first line and the others begin with."""
    indents = dict(initial_indent=first, subsequent_indent=others)
    return textwrap.fill(text, 79, break_on_hyphens=False, break_long_words=False, **indents)


class ShowHelp(argparse.Action):
    """--help: the flags of most runs; --help=all: all of them, by groups."""

    def __call__(self, parser, namespace, value, option_string=None):
        (parser if value == "all" else parser.first_screen()).print_help()
        parser.exit()


def fold_paragraphs(text):
    """A text whose paragraphs fit in 80 columns; commands, which are indented, stay as they are."""
    paragraphs = (text or "").strip("\n").split("\n\n")
    return "\n\n".join(each if each[:1] == " " else fold(each, "", "") for each in paragraphs)


def make_parser(cls, fields, usage, description, epilog, presets, preset):
    """The Parser of `fields`, all of `cls` or the common ones alone; without groups if so."""
    n = len(dataclasses.fields(cls))
    is_all = len(fields) == n
    if presets:
        epilog = f"{describe_presets(cls, fields, presets)}\n{epilog}"
    if not is_all:
        epilog += f"\n\n--help=all shows all {n} flags."
    parser = Parser(
        usage=f"%(prog)s {usage}",
        description=fold_paragraphs(description or ""),  # python -OO keeps no docstrings
        epilog=epilog,
        argument_default=argparse.SUPPRESS,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = presets[preset] if presets else {}
    heading = headings(cls) if is_all else dict.fromkeys(headings(cls), "the flags of most runs")
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(heading.values())}
    for field in fields:
        add_flag(groups[heading[field.name]], field, defaults.get(field.name, field.default))
    settings = dict(action=ShowHelp, nargs="?", choices=["all"], metavar="all")
    settings["help"] = "show the flags of most runs, or every flag by --help=all"
    if not any(field.metadata["common"] for field in dataclasses.fields(cls)):
        settings = dict(action="help", help="show this text")
    next(iter(groups.values())).add_argument("-h", "--help", **settings)
    return parser


def describe_presets(cls, fields, presets):
    """The presets in lines, each with those of its fields that differ between presets."""
    varied = dict.fromkeys(name for values in presets.values() for name in values)
    varied = [name for name in varied if name in {field.name for field in fields}]
    lines = ["presets:"]
    for name, values in presets.items():
        shown = [f"{k}={shown_value(values.get(k, getattr(cls, k)))}" for k in varied]
        lines.append(fold(" ".join(shown), f"  {name}: ", "    "))
    return "\n".join(lines)


def add_flag(group, field, default):
    """Add a field to a group of a Parser; default: as --help shows it."""
    if field.type is bool:
        parse = functools.partial(parse_bool, others=field.metadata["choices"])
        kind = dict(type=parse, nargs="?", const=True, metavar="BOOL")
    else:
        kind = dict(type=field.type, choices=field.metadata["choices"] or None)
        if field.metadata["bare"] is not None:
            kind |= dict(nargs="?", const=field.metadata["bare"])
        if field.type is not str:
            kind |= dict(metavar="N" if field.type is int else "X")
    meaning = field.metadata["help"]
    if default != "":
        meaning += f" (default: {shown_value(default)})"
    group.add_argument(f"--{field.name}", help=meaning.replace("%", "%%"), **kind)
