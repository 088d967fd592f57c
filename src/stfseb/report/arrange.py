"""Which runs of a results folder are compared: those at the presets; all others stand apart, by what differs.

A folder may hold many kinds of runs: seeds of the presets, a table of dofs, trials of a search. Runs with
different settings are never averaged: a run that differs from the main ones says in its label how.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task, task_names
from stfseb.report.records import by_task, plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stfseb.data.tasks import Task
    from stfseb.report.records import Record


@dataclass(frozen=True)
class Arranged:
    """The runs of a task: the main ones, the others with labels of their own, and how the main were trained."""

    main: list[Record]
    others: list[Record]
    training: dict[str, Any]  # what the main runs change of the task's training, for example the epochs
    context: str | None = None


def arranged(records: Sequence[Record]) -> dict[str, Arranged]:
    """Return the records of each task, main and others; records without a job are main."""
    return {task: _arranged(task, members) for task, members in by_task(records).items()}


def _arranged(task: str, records: Sequence[Record]) -> Arranged:
    known = load_task(task) if task in task_names() else None
    jobs = [r for r in records if r.get("job")]
    if not jobs:
        return Arranged(list(records), [], _changed(known, [dict(r.get("training") or {}) for r in records]))
    presets = {} if known is None else {plain(k): v for k, v in known.presets.items()}
    usual: dict[str, dict[str, Any]] = {}  # a method's main runs: at the preset, else the most frequent
    for method in dict.fromkeys(r["method"] for r in jobs):
        own = [r["job"]["settings"] for r in jobs if r["method"] == method]
        preset = presets.get(plain(method), {})
        wanted = [] if known is None else [preset, known.start(method)]  # of ablations what they start from
        usual[method] = next((settings for settings in wanted if settings in own), _most(own))
    regular = [r for r in jobs if r["job"]["settings"] == usual[r["method"]]]
    contexts = [r["job"].get("context") for r in regular]
    context = None if None in contexts else _most(contexts)
    ways = [r["job"]["training"] for r in regular if r["job"].get("context") == context]
    ways.sort(key=lambda way: -int(way.get("epochs", 0)))  # of as many runs the longer: a few epochs measure times
    training: dict[str, Any] = known.training if known is not None and known.training in ways else _most(ways)
    newest = max(jobs, key=lambda r: float(r.get("started") or 0))["job"].get("definition")
    base = {"settings": usual, "training": training, "context": context, "definition": newest}
    main: list[Record] = []
    others: list[Record] = []
    for record in records:
        method = record["method"]
        words = _differences(record, base) if record.get("job") else []
        if words:
            others.append(_named(record, words))
        elif record.get("job") and plain(method) in presets:
            main.append(_named(record, _changes(presets[plain(method)], usual[method])))
        else:
            main.append(record)
    return Arranged(main, others, _changed(known, [training]), context)


def _changed(known: Task | None, ways: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what runs that were all trained alike change of the task's training."""
    if known is None or any(way != ways[0] for way in ways):
        return {}
    return {k: v for k, v in ways[0].items() if known.training.get(k) != v}


def _differences(record: Record, base: Mapping[str, Any]) -> list[str]:
    job = record["job"]
    words = _changes(base["settings"][record["method"]], job["settings"])
    words += _changes(base["training"], job["training"])
    if job.get("context") != base["context"]:
        words.append(f"context {job.get('context') or 'of the task'}")
    if job.get("definition") != base["definition"]:
        words.append("task file as it was")
    return words


def _changes(base: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*base, *own])
    return [f"{n.replace('_', ' ')} {own.get(n, 'by default')}" for n in names if base.get(n) != own.get(n)]


def _named(record: Record, words: Sequence[str]) -> Record:
    """Return the record with what differs in its label."""
    if not words:
        return record
    return {**record, "label": f"{record.get('label') or record['method']}, {', '.join(words)}"}


def _most(values: Sequence[Any]) -> Any:
    """Return the most frequent value, the first of equals."""
    texts = [json.dumps(v, sort_keys=True, default=str) for v in values]
    return values[texts.index(Counter(texts).most_common(1)[0][0])]
