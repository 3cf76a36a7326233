"""Whether a change of the source keeps every number: runs of two checkouts, compared to the bit.

    git worktree add ../before HEAD~1
    python studies/unchanged.py ../before .             # two minutes a checkout, on one thread
    python studies/unchanged.py ../before . --only=blocks    # what has this word in its name

In each checkout it trains 60 steps of the default and of every variant, also on two ranks, with
networks of Hugging Face and with adapters (LoRA), evaluates the models, samples from them with many
settings, and resumes some of the runs. What differs is printed, and gives exit code 1: records of
the log (but for times), tensors of checkpoints, texts, and whether something is refused (not in
what words).
Evaluations may differ by 1e-6, as sums of float32 may be made in another order.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import numpy as np

TINY = """--device=cpu --compile=off --dtype=float32 --preset=cpu --n_layer=2 --n_head=2 --n_embd=32
    --block_size=32 --batch_size=8 --dropout=0.1 --max_steps=60 --warmup_steps=2 --log_interval=1
    --eval_interval=20 --eval_windows=32"""
# Name of a run -> the data, and flags beside TINY.
RUNS = {
    "default": "text",
    "no margin": "text --rate_margin=0",
    "ar": "text --objective=ar",
    "bernoulli": "text --masking=bernoulli",
    "cosine": "text --rates=cosine",
    "bernoulli cosine": "text --masking=bernoulli --rates=cosine",
    "uniform": "text --loss_weight=uniform",
    "bernoulli uniform": "text --masking=bernoulli --loss_weight=uniform",
    "clipped": "text --rates=0.3-0.8",
    "bert": "text --rates=0.15-0.15 --loss_weight=uniform",
    "time": "text --time_conditioning",
    "time bernoulli": "text --time_conditioning --masking=bernoulli",
    "documents": "documents",
    "documents apart": "documents --pack=false",
    "documents learned": "documents --document_length=predicted",
    "documents ar": "documents --objective=ar",
    "documents time": "documents --time_conditioning",
    "documents positions": "documents --pos=learned",
    "documents sinusoidal": "documents --pos=sinusoidal",
    "documents bernoulli": "documents --document_length=predicted --masking=bernoulli",
    "prompts": "pairs --prompt_column=prompt",
    "prompts time": "pairs --prompt_column=prompt --time_conditioning",
    "blocks 1": "text --block_length=1",
    "blocks 4": "text --block_length=4",
    "blocks 16": "text --block_length=16",
    "blocks whole": "text --block_length=4 --infill_share=0.4",
    "blocks documents": "documents --block_length=4",
    "blocks prompts": "pairs --prompt_column=prompt --block_length=4",
    "blocks prompts whole": "pairs --prompt_column=prompt --block_length=8 --infill_share=0.4",
    "blocks positions": "text --block_length=8 --pos=learned",
    "blocks accumulated": "text --block_length=4 --gradient_accumulation_steps=2",
    "accumulated": "text --gradient_accumulation_steps=2",
    "adamw": "text --optimizer=adamw",
    "tied": "text --tie --conv=0",
    "positions": "text --pos=learned",
    "raw": "text --ema=0",
    "recompute": "text --recompute",
    "patterns": "patterns --block_size=64 --max_steps=20",
    "bytes": "text --tokenizer=byte",
    "words": "text --tokenizer=word --vocab_size=600",
    "bpe": "text --tokenizer=bpe --vocab_size=400",
    "file": "text --tokenizer=TOKENIZER",
    "words of documents": "documents --tokenizer=word --vocab_size=600",
    "bpe of documents": "documents --tokenizer=bpe --vocab_size=400",
    "file of documents": "documents --tokenizer=TOKENIZER",
    "ids": "ids --end=1",
    "ids with a file": "ids_with_file --end=1",
    "encoder": "text --init_from=BERT",
    "encoder of documents": "documents --init_from=BERT",
    "decoder": "text --init_from=LLAMA",
    "decoder in blocks": "text --init_from=LLAMA --block_length=8",
    "decoder ar": "text --init_from=LLAMA --objective=ar",
    "lora": "text --init_from=LLAMA --lora=4",
    "network": "text --network=LLAMA/config.json",
}
RANKS = ("default", "documents", "blocks 4", "prompts")  # also trained on two ranks
RESUMED = ("default", "ar", "documents", "prompts", "blocks whole", "blocks prompts")
RESUMED += ("words", "bpe of documents", "file", "file of documents", "ids with a file")
RESUMED += ("encoder", "decoder in blocks", "lora")
SAMPLED = ("default", "ar", "bernoulli", "time", "documents", "documents learned", "documents ar")
SAMPLED += ("documents positions", "prompts", "prompts time", "patterns")
SAMPLED += ("blocks 1", "blocks 4", "blocks 16", "blocks whole", "blocks documents")
SAMPLED += ("blocks prompts", "bytes", "words", "bpe of documents", "file of documents", "ids")
SAMPLED += ("encoder", "decoder", "decoder in blocks", "decoder ar")
ORDERS = ("spread", "ancestral", "random", "left_to_right", "one_shot")
ORDERS += ("confidence", "max_prob", "margin", "entropy")
# Flags of sample.py. What a model refuses is compared too.
SETTINGS = [
    *("", "--seed=3", "--num_samples=3", "--steps=8", "--steps=40 --correct=10", "--correct=0"),
    *("--redraw=sweep", "--spacing=2", "--length=20", "--length=50", "--temperature=0.5"),
    *("--temperature=0", "--top_k=5", "--top_p=0.8", "--block=8"),
    *("--prompt=The", "--prompt=The --length=24", "--prompt=The --cfg=1"),
    *(f"--order={order}" for order in ORDERS),
    *(f"--order={order} --steps=12 --seed=5 --num_samples=2" for order in ORDERS),
    "--infill='The ███ is'",
    "--infill='The [___] is' --max_gap=5",
    "--infill='An [___]' --max_gap=6",
    "--infill='The ███ is a' --candidates=3",
    "--infill='Th█ v█lue' --num_samples=2",
    "--infill='The ███ is' --num_samples=1 --order=confidence",
]
TIMES = ("seconds", "tokens_per_second", "phases", "tokens/s", "host", "commit")
TOLERANCE = 1e-6  # of numbers of an evaluation; relative above 1


def write_data(folder):
    """Text, documents, and prompts with answers, of Python's reference: name -> --data.

    TOKENIZER: a tokenizer.json as GPT-2's, which lies beside the second of two folders of ids too.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))[:60_000]
    lines = [
        paragraph.replace("\n", " ") for paragraph in text.split("\n\n") if len(paragraph) > 24
    ][:900]
    documents = [dict(text=line[: 25 + len(line) % 20]) for line in lines]
    pairs = [dict(prompt=line[:8], text=line[8 : 22 + len(line) % 9]) for line in lines]
    (folder / "text.txt").write_text(text)
    for name, records in (("documents", documents), ("pairs", pairs)):
        content = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(content)
    optional = module("nanomdlm.support.cli.environment", "support.environment").optional
    tokenizers = optional("tokenizers", "its runs on a tokenizer.json")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([text], 400, show_progress=False, special_tokens=["<pad>", "</s>"])
    made.save(str(folder / "TOKENIZER.json"))
    for name in ("ids", "ids_with_file"):
        (folder / name).mkdir()
        for file in ("train.bin", "val.bin"):
            ids = [i for line in lines for i in (*made.encode(line[:30]).ids, 1)]
            np.array(ids, np.uint16).tofile(folder / name / file)
    shutil.copy(folder / "TOKENIZER.json", folder / "ids_with_file" / "tokenizer.json")
    write_networks(folder, text)
    names = {path.stem: str(path) for path in folder.iterdir()}
    return names | dict(patterns="patterns")


def write_networks(folder, text):
    """BERT and LLAMA: folders of Hugging Face, two layers of random weights, with tokenizers."""
    transformers = import_module("transformers")
    tokenizers = import_module("tokenizers")
    torch = import_module("torch")
    # Characters, beginning a word and inside of it: a trained WordPiece is not always the same.
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = sorted({c for c in text.lower() if not c.isspace()})
    vocab = {piece: i for i, piece in enumerate([*special, *pieces, *(f"##{c}" for c in pieces)])}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    made.add_special_tokens(special)
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    bpe = tokenizers.Tokenizer.from_file(str(folder / "TOKENIZER.json"))
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(max_position_embeddings=64)
    kinds = {
        "BERT": (transformers.BertConfig, transformers.BertForMaskedLM, made, {}),
        "LLAMA": (
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            bpe,
            dict(num_key_value_heads=1),
        ),
    }
    for name, (config, network, tokenizer, more) in kinds.items():
        torch.manual_seed(0)
        settings = sizes | more | dict(vocab_size=tokenizer.get_vocab_size())
        network(config(**settings)).save_pretrained(folder / name)
        tokenizer.save(str(folder / name / "tokenizer.json"))


def is_equal(a, b, inexact=False):
    """Whether two results are equal; numbers of evaluations may differ by TOLERANCE."""
    if isinstance(a, dict) and isinstance(b, dict):
        evaluated = inexact or "by_window" in a or any(str(key).startswith("val_") for key in a)
        return a.keys() == b.keys() and all(is_equal(a[k], b[k], evaluated) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(is_equal(x, y, inexact) for x, y in zip(a, b))
    if inexact and isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= TOLERANCE * max(1, abs(a), abs(b))
    return a == b


def without_times(text):
    """Lines of JSON, or of text, without what differs from run to run."""
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(line)
        if isinstance(line, dict):
            line = {name: value for name, value in line.items() if name not in TIMES}
        lines.append(line)
    return lines


def module(*names):
    """The first module of these names that there is: older checkouts have others."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return import_module(name)
    raise ModuleNotFoundError(f"none of {', '.join(names)} is there")


class Checkout:
    """Runs the programs of the checkout in the current folder, in this process."""

    def __init__(self, out, only):
        sys.path.insert(0, str(Path.cwd()))
        mdlm = import_module("mdlm")
        import_module("torch").set_num_threads(1)
        self.out = out
        self.only = only
        folders = ("nanomdlm.support.run.folder", "support.training.folder")
        self.cleanup = module(*folders, "support.training.checkpoint").release
        self.run = module("nanomdlm.support.cli.entry", "support.cli").run
        self.load_file = import_module("safetensors.torch").load_file
        self.programs = {name: import_module(name).main for name in ("eval", "sample")}
        self.programs["mdlm"] = mdlm.main

    def call(self, program, *argv):
        """[exit code, what it printed, or the sentence of a refusal]"""
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        stderr = io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = self.run(self.programs[program], list(argv), self.cleanup)
        stdout.flush()
        if code:  # refused; in what words is no interface
            return [code, []]
        said = stdout.buffer.getvalue().decode()
        shown = re.sub(rf"[\w./]*{self.out.name}", "OUT", said)  # as seen from the checkout
        return [code, without_times(shown)]

    def tensors(self, name):
        """Checksums of all tensors in the last checkpoint of a run."""
        run = self.out / name
        digests = {}
        for file in ("model", "state"):
            path = run / (run / "latest").read_text().strip() / f"{file}.safetensors"
            for key, t in self.load_file(path).items():
                content = t.contiguous().numpy().tobytes()
                key = key.replace("blocks.", "layers.")  # as layers were called once
                digests[f"{file} {key}"] = hashlib.sha256(content).hexdigest()
        return digests

    def run_of(self, name):
        """The log of a run, and checksums of what it saved."""
        log = (self.out / name / "log.jsonl").read_text()
        return without_times(log), self.tensors(name)

    def on_two_ranks(self, name, data, flags):
        """The log and tensors of a run by torchrun."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        out = self.out / f"{name} ranks"
        command += ["--nproc_per_node=2", "mdlm.py", f"--data={data}", *flags, f"--out_dir={out}"]
        done = subprocess.run(
            command, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        return self.run_of(out.name) if done.returncode == 0 else done.stderr.decode()[-2000:]

    def results(self):
        """Yields (what was done, what came out)."""
        data = write_data(self.out)
        for name, words in RUNS.items():
            if self.only not in name:
                continue
            for word in ("TOKENIZER", "BERT", "LLAMA"):
                words = words.replace(word, data[word])
            source, *flags = words.split()
            given = {flag.partition("=")[0] for flag in flags}
            own = "" if "--init_from" in given or "--network" in given else "n_"  # sizes of ours
            tiny = [flag for flag in TINY.split() if own or not flag.startswith("--n_")]
            flags += [flag for flag in tiny if flag.partition("=")[0] not in given]
            where = f"--out_dir={self.out / name}"
            if name in RANKS:
                yield f"{name}: two ranks", self.on_two_ranks(name, data[source], flags)
            code, said = self.call("mdlm", f"--data={data[source]}", *flags, where)
            yield name, [code, *self.run_of(name)] if code == 0 else [code, said]
            flags_of_call = ["--json=-", "--exact", "--windows=6", "--pictures=none"]
            yield f"{name}: eval", self.call("eval", where, *flags_of_call)
        if (self.out / "blocks whole").exists():
            where = f"--out_dir={self.out / 'blocks whole'}"
            yield "blocks whole: eval --whole", self.call("eval", where, "--whole", *flags_of_call)
        for name in SAMPLED:
            for words in SETTINGS if (self.out / name).exists() else ():
                flags = shlex.split(words)
                if "prompts" in name and "--prompt" not in words:
                    flags.append("--prompt=Each")
                flags_of_call = [f"--out_dir={self.out / name}", "--json=-", *flags]
                yield f"{name}: sample {words}", self.call("sample", *flags_of_call)
        for name in RESUMED:
            if not (self.out / name).exists():
                continue  # refused
            run = self.out / f"{name} resumed"
            shutil.copytree(self.out / name, run, ignore=shutil.ignore_patterns("step-60"))
            (run / "latest").write_text("step-40")
            code, said = self.call("mdlm", "--resume", "--device=cpu", f"--out_dir={run}")
            yield f"{name}: resumed", self.tensors(run.name) if code == 0 else [code, said]


def results_of(checkout, only):
    """What the programs of a checkout compute: name -> result."""
    command = [sys.executable, str(Path(__file__).resolve()), "--run", only]
    done = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main():
    if sys.argv[1:2] == ["--run"]:
        with tempfile.TemporaryDirectory() as out:
            print(json.dumps(dict(Checkout(Path(out).resolve(), sys.argv[2]).results())))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", help="folder of a checkout")
    parser.add_argument("after", help="folder of another")
    parser.add_argument("--only", default="", help="compare runs whose name has this word")
    args = parser.parse_args()
    for folder in (args.before, args.after):
        if not (Path(folder) / "mdlm.py").exists():
            parser.error(f"there is no {folder}/mdlm.py")
    # At once, each on one thread: so the same programs are as fast in both.
    with ThreadPoolExecutor(2) as pool:
        folders = (args.before, args.after)
        before, after = pool.map(results_of, folders, [args.only] * 2)
    names = before | after
    changed = [name for name in names if not is_equal(before.get(name), after.get(name))]
    for name in changed:
        print(f"{name}:\n  {str(before.get(name))[:300]}\n  {str(after.get(name))[:300]}")
    refused = [name for name, x in before.items() if isinstance(x, list) and x[0] and not x[1]]
    print(f"{len(names)} results, {len(refused)} refused before, {len(changed)} differ")
    return int(bool(changed))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # its reader has gone (| head)
    sys.exit(141)
