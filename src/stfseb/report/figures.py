"""The figures of a report: each function draws the records of one task.

It returns a matplotlib Figure, or None where the records hold nothing to draw; `columns` says how many
panels stand side by side. Figures are made without pyplot, so that no window system, no backend and no
global state is involved.
"""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from stfseb.report.records import Group, Record, groups, ood_families, ood_sets, spread
from stfseb.report.scatter import Value, scatter
from stfseb.report.style import FAMILIAR, INK, MUTED, UNFAMILIAR, look, short_name, styled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def headline(records: Sequence[Record], columns: int = 3) -> Figure | None:
    """Accuracy on familiar images against AUROC on unfamiliar ones: the upper right corner is where to be."""
    families = ood_families(records)
    if not families:
        return None
    shown = dict(list(families.items())[:3]) if len(families) <= 3 else {"mean over sets": ood_sets(records)}
    with styled():
        figure, axes = panels(len(shown), columns=columns, width=4.3 if len(shown) < 3 else 3.6, height=3.9)
        scatter(axes, groups(records), [(_accuracy, _auroc(sets)) for sets in shown.values()], spans=(4.0, 12.0))
        for ax, name in zip(axes, shown, strict=True):
            ax.set_title(f"unfamiliar: {short_name(name)}")
            ax.text(1, 1.02, "better ↗", transform=ax.transAxes, ha="right", va="bottom", color=MUTED, fontsize=9)
        label_outer(axes, columns, "test accuracy, %", "AUROC, %")
    return figure


def cost(records: Sequence[Record]) -> Figure | None:
    """Training time against the mean AUROC over unfamiliar sets (accuracy where there are none)."""
    sets = ood_sets(records)
    quality = _auroc(sets) if sets else _accuracy

    def seconds(record: Record) -> float | None:
        value = record.get("seconds")
        return None if value is None else float(value)

    if not any(seconds(r) for r in records):
        return None
    with styled():
        figure, (ax,) = panels(1, columns=1, width=5.6, height=3.7)
        scatter([ax], groups(records), [(seconds, quality)], spans=(0.0, 12.0), from_zero=True)
        ax.set_xlabel("training time of a run, seconds")
        ax.set_ylabel("AUROC, mean over unfamiliar sets, %" if sets else "test accuracy, %")
    return figure


def confidence(records: Sequence[Record], columns: int = 3) -> Figure | None:
    """How sure each method is on familiar and on unfamiliar images: the two should come apart."""
    found = [g for g in groups(records) if _summaries(g, "confidence")]
    if not found:
        return None
    names = list(dict.fromkeys(n for g in found for s in _summaries(g, "confidence") for n in s["ood"]))
    names = names[: len(UNFAMILIAR)]
    with styled():
        figure, axes = panels(len(found), columns=columns, width=3.5, height=2.6)
        for ax, group in zip(axes, found, strict=True):
            parts = _summaries(group, "confidence")
            test = _histogram([p["test"] for p in parts])
            edges = np.linspace(0, 1, len(test) + 1)
            ax.stairs(test, edges, fill=True, color=FAMILIAR, alpha=0.55, label="test images")
            for name, colour in zip(names, UNFAMILIAR, strict=False):
                counts = [p["ood"][name] for p in parts if name in p["ood"]]
                if counts:
                    ax.stairs(_histogram(counts), edges, color=colour, linewidth=1.6, label=short_name(name))
            ax.set_title(short_name(group.label))
            ax.set_xlim(0, 1)
            ax.set_yscale("symlog", linthresh=0.02)
            ax.set_ylim(0, 1)
            ax.set_yticks([0, 0.01, 0.02, 0.1, 1], ["0", "1", "2", "10", "100"])
        label_outer(axes, columns, "confidence (highest probability)", "images in bin, %")
        legend(figure, axes)
    return figure


def reliability(records: Sequence[Record], columns: int = 3) -> Figure | None:
    """Confidence against accuracy on the test images: on the diagonal, 80 % sure is right 80 % of the time."""
    found = [g for g in groups(records) if _summaries(g, "reliability")]
    if not found:
        return None
    with styled():
        figure, axes = panels(len(found), columns=columns, width=3.3, height=3.0)
        for place, (ax, group) in enumerate(zip(axes, found, strict=True)):
            style = look(group.method, place)
            centre, right, share = _pooled(_summaries(group, "reliability"))
            full = share > 0
            ax.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
            ax.vlines(centre[full], centre[full], right[full], color=style["color"], linewidth=4, alpha=0.3)
            ax.scatter(centre[full], right[full], s=14 + 160 * np.sqrt(share[full]), color=style["color"], zorder=3)
            error = spread([r["metrics"].get("ece") for r in group.records])
            ax.set_title(short_name(group.label) + (f", ECE {error.mean:.3f}" if error else ""))
            ax.set_xlim(0, 1.04)
            ax.set_ylim(0, 1.04)
        label_outer(axes, columns, "confidence", "accuracy")
    return figure


def roc(records: Sequence[Record], columns: int = 3) -> Figure | None:
    """Unfamiliar images found against familiar ones flagged by mistake, at every threshold of confidence."""
    found = [g for g in groups(records) if _summaries(g, "roc")]
    names = list(dict.fromkeys(n for g in found for s in _summaries(g, "roc") for n in s))[:6]
    if not names:
        return None
    grid = np.concatenate([np.linspace(0, 0.1, 60), np.linspace(0.1, 1, 120)[1:]])
    with styled():
        figure, axes = panels(len(names), columns=columns, width=4.0, height=3.9)
        for ax, name in zip(axes, names, strict=True):
            ax.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
            for place, group in enumerate(found):
                style = look(group.method, place)
                curves = [s[name] for s in _summaries(group, "roc") if name in s]
                if not curves:
                    continue
                tpr = np.mean([np.interp(grid, c["fpr"], c["tpr"]) for c in curves], axis=0)
                width = 2.6 if style["ours"] else 1.5
                ax.plot(
                    grid,
                    tpr,
                    color=style["color"],
                    linewidth=width,
                    zorder=style["zorder"],
                    label=short_name(group.label),
                )
            ax.set_title(f"unfamiliar: {short_name(name)}")
            ax.set_xlim(-0.01, 1)
            ax.set_ylim(0, 1.01)
        label_outer(axes, columns, "test images flagged", "unfamiliar images flagged")
        legend(figure, axes)
    return figure


def risk_coverage(records: Sequence[Record]) -> Figure | None:
    """Error among the images a method is surest of: what remains when it may decline to answer."""
    found = [g for g in groups(records) if _summaries(g, "risk_coverage")]
    if not found:
        return None
    grid = np.linspace(0.02, 1, 150)
    with styled():
        figure, (ax,) = panels(1, columns=1, width=5.6, height=3.5)
        for place, group in enumerate(found):
            style = look(group.method, place)
            curves = _summaries(group, "risk_coverage")
            risk = np.mean([np.interp(grid, c["coverage"], c["risk"]) for c in curves], axis=0)
            width = 2.6 if style["ours"] else 1.5
            ax.plot(100 * grid, 100 * risk, color=style["color"], linewidth=width, label=short_name(group.label))
        ax.set_xlabel("test images answered, the surest first, %")
        ax.set_ylabel("errors among them, %")
        ax.set_xlim(0, 100)
        ax.set_ylim(bottom=0)
        legend(figure, [ax])
    return figure


def validation(records: Sequence[Record]) -> Figure | None:
    """Validation NLL by epoch; the dot is the epoch that was kept."""
    found = [g for g in groups(records) if any(r.get("history") for r in g.records)]
    if not found:
        return None
    with styled():
        figure, (ax,) = panels(1, columns=1, width=6.2, height=3.5)
        lowest = []
        ends: dict[str, float] = {}  # the highest of what a method's lines end at, or keep
        for place, group in enumerate(found):
            style = look(group.method, place)
            for number, record in enumerate(r for r in group.records if r.get("history")):
                epochs, values = _curve(record, "validation_nll")
                if not epochs:
                    continue
                lowest.extend(values)
                ends[group.label] = max(ends.get(group.label, 0.0), values[-1])
                label = short_name(group.label) if number == 0 else None
                width = 2.2 if style["ours"] else 1.4
                ax.plot(epochs, values, color=style["color"], linewidth=width, zorder=style["zorder"], label=label)
                if record.get("best_epoch") in epochs:
                    best = epochs.index(record["best_epoch"])
                    ends[group.label] = max(ends.get(group.label, 0.0), values[best])
                    ax.plot(epochs[best], values[best], "o", color=style["color"], markersize=6, zorder=6)
        if not lowest:
            return None
        # The first epochs would squeeze the part where methods differ.
        top = max(np.quantile(lowest, 0.9), min(lowest) * 1.5)
        ax.set_ylim(min(lowest) - 0.06 * (top - min(lowest)), top)
        _name_above(ax, {short_name(label): value for label, value in ends.items() if value > top})
        ax.set_xlabel("epoch")
        ax.set_ylabel("validation NLL, nats")
        _whole_numbers(ax)
        legend(figure, [ax])
    return figure


def terms(records: Sequence[Record], columns: int = 3) -> Figure | None:
    """The parts of the objective by epoch, in nats per example, for the first seed of each method."""
    kinds = (
        ("data", "fit to the data", INK),
        ("function", "function prior", UNFAMILIAR[0]),
        ("weights", "weight prior", UNFAMILIAR[1]),
    )
    found = [(g, r) for g in groups(records) for r in g.records[:1] if r.get("history")]
    if not found:
        return None
    with styled():
        figure, axes = panels(len(found), columns=columns, width=3.5, height=2.6, share="x")
        for ax, (group, record) in zip(axes, found, strict=True):
            lowest = 0.0
            for key, label, colour in kinds:
                epochs, values = _curve(record, key)
                if any(values):  # a term that a method does not have is zero throughout
                    ax.plot(epochs, values, color=colour, label=label, marker="o" if len(epochs) == 1 else None)
                    lowest = min(lowest, *values)
            ax.set_title(short_name(group.label))
            if lowest == 0:
                ax.set_ylim(bottom=0)
            _whole_numbers(ax)
        label_outer(axes, columns, "epoch", "nats per example")
        legend(figure, axes)
    return figure


# Pieces ----------------------------------------------------------------------------------------------


def panels(count: int, *, columns: int, width: float, height: float, share: str = "both") -> tuple[Figure, list[Axes]]:
    """Return a figure of panels, `columns` side by side; they share both axes, or the horizontal one ("x")."""
    from matplotlib.figure import Figure

    across = min(count, columns)
    width = max(width, 4.6) if columns == 1 else width  # one panel under the other, for a phone
    down = math.ceil(count / across)
    figure = Figure(figsize=(width * across, height * down + 0.35), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=share == "both")
    axes = list(grid.flat)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def _accuracy(record: Record) -> float | None:
    value = record["metrics"].get("acc")
    return None if value is None else 100 * float(value)


def _auroc(sets: Sequence[str]) -> Value:
    def value(record: Record) -> float | None:
        found = [record["metrics"].get(f"auroc/{name}") for name in sets]
        return None if None in found or not found else 100 * float(np.mean(found))

    return value


def _summaries(group: Group, key: str) -> list[dict[str, Any]]:
    return [r["summary"][key] for r in group.records if (r.get("summary") or {}).get(key)]


def _histogram(counts: Sequence[Sequence[int]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Average over seeds, pairs of the 50 bins joined: fewer, steadier steps."""
    shares = np.mean([np.asarray(c, float) / max(sum(c), 1) for c in counts], axis=0)
    joined: np.ndarray[Any, np.dtype[np.float64]] = (
        shares.reshape(-1, 2).sum(axis=1) if len(shares) % 2 == 0 else shares
    )
    return joined


def _pooled(bins: Sequence[dict[str, Any]]) -> tuple[Any, Any, Any]:
    """Pool the bins of all seeds: mean confidence, accuracy and share of the images in each."""
    count = np.array([b["count"] for b in bins], float)
    total = count.sum(axis=0)
    some = np.where(total > 0, total, 1)
    means = []
    for key in ("confidence", "accuracy"):
        values = np.array([[0.0 if v is None else v for v in b[key]] for b in bins])
        means.append((values * count).sum(axis=0) / some)
    return means[0], means[1], total / total.sum()


def _curve(record: Record, key: str) -> tuple[list[int], list[float]]:
    rows = [(row["epoch"], row[key]) for row in record.get("history") or [] if row.get(key) is not None]
    finite = [(int(e), float(v)) for e, v in rows if math.isfinite(v)]
    return [e for e, _ in finite], [v for _, v in finite]


def _name_above(ax: Axes, ends: Mapping[str, float]) -> None:
    """Name the lines that end above the frame, with how high they go: they would be missing without a word."""
    if not ends:
        return
    words = ", ".join(f"{label} (up to {value:.2f})" for label, value in ends.items())
    said = textwrap.fill(f"above the frame: {words}", 78)
    ax.text(0, 1.02, said, transform=ax.transAxes, ha="left", va="bottom", color=MUTED, fontsize=9)


def _whole_numbers(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    low, high = ax.get_xlim()
    if high - low < 1:  # one epoch: ticks would be hundredths of it
        middle = round((low + high) / 2)
        ax.set_xlim(middle - 0.5, middle + 0.5)


def label_outer(axes: Sequence[Axes], columns: int, x: str, y: str) -> None:
    """Name the axes at the figure's edge alone."""
    for place, ax in enumerate(axes):
        below = place + columns >= len(axes)
        ax.xaxis.set_tick_params(labelbottom=below)
        if below:
            ax.set_xlabel(x)
        if place % columns == 0:
            ax.set_ylabel(y)


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Put one legend for all panels above them."""
    entries: dict[str, Any] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            entries.setdefault(label, handle)
    if entries:
        widest = 0.6 + 0.085 * max(map(len, entries))  # inches of an entry at the legend's type size
        fit = max(1, int(figure.get_figwidth() / widest))
        # Rows of equal length read better than a full one and a remainder.
        columns = math.ceil(len(entries) / math.ceil(len(entries) / fit))
        figure.legend(list(entries.values()), list(entries), loc="outside upper left", ncols=columns)
