"""An exported model is the same model, in other programs."""

import dataclasses
import json
import random
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from conftest import ROOT, TINY, run_mdlm, tiers, tiny_flags
from safetensors.torch import load_file

import export
import mdlm
import sample
from nanomdlm.kernels import operations as kernels
from nanomdlm.support import abilities
from nanomdlm.support.cli import entry
from nanomdlm.support.data.tokenizer import Tokenizer, open_tokenizer, train_bpe
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import checkpoint

needs_trainer = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")),
    reason="no transformers with accelerate",
)
needs_transformers = pytest.mark.skipif(not find_spec("transformers"), reason="no transformers")
SMALL = dict(n_layer=2, n_head=2, n_embd=16, block_size=24, dropout=0.0, attention_every=2)


def save(out, tokenizer, lengths=slice(3, 9), count=5, **settings):
    """A run of a network whose weights are all random; lengths: of the texts that it learned."""
    config = mdlm.Config(**SMALL | settings)
    torch.manual_seed(0)
    model = mdlm.make_model(config, tokenizer.vocab_size, kernels.REFERENCES, tokenizer.end_id)
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    if abilities.knows_lengths(model):
        model.length_counts[lengths] = count
    contents = {
        "config.json": json.dumps(
            dict(format="mdlm", version=1, config=dataclasses.asdict(config))
        ),
        "tokenizer.json": tokenizer.to_json(),
    }
    contents = {name: text.encode() for name, text in contents.items()}
    out.mkdir()
    contents["model.safetensors"] = export.to_safetensors(model.state_dict())
    checkpoint.write_checkpoint(out, "step-1", contents)


def write(root, name, out, *flags):
    """Export a run, and beside it what the export must give."""
    assert entry.run(export.main, [f"--out_dir={out}", f"--dest={root / name}", *flags]) == 0
    model, tokenizer, config = mdlm.load(out, kernel="torch")
    g = torch.Generator().manual_seed(0)
    T = config.block_size
    wanted = []
    for n in (T, 7):
        x = torch.randint(model.mask_id + 1, (3, n), generator=g)
        seen = x
        if "--pad_to_context" in flags:
            seen = torch.nn.functional.pad(x, (0, T - n), value=model.objective.pad_id)
        with torch.no_grad():
            logits = model(seen)[:, :n]
        if config.objective == "ar":  # transformers: logits at i predict token i + 1
            x, logits = x[:, :-1], logits[:, 1:]
        wanted.append((x, logits))
    torch.save(wanted, root / f"{name}.pt")
    strings = texts_for(tokenizer)
    ids = [tokenizer.encode(text) for text in strings]
    decoded = [tokenizer.decode(i) for i in ids]
    about = dict(texts=strings, ids=ids, decoded=decoded, end=tokenizer.end_id)
    about["mask_id"] = model.mask_id
    if config.objective == "ar":
        about["continued"] = {
            prompt: greedily(model, tokenizer, prompt) for prompt in ("a", "the b", "of t")
        }
    (root / f"{name}.json").write_text(json.dumps(about))


def greedily(model, tokenizer, prompt, more=16):
    """The ids that mdlm writes after a prompt."""
    ids = tokenizer.encode(prompt)
    x = torch.tensor([ids + [model.mask_id] * more])
    return sample.generate(model, x, temperature=0)[0, len(ids) :].tolist()


def texts_for(tokenizer):
    """Real text, and 500 random strings of what a tokenizer takes."""
    r = random.Random(0)
    pool = [chr(i) for i in range(32, 127)] + list("\n\t\réüßçàñ漢字かな🙂▁Ġ²½१अक्षر\x00\x1c\u2028")
    real = "the end\nof a text"
    if tokenizer.kind == "char":
        pool = tokenizer.vocab
        real = "".join(tokenizer.vocab)
    if tokenizer.kind == "id":
        numbers = [str(i) for i in range(tokenizer.vocab) if i != tokenizer.end_id]
        return [" ".join(r.choices(numbers, k=r.randint(1, 30))) for _ in range(300)]
    return [real, *("".join(r.choices(pool, k=r.randint(1, 40))) for _ in range(500))]


@pytest.fixture(scope="module")
def library(pydoc, tmp_path_factory):
    """A file of the tokenizers library, with an end of text and padding of its own."""
    import tokenizers

    made = tokenizers.Tokenizer.from_str(train_bpe([pydoc[:20_000]], 300))
    made.add_special_tokens(["<|endoftext|>"])
    made.enable_padding(length=7)
    path = tmp_path_factory.mktemp("library") / "tokenizer.json"
    made.save(str(path))
    return path


def run_client(root, *program):
    """A program (default: tests/hf_client.py with root), isolated from this project."""
    program = program or (ROOT / "tests" / "hf_client.py", root)
    environment = dict(HF_HOME=str(root / "cache"), HF_HUB_OFFLINE="1", PATH="/usr/bin:/bin")
    environment |= dict(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    command = [sys.executable, "-I", *program]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


ARCHITECTURES = [  # every pair of two settings' values is there
    ("rope", False, 5, True),
    ("rope", True, 0, False),
    ("learned", False, 0, True),
    ("learned", True, 5, False),
    ("sinusoidal", False, 0, False),
    ("sinusoidal", True, 5, True),
]


def save_architectures(tmp_path, root):
    """Exports of every pair of settings, of documents, and of autoregressive models."""
    for pos, tie, conv, timed in ARCHITECTURES:
        out = tmp_path / f"{pos}-{tie}-{conv}"
        save(out, Tokenizer("byte"), pos=pos, tie=tie, conv=conv, time_conditioning=timed)
        write(root, out.name, out)
    save(tmp_path / "end", Tokenizer("byte", None, True), time_conditioning=True)
    write(root, "documents", tmp_path / "end")
    write(root, "padded", tmp_path / "rope-False-5", "--pad_to_context")
    for pos, tie, conv, _ in ARCHITECTURES[::2]:
        out = tmp_path / f"ar-{pos}"
        tokenizer = Tokenizer("byte", None, pos == "sinusoidal")  # its [END] is a token like others
        save(out, tokenizer, objective="ar", pos=pos, tie=not tie, conv=conv)
        write(root, out.name, out)


def save_tokenizers(tmp_path, root, pydoc, library):
    """Exports with every tokenizer, with and without [END]."""
    letters = sorted(set(pydoc[:5000]))
    words = [" the", "the", "a", ",", "\n", " of", "text", "é", "##", "▁a"]
    bpe = train_bpe([pydoc[:20_000]], 300)
    for end in (False, True):
        for kind, vocab in (("char", letters), ("word", words), ("bpe", bpe), ("id", 40)):
            out = tmp_path / f"{kind}-{end}"
            save(out, Tokenizer(kind, vocab, 7 if kind == "id" and end else end))
            write(root, out.name, out)
        out = tmp_path / f"file-{end}"
        save(out, open_tokenizer(library, end))
        write(root, out.name, out)


@needs_transformers
@pytest.mark.parametrize("what", tiers(["networks", "tokenizers"], ["networks"], ["tokenizers"]))
def test_transformers_gives_equal_logits_texts_and_ids(what, tmp_path, pydoc, library):
    """In a process of its own, without this project."""
    root = tmp_path / "exports"
    root.mkdir()
    if what == "networks":
        save_architectures(tmp_path, root)
    else:
        save_tokenizers(tmp_path, root, pydoc, library)
    r = run_client(root)
    assert r.returncode == 0, r.stderr[-3000:]
    assert r.stdout.count("fine:") == len(list(root.glob("*.pt"))) >= 10


def test_card_says_what_the_log_says(tmp_path, text_file, capsys):
    out = tmp_path / "out"
    assert run_mdlm(*TINY, f"--data={text_file}", "--max_steps=2", f"--out_dir={out}") == 0
    assert entry.run(export.main, [f"--out_dir={out}", f"--dest={tmp_path / 'my model'}"]) == 0
    card = (tmp_path / "my model" / "README.md").read_text()
    last = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()][-1]
    assert f"{last['val_nelbo']:.4f} +- {last['val_nelbo_se']:.4f}" in card
    assert str(text_file) in card and '"my model"' in card
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "my model" / name).stat().st_mode & 0o777 == 0o644


@needs_transformers
@pytest.mark.parametrize("objective", tiers(["mdlm", "ar"], ["mdlm"], ["ar"]))
def test_code_of_the_card_runs(tmp_path, objective):
    # Documents as long as the context.
    save(tmp_path / "out", Tokenizer("byte", None, True), lengths=-1, objective=objective)
    assert (
        entry.run(export.main, [f"--out_dir={tmp_path / 'out'}", f"--dest={tmp_path / 'm'}"]) == 0
    )
    code = (tmp_path / "m" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    r = run_client(tmp_path, "-c", code)
    assert r.returncode == 0 and r.stdout.strip(), r.stderr[-2000:]


def logits_of_weights(out, folder, x):
    """Logits for x (B, T) of the network of a run, with the weights of a Hugging Face folder."""
    model, *_ = mdlm.load(out, kernel="torch")
    weights = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[f"model.{name}"][: len(p)])
        return model(model.objective.view(x))


@needs_trainer
@pytest.mark.parametrize("tie", tiers([False, True], [False], [True]))
def test_code_of_the_docs_tunes_with_the_trainer(tie, tmp_path):
    """What it saves needs no other folder, and is the network that learned, also for mdlm."""
    save(tmp_path / "out", Tokenizer("byte"), tie=tie)
    flags = [f"--out_dir={tmp_path / 'out'}", f"--dest={tmp_path / 'my-model'}"]
    assert entry.run(export.main, flags) == 0
    section = (ROOT / "docs" / "export.md").read_text().split("## Fine-tune with")[1]
    code = section.split("```python\n")[1].split("```")[0]
    (tmp_path / "mine.txt").write_text("all work and no play " * 200)
    code += """
losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
assert losses[-1] < 0.7 * losses[0], losses
x = torch.full((1, 9), tokenizer.mask_token_id)
logits = trainer.model.eval()(x).logits.detach()
torch.save((x, logits), "my-model-tuned.pt")
os.rename("my-model", "gone")
tuned = AutoModelForMaskedLM.from_pretrained("my-model-tuned", trust_remote_code=True).eval()
assert torch.equal(tuned(x).logits, logits)
"""
    r = run_client(tmp_path, "-c", "import os\n" + code)
    assert r.returncode == 0, r.stderr[-3000:]
    x, logits = torch.load(tmp_path / "my-model-tuned.pt")
    own = logits_of_weights(tmp_path / "out", tmp_path / "my-model-tuned", x)
    assert torch.allclose(own, logits[..., : own.shape[-1]], atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.skipif(not find_spec("diffusers"), reason="no diffusers")
def test_llada2_pipeline_writes_with_the_shipped_weights(tmp_path):
    assert (
        entry.run(export.main, [f"--out_dir={checkpoint.SHIPPED}", f"--dest={tmp_path / 'm'}"]) == 0
    )
    code = """
import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from transformers import AutoModelForMaskedLM, AutoTokenizer
model = AutoModelForMaskedLM.from_pretrained("m", trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained("m", trust_remote_code=True)
pipe = LLaDA2Pipeline(model=model, scheduler=BlockRefinementScheduler(), tokenizer=tokenizer)
pipe.set_progress_bar_config(disable=True)
g = torch.Generator().manual_seed(0)
out = pipe(prompt="ROMEO:\\nI ", gen_length=50, block_length=16, num_inference_steps=16,
           temperature=1.0, generator=g)
assert len(out.texts[0]) == 50 and (out.sequences < tokenizer.mask_token_id).all()
print(out.texts[0])
"""
    r = run_client(tmp_path, "-c", code)
    assert r.returncode == 0, r.stderr[-2000:]
    assert sum(word in r.stdout for word in (" the ", " to ", " and ", " of ", " I ", " my ")) >= 1


@pytest.mark.parametrize("kind", ["plain", "documents"])
def test_checkpoint_in_bfloat16_is_the_rounded_model(kind, tmp_path):
    """Exactly, in half of the size; the counts of lengths are not rounded."""
    is_documents = kind == "documents"
    settings = dict(document_length="given") if is_documents else {}
    save(tmp_path / "out", Tokenizer("byte", None, is_documents), count=257, **settings)
    given = [f"--out_dir={tmp_path / 'out'}", "--to=checkpoint"]
    small, same = tmp_path / "small", tmp_path / "same"
    assert entry.run(export.main, [*given, f"--dest={small}", "--weights=bfloat16"]) == 0
    assert entry.run(export.main, [*given, f"--dest={same}"]) == 0
    before, after = (mdlm.load(folder)[0] for folder in (tmp_path / "out", small))
    if is_documents:
        assert after.length_counts.max() == 257  # which bfloat16 cannot say
        assert torch.equal(before.length_counts, after.length_counts)
    for (name, p), (_, q) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert q.dtype == torch.float32 and torch.equal(p.bfloat16().float(), q), name
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (small, same)]
    assert sizes[0] < 0.6 * sizes[1]
    assert (same / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "step-1" / "model.safetensors"
    ).read_bytes()


def test_exported_checkpoint_has_no_state_and_is_fine_tuned(short_run, tmp_path):
    small = tmp_path / "small"
    given = [f"--out_dir={short_run}", f"--dest={small}", "--to=checkpoint", "--weights=bfloat16"]
    assert entry.run(export.main, given) == 0
    kept = {"config.json", "tokenizer.json", "model.safetensors", "manifest.json"}
    assert {path.name for path in small.iterdir()} == kept
    score = [
        json.loads((f / "manifest.json").read_text())["score"]
        for f in (small, short_run / "step-4")
    ]
    assert score[0] == score[1]
    given = tiny_flags(
        "--max_steps=2",
        f"--init_from={small}",
        f"--data={short_run / 'data'}",
        f"--out_dir={tmp_path / 'new'}",
    )
    assert run_mdlm(*given) == 0
    damaged = bytearray((small / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (small / "model.safetensors").write_bytes(damaged)
    with pytest.raises(UserError, match=r"sha256|damaged|checksum"):
        mdlm.load(small)


def test_a_mask_token_of_the_tokenizers_own_is_refused(tmp_path, capsys):
    bpe = json.loads(train_bpe(["a text"], 260))
    bpe["model"]["vocab"]["[MASK]"] = len(bpe["model"]["vocab"])
    save(tmp_path / "own", Tokenizer("bpe", json.dumps(bpe)))
    argv = [f"--out_dir={tmp_path / 'own'}", f"--dest={tmp_path / 'm'}"]
    assert entry.run(export.main, argv) == 2
    assert "[MASK]" in capsys.readouterr().err and not (tmp_path / "m").exists()


def test_full_disk_leaves_no_folder(short_run, tmp_path, capsys, monkeypatch):
    def full(path, content):
        path.write_bytes(content[: len(content) // 2])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(export.files, "write_synced", full)
    assert entry.run(export.main, [f"--out_dir={short_run}", f"--dest={tmp_path / 'm'}"]) == 2
    assert "No space left" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("kind", ["byte", "documents", "file", "file of documents"])
def test_export_is_loaded_and_fine_tuned(kind, tie, tmp_path, pydoc, library):
    """The network, the tokenizer and its [END] are those of the run that was exported."""
    end = "documents" in kind
    tokenizer = open_tokenizer(library, end) if "file" in kind else Tokenizer("byte", None, end)
    out = tmp_path / "out"
    save(out, tokenizer, tie=tie)
    dest = tmp_path / "hf"
    assert entry.run(export.main, [f"--out_dir={out}", f"--dest={dest}"]) == 0
    before, after = (mdlm.load(folder, kernel="torch") for folder in (out, dest))
    assert before[1].encode(pydoc[:500]) == after[1].encode(pydoc[:500])
    assert before[1].end_id == after[1].end_id and before[1].vocab_size == after[1].vocab_size
    assert before[2].document_length == after[2].document_length or not end
    x = torch.randint(before[0].mask_id + 1, (2, 24))
    assert torch.equal(before[0](x), after[0](x))
    records = "".join(json.dumps(dict(text=pydoc[i : i + 30])) + "\n" for i in range(0, 3000, 30))
    data = tmp_path / ("data.jsonl" if end else "data.txt")
    data.write_text(records if end else pydoc[:3000], encoding="utf-8")
    flags = {f"--{name}": value for name, value in (SMALL | dict(tie=tie)).items()} | {
        "--learning_rate": 0
    }
    given = [f"--init_from={dest}", f"--data={data}", f"--out_dir={tmp_path / 'new'}"]
    given += ["--max_steps=1", "--optimizer=adamw", "--weight_decay=0", "--dropout=0"]
    given += [f"{flag}={value}" for flag, value in flags.items() if flag != "--dropout"]
    assert run_mdlm(*tiny_flags(*given)) == 0
    tuned = mdlm.load(tmp_path / "new", kernel="torch")[0]
    theirs = tuned.state_dict()
    for name, p in before[0].named_parameters():
        assert torch.equal(theirs[name], p), name
