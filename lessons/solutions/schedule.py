import math


def at_start(V):
    return math.log(V)


def scale(step, steps, warmup):
    rise = (step + 1) / (warmup + 1)
    fall = 2 * (1 - step / steps)
    return min(1, rise) * min(1, fall)
