"""Lesson 13: how fills of several lengths compare.

python lessons/programs/lengths.py
"""

import torch
from marginals import config, marginals, model, tokenizer


def log_p(text, begin, end):
    """log p of the tokens begin .. end - 1 of a text given all others, by the chain rule."""
    ids = torch.tensor(tokenizer.encode(text))
    x = torch.full((end - begin, config.block_size), model.mask_id)
    x[:, : len(text)] = ids
    for k in range(end - begin):
        x[k, begin + k : end] = model.mask_id  # token k and all after it
    with torch.no_grad():
        logp = model(x).log_softmax(-1)
    return sum(logp[k, begin + k, ids[begin + k]].item() for k in range(end - begin))


for fill in ("I", "me", "thee", "be king"):
    text = f"To {fill}, or not to be"
    gap_alone = log_p(text, 3, 3 + len(fill))
    with_text_after = log_p(text, 3, len(text))
    print(f"{fill:8} {gap_alone:6.2f} {with_text_after:7.2f}")

comma = tokenizer.encode(",")[0]
for n in range(1, 7):
    p = marginals(f"To {'█' * (n + 4)} not to be")
    best = p[:n].amax(1).log().sum().item()
    after = p[n, comma].log().item()
    print(f"{n} {best:7.2f} {after:6.2f} {best + after:7.2f}")
