"""Breaks the PTX of the kernels on purpose, and shows what the emulator says to it.

    python tests/ptx/mutations.py             # every place, minutes: the table in results/aot.md
    python tests/ptx/mutations.py --places=3  # three places of each kind, as the slow tests do
    python tests/ptx/mutations.py --json      # one JSON object a line

One barrier, wait, fence or bound is taken away at a time. Then the emulator finds it ("caught"), or
a result is wrong, or nothing changes: no check fails and all bits are equal, for these arguments.
That happens where Triton orders more than is needed: two barriers with no access in between, a
fence that follows another, a bound that every thread keeps.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import re
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from ptx import cases, driver
from ptx.memory import Violation

# what is taken away -> where, and what is there instead
MUTATIONS = {
    "barrier": (r"bar\.sync\s+0;", ""),
    "wait for a copy": (r"cp\.async\.wait_group\s+(\d+);", "cp.async.wait_group 99;"),
    "wait for a product": (r"wgmma\.wait_group\.sync\.aligned\s+\d+;", ""),
    "fence of registers": (r"wgmma\.fence\.sync\.aligned;", ""),
    "fence of shared memory": (r"fence\.proxy\.async\.shared::cta;", ""),
    "bound of a load": (r"@!?%p\d+ (?=ld\.global)", ""),
    "bound of a store": (r"@!?%p\d+ (?=st\.global)", ""),
    "bound of a copy": (r"(cp\.async\.c[ag]\.shared\.global [^;]*, 0x\w+), %r\d+;", r"\1;"),
}
FUSED = "attention, backward of one kernel"  # on sm_90 alone; of its launches, that kernel's
# Which calls: small ones, in which every bound matters.
CALLS = {
    "attention": (1, 70, 1, 64, "documents", True, True),
    FUSED: (1, 70, 1, 64, None, False, False),
    "grouped attention": (1, 70, 2, 1, 128, "documents", 9),
    "convolution": (1, 19, 96, 5, False, True),
    "head": (1000, 3, torch.int64),
    "masking": (2, 63, torch.int64, True),
    "muon": (2, 32, 128),
    "relu2": (19, 48, 144),
    "residual": (1, 19, 95, 0.2),
}
CAUGHT = ("caught", "wrong result", "no change")


def record(arch, kind):
    """The launches of a call, with copies of their arguments."""
    device = driver.install(arch)
    device.record = True
    g = torch.Generator().manual_seed(0)
    cases.CALLS[kind.partition(",")[0]](torch.bfloat16, g, *CALLS[kind])
    launches = device.launches
    if kind == FUSED:
        launches = [x for x in launches if x.kernel == "attention_backward_kernel"]
    return launches


def outcome(launch, ptx):
    """Return the arguments after a run, as bytes, or the sentence of a violation."""
    job = launch.copy()
    try:
        job.run(ptx)
    except Violation as violation:
        return str(violation)
    return [a.reshape(-1).view(torch.uint8) for a in job.args if torch.is_tensor(a)]


def mutate(arch, kind, places):
    """Try each mutation of each kernel of a call; return one dictionary for each pair."""
    torch.set_num_threads(1)
    results = []
    for launch in record(arch, kind):
        right = outcome(launch, launch.ptx)
        for name, (pattern, instead) in MUTATIONS.items():
            found = [*re.finditer(pattern, launch.ptx)]
            chosen = found if not places else found[:: max(1, len(found) // places)]
            counts = collections.Counter()
            said = collections.Counter()
            for match in chosen:
                changed = match.expand(instead)
                ptx = launch.ptx[: match.start()] + changed + launch.ptx[match.end() :]
                got = outcome(launch, ptx)
                if isinstance(got, str):
                    counts["caught"] += 1
                    said[re.sub(r"%r\d+|-?\d+", "..", got)] += 1
                else:
                    same = all(map(torch.equal, got, right))
                    counts["no change" if same else "wrong result"] += 1
            if chosen:
                total = dict(kernel=launch.kernel, arch=arch, mutation=name, places=len(found))
                results.append(total | {key: counts[key] for key in CAUGHT} | dict(said=said))
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--places", type=int, default=0, help="of each kind (default: all)")
    parser.add_argument("--arch", type=int, choices=cases.ARCHITECTURES, action="append")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    args = parser.parse_args()
    jobs = [(arch, kind, args.places) for arch in args.arch or (80, 90) for kind in CALLS]
    jobs = [job for job in jobs if job[0] == 90 or job[1] != FUSED]
    sums = {}  # of all kernels
    # A process for each job, as Triton has one target in a process.
    with concurrent.futures.ProcessPoolExecutor(args.workers, max_tasks_per_child=1) as pool:
        for results in pool.map(mutate, *zip(*jobs, strict=True)):
            for r in results:
                if args.json:
                    print(json.dumps(r), flush=True)
                total = sums.setdefault((r["mutation"], r["arch"]), collections.Counter())
                total.update({key: r[key] for key in CAUGHT})
    if not args.json:
        print("| taken away | sm | places |", " | ".join(CAUGHT), "|")
        print("| --- " * 6 + "|")
        for (name, arch), total in sorted(sums.items()):
            counts = " | ".join(str(total[key]) for key in CAUGHT)
            print(f"| {name} | {arch} | {total.total()} | {counts} |")


if __name__ == "__main__":
    os.environ["MDLM_TRITON"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
