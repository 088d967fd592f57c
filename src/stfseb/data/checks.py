"""Are the files on disk what their publishers made? By checksum where one is published, else by what they hold."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stfseb.data.folder import user_cache, writable
from stfseb.errors import StfsebError
from stfseb.files import write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stfseb.data.sets import DataSet, PublishedFile

Status = Literal["published", "earlier", "subset", "readable", "unchecked", "damaged", "missing"]
_record_lock = threading.Lock()


@dataclass(frozen=True)
class Verdict:
    """What was found about one file."""

    path: str
    status: Status
    said: str


def md5_of(path: Path) -> str:
    """Return the MD5 of a file (the checksum that publishers give; no protection against malice)."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_split(data_set: DataSet, folder: Path, split: str) -> str:
    """Read a whole split and return what must be said about it; an unreadable one is an error."""
    from stfseb.data import readers

    if not data_set.types:
        return readers.read(data_set.name, folder, split).note
    from stfseb.data.readers import cifar10_c, mnist_c

    for kind in data_set.types:
        images = cifar10_c.read(folder, kind, 1) if data_set.name == "cifar10-c" else mnist_c.read(folder, kind)
        if len(images) != 10_000:
            return f"subset: {len(images):,} of 10,000 images a type"
    return ""


def check(data_set: DataSet, folder: Path) -> list[Verdict]:
    """Check every file of a set in the data folder.

    A file that is readable but neither the published bytes nor of the published size (a subset, a repacked
    copy) is named as such; one of the published size with another checksum is damaged.
    """
    content: dict[str, str | StfsebError] = {}

    def content_of(file: PublishedFile) -> str | None:
        """Read the splits that need this file, each once; None where none of them is complete."""
        said = None
        for name, split in data_set.splits.items():
            if file not in split.files or data_set.missing(folder, name):
                continue
            if name not in content:
                try:
                    content[name] = read_split(data_set, folder, name)
                except StfsebError as error:
                    content[name] = error
            found = content[name]
            if isinstance(found, StfsebError):
                raise found
            said = "; ".join(filter(None, (said, found)))
        return said

    return [_check_file(file, folder, content_of) for file in data_set.files]


def _check_file(file: PublishedFile, folder: Path, content_of: Callable[[PublishedFile], str | None]) -> Verdict:
    path = folder / file.path
    if not path.is_file():
        return Verdict(file.path, "missing", "not on disk")
    size = path.stat().st_size
    if file.md5 is not None:
        found = md5_of(path)
        if found == file.md5:
            return Verdict(file.path, "published", f"md5 {found}, as published")
        if found in file.earlier:
            return Verdict(file.path, "earlier", f"md5 {found}, an earlier edition by its publisher")
        if size == file.bytes:
            said = f"md5 {found}, published is {file.md5}: remove it and download it again"
            return Verdict(file.path, "damaged", said)
    elif file.bytes is not None and size != file.bytes:
        said = f"{size:,} bytes, published are {file.bytes:,}: remove it and download it again"
        return Verdict(file.path, "damaged", said)
    why = "not the published bytes" if file.md5 else "no checksum is published"
    try:
        note = content_of(file)
    except StfsebError as error:
        return Verdict(file.path, "damaged", str(error))
    if note is None:
        return Verdict(file.path, "unchecked", f"{why}, and the rest of its split is missing")
    said = f"reads well, {why}{'; ' + note if note else ''}"
    return Verdict(file.path, "subset" if "subset" in note else "readable", said)


def _record(folder: Path) -> Path:
    """Where verdicts are kept: in the data folder, or in the user's cache where that is read-only."""
    if writable(folder):
        return folder / ".verified.json"
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return user_cache() / f"verified-{key}.json"


def _stamp(path: Path) -> list[int]:
    facts = path.stat()
    return [facts.st_size, facts.st_mtime_ns]


def remember(folder: Path, verdicts: list[Verdict]) -> None:
    """Keep the verdicts, so that `list` need not read gigabytes; a file that changes loses its own."""
    with _record_lock:
        kept = _remembered(folder)
        for verdict in verdicts:
            path = folder / verdict.path
            if path.is_file():
                kept[verdict.path] = {"status": verdict.status, "stamp": _stamp(path)}
        try:
            write_json(_record(folder), kept)
        except StfsebError:
            return  # a convenience only: nothing is lost but time


def recall(folder: Path, file: PublishedFile) -> Status | None:
    """Return the last verdict on a file, if it has not changed since."""
    entry = _remembered(folder).get(file.path)
    path = folder / file.path
    if not entry or not path.is_file() or entry.get("stamp") != _stamp(path):
        return None
    status: Status = entry["status"]
    return status


def _remembered(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        kept = json.loads(_record(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in kept.items() if isinstance(v, dict) and "status" in v} if isinstance(kept, dict) else {}
