"""Shared by the tests: real text that ships with Python, tiny runs, toy models of known likelihood."""

import itertools
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import common
import kernels
import mdlm

torch.set_num_threads(1)  # these models are tiny, and threads that wait for a busy core spin
ROOT = Path(__file__).parent.parent
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


def run_mdlm(*args):
    """The exit code of mdlm.py with these flags, run in this process."""
    return common.run(
        lambda argv: mdlm.train(mdlm.parse_args(argv), time.monotonic()), [str(a) for a in args]
    )


def read_log(out_dir):
    return [json.loads(line) for line in (Path(out_dir) / "log.jsonl").read_text().splitlines()]


def losses(out_dir):
    return [r["loss"] for r in read_log(out_dir) if "loss" in r]


class Toy:
    """A model given by a function from (B, T) ids to (B, T, V) logits, as mdlm.evaluate needs it."""

    def __init__(self, logits, V, T, **config):
        self.features = lambda xt, rows=None: logits(xt) if rows is None else logits(xt).flatten(0, 1)[rows]
        self.mask_id, self.vocab_size, self.training = V, V, False
        self.config = mdlm.Config(block_size=T, **config)
        self.ops = kernels.select("torch")
        self.head_weight = lambda: torch.eye(V, dtype=logits(torch.full((1, T), V)).dtype)
        self.eval = lambda: None
        self.train = lambda mode: None

    def __call__(self, xt):
        return self.features(xt)


@pytest.fixture(scope="session")
def world():
    """A random distribution p over {0,1,2}^4, its exact posterior as a model, and a random model.

    exact(xt)[b, i, v] = log p(x_i = v | the unmasked tokens of xt[b]); random(xt): a fixed table of logits.
    """
    V, T = 3, 4
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
    """(B,) NELBO per token of rows x0 (B, T): the mean CE, over all sets of l positions, over all l."""
    B, T = x0.shape
    total = torch.zeros(B, dtype=torch.float64)
    for l in range(1, T + 1):
        sets = list(itertools.combinations(range(T), l))
        for s in sets:
            xt = x0.clone()
            xt[:, list(s)] = V
            logp = torch.log_softmax(logits(xt), -1).gather(-1, x0[..., None])[..., 0]
            total -= logp[:, list(s)].mean(1) / len(sets) / T
    return total


def chain_rule(logits, x0, V, order):
    """(B,) -log likelihood per token of rows x0, one token after another in this order."""
    xt, total = torch.full_like(x0, V), torch.zeros(len(x0), dtype=torch.float64)
    for i in order:
        total -= torch.log_softmax(logits(xt), -1)[:, i].gather(-1, x0[:, i : i + 1])[:, 0]
        xt[:, i] = x0[:, i]
    return total / x0.shape[1]
