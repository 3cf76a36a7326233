import torch.nn.functional as F


def loss(logits, x0, xt, mask_id):
    hidden = xt == mask_id
    ce = F.cross_entropy(logits.mT, x0, reduction="none")
    # First the mean of each text over its own masks, then the mean of the texts.
    return ((ce * hidden).sum(1) / hidden.sum(1)).mean()
