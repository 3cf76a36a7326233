"""A model as a web page: its ONNX graph, its weights, and the scripts of page/ that run it.

The scripts are a part of index.html, so that none can be missing or of another export. It has the
sizes and checksums of all other files, and says which is missing, damaged or of another export.
The weights are a file of their own, which page/worker.js turns into the float32 that the graph
expects: matrices in int8 with a scale for each column, the rest as it is.
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
from support.terminal import warn
from support.web.viewer import PAGE, assemble, bundle, read_part

RUNTIME = PAGE / "node_modules" / "onnxruntime-web"
BINARY = "ort-wasm-simd-threaded"
RUNTIME_FILES = {  # the script, what it imports, WebAssembly
    "wasm": ("ort.wasm.min.mjs", f"{BINARY}.mjs", f"{BINARY}.wasm"),
    "webgpu": ("ort.webgpu.min.mjs", f"{BINARY}.asyncify.mjs", f"{BINARY}.asyncify.wasm"),
}
NPM_LIMIT = 600  # seconds
POLICY = "'self' 'wasm-unsafe-eval'; connect-src 'self'; worker-src blob:"
ABOUT = "A diffusion language model in this page fills gaps as you watch. Nothing typed leaves it."


def check(model, tokenizer, config):
    """Raise UserError for a model that the page cannot run."""
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
    """Whether npm has installed all of the ONNX Runtime Web that package-lock.json names."""
    # npm writes this list last, so it is missing where an installation was cut off.
    installed = RUNTIME.parent / ".package-lock.json"
    try:
        locks = [read_json(path, "list of npm") for path in (installed, PAGE / "package-lock.json")]
        name = f"node_modules/{RUNTIME.name}"
        versions = [lock["packages"][name]["version"] for lock in locks]
    except (UserError, KeyError, TypeError):
        return False
    return versions[0] == versions[1]


def install_runtime():
    """Fetch ONNX Runtime Web by npm; raises UserError where that fails or takes too long."""
    npm = shutil.which("npm")
    if not npm:
        raise UserError("--to=page needs npm, a part of Node.js; install that (nodejs.org)")
    warn("npm ci: fetching ONNX Runtime Web")
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    needs = "it needs a network the first time"
    # A file, as what npm has started may keep a pipe open after npm was killed.
    with tempfile.TemporaryFile() as said:
        how = dict(cwd=PAGE, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
        try:
            run = subprocess.run(command, timeout=NPM_LIMIT, **how)
        except subprocess.TimeoutExpired:
            found = f"npm ci was stopped after {NPM_LIMIT} s in {PAGE}"
            raise UserError(f"{found}; {needs}: check it, then run this again") from None
        said.seek(0)
        why = " ".join(said.read().decode(errors="replace").split())[-300:]
    if run.returncode:
        raise UserError(f"npm ci failed in {PAGE} ({why}); {needs}")


def read_runtime():
    """The files of ONNX Runtime Web, name -> bytes; npm brings them, once."""
    if not is_installed():
        install_runtime()
    names = [name for names in RUNTIME_FILES.values() for name in names]
    missing = [name for name in names if not (RUNTIME / "dist" / name).is_file()]
    if missing:
        raise UserError(f"{RUNTIME} has no {missing[0]}; remove node_modules, and run this again")
    return {name: (RUNTIME / "dist" / name).read_bytes() for name in names}


class OnIds(torch.nn.Module):
    """A model as a function of ids (B, T) alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(self.model.objective.view(ids))


def to_onnx(model, folder):
    """(the ONNX graph as bytes, the tensors of its data file as (offset, array))."""
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
        place = {entry.key: int(entry.value) for entry in tensor.external_data[1:]}
        if place:
            array = np.frombuffer(data, np.float32, place["length"] // 4, place["offset"])
            tensors.append((place["offset"], array.reshape(tensor.dims)))
    return (folder / "model.onnx").read_bytes(), tensors


def quantize(array):
    """A matrix as int8, and the scale of each column: in a product, of each output."""
    scale = np.abs(array).max(0).clip(min=1e-30) / np.float32(127)
    return np.round(array / scale).astype(np.int8), scale


def contents_of(model, tokenizer, config, weights):
    """The files of the page, name -> bytes. weights: int8 or float32."""
    check(model, tokenizer, config)
    contents = read_runtime()
    warn("exporting to ONNX")
    with tempfile.TemporaryDirectory() as folder, naming(folder):
        contents["model.onnx"], arrays = to_onnx(model, Path(folder))
    packed = b""
    tensors = []  # offset in the data file, number of values, of columns with a scale
    for offset, array in arrays:
        columns = array.shape[1] if weights == "int8" and array.ndim == 2 else 0
        tensors.append((offset, array.size, columns))
        packed += b"".join(part.tobytes() for part in (quantize(array) if columns else (array,)))
    contents["weights.bin"] = packed
    live = dict(vocab=tokenizer.vocab, context=config.block_size, mask=model.mask_id)
    live |= dict(files={name: (len(c), zlib.crc32(c)) for name, c in contents.items()})
    live |= dict(
        runtime=RUNTIME_FILES, worker=bundle("crc.js", "sampler.js", "model.js", "worker.js")
    )
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    about = f"{millions:.1f} M parameters in {weights}, context {config.block_size}"
    empty = dict(title="", tokens=[], given=[], frames=[], calls=0, seconds=0)
    sign = next((c for c in "█_" if c not in tokenizer.vocab), "[MASK]")  # as in live.js
    example = "To be, or ███ to be".replace("█", sign)
    if not set(example.replace(sign, "")) <= set(tokenizer.vocab):
        example = ""
    size = max(offset + 4 * n for offset, n, _ in tensors)
    live |= dict(tensors=tensors, bytes=size, example=example)
    data = dict(samples=[empty], settings=dict(model=about), live=live)
    page = assemble(
        data,
        scripts=["crc.js", "viewer.js", "live.js"],
        styles=["viewer.css", "live.css"],
        policy=POLICY,
        about=ABOUT,
        composer=read_part("live.html"),
        program="export.py --to=page",
    )
    return contents | {"index.html": page.encode()}
