def log_fill(model, x, fill, mask_id):
    x = x.clone()
    total = 0
    for token in fill:
        i = int((x == mask_id).nonzero()[0])
        total += model(x[None])[0, i].log_softmax(-1)[token]
        x[i] = token
    return total
