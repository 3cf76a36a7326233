import itertools
import math


def bound(log_p, x, mask_id):
    T = len(x)
    total = 0
    for l in range(1, T + 1):  # noqa: E741
        sets = list(itertools.combinations(range(T), l))
        for hide in sets:
            hide = list(hide)
            xt = x.clone()
            xt[hide] = mask_id
            total -= log_p(xt)[hide, x[hide]].mean() / len(sets)
    return total / T


def bits(nats, tokens, characters):
    return nats * tokens / characters / math.log(2)
