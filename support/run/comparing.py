"""eval.py --compare: how much better one model is, window by window; runs grouped by their seeds.

Windows differ from one another much more than two models do. What makes a window hard for both
cancels in the difference of their losses on it, so its error is much smaller than that of each.
"""

import json
import math

import torch

from nanomdlm.support import numerics
from nanomdlm.support.cli.files import read_json
from nanomdlm.support.errors import UserError
from nanomdlm.support.run import evaluation
from nanomdlm.support.run.plots import table

# What two files of eval.py --json must have in common, and how a sentence calls it.
SAME = dict(crc="other windows", block_size="windows of another length")
SAME |= dict(tokenizer="another tokenizer", tokens_by_window="other tokens of the same windows")
FIX = "score the same --data and --windows with both, by models of one tokenizer"


def read_evaluation(path):
    """What eval.py --json wrote to a file, as a dict; raises UserError for anything else."""
    r = read_json(path, "result of eval.py --json")
    if not {"by_window", "checkpoint", *SAME} <= r.keys():
        raise UserError(f"{path} has no windows to compare; write it with eval.py --json")
    return r


def mean_difference(a, b, tokens):
    """The mean of b - a (W,) per token, and its standard errors over windows and over blocks of
    neighboring windows; tokens (W,) of each window."""
    a, b, tokens = (torch.tensor(x, dtype=torch.float64) for x in (a, b, tokens))
    more = (b - a).mean().item()
    residual = b - a - more * tokens / tokens.mean()  # b and a are in proportion to the tokens
    blocks = numerics.block_error(residual)
    return dict(difference=more, se=numerics.standard_error(residual), se_blocks=blocks)


def differences(a, b):
    """Of two evaluations: tokens masked (passes, W), by how much the mean cross-entropy there is
    higher in b (passes, W), tokens of each window (W,). None if they do not have the same masks."""
    if "by_mask" not in a or a["by_mask"]["masked"] != b.get("by_mask", {}).get("masked"):
        return None
    ce = [torch.tensor(r["by_mask"]["ce"], dtype=torch.float64) for r in (a, b)]
    return torch.tensor(a["by_mask"]["masked"]), ce[1] - ce[0], torch.tensor(a["tokens_by_window"])


def difference_of_bounds(a, b):
    """The mean_difference of the bounds, or of a bound and the NLL of an autoregressive model.

    If both have the same numbers of masked tokens, the variance that these explain is not part of
    the error, because they are stratified.
    """
    r = mean_difference(a["by_window"], b["by_window"], a["tokens_by_window"])
    if found := differences(a, b):
        masked, more, tokens = found
        residual = (more - r["difference"]) * tokens / tokens.double().mean()
        of_texts = (x[..., None] for x in (residual, masked, tokens))  # one in each window
        r["se"] = evaluation.stratified_error(*of_texts)
    return r


def differences_by_rate(masked, more, tokens):
    """[mean_difference of the cross-entropy, or None] by tenths of the mask rate.

    masked, more, tokens: see `differences`.
    A window may be in a tenth several times: the error is over windows, as these are independent.
    """
    tenths = (10 * masked - 1) // tokens
    rows = []
    for k in range(10):
        here = tenths == k
        n = int(here.sum())
        windows = int(here.any(0).sum())
        if not n:
            rows.append(None)
            continue
        mean = more[here].mean().item()
        sums = torch.where(here, more - mean, 0).sum(0)  # (W,)
        se = math.inf
        if windows > 1:
            se = (sums.square().sum() * windows / (windows - 1)).sqrt().item() / n
        rows.append(dict(difference=mean, se=se))
    return rows


def compare(paths):
    """How the evaluations in files differ from the first one: a dict for JSON.

    `runs` has for each other file `bound`, and where both files have it `exact` and `by_rate`: the
    mean `difference` in nats per token (negative: better than the first), and its `se`. Raises
    UserError for files that did not score the same tokens of the same windows.
    """
    if len(paths) < 2:
        raise UserError(f"--compare={paths[0]} is one evaluation; give two, as a.json,b.json")
    first, *others = map(read_evaluation, paths)
    runs = []
    for path, other in zip(paths[1:], others):
        for name, words in SAME.items():
            if other[name] != first[name]:
                raise UserError(f"{path} has {words} than {paths[0]}; {FIX}")
        row = dict(file=path, checkpoint=other["checkpoint"])
        row["bound"] = difference_of_bounds(first, other)
        if "exact" in first and "exact" in other:
            values = (r["exact"]["by_window"] for r in (first, other))
            row["exact"] = mean_difference(*values, first["tokens_by_window"])
        if found := differences(first, other):
            row["by_rate"] = differences_by_rate(*found)
        names = dict.fromkeys("NLL" if "nll" in r else "NELBO" for r in (other, first))
        runs.append(row | dict(name=" against ".join(names)))
    windows = len(first["by_window"])
    return dict(first=paths[0], checkpoint=first["checkpoint"], windows=windows, runs=runs)


# ---- Several seeds
# Settings that do not tell two experiments apart.
OF_ONE_RUN = ("seed", "out_dir", "resume", "overwrite", "tracker", "log_interval")


def by_seed(rows, settings):
    """Group runs whose settings differ in the seed alone: a list of dicts for JSON.

    rows: of each run a dict with its name, `run`, and its `value` in nats per token
    settings: the settings of each run, a dict

    A group has `runs`, `seeds`, the `mean` of its values, and their standard deviation, `spread`.
    Several runs of one seed count once, by their mean.
    From the second group on it has the `difference` to the first, paired by seed, and its `se`
    over seeds, if both have at least two seeds in common.
    """
    groups = {}
    for row, own in zip(rows, settings):
        same = {name: value for name, value in own.items() if name not in OF_ONE_RUN}
        group = groups.setdefault(json.dumps(same, sort_keys=True), {})
        group.setdefault(own["seed"], []).append(row)
    first = next(iter(groups.values()))
    found = []
    for group in groups.values():
        members = [row for several in group.values() for row in several]
        means = {seed: mean_of(several) for seed, several in group.items()}
        values = torch.tensor([*means.values()], dtype=torch.float64)
        one = dict(runs=[row["run"] for row in members], seeds=list(group))
        one |= dict(mean=values.mean().item(), spread=None)
        if len(group) > 1:
            one["spread"] = values.std().item()
        both = [seed for seed in group if seed in first]
        if group is not first and len(both) > 1:
            more = [means[seed] - mean_of(first[seed]) for seed in both]
            more = torch.tensor(more, dtype=torch.float64)
            one |= dict(difference=more.mean().item(), se=numerics.standard_error(more))
        found.append(one)
    return found


def mean_of(rows):
    """The mean value of runs, nats per token."""
    return sum(row["value"] for row in rows) / len(rows)


def seeds_in_words(groups):
    """The results of `by_seed` as lines of text."""
    if all(group["spread"] is None for group in groups):
        return "one seed of each: how far seeds differ is not known; train with other --seed too"
    lines = ["", "runs that differ in the seed alone:"]
    for group in groups:
        spread = "" if group["spread"] is None else f", standard deviation {group['spread']:.4f}"
        seeds = ", ".join(map(str, group["seeds"]))
        lines.append(f"{', '.join(group['runs'])} (seeds {seeds}): {group['mean']:.4f}{spread}")
        if "difference" in group:
            difference = f"{group['difference']:+.4f} +- {group['se']:.4f}"
            lines.append(f"    against the first group, paired by seed: {difference}")
    return "\n".join(lines)


def in_words(r):
    """The results of `compare` as lines of text."""
    lines = [f"compared with {r['first']} ({r['checkpoint']}) on the same {r['windows']} windows:"]
    for run in r["runs"]:
        lines.append(f"{run['file']} ({run['checkpoint']})")
        shown = {run["name"]: run["bound"]}
        if "exact" in run:
            shown["exact"] = run["exact"]
        for name, found in shown.items():
            error = f" +- {found['se']:.4f}" if math.isfinite(found["se"]) else ""
            if math.isfinite(found["se_blocks"]):
                error += f" (over blocks +- {found['se_blocks']:.4f})"
            lines.append(f"{name}: {found['difference']:+.4f}{error} nats per token")
        if "by_rate" in run:
            found = [tenth or {} for tenth in run["by_rate"]]
            rows = [["masked, %", *(f"{i}-{i + 10}" for i in range(0, 100, 10))]]
            for name, key in (("CE, difference", "difference"), ("+-", "se")):
                rows.append([name, *(tenth.get(key) for tenth in found)])
            lines.append(table(rows, digits=3))
    lines.append("negative: better than the first; +-: standard error of the paired difference,")
    lines.append("over windows and, for 40 and more, over 20 blocks of neighboring windows")
    return "\n".join(lines)
