"""Does a model repeat its training text?

    python studies/memorized.py --data=tinyshakespeare.txt --ar_dir=twin

Of the texts that a model and an autoregressive twin write: the share of all runs of 30 characters
that the training text has, beside that of validation text. And for 24 gaps of 30 characters in the
middle of a context of training text: how often the likeliest fill is the text that was there (of a
model that sees both sides; its likeliest character at a time).
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/memorized.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

from dataclasses import dataclass

import torch

import mdlm
import sample
from nanomdlm.support.cli.settings import Count, Natural, Reads, parse
from nanomdlm.support.run.checkpoint import default_run

N = 30  # characters of a run, and of a gap


@dataclass
class Options:
    data: Reads = ""  # the text that the models learned
    out_dir: Reads = ""  # a model that sees both sides
    ar_dir: Reads = ""  # its autoregressive twin
    texts: Count = 64  # texts of each model
    gaps: Count = 24
    seed: Natural = 1000


def copied(texts, training):
    """The share of all runs of N characters of texts that are in the set `training`."""
    runs = [text[i : i + N] for text in texts for i in range(len(text) - N + 1)]
    return sum(run in training for run in runs) / len(runs)


def restored(model, tokenizer, text, gaps, seed):
    """How many of some gaps in a text get back what was there."""
    L = model.config.block_size
    ids = torch.tensor(tokenizer.encode(text))
    at = torch.randint(len(ids) - L, (gaps,), generator=torch.Generator().manual_seed(seed))
    windows = torch.stack([ids[i : i + L] for i in at.tolist()])
    x = windows.clone()
    begin = (L - N) // 2
    x[:, begin : begin + N] = model.mask_id
    settings = dict(steps=N, order="max_prob", temperature=0.0, correct=0)
    filled = torch.cat([sample.generate(model, row[None], **settings) for row in x])
    return int((filled == windows).all(1).sum())


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    text = Path(options.data).read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    training = {text[i : i + N] for i in range(cut - N + 1)}
    print(f"validation text: {copied([text[cut:]], training):.3%} copied", flush=True)
    for folder in (default_run(options.out_dir), options.ar_dir):
        if folder:
            model, tokenizer, config = mdlm.load(folder)
            texts = sample.write(model, tokenizer, n=options.texts, seed=options.seed)
            said = f"{folder}: {copied(texts, training):.3%} copied, of {len(texts)} texts"
            if config.objective != "ar":
                n = restored(model, tokenizer, text[:cut], options.gaps, options.seed)
                said += f"; {n} of {options.gaps} gaps restored"
            print(said, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
