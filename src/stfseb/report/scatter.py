"""Methods as points between two quantities, with their spread over seeds and their names beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stfseb.report.records import Group, Record, Spread, spread
from stfseb.report.style import INK, PAPER, look, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = Callable[[Record], float | None]
Point = tuple[Group, dict[str, Any], Spread, Spread]
Drawn = list[tuple[float, float]]


def scatter(
    axes: Sequence[Axes],
    rows: Sequence[Group],
    quantities: Sequence[tuple[Value, Value]],
    *,
    spans: tuple[float, float],
    from_zero: bool = False,
) -> None:
    """Draw one panel for each pair (x, y) of `quantities`, all in one frame.

    `spans` is the least width and height of the frame, which keeps seed noise from looking like a difference;
    `from_zero` starts the horizontal axis at zero.
    """
    seeds: Drawn = []
    panels = [_points(ax, rows, x, y, seeds) for ax, (x, y) in zip(axes, quantities, strict=True)]
    everything = [point for points in panels for point in points]
    if not everything:
        return
    across = _frame([x for _, _, x, _ in everything], [x for x, _ in seeds], spans[0])
    if from_zero:
        across = (0.0, 1.28 * max(x.mean + (x.std or 0) for _, _, x, _ in everything))
    up = _frame([y for _, _, _, y in everything], [y for _, y in seeds], spans[1])
    for ax, points in zip(axes, panels, strict=True):
        ax.set_xlim(*across)
        ax.set_ylim(*up)
        for axis, (low, high) in ((ax.yaxis, up), *(() if from_zero else ((ax.xaxis, across),))):
            ticks = [float(t) for t in axis.get_major_locator().tick_values(low, high)]
            axis.set_ticks([t for t in ticks if low <= t <= min(high, 100.0 + 1e-9)])
        _name_points(ax, [(short_name(g.shown), s, x.mean, y.mean) for g, s, x, y in points])


def _points(ax: Axes, rows: Sequence[Group], x_of: Value, y_of: Value, drawn: Drawn) -> list[Point]:
    """Draw the means with their deviations, and every seed as a small dot, which goes into `drawn`."""
    points: list[Point] = []
    for place, group in enumerate(rows):
        pairs = [(x_of(r), y_of(r)) for r in group.records]
        both = [(x, y) for x, y in pairs if x is not None and y is not None]
        x, y = spread([p[0] for p in both]), spread([p[1] for p in both])
        if x is None or y is None:
            continue
        style = look(group.method, place)
        colour, order = style["color"], style["zorder"]
        points.append((group, style, x, y))
        drawn += both
        if len(both) > 1:
            seeds = [b[0] for b in both], [b[1] for b in both]
            ax.scatter(*seeds, c=colour, s=9, alpha=0.45, linewidths=0, zorder=2)
            ax.errorbar(x.mean, y.mean, y.std, x.std, color=colour, linewidth=1.1, zorder=order)
        size = 230 if style["ours"] else 62
        ax.scatter(x.mean, y.mean, s=size, color=colour, marker=style["marker"], zorder=order + 1)
    return points


def _frame(values: Sequence[Spread], seeds: Sequence[float], least: float) -> tuple[float, float]:
    low = min(*(v.mean - (v.std or 0) for v in values), *seeds)
    high = max(*(v.mean + (v.std or 0) for v in values), *seeds)
    # Both axes are percent: near 100 there is less noise to hide, and nothing lies above, but a mark there needs room.
    span = max(high - low, min(least, max(least / 5, 2 * (100 - high))))
    room = 0.62 * span
    middle = (low + high) / 2
    return middle - room, max(min(middle + room, 100 + 0.12 * span), high + 0.02 * room)


def _name_points(ax: Axes, points: Sequence[tuple[str, dict[str, Any], float, float]]) -> None:
    """Write each name in the free place nearest to its point, with a line to the point where that is not beside it."""
    from matplotlib.patheffects import withStroke

    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    line = 0.055  # height of a line of text; all in fractions of the frame
    spots = [((x - left) / (right - left), (y - low) / (high - low)) for _, _, x, y in points]
    taken = [(x - 0.02, x + 0.02, y) for x, y in spots]  # start, end and middle of what is drawn already
    for (label, style, x, y), (across, up) in sorted(zip(points, spots, strict=True), key=lambda p: -p[1][1]):
        length = 0.026 * len(label)
        leftwards = across + 0.03 + length > 1
        start = across - 0.03 - length if leftwards else across + 0.03
        tries = [0.6 * line + sign * step * line / 2 for step in range(40) for sign in (1, -1)]
        inside = [t for t in tries if line / 2 < up + t < 1 - line / 2] or [0.0]
        shift = next((t for t in inside if _free(taken, start, start + length, up + t, line)), inside[0])
        taken.append((start, start + length, up + shift))
        away = abs(shift) > 1.5 * line
        ax.annotate(
            label,
            (x, y),
            xytext=(start + length if leftwards else start, up + shift),
            textcoords="axes fraction",
            ha="right" if leftwards else "left",
            va="center",
            color=INK,
            fontsize=10 if style["ours"] else 9.5,
            fontweight="bold" if style["ours"] else "normal",
            path_effects=[withStroke(linewidth=3, foreground=PAPER)],
            arrowprops={"arrowstyle": "-", "color": style["color"], "linewidth": 0.9} if away else None,
            zorder=7,
        )


def _free(taken: Sequence[tuple[float, float, float]], start: float, end: float, middle: float, line: float) -> bool:
    return not any(abs(middle - m) < line and start < e and s < end for s, e, m in taken)
