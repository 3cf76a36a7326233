"""Run mdlm.py with a clock at its phases: where do the seconds before the first step go?

    python studies/phases.py whole --max_steps=40 --data=my.txt --out_dir=out-phases

The first word says what is compiled: whole (what mdlm.py does), layers (half layers, as on a CPU),
none. On a GPU the steps are replayed as CUDA graphs in all three. Prints a JSON object: seconds of
each phase, each time that it ran. `python studies/gpu.py start` runs all, with empty and full
caches of the compilers.
"""

import json
import os
import sys
import time
from pathlib import Path

BEGAN = float(os.environ.get("MDLM_BEGAN") or time.monotonic())  # when Python was started
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # python studies/phases.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

import contextlib
from functools import partial

import torch

import mdlm
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import compiling, graphs, session
from nanomdlm.support.run.optimizers import average_to_compile, update

# A phase is a function of a module or class.
PHASES = dict(find=session, open_data=session.Session, make_run=mdlm, prepare_engine=compiling)
PHASES |= dict(evaluate=mdlm, show_samples=mdlm, save=session.Session)
MODES = {
    "none": "without torch.compile, as --compile=off does",
    "whole": "torch.compile of the network, as mdlm.py does",
    "layers": "torch.compile of half layers, as on a CPU",
}


def compile_network(mode, run, compiled, in_background=False):
    """In place of compiling.compile_network, for the modes that mdlm.py does not have."""
    run.config.compile = "off"
    run.config.dtype = str(run.engine.dtype).removeprefix("torch.")
    run.engine.average = average_to_compile
    if mode == "layers":
        compiling.compile_layers(run.model.layers)
        run.optimizers[0].compile()
    if run.device.type == "cuda":
        run.engine.call = graphs.Recorder(last=update).call
    return mode == "layers"


def main(argv):
    mode, *flags = argv or [""]
    if mode not in MODES:
        raise UserError(f"{mode!r}: first give one of {', '.join(MODES)}, then flags of mdlm.py")
    imports = time.monotonic() - BEGAN
    owners = PHASES | dict(train_step=mdlm)
    seconds = {name: [] for name in owners}

    def timed(name, function):
        def call(*args, **more):
            began = time.monotonic()
            result = function(*args, **more)
            if name != "train_step" and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            seconds[name].append(round(time.monotonic() - began, 3))
            return result

        return call

    if mode != "whole":
        compiling.compile_network = partial(compile_network, mode)
    for name, owner in owners.items():
        setattr(owner, name, timed(name, getattr(owner, name)))
    with contextlib.redirect_stdout(sys.stderr):
        code = mdlm.main(flags, BEGAN)
    seconds["first_steps"] = seconds.pop("train_step")[: graphs.WARM_UP + 2]
    print(json.dumps(dict(imports=round(imports, 3), **seconds, total=time.monotonic() - BEGAN)))
    return code


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
