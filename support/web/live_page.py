"""Exports a model as a web page that runs it: ONNX graph, weights, and the scripts of assets/.

index.html contains the scripts, so that none can be missing or come from another export. It also
contains the sizes and checksums of all other files, and tells the user which one is missing,
damaged or from another export.

The weights are in a separate file: matrices in int8 with a scale for each column, the rest in
float32. assets/model.js converts them to the float32 that the graph expects.
"""

import contextlib
import logging
import shutil
import subprocess
import tempfile
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch

from support import environment
from support.errors import UserError
from support.files import naming, read_json
from support.infill import mistakes, proofreading
from support.terminal import warn
from support.web.viewer import PAGE, assemble, bundle, read_asset

RUNTIME = PAGE / "node_modules" / "onnxruntime-web"
BINARY = "ort-wasm-simd-threaded"
RUNTIME_FILES = {  # device -> the script, the module that it imports, the WebAssembly binary
    "wasm": ("ort.wasm.min.mjs", f"{BINARY}.mjs", f"{BINARY}.wasm"),
    "webgpu": ("ort.webgpu.min.mjs", f"{BINARY}.asyncify.mjs", f"{BINARY}.asyncify.wasm"),
}
NPM_LIMIT = 600  # seconds
POLICY = "'self' 'wasm-unsafe-eval'; connect-src 'self'; worker-src blob:"
DIFFUSION = """Diffusion: each call of the network sees the whole text, fills some of its masks
    anywhere, and draws again what it doubts."""
ABOUT = f"{DIFFUSION} Nothing typed leaves this page."
MISTAKES = "But soft, what lihgt through yonder windw breaks?"


def check(model, tokenizer, config):
    """Raise UserError if the page cannot run the model, or a package is missing."""
    for fits, what in (
        (config.objective == "mdlm", f"--objective={config.objective}"),
        (tokenizer.kind == "char", f"--tokenizer={tokenizer.kind}"),
        (tokenizer.end_id is None, "documents"),
        (model.objective.n_blocks == 1, "blocks"),
    ):
        if not fits:
            raise UserError(f"--to=page takes masked diffusion models of characters, not {what}")
    if not (environment.is_installed("onnx") and environment.is_installed("onnxscript")):
        fix = environment.pip_install("onnx", "onnxscript")
        raise UserError(f"--to=page needs the packages onnx and onnxscript; type: {fix}")


def is_installed():
    """Whether npm has completely installed the version of ONNX Runtime Web in package-lock.json."""
    # npm writes this list last. If an installation was interrupted, it is missing.
    installed = RUNTIME.parent / ".package-lock.json"
    try:
        locks = [read_json(path, "list of npm") for path in (installed, PAGE / "package-lock.json")]
        name = f"node_modules/{RUNTIME.name}"
        versions = [lock["packages"][name]["version"] for lock in locks]
    except (UserError, KeyError, TypeError):
        return False
    return versions[0] == versions[1]


def install_runtime():
    """Download ONNX Runtime Web with npm; raise UserError if that fails or takes too long."""
    npm = shutil.which("npm")
    if not npm:
        raise UserError("--to=page needs npm, a part of Node.js; install that (nodejs.org)")
    warn("npm ci: fetching ONNX Runtime Web")
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    needs = "it needs a network the first time"
    # A file instead of a pipe: children of npm could keep a pipe open after npm was killed.
    with tempfile.TemporaryFile() as errors:
        streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            run = subprocess.run(command, timeout=NPM_LIMIT, cwd=PAGE, **streams)
        except subprocess.TimeoutExpired:
            problem = f"npm ci was stopped after {NPM_LIMIT} s in {PAGE}"
            raise UserError(f"{problem}; {needs}: check it, then run this again") from None
        errors.seek(0)
        why = " ".join(errors.read().decode(errors="replace").split())[-300:]
    if run.returncode:
        raise UserError(f"npm ci failed in {PAGE} ({why}); {needs}")


def read_runtime():
    """Return the files of ONNX Runtime Web, {name: bytes}; npm downloads them the first time."""
    if not is_installed():
        install_runtime()
    names = [name for names in RUNTIME_FILES.values() for name in names]
    missing = [name for name in names if not (RUNTIME / "dist" / name).is_file()]
    if missing:
        raise UserError(f"{RUNTIME} has no {missing[0]}; remove node_modules, and run this again")
    return {name: (RUNTIME / "dist" / name).read_bytes() for name in names}


class OnIds(torch.nn.Module):
    """Wraps a model as a function of ids (B, T), without a View."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(self.model.objective.view(ids))


def to_onnx(model, folder):
    """Export a model to ONNX; return (the graph as bytes, its weights as (offset, array)).

    offset: bytes from the start of the ONNX data file. folder: for temporary files.
    """
    import onnx

    x = torch.full((1, model.config.block_size), model.mask_id, dtype=torch.int32)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = dict(input_names=["ids"], output_names=["logits"])
        program = torch.onnx.export(OnIds(model), (x,), dynamo=True, verbose=False, **names)
    program.save(folder / "model.onnx", external_data=True)
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    data = (folder / "model.onnx.data").read_bytes()
    tensors = []
    for tensor in graph.initializer:
        # The first entry is the file's name, the others are offset and length in bytes.
        location = {entry.key: int(entry.value) for entry in tensor.external_data[1:]}
        if location:
            array = np.frombuffer(data, np.float32, location["length"] // 4, location["offset"])
            tensors.append((location["offset"], array.reshape(tensor.dims)))
    return (folder / "model.onnx").read_bytes(), tensors


def quantize(array):
    """Quantize a matrix to int8; return it and the scale of each column (of each output)."""
    scale = np.abs(array).max(0).clip(min=1e-30) / np.float32(127)
    return np.round(array / scale).astype(np.int8), scale


def proofreading_settings():
    """Return what proofread.js needs: the constants of proofreading, and the prior of mistakes."""
    names = ("EVERY", "RUN_EVERY", "RUN", "REACH", "NEAR", "SPARSE", "APART", "RIVALS", "ROUNDS")
    names += ("DOUBT", "RUN_DOUBT", "PROMISE", "TWICE")
    settings = {name: getattr(proofreading, name) for name in names}
    cost = mistakes.Prior(None, 1).each
    return settings | dict(cost=cost, BESIDE=mistakes.BESIDE, beside=mistakes.beside())


def contents_of(model, tokenizer, config, weights):
    """Return the files of the page, {name: bytes}; weights: "int8" or "float32"."""
    check(model, tokenizer, config)
    contents = read_runtime()
    warn("exporting to ONNX")
    with tempfile.TemporaryDirectory() as folder, naming(folder):
        contents["model.onnx"], arrays = to_onnx(model, Path(folder))
    packed = b""
    tensors = []  # (offset in the ONNX data file, number of values, number of scales or 0)
    for offset, array in arrays:
        if weights == "int8" and array.ndim == 2:
            integers, scale = quantize(array)
            packed += integers.tobytes() + scale.tobytes()
            tensors.append((offset, array.size, array.shape[1]))
        else:
            packed += array.tobytes()
            tensors.append((offset, array.size, 0))
    contents["weights.bin"] = packed
    live = dict(vocab=tokenizer.vocab, context=config.block_size, mask=model.mask_id)
    live |= dict(files={name: (len(c), zlib.crc32(c)) for name, c in contents.items()})
    live |= dict(proofreading=proofreading_settings())
    names = ("crc", "sampler", "search", "proofread", "model", "worker")
    worker = bundle(*(f"{name}.js" for name in names))
    live |= dict(runtime=RUNTIME_FILES, worker=worker)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    about = f"{millions:.1f} M parameters in {weights}, context {config.block_size}"
    # What the user types for a gap: a character that is not in the vocabulary, as in in_browser.js.
    sign = next((c for c in "█_" if c not in tokenizer.vocab), "[MASK]")
    size = max(offset + 4 * n for offset, n, _ in tensors)
    live |= dict(tensors=tensors, bytes=size)
    can = dict(patterns="█" not in tokenizer.vocab, fixes=True)
    can |= dict(open_gaps=not {*"[_]"} <= {*tokenizer.vocab})
    live |= dict(fixes=True, examples=examples(tokenizer, sign, **can))
    scripts = ["crc.js", "pattern.js", "viewer.js", "in_browser.js", "live.js"]
    about_page = dict(policy=POLICY, about=ABOUT, program="export.py --to=page")
    page = compose(live, about, scripts, **about_page)
    return contents | {"index.html": page.encode()}


def compose(live, model, scripts, **values):
    """Build the live page, whose form is the same wherever a text is computed; returns its HTML.

    live: what live.js and the source of `scripts` read. model: what the page says of the model.
    values: policy, about and program of viewer.assemble
    """
    # The viewer expects a sample; live.js removes this one when the first text is written.
    empty = dict(title="", tokens=[], given=[], frames=[], calls=0, seconds=0)
    return assemble(
        dict(samples=[empty], settings=dict(model=model), live=live),
        scripts=scripts,
        styles=["viewer.css", "live.css"],
        composer=read_asset("live.html"),
        main=read_asset("live_main.html"),
        **values,
    )


def examples(tokenizer, sign, fills=True, patterns=True, open_gaps=False, fixes=False):
    """Return the examples that the model has the characters for, as dicts of label, text and what
    is done with it ("write", "rank" or "fix"). The first is in the field at once.

    sign: what is typed for a mask. fills, patterns, open_gaps, fixes: whether gaps are filled, may
    have patterns, may have an unknown length without one; whether texts are proofread
    """

    def is_known(text):
        with contextlib.suppress(UserError):
            return tokenizer.decode(tokenizer.encode_lossless(text)) == text
        return False

    found = []
    if fills and is_known("To be, or to be"):
        text = f"To be, or {sign * 3} to be"
        found.append(dict(label="fill a gap", text=text, what="write"))
        text = "To be, or [___] to be"
        found += [dict(label="a gap of any length", text=text, what="rank")] * open_gaps
    if is_known("ROMEO:\n"):
        found.append(dict(label="go on from \u201cROMEO:\u201d", text="ROMEO:\n", what="write"))
    if fills and patterns and is_known("My name is ."):
        text = "My name is [___:[A-Z][a-z]+]."
        found.append(dict(label="a gap that must match", text=text, what="rank"))
    if fixes and is_known(MISTAKES):
        found.append(dict(label="proofread", text=MISTAKES, what="fix"))
    return found
