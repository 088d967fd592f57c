"""The figures of rotated images: the numbers are the records', and no line is hidden by another."""

from __future__ import annotations

import io

import numpy as np
import pytest
from made_runs import asked, made
from matplotlib.colors import to_rgb
from PIL import Image

from stfseb.report import shifts
from stfseb.report.style import look, rendered

SIX = ("stfseb", "fseb", "gfsvi", "mcdropout", "mfvi", "map")


@pytest.fixture(scope="module")
def records():
    return made("table1", ask=asked("mnist", seeds=(0, 1)))[1]


def turned_as(records, method, other):
    """Return the records with one method's numbers in place of another's, seed by seed."""
    parts = {r["seed"]: r["parts"] for r in records if r["method"] == method}
    return [r | {"parts": parts[r["seed"]]} if r["method"] == other else r for r in records]


def pixels(figure, method):
    """Return how many pixels of the drawing, the legend left out, have a method's colour."""
    for legend in figure.legends:
        legend.set_visible(False)
    with Image.open(io.BytesIO(rendered(figure, "png"))) as image:
        found = np.asarray(image.convert("RGB"), dtype=float) / 255
    return int((np.abs(found - to_rgb(look(method)["color"])).max(-1) < 0.04).sum())


def test_lines_are_the_means_over_seeds(records):
    figure = shifts.rotation_figure({"mnist": records})
    for ax, key, scale in zip(figure.axes, ("acc", "nll"), (100.0, 1.0), strict=True):
        for method, line in zip(SIX, ax.lines, strict=True):
            sets = [r["parts"]["rotation"]["sets"] for r in records if r["method"] == method]
            angles = sorted(map(float, sets[0]))
            np.testing.assert_allclose(line.get_xdata(), angles)
            expected = [scale * np.mean([s[f"{a:g}"][key] for s in sets]) for a in angles]
            np.testing.assert_allclose(line.get_ydata(), expected)
    assert [ax.get_yscale() for ax in figure.axes] == ["linear", "log"]
    labels = [tick.get_text() for tick in figure.axes[1].get_yticklabels()]
    assert all(float(label) > 0 for label in labels)  # plain numbers, no powers in another writing


@pytest.mark.parametrize("hidden", SIX[1:])
def test_a_method_that_does_as_ours_is_seen(records, hidden):
    """Two methods with the very same numbers: both are drawn in hundreds of pixels."""
    same = [r for r in turned_as(records, "stfseb", hidden) if r["method"] in ("stfseb", hidden)]
    alone = [r for r in same if r["method"] == hidden]
    above = pixels(shifts.rotation_figure({"mnist": same}), hidden)
    assert above > 0.9 * pixels(shifts.rotation_figure({"mnist": alone}), hidden) > 500
    ours = shifts.rotation_figure({"mnist": same}).axes[0].lines[0]
    assert ours.get_label() == "ST-FS-EB"
    assert ours.get_linewidth() > 3 * shifts.rotation_figure({"mnist": same}).axes[0].lines[1].get_linewidth()


def test_methods_differ_in_more_than_colour():
    looks = [look(method) for method in SIX]
    assert len({str(each["line"]) for each in looks}) >= 5  # our own is told by its width
    assert len({each["marker"] for each in looks}) == len({each["color"] for each in looks}) == 6
