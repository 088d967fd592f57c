"""Records: one folder a run, `record.json` written last and atomically, so that a folder with one is complete."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.files import read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1


def new_folder(base: Path, name: str) -> Path:
    """Make and return a folder `base/name-DATE-TIME` that did not exist."""
    stamp = datetime.now(UTC).astimezone().strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        folder = base / f"{name}-{stamp}{f'-{attempt}' if attempt else ''}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise StfsebError(f"cannot write to {base}: {error.strerror}; give another folder with --out") from error
        return folder
    raise StfsebError(f"cannot find a free name for {name} in {base}")


def write_record(folder: Path, record: dict[str, Any]) -> Path:
    """Write a run's record; its folder is complete from then on."""
    path = folder / "record.json"
    write_json(path, {"format": FORMAT, **record})
    return path


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all complete runs below `folder`, in the order of their names."""
    records = []
    for path in sorted(folder.rglob("record.json")):
        record = read_json(path, "record")
        if not isinstance(record, dict) or record.get("format", 0) > FORMAT:
            raise StfsebError(f"{path} is of a newer format than this stfseb reads: upgrade stfseb")
        records.append(record)
    if not records:
        raise StfsebError(f"no record.json below {folder}: give the folder that 'stfseb compare' or 'train' wrote")
    return records
