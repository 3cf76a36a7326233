import torch


def generate(model, x, mask_id, steps):
    x = x.clone()
    for s in range(steps, 0, -1):
        now = (x == mask_id) & (torch.rand(x.shape) < 1 / s)
        if now.any():
            p = model(x)[now].softmax(-1)
            x[now] = torch.multinomial(p, 1)[:, 0]
    return x
