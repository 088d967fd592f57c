"""From plans to pages: run what is missing, build the tables, write them and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.experiments.paper.carry_out import FAILED, Carried, carry_out, missing_of
from stfseb.experiments.paper.plan import task_label
from stfseb.files import write_bytes, write_json, write_text
from stfseb.report.page import title_for, write_report
from stfseb.report.paper import Found, paper_grids
from stfseb.report.reading import read_results, read_searches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from stfseb.experiments.paper import Plan
    from stfseb.experiments.paper.plan import Asked
    from stfseb.report.grid import Grid


@dataclass
class Made:
    """What a command made: tables to print, and lines that say what was done and where it lies."""

    grids: list[Grid] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    failed: bool = False


def reproduce(
    plans: Sequence[Plan],
    results: Path,
    *,
    announce: Callable[[str], None],
    report_only: bool = False,
    runs_only: bool = False,
    retuned: Asked | None = None,
    **how: Any,
) -> Made:
    """Carry the plans out and write their tables, figures and the report page of the whole results folder.

    With `report_only` nothing is run, with `runs_only` nothing is written but the runs.
    """
    act = _look if report_only else _run
    carried = act(plans, results, announce, how)
    if retuned is not None:
        from stfseb.experiments.paper.retuning import grid_plan, retuned_plan

        dofs = [float(v.settings["dof"]) for plan in plans if plan.what == "dof" for v in plan.variants]
        carried.join(act([grid_plan(retuned, dofs)], results, announce, how))
        chosen = retuned_plan(retuned, {str(r["id"]): r for r in _read(results)}, dofs)
        carried.join(act([chosen], results, announce, how))
        plans = [*plans, chosen]
    if runs_only:
        if not carried.there:
            raise StfsebError("no run could be made: " + "; ".join(carried.reasons))
        where = f"Runs: {results / 'runs'} (tables and page: --report-only in place of --runs-only)"
        return Made(lines=[*_said(carried), where], failed=FAILED in carried.missing.values())
    records = _read(results)
    if not records:
        raise StfsebError(f"no runs in {results} to report on: " + "; ".join(carried.reasons or ["run some first"]))
    announce(f"writing tables, figures and the page of {len(records)} {'run' if len(records) == 1 else 'runs'}")
    found = Found({str(r["id"]): r for r in records}, carried.missing)
    made = Made(failed=FAILED in carried.missing.values())
    for plan in plans:
        if plan.what.startswith("figure"):
            made.lines += _draw(plan, found, results)
        else:
            made.grids += paper_grids(plan, found)
    page = write_report(
        records, results, title_for(results), plans=plans, missing=carried.missing, searches=read_searches(results)
    )
    for grid in made.grids:
        write_json(results / "tables" / f"{grid.name}.json", grid.to_json())
        write_text(results / "tables" / f"{grid.name}.md", grid.to_markdown())
        write_text(results / "tables" / f"{grid.name}.tex", grid.to_latex())
    made.lines = [
        *_said(carried),
        *made.lines,
        f"Report: {page}",
        f"Tables (Markdown, LaTeX, and JSON with the runs behind each cell): {results / 'tables'}",
        f"Figures (PDF, PNG): {results / 'plots'}",
    ]
    return made


def _run(plans: Sequence[Plan], results: Path, announce: Callable[[str], None], how: dict[str, Any]) -> Carried:
    return carry_out(plans, results, announce=announce, **how)


def _look(plans: Sequence[Plan], results: Path, announce: Callable[[str], None], how: dict[str, Any]) -> Carried:
    del announce, how
    return missing_of(plans, results)


def _read(results: Path) -> list[dict[str, Any]]:
    return read_results(results, None if any(results.rglob("record.json")) else ())


def _draw(plan: Plan, found: Found, results: Path) -> list[str]:
    """Write the rotation figure of a plan and return a line about it."""
    from stfseb.report.shifts import rotation_figure
    from stfseb.report.style import rendered

    tasks = {task: [r for v in plan.variants for r in found.of(plan, task, v)] for task in plan.tasks}
    figure = rotation_figure({task: records for task, records in tasks.items() if records})
    if figure is None:
        return [f"{plan.what}: no runs with rotated images yet, no figure."]
    for kind in ("pdf", "png"):
        write_bytes(results / "plots" / f"{plan.what}.{kind}", rendered(figure, kind))
    absent = [task_label(task) for task, records in tasks.items() if not records]
    said = f" (no runs: {', '.join(absent)})" if absent else ""
    return [f"{plan.what}: {results / 'plots' / plan.what}.pdf{said}"]


def _said(carried: Carried) -> list[str]:
    """Say how many runs were trained now, and how many were there or came from elsewhere; of the others why not."""
    made, measured, others = len(carried.trained), len(carried.measured), len(carried.elsewhere)
    there = len(carried.there) - made - others
    line = f"{made} {_runs(made)} made now, {there} {_were(there)} there already"
    if measured:
        line += f" ({measured} of them {_were(measured)} measured now for this, not trained)"
    lines = [line + (f", {others} {_were(others)} done by another command." if others else ".")]
    gone = list(carried.missing.values())
    if gone:
        kinds = ", ".join(f"{gone.count(w)} {w}" for w in dict.fromkeys(gone))
        again = "; --retry-failed does what failed again" if FAILED in gone else ""
        lines.append(f"{len(gone)} {'run is' if len(gone) == 1 else 'runs are'} missing: {kinds}{again}.")
    return [*lines, *carried.reasons]


def _runs(count: int) -> str:
    return "run" if count == 1 else "runs"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
