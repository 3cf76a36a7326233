"""CUDA graphs: the work of a training step is launched by three calls instead of hundreds.

A small model's step is over before Python has launched it: preset gpu waited for Python for more
than half of its time (results/h200.md). All shapes of a step are static, and what changes from step
to step (learning rates, the number of the step, its texts) are tensors. So the kernels of a step
can be recorded once and replayed.
"""

import gc

import torch

from support.terminal import warn

WARM_UP = 3  # steps before the recording: they compile, and make the state of the optimizers


def can_record(run, compiled):
    """Whether the steps of a run can be recorded: compiled, on one GPU, without accumulation."""
    alone = run.world == 1 and not run.config.shard and run.config.gradient_accumulation_steps == 1
    return compiled and alone and run.device.type == "cuda" and run.objective.steps_are_alike


class Recorder:
    """Calls the functions of a step with (run, *tensors); after a few steps it replays them.

    Their tensors must have the same shapes in each call, and the functions must be called in the
    same order in each step, because they share their memory. They return a tensor or None.
    last: the last function of a step.
    """

    def __init__(self, last):
        self.last = last
        self.steps = 0  # that have ended
        self.recorded = {}  # function -> (graph, its inputs, its output)
        self.failed = False
        self.pool = torch.cuda.graph_pool_handle()

    def call(self, function, run, *tensors):
        # All are recorded in the same step, as each reads what those before it have written. (Some
        # may have been called before the first step.)
        if self.steps >= WARM_UP and not self.failed and function not in self.recorded:
            self.record(function, run, tensors)
        self.steps += function is self.last
        if self.failed or function not in self.recorded:
            return function(run, *tensors)
        graph, inputs, output = self.recorded[function]
        if inputs:
            torch._foreach_copy_(inputs, tensors)
        graph.replay()
        return output

    def record(self, function, run, tensors):
        """Record a call. Nothing is computed: that happens when the graph is replayed.

        If it cannot be recorded, a warning says why, and this step and all others run without.
        """
        inputs = [x.clone() for x in tensors]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        params = list(run.model.parameters())
        grads = [p.grad for p in params]
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
