"""Which temperatures of a task are compared: those of one definition.

A temperature T makes averaged probabilities p^(1/T); those of older runs divide the outputs of every weight sample,
before they are averaged. A row that set one beside the other would compare definitions as much as methods. Where a
task has both, what most of its runs have is compared: a single run of the other kind must not take the comparison of
all others away. Cells of the other kind are shown with a sign and are in no rank, no mean and no race.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stfseb.experiments.paper.plan import task_label
from stfseb.methods.calibrated import AVERAGE
from stfseb.report.words import counted, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stfseb.experiments.paper import Plan, Variant
    from stfseb.report.paper import Found
    from stfseb.report.records import Record

ASIDE = "§"
VIEW = "temperature"
_ONE_OUTPUT = ("map",)  # all samples are equal, and with them the two definitions
_WORDS = {  # by whether the definition is the older one
    False: "T makes averaged probabilities p^(1/T), normalised",
    True: "T divides the outputs of every weight sample, before they are averaged (runs of an earlier version)",
}


def older(record: Record) -> bool | None:
    """Tell whether a run's temperature is of the older definition; None where it has none, or one that is both."""
    part = (record.get("parts") or {}).get("temperature")
    return None if not part or record["method"] in _ONE_OUTPUT else part.get("of") != AVERAGE


def compared(plan: Plan, found: Found, task: str) -> bool | None:
    """Tell whether the older definition is the one compared on a task; None where no run has either."""
    kinds = [older(r) for v in plan.variants for r in found.runs(plan, task, v)]
    return kinds.count(True) > kinds.count(False) if {True, False} & set(kinds) else None


def one_definition(records: Sequence[Record], wanted: bool | None) -> list[Record]:
    """Return a cell's runs: where some are of the wanted definition, without those of the other."""
    other = any(older(r) is wanted for r in records) and wanted is not None
    return [r for r in records if not (other and older(r) is (not wanted))]


def apart(plan: Plan, found: Found, task: str, variant: Variant) -> bool:
    """Tell whether a cell's temperatures are not of the definition that is compared on its task."""
    if variant.view != VIEW or (wanted := compared(plan, found, task)) is None:
        return False
    return any(older(r) is (not wanted) for r in one_definition(found.runs(plan, task, variant), wanted))


def about_temperatures(plan: Plan, found: Found, tasks: Sequence[str]) -> list[str]:
    """Say what the temperatures of a table act on, and which are not compared."""
    kinds = {task: compared(plan, found, task) for task in tasks}
    names = {kind: [task_label(task) for task in tasks if kinds[task] is kind] for kind in _WORDS}
    both = all(names.values())
    lines = [f"{', '.join(names[k])}: {said}." if both else f"{said}." for k, said in _WORDS.items() if names[k]]
    for task, wanted in kinds.items():
        whole, part = _left_out(plan, found, task)
        if whole:
            who = listed(f"{label} ({counted(count, 'run')})" for label, count in whole.items())
            lines.append(
                f"{ASIDE} {task_label(task)}, {who}: {_WORDS[not wanted]}. Shown and not compared: marks are among the "
                "others of a row, as most of the task's runs are of their kind."
            )
        if part:
            who = listed(f"{counted(count, 'run')} of {label}" for label, count in part.items())
            lines.append(f"{task_label(task)}: {who} left out of the mean, with a temperature of the other kind.")
    return lines


def not_raced(plans: Sequence[Plan], found: Found, own: str) -> list[str]:
    """Say how many runs the tables of who is ahead leave out, task by task; `own` is the label of whom they are of."""
    lines = []
    for plan in plans:
        for task in plan.tasks:
            whole, part = _left_out(plan, found, task)
            if counts := whole | part:
                runs = counted(sum(counts.values()), "run")
                names = listed(f"{label} ({count})" for label, count in counts.items())
                lines.append(
                    f"{task_label(task)}: {runs} left out, as their temperatures are defined otherwise than "
                    f"those of most of the task's runs: {names}."
                    + (f" {own} being among them, the task has no rows here." if own in whole else "")
                )
    return lines


def _left_out(plan: Plan, found: Found, task: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many runs of each method are of the other definition: in cells of their own, and beside others."""
    wanted = compared(plan, found, task)
    whole: dict[str, int] = {}
    part: dict[str, int] = {}
    for variant in plan.variants:
        kinds = [older(r) for r in found.runs(plan, task, variant)]
        if wanted is not None and variant.view == VIEW and (not wanted) in kinds:
            (part if wanted in kinds else whole)[variant.label] = kinds.count(not wanted)
    return whole, part
