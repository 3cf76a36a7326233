def parallel_error(p):
    product = p.sum(1, keepdim=True) * p.sum(0, keepdim=True)
    return (p - product).abs().sum() / 2
