"""Figures show the numbers they are given: read back from the artists, not from pixels."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.text import Text

from stfseb.report import figures
from stfseb.report.style import inline_svg, look, rendered, short_name

ALL = ["headline", "cost", "confidence", "reliability", "roc", "risk_coverage", "validation", "terms"]


def test_importing_the_report_does_not_import_matplotlib():
    code = "import sys, stfseb.report; sys.exit('matplotlib' in sys.modules or 'jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ALL)
def test_records_without_plots_draw_nothing(name):
    assert getattr(figures, name)([{"task": "t", "method": "map", "metrics": {}}]) is None


def test_headline_points_are_the_means(records):
    figure = figures.headline(records)
    assert [ax.get_title("left") for ax in figure.axes] == ["unfamiliar: mnist", "unfamiliar: glyphs"]
    points = [c for c in figure.axes[0].collections if isinstance(c, PathCollection) and len(c.get_offsets()) == 1]
    found = sorted(tuple(c.get_offsets()[0]) for c in points)
    expected = []
    for method in ("stfseb", "mcdropout", "map"):
        rows = [r["metrics"] for r in records if r["method"] == method]
        expected.append((100 * np.mean([m["acc"] for m in rows]), 100 * np.mean([m["auroc/mnist"] for m in rows])))
    np.testing.assert_allclose(found, sorted(expected))
    names = [t.get_text() for t in figure.axes[0].texts]
    assert {"ST-FS-EB", "MC Dropout", "MAP"} <= set(names)


def test_every_point_lies_inside_every_panel(records):
    """Panels share their axes: the limits must hold the points of all of them."""
    unlike = [r | {"metrics": r["metrics"] | {"auroc/mnist": 0.2 + 0.1 * r["seed"]}} for r in records]
    for figure in (figures.headline(unlike), figures.headline(unlike, columns=1), figures.cost(unlike)):
        for ax in figure.axes:
            (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
            for x, y in np.concatenate([c.get_offsets() for c in ax.collections if isinstance(c, PathCollection)]):
                assert left < x < right
                assert low < y < high


def test_names_do_not_cover_each_other():
    """Six methods at nearly the same place: every name must still be readable."""
    records = [
        {"task": "t", "method": m, "label": f"method {m}", "metrics": {"acc": 0.9 + i * 1e-4, "auroc/a": 0.8}}
        for i, m in enumerate(["stfseb", "fseb", "gfsvi", "mcdropout", "mfvi", "map"])
    ]
    figure = figures.headline(records)
    figure.draw_without_rendering()
    # The extent of the words alone: an annotation's own includes its line.
    boxes = [Text.get_window_extent(t) for t in figure.axes[0].texts if t.get_text().startswith("method")]
    assert len(boxes) == 6
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            assert not (abs(one.y0 - other.y0) < 0.6 * one.height and one.x0 < other.x1 and other.x0 < one.x1)


def test_confidence_panels_hold_all_images(records):
    figure = figures.confidence(records)
    assert len(figure.axes) == 3
    for ax in figure.axes:
        for patch in ax.patches:
            assert patch.get_data().values.sum() == pytest.approx(1.0)


def test_reliability_pools_seeds(records):
    pair = [r["summary"]["reliability"] for r in records if r["method"] == "map"]
    confidence, accuracy, share = figures._pooled(pair)
    for b in range(15):
        total = sum(p["count"][b] for p in pair)
        if total:
            right = sum(p["count"][b] * (p["accuracy"][b] or 0) for p in pair)
            assert accuracy[b] == pytest.approx(right / total)
    assert share.sum() == pytest.approx(1.0)
    assert (confidence <= 1).all()


def test_roc_lines_enclose_the_area_of_the_table(records):
    figure = figures.roc(records)
    for ax, name in zip(figure.axes, ["mnist", "glyphs"], strict=True):
        for line in ax.lines[1:]:
            method = {"ST-FS-EB": "stfseb", "MC Dropout": "mcdropout", "MAP": "map"}[line.get_label()]
            area = np.trapezoid(line.get_ydata(), line.get_xdata())
            mean = np.mean([r["metrics"][f"auroc/{name}"] for r in records if r["method"] == method])
            assert area == pytest.approx(mean, abs=0.01)


def test_terms_that_a_method_does_not_have_are_not_drawn(records):
    figure = figures.terms(records)
    drawn = {ax.get_title("left"): {line.get_label() for line in ax.lines} for ax in figure.axes}
    assert drawn["ST-FS-EB"] == {"fit to the data", "function prior", "weight prior"}
    assert drawn["MAP"] == {"fit to the data", "weight prior"}


def test_one_epoch_is_seen_and_counted_whole(records):
    short = [r | {"history": r["history"][:1]} for r in records]
    figure = figures.terms(short)
    assert all(line.get_marker() == "o" for ax in figure.axes for line in ax.lines)
    for drawn in (figure, figures.validation(short)):
        drawn.draw_without_rendering()
        ticks = {t for ax in drawn.axes for t in ax.get_xticks() if ax.get_xlim()[0] <= t <= ax.get_xlim()[1]}
        assert ticks == {1}


def test_names_lose_what_stands_in_brackets_before_they_are_cut():
    assert short_name("GFSVI (last layer, 60 kernel steps on 256 points)") == "GFSVI"
    assert short_name("GFSVI (last layer)") == "GFSVI (last layer)"
    assert len(short_name("a name without any brackets in it at all")) == 28


def test_lines_above_the_frame_of_the_validation_loss_are_named_with_their_height(records):
    def ending(method, *values):
        history = [{"epoch": e, "validation_nll": v} for e, v in enumerate(values, 1)]
        base = {"task": "t", "method": method, "label": method, "metrics": {"acc": 0.5}, "seed": 0}
        return base | {"history": history, "best_epoch": 2}

    low = [ending(m, 1.1, 1.0) for m in ("stfseb", "fseb", "gfsvi", "mfvi")]
    figure = figures.validation([*low, ending("mcdropout", 1.52, 1.8), ending("map", 1.68, 2.25)])
    (ax,) = figure.axes
    (said,) = [t.get_text() for t in ax.texts]
    top = ax.get_ylim()[1]
    assert said.startswith("above the frame: ")
    assert ("mcdropout" in said) == (top < 1.8)
    assert "map (up to 2.25)" in said
    # First epochs above the frame are why the frame ends where it does; their runs come down into it.
    (calm,) = figures.validation([ending("map", *([9.0] + 20 * [1.0]))]).axes
    assert not calm.texts


def test_diverged_epochs_and_unknown_methods_are_drawn_around():
    history = [{"epoch": 1, "validation_nll": 2.0, "data": 1.0}, {"epoch": 2, "validation_nll": float("nan")}]
    record = {"task": "t", "method": "new one", "label": "_new", "metrics": {"acc": 0.5}, "history": history}
    figure = figures.validation([record])
    assert figure.axes[0].lines[0].get_xdata().tolist() == [1]
    assert rendered(figure, "png").startswith(b"\x89PNG")
    assert figures.terms([record]) is not None


def test_every_method_has_its_own_look():
    known = ["stfseb", "fseb", "gfsvi", "mcdropout", "mfvi", "map"]
    assert len({look(m)["color"] for m in known}) == len({look(m)["marker"] for m in known}) == 6
    assert look("MC-Dropout") == look("mcdropout")


@pytest.mark.parametrize("name", ALL)
def test_every_figure_renders_the_same_bytes_twice(records, name):
    first, second = (rendered(getattr(figures, name)(records), "pdf") for _ in range(2))
    assert first == second
    assert first.startswith(b"%PDF")


def test_svg_for_the_page_is_labelled_and_takes_the_page_colours(records):
    text = inline_svg(figures.cost(records), 'a "label" <b>', "plot-1")
    opening = text[: text.index(">")]
    assert opening.startswith("<svg")
    assert 'role="img"' in opening
    assert "a &#34;label&#34; &lt;b&gt;" in opening
    assert " width=" not in opening
    assert "var(--ink)" in text
    assert "#1c2733" not in text
    assert 'id="plot-1-figure_1"' in text


def test_frames_stay_below_a_hundred_percent_and_close_to_what_is_drawn():
    """Accuracies around 99 %: no tick above 100, and the marks are not lost in a frame made for 80 %."""
    records = [
        {"task": "t", "method": m, "label": m, "metrics": {"acc": 0.990 + i * 1e-3, "auroc/a": 0.97 + i * 0.006}}
        for i, m in enumerate(["stfseb", "fseb", "gfsvi", "mcdropout", "mfvi"])
    ]
    (ax,) = figures.headline(records).axes
    assert max(ax.get_xticks()) <= 100
    assert max(ax.get_yticks()) <= 100
    left, right = ax.get_xlim()
    assert right - left < 2  # of accuracies that span 0.4
    low = [r | {"metrics": {"acc": 0.80 + i * 1e-3, "auroc/a": 0.7}} for i, r in enumerate(records)]
    left, right = figures.headline(low).axes[0].get_xlim()
    assert right - left > 4  # far from 100 the same differences are seed noise


def test_single_seeds_lie_in_the_frame():
    """One of six seeds far off: its dot lies beyond a deviation from the mean."""
    records = [
        {"task": "t", "method": m, "label": m, "seed": s, "metrics": {"acc": 0.95, "auroc/a": 0.9 - 0.2 * (s == 5)}}
        for m in ("stfseb", "map")
        for s in range(6)
    ]
    (ax,) = figures.headline(records).axes
    assert ax.get_ylim()[0] < 70
