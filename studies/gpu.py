"""What a GPU is asked, question by question; studies/gpu.sh runs these in their order.

    python studies/gpu.py step            # one part, or several: step start generate baselines ...
    python studies/gpu.py step --device=cpu    # a rehearsal, of tiny sizes

step: is torch.compile needed, where a step is replayed as CUDA graphs?
start: where do the seconds before the first step go, and those of an evaluation?
generate: what does a call of the sampler cost, as a CUDA graph and without?
baselines: how fast is PyTorch at its best, without our convolution, autotuned, FlexAttention?
pretrained: what do a head of 769 columns and dense masks cost networks of others?
grouped: our attention of 32 heads of 128 on 8 of keys against FlexAttention and SDPA's dense masks.
gpt2: a step of 124 M parameters, with our kernels and with PyTorch's.
repeat: are 300 steps the same to the bit when they are repeated?
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/gpu.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import torch
import torch.nn.functional as F

import bench
import mdlm
from nanomdlm.kernels import operations as kernels
from nanomdlm.kernels.reference import block_spans, document_spans, window_spans
from nanomdlm.support.cli import devices
from nanomdlm.support.run import graphs
from studies import phases

ROOT = Path(__file__).resolve().parent.parent


class Study:
    """What all parts share: a device, whether sizes are tiny, seconds for each timing, a table."""

    def __init__(self, options):
        self.device = devices.use_device(options.device, 0, 1)
        self.tiny = self.device.type != "cuda"
        self.seconds = 0.02 if self.tiny else options.seconds
        self.dtype = devices.pick_dtype("auto", self.device)
        flags = dict(json=options.json, time_limit=options.time_limit, seconds=self.seconds)
        self.options = bench.Options(**flags)
        self.table = bench.ResultsTable(options.part, self.options, self.device)

    def config(self, preset, **settings):
        config = bench.preset_config("cpu" if self.tiny else preset)
        if self.tiny:
            config = replace(config, n_layer=2, n_embd=32, n_head=2, block_size=32, batch_size=4)
        return replace(config, **settings)

    def race_steps(self, config, **more):
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as folder:
            bench.write_tokens(folder, config.vocab_size)
            bench.race_steps(config, folder, self.device, self.table, self.options, **more)

    def start_run(self, config, compiled, kernel="auto"):
        with tempfile.TemporaryDirectory() as folder:  # on a GPU the corpus is copied there
            bench.write_tokens(folder, config.vocab_size)
            return bench.start_run(config, folder, self.device, self.dtype, kernel, compiled)

    def race(self, title, calls):
        """Time calls in turn; a line for each."""
        self.table.begin(title)
        times = bench.race(calls, self.device, self.seconds)
        for name, (t, spread) in times.items():
            self.table.add(dict(operation=title, contestant=name, ms=t * 1e3, spread=spread * 1e3))

    def graph(self, function):
        """A call that replays `function` as a CUDA graph; on a CPU, that calls it."""
        return function if self.tiny else bench.captured(function, [()])


# ---- step, gpt2, baselines: training steps on random tokens
def step(study):
    executions = ("compiled", bench.EAGER_GRAPHS)
    study.race_steps(study.config("gpu"), executions=executions)


def gpt2(study):
    study.race_steps(study.config("gpt2"), executions=("compiled",), checks=False)


def baselines(study):
    compiled = dict(executions=("compiled",), checks=False)
    study.race_steps(study.config("gpu", conv=0), **compiled, what="gpu, --conv=0")
    for T in (16,) if study.tiny else (256, 1024):
        B, H = (2, 2) if study.tiny else (32768 // T, 12)
        case = bench.attention(study.device, torch.bfloat16, B, T, H, 64, prepares=True)
        if study.tiny:  # FlexAttention has no backward pass on a CPU, and nothing is recorded
            case.cost.pop("forward + backward")
            case.graph = False
            case.inputs = lambda seed, make=case.inputs: [x.detach() for x in make(seed)]
        bench.measure(case, study.table, study.device, study.seconds, (1, 1))
    autotuned = dict(executions=(bench.AUTOTUNED_STEP,), checks=False, kernels=["torch"])
    study.race_steps(study.config("gpu"), **autotuned)


# ---- start: whole runs, with a clock at their phases
def start(study):
    """Each mode with empty caches of the compilers, then with full ones."""
    steps = 6 if study.tiny else 40
    flags = [f"--max_steps={steps}", f"--eval_interval={steps // 2}"]
    flags += [f"--data={os.environ.get('MDLM_GPU_TEXT') or 'pydoc'}", "--overwrite"]
    if study.tiny:
        flags += ["--device=cpu", "--n_layer=2", "--n_embd=32", "--n_head=2", "--block_size=32"]
        flags += ["--batch_size=4", "--eval_windows=8", "--compile=on"]
    for mode, what in phases.MODES.items():
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | dict(TRITON_CACHE_DIR=f"{folder}/triton")
            env |= dict(TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor")
            for caches in ("empty", "full") if mode != "layers" else ("empty",):
                where = dict(operation="start", what=what, caches=caches)
                command = [sys.executable, "studies/phases.py", mode, *flags]
                command += [f"--out_dir={folder}/out"]
                env["MDLM_BEGAN"] = str(time.monotonic())
                done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
                if done.returncode:
                    why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                    study.table.fail(where, mode, why[:200], True)
                    continue
                seconds = json.loads(done.stdout.strip().splitlines()[-1])
                study.table.begin(f"{what}; {caches} caches")
                for phase, times in seconds.items():
                    times = times if isinstance(times, list) else [times]
                    each = ", ".join(f"{t:.2f}" for t in times)
                    row = dict(phase=phase, seconds=sum(times), each=each)
                    study.table.add(row | dict(where=where))
                study.table.measured += 1


# ---- generate: the sampler, with its calls as CUDA graphs and without
def generate(study):
    tiny = {}
    if study.tiny:
        shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=97)
        shape |= dict(num_attention_heads=2, num_key_value_heads=1)
        tiny = dict(batches=(1, 2), shape=bench.LLAMA | shape, block=4)
    config = study.config("gpu")
    bench.race_writers(config, study.device, study.table, study.options, **tiny)


# ---- pretrained: what networks of others compute
def pretrained(study):
    M, V = (64, 97) if study.tiny else (8192, 30522)
    contestants = {}
    for K in (768, 769, 776):
        h, W = (torch.randn(n, K, device=study.device).to(study.dtype) for n in (M, V))
        h.requires_grad_()
        W.requires_grad_()
        targets = torch.randint(V, (M,), device=study.device)
        weights = torch.full((M,), 1 / M, device=study.device)

        def head(h=h, W=W, targets=targets, weights=weights):
            loss = kernels.linear_cross_entropy(h, W, targets, weights)
            torch.autograd.grad(loss, (h, W))

        contestants[f"K = {K}"] = head
    study.race(f"head of an encoder and its bias: M={M} V={V}", contestants)

    B, H, T, D = (2, 2, 32, 16) if study.tiny else (32, 12, 512, 64)
    q, k, v = (torch.randn(B, H, T, D, device=study.device).to(study.dtype) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    dense = torch.ones(B, 1, T, T, dtype=torch.bool, device=study.device)

    def attend(mask):
        out = F.scaled_dot_product_attention(q, k, v, mask)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    masks = {"no mask": None, "a dense mask": dense}
    calls = {name: partial(attend, mask) for name, mask in masks.items()}
    study.race(f"SDPA, forward and backward: B={B} H={H} T={T} D={D}", calls)
    study.table.begin("Training steps of networks of random weights")
    for name in SHAPES:
        train_network(study, name)


# ---- grouped: attention as decoders of 2026 have it
def grouped(study):
    """Whole texts, documents of T / 8, blocks of 16, a window of T / 8; forward and backward."""
    B, T, H, G, D = (1, 64, 4, 1, 32) if study.tiny else (4, 4096, 32, 8, 128)
    device = study.device
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, T, n, D, generator=g).to(device, study.dtype) for n in (H, G, G))
    ends = torch.arange(T, device=device) % (T // 8) == T // 8 - 1
    seen = {
        "whole texts": None,
        "documents": document_spans(ends[None]),
        "blocks": block_spans(T // 2, 16, device),
        "a window": window_spans(None, T // 16, T, device),
    }
    for name, spans in seen.items():
        contestants = dict(mdlm=lambda *x, spans=spans: kernels.grouped_attention(*x, spans=spans))
        contestants["SDPA"] = partial(kernels.grouped_attention_ref, spans=spans)
        contestants["FlexAttention"] = bench.grouped_flex(spans)
        exact = kernels.grouped_attention_ref(*(x[:1].double() for x in (q, k, v)), spans=spans)
        calls = {}
        for contestant, function in contestants.items():
            error = (function(q, k, v)[:1] - exact).abs().max() / exact.abs().max()
            if error > 0.02:  # wrong results get no time
                study.table.fail(dict(operation=name), contestant, f"WRONG: {error:.1e}", True)
                continue
            calls[f"{contestant}, forward"] = partial(function, q, k, v)
            if not (study.tiny and contestant == "FlexAttention"):  # no backward pass on a CPU
                calls[f"{contestant}, with backward"] = partial(differentiate, function, q, k, v)
        del exact
        study.race(f"grouped attention, {name}: B={B} T={T} H={H} G={G} D={D}", calls)


def differentiate(function, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


SHAPES = {
    "BERT, 12 x 768": dict(
        model_type="bert",
        architectures=["BertForMaskedLM"],
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=512,
    ),
    "Qwen2, 24 x 896, grouped queries": dict(
        model_type="qwen2",
        architectures=["Qwen2ForCausalLM"],
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=512,
    ),
}


def train_network(study, name):
    """Tokens per second of mdlm.py with --network, read from its log."""
    shape = SHAPES[name] | dict(vocab_size=256)
    T, batch, steps = (32, 4, 6) if study.tiny else (512, 32, 30)
    if study.tiny:
        shape |= dict(hidden_size=28, intermediate_size=56, num_hidden_layers=2)
        shape |= dict(num_attention_heads=2)
        shape |= dict(num_key_value_heads=1) if "num_key_value_heads" in shape else {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        out = Path(folder, "out")
        command = [sys.executable, "mdlm.py", f"--network={folder}/config.json"]
        command += [f"--block_size={T}", f"--batch_size={batch}", f"--max_steps={steps}"]
        command += ["--data=pydoc", "--tokenizer=byte", "--log_interval=5", "--eval_windows=8"]
        command += [f"--out_dir={out}", f"--device={study.device}", "--compile=off"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        where = dict(operation="training step", what=f"{batch} x {T} tokens")
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            return study.table.fail(where, name, why[:200])
        log = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
        speed = [r["tokens_per_second"] for r in log if "tokens_per_second" in r][-1]
        row = dict(contestant=name, ms=batch * T / speed * 1e3, rate=f"{speed:,.0f} tokens/s")
        study.table.add(where | row)


# ---- repeat: the same steps twice
def tensors_of(run):
    """All that a step changes."""
    tensors = [*run.model.state_dict().values(), *run.averaged.state_dict().values()]
    states = [state for opt in run.optimizers for state in opt.state.values()]
    return tensors + [x for state in states for x in state.values() if torch.is_tensor(x)]


def repeat(study):
    n = 4 if study.tiny else 300
    for execution in ("compiled", bench.EAGER_GRAPHS):
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as folder:
            config = study.config("gpu")
            bench.write_tokens(folder, config.vocab_size)
            compiled = execution == "compiled"
            args = (config, folder, study.device, study.dtype, "auto", compiled)
            run = bench.start_run(*args)
        if not study.tiny:
            bench.set_execution(run, execution)
        first = graphs.WARM_UP + 2
        for i in range(first):
            mdlm.train_step(run, i, progress=0.75)
        run.check_finite()
        begin = [x.clone() for x in tensors_of(run)]
        outcomes = []
        for _ in range(2):
            for x, y in zip(tensors_of(run), begin, strict=True):
                x.copy_(y)
            values = []
            for i in range(first, first + n):
                mdlm.train_step(run, i, progress=0.75)
                values.append(run.pending.pop(i, torch.tensor([run.loss, run.grad_norm])))
            outcomes.append((torch.stack(values).cpu(), [x.clone() for x in tensors_of(run)]))
        (a, xs), (b, ys) = outcomes
        different = (a != b).any(1).nonzero().flatten().tolist()
        weights = sum(not torch.equal(x, y) for x, y in zip(xs, ys))
        said = f"equal to the bit: {not (different or weights)}"
        if different or weights:
            said += f"; first at step {different[:1]}, losses by {(a - b).abs().max():.1e} at most"
            said += f", {weights} of {len(xs)} tensors"
        study.table.note(f"{n} steps twice, {execution}: {said}")
        study.table.measured += 1


PARTS = dict(
    step=step,
    start=start,
    generate=generate,
    baselines=baselines,
    pretrained=pretrained,
    grouped=grouped,
    gpt2=gpt2,
    repeat=repeat,
)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="auto", help="cpu: a rehearsal, of tiny sizes")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing each contestant")
    parser.add_argument("--time_limit", type=float, default=0.0, help="begin nothing after it")
    parser.add_argument("--json", default="", help="write the results to this file")
    options = parser.parse_args(argv)
    study = Study(options)
    if study.tiny:
        study.table.note("no CUDA device: a rehearsal, whose times mean nothing")
    PARTS[options.part](study)
    return study.table.close()


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
