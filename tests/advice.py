"""What the sentences of each source advise: rows of (a sentence, what was wrong, what it advises).

A sentence is named by words of it that no other string of that file has; {} is what the program
puts in, and " + " stands between strings that the program puts together. What was wrong, and each
way to follow the advice, is a step:

    "mdlm --n_embd=34"        a command. One of mdlm.py without --resume begins a tiny run: these
                              are flags beside that run's; -name leaves one of those out.
                              {names} are files and runs of test_advice.py; {run} may be changed
    {"a.txt": "..."}          mdlm.py learns this file, or the folder that it is in
    ({"a": "..."}, "eval a")  these files are there, and a command
    lambda at: ...            what Python callers do, and what no command says

In place of steps a row may have the reason why nothing is followed here, and so may a whole file.
test_advice.py takes the steps, and fails for a sentence that advises something and has no row.
"""

import copy
import gzip
import io
import json
import os
import time

import filelock
import numpy as np
import pytest
import tokenizers
import torch
from conftest import sign
from safetensors.torch import load_file, save_file

import export
import mdlm
import sample
from support import environment, files, kernels, numerics, ownership, plots, ranks
from support.data import records, sources, texts, tokenizer
from support.data.tokenizer import Tokenizer
from support.infill import calls, templates
from support.kernels import operations
from support.training import shards
from variants import rates


class Because(str):
    """Why the advice of a sentence is not followed here."""


MACHINE = Because("it needs a network, a package, a GPU, or a machine that is full")
RANKS = Because("it needs several ranks")
NOTHING = Because("it advises nothing")


class FollowedIn(Because):
    """The name of the test that follows it."""


# ---- What files hold
TEXT = "some words, " * 120
EVALUATION = dict(checkpoint="run/step-1", crc=1, tokenizer=1, block_size=32, nelbo=2.0)
EVALUATION |= dict(tokens_by_window=[32, 32], by_window=[1.5, 2.5])
EVALUATION_BY_RATE = json.dumps(EVALUATION | dict(ce=[1.0] * 10))
OTHER_EVALUATION = json.dumps(EVALUATION | dict(crc=2))
EVALUATION = json.dumps(EVALUATION)
RECORD = '{"text": "some words"}\n'
PAIR = '{"prompt": "abc", "text": "defghi"}\n'
LOG = '{"step": 1, "tokens": 9, "seconds": 1.0}\n'
IDS = np.arange(300, dtype=np.uint16) % 7


def ids(train=IDS, val=IDS, **meta):
    """The files of a folder of ids; arrays are written as they are."""
    contents = {"ids/train.bin": train, "ids/val.bin": val}
    if meta:
        contents["ids/meta.json"] = json.dumps(meta)
    return {
        name: content if isinstance(content, str) else bytes(content)
        for name, content in contents.items()
    }


def of_llm_c(n, magic=20240520):
    """A file of IDS as llm.c has them, whose header says that there are n."""
    return np.array([magic, 1, n] + [0] * 253, np.int32).tobytes() + IDS.tobytes()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def parquet(**columns):
    """A file of Parquet; a row that writes one is skipped where the optional package is missing."""
    arrow = pytest.importorskip("pyarrow")
    buffer = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), buffer)
    return buffer.getvalue()


def of_words(vocab, **options):
    """The tokenizer.json of these words and their ids; texts with others cannot be encoded."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, **options))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens([word for word in vocab if word.startswith("[E")])
    return made.to_str()


WORDS = of_words({"some": 0, "words": 1, ",": 2, "[EOT]": 3})


# ---- What no command says
def write(path, content):
    """Write a text, bytes, or what a function returns."""
    content = content() if callable(content) else content
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def prepare_patterns(at):
    at.do("mdlm --data=patterns --block_size=24 --out_dir=prepared")


def documents_of(at):
    """(model, tokenizer, config) of documents of given lengths."""
    return mdlm.load(at["documents"])


def write_documents(at, tokenizer):
    sample.write(documents_of(at)[0], tokenizer, length=2)


def flip(path):
    """Change the last byte of a file."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def set_config(run, **settings):
    """Change the config of the newest checkpoint of a run, as another version may have."""
    folder = run / "step-4"
    content = json.loads((folder / "config.json").read_text())
    content["config"] |= settings
    write(folder / "config.json", json.dumps(content))
    sign(folder)


def change_data(run):
    """Other data in the place of what a run has learned, as earlier versions noted it."""
    meta = json.loads((run / "data" / "meta.json").read_text())
    del meta["checksum"]
    write(run / "data" / "meta.json", json.dumps(meta))
    flip(run / "data" / "val.bin")


def change_weights(at, change):
    """Change the dict of tensors of the newest checkpoint of {run}."""
    path = at.run / "step-4" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    sign(at.run / "step-4")


def break_weights(at):
    """The newest checkpoint of {run} gets weights that are not finite."""
    change_weights(at, lambda tensors: next(iter(tensors.values())).fill_(float("nan")))


class forget_token:
    """The tokenizer of the newest checkpoint of {run} loses a token, and the manifest agrees."""

    def __init__(self, at):
        self.path = at.run / "step-4" / "tokenizer.json"
        self.content = self.path.read_bytes()
        earlier = tokenizer.tokenizer_from_json(self.path)
        shorter = Tokenizer(earlier.kind, earlier.vocab[:-1], earlier.end)
        write(self.path, shorter.to_file())
        sign(self.path.parent)

    def undo(self):
        self.path.write_bytes(self.content)
        sign(self.path.parent)


def mix_names(at):
    """The newest checkpoint of {run} gets a tensor under a former name."""
    change_weights(at, lambda tensors: tensors.update({"blocks.0.up.weight": torch.zeros(1)}))


def learn_again(at, cut):
    """Another run learns the prepared data of {run}, whose meta.json may be cut off."""
    meta = at.run / "data" / "meta.json"
    write(meta, meta.read_text()[:9] if cut else meta.read_text())
    at.do(f"mdlm --data={at.run}/data")


def train_again(at):
    at.do("mdlm --out_dir={run} --overwrite", saves=True)


def no_network(at):
    def fails():
        raise OSError("no network")

    at.patch.setattr(sources, "shakespeare", fails)


def cut_off(at):
    """An --overwrite of {run} that was killed before it saved."""
    write(at.run / "latest", ownership.OVERWRITING)


def learn(at, content):
    """mdlm.py learns records that may have 200 bytes."""
    at.patch.setattr(records, "LARGEST", 200)
    at.take({"a.jsonl": content})


def unreadable(at):
    """A text that only others may read."""

    def fails(path, *options, **more):
        raise PermissionError(13, "Permission denied", str(path))

    with at.patch.context() as patch:
        patch.setattr(files, "open_regular", fails)
        at.take({"a.txt": TEXT})


def read_twice(at, then):
    """Survey a text and encode it; `then` is called in between."""
    path = at.tmp / "a.txt"
    write(path, TEXT)
    source = texts.open_source(mdlm.Config(data=str(path)))
    source.survey()
    then(path)
    list(source.encode(Tokenizer("byte")))


def open_prompts(at, block_size):
    """Windows of this size from prepared prompts and answers."""
    config = mdlm.Config(block_size=block_size, prompt_column="prompt", document_length="predicted")
    mdlm.Corpus(f"{at['prompts']}/data", config, torch.device("cpu"))


def to_json(at, n):
    """Save a tokenizer of n characters where 300 bytes are accepted."""
    at.patch.setattr(tokenizer, "most_bytes", lambda path: 300)
    Tokenizer("char", [chr(i) for i in range(97, 97 + n)]).to_json()


def select(at, **options):
    """Choose the operations, where Triton's interpreter would run them."""
    at.patch.setattr(operations, "_missing", lambda device: "")
    at.patch.setattr(operations, "INTERPRET", True)
    kernels.select(**options)


def evaluate(at, **options):
    mdlm.evaluate(options.pop("model", at.model), options.pop("windows", at.x), **options)


def generate(at, **options):
    sample.generate(options.pop("model", at.model), at.x, **options)


def only(at, id):
    """(V,) bool: this id alone may be drawn."""
    return torch.arange(at.model.vocab_size) == id


def check_shard(at, shard):
    """--shard in a run of three ranks."""
    at.patch.setattr(ranks, "CONTROL", "three ranks")
    shards.check(shard, 3)


def hold(at):
    """Another process trains in {run}: on the systems here, one with a lock of its own."""
    at.held = filelock.FileLock(at.run / ownership.LOCK)
    at.held.acquire(timeout=0)


def fill_lines(at, texts):
    """--batch with these texts, each before a gap."""
    (at.tmp / "batch").write_text("".join(f"{text}█\n" for text in texts))
    at.do("sample --batch={tmp}/batch")


def lock_of_another(at):
    """The path of a lock in {run} that cannot be opened, as that of another user."""
    path = at.run / ownership.LOCK
    path.touch()
    open_file = os.open

    def open_or_fail(name, *args, **options):
        if os.path.basename(name) == ownership.LOCK and os.path.exists(name):
            raise PermissionError(13, "Permission denied", str(name))
        return open_file(name, *args, **options)

    at.patch.setattr(os, "open", open_or_fail)
    return path


def without_filelock(at, command):
    """A command where that package is missing."""
    installed = environment.is_installed
    with at.patch.context() as patch:
        patch.setattr(
            environment, "is_installed", lambda name: name != "filelock" and installed(name)
        )
        at.do(command)


def without_locks(at, command):
    """A command on a file system that has no locks, as some of networks."""

    def no_locks(*args, **how):
        raise NotImplementedError("no locks here")

    with at.patch.context() as patch:
        patch.setattr(filelock.FileLock, "acquire", no_locks)
        at.do(command)


def not_yours(at, command):
    """A command in a folder `theirs` that only others may write."""
    (at.tmp / "theirs").mkdir()
    access = os.access
    at.patch.setattr(
        os, "access", lambda path, mode: "theirs" not in str(path) and access(path, mode)
    )
    at.do(command)


# ---- The rows
# Sentences that only warn: the program goes on.
WARNINGS = (
    "do not start a second run there, or type: {}",
    "do not start a second run there, which would not be noticed",
    "{}: every second id is 0; if that is wrong, give --bin_dtype={}",
    "its lines are JSON: name it .jsonl to learn only their texts",
    "read too; move away what is not meant for training",
)
ADVICE = {}

ADVICE["bench.py"] = [
    ("in bench.py {}, only in {}; leave it out", "bench train --seeds=2", "bench train"),
    ("give train or sample", "bench kernels", "bench train", "bench sample"),
    ("first give {} or nothing, then flags", "bench training", "bench train", "bench"),
    (
        "the lines above say why; raise --time_limit",
        "bench train --time_limit=1e-9",
        "bench train --time_limit=99",
    ),
    (
        "is not drawn: no sampler was measured; raise --time_limit",
        FollowedIn("test_frontier_has_every_sampler"),
    ),
    ("--only={} is in no name of an operation", MACHINE),
]

ADVICE["adaptive.py"] = [
    (
        "threshold and entropy_bound are two rules for the same; give one",
        "sample --threshold=0.5 --entropy_bound=1",
        "sample --threshold=0.5",
        "sample --entropy_bound=1",
    ),
    (
        "{} contradict each other; give order={}",
        "sample --threshold=0.5 --order=spread",
        "sample --threshold=0.5 --order=confidence",
        "sample --threshold=0.5 --order=max_prob",
    ),
]

ADVICE["probabilities.py"] = [
    (
        "passes={} is odd; give an even number",
        lambda at: sample.score(at.model, at.tokenizer, "ab", passes=3),
        lambda at: sample.score(at.model, at.tokenizer, "ab", passes=4),
    ),
    (
        "this model learned to answer prompts; give pairs (prompt, answer)",
        lambda at: sample.score(*mdlm.load(at["prompts"])[:2], "aa"),
        lambda at: sample.score(*mdlm.load(at["prompts"])[:2], ("aa", "d")),
    ),
    (
        "{} has no token to score; give some text",
        lambda at: sample.score(at.model, at.tokenizer, ""),
        lambda at: sample.score(at.model, at.tokenizer, "a"),
    ),
    (
        "a pair has {} tokens, the context only {}; shorten it",
        lambda at: sample.score(at.model, at.tokenizer, ("a" * 20, "b" * 20)),
        lambda at: sample.score(at.model, at.tokenizer, ("a" * 9, "b" * 9)),
    ),
]

ADVICE["effects.py"] = [
    (
        "where tokens are filled one at a time; leave it out",
        "sample --block=1 --correct=2",
        "sample --block=1",
    ),
    (
        "with an autoregressive model, which draws a token in each call; leave it out",
        "sample --out_dir={ar} --steps=3",
        "sample --out_dir={ar}",
    ),
    (
        "in a text within the context; leave it out",
        "sample --out_dir={ar} --block=3",
        "sample --out_dir={ar}",
    ),
    (
        "in a text of {} tokens; leave it out, or give less",
        "sample --length=4 --block=9",
        "sample --length=4",
        "sample --length=4 --block=2",
    ),
    ("where fills of [___] are ranked, which few calls draw;", NOTHING),
    (
        "{} leave it out, or give --num_samples",
        "sample --infill=a[___]b --correct=2",
        "sample --infill=a[___]b",
        "sample --infill=a[___]b --correct=2 --num_samples=1",
    ),
    (
        "{} give at most {}",
        "sample --infill=a[___]b --steps=9",
        "sample --infill=a[___]b --steps=7",
    ),
    (
        "where one call draws all; leave it out, or give more --steps",
        "sample --steps=1 --order=random",
        "sample --steps=1",
        "sample --steps=2 --order=random",
    ),
    (
        "where no call draws tokens again; leave it out, or raise --correct or --steps",
        "sample --steps=4 --spacing=2",
        "sample --steps=4",
        "sample --steps=4 --spacing=2 --correct=1",
        "sample --steps=6 --spacing=2",
    ),
    (
        "as there are {} tokens in all; leave it out, or give less",
        "sample --top_k=9999",
        "sample",
        "sample --top_k=3",
    ),
    (
        "without a given text that guides; give some, or leave it out",
        lambda at: sample.generate(at.model, at.masked, cfg=1.0),
        lambda at: sample.generate(at.model, at.masked, steps=1),
        lambda at: generate(at, cfg=1.0),
    ),
    (
        "at --temperature=0; leave one of them out",
        "sample --temperature=0 --top_k=3",
        "sample --temperature=0",
        "sample --top_k=3",
    ),
    (
        "with --top_k=1; leave one of them out",
        "sample --top_k=1 --temperature=0.5",
        "sample --top_k=1",
        "sample --temperature=0.5",
    ),
    (
        "where nothing is random; leave it out",
        "sample --out_dir={ar} --temperature=0 --seed=3",
        "sample --out_dir={ar} --temperature=0",
    ),
]

TWO_EVALUATIONS = {"a.json": EVALUATION, "b.json": EVALUATION}
TWO_RATES = dict.fromkeys(TWO_EVALUATIONS, EVALUATION_BY_RATE)

ADVICE["comparing.py"] = [
    (
        "is one evaluation; give two, such as a.json,b.json",
        (TWO_EVALUATIONS, "eval --compare=a.json"),
        (TWO_EVALUATIONS, "eval --compare=a.json,b.json"),
    ),
    (
        "score the same --data and --windows with both, by models of one tokenizer",
        (TWO_EVALUATIONS | {"b.json": OTHER_EVALUATION}, "eval --compare=a.json,b.json"),
        (TWO_EVALUATIONS, "eval --compare=a.json,b.json"),
    ),
    (
        "write it anew with eval.py --json",
        (TWO_EVALUATIONS | {"b.json": "{}"}, "eval --compare=a.json,b.json"),
        (TWO_EVALUATIONS, "eval --compare=a.json,b.json"),
    ),
]

ADVICE["ensemble.py"] = [
    (
        "networks that predict together have one of each; give such runs",
        "eval --out_dir={run},{words}",
        "eval --out_dir={run},{run}",
    ),
    ("{}; give it alone", "sample --out_dir={blocks},{blocks}", "sample --out_dir={blocks}"),
]

ADVICE["eval.py"] = [
    (
        "give runs alone, or files of --json alone",
        (TWO_EVALUATIONS, "eval --compare={run},a.json"),
        "eval --compare={run}",
        (TWO_EVALUATIONS, "eval --compare=a.json,b.json"),
    ),
    (
        "with --compare of files, which draws nothing; leave it out",
        (TWO_EVALUATIONS, "eval --compare=a.json,b.json --pictures=p"),
        (TWO_EVALUATIONS, "eval --compare=a.json,b.json"),
    ),
    (
        "with --compare, which only reads logs; leave it out",
        "eval --compare={run} --device=cpu",
        "eval --compare={run}",
    ),
    (
        "so all passes are alike; leave it out",
        "eval --out_dir={ar} --passes=2",
        "eval --out_dir={ar}",
    ),
    (
        "connect to a network, or give --data=FILE",
        lambda at: (no_network(at), at.do("eval --data=shakespeare")),
        "eval --data={text}",
    ),
    ("has another vocabulary than", "eval --data={ids}", "eval --data={text}"),
    (
        "restore it, or give --data={} to score it as it is",
        "eval --out_dir={changed}",
        "eval --out_dir={run}",
        "eval --out_dir={changed} --data={changed}/data",
    ),
    (
        "give one of them",
        "eval --compare={run} --windows=2",
        "eval --compare={run}",
        "eval --windows=2",
    ),
    (
        "--text measures nothing else",
        "eval --text=a --windows=2",
        "eval --text=a",
        "eval --windows=2",
    ),
    ("--text is missing; give one", "eval --rate=0.2", "eval --rate=0.2 --text=abc"),
    (
        "--rate=0 masks nothing, so nothing is predicted; give more, up to 1",
        "eval --text=abc --rate=0",
        "eval --text=abc --rate=1",
    ),
    (
        "has logged no evaluation yet; wait for one, or leave it out",
        ({"o/log.jsonl": LOG}, "eval --compare={run},o"),
        lambda at: at.take(({"o/log.jsonl": LOG + at.log}, "eval --compare={run},o")),
        "eval --compare={run}",
    ),
    (
        "--whole is for models of mdlm.py --infill_share",
        "eval --whole",
        "eval",
        "eval --whole --out_dir={whole}",
    ),
    (
        "--text is for models that fill gaps",
        "eval --out_dir={ar} --text=abc",
        "eval --out_dir={ar}",
    ),
    ("--text has {} tokens; give 1 to {}", "eval --text={long}", "eval --text=abc"),
]

ADVICE["export.py"] = [
    (
        "{}, and an export has one; give one",
        "export --out_dir={run},{run} --dest={tmp}/e",
        "export --out_dir={run} --dest={tmp}/e",
    ),
    (
        "--to=page is for networks of mdlm.py; give --to=hf for those of others",
        FollowedIn("test_page_of_a_network_of_others_is_refused"),
    ),
    (
        "with --to={}, {}; leave it out",
        "export --to=page --pad_to_context --dest={tmp}/e",
        "export --pad_to_context --dest={tmp}/e",
    ),
    (
        "on a model that does not see what follows a text; leave it out",
        "export --out_dir={documents} --pad_to_context --dest={tmp}/e",
        "export --out_dir={documents} --dest={tmp}/e",
    ),
    (
        "with --to=hf, which keeps float32; leave it out",
        "export --weights=int8 --dest={tmp}/e",
        "export --dest={tmp}/e",
    ),
    (
        "--weights={} is not for --to={} + {}; give {}",
        "export --to=checkpoint --weights=int8 --dest={tmp}/e",
        "export --to=checkpoint --weights=float32 --dest={tmp}/e",
        "export --to=checkpoint --weights=bfloat16 --dest={tmp}/e",
    ),
    (
        "--out_dir={} is an export; give a run or a checkpoint",
        lambda at: (
            at.do("export --dest={tmp}/hf"),
            at.do("export --to=checkpoint --out_dir={tmp}/hf --dest={tmp}/e"),
        ),
        "export --to=checkpoint --out_dir={run} --dest={tmp}/e",
        "export --to=checkpoint --out_dir={run}/step-4 --dest={tmp}/e",
    ),
    ("hf: for Hugging Face transformers; page: ", NOTHING),
    ("checkpoint: for the programs here, without what --resume needs", NOTHING),
    (
        "--to=hf is not for --block_length without --infill_share",
        "export --dest={tmp}/e --out_dir={blocks}",
        "export --dest={tmp}/e --out_dir={run}",
        "export --dest={tmp}/e --out_dir={whole}",
    ),
]

ADVICE["mdlm.py"] = [
    ("A run ends after --max_steps or --time_limit", NOTHING),
    ("With --max_steps alone the clock plays no part", NOTHING),
    ("compiling, {} (--compile=off starts at once)", MACHINE),
]

ADVICE["proofreading.py"] = FollowedIn("test_models_that_cannot_are_refused")
ADVICE["fixing.py"] = FollowedIn("test_what_is_no_text_is_refused")
ADVICE["sample.py"] = [
    (
        "with --fix, which draws nothing; leave it out",
        "sample --fix={text} --steps=3",
        "sample --fix={text}",
        "sample --steps=3",
    ),
    (
        "--output=- and --json=- are both standard output; give a file for one",
        "sample --fix={text} --output=- --json=-",
        "sample --fix={text} --output=- --json={tmp}/changes",
        "sample --fix={text} --output={tmp}/new --json=-",
    ),
    (
        "--{} needs a text to proofread; give --fix",
        "sample --caution=3",
        "sample --caution=3 --fix={text}",
    ),
    (
        "order=one_shot and steps={} contradict each other; give one",
        lambda at: generate(at, order="one_shot", steps=4),
        lambda at: generate(at, order="one_shot"),
        lambda at: generate(at, steps=4),
    ),
    (
        "is more than the context of {}; give less",
        lambda at: generate(at, block=999),
        lambda at: generate(at, block=9),
    ),
    (
        "--compare needs gaps of known lengths; leave --max_gap out",
        "sample --compare=temperature=0.5,1 --infill=a██ --max_gap=3",
        "sample --compare=temperature=0.5,1 --infill=a██",
    ),
    (
        "give at most {}, or leave it out",
        "sample --out_dir={prompts} --prompt=aa --length=99",
        "sample --out_dir={prompts} --prompt=aa --length=9",
        "sample --out_dir={prompts} --prompt=aa",
    ),
    (
        "max_gap={} has no effect without [___]; leave it out",
        lambda at: sample.write(at.model, at.tokenizer, "a█", max_gap=3),
        lambda at: sample.write(at.model, at.tokenizer, "a█"),
    ),
    (
        "--max_gap has no effect without [___]; leave it out, or write [___]",
        "sample --infill=a█ --max_gap=3",
        "sample --infill=a█",
        "sample --infill=a[___] --max_gap=3",
    ),
    (
        "give values that make a difference",
        "sample --compare=steps=0,32",
        "sample --compare=steps=8,32",
    ),
    (
        "{} is no setting; give {}",
        lambda at: generate(at, step=4),
        lambda at: generate(at, steps=4),
    ),
    (
        "an autoregressive model needs left_to_right",
        "sample --out_dir={ar} --order=random",
        "sample --out_dir={ar} --order=left_to_right",
    ),
    (
        "{} is not for {}; leave it out",
        "sample --out_dir={ar} --cfg=1 --prompt=a",
        "sample --out_dir={ar} --prompt=a",
    ),
    (
        "correct={} is not accepted; give {}",
        "sample --correct=all",
        "sample --correct=auto",
        "sample --correct=2",
    ),
    (
        "memo must be a likelihood.Memo",
        lambda at: next(sample.unmask(at.model, at.masked, memo={})),
        lambda at: next(sample.unmask(at.model, at.masked, memo=calls.Memo())),
    ),
    (
        "memo is for unmask; generate has one of its own, so leave it out",
        lambda at: generate(at, memo=calls.Memo()),
        lambda at: generate(at),
    ),
    (
        "a template says by itself what to write",
        "sample --infill=a█ --length=4",
        "sample --infill=a█",
        "sample --length=4",
    ),
    (
        "leave one of them out",
        "sample --batch={templates} --watch",
        "sample --batch={templates}",
        "sample --watch",
    ),
    (
        "watch one text, or write many for a program",
        "sample --watch --json=-",
        "sample --watch",
        "sample --json=-",
    ),
    (
        "--compare writes texts with several settings",
        "sample --compare=temperature=0.5,1 --watch",
        "sample --compare=temperature=0.5,1",
        "sample --watch",
    ),
    (
        "{} is a second text, beside --{}; give one of them",
        "sample hello --prompt=be",
        "sample hello",
        "sample --prompt=be",
    ),
    (
        "give it as --out_dir or --batch; if it is a text, as --prompt",
        "sample {run}",
        "sample --out_dir={run}",
        "sample --prompt={run}",
        "sample --batch={templates}",
    ),
    (
        "--order=one_shot and --steps contradict each other; one_shot is one step",
        "sample --order=one_shot --steps=4",
        "sample --order=one_shot",
        "sample --steps=4",
    ),
    (
        "--logprobs is written to lines of JSON; give --json or --batch",
        "sample --logprobs=2",
        "sample --logprobs=2 --json=-",
        "sample --logprobs=2 --batch={templates}",
    ),
    (
        "--{} needs a template; give --infill or --batch",
        "sample --candidates=2",
        "sample --candidates=2 --infill=a█",
        "sample --candidates=2 --batch={templates}",
    ),
    (
        "--{}={} is no file or text; give one or leave it out",
        "sample --html=-",
        "sample --html={tmp}/page.html",
        "sample",
    ),
    (
        "--prompt has gaps; give it as --infill, or without a flag before it",
        "sample --prompt=a█",
        "sample --infill=a█",
        "sample a█",
    ),
    (
        "this model learned to answer prompts; give --prompt, no template",
        "sample --out_dir={prompts} --infill=a█",
        "sample --out_dir={prompts} --prompt=aa",
    ),
    (
        "--{} is not for an autoregressive model; leave it out",
        "sample --out_dir={ar} --infill=a█",
        "sample --out_dir={ar}",
    ),
    (
        "{} has gaps, and this model fills none; give only a beginning",
        lambda at: sample.write(*mdlm.load(at["ar"])[:2], "a██"),
        lambda at: sample.write(*mdlm.load(at["ar"])[:2], "a"),
    ),
    (
        "length={} and a template, which has its own length; leave one out",
        lambda at: sample.write(*mdlm.load(at.run)[:2], "a██", length=9),
        lambda at: sample.write(*mdlm.load(at.run)[:2], "a██"),
        lambda at: sample.write(*mdlm.load(at.run)[:2], "a", length=9, steps=1),
    ),
    (
        "--compare needs gaps of known lengths; write █ for each token",
        "sample --compare=temperature=0.5,1 --infill=a[___]",
        "sample --compare=temperature=0.5,1 --infill=a██",
    ),
    (
        "--cfg guides by the given text, and there is none; give some",
        "sample --cfg=1",
        "sample --cfg=1 --prompt=a",
    ),
]

ADVICE["arguments.py"] = [
    (
        "take one without blocks, or one of {}",
        "sample --out_dir={blocks} '--infill=█ and a text of two blocks'",
        "sample --out_dir={run} '--infill=█ and a text of two blocks'",
        "sample --out_dir={whole} '--infill=█ and a text of two blocks'",
        lambda at: generate(at, model=mdlm.load(at["whole"], whole=True)[0]),
    ),
    (
        "{}={} must be a whole number from {} {}",
        lambda at: evaluate(at, passes=0.5),
        lambda at: evaluate(at, passes=1),
    ),
    (
        "{}={} must be True or False",
        lambda at: mdlm.load(at.run, whole="yes"),
        lambda at: mdlm.load(at.run, whole=True),
        lambda at: mdlm.load(at.run, whole=False),
    ),
    (
        "the text is no string, or not UTF-8; convert it, or set a UTF-8 locale",
        lambda at: at.tokenizer.encode(b"ab"),
        lambda at: at.tokenizer.encode(b"ab".decode()),
    ),
    (
        "ids must be a list or tensor (n,) of whole numbers",
        lambda at: at.tokenizer.decode(torch.tensor([[1, 2]])),
        lambda at: at.tokenizer.decode(torch.tensor([1, 2])),
        lambda at: at.tokenizer.decode([1, 2]),
    ),
    (
        "model is on meta, without values; give the first thing of mdlm.load",
        lambda at: evaluate(at, model=copy.deepcopy(at.model).to("meta")),
        lambda at: evaluate(at, model=mdlm.load(at.run)[0]),
    ),
    (
        "ids must be whole numbers (n,); give those that encode returned",
        lambda at: at.tokenizer.decode([0.5]),
        lambda at: at.tokenizer.decode(at.tokenizer.encode("ab")),
    ),
    (
        "{} is no id of this tokenizer; give {}",
        lambda at: at.tokenizer.decode([-1]),
        lambda at: at.tokenizer.decode([0, at.model.mask_id]),
    ),
    (
        "model is {}; give the first thing that mdlm.load returns",
        lambda at: sample.write(mdlm.load(at.run), at.tokenizer, "a", length=2),
        lambda at: sample.write(mdlm.load(at.run)[0], at.tokenizer, "a", length=2),
    ),
    (
        "{}; give the second thing that mdlm.load returns",
        lambda at: sample.write(at.model, mdlm.load(at.run), "a", length=2),
        lambda at: sample.write(at.model, mdlm.load(at.run)[1], "a", length=2),
    ),
    (
        "the tokenizer has {} ids, the model {} + give the one that mdlm.load returns with this",
        lambda at: sample.write(at.model, Tokenizer("byte"), "a", length=2),
        lambda at: sample.write(*mdlm.load(at.run)[:2], "a", length=2),
    ),
    (
        "the tokenizer's [END] is {}, the model's {}",
        lambda at: write_documents(at, Tokenizer("id", documents_of(at)[0].vocab_size)),
        lambda at: write_documents(at, documents_of(at)[1]),
    ),
    (
        "{} must be a tensor (B, T) of int64 ids + {}, not {}; give {}",
        lambda at: mdlm.generate(at.model, at.x.float()),
        lambda at: mdlm.generate(at.model, at.x),
    ),
    (
        "{} has {}, which is [MASK]; give the true tokens",
        FollowedIn("test_own_mask_is_no_token_of_a_text"),
    ),
    (
        "{} has ids from {} to {}; give {}",
        lambda at: mdlm.generate(at.model, at.x - 1),
        lambda at: mdlm.generate(at.model, at.x),
    ),
    (
        "{} is on {}, the model on {}; move one of them",
        lambda at: evaluate(at, scored=(at.x == 0).to("meta")),
        lambda at: evaluate(at, scored=(at.x == 0).cpu()),
    ),
    (
        "{} has {} tokens, the context only {}; cut it",
        lambda at: mdlm.generate(at.model, at.x.repeat(1, 2)),
        lambda at: mdlm.generate(at.model, at.x.repeat(1, 2)[:, :32]),
    ),
    (
        "{} must be a bool tensor {}",
        lambda at: evaluate(at, scored=at.x),
        lambda at: evaluate(at, scored=at.x == 0),
    ),
    (
        "generator must be a torch.Generator or None + {}; a number is a seed",
        lambda at: mdlm.generate(at.model, at.x, generator=0),
        lambda at: mdlm.generate(at.model, at.x, generator=torch.Generator().manual_seed(0)),
        lambda at: mdlm.generate(at.model, at.x, generator=None),
    ),
    ("generator is on {}; give one on the CPU", MACHINE),
    (
        "samples must be {} whole numbers from 0 to {}, one for each row",
        lambda at: generate(at, samples=[0]),
        lambda at: generate(at, samples=[0, 1]),
    ),
    (
        "forbid must be a list of ids",
        lambda at: generate(at, forbid=3),
        lambda at: generate(at, forbid=[3]),
    ),
    (
        "forbid has all {} ids, so nothing can be drawn; leave some out",
        lambda at: generate(at, forbid=range(at.model.vocab_size)),
        lambda at: generate(at, forbid=range(at.model.vocab_size - 1)),
    ),
    (
        "allowed must be a dict of positions below {} to bool tensors",
        lambda at: generate(at, allowed=[only(at, 0)]),
        lambda at: generate(at, allowed={0: only(at, 0)}),
    ),
    (
        "allowed has no id at position {}; leave it out, or allow one",
        lambda at: generate(at, allowed={0: only(at, -1)}),
        lambda at: generate(at, allowed={}),
        lambda at: generate(at, allowed={0: only(at, 1)}),
    ),
    (
        "forbid has all ids that allowed has at {}; leave one out of it",
        lambda at: generate(at, allowed={0: only(at, 1)}, forbid=[0, 1]),
        lambda at: generate(at, allowed={0: only(at, 1)}, forbid=[0]),
    ),
    (
        "expect must be a function or None",
        lambda at: generate(at, expect=9),
        lambda at: generate(at, expect=print),
        lambda at: generate(at, expect=None),
    ),
    (
        "observe must be a function",
        lambda at: evaluate(at, observe=9),
        lambda at: evaluate(at, observe=lambda rows, targets, logits: None),
    ),
    (
        "deadline must be a time.monotonic()",
        lambda at: evaluate(at, deadline="soon"),
        lambda at: evaluate(at, deadline=time.monotonic()),
    ),
    (
        "windows is empty, {} x {}; give at least a window of a token",
        lambda at: evaluate(at, windows=at.x[:0]),
        lambda at: evaluate(at, windows=at.x[:1, :1]),
    ),
    (
        "a model of blocks needs all {} of its context",
        lambda at: evaluate(at, model=at.blocks, windows=at.x[:, :16]),
        lambda at: evaluate(at, model=at.blocks, windows=at.x),
    ),
    (
        "windows has [MASK] where a token is scored; give the true tokens there",
        lambda at: evaluate(at, windows=at.masked, scored=at.x == 0),
        lambda at: evaluate(at, windows=at.x, scored=at.x == 0),
    ),
    (
        "scored is not for a model of blocks; leave it out",
        lambda at: evaluate(at, model=at.blocks, scored=torch.arange(32).expand(2, 32) > 3),
        lambda at: evaluate(at, model=at.blocks),
    ),
    (
        "xt must be a tensor (B, T) of int64 ids + {}; give {}",
        lambda at: at.model(at.x.float()),
        lambda at: at.model(at.x),
        lambda at: at.model(at.masked),
    ),
    (
        "xt is empty, {}; give at least a row of a token",
        lambda at: at.model(at.x[:0]),
        lambda at: at.model(at.x[:1, :1]),
    ),
    (
        "x0 must be ids {} like xt, or None",
        lambda at: at.model(at.x, x0=at.x[:1]),
        lambda at: at.model(at.x, x0=at.x),
        lambda at: at.model(at.x, x0=None),
    ),
    (
        "rows must be a tensor (n,) of int64, or None",
        lambda at: at.model(at.x, rows=[1, 2]),
        lambda at: at.model(at.x, rows=torch.tensor([1, 2])),
        lambda at: at.model(at.x, rows=None),
    ),
]

ADVICE["checkpoint.py"] = [
    (
        "{} is no path; give the folder of a run or a checkpoint",
        lambda at: mdlm.load(4),
        lambda at: mdlm.load(at.run),
        lambda at: mdlm.load(at.run / "step-4"),
    ),
    (
        "{} is no path that can be read; give that of a run",
        lambda at: mdlm.load("out\ud800"),
        lambda at: mdlm.load(str(at.run)),
    ),
    (
        "{} is {}; give the folder of a run that mdlm.py trained",
        "sample --out_dir={text}",
        "sample --out_dir={run}",
    ),
    (
        "train one with: {} --out_dir={}{}",
        "mdlm --out_dir={tmp}/none --resume",
        "mdlm --out_dir={tmp}/none",
    ),
    (
        "restore it from a copy, or give another one",
        lambda at: (
            flip(at.run / "step-4" / "config.json"),
            at.do("sample --out_dir={run}/step-4"),
        ),
        "sample --out_dir={run}/step-4",
        "sample --out_dir={run}/step-2",
    ),
    (
        "--init_from={}: leave it out to start from random weights",
        "mdlm --init_from=scratch",
        "mdlm",
    ),
    (
        "to continue the run in --out_dir give --resume",
        "mdlm --out_dir={run} --init_from=resume --overwrite",
        "mdlm --out_dir={run} --resume",
    ),
    (
        "--init_from fine-tunes the folder of a run",
        "mdlm --init_from=org/model",
        "mdlm --init_from={run}",
    ),
    (
        "use the version that wrote it, or train again",
        lambda at: (set_config(at.run, newer=1), at.do("sample")),
        lambda at: (set_config(at.run, newer=1), train_again(at), at.do("sample")),
    ),
    (
        "{} does not fit its config: it is too small; train again",
        lambda at: (set_config(at.run, n_embd=4096), at.do("sample")),
        lambda at: (set_config(at.run, n_embd=4096), train_again(at), at.do("sample")),
    ),
    (
        "take an earlier checkpoint, or restore the file that was changed",
        lambda at: (forget_token(at), at.do("sample")),
        lambda at: (forget_token(at), at.do("sample --out_dir={run}/step-2")),
        lambda at: (forget_token(at).undo(), at.do("sample")),
    ),
    (
        "take an earlier checkpoint, or train again",
        lambda at: (break_weights(at), at.do("sample")),
        lambda at: (break_weights(at), at.do("sample --out_dir={run}/step-2")),
        lambda at: (break_weights(at), train_again(at), at.do("sample")),
    ),
    (
        "{} has {}; take an earlier checkpoint, or train again",
        lambda at: (mix_names(at), at.do("sample")),
        lambda at: (mix_names(at), at.do("sample --out_dir={run}/step-2")),
        lambda at: (mix_names(at), train_again(at), at.do("sample")),
    ),
    (
        "stop the run that is training there, or give another --out_dir",
        lambda at: (hold(at), at.do("mdlm --out_dir={run} --resume")),
        lambda at: (hold(at), at.held.release(), at.do("mdlm --out_dir={run} --resume")),
        lambda at: (hold(at), at.do("mdlm --out_dir={tmp}/other"), at.held.release()),
    ),
    (
        "remove it if no run trains there, or give another --out_dir",
        lambda at: (lock_of_another(at), at.do("mdlm --out_dir={run} --resume")),
        lambda at: (lock_of_another(at).unlink(), at.do("mdlm --out_dir={run} --resume")),
        lambda at: (lock_of_another(at), at.do("mdlm --out_dir={tmp}/other")),
    ),
    (
        "do not start a second run there, which would not be noticed",
        lambda at: without_locks(at, "mdlm --out_dir={tmp}/other"),
        "mdlm --out_dir={tmp}/another",
    ),
    (
        "do not start a second run there, or type: {}",
        lambda at: without_filelock(at, "mdlm --out_dir={tmp}/other"),
        "mdlm --out_dir={tmp}/other",
    ),
]

ADVICE["memory.py"] = [
    ("lower --num_samples", MACHINE),
    ("lower --windows", MACHINE),
    ("give a smaller --preset, or lower --num_samples", MACHINE),
    ("lower the batch, the length, or the size of the model", MACHINE),
]

ADVICE["memory_needs.py"] = [
    ("this run needs about {} on {}", FollowedIn("test_advice_on_memory_is_followed")),
    ("a lower --block_size and --n_embd", FollowedIn("test_advice_on_memory_is_followed")),
]

ADVICE["trackers.py"] = [
    ("type: wandb login, or set WANDB_MODE=offline", FollowedIn("test_wandb_without_a_login")),
]

ADVICE["watch.py"] = [
    ("{}; restore it", FollowedIn("test_data_that_change_under_a_run_are_named")),
]

ADVICE["cli.py"] = [
    ("check that and the free space", MACHINE),
    ("--resume continues from what was saved", RANKS),
    ("check that path", MACHINE),
]

ADVICE["flags.py"] = [
    (
        "an empty list names no run; give the folder of a run or a checkpoint",
        lambda at: mdlm.load([]),
        lambda at: mdlm.load([at.run]),
        lambda at: mdlm.load([f"{at.run}/step-4"]),
    ),
    (
        "{}={} is not accepted; give {} + a whole number such as 4",
        "mdlm --n_layer=two",
        "mdlm --n_layer=4",
    ),
    ("a number such as 0.5", "mdlm --dropout=some", "mdlm --dropout=0.5"),
    (
        'the flags {} are no list of strings; give ["--flag=value", ...]',
        FollowedIn("test_flags_from_python_are_a_list_of_strings"),
    ),
    (
        "--{}={} is not accepted; give {}",
        lambda at: generate(at, order="up"),
        lambda at: generate(at, order="random"),
    ),
    (
        "{} is not accepted; give {}",
        "mdlm --resume=maybe",
        "mdlm --resume=false",
        "mdlm --resume=auto",
    ),
    ("--{}={} must be from {} to {}", "mdlm --dropout=2", "mdlm --dropout=0.5"),
    ("is empty: {} Give a value", "mdlm --data=", "mdlm --data={text}"),
    ("{} needs dashes: --{}", "mdlm n_layer=1", "mdlm --n_layer=1"),
    ("{} needs a flag before it + such as --{}=", "mdlm {text}", "mdlm --data={text}"),
    ("there is no flag {}{} (see --help)", "mdlm --n_lyer=2", "mdlm --n_layer=2"),
    ("{} are {} values; put a text in quotes", "sample a b", "sample 'a b'"),
    (
        "--{} needs a value: --{}=VALUE",
        "mdlm --whole --block_length=8",
        "mdlm --whole=1 --block_length=8",
    ),
    (
        "--{} is what {} said before; give --{} alone",
        "mdlm --rates=0.3-0.8 --min_rate=0.4",
        "mdlm --rates=0.3-0.8",
    ),
    (
        "{}={}... is no path ({}) + give the path of a file or folder",
        "mdlm --data=" + 5000 * "a",
        "mdlm --data={text}",
    ),
    (
        "{} and {} are both --{} now; give --{} alone",
        "mdlm --end_token=[EOT] --end_id=3 --data={ids}",
        "mdlm --end=3 --data={ids}",
    ),
    (
        "{} are the same setting; give {} alone",
        lambda at: generate(at, spacing=2, distance=4),
        lambda at: generate(at, spacing=2),
    ),
]

ADVICE["optimizers.py"] = [
    (
        "with --optimizer={}; leave it out, or give --optimizer=muon",
        "mdlm --optimizer=adamw --muon_lr=0.1",
        "mdlm --optimizer=adamw",
        "mdlm --optimizer=muon --muon_lr=0.1",
    ),
]

ADVICE["compiling.py"] = [
    ("--compile=on needs Triton, a C++ compiler", MACHINE),
]

ADVICE["environment.py"] = FollowedIn("test_the_advice_for_a_missing_package_works")
ADVICE["serve.py"] = FollowedIn("test_host_beyond_this_machine_needs_a_key")
ADVICE["app.py"] = FollowedIn("test_every_refusal_is_one_json_sentence")
ADVICE["completions.py"] = FollowedIn("test_wrong_field_is_named")

ADVICE["files.py"] = [
    (
        "check that path, or give another --out_dir",
        "mdlm --out_dir={text}/out",
        "mdlm --out_dir={tmp}/out",
    ),
    (
        "restore it from a copy, or make it again",
        lambda at: learn_again(at, cut=True),
        lambda at: learn_again(at, cut=False),
    ),
    ("free some space, or give another --out_dir", MACHINE),
    ("free some space; --resume continues from what was saved", MACHINE),
]

ADVICE["guesses.py"] = FollowedIn("test_an_answer_can_be_typed")

ADVICE["ids.py"] = [
    ("{}: it is cut off; restore it", ids(of_llm_c(400)), ids(of_llm_c(300))),
    ("{}, and {} are known; remove its {} bytes", ids(of_llm_c(300, 20230101)), ids()),
    ("is missing or no regular file; restore it", {"ids/train.bin": bytes(IDS)}, ids()),
    (
        "restore it, or state the width with --bin_dtype",
        ids(IDS.astype(np.uint8)[1:]),
        ids(),
        (ids(IDS.astype(np.uint8)[1:], IDS.astype(np.uint8)), "mdlm --data=ids --bin_dtype=uint8"),
    ),
    ("{} has no tokens; give more text", {"a.txt": "a"}, {"a.txt": TEXT}),
    ("write the ids alone, with numpy's ids.tofile", ids(npy(IDS)), ids(IDS)),
    ("write ids there, in little-endian order", ids(IDS.astype(">u2")), ids(IDS)),
    (
        "give {} + {}; {} (or --bin_dtype=uint16 if it is right)",
        ids(*[IDS.astype(np.uint32)] * 2),
        (ids(*[IDS.astype(np.uint32)] * 2), "mdlm --data=ids --bin_dtype=uint32"),
        (ids(*[IDS.astype(np.uint32)] * 2), "mdlm --data=ids --bin_dtype=uint16"),
    ),
    (
        "{}: every second id is 0; if that is wrong, give --bin_dtype={}",
        (ids(*[IDS.astype(np.int64)] * 2), "mdlm --data=ids --bin_dtype=uint32"),
        (ids(*[IDS.astype(np.int64)] * 2), "mdlm --data=ids --bin_dtype=int64"),
    ),
    (
        "restore the file, or give --vocab_size + , or --end={} if it ends documents",
        ids(np.append(IDS, np.uint16(3000))),
        ids(),
        (ids(np.append(IDS, np.uint16(3000))), "mdlm --data=ids --vocab_size=3001"),
        (ids(np.append(IDS, np.uint16(3000))), "mdlm --data=ids --end=3000"),
    ),
    (
        "restore the file, or give another --bin_dtype",
        (ids(IDS + 300), "mdlm --data=ids --bin_dtype=int32"),
        (ids(IDS.astype(np.int32), IDS.astype(np.int32)), "mdlm --data=ids --bin_dtype=int32"),
        (ids(IDS + 300), "mdlm --data=ids --bin_dtype=uint16"),
    ),
]

ADVICE["word_statistics.py"] = [
    (
        "give one of {}, as in --compare=temperature=0.5,1",
        "sample --compare=block_size=1,2",
        "sample --compare=temperature=0.5,1",
    ),
    (
        "give a value between commas, and none at the end",
        "sample --compare=steps=4,",
        "sample --compare=steps=4",
        "sample --compare=steps=4,8",
    ),
    (
        "as --compare={} gives it in every row; leave one of them out",
        "sample --compare=steps=4,8 --steps=5",
        "sample --compare=steps=4,8",
        "sample --steps=5",
    ),
    (
        "--compare has {}={} twice; give each value once",
        "sample --compare=steps=4,4",
        "sample --compare=steps=4,8",
    ),
]

ADVICE["numerics.py"] = [
    (
        "its weights are damaged; train it again",
        lambda at: numerics.checked(torch.full((1, 3), float("nan"))),
        lambda at: numerics.checked(at.model(at.x)[0]),
    ),
]

ADVICE["log.py"] = [
    (
        "raise what ended it: {}{} + ended at step {}; to go on, {} + {} --out_dir={} --resume",
        FollowedIn("test_advice_at_the_end_is_followed"),
    ),
    (
        "stopped at step {} and saved; to continue: {}",
        FollowedIn("test_hints_can_be_typed_where_they_are_read"),
    ),
    (
        "done in {} s. Now type: {}",
        FollowedIn("test_hints_can_be_typed_where_they_are_read"),
    ),
]

ADVICE["modeling_mdlm.py"] = Because("it needs a package: Hugging Face transformers")

ADVICE["operations.py"] = [
    (
        "device={} is not on this machine; give cpu or a GPU",
        lambda at: kernels.select("auto", "cuda:99"),
        lambda at: kernels.select("auto", "cpu"),
    ),
    (
        "kernels={} is not accepted; give auto, triton or torch",
        lambda at: kernels.select("cuda"),
        lambda at: kernels.select("auto"),
        lambda at: kernels.select("torch"),
        lambda at: select(at, name="triton"),
    ),
    (
        "--kernels=triton needs {} + not {} as it is here; use --kernels=auto",
        "mdlm --kernels=triton",
        "mdlm --kernels=auto",
    ),
    (
        "change n_embd / n_head, or use --kernels=auto",
        lambda at: select(at, name="triton", head_dim=48),
        lambda at: select(at, name="triton", head_dim=64),
        lambda at: select(at, name="auto", head_dim=48),
    ),
    (
        "--kernels={}: {}; use --dtype=float32",
        lambda at: select(at, name="triton", dtype=torch.bfloat16),
        lambda at: select(at, name="triton", dtype=torch.float32),
    ),
    ("The kernels need a CUDA device", NOTHING),
    ("Triton is missing (pip install triton)", MACHINE),
    ("Triton finds no C compiler or no Python.h (apt install gcc python3-dev)", MACHINE),
]

ADVICE["outputs.py"] = [
    (
        "PICTURE=-: no picture is written to standard output; give a file",
        FollowedIn("test_picture_is_not_written_to_a_file_called_dash"),
    ),
    (
        "--{}=-: standard output is closed; give a file, or open it",
        FollowedIn("test_json_for_a_closed_standard_output_is_refused"),
    ),
    ("give a file elsewhere", "sample --json={run}/log.jsonl", "sample --json={tmp}/elsewhere"),
    (
        "name the same file, {}; give two files",
        "sample --json={tmp}/o --html={tmp}/o",
        "sample --json={tmp}/o --html={tmp}/p",
    ),
    (
        "cannot be written; give a file in a folder that you may write to",
        "sample --json={tmp}/none/o",
        "sample --json={tmp}/o",
    ),
    (
        "--{}={} is no folder; give one, or none",
        "eval --pictures={text}",
        "eval --pictures={tmp}/pictures",
        "eval --pictures=none",
    ),
    (
        "check that path, or give a folder that you may write to",
        "eval --pictures={text}/pictures",
        "eval --pictures={tmp}/pictures",
    ),
    (
        "give the folder to create, such as {}=my-model",
        "export",
        "export --dest=my-model",
    ),
    ("{} exists; give the name of a new folder", "export --dest={run}", "export --dest={tmp}/new"),
    (
        "{} {}; give the name of a new folder in an existing one",
        "export --dest={tmp}/none/new",
        "export --dest={tmp}/new",
    ),
    ("{} {}; give a folder elsewhere", "export --dest={run}/hf", "export --dest={tmp}/hf"),
    (
        "give a folder inside one that you may write to",
        lambda at: not_yours(at, "export --dest={tmp}/theirs/hf"),
        "export --dest={tmp}/hf",
    ),
]

ADVICE["ownership.py"] = [
    (
        "move it away, or give another --out_dir",
        ({"out/log.jsonl": "mine"}, "mdlm --out_dir=out"),
        ({"moved/log.jsonl": "mine"}, "mdlm --out_dir=out"),
        ({"out/log.jsonl": "mine"}, "mdlm --out_dir=other"),
    ),
]

ADVICE["pace.py"] = [
    (
        "after {} s: nothing is trained; give more time",
        lambda at: at.do("mdlm --time_limit=1e-9", trains=True),
        lambda at: at.do("mdlm --time_limit=1e6 --max_steps=1", trains=True),
    ),
]

ADVICE["live_page.py"] = MACHINE
ADVICE["served_page.py"] = NOTHING

ADVICE["plots.py"] = [
    (
        "{}={}: {} is no image format; give .png or .svg",
        lambda at: plots.check_picture("PICTURE", "x.xyz"),
        lambda at: plots.check_picture("PICTURE", "x.png"),
        lambda at: plots.check_picture("PICTURE", "x.svg"),
    ),
    ("a picture (--pictures=none draws none)", FollowedIn("test_bars_and_pictures_are_no_need")),
    (
        "{}; give --pictures=FOLDER or none",
        lambda at: plots.save({"a.png": lambda path: write(path, "")}, at.tmp / "none", True),
        lambda at: plots.save({"a.png": lambda path: write(path, "")}, at.tmp, True),
        lambda at: plots.save({"a.png": lambda path: write(path, "")}, "none", True),
    ),
    (
        "{} is no log of a run; name the folder of one that mdlm.py trained",
        "eval --compare={text}",
        "eval --compare={run}",
    ),
]

ADVICE["records.py"] = [
    (
        "--data={} does not exist{}; give {}",
        "mdlm --data=none.txt",
        "mdlm --data={text}",
        "mdlm --data={records}",
        "mdlm --data={folder}",
        {"a.json": "[" + RECORD + 59 * ("," + RECORD) + "]"},
        {"a.parquet": lambda: parquet(text=["some words"] * 60)},
    ),
    (
        "save it to a file, or remove it from the folder",
        lambda at: (os.mkfifo(at.tmp / "pipe"), at.do("mdlm --data=pipe")),
        {"pipe": TEXT},
        lambda at: (
            os.mkdir("a"),
            os.mkfifo("a/b.txt"),
            os.remove("a/b.txt"),
            at.take({"a/a.txt": TEXT}),
        ),
    ),
    (
        "save its column of texts as .parquet or .jsonl",
        {"a.csv": "text\nsome words\n" * 60},
        {"a.parquet": lambda: parquet(text=["some words"] * 60)},
        {"a.jsonl": RECORD * 60},
    ),
    ("unpack it", {"a.txt.gz": gzip.compress(TEXT.encode())}, {"a.txt": TEXT}),
    (
        "give texts, or a folder with ids in train.bin and val.bin",
        {"a.npy": npy(IDS)},
        {"a.txt": TEXT},
        ids(),
    ),
    ("save it as plain text, .txt", {"a.pdf": "%PDF-1.7"}, {"a.txt": TEXT}),
    ("give texts", {"a.png": "\x89PNG"}, {"a.txt": TEXT}),
    ("unpack it, or save it as plain text", {"a.txt": b"PK\3\4"}, {"a.txt": TEXT}),
    (
        "name it .parquet",
        {"a": lambda: parquet(text=["some words"] * 60)},
        {"a.parquet": lambda: parquet(text=["some words"] * 60)},
    ),
    ("give the file without ._", {"._a.txt": b"\0\5\x16\7" + bytes(99)}, {"a.txt": TEXT}),
    (
        "convert it: iconv -f {} -t UTF-8 {} > new.txt",
        {"a.txt": TEXT.encode("utf-16-le")},
        {"new.txt": TEXT},
    ),
    (
        "--data={} cannot be read ({}); give a text file",
        unreadable,
        {"a.txt": TEXT},
    ),
    (
        "its data is in {}/data",
        "mdlm --data={run}",
        "mdlm --data={run}/data",
    ),
    (
        "give texts, or load it with --init_from",
        "mdlm --data={run}/step-4",
        "mdlm --data={text}",
        "mdlm --init_from={run}/step-4",
    ),
    (
        "{}; give {} + {}, or train.bin and val.bin",
        {"folder/notes.md": TEXT},
        {"folder/notes.txt": TEXT},
        {"folder/notes.jsonl": RECORD * 60},
        ids(),
    ),
    (
        "read too; move away what is not meant for training",
        {"folder/a.txt": TEXT, "folder/test.txt": TEXT},
        {"folder/a.txt": TEXT},
    ),
    (
        "{} is empty; mend or remove it + {} (or raise --max_bad_records={})",
        ({"a.jsonl": '{"text": ""}\n' + RECORD * 60}, "mdlm --data=a.jsonl --max_bad_records=0"),
        ({"a.jsonl": RECORD * 61}, "mdlm --data=a.jsonl --max_bad_records=0"),
        ({"a.jsonl": RECORD * 60}, "mdlm --data=a.jsonl --max_bad_records=0"),
        ({"a.jsonl": '{"text": ""}\n' + RECORD * 60}, "mdlm --data=a.jsonl --max_bad_records=1"),
    ),
    (
        "--data={} cannot be read ({}); restore it",
        {"a.jsonl.gz": gzip.compress(RECORD.encode() * 60)[:-9]},
        {"a.jsonl.gz": gzip.compress(RECORD.encode() * 60)},
    ),
    (
        "{} is {}, no JSON object; write it as {}, or remove it",
        {"a.jsonl": '"some words"\n' + RECORD * 60},
        {"a.jsonl": RECORD * 61},
        {"a.jsonl": RECORD * 60},
    ),
    (
        "{} is {}, not a text; mend or remove it",
        {"a.jsonl": '{"text": 5}\n' + RECORD * 60},
        {"a.jsonl": '{"text": "5"}\n' + RECORD * 60},
        {"a.jsonl": RECORD * 60},
    ),
    (
        "has half of a surrogate pair at {}; mend it",
        {"a.jsonl": '{"text": "\\ud83d words"}\n' + RECORD * 60},
        {"a.jsonl": '{"text": "\\ud83d\\ude00 words"}\n' + RECORD * 60},
    ),
    (
        "give {}, or leave this file out",
        "mdlm --data={records} --text_column=body",
        "mdlm --data={records} --text_column=text",
        "mdlm --data={text}",
    ),
    (
        "convert it with iconv, or give a folder with train.bin and val.bin",
        {"a.txt": (TEXT + "é").encode("latin-1")},
        {"a.txt": TEXT + "é"},
        ids(),
    ),
    (
        "{} has no column {}; give .jsonl or .parquet files",
        (
            {"folder/a.jsonl": PAIR * 60, "folder/b.txt": TEXT},
            "mdlm --data=folder --prompt_column=prompt",
        ),
        ({"folder/a.jsonl": PAIR * 60}, "mdlm --data=folder --prompt_column=prompt"),
    ),
    (
        "{} has more than {} bytes; split it",
        lambda at: learn(at, json.dumps(dict(text=TEXT)) + "\n" + RECORD * 60),
        lambda at: learn(at, RECORD * 120),
    ),
    (
        "if it is one array, name it .json",
        {"a.jsonl": "[\n" + RECORD + 59 * ("," + RECORD) + "]"},
        {"a.json": "[\n" + RECORD + 59 * ("," + RECORD) + "]"},
    ),
    (
        "mend or remove it",
        {"a.jsonl": RECORD * 60 + '{"text": "so'},
        {"a.jsonl": RECORD * 60 + '{"text": "so"}'},
        {"a.jsonl": RECORD * 60},
    ),
    (
        "name it .json, as it holds an array",
        {"a.jsonl": "[" + RECORD.strip() + "]"},
        {"a.json": "[" + RECORD.strip() + "]"},
    ),
    (
        "{}; convert it with iconv",
        {"a.json": '[{"text": "é'.encode("latin-1") + TEXT.encode() + b'"}]'},
        {"a.json": '[{"text": "é' + TEXT + '"}]'},
    ),
    (
        "{}, line {} is no JSON ({}); mend it",
        {"a.json": "[" + RECORD},
        {"a.json": '[{"text": "' + TEXT + '"}]'},
    ),
    (
        "restore it",
        {"a.parquet": lambda: parquet(text=["some words"] * 60)[:-9]},
        {"a.parquet": lambda: parquet(text=["some words"] * 60)},
    ),
    (
        "{} has {}, not texts; give --text_column",
        {"a.parquet": lambda: parquet(text=[1] * 60, body=["some words"] * 60)},
        (
            {"a.parquet": lambda: parquet(text=[1] * 60, body=["some words"] * 60)},
            "mdlm --data=a.parquet --text_column=body",
        ),
    ),
]

ADVICE["runs.py"] = [
    ("{} contradict each other; give one of them", FollowedIn("test_mistakes_get_one_sentence")),
    ("with --n_layer=1; leave it out", "mdlm --n_layer=1 --attention_every=2", "mdlm --n_layer=1"),
    ("--n_embd={} must be a multiple of {}", "mdlm --n_embd=34", "mdlm --n_embd=36"),
    ("--batch_size={} must be a multiple of {}", "mdlm --batch_size=7", "mdlm --batch_size=8"),
    (
        "--tokenizer={} is not accepted; give {}",
        "mdlm --tokenizer=bytes",
        "mdlm --tokenizer=char",
        "mdlm --tokenizer=byte",
        "mdlm --tokenizer=word",
        "mdlm --tokenizer=bpe",
        ({"a.txt": TEXT, "words.json": WORDS}, "mdlm --data=a.txt --tokenizer=words.json"),
    ),
    (
        "--prompt_column={} is --text_column; name two",
        "mdlm --data={pairs} --prompt_column=text",
        "mdlm --data={pairs} --prompt_column=prompt",
        "mdlm --data={pairs} --prompt_column=text --text_column=prompt",
    ),
    (
        "has made {} steps; give more",
        "mdlm --out_dir={run} --resume --max_steps=2",
        "mdlm --out_dir={run} --resume --max_steps=5",
    ),
    (
        "--time_limit={}, {}; give more",
        "mdlm --out_dir={run} --resume --time_limit=1e-9",
        "mdlm --out_dir={run} --resume --time_limit=1e6",
    ),
    ("give all ranks the same --preset and files", RANKS),
    (
        "give --resume to continue it, --overwrite to replace it, or another --out_dir",
        "mdlm --out_dir={run}",
        "mdlm --out_dir={run} --resume",
        "mdlm --out_dir={run} --overwrite",
        "mdlm --out_dir={run}-other",
    ),
    (
        "its run, --out_dir={}, or + {}; give {}a new --out_dir and --init_from={}",
        "mdlm --out_dir={run}/step-4 --resume --max_steps=6",
        "mdlm --out_dir={run} --resume --max_steps=6",
        "mdlm --out_dir={run}-other --init_from={run}/step-4",
    ),
    (
        "--out_dir={} {}; give another --out_dir",
        (ids(), "mdlm --out_dir=ids"),
        (ids(), "mdlm --out_dir=other"),
    ),
    (
        "would change --data={}; give another --out_dir",
        ({"texts/a.txt": TEXT}, "mdlm --data=texts --out_dir=texts"),
        ({"texts/a.txt": TEXT}, "mdlm --data=texts --out_dir=out"),
    ),
    (
        "--{}={} would be replaced; give another --out_dir",
        ({"out/latest": TEXT}, "mdlm --data=out/latest --out_dir=out"),
        ({"out/latest": TEXT}, "mdlm --data=out/latest --out_dir=other"),
    ),
    (
        "--resume and --overwrite contradict each other; give one of them",
        "mdlm --out_dir={run} --resume --overwrite",
        "mdlm --out_dir={run} --resume",
        "mdlm --out_dir={run} --overwrite",
    ),
    (
        "give --overwrite again, or {} + remove {}/latest to go on with the run before",
        lambda at: (cut_off(at), at.do("mdlm --out_dir={run} --resume")),
        lambda at: (cut_off(at), at.do("mdlm --out_dir={run} --overwrite")),
        lambda at: (
            cut_off(at),
            os.remove(at.run / "latest"),
            at.do("mdlm --out_dir={run} --resume"),
        ),
    ),
    (
        "leave the flag out, or start again with --overwrite",
        "mdlm --out_dir={run} --resume --n_layer=3",
        "mdlm --out_dir={run} --resume",
        "mdlm --out_dir={run} --overwrite --n_layer=3",
    ),
    (
        "--data={} has no columns; leave {} out",
        "mdlm --data={ids} --prompt_column=prompt",
        "mdlm --data={ids}",
    ),
    (
        "--init_from brings a tokenizer; leave --tokenizer out",
        "mdlm --init_from={run} --tokenizer=char",
        "mdlm --init_from={run}",
    ),
    (
        "restore it, or start again with --overwrite",
        lambda at: (flip(at.run / "data" / "train.bin"), at.do("mdlm --out_dir={run} --resume")),
        "mdlm --out_dir={run} --resume",
        lambda at: (flip(at.run / "data" / "train.bin"), at.do("mdlm --out_dir={run} --overwrite")),
    ),
    ("give a folder that all share", RANKS),
    (
        "--init_from={} has {}; give the same here",
        "mdlm --init_from={run} --n_layer=1 --n_embd=64",
        "mdlm --init_from={run} --n_layer=2 --n_embd=32",
    ),
    (
        "documents; give such data",
        "mdlm --init_from={documents} --data={text}",
        "mdlm --init_from={documents} --data={records}",
    ),
    (
        "a text without [END]; give a text",
        "mdlm --init_from={run} --data={records}",
        "mdlm --init_from={run} --data={text}",
    ),
    (
        "{} has other tokens than {}; give text",
        "mdlm --init_from={run} --data={ids}",
        "mdlm --init_from={run} --data={text}",
    ),
    ("the ranks see different checkpoints in {}", RANKS),
    ("give an --out_dir that all share", RANKS),
    ("give a checkpoint that all share, such as RUN/step-100", RANKS),
    (
        "Nothing is saved yet; start again with {}{} + --overwrite and",
        FollowedIn("test_advice_after_a_divergence_is_accepted"),
    ),
    (
        "The last good checkpoint is {}; --resume with {}",
        FollowedIn("test_advice_after_a_divergence_is_accepted"),
    ),
]

ADVICE["devices.py"] = [
    (
        "is not on this machine; use cpu, cuda, cuda:N, mps or auto",
        "mdlm --device=tpu",
        "mdlm --device=cpu",
        "mdlm --device=auto",
    ),
]

ADVICE["ranks.py"] = [
    (
        "start with torchrun, which sets all five, or unset them",
        lambda at: (at.patch.setenv("RANK", "0"), at.do("mdlm")),
        lambda at: (at.patch.delenv("RANK"), at.do("mdlm")),
    ),
    ("check that address, and that all ranks run", RANKS),
    ("the ranks were not started alike: {}; start all with the same flags", RANKS),
]

ADVICE["scores.py"] = [("--out_dir={} is the one that ships", NOTHING)]

ADVICE["seams.py"] = [
    (
        "take a tokenizer.json that this library has saved",
        FollowedIn("test_a_file_with_which_the_library_panics_is_named"),
    ),
    (
        "the tokenizer cannot encode {}; leave out what it lacks",
        (
            {"a.txt": TEXT + "others", "words.json": WORDS},
            "mdlm --data=a.txt --tokenizer=words.json",
        ),
        ({"a.txt": TEXT, "words.json": WORDS}, "mdlm --data=a.txt --tokenizer=words.json"),
    ),
    (
        "{}; begin it with a space, or let the gap end with the word",
        "sample --out_dir={words} --infill=█words",
        "sample --out_dir={words} '--infill=█ words'",
        "sample --out_dir={words} --infill=█",
    ),
    (
        "leave it out, or take another model",
        lambda at: Tokenizer(
            "file", of_words({"some": 0, "[UNK]": 1}, unk_token="[UNK]")
        ).encode_lossless("some are"),
        lambda at: Tokenizer(
            "file", of_words({"some": 0, "[UNK]": 1}, unk_token="[UNK]")
        ).encode_lossless("some"),
        lambda at: at.tokenizer.encode_lossless("some are"),
    ),
]

ADVICE["shards.py"] = [
    (
        "start with torchrun --standalone --nproc_per_node=RANKS mdlm.py, or give --shard=0",
        "mdlm --shard",
        "mdlm --shard=0",
    ),
    (
        "{} {}; give a number that does, or --shard for all of them",
        lambda at: check_shard(at, 2),
        lambda at: check_shard(at, 3),
        lambda at: check_shard(at, shards.ALL),
    ),
    (
        "--shard is not for --device={}; give --device=cpu, or --shard=0",
        lambda at: shards.make_shard_fn(1, torch.device("mps"), torch.float32, 1),
        lambda at: shards.make_shard_fn(0, torch.device("mps"), torch.float32, 1),
    ),
    ("{}; give an --out_dir that all ranks share", RANKS),
    ("in {}; take an earlier checkpoint, or train again", RANKS),
]

ADVICE["sources.py"] = [
    (
        "leave --tokenizer and --separator out",
        "mdlm --data=patterns --tokenizer=byte",
        "mdlm --data=patterns -block_size",
    ),
    (
        "give LOW-HIGH, such as 2-5, from 1 to {}",
        "mdlm --data=patterns -block_size --periods=5-2",
        "mdlm --data=patterns -block_size --periods=2-5",
    ),
    (
        "give a --block_size of at least {}, twice the longest period",
        "mdlm --data=patterns --block_size=8 --periods=2-5",
        "mdlm --data=patterns --block_size=10 --periods=2-5",
    ),
    (
        "{}; give other data, or train with --block_size={}",
        lambda at: (prepare_patterns(at), at.do("mdlm --data=prepared/data --block_size=32")),
        "mdlm",
        lambda at: (prepare_patterns(at), at.do("mdlm --data=prepared/data --block_size=24")),
    ),
    ("with --chat_column; {}", FollowedIn("test_mistakes_get_one_sentence")),
    ("train.bin and val.bin read; left out: {}", NOTHING),
    (
        "connect to a network, or give --data=FILE or --data=pydoc",
        lambda at: (no_network(at), at.do("mdlm --data=shakespeare")),
        "mdlm --data={text}",
        "mdlm --data=pydoc",
    ),
    (
        "this Python lacks pydoc_data; give --data=FILE",
        lambda at: (at.patch.setattr(sources, "find_topics", dict), at.do("mdlm --data=pydoc")),
        "mdlm --data={text}",
    ),
    (
        "--data is empty; give a file or a folder, or leave it out",
        lambda at: texts.open_source(mdlm.Config(data="")),
        lambda at: texts.open_source(mdlm.Config(data=at["text"])),
        lambda at: texts.open_source(mdlm.Config(data=at["folder"])),
        lambda at: (
            at.patch.setattr(sources, "shakespeare", lambda: at["text"]),
            texts.open_source(mdlm.Config()),
        ),
    ),
    (
        "{}; give more text or a smaller block",
        "mdlm --data={ids} --block_size=512",
        "mdlm --data={ids} --block_size=8",
    ),
    (
        "check tokenizer.json, --vocab_size or --bin_dtype",
        "mdlm --data={ids} --vocab_size=3",
        "mdlm --data={ids} --vocab_size=7",
    ),
    (
        "restore it, or prepare the data again",
        lambda at: (flip(at.run / "data" / "train.bin"), at.do("mdlm --data={run}/data")),
        "mdlm --data={run}/data",
        "mdlm --data={text}",
    ),
    (
        "give the id that ends documents, or leave --end out",
        "mdlm --data={ids} --vocab_size=20 --end=9",
        "mdlm --data={ids} --vocab_size=20 --end=3",
        "mdlm --data={ids} --vocab_size=20",
    ),
    ("leave it out", "mdlm --data={documents}/data --end=1", "mdlm --data={documents}/data"),
    ("with --data={}", NOTHING),
    (
        "give the number that ends documents",
        "mdlm --data={ids} --end=x",
        "mdlm --data={ids} --end=3",
    ),
    (
        "{}, which is no text file; {}",
        "mdlm --data={records} --separator=x",
        "mdlm --data={records}",
    ),
    ("{}, which has no columns; {}", "mdlm --text_column=a", "mdlm"),
    ("{}, which has no records; {}", "mdlm --max_bad_records=3", "mdlm"),
    ("{}, which is no folder of .bin files; {}", "mdlm --bin_dtype=int32", "mdlm"),
    (
        "with --init_from, which brings a tokenizer; {}",
        "mdlm --data={text} --init_from={run} --vocab_size=300",
        "mdlm --data={text} --init_from={run}",
    ),
    (
        "with --tokenizer={}; {}, or give + {} --tokenizer=word or bpe",
        "mdlm --vocab_size=300",
        "mdlm",
        "mdlm --vocab_size=300 --tokenizer=word",
        "mdlm --vocab_size=300 --tokenizer=bpe",
    ),
    (
        "{} the tokenizer.json that has this token",
        "mdlm --data={records} --end=[EOT]",
        "mdlm --data={records}",
        ({"words.json": WORDS}, "mdlm --data={records} --tokenizer=words.json --end=[EOT]"),
    ),
    ("{}, which is a single text; {}", "mdlm --pack=true", "mdlm"),
    (
        "with --objective={}; leave it out",
        "mdlm --data={records} --objective=ar --pack=true",
        "mdlm --data={records} --objective=ar",
    ),
    (
        "with --document_length={}, as a window holds one; leave it out",
        "mdlm --data={records} --document_length=predicted --pack=true",
        "mdlm --data={records} --document_length=predicted",
    ),
    ("{}, a folder of ids; {}", "mdlm --data={ids} --tokenizer=byte", "mdlm --data={ids}"),
    (
        "{}, whose tokenizer.json has one; {}",
        "mdlm --data={documents}/data --vocab_size=300",
        "mdlm --data={documents}/data",
    ),
    (
        "{}, whose meta.json notes it; {}",
        "mdlm --data={documents}/data --bin_dtype=uint8",
        "mdlm --data={documents}/data",
    ),
    (
        "{}, whose header says it; {}",
        (
            {"ids/train.bin": of_llm_c(300), "ids/val.bin": of_llm_c(300)},
            "mdlm --data=ids --bin_dtype=uint16",
        ),
        ({"ids/train.bin": of_llm_c(300), "ids/val.bin": of_llm_c(300)}, "mdlm --data=ids"),
    ),
    (
        "{}, which has no documents; {}, or give the --end",
        "mdlm --data={ids} --pack=true",
        "mdlm --data={ids}",
        "mdlm --data={ids} --pack=true --end=3",
    ),
    (
        "--end={} must be below V = {}",
        "mdlm --data={ids} --vocab_size=7 --end=9",
        "mdlm --data={ids} --vocab_size=7 --end=3",
    ),
    (
        "has an unusable dtype, characters, aligned or entropy ({}); remove it",
        ids(dtype="int4"),
        ids(),
    ),
    (
        "{}, more than --block_size={}; shorten them or raise it",
        lambda at: open_prompts(at, 8),
        lambda at: open_prompts(at, 64),
    ),
    (
        "there is no text but the ends of its documents, or no answer; give some",
        (ids(IDS * 0, IDS * 0), "mdlm --data=ids --end=0"),
        (ids(), "mdlm --data=ids --end=0"),
    ),
]

ADVICE["templates.py"] = [
    (
        "{}; give UTF-8 text, for instance by iconv",
        ({"batch": b"\xe9\n"}, "sample --batch=batch"),
        ({"batch": "a█\n"}, "sample --batch=batch"),
    ),
    (
        "{} is empty: its size is 0 bytes; give a file of templates",
        ({"batch": ""}, "sample --batch=batch"),
        ({"batch": "a█\n"}, "sample --batch=batch"),
    ),
    (
        "{} cannot be read ({}); give a file of templates",
        "sample --batch=nowhere",
        ({"batch": "a█\n"}, "sample --batch=batch"),
    ),
    (
        "--{}={} is a device; give {}, or - for a pipe",
        "sample --batch=/dev/zero",
        ({"batch": "a█\n"}, "sample --batch=batch"),
    ),
    (
        "{}; give texts that fit into the context",
        lambda at: (at.patch.setattr(templates, "MAX_TEMPLATE", 9), fill_lines(at, ["a" * 9])),
        lambda at: (at.patch.setattr(templates, "MAX_TEMPLATE", 9), fill_lines(at, ["a"])),
    ),
    (
        "{}; give them in several batches",
        lambda at: (at.patch.setattr(templates, "MAX_BATCH", 9), fill_lines(at, ["a", "b"])),
        lambda at: (at.patch.setattr(templates, "MAX_BATCH", 9), fill_lines(at, ["a"])),
    ),
    (
        "the tokenizer keeps nothing of {}; give a word, or no prompt",
        "sample --out_dir={words} '--prompt= '",
        "sample --out_dir={words} --prompt=some",
        "sample --out_dir={words}",
    ),
    (
        "the prompt has {} tokens of {}; raise --length, or shorten it",
        "sample --prompt=abcd --length=2",
        "sample --prompt=abcd --length=6",
        "sample --prompt=a --length=2",
    ),
    (
        "write a text with █ or [MASK] for each missing token",
        ({"batch": "a█\n\n"}, "sample --batch=batch"),
        ({"batch": "a█\n█\n"}, "sample --batch=batch"),
        ({"batch": "a█\n[MASK]\n"}, "sample --batch=batch"),
    ),
    (
        "mark each missing token with █ or [MASK], a gap of unknown length with [___]",
        "sample --infill=abc",
        "sample --infill=ab█",
        "sample --infill=ab[MASK]",
        "sample --infill=ab[___]",
    ),
    (
        "a gap must not follow [___] + write █ for each token",
        "sample --infill=a[___]█",
        "sample --infill=a██",
    ),
    (
        "the template has {} tokens, the context only {}; shorten it",
        "sample --infill={long}█",
        "sample --infill=a█",
    ),
]

CONSTRAINED = FollowedIn("test_a_refused_pattern_can_be_mended")
ADVICE["effects.py"] += [
    (
        "where texts of a list are ranked and nothing is drawn; leave it out",
        FollowedIn("test_a_list_that_is_ranked_needs_no_setting_of_draws"),
    )
]
ADVICE["constraint.py"] = CONSTRAINED
ADVICE["templates.py"] += [
    ("no text of {} tokens matches {} + {}; write another number of █, or [___:...]", CONSTRAINED),
    ("{} needs at least {} tokens + {}, more than max_gap={}; raise --max_gap", CONSTRAINED),
    ("{}; write one, or \\[ for the text", CONSTRAINED),
    (
        "{}; leave a space, or leave the pattern out",
        Because("no tokenizer of the tests does that: others are refused before"),
    ),
]

ADVICE["texts.py"] = [
    (
        "needs a tokenizer with a chat template; give such a folder as --init_from",
        FollowedIn("test_mistakes_get_one_sentence"),
    ),
    ("{}; give a file with text in it", {"a.txt": ""}, {"a.txt": TEXT}),
    (
        "with no record left to validate; give more records",
        ({"a.jsonl": PAIR}, "mdlm --data=a.jsonl --prompt_column=prompt"),
        ({"a.jsonl": PAIR * 60}, "mdlm --data=a.jsonl --prompt_column=prompt"),
    ),
    (
        "its lines are JSON: name it .jsonl to learn only their texts",
        {"a.txt": RECORD * 60},
        {"a.jsonl": RECORD * 60},
    ),
    (
        "give {}, which is, or leave it out",
        ({"a.txt": "one two\r\n\r\n" * 100}, "mdlm --data=a.txt '--separator=\\n\\n'"),
        ({"a.txt": "one two\r\n\r\n" * 100}, "mdlm --data=a.txt '--separator=\\r\\n\\r\\n'"),
        ({"a.txt": "one two\r\n\r\n" * 100}, "mdlm --data=a.txt"),
    ),
    (
        "leave it out",
        ({"a.txt": TEXT}, "mdlm --data=a.txt --separator=@"),
        ({"a.txt": TEXT}, "mdlm --data=a.txt"),
    ),
    (
        "--data={} changed while it was read; try again",
        lambda at: read_twice(at, lambda path: write(path, TEXT + TEXT)),
        lambda at: read_twice(at, lambda path: None),
    ),
    (
        "{} --block_size={}; shorten them or raise it",
        "mdlm --data={pairs} --prompt_column=prompt --block_size=8",
        "mdlm --data={pairs} --prompt_column=prompt --block_size=64",
        (
            {"a.jsonl": PAIR.replace("defghi", "d") * 60},
            "mdlm --data=a.jsonl --prompt_column=prompt --block_size=8",
        ),
    ),
]

ADVICE["tokenizer_json.py"] = [
    (
        "the vocabulary has a token {} of its own; train without it",
        lambda at: export.to_library(Tokenizer("file", of_words({"[MASK]": 0, "some": 1}))),
        lambda at: export.to_library(Tokenizer("file", of_words({"some": 0, "words": 1}))),
    ),
    (
        "some ids below {} are unused; train with a tokenizer without gaps",
        lambda at: export.to_library(Tokenizer("file", of_words({"some": 0, "words": 2}))),
        lambda at: export.to_library(Tokenizer("file", of_words({"some": 0, "words": 1}))),
    ),
]

ADVICE["pretrained.py"] = FollowedIn("test_refused_and_what_helps")
ADVICE["remote_code.py"] = FollowedIn("test_unfit_code_is_one_sentence")
ADVICE["parts.py"] = FollowedIn("test_names_that_ranks_cannot_read_are_one_sentence")
ADVICE["chat.py"] = FollowedIn("test_mistakes_get_one_sentence")
ADVICE["lora.py"] = FollowedIn("test_mistakes_get_one_sentence")
ADVICE["first_token.py"] = FollowedIn("test_first_tokens_are_measured")
ADVICE["adapt.py"] = FollowedIn("test_the_study_plans_its_runs")
ADVICE["questions.py"] = FollowedIn("test_mistakes_get_one_sentence")
ADVICE["lengths.py"] = FollowedIn("test_the_yardstick_says_what_it_needs")
ADVICE["build_automaton.py"] = MACHINE
ADVICE["held.py"] = Because("it asks for Linux, or repeats what a rank said")
ADVICE["english.py"] = Because("it downloads packages of Debian")
ADVICE["tokenizer.py"] = [
    ("{}; remove it from the text", FollowedIn("test_text_with_the_mask_of_an_encoder_is_refused")),
    (
        "{} is unknown; remove it, or train on text that has it",
        "sample --prompt=é",
        "sample --prompt=e",
        "sample --prompt=é --out_dir={ar}",
    ),
    (
        "{} is no id of a text; give ids below {}",
        lambda at: Tokenizer("id", 7).encode("1 9"),
        lambda at: Tokenizer("id", 7).encode("1 6"),
    ),
    (
        "{}; take one with a smaller vocabulary",
        lambda at: to_json(at, 60),
        lambda at: to_json(at, 6),
    ),
    (
        "--end={} is no special token of {}; give one",
        ({"words.json": WORDS}, "mdlm --data={records} --tokenizer=words.json --end=some"),
        ({"words.json": WORDS}, "mdlm --data={records} --tokenizer=words.json --end=[EOT]"),
    ),
    (
        "{}; remove it from the text, or train with another --end",
        FollowedIn("test_data_that_spells_the_end_is_refused"),
    ),
    (
        "{}: each would end a document; give another token",
        FollowedIn("test_the_unknown_token_ends_no_document"),
    ),
    (
        "{} shows numbers, no text; give another tokenizer.json",
        FollowedIn("test_other_runs_take_a_file_of_the_small_format"),
    ),
    (
        "{} has none of {}; name its --end",
        ({"words.json": WORDS}, "mdlm --data={records} --tokenizer=words.json"),
        ({"words.json": WORDS}, "mdlm --data={records} --tokenizer=words.json --end=[EOT]"),
    ),
    (
        "--vocab_size={} is too small; give more than the 256 bytes take",
        "mdlm --tokenizer=bpe --vocab_size=100",
        "mdlm --tokenizer=bpe --vocab_size=300",
    ),
]

ADVICE["variants"] = [
    (
        "leave {} out, or add {}",
        "mdlm --data={records} --masking=bernoulli",
        "mdlm --data={records}",
        "mdlm --data={records} --document_length=predicted --masking=bernoulli",
    ),
    ("leave one of them out", FollowedIn("test_either_of_two_variants_can_be_left_out")),
]

# For each pair that a file in variants/ refuses: flags of a run with both, and of either.
COMBINED = {
    ("autoregressive", "blocks"): ("", "--objective=ar", "--block_length=8"),
    ("autoregressive", "prompts"): ("--data={pairs}", "--objective=ar", "--prompt_column=prompt"),
    ("autoregressive", "time_conditioning"): ("", "--objective=ar", "--time_conditioning"),
    ("blocks", "documents"): ("--data={records}", "--block_length=8", "--document_length=given"),
    ("blocks", "rates"): ("", "--block_length=8", "--masking=bernoulli"),
    ("blocks", "time_conditioning"): ("", "--block_length=8", "--time_conditioning"),
    ("prompts", "documents"): (
        "--data={pairs}",
        "--prompt_column=prompt",
        "--document_length=given",
    ),
    ("prompts", "rates"): (
        "--data={pairs} --document_length=predicted",
        "--prompt_column=prompt",
        "--rates=0-0.5",
    ),
}

ADVICE["blocks.py"] = [
    (
        "needs a --block_length below",
        "mdlm --infill_share=0.5",
        "mdlm --infill_share=0.5 --block_length=8",
    ),
    ("{} must divide --block_size={}", "mdlm --block_length=5", "mdlm --block_length=8"),
    (
        "with --block_length=1: of a single token there is one mask rate; leave it out",
        "mdlm --block_length=1 --rate_margin=0.2",
        "mdlm --block_length=1",
    ),
]

ADVICE["autoregressive.py"] = [
    (
        "with --objective=ar, which masks no tokens; leave it out",
        "mdlm --objective=ar --masking=bernoulli",
        "mdlm --objective=ar",
    ),
]

ADVICE["time_conditioning.py"] = [
    (
        "with --time_conditioning, as the model must learn all rates; leave it out",
        "mdlm --time_conditioning --rate_margin=0.2",
        "mdlm --time_conditioning",
    ),
]

ADVICE["rates.py"] = [
    ("--rates={}: {} is above {}; swap them", "mdlm --rates=0.9-0.2", "mdlm --rates=0.2-0.9"),
    (
        "--rates={} is not accepted; give {} + {} or LOW-HIGH, such as 0.3-0.8",
        "mdlm --rates=low",
        "mdlm --rates=uniform",
        "mdlm --rates=cosine",
        "mdlm --rates=0.3-0.8",
    ),
    ("--rates={} must be from 0 to 1", "mdlm --rates=0.5-1.5", "mdlm --rates=0.5-1"),
    (
        "it must go from 0 to 1, or from 1 to 0, without a flat or returning part",
        lambda at: rates.check_schedule("half", lambda u: u / 2),
        lambda at: rates.check_schedule("down", lambda u: 1 - u**2),
    ),
    (
        "with {}, which sets the mask rates of the whole run; leave it out",
        "mdlm --masking=bernoulli --rate_margin=0.2",
        "mdlm --masking=bernoulli",
    ),
]

ADVICE["viewer.py"] = [('"use strict"', NOTHING)]

ADVICE["harness.py"] = [
    ("this needs lm-evaluation-harness ({}); type: {}", MACHINE),
    ("{}={} of --model_args is not accepted; give a number", MACHINE),
    (
        "{} is not accepted; give a text, or a list of texts",
        FollowedIn("test_generation_kwargs_are_those_of_the_harness"),
    ),
]

ADVICE["animate.py"] = [
    (
        "give a page that sample.py --html wrote",
        "animate {text} {tmp}/x.svg",
        lambda at: (
            at.do("sample --steps=1 --length=4 --html={tmp}/page.html", trains=True),
            at.do("animate {tmp}/page.html {tmp}/x.svg"),
        ),
    ),
]

ADVICE["check.py"] = [
    ("give a lesson, 1 to {}, and a file", FollowedIn("test_right_answer_passes")),
    ("look for a loop that does not end", FollowedIn("test_endless_answer_is_stopped")),
]

ADVICE["checks.py"] = FollowedIn("test_right_answer_passes")

ADVICE["likeliest.py"] = [
    (
        "give the folder of a run and a template",
        "likeliest {run}",
        "likeliest {run} a█",
    ),
    (
        "this needs a model that fills gaps, and █ for each missing token",
        "likeliest {run} a[___]",
        "likeliest {run} a██",
    ),
]

ADVICE["attention.py"] = [
    ("attention needs a row of cos and sin for each of {} positions", NOTHING),
]

ADVICE["scope.py"] = [
    (
        "wait for its end, or start another process",
        FollowedIn("test_a_call_trains_in_a_thread_and_no_second_one_beside_it"),
    ),
]

ADVICE["smoke.py"] = [
    (
        "set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter",
        FollowedIn("test_without_a_gpu_the_kernels_come_first"),
    ),
]

for name in ("prefetch.py", "newton_schulz.py"):
    ADVICE[name] = [("there is no CUDA device; MDLM_TRITON=1 checks it in the emulator", MACHINE)]
ADVICE["cubins.py"] = [
    ("there is no CUDA device; set MDLM_TRITON=1 to compile without one", MACHINE),
    ("{} is missing; first run `python studies/cubins.py make`", MACHINE),
    ("{} has no {}; run `studies/cubins.py make` again", MACHINE),
]
ADVICE["phases.py"] = [("{}: first give one of {}, then flags of mdlm.py", NOTHING)]

ADVICE["minimal.py"] = [
    ("type: {} -m pip install torch", MACHINE),
    *(
        (advice, FollowedIn("test_minimal_answers_a_mistake_with_one_sentence"))
        for advice in (
            "the file or the template is empty; give another, or leave it out",
            "{} is no UTF-8 text that can be read ({}); give another file",
            "the text has {} characters; give {} to {}",
            "give a template of at most {} characters, all of which occur in the text",
        )
    ),
]

ADVICE["patterns.py"] = [
    (
        "give --seeds and --sequences of at least 1",
        "patterns {patterns} {tmp}/p.png --seeds=0",
        "patterns {patterns} {tmp}/p.png --seeds=1 --sequences=1",
    ),
    (
        "{} learned {}; give a run with --data=patterns",
        "patterns {run} {tmp}/p.png",
        "patterns {patterns} {tmp}/p.png",
    ),
]

ADVICE["pictures.py"] = [
    ("lower center", NOTHING),
    ("My lord, I pray you, ", NOTHING),
    (
        "--{} has no effect with --draw={}; leave it out",
        "pictures {tmp}/p.png --draw=joint --seed=1",
        "pictures {tmp}/p.png --draw=joint",
    ),
    (
        "--text has {} tokens; give 1 to {}",
        "pictures {tmp}/p.png --draw=noise --run={run} --text=" + "some" * 20,
        "pictures {tmp}/p.png --draw=noise --run={run} --text=some",
    ),
    (
        "--rate={} is not accepted for {} tokens; {}",
        "pictures {tmp}/p.png --draw=guesses --run={run} --text=some --rate=0",
        "pictures {tmp}/p.png --draw=guesses --run={run} --text=some --rate=1",
    ),
    (
        "give more than 0 and at most {}",
        "pictures {tmp}/p.png --draw=guesses --run={run} --text=some --rate=2",
        "pictures {tmp}/p.png --draw=guesses --run={run} --text=some --rate=0.5",
    ),
    (
        "--run names {} runs; give at most 4",
        "pictures {tmp}/p.png --draw=losses --run=a,b,c,d,e",
        "pictures {tmp}/p.png --draw=losses --run={run}",
    ),
    (
        "give one of them",
        "pictures {tmp}/p.png --run={run} --text=a█ --compare=a.json,b.json",
        (TWO_RATES, "pictures {tmp}/p.png --compare=a.json,b.json"),
    ),
    (
        "{} has blocks; give --run without, or of --infill_share",
        "pictures {tmp}/p.png --text=a█ --run={blocks}",
        "pictures {tmp}/p.png --text=a█ --run={run}",
        "pictures {tmp}/p.png --text=a█ --run={whole}",
    ),
    (
        "--orders={} is not accepted; give two of {}",
        "pictures {tmp}/p.png --orders=random --run={run}",
        "pictures {tmp}/p.png --orders=random,spread --run={run}",
    ),
    (
        "; give at most {}, and at least two masks (█)",
        "pictures {tmp}/p.png --orders=random,spread --text=a█ --run={run}",
        "pictures {tmp}/p.png --orders=random,spread --text=a██ --run={run}",
    ),
    (
        "[___] has no known length in a picture; write █ for each token",
        "pictures {tmp}/p.png --text=a[___] --run={run}",
        "pictures {tmp}/p.png --text=a█ --run={run}",
    ),
    (
        "--steps={} is not accepted; give 2 to 64",
        "pictures {tmp}/p.png --orders=random,spread --steps=1 --run={run}",
        "pictures {tmp}/p.png --orders=random,spread --steps=2 --run={run}",
    ),
    (
        "--{} has no effect without {}; give that too",
        "pictures {tmp}/p.png --run={run}",
        "pictures {tmp}/p.png --run={run} --text=a█",
        "pictures {tmp}/p.png --run={run} --orders=random,spread",
    ),
    (
        "give evaluations of diffusion models",
        (TWO_EVALUATIONS, "pictures {tmp}/p.png --compare=a.json,b.json"),
        (TWO_RATES, "pictures {tmp}/p.png --compare=a.json,b.json"),
    ),
]

ADVICE["figures.py"] = [
    (
        "{} is no figure; give {}",
        "figures speed {tmp}/p.png",
        "figures baseline {tmp}/p.png",
        "figures sampling {tmp}/p.png",
    ),
]
