"""Turned and corrupted test images: the curves of the paper's figures, and tables of corruptions."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

from stfseb.report.chance import notes_of
from stfseb.report.grid import Cell, Grid
from stfseb.report.records import Group, Record, groups, spread, title_of
from stfseb.report.style import PAPER, look, plain_ticks, short_name, styled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROWS = (("acc", "test accuracy, %", 100.0), ("nll", "NLL, nats (log scale)", 1.0), ("ece", "ECE", 1.0))
_READ_TOGETHER = (
    "AUROC: how well corrupted images are told from clean ones. Whether they are still classified rightly is another "
    "matter: a method that notices them all may have them all wrong."
)
_MEASURES = (("acc", "Accuracy, % ↑", 100.0, 2, True), ("nll", "NLL ↓", 1.0, 3, False), ("ece", "ECE ↓", 1.0, 3, False))


def rotation(records: Sequence[Record], columns: int = 3) -> Figure | None:
    """Accuracy, NLL and ECE of one task against the angle by which the test images are turned."""
    found = [g for g in groups(records) if _turned(g)]
    if not found:
        return None
    from stfseb.report.figures import label_outer, legend, panels

    with styled():
        figure, axes = panels(3, columns=columns, width=3.5, height=3.0, share="x")
        for ax, (key, name, scale) in zip(axes, _ROWS, strict=True):
            _lines(ax, found, key, scale)
            ax.set_title(name)
        label_outer(axes, columns, "rotation, degrees", "")
        legend(figure, axes)
    return figure


def rotation_figure(tasks: Mapping[str, Sequence[Record]]) -> Figure | None:
    """The paper's figure: a column a task, accuracy above, NLL below."""
    found = {task: rows for task, records in tasks.items() if (rows := [g for g in groups(records) if _turned(g)])}
    if not found:
        return None
    from matplotlib.figure import Figure

    from stfseb.report.figures import legend

    with styled():
        figure = Figure(figsize=(3.6 * len(found) + 0.4, 6.8), layout="constrained")
        grid = figure.subplots(2, len(found), squeeze=False, sharex=True)
        for column, (task, rows) in enumerate(found.items()):
            for ax, (key, name, scale) in zip(grid[:, column], _ROWS, strict=False):
                _lines(ax, rows, key, scale)
                if column == 0:
                    ax.set_ylabel(name)
            grid[0, column].set_title(title_of(tasks[task]))
            grid[1, column].set_xlabel("rotation, degrees")
        legend(figure, list(grid.flat))
    return figure


def _lines(ax: Axes, rows: Sequence[Group], key: str, scale: float) -> None:
    for place, group in enumerate(rows):
        style = look(group.method, place)
        runs = _turned(group)
        angles = sorted({float(a) for run in runs for a in run})
        values = [[scale * run[f"{a:g}"][key] for run in runs if f"{a:g}" in run] for a in angles]
        mean = np.array([statistics.fmean(v) for v in values])
        ax.plot(
            angles,
            mean,
            color=style["color"],
            # Ours is broad and lies below the others: a line that runs along it is seen on it, not hidden by it.
            linewidth=4.5 if style["ours"] else 1.4,
            linestyle=style["line"],
            marker=style["marker"],
            markersize=11 if style["ours"] else 4.5,
            markeredgecolor=PAPER,
            markeredgewidth=0.5,
            alpha=0.7 if style["ours"] else 1.0,
            zorder=2 if style["ours"] else 3,
            label=short_name(group.label),
        )
        if all(len(v) > 1 for v in values):
            std = np.array([statistics.stdev(v) for v in values])
            ax.fill_between(angles, mean - std, mean + std, color=style["color"], alpha=0.13, linewidth=0)
    ax.set_xticks(range(-30, 31, 15))
    if key == "nll" and ax.dataLim.y0 > 0:  # of small angles a tenth of that of large ones, and compared there too
        ax.set_yscale("log")
        plain_ticks(ax.yaxis)


def _turned(group: Group) -> list[dict[str, Any]]:
    parts = [(r.get("parts") or {}).get("rotation") or {} for r in group.records]
    return [p["sets"] for p in parts if p.get("sets")]


def corruption_grids(records: Sequence[Record]) -> list[Grid]:
    """Return the means over corruption types at each severity, and AUROC and accuracy by type (over severities)."""
    rows = [g for g in groups(records) if _corrupted(g)]
    if not rows:
        return []
    first = _corrupted(rows[0])[0]
    suite = str(first["suite"])
    severities = sorted({key.rpartition("/")[2] for key in first["sets"]}, key=float)
    kinds = list(dict.fromkeys(key.rpartition("/")[0] for key in first["sets"]))
    title = title_of(records)
    columns, cells = [], []
    for severity in severities:
        named = f", severity {severity}" if len(severities) > 1 else ""
        for key, heading, scale, digits, higher in (*_MEASURES, ("auroc", "AUROC, % ↑", 100.0, 2, True)):
            columns.append(heading[:-2] + named + heading[-2:])
            found = [_mean(g, key, severity=severity) for g in rows]
            cells.append(
                _marked([_cell(f, g, scale, digits) for f, g in zip(found, rows, strict=True)], digits, higher)
            )
    by_type: dict[str, tuple[tuple[Cell, ...], ...]] = {}
    for key in ("auroc", "acc"):
        means = [[_cell(_mean(g, key, kind=kind), g, 100.0, 2) for g in rows] for kind in kinds]
        by_type[key] = tuple(tuple(_marked(row, 2, True)) for row in means)
    own = next((g.shown for g in rows if g.ours), "")
    down = tuple(tuple(column[i] for column in cells) for i in range(len(rows)))
    notes = tuple(dict.fromkeys(f"{suite}: {n}." for g in rows for p in _corrupted(g) for n in p.get("notes") or []))
    fallen = tuple(line for g in rows for line in notes_of(g.label, g.records, "included in the mean"))
    return [
        Grid("corruptions", f"{title}: {suite}, mean over {len(kinds)} types", ("Method",), tuple(columns),
             tuple((g.shown,) for g in rows), down, (_READ_TOGETHER, *notes, *fallen), own=own, sortable=True),
        *(Grid(name, f"{title}: {words} by type, %", ("Type",), tuple(g.shown for g in rows),
               tuple((k.replace("_", " "),) for k in kinds), by_type[key], fallen, own=own, sortable=True)
          for name, key, words in (
              ("corruption-types", "auroc", "AUROC of clean against corrupted images"),
              ("corruption-accuracy", "acc", "accuracy on corrupted images"),
          )),
    ]  # fmt: skip


def _corrupted(group: Group) -> list[dict[str, Any]]:
    parts = [(r.get("parts") or {}).get("corruption") or {} for r in group.records]
    return [p for p in parts if p.get("sets")]


def _mean(group: Group, key: str, kind: str | None = None, severity: str | None = None) -> list[float]:
    """Return each seed's mean over the sets of one type, or of one severity."""
    wanted = (kind, severity)
    means = []
    for part in _corrupted(group):
        named = [(name.rpartition("/")[::2], found) for name, found in part["sets"].items()]
        means.append(
            statistics.fmean(v[key] for n, v in named if all(w in (None, x) for w, x in zip(wanted, n, strict=True)))
        )
    return means


def _cell(values: Sequence[float], group: Group, scale: float, digits: int) -> Cell:
    found = spread(values)
    assert found is not None
    text = f"{scale * found.mean:.{digits}f}"
    if found.std is not None:
        text += f" ± {scale * found.std:.{digits}f}"
    ids = tuple(str(r.get("id", "")) for r in group.records if (r.get("parts") or {}).get("corruption"))
    fallen = tuple(group.collapsed) if group.failed else ()  # of these none is ranked
    return Cell(text, scale * found.mean, None if found.std is None else scale * found.std, collapsed=fallen, runs=ids)


def _marked(cells: Sequence[Cell], digits: int, higher: bool) -> list[Cell]:
    from stfseb.report.paper import ranked

    return ranked(cells, digits, higher)
