"""English text from two packages of Debian 12, for studies of networks that know English.

    python studies/english.py english.txt

The King James Bible (bible-kjv-text) and the prose of Python's documentation (python3.11-doc:
tutorial, howto, faq, reference, using, whatsnew), 4.1 and 3.3 MB. First the beginning of both, then
the last tenth of both: so the last tenth of the file, which validates, is of both too. Needs
apt-get and dpkg-deb, and a network.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanomdlm.support.cli import entry
from nanomdlm.support.errors import UserError

PACKAGES = ("bible-kjv", "bible-kjv-text", "python3.11-doc")
TOPICS = ("tutorial", "howto", "faq", "reference", "using", "whatsnew")


def unpack(folder, packages=PACKAGES):
    """Download packages of Debian and unpack them in a folder."""
    for name in packages:
        subprocess.run(["apt-get", "download", "-q", name], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)


def bible(folder):
    """The Bible, a verse a line and an empty line after each chapter."""
    command = [folder / "usr/bin/bible", "-p", folder / "usr/lib", "-f", "gen1:1-rev22:21"]
    result = subprocess.run(command, input="", capture_output=True, text=True, check=True)
    lines = []
    before = ""
    for line in result.stdout.splitlines():
        place, _, verse = line.partition(" ")  # Ge1:1
        chapter = place.partition(":")[0]
        if before and chapter != before:
            lines.append("")
        before = chapter
        lines.append(verse)
    return "\n".join(lines) + "\n"


def documentation(folder):
    """The sources of the documentation that are prose, one after the other."""
    sources = sorted(folder.rglob("*.rst.txt"))
    texts = [path.read_text() for path in sources if path.parent.name in TOPICS]
    return re.sub("\n{3,}", "\n\n", "\n".join(texts))


def main(argv):
    if len(argv) != 1 or argv[0].startswith("-"):
        raise UserError(f"{__doc__.splitlines()[0]} Give one file to write, such as english.txt")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack(folder)
        texts = [bible(folder), documentation(folder)]
    cuts = [text.rindex("\n", 0, int(0.9 * len(text))) + 1 for text in texts]
    begins = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    ends = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    Path(argv[0]).write_text("\n".join([*begins, *ends]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
