"""Pictures show what was measured, and nothing else."""

import importlib
import json

import pytest
from conftest import ROOT

from nanomdlm.support.cli import entry
from nanomdlm.support.run import plots

figures = importlib.import_module("studies.figures")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, instead of files."""
    found = []
    monkeypatch.setattr(plots, "write_figure", lambda fig, path, own=(): found.append(fig))
    return found


def write_run(folder, steps=40, opens=20):
    """A log with an evaluation each 10 steps, whose rates open after step `opens` (None: never)."""
    first = dict(step=0, tokens=0, seconds=0.0)
    records = [first | dict(val_nelbo=4.0, val_nelbo_se=0.1, val_bpc=None)]
    for step in range(1, steps + 1):
        margin = 0.5 if opens is None or step <= opens else 0.4
        at = dict(step=step, tokens=100 * step, seconds=step / 2)
        records.append(at | dict(loss=2 + 1 / step, rate_margin=margin))
        if step % 10 == 0:
            records.append(at | dict(val_nelbo=3.0, val_nelbo_se=0.1, val_bpc=None))
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def dashed(ax):
    lines = [line for line in ax.lines if line.get_linestyle() == "--"]
    return [line.get_xdata()[0] for line in lines if len(line.get_xdata())]


def test_rising_training_loss_is_explained_where_the_rates_open(tmp_path, drawn):
    plots.plot_losses(None, [write_run(tmp_path / "run"), write_run(tmp_path / "two", opens=30)])
    (fig,) = drawn
    left, right = fig.axes
    assert dashed(left) == [20, 30] and dashed(right) == [10, 15]
    legend = [t.get_text() for t in fig.legends[0].get_texts()]
    assert sum("training loss may rise" in words for words in legend) == 1


# ---- Pictures of results/


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_of_results_are_drawn_by_their_command(name, tmp_path, monkeypatch):
    picture = tmp_path / f"{name}.png"
    assert entry.run(figures.main, [name, str(picture)]) == 0
    assert picture.stat().st_size > 20_000
    command = f"python studies/figures.py {name} results/{name}.png"
    assert command in (ROOT / "results" / f"{name}.md").read_text(encoding="utf-8")
