"""A first model of masked text: how frequent each character is (lesson 0).

python lessons/programs/frequencies.py             # Python's own manual: needs no network
python lessons/programs/frequencies.py input.txt   # any text
"""

import sys
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F

text = open(sys.argv[1], encoding="utf-8").read() if sys.argv[1:] else "\n".join(topics.values())
chars = sorted(set(text))
V = len(chars)
MASK = V  # one more id: the mask, shown as █
T = 64  # characters of a text that is written
ids = torch.tensor([chars.index(c) for c in text])
train, held = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]  # `held` is for tests only


def show(x):
    return "".join([*chars, "█"][i] for i in x)


def compute_loss(model, x0):
    """Mask 1 to T characters of each text, and ask the model for them."""
    l = torch.randint(1, T + 1, (len(x0), 1))  # how many, for each text  # noqa: E741
    hide = torch.rand(x0.shape).argsort(1) < l  # which ones
    logits = model(torch.where(hide, MASK, x0))  # (B, T, V)
    ce = F.cross_entropy(logits.mT, x0, reduction="none")  # (B, T): minus log of the truth's chance
    return (ce * hide / l).sum(1).mean()  # the mean over the masks of a text, then over texts


@torch.no_grad()
def generate(model, x, steps=64):
    """Replace the masks of x (B, T) little by little by what the model draws."""
    for s in range(steps, 0, -1):
        p = model(x).softmax(-1)  # (B, T, V)
        drawn = torch.multinomial(p.flatten(0, 1), 1).view(x.shape)
        now = (x == MASK) & (torch.rand(x.shape) < 1 / s)
        x = torch.where(now, drawn, x)
    return x


def report(model):
    """Print the loss on text that the model has not seen, and two texts that it writes."""
    torch.manual_seed(0)
    with torch.no_grad():
        loss = compute_loss(model, held.unfold(0, T, T)[:1000])
    print(f"loss {loss:.2f} nats per character")
    for text in generate(model, torch.full((2, T), MASK)):
        print("|", show(text).replace("\n", "↵"))


if __name__ == "__main__":
    counts = torch.bincount(train, minlength=V) + 1  # one more each: no character is impossible
    frequencies = (counts / counts.sum()).log()

    def model(xt):  # (B, T) ids -> (B, T, V) logits
        return frequencies.expand(*xt.shape, V)  # the same everywhere, whatever the text

    report(model)
