"""Exports a model as a web page that runs it: ONNX graph, weights, and the scripts of assets/.

index.html contains the scripts, so that none can be missing or come from another export. It also
contains the sizes and checksums of all other files, and tells the user which one is missing,
damaged or from another export.

The weights are in a separate file: matrices in int8 with a scale for each column, the rest in
float32. assets/model.js converts them to the float32 that the graph expects.
"""

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
ABOUT = "A diffusion language model in this page fills gaps as you watch. Nothing typed leaves it."


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
    names = ("EVERY", "REACH", "NEAR", "SPARSE", "APART", "RIVALS", "ROUNDS", "DOUBT", "PROMISE")
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
    # The viewer expects a sample; live.js removes this one when the first text is written.
    empty = dict(title="", tokens=[], given=[], frames=[], calls=0, seconds=0)
    # What the user types for a gap: a character that is not in the vocabulary, as in live.js.
    sign = next((c for c in "█_" if c not in tokenizer.vocab), "[MASK]")
    example = "To be, or ███ to be".replace("█", sign)
    if not set(example.replace(sign, "")) <= set(tokenizer.vocab):
        example = ""
    size = max(offset + 4 * n for offset, n, _ in tensors)
    live |= dict(tensors=tensors, bytes=size, example=example)
    data = dict(samples=[empty], settings=dict(model=about), live=live)
    page = assemble(
        data,
        scripts=["crc.js", "pattern.js", "viewer.js", "live.js"],
        styles=["viewer.css", "live.css"],
        policy=POLICY,
        about=ABOUT,
        composer=read_asset("live.html"),
        program="export.py --to=page",
    )
    return contents | {"index.html": page.encode()}
