"""Print README.md, the lessons and docs/ as one Markdown file, to give to an assistant or a reader.

python lessons/one_file.py > mdlm.md
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def number(path):
    """Sort lessons by their numbers, 8b after 8 and before 9; other pages come last."""
    found = re.match(r"(\d+)([a-z]?)_", path.name)
    return (int(found[1]), found[2], "") if found else (99, "", path.name)


def pages():
    """The paths, in the order of reading."""
    lessons = [p for p in (ROOT / "lessons").glob("*.md") if p.name != "README.md"]
    first = [ROOT / "README.md", ROOT / "lessons" / "README.md"]
    return [*first, *sorted(lessons, key=number), *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")
    for path in pages():
        print(f"<!-- {path.relative_to(ROOT).as_posix()} -->\n")
        print(path.read_text(encoding="utf-8").strip() + "\n")
