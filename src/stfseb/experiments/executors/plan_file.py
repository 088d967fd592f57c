"""The plan file, `RESULTS/plan.json`: what all commands together mean to do there. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.files import alone_in, read_json, remove_leftovers, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stfseb.experiments.executors.plan import Planned

PLAN = "plan.json"
FORMAT = 1


def write_plan(results: Path, jobs: Sequence[Planned]) -> None:
    """Add jobs to the results' plan; several commands may do so at once."""
    path = results / PLAN
    with alone_in(results):
        remove_leftovers(path)  # also where nothing is to be written
        before = read_plan(results)
        entries = dict(before)
        for entry in jobs:
            old = entries.get(entry.name, {})
            parts = sorted({*old.get("parts", ()), *entry.parts})
            place = entry.folder.relative_to(entry.results).as_posix()
            entries[entry.name] = {**asdict(entry.job), "folder": place, "parts": parts}
        if entries != before:
            write_json(path, {"format": FORMAT, "jobs": entries})


def read_plan(results: Path) -> dict[str, dict[str, Any]]:
    """Return the planned jobs by name; none where there is no plan."""
    path = results / PLAN
    if not path.exists():
        return {}
    content = read_json(path, "plan")
    if not isinstance(content, dict) or not isinstance(content.get("jobs"), dict):
        raise StfsebError(f"{path} is not a plan: remove it, the next command writes it again")
    if content.get("format", 0) > FORMAT:
        raise StfsebError(f"{path} is of a newer format than this stfseb reads: upgrade stfseb")
    jobs: dict[str, dict[str, Any]] = content["jobs"]
    return jobs
