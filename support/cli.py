"""Flags from a dataclass, and a main() that turns a mistake into one sentence and exit code 2."""

import _thread
import argparse
import contextlib
import ctypes
import dataclasses
import errno
import functools
import importlib
import inspect
import itertools
import os
import re
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from support import environment, guesses

# What could command a terminal or reorder its text: control characters except line ends and tabs,
# and the marks that turn the direction of writing.
UNSAFE = re.compile(
    "\r(?!\n)|[\0-\b\v\f\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]"
)
NO_LIMIT = 1 << 31
COUNT = (1, NO_LIMIT)  # bounds of a flag that counts something
TRUE = ("true", "1", "yes", "on")
FALSE = ("false", "0", "no", "off")
STDOUT = "standard output"
READS = "reads"  # what a flag does with the file or folder that it names
WRITES = "writes"
MAKES = "makes"  # a folder for files, which the program checks one by one
# Of an OSError for which a full disk is no reason.
NO_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)
FIRST_RANK_SPEAKS = 2.0  # seconds after which another rank says its own mistake
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class UserError(ValueError):
    """A user's mistake in one sentence: what was given, what is accepted, what to do."""


class RankError(UserError):
    """One that may concern this rank alone of several: each says it for itself."""


class SharedError(UserError):
    """One that all ranks raise: the first one says it."""


def start(name):
    """What a program calls first: returns time.monotonic(), from before the slow imports.

    If `name` is "__main__", a package that every program needs and that is missing ends it in one
    sentence with exit code 2, Ctrl-C ends the imports without a traceback, threads that wait spin
    only briefly, as two programs on one machine would hinder each other (results/threads.md), and
    the process keeps the memory that it frees (results/cpu.md).
    """
    if name == "__main__":
        if problem := environment.problem():
            warn(f"{Path(sys.argv[0]).name}: {problem}")
            sys.exit(2)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        keep_memory()
    return time.monotonic()


def optional(package, what):
    """Import a package that only some uses need: `what` names this one.

    Raises UserError, with the command that installs it, where it is missing.
    """
    try:
        return importlib.import_module(package)
    except ImportError as e:
        name = package.split(".")[0]
        fails = f"cannot be imported here ({e})" if environment.is_installed(name) else "is missing"
        fix = environment.pip_install(name)
        raise UserError(f"{what} needs the package {name}, which {fails}; type: {fix}") from e


def keep_memory():
    """Let glibc keep freed memory: new pages for every tensor take a fifth of a step on a CPU."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-4, 0)  # M_MMAP_MAX: take no tensor from the system on its own
            mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back


class Stopped(BaseException):
    """A signal asks the program to end; what it has opened is cleaned up on the way."""


CAME = []  # the signals that `stop` has turned into exceptions


def stop(number, frame):
    CAME.append(number)
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)


# Signals that end a program. Ctrl-C raises KeyboardInterrupt, the others raise Stopped.
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def clean_end():
    """Within, SIGTERM and SIGHUP raise Stopped, so that no temporary folder is left behind.

    A signal that is ignored (under nohup) or handled already stays so. Ranks end at once, also
    while they wait for each other, when Python runs no handler.
    """
    before = {}
    CAME.clear()
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    if before.get(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    for number in ENDING:
        if before.get(number) == signal.SIG_DFL and "MASTER_PORT" not in os.environ:
            signal.signal(number, stop)
    unraisable = sys.unraisablehook
    sys.unraisablehook = functools.partial(repeat_signal, unraisable)
    try:
        yield
    finally:
        sys.unraisablehook = unraisable
        for number, handler in before.items():
            if handler is not None:  # of another language
                signal.signal(number, handler)


def repeat_signal(otherwise, unraisable):
    """sys.unraisablehook: a signal that came while Python removed an object comes again, soon.

    There Python ignores what is raised, so that the program would go on. otherwise: another hook,
    for all that is no signal.
    """
    error = unraisable.exc_value
    number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
    if isinstance(error, Stopped):
        number = error.args[0]
    if number is None:
        otherwise(unraisable)
        return
    again = threading.Timer(0.01, send_signal, [number])
    again.daemon = True
    again.start()


def send_signal(number):
    """Send a signal to the main thread, unless the program has ended meanwhile."""
    if not callable(signal.getsignal(number)):
        return
    if hasattr(signal, "pthread_kill"):  # which also ends a call that waits
        signal.pthread_kill(threading.main_thread().ident, number)
    else:
        _thread.interrupt_main(number)


@contextlib.contextmanager
def signals_wait():
    """Within, signals that would end the program wait: a second Ctrl-C interrupts no clean-up."""
    waiting = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, *ENDING):
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in waiting[:1]:
            before[number](number, None)


@contextlib.contextmanager
def program(cleanup=None):
    """Context manager of a program: what a user can mend gets one sentence, not a traceback.

    Yields an object whose `code`, the exit code, the program sets; errors set it too. cleanup() is
    called at the end in any case.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    make_streams_usable()
    end = SimpleNamespace(code=0)
    with clean_end():
        try:
            yield end
            print(end="", flush=True)  # here, where a full disk is caught
        except (Exception, KeyboardInterrupt, Stopped) as e:
            end.code = report(e)
            if end.code is None:
                raise
        finally:
            if cleanup:
                cleanup()


def run(main, argv, cleanup=None):
    """Run main(argv), then cleanup(); returns the exit code. A UserError is printed and gives 2."""
    with program(cleanup) as end:
        end.code = main(argv)
    return end.code


def report(error):
    """Say in one sentence what ended a program; returns its exit code (None: a defect of ours)."""
    name = Path(sys.argv[0]).name
    if isinstance(error, UserError):
        is_shared = isinstance(error, SharedError)
        if not (is_first_rank() or is_shared or isinstance(error, RankError)):
            wait_for_first_rank()
        sentence = str(error).replace("\n", "\\n")
        warn(f"{name}: {sentence}", on_every_rank=not is_shared)
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, Stopped):
        return 128 + error.args[0]
    if isinstance(error, OSError):
        return report_file(error, name)
    why = ""
    if isinstance(error, (MemoryError, RuntimeError)):  # of Python, numpy; of PyTorch's allocators
        why = explain(error)
    if why:
        warn(f"{name}: {why}", on_every_rank=True)
        return 2
    # C++ called Python when a signal came, and made another error of it (matplotlib).
    return 128 + CAME[-1] if CAME else None


def report_file(error, name):
    """Say which file an OSError is about; returns the exit code."""
    if isinstance(error, BrokenPipeError) and not error.filename:
        silence_stdout()  # its reader has gone (| head)
        return 141
    path = error.filename
    if path == STDOUT or (not path and stdout_fails()):
        path = STDOUT
        silence_stdout()
    fix = "check that path" if error.errno in NO_PLACE else "check that and the free space"
    warn(f"{name}: {error.strerror or error}: {path or 'a file'}; {fix}")
    return 2


def wait_for_first_rank():
    """Let the first rank say what all would say: when it has ended, torchrun ends the others.

    What follows is said where that does not happen: the mistake is this rank's alone.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(FIRST_RANK_SPEAKS)


def explain(error):
    """A sentence for a MemoryError or RuntimeError that is no mistake of the program; else ""."""
    text = str(error)
    words = ("out of memory", "can't allocate memory", "bad_alloc", "not enough memory")
    if isinstance(error, MemoryError) or any(word in text for word in words):
        return "out of memory; lower the batch, the length, or the size of the model"
    words = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
    if "MASTER_PORT" in os.environ and any(word in text for word in words):
        fix = "--resume continues from what was saved"
        return f"another rank has stopped, and its own message says why; {fix}"
    return ""


def stdout_fails():
    """Whether standard output cannot be written: what failed to be written is still held."""
    try:
        sys.stdout.flush()
        return False
    except (OSError, ValueError):
        return True


def make_streams_usable():
    """Replace closed standard streams, and print "?" where a terminal cannot show a character."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name) or open(os.devnull, mode)
        setattr(sys, name, stream)
        if mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def has_stdout():
    """Whether there is a standard output: a closed one was replaced by make_streams_usable."""
    return getattr(sys.stdout, "name", "") != os.devnull


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


def quoted(text):
    """Text as a Python string in double quotes, on one line of printable characters."""
    shown = []
    for c in text:
        if c.isprintable() and c not in '"\\':
            shown.append(c)
        else:
            shown.append('\\"' if c == '"' else c.encode("unicode_escape").decode())
    return f'"{"".join(shown)}"'


def progress(what, unit, total=None, disable=False):
    """A tqdm bar for work of more than a second; written every ten seconds if not on a terminal."""
    how = dict(leave=False, delay=1, mininterval=0.1 if sys.stderr.isatty() else 10)
    return bar(desc=what, unit=unit, total=total, disable=disable, **how)


def bar(*iterable, **options):
    """tqdm(...), or where tqdm is missing a bar that shows nothing: no work ends for that."""
    try:
        from tqdm import tqdm
    except ImportError:
        return NoBar(*iterable)
    return tqdm(*iterable, file=Quiet(sys.stderr), **options)


class Quiet:
    """A stream that may fail, as its reader has gone or its disk is full: no work ends for that."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with contextlib.suppress(OSError):
            self.stream.write(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self.stream.flush()


class NoBar:
    """Has what the programs use of a tqdm bar, and shows nothing."""

    def __init__(self, iterable=()):
        self.iterable = iterable
        self.n = 0
        self.total = None

    def __iter__(self):
        return iter(self.iterable)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, n=1):
        self.n += n

    def show(self, *_, **options):
        pass

    clear = close = refresh = reset = set_description = set_postfix = set_postfix_str = show


def check_clashes(clashes, given):
    """Raise UserError for flags that contradict each other: of (flag, "flags it excludes", why)."""
    for one, others, why in clashes:
        for other in others.split():
            if one in given and other in given:
                raise UserError(f"--{one} and --{other} contradict each other; {why}")


def opt(default, meaning, *choices, bounds=None, bare=None, text=False, path=None):
    """A dataclass field and flag: its default, help, and choices or (low, high) bounds.

    bare: what the flag alone means, where it needs no value. text: white space is a value too.
    path: READS, WRITES or MAKES, if it names a file or folder: support/outputs.py keeps what is
    read, and runs, from being replaced. In such a value ~/ is the home folder.
    """
    metadata = {"help": meaning, "choices": choices, "bounds": bounds, "bare": bare}
    metadata |= {"text": text, "path": path}
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(options):
    """Raise UserError for a value that has the wrong type, is no choice or is out of bounds.

    Numbers of numpy and PyTorch and paths become plain ones, in `options` itself.
    """
    for field in dataclasses.fields(options):
        value = plain(getattr(options, field.name))
        setattr(options, field.name, value)
        choices = field.metadata["choices"]
        bounds = field.metadata["bounds"]
        types = (int, float) if field.type is float else (field.type,)
        if type(value) not in types or (choices and value not in choices):
            accepted = ", ".join(choices) or field.type.__name__
            given = str(value)[:40]
            raise UserError(f"--{field.name}={given!r} is not accepted; give {accepted}")
        if bounds and not bounds[0] <= value <= bounds[1]:
            raise UserError(f"--{field.name}={value} must be from {bounds[0]} to {bounds[1]}")


def plain(value):
    """A number of numpy, or of an array or tensor without axes, and a path as Python's own."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def at_home(path):
    """A path that begins with ~/, which shells leave as it is in --flag=~/path, in full."""
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else path


def check_not_empty(name, value, text=False):
    """Raise UserError for an empty value, such as that of a variable that is not set.

    White space is empty too, except in a text.
    """
    if isinstance(value, str) and not (value if text else value.strip()):
        why = "is a variable not set?"
        raise UserError(f"{name}={value!r} is empty: {why} Give a value (--help lists all)")


@functools.cache
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
    if text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are UserErrors. No flag is abbreviated, no value empty."""

    def __init__(self, **how):
        super().__init__(**how, allow_abbrev=False)

    def error(self, message):
        raise UserError(message)

    def print_help(self, file=None):
        try:
            print(self.format_help(), end="", file=file, flush=True)  # argparse ignores failures
        except BrokenPipeError:
            raise
        except OSError as e:
            raise OSError(e.errno, e.strerror, STDOUT) from e

    def parse_args(self, argv):
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

    A switch, which needs no value, takes the next argument only if that is true or false.
    """
    found = []
    for argument, following in itertools.zip_longest(argv, argv[1:], fillvalue="true"):
        flag, equals, value = argument.partition("=")
        our = flag.startswith("--") and guesses.ours(flag[2:], names, program)
        if our:
            argument = f"--{our}{equals}{value}"
            is_alone = following.strip() and following.lower() not in TRUE + FALSE
            if our in switches and not equals and is_alone:
                argument += "=true"
        found.append(argument)
    return found


def refuse(argument, names, program=""):
    """Raise UserError for an argument that is none of the flags `names`: say what was meant."""
    flag, equals, _ = argument.partition("=")
    if not argument.startswith("-"):
        if equals and flag in names:
            raise UserError(f"{argument!r} needs dashes: --{argument}")
        example = next((name for name in ("data", "out_dir") if name in names), names[0])
        fix = f"such as --{example}= (--help lists all)"
        raise UserError(f"{argument!r} needs a flag before it, {fix}")
    advice = guesses.answer(flag.lstrip("-"), names, program)
    advice = f"; {advice}" if advice else ""
    raise UserError(f"there is no flag {flag}{advice} (--help lists all)")


def shown_default(value):
    return "unlimited" if value == NO_LIMIT else value


def parse_flags(cls, argv, description, epilog="", presets=None, preset=None, free=""):
    """The flags given in argv, as a dict of fields of `cls`, whose comments group --help.

    presets: name -> {setting: default}; --help shows the defaults of `preset`.
    free: the name under which a value without a flag is returned ("": it is refused).
    """
    parser = make_parser(cls, description, epilog, presets, preset)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    names = list(fields)
    switches = [name for name, field in fields.items() if field.type is bool]
    program = Path(inspect.getsourcefile(cls)).stem
    n = argv.index("--") if "--" in argv else len(argv)  # what follows -- is no flag
    given, unknown = parser.parse_known_args(in_our_words(argv[:n], names, switches, program))
    given = vars(given)
    words = unknown + argv[n + 1 :]
    for argument in words if not free else filter(is_flag, unknown):
        refuse(argument, names, program)
    for name, value in given.items():
        check_not_empty(f"--{name}", value, fields[name].metadata["text"])
        if fields[name].metadata["path"]:
            given[name] = at_home(value)
    check_fields(cls(**given))
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
    """A text in lines that fit in 80 columns; what they begin with."""
    indents = dict(initial_indent=first, subsequent_indent=others)
    return textwrap.fill(text, 79, break_on_hyphens=False, break_long_words=False, **indents)


def make_parser(cls, description, epilog, presets, preset):
    """The Parser of parse_flags."""
    if presets:
        varied = dict.fromkeys(name for values in presets.values() for name in values)
        lines = ["presets:"]
        for name, values in presets.items():
            shown = [f"{k}={shown_default(values.get(k, getattr(cls, k)))}" for k in varied]
            lines.append(fold(" ".join(shown), f"  {name}: ", "    "))
        epilog = "\n".join([*lines, epilog])
    parser = Parser(
        description=description,
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
    return parser
