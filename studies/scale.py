"""The table of docs/scale.md: `python studies/scale.py` prints it, test_shards.py compares.

Memory follows the formula whose parts test_shards.py measures; speeds are predictions.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import cli
from support.flags import Parser, first_line

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
    def ends(self):  # embedding and head
        return (2 * self.vocabulary + 1) * self.width

    @property
    def parameters(self):
        return self.layers * self.layer + self.ends

    def flops(self, T, recompute):
        """Of forward and backward, for a token; half of the head's rows are masked."""
        body = self.layers * self.layer
        again = 2 * body if recompute else 0
        return (
            6 * (body + self.vocabulary * self.width / 2)
            + again
            + 12 * self.layers * self.width * T
        )


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
MACHINES = (
    Machine("8 x 24 GB (RTX 4090)", 8, 24e9, 165e12, 12e9, 12e9),
    Machine("8 x 80 GB (H100)", 8, 80e9, 989e12, 270e9, 270e9),
    Machine("64 x 80 GB (H100)", 64, 80e9, 989e12, 250e9, 40e9),
)


def held(model, n, recompute, accumulates=False):
    """Bytes of a rank: state, whole parameters, activations; n ranks share a model (1: none)."""
    P, R, K = model.parameters, model.ends, model.layer
    matrices = model.layers * K
    state = (4 + 4 + 4) * P / n  # weights, gradients, average, in float32
    state += (4 * matrices + 8 * (P - matrices)) / n  # moments of Muon and AdamW
    VC = model.vocabulary * model.width
    if n > 1:
        whole = 2 * (R + 2 * K) + 6 * (R + K) + 4 * VC  # gathered; their gradients; the head's
    else:
        whole = 2 * P + 4 * P + 4 * VC  # what autocast keeps in bfloat16, DDP's buckets, the head's
    if accumulates and n > 1:
        whole += 4 * P
    layers = model.layers + 32 if recompute else 32 * model.layers
    activations = 2 * TOKENS * model.width * layers + 2 * min(
        TOKENS / 2 * model.vocabulary, 1 << 28
    )
    return state, whole, activations


def sent(model, machine, n):
    """Seconds in which a rank sends its bytes of a step, in groups of n ranks (1: DDP)."""
    P = model.parameters
    groups = machine.ranks // n
    exchange = machine.ring if n <= 8 else machine.exchange
    seconds = (2 * 2 * P + 4 * P) * (1 - 1 / n) / machine.ring  # gathered twice, reduced once
    seconds += 2 * 4 * model.layers * model.layer * (1 - 1 / n) / n / exchange  # Muon
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


def table():
    head = ["model", "machine", "flags", "state", "whole", "activations", "GB a rank"]
    head += ["tokens/s, T = 1,024 (predicted)", "T = 4,096 (predicted)"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *(row(model, machine) for model in MODELS for machine in MACHINES)])


def main(argv):
    Parser(description=first_line(__doc__)).parse_args(argv)
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
