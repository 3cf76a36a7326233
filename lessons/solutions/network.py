def attend(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5  # (B, H, T, T)
    return scores.softmax(-1) @ v


def parameters(V, T, C, layers):
    embed = (V + 1) * C + T * C  # [MASK] has a row too; a vector for each place
    near = 5 * C + C
    attention = (C * 3 * C + 3 * C) + (C * C + C)
    mlp = (C * 4 * C + 4 * C) + (4 * C * C + C)
    head = C * V + V  # [MASK] has no column
    return embed + layers * (near + attention + mlp) + head
