"""Breaks the source of the kernels on purpose, and says which tests fail.

    python tests/ptx/source_mutations.py                # all: the table in results/aot.md
    python tests/ptx/source_mutations.py --only=int32   # those whose description has this word

Each mutation is made in a copy of the project. Then the tests run there: those in Triton's
interpreter and those in the emulator. The slow ones run only if no default one fails.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".*", "__pycache__", "docs", "lessons", "results", "weights", "*.pt")


class Mutation(NamedTuple):
    what: str  # is wrong then
    file: str  # of kernels/
    kind: str  # of cases.py
    old: str
    new: str
    number: int = 0  # which occurrence of `old`


# What is wrong, in which file of kernels/: a part of the source (-), and what replaces it (+).
MUTATIONS = """
attention.py: int32 offset: sample
-(head // H).to(tl.int64)
+head // H

attention.py: int32 offset: row of qk
-(0).to(tl.int64) * ROWS
+(0) * ROWS

cross_entropy.py: int32 offset: row of logits
-tl.program_id(0).to(tl.int64)
+tl.program_id(0)

convolution.py: int32 offset: row of x
-row, -1).to(tl.int64)
+row, -1)

convolution.py: int32 offset: row of y
-(col * 0 + row).to(tl.int64)
+col * 0 + row

cross_entropy.py: int32 target
-+ i).to(tl.int64)
++ i).to(tl.int32)

attention.py: wrong part: V is K
-v_ptr = qkv + 3 * b * T * H * D + (2 * H + h) * D
+v_ptr = qkv + 3 * b * T * H * D + (H + h) * D

attention.py: wrong part: V is K, in dQ (occurrence 2)
-v_ptr = qkv + 3 * b * T * H * D + (2 * H + h) * D
+v_ptr = qkv + 3 * b * T * H * D + (H + h) * D

attention.py: wrong stride: V
-v = _load(v_ptr, cols, 3 * H * D
+v = _load(v_ptr, cols, 2 * H * D

attention.py: wrong stride: dV
-_store(dqkv + here + H * D, cols, 3 * H * D
+_store(dqkv + here + H * D, cols, 2 * H * D

attention.py: wrong stride: dQ and dK
-_store(dqkv, rows, 3 * H * D, T, d, D
+_store(dqkv, rows, 2 * H * D, T, d, D

attention.py: wrong stride: heads of delta
-line = (b * H + h) * T
+line = (b + h) * T

attention.py: swapped operand: dP = dO K^T
-dp = tl.dot(do, tl.trans(v)
+dp = tl.dot(do, tl.trans(k)

attention.py: swapped operand: dK = dS^T dO
-(p * (dp - dl[None, :])).to(q.dtype), q, dk
+(p * (dp - dl[None, :])).to(q.dtype), do, dk

attention.py: no delta in dQ
-(p * (dp - dl[:, None]))
+(p * dp)

attention.py: no mask: keys beyond the end
-elif not EVEN:
-                s = tl
+elif False:
+                s = tl

attention.py: no mask: probabilities beyond the end
-tl.where(cols[None, :] < T, p, 0.0)
+p

attention.py: no mask: rows are stored beyond the end
-mask=None if EVEN else rows[:, None] < T
+mask=None

attention.py: no mask: lse is stored beyond the end
-/ LOG2E, mask=rows < T)
+/ LOG2E)

attention.py: no mask: qk is stored beyond the end
-(x2 * c + x1 * s).to(qk.dtype.element_ty), mask=inside
+(x2 * c + x1 * s).to(qk.dtype.element_ty)

attention.py: even by the smaller tile
-EVEN=T % max(M, N) == 0
+EVEN=T % min(M, N) == 0

attention.py: tiles do not begin at a multiple
-tl.min(start, 0) // STEP * STEP
+tl.min(start, 0)

attention.py: a document's first position is not seen
-(start[:, None] <= at[None, :])
+(start[:, None] < at[None, :])

attention.py: blocks: the ranges of those that are seen
-else 4 + 2 * r
+else 2 * r

attention.py: rotated the other way
-(x1 * c - x2 * s)
+(x1 * c + x2 * s)

attention.py: rotated the other way in backward
-g2 = d2 * c - d1 * s
+g2 = d2 * c + d1 * s

attention.py: dK and dV before delta
-_run(attention_dq_kernel, *both, (grad, out, lse, delta, dqkv), spans, **more)
-    _run(attention_dkdv_kernel, *both, (grad, lse, delta, dqkv), spans, **more)
+_run(attention_dkdv_kernel, *both, (grad, lse, delta, dqkv), spans, **more)
+    _run(attention_dq_kernel, *both, (grad, out, lse, delta, dqkv), spans, **more)

attention.py: epilogue: the norm of q for that of k
-qkv + here, cols, T, dk
+qkv + here - H * D, cols, T, dk

attention.py: epilogue: angles of the next position
-_angles(cos, sin, rows, inside, HALF)
+_angles(cos, sin, rows + 1, inside, HALF)

attention.py: epilogue: the other half
-d1, d2 = tl.split
+d2, d1 = tl.split

attention.py: epilogue: no mask: rows are stored beyond the end
-tl.store(dqkv + at, g1.to(dqkv.dtype.element_ty), mask=inside)
+tl.store(dqkv + at, g1.to(dqkv.dtype.element_ty))

attention.py: the mean is not taken out
-g2 = root * (g2 - x2 * mean)
+g2 = root * g2

cross_entropy.py: no barrier before the target's dz
-tl.debug_barrier()
+pass

cross_entropy.py: no bound: a target beyond V
-(target >= 0) & (target < V)
+target >= 0

cross_entropy.py: padding is a token
-z = tl.load(z_ptr + rest, mask=rest < V
+z = tl.load(z_ptr + rest, mask=rest < limit

cross_entropy.py: no bound: a row is stored beyond its end
-, mask=rest < limit)
+)

cross_entropy.py: swapped sign: dz of the target
-(tl.exp2(z_target - lse) - 1)
+(tl.exp2(z_target - lse) + 1)

masking.py: positions are listed one too late
-before + rank - 1
+before + rank

masking.py: fixed positions are like others
-1 << (32 + LOG))
+1 << 32)

masking.py: no bound: positions beyond T
-tl.where(masked, mask_id, x0), mask=inside)
+tl.where(masked, mask_id, x0))

masking.py: no bound: the rows of others
-mask=other < B, other=0
+

convolution.py: no bound: rows beyond N
-inside = (at >= 0) & (at < N)
+inside = at >= 0

convolution.py: no bound: weights beyond C
-tl.load(weight + i * C + col, mask=col < C, other=0.0)
+tl.load(weight + i * C + col)

convolution.py: two programs store the same r
-if (row >= first) & (row < last):
+if (row >= 0) & (row < last):

convolution.py: taps the other way in backward
-at = t + LEFT - i
+at = t + i - LEFT

convolution.py: swapped window in backward
-window[K - 1 - i]
+window[i]

convolution.py: a row is one too late
-_normalized(x, r, row - LEFT + K - 1,
+_normalized(x, r, row - LEFT + K,

residual.py: an element at the rate is dropped
-high >= dropped
+high > dropped

residual.py: the halves of a word are exchanged
-tl.join(low >= dropped, high >= dropped)
+tl.join(high >= dropped, low >= dropped)

residual.py: all programs drop the same
-tl.program_id(0) * (TILE // 8) + tl.arange
+tl.arange

relu2.py: int32 offset: row of x
-(tl.program_id(0) // n_tiles).to(tl.int64)
+(tl.program_id(0) // n_tiles)

relu2.py: a column tile too few
-n_tiles = tl.cdiv(N, TILE_N)
+n_tiles = N // TILE_N

relu2.py: not squared
-result = relu * relu
+result = relu

relu2.py: negative numbers are squared
-tl.where(z < 0, 0.0, z)
+z

relu2.py: NaN becomes 0
-tl.where(z < 0, 0.0, z)
+tl.maximum(z, 0.0)

relu2.py: not doubled in backward
-result = 2 * tl.sqrt
+result = tl.sqrt

relu2.py: wrong stride: w in backward
-w += TILE_K * N
+w += TILE_K * K

relu2.py: no bound: what is beyond the end is read
-mask=(rows[:, None] < n_rows) & (cols[None, :] < n_cols), other=0.0)
+mask=rows[:, None] < n_rows, other=0.0)

relu2.py: no bound: rows are stored beyond the end
-inside = None if EVEN else (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
+inside = None if EVEN else cols[None, :] < n_cols

relu2.py: even if the last rows are no whole tile
-is_even = M % TILE_M == 0 and N
+is_even = N

grouped_attention.py: another head of keys
-g = h // (H // G)
+g = h % G

grouped_attention.py: a head of the group is left out
-(g + 1) * GROUP)
+(g + 1) * GROUP - 1)

grouped_attention.py: wrong stride: V
-v += b * T * v_stride
+v += b * T * k_stride

grouped_attention.py: wrong stride: dK
-dk + b * T * G * D
+dk + b * T * H * D

grouped_attention.py: int32 offset: sample
-tl.store(lse + (b * H + h) * T
+tl.store(lse + (b.to(tl.int32) * H + h) * T

residual.py: the offset has no effect
-zero + offset, group
+zero, group

residual.py: what is kept is not scaled
-.to(tl.float32) * scale
+.to(tl.float32)
"""
KINDS = {"attention.py": "attention", "cross_entropy.py": "head", "masking.py": "masking"}
KINDS |= {"convolution.py": "convolution", "residual.py": "residual"}
KINDS |= {"relu2.py": "relu2", "grouped_attention.py": "grouped attention"}


def parse(text):
    """Yield the mutations of a text like MUTATIONS."""
    for block in text.strip().split("\n\n"):
        title, *lines = block.split("\n")
        file, what = title.split(": ", 1)
        number = re.search(r" \(occurrence (\d+)\)$", what)
        old, new = ("\n".join(x[1:] for x in lines if x[0] == sign) for sign in "-+")
        yield Mutation(what, file, KINDS[file], old, new, int(number[1]) - 1 if number else 0)


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
        "interpreter": ((*pytest, "not slow and not long"), interpret),
        "emulator": (program, emulate),
        "emulator, slow": ((*program, "--slow"), emulate),
        "interpreter, slow": ((*pytest, "slow"), interpret),
    }


def try_it(mutation, may_be_slow=True):
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
            if "slow" in name and (caught or not may_be_slow):
                break
            r = subprocess.run(
                [sys.executable, *command],
                cwd=copy,
                env=os.environ | dict(OMP_NUM_THREADS="1") | environment,
                capture_output=True,
                text=True,
                timeout=1800,
            )
            if r.returncode == 1 or r.returncode < 0:  # killed: memory was overwritten
                caught.append(name)
            elif r.returncode not in (0, 5):  # 2: it crashed; 5: there is no slow test
                said = [line for line in r.stderr.splitlines() if re.match(r"\w+: ", line)]
                return [f"**does not run**: {', '.join([name, *said[-1:]])}"]
    return caught


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a part of a mutation's description")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    args = parser.parse_args()
    chosen = [mutation for mutation in parse(MUTATIONS) if args.only in mutation.what]
    for file, kind in KINDS.items():
        unchanged = Mutation("nothing", file, kind, "import torch", "import torch")
        if try_it(unchanged, may_be_slow=False):
            raise RuntimeError(f"tests of {file} fail without a mutation")
    print("| kernels/ | wrong | tests that fail |\n| --- | --- | --- |")
    missed = 0
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        for mutation, caught in zip(chosen, pool.map(try_it, chosen), strict=True):
            missed += not caught or "does not run" in caught[0]
            found = ", ".join(caught) or "**none**"
            print(f"| {mutation.file} | {mutation.what} | {found} |", flush=True)
    print(f"{len(chosen)} mutations, {missed} missed", file=sys.stderr)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
