"""Which of the paper's tables a results folder has runs for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from stfseb.data.tasks import load_task, task_names
from stfseb.experiments.paper.plan import KINDS, METHODS, Asked, make_plan
from stfseb.experiments.paper.retuning import retuned_plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stfseb.experiments.paper import Plan
    from stfseb.report.arrange import Arranged
    from stfseb.report.records import Record

RETUNED = "dof-retuned"
TABLES = tuple(
    w for what in KINDS if not what.startswith("figure") for w in (what, *([RETUNED] if what == "dof" else []))
)
_ALWAYS = ("table1", "table2")  # with runs of the presets alone; the others need runs of their own
_MEASURED = {"tempered": "temperature", "samples": "samples", "tails": "tails"}  # or a part beside the presets' runs


def found_plans(records: Sequence[Record], tasks: Mapping[str, Arranged], asked: Sequence[Plan] = ()) -> list[Plan]:
    """Return the plans of all tables that have runs, for the tasks that have them and those that were asked for."""
    by_id = {str(r.get("id")): r for r in records if r.get("job")}
    # Tables beside the main ones are shown when they have runs of their own, not for the presets' runs alone.
    presets = {str(r.get("id")) for entry in tasks.values() for r in entry.main if r["method"] in METHODS}
    at_presets = presets | {str(r["id"]) for t in tasks.values() for r in t.others if r.get("job") and _preset(r, t)}
    known = [t for t in task_names() if t in tasks and any(r.get("job") for r in tasks[t].main)]
    plans = []
    for what in TABLES:
        wanted = [p for p in asked if p.what == what]
        extra = [t for p in wanted for t in p.tasks if t not in known and t in task_names()]
        found: list[Plan] = []
        for training, context, group in [*_alike(known, tasks), *_other_ways(what, known, tasks)]:
            there = [*group, *extra]
            extra = []
            # Seeds of runs at other epochs or settings are not missing in the main tables.
            shown = [r for name, r in by_id.items() if what not in _ALWAYS or name in presets]
            plan = _plan(what, there, shown, by_id, training, context, wanted)
            own = set(by_id) - (presets if what == "efficiency" else at_presets)
            if what in _MEASURED:
                own = {name for name, r in by_id.items() if _MEASURED[what] in (r.get("parts") or {})}
            if plan is not None and what not in _ALWAYS:  # tasks, seeds and methods of its own runs, not of all
                runs = [by_id[job.name] for job in plan.all_jobs if job.name in own]
                kept = {r["task"] for r in runs} | {t for p in wanted for t in p.tasks}
                there = [t for t in there if t in kept]
                plan = _plan(what, there, runs, by_id, training, context, wanted) if runs else None
            if plan is not None and plan.present(by_id):
                found.append(plan)
        covered = [{job.name for job in plan.all_jobs} for plan in found]
        if what not in (*_ALWAYS, *_MEASURED, "efficiency"):
            found = [_same_seeds(plan, [by_id[job.name] for job in plan.all_jobs if job.name in own]) for plan in found]
        # What was asked for comes first, unless a table with more tasks, methods or seeds has all of it.
        plans += [p for p in wanted if not any({job.name for job in p.all_jobs} <= names for names in covered)] + found
    return plans


def _same_seeds(plan: Plan, own: Sequence[Record]) -> Plan:
    """Return the plan with, of each task, the seeds of the table's `own` runs there: a preset may have more.

    A mean over more seeds beside figures of one would differ by its seeds as much as by what the columns name.
    """
    seeds: dict[str, set[int]] = {}
    for record in own:
        seeds.setdefault(record["task"], set()).add(int(record.get("seed", 0)))
    cells = plan.jobs.items()
    return replace(plan, jobs={k: tuple(j for j in jobs if j.seed in seeds.get(k[0], {j.seed})) for k, jobs in cells})


def _alike(
    known: Sequence[str], tasks: Mapping[str, Arranged]
) -> list[tuple[dict[str, object], str | None, list[str]]]:
    """Return the tasks whose main runs were trained alike (the same number of epochs, the same kind of context)."""
    found: dict[str, tuple[dict[str, object], str | None, list[str]]] = {}
    for task in known:
        entry = tasks[task]
        key = json.dumps([entry.training, entry.context], sort_keys=True, default=str)
        found.setdefault(key, (entry.training, entry.context, []))[2].append(task)
    return list(found.values())


def _other_ways(
    what: str, known: Sequence[str], tasks: Mapping[str, Arranged]
) -> list[tuple[dict[str, object], str | None, list[str]]]:
    """Return other ways of training for which a table may have runs: ablations are often given fewer epochs."""
    if what in _ALWAYS or what in _MEASURED:
        return []
    if what == "efficiency":  # has epochs of its own
        return [({}, context, group) for training, context, group in _alike(known, tasks) if training]
    found: dict[str, tuple[dict[str, object], str | None, list[str]]] = {}
    for task in known:
        entry, usual = tasks[task], load_task(task).training
        for record in entry.others:
            if not record.get("job") or _preset(record, entry):
                continue
            way = {k: v for k, v in record["job"]["training"].items() if usual.get(k) != v}
            key = json.dumps([way, entry.context], sort_keys=True, default=str)
            if way != entry.training and task not in found.setdefault(key, (way, entry.context, []))[2]:
                found[key][2].append(task)
    return list(found.values())


def _preset(record: Record, entry: Arranged) -> bool:
    """Tell whether a run has the settings and the context of the main runs, however it was trained.

    So have those that ablations start from: they alone are no ablation.
    """
    job, method = record["job"], record["method"]
    same = any(r["job"]["settings"] == job["settings"] for r in entry.main if r["method"] == method)
    started = record["task"] in task_names() and load_task(record["task"]).start(method) == job["settings"]
    return (same or started) and job.get("context") == entry.context


def _plan(
    what: str,
    tasks: Sequence[str],
    runs: Iterable[Record],
    records: Mapping[str, Record],
    training: dict[str, object],
    context: str | None,
    wanted: Sequence[Plan],
) -> Plan | None:
    """Return the plan with the seeds and methods of `runs`, and of what was asked for."""
    here = [r for r in runs if r["task"] in tasks]
    seeds = {int(r.get("seed", 0)) for r in here} | {s for p in wanted for s in p.seeds}
    methods = [m for m in METHODS if any(r["method"] == m for r in here) or any(_has(p, m) for p in wanted)]
    if not tasks or not seeds:
        return None
    asked = Asked(tuple(tasks), tuple(methods) or METHODS[:1], tuple(sorted(seeds)), dict(training), context)
    return retuned_plan(asked, records) if what == RETUNED else make_plan(what, asked)


def _has(plan: Plan, method: str) -> bool:
    return any(v.method == method for v in plan.variants)
