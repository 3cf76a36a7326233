"""The running Python: what it lacks, and the commands that a user types to fix that or go on."""

import contextlib
import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
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
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # hidden, or half imported
        return False


def setup_command(packages):
    """What a user types to have the packages that every program needs."""
    venv = ROOT / ".venv"
    scripts = venv / ("Scripts" if os.name == "nt" else "bin")
    if scripts.is_dir() and Path(sys.prefix).resolve() != venv.resolve():  # but not activated
        return ("" if os.name == "nt" else ". ") + quote(shorter(scripts / "activate"))
    requirements = ROOT / "requirements.txt"  # not there where pip installed the programs
    return pip_install(*(["-r", shorter(requirements)] if requirements.exists() else packages))


def pip_install(*packages):
    """What a user types to install packages for the Python that runs."""
    return f"{python_command()} -m pip install {' '.join(map(quote, packages))}"


def python_command():
    """What a user types for the Python that runs: "python" if that is the one, else its path."""
    for name in ("python", "python3"):
        if shutil.which(name) == sys.executable:
            return name
    return quote(shorter(sys.executable or "python"))


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
    """A word for the user's shell."""
    return subprocess.list2cmdline([str(word)]) if os.name == "nt" else shlex.quote(str(word))


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
