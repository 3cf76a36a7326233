"""A model as a web page: its ONNX graph, its weights, and the scripts of page/ that run it.

The weights are a file of their own, which page/worker.js turns into the float32 that the graph
expects: matrices in int8 with a scale for each column, the rest as it is.
"""

import logging
import shutil
import subprocess
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from support.cli import UserError, warn
from support.files import naming
from support.viewer import PAGE, as_script, assemble

RUNTIME = PAGE / "node_modules" / "onnxruntime-web"
BINARY = "ort-wasm-simd-threaded"
RUNTIME_FILES = ["ort.wasm.min.mjs", f"{BINARY}.mjs", f"{BINARY}.wasm"]  # for WebGPU:
RUNTIME_FILES += ["ort.webgpu.min.mjs", f"{BINARY}.asyncify.mjs", f"{BINARY}.asyncify.wasm"]
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; worker-src 'self' blob:; base-uri 'none'; form-action 'none'"
)
ABOUT = "A diffusion language model in this page fills gaps as you watch. Nothing typed leaves it."


def check(model, tokenizer, config):
    """Raise UserError for a model that the page cannot run."""
    for fits, what in (
        (config.objective == "mdlm", f"--objective={config.objective}"),
        (tokenizer.kind == "char", f"--tokenizer={tokenizer.kind}"),
        (tokenizer.end_id is None, "documents"),
        (model.n == 1, "blocks"),
    ):
        if not fits:
            raise UserError(f"--to=page takes masked diffusion models of characters, not {what}")
    if not (find_spec("onnx") and find_spec("onnxscript")):
        raise UserError("--to=page needs two packages more; pip install onnx onnxscript")


def read_runtime():
    """The files of ONNX Runtime Web, name -> bytes; npm brings them, once."""
    if not all((RUNTIME / "dist" / name).exists() for name in RUNTIME_FILES):
        npm = shutil.which("npm")
        if not npm:
            raise UserError("--to=page needs npm, which comes with Node.js; install it")
        warn("npm ci: fetching ONNX Runtime Web")
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        run = subprocess.run(command, cwd=PAGE, capture_output=True, text=True)
        if run.returncode:
            why = " ".join(run.stderr.split())[-300:]
            raise UserError(f"npm ci failed in {PAGE} ({why}); it needs a network the first time")
    return {name: (RUNTIME / "dist" / name).read_bytes() for name in RUNTIME_FILES}


def to_onnx(model, folder):
    """(the ONNX graph as bytes, the tensors of its data file as (offset, array))."""
    import onnx

    x = torch.full((1, model.config.block_size), model.mask_id, dtype=torch.int32)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = dict(input_names=["ids"], output_names=["logits"])
        program = torch.onnx.export(model, (x,), dynamo=True, verbose=False, **names)
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
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    about = f"{millions:.1f} M parameters in {weights}, context {config.block_size}"
    empty = dict(title="", tokens=[], given=[], frames=[], calls=0, seconds=0)
    example = "To be, or ███ to be"
    if not set(example) <= {"█", *tokenizer.vocab}:
        example = ""
    size = max(offset + 4 * n for offset, n, _ in tensors)
    live |= dict(tensors=tensors, bytes=size, example=example)
    data = dict(samples=[empty], settings=dict(model=about), live=live)
    page = assemble(
        policy=POLICY,
        style='<link rel="stylesheet" href="viewer.css"><link rel="stylesheet" href="live.css">',
        about=ABOUT,
        composer=(PAGE / "live.html").read_text(encoding="utf-8"),
        scripts=as_script(data)
        + '<script src="viewer.js"></script><script src="live.js"></script>',
    )
    contents["index.html"] = page.encode()
    files = [*PAGE.glob("*.js"), *PAGE.glob("*.css")]
    return contents | {path.name: path.read_bytes() for path in files}
