"""Recognising a user's own copies of published files, by checksum or by name, and putting them in place."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from stfseb.data import placing, sets
from stfseb.data.checks import md5_of
from stfseb.data.folder import data_folder, require_writable
from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from stfseb.data.sets import DataSet, PublishedFile

Match = tuple["DataSet", "PublishedFile"]


def recognise(path: Path, only: str | None = None) -> Match | None:
    """Say which published file this is: by checksum first, then by the longest registered name that fits."""
    chosen = [sets.get(only)] if only else list(sets.all_sets().values())
    candidates = [
        (data_set, file)
        for data_set in chosen
        for file in (*data_set.files, *data_set.extra, *((data_set.archive,) if data_set.archive else ()))
    ]
    size = path.stat().st_size
    named = [match for match in candidates if match[1].name == path.name]
    if named or any(match[1].bytes == size for match in candidates):
        found = md5_of(path)
        for match in candidates:
            if found == match[1].md5 or found in match[1].earlier:
                return match
    if not named:
        return None
    longest = max(_common(path, match[1]) for match in named)
    best = [match for match in named if _common(path, match[1]) == longest]
    if len({data_set.name for data_set, _ in best}) > 1:
        names = ", ".join(sorted({data_set.name for data_set, _ in best}))
        raise StfsebError(f"'{path}' could belong to {names}, and its checksum is none of theirs: add --set NAME")
    return best[0]


def _common(path: Path, file: PublishedFile) -> int:
    """Count how many trailing names the two paths share."""
    pairs = zip(reversed(path.parts), reversed(PurePosixPath(file.path).parts), strict=False)
    count = 0
    for mine, theirs in pairs:
        if mine != theirs:
            break
        count += 1
    return count


def import_path(
    path: Path, folder: str | Path | None = None, only: str | None = None, force: bool = False
) -> list[str]:
    """Import a file, or every published file in a folder; return what was done, a line a file."""
    path = path.expanduser()
    if not path.exists():
        raise StfsebError(f"'{path}' does not exist: name a file or folder with a copy of a published set")
    found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    groups: dict[str, list[tuple[Path, PublishedFile]]] = {}
    for one in found:
        if match := recognise(one, only):
            groups.setdefault(match[0].name, []).append((one, match[1]))
    if not groups:
        known = ", ".join(sets.all_sets())
        raise StfsebError(f"nothing in '{path}' is a published file of {only or known}: see 'stfseb data list'")
    where = require_writable(data_folder(folder))
    corner = placing.incoming(where)
    corner.mkdir(exist_ok=True)
    lines = []
    for name, entries in groups.items():
        data_set = sets.get(name)
        with tempfile.TemporaryDirectory(dir=corner, prefix=f"{name}-") as temporary:
            staged = Path(temporary)
            files: list[PublishedFile] = []
            for one, file in entries:
                if file is data_set.archive:
                    if file.md5 is not None and md5_of(one) != file.md5:
                        raise StfsebError(f"'{one}' does not have the published checksum {file.md5}: get it again")
                    files += placing.unpack(one, data_set, staged)
                elif file not in files:
                    (staged / file.path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(one, staged / file.path)
                    files.append(file)
            lines += placing.place(data_set, files, staged, where, force)
    return lines
