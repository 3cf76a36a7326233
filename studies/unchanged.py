"""Whether a change of the source keeps every number: runs of two checkouts, compared to the bit.

    git worktree add ../before HEAD~1
    python studies/unchanged.py ../before .    # about 75 s a checkout, on one thread

In each checkout it trains 60 steps of the default and of every variant, evaluates the models,
samples from them with many settings, and resumes some of the runs. What differs is printed, and
gives exit code 1: records of the log (but for times), tensors of checkpoints, evaluations, texts.
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
import time
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
    "cosine": "text --mask_schedule=cosine",
    "bernoulli cosine": "text --masking=bernoulli --mask_schedule=cosine",
    "uniform": "text --loss_weight=uniform",
    "bernoulli uniform": "text --masking=bernoulli --loss_weight=uniform",
    "clipped": "text --min_rate=0.3 --max_rate=0.8",
    "bert": "text --min_rate=0.15 --max_rate=0.15 --loss_weight=uniform",
    "time": "text --time_conditioning",
    "time bernoulli": "text --time_conditioning --masking=bernoulli",
    "documents": "documents",
    "documents apart": "documents --pack=false",
    "documents learned": "documents --lengths=learned",
    "documents ar": "documents --objective=ar",
    "documents time": "documents --time_conditioning",
    "documents positions": "documents --pos=learned",
    "documents sinusoidal": "documents --pos=sinusoidal",
    "documents bernoulli": "documents --lengths=learned --masking=bernoulli",
    "prompts": "pairs --prompt_column=prompt",
    "prompts time": "pairs --prompt_column=prompt --time_conditioning",
    "blocks 1": "text --block_length=1",
    "blocks 4": "text --block_length=4",
    "blocks 16": "text --block_length=16",
    "blocks whole": "text --block_length=4 --whole=0.4",
    "blocks documents": "documents --block_length=4",
    "blocks prompts": "pairs --prompt_column=prompt --block_length=4",
    "blocks prompts whole": "pairs --prompt_column=prompt --block_length=8 --whole=0.4",
    "blocks positions": "text --block_length=8 --pos=learned",
    "blocks accumulated": "text --block_length=4 --whole=0.3 --gradient_accumulation_steps=2",
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
}
RESUMED = ("default", "ar", "documents", "prompts", "blocks whole", "blocks prompts")
RESUMED += ("words", "bpe of documents", "file", "file of documents", "ids with a file")
SAMPLED = ("default", "ar", "bernoulli", "time", "documents", "documents learned", "documents ar")
SAMPLED += ("documents positions", "prompts", "prompts time", "patterns")
SAMPLED += ("blocks 1", "blocks 4", "blocks 16", "blocks whole", "blocks documents")
SAMPLED += ("blocks prompts", "bytes", "words", "bpe of documents", "file of documents", "ids")
ORDERS = ("spread", "ancestral", "random", "left_to_right", "one_shot")
ORDERS += ("confidence", "max_prob", "margin", "entropy")
# Flags of sample.py. What a model refuses is compared too.
SETTINGS = [
    *("", "--seed=3", "--num_samples=3", "--steps=8", "--steps=40 --correct=10", "--correct=0"),
    *("--redraw=sweep", "--distance=2", "--length=20", "--length=50", "--temperature=0.5"),
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
TIMES = ("seconds", "tokens_per_second", "tokens/s")


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
    optional = import_module("support.environment").optional
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
    names = {path.stem: str(path) for path in folder.iterdir()}
    return names | dict(patterns="patterns")


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

    def __init__(self, out):
        sys.path.insert(0, str(Path.cwd()))
        mdlm = import_module("mdlm")
        import_module("torch").set_num_threads(1)
        self.out = out
        self.cleanup = module("support.training.checkpoint", "support.checkpoint").release
        self.run = import_module("support.cli").run
        self.load_file = import_module("safetensors.torch").load_file
        self.programs = {name: import_module(name).main for name in ("eval", "sample")}
        self.programs["mdlm"] = lambda argv: mdlm.train(mdlm.parse_args(argv), time.monotonic())

    def call(self, program, *argv):
        """[exit code, what it printed, or the sentence of a refusal]"""
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        stderr = io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = self.run(self.programs[program], list(argv), self.cleanup)
        stdout.flush()
        said = stdout.buffer.getvalue().decode() if code == 0 else stderr.getvalue()
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

    def results(self):
        """Yields (what was done, what came out)."""
        data = write_data(self.out)
        for name, words in RUNS.items():
            source, *flags = words.replace("TOKENIZER", data["TOKENIZER"]).split()
            given = {flag.partition("=")[0] for flag in flags}
            flags += [flag for flag in TINY.split() if flag.partition("=")[0] not in given]
            where = f"--out_dir={self.out / name}"
            code, said = self.call("mdlm", f"--data={data[source]}", *flags, where)
            yield name, [code, *self.run_of(name)] if code == 0 else said
            flags_of_call = ["--json=-", "--exact", "--windows=6", "--pictures=none"]
            yield f"{name}: eval", self.call("eval", where, *flags_of_call)
        where = f"--out_dir={self.out / 'blocks whole'}"
        yield "blocks whole: eval --whole", self.call("eval", where, "--whole", *flags_of_call)
        for name in SAMPLED:
            for words in SETTINGS:
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
            yield f"{name}: resumed", self.tensors(run.name) if code == 0 else said


def results_of(checkout):
    """What the programs of a checkout compute: name -> result."""
    command = [sys.executable, str(Path(__file__).resolve()), "--run"]
    done = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main():
    if sys.argv[1:] == ["--run"]:
        with tempfile.TemporaryDirectory() as out:
            print(json.dumps(dict(Checkout(Path(out).resolve()).results())))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", help="folder of a checkout")
    parser.add_argument("after", help="folder of another")
    args = parser.parse_args()
    for folder in (args.before, args.after):
        if not (Path(folder) / "mdlm.py").exists():
            parser.error(f"there is no {folder}/mdlm.py")
    before, after = map(results_of, (args.before, args.after))
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    for name in changed:
        print(f"{name}:\n  {str(before.get(name))[:300]}\n  {str(after.get(name))[:300]}")
    print(f"{len(before | after)} results, {len(changed)} differ")
    return int(bool(changed))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # its reader has gone (| head)
    sys.exit(141)
