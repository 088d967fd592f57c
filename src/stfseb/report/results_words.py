"""What the results page says beside its numbers: how a table was made, in one line, and why a cell is empty."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task
from stfseb.experiments.paper.plan import OWN_METHODS, Asked, make_plan, task_label
from stfseb.report.grid import MISSING, Cell, Grid
from stfseb.report.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stfseb.experiments.jobs import Job
    from stfseb.experiments.paper import Plan
    from stfseb.report.paper import Found
    from stfseb.report.records import Record


def for_page(grid: Grid) -> Grid:
    """Return the grid with a dash for every number that is not there, its reason below, and seeds named once.

    The line under the table says how many seeds a task has; where cells that are compared differ, each says it.
    """
    grid = grid.seeds_once()
    groups = [grid.cells] if len(grid.stubs) == 1 else [(row,) for row in grid.cells]  # what is compared
    cells: list[tuple[Cell, ...]] = []
    for rows in groups:
        uneven = len({len(c.seeds) for row in rows for c in row if c.seeds}) > 1
        cells += [tuple(_cell(c, uneven) for c in row) for row in rows]
    return replace(grid, cells=tuple(cells))


def _cell(cell: Cell, uneven: bool) -> Cell:
    below = tuple(line for line in cell.below if not (" of " in line and line.endswith(" seeds")))
    if uneven and cell.seeds and not any(line.endswith(" seeds") for line in below):
        below = (counted(len(cell.seeds), "seed"), *below)
    if cell.value is None and cell.text in MISSING:
        return replace(cell, text="—", below=below if cell.text in "–—" else (cell.text, *below))
    return replace(cell, below=below)


def how_made(records: Sequence[Record], commands: str, file: str = "") -> str:
    """Return a line: the commands, how many runs with which seeds, where, and with which code."""
    by_task: dict[str, set[int]] = {}
    for record in records:
        by_task.setdefault(str(record["task"]), set()).add(int(record.get("seed", 0)))
    seeds = {task: _numbers(found) for task, found in by_task.items()}
    same = len(set(seeds.values())) == 1
    said = next(iter(seeds.values())) if same else "; ".join(f"{task_label(t)} {s}" for t, s in seeds.items())
    machines = sorted({str((r.get("machine") or {}).get("device", "machine not recorded")) for r in records})
    code = sorted({code_words(r.get("code") or {}) for r in records})
    words = [commands, f"{len(records)} run{'s' * (len(records) != 1)}", f"seeds {said}", ", ".join(machines)]
    words.append(f"stfseb {', '.join(code[:4])}{f' and {len(code) - 4} more' if len(code) > 4 else ''}")
    return "Made by " + " · ".join([*words, *([f"[runs behind each cell]({file})"] if file else [])]) + "."


def _numbers(found: Iterable[int]) -> str:
    seeds = sorted(found)
    whole = seeds == list(range(seeds[0], seeds[-1] + 1)) and len(seeds) > 2
    return f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds))


def code_words(code: Mapping[str, Any]) -> str:
    """Return a version and its commit in words."""
    commit = code.get("commit")
    # An archive cannot tell whether its files were changed after it was unpacked.
    changed = {True: ", modified", None: ", unpacked archive"}.get(code.get("modified"), "")
    return f"{code.get('version', 'version not recorded')}{f' ({commit[:9]}{changed})' if commit else ''}"


def commands_of(plan: Plan, found: Found, tasks: Sequence[str] = ()) -> str:
    """Return the commands that make a plan's table (of some `tasks`), one for all tasks that have the same seeds.

    Where a table takes rows alone (`--rows`), those that have seeds of their own have a command of their own.
    """
    together: dict[tuple[tuple[int, ...], tuple[str, ...]], list[str]] = {}
    for task in tasks or plan.tasks:
        seeds = {v.key: tuple(int(r.get("seed", 0)) for r in found.of(plan, task, v)) for v in plan.variants}
        counts = Counter(s for s in seeds.values() if s)  # some may have more seeds than what stands beside them
        for k, own in enumerate(sorted(counts, key=lambda s: (-counts[s], -len(s)))):
            rows = tuple(key for key, s in seeds.items() if s == own) if k and plan.what in OWN_METHODS else ()
            if not k or rows:
                together.setdefault((own, rows), []).append(task)
    return " and ".join(f"`{_command(plan, names, *which)}`" for which, names in together.items())


def _command(plan: Plan, tasks: Sequence[str], seeds: Sequence[int], rows: Sequence[str] = ()) -> str:
    what = plan.what.removesuffix("-retuned")
    words = ["stfseb paper", what, "--tasks", ",".join(tasks)]
    methods = list(dict.fromkeys(v.method for v in plan.variants))
    usual = dict.fromkeys(v.method for v in make_plan(what, Asked(tuple(tasks), seeds=(0,))).variants)
    if what not in OWN_METHODS and methods != list(usual):
        words += ["--methods", ",".join(methods)]
    words += ["--rows", ",".join(rows)] if rows else []
    if what != "efficiency":
        listed = ",".join(map(str, seeds)) + "," * (len(seeds) == 1)
        words += ["--seeds", str(len(seeds)) if list(seeds) == list(range(len(seeds))) else listed]
    words += other_epochs(plan, tasks)
    contexts = {j.context for j in _free(plan, tasks) if j.context}
    words += ["--context", str(contexts.pop())] if len(contexts) == 1 else []
    return " ".join([*words, *(["--retuned"] if plan.what != what else [])])


def other_epochs(plan: Plan, tasks: Sequence[str]) -> list[str]:
    """Return the option that a plan's command has where its runs are shorter or longer than the tasks' own."""
    jobs = _free(plan, tasks)
    epochs = {j.training["epochs"] for j in jobs if j.training["epochs"] != load_task(j.task).training["epochs"]}
    return ["--epochs", str(epochs.pop())] if len(epochs) == 1 else []


def _free(plan: Plan, tasks: Sequence[str]) -> list[Job]:
    """Return the runs whose training and context are those that were asked for."""
    free = [v for v in plan.variants if v.context is None and not v.training]
    return [job for v in free for task in tasks for job in plan.jobs.get((task, v.key), ())]
