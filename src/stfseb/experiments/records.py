"""Records: one folder a run, `record.json` written last and atomically, so that a folder with one is complete.

Records are kept by the hundred, so they are small: the gallery of a run's images lies beside its record in
`images.json`, and may be left out when results are copied.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.files import read_json, write_json, write_text

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
RECORD, IMAGES = "record.json", "images.json"


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
    """Write a run's record, its `images` to a file of their own; its folder is complete from then on."""
    if record.get("images"):
        write_json(folder / IMAGES, record["images"])
    kept = {"format": FORMAT, **{key: value for key, value in record.items() if key != "images"}}
    # A line an entry: a third of the size of indented lists, and differences between records can still be read.
    lines = [f"{json.dumps(key)}: {_compact(value)}" for key, value in kept.items()]
    path = folder / RECORD
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def read_record(path: Path) -> dict[str, Any]:
    """Read a record, with the images that lie beside it (those of older records are in them)."""
    record = read_json(path, "record")
    if not isinstance(record, dict) or record.get("format", 0) > FORMAT:
        raise StfsebError(f"{path} is of a newer format than this stfseb reads: upgrade stfseb")
    beside = path.with_name(IMAGES)
    return {**record, "images": read_json(beside, "images")} if beside.exists() else record


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
