"""The paper's tables from our runs: mean and deviation over seeds, ranks, the paper's figure, the runs behind."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task
from stfseb.experiments.paper.plan import TASKS, task_label
from stfseb.experiments.paper.quantities import SET_NAMES
from stfseb.report.chance import learnt_nothing, notes_of
from stfseb.report.grid import Cell, Grid
from stfseb.report.paper_numbers import Printed, errata, printed
from stfseb.report.records import shared
from stfseb.report.temperatures import ASIDE, VIEW, about_temperatures, apart, compared, one_definition
from stfseb.report.words import listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stfseb.experiments.paper import Plan, Quantity, Variant
    from stfseb.report.records import Record

_OF_THE_PAPER = ("table1", "table2", "dof", "context-number", "context-source", "efficiency")
NOT_ALONE = "not alone"  # in place of a cost
_TAILS_END = 20.0  # the largest 1/dof that evaluation/tails.py fits


@dataclass(frozen=True)
class Found:
    """What there is of a plan's runs: records by id, and why runs are missing, by id."""

    records: Mapping[str, Record]
    missing: Mapping[str, str] = field(default_factory=dict)  # "no data" or "failed", where that is known

    def runs(self, plan: Plan, task: str, variant: Variant) -> list[Record]:
        """Return the records of a cell as they are, in the order of seeds."""
        jobs = plan.jobs.get((task, variant.key), ())
        return [self.records[job.name] for job in jobs if job.name in self.records]

    def of(self, plan: Plan, task: str, variant: Variant) -> list[Record]:
        """Return the records of a cell as its variant sees them: of temperatures those of one definition."""
        runs = self.runs(plan, task, variant)
        kept = one_definition(runs, compared(plan, self, task)) if variant.view == VIEW else runs
        return [variant.seen(r) for r in kept]

    def why_not(self, plan: Plan, task: str, variant: Variant) -> str:
        """Say in a word or two why a cell has no runs."""
        jobs = plan.jobs.get((task, variant.key))
        if jobs is None:
            return "–"
        reasons = {self.missing.get(job.name, "not run") for job in jobs}
        return next((word for word in ("no data", "failed", "not run") if word in reasons), "not run")


def paper_grids(plan: Plan, found: Found) -> list[Grid]:
    """Return the tables of a plan: one, or one a task where variants are its rows."""
    if plan.variants_down:
        return [grid for task in plan.tasks if not (grid := _down(plan, found, task)).empty]
    rows = [(task, q) for task in plan.tasks for q in plan.quantities[task]]
    if plan.by_metric:
        order = {q.key: i for i, (_, q) in reversed(list(enumerate(rows)))}
        rows.sort(key=lambda row: order[row[1].key])  # stable: tasks keep their order
    variants = [v for v in plan.variants if any((task, v.key) in plan.jobs for task in plan.tasks)]
    cells = [ranked([number_cell(plan, found, task, v, q) for v in variants], q.digits, q.higher) for task, q in rows]
    titles = {task: task_label(task) for task in plan.tasks}
    stubs = [(q.heading, titles[t]) if plan.by_metric else (titles[t], q.heading) for t, q in rows]
    grid = Grid(
        plan.what,
        plan.title,
        ("Metric", "Task") if plan.by_metric else ("Task", "Metric"),
        tuple(v.label for v in variants),
        tuple(stubs),
        tuple(tuple(row) for row in cells),
        _notes(plan, found, [c for row in cells for c in row]),
        own="ST-FS-EB",
    )
    return [grid]


def _down(plan: Plan, found: Found, task: str) -> Grid:
    variants = [v for v in plan.variants if (task, v.key) in plan.jobs]
    quantities = plan.quantities[task]
    columns = [ranked([number_cell(plan, found, task, v, q) for v in variants], q.digits, q.higher) for q in quantities]
    headings = [q.heading for q in quantities]
    nearest: tuple[str, ...] = ()
    if plan.what == "readings" and any(c.paper_deviations is not None for column in columns for c in column):
        away = ranked([_distance([column[i] for column in columns]) for i in range(len(variants))], 2, False)
        columns.append(away)
        headings.append("Distance, sd ↓")
        best = [v.label for v, c in zip(variants, away, strict=True) if c.rank == 1]
        nearest = ("Distance: root mean square of the deviations from the paper's row, in its standard deviations.",)
        nearest += (f"Nearest to the paper: {'; '.join(best)}.",) if best else ()
    cells = tuple(tuple(column[i] for column in columns) for i in range(len(variants)))
    notes = (*_notes(plan, found, [c for row in cells for c in row], task), *nearest)
    stubs = tuple((v.label,) for v in variants)
    if nearest:  # the paper's row once, instead of under every one of ours
        stubs, cells = (("the paper",), *stubs), (_paper_row(columns), *(tuple(map(_bare, row)) for row in cells))
    title = task_label(task)
    return Grid(
        f"{plan.what}-{task}",
        f"{plan.title}: {title}",
        ("Variant",),
        tuple(headings),
        stubs,
        cells,
        notes,
        own=variants[0].label if variants else "",
        sortable=True,
    )


def _paper_row(columns: Sequence[Sequence[Cell]]) -> tuple[Cell, ...]:
    words = [next((line for c in column for line in c.below if line.startswith("paper ")), "") for column in columns]
    return tuple(Cell(word.removeprefix("paper ") or "–", quoted=bool(word)) for word in words)


def _bare(cell: Cell) -> Cell:
    return replace(cell, below=tuple(line for line in cell.below if not line.startswith("paper ")))


def _distance(cells: Sequence[Cell]) -> Cell:
    """Return how far a row lies from the paper's; None unless every figure of the paper has one of ours."""
    wanted = [c for c in cells if c.paper is not None and c.paper[1]]
    away = [c.paper_deviations for c in wanted if c.paper_deviations is not None]
    if not away or len(away) < len(wanted):
        return Cell("–")
    value = (sum(a * a for a in away) / len(away)) ** 0.5
    return Cell(f"{value:.2f}", value, runs=wanted[0].runs)


def number_cell(plan: Plan, found: Found, task: str, variant: Variant, quantity: Quantity) -> Cell:
    """Return one cell: mean and deviation over seeds, the paper's figure, and the runs; or why there is none."""
    records = found.of(plan, task, variant)
    paper = beside(plan, task, quantity, variant)
    theirs = None if paper is None else (paper.mean, paper.std)
    if not records:
        return Cell(found.why_not(plan, task, variant), below=_words(paper, None, quantity), paper=theirs)
    if plan.alone:  # what ran beside others has a time, and no cost
        records = [r for r in records if not shared(r)]
        if not records:
            return Cell(NOT_ALONE, below=_words(paper, None, quantity), paper=theirs)
    pairs = [(r, value) for r in records if (value := quantity.read(r)) is not None]
    if not pairs:
        return Cell(_unread(task, quantity, variant), below=_words(paper, None, quantity), paper=theirs)
    values = [value for _, value in pairs]
    mean = statistics.fmean(values)
    std = statistics.stdev(values) if len(values) > 1 else None
    collapsed = tuple(int(r.get("seed", 0)) for r, _ in pairs if learnt_nothing(r) and not plan.alone)
    median = statistics.median(values) if collapsed else None
    text = f"{mean:.{quantity.digits}f}" + ("" if std is None else f" ± {std:.{_digits(quantity)}f}")
    below = []
    ended = sum(value > 0.999 * _TAILS_END for value in values) if quantity.key.startswith("tails/") else 0
    if ended:  # no estimate but a bound, and so is the mean; how bounds vary says nothing
        text, std = f"≥ {_TAILS_END:g}" if ended == len(values) else f"≥ {mean:.{quantity.digits}f}", None
    if 0 < ended < len(values):
        below.append(f"{ended} of {len(values)} at the end of the fit's range")
    if median is not None:
        below.append(f"median {median:.{quantity.digits}f}")
    if len(values) < len(plan.seeds):
        below.append(f"{len(values)} of {len(plan.seeds)} seeds")
    below.extend(_words(paper, mean, quantity))
    other = apart(plan, found, task, variant)
    return Cell(
        text + (" †" if collapsed else "") + (f" {ASIDE}" if other else ""),
        mean,
        std,
        median,
        tuple(int(r.get("seed", 0)) for r, _ in pairs),
        collapsed,
        tuple(str(r["id"]) for r, _ in pairs),
        below=tuple(below),
        paper=theirs,
        paper_deviations=None if paper is None else paper.deviations(mean),
        apart=other,
    )


def beside(plan: Plan, task: str, quantity: Quantity, variant: Variant) -> Printed | None:
    """Return the paper's figure for a cell: what was run under the same conditions there, else none."""
    jobs = plan.jobs.get((task, variant.key), ())
    context = jobs[0].context if jobs else None
    main = "table2" if quantity.key.startswith("auroc/") else "table1"
    if plan.what in ("readings", "beyond"):
        own = plan.what == "readings" or variant.key in ("preset", "fseb", "mcdropout")
        key = "stfseb" if plan.what == "readings" or variant.key == "preset" else variant.key
        return printed(main, task, quantity.key, key) if own and context is None else None
    table = main if plan.what == "tempered" else plan.what.removesuffix("-retuned")
    if table in ("table1", "table2") and context == "train" and variant.method in ("stfseb", "fseb", "gfsvi"):
        return printed("context-source", task, quantity.key, "train") if variant.method == "stfseb" else None
    return printed(table, task, quantity.key, variant.key)


def _unread(task: str, quantity: Quantity, variant: Variant) -> str:
    """Say why runs lack a number: images that are not there, or a part that was not measured."""
    name = quantity.key.removeprefix("auroc/").partition("/")[0]
    suite = load_task(task).shifts.corruption
    measurable = suite is not None and suite.suite == name
    if measurable or variant.view or not quantity.key.startswith("auroc/"):
        return "not measured"
    return "no data"


def _words(paper: Printed | None, ours: float | None, quantity: Quantity) -> tuple[str, ...]:
    """Return the paper's figure, and in a line of its own how far ours lies from it."""
    if paper is None:
        return ()
    spread = "" if paper.std is None else f" ± {paper.std:.{_digits(quantity)}f}"
    words = f"paper {paper.mean:.{quantity.digits}f}{spread}{' ‡' if paper.note else ''}"
    away = None if ours is None else paper.deviations(ours)
    return (words,) if away is None else (words, f"{signed(away, 1)} sd")


def signed(value: float, digits: int) -> str:
    """Return a number with its sign, a real minus, and no sign for what rounds to zero."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def _digits(quantity: Quantity) -> int:
    """Deviations have three decimals, as in the paper; times and memory as many as their means."""
    return 3 if quantity.key.partition("/")[0] in ("acc", "ece", "nll", "brier", "auroc") else quantity.digits


def ranked(cells: Sequence[Cell], digits: int, higher: bool | None) -> list[Cell]:
    """Mark best and second by their printed means; equal ones share the mark, and nothing is best of one.

    Cells of runs that learnt nothing, and those that stand apart, have no rank.
    """
    shown = [None if c.value is None or c.failed or c.apart else round(c.value, digits) for c in cells]
    order = sorted({v for v in shown if v is not None}, reverse=bool(higher))
    if len(order) < 2 or higher is None:
        return list(cells)
    places = [0 if v is None else order.index(v) + 1 for v in shown]
    return [replace(cell, rank=place if place <= 2 else 0) for cell, place in zip(cells, places, strict=True)]


def _notes(plan: Plan, found: Found, cells: Sequence[Cell], only: str | None = None) -> tuple[str, ...]:
    """Say what the numbers are, which seeds collapsed, which data are subsets, and what is odd about the paper's."""
    tasks = plan.tasks if only is None else (only,)
    counts = {len(c.seeds) for c in cells if c.seeds}
    words = [] if plan.alone else ["One seed: differences of the size of seed noise mean nothing."]
    if counts and max(counts) > 1:
        range_ = f"{max(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        words = [f"Mean ± sample standard deviation over {range_} seeds."]
    shown = [q for task in tasks for q in plan.quantities[task]]
    percent = {"AUROC" if q.key.startswith("auroc/") else "Accuracy" for q in shown if q.unit == "%"}
    if percent:
        named = " and ".join(name for name in ("Accuracy", "AUROC") if name in percent)
        nats = ", NLL in nats" if any(q.key == "nll" for q in shown) else ""
        words.append(f"{named} in percent{nats}.")
    if any(c.rank for c in cells):
        words.append("Best mean bold, second underlined; arrows point to the better direction.")
    if any(c.paper for c in cells):
        words.append("sd: how far ours lies above the paper's figure, in the paper's standard deviations.")
    lines = [*([" ".join(words)] if words else []), *_about_absent(plan, tasks), *plan.notes]
    for task in tasks:
        for variant in plan.variants:
            records = found.of(plan, task, variant)
            if not plan.alone:  # a network that learnt nothing took its time all the same
                row = f"{task_label(task)}, {variant.label}"
                lines += notes_of(row, records, "counted in the mean, the median is beside it")
    if any(c.text == NOT_ALONE for c in cells):
        lines.append(
            f"{NOT_ALONE[0].upper()}{NOT_ALONE[1:]}: other runs had the device at the same time, and a time depends on "
            "them. Remove these runs' folders and start `stfseb paper efficiency` again."
        )
    if plan.what == "tempered":
        lines.extend(about_temperatures(plan, found, tasks))
    lines.extend(about_data(plan, found, tasks))
    if any(c.paper for c in cells):
        lines.extend(_about_paper(plan, tasks))
    return tuple(lines)


def _about_absent(plan: Plan, tasks: Sequence[str]) -> list[str]:
    """Say which tasks the paper does not have, under the tables that it has."""
    if plan.what.removesuffix("-retuned") not in _OF_THE_PAPER:
        return []
    ours = [task_label(task) for task in tasks if task not in TASKS]
    verb = "is" if len(ours) == 1 else "are"
    return [f"{listed(ours)} {verb} not in the paper: there are no figures to set beside these."] if ours else []


def _about_paper(plan: Plan, tasks: Sequence[str]) -> list[str]:
    """Say what is odd about the paper's figures that are shown."""
    odd: dict[str, list[str]] = {}
    for task in tasks:
        for q in plan.quantities[task]:
            for variant in plan.variants:
                paper = beside(plan, task, q, variant)
                if paper is not None and paper.note:
                    said, _, value = paper.note.partition("; without it ")
                    where = f"‡ {task_label(task)}, {variant.label}" if value else f"‡ {task_label(task)}, {q.title}"
                    odd.setdefault(f"{where}: {said}", []).extend([f"{q.title} {value}"] if value else [])
    lines = [f"{said}{'; without it ' + ', '.join(values) if values else ''}." for said, values in odd.items()]
    if plan.what == "tempered":
        lines.append("The paper's figures are of probabilities as they are, without a temperature.")
    whole = errata(plan.what.removesuffix("-retuned"), tuple(tasks))
    return [*lines, *(f"The paper's table: {note}." for note in whole)]


def about_data(plan: Plan, found: Found, tasks: Sequence[str]) -> list[str]:
    """Name the sets that are subsets or stand-ins, and where runs of a row saw different data."""
    lines: dict[str, None] = {}
    for task in tasks:
        records = [r for v in plan.variants for r in found.of(plan, task, v)]
        title = task_label(task)
        shown = {q.key.removeprefix("auroc/").partition("/")[0] for q in plan.quantities[task]}
        sets = load_task(task).ood
        for record in records:
            for note in record.get("notes") or []:
                name = str(note).partition(":")[0]
                if name not in sets or name in shown:
                    lines[f"{title}: {retold(str(note))}."] = None
            part: dict[str, Any] = (record.get("parts") or {}).get("corruption") or {}
            if part.get("suite") in shown:
                for note in part.get("notes") or []:
                    suite = str(part["suite"])
                    lines[f"{title}, {SET_NAMES.get(suite, suite)}: {retold(str(note))}."] = None
        prints = {str(((r.get("data") or {}).get("test") or {}).get("fingerprint")) for r in records}
        if len(prints) > 1:
            lines[f"{title}: the runs were tested on {len(prints)} different versions of the test images."] = None
        if plan.alone:
            machines = {str((r.get("machine") or {}).get("device")) for r in records}
            if machines:
                lines[f"{title}: measured on {' and '.join(sorted(machines))}."] = None
    return list(lines)


def retold(note: str) -> str:
    """Return a record's note as a table tells it: a reader would take "on disk" for his own disk."""
    return re.sub(r"\bas the (\S+) split is not on disk", r"as its \1 split was not at hand", note)
