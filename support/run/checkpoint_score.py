"""The score of a checkpoint, which its manifest keeps, and the line that shows it."""

import contextlib
from pathlib import Path

from nanomdlm.support.cli import environment, files
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.errors import UserError
from nanomdlm.support.run.checkpoint import SHIPPED

# A model that scores above this fraction of the unigram entropy is barely trained: it knows hardly
# more than how frequent each token is. (There are texts with no more in them: DNA has 0.94.)
BARELY = 0.95


def read_json(path):
    """A JSON object; {} if there is none, as of a checkpoint that its run has removed meanwhile."""
    with contextlib.suppress(UserError):
        return files.read_json(path, "checkpoint")
    return {}


def read(folder):
    """The score of a checkpoint, a dict; {} if it has none.

    name, value, step: of its last evaluation, "nelbo" or "nll", in nats per token. unigram: the
    entropy of the frequencies of the validation tokens, nats. loss: of training, when it was saved
    """
    return read_json(folder / "manifest.json").get("score") or {}


def judge(score, folder):
    """A score in words, such as "NELBO 4.63 at step 0: barely trained"."""
    if "value" not in score:
        return "not evaluated"
    words = f"{score['name'].upper()} {score['value']:.2f}"
    level = score["value"]
    if folder.name.startswith("step-") and folder.name != f"step-{score['step']}":
        words += f" at step {score['step']}"
        level = score.get("loss") or level
    return words + ": barely trained" * (level > BARELY * score["unigram"])


def describe(folder):
    """The model in words: "out/step-38, pydoc, NELBO 4.63: barely trained"."""
    shown = environment.shorter(folder)
    folder = Path(folder).resolve()
    config = read_json(folder / "config.json").get("config", {})
    data = " ".join(Path(config.get("data", "")).name.split())[:40]  # exports do not say it
    return ", ".join(filter(None, [shown, data, judge(read(folder), folder)]))


def introduce(folders, out_dir):
    """Print to stderr, in one line, which model a program uses; out_dir: the one given, or "".

    folders: those of its checkpoints, one for each network of an Ensemble
    """
    line = "; ".join(map(describe, folders))
    if len(folders) > 1:
        line = f"the mean of {len(folders)} networks: {line}"
    elif folders[0] == SHIPPED and not out_dir:
        line += " (the model that ships; out/ has no run yet)"
    elif line.endswith("barely trained") and SHIPPED.is_dir():
        shipped = environment.quote(environment.shorter(SHIPPED))
        line += f"; --out_dir={shipped} is the one that ships"
    warn(line)
