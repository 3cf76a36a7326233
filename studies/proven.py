"""What is known of the kernels on a machine without a GPU: `python bench.py` shows it first.

Two programs say it, each in a process of its own, as Triton decides at its import whether it
interprets or compiles: studies/smoke.py, which compares results and gradients with float64 in
Triton's interpreter, and tests/aot.py, which compiles the kernels for a GPU that need not be here.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300  # that a program may take at most


def run(program, *flags, **environment):
    """(objects, what it said at its end) of a program that prints a JSON object a line."""
    command = [sys.executable, str(ROOT / program), *flags]
    settings = dict(cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    try:
        done = subprocess.run(command, timeout=SECONDS, **settings)
    except subprocess.TimeoutExpired:
        return [], f"{program} took more than {SECONDS} s"
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return rows, f"{program}: {last}" if done.returncode and not rows else ""


def interpreted(table):
    """Add a line for each operation as Triton's interpreter computes it to a bench.ResultsTable."""
    rows, trouble = run("studies/smoke.py", "--json", TRITON_INTERPRET="1")
    if trouble:
        table.note(trouble)
    table.begin("Computed by Triton's interpreter: the largest error of a result or gradient")
    for row in rows:
        worst = max(row["errors"], key=row["errors"].get)
        line = dict(operation=row["operation"], output=worst)
        line |= dict(error=row["errors"][worst], pytorch=row["pytorch"][worst])
        table.add(line)
        if row["wrong"]:
            where = dict(operation=row["operation"], what="in the interpreter")
            table.fail(where, "mdlm", f"WRONG RESULT: {', '.join(row['wrong'])}", fatal=True)


def compiled(table):
    """Add a line for each kernel as it is compiled for sm_90."""
    rows, trouble = run("tests/aot.py", "--one", "--json", MDLM_TRITON="1")
    if trouble:
        table.note(trouble)
    table.begin("Compiled for sm_90 (H100, H200); all targets: results/aot.md")
    for row in rows:
        products = [f"{row[name]} {name.upper()}" for name in ("hmma", "hgmma") if row[name]]
        line = dict(operation=row["name"], warps=row["warps"], registers=row["registers"])
        line |= dict(shared_kib=row["shared"] / 1024, spills=row["spills"])
        table.add(line | dict(tensor_cores=", ".join(products) or "-"))


def has_triton():
    return sys.platform == "linux" and importlib.util.find_spec("triton") is not None


def show(table):
    """Add all that is known to a bench.ResultsTable."""
    table.note("Kernels are timed on CUDA devices only, and this machine has none.")
    if not has_triton():
        table.note("Triton, which could interpret or compile them, is missing: pip install triton")
        return
    table.note("What can be known of them here takes about 20 s; training steps follow.")
    interpreted(table)
    compiled(table)
