"""Shared by the tests: text that ships with Python, tiny runs, toy models of known likelihood."""

import contextlib
import functools
import importlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if Path("/proc/cpuinfo").exists() and "GenuineIntel" in Path("/proc/cpuinfo").read_text():
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # support/infill/batching.py
sys.path.insert(0, str(Path(__file__).parent.parent))

import mdlm
from nanomdlm import variants
from nanomdlm.kernels import operations as kernels
from nanomdlm.support import abilities
from nanomdlm.support.cli import entry, files
from nanomdlm.support.data import sources
from nanomdlm.support.run import checkpoint
from nanomdlm.support.run import folder as run_folder

torch.set_num_threads(1)  # these models are tiny, and threads that wait for a busy core spin
ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
CHECKPOINT_FILES = (*checkpoint.MODEL_FILES, "state.json", "state.safetensors")
TINY = [
    "--device=cpu",
    "--compile=off",
    "--dtype=float32",
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--block_size=32",
    "--batch_size=8",
    "--log_interval=1",
    "--eval_windows=32",
    "--eval_interval=1000",
    "--warmup_steps=2",
    "--dropout=0",
]


def tiers(cases, fast=(), slow=()):
    """Test cases as parameters: by default those in `fast` run, then -m slow and -m long.

    The cases in `fast` and `slow` were chosen once to differ in what matters; changes of a theme
    are tried with all of them: pytest -m "" tests/FILE.py.
    """
    parameters = []
    for case in cases:
        marks = () if case in fast else pytest.mark.slow if case in slow else pytest.mark.long
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*values, marks=marks))
    return parameters


@pytest.fixture(scope="session")
def pydoc():
    """60,000 characters of the Python reference, real text that needs no network."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[k] for k in sorted(topics))[:60_000]


@pytest.fixture(scope="session")
def text_file(pydoc, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "pydoc.txt"
    path.write_text(pydoc, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def trained(text_file, tmp_path_factory):
    """A run with step-60 and step-90, of 2 layers x 64; not to be changed.

    Its learning rate stays, so its averaged weights differ from the raw ones.
    """
    out = tmp_path_factory.mktemp("trained") / "out"
    flags = ["--n_embd=64", "--max_steps=90", "--eval_interval=30", "--lr_schedule=constant"]
    assert run_mdlm(f"--data={text_file}", *TINY, *flags, f"--out_dir={out}") == 0
    return out


@pytest.fixture(scope="session")
def short_run(pydoc, tmp_path_factory):
    """A run with step-2 and step-4 on 6,000 characters; not to be changed."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "text.txt").write_text(pydoc[:6000], encoding="utf-8")
    flags = ["--max_steps=4", "--eval_interval=2", "--eval_windows=2"]
    args = [f"--data={folder / 'text.txt'}", *TINY, *flags, f"--out_dir={folder / 'out'}"]
    assert run_mdlm(*args) == 0
    return folder / "out"


@pytest.fixture
def run(short_run, tmp_path):
    """A copy of short_run that a test may change."""
    return shutil.copytree(short_run, tmp_path / "run")


def corpus_of(folder, config, device=CPU):
    """The Corpus of a folder of ids."""
    return mdlm.variants.open_corpus(mdlm.Corpus, sources.of_config(folder, config), config, device)


def run_mdlm(*args):
    """The exit code of mdlm.py with these flags, run in this process."""

    def main(argv):
        return mdlm.main(argv)

    return entry.run(main, [str(a) for a in args], run_folder.release)


def call(main, capsys, *args):
    """The exit code, standard output and standard error of a program with these flags."""
    capsys.readouterr()
    code = entry.run(main, [str(a) for a in args], run_folder.release)
    return SimpleNamespace(code=code, **capsys.readouterr()._asdict())


def tiny_flags(*more):
    """TINY without the flags that are in `more`, then `more`."""
    given = {flag.split("=")[0] for flag in more}
    return [flag for flag in TINY if flag.split("=")[0] not in given] + list(more)


class StopAt:
    """Stands in for signals.Interrupt: a Ctrl-C that arrives before step number `at`."""

    def __init__(self, at):
        self.left = at

    @property
    def signal(self):
        self.left -= 1
        return signal.SIGINT if self.left < 0 else 0


def read_log(out_dir):
    return [json.loads(line) for line in (Path(out_dir) / "log.jsonl").read_text().splitlines()]


def losses(out_dir):
    return [r["loss"] for r in read_log(out_dir) if "loss" in r]


def saved(out_dir):
    """All tensors of the last checkpoint (weights, averages, optimizer state), step and tokens."""
    folder = checkpoint.find_checkpoint(out_dir)
    state = checkpoint.read_state(folder)
    tensors = checkpoint.read_tensors(folder / "state.safetensors")
    for name, t in checkpoint.read_tensors(folder / "model.safetensors").items():
        tensors[f"model.{name}"] = t
    return tensors, (state["step"], state["tokens"])


def sign(folder):
    """Make the manifest fit the files, as a forger of a checkpoint would."""
    sizes = {}
    others = (*folder.glob("*.py"), *folder.glob("network.json"))
    for name in (*CHECKPOINT_FILES, *(path.name for path in others)):
        path = folder / name
        sizes[name] = dict(size=path.stat().st_size, sha256=files.sha256_of(path))
    manifest = dict(format="mdlm", version=1, files=sizes)
    (folder / "manifest.json").write_text(json.dumps(manifest))


class Toy:
    """A model given by a function from (B, T) ids to (B, T, V) logits, for mdlm.evaluate.

    end_id: of an [END] that ends documents of given lengths. The function of an autoregressive one
    is given the text that the model was given, not the shifted one that a network sees.
    """

    def __init__(self, logits, V, T, end_id=None, mean_length=None, **config):
        self.logits = logits
        self.mask_id = self.vocab_size = V
        self.training = False
        self.config = mdlm.Config(block_size=T, **config)
        self.objective = variants.choose(
            self.config, mdlm.MaskedDiffusion(self.config, V), end_id, mean_length
        )
        self.ops = kernels.select("torch")
        if abilities.knows_lengths(self):
            self.length_counts = torch.zeros(T + 1)

    def __call__(self, view, rows=None):
        if isinstance(view, torch.Tensor):
            view = self.objective.view(view, rows=rows)
        ids = view.ids
        if view.causal:  # the last token, which no position sees, is not known any more
            ids = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=self.mask_id)
        logits = self.logits(ids)
        return logits if view.rows is None else logits.flatten(0, 1)[view.rows].float()

    def calibrated(self):
        return self

    def eval(self):
        pass

    def train(self, mode):
        pass


def draw(model, x0, step=0, samples=None, margin=0.0):
    """What mdlm.draw_batch draws for texts x0 (N, T), a step's whole batch; samples: some of it."""
    samples = torch.arange(len(x0)) if samples is None else samples
    scored = model.objective.scored_mask(x0).sum(1)  # (N,)
    corpus = SimpleNamespace(
        batch=lambda numbers: (x0[numbers % len(x0)], scored[numbers % len(x0)])
    )
    run = SimpleNamespace(corpus=corpus, objective=model.objective, sequences_before=lambda step: 0)
    return mdlm.draw_batch(run, step, margin, samples)


def watch_masks(monkeypatch):
    """A list to which each batch that is trained adds how many tokens of each text are masked."""
    masked = []
    batch = mdlm.MaskedDiffusion.batch

    def watched(objective, *args, **evaluation):
        made = batch(objective, *args, **evaluation)
        if not evaluation:
            masked.append((made[0].ids == objective.mask_id).sum(1))
        return made

    monkeypatch.setattr(mdlm.MaskedDiffusion, "batch", watched)
    return masked


def counts_of(config, step, margin_scale=0.0, lengths=None, V=9):
    """How many tokens each text of a step's whole batch has masked, (N,)."""
    objective = variants.choose(config, mdlm.MaskedDiffusion(config, V))
    N = config.batch_size
    if lengths is None:
        lengths = torch.full((N,), config.block_size)
    return objective.mask_counts(step, margin_scale, torch.arange(N), lengths)


@pytest.fixture(scope="session")
def world():
    """A random distribution p over {0,1,2}^4, its exact posterior as a model, and a random model.

    exact(xt)[b, i, v] = log p(x_i = v | the unmasked tokens of xt[b]);
    random(xt): a fixed table of logits.
    """
    V = 3
    T = 4
    g = torch.Generator().manual_seed(7)
    x = torch.tensor(list(itertools.product(range(V), repeat=T)))  # (81, 4)
    p = torch.softmax(2 * torch.randn(len(x), generator=g, dtype=torch.float64), 0)
    table = torch.randn((V + 1) ** T, T, V, generator=g, dtype=torch.float64)

    def exact(xt):
        agrees = ((xt[:, None] == x) | (xt[:, None] == V)).all(-1).double()  # (B, 81)
        joint = torch.einsum("bn,n,niv->biv", agrees, p, torch.nn.functional.one_hot(x, V).double())
        return (joint / joint.sum(-1, keepdim=True).clamp(min=1e-300)).clamp(min=1e-300).log()

    def random(xt):
        return table[(xt * (V + 1) ** torch.arange(T)).sum(-1)]

    return SimpleNamespace(V=V, T=T, x=x, p=p, exact=exact, random=random)


def exhaustive_nelbo(logits, x0, V):
    """(B,) NELBO per token of rows x0 (B, T): the mean over n of the mean CE of n positions."""
    B, T = x0.shape
    total = torch.zeros(B, dtype=torch.float64)
    for n in range(1, T + 1):
        sets = list(itertools.combinations(range(T), n))
        for s in sets:
            xt = x0.clone()
            xt[:, list(s)] = V
            logp = torch.log_softmax(logits(xt), -1).gather(-1, x0[..., None])[..., 0]
            total -= logp[:, list(s)].mean(1) / len(sets) / T
    return total


def chain_rule(logits, x0, V, order):
    """(B,) -log likelihood per token of rows x0, one token after another in this order."""
    xt = torch.full_like(x0, V)
    total = torch.zeros(len(x0), dtype=torch.float64)
    for i in order:
        total -= torch.log_softmax(logits(xt), -1)[:, i].gather(-1, x0[:, i : i + 1])[:, 0]
        xt[:, i] = x0[:, i]
    return total / x0.shape[1]


@pytest.fixture(autouse=True)
def closed_sockets_kill_no_test():
    """A program that a test ran in this process may have left SIGPIPE to the system."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def hashed_world(T, V, seed, hidden=None):
    """A random Toy in float64: logits by a hash of all it sees; rows it was given in `hidden`."""
    g = torch.Generator().manual_seed(seed)
    table = 2 * torch.randn(997, T, V, generator=g, dtype=torch.float64)
    power = torch.randint(1, 997, (T,), generator=g)

    def logits(xt):
        if hidden is not None:
            hidden.append(len(xt))
        return table[(xt * power).sum(-1) % 997]

    return Toy(logits, V, T)


@functools.cache
def flags_of(program, mode=""):
    """The names of the flags that a program's --help lists, with underscores."""
    shown = io.StringIO()
    argv = [mode] * bool(mode) + ["--help=all" if program == "mdlm" else "--help"]
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        importlib.import_module(program).main(argv)
    lines = re.findall(r"(?m)^\W*--.*$", shown.getvalue())
    return {name.replace("-", "_") for line in lines for name in re.findall(r"--(\w[\w-]*)", line)}


def unknown_flags(program, words):
    """Those of a command's words that are flags which its program does not have."""
    mode = words[0] if program == "bench" and words and words[0].isalpha() else ""
    named = {word[2:].partition("=")[0].replace("-", "_") for word in words if word[:2] == "--"}
    return named - flags_of(program, mode) - {"help", ""}


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium, for the tests of a module."""
    from webdriver import Browser

    found = Browser()
    found.call("/timeouts", script=60_000)
    yield found
    found.close()
