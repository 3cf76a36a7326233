"""Whether an error means that main memory or a GPU's is full, and the message that says so."""

# Parts of what Python, numpy and PyTorch's allocators say of a memory that is full.
FULL = ("out of memory", "can't allocate memory", "bad_alloc", "not enough memory")
FULL += ("Unable to allocate",)
# Which flags of a program take less memory.
LOWER = {
    "sample.py": "lower --num_samples",
    "eval.py": "lower --windows",
    "bench.py": "give a smaller --preset, or lower --num_samples",
}


def is_full(error):
    """Whether an exception means that memory has run out."""
    is_known = isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)
    return isinstance(error, MemoryError) or is_known


def explain(error, program):
    """The message for an out-of-memory error in a program, by the name of its file."""
    fix = LOWER.get(program, "lower the batch, the length, or the size of the model")
    why = f" ({str(error).splitlines()[0]})" if str(error) else ""
    return f"out of memory{why}; {fix}"
