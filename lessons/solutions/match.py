import torch


def backward(p, next, accepts):
    b = [accepts.to(p.dtype)]
    for row in p.flip(0):
        b.insert(0, (row * b[0][next]).sum(1))
    return torch.stack(b)


def draw(p, next, b):
    fill = []
    q = 0
    for i in range(len(p)):
        weight = p[i] * b[i + 1][next[q]]
        v = int(torch.multinomial(weight, 1))
        fill.append(v)
        q = next[q, v]
    return fill
