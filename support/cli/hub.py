"""Models by name: OWNER/NAME of the Hugging Face hub, and files in the GGUF format.

The hub is asked by huggingface_hub, so its cache, HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE
work as everywhere. Only weights in safetensors and settings are downloaded: no pickles, no code.
"""

import hashlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from nanomdlm.support.cli.environment import optional
from nanomdlm.support.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
FILES += ["special_tokens_map.json", "chat_template.jinja", "*.safetensors", "*.index.json"]


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
    except (OSError, ValueError) as e:  # also those of the network, and of the hub
        why = str(e).strip().splitlines() or [type(e).__name__]
        raise UserError(
            f"{name} is not a folder here, and not found on the hub: {why[0]}"
        ) from None


def converted(path):
    """The folder of a GGUF file's model with weights in float32; made once, in the user's cache."""
    about = path.stat()
    key = f"{path.resolve()} {about.st_size} {about.st_mtime_ns}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mdlm" / "gguf"
    folder = home / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if folder.exists():
        return folder
    transformers = optional("transformers", "a GGUF file")
    optional("gguf", "a GGUF file")
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
