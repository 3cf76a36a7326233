"""How much main memory there is, and what a program says when it is full."""

import importlib
import os
import re
from pathlib import Path

# Parts of what Python, numpy and PyTorch's allocators say of a memory that is full.
FULL = ("out of memory", "can't allocate memory", "bad_alloc", "not enough memory")
FULL += ("Unable to allocate",)
UNITS = dict(bytes=1, KiB=1 << 10, MiB=1 << 20, GiB=1 << 30, TiB=1 << 40)


def is_full(error):
    """Whether an exception says that there is no memory left."""
    is_known = isinstance(error, (MemoryError, RuntimeError))
    return isinstance(error, MemoryError) or (is_known and any(w in str(error) for w in FULL))


def asked_for(error):
    """What an allocation that failed asked for, in words; "" if the error does not say."""
    pattern = r"(?:allocate|Unable to allocate) ([\d.]+) (bytes|[KMGT]iB)"
    found = re.search(pattern, str(error))
    return f", {in_words(float(found[1]) * UNITS[found[2]])} more were asked for" if found else ""


def in_words(n_bytes):
    """A size such as "1.2 GB"."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"


# Which flags of a program take less memory.
LOWER = {
    "sample.py": "lower --num_samples",
    "eval.py": "lower --windows",
    "bench.py": "give a smaller --preset, or lower --num_samples",
}


def explain(error, program):
    """A sentence for an error of a full memory in a program, by the name of its file."""
    fix = LOWER.get(program, "lower the batch, the length, or the size of the model")
    return f"out of memory{asked_for(error)}; {fix}"


# ---- How much there is
def free_main_memory():
    """Bytes that this process may still take; None where that is not known."""
    limits = [free_in_machine(), free_in_limit(), *map(free_in_group, control_groups())]
    return min((n for n in limits if n is not None), default=None)


def free_in_machine():
    """Bytes of main memory that are free or can be made free; None where that is not known."""
    try:
        found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
        return int(found[1]) << 10
    except (OSError, TypeError):  # not Linux
        names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
        if not {*names} <= {*getattr(os, "sysconf_names", ())}:
            return None
        page, pages = map(os.sysconf, names)
        return page * pages


def free_in_limit():
    """Bytes that are left of the limit that `ulimit -v` sets; None if there is none."""
    try:
        resource = importlib.import_module("resource")  # not on Windows
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return None
    return None if most == resource.RLIM_INFINITY else most - pages * resource.getpagesize()


def control_groups():
    """The folders of the control groups of Linux that limit this process, as in a container."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, name = line.split(":", 2)
        if kinds in ("", "memory"):
            root = Path("/sys/fs/cgroup", kinds)
            folder = root / name.lstrip("/")
            yield from (folder, *(p for p in folder.parents if p.is_relative_to(root)))


def free_in_group(folder):
    """Bytes that are left of a control group's limit; None if it has none."""
    for names in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):  # version 2 and 1
        try:
            most, used = (int((folder / f"memory.{name}").read_text()) for name in names)
            found = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.M)
            return most - used + int(found[1] if found else 0)  # what can be dropped counts as free
        except (OSError, ValueError):  # not there, or "max": no limit
            continue
    return None
