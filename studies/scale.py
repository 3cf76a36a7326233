"""Which model fits where: the tables of docs/scale.md, and what ranks hold, measured on this CPU.

    python studies/scale.py               # print the tables
    python studies/scale.py --measure     # start 1, 2 and 4 ranks of a Llama of 49 M parameters

Memory follows the formula whose parts test_shards.py and test_scale.py measure; speeds are
predictions. --measure needs Linux, 4 GB of memory and the transformers library (--lora: peft too).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/scale.py, from anywhere

from support import cli

cli.start(__name__)

import ctypes
import json
import multiprocessing
import os
import re
import socket
import tempfile
import time
from dataclasses import dataclass

import torch

import mdlm
from support import lora, pretrained
from support.environment import optional
from support.errors import UserError
from support.flags import Parser, first_line
from support.training import shards

TOKENS = 8192  # of a rank at a time
REACHED = 0.4  # of the peak FLOP/s, in the matrix products
USABLE = 0.92  # of a GPU's memory


@dataclass
class Model:
    name: str
    layers: int
    width: int
    vocabulary: int

    @property
    def layer(self):
        return 12 * self.width**2

    @property
    def matrices(self):
        """Parameters of a layer that Muon updates."""
        return self.layer

    @property
    def ends(self):  # embedding and head
        return (2 * self.vocabulary + 1) * self.width

    @property
    def parameters(self):
        return self.layers * self.layer + self.ends

    @property
    def attended(self):
        """Numbers of all heads of a query together."""
        return self.width

    @property
    def kept(self):
        """Bytes that a layer keeps of a token for its backward pass."""
        return 2 * 32 * self.width

    def flops(self, T, recompute):
        """Of forward and backward, for a token; half of the head's rows are masked."""
        body = self.layers * self.layer
        again = 2 * body if recompute else 0
        return (
            6 * (body + self.vocabulary * self.width / 2)
            + again
            + 12 * self.layers * self.attended * T
        )


@dataclass
class Decoder(Model):
    """A Llama or a Qwen3 of the transformers library, as its config.json says; V rows."""

    heads: int
    kv_heads: int
    inner: int  # of the MLP
    head_dim: int = 128
    is_tied: bool = False
    qk_norms: int = 0  # 2: of the queries and the keys (Qwen3)

    @property
    def attended(self):
        return self.heads * self.head_dim

    @property
    def matrices(self):
        return self.width * (2 * self.attended + 2 * self.kv_heads * self.head_dim + 3 * self.inner)

    @property
    def layer(self):
        return self.matrices + 2 * self.width + self.qk_norms * self.head_dim

    @property
    def ends(self):  # embedding, head and last norm
        return ((1 if self.is_tied else 2) * self.vocabulary + 1) * self.width


@dataclass
class Machine:
    name: str
    ranks: int
    memory: float  # bytes of a GPU
    peak: float  # FLOP/s in bfloat16
    ring: float  # bytes/s of a rank in all-gather, reduce-scatter, all-reduce
    exchange: float  # and in all-to-all: between nodes there is one network card a GPU


MODELS = (
    Model("124 M", 12, 768, 50304),
    Model("1.5 B", 48, 1600, 50304),
    Model("8 B", 36, 4096, 128256),
    Model("70 B", 84, 8192, 128256),
)
DECODERS = (
    Decoder("Qwen3-0.6B", 28, 1024, 151936, 16, 8, 3072, is_tied=True, qk_norms=2),
    Decoder("Llama-3.1-8B", 32, 4096, 128256, 32, 8, 14336),
    Decoder("Llama-3.1-70B", 80, 8192, 128256, 64, 8, 28672),
)
MACHINES = (
    Machine("8 x 24 GB (RTX 4090)", 8, 24e9, 165e12, 12e9, 12e9),
    Machine("8 x 80 GB (H100)", 8, 80e9, 989e12, 270e9, 270e9),
    Machine("64 x 80 GB (H100)", 64, 80e9, 989e12, 250e9, 40e9),
)


def held(model, n, recompute, accumulates=False):
    """Bytes of a rank: state, whole parameters, activations; n ranks share a model (1: none)."""
    P, R, K = model.parameters, model.ends, model.layer
    matrices = model.layers * model.matrices
    state = (4 + 4 + 4) * P / n  # weights, gradients, average, in float32
    state += (4 * matrices + 8 * (P - matrices)) / n  # moments of Muon and AdamW
    VC = model.vocabulary * model.width
    if n > 1:
        whole = 2 * (R + 2 * K) + 6 * (R + K) + 4 * VC  # gathered; their gradients; the head's
    else:
        whole = 2 * P + 4 * P + 4 * VC  # what autocast keeps in bfloat16, DDP's buckets, the head's
    if accumulates and n > 1:
        whole += 4 * P
    kept = model.layers * 2 * model.width + model.kept if recompute else model.layers * model.kept
    activations = TOKENS * kept + 2 * min(TOKENS / 2 * model.vocabulary, 1 << 28)
    return state, whole, activations


def sent(model, machine, n):
    """Seconds in which a rank sends its bytes of a step, in groups of n ranks (1: DDP)."""
    P = model.parameters
    groups = machine.ranks // n
    exchange = machine.ring if n <= 8 else machine.exchange
    seconds = (2 * 2 * P + 4 * P) * (1 - 1 / n) / machine.ring  # gathered twice, reduced once
    seconds += 2 * 4 * model.layers * model.matrices * (1 - 1 / n) / n / exchange  # Muon
    return seconds + 2 * 4 * P / n * (1 - 1 / groups) / machine.ring  # between the groups


def row(model, machine):
    """Of the ways that fit the fastest, with the fewest flags; else the one that takes least."""

    def seconds(way, T):
        n, recompute = way
        multiply = TOKENS * model.flops(T, recompute) / (REACHED * machine.peak)
        return max(multiply, sent(model, machine, n))

    ways = [(n, recompute) for n in dict.fromkeys((1, 8, machine.ranks)) for recompute in (0, 1)]
    total = {way: sum(held(model, *way)) for way in ways}
    fit = [way for way in ways if total[way] <= USABLE * machine.memory]
    way = min(fit, key=lambda way: seconds(way, 1024)) if fit else min(ways, key=total.get)
    n, recompute = way
    flags = ["--shard" if n == machine.ranks else f"--shard={n}"] * (n > 1)
    flags += ["--recompute"] * recompute
    cells = [model.name, machine.name, f"`{' '.join(flags)}`" if flags else "none"]
    cells += [f"{n_bytes / 1e9:.1f}" for n_bytes in (*held(model, *way), total[way])]
    for T in (1024, 4096):
        speed = machine.ranks * TOKENS / seconds(way, T)
        cells.append(f"{speed / 1e3:,.0f} k" if fit else "does not fit")
    return f"| {' | '.join(cells)} |"


def table(models):
    """Markdown: a row for each model and machine."""
    head = ["model", "machine", "flags", "state", "whole", "activations", "GB a rank"]
    head += ["tokens/s, T = 1,024 (predicted)", "T = 4,096 (predicted)"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *(row(model, machine) for model in models for machine in MACHINES)])


# ---- Measured: what ranks hold
def size(tensors):
    """Bytes of this rank's parts of tensors, each counted once."""
    parts = {t.data_ptr(): t.nbytes for t in map(shards.local, tensors)}
    return sum(parts.values())


def bytes_held(run):
    """{what: bytes} that this rank holds of a Run; gradients, while there are any."""
    models = (run.model, run.averaged)
    slots = [s for optimizer in run.optimizers for s in optimizer.state.values()]
    frozen = [p for m in models for _, p in lora.all_parameters(m) if not p.requires_grad]
    return dict(
        weights=size(run.model.parameters()),
        gradients=size(p.grad for p in run.model.parameters() if p.grad is not None),
        average=size(run.averaged.parameters()) if run.averaged is not run.model else 0,
        moments=size(t for s in slots for t in s.values() if t.dim()),
        frozen=size(frozen),
    )


def peak():
    """Bytes of memory that this process has had at most since the last call (Linux)."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024


# A Llama of 49 M parameters: 12 layers of 3.4 M, and 8.4 M in its embedding and head.
SIZES = dict(hidden_size=512, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=8)
SIZES |= dict(intermediate_size=1536, vocab_size=8192, max_position_embeddings=64)
FLAGS = ["--device=cpu", "--dtype=float32", "--compile=off", "--block_size=16", "--batch_size=8"]
FLAGS += ["--max_steps=2", "--eval_windows=2", "--optimizer=adamw", "--shard"]


def save_network(folder, **sizes):
    """Write a random Llama and a tokenizer of bytes to a folder, as Hugging Face has them."""
    transformers = pretrained.library()
    tokenizers = optional("tokenizers", "--measure")
    config = transformers.AutoConfig.for_model("llama", **SIZES | sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    vocab = {c: i for i, c in enumerate(sorted(byte_level.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.pre_tokenizer = byte_level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def run_rank(folder, flags, env, report):
    """Begin a run as one of its ranks, compute the gradients of a step and make it; write to the
    file `report` what was held."""
    os.environ.update(env)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # what is freed goes back to the system at once
    found = {}
    make_run = mdlm.make_run

    def watched(*args):
        run = make_run(*args)
        found["loading"] = peak() - before
        return run

    mdlm.make_run = watched
    peak()
    before = peak()
    flags = [f"--init_from={folder}", f"--data={folder / 'text.txt'}", *FLAGS, *flags]
    run = mdlm.setup(mdlm.parse_args(flags), time.monotonic())
    mdlm.set_rates(run, 0, 1.0)
    mdlm.compute_gradients(run, 0, 1.0)
    gradients = bytes_held(run)["gradients"]
    mdlm.clip(run)
    mdlm.update(run)
    found |= bytes_held(run) | dict(gradients=gradients)
    found["parameters"] = sum(p.numel() for _, p in lora.all_parameters(run.model))
    found["trained"] = sum(p.numel() for p in run.model.parameters())
    report.write_text(json.dumps(found))
    mdlm.ranks.leave_ranks()


def measure(folder, n, *flags):
    """[{what: bytes}] of the n ranks of a run that begins with the network of a folder."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = dict(WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    env |= dict(TORCHELASTIC_RUN_ID="scale")
    reports = [folder / f"rank-{rank}.json" for rank in range(n)]
    flags = [*flags, f"--out_dir={folder / f'of-{n}'}", "--overwrite"]
    fork = multiprocessing.get_context("fork")  # nothing is imported again
    ranks = []
    for rank, report in enumerate(reports):
        own = env | dict(RANK=str(rank), LOCAL_RANK=str(rank))
        ranks.append(fork.Process(target=run_rank, args=(folder, flags, own, report)))
        ranks[-1].start()
    for process in ranks:
        process.join()
    if failed := [i for i, process in enumerate(ranks) if process.exitcode]:
        raise UserError(f"rank {failed[0]} of {n} failed, as said above; free some memory")
    return [json.loads(report.read_text()) for report in reports]


KINDS = ("weights", "gradients", "average", "moments", "frozen", "loading")


def measured(folder, numbers, *flags):
    """Markdown: a row for each number of ranks, the largest of its ranks in MB; prints it too."""
    lines = [f"| ranks | {' | '.join(KINDS)} |", "|" + " --- |" * (1 + len(KINDS))]
    print("\n".join(lines), flush=True)
    for n in numbers:
        found = measure(folder, n, *flags)
        cells = [f"{max(each[kind] for each in found) / 1e6:.1f}" for kind in KINDS]
        lines.append(f"| {n} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main(argv):
    parser = Parser(description=first_line(__doc__))
    parser.add_argument("--measure", action="store_true", help="measure what ranks hold")
    parser.add_argument("--lora", type=int, default=0, help="with --measure: rank of adapters")
    options = parser.parse_args(argv)
    if not options.measure:
        print(table(MODELS), table(DECODERS), sep="\n\n")
        return 0
    if sys.platform != "linux":
        raise UserError("--measure reads /proc, which Linux has; run it there")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        save_network(folder)
        (folder / "text.txt").write_text(Path(mdlm.__file__).read_text(encoding="utf-8"))
        measured(folder, (1, 2, 4), *[f"--lora={options.lora}"] * (options.lora > 0))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
