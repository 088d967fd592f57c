"""Did ST-FS-EB hold the paper's figures, where is it best of the methods, and what stands in the way elsewhere?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stfseb.experiments.paper.plan import task_label
from stfseb.experiments.paper.tempered import corrupted_note
from stfseb.report.differences import OURS, difference_cell, difference_grid, has_interval, paired_cell, too_few
from stfseb.report.grid import MISSING, Cell, Grid
from stfseb.report.paper import about_data, beside, number_cell, signed
from stfseb.report.records import REFERENCES, plain
from stfseb.report.temperatures import not_raced
from stfseb.report.words import listed, number_word

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stfseb.experiments.paper import Plan, Quantity, Variant
    from stfseb.report.paper import Found
    from stfseb.report.paper_numbers import Printed

STUBS = ("Task", "Metric")
Row = tuple[tuple[str, str], tuple[Cell, ...]]


def standing(plans: Sequence[Plan], found: Found) -> dict[str, list[Grid]]:
    """Return the tables that judge the main ones, and the one after a temperature, by the names of their blocks."""
    main = [p for p in plans if p.what in ("table1", "table2")]
    tempered = [p for p in plans if p.what == "tempered"]
    said = (
        *corrupted_note([task for p in tempered for task in p.tasks]),
        *not_raced(tempered, found, "ST-FS-EB"),
    )
    grids: dict[str, Sequence[Grid | None]] = {
        "held": [held_grid(main, found)],
        "best": race_grids(main, found),
        "best-tempered": race_grids(tempered, found, "best-tempered", " (after one temperature)", said),
        "differences": [difference_grid(main, found)],
    }
    return {name: [grid for grid in shown if grid is not None] for name, shown in grids.items()}


def held_grid(plans: Sequence[Plan], found: Found) -> Grid | None:
    """Return ST-FS-EB beside the paper's ST-FS-EB, cell by cell: held within one of the paper's deviations or not."""
    rows: list[Row] = []
    for plan, task, own, quantity in _ours(plans):
        ours = number_cell(plan, found, task, own, quantity)
        paper = beside(plan, task, quantity, own)
        if ours.value is None or paper is None:
            continue
        away = paper.deviations(ours.value)
        good = _holds(ours.value, paper, quantity) and not ours.failed
        spread = "" if paper.std is None else f" ± {paper.std:.3f}"
        cells = (
            replace(ours, below=(), rank=0),
            Cell(f"{paper.mean:.{quantity.digits}f}{spread}{' ‡' if paper.note else ''}"),
            Cell("–" if away is None else signed(away, 2 if round(abs(away), 1) == 1 else 1)),  # one is the limit
            Cell("held" if good else "not held", rank=1 if good else 0),
        )
        rows.append(((task_label(task), quantity.heading), cells))
    count = sum(cells[-1].text == "held" for _, cells in rows)
    notes = (
        (
            f"Held in {count} of {len(rows)} cells: at least as good as the paper's mean, or worse by no more than one "
            "of its standard deviations (sd). Positive is above the paper's figure, whichever direction is better."
        ),
        *_data(plans, found),
    )
    columns = ("ST-FS-EB", "The paper's", "Difference, sd", "Held")
    return _grid("held", "ST-FS-EB against the paper's ST-FS-EB", columns, rows, notes)


def _holds(ours: float, paper: Printed, quantity: Quantity) -> bool:
    sign = 1.0 if quantity.higher else -1.0
    away = paper.deviations(ours)
    if away is None:  # no deviation was printed, or 0.000: the printed digits decide
        return sign * round(ours, quantity.digits) >= sign * paper.mean
    return sign * away >= -1


@dataclass(frozen=True)
class Race:
    """A row of ST-FS-EB beside the best other method."""

    ours: Cell
    rival: Variant
    theirs: Cell
    methods: tuple[str, ...]  # all that have the number
    fallen: tuple[str, ...]  # those that have it and learnt nothing: they do not race
    ahead: float  # positive: ours is better, by the printed digits
    difference: Cell

    @property
    def sure(self) -> bool:
        """Whether the interval of the paired difference leaves out zero, on the side on which the means are."""
        return self.difference.rank == (1 if self.ahead >= 0 else 2)


def race_grids(
    plans: Sequence[Plan], found: Found, name: str = "best", where: str = "", notes: Sequence[str] = ()
) -> list[Grid]:
    """Return two tables: the rows in which ST-FS-EB is best of the methods run, or level, and the other rows."""
    best: list[Row] = []
    behind: list[Row] = []
    sure = [0, 0]
    fewer: dict[tuple[str, str], list[str]] = {}
    for plan, task, own, quantity in _ours(plans):
        race = race_of(plan, found, task, own, quantity) if quantity.higher is not None else None
        if race is None:
            continue
        first = race.ahead >= 0
        sure[0 if first else 1] += race.sure
        stub = (task_label(task), quantity.heading)
        theirs = ("level", race.theirs.text) if race.ahead == 0 else (race.theirs.text,)
        other = Cell(race.rival.label, below=theirs, runs=race.theirs.runs, seeds=race.theirs.seeds)
        cells = (replace(race.ours, below=(), rank=0), other, race.difference, _in_deviations(race))
        (best if first else behind).append((stub, cells))
        for who in left_out(race, plan):
            fewer.setdefault((stub[0], who), []).append(quantity.title)
    rows_of_cells = [cells for _, cells in (*best, *behind)]
    total = len(rows_of_cells)
    explained = [_who(plans, found), *_explained(rows_of_cells)]
    said_last = (
        *notes,
        *_data(plans, found),
        *(f"{task}: {who} ({', '.join(m)})." for (task, who), m in fewer.items()),
    )
    sides = ((best, sure[0], "in its favour"), (behind, sure[1], "against it"))
    first_note, other_note = (
        f"{len(rows)} of {total} rows{_surely(rows, count, side)}." for rows, count, side in sides
    )
    columns = ("ST-FS-EB", "{}", "Ours minus it", *(["In sd"] if _deviations(rows_of_cells) else []))
    of = f"of the {number_word(len(_methods(plans)))} methods"
    found_rows = (
        (name, f"Rows where ST-FS-EB is best {of}, or level with the best", "Next", best, first_note),
        (f"{name}-behind", "Rows where another method is ahead", "The best there", behind, other_note),
    )
    grids = [
        grid
        for part, title, column, rows, said in found_rows
        if (grid := _grid(part, title + where, tuple(c.format(column) for c in columns), rows, (said,)))
    ]
    # How to read the columns stands under the first table, what holds for both under the last.
    grids[:1] = [replace(grid, notes=(*grid.notes, *explained)) for grid in grids[:1]]
    return [*grids[:-1], *(replace(grid, notes=(*grid.notes, *said_last)) for grid in grids[-1:])]


def _methods(plans: Sequence[Plan]) -> list[str]:
    """Return the methods that the tables compare, ST-FS-EB among them."""
    return list(dict.fromkeys(v.label for plan in plans for v in plan.variants))


def left_out(race: Race, plan: Plan) -> list[str]:
    """Say which methods of the tables are not in a race, and why."""
    absent = listed(v.label for v in plan.variants if v.label not in race.methods)
    fallen = listed(race.fallen)
    words = [f"{absent} not there to compare with"] if absent else []
    return [*words, *([f"{fallen} at chance (†) and not compared"] if fallen else [])]


def _deviations(rows: Sequence[tuple[Cell, ...]]) -> bool:
    """Tell whether any difference can be said in standard deviations; of single seeds none can."""
    return any(cells[3].text not in MISSING for cells in rows)


def _explained(rows: Sequence[tuple[Cell, ...]]) -> list[str]:
    """Say what the columns are, and nothing of columns and intervals that are not there."""
    words = "Ours minus it: ST-FS-EB minus that method, over the seeds that both have."
    if has_interval(cells[2] for cells in rows):
        words = (
            "Ours minus it: mean over the seeds that both have, with the 95 % interval of the paired t test; bold "
            "where it leaves out zero in favour of ST-FS-EB, underlined where against it."
        )
    if _deviations(rows):
        words += (
            " In sd: the difference of the means in seed-to-seed standard deviations (root mean square of the two "
            "methods')."
        )
    words += " The other method is the best of its row, picked after the fact."
    return [words, *too_few(cells[2] for cells in rows)]


def _who(plans: Sequence[Plan], found: Found) -> str:
    """Name the methods that are compared, and the reference rows beside them that are not."""
    methods = _methods(plans)
    rows = [str(r.get("label") or r["method"]) for r in found.records.values() if plain(r["method"]) in REFERENCES]
    left_out = [name for name in dict.fromkeys(rows) if name not in methods]
    also = f"; reference rows ({listed(left_out)}) are not counted" if left_out else ""
    return f"Compared: {listed(methods)}{also}."


def race_of(plan: Plan, found: Found, task: str, own: Variant, quantity: Quantity) -> Race | None:
    """Return ST-FS-EB beside the best other method in a quantity; None where either is not there to compare."""
    ours = number_cell(plan, found, task, own, quantity)
    if ours.value is None or ours.failed or ours.apart:
        return None
    cells = [(v, number_cell(plan, found, task, v, quantity)) for v in plan.variants if v.key != own.key]
    fallen = tuple(v.label for v, cell in cells if cell.failed and not cell.apart)
    aside = tuple(v.label for v, cell in cells if cell.apart)  # `not_raced` names them
    there = [(v, c, c.value) for v, c in cells if c.value is not None and not c.failed and not c.apart]
    if not there:
        return None
    sign = 1.0 if quantity.higher else -1.0
    rival, theirs, value = max(there, key=lambda entry: sign * entry[2])
    ahead = sign * (round(ours.value, quantity.digits) - round(value, quantity.digits))
    difference = difference_cell(plan, found, task, rival, quantity)
    if difference.value is None:  # fewer than two common seeds
        said = "one seed" if ours.seeds == theirs.seeds else "of the means"
        difference = Cell(signed(ours.value - value, quantity.digits), ours.value - value, below=(said,))
    methods = (own.label, *fallen, *aside, *(v.label for v, _, _ in there))
    return Race(replace(ours, paper=None), rival, theirs, methods, fallen, ahead, difference)


def _surely(rows: Sequence[Row], count: int, side: str) -> str:
    """Say in how many rows the interval leaves out zero; nothing where no row has an interval."""
    if not has_interval(cells[2] for _, cells in rows):
        return ""
    return f"; in {count or 'none'} of them the 95 % interval leaves out zero, {side}"


def _in_deviations(race: Race) -> Cell:
    ours, theirs = race.ours, race.theirs
    if not ours.std or not theirs.std or ours.value is None or theirs.value is None:
        return Cell("–")
    deviation = ((ours.std**2 + theirs.std**2) / 2) ** 0.5
    return Cell(signed((ours.value - theirs.value) / deviation, 1))


def variant_differences(plan: Plan, found: Found, task: str) -> Grid | None:
    """Return every variant of a task minus the first, which is ST-FS-EB at its preset, paired by seed."""
    own, *others = [v for v in plan.variants if (task, v.key) in plan.jobs]
    quantities = plan.quantities[task]
    rows = {v.label: tuple(paired_cell(plan, found, task, v, own, q) for q in quantities) for v in others}
    rows = {label: cells for label, cells in rows.items() if any(c.value is not None for c in cells)}
    if not rows:
        return None
    note = "Mean over common seeds."
    if has_interval(cell for cells in rows.values() for cell in cells):
        note = (
            "Mean over common seeds with the 95 % interval of the paired t test; bold where it leaves out zero in "
            "favour of the row, underlined where against it. Of twenty such intervals about one leaves out zero by "
            "chance."
        )
    return Grid(
        f"{plan.what}-{task}-differences",
        f"{plan.title}, minus {own.label}: {task_label(task)}",
        ("Variant",),
        tuple(q.heading for q in quantities),
        tuple((label,) for label in rows),
        tuple(rows.values()),
        (note, *too_few(cell for cells in rows.values() for cell in cells)),
    )


def _data(plans: Sequence[Plan], found: Found) -> list[str]:
    """Name the sets that are stand-ins or subsets: the paper's figures are of others."""
    return list(dict.fromkeys(line for plan in plans for line in about_data(plan, found, plan.tasks)))


def _ours(plans: Sequence[Plan]) -> Iterator[tuple[Plan, str, Variant, Quantity]]:
    """Give every quantity of every task for which ST-FS-EB is planned, task by task."""
    for task in dict.fromkeys(task for plan in plans for task in plan.tasks):
        for plan in plans:
            own = next((v for v in plan.variants if v.key == OURS), None)
            for quantity in plan.quantities.get(task, ()) if own is not None else ():
                if own is not None:
                    yield plan, task, own, quantity


def _grid(name: str, title: str, columns: tuple[str, ...], rows: Sequence[Row], notes: tuple[str, ...]) -> Grid | None:
    if not rows:
        return None
    stubs, cells = tuple(stub for stub, _ in rows), tuple(cells[: len(columns)] for _, cells in rows)
    return Grid(name, title, STUBS, columns, stubs, cells, notes, own=columns[0])
