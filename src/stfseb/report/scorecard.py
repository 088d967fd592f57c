"""Where ST-FS-EB stands, row by row: against the paper's own figure, and against the best of the methods run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stfseb.experiments.paper.plan import task_label
from stfseb.report.differences import OURS, difference_cell
from stfseb.report.grid import Cell, Grid
from stfseb.report.paper import beside, number_cell, ranked, signed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stfseb.experiments.paper import Plan, Quantity, Variant
    from stfseb.report.paper import Found

COLUMNS = ("ST-FS-EB", "The paper's", "At least the paper's", "Best of all", "Best other method", "Ours minus it")


def scorecard(plans: Sequence[Plan], found: Found) -> Grid | None:
    """Return the rows of tables 1 and 2 for which ST-FS-EB was run, None where there are none."""
    rows: list[tuple[tuple[str, str], tuple[Cell, ...]]] = []
    for task in dict.fromkeys(task for plan in plans for task in plan.tasks):
        for plan in plans:
            own = next((v for v in plan.variants if v.key == OURS), None)
            for quantity in plan.quantities.get(task, ()) if own is not None else ():
                cells = _row(plan, found, task, own, quantity) if own is not None else None
                if cells is not None:
                    rows.append(((task_label(task), quantity.heading), cells))
    if not rows:
        return None
    return Grid(
        "scorecard",
        "Where ST-FS-EB stands",
        ("Task", "Metric"),
        COLUMNS,
        tuple(stub for stub, _ in rows),
        tuple(cells for _, cells in rows),
        _notes([cells for _, cells in rows]),
        own=COLUMNS[0],
    )


def _row(plan: Plan, found: Found, task: str, own: Variant, quantity: Quantity) -> tuple[Cell, ...] | None:
    ours = number_cell(plan, found, task, own, quantity)
    if ours.value is None:
        return None
    others = [v for v in plan.variants if v.key != OURS]
    cells = [number_cell(plan, found, task, v, quantity) for v in others]
    there = [(v, c) for v, c in zip(others, cells, strict=True) if c.value is not None]
    marked = ranked([ours, *(c for _, c in there)], quantity.digits, quantity.higher)
    bare = replace(ours, below=(), rank=0)
    paper = beside(plan, task, quantity, own)
    theirs, reached = Cell("–"), Cell("–")
    if paper is not None:
        spread = "" if paper.std is None else f" ± {paper.std:.3f}"
        theirs = Cell(f"{paper.mean:.{quantity.digits}f}{spread}")
        away = paper.deviations(ours.value)
        if away is not None:
            good = away >= -1 if quantity.higher else away <= 1
            reached = Cell("yes" if good else "no", rank=1 if good else 0, below=(f"{signed(away, 1)} sd",))
    if not there:
        return bare, theirs, reached, Cell("–"), Cell("–"), Cell("–")
    sign = 1.0 if quantity.higher else -1.0
    best, value = max(there, key=lambda pair: sign * (pair[1].value or 0.0))
    first = marked[0].rank == 1 or len({c.value for c in marked}) == 1
    verdict = Cell("yes" if first else "no", rank=1 if first else 0)
    other = Cell(best.label, below=(value.text,), runs=value.runs)
    return bare, theirs, reached, verdict, other, difference_cell(plan, found, task, best, quantity)


def _notes(rows: Sequence[tuple[Cell, ...]]) -> tuple[str, ...]:
    compared = [row[2] for row in rows if row[2].text != "–"]
    raced = [row[3] for row in rows if row[3].text != "–"]
    words = []
    if compared:
        reached = sum(cell.text == "yes" for cell in compared)
        words.append(
            f"At least the paper's ST-FS-EB, within one of its standard deviations: {reached} of {len(compared)}."
        )
    if raced:
        first = sum(cell.text == "yes" for cell in raced)
        words.append(f"Best of the methods run, or level with the best: {first} of {len(raced)} rows.")
    return tuple(words)
