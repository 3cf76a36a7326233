"""How good a checkpoint is, as far as it or its run says, and the line that a program prints of it.

A checkpoint keeps its last evaluation in its manifest, so that a copy of the folder knows it too.
Of an older one log.jsonl has it. Neither may be trusted: what is odd counts as missing.
"""

import contextlib
import json
import math
import os
import re
from pathlib import Path

import torch

from support import environment, files
from support.checkpoint import SHIPPED
from support.cli import warn

# A model is barely trained if it scores above this share of the unigram entropy: it knows hardly
# more than how frequent each token is. Of a run that ended by itself only the latter is certain, as
# there are texts with no more in them (DNA has 0.94).
STOPPED = 0.85
ENDED = 0.95
TYPICAL = 0.75  # the unigram entropy of a text, as a share of ln V, where it is not known


def unigram_entropy(tokens):
    """Of ids (n,), in nats."""
    p = tokens.bincount().double() / len(tokens)
    return torch.special.entr(p).sum().item()


def number(value, least=0.0):
    """A finite number of at least `least` as a float, else None."""
    if type(value) in (int, float) and least <= value < 1 << 31:  # NaN is not
        return float(value)
    return None


def read_object(path):
    """The JSON object in a file; empty where there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(files.read_small(path))
        if isinstance(content, dict):
            return content
    return {}


def step_of(folder):
    """The step of a checkpoint: what its state or its name says; else None."""
    named = re.match(r"step-(\d{1,12})", folder.name)
    step = number(read_object(folder / "state.json").get("step"))
    return float(named[1]) if step is None and named else step


def from_manifest(folder):
    """The "score" of a checkpoint's manifest, a dict; empty where there is none."""
    score = read_object(folder / "manifest.json").get("score")
    return score if isinstance(score, dict) else {}


def from_log(folder):
    """The same, as the log of the run says it of `folder`, a checkpoint in it."""
    score = {}
    last = step_of(folder)
    if last is None:
        return {}
    with contextlib.suppress(OSError, ValueError):
        for line in files.read_small(folder.parent / "log.jsonl").splitlines():
            record = {}
            with contextlib.suppress(ValueError, RecursionError):  # cut off, or no JSON
                record = json.loads(line)
            step = number(record.get("step")) if isinstance(record, dict) else None
            if step is None or step > last:
                continue
            for name in ("nelbo", "nll"):
                if number(record.get(f"val_{name}")) is not None:
                    score |= dict(name=name, value=record[f"val_{name}"], step=step)
            score["loss"] = record.get("loss", score.get("loss"))
    return score


def relative(path):
    """A path as seen from the current folder, where that is possible."""
    with contextlib.suppress(ValueError, OSError):  # another drive of Windows; no current folder
        return os.path.relpath(path)
    return str(path)


def described(folder, config, vocab_size):
    """What writes: "out/step-38, pydoc, NELBO 4.63: barely trained"."""
    shown = min(str(folder), relative(folder), key=len)
    folder = Path(folder).resolve()
    score = from_manifest(folder) or from_log(folder)
    value = number(score.get("value"))
    step = number(score.get("step"))
    name = {"nelbo": "NELBO", "nll": "NLL"}.get(str(score.get("name")))
    data = " ".join(Path(config.data).name.split())[:40] or config.data[:40]
    words = [shown, data]
    if name is None or value is None:
        return ", ".join([*words, "not evaluated"])
    is_older = step is not None and step_of(folder) not in (None, step)
    words.append(f"{name} {value:.2f}" + f" at step {step:.0f}" * is_older)
    known = number(score.get("loss")) if is_older else None  # of training, when it was saved
    level = value if known is None else known
    unigram = number(score.get("unigram")) or TYPICAL * math.log(max(2, vocab_size))
    is_stopped = read_object(folder / "state.json").get("finished") is False
    barely = level > unigram * (STOPPED if is_stopped else ENDED)
    return ", ".join(words) + ": barely trained" * barely


def introduce(folder, config, vocab_size, out_dir):
    """Say on stderr which model a program uses, in one line; out_dir: the one asked for, or ""."""
    line = described(folder, config, vocab_size)
    is_shipped = SHIPPED.exists() and SHIPPED.samefile(folder)
    if is_shipped and not out_dir:
        line += "; the model that ships, as out/ has no run"
    elif line.endswith("barely trained") and SHIPPED.is_dir():
        line += f"; --out_dir={environment.quote(relative(SHIPPED))} is the one that ships"
    warn(line)
