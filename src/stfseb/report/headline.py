"""The figure to remember: accuracy against telling unfamiliar images apart, six methods, one panel a task."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task, task_names
from stfseb.experiments.paper.plan import LABELS, METHODS
from stfseb.experiments.paper.plan import TASKS as PAPER_TASKS
from stfseb.experiments.paper.quantities import SET_NAMES
from stfseb.report.chance import learnt_nothing
from stfseb.report.paper_numbers import printed
from stfseb.report.records import Record, Spread, common_sets, groups, mean_auroc, plain, spread, title_of
from stfseb.report.style import INK, MUTED, inline_svg, look, rendered, styled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE = "Accuracy against telling unfamiliar images apart"
CAPTION = (
    "Right is more accurate on test images, up is better at noticing unfamiliar ones (AUROC, mean over sets). "
    "Means over seeds, bars one sample standard deviation. The star drawn in outline is the paper's own result for "
    "ST-FS-EB."
)
_LEAST = (0.8, 3.0)  # a frame is at least so wide and high, in percent: seed noise must not look like a difference
_COLUMNS = 3


@dataclass(frozen=True)
class Mark:
    """A method's place in a panel, and the runs behind it; `fallen` of its seeds learnt nothing and are left out."""

    method: str
    label: str
    accuracy: Spread
    auroc: Spread
    runs: tuple[str, ...] = ()
    fallen: int = 0
    paper: bool = False


@dataclass(frozen=True)
class Panel:
    """A task: its unfamiliar sets and the methods that were run."""

    task: str
    title: str
    sets: tuple[str, ...]
    marks: tuple[Mark, ...]


def headline_panels(tasks: Mapping[str, Sequence[Record]]) -> list[Panel]:
    """Return what is drawn, from the main runs of each task; tasks with fewer than two methods have no panel."""
    found = [_panel(task, tasks[task]) for task in task_names() if tasks.get(task)]
    return [panel for panel in found if panel is not None]


def worth_a_figure(panels: Sequence[Panel]) -> bool:
    """Tell whether the figure says more than the plots of a single task do."""
    return len(panels) > 1 or any(panel.task in PAPER_TASKS for panel in panels)


def _panel(task: str, records: Sequence[Record]) -> Panel | None:
    rows = [g for g in groups(records) if plain(g.method) in METHODS]
    runs = [r for g in rows for r in g.records]
    sets = common_sets(load_task(task).ood, runs)
    if not sets or len({g.method for g in rows}) < 2:
        return None
    marks = []
    for group in rows:
        kept = [r for r in group.records if not learnt_nothing(r)]
        accuracy = spread([100 * float(r["metrics"]["acc"]) for r in kept])
        auroc = spread([100 * mean_auroc(r, sets) for r in kept])
        if accuracy is not None and auroc is not None:
            ids = tuple(str(r.get("id", "")) for r in kept)
            fallen = len(group.records) - len(kept)
            marks.append(Mark(group.method, _label(group.method, group.label), accuracy, auroc, ids, fallen))
    theirs = [printed("table2", task, f"auroc/{name}", METHODS[0]) for name in sets]
    accuracy_there = printed("table1", task, "acc", METHODS[0])
    there = [p.mean for p in theirs if p is not None]
    if accuracy_there is not None and len(there) == len(sets):
        where = Spread(accuracy_there.mean, None, 1), Spread(statistics.fmean(there), None, 1)
        marks.append(Mark(METHODS[0], "ST-FS-EB in the paper", *where, paper=True))
    return Panel(task, title_of(records), sets, tuple(marks))


def _label(method: str, label: str) -> str:
    """Return the method's name; what differs from its preset stays behind it."""
    own = LABELS.get(method, label)
    return own + label.removeprefix(own) if label.startswith(own) else label


def headline_figure(panels: Sequence[Panel], columns: int = _COLUMNS) -> Figure | None:
    """Draw the panels, up to `columns` side by side."""
    if not panels:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    across = min(len(panels), columns)
    down = -(-len(panels) // across)
    with styled():
        width = 3.9 if across > 2 else 4.8
        layout = ConstrainedLayoutEngine(w_pad=0.11, h_pad=0.08)  # the frame's right end is not the picture's
        figure = Figure(figsize=(width * across, 3.9 * down + 0.2), layout=layout)
        FigureCanvasAgg(figure)
        axes = list(figure.subplots(down, across, squeeze=False).flat)
        for ax in axes[len(panels) :]:
            ax.remove()
        for place, (ax, panel) in enumerate(zip(axes, panels, strict=False)):
            _draw(ax, panel)
            ax.set_xlabel("test accuracy, %")
            if place % across == 0:
                ax.set_ylabel("AUROC, mean over unfamiliar sets, %")
        if any(mark.fallen for panel in panels for mark in panel.marks):
            figure.supxlabel("† seeds at chance are left out here; the tables count them", fontsize=8.5, color=MUTED)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # names are placed in the final layout
        for ax, panel in zip(axes, panels, strict=False):
            _name(ax, panel)
    return figure


def _draw(ax: Axes, panel: Panel) -> None:
    for place, mark in enumerate(panel.marks):
        style = look(mark.method, place)
        x, y, colour = mark.accuracy, mark.auroc, style["color"]
        if mark.paper:
            ax.scatter(x.mean, y.mean, s=150, marker=style["marker"], facecolors="none", edgecolors=INK, zorder=7)
            continue
        if x.std is not None:
            ax.errorbar(x.mean, y.mean, y.std, x.std, color=colour, linewidth=1.3, zorder=4)
        # The large star below, the small marks above: none hides another.
        size, order = (300, 5) if style["ours"] else (62, 6)
        ax.scatter(x.mean, y.mean, s=size, color=colour, marker=style["marker"], linewidths=0, zorder=order)
    for axis, low, high in (
        (ax.xaxis, *_frame([m.accuracy for m in panel.marks], _LEAST[0])),
        (ax.yaxis, *_frame([m.auroc for m in panel.marks], _LEAST[1])),
    ):
        (ax.set_xlim if axis is ax.xaxis else ax.set_ylim)(low, high)
        ticks = [float(t) for t in axis.get_major_locator().tick_values(low, high)]
        axis.set_ticks([t for t in ticks if low <= t <= min(high, 100.0 + 1e-9)])
    ax.set_title(panel.title, pad=20)
    names = ", ".join(_set_name(name) for name in panel.sets)
    ax.text(0, 1.02, f"unfamiliar: {names}", transform=ax.transAxes, color=MUTED, fontsize=9, va="bottom")
    ax.text(1, 1.02, "better ↗", transform=ax.transAxes, color=MUTED, fontsize=9, ha="right", va="bottom")


def _set_name(name: str) -> str:
    """Return a set's name as the panels have it: one that is a task, too, is called the same above and below."""
    return load_task(name).title if name in task_names() else SET_NAMES.get(name, name)


def _name(ax: Axes, panel: Panel) -> None:
    from stfseb.report.labels import Named, name_points

    points = []
    for place, mark in enumerate(panel.marks):
        style = look(mark.method, place)
        ours = style["ours"]
        points.append(
            Named(
                mark.label + (" †" if mark.fallen else ""),
                mark.accuracy.mean,
                mark.auroc.mean,
                reach=8.0 if ours else 4.5,
                x_error=mark.accuracy.std or 0.0,
                y_error=mark.auroc.std or 0.0,
                colour=MUTED if mark.paper else style["color"],
                led=mark.paper,
                type=_type(style, mark),
            )
        )
    name_points(ax, points)


def _type(style: dict[str, Any], mark: Mark) -> dict[str, Any]:
    if mark.paper:
        return {"color": MUTED, "fontsize": 9, "fontstyle": "italic"}
    if style["ours"]:
        return {"color": style["color"], "fontsize": 11, "fontweight": "bold"}
    return {"color": INK}


def _frame(values: Sequence[Spread], least: float) -> tuple[float, float]:
    """Return limits with room for names; little lies above 100 %."""
    low = min(v.mean - (v.std or 0) for v in values)
    high = max(v.mean + (v.std or 0) for v in values)
    span = max(high - low, least)
    middle = (low + high) / 2
    top = min(middle + 0.66 * span, 100 + 0.1 * span)
    return top - max(1.32 * span, top - low + 0.12 * span), top


def headline_section(tasks: Mapping[str, Sequence[Record]], files: dict[Path, bytes]) -> dict[str, Any] | None:
    """Return the figure for the report's page, and add `plots/headline.png` and `.pdf`; None where it says nothing."""
    panels = headline_panels(tasks)
    figure = headline_figure(panels) if worth_a_figure(panels) else None
    if figure is None:
        return None
    from pathlib import Path

    from markupsafe import Markup

    for kind in ("png", "pdf"):
        files[Path("plots") / f"headline.{kind}"] = rendered(figure, kind)
    narrow = headline_figure(panels, columns=1) if len(panels) > 1 else None
    words = f"{TITLE}. {CAPTION}"
    return {
        "title": TITLE,
        "caption": CAPTION,
        "wide": Markup(inline_svg(figure, words, "headline")),
        "narrow": None if narrow is None else Markup(inline_svg(narrow, words, "headline-narrow")),
    }


def as_data(panels: Sequence[Panel]) -> list[Any]:
    """Return what is drawn as plain data, by which a picture is known to be up to date."""
    return [
        [p.task, list(p.sets), [[m.label, m.accuracy.mean, m.accuracy.std, m.auroc.mean, m.auroc.std, m.fallen]
                                for m in p.marks]]
        for p in panels
    ]  # fmt: skip
