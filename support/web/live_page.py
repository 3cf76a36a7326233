"""Exports a model as a web page that runs it: ONNX graph, weights, and the scripts of assets/.

index.html contains the scripts, so that none can be missing or come from another export. It also
contains the sizes and checksums of all other files, and tells the user which one is missing,
damaged or from another export.

The weights are in a separate file: matrices in int8 with a scale for each column, the rest in
float32. assets/model.js converts them to the float32 that the graph expects.
"""

import contextlib
import logging
import re
import shutil
import subprocess
import tempfile
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch

from nanomdlm.support import abilities
from nanomdlm.support.cli import environment
from nanomdlm.support.cli.files import naming
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.templates import Gap, parse, to_ids
from nanomdlm.support.proofread import mistakes, proofreader, races
from nanomdlm.support.run.calibration import temperature_of
from nanomdlm.support.web.viewer import PAGE, HtmlRecorder, assemble, bundle, read_asset

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = PAGE / "node_modules" / "onnxruntime-web"
BINARY = "ort-wasm-simd-threaded"
RUNTIME_FILES = {  # device -> the script, the module that it imports, the WebAssembly binary
    "wasm": ("ort.wasm.min.mjs", f"{BINARY}.mjs", f"{BINARY}.wasm"),
    "webgpu": ("ort.webgpu.min.mjs", f"{BINARY}.asyncify.mjs", f"{BINARY}.asyncify.wasm"),
}
WORKER = ("crc.js", "sampler.js", "search.js", "proofread.js", "model.js", "worker.js")
NPM_LIMIT = 600  # seconds
POLICY = "'self' 'wasm-unsafe-eval'; connect-src 'self'; worker-src blob:"
TITLE = "A language model that does not write from left to right"
DIFFUSION = f"""{TITLE}: each call sees the whole text, fills some masks anywhere, and draws again
    what it doubts."""
LESSONS = "lessons/README.md"
PRIVACY = "Nothing typed leaves this page."
RECORDED = dict(seed=2, steps=32)  # of the text that plays while the model loads
# The passage of the picture in the README, with the characters of each gap.
PASSAGE = """KING RICHARD II:
My lord, {33}
And {31} of the king,
Then {32} my sorrow.

JULIET:
O Romeo, {28}?"""
MOST_OWN = 120  # characters of an example that is taken from a text of the model
MISTAKES = "But soft, what lihgt through yonder windw breaks?"


def check(model, tokenizer, config):
    """Raise UserError if the page cannot run the model, or a package is missing."""
    for fits, what in (
        (config.objective == "mdlm", f"--objective={config.objective}"),
        (tokenizer.kind == "char", f"--tokenizer={tokenizer.kind}"),
        (tokenizer.end_id is None, "documents"),
        (abilities.fills_gaps(model), "blocks"),
    ):
        if not fits:
            raise UserError(f"--to=page takes masked diffusion models of characters, not {what}")
    if not (environment.is_installed("onnx") and environment.is_installed("onnxscript")):
        fix = environment.pip_install("onnx", "onnxscript")
        raise UserError(f"--to=page needs the packages onnx and onnxscript; type: {fix}")


def is_installed():
    """Whether npm has completely installed what package-lock.json lists now."""
    # npm writes this list last. If an installation was interrupted, it is missing.
    installed = RUNTIME.parent / ".package-lock.json"
    wanted = PAGE / "package-lock.json"
    return installed.is_file() and installed.stat().st_mtime >= wanted.stat().st_mtime


def install_runtime():
    """Download ONNX Runtime Web with npm; raise UserError if that fails or takes too long."""
    npm = shutil.which("npm")
    if not npm:
        raise UserError("--to=page needs npm, a part of Node.js; install that (nodejs.org)")
    warn("npm ci: fetching ONNX Runtime Web")
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        subprocess.run(command, cwd=PAGE, timeout=NPM_LIMIT, check=True, **streams)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
        raise UserError(f"{e}, in {PAGE}; it needs a network the first time") from None


def read_runtime():
    """Return the files of ONNX Runtime Web, {name: bytes}; npm downloads them the first time."""
    if not is_installed():
        install_runtime()
    names = [name for names in RUNTIME_FILES.values() for name in names]
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


def pack(model, weights):
    """Return a network's files, {name: bytes}, and what model.js needs to run them, as a dict.

    weights: "int8" or "float32". An autoregressive network is given the text and masks like any
    other: it shifts its input itself, and what comes after a place does not change its logits.
    """
    warn("exporting to ONNX")
    with tempfile.TemporaryDirectory() as folder, naming(folder):
        graph, arrays = to_onnx(model, Path(folder))
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
    size = max(offset + 4 * n for offset, n, _ in tensors)
    reading = dict(context=model.config.block_size, mask=model.mask_id, tensors=tensors, bytes=size)
    return {"model.onnx": graph, "weights.bin": packed}, reading


def checksums(contents):
    """The size and the CRC-32 of each file, by which model.js recognizes it."""
    return {name: (len(content), zlib.crc32(content)) for name, content in contents.items()}


def proofreading_settings(temperature=1.0):
    """Return what proofread.js needs: the constants of proofreading, and the prior of mistakes.

    temperature: of the network, by which proofread.js divides its logits
    """
    names = vars(races) | vars(proofreader)
    constants = {
        name: value
        for name, value in names.items()
        if name.isupper() and isinstance(value, (int, float))
    }
    prior = dict(cost=mistakes.Prior(None, 1).each, BESIDE=mistakes.BESIDE)
    return constants | prior | dict(beside=mistakes.beside(), temperature=temperature)


def record(model, tokenizer, template, unmask):
    """Return how the model fills a template, or writes a text of its own, for the viewer.

    Without the likeliest tokens of each place, which would need ten times the space.
    template: "" for a text of its own. unmask: sample.unmask
    """
    context = model.config.block_size
    segments = parse(template, tokenizer, context) if template else [Gap(context)]
    x = torch.tensor(to_ids(segments, model.mask_id), dtype=torch.int64)
    film = HtmlRecorder(tokenizer, x, model.mask_id)
    for step in unmask(model, x[None], **RECORDED):
        film.add(step, 0)
    found = film.page(step.x[0].tolist())
    found["frames"] = [[change[:3] for change in frame] for frame in found["frames"]]
    note = "recorded when this page was made"
    return found | dict(title="", note=note, calls=len(found["frames"]), seconds=0)


def contents_of(model, tokenizer, config, weights, unmask):
    """Return the files of the page, {name: bytes}.

    weights: "int8" or "float32". unmask: sample.unmask, which writes the text that is recorded
    """
    check(model, tokenizer, config)
    contents = read_runtime()
    network, reading = pack(model, weights)
    contents |= network
    # What the user types for a gap: a character that is not in the vocabulary, as in in_browser.js.
    sign = next((c for c in "█_" if c not in tokenizer.vocab), "[MASK]")
    template = passage(tokenizer, config, sign)
    film = record(model, tokenizer, template, unmask)
    own = "" if template else "".join(film["tokens"])
    can = {"fill", "begin", "fix"}
    if "█" not in tokenizer.vocab:
        can.add("match")
    if not {*"[_]"} <= {*tokenizer.vocab}:
        can.add("open")
    live = dict(
        vocab=tokenizer.vocab,
        temperature=temperature_of(model),
        files=checksums(contents),
        proofreading=proofreading_settings(temperature_of(model)),
        runtime=RUNTIME_FILES,
        worker=bundle(*WORKER),
        fixes=True,
        examples=examples(tokenizer, config, sign, can, own),
    )
    live |= reading
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    about = f"{millions:.1f} M parameters in {weights}, context {config.block_size}"
    scripts = ["crc.js", "pattern.js", "viewer.js", "in_browser.js", "live.js"]
    about_page = dict(policy=POLICY, about=introduction(PRIVACY), program="export.py --to=page")
    about_page["preview"] = preview()
    page = compose(live, about, scripts, film, **about_page)
    return contents | {"index.html": page.encode()}


def introduction(privacy):
    """What the page says about diffusion, the lessons, and where texts go, as HTML."""
    address = find_lessons()
    link = f'<a href="{address}" rel="noreferrer">The lessons</a> explain it.'
    return f"{DIFFUSION} {link if address else f'It is explained in {LESSONS}.'} {privacy}"


def preview():
    """The tag of the picture that a link to the page shows where pages.yml has published it."""
    address = re.match(r"https://github.com/([^/]+)/([^/]+)/", find_lessons() or "")
    if not address:
        return ""
    picture = f"https://{address[1].lower()}.github.io/{address[2]}/lessons/pictures/idea_light.png"
    return f'<meta property="og:image" content="{picture}">\n'


def find_lessons():
    """The address of the lessons of this clone, or None."""
    command = ["git", "--git-dir", str(ROOT / ".git"), "config", "--get", "remote.origin.url"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return lessons_at(run.stdout.strip())
    except (OSError, subprocess.TimeoutExpired):  # no git
        return None


def lessons_at(origin):
    """The address of the lessons in a repository of GitHub, without keys; else None."""
    form = r"(?:https://(?:[^@/]*@)?|(?:ssh://)?git@)github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?"
    match = re.fullmatch(form, origin)
    return match and f"https://github.com/{match[1]}/blob/HEAD/{LESSONS}"


def compose(live, model, scripts, film=None, **values):
    """Build the live page, whose form is the same wherever a text is computed; returns its HTML.

    live: what live.js and the source of `scripts` read. model: what the page says of the model.
    film: a text that plays until the model is loaded, as from `record`
    values: policy, about and program of viewer.assemble
    """
    head = f"""<meta name="description" content="{" ".join(DIFFUSION.split())}">
<meta property="og:title" content="mdlm: {TITLE}">
{values.pop("preview", "")}"""
    # The viewer expects a sample; live.js removes this one when the first text is written.
    empty = dict(title="", tokens=[], given=[], frames=[], calls=0, seconds=0)
    return assemble(
        dict(samples=[film or empty], settings=dict(model=model), live=live),
        scripts=scripts,
        styles=["viewer.css", "live.css"],
        composer=read_asset("live.html"),
        main=read_asset("live_main.html"),
        title=f"mdlm: {TITLE}",
        head=head,
        **values,
    )


# ---- Examples
def is_known(tokenizer, text):
    """Whether the model can be given a text, and gives it back unchanged."""
    with contextlib.suppress(UserError):
        return tokenizer.decode(tokenizer.encode_lossless(text)) == text
    return False


def writes_plays(tokenizer, config):
    """Whether a model learned from Shakespeare, as far as its data's name says it."""
    return "shakespeare" in str(config.data).lower() and is_known(tokenizer, "ROMEO:\n")


def passage(tokenizer, config, sign):
    """Return the passage of the README with its gaps, or "" if the model cannot be given it."""
    # A token of other tokenizers is about four characters.
    size = 1 if tokenizer.kind in ("char", "byte") else 4
    text = re.sub(r"{(\d+)}", lambda gap: sign * (int(gap[1]) // size), PASSAGE)
    fits = len(text.replace(sign, "█")) <= config.block_size  # a token has a character or more
    known = is_known(tokenizer, re.sub(r"{\d+}", "", PASSAGE))
    return text if fits and known and writes_plays(tokenizer, config) else ""


def with_gaps(text, sign):
    """(a text with two of its words as gaps, its first two words), or None if it is too short."""
    words = [match.span() for match in re.finditer(r"\S+", text)][:-1]  # the last may be cut off
    if len(words) < 4 or "[" in text:  # which may begin a gap
        return None
    begun = text[: words[1][1]]
    text = text[: words[-1][1]]
    for start, end in (words[2 * len(words) // 3], words[len(words) // 3]):
        text = text[:start] + sign * (end - start) + text[end:]
    return text, begun


def examples(tokenizer, config, sign, can, own=""):
    """Return the examples that the model has the characters for, as dicts of label, text and what
    is done with it ("write", "rank" or "fix"). The first that is not empty is in the field at once.

    sign: what is typed for a mask
    can: what the page does: "fill" gaps, "match" patterns, fill "open" gaps of unknown length,
        "begin" texts, "fix" mistakes
    own: a text that the model wrote, of which to make examples if it did not learn from Shakespeare
    """
    is_play = writes_plays(tokenizer, config)
    gapped, begun = with_gaps(own.strip()[:MOST_OWN], sign) or ("", "")
    begun = "ROMEO:\n" if is_play else begun
    label = " ".join(begun.split())[:20]
    rows = [
        ("fill", "fill gaps", passage(tokenizer, config, sign) or gapped, "write"),
        ("open", "fill a gap of any length", "To be, or [___] to be", "rank"),
        ("begin", f"write a {'scene' if is_play else 'text'}", None, "write"),
        ("begin", f"go on from \u201c{label}\u201d", begun, "write"),
        ("match", "a gap that must match", "My name is [___:[A-Z][a-z]+].", "rank"),
        ("fix", "proofread", MISTAKES, "fix"),
    ]
    gaps = re.compile(rf"\[___.*\]|{re.escape(sign)}")
    return [
        dict(label=label, text=text or "", what=what)
        for need, label, text, what in rows
        if need in can and text != "" and is_known(tokenizer, gaps.sub("", text or ""))
    ]
