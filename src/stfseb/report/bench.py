"""The figures of `stfseb bench`: a table, JSON and a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stfseb.files import write_bytes, write_json
from stfseb.report.style import FAMILIAR, INK, PAPER, UNFAMILIAR, rendered, styled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

STANDARD = {"samples": 10, "batch_size": 128, "num_context": 32, "classes": 10}
_SIZES = tuple(STANDARD)


def bench_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table for the terminal.

    "over naive" is the speed-up over the naive way of the same task and method, "x floor" how many times the counted
    floor an epoch takes; the caption, or each row where they differ, says what `fit` has chosen.
    """
    from rich.table import Table

    fitted = sorted({row["engine"] for row in rows if row["way"] == "fit" and "engine" in row})
    table = Table(
        title="Training, measured in one run", caption=f"fit: {fitted[0]}" if len(fitted) == 1 else None, padding=(0, 0)
    )
    for name in ("task", "method", "way"):
        table.add_column(name)
    for name in ("s/epoch", "steps/s", "over naive", "peak MB", "floor, s", "x floor"):
        table.add_column(name, justify="right")
    naive = {(r["task"], r["method"]): r["seconds_per_epoch"] for r in rows if r["way"] == "naive" and "error" not in r}
    for row in rows:
        chosen = f" ({row['engine']})" if row["way"] == "fit" and len(fitted) > 1 and "engine" in row else ""
        names = [row["task"], row["method"], " ".join([row["way"] + chosen, *_unusual(row)])]
        if "error" in row:
            table.add_row(*names, f"failed: {row['error'][:60]}")
            continue
        base = naive.get((row["task"], row["method"])) if _plain(row) else None
        ratio = f"{base / row['seconds_per_epoch']:.1f}" if base else ""
        memory, floor, times = (row.get(name) for name in ("peak_memory_mb", "floor_seconds", "times_floor"))
        table.add_row(
            *names,
            f"{row['seconds_per_epoch']:.3f}",
            f"{row['steps_per_second']:.1f}",
            ratio,
            "" if memory is None else f"{memory:.0f}",
            "" if floor is None else f"{floor:.3g}",
            "" if times is None else f"{times:.1f}",
        )
    return table


def write_bench(found: dict[str, Any], folder: Path) -> Path:
    """Write bench.json and bench.png; return the folder."""
    write_json(folder / "bench.json", found)
    rows = [row for row in found["rows"] if "error" not in row]
    if rows:
        write_bytes(folder / "bench.png", rendered(_plot(rows), "png"))
    return folder


def _plot(rows: Sequence[dict[str, Any]]) -> Figure:
    """Return bars of seconds an epoch with their floors, and curves of how the cost grows where that was measured.

    Bars begin at zero, so that lengths compare as times do; every task has an axis of its own, as a small one would
    vanish beside a large one.
    """
    from matplotlib.figure import Figure

    plain = [row for row in rows if _plain(row)]
    grown = [name for name in _SIZES if len({row[name] for row in rows}) > 1]
    tasks = list(dict.fromkeys(row["task"] for row in plain)) or [""]
    counts = [max(1, sum(row["task"] == task for row in plain)) for task in tasks]
    height = max(0.36 * sum(counts) + 0.95 * len(tasks), 2.6)
    with styled():
        figure = Figure(figsize=(6.4 + 3.2 * len(grown), height), layout="constrained")
        columns = figure.add_gridspec(1, 1 + len(grown), width_ratios=[2.0] + [1.0] * len(grown))
        # What a panel has beside its bars, in bars: its title and its ticks.
        left = columns[0].subgridspec(len(tasks), 1, height_ratios=[count + 1.2 for count in counts])
        for place, task in enumerate(tasks):
            ax = figure.add_subplot(left[place])
            _bars(ax, [row for row in plain if row["task"] == task])
            ax.set_title(f"{task}: seconds an epoch" if task else "Seconds an epoch")
        for place, name in enumerate(grown):
            _growth(figure.add_subplot(columns[1 + place]), rows, name)
    return figure


def _bars(ax: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a task's ways of training, the first on top, each with its figure behind the bar."""
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator

    methods = {row["method"] for row in rows}
    labels = [f"{row['method']}, {row['way']}" if len(methods) > 1 else row["way"] for row in rows]
    drawn = ax.barh(range(len(rows)), [row["seconds_per_epoch"] for row in rows], height=0.62, color=FAMILIAR)
    figures = [_figures(row["seconds_per_epoch"]) for row in rows]
    halo = [withStroke(linewidth=3, foreground=PAPER)]  # lines of the grid would cross them
    ax.bar_label(drawn, labels=figures, padding=4, fontsize=9, color=INK, path_effects=halo)
    floors = [(row["floor_seconds"], place) for place, row in enumerate(rows) if "floor_seconds" in row]
    if floors:
        style: dict[str, Any] = {"color": UNFAMILIAR[0], "markersize": 12, "markeredgewidth": 2, "linestyle": "none"}
        ax.plot(*zip(*floors, strict=True), marker="|", label="counted floor", **style)
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, handletextpad=0.2)
    ax.set_yticks(range(len(rows)), labels)
    ax.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    ax.set_xlim(0, 1.14 * max([row["seconds_per_epoch"] for row in rows], default=1.0))
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    ax.grid(visible=False, axis="y")
    if len(methods) == 1:
        ax.set_ylabel(methods.pop())


def _growth(ax: Axes, rows: Sequence[dict[str, Any]], name: str) -> None:
    """Draw the seconds against one size, a curve for every task, method and way that has several; axes are log."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    marks = ("o", "s", "D", "^", "v", "P")
    seconds = []
    series: dict[str, set[tuple[float, float]]] = {}
    for row in (row for row in rows if _plain(row, name)):
        who = f"{row['task']}, {row['method']}, {row['way']}"
        series.setdefault(who, set()).add((row[name], row["seconds_per_epoch"]))
    curves = {who: sorted(points) for who, points in series.items() if len({x for x, _ in points}) > 1}
    for place, (who, line) in enumerate(curves.items()):
        look: dict[str, Any] = {"color": UNFAMILIAR[place % len(UNFAMILIAR)], "marker": marks[place % len(marks)]}
        ax.plot([x for x, _ in line], [y for _, y in line], label=who, **look)
        seconds += [y for _, y in line]
    ax.set(xscale="log", yscale="log", xlabel=name.replace("_", " "), title="Seconds an epoch")
    sizes = sorted({x for line in curves.values() for x, _ in line})
    ax.set_xticks(sizes, [str(size) for size in sizes], rotation=45 if len(sizes) > 5 else 0)
    narrow = bool(seconds) and max(seconds) < 20 * min(seconds)  # powers of ten alone would leave one tick or none
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())  # which would write over each other
    if seconds:
        ax.set_ylim(min(seconds) / 1.5, max(seconds) * 1.5)
        ax.legend(loc="best", fontsize=8.5)


def _figures(value: float) -> str:
    """Return three digits of a number, never as a power of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _unusual(row: dict[str, Any]) -> list[str]:
    """Return the sizes that differ from the standard ones, in words."""
    return [f"{name}={row[name]}" for name, value in STANDARD.items() if row.get(name) != value]


def _plain(row: dict[str, Any], but: str = "") -> bool:
    """Tell whether a row has the standard sizes (but for one)."""
    return all(row.get(name) == value for name, value in STANDARD.items() if name != but)
