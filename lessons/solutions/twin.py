import torch
import torch.nn.functional as F


def ar_inputs(x, bos):
    return torch.cat((torch.full_like(x[:, :1], bos), x[:, :-1]), 1)


def nll(model, x, bos):
    return F.cross_entropy(model(ar_inputs(x, bos)).mT, x)
