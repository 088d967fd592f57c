"""The results page from records: Markdown between markers, pictures, and tables with the runs behind each cell.

A page holds blocks `<!-- generated: NAME -->` ... `<!-- end -->`; what stands between is written from a results
folder, what stands outside is left alone. Nothing but the records and searches goes in, so the page can be checked.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.experiments.paper.plan import METHODS, TASKS
from stfseb.experiments.search.outcome import read_search
from stfseb.report import headline
from stfseb.report.arrange import arranged
from stfseb.report.found_plans import TABLES, found_plans
from stfseb.report.missing import missing_words
from stfseb.report.paper import Found, paper_grids
from stfseb.report.reading import read_results
from stfseb.report.records import check, plain
from stfseb.report.results_words import commands_of, for_page, how_made
from stfseb.report.searches import search_grid
from stfseb.report.shifts import corruption_grids, rotation_figure
from stfseb.report.standing import standing, variant_differences
from stfseb.report.summary import links, summary_grid
from stfseb.report.tables import escape_markdown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from stfseb.experiments.paper import Plan
    from stfseb.report.grid import Grid
    from stfseb.report.records import Record

FIGURES = {"figure1": ("mnist", "fmnist", "cifar10"), "figure2": ("pathmnist", "organamnist")}
BLOCKS = (
    *("summary", "headline", "held", "best", "best-tempered", "differences", "corruptions"),
    *(*FIGURES, *TABLES, "searches", "missing"),
)
_ROTATED = "Rotated test images"
_BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Picture:
    """A figure of the page: how it is drawn, and the fingerprint of what is drawn."""

    draw: Callable[[], Figure | None]
    fingerprint: str


@dataclass(frozen=True)
class ResultsPage:
    """What a results folder has to say: blocks of Markdown, pictures by name, tables by name."""

    blocks: dict[str, str]
    pictures: dict[str, Picture]
    tables: dict[str, Grid]


def results_page(results: Path) -> ResultsPage:
    """Read a results folder and return its page; blocks for which there is nothing are empty.

    The page is of the paper's data sets: runs of other tasks (a first try with mini, say) are left out.
    """
    runs = results / "runs"
    records = check(read_results(runs)) if any(runs.rglob("record.json")) else []
    records = [r for r in records if r["task"] in TASKS]
    searches = [read_search(path) for path in sorted((results / "searches").glob("*/search.json"))]
    searches = [found for found in searches if found["plan"]["task"] in TASKS]
    made = ResultsPage(dict.fromkeys(BLOCKS, ""), {}, {})
    if records:
        _from_records(records, made)
    if (grid := search_grid(searches)) is not None:
        made.blocks["searches"] = _markdown(grid)
    return made


def _from_records(records: Sequence[Record], made: ResultsPage) -> None:
    tasks = arranged(records)
    found = Found({str(r["id"]): r for r in records})
    plans = found_plans(records, tasks)
    main = {task: [r for r in entry.main if plain(r["method"]) in METHODS] for task, entry in tasks.items()}
    blocks = made.blocks
    for what in TABLES:
        parts = []
        for plan in (p for p in plans if p.what == what):
            grids = [g for g in paper_grids(plan, found) if not g.empty]
            for grid in grids:
                only = [t for t in plan.tasks if grid.name == f"{what}-{t}"] if plan.variants_down else []
                kept = grid.rows_with_runs() if plan.variants_down else grid
                parts.append(_table(made, kept, found, commands_of(plan, found, only)))
                if what == "beyond" and (beside := variant_differences(plan, found, only[0])) is not None:
                    parts.append(_table(made, beside, found, ""))
        blocks[what] = "\n".join(parts)
    tables = [p for p in plans if p.what in ("table1", "table2")]
    judged = standing(plans, found)
    for name, shown in judged.items():
        blocks[name] = "\n".join(_table(made, grid, found, "") for grid in shown)
    blocks["corruptions"] = "\n".join(
        _table(made, grid, found, _main_commands(tables, found, "table2", [task]))
        for task in TASKS
        for grid in corruption_grids(main.get(task, ()))
        if grid.name != "corruption-types"  # AUROC by type: in the report
    )
    _headline(main, made, found, tables)
    _rotated(main, made, found, tables)
    filled = {what: {t for p in plans if p.what == what for t in p.tasks} for what in TABLES if blocks[what]}
    lines = missing_words(main, filled, plans, found)
    blocks["missing"] = "\n".join(["## What is missing", "", *(f"- {line}" for line in lines)]) if lines else ""
    if (short := summary_grid(plans, found, judged)) is not None:
        further = links(blocks[name] for name in ("held", "best", "table1", "table2", "tempered", "missing"))
        blocks["summary"] = _table(made, short, found, "") + f"- More: {further}\n"


def _table(made: ResultsPage, grid: Grid, found: Found, commands: str) -> str:
    """Return a table's Markdown and keep it as data; names that are taken get a number."""
    number = 2
    name = grid.name
    while name in made.tables:
        name, number = f"{grid.name}-{number}", number + 1
    made.tables[name] = replace(grid, name=name)
    ids = dict.fromkeys(run for row in grid.cells for cell in row for run in cell.runs)
    file = f"tables/{name}.json"
    if not commands:
        return _markdown(for_page(grid), f"[Runs behind each cell]({file}).")
    return _markdown(for_page(grid), how_made([found.records[i] for i in ids], commands, file))


def _markdown(grid: Grid, last: str = "") -> str:
    """Return a table under a heading of the second level, its notes as a list."""
    table = replace(grid, notes=()).to_markdown().strip().removeprefix("#")
    notes = [*(f"- {_plainly(note)}" for note in grid.notes), *([f"- {last}"] if last else [])]
    return "\n".join([table, "", *notes]) + "\n"


def _plainly(note: str) -> str:
    """Escape what Markdown would take for its own, but for code."""
    parts = note.split("`")
    return "`".join(part if i % 2 else _escaped(part) for i, part in enumerate(parts))


def _escaped(text: str) -> str:
    lead, tail = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return f"{lead}{escape_markdown(text)}{tail}" if text.strip() else text


def _headline(main: Mapping[str, Sequence[Record]], made: ResultsPage, found: Found, plans: Sequence[Plan]) -> None:
    panels = headline.headline_panels(main)
    if not headline.worth_a_figure(panels):
        return
    runs = [found.records[i] for panel in panels for mark in panel.marks for i in mark.runs]
    made.pictures["headline"] = Picture(lambda: headline.headline_figure(panels), fingerprint(headline.as_data(panels)))
    line = how_made(runs, _main_commands(plans, found, "table2", [p.task for p in panels]))
    made.blocks["headline"] = f"![{headline.TITLE}](images/headline.png)\n\n*{headline.CAPTION}*\n\n{line}\n"


def _rotated(main: Mapping[str, Sequence[Record]], made: ResultsPage, found: Found, plans: Sequence[Plan]) -> None:
    for name, tasks in FIGURES.items():
        shown = {t: [r for r in main.get(t, ()) if _angles(r)] for t in tasks}
        shown = {task: records for task, records in shown.items() if records}
        if not shown:
            continue
        data = [[r["id"], r.get("label"), _angles(r)] for records in shown.values() for r in records]
        made.pictures[name] = Picture(lambda shown=shown: rotation_figure(shown), fingerprint(data))  # type: ignore[misc]
        runs = [r for records in shown.values() for r in records]
        words = (
            "Accuracy and NLL (on a logarithmic scale) against the angle; mean over seeds, bands are one sample "
            "standard deviation. ST-FS-EB is the broad line below the others."
        )
        made.blocks[name] = (
            f"## {_ROTATED}\n\n![{_ROTATED}: {words}](images/{name}.png)\n\n*{words}*\n\n"
            f"{how_made(runs, _main_commands(plans, found, name, list(shown)))}\n"
        )


def _main_commands(plans: Sequence[Plan], found: Found, what: str, tasks: Sequence[str]) -> str:
    """Return the commands of a figure that has the runs of table 1 of these tasks."""
    named = [(replace(p, what=what), [t for t in p.tasks if t in tasks]) for p in plans if p.what == "table1"]
    return " and ".join(commands_of(plan, found, only) for plan, only in named if only)


def _angles(record: Record) -> Any:
    return ((record.get("parts") or {}).get("rotation") or {}).get("sets")


def rounded(data: Any) -> Any:
    """Return plain data with ten digits a number: the last ones may differ from one Python to the next."""
    if isinstance(data, float):
        return float(f"{data:.10g}")
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    return [rounded(value) for value in data] if isinstance(data, list | tuple) else data


def fingerprint(data: Any) -> str:
    """Return what a picture carries to say what was drawn."""
    text = json.dumps(rounded(data), sort_keys=True, separators=(",", ":"))
    return f"stfseb data {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def filled(text: str, blocks: Mapping[str, str], page: str) -> str:
    """Return a page's text with its blocks filled anew; refuse one without a place for what there is to say."""
    names = [match.group(2) for match in _BLOCK.finditer(text)]
    if len(names) != text.count("<!-- generated:") or len(names) != text.count("<!-- end -->"):
        raise StfsebError(f"{page}: every '<!-- generated: NAME -->' needs its '<!-- end -->' on a line of its own")
    for name in names:
        if name not in blocks or names.count(name) > 1:
            raise StfsebError(f"{page}: block '{name}' is not known, or there twice: one each of {', '.join(blocks)}")
    for name, content in blocks.items():
        if content and name not in names:
            raise StfsebError(f"{page} has no place for '{name}': add '<!-- generated: {name} -->' and '<!-- end -->'")

    def fill(match: re.Match[str]) -> str:
        content = blocks[match.group(2)].strip("\n")
        return f"{match.group(1)}\n{content}\n\n{match.group(4)}" if content else f"{match.group(1)}{match.group(4)}"

    return _BLOCK.sub(fill, text)
