"""Runs the cases with each Triton that a supported torch installs: the table in results/aot.md.

    python tests/ptx/compilers.py                      # half an hour on one core
    python tests/ptx/compilers.py --triton=3.8.0       # one version; may be repeated
    python tests/ptx/compilers.py --quick --arch=90    # the quick cases, of one GPU
    python tests/ptx/compilers.py --folder=build       # where pip installs them (default: build)

Exit codes: 0, each kernel that --kernels=auto uses passes; 1, one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from nanomdlm.kernels.launch import distrusts_attention
from ptx import cases

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # of torch 2.11, 2.13, 2.14, and the newest
UNUSED = ("relu2",)  # kernels that no run uses yet


def install(version, folder):
    """Return a folder that holds this version of Triton and nothing else."""
    path = Path(folder, f"triton-{version}").resolve()
    if not (path / "triton").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", f"--target={path}"]
        subprocess.run([*command, f"triton=={version}"], check=True, stdout=sys.stderr)
    return path


def run(path, quick, arch):
    """The results of cases.py with the Triton in a folder."""
    command = [sys.executable, HERE / "cases.py", "--json", "--workers=1", f"--arch={arch}"]
    command += [] if quick else ["--slow"]
    env = os.environ | dict(PYTHONPATH=str(path), MDLM_TRITON="1", TRITON_INTERPRET="0")
    r = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if r.returncode not in (0, 1, 2) or not r.stdout:
        raise RuntimeError(f"triton in {path}, sm_{arch}: {r.stderr[-2000:]}")
    return [json.loads(line) for line in r.stdout.splitlines()]


def judge(results):
    """kernel -> what was wrong with it in one of the cases, or "" """
    found = {}
    for result in results:
        wrong = "" if cases.is_within(result) else result["violation"] or "a wrong result"
        if result["broken"]:
            found[result["broken"]] = found.get(result["broken"]) or wrong
            wrong = ""
        for name in result["ended"]:
            found[name] = found.get(name) or wrong
    return found


def is_used(name, version, arch):
    """Whether --kernels=auto uses this kernel with this version on this GPU."""
    distrusted = distrusts_attention(version, (arch // 10, arch % 10))
    return not name.startswith(UNUSED) and not (distrusted and "attention" in name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--triton", action="append", help=f"a version (default: {VERSIONS})")
    parser.add_argument("--arch", type=int, choices=cases.ARCHITECTURES, action="append")
    parser.add_argument("--quick", action="store_true", help="the quick cases alone")
    parser.add_argument("--folder", default="build", help="where Triton is installed")
    args = parser.parse_args()
    versions = args.triton or VERSIONS
    table = {}  # kernel -> version -> GPU -> what is wrong
    failed = False
    for version in versions:
        path = install(version, args.folder)
        for arch in args.arch or cases.ARCHITECTURES:
            print(f"triton {version}, sm_{arch}", file=sys.stderr, flush=True)
            for name, wrong in judge(run(path, args.quick, arch)).items():
                table.setdefault(name, {}).setdefault(version, {})[arch] = wrong
                if wrong:
                    used = is_used(name, version, arch)
                    failed |= used
                    said = "USED" if used else "not used"
                    print(f"{name} ({said}): {wrong}", file=sys.stderr, flush=True)
    print("| kernel |", " | ".join(f"triton {version}" for version in versions), "|")
    print("| --- " * (1 + len(versions)) + "|")
    for name, by_version in sorted(table.items()):
        print(f"| {name} |", " | ".join(cell(by_version.get(v, {})) for v in versions), "|")
    return int(failed)


def cell(by_arch):
    """The GPUs on which a kernel passed, and those on which it failed."""
    right = [str(arch) for arch, wrong in by_arch.items() if not wrong]
    fails = [f"**{arch} fails**" for arch, wrong in by_arch.items() if wrong]
    return "; ".join([", ".join(right)] * bool(right) + fails) or "-"


if __name__ == "__main__":
    sys.exit(main())
