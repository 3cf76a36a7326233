"""Nothing trusted: checkpoints, data, texts and servers that lie. One sentence, bounded memory, no pickle."""

import contextlib
import functools
import http.server
import json
import os
import pickle
import random
import resource
import shutil
import socketserver
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, read_log, run_mdlm

import common
import kernels
import mdlm
import text
from common import Refusal

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Measuring what the machine can do takes longer than such a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "peak_flops", lambda device, dtype: 1e11)
        yield


@pytest.fixture(scope="module")
def original(pydoc, tmp_path_factory):
    """A run with step-2 and step-4."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "t.txt").write_text(pydoc[:6000])
    flags = [f"--data={folder / 't.txt'}", *TINY, "--max_steps=4", "--eval_interval=2", "--eval_windows=2"]
    assert run_mdlm(*flags, f"--out_dir={folder / 'o'}") == 0
    return folder / "o"


@pytest.fixture
def run(original, tmp_path):
    """A copy of that run, to be spoiled."""
    shutil.copytree(original, tmp_path / "o")
    return tmp_path / "o"


def sign(folder):
    """Make the manifest fit the files, as whoever forges a checkpoint would."""
    files = {
        name: dict(size=(folder / name).stat().st_size, sha256=common.sha256_of(folder / name))
        for name in common.CHECKPOINT_FILES
    }
    (folder / "manifest.json").write_text(json.dumps(dict(format="mdlm", version=1, files=files)))


def resume(folder):
    """What --resume does with a checkpoint: a model, averages and optimizers that have taken it in."""
    config = common.read_fields(mdlm.Config, folder / "config.json", mdlm.check)
    tokenizer = text.tokenizer_from_json(folder / "tokenizer.json")
    if (config.n_embd, config.n_layer, tokenizer.vocab_size) > (64, 4, 200):
        return None  # training would take what the config asks for; load() must not
    model = mdlm.Model(config, tokenizer.vocab_size, kernels.select("torch", CPU))
    ema = [p.detach().clone() for p in model.parameters()] if config.ema else None
    return mdlm.restore(folder, model, ema, mdlm.make_optimizers(model, config, CPU))


def weights_of(model):
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextlib.contextmanager
def bounded(seconds=20, megabytes=400):
    began, before = time.monotonic(), peak_mb()
    yield
    assert time.monotonic() - began < seconds and peak_mb() - before < megabytes


# ------------------------------------------------------------------------------------------------------------
# Fuzzing

NASTY = [None, True, -1, 0, 1.5, 10**30, float("inf"), float("nan"), "", "x" * 10_000, "../../etc/passwd"]
NASTY += ["\ud800", [], {}, [1, "a"], {"a": None}, functools.reduce(lambda x, _: [x], range(500), 1)]


def spoil_bytes(content, r):
    """Cut the content off, flip bits, or write over a part of it."""
    content, kind = bytearray(content), r.randrange(3)
    if kind == 0 or not content:
        return bytes(content[: r.randrange(len(content) + 1)])
    if kind == 1:
        for _ in range(r.randint(1, 8)):
            content[r.randrange(len(content))] ^= 1 << r.randrange(8)
        return bytes(content)
    i = r.randrange(len(content))
    return bytes(content[:i] + r.randbytes(r.randint(1, 64)) + content[i + 16 :])


def spoil_json(content, r):
    """Put something nasty in the place of a value, remove a key or add one."""
    d = at = json.loads(content)
    while isinstance(at.get(k := r.choice(sorted(at))), dict) and at[k] and r.random() < 0.9:
        at = at[k]
    action = r.randrange(4)
    if action == 0:
        del at[k]
    elif action == 1:
        at["surplus"] = r.choice(NASTY)
    else:
        at[k] = r.choice(NASTY)
    return json.dumps(d).encode()


def spoil(path, r):
    content = path.read_bytes()
    deep = path.suffix == ".json" and r.random() < 0.6
    try:
        json.loads(content if deep else b"?")
    except ValueError:  # also a file that was spoiled before, and is JSON no more
        deep = False
    path.write_bytes((spoil_json if deep else spoil_bytes)(content, r))


def fuzz_damage(original, folder, cases):
    """Damage: what loads is one of the two checkpoints to the bit, or nothing; never another model."""
    known = {weights_of(mdlm.load(original / f"step-{n}")[0]): n for n in (2, 4)}
    count, r = {2: 0, 4: 0, "refused": 0}, random.Random(1)
    for case in range(cases):
        out = folder / "case"
        shutil.copytree(original, out)
        for _ in range(1 + (case % 3 == 0)):  # sometimes both
            step = out / r.choice(["step-2", "step-4", "step-4"])
            spoil(r.choice([out / "latest", *sorted(step.iterdir())]), r)
        try:
            model, _, config = mdlm.load(out)
            assert (config.n_embd, config.n_layer) == (32, 2)
            count[known[weights_of(model)]] += 1
        except Refusal:
            count["refused"] += 1
        shutil.rmtree(out)
    return count


def fuzz_forgery(original, folder, cases):
    """Forgery: the checksums fit what was spoiled. A refusal, or a model and a state of the right make."""
    count, r = dict(loaded=0, resumed=0, refused=0), random.Random(2)
    for case in range(cases):
        step = folder / "case" / "step-4"
        shutil.copytree(original / "step-4", step)
        spoil(step / common.CHECKPOINT_FILES[case % 5], r)
        sign(step)
        for key, do in (("loaded", lambda: mdlm.load(step)), ("resumed", lambda: resume(step))):  # noqa: B023
            try:
                result = do()
                count[key] += 1
            except Refusal:
                count["refused"] += 1
                continue
            if key == "loaded":
                model, tokenizer, config = result
                x = torch.full((1, min(config.block_size, 32)), model.mask_id)
                assert model(x).shape[-1] == tokenizer.vocab_size == model.mask_id
                tokenizer.decode(range(tokenizer.vocab_size)).encode()
        shutil.rmtree(folder / "case")
    return count


def fuzz_data(original, folder, cases):
    """A data folder: a refusal, or windows whose ids are all below V."""
    count, r = dict(read=0, refused=0), random.Random(3)
    config = mdlm.Config(block_size=32)
    for _ in range(cases):
        shutil.copytree(original / "data", folder / "case")
        spoil(r.choice(sorted((folder / "case").iterdir())), r)
        try:
            corpus = mdlm.Corpus(folder / "case", config, CPU)
            for x in (corpus.windows(8), corpus.batch(torch.arange(8))):
                assert x.min() >= 0 and x.max() < corpus.tokenizer.vocab_size and x.shape[1] == 32
            count["read"] += 1
        except Refusal:
            count["refused"] += 1
        shutil.rmtree(folder / "case")
    return count


def fuzz(original, folder, cases):
    with bounded(seconds=cases):
        damage = fuzz_damage(original, folder, cases // 3)
        forgery = fuzz_forgery(original, folder, cases // 3)
        data = fuzz_data(original, folder, cases // 3)
    print(f"damage {damage}, forgery {forgery}, data {data}")
    assert min(damage[2], damage[4], damage["refused"], forgery["refused"], data["refused"]) > cases // 100


def test_three_hundred_spoiled_inputs_give_a_refusal_or_the_right_model(original, tmp_path):
    fuzz(original, tmp_path, 300)


@pytest.mark.slow
def test_two_thousand_spoiled_inputs_give_a_refusal_or_the_right_model(original, tmp_path):
    fuzz(original, tmp_path, 2001)


# ------------------------------------------------------------------------------------------------------------
# Malice


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_no_pickle_is_ever_loaded(run, tmp_path, capsys):
    marker, seen = tmp_path / "executed", []
    sys.addaudithook(lambda event, args: seen.append(args) if event == "pickle.find_class" else None)
    payload = pickle.dumps(Payload(marker))
    with contextlib.suppress(FileExistsError):
        pickle.loads(payload)  # the payload works, and the hook sees it
    assert marker.exists() and seen
    marker.rmdir()
    seen.clear()
    for name in common.CHECKPOINT_FILES:
        kept = (run / "step-4" / name).read_bytes()
        (run / "step-4" / name).write_bytes(payload)
        sign(run / "step-4")
        with pytest.raises(Refusal):
            mdlm.load(run / "step-4")
            resume(run / "step-4")
        (run / "step-4" / name).write_bytes(kept)
    sign(run / "step-4")
    for folder in (run / "step-4", run / "data"):
        for name in ("meta.pkl", "pytorch_model.bin", "ckpt.pt", "data.pkl"):  # nanoGPT's data have meta.pkl
            (folder / name).write_bytes(payload)
    mdlm.load(run)
    assert run_mdlm("--resume", f"--out_dir={run}", "--max_steps=5") == 0
    assert run_mdlm(f"--data={run / 'data'}", *TINY, "--max_steps=1", f"--out_dir={tmp_path / 'p'}") == 0
    assert not marker.exists() and not seen


def safetensors_file(header, data=b"", length=None):
    header = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(header) if length is None else length) + header + data


F32 = lambda shape, offsets: {"head.weight": dict(dtype="F32", shape=shape, data_offsets=offsets)}


@pytest.mark.parametrize(
    "content",
    [
        safetensors_file(b"{}", length=(1 << 64) - 1),
        safetensors_file(b"{}", length=1 << 40),
        safetensors_file(b"", length=0),
        safetensors_file(b" " * 50 + b"{" * 50),
        safetensors_file(F32([1 << 40, 32], [0, 1 << 47])),
        safetensors_file(F32([1 << 62, 1 << 62], [0, 16]), bytes(16)),
        safetensors_file(F32([-1, 4], [0, 16]), bytes(16)),
        safetensors_file(F32([4], [16, 0]), bytes(16)),
        safetensors_file(F32([4], [0, 16]) | {"embed.weight": F32([4], [0, 16])["head.weight"]}, bytes(16)),
        safetensors_file({"head.weight": dict(dtype="O", shape=[2], data_offsets=[0, 16])}, bytes(16)),
        safetensors_file({f"t{i}": dict(dtype="F32", shape=[0], data_offsets=[0, 0]) for i in range(20_000)}),
        b"",
        b"\x80\x04" + bytes(100),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors"])
def test_a_safetensors_file_that_lies_is_refused(run, name, content):
    (run / "step-4" / name).write_bytes(content)
    sign(run / "step-4")
    with bounded(seconds=10), pytest.raises(Refusal, match=name):
        (mdlm.load if name.startswith("model") else resume)(run / "step-4")


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(n_layer=10**9), "n_layer"),
        (dict(n_layer=1024, n_embd=1 << 16, n_head=1024), "does not fit"),
        (dict(block_size=8192, pos="learned"), "does not fit"),
        (dict(n_embd=-32), "n_embd"),
        (dict(n_embd=32.0), "n_embd"),
        (dict(n_embd=[32]), "n_embd"),
        (dict(n_layer=True), "n_layer"),
        (dict(dropout=float("nan")), "dropout"),
        (dict(learning_rate=float("inf")), "learning_rate"),
        (dict(objective="x" * 10**6), "objective"),
        (dict(pos=None), "pos"),
        (dict(__class__="os"), "__class__"),
    ],
)
def test_a_config_that_lies_is_refused(run, changes, word):
    path = run / "step-4" / "config.json"
    d = json.loads(path.read_text())
    d["config"] |= changes
    path.write_text(json.dumps(d))
    sign(run / "step-4")
    with bounded(seconds=10), pytest.raises(Refusal, match=word) as refusal:
        mdlm.load(run / "step-4")
    assert len(str(refusal.value)) < 400


def bpe_json(**changes):
    made = text.build_tokenizer("bpe", 300, False, lambda: [("some words to merge " * 50, False)], 1000)
    return json.loads(made.to_json()) | {"vocab": json.dumps(json.loads(made.vocab) | changes)}


@pytest.mark.parametrize(
    "content",
    [
        lambda: json.loads(bpe_json()["vocab"]),  # a file of the tokenizers library itself
        lambda: bpe_json(normalizer={"type": "Lowercase"}),  # loses what a model is trained to give back
        lambda: bpe_json(pre_tokenizer=None),
        lambda: bpe_json(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
        lambda: bpe_json(model={"type": "BPE", "vocab": {"a": 0, "b": 1 << 30}, "merges": []}),
        lambda: dict(format="mdlm-tokenizer", version=1, kind="id", vocab=1 << 40, end=False),
        lambda: dict(format="mdlm-tokenizer", version=1, kind="char", vocab=["a", "ab"], end=False),
        lambda: dict(format="mdlm-tokenizer", version=1, kind="char", vocab=["a", "a"], end=False),
        lambda: dict(format="mdlm-tokenizer", version=1, kind="word", vocab=["\ud800"], end=False),
        lambda: dict(format="mdlm-tokenizer", version=1, kind="byte", vocab=None, end=1),
        lambda: dict(format="mdlm-tokenizer", version=1, kind=["char"], vocab=["a"], end=False),
        lambda: {"added_tokens": [], "model": {"type": "Unigram", "vocab": [["a", 0.0]]}},
        lambda: [1, 2, 3],
    ],
)
def test_a_tokenizer_from_elsewhere_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content()))
    with pytest.raises(Refusal, match=r"tokenizer\.json"):
        text.tokenizer_from_json(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "train, meta, word",
    [
        (bytes(201), None, "cut off within an id"),
        (np.full(200, 299, np.uint16).tobytes(), None, "299"),
        (np.full(200, -5, np.int32).tobytes(), dict(dtype="int32"), "-5"),
        (bytes(200), dict(dtype="O"), "meta.json"),
        (bytes(200), dict(dtype=["uint8"]), "meta.json"),
        (bytes(200), dict(characters="ab"), "meta.json"),
        (bytes(200), dict(characters=[1, "2"]), "meta.json"),
        (bytes(200), dict(characters=7), "meta.json"),
        (bytes(200), dict(entropy="low"), "meta.json"),
        (b"", None, "longer than"),
    ],
)
def test_a_data_folder_that_lies_is_refused(tmp_path, train, meta, word):
    (tmp_path / "train.bin").write_bytes(train)
    (tmp_path / "val.bin").write_bytes(bytes(200))
    if meta:
        (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(Refusal, match=word):
        mdlm.Corpus(tmp_path, mdlm.Config(block_size=32, vocab_size=256), CPU)


@pytest.mark.parametrize(
    "latest", [b"../../x", b"/etc", b"step-4/../../x", b"\xff\xfe\x00", b"step-99", b"", b"step-2\n", 1 << 40]
)
def test_latest_leads_nowhere_but_to_a_checkpoint_of_the_run(run, tmp_path, latest):
    shutil.copytree(run / "step-2", tmp_path / "x")
    if isinstance(latest, int):
        os.truncate(run / "latest", latest)  # a file of a terabyte, full of holes
    else:
        (run / "latest").write_bytes(latest)
    with bounded(seconds=5):
        assert common.find_checkpoint(run).name == ("step-2" if latest == b"step-2\n" else "step-4")


def test_a_link_is_removed_and_what_it_points_to_stays(run, tmp_path):
    shutil.copytree(run / "step-4", tmp_path / "precious")
    for link in ("step-1", ".mdlm-tmp-stale"):
        (run / link).symlink_to(tmp_path / "precious")
    os.mkfifo(run / "step-0")
    assert run_mdlm("--resume", f"--out_dir={run}", "--max_steps=5") == 0
    assert sorted(p.name for p in common.checkpoints(run)) == ["step-4", "step-5"]
    assert len(list((tmp_path / "precious").iterdir())) == 6 and not (run / ".mdlm-tmp-stale").is_symlink()


def test_json_without_end_is_refused_unread(run):
    contents = {"config.json": None, "tokenizer.json": b"[" * 10**6, "state.json": b"9" * 10**5}
    for name, content in contents.items():
        kept = (run / "step-4" / name).read_bytes()
        if content is None:
            os.truncate(run / "step-4" / name, 1 << 40)
            files = {n: dict(size=1 << 40, sha256="") for n in common.CHECKPOINT_FILES}
            manifest = dict(format="mdlm", version=1, files=files)
            (run / "step-4" / "manifest.json").write_text(json.dumps(manifest))
        else:
            (run / "step-4" / name).write_bytes(content)
            sign(run / "step-4")
        with bounded(seconds=5), pytest.raises(Refusal, match=name):
            mdlm.load(run / "step-4")
            resume(run / "step-4")
        (run / "step-4" / name).write_bytes(kept)


# ------------------------------------------------------------------------------------------------------------
# Text

GREEK, HEBREW, ARABIC = "αβγ δεζ", "שלום עולם", "\u202eمرحبا بالعالم\u202c"


@pytest.mark.parametrize(
    "content",
    [
        "\ufeffwith a byte order mark ".encode() * 20,
        b"line\r\nline\rline\n" * 40,
        b"\x00" * 300 + b"NUL \x00\x01\x02\x7f" * 40,
        "👩‍👩‍👧‍👦 🏳️‍🌈 é é ".encode() * 40,
        f"{HEBREW} {ARABIC} {GREEK}\n".encode() * 40,
        b"a" * 1000,
        b"\n" * 1000,
        b"one line without an end" * 50,
    ],
)
def test_any_text_is_learned_as_it_is(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    flags = [f"--data={tmp_path / 't'}", *TINY, "--max_steps=2", f"--out_dir={tmp_path / 'o'}"]
    assert run_mdlm(*flags) == 0
    wanted = content.decode("utf-8-sig")
    _, tokenizer, config = mdlm.load(tmp_path / "o")
    corpus = mdlm.Corpus(tmp_path / "o" / "data", config, CPU)
    assert tokenizer.decode(corpus.train.tolist()) + tokenizer.decode(corpus.val.tolist()) == wanted
    value = read_log(tmp_path / "o")[-1]["val_nelbo"]
    assert value == pytest.approx(np.log(len(set(wanted))), abs=0.3), "two steps from uniform"


@pytest.mark.parametrize(
    "content, words",
    [
        (b"good " * 100 + b"\xff bad", ["not UTF-8", "byte 500"]),
        (b"\xc0\x80" * 200, ["not UTF-8", "byte 0"]),  # an overlong NUL
        (b"\xed\xa0\x80" * 200, ["not UTF-8"]),  # a lone surrogate
        (("text " * 100).encode("utf-16"), ["not UTF-8", "iconv"]),
        (b"\xef\xbb\xbf", ["empty"]),
        (b"", ["empty"]),
        (b"a", ["longer than", "0 tokens"]),
        (b"twenty characters...", ["longer than", "more text"]),
    ],
)
def test_a_text_that_cannot_be_learned_gets_one_sentence(tmp_path, capsys, content, words):
    (tmp_path / "t").write_bytes(content)
    assert run_mdlm(f"--data={tmp_path / 't'}", *TINY, f"--out_dir={tmp_path / 'o'}") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said
    assert not (tmp_path / "o").exists(), "nothing is left over"


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokenizer, unit", [("char", b"words in a line that never ends "), ("word", b"x"), ("bpe", b"x")]
)
def test_one_line_of_100_mb_is_learned_in_bounded_memory(tmp_path, tokenizer, unit):
    (tmp_path / "t").write_bytes(unit * (100_000_000 // len(unit)))
    program = (
        "import resource, subprocess, sys; r = subprocess.run([sys.executable] + sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r.returncode)"
    )
    flags = [f"--data={tmp_path / 't'}", *TINY, f"--tokenizer={tokenizer}", "--vocab_size=400"]
    flags += ["--max_steps=2", f"--out_dir={tmp_path / 'o'}"]
    command = [sys.executable, "-c", program, str(ROOT / "mdlm.py"), *flags]
    r = subprocess.run(command, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    peak = int(r.stdout.split()[-1]) / 1e6  # kB -> GB
    print(f"{tokenizer}: peak resident memory {peak:.2f} GB")
    assert peak < 3


# ------------------------------------------------------------------------------------------------------------
# Download

CONTENT = b"what was asked for\n" * 5000
SHA256 = common.hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.BaseHTTPRequestHandler):
    """The path says how it behaves."""

    log_message = lambda *args: None

    def do_GET(self):
        with contextlib.suppress(OSError):
            getattr(self, self.path[1:])()

    def head(self, length, status=200, **more):
        self.send_response(status)
        for key, value in {"Content-Length": length, **more}.items():
            self.send_header(key, str(value))
        self.end_headers()

    def good(self):
        self.head(len(CONTENT))
        for i in range(0, len(CONTENT), 10_000):  # so that downloads at the same time overlap
            self.wfile.write(CONTENT[i : i + 10_000])
            time.sleep(0.01)

    def wrong(self):
        self.head(len(CONTENT))
        self.wfile.write(CONTENT[:-1] + b"?")

    def interrupted(self):
        self.head(len(CONTENT))
        self.wfile.write(CONTENT[:30_000])

    def silent(self):
        time.sleep(5)

    def hangs(self):
        self.head(len(CONTENT))
        self.wfile.write(CONTENT[:30_000])
        self.wfile.flush()
        time.sleep(5)

    def drips(self):  # every byte comes in time, the end never does
        for byte in b"HTTP/1.0 200 OK\r\nX: " + b"x" * 60:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            time.sleep(0.1)

    def endless(self):
        self.head(1 << 40)
        while True:
            self.wfile.write(bytes(1 << 16))

    def missing(self):
        self.send_error(404)

    def elsewhere(self):
        self.head(0, 302, Location="file:///etc/passwd")

    def babble(self):
        self.wfile.write(b"\x00\xff not HTTP at all\r\n\r\n")


@pytest.fixture(scope="module")
def server():
    class Threads(socketserver.ThreadingMixIn, http.server.HTTPServer):
        daemon_threads = True

    with Threads(("127.0.0.1", 0), Server) as s:
        threading.Thread(target=s.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{s.server_address[1]}"
        s.shutdown()


FAILURES = ["wrong", "interrupted", "silent", "hangs", "drips", "endless", "missing", "elsewhere", "babble"]


@pytest.mark.parametrize("behaviour", FAILURES)
@pytest.mark.parametrize("before", [None, b"a damaged cache"])
def test_a_download_that_fails_leaves_no_file(server, tmp_path, behaviour, before):
    path = tmp_path / "cache" / "file"
    if before:
        path.parent.mkdir()
        path.write_bytes(before)
    with bounded(seconds=2, megabytes=50), pytest.raises(OSError):
        common.download(f"{server}/{behaviour}", SHA256, path, timeout=1.0)
    assert (path.read_bytes() == before) if before else not path.exists()
    common.download(f"{server}/good", SHA256, path, timeout=10)
    assert path.read_bytes() == CONTENT and [p.name for p in path.parent.iterdir()] == ["file"]
    common.download(f"{server}/missing", SHA256, path)  # not asked again


def test_processes_that_download_at_once_all_get_the_whole_file(server, tmp_path):
    path = tmp_path / "cache" / "file"
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import common; from pathlib import Path\n"
        f"common.download('{server}/good', '{SHA256}', Path({str(path)!r}))\n"
        f"assert common.sha256_of({str(path)!r}) == '{SHA256}'"
    )
    started = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(4)]
    while any(p.poll() is None for p in started):  # whoever looks in between sees nothing or all of it
        with contextlib.suppress(FileNotFoundError):
            assert path.read_bytes() == CONTENT
        time.sleep(0.002)
    assert [p.returncode for p in started] == [0] * 4
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_run_takes_a_damaged_cache_for_none(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(text, "SHAKESPEARE_URL", f"{server}/good")
    monkeypatch.setattr(text, "SHAKESPEARE_SHA256", SHA256)
    cache = tmp_path / "mdlm" / "tinyshakespeare.txt"
    cache.parent.mkdir()
    cache.write_bytes(CONTENT[:-500])
    assert "".join(text.find_text("shakespeare")()) == CONTENT.decode()
    assert Path(cache).read_bytes() == CONTENT and capsys.readouterr().err == ""
