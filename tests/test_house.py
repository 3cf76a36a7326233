"""The rules of the source that a program can judge: which file may import what, and its format."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from nanomdlm.support.cli import environment

if sys.version_info >= (3, 11):
    import tomllib
RUFF = shutil.which("ruff", path=Path(sys.executable).parent) or shutil.which("ruff")


def list_files():
    """The files of the project: what git tracks or would track, else what is there."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found = {Path(name) for name in listed.stdout.splitlines()}
    else:
        found = {p.relative_to(ROOT) for p in ROOT.rglob("*")}
    hidden = {p for p in found if any(part.startswith(".") for part in p.parts)}
    return sorted(p for p in found - hidden if (ROOT / p).is_file())


FILES = [p for p in list_files() if p.parts[0] not in ("out", "build")]
SOURCES = [p for p in FILES if p.suffix in (".py", ".html", ".js", ".css")]
SOURCES = [p for p in SOURCES if p.parts[0] not in ("tests", "lessons")]
TEXTS = {p: (ROOT / p).read_text(encoding="utf-8") for p in SOURCES}
TREES = {p: ast.parse(text) for p, text in TEXTS.items() if p.suffix == ".py"}
PACKAGES = ("kernels", "support", "variants")  # which are imported as nanomdlm.kernels ...


def module_of(path):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return f"nanomdlm.{name}" if path.parts[0] in PACKAGES else name


MODULES = {module_of(p): p for p in TREES}


def imports(nodes, package):
    """The own modules that these nodes of a tree import (kernels/ as nanomdlm.kernels).

    package: the folder of the file, for relative imports.
    """
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = f"{package}.{module}" if module else package
                found |= {module} - {package}
            else:
                found |= {module}
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found & MODULES.keys()


def package_of(path):
    return module_of(path).rpartition(".")[0] if path.name != "__init__.py" else module_of(path)


# To products, which are imported where they are asked for.
DOORS = {"support/cli/networks.py", "support/cli/products.py"}
GRAPH = {
    name: imports(ast.walk(TREES[path]), package_of(path)) if str(path) not in DOORS else set()
    for name, path in MODULES.items()
}


def test_imports_have_no_circle():
    def reached(start):
        seen = set()
        todo = list(GRAPH[start])
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo += GRAPH[module]
        return seen

    assert [m for m in GRAPH if m in reached(m)] == []


def test_own_modules_are_imported_on_top():
    inside = {}
    for path, tree in TREES.items():
        if str(path) in DOORS:
            continue
        top = set(tree.body)
        for node in tree.body:
            if isinstance(node, (ast.If, ast.Try)):
                top |= set(ast.walk(node))
        if imports(set(ast.walk(tree)) - top, package_of(path)):
            inside[str(path)] = imports(set(ast.walk(tree)) - top, package_of(path))
    assert inside == {}


# Which folders the files of a folder may import. Programs may import all.
MAY_IMPORT = {
    "kernels": {"kernels"},
    "support": {"support", "kernels"},
    "variants": {"variants", "support", "kernels"},
}


def test_libraries_import_no_program():
    upward = []
    for module, used in GRAPH.items():
        folder = MODULES[module].parts[0]
        if folder in MAY_IMPORT:
            others = [MODULES[name] for name in used if name != "nanomdlm"]
            upward += [(module, p) for p in others if p.parts[0] not in MAY_IMPORT[folder]]
    assert upward == []


def test_only_needed_packages_are_imported_on_top():
    """All others are optional: they are imported where they are used."""
    own = {name.split(".")[0] for name in MODULES}
    known = {*sys.stdlib_module_names, *own, *environment.NEEDED, "triton", "setuptools"}
    optional = []
    for path, tree in TREES.items():
        if path.name == "modeling_mdlm.py":  # a part of an export
            continue
        if path.parts[:2] == ("support", "serving"):  # its door asks for its packages
            continue
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            optional += [(path, name) for name in names if name.split(".")[0] not in known]
    assert optional == []


@pytest.mark.skipif(not RUFF, reason="ruff is not installed")
def test_source_is_formatted_and_clean():
    files = [str(p) for p in FILES if p.suffix == ".py"]
    for command in (["format", "--check"], ["check"]):
        r = subprocess.run([RUFF, *command, *files], cwd=ROOT, capture_output=True, text=True)
        assert r.returncode == 0, r.stdout[-2000:]


def names_of(requirements):
    return {re.match(r"[\w-]+", line)[0].lower() for line in requirements}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_requirements_and_pyproject_name_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for file, names in (
        ("requirements.txt", project["project"]["dependencies"]),
        ("requirements-dev.txt", project["dependency-groups"]["dev"]),
    ):
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        assert names_of(line for line in lines if line[:1].isalpha()) == names_of(names)


def test_every_promise_has_its_tests():
    """The pages name files of tests that exist."""
    pages = [ROOT / "docs" / name for name in ("reliability.md", "correctness.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"\btests/[\w/]+\.py\b", text))
    assert named and [name for name in named if not (ROOT / name).is_file()] == []
