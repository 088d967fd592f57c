"""What the results page says beside its numbers: how a table was made, what is missing, what searches chose."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task, task_names
from stfseb.experiments.paper.plan import METHODS, TASKS, label_of, task_label
from stfseb.report.grid import MISSING, Cell, Grid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stfseb.experiments.paper import Plan
    from stfseb.report.paper import Found
    from stfseb.report.records import Record

_SEEDS = 10  # of the paper
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
_RULES = {"paper": "the paper's", "ours": "ours"}


def for_page(grid: Grid) -> Grid:
    """Return the grid with a dash for every number that is not there, its reason below, and seeds named once.

    The line under the table says how many seeds a task has; where cells that are compared differ, each says it.
    """
    groups = [grid.cells] if len(grid.stubs) == 1 else [(row,) for row in grid.cells]  # what is compared
    cells: list[tuple[Cell, ...]] = []
    for rows in groups:
        uneven = len({len(c.seeds) for row in rows for c in row if c.seeds}) > 1
        cells += [tuple(_cell(c, uneven) for c in row) for row in rows]
    return replace(grid, cells=tuple(cells))


def _cell(cell: Cell, uneven: bool) -> Cell:
    below = tuple(line for line in cell.below if not (" of " in line and line.endswith(" seeds")))
    if uneven and cell.seeds and not any(line.endswith(" seeds") for line in below):
        below = (_seeds(len(cell.seeds)), *below)
    if cell.value is None and cell.text in MISSING:
        return replace(cell, text="—", below=below if cell.text in "–—" else (cell.text, *below))
    return replace(cell, below=below)


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def how_made(records: Sequence[Record], commands: str, file: str = "") -> str:
    """Return a line: the commands, how many runs with which seeds, where, and with which code."""
    by_task: dict[str, set[int]] = {}
    for record in records:
        by_task.setdefault(str(record["task"]), set()).add(int(record.get("seed", 0)))
    seeds = {task: _numbers(found) for task, found in by_task.items()}
    same = len(set(seeds.values())) == 1
    said = next(iter(seeds.values())) if same else "; ".join(f"{task_label(t)} {s}" for t, s in seeds.items())
    machines = sorted({str((r.get("machine") or {}).get("device", "machine not recorded")) for r in records})
    code = sorted({_code(r.get("code") or {}) for r in records})
    words = [commands, f"{len(records)} run{'s' * (len(records) != 1)}", f"seeds {said}", ", ".join(machines)]
    words.append(f"stfseb {', '.join(code[:4])}{f' and {len(code) - 4} more' if len(code) > 4 else ''}")
    return "Made by " + " · ".join([*words, *([f"[runs behind each cell]({file})"] if file else [])]) + "."


def _numbers(found: Iterable[int]) -> str:
    seeds = sorted(found)
    whole = seeds == list(range(seeds[0], seeds[-1] + 1)) and len(seeds) > 2
    return f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds))


def _code(code: Mapping[str, Any]) -> str:
    commit = code.get("commit")
    # An archive cannot tell whether its files were changed after it was unpacked.
    changed = {True: ", modified", None: ", unpacked archive"}.get(code.get("modified"), "")
    return f"{code.get('version', 'version not recorded')}{f' ({commit[:9]}{changed})' if commit else ''}"


def commands_of(plan: Plan, found: Found, tasks: Sequence[str] = ()) -> str:
    """Return the commands that make a plan's table (of some `tasks`), one for all tasks that have the same seeds."""
    together: dict[tuple[int, ...], list[str]] = {}
    for task in tasks or plan.tasks:
        seeds = [tuple(int(r.get("seed", 0)) for r in found.of(plan, task, v)) for v in plan.variants]
        counts = Counter(s for s in seeds if s)  # a preset may have more seeds than the ablations beside it
        if counts:
            together.setdefault(max(counts, key=lambda s: (counts[s], len(s))), []).append(task)
    return " and ".join(f"`{_command(plan, names, seeds)}`" for seeds, names in together.items())


def _command(plan: Plan, tasks: Sequence[str], seeds: Sequence[int]) -> str:
    what = plan.what.removesuffix("-retuned")
    words = ["stfseb paper", what, "--tasks", ",".join(tasks)]
    methods = list(dict.fromkeys(v.method for v in plan.variants))
    if what in ("table1", "table2", "figure1", "figure2", "efficiency", "tempered") and methods != list(METHODS):
        words += ["--methods", ",".join(methods)]
    if what != "efficiency":
        listed = ",".join(map(str, seeds)) + "," * (len(seeds) == 1)
        words += ["--seeds", str(len(seeds)) if list(seeds) == list(range(len(seeds))) else listed]
    free = [v for v in plan.variants if v.context is None and not v.training]
    jobs = [job for v in free for task in tasks for job in plan.jobs.get((task, v.key), ())]
    epochs = {j.training["epochs"] for j in jobs if j.training["epochs"] != load_task(j.task).training["epochs"]}
    words += ["--epochs", str(epochs.pop())] if len(epochs) == 1 else []
    contexts = {j.context for j in jobs if j.context}
    words += ["--context", str(contexts.pop())] if len(contexts) == 1 else []
    return " ".join([*words, *(["--retuned"] if plan.what != what else [])])


def missing_words(tasks: Mapping[str, Sequence[Record]], without: Sequence[str] = ()) -> list[str]:
    """Say which tasks and methods of the paper have no runs, from the main runs of each task, and which tables none.

    `without` has the tables that have no run, as `stfseb paper` names them.
    """
    lines = []
    nothing = [task_label(task) for task in TASKS if not tasks.get(task)]
    if nothing:
        lines.append(f"No runs: {', '.join(nothing)}.")
    for task in TASKS:
        absent = [label_of(m) for m in METHODS if tasks.get(task) and m not in {r["method"] for r in tasks[task]}]
        if absent:
            lines.append(f"{task_label(task)}: no runs of {', '.join(absent)}.")
    few = [f"{task_label(task)} {len(seeds)}" for task in TASKS if 0 < len(seeds := _seeds_of(tasks, task)) < _SEEDS]
    if few:
        lines.append(f"Seeds in the main tables, of the paper's {_SEEDS}: {', '.join(few)}.")
    if without:
        named = ", ".join(f"{_WHAT[w]} (`{_named(w)}`)" for w in without if w in _WHAT)
        lines.append(f"No runs on the paper's tasks: {named}.")
    return lines


def _seeds_of(tasks: Mapping[str, Sequence[Record]], task: str) -> set[int]:
    return {int(r.get("seed", 0)) for r in tasks.get(task, ())}


def _named(what: str) -> str:
    return f"stfseb paper {what.removesuffix('-retuned')}{' --retuned' * what.endswith('-retuned')}"


def search_grid(searches: Sequence[Mapping[str, Any]]) -> Grid | None:
    """Return what both rules chose in every search, and whether it is the preset now."""
    if not searches:
        return None
    order = {name: place for place, name in enumerate(task_names())}
    known = {name: place for place, name in enumerate(METHODS)}
    ranked = sorted(
        searches,
        key=lambda s: (order.get(s["plan"]["task"], 99), known.get(s["plan"]["method"], 99), str(s["study"])),
    )
    rows, cells = [], []
    for found in ranked:
        for rule, choice in found["choices"].items():
            rows.append((_task(found), label_of(found["plan"]["method"]), _RULES.get(rule, rule)))
            cells.append(_choice(found, choice))
    columns = (
        "Trials",
        "Chosen",
        "Settings",
        "Validation NLL ↓",
        "At one T ↓",
        "ACC ↑",
        "AUROC, held-back context ↑",
        "Preset",
    )
    notes = (
        (
        "On validation images, and context images held back from training; no test image and no unfamiliar set was "
        "looked at. At one T: NLL after the temperature fitted on the validation images; the AUROC is after it too. "
        "Preset: whether the task's preset has these settings now."
        ),
        *_grid_ends(ranked),
        *(f"{found['study']}: {_trials(found)}; `{search_command(found)}`; stfseb {_code(found.get('code') or {})}."
          for found in ranked),
    )  # fmt: skip
    return Grid("searches", "Searches", ("Task", "Method", "Rule"), columns, tuple(rows), tuple(cells), notes)


def _task(found: Mapping[str, Any]) -> str:
    task = str(found["plan"]["task"])
    return task_label(task) if task in task_names() else task


def _choice(found: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[Cell, ...]:
    different, space = _different(found), str(found["plan"]["space"])
    repeated = (f"{different} different",) if different < len(found["trials"]) else ()
    count = Cell(str(len(found["trials"])), below=(*repeated, space, _epochs(found)))
    trial = next((t for t in found["trials"] if t["index"] == choice["trial"]), None)
    if trial is None:
        return (count, Cell("—", below=(str(choice["why"]),)), *[Cell("—")] * 6)
    m = trial["metrics"]
    auroc = m.get("tempered_auroc")
    settings = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in trial["params"].items())
    task = found["plan"]["task"]
    preset = load_task(task).presets.get(found["plan"]["method"]) if task in task_names() else None
    return (
        count,
        Cell(f"trial {trial['index']}"),
        Cell(settings),
        Cell(f"{trial['nll']:.4f}", trial["nll"]),
        Cell(f"{m['tempered_nll']:.4f}", m["tempered_nll"]),
        Cell(f"{100 * m['accuracy']:.2f}", m["accuracy"]),
        Cell("—" if auroc is None else f"{100 * auroc:.2f}", auroc),
        Cell("yes" if preset == choice["settings"] else "no"),
    )


def _epochs(found: Mapping[str, Any]) -> str:
    epochs = found["plan"]["training"]["epochs"]
    return f"{epochs} epoch{'s' * (epochs != 1)}"


def _grid_ends(searches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the chosen values that are the first or last of what could be drawn: a better one may lie beyond."""
    found: dict[str, None] = {}
    for search in searches:
        for rule, choice in search["choices"].items():
            trial = next((t for t in search["trials"] if t["index"] == choice["trial"]), None)
            for name, value in (trial or {}).get("params", {}).items():
                drawn = [v for v in search["plan"].get("choices", {}).get(name, ()) if isinstance(v, float)]
                if drawn and value in (min(drawn), max(drawn)):
                    who = f"{_task(search)}, {label_of(search['plan']['method'])}, {_epochs(search)}"
                    found[f"{who}, {_RULES.get(rule, rule)}: {name} {value:g}"] = None
    return [f"Chosen at an end of the grid: {'; '.join(found)}."] if found else []


def _trials(found: Mapping[str, Any]) -> str:
    counts = {name: n for name, n in found["counts"].items() if n and name != "repeats"}
    done, asked = len(found["trials"]), found["asked"]
    ends = ", ".join(f"{n} {name}" for name, n in counts.items())
    different = _different(found)
    drawn = f", {different} different settings" if different < done else ""  # a draw that came before is not trained
    return f"{done if done == asked else f'{done} of {asked}'} trials ({ends}{drawn})"


def _different(found: Mapping[str, Any]) -> int:
    return len({json.dumps(trial["params"], sort_keys=True) for trial in found["trials"]})


def search_command(found: Mapping[str, Any]) -> str:
    """Return the command that makes a search."""
    plan = found["plan"]
    words = ["stfseb search", plan["task"], "--method", plan["method"], "--trials", str(found["asked"])]
    words += ["--space", plan["space"]] if plan["space"] != "paper" else []
    if plan["task"] in task_names() and plan["training"]["epochs"] != load_task(plan["task"]).training["epochs"]:
        words += ["--epochs", str(plan["training"]["epochs"])]
    words += ["--seed", str(plan["seed"])] if plan["seed"] else []
    return " ".join([*words, *(["--context", plan["context"]] if plan["context"] else [])])
