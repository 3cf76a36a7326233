"""Flags from a dataclass, and a main() that turns a mistake into one sentence and exit code 2."""

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import inspect
import os
import re
import signal
import sys
import time
from pathlib import Path

# What could command a terminal or reorder its text: control characters except line ends and tabs,
# and the marks that turn the direction of writing.
UNSAFE = re.compile(
    "\r(?!\n)|[\0-\b\v\f\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]"
)
NO_LIMIT = 1 << 31
COUNT = (1, NO_LIMIT)  # bounds of a flag that counts something
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class UserError(ValueError):
    """A user's mistake in one sentence: what was given, what is accepted, what to do."""


class RankError(UserError):
    """One that may concern this rank alone of several: each says it for itself."""


def start(name):
    """What a program calls first: returns time.monotonic(), from before the slow imports.

    If `name` is "__main__", Ctrl-C ends the imports without a traceback, threads that wait spin
    only briefly, as two programs on one machine would hinder each other (results/threads.md), and
    the process keeps the memory that it frees (results/cpu.md).
    """
    if name == "__main__":
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        keep_memory()
    return time.monotonic()


def keep_memory():
    """Let glibc keep freed memory: new pages for every tensor take a fifth of a step on a CPU."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-4, 0)  # M_MMAP_MAX: take no tensor from the system on its own
            mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back


def run(main, argv, cleanup=None):
    """Run main(argv), then cleanup(); returns the exit code. A UserError is printed and gives 2."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    make_streams_usable()
    program = Path(sys.argv[0]).name
    try:
        code = main(argv)
        print(end="", flush=True)  # here, where a full disk is caught
        return code
    except UserError as e:
        sentence = str(e).replace("\n", "\\n")
        warn(f"{program}: {sentence}", on_every_rank=isinstance(e, RankError))
        return 2
    except (MemoryError, RuntimeError) as e:  # of Python, numpy; of PyTorch's allocators
        words = ("out of memory", "can't allocate memory", "bad_alloc", "not enough memory")
        if not (isinstance(e, MemoryError) or any(word in str(e) for word in words)):
            raise
        fix = "lower the batch, the length, or the size of the model"
        warn(f"{program}: out of memory; {fix}", on_every_rank=True)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of standard output has gone (| head)
        silence_stdout()
        return 141
    except OSError as e:
        path = e.filename or "standard output"
        warn(f"{program}: {e.strerror or e}: {path}; check that path and the free space there")
        silence_stdout()
        return 2
    finally:
        if cleanup:
            cleanup()


def make_streams_usable():
    """Replace closed standard streams, and print "?" where a terminal cannot show a character."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name) or open(os.devnull, mode)
        setattr(sys, name, stream)
        if mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def silence_stdout():
    """Keep Python from complaining about standard output again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def is_first_rank():
    """True unless torchrun, which sets MASTER_PORT too, says that this is another rank."""
    return "MASTER_PORT" not in os.environ or os.environ.get("RANK", "0") == "0"


def warn(message, on_every_rank=False):
    """Print to stderr, by default once however many ranks there are."""
    if on_every_rank or is_first_rank():
        with contextlib.suppress(OSError):  # a terminal that was closed
            print(escaped(message), file=sys.stderr, flush=True)


def escaped(text):
    """Text for a terminal: what could command it is shown as \\x1b, \\u202e and the like."""
    return UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


def progress(what, unit, total=None, disable=False):
    """A tqdm bar for work of more than a second; written every ten seconds if not on a terminal."""
    from tqdm import tqdm

    how = dict(leave=False, delay=1, mininterval=0.1 if sys.stderr.isatty() else 10)
    return tqdm(desc=what, unit=unit, total=total, disable=disable, **how)


def check_files(read, written):
    """Raise UserError for a file that is written but read too, written twice, or of a checkpoint.

    Both are dicts of flag -> path.
    """
    seen = {os.path.realpath(path): flag for flag, path in read.items()}
    for flag, path in written.items():
        if path in ("", "-"):
            continue
        file = Path(os.path.realpath(path))
        other = seen.setdefault(str(file), flag)
        if other != flag:
            raise UserError(f"--{other} and --{flag} name the same file, {path}; give two files")
        own = (file.parent / "latest").exists() and file.name in ("latest", "log.jsonl")
        if own or (file.parent / "manifest.json").exists():
            raise UserError(f"--{flag}={path} is a part of a run; give another file")


def check_clashes(clashes, given):
    """Raise UserError for flags that contradict each other: of (flag, "flags it excludes", why)."""
    for one, others, why in clashes:
        for other in others.split():
            if one in given and other in given:
                raise UserError(f"--{one} and --{other} contradict each other; {why}")


def opt(default, meaning, *choices, bounds=None, bare=None):
    """A dataclass field and flag: its default, help, and choices or (low, high) bounds.

    bare: what the flag alone means, where it needs no value.
    """
    metadata = {"help": meaning, "choices": choices, "bounds": bounds, "bare": bare}
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(options):
    """Raise UserError for a value that has the wrong type, is no choice or is out of bounds."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        choices = field.metadata["choices"]
        bounds = field.metadata["bounds"]
        types = (int, float) if field.type is float else (field.type,)
        if type(value) not in types or (choices and value not in choices):
            accepted = ", ".join(choices) or field.type.__name__
            given = str(value)[:40]
            raise UserError(f"--{field.name}={given!r} is not accepted; give {accepted}")
        if bounds and not bounds[0] <= value <= bounds[1]:
            raise UserError(f"--{field.name}={value} must be from {bounds[0]} to {bounds[1]}")


def headings(cls):
    """Field name -> the last comment line above it in the class: the groups of --help."""
    found = {}
    heading = "settings"
    for line in inspect.getsource(cls).splitlines():
        line = line.strip()
        if line.startswith("# "):
            heading = line[2:]
        found[line.split(":")[0]] = heading
    return found


def parse_bool(text):
    if text.lower() in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        return text.lower() in ("true", "1", "yes", "on")
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message)


def refuse(argument, flags):
    """Raise UserError for an argument that is none of the flags: name the one that was meant."""
    if not argument.startswith("-"):
        raise UserError(f"{argument!r} needs a flag before it, such as --data= (--help lists all)")
    flag = argument.split("=")[0]
    near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.0)[0]
    raise UserError(f"there is no flag {flag}; the nearest is {near} (--help lists all)")


def shown_default(value):
    return "unlimited" if value == NO_LIMIT else value


def parse_flags(cls, argv, description, epilog="", presets=None, preset=None):
    """The flags given in argv, as a dict of fields of `cls`, whose comments group --help.

    presets: name -> {setting: default}; --help shows the defaults of `preset`.
    """
    if presets:
        varied = dict.fromkeys(name for values in presets.values() for name in values)
        lines = ["presets:"]
        for name, values in presets.items():
            shown = [f"{k}={shown_default(values.get(k, getattr(cls, k)))}" for k in varied]
            lines.append(f"  {name}: {' '.join(shown)}")
        epilog = "\n".join([*lines, epilog])
    parser = Parser(
        description=description,
        allow_abbrev=False,
        epilog=epilog,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = presets[preset] if presets else {}
    heading = headings(cls)
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(heading.values())}
    for field in dataclasses.fields(cls):
        if field.type is bool:
            kind = dict(type=parse_bool, nargs="?", const=True, metavar="BOOL")
        else:
            kind = dict(type=field.type, choices=field.metadata["choices"] or None)
            if field.metadata["bare"] is not None:
                kind |= dict(nargs="?", const=field.metadata["bare"])
        meaning = field.metadata["help"]
        default = defaults.get(field.name, field.default)
        if default != "":
            meaning += f" (default: {shown_default(default)})"
        group = groups[heading[field.name]]
        group.add_argument(f"--{field.name}", help=meaning.replace("%", "%%"), **kind)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        refuse(unknown[0], [f"--{field.name}" for field in dataclasses.fields(cls)])
    check_fields(cls(**vars(given)))
    return vars(given)
