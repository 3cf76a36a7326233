"""How much main memory there is, and the message when it is full."""

import re

# Parts of what Python, numpy and PyTorch's allocators say of a memory that is full.
FULL = ("out of memory", "can't allocate memory", "bad_alloc", "not enough memory")
FULL += ("Unable to allocate",)
UNITS = dict(bytes=1, KiB=1 << 10, MiB=1 << 20, GiB=1 << 30, TiB=1 << 40)


def is_full(error):
    """Whether an exception means that memory has run out."""
    is_known = isinstance(error, (MemoryError, RuntimeError))
    return isinstance(error, MemoryError) or (is_known and any(w in str(error) for w in FULL))


def asked_for(error):
    """The size of a failed allocation, in words; "" if the error does not say."""
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
    """The message for an out-of-memory error in a program, by the name of its file."""
    fix = LOWER.get(program, "lower the batch, the length, or the size of the model")
    return f"out of memory{asked_for(error)}; {fix}"
