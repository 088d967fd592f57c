"""Reading a results folder: records, and beside them the parts that were measured later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.experiments.records import RECORD, read_record
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


def _beside(path: Path, part: str) -> bool:
    return (path.parent / f"{part}.json").exists()
