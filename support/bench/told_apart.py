"""Can a classifier tell texts from real ones? (Lopez-Paz & Oquab, 1610.06545)

Its accuracy on texts that it was not fitted to is 0.5 if it cannot, whatever it looks at, and 1 if
it always can. Other numbers may be at the level of real text while this one is not: it is not
chosen in advance what the classifier looks at.
"""

import torch
import torch.nn.functional as F

from nanomdlm.support.numerics import generator

FEATURES = 4096  # n-grams of tokens are hashed to so many counts
LONGEST = 4
FOLDS = 5
DECAY = 1e-3


def counts_of(x):
    """(B, FEATURES): log(1 + the counts of hashed n-grams) of texts of ids x (B, T)."""
    found = torch.zeros(len(x), FEATURES)
    code = torch.zeros_like(x)
    for n in range(1, LONGEST + 1):
        # Of all n-grams that begin at a position; the factors are those of a common hash.
        ends = x.shape[1] - n + 1
        code = (code[:, :ends] * 1_000_003 + x[:, n - 1 :] + 1) % (1 << 31)
        found.scatter_add_(1, (code * 2_654_435_761 + n) % FEATURES, torch.ones(code.shape))
    return found.log1p()


def accuracy(x, real, seed=0):
    """(accuracy, its standard error) of a logistic regression between texts x and real (B, T).

    Both have as many texts as the smaller one; five-fold cross-validation.
    """
    n = min(len(x), len(real))
    g = generator("told apart", seed)
    both = [texts[torch.randperm(len(texts), generator=g)[:n]] for texts in (x, real)]
    features = counts_of(torch.cat(both).long())
    label = torch.arange(2 * n) < n
    fold = torch.cat([torch.arange(n) % FOLDS] * 2)
    right = torch.zeros(2 * n, dtype=torch.bool)
    for k in range(FOLDS):
        train, test = fold != k, fold == k
        mean, spread = features[train].mean(0), features[train].std(0) + 1e-3
        inside, outside = ((features[part] - mean) / spread for part in (train, test))
        weights = torch.zeros(FEATURES + 1, requires_grad=True)
        optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

        def closure(inside=inside, train=train, weights=weights, optimizer=optimizer):
            optimizer.zero_grad()
            logits = inside @ weights[1:] / FEATURES**0.5 + weights[0]
            loss = F.binary_cross_entropy_with_logits(logits, label[train].float())
            loss = loss + DECAY * weights[1:].square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            logits = outside @ weights[1:] / FEATURES**0.5 + weights[0]
        right[test] = (logits > 0) == label[test]
    p = right.float().mean().item()
    return p, (p * (1 - p) / (2 * n)) ** 0.5
