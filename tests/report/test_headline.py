"""The headline figure: its numbers against numpy, and names that hide nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from made_runs import asked, made

from stfseb.experiments.paper.plan import make_plan
from stfseb.report import write_report
from stfseb.report.arrange import arranged
from stfseb.report.headline import headline_figure, headline_panels, worth_a_figure
from stfseb.report.labels import Named, name_points
from stfseb.report.style import rendered


@pytest.fixture(scope="module")
def main_runs():
    _, records = made("table1", ask=asked("mnist", "fmnist", "cifar10"))
    return {task: entry.main for task, entry in arranged(records).items()}


def test_points_are_means_over_seeds_of_the_mean_over_sets(main_runs):
    panels = headline_panels(main_runs)
    assert [p.task for p in panels] == ["mnist", "fmnist", "cifar10"]
    panel = panels[1]
    assert panel.sets == ("mnist", "notmnist")
    mark = next(m for m in panel.marks if m.method == "gfsvi")
    own = [r for r in main_runs["fmnist"] if r["method"] == "gfsvi"]
    seeds = [50 * (r["metrics"]["auroc/mnist"] + r["metrics"]["auroc/notmnist"]) for r in own]
    assert mark.auroc.mean == pytest.approx(np.mean(seeds))
    assert mark.auroc.std == pytest.approx(np.std(seeds, ddof=1))
    assert mark.accuracy.std == pytest.approx(np.std([100 * r["metrics"]["acc"] for r in own], ddof=1))
    assert set(mark.runs) == {r["id"] for r in own}
    paper = next(m for m in panel.marks if m.paper)
    assert (paper.accuracy.mean, paper.auroc.mean) == (92.38, pytest.approx((99.70 + 96.23) / 2))


def test_collapsed_seeds_and_sets_without_data_are_left_out_and_said(main_runs):
    records = json.loads(json.dumps(main_runs["mnist"]))
    for record in records:
        del record["metrics"]["auroc/notmnist"]
        record["collapsed"] = record["method"] == "map" and record["seed"] == 1
    (panel,) = headline_panels({"mnist": records})
    assert panel.sets == ("fmnist",)
    fallen = next(m for m in panel.marks if m.method == "map")
    assert (fallen.fallen, fallen.accuracy.count) == (1, 2)
    figure = headline_figure([panel])
    words = [t.get_text() for t in figure.axes[0].texts]
    assert "MAP †" in words
    assert "unfamiliar: Fashion-MNIST" in words  # as the task of that name is called
    assert headline_panels({"mnist": [r for r in records if r["method"] == "map"]}) == []


def boxes(ax, figure):
    renderer = figure.canvas.get_renderer()
    return {t.get_text(): t.get_window_extent(renderer) for t in ax.texts if hasattr(t, "xyann")}


def overlap(a, b):
    across = min(a.x1, b.x1) - max(a.x0, b.x0)
    up = min(a.y1, b.y1) - max(a.y0, b.y0)
    return max(across, 0) * max(up, 0)


@pytest.mark.parametrize("columns", [3, 1])
def test_every_method_is_named_and_names_overlap_neither_each_other_nor_marks(main_runs, columns):
    panels = headline_panels(main_runs)
    figure = headline_figure(panels, columns)
    for ax, panel in zip(figure.axes, panels, strict=True):
        found = boxes(ax, figure)
        assert set(found) == {m.label for m in panel.marks}
        assert len(found) == 7  # six methods and the paper's point
        frame = ax.get_window_extent()
        for name, box in found.items():
            assert all(overlap(box, other) == 0 for label, other in found.items() if label != name), name
            for mark in panel.marks:
                x, y = ax.transData.transform((mark.accuracy.mean, mark.auroc.mean))
                assert not (box.x0 < x < box.x1 and box.y0 < y < box.y1), (name, mark.label)
            assert frame.x0 <= box.x0
            assert box.x1 <= frame.x1 + 1
            assert frame.y0 <= box.y0
            assert box.y1 <= frame.y1 + 1


@pytest.mark.parametrize("columns", [3, 1])
def test_a_line_leads_to_the_papers_star_from_its_name_and_through_no_other(main_runs, columns):
    panels = headline_panels(main_runs)
    figure = headline_figure(panels, columns)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["MNIST", "Fashion-MNIST", "CIFAR-10"]
    for ax, panel in zip(figure.axes, panels, strict=True):
        star = next(m for m in panel.marks if m.paper)
        spot = ax.transData.transform((star.accuracy.mean, star.auroc.mean))
        found = boxes(ax, figure)
        own = found.pop(star.label)
        ends = [ax.transData.transform(line.get_xydata()) for line in ax.lines if line.get_label() == "_line"]
        start, end = min(ends, key=lambda line: np.hypot(*(line[0] - spot)))
        assert np.hypot(*(start - spot)) == pytest.approx(8 * figure.dpi / 72)  # at the edge of the mark
        assert own.x0 - 1 <= end[0] <= own.x1 + 1
        assert own.y0 - 1 <= end[1] <= own.y1 + 1
        for t in np.linspace(0, 1, 50):
            x, y = start + t * (end - start)
            assert not any(box.x0 < x < box.x1 and box.y0 < y < box.y1 for box in found.values()), panel.task


def test_nothing_ends_at_the_edge_of_the_picture(main_runs):
    figure = headline_figure(headline_panels(main_runs))
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())
    assert (pixels[:, -6:, :3] == 255).all()
    assert (pixels[:, :6, :3] == 255).all()


def test_many_points_on_one_spot_are_all_named_apart():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4))
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    rng = np.random.default_rng(0)
    spots = 0.9 + 0.02 * rng.normal(size=(9, 2))
    names = name_points(ax, [Named(f"method {i}", x, y) for i, (x, y) in enumerate(spots)])
    found = [n.get_window_extent() for n in names]
    assert all(overlap(a, b) == 0 for i, a in enumerate(found) for b in found[:i])
    assert len([line for line in ax.lines if line.get_label() == "_line"]) >= 3  # lines lead to those far away


def test_the_same_bytes_every_time(main_runs):
    panels = headline_panels(main_runs)
    assert rendered(headline_figure(panels), "png") == rendered(headline_figure(panels), "png")


def test_the_page_of_a_results_folder_begins_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("stfseb.report.page.PLOTS", ())
    ask = asked("mnist", methods=("stfseb", "map"), seeds=(0, 1))
    _, records = made("table2", ask=ask)
    page = write_report(records, tmp_path, "a page", plans=[make_plan("table2", ask)]).read_text("utf-8")
    assert page.index('id="headline"') < page.index('id="paper"')
    assert (tmp_path / "plots" / "headline.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plots" / "headline.pdf").read_bytes().startswith(b"%PDF")


def test_a_small_task_alone_has_no_headline(tmp_path):
    _, records = made("table2", ask=asked("mini", methods=("stfseb", "map"), seeds=(0,)))
    panels = headline_panels({"mini": records})
    assert len(panels) == 1
    assert not any(m.paper for m in panels[0].marks)
    assert not worth_a_figure(panels)
