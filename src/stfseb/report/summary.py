"""What a reader wants first, task by task: ST-FS-EB's figures, who is best beside it, and how much of it holds.

Every number comes from what makes the tables below it: means from `number_cell`, the best other method from the
races, counts from the rows of the tables of what was held and of who is ahead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stfseb.data.tasks import load_task
from stfseb.experiments.paper.plan import TASKS, task_label
from stfseb.experiments.paper.quantities import SET_NAMES, Quantity
from stfseb.report.differences import OURS, has_interval
from stfseb.report.grid import Cell, Grid
from stfseb.report.paper import number_cell
from stfseb.report.records import common_sets, mean_auroc
from stfseb.report.standing import left_out, race_of
from stfseb.report.words import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stfseb.experiments.paper import Plan, Variant
    from stfseb.report.paper import Found
    from stfseb.report.records import Record

TITLE = "In short"
_FIGURES = ("acc", "nll", "ece")
_TOLD = "told from chance"
_COUNTS = ("Held", "Best or level", "Behind")


@dataclass(frozen=True)
class MeanAuroc(Quantity):
    """The AUROC of a run as the mean over unfamiliar sets, as the headline figure has it."""

    sets: tuple[str, ...] = ()

    def read(self, record: Record) -> float | None:
        """Return the mean in percent, None where there are no sets or the run lacks one."""
        whole = self.sets and all(f"auroc/{name}" in record["metrics"] for name in self.sets)
        return self.scale * mean_auroc(record, self.sets) if whole else None


def mean_of(sets: Sequence[str]) -> MeanAuroc:
    """Return the quantity of these sets."""
    return MeanAuroc("auroc/mean", "AUROC, mean", "%", True, 100.0, 2, tuple(sets))


def summary_grid(plans: Sequence[Plan], found: Found, judged: Mapping[str, Sequence[Grid]]) -> Grid | None:
    """Return a row for each of the paper's tasks, from the plans of the main tables and the tables that judge them."""
    main = [p for p in plans if p.what == "table1" and any(v.key == OURS for v in p.variants)]
    rows: dict[str, tuple[Cell, ...]] = {}
    sets: dict[str, tuple[str, ...]] = {}
    absent: dict[str, None] = {}
    for plan, task in ((p, t) for p in main for t in p.tasks if t in TASKS):
        own = next(v for v in plan.variants if v.key == OURS)
        sets[task] = common_sets(load_task(task).ood, found.of(plan, task, own))
        by_key = {q.key: q for q in plan.quantities[task]}
        quantities = (*(by_key[key] for key in _FIGURES), mean_of(sets[task]))
        cells = tuple(_figure(plan, found, task, own, quantity) for quantity in quantities)
        if any(cell.value is not None for cell in cells):
            rows[task] = (*cells, *_counts(judged, task_label(task)))
            absent |= dict.fromkeys(_absent(plan, found, task, own, quantities))
    if not rows:
        return None
    headings = ("Accuracy ↑", "NLL ↓", "ECE ↓", "AUROC, mean ↑", *_COUNTS)
    stubs = tuple((task_label(task), counted(max(len(c.seeds) for c in cells), "seed")) for task, cells in rows.items())
    notes = (*_notes({task: sets[task] for task in rows}, judged, tuple(rows.values())), *absent)
    return Grid("summary", TITLE, ("Task", "Over"), headings, stubs, tuple(rows.values()), notes)


def _figure(plan: Plan, found: Found, task: str, own: Variant, quantity: Quantity) -> Cell:
    """Return ST-FS-EB's cell, bold where it is best or level, and below it the best other method."""
    ours = replace(number_cell(plan, found, task, own, quantity), below=(), rank=0, paper=None, paper_deviations=None)
    race = race_of(plan, found, task, own, quantity)
    if race is None:
        return ours
    place = "best: " if race.ahead < 0 else "level: " if race.ahead == 0 else "next: "
    seeds = () if race.theirs.seeds == ours.seeds else (f"over {counted(len(race.theirs.seeds), 'seed')}",)
    below = (place + race.rival.label, race.theirs.text, *seeds)
    return replace(ours, rank=1 if race.ahead >= 0 else 0, below=below)


def _absent(plan: Plan, found: Found, task: str, own: Variant, quantities: Iterable[Quantity]) -> list[str]:
    races = [race_of(plan, found, task, own, quantity) for quantity in quantities]
    return [f"{task_label(task)}: {who}." for race in races if race is not None for who in left_out(race, plan)]


def _counts(judged: Mapping[str, Sequence[Grid]], task: str) -> tuple[Cell, ...]:
    """Return in how many cells the paper's figure is held, and in how many rows ST-FS-EB is best, and is not."""
    held = [row[-1].text == "held" for row in _rows(judged, "held", task)]
    best, behind = _rows(judged, "best", task), _rows(judged, "best-behind", task)
    total = len(best) + len(behind)
    return (
        Cell(f"{sum(held)} of {len(held)}" if held else "–"),
        *(Cell(f"{len(side)} of {total}", below=_sure(side, mark)) if total else Cell("–")
          for side, mark in ((best, 1), (behind, 2))),
    )  # fmt: skip


def _rows(judged: Mapping[str, Sequence[Grid]], name: str, task: str | None = None) -> list[tuple[Cell, ...]]:
    """Return the rows of a table that judges, of one task or of all of the paper's."""
    labels = {task_label(t) for t in TASKS} if task is None else {task}
    grids = [grid for grid in judged.get(name.partition("-")[0], ()) if grid.name == name]
    return [cells for grid in grids for stub, cells in zip(grid.rows, grid.cells, strict=True) if stub[0] in labels]


def _sure(rows: Sequence[tuple[Cell, ...]], mark: int) -> tuple[str, ...]:
    """Say in how many rows the interval of the difference leaves out zero; nothing where no row has an interval."""
    if not has_interval(cells[2] for cells in rows):
        return ()
    return (f"{sum(cells[2].rank == mark for cells in rows) or 'none'} {_TOLD}",)


def _notes(
    sets: Mapping[str, Sequence[str]], judged: Mapping[str, Sequence[Grid]], rows: Sequence[tuple[Cell, ...]]
) -> list[str]:
    means = [
        f"{task_label(task)}: {listed(SET_NAMES.get(n, n) for n in names)}" for task, names in sets.items() if names
    ]
    over = f" AUROC: mean over unfamiliar sets ({'; '.join(means)}), corrupted images not among them." if means else ""
    spread = " ± sample standard deviation" if any(cell.std is not None for row in rows for cell in row) else ""
    lines = [
        (
            f"ST-FS-EB's mean{spread} over seeds, below it the best other method of those run, picked after the fact. "
            f"Bold: best or level by the printed means. Accuracy and AUROC in percent, NLL in nats.{over}"
        )
    ]
    held = [row[-1].text == "held" for row in _rows(judged, "held")]
    if held:
        lines.append(
            f"Held: of the paper's cells for ST-FS-EB ({sum(held)} of {len(held)} in all), those in which ours is at "
            "least as good as the paper's mean, or worse by no more than one of its standard deviations."
        )
    best, behind = _rows(judged, "best"), _rows(judged, "best-behind")
    if best or behind:
        sure = any(line.endswith(_TOLD) for row in rows for cell in row for line in cell.below)
        told = " Told from chance: the 95 % interval of the paired difference leaves out zero." if sure else ""
        lines.append(
            f"Best or level ({len(best)} of {len(best) + len(behind)} in all), and behind: rows of the two main "
            f"tables, a row for each unfamiliar set and severity; reference rows are not counted.{told}"
        )
    if any("†" in line for row in rows for cell in row for line in (cell.text, *cell.below)):
        lines.append("† runs that learnt nothing are in the mean; the tables below name them.")
    return lines


def links(blocks: Iterable[str]) -> str:
    """Return links to the tables of these blocks, by their headings."""
    titles = dict.fromkeys(title for block in blocks for title in re.findall(r"^## (.+)$", block, re.MULTILINE))
    return " · ".join(f"[{title}](#{anchor(title)})" for title in titles)


def anchor(title: str) -> str:
    """Return the anchor that a heading has on the site and on the pages of a repository."""
    return re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-")
