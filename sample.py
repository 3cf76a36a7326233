"""Sample from a trained model."""

import torch


@torch.no_grad()
def generate(model, x, steps=64, order="ancestral", temperature=1.0, generator=None):
    """Fill the [MASK] positions of x (B, T). Minimal."""
    x, mask = x.clone(), model.mask_id
    if model.config.objective == "ar":
        for i in range(x.shape[1]):
            inp = torch.cat((torch.full_like(x[:, :1], mask), x[:, :-1]), 1)
            p = torch.softmax(model(inp)[:, i].cpu().double() / temperature, -1)
            x[:, i] = torch.multinomial(p, 1, generator=generator)[:, 0].to(x.device)
        return x
    for s in range(steps):
        masked = x == mask
        if not masked.any():
            break
        reveal = masked & (torch.rand(x.shape, generator=generator).to(x.device) < 1 / (steps - s))
        p = torch.softmax(model(x)[reveal].cpu().double() / temperature, -1)
        if len(p):
            x[reveal] = torch.multinomial(p, 1, generator=generator)[:, 0].to(x.device)
    return x


def preview(model, tokenizer, windows, generator):
    """Two generated texts and one validation window with a gap filled, for the log of a training run."""
    T = model.config.block_size
    x = torch.full((3, T), model.mask_id, device=windows.device)
    gap = slice(T // 2, T // 2 + max(1, T // 10))
    x[2] = windows[0]
    x[2, gap] = model.mask_id
    if model.config.objective == "ar":  # reads only to the left, so it cannot fill a gap
        x = x[:2]
    out = generate(model, x, steps=min(T, 64), generator=generator).tolist()
    texts = [tokenizer.decode(ids) for ids in out[:2]]
    return texts + [f"{tokenizer.decode(ids[:gap.start])}[{tokenizer.decode(ids[gap])}]"
                    f"{tokenizer.decode(ids[gap.stop:])}" for ids in out[2:]]
