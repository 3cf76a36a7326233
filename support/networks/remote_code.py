"""Code that comes with a network: *.py files that the auto_map of its config.json names.

Such code can do whatever its user can. So it is imported only if --trust_remote_code is given on
the same command line: checkpoints are passed on, and nothing in them makes them trusted. The files
are copied with them, and network.json has their checksums.
"""

import hashlib
import importlib.util
import sys
import tempfile
from pathlib import Path

from nanomdlm.support.cli import files
from nanomdlm.support.cli.environment import optional
from nanomdlm.support.errors import UserError

MOST = 1 << 24  # bytes of a file
PACKAGES = {}  # what was imported: name of a package -> its folder, which transformers reads too


def classes_of(settings):
    """The auto_map of a config.json, as far as it names the network's classes; {}: it has none."""
    auto_map = settings.get("auto_map")
    if not isinstance(auto_map, dict) or "AutoConfig" not in auto_map:
        return {}
    names = {key: auto_map[key] for key in auto_map if key.startswith(("AutoConfig", "AutoModel"))}
    return {key: name for key, name in names.items() if isinstance(name, str)}


def check_trust(is_trusted, where, names):
    """Raise UserError unless the user trusts the files `names` of the folder `where`."""
    if not is_trusted:
        names = ", ".join(sorted(names))[:200]
        fix = "read it, then give --trust_remote_code (in Python trust_remote_code=True)"
        what = f"the network of {where} is custom code ({names})"
        raise UserError(f"{what}, which is never run without permission; {fix}")


def of_folder(path, classes, is_trusted):
    """The Code next to a config.json; classes: as returned by classes_of."""
    folder = path.parent
    if elsewhere := [name for name in classes.values() if "--" in name]:
        where = elsewhere[0].partition("--")[0][:80]
        fix = "copy its *.py files beside it, and remove that name and -- from auto_map"
        raise UserError(f"{path} loads code from {where} of a hub, which is never contacted; {fix}")
    module = optional("transformers.dynamic_module_utils", "a network of Hugging Face")
    names = {f"{name.partition('.')[0]}.py" for name in classes.values()}
    check_trust(is_trusted, folder, names)
    if outside := [name for name in names if Path(name).name != name or name == ".py"]:
        fix = "copy its *.py files beside it, and name them MODULE.CLASS in auto_map"
        raise UserError(f"{path} loads code from {outside[0][:80]}, which is not beside it; {fix}")
    try:
        for name in [*names]:
            names |= {Path(p).name for p in module.get_relative_import_files(folder / name)}
        return Code({name: read_source(folder / name) for name in sorted(names)})
    except (OSError, ValueError) as e:
        fix = "copy all files of the model there"
        raise UserError(f"the code in {folder} cannot be read ({e}); {fix}") from e


def of_checkpoint(path, listed, is_trusted):
    """The Code next to a network.json; listed: as returned by Code.listed when it was written."""
    folder = path.parent
    names = [*listed] if isinstance(listed, dict) else []
    if not names or any(Path(name).name != name or not name.endswith(".py") for name in names):
        raise UserError(f"{path} is damaged, or of a later version; restore it from a copy")
    check_trust(is_trusted, folder, names)
    try:
        code = Code({name: read_source(folder / name) for name in names})
    except (OSError, ValueError) as e:
        raise UserError(f"the code in {folder} cannot be read ({e}); restore it from a copy") from e
    for name, digest in code.listed().items():
        if listed[name] != digest:
            raise UserError(f"{folder / name} is not what {path.name} says; restore it from a copy")
    return code


def read_source(path):
    """The bytes of a file of code; raises OSError or ValueError where there are none, or many."""
    if path.stat().st_size > MOST:
        raise ValueError(f"{path.name} has more than {MOST} bytes")
    with files.open_regular(path) as f:
        return f.read()


class Code:
    """The source of a network; sources: name of a file -> its bytes."""

    def __init__(self, sources):
        self.sources = sources

    def listed(self):
        """Name of a file -> its sha256."""
        return {name: hashlib.sha256(text).hexdigest() for name, text in self.sources.items()}

    def find(self, name):
        """The class that an auto_map calls MODULE.CLASS; raises what the import raises.

        The files are imported as a package of this process. (transformers copies them to the user's
        cache first, where ranks that begin together would write over each other.)
        """
        digest = hashlib.sha256(repr(sorted(self.listed().items())).encode()).hexdigest()
        package = f"mdlm_remote_{digest[:16]}"
        if package not in sys.modules:
            folder = tempfile.TemporaryDirectory(prefix="mdlm-code-")
            for file, text in ({"__init__.py": b""} | self.sources).items():
                files.write_synced(Path(folder.name) / file, text)
            PACKAGES[package] = folder
            places = dict(submodule_search_locations=[folder.name])
            begin = Path(folder.name) / "__init__.py"
            spec = importlib.util.spec_from_file_location(package, begin, **places)
            sys.modules[package] = importlib.util.module_from_spec(spec)
        module, _, kind = name.partition(".")
        return getattr(importlib.import_module(f"{package}.{module}"), kind)
