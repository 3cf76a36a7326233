"""The running Python: what it lacks, and the commands that a user types to fix that or go on."""

import contextlib
import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

from nanomdlm.support.errors import UserError

ROOT = Path(__file__).resolve().parents[2]  # the folder of the programs
# By every program; others by some of their uses.
NEEDED = ("torch", "numpy", "safetensors", "tqdm", "tyro", "filelock")


def problem():
    """One sentence if Python is too old or lacks a package in NEEDED, and what to do; else ""."""
    missing = [name for name in NEEDED if not is_installed(name)]
    if sys.version_info < (3, 10):  # noqa: UP036 (said here, where an older one still runs)
        fix = "make .venv with a newer one, as README.md says"
        return f"this needs Python 3.10 or newer, and {sys.executable} is older; {fix}"
    if missing:
        what = f"{sys.executable} does not have {', '.join(missing)}"
        return f"{what}; type: {setup_command(missing)}"
    return ""


def is_installed(package):
    try:
        if package == "pip":
            # By any other search setuptools takes pip as started, and torch.compile fails later.
            return PathFinder.find_spec(package) is not None
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # hidden, or half imported
        return False


def setup_command(packages):
    """What a user types to have the packages that every program needs."""
    venv = ROOT / ".venv"
    requirements = ROOT / "requirements.txt"  # not there where pip installed the programs
    wanted = ["-r", shorter(requirements)] if requirements.exists() else packages
    scripts = venv / ("Scripts" if os.name == "nt" else "bin")
    activate = quote(shorter(scripts / "activate"))
    if os.name != "nt":
        activate = f". {activate}"
    if scripts.is_dir() and Path(sys.prefix).resolve() != venv.resolve():  # but not activated
        there = {path.name for path in venv.glob("[Ll]ib/**/site-packages/*")}
        return activate if there >= set(packages) else both(activate, pip_install(*wanted, to=""))
    is_managed = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()
    if is_managed and sys.prefix == sys.base_prefix and requirements.exists():  # pip would refuse
        make = f"{python_command()} -m venv {quote(shorter(venv))}"
        return both(make, activate, pip_install(*wanted, to=""))
    return pip_install(*wanted)


def both(*commands):
    return (" && " if os.name != "nt" else ", then ").join(commands)  # an old PowerShell has no &&


def pip_install(*packages, to=None):
    """What a user types to install packages for the Python that runs; to="": the one activated."""
    words = " ".join(map(quote, packages))
    if to == "":
        return f"pip install {words}"
    if not is_installed("pip"):  # an environment of uv
        return f"uv pip install --python {quote(sys.executable)} {words}"
    return f"{python_command()} -m pip install {words}"


def python_command():
    """What a user types for the Python that runs: "python" if that is the one, else its path."""
    if "UV_RUN_RECURSION_DEPTH" in os.environ:
        return "uv run python"
    own = Path(sys.executable or "python")
    for name in ("python", "python3"):
        # Its folder tells environments apart: all their links lead to the Python that made them.
        other = Path(shutil.which(name) or "")
        same_folder = other.name and other.parent.resolve() == own.parent.resolve()
        if same_folder and other.resolve() == own.resolve():
            return name
    return quote(shorter(own))


def command(script):
    """What a user types to run a program of this project with the Python that runs."""
    return f"{python_command()} {quote(shorter(ROOT / script))}"


def shorter(path):
    """A path as it is from the current folder, or from the root if that is shorter."""
    path = os.path.abspath(path)
    with contextlib.suppress(ValueError, OSError):  # another drive; a folder that is gone
        return min(os.path.relpath(path), path, key=len)
    return path


def quote(word):
    """A word for the user's shell, on one line of printable characters."""
    word = str(word)
    if os.name == "nt":
        return subprocess.list2cmdline([word])
    if word.isprintable():
        return shlex.quote(word)
    shown = (c if c.isprintable() and c not in "'\\" else hexadecimal(c) for c in word)
    return "$'" + "".join(shown) + "'"  # of bash and zsh


def hexadecimal(c):
    """A character as bytes in $'...' of a shell."""
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(c))


def optional(package, what):
    """Import a package that only some uses need; `what` names this use.

    Raises UserError, with the command that installs it, if it is missing.
    """
    try:
        return importlib.import_module(package)
    except ImportError as e:
        name = package.split(".")[0]
        fails = f"cannot be imported here ({e})" if is_installed(name) else "is missing"
        fix = pip_install(name)
        raise UserError(f"{what} needs the package {name}, which {fails}; type: {fix}") from e
