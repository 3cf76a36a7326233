"""Check the answer to a lesson's exercise.

    python lessons/check.py 1 mask.py     # lesson 1; mask.py, or my/mask.py, holds your function

Prints one line: what is right (exit code 0), or what is wrong (1). If the answer cannot be checked,
because the file is missing, lacks the function, raises an error or does not end, the line says so
(2). The answer runs in its own process; what it prints is shown first, each line after "|".
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanomdlm.support.cli import entry

entry.start(__name__)

LESSONS = 13
LIMIT = 60  # seconds for an answer; a right one takes less than ten, mostly to load PyTorch
SHOWN = 2000  # bytes, at most, that are shown of what an answer prints
EXIT_CODES = {"right": 0, "wrong": 1, "not checked": 2}


def keep_beginning(pipe, kept):
    """Read a pipe to its end, so that its writer never waits; append the first bytes to `kept`."""
    while chunk := pipe.read1(1 << 16):
        kept += chunk[: SHOWN + 1 - len(kept)]


def stop(process):
    """Kill a process and, where the system has process groups, all that it has started."""
    with contextlib.suppress(OSError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()


def run(lesson, path):
    """Check an answer in a new process.

    Returns "right", "wrong" or "not checked", a sentence, and the beginning of what it printed.
    """
    checks = Path(__file__).resolve().with_name("checks.py")
    printed = bytearray()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        verdict = Path(folder) / "verdict.json"
        command = [sys.executable, str(checks), str(verdict), str(lesson), str(path)]
        streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        process = subprocess.Popen(command, start_new_session=os.name == "posix", **streams)
        reader = threading.Thread(
            target=keep_beginning, args=(process.stdout, printed), daemon=True
        )
        reader.start()
        code = None
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            stop(process)
        reader.join(1)  # a process that the answer started may hold the pipe open
        result = ["not checked", f"{path.name} ended Python ({ending(code)}) before it was checked"]
        if code is None:
            hint = "look for a loop that does not end"
            result[1] = f"{path.name} took more than {LIMIT} s for lesson {lesson}; {hint}"
        elif verdict.exists():
            result = json.loads(verdict.read_text(encoding="utf-8"))
    return *result, bytes(printed)


def ending(code):
    """An exit code in words."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def visible(text):
    """Replace unprintable characters by their escape codes: a terminal must not execute them."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def show(printed):
    """Print what an answer has printed, each line after "|"."""
    for line in visible(printed[:SHOWN].decode(errors="replace")).splitlines():
        print("|", line)
    if len(printed) > SHOWN:
        print("| ... it prints more, which is not shown here")


def check(argv):
    """Check the answer that the arguments name: ("right", "wrong" or "not checked", a sentence)."""
    if len(argv) != 2 or not argv[0].isdecimal() or not 1 <= int(argv[0]) <= LESSONS:
        return "not checked", f"give a lesson, 1 to {LESSONS}, and a file: check.py 1 mask.py"
    places = (argv[1], os.path.join("my", argv[1]))
    found = [place for place in places if os.path.isfile(place)]  # none if the name is too long
    if not found:
        return "not checked", f"there is no file {argv[1][:80]}, here or in my/"
    path = Path(found[0]).resolve()
    verdict, sentence, printed = run(int(argv[0]), path)
    show(printed)
    return verdict, sentence


def main(argv):
    verdict, sentence = check(argv)
    print(f"{verdict}:", *visible(sentence).splitlines())
    return EXIT_CODES[verdict]


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
