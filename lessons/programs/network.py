"""A third model of masked text: a network that sees eight characters on each side (lesson 0).

python lessons/programs/network.py input.txt       # two minutes
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from frequencies import T, V, compute_loss, report, train

C, STEPS = 64, 1500  # numbers for each character; training steps


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.Conv1d(C, 2 * C, 5, padding=2)  # mixes five characters
        self.think = nn.Conv1d(2 * C, C, 1)

    def forward(self, x):  # (B, C, T)
        return x + self.think(F.relu(self.look(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V + 1, C)  # C numbers for each character, and for MASK
        self.layers = nn.Sequential(Layer(), Layer(), Layer(), Layer())
        self.head = nn.Linear(C, V)

    def forward(self, xt):  # (B, T) ids -> (B, T, V) logits
        return self.head(self.layers(self.embed(xt).mT).mT)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(STEPS):
    x0 = train[torch.randint(len(train) - T, (32, 1)) + torch.arange(T)]  # 32 random texts
    loss = compute_loss(model, x0)
    optimizer.zero_grad()
    loss.backward()  # how the loss changes with each number of the network
    optimizer.param_groups[0]["lr"] = 3e-3 * min(1, 2 - 2 * step / STEPS)
    optimizer.step()  # change each a little, so that the loss falls
    if step % 300 == 0:
        print(f"step {step}: loss {loss:.2f}", flush=True)
report(model)
