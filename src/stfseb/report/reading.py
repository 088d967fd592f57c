"""Reading a results folder: records, beside them the parts that were measured later, and searches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.experiments.records import RECORD, read_record
from stfseb.experiments.search.outcome import read_search
from stfseb.experiments.study_count import count_trials
from stfseb.files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PARTS = ("rotation", "corruption", "samples", "tails", "temperature")


def read_results(folder: Path, only: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Return the records of all complete runs below `folder` (or of those with these ids), in the order of names.

    What lies beside a record as `rotation.json`, `corruption.json` and so on is added to it under "parts", and
    `images.json` under "images".
    """
    wanted = None if only is None else set(only)
    records = []
    for path in sorted(folder.rglob(RECORD)):
        if wanted is not None and path.parent.name not in wanted:
            continue
        record = read_record(path)
        parts = {part: read_json(path.parent / f"{part}.json", part) for part in PARTS if _beside(path, part)}
        records.append({**record, "parts": parts} if parts else record)
    if not records and wanted is None:
        raise StfsebError(f"no record.json below {folder}: give the folder that 'compare', 'train' or 'paper' wrote")
    return records


@dataclass(frozen=True)
class Searches:
    """The searches of a results folder, as their workers wrote them, and those that have gone on since.

    Args:
        found: the contents of every search.json.
        ahead: by study, of those whose study.db has more: trials finished and asked for, and how many are in `found`.
    """

    found: list[dict[str, Any]] = field(default_factory=list)
    ahead: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.found or self.ahead)


def read_searches(folder: Path) -> Searches:
    """Return the searches below a folder; a search under way is not disturbed."""
    found = {path.parent: read_search(path) for path in sorted(folder.rglob("search.json"))}
    ahead = {}
    for path in sorted(folder.rglob("study.db")):
        count = count_trials(path, path.parent.name)
        written = len(found[path.parent]["trials"]) if path.parent in found else 0
        if count is not None and (count[0] > written or path.parent not in found):
            ahead[path.parent.name] = (*count, written)
    return Searches(list(found.values()), ahead)


def read_folder(folder: Path) -> tuple[list[dict[str, Any]], Searches]:
    """Return the records and the searches of a results folder that has either."""
    searches = read_searches(folder)
    there = any(folder.rglob(RECORD))
    return read_results(folder, None if there or not searches else ()), searches


def _beside(path: Path, part: str) -> bool:
    return (path.parent / f"{part}.json").exists()
