"""Setting up: missing packages, the commands that programs name, the README, pip, name clashes."""

import ast
import contextlib
import functools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, run_mdlm, unknown_flags
from test_house import FILES, GRAPH, MODULES

import eval
import export
import mdlm
import sample
from nanomdlm.support.cli import entry
from nanomdlm.support.run import checkpoint

LESSONS = ROOT / "lessons"
SCRIPTS = [*ROOT.glob("*.py"), *LESSONS.glob("*.py"), *(ROOT / "studies").glob("*.py")]
SCRIPTS = sorted(p for p in SCRIPTS if "__main__" in p.read_text(encoding="utf-8"))
USE_TORCH = [p for p in SCRIPTS if re.search(r"(?m)^ *import torch", p.read_text(encoding="utf-8"))]
USE_TORCH = [p for p in USE_TORCH if p.stem != "minimal"]  # a page without checks


def hide(monkeypatch, package):
    """Make imports of a package fail, as if it were not installed."""
    for name in list(sys.modules):
        if name.split(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


def says_one_sentence(err, package):
    """Whether this is one sentence that names a missing package and how to install it."""
    fine = package in err and "install" in err and "Traceback" not in err
    return fine and err.endswith("\n") and len(err.splitlines()) == 1


# --------------------------------------------------------------------------------------------------
# A package is missing


@pytest.mark.parametrize("package", ["torch", "numpy", "safetensors", "tqdm"])
@pytest.mark.parametrize("script", USE_TORCH, ids=lambda path: path.stem)
def test_a_needed_package_is_named_without_traceback(script, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    err = capsys.readouterr().err
    assert end.value.code == 2 and says_one_sentence(err, package)
    assert sys.executable in err and err.startswith(script.name)


def test_a_missing_package_is_no_exit_for_importers(monkeypatch):
    for name in ("numpy", "safetensors"):
        monkeypatch.setitem(sys.modules, name, None)
    assert entry.start("mdlm") > 0  # what an import then raises is Python's own error


def test_an_old_python_is_named(monkeypatch, capsys):
    """Also by a Python that is too old for the rest: what it reads first has no newer syntax."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 6))
    with pytest.raises(SystemExit) as end:
        entry.start("__main__")
    assert end.value.code == 2 and "3.10" in capsys.readouterr().err
    cli = [ROOT / "support" / "cli" / f"{name}.py" for name in ("__init__", "entry", "environment")]
    for path in (*SCRIPTS, ROOT / "nanomdlm.py", ROOT / "support" / "__init__.py", *cli):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))


def needs(*packages):
    """The packages and all that they need, as pip would install them; "_" for "-"."""
    found = set()
    todo = [*packages]
    while todo:
        name = re.match(r"[\w.-]+", todo.pop())[0].lower().replace("-", "_")
        if name not in found:
            found.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                todo += [line for line in metadata.requires(name) or () if "extra ==" not in line]
    return found


@functools.cache
def optional_packages():
    """All but torch, triton, numpy, safetensors, tqdm, tyro, filelock, what these need, and what
    runs the tests."""
    needed = ("torch", "triton", "numpy", "safetensors", "tqdm", "tyro", "filelock")
    kept = needs(*needed, "pytest", "pytest-xdist", "hypothesis")
    return [
        module
        for module, names in metadata.packages_distributions().items()
        if not kept & {name.lower().replace("-", "_") for name in names}
        and not any((ROOT / file).exists() for file in (module, f"{module}.py"))
    ]


@pytest.fixture
def light(monkeypatch):
    """Optional packages cannot be imported."""
    for package in optional_packages():
        hide(monkeypatch, package)
    assert sys.modules["tokenizers"] is sys.modules["matplotlib"] is None


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        (sample, ["--infill", "the ██ of", "--candidates=2"]),
        (sample, ["--length=9", "--steps=2"]),
        (sample, ["--batch={tmp}/templates"]),
        (eval, ["--windows=1", "--passes=1", "--exact", "--pictures=none"]),
        (eval, ["--windows=1", "--passes=1"]),
        (export, ["--dest={tmp}/hf"]),
    ],
)
def test_a_plain_use_needs_seven_packages(program, flags, short_run, tmp_path, light, capfd):
    (tmp_path / "templates").write_text("the █at\nof ██\n")
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    assert entry.run(program.main, [*flags, f"--out_dir={short_run}"]) == 0
    lines = capfd.readouterr().err.splitlines(keepends=True)
    assert "step-4" in lines[0], "it says which model writes"
    draws = program is eval and "--pictures=none" not in flags
    assert len(lines) == 1 + draws and (not draws or says_one_sentence(lines[1], "matplotlib"))


def test_a_plain_run_needs_seven_packages(short_run, tmp_path, light, capsys):
    text = short_run.parent / "text.txt"
    out = tmp_path / "out"
    flags = [*TINY, "--eval_windows=2", "--max_steps=1", f"--out_dir={out}"]
    assert run_mdlm(f"--data={text}", *flags) == 0
    err = capsys.readouterr().err
    about = [line for line in err.splitlines() if "matplotlib" in line]
    assert len(about) == 1 and says_one_sentence(about[0] + "\n", "matplotlib")
    assert "Traceback" not in err and (out / "step-1").exists()


@pytest.mark.parametrize(
    ("package", "program", "flags"),
    [
        ("tokenizers", mdlm, ["--data={text}", "--tokenizer=bpe", "--out_dir={tmp}/x"]),
        ("tokenizers", mdlm, ["--data={text}", "--tokenizer={tmp}/t.json", "--out_dir={tmp}/x"]),
        ("onnx", export, ["--to=page", "--dest={tmp}/x"]),
        ("onnxscript", export, ["--to=page", "--dest={tmp}/x"]),
        ("pyarrow", mdlm, ["--data={tmp}/t.parquet", "--out_dir={tmp}/x"]),
        ("matplotlib", eval, ["--pictures={tmp}/x"]),
    ],
)
def test_a_package_of_some_uses_is_named(
    package, program, flags, short_run, tmp_path, monkeypatch, capsys
):
    for name in ("t.json", "t.parquet"):
        (tmp_path / name).write_text("{}")
    hide(monkeypatch, package)
    monkeypatch.setattr(checkpoint, "default_run", lambda out_dir: checkpoint.SHIPPED)
    monkeypatch.setattr(export, "default_run", lambda out_dir: checkpoint.SHIPPED)
    text = short_run.parent / "text.txt"
    places = dict(tmp=tmp_path, text=text, run=short_run)
    flags = [flag.format(**places) for flag in flags]
    if program is mdlm:
        flags += TINY
        code = run_mdlm(*flags)
    else:
        code = entry.run(program.main, flags)
    err = capsys.readouterr().err
    assert code == 2 and says_one_sentence(err, package)
    assert not (tmp_path / "x").exists()


# --------------------------------------------------------------------------------------------------
# What the README and the other texts tell the reader to type

PROGRAMS = ("mdlm", "sample", "eval", "export", "bench", "serve")


@pytest.mark.parametrize("path", ["README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=str)
def test_commands_of_a_text_have_flags_that_exist(path):
    """Those of lessons: test_lessons.py. results/ has what was typed at commits named there."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for name, rest in re.findall(r"(?m)^python (\w+)\.py(.*)$", text):
        if name not in PROGRAMS:
            continue
        words = shlex.split(re.split(r" [|>&]| 2>", rest)[0], comments=True)
        assert not unknown_flags(name, words), words


# --------------------------------------------------------------------------------------------------
# pip install


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_pip_installs_all_that_the_modules_use():
    import tomllib

    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    setup = tools["setuptools"]
    folders = {Path(*name.split(".")[1:]): name for name in setup["packages"] if "." in name}
    modules = {*setup["py-modules"], "eval", "export", "serve"}  # setup.py adds these
    todo = list(modules)
    while todo:
        for name in GRAPH[todo.pop()] - modules - {"nanomdlm"}:
            is_installed = MODULES[name].parent in folders or name in modules
            assert is_installed, f"{name} is imported but not installed"
            modules.add(name)
            todo.append(name)
    assert {"mdlm", "sample"} <= modules
    for path in FILES:
        package = next((folder for folder in path.parents if folder in folders), None)
        if package and path.suffix != ".py":
            patterns = setup["package-data"][folders[package]]
            assert any(path.relative_to(package).match(pattern) for pattern in patterns), path


@pytest.mark.slow
@pytest.mark.parametrize("editable", [True, False])
def test_pip_installs_it_for_any_folder(editable, tmp_path):
    """The modules of this environment serve as its dependencies; kernels is another's there."""
    source = tmp_path / "source"
    for path in FILES:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "v")], check=True)
    python = tmp_path / "v" / ("Scripts" if os.name == "nt" else "bin") / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    (site / "base.pth").write_text(str(Path(torch.__file__).parent.parent))
    make_other(site, "kernels")
    install = [python, "-m", "pip", "install", "-q", "--no-deps"]
    install += ["-e", source] if editable else [source]
    r = subprocess.run(install, capture_output=True, text=True)
    if "No matching distribution found for setuptools" in r.stdout + r.stderr:
        pytest.skip("pip cannot fetch setuptools, which builds it")
    assert r.returncode == 0, r.stderr
    code = "import kernels, mdlm, sample; from nanomdlm.support.run.checkpoint import SHIPPED\n"
    code += "model, tokenizer, config = mdlm.load(SHIPPED)\n"
    code += "texts = sample.write(model, tokenizer, 'To be, or no█', temperature=0)\n"
    code += "print(kernels.OTHER, *texts)"
    r = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert r.stdout == "True To be, or not\n", r.stderr


# --------------------------------------------------------------------------------------------------
# Another package called kernels


def make_other(folder, name):
    """A package of this name, with a module `inner`, in a folder."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("OTHER = True\nfrom .inner import WORD\n")
    (folder / name / "inner.py").write_text("WORD = 'other'\n")


@pytest.mark.parametrize("order", ["theirs first", "ours first"])
def test_kernels_of_others_and_ours_live_together(order, tmp_path):
    """transformers imports Hugging Face's package `kernels`, if it is installed."""
    make_other(tmp_path, "kernels")
    theirs = "import kernels; assert kernels.OTHER and kernels.WORD == 'other'\n"
    ours = "import mdlm, sample\nfrom nanomdlm.kernels.operations import select\n"
    ours += "assert select('torch').name == 'torch'\n"
    code = theirs + ours if order == "theirs first" else ours + theirs
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True)
