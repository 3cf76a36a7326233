"""A model as a web page: its ONNX graph, its weights, and the scripts of page/ that run it.

The weights are a file of their own, which page/worker.js turns into the float32 that the graph
expects: matrices in int8 with one scale an output, the rest as it is.
"""

import contextlib
import io
import json
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
from support.viewer import PAGE, as_script, assemble

SCRIPTS = ("viewer.js", "live.js", "worker.js", "model.js", "sampler.js", "viewer.css", "live.css")
RUNTIME = PAGE / "node_modules" / "onnxruntime-web"
BINARY = "ort-wasm-simd-threaded"
# For browsers without WebGPU, and with it.
RUNTIME_FILES = ("ort.wasm.min.mjs", f"{BINARY}.mjs", f"{BINARY}.wasm")
RUNTIME_FILES += ("ort.webgpu.min.mjs", f"{BINARY}.asyncify.mjs", f"{BINARY}.asyncify.wasm")
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; worker-src 'self' blob:; base-uri 'none'; form-action 'none'"
)
ABOUT = """A masked diffusion language model that runs in this page: type a text with gaps and watch
    it fill them. Nothing you type leaves your device."""


def check(model, tokenizer, config):
    """Raise UserError for a model that the page cannot run."""
    for fits, what in (
        (config.objective == "mdlm", f"--objective={config.objective}"),
        (tokenizer.kind == "char", f"--tokenizer={tokenizer.kind}"),
        (tokenizer.end_id is None, "documents"),
    ):
        if not fits:
            raise UserError(
                f"--to=page takes masked diffusion models of characters; this one has {what}"
            )
    if not (find_spec("onnx") and find_spec("onnxscript")):
        raise UserError("--to=page needs two packages more; pip install onnx onnxscript")


def read_runtime():
    """The files of ONNX Runtime Web, name -> bytes; npm brings them, once."""
    wanted = json.loads((PAGE / "package.json").read_text())["dependencies"]["onnxruntime-web"]
    with contextlib.suppress(OSError):
        if json.loads((RUNTIME / "package.json").read_text())["version"] == wanted:
            return {name: (RUNTIME / "dist" / name).read_bytes() for name in RUNTIME_FILES}
    npm = shutil.which("npm")
    if not npm:
        raise UserError("--to=page needs npm, for ONNX Runtime Web; install Node.js (nodejs.org)")
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    warn("npm ci: ONNX Runtime Web is fetched, once")
    run = subprocess.run(command, cwd=PAGE, capture_output=True, text=True)
    if run.returncode:
        why = " ".join(run.stderr.split())[-300:]
        raise UserError(f"npm ci failed in {PAGE}: {why}; it needs a network the first time")
    return {name: (RUNTIME / "dist" / name).read_bytes() for name in RUNTIME_FILES}


def round_matrices(model):
    """Round the matrices of a model to int8 times a scale for each row, in place.

    Returns {bytes of a matrix as float32: (its values (n,) int8, scales, axis of the scales)}, each
    matrix also transposed, as a product may have it.
    """
    found = {}
    for matrix in model.state_dict().values():
        if matrix.dim() != 2:
            continue
        scale = matrix.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        values = (matrix / scale).round().to(torch.int8)
        matrix.copy_(values * scale)
        for axis, (m, v) in enumerate([(matrix, values), (matrix.T, values.T)]):
            found[m.numpy().tobytes()] = (v.numpy(), scale.numpy(), axis)
    return found


def to_onnx(model, folder):
    """Write model.onnx and model.onnx.data; returns the tensors of the latter: (offset, array)."""
    import onnx

    x = torch.full((1, model.config.block_size), model.mask_id, dtype=torch.int32)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        names = dict(input_names=["ids"], output_names=["logits"])
        program = torch.onnx.export(model, (x,), dynamo=True, verbose=False, **names)
    program.save(folder / "model.onnx", external_data=True)
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    data = (folder / "model.onnx.data").read_bytes()
    tensors = []
    for tensor in graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            offset = int(place["offset"])
            array = np.frombuffer(data, np.float32, int(place["length"]) // 4, offset)
            tensors.append((offset, array.reshape(tensor.dims)))
    return tensors, len(data)


def contents_of(model, tokenizer, config, weights):
    """The files of the page, name -> bytes. weights: int8 or float32."""
    check(model, tokenizer, config)
    contents = read_runtime()
    rounded = round_matrices(model) if weights == "int8" else {}
    with tempfile.TemporaryDirectory() as folder:
        warn("exporting to ONNX")
        arrays, size = to_onnx(model, Path(folder))
        contents["model.onnx"] = (Path(folder) / "model.onnx").read_bytes()
    packed = b""
    tensors = []  # offset in the float32 file, number of values, columns, axis of the scales
    for offset, array in arrays:
        values, scale, axis = rounded.get(array.tobytes(), (array, array[:0], None))
        tensors.append((offset, array.size, array.shape[-1], axis))
        packed += values.tobytes() + scale.tobytes()
    contents["weights.bin"] = packed
    live = dict(vocab=tokenizer.vocab, context=config.block_size, mask=model.mask_id)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    about = f"{millions:.1f} M parameters in {weights}, context {config.block_size}"
    empty = dict(title="", tokens=[], given=[], frames=[], calls=0, seconds=0)
    example = "To be, or ███ to be"
    if config.data != "shakespeare" or not set(example) <= {"█", *tokenizer.vocab}:
        example = ""
    live |= dict(tensors=tensors, bytes=size, example=example)
    data = dict(samples=[empty], settings=dict(model=about), live=live)
    names = [name for name in SCRIPTS if name.startswith(("viewer", "live"))]
    page = assemble(
        policy=POLICY,
        style="\n".join(f'<link rel="stylesheet" href="{n}">' for n in names if n.endswith("css")),
        about=ABOUT,
        composer=(PAGE / "live.html").read_text(encoding="utf-8"),
        scripts="\n".join([as_script(data), *(f'<script src="{n}"></script>' for n in names[:2])]),
    )
    contents["index.html"] = page.encode()
    return contents | {name: (PAGE / name).read_bytes() for name in SCRIPTS}
