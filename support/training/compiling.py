"""torch.compile: when a run uses it, what is compiled, and how a run learns meanwhile."""

import copy
import functools
import math
import multiprocessing
import signal
import sys

import torch
from torch.utils.checkpoint import checkpoint as recomputed

from support import ranks
from support.flags import NO_LIMIT
from support.terminal import warn
from support.training import shards
from support.training.optimizers import average

# Inductor's own random numbers make dropout slow on a CPU. vec_isa_ok: compile no program only to
# see whether the compiler knows AVX.
TAKES = "about 20 s"
LONG = 120  # seconds: a run that takes less is not compiled
OPTIONS = {"fallback_random": True, "cpp.vec_isa_ok": True}


def should_compile(run, able):
    """Whether to compile: as --compile says; auto on a GPU, or if the run takes 120 s or more.

    None: that depends on how long a step takes; see is_long.
    """
    asked = run.config.compile
    able = ranks.all_reduce(torch.tensor(float(able)), "MIN").item() > 0  # on all ranks
    if asked == "on" and not able and sys.platform == "linux":
        warn("--compile=on needs Triton, a C++ compiler and Python's headers; running without it")
        return False
    if asked != "auto" or not able:
        return asked == "on"
    if run.device.type == "cuda":
        return True
    limit = run.config.time_limit or math.inf
    if run.config.max_steps < NO_LIMIT and limit >= LONG:
        return None
    return is_long(limit)


def is_long(seconds):
    """Whether a run that takes so many seconds on this rank is worth compiling."""
    return ranks.all_reduce(torch.tensor(seconds), "MAX").item() >= LONG


def compile_network(run, compiled, in_background=False):
    """Set run.network: the model, compiled, and in DDP with several ranks.

    in_background: a run on a CPU that ends by the clock cannot repeat to the bit anyway, and may
    begin while a second process compiles. What is compiled in this one waits for its first call:
    returns whether there is such.
    """
    config = run.config
    config.compile = "on" if compiled else "off"
    config.dtype = str(run.dtype).removeprefix("torch.")
    alone = run.world == 1 and not config.shard and type(run.model).__module__ == "__main__"
    if config.recompute:
        for layer in run.model.layers:
            layer.forward = functools.partial(recomputed, layer.forward, use_reentrant=False)
    if compiled and (run.device.type == "cpu" or config.shard):
        if in_background and config.time_limit and alone:
            run.log.say(f"compiling in a second process, {TAKES}; training begins without it")
            run.compiler = start_compiler(run)
            return False
        compile_layers(run.model.layers)
    elif compiled:
        run.network = torch.compile(run.model)
        run.average = torch.compile(average)  # eager it takes a kernel for each parameter
        if config.optimizer == "muon":
            run.optimizers[0].compile()
    if run.world > 1 and not config.shard:
        run.network = torch.nn.parallel.DistributedDataParallel(run.network)
    run.exchange = shards.exchanger(run.network)
    return compiled


def compile_layers(layers):
    """C++ takes long to compile: both parts of a layer are compiled once, for all layers.

    Not the last MLP, which reads masked rows alone: their number may vary.
    """
    for layer in layers:
        layer.before_mlp = torch.compile(layer.before_mlp, options=OPTIONS)
    for layer in layers[:-1]:
        layer.mlp = torch.compile(layer.mlp, options=OPTIONS)


def start_compiler(run):
    """Start a process that fills the compiler's cache; meanwhile the run uses a thread less."""
    shape = (run.micro_batch, run.config.block_size)
    model = copy.deepcopy(run.model).to("meta")  # without numbers: nothing is shared or sent
    args = (model, shape, run.dtype, torch.get_num_threads())
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=fill_cache, args=args, daemon=True)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run alone
    process.start()
    signal.signal(signal.SIGINT, handler)
    process.threads = torch.get_num_threads()
    torch.set_num_threads(max(1, process.threads - 1))
    return process


def fill_cache(model, shape, dtype, threads):
    """Compile what training with batches of `shape` (B, T) will need."""
    # The cache's keys are pickled, and pickle names an object after the first module that has it.
    # Here that would be __mp_main__, a second name of mdlm.py that the run does not have.
    sys.modules.pop("__mp_main__")
    torch.set_num_threads(threads)
    model = model.to_empty(device="cpu")
    compile_layers(model.layers)
    try:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            view = model.objective.view(torch.zeros(shape, dtype=torch.long))
            model.features(view).sum().backward()
    except Exception as e:  # whatever it is, the run goes on without
        sys.exit(f"torch.compile: {str(e).splitlines()[0]}")


def use_compiled(run):
    """Once the other process is done: compile here too, from its cache."""
    if run.compiler and not run.compiler.is_alive():
        compiler = run.compiler
        run.compiler = None
        torch.set_num_threads(compiler.threads)
        if compiler.exitcode:
            failed = f"the process that compiles failed (exit code {compiler.exitcode})"
            run.log.say(f"{failed}: training goes on without torch.compile")
        else:
            compile_layers(run.model.layers)
            run.log.say(f"compiled from step {run.step + 1} on")
