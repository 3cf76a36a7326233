"""A masked diffusion language model on one page: it trains on characters for two minutes.

python lessons/minimal.py                          # learns Python's own manual: no network needed
python lessons/minimal.py my.txt --seconds=600     # any text, ten minutes
python lessons/minimal.py --template "The ███████ statement"
"""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

T, C, HEADS, LAYERS, BATCH = 128, 128, 4, 4, 32  # context, width, heads, blocks, texts in a step


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.near = nn.Conv1d(C, C, 5, padding=2, groups=C)  # each character sees its neighbours
        self.qkv = nn.Linear(C, 3 * C)
        self.out = nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x):  # (B, T, C)
        h = F.rms_norm(x, (C,))
        h = h + self.near(h.mT).mT
        q, k, v = self.qkv(h).view(*h.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)  # no causal mask: all see all
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(F.rms_norm(x, (C,)))


class Model(nn.Module):
    def __init__(self, V):
        super().__init__()
        self.mask_id = V  # one more id than there are characters; it is never predicted
        self.embed = nn.Embedding(V + 1, C)
        self.place = nn.Parameter(torch.randn(T, C) / 10)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(C, V)

    def forward(self, xt):  # (B, T) ids, some of them mask_id -> (B, T, V) logits
        x = self.embed(xt) + self.place[: xt.shape[1]]
        return self.head(F.rms_norm(self.blocks(x), (C,)))


def compute_loss(model, x0):
    """Mask l random characters of each text, l uniform on {1..T}: the mean is the NELBO."""
    l = torch.randint(1, x0.shape[1] + 1, (len(x0), 1))  # noqa: E741
    hide = torch.rand(x0.shape).argsort(1).argsort(1) < l  # the first l in a random order
    xt = torch.where(hide, model.mask_id, x0)
    ce = F.cross_entropy(model(xt).mT, x0, reduction="none")  # (B, T) nats
    return (ce * hide / l).sum(1).mean()


@torch.no_grad()
def generate(model, x, steps=64):
    """The reverse process: in step s each [MASK] is drawn with probability 1/s; in the last, all."""
    x = x.clone()
    for s in range(steps, 0, -1):
        now = (x == model.mask_id) & (torch.rand(x.shape) < 1 / s)
        p = model(x).softmax(-1)
        x[now] = torch.multinomial(p[now], 1)[:, 0]
    return x


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", help="a text; default: Python's own manual")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--template", default="The ███████ statement", help="█: fill in")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.file:
        text = open(args.file, encoding="utf-8").read()
    else:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
    chars = sorted(set(text))
    ids = torch.tensor([chars.index(c) for c in text])
    cut = int(0.9 * len(ids))
    model = Model(len(chars))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    start = time.time()
    step = 0
    while (done := (time.time() - start) / args.seconds) < 1:
        at = torch.randint(cut - T, (BATCH, 1)) + torch.arange(T)
        loss = compute_loss(model, ids[at])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, step / 50, 2 - 2 * done)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}, {time.time() - start:.0f} s, loss {loss:.2f}", flush=True)
        step += 1
    torch.manual_seed(0)
    with torch.no_grad():
        losses = [
            compute_loss(model, ids[cut:][: (len(ids) - cut) // T * T].view(-1, T))
            for _ in range(4)
        ]
        print(f"steps {step} validation NELBO {torch.stack(losses).mean():.3f} nats per character")

    def show(x):
        return "".join((chars + ["█"])[i] for i in x.tolist())

    print(show(generate(model, torch.full((1, T), model.mask_id))[0]))
    x = torch.tensor([[model.mask_id if c == "█" else chars.index(c) for c in args.template]])
    print(show(generate(model, x)[0]))


main()
