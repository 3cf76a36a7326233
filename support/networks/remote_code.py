"""Code that comes with a network: *.py files that the auto_map of its config.json names.

Such code can do whatever its user can. So it is imported only if --trust_remote_code is given on
that very command line: checkpoints travel, and nothing in them says that they are trusted. The
files travel with them.
"""

import hashlib
import importlib.util
import sys
import tempfile
from pathlib import Path

from nanomdlm.support.cli.environment import optional
from nanomdlm.support.errors import UserError

PACKAGES = {}  # what was imported: name of a package -> its folder, which transformers reads too


def classes_of(settings):
    """The auto_map of a config.json, as far as it names the network's classes; {}: it has none."""
    auto_map = settings.get("auto_map")
    if not isinstance(auto_map, dict) or "AutoConfig" not in auto_map:
        return {}
    names = {key: auto_map[key] for key in auto_map if key.startswith(("AutoConfig", "AutoModel"))}
    return {key: name for key, name in names.items() if isinstance(name, str)}


def of_folder(folder, classes, is_trusted):
    """The Code in a folder of Hugging Face; classes: what classes_of gave."""
    module = optional("transformers.dynamic_module_utils", "a network of Hugging Face")
    names = {f"{name.partition('.')[0]}.py" for name in classes.values()}
    sources = read(folder, names, is_trusted)
    for name in names:
        more = {Path(path).name for path in module.get_relative_import_files(folder / name)}
        sources |= read(folder, more - sources.keys(), is_trusted)
    return Code(sources)


def read(folder, names, is_trusted):
    """The files of a folder or checkpoint, name -> bytes. UserError unless the user trusts them."""
    if not is_trusted:
        names = ", ".join(sorted(names))[:200]
        fix = "read it, then give --trust_remote_code (in Python trust_remote_code=True)"
        what = f"the network of {folder} comes with code ({names}), which never runs unasked"
        raise UserError(f"{what}; {fix}")
    for name in names:
        path = folder / name
        if Path(name).name != name or not path.is_file():  # of a hub, for example: repo--name.py
            fix = "copy all files of the model there, and name them MODULE.CLASS in auto_map"
            raise UserError(f"{folder} takes code from {name[:80]}, which is not there; {fix}")
    return {name: (folder / name).read_bytes() for name in sorted(names)}


class Code:
    """The source of a network; sources: name of a file -> its bytes."""

    def __init__(self, sources):
        self.sources = sources

    def find(self, name):
        """The class that an auto_map calls MODULE.CLASS; raises what the import raises.

        The files are imported as a package of this process. (transformers copies them to the user's
        cache first, where ranks that begin together would write over each other.)
        """
        digest = hashlib.sha256(repr(sorted(self.sources.items())).encode()).hexdigest()
        package = f"mdlm_remote_{digest[:16]}"
        if package not in sys.modules:
            folder = tempfile.TemporaryDirectory(prefix="mdlm-code-")
            begin = Path(folder.name) / "__init__.py"
            for file, text in {"__init__.py": b"", **self.sources}.items():
                (Path(folder.name) / file).write_bytes(text)
            PACKAGES[package] = folder
            places = dict(submodule_search_locations=[folder.name])
            spec = importlib.util.spec_from_file_location(package, begin, **places)
            sys.modules[package] = importlib.util.module_from_spec(spec)
        module, _, kind = name.partition(".")
        return getattr(importlib.import_module(f"{package}.{module}"), kind)
