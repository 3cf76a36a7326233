def top_p(p, share):
    sorted_p, order = p.sort(-1, descending=True)
    before = sorted_p.cumsum(-1) - sorted_p  # what the likelier tokens have together
    kept = sorted_p * (before < share)
    p = p.new_zeros(p.shape).scatter(-1, order, kept)  # back to the order of the tokens
    return p / p.sum(-1, keepdim=True)
