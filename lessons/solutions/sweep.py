def fewest(steps, quality, share):
    return min(s for s, q in zip(steps, quality) if q >= share * max(quality))
