"""The figures of `stfseb bench`: a table, JSON and a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stfseb.files import replacing, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
        with replacing(folder / "bench.png") as part:
            _plot(rows).savefig(part, format="png", dpi=150, bbox_inches="tight")
    return folder


def _plot(rows: Sequence[dict[str, Any]]) -> Any:
    """Return bars of seconds an epoch with their floors, and curves of how the cost grows where that was measured."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    plain = [row for row in rows if _plain(row)]
    grown = [name for name in _SIZES if len({row[name] for row in rows}) > 1]
    figure = Figure(figsize=(6 + 3 * len(grown), 0.35 * len(plain) + 1.5), layout="constrained")
    axes = figure.subplots(1, 1 + len(grown), width_ratios=[2.2] + [1] * len(grown), squeeze=False)[0]
    labels = [f"{row['task']} {row['method']} {row['way']}" for row in plain]
    bars = axes[0].barh(labels, [row["seconds_per_epoch"] for row in plain], color="#8899aa")
    axes[0].bar_label(bars, fmt="{:.3g}", padding=2)
    floors = [(row["floor_seconds"], label) for row, label in zip(plain, labels, strict=True) if "floor_seconds" in row]
    if floors:
        axes[0].plot(*zip(*floors, strict=True), "|", color="#aa3333", markersize=12, label="counted floor")
        axes[0].legend(frameon=False, fontsize="small")
    axes[0].margins(x=0.15)
    axes[0].invert_yaxis()
    axes[0].set(xscale="log" if plain else "linear", xlabel="seconds an epoch", title="Ways of training")
    for ax, name in zip(axes[1:], grown, strict=True):
        for task in sorted({row["task"] for row in rows}):
            base = next((r for r in rows if r["task"] == task and not _plain(r)), None)
            if base is None:
                continue
            same = [r for r in rows if r["task"] == task and r["way"] == base["way"] and r["method"] == base["method"]]
            line = sorted({(r[name], r["seconds_per_epoch"]) for r in same if _plain(r, name)})
            ax.plot([x for x, _ in line], [y for _, y in line], marker="o", label=task)
        ax.set(xscale="log", yscale="log", xlabel=name.replace("_", " "), title=f"Growth with {name.replace('_', ' ')}")
        sizes = sorted({row[name] for row in rows})
        ax.set_xticks(sizes, [str(size) for size in sizes], rotation=45)
        ax.legend(frameon=False)
    for ax in axes:
        ax.xaxis.set_minor_formatter(NullFormatter())  # which would write over each other
    return figure


def _unusual(row: dict[str, Any]) -> list[str]:
    """Return the sizes that differ from the standard ones, in words."""
    return [f"{name}={row[name]}" for name, value in STANDARD.items() if row.get(name) != value]


def _plain(row: dict[str, Any], but: str = "") -> bool:
    """Tell whether a row has the standard sizes (but for one)."""
    return all(row.get(name) == value for name, value in STANDARD.items() if name != but)
