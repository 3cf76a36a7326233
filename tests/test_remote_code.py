"""Code that comes with a network runs when it is trusted on that command line, and never else."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, run_mdlm, sign, tiers
from test_pretrained import (
    assert_resumes,
    flags_of,
    make_tokenizer,
    random_ids,
    set_in,
    some_text,
    view_of,
)

import bench
import eval
import export
import mdlm
import sample
import serve
from nanomdlm.support.cli import entry
from nanomdlm.support.errors import UserError
from nanomdlm.support.networks import remote_code
from nanomdlm.support.run import checkpoint

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
some_text = some_text  # a fixture
TRUST = "--trust_remote_code"
CONFIGURATION = """
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "tiny"

    def __init__(self, hidden_size=32, num_hidden_layers=2, max_position_embeddings=64, **more):
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = 2
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**more)
"""
MODELING = """
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from .configuration_tiny import TinyConfig

if "TINY_RAN" in os.environ:  # of a test: says that this code has run
    open(os.environ["TINY_RAN"], "a").write("x")


class Layer(nn.Module):
    def __init__(self, C):
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.qkv = nn.Linear(C, 3 * C)
        self.proj = nn.Linear(C, C)
        mlp = nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C)
        self.mlp = nn.Sequential(nn.LayerNorm(C), *mlp)

    def forward(self, x, mask, causal):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm(x)).view(B, T, 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(x)


class TinyForMaskedLM(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "tiny"
    _supports_sdpa = True
    causal = False

    def __init__(self, config):
        super().__init__(config)
        C = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, C)
        self.at = nn.Embedding(config.max_position_embeddings, C)
        self.layers = nn.ModuleList(Layer(C) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(C, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, value):
        self.embed = value

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **more
    ):
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        x = x + self.at(position_ids)
        mask = attention_mask
        if mask is not None and mask.dim() == 2:
            mask = None
        if IGNORES:
            mask = None
        for layer in self.layers:
            x = layer(x, mask, self.causal and getattr(self.config, "is_causal", True))
        return MaskedLMOutput(logits=self.lm_head(x))


class TinyForCausalLM(TinyForMaskedLM, GenerationMixin):
    causal = True
"""
KINDS = {"masked": "TinyForMaskedLM", "causal": "TinyForCausalLM", "auto": "TinyForMaskedLM"}
AUTO = {"masked": "AutoModelForMaskedLM", "causal": "AutoModelForCausalLM", "auto": "AutoModel"}


@pytest.fixture(scope="module")
def folder_of(pydoc, tmp_path_factory):
    """A function: kind -> a folder of such a network with its code; not to be changed."""
    at = tmp_path_factory.mktemp("remote")

    def folder(kind, ignores=False):
        path = at / f"{kind}-{ignores}"
        if path.exists():
            return path
        path.mkdir()
        tokenizer = make_tokenizer(pydoc[:20_000], kind != "causal")
        tokenizer.save(str(path / "tokenizer.json"))
        (path / "configuration_tiny.py").write_text(CONFIGURATION)
        (path / "modeling_tiny.py").write_text(f"IGNORES = {ignores}\n{MODELING}")
        auto_map = {
            "AutoConfig": "configuration_tiny.TinyConfig",
            AUTO[kind]: f"modeling_tiny.{KINDS[kind]}",
        }
        settings = dict(model_type="tiny", architectures=[KINDS[kind]], auto_map=auto_map)
        settings |= dict(vocab_size=tokenizer.get_vocab_size(), hidden_size=32)
        (path / "config.json").write_text(json.dumps(settings))
        code = remote_code.Code({p.name: p.read_bytes() for p in sorted(path.glob("*.py"))})
        config = code.find(auto_map["AutoConfig"])(**settings)
        torch.manual_seed(0)
        network = code.find(auto_map[AUTO[kind]])(config)
        with torch.no_grad():
            for p in network.parameters():
                if p.dim() == 2:
                    p.normal_(0, 0.2)
        weights = {name: p.detach().clone() for name, p in network.named_parameters()}
        from safetensors.torch import save_file

        save_file(weights, path / "model.safetensors", dict(format="pt"))
        return path

    return folder


@pytest.fixture(scope="module")
def runs(folder_of, some_text, tmp_path_factory):
    """A function: kind -> a run of three steps of such a network; not to be changed."""
    at = tmp_path_factory.mktemp("runs")

    def run(kind):
        if not (at / kind).exists():
            argv = flags_of(folder_of(kind), some_text, at / kind, TRUST, "--max_steps=3")
            assert run_mdlm(*argv) == 0
        return at / kind

    return run


@pytest.mark.parametrize("kind", tiers(["masked", "causal", "auto"], ["masked"]))
def test_trusted_code_trains_resumes_samples_and_leaves(
    kind, folder_of, runs, some_text, tmp_path, monkeypatch
):
    whole = runs(kind)
    argv = flags_of(folder_of(kind), some_text, tmp_path / "cut", TRUST, "--max_steps=3")
    assert_resumes(argv, whole, monkeypatch, TRUST)
    newest = checkpoint.find_checkpoint(whole)
    manifest = json.loads((newest / "manifest.json").read_text())
    for name in ("configuration_tiny.py", "modeling_tiny.py"):
        assert name in manifest["files"]
        assert (newest / name).read_bytes() == (folder_of(kind) / name).read_bytes()
    out = f"--out_dir={whole}"
    argv = [out, TRUST, "--infill", "the [___] of", f"--json={tmp_path / 'written'}"]
    assert entry.run(sample.main, argv) == 0
    assert entry.run(eval.main, [out, TRUST, "--windows=4", "--pictures=none"]) == 0
    assert entry.run(export.main, [out, TRUST, f"--dest={tmp_path / 'hf'}"]) == 0
    quick = ["--num_samples=2", "--seeds=1"]
    assert entry.run(bench.main, ["sample", out, TRUST, *quick]) == 0
    model, _, config = mdlm.load(whole, trust_remote_code=True)
    assert config.shift == (kind == "causal")
    model.config.shift = False
    ids = random_ids(model, 2, 12)
    ids[:, ::3] = model.mask_id
    with torch.no_grad():
        torch.save((ids, model(view_of(ids))), tmp_path / "wanted")
    assert (tmp_path / "hf" / "modeling_tiny.py").exists()
    if kind != "masked":  # takes long
        in_another_process(AUTO[kind], tmp_path)
    again = flags_of(tmp_path / "hf", some_text, tmp_path / "again", TRUST, "--max_steps=1")
    assert run_mdlm(*again) == 0
    assert mdlm.load(tmp_path / "again", trust_remote_code=True)[0].mask_id == model.mask_id


NATIVE = """
import sys, torch, transformers
ids, wanted = torch.load("wanted")
auto = getattr(transformers, sys.argv[1])
theirs = auto.from_pretrained("hf", trust_remote_code=True).eval()
with torch.no_grad():
    found = theirs(input_ids=ids).logits[..., : wanted.shape[-1]]
known = wanted[0, 0] > -float("inf")
assert torch.allclose(found[..., known], wanted[..., known], atol=1e-5, rtol=1e-5)
words = transformers.AutoTokenizer.from_pretrained("hf", trust_remote_code=True)
assert words.mask_token_id == int(ids[0, 0])
"""


def in_another_process(auto, folder):
    """The export in `folder` is loaded by transformers alone, and has the logits that it had."""
    more = dict(HF_HOME=str(folder / "cache"), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-I", "-c", NATIVE, auto]
    r = subprocess.run(command, cwd=folder, env=os.environ | more, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr[-3000:]


# ---- Without a word it never runs
def of_run(program, *more):
    return lambda run, folder, tmp: entry.run(program, [f"--out_dir={run}", *more])


def of_mdlm(*flags):
    def command(run, folder, tmp):
        names = dict(run=run, folder=folder)
        (tmp / "text.txt").write_text("some words, " * 120)
        argv = flags_of("", tmp / "text.txt", tmp / "out", "--max_steps=1")
        argv = [flag for flag in argv if not flag.startswith("--init_from")]
        return run_mdlm(*argv, *(flag.format(**names) for flag in flags))

    return command


def resume(run, folder, tmp):
    shutil.copytree(run, tmp / "out")
    return run_mdlm("--resume", f"--out_dir={tmp / 'out'}", "--max_steps=4")


def in_python(run, folder, tmp):
    with pytest.raises(UserError, match="trust_remote_code=True") as error:
        mdlm.load(run)
    print(error.value, file=sys.stderr)
    return 2


COMMANDS = {
    "init_from a folder": of_mdlm("--init_from={folder}"),
    "init_from a run": of_mdlm("--init_from={run}"),
    "network": of_mdlm("--network={folder}/config.json", "--tokenizer={folder}/tokenizer.json"),
    "resume": resume,
    "sample": of_run(sample.main, "--infill=the [___] of"),
    "eval": of_run(eval.main, "--pictures=none"),
    "export": of_run(export.main, "--dest=hf"),
    "bench": lambda run, *_: entry.run(bench.main, ["sample", f"--out_dir={run}"]),
    "serve": of_run(serve.main, "--port=0"),
    "mdlm.load": in_python,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_code_does_not_run_unasked(name, folder_of, runs, tmp_path, capfd, monkeypatch):
    """Though the run was begun with the flag, and its config.json says that it is trusted."""
    folder = folder_of("masked")
    run = shutil.copytree(runs("masked"), tmp_path / "run")
    step = checkpoint.find_checkpoint(run)
    assert json.loads((step / "config.json").read_text())["config"]["trust_remote_code"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote_code.Code, "find", lambda *args: pytest.fail("it was run"))
    before = sorted(run.rglob("*"))
    capfd.readouterr()
    assert COMMANDS[name](run, folder, tmp_path) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert "configuration_tiny.py" in said[-1]
    assert "--trust_remote_code" in said[-1]
    assert sorted(run.rglob("*")) == before
    assert name == "resume" or not (tmp_path / "out").exists()
    assert not (tmp_path / "hf").exists()


def test_a_server_of_blocks_is_told_once(folder_of, some_text, tmp_path):
    """It opens the network a second time, to fill gaps."""
    for package in ("greenlet", "starlette", "uvicorn", "pydantic"):
        pytest.importorskip(package)
    argv = ["--block_length=4", "--infill_share=0.5", "--max_steps=1", TRUST]
    assert run_mdlm(*flags_of(folder_of("causal"), some_text, tmp_path / "run", *argv)) == 0
    options = serve.Options(out_dir=str(tmp_path / "run"), trust_remote_code=True)
    writer, *_ = serve.load(options)
    assert writer.filler.mask_id == writer.model.mask_id


@pytest.mark.slow
def test_no_process_runs_code_unasked(runs, tmp_path, monkeypatch):
    """In processes of their own: what the library does of itself counts too."""
    out = runs("masked")
    monkeypatch.setenv("TINY_RAN", str(tmp_path / "ran"))
    for flags, wanted in (([], 2), ([TRUST], 0)):
        argv = [f"--out_dir={out}", "--infill=the █", "--steps=1", *flags]
        r = subprocess.run([sys.executable, "sample.py", *argv], cwd=ROOT, capture_output=True)
        assert r.returncode == wanted, r.stderr
        assert (tmp_path / "ran").exists() == (wanted == 0)


def test_network_of_others_that_ignores_its_mask_is_refused(folder_of, some_text, tmp_path, capfd):
    argv = flags_of(folder_of("masked", True), some_text, tmp_path / "out", TRUST)
    assert run_mdlm(*argv) == 2
    assert "'tiny'" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def changed(name, *, add=b"", remove=False):
    def change(folder):
        path = folder / name
        path.unlink() if remove else path.write_bytes(path.read_bytes() + add)

    return change


def of_a_hub(folder):
    text = (
        (folder / "config.json").read_text().replace("modeling_tiny.", "some/repo--modeling_tiny.")
    )
    (folder / "config.json").write_text(text)


def of_another_folder(folder):
    (folder.parent / "modeling_tiny.py").write_text(f"IGNORES = False\n{MODELING}")
    text = (folder / "config.json").read_text()
    name = str(folder.parent / "modeling_tiny")
    (folder / "config.json").write_text(text.replace("modeling_tiny.", f"{name}."))


@pytest.mark.parametrize(
    "change, words",
    [
        (changed("modeling_tiny.py", remove=True), "modeling_tiny.py"),
        (changed("modeling_tiny.py", add=b"\nimport nonesuch\n"), "No module named 'nonesuch'"),
        (changed("modeling_tiny.py", add=b"\n1 +\n"), "invalid syntax"),
        (of_a_hub, "some/repo"),
        (of_another_folder, ""),
    ],
)
def test_unfit_code_is_one_sentence(change, words, folder_of, some_text, tmp_path, capfd):
    folder = shutil.copytree(folder_of("masked"), tmp_path / "hf")
    change(folder)
    assert run_mdlm(*flags_of(folder, some_text, tmp_path / "out", TRUST)) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert words in said[-1] and "Traceback" not in "".join(said), said
    assert not (tmp_path / "out").exists()


def test_code_of_a_checkpoint_is_what_it_was(runs, tmp_path):
    """It is a part of the checkpoint, by its sum; names of other folders are refused."""
    folder = shutil.copytree(checkpoint.find_checkpoint(runs("masked")), tmp_path / "step-3")
    changed("modeling_tiny.py", add=b"\n")(folder)
    with pytest.raises(UserError, match=r"modeling_tiny\.py"):
        mdlm.load(folder, trust_remote_code=True)
    set_in("network.json", code=["../modeling_tiny.py"])(folder)
    sign(folder)
    with pytest.raises(UserError, match="modeling_tiny"):
        mdlm.load(folder, kernel="torch", trust_remote_code=True)
