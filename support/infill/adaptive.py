"""How many masks a call reveals, if that depends on what it predicts: fewer calls for easy texts.

Tokens drawn in one call do not see each other. That matters little where the network is sure: if
one token has nearly all of the probability, the other tokens can hardly change it.

threshold      reveal all tokens of a higher probability (Wu et al., 2505.22618)
entropy_bound  reveal in order of entropy, as long as the sum of the entropies, but for the largest,
               stays within a bound (Ben-Hamu et al., 2505.24857). That sum bounds the error, in
               nats: the divergence of the product of their distributions from the joint one
"""

import math
import re
from dataclasses import replace

from nanomdlm.support.errors import UserError

# name of the setting -> the orders of sample.ORDERS that it can follow, the first by default
RULES = {"threshold": ("confidence", "max_prob"), "entropy_bound": ("entropy",)}


def resolve(settings, context):
    """SamplerSettings with a rule, its order, and the numbers of calls and corrections resolved.

    context: tokens, for which there are at most `steps` calls (default: one per token). Raises
    UserError for two rules, and for an order that does not work with the rule.
    """
    rule, *others = [name for name in RULES if getattr(settings, name)]
    if others:
        raise UserError("threshold and entropy_bound are alternative rules; give one")
    orders = RULES[rule]
    if settings.order not in ("auto", *orders):
        what = f"order={settings.order} and {rule}={getattr(settings, rule)}"
        raise UserError(f"{what} contradict each other; give order={' or '.join(orders)}")
    order = orders[0] if settings.order == "auto" else settings.order
    correct = "0" if settings.correct == "auto" else settings.correct
    extra = int(correct) if re.fullmatch("[0-9]{1,7}", correct) else 0
    steps = settings.steps or context + extra
    return replace(settings, order=order, correct=correct, steps=steps)


def count(settings, score, masked):
    """(B,) how many masks the rule of the settings reveals in each row, at least one if there is.

    score: (B, n) float64 of the order, the highest first: log p, or minus the entropy in nats
    masked: (B, n) bool, where the masks are
    """
    if settings.threshold:
        k = (masked & (score > math.log(settings.threshold))).sum(1)
    else:
        entropy = (-score).masked_fill(~masked, math.inf).sort(1)[0]
        # The k-th one is the largest of the first k: the sum of those before it counts.
        k = 1 + (entropy.cumsum(1) <= settings.entropy_bound).sum(1)
    return k.clamp(min=1).minimum(masked.sum(1))
