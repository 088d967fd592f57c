"""The plot of `stfseb bench`: lengths compare as times do, and nothing is written over something else."""

from __future__ import annotations

from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from stfseb.report.bench import _plot

SIZES = {"samples": 10, "batch_size": 128, "num_context": 32, "classes": 10}


def row(task, method, way, seconds, **more):
    return {"task": task, "method": method, "way": way, "seconds_per_epoch": seconds, **SIZES, **more}


ROWS = [
    row("mnist", "stfseb", "naive", 27.9, floor_seconds=0.4),
    row("mnist", "stfseb", "fit", 16.6, floor_seconds=0.4),
    row("mini", "stfseb", "naive", 0.05),
    row("mini", "map", "fit", 0.02),
    row("mnist", "stfseb", "fit", 31.0, samples=20),
    row("mini", "map", "fit", 0.03, samples=20),
    row("mini", "map", "fit", 0.04, batch_size=64),
]


@pytest.fixture(scope="module")
def figure():
    made = _plot(ROWS)
    FigureCanvasAgg(made)
    made.draw_without_rendering()
    return made


def test_bars_begin_at_zero_and_every_task_has_its_own_axis(figure):
    mnist, mini, *_ = figure.axes
    for ax, seconds in ((mnist, [27.9, 16.6]), (mini, [0.05, 0.02])):
        assert ax.get_xscale() == "linear"
        assert ax.get_xlim()[0] == 0
        drawn = [bar.get_window_extent().width for bar in ax.patches]
        assert drawn[0] / drawn[1] == pytest.approx(seconds[0] / seconds[1])
    assert [t.get_text() for t in mini.get_yticklabels()] == ["stfseb, naive", "map, fit"]


def test_only_what_grew_with_a_size_has_a_curve_in_its_panel(figure):
    samples, batch = figure.axes[2:]
    assert {line.get_label(): len(line.get_xdata()) for line in samples.lines} == {
        "mnist, stfseb, fit": 2,
        "mini, map, fit": 2,
    }
    assert [list(line.get_xdata()) for line in batch.lines] == [[64, 128]]


def test_no_words_overlap_and_none_is_cut(figure):
    width = figure.get_figwidth() * figure.dpi
    renderer = figure.canvas.get_renderer()
    for ax in figure.axes:
        low, high = sorted(ax.get_xlim())
        ticks = [t for t, at in zip(ax.get_xticklabels(), ax.get_xticks(), strict=True) if low <= at <= high]
        words = [t for t in [*ticks, *ax.get_yticklabels(), *ax.texts] if t.get_text()]
        boxes = [t.get_window_extent(renderer) for t in words if t.get_visible()]
        for box in boxes:
            assert box.x0 >= -1
            assert box.x1 <= width + 1
        assert len(ticks) >= 2
        spans = [t.get_window_extent(renderer) for t in ticks]
        assert not any(a.overlaps(b) for a, b in combinations(spans, 2))
