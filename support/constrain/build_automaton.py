"""Builds the automaton of a regular expression with outlines-core, in a separate process.

The library cannot be interrupted, and some patterns take minutes or all memory. automaton.py runs
this file, whose main() limits itself, and stops it. It imports nothing that is slow to import.

    python build_automaton.py < PATTERN
"""

import array
import contextlib
import re
import sys
import warnings

SECONDS = 10  # of computing
MEMORY = 2 << 30  # bytes; not every system can limit them
MOST_STATES = 1 << 15
MOST_BYTES = 1 << 16  # of a pattern
MOST_COUNT = 10_000  # in a{COUNT}
SMALLER = "give shorter counts, fewer choices, or [a-z] in place of \\w"
LAST = "\U0010ffff"  # a character that no text has
REFUSED = 3  # exit code: the pattern is refused, and standard error says why

# Escaped characters and classes, in which signs have another meaning. A class without an end goes
# to the end of the text, so that a pattern of many [ is read once, not once for each of them.
ESCAPE_OR_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.?|[^\]\\])*(?:\]|\Z)", re.DOTALL)


def too_long(pattern):
    return f"the pattern {pattern[:40]!r} has more than {MOST_BYTES >> 10} kB; {SMALLER}"


def check_pattern(pattern):
    """Raise ValueError for a pattern that is no whole one, too long, or read in several ways."""
    shown = repr(pattern[:40])
    if len(pattern.encode()) > MOST_BYTES:
        raise ValueError(too_long(pattern))
    escapes = ESCAPE_OR_CLASS.findall(pattern)
    rest = ESCAPE_OR_CLASS.sub("_", pattern)
    if re.search(r"[\^$]", rest) or any(re.fullmatch(r"\\[bBAzZ<>]", each) for each in escapes):
        fix = "leave them out, or write \\^ and \\$ for the characters"
        raise ValueError(f"{shown} has an anchor, and a pattern matches the whole gap; {fix}")
    if re.search(r"\(\?<?[=!>]", rest):
        raise ValueError(f"{shown} looks around, which no automaton can; write what the gap has")
    if any(re.fullmatch(r"\\[1-9]", each) for each in escapes) or "(?P=" in rest:
        fix = "write a list of texts: [___|aa|bb]"
        raise ValueError(f"{shown} refers back, which no automaton can; {fix}")
    if re.search(r"[*+?}]\+", rest):
        fix = "leave out the second sign"
        raise ValueError(f"{shown} has a possessive count, which is not known; {fix}")
    depth = 0
    for sign in rest:
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            break
    if depth:
        raise ValueError(f"{shown} is not a regular expression: its brackets do not pair; fix it")
    counts = re.findall(r"[0-9]+", " ".join(re.findall(r"\{[0-9, ]*\}", rest)))
    if any(len(count) > 5 or int(count) > MOST_COUNT for count in counts):
        raise ValueError(f"{shown} has a count above {MOST_COUNT:,}; give a smaller one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            re.compile(pattern)  # it may take a minute, which the limits of this process end
        except (FutureWarning, DeprecationWarning) as e:
            fix = "write \\ before such a sign"
            raise ValueError(f"programs read {shown} in several ways ({e}); {fix}") from None
        except (re.error, OverflowError, RecursionError):
            pass  # the library has \p{L}, and says itself what it refuses


def why_refused(pattern, error):
    """A sentence for a pattern that the library refuses; Python's reason is the clearer one."""
    shown = repr(pattern[:40])
    if "no transitions" in str(error):
        return f"no text matches {shown}; mend the pattern"
    why = str(error)
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        why = str(e)
    what = f"{shown} is not a regular expression that outlines-core takes ({why[:200]})"
    return f"{what}; mend it, or write \\ before a sign"


def build(pattern):
    """Return the automaton over the bytes of UTF-8 as int32 numbers.

    They are: the numbers of states and of final states; the final states; then each transition as
    state, byte, state. State 0 is the first. Raises ValueError, with a sentence.

    The library finds the first of several matches: of `a|ab` it would only take "a". So the pattern
    is built with a last character, which makes all but whole matches fail.
    """
    try:
        from outlines_core import Index, Vocabulary
    except ImportError as e:  # started by hand; constraint.py asks for it before
        raise ValueError(f"{e}; type: pip install outlines-core") from e
    check_pattern(pattern)
    end = 256  # the library's token for the end of a text
    vocabulary = Vocabulary(end, {bytes([i]): [i] for i in range(256)})
    try:
        index = Index(f"(?:{pattern}){LAST}", vocabulary)
    except ValueError as e:
        raise ValueError(why_refused(pattern, e)) from e
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
