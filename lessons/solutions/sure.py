import torch


def confidence(model, x, mask_id):
    p = model(x[None])[0].softmax(-1)  # (T, V), from one call
    return torch.where(x == mask_id, p.amax(-1), 1.0)
