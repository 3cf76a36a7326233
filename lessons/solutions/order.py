import torch


def choose(p, masked, n):
    entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)  # (B, T) in nats
    entropy = entropy.masked_fill(~masked, torch.inf)
    at = entropy.topk(n, largest=False).indices
    return torch.zeros_like(masked).scatter(1, at, True)
