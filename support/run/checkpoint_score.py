"""The score of a checkpoint, from its manifest or its run's log, and the line that shows it.

A checkpoint keeps its last evaluation in its manifest, so that a copy of the folder has it too; for
older ones it is in log.jsonl. Neither is trusted: odd values count as missing.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
from pathlib import Path

from nanomdlm.support.cli import environment, files
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.run.checkpoint import SHIPPED

# A model is barely trained if it scores above this fraction of the unigram entropy: it knows hardly
# more than how frequent each token is. Of a run that ended by itself only the latter is certain, as
# there are texts with no more in them (DNA has 0.94).
STOPPED = 0.85
ENDED = 0.95
TYPICAL = 0.75  # the unigram entropy of a text, as a fraction of ln V, where it is not known


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


def judge(score, folder, vocab_size, stopped):
    """Words for a "score" of the checkpoint `folder`: "NELBO 4.63 at step 0: barely trained".

    stopped: whether its run was stopped before its end.
    """
    value = number(score.get("value"))
    name = {"nelbo": "NELBO", "nll": "NLL"}.get(str(score.get("name")))
    if name is None or value is None:
        return "not evaluated"
    words = f"{name} {value:.2f}"
    step = number(score.get("step"))
    level = value
    if step is not None and step_of(folder) not in (None, step):
        words += f" at step {step:.0f}"
        loss = number(score.get("loss"))  # of training, when the checkpoint was saved
        level = value if loss is None else loss
    unigram = number(score.get("unigram")) or TYPICAL * math.log(max(2, vocab_size))
    return words + ": barely trained" * (level > unigram * (STOPPED if stopped else ENDED))


def described(folder, config, vocab_size):
    """The model in words: "out/step-38, pydoc, NELBO 4.63: barely trained"."""
    shown = min(str(folder), relative(folder), key=len)
    folder = Path(folder).resolve()
    data = " ".join(Path(config.data).name.split())[:40] or config.data[:40]
    stopped = read_object(folder / "state.json").get("finished") is False
    score = from_manifest(folder) or from_log(folder)
    return f"{shown}, {data}, {judge(score, folder, vocab_size, stopped)}"


def introduce(folders, config, vocab_size, out_dir):
    """Print to stderr, in one line, which model a program uses; out_dir: the one given, or "".

    folders: those of its checkpoints, one for each network of an Ensemble
    """
    if len(folders) > 1:
        networks = []
        for folder in folders:
            settings = read_object(folder / "config.json").get("config")
            data = settings.get("data") if isinstance(settings, dict) else None  # none in exports
            of_folder = dataclasses.replace(config, data=str(data or config.data))
            networks.append(described(folder, of_folder, vocab_size))
        warn(f"the mean of {len(folders)} networks: {'; '.join(networks)}")
        return
    folder = folders[0]
    line = described(folder, config, vocab_size)
    is_shipped = False
    with contextlib.suppress(OSError):  # a run that trains may have removed it since it was read
        is_shipped = SHIPPED.samefile(folder)
    if is_shipped and not out_dir:
        line += " (the model that ships; out/ has no run yet)"
    elif line.endswith("barely trained") and SHIPPED.is_dir():
        line += f"; --out_dir={environment.quote(relative(SHIPPED))} is the one that ships"
    warn(line)
