"""A masked diffusion language model on one page: it learns characters in a few minutes.

python lessons/minimal.py                                         # Python's own manual
python lessons/minimal.py input.txt --steps=3000 --template "To be███"    # any text, longer
"""

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn as nn
import torch.nn.functional as F

T, C, HEADS, LAYERS, BATCH = 64, 128, 4, 3, 32  # context, width, heads, layers, texts per step


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)
        self.out = nn.Linear(C, C)
        self.near = nn.Conv1d(C, C, 5, padding=2, groups=C)  # mixes neighboring characters
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x):  # (B, T, C)
        h = F.rms_norm(x, (C,))
        q, k, v = self.qkv(h).view(*h.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)  # no causal mask: each position attends to all
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = F.rms_norm(x, (C,))
        return x + self.mlp(h + self.near(h.mT).mT)


class Model(nn.Module):
    def __init__(self, V):
        super().__init__()
        self.mask_id = V  # an id after those of the characters; it is never predicted
        self.embed = nn.Embedding(V + 1, C)
        self.place = nn.Parameter(torch.randn(T, C) / 10)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(C, V)

    def forward(self, xt):  # (B, T) ids, some of them mask_id -> (B, T, V) logits
        x = self.embed(xt) + self.place[: xt.shape[1]]
        return self.head(F.rms_norm(self.layers(x), (C,)))


def compute_loss(model, x0):
    """Mask l random characters of each text, l uniform on {1..T}: the mean is the NELBO."""
    l = torch.randint(1, x0.shape[1] + 1, (len(x0), 1))  # noqa: E741
    hide = torch.rand(x0.shape).argsort(1) < l  # rows: random orders of 0 .. T - 1
    xt = torch.where(hide, model.mask_id, x0)
    ce = F.cross_entropy(model(xt).mT, x0, reduction="none")  # (B, T)
    return (ce * hide / l).sum(1).mean()


@torch.no_grad()
def generate(model, x, steps=64):
    """The reverse process: with s steps left each [MASK] is drawn with probability 1/s."""
    for s in range(steps, 0, -1):
        now = (x == model.mask_id) & (torch.rand(x.shape) < 1 / s)
        p = model(x).softmax(-1)
        x = x.masked_scatter(now, torch.multinomial(p[now], 1)) if now.any() else x
    return x


def train(model, ids, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for step in range(steps):
        loss = compute_loss(model, ids[torch.randint(len(ids) - T, (BATCH, 1)) + torch.arange(T)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, step / 50, 2 - 2 * step / steps)
        optimizer.step()
        if step % 200 == 0:
            print(f"step {step}: loss {loss:.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", help="a text (default: Python's own manual)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--template", default="The ███████ statement", help="█: to be filled")
    args = parser.parse_args()
    text = open(args.file, encoding="utf-8").read() if args.file else "\n".join(topics.values())
    chars = [*sorted(set(text)), "█"]  # the last one stands for [MASK]
    ids = torch.tensor([chars.index(c) for c in text])
    template = torch.tensor([[chars.index(c) for c in args.template]])
    torch.manual_seed(0)
    model = Model(len(chars) - 1)
    train(model, ids[: len(ids) * 9 // 10], args.steps)
    nelbo = compute_loss(model, ids[len(ids) * 9 // 10 :].unfold(0, T, T)[:1000])
    print(f"validation NELBO {nelbo:.3f} nats per character")
    for x in (torch.full((1, T), model.mask_id), template):
        print("".join(chars[i] for i in generate(model, x)[0]))
