"""What the results page says is missing: tasks, methods and seeds, whole tables, and parts of the tables shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stfseb.experiments.paper.plan import METHODS, TASKS, Asked, Variant, label_of, make_plan, task_label
from stfseb.report.paper import number_cell
from stfseb.report.results_words import other_epochs
from stfseb.report.words import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from stfseb.experiments.paper import Plan
    from stfseb.report.paper import Found
    from stfseb.report.records import Record

_SEEDS = 10  # of the paper
_MAIN = {"table1": "prediction on the test images", "table2": "telling unfamiliar images apart"}
_WHAT = {
    "tempered": "the main tables after one temperature",
    "dof": "degrees of freedom",
    "dof-retuned": "degrees of freedom at a tau chosen anew for each",
    "context-number": "number of context points",
    "context-source": "source of the context points",
    "efficiency": "training time and memory",
    "readings": "readings of the paper",
    "beyond": "beyond the paper, outlier exposure and deep ensemble among it",
    "samples": "number of Monte Carlo samples",
    "tails": "fitted tails",
}
_OF_PRESETS = ("table1", "table2", "tempered", "samples", "tails")  # measured on the main runs
_NOT_RUN, _NOT_MEASURED, _PARTLY = "not run", "not measured", "measured in part"
_NAMED = 4  # columns or rows


def missing_words(
    tasks: Mapping[str, Sequence[Record]], tables: Mapping[str, Collection[str]], plans: Sequence[Plan], found: Found
) -> list[str]:
    """Say which tasks and methods of the paper have no runs, from the main runs of each task, and which tables none.

    `tables` has the tasks of each table that has runs, as `stfseb paper` names them. Of these tables, whose plans
    are among `plans`, the columns or rows that lack runs, numbers or seeds are named, too.
    """
    tasks = {task: [r for r in records if r.get("job")] or records for task, records in tasks.items()}
    lines = []
    nothing = [task_label(task) for task in TASKS if not tasks.get(task)]
    if nothing:
        lines.append(f"No runs: {', '.join(nothing)}.")
    ran = {task: _ran(plans, found, task) for task in TASKS}
    absent = {task: [m for m in METHODS if tasks.get(task) and not ran[task][m]] for task in TASKS}
    for task, methods in absent.items():
        elsewhere = {str(r["method"]) for r in tasks.get(task, ())}  # with settings that are not the preset's
        for kind, where in ((False, ""), (True, ", at the task's presets")):
            if names := [label_of(m) for m in methods if (m in elsewhere) == kind]:
                lines.append(f"{task_label(task)}: no runs of {', '.join(names)}{where}.")
    few = [f"{task_label(task)} {len(seeds)}" for task in TASKS if 0 < len(seeds := _seeds_of(tasks, task)) < _SEEDS]
    if few:
        lines.append(f"Seeds in the main tables, of the paper's {_SEEDS}: {', '.join(few)}.")
    named = ", ".join(f"{words} (`{_named(what)}`)" for what, words in _WHAT.items() if what not in tables)
    if named:
        lines.append(f"No runs on the paper's tasks: {named}.")
    lacking: dict[str, list[str]] = {}
    for what, words in _WHAT.items():
        wanted = make_plan(what.removesuffix("-retuned"), Asked()).tasks if what in tables else ()
        for task in (t for t in wanted if tasks.get(t) and t not in tables[what]):
            lacking.setdefault(task, []).append(f"{words} (`{_named(what)}`)")
    lines += [f"No runs on {task_label(task)}: {', '.join(what)}." for task, what in lacking.items()]
    parts: dict[str, list[str]] = {}
    for plan in (p for p in plans if p.what in tables):
        for task in plan.tasks:
            if said := gaps(plan, found, task, ran.get(task, {})):
                words = (_MAIN | _WHAT)[plan.what].partition(",")[0]
                command = " ".join([_named(plan.what), *other_epochs(plan, [task])])
                parts.setdefault(task, []).append(f"{words}, {' and '.join(said)} (`{command}`)")
    ordered = sorted(parts, key=lambda task: TASKS.index(task) if task in TASKS else len(TASKS))
    return lines + [f"Missing in tables, {task_label(task)}: {'; '.join(parts[task])}." for task in ordered]


def gaps(plan: Plan, found: Found, task: str, ran: Mapping[str, int]) -> list[str]:
    """Say how many columns or rows of a table lack runs, numbers or seeds on a task.

    `ran` has the main runs of each method there; that a method has none is said of the task as a whole.
    """
    wanted = _wanted(plan, task)
    states: dict[str, list[str]] = {}
    seeds: list[tuple[str, int, int]] = []  # of whom, how many, and how many were run
    for variant in wanted:
        if plan.what in _OF_PRESETS and ran.get(variant.method) == 0:
            continue
        cells = [number_cell(plan, found, task, variant, q) for q in plan.quantities[task]]
        empty = [cell for cell in cells if cell.value is None]
        if len(empty) == len(cells):
            word = _NOT_MEASURED if plan.what in _OF_PRESETS and empty[0].text == "–" else empty[0].text
            states.setdefault(_NOT_RUN if word == "–" else word, []).append(variant.label)
        elif empty:
            states.setdefault(_PARTLY, []).append(variant.label)
        else:
            count = min(len(cell.seeds) for cell in cells)
            seeds.append((variant.label, count, ran.get(variant.method, count)))
    if plan.what in _OF_PRESETS[1:]:  # how many were run, the first table says
        states["at fewer seeds than were run"] = [label for label, count, run in seeds if count < run]
    else:
        most = max((count for _, count, _ in seeds), default=0)
        states[f"at fewer seeds than {most}"] = [label for label, count, _ in seeds if count < most]
    return [f"{len(labels)} of {len(wanted)} {word}{_names(labels)}" for word, labels in states.items() if labels]


def _wanted(plan: Plan, task: str) -> list[Variant]:
    """Return the columns or rows that the table has, or would have with all runs, on a task."""
    whole = make_plan(plan.what.removesuffix("-retuned"), Asked((task,), seeds=(0,)))
    own = {v.key: v for v in plan.variants if (task, v.key) in plan.jobs}
    planned = {v.key: own.get(v.key, v) for v in whole.variants}
    return list((planned | own).values())


def _ran(plans: Sequence[Plan], found: Found, task: str) -> dict[str, int]:
    """Return how many runs each method has in the main tables."""
    main = [p for p in plans if p.what == "table1" and task in p.tasks]
    counts = dict.fromkeys(METHODS, 0)
    return counts | {v.method: len(found.runs(plan, task, v)) for plan in main for v in plan.variants}


def _names(labels: Sequence[str]) -> str:
    """Return few names in brackets; those of many, and those that are lists themselves, have no room in a line."""
    return f" ({listed(labels)})" if len(labels) <= _NAMED and not any("," in label for label in labels) else ""


def _seeds_of(tasks: Mapping[str, Sequence[Record]], task: str) -> set[int]:
    return {int(r.get("seed", 0)) for r in tasks.get(task, ())}


def _named(what: str) -> str:
    return f"stfseb paper {what.removesuffix('-retuned')}{' --retuned' * what.endswith('-retuned')}"
