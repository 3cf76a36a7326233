"""Pictures show what was measured, and nothing else."""

import importlib
import json

import pytest
import torch
from conftest import ROOT
from webdriver import Browser

import mdlm
from nanomdlm import variants
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
    assert [t.get_text() for t in left.texts] == ["more mask rates"] * 2
    assert "training loss may rise" in fig.legends[0].get_texts()[-1].get_text()


@pytest.mark.parametrize("opens", [None, 20])
def test_legend_of_losses_is_inside_the_picture(tmp_path, drawn, opens):
    plots.plot_losses(None, [write_run(tmp_path / "run", opens=opens)])
    (fig,) = drawn
    fig.canvas.draw()
    box = fig.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= fig.bbox.width and box.y1 <= fig.bbox.height
    assert box.y0 >= fig.axes[0].bbox.y1, "above the curves"
    assert len(fig.legends[0].get_texts()) == (1 if opens is None else 2)
    assert dashed(fig.axes[0]) == ([] if opens is None else [opens])


def test_no_line_leads_from_the_untrained_model_to_the_first_evaluation(tmp_path, drawn):
    plots.plot_losses(None, [write_run(tmp_path / "run")])
    evaluated = [c[0].get_xdata() for c in drawn[0].axes[0].containers]
    assert [list(xs) for xs in evaluated] == [[0], [10, 20, 30, 40]]
    low, high = drawn[0].axes[0].get_ylim()
    assert low < 2.0 < 3.0 < high < 4.0


def test_run_of_the_untrained_model_alone_is_drawn(tmp_path, drawn):
    plots.plot_losses(None, [write_run(tmp_path / "run", steps=0)])
    assert drawn[0].legends[0].get_texts()[0].get_text().endswith("NELBO 4.000")


@pytest.mark.parametrize(
    "how, has_margin",
    [
        ({}, True),
        (dict(rate_margin=0.0), False),
        (dict(objective="ar"), False),
        (dict(rates="cosine"), False),
        (dict(rates="0.2-0.8"), False),
        (dict(time_conditioning=True), False),
        (dict(block_length=4), True),
        (dict(block_length=1), False),
        (dict(block_length=1, infill_share=0.5), True),
    ],
    ids=str,
)
def test_logged_margin_is_that_of_the_masks(how, has_margin):
    """A margin is logged where it changes how many tokens are masked, and nowhere else."""
    config = mdlm.Config(block_size=16, batch_size=8, **how)
    objective = variants.choose(config, mdlm.MaskedDiffusion(config, 11))
    assert objective.rate_margin == (0.5 if has_margin else 0.0)
    assert [mdlm.margin_scale(progress) for progress in (0.5, 0.75, 1.0)] == [1, 0.5, 0]

    def counts(progress):
        margin = mdlm.margin_scale(progress)
        samples = torch.arange(8)
        lengths = torch.full((8,), 16)
        steps = range(20)
        return [objective.mask_counts(k, margin, samples, lengths).tolist() for k in steps]

    assert (counts(0.0) != counts(1.0)) == has_margin


# ---- Texts
def token(text, mark="", guess="", p=0.0):
    return dict(text=text, mark=mark, likeliest=[(guess, p)] if mark else [])


def test_predicted_tokens_are_colored_by_confidence_and_the_truth_is_below_wrong_ones():
    tokens = [token("a"), token("b", "+", "b", 0.9), token(" ", "x", "c", 0.25), token("d\n")]
    (line,) = plots.prediction_cells(tokens)
    given, right, wrong, end = line
    assert (given.text, given.face, given.below) == ("a", None, "")
    assert (right.text, right.below, right.face[0]) == ("b", "", plots.BLUE)
    assert (wrong.text, wrong.below, wrong.face[0]) == ("c", "␣", plots.RED)
    assert right.face[1] > wrong.face[1] > 0 and end.text == "d↵"
    sure = plots.prediction_cells([token("a", "+", "a", p) for p in (0.0, 0.3, 0.6, 1.0)])[0]
    alphas = [cell.face[1] for cell in sure]
    assert alphas == sorted(set(alphas)) and alphas[-1] <= 1


def test_predictions_fill_lines_that_fit(drawn):
    long = [token(f"word{i} ", "x", "語" * 3, 0.5) for i in range(60)]
    lines = plots.prediction_cells([*long, token("\n"), token("\n"), token("x")])
    assert [c.below for line in lines for c in line][:60] == [f"word{i}␣" for i in range(60)]
    for line in lines:
        assert sum(max(plots.columns(c.text), plots.columns(c.below)) for c in line) <= 72
    assert [[c.text for c in line] for line in lines[-2:]] == [["↵"], ["x"]]
    plots.plot_predictions([*long, token("")], None, most=3)
    words = [t.get_text() for t in drawn[0].axes[0].texts]
    assert words.count("語") == 3 * sum(len(line) for line in lines[:3])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_touches_the_edge_of_the_picture_of_the_readme(theme):
    browser = Browser()
    browser.call("/url", url=(ROOT / "results" / f"infill_{theme}.svg").as_uri())
    ends = "[...document.querySelectorAll('text')].map(t => t.getBBox()).map(b => b.x + b.width)"
    width = browser.js("document.documentElement.viewBox.baseVal.width")
    right = max(browser.js(ends))
    browser.close()
    assert right <= width - 20


# ---- Pictures of results/
def test_margins_of_old_logs_are_those_of_their_learning_rates():
    scales = [0.5, 1, 1, 0.5, 0.0]
    records = [dict(step=k, lr_scale=v) for k, v in enumerate(scales)]
    found = [r["rate_margin"] for r in figures.with_margins([dict(step=0), *records])[1:]]
    assert found == [0.5, 0.5, 0.5, 0.25, 0.0]


def test_frontier_is_the_table_and_says_which_way_is_better(drawn):
    figures.draw_sampling(None)
    words, nats, distinct = drawn[0].axes
    assert drawn[0].get_suptitle().startswith("Text from nothing")
    ways = ("up is better", "down is better", "as real text is best")
    for ax, way in zip((words, nats, distinct), ways):
        assert way in ax.get_ylabel() and "left is cheaper" in ax.get_xlabel()
        assert len(ax.containers) == len(figures.SAMPLERS)
    names = [t.get_text() for t in words.get_legend().get_texts()]
    assert names == ["real text", "AR twin, 256 calls", *figures.SAMPLERS]
    assert list(words.containers[0][0].get_xdata()) == [4, 8, 16, 32, 64]
    default = [0.678, 0.815, 0.916, 0.946, 0.962]
    assert list(words.containers[0][0].get_ydata()) == pytest.approx(default)
    assert list(distinct.containers[3][0].get_ydata())[-1] == 0.334


def test_frontier_of_a_benchmark_without_a_twin(drawn):
    rows = [dict(sampler="real text", calls=None, words=0.9, words_se=0.1, distinct=0.5)]
    default = dict(sampler="default", words=0.5, words_se=0.1, distinct=0.4)
    rows += [default | dict(calls=n) for n in (4, 8)]
    plots.plot_frontier(rows, None)
    assert len(drawn[0].axes) == 2


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_of_results_are_drawn_by_their_command(name, tmp_path, monkeypatch):
    picture = tmp_path / f"{name}.png"
    assert entry.run(figures.main, [name, str(picture)]) == 0
    assert picture.stat().st_size > 20_000
    command = f"python studies/figures.py {name} results/{name}.png"
    assert command in (ROOT / "results" / f"{name}.md").read_text(encoding="utf-8")


def test_unknown_figure_is_refused(tmp_path, capsys):
    assert entry.run(figures.main, ["speed", str(tmp_path / "x.png")]) == 2
    assert "'speed'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
