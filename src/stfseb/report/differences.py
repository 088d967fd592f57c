"""Is ST-FS-EB better? Paired over seeds, with 95 % intervals, against each other method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stfseb.evaluation.paired import paired
from stfseb.experiments.paper.plan import task_label
from stfseb.report.grid import Cell, Grid
from stfseb.report.paper import signed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stfseb.experiments.paper import Plan, Quantity, Variant
    from stfseb.report.paper import Found

OURS = "stfseb"
_MINUS = "ST-FS-EB minus the other method, mean over the seeds that both have"
NOTES = (
    (
        f"{_MINUS}, with the 95 % interval of the paired t test. Bold: the interval leaves out zero, in favour of "
        "ST-FS-EB; underlined: against it."
    ),
    (
        "The intervals are of single comparisons; of twenty about one leaves out zero by chance. They are of the seeds "
        "alone: test images, validation split and settings are the same for all seeds."
    ),
)
LEAST = 3  # common seeds that an interval needs: of two, it is thirteen standard errors to either side
_TOO_FEW = (
    "Two common seeds give no useful interval: differences over two seeds stand here without an interval and without "
    "a mark."
)


def too_few(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Return the note on differences without an interval where there are such, else nothing."""
    return (_TOO_FEW,) if any(0 < len(cell.seeds) < LEAST for cell in cells) else ()


def has_interval(cells: Iterable[Cell]) -> bool:
    """Tell whether any of these differences is over seeds enough for an interval."""
    return any(len(cell.seeds) >= LEAST for cell in cells)


def _explained(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Say what the numbers are; of intervals only where there are some."""
    return NOTES if has_interval(cells) else (f"{_MINUS}.",)


def difference_grid(plans: Sequence[Plan], found: Found) -> Grid | None:
    """Return the differences in the quantities of the plans (tables 1 and 2), None where no pair of runs exists."""
    others: dict[str, Variant] = {v.key: v for plan in plans for v in plan.variants if v.method != OURS}
    rows: list[tuple[tuple[str, str], tuple[Cell, ...]]] = []
    tasks = dict.fromkeys(task for plan in plans for task in plan.tasks)
    for task in tasks:
        for plan in plans:
            for quantity in plan.quantities.get(task, ()):
                cells = tuple(difference_cell(plan, found, task, other, quantity) for other in others.values())
                if any(c.value is not None for c in cells):
                    rows.append(((task_label(task), quantity.heading), cells))
    if not rows:
        return None
    kept = [i for i in range(len(others)) if any(cells[i].value is not None for _, cells in rows)]
    labels = [v.label for v in others.values()]
    shown = [cells[i] for _, cells in rows for i in kept]
    return Grid(
        "differences",
        "ST-FS-EB against each other method, paired by seed",
        ("Task", "Metric"),
        tuple(f"− {labels[i]}" for i in kept),
        tuple(stub for stub, _ in rows),
        tuple(tuple(cells[i] for i in kept) for _, cells in rows),
        (*_explained(shown), *too_few(shown)),
    )


def difference_cell(plan: Plan, found: Found, task: str, other: Variant, quantity: Quantity) -> Cell:
    """Return ST-FS-EB minus another method with its interval, as `paired_cell` does."""
    ours = next((v for v in plan.variants if v.key == OURS), None)
    return Cell("–") if ours is None else paired_cell(plan, found, task, ours, other, quantity)


def paired_cell(plan: Plan, found: Found, task: str, ours: Variant, other: Variant, quantity: Quantity) -> Cell:
    """Return one variant minus another, paired by seed, with its 95 % interval and its mark from `LEAST` seeds on."""
    values, runs = [], []
    for variant in (ours, other):
        records = found.of(plan, task, variant)
        by_seed = {int(r.get("seed", 0)): v for r in records if (v := quantity.read(r)) is not None}
        values.append(by_seed)
        runs.append({int(r.get("seed", 0)): str(r["id"]) for r in records})
    if len(common := set(values[0]) & set(values[1])) < 2:
        return Cell("–" if not common else "one seed")
    result = paired(values[0], values[1])
    better = result.mean > 0 if quantity.higher else result.mean < 0
    enough = len(result.seeds) >= LEAST
    rank = 0 if not (enough and result.significant) else 1 if better else 2
    ids = tuple(side[seed] for seed in result.seeds for side in runs)
    ends = (result.low or 0.0, result.high or 0.0)
    digits = quantity.digits
    # Of a marked difference an end that would be printed as zero gets more digits: on which side of zero does it lie?
    while rank and digits < quantity.digits + 3 and any(round(end, digits) == 0 for end in ends):
        digits += 1
    low, high = (signed(end, digits) for end in ends)
    below = (*([f"{low} to {high}"] if enough else []), f"{len(result.seeds)} seeds")
    return Cell(signed(result.mean, quantity.digits), result.mean, seeds=result.seeds, runs=ids, rank=rank, below=below)
