"""The table of slow tests in docs/reliability.md: test, seconds, promise; from a measured run.

python -m pytest -m slow --junitxml=slow.xml
python tests/times.py slow.xml           # prints the table
python tests/times.py slow.xml --write   # and puts it into docs/reliability.md
"""

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- the table of slow tests -->"
END = "<!-- its end -->"


def promises(document):
    """{name of a test: what its row of the document promises, in bold}"""
    sentences = {}
    for row in re.findall(r"(?m)^\| .*\*\*.* \|$", document):
        promise = re.search(r"\*\*(.+?)\*\*", row)[1]
        for name in re.findall(r"`(test_\w+)`", row):
            sentences.setdefault(name, promise)
    return sentences


def docstrings():
    """{name of a test: the first line of its docstring}"""
    sentences = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                sentences[node.name] = ast.get_docstring(node).splitlines()[0]
    return sentences


def table(report, document):
    """Of a report by --junitxml: a row for each test, the longest first; skipped ones left out."""
    seconds = Counter()
    cases = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            name = case.get("name").split("[")[0]
            seconds[name] += float(case.get("time"))
            cases[name] += 1
    said = docstrings() | promises(document)
    lines = ["| slow test | seconds | promise |", "| --- | --- | --- |"]
    for name, total in seconds.most_common():
        times = f", {cases[name]} cases" if cases[name] > 1 else ""
        promise = said.get(name) or name.removeprefix("test_").replace("_", " ")
        lines.append(f"| `{name}`{times} | {total:.0f} | {promise.rstrip('.:')} |")
    lines.append(f"| all | {seconds.total():.0f} | |")
    return "\n".join(lines)


def main(report, *more):
    document = DOCUMENT.read_text(encoding="utf-8")
    made = table(report, document)
    print(made)
    if "--write" in more:
        before, _, rest = document.partition(BEGIN)
        after = rest.partition(END)[2]
        text = f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"
        DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
