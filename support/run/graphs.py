"""CUDA graphs: Python launches a training step with three calls instead of hundreds.

A GPU computes the kernels of a small model faster than Python launches them: with preset gpu it was
idle for more than half of the time (results/hopper.md). All shapes of a step are static, and what
changes from step to step (learning rates, the number of the step, its texts) is in tensors. So the
kernels can be recorded once, as graphs, and replayed: one graph for each function that
run.engine.call calls in a step (mdlm.py: backward, clip, update).
"""

import gc

import torch

from nanomdlm.support.cli.terminal import warn

WARM_UP = 3  # steps before the recording: they compile, and allocate the optimizers' state


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
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        params = list(run.model.parameters())
        grads = [p.grad for p in params]  # the function may replace them, and then fail
        gc.collect()  # nothing may be freed during the recording
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                output = function(run, *inputs)
        except RuntimeError as e:
            why = str(e).strip().splitlines()[0]
            warn(f"mdlm: steps are not replayed as CUDA graphs, which only costs time: {why}")
            self.failed = True
            torch.cuda.set_stream(stream)  # PyTorch has not left the stream of the recording
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
        else:
            self.recorded[function] = (graph, inputs, output)
