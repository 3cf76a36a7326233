"""Models and data by name: OWNER/NAME of the Hugging Face hub, and files in the GGUF format.

The hub is asked by huggingface_hub, so HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE work as everywhere;
models are in its cache (HF_HOME), data in ~/.cache/mdlm/datasets. Downloads are weights in
safetensors, settings, and texts: no pickles, no code.
"""

import fnmatch
import glob
import hashlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

from nanomdlm.support.cli.environment import optional
from nanomdlm.support.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
FILES += ["special_tokens_map.json", "chat_template.jinja", "*.safetensors", "*.index.json"]
DATASETS = "hf://datasets/"
DATA = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson", ".txt")


def local(name):
    """The folder of a model: `name` itself, or what was downloaded or converted for it.

    name: a path, OWNER/NAME, or FILE.gguf. What exists is never looked for on the hub, nor is a
    name whose first part is a folder here. Raises UserError if the hub does not have it.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return converted(path)
    if not NAME.fullmatch(str(name)) or path.exists() or path.parent.is_dir():
        return path
    hub = optional("huggingface_hub", f"{name}, which is not a folder here but may be on a hub,")
    try:
        return Path(hub.snapshot_download(str(name), allow_patterns=FILES))
    except Exception as e:  # those of the network and of the hub are of all kinds
        raise not_found(f"{name} is not a folder here, and not found on the hub", e) from None


def dataset(name):
    """The file or folder of --data=hf://datasets/OWNER/NAME[/FILES].

    FILES: a file, a folder, or a pattern such as data/train-*.parquet; default: all of a dataset
    that has its files in one folder. A branch or commit may follow NAME: OWNER/NAME@main, with %2F
    for a slash in its name. The files of each name have a folder of their own in the user's cache.
    Raises UserError if the hub does not have them.
    """
    owner, _, rest = name.removeprefix(DATASETS).partition("/")
    repo, _, pattern = rest.partition("/")
    repo, _, revision = repo.partition("@")
    of_repo = dict(repo_type="dataset", revision=unquote(revision) or None)
    folder = cache("datasets") / hashlib.sha256(name.encode()).hexdigest()[:16]
    try:
        if not folder.exists():
            hub = optional("huggingface_hub", name)
            found = hub.HfApi().list_repo_files(f"{owner}/{repo}", **of_repo)
            files = map(glob.escape, choose_files(name, found, pattern.rstrip("/")))
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as tmp:
                how = dict(allow_patterns=[*files], local_dir=Path(tmp) / "data")
                hub.snapshot_download(f"{owner}/{repo}", **of_repo, **how)
                if not folder.exists():
                    shutil.move(how["local_dir"], folder)
    except UserError:
        raise
    except Exception as e:
        raise not_found(f"--data={name} cannot be downloaded", e) from None
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if ".cache" not in path.relative_to(folder).parts]  # the hub's
    return str(files[0] if len(files) == 1 else files[0].parent)


def choose_files(name, found, pattern):
    """Of the files that a hub has, those that a pattern names; UserError unless a run can read
    them as one folder."""
    if pattern in found:
        return [pattern]
    data = [file for file in found if file.endswith(DATA) and "dataset_info" not in file]
    if pattern:
        here = [file for file in data if file.rpartition("/")[0] == pattern]
        data = here or fnmatch.filter(data, pattern)
    folders = {file.rpartition("/")[0] for file in data}
    if len(folders) != 1:
        what = ", ".join(sorted(data or found))[:300]
        raise UserError(f"--data={name}: name the files of one folder of {what}")
    return data


def not_found(what, e):
    """A UserError of an error of the network, or of the hub."""
    why = str(e).strip().splitlines() or [type(e).__name__]
    return UserError(f"{what}: {why[0]}")


def cache(kind):
    """A folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mdlm" / kind


def converted(path):
    """The folder of a GGUF file's model with weights in float32; made once, in the user's cache."""
    about = path.stat()
    key = f"{path.resolve()} {about.st_size} {about.st_mtime_ns}"
    home = cache("gguf")
    folder = home / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if folder.exists():
        return folder
    transformers = optional("transformers", "a GGUF file")
    for package in ("gguf", "accelerate"):
        optional(package, "a GGUF file")
    transformers.logging.disable_progress_bar()
    print(f"converting {path.name} to {folder}, once", file=sys.stderr)
    home.mkdir(parents=True, exist_ok=True)
    how = dict(gguf_file=path.name, local_files_only=True)
    try:
        kind = transformers.AutoModelForCausalLM
        model = kind.from_pretrained(path.parent, dtype="float32", **how)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **how)
    except Exception as e:  # it raises errors of all kinds
        why = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise UserError(f"{path} cannot be read as a GGUF file ({why}); give another one") from e
    with tempfile.TemporaryDirectory(dir=home) as tmp:
        made = Path(tmp) / "model"
        del model.config.quantization_config
        plain = kind.from_config(model.config)  # the library does not save the one that it read
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(made)
        tokenizer.save_pretrained(made)
        if not folder.exists():  # another process was faster
            shutil.move(made, folder)
    return folder
