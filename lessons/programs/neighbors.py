"""A second model of masked text: it looks at the two neighbors of a mask (lesson 0).

python lessons/programs/neighbors.py input.txt
"""

import torch
import torch.nn.functional as F
from frequencies import MASK, V, report, train

# counts[a, b, c]: how often c stands between a and b. A neighbor may be masked, so a and b may be
# MASK. A hundredth is added, because what never occurred may occur.
counts = torch.full((V + 1, V + 1, V), 0.01)
left, middle, right = train.unfold(0, 3, 1).T
masked = torch.full_like(left, MASK)
for a in (left, masked):
    for b in (right, masked):
        counts.index_put_((a, b, middle), torch.ones(len(a)), accumulate=True)
table = counts.log()


def model(xt):  # (B, T) ids -> (B, T, V) logits
    padded = F.pad(xt, (1, 1), value=MASK)
    return table[padded[:, :-2], padded[:, 2:]]


report(model)
