def shown(ce, share):
    return sum(c * s for c, s in zip(ce, share))


def weights(share):
    if min(share) == 0:
        return None  # what was never drawn has no loss to weigh
    return [1 / len(share) / s for s in share]
