"""torch.compile: whether a run uses it, what is compiled, and compiling in a second process."""

import copy
import functools
import math
import multiprocessing
import signal
import sys

import torch
from torch.utils.checkpoint import checkpoint as recomputed

from nanomdlm.kernels.launch import can_compile
from nanomdlm.support.cli.devices import flops_per_token
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.run import graphs, ranks, shards
from nanomdlm.support.run.optimizers import average_to_compile, scale_gradients, update

TAKES = "about 20 s"  # how long compiling takes on a CPU, for messages
LONG = 120  # seconds: shorter runs on a CPU are not compiled with --compile=auto
SPEED = 1e11  # FLOP/s of a CPU, roughly: by these a run of steps is short or long
# fallback_random: Inductor's own random numbers make dropout slow on a CPU.
# vec_isa_ok: assume that the compiler supports AVX instead of compiling a test program to find out.
OPTIONS = {"fallback_random": True, "cpp.vec_isa_ok": True}


# ---- Whether to compile
def should_compile(run, able, seconds=0.0):
    """Whether to use torch.compile, by --compile; auto: on a GPU, or if the run is long.

    able: whether this rank has a compiler; seconds: that the run which is resumed has taken. It
    follows from the settings, as compiled steps differ in their last bits.
    """
    config = run.config
    able = ranks.all_reduce(torch.tensor(float(able)), "MIN").item() > 0  # on all ranks
    if config.compile == "on" and not able and sys.platform == "linux":
        warn("--compile=on needs Triton, a C++ compiler and Python's headers; running without it")
        return False
    if config.compile != "auto" or not able:
        return config.compile == "on"
    if run.device.type == "cuda":
        return True
    left = (config.time_limit or math.inf) - seconds
    tokens = (config.max_steps - run.step) * config.batch_size * config.block_size
    return min(left, tokens * flops_per_token(run.model) / SPEED) >= LONG


# ---- What is compiled
def prepare_engine(run):
    """Compile the network of a run if that pays off; returns whether its next call compiles it in
    this process, which takes a while."""
    compiled = should_compile(run, can_compile(run.device), run.clock.seconds)
    run.log.describe(run, compiled)
    begins = compile_network(run, compiled, in_background=True)
    if begins:
        run.log.say(f"compiling, {TAKES} (--compile=off starts at once)")
    return begins


def compile_network(run, compiled, in_background=False):
    """Prepare a run to train: compile its network, wrap it in DDP, record its steps.

    Changes run.engine.

    compiled: whether to use torch.compile; run.config keeps the answer
    in_background: whether compiling may happen in a second process while training begins with the
    eager network. This is done only on a CPU with --time_limit, because such a run is never
    repeated bit for bit.

    Returns whether the next call of the network compiles it in this process, which takes a while.
    """
    config = run.config
    engine = run.engine
    # What "auto" has become, for the log and the checkpoint.
    config.compile = "on" if compiled else "off"
    config.dtype = str(engine.dtype).removeprefix("torch.")
    if config.recompute:
        for layer in run.model.layers:
            layer.forward = functools.partial(recomputed, layer.forward, use_reentrant=False)
    begins = compiled and compile_parts(run, in_background)
    if engine.world > 1:
        connect_ranks(engine, config)
    if graphs.can_record(run):
        if not compiled:
            engine.average = average_to_compile  # a few launches; lerp takes one per parameter
        engine.call = graphs.Recorder(last=update).call
    return begins


def compile_parts(run, in_background):
    """Compile what takes most of a step, or begin to in a second process; returns as above."""
    config = run.config
    engine = run.engine
    on_cpu = run.device.type == "cpu"
    # A second process imports the main program. That must be mdlm.py, not a Python caller's script.
    is_program = type(run.model).__module__ == "__main__"
    is_alone = on_cpu and engine.world == 1 and not config.shard
    if in_background and config.time_limit and is_alone and is_program:
        run.log.say(f"compiling in a second process, {TAKES}; training begins without it")
        engine.compiler = start_compiler(run)
        return False
    # What is around the layers of a pretrained network is not made to be compiled.
    if on_cpu or config.shard or config.network:
        compile_layers(run.model.layers)
        return True
    engine.network = torch.compile(run.model)
    # The following are compiled too: eager, they launch a kernel for each parameter.
    engine.average = torch.compile(average_to_compile)
    engine.scale_gradients = torch.compile(scale_gradients)
    if config.optimizer == "muon":
        run.optimizers[0].compile()
    return True


def connect_ranks(engine, config):
    """Let the ranks exchange gradients: by DDP, or sharded, as the network itself does."""
    if not config.shard:
        engine.network = torch.nn.parallel.DistributedDataParallel(engine.network)
        engine.network.broadcast_buffers = False  # in each step: they are equal tables
    engine.exchange = shards.exchanger(engine.network)


def compile_layers(layers):
    """Compile the two halves of each layer, instead of the whole network.

    All layers are alike, so the slow C++ compiler works only once for each half. The last MLP stays
    eager: it reads only the masked rows, and their number varies from step to step. Layers of
    others are compiled whole.
    """
    if not hasattr(layers[0], "before_mlp"):
        for layer in layers:
            layer.compile(options=OPTIONS)
        return
    for layer in layers:
        layer.before_mlp = torch.compile(layer.before_mlp, options=OPTIONS)
    for layer in layers[:-1]:
        layer.mlp = torch.compile(layer.mlp, options=OPTIONS)


# ---- Compiling in a second process, while the run trains
def start_compiler(run):
    """Start a process that fills the compiler's cache on disk; return the process.

    Until use_compiled is called, the run uses one thread less, to leave it a core.
    """
    shape = (run.micro_batch, run.config.block_size)
    model = copy.deepcopy(run.model).to("meta")  # no weights, so nothing has to be sent
    args = (model, shape, run.engine.dtype, torch.get_num_threads())
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=fill_cache, args=args, daemon=True)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the run itself handles Ctrl-C
    process.start()
    signal.signal(signal.SIGINT, handler)
    process.threads = torch.get_num_threads()
    torch.set_num_threads(max(1, process.threads - 1))
    return process


def fill_cache(model, shape, dtype, threads):
    """Compile what training with batches of `shape` (B, T) needs; called in the second process.

    model: a model without weights (on the meta device); they do not matter for the compiler
    threads: the number that the run uses, as the code depends on it
    """
    # The cache's keys are pickled, and pickle names an object after the first module that holds it.
    # In this process that would be __mp_main__, a second name of mdlm.py. The run does not know
    # that name, so it would not find what was cached here.
    sys.modules.pop("__mp_main__")
    torch.set_num_threads(threads)
    model = model.to_empty(device="cpu")
    compile_layers(model.layers)
    try:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            view = model.objective.view(torch.zeros(shape, dtype=torch.long))
            model.features(view).sum().backward()
    except Exception as e:  # any failure: the run continues without torch.compile
        sys.exit(f"torch.compile: {str(e).splitlines()[0]}")


def use_compiled(run):
    """Once the second process has ended, compile the run's layers from the cache that it filled.

    Called before each step; does nothing until then, and after that.
    """
    compiler = run.engine.compiler
    if compiler and not compiler.is_alive():
        run.engine.compiler = None
        torch.set_num_threads(compiler.threads)
        if compiler.exitcode:
            failed = f"the process that compiles failed (exit code {compiler.exitcode})"
            run.log.say(f"{failed}: training continues without torch.compile")
        else:
            compile_layers(run.model.layers)
            run.log.say(f"compiled from step {run.step + 1} on")
