"""The tables of docs/scale.md: `python studies/scale.py` prints them, test_scale.py compares.

Memory follows the formula whose parts test_shards.py and test_scale.py measure; speeds are
predictions.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanomdlm.support.cli import entry

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

    def kept(self, n):
        """Bytes that a layer keeps of a token for its backward pass, in bfloat16; n ranks share a
        model (1: none, DDP)."""
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

    def kept(self, n):
        H = self.heads
        K = self.kv_heads
        D = self.head_dim
        norms = 2 * (8 * self.width + 4)  # each: input and scale in float32, two results
        attention = 4 * H * D + 4 * K * D + 4 * H  # q, k, v, the result; logsumexp
        of_heads = 6 * (H + K) * D + 4 * (H + K)  # norms of q and k
        if n == 1:  # DDP: the stream is float32, and cast for each of five products
            norms += 10 * self.width
        return norms + attention + (of_heads if self.qk_norms else 0) + 8 * self.inner

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
    kept = model.layers * model.kept(n)
    if recompute:
        kept = model.layers * 2 * model.width + model.kept(n)
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
    head = ["model", "machine", "flags", "state", "whole", "activations", "GB per rank"]
    head += ["tokens/s, T = 1,024 (predicted)", "T = 4,096 (predicted)"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *(row(model, machine) for model in models for machine in MACHINES)])


def main(argv):
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    print(table(MODELS), table(DECODERS), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
