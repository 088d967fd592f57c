"""The part of the page that sets the paper's tables beside ours, with the runs behind each cell."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stfseb.report.found_plans import found_plans
from stfseb.report.paper import Found, paper_grids
from stfseb.report.standing import standing, variant_differences
from stfseb.report.summary import summary_grid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from stfseb.experiments.paper import Plan
    from stfseb.report.arrange import Arranged
    from stfseb.report.grid import Grid
    from stfseb.report.records import Record


def paper_section(
    records: Sequence[Record],
    tasks: Mapping[str, Arranged],
    asked: Sequence[Plan],
    missing: Mapping[str, str],
    files: dict[Path, bytes],
) -> list[dict[str, Any]]:
    """Return the tables for the page, and add their files; nothing where no run belongs to a table."""
    from markupsafe import Markup

    grids = all_grids(records, tasks, asked, missing)
    for grid in grids:
        grid_files(grid, files)
    return [
        {
            "slug": f"paper-{grid.name}",
            "title": grid.title,
            "html": Markup(shown.to_html()),
            "notes": shown.notes,
            "runs": grid.runs(),
            "files": f"tables/{grid.name}.json",
        }
        for grid in grids
        for shown in [grid.seeds_once()]
    ]


def all_grids(
    records: Sequence[Record], tasks: Mapping[str, Arranged], asked: Sequence[Plan], missing: Mapping[str, str]
) -> list[Grid]:
    """Return every table that the records have runs for; one name has one table a way of training.

    Of variants that nobody asked for and that were not run there is no row of dashes, but a note.
    """
    plans = found_plans(records, tasks, asked)
    if not plans:
        return []
    found = Found({str(r.get("id", "")): r for r in records}, missing)
    grids: list[Grid] = []
    for plan in plans:
        for grid in paper_grids(plan, found):
            spare = plan.variants_down and plan.what not in {one.what for one in asked}
            grids += [grid.rows_with_runs() if spare else grid] if not grid.empty else []
            task = grid.name.removeprefix(f"{plan.what}-")
            if plan.what == "beyond" and (beside := variant_differences(plan, found, task)) is not None:
                grids.append(beside)
    judged = standing(plans, found)
    _after(grids, ("tempered",), judged["best-tempered"])
    _after(grids, ("table1", "table2"), [*judged["held"], *judged["best"], *judged["differences"]])
    own = [plan for plan in plans if not any(plan is one for one in asked)]  # those asked for may be of other settings
    short = summary_grid(own, found, judged if len(own) == len(plans) else standing(own, found))
    return _distinct([*([short] if short is not None else []), *grids])


def _after(grids: list[Grid], names: tuple[str, ...], more: Sequence[Grid]) -> None:
    """Put tables behind the last of these names."""
    place = 1 + max((i for i, g in enumerate(grids) if g.name in names), default=-1)
    grids[place:place] = more


def grid_files(grid: Grid, files: dict[Path, bytes]) -> None:
    """Add a table's JSON, Markdown and LaTeX to the files beside the page."""
    from pathlib import Path

    base = Path("tables")
    files[base / f"{grid.name}.json"] = (json.dumps(grid.to_json(), indent=1, allow_nan=False) + "\n").encode()
    files[base / f"{grid.name}.md"] = grid.to_markdown().encode()
    files[base / f"{grid.name}.tex"] = grid.to_latex().encode()


def _distinct(grids: Sequence[Grid]) -> list[Grid]:
    """Give tables of one name numbers, so that their files do not overwrite each other."""
    from dataclasses import replace

    seen: dict[str, int] = {}
    found = []
    for grid in grids:
        seen[grid.name] = seen.get(grid.name, 0) + 1
        number = seen[grid.name]
        found.append(grid if number == 1 else replace(grid, name=f"{grid.name}-{number}"))
    return found
