"""Lesson 4: the learning rate in a run, for each --lr_schedule.

python lessons/programs/schedules.py
"""

import sys

sys.path.insert(0, ".")  # run it in the root of the repository
import mdlm

print("step      " + "".join(f"{step:>6}" for step in range(0, 601, 75)))
for schedule in ("trapezoid", "cosine", "linear", "constant"):
    config = mdlm.Config(lr_schedule=schedule, warmup_steps=50)
    row = [mdlm.lr_scale(config, step, step / 600) for step in range(0, 601, 75)]
    print(f"{schedule:<10}" + "".join(f"{value:6.2f}" for value in row))
