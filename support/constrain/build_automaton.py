"""Builds the automaton of a regular expression with outlines-core, in a separate process.

The library cannot be interrupted, and some patterns take minutes or all memory. automaton.py runs
this file, whose main() limits itself, and stops it. It imports nothing that is slow to import.

    python build_automaton.py < PATTERN
"""

import array
import contextlib
import itertools
import re
import sys

SECONDS = 10  # of computing
MEMORY = 2 << 30  # bytes; not every system can limit them
MOST_STATES = 1 << 15
# No characters: no text has these three in a row, and what precedes them cannot begin with them.
LAST = "\U0010fffe\U0010fffe\U0010ffff"
REFUSED = 3  # exit code: the pattern is refused, and standard error says why

# Escapes that stand for characters or classes. Other escapes are among SIGNS.
ESCAPE = re.compile(r"\\[^bBAzZ<>1-9]", re.DOTALL)
# A class without an end goes to the end of the text, so that a pattern of many [ is read once, not
# once for each of them.
CLASS = re.compile(r"\[\^?\]?[^\]]*(?:\]|\Z)")
# What no automaton can do, or what programs read in several ways, in a class and outside of them.
IN_CLASS = re.compile(r"\[|&&|--|~~")
SIGNS = re.compile(r"[\^$]|\\.|\(\?<?[=!>]|\(\?P=|[*+?}]\+")


def check_pattern(pattern):
    """Raise ValueError for a pattern that the library could read in another way than its author."""
    shown = repr(pattern[:40])
    plain = ESCAPE.sub("_", pattern)
    for each in CLASS.findall(plain):
        if found := IN_CLASS.search(each, 1):
            what = f"programs read {found[0]} in a class, as in {shown}, in several ways"
            raise ValueError(f"{what}; write \\ before each such sign")
    rest = CLASS.sub("_", plain)
    if found := SIGNS.search(rest):
        names = "anchors, lookaround, back-references, and possessive counts cannot be used"
        raise ValueError(f"{shown} has {found[0]}: {names}")
    depths = itertools.accumulate((sign == "(") - (sign == ")") for sign in rest)
    if min(depths, default=0) < 0:
        raise ValueError(f"{shown} is not a regular expression: its brackets do not pair; fix it")


def build(pattern):
    """Return the automaton over the bytes of UTF-8 as int32 numbers.

    They are: the numbers of states and of final states; the final states; then each transition as
    state, byte, state. State 0 is the first. Raises ValueError, with a sentence.

    The library finds the first of several matches: of `a|ab` it would only take "a". So the pattern
    is built with last characters, which make all but whole matches fail.
    """
    from outlines_core import Index, Vocabulary

    check_pattern(pattern)
    end = 256  # the library's token for the end of a text
    vocabulary = Vocabulary(end, {bytes([i]): [i] for i in range(256)})
    try:
        index = Index(f"(?:{pattern}){LAST}", vocabulary)
    except ValueError as e:
        why = "no text matches it" if "no transitions" in str(e) else e
        try:
            re.compile(pattern)  # it may take a minute, which the limits of this process end
        except (re.error, OverflowError, RecursionError) as of_python:  # which is the clearer one
            why = of_python
        what = f"{pattern[:40]!r} is not a regular expression that outlines-core takes"
        raise ValueError(f"{what} ({str(why)[:200]}); mend it, or write \\ before a sign") from e
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
