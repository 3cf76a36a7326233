import torch


def sees(T, S):
    block = torch.arange(T) // S
    reader, read = block[:, None], block[None]
    masked = torch.cat((reader == read, read < reader), 1)  # xt: its own block; x0 before it
    clean = torch.cat((torch.zeros(T, T, dtype=torch.bool), read <= reader), 1)
    return torch.cat((masked, clean))


def rows(T, S, calls):
    without = T * calls * (T // S)
    cached = S * calls * (T // S) + S * (T // S - 1)
    return without, cached
