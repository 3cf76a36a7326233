"""Self-distillation through time (SDTT, 2410.21035): one call learns what two calls say.

    python studies/few_calls.py weights/record 16 --data=tinyshakespeare.txt \\
        --init_from=weights/record --max_steps=1000 --muon_lr=0.004 --learning_rate=0.002 \\
        --out_dir=student
    python studies/few_calls.py measure weights/record,student \\
        --data=tinyshakespeare.txt --ar_dir=twin

The first word names the teacher, the second its number of calls for a text: a first call reveals
that share of the text, a second one sees it. The student, which sees neither, matches the first
call where it revealed and the second elsewhere. `measure` writes texts in 8 and 16 calls with each
model, and with the first one at lower temperatures: what a student must beat, because it becomes
surer, too.

The KL divergence is the reverse one. With the forward one the best student is the teacher: over all
draws, the second call's probabilities have the first call's as their mean.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/few_calls.py, from anywhere

from nanomdlm.support.cli import entry

PROCESS_START = entry.start(__name__)

import torch

import bench
import eval
import mdlm
from nanomdlm.studies import distill
from nanomdlm.support.cli.settings import Count, Reads, names_of, parse
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import word_statistics
from nanomdlm.support.run.plots import table
from nanomdlm.variants.variant import Variant

TEMPERATURES = (1.0, 0.9, 0.8, 0.7)


class ThroughTime(Variant):
    """Learns from two calls of `teacher`, of which the first reveals up to `n` tokens of a text."""

    def __init__(self, inner, teacher, n):
        super().__init__(inner)
        self.teacher = teacher
        self.n = n
        self.generator = torch.Generator().manual_seed(0)

    def loss(self, network, batch):
        with torch.no_grad():
            target = self.of_two_calls(batch)
        log_q = network(batch.view).log_softmax(-1)  # (n, V)
        kl = (log_q.exp() * (log_q - target)).sum(-1)
        return (kl * batch.weights).sum()

    def of_two_calls(self, batch):
        """The teacher's log-probabilities (n, V)."""
        view, at = batch.view, batch.at
        B, T = view.ids.shape
        log_p = self.teacher(view).log_softmax(-1)
        drawn = torch.multinomial(log_p.exp(), 1, generator=self.generator)[:, 0]
        # A random key for each masked token; the n lowest of a text are revealed.
        keys = torch.full((B * T,), 2.0)
        keys[at] = torch.rand(len(at), generator=self.generator)
        limit = keys.view(B, T).sort().values[:, self.n - 1]
        revealed = keys[at] <= limit[at // T]
        ids = view.ids.flatten().clone()
        ids[at[revealed]] = drawn[revealed]
        second = self.teacher(view._replace(ids=ids.view(B, T))).log_softmax(-1)
        return torch.where(revealed[:, None], log_p, second)


@dataclass
class Options:
    """Measure texts in few calls."""

    data: Reads = ""  # text that the models learned
    ar_dir: Reads = "twin"  # run folder of an autoregressive model that scores texts
    num_samples: Count = 64  # texts of each row


def measure(names, options):
    """Print a table of known words, and of likelihood and entropy under the twin."""
    device = torch.device("cpu")
    twin = mdlm.load(options.ar_dir)[0]
    rows = [["model", "T", "calls", "words", "+-", "twin", "+-", "expected", "distinct"]]
    for name in names:
        model, tokenizer, config = mdlm.load(name)
        with eval.open_data(options.data, Path(name), tokenizer, config, device) as (corpus, _):
            known = word_statistics.WordStatistics(
                tokenizer.decode(corpus.ids["train"].tolist()), shortest=5
            )
        for T in TEMPERATURES if name == names[0] else TEMPERATURES[:1]:
            for calls in (8, 16):
                more = dict(steps=calls, temperature=T)
                x, _ = bench.write_texts(model, options.num_samples, [1000], "bfloat16", more)
                r = known([tokenizer.decode(ids) for ids in x.tolist()]) | bench.judge_by(twin, x)
                keys = ("words", "words_se", "twin", "twin_se", "expected", "distinct")
                rows.append([name, T, calls, *(r[key] for key in keys)])
                print(table([rows[0], rows[-1]], digits=3), flush=True)
    print(table(rows, digits=3))


def main(argv):
    if len(argv) < 2 or argv[0].startswith("-"):
        raise UserError("first give a teacher and its number of calls, or measure and models")
    if argv[0] == "measure":
        measure(names_of(argv[1]), Options(**parse(Options, argv[2:], __doc__)))
        return 0
    name, calls, *flags = argv
    teacher, _, config = mdlm.load(name)
    n = config.block_size // int(calls)

    def objective(inner, model):
        return ThroughTime(inner, teacher, n)

    return distill.train(objective, flags, PROCESS_START)


if __name__ == "__main__":
    with entry.program() as end:
        end.code = main(sys.argv[1:])
    sys.exit(end.code)
