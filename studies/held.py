"""What each rank of --shard holds of a network of others: a table, measured on this CPU.

    python studies/held.py             # 1, 2 and 4 ranks of a Llama of 49 M parameters
    python studies/held.py --lora=8    # the same with adapters

Each number of ranks makes one step from a folder of Hugging Face with random weights. The columns
are MB, the largest of its ranks: `loading` is what memory rises by at most while the two networks
are made, that which learns and the average. Needs Linux, 3 GB of memory and transformers.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/held.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import ctypes
import gc
import json
import multiprocessing
import os
import re
import socket
import tempfile
import time

import torch

import mdlm
from nanomdlm.support.cli.environment import optional
from nanomdlm.support.errors import UserError
from nanomdlm.support.networks import library
from nanomdlm.support.run import session, shards


def size(tensors):
    """Bytes of this rank's parts of tensors, each counted once."""
    parts = {t.data_ptr(): t.nbytes for t in map(shards.local, tensors)}
    return sum(parts.values())


def bytes_held(run):
    """{what: bytes} that this rank holds of a Run; gradients, while there are any."""
    models = (run.model, run.averaged)
    slots = [s for optimizer in run.optimizers for s in optimizer.state.values()]
    named = [pair for m in models for pair in torch.nn.Module.named_parameters(m)]
    frozen = [p for _, p in named if not p.requires_grad]
    return dict(
        weights=size(run.model.parameters()),
        gradients=size(p.grad for p in run.model.parameters() if p.grad is not None),
        average=size(run.averaged.parameters()) if run.averaged is not run.model else 0,
        moments=size(t for s in slots for t in s.values() if t.dim()),
        frozen=size(frozen),
    )


def peak():
    """Bytes of memory that this process has had at most since the last call (Linux)."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024


# A Llama of 49 M parameters: 12 layers of 3.4 M, and 8.4 M in its embedding and head.
SIZES = dict(hidden_size=512, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=8)
SIZES |= dict(intermediate_size=1536, vocab_size=8192, max_position_embeddings=64)
FLAGS = ["--device=cpu", "--dtype=float32", "--compile=off", "--block_size=16", "--batch_size=8"]
FLAGS += ["--max_steps=2", "--eval_windows=2", "--optimizer=adamw", "--shard"]


def save_network(folder, **sizes):
    """Write a random Llama and a tokenizer of bytes to a folder, as Hugging Face has them, and a
    text to train on."""
    transformers = library()
    tokenizers = optional("tokenizers", "this measurement")
    config = transformers.AutoConfig.for_model("llama", **SIZES | sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    vocab = {c: i for i, c in enumerate(sorted(byte_level.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.pre_tokenizer = byte_level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text(Path(mdlm.__file__).read_text(encoding="utf-8"))
    gc.collect()  # the network, which its modules hold in circles


def run_rank(folder, flags, env, report):
    """Begin a run as one of its ranks and make a step; write to `report` what was held. Ends the
    process with the exit code of program.run."""
    os.environ.update(env)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    torch.set_num_threads(1)
    flags = [f"--init_from={folder}", f"--data={folder / 'text.txt'}", *FLAGS, *flags]
    sys.exit(entry.run(lambda argv: one_step(argv, report), flags))


def one_step(argv, report):
    """Make a step of a run with these flags, and write what this rank held in it."""
    found = {}
    make_run = mdlm.make_run

    def watched(*args):
        peak()
        before = peak()
        run = make_run(*args)
        found["loading"] = peak() - before
        return run

    mdlm.make_run = watched
    given = mdlm.run_config.parse(mdlm.Config, argv, "")
    with session.open_session(mdlm.Config, given, time.monotonic()) as it:
        run = mdlm.set_up(it)
        mdlm.set_rates(run, 0, 1.0)
        mdlm.compute_gradients(run, 0, 1.0)
        gradients = bytes_held(run)["gradients"]
        mdlm.clip(run)
        mdlm.update(run)
        found |= bytes_held(run) | dict(gradients=gradients)
        named = torch.nn.Module.named_parameters(run.model)  # the frozen ones too
        found["parameters"] = sum(p.numel() for _, p in named)
        report.write_text(json.dumps(found))
    return 0


def give_back():
    """Undo program.keep_memory, so that what is freed goes back to the system at once (glibc)."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-4, 1 << 16)  # M_MMAP_MAX
    mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    mallopt(-1, 1 << 16)  # M_TRIM_THRESHOLD


def measure(folder, n, *flags):
    """[{what: bytes}] of the n ranks of a run that begins with the network of a folder."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = dict(WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    env |= dict(TORCHELASTIC_RUN_ID="held")
    reports = [folder / f"rank-{rank}.json" for rank in range(n)]
    flags = [*flags, f"--out_dir={folder / f'of-{n}'}", "--overwrite"]
    fork = multiprocessing.get_context("fork")  # nothing is imported again
    processes = []
    for rank, report in enumerate(reports):
        own = env | dict(RANK=str(rank), LOCAL_RANK=str(rank))
        processes.append(fork.Process(target=run_rank, args=(folder, flags, own, report)))
        processes[-1].start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise UserError(f"a run on {n} ranks failed, as said above; mend that and measure again")
    return [json.loads(report.read_text()) for report in reports]


KINDS = ("weights", "gradients", "average", "moments", "frozen", "loading")


def rows(folder, numbers, *flags):
    """For each number of ranks {what: bytes}, the largest of its ranks."""
    for n in numbers:
        found = measure(folder, n, *flags)
        largest = {kind: max(each[kind] for each in found) for kind in KINDS}
        yield dict(ranks=n, parameters=found[0]["parameters"]) | largest


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: none")
    parser.add_argument("--json", action="store_true", help="bytes, in a JSON object for each row")
    options = parser.parse_args(argv)
    if sys.platform != "linux":
        raise UserError("studies/held.py reads /proc, which Linux alone has; run it there")
    if not options.json:
        print(f"| ranks | {' | '.join(KINDS)} |", "|" + " --- |" * (1 + len(KINDS)), sep="\n")
    give_back()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        save_network(folder)
        for row in rows(folder, (1, 2, 4), *[f"--lora={options.lora}"] * bool(options.lora)):
            cells = [f"{row[kind] / 1e6:.1f}" for kind in KINDS]
            table = f"| {row['ranks']} | {' | '.join(cells)} |"
            print(json.dumps(row) if options.json else table, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
