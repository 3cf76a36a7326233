"""sample.py --compare: texts with several values of one setting, in one table and one page."""

import dataclasses
import json
import sys

from support import cli, plots, viewer
from support.cli import UserError
from support.templates import joined

TEXTS = 16  # for each value, unless --num_samples says otherwise


def variants(options, settings, resolve):
    """--compare=NAME=VALUE,VALUE,... -> {"NAME=VALUE": resolve(Options)}, {} without --compare."""
    if not options.compare:
        return {}
    name, _, values = options.compare.partition("=")
    if name not in settings or not values:
        example = "as in --compare=temperature=0.5,1"
        names = ", ".join(settings)
        raise UserError(
            f"--compare={options.compare} is not accepted; give one of {names}, {example}"
        )
    n = options.num_samples or TEXTS
    found = {}
    for value in values.split(","):
        given = cli.parse_flags(type(options), [f"--{name}={value}"], "")
        how = dataclasses.replace(options, num_samples=n, **given)
        found[f"{name}={value}"] = resolve(how)
    return found


def compare(variants, fill, judge, tokens, file):
    """Write texts with each of the settings, show the first and a table of all; returns pages.

    variants  {title: settings}
    fill      fill(settings, pages=[]) yields (texts, facts) as sample.sampled does; adds to pages
    tokens    how many are filled in each text
    file      gets a line of JSON for each of the settings
    """
    rows = []
    pages = []
    for title, how in variants.items():
        here = []
        texts, facts = zip(*fill(how, pages=here))
        pages += [page | dict(title=title) for page in here[:1]]
        if file is not sys.stdout:
            print(f"---- {title}", viewer.highlighted(texts[0]), sep="\n", flush=True)
        seconds = facts[0]["seconds"]
        calls = sum(fact["calls"] for fact in facts) / len(facts)
        row = {"setting": title, "calls": calls, "seconds": seconds, "tokens/s": tokens / seconds}
        rows.append(row | judge([joined(parts) for parts in texts]))
        viewer.write_line(file, json.dumps(rows[-1]))
    if file is not sys.stdout:
        print(plots.table([rows[0].keys(), *(row.values() for row in rows)], digits=3))
        print(
            f"means over {len(texts)} texts; words: the share of those that the training text has"
        )
    return pages
