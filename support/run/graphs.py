"""CUDA graphs: Python launches a step or a prediction with a few calls instead of hundreds.

A GPU computes the kernels of a small model faster than Python launches them: with preset gpu it was
idle for more than half of the time (results/hopper.md). All shapes of a step are static, and what
changes from step to step (learning rates, the number of the step, its texts) is in tensors. So the
kernels can be recorded once, as graphs, and replayed: one graph for each function that
run.engine.call calls in a step (mdlm.py: backward, clip, update). `replay` does the same for
predictions: in evaluations, samplers and servers.
"""

import contextlib
import functools
import gc
import threading
import weakref
from collections import OrderedDict

import torch

from nanomdlm.support.cli.terminal import warn

WARM_UP = 3  # steps before the recording: they compile, and allocate the optimizers' state


def capture(function, inputs, pool, what, **how):
    """(graph, output) of function(*inputs), which is recorded but not computed.

    what: name of what is recorded. If it cannot be, print a warning with the reason; return None.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    gc.collect()  # nothing may be freed during the recording
    try:
        with torch.cuda.graph(graph, pool=pool, **how):
            output = function(*inputs)
    except RuntimeError as e:
        why = str(e).strip().splitlines()[0]
        warn(f"mdlm: {what} are not replayed as CUDA graphs, which only costs time: {why}")
        torch.cuda.set_stream(stream)  # PyTorch has not left the stream of the recording
        return None
    return graph, output


# ---- Training steps
def can_record(run):
    """Whether the steps of a run can be recorded: on one GPU, without accumulation.

    They need not be compiled. Steps are not recorded that differ in more than numbers: those of
    some objectives, and of pretrained networks without our attention (steps_are_alike).
    """
    config = run.config
    alone = run.engine.world == 1 and not config.shard and config.gradient_accumulation_steps == 1
    alike = run.objective.steps_are_alike and (not config.network or run.model.steps_are_alike)
    return alike and alone and run.device.type == "cuda"


class Recorder:
    """Calls the functions of a step; after WARM_UP steps it records them, and then replays them.

    The functions take (run, *tensors) and return a tensor or None. In each step they must be called
    in the same order, because their graphs share memory, and with tensors of the same shapes.

    last: the function that ends a step
    """

    def __init__(self, last):
        self.last = last
        self.steps = 0  # steps that have ended
        self.recorded = {}  # function -> (graph, the tensors that it reads, its output)
        self.failed = False  # whether a recording has failed: then nothing is replayed
        self.pool = torch.cuda.graph_pool_handle()

    def call(self, function, run, *tensors):
        """Return function(run, *tensors), replayed if it is recorded."""
        # Steps are counted, not the calls of each function: all must be recorded in the same step,
        # as each reads what those before it wrote, and some are also called before the first step.
        if self.steps >= WARM_UP and not self.failed and function not in self.recorded:
            self.record(function, run, tensors)
        self.steps += function is self.last
        if self.failed or function not in self.recorded:
            return function(run, *tensors)
        graph, inputs, output = self.recorded[function]
        if inputs:  # the graph reads these tensors and no others
            torch._foreach_copy_(inputs, tensors)
        graph.replay()
        return output

    def record(self, function, run, tensors):
        """Record a call. Nothing is computed: that happens when the graph is replayed.

        If it cannot be recorded, print a warning with the reason; nothing is replayed from then on.
        """
        inputs = [x.clone() for x in tensors]
        params = list(run.model.parameters())
        grads = [p.grad for p in params]  # the function may replace them, and then fail
        made = capture(functools.partial(function, run), inputs, self.pool, "steps")
        if made:
            graph, output = made
            self.recorded[function] = (graph, inputs, output)
            return
        self.failed = True
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad


# ---- Predictions
MOST = 64  # calls of a model that are remembered; then the one unused for longest is forgotten
MOST_BYTES = 1 << 26  # of a call's outputs, which its graph keeps; larger ones keep a GPU busy
LOCK = threading.RLock()  # a graph has one set of inputs, for all threads
CALLS = weakref.WeakKeyDictionary()  # model -> Calls
SWITCH = threading.local()  # .off: whether this thread is within `run_eagerly`


class Calls:
    """The calls of a model: key -> (graph, tensors that it reads, those that it writes).

    None: it was called once; False: it is not recorded.
    """

    def __init__(self):
        self.known = OrderedDict()  # the one that was used last is at the end
        self.failed = False  # whether a recording has failed: then nothing is recorded any more
        self.pool = torch.cuda.graph_pool_handle()

    def find(self, key):
        """What is known of a call, which is None if nothing is; it was used last."""
        found = self.known.pop(key, None)
        self.known[key] = found
        while len(self.known) > MOST:
            self.known.popitem(last=False)
        return found


@contextlib.contextmanager
def run_eagerly():
    """Context manager: this thread replays no predictions."""
    was = getattr(SWITCH, "off", False)
    SWITCH.off = True
    try:
        yield
    finally:
        SWITCH.off = was


def can_replay(model, device):
    """Whether `replay` may be called: a whole network on a GPU, which only predicts."""
    if device.type != "cuda" or getattr(SWITCH, "off", False) or torch.is_grad_enabled():
        return False
    if not isinstance(model, torch.nn.Module) or model.training:
        return False
    is_sharded = hasattr(next(model.parameters()), "device_mesh")
    # Another stream may be recording itself, or run beside this one with the graphs' tensors.
    return not is_sharded and torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


def replay(model, function, tensors, *key):
    """function(*tensors), a tuple of tensors. From the second call on that is alike, its kernels
    are replayed as a CUDA graph.

    model: whose weights the function reads; the graphs are forgotten with it
    function: waits for no tensor's value, and changes nothing that is there when it has ended
    tensors: on the model's device
    key: hashable; with shapes and weights it tells calls apart

    Call it where can_replay. The outputs are new tensors, as the function's own would be.
    """
    device = tensors[0].device
    dtype = torch.get_autocast_dtype(device.type)
    is_cast = torch.is_autocast_enabled(device.type)
    # Weights that were moved, or changed their dtype, are not those that a graph reads.
    weights = next(model.parameters()).data_ptr()
    shapes = [(x.shape, x.dtype) for x in tensors]
    key = (*key, *shapes, weights, is_cast, dtype, torch.get_float32_matmul_precision())
    with LOCK, torch.cuda.device_of(tensors[0]):
        if model not in CALLS:
            CALLS[model] = Calls()
        calls = CALLS[model]
        begins = key not in calls.known
        found = calls.find(key)
        if begins or found is False or calls.failed:
            outputs = function(*tensors)  # the first time: compiles kernels, makes buffers
            if sum(x.nbytes for x in outputs) > MOST_BYTES:
                calls.known[key] = False
            return outputs
        if found is None:
            inputs = [x.clone() for x in tensors]
            # What autocast has cached would not be recorded, and is freed with its cache.
            with torch.autocast(device.type, dtype, is_cast, cache_enabled=False):
                how = dict(what="predictions", capture_error_mode="thread_local")
                made = capture(function, inputs, calls.pool, **how)
            if not made:
                calls.failed = True
                calls.known.clear()
                return function(*tensors)
            graph, outputs = made
            found = calls.known[key] = (graph, inputs, outputs)
        graph, inputs, outputs = found
        torch._foreach_copy_(inputs, list(tensors))
        graph.replay()
        return tuple(x.clone() for x in outputs)
