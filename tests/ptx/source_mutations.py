"""Breaks the source of the kernels on purpose, and says which tests fail.

    python tests/ptx/source_mutations.py                # all: the table in results/aot.md
    python tests/ptx/source_mutations.py --only=int32   # those whose description has this word

Each mutation is made in a copy of the project. Then the tests run there: those in Triton's
interpreter and those in the emulator; of each first the default ones, then the slow ones.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".*", "__pycache__", "docs", "lessons", "results", "weights", "out*", "*.pt")


class Mutation(NamedTuple):
    what: str  # is wrong then
    file: str  # of kernels/
    kind: str  # of cases.py
    old: str
    new: str
    number: int = 0  # which occurrence of `old`


ATTENTION = ("attention.py", "attention")
HEAD = ("cross_entropy.py", "head")
MASKING = ("masking.py", "masking")
CONVOLUTION = ("convolution.py", "convolution")
V_PTR = "v_ptr = qkv + 3 * b * T * H * D + (2 * H + h) * D"
MUTATIONS = [
    Mutation("int32 offset: sample", *ATTENTION, "(head // H).to(tl.int64)", "head // H"),
    Mutation("int32 offset: row of qk", *ATTENTION, "(0).to(tl.int64) * ROWS", "(0) * ROWS"),
    Mutation("int32 offset: row of logits", *HEAD, "tl.program_id(0).to(tl.int64)", "tl.program_id(0)"),
    Mutation("int32 offset: row of x", *CONVOLUTION, "row, -1).to(tl.int64)", "row, -1)"),
    Mutation("int32 offset: row of y", *CONVOLUTION, "(col * 0 + row).to(tl.int64)", "col * 0 + row"),
    Mutation("int32 target", *HEAD, "+ i).to(tl.int64)", "+ i).to(tl.int32)"),
    Mutation("wrong part: V is K", *ATTENTION, V_PTR, V_PTR.replace("2 * H", "H")),
    Mutation("wrong part: V is K, in dQ", *ATTENTION, V_PTR, V_PTR.replace("2 * H", "H"), 1),
    Mutation("wrong stride: V", *ATTENTION, "v = _load(v_ptr, cols, 3 * H * D", "v = _load(v_ptr, cols, 2 * H * D"),
    Mutation("wrong stride: dK", *ATTENTION, "_store(dqkv + H * D, cols, 3 * H * D", "_store(dqkv + H * D, cols, 2 * H * D"),
    Mutation("wrong stride: heads of delta", *ATTENTION, "line = (b * H + h) * T", "line = (b + h) * T"),
    Mutation("swapped operand: dP = dO K^T", *ATTENTION, "dp = tl.dot(do, tl.trans(v)", "dp = tl.dot(do, tl.trans(k)"),
    Mutation("swapped operand: S, not S^T", *ATTENTION, "s = tl.dot(k, tl.trans(q)", "s = tl.dot(q, tl.trans(k)"),
    Mutation("no delta in dQ", *ATTENTION, "(p * (dp - dl[:, None]))", "(p * dp)"),
    Mutation("no mask: keys beyond the end", *ATTENTION, "tl.where(cols[None, :] < T, s, float(\"-inf\"))", "s"),
    Mutation("no mask: probabilities beyond the end", *ATTENTION, "tl.where(cols[None, :] < T, p, 0.0)", "p"),
    Mutation("no mask: rows are stored beyond the end", *ATTENTION, "mask=None if EVEN else rows[:, None] < T", "mask=None"),
    Mutation("no mask: lse is stored beyond the end", *ATTENTION, "/ LOG2E, mask=rows < T)", "/ LOG2E)"),
    Mutation("no mask: qk is stored beyond the end", *ATTENTION, "tl.store(out + HALF, (x2 * c + x1 * s).to(qk.dtype.element_ty), mask=inside)", "tl.store(out + HALF, (x2 * c + x1 * s).to(qk.dtype.element_ty))"),
    Mutation("even by the smaller tile", *ATTENTION, "EVEN=T % max(M, N) == 0", "EVEN=T % min(M, N) == 0"),
    Mutation("tiles do not begin at a multiple", *ATTENTION, "tl.min(start, 0) // STEP * STEP", "tl.min(start, 0)"),
    Mutation("a document's first position is not seen", *ATTENTION, "(start[:, None] <= at[None, :])", "(start[:, None] < at[None, :])"),
    Mutation("queries beyond the end have lse 0", *ATTENTION, "other=float(\"inf\")", "other=0.0"),
    Mutation("blocks: the ranges of those that are seen", *ATTENTION, "else 4 + 2 * r", "else 2 * r"),
    Mutation("rotated the other way", *ATTENTION, "(x1 * c - x2 * s)", "(x1 * c + x2 * s)"),
    Mutation("rotated the other way in backward", *ATTENTION, "g2 = d2 * c - d1 * s", "g2 = d2 * c + d1 * s"),
    Mutation("dK and dV before delta", *ATTENTION, "attention_dq_kernel, *both, (grad, out, lse, delta, dqkv), spans)\n        _run(attention_dkdv_kernel, *both, (grad, lse, delta, dqkv), spans)", "attention_dkdv_kernel, *both, (grad, lse, delta, dqkv), spans)\n        _run(attention_dq_kernel, *both, (grad, out, lse, delta, dqkv), spans)"),
    Mutation("no barrier before the target's dz", *HEAD, "tl.debug_barrier()", "pass"),
    Mutation("no bound: a target beyond V", *HEAD, "(target >= 0) & (target < V)", "target >= 0"),
    Mutation("padding is a token", *HEAD, "mask=rest < V, other=-float(\"inf\")).to(tl.float32) * LOG2E", "mask=rest < limit, other=-float(\"inf\")).to(tl.float32) * LOG2E"),
    Mutation("no bound: a row is stored beyond its end", *HEAD, ", mask=rest < limit)", ")"),
    Mutation("swapped sign: dz of the target", *HEAD, "(tl.exp2(z_target - lse) - 1)", "(tl.exp2(z_target - lse) + 1)"),
    Mutation("more is masked than there is", *MASKING, "tl.minimum(level, T), LOG", "level, LOG"),
    Mutation("positions are listed one too late", *MASKING, "before + rank - 1", "before + rank"),
    Mutation("fixed positions are like others", *MASKING, "1 << (32 + LOG))", "1 << 32)"),
    Mutation("no bound: positions beyond T", *MASKING, "tl.where(masked, mask_id, x0), mask=inside)", "tl.where(masked, mask_id, x0))"),
    Mutation("no bound: the rows of others", *MASKING, "mask=other < B, other=0", ""),
    Mutation("no bound: rows beyond N", *CONVOLUTION, "inside = (at >= 0) & (at < N)", "inside = at >= 0"),
    Mutation("no bound: weights beyond C", *CONVOLUTION, "tl.load(weight + i * C + col, mask=col < C, other=0.0)", "tl.load(weight + i * C + col)"),
    Mutation("two programs store the same r", *CONVOLUTION, "if (row >= first) & (row < last):", "if (row >= 0) & (row < last):"),
    Mutation("taps the other way in backward", *CONVOLUTION, "at = t + LEFT - i", "at = t + i - LEFT"),
    Mutation("swapped window in backward", *CONVOLUTION, "window[K - 1 - i]", "window[i]"),
    Mutation("a row is one too late", *CONVOLUTION, "_normalized(x, r, row - LEFT + K - 1,", "_normalized(x, r, row - LEFT + K,"),
]  # fmt: skip


def commands(mutation):
    """Name -> the tests that could see it, as arguments of Python and its environment."""
    cases = f"tests/kernels_cases/{mutation.file.removesuffix('.py')}_cases.py"
    pytest = (
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n0",
        "-p",
        "no:cacheprovider",
        cases,
        "-o",
        "addopts=",
        "-m",
    )
    interpret = dict(TRITON_INTERPRET="1", MDLM_TRITON="0")
    emulate = dict(TRITON_INTERPRET="0", MDLM_TRITON="1")
    program = ("tests/ptx/cases.py", "--arch=90", f"--only={mutation.kind}", "--workers=1")
    return {
        "interpreter": ((*pytest, "not slow"), interpret),
        "emulator": (program, emulate),
        "emulator, slow": ((*program, "--slow"), emulate),
        "interpreter, slow": ((*pytest, "slow"), interpret),
    }


def try_it(mutation):
    """Return which tests fail: all default ones, and if none does, the first slow ones."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        path = copy / "kernels" / mutation.file
        text = path.read_text()
        parts = text.split(mutation.old)
        n = mutation.number + 1
        assert len(parts) > n, f"{mutation.what}: {mutation.old!r} is not in {mutation.file}"
        path.write_text(mutation.old.join(parts[:n]) + mutation.new + mutation.old.join(parts[n:]))
        caught = []
        for name, (command, environment) in commands(mutation).items():
            if "slow" in name and caught:
                break
            r = subprocess.run(
                [sys.executable, *command],
                cwd=copy,
                env=os.environ | dict(OMP_NUM_THREADS="1") | environment,
                capture_output=True,
                text=True,
                timeout=1800,
            )
            crashed = "emulator" in name and "Traceback" in r.stderr  # it does not compile
            if r.returncode == 1 and not crashed:
                caught.append(name)
            elif r.returncode:
                raise RuntimeError(f"{mutation.what}: {name}\n{r.stdout[-2000:]}{r.stderr[-2000:]}")
    return caught


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a part of a mutation's description")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    args = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if args.only in mutation.what]
    print("| kernels/ | wrong | tests that fail |\n| --- | --- | --- |")
    missed = 0
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        for mutation, caught in zip(chosen, pool.map(try_it, chosen), strict=True):
            missed += not caught
            found = ", ".join(caught) or "**none**"
            print(f"| {mutation.file} | {mutation.what} | {found} |", flush=True)
    print(f"{len(chosen)} mutations, {missed} missed", file=sys.stderr)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
