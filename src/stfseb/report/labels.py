"""Names beside points: each in the free place nearest to its point, measured with the type that is drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stfseb.report.style import PAPER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels
_GAP = 3.0  # pixels between a name and what is drawn


@dataclass(frozen=True)
class Named:
    """A point with its name: where it is, the half size of its mark in points, its error bars, and its type."""

    text: str
    x: float
    y: float
    reach: float = 5.0
    x_error: float = 0.0
    y_error: float = 0.0
    colour: str = "black"
    type: dict[str, Any] | None = None  # further properties of the text
    led: bool = False  # always off its point with a line to it, and nearer to no other: for a point beside its like


def name_points(ax: Axes, points: Sequence[Named]) -> list[Annotation]:
    """Write the names; call it when limits and layout are final. Names far from their points get a line to them."""
    from matplotlib.patheffects import withStroke

    frame = _box(ax.get_window_extent())
    scale = ax.figure.dpi / 72
    spots = [_spot(ax, p) for p in points]
    marks = [_around(spot, p.reach * scale) for spot, p in zip(spots, points, strict=True)]
    bars = [bar for p in points for bar in _bars(ax, p)]
    written: list[Annotation] = []
    taken: list[Box] = []
    lines: list[tuple[tuple[float, float], tuple[float, float]]] = []
    # The crowded first; those that have a line to their point can stand anywhere, so they come last.
    crowded = sorted(range(len(points)), key=lambda i: (points[i].led, min(_apart(spots, i), default=0.0), i))
    for i in crowded:
        point, (x, y) = points[i], spots[i]
        name = ax.annotate(
            point.text,
            (point.x, point.y),
            xytext=(0, 0),
            textcoords="offset points",
            va="bottom",
            ha="left",
            path_effects=[withStroke(linewidth=2.5, foreground=PAPER)],
            zorder=8,
            **{"fontsize": 9.5, **(point.type or {})},
        )
        left, low, right, high = _box(name.get_window_extent())
        width, height = right - left, high - low
        best: tuple[float, Box, float] | None = None
        for start, bottom, away in _places(x, y, width, height, point.reach * scale):
            box = (start, bottom, start + width, bottom + height)
            line = ((x, y), _nearest(box, x, y))
            hidden = 30.0 * sum(_over(box, other) for other in taken) + 8.0 * sum(_over(box, m) for m in marks)
            hidden += 2.0 * sum(_over(box, bar) for bar in bars) + 60.0 * _outside(box, frame)
            if away > 0:  # a line to the point must not run through names or over other marks
                others = [*taken, *(m for j, m in enumerate(marks) if j != i)]
                hidden += sum(_crosses(line, other) for other in others) * 0.5 * height * height
            hidden += sum(_crosses(old, box) for old in lines) * 0.5 * height * height
            cost = hidden / (height * height) + 0.25 * away / height
            if point.led:
                far = math.dist(*line)
                near = sum(math.dist(spot, _nearest(box, *spot)) < far for j, spot in enumerate(spots) if j != i)
                near += sum(_over(box, _grown(name_box, 0.7 * height)) > 0 for name_box in taken)
                through = sum(_crosses(line, name_box) for name_box in taken)
                cost += 1.5 * near + 8.0 * through + (4.0 if away < height else 0.0)
            if best is None or cost < best[0] - 1e-9:
                best = (cost, box, away)
        assert best is not None
        _, box, away = best
        name.set_position(((box[0] - x) / scale, (box[1] - y) / scale))  # points: right at any resolution
        taken.append((box[0] - 2 * _GAP, box[1], box[2] + 2 * _GAP, box[3]))  # names side by side need a space
        if away > 0.9 * height or point.led:
            end = _nearest(box, x, y)
            lines.append(((x, y), end))
            out = point.reach * scale / math.dist((x, y), end) if point.led else 0.0  # a hollow mark stays hollow
            back = ax.transData.inverted().transform([(x + out * (end[0] - x), y + out * (end[1] - y)), end])
            ax.plot(back[:, 0], back[:, 1], color=point.colour, linewidth=0.9, zorder=2.5, label="_line")
        written.append(name)
    return written


def _places(x: float, y: float, width: float, height: float, reach: float) -> Iterator[tuple[float, float, float]]:
    """Give lower left corners for a name, nearest first: right, left, above, below, and further out all round."""
    near = reach + _GAP
    middle = y - height / 2
    yield x + near, middle, 0.0
    yield x - near - width, middle, 0.0
    for side in (y + near, y - near - height):
        for start in (x - width / 2, x + 0.5 * near, x - width - 0.5 * near, x - 0.25 * width, x - 0.75 * width):
            yield start, side, 0.0
    for step in range(1, 13):
        out = near + 0.5 * step * height
        for turn in range(24):
            angle = 2 * math.pi * turn / 24
            across, up = out * math.cos(angle), out * math.sin(angle)
            start = x + across - (0.0 if across > 1 else width if across < -1 else width / 2)
            yield start, y + up - height / 2 * (1 - math.sin(angle)), 0.5 * step * height


def _spot(ax: Axes, point: Named) -> tuple[float, float]:
    x, y = ax.transData.transform((point.x, point.y))
    return float(x), float(y)


def _bars(ax: Axes, point: Named) -> list[Box]:
    """Return the error bars as thin boxes."""
    ends = [(point.x - point.x_error, point.y - point.y_error), (point.x + point.x_error, point.y + point.y_error)]
    (left, low), (right, high) = ax.transData.transform(ends)
    x, y = ax.transData.transform((point.x, point.y))
    found = [(left, y - 1.5, right, y + 1.5)] if point.x_error else []
    return [*found, *([(x - 1.5, low, x + 1.5, high)] if point.y_error else [])]


def _apart(spots: Sequence[tuple[float, ...]], i: int) -> list[float]:
    return [math.dist(spots[i], other) for j, other in enumerate(spots) if j != i]


def _around(spot: Sequence[float], reach: float) -> Box:
    return spot[0] - reach, spot[1] - reach, spot[0] + reach, spot[1] + reach


def _box(found: Bbox) -> Box:
    return float(found.x0), float(found.y0), float(found.x1), float(found.y1)


def _over(a: Box, b: Box) -> float:
    """Return the area that two boxes share, a gap between them counted in."""
    across = min(a[2], b[2]) - max(a[0], b[0]) + _GAP / 2
    up = min(a[3], b[3]) - max(a[1], b[1]) + _GAP / 2
    return max(across, 0.0) * max(up, 0.0)


def _grown(box: Box, by: float) -> Box:
    return box[0] - by, box[1] - by, box[2] + by, box[3] + by


def _outside(box: Box, frame: Box) -> float:
    inside = max(min(box[2], frame[2]) - max(box[0], frame[0]), 0) * max(
        min(box[3], frame[3]) - max(box[1], frame[1]), 0
    )
    return (box[2] - box[0]) * (box[3] - box[1]) - inside


def _nearest(box: Box, x: float, y: float) -> tuple[float, float]:
    return min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])


def _crosses(line: tuple[tuple[float, float], tuple[float, float]], box: Box) -> bool:
    """Tell whether a line runs through a box; its two ends do not count."""
    (ax, ay), (bx, by) = line
    steps = (k / 12 for k in range(1, 12))
    return any(box[0] < ax + t * (bx - ax) < box[2] and box[1] < ay + t * (by - ay) < box[3] for t in steps)
