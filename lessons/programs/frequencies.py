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
    """Hide a share of each text, from one character in T to all, and ask the model for these."""
    share = torch.randint(1, T + 1, (len(x0), 1)) / T  # of each text
    hide = torch.rand(x0.shape) < share  # each character, as if by the toss of a coin
    logits = model(torch.where(hide, MASK, x0))  # (B, T, V)
    ce = F.cross_entropy(logits.mT, x0, reduction="none")  # (B, T): minus log of the truth's chance
    return (ce * hide / share).mean()  # where few are hidden, each of them counts more


@torch.no_grad()
def generate(model, x):
    """Replace the masks of x (B, T) one after another, in random order, by what the model draws."""
    for place in torch.randperm(T):
        p = model(x).softmax(-1)[:, place]  # (B, V): the probability of each character there
        x[:, place] = torch.multinomial(p, 1)[:, 0]
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
