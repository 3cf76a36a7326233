"""Builds the automaton of a regular expression with outlines-core, in a separate process.

The library cannot be interrupted, and some patterns take minutes or all memory. automaton.py runs
this file, whose main() limits itself, and stops it. It imports nothing that is slow to import.

    python build_automaton.py < PATTERN
"""

import array
import contextlib
import sys

SECONDS = 10  # of computing
MEMORY = 2 << 30  # bytes; not every system can limit them
MOST_STATES = 1 << 15
LAST = "\U0010ffff"  # a character that no text has
REFUSED = 3  # exit code: the library refuses the pattern, and standard error says why


def build(pattern):
    """Return the automaton over the bytes of UTF-8 as int32 numbers.

    They are: the numbers of states and of final states; the final states; then each transition as
    state, byte, state. State 0 is the first. Raises ValueError for what the library refuses.

    The library finds the first of several matches: of `a|ab` it would only take "a". So the pattern
    is built with a last character, which makes all but whole matches fail.
    """
    try:
        from outlines_core import Index, Vocabulary
    except ImportError as e:  # started by hand; constraint.py asks for it before
        raise ValueError(f"{e}; type: pip install outlines-core") from e
    end = 256  # the library's token for the end of a text
    vocabulary = Vocabulary(end, {bytes([i]): [i] for i in range(256)})
    index = Index(f"(?:{pattern}){LAST}", vocabulary)
    transitions = index.get_transitions()
    matched = set(index.get_final_states())
    names = [index.get_initial_state(), *transitions, *matched]
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    if len(number) > MOST_STATES:
        raise MemoryError

    def is_final(name):
        for byte in LAST.encode():
            name = transitions.get(name, {}).get(byte)
        return name in matched

    finals = [number[name] for name in number if is_final(name)]
    numbers = array.array("i", [len(number), len(finals), *finals])
    for name, after in transitions.items():
        for byte, to in after.items():
            if byte != end:
                numbers.extend((number[name], byte, number[to]))
    return numbers


def main():
    with contextlib.suppress(ImportError, OSError, ValueError):  # another system, a lower limit
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        numbers = build(sys.stdin.buffer.read().decode())
    except ValueError as e:
        sys.stderr.write(" ".join(str(e).split()))
        return REFUSED
    sys.stdout.buffer.write(numbers.tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
